//! Streams and events of the driver, and what one stream is told to do.

use super::driver::text;
use super::kernel::{CudaKernel, places};
use cudarc::driver::result::{event, stream};
use cudarc::driver::sys;
use ir::program::Space;
use std::ffi::c_void;
use std::ptr::null_mut;

/// A stream of the current context, owned.
pub(in crate::gpu) struct Stream(pub(in crate::gpu) sys::CUstream);

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is owned.
        let _ = unsafe { stream::destroy(self.0) };
    }
}

impl Stream {
    pub(in crate::gpu) fn new() -> Result<Stream, String> {
        stream::create(stream::StreamKind::NonBlocking).map(Stream).map_err(text)
    }

    /// A stream whose kernels get room before those of others that wait for it.
    pub(in crate::gpu) fn first() -> Result<Stream, String> {
        let (_, greatest) = stream::get_priority_range().map_err(text)?;
        stream::create_with_priority(stream::StreamKind::NonBlocking, greatest).map(Stream).map_err(text)
    }

    /// Waits until all is done.
    pub(in crate::gpu) fn wait(&self) -> Result<(), String> {
        // SAFETY: the stream is alive.
        unsafe { stream::synchronize(self.0) }.map_err(text)
    }

    /// Issues a fill: repeats the first `width` bytes of `element`.
    pub(super) fn fill(&self, address: u64, element: [u8; 4], width: u8, count: u64) -> Result<(), String> {
        let [a, b, c, d] = element;
        // SAFETY: places lie within their arenas, at multiples of their width.
        let filled = unsafe {
            match width {
                1 => sys::cuMemsetD8Async(address, a, count as usize, self.0),
                2 => sys::cuMemsetD16Async(address, u16::from_le_bytes([a, b]), count as usize, self.0),
                _ => sys::cuMemsetD32Async(address, u32::from_le_bytes([a, b, c, d]), count as usize, self.0),
            }
        };
        filled.result().map_err(text)
    }

    /// Issues a copy between the memories, of which the host's is lent to the GPU.
    pub(super) fn copy(&self, to: Space, device: u64, host: u64, bytes: u64) -> Result<(), String> {
        // SAFETY: places lie within their arenas; nobody else uses them meanwhile, as streams and events say.
        let copied = unsafe {
            match to {
                Space::Host => sys::cuMemcpyDtoHAsync_v2(host as *mut c_void, device, bytes as usize, self.0),
                Space::Device => sys::cuMemcpyHtoDAsync_v2(device, host as *const c_void, bytes as usize, self.0),
            }
        };
        copied.result().map_err(text)
    }

    /// Issues a kernel with packed parameters.
    pub(super) fn launch(&self, kernel: &CudaKernel, parameters: &[u8]) -> Result<(), String> {
        let (l, mut places) = (&kernel.launch, places(&kernel.launch, parameters));
        // SAFETY: the parameters are those of the kernel, each where it is said to be; the driver copies them.
        unsafe { sys::cuLaunchKernel(kernel.function, l.grid, 1, 1, l.block, 1, 1, l.shared_bytes, self.0, places.as_mut_ptr(), null_mut()) }
            .result()
            .map_err(text)
    }

    /// Whether all is done.
    pub(in crate::gpu) fn is_idle(&self) -> Result<bool, String> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(text),
        }
    }
}

/// An event, owned.
pub(in crate::gpu) struct CudaEvent(sys::CUevent);

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    pub(in crate::gpu) fn new() -> Result<CudaEvent, String> {
        event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(CudaEvent).map_err(text)
    }

    pub(in crate::gpu) fn record(&self, on: &Stream) -> Result<(), String> {
        // SAFETY: both are alive.
        unsafe { event::record(self.0, on.0) }.map_err(text)
    }

    pub(in crate::gpu) fn hold(&self, on: &Stream) -> Result<(), String> {
        // SAFETY: as above.
        unsafe { stream::wait_event(on.0, self.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }.map_err(text)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: it is owned.
        let _ = unsafe { event::destroy(self.0) };
    }
}
