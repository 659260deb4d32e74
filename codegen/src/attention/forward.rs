//! Attention and the logarithm of its sums.
//!
//! A tile is a run of queries of one head. Keys go block by block on the outside, so a block of K and V is prepared once per tile and
//! scratch does not grow with the number of keys.

use super::tiles::{End, Product, Stored, across, copy, product, store_column, transpose, vector_columns};
use super::{Arguments, Plan, Run, Span, Visible, span};
use crate::build::llvm::{Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, Lane};
use crate::layout::div_ceil;
use crate::target::Target;
use crate::{CompileError, Shape, math, pointwise};
use inkwell::values::FunctionValue;
use ir::kernel::Kernel;
use ir::op::Op;

/// Blocks of queries that share one preparation of keys.
const TILE_BLOCKS: i64 = 4;
/// A score that no softmax sees.
const HIDDEN: f64 = -1e30;

/// Offsets in scratch, in bytes.
struct Scratch {
    q: i64,
    k: i64,
    k_transposed: i64,
    v: i64,
    scores: i64,
    sums: i64,
    greatest: i64,
    weight: i64,
    /// Bounds of positions: of a tile's queries, of its blocks, of a block of keys.
    tile_bounds: i64,
    query_bounds: i64,
    key_bounds: i64,
    bytes: i64,
}

impl Scratch {
    fn new(plan: &Plan) -> Scratch {
        let mut used = 0;
        let mut take = |elements: i64| {
            let start = used;
            used += div_ceil(4 * elements, 64) * 64;
            start
        };
        let tile = TILE_BLOCKS * plan.query_block;
        Scratch {
            q: take(tile * plan.width),
            k: take(plan.key_block * plan.width),
            k_transposed: take(plan.key_block * plan.width),
            v: take(plan.key_block * plan.width),
            scores: take(plan.query_block * plan.key_block),
            sums: take(tile * plan.width),
            greatest: take(tile),
            weight: take(tile),
            tile_bounds: take(2),
            query_bounds: take(2 * TILE_BLOCKS),
            key_bounds: take(2),
            bytes: used,
        }
    }
}

/// The functions of one kernel.
struct Functions<'c> {
    /// Copies of blocks, where they cannot be read in place.
    copy_q: Option<FunctionValue<'c>>,
    copy_k: Option<FunctionValue<'c>>,
    copy_v: Option<FunctionValue<'c>>,
    bounds: Option<[FunctionValue<'c>; 2]>,
    transpose_k: FunctionValue<'c>,
    scores: FunctionValue<'c>,
    weigh: FunctionValue<'c>,
    softmax: FunctionValue<'c>,
    softmax_masked: FunctionValue<'c>,
}

