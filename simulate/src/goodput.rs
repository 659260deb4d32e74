//! What part of its time a job trains, where devices fail and it goes on from checkpoints.
//!
//! Failures come at any instant alike, as many as there are devices. A job saves after every so many steps; a
//! checkpoint is one once all of it is written, while training goes on. A failure costs what was trained since the
//! last one that was written, and the time until training goes on.
//!
//! Between two failures there is a start, which may fail too, of `(e^(lambda R) - 1) / lambda` seconds in the mean,
//! and then `1 / lambda` seconds of training and saving. Of these, as many intervals stay as checkpoints were
//! written. An interval is `s` seconds, `t` of them training. Checkpoint `k` is begun `s - t` before the end of
//! interval `k`, and written `w` after it. The mean of `floor((x - w) / s)` over exponentially distributed `x` is
//! `e^(-lambda w) / (e^(lambda s) - 1)`. So
//!
//! ```text
//! goodput = lambda t e^(-lambda (R + w)) / (e^(lambda s) - 1)
//! ```
//!
//! With small `lambda` this is the estimate of J. W. Young ("A first order approximation to the optimum checkpoint
//! interval", 1974), for whom training stops while a checkpoint is written: there `w` is 0. As J. T. Daly ("A higher
//! order estimate of the optimum checkpoint interval for restart dumps", 2006) has it, failures while a job starts
//! again count.

use crate::machine::{Machine, Reliability};
use serde::Serialize;

/// The part of the best goodput that is given up for checkpoints that are as far apart as that allows.
const GIVEN_UP: f64 = 5e-3;
/// The greatest distance of checkpoints in seconds, however seldom devices fail.
const SELDOM: f64 = 3600.0;

/// Bytes that a job saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// All ranks' together.
    pub bytes: u64,
    /// That a rank reads when it goes on.
    pub read: u64,
}

/// A job, as failures see it. Seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    /// Mean time between failures of any of its devices.
    pub between_failures: f64,
    /// From a failure until training goes on.
    pub restart: f64,
    /// From when a checkpoint is begun until it is written; the next is not begun before.
    pub write: f64,
    /// That training waits for a checkpoint; no more than `write`.
    pub wait: f64,
    /// Seconds of a training step, without checkpoints.
    pub step: f64,
}

/// What comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The part of its time in which a job trains what is not lost, and is not waiting for checkpoints.
    pub part: f64,
    /// Seconds between failures, of all its devices together.
    pub between_failures: f64,
    /// From a failure until training goes on.
    pub restart: f64,
    /// Until a checkpoint is written, and that training waits for it.
    pub write: f64,
    /// Seconds that training waits for a checkpoint.
    pub wait: f64,
    /// Steps from one checkpoint to the next: see [`Saved::best`].
    pub save_interval: u64,
    /// Bytes of a checkpoint, all ranks' together.
    pub bytes: u64,
}

impl Saved {
    /// Of a job of so many ranks. All write at once, each an equal share. Until the next update they write as fast as
    /// the storage takes it, while passes run; then the update waits for the rest, which goes to the host's memory. A
    /// machine reads what its ranks hold, and no more than there is.
    pub fn of(machine: &Machine, of: &Reliability, ranks: u64, checkpoint: Checkpoint, step: f64) -> Saved {
        let storage = of.storage_bytes_per_second.value;
        let of_machine = ranks.min(machine.devices);
        let share = checkpoint.bytes as f64 / ranks as f64;
        let left = share - step * storage / of_machine as f64;
        let wait = (left / of.copy_bytes_per_second.value).max(0.0);
        let read = checkpoint.read.saturating_mul(of_machine).min(checkpoint.bytes) as f64 / storage;
        Saved {
            between_failures: of.between_failures.value / ranks as f64,
            restart: of.restart.value + read,
            write: (share * of_machine as f64 / storage).max(wait),
            wait,
            step,
        }
    }

    /// With a checkpoint after every so many steps.
    pub fn goodput(&self, steps: u64) -> f64 {
        let trained = steps as f64 * self.step;
        let interval = (trained + self.wait).max(self.write);
        let late = self.write - (interval - trained);
        let rate = 1.0 / self.between_failures;
        rate * trained * (-rate * (self.restart + late)).exp() / (rate * interval).exp_m1()
    }

    /// The most steps with which it is within a two-hundredth of the best, but no more than an hour's, unless the
    /// best has more; and what it then is.
    pub fn best(&self) -> (u64, f64) {
        // Goodput rises to a maximum and falls after it, also over whole steps.
        let rises = |steps: u64| self.goodput(steps + 1) > self.goodput(steps);
        let peak = first(1, |steps| !rises(steps));
        let enough = self.goodput(peak) * (1.0 - GIVEN_UP);
        let steps = first(peak, |steps| self.goodput(steps + 1) < enough);
        let steps = steps.min(((SELDOM / self.step) as u64).max(peak));
        (steps, self.goodput(steps))
    }
}

/// The first number from `least` on for which `is_so` holds, if it holds for all that follow.
fn first(least: u64, is_so: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut by) = (least, 1u64);
    while !is_so(low + by - 1) && by < 1 << 40 {
        low += by;
        by *= 2;
    }
    let mut high = low + by - 1;
    while low < high {
        let middle = low + (high - low) / 2;
        if is_so(middle) { high = middle } else { low = middle + 1 }
    }
    high
}

