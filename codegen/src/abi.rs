//! The calling convention of compiled kernels.
//!
//! ```c
//! void kernel(void *const *arguments, const uint64_t *scalars, uint64_t first_tile, uint64_t end_tile, void *scratch);
//! ```
//! `arguments` are the kernel's inputs in order, then its outputs in order; each points at the first element. `scalars` are the bit
//! patterns of `f64` and `i64` values in the order of the kernel's scalar arguments. The call computes the tiles `first_tile..end_tile`.
//! A tile's result depends on its number only, so any division of the tiles over threads gives the same bits. `scratch` is
//! 64-byte aligned memory of the size that compilation reported, for this thread alone; nothing in it is kept between calls.

//!
//! On a GPU there is one parameter, a block of 64-bit words: the pointers, the scalars, then the number of tiles, the address of scratch, and its bytes per
//! warp ([`gpu_parameters`]). Every warp of the launch computes tiles, however many there are of either.

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

/// Words of a GPU kernel's parameters after pointers and scalars.
pub const GPU_EXTRA: usize = 3;

/// The parameters of a GPU kernel: addresses in device memory, bit patterns of scalars, tiles, and scratch of `stride` bytes for each warp.
pub fn gpu_parameters(pointers: &[u64], scalars: &[u64], tiles: u64, scratch: u64, stride: u64) -> Vec<u8> {
    let words = pointers.iter().chain(scalars).copied().chain([tiles, scratch, stride]);
    words.flat_map(u64::to_le_bytes).collect()
}
