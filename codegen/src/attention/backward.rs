//! The gradients of attention.
//!
//! A tile is one head of keys with all queries that share it, so the gradients of k and v need no sums between tiles.
//! Scores and probabilities are computed again from q, k and the forward pass's logarithms.

mod bias;

use super::tiles::{self, Column, OperandCopy, OutputRows, StaticProduct, StoreMode, product, store_column, transpose, vector_columns};
use super::{Arguments, AttentionPlan, GradientOperands, HeadSize, LOWEST, OperandRows, Run, ScorePosition, Span, Visible, span};
use crate::build::llvm::{Index, Llvm, Pointer, Visibility};
use crate::build::{Builder, Lane};
use crate::layout::div_ceil;
use crate::target::Target;
use crate::{CompileError, Shape, math, pointwise};
use inkwell::values::FunctionValue;
use ir::kernel::Kernel;
use ir::op::{AttentionGrad, Op};
use std::f64::consts::LOG2_E;

/// Offsets in scratch, in bytes.
struct BackwardScratch {
    /// Copies of all rows of a head of queries: read once for each block of keys, they lie close together.
    q: i64,
    dout: i64,
    k: i64,
    k_transposed: i64,
    v_transposed: i64,
    p: i64,
    ds: i64,
    /// Sums for all queries of a head and for all keys.
    dq: i64,
    dk: i64,
    dv: i64,
    /// Sums of the gradient of a bias, for all queries of a head and a block of keys.
    pairs: i64,
    /// Bounds of positions, of all blocks of queries and of a block of keys.
    query_bounds: i64,
    key_bounds: i64,
    bytes: i64,
}

impl BackwardScratch {
    fn new(plan: &AttentionPlan) -> BackwardScratch {
        let mut used = 0;
        let mut take = |elements: i64| {
            let start = used;
            used += div_ceil(4 * elements, 64) * 64;
            start
        };
        let [query_rows, key_rows] = [plan.query_block, plan.key_block].map(|block| block * plan.d.width);
        let [of_results, of_values] = [plan.query_block, plan.key_block].map(|block| block * plan.values.width);
        let square = plan.query_block * plan.key_block;
        let [by_rows, by_pairs] = if plan.bias().is_some() { [0, 1] } else { [1, 0] };
        BackwardScratch {
            q: take(plan.query_blocks() * query_rows),
            dout: take(plan.query_blocks() * of_results),
            k: take(key_rows),
            k_transposed: take(key_rows),
            v_transposed: take(of_values),
            p: take(square),
            ds: take(square),
            dq: take(by_rows * plan.query_blocks() * query_rows),
            dk: take(by_rows * plan.key_blocks() * key_rows),
            dv: take(by_rows * plan.key_blocks() * of_values),
            pairs: take(by_pairs * plan.query_blocks() * square),
            query_bounds: take(plan.bounds_size(0) * plan.query_blocks()),
            key_bounds: take(plan.bounds_size(1)),
            bytes: used,
        }
    }
}

/// The functions of one kernel. Those of gradients that it does not store are absent.
struct BackwardFunctions<'c> {
    copy_q: FunctionValue<'c>,
    copy_k: FunctionValue<'c>,
    copy_dout: FunctionValue<'c>,
    bounds: [Vec<FunctionValue<'c>>; 2],
    transpose_k: FunctionValue<'c>,
    transpose_v: FunctionValue<'c>,
    scores: FunctionValue<'c>,
    /// `dout` times the transpose of v.
    dp: FunctionValue<'c>,
    gradient: FunctionValue<'c>,
    gradient_masked: FunctionValue<'c>,
    dq: Option<FunctionValue<'c>>,
    dk: Option<FunctionValue<'c>>,
    dv: Option<FunctionValue<'c>>,
}

