//! Attention and the logarithm of its sums.
//!
//! A tile is a run of panels of queries of one head. Keys go block by block on the outside, so a block of K and V is
//! copied once per tile and scratch does not grow with the number of keys. Of a block, a panel meets the strips that
//! the mask leaves something of, from the first to the last.

use super::panels::{Division, NOTHING, PanelBuilder, PanelFunctions};
use super::tiles::{self, OperandCopy, OutputRows, across, store_column, transpose, vector_columns};
use super::{Arguments, AttentionPlan, OperandRows, Run, Span, Visible, span};
use crate::build::llvm::{Index, Llvm, Pointer, Vector};
use crate::build::{Builder, Lane};
use crate::layout::div_ceil;
use crate::target::Target;
use crate::{CompileError, Shape, math, pointwise};
use inkwell::values::FunctionValue;
use ir::kernel::Kernel;
use ir::op::Op;
use std::f64::consts::{LN_2, LOG2_E};

/// Offsets in scratch, in bytes.
struct ForwardScratch {
    q: i64,
    /// Strips of keys, transposed, and panels of values.
    k: i64,
    v: i64,
    /// Exponentials of a panel.
    p: i64,
    sums: i64,
    reference: i64,
    weight: i64,
    /// Bounds of positions: of a tile's queries, of its panels, of a block of keys, of its strips.
    tile_bounds: i64,
    panel_bounds: i64,
    key_bounds: i64,
    strip_bounds: i64,
    bytes: i64,
}

impl ForwardScratch {
    fn new(plan: &AttentionPlan, division: &Division, lanes: i64) -> ForwardScratch {
        let mut used = 0;
        let mut take = |elements: i64| {
            let start = used;
            used += div_ceil(4 * elements, 64) * 64;
            start
        };
        let tile = division.tile_panels() * division.tallest();
        ForwardScratch {
            q: take(tile * plan.d.width),
            k: take(division.block * plan.d.width),
            v: take(division.block * plan.values.width),
            p: take(division.tallest() * division.block),
            sums: take(tile * plan.values.width),
            reference: take(div_ceil(tile, lanes) * lanes),
            weight: take(tile * lanes),
            tile_bounds: take(plan.bounds_size(0)),
            panel_bounds: take(plan.bounds_size(0) * division.tile_panels()),
            key_bounds: take(plan.bounds_size(1)),
            strip_bounds: take(plan.bounds_size(1) * division.strips()),
            bytes: used,
        }
    }
}

/// The functions of one kernel.
struct ForwardFunctions<'c> {
    copy_q: FunctionValue<'c>,
    transpose_k: FunctionValue<'c>,
    copy_v: FunctionValue<'c>,
    bounds: [Vec<FunctionValue<'c>>; 2],
    /// For each height that panels have, the greater first.
    panels: Vec<PanelFunctions<'c>>,
}

