//! The micro-kernel: a block of the result held in registers over all of a block's contracted elements, and what
//! happens to it then.

use super::context::Gemm;
use super::epilogue::{Epilogue, Memory, ResultVector};
use super::prefetch::{self, PrefetchPart, PrefetchTask};
use super::product::ExpertDim;
use crate::CompileError;
use crate::build::llvm::{CacheLevel, CarriedValues, Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, Lane};
use crate::layout::div_ceil;
use inkwell::values::FunctionValue;

/// Where a micro-kernel's sums begin and end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PassPosition {
    /// The sums of earlier blocks are in memory.
    pub resumes: bool,
    /// These are the last: the epilogue follows, and the outputs are stored.
    pub finishes: bool,
}

/// What a micro-kernel is made for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Variant {
    pub rows: i64,
    pub columns: i64,
    pub pass: PassPosition,
}

/// Contracted elements per iteration.
pub const UNROLL: i64 = 4;
/// How many contracted elements ahead packed operands are fetched.
const AHEAD: i64 = 16;
/// The same for `B` in place, whose rows are far apart.
const AHEAD_IN_PLACE: i64 = 8;

/// Positions of the pointer parameters.
const A: u32 = 0;
const B: u32 = 1;
const PARTIAL: u32 = 2;
const SCALARS: u32 = 3;
/// Memory for the sums of one micro-kernel.
const SPILL: u32 = 4;
/// The micro-kernel's parts of the next blocks of `A` and `B`.
const NEXT: u32 = 5;
/// Then one per tensor of the kernel, at the micro-kernel's first element.
const TENSORS: u32 = NEXT + 2 * prefetch::POINTERS;

/// Positions of the index parameters, which follow the pointers.
const ROW: u32 = 0;
const COLUMN: u32 = 1;
const OUTER: u32 = 2;
const DEPTH: u32 = 3;
/// Numbers of the parts of the next blocks.
const NUMBERS: u32 = 4;
const INDICES: u32 = NUMBERS + 2 * prefetch::NUMBERS;
/// Number of rows, which [`finish`] takes in place of the depth.
const ROWS: u32 = 3;

/// The position of the first index parameter.
fn first_index(g: &Gemm) -> u32 {
    TENSORS + (g.kernel.inputs.len() + g.kernel.outputs.len()) as u32
}

/// A function `(a, b, partial, scalars, spill, pointers of next.., tensors.., row, column, outer, depth, numbers of
/// next..)`; row and column are the first ones in the product, `outer` counts the repetitions of the product. A long
/// epilogue is in `finish`.
///
/// # Errors
/// The epilogue has an op that is not supported.
pub fn function<'c>(g: &Gemm<'_, 'c>, variant: Variant, finish: Option<FunctionValue<'c>>) -> Result<FunctionValue<'c>, CompileError> {
    let b = g.b;
    let tensors = g.kernel.inputs.len() + g.kernel.outputs.len();
    let pass = match (variant.pass.resumes, variant.pass.finishes) {
        (false, true) => "whole",
        (false, false) => "first",
        (true, false) => "middle",
        (true, true) => "last",
    };
    let name = format!("micro_{}x{}_{pass}", variant.rows, variant.columns);
    let function = b.function(&name, TENSORS as usize + tensors, INDICES as usize, Visibility::Local);
    let sums = multiply(g, function, variant);
    let lanes = b.lanes() as i64;
    let partial = b.pointer_parameter(function, PARTIAL);
    let vectors = (variant.columns + lanes - 1) / lanes;
    let mask_of = |j: i64| mask(b, variant.columns, j);
    let epilogue = epilogue(g, function);
    for j in 0..vectors {
        for i in 0..variant.rows {
            let mut sum = sums[(i * vectors + j) as usize];
            let place = b.at_const(partial, 4 * (i * g.partials.unwrap_or(0) + j * lanes));
            if variant.pass.resumes {
                sum = ir::fault!("gemm.partial.sum", sum, b.add(sum, b.load(place, Lane::F32, mask_of(j))));
            }
            if !variant.pass.finishes {
                b.store(place, sum, Lane::F32, mask_of(j));
            } else if finish.is_some() {
                b.store(spill(b, function, b.index(i), j), sum, Lane::F32, None);
            } else {
                epilogue.write(ResultVector { row: b.index(i), column: j * lanes, mask: mask_of(j) }, &[sum], Memory::unread())?;
            }
        }
    }
    if let Some(finish) = finish.filter(|_| variant.pass.finishes) {
        let pointers: Vec<Pointer> = (0..first_index(g)).map(|p| b.pointer_parameter(function, p)).collect();
        let index = |p: u32| b.index_parameter(function, first_index(g) + p);
        b.call(finish, &pointers, &[index(ROW), index(COLUMN), index(OUTER), b.index(variant.rows)]);
    }
    b.finish_function();
    Ok(function)
}

