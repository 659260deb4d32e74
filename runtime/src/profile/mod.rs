//! Where the time of a step goes.
//!
//! Each stream of a rank notes one [`Ran`] per command: when it came to it and when it was through. From these and
//! the job alone follow the table of kernels ([`table`]) and the trace of all ranks and streams ([`trace`]); nothing
//! else is measured while steps run. A stream that nobody watches looks at one `Option` per command.

pub mod breakdown;
mod ceilings;
pub mod exchanges;
mod log;
pub mod named;
pub mod table;
pub mod trace;

pub use ceilings::{Ceilings, flops, measure};
pub(crate) use log::Log;
pub use log::{Clock, Ran, now};
pub use table::is_own;

use crate::executor::CommandOrder;
use crate::protocol::Spread;
use log::nanoseconds;
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

/// Steps before those that are timed, if a run has so many: the first ones touch memory for the first time.
pub const WARM_UP: u64 = 2;

/// The steps that are timed, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileWindow {
    /// Number of the first step that is timed, from 1.
    pub first: u64,
    /// Number of the last step that is timed.
    pub last: u64,
}

impl ProfileWindow {
    /// So many steps of those after `done` and up to `last`, behind the warm-up if there are enough; none of none.
    pub fn new(done: u64, last: u64, steps: u64) -> Option<ProfileWindow> {
        let steps = steps.min(last.saturating_sub(done));
        let first = (done + 1 + WARM_UP).min(last + 1 - steps);
        (steps > 0).then(|| ProfileWindow { first, last: first + steps - 1 })
    }

    /// Whether the step with this number is timed.
    pub fn has(self, step: u64) -> bool {
        (self.first..=self.last).contains(&step)
    }

    /// How many steps are timed; at least 1.
    pub fn steps(self) -> usize {
        (self.last + 1 - self.first) as usize
    }
}

/// What a rank says of the steps that were timed, in parts that are messages of some megabytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileChunk {
    /// Nanoseconds from the monotonic clock to the time of day.
    wall: u64,
    steps: Vec<(u64, u64, u64)>,
    pub(crate) ran: Vec<Ran>,
}

impl ProfileChunk {
    /// Commands in one part.
    const MOST: usize = 100_000;

    /// Steps are their numbers, begins and ends.
    pub fn of(steps: Vec<(u64, u64, u64)>, ran: Vec<Ran>) -> Vec<ProfileChunk> {
        let wall = nanoseconds(ClockId::Realtime).saturating_sub(now());
        let first = ProfileChunk { wall, steps, ran: vec![] };
        let rest = ran.chunks(ProfileChunk::MOST).map(|ran| ProfileChunk { wall, steps: vec![], ran: ran.to_vec() });
        [first].into_iter().chain(rest).collect()
    }

    pub(crate) fn steps(&self) -> impl Iterator<Item = TimedStep> {
        self.steps.iter().map(|(step, start, end)| TimedStep { step: *step, start: *start, end: *end })
    }
}

/// A step of a rank, from its data to its update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// When it began, in nanoseconds of the clock that ranks of a machine share.
    pub start: u64,
    /// When it ended, in nanoseconds of the clock that ranks of a machine share.
    pub end: u64,
}

/// What a rank did in the steps that were timed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    wall: u64,
    /// The steps that were timed, in order.
    pub steps: Vec<TimedStep>,
    /// Stream after stream, each in its order.
    pub ran: Vec<Ran>,
}

/// What all ranks did.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Of a rank's threads; of CPUs alone.
    pub ceilings: Option<Ceilings>,
    /// Whether streams ran by themselves, or all commands as one list.
    pub order: CommandOrder,
    /// What each rank did, by its number.
    pub ranks: Vec<Recorded>,
}

impl Profile {
    /// The profile of this many ranks, which have said nothing yet.
    pub fn new(ranks: u64, order: CommandOrder, ceilings: Option<Ceilings>) -> Profile {
        Profile { ceilings, order, ranks: vec![Recorded::default(); ranks as usize] }
    }

    /// Takes in the next part of what a rank says.
    pub fn add(&mut self, rank: u64, part: ProfileChunk) {
        let held = &mut self.ranks[rank as usize];
        held.wall = part.wall;
        held.steps.extend(part.steps());
        held.ran.extend(part.ran);
    }

    /// Brings the ranks of all machines to the clock of rank 0's, by the time of day on each.
    pub fn align(&mut self, spread: &Spread) {
        let walls: Vec<u64> = (0..spread.places.len() as u64).map(|r| self.ranks[spread.neighbours(r)[0] as usize].wall).collect();
        for (rank, wall) in self.ranks.iter_mut().zip(&walls) {
            let shift = wall.wrapping_sub(walls[0]);
            rank.steps.iter_mut().for_each(|s| (s.start, s.end) = (s.start.wrapping_add(shift), s.end.wrapping_add(shift)));
            rank.ran.iter_mut().for_each(|r| r.start = r.start.wrapping_add(shift));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_timed_behind_the_warm_up_if_there_are_enough() {
        let window = |done, last, steps| ProfileWindow::new(done, last, steps).map(|w| (w.first, w.last));
        assert_eq!([window(0, 100, 5), window(0, 7, 5), window(0, 6, 5), window(0, 3, 5)], [Some((3, 7)), Some((3, 7)), Some((2, 6)), Some((1, 3))]);
        assert_eq!([window(10, 17, 5), window(10, 11, 5), window(10, 10, 5), window(0, 5, 0)], [Some((13, 17)), Some((11, 11)), None, None]);
    }
}
