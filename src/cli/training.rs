//! What numbers are, and how parameters are updated.

use super::values::{above_zero, from_one, from_zero, share, whole};
use clap::{Args, ValueEnum};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    Fp32,
    /// Weights, their gradients and the optimizer in f32; a bf16 copy of the weights is made once a step
    Bf16,
    /// As bf16, and the loss is scaled so that small gradients survive
    Fp16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Optimizer {
    Adamw,
    Sgd,
    Lion,
    /// Of hidden matrices; of all else AdamW
    Muon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MuonScaleMode {
    /// With the root of the greater of inputs and outputs
    Spectral,
    /// With the root of outputs / inputs, and no less than 1
    #[value(name = "shape_scaling", alias = "shape-scaling")]
    ShapeScaling,
    /// With the root of outputs / inputs
    #[value(name = "unit_rms_norm", alias = "unit-rms-norm")]
    UnitRmsNorm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DecayStyle {
    Constant,
    Linear,
    Cosine,
    Exponential,
    #[value(name = "minus_sqrt", alias = "minus-sqrt")]
    MinusSqrt,
    /// With the root of the steps, from the warm-up on
    #[value(name = "inverse-square-root", alias = "inverse_square_root")]
    InverseSquareRoot,
    /// Stays at its peak, and falls in the last `--lr-wsd-decay-iters` steps
    #[value(name = "WSD", alias = "wsd")]
    Wsd,
}

/// The curve of the last steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WsdDecayStyle {
    Linear,
    Cosine,
    Exponential,
    #[value(name = "minus_sqrt", alias = "minus-sqrt")]
    MinusSqrt,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Precision")]
pub struct PrecisionArgs {
    /// Working precision: what floats without a type are in the text
    #[arg(long, value_enum, default_value = "fp32")]
    pub dtype: Precision,
    /// The same as --dtype bf16
    #[arg(long, conflicts_with_all = ["dtype", "fp16"])]
    pub bf16: bool,
    /// The same as --dtype fp16
    #[arg(long, conflicts_with_all = ["dtype", "bf16"])]
    pub fp16: bool,
    /// Matrix products of f32 factors on tensor cores: each factor is rounded to tf32, which has 10 bits of mantissa, sums stay f32. For GPUs
    #[arg(long)]
    pub tf32: bool,
    /// Multiplies the loss by a constant for the backward pass, and divides gradients by it [fp16 without it: a scale that adapts]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = above_zero, conflicts_with_all = ["initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"])]
    pub loss_scale: Option<f64>,
    /// First scale of one that adapts [default: 4294967296]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = above_zero)]
    pub initial_loss_scale: Option<f64>,
    /// Least scale of one that adapts [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = above_zero)]
    pub min_loss_scale: Option<f64>,
    /// Steps without overflow after which the scale doubles [default: 1000]
    #[arg(long, value_name = "N", value_parser = from_one::<u64>)]
    pub loss_scale_window: Option<u64>,
    /// Steps with overflow, since the scale last doubled, from which on each halves it [default: 2]
    #[arg(long, value_name = "N", value_parser = from_one::<u64>)]
    pub hysteresis: Option<u64>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Training (each overrides its own field of the text's `train` section)")]
pub struct TrainingArgs {
    /// What updates parameters
    #[arg(long, value_enum)]
    pub optimizer: Option<Optimizer>,
    /// Peak learning rate
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = from_zero)]
    pub lr: Option<f64>,
    /// Final learning rate
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = from_zero)]
    pub min_lr: Option<f64>,
    /// How the rate falls after the warm-up
    #[arg(long, value_enum)]
    pub lr_decay_style: Option<DecayStyle>,
    /// Steps of linear warm-up
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub lr_warmup_iters: Option<u64>,
    /// Step at which the final rate is reached
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub lr_decay_iters: Option<u64>,
    /// How the rate of WSD falls [default: the text's, else exponential]
    #[arg(long, value_enum)]
    pub lr_wsd_decay_style: Option<WsdDecayStyle>,
    /// The last steps, in which the rate of WSD falls
    #[arg(long, value_name = "N", value_parser = from_one::<u64>)]
    pub lr_wsd_decay_iters: Option<u64>,
    /// The last steps before `--lr-decay-iters`, in which the rate stays at its final value
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub lr_constant_iters: Option<u64>,
    /// Of parameters with two or more dims that are not marked `@no_decay`
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = from_zero)]
    pub weight_decay: Option<f64>,
    /// Share that the mean of the gradients keeps in a step
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub adam_beta1: Option<f64>,
    /// Share that the mean of their squares keeps in a step
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub adam_beta2: Option<f64>,
    /// Added to the root of the mean of squares
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = above_zero)]
    pub adam_eps: Option<f64>,
    /// Share that the velocity keeps in a step
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub sgd_momentum: Option<f64>,
    /// Share that the mean of the gradients keeps where it says which way a parameter goes
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub lion_beta1: Option<f64>,
    /// Share that it keeps from step to step
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub lion_beta2: Option<f64>,
    /// Share that the momentum of a hidden matrix keeps in a step
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub muon_momentum: Option<f64>,
    /// Whether a hidden matrix goes where its momentum will be
    #[arg(long, value_enum, value_name = "SWITCH", num_args = 0..=1, default_missing_value = "on")]
    pub muon_nesterov: Option<Switch>,
    /// How updates grow with a matrix
    #[arg(long, value_enum)]
    pub muon_scale_mode: Option<MuonScaleMode>,
    /// What updates of matrices are multiplied by beside
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = from_zero)]
    pub muon_extra_scale_factor: Option<f64>,
    /// Iterations of Newton-Schulz
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(ir::model::Muon::MOST)))]
    pub muon_num_ns_steps: Option<u32>,
    /// Greatest global gradient norm; 0 for none
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = from_zero)]
    pub clip_grad: Option<f64>,
}