/// The kernel under construction.
struct Forward<'a, 'c> {
    b: &'a Llvm<'c>,
    plan: &'a Plan<'a>,
    operands: [super::Rows; 3],
    scratch: Scratch,
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// The kernel is not an attention of inputs.
pub fn emit(b: &Llvm, kernel: &Kernel, target: &Target, name: &str) -> Result<Shape, CompileError> {
    let plan = Plan::new(kernel, target)?;
    let args = &kernel.body[kernel.outputs[0].value].args;
    // The logarithm alone has no values: k stands in for v, and its product is not stored.
    let v = kernel.outputs.iter().find_map(|o| kernel.body[o.value].args.get(2)).unwrap_or(&args[1]);
    let operands = [plan.query_rows(plan.operand(args[0])?), plan.key_rows(plan.operand(args[1])?), plan.key_rows(plan.operand(*v)?)];
    let forward = Forward { b, plan: &plan, operands, scratch: Scratch::new(&plan) };
    let functions = forward.functions(target);
    let entry = b.kernel(name);
    let arguments = Arguments::new(kernel, &entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
    let heads: Vec<_> = plan.shared.iter().chain(&plan.group).copied().collect();
    let runs = div_ceil(plan.query_blocks(), TILE_BLOCKS);
    b.for_each(entry.first_tile, entry.end_tile, 1, &mut |tile| {
        // The last runs of a causal head are the longest; they come first.
        let run = b.index_sub(b.index(runs - 1), b.index_rem(tile, b.index(runs)));
        let at = arguments.at(b, &plan, &heads, b.index_div(tile, b.index(runs)));
        forward.tile(&functions, &at, run);
    });
    b.finish_function();
    let tiles = runs * plan.sizes(&heads);
    Ok(Shape { tiles: tiles as u64, scratch_bytes: forward.scratch.bytes as u64 })
}

impl<'c> Forward<'_, 'c> {
    fn functions(&self, target: &Target) -> Functions<'c> {
        let (b, plan) = (self.b, self.plan);
        let [q, k, v] = &self.operands;
        let copy = |name: &str, rows: &super::Rows| (!plan.in_place(rows)).then(|| copy(b, plan, name, rows));
        let scores = Product {
            name: "scores",
            rows: plan.query_block,
            columns: plan.key_block,
            depth: plan.d,
            a: (plan.row_length(q), 1),
            b_row: plan.key_block,
            c_row: plan.key_block,
            end: End::StoreScaled(plan.attention.scale.0),
        };
        let weigh = Product {
            name: "weigh",
            rows: plan.query_block,
            columns: plan.width,
            depth: plan.key_block,
            a: (plan.key_block, 1),
            b_row: plan.row_length(v),
            c_row: plan.width,
            end: End::Add,
        };
        Functions {
            copy_q: copy("copy_q", q),
            copy_k: copy("copy_k", k),
            copy_v: copy("copy_v", v),
            bounds: plan.bounds(b),
            transpose_k: transpose(b, plan, "transpose_k", plan.row_length(k)),
            scores: product(b, &scores, target.registers),
            weigh: product(b, &weigh, target.registers),
            softmax: self.softmax("softmax", false),
            softmax_masked: self.softmax("softmax_masked", true),
        }
    }

