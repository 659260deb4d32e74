//! How far a run has come.

use crate::scale::Scaling;
use serde::{Deserialize, Serialize};

/// How far a run has come, and what its random numbers depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Steps done.
    pub step: u64,
    /// The seed of its random numbers.
    pub seed: u64,
    /// State of the dynamic loss scale, if the run has one.
    #[serde(default)]
    pub scaling: Option<Scaling>,
    /// Sequences read; if it is not said, as many a step as the run that goes on.
    #[serde(default)]
    pub sequences: Option<u64>,
}

impl Mark {
    /// Sequences read, of a run that has so many a step.
    pub fn read(&self, batch: u64) -> u64 {
        self.sequences.unwrap_or(self.step.saturating_mul(batch))
    }
}
