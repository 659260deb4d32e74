//! A file of lines, JSON objects: it never ends a run, and never loses a line that was there.

use crate::paths;
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// What becomes of lines that a file has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingLines {
    /// They are removed.
    Replace,
    /// They are kept, and what is written goes behind them.
    Keep,
}

/// A file that lines are written to.
#[derive(Debug)]
pub struct Lines {
    /// What the user called it.
    pub name: PathBuf,
    /// None when it could not be written.
    file: Option<File>,
    /// Bytes of whole lines, of a regular file.
    whole: u64,
}

impl Lines {
    /// # Errors
    /// What the file system says.
    pub fn create(name: &Path, earlier: ExistingLines) -> io::Result<Lines> {
        let mut file = match earlier {
            // A pipe, or anything else that is no file, has no lines that could stay.
            ExistingLines::Keep if fs::metadata(name).map_or(true, |about| about.is_file()) => {
                File::options().read(true).append(true).create(true).open(name)?
            }
            ExistingLines::Replace | ExistingLines::Keep => paths::create(name)?,
        };
        let about = file.metadata()?;
        let mut whole = if about.is_file() { about.len() } else { 0 };
        if whole > 0 {
            // A writer that was killed may have left half a line.
            let mut last = [b'\n'];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != [b'\n'] {
                file.write_all(b"\n")?;
                whole += 1;
            }
        }
        Ok(Lines { name: name.to_path_buf(), file: Some(file), whole })
    }

    /// Writes a line. If that fails, gives why, once, and writes no more: the file ends with a whole line.
    pub fn write(&mut self, line: &impl Serialize) -> Option<io::Error> {
        let file = self.file.as_mut()?;
        let line = serde_json::to_string(line).expect("invariant: plain data with text keys") + "\n";
        let Err(cause) = file.write_all(line.as_bytes()) else {
            self.whole += line.len() as u64;
            return None;
        };
        if file.metadata().is_ok_and(|m| m.is_file()) {
            let _ = file.set_len(self.whole);
        }
        self.file = None;
        Some(cause)
    }
}
