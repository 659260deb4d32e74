//! The file of metrics: one JSON object a line, a line a step. It never ends a run, and never loses a line that was there.

use super::save::replaceable;
use super::{Existing, Progress, RunError};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Whether a run begins, or goes on with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
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
    /// A file that a run from the start would replace.
    pub fn check(name: &Path, from: From, existing: Existing) -> Result<(), RunError> {
        match from {
            From::Resumed => Ok(()),
            From::Start => replaceable(name, existing),
        }
    }

    /// # Errors
    /// What the file system says.
    pub fn create(name: &Path, from: From) -> io::Result<Metrics> {
        let mut file = match from {
            From::Start => File::create(name)?,
            From::Resumed => File::options().read(true).append(true).create(true).open(name).or_else(|e| match e.kind() {
                // What cannot be read, such as a pipe, has no lines either.
                io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => File::options().append(true).open(name),
                _ => Err(e),
            })?,
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
