//! The C interface of the driver: what mcc looks up in it, under the names of its header. Pointers must be valid as
//! CUDA demands; handles and addresses are checked.
#![expect(clippy::missing_safety_doc, reason = "the header's functions are documented by NVIDIA")]

use crate::objects::{Context, Event, GREATEST_PRIORITY, HostMemoryOwner, MEMORY, Recorded};
use crate::state::{CURRENT, Cuda, State, answer, lock, notify, refuse, told, wait};
use crate::tasks::Op;
use crate::touched::AccessMap;
use cudarc::driver::sys::{self, CUresult};
use emulator::{Device, Options, Swizzle, TensorMap};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

const GOOD: CUresult = CUresult::CUDA_SUCCESS;

pub(crate) fn put<T>(to: *mut T, value: T) -> Cuda {
    if to.is_null() {
        return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "a result has no place");
    }
    // SAFETY: the caller's pointers are valid.
    unsafe { to.write(value) };
    Ok(())
}

/// A handle as the pointer that the caller sees.
fn pointer<T>(handle: u64) -> *mut T {
    handle as *mut T
}

fn text(of: *const c_char) -> Cuda<String> {
    if of.is_null() {
        return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "no text");
    }
    // SAFETY: the caller's texts end with a zero byte.
    Ok(unsafe { CStr::from_ptr(of) }.to_string_lossy().into_owned())
}

fn list<T: Copy>(start: *const T, count: usize) -> Vec<T> {
    // SAFETY: the caller's lists are as long as it says.
    unsafe { std::slice::from_raw_parts(start, count) }.to_vec()
}

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $ty:ty),*) |$state:ident| $body:block)*) => {
        $(
            /// As `cuda.h` declares it, for emulated GPUs.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $ty),*) -> CUresult {
                answer(stringify!($name), GOOD, |$state: &mut State| $body)
            }
        )*
    };
}

