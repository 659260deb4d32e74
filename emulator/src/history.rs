//! Who last touched what, and whether accesses that follow one another are ordered: of shared memory, and of what a
//! block touches of global memory.

use crate::fault::Wrong;
use crate::order::{Stamp, View};
use std::collections::HashMap;

/// Bytes of a granule. Most granules are touched as a whole.
pub const GRANULE: usize = 16;

/// The bit in an instruction's number that marks an atomic or otherwise strong access (PTX ISA, section 8.4).
const STRONG: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessKind {
    Read,
    Write,
    /// An atomic operation, or a strong load or store: such do not race among each other.
    Strong,
}

impl AccessKind {
    fn noun(self) -> &'static str {
        match self {
            AccessKind::Read => "read",
            AccessKind::Write => "write",
            AccessKind::Strong => "atomic access",
        }
    }
}

/// A past access: its agent and moment, and its instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark {
    pub stamp: Stamp,
    pc: u32,
}

impl Mark {
    fn new(a: Access<'_>, kind: AccessKind) -> Mark {
        Mark { stamp: a.stamp, pc: if kind == AccessKind::Strong { a.pc | STRONG } else { a.pc } }
    }

    pub fn is_strong(self) -> bool {
        self.pc & STRONG != 0
    }

    pub fn pc(self) -> u32 {
        self.pc & !STRONG
    }

    pub fn describe(self, what: AccessKind) -> String {
        self.stamp.describe(if self.is_strong() { AccessKind::Strong.noun() } else { what.noun() })
    }
}

/// The last write of a position, and the number of the set of those that have read it since.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct CellAccess {
    pub written: Mark,
    pub readers: u32,
}

/// The last accesses to a granule.
#[derive(Clone, Copy)]
pub enum Granule {
    One(CellAccess),
    /// Different accesses to its positions, at this index of `split`.
    Each(u32),
}

impl Default for Granule {
    fn default() -> Granule {
        Granule::One(CellAccess::default())
    }
}

/// The agent of an access, its instruction, and what the agent knows.
#[derive(Clone, Copy)]
pub struct Access<'a> {
    pub stamp: Stamp,
    pub view: &'a View,
    pub pc: u32,
}

/// The tables that granules of `CELLS` positions refer to. Accesses of different warps to one position count as
/// accesses to the same bytes.
pub struct History<const CELLS: usize> {
    space: &'static str,
    split: Vec<[CellAccess; CELLS]>,
    free: Vec<u32>,
    /// Sets of readers by number; 0 is the empty one.
    sets: Vec<Vec<Mark>>,
    numbers: HashMap<Vec<Mark>, u32>,
    joined: HashMap<(u32, Mark), u32>,
    /// The last access that was checked, and its result.
    last: Option<(CellAccess, Mark, AccessKind, CellAccess)>,
}

impl<const CELLS: usize> History<CELLS> {
    const CELL: usize = GRANULE / CELLS;

    pub fn new(space: &'static str) -> Self {
        let numbers = HashMap::from([(vec![], 0)]);
        History { space, split: vec![], free: vec![], sets: vec![vec![]], numbers, joined: HashMap::new(), last: None }
    }

    /// The last accesses to each position of a granule.
    pub fn places(&self, granule: Granule) -> [CellAccess; CELLS] {
        match granule {
            Granule::One(p) => [p; CELLS],
            Granule::Each(k) => self.split[k as usize],
        }
    }

    pub fn readers(&self, place: CellAccess) -> &[Mark] {
        &self.sets[place.readers as usize]
    }

