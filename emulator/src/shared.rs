//! Shared memory of a block, with who last touched what.

use crate::decode::{LOCAL, SHARED};
use crate::fault::Wrong;
use crate::order::{Stamp, View};
use std::collections::HashMap;

/// An address of shared memory, also if it is generic.
pub fn in_shared(address: u64) -> u64 {
    if (SHARED..LOCAL).contains(&address) { address - SHARED } else { address }
}

/// Bytes that are watched together: accesses to both bytes of a pair by different warps count as one place.
const CELL: usize = 2;
/// Cells of a granule: 16 bytes that mostly are touched together.
const CELLS: usize = 8;
const GRANULE: usize = CELL * CELLS;

/// Who last wrote a place, and the number of the set of those who have read it since.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Place {
    written: Stamp,
    readers: u32,
}

/// The places of 16 bytes.
#[derive(Clone, Copy)]
enum Granule {
    One(Place),
    /// An index of `split`.
    Each(u32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

/// Filled with `0xFF` at first, NaN in every float type.
pub struct Shared {
    bytes: Vec<u8>,
    watch: bool,
    granules: Vec<Granule>,
    split: Vec<[Place; CELLS]>,
    free: Vec<u32>,
    /// Sets of readers by number; 0 is the empty one.
    sets: Vec<Vec<Stamp>>,
    numbers: HashMap<Vec<Stamp>, u32>,
    joined: HashMap<(u32, Stamp), u32>,
    /// The last access that was found sound, and what it left.
    last: Option<(Place, Stamp, Kind, Place)>,
}

/// Whose access it is, and what its agent knows.
#[derive(Clone, Copy)]
pub struct Access<'a> {
    pub stamp: Stamp,
    pub view: &'a View,
}

impl Shared {
    pub fn new(bytes: usize, watch: bool) -> Shared {
        Shared {
            bytes: vec![0xFF; bytes],
            watch,
            granules: vec![Granule::One(Place::default()); if watch { bytes.div_ceil(GRANULE) } else { 0 }],
            split: vec![],
            free: vec![],
            sets: vec![vec![]],
            numbers: HashMap::from([(vec![], 0)]),
            joined: HashMap::new(),
            last: None,
        }
    }

    fn range(&self, address: u64, bytes: usize) -> Result<usize, Wrong> {
        let end = address.checked_add(bytes as u64).filter(|e| *e <= self.bytes.len() as u64);
        let outside =
            || Wrong::OutOfBounds { space: "shared", address, bytes: bytes as u64, what: format!("the block's {} bytes", self.bytes.len()) };
        end.map(|_| address as usize).ok_or_else(outside)
    }

    /// Notes a read, and that it comes after the last write.
    pub fn note_read(&mut self, address: u64, bytes: usize, a: Access<'_>) -> Result<(), Wrong> {
        self.note(address, bytes, Kind::Read, a)
    }

    /// Notes a write, and that it comes after the last write and all reads since.
    pub fn note_write(&mut self, address: u64, bytes: usize, a: Access<'_>) -> Result<(), Wrong> {
        self.note(address, bytes, Kind::Write, a)
    }

    fn note(&mut self, address: u64, bytes: usize, kind: Kind, a: Access<'_>) -> Result<(), Wrong> {
        let at = self.range(address, bytes)?;
        if !self.watch || bytes == 0 {
            return Ok(());
        }
        let end = (at + bytes).div_ceil(CELL);
        for g in at / GRANULE..(at + bytes).div_ceil(GRANULE) {
            let from = (at / CELL).max(g * CELLS) - g * CELLS;
            let to = end.min((g + 1) * CELLS) - g * CELLS;
            let whole = to - from == CELLS;
            let base = g * GRANULE;
            let split = match self.granules[g] {
                Granule::One(p) if whole => {
                    self.granules[g] = Granule::One(self.after(p, kind, a, base)?);
                    continue;
                }
                Granule::One(p) => {
                    let k = self.free.pop().unwrap_or_else(|| {
                        self.split.push([Place::default(); CELLS]);
                        self.split.len() as u32 - 1
                    });
                    self.split[k as usize] = [p; CELLS];
                    self.granules[g] = Granule::Each(k);
                    k
                }
                Granule::Each(k) => k,
            };
            for cell in from..to {
                let p = self.split[split as usize][cell];
                self.split[split as usize][cell] = self.after(p, kind, a, base + cell * CELL)?;
            }
            let places = &self.split[split as usize];
            if whole && places.iter().all(|p| *p == places[0]) {
                self.granules[g] = Granule::One(places[0]);
                self.free.push(split);
            }
        }
        Ok(())
    }

