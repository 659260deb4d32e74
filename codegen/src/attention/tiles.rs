//! Operations on blocks of rows in scratch: products, copies, transposes.

use super::scoring::Operand;
use super::{HeadSize, OperandRows};
use crate::build::llvm::{CacheLevel, CarriedValues, Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, Compare, Lane};
use crate::layout::div_ceil;
use crate::loops::accumulated;
use crate::pointwise;
use inkwell::values::FunctionValue;
use ir::op::DType;

/// A product of static size, `C[rows, columns] = A[rows, depth] * B[depth, columns]`. Rows of B and C are whole
/// vectors.
pub struct StaticProduct<'a> {
    pub name: &'a str,
    pub rows: i64,
    pub columns: i64,
    pub depth: i64,
    /// Elements between rows and between columns of A.
    pub a: (i64, i64),
    /// Elements between rows of B and of C.
    pub b_row: i64,
    pub c_row: i64,
    pub end: StoreMode,
}

/// What happens to the sums.
#[derive(Clone, Copy, PartialEq)]
pub enum StoreMode {
    Store,
    StoreScaled(f64),
    Add,
}

/// Vectors per row of a register block: two if they divide the columns evenly, else one.
pub fn vectors_abreast(columns: i64, lanes: i64) -> i64 {
    if columns % (2 * lanes) == 0 { 2 } else { 1 }
}

/// Most rows of a register block: registers also hold a row of the second factor and an element of the first.
pub fn tallest(registers: u32, vectors: i64) -> i64 {
    ((i64::from(registers) - vectors - 1) / vectors).min(16)
}

/// A function `(a, b, c)` for the product.
pub fn product<'c>(b: &Llvm<'c>, p: &StaticProduct, registers: u32) -> FunctionValue<'c> {
    let lanes = b.lanes() as i64;
    let vectors = vectors_abreast(p.columns, lanes);
    let panels = div_ceil(p.rows, tallest(registers, vectors));
    let (height, tall) = (p.rows / panels, p.rows % panels);
    let factors = Factors { a: p.a, b_row: p.b_row, unroll: if p.depth % 4 == 0 { 4 } else { 1 } };
    let function = b.function(p.name, 3, 0, Visibility::Local);
    let [a, factor, c] = [0, 1, 2].map(|i| b.pointer_parameter(function, i));
    b.for_each(b.index(0), b.index(p.columns), vectors * lanes, &mut |column| {
        let bytes = b.index_mul(column, b.index(4));
        let (factor, c) = (b.at(factor, bytes), b.at(c, bytes));
        let panel = |rows: i64, first: Index<'c>| {
            let a = b.at(a, b.index_mul(first, b.index(4 * p.a.0)));
            let c = b.at(c, b.index_mul(first, b.index(4 * p.c_row)));
            let block = RegisterBlock { rows, vectors };
            store_sums(b, block, p.end, (c, p.c_row), &multiply(b, block, &factors, b.index(p.depth), [a, factor]));
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
pub struct RegisterBlock {
    pub rows: i64,
    pub vectors: i64,
}

/// Strides of the factors of a register block.
pub struct Factors {
    /// Elements between rows and between columns of the first.
    pub a: (i64, i64),
    /// Elements between rows of the second.
    pub b_row: i64,
    /// Contracted elements of an iteration; it divides the depth.
    pub unroll: i64,
}

/// The sums of a block over `depth` contracted elements, row by row.
pub fn multiply<'c>(b: &Llvm<'c>, block: RegisterBlock, factors: &Factors, depth: Index<'c>, [a, factor]: [Pointer<'c>; 2]) -> Vec<Vector<'c>> {
    let lanes = b.lanes() as i64;
    let &Factors { a: (a_row, a_column), b_row, unroll } = factors;
    let start = CarriedValues { pointers: vec![a, factor], vectors: vec![b.f32(0.0); (block.rows * block.vectors) as usize] };
    let sums = b.repeat_carrying(b.index(0), depth, b.index(unroll), &start, &mut |_, state| {
        let (a, factor) = (state.pointers[0], state.pointers[1]);
        let mut sums = state.vectors.clone();
        for k in 0..unroll {
            let row: Vec<Vector> = (0..block.vectors).map(|j| b.load(b.at_const(factor, 4 * (k * b_row + j * lanes)), Lane::F32, None)).collect();
            for i in 0..block.rows {
                let element = b.load_splat(b.at_const(a, 4 * (i * a_row + k * a_column)), Lane::F32);
                for j in 0..block.vectors {
                    let sum = &mut sums[(i * block.vectors + j) as usize];
                    *sum = b.fma(element, row[j as usize], *sum);
                }
            }
        }
        CarriedValues { pointers: vec![b.at_const(a, 4 * unroll * a_column), b.at_const(factor, 4 * unroll * b_row)], vectors: sums }
    });
    sums.vectors
}

