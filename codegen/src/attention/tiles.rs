//! Operations on blocks of rows in scratch: products, copies, transposes.

use super::{Plan, Rows};
use crate::build::llvm::{Carried, Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, Compare, Lane};
use crate::layout::div_ceil;
use crate::loops::accumulated;
use crate::pointwise;
use inkwell::values::FunctionValue;
use ir::op::DType;

/// A product of static size, `C[rows, columns] = A[rows, depth] * B[depth, columns]`. Rows of B and C are whole vectors.
pub struct Product<'a> {
    pub name: &'a str,
    pub rows: i64,
    pub columns: i64,
    pub depth: i64,
    /// Elements between rows and between columns of A.
    pub a: (i64, i64),
    /// Elements between rows of B and of C.
    pub b_row: i64,
    pub c_row: i64,
    pub end: End,
}

/// What happens to the sums.
#[derive(Clone, Copy, PartialEq)]
pub enum End {
    Store,
    StoreScaled(f64),
    Add,
}

/// A function `(a, b, c)` for the product.
pub fn product<'c>(b: &Llvm<'c>, p: &Product, registers: u32) -> FunctionValue<'c> {
    let lanes = b.lanes() as i64;
    let vectors = if p.columns % (2 * lanes) == 0 { 2 } else { 1 };
    let tallest = ((i64::from(registers) - vectors - 1) / vectors).min(16);
    let panels = div_ceil(p.rows, tallest);
    let (height, tall) = (p.rows / panels, p.rows % panels);
    let function = b.function(p.name, 3, 0, Visibility::Local);
    let [a, factor, c] = [0, 1, 2].map(|i| b.pointer_parameter(function, i));
    b.for_each(b.index(0), b.index(p.columns), vectors * lanes, &mut |column| {
        let bytes = b.index_mul(column, b.index(4));
        let (factor, c) = (b.at(factor, bytes), b.at(c, bytes));
        let panel = |rows: i64, first: Index<'c>| {
            let a = b.at(a, b.index_mul(first, b.index(4 * p.a.0)));
            let c = b.at(c, b.index_mul(first, b.index(4 * p.c_row)));
            multiply(b, p, Block { rows, vectors }, [a, factor, c]);
        };
        b.for_each(b.index(0), b.index(tall), 1, &mut |i| panel(height + 1, b.index_mul(i, b.index(height + 1))));
        b.for_each(b.index(tall), b.index(panels), 1, &mut |i| {
            panel(height, b.index_add(b.index_mul(i, b.index(height)), b.index(tall)));
        });
    });
    b.finish_function();
    function
}

/// A block of sums in registers.
#[derive(Clone, Copy)]
struct Block {
    rows: i64,
    vectors: i64,
}

fn multiply<'c>(b: &Llvm<'c>, p: &Product, block: Block, [a, factor, c]: [Pointer<'c>; 3]) {
    let lanes = b.lanes() as i64;
    let unroll = if p.depth % 4 == 0 { 4 } else { 1 };
    let start = Carried { pointers: vec![a, factor], vectors: vec![b.f32(0.0); (block.rows * block.vectors) as usize] };
    let sums = b.repeat_carrying(b.index(0), b.index(p.depth), b.index(unroll), &start, &mut |_, state| {
        let (a, factor) = (state.pointers[0], state.pointers[1]);
        let mut sums = state.vectors.clone();
        for k in 0..unroll {
            let row: Vec<Vector> = (0..block.vectors).map(|j| b.load(b.at_const(factor, 4 * (k * p.b_row + j * lanes)), Lane::F32, None)).collect();
            for i in 0..block.rows {
                let element = b.load_splat(b.at_const(a, 4 * (i * p.a.0 + k * p.a.1)), Lane::F32);
                for j in 0..block.vectors {
                    let sum = &mut sums[(i * block.vectors + j) as usize];
                    *sum = b.fma(element, row[j as usize], *sum);
                }
            }
        }
        Carried { pointers: vec![b.at_const(a, 4 * unroll * p.a.1), b.at_const(factor, 4 * unroll * p.b_row)], vectors: sums }
    });
    for i in 0..block.rows {
        for j in 0..block.vectors {
            let place = b.at_const(c, 4 * (i * p.c_row + j * lanes));
            let sum = sums.vectors[(i * block.vectors + j) as usize];
            let value = match p.end {
                End::Store => sum,
                End::StoreScaled(scale) => b.mul(sum, b.f32(scale)),
                End::Add => b.add(sum, b.load(place, Lane::F32, None)),
            };
            b.store(place, value, Lane::F32, None);
        }
    }
}

/// A function `(from, to, count)` that copies `count` rows into a block of padded rows of f32; the rest of the block is zero.
pub fn copy<'c>(b: &Llvm<'c>, plan: &Plan, name: &str, rows: &Rows) -> FunctionValue<'c> {
    let function = b.function(name, 2, 1, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let count = b.index_parameter(function, 2);
    let target = |row: Index<'c>| b.at(to, b.index_mul(row, b.index(4 * plan.width)));
    b.for_each(b.index(0), count, 1, &mut |row| {
        let source = b.at(from, b.index_mul(row, b.index(rows.bytes(rows.row_stride))));
        for column in vector_columns(b, plan) {
            let place = b.at_const(source, rows.bytes(column.first * rows.column_stride));
            let value = load_strided(b, place, rows.column_stride, rows.lane, column.mask);
            b.store(b.at_const(target(row), 4 * column.first), value, Lane::F32, None);
        }
    });
    b.for_each(count, b.index(rows.block), 1, &mut |row| {
        for column in vector_columns(b, plan) {
            b.store(b.at_const(target(row), 4 * column.first), b.f32(0.0), Lane::F32, None);
        }
    });
    b.finish_function();
    function
}

