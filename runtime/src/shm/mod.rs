//! Communication among processes of one machine, through shared memory.
//!
//! **Guarantees.** Members of a group get the same bits, in every run: each combines all members' numbers in rank order, in the
//! dtype of the numbers. A send completes without its receive if the channel's ring has room; there is always room for
//! as many messages as the job has in flight, and for one more of the largest. Staging is bounded: a collective
//! of any size goes by chunks, of which each member has two.
//!
//! A rank that waits spins a little, then sleeps; every 50 ms it looks whether the run has ended. That no rank waits for ever is
//! the launcher's business ([`Board`]).

mod layout;
mod segment;

pub use layout::Layout;
pub use segment::Segment;

use crate::comm::{CommError, Communicator, Exchange, Message, Phase, Position, Progress, Terms};
use crate::device::{Element, Location, Memory};
use ir::op::{DType, Reduce};
use ir::program::{Channel, Collective};
use layout::{GroupArea, LINE, MailArea, REASON};
use segment::Counter;
use std::sync::atomic::Ordering;

/// What a launcher sees of its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// One rank's end.
pub struct Shm<'a> {
    board: Board<'a>,
    rank: u64,
    /// Looks at a counter before sleeping.
    spins: u32,
    staging: Vec<u8>,
}

/// Bytes of a message that are moved before the other side is told.
const PIECE: usize = 64 << 10;

impl<'a> Shm<'a> {
    pub fn new(board: Board<'a>, rank: u64, spins: u32) -> Shm<'a> {
        Shm { board, rank, spins, staging: vec![] }
    }

    fn counter(&self, offset: u64) -> Counter<'a> {
        Counter::at(self.board.segment, offset)
    }

    /// Waits for all of these counters, one after the other; each belongs to a rank.
    fn wait(&self, counters: &[(u64, Counter)], ready: impl Fn(u32) -> bool) -> Result<(), CommError> {
        let mut looks = 0;
        for (k, (_, counter)) in counters.iter().enumerate() {
            let mut value = counter.get();
            if ready(value) {
                continue;
            }
            while looks < self.spins && !ready(value) {
                looks += 1;
                std::hint::spin_loop();
                value = counter.get();
            }
            if ready(value) {
                continue;
            }
            self.waiting(&counters[k..], &ready);
            let outcome = loop {
                value = counter.get();
                if ready(value) {
                    break Ok(());
                }
                if let Some(reason) = self.board.ended() {
                    break Err(CommError::Aborted(reason));
                }
                counter.sleep(value);
            };
            if outcome.is_ok() {
                self.running();
            }
            outcome?;
        }
        Ok(())
    }

    fn waiting(&self, counters: &[(u64, Counter)], ready: &impl Fn(u32) -> bool) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        for (rank, counter) in counters {
            segment.u8(area.waits(*rank)).store(u8::from(!ready(counter.get())), Ordering::Relaxed);
        }
        segment.u32(area.waiting()).store(1, Ordering::Release);
    }

    /// Shows that something happened.
    fn progress(&self) {
        self.board.segment.u64(self.board.layout.status(self.rank).progress()).fetch_add(1, Ordering::Release);
    }

    fn running(&self) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        segment.u32(area.waiting()).store(0, Ordering::Release);
        (0..self.board.layout.world).for_each(|r| segment.u8(area.waits(r)).store(0, Ordering::Relaxed));
    }

    /// Exchanges one chunk: posts `self.staging`, waits for all members, and gives each member's data to `take`.
    fn chunk(
        &self,
        area: GroupArea,
        members: &[u64],
        me: usize,
        terms: &Terms,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let segment = self.board.segment;
        let posted = self.counter(area.posted(me));
        let number = posted.get();
        let all = |offset: &dyn Fn(usize) -> u64| -> Vec<(u64, Counter)> {
            members.iter().enumerate().map(|(k, r)| (*r, self.counter(offset(k)))).collect()
        };
        // The slot still holds the chunk before the last: all must have taken it.
        self.wait(&all(&|k| area.taken(k)), |taken| number.wrapping_sub(taken) as i32 <= 1)?;
        let slot = area.slot(me, number);
        segment.slice_mut(slot, 16).copy_from_slice(&encode(terms));
        segment.slice_mut(slot + LINE, self.staging.len()).copy_from_slice(&self.staging);
        posted.set(number.wrapping_add(1));
        self.wait(&all(&|k| area.posted(k)), |posted| posted.wrapping_sub(number) as i32 >= 1)?;
        for (k, rank) in members.iter().enumerate() {
            let slot = area.slot(k, number);
            let theirs = segment.slice(slot, 16);
            if theirs != encode(terms) {
                return Err(CommError::Mismatch { here: self.rank, mine: terms.to_string(), there: *rank, theirs: decode(theirs) });
            }
            take(k, segment.slice(slot + LINE, self.staging.len()))?;
        }
        self.counter(area.taken(me)).set(number.wrapping_add(1));
        self.progress();
        Ok(())
    }
}

