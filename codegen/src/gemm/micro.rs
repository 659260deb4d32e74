//! The micro-kernel: a block of the result held in registers over all of a block's contracted elements, and what happens to it then.

use super::Gemm;
use crate::CompileError;
use crate::build::llvm::{Carried, Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, IntBinary, Lane};
use crate::pointwise::{self, Sources};
use inkwell::values::FunctionValue;
use ir::graph::Value;
use ir::op::Op;
use std::collections::BTreeMap;

/// Where a micro-kernel's sums begin and end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stage {
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
    pub stage: Stage,
}

/// Contracted elements per iteration.
const UNROLL: i64 = 4;
/// How many contracted elements ahead packed operands are fetched.
const AHEAD: i64 = 16;
/// The same for `B` in place, whose rows are far apart.
const AHEAD_IN_PLACE: i64 = 8;

/// Positions of the pointer parameters.
const A: u32 = 0;
const B: u32 = 1;
const PARTIAL: u32 = 2;
const SCALARS: u32 = 3;
/// Room for the sums of one micro-kernel.
const SPILL: u32 = 4;
/// Then one per tensor of the kernel, at the micro-kernel's first element.
const TENSORS: u32 = 5;

/// A function `(a, b, partial, scalars, spill, tensors.., row, column, outer, depth)`; row and column are the first ones in the product,
/// `outer` counts the repetitions of the product.
///
/// # Errors
/// The epilogue has an op that is not supported.
pub fn function<'c>(g: &Gemm<'_, 'c>, variant: Variant) -> Result<FunctionValue<'c>, CompileError> {
    let b = g.b;
    let tensors = g.kernel.inputs.len() + g.kernel.outputs.len();
    let stage = match (variant.stage.resumes, variant.stage.finishes) {
        (false, true) => "whole",
        (false, false) => "first",
        (true, false) => "middle",
        (true, true) => "last",
    };
    let name = format!("micro_{}x{}_{stage}", variant.rows, variant.columns);
    let function = b.function(&name, TENSORS as usize + tensors, 4, Visibility::Local);
    let sums = multiply(g, function, variant);
    let lanes = b.lanes() as i64;
    let partial = b.pointer_parameter(function, PARTIAL);
    let vectors = (variant.columns + lanes - 1) / lanes;
    let mask_of = |j: i64| {
        let used = (variant.columns - j * lanes).min(lanes);
        (used < lanes).then(|| b.mask_first(used as usize))
    };
    let mut result = Ok(());
    for j in 0..vectors {
        for i in 0..variant.rows {
            let mut sum = sums[(i * vectors + j) as usize];
            let place = g.partials.place(b, partial, i, j * lanes);
            if variant.stage.resumes {
                sum = b.add(sum, b.load(place, Lane::F32, mask_of(j)));
            }
            if !variant.stage.finishes {
                b.store(place, sum, Lane::F32, mask_of(j));
            } else if g.long_epilogue {
                b.store(spill(b, function, b.index(i), j), sum, Lane::F32, None);
            } else {
                finish(g, function, Spot { row: b.index(i), column: j * lanes, mask: mask_of(j) }, sum)?;
            }
        }
    }
    // Written once per row instead of once per vector: code stays short, and the sums' way through the cache is not felt.
    if variant.stage.finishes && g.long_epilogue {
        b.for_each(b.index(0), b.index(variant.rows), 1, &mut |row| {
            for j in 0..vectors {
                let sum = b.load(spill(b, function, row, j), Lane::F32, None);
                let done = finish(g, function, Spot { row, column: j * lanes, mask: mask_of(j) }, sum);
                if result.is_ok() {
                    result = done;
                }
            }
        });
    }
    result?;
    b.finish_function();
    Ok(function)
}

/// Bytes of the room for a micro-kernel's sums.
pub fn spill_bytes(plan: &super::plan::Plan) -> i64 {
    4 * plan.blocks.tallest() * plan.blocks.width.max(32)
}

fn spill<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, row: Index<'c>, vector: i64) -> Pointer<'c> {
    let lanes = b.lanes() as i64;
    // Two vectors per row at most.
    let line = b.at(b.pointer_parameter(function, SPILL), b.index_mul(row, b.index(4 * 2 * lanes)));
    b.at_const(line, 4 * vector * lanes)
}

