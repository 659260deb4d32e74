//! Counting while a block runs ([`crate::counts`]).

use crate::counts::{Banks, Counts, ROUNDS, Step, Traffic, is_global};
use crate::inst::*;
use crate::shared::in_shared;
use crate::warp::Warp;
use std::collections::HashSet;

/// The counts and trips of one warp.
struct Clock {
    /// For each register, the trip after which its value is there.
    ready: Vec<u32>,
    /// The latest trip that something issued has waited for.
    used: u32,
    /// The trip after which the last `cp.async` is complete.
    copied: u32,
    /// The number of rounds of an unrolled loop.
    rounds: u32,
    /// Whether the next instruction begins a round that is joined with the one before.
    together: bool,
    /// Whether the warp has executed a `wgmma`.
    multiplies: bool,
    /// Trips while no product was under way, since the first product.
    alone: u32,
    /// The number of tensor copies that the warp has begun.
    copies: u64,
    /// The number of those before the warp last took a number from a counter.
    before: u64,
    /// The number of those between that time and the one before, which are for its last tile.
    last: u64,
    /// Numbers that the warp has taken from a counter.
    taken: u64,
    /// Stages that copies filled and the warp waited for.
    stages: u64,
}

/// The counts of a block, or of the blocks of a cluster.
pub struct Counting {
    pub counts: Counts,
    clocks: Vec<Clock>,
    /// The mbarriers of which bytes were expected.
    filled: HashSet<u64>,
}

impl Counting {
    pub fn new(blocks: u64, warps: usize, registers: [usize; 3]) -> Counting {
        let clock = |_| Clock {
            ready: vec![0; registers.iter().sum()],
            used: 0,
            copied: 0,
            rounds: 0,
            together: false,
            multiplies: false,
            alone: 0,
            copies: 0,
            before: 0,
            last: 0,
            taken: 0,
            stages: 0,
        };
        let counts = Counts { blocks, warps: warps as u64, ..Counts::default() };
        Counting { counts, clocks: (0..warps).map(clock).collect(), filled: HashSet::new() }
    }

    /// The trip after which all `cp.async` copies of a warp are complete.
    pub fn copied(&self, w: usize) -> u32 {
        self.clocks[w].copied
    }

    /// Counts an instruction that a warp is about to execute with these lanes. `busy` says whether products of the
    /// warp are under way.
    pub fn count(&mut self, warp: &mut Warp, busy: bool, step: &Step, op: &Op, mask: u32) {
        let Counting { counts, clocks, .. } = self;
        let clock = &mut clocks[warp.id];
        counts.issued[step.pipe as usize] += u64::from(step.slots);
        counts.alone += u64::from(step.slots) * u64::from(clock.multiplies && !busy);
        let before = warp.view.trips;
        if step.leads && !std::mem::take(&mut clock.together) {
            warp.view.trips = before.max(clock.used);
        }
        let needed = step.reads.iter().map(|r| clock.ready[*r as usize]).max().unwrap_or(0);
        // An instruction that takes no issue slot waits for nothing.
        if step.slots > 0 {
            clock.used = clock.used.max(needed);
        }
        if step.repeats && mask != 0 {
            clock.rounds += 1;
            clock.together = !clock.rounds.is_multiple_of(ROUNDS);
        }
        if step.orders && !clock.together {
            warp.view.trips = warp.view.trips.max(clock.used);
        }
        if clock.multiplies && !busy {
            clock.alone += warp.view.trips - before;
        }
        if mask == 0 {
            return;
        }
        let after = warp.view.trips.max(needed) + 1;
        let lanes = |at: &[u64; 32]| (0..32).filter(|l| mask >> l & 1 != 0).map(|l| at[l]).collect::<Vec<u64>>();
        let mut ready = needed;
        let mut access = |space: Space, a: Address, bytes: u64, to: fn(&mut Counts) -> &mut Traffic| {
            if matches!(space, Space::Param | Space::Local) {
                return needed;
            }
            let at = lanes(&warp.addresses(a));
            let global = is_global(space, at[0]);
            if global {
                to(counts).request(at.into_iter().map(|a| (a, bytes)).collect(), Some(bytes));
            } else {
                counts.shared.access(&at.into_iter().map(in_shared).collect::<Vec<_>>(), bytes);
            }
            if global { after } else { needed }
        };
        match op {
            Op::Load { space, ty, d, a, .. } => ready = access(*space, *a, u64::from(ty.bytes()) * d.len() as u64, |c| &mut c.loads),
            Op::Store { space, order: _, ty, s, a } => {
                access(*space, *a, u64::from(ty.bytes()) * s.len() as u64, |c| &mut c.stores);
            }
            Op::Atom { space, ty, a, .. } => ready = access(*space, *a, u64::from(ty.bytes()), |c| &mut c.stores),
            Op::CpAsync { bytes, d, s, read } => {
                let (from, read) = (warp.addresses(*s), read.map(|r| warp.word(r)));
                let piece = |l: usize| (from[l], u64::from(read.map_or(*bytes, |r| r[l].min(*bytes))));
                let pieces = (0..32).filter(|l| mask >> l & 1 != 0).map(piece).filter(|p| p.1 > 0).collect();
                counts.loads.request(pieces, Some(u64::from(*bytes)));
                counts.shared.access(&lanes(&warp.addresses(*d)).into_iter().map(in_shared).collect::<Vec<_>>(), u64::from(*bytes));
                clock.copied = clock.copied.max(after);
            }
            Op::LdMatrix { d, a, .. } => rows(&mut counts.shared, &warp.addresses(*a), d.len()),
            Op::StMatrix { a, s, .. } => rows(&mut counts.shared, &warp.addresses(*a), s.len()),
            Op::Bar { .. } | Op::ClusterWait | Op::BarrierTest { .. } => counts.barriers += 1,
            Op::Mma { element, k, .. } => counts.products[0][usize::from(*element == Element::Tf32)] += 2 * 16 * 8 * u64::from(*k),
            Op::Wgmma(_) => clock.multiplies = true,
            Op::TensorLoad { .. } => clock.copies += 1,
            _ => {}
        }
        if let Op::Atom { op: Atomic::Inc, .. } = op {
            clock.last = clock.copies - std::mem::replace(&mut clock.before, clock.copies);
            clock.taken += 1;
        }
        step.writes.iter().for_each(|r| clock.ready[*r as usize] = ready);
    }

