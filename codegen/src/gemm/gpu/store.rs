//! How a warp of a warpgroup stores its 16 rows of sums: through a staging area of its own in shared memory, 64
//! columns at a time, to the epilogue.
//!
//! In registers a lane has two neighbouring columns of every eight. Where all that the epilogue reads and writes
//! along columns is dense and aligned, each lane then takes as many neighbouring columns as 16 bytes of the widest
//! result hold, else one. No other warp is waited for.

use super::parts::{Gpu, TilePart};
use super::wgmma::WARP_ROWS;
use crate::CompileError;
use crate::build::block::Index;
use crate::build::simt::{LANES, Pointer, Simt, Value};
use crate::build::{Builder, IntBinary};
use crate::gemm::epilogue::{Epilogue, Memory, ResultVector, inputs};
use crate::gemm::product::{Product, Tensor};
use crate::layout::{div_ceil, tensors};
use crate::pointwise;
use ir::kernel::Kernel;
use std::collections::BTreeSet;

/// Columns that are stored at a time, and the bytes of a row of them.
const COLUMNS: i64 = 64;
const ROW: i64 = 4 * COLUMNS;
/// Bytes of a warp's staging area.
pub const STAGING: i64 = WARP_ROWS * ROW;
/// Registers of a thread for what is read ahead, beside up to 128 of sums.
const READ_AHEAD: i64 = 48;
/// Sums that a thread has in `COLUMNS` columns.
const SUMS: usize = (COLUMNS / 2) as usize;

/// Runs of columns that lanes can take.
struct Runs {
    /// Columns of each.
    width: i64,
    /// Tensors, and the alignment that their addresses must have.
    aligned: Vec<(Tensor, i64)>,
    /// Runs of a lane that are read before the first of them is computed with.
    read_ahead: usize,
}

impl Runs {
    /// `None` if some tensor is not contiguous along columns, or its rows are not aligned to runs.
    fn new(kernel: &Kernel, product: &Product) -> Option<Runs> {
        let all = tensors(kernel);
        let bytes = |t: usize| pointwise::stored(all[t].0.dtype).bytes();
        let outputs = kernel.inputs.len()..all.len();
        let inputs: BTreeSet<Tensor> = inputs(kernel, product).into_values().collect();
        if outputs.clone().any(|t| product.n.strides[t] != 1) {
            return None;
        }
        let width = 16 / outputs.clone().map(bytes).max()?.max(2);
        let along: Vec<usize> = inputs.iter().copied().filter(|t| product.n.strides[*t] == 1).chain(outputs.clone()).collect();
        let aligned: Vec<(usize, i64)> = along.iter().map(|t| (*t, (width * bytes(*t)).min(16))).collect();
        let others = |t: usize| product.outer.iter().map(move |x| x.strides[t]).chain([product.m.strides[t]]);
        let fits = aligned.iter().all(|(t, align)| others(*t).all(|s| s * bytes(*t) % align == 0));
        let added = outputs.filter(|t| kernel.outputs[t - kernel.inputs.len()].accumulate);
        let read = inputs.iter().copied().chain(added).filter(|t| product.n.strides[*t] == 1);
        let words = read.map(|t| width * bytes(t) / 4).sum::<i64>().max(1);
        let read_ahead = (READ_AHEAD / words).max(1) as usize;
        (product.n.size % width == 0 && fits).then_some(Runs { width, aligned, read_ahead })
    }
}

/// A warp's rows of every tile.
pub struct WarpEpilogue<'a, 'g, 'c> {
    g: &'a Gpu<'g, 'c>,
    /// Address of the warp's staging area, and its first row in a tile.
    staging: Index<'c>,
    first: Index<'c>,
    /// Runs, and whether all tensors are aligned for them.
    runs: Option<(Runs, Index<'c>)>,
}

