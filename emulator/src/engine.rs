//! Copies that go on while a warp computes: `cp.async`, bulk and tensor copies (PTX ISA, section 9.7.9.25).

use crate::block::{Block, Timing};
use crate::decode::PARAM;
use crate::fault::Wrong;
use crate::float::round_tf32;
use crate::history::{Access, AccessKind};
use crate::inst::*;
use crate::order::{Engine, Stamp, View};
use crate::shared::{aligned, at_rank, rank_of};
use crate::tensor_map::{Swizzle, TensorMap};
use crate::wgmma::Matrix;
use std::collections::VecDeque;
use std::rc::Rc;

/// The engines that work for one warp.
pub struct Engines {
    copies: VecDeque<Copy>,
    /// The number of copies that have been started.
    started: u64,
    /// For each committed group, the copies at its end, its moment, and the trip after which it is complete.
    groups: VecDeque<(u64, Stamp, u32)>,
    stores: Vec<Store>,
    store_groups: VecDeque<Vec<Store>>,
    /// Bytes that have left shared memory for global memory, with their senders.
    leaving: Vec<(Sender, Sent)>,
    /// The last delivery, of which the warp does not know yet.
    delivered: Option<Stamp>,
    pub matrix: Matrix,
}

/// One `cp.async` of one lane.
struct Copy {
    number: u64,
    to: u64,
    from: u64,
    bytes: u32,
    read: u32,
    pc: u32,
    stamp: Stamp,
    view: Rc<View>,
}

/// Addresses in global memory, and bytes for them.
type Sent = Vec<(u64, Vec<u8>)>;

/// The instruction that started a bulk copy, and what its warp knew.
#[derive(Clone)]
struct Sender {
    pc: u32,
    view: Rc<View>,
}

/// A bulk copy from shared to global memory.
struct Store {
    stamp: Stamp,
    sender: Sender,
    /// Address in shared memory, bytes, address in global memory.
    pieces: Vec<(u64, u64, u64)>,
}

/// A copy that ends with an arrival at an mbarrier.
pub struct Task {
    pub warp: usize,
    pub pc: u32,
    stamp: Stamp,
    view: Rc<View>,
    barriers: Vec<u64>,
    effect: TaskEffect,
}

enum TaskEffect {
    /// Completes all copies of the warp before this number.
    Copies(u64),
    /// Loads pieces: address in shared memory, bytes, and source address. Pieces without a source are zeros.
    Load(Vec<(u64, u64, Option<u64>)>, bool),
}

impl Engines {
    pub fn new(words: usize) -> Engines {
        Engines {
            copies: VecDeque::new(),
            started: 0,
            groups: VecDeque::new(),
            stores: vec![],
            store_groups: VecDeque::new(),
            leaving: vec![],
            delivered: None,
            matrix: Matrix::new(words),
        }
    }
}

