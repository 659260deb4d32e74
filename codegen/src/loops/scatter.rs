//! Sums of rows by index: the gradient of a gather.
//!
//! A tile owns rows of the table, and a chunk of their columns. It reads all indices in one order, as many at once as
//! there are lanes, along the longest dim where the last one has less, and adds the values whose row is its own, so
//! the order of additions, and with it the result, does not depend on who computes the tile. Frequent indices are
//! often neighbours (the bytes of a text, the first words of a vocabulary): on a GPU every n-th row is a tile's,
//! which spreads them.
//!
//! A GPU waits for each value that it adds. So lanes have runs of columns where they can: a tile is wider then, of more
//! tiles that own fewer rows each. And it asks for several vectors of indices before it looks at the first.

use super::emit::Loops;
use super::index_point::{IndexPoint, LaneIndex, StridedTensor, widen};
use super::plan::{LoopPlan, running, vector_dim};
use super::runs;
use super::value::{KnownValues, local_row, zero};
use crate::build::{Builder, Compare, Frame, IntBinary, Lane};
use crate::layout::{self, div_ceil};
use crate::target::{Arch, Target};
use crate::{CompileError, Shape, pointwise};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::Op;
use std::collections::BTreeMap;

/// Bytes of sums in scratch at most, where the outputs are not the sums themselves.
const SCRATCH: i64 = 1 << 20;

/// How the work is cut.
struct Cuts {
    /// Owners of rows and chunks of columns, at most. Each owner reads all indices for each chunk.
    owners: i64,
    chunks: i64,
    /// Tiles to aim at by more owners, where rows have few chunks.
    tiles: i64,
    /// Owners take turns, row by row, if rows lie at least so many bytes apart.
    turns: Option<i64>,
    /// Vectors of indices asked for before the first is looked at.
    ahead: i64,
}

/// A GPU has thousands of warps to keep busy, and a warp adds one vector at a time. A CPU writes ranges of rows
/// faster than every n-th row.
fn cuts(target: &Target) -> Cuts {
    match target.arch {
        Arch::X86_64 => Cuts { owners: 16, chunks: 1, tiles: 0, turns: None, ahead: 1 },
        // Rows of 128 bytes or more are whole cache lines. More tiles would wait for fewer values each, but all of them
        // look at all indices.
        Arch::Nvptx => Cuts { owners: 64, chunks: 128, tiles: 4096, turns: Some(128), ahead: 4 },
    }
}

/// Called at a grid point.
type AtPoint<'a, B> = dyn FnMut(&mut Loops<'_, B>, &IndexPoint<B>) + 'a;
/// Called at an element of a tile, with the sums of its row.
type AtElement<'a, B> = dyn FnMut(&mut Loops<'_, B>, StridedTensor<B>, &IndexPoint<B>) -> Result<(), CompileError> + 'a;

/// Called at an index whose row is the tile's, with the row.
type AtRow<'a, B> = dyn FnMut(&mut Loops<'_, B>, &IndexPoint<B>, <B as Builder>::Index) + 'a;

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
    owners: i64,
    /// Rows of an owner, at most.
    own_rows: i64,
    /// An owner's rows are every `owners`-th one, else neighbours.
    interleaved: bool,
    /// The dim of the row that lanes run along, and its elements that a tile covers: whole vectors if not all.
    vector: Option<Dim>,
    chunk: i64,
    chunks: i64,
    /// Neighbours along it that a lane has at a time, if several.
    run: Option<i64>,
    ahead: i64,
}

/// What a tile owns.
struct ScatterTile<B: Builder> {
    owner: B::Index,
    /// The first element of its chunk.
    first: B::Index,
    scratch: B::Pointer,
}

