//! What an interrupted job goes on from: how far it came, and how long its sequences were.
//!
//! Tokens are on the disk first, then lengths, then the state, which takes its name at once. So a state speaks of
//! tokens and lengths that are there, whenever the job ended.

use super::documents::Position;
use super::error::TextError;
use crate::indexed::with;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// How far a job came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// What identifies the job, in words that its user knows.
    pub job: Vec<String>,
    pub position: Position,
    pub documents: u64,
    pub sequences: u64,
    pub tokens: u64,
    /// Tokens of answers.
    #[serde(default)]
    pub counted: u64,
}

/// The files of a job that is not finished.
pub struct Journal {
    state: PathBuf,
    lengths: PathBuf,
    file: BufWriter<File>,
}

/// Lengths and borders that a writer goes on from.
pub struct Resumed {
    pub state: State,
    pub lengths: Vec<i32>,
    pub borders: Vec<i64>,
}

fn paths(prefix: &Path) -> (PathBuf, PathBuf) {
    (with(prefix, ".state.part"), with(prefix, ".lengths.part"))
}

/// What an earlier job of the same kind left; none if there is none, or it left too little.
///
/// # Errors
/// The job was another one.
pub fn resume(prefix: &Path, job: &[String]) -> Result<Option<Resumed>, TextError> {
    let (file, lengths_file) = paths(prefix);
    let Some(state) = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<State>(&bytes).ok()) else { return Ok(None) };
    if state.job != job {
        let of = state.job.iter().find(|what| !job.contains(what)).or(state.job.last());
        return Err(TextError::Other { file, what: of.map_or("nothing", String::as_str).into() });
    }
    let Ok(bytes) = fs::read(&lengths_file) else { return Ok(None) };
    let (mut lengths, mut borders, mut tokens) = (vec![], vec![0], 0u64);
    let mut numbers = bytes.as_chunks::<4>().0.iter().map(|n| i32::from_le_bytes(*n));
    // For each document, the file has the number of its sequences and then their lengths.
    while (borders.len() as u64) <= state.documents {
        let Some(count) = numbers.next() else { return Ok(None) };
        for _ in 0..count {
            match numbers.next() {
                Some(length) if length >= 0 => {
                    lengths.push(length);
                    tokens += length as u64;
                }
                Some(_) | None => return Ok(None),
            }
        }
        borders.push(lengths.len() as i64);
    }
    let whole = lengths.len() as u64 == state.sequences && tokens == state.tokens;
    Ok(whole.then_some(Resumed { state, lengths, borders }))
}

impl Journal {
    /// Begins, or goes on after so many documents and sequences.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(prefix: &Path, resumed: Option<&Resumed>) -> Result<Journal, TextError> {
        let (state, lengths) = paths(prefix);
        let kept = resumed.map_or(0, |r| 4 * (r.state.documents + r.state.sequences));
        let opened = File::options().create(true).append(true).open(&lengths);
        let file = opened.and_then(|f| f.set_len(kept).map(|()| f)).map_err(|cause| TextError::Io { file: lengths.clone(), cause })?;
        Ok(Journal { state, lengths, file: BufWriter::new(file) })
    }

    /// Notes a document.
    ///
    /// # Errors
    /// What the file system says.
    pub fn document(&mut self, lengths: &[usize]) -> Result<(), TextError> {
        let numbers = std::iter::once(lengths.len()).chain(lengths.iter().copied());
        let bytes: Vec<u8> = numbers.flat_map(|n| (n as i32).to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(|cause| TextError::Io { file: self.lengths.clone(), cause })
    }

    /// Notes how far the job is, after its tokens were put on the disk.
    ///
    /// # Errors
    /// What the file system says.
    pub fn settle(&mut self, state: &State) -> Result<(), TextError> {
        let io = |file: &Path| {
            let file = file.to_path_buf();
            |cause| TextError::Io { file, cause }
        };
        self.file.flush().and_then(|()| self.file.get_ref().sync_data()).map_err(io(&self.lengths))?;
        let new = with(&self.state, ".new");
        let written = File::create(&new).and_then(|mut f| {
            serde_json::to_writer(&mut f, state)?;
            f.sync_data()
        });
        written.and_then(|()| fs::rename(&new, &self.state)).map_err(io(&self.state))
    }

    /// Deletes what nobody needs after the data set was written.
    ///
    /// # Errors
    /// What the file system says.
    pub fn finish(self) -> Result<(), TextError> {
        for file in [&self.state, &self.lengths] {
            match fs::remove_file(file) {
                Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => return Err(TextError::Io { file: file.clone(), cause }),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}