/// The product of a row panel and a column panel: `rows * vectors` sums, rows outermost.
fn multiply<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, variant: Variant) -> Vec<Vector<'c>> {
    let (b, plan) = (g.b, g.plan);
    let lanes = b.lanes() as i64;
    let vectors = (variant.columns + lanes - 1) / lanes;
    let tail = variant.columns % lanes;
    // Strides in bytes: of A over rows and contracted elements, of B over contracted elements.
    let (a_row, a_step) = if plan.blocks.pack_a { (4, 4 * variant.rows) } else { (4 * plan.m.strides[plan.a], 4 * plan.k.strides[plan.a]) };
    let b_step = if plan.blocks.pack_b { 4 * plan.blocks.width } else { 4 * plan.k.strides[plan.b] };
    let masked = |j: i64| (!plan.blocks.pack_b && j == vectors - 1 && tail != 0).then(|| b.mask_first(tail as usize));

    let step = |state: &Carried<'c>, count: i64| {
        let (a, bp) = (state.pointers[0], state.pointers[1]);
        let mut sums = state.vectors.clone();
        for k in 0..count {
            let row: Vec<Vector> =
                (0..vectors).map(|j| b.load(b.at_const(bp, k * b_step + 4 * j * lanes), Lane::F32, masked(j))).collect();
            let ahead = if plan.blocks.pack_b { AHEAD } else { AHEAD_IN_PLACE };
            for j in 0..vectors {
                b.prefetch(b.at_const(bp, (k + ahead) * b_step + 4 * j * lanes));
            }
            if plan.blocks.pack_a {
                b.prefetch(b.at_const(a, (k + AHEAD) * a_step));
            }
            for i in 0..variant.rows {
                let element = b.load_splat(b.at_const(a, k * a_step + i * a_row), Lane::F32);
                for j in 0..vectors {
                    let sum = &mut sums[(i * vectors + j) as usize];
                    *sum = b.fma(element, row[j as usize], *sum);
                }
            }
        }
        Carried { pointers: vec![b.at_const(a, count * a_step), b.at_const(bp, count * b_step)], vectors: sums }
    };
    let depth_position = TENSORS + (g.kernel.inputs.len() + g.kernel.outputs.len()) as u32 + 3;
    let depth = b.index_parameter(function, depth_position);
    let start = Carried {
        pointers: vec![b.pointer_parameter(function, A), b.pointer_parameter(function, B)],
        vectors: vec![b.f32(0.0); (variant.rows * vectors) as usize],
    };
    let whole = b.index_mul(b.index_div(depth, b.index(UNROLL)), b.index(UNROLL));
    let mut state = b.repeat_carrying(b.index(0), whole, b.index(UNROLL), &start, &mut |_, s| step(s, UNROLL));
    if g.plan.k.size % UNROLL != 0 {
        state = b.repeat_carrying(whole, depth, b.index(1), &state, &mut |_, s| step(s, 1));
    }
    state.vectors
}

/// A vector of the result inside the micro-kernel's block.
#[derive(Clone, Copy)]
struct Spot<'c> {
    row: Index<'c>,
    column: i64,
    mask: Option<Vector<'c>>,
}

/// Computes the ops after the product at one vector and stores the outputs.
fn finish<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, spot: Spot<'c>, sum: Vector<'c>) -> Result<(), CompileError> {
    let b = g.b;
    let mut known = BTreeMap::from([(g.plan.dot, sum)]);
    // All values before any store: an output may lie over an input.
    let outputs = &g.kernel.outputs;
    let values = outputs.iter().map(|o| evaluate(g, function, spot, o.value, &mut known)).collect::<Result<Vec<_>, _>>()?;
    for ((position, output), mut value) in outputs.iter().enumerate().zip(values) {
        let lane = pointwise::lane(g.kernel.body[output.value].ty.dtype)?;
        let tensor = g.kernel.inputs.len() + position;
        if output.accumulate {
            let old = read(g, function, spot, tensor, lane);
            value = match lane {
                Lane::F32 => b.add(old, value),
                Lane::I32 => b.int2(IntBinary::Add, old, value),
                Lane::Mask | Lane::F64 | Lane::I64 => b.int2(IntBinary::Or, old, value),
            };
        }
        let place = place(g, function, spot, tensor, lane);
        match g.plan.n.strides[tensor] {
            1 => b.store(place, value, lane, spot.mask),
            stride => b.scatter(place, offsets(b, stride, lane), value, lane, spot.mask),
        }
    }
    Ok(())
}

