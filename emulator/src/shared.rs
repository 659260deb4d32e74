//! Shared memory of a block, with who last touched what.

use crate::decode::{LOCAL, SHARED};
use crate::fault::Wrong;
use crate::history::{Access, AccessKind, GRANULE, Granule, History};

/// The offset in shared memory of a generic or shared address.
pub fn in_shared(address: u64) -> u64 {
    if (SHARED..LOCAL).contains(&address) { address - SHARED } else { address }
}

/// Positions of a granule: pairs of bytes. Accesses of different warps to the two bytes of a pair count as accesses
/// to one position.
const CELLS: usize = 8;

/// Filled with `0xFF` at first, NaN in every float type.
pub struct Shared {
    bytes: Vec<u8>,
    granules: Vec<Granule>,
    /// The last accesses; `None` if races are not checked.
    history: Option<History<CELLS>>,
}

impl Shared {
    pub fn new(bytes: usize, watch: bool) -> Shared {
        let granules = vec![Granule::default(); if watch { bytes.div_ceil(GRANULE) } else { 0 }];
        Shared { bytes: vec![0xFF; bytes], granules, history: watch.then(|| History::new("shared")) }
    }

    fn range(&self, address: u64, bytes: usize) -> Result<usize, Wrong> {
        let end = address.checked_add(bytes as u64).filter(|e| *e <= self.bytes.len() as u64);
        let outside =
            || Wrong::OutOfBounds { space: "shared", address, bytes: bytes as u64, what: format!("the block's {} bytes", self.bytes.len()) };
        end.map(|_| address as usize).ok_or_else(outside)
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