impl<'a, 'g, 'c> WarpEpilogue<'a, 'g, 'c> {
    /// The epilogue of a warp, by its number among those that multiply, whose staging areas begin at `at`, and by that
    /// among those of its tile.
    pub fn new(g: &'a Gpu<'g, 'c>, at: Index<'c>, [warp, in_tile]: [Index<'c>; 2], tensors: &[Pointer<'c>]) -> Self {
        let b = g.b;
        let runs = Runs::new(g.kernel, g.product).map(|runs| {
            let rests = runs.aligned.iter().map(|(t, align)| b.bits(IntBinary::And, b.address(tensors[*t]), b.index(align - 1)));
            let any = rests.reduce(|x, y| b.bits(IntBinary::Or, x, y)).unwrap_or_else(|| b.index(0));
            (runs, b.equal(any, b.index(0)))
        });
        WarpEpilogue { g, staging: b.index_add(at, b.index_mul(warp, b.word(STAGING))), first: b.index_mul(in_tile, b.word(WARP_ROWS)), runs }
    }

    /// The 16-byte unit of a row of the staging area that holds four columns. Rows and halves of rows are swizzled
    /// against each other, so that neither stores nor loads of sums have bank conflicts.
    fn unit(&self, row: Index<'c>, unit: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        let shift = b.index_mul(b.bits(IntBinary::And, row, b.word(3)), b.word(2));
        b.bits(IntBinary::Xor, unit, b.bits(IntBinary::Xor, shift, b.bits(IntBinary::ShrLogical, unit, b.word(3))))
    }

    /// Address of the sum of a column, in a row of the staging area.
    fn place(&self, row: Index<'c>, column: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        let unit = self.unit(row, b.index_div(column, b.word(4)));
        let in_row = b.index_add(b.index_mul(unit, b.word(16)), b.index_mul(b.index_rem(column, b.word(4)), b.word(4)));
        b.index_add(self.staging, b.index_add(b.index_mul(row, b.word(ROW)), in_row))
    }

