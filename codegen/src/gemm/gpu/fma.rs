//! Products in f32: each thread has 8 x 8 sums, four rows and columns in either half of the tile.

use super::plan::MultistagePlan;
use crate::build::Builder;
use crate::build::block::Index;
use crate::build::simt::{Simt, Value};

/// Rows and columns of a thread.
const SIDE: i64 = 8;
/// Neighbours that are read at once.
const RUN: i64 = 4;
/// Contracted elements of an iteration.
const UNROLL: i64 = 4;

/// The thread's part of a tile.
pub struct Fma<'c> {
    rows: i64,
    columns: i64,
    depth: i64,
    /// Bytes of a line of either factor in shared memory.
    lines: [i64; 2],
    first_row: Index<'c>,
    first_column: Index<'c>,
}

impl<'c> Fma<'c> {
    pub fn new(b: &Simt<'c>, plan: &MultistagePlan) -> Self {
        let tile = &plan.tile;
        let across = b.word(tile.columns / SIDE);
        let thread = b.thread();
        Fma {
            rows: tile.rows,
            columns: tile.columns,
            depth: tile.depth,
            lines: [plan.a.words_line(), plan.b.words_line()],
            first_row: b.index_mul(b.index_div(thread, across), b.word(RUN)),
            first_column: b.index_mul(b.index_rem(thread, across), b.word(RUN)),
        }
    }

    pub fn zero(&self, b: &Simt<'c>) -> Vec<Value<'c>> {
        vec![b.f32(0.0); (SIDE * SIDE) as usize]
    }

    /// Adds the products of a stage.
    pub fn multiply(&self, b: &Simt<'c>, [a, second]: [Index<'c>; 2], sums: &mut [Value<'c>]) {
        let start = |stage, first: Index<'c>| b.index_add(stage, b.index_mul(first, b.word(4)));
        let (a, second) = (start(a, self.first_row), start(second, self.first_column));
        let out = b.loop_over([b.word(0), b.word(self.depth), b.word(UNROLL)], sums, &mut |k, sums| {
            let mut sums = sums.to_vec();
            for next in 0..UNROLL {
                let read = |start, line: i64, size: i64| -> Vec<Value<'c>> {
                    let at = b.index_add(start, b.index_mul(k, b.word(line)));
                    let run = |half: i64| b.load_shared(b.index_add(at, b.word(next * line + half * 2 * size)), RUN as usize);
                    [run(0), run(1)].concat()
                };
                let (rows, columns) = (read(a, self.lines[0], self.rows), read(second, self.lines[1], self.columns));
                for (sums, row) in sums.chunks_exact_mut(SIDE as usize).zip(rows) {
                    for (sum, column) in sums.iter_mut().zip(&columns) {
                        *sum = b.fma(row, *column, *sum);
                    }
                }
            }
            sums
        });
        sums.copy_from_slice(&out);
    }

    /// Puts the sums into shared memory, in rows of `row_bytes`.
    pub fn store(&self, b: &Simt<'c>, to: Index<'c>, row_bytes: i64, sums: &[Value<'c>]) {
        let first = b.index_add(b.index_mul(self.first_row, b.word(row_bytes)), b.index_mul(self.first_column, b.word(4)));
        let first = b.index_add(to, first);
        for (number, run) in (0..).zip(sums.chunks_exact(RUN as usize)) {
            let (row, half) = (number / 2, number % 2);
            let row = ir::fault!("gpu.product.row", row, row / RUN * (self.rows / 2) + row % RUN);
            b.store_shared(b.index_add(first, b.word(row * row_bytes + half * 2 * self.columns)), run);
        }
    }
}