impl Block<'_> {
    pub fn copy(&mut self, w: usize, pc: u32, op: &Op, mask: u32) -> Result<(), Wrong> {
        let early = self.early();
        match op {
            Op::CpAsync { bytes, d, s, read } => {
                let (to, from) = (self.warps[w].addresses(*d), self.warps[w].addresses(*s));
                let read = read.map_or([*bytes; 32], |r| self.warps[w].word(r));
                let (stamp, view) = (self.warps[w].stamp(Engine::Copy), Rc::new(self.warps[w].view.clone()));
                for l in (0..32).filter(|l| mask >> l & 1 != 0) {
                    let (to, from) = (self.own_place(w, to[l])?, from[l]);
                    aligned(to, u64::from(*bytes))?;
                    if !from.is_multiple_of(u64::from(*bytes)) {
                        return Err(Wrong::Misaligned { space: "global", address: from, bytes: u64::from(*bytes) });
                    }
                    let number = self.engines[w].started;
                    self.engines[w].started += 1;
                    let read = read[l].min(*bytes);
                    self.engines[w].copies.push_back(Copy { number, to, from, bytes: *bytes, read, pc, stamp, view: view.clone() });
                }
                if early {
                    self.perform_copies(w, self.engines[w].started)?;
                }
            }
            Op::CpCommit => {
                let group = (self.engines[w].started, self.warps[w].stamp(Engine::Copy), self.copied(w));
                self.engines[w].groups.push_back(group);
                self.warps[w].tick(Engine::Copy);
            }
            Op::CpWait(left) => {
                if left.is_none() {
                    let all = (self.engines[w].started, self.warps[w].stamp(Engine::Copy), self.copied(w));
                    self.engines[w].groups.push_back(all);
                    self.warps[w].tick(Engine::Copy);
                }
                while self.engines[w].groups.len() > left.unwrap_or(0) as usize {
                    let (end, stamp, trips) = self.engines[w].groups.pop_front().expect("invariant: there is a group");
                    self.perform_copies(w, end)?;
                    self.warps[w].view.see(stamp);
                    self.warps[w].view.trips = self.warps[w].view.trips.max(trips);
                }
            }
            Op::CpArrive { a, count } => {
                let at = self.warps[w].addresses(*a);
                let lanes = (0..32).filter(|l| mask >> l & 1 != 0);
                let barriers = lanes.map(|l| self.own_place(w, at[l])).collect::<Result<Vec<u64>, _>>()?;
                if *count {
                    barriers.iter().try_for_each(|b| self.expect_arrivals(*b, 1))?;
                }
                let (stamp, mut view) = (self.warps[w].stamp(Engine::Copy), self.warps[w].view.clone());
                view.trips = view.trips.max(self.copied(w));
                let view = Rc::new(view);
                self.warps[w].tick(Engine::Copy);
                let effect = TaskEffect::Copies(self.engines[w].started);
                self.begin(Task { warp: w, pc, stamp, view, barriers, effect })?;
            }
            Op::TensorLoad { d, map, at, barrier, ranks } => {
                let l = mask.trailing_zeros() as usize;
                self.single(mask, "a tensor copy")?;
                let (map, at) = self.tensor(w, *map, at, l)?;
                let to = self.shared_place(w, self.warps[w].addresses(*d)[l]);
                aligned(to, if map.swizzle == Swizzle::None { 128 } else { map.swizzle.align().min(map.bytes().next_power_of_two()) })?;
                let element = u64::from(map.element);
                let row = u64::from(map.extent[0]) * element;
                let mut pieces = vec![];
                for (n, (from, inside)) in map.rows(&at).into_iter().enumerate() {
                    for piece in 0..row / 16 {
                        let place = map.swizzle.place(to + n as u64 * row + 16 * piece);
                        // Pieces that lie partly outside of the tensor are read element by element.
                        let elements = piece * 16 / element..(piece + 1) * 16 / element;
                        if inside.start <= elements.start && elements.end <= inside.end {
                            pieces.push((place, 16, Some(from + 16 * piece)));
                        } else {
                            for (k, e) in elements.enumerate() {
                                let from = inside.contains(&e).then_some(from.wrapping_add(e * element));
                                pieces.push((place + k as u64 * element, element, from));
                            }
                        }
                    }
                }
                let barrier = self.shared_place(w, self.warps[w].addresses(*barrier)[l]);
                let ranks = ranks.map(|r| self.warps[w].word(r)[l]);
                self.start_load(w, pc, [to, barrier], ranks, pieces, map.tf32)?;
            }
            Op::BulkLoad { d, s, bytes, barrier, ranks } => {
                let l = mask.trailing_zeros() as usize;
                self.single(mask, "a bulk copy")?;
                let (to, from) = (self.shared_place(w, self.warps[w].addresses(*d)[l]), self.warps[w].addresses(*s)[l]);
                let bytes = self.bulk_bytes(w, *bytes, l, to, from)?;
                let barrier = self.shared_place(w, self.warps[w].addresses(*barrier)[l]);
                let ranks = ranks.map(|r| self.warps[w].word(r)[l]);
                self.start_load(w, pc, [to, barrier], ranks, vec![(to, bytes, Some(from))], false)?;
            }
            Op::TensorStore { map, at, s } => {
                let l = mask.trailing_zeros() as usize;
                self.single(mask, "a tensor copy")?;
                let (map, at) = self.tensor(w, *map, at, l)?;
                let from = self.own_place(w, self.warps[w].addresses(*s)[l])?;
                aligned(from, 128)?;
                let element = u64::from(map.element);
                let row = u64::from(map.extent[0]) * element;
                let mut pieces = vec![];
                for (n, (to, inside)) in map.rows(&at).into_iter().enumerate() {
                    for e in inside {
                        let place = from + n as u64 * row + e * element;
                        let within = place % 16;
                        pieces.push((map.swizzle.place(place - within) + within, element, to + e * element));
                    }
                }
                self.start_store(w, pc, pieces)?;
            }
            Op::BulkStore { d, s, bytes } => {
                let l = mask.trailing_zeros() as usize;
                self.single(mask, "a bulk copy")?;
                let (to, from) = (self.warps[w].addresses(*d)[l], self.own_place(w, self.warps[w].addresses(*s)[l])?);
                let bytes = self.bulk_bytes(w, *bytes, l, from, to)?;
                self.start_store(w, pc, vec![(from, bytes, to)])?;
            }
            Op::BulkCommit => {
                let group = std::mem::take(&mut self.engines[w].stores);
                self.engines[w].store_groups.push_back(group);
            }
            Op::BulkWait { left, read } => {
                while self.engines[w].store_groups.len() > *left as usize {
                    let group = self.engines[w].store_groups.pop_front().expect("invariant: there is a group");
                    self.perform_stores(w, group)?;
                }
                if !*read && *left == 0 {
                    self.deliver(w)?;
                    if let Some(last) = self.engines[w].delivered.take() {
                        self.warps[w].view.see(last);
                    }
                }
            }
            _ => unreachable!("invariant: only copies come here"),
        }
        Ok(())
    }

    /// The trip after which all copies of a warp are complete.
    fn copied(&self, w: usize) -> u32 {
        self.counting.as_ref().map_or(0, |c| c.copied(w))
    }

    fn early(&self) -> bool {
        self.options.timing == Timing::Early
    }

    /// Checks that one lane alone executes the instruction, since each lane would copy by itself.
    fn single(&self, mask: u32, what: &str) -> Result<(), Wrong> {
        if mask.count_ones() == 1 { Ok(()) } else { Err(Wrong::Divergent(format!("{what} is started by {} lanes of a warp", mask.count_ones()))) }
    }

    fn bulk_bytes(&self, w: usize, bytes: Sw, lane: usize, shared: u64, global: u64) -> Result<u64, Wrong> {
        let bytes = u64::from(self.warps[w].word(bytes)[lane]);
        aligned(shared, 16)?;
        if !bytes.is_multiple_of(16) || !global.is_multiple_of(16) {
            return Err(Wrong::Misaligned { space: "global", address: global, bytes });
        }
        Ok(bytes)
    }

    fn tensor(&mut self, w: usize, map: Address, at: &[Sw], lane: usize) -> Result<(TensorMap, Vec<i64>), Wrong> {
        let address = self.warps[w].addresses(map)[lane];
        let at: Vec<i64> = at.iter().map(|c| i64::from(self.warps[w].word(*c)[lane] as i32)).collect();
        let mut bytes = [0; 128];
        match address.checked_sub(PARAM).map(|a| a as usize) {
            Some(a) if a + 128 <= self.parameters.len() => bytes.copy_from_slice(&self.parameters[a..a + 128]),
            _ => self.memory.read(address, &mut bytes)?,
        }
        let map = TensorMap::decode(&bytes)?;
        // No document says this, but an H100 reports it as an illegal instruction.
        if !(at[0] * i64::from(map.element)).rem_euclid(16).eq(&0) {
            return Err(Wrong::Descriptor(format!("a tensor copy begins at element {} of a row, which is no multiple of 16 bytes", at[0])));
        }
        Ok((map, at))
    }

    /// Starts a load into shared memory from place `to` on, which completes bytes of an mbarrier: in the block of
    /// these places, or in those of the cluster that have a bit in `ranks`, each at the same offsets.
    fn start_load(
        &mut self,
        w: usize,
        pc: u32,
        [to, barrier]: [u64; 2],
        ranks: Option<u32>,
        pieces: Vec<(u64, u64, Option<u64>)>,
        tf32: bool,
    ) -> Result<(), Wrong> {
        let all = u64::from(self.warps[w].place.ranks);
        if ranks.is_none() && rank_of(to) != rank_of(barrier) || ranks.is_some_and(|r| r == 0 || u64::from(r) >> all != 0) {
            return Err(Wrong::Undefined("a copy and its mbarrier are of one block, which is of the cluster".into()));
        }
        if let Some(counting) = &mut self.counting {
            counting.copy(pieces.iter().filter_map(|p| Some((p.2?, p.1))), |c| &mut c.loads);
        }
        let (stamp, mut view) = (self.warps[w].stamp(Engine::Bulk), self.warps[w].view.clone());
        view.trips += 1;
        let view = Rc::new(view);
        self.warps[w].tick(Engine::Bulk);
        let ranks: Vec<u64> = ranks.map_or_else(|| vec![rank_of(to)], |r| (0..all).filter(|k| r >> k & 1 != 0).collect());
        ranks.into_iter().try_for_each(|rank| {
            let barrier = at_rank(rank, barrier);
            self.open_to_copies(w, barrier)?;
            let pieces = pieces.iter().map(|(to, bytes, from)| (at_rank(rank, *to), *bytes, *from)).collect();
            self.begin(Task { warp: w, pc, stamp, view: view.clone(), barriers: vec![barrier], effect: TaskEffect::Load(pieces, tf32) })
        })
    }

    fn begin(&mut self, task: Task) -> Result<(), Wrong> {
        if self.early() {
            return self.perform(task);
        }
        self.tasks.push_back(task);
        Ok(())
    }

    /// Performs a task, and arrives at its mbarrier.
    pub fn perform(&mut self, task: Task) -> Result<(), Wrong> {
        let Task { warp, pc, stamp, view, barriers, effect } = task;
        match effect {
            TaskEffect::Copies(end) => {
                self.perform_copies(warp, end)?;
                barriers.iter().try_for_each(|b| self.arrive_with(*b, 1, None, Some((stamp, view.trips))))
            }
            TaskEffect::Load(pieces, tf32) => {
                let mut all = 0;
                let mut data = vec![];
                self.reachable(barriers[0])?;
                for (to, bytes, from) in pieces {
                    data.clear();
                    data.resize(bytes as usize, 0);
                    let access = Access { stamp, view: &view, pc };
                    if let Some(from) = from {
                        self.memory.read(from, &mut data)?;
                        self.note_global(from, bytes, AccessKind::Read, access)?;
                    }
                    if tf32 {
                        for word in data.as_chunks_mut().0 {
                            *word = round_tf32(u32::from_le_bytes(*word)).to_le_bytes();
                        }
                    }
                    self.shared.note_write(to, data.len(), access)?;
                    self.shared.poke(to, &data)?;
                    all += bytes;
                }
                self.complete_bytes(barriers[0], all, stamp, view.trips)
            }
        }
    }

    fn perform_copies(&mut self, w: usize, end: u64) -> Result<(), Wrong> {
        while self.engines[w].copies.front().is_some_and(|c| c.number < end) {
            let c = self.engines[w].copies.pop_front().expect("invariant: there is a copy");
            let mut data = [0; 16];
            let access = Access { stamp: c.stamp, view: &c.view, pc: c.pc };
            if c.read > 0 {
                self.memory.read(c.from, &mut data[..c.read as usize])?;
                self.note_global(c.from, u64::from(c.read), AccessKind::Read, access)?;
            }
            self.shared.note_write(c.to, c.bytes as usize, access)?;
            self.shared.poke(c.to, &data[..c.bytes as usize])?;
        }
        Ok(())
    }

    fn start_store(&mut self, w: usize, pc: u32, pieces: Vec<(u64, u64, u64)>) -> Result<(), Wrong> {
        if let Some(counting) = &mut self.counting {
            counting.copy(pieces.iter().map(|p| (p.2, p.1)), |c| &mut c.stores);
        }
        let stamp = self.warps[w].stamp(Engine::Bulk);
        let sender = Sender { pc, view: Rc::new(self.warps[w].view.clone()) };
        self.warps[w].tick(Engine::Bulk);
        let mut store = Store { stamp, sender, pieces };
        if self.early() {
            self.read_store(w, &store)?;
            // The warp does not know yet that the store has been read.
            store.pieces.clear();
        }
        self.engines[w].stores.push(store);
        Ok(())
    }

    fn read_store(&mut self, w: usize, store: &Store) -> Result<(), Wrong> {
        let mut pieces = vec![];
        for (from, bytes, to) in &store.pieces {
            let access = Access { stamp: store.stamp, view: &store.sender.view, pc: store.sender.pc };
            self.shared.note_read(*from, *bytes as usize, access)?;
            pieces.push((*to, self.shared.peek(*from, *bytes as usize)?.to_vec()));
        }
        self.engines[w].leaving.push((store.sender.clone(), pieces));
        if self.early() { self.deliver(w) } else { Ok(()) }
    }

    fn perform_stores(&mut self, w: usize, group: Vec<Store>) -> Result<(), Wrong> {
        for store in group {
            self.read_store(w, &store)?;
            self.warps[w].view.see(store.stamp);
        }
        Ok(())
    }

    fn deliver(&mut self, w: usize) -> Result<(), Wrong> {
        for (sender, pieces) in std::mem::take(&mut self.engines[w].leaving) {
            // Delivery has a moment of its own, since an agent may know that the store was read but not that it has
            // arrived.
            let stamp = self.warps[w].stamp(Engine::Bulk);
            self.warps[w].tick(Engine::Bulk);
            let access = Access { stamp, view: &sender.view, pc: sender.pc };
            for (to, data) in &pieces {
                self.memory.write(*to, data)?;
                self.note_global(*to, data.len() as u64, AccessKind::Write, access)?;
            }
            self.engines[w].delivered = Some(stamp);
        }
        Ok(())
    }

    fn note_global(&mut self, address: u64, bytes: u64, kind: AccessKind, a: Access<'_>) -> Result<(), Wrong> {
        self.touched.as_mut().map_or(Ok(()), |touched| touched.note(address, bytes, kind, a))
    }

    /// Ends the copies of a warp that has ended, which must not need shared memory any more.
    pub fn finish_copies(&mut self, w: usize) -> Result<(), Wrong> {
        if !self.engines[w].stores.is_empty() || !self.engines[w].store_groups.is_empty() {
            return Err(Wrong::Undefined(
                "the warp ends while a bulk copy may still read shared memory: `cp.async.bulk.wait_group` is missing".into(),
            ));
        }
        self.deliver(w)
    }
}