    /// Computes what follows the product in the rows of a part, and stores it.
    pub fn store(&self, part: &TilePart<'c>, sums: &[Value<'c>], scalars: Pointer<'c>) -> Result<(), CompileError> {
        let (b, product, tile) = (self.g.b, self.g.product, self.g.tile);
        let all = tile.columns / COLUMNS;
        let pieces = match product.n.size % tile.columns {
            0 => b.word(all),
            _ => {
                let left = b.index_sub(b.word(product.n.size + ir::fault!("gpu.rows.pieces", 0, COLUMNS - 1)), part.column);
                b.least(b.word(all), b.index_div(left, b.word(COLUMNS)))
            }
        };
        // `inside` converts a row of the product to a row of this warp's staging area.
        let inside = |row: Index<'c>| b.least(b.most(b.index_sub(b.index_sub(row, part.row), self.first), b.word(0)), b.word(WARP_ROWS));
        let rows = [inside(part.from), inside(part.to)];
        let mut result = Ok(());
        b.loop_over([b.word(0), pieces, b.word(1)], &[], &mut |piece, _| {
            for (number, sums) in (0..).zip(sums.chunks_exact(SUMS)) {
                b.if_so(b.equal(piece, b.word(number)), || self.put(sums));
            }
            b.warp_barrier();
            let column = b.index_add(part.column, b.index_mul(piece, b.word(COLUMNS)));
            let part = TilePart { row: b.index_add(part.row, self.first), starts: part.starts.clone(), ..*part };
            let epilogue = self.g.epilogue(&part, column, scalars);
            let (mut by_run, mut by_one) = (Ok(()), Ok(()));
            match &self.runs {
                Some((runs, aligned)) => {
                    b.either(*aligned, || by_run = self.by_run(&epilogue, runs, column, rows), || by_one = self.by_one(&epilogue, column, rows));
                }
                None => by_one = self.by_one(&epilogue, column, rows),
            }
            b.warp_barrier();
            result = by_run.and(by_one);
            vec![]
        });
        result
    }

    /// Puts a piece of the sums into the staging area.
    fn put(&self, sums: &[Value<'c>]) {
        let b = self.g.b;
        let lane = b.narrow(b.lane());
        let (row, pair) = (b.index_div(lane, b.word(4)), b.index_rem(lane, b.word(4)));
        let start = self.place(row, b.index_mul(pair, b.word(2)));
        for (eight, sums) in (0..).zip(sums.chunks_exact(4)) {
            // Rows of the staging area are aligned to their length, so bits of a unit's number are address bits.
            let first = b.bits(IntBinary::Xor, start, b.word(16 * ((2 * eight) ^ (eight >> 2))));
            for (half, two) in (0..).zip(sums.chunks_exact(2)) {
                b.store_shared(b.index_add(first, b.word(8 * half * ROW)), two);
            }
        }
    }

    /// Computes runs of columns, several rows at a time. The operands of a whole piece are read ahead.
    fn by_run(&self, epilogue: &Epilogue<'_, Simt<'c>>, runs: &Runs, column: Index<'c>, [from, to]: [Index<'c>; 2]) -> Result<(), CompileError> {
        let (b, product, width) = (self.g.b, self.g.product, runs.width);
        let across = COLUMNS / width;
        let lane = b.narrow(b.lane());
        let first = b.index_mul(b.index_rem(lane, b.word(across)), b.word(width));
        let down = b.index_div(lane, b.word(across));
        let epilogue = Epilogue { runs: Some(b.widen(first).into()), tensors: epilogue.tensors.clone(), ..*epilogue };
        let together = LANES as i64 / across;
        let vector = |row| ResultVector { row: b.widen(row), column: 0, mask: None };
        let sums = |row| -> Vec<Value> {
            let four = |n: i64| b.load_shared(self.place(row, b.index_add(first, b.word(4 * n))), 4);
            (0..div_ceil(width, 4)).flat_map(four).collect()
        };
        let at_once = || {
            let rows: Vec<Index> = (0..WARP_ROWS / together).map(|k| b.index_add(b.word(k * together), down)).collect();
            for rows in rows.chunks(runs.read_ahead) {
                let memory: Vec<Memory<_>> = rows.iter().map(|row| epilogue.read_all(vector(*row), width as usize)).collect();
                for (row, memory) in rows.iter().zip(memory) {
                    epilogue.write(vector(*row), &sums(*row), memory)?;
                }
            }
            Ok(())
        };
        let one_by_one = || {
            let mut result = Ok(());
            b.loop_over([b.word(0), b.word(WARP_ROWS), b.word(together)], &[], &mut |rows, _| {
                let row = b.index_add(rows, down);
                let mut counts = b.bits(IntBinary::And, b.less(row, to), b.less(b.index_sub(from, b.word(1)), row));
                if product.n.size % COLUMNS != 0 {
                    counts = b.bits(IntBinary::And, counts, b.less(b.index_add(column, first), b.word(product.n.size)));
                }
                b.if_so(counts, || result = epilogue.write(vector(row), &sums(row), Memory::unread()));
                vec![]
            });
            result
        };
        let mut whole = b.equal(b.index_sub(to, from), b.word(WARP_ROWS));
        if product.n.size % COLUMNS != 0 {
            whole = b.bits(IntBinary::And, whole, b.less(column, b.word(product.n.size - COLUMNS + 1)));
        }
        let (mut of_all, mut of_some) = (Ok(()), Ok(()));
        b.either(whole, || of_all = at_once(), || of_some = one_by_one());
        of_all.and(of_some)
    }

    /// Computes one column in each lane, a row at a time.
    fn by_one(&self, epilogue: &Epilogue<'_, Simt<'c>>, column: Index<'c>, [from, to]: [Index<'c>; 2]) -> Result<(), CompileError> {
        let (b, product) = (self.g.b, self.g.product);
        let lane = b.narrow(b.lane());
        let mut result = Ok(());
        b.loop_over([from, to, b.word(1)], &[], &mut |row, _| {
            for first in (0..COLUMNS).step_by(LANES) {
                let sum = b.load_shared(self.place(row, b.index_add(lane, b.word(first))), 1)[0];
                let left = || b.index_sub(b.word(product.n.size - first), column);
                let mask = (product.n.size % COLUMNS != 0).then(|| b.less(lane, left()).into());
                let done = epilogue.write(ResultVector { row: b.widen(row), column: first, mask }, &[sum], Memory::unread());
                if result.is_ok() {
                    result = done;
                }
            }
            vec![]
        });
        result
    }
}
