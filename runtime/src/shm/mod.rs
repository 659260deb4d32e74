//! Communication among processes of one machine, through shared memory.
//!
//! **Guarantees.** Members of a group get the same bits, in every run: numbers are combined in rank order, each by every member or by one for all, in the
//! dtype of the numbers. A send completes without its receive if the channel's ring has room; there is always room for
//! as many messages as the job has in flight, and for one more of the largest. Staging is bounded: a collective
//! of any size goes by chunks, of which each member has two.
//!
//! Communications are polled ([`Pending`]): several of a rank can be under way, of different groups and channels. Whoever posts, takes,
//! sends or receives rings the others' doorbells.
//!
//! **Several machines.** Each has a segment of the same layout, and every counter and slot has one writer. What a rank writes there for ranks of
//! other machines, it also sends to these ([`Wires`]): first what it wrote, then the counter. So nothing else here knows of machines.
//!
//! A rank that waits spins a little, then sleeps; every 50 ms it looks whether the run has ended. That no rank waits for ever is
//! the launcher's business ([`Board`]).

mod asked;
mod layout;
mod pending;
mod segment;
mod wide;
mod wires;

pub use asked::{ASKS, Ask, Begin};
pub use layout::{Layout, bytes_of_rank};
pub use pending::{Pending, Through};
pub use segment::Segment;
pub use wires::{Receiver, Wires, take};

use crate::comm::{CommError, Communicator, Exchange, Message, Position, Progress, Terms};
use crate::device::{Element, Memory};
use crate::executor::Transfer;
use ir::op::{DType, Reduce};
use ir::program::Collective;
use ir::program::Phase;
use layout::REASON;
use segment::Counter;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a launcher sees of its ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Counts commands begun and pieces of communications done.
    pub progress: u64,
    pub step: u64,
    pub position: Position,
    /// For whom it waits, if it does.
    pub waits: Option<Vec<u64>>,
}

/// The part of the segment that says how all ranks are, and whether the run has ended.
#[derive(Clone, Copy)]
pub struct Board<'a> {
    pub segment: &'a Segment,
    pub layout: &'a Layout,
}

impl Board<'_> {
    pub fn status(&self, rank: u64) -> Status {
        let (segment, area) = (self.segment, self.layout.status(rank));
        let number = |k| segment.u32(area.position(k)).load(Ordering::Relaxed);
        let phase = Phase::ALL.get(number(0) as usize).copied().unwrap_or_default();
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
    board: Board<'a>,
    rank: u64,
    /// Looks again before sleeping.
    spins: u32,
    /// To other machines, if there are any.
    wires: Option<Arc<Wires>>,
    /// Of the chunk that is being combined.
    sum: Vec<u8>,
    /// How long kernels stood still for what other ranks have to do, all in all.
    pub waited: Duration,
}

impl<'a> Shm<'a> {
    pub fn new(board: Board<'a>, rank: u64, spins: u32, wires: Option<Arc<Wires>>) -> Shm<'a> {
        Shm { board, rank, spins, wires, sum: vec![], waited: Duration::ZERO }
    }

    /// Another end of the same rank.
    pub fn twin(&self) -> Shm<'a> {
        Shm::new(self.board, self.rank, self.spins, self.wires.clone())
    }

    pub fn spins(&self) -> u32 {
        self.spins
    }