/// What follows the product, in a function with the parameters of a micro-kernel.
fn epilogue<'a, 'c>(g: &'a Gemm<'_, 'c>, function: FunctionValue<'c>) -> Epilogue<'a, Llvm<'c>> {
    let b = g.b;
    let index = |p: u32| b.index_parameter(function, first_index(g) + p);
    Epilogue {
        b,
        kernel: g.kernel,
        product: g.plan,
        scalars: b.pointer_parameter(function, SCALARS),
        tensors: (TENSORS..first_index(g)).map(|p| b.pointer_parameter(function, p)).collect(),
        row: index(ROW),
        column: index(COLUMN),
        outer: index(OUTER),
        runs: None,
    }
}

/// The lanes of vector `j` that are among these columns, unless all are.
fn mask<'c>(b: &Llvm<'c>, columns: i64, j: i64) -> Option<Vector<'c>> {
    let lanes = b.lanes() as i64;
    let used = (columns - j * lanes).min(lanes);
    (used < ir::fault!("gemm.columns.mask", 1, lanes)).then(|| b.mask_first(used as usize))
}

/// The epilogue of micro-kernels of this width, whose sums wait in memory: a function of their parameters, with the
/// number of rows in place of the depth. Written once instead of once per vector, it keeps code short, and the sums'
/// way through the cache costs nothing.
///
/// # Errors
/// The epilogue has an op that is not supported.
pub fn finish<'c>(g: &Gemm<'_, 'c>, columns: i64) -> Result<FunctionValue<'c>, CompileError> {
    let b = g.b;
    let function = b.function(&format!("finish_{columns}"), first_index(g) as usize, 4, Visibility::Local);
    let epilogue = epilogue(g, function);
    let lanes = b.lanes() as i64;
    let mut result = Ok(());
    b.for_each(b.index(0), b.index_parameter(function, first_index(g) + ROWS), 1, &mut |row| {
        for j in 0..(columns + lanes - 1) / lanes {
            let sum = b.load(spill(b, function, row, j), Lane::F32, None);
            let done = epilogue.write(ResultVector { row, column: j * lanes, mask: mask(b, columns, j) }, &[sum], Memory::unread());
            if result.is_ok() {
                result = done;
            }
        }
    });
    result?;
    b.finish_function();
    Ok(function)
}

/// Bytes for a micro-kernel's sums.
pub fn spill_bytes(plan: &super::plan::GemmPlan) -> i64 {
    4 * plan.blocks.tallest() * plan.blocks.width.max(32)
}

fn spill<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, row: Index<'c>, vector: i64) -> Pointer<'c> {
    let lanes = b.lanes() as i64;
    // A row has at most two vectors.
    let line = b.at(b.pointer_parameter(function, SPILL), b.index_mul(row, b.index(4 * 2 * lanes)));
    b.at_const(line, 4 * vector * lanes)
}