/// Stores the sums of a block to rows at `c`, `c_row` elements apart.
pub fn store_sums<'c>(b: &Llvm<'c>, block: RegisterBlock, end: StoreMode, (c, c_row): (Pointer<'c>, i64), sums: &[Vector<'c>]) {
    let lanes = b.lanes() as i64;
    for i in 0..block.rows {
        for j in 0..block.vectors {
            let place = b.at_const(c, 4 * (i * c_row + j * lanes));
            let sum = sums[(i * block.vectors + j) as usize];
            let value = match end {
                StoreMode::Store => sum,
                StoreMode::StoreScaled(scale) => b.mul(sum, b.f32(scale)),
                StoreMode::Add => b.add(sum, b.load(place, Lane::F32, None)),
            };
            b.store(place, value, Lane::F32, None);
        }
    }
}

/// Rows that a copy prefetches ahead. Rows of another block or head are too far apart for the hardware prefetcher.
const AHEAD: i64 = 32;

/// Prefetches a row of an operand into the L2 cache, if it is contiguous.
fn fetch_row<'c>(b: &Llvm<'c>, rows: &OperandRows, row: Pointer<'c>) {
    if rows.column_stride == 1 {
        (0..rows.bytes(rows.size.d)).step_by(64).for_each(|byte| b.prefetch(b.at_const(row, byte), CacheLevel::Second));
    }
}

/// Prefetches the result row that is stored `AHEAD` rows later, if its elements are contiguous: rows far apart would
/// each wait for memory.
pub fn fetch_stored<'c>(b: &Llvm<'c>, row: Pointer<'c>, to: OutputRows, row_stride: i64) {
    if to.stride == 1 {
        let later = b.at_const(row, AHEAD * row_stride);
        (0..pointwise::stored(to.dtype).bytes() * to.size.d).step_by(64).for_each(|byte| b.prefetch(b.at_const(later, byte), CacheLevel::First));
    }
}

/// A copy of rows of an operand in f32.
pub struct OperandCopy<'a> {
    pub name: &'a str,
    pub rows: &'a OperandRows,
    /// What each element is multiplied by.
    pub factor: f64,
    /// Columns of a panel, a whole number of vectors. Panels lie one after another, each with all rows.
    pub panel: i64,
    /// Rows of the copy. Those that are not there become zero.
    pub height: i64,
}

impl<'a> OperandCopy<'a> {
    /// Rows as they are, each in one piece.
    pub fn plain(name: &'a str, rows: &'a OperandRows) -> OperandCopy<'a> {
        OperandCopy { name, rows, factor: 1.0, panel: rows.size.width, height: rows.block }
    }
}

