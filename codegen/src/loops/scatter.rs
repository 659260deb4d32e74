//! Sums of rows by index: the gradient of a gather.
//!
//! A tile owns a range of the table's rows. It reads all indices in storage order and adds the values whose row is its own, so the
//! order of additions, and with it the result, does not depend on who computes the tile.

use super::emit::Loops;
use super::place::{Along, Place, Stored, widen};
use super::plan::{Plan, vector_dim};
use super::value::{Known, local_row, zero};
use crate::abi::Entry;
use crate::build::{Builder, Frame, IntBinary, Lane};
use crate::layout::div_ceil;
use crate::{CompileError, Shape, pointwise};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::Op;
use std::collections::BTreeMap;

/// Tiles to aim for: each reads all indices.
const TILES: i64 = 16;
/// Bytes of sums in scratch at most, where the outputs are not the sums themselves.
const SCRATCH: i64 = 1 << 20;

/// What happens at each element of a row.
type AtPlace<'a, B> = dyn FnMut(&mut Loops<'_, B>, &Place<B>) -> Result<(), CompileError> + 'a;

/// What a scatter is made of.
struct Scatter<'a> {
    kernel: &'a Kernel,
    node: Value,
    table: Dim,
    /// Dims of the result beside the table's rows: those of the index, and the others.
    batch: Vec<Dim>,
    row: Vec<Dim>,
    /// Dims summed over.
    over: Vec<Dim>,
    /// The sums are the only output, and not rounded.
    in_output: bool,
    rows_per_tile: i64,
}

