//! What the blocks of a launch touch of global memory, held against each other: nothing orders them but atomic
//! operations and strong accesses with fences (PTX ISA, section 8.9).

use crate::history::{CellAccess, Granule, Kind, Mark};
use crate::order::{Known, View};
use crate::touched::{CELLS, GRANULES, Ranges, Touched};
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// An access of a block, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct From {
    pub block: u32,
    pub mark: Mark,
}

/// What blocks that are over did to a place. Of those that read it, or changed it by atomic operations, the first
/// and the last one are known: one of them is another than whoever comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Past {
    written: Option<From>,
    read: [Option<From>; 2],
    strong: [Option<From>; 2],
}

/// Two accesses that nothing orders.
#[derive(Debug)]
pub struct Clash {
    pub address: u64,
    pub this: (Mark, Kind),
    pub other: (From, Kind),
}

/// A launch.
#[derive(Default)]
pub struct Between {
    blocks: Mutex<Blocks>,
    flags: Mutex<HashMap<u64, Known>>,
}

#[derive(Default)]
struct Blocks {
    /// By page and granule, the number of its past, or with the highest bit set an index of `split`.
    pages: BTreeMap<u64, Box<[u32]>>,
    split: Vec<[u32; CELLS]>,
    /// Pasts by number; 0 is of what nobody touched.
    pasts: Vec<Past>,
    numbers: HashMap<Past, u32>,
    /// What each block knew of others at its end, if anything.
    known: HashMap<u32, Known>,
}

const SPLIT: u32 = 1 << 31;

impl Between {
    /// What an agent makes known with an atomic operation, or a strong store, at an address.
    pub fn tell(&self, address: u64, block: u32, view: &View) {
        let mut flags = self.flags.lock().expect("invariant: no thread panics here");
        let known = flags.entry(address).or_default();
        known.learn(view.others());
        known.learn_of(block, view);
    }

    /// What others have made known at an address.
    pub fn told(&self, address: u64) -> Option<Known> {
        self.flags.lock().expect("invariant: no thread panics here").get(&address).cloned()
    }

    /// A block is over, and knew so much of others: whether its accesses are ordered with theirs.
    pub fn end(&self, block: u32, touched: &Touched, known: Known) -> Result<(), Clash> {
        self.blocks.lock().expect("invariant: no thread panics here").end(block, touched, known)
    }

    /// All that was touched.
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

    fn end(&mut self, block: u32, touched: &Touched, known: Known) -> Result<(), Clash> {
        if self.pasts.is_empty() {
            self.pasts.push(Past::default());
            self.numbers.insert(Past::default(), 0);
        }
        // What granules mostly have: the same past, and the same accesses now.
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

    /// The number of a granule of these cells.
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

    /// The past of a place after a block's accesses to it.
    fn after(&mut self, block: u32, old: u32, place: CellAccess, touched: &Touched, known: &Known, address: u64) -> Result<u32, Clash> {
        let mut past = self.pasts[old as usize];
        let written = (!place.written.stamp.is_none()).then_some((place.written, Kind::Write));
        let readers = touched.history().readers(place).iter().map(|m| (*m, if m.is_strong() { Kind::Strong } else { Kind::Read }));
        for (mark, kind) in written.into_iter().chain(readers) {
            let reads = past.read.iter().flatten().filter(|_| kind != Kind::Read).map(|f| (*f, Kind::Read));
            let strong = past.strong.iter().flatten().filter(|_| kind != Kind::Strong).map(|f| (*f, Kind::Strong));
            let others = past.written.map(|f| (f, Kind::Write)).into_iter().chain(reads).chain(strong);
            for (from, what) in others.filter(|(f, _)| f.block != block) {
                let before = known.has(from.block, from.mark.stamp);
                let behind = || self.known.get(&from.block).is_some_and(|k| k.has(block, mark.stamp));
                if !before && !behind() {
                    return Err(Clash { address, this: (mark, kind), other: (from, what) });
                }
            }
            let from = From { block, mark };
            let all = match kind {
                Kind::Write => {
                    past.written = Some(from);
                    continue;
                }
                Kind::Read => &mut past.read,
                Kind::Strong => &mut past.strong,
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
