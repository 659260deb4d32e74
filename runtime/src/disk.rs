//! A file of a rank for what rests on a disk. Copies go through io_uring (Linux 5.11) in pieces, several at a time,
//! past the page cache where the file system can do that; who asks for one looks again later, and waits for nothing.
//!
//! The file has no name: it is gone with the rank, however that ends.

use io_uring::{IoUring, opcode, types};
use ir::program::BLOCK;
use memmap2::MmapMut;
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, open};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of a piece.
const PIECE: usize = 1 << 20;

/// Bounces that are under way at a time each way: enough to keep an NVMe drive busy.
const DEPTH: usize = 8;

/// Memory that a rank has for pieces.
pub const PIECES_BYTES: u64 = (2 * DEPTH * PIECE) as u64;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the disk to memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// Memory for a piece, aligned to a page; and where in its copy it belongs, while it is under way: the first byte,
/// and how many.
struct Bounce {
    memory: MmapMut,
    at: Option<(usize, usize)>,
}

/// The copies of one way, one after the other.
struct Flow {
    ring: IoUring,
    pieces: Vec<Bounce>,
    /// The copy that is under way: from where on the disk, and how many bytes.
    of: Option<(u64, usize)>,
    /// Bytes of it that have been begun, and that are through.
    begun: usize,
    through: usize,
}

/// What rests on a disk.
pub struct Disk {
    // The flows are dropped before the files, as they end what is under way.
    flows: [Mutex<Flow>; 2],
    /// The file past the page cache (direct I/O), where that can be.
    direct: File,
    /// Through it: for parts of blocks, and for what the system gave up.
    plain: File,
    /// What failed first where nobody could be told.
    failed: Mutex<Option<String>>,
}

impl Disk {
    /// So many bytes in this directory, all zero.
    ///
    /// # Errors
    /// If there is no room for them, files cannot be made there, or the system does not let this process use
    /// io_uring.
    pub fn new(dir: &Path, bytes: u64) -> io::Result<Disk> {
        let plain = tempfile::tempfile_in(dir)?;
        let bytes = bytes.next_multiple_of(BLOCK);
        match fallocate(&plain, FallocateFlags::empty(), 0, bytes) {
            // Without a reservation, room is found only when it is written.
            Err(Errno::OPNOTSUPP) => plain.set_len(bytes)?,
            done => done.map_err(|e| said(&format!("{bytes} bytes could not be reserved"), &e.into()))?,
        }
        let direct = past_cache(&plain)?.map_or_else(|| plain.try_clone(), Ok)?;
        let flow = || Flow::new().map(Mutex::new);
        Ok(Disk { flows: [flow()?, flow()?], direct, plain, failed: Mutex::new(None) })
    }

    /// Goes on with a copy between the disk, from this byte on, and memory, and says how many bytes are through.
    /// Until all are, the next call of the same way is for the same copy. After an error nothing of it is under way.
    ///
    /// # Errors
    /// What the system says, or that another copy of this way is under way.
    pub fn advance(&self, direction: CopyDirection, at: u64, memory: &mut [u8]) -> io::Result<usize> {
        let mut flow = self.flow(direction);
        let outcome = match flow.of {
            Some(of) if of != (at, memory.len()) => return Err(io::Error::other("another copy is under way")),
            Some(_) | None => flow.advance([&self.direct, &self.plain], direction, at, memory),
        };
        if outcome.as_ref().map_or(true, |through| *through == memory.len()) {
            flow.end();
        }
        outcome
    }