    fn counter(&self, offset: u64) -> Counter<'a> {
        Counter::at(self.board.segment, offset)
    }

    fn doorbell(&self, rank: u64) -> Counter<'a> {
        self.counter(self.board.layout.status(rank).doorbell())
    }

    /// Sets a counter of this rank that others wait for, and wakes them. `written` gives, for those of them on another machine, the ranges (first byte and
    /// number) that they may read then.
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
        self.doorbell(self.rank).sleep(seen);
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
        let phase = Phase::ALL.iter().position(|p| *p == position.phase).unwrap_or(0) as u32;
        for (k, number) in [phase, position.call, position.command].into_iter().enumerate() {
            segment.u32(area.position(k as u64)).store(number, Ordering::Relaxed);
        }
        segment.u64(area.step()).store(step, Ordering::Relaxed);
    }

    /// Polls a communication until it is done.
    fn finish(&mut self, memory: &mut dyn Memory, transfer: Transfer) -> Result<Progress, CommError> {
        let mut pending = Pending::new(transfer, Through::default());
        let mut looks = 0;
        let mut still: Option<Instant> = None;
        loop {
            let bell = self.bell();
            let polled = self.poll(memory, &mut pending)?;
            if polled.done || polled.moved {
                self.waited += still.take().map_or(Duration::ZERO, |since| since.elapsed());
            }
            if polled.done {
                return Ok(Progress::Done);
            }
            looks = if polled.moved { 0 } else { looks + 1 };
            if !polled.moved {
                still.get_or_insert_with(Instant::now);
            }
            if looks < self.spins {
                std::hint::spin_loop();
                continue;
            }
            self.waiting(None, &self.waits_for(&pending));
            if let Some(reason) = self.ended() {
                return Err(CommError::Aborted(reason));
            }
            self.sleep(bell);
            self.running();
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

fn encode(terms: &Terms) -> [u8; 16] {
    let (kind, reduce) = match terms.kind {
        Collective::AllReduce(r) => (1, r),
        Collective::AllGather => (2, Reduce::Any),
        Collective::ReduceScatter(r) => (3, r),
        Collective::AllToAll => (4, Reduce::Any),
        Collective::Shift => (5, Reduce::Any),
    };
    let reduce = Reduce::ALL.iter().position(|r| *r == reduce).unwrap_or(0) as u8;
    let mut out = encode_range(terms.dtype, terms.count);
    (out[1], out[2]) = (kind, reduce);
    out
}

fn decode(bytes: &[u8]) -> String {
    let reduce = Reduce::ALL.get(usize::from(bytes[2])).copied().unwrap_or(Reduce::Any);
    let kind = match bytes[1] {
        1 => Collective::AllReduce(reduce),
        2 => Collective::AllGather,
        3 => Collective::ReduceScatter(reduce),
        4 => Collective::AllToAll,
        5 => Collective::Shift,
        _ => return "something unreadable".into(),
    };
    format!("{} of {}", kind.name(), decode_message(bytes))
}

const DTYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool];

fn encode_range(dtype: DType, count: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[0] = DTYPES.iter().position(|t| *t == dtype).unwrap_or(0) as u8;
    out[8..].copy_from_slice(&count.to_le_bytes());
    out
}

fn decode_message(bytes: &[u8]) -> String {
    let count = u64::from_le_bytes(bytes[8..16].try_into().expect("invariant: eight bytes"));
    let dtype = DTYPES.get(usize::from(bytes[0])).map_or("?", |t| t.name());
    format!("{count} {dtype}")
}

/// Applies `f` to elements that lie in bytes: as slices where both are aligned, which is the rule, else one by one.
macro_rules! each {
    ($t:ty, $sum:expr, $more:expr, $f:expr) => {{
        let (sum, more): (&mut [u8], &[u8]) = ($sum, $more);
        // SAFETY: any bits are a number of this type.
        let (a, b) = unsafe { (sum.align_to_mut::<$t>(), more.align_to::<$t>()) };
        if a.0.is_empty() && b.0.is_empty() {
            for (x, y) in a.1.iter_mut().zip(b.1) {
                *x = $f(*x, *y);
            }
        } else {
            const N: usize = size_of::<$t>();
            for (x, y) in sum.chunks_exact_mut(N).zip(more.chunks_exact(N)) {
                let number = |bytes: &[u8]| <$t>::from_le_bytes(bytes.try_into().expect("invariant: the bytes of one number"));
                let result = $f(number(x), number(y));
                x.copy_from_slice(&result.to_le_bytes());
            }
        }
    }};
}

/// `sum = sum op more`, element by element.
fn fold(reduce: Reduce, element: Element, dtype: DType, sum: &mut [u8], more: &[u8]) -> Result<(), CommError> {
    match (reduce, element) {
        (Reduce::Sum, Element::F32) => each!(f32, sum, more, |x: f32, y: f32| x + y),
        (Reduce::Sum, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| x + y),
        (Reduce::Sum, Element::I32) => each!(i32, sum, more, |x: i32, y: i32| x.wrapping_add(y)),
        (Reduce::Max, Element::F32) => each!(f32, sum, more, |x: f32, y: f32| if x > y || x.is_nan() { x } else { y }),
        (Reduce::Max, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| if x > y || x.is_nan() { x } else { y }),
        (Reduce::Max, Element::I32) => each!(i32, sum, more, |x: i32, y: i32| x.max(y)),
        (Reduce::Any, Element::Bool) => each!(u8, sum, more, |x: u8, y: u8| x | y),
        (Reduce::Any, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| f64::from(x != 0.0 || y != 0.0)),
        (Reduce::Sum | Reduce::Max, Element::Bf16 | Element::F16 | Element::Bool)
        | (Reduce::Any, Element::F32 | Element::Bf16 | Element::F16 | Element::I32) => {
            return Err(CommError::Unsupported { kind: reduce.name(), dtype: dtype.name() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
