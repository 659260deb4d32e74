//! What the sections of a model text say beside the graph: how to train, where to split, foreign weight layouts.

use crate::diag::Span;
use crate::graph::Graph;
use crate::op::Real;
use serde::{Deserialize, Serialize};

/// An elaborated model text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    pub graph: Graph,
    /// Every setting with its value, as text, in the header's order.
    pub settings: Vec<(String, String)>,
    /// Whether the text itself, beside the library, asks if it trains, or draws random numbers.
    pub asks_training: bool,
    pub train: Train,
    pub plan: Plan,
    pub weights: Vec<Weights>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Optimizer {
    /// Decoupled weight decay, Loshchilov & Hutter 2019.
    AdamW { beta1: Real, beta2: Real, eps: Real },
    /// `v = momentum * v + g; p -= lr * v`; no state at momentum 0.
    Sgd { momentum: Real },
    /// `p -= lr * (sign(beta1 * m + (1 - beta1) * g) + wd * p); m = beta2 * m + (1 - beta2) * g`, Chen et al.
    /// 2023, algorithm 2.
    Lion { beta1: Real, beta2: Real },
    /// Jordan et al. 2024, with the decay and scales of Moonlight (Liu et al. 2025): hidden matrices
    /// ([`crate::matrix`]) go along their momentum with its singular values near one, all else is AdamW's.
    Muon { muon: Muon, beta1: Real, beta2: Real, eps: Real },
}

/// What becomes of a hidden matrix with `r` inputs and `c` outputs: `m = momentum * m + g`, and
/// `n = g + momentum * m` with `nesterov`, else `m`. `x = n / (|n| + 1e-7)` is followed by as many `iterations` of
/// Newton-Schulz,
/// `x = 3.4445 x + (-4.7750 a + 2.0315 a^2) x` with `a = x x^T`, and `p -= lr * (factor * scale(r, c) * x + wd * p)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Muon {
    pub momentum: Real,
    pub nesterov: bool,
    pub scale: MuonScale,
    pub factor: Real,
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
    Linear,
    Cosine,
    Exponential,
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
pub struct Schedule {
    pub decay: Decay,
    pub peak: Real,
    pub min: Real,
    pub warmup: u64,
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
    Constant(Real),
    /// Doubles after `window` steps in a row whose gradient norm is finite; a step whose norm is not is skipped, and from the
    /// `hysteresis`-th such step since it last doubled on each halves it, down to `least` (Megatron-LM's `DynamicGradScaler`).
    Dynamic {
        initial: Real,
        least: Real,
        window: u64,
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
    pub optimizer: Optimizer,
    pub schedule: Schedule,
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
            schedule: Schedule { decay: Decay::Constant, peak: Real(1e-3), min: Real(0.0), warmup: 0, steps: 0, falling: None, constant: 0 },
            weight_decay: Real(0.0),
            clip: None,
            loss_scale: None,
        }
    }
}

/// A setting of the `plan` section: an axis (`tp`, `sp`, `attention.cp`, ...) and its tiers of dim names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanEntry {
    pub axis: String,
    pub tiers: Vec<Vec<String>>,
    pub span: Option<Span>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub entries: Vec<PlanEntry>,
}

impl Plan {
    pub fn get(&self, axis: &str) -> Option<&PlanEntry> {
        self.entries.iter().find(|e| e.axis == axis)
    }
}

/// A `weights` section: how a foreign checkpoint names and lays out the parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights {
    pub name: String,
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
    pub span: Option<Span>,
}

/// Dims merged row-major.
pub type Product = Vec<Atom>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Atom {
    Dim(String),
    /// One alternative per parameter on the left, concatenated.
    Parts(Vec<Product>),
}