impl<'a> Scatter<'a> {
    fn new(kernel: &'a Kernel, target: &Target) -> Result<Self, CompileError> {
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

        let cuts = cuts(target);
        let running = running(kernel);
        let vector = vector_dim(kernel, |d| row.contains(&d) && !running.contains(&d));
        let size = vector.map_or(1, |d| body.dims.size(d) as i64);
        let lanes = target.lanes() as i64;
        // Runs that would leave a rest of a row are none: all of a tile is written alike.
        let run = vector.filter(|_| target.arch == Arch::Nvptx).and_then(|d| runs::width(kernel, d, &[], lanes));
        let run = run.filter(|width| size % (width * lanes) == 0);
        let unit = lanes * run.unwrap_or(1);
        let chunk = (div_ceil(div_ceil(size, unit), cuts.chunks) * unit).min(size);
        let chunks = div_ceil(size, chunk);
        // A launch has 64 MiB of scratch (`abi.rs`): where sums are kept there, tiles of half as many rows let more warps
        // run. Of rows with less than four chunks there are fewer tiles, which have little to do beside their looks at
        // all indices.
        let tiles = if in_output { cuts.tiles } else { 2 * cuts.tiles };
        let owners = cuts.owners.max(tiles / chunks.max(4));
        let rows = body.dims.size(table) as i64;
        let apart = kernel.outputs.iter().map(|output| {
            let ty = &body[output.value].ty;
            layout::stride(ty, &output.strides, table) * ty.dtype.bytes() as i64
        });
        let interleaved = apart.min().zip(cuts.turns).is_some_and(|(bytes, least)| bytes >= least);
        let mut scatter = Scatter {
            kernel,
            node,
            table,
            batch,
            row,
            over,
            in_output,
            owners: 0,
            own_rows: div_ceil(rows, owners),
            interleaved,
            vector,
            chunk,
            chunks,
            run,
            ahead: cuts.ahead,
        };
        if !in_output {
            scatter.own_rows = scatter.own_rows.min(SCRATCH / scatter.row_bytes().max(1)).max(1);
        }
        scatter.owners = div_ceil(rows, scatter.own_rows);
        if interleaved {
            scatter.owners = scatter.owners.max(rows.min(owners));
        }
        Ok(scatter)
    }

    /// Bytes of the sums of a row, of all of the batch, in a tile's scratch.
    fn row_bytes(&self) -> i64 {
        4 * self.kept_dims().into_iter().map(|(_, size)| size).product::<i64>()
    }

