//! Communications, and copies between memories, that can be left and taken up again: a poll does as much as can be
//! done now.

use super::Shm;
use super::layout::{GroupArea, LINE, MailArea};
use crate::comm::{CommError, Exchange, Message, Polled};
use crate::device::{Location, Memory};
use crate::executor::Transfer;
use crate::headers::{HEADER, decode, decode_message, encode, encode_range};
use crate::sums;
use ir::program::Collective;

/// How far a communication is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferProgress {
    /// Elements of each part or of a copy, or bytes of a message, that are through.
    done: u64,
    /// This member's chunk, or the message's first line, is through.
    begun: bool,
    /// This member's part of the chunk's sum is through, if each member sums one.
    summed: bool,
}

/// A communication and how far it is.
pub struct Pending<'t> {
    transfer: Transfer<'t>,
    through: TransferProgress,
}

impl<'t> Pending<'t> {
    /// Goes on where it was left.
    pub fn new(transfer: Transfer<'t>, through: TransferProgress) -> Pending<'t> {
        Pending { transfer, through }
    }

    /// How far it has come, to be gone on with later.
    pub fn through(&self) -> TransferProgress {
        self.through
    }
}

/// Bytes of a message that are moved before the other side is told.
pub const PIECE: usize = 64 << 10;

/// Bytes of a copy between memories at a time: enough that beginning it costs little, and other streams wait for some
/// tens of microseconds.
const COPIED: usize = 512 << 10;

/// Bytes of a chunk from which on each of several members sums a part of it for all: then each reads two chunks, not
/// one of every member, and waits once more.
pub const APART: usize = 64 << 10;

impl<'a> Shm<'a> {
    /// Goes on with a communication. Others of this rank may be under way, of other groups and channels.
    ///
    /// # Errors
    /// If members or the sender think they exchange something else.
    pub fn poll(&mut self, memory: &mut dyn Memory, pending: &mut Pending) -> Result<Polled, CommError> {
        if !matches!(pending.transfer, Transfer::Copy(_))
            && let Some(polled) = self.poll_mpi(memory, &pending.transfer)
        {
            let polled = polled?;
            if polled.moved {
                self.progress();
            }
            return Ok(polled);
        }
        let before = pending.through;
        let done = match pending.transfer {
            Transfer::Collective(members, exchange) => self.exchange(memory, members, &exchange, pending)?,
            Transfer::Send(to, message) => self.push(memory, to, &message, pending)?,
            Transfer::Recv(from, message) => self.pull(memory, from, &message, pending)?,
            Transfer::Copy(copied) => {
                let done = memory.advance(&copied, pending.through.done, COPIED);
                pending.through.done = done.map_err(|e| CommError::Failed(e.to_string()))?;
                pending.through.done == copied.count
            }
        };
        let moved = done || before != pending.through;
        if moved {
            self.progress();
        }
        Ok(Polled { done, moved })
    }

    /// The ranks that have to act before a communication can go on.
    pub fn waits_for(&self, pending: &Pending) -> Vec<u64> {
        if let Some(ranks) = self.waits_by_mpi(&pending.transfer) {
            return ranks;
        }
        match pending.transfer {
            Transfer::Send(other, _) | Transfer::Recv(other, _) => vec![other],
            Transfer::Copy(_) => vec![],
            Transfer::Collective(members, _) => {
                let (area, me) = self.place(members);
                let posted = self.counter(area.posted(me)).get();
                let late = |k: usize| match pending.through {
                    TransferProgress { summed: true, .. } => !self.has_reached(area.summed(k), posted.wrapping_sub(1)),
                    TransferProgress { begun: true, .. } => !self.has_reached(area.posted(k), posted.wrapping_sub(1)),
                    _ => !self.has_taken(area, k, posted),
                };
                members.iter().enumerate().filter(|(k, _)| late(*k)).map(|(_, rank)| *rank).collect()
            }
        }
    }

    fn place(&self, members: &[u64]) -> (GroupArea, usize) {
        let area = self.board.layout.group(members).expect("invariant: the layout has every group of the job");
        (area, members.iter().position(|r| *r == self.rank).expect("invariant: a rank is in its own group"))
    }

    /// Whether a member has posted, or summed its part of, the chunk with this number.
    fn has_reached(&self, counter: u64, number: u32) -> bool {
        self.counter(counter).get().wrapping_sub(number) as i32 >= 1
    }

