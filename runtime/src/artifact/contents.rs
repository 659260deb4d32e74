//! The files of an artifact, each read once: what is used afterwards are the bytes that were hashed.

use super::manifest::{self, FileEntry};
use super::{ArtifactError, io};
use crate::memory_file;
use memmap2::Mmap;
use rustix::fs::SealFlags;
use std::fs;
use std::io::{self as system, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// A file in memory of its own that nobody can change or name: what the loader gets instead of a path.
#[derive(Clone, Debug)]
pub struct SealedFile(Arc<OwnedFd>);

impl SealedFile {
    /// Reads a file of at most so many bytes into memory, and hashes what is there once nothing can change it any
    /// more.
    fn read(path: &Path, most: u64) -> system::Result<(SealedFile, FileEntry)> {
        let mut file = open(path, most)?;
        let mut memory = fs::File::from(memory_file::create("mcc-kernels", fs::metadata(path)?.len().min(most))?);
        let bytes = system::copy(&mut file, &mut memory)?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        let hash = match bytes {
            0 => manifest::hash(&[]),
            // SAFETY: the memory is sealed: nobody, this process included, can change its bytes or their number.
            _ => manifest::hash(&unsafe { Mmap::map(&memory) }?),
        };
        Ok((SealedFile(Arc::new(memory.into())), FileEntry { bytes, hash }))
    }

    /// The descriptor of the memory. Its number stays its own as long as a clone of this lives.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.0
    }
}

/// Opens a file of which no more than so many bytes, and one that is too many, will be read.
fn open(path: &Path, most: u64) -> system::Result<system::Take<fs::File>> {
    manifest::regular(path)?;
    Ok(fs::File::open(path)?.take(most.saturating_add(1)))
}

fn agree(path: &Path, wanted: &FileEntry, found: &FileEntry) -> Result<(), ArtifactError> {
    let damaged = |what: String| ArtifactError::Damaged { file: path.to_path_buf(), what };
    if found.bytes != wanted.bytes {
        // Reading stops one byte behind the wanted size, so the file system says the true one.
        let bytes = fs::metadata(path).map_or(found.bytes, |m| m.len());
        return Err(damaged(format!("it has {bytes} bytes, the manifest says {}", wanted.bytes)));
    }
    if found.hash != wanted.hash {
        return Err(damaged(format!("its hash is {}, the manifest says {}", manifest::brief(&found.hash), manifest::brief(&wanted.hash))));
    }
    Ok(())
}

/// The bytes of a file.
///
/// # Errors
/// If they are not what the manifest says.
pub fn bytes(path: &Path, wanted: &FileEntry) -> Result<Vec<u8>, ArtifactError> {
    let mut bytes = vec![];
    open(path, wanted.bytes).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(io(path))?;
    agree(path, wanted, &FileEntry::of(&bytes))?;
    Ok(bytes)
}

/// A file's bytes in memory that cannot change.
///
/// # Errors
/// If they are not what the manifest says.
pub fn sealed(path: &Path, wanted: &FileEntry) -> Result<SealedFile, ArtifactError> {
    let (sealed, found) = SealedFile::read(path, wanted.bytes).map_err(io(path))?;
    agree(path, wanted, &found)?;
    Ok(sealed)
}

/// Looks at a file of which nothing is kept.
///
/// # Errors
/// If it is not what the manifest says.
pub fn check(path: &Path, wanted: &FileEntry) -> Result<(), ArtifactError> {
    let mut hasher = blake3::Hasher::new();
    let bytes = open(path, wanted.bytes).and_then(|mut file| system::copy(&mut file, &mut hasher)).map_err(io(path))?;
    agree(path, wanted, &FileEntry { bytes, hash: hasher.finalize().to_hex().to_string() })
}
