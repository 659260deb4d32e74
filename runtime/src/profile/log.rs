//! What a stream notes of its commands.

use crate::comm::Position;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A command that a stream was through. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    pub at: Position,
    /// When the stream came to it.
    pub start: u64,
    /// From then until it was through, what it waited included.
    pub time: u64,
}

/// What one stream notes.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    ran: Vec<Ran>,
    begun: Option<u64>,
}

impl Log {
    pub fn new(room: usize) -> Log {
        Log { ran: Vec::with_capacity(room), begun: None }
    }

    /// The stream is at its next command; it may look at it more than once.
    pub fn begin(&mut self) {
        if self.begun.is_none() {
            self.begun = Some(now());
        }
    }

    pub fn end(&mut self, at: Position) {
        if let Some(start) = self.begun.take() {
            self.ran.push(Ran { at, start, time: now() - start });
        }
    }

    /// The stream goes on without the command.
    pub fn leave_out(&mut self) {
        self.begun = None;
    }

    pub fn ran(self) -> Vec<Ran> {
        self.ran
    }
}

/// Nanoseconds of the monotonic clock, which all processes of a machine share.
pub fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

pub(super) fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
