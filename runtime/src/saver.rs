//! How a rank writes its part of a checkpoint.

use crate::checkpoint::{Owners, Shard, ShardError};
use crate::device::Memory;
use crate::protocol::{Event, Saves};
use crate::weights::Mark;
use ir::program::Job;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::Instant;

/// What a rank writes from time to time.
pub struct Saver<'a> {
    saves: &'a Saves,
    /// None if the rank owns nothing.
    shard: Option<Shard<'a>>,
    /// Of the next checkpoint.
    number: u64,
    /// The next file, its space reserved.
    reserved: Option<File>,
}

/// A number that nothing could go on from.
pub struct NotFinite {
    pub tensor: String,
    pub element: u64,
    pub value: f64,
}

impl<'a> Saver<'a> {
    /// Reserves the space for the first checkpoint.
    ///
    /// # Errors
    /// What the file system says, with the bytes that were to be reserved.
    pub fn new(job: &'a Job, rank: u64, saves: &'a Saves) -> Result<Saver<'a>, (u64, io::Error)> {
        let shard = Shard::new(rank, Owners::new(job).pieces(rank));
        let mut saver = Saver { saves, shard, number: 0, reserved: None };
        let bytes = saver.shard.as_ref().map_or(0, Shard::bytes);
        // The launcher has made the first directory: it is seen where all machines share it.
        fs::metadata(saves.unfinished(0)).map_err(|e| (bytes, e))?;
        saver.reserved = saver.reserve().map_err(|e| (bytes, e))?;
        Ok(saver)
    }

    fn path(&self) -> Option<PathBuf> {
        Some(self.saves.unfinished(self.number).join(self.shard.as_ref()?.file()))
    }

    fn reserve(&self) -> io::Result<Option<File>> {
        let (Some(shard), Some(path)) = (&self.shard, self.path()) else { return Ok(None) };
        if self.number > 0 {
            // Whoever comes first.
            fs::create_dir(self.saves.unfinished(self.number)).or_else(|e| if e.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })?;
        }
        let file = File::options().write(true).create_new(true).open(&path)?;
        let reserved = match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, shard.bytes()) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => other,
        };
        match reserved {
            Ok(()) => Ok(Some(file)),
            Err(e) => {
                // What it has taken so far, others can use.
                let _ = fs::remove_file(&path);
                Err(e.into())
            }
        }
    }

    /// Writes this rank's part of the state after a step; if the run goes on, reserves the space for the next.
    ///
    /// # Errors
    /// A number that is not finite: the run has nothing to go on from. Files that cannot be written are said in the event.
    pub fn save(&mut self, memory: &dyn Memory, mark: &Mark, goes_on: bool) -> Result<Event, NotFinite> {
        let begun = Instant::now();
        let written = self.write(memory);
        let (number, step) = (self.number, mark.step);
        self.number += 1;
        let event = match written {
            Ok(hash) => Event::Saved { number, mark: *mark, hash, milliseconds: begun.elapsed().as_secs_f64() * 1e3 },
            Err(ShardError::Io(cause)) => Event::Unsaved { number, step, why: cause.to_string() },
            Err(ShardError::NotFinite { tensor, element, value }) => return Err(NotFinite { tensor, element, value }),
        };
        if goes_on {
            // If there is no room now, there may be when it is needed.
            self.reserved = self.reserve().unwrap_or(None);
        }
        Ok(event)
    }

    fn write(&mut self, memory: &dyn Memory) -> Result<Option<[u8; 32]>, ShardError> {
        let file = match self.reserved.take() {
            Some(file) => Some(file),
            None => self.reserve()?,
        };
        let (Some(shard), Some(file)) = (&self.shard, file) else { return Ok(None) };
        let hash = shard.write(memory, &file)?;
        file.sync_all()?;
        Ok(Some(hash))
    }
}