functions! {
    fn cuInit(flags: c_uint) |state| {
        if flags != 0 {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "flags must be 0");
        }
        state.initialised = true;
        if state.settings.gpus > 0 { Ok(()) } else { refuse(CUresult::CUDA_ERROR_NO_DEVICE, "") }
    }
    fn cuDriverGetVersion(version: *mut c_int) |state| { put(version, state.settings.driver) }
    fn cuDeviceGetCount(count: *mut c_int) |state| { state.started()?; put(count, state.settings.gpus) }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) |state| { state.has(ordinal)?; put(device, ordinal) }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) |state| {
        state.has(device)?;
        let [major, minor] = state.settings.capability;
        let text = format!("emulated GPU {major}.{minor}");
        let kept = text.bytes().take((length - 1).max(0) as usize).chain([0]);
        // SAFETY: there is room for so many bytes.
        kept.enumerate().for_each(|(k, b)| unsafe { name.add(k).write(b as c_char) });
        Ok(())
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) |state| {
        state.has(device)?;
        match attribute {
            16 => put(value, state.settings.multiprocessors),
            75 => put(value, state.settings.capability[0]),
            76 => put(value, state.settings.capability[1]),
            other => refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("attribute {other} of a GPU is not modelled")),
        }
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) |state| { state.has(device)?; put(bytes, MEMORY as usize) }
    fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: c_int) |state| {
        state.has(device)?;
        let handle = match state.primary.get(&device) {
            Some(handle) => *handle,
            None => {
                let handle = state.handle();
                let memory = Device::new(Options { threads: state.settings.threads, global_races: state.settings.watches, ..Options::default() });
                let new = Context { ordinal: device, uses: 0, device: memory, allocations: BTreeMap::new(), touched: AccessMap::default(), failed: None };
                state.contexts.insert(handle, new);
                state.primary.insert(device, handle);
                handle
            }
        };
        state.context(handle).uses += 1;
        put(context, pointer(handle))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) |state| { state.has(device)?; state.release(device) }
    fn cuCtxSetCurrent(context: sys::CUcontext) |state| {
        state.started()?;
        if !context.is_null() && !state.contexts.contains_key(&(context as u64)) {
            return refuse(CUresult::CUDA_ERROR_INVALID_CONTEXT, format!("there is no context {context:?}, or not any more"));
        }
        CURRENT.set(context as u64);
        Ok(())
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) |state| { let new = state.allocate(bytes as u64)?; put(address, new) }
    fn cuMemFree_v2(address: u64) |state| { state.free(address) }
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) |state| {
        if flags != 0 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("pinned memory with the flags {flags:#x} is not modelled"));
        }
        let new = state.allocate_host(bytes as u64)?;
        put(address, pointer(new))
    }
    fn cuMemFreeHost(address: *mut c_void) |state| { state.free_host(address as u64, HostMemoryOwner::ByDriver) }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) |state| {
        if flags != 0 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("registering with the flags {flags:#x} is not modelled"));
        }
        state.register(address as u64, bytes as u64)
    }
    fn cuMemHostUnregister(address: *mut c_void) |state| { state.free_host(address as u64, HostMemoryOwner::ByProgram) }
    fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void) |state| {
        let new = state.load(&text(image.cast())?)?;
        put(module, pointer(new))
    }
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char) |state| {
        let new = state.function(module as u64, &text(name)?)?;
        put(function, pointer(new))
    }
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: sys::CUfunction) |state| {
        let function = state.launchable(function as u64)?;
        match attribute {
            // Kernels are not assembled, so there is no local memory and the registers are as many as the block's
            // threads can have.
            3 => put(value, 0),
            4 => put(value, function.registers()),
            _ => refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("attribute {attribute} of a function is not modelled")),
        }
    }
    fn cuFuncSetAttribute(function: sys::CUfunction, attribute: c_uint, value: c_int) |state| {
        let most = state.most_shared();
        let function = state.launchable(function as u64)?;
        if attribute != 8 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("attribute {attribute} of a function is not modelled"));
        }
        if value < 0 || value as u64 + function.shared_bytes > most {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("{value} bytes of shared memory are more than a block can have"));
        }
        function.most_shared = value as u64;
        Ok(())
    }
    fn cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint) |state| { put(stream, pointer(state.new_stream(flags)?)) }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |state| {
        state.current()?;
        put(least, 0)?;
        put(greatest, GREATEST_PRIORITY)
    }
    // Priorities say which kernel gets room first, and do not change results.
    fn cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int) |state| {
        if !(GREATEST_PRIORITY..=0).contains(&priority) {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("a priority of {priority}, not {GREATEST_PRIORITY} to 0"));
        }
        put(stream, pointer(state.new_stream(flags)?))
    }
    fn cuStreamDestroy_v2(stream: sys::CUstream) |state| {
        if state.stream(stream as u64)?.capture.is_some() {
            return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream captures");
        }
        state.streams.remove(&(stream as u64));
        Ok(())
    }
    fn cuStreamQuery(stream: sys::CUstream) |state| {
        match state.waited_for(stream as u64)? {
            true => Ok(()),
            // A stream that still works is no mistake, so the reason is empty.
            false => refuse(CUresult::CUDA_ERROR_NOT_READY, ""),
        }
    }
    fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint) |state| {
        if flags != 0 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "waiting with flags is not modelled");
        }
        state.hold(stream as u64, event as u64)
    }
    fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: c_uint) |state| { state.begin_capture(stream as u64, mode) }
    fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph) |state| {
        put(graph, pointer(0))?;
        let new = state.end_capture(stream as u64)?;
        put(graph, pointer(new))
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: sys::CUstream, status: *mut c_uint, id: *mut u64, graph: *mut sys::CUgraph, nodes: *mut *const sys::CUgraphNode, count: *mut usize
    ) |state| {
        if !graph.is_null() {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "the graph of a capture under way is not modelled");
        }
        let Some((capture, after)) = state.stream(stream as u64)?.capture.clone() else { return put(status, 0) };
        put(status, 1)?;
        if !id.is_null() {
            put(id, capture)?;
        }
        let asked = &mut state.capture(capture).asked;
        *asked = after.into_boxed_slice();
        let (start, length) = (asked.as_ptr(), asked.len());
        if !nodes.is_null() {
            put(nodes, start.cast())?;
        }
        if count.is_null() { Ok(()) } else { put(count, length) }
    }
    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint) |state| {
        let context = state.current()?;
        if flags != 2 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "events that take times are not modelled");
        }
        let handle = state.handle();
        state.events.insert(handle, Event { context, last: Recorded::Never });
        put(event, pointer(handle))
    }
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream) |state| { state.record(event as u64, stream as u64) }
    fn cuEventDestroy_v2(event: sys::CUevent) |state| {
        state.event(event as u64)?;
        state.events.remove(&(event as u64));
        Ok(())
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: sys::CUstream) |state| {
        state.copied(to, from as u64, bytes as u64)?;
        state.issue(stream as u64, Op::ToDevice { to, from: from as u64, bytes: bytes as u64 })
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: sys::CUstream) |state| {
        state.copied(from, to as u64, bytes as u64)?;
        state.issue(stream as u64, Op::ToHost { to: to as u64, from, bytes: bytes as u64 })
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: sys::CUstream) |state| {
        let (context, bytes) = (state.current()?, bytes as u64);
        state.on_device(context, to, bytes)?;
        state.on_device(context, from, bytes)?;
        if from < to + bytes && to < from + bytes {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "a copy to a range that overlaps what it reads");
        }
        state.issue(stream as u64, Op::Copy { to, from, bytes })
    }
    fn cuMemsetD8Async(address: u64, element: u8, count: usize, stream: sys::CUstream) |state| {
        state.fill(address, &element.to_le_bytes(), count, stream)
    }
    fn cuMemsetD16Async(address: u64, element: u16, count: usize, stream: sys::CUstream) |state| {
        state.fill(address, &element.to_le_bytes(), count, stream)
    }
    fn cuMemsetD32Async(address: u64, element: u32, count: usize, stream: sys::CUstream) |state| {
        state.fill(address, &element.to_le_bytes(), count, stream)
    }
    fn cuLaunchKernel(
        function: sys::CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: sys::CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) |state| {
        let op = state.launch(function as u64, [gx, gy, gz], [bx, by, bz], shared, parameters, extra)?;
        state.issue(stream as u64, op)
    }
    fn cuLaunchHostFunc(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void) |state| {
        let Some(function) = function else {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "no function");
        };
        state.issue(stream as u64, Op::Call { function: function as usize as u64, data: data as u64 })
    }
    fn cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: u64) |state| {
        let new = state.instantiate(graph as u64, flags)?;
        put(exec, pointer(new))
    }
    fn cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream) |state| { state.launch_graph(exec as u64, stream as u64) }
    fn cuGraphExecDestroy(exec: sys::CUgraphExec) |state| {
        state.exec(exec as u64)?;
        state.execs.remove(&(exec as u64));
        Ok(())
    }
    fn cuGraphDestroy(graph: sys::CUgraph) |state| {
        state.current()?;
        match state.graphs.remove(&(graph as u64)) {
            Some(_) => Ok(()),
            None => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no graph {graph:?}, or not any more")),
        }
    }
    fn cuGraphExecKernelNodeSetParams_v2(exec: sys::CUgraphExec, node: sys::CUgraphNode, new: *const sys::CUDA_KERNEL_NODE_PARAMS) |state| {
        // SAFETY: the caller's pointers are valid.
        let p = unsafe { new.read() };
        let (grid, threads) = ([p.gridDimX, p.gridDimY, p.gridDimZ], [p.blockDimX, p.blockDimY, p.blockDimZ]);
        let op = state.launch(p.func as u64, grid, threads, p.sharedMemBytes, p.kernelParams, p.extra)?;
        let exec = state.exec(exec as u64)?;
        let Some(found) = exec.nodes.get_mut(&(node as u64)) else {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("{node:?} is no node of the graph"));
        };
        match (&found.op, &op) {
            (Op::Launch { function: old, .. }, Op::Launch { function: new, .. }) if old == new => found.op = op,
            (Op::Launch { .. }, _) => return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "the node launches another function"),
            _ => return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "the node launches no kernel"),
        }
        Ok(())
    }
    fn cuTensorMapEncodeTiled(
        map: *mut sys::CUtensorMap, dtype: c_uint, dims: u32, address: *mut c_void, sizes: *const u64, strides: *const u64, extents: *const u32,
        steps: *const u32, interleave: c_uint, swizzle: c_uint, _l2: c_uint, fill: c_uint
    ) |state| {
        if state.settings.capability[0] < 9 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "GPUs have tensor maps from 9.0 on");
        }
        let no = |why: String| refuse(CUresult::CUDA_ERROR_INVALID_VALUE, why);
        if !(map as u64).is_multiple_of(64) {
            return no(format!("the map's place {map:?} is no multiple of 64"));
        }
        if !(1..=5).contains(&dims) {
            return no(format!("{dims} dims"));
        }
        let count = dims as usize;
        // These are the header's types of 16 and 32 bits: unsigned, signed, half, single, bfloat16, and single that
        // is rounded to tf32.
        let element = match dtype { 1 | 6 | 9 => 2, 2 | 3 | 7 | 11 => 4, other => return no(format!("a map of type {other} is not modelled")) };
        let swizzle = match swizzle { 0 => Swizzle::None, 1 => Swizzle::B32, 2 => Swizzle::B64, 3 => Swizzle::B128, other => return no(format!("swizzle {other}")) };
        if interleave != 0 || fill != 0 || list(steps, count).iter().any(|s| *s != 1) {
            return no("maps that interleave, skip or fill with NaN are not modelled".into());
        }
        let (size, stride) = (list(sizes, count), list(strides, count - 1));
        if stride.iter().zip(&size).any(|(stride, size)| stride < size) {
            return no(format!("strides {stride:?} do not step over sizes {size:?}"));
        }
        let encoded = TensorMap { base: address as u64, element, size, stride, extent: list(extents, count), swizzle, tf32: dtype == 11 }.encode().or_else(|why| refuse(CUresult::CUDA_ERROR_INVALID_VALUE, why))?;
        let mut words = [0; 16];
        words.iter_mut().zip(encoded.chunks_exact(8)).for_each(|(w, b)| *w = b.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)));
        put(map, sys::CUtensorMap { opaque: words })
    }
}

/// Waits until all work on a stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: sys::CUstream) -> CUresult {
    let mut state = lock();
    let outcome = loop {
        match state.waited_for(stream as u64) {
            Ok(true) => break Ok(()),
            Ok(false) => {
                notify();
                state = wait(state);
            }
            Err(e) => break Err(e),
        }
    };
    drop(state);
    told("cuStreamSynchronize", GOOD, outcome)
}
