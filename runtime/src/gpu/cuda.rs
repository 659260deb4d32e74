//! NVIDIA GPUs, through the driver's own interface, which is loaded when a run asks for it. Several ranks may share a
//! GPU.
//!
//! Host memory that the GPU copies from or to is pinned. Kernels run on one stream, copies for communication on
//! another.

mod driver;
mod graph;
mod issue;
mod kernel;
mod memory;
mod stream;

pub(super) use driver::text;
pub use driver::{Described, Unavailable, describe, probe};
pub(super) use memory::Reserved;
pub(super) use stream::{CudaEvent, Stream};

use super::host::HostKernels;
use super::nccl::{self, Nccl};
use super::outbox::Outboxes;
use super::{GpuDevice, Queue, Work};
use crate::artifact::Artifact;
use crate::device::{DeviceError, ThreadResources};
use cudarc::driver::{result, sys};
use driver::{capability, fits, is_own, multiprocessors, takes, version};
use graph::Graphs;
use ir::launch::{Launch, MAP_BYTES, TensorMap};
use ir::program::KernelId;
use issue::{IssueContext, Streams};
use kernel::{CudaKernel, encoded, load};
use memory::Pinned;
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Bytes of pinned memory through which a stream's copies go.
const STAGING: usize = 4 << 20;

/// How long until another look at what is under way.
const LOOK: Duration = Duration::from_micros(20);

/// How long exchanges may take until they count as stuck.
const STUCK: Duration = Duration::from_secs(600);

/// The GPU's context; given back at the end.
struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it the calling thread's.
    fn enter(&self) -> Result<(), String> {
        // SAFETY: it has been retained.
        unsafe { result::ctx::set_current(self.handle) }.map_err(text)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it has been retained; whatever lived in it is gone, as it is the last field of `Cuda`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// What runs lists of work.
struct Issue {
    graphs: Graphs,
    // NCCL is dropped before the streams, as it has to be ended or aborted first.
    nccl: Option<Nccl>,
    streams: Streams,
    /// A list was refused: the other ranks wait for exchanges that never come.
    failed: bool,
}

/// A stream for copies, with the pinned memory that they go through.
struct Copies {
    stream: Stream,
    staging: Pinned,
}

/// The kernels of an artifact on a GPU.
pub struct Cuda {
    kernels: BTreeMap<KernelId, CudaKernel>,
    issue: Mutex<Issue>,
    /// Copies on the stream of kernels, and on the one beside it.
    copies: [Mutex<Copies>; 2],
    allocations: Vec<u64>,
    /// Memory of the host that it copies from and to by itself.
    lent: Vec<Range<u64>>,
    // The context is dropped last, as all else lives in it.
    context: Context,
}

impl Cuda {
    /// Loads the kernels onto a GPU; `rank` is counted on this machine, ranks take its GPUs in turn.
    ///
    /// # Errors
    /// No driver or GPU, one of another architecture, PTX that it refuses.
    pub fn load(artifact: &Artifact, arch: &str, rank: u64) -> Result<Cuda, DeviceError> {
        let count = probe().map_err(|e| DeviceError::Failed(e.to_string()))?;
        Cuda::on(artifact, arch, (rank % count) as i32).map_err(DeviceError::Failed)
    }

    fn on(artifact: &Artifact, arch: &str, number: i32) -> Result<Cuda, String> {
        let device = result::device::get(number).map_err(text)?;
        let capability = capability(device).map_err(text)?;
        fits(arch, capability)?;
        // SAFETY: the device exists.
        let context = Context { device, handle: unsafe { result::primary_ctx::retain(device) }.map_err(text)? };
        context.enter()?;
        let copies = || Ok::<_, String>(Mutex::new(Copies { stream: Stream::new()?, staging: Pinned::new(STAGING)? }));
        let (copies, streams) = ([copies()?, copies()?], Streams::new()?);
        let (mut kernels, version) = (BTreeMap::new(), version().map_err(text)?);
        let multiprocessors = multiprocessors(device).map_err(text)?;
        for (id, entry) in artifact.launched() {
            let failed = |e: String| format!("kernel {}: {e}", entry.name);
            let plain = |s: &str| CString::new(s).map_err(|e| failed(e.to_string()));
            let launch = entry.launch.clone().ok_or_else(|| failed("nothing about its launch".into()))?;
            takes(version, &launch).map_err(failed)?;
            let launch = Launch { grid: launch.blocks_on(multiprocessors), ..launch };
            // The driver compiles PTX itself where there is no code for this very GPU.
            let cubin = artifact.cubin(entry).filter(|_| is_own(arch, capability));
            kernels.insert(id, load(&plain(artifact.ptx(entry))?, cubin, &plain(&entry.name)?, launch).map_err(failed)?);
        }
        let issue = Mutex::new(Issue { graphs: Graphs::default(), nccl: None, streams, failed: false });
        Ok(Cuda { kernels, issue, copies, allocations: vec![], lent: vec![], context })
    }

    /// Connects it to the GPUs of the other ranks, which all have the same id; then it exchanges with them by itself.
    ///
    /// # Errors
    /// No NCCL; what it says; ranks that do not come within the time.
    pub fn connect(&self, artifact: &Artifact, rank: u64, setup: &nccl::NcclSetup<'_>, limit: Duration) -> Result<(), DeviceError> {
        let connect = || {
            nccl::probe()?;
            self.context.enter()?;
            let mut issue = self.issue();
            issue.nccl = Some(Nccl::new(&artifact.job, rank, setup, limit, issue.streams.compute())?);
            issue.streams.outboxes = Outboxes::new(&artifact.job, rank)?;
            Ok(())
        };
        connect().map_err(DeviceError::Failed)
    }

    fn is_lent(&self, bytes: &[u8]) -> bool {
        let asked = span(bytes);
        self.lent.iter().any(|l| l.start <= asked.start && asked.end <= l.end)
    }

    fn issue(&self) -> MutexGuard<'_, Issue> {
        self.issue.lock().expect("invariant: no holder panics")
    }

    /// Copies of a queue, where what was before on it is through.
    fn copies(&self, queue: Queue) -> Result<MutexGuard<'_, Copies>, String> {
        self.context.enter()?;
        if queue == Queue::Compute {
            self.settle()?;
        }
        Ok(self.copies[queue as usize].lock().expect("invariant: no holder panics"))
    }

    /// Waits for all streams of work, and meanwhile looks for what NCCL finds wrong.
    fn settle(&self) -> Result<(), String> {
        let issue = self.issue();
        let Some(nccl) = &issue.nccl else { return issue.streams.compute().wait() };
        let deadline = Instant::now() + STUCK;
        while !issue.streams.compute().is_idle()? {
            nccl.look()?;
            if Instant::now() > deadline {
                return Err(format!("the GPU is not through after {} s: another rank is gone, or streams wait for each other", STUCK.as_secs()));
            }
            std::thread::sleep(LOOK);
        }
        nccl.look()
    }
}

