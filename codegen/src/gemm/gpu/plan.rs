//! In which tiles a GPU computes a product, and with which instructions.

use super::copy::{Element, FactorCopy, LineDim};
use super::store;
use super::tensor_maps::FactorMap;
use super::tile::TileConfig;
use crate::build::asm::{Factor, Half};
use crate::build::scheduler::Scheduler;
use crate::build::stages::{Stages, Turns, WARPGROUP};
use crate::build::swizzle::LINE;
use crate::gemm::product::{ExpertDim, Product};
use crate::target::Target;
use emulator::H100;
use ir::graph::Type;
use ir::kernel::Kernel;
use ir::op::DType;
use ir::tiles::{self, Generation, ProductSize};
use ir::work::Work;

/// The tiles for tensor cores, in the shapes that CUTLASS's default kernels for sm_80 have.
const MMA: [TileConfig; 3] = [
    TileConfig::new(tiles::TENSOR[0], [32, 4], [2, 4], 2),
    TileConfig::new(tiles::TENSOR[1], [32, 4], [2, 2], 3),
    TileConfig::new(tiles::TENSOR[2], [32, 4], [2, 2], 3),
];

/// The tiles for warpgroups: 64 rows each. Two blocks share a multiprocessor, so that one multiplies while the other
/// stores.
const WGMMA: [TileConfig; 3] = [
    TileConfig::new(tiles::GROUPS[0], [64, 3], [8, 1], 2),
    TileConfig::new(tiles::GROUPS[1], [64, 4], [8, 1], 2),
    TileConfig::new(tiles::GROUPS[2], [64, 4], [4, 1], 2),
];

/// The tiles for multiplications in f32: 8 x 8 sums a thread.
const FMA: [TileConfig; 3] = [
    TileConfig::new(tiles::PLAIN[0], [16, 3], [4, 2], 2),
    TileConfig::new(tiles::PLAIN[1], [16, 3], [4, 1], 3),
    TileConfig::new(tiles::PLAIN[2], [16, 3], [2, 1], 3),
];

/// The tiles for warpgroups that one warp beside them feeds: 64 rows each, a block to a multiprocessor, or two of the
/// least. As many stages as there is room for beside sums.
const WARP_SPECIALIZED: [TileConfig; 5] = [
    TileConfig::new(tiles::RING[0], [64, 4], [8, 1], 1),
    TileConfig::new(tiles::RING[1], [64, 4], [8, 1], 1),
    TileConfig::new(tiles::RING[2], [64, 6], [8, 1], 1),
    TileConfig::new(tiles::RING[3], [64, 8], [8, 1], 1),
    TileConfig::new(tiles::RING[4], [64, 5], [4, 1], 2),
];

/// Dynamic shared memory of a block at most, on sm_90a.
const MOST_SHARED: i64 = 227 * 1024;

/// f32 beside a row of sums in shared memory, so that neighbouring rows begin in other banks.
const SUMS_PAD: i64 = 8;

/// The instructions that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductInstruction {
    /// `mma.sync` on floats of one type.
    Mma(Factor),
    /// `wgmma` on 16-bit floats of one type.
    Wgmma(Half),
    /// f32 multiply-adds.
    Fma,
}

/// A product in tiles that all threads of a block copy.
pub struct MultistagePlan {
    pub instruction: ProductInstruction,
    pub tile: TileConfig,
    pub a: FactorCopy,
    pub b: FactorCopy,
}

impl MultistagePlan {
    pub fn new(kernel: &Kernel, product: &Product, target: &Target) -> MultistagePlan {
        let instruction = match factor(kernel, product) {
            Some(Factor::Half(half)) if target.has_wgmma() => ProductInstruction::Wgmma(half),
            Some(factor) => ProductInstruction::Mma(factor),
            None => ProductInstruction::Fma,
        };
        let tile = match instruction {
            ProductInstruction::Mma(factor) => choose(&MMA, product, target).of(factor),
            ProductInstruction::Wgmma(_) => choose(&WGMMA, product, target),
            ProductInstruction::Fma => choose(&FMA, product, target),
        };
        let copy = |tensor: usize| {
            let element = match instruction {
                ProductInstruction::Mma(Factor::Half(_)) => Element::Half,
                ProductInstruction::Mma(Factor::Tf32) => Element::Tf32,
                ProductInstruction::Wgmma(_) => Element::Narrow,
                ProductInstruction::Fma => Element::Word,
            };
            FactorCopy::new(product, tensor, element, &tile)
        };
        MultistagePlan { instruction, tile, a: copy(product.a), b: copy(product.b) }
    }