/// Of a job on a machine that says how often its devices fail.
pub fn goodput(machine: &Machine, ranks: u64, checkpoint: Checkpoint, step: f64) -> Option<Goodput> {
    let saved = Saved::of(machine, machine.reliability.as_ref()?, ranks, checkpoint, step);
    let (save_interval, part) = saved.best();
    let Saved { between_failures, restart, write, wait, .. } = saved;
    Some(Goodput { part, between_failures, restart, write, wait, save_interval, bytes: checkpoint.bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Saved = Saved { between_failures: 10_000.0, restart: 300.0, write: 120.0, wait: 2.0, step: 7.0 };

    /// Simulates a job event by event, with pseudo-random failures. Returns the part of its time that is kept.
    fn played(job: &Saved, steps: u64, failures: u64) -> f64 {
        let mut state = 88172645463325252u64;
        let mut exponential = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            -job.between_failures * (1.0 - (state >> 11) as f64 / (1u64 << 53) as f64).ln()
        };
        let (mut all, mut kept) = (0.0, 0.0);
        for _ in 0..failures {
            let until = exponential();
            all += until;
            let (mut now, mut written) = (job.restart, 0.0f64);
            loop {
                // Training goes on, and the next checkpoint begins once the last one is written.
                let begun = (now + steps as f64 * job.step).max(written);
                written = begun + job.write;
                now = begun + job.wait;
                if written > until {
                    break;
                }
                kept += steps as f64 * job.step;
            }
        }
        kept / all
    }

    #[test]
    fn the_formula_is_the_mean_of_jobs_that_are_played() {
        for (job, steps) in [
            (JOB, 1),
            (JOB, 40),
            (JOB, 400),
            (Saved { between_failures: 600.0, ..JOB }, 20),
            (Saved { wait: 60.0, ..JOB }, 30),
            (Saved { wait: 60.0, ..JOB }, 10),
        ] {
            let (said, is) = (job.goodput(steps), played(&job, steps, 200_000));
            assert!((said / is - 1.0).abs() < 0.01, "{job:?} every {steps}: {said}, played {is}");
        }
    }

    #[test]
    fn the_best_interval_is_the_best_of_all() {
        // If training waits for all that is written, the best interval is Young's: the root of 2 x 10,000 x 50.
        let young = Saved { write: 50.0, wait: 50.0, step: 1.0, ..JOB };
        let peak = (1..5000).max_by(|a, b| young.goodput(*a).total_cmp(&young.goodput(*b))).expect("some");
        assert!((peak as f64 / 1000.0 - 1.0).abs() < 0.05, "{peak}");
        for job in [
            JOB,
            young,
            Saved { step: 500.0, ..JOB },
            Saved { between_failures: 100.0, ..JOB },
            Saved { wait: 0.0, write: 0.0, ..JOB },
            Saved { step: 4000.0, ..JOB },
        ] {
            let (steps, part) = job.best();
            let best = (1..5000).map(|n| job.goodput(n)).fold(0.0, f64::max);
            let is_most = job.goodput(steps + 1) < best * (1.0 - GIVEN_UP) || (steps + 1) as f64 * job.step > SELDOM;
            assert!(part >= best * (1.0 - GIVEN_UP) && is_most, "{job:?}: {steps} of {best}");
        }
    }

    /// Without failures all time is training. A failure costs what was lost and the restart.
    #[test]
    fn few_failures_cost_what_each_costs() {
        let rare = Saved { between_failures: 1e9, wait: 0.0, ..JOB };
        let lost = 1.0 - rare.goodput(100);
        let each = 300.0 + 120.0 + 700.0 / 2.0;
        assert!((lost / (each / 1e9) - 1.0).abs() < 1e-3, "{lost}");
    }

    #[test]
    fn more_devices_fail_more_often() {
        let machine = Machine::named("h100-dgx").expect("known");
        let part = |ranks| goodput(&machine, ranks, Checkpoint { bytes: 6 << 40, read: 50 << 30 }, 20.0).expect("a machine that says so");
        assert!(part(1024).part > part(16384).part);
        assert!(part(16384).part > 0.5);
        assert_eq!(part(1024).between_failures, 16.0 * part(16384).between_failures);
        assert!(part(1024).save_interval > part(16384).save_interval);
        let without = Machine { reliability: None, ..machine };
        assert_eq!(goodput(&without, 8, Checkpoint::default(), 1.0), None);
    }

    /// With 8 ranks, 1 GB/s of storage and 2 GB/s of copies, each rank has a share of 12 GB, of which a step of
    /// 4 s writes half a GB.
    #[test]
    fn an_update_waits_for_what_passes_leave_of_a_copy() {
        let machine = Machine::named("h100-dgx").expect("known");
        let of = machine.reliability.clone().expect("it says so");
        assert_eq!((of.storage_bytes_per_second.value, of.copy_bytes_per_second.value), (1e9, 2e9));
        let saved = |step| Saved::of(&machine, &of, 8, Checkpoint { bytes: 96_000_000_000, read: 20_000_000_000 }, step);
        assert_eq!((saved(4.0).wait, saved(4.0).write, saved(4.0).restart), (5.75, 96.0, of.restart.value + 96.0));
        assert_eq!(saved(96.0).wait, 0.0);
    }
}