/// The addresses of bytes.
fn span(bytes: &[u8]) -> Range<u64> {
    let start = bytes.as_ptr() as u64;
    start..start + bytes.len() as u64
}

impl GpuDevice for Cuda {
    fn allocate(&mut self, bytes: u64) -> Result<u64, String> {
        self.context.enter()?;
        // SAFETY: a new allocation; the driver aligns it to 256 bytes.
        let address = unsafe { result::malloc_sync(bytes as usize) }.map_err(text)?;
        self.allocations.push(address);
        Ok(address)
    }

    fn lend(&mut self, memory: &mut [u8]) -> Result<(), String> {
        self.context.enter()?;
        // SAFETY: the memory is mapped, and stays so until it is given back.
        unsafe { sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), memory.len(), 0) }.result().map_err(text)?;
        self.lent.push(span(memory));
        Ok(())
    }

    fn write(&self, queue: Queue, address: u64, bytes: &[u8]) -> Result<(), String> {
        let mut copies = self.copies(queue)?;
        let Copies { stream, staging } = &mut *copies;
        if self.is_lent(bytes) {
            // SAFETY: places lie within their arenas; nobody else uses them until the copy has been waited for.
            unsafe { result::memcpy_htod_async(address, bytes, stream.0) }.map_err(text)?;
            return stream.wait();
        }
        for (k, piece) in bytes.chunks(STAGING).enumerate() {
            let pinned = &mut staging.slice()[..piece.len()];
            pinned.copy_from_slice(piece);
            // SAFETY: places lie within their arenas; the pinned memory is left alone until the copy has been waited
            // for.
            unsafe { result::memcpy_htod_async(address + (k * STAGING) as u64, pinned, stream.0) }.map_err(text)?;
            stream.wait()?;
        }
        Ok(())
    }

    fn read(&self, queue: Queue, address: u64, out: &mut [u8]) -> Result<(), String> {
        let mut copies = self.copies(queue)?;
        let Copies { stream, staging } = &mut *copies;
        if self.is_lent(out) {
            // SAFETY: as in `write`.
            unsafe { result::memcpy_dtoh_async(out, address, stream.0) }.map_err(text)?;
            return stream.wait();
        }
        for (k, piece) in out.chunks_mut(STAGING).enumerate() {
            let pinned = &mut staging.slice()[..piece.len()];
            // SAFETY: as in `write`.
            unsafe { result::memcpy_dtoh_async(pinned, address + (k * STAGING) as u64, stream.0) }.map_err(text)?;
            stream.wait()?;
            piece.copy_from_slice(pinned);
        }
        Ok(())
    }

    fn encode(&self, map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String> {
        encoded(map, address)
    }

    fn needs(&self, kernel: KernelId) -> Option<ThreadResources> {
        self.kernels.get(&kernel).map(|k| k.needs)
    }

    fn run(&self, work: &[Work], host_kernels: Option<&HostKernels>) -> Result<(), String> {
        self.context.enter()?;
        self.settle()?;
        let Issue { graphs, nccl, streams, failed } = &mut *self.issue();
        let run = graphs.run(work, &IssueContext { kernels: &self.kernels, nccl: nccl.as_ref(), host_kernels }, streams);
        *failed |= run.is_err();
        run
    }

    fn is_connected(&self) -> bool {
        self.issue().nccl.is_some()
    }

    fn synchronize(&self) -> Result<(), String> {
        self.context.enter()?;
        self.settle()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let through = self.synchronize();
        let mut issue = self.issue();
        // The graphs go first, as NCCL waits for those that call a communicator. The host memory that they copy from
        // stays until their copies are done.
        let data = issue.graphs.end();
        // Communicators that are not ended in order are aborted, with what they have under way.
        match (issue.nccl.take(), through) {
            (Some(nccl), Ok(())) if !issue.failed => drop(nccl.finish()),
            (nccl, _) => drop(nccl),
        }
        // After an error, work may be left on the stream, which nothing holds up any more.
        let _ = issue.streams.compute().wait();
        drop((issue, data));
        for memory in &self.lent {
            // SAFETY: it was lent and is still mapped; all that used it is done.
            let _ = unsafe { sys::cuMemHostUnregister(memory.start as *mut c_void) }.result();
        }
        for address in &self.allocations {
            // SAFETY: all that used it is done.
            let _ = unsafe { result::free_sync(*address) };
        }
    }
}