    /// Whether member `k` has taken the chunk before the last one before this number: its slot is this one's.
    fn has_taken(&self, area: GroupArea, k: usize, number: u32) -> bool {
        number.wrapping_sub(self.counter(area.taken(k)).get()) as i32 <= 1
    }

    fn exchange(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange, pending: &mut Pending) -> Result<bool, CommError> {
        let (area, me) = self.place(members);
        let segment = self.board.segment;
        let (n, count, terms) = (members.len(), exchange.count, exchange.terms());
        let element = memory.element(exchange.dtype);
        let width = element.bytes() as u64;
        let (scattered, reduce) = match exchange.kind {
            Collective::AllReduce(reduce) => (false, Some(reduce)),
            Collective::AllGather | Collective::Shift => (false, None),
            Collective::ReduceScatter(reduce) => (true, Some(reduce)),
            Collective::AllToAll => (true, None),
        };
        let parts = if scattered { n } else { 1 };
        let step = (area.chunk / parts as u64 / width).min(count).max(1);
        let at = |start: Location, index: u64| Location { byte: start.byte + index * exchange.dtype.bytes(), ..start };
        while pending.through.done < count {
            let first = pending.through.done;
            let chunk = step.min(count - first);
            let bytes = (chunk * width) as usize;
            // Of a long all-reduce, each member sums a part of the elements for all.
            let apart = !scattered && reduce.is_some() && n > 2 && bytes >= APART;
            let part = |k: usize| {
                let edge = |k: usize| chunk * k as u64 / n as u64;
                (edge(k), ((edge(k + 1) - edge(k)) * width) as usize)
            };
            let data = |slot: u64, k: usize| match (scattered, apart) {
                (true, _) => (slot + LINE + (k * bytes) as u64, bytes),
                (false, true) => (slot + LINE + part(k).0 * width, part(k).1),
                (false, false) => (slot + LINE, bytes),
            };
            let posted = self.counter(area.posted(me));
            if !pending.through.begun {
                let number = posted.get();
                if !(0..n).all(|k| self.has_taken(area, k, number)) {
                    return Ok(false);
                }
                let slot = area.slot(me, number);
                segment.slice_mut(slot, HEADER).copy_from_slice(&encode(&terms));
                for (j, part) in segment.slice_mut(slot + LINE, parts * bytes).chunks_exact_mut(bytes).enumerate() {
                    memory.load(at(exchange.src, j as u64 * count + first), exchange.dtype, part);
                }
                pending.through.begun = true;
                self.tell(members, area.posted(me), number.wrapping_add(1), |there| match scattered || apart {
                    false => vec![(slot, LINE as usize + bytes)],
                    true => {
                        let parts = members.iter().enumerate().filter(|(_, m)| there.contains(m));
                        [(slot, LINE as usize)].into_iter().chain(parts.map(|(j, _)| data(slot, j))).collect()
                    }
                })?;
            }
            let number = posted.get().wrapping_sub(1);
            if !pending.through.summed {
                if !(0..n).all(|k| self.has_reached(area.posted(k), number)) {
                    return Ok(false);
                }
                for (k, rank) in members.iter().enumerate() {
                    let slot = area.slot(k, number);
                    let theirs = segment.slice(slot, HEADER);
                    if theirs != encode(&terms) {
                        return Err(CommError::Mismatch { here: self.rank, mine: terms.to_string(), there: *rank, theirs: decode(theirs) });
                    }
                    let (from, bytes) = data(slot, me);
                    let mine = segment.slice(from, bytes);
                    match reduce {
                        None if exchange.kind == Collective::Shift => {
                            if (k + 1) % n == me {
                                memory.store(at(exchange.dst, first), exchange.dtype, mine);
                            }
                        }
                        None => memory.store(at(exchange.dst, k as u64 * count + first), exchange.dtype, mine),
                        Some(_) if k == 0 => sums::begin(element, mine, &mut self.sum),
                        Some(reduce) => sums::add(reduce, element, exchange.dtype, &mut self.sum, mine)?,
                    }
                }
                if reduce.is_some() {
                    sums::round(element, &mut self.sum);
                }
                if apart {
                    // Only this member has read its own part of its slot, so the sum can take its place.
                    let (to, bytes) = data(area.slot(me, number), me);
                    segment.slice_mut(to, bytes).copy_from_slice(&self.sum);
                    pending.through.summed = true;
                    self.tell(members, area.summed(me), number.wrapping_add(1), |_| vec![(to, bytes)])?;
                } else if reduce.is_some() {
                    memory.store(at(exchange.dst, first), exchange.dtype, &self.sum);
                }
            }
            if apart {
                if !(0..n).all(|k| self.has_reached(area.summed(k), number)) {
                    return Ok(false);
                }
                for k in 0..n {
                    let (from, bytes) = data(area.slot(k, number), k);
                    memory.store(at(exchange.dst, first + part(k).0), exchange.dtype, segment.slice(from, bytes));
                }
            }
            self.tell(members, area.taken(me), number.wrapping_add(1), |_| vec![])?;
            self.progress();
            pending.through = TransferProgress { done: first + chunk, ..TransferProgress::default() };
        }
        Ok(true)
    }

