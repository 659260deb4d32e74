//! What a block touches of global memory, in which order; and what a launch touches of it.

use crate::fault::Wrong;
use crate::history::{Access, AccessKind, CellAccess, GRANULE, Granule, History};
use std::collections::HashMap;

/// Positions of a granule: single bytes, as different warps may write neighbouring ones.
pub const CELLS: usize = GRANULE;

/// Granules of a page: 4 KiB.
pub const GRANULES: u64 = 256;

/// The accesses of one block.
pub struct BlockAccesses {
    pages: Vec<(u64, Box<[Granule]>)>,
    index: HashMap<u64, usize>,
    /// The index in `pages` of the page that was touched last.
    last: usize,
    history: History<CELLS>,
}

impl Default for BlockAccesses {
    fn default() -> BlockAccesses {
        BlockAccesses { pages: vec![], index: HashMap::new(), last: 0, history: History::new("global") }
    }
}

impl BlockAccesses {
    /// Notes an access, and checks its order with those of other warps of the block.
    pub fn note(&mut self, address: u64, bytes: u64, kind: AccessKind, a: Access<'_>) -> Result<(), Wrong> {
        let (size, end) = (GRANULE as u64, address + bytes);
        for g in address / size..end.div_ceil(size) {
            let base = g * size;
            let range = [address.max(base) - base, end.min(base + size) - base].map(|x| x as usize);
            let page = self.page(g / GRANULES);
            self.history.note(&mut self.pages[page].1[(g % GRANULES) as usize], range, base, kind, a)?;
        }
        Ok(())
    }

    fn page(&mut self, number: u64) -> usize {
        if self.pages.get(self.last).is_none_or(|p| p.0 != number) {
            let pages = &mut self.pages;
            self.last = *self.index.entry(number).or_insert_with(|| {
                pages.push((number, vec![Granule::default(); GRANULES as usize].into_boxed_slice()));
                pages.len() - 1
            });
        }
        self.last
    }

    /// The granules that were touched, by the number of their page and their number in it.
    pub fn granules(&self) -> impl Iterator<Item = (u64, usize, Granule)> {
        let all = self.pages.iter().flat_map(|(page, all)| all.iter().enumerate().map(|(k, g)| (*page, k, *g)));
        all.filter(|(_, _, g)| !matches!(g, Granule::One(p) if *p == CellAccess::default()))
    }

    pub fn history(&self) -> &History<CELLS> {
        &self.history
    }
}

/// Ranges of global memory, as first and last-but-one address, in order and apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// What was read and not written.
    pub read: Vec<[u64; 2]>,
    /// What was written, or changed by atomic operations.
    pub written: Vec<[u64; 2]>,
}

impl Ranges {
    /// Adds what lies behind all that is there.
    pub fn push(of: &mut Vec<[u64; 2]>, range: [u64; 2]) {
        match of.last_mut() {
            Some(last) if last[1] == range[0] => last[1] = range[1],
            _ => of.push(range),
        }
    }
}
