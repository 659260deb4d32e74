//! Which communicators a job needs, and the order in which all ranks make them: both follow from the job alone.

use crate::executor::peer;
use ir::program::{Action, Channel, Job};
use std::collections::BTreeSet;

/// Ranks that communicate apart from others: a group, or the two ends of a channel, the sender first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    pub members: Vec<u64>,
    pub channel: Option<Channel>,
}

/// The links of a job, in rounds of which each has every rank at most once. All ranks compute the same.
pub fn rounds(job: &Job) -> Vec<Vec<Link>> {
    let mut links = BTreeSet::new();
    for rank in 0..job.mesh.world() {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        for command in program.bodies.iter().flat_map(|b| &b.commands) {
            match &command.action {
                Action::Collective { group, .. } => {
                    let members = program.groups[group.index()].members(&job.mesh, rank);
                    links.insert(Link { members, channel: None });
                }
                Action::Send { hops, channel, .. } => {
                    let members = vec![rank, peer(job, rank, *hops)];
                    links.insert(Link { members, channel: Some(*channel) });
                }
                Action::Launch { .. }
                | Action::Copy { .. }
                | Action::Recv { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Limit { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => {}
            }
        }
    }
    let mut rounds: Vec<(BTreeSet<u64>, Vec<Link>)> = vec![];
    for link in links {
        let free = rounds.iter_mut().find(|(taken, _)| link.members.iter().all(|m| !taken.contains(m)));
        let round = match free {
            Some(round) => round,
            None => {
                rounds.push(Default::default());
                rounds.last_mut().expect("invariant: it was just pushed")
            }
        };
        round.0.extend(&link.members);
        round.1.push(link);
    }
    rounds.into_iter().map(|r| r.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn every_link_of_every_rank_is_in_one_round_and_no_rank_twice() {
        let job = fixture::job(&Split { microbatches: 2, pp: 2, dp: 2, tp: 2 });
        let rounds = rounds(&job);
        let all: Vec<&Link> = rounds.iter().flatten().collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        for round in &rounds {
            let ranks: Vec<u64> = round.iter().flat_map(|l| l.members.clone()).collect();
            assert_eq!(ranks.iter().collect::<BTreeSet<_>>().len(), ranks.len(), "{round:?}");
        }
        assert!(all.iter().any(|l| l.members == [0, 1] && l.channel.is_none()), "{all:?}");
        assert!(all.iter().any(|l| l.channel.is_some()), "{all:?}");
        // Ranks of a group all have it, so the rounds are as many as one rank has links, or few more.
        let most = (0..8).map(|r| all.iter().filter(|l| l.members.contains(&r)).count()).max().unwrap_or(0);
        assert!((most..=2 * most).contains(&rounds.len()), "{} rounds, {most} links", rounds.len());
    }
}