    /// What a place is after an access to it.
    #[inline]
    fn after(&mut self, p: Place, kind: Kind, a: Access<'_>, address: usize) -> Result<Place, Wrong> {
        if let Some((place, stamp, of, new)) = self.last
            && (place, stamp, of) == (p, a.stamp, kind)
        {
            return Ok(new);
        }
        self.check(p, kind, a, address as u64)?;
        let new = match kind {
            Kind::Write => Place { written: a.stamp, readers: 0 },
            Kind::Read => Place { written: p.written, readers: self.with_reader(p.readers, a) },
        };
        self.last = Some((p, a.stamp, kind, new));
        Ok(new)
    }

    fn check(&self, p: Place, kind: Kind, a: Access<'_>, address: u64) -> Result<(), Wrong> {
        let this = || a.stamp.describe(if kind == Kind::Read { "read" } else { "write" });
        let w = p.written;
        if !w.is_none() && !a.view.has_seen(w) {
            return Err(Wrong::Race { address, this: this(), other: w.describe("write") });
        }
        if !w.is_none() && a.stamp.is_async() && !w.is_async() && !a.view.has_fenced(w) {
            return Err(Wrong::Proxy { address, this: this(), other: w.describe("write") });
        }
        match self.sets[p.readers as usize].iter().find(|s| !a.view.has_seen(**s)) {
            Some(reader) if kind == Kind::Write => Err(Wrong::Race { address, this: this(), other: reader.describe("read") }),
            Some(_) | None => Ok(()),
        }
    }

    /// The number of a set with one more reader. Readers that it has seen need not be kept: who comes after it comes after them.
    fn with_reader(&mut self, set: u32, a: Access<'_>) -> u32 {
        if let Some(found) = self.joined.get(&(set, a.stamp)) {
            return *found;
        }
        let mut new: Vec<Stamp> = self.sets[set as usize].iter().copied().filter(|s| !a.view.has_seen(*s) && *s != a.stamp).collect();
        new.push(a.stamp);
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
        self.joined.insert((set, a.stamp), number);
        number
    }

    /// Bytes without any note.
    pub fn peek(&self, address: u64, bytes: usize) -> Result<&[u8], Wrong> {
        let at = self.range(address, bytes)?;
        Ok(&self.bytes[at..at + bytes])
    }

    pub fn poke(&mut self, address: u64, data: &[u8]) -> Result<(), Wrong> {
        let at = self.range(address, data.len())?;
        self.bytes[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// A little-endian number of up to 8 bytes.
    pub fn load(&mut self, address: u64, bytes: u32, a: Access<'_>) -> Result<u64, Wrong> {
        aligned(address, u64::from(bytes))?;
        self.note_read(address, bytes as usize, a)?;
        let mut out = [0; 8];
        out[..bytes as usize].copy_from_slice(self.peek(address, bytes as usize)?);
        Ok(u64::from_le_bytes(out))
    }

    pub fn store(&mut self, address: u64, bytes: u32, value: u64, a: Access<'_>) -> Result<(), Wrong> {
        aligned(address, u64::from(bytes))?;
        self.note_write(address, bytes as usize, a)?;
        self.poke(address, &value.to_le_bytes()[..bytes as usize])
    }
}

/// That an address of shared memory is a multiple of `bytes`.
pub fn aligned(address: u64, bytes: u64) -> Result<(), Wrong> {
    if address.is_multiple_of(bytes) { Ok(()) } else { Err(Wrong::Misaligned { space: "shared", address, bytes }) }
}
