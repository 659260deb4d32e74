//! What the sections of a model text say beside the graph: how to train, where to split, foreign weight layouts.

use crate::diag::Span;
use crate::graph::Graph;
use crate::op::Real;
use serde::{Deserialize, Serialize};

/// An elaborated model text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// The forward pass, and updates of states.
    pub graph: Graph,
    /// Every setting with its value, as text, in the header's order.
    pub settings: Vec<(String, String)>,
    /// Whether the text itself, beside the library, asks if it trains, or draws random numbers.
    pub asks_training: bool,
    /// The `train` section, or its defaults.
    pub train: Train,
    /// The `plan` section; empty if there is none.
    pub plan: Plan,
    /// The `weights` sections, in text order.
    pub weights: Vec<Weights>,
}

/// How gradients change parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Optimizer {
    /// Decoupled weight decay, Loshchilov & Hutter 2019.
    AdamW {
        /// The share of the mean of gradients that stays from step to step.
        beta1: Real,
        /// The share of the mean of squared gradients that stays from step to step.
        beta2: Real,
        /// What is added to the root of the mean square, by which is divided.
        eps: Real,
    },
    /// `v = momentum * v + g; p -= lr * v`; no state at momentum 0.
    Sgd {
        /// The share of `v` that stays from step to step.
        momentum: Real,
    },
    /// `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + wd * p); m = beta2 * m + (1 - beta2) * g`, Chen et al.
    /// 2023, algorithm 2.
    Lion {
        /// The weight of `m` in the direction of a step.
        beta1: Real,
        /// The share of `m` that stays from step to step.
        beta2: Real,
    },
    /// Jordan et al. 2024, with the decay and scales of Moonlight (Liu et al. 2025): hidden matrices
    /// ([`crate::matrix`]) go along their momentum with its singular values near one, all else is AdamW's.
    Muon {
        /// What becomes of hidden matrices.
        muon: Muon,
        /// AdamW's share of the mean of gradients that stays from step to step.
        beta1: Real,
        /// AdamW's share of the mean of squared gradients that stays from step to step.
        beta2: Real,
        /// What AdamW adds to the root of the mean square, by which it divides.
        eps: Real,
    },
}

/// What becomes of a hidden matrix with `r` inputs and `c` outputs: `m = momentum * m + g`, and
/// `n = g + momentum * m` with `nesterov`, else `m`. `x = n / (|n| + 1e-7)` is followed by as many `iterations` of
/// Newton-Schulz,
/// `x = 3.4445 x + (-4.7750 a + 2.0315 a^2) x` with `a = x x^T`, and `p -= lr * (factor * scale(r, c) * x + wd * p)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Muon {
    /// The share of `m` that stays from step to step.
    pub momentum: Real,
    /// Whether `n` looks one step ahead.
    pub nesterov: bool,
    /// How the update grows with the matrix's shape.
    pub scale: MuonScale,
    /// What every update is multiplied by, beside its scale.
    pub factor: Real,
    /// Rounds of Newton-Schulz, at most [`Muon::MOST`].
    pub iterations: u32,
}

impl Default for Muon {
    /// Moonlight's: updates are about as large as those of AdamW.
    fn default() -> Muon {
        Muon { momentum: Real(0.95), nesterov: true, scale: MuonScale::Spectral, factor: Real(0.2), iterations: 5 }
    }
}

impl Muon {
    /// More iterations than these are an error: each makes three products of the graph.
    pub const MOST: u32 = 20;

    /// What an update with singular values near one is multiplied by.
    pub fn size(&self, inputs: u64, outputs: u64) -> f64 {
        let (inputs, outputs) = (inputs as f64, outputs as f64);
        let scale = match self.scale {
            MuonScale::Spectral => inputs.max(outputs),
            MuonScale::ShapeScaling => (outputs / inputs).max(1.0),
            MuonScale::UnitRmsNorm => outputs / inputs,
        };
        self.factor.0 * scale.sqrt()
    }
}

/// How Muon's update grows with a matrix, by the names of Megatron-LM (`--muon-scale-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MuonScale {
    /// `sqrt(max(inputs, outputs))`: elements are as large whatever the shape.
    Spectral,
    /// `sqrt(max(1, outputs / inputs))`.
    ShapeScaling,
    /// `sqrt(outputs / inputs)`.
    UnitRmsNorm,
}

impl MuonScale {
    /// Each, under the name that it has in every text.
    pub const ALL: [(&str, MuonScale); 3] =
        [("spectral", MuonScale::Spectral), ("shape_scaling", MuonScale::ShapeScaling), ("unit_rms_norm", MuonScale::UnitRmsNorm)];
}

/// The curve on which a learning rate falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decay {
    /// It stays at its peak.
    Constant,
    /// `1 - t` of `peak - min` is left at part `t` of the falling steps.
    Linear,
    /// `(1 + cos(pi * t)) / 2` of `peak - min` is left at part `t` of the falling steps.
    Cosine,
    /// `2 * 0.5^t - 1` of `peak - min` is left at part `t` of the falling steps.
    Exponential,
    /// `1 - sqrt(t)` of `peak - min` is left at part `t` of the falling steps.
    MinusSqrt,
    /// `peak * sqrt(warmup / step)`, and no less than `min`, which the last step need not reach.
    InverseSquareRoot,
}

