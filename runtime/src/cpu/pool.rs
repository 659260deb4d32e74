//! Threads that run the tiles of one kernel at a time.
//!
//! Threads claim tiles from a counter. A thread that sleeps is woken but never waited for: a launch ends when all tiles are
//! done and no thread is inside. So a launch costs little where threads are awake, and nothing much where they are not.

use super::{KernelFn, Loaded, Mapping, Threads, flush_denormals, pin};
use crate::device::DeviceError;
use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Set in [`Shared::state`] while a launch takes threads in; the other bits count those inside.
const OPEN: u64 = 1 << 63;

struct Shared {
    /// Counts launches; threads sleep on it.
    launches: AtomicU32,
    sleepers: AtomicU32,
    stop: AtomicBool,
    state: AtomicU64,
    next: AtomicU64,
    /// Written while `state` is 0, read by threads that came in while it was open.
    task: UnsafeCell<Task>,
    spins: u32,
}

// SAFETY: `task` is written by the owner alone while `state` is 0 and read only by threads counted in `state` (see `enter`).
unsafe impl Sync for Shared {}

#[derive(Clone, Copy)]
struct Task {
    function: KernelFn,
    arguments: *const *mut u8,
    scalars: *const u64,
    tiles: u64,
    claim: u64,
}

// SAFETY: the pointers are used only during the launch that set them, while their owner waits.
unsafe impl Send for Task {}

pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Of the calling thread.
    scratch: Mapping,
}

impl Pool {
    pub fn new(threads: &Threads, scratch_bytes: u64) -> Result<Pool, DeviceError> {
        let memory = || Mapping::new(scratch_bytes).map_err(|e| DeviceError::Failed(format!("{scratch_bytes} bytes of scratch: {e}")));
        unsafe extern "C" fn nothing(_: *const *mut u8, _: *const u64, _: u64, _: u64, _: *mut u8) {}
        let idle = Task { function: nothing, arguments: std::ptr::null(), scalars: std::ptr::null(), tiles: 0, claim: 1 };
        let shared = Arc::new(Shared {
            launches: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            state: AtomicU64::new(0),
            next: AtomicU64::new(0),
            task: UnsafeCell::new(idle),
            spins: threads.spins,
        });
        let mut pool = Pool { shared, threads: vec![], scratch: memory()? };
        let core = |k: usize| threads.cores.as_ref().and_then(|c| c.get(k).copied());
        for k in 1..threads.count {
            let (shared, scratch, core) = (pool.shared.clone(), memory()?, core(k));
            let thread = std::thread::Builder::new().name(format!("tiles-{k}")).spawn(move || {
                core.into_iter().for_each(pin);
                flush_denormals();
                work(&shared, &scratch);
            });
            pool.threads.push(thread.map_err(|e| DeviceError::Failed(format!("a thread could not start: {e}")))?);
        }
        core(0).into_iter().for_each(pin);
        flush_denormals();
        Ok(pool)
    }

    /// Runs all tiles and returns when they are done.
    pub fn run(&mut self, kernel: &Loaded, arguments: &[*mut u8], scalars: &[u64]) {
        let scratch = self.scratch.start.as_ptr();
        if self.threads.is_empty() || kernel.tiles == 1 {
            // SAFETY: the arguments are those of the kernel, within the arenas; the scratch is as large as any kernel's.
            unsafe { (kernel.function)(arguments.as_ptr(), scalars.as_ptr(), 0, kernel.tiles, scratch) };
            return;
        }
        let shared = &*self.shared;
        // Several claims per thread even out threads that came late; few keep the counter cool, and neighbouring tiles share copies of operands.
        let threads = self.threads.len() as u64 + 1;
        let claim = match kernel.tiles / (4 * threads) {
            1 if kernel.tiles.is_multiple_of(2 * threads) => 2,
            several => several.max(1),
        };
        let task = Task { function: kernel.function, arguments: arguments.as_ptr(), scalars: scalars.as_ptr(), tiles: kernel.tiles, claim };
        // SAFETY: `state` is not open, so no thread reads the task.
        unsafe { *shared.task.get() = task };
        shared.next.store(0, Ordering::Relaxed);
        shared.state.fetch_or(OPEN, Ordering::Release);
        shared.launches.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&shared.launches, futex::Flags::PRIVATE, i32::MAX as u32);
        }
        claim_tiles(shared, &task, scratch);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0u32;
        while shared.state.load(Ordering::Acquire) != 0 {
            looks += 1;
            if looks < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.launches.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.shared.launches, futex::Flags::PRIVATE, i32::MAX as u32);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn claim_tiles(shared: &Shared, task: &Task, scratch: *mut u8) {
    loop {
        let first = shared.next.fetch_add(task.claim, Ordering::Relaxed);
        if first >= task.tiles {
            return;
        }
        let end = (first + task.claim).min(task.tiles);
        // SAFETY: the arguments live until `run` returns, which is after this thread has left; the tiles are this thread's alone.
        unsafe { (task.function)(task.arguments, task.scalars, first, end, scratch) };
    }
}

/// A thread's life: waits for a launch, comes in if it is still open, runs tiles, leaves.
fn work(shared: &Shared, scratch: &Mapping) {
    let mut seen = 0;
    loop {
        let mut looks = 0;
        while shared.launches.load(Ordering::Acquire) == seen {
            looks += 1;
            if looks < shared.spins {
                std::hint::spin_loop();
                continue;
            }
            shared.sleepers.fetch_add(1, Ordering::SeqCst);
            // Returns at once if a launch has begun since.
            let _ = futex::wait(&shared.launches, futex::Flags::PRIVATE, seen, None);
            shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        seen = shared.launches.load(Ordering::Acquire);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        if shared.state.fetch_add(1, Ordering::Acquire) & OPEN != 0 {
            // SAFETY: counted in `state` since it was open, so the owner waits before it writes the next task.
            let task = unsafe { *shared.task.get() };
            claim_tiles(shared, &task, scratch.start.as_ptr());
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}
