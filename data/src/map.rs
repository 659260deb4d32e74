//! Files as memory, and numbers in them.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;

/// The bytes of a file. They stay on disk until they are read.
pub struct Map(Option<memmap2::Mmap>);

impl Map {
    /// # Errors
    /// What the file system says; a path that is no regular file.
    pub fn open(path: &Path) -> io::Result<Map> {
        let file = File::open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        if about.len() == 0 {
            return Ok(Map(None));
        }
        // SAFETY: the file is opened for reading alone and the map is private to this type, which gives out shared
        // bytes. Data sets are written under another name and then renamed, so that nobody changes one in place.
        Ok(Map(Some(unsafe { memmap2::Mmap::map(&file)? })))
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// Number `n` of a row of little-endian numbers, if it has so many.
pub fn number<const BYTES: usize>(row: &[u8], n: u64) -> Option<[u8; BYTES]> {
    let at = usize::try_from(n).ok()?.checked_mul(BYTES)?;
    row.get(at..at.checked_add(BYTES)?)?.try_into().ok()
}

/// A row of 32-bit numbers, in memory or in a file.
pub enum Numbers {
    Memory(Vec<u32>),
    File(std::sync::Arc<Map>, Range<usize>),
}

impl Numbers {
    pub fn len(&self) -> u64 {
        match self {
            Numbers::Memory(numbers) => numbers.len() as u64,
            Numbers::File(_, bytes) => (bytes.len() / 4) as u64,
        }
    }

    pub fn get(&self, n: u64) -> Option<u32> {
        match self {
            Numbers::Memory(numbers) => numbers.get(usize::try_from(n).ok()?).copied(),
            Numbers::File(map, bytes) => number(map.get(bytes.clone())?, n).map(u32::from_le_bytes),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len()).map_while(|n| self.get(n))
    }
}
