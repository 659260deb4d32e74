//! The learning rate over steps.

use ir::model::{Decay, LearningRateSchedule};
use std::f64::consts::PI;

/// The rate of a step, counted from 1: `peak * step / warmup` while it warms up, then `peak`, then along its curve to
/// `min` (as in Megatron-LM's `OptimizerParamScheduler`), where it is at step `steps`, or `constant` steps earlier,
/// and stays. It falls in the last `falling` steps before that, or in all behind the warm-up. A schedule without
/// `steps` ends with the run.
pub fn learning_rate(schedule: &LearningRateSchedule, step: u64, run_steps: u64) -> f64 {
    let (peak, min) = (schedule.peak.0, schedule.min.0);
    if step <= schedule.warmup && schedule.warmup > 0 {
        return peak * step as f64 / schedule.warmup as f64;
    }
    let last = if schedule.steps == 0 { run_steps } else { schedule.steps }.saturating_sub(schedule.constant);
    let begin = schedule.falling.map_or(0, |falling| last.saturating_sub(falling)).max(schedule.warmup);
    // `done` is the part of the fall that is over: all of it, if steps end before they begin to fall.
    let done = if step >= last || last <= begin { 1.0 } else { step.saturating_sub(begin) as f64 / (last - begin) as f64 };
    let left = match schedule.decay {
        Decay::Constant => return peak,
        Decay::Linear => 1.0 - done,
        Decay::Cosine => 0.5 * (1.0 + (PI * done).cos()),
        Decay::Exponential => 2.0 * 0.5f64.powf(done) - 1.0,
        Decay::MinusSqrt => 1.0 - done.sqrt(),
        Decay::InverseSquareRoot if step > last => 0.0,
        Decay::InverseSquareRoot => return min.max(peak * (schedule.warmup.max(1) as f64).sqrt() / (step.max(1) as f64).sqrt()),
    };
    min + (peak - min) * left
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Real;

    const FALLS: LearningRateSchedule =
        LearningRateSchedule { decay: Decay::Linear, peak: Real(1.0), min: Real(0.5), warmup: 2, steps: 6, falling: None, constant: 0 };

    fn rates(schedule: LearningRateSchedule, steps: &[u64]) -> Vec<f64> {
        steps.iter().map(|s| learning_rate(&schedule, *s, 100)).collect()
    }

    #[test]
    fn rates_warm_up_fall_and_stay() {
        assert_eq!(rates(FALLS, &[1, 2, 3, 4, 6, 7]), [0.5, 1.0, 0.875, 0.75, 0.5, 0.5]);
        assert_eq!(rates(LearningRateSchedule { decay: Decay::Constant, ..FALLS }, &[1, 2, 3, 9]), [0.5, 1.0, 1.0, 1.0]);
        let cosine = rates(LearningRateSchedule { decay: Decay::Cosine, ..FALLS }, &[2, 4, 6, 9]);
        assert!(cosine.iter().zip([1.0, 0.75, 0.5, 0.5]).all(|(a, b)| (a - b).abs() < 1e-15));
    }

    /// Numbers of Megatron-LM's own `OptimizerParamScheduler` (megatron-core 0.16.1).
    #[test]
    fn rates_stay_before_they_fall_as_in_megatron_lm() {
        let stays = LearningRateSchedule { peak: Real(1e-3), min: Real(1e-4), warmup: 10, steps: 100, falling: Some(20), ..FALLS };
        let cases = [
            (Decay::Linear, [0.0005, 0.001, 0.001, 0.001, 0.000955, 0.0007750000000000001, 0.00055, 0.00014500000000000006, 0.0001, 0.0001]),
            (
                Decay::Cosine,
                [0.0005, 0.001, 0.001, 0.001, 0.000994459753267812, 0.0008681980515339464, 0.00055, 0.00010554024673218806, 0.0001, 0.0001],
            ),
            (
                Decay::Exponential,
                [
                    0.0005,
                    0.001,
                    0.001,
                    0.001,
                    0.0009386853920647221,
                    0.0007136135474566861,
                    0.0004727922061357856,
                    0.00013173843145723984,
                    0.0001,
                    0.0001,
                ],
            ),
            (
                Decay::MinusSqrt,
                [0.0005, 0.001, 0.001, 0.001, 0.000798753882025019, 0.00055, 0.0003636038969321072, 0.0001227885089671933, 0.0001, 0.0001],
            ),
        ];
        for (decay, wanted) in cases {
            let got = rates(LearningRateSchedule { decay, ..stays }, &[5, 10, 11, 80, 81, 85, 90, 99, 100, 101]);
            assert!(got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() < 1e-18), "{decay:?}: {got:?}");
        }
    }

    /// The expected rates are those of Megatron-LM.
    #[test]
    fn rates_fall_with_the_root_of_the_steps_as_in_megatron_lm() {
        let schedule = LearningRateSchedule {
            decay: Decay::InverseSquareRoot,
            peak: Real(1e-3),
            min: Real(1e-4),
            warmup: 10,
            steps: 1200,
            falling: None,
            constant: 0,
        };
        let got = rates(schedule, &[5, 10, 11, 40, 1000, 1100, 1200, 1201]);
        assert_eq!(got, [5e-4, 1e-3, 9.534625892455924e-4, 5e-4, 1e-4, 1e-4, 1e-4, 1e-4]);
        let never = LearningRateSchedule { warmup: 0, min: Real(1e-6), ..schedule };
        assert_eq!(rates(never, &[1, 4, 1200, 1201]), [1e-3, 5e-4, 2.8867513459481286e-5, 1e-6]);
    }

    #[test]
    fn the_last_steps_have_the_least_rate() {
        let stays = LearningRateSchedule { constant: 3, steps: 9, ..FALLS };
        assert_eq!(rates(stays, &[2, 4, 6, 7, 9, 20]), [1.0, 0.75, 0.5, 0.5, 0.5, 0.5]);
        // The steps of the least rate follow those in which it falls.
        assert_eq!(rates(LearningRateSchedule { falling: Some(2), ..stays }, &[2, 4, 5, 6, 9]), [1.0, 1.0, 0.75, 0.5, 0.5]);
        let to_the_end = LearningRateSchedule { steps: 0, ..stays };
        assert_eq!([1, 4, 6, 7, 8].map(|step| learning_rate(&to_the_end, step, 9)), [0.5, 0.75, 0.5, 0.5, 0.5]);
    }

    #[test]
    fn a_schedule_without_an_end_ends_with_the_run() {
        let schedule = LearningRateSchedule { min: Real(0.0), warmup: 0, steps: 0, ..FALLS };
        assert_eq!(learning_rate(&schedule, 5, 10), 0.5);
        assert_eq!(learning_rate(&schedule, 10, 10), 0.0);
        let stays = LearningRateSchedule { falling: Some(4), ..schedule };
        assert_eq!([6, 7, 10].map(|step| learning_rate(&stays, step, 10)), [1.0, 0.75, 0.0]);
        // The run has fewer steps than those in which the rate falls.
        assert_eq!([1, 2].map(|step| learning_rate(&stays, step, 2)), [0.5, 0.0]);
    }
}
