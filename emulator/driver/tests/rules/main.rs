//! Each rule is broken once, and that must be noticed: by the right error, and in words. Beside it stands what is
//! right.

mod exchanges;
mod gpu;
mod streams;

use cudarc::driver::sys::CUresult;
use emulated_driver::driver::*;
use emulated_driver::last_words;
use gpu::{GOOD, Gpu, TWICE, refused};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

#[test]
fn a_thread_has_a_context_of_its_own() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    std::thread::spawn(move || refused(unsafe { cuStreamQuery(stream as _) }, CUresult::CUDA_ERROR_INVALID_CONTEXT, "no context is current"))
        .join()
        .expect("no panic");
}

#[test]
fn handles_that_are_gone_or_never_were_are_known() {
    let gpu = Gpu::new();
    let (stream, event) = (gpu.stream(), gpu.event());
    unsafe {
        assert_eq!(cuStreamDestroy_v2(stream as _), GOOD);
        assert_eq!(cuEventDestroy_v2(event as _), GOOD);
        refused(cuStreamQuery(stream as _), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no stream");
        refused(cuStreamDestroy_v2(stream as _), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no stream");
        refused(cuEventRecord(event as _, gpu.stream() as _), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no event");
        refused(cuGraphLaunch(0x77 as _, gpu.stream() as _), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no instantiated graph");
        refused(cuGraphDestroy(0x77 as _), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no graph");
        refused(cuStreamQuery(null_mut()), CUresult::CUDA_ERROR_NOT_SUPPORTED, "the default stream");
    }
}

#[test]
fn what_belongs_to_another_context_is_known() {
    let one = Gpu::new();
    let stream = one.stream();
    let _two = Gpu::new();
    refused(unsafe { cuStreamQuery(stream as _) }, CUresult::CUDA_ERROR_INVALID_HANDLE, "of another context");
    one.enter();
    assert_eq!(unsafe { cuStreamQuery(stream as _) }, GOOD);
}

#[test]
fn copies_and_fills_stay_within_allocations() {
    let gpu = Gpu::new();
    let (at, host, stream) = (gpu.allocate(64), gpu.pinned(64), gpu.stream());
    unsafe {
        refused(cuMemcpyHtoDAsync_v2(at + 60, host.cast(), 8, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "do not lie within an allocation");
        refused(cuMemsetD32Async(at, 0, 17, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "do not lie within an allocation");
        refused(cuMemsetD32Async(at + 2, 0, 1, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "no multiple of 4");
        assert_eq!(cuMemFree_v2(at), GOOD);
        refused(cuMemcpyDtoHAsync_v2(host.cast(), at, 8, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "do not lie within an allocation");
        refused(cuMemFree_v2(at), CUresult::CUDA_ERROR_INVALID_VALUE, "is no allocation");
    }
}

#[test]
fn memory_is_not_freed_under_work() {
    let gpu = Gpu::new();
    let (at, host, stream) = (gpu.allocate(64), gpu.pinned(64), gpu.stream());
    unsafe {
        assert_eq!(cuMemcpyHtoDAsync_v2(at, host.cast(), 64, stream as _), GOOD);
        refused(cuMemFreeHost(host.cast()), CUresult::CUDA_ERROR_INVALID_VALUE, "freed while a copy that uses it is under way");
        refused(cuMemFree_v2(at), CUresult::CUDA_ERROR_INVALID_VALUE, "freed while work is under way");
        assert_eq!(cuStreamSynchronize(stream as _), GOOD);
        assert_eq!([cuMemFreeHost(host.cast()), cuMemFree_v2(at)], [GOOD, GOOD]);
    }
}

/// A host function runs between a copy to the host and one back: neither early nor late.
#[test]
fn functions_of_the_host_have_their_turn_on_a_stream() {
    unsafe extern "C" fn increase(byte: *mut c_void) {
        unsafe { *byte.cast::<u8>() += 1 };
    }
    let gpu = Gpu::new();
    let (at, host, stream) = (gpu.allocate(1), gpu.pinned(1), gpu.stream());
    unsafe {
        refused(cuLaunchHostFunc(stream as _, None, host.cast()), CUresult::CUDA_ERROR_INVALID_VALUE, "no function");
        *host = 7;
        assert_eq!(cuMemsetD8Async(at, 40, 1, stream as _), GOOD);
        for _ in 0..2 {
            assert_eq!(cuMemcpyDtoHAsync_v2(host.cast(), at, 1, stream as _), GOOD);
            assert_eq!(cuLaunchHostFunc(stream as _, Some(increase), host.cast()), GOOD);
            assert_eq!(cuMemcpyHtoDAsync_v2(at, host.cast(), 1, stream as _), GOOD);
        }
        assert_eq!(*host, 7, "nobody waited for it");
        assert_eq!((cuStreamSynchronize(stream as _), *host), (GOOD, 42));
        assert_eq!([cuMemFreeHost(host.cast()), cuMemFree_v2(at)], [GOOD, GOOD]);
    }
}

#[test]
fn copies_are_of_pinned_memory_and_read_it_when_they_are_waited_for() {
    let gpu = Gpu::new();
    let (at, host, stream) = (gpu.allocate(64), gpu.pinned(64), gpu.stream());
    let pageable = [0u8; 64];
    unsafe {
        refused(cuMemcpyHtoDAsync_v2(at, pageable.as_ptr().cast(), 64, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "not pinned");
        host.write_bytes(1, 64);
        assert_eq!(cuMemcpyHtoDAsync_v2(at, host.cast(), 64, stream as _), GOOD);
        // This write is too early, since nothing has waited for the copy.
        host.write_bytes(2, 64);
    }
    assert_eq!(gpu.read(at, 4, stream), [2; 4]);
}

#[test]
fn memory_of_the_program_is_registered_once_and_until_nothing_uses_it() {
    let gpu = Gpu::new();
    let (at, stream) = (gpu.allocate(64), gpu.stream());
    let mut own = [3u8; 64];
    let start = own.as_mut_ptr();
    unsafe {
        assert_eq!(cuMemHostRegister_v2(start.cast(), 64, 0), GOOD);
        let again = cuMemHostRegister_v2(start.add(32).cast(), 8, 0);
        refused(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "some are pinned already");
        assert_eq!(cuMemcpyHtoDAsync_v2(at, start.cast(), 64, stream as _), GOOD);
        refused(cuMemHostUnregister(start.cast()), CUresult::CUDA_ERROR_INVALID_VALUE, "while a copy that uses it is under way");
        refused(cuMemFreeHost(start.cast()), CUresult::CUDA_ERROR_INVALID_VALUE, "is no pinned memory");
        assert_eq!(gpu.read(at, 2, stream), [3; 2]);
        assert_eq!(cuMemHostUnregister(start.cast()), GOOD);
        refused(cuMemHostUnregister(start.cast()), CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "is no registered memory");
    }
}

#[test]
fn copies_on_the_gpu_do_not_overlap() {
    let gpu = Gpu::new();
    let (at, stream) = (gpu.allocate(64), gpu.stream());
    unsafe {
        assert_eq!(cuMemsetD8Async(at, 5, 16, stream as _), GOOD);
        assert_eq!(cuMemcpyDtoDAsync_v2(at + 16, at, 16, stream as _), GOOD);
        refused(cuMemcpyDtoDAsync_v2(at + 8, at, 16, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "overlaps what it reads");
        refused(cuMemcpyDtoDAsync_v2(at + 56, at, 16, stream as _), CUresult::CUDA_ERROR_INVALID_VALUE, "do not lie within an allocation");
    }
    assert_eq!(gpu.read(at + 16, 2, stream), [5; 2]);
}

#[test]
fn a_kernel_outside_of_memory_ends_all_that_its_context_does() {
    let gpu = Gpu::new();
    let (f, stream) = (gpu.function(TWICE, "twice"), gpu.stream());
    assert_eq!(gpu.launch(f, 32, 0, &0x1234_5600u64.to_le_bytes(), stream), GOOD);
    unsafe {
        assert_eq!(cuStreamSynchronize(stream as _), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(cuStreamQuery(stream as _), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(cuMemAlloc_v2(&mut 0, 64), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
}

#[test]
fn launches_fit_their_kernels() {
    let gpu = Gpu::new();
    let (f, at, stream) = (gpu.function(TWICE, "twice"), gpu.allocate(4096), gpu.stream());
    let p = at.to_le_bytes();
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    refused(gpu.launch(f, 2048, 0, &p, stream), invalid, "where there may be 1024");
    refused(gpu.launch(f, 32, 49_153, &p, stream), invalid, "dynamic shared memory, where 49152 are allowed");
    assert_eq!(unsafe { cuFuncSetAttribute(f as _, 8, 100_000) }, GOOD);
    assert_eq!(gpu.launch(f, 32, 100_000, &p, stream), GOOD);
    refused(gpu.launch(f, 32, 100_001, &p, stream), invalid, "where 100000 are allowed");
    refused(unsafe { cuFuncSetAttribute(f as _, 8, 300_000) }, invalid, "more than a block can have");
    let mut number = -1;
    assert_eq!(unsafe { cuFuncGetAttribute(&raw mut number, 4, f as _) }, GOOD);
    assert_eq!(number, 64, "registers of 1024 threads");
    assert_eq!(unsafe { cuFuncGetAttribute(&raw mut number, 3, f as _) }, GOOD);
    assert_eq!(number, 0);
    refused(unsafe { cuFuncGetAttribute(&raw mut number, 7, f as _) }, CUresult::CUDA_ERROR_NOT_SUPPORTED, "attribute 7");
    let stranger = stream;
    refused(gpu.launch(stranger, 32, 0, &p, stream), CUresult::CUDA_ERROR_INVALID_HANDLE, "there is no function");
}

#[test]
fn modules_fit_the_gpu_and_the_driver() {
    let gpu = Gpu::new();
    let load = |from: &str, to: &str| gpu.load(&TWICE.replace(from, to)).map(drop).expect_err("it does not fit");
    refused(load("sm_80", "sm_100"), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, "does not run on a GPU of 9.0");
    refused(load("sm_80", "sm_80a"), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, "does not run on a GPU of 9.0");
    refused(load(".version 8.0", ".version 8.8"), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "too new for the driver");
    refused(load("mul.wide", "mull.wide"), CUresult::CUDA_ERROR_INVALID_PTX, "line");
    let many = TWICE.replace(".param .u64 p", ".param .u64 p, .param .align 8 .b8 more[4096]");
    refused(
        gpu.load(&many).map(drop).expect_err("too many"),
        CUresult::CUDA_ERROR_INVALID_PTX,
        "4104 bytes of parameters, for which PTX 8.1 is needed",
    );
    assert!(gpu.load(&many.replace(".version 8.0", ".version 8.1")).is_ok());
    let module = gpu.load(TWICE).expect("it fits");
    let mut f = null_mut();
    refused(unsafe { cuModuleGetFunction(&mut f, module as _, c"thrice".as_ptr()) }, CUresult::CUDA_ERROR_NOT_FOUND, "no kernel thrice");
}

/// Fills memory on one stream and copies it on another, which waits for the first or does not. Returns the copied
/// bytes, and the result of waiting for the first.
fn across_streams(waits: bool) -> (Vec<u8>, CUresult) {
    let gpu = Gpu::new();
    let (at, host, event) = (gpu.allocate(4), gpu.pinned(4), gpu.event());
    let [one, two] = [gpu.stream(), gpu.stream()];
    unsafe {
        assert_eq!(cuMemsetD8Async(at, 7, 4, one as _), GOOD);
        assert_eq!(cuEventRecord(event as _, one as _), GOOD);
        if waits {
            assert_eq!(cuStreamWaitEvent(two as _, event as _, 0), GOOD);
        }
        assert_eq!(cuMemcpyDtoHAsync_v2(host.cast(), at, 4, two as _), GOOD);
        assert_eq!(cuStreamSynchronize(two as _), GOOD);
        let got = std::slice::from_raw_parts(host, 4).to_vec();
        (got, cuStreamSynchronize(one as _))
    }
}

#[test]
fn what_is_not_waited_for_is_not_there() {
    assert_eq!(across_streams(true), (vec![7; 4], GOOD));
    // The fill comes late and writes what the copy has read, which is a race.
    assert_eq!(across_streams(false), (vec![0xFF; 4], CUresult::CUDA_ERROR_LAUNCH_FAILED));
}

#[test]
fn events_are_recorded_before_they_are_waited_for() {
    let gpu = Gpu::new();
    let wait = unsafe { cuStreamWaitEvent(gpu.stream() as _, gpu.event() as _, 0) };
    refused(wait, CUresult::CUDA_ERROR_INVALID_VALUE, "was never recorded");
}

/// Calls that may synchronise are refused in a capture, which is then invalid.
#[test]
fn a_thread_that_captures_does_not_synchronise() {
    let gpu = Gpu::new();
    let other = gpu.stream();
    type Call = fn(u64, u64) -> CUresult;
    let calls: [(&str, Call); 6] = [
        ("allocate", |_, _| unsafe { cuMemAlloc_v2(&mut 0, 64) }),
        ("pin", |_, _| unsafe { cuMemHostAlloc(&mut null_mut(), 64, 0) }),
        ("load", |_, _| unsafe { cuModuleLoadData(&mut null_mut(), c".version 8.0".as_ptr().cast()) }),
        ("wait for it", |stream, _| unsafe { cuStreamSynchronize(stream as _) }),
        ("ask for it", |stream, _| unsafe { cuStreamQuery(stream as _) }),
        ("wait for another", |_, other| unsafe { cuStreamSynchronize(other as _) }),
    ];
    for (what, call) in calls {
        let stream = gpu.stream();
        gpu.begin(stream);
        assert_eq!(call(stream, other), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "{what}: {}", last_words());
        assert_eq!(gpu.end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{what}");
        // The capture has ended.
        assert_eq!(unsafe { cuStreamQuery(stream as _) }, GOOD, "{what}");
    }
}

#[test]
fn streams_of_a_capture_are_joined_again() {
    let gpu = Gpu::new();
    let (at, [one, two], [fork, join]) = (gpu.allocate(4), [gpu.stream(), gpu.stream()], [gpu.event(), gpu.event()]);
    for joins in [false, true] {
        gpu.begin(one);
        unsafe {
            assert_eq!(cuEventRecord(fork as _, one as _), GOOD);
            assert_eq!(cuStreamWaitEvent(two as _, fork as _, 0), GOOD);
            assert_eq!(cuMemsetD8Async(at, 3, 4, two as _), GOOD);
            assert_eq!(cuEventRecord(join as _, two as _), GOOD);
            refused(cuStreamEndCapture(two as _, &mut null_mut()), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "begun on another stream");
            if joins {
                assert_eq!(cuStreamWaitEvent(one as _, join as _, 0), GOOD);
            }
        }
        let ended = gpu.end(one);
        if joins {
            let exec = gpu.instantiate(ended.expect("joined"));
            assert_eq!(gpu.read(at, 4, one), [0xFF; 4]);
            assert_eq!(unsafe { cuGraphLaunch(exec as _, one as _) }, GOOD);
            assert_eq!(gpu.read(at, 4, one), [3; 4]);
        } else {
            assert_eq!(ended, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        }
    }
}

#[test]
fn a_capture_and_what_is_outside_of_it_do_not_wait_for_each_other() {
    let gpu = Gpu::new();
    let ([one, two], [outside, inside]) = ([gpu.stream(), gpu.stream()], [gpu.event(), gpu.event()]);
    unsafe {
        assert_eq!(cuEventRecord(outside as _, two as _), GOOD);
        gpu.begin(one);
        let waits = cuStreamWaitEvent(one as _, outside as _, 0);
        refused(waits, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "recorded outside of the capture");
        assert_eq!(gpu.end(one), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        gpu.begin(one);
        assert_eq!(cuEventRecord(inside as _, one as _), GOOD);
        assert!(gpu.end(one).is_ok());
        refused(cuStreamWaitEvent(two as _, inside as _, 0), CUresult::CUDA_ERROR_CAPTURED_EVENT, "which has ended");
        gpu.begin(one);
        assert_eq!(cuEventRecord(inside as _, one as _), GOOD);
        gpu.begin(two);
        refused(cuStreamWaitEvent(two as _, inside as _, 0), CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE, "two captures are joined");
        refused(cuStreamBeginCapture_v2(two as _, 1), CUresult::CUDA_ERROR_ILLEGAL_STATE, "captures already");
        refused(cuStreamDestroy_v2(two as _), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "captures");
        let context = gpu.context as usize;
        let other = std::thread::spawn(move || {
            assert_eq!(cuCtxSetCurrent(context as _), GOOD);
            cuStreamEndCapture(one as _, &mut null_mut())
        });
        assert_eq!(other.join().expect("no panic"), CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        assert!(gpu.end(one).is_ok() && gpu.end(two).is_ok());
    }
}

#[test]
fn parameters_of_a_graph_are_replaced_and_its_launches_follow_each_other() {
    let gpu = Gpu::new();
    let (f, other, stream) = (gpu.function(TWICE, "twice"), gpu.function(TWICE, "twice"), gpu.stream());
    let [a, b] = [gpu.allocate(128), gpu.allocate(128)];
    for at in [a, b] {
        assert_eq!(unsafe { cuMemsetD32Async(at, 1, 32, stream as _) }, GOOD);
    }
    gpu.begin(stream);
    assert_eq!(gpu.launch(f, 32, 0, &a.to_le_bytes(), stream), GOOD);
    let (mut status, mut nodes, mut count) = (0, null(), 0);
    let asked = unsafe { cuStreamGetCaptureInfo_v2(stream as _, &mut status, null_mut(), null_mut(), &mut nodes, &mut count) };
    assert_eq!((asked, status, count), (GOOD, 1, 1));
    let node = unsafe { *nodes };
    let exec = gpu.instantiate(gpu.end(stream).expect("captured"));
    let launch = || assert_eq!(unsafe { cuGraphLaunch(exec as _, stream as _) }, GOOD);
    launch();
    launch();
    let replace = |node, f, p: &[u8; 8]| gpu.replace(exec, node, f, p);
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    refused(replace(node, other, &b.to_le_bytes()), invalid, "launches another function");
    refused(replace(0x77 as _, f, &b.to_le_bytes()), invalid, "no node of the graph");
    // Launches that were made before the replacement keep their parameters.
    assert_eq!(replace(node, f, &b.to_le_bytes()), GOOD);
    launch();
    assert_eq!([gpu.read(a, 1, stream), gpu.read(b, 1, stream)], [[4], [2]]);
}

#[test]
fn what_a_graph_copies_from_outlives_it() {
    let gpu = Gpu::new();
    let (at, host, stream) = (gpu.allocate(4), gpu.pinned(4), gpu.stream());
    gpu.begin(stream);
    assert_eq!(unsafe { cuMemcpyHtoDAsync_v2(at, host.cast(), 4, stream as _) }, GOOD);
    let exec = gpu.instantiate(gpu.end(stream).expect("captured"));
    unsafe {
        refused(cuMemFreeHost(host.cast()), CUresult::CUDA_ERROR_INVALID_VALUE, "freed that a graph copies from or to");
        assert_eq!([cuGraphExecDestroy(exec as _), cuMemFreeHost(host.cast())], [GOOD; 2]);
    }
}

#[test]
fn tensor_maps_are_checked() {
    let gpu = Gpu::new();
    let at = gpu.allocate(1 << 16);
    let good = gpu::Map { dtype: 9, address: at, sizes: [64, 32], stride: 128, extents: [64, 8], swizzle: 3 };
    assert_eq!(good.encode(0), GOOD);
    assert_eq!(gpu::Map { dtype: 11, stride: 256, extents: [32, 8], ..good }.encode(0), GOOD);
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    refused(good.encode(8), invalid, "no multiple of 64");
    refused(gpu::Map { address: at + 8, ..good }.encode(0), invalid, "multiples of 16 bytes");
    refused(gpu::Map { stride: 120, ..good }.encode(0), invalid, "multiples of 16 bytes");
    refused(gpu::Map { extents: [64, 257], ..good }.encode(0), invalid, "extents are 1 to 256");
    refused(gpu::Map { extents: [128, 8], ..good }.encode(0), invalid, "longer than the swizzle's");
    refused(gpu::Map { dtype: 8, ..good }.encode(0), invalid, "is not modelled");
}

#[test]
fn a_context_is_given_back_empty() {
    let gpu = Gpu::new();
    let (stream, at) = (gpu.stream(), gpu.allocate(4));
    assert_eq!(unsafe { cuDevicePrimaryCtxRelease_v2(gpu.ordinal) }, GOOD);
    assert_eq!(last_words(), "the context is given back with 1 allocations, 1 streams");
    unsafe {
        refused(cuMemFree_v2(at), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, "has been given back");
        refused(cuStreamDestroy_v2(stream as _), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, "has been given back");
        refused(cuDevicePrimaryCtxRelease_v2(gpu.ordinal), CUresult::CUDA_ERROR_INVALID_CONTEXT, "has not been retained");
        refused(cuCtxSetCurrent(gpu.context as _), CUresult::CUDA_ERROR_INVALID_CONTEXT, "there is no context");
    }
}

#[test]
fn each_parameter_has_a_place() {
    let gpu = Gpu::new();
    let (f, stream) = (gpu.function(TWICE, "twice"), gpu.stream());
    let launch = |each: *mut *mut c_void, extra: *mut *mut c_void| unsafe { cuLaunchKernel(f as _, 1, 1, 1, 32, 1, 1, 0, stream as _, each, extra) };
    let (bytes, size) = ([0u8; 8], 8usize);
    let mut packed = [1 as _, bytes.as_ptr().cast_mut().cast(), 2 as _, std::ptr::from_ref(&size).cast_mut().cast(), 0 as _];
    refused(launch(null_mut(), packed.as_mut_ptr()), CUresult::CUDA_ERROR_INVALID_VALUE, "not packed ones");
    refused(launch(&mut null_mut(), null_mut()), CUresult::CUDA_ERROR_INVALID_VALUE, "parameter 0 has no place");
}