    fn flow(&self, direction: CopyDirection) -> MutexGuard<'_, Flow> {
        self.flows[direction as usize].lock().expect("invariant: no holder panics")
    }

    /// Waits until some piece is through, but not for longer than this, if one is under way; says whether it is.
    pub fn rest(&self, most: Duration) -> bool {
        let busy = [CopyDirection::Read, CopyDirection::Write].map(|direction| self.flow(direction)).into_iter().find(|flow| flow.is_busy());
        let Some(flow) = busy else { return false };
        let time = types::Timespec::from(most);
        // The outcome does not matter, as the caller looks again in any case.
        let _ = flow.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time));
        true
    }

    /// A whole copy, for which the caller waits; none after something has failed.
    pub fn copy(&self, direction: CopyDirection, at: u64, memory: &mut [u8]) {
        while self.failed().is_none() {
            match self.advance(direction, at, memory) {
                Ok(through) if through == memory.len() => return,
                Ok(_) => drop(self.rest(Duration::from_millis(100))),
                Err(e) => return self.note(&e),
            }
        }
    }

    /// Bytes of any place, while no copy changes them.
    pub fn load(&self, at: u64, out: &mut [u8]) {
        if let Err(e) = self.plain.read_exact_at(out, at) {
            out.fill(0);
            self.note(&e);
        }
    }

    /// Puts bytes at any place, while no copy uses them.
    pub fn store(&self, at: u64, bytes: &[u8]) {
        if let Err(e) = self.plain.write_all_at(bytes, at) {
            self.note(&e);
        }
    }

    /// Repeats an element, while no copy uses what is there.
    pub fn fill(&self, at: u64, element: &[u8], count: u64) {
        let bytes = element.len() as u64 * count;
        if bytes == 0 {
            return;
        }
        // Zeros are quick: a file system need only take note of them.
        let is_zero = element.iter().all(|b| *b == 0);
        if is_zero && fallocate(&self.plain, FallocateFlags::ZERO_RANGE, at, bytes).is_ok() {
            return;
        }
        let piece = element.repeat(PIECE / element.len());
        let mut done = 0;
        while done < bytes {
            let now = (bytes - done).min(piece.len() as u64);
            self.store(at + done, &piece[..now as usize]);
            done += now;
        }
    }

    fn note(&self, e: &io::Error) {
        self.failed.lock().expect("invariant: no holder panics").get_or_insert_with(|| e.to_string());
    }

    /// What failed first where nobody could be told, from then on.
    pub fn failed(&self) -> Option<String> {
        self.failed.lock().expect("invariant: no holder panics").clone()
    }
}