    /// Counts that copies will fill a stage whose mbarrier this is.
    pub fn fills(&mut self, barrier: u64) {
        self.filled.insert(barrier);
        self.counts.stages += 1;
    }

    /// Counts that a warp has waited at an mbarrier.
    pub fn waited(&mut self, w: usize, barrier: u64) {
        self.clocks[w].stages += u64::from(self.filled.contains(&barrier));
    }

    /// Counts one copy of an engine.
    pub fn copy(&mut self, pieces: impl Iterator<Item = (u64, u64)>, to: fn(&mut Counts) -> &mut Traffic) {
        to(&mut self.counts).request(pieces.collect(), None);
    }

    /// Counts a warp's part of a `wgmma`: factors of so many bytes an element, of which the second is shared by four
    /// warps.
    pub fn product(&mut self, op: &Wgmma, depth: u64, bytes: u64) {
        self.counts.products[1][usize::from(op.element == Element::Tf32)] += 2 * 16 * u64::from(op.n) * depth;
        let rows = if matches!(op.a, MatrixA::Descriptor(_)) { 16 } else { 0 };
        self.counts.shared.product_bytes += (rows + u64::from(op.n) / 4) * depth * bytes;
    }

    /// Counts that a warp has ended.
    pub fn end(&mut self, warp: &Warp) {
        let (counts, clock) = (&mut self.counts, &self.clocks[warp.id]);
        let trips = u64::from(warp.view.trips.max(clock.used));
        counts.trips = counts.trips.max(trips);
        counts.all_trips += trips;
        counts.alone_trips = counts.alone_trips.max(u64::from(clock.alone));
        counts.used_stages += if clock.multiplies { clock.stages } else { 0 };
        counts.multipliers += u64::from(clock.multiplies);
        if clock.taken > 0 {
            counts.counter_tiles.tiles += clock.taken;
            counts.counter_tiles.most = counts.counter_tiles.most.max(clock.taken);
            counts.counter_tiles.takers += 1;
            counts.counter_tiles.copies += clock.copies;
            counts.counter_tiles.last_tile_copies += clock.last;
        }
    }
}

/// Counts accesses to matrices with rows of 16 bytes at the lanes' addresses, eight rows a matrix.
fn rows(banks: &mut Banks, at: &[u64; 32], matrices: usize) {
    at[..8 * matrices].chunks(8).for_each(|at| banks.access(&at.iter().copied().map(in_shared).collect::<Vec<_>>(), 16));
}
