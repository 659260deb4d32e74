//! Memory that goes back to the driver when its owner does: of the host, pinned, and of the GPU.

use super::driver::text;
use cudarc::driver::result;
use std::ffi::c_void;

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
        // SAFETY: the memory is owned; it was zero or written at first use, and the GPU's copies have been waited
        // for.
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
pub(in crate::gpu) struct Reserved(u64);

impl Reserved {
    /// The context is current; the driver aligns it to 256 bytes.
    pub(in crate::gpu) fn new(bytes: u64) -> Result<Reserved, String> {
        // SAFETY: a new allocation.
        unsafe { result::malloc_sync(bytes as usize) }.map(Reserved).map_err(text)
    }

    pub(in crate::gpu) fn start(&self) -> u64 {
        self.0
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: it is owned, and all that used it is done.
        let _ = unsafe { result::free_sync(self.0) };
    }
}
