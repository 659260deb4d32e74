//! Loads, stores and atomics of a warp, and what its lanes exchange.

use crate::block::Block;
use crate::decode::{GLOBAL, LOCAL, PARAM, SHARED};
use crate::fault::Wrong;
use crate::history::AccessKind;
use crate::inst::*;
use crate::order::Engine;
use crate::shared::{aligned, in_shared, mapped};
use crate::warp::{LaunchGeometry, Longs};

/// The space of an address, and the address within it.
fn locate(space: Space, address: u64) -> (Space, u64) {
    match space {
        Space::Generic if address >= GLOBAL => (Space::Global, address),
        Space::Generic if address >= PARAM => (Space::Param, address - PARAM),
        Space::Generic if address >= LOCAL => (Space::Local, address - LOCAL),
        Space::Generic if address >= SHARED => (Space::Shared, address - SHARED),
        // Nothing lies at this address, which the access to global memory reports.
        Space::Generic => (Space::Global, address),
        Space::Shared | Space::Cluster => (Space::Shared, in_shared(address)),
        Space::Local if (LOCAL..PARAM).contains(&address) => (Space::Local, address - LOCAL),
        // Constant memory lies in the range of global memory.
        Space::Param if address >= GLOBAL => (Space::Global, address),
        Space::Param if address >= PARAM => (Space::Param, address - PARAM),
        Space::Global | Space::Local | Space::Param => (space, address),
    }
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |l| mask >> l & 1 != 0)
}

fn extend(ty: Ty, v: u64) -> u64 {
    match ty {
        Ty::S8 => v as i8 as u64,
        Ty::S16 => v as i16 as u64,
        Ty::S32 => v as i32 as u64,
        Ty::U8 | Ty::U16 | Ty::U32 | Ty::U64 | Ty::S64 | Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64 => v,
    }
}