    fn mail(&self, from: u64, to: u64, message: &Message) -> MailArea {
        self.board.layout.mail(from, to, message.channel).expect("invariant: the layout has every channel of the job")
    }

    fn push(&mut self, memory: &mut dyn Memory, to: u64, message: &Message, pending: &mut Pending) -> Result<bool, CommError> {
        let area = self.mail(self.rank, to, message);
        let (head, tail) = (self.counter(area.head()), self.counter(area.tail()));
        let width = memory.element(message.dtype).bytes();
        let total = message.count as usize * width;
        loop {
            let at = head.get();
            let done = pending.through.done as usize;
            if pending.through.begun && done == total {
                return Ok(true);
            }
            let want = if pending.through.begun { (total - done).min(PIECE) } else { LINE as usize };
            let lines = self.lines(area, area.lines - at.wrapping_sub(tail.get()), at, want);
            if lines.is_empty() {
                return Ok(false);
            }
            if pending.through.begun {
                let from = message.at.byte + (done / width) as u64 * message.dtype.bytes();
                memory.load(Location { byte: from, ..message.at }, message.dtype, lines);
                pending.through.done += lines.len() as u64;
                self.progress();
            } else {
                lines[..HEADER].copy_from_slice(&encode_range(message.dtype, message.count));
                pending.through.begun = true;
            }
            let (from, bytes) = (area.line(at), lines.len());
            self.tell(&[to], area.head(), at.wrapping_add(bytes.div_ceil(LINE as usize) as u32), |_| vec![(from, bytes)])?;
        }
    }

    fn pull(&mut self, memory: &mut dyn Memory, from: u64, message: &Message, pending: &mut Pending) -> Result<bool, CommError> {
        let area = self.mail(from, self.rank, message);
        let (head, tail) = (self.counter(area.head()), self.counter(area.tail()));
        let width = memory.element(message.dtype).bytes();
        let total = message.count as usize * width;
        loop {
            let at = tail.get();
            let done = pending.through.done as usize;
            if pending.through.begun && done == total {
                return Ok(true);
            }
            let want = if pending.through.begun { (total - done).min(PIECE) } else { LINE as usize };
            let lines = self.lines(area, head.get().wrapping_sub(at), at, want);
            if lines.is_empty() {
                return Ok(false);
            }
            if pending.through.begun {
                let to = message.at.byte + (done / width) as u64 * message.dtype.bytes();
                memory.store(Location { byte: to, ..message.at }, message.dtype, lines);
                pending.through.done += lines.len() as u64;
                self.progress();
            } else {
                let theirs = <[u8; HEADER]>::try_from(&lines[..HEADER]).expect("invariant: sixteen bytes");
                pending.through.begun = true;
                if theirs != encode_range(message.dtype, message.count) {
                    let mine = format!("{} {}", message.count, message.dtype.name());
                    return Err(CommError::Message { here: self.rank, mine, there: from, theirs: decode_message(&theirs) });
                }
            }
            self.tell(&[from], area.tail(), at.wrapping_add(lines.len().div_ceil(LINE as usize) as u32), |_| vec![])?;
        }
    }

    /// As many of `want` bytes as lie together from line `at` on, in the lines that are this side's now.
    fn lines(&self, area: MailArea, available: u32, at: u32, want: usize) -> &'a mut [u8] {
        let together = (area.lines - at % area.lines).min(available);
        self.board.segment.slice_mut(area.line(at), want.min(together as usize * LINE as usize))
    }
}
