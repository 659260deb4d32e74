//! The directory of a run's checkpoints.

use super::CheckpointError;
use super::open::Checkpoint;
use std::io;
use std::path::{Path, PathBuf};

const PREFIX: &str = "step-";

/// What the checkpoint after a step is called.
pub fn step_name(step: u64) -> String {
    format!("{PREFIX}{step}")
}

/// The steps of which a directory has checkpoints, the last first; none if there is no such directory.
///
/// # Errors
/// What the file system says.
pub fn steps(dir: &Path) -> io::Result<Vec<u64>> {
    let entries = match dir.read_dir() {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(e),
    };
    let mut steps = vec![];
    for entry in entries {
        let name = entry?.file_name();
        // The filter drops names like `step-007`, which no run writes.
        steps.extend(name.to_str().and_then(|n| n.strip_prefix(PREFIX)?.parse().ok().filter(|step| step_name(*step) == n)));
    }
    steps.sort_unstable_by_key(|step| std::cmp::Reverse(*step));
    Ok(steps)
}

/// The checkpoint to go on from.
pub struct NewestCheckpoint {
    /// Opened: its manifest and the sizes of its shards are right.
    pub checkpoint: Checkpoint,
    /// The checkpoint's own directory, such as `DIR/step-25`.
    pub dir: PathBuf,
    /// Later ones, and why they were not taken.
    pub damaged: Vec<(PathBuf, String)>,
}

/// The checkpoint that is here, or of several the last that can be read.
///
/// # Errors
/// There is none.
pub fn newest(dir: &Path) -> Result<NewestCheckpoint, CheckpointError> {
    if dir.join(super::MANIFEST).exists() {
        return Ok(NewestCheckpoint { checkpoint: Checkpoint::open(dir)?, dir: dir.to_path_buf(), damaged: vec![] });
    }
    let mut damaged = vec![];
    for step in steps(dir).map_err(|cause| CheckpointError::Io { file: dir.to_path_buf(), cause })? {
        let dir = dir.join(step_name(step));
        match Checkpoint::open(&dir) {
            Ok(checkpoint) => return Ok(NewestCheckpoint { checkpoint, dir, damaged }),
            Err(e) => damaged.push((dir, e.to_string())),
        }
    }
    Err(CheckpointError::None { dir: dir.to_path_buf(), damaged: damaged.into_iter().map(|d| d.1).collect() })
}
