//! Shared memory of a block, or of all blocks of a cluster, with who last touched what.

use crate::decode::{LOCAL, SHARED};
use crate::fault::Wrong;
use crate::history::{Access, AccessKind, GRANULE, Granule, History};

/// Bits of an offset in a block's shared memory. Above them, a *place* has the rank of its block, and an address that
/// `mapa` gives has the rank and one: so one without is of the block that uses it.
const OFFSET: u32 = 24;

/// The place of an offset in the shared memory of the block of this rank.
pub fn of_rank(rank: u64, offset: u64) -> u64 {
    rank << OFFSET | offset
}

/// The rank of a place.
pub fn rank_of(place: u64) -> u64 {
    place >> OFFSET
}

/// The place at an address in shared memory, which a block of this rank uses.
pub fn place(own: u64, address: u64) -> u64 {
    if address >> OFFSET == 0 { of_rank(own, address) } else { address - (1 << OFFSET) }
}

/// The same offset in the shared memory of the block of another rank.
pub fn at_rank(rank: u64, place: u64) -> u64 {
    of_rank(rank, place & ((1 << OFFSET) - 1))
}

/// The address that an offset has in the shared memory of the block of this rank.
pub fn mapped(rank: u64, address: u64) -> u64 {
    of_rank(rank + 1, address & ((1 << OFFSET) - 1))
}

/// The offset in shared memory of a generic or shared address.
pub fn in_shared(address: u64) -> u64 {
    if (SHARED..LOCAL).contains(&address) { address - SHARED } else { address }
}

/// Positions of a granule: pairs of bytes. Accesses of different warps to the two bytes of a pair count as accesses
/// to one position.
const CELLS: usize = 8;

/// Filled with `0xFF` at first, NaN in every float type.
pub struct Shared {
    /// Bytes of each block.
    each: usize,
    /// Those of all ranks, each from a multiple of [`GRANULE`] on.
    bytes: Vec<u8>,
    granules: Vec<Granule>,
    /// The last accesses; `None` if races are not checked.
    history: Option<History<CELLS>>,
}

impl Shared {
    pub fn new(ranks: usize, each: usize, watch: bool) -> Shared {
        let bytes = ranks * each.next_multiple_of(GRANULE);
        let granules = vec![Granule::default(); if watch { bytes / GRANULE } else { 0 }];
        Shared { each, bytes: vec![0xFF; bytes], granules, history: watch.then(|| History::new("shared")) }
    }

    fn range(&self, place: u64, bytes: usize) -> Result<usize, Wrong> {
        let (rank, address) = (rank_of(place), place & ((1 << OFFSET) - 1));
        let first = (rank as usize).saturating_mul(self.each.next_multiple_of(GRANULE));
        if first < self.bytes.len().max(1) && address + bytes as u64 <= self.each as u64 {
            return Ok(first + address as usize);
        }
        Err(Wrong::OutOfBounds { space: "shared", address: place, bytes: bytes as u64, what: format!("the block's {} bytes", self.each) })
    }

    /// Notes a read, and that it comes after the last write.
    pub fn note_read(&mut self, address: u64, bytes: usize, a: Access<'_>) -> Result<(), Wrong> {
        self.note(address, bytes, AccessKind::Read, a)
    }

    /// Notes a write, and that it comes after the last write and all reads since.
    pub fn note_write(&mut self, address: u64, bytes: usize, a: Access<'_>) -> Result<(), Wrong> {
        self.note(address, bytes, AccessKind::Write, a)
    }

    /// Notes an atomic operation, which is ordered with others, but not with plain accesses.
    pub fn note_atomic(&mut self, address: u64, bytes: usize, a: Access<'_>) -> Result<(), Wrong> {
        self.note(address, bytes, AccessKind::Strong, a)
    }

    fn note(&mut self, address: u64, bytes: usize, kind: AccessKind, a: Access<'_>) -> Result<(), Wrong> {
        let at = self.range(address, bytes)?;
        let Some(history) = self.history.as_mut().filter(|_| bytes > 0) else { return Ok(()) };
        for g in at / GRANULE..(at + bytes).div_ceil(GRANULE) {
            let base = g * GRANULE;
            let range = [at.max(base) - base, (at + bytes).min(base + GRANULE) - base];
            history.note(&mut self.granules[g], range, base as u64, kind, a)?;
        }
        Ok(())
    }

    /// Bytes, without noting an access.
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
    pub fn load(&mut self, address: u64, bytes: u32, strong: bool, a: Access<'_>) -> Result<u64, Wrong> {
        aligned(address, u64::from(bytes))?;
        self.note(address, bytes as usize, if strong { AccessKind::Strong } else { AccessKind::Read }, a)?;
        let mut out = [0; 8];
        out[..bytes as usize].copy_from_slice(self.peek(address, bytes as usize)?);
        Ok(u64::from_le_bytes(out))
    }

    pub fn store(&mut self, address: u64, bytes: u32, value: u64, strong: bool, a: Access<'_>) -> Result<(), Wrong> {
        aligned(address, u64::from(bytes))?;
        self.note(address, bytes as usize, if strong { AccessKind::Strong } else { AccessKind::Write }, a)?;
        self.poke(address, &value.to_le_bytes()[..bytes as usize])
    }
}

/// Checks that an address of shared memory is a multiple of `bytes`.
pub fn aligned(address: u64, bytes: u64) -> Result<(), Wrong> {
    if address.is_multiple_of(bytes) { Ok(()) } else { Err(Wrong::Misaligned { space: "shared", address, bytes }) }
}
