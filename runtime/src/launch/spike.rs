//! A loss that jumps.

use std::collections::VecDeque;

/// Losses of which the median is the usual one.
const WINDOW: usize = 32;
/// Losses that must be known before one can be unusual.
const FEW: usize = 8;

pub struct Spikes {
    /// How many times the usual loss is a jump; none is never one.
    factor: Option<f64>,
    last: VecDeque<f64>,
}

impl Spikes {
    /// Spikes of a run before which these losses were usual.
    pub fn new(factor: Option<f64>, before: &[f64]) -> Spikes {
        Spikes { factor, last: before[before.len().saturating_sub(WINDOW)..].iter().copied().collect() }
    }

    /// The usual loss, if that of a step is a jump from it. Losses below zero jump never.
    pub fn look(&mut self, loss: Option<f64>) -> Option<f64> {
        let (factor, loss) = (self.factor?, loss.filter(|x| x.is_finite())?);
        let mut sorted: Vec<f64> = self.last.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let usual = sorted.get(sorted.len() / 2).copied().filter(|usual| sorted.len() >= FEW && *usual > 0.0 && loss > factor * usual);
        if usual.is_none() {
            self.last.push_back(loss);
            if self.last.len() > WINDOW {
                self.last.pop_front();
            }
        }
        usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_from_the_median_of_the_last_losses() {
        let mut spikes = Spikes::new(Some(2.0), &[]);
        let falling: Vec<Option<f64>> = (0..40).map(|k| spikes.look(Some(10.0 - 0.2 * f64::from(k)))).collect();
        assert_eq!(falling, [None; 40]);
        // The last 32 losses are 8.4, 8.2, .. 2.2.
        assert!(spikes.look(Some(10.9)).is_some_and(|usual| (5.1..5.5).contains(&usual)));
        assert_eq!([spikes.look(None), spikes.look(Some(f64::NAN)), spikes.look(Some(10.0))], [None; 3]);
        assert_eq!(Spikes::new(None, &[1.0; 40]).look(Some(1e9)), None);
        let mut early = Spikes::new(Some(2.0), &[]);
        assert_eq!(Spikes::new(Some(2.0), &[1.0; 40]).look(Some(2.5)), Some(1.0));
        assert_eq!([1.0, 9.0, 1.0, 9.0].map(|x| early.look(Some(x))), [None; 4]);
    }
}