/// The kernel under construction.
struct Forward<'a, 'c> {
    b: &'a Llvm<'c>,
    plan: &'a AttentionPlan<'a>,
    operands: [OperandRows; 3],
    division: Division,
    scratch: ForwardScratch,
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// The kernel is not an attention of inputs.
pub fn emit(b: &Llvm, kernel: &Kernel, target: &Target, name: &str) -> Result<Shape, CompileError> {
    let plan = AttentionPlan::new(kernel, target)?;
    let args = &kernel.body[kernel.outputs[0].value].args;
    // A kernel of the logarithm alone has no values. k stands in for v, and the product with it is not stored.
    let v = kernel.outputs.iter().find_map(|o| kernel.body[o.value].args.get(2)).unwrap_or(&args[1]);
    let operands = [plan.query_rows(plan.operand(args[0])?), plan.key_rows(plan.operand(args[1])?), plan.key_rows(plan.operand(*v)?)];
    let division = Division::new(&plan, target);
    let scratch = ForwardScratch::new(&plan, &division, b.lanes() as i64);
    let forward = Forward { b, plan: &plan, operands, division, scratch };
    let functions = forward.functions();
    let entry = b.kernel(name);
    let arguments = Arguments::new(kernel, &entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
    let heads = plan.heads();
    let runs = division.runs;
    b.for_each(entry.first_tile, entry.end_tile, 1, &mut |tile| {
        // With a causal mask, the last runs of a head take longest, so they come first.
        let run = b.index_sub(b.index(runs - 1), b.index_rem(tile, b.index(runs)));
        let at = arguments.at(b, &plan, &heads, b.index_div(tile, b.index(runs)));
        forward.tile(&functions, &at, run);
    });
    b.finish_function();
    let tiles = runs * plan.sizes(&heads);
    Ok(Shape { tiles: tiles as u64, line: 1, scratch_bytes: forward.scratch.bytes as u64 })
}

impl<'c> Forward<'_, 'c> {
    fn functions(&self) -> ForwardFunctions<'c> {
        let (b, plan, division) = (self.b, self.plan, self.division);
        let [q, k, v] = &self.operands;
        let copy_q = OperandCopy {
            name: "copy_q",
            rows: q,
            factor: plan.attention.scale.0 * if plan.program.changes() { 1.0 } else { ir::fault!("attention.scale.log2", 1.0, LOG2_E) },
            panel: plan.d.width,
            height: 0,
        };
        let copy_v = OperandCopy { name: "copy_v", rows: v, factor: 1.0, panel: division.columns, height: division.block };
        let panels = PanelBuilder { b, plan, division };
        let heights = (division.height..=division.tallest()).rev();
        ForwardFunctions {
            copy_q: tiles::copy(b, &copy_q),
            transpose_k: transpose(b, "transpose_k", k, division.strip),
            copy_v: tiles::copy(b, &copy_v),
            bounds: plan.bounds(b),
            panels: heights.map(|rows| panels.of(rows)).collect(),
        }
    }

