//! Which rank is slow: all wait for it, so that steps take as long on each; but it waits least for others.

use super::progress::{Note, RankTimes};
use crate::protocol::StepEvent;
use ir::program::Job;

/// How much longer than half of the ranks of its stage a rank computes that is called slow.
const SLOW: f64 = 1.15;

/// Sums what ranks say of some steps.
pub struct Pace<'a> {
    job: &'a Job,
    /// Steps from one look to the next; 0 is never.
    interval: u64,
    /// Of each rank since the last look: steps, and milliseconds of the passes and of updates in which it
    /// waited for no other.
    sums: Vec<(u64, [f64; 2])>,
    /// Ranks that were called slow at the last look.
    slow: Vec<u64>,
}

impl<'a> Pace<'a> {
    pub fn new(job: &'a Job, interval: u64) -> Pace<'a> {
        Pace { job, interval, sums: vec![Default::default(); job.mesh.world() as usize], slow: vec![] }
    }

    /// What a rank says of a step.
    pub fn said(&mut self, rank: u64, event: &StepEvent) {
        let (steps, sums) = &mut self.sums[rank as usize];
        *steps += 1;
        sums.iter_mut().zip(event.busy).for_each(|(sum, busy)| *sum += busy);
    }

    /// When all have done a step: the times of all ranks, if it is time for that, and what is to be said of
    /// them. `place` says where a rank is.
    pub fn look(&mut self, step: u64, place: impl Fn(u64) -> String) -> Option<(RankTimes, Option<Note>)> {
        if self.interval == 0 || !step.is_multiple_of(self.interval) {
            return None;
        }
        let sums = std::mem::replace(&mut self.sums, vec![Default::default(); self.job.mesh.world() as usize]);
        let steps = sums.iter().map(|s| s.0).min().unwrap_or(0);
        // A rank that is a step ahead counts that step in this look.
        let busy: Vec<[f64; 2]> = sums.iter().map(|(n, sum)| sum.map(|x| x / (*n).max(1) as f64)).collect();
        let total = |rank: u64| busy[rank as usize].iter().sum::<f64>();
        let mut slow = vec![];
        for stage in 0..self.job.stages.len() as u64 {
            // Ranks of a stage do the same work.
            let mut ranks: Vec<u64> = (0..self.job.mesh.world()).filter(|r| self.job.mesh.stage(*r) == stage).collect();
            ranks.sort_by(|a, b| total(*a).total_cmp(&total(*b)));
            let half = total(ranks[(ranks.len() - 1) / 2]);
            slow.extend(ranks.into_iter().filter(|r| total(*r) > half * SLOW && half > 0.0).map(|r| (r, half)));
        }
        let text = |(rank, half): &(u64, f64)| {
            let [passes, update] = busy[*rank as usize];
            format!(
                "rank {rank}{} is slow: {:.1} ms a step without waiting for others ({passes:.1} of passes, {update:.1} of updates), where half of the ranks that do the same take {half:.1} or less",
                place(*rank),
                total(*rank)
            )
        };
        let named: Vec<u64> = slow.iter().map(|s| s.0).collect();
        let is_news = !named.is_empty() && named != self.slow;
        let note = is_news.then(|| Note::Remark(slow.iter().map(text).collect::<Vec<_>>().join("\n")));
        self.slow = named;
        Some((RankTimes { step, steps, busy }, note))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn a_rank_that_computes_longer_than_those_that_do_the_same_is_named_once() {
        let job = fixture::job(&Split { microbatches: 1, pp: 2, dp: 3, tp: 1 });
        let mut pace = Pace::new(&job, 2);
        let mut of = |step: u64, busy: [f64; 6]| {
            for (rank, busy) in (0..).zip(busy) {
                let event = StepEvent {
                    step,
                    busy: [busy, 1.0],
                    learning_rate: 0.0,
                    milliseconds: 1.0,
                    read: 0,
                    waited: 0.0,
                    further_passes: [0; 2],
                    reports: vec![],
                    valid: vec![],
                    loss_scale: None,
                    skipped: false,
                };
                pace.said(rank, &event);
            }
            pace.look(step, |rank| format!(" on node{rank}"))
        };
        // The stages differ, and each rank is compared with half of the ranks of its stage.
        let even = [10.0, 10.5, 11.0, 30.0, 31.0, 32.0];
        assert_eq!(of(1, even), None);
        let (times, note) = of(2, even).unwrap();
        assert_eq!((times.step, times.steps, times.busy[3], note), (2, 2, [30.0, 1.0], None));
        let slow = [10.0, 10.5, 11.0, 30.0, 40.0, 31.0];
        assert_eq!(of(3, slow), None);
        let Some((_, Some(Note::Remark(text)))) = of(4, slow) else { panic!("it is slow") };
        assert!(text.starts_with("rank 4 on node4 is slow: 41.0 ms a step without waiting for others (40.0 of passes, 1.0 of updates)"), "{text}");
        assert!(text.ends_with("take 32.0 or less"), "{text}");
        assert_eq!(of(5, slow), None);
        assert_eq!(of(6, slow).unwrap().1, None);
    }
}
