//! The CPU of this machine: arenas are mapped memory, kernels native code of a shared library, tiles spread over
//! threads.

mod pool;
mod ranges;

use crate::artifact::{Artifact, SealedFile};
use crate::device::{Device, DeviceError, DeviceHandle, Element, Launches, Location, Memory, advanced, bits, decode, encode};
use crate::disk::{CopyDirection, Disk};
use crate::executor::Copied;
use ir::kernel::Kernel;
use ir::op::DType;
use ir::program::{Arena, KernelId};
use pool::Pool;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A compiled kernel: addresses of its inputs, then of its outputs; scalars as bits of f64 or i64; the tiles to run;
/// scratch, 64-byte aligned, for this thread alone; the range of tiles that this call is part of ([`ranges`]).
pub type KernelFn =
    unsafe extern "C" fn(arguments: *const *mut u8, scalars: *const u64, first_tile: u64, end_tile: u64, scratch: *mut u8, begin: u64, until: u64);

/// A kernel that can be called.
#[derive(Clone, Copy)]
pub struct NativeKernel {
    /// Runs a range of the kernel's tiles on the calling thread.
    pub function: KernelFn,
    /// Tiles of one launch.
    pub tiles: u64,
    /// Bytes of scratch for each thread that runs tiles.
    pub scratch_bytes: u64,
}

/// How a rank uses the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Threads {
    /// Threads that run tiles, the rank's own included; at least 1.
    pub count: usize,
    /// For each thread, the core that it stays on.
    pub cores: Option<Vec<usize>>,
    /// How often an idle thread looks for work before it sleeps.
    pub spins: u32,
}

impl Threads {
    /// One thread, wherever the system puts it.
    pub fn one() -> Threads {
        Threads { count: 1, cores: None, spins: 0 }
    }

    /// The threads of one of `ranks` on this machine. Threads stay on cores of their own if there are enough, and
    /// then wait for work awake; if not, they soon sleep, for others need the core.
    pub fn of_rank(rank: u64, ranks: u64, count: usize) -> Threads {
        let cores = allowed_cores();
        let (first, all) = (rank as usize * count, ranks as usize * count);
        let enough = all <= cores.len();
        Threads { count, cores: enough.then(|| cores[first..first + count].to_vec()), spins: if enough { 20_000 } else { 200 } }
    }
}

/// The cores that this process may run on.
pub fn allowed_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Memory from the system, zero at first, aligned to a page.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned, and only memory: any thread may use it, see `Arenas` and `Pool` for when.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// The arenas of a rank. Its compute stream, its communication's thread and its host's all have them.
///
/// **Why this is sound**: a command touches only what its places say, which was held against the arenas
/// ([`crate::check`]), provided that the code of its kernel is that of the kernel which the job names; and the job's
/// verifier has accepted it, when the artifact was read, as free of races (`verify::job`): of two commands that touch
/// the same bytes, one of them writing, one comes after the other by its stream or by an event. A stream's commands
/// are one thread's, in order; an event is stored with `Release` and seen with `Acquire`, as is the end of a phase by
/// the thread's. So nobody else uses the bytes that a command writes while it does.
#[derive(Clone)]
pub struct Arenas(Arc<Backing>);

struct Backing {
    mappings: [Mapping; Arena::ALL.len()],
    /// What rests on a disk, if something does.
    disk: Option<Disk>,
}

