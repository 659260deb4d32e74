//! NVIDIA GPUs, through the driver's own interface, which is loaded when a run asks for it. Several ranks may share a GPU.
//!
//! Host memory that the GPU copies from or to is pinned. Kernels run on one stream, copies for communication on another.

use super::graph::{Graphs, On, Stream, Streams};
use super::host::Natively;
use super::nccl::{self, Nccl};
use super::outbox::Outboxes;
use super::{Card, Queue, Work};
use crate::artifact::Artifact;
use crate::device::DeviceError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use ir::launch::{FEW_PARAMETERS, Launch, MAP_BYTES, Swizzle, TensorMap};
use ir::op::DType;
use ir::program::KernelId;
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The least version of the driver's interface: 12.0.
const LEAST_DRIVER: i32 = 12_000;
/// The least one for kernels with more than [`FEW_PARAMETERS`]: 12.1.
const LEAST_FOR_MANY: i32 = 12_010;
/// Bytes of pinned memory through which a stream's copies go.
const STAGING: usize = 4 << 20;

/// How long until another look at what is under way.
const LOOK: Duration = Duration::from_micros(20);

/// How long exchanges may take until they count as stuck.
const STUCK: Duration = Duration::from_secs(600);

/// Why there is no GPU to run on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    #[error("this machine has no NVIDIA driver (libcuda.so cannot be loaded)")]
    NoDriver,
    #[error("the NVIDIA driver supports CUDA {}.{}, mcc needs 12.0 or newer", .0 / 1000, .0 % 1000 / 10)]
    Old(i32),
    #[error("the NVIDIA driver finds no GPU")]
    NoGpu,
    #[error("the NVIDIA driver does not start: {0}")]
    Failed(String),
}

/// The number of GPUs. Nothing of the driver may be called before this has said that there is one: the bindings panic without it.
///
/// # Errors
/// Why there is none.
pub fn probe() -> Result<u64, Unavailable> {
    let failed = |e: DriverError| Unavailable::Failed(text(e));
    // SAFETY: loading the driver runs its constructors, which is what it is installed for.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    let version = version().map_err(failed)?;
    if version < LEAST_DRIVER {
        return Err(Unavailable::Old(version));
    }
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(Unavailable::NoGpu),
        other => other.map_err(failed)?,
    }
    match result::device::get_count().map_err(failed)? {
        0 => Err(Unavailable::NoGpu),
        count => Ok(count as u64),
    }
}

/// Of the driver's interface: 12010 for CUDA 12.1. The library is there.
fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: `version` is writable.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// Whether a driver takes a launch's parameters.
fn takes(version: i32, launch: &Launch) -> Result<(), String> {
    match launch.parameter_bytes() {
        bytes if bytes > FEW_PARAMETERS && version < LEAST_FOR_MANY => Err(format!(
            "the NVIDIA driver supports CUDA {}.{}, a kernel with {bytes} bytes of parameters needs 12.1 or newer",
            version / 1000,
            version % 1000 / 10
        )),
        _ => Ok(()),
    }
}

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Described {
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: [i32; 2],
    pub bytes: u64,
}

/// The first GPU.
///
/// # Errors
/// Why there is none.
pub fn describe() -> Result<Described, Unavailable> {
    use sys::CUdevice_attribute_enum as Attribute;
    probe()?;
    let failed = |e: DriverError| Unavailable::Failed(text(e));
    let device = result::device::get(0).map_err(failed)?;
    // SAFETY: the device exists.
    let attribute = |a| unsafe { result::device::get_attribute(device, a) }.map_err(failed);
    let capability =
        [attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?, attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?];
    // SAFETY: the device exists.
    let bytes = unsafe { result::device::total_mem(device) }.map_err(failed)?;
    Ok(Described { name: result::device::get_name(device).map_err(failed)?, capability, bytes: bytes as u64 })
}

/// Whether a GPU of a compute capability runs PTX for an architecture: `sm_80` runs on all later ones, `sm_90a` on 9.0 alone.
fn fits(arch: &str, [major, minor]: [i32; 2]) -> Result<(), String> {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    let needed: i32 = digits.parse().map_err(|_| format!("`{arch}` is no architecture"))?;
    let own = 10 * major + minor;
    let can = if arch.ends_with('a') { own == needed } else { own >= needed };
    if can { Ok(()) } else { Err(format!("the GPU has compute capability {major}.{minor}, kernels for {arch} do not run on it")) }
}

