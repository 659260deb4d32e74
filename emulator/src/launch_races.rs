//! What the blocks of a launch touch of global memory, held against each other: nothing orders them but atomic
//! operations and strong accesses with fences (PTX ISA, section 8.9).

use crate::history::{AccessKind, CellAccess, Granule, Mark};
use crate::order::{BlockViews, View};
use crate::touched::{BlockAccesses, CELLS, GRANULES, Ranges};
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// The number of a block, and one of its accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockMark {
    pub block: u32,
    pub mark: Mark,
}

/// What finished blocks did to a position. Of those that read it, or changed it by atomic operations, only the first
/// and the last are kept: at least one of them is another block than the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct GranuleHistory {
    written: Option<BlockMark>,
    read: [Option<BlockMark>; 2],
    strong: [Option<BlockMark>; 2],
}

/// Two accesses that nothing orders.
#[derive(Debug)]
pub struct BlockRace {
    pub address: u64,
    pub this: (Mark, AccessKind),
    pub other: (BlockMark, AccessKind),
}

/// The accesses of a launch's blocks to global memory.
#[derive(Default)]
pub struct LaunchAccesses {
    blocks: Mutex<Blocks>,
    flags: Mutex<HashMap<u64, BlockViews>>,
}

#[derive(Default)]
struct Blocks {
    /// For each page and granule, the number of its history, or, with the highest bit set, an index of `split`.
    pages: BTreeMap<u64, Box<[u32]>>,
    split: Vec<[u32; CELLS]>,
    /// Histories by number. Number 0 is that of untouched memory.
    pasts: Vec<GranuleHistory>,
    numbers: HashMap<GranuleHistory, u32>,
    /// What each block knew of others at its end, if anything.
    known: HashMap<u32, BlockViews>,
}

const SPLIT: u32 = 1 << 31;

impl LaunchAccesses {
    /// Publishes what an agent knows, by an atomic operation or a strong store at an address.
    pub fn tell(&self, address: u64, block: u32, view: &View) {
        let mut flags = self.flags.lock().expect("invariant: no thread panics here");
        let known = flags.entry(address).or_default();
        known.learn(view.others());
        known.learn_of(block, view);
    }

    /// What others have published at an address.
    pub fn told(&self, address: u64) -> Option<BlockViews> {
        self.flags.lock().expect("invariant: no thread panics here").get(&address).cloned()
    }

    /// Adds the accesses of a finished block, and checks their order with those of the blocks before, given what it
    /// knew of these.
    pub fn end(&self, block: u32, touched: &BlockAccesses, known: BlockViews) -> Result<(), BlockRace> {
        self.blocks.lock().expect("invariant: no thread panics here").end(block, touched, known)
    }

    /// All memory that the launch touched.
    pub fn ranges(self) -> Ranges {
        let blocks = self.blocks.into_inner().expect("invariant: no thread panics here");
        let mut ranges = Ranges::default();
        for (page, granules) in &blocks.pages {
            for (g, n) in granules.iter().enumerate().filter(|(_, n)| **n != 0) {
                let base = (page * GRANULES + g as u64) * CELLS as u64;
                if n & SPLIT == 0 {
                    blocks.extend(&mut ranges, *n, [base, base + CELLS as u64]);
                } else {
                    let cells = blocks.split[(n & !SPLIT) as usize];
                    (0u64..).zip(cells).for_each(|(k, n)| blocks.extend(&mut ranges, n, [base + k, base + k + 1]));
                }
            }
        }
        ranges
    }
}

impl Blocks {
    fn extend(&self, ranges: &mut Ranges, past: u32, range: [u64; 2]) {
        if past == 0 {
            return;
        }
        let past = self.pasts[past as usize];
        let changed = past.written.is_some() || past.strong[0].is_some();
        Ranges::push(if changed { &mut ranges.written } else { &mut ranges.read }, range);
    }