impl Communicator for Shm<'_> {
    fn collective(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError> {
        let area = self.board.layout.group(members).expect("invariant: the layout has every group of the job");
        let me = members.iter().position(|r| *r == self.rank).expect("invariant: a rank is in its own group");
        let (n, count, terms) = (members.len(), exchange.count, exchange.terms());
        let element = memory.element(exchange.dtype);
        let width = element.bytes() as u64;
        let (scattered, reduce) = match exchange.kind {
            Collective::AllReduce(reduce) => (false, Some(reduce)),
            Collective::AllGather => (false, None),
            Collective::ReduceScatter(reduce) => (true, Some(reduce)),
            Collective::AllToAll => (true, None),
        };
        let parts = if scattered { n } else { 1 };
        let step = (area.chunk / parts as u64 / width).min(count).max(1);
        let at = |start: Location, index: u64| Location { byte: start.byte + index * exchange.dtype.bytes(), ..start };
        let mut first = 0;
        let mut sum = vec![];
        while first < count {
            let len = step.min(count - first);
            let bytes = (len * width) as usize;
            self.staging.resize(parts * bytes, 0);
            for (j, part) in self.staging.chunks_exact_mut(bytes).enumerate() {
                memory.load(at(exchange.src, j as u64 * count + first), exchange.dtype, part);
            }
            self.chunk(area, members, me, &terms, |k, data| {
                let mine = if scattered { &data[me * bytes..][..bytes] } else { data };
                match reduce {
                    None => memory.store(at(exchange.dst, k as u64 * count + first), exchange.dtype, mine),
                    Some(_) if k == 0 => {
                        sum.clear();
                        sum.extend_from_slice(mine);
                    }
                    Some(reduce) => fold(reduce, element, exchange.dtype, &mut sum, mine)?,
                }
                Ok(())
            })?;
            if reduce.is_some() {
                memory.store(at(exchange.dst, first), exchange.dtype, &sum);
            }
            first += len;
        }
        Ok(Progress::Done)
    }

    fn send(&mut self, memory: &mut dyn Memory, to: u64, message: &Message) -> Result<Progress, CommError> {
        let area = self.mail(self.rank, to, message.channel);
        let (head, tail) = (self.counter(area.head()), self.counter(area.tail()));
        let mut at = head.get();
        let header = self.lines(area, to, &tail, |tail| area.lines - at.wrapping_sub(tail), at, LINE as usize)?;
        header[..16].copy_from_slice(&encode_range(message.dtype, message.count));
        at = at.wrapping_add(1);
        head.set(at);
        let width = memory.element(message.dtype).bytes();
        let (mut done, total) = (0, message.count as usize * width);
        while done < total {
            let want = (total - done).min(PIECE);
            let piece = self.lines(area, to, &tail, |tail| area.lines - at.wrapping_sub(tail), at, want)?;
            let from = message.at.byte + (done / width) as u64 * message.dtype.bytes();
            memory.load(Location { byte: from, ..message.at }, message.dtype, piece);
            done += piece.len();
            self.progress();
            at = at.wrapping_add(piece.len().div_ceil(LINE as usize) as u32);
            head.set(at);
        }
        Ok(Progress::Done)
    }

    fn recv(&mut self, memory: &mut dyn Memory, from: u64, message: &Message) -> Result<Progress, CommError> {
        let area = self.mail(from, self.rank, message.channel);
        let (head, tail) = (self.counter(area.head()), self.counter(area.tail()));
        let mut at = tail.get();
        let header = self.lines(area, from, &head, |head| head.wrapping_sub(at), at, LINE as usize)?;
        let theirs = <[u8; 16]>::try_from(&header[..16]).expect("invariant: sixteen bytes");
        at = at.wrapping_add(1);
        tail.set(at);
        if theirs != encode_range(message.dtype, message.count) {
            let mine = format!("{} {}", message.count, message.dtype.name());
            return Err(CommError::Message { here: self.rank, mine, there: from, theirs: decode_message(&theirs) });
        }
        let width = memory.element(message.dtype).bytes();
        let (mut done, total) = (0, message.count as usize * width);
        while done < total {
            let want = (total - done).min(PIECE);
            let piece = self.lines(area, from, &head, |head| head.wrapping_sub(at), at, want)?;
            let to = message.at.byte + (done / width) as u64 * message.dtype.bytes();
            memory.store(Location { byte: to, ..message.at }, message.dtype, piece);
            done += piece.len();
            self.progress();
            at = at.wrapping_add(piece.len().div_ceil(LINE as usize) as u32);
            tail.set(at);
        }
        Ok(Progress::Done)
    }

    fn publish(&mut self, step: u64, position: Position) {
        let (segment, area) = (self.board.segment, self.board.layout.status(self.rank));
        let phase = Phase::ALL.iter().position(|p| *p == position.phase).unwrap_or(0) as u32;
        for (k, number) in [phase, position.call, position.command].into_iter().enumerate() {
            segment.u32(area.position(k as u64)).store(number, Ordering::Relaxed);
        }
        segment.u64(area.step()).store(step, Ordering::Relaxed);
        self.progress();
    }

    fn abort(&mut self, reason: &str) {
        self.board.end(reason);
    }
}

impl<'a> Shm<'a> {
    fn mail(&self, from: u64, to: u64, channel: Channel) -> MailArea {
        self.board.layout.mail(from, to, channel).expect("invariant: the layout has every channel of the job")
    }

    /// Waits until the other side has left lines free (or filled them), as `available` counts them, and gives as many of `want`
    /// bytes as lie together from line `at` on.
    fn lines(
        &self,
        area: MailArea,
        other: u64,
        counter: &Counter,
        available: impl Fn(u32) -> u32,
        at: u32,
        want: usize,
    ) -> Result<&'a mut [u8], CommError> {
        let word = [(other, *counter)];
        self.wait(&word, |value| available(value) > 0)?;
        let together = (area.lines - at % area.lines).min(available(counter.get()));
        Ok(self.board.segment.slice_mut(area.line(at), want.min(together as usize * LINE as usize)))
    }
}

fn encode(terms: &Terms) -> [u8; 16] {
    let (kind, reduce) = match terms.kind {
        Collective::AllReduce(r) => (1, r),
        Collective::AllGather => (2, Reduce::Any),
        Collective::ReduceScatter(r) => (3, r),
        Collective::AllToAll => (4, Reduce::Any),
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
