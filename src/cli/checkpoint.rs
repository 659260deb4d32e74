//! What `mcc checkpoint` takes.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Checkpoint {
    /// Lists checkpoints: step, bytes, the mesh that wrote them, the model
    Ls(WhichArgs),
    /// Looks at every byte of checkpoints: whether all is as it was written. PyTorch's have no hashes: of them
    /// it is checksums (CRC-32), and whether each element is there once
    Verify(WhichArgs),
    /// Compares two checkpoints, or files of weights or states, number by number; exits with 1 if they differ
    Diff(DiffArgs),
    /// Makes a checkpoint, a checkpoint of PyTorch's (DCP) or one file of each other
    Convert(ConvertArgs),
}

#[derive(Args)]
pub struct WhichArgs {
    /// A checkpoint, or a directory of checkpoints, as `mcc run --save` or PyTorch (DCP) writes them
    pub directory: PathBuf,
    /// For tools: one object per checkpoint
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct DiffArgs {
    /// A checkpoint, also one of PyTorch's (DCP), or a file of weights or states
    pub first: PathBuf,
    /// The other one
    pub second: PathBuf,
    /// Numbers that differ by no more count as the same
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub tolerance: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A checkpoint of mcc's, from which a run goes on
    Checkpoint,
    /// One file of whole tensors
    Safetensors,
    /// A directory that torch.distributed.checkpoint loads
    Dcp,
}

#[derive(Args)]
pub struct ConvertArgs {
    /// A checkpoint, a directory of torch.distributed.checkpoint (DCP), or a file that `mcc run --save-state` wrote
    pub from: PathBuf,
    /// A file, or a directory for a checkpoint. All numbers are stored in f32, under the names they have
    pub to: PathBuf,
    /// What is made; left out, a name that ends in `.safetensors` says a file, and any other a checkpoint of mcc's
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Leave optimizer states and the step out, as `mcc run --save-weights` does
    #[arg(long)]
    pub weights: bool,
    /// Replace what is there; without it the conversion is refused
    #[arg(long)]
    pub force: bool,
}