/// A vector of a row of `d` elements.
pub struct Column<V> {
    pub first: i64,
    /// The lanes that are elements, unless all are.
    pub mask: Option<V>,
}

/// The vectors that cover a row of `d` elements.
pub fn vector_columns<B: Builder>(b: &B, plan: &Plan) -> Vec<Column<B::Vector>> {
    let lanes = b.lanes() as i64;
    (0..plan.width)
        .step_by(b.lanes())
        .map(|first| Column { first, mask: (first + lanes > plan.d).then(|| b.mask_first((plan.d - first) as usize)) })
        .collect()
}

fn offsets<B: Builder>(b: &B, stride: i64, lane: Lane) -> B::Vector {
    b.int2(crate::build::IntBinary::Mul, b.lane_numbers(), b.i64(lane.bytes() * stride))
}

/// A vector of elements, `stride` elements apart.
pub fn load_strided<B: Builder>(b: &B, from: B::Pointer, stride: i64, lane: Lane, mask: Option<B::Vector>) -> B::Vector {
    match stride {
        1 => b.load(from, lane, mask),
        stride => b.gather(from, offsets(b, stride, lane), lane, mask),
    }
}

/// A function `(from, to; count)` that stores the least and the greatest of `count` integers, `stride` elements apart.
pub fn bounds<'c>(b: &Llvm<'c>, name: &str, stride: i64) -> FunctionValue<'c> {
    let function = b.function(name, 2, 1, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let count = b.index_parameter(function, 2);
    let first = b.load_splat(from, Lane::I32);
    let lesser = |x, y| b.select(b.compare_int(Compare::Lt, x, y), x, y);
    let greater = |x, y| b.select(b.compare_int(Compare::Gt, x, y), x, y);
    let found = b.repeat(b.index(0), count, b.lanes() as i64, &[first, first], &mut |i, found| {
        let present = b.mask_below(b.index_sub(count, i));
        let read = load_strided(b, b.at(from, b.index_mul(i, b.index(4 * stride))), stride, Lane::I32, Some(present));
        let value = b.select(present, read, first);
        vec![lesser(found[0], value), greater(found[1], value)]
    });
    b.store_first(to, across(b, found[0], lesser), Lane::I32);
    b.store_first(b.at_const(to, 4), across(b, found[1], greater), Lane::I32);
    b.finish_function();
    function
}

/// An output's rows as they are stored.
#[derive(Clone, Copy)]
pub struct Stored {
    pub dtype: DType,
    /// Elements between columns.
    pub stride: i64,
    pub accumulate: bool,
}

/// Rounds one vector of a row of an output to its dtype and stores it, or adds it to what is there.
pub fn store_column<B: Builder>(b: &B, row: B::Pointer, column: &Column<B::Vector>, to: Stored, value: B::Vector) {
    let lane = pointwise::stored(to.dtype);
    let place = b.at_const(row, lane.bytes() * column.first * to.stride);
    let value = pointwise::rounded(b, to.dtype, value);
    let value = match to.accumulate {
        true => accumulated(b, to.dtype, load_strided(b, place, to.stride, lane, column.mask), value),
        false => value,
    };
    match to.stride {
        1 => b.store(place, value, lane, column.mask),
        stride => b.scatter(place, offsets(b, stride, lane), value, lane, column.mask),
    }
}

/// A function `(from, to)` that transposes a block of `key_block` rows of `width` elements, `row_length` apart, to rows of `key_block`.
pub fn transpose<'c>(b: &Llvm<'c>, plan: &Plan, name: &str, row_length: i64) -> FunctionValue<'c> {
    let function = b.function(name, 2, 0, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let lanes = b.lanes() as i64;
    let place = |start: Pointer<'c>, row: Index<'c>, column: Index<'c>, length: i64| {
        b.at(b.at(start, b.index_mul(row, b.index(4 * length))), b.index_mul(column, b.index(4)))
    };
    b.for_each(b.index(0), b.index(plan.key_block), lanes, &mut |row| {
        b.for_each(b.index(0), b.index(plan.width), lanes, &mut |column| {
            let source = place(from, row, column, row_length);
            let square: Vec<Vector> = (0..lanes).map(|i| b.load(b.at_const(source, 4 * i * row_length), Lane::F32, None)).collect();
            let target = place(to, column, row, plan.key_block);
            for (i, value) in b.transpose(&square).into_iter().enumerate() {
                b.store(b.at_const(target, 4 * i as i64 * plan.key_block), value, Lane::F32, None);
            }
        });
    });
    b.finish_function();
    function
}

/// The sum or the greatest over all lanes, in every lane.
pub fn across<B: Builder>(b: &B, mut x: B::Vector, join: impl Fn(B::Vector, B::Vector) -> B::Vector) -> B::Vector {
    let mut distance = b.lanes() / 2;
    while distance > 0 {
        x = join(x, b.swap_lanes(x, distance));
        distance /= 2;
    }
    x
}