    fn end(&mut self, block: u32, touched: &BlockAccesses, known: BlockViews) -> Result<(), BlockRace> {
        if self.pasts.is_empty() {
            self.pasts.push(GranuleHistory::default());
            self.numbers.insert(GranuleHistory::default(), 0);
        }
        // Most granules have the same past and the same accesses now, so the last result is kept.
        let mut last: Option<(u32, CellAccess, u32)> = None;
        let mut after = |all: &mut Blocks, old: u32, place: CellAccess, address: u64| match last {
            Some((o, p, new)) if (o, p) == (old, place) => Ok(new),
            _ => {
                let new = all.after(block, old, place, touched, &known, address)?;
                last = Some((old, place, new));
                Ok(new)
            }
        };
        for (page, g, granule) in touched.granules() {
            let base = (page * GRANULES + g as u64) * CELLS as u64;
            let old = self.pages.entry(page).or_insert_with(|| vec![0; GRANULES as usize].into_boxed_slice())[g];
            let new = match granule {
                Granule::One(p) if old & SPLIT == 0 => after(self, old, p, base)?,
                _ => {
                    let mut cells = if old & SPLIT == 0 { [old; CELLS] } else { self.split[(old & !SPLIT) as usize] };
                    for (k, (cell, p)) in cells.iter_mut().zip(touched.history().places(granule)).enumerate() {
                        if p != CellAccess::default() {
                            *cell = after(self, *cell, p, base + k as u64)?;
                        }
                    }
                    self.gather(old, cells)
                }
            };
            self.pages.get_mut(&page).expect("invariant: it is there")[g] = new;
        }
        if !known.is_empty() {
            self.known.insert(block, known);
        }
        Ok(())
    }

    /// The number of a granule with these cells.
    fn gather(&mut self, old: u32, cells: [u32; CELLS]) -> u32 {
        if cells.iter().all(|c| *c == cells[0]) {
            return cells[0];
        }
        if old & SPLIT != 0 {
            self.split[(old & !SPLIT) as usize] = cells;
            return old;
        }
        self.split.push(cells);
        (self.split.len() - 1) as u32 | SPLIT
    }

    /// The history of a position after a block's accesses to it.
    fn after(
        &mut self,
        block: u32,
        old: u32,
        place: CellAccess,
        touched: &BlockAccesses,
        known: &BlockViews,
        address: u64,
    ) -> Result<u32, BlockRace> {
        let mut past = self.pasts[old as usize];
        let written = (!place.written.stamp.is_none()).then_some((place.written, AccessKind::Write));
        let readers = touched.history().readers(place).iter().map(|m| (*m, if m.is_strong() { AccessKind::Strong } else { AccessKind::Read }));
        for (mark, kind) in written.into_iter().chain(readers) {
            let reads = past.read.iter().flatten().filter(|_| kind != AccessKind::Read).map(|f| (*f, AccessKind::Read));
            let strong = past.strong.iter().flatten().filter(|_| kind != AccessKind::Strong).map(|f| (*f, AccessKind::Strong));
            let others = past.written.map(|f| (f, AccessKind::Write)).into_iter().chain(reads).chain(strong);
            for (from, what) in others.filter(|(f, _)| f.block != block) {
                let before = known.has(from.block, from.mark.stamp);
                let behind = || self.known.get(&from.block).is_some_and(|k| k.has(block, mark.stamp));
                if !before && !behind() {
                    return Err(BlockRace { address, this: (mark, kind), other: (from, what) });
                }
            }
            let from = BlockMark { block, mark };
            let all = match kind {
                AccessKind::Write => {
                    past.written = Some(from);
                    continue;
                }
                AccessKind::Read => &mut past.read,
                AccessKind::Strong => &mut past.strong,
            };
            match all[0] {
                Some(first) if first.block != block => all[1] = Some(from),
                _ => all[0] = Some(from),
            }
        }
        if let Some(n) = self.numbers.get(&past) {
            return Ok(*n);
        }
        let n = self.pasts.len() as u32;
        self.pasts.push(past);
        self.numbers.insert(past, n);
        Ok(n)
    }
}
