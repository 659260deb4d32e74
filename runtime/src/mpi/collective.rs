//! Collectives of messages: each member sends the others what they need, and combines what it gets in rank order.
//!
//! Of a long chunk of a sum for all, each of three members or more sums one part for all and sends the sum on: it
//! gets twice the chunk, not once per member.

use super::message::forget;
use super::{MESSAGE, Mpi, PendingSend, PointToPoint, Receiving, failed};
use crate::comm::{CommError, Exchange, Message, Polled, Terms};
use crate::device::{Location, Memory};
use crate::headers::{HEADER, decode, encode};
use crate::sums;
use ir::op::Reduce;
use ir::program::{Channel, Collective};
use std::collections::VecDeque;
use std::sync::Arc;

/// Chunks of a group that are under way at a time, those included whose messages are not all sent.
const CHUNKS: usize = 2;
/// Bytes that a member gives in a chunk, for messages to be neither longer than [`MESSAGE`] nor shorter than the
/// next.
const CHUNK: usize = 4 << 20;
const SHORTEST: usize = 16 << 10;
/// Bytes of a chunk from which on each of several members sums a part of it for all.
const APART: u64 = 64 << 10;

/// What a member waits for of another one.
enum ReceiveState {
    Waits(Box<dyn Receiving>),
    /// The message is here, to be combined with those of the others.
    Here(Vec<u8>),
    /// It is where it belongs, or there is none.
    Through,
}

/// Some elements of each part of a collective.
struct Chunk {
    first: u64,
    count: u64,
    /// Each member sums a part for all.
    apart: bool,
    /// This member's own numbers for itself, behind a header.
    own: Arc<Vec<u8>>,
    sent: Vec<PendingSend>,
    /// What is received of each member.
    parts: Vec<ReceiveState>,
    is_combined: bool,
    /// What other members have summed.
    sums: Vec<ReceiveState>,
}

impl Chunk {
    fn is_through(&self) -> bool {
        self.is_combined && !self.sums.iter().any(ReceiveState::waits)
    }

    /// Where member `k`'s part of a chunk that is summed apart begins, and how long it is.
    fn edge(&self, k: usize, members: usize) -> (u64, u64) {
        let edge = |k: usize| self.count * k as u64 / members as u64;
        (edge(k), edge(k + 1) - edge(k))
    }
}

impl ReceiveState {
    fn waits(&self) -> bool {
        matches!(self, ReceiveState::Waits(_))
    }
}

/// A group's members and what they have under way.
pub struct Group {
    members: Vec<u64>,
    me: usize,
    /// And the next one for sums.
    tag: u32,
    /// Elements of each part of the collective under way that are in a chunk.
    begun: u64,
    chunks: VecDeque<Chunk>,
    /// Messages of finished chunks that are still being sent.
    sent: VecDeque<Vec<PendingSend>>,
}

/// What a member's collective is about, with what it needs to go on.
struct Job<'a> {
    exchange: &'a Exchange,
    memory: &'a mut dyn Memory,
    wires: &'a mut dyn PointToPoint,
    sum: &'a mut Vec<u8>,
}

impl Mpi {
    pub(super) fn exchange(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Polled, CommError> {
        if !self.groups.contains_key(members) {
            let me = members.iter().position(|r| *r == self.rank).expect("invariant: a rank is in its own group");
            let (tag, members) = (self.tags.of_group(members), members.to_vec());
            let group = Group { members: members.clone(), me, tag, begun: 0, chunks: VecDeque::new(), sent: VecDeque::new() };
            self.groups.insert(members, group);
        }
        let group = self.groups.get_mut(members).expect("invariant: it was put there");
        group.go(&mut Job { exchange, memory, wires: self.wires.as_mut(), sum: &mut self.sum })
    }
}

impl Job<'_> {
    fn reduce(&self) -> Option<Reduce> {
        self.exchange.kind.reduction()
    }

    fn is_scattered(&self) -> bool {
        matches!(self.exchange.kind, Collective::ReduceScatter(_) | Collective::AllToAll)
    }

    fn width(&self) -> usize {
        self.memory.element(self.exchange.dtype).bytes()
    }

    fn terms(&self) -> Terms {
        self.exchange.terms()
    }

    /// A copy of elements that this member gives, behind a header.
    fn load(&self, first: u64, count: u64) -> Arc<Vec<u8>> {
        let Exchange { dtype, src, .. } = *self.exchange;
        let message = Message { channel: Channel(0), dtype, count, at: src };
        Arc::new(Mpi::loaded(self.memory, &message, first, count, encode(&self.terms())))
    }