/// The kernel under construction.
struct Backward<'a, 'c> {
    b: &'a Llvm<'c>,
    plan: &'a AttentionPlan<'a>,
    operands: GradientOperands,
    scratch: BackwardScratch,
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// The kernel is not attention gradients of inputs.
pub fn emit(b: &Llvm, kernel: &Kernel, target: &Target, name: &str) -> Result<Shape, CompileError> {
    let plan = AttentionPlan::new(kernel, target)?;
    let operands = plan.gradient_operands()?;
    let backward = Backward { b, plan: &plan, operands, scratch: BackwardScratch::new(&plan) };
    let functions = backward.functions(target);
    if let Some(bias) = plan.bias() {
        return Ok(backward.of_bias(&functions, bias, name));
    }
    let entry = b.kernel(name);
    let arguments = Arguments::new(kernel, &entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
    b.for_each(entry.first_tile, entry.end_tile, 1, &mut |tile| {
        let head = arguments.at(b, &plan, &plan.shared, tile);
        backward.measure_queries(&functions, &head);
        backward.clear(&head, backward.scratch.dk, plan.key_blocks() * plan.key_block * plan.d.width);
        backward.clear(&head, backward.scratch.dv, plan.key_blocks() * plan.key_block * plan.values.width);
        b.for_each(b.index(0), b.index(plan.sizes(&plan.group)), 1, &mut |member| {
            let at = head.at(b, &plan, &plan.group, member);
            backward.clear(&at, backward.scratch.dq, ir::fault!("attention.dq.cleared", 1, plan.query_blocks()) * plan.query_block * plan.d.width);
            backward.member(&functions, &at);
            backward.finish(&at, AttentionGrad::Q);
        });
        backward.finish(&head, AttentionGrad::K);
        backward.finish(&head, AttentionGrad::V);
    });
    b.finish_function();
    Ok(Shape { tiles: plan.sizes(&plan.shared) as u64, line: 1, scratch_bytes: backward.scratch.bytes as u64 })
}

impl<'c> Backward<'_, 'c> {
    fn wants(&self, which: AttentionGrad) -> bool {
        let kernel = self.plan.kernel;
        kernel.outputs.iter().any(|o| matches!(kernel.body[o.value].op, Op::AttentionGrad(_, w) if w == which))
    }

    fn functions(&self, target: &Target) -> BackwardFunctions<'c> {
        let (b, plan, operands) = (self.b, self.plan, &self.operands);
        let copy = |name: &str, rows: &OperandRows| tiles::copy(b, &OperandCopy::plain(name, rows));
        let against_keys = |name: &'static str, size: HeadSize, end: StoreMode| {
            let product_of = StaticProduct {
                name,
                rows: plan.query_block,
                columns: plan.key_block,
                depth: size.d,
                a: (size.width, 1),
                b_row: plan.key_block,
                c_row: plan.key_block,
                end,
            };
            product(b, &product_of, target.registers)
        };
        // Rows are summed with a block of probabilities as weights: down a column for a key, along a row for a query.
        let per_key = |name: &'static str, size: HeadSize| {
            let product_of = StaticProduct {
                name,
                rows: plan.key_block,
                columns: size.width,
                depth: plan.query_block,
                a: (1, plan.key_block),
                b_row: size.width,
                c_row: size.width,
                end: StoreMode::Add,
            };
            product(b, &product_of, target.registers)
        };
        let per_query = || {
            let product_of = StaticProduct {
                name: "dq",
                rows: plan.query_block,
                columns: plan.d.width,
                depth: plan.key_block,
                a: (plan.key_block, 1),
                b_row: plan.d.width,
                c_row: plan.d.width,
                end: StoreMode::Add,
            };
            product(b, &product_of, target.registers)
        };
        BackwardFunctions {
            copy_q: copy("copy_q", &operands.q),
            copy_k: copy("copy_k", &operands.k),
            copy_dout: copy("copy_dout", &operands.dout),
            bounds: plan.bounds(b),
            transpose_k: transpose(b, "transpose_k", &operands.k, plan.key_block),
            transpose_v: transpose(b, "transpose_v", &operands.v, plan.key_block),
            scores: against_keys(
                "scores",
                plan.d,
                StoreMode::StoreScaled(plan.attention.scale.0 * if plan.program.changes() { 1.0 } else { LOG2_E }),
            ),
            dp: against_keys("dp", plan.values, StoreMode::Store),
            gradient: self.gradient("gradient", false),
            gradient_masked: self.gradient("gradient_masked", true),
            dq: self.wants(AttentionGrad::Q).then(per_query),
            dk: self.wants(AttentionGrad::K).then(|| per_key("dk", plan.d)),
            dv: self.wants(AttentionGrad::V).then(|| per_key("dv", plan.values)),
        }
    }

    /// A function `(p, ds, lse, delta, operands of the program; query, key, keys' end, queries)`. It turns scores,
    /// which are exponents of two unless the program changes them, into probabilities, and gradients of probabilities
    /// into those of scores, without the scale. Rows from `queries` on are padding and become zero.
    fn gradient(&self, name: &str, masked: bool) -> FunctionValue<'c> {
        let (b, plan) = (self.b, self.plan);
        let further = plan.program.operands.len() as u32;
        let function = b.function(name, 4 + further as usize, 4, Visibility::Local);
        let [p, ds, lse, delta] = [0, 1, 2, 3].map(|i| b.pointer_parameter(function, i));
        let bases: Vec<Pointer> = (0..further).map(|i| b.pointer_parameter(function, 4 + i)).collect();
        let [query, key, end, queries] = [4, 5, 6, 7].map(|i| b.index_parameter(function, further + i));
        let line = |start: Pointer<'c>, row: Index<'c>| b.at(start, b.index_mul(row, b.index(4 * plan.key_block)));
        let of_query = |start: Pointer<'c>, tensor: usize, row: Index<'c>| {
            let stride = plan.stride(tensor, plan.attention.at);
            b.load_splat(b.at(start, b.index_mul(row, b.index(4 * stride))), Lane::F32)
        };
        b.for_each(b.index(0), queries, 1, &mut |row| {
            let log = b.mul(of_query(lse, self.operands.lse, row), b.f32(LOG2_E));
            // A program may make all scores of a query minus infinity. Without a bound on the logarithm, their
            // difference from it would be NaN.
            let log = if plan.program.changes() { b.max(log, b.f32(LOWEST)) } else { log };
            let delta = of_query(delta, self.operands.delta, row);
            let query = b.index_add(query, row);
            for first in (0..plan.key_block).step_by(b.lanes()) {
                let (p, ds) = (b.at_const(line(p, row), 4 * first), b.at_const(line(ds, row), 4 * first));
                let position = ScorePosition { query, key: b.index_add(key, b.index(first)), end: masked.then_some(end) };
                let scored = plan.scored(b, &bases, position, b.load(p, Lane::F32, None));
                let score = if plan.program.changes() { b.mul(scored.score, b.f32(LOG2_E)) } else { scored.score };
                let mut probability = math::exp2(b, b.sub(score, log));
                let mut dp = b.load(ds, Lane::F32, None);
                let weight = plan.weight(b, &bases, position);
                if let Some(weight) = weight {
                    dp = ir::fault!("attention.weight.slope", dp, b.mul(dp, weight));
                }
                let mut slope = b.sub(dp, delta);
                if let Some(factor) = scored.slope {
                    slope = ir::fault!("attention.slope.changed", slope, b.mul(slope, factor));
                }
                if let Some(mask) = scored.mask {
                    probability = ir::fault!("attention.probability.hidden", probability, b.select(mask, probability, b.f32(0.0)));
                    slope = b.select(mask, slope, b.f32(0.0));
                }
                let counted = weight.map_or(probability, |w| ir::fault!("attention.weight.values", probability, b.mul(probability, w)));
                b.store(p, counted, Lane::F32, None);
                b.store(ds, ir::fault!("attention.slope.probability", slope, b.mul(probability, slope)), Lane::F32, None);
            }
        });
        b.for_each(queries, ir::fault!("attention.rows.rest", queries, b.index(plan.query_block)), 1, &mut |row| {
            for first in (0..plan.key_block).step_by(b.lanes()) {
                b.store(b.at_const(line(p, row), 4 * first), b.f32(0.0), Lane::F32, None);
                b.store(b.at_const(line(ds, row), 4 * first), b.f32(0.0), Lane::F32, None);
            }
        });
        b.finish_function();
        function
    }

    /// The bounds of all blocks of queries.
    fn measure_queries(&self, functions: &BackwardFunctions<'c>, at: &Arguments<Pointer<'c>>) {
        let (b, plan) = (self.b, self.plan);
        b.for_each(b.index(0), b.index(plan.query_blocks()), 1, &mut |block| {
            let rows = span(b, block, plan.query_block, plan.queries);
            plan.measured(b, &functions.bounds, at, 0, rows, self.query_bounds(at, block));
        });
    }

    /// Adds all blocks of one head of queries.
    fn member(&self, functions: &BackwardFunctions<'c>, at: &Arguments<Pointer<'c>>) {
        self.copy_queries(functions, at);
        self.b.for_each(self.b.index(0), self.b.index(self.plan.key_blocks()), 1, &mut |block| self.keys(functions, at, block));
    }

    /// Address of row `first` of an operand.
    fn source(&self, at: &Arguments<Pointer<'c>>, rows: &OperandRows, first: Index<'c>) -> Pointer<'c> {
        let b = self.b;
        b.at(at.tensors[rows.tensor], b.index_mul(first, b.index(rows.bytes(rows.row_stride))))
    }

    fn copy_queries(&self, functions: &BackwardFunctions<'c>, at: &Arguments<Pointer<'c>>) {
        let (b, plan, operands) = (self.b, self.plan, &self.operands);
        let source = |rows: &OperandRows, first: Index<'c>| self.source(at, rows, first);
        b.for_each(b.index(0), b.index(plan.query_blocks()), 1, &mut |block| {
            let rows = span(b, block, plan.query_block, plan.queries);
            b.call(functions.copy_q, &[source(&operands.q, rows.first), self.rows(at, self.scratch.q, rows, plan.d)], &[rows.count]);
            b.call(functions.copy_dout, &[source(&operands.dout, rows.first), self.rows(at, self.scratch.dout, rows, plan.values)], &[rows.count]);
        });
    }

    /// One block of keys with all queries of a head, which must have been copied.
    fn keys(&self, functions: &BackwardFunctions<'c>, at: &Arguments<Pointer<'c>>, block: Index<'c>) {
        let (b, plan, operands) = (self.b, self.plan, &self.operands);
        let part = |offset: i64| b.at_const(at.scratch, offset);
        let keys = span(b, block, plan.key_block, plan.keys);
        let run = plan.measured(b, &functions.bounds, at, 1, keys, part(self.scratch.key_bounds));
        let [k, v] = [&operands.k, &operands.v].map(|rows| self.source(at, rows, keys.first));
        b.call(functions.copy_k, &[k, part(self.scratch.k)], &[keys.count]);
        b.call(functions.transpose_k, &[k, part(self.scratch.k_transposed)], &[keys.count]);
        b.call(functions.transpose_v, &[v, part(self.scratch.v_transposed)], &[keys.count]);
        b.for_each(b.index(0), b.index(plan.query_blocks()), 1, &mut |query_block| {
            let rows = span(b, query_block, plan.query_block, plan.queries);
            let queries = Run { span: rows, bounds: self.query_bounds(at, query_block) };
            let work = || self.block(functions, at, queries, run);
            match plan.any_visible(b, queries, run) {
                Some(any) => b.branch(any, work, || ()),
                None => work(),
            }
        });
    }

    /// Address of the bounds of a block of queries.
    fn query_bounds(&self, at: &Arguments<Pointer<'c>>, block: Index<'c>) -> Pointer<'c> {
        self.b.at(self.b.at_const(at.scratch, self.scratch.query_bounds), self.b.index_mul(block, self.b.index(4 * self.plan.bounds_size(0))))
    }

    /// Address of a block's rows in an area of scratch that has a row for each query, or for each key.
    fn rows(&self, at: &Arguments<Pointer<'c>>, offset: i64, block: Span<'c>, size: HeadSize) -> Pointer<'c> {
        let b = self.b;
        b.at(b.at_const(at.scratch, offset), b.index_mul(block.first, b.index(4 * size.width)))
    }

    /// One block of queries with one block of keys.
    fn block(&self, functions: &BackwardFunctions<'c>, at: &Arguments<Pointer<'c>>, queries_run: Run<'c>, keys_run: Run<'c>) {
        let (b, plan, operands) = (self.b, self.plan, &self.operands);
        let part = |offset: i64| b.at_const(at.scratch, offset);
        let (p, ds) = (part(self.scratch.p), part(self.scratch.ds));
        let (rows, keys) = (queries_run.span, keys_run.span);
        let [q, dout] = [(self.scratch.q, plan.d), (self.scratch.dout, plan.values)].map(|(offset, size)| self.rows(at, offset, rows, size));
        b.call(functions.scores, &[q, part(self.scratch.k_transposed), p], &[]);
        b.call(functions.dp, &[dout, part(self.scratch.v_transposed), ds], &[]);
        let of_query = |tensor: usize| {
            let stride = plan.stride(tensor, plan.attention.at);
            b.at(at.tensors[tensor], b.index_mul(rows.first, b.index(4 * stride)))
        };
        let pointers = [&[p, ds, of_query(operands.lse), of_query(operands.delta)], &at.further(plan)[..]].concat();
        let numbers = [rows.first, keys.first, b.index_add(keys.first, keys.count), rows.count];
        match plan.visible(plan.key_block) {
            Visible::All => b.call(functions.gradient, &pointers, &numbers),
            Visible::Some => {
                let all = plan.all_visible(b, queries_run, keys_run, plan.key_block);
                b.branch(all, || b.call(functions.gradient, &pointers, &numbers), || b.call(functions.gradient_masked, &pointers, &numbers));
            }
        }
        if let Some(dv) = functions.dv {
            b.call(dv, &[ir::fault!("attention.dv.weights", ds, p), dout, self.rows(at, self.scratch.dv, keys, plan.values)], &[]);
        }
        if let Some(dk) = functions.dk {
            b.call(dk, &[ds, q, self.rows(at, self.scratch.dk, keys, plan.d)], &[]);
        }
        if let Some(dq) = functions.dq {
            b.call(dq, &[ds, part(self.scratch.k), self.rows(at, self.scratch.dq, rows, plan.d)], &[]);
        }
        if plan.bias().is_some() {
            self.add_pairs(at, ds, rows);
        }
    }

    fn clear(&self, at: &Arguments<Pointer<'c>>, offset: i64, elements: i64) {
        let b = self.b;
        let start = b.at_const(at.scratch, offset);
        b.for_each(b.index(0), b.index(elements), b.lanes() as i64, &mut |i| {
            b.store(b.at(start, b.index_mul(i, b.index(4))), b.f32(0.0), Lane::F32, None);
        });
    }

    /// Stores the sums of one gradient, if the kernel has it.
    fn finish(&self, at: &Arguments<Pointer<'c>>, which: AttentionGrad) {
        let (b, plan) = (self.b, self.plan);
        let scale = plan.attention.scale.0;
        let (sums, rows, dim, factor) = match which {
            AttentionGrad::Q => (self.scratch.dq, plan.queries, plan.attention.at, scale),
            AttentionGrad::K => (self.scratch.dk, plan.keys, plan.attention.keys, ir::fault!("attention.dk.scale", 1.0, scale)),
            AttentionGrad::V => (self.scratch.dv, plan.keys, plan.attention.keys, 1.0),
            AttentionGrad::Bias => unreachable!("invariant: that of a bias is stored by pairs"),
        };
        for (position, output) in plan.kernel.outputs.iter().enumerate() {
            if !matches!(plan.kernel.body[output.value].op, Op::AttentionGrad(_, w) if w == which) {
                continue;
            }
            let tensor = plan.kernel.inputs.len() + position;
            let dtype = plan.kernel.body[output.value].ty.dtype;
            let row_stride = pointwise::stored(dtype).bytes() * plan.stride(tensor, dim);
            let (columns, size) = plan.columns_of(tensor);
            let stored = OutputRows { dtype, stride: plan.stride(tensor, columns), size, accumulate: output.accumulate };
            b.for_each(b.index(0), b.index(rows), 1, &mut |row| {
                let from = b.at(b.at_const(at.scratch, sums), b.index_mul(row, b.index(4 * size.width)));
                let to = b.at(at.tensors[tensor], b.index_mul(row, b.index(row_stride)));
                tiles::fetch_stored(b, to, stored, row_stride);
                for column in vector_columns(b, size) {
                    let Column { first, .. } = column;
                    let value = b.load(b.at_const(from, 4 * first), Lane::F32, None);
                    store_column(b, to, &column, stored, b.mul(value, b.f32(factor)));
                }
            });
        }
    }
}