    /// Stages that are filled while one is multiplied. With background products, the stage before that one is still
    /// being read.
    pub fn ahead(&self) -> i64 {
        match self.instruction {
            ProductInstruction::Mma(_) | ProductInstruction::Fma => self.tile.stages - 1,
            ProductInstruction::Wgmma(_) => self.tile.stages - 2,
        }
    }

    pub fn stage_bytes(&self) -> i64 {
        self.a.bytes() + self.b.bytes()
    }

    /// Bytes from one row of a tile's sums to the next, in shared memory.
    pub fn sums_row(&self) -> i64 {
        4 * (self.tile.columns + SUMS_PAD)
    }

    /// Dynamic shared memory of a block: stages, and in the same place the sums that the epilogue reads.
    pub fn shared_bytes(&self) -> i64 {
        (self.tile.stages * self.stage_bytes()).max(self.tile.rows * self.sums_row())
    }
}

/// The type that tensor cores multiply, if they do the product. Both factors have it.
fn factor(kernel: &Kernel, product: &Product) -> Option<Factor> {
    match kernel.inputs[product.a].ty.dtype {
        DType::Bf16 => Some(Half::Bf16.into()),
        DType::F16 => Some(Half::F16.into()),
        DType::F32 if product.tf32 => Some(Factor::Tf32),
        DType::F32 | DType::I32 | DType::Bool => None,
    }
}

/// A product whose factors come by tensor maps to a ring of stages, which one warp fills and warpgroups empty.
pub struct WarpSpecializedPlan {
    pub factor: Factor,
    pub tile: TileConfig,
    /// Blocks of a cluster, whose tiles have the same columns and follow one another.
    pub cluster: i64,
    pub maps: [FactorMap; 2],
}

impl WarpSpecializedPlan {
    /// `None` if the GPU has no tensor copies, a factor has no tensor map, or the contracted elements of a tf32
    /// factor are apart: `wgmma` transposes only 16-bit factors.
    pub fn new(kernel: &Kernel, product: &Product, target: &Target) -> Option<WarpSpecializedPlan> {
        let factor = factor(kernel, product).filter(|_| target.has_wgmma())?;
        let tile = choose(&WARP_SPECIALIZED, product, target).of(factor);
        let turns = turns(&tile).filter(|turns| has_pairs(product, turns) && gains_by_turns(kernel, product, turns, factor));
        let tile = turns.unwrap_or(tile);
        let cluster = if has_pairs(product, &tile) { 2 } else { 1 };
        let map = |tensor| FactorMap::new(kernel, product, tensor, &tile, cluster).filter(|m| factor != Factor::Tf32 || m.lines == LineDim::Own);
        Some(WarpSpecializedPlan { factor, tile, cluster, maps: [map(product.a)?, map(product.b)?] })
    }

    /// Bytes of the first factor in a stage; those of the second follow.
    pub fn first_bytes(&self) -> i64 {
        LINE * self.tile.rows
    }

    pub fn stage_bytes(&self) -> i64 {
        self.first_bytes() + LINE * self.tile.columns
    }

    /// Offset in shared memory of the sums on their way to the epilogue; mbarriers and tile numbers follow.
    pub fn sums_at(&self) -> i64 {
        self.tile.stages * self.stage_bytes()
    }

    pub fn barriers_at(&self) -> i64 {
        self.sums_at() + self.tile.all_threads() / 32 * store::STAGING
    }

    pub fn scheduler_at(&self) -> i64 {
        self.barriers_at() + Stages::bytes(self.tile.stages)
    }

    /// Dynamic shared memory of a block.
    pub fn shared_bytes(&self) -> i64 {
        self.scheduler_at() + Scheduler::BYTES + if self.tile.teams > 1 { Turns::BYTES } else { 0 }
    }

    /// Offset of the mbarriers of teams that take turns.
    pub fn turns_at(&self) -> Option<i64> {
        (self.tile.teams > 1).then_some(self.scheduler_at() + Scheduler::BYTES)
    }
}

