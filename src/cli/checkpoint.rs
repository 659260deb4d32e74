//! What `mcc checkpoint` takes.

use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Checkpoint {
    /// Lists checkpoints: step, bytes, the mesh that wrote them, the model
    Ls(WhichArgs),
    /// Looks at every byte of checkpoints: whether all is as it was written
    Verify(WhichArgs),
    /// Compares two checkpoints, or files of weights or states, number by number; exits with 1 if they differ
    Diff(DiffArgs),
    /// Makes one file of a checkpoint, or a checkpoint of a file
    Convert(ConvertArgs),
}

#[derive(Args)]
pub struct WhichArgs {
    /// A checkpoint, or a directory of checkpoints, as `mcc run --save` writes them
    pub directory: PathBuf,
    /// For tools: one object per checkpoint
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct DiffArgs {
    /// A checkpoint, or a file of weights or states
    pub first: PathBuf,
    /// The other one
    pub second: PathBuf,
    /// Numbers that differ by no more count as the same
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub tolerance: f64,
}

#[derive(Args)]
pub struct ConvertArgs {
    /// A checkpoint, or a file that `mcc run --save-state` wrote
    pub from: PathBuf,
    /// A file, `.safetensors`, of whole tensors in f32; anything else is a directory, for a checkpoint
    pub to: PathBuf,
    /// Leave optimizer states and the step out, as `mcc run --save-weights` does
    #[arg(long)]
    pub weights: bool,
    /// Replace what is there; without it the conversion is refused
    #[arg(long)]
    pub force: bool,
}
