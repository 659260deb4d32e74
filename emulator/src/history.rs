//! Who last touched what, and whether accesses that follow one another are ordered: of shared memory, and of what a
//! block touches of global memory.

use crate::fault::Wrong;
use crate::order::{Stamp, View};
use std::collections::HashMap;

/// Bytes of a granule, which mostly are touched together.
pub const GRANULE: usize = 16;

/// The bit of an instruction's number that says that it is atomic, or else strong (PTX ISA, section 8.4).
const STRONG: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Read,
    Write,
    /// An atomic operation, or a strong load or store: such do not race among each other.
    Strong,
}

impl Kind {
    fn noun(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Strong => "atomic access",
        }
    }
}

/// An access that has been: whose, and by which instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark {
    pub stamp: Stamp,
    pc: u32,
}

impl Mark {
    fn new(a: Access<'_>, kind: Kind) -> Mark {
        Mark { stamp: a.stamp, pc: if kind == Kind::Strong { a.pc | STRONG } else { a.pc } }
    }

    pub fn is_strong(self) -> bool {
        self.pc & STRONG != 0
    }

    pub fn pc(self) -> u32 {
        self.pc & !STRONG
    }

    pub fn describe(self, what: Kind) -> String {
        self.stamp.describe(if self.is_strong() { Kind::Strong.noun() } else { what.noun() })
    }
}

/// Who last wrote a place, and the number of the set of those who have read it since.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct CellAccess {
    pub written: Mark,
    pub readers: u32,
}

/// The places of 16 bytes.
#[derive(Clone, Copy)]
pub enum Granule {
    One(CellAccess),
    /// An index of `split`.
    Each(u32),
}

impl Default for Granule {
    fn default() -> Granule {
        Granule::One(CellAccess::default())
    }
}

/// Whose access it is, by which instruction, and what its agent knows.
#[derive(Clone, Copy)]
pub struct Access<'a> {
    pub stamp: Stamp,
    pub view: &'a View,
    pub pc: u32,
}

/// What granules of `CELLS` places each refer to. Accesses to one place by different warps count as to the same
/// bytes.
pub struct History<const CELLS: usize> {
    space: &'static str,
    split: Vec<[CellAccess; CELLS]>,
    free: Vec<u32>,
    /// Sets of readers by number; 0 is the empty one.
    sets: Vec<Vec<Mark>>,
    numbers: HashMap<Vec<Mark>, u32>,
    joined: HashMap<(u32, Mark), u32>,
    /// The last access that was found sound, and what it left.
    last: Option<(CellAccess, Mark, Kind, CellAccess)>,
}

impl<const CELLS: usize> History<CELLS> {
    const CELL: usize = GRANULE / CELLS;

    pub fn new(space: &'static str) -> Self {
        let numbers = HashMap::from([(vec![], 0)]);
        History { space, split: vec![], free: vec![], sets: vec![vec![]], numbers, joined: HashMap::new(), last: None }
    }

    /// The places of a granule.
    pub fn places(&self, granule: Granule) -> [CellAccess; CELLS] {
        match granule {
            Granule::One(p) => [p; CELLS],
            Granule::Each(k) => self.split[k as usize],
        }
    }

    pub fn readers(&self, place: CellAccess) -> &[Mark] {
        &self.sets[place.readers as usize]
    }

    /// Notes an access to bytes `from..to` of a granule that lies at `base`, and that it comes after all that it
    /// must.
    #[inline]
    pub fn note(&mut self, granule: &mut Granule, [from, to]: [usize; 2], base: u64, kind: Kind, a: Access<'_>) -> Result<(), Wrong> {
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

    /// What a place is after an access to it.
    #[inline]
    fn after(&mut self, p: CellAccess, kind: Kind, a: Access<'_>, address: u64) -> Result<CellAccess, Wrong> {
        let mark = Mark::new(a, kind);
        if let Some((place, same, of, new)) = self.last
            && (place, same, of) == (p, mark, kind)
        {
            return Ok(new);
        }
        self.check(p, kind, a, address)?;
        let new = match kind {
            Kind::Write => CellAccess { written: mark, readers: 0 },
            Kind::Read | Kind::Strong => CellAccess { written: p.written, readers: self.with_reader(p.readers, mark, a.view) },
        };
        self.last = Some((p, mark, kind, new));
        Ok(new)
    }

    fn check(&self, p: CellAccess, kind: Kind, a: Access<'_>, address: u64) -> Result<(), Wrong> {
        let this = || a.stamp.describe(kind.noun());
        let race =
            |other: Mark, what: Kind| Err(Wrong::Race { space: self.space, address, this: this(), other: other.describe(what), line: other.pc() });
        let w = p.written;
        if !w.stamp.is_none() && !a.view.has_seen(w.stamp) {
            return race(w, Kind::Write);
        }
        if !w.stamp.is_none() && a.stamp.is_async() && !w.stamp.is_async() && !a.view.has_fenced(w.stamp) {
            return Err(Wrong::Proxy { space: self.space, address, this: this(), other: w.describe(Kind::Write) });
        }
        let clashes = |m: &&Mark| match kind {
            Kind::Write => true,
            Kind::Read => m.is_strong(),
            Kind::Strong => !m.is_strong(),
        };
        match self.sets[p.readers as usize].iter().filter(clashes).find(|m| !a.view.has_seen(m.stamp)) {
            Some(reader) => race(*reader, Kind::Read),
            None => Ok(()),
        }
    }

    /// The number of a set with one more reader. Readers that it has seen need not be kept: who comes after it comes
    /// after them. But they do if they were strong and it is not, or the other way round, as others may clash with
    /// one alone.
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
