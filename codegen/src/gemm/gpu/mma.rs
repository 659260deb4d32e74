//! Products of 16-bit floats and of tf32 on the tensor cores of sm_80: `ldmatrix` and `mma.sync` of 16 x 8 sums.

use super::copy::{FactorCopy, LineDim};
use super::plan::MultistagePlan;
use crate::build::asm::{Factor, Instruction};
use crate::build::block::Index;
use crate::build::simt::{Simt, Value};
use crate::build::{Builder, IntBinary};

/// Rows of an instruction, columns of one.
const ROWS: i64 = 16;
const COLUMNS: i64 = 8;
/// Bytes of its contracted elements.
const DEPTH_BYTES: i64 = 32;

/// The warp's part of a tile.
pub struct Mma<'c> {
    factor: Factor,
    rows: i64,
    columns: i64,
    depth: i64,
    first_row: Index<'c>,
    first_column: Index<'c>,
    a: Fragments<'c>,
    b: Fragments<'c>,
}

/// How a warp reads a factor in a stage.
enum Fragments<'c> {
    /// Four matrices of 8 x 16 bytes at a time.
    Matrices {
        /// Addresses of this lane's lines: for each part of the contracted elements if lines are rows (columns), else
        /// for each 16 of those.
        addresses: Vec<Index<'c>>,
        lines: LineDim,
        /// Bytes between 16 lines.
        step: i64,
    },
    /// Single words, where elements have 32 bits and matrices would have to be transposed.
    Words {
        /// Address of the lane's first word, bytes from one contracted element to the next, and the order of the four
        /// words of a fragment: how many rows (columns) and how many contracted elements further each is.
        address: Index<'c>,
        line: i64,
        order: [(i64, i64); 4],
    },
}

impl<'c> Fragments<'c> {
    /// Fragments of `count` rows (columns) of a factor from `own` on. Those of the first factor are 16 rows, those of
    /// the second two times 8 columns, in another order.
    fn new(b: &Simt<'c>, copy: &FactorCopy, factor: Factor, first: bool, own: Index<'c>, count: i64) -> Self {
        let lane = b.narrow(b.lane());
        if factor == Factor::Tf32 && copy.lines == LineDim::Contracted {
            let (down, k) = (b.index_div(lane, b.word(4)), b.index_rem(lane, b.word(4)));
            let line = copy.line_bytes();
            let address = b.index_add(b.index_mul(k, b.word(line)), b.index_mul(b.index_add(own, down), b.word(4)));
            let order = if first { [(0, 0), (8, 0), (0, 4), (8, 4)] } else { [(0, 0), (0, 4), (8, 0), (8, 4)] };
            return Fragments::Words { address, line, order };
        }
        let bit = |from: i64| b.bits(IntBinary::And, b.bits(IntBinary::ShrLogical, lane, b.word(from)), b.word(1));
        let below = |n: i64| b.bits(IntBinary::And, lane, b.word(n - 1));
        // The four matrices of a load follow each other along lines first, or along units first.
        let (line, unit) = match (copy.lines, first) {
            (LineDim::Own, true) | (LineDim::Contracted, false) => (below(16), bit(4)),
            (LineDim::Own, false) | (LineDim::Contracted, true) => (b.index_add(below(8), b.index_mul(bit(4), b.word(8))), bit(3)),
        };
        let swizzle = copy.swizzle(b, line);
        let at = |line: Index<'c>, unit: Index<'c>| {
            let unit = b.index_mul(b.bits(IntBinary::Xor, unit, swizzle), b.word(16));
            b.index_add(b.index_mul(line, b.word(copy.line_bytes())), unit)
        };
        let addresses = match copy.lines {
            LineDim::Own => (0..copy.line_bytes() / DEPTH_BYTES).map(|q| at(b.index_add(own, line), b.index_add(unit, b.word(2 * q)))).collect(),
            LineDim::Contracted => {
                let first = b.index_add(b.index_div(own, b.word(8)), unit);
                (0..count / 16).map(|i| at(line, b.index_add(first, b.word(2 * i)))).collect()
            }
        };
        Fragments::Matrices { addresses, lines: copy.lines, step: 16 * copy.line_bytes() }
    }