    /// A function `(scores, sums, greatest, weight, positions of queries and of keys; query, key, keys' end)`: scores to exponentials, relative to the greatest score
    /// of each query so far; what was summed before is rescaled to it.
    fn softmax(&self, name: &str, masked: bool) -> FunctionValue<'c> {
        let (b, plan) = (self.b, self.plan);
        let function = b.function(name, 6, 3, Visibility::Local);
        let [scores, sums, greatest, weight, at, of] = [0, 1, 2, 3, 4, 5].map(|i| b.pointer_parameter(function, i));
        let [query, key, end] = [6, 7, 8].map(|i| b.index_parameter(function, i));
        let lanes = b.lanes() as i64;
        b.for_each(b.index(0), b.index(plan.query_block), 1, &mut |row| {
            let line = b.at(scores, b.index_mul(row, b.index(4 * plan.key_block)));
            let one = b.index_mul(row, b.index(4));
            let (greatest, weight) = (b.at(greatest, one), b.at(weight, one));
            let positions = plan.row_positions(b, [at, of], b.index_add(query, row));
            let mut values = Vec::new();
            for first in (0..plan.key_block).step_by(b.lanes()) {
                let place = b.at_const(line, 4 * first);
                let value = b.load(place, Lane::F32, None);
                let mask = masked.then(|| plan.row_mask(b, positions, b.index_add(key, b.index(first)), end));
                values.push((place, mask.map_or(value, |m| b.select(m, value, b.f32(HIDDEN))), mask));
            }
            let before = b.load_splat(greatest, Lane::F32);
            let top = values[1..].iter().fold(values[0].1, |top, v| b.max(top, v.1));
            let top = b.max(across(b, top, |x, y| b.max(x, y)), before);
            let mut sum = b.f32(0.0);
            for (place, value, mask) in values {
                let e = math::exp(b, b.sub(value, top));
                let e = mask.map_or(e, |m| b.select(m, e, b.f32(0.0)));
                sum = b.add(sum, e);
                b.store(place, e, Lane::F32, None);
            }
            let sum = across(b, sum, |x, y| b.add(x, y));
            let rescale = math::exp(b, b.sub(before, top));
            b.store_first(weight, b.fma(b.load_splat(weight, Lane::F32), rescale, sum), Lane::F32);
            b.store_first(greatest, top, Lane::F32);
            let sums = b.at(sums, b.index_mul(row, b.index(4 * plan.width)));
            for first in (0..plan.width).step_by(lanes as usize) {
                let place = b.at_const(sums, 4 * first);
                b.store(place, b.mul(b.load(place, Lane::F32, None), rescale), Lane::F32, None);
            }
        });
        b.finish_function();
        function
    }

    fn tile(&self, functions: &Functions<'c>, at: &Arguments<Pointer<'c>>, run: Index<'c>) {
        let (b, plan) = (self.b, self.plan);
        let part = |offset: i64| b.at_const(at.scratch, offset);
        let first_block = b.index_mul(run, b.index(TILE_BLOCKS));
        let end_block = b.index_min(b.index_add(first_block, b.index(TILE_BLOCKS)), b.index(plan.query_blocks()));
        let first = b.index_mul(first_block, b.index(plan.query_block));
        let end = b.index_min(b.index_mul(end_block, b.index(plan.query_block)), b.index(plan.queries));
        let queries = Span { first, count: b.index_sub(end, first) };
        self.clear(at);

        let [q, k, v] = &self.operands;
        let source = |rows: &super::Rows, first: Index<'c>| b.at(at.tensors[rows.tensor], b.index_mul(first, b.index(rows.bytes(rows.row_stride))));
        // Queries of the tile, block after block, if they are copied.
        let query_block = |block: Index<'c>| match functions.copy_q {
            Some(_) => b.at(part(self.scratch.q), b.index_mul(b.index_sub(block, first_block), b.index(4 * plan.query_block * plan.width))),
            None => source(q, b.index_mul(block, b.index(plan.query_block))),
        };
        if let Some(copy) = functions.copy_q {
            b.for_each(first_block, end_block, 1, &mut |block| {
                let rows = span(b, block, plan.query_block, plan.queries);
                b.call(copy, &[source(q, rows.first), query_block(block)], &[rows.count]);
            });
        }
        let tile = plan.measured(b, functions.bounds, at, 0, queries, part(self.scratch.tile_bounds));
        let block_bounds = |block: Index<'c>| b.at(part(self.scratch.query_bounds), b.index_mul(b.index_sub(block, first_block), b.index(8)));
        b.for_each(first_block, end_block, 1, &mut |block| {
            plan.measured(b, functions.bounds, at, 0, span(b, block, plan.query_block, plan.queries), block_bounds(block));
        });
        b.for_each(b.index(0), b.index(plan.key_blocks()), 1, &mut |key_block| {
            let keys = span(b, key_block, plan.key_block, plan.keys);
            let run = plan.measured(b, functions.bounds, at, 1, keys, part(self.scratch.key_bounds));
            let work = || {
                let ready = |copy: Option<FunctionValue<'c>>, rows: &super::Rows, offset: i64| match copy {
                    Some(copy) => {
                        b.call(copy, &[source(rows, keys.first), part(offset)], &[keys.count]);
                        part(offset)
                    }
                    None => source(rows, keys.first),
                };
                let k = ready(functions.copy_k, k, self.scratch.k);
                b.call(functions.transpose_k, &[k, part(self.scratch.k_transposed)], &[]);
                let v = ready(functions.copy_v, v, self.scratch.v);
                b.for_each(first_block, end_block, 1, &mut |block| {
                    let rows = Run { span: span(b, block, plan.query_block, plan.queries), bounds: block_bounds(block) };
                    let blocks = Blocks { q: query_block(block), v, number: b.index_sub(block, first_block), rows, keys: run };
                    match plan.any_visible(b, rows, run) {
                        Some(any) => b.branch(any, || self.block(functions, at, &blocks), || ()),
                        None => self.block(functions, at, &blocks),
                    }
                });
            };
            match plan.any_visible(b, tile, run) {
                Some(any) => b.branch(any, work, || ()),
                None => work(),
            }
        });
        b.for_each(b.index(0), queries.count, 1, &mut |row| self.finish(at, row, b.index_add(first, row)));
    }

    /// No keys seen yet.
    fn clear(&self, at: &Arguments<Pointer<'c>>) {
        let (b, plan) = (self.b, self.plan);
        let lanes = b.lanes() as i64;
        let rows = TILE_BLOCKS * plan.query_block;
        let fill = |offset: i64, elements: i64, value: Vector<'c>| {
            // Parts of scratch are whole multiples of a vector.
            b.for_each(b.index(0), b.index(div_ceil(elements, lanes) * lanes), lanes, &mut |i| {
                b.store(b.at(b.at_const(at.scratch, offset), b.index_mul(i, b.index(4))), value, Lane::F32, None);
            });
        };
        fill(self.scratch.sums, rows * plan.width, b.f32(0.0));
        fill(self.scratch.greatest, rows, b.f32(HIDDEN));
        fill(self.scratch.weight, rows, b.f32(0.0));
    }

    /// One block of queries with one block of keys.
    fn block(&self, functions: &Functions<'c>, at: &Arguments<Pointer<'c>>, blocks: &Blocks<'c>) {
        let (b, plan) = (self.b, self.plan);
        let part = |offset: i64| b.at_const(at.scratch, offset);
        let own = |offset: i64, row_bytes: i64| b.at(part(offset), b.index_mul(blocks.number, b.index(plan.query_block * row_bytes)));
        let scores = part(self.scratch.scores);
        let sums = own(self.scratch.sums, 4 * plan.width);
        b.call(functions.scores, &[blocks.q, part(self.scratch.k_transposed), scores], &[]);
        let [queries, of] = plan.position_tensors(at);
        let pointers = [scores, sums, own(self.scratch.greatest, 4), own(self.scratch.weight, 4), queries, of];
        let (rows, keys) = (blocks.rows.span, blocks.keys.span);
        let numbers = [rows.first, keys.first, b.index_add(keys.first, keys.count)];
        let softmax = || b.call(functions.softmax, &pointers, &numbers);
        match plan.visible() {
            Visible::All => softmax(),
            Visible::Some => {
                let all = plan.all_visible(b, blocks.rows, blocks.keys);
                b.branch(all, softmax, || b.call(functions.softmax_masked, &pointers, &numbers));
            }
        }
        b.call(functions.weigh, &[scores, blocks.v, sums], &[]);
    }

    /// Stores the outputs of one query: row `row` of the tile, `query` of all.
    fn finish(&self, at: &Arguments<Pointer<'c>>, row: Index<'c>, query: Index<'c>) {
        let (b, plan) = (self.b, self.plan);
        let part = |offset: i64, row_bytes: i64| b.at(b.at_const(at.scratch, offset), b.index_mul(row, b.index(row_bytes)));
        let weight = b.load_splat(part(self.scratch.weight, 4), Lane::F32);
        let greatest = b.load_splat(part(self.scratch.greatest, 4), Lane::F32);
        // A query that sees no key has no weight: its result is zero, its logarithm minus infinity.
        let none = b.compare_float(crate::build::Compare::Eq, weight, b.f32(0.0));
        let inverse = b.select(none, b.f32(0.0), b.div(b.f32(1.0), weight));
        for (position, output) in plan.kernel.outputs.iter().enumerate() {
            let tensor = plan.kernel.inputs.len() + position;
            let dtype = plan.kernel.body[output.value].ty.dtype;
            let row_stride = pointwise::stored(dtype).bytes() * plan.stride(tensor, plan.attention.at);
            let place = b.at(at.tensors[tensor], b.index_mul(query, b.index(row_stride)));
            if matches!(plan.kernel.body[output.value].op, Op::AttentionLse(_)) {
                let log = b.add(greatest, math::log(b, weight));
                let log = if output.accumulate { b.add(log, b.load_splat(place, Lane::F32)) } else { log };
                b.store_first(place, log, Lane::F32);
                continue;
            }
            let to = Stored { dtype, stride: plan.stride(tensor, plan.attention.d), accumulate: output.accumulate };
            for column in vector_columns(b, plan) {
                let sum = b.load(b.at_const(part(self.scratch.sums, 4 * plan.width), 4 * column.first), Lane::F32, None);
                store_column(b, place, &column, to, b.mul(sum, inverse));
            }
        }
    }
}

/// A block of queries and a block of keys.
struct Blocks<'c> {
    q: Pointer<'c>,
    v: Pointer<'c>,
    /// The block's number within the tile.
    number: Index<'c>,
    rows: Run<'c>,
    keys: Run<'c>,
}
