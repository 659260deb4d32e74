//! Checkpoints: what a run is to go on from, on any mesh, as a directory per step.
//!
//! ```text
//! DIR/step-25/rank-0.safetensors   the elements that rank 0 owns
//!             rank-1.safetensors
//!             checkpoint.json      which elements of which tensor lie where, and where the run stood
//! ```
//!
//! Each rank writes the elements that it owns ([`Piece`]), in a file of its own ([`Shard`]); ranks that hold
//! the same elements share them out. Data are hashed in blocks, the hashes stand at the end of the file, and
//! the manifest ([`CheckpointManifest`]) has the hash of these; it has its own hash too. The directory has its name
//! when all of that is on the disk, so that whatever is called `step-25` is whole.
//!
//! A reader needs no mesh: the manifest says for each tensor how its dims are cut ([`Grid`]). Each rank reads
//! what it needs, and a block's hash is checked before anything of it is believed.

mod catalog;
mod dcp;
mod directory;
mod grid;
mod manifest;
mod open;
mod piece;
mod shard;
mod stored;

pub use catalog::Catalog;
pub use dcp::{Distributed, METADATA, is_distributed};
pub use directory::{NewestCheckpoint, newest, step_name, steps};
pub use grid::Grid;
pub use manifest::{CheckpointManifest, MANIFEST, PieceEntry, ShardEntry, TensorEntry};
pub use open::{Checkpoint, initial, resume};
pub use piece::{Owners, Piece};
pub use shard::{Shard, ShardError};
pub use stored::{ComparedSide, Difference, Stored};

use std::io;
use std::path::PathBuf;

/// Why a checkpoint was not found or cannot be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CheckpointError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    /// It is none, or not as it was written.
    #[error("the checkpoint `{}` cannot be read: {what}", .dir.display())]
    Malformed { dir: PathBuf, what: String },
    #[error("`{}` has no checkpoint{}", .dir.display(), .damaged.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    None { dir: PathBuf, damaged: Vec<String> },
}