/// A function `(from, to, count)` that copies `count` rows into padded rows of f32.
pub fn copy<'c>(b: &Llvm<'c>, copy: &OperandCopy) -> FunctionValue<'c> {
    let &OperandCopy { rows, factor, panel, height, .. } = copy;
    let function = b.function(copy.name, 2, 1, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let count = b.index_parameter(function, 2);
    let store = |row: Index<'c>, column: i64, value: Vector<'c>| {
        let line = b.at(to, b.index_mul(row, b.index(4 * panel)));
        b.store(b.at_const(line, 4 * (column / panel * panel * height + column % panel)), value, Lane::F32, None);
    };
    b.for_each(b.index(0), count, 1, &mut |row| {
        let source = b.at(from, b.index_mul(row, b.index(rows.bytes(rows.row_stride))));
        fetch_row(b, rows, b.at_const(source, rows.bytes(AHEAD * rows.row_stride)));
        for column in vector_columns(b, rows.size) {
            let place = b.at_const(source, rows.bytes(column.first * rows.column_stride));
            let value = load_strided(b, place, rows.column_stride, rows.lane, column.mask);
            store(row, column.first, if factor == 1.0 { value } else { b.mul(value, b.f32(factor)) });
        }
    });
    b.for_each(count, ir::fault!("attention.copy.rest", count, b.index(height)), 1, &mut |row| {
        for column in vector_columns(b, rows.size) {
            store(row, column.first, b.f32(0.0));
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

/// The vectors that cover a row of so many elements.
pub fn vector_columns<B: Builder>(b: &B, size: HeadSize) -> Vec<Column<B::Vector>> {
    let lanes = b.lanes() as i64;
    (0..size.width)
        .step_by(b.lanes())
        .map(|first| Column { first, mask: (first + lanes > size.d).then(|| b.mask_first((size.d - first) as usize)) })
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

/// A function `(from, to; count)` that stores the least and the greatest of `count` values that an operand has along
/// a side.
pub fn bounds<'c>(b: &Llvm<'c>, name: &str, operand: &Operand, side: usize) -> FunctionValue<'c> {
    let function = b.function(name, 2, 1, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let count = b.index_parameter(function, 2);
    let first = operand.counted(b, b.load_splat(from, operand.lane()));
    let lesser = |x, y| b.select(b.compare_int(Compare::Lt, x, y), x, y);
    let greater = |x, y| b.select(b.compare_int(Compare::Gt, x, y), x, y);
    let found = match operand.strides[side] {
        None => vec![first, first],
        Some(stride) => b.repeat(b.index(0), count, b.lanes() as i64, &[first, first], &mut |i, found| {
            let present = b.mask_below(b.index_sub(count, i));
            let read = load_strided(b, b.at(from, b.index_mul(i, b.index(operand.step(side)))), stride, operand.lane(), Some(present));
            let value = b.select(present, operand.counted(b, read), first);
            vec![lesser(found[0], value), greater(ir::fault!("attention.bounds.greatest", first, found[1]), value)]
        }),
    };
    b.store_first(to, across(b, found[0], lesser), Lane::I32);
    b.store_first(b.at_const(to, 4), across(b, found[1], greater), Lane::I32);
    b.finish_function();
    function
}

/// An output's rows as they are stored.
#[derive(Clone, Copy)]
pub struct OutputRows {
    pub dtype: DType,
    /// Elements between columns.
    pub stride: i64,
    /// Elements of a row.
    pub size: HeadSize,
    pub accumulate: bool,
}

/// Rounds one vector of a row of an output to its dtype and stores it, or adds it to what is there.
pub fn store_column<B: Builder>(b: &B, row: B::Pointer, column: &Column<B::Vector>, to: OutputRows, value: B::Vector) {
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

/// A function `(from, to; count)` that transposes a block of `count` rows of an operand to rows of `block` f32.
/// Columns beyond the rows repeat the last.
pub fn transpose<'c>(b: &Llvm<'c>, name: &str, rows: &OperandRows, block: i64) -> FunctionValue<'c> {
    let function = b.function(name, 2, 1, Visibility::Local);
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let last = b.index_sub(b.index_parameter(function, 2), b.index(1));
    let lanes = b.lanes() as i64;
    b.for_each(b.index(0), b.index(block), lanes, &mut |row| {
        let sources: Vec<Pointer> = (0..lanes)
            .map(|i| {
                b.at(
                    from,
                    b.index_mul(
                        ir::fault!("attention.turn.last", b.index_add(row, b.index(i)), b.index_min(b.index_add(row, b.index(i)), last)),
                        b.index(rows.bytes(rows.row_stride)),
                    ),
                )
            })
            .collect();
        for source in &sources {
            fetch_row(b, rows, b.at_const(*source, rows.bytes(AHEAD * rows.row_stride)));
        }
        for column in vector_columns(b, rows.size) {
            let place = |source: &Pointer<'c>| b.at_const(*source, rows.bytes(column.first * rows.column_stride));
            let square: Vec<Vector> = sources.iter().map(|s| load_strided(b, place(s), rows.column_stride, rows.lane, column.mask)).collect();
            let target = b.at(b.at_const(to, 4 * column.first * block), b.index_mul(row, b.index(4)));
            for (i, value) in b.transpose(&square).into_iter().enumerate() {
                b.store(b.at_const(target, 4 * i as i64 * block), value, Lane::F32, None);
            }
        }
    });
    b.finish_function();
    function
}

/// Reduces a vector over its lanes by `join`; every lane gets the result.
pub fn across<B: Builder>(b: &B, mut x: B::Vector, join: impl Fn(B::Vector, B::Vector) -> B::Vector) -> B::Vector {
    let mut distance = b.lanes() / 2;
    while distance > 0 {
        x = join(x, b.swap_lanes(x, distance));
        distance /= 2;
    }
    x
}
