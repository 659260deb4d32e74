//! The learning rate over steps.

use ir::model::{Decay, Schedule};

/// The rate of a step, counted from 1: `peak * step / warmup` while it warms up, then `peak` falls to `min` at step `steps`
/// (as in Megatron-LM's `OptimizerParamScheduler`), then `min`. A schedule without `steps` ends with the run.
pub fn learning_rate(schedule: &Schedule, step: u64, run_steps: u64) -> f64 {
    let (peak, min) = (schedule.peak.0, schedule.min.0);
    if step <= schedule.warmup && schedule.warmup > 0 {
        return peak * step as f64 / schedule.warmup as f64;
    }
    let last = if schedule.steps == 0 { run_steps } else { schedule.steps };
    let done = if step >= last || last <= schedule.warmup { 1.0 } else { (step - schedule.warmup) as f64 / (last - schedule.warmup) as f64 };
    match schedule.decay {
        Decay::Constant => peak,
        Decay::Linear => min + (peak - min) * (1.0 - done),
        Decay::Cosine => min + (peak - min) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Real;

    fn rates(decay: Decay, steps: &[u64]) -> Vec<f64> {
        let schedule = Schedule { decay, peak: Real(1.0), min: Real(0.5), warmup: 2, steps: 6 };
        steps.iter().map(|s| learning_rate(&schedule, *s, 100)).collect()
    }

    #[test]
    fn rates_warm_up_fall_and_stay() {
        assert_eq!(rates(Decay::Linear, &[1, 2, 3, 4, 6, 7]), [0.5, 1.0, 0.875, 0.75, 0.5, 0.5]);
        assert_eq!(rates(Decay::Constant, &[1, 2, 3, 9]), [0.5, 1.0, 1.0, 1.0]);
        let cosine = rates(Decay::Cosine, &[2, 4, 6, 9]);
        assert!(cosine.iter().zip([1.0, 0.75, 0.5, 0.5]).all(|(a, b)| (a - b).abs() < 1e-15));
    }

    #[test]
    fn a_schedule_without_an_end_ends_with_the_run() {
        let schedule = Schedule { decay: Decay::Linear, peak: Real(1.0), min: Real(0.0), warmup: 0, steps: 0 };
        assert_eq!(learning_rate(&schedule, 5, 10), 0.5);
        assert_eq!(learning_rate(&schedule, 10, 10), 0.0);
    }
}
