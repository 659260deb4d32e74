//! The calling convention of compiled kernels.
//!
//! ```c
//! void kernel(void *const *arguments, const uint64_t *scalars, uint64_t first_tile, uint64_t end_tile, void *scratch, uint64_t begin, uint64_t until);
//! ```
//! `arguments` are the kernel's inputs in order, then its outputs in order; each points at the first element.
//! `scalars` are the bit patterns of `f64` and `i64` values in the order of the kernel's scalar arguments. The call
//! computes the tiles `first_tile..end_tile`. A tile's result depends on its number only, so any division of the
//! tiles over threads gives the same bits. `scratch` is 64-byte aligned memory of the size that compilation reported,
//! for this thread alone.
//!
//! A thread goes through a range of tiles from its front, in one call or in several that follow one another: the
//! first begins at tile `begin`, each other where the one before it ended, with the same arguments and with scratch
//! as that left it. `until` is where the range will end unless it is cut short: no call of the range ends beyond it,
//! and it never grows from call to call. Where it lies otherwise, nothing but time depends on.
//!
//! On a GPU there is one parameter, a block of 64-bit words: the pointers, the scalars, then the number of tiles, the
//! address of scratch, and its bytes per warp ([`launch_of_warps`]). Every warp of the launch, or every block
//! ([`launch_of_blocks`]), computes tiles, however many there are of either. Kernels whose warps differ in what they
//! do ([`launch_of_specialized_warps`]) have the address of a counter of tiles in place of scratch, and tensor maps
//! as parameters before the block.

use crate::Shape;
use ir::kernel::{Family, Kernel};
use ir::launch::{Launch, MAP_BYTES, MOST_BLOCKS, Parameter, TensorMap, WARP};
use ir::tiles::Generation;

/// Warps of a block of the usual form.
pub const WARPS: u32 = 4;

/// Limits of a block, from which its registers follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBounds {
    /// Threads of a block.
    pub threads: u32,
    /// Blocks at a time on a multiprocessor. If this is not given, ptxas spills registers to have as many as
    /// possible.
    pub blocks: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
}

impl LaunchBounds {
    /// Bounds of a block whose warps compute a tile together.
    pub fn of_team(members: i64) -> LaunchBounds {
        LaunchBounds { threads: members as u32 * WARP, blocks: 1, cluster: 1 }
    }
}

/// The parameters of a kernel, as a builder sees them.
#[derive(Clone, Copy)]
pub struct Entry<Index, Pointer> {
    /// Where the pointers to the inputs, then to the outputs, lie, 8 bytes each.
    pub arguments: Pointer,
    /// Where the bit patterns of the scalar arguments lie, 8 bytes each.
    pub scalars: Pointer,
    /// First tile to compute.
    pub first_tile: Index,
    /// End of the tiles to compute, exclusive.
    pub end_tile: Index,
    /// Start of the scratch memory of this thread, or warp.
    pub scratch: Pointer,
    /// First tile of the range that the tiles to compute are a part of.
    pub begin: Index,
    /// End of the range that the tiles to compute are a part of, exclusive, unless it is cut short.
    pub until: Index,
}

/// The kernel's address as Rust calls it.
pub type KernelFn =
    unsafe extern "C" fn(arguments: *const *mut u8, scalars: *const u64, first_tile: u64, end_tile: u64, scratch: *mut u8, begin: u64, until: u64);

/// Words of a GPU kernel's parameters after pointers and scalars.
pub const GPU_EXTRA: usize = 3;

/// Bytes of a GPU kernel's parameters, at most: products may have a tensor map for either factor, attention for
/// queries, keys and values, and its gradients for that of its result too.
pub fn parameter_bytes(kernel: &Kernel) -> usize {
    let maps = match kernel.family {
        Family::Gemm => 2,
        Family::Attention => 3,
        Family::AttentionGrad => 4,
        Family::Loops { .. } | Family::Scatter => 0,
    };
    8 * (kernel.inputs.len() + kernel.outputs.len() + kernel.scalars.len() + GPU_EXTRA) + maps * MAP_BYTES
}

