//! The file of metrics: one JSON object a line, a line a step. It never ends a run, and never loses a line that was there.

use super::error::RunError;
use super::progress::Progress;
use super::save::{Existing, replaceable};
use crate::paths;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Whether a run begins, or goes on with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFrom {
    Start,
    /// What is there stays.
    Resumed,
}

#[derive(Debug)]
pub struct Metrics {
    /// What the user called it.
    name: PathBuf,
    /// None when it could not be written.
    file: Option<File>,
    /// Bytes of whole lines, of a regular file.
    whole: u64,
}

impl Metrics {
    /// Whether [`Metrics::create`] may, before it changes anything.
    ///
    /// # Errors
    /// A file that a run from the start would replace, or one of something else that a resumed run would append to.
    pub fn check(name: &Path, from: MetricsFrom, existing: Existing) -> Result<(), RunError> {
        match from {
            MetricsFrom::Resumed => match holds_metrics(name) {
                Ok(true) => Ok(()),
                Ok(false) => Err(RunError::Foreign { file: name.to_path_buf() }),
                Err(cause) => Err(RunError::Io { file: name.to_path_buf(), cause }),
            },
            MetricsFrom::Start => replaceable(name, existing),
        }
    }

    /// # Errors
    /// What the file system says.
    pub fn create(name: &Path, from: MetricsFrom) -> io::Result<Metrics> {
        let mut file = match from {
            // What is no file, such as a pipe, has no lines that could stay.
            MetricsFrom::Resumed if fs::metadata(name).map_or(true, |about| about.is_file()) => {
                File::options().read(true).append(true).create(true).open(name)?
            }
            MetricsFrom::Start | MetricsFrom::Resumed => paths::create(name)?,
        };
        let about = file.metadata()?;
        let mut whole = if about.is_file() { about.len() } else { 0 };
        if whole > 0 {
            // Whoever wrote it may have been killed in the midst of a line.
            let mut last = [b'\n'];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != [b'\n'] {
                file.write_all(b"\n")?;
                whole += 1;
            }
        }
        Ok(Metrics { name: name.to_path_buf(), file: Some(file), whole })
    }

    /// Writes a step's line. If that fails, gives what to say of it, and writes no more: the file ends with a whole line.
    pub fn write(&mut self, step: &Progress) -> Option<String> {
        let file = self.file.as_mut()?;
        let line = serde_json::to_string(step).expect("invariant: plain data with text keys") + "\n";
        let Err(cause) = file.write_all(line.as_bytes()) else {
            self.whole += line.len() as u64;
            return None;
        };
        if file.metadata().is_ok_and(|m| m.is_file()) {
            let _ = file.set_len(self.whole);
        }
        self.file = None;
        Some(format!("cannot write `{}`: {cause}; it has no metrics from step {} on, and training goes on", self.name.display(), step.step))
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