    /// Dims of the sums in scratch, beside rows, and how much of them a tile has: innermost first.
    fn kept_dims(&self) -> Vec<(Dim, i64)> {
        let size = |d: Dim| if Some(d) == self.vector { self.chunk } else { self.kernel.body.dims.size(d) as i64 };
        self.row.iter().rev().chain(&self.batch).map(|d| (*d, size(*d))).collect()
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit<B: Frame>(b: &B, kernel: &Kernel, target: &Target, name: &str) -> Result<Shape, CompileError> {
    let scatter = Scatter::new(kernel, target)?;
    let tiles = scatter.owners * scatter.chunks;
    let plan = LoopPlan {
        vector: scatter.vector,
        grid: Vec::new(),
        shared: None,
        vector_in_grid: false,
        steps: Vec::new(),
        wide: 1,
        run: scatter.run,
        segment: 1,
        segments: 1,
        items: tiles,
        tile_items: 1,
        team: None,
    };
    let count = kernel.inputs.len() + kernel.outputs.len();
    b.kernel(name, [count, kernel.scalars.len()], &mut |entry| {
        let pointers: Vec<_> = (0..count).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        let mut loops = Loops::new(b, kernel, &plan, entry, &pointers)?;
        let mut result = Ok(());
        b.repeat(entry.first_tile, entry.end_tile, 1, &[], &mut |tile, _| {
            // Neighbouring tiles own the same rows, so warps of a block read the same indices.
            let tile = ScatterTile {
                owner: b.index_div(tile, b.index(scatter.chunks)),
                first: b.index_mul(b.index_rem(tile, b.index(scatter.chunks)), b.index(scatter.chunk)),
                scratch: entry.scratch,
            };
            result = scatter.tile(b, &mut loops, &tile);
            Vec::new()
        });
        result
    })?;
    let scratch = if scatter.in_output { 0 } else { scatter.own_rows * scatter.row_bytes() };
    Ok(Shape { tiles: tiles as u64, line: 1, scratch_bytes: scratch as u64 })
}

impl Scatter<'_> {
    /// The owner of the row in each lane.
    fn owner<B: Builder>(&self, b: &B, row: B::Vector) -> B::Vector {
        let (op, by) = if self.interleaved { (IntBinary::Rem, self.owners) } else { (IntBinary::Div, self.own_rows) };
        b.int2(op, row, b.i64(by))
    }

    /// The number of a row among those of its owner.
    fn number<B: Builder>(&self, b: &B, row: B::Index) -> B::Index {
        if self.interleaved {
            b.index_div(row, b.index(self.owners))
        } else {
            b.index_rem(row, b.index(ir::fault!("scatter.sum.row", self.owners, self.own_rows)))
        }
    }

    /// The sums of a row of the tile, in memory.
    fn sums<B: Builder>(&self, b: &B, loops: &Loops<'_, B>, tile: &ScatterTile<B>, row: B::Index) -> StridedTensor<B> {
        let lane = pointwise::lane(self.kernel.body[self.node].ty.dtype);
        if self.in_output {
            let output = &loops.outputs[0];
            return StridedTensor { start: output.start, lane, strides: output.strides.clone(), lane_stride: 0 };
        }
        let mut start = b.at(tile.scratch, b.index_mul(self.number(b, row), b.index(self.row_bytes())));
        let (mut strides, mut elements) = (Vec::new(), 1);
        for (dim, size) in self.kept_dims() {
            if Some(dim) == self.vector && self.chunks > 1 {
                start = b.at(start, b.index_sub(b.index(0), b.index_mul(tile.first, b.index(elements * lane.bytes()))));
            }
            strides.push((dim, elements));
            elements *= size;
        }
        StridedTensor { start, lane, strides, lane_stride: 0 }
    }

    fn tile<B: Frame>(&self, b: &B, loops: &mut Loops<'_, B>, tile: &ScatterTile<B>) -> Result<(), CompileError> {
        let lane = pointwise::lane(self.kernel.body[self.node].ty.dtype);
        if !(self.in_output && ir::fault!("scatter.sum.before", false, self.kernel.outputs[0].accumulate)) {
            self.each_element(b, loops, tile, &mut |loops, sums, point| {
                sums.store(loops.b, point, &[zero(loops.b, lane)]);
                Ok(())
            })?;
        }
        let mut result = Ok(());
        self.each_own_point(b, loops, tile, &mut |loops, point, row| {
            if result.is_ok() {
                result = self.add_point(b, loops, point, tile, row);
            }
        })?;
        result?;
        if self.in_output {
            return Ok(());
        }
        let outputs: Vec<usize> = (0..self.kernel.outputs.len()).collect();
        self.each_element(b, loops, tile, &mut |loops, sums, point| {
            loops.kept.insert(self.node, sums);
            loops.store(point, &outputs)
        })
    }

    /// Calls `body` at all elements of the tile.
    fn each_element<B: Builder>(
        &self,
        b: &B,
        loops: &mut Loops<'_, B>,
        tile: &ScatterTile<B>,
        body: &mut AtElement<'_, B>,
    ) -> Result<(), CompileError> {
        let rows = b.index(self.kernel.body.dims.size(self.table) as i64);
        let (from, to, step) = if self.interleaved {
            (tile.owner, rows, self.owners)
        } else {
            let from = b.index_mul(tile.owner, b.index(self.own_rows));
            (from, b.index_min(b.index_add(from, b.index(self.own_rows)), ir::fault!("scatter.rows.end", b.index_add(rows, b.index(1)), rows)), 1)
        };
        let inner: Vec<Dim> = self.batch.iter().chain(&self.row).copied().collect();
        let mut result = Ok(());
        b.repeat(from, to, step, &[], &mut |row, _| {
            let point = loops.new_point(BTreeMap::from([(self.table, LaneIndex::Same(row))]), None);
            self.nest(b, loops, &point, &inner, tile, &mut |loops, point| {
                if result.is_ok() {
                    let sums = self.sums(b, loops, tile, row);
                    result = body(loops, sums, point);
                }
            });
            Vec::new()
        });
        result
    }

    /// Loops over `dims`, of the vector dim over the tile's chunk.
    fn nest<B: Builder>(
        &self,
        b: &B,
        loops: &mut Loops<'_, B>,
        point: &IndexPoint<B>,
        dims: &[Dim],
        tile: &ScatterTile<B>,
        body: &mut AtPoint<'_, B>,
    ) {
        let Some(vector) = self.vector.filter(|_| self.chunks > 1) else { return loops.nest(point, dims, self.run, body) };
        let others: Vec<Dim> = dims.iter().copied().filter(|d| *d != vector).collect();
        let (size, width) = (loops.size(vector), self.run.unwrap_or(1));
        loops.nest(point, &others, None, &mut |loops, point| {
            // A chunk is one vector, or one of runs, unless the row is very long.
            for before in (0..self.chunk).step_by(b.lanes() * width as usize) {
                let first = b.index_add(tile.first, b.index(before));
                let lane = || b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(width));
                let within = || b.compare_int(Compare::Lt, b.int2(IntBinary::Add, b.splat(first), lane()), b.i64(size));
                let mask = if ir::fault!("scatter.chunk.tail", 0, size % self.chunk) == 0 { point.mask } else { Some(point.also(b, within())) };
                let at = if self.run.is_some() { LaneIndex::Run(first) } else { LaneIndex::Lanes(first) };
                let point = IndexPoint { width: width as usize, ..loops.moved(point, vector, at, mask) };
                body(loops, &point);
            }
        });
    }