fn evaluate<'c>(
    g: &Gemm<'_, 'c>,
    function: FunctionValue<'c>,
    spot: Spot<'c>,
    v: Value,
    known: &mut BTreeMap<Value, Vector<'c>>,
) -> Result<Vector<'c>, CompileError> {
    if let Some(value) = known.get(&v) {
        return Ok(*value);
    }
    let node = &g.kernel.body[v];
    let value = match &node.op {
        Op::Input(i) => read(g, function, spot, *i as usize, pointwise::lane(node.ty.dtype)?),
        op if op.is_source() => {
            let sources = Sources {
                b: g.b,
                body: &g.kernel.body,
                scalars: b_scalars(g, function),
                scalar_count: g.kernel.scalars.len(),
            };
            sources.value(v, &mut |dim| local_index(g, function, spot, dim))?
        }
        _ => {
            let args = node.args.iter().map(|a| evaluate(g, function, spot, *a, known)).collect::<Result<Vec<_>, _>>()?;
            pointwise::apply(g.b, &g.kernel.body, v, &args)?
        }
    };
    known.insert(v, value);
    Ok(value)
}

fn b_scalars<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>) -> Pointer<'c> {
    g.b.pointer_parameter(function, SCALARS)
}

/// The local index along a dim of the product's rows or columns.
fn local_index<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, spot: Spot<'c>, dim: ir::dim::Dim) -> Vector<'c> {
    let b = g.b;
    let dims = &g.kernel.body.dims;
    let first = TENSORS + (g.kernel.inputs.len() + g.kernel.outputs.len()) as u32;
    let along = |position: u32, offset| b.index_add(b.index_parameter(function, position), offset);
    if let Some((inner, size)) = g.plan.m.digit(dims, dim) {
        let row = along(first, spot.row);
        return b.splat(b.index_rem(b.index_div(row, b.index(inner)), b.index(size)));
    }
    if let Some((inner, size)) = g.plan.n.digit(dims, dim) {
        let column = b.int2(IntBinary::Add, b.splat(along(first + 1, b.index(spot.column))), b.lane_numbers());
        return b.int2(IntBinary::Rem, b.int2(IntBinary::Div, column, b.i64(inner)), b.i64(size));
    }
    // The repetitions are numbered with the last direction fastest.
    let mut inner_axes = 1;
    for axis in g.plan.outer.iter().rev() {
        if let Some((inner, size)) = axis.digit(dims, dim) {
            let outer = b.index_parameter(function, first + 2);
            return b.splat(b.index_rem(b.index_div(outer, b.index(inner * inner_axes)), b.index(size)));
        }
        inner_axes *= axis.size;
    }
    b.i64(0)
}

fn place<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, spot: Spot<'c>, tensor: usize, lane: Lane) -> Pointer<'c> {
    let b = g.b;
    let row = b.index_mul(spot.row, b.index(g.plan.m.strides[tensor] * lane.bytes()));
    let start = b.at(b.pointer_parameter(function, TENSORS + tensor as u32), row);
    b.at_const(start, spot.column * g.plan.n.strides[tensor] * lane.bytes())
}

fn offsets<'c>(b: &Llvm<'c>, stride: i64, lane: Lane) -> Vector<'c> {
    b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(stride * lane.bytes()))
}

fn read<'c>(g: &Gemm<'_, 'c>, function: FunctionValue<'c>, spot: Spot<'c>, tensor: usize, lane: Lane) -> Vector<'c> {
    let b = g.b;
    let place = place(g, function, spot, tensor, lane);
    match g.plan.n.strides[tensor] {
        0 => b.load_splat(place, lane),
        1 => b.load(place, lane, spot.mask),
        stride => b.gather(place, offsets(b, stride, lane), lane, spot.mask),
    }
}
