//! What ranks write to a checkpoint is all of it, once, and what any rank reads of it is what was written.

use super::written;
use ir::program::Job;
use runtime::checkpoint::Checkpoint;

/// Writes a checkpoint of numbered elements with all ranks of a job, and reads every tensor as a whole.
///
/// # Errors
/// A tensor that differs from what was written.
pub fn round_trip(job: &Job) -> Result<(), String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let manifest = written::write(job, dir.path())?;
    Checkpoint::open(dir.path()).map_err(|e| e.to_string())?.verify().map_err(|e| e.join("; "))?;
    let count = written::read(job, dir.path(), &manifest)?;
    if count == manifest.tensors.len() { Ok(()) } else { Err(format!("{count} of {} tensors were read", manifest.tensors.len())) }
}
