//! What errors are called, and what they mean, as the driver says it.

use crate::driver::put;
use crate::state::told;
use cudarc::driver::sys::CUresult;
use std::ffi::{CStr, c_char, c_uint};
use std::mem::transmute;

const GOOD: CUresult = CUresult::CUDA_SUCCESS;

/// Name and meaning of the errors that this library gives.
fn meaning(error: CUresult) -> Option<(&'static CStr, &'static CStr)> {
    Some(match error {
        CUresult::CUDA_SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        CUresult::CUDA_ERROR_INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        CUresult::CUDA_ERROR_NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        CUresult::CUDA_ERROR_NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        CUresult::CUDA_ERROR_INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        CUresult::CUDA_ERROR_INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
        CUresult::CUDA_ERROR_INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            (c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain")
        }
        CUresult::CUDA_ERROR_INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        CUresult::CUDA_ERROR_ILLEGAL_STATE => (c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
        CUresult::CUDA_ERROR_NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        CUresult::CUDA_ERROR_NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
            (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped")
        }
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => {
            (c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region")
        }
        CUresult::CUDA_ERROR_LAUNCH_FAILED => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        CUresult::CUDA_ERROR_NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing")
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture")
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE => {
            (c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences")
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began")
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION => {
            (c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream")
        }
        CUresult::CUDA_ERROR_CAPTURED_EVENT => {
            (c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream")
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => {
            (c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread")
        }
        _ => return None,
    })
}

/// # Safety
/// `error` is a number of the header.
unsafe fn said(error: c_uint) -> Option<(&'static CStr, &'static CStr)> {
    // SAFETY: the caller's.
    meaning(unsafe { transmute::<c_uint, CUresult>(error) })
}

/// # Safety
/// As the driver says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_uint, text: *mut *const c_char) -> CUresult {
    // SAFETY: errors come from this library.
    let found = unsafe { said(error) }.map(|m| m.0.as_ptr());
    found.map_or(CUresult::CUDA_ERROR_INVALID_VALUE, |t| told("cuGetErrorName", GOOD, put(text, t)))
}

/// # Safety
/// As the driver says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> CUresult {
    // SAFETY: as above.
    let found = unsafe { said(error) }.map(|m| m.1.as_ptr());
    found.map_or(CUresult::CUDA_ERROR_INVALID_VALUE, |t| told("cuGetErrorString", GOOD, put(text, t)))
}
