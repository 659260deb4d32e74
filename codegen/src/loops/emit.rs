//! Writes a kernel of loops, once for any builder.

use super::index_point::{IndexPoint, LaneIndex, ScanDirection, StridedTensor};
use super::plan::{LoopPlan, Step};
use super::value::KnownValues;
use crate::CompileError;
use crate::abi::Entry;
use crate::build::{Builder, IntBinary};
use crate::layout::tensors;
use crate::pointwise;
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::DType;
use std::collections::BTreeMap;

/// A kernel under construction.
pub struct Loops<'a, B: Builder> {
    pub b: &'a B,
    pub kernel: &'a Kernel,
    pub plan: &'a LoopPlan,
    pub scalars: B::Pointer,
    pub inputs: Vec<StridedTensor<B>>,
    pub outputs: Vec<StridedTensor<B>>,
    pub scratch: B::Pointer,
    scratch_bytes: i64,
    /// Results of earlier steps at this grid point: in registers (for each slot one vector, or one for each element
    /// of its runs) if no inner dim is left, else in scratch.
    pub reduced: BTreeMap<Value, Vec<Vec<B::Vector>>>,
    pub kept: BTreeMap<Value, StridedTensor<B>>,
    point_count: usize,
}

/// Writes the loop over tiles; returns bytes of scratch.
///
/// # Errors
/// An op is not supported.
pub fn emit<B: Builder>(
    b: &B,
    kernel: &Kernel,
    plan: &LoopPlan,
    entry: &Entry<B::Index, B::Pointer>,
    pointers: &[B::Pointer],
) -> Result<i64, CompileError> {
    let mut loops = Loops::new(b, kernel, plan, entry, pointers)?;
    let per_tile = b.index(plan.tile_items);
    let first = b.index_mul(entry.first_tile, per_tile);
    let end = b.index_min(b.index_mul(entry.end_tile, per_tile), b.index(plan.items));
    let mut result = Ok(());
    b.repeat(first, end, 1, &[], &mut |item, _| {
        if result.is_ok() {
            result = loops.item(item);
        }
        Vec::new()
    });
    result.map(|()| loops.scratch_bytes)
}

impl<'a, B: Builder> Loops<'a, B> {
    /// # Errors
    /// The dtype of an argument is not supported.
    pub fn new(
        b: &'a B,
        kernel: &'a Kernel,
        plan: &'a LoopPlan,
        entry: &Entry<B::Index, B::Pointer>,
        pointers: &[B::Pointer],
    ) -> Result<Self, CompileError> {
        let mut inputs = Vec::new();
        for ((ty, strides), start) in tensors(kernel).into_iter().zip(pointers) {
            let strides = ty.dims.iter().zip(strides).map(|(d, s)| (*d, *s as i64)).collect();
            inputs.push(StridedTensor { start: *start, lane: pointwise::stored(ty.dtype), strides, lane_stride: 0 });
        }
        let outputs = inputs.split_off(kernel.inputs.len());
        Ok(Loops {
            b,
            kernel,
            plan,
            scalars: entry.scalars,
            inputs,
            outputs,
            scratch: entry.scratch,
            scratch_bytes: 0,
            reduced: BTreeMap::new(),
            kept: BTreeMap::new(),
            point_count: 0,
        })
    }

    pub fn size(&self, dim: Dim) -> i64 {
        self.kernel.body.dims.size(dim) as i64
    }

    pub fn new_point(&mut self, along: BTreeMap<Dim, LaneIndex<B>>, mask: Option<B::Vector>) -> IndexPoint<B> {
        self.point_count += 1;
        IndexPoint { along, width: 1, mask, id: self.point_count, slot: 0 }
    }

