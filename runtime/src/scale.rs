//! The loss scale over steps: gradients too small for 16 bits are computed larger, and divided again in f32.

use ir::model::LossScale;
use serde::{Deserialize, Serialize};

/// The scale of the step to come. Every rank has one, and they agree, since all see the same gradient norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaler {
    rule: Option<LossScale>,
    scale: f64,
    /// Steps in a row with a finite gradient norm.
    good: u64,
    /// Steps without one that are still to come before the scale falls.
    patience: u64,
}

/// What a dynamic scale has come to, for a run that goes on from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scaling {
    /// The bits of the scale, which text might round.
    pub bits: u64,
    /// Steps in a row with a finite gradient norm, since the scale last doubled.
    pub good: u64,
    /// Steps whose norm is not finite that are still to come before the scale falls.
    pub patience: u64,
}

impl Scaler {
    /// Goes on from where a run with a dynamic scale stood; another rule begins anew.
    pub fn resume(rule: Option<LossScale>, stood: Option<Scaling>) -> Scaler {
        match (rule, stood) {
            (Some(LossScale::Dynamic { .. }), Some(Scaling { bits, good, patience })) => Scaler { rule, scale: f64::from_bits(bits), good, patience },
            (rule, _) => Scaler::new(rule),
        }
    }

    /// Where it stands, if its rule is a dynamic one.
    pub fn stands(&self) -> Option<Scaling> {
        match self.rule {
            Some(LossScale::Dynamic { .. }) => Some(Scaling { bits: self.scale.to_bits(), good: self.good, patience: self.patience }),
            Some(LossScale::Constant(_)) | None => None,
        }
    }

    /// Begins with the rule's initial scale; without a rule it is 1 and stays so.
    pub fn new(rule: Option<LossScale>) -> Scaler {
        let (scale, patience) = match rule {
            None => (1.0, 0),
            Some(LossScale::Constant(x)) => (x.0, 0),
            Some(LossScale::Dynamic { initial, hysteresis, .. }) => (initial.0, hysteresis),
        };
        Scaler { rule, scale, good: 0, patience }
    }

    /// What the loss of the step to come is multiplied by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the step has a scale at all, to be reported.
    pub fn is_scaled(&self) -> bool {
        self.rule.is_some()
    }

    /// Whether a gradient norm that is not finite is the scale's fault as far as one can tell: a smaller one may be
    /// tried.
    pub fn may_fall(&self) -> bool {
        match self.rule {
            Some(LossScale::Dynamic { least, .. }) => self.scale > least.0,
            Some(LossScale::Constant(_)) | None => false,
        }
    }

    /// Moves on after a step whose gradient norm was finite, or was not.
    pub fn after(&mut self, outcome: Norm) {
        let Some(LossScale::Dynamic { least, window, hysteresis, .. }) = self.rule else { return };
        match outcome {
            Norm::Finite => {
                self.good += 1;
                if self.good >= window {
                    (self.good, self.patience) = (0, hysteresis);
                    self.scale *= 2.0;
                }
            }
            Norm::NotFinite => {
                self.good = 0;
                self.patience = self.patience.saturating_sub(1);
                if self.patience == 0 {
                    self.scale = (self.scale / 2.0).max(least.0);
                }
            }
        }
    }
}

/// What a step's gradient norm was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Neither infinite nor NaN.
    Finite,
    /// Infinite or NaN.
    NotFinite,
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Real;

    fn dynamic(initial: f64, window: u64, hysteresis: u64) -> Scaler {
        Scaler::new(Some(LossScale::Dynamic { initial: Real(initial), least: Real(1.0), window, hysteresis }))
    }

    #[test]
    fn the_scale_halves_at_each_overflow_once_patience_is_gone() {
        let mut s = dynamic(16.0, 100, 2);
        let seen: Vec<f64> = (0..4)
            .map(|_| {
                s.after(Norm::NotFinite);
                s.scale()
            })
            .collect();
        assert_eq!(seen, [16.0, 8.0, 4.0, 2.0]);
    }

    #[test]
    fn the_scale_doubles_after_a_window_without_overflow() {
        let mut s = dynamic(4.0, 3, 1);
        [Norm::Finite, Norm::Finite, Norm::NotFinite, Norm::Finite, Norm::Finite].into_iter().for_each(|n| s.after(n));
        assert_eq!(s.scale(), 2.0);
        s.after(Norm::Finite);
        assert_eq!(s.scale(), 4.0);
    }

    #[test]
    fn the_scale_never_falls_below_its_least() {
        let mut s = dynamic(2.0, 10, 1);
        assert!(s.may_fall());
        s.after(Norm::NotFinite);
        s.after(Norm::NotFinite);
        assert_eq!(s.scale(), 1.0);
        assert!(!s.may_fall());
    }

    #[test]
    fn a_scale_goes_on_where_it_stood() {
        let rule = |initial| dynamic(initial, 3, 2);
        let outcomes = [Norm::NotFinite, Norm::Finite, Norm::NotFinite, Norm::Finite, Norm::Finite, Norm::Finite, Norm::NotFinite, Norm::NotFinite];
        for cut in 0..outcomes.len() {
            let mut whole = rule(64.0);
            outcomes[..cut].iter().for_each(|n| whole.after(*n));
            let mut resumed = Scaler::resume(rule(1.0).rule, whole.stands());
            for n in &outcomes[cut..] {
                whole.after(*n);
                resumed.after(*n);
                assert_eq!((whole.scale, whole.good, whole.patience), (resumed.scale, resumed.good, resumed.patience));
            }
        }
        let constant = Some(LossScale::Constant(Real(8.0)));
        assert_eq!(Scaler::resume(constant, rule(64.0).stands()).scale(), 8.0);
        assert_eq!(Scaler::new(constant).stands(), None);
    }

    #[test]
    fn a_constant_scale_stays() {
        let mut s = Scaler::new(Some(LossScale::Constant(Real(128.0))));
        s.after(Norm::NotFinite);
        assert_eq!((s.scale(), s.may_fall()), (128.0, false));
    }
}
