//! The calling convention of compiled kernels.
//!
//! ```c
//! void kernel(void *const *arguments, const uint64_t *scalars, uint64_t first_tile, uint64_t end_tile, void *scratch);
//! ```
//! `arguments` are the kernel's inputs in order, then its outputs in order; each points at the first element. `scalars` are the bit
//! patterns of `f64` and `i64` values in the order of the kernel's scalar arguments. The call computes the tiles `first_tile..end_tile`.
//! A tile's result depends on its number only, so any division of the tiles over threads gives the same bits. `scratch` is
//! 64-byte aligned memory of the size that compilation reported, for this thread alone; nothing in it is kept between calls.

/// The parameters of a kernel, as a builder sees them.
#[derive(Clone, Copy)]
pub struct Entry<Index, Pointer> {
    pub arguments: Pointer,
    pub scalars: Pointer,
    pub first_tile: Index,
    pub end_tile: Index,
    pub scratch: Pointer,
}

/// The kernel's address as Rust calls it.
pub type KernelFn = unsafe extern "C" fn(arguments: *const *mut u8, scalars: *const u64, first_tile: u64, end_tile: u64, scratch: *mut u8);