    /// One grid point, or a segment of the vector dim at one.
    fn item(&mut self, item: B::Index) -> Result<(), CompileError> {
        let (b, plan) = (self.b, self.plan);
        let mut along = BTreeMap::new();
        let segment = b.index_rem(item, b.index(plan.segments));
        let mut rest = b.index_div(item, b.index(plan.segments));
        for &dim in plan.grid.iter().rev() {
            let size = b.index(self.size(dim));
            along.insert(dim, LaneIndex::Same(b.index_rem(rest, size)));
            rest = ir::fault!("loops.grid.digit", rest, b.index_div(rest, size));
        }
        // Where the item computes all points of a dim, they are constants.
        let all: Vec<BTreeMap<Dim, LaneIndex<B>>> = match plan.shared {
            None => vec![along],
            Some(dim) => {
                let with = |k| along.iter().map(|(d, at)| (*d, at.clone())).chain([(dim, LaneIndex::Same(b.index(k)))]).collect();
                (0..ir::fault!("loops.shared.all", 1, self.size(dim))).map(with).collect()
            }
        };
        let Some(vector) = plan.vector.filter(|_| plan.vector_in_grid) else {
            let points: Vec<_> = all.into_iter().map(|along| self.new_point(along, None)).collect();
            return self.point(&points);
        };
        let lanes = b.lanes() as i64;
        let size = self.size(vector);
        let tail = size % lanes;
        let from = b.index_mul(segment, b.index(plan.segment));
        let to = b.index_min(b.index_add(from, b.index(plan.segment)), ir::fault!("loops.grid.end", b.index(size - tail), b.index(size)));
        // Segments are whole groups of vectors. Only the last segment ends in single vectors and a partial one.
        let unit = lanes * plan.wide;
        let grouped = b.index_min(to, b.index(size / unit * unit));
        let whole = b.index_min(to, b.index(size - tail));
        let mut run = |from, to, count: i64, mask: Option<B::Vector>| {
            let mut result = Ok(());
            b.repeat(from, to, lanes * count, &[], &mut |first, _| {
                let mut points = vec![];
                for along in &all {
                    let mut point = |at: LaneIndex<B>, width: i64, slot: i64| {
                        let mut along = along.clone();
                        along.insert(vector, at);
                        points.push(IndexPoint { slot: slot as usize, width: width as usize, ..self.new_point(along, mask) });
                    };
                    match plan.run {
                        Some(_) if count > 1 => point(LaneIndex::Run(first), count, 0),
                        _ => (0..count).for_each(|slot| point(LaneIndex::Lanes(b.index_add(first, b.index(slot * lanes))), 1, slot)),
                    }
                }
                result = self.point(&points);
                Vec::new()
            });
            result
        };
        run(from, grouped, plan.wide, None)?;
        if plan.wide > 1 && ir::fault!("loops.grid.single", size % plan.wide, size / lanes % plan.wide) != 0 {
            run(grouped, whole, 1, None)?;
        }
        if tail != 0 {
            run(whole, to, 1, ir::fault!("loops.grid.tail", None, Some(b.mask_first(tail as usize))))?;
        }
        Ok(())
    }

    /// One or several vectors of grid points, or one grid point.
    fn point(&mut self, points: &[IndexPoint<B>]) -> Result<(), CompileError> {
        self.reduced.clear();
        self.kept.clear();
        let mut used = 0;
        let mut numbers: Option<Vec<Vec<Vec<B::Vector>>>> = None;
        let singles: Vec<usize> = self.plan.single_outputs();
        for step in &self.plan.steps {
            match step {
                Step::Reduce { values, over, left } if left.is_empty() => {
                    let results = self.reduce_at(points, values, over)?;
                    self.reduced.extend(values.iter().copied().zip(results));
                }
                Step::Reduce { values, over, left } => {
                    for point in points {
                        self.reduce(point, values, over, left, &mut used)?;
                    }
                }
                Step::Cumsum { value, along, reverse, others } => {
                    let direction = ScanDirection { along: *along, reverse: *reverse };
                    for point in points {
                        self.cumsum(point, *value, direction, others, &mut used)?;
                    }
                }
                Step::Store { outputs, dims } => {
                    // An output may share the memory of an input, so outputs of one element per point are computed
                    // before any store and stored last.
                    if numbers.is_none() {
                        numbers = Some(points.iter().map(|point| self.values(point, &singles)).collect::<Result<_, _>>()?);
                    }
                    if dims.is_empty() {
                        continue;
                    }
                    let mut result = Ok(());
                    for point in points {
                        self.nest(point, dims, self.plan.run, &mut |this, point| {
                            if result.is_ok() {
                                result = this.store(point, outputs);
                            }
                        });
                    }
                    result?;
                }
            }
        }
        let store = &mut || {
            for (point, values) in points.iter().zip(numbers.iter().flatten()) {
                self.store_values(point, &singles, values);
            }
        };
        match self.plan.team {
            Some(_) if singles.is_empty() => {}
            Some(_) => self.b.first_member(store),
            None => store(),
        }
        self.scratch_bytes = self.scratch_bytes.max(used);
        Ok(())
    }