/// Whether each tile has a neighbour with the same columns and the same contracted elements: numbers go down columns
/// of tiles, of which there are then an even number. Where experts own rows, both tiles go through the experts of
/// both, so each expert must have many tiles of rows.
fn has_pairs(product: &Product, tile: &TileConfig) -> bool {
    /// Of so many, one more for each expert is a sixteenth.
    const TILES: i64 = 16;
    let of_expert = product.experts.as_ref().filter(|x| x.own == ExpertDim::Rows).map(|x| product.m.size / x.axis.size);
    tile.grid(product)[0] % 2 == 0 && of_expert.is_none_or(|rows| rows >= TILES * tile.rows)
}

/// The tile of two teams in place of one whose warps are two warpgroups, with as many stages as there is room for.
fn turns(tile: &TileConfig) -> Option<TileConfig> {
    let bytes = LINE * (tile.rows / 2 + tile.columns);
    let room = MOST_SHARED - tile.threads() / 32 * store::STAGING - Scheduler::BYTES - Turns::BYTES;
    (tile.threads() == 2 * WARPGROUP).then(|| tile.in_turns((room / (bytes + Stages::bytes(1))).min(8)))
}

/// Whether a block is done earlier with two warpgroups that take turns at tiles: one stores while the other multiplies,
/// but teams of 64 rows copy more. Times are in contracted elements of 16 bits, of which a block multiplies one in as
/// many clocks as there are units of 16 columns. Where experts own them, all have equally many.
fn gains_by_turns(kernel: &Kernel, product: &Product, tile: &TileConfig, factor: Factor) -> bool {
    /// What 128 rows take to be stored, for each further tensor that is read or written there, and for each op: counted
    /// in the emulator, with 128 and 256 columns.
    const STORING: [f64; 3] = [120.0, 100.0, 35.0];
    /// The least gain.
    const GAIN: f64 = 1.03;
    let (columns, results) = (tile.columns as f64, (product.repeats() * product.m.size * product.n.size) as f64);
    let added = kernel.outputs.iter().filter(|o| o.accumulate).count();
    let further = (kernel.inputs.len() + kernel.outputs.len() + added).saturating_sub(3);
    let ops = kernel.body.values().filter(|v| !kernel.body[*v].op.is_source()).count() - 1;
    let storing = STORING[0] + STORING[1] * further as f64 + STORING[2] * ops as f64;
    let repeats: i64 = product.outer_k.iter().map(|x| x.size).product();
    let experts = product.experts.as_ref().filter(|x| x.own == ExpertDim::Contracted).map_or(1, |x| x.axis.size);
    let multiplying = (product.k.size * repeats * factor.bytes() / 2 / experts) as f64;
    // Each of two teams copies its rows, and half of the columns.
    let copied = multiplying * 2.0 * (2.0 * 64.0 + columns);
    let held = |ty: &Type| kernel.body.dims.elements(&ty.dims) * ty.dtype.bytes();
    let factors: u64 = [product.a, product.b].map(|t| held(&kernel.inputs[t].ty)).iter().sum();
    let stored = Work::needed(kernel).bytes.saturating_sub(factors) as f64 / results * 128.0 * columns;
    // Bytes of the second-level cache that a multiprocessor gets in a clock.
    let cache = H100.cache / f64::from(H100.multiprocessors) / (H100.gigahertz[0] * 1e9);
    let copying = (copied + stored) / (cache * columns / 16.0);
    multiplying + storing > GAIN * multiplying.max(copying)
}

/// The tile with which the product takes the least time.
fn choose(tiles: &[TileConfig], product: &Product, target: &Target) -> TileConfig {
    // A tile of rows is cut where the next expert's rows begin, which may add a part for each further expert.
    let more = product.experts.as_ref().filter(|x| x.own == ExpertDim::Rows).map_or(0, |x| x.axis.size - 1);
    let [repeats, rows, columns, more] = [product.repeats(), product.m.size, product.n.size, more].map(|n| n as u64);
    let shape = ProductSize { repeats, rows, columns, more };
    let multiprocessors = target.generation().map_or(1, Generation::multiprocessors);
    *tiles.iter().min_by_key(|t| t.size.time(&shape, multiprocessors)).expect("invariant: the table has tiles")
}