/// What the driver says of an error.
pub(super) fn text(e: DriverError) -> String {
    let of = |s: Result<&std::ffi::CStr, DriverError>| s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{}: {}", of(e.error_name()), of(e.error_string()))
}

/// Memory of the host that the GPU reaches, owned.
pub(super) struct Pinned {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that is owned.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The context is current.
    pub(super) fn new(bytes: usize) -> Result<Pinned, String> {
        // SAFETY: a new allocation.
        let start = unsafe { result::malloc_host(bytes, 0) }.map_err(text)?;
        Ok(Pinned { start: start.cast(), bytes })
    }

    pub(super) fn slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is owned; it was zero or written at first use, and the GPU's copies have been waited for.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, and nothing refers to it any more.
        let _ = unsafe { result::free_host(self.start.cast::<c_void>()) };
    }
}

/// Memory of the GPU, owned.
pub(super) struct Reserved(u64);

impl Reserved {
    /// The context is current; the driver aligns it to 256 bytes.
    pub(super) fn new(bytes: u64) -> Result<Reserved, String> {
        // SAFETY: a new allocation.
        unsafe { result::malloc_sync(bytes as usize) }.map(Reserved).map_err(text)
    }

    pub(super) fn start(&self) -> u64 {
        self.0
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: it is owned, and all that used it is done.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// A kernel that can be launched.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) function: sys::CUfunction,
    pub(super) launch: Launch,
}

// SAFETY: handles of a context that lives as long as its `Cuda`; the driver may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

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
    // Before the streams: ended or aborted first.
    nccl: Option<Nccl>,
    streams: Streams,
}

/// A stream for copies, with the pinned memory that they go through.
struct Copies {
    stream: Stream,
    staging: Pinned,
}

/// The kernels of an artifact on a GPU.
pub struct Cuda {
    kernels: BTreeMap<KernelId, Loaded>,
    issue: Mutex<Issue>,
    /// Of the stream of kernels, and beside it.
    copies: [Mutex<Copies>; 2],
    allocations: Vec<u64>,
    /// Memory of the host that it copies from and to by itself.
    lent: Vec<Range<u64>>,
    // Last, as all else lives in it.
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
        use sys::CUdevice_attribute_enum as Attribute;
        let device = result::device::get(number).map_err(text)?;
        // SAFETY: the device exists.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) }.map_err(text);
        let [major, minor] = [Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR];
        fits(arch, [attribute(major)?, attribute(minor)?])?;
        // SAFETY: the device exists.
        let context = Context { device, handle: unsafe { result::primary_ctx::retain(device) }.map_err(text)? };
        context.enter()?;
        let copies = || Ok::<_, String>(Mutex::new(Copies { stream: Stream::new()?, staging: Pinned::new(STAGING)? }));
        let (copies, streams) = ([copies()?, copies()?], Streams::new()?);
        let (mut kernels, version) = (BTreeMap::new(), version().map_err(text)?);
        for (id, entry) in artifact.launched() {
            let failed = |e: String| format!("kernel {}: {e}", entry.name);
            let ptx = artifact.ptx(entry).map_err(|e| failed(e.to_string()))?;
            let plain = |s: &str| CString::new(s).map_err(|e| failed(e.to_string()));
            let launch = entry.launch.clone().ok_or_else(|| failed("nothing about its launch".into()))?;
            takes(version, &launch).map_err(failed)?;
            kernels.insert(id, Loaded { function: function(&plain(&ptx)?, &plain(&entry.name)?, &launch).map_err(failed)?, launch });
        }
        let issue = Mutex::new(Issue { graphs: Graphs::default(), nccl: None, streams });
        Ok(Cuda { kernels, issue, copies, allocations: vec![], lent: vec![], context })
    }

    /// Connects it to the GPUs of the other ranks, which all have the same id; then it exchanges with them by itself.
    ///
    /// # Errors
    /// No NCCL; what it says; ranks that do not come within the time.
    pub fn connect(&self, artifact: &Artifact, rank: u64, id: &[u8], limit: Duration) -> Result<(), DeviceError> {
        let connect = || {
            nccl::probe()?;
            self.context.enter()?;
            let mut issue = self.issue();
            issue.nccl = Some(Nccl::new(&artifact.job, rank, id, limit, issue.streams.compute())?);
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

/// Loads a module for its one kernel. It stays loaded as long as the context.
fn function(ptx: &CString, name: &CString, launch: &Launch) -> Result<sys::CUfunction, String> {
    // SAFETY: the text ends with a zero byte; the driver copies it.
    let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }.map_err(text)?;
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, name.clone()) }.map_err(text)?;
    if launch.shared_bytes > 0 {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(function, attribute, launch.shared_bytes as i32) }.map_err(text)?;
    }
    Ok(function)
}