    /// Loops over `dims`, the vector dim innermost, along which lanes may have runs of `run` elements. A team's dim
    /// is looped over this member's share.
    pub fn nest(&mut self, point: &IndexPoint<B>, dims: &[Dim], run: Option<i64>, body: &mut dyn FnMut(&mut Self, &IndexPoint<B>)) {
        let vector = self.plan.vector.filter(|d| dims.contains(d));
        let others: Vec<Dim> = dims.iter().copied().filter(|d| Some(*d) != vector).collect();
        self.nest_in(point, &others, (vector, run), body);
    }

    fn nest_in(
        &mut self,
        point: &IndexPoint<B>,
        others: &[Dim],
        vector: (Option<Dim>, Option<i64>),
        body: &mut dyn FnMut(&mut Self, &IndexPoint<B>),
    ) {
        let b = self.b;
        if let Some((&dim, rest)) = others.split_first() {
            let (from, size) = self.own(dim);
            b.repeat(b.index(0), b.index(size), 1, &[], &mut |index, _| {
                let point = self.moved(point, dim, LaneIndex::Same(b.index_add(from, index)), point.mask);
                self.nest_in(&point, rest, vector, body);
                Vec::new()
            });
            return;
        }
        let (Some(dim), run) = vector else { return body(self, point) };
        let lanes = b.lanes() as i64;
        let (from, size) = self.own(dim);
        let tail = size % lanes;
        let in_runs = run.map_or(0, |width| size / (lanes * width) * (lanes * width));
        if let Some(width) = run.filter(|_| in_runs > 0) {
            b.repeat(b.index(0), b.index(in_runs), lanes * width, &[], &mut |first, _| {
                let at = LaneIndex::Run(b.index_add(from, first));
                let point = IndexPoint { width: width as usize, ..self.moved(point, dim, at, point.mask) };
                body(self, &point);
                Vec::new()
            });
        }
        if in_runs == 0 || in_runs < size - tail {
            b.repeat(b.index(in_runs), b.index(size - tail), lanes, &[], &mut |first, _| {
                let point = self.moved(point, dim, LaneIndex::Lanes(b.index_add(from, first)), point.mask);
                body(self, &point);
                Vec::new()
            });
        }
        if tail != 0 {
            let mask = point.also(b, b.mask_first(ir::fault!("loops.nest.tail", tail - 1, tail) as usize));
            let mask = ir::fault!("loops.nest.mask", b.mask_first(b.lanes()), mask);
            let point = self.moved(point, dim, LaneIndex::Lanes(b.index(size - tail)), Some(mask));
            body(self, &point);
        }
    }

    pub fn moved(&mut self, point: &IndexPoint<B>, dim: Dim, to: LaneIndex<B>, mask: Option<B::Vector>) -> IndexPoint<B> {
        let mut along = point.along.clone();
        along.insert(dim, to);
        IndexPoint { slot: point.slot, width: point.width, ..self.new_point(along, mask) }
    }

    /// Computes outputs at a point, then stores them.
    pub fn store(&mut self, point: &IndexPoint<B>, outputs: &[usize]) -> Result<(), CompileError> {
        let values = self.values(point, outputs)?;
        self.store_values(point, outputs, &values);
        Ok(())
    }

    fn values(&mut self, point: &IndexPoint<B>, outputs: &[usize]) -> Result<Vec<Vec<B::Vector>>, CompileError> {
        let mut known = KnownValues::new();
        outputs.iter().map(|o| self.value(self.kernel.outputs[*o].value, point, &mut known)).collect()
    }

    fn store_values(&self, point: &IndexPoint<B>, outputs: &[usize], values: &[Vec<B::Vector>]) {
        let b = self.b;
        for (&position, value) in outputs.iter().zip(values) {
            let (target, output) = (&self.outputs[position], &self.kernel.outputs[position]);
            b.locate(output.value);
            let dtype = self.kernel.body[output.value].ty.dtype;
            match output.accumulate {
                true => target.add(b, point, value, &|old, value| accumulated(b, dtype, old, value)),
                false => target.store(b, point, value),
            }
        }
    }
}

/// The sum of the stored value and the one that is added to it.
pub fn accumulated<B: Builder>(b: &B, dtype: DType, old: B::Vector, value: B::Vector) -> B::Vector {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => pointwise::rounded(b, dtype, ir::fault!("loops.store.added", value, b.add(old, value))),
        DType::I32 => b.int2(IntBinary::Add, old, value),
        DType::Bool => b.int2(IntBinary::Or, old, value),
    }
}
