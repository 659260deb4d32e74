//! Communication among processes of one machine, through shared memory.
//!
//! **Guarantees.** Members of a group get the same bits, in every run: numbers are combined in rank order, each by
//! every member or by one for all, in the dtype of the numbers. A send completes without its receive if the channel's
//! ring has room; there is always room for as many messages as the job has in flight, and for one more of the
//! largest. Staging is bounded: a collective of any size goes by chunks, of which each member has two.
//!
//! Communications are polled ([`Pending`]): several of a rank can be under way, of different groups and channels.
//! Whoever posts, takes, sends or receives rings the others' doorbells.
//!
//! **Several machines.** Each has a segment of the same layout, and every counter and slot has one writer. What a
//! rank writes there for ranks of other machines, it also sends to these ([`Wires`]): first what it wrote, then the
//! counter. So nothing else here knows of machines.
//!
//! **MPI.** Where ranks exchange by that ([`Shm::exchange_by`]), what they are and are asked is here all the same,
//! and numbers are not.
//!
//! A rank that waits spins a little, then sleeps; every 50 ms it looks whether the run has ended. That no rank waits
//! for ever is the launcher's business ([`StatusBoard`]).

mod asked;
mod by_mpi;
mod layout;
mod pending;
mod segment;
mod wires;

pub use asked::{ASKS, Begin, RunRequest};
pub use layout::{CHUNK, SegmentLayout, bytes_of_rank};
pub use pending::{APART, PIECE, Pending, TransferProgress};
pub use segment::Segment;
pub use wires::{Receiver, Wires, take};

use crate::comm::{CommError, Communicator, Exchange, Message, Position, Progress};
use crate::device::Memory;
use crate::executor::Transfer;
use crate::mpi::Mpi;
use ir::program::ProgramPhase;
use layout::REASON;
use segment::Counter;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a rank that waits sleeps until it looks whether the run has ended.
const NAP: Duration = Duration::from_millis(50);

/// What a launcher sees of its ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Counts commands begun and pieces of communications done.
    pub progress: u64,
    /// Number of the step that it said last; 0 before the first.
    pub step: u64,
    /// The command that it said last.
    pub position: Position,
    /// For whom it waits, if it does.
    pub waits: Option<Vec<u64>>,
}

/// The part of the segment that says how all ranks are, and whether the run has ended.
#[derive(Clone, Copy)]
pub struct StatusBoard<'a> {
    /// The memory that the processes of this machine share.
    pub segment: &'a Segment,
    /// Where everything lies in the segment.
    pub layout: &'a SegmentLayout,
}

impl StatusBoard<'_> {
    /// How a rank is, by what it wrote into the segment last.
    pub fn status(&self, rank: u64) -> Status {
        let (segment, area) = (self.segment, self.layout.status(rank));
        let number = |k| segment.u32(area.position(k)).load(Ordering::Relaxed);
        let phase = ProgramPhase::ALL.get(number(0) as usize).copied().unwrap_or_default();
        let waiting = segment.u32(area.waiting()).load(Ordering::Acquire) != 0;
        Status {
            progress: segment.u64(area.progress()).load(Ordering::Acquire),
            step: segment.u64(area.step()).load(Ordering::Relaxed),
            position: Position { phase, call: number(1), command: number(2) },
            waits: waiting.then(|| (0..self.layout.world).filter(|r| segment.u8(area.waits(*r)).load(Ordering::Relaxed) != 0).collect()),
        }
    }

    /// Why the run has ended, if it has.
    pub fn ended(&self) -> Option<String> {
        let segment = self.segment;
        if segment.u32(self.layout.end).load(Ordering::Acquire) < 2 {
            return None;
        }
        let bytes = segment.u32(self.layout.end + 4).load(Ordering::Relaxed).min((REASON - 8) as u32);
        Some(String::from_utf8_lossy(segment.slice(self.layout.end + 8, bytes as usize)).into_owned())
    }

    /// Ends the run for all ranks. The first reason stays.
    pub fn end(&self, reason: &str) {
        let flag = self.segment.u32(self.layout.end);
        if flag.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let bytes = &reason.as_bytes()[..reason.len().min((REASON - 8) as usize)];
            self.segment.slice_mut(self.layout.end + 8, bytes.len()).copy_from_slice(bytes);
            self.segment.u32(self.layout.end + 4).store(bytes.len() as u32, Ordering::Relaxed);
            flag.store(2, Ordering::Release);
        }
    }
}

/// One rank's end. Several threads of the rank may each have one, for groups and channels of their own.
pub struct Shm<'a> {
    board: StatusBoard<'a>,
    rank: u64,
    /// Looks again before sleeping.
    spins: u32,
    /// Wires to other machines, if there are any.
    wires: Option<Arc<Wires>>,
    /// By which the program exchanges in place of this memory, if it does.
    mpi: Option<Arc<Mutex<Mpi>>>,
    /// Sum of the chunk that is being combined.
    sum: Vec<u8>,
    /// How long kernels stood still for what other ranks have to do, all in all.
    pub waited: Duration,
}

impl<'a> Shm<'a> {
    /// The end of `rank`, which looks `spins` times before it sleeps.
    pub fn new(board: StatusBoard<'a>, rank: u64, spins: u32, wires: Option<Arc<Wires>>) -> Shm<'a> {
        Shm { board, rank, spins, wires, mpi: None, sum: vec![], waited: Duration::ZERO }
    }

    /// Another end of the same rank.
    pub fn twin(&self) -> Shm<'a> {
        Shm { mpi: self.mpi.clone(), ..Shm::new(self.board, self.rank, self.spins, self.wires.clone()) }
    }

