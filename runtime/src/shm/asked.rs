//! What ranks are asked to do between two steps, and how all do it between the same two, though they are at
//! different ones when they are asked: to end the run, or to save.
//!
//! A rank says which step it begins, then looks whether it is asked. Whoever asks does so first, then reads
//! what all ranks have begun, and publishes the greatest as the last step before. All four are sequentially
//! consistent: a step that was not read as begun is begun by a rank that sees the request, and that waits for
//! the last step to be known. The wait needs no other rank, so it cannot deadlock.
//!
//! Ranks may be asked again when all have done what they were asked for.

use super::{Shm, StatusBoard};
use crate::comm::CommError;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What all ranks can be asked to do between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunRequest {
    /// A checkpoint of what the last step came to.
    Save,
    /// The end of the run.
    Stop,
}

/// Requests of which each has a word of the memory.
pub const ASKS: usize = 2;

/// Word of a request: nothing was asked for.
const NO: u64 = 0;
/// It is; after which step is not known yet.
const ASKED: u64 = 1;
/// Word of a request whose last step is known: the step is added to this.
const KNOWN: u64 = 2;

/// How often a rank looks whether the last step is known.
const LOOK: Duration = Duration::from_millis(1);

/// What a rank does that has come to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// It does the step.
    Run,
    /// First it saves what the step before came to, unless it has.
    Save,
    /// The step before was the last.
    Stop,
}

impl StatusBoard<'_> {
    fn asked(&self, ask: RunRequest) -> &AtomicU64 {
        self.segment.u64(self.layout.asked + 8 * ask as u64)
    }

    /// Asks the ranks of this machine. Whoever asked reads [`StatusBoard::begun`] of all ranks then, and gives the
    /// greatest to [`StatusBoard::settle`].
    pub fn ask(&self, ask: RunRequest) {
        self.asked(ask).store(ASKED, Ordering::SeqCst);
    }

    /// The latest step that a rank of this machine has begun; 0 if none.
    pub fn begun(&self, rank: u64) -> u64 {
        self.segment.u64(self.layout.status(rank).begun()).load(Ordering::SeqCst)
    }

    /// Says after which step the ranks of this machine do what was asked for.
    pub fn settle(&self, ask: RunRequest, step: u64) {
        self.asked(ask).store(KNOWN.saturating_add(step), Ordering::SeqCst);
    }
}

impl Shm<'_> {
    /// To be called before anything of a step is done.
    ///
    /// # Errors
    /// If the run ends while it is not known after which step to stop or save.
    pub fn begin(&self, step: u64) -> Result<Begin, CommError> {
        self.board.segment.u64(self.board.layout.status(self.rank).begun()).store(step, Ordering::SeqCst);
        if self.last(RunRequest::Stop)?.is_some_and(|last| step > last) {
            return Ok(Begin::Stop);
        }
        // A save that was asked for several steps ago is done.
        Ok(if self.last(RunRequest::Save)?.is_some_and(|last| step == last + 1) { Begin::Save } else { Begin::Run })
    }

    /// The step after which something is asked for, if it is.
    fn last(&self, ask: RunRequest) -> Result<Option<u64>, CommError> {
        loop {
            match self.board.asked(ask).load(Ordering::SeqCst) {
                NO => return Ok(None),
                ASKED => {}
                known => return Ok(Some(known - KNOWN)),
            }
            self.waiting(None, &[]);
            if let Some(reason) = self.ended() {
                return Err(CommError::Aborted(reason));
            }
            std::thread::sleep(LOOK);
            self.running();
        }
    }
}