    fn store(&mut self, first: u64, numbers: &[u8]) {
        let Exchange { dtype, dst, .. } = *self.exchange;
        self.memory.store(Location { byte: dst.byte + first * dtype.bytes(), ..dst }, dtype, numbers);
    }
}

impl Group {
    pub fn is_busy(&self) -> bool {
        !self.chunks.is_empty() || !self.sent.is_empty()
    }

    /// Forgets what has been sent of chunks that are through.
    pub fn look(&mut self) -> Result<(), String> {
        while let Some(sent) = self.sent.front_mut() {
            if !forget(sent)? {
                break;
            }
            self.sent.pop_front();
        }
        Ok(())
    }

    /// Members whose numbers, or doing, this one lacks.
    pub fn waits_for(&self) -> Vec<u64> {
        let late = |k: &usize| self.chunks.iter().any(|c| c.parts[*k].waits() || c.sums.get(*k).is_some_and(ReceiveState::waits));
        let late: Vec<u64> = (0..self.members.len()).filter(late).map(|k| self.members[k]).collect();
        if late.is_empty() { self.sent.iter().flatten().map(|s| s.to).collect() } else { late }
    }

    /// Whether member `k` gives numbers to member `j`.
    fn gives(&self, kind: Collective, k: usize, j: usize) -> bool {
        k != j && (kind != Collective::Shift || (k + 1) % self.members.len() == j)
    }

    fn go(&mut self, job: &mut Job) -> Result<Polled, CommError> {
        let mut moved = false;
        loop {
            self.look().map_err(|e| failed(&e))?;
            while self.begun < job.exchange.count && self.chunks.len() + self.sent.len() < CHUNKS {
                self.begin(job).map_err(|e| failed(&e))?;
                moved = true;
            }
            let mut passed = false;
            // Sums are sent in the order of their chunks, as they are received in that order.
            let mut follows = false;
            for k in 0..self.chunks.len() {
                passed |= self.take(k, job)?;
                if !follows && !self.chunks[k].is_combined && !self.chunks[k].parts.iter().any(ReceiveState::waits) {
                    self.combine(k, job)?;
                    passed = true;
                }
                follows = !self.chunks[k].is_combined;
            }
            moved |= passed;
            while self.chunks.front().is_some_and(Chunk::is_through) {
                let chunk = self.chunks.pop_front().expect("invariant: it was just seen");
                self.sent.push_back(chunk.sent);
            }
            if self.begun == job.exchange.count && self.chunks.is_empty() {
                self.begun = 0;
                return Ok(Polled { done: true, moved: true });
            }
            if !passed {
                return Ok(Polled { done: false, moved });
            }
        }
    }

    /// Sends this member's part of the next chunk, and begins to receive those of the others.
    fn begin(&mut self, job: &mut Job) -> Result<(), String> {
        let (n, me, kind, whole) = (self.members.len(), self.me, job.exchange.kind, job.exchange.count);
        let width = job.width() as u64;
        let message = (CHUNK / n).clamp(SHORTEST, MESSAGE) as u64 / width;
        let left = whole - self.begun;
        let scattered = job.is_scattered();
        let is_sum = job.reduce().is_some() && !scattered;
        // If each member sums a part for all, it sends each other one only a part of the chunk, which may be so much
        // longer.
        let together = left.min(message * n as u64);
        let apart = is_sum && n > 2 && together * width >= APART;
        let count = if apart { together } else { left.min(message) };
        let first = self.begun;
        let mut chunk = Chunk { first, count, apart, own: Arc::default(), sent: vec![], parts: vec![], is_combined: false, sums: vec![] };
        let given = |chunk: &Chunk, j: usize| match (scattered, apart) {
            (true, _) => (j as u64 * whole + first, count),
            (false, true) => (first + chunk.edge(j, n).0, chunk.edge(j, n).1),
            (false, false) => (first, count),
        };
        let bytes = |elements: u64| HEADER + (elements * width) as usize;
        for k in 0..n {
            let part = match self.gives(kind, k, me) {
                true => ReceiveState::Waits(job.wires.recv(self.members[k], self.tag, bytes(given(&chunk, me).1))?),
                false => ReceiveState::Through,
            };
            chunk.parts.push(part);
        }
        for k in (0..n).filter(|_| apart) {
            let sum = match k == me {
                true => ReceiveState::Through,
                false => ReceiveState::Waits(job.wires.recv(self.members[k], self.tag + 1, bytes(chunk.edge(k, n).1))?),
            };
            chunk.sums.push(sum);
        }
        let (from, own) = given(&chunk, me);
        chunk.own = job.load(from, own);
        // Each member begins with the next one, so that not all send to one at once.
        for j in (1..n).map(|d| (me + d) % n).filter(|j| self.gives(kind, me, *j)) {
            let numbers = match scattered || apart {
                true => job.load(given(&chunk, j).0, given(&chunk, j).1),
                false => chunk.own.clone(),
            };
            chunk.sent.push(PendingSend { to: self.members[j], request: job.wires.send(self.members[j], self.tag, numbers)? });
        }
        self.begun += count;
        self.chunks.push_back(chunk);
        Ok(())
    }

