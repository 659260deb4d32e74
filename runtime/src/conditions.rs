//! What a run depends on beside its model, its seed and where it stands: a run that goes on with something else
//! than it began with cannot become what it would have been, and whoever starts it is told before anything is
//! trained.

use crate::schedule::learning_rate;
use ir::diag::Source;
use ir::model::{LearningRateSchedule, Muon, MuonScale, Optimizer, Train};
use ir::op::{DType, Real};
use ir::program::{Content, Job};
use ir::provenance::{Provenance, few};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Most steps at which two learning rates are compared.
const LOOKS: u64 = 1 << 12;

/// What a run depends on beside its model, its seed and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// Of each input that a file feeds.
    pub data: Vec<DataMark>,
    /// Sequences of a step.
    pub batch: u64,
    /// The last step.
    pub steps: u64,
    /// The learning rate over the steps.
    pub schedule: LearningRateSchedule,
    /// Recipe of the run, if it said one.
    #[serde(default)]
    pub recipe: Option<Recipe>,
    /// In which activations are computed; of runs that said.
    #[serde(default)]
    pub precision: Option<DType>,
}

/// What updates are made by, beside the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// The optimizer with its numbers.
    pub optimizer: Optimizer,
    /// Weight decay of the parameters that decay; 0 is none.
    pub weight_decay: Real,
    /// Greatest global gradient norm.
    pub clip: Option<Real>,
}

/// What identifies the data of an input, wherever its file is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataMark {
    /// Name of the job's input that the file feeds.
    pub input: String,
    /// What the user called it.
    pub file: String,
    /// Bytes of all elements, without headers.
    pub bytes: u64,
    /// BLAKE3 of how it is read, its length, and its bytes, or samples of them, in hexadecimal.
    pub hash: String,
}

/// What may be another than the run had that it goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// The model's text or settings.
    Model,
    /// The files that feed inputs, or how they are read.
    Data,
    /// How many sequences a step has, so that steps are at other places of the data.
    Batch,
    /// The learning rate of steps that are to come.
    Rate,
    /// The optimizer and its numbers.
    Optimizer,
    /// The dtype of activations.
    Precision,
}

impl Change {
    /// The word for it, as `--allow-changed` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Change::Model => "model",
            Change::Data => "data",
            Change::Batch => "batch",
            Change::Rate => "rate",
            Change::Optimizer => "optimizer",
            Change::Precision => "precision",
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.optimizer {
            Optimizer::AdamW { beta1: Real(a), beta2: Real(b), eps: Real(eps) } => write!(f, "AdamW with betas {a} and {b}, epsilon {eps:e}")?,
            Optimizer::Sgd { momentum: Real(m) } => write!(f, "SGD with momentum {m}")?,
            Optimizer::Lion { beta1: Real(a), beta2: Real(b) } => write!(f, "Lion with betas {a} and {b}")?,
            Optimizer::Muon { muon, beta1: Real(a), beta2: Real(b), eps: Real(eps) } => {
                let Muon { momentum, nesterov, scale, factor, iterations } = muon;
                let nesterov = if nesterov { " (Nesterov's)" } else { "" };
                let scale = MuonScale::ALL.iter().find(|s| s.1 == scale).map_or("", |s| s.0);
                write!(f, "Muon with momentum {}{nesterov}, scale {scale} x {}, {iterations} iterations, ", momentum.0, factor.0)?;
                write!(f, "AdamW's betas {a} and {b}, epsilon {eps:e}")?;
            }
        }
        write!(f, ", weight decay {}", self.weight_decay.0)?;
        match self.clip {
            Some(Real(most)) => write!(f, ", gradients clipped at {most}"),
            None => write!(f, ", gradients not clipped"),
        }
    }
}

impl Conditions {
    /// The conditions of a job that reads `data` up to step `steps`.
    pub fn new(job: &Job, data: Vec<DataMark>, steps: u64) -> Conditions {
        let Train { optimizer, schedule, weight_decay, clip, .. } = job.train;
        Conditions {
            data,
            batch: job.global_batch,
            steps,
            schedule,
            recipe: Some(Recipe { optimizer, weight_decay, clip }),
            precision: Some(precision(job)),
        }
    }

