//! What is copied next, brought near while the products before it run: a copy that waits for memory takes several times as long as one that does not.

use super::Gemm;
use crate::build::Builder;
use crate::build::llvm::{Index, Level, Llvm, Pointer};
use crate::layout::div_ceil;

/// Bytes of a line of the cache.
const LINE: i64 = 64;

/// How the micro-kernels of a block share out the next block of a factor: its lines (contracted elements or rows, whichever are apart in memory) over row
/// panels and the iterations of each, and what is dense of a line over column panels.
pub struct Next {
    lines: i64,
    /// Bytes from line to line.
    stride: i64,
    /// Bytes of a line that one column panel sees to.
    share: i64,
    /// Lines of one iteration.
    times: i64,
}

/// The part of one micro-kernel: its first line, and how many follow.
#[derive(Clone, Copy)]
pub struct Part<'c> {
    pub start: Pointer<'c>,
    pub more: Index<'c>,
}

impl Next {
    /// For the factor `tensor`, whose blocks have so many rows (or columns), with these strides along them and along contracted elements. Absent if neither is dense.
    pub fn new(g: &Gemm, tensor: usize, rows: i64, [own, k]: [i64; 2]) -> Option<Next> {
        let (blocks, bytes) = (&g.plan.blocks, g.bytes(tensor));
        let (lines, stride, dense) = match (own, k) {
            (1, _) => (blocks.depth, k, rows),
            (_, 1) => (rows, own, blocks.depth),
            _ => return None,
        };
        let share = div_ceil(bytes * dense, blocks.tile_columns * LINE) * LINE;
        let iterations = div_ceil(blocks.depth, super::micro::UNROLL);
        Some(Next { lines, stride: bytes * stride, share, times: div_ceil(div_ceil(lines, blocks.tile_rows), iterations) })
    }

    /// The part of row panel `row` of `rows`, and of column panel `column`, of a block that begins at `start`; of no block if it is not `wanted`.
    pub fn part<'c>(&self, b: &Llvm<'c>, start: Pointer<'c>, wanted: Index<'c>, [row, rows, column]: [Index<'c>; 3]) -> Part<'c> {
        let lines = b.index_mul(wanted, b.index(self.lines - 1));
        let each = b.index_div(b.index_add(b.index(self.lines - 1), rows), rows);
        let first = b.index_min(b.index_mul(row, each), lines);
        let last = b.index_min(b.index_add(first, b.index_sub(each, b.index(1))), lines);
        let down = b.at(start, b.index_mul(first, b.index(self.stride)));
        Part { start: b.at(down, b.index_mul(column, b.index(self.share))), more: b.index_sub(last, first) }
    }

    /// What iteration `number` of a micro-kernel fetches of its part.
    pub fn fetch<'c>(&self, b: &Llvm<'c>, part: Part<'c>, number: Index<'c>) {
        for time in 0..self.times {
            let line = b.index_min(b.index_add(b.index_mul(number, b.index(self.times)), b.index(time)), part.more);
            let place = b.at(part.start, b.index_mul(line, b.index(self.stride)));
            (0..self.share).step_by(LINE as usize).for_each(|byte| b.prefetch(b.at_const(place, byte), Level::Second));
        }
    }
}