impl Decay {
    /// Each, under the name that it has in every text.
    pub const ALL: [(&str, Decay); 6] = [
        ("constant", Decay::Constant),
        ("linear", Decay::Linear),
        ("cosine", Decay::Cosine),
        ("exponential", Decay::Exponential),
        ("minus_sqrt", Decay::MinusSqrt),
        ("inverse_square_root", Decay::InverseSquareRoot),
    ];
}

/// Learning rate over steps: linear warm-up from 0, then `peak`, then along `decay` to `min`, then `min`. It is there
/// at step `steps`, or `constant` steps before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
// The test of the job format's layout knows this type by its old name.
#[serde(rename = "Schedule")]
pub struct LearningRateSchedule {
    /// The curve from `peak` to `min`.
    pub decay: Decay,
    /// The rate at the end of the warm-up.
    pub peak: Real,
    /// The rate at the end of the fall.
    pub min: Real,
    /// Steps until it is `peak`, from the first one on.
    pub warmup: u64,
    /// Steps until the schedule ends, the warm-up included; 0: those of the run.
    pub steps: u64,
    /// So many steps, until it is `min`, in which the rate falls; none is all behind the warm-up.
    #[serde(default)]
    pub falling: Option<u64>,
    /// The last so many of the `steps`, in which the rate stays at `min`.
    #[serde(default)]
    pub constant: u64,
}

/// What the seed of the backward pass is multiplied by, and gradients are divided by before their norm is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LossScale {
    /// The same number in every step.
    Constant(Real),
    /// Doubles after `window` steps in a row whose gradient norm is finite; a step whose norm is not is skipped, and from the
    /// `hysteresis`-th such step since it last doubled on each halves it, down to `least` (Megatron-LM's `DynamicGradScaler`).
    Dynamic {
        /// What it is in the first step.
        initial: Real,
        /// What it does not fall below.
        least: Real,
        /// Finite steps in a row after which it doubles.
        window: u64,
        /// How many steps that are not finite, since it last doubled, it takes until it halves.
        hysteresis: u64,
    },
}

impl LossScale {
    /// Megatron-LM's defaults for fp16.
    pub const FP16: LossScale = LossScale::Dynamic { initial: Real(4294967296.0), least: Real(1.0), window: 1000, hysteresis: 2 };
}

/// The `train` section, or its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Train {
    /// How gradients change parameters.
    pub optimizer: Optimizer,
    /// The learning rate of each step.
    pub schedule: LearningRateSchedule,
    /// The factor of the pull towards 0 of parameters with [`Param::decay`](crate::graph::Param::decay).
    pub weight_decay: Real,
    /// Greatest global gradient norm; none is no clipping.
    pub clip: Option<Real>,
    /// None is no scaling: the compiled step has none.
    pub loss_scale: Option<LossScale>,
}

impl Default for Train {
    fn default() -> Self {
        Train {
            optimizer: Optimizer::AdamW { beta1: Real(0.9), beta2: Real(0.95), eps: Real(1e-8) },
            schedule: LearningRateSchedule {
                decay: Decay::Constant,
                peak: Real(1e-3),
                min: Real(0.0),
                warmup: 0,
                steps: 0,
                falling: None,
                constant: 0,
            },
            weight_decay: Real(0.0),
            clip: None,
            loss_scale: None,
        }
    }
}

/// A setting of the `plan` section: an axis (`tp`, `sp`, `attention.cp`, ...) and its tiers of dim names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanEntry {
    /// As the text names it: `tp`, `attention.cp`, or `recompute`, which has functions.
    pub axis: String,
    /// The names of each tier, in the order in which they are tried.
    pub tiers: Vec<Vec<String>>,
    /// The entry's place in the model text; `None` if that is not known.
    pub span: Option<Span>,
}

/// The `plan` section of a model text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// In text order, no axis twice.
    pub entries: Vec<PlanEntry>,
}

impl Plan {
    /// The entry of an axis; `None` if the section has none.
    pub fn get(&self, axis: &str) -> Option<&PlanEntry> {
        self.entries.iter().find(|e| e.axis == axis)
    }
}

/// A `weights` section: how a foreign checkpoint names and lays out the parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights {
    /// The `hf` of `weights hf { ... }`.
    pub name: String,
    /// The section's lines, in text order.
    pub lines: Vec<WeightLine>,
}

/// One foreign tensor; with `{x}` in the template one per iteration or index of `x`, with `{n + x}` counted on from a
/// setting `n`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightLine {
    /// Parameter paths without iteration numbers, `layers.attn.q.w`.
    pub params: Vec<String>,
    /// `model.layers.{layers}.self_attn.q_proj.weight`.
    pub template: String,
    /// Names under which a checkpoint holds the same once more.
    pub copies: Vec<String>,
    /// The foreign dims, outermost first; none: as declared.
    pub layout: Option<Vec<Product>>,
    /// The line's place in the model text; `None` if that is not known.
    pub span: Option<Span>,
}

/// Dims merged row-major.
pub type Product = Vec<Atom>;

/// A factor of a product of dims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Atom {
    /// A dim of the model, by name: the `heads` of `heads * d`.
    Dim(String),
    /// One alternative per parameter on the left, concatenated.
    Parts(Vec<Product>),
}