    /// What is another here than it was, of a run that has done so many steps, each with how.
    pub fn changes(&self, was: &Conditions, done: u64) -> Vec<(Change, String)> {
        let mut out = vec![];
        // A run of no steps reads no data.
        if !self.data.is_empty() && !was.data.is_empty() {
            out.extend(self.data_changes(was).into_iter().map(|what| (Change::Data, what)));
        }
        if self.batch != was.batch {
            let what = format!("a step had {} sequences and has {}", was.batch, self.batch);
            out.push((Change::Batch, what));
        }
        let apart = (self.steps.saturating_sub(done) / LOOKS).max(1);
        let rate = |c: &Conditions, step| learning_rate(&c.schedule, step, c.steps);
        if let Some(step) = (done + 1..=self.steps).step_by(apart as usize).find(|step| rate(self, *step) != rate(was, *step)) {
            let ends = if self.steps == was.steps || self.schedule != was.schedule {
                String::new()
            } else {
                format!(", as the run was to end after {} and ends after {}", was.steps, self.steps)
            };
            let what = format!("the learning rate of step {step} was to be {:.3e} and is {:.3e}{ends}", rate(was, step), rate(self, step));
            out.push((Change::Rate, what));
        }
        if let (Some(was), Some(now)) = (was.recipe, self.recipe)
            && was != now
        {
            out.push((Change::Optimizer, format!("updates were by {was} and are by {now}")));
        }
        if let (Some(was), Some(now)) = (was.precision, self.precision)
            && was != now
        {
            out.push((Change::Precision, format!("activations were {} and are {}", was.name(), now.name())));
        }
        out
    }

    fn data_changes(&self, was: &Conditions) -> Vec<String> {
        fn find<'a>(list: &'a [DataMark], input: &str) -> Option<&'a DataMark> {
            list.iter().find(|d| d.input == input)
        }
        let here = self.data.iter().filter_map(|now| match find(&was.data, &now.input) {
            None => Some(format!("`{}` had no file and has `{}`", now.input, now.file)),
            Some(before) if before.hash == now.hash => None,
            Some(before) if before.bytes != now.bytes => {
                Some(format!("`{}` was `{}` of {} bytes and is `{}` of {}", now.input, before.file, before.bytes, now.file, now.bytes))
            }
            Some(before) => {
                let epochs = if [&before.file, &now.file].iter().all(|f| f.contains(" epoch")) {
                    ": more steps than an epoch has take further ones, whose samples are in another order, and may come again"
                } else {
                    ""
                };
                Some(format!(
                    "`{}` was `{}` and is `{}`, which has other content or is read in another way{epochs}",
                    now.input, before.file, now.file
                ))
            }
        });
        let gone =
            was.data.iter().filter(|d| find(&self.data, &d.input).is_none()).map(|d| format!("`{}` was `{}` and has no file", d.input, d.file));
        here.chain(gone).collect()
    }
}

/// The half precision of a job's activations, or f32 where none is half.
fn precision(job: &Job) -> DType {
    let mut buffers = job.programs.iter().flat_map(|p| &p.buffers);
    buffers.find(|b| b.dtype.is_half() && matches!(b.content, Content::Activation)).map_or(DType::F32, |b| b.dtype)
}

/// What is another in a job's model than it was.
pub fn model_changes(was: &Provenance, job: &Job) -> Option<(Change, String)> {
    let now = Provenance::of(job);
    let mut what = if was.model == now.model { vec![] } else { vec![format!("`{}` (here `{}`)", was.model, now.model)] };
    what.extend(was.differences(&job.settings));
    // The first text is the model's own, whatever its file is called.
    for k in 0..was.texts.len().max(now.texts.len()) {
        match (was.texts.get(k), now.texts.get(k)) {
            (Some(a), Some(b)) if a.text == b.text => {}
            (Some(a), Some(b)) => {
                let same = a.text.lines().zip(b.text.lines()).take_while(|(a, b)| a == b).count();
                what.push(format!("`{}` from line {} on", b.name, same + 1));
            }
            (Some(Source { name, .. }), None) => what.push(format!("`{name}`, which is no part of it here")),
            (None, Some(Source { name, .. })) => what.push(format!("`{name}`, which was no part of it")),
            (None, None) => {}
        }
    }
    (!what.is_empty()).then(|| (Change::Model, format!("the model was another: {}", few(&what).join(", "))))
}
