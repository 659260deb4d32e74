//! What the launchers of a world say to each other, and when.

use super::error::{RunError, RunFailure};
use super::process::{LauncherEvent, ProcessExit, RankHealth};
use super::stop::RunEnd;
use crate::protocol::Event;
use crate::shm::RunRequest;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How often launchers say that they are there.
pub const BEAT: Duration = Duration::from_millis(500);
/// How long a launcher may take nothing of what it is told.
pub const TAKES: Duration = Duration::from_secs(5);

/// What a rank's process says to rank 0's.
#[derive(Serialize, Deserialize)]
pub enum Up {
    Event(Event),
    Health(RankHealth),
    Ended(ProcessExit),
    /// It was asked to end the run.
    Stop,
    /// What its rank had begun when it was asked for this.
    Begun(RunRequest, u64),
}

impl Up {
    /// What a rank's process said.
    pub fn said(self, rank: u64) -> LauncherEvent {
        match self {
            Up::Event(event) => LauncherEvent::Event(rank, event),
            Up::Health(pulse) => LauncherEvent::Health(rank, pulse),
            Up::Ended(ended) => LauncherEvent::Closed(rank, Some(ended)),
            Up::Stop => LauncherEvent::Stop,
            Up::Begun(ask, step) => LauncherEvent::Begun(rank, ask, step),
        }
    }
}

/// What rank 0's process says to the others'.
#[derive(Clone, Serialize, Deserialize)]
pub enum Down {
    Alive,
    /// Its rank is to do this; after which step is said when all launchers have answered.
    Request(RunRequest),
    After(RunRequest, u64),
    /// All ranks are done.
    Done(RunEnd),
    End(RunFailure),
}

/// A word as bytes.
pub fn to_bytes<T: Serialize>(word: &T) -> Vec<u8> {
    postcard::to_stdvec(word).expect("invariant: plain data")
}

/// # Errors
/// Bytes that are no such word.
pub fn from_bytes<T: for<'de> Deserialize<'de>>(word: &[u8]) -> Result<T, RunError> {
    postcard::from_bytes(word).map_err(|e| RunError::Meeting(format!("a rank said something unreadable: {e}; all must be of one version of mcc")))
}
