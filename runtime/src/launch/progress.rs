//! What a run says of itself: its steps, and what it came to.

use super::stop::RunEnd;
use crate::profile::Profile;
use crate::protocol::HeldOut;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A step, as all ranks have done it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// From 1.
    pub step: u64,
    /// The step with which the run ends, unless it ends early.
    #[serde(skip)]
    pub steps: u64,
    /// Training loss, the sum of all its terms; `None` if no rank reported it.
    pub loss: Option<f64>,
    /// Global gradient norm before clipping; `None` if no rank reported it.
    pub grad_norm: Option<f64>,
    /// Learning rate, before a parameter's own factor.
    pub lr: f64,
    /// Tokens of the global batch per second of `step_ms`, of all ranks together.
    pub tokens_per_s: f64,
    /// Milliseconds that the slowest rank took, its data included, an evaluation excluded.
    pub step_ms: f64,
    /// Of these, how long the rank waited for its data that waited the most.
    pub data_wait_ms: f64,
    /// Of the devices' peak, what the model's own arithmetic comes to; none where the peak is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Bytes of the rank that has the most: of its process, or of its part of a GPU, where it runs on one.
    pub memory_bytes: u64,
    /// Bytes of data that the rank read for the step which read the most.
    pub data_bytes: u64,
    /// How many ranks the run has.
    #[serde(skip)]
    pub ranks: u64,
    /// Loss on validation data; `None` if nothing was evaluated after this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
    /// Of validation data sets that have a loss each, as `valid_loss/wiki`; `valid_loss` is their mean.
    #[serde(flatten)]
    pub valid_losses: BTreeMap<String, f64>,
    /// What the loss was multiplied by for the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Where rows of experts have several passes: the part of those after the first that some rank had rows for.
    #[serde(rename = "moe_further_passes", skip_serializing_if = "Option::is_none")]
    pub further_passes: Option<f64>,
    /// The update was left out, as loss or gradient norm were not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The other reports, by name.
    #[serde(flatten)]
    pub reports: BTreeMap<String, f64>,
}

/// What whoever watches a run is told.
#[derive(Clone, Debug, PartialEq)]
pub enum RunEvent<'a> {
    /// After every step.
    Step(&'a StepMetrics),
    /// After some steps.
    Ranks(&'a RankTimes),
    /// When a checkpoint is complete and on the disk.
    Saved(&'a Saved),
    /// Before the step that it was noticed in, if that was within a step.
    Note(Note),
}

/// How long the kernels of ranks ran.
#[derive(Clone, Debug, PartialEq)]
pub struct RankTimes {
    /// The last of so many steps.
    pub step: u64,
    /// How many steps the times are means over.
    pub steps: u64,
    /// Of each rank, means over the steps: milliseconds of the passes, and of updates, in which they did not
    /// stand still for other ranks.
    pub busy: Vec<[f64; 2]>,
}

/// A checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Its own directory, within the one that the user named.
    pub dir: PathBuf,
    /// The step whose outcome it holds.
    pub step: u64,
    /// Bytes of all ranks' shards together.
    pub bytes: u64,
    /// From the step's end until it was complete.
    pub milliseconds: f64,
    /// How long a rank did nothing else.
    pub stalled: f64,
}

/// Something that whoever watches a run may want to know, and that nothing depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// At once.
    Warning(String),
    /// Unless they want to hear of errors and warnings alone.
    Remark(String),
    /// If they look closely.
    Detail(String),
}

impl Note {
    /// What is said, whatever its weight.
    pub fn text(&self) -> &str {
        match self {
            Note::Warning(text) | Note::Remark(text) | Note::Detail(text) => text,
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// The last step that was done, counted from the first of all runs that this one goes on with.
    pub steps: u64,
    /// Whether all steps were done.
    pub ended: RunEnd,
    /// Steps of this run whose update was left out.
    pub skipped: u64,
    /// The last step that this process was told of, if any.
    pub last: Option<StepMetrics>,
    /// Losses after the last step on data that is not trained on.
    pub held_out: BTreeMap<HeldOut, f64>,
    /// Of the steps that were timed.
    pub profile: Option<Profile>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::graph::OF_EVERY_STEP;

    #[test]
    fn no_report_of_a_text_has_a_name_of_every_step() {
        let one = Some(1.0);
        let step = StepMetrics {
            step: 1,
            steps: 1,
            loss: one,
            grad_norm: one,
            lr: 1.0,
            tokens_per_s: 1.0,
            step_ms: 1.0,
            mfu: one,
            memory_bytes: 1,
            data_wait_ms: 1.0,
            data_bytes: 1,
            ranks: 1,
            valid_loss: one,
            valid_losses: BTreeMap::new(),
            loss_scale: one,
            further_passes: one,
            skipped: true,
            reports: BTreeMap::new(),
        };
        let written = serde_json::to_value(&step).expect("it is plain");
        let mut names: Vec<&str> = written.as_object().expect("by name").keys().map(String::as_str).collect();
        let mut known = OF_EVERY_STEP;
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(names, known);
    }
}
