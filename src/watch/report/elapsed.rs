//! What had passed when a step was done: tokens, and seconds.

use super::timeline::Timeline;
use serde::Serialize;

/// Tokens, or seconds, of a step.
const MOST: f64 = 1e12;

/// After some steps, the first and the last among them; between two of them it grows evenly.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Elapsed {
    pub step: Vec<u64>,
    /// Tokens of the whole run; steps before the first are taken to have had as many as that one.
    pub tokens: Vec<f64>,
    /// From the first step on: of steps alone, or what the clock says.
    pub seconds: Vec<f64>,
}

/// Adds up what steps say, and keeps it for the first step of each bucket.
#[derive(Clone, Debug)]
pub struct Clock {
    /// Steps of a bucket.
    width: u64,
    last: Option<ElapsedPoint>,
    elapsed: Elapsed,
}

#[derive(Clone, Copy, Debug)]
struct ElapsedPoint {
    step: u64,
    tokens: f64,
    seconds: f64,
}

impl Clock {
    pub fn new(width: u64) -> Clock {
        Clock { width, last: None, elapsed: Elapsed::default() }
    }

    /// A step, which comes after all that were pushed. Numbers that no step has count as none.
    pub fn push(&mut self, step: u64, tokens: f64, seconds: f64) {
        let [tokens, seconds] = [tokens, seconds].map(|x| if (0.0..MOST).contains(&x) { x } else { 0.0 });
        let before = self.last.unwrap_or(ElapsedPoint { step: 0, tokens: tokens * step.saturating_sub(1) as f64, seconds: 0.0 });
        let now = ElapsedPoint { step, tokens: before.tokens + tokens, seconds: before.seconds + seconds };
        if self.last.is_none_or(|last| last.step / self.width != step / self.width) {
            self.elapsed.push(now);
        }
        self.last = Some(now);
    }

    pub fn elapsed(mut self) -> Elapsed {
        if let Some(last) = self.last.filter(|last| self.elapsed.step.last() != Some(&last.step)) {
            self.elapsed.push(last);
        }
        self.elapsed
    }
}

impl Elapsed {
    fn push(&mut self, now: ElapsedPoint) {
        self.step.push(now.step);
        self.tokens.push(now.tokens.round());
        self.seconds.push(milliseconds(now.seconds));
    }

    /// Seconds when a step was done; none before the first.
    pub fn seconds_at(&self, step: u64) -> f64 {
        let at = self.step.partition_point(|known| *known < step);
        match (at.checked_sub(1), self.step.get(at)) {
            (_, Some(known)) if *known == step => self.seconds[at],
            (Some(before), Some(known)) => {
                let share = (step - self.step[before]) as f64 / (known - self.step[before]) as f64;
                self.seconds[before] + share * (self.seconds[at] - self.seconds[before])
            }
            (Some(last), None) => self.seconds[last],
            (None, _) => 0.0,
        }
    }

    /// Sums of the times of steps become what had passed on the clock.
    pub fn follow(&mut self, timeline: &Timeline) {
        self.seconds.iter_mut().for_each(|sum| *sum = milliseconds(timeline.of_sum(*sum)));
    }
}

fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passed_is_a_sum_and_kept_at_the_ends_of_buckets() {
        let of = |width, steps: std::ops::RangeInclusive<u64>| {
            let mut clock = Clock::new(width);
            steps.for_each(|step| clock.push(step, 100.0, 0.25));
            clock.elapsed()
        };
        let every = Elapsed { step: vec![1, 2, 3], tokens: vec![100.0, 200.0, 300.0], seconds: vec![0.25, 0.5, 0.75] };
        assert_eq!(of(1, 1..=3), every);
        // This run resumes at step 11: earlier steps count for tokens, but their time is not known.
        let few = Elapsed { step: vec![11, 15, 20, 22], tokens: vec![1100.0, 1500.0, 2000.0, 2200.0], seconds: vec![0.25, 1.25, 2.5, 3.0] };
        assert_eq!(of(5, 11..=22), few);
        assert_eq!([1, 11, 13, 20, 30].map(|step| few.seconds_at(step)), [0.0, 0.25, 0.75, 2.5, 3.0]);
        assert_eq!(Clock::new(1).elapsed(), Elapsed::default());
    }

    #[test]
    fn numbers_that_no_step_has_change_no_sum() {
        let mut clock = Clock::new(1);
        clock.push(1 << 53, f64::MAX, f64::NAN);
        clock.push((1 << 53) + 1, -1.0, f64::INFINITY);
        let elapsed = clock.elapsed();
        assert_eq!((elapsed.tokens, elapsed.seconds), (vec![0.0; 2], vec![0.0; 2]));
    }
}