impl Block<'_> {
    pub fn access(&mut self, w: usize, op: &Op, mask: u32) -> Result<(), Wrong> {
        match op {
            Op::ToGeneric(space, d, a) => {
                let base = match space {
                    Space::Shared | Space::Cluster => SHARED,
                    Space::Local => LOCAL,
                    Space::Generic | Space::Global | Space::Param => 0,
                };
                let out = self.warps[w].bits(*a).map(|x| if x >= base && base != 0 { x } else { x + base });
                self.warps[w].set(*d, &out, mask);
            }
            Op::FromGeneric(space, d, a) => {
                let out = self.warps[w].bits(*a).map(|x| locate(if *space == Space::Param { Space::Param } else { Space::Generic }, x).1);
                let out = if matches!(space, Space::Global | Space::Param) { self.warps[w].bits(*a) } else { out };
                self.warps[w].set(*d, &out, mask);
            }
            Op::MapRank(space, d, a, rank) => {
                let (at, ranks) = (self.warps[w].bits(*a), self.warps[w].word(*rank));
                let base = if *space == Space::Generic { SHARED } else { 0 };
                let mut out = [0; 32];
                for l in lanes(mask) {
                    if ranks[l] >= self.warps[w].place.ranks {
                        return Err(Wrong::Undefined(format!("`mapa` to block {} of a cluster of {}", ranks[l], self.warps[w].place.ranks)));
                    }
                    out[l] = base + mapped(ranks[l].into(), in_shared(at[l]));
                }
                self.warps[w].set(*d, &out, mask);
            }
            Op::Load { space, order, ty, d, a } => {
                let at = self.warps[w].addresses(*a);
                let bytes = u64::from(ty.bytes());
                let mut out: Vec<Longs> = vec![[0; 32]; d.len()];
                for l in lanes(mask) {
                    self.vector_aligned(*space, at[l], bytes * d.len() as u64)?;
                    for (k, out) in out.iter_mut().enumerate() {
                        out[l] = extend(*ty, self.load(w, l, *space, at[l].wrapping_add(k as u64 * bytes), ty.bytes(), order.strong)?);
                    }
                }
                self.note_lanes(w, *space, &at, mask, bytes * d.len() as u64, if order.strong { AccessKind::Strong } else { AccessKind::Read })?;
                self.tell_and_hear(w, *space, &at, mask, *order, [false, true]);
                for (d, v) in d.iter().zip(&out) {
                    self.warps[w].set(*d, v, mask);
                }
            }
            Op::Store { space, order, ty, s, a } => {
                let at = self.warps[w].addresses(*a);
                let bytes = u64::from(ty.bytes());
                for (k, s) in s.iter().enumerate() {
                    let v = self.warps[w].bits(*s);
                    for l in lanes(mask) {
                        self.vector_aligned(*space, at[l], bytes * self.width(op))?;
                        self.store(w, l, *space, at[l].wrapping_add(k as u64 * bytes), ty.bytes(), v[l], order.strong)?;
                    }
                }
                self.note_lanes(w, *space, &at, mask, bytes * s.len() as u64, if order.strong { AccessKind::Strong } else { AccessKind::Write })?;
                self.tell_and_hear(w, *space, &at, mask, *order, [true, false]);
            }
            Op::Atom { op: Atomic::Inc, d, b, .. } if self.options.turns => {
                let LaunchGeometry { grid, ranks, .. } = self.warps[w].place;
                let (last, clusters) = (self.warps[w].bits(*b), grid.iter().map(|n| u64::from(*n)).product::<u64>() / u64::from(ranks));
                let mut old = [0; 32];
                for l in lanes(mask) {
                    old[l] = (u64::from(self.number / ranks) + clusters * self.taken).min(last[l]);
                    self.taken += 1;
                }
                self.warps[w].set(*d, &old, mask);
            }
            Op::Atom { op, order, space, ty, d, a, b, c } => {
                let (at, b) = (self.warps[w].addresses(*a), self.warps[w].bits(*b));
                let c = c.map_or([0; 32], |c| self.warps[w].bits(c));
                let mut old = [0; 32];
                for l in lanes(mask) {
                    old[l] = self.update(w, *space, at[l], *ty, |v| atomic(*op, *ty, v, b[l], c[l]))?;
                }
                self.warps[w].set(*d, &old, mask);
                self.note_lanes(w, *space, &at, mask, u64::from(ty.bytes()), AccessKind::Strong)?;
                self.tell_and_hear(w, *space, &at, mask, *order, [true, true]);
            }
            Op::LdMatrix { d, a, transpose } => {
                self.converged(w, mask, "ldmatrix")?;
                let at = self.warps[w].addresses(*a);
                for (m, d) in d.iter().enumerate() {
                    let mut rows = [[0u16; 8]; 8];
                    for (r, row) in rows.iter_mut().enumerate() {
                        let address = self.own_place(w, at[8 * m + r])?;
                        aligned(address, 16)?;
                        self.shared.note_read(address, 16, Block::own(&self.warps[w]))?;
                        let bytes = self.shared.peek(address, 16)?;
                        *row = std::array::from_fn(|k| u16::from_le_bytes([bytes[2 * k], bytes[2 * k + 1]]));
                    }
                    let pair = |l: usize| {
                        let (r, c) = (l / 4, 2 * (l % 4));
                        let [low, high] = if *transpose { [rows[c][r], rows[c + 1][r]] } else { [rows[r][c], rows[r][c + 1]] };
                        u32::from(high) << 16 | u32::from(low)
                    };
                    self.warps[w].set_word(*d, &std::array::from_fn(pair), mask);
                }
            }
            Op::StMatrix { a, s, transpose } => {
                self.converged(w, mask, "stmatrix")?;
                let at = self.warps[w].addresses(*a);
                for (m, s) in s.iter().enumerate() {
                    let v = self.warps[w].word(*s);
                    for r in 0..8 {
                        let address = self.own_place(w, at[8 * m + r])?;
                        aligned(address, 16)?;
                        self.shared.note_write(address, 16, Block::own(&self.warps[w]))?;
                        let element = |c: usize| {
                            let (row, col) = if *transpose { (c, r) } else { (r, c) };
                            (v[4 * row + col / 2] >> (16 * (col % 2))) as u16
                        };
                        let bytes: Vec<u8> = (0..8).flat_map(|c| element(c).to_le_bytes()).collect();
                        self.shared.poke(address, &bytes)?;
                    }
                }
            }
            _ => unreachable!("invariant: only accesses to memory come here"),
        }
        Ok(())
    }

    /// Notes accesses of lanes to global memory, of `bytes` bytes at each of these addresses.
    fn note_lanes(&mut self, w: usize, space: Space, at: &Longs, mask: u32, bytes: u64, kind: AccessKind) -> Result<(), Wrong> {
        let Some(touched) = &mut self.touched else { return Ok(()) };
        let access = Block::own(&self.warps[w]);
        let mut run = [0, 0];
        for l in lanes(mask) {
            let (Space::Global, address) = locate(space, at[l]) else { continue };
            if address == run[1] {
                run[1] += bytes;
            } else if !(run[0]..run[1]).contains(&address) || address + bytes > run[1] {
                touched.note(run[0], run[1] - run[0], kind, access)?;
                run = [address, address + bytes];
            }
        }
        touched.note(run[0], run[1] - run[0], kind, access)
    }

    /// Publishes what the warp knows at a strong access to global memory, and learns what others have published
    /// there.
    fn tell_and_hear(&mut self, w: usize, space: Space, at: &Longs, mask: u32, order: Order, [tells, hears]: [bool; 2]) {
        if !order.strong || self.touched.is_none() {
            return;
        }
        for l in lanes(mask) {
            let (Space::Global, address) = locate(space, at[l]) else { continue };
            let warp = &mut self.warps[w];
            if let Some(known) = self.launch.told(address).filter(|_| hears) {
                if order.acquire {
                    warp.view.learn(known, self.number);
                } else {
                    warp.heard.learn(Some(&known));
                }
            }
            if tells && order.release {
                self.launch.tell(address, self.number, &warp.view);
                warp.tick(Engine::Warp);
            } else if let Some(released) = warp.released.as_ref().filter(|_| tells) {
                self.launch.tell(address, self.number, released);
            }
        }
    }

    fn width(&self, op: &Op) -> u64 {
        if let Op::Store { s, .. } = op { s.len() as u64 } else { 1 }
    }

    /// Checks that a vector is aligned as a whole.
    fn vector_aligned(&self, space: Space, address: u64, bytes: u64) -> Result<(), Wrong> {
        let (space, address) = locate(space, address);
        if address.is_multiple_of(bytes) {
            return Ok(());
        }
        let space = if space == Space::Shared { "shared" } else { "global" };
        Err(Wrong::Misaligned { space, address, bytes })
    }

    fn load(&mut self, w: usize, lane: usize, space: Space, address: u64, bytes: u32, strong: bool) -> Result<u64, Wrong> {
        match locate(space, address) {
            (Space::Shared, at) => self.shared.load(self.reached(w, space, at)?, bytes, strong, Block::own(&self.warps[w])),
            (Space::Local, at) => {
                let at = self.local(lane, at, bytes)?;
                Ok(little(&self.warps[w].local[at..at + bytes as usize]))
            }
            (Space::Param, at) => {
                let end = at.checked_add(u64::from(bytes)).filter(|e| *e <= self.parameters.len() as u64);
                let outside = || Wrong::OutOfBounds {
                    space: "parameter",
                    address: at,
                    bytes: u64::from(bytes),
                    what: format!("the kernel's {} bytes", self.parameters.len()),
                };
                let end = end.ok_or_else(outside)?;
                Ok(little(&self.parameters[at as usize..end as usize]))
            }
            (Space::Global | Space::Generic | Space::Cluster, at) => self.memory.load(at, bytes),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn store(&mut self, w: usize, lane: usize, space: Space, address: u64, bytes: u32, value: u64, strong: bool) -> Result<(), Wrong> {
        match locate(space, address) {
            (Space::Shared, at) => self.shared.store(self.reached(w, space, at)?, bytes, value, strong, Block::own(&self.warps[w])),
            (Space::Local, at) => {
                let at = self.local(lane, at, bytes)?;
                self.warps[w].local[at..at + bytes as usize].copy_from_slice(&value.to_le_bytes()[..bytes as usize]);
                Ok(())
            }
            (Space::Param, at) => {
                Err(Wrong::OutOfBounds { space: "parameter", address: at, bytes: u64::from(bytes), what: "what may be written".into() })
            }
            (Space::Global | Space::Generic | Space::Cluster, at) => self.memory.store(at, bytes, value),
        }
    }

    /// The place that a warp reaches at an address in shared memory.
    fn reached(&self, w: usize, space: Space, address: u64) -> Result<u64, Wrong> {
        if space == Space::Shared {
            return self.own_place(w, address);
        }
        let place = self.shared_place(w, address);
        self.reachable(place).map(|()| place)
    }

    fn local(&self, lane: usize, address: u64, bytes: u32) -> Result<usize, Wrong> {
        let own = self.kernel.local_bytes;
        match address.checked_add(u64::from(bytes)) {
            Some(end) if end <= own => Ok(lane * own as usize + address as usize),
            _ => Err(Wrong::OutOfBounds { space: "local", address, bytes: u64::from(bytes), what: format!("the thread's {own} bytes") }),
        }
    }

    /// Atomics do not race among each other, but do with plain accesses.
    fn update(&mut self, w: usize, space: Space, address: u64, ty: Ty, f: impl Fn(u64) -> u64) -> Result<u64, Wrong> {
        let bytes = ty.bytes().max(4);
        match locate(space, address) {
            (Space::Shared, at) => {
                let at = self.reached(w, space, at)?;
                aligned(at, u64::from(bytes))?;
                self.shared.note_atomic(at, bytes as usize, Block::own(&self.warps[w]))?;
                let old = little(self.shared.peek(at, bytes as usize)?);
                self.shared.poke(at, &f(old).to_le_bytes()[..bytes as usize])?;
                Ok(old)
            }
            (Space::Global | Space::Generic | Space::Cluster, at) => self.memory.update(at, bytes, f),
            (Space::Local | Space::Param, at) => {
                Err(Wrong::OutOfBounds { space: "atomic", address: at, bytes: u64::from(bytes), what: "global and shared memory".into() })
            }
        }
    }

    pub fn exchange(&mut self, w: usize, op: &Op, mask: u32) -> Result<(), Wrong> {
        match op {
            Op::SyncWarp(members) => self.members(w, *members, mask, "bar.warp.sync")?,
            Op::Shfl { kind, d, p, a, b, c, members } => {
                self.members(w, *members, mask, "shfl.sync")?;
                let (a, b, c) = (self.warps[w].word(*a), self.warps[w].word(*b), self.warps[w].word(*c));
                let (mut out, mut found) = ([0; 32], 0);
                for l in lanes(mask) {
                    let lane = l as i64;
                    let (clamp, segment) = (i64::from(c[l] & 0x1F), i64::from(c[l] >> 8 & 0x1F));
                    let most = lane & segment | clamp & !segment & 0x1F;
                    let by = i64::from(b[l] & 0x1F);
                    let (from, ok) = match kind {
                        Shuffle::Up => (lane - by, lane - by >= most),
                        Shuffle::Down => (lane + by, lane + by <= most),
                        Shuffle::Butterfly => (lane ^ by, lane ^ by <= most),
                        Shuffle::Index => {
                            let from = lane & segment | by & !segment;
                            (from, from <= most)
                        }
                    };
                    let from = if ok { from as usize } else { l };
                    if mask >> from & 1 == 0 {
                        return Err(Wrong::Undefined(format!("lane {l} reads from lane {from}, which does not take part in `shfl.sync`")));
                    }
                    out[l] = a[from];
                    found |= u32::from(ok) << l;
                }
                self.warps[w].set_word(*d, &out, mask);
                if let Some(p) = p {
                    self.warps[w].set_predicate(*p, found, mask);
                }
            }
            Op::Vote { kind, d, p, a, members } => {
                self.members(w, *members, mask, "vote.sync")?;
                let yes = self.warps[w].predicate(*a) & mask;
                let all = match kind {
                    Vote::All => yes == mask,
                    Vote::Any => yes != 0,
                    Vote::Uniform => yes == mask || yes == 0,
                    Vote::Ballot => {
                        self.warps[w].set(*d, &[u64::from(yes); 32], mask);
                        return Ok(());
                    }
                };
                if let Some(p) = p {
                    self.warps[w].set_predicate(*p, if all { u32::MAX } else { 0 }, mask);
                }
            }
            Op::Redux { op, ty, d, a, members } => {
                self.members(w, *members, mask, "redux.sync")?;
                let a = self.warps[w].word(*a);
                let all = lanes(mask).map(|l| u64::from(a[l])).reduce(|x, y| atomic(*op, *ty, x, y, 0)).unwrap_or(0);
                self.warps[w].set_word(*d, &[all as u32; 32], mask);
            }
            Op::Elect(d, p, members) => {
                self.members(w, *members, mask, "elect.sync")?;
                let leader = mask.trailing_zeros();
                self.warps[w].set(*d, &[u64::from(leader); 32], mask);
                self.warps[w].set_predicate(*p, 1 << leader, mask);
            }
            _ => unreachable!("invariant: only exchanges among lanes come here"),
        }
        Ok(())
    }
}

pub fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, b| sum << 8 | u64::from(*b))
}

/// The new value of an atomic operation.
fn atomic(op: Atomic, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
    let bits = 8 * ty.bytes();
    let low = u64::MAX >> (64 - bits);
    let signed = |v: u64| if bits == 32 { i64::from(v as i32) } else { v as i64 };
    let new = match op {
        Atomic::Add if ty == Ty::F32 => u64::from((f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits()),
        Atomic::Add => old.wrapping_add(b),
        Atomic::Min if ty.is_signed() => signed(old).min(signed(b)) as u64,
        Atomic::Max if ty.is_signed() => signed(old).max(signed(b)) as u64,
        Atomic::Min => (old & low).min(b & low),
        Atomic::Max => (old & low).max(b & low),
        Atomic::And => old & b,
        Atomic::Or => old | b,
        Atomic::Xor => old ^ b,
        Atomic::Exch => b,
        Atomic::Cas if old & low == b & low => c,
        Atomic::Cas => old,
        Atomic::Inc => {
            if old & low >= b & low {
                0
            } else {
                old + 1
            }
        }
        Atomic::Dec => {
            if old & low == 0 || old & low > b & low {
                b
            } else {
                old - 1
            }
        }
    };
    new & low
}
