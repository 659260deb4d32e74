//! In what tiles GPUs compute matrix products, and for how long: the code generator chooses among these tiles, the pass
//! that splits products (`split_reduction`) weighs by them.

use crate::op::DType;

/// A generation of GPUs that code is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generation {
    /// Compute capability 8.0, the A100's.
    Sm80,
    /// Compute capability 9.0, the H100's and H200's, with instructions that later ones lack.
    Sm90a,
}

/// Rows and columns of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSize {
    /// Rows of the result that a tile covers.
    pub rows: u64,
    /// Columns of the result that a tile covers.
    pub columns: u64,
    /// Arithmetic rate of a multiprocessor that runs such tiles, of 100 that the best ones have. Guessed from the
    /// operands that each instruction of arithmetic needs from shared memory, not measured.
    pub rate: u64,
}

const fn size(rows: u64, columns: u64, rate: u64) -> TileSize {
    TileSize { rows, columns, rate }
}

/// For tensor cores by `mma.sync`, in the shapes that CUTLASS's default kernels for sm_80 have.
pub const TENSOR: [TileSize; 3] = [size(128, 128, 100), size(128, 64, 85), size(64, 64, 70)];
/// For warpgroups without tensor maps.
pub const GROUPS: [TileSize; 3] = [size(128, 128, 100), size(128, 64, 80), size(64, 64, 65)];
/// For multiplications in f32.
pub const PLAIN: [TileSize; 3] = [size(128, 128, 100), size(128, 64, 95), size(64, 64, 80)];
/// For warpgroups that one warp beside them feeds by tensor maps.
pub const RING: [TileSize; 5] = [size(128, 256, 100), size(128, 192, 92), size(128, 128, 85), size(128, 64, 65), size(64, 64, 60)];

/// The size of a product: repetitions, rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductSize {
    /// Products of this size that there are.
    pub repeats: u64,
    /// Rows of the result.
    pub rows: u64,
    /// Columns of the result.
    pub columns: u64,
    /// Rows of tiles that there are more of, as each expert's rows begin a tile of their own.
    pub more: u64,
}

impl TileSize {
    /// How long all of a product takes in such tiles, for each contracted element: full rounds of all
    /// multiprocessors, each as long as its tile, in multiplications of one multiprocessor at the best tiles' rate.
    pub fn time(&self, shape: &ProductSize, multiprocessors: u64) -> u64 {
        let rows = shape.rows.div_ceil(self.rows) + shape.more;
        let tiles = shape.repeats.saturating_mul(rows).saturating_mul(shape.columns.div_ceil(self.columns));
        tiles.div_ceil(multiprocessors).saturating_mul(self.rows * self.columns * 100) / self.rate
    }
}

impl Generation {
    /// Every generation, the oldest first.
    pub const ALL: [Generation; 2] = [Generation::Sm80, Generation::Sm90a];

    /// As NVIDIA's compilers and `--target` say it.
    pub fn name(self) -> &'static str {
        match self {
            Generation::Sm80 => "sm_80",
            Generation::Sm90a => "sm_90a",
        }
    }

    /// Multiprocessors to share tiles among: those of an A100, and of an H100 or H200.
    pub const fn multiprocessors(self) -> u64 {
        match self {
            Generation::Sm80 => 108,
            Generation::Sm90a => 132,
        }
    }

    /// The tiles that a product of such factors most likely has.
    pub fn tiles(self, factors: DType, tf32: bool) -> &'static [TileSize] {
        match (self, factors.is_half()) {
            (Generation::Sm90a, true) => &RING,
            (Generation::Sm90a, false) if tf32 => &RING,
            (Generation::Sm80, true) => &TENSOR,
            (Generation::Sm80, false) if tf32 => &TENSOR,
            (Generation::Sm80 | Generation::Sm90a, false) => &PLAIN,
        }
    }

    /// Multiplications with addition of one multiprocessor in a nanosecond. NVIDIA's data sheets: an A100 does 312,
    /// 156 and 19.5 TFLOP/s with factors of 16 bits, of tf32 and of f32, an H100 SXM 989, 495 and 67.
    fn rate(self, factors: DType, tf32: bool) -> f64 {
        let teraflops = match (self, factors.is_half()) {
            (Generation::Sm80, true) => 312.0,
            (Generation::Sm80, false) if tf32 => 156.0,
            (Generation::Sm80, false) => 19.5,
            (Generation::Sm90a, true) => 989.0,
            (Generation::Sm90a, false) if tf32 => 495.0,
            (Generation::Sm90a, false) => 67.0,
        };
        teraflops * 1e3 / 2.0 / self.multiprocessors() as f64
    }

    /// Bytes of global memory that come and go in a nanosecond, as a copy moves them (`docs/benchmarks/gpu.md`).
    fn memory(self) -> f64 {
        match self {
            Generation::Sm80 => 1830.0,
            Generation::Sm90a => 3020.0,
        }
    }

    /// Nanoseconds that a product takes in its best tiles, or to read its factors of so many bytes, whatever is longer.
    pub fn product(self, shape: &ProductSize, contracted: u64, (factors, bytes): (DType, u64), tf32: bool) -> f64 {
        let tiles = self.tiles(factors, tf32).iter();
        let time = tiles.map(|t| t.time(shape, self.multiprocessors())).min().expect("invariant: each table has tiles");
        (time as f64 * contracted as f64 / self.rate(factors, tf32)).max(bytes as f64 / self.memory())
    }

    /// Nanoseconds that it takes to add up results of a product that is split into so many: their bytes go out and
    /// come back, and one kernel more is launched.
    pub fn sum(self, shape: &ProductSize, segments: u64) -> f64 {
        /// A launch within a graph, and the first loads of a small kernel.
        const KERNEL: f64 = 2000.0;
        let elements = (shape.repeats * shape.rows * shape.columns) as f64;
        KERNEL + 2.0 * 4.0 * segments as f64 * elements / self.memory()
    }
}