    /// Notes an access to bytes `from..to` of the granule at `base`, and checks that it comes after all accesses that
    /// it must follow.
    #[inline]
    pub fn note(&mut self, granule: &mut Granule, [from, to]: [usize; 2], base: u64, kind: AccessKind, a: Access<'_>) -> Result<(), Wrong> {
        let (from, to) = (from / Self::CELL, to.div_ceil(Self::CELL));
        let whole = to - from == CELLS;
        let split = match *granule {
            Granule::One(p) if whole => {
                *granule = Granule::One(self.after(p, kind, a, base)?);
                return Ok(());
            }
            Granule::One(p) => {
                let k = self.free.pop().unwrap_or_else(|| {
                    self.split.push([CellAccess::default(); CELLS]);
                    self.split.len() as u32 - 1
                });
                self.split[k as usize] = [p; CELLS];
                *granule = Granule::Each(k);
                k
            }
            Granule::Each(k) => k,
        };
        for cell in from..to {
            let p = self.split[split as usize][cell];
            self.split[split as usize][cell] = self.after(p, kind, a, base + (cell * Self::CELL) as u64)?;
        }
        let places = &self.split[split as usize];
        if places.iter().all(|p| *p == places[0]) {
            *granule = Granule::One(places[0]);
            self.free.push(split);
        }
        Ok(())
    }

    /// The state of a position after an access to it.
    #[inline]
    fn after(&mut self, p: CellAccess, kind: AccessKind, a: Access<'_>, address: u64) -> Result<CellAccess, Wrong> {
        let mark = Mark::new(a, kind);
        if let Some((place, same, of, new)) = self.last
            && (place, same, of) == (p, mark, kind)
        {
            return Ok(new);
        }
        self.check(p, kind, a, address)?;
        let new = match kind {
            AccessKind::Write => CellAccess { written: mark, readers: 0 },
            AccessKind::Read | AccessKind::Strong => CellAccess { written: p.written, readers: self.with_reader(p.readers, mark, a.view) },
        };
        self.last = Some((p, mark, kind, new));
        Ok(new)
    }

    fn check(&self, p: CellAccess, kind: AccessKind, a: Access<'_>, address: u64) -> Result<(), Wrong> {
        let this = || a.stamp.describe(kind.noun());
        let race = |other: Mark, what: AccessKind| {
            Err(Wrong::Race { space: self.space, address, this: this(), other: other.describe(what), line: other.pc() })
        };
        let w = p.written;
        if !w.stamp.is_none() && !a.view.has_seen(w.stamp) {
            return race(w, AccessKind::Write);
        }
        if !w.stamp.is_none() && a.stamp.is_async() && !w.stamp.is_async() && !a.view.has_fenced(w.stamp) {
            return Err(Wrong::Proxy { space: self.space, address, this: this(), other: w.describe(AccessKind::Write) });
        }
        let clashes = |m: &&Mark| match kind {
            AccessKind::Write => true,
            AccessKind::Read => m.is_strong(),
            AccessKind::Strong => !m.is_strong(),
        };
        match self.sets[p.readers as usize].iter().filter(clashes).find(|m| !a.view.has_seen(m.stamp)) {
            Some(reader) => race(*reader, AccessKind::Read),
            None => Ok(()),
        }
    }

    /// The number of a set with one more reader. Readers that it has seen are dropped, since whoever comes after it
    /// comes after them. They stay if only one of the two is strong, as others may race with one alone.
    fn with_reader(&mut self, set: u32, mark: Mark, view: &View) -> u32 {
        if let Some(found) = self.joined.get(&(set, mark)) {
            return *found;
        }
        let over = |m: &Mark| m.is_strong() == mark.is_strong() && (view.has_seen(m.stamp) || m.stamp == mark.stamp);
        let mut new: Vec<Mark> = self.sets[set as usize].iter().copied().filter(|m| !over(m)).collect();
        new.push(mark);
        new.sort_unstable();
        let number = match self.numbers.get(&new) {
            Some(n) => *n,
            None => {
                let n = self.sets.len() as u32;
                self.sets.push(new.clone());
                self.numbers.insert(new, n);
                n
            }
        };
        self.joined.insert((set, mark), number);
        number
    }
}
