//! Global memory: allocations far apart, so that what lies between them belongs to nobody.

use crate::decode::GLOBAL;
use crate::fault::Wrong;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Bytes between allocations; also their alignment.
const GAP: u64 = 512;

/// Addresses are never used twice, so an access to freed memory is out of bounds.
#[derive(Default)]
pub struct Memory {
    /// The allocations, by address.
    blocks: Vec<Allocation>,
    next: u64,
}

struct Allocation {
    start: u64,
    bytes: u64,
    data: Data,
}

/// The data of an allocation on this machine.
enum Data {
    Own(Box<[AtomicU64]>),
    /// Memory that was lent, with the promises of [`Memory::lend`].
    Lent(*const u8),
}

// SAFETY: threads access it by atomics alone, lent memory too.
unsafe impl Send for Data {}
// SAFETY: as for `Send`.
unsafe impl Sync for Data {}

impl Memory {
    /// New memory, filled with `0xFF` (NaN in every float type).
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let data = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(u64::MAX)).collect();
        self.place(bytes, Data::Own(data))
    }

    fn place(&mut self, bytes: u64, data: Data) -> u64 {
        let start = self.next.max(GLOBAL);
        self.next = (start + bytes).next_multiple_of(GAP) + GAP;
        self.blocks.push(Allocation { start, bytes, data });
        start
    }

    /// Uses memory of this machine as an allocation.
    ///
    /// # Safety
    /// It is there, aligned to 8 bytes, and nobody else writes it, as long as this is. What is not to be written need
    /// not be writable.
    pub unsafe fn lend(&mut self, memory: *const u8, bytes: u64) -> u64 {
        self.place(bytes, Data::Lent(memory))
    }

    /// Frees an allocation. Returns whether there was one.
    pub fn free(&mut self, start: u64) -> bool {
        let before = self.blocks.len();
        self.blocks.retain(|b| b.start != start);
        self.blocks.len() < before
    }

    fn find(&self, address: u64, bytes: u64) -> Result<*const u8, Wrong> {
        let k = self.blocks.partition_point(|b| b.start <= address);
        match k.checked_sub(1).map(|k| &self.blocks[k]) {
            Some(b) if address - b.start <= b.bytes && bytes <= b.bytes - (address - b.start) => {
                let base = match &b.data {
                    Data::Own(data) => data.as_ptr().cast::<u8>(),
                    Data::Lent(memory) => *memory,
                };
                // SAFETY: the offset lies within the allocation, by the guard.
                Ok(unsafe { base.add((address - b.start) as usize) })
            }
            near => {
                let what = match near {
                    Some(b) => format!("all allocations; the nearest below has {} bytes from {:#x}", b.bytes, b.start),
                    None => "all allocations".to_string(),
                };
                Err(Wrong::OutOfBounds { space: "global", address, bytes, what })
            }
        }
    }

    fn aligned(&self, address: u64, bytes: u64) -> Result<*const u8, Wrong> {
        if !address.is_multiple_of(bytes) {
            return Err(Wrong::Misaligned { space: "global", address, bytes });
        }
        self.find(address, bytes)
    }

    /// A little-endian number of 1, 2, 4 or 8 bytes.
    pub fn load(&self, address: u64, bytes: u32) -> Result<u64, Wrong> {
        let p = self.aligned(address, u64::from(bytes))?;
        // SAFETY: aligned and within an allocation of atomics, which other threads access by atomics alone.
        Ok(unsafe {
            match bytes {
                1 => u64::from((*p.cast::<AtomicU8>()).load(Relaxed)),
                2 => u64::from((*p.cast::<AtomicU16>()).load(Relaxed)),
                4 => u64::from((*p.cast::<AtomicU32>()).load(Relaxed)),
                _ => (*p.cast::<AtomicU64>()).load(Relaxed),
            }
        })
    }

    pub fn store(&self, address: u64, bytes: u32, value: u64) -> Result<(), Wrong> {
        let p = self.aligned(address, u64::from(bytes))?;
        // SAFETY: as in `load`.
        unsafe {
            match bytes {
                1 => (*p.cast::<AtomicU8>()).store(value as u8, Relaxed),
                2 => (*p.cast::<AtomicU16>()).store(value as u16, Relaxed),
                4 => (*p.cast::<AtomicU32>()).store(value as u32, Relaxed),
                _ => (*p.cast::<AtomicU64>()).store(value, Relaxed),
            }
        }
        Ok(())
    }

    /// Replaces a number of 4 or 8 bytes by a function of it, in one step. Returns the old number.
    pub fn update(&self, address: u64, bytes: u32, f: impl Fn(u64) -> u64) -> Result<u64, Wrong> {
        let p = self.aligned(address, u64::from(bytes))?;
        // SAFETY: as in `load`.
        Ok(unsafe {
            if bytes == 4 {
                let a = &*p.cast::<AtomicU32>();
                u64::from(a.fetch_update(Relaxed, Relaxed, |v| Some(f(u64::from(v)) as u32)).unwrap_or_else(|v| v))
            } else {
                (*p.cast::<AtomicU64>()).fetch_update(Relaxed, Relaxed, |v| Some(f(v))).unwrap_or_else(|v| v)
            }
        })
    }

    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Wrong> {
        let p = self.find(address, out.len() as u64)?.cast::<AtomicU8>();
        for (k, o) in out.iter_mut().enumerate() {
            // SAFETY: within the allocation that `find` checked.
            *o = unsafe { (*p.add(k)).load(Relaxed) };
        }
        Ok(())
    }

    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), Wrong> {
        let p = self.find(address, data.len() as u64)?.cast::<AtomicU8>();
        for (k, d) in data.iter().enumerate() {
            // SAFETY: within the allocation that `find` checked.
            unsafe { (*p.add(k)).store(*d, Relaxed) };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_allocated_can_be_reached() {
        let mut m = Memory::default();
        let (a, b) = (m.allocate(12), m.allocate(4));
        m.write(a, &[1; 12]).expect("it fits");
        assert_eq!(m.load(a + 8, 4), Ok(0x0101_0101));
        assert_eq!(m.load(b, 4), Ok(u64::from(u32::MAX)));
        assert!(matches!(m.load(a + 8, 8), Err(Wrong::OutOfBounds { .. })));
        assert!(matches!(m.load(a + 2, 4), Err(Wrong::Misaligned { .. })));
        assert!(matches!(m.store(a - 4, 4, 0), Err(Wrong::OutOfBounds { .. })));
        assert!(m.free(a));
        assert!(matches!(m.load(a, 4), Err(Wrong::OutOfBounds { .. })));
    }
}