impl Mapping {
    fn new(bytes: u64) -> rustix::io::Result<Mapping> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let bytes = usize::try_from(bytes.max(1)).map_err(|_| rustix::io::Errno::NOMEM)?.next_multiple_of(4096);
        // SAFETY: an anonymous mapping at an address of the system's choice aliases nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)? };
        // Pages of 2 MiB, where the system has them, cause a hundredth of the page faults and fewer TLB misses.
        // Nothing depends on them.
        // SAFETY: the mapping is this one.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
        Ok(Mapping { start: NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?, bytes })
    }

    /// Takes pages for part of it from the system, which clears them.
    fn claim(&self, part: Range<usize>) -> rustix::io::Result<()> {
        use rustix::io::Errno;
        use rustix::mm::{Advice, madvise};
        assert!(part.start <= part.end && part.end <= self.bytes, "invariant: a part of it");
        // SAFETY: within the mapping; nothing that it holds changes.
        match unsafe { madvise(self.start.as_ptr().add(part.start).cast(), part.len(), Advice::LinuxPopulateWrite) } {
            // Linux before 5.14 does not know this advice, and takes pages when they are written.
            Err(Errno::INVAL) => Ok(()),
            done => done,
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Arithmetic on denormals is slow, and results of that size do not matter: this thread takes and makes zero instead.
pub(crate) fn flush_denormals() {
    #[cfg(target_arch = "x86_64")]
    {
        // All exceptions are masked and rounding is to nearest (the default), with FTZ (bit 15) and DAZ (bit 6)
        // added.
        let control: u32 = 0x1f80 | 0x8040;
        // SAFETY: loads a valid MXCSR value from memory.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, readonly)) };
    }
}

pub(crate) fn pin(core: usize) {
    stay_on(&[core]);
}

/// Has the calling thread, and what it starts from now on, run on these cores alone. One that has gone since is no
/// reason to stop.
pub fn stay_on(cores: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Makes the calling thread one that does a rank's arithmetic, on any of these cores.
fn begin_thread(cores: &[usize]) {
    stay_on(cores);
    flush_denormals();
}

/// The kernels of an artifact. The library stays loaded as long as this lives.
pub struct KernelLibrary {
    /// Kernels by their number in the job; none where a GPU runs the kernel.
    kernels: Vec<Option<NativeKernel>>,
    // The library is dropped before its bytes, which it needs as long as it is loaded.
    _library: Option<libloading::Library>,
    _bytes: Option<SealedFile>,
}

impl KernelLibrary {
    /// Loads the native code of an artifact that was read, hence checked; if it has none, nothing. The loader gets
    /// the bytes that were hashed, by their descriptor: what has happened to the file since does not matter.
    ///
    /// # Errors
    /// If the library cannot be loaded or lacks a kernel.
    pub fn load(artifact: &Artifact) -> Result<KernelLibrary, DeviceError> {
        if artifact.kernels.iter().all(|k| k.launch.is_some()) {
            return Ok(KernelLibrary { kernels: vec![], _library: None, _bytes: None });
        }
        let path = artifact.library_path();
        let bytes = artifact.library().ok_or_else(|| DeviceError::Failed(format!("`{}` is missing", path.display())))?.clone();
        let failed = |e: libloading::Error| DeviceError::Failed(format!("`{}` cannot be loaded: {e}", path.display()));
        // SAFETY: this code cannot be proven safe: whoever takes an artifact takes its code. The hash says that the
        // manifest was written for these bytes, and a signature, if the user asks for one, by whom. Code that `mcc
        // compile` made has no constructors and touches only its arguments. The descriptor stays open while the
        // library is loaded, so no other library gets its number, by which the loader tells them apart.
        let library = unsafe { libloading::Library::new(format!("/proc/self/fd/{}", bytes.descriptor().as_raw_fd())) }.map_err(failed)?;
        let mut kernels = vec![];
        for entry in &artifact.kernels {
            if entry.launch.is_some() {
                kernels.push(None);
                continue;
            }
            if u32::try_from(entry.tiles).is_err() {
                return Err(DeviceError::Failed(format!("`{}` has {} tiles, more than this device takes", entry.name, entry.tiles)));
            }
            // SAFETY: `mcc compile` gives every symbol of a library this type; libraries of other makers are trusted
            // for it, as for their code.
            let function = unsafe { library.get::<KernelFn>(entry.name.as_bytes()) }.map_err(failed)?;
            kernels.push(Some(NativeKernel { function: *function, tiles: entry.tiles, scratch_bytes: entry.scratch_bytes }));
        }
        Ok(KernelLibrary { kernels, _library: Some(library), _bytes: Some(bytes) })
    }

    /// Kernels that are part of this process.
    ///
    /// # Safety
    /// Each touches only what its signature in the job says.
    pub unsafe fn linked(kernels: Vec<NativeKernel>) -> KernelLibrary {
        KernelLibrary { kernels: kernels.into_iter().map(Some).collect(), _library: None, _bytes: None }
    }
}

/// A rank's share of the CPU. What its programs say of the host happens in other arenas of the same memory.
pub struct Cpu {
    /// Per kernel, the types of its scalar arguments.
    dtypes: Arc<[Vec<DType>]>,
    arenas: Arenas,
    /// Cores that the rank may use, whatever its threads are bound to.
    cores: Vec<usize>,
    // The pool is dropped before the library, so that its threads end before their code is unloaded.
    pool: Pool,
    library: Arc<KernelLibrary>,
    arguments: Vec<*mut u8>,
    scalars: Vec<u64>,
}

// SAFETY: the addresses in `arguments` are those of the last launch, and no longer used.
unsafe impl Send for Cpu {}

impl Cpu {
    /// Arenas of so many bytes, zero at first, with what rests on a disk in this directory. The calling thread is the
    /// rank's own from now on: it flushes denormals, and stays on its core if it has one.
    ///
    /// # Errors
    /// If there is not enough memory or a thread cannot start.
    pub fn new(
        kernels: &[Kernel],
        library: KernelLibrary,
        bytes: [u64; Arena::ALL.len()],
        dir: Option<&Path>,
        threads: &Threads,
    ) -> Result<Cpu, DeviceError> {
        let arenas = Arenas::new(bytes, dir)?;
        arenas.claim(threads)?;
        Cpu::with(arenas, kernels, library, threads)
    }

    /// The same with arenas that others use too.
    ///
    /// # Errors
    /// As for [`Cpu::new`].
    pub fn with(arenas: Arenas, kernels: &[Kernel], library: KernelLibrary, threads: &Threads) -> Result<Cpu, DeviceError> {
        Cpu::over(arenas, kernels.iter().map(|k| k.scalars.clone()).collect(), Arc::new(library), allowed_cores(), threads)
    }

    fn over(
        arenas: Arenas,
        dtypes: Arc<[Vec<DType>]>,
        library: Arc<KernelLibrary>,
        cores: Vec<usize>,
        threads: &Threads,
    ) -> Result<Cpu, DeviceError> {
        let scratch = library.kernels.iter().flatten().map(|k| k.scratch_bytes).max().unwrap_or(0);
        let pool = Pool::new(threads, scratch)?;
        Ok(Cpu { dtypes, arenas, cores, pool, library, arguments: vec![], scalars: vec![] })
    }
}

impl Arenas {
    /// Memory of so many bytes, zero at first, with what rests on a disk in this directory.
    ///
    /// # Errors
    /// If there is not so much, or no directory.
    pub fn new(bytes: [u64; Arena::ALL.len()], dir: Option<&Path>) -> Result<Arenas, DeviceError> {
        let disk = (bytes[Arena::Disk as usize] > 0).then(|| on_disk(bytes[Arena::Disk as usize], dir)).transpose()?;
        let map = |arena: Arena| {
            let bytes = if arena == Arena::Disk { 0 } else { bytes[arena as usize] };
            Mapping::new(bytes).map_err(|e| DeviceError::OutOfMemory { arena: arena.name(), bytes, cause: e.to_string() })
        };
        let [a, b, c, d, e, f, g] = Arena::ALL.map(map);
        Ok(Arenas(Arc::new(Backing { mappings: [a?, b?, c?, d?, e?, f?, g?], disk })))
    }

    /// Takes all of the memory from the system, on as many threads as a rank has: clearing pages is most of what it
    /// takes to fill new memory. What the machine lacks is missed before the first step.
    fn claim(&self, threads: &Threads) -> Result<(), DeviceError> {
        /// Bytes that a thread takes at a time.
        const PART: usize = 64 << 20;
        let parts = |arena: Arena| {
            let bytes = self.0.mappings[arena as usize].bytes;
            (0..bytes).step_by(PART).map(move |from| (arena, from..(from + PART).min(bytes)))
        };
        let parts: Vec<_> = Arena::ALL.into_iter().flat_map(parts).collect();
        let next = AtomicUsize::new(0);
        let take = &|| {
            while let Some((arena, part)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mapping = &self.0.mappings[*arena as usize];
                let failed =
                    |e: rustix::io::Errno| DeviceError::OutOfMemory { arena: arena.name(), bytes: mapping.bytes as u64, cause: e.to_string() };
                mapping.claim(part.clone()).map_err(failed)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let cores = threads.cores.as_deref();
            let others: Vec<_> = (1..threads.count.min(parts.len()))
                .map(|k| {
                    scope.spawn(move || {
                        cores.into_iter().for_each(|cores| pin(cores[k]));
                        take()
                    })
                })
                .collect();
            let own = take();
            others.into_iter().map(|t| t.join().expect("invariant: nothing panics there")).fold(own, Result::and)
        })
    }

    /// Where a place is in this process.
    pub fn address(&self, at: Location) -> u64 {
        self.bytes(at, 0) as u64
    }

    fn bytes(&self, at: Location, bytes: usize) -> *mut u8 {
        let mapping = &self.0.mappings[at.arena as usize];
        assert!(at.byte as usize + bytes <= mapping.bytes, "invariant: places were checked against their arenas");
        // SAFETY: within the mapping, as just asserted.
        unsafe { mapping.start.as_ptr().add(at.byte as usize) }
    }

    pub(crate) fn range(&self, at: Location, bytes: usize) -> &[u8] {
        // SAFETY: the mapping has these bytes, initialised; nobody writes to them meanwhile, see `Arenas`.
        unsafe { std::slice::from_raw_parts(self.bytes(at, bytes), bytes) }
    }

    pub(crate) fn range_mut(&mut self, at: Location, bytes: usize) -> &mut [u8] {
        // SAFETY: as above, and nobody reads them either.
        unsafe { std::slice::from_raw_parts_mut(self.bytes(at, bytes), bytes) }
    }
}

/// The file of a rank.
fn on_disk(bytes: u64, dir: Option<&Path>) -> Result<Disk, DeviceError> {
    let dir = dir.ok_or_else(|| DeviceError::Failed("optimizer states rest on a disk, but no directory was given".into()))?;
    Disk::new(dir, bytes).map_err(|e| DeviceError::OutOfMemory { arena: Arena::Disk.name(), bytes, cause: format!("`{}`: {e}", dir.display()) })
}

/// Which way a copy goes if it has to do with a disk: the place there, and that in memory.
fn direction([from, to]: [Location; 2]) -> Option<(CopyDirection, Location, Location)> {
    match [from.arena, to.arena] {
        [Arena::Disk, _] => Some((CopyDirection::Read, from, to)),
        [_, Arena::Disk] => Some((CopyDirection::Write, to, from)),
        _ => None,
    }
}

impl Arenas {
    /// Repeats an element.
    pub(crate) fn fill(&mut self, at: Location, element: &[u8], count: u64) {
        if at.arena == Arena::Disk {
            return self.disk().fill(at.byte, element, count);
        }
        let range = self.range_mut(at, count as usize * element.len());
        if element.iter().all(|b| *b == 0) {
            range.fill(0);
        } else {
            range.chunks_exact_mut(element.len()).for_each(|e| e.copy_from_slice(element));
        }
    }

    fn disk(&self) -> &Disk {
        self.0.disk.as_ref().expect("invariant: places on a disk were checked against its arena, which has bytes")
    }
}

impl Memory for Arenas {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        match at.arena {
            Arena::Disk => self.disk().load(at.byte, out),
            _ => out.copy_from_slice(self.range(at, out.len())),
        }
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        match at.arena {
            Arena::Disk => self.disk().store(at.byte, bytes),
            _ => self.range_mut(at, bytes.len()).copy_from_slice(bytes),
        }
    }

    fn copy(&mut self, from: Location, to: Location, dtype: DType, count: u64) {
        let bytes = (count * dtype.bytes()) as usize;
        match direction([from, to]) {
            Some((direction, disk, memory)) => self.clone().disk().copy(direction, disk.byte, self.range_mut(memory, bytes)),
            None => self.clone().range_mut(to, bytes).copy_from_slice(self.range(from, bytes)),
        }
    }

    fn advance(&mut self, copied: &Copied, done: u64, most: usize) -> Result<u64, DeviceError> {
        let Some((direction, disk, memory)) = direction([copied.src, copied.dst]) else { return Ok(advanced(self, copied, done, most)) };
        let bytes = copied.dtype.bytes();
        let through = self.clone().disk().advance(direction, disk.byte, self.range_mut(memory, (copied.count * bytes) as usize));
        through
            .map(|through| through as u64 / bytes)
            .map_err(|e| DeviceError::Failed(format!("the disk of its optimizer states and parameters: {e}")))
    }

    fn rest(&self, most: Duration) -> bool {
        self.0.disk.as_ref().is_some_and(|disk| disk.rest(most))
    }

    fn outcome(&self) -> Result<(), DeviceError> {
        let failed = self.0.disk.as_ref().and_then(Disk::failed);
        failed.map_or(Ok(()), |e| Err(DeviceError::Failed(format!("the disk of its optimizer states and parameters: {e}"))))
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        let size = dtype.bytes() as usize;
        if at.arena == Arena::Disk {
            let mut bytes = vec![0; out.len() * size];
            self.disk().load(at.byte, &mut bytes);
            return bytes.chunks_exact(size).zip(out).for_each(|(bytes, x)| *x = decode(dtype, bytes));
        }
        for (bytes, x) in self.range(at, out.len() * size).chunks_exact(size).zip(out) {
            *x = decode(dtype, bytes);
        }
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        let size = dtype.bytes() as usize;
        if at.arena == Arena::Disk {
            let mut bytes = vec![0; values.len() * size];
            bytes.chunks_exact_mut(size).zip(values).for_each(|(bytes, x)| encode(dtype, *x, bytes));
            return self.disk().store(at.byte, &bytes);
        }
        for (bytes, x) in self.range_mut(at, values.len() * size).chunks_exact_mut(size).zip(values) {
            encode(dtype, *x, bytes);
        }
    }
}

impl Memory for Cpu {
    fn element(&self, dtype: DType) -> Element {
        self.arenas.element(dtype)
    }

    fn load(&self, at: Location, dtype: DType, out: &mut [u8]) {
        self.arenas.load(at, dtype, out);
    }

    fn store(&mut self, at: Location, dtype: DType, bytes: &[u8]) {
        self.arenas.store(at, dtype, bytes);
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        self.arenas.read(at, dtype, out);
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.arenas.write(at, dtype, values);
    }

    fn copy(&mut self, from: Location, to: Location, dtype: DType, count: u64) {
        self.arenas.copy(from, to, dtype, count);
    }

    fn advance(&mut self, copied: &Copied, done: u64, most: usize) -> Result<u64, DeviceError> {
        self.arenas.advance(copied, done, most)
    }

    fn rest(&self, most: Duration) -> bool {
        self.arenas.rest(most)
    }

    fn outcome(&self) -> Result<(), DeviceError> {
        self.arenas.outcome()
    }
}

impl Launches for Cpu {
    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        let loaded = self.library.kernels.get(kernel.index()).copied().flatten().ok_or(DeviceError::NotLoaded(kernel.0))?;
        let dtypes = &self.dtypes[kernel.index()];
        self.arguments.clear();
        for at in args {
            // An operand without elements may begin at the very end of its arena.
            self.arguments.push(self.arenas.bytes(*at, 0));
        }
        self.scalars.clear();
        self.scalars.extend(scalars.iter().zip(dtypes).map(|(x, t)| bits(*t, *x)));
        self.pool.run(&loaded, &self.arguments, &self.scalars);
        Ok(())
    }
}

impl Device for Cpu {
    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.arenas.outcome()
    }

    fn second_handle(&self) -> Option<DeviceHandle> {
        let cores = self.cores.clone();
        Some(DeviceHandle { memory: Box::new(self.arenas.clone()), begin: Box::new(move || begin_thread(&cores)) })
    }

    fn host(&self) -> Option<Result<Box<dyn Launches + Send>, DeviceError>> {
        let (arenas, dtypes, library, cores) = (self.arenas.clone(), self.dtypes.clone(), self.library.clone(), self.cores.clone());
        let cpu = Cpu::over(arenas, dtypes, library, cores, &Threads::one());
        Some(cpu.map(|cpu| Box::new(cpu) as Box<dyn Launches + Send>))
    }

    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        let size = dtype.bytes() as usize;
        let mut element = [0; 4];
        encode(dtype, value, &mut element[..size]);
        self.arenas.fill(at, &element[..size], count);
    }
}

#[cfg(test)]
mod tests;
