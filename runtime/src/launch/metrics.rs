//! The file of metrics: one JSON object a line, a line a step. It never ends a run, and never loses a line that was
//! there.

use super::error::RunError;
use super::progress::StepMetrics;
use super::save::{Existing, replaceable};
use crate::lines::{ExistingLines, Lines};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

#[derive(Debug)]
pub struct Metrics(Lines);

impl Metrics {
    /// Whether [`Metrics::create`] may, before it changes anything.
    ///
    /// # Errors
    /// A file that a run from the start would replace, or one of something else that a resumed run would append to.
    pub fn check(name: &Path, earlier: ExistingLines, existing: Existing) -> Result<(), RunError> {
        match earlier {
            ExistingLines::Keep => match holds_metrics(name) {
                Ok(true) => Ok(()),
                Ok(false) => Err(RunError::Foreign { file: name.to_path_buf() }),
                Err(cause) => Err(RunError::Io { file: name.to_path_buf(), cause }),
            },
            ExistingLines::Replace => replaceable(name, existing),
        }
    }

    /// # Errors
    /// What the file system says.
    pub fn create(name: &Path, earlier: ExistingLines) -> io::Result<Metrics> {
        Lines::create(name, earlier).map(Metrics)
    }

    /// Writes a step's line. If that fails, gives what to say of it, and writes no more.
    pub fn write(&mut self, step: &StepMetrics) -> Option<String> {
        let cause = self.0.write(step)?;
        Some(format!("cannot write `{}`: {cause}; it has no metrics from step {} on, and training goes on", self.0.name.display(), step.step))
    }
}

/// How each line begins, as far as a file may have been cut.
const LINE: &[u8] = b"{\"step\":";

/// Whether a file holds metrics, or nothing; so do devices and pipes.
fn holds_metrics(name: &Path) -> io::Result<bool> {
    match fs::metadata(name) {
        Ok(about) if about.is_file() && about.len() > 0 => {
            let mut start = vec![];
            File::open(name)?.take(LINE.len() as u64).read_to_end(&mut start)?;
            Ok(LINE.starts_with(&start))
        }
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
    }
}
