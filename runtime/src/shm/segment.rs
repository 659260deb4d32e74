//! Memory that the processes of a run share: one anonymous file, inherited, never named, gone with its last process.

use crate::memory_file;
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A mapping of the file. Every access names an offset from its start, which is bounds-checked.
pub struct Segment {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain shared memory; all access is by atomics, or by copies whose exclusion the callers' protocol ensures.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// How the name begins that the system shows for such a file (`/proc/PID/fd/N`).
    pub const NAME: &[u8] = b"/memfd:mcc ";

    /// A new file of zeros, and its mapping.
    ///
    /// # Errors
    /// If the system has no such file or memory for it.
    pub fn create(bytes: u64) -> io::Result<(OwnedFd, Segment)> {
        let file = memory_file::create("mcc", bytes)?;
        rustix::fs::ftruncate(&file, bytes)?;
        // Sealed so, no process can shrink the file under another one.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let segment = Segment::map(&file)?;
        Ok((file, segment))
    }

    /// Maps an inherited file.
    ///
    /// # Errors
    /// If it is not such a file.
    pub fn map(file: impl AsFd) -> io::Result<Segment> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let bytes = rustix::fs::fstat(&file)?.st_size as usize;
        if !seals.contains(SealFlags::SHRINK) || bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the memory of a run"));
        }
        // SAFETY: a new mapping at an address of the system's choice; the file cannot shrink.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Segment { start, bytes })
    }

    /// Bytes of the mapping.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn at(&self, offset: u64, bytes: usize) -> *mut u8 {
        let inside = usize::try_from(offset).ok().and_then(|o| o.checked_add(bytes)).is_some_and(|end| end <= self.bytes);
        assert!(inside, "invariant: {bytes} bytes at {offset} of a segment of {}", self.bytes);
        // SAFETY: inside the mapping.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }

    /// The byte at an offset.
    pub fn u8(&self, offset: u64) -> &AtomicU8 {
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1)) }
    }

    /// The four bytes at an offset, which is a multiple of 4.
    pub fn u32(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "invariant: aligned");
        // SAFETY: inside the mapping, aligned, as the mapping begins at a page.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// The eight bytes at an offset, which is a multiple of 8.
    pub fn u64(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "invariant: aligned");
        // SAFETY: as for `u32`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// A range that no other thread or process writes now: the caller's protocol says so.
    pub fn slice(&self, offset: u64, bytes: usize) -> &[u8] {
        // SAFETY: inside the mapping; no writer, by the caller's protocol (a counter was seen with `Acquire`).
        unsafe { std::slice::from_raw_parts(self.at(offset, bytes), bytes) }
    }

    /// A range that no other thread or process reads or writes now: the caller's protocol says so.
    #[allow(clippy::mut_from_ref)]
    pub fn slice_mut(&self, offset: u64, bytes: usize) -> &mut [u8] {
        // SAFETY: inside the mapping; nobody else uses the range until a counter is stored with `Release`.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, bytes), bytes) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned; no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A counter that others wait for: 8 bytes, its value and the number of sleepers.
#[derive(Clone, Copy)]
pub struct Counter<'a> {
    value: &'a AtomicU32,
    sleepers: &'a AtomicU32,
}

impl<'a> Counter<'a> {
    pub fn at(segment: &'a Segment, offset: u64) -> Counter<'a> {
        Counter { value: segment.u32(offset), sleepers: segment.u32(offset + 4) }
    }

    pub fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Sets the value; what was written before is visible to whoever sees it.
    pub fn set(&self, value: u32) {
        self.value.store(value, Ordering::Release);
    }

    /// Changes the value and wakes whoever sleeps on it.
    pub fn ring(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(self.value, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Sleeps until the value is no longer `seen`, or so long, which is less than a second.
    pub fn sleep(&self, seen: u32, most: Duration) {
        let most = futex::Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wait(self.value, futex::Flags::empty(), seen, Some(&most));
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
