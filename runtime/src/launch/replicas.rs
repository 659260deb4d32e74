//! Whether ranks that hold the same part of a tensor hold the same numbers, to the bit: where hardware corrupts them
//! in silence, it shows here first.

use super::error::RunError;
use super::progress::Note;
use crate::executor::Sum;
use crate::weights;
use ir::program::Job;
use ir::provenance::few;
use std::collections::BTreeMap;

/// Puts together what ranks say of the same step.
pub struct Replicas<'a> {
    job: &'a Job,
    /// Steps after which not all ranks have said yet what they hold.
    open: BTreeMap<u64, PendingComparison>,
    /// The last step after which all replicas were the same.
    same: Option<u64>,
}

/// What ranks have said of a step, until all have.
#[derive(Default)]
struct PendingComparison {
    ranks: u64,
    /// Ranks that have each checksum, for each part.
    parts: BTreeMap<Sum, BTreeMap<u64, Vec<u64>>>,
}

impl<'a> Replicas<'a> {
    pub fn new(job: &'a Job) -> Replicas<'a> {
        Replicas { job, open: BTreeMap::new(), same: None }
    }

    /// What a rank holds after a step. Of the last rank to say so: how many parts are on several ranks, and the
    /// same there. `place` says where a rank is.
    ///
    /// # Errors
    /// They are not.
    pub fn said(&mut self, rank: u64, step: u64, sums: &[Sum], place: impl Fn(u64) -> String) -> Option<Result<Note, RunError>> {
        let open = self.open.entry(step).or_default();
        open.ranks += 1;
        for sum in sums {
            open.parts.entry(Sum { sum: 0, ..*sum }).or_default().entry(sum.sum).or_default().push(rank);
        }
        if open.ranks < self.job.mesh.world() {
            return None;
        }
        let open = self.open.remove(&step)?;
        let held = |groups: &BTreeMap<u64, Vec<u64>>| groups.values().map(Vec::len).sum::<usize>();
        let parts = open.parts.values().filter(|groups| held(groups) > 1).count();
        let differ: Vec<_> = open.parts.iter().filter(|(_, groups)| groups.len() > 1).collect();
        let Some((part, groups)) = differ.first() else {
            let is_first = self.same.replace(step).is_none();
            return Some(Ok(match parts {
                0 if is_first => Note::Remark("each part of the model is on one rank alone: --check-replicas compares nothing".into()),
                0 => Note::Detail(format!("step {step}: no part is on several ranks")),
                _ => Note::Detail(format!("step {step}: {parts} parts are on several ranks, and the same there")),
            }));
        };
        // The largest group comes first, as a rank that differs from all others is likely to be wrong.
        let mut groups: Vec<Vec<u64>> = groups.values().cloned().collect();
        // Ranks may have reported in any order.
        groups.iter_mut().for_each(|ranks| ranks.sort_unstable());
        groups.sort_by_key(|ranks| (std::cmp::Reverse(ranks.len()), ranks[0]));
        let tensor = weights::name(self.job, part.held).unwrap_or_default();
        let group = |list: &Vec<u64>| match list[..] {
            [rank] => format!("rank {rank}{}", place(rank)),
            _ => format!("ranks {}", few(&list.iter().map(u64::to_string).collect::<Vec<_>>()).join(", ")),
        };
        let groups = groups.iter().map(group).collect::<Vec<_>>().join(" and ");
        let tensor = if part.is_copy { format!("the copy of `{tensor}` that passes read") } else { format!("`{tensor}`") };
        Some(Err(RunError::Replicas { step, tensor, groups, differ: differ.len(), parts, same: self.same }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::PersistentId;
    use crate::fixture::{self, Split};

    #[test]
    fn the_rank_that_holds_other_numbers_than_its_replicas_is_named() {
        let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 3, tp: 1 });
        let sum = |held, region, sum| Sum { held, is_copy: false, region, sum };
        // Each rank has its own part of the optimizer state, and all ranks have the parameter.
        let of = |rank: u64, weights| [sum(PersistentId::Param(0), 7, weights), sum(PersistentId::State(0, 0), rank, 100 + rank)];
        let mut replicas = Replicas::new(&job);
        let mut look = |step, weights: [u64; 3]| {
            let said: Vec<_> =
                [2, 1, 0].map(|rank| replicas.said(rank, step, &of(rank, weights[rank as usize]), |rank| format!(" on node{rank}"))).into();
            assert!(said[..2].iter().all(Option::is_none));
            said.into_iter().next_back().flatten().expect("all have said it")
        };
        let Ok(Note::Detail(text)) = look(2, [5, 5, 5]) else { panic!("they are the same") };
        assert_eq!(text, "step 2: 1 parts are on several ranks, and the same there");
        let error = look(4, [5, 6, 5]).expect_err("rank 1 holds another number");
        let name = &job.params[0].name;
        assert_eq!(
            error.to_string(),
            format!(
                "after step 4, ranks 0, 2 and rank 1 on node1 hold different numbers of `{name}`, which should be the same to the bit (1 of 1 parts that several ranks \
                 hold differ); they were the same after step 2, and checkpoints of later steps may be wrong"
            )
        );
    }
}