/// The driver's bytes of a tensor map. Its memory is read in pieces of 256 bytes, as neighbouring boxes share them.
fn encoded(map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String> {
    let dtype = match map.dtype {
        DType::F32 if map.tf32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::I32 | DType::Bool => unreachable!("invariant: tensor maps are of floats"),
    };
    let swizzle = match map.swizzle {
        Swizzle::B128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let (base, sizes) = map.placed(address);
    let steps = vec![1; sizes.len()];
    let mut out = sys::CUtensorMap { opaque: [0; MAP_BYTES / 8] };
    // SAFETY: the lists are as long as the driver expects for so many dims, and `out` is writable; the memory is not touched.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut out,
            dtype,
            sizes.len() as u32,
            base as *mut c_void,
            sizes.as_ptr(),
            map.strides.as_ptr(),
            map.extents.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|e| format!("a tensor map of sizes {sizes:?}, strides {:?}, in boxes of {:?}: {}", map.strides, map.extents, text(e)))?;
    let mut bytes = [0; MAP_BYTES];
    bytes.chunks_exact_mut(8).zip(out.opaque).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    Ok(bytes)
}

impl Card for Cuda {
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
            // SAFETY: places lie within their arenas; the pinned memory is left alone until the copy has been waited for.
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

    fn run(&self, work: &[Work], natively: Option<&Natively>) -> Result<(), String> {
        self.context.enter()?;
        self.settle()?;
        let Issue { graphs, nccl, streams } = &mut *self.issue();
        graphs.run(work, &On { kernels: &self.kernels, nccl: nccl.as_ref(), natively }, streams)
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
        // NCCL waits for graphs with calls of a communicator before that ends, and freeing what they copy from waits for their copies.
        let data = issue.graphs.end();
        // Communicators that are not ended in order are aborted, and with them what is under way.
        match (issue.nccl.take(), through) {
            (Some(nccl), Ok(())) => drop(nccl.finish()),
            (nccl, _) => drop(nccl),
        }
        // After an error there may be something left, which nothing holds any more.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_run_on_later_gpus_unless_they_are_for_one_alone() {
        assert_eq!(fits("sm_80", [8, 0]), Ok(()));
        assert_eq!(fits("sm_80", [9, 0]), Ok(()));
        assert_eq!(fits("sm_90a", [9, 0]), Ok(()));
        assert_eq!(fits("sm_80", [7, 5]), Err("the GPU has compute capability 7.5, kernels for sm_80 do not run on it".into()));
        assert_eq!(fits("sm_90a", [10, 0]), Err("the GPU has compute capability 10.0, kernels for sm_90a do not run on it".into()));
    }

    #[test]
    fn many_parameters_need_a_newer_driver() {
        let parameters = |count| vec![ir::launch::Parameter::Scratch; count];
        let with = |count| Launch { grid: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters: parameters(count) };
        assert_eq!([(12_000, 512), (12_010, 513)].map(|(version, count)| takes(version, &with(count))), [Ok(()), Ok(())]);
        let refused = "the NVIDIA driver supports CUDA 12.0, a kernel with 4104 bytes of parameters needs 12.1 or newer";
        assert_eq!(takes(12_000, &with(513)), Err(refused.into()));
    }

    #[test]
    fn what_is_missing_is_said_in_one_line() {
        assert_eq!(Unavailable::Old(11_080).to_string(), "the NVIDIA driver supports CUDA 11.8, mcc needs 12.0 or newer");
        // Whatever this machine has, asking is no panic.
        assert!(probe().map_or_else(|e| !e.to_string().contains('\n'), |count| count > 0));
    }
}
