//! What a stream notes of its commands.

use crate::comm::Position;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A command that a stream was through. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// Where the command is in the rank's program.
    pub at: Position,
    /// When the stream came to it.
    pub start: u64,
    /// Time until it was through, waiting included.
    pub time: u64,
}

/// What is taken as the time of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Time that passed, whether or not the stream's thread had a core.
    Wall,
    /// The time that the stream's thread had on a core: all of what the command took only where one thread runs it.
    Thread,
}

impl Clock {
    fn now(self) -> u64 {
        match self {
            Clock::Wall => now(),
            Clock::Thread => nanoseconds(ClockId::ThreadCPUTime),
        }
    }
}

/// What one stream notes.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    ran: Vec<Ran>,
    clock: Clock,
    /// By the wall's clock, and by the one that is asked for.
    begun: Option<(u64, u64)>,
}

impl Log {
    pub fn new(room: usize, clock: Clock) -> Log {
        Log { ran: Vec::with_capacity(room), clock, begun: None }
    }

    /// The stream is at its next command; it may look at it more than once.
    pub fn begin(&mut self) {
        if self.begun.is_none() {
            let start = now();
            self.begun = Some((start, if self.clock == Clock::Wall { start } else { self.clock.now() }));
        }
    }

    pub fn end(&mut self, at: Position) {
        if let Some((start, begun)) = self.begun.take() {
            self.ran.push(Ran { at, start, time: self.clock.now() - begun });
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
