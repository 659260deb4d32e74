//! Products of 16-bit floats and of tf32 on the tensor cores of sm_90a: a warpgroup multiplies 64 rows out of shared
//! memory, in the background (`wgmma`).
//!
//! While the products of a stage run, those of the one before may still do so: it is filled again a step later than
//! where products are waited for.

use super::tile::TileConfig;
use crate::build::Builder;
use crate::build::asm::{Factor, Instruction};
use crate::build::block::Index;
use crate::build::simt::{Simt, Value};
use crate::build::swizzle::{self, LINE, LINE_ELEMENTS};

/// Threads, warps and rows of a warpgroup, rows of its warps.
pub const THREADS: i64 = 128;
const WARPS: i64 = 4;
const ROWS: i64 = 64;
pub const WARP_ROWS: i64 = 16;

/// Bytes of 64 lines: what 64 rows or columns have of a stage, whichever its lines are. Stages have 128 bytes of
/// contracted elements.
pub const SQUARE: i64 = LINE_ELEMENTS * LINE;

/// The warpgroup's part of a tile.
pub struct Wgmma<'c> {
    instruction: Instruction,
    columns: i64,
    /// Instructions of a stage.
    steps: i64,
    /// 16-byte units from the contracted elements of one to those of the next, of both factors.
    advance: [i64; 2],
    /// The warpgroup's first row in the factor, in bytes of a stage, and the warp's in the tile.
    rows: Index<'c>,
    first_row: Index<'c>,
}

impl<'c> Wgmma<'c> {
    /// The part of warp `warp` among those that multiply. A factor whose lines are contracted elements is transposed.
    pub fn new(b: &Simt<'c>, factor: Factor, tile: &TileConfig, transposed: [bool; 2], warp: Index<'c>) -> Self {
        let (group, warp) = (b.index_div(warp, b.word(WARPS)), b.index_rem(warp, b.word(WARPS)));
        Wgmma {
            instruction: Instruction::GroupMultiply { factor, columns: tile.columns as u32, transposed },
            columns: tile.columns,
            steps: tile.depth / factor.depth(),
            advance: transposed.map(swizzle::advance),
            rows: b.index_mul(group, b.word(SQUARE)),
            first_row: b.index_add(b.index_mul(group, b.word(ROWS)), b.index_mul(warp, b.word(WARP_ROWS))),
        }
    }

    /// Initial sums of a thread: four for each eight columns.
    pub fn zero(&self, b: &Simt<'c>) -> Vec<Value<'c>> {
        vec![b.f32(0.0); (self.columns / 2) as usize]
    }

    /// Orders this thread's copies before reads of the matrix engine, which go through another proxy.
    pub fn show(&self, b: &Simt<'c>) {
        b.asm(Instruction::FenceProxy, &[]);
    }

    /// Adds the products of a stage. Those of the previous stage are done when it returns.
    pub fn multiply(&self, b: &Simt<'c>, [a, second]: [Index<'c>; 2], sums: &mut [Value<'c>]) {
        let (a, second) = (swizzle::descriptor(b, b.index_add(a, self.rows), LINE_ELEMENTS), swizzle::descriptor(b, second, LINE_ELEMENTS));
        b.asm(Instruction::GroupFence, &[]);
        for q in 0..self.steps {
            let at = |descriptor, advance: i64| b.index_add(descriptor, b.index(q * advance)).into();
            let operands = [&[at(a, self.advance[0]), at(second, self.advance[1])], &*sums].concat();
            sums.copy_from_slice(&b.asm(self.instruction, &operands));
        }
        b.asm(Instruction::CommitProducts, &[]);
        b.asm(Instruction::WaitProducts { left: ir::fault!("gpu.groups.wait", 2, 1) }, &[]);
    }

    /// All products are done when it returns.
    pub fn finish(&self, b: &Simt<'c>) {
        b.asm(Instruction::WaitProducts { left: 0 }, &[]);
    }

    /// Puts the sums into shared memory, in rows of `row_bytes`: two neighbours, and the same eight rows below.
    pub fn store(&self, b: &Simt<'c>, to: Index<'c>, row_bytes: i64, sums: &[Value<'c>]) {
        let lane = b.narrow(b.lane());
        let row = b.index_add(self.first_row, b.index_div(lane, b.word(4)));
        let column = b.index_mul(b.index_rem(lane, b.word(4)), b.word(2));
        let first = b.index_add(to, b.index_add(b.index_mul(row, b.word(row_bytes)), b.index_mul(column, b.word(4))));
        for (eight, sums) in (0..).zip(sums.chunks_exact(4)) {
            for (half, pair) in (0..).zip(sums.chunks_exact(2)) {
                b.store_shared(b.index_add(first, b.word(8 * half * row_bytes + 32 * eight)), pair);
            }
        }
    }
}