impl<'a> Scatter<'a> {
    fn new(kernel: &'a Kernel) -> Result<Self, CompileError> {
        let body = &kernel.body;
        let (node, table) = body
            .values()
            .find_map(|v| if let Op::Scatter { dim } = body[v].op { Some((v, dim)) } else { None })
            .ok_or_else(|| CompileError::unsupported("a scatter kernel without `scatter`"))?;
        let result = body.dims_of(node);
        let (values, index) = (body.dims_of(body[node].args[0]), body.dims_of(body[node].args[1]));
        let (batch, row): (Vec<Dim>, Vec<Dim>) = result.iter().copied().filter(|d| *d != table).partition(|d| index.contains(d));
        let mut over: Vec<Dim> = index.to_vec();
        over.extend(values.iter().filter(|d| !index.contains(d)));
        over.retain(|d| !result.contains(d));
        let in_output = kernel.outputs.len() == 1 && kernel.outputs[0].value == node && !body[node].ty.dtype.is_half();
        let rows = body.dims.size(table) as i64;
        let elements = body.elements(node) as i64 / rows.max(1);
        let mut rows_per_tile = div_ceil(rows, TILES);
        if !in_output {
            rows_per_tile = rows_per_tile.min(SCRATCH / (4 * elements).max(1)).max(1);
        }
        Ok(Scatter { kernel, node, table, batch, row, over, in_output, rows_per_tile })
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit<B: Frame>(b: &B, kernel: &Kernel, name: &str) -> Result<Shape, CompileError> {
    let scatter = Scatter::new(kernel)?;
    let rows = kernel.body.dims.size(scatter.table) as i64;
    let tiles = div_ceil(rows, scatter.rows_per_tile);
    let plan = Plan {
        vector: vector_dim(kernel, |d| scatter.row.contains(&d)),
        grid: Vec::new(),
        vector_in_grid: false,
        steps: Vec::new(),
        wide: 1,
        segment: 1,
        segments: 1,
        items: tiles,
        tile_items: 1,
    };
    let count = kernel.inputs.len() + kernel.outputs.len();
    b.kernel(name, [count, kernel.scalars.len()], &mut |entry| {
        let pointers: Vec<_> = (0..count).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        let mut loops = Loops::new(b, kernel, &plan, entry, &pointers)?;
        let mut result = Ok(());
        b.repeat(entry.first_tile, entry.end_tile, 1, &[], &mut |tile, _| {
            result = scatter.tile(b, &mut loops, entry, tile);
            Vec::new()
        });
        result
    })?;
    let scratch = if scatter.in_output { 0 } else { scatter.sums_bytes() };
    Ok(Shape { tiles: tiles as u64, scratch_bytes: scratch as u64 })
}

impl Scatter<'_> {
    fn sums_bytes(&self) -> i64 {
        let body = &self.kernel.body;
        body.elements(self.node) as i64 / (body.dims.size(self.table) as i64).max(1) * self.rows_per_tile * 4
    }

    /// Where the sums of a tile stand: rows by their number in the whole table, of which only the tile's own exist.
    fn sums<B: Builder>(&self, b: &B, loops: &Loops<'_, B>, scratch: B::Pointer, first: B::Index, lane: Lane) -> Stored<B> {
        if self.in_output {
            let output = &loops.outputs[0];
            return Stored { start: output.start, lane, strides: output.strides.clone(), lane_stride: 0 };
        }
        let (mut strides, mut elements) = (Vec::new(), 1);
        for &dim in self.row.iter().rev().chain(&self.batch) {
            strides.push((dim, elements));
            elements *= self.kernel.body.dims.size(dim) as i64;
        }
        strides.push((self.table, elements));
        let before = b.index_sub(b.index(0), b.index_mul(first, b.index(elements * lane.bytes())));
        Stored { start: b.at(scratch, before), lane, strides, lane_stride: 0 }
    }

    fn tile<B: Builder>(&self, b: &B, loops: &mut Loops<'_, B>, entry: &Entry<B::Index, B::Pointer>, tile: B::Index) -> Result<(), CompileError> {
        let body = &self.kernel.body;
        let lane = pointwise::lane(body[self.node].ty.dtype);
        let rows = body.dims.size(self.table) as i64;
        let first = b.index_mul(tile, b.index(self.rows_per_tile));
        let end = b.index_min(b.index_add(first, b.index(self.rows_per_tile)), b.index(rows));
        let sums = self.sums(b, loops, entry.scratch, first, lane);
        let inner: Vec<Dim> = self.batch.iter().chain(&self.row).copied().collect();

        if !(self.in_output && self.kernel.outputs[0].accumulate) {
            self.each_row(b, loops, first, end, &inner, &mut |_, place| {
                sums.store(b, place, zero(b, lane));
                Ok(())
            })?;
        }
        let points: Vec<Dim> = self.batch.iter().chain(&self.over).copied().collect();
        let start = loops.place(BTreeMap::new(), None);
        let mut result = Ok(());
        loops.nest(&start, &points, &mut |loops, place| {
            if result.is_ok() {
                result = self.add_point(b, loops, place, tile, &sums);
            }
        });
        result?;
        if self.in_output {
            return Ok(());
        }
        loops.kept.insert(self.node, sums);
        let outputs: Vec<usize> = (0..self.kernel.outputs.len()).collect();
        self.each_row(b, loops, first, end, &inner, &mut |loops, place| loops.store(place, &outputs))
    }

    /// All elements of rows `first..end`.
    fn each_row<B: Builder>(
        &self,
        b: &B,
        loops: &mut Loops<'_, B>,
        first: B::Index,
        end: B::Index,
        inner: &[Dim],
        body: &mut AtPlace<'_, B>,
    ) -> Result<(), CompileError> {
        let mut result = Ok(());
        b.repeat(first, end, 1, &[], &mut |row, _| {
            let place = loops.place(BTreeMap::from([(self.table, Along::Same(row))]), None);
            loops.nest(&place, inner, &mut |loops, place| {
                if result.is_ok() {
                    result = body(loops, place);
                }
            });
            Vec::new()
        });
        result
    }

    /// Adds the values of one index if its row belongs to the tile.
    fn add_point<B: Builder>(&self, b: &B, loops: &mut Loops<'_, B>, place: &Place<B>, tile: B::Index, sums: &Stored<B>) -> Result<(), CompileError> {
        let node = &self.kernel.body[self.node];
        let indices = widen(b, loops.value(node.args[1], place, &mut Known::new())?);
        let (row, inside) = local_row(b, loops.scalars, &self.kernel.body.dims[self.table].index, indices);
        let row = b.first_as_index(b.select(inside, row, b.i64(-1)));
        // One pass if the row's tile is this one, else none: unsigned, so any difference counts as at least one.
        let distance = b.index_sub(b.index_div(row, b.index(self.rows_per_tile)), tile);
        let passes = b.index_sub(b.index(1), b.index_min(distance, b.index(1)));
        let mut result = Ok(());
        b.repeat(b.index(0), passes, 1, &[], &mut |_, _| {
            loops.nest(place, &self.row, &mut |loops, place| {
                let mut along = place.along.clone();
                along.insert(self.table, Along::Same(row));
                let target = loops.place(along, place.mask);
                match loops.value(node.args[0], place, &mut Known::new()) {
                    Ok(value) => {
                        let old = sums.load(b, &target);
                        let sum = if sums.lane == Lane::F32 { b.add(old, value) } else { b.int2(IntBinary::Add, old, value) };
                        sums.store(b, &target, sum);
                    }
                    Err(error) => result = Err(error),
                }
            });
            Vec::new()
        });
        result
    }
}
