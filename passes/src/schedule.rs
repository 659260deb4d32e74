//! Pipeline schedules: for every stage the order of its forward and backward passes, as data.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward, after a warm-up of `stages - stage - 1` forwards (Narayanan et al. 2021).
    OneFOneB,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    Forward(u32),
    Backward(u32),
}

/// The passes of `stage` of `stages` for `m` microbatches.
pub fn passes(schedule: Schedule, stages: u32, stage: u32, m: u32) -> Vec<Pass> {
    let warmup = match schedule {
        Schedule::GPipe => m,
        Schedule::OneFOneB => (stages - stage - 1).min(m),
    };
    let mut out: Vec<Pass> = (0..warmup).map(Pass::Forward).collect();
    for k in 0..m - warmup {
        out.push(Pass::Forward(warmup + k));
        out.push(Pass::Backward(k));
    }
    out.extend((m - warmup..m).map(Pass::Backward));
    out
}

/// The greatest number of microbatches whose forward is done and whose backward is not.
pub fn in_flight(passes: &[Pass]) -> u32 {
    let (mut now, mut most) = (0u32, 0);
    for p in passes {
        match p {
            Pass::Forward(_) => now += 1,
            Pass::Backward(_) => now -= 1,
        }
        most = most.max(now);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schedule_runs_every_pass_once_and_backward_after_forward() {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            for (p, m) in [(1, 1), (2, 1), (2, 4), (4, 2), (4, 8)] {
                for s in 0..p {
                    let order = passes(schedule, p, s, m);
                    assert_eq!(order.len(), 2 * m as usize);
                    for k in 0..m {
                        let at = |x| order.iter().position(|y| *y == x).expect("scheduled");
                        assert!(at(Pass::Forward(k)) < at(Pass::Backward(k)));
                    }
                }
            }
        }
    }

    #[test]
    fn one_f_one_b_keeps_at_most_as_many_microbatches_as_stages() {
        for s in 0..4 {
            assert_eq!(in_flight(&passes(Schedule::OneFOneB, 4, s, 8)), 4 - s);
        }
        assert_eq!(in_flight(&passes(Schedule::GPipe, 4, 0, 8)), 8);
    }
}