/// Multiprocessors of the GPU whose warps loops are cut for: what a warp computes does not depend on it.
const MULTIPROCESSORS: u32 = Generation::Sm90a.multiprocessors() as u32;
/// Blocks that fill it: 16 of [`WARPS`] warps on each. A warp takes several tiles where there are more.
const FILL: u64 = 16 * MULTIPROCESSORS as u64;
/// Bytes that are read again and again and are found in the second-level cache of such a GPU: half of what that
/// holds.
pub const CACHED: i64 = 24 << 20;
/// Most bytes of scratch of a launch, if a block needs no more.
const SCRATCH: u64 = 64 << 20;

/// The launch of a kernel of which every warp computes tiles.
pub fn launch_of_warps(kernel: &Kernel, shape: &Shape) -> Launch {
    let of_block = shape.scratch_bytes * u64::from(WARPS);
    let room = SCRATCH.checked_div(of_block).unwrap_or(FILL).max(1);
    let grid = shape.tiles.div_ceil(WARPS.into()).clamp(1, FILL.min(room));
    Launch {
        grid: grid as u32,
        resident: None,
        cluster: 1,
        block: WARPS * WARP,
        shared_bytes: 0,
        scratch_bytes: grid * of_block,
        maps: vec![],
        parameters: parameters(kernel, shape),
    }
}

/// The launch of a kernel whose blocks, or clusters of them, compute a tile each. The card begins with the first and
/// has as many at a time as there is room for.
pub fn launch_of_blocks(kernel: &Kernel, shape: &Shape, bounds: LaunchBounds, shared_bytes: u32) -> Launch {
    let (clusters, parameters) = (shape.tiles.clamp(1, (MOST_BLOCKS / bounds.cluster).into()) as u32, parameters(kernel, shape));
    let (grid, cluster) = (clusters * bounds.cluster, bounds.cluster);
    Launch { grid, resident: None, cluster, block: bounds.threads, shared_bytes, scratch_bytes: 0, maps: vec![], parameters }
}

/// The launch of a kernel whose warps differ in what they do: as many blocks as run at a time on a card, if there is
/// work for them, of which each goes on with what is next ([`crate::build::scheduler`]).
pub fn launch_of_specialized_warps(kernel: &Kernel, shape: &Shape, bounds: LaunchBounds, shared_bytes: u32, maps: Vec<TensorMap>) -> Launch {
    let launch = launch_of_blocks(kernel, shape, bounds, shared_bytes);
    let counted = |p: &Parameter| if *p == Parameter::Scratch { Parameter::Counter } else { *p };
    let parameters = launch.parameters.iter().map(counted).collect();
    Launch { resident: Some(bounds.blocks), maps, parameters, ..launch }
}

/// The launch of a kernel whose tiles are computed by so many warps each: as many blocks as a GPU has room for, of
/// which those that find none follow.
pub fn launch_of_teams(kernel: &Kernel, shape: &Shape, members: i64, shared_bytes: u32) -> Launch {
    let grid = shape.tiles.clamp(1, (FILL * u64::from(WARPS) / members as u64).max(1));
    Launch { grid: grid as u32, ..launch_of_blocks(kernel, shape, LaunchBounds::of_team(members), shared_bytes) }
}

fn parameters(kernel: &Kernel, shape: &Shape) -> Vec<Parameter> {
    let arguments = (0..(kernel.inputs.len() + kernel.outputs.len()) as u32).map(Parameter::Argument);
    let scalars = (0..kernel.scalars.len() as u32).map(Parameter::Scalar);
    let extra = [Parameter::Number(shape.tiles), Parameter::Scratch, Parameter::Number(shape.scratch_bytes)];
    arguments.chain(scalars).chain(extra).collect()
}
