//! How a run ends early: all ranks after the same step, though they are at different ones when they are asked to.
//!
//! A rank says which step it begins, then looks whether it was asked to stop. Whoever asks does so first, then reads what all ranks have begun, and publishes
//! the greatest as the last step. All four are sequentially consistent: a step that was not read as begun is begun by a rank that sees the request, and that
//! waits for the last step to be known. The wait needs no other rank, so it cannot deadlock.

use super::{Board, Shm};
use crate::comm::CommError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nobody was asked to stop.
const NO: u64 = 0;
/// All are to stop; after which step is not known yet.
const ASKED: u64 = 1;
/// To this the last step is added.
const KNOWN: u64 = 2;

/// How often a rank looks whether the last step is known.
const LOOK: Duration = Duration::from_millis(1);

/// What a rank does that has come to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    Run,
    /// The step before was the last.
    Stop,
}

impl Board<'_> {
    fn last(&self) -> &AtomicU64 {
        self.segment.u64(self.layout.stop)
    }

    /// Asks the ranks of this machine to stop. Whoever asked reads [`Board::begun`] of all ranks then, and gives the greatest to [`Board::stop_after`].
    pub fn ask_to_stop(&self) {
        let _ = self.last().compare_exchange(NO, ASKED, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The latest step that a rank of this machine has begun; 0 if none.
    pub fn begun(&self, rank: u64) -> u64 {
        self.segment.u64(self.layout.status(rank).begun()).load(Ordering::SeqCst)
    }

    /// Says after which step the ranks of this machine stop.
    pub fn stop_after(&self, step: u64) {
        self.last().store(KNOWN.saturating_add(step), Ordering::SeqCst);
    }
}

impl Shm<'_> {
    /// To be called before anything of a step is done.
    ///
    /// # Errors
    /// If the run ends while it is not known after which step to stop.
    pub fn begin(&self, step: u64) -> Result<Begin, CommError> {
        let board = self.board;
        board.segment.u64(board.layout.status(self.rank).begun()).store(step, Ordering::SeqCst);
        loop {
            match board.last().load(Ordering::SeqCst) {
                NO => return Ok(Begin::Run),
                ASKED => {}
                known if step <= known - KNOWN => return Ok(Begin::Run),
                _ => return Ok(Begin::Stop),
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
