//! Threads that run the tiles of one kernel at a time.
//!
//! Which tiles a thread computes, [`Ranges`] says. A thread that sleeps is woken but never waited for: a launch ends
//! when all tiles are done and no thread is inside. So a launch costs little where threads are awake, and nothing
//! much where they are not.

use super::ranges::{Ranges, TileRange};
use super::{KernelFn, Mapping, NativeKernel, Threads, flush_denormals, pin};
use crate::device::DeviceError;
use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Set in [`PoolState::state`] while a launch takes threads in; the other bits count those inside.
const OPEN: u64 = 1 << 63;

struct PoolState {
    /// Counts launches; threads sleep on it.
    launches: AtomicU32,
    sleepers: AtomicU32,
    stop: AtomicBool,
    state: AtomicU64,
    /// Filled while `state` is not open, so that no thread looks.
    ranges: Ranges,
    /// Written while `state` is not open, read by threads that came in while it was.
    task: UnsafeCell<PoolTask>,
    spins: u32,
}

// SAFETY: `task` is written by the owner alone while `state` is 0 and read only by threads counted in `state` (see
// `enter`).
unsafe impl Sync for PoolState {}

#[derive(Clone, Copy)]
struct PoolTask {
    function: KernelFn,
    arguments: *const *mut u8,
    scalars: *const u64,
}

// SAFETY: the pointers are used only during the launch that set them, while their owner waits.
unsafe impl Send for PoolTask {}

impl PoolTask {
    fn run(&self, call: TileRange, scratch: *mut u8) {
        let TileRange { first, end, begin, until } = call;
        // SAFETY: the arguments are those of the kernel, within the arenas, and live until the launch ends. The tiles
        // and the scratch, which is as large as any kernel's, belong to this thread alone.
        unsafe { (self.function)(self.arguments, self.scalars, first, end, scratch, begin, until) };
    }
}

pub struct Pool {
    shared: Arc<PoolState>,
    threads: Vec<JoinHandle<()>>,
    /// Scratch of the calling thread.
    scratch: Mapping,
}

impl Pool {
    pub fn new(threads: &Threads, scratch_bytes: u64) -> Result<Pool, DeviceError> {
        let memory = || Mapping::new(scratch_bytes).map_err(|e| DeviceError::Failed(format!("{scratch_bytes} bytes of scratch: {e}")));
        unsafe extern "C" fn nothing(_: *const *mut u8, _: *const u64, _: u64, _: u64, _: *mut u8, _: u64, _: u64) {}
        let idle = PoolTask { function: nothing, arguments: std::ptr::null(), scalars: std::ptr::null() };
        let shared = Arc::new(PoolState {
            launches: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            state: AtomicU64::new(0),
            ranges: Ranges::new(threads.count),
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
                work(&shared, k, &scratch);
            });
            pool.threads.push(thread.map_err(|e| DeviceError::Failed(format!("a thread could not start: {e}")))?);
        }
        core(0).into_iter().for_each(pin);
        flush_denormals();
        Ok(pool)
    }

    /// Runs all tiles and returns when they are done.
    pub fn run(&mut self, kernel: &NativeKernel, arguments: &[*mut u8], scalars: &[u64]) {
        let scratch = self.scratch.start.as_ptr();
        let task = PoolTask { function: kernel.function, arguments: arguments.as_ptr(), scalars: scalars.as_ptr() };
        if self.threads.is_empty() || kernel.tiles == 1 {
            return task.run(TileRange { first: 0, end: kernel.tiles, begin: 0, until: kernel.tiles }, scratch);
        }
        let shared = &*self.shared;
        // SAFETY: `state` is not open, so no thread reads the task.
        unsafe { *shared.task.get() = task };
        shared.ranges.fill(kernel.tiles);
        shared.state.fetch_or(OPEN, Ordering::Release);
        shared.launches.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&shared.launches, futex::Flags::PRIVATE, i32::MAX as u32);
        }
        shared.ranges.calls(0).for_each(|call| task.run(call, scratch));
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

/// A thread's life: waits for a launch, comes in if it is still open, runs tiles, leaves.
fn work(shared: &PoolState, thread: usize, scratch: &Mapping) {
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
            // The wait returns at once if a launch has begun since.
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
            shared.ranges.calls(thread).for_each(|call| task.run(call, scratch.start.as_ptr()));
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}