/// What a micro-kernel prefetches beside the operands of its next steps. Without it, each one would wait for memory
/// at its end, or the first one of the next row panel at every step.
struct MicroPrefetch<'a, 'c> {
    b: &'a Llvm<'c>,
    rows: i64,
    /// For `A` in place: byte offsets of the rows of the next row panel that this column panel prefetches, one line
    /// of each at a step. The column panels of a tile share the rows.
    next: Option<(Index<'c>, Vec<i64>)>,
    /// Blocks that are read or written at the end: start, row stride and bytes of a row.
    blocks: Vec<(Pointer<'c>, i64, i64)>,
    /// The factors' next blocks.
    copies: Vec<PrefetchTask<'a, 'c>>,
}

impl<'a, 'c> MicroPrefetch<'a, 'c> {
    fn new(g: &'a Gemm<'_, 'c>, function: FunctionValue<'c>, variant: Variant, vectors: i64) -> MicroPrefetch<'a, 'c> {
        let (b, plan, pass) = (g.b, g.plan, variant.pass);
        let blocks = &plan.blocks;
        let next = (!blocks.pack_a).then(|| {
            let (stride, columns) = (g.bytes(plan.a) * plan.m.strides[plan.a], blocks.tile_columns);
            let column = b.index_parameter(function, first_index(g) + COLUMN);
            let panel = b.index_rem(b.index_div(column, b.index(blocks.width)), b.index(columns));
            let first = b.index_mul(b.index_add(panel, b.index(variant.rows)), b.index(stride));
            (first, (0..div_ceil(variant.rows, columns)).map(|i| i * columns * stride).collect())
        });
        let width = vectors * b.lanes() as i64;
        let partial = g.partials.filter(|_| pass.resumes).map(|stride| (b.pointer_parameter(function, PARTIAL), 4 * stride, 4 * width));
        let tensors = (0..g.kernel.inputs.len() + g.kernel.outputs.len()).filter(|t| pass.finishes && *t != plan.a && *t != plan.b);
        let tensors = tensors.filter(|t| plan.n.strides[*t] == 1 && plan.m.strides[*t] != 0);
        let tensors = tensors.map(|t| {
            let bytes = g.bytes(t);
            (b.pointer_parameter(function, TENSORS + t as u32), bytes * plan.m.strides[t], bytes * width)
        });
        let part = |f: u32| PrefetchPart {
            pointers: std::array::from_fn(|i| b.pointer_parameter(function, NEXT + f * prefetch::POINTERS + i as u32)),
            numbers: std::array::from_fn(|i| b.index_parameter(function, first_index(g) + NUMBERS + f * prefetch::NUMBERS + i as u32)),
        };
        let copies = (0..).zip(&g.next).filter_map(|(f, next)| Some(PrefetchTask::new(b, next.as_ref()?, part(f)))).collect();
        MicroPrefetch { b, rows: variant.rows, next, blocks: partial.into_iter().chain(tensors).collect(), copies }
    }

    /// Prefetches the share of the iteration at contracted element `k`, with `A` at `a`; of the blocks that the end
    /// needs, one row.
    fn fetch(&self, k: Index<'c>, a: Pointer<'c>) {
        let b = self.b;
        if let Some((first, rows)) = &self.next {
            rows.iter().for_each(|row| b.prefetch(b.at_const(b.at(a, *first), *row), CacheLevel::First));
        }
        let number = b.index_div(k, b.index(UNROLL));
        self.copies.iter().for_each(|task| task.step(b, number));
        let row = b.index_min(number, b.index(self.rows - 1));
        for (start, stride, bytes) in &self.blocks {
            let place = b.at(*start, b.index_mul(row, b.index(*stride)));
            (0..*bytes).step_by(64).for_each(|byte| b.prefetch(b.at_const(place, byte), CacheLevel::First));
        }
    }
}

/// The product of a row panel and a column panel: `rows * vectors` sums, rows outermost.
fn multiply<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, variant: Variant) -> Vec<Vector<'c>> {
    let (b, plan) = (g.b, g.plan);
    let lanes = b.lanes() as i64;
    let vectors = (variant.columns + lanes - 1) / lanes;
    let tail = variant.columns % lanes;
    // All strides are in bytes: `a_row` and `a_step` of A over rows and contracted elements, `b_step` of B over
    // contracted elements.
    let packed_rows = if ir::fault!("gemm.experts.height", false, plan.owns(ExpertDim::Rows)) { plan.blocks.height } else { variant.rows };
    let (a_row, a_step) = if plan.blocks.pack_a { (4, 4 * packed_rows) } else { (4 * plan.m.strides[plan.a], 4 * plan.k.strides[plan.a]) };
    let b_step = if plan.blocks.pack_b { 4 * plan.blocks.width } else { 4 * plan.k.strides[plan.b] };
    let masked = |j: i64| (!plan.blocks.pack_b && j == vectors - 1 && tail != 0).then(|| b.mask_first(tail as usize));

    let prefetch_ahead = MicroPrefetch::new(g, function, variant, vectors);
    let step = |state: &CarriedValues<'c>, count: i64| {
        let (a, bp) = (state.pointers[0], state.pointers[1]);
        let mut sums = state.vectors.clone();
        for k in 0..count {
            let row: Vec<Vector> = (0..vectors).map(|j| b.load(b.at_const(bp, k * b_step + 4 * j * lanes), Lane::F32, masked(j))).collect();
            let ahead = if plan.blocks.pack_b { AHEAD } else { AHEAD_IN_PLACE };
            for j in 0..vectors {
                b.prefetch(b.at_const(bp, (k + ahead) * b_step + 4 * j * lanes), CacheLevel::First);
            }
            if plan.blocks.pack_a {
                b.prefetch(b.at_const(a, (k + AHEAD) * a_step), CacheLevel::First);
            }
            for i in 0..variant.rows {
                let element = b.load_splat(b.at_const(a, k * a_step + i * a_row), Lane::F32);
                for j in 0..vectors {
                    let sum = &mut sums[(i * vectors + j) as usize];
                    *sum = b.fma(element, row[j as usize], *sum);
                }
            }
        }
        CarriedValues { pointers: vec![b.at_const(a, count * a_step), b.at_const(bp, count * b_step)], vectors: sums }
    };
    let depth = b.index_parameter(function, first_index(g) + DEPTH);
    let start = CarriedValues {
        pointers: vec![b.pointer_parameter(function, A), b.pointer_parameter(function, B)],
        vectors: vec![b.f32(0.0); (variant.rows * vectors) as usize],
    };
    let whole = b.index_mul(b.index_div(depth, b.index(UNROLL)), b.index(UNROLL));
    let mut state = b.repeat_carrying(b.index(0), whole, b.index(UNROLL), &start, &mut |k, s| {
        prefetch_ahead.fetch(k, s.pointers[0]);
        step(s, UNROLL)
    });
    prefetch_ahead.copies.iter().for_each(|task| task.finish(b, b.index_div(depth, b.index(UNROLL))));
    if ir::fault!("gemm.depth.rest", false, g.plan.k.size % UNROLL != 0) || plan.owns(ExpertDim::Contracted) {
        state = b.repeat_carrying(whole, depth, b.index(1), &state, &mut |_, s| step(s, 1));
    }
    state.vectors
}
