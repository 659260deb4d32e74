//! Who exchanges what with whom in a job, and the order in which all ranks come to that first: it follows from the
//! job alone.

use crate::comm::Terms;
use crate::executor::peer;
use ir::op::DType;
use ir::program::{Action, Collective, Job};
use std::collections::{BTreeMap, BTreeSet};

/// Ranks that exchange: a group, which has a communicator, or two between which messages go, which go by that of all
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NcclLink {
    Group(Vec<u64>),
    /// Messages from the first rank to the second.
    Messages([u64; 2]),
}

impl NcclLink {
    pub fn members(&self) -> &[u64] {
        match self {
            NcclLink::Group(members) => members,
            NcclLink::Messages(ends) => ends,
        }
    }
}

/// Collectives of a group that differ: NCCL may do each in another way. All members have the same, in one order.
pub type LinkCollectives = BTreeMap<(Collective, DType, u64), Terms>;

/// Links that no two have a rank of, with what goes over each.
pub type Round = Vec<(NcclLink, LinkCollectives)>;

/// The links of a rank with what goes over each.
pub fn of_rank(job: &Job, rank: u64) -> BTreeMap<NcclLink, LinkCollectives> {
    let mut links: BTreeMap<NcclLink, LinkCollectives> = BTreeMap::new();
    let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
    for command in program.bodies.iter().flat_map(|b| &b.commands) {
        match &command.action {
            Action::Collective { group, kind, dtype, count, .. } => {
                let members = program.groups[group.index()].members(&job.mesh, rank);
                let collectives = links.entry(NcclLink::Group(members)).or_default();
                collectives.insert((*kind, *dtype, *count), Terms { kind: *kind, dtype: *dtype, count: *count });
            }
            Action::Send { hops, .. } => drop(links.entry(NcclLink::Messages([rank, peer(job, rank, *hops)])).or_default()),
            Action::Recv { hops, .. } => drop(links.entry(NcclLink::Messages([peer(job, rank, *hops), rank])).or_default()),
            Action::Launch { .. }
            | Action::Copy { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Report { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => {}
        }
    }
    links
}

/// The links of a job with what goes over each, in rounds of which each has every rank at most once. All ranks
/// compute the same.
pub fn rounds(job: &Job) -> Vec<Round> {
    let links: BTreeMap<NcclLink, LinkCollectives> = (0..job.mesh.world()).flat_map(|rank| of_rank(job, rank)).collect();
    let mut rounds: Vec<(BTreeSet<u64>, Round)> = vec![];
    for (link, collectives) in links {
        let free = rounds.iter_mut().find(|(taken, _)| link.members().iter().all(|m| !taken.contains(m)));
        let round = match free {
            Some(round) => round,
            None => {
                rounds.push(Default::default());
                rounds.last_mut().expect("invariant: it was just pushed")
            }
        };
        round.0.extend(link.members());
        round.1.push((link, collectives));
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
        let all: Vec<&NcclLink> = rounds.iter().flatten().map(|(link, _)| link).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        for round in &rounds {
            let ranks: Vec<u64> = round.iter().flat_map(|(l, _)| l.members().to_vec()).collect();
            assert_eq!(ranks.iter().collect::<BTreeSet<_>>().len(), ranks.len(), "{round:?}");
        }
        assert!(all.iter().any(|l| **l == NcclLink::Group(vec![0, 1])), "{all:?}");
        assert!(all.iter().any(|l| matches!(l, NcclLink::Messages(_))), "{all:?}");
        // All ranks of a group take part in it, so there are as many rounds as one rank has links, or few more.
        let most = (0..8).map(|r| all.iter().filter(|l| l.members().contains(&r)).count()).max().unwrap_or(0);
        assert!((most..=2 * most).contains(&rounds.len()), "{} rounds, {most} links", rounds.len());
    }

    #[test]
    fn a_link_knows_all_that_goes_over_it() {
        let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
        let collectives: Vec<LinkCollectives> = rounds(&job).into_iter().flatten().map(|(_, collectives)| collectives).collect();
        let program = &job.programs[0];
        let commands = program.bodies.iter().flat_map(|b| &b.commands);
        for command in commands {
            if let Action::Collective { kind, dtype, count, .. } = &command.action {
                assert!(collectives.iter().any(|k| k.contains_key(&(*kind, *dtype, *count))), "{kind:?} of {count}");
            }
        }
    }
}