    /// Looks at as many indices at once as there are lanes, and goes in order through those whose rows are the
    /// tile's.
    fn each_own_point<B: Frame>(&self, b: &B, loops: &mut Loops<'_, B>, tile: &ScatterTile<B>, body: &mut AtRow<'_, B>) -> Result<(), CompileError> {
        let mut points: Vec<Dim> = self.batch.iter().chain(&self.over).copied().collect();
        // A short last dim, such as the two or eight experts of a token, would leave lanes idle, so the longest dim
        // goes last.
        if points.last().is_some_and(|d| loops.size(*d) < b.lanes() as i64) {
            points.sort_by_key(|d| loops.size(*d));
        }
        let start = loops.new_point(BTreeMap::new(), None);
        let (index, map) = (self.kernel.body[self.node].args[1], &self.kernel.body.dims[self.table].index);
        let mut result = Ok(());
        // `rows` gives the row of each lane's index, and the mask of the lanes whose row this rank has.
        let mut rows = |loops: &mut Loops<'_, B>, point: &IndexPoint<B>| match loops.value(index, point, &mut KnownValues::new()) {
            Ok(index) => local_row(b, loops.scalars, map, widen(b, index[0])),
            Err(error) => {
                result = Err(error);
                (b.i64(0), b.mask_first(0))
            }
        };
        let own = |row: B::Vector, here: B::Vector| {
            let own = b.compare_int(Compare::Eq, self.owner(b, row), b.splat(tile.owner));
            ir::fault!("scatter.row.nowhere", own, b.int2(IntBinary::And, own, here))
        };
        let Some((&last, outer)) = points.split_last() else {
            let (row, here) = rows(loops, &start);
            b.each_lane(b.int2(IntBinary::And, own(row, here), b.mask_first(1)), row, &mut |_, row| body(loops, &start, row));
            return result;
        };
        let (size, lanes) = (loops.size(last), b.lanes() as i64);
        let (together, whole) = (lanes * self.ahead, size / (lanes * self.ahead) * (lanes * self.ahead));
        loops.nest(&start, outer, None, &mut |loops, point| {
            // Looks at `count` vectors of indices, from `first` on.
            let mut look = |first: B::Index, count: i64, partial: bool| {
                let asked: Vec<_> = (0..count)
                    .map(|k| {
                        let first = b.index_add(first, b.index(k * lanes));
                        let within = || b.compare_int(Compare::Lt, b.int2(IntBinary::Add, b.splat(first), b.lane_numbers()), b.i64(size));
                        let there = partial.then(within);
                        let many = loops.moved(point, last, LaneIndex::Lanes(first), there);
                        let (row, here) = rows(loops, &many);
                        (first, row, there.map_or(here, |there| b.int2(IntBinary::And, here, there)))
                    })
                    .collect();
                for (first, row, here) in asked {
                    b.each_lane(own(row, here), row, &mut |lane, row| {
                        let at = ir::fault!("scatter.lanes.first", first, b.index_add(first, lane));
                        let one = loops.moved(point, last, LaneIndex::Same(at), None);
                        body(loops, &one, row);
                    });
                }
                Vec::new()
            };
            b.repeat(b.index(0), b.index(whole), together, &[], &mut |first, _| look(first, self.ahead, false));
            let partial = ir::fault!("scatter.lanes.tail", 0, size % lanes) != 0;
            b.repeat(b.index(whole), b.index(size), lanes, &[], &mut |first, _| look(first, 1, partial));
        });
        result
    }

    /// Adds the values of one index to its row of the tile.
    fn add_point<B: Frame>(
        &self,
        b: &B,
        loops: &mut Loops<'_, B>,
        point: &IndexPoint<B>,
        tile: &ScatterTile<B>,
        row: B::Index,
    ) -> Result<(), CompileError> {
        let node = &self.kernel.body[self.node];
        let mut result = Ok(());
        let sums = self.sums(b, loops, tile, row);
        self.nest(b, loops, point, &self.row, tile, &mut |loops, point| {
            let mut along = point.along.clone();
            along.insert(self.table, LaneIndex::Same(row));
            let target = IndexPoint { width: point.width, ..loops.new_point(along, point.mask) };
            match loops.value(node.args[0], point, &mut KnownValues::new()) {
                Ok(value) => sums.add(b, &target, &value, &|old, value| match sums.lane {
                    Lane::F32 => ir::fault!("scatter.sum.twice", value, b.add(old, value)),
                    _ => b.int2(IntBinary::Add, old, value),
                }),
                Err(error) => result = Err(error),
            }
        });
        result
    }
}

#[cfg(test)]
mod tests;