    /// Takes what has come of a chunk; whether anything has.
    fn take(&mut self, number: usize, job: &mut Job) -> Result<bool, CommError> {
        let (n, me, width) = (self.members.len(), self.me, job.width() as u64);
        let Exchange { kind, count: whole, .. } = *job.exchange;
        let mut passed = false;
        for k in 0..n {
            let chunk = &mut self.chunks[number];
            if let ReceiveState::Waits(request) = &mut chunk.parts[k]
                && let Some(bytes) = received(request.as_mut(), self.members[k])?
            {
                let expected = if chunk.apart { chunk.edge(me, n).1 } else { chunk.count };
                check(job, (self.members[me], self.members[k]), &bytes, expected * width)?;
                let first = if kind == Collective::Shift { chunk.first } else { k as u64 * whole + chunk.first };
                chunk.parts[k] = match job.reduce() {
                    Some(_) => ReceiveState::Here(bytes),
                    None => {
                        job.store(first, &bytes[HEADER..]);
                        ReceiveState::Through
                    }
                };
                passed = true;
            }
            if let Some(ReceiveState::Waits(request)) = chunk.sums.get_mut(k)
                && let Some(bytes) = received(request.as_mut(), self.members[k])?
            {
                let (at, count) = chunk.edge(k, n);
                check(job, (self.members[me], self.members[k]), &bytes, count * width)?;
                job.store(chunk.first + at, &bytes[HEADER..]);
                chunk.sums[k] = ReceiveState::Through;
                passed = true;
            }
        }
        Ok(passed)
    }

    /// Combines the parts of a chunk, which are all there, in rank order.
    fn combine(&mut self, number: usize, job: &mut Job) -> Result<(), CommError> {
        let (n, me) = (self.members.len(), self.me);
        let (dtype, whole) = (job.exchange.dtype, job.exchange.count);
        let element = job.memory.element(dtype);
        let chunk = &mut self.chunks[number];
        chunk.is_combined = true;
        let own = std::mem::take(&mut chunk.own);
        let Some(reduce) = job.reduce() else {
            match job.exchange.kind {
                // A rank that is alone in its group is next to itself.
                Collective::Shift if n > 1 => {}
                Collective::Shift => job.store(chunk.first, &own[HEADER..]),
                _ => job.store(me as u64 * whole + chunk.first, &own[HEADER..]),
            }
            return Ok(());
        };
        for (k, part) in chunk.parts.iter_mut().enumerate() {
            let part = std::mem::replace(part, ReceiveState::Through);
            let numbers = match &part {
                ReceiveState::Here(bytes) => &bytes[HEADER..],
                ReceiveState::Waits(_) | ReceiveState::Through => &own[HEADER..],
            };
            match k {
                0 => sums::begin(element, numbers, job.sum),
                _ => sums::add(reduce, element, dtype, job.sum, numbers)?,
            }
        }
        sums::round(element, job.sum);
        let sum = std::mem::take(job.sum);
        let first = chunk.first + if chunk.apart { chunk.edge(me, n).0 } else { 0 };
        job.store(first, &sum);
        if chunk.apart {
            let bytes = Arc::new([&encode(&job.terms())[..], &sum].concat());
            for j in (1..n).map(|d| (me + d) % n) {
                let request = job.wires.send(self.members[j], self.tag + 1, bytes.clone()).map_err(|e| failed(&e))?;
                chunk.sent.push(PendingSend { to: self.members[j], request });
            }
        }
        *job.sum = sum;
        Ok(())
    }
}

fn received(request: &mut dyn Receiving, from: u64) -> Result<Option<Vec<u8>>, CommError> {
    request.received().map_err(|e| failed(&format!("of what rank {from} gives in a collective, {e}")))
}

/// Whether what a member sent is of this collective, and as long as it should be.
fn check(job: &Job, (here, there): (u64, u64), bytes: &[u8], expected: u64) -> Result<(), CommError> {
    let terms = job.terms();
    if bytes.len() as u64 == HEADER as u64 + expected && bytes[..HEADER] == encode(&terms) {
        return Ok(());
    }
    let theirs = bytes.get(..HEADER).map_or("something unreadable".into(), decode);
    Err(CommError::Mismatch { here, mine: terms.to_string(), there, theirs })
}
