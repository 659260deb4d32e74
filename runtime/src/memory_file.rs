//! Files in memory, which have no name in any directory.

use rustix::fs::MemfdFlags;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::os::fd::OwnedFd;

/// Files in memory count as files.
#[derive(Debug, thiserror::Error)]
#[error("it takes {bytes} bytes of memory that count as a file, and files may have {most} here: `ulimit -f unlimited` lifts that limit")]
struct Limited {
    bytes: u64,
    most: u64,
}

/// A new and empty one, for so many bytes, that can be sealed.
///
/// # Errors
/// If the system has none, or its limit on the size of files (RLIMIT_FSIZE) is below that.
pub fn create(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    // The limit is checked first, as the system sends a signal to whoever exceeds it.
    if let Some(most) = getrlimit(Resource::Fsize).current.filter(|most| bytes > *most) {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, Limited { bytes, most }));
    }
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
}