    /// How often it looks again before it sleeps.
    pub fn spins(&self) -> u32 {
        self.spins
    }

    fn counter(&self, offset: u64) -> Counter<'a> {
        Counter::at(self.board.segment, offset)
    }

    fn doorbell(&self, rank: u64) -> Counter<'a> {
        self.counter(self.board.layout.status(rank).doorbell())
    }

    /// Sets a counter of this rank that others wait for, and wakes them. `written` gives, for those of them on
    /// another machine, the ranges (first byte and number) that they may read then.
    fn tell(&self, ranks: &[u64], at: u64, value: u32, written: impl Fn(&[u64]) -> Vec<(u64, usize)>) -> Result<(), CommError> {
        self.counter(at).set(value);
        let is_here = |rank: u64| self.wires.as_ref().is_none_or(|w| w.is_here(rank));
        ranks.iter().filter(|r| **r != self.rank && is_here(**r)).for_each(|r| self.doorbell(*r).ring());
        let Some(wires) = &self.wires else { return Ok(()) };
        for (machine, there) in wires.elsewhere(ranks) {
            let mut waited = false;
            let mut waits = || {
                waited = true;
                self.waiting(None, &there);
                self.ended()
            };
            wires.put(self.board.segment, machine, &there, &written(&there), (at, value), &mut waits)?;
            if waited {
                self.running();
            }
        }
        Ok(())
    }

    /// Wakes the other threads of this rank.
    pub fn wake_own(&self) {
        self.doorbell(self.rank).ring();
    }

    /// Changes whenever something happens that this rank may wait for.
    pub fn bell(&self) -> u32 {
        self.doorbell(self.rank).get()
    }

    /// Sleeps until [`Shm::bell`] is no longer `seen`, or a little while.
    pub fn sleep(&self, seen: u32) {
        self.doorbell(self.rank).sleep(seen, self.nap().unwrap_or(NAP).min(NAP));
    }

    /// Why the run has ended, if it has.
    pub fn ended(&self) -> Option<String> {
        self.board.ended()
    }

    /// Says for whom this rank waits, and at which step and command if that is not the last published one.
    pub fn waiting(&self, place: Option<(u64, Position)>, ranks: &[u64]) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        if let Some((step, position)) = place {
            self.show(step, position);
        }
        for rank in ranks {
            segment.u8(area.waits(*rank)).store(1, Ordering::Relaxed);
        }
        segment.u32(area.waiting()).store(1, Ordering::Release);
    }

    /// Says for whom this rank waits, where it has said something else; `said` is what that was.
    pub fn say_waits(&self, place: Option<(u64, Position)>, ranks: Vec<u64>, said: &mut Vec<u64>) {
        if ranks == *said {
            return;
        }
        if !said.is_empty() {
            self.running();
        }
        if !ranks.is_empty() {
            self.waiting(place, &ranks);
        }
        *said = ranks;
    }

    /// Says that this rank waits no longer.
    pub fn running(&self) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        segment.u32(area.waiting()).store(0, Ordering::Release);
        (0..self.board.layout.world).for_each(|r| segment.u8(area.waits(r)).store(0, Ordering::Relaxed));
    }

    /// Shows that something happened.
    fn progress(&self) {
        self.board.segment.u64(self.board.layout.status(self.rank).progress()).fetch_add(1, Ordering::Release);
    }

    fn show(&self, step: u64, position: Position) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        let phase = ProgramPhase::ALL.iter().position(|p| *p == position.phase).unwrap_or(0) as u32;
        for (k, number) in [phase, position.call, position.command].into_iter().enumerate() {
            segment.u32(area.position(k as u64)).store(number, Ordering::Relaxed);
        }
        segment.u64(area.step()).store(step, Ordering::Relaxed);
    }

    /// Polls a communication until it is done.
    fn finish(&mut self, memory: &mut dyn Memory, transfer: Transfer) -> Result<Progress, CommError> {
        let mut pending = Pending::new(transfer, TransferProgress::default());
        let (mut looks, mut told) = (0, vec![]);
        let awake = self.awake(self.spins);
        let mut still: Option<Instant> = None;
        loop {
            let bell = self.bell();
            let polled = self.poll(memory, &mut pending)?;
            if polled.done || polled.moved {
                self.say_waits(None, vec![], &mut told);
                self.waited += still.take().map_or(Duration::ZERO, |since| since.elapsed());
            }
            if polled.done {
                return Ok(Progress::Done);
            }
            looks = if polled.moved { 0 } else { looks + 1 };
            if !polled.moved {
                still.get_or_insert_with(Instant::now);
            }
            if looks < awake {
                std::hint::spin_loop();
                continue;
            }
            self.say_waits(None, self.waits_for(&pending), &mut told);
            if let Some(reason) = self.ended() {
                return Err(CommError::Aborted(reason));
            }
            self.sleep(bell);
        }
    }
}

impl Communicator for Shm<'_> {
    fn collective(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError> {
        self.finish(memory, Transfer::Collective(members, *exchange))
    }

    fn send(&mut self, memory: &mut dyn Memory, to: u64, message: &Message) -> Result<Progress, CommError> {
        self.finish(memory, Transfer::Send(to, *message))
    }

    fn recv(&mut self, memory: &mut dyn Memory, from: u64, message: &Message) -> Result<Progress, CommError> {
        self.finish(memory, Transfer::Recv(from, *message))
    }

    fn publish(&mut self, step: u64, position: Position) {
        self.show(step, position);
        self.progress();
    }

    fn recorded(&mut self) {
        self.wake_own();
    }

    fn abort(&mut self, reason: &str) {
        self.board.end(reason);
    }
}

#[cfg(test)]
pub(crate) mod tests;