impl Flow {
    fn new() -> io::Result<Flow> {
        let ring = IoUring::new(DEPTH as u32).map_err(|e| {
            let may_not = matches!(Errno::from_io_error(&e), Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS));
            said(if may_not { "this process may not use io_uring, which many containers forbid" } else { "io_uring" }, &e)
        })?;
        // Waiting for a piece with a timeout needs this feature.
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::new(ErrorKind::Unsupported, "io_uring of this Linux is older than 5.11"));
        }
        let piece = |_| MmapMut::map_anon(PIECE).map(|memory| Bounce { memory, at: None });
        Ok(Flow { ring, pieces: (0..DEPTH).map(piece).collect::<io::Result<_>>()?, of: None, begun: 0, through: 0 })
    }

    fn is_busy(&self) -> bool {
        self.pieces.iter().any(|p| p.at.is_some())
    }

    /// Does what [`Disk::advance`] says.
    fn advance(&mut self, [direct, plain]: [&File; 2], direction: CopyDirection, at: u64, memory: &mut [u8]) -> io::Result<usize> {
        self.of = Some((at, memory.len()));
        let file = types::Fd(direct.as_raw_fd());
        for (k, piece) in self.pieces.iter_mut().enumerate().filter(|(_, p)| p.at.is_none()) {
            let (first, bytes) = (self.begun, PIECE.min(memory.len() - self.begun));
            if bytes == 0 {
                break;
            }
            // The piece is rounded up to whole blocks; the rest of the last block belongs to nobody else.
            let (blocks, at) = (whole(bytes) as u32, at + first as u64);
            let entry = match direction {
                CopyDirection::Read => opcode::Read::new(file, piece.memory.as_mut_ptr(), blocks).offset(at).build(),
                CopyDirection::Write => {
                    piece.memory[..bytes].copy_from_slice(&memory[first..first + bytes]);
                    opcode::Write::new(file, piece.memory.as_ptr(), blocks).offset(at).build()
                }
            };
            // SAFETY: nobody else uses the piece until it is through, and it lives until then: `end` waits. There is
            // room, as the ring takes all pieces.
            unsafe { self.ring.submission().push(&entry.user_data(k as u64)) }.map_err(io::Error::other)?;
            piece.at = Some((first, bytes));
            self.begun += bytes;
        }
        match self.ring.submit() {
            Err(e) if e.kind() != ErrorKind::Interrupted => return Err(e),
            Ok(_) | Err(_) => {}
        }
        // Only one piece is taken at a time, as the caller has other things to do.
        for (piece, result) in self.completed(1) {
            let Bounce { memory: piece, at: place } = &mut self.pieces[piece];
            let (first, bytes) = place.take().expect("invariant: it was begun");
            let done = match result {
                // The system may give up what was begun by a thread that has ended since.
                Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::CANCELED | Errno::INTR | Errno::AGAIN)) => 0,
                result => result?.min(bytes),
            };
            // The rest of a short transfer, which is rare, goes through the page cache.
            let (left, from) = (&mut piece[done..bytes], at + (first + done) as u64);
            match direction {
                _ if left.is_empty() => {}
                CopyDirection::Read => plain.read_exact_at(left, from)?,
                CopyDirection::Write => plain.write_all_at(left, from)?,
            }
            if direction == CopyDirection::Read {
                memory[first..first + bytes].copy_from_slice(&piece[..bytes]);
            }
            self.through += bytes;
        }
        Ok(self.through)
    }

    /// The next pieces that are through, with how many bytes are.
    fn completed(&mut self, most: usize) -> Vec<(usize, io::Result<usize>)> {
        let result = |r: i32| usize::try_from(r).map_err(|_| io::Error::from_raw_os_error(-r));
        self.ring.completion().take(most).map(|c| (c.user_data() as usize, result(c.result()))).collect()
    }

    /// Waits for what is under way, whose memory the system would use, and is ready for another copy.
    fn end(&mut self) {
        while self.is_busy() && self.ring.submit_and_wait(1).is_ok() {
            for (piece, _) in self.completed(DEPTH) {
                self.pieces[piece].at = None;
            }
        }
        (self.of, self.begun, self.through) = (None, 0, 0);
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.end();
        // Memory that the system may still use is leaked.
        if self.is_busy() {
            std::mem::forget(std::mem::take(&mut self.pieces));
        }
    }
}

/// The same file past the page cache; none if its file system has no direct I/O, as those in memory and some of
/// networks.
fn past_cache(file: &File) -> io::Result<Option<File>> {
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    match open(&again, OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT, Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The types (`statfs`) of file systems that keep files in memory: tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Why ranks that keep bytes in this directory take memory for them all the same, if they do.
///
/// # Errors
/// Files cannot be made there.
pub fn memory_taken(dir: &Path) -> io::Result<Option<String>> {
    let file = tempfile::tempfile_in(dir)?;
    // The low half tells types apart; the field's width and sign differ between architectures.
    if IN_MEMORY.contains(&(rustix::fs::fstatfs(&file)?.f_type as u64 & 0xffff_ffff)) {
        let dir = dir.display();
        return Ok(Some(format!(
            "`{dir}` is in memory (tmpfs or ramfs): what rests there takes as much memory as without a disk; name one on a drive"
        )));
    }
    let cached =
        || format!("the file system of `{}` has no direct I/O: copies go through the page cache, which takes memory and is slower", dir.display());
    Ok(past_cache(&file)?.is_none().then(cached))
}

fn said(what: &str, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

/// Whole blocks of so many bytes.
fn whole(bytes: usize) -> usize {
    bytes.next_multiple_of(BLOCK as usize)
}

#[cfg(test)]
mod tests;