    /// Fragment `i` of 16 rows or columns, at part `q` of the contracted elements.
    fn load(&self, b: &Simt<'c>, factor: Factor, stage: Index<'c>, i: i64, q: i64) -> Vec<Value<'c>> {
        let words = match self {
            Fragments::Matrices { addresses, lines, step } => {
                let (address, lines, transposed) = match lines {
                    LineDim::Own => (addresses[q as usize], i, false),
                    LineDim::Contracted => (addresses[i as usize], q, true),
                };
                let address = b.index_add(b.index_add(stage, address), b.word(lines * step));
                b.asm(Instruction::LoadMatrices { transposed }, &[address.into()])
            }
            Fragments::Words { address, line, order } => {
                let first = b.index_add(stage, *address);
                let word =
                    |(own, k): &(i64, i64)| b.load_shared(b.index_add(first, b.word((factor.depth() * q + k) * line + 4 * (16 * i + own))), 1)[0];
                order.iter().map(word).collect()
            }
        };
        match factor {
            Factor::Half(_) => words,
            Factor::Tf32 => words.into_iter().map(|x| b.round_tf32(x)).collect(),
        }
    }
}

impl<'c> Mma<'c> {
    pub fn new(b: &Simt<'c>, plan: &MultistagePlan, factor: Factor) -> Self {
        let tile = &plan.tile;
        let [down, across] = tile.warps;
        let (rows, columns) = (tile.rows / down, tile.columns / across);
        let warp = b.index_div(b.thread(), b.word(32));
        let first_row = b.index_mul(b.index_div(warp, b.word(across)), b.word(rows));
        let first_column = b.index_mul(b.index_rem(warp, b.word(across)), b.word(columns));
        let fragments = |copy: &FactorCopy, first, own, count| Fragments::new(b, copy, factor, first, own, count);
        Mma {
            factor,
            rows,
            columns,
            depth: tile.depth,
            first_row,
            first_column,
            a: fragments(&plan.a, true, first_row, rows),
            b: fragments(&plan.b, false, first_column, columns),
        }
    }

    /// Initial sums of a thread: four for each 16 rows and each 8 columns.
    pub fn zero(&self, b: &Simt<'c>) -> Vec<Value<'c>> {
        vec![b.f32(0.0); (self.rows * self.columns / 32) as usize]
    }

    /// Adds the products of a stage.
    pub fn multiply(&self, b: &Simt<'c>, [a, second]: [Index<'c>; 2], sums: &mut [Value<'c>]) {
        for q in 0..self.depth / self.factor.depth() {
            let rows: Vec<_> = (0..self.rows / ROWS).map(|i| self.a.load(b, self.factor, a, i, q)).collect();
            let columns: Vec<_> = (0..self.columns / 16).flat_map(|j| self.b.load(b, self.factor, second, j, q)).collect();
            for (sums, (row, column)) in sums.chunks_exact_mut(4).zip(rows.iter().flat_map(|r| columns.chunks_exact(2).map(move |c| (r, c)))) {
                let operands = [row, column, &*sums].concat();
                sums.copy_from_slice(&b.asm(Instruction::Multiply(self.factor), &operands));
            }
        }
    }

    /// Puts the sums into shared memory, in rows of `row_bytes`.
    pub fn store(&self, b: &Simt<'c>, to: Index<'c>, row_bytes: i64, sums: &[Value<'c>]) {
        let lane = b.narrow(b.lane());
        let row = b.index_add(self.first_row, b.index_div(lane, b.word(4)));
        let column = b.index_add(self.first_column, b.index_mul(b.index_rem(lane, b.word(4)), b.word(2)));
        let first = b.index_add(to, b.index_add(b.index_mul(row, b.word(row_bytes)), b.index_mul(column, b.word(4))));
        let across = self.columns / COLUMNS;
        for (number, sums) in (0..).zip(sums.chunks_exact(4)) {
            let (i, j) = (number / across, number % across);
            for (half, pair) in (0..).zip(sums.chunks_exact(2)) {
                let offset = (ROWS * i + ir::fault!("gpu.product.half", 1, 8) * half) * row_bytes + 4 * COLUMNS * j;
                b.store_shared(b.index_add(first, b.word(offset)), pair);
            }
        }
    }
}
