//! How long exchanges took once all who take part had come to them.

use super::Profile;
use super::named::NamedCommands;
use crate::executor::peer;
use ir::program::{Action, Channel, Collective, Job, ProgramPhase};
use std::collections::BTreeMap;

/// An exchange that all who take part were timed at.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchanged<'a> {
    /// None of a message.
    pub kind: Option<Collective>,
    /// The members of the group in rank order; of a message, its sender and its receiver.
    pub ranks: Vec<u64>,
    /// Bytes of the message, or of a part ([`Collective::parts`]).
    pub bytes: u64,
    /// The command of the first of its ranks, or of who received it.
    pub rank: u64,
    /// The command itself; of a message, its receive.
    pub action: &'a Action,
    /// From the time at which the last had come until ranks went on, the mean. Of a message what its sender took, and
    /// its receiver, if that came when all was sent: else it copies while the other one does.
    pub seconds: Vec<f64>,
}

/// One rank's part in an exchange.
struct Participation<'a> {
    rank: u64,
    action: &'a Action,
    start: u64,
    end: u64,
}

/// What tells those apart that meet: the members of a group, or sender, receiver and channel.
type ExchangeKey = (Vec<u64>, Option<Channel>);

/// All exchanges of the steps that were timed, on ranks whose clocks are one.
///
/// The n-th exchange of some members is the n-th of each of them. A group of one rank exchanges nothing.
pub fn exchanges<'a>(job: &'a Job, profile: &Profile) -> Vec<Exchanged<'a>> {
    let names = NamedCommands::new(job);
    let mut met: BTreeMap<ExchangeKey, Vec<Vec<Participation>>> = BTreeMap::new();
    for (rank, recorded) in (0..).zip(&profile.ranks) {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        let groups: Vec<Vec<u64>> = program.groups.iter().map(|g| g.members(&job.mesh, rank)).collect();
        let mut own: BTreeMap<(ExchangeKey, bool), usize> = BTreeMap::new();
        let mut ran: Vec<_> = recorded.ran.iter().filter(|r| r.at.phase != ProgramPhase::Eval).collect();
        ran.sort_by_key(|r| r.start);
        for r in ran {
            let Some((_, command, _)) = names.at(rank, r.at) else { continue };
            let meeting = match &command.action {
                Action::Collective { group, .. } => (groups[group.index()].clone(), None),
                Action::Send { hops, channel, .. } => (vec![rank, peer(job, rank, *hops)], Some(*channel)),
                Action::Recv { hops, channel, .. } => (vec![peer(job, rank, *hops), rank], Some(*channel)),
                _ => continue,
            };
            let receives = matches!(command.action, Action::Recv { .. });
            let number = own.entry((meeting.clone(), receives)).or_default();
            let all = met.entry(meeting).or_default();
            all.resize_with(all.len().max(*number + 1), Vec::new);
            all[*number].push(Participation { rank, action: &command.action, start: r.start, end: r.start + r.time });
            *number += 1;
        }
    }
    let exchanged = |((ranks, channel), parts): (&ExchangeKey, Vec<Participation<'a>>)| {
        let last = parts.last().filter(|_| parts.len() == ranks.len() && ranks.len() > 1)?;
        let since = |start: u64, part: &Participation| part.end.saturating_sub(start) as f64 / 1e9;
        let (kind, bytes) = match last.action {
            Action::Collective { kind, dtype, count, .. } => (Some(*kind), count * dtype.bytes()),
            Action::Recv { dtype, count, .. } | Action::Send { dtype, count, .. } => (None, count * dtype.bytes()),
            _ => return None,
        };
        let seconds = match channel {
            None => {
                let come = parts.iter().map(|p| p.start).max().unwrap_or(0);
                vec![parts.iter().map(|p| since(come, p)).sum::<f64>() / parts.len() as f64]
            }
            // A sender does not wait for its receiver.
            Some(_) => {
                let (sent, received) = parts.iter().partition::<Vec<_>, _>(|p| matches!(p.action, Action::Send { .. }));
                let (sent, received) = (sent.first()?, received.first()?);
                let late = (received.start >= sent.end).then(|| since(received.start, received));
                std::iter::once(since(sent.start, sent)).chain(late).collect()
            }
        };
        let named = if channel.is_some() { parts.iter().find(|p| matches!(p.action, Action::Recv { .. }))? } else { &parts[0] };
        Some(Exchanged { kind, ranks: ranks.clone(), bytes, rank: named.rank, action: named.action, seconds })
    };
    met.iter_mut().flat_map(|(meeting, all)| all.drain(..).filter_map(move |parts| exchanged((meeting, parts)))).collect()
}