    fn tile(&self, functions: &ForwardFunctions<'c>, at: &Arguments<Pointer<'c>>, run: Index<'c>) {
        let (b, plan, division, scratch) = (self.b, self.plan, &self.division, &self.scratch);
        let part = |offset: i64| b.at_const(at.scratch, offset);
        let first_of = |run: Index<'c>| b.index_div(b.index_mul(run, b.index(division.panels)), b.index(division.runs));
        let panels = [first_of(run), first_of(b.index_add(run, b.index(1)))];
        let [first, end] = panels.map(|panel| division.row(b, panel));
        let queries = Span { first, count: b.index_sub(end, first) };
        self.clear(at);

        let [q, k, v] = &self.operands;
        let source = |rows: &OperandRows, first: Index<'c>| b.at(at.tensors[rows.tensor], b.index_mul(first, b.index(rows.bytes(rows.row_stride))));
        b.call(functions.copy_q, &[source(q, first), part(scratch.q)], &[queries.count]);
        let tile = plan.measured(b, &functions.bounds, at, 0, queries, part(scratch.tile_bounds));
        let panel_bounds =
            |panel: Index<'c>| b.at(part(scratch.panel_bounds), b.index_mul(b.index_sub(panel, panels[0]), b.index(4 * plan.bounds_size(0))));
        let rows_of = |panel: Index<'c>| {
            let first = division.row(b, panel);
            Span { first, count: b.index_sub(division.row(b, b.index_add(panel, b.index(1))), first) }
        };
        b.for_each(panels[0], panels[1], 1, &mut |panel| {
            plan.measured(b, &functions.bounds, at, 0, rows_of(panel), panel_bounds(panel));
        });
        b.for_each(b.index(0), b.index(div_ceil(plan.keys, division.block)), 1, &mut |block| {
            let keys = span(b, block, division.block, plan.keys);
            let run = plan.measured(b, &functions.bounds, at, 1, keys, part(scratch.key_bounds));
            let work = || {
                b.for_each(b.index(0), keys.count, division.strip, &mut |column| {
                    let strip = self.strip(at, keys, column);
                    plan.measured(b, &functions.bounds, at, 1, strip.span, strip.bounds);
                    b.call(functions.transpose_k, &[source(k, strip.span.first), self.strip_keys(at, column)], &[strip.span.count]);
                });
                b.call(functions.copy_v, &[source(v, keys.first), part(scratch.v)], &[keys.count]);
                for (functions, [first_panel, end_panel]) in functions.panels.iter().zip(division.by_height(b, panels)) {
                    b.for_each(first_panel, end_panel, 1, &mut |panel| {
                        let rows = Run { span: rows_of(panel), bounds: panel_bounds(panel) };
                        self.panel(functions, at, &ScoreBlock { row: b.index_sub(rows.span.first, first), rows, keys });
                    });
                }
            };
            match plan.any_visible(b, tile, run) {
                Some(any) => b.branch(any, work, || ()),
                None => work(),
            }
        });
        b.for_each(b.index(0), queries.count, 1, &mut |row| self.finish(at, row, b.index_add(first, row)));
    }

    /// The keys of a strip that begins at `column` of a block.
    fn strip(&self, at: &Arguments<Pointer<'c>>, keys: Span<'c>, column: Index<'c>) -> Run<'c> {
        let (b, strip) = (self.b, self.division.strip);
        let count = b.index_min(b.index(strip), b.index_sub(keys.count, column));
        let bytes = b.index(4 * self.plan.bounds_size(1));
        let bounds = b.at(b.at_const(at.scratch, self.scratch.strip_bounds), b.index_mul(b.index_div(column, b.index(strip)), bytes));
        Run { span: Span { first: b.index_add(keys.first, column), count }, bounds }
    }

    /// Address of the transposed keys of that strip.
    fn strip_keys(&self, at: &Arguments<Pointer<'c>>, column: Index<'c>) -> Pointer<'c> {
        self.b.at(self.b.at_const(at.scratch, self.scratch.k), self.b.index_mul(column, self.b.index(4 * self.plan.d.width)))
    }

    /// Resets sums, references and weights to those of queries that have seen no key.
    fn clear(&self, at: &Arguments<Pointer<'c>>) {
        let (b, plan) = (self.b, self.plan);
        let lanes = b.lanes() as i64;
        let rows = self.division.tile_panels() * self.division.tallest();
        let fill = |offset: i64, elements: i64, value: Vector<'c>| {
            // Each area of scratch is a multiple of a vector long, so whole vectors may be stored.
            b.for_each(b.index(0), b.index(div_ceil(elements, lanes) * lanes), lanes, &mut |i| {
                b.store(b.at(b.at_const(at.scratch, offset), b.index_mul(i, b.index(4))), value, Lane::F32, None);
            });
        };
        fill(self.scratch.sums, rows * plan.values.width, b.f32(0.0));
        fill(self.scratch.reference, rows, b.f32(NOTHING));
        fill(self.scratch.weight, rows * lanes, b.f32(0.0));
    }

    /// One panel of queries with one block of keys.
    fn panel(&self, functions: &PanelFunctions<'c>, at: &Arguments<Pointer<'c>>, block: &ScoreBlock<'c>) {
        let (b, plan, division, scratch) = (self.b, self.plan, &self.division, &self.scratch);
        let &ScoreBlock { row, rows, keys } = block;
        let lanes = b.lanes() as i64;
        let own = |offset: i64, elements: i64| b.at(b.at_const(at.scratch, offset), b.index_mul(row, b.index(4 * elements)));
        let (p, sums) = (b.at_const(at.scratch, scratch.p), own(scratch.sums, plan.values.width));
        let (first, end) = self.visible_columns(at, block);
        b.for_each(first, end, division.strip, &mut |column| {
            let strip = self.strip(at, keys, column);
            let (q, k) = (own(scratch.q, plan.d.width), self.strip_keys(at, column));
            let pointers = [&[q, k, p, sums, own(scratch.reference, 1), own(scratch.weight, lanes)], &at.further(plan)[..]].concat();
            let numbers = [rows.span.first, strip.span.first, b.index_add(strip.span.first, strip.span.count), column];
            let whole = || b.call(functions.exponentials, &pointers, &numbers);
            match plan.visible(division.strip) {
                Visible::All => whole(),
                Visible::Some => {
                    let all = plan.all_visible(b, rows, strip, division.strip);
                    b.branch(all, whole, || b.call(functions.exponentials_masked, &pointers, &numbers));
                }
            }
        });
        let v = b.at(b.at_const(at.scratch, scratch.v), b.index_mul(first, b.index(4 * division.columns)));
        b.call(functions.weigh, &[b.at(p, b.index_mul(first, b.index(4))), v, sums], &[b.index_sub(end, first)]);
    }

    /// Start of the first visible strip and end of the last one, in columns of the block.
    fn visible_columns(&self, at: &Arguments<Pointer<'c>>, block: &ScoreBlock<'c>) -> (Index<'c>, Index<'c>) {
        let (b, plan, division) = (self.b, self.plan, &self.division);
        let columns = (0..division.block).step_by(division.strip as usize);
        let seen: Vec<_> = columns
            .map(|column| {
                let column = b.index(column);
                let there = b.index_less(column, block.keys.count);
                let any = plan.any_visible(b, block.rows, self.strip(at, block.keys, column));
                (column, any.map_or(there, |any| b.both(there, any)))
            })
            .collect();
        let end = seen.iter().fold(b.index(0), |end, (column, any)| {
            b.index_select(*any, b.index_add(*column, b.index(ir::fault!("attention.strips.end", 0, division.strip))), end)
        });
        let start = ir::fault!("attention.strips.first", b.index(0), end);
        let first = seen.iter().rev().fold(start, |first, (column, any)| b.index_select(*any, *column, first));
        (first, end)
    }

    /// Stores the outputs of one query: row `row` of the tile, `query` of all.
    fn finish(&self, at: &Arguments<Pointer<'c>>, row: Index<'c>, query: Index<'c>) {
        let (b, plan) = (self.b, self.plan);
        let part = |offset: i64, row_bytes: i64| b.at(b.at_const(at.scratch, offset), b.index_mul(row, b.index(row_bytes)));
        let weight = across(b, b.load(part(self.scratch.weight, 4 * b.lanes() as i64), Lane::F32, None), |x, y| b.add(x, y));
        let reference = b.mul(b.load_splat(part(self.scratch.reference, 4), Lane::F32), b.f32(ir::fault!("attention.lse.ln2", 1.0, LN_2)));
        // A query that sees no key has weight 0. Its result is then 0 and its logarithm minus infinity.
        let none = b.compare_float(crate::build::Compare::Eq, weight, b.f32(0.0));
        let inverse = ir::fault!("attention.nothing.seen", b.div(b.f32(1.0), weight), b.select(none, b.f32(0.0), b.div(b.f32(1.0), weight)));
        for (position, output) in plan.kernel.outputs.iter().enumerate() {
            let tensor = plan.kernel.inputs.len() + position;
            let dtype = plan.kernel.body[output.value].ty.dtype;
            let row_stride = pointwise::stored(dtype).bytes() * plan.stride(tensor, plan.attention.at);
            let place = b.at(at.tensors[tensor], b.index_mul(query, b.index(row_stride)));
            if matches!(plan.kernel.body[output.value].op, Op::AttentionLse(_)) {
                let log = b.add(reference, math::log(b, weight));
                let log = if output.accumulate { b.add(log, b.load_splat(place, Lane::F32)) } else { log };
                b.store_first(place, log, Lane::F32);
                continue;
            }
            let to = OutputRows { dtype, stride: plan.stride(tensor, plan.attention.values), size: plan.values, accumulate: output.accumulate };
            tiles::fetch_stored(b, place, to, row_stride);
            for column in vector_columns(b, plan.values) {
                let sum = b.load(b.at_const(part(self.scratch.sums, 4 * plan.values.width), 4 * column.first), Lane::F32, None);
                store_column(b, place, &column, to, b.mul(sum, inverse));
            }
        }
    }
}

/// A panel of queries and a block of keys.
struct ScoreBlock<'c> {
    /// The panel's first row in the tile.
    row: Index<'c>,
    rows: Run<'c>,
    keys: Span<'c>,
}
