//! Writes a kernel of loops, once for any builder.

use super::fold::{Fold, join_sets};
use super::place::{Along, Place, Stored, Window, enter, widen, within};
use super::plan::{Plan, Step};
use crate::CompileError;
use crate::abi::Entry;
use crate::build::{Builder, Compare, IntBinary, Lane};
use crate::layout::tensors;
use crate::pointwise::{self, Sources};
use ir::dim::{Base, Dim, IndexMap};
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::{DType, Op, Reduce};
use std::collections::{BTreeMap, HashMap};

/// Values known at a place.
pub type Known<V> = HashMap<(Value, usize), V>;

/// A kernel under construction.
pub struct Loops<'a, B: Builder> {
    pub b: &'a B,
    pub kernel: &'a Kernel,
    plan: &'a Plan,
    pub scalars: B::Pointer,
    inputs: Vec<Stored<B>>,
    pub outputs: Vec<Stored<B>>,
    scratch: B::Pointer,
    scratch_bytes: i64,
    /// Results of earlier steps at this grid point: in registers (one per slot) if no inner dim is left, else in scratch.
    reduced: BTreeMap<Value, Vec<B::Vector>>,
    pub kept: BTreeMap<Value, Stored<B>>,
    places: usize,
}

/// Accumulators that a reduction keeps apart, to hide the latency of an addition.
const PARALLEL: i64 = 4;

/// Writes the loop over tiles; returns bytes of scratch.
///
/// # Errors
/// An op is not supported.
pub fn emit<B: Builder>(
    b: &B,
    kernel: &Kernel,
    plan: &Plan,
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
        plan: &'a Plan,
        entry: &Entry<B::Index, B::Pointer>,
        pointers: &[B::Pointer],
    ) -> Result<Self, CompileError> {
        let mut inputs = Vec::new();
        for ((ty, strides), start) in tensors(kernel).into_iter().zip(pointers) {
            let strides = ty.dims.iter().zip(strides).map(|(d, s)| (*d, *s as i64)).collect();
            inputs.push(Stored { start: *start, lane: pointwise::stored(ty.dtype), strides, lane_stride: 0 });
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
            places: 0,
        })
    }

    fn size(&self, dim: Dim) -> i64 {
        self.kernel.body.dims.size(dim) as i64
    }

    pub fn place(&mut self, along: BTreeMap<Dim, Along<B>>, mask: Option<B::Vector>) -> Place<B> {
        self.places += 1;
        Place { along, mask, id: self.places, slot: 0 }
    }

    /// One grid point, or a segment of the vector dim at one.
    fn item(&mut self, item: B::Index) -> Result<(), CompileError> {
        let (b, plan) = (self.b, self.plan);
        let mut along = BTreeMap::new();
        let segment = b.index_rem(item, b.index(plan.segments));
        let mut rest = b.index_div(item, b.index(plan.segments));
        for &dim in plan.grid.iter().rev() {
            let size = b.index(self.size(dim));
            along.insert(dim, Along::Same(b.index_rem(rest, size)));
            rest = b.index_div(rest, size);
        }
        let Some(vector) = plan.vector.filter(|_| plan.vector_in_grid) else {
            let place = self.place(along, None);
            return self.point(&[place]);
        };
        let lanes = b.lanes() as i64;
        let size = self.size(vector);
        let tail = size % lanes;
        let from = b.index_mul(segment, b.index(plan.segment));
        let to = b.index_min(b.index_add(from, b.index(plan.segment)), b.index(size));
        // Segments are whole groups of vectors; only the last one ends in single vectors and a part of one.
        let unit = lanes * plan.wide;
        let grouped = b.index_min(to, b.index(size / unit * unit));
        let whole = b.index_min(to, b.index(size - tail));
        let mut run = |from, to, count: i64, mask: Option<B::Vector>| {
            let mut result = Ok(());
            b.repeat(from, to, lanes * count, &[], &mut |first, _| {
                let places: Vec<Place<B>> = (0..count)
                    .map(|slot| {
                        let mut along = along.clone();
                        along.insert(vector, Along::Lanes(b.index_add(first, b.index(slot * lanes))));
                        Place { slot: slot as usize, ..self.place(along, mask) }
                    })
                    .collect();
                result = self.point(&places);
                Vec::new()
            });
            result
        };
        run(from, grouped, plan.wide, None)?;
        if plan.wide > 1 && size / lanes % plan.wide != 0 {
            run(grouped, whole, 1, None)?;
        }
        if tail != 0 {
            run(whole, to, 1, Some(b.mask_first(tail as usize)))?;
        }
        Ok(())
    }

    /// One or several vectors of grid points, or one grid point.
    fn point(&mut self, places: &[Place<B>]) -> Result<(), CompileError> {
        self.reduced.clear();
        self.kept.clear();
        let mut used = 0;
        let mut numbers: Option<Vec<Vec<B::Vector>>> = None;
        let singles: Vec<usize> = self.plan.single_outputs();
        for step in &self.plan.steps {
            match step {
                Step::Reduce { values, over, left } if left.is_empty() => {
                    let results = self.reduce_at(places, values, over)?;
                    self.reduced.extend(values.iter().copied().zip(results));
                }
                Step::Reduce { values, over, left } => {
                    for place in places {
                        self.reduce(place, values, over, left, &mut used)?;
                    }
                }
                Step::Cumsum { value, along, reverse, others } => {
                    let order = Order { along: *along, reverse: *reverse };
                    for place in places {
                        self.cumsum(place, *value, order, others, &mut used)?;
                    }
                }
                Step::Store { outputs, dims } => {
                    // An output may lie over an input, so outputs of one number per point are computed before any store and stored last.
                    if numbers.is_none() {
                        numbers = Some(places.iter().map(|place| self.values(place, &singles)).collect::<Result<_, _>>()?);
                    }
                    if dims.is_empty() {
                        continue;
                    }
                    let mut result = Ok(());
                    for place in places {
                        self.nest(place, dims, &mut |this, place| {
                            if result.is_ok() {
                                result = this.store(place, outputs);
                            }
                        });
                    }
                    result?;
                }
            }
        }
        for (place, values) in places.iter().zip(numbers.into_iter().flatten()) {
            self.store_values(place, &singles, &values);
        }
        self.scratch_bytes = self.scratch_bytes.max(used);
        Ok(())
    }

    /// Loops over `dims`, the vector dim innermost.
    pub fn nest(&mut self, place: &Place<B>, dims: &[Dim], body: &mut dyn FnMut(&mut Self, &Place<B>)) {
        let vector = self.plan.vector.filter(|d| dims.contains(d));
        let others: Vec<Dim> = dims.iter().copied().filter(|d| Some(*d) != vector).collect();
        self.nest_in(place, &others, vector, body);
    }

    fn nest_in(&mut self, place: &Place<B>, others: &[Dim], vector: Option<Dim>, body: &mut dyn FnMut(&mut Self, &Place<B>)) {
        let b = self.b;
        if let Some((&dim, rest)) = others.split_first() {
            b.repeat(b.index(0), b.index(self.size(dim)), 1, &[], &mut |index, _| {
                let place = self.moved(place, dim, Along::Same(index), place.mask);
                self.nest_in(&place, rest, vector, body);
                Vec::new()
            });
            return;
        }
        let Some(dim) = vector else { return body(self, place) };
        let lanes = b.lanes() as i64;
        let (size, tail) = (self.size(dim), self.size(dim) % lanes);
        b.repeat(b.index(0), b.index(size - tail), lanes, &[], &mut |first, _| {
            let place = self.moved(place, dim, Along::Lanes(first), place.mask);
            body(self, &place);
            Vec::new()
        });
        if tail != 0 {
            let mask = place.also(b, b.mask_first(tail as usize));
            let place = self.moved(place, dim, Along::Lanes(b.index(size - tail)), Some(mask));
            body(self, &place);
        }
    }

    fn moved(&mut self, place: &Place<B>, dim: Dim, to: Along<B>, mask: Option<B::Vector>) -> Place<B> {
        let mut along = place.along.clone();
        along.insert(dim, to);
        Place { slot: place.slot, ..self.place(along, mask) }
    }

    /// Computes outputs at a place, then stores them.
    pub fn store(&mut self, place: &Place<B>, outputs: &[usize]) -> Result<(), CompileError> {
        let values = self.values(place, outputs)?;
        self.store_values(place, outputs, &values);
        Ok(())
    }

    fn values(&mut self, place: &Place<B>, outputs: &[usize]) -> Result<Vec<B::Vector>, CompileError> {
        let mut known = Known::new();
        outputs.iter().map(|o| self.value(self.kernel.outputs[*o].value, place, &mut known)).collect()
    }

    fn store_values(&self, place: &Place<B>, outputs: &[usize], values: &[B::Vector]) {
        let b = self.b;
        for (&position, &value) in outputs.iter().zip(values) {
            let target = &self.outputs[position];
            b.locate(self.kernel.outputs[position].value);
            let mut value = value;
            if self.kernel.outputs[position].accumulate {
                let old = target.load(b, place);
                value = accumulated(b, self.kernel.body[self.kernel.outputs[position].value].ty.dtype, old, value);
            }
            target.store(b, place, value);
        }
    }

    /// Room in scratch for a value at one grid point.
    fn keep(&self, v: Value, used: &mut i64) -> Result<Stored<B>, CompileError> {
        let body = &self.kernel.body;
        let lane = pointwise::lane(body[v].ty.dtype);
        let on_grid = |d: &Dim| self.plan.grid.contains(d) || (self.plan.vector_in_grid && Some(*d) == self.plan.vector);
        // The vector dim last, so that vectors are adjacent; or a vector per element if lanes are grid points.
        let mut dims: Vec<Dim> = body.dims_of(v).iter().copied().filter(|d| !on_grid(d)).collect();
        dims.sort_by_key(|d| Some(*d) == self.plan.vector);
        let lane_stride = i64::from(self.plan.vector_in_grid);
        let mut elements = if self.plan.vector_in_grid { self.b.lanes() as i64 } else { 1 };
        let mut strides = Vec::new();
        for &dim in dims.iter().rev() {
            strides.push((dim, elements));
            elements *= self.size(dim);
        }
        let start = self.b.at_const(self.scratch, *used);
        *used += (elements * lane.bytes() + 63) / 64 * 64;
        Ok(Stored { start, lane, strides, lane_stride })
    }

    fn reduce(&mut self, place: &Place<B>, values: &[Value], over: &[Dim], left: &[Dim], used: &mut i64) -> Result<(), CompileError> {
        let kept = values.iter().map(|v| self.keep(*v, used)).collect::<Result<Vec<_>, _>>()?;
        let mut result = Ok(());
        self.nest(place, left, &mut |this, place| match this.reduce_at(std::slice::from_ref(place), values, over) {
            Ok(results) => {
                for (target, value) in kept.iter().zip(results) {
                    target.store(this.b, place, value[0]);
                }
            }
            Err(error) => result = Err(error),
        });
        self.kept.extend(values.iter().copied().zip(kept));
        result
    }

    /// Reductions over `over` at places of the dims left, for each value one result per place; the same in every lane if the vector dim is reduced.
    fn reduce_at(&mut self, places: &[Place<B>], values: &[Value], over: &[Dim]) -> Result<Vec<Vec<B::Vector>>, CompileError> {
        let b = self.b;
        let folds: Vec<Fold> = values.iter().map(|v| self.fold(*v)).collect::<Result<_, _>>()?;
        let vector = self.plan.vector.filter(|d| over.contains(d));
        let mut others: Vec<Dim> = over.iter().copied().filter(|d| Some(*d) != vector).collect();
        let innermost = Innermost { dim: vector.or_else(|| others.pop()), lanes_along: vector.is_some() };
        // Several places are parallel enough.
        let sets = if places.len() > 1 { 1 } else { PARALLEL };
        let one_set: Vec<B::Vector> = places.iter().flat_map(|_| folds.iter().flat_map(|f| f.start(b)).collect::<Vec<_>>()).collect();
        let state: Vec<B::Vector> = (0..sets).flat_map(|_| one_set.clone()).collect();
        let mut result = Ok(());
        let state = self.fold_nest(places, &others, innermost, sets, &state, &mut |this, places, state| {
            let mut out = Vec::new();
            let mut rest = state;
            for place in places {
                let mut known = Known::new();
                for (fold, v) in folds.iter().zip(values) {
                    let (own, others) = rest.split_at(fold.width());
                    rest = others;
                    match this.element(*v, place, &mut known) {
                        Ok(x) => {
                            b.locate(*v);
                            out.extend(fold.step(this, place, own, x));
                        }
                        Err(error) => {
                            result = Err(error);
                            out.extend_from_slice(own);
                        }
                    }
                }
            }
            out
        });
        result?;
        let all: Vec<Fold> = places.iter().flat_map(|_| folds.iter().copied()).collect();
        let mut sets = state.chunks(one_set.len()).map(<[B::Vector]>::to_vec);
        let mut total = sets.next().expect("invariant: at least one set of accumulators");
        for set in sets {
            total = join_sets(b, &all, &total, &set);
        }
        if vector.is_some() {
            let mut distance = b.lanes() / 2;
            while distance > 0 {
                let other: Vec<B::Vector> = total.iter().map(|x| b.swap_lanes(*x, distance)).collect();
                total = join_sets(b, &all, &total, &other);
                distance /= 2;
            }
        }
        let mut out = vec![Vec::new(); folds.len()];
        let mut rest = &total[..];
        for (number, fold) in all.iter().enumerate() {
            let (own, others) = rest.split_at(fold.width());
            rest = others;
            let dtype = self.kernel.body[values[number % folds.len()]].ty.dtype;
            out[number % folds.len()].push(pointwise::rounded(b, dtype, fold.finish(b, own)));
        }
        Ok(out)
    }

    /// Loops that carry `sets` sets of accumulators; the innermost loop hands each set its own elements.
    fn fold_nest(
        &mut self,
        places: &[Place<B>],
        others: &[Dim],
        innermost: Innermost,
        sets: i64,
        state: &[B::Vector],
        body: &mut FoldBody<'_, Self, Place<B>, B::Vector>,
    ) -> Vec<B::Vector> {
        let b = self.b;
        if let Some((&dim, rest)) = others.split_first() {
            return b.repeat(b.index(0), b.index(self.size(dim)), 1, state, &mut |index, state| {
                let places = self.all_moved(places, dim, Along::Same(index), None);
                self.fold_nest(&places, rest, innermost, sets, state, body)
            });
        }
        let per_set = state.len() / sets as usize;
        let Some(dim) = innermost.dim else {
            let first = body(self, places, &state[..per_set]);
            return first.into_iter().chain(state[per_set..].iter().copied()).collect();
        };
        let size = self.size(dim);
        let width = if innermost.lanes_along { b.lanes() as i64 } else { 1 };
        let along = |index| if innermost.lanes_along { Along::Lanes(index) } else { Along::Same(index) };
        let together = size / (width * sets) * (width * sets);
        let whole = size / width * width;
        let state = b.repeat(b.index(0), b.index(together), width * sets, state, &mut |index, state| {
            let mut out = Vec::new();
            for (set, own) in state.chunks(per_set).enumerate() {
                let index = b.index_add(index, b.index(set as i64 * width));
                let places = self.all_moved(places, dim, along(index), None);
                out.extend(body(self, &places, own));
            }
            out
        });
        let mut first = state[..per_set].to_vec();
        if together < whole {
            first = b.repeat(b.index(together), b.index(whole), width, &first, &mut |index, state| {
                let places = self.all_moved(places, dim, along(index), None);
                body(self, &places, state)
            });
        }
        if whole < size {
            let places = self.all_moved(places, dim, along(b.index(whole)), Some(b.mask_first((size - whole) as usize)));
            first = body(self, &places, &first);
        }
        first.into_iter().chain(state[per_set..].iter().copied()).collect()
    }

    fn all_moved(&mut self, places: &[Place<B>], dim: Dim, to: Along<B>, mask: Option<B::Vector>) -> Vec<Place<B>> {
        let b = self.b;
        places
            .iter()
            .map(|place| {
                let mask = mask.map_or(place.mask, |m| Some(place.also(b, m)));
                self.moved(place, dim, to, mask)
            })
            .collect()
    }

    fn fold(&self, v: Value) -> Result<Fold, CompileError> {
        let body = &self.kernel.body;
        let lane = pointwise::lane(body[body[v].args[0]].ty.dtype);
        Ok(match &body[v].op {
            Op::Reduce { kind, .. } => Fold::Join { kind: *kind, lane },
            Op::Dot { .. } => Fold::Join { kind: Reduce::Sum, lane: Lane::F32 },
            Op::ArgMax { over } => Fold::ArgMax { over: *over, lane },
            other => unreachable!("invariant: `{}` is not a reduction", other.name()),
        })
    }

    /// What a reduction takes in at a place: of a dot the product of its factors, which is not rounded.
    fn element(&mut self, v: Value, place: &Place<B>, known: &mut Known<B::Vector>) -> Result<B::Vector, CompileError> {
        let node = &self.kernel.body[v];
        let first = self.value(node.args[0], place, known)?;
        let Op::Dot { .. } = node.op else { return Ok(first) };
        let second = self.value(node.args[1], place, known)?;
        self.b.locate(v);
        Ok(self.b.mul(first, second))
    }

    fn cumsum(&mut self, place: &Place<B>, v: Value, order: Order, others: &[Dim], used: &mut i64) -> Result<(), CompileError> {
        let b = self.b;
        let kept = self.keep(v, used)?;
        let (lane, dtype) = (kept.lane, self.kernel.body[v].ty.dtype);
        let arg = self.kernel.body[v].args[0];
        let size = self.size(order.along);
        let mut result = Ok(());
        self.nest(place, others, &mut |this, place| {
            let zero = zero(b, lane);
            b.repeat(b.index(0), b.index(size), 1, &[zero], &mut |index, sum| {
                let index = if order.reverse { b.index_sub(b.index(size - 1), index) } else { index };
                let place = this.moved(place, order.along, Along::Same(index), place.mask);
                match this.value(arg, &place, &mut Known::new()) {
                    Ok(x) => {
                        let sum = if lane == Lane::F32 { b.add(sum[0], x) } else { b.int2(IntBinary::Add, sum[0], x) };
                        kept.store(b, &place, pointwise::rounded(b, dtype, sum));
                        vec![sum]
                    }
                    Err(error) => {
                        result = Err(error);
                        sum.to_vec()
                    }
                }
            });
        });
        self.kept.insert(v, kept);
        result
    }

    /// The value at a place.
    pub fn value(&mut self, v: Value, place: &Place<B>, known: &mut Known<B::Vector>) -> Result<B::Vector, CompileError> {
        if let Some(value) = known.get(&(v, place.id)) {
            return Ok(*value);
        }
        let b = self.b;
        let node = &self.kernel.body[v];
        if !node.op.is_source() {
            b.locate(v);
        }
        let value = match &node.op {
            Op::Input(i) => self.inputs[*i as usize].load(b, place),
            op if op.is_source() => {
                let sources = Sources { b, body: &self.kernel.body, scalars: self.scalars, scalar_count: self.kernel.scalars.len() };
                sources.value(v, &mut |dim| place.each(b, dim))?
            }
            Op::Reduce { .. } | Op::Dot { .. } | Op::ArgMax { .. } | Op::Cumsum { .. } => match self.reduced.get(&v) {
                Some(values) => values[place.slot],
                None => self.kept[&v].load(b, place),
            },
            // What is kept of it is the sum.
            Op::Scatter { .. } => pointwise::rounded(b, node.ty.dtype, self.kept[&v].load(b, place)),
            Op::Pad { from, to, at } => {
                let length = from.map_or(1, |d| self.size(d));
                let (along, inside) = enter(b, place, *to, Window { start: *at as i64, length });
                let inner = self.windowed(place, *to, *from, along, inside);
                let value = self.value(node.args[0], &inner, known)?;
                b.select(inside, value, zero(b, pointwise::lane(node.ty.dtype)))
            }
            Op::Concat { from, to } => {
                let mut start = 0;
                let mut result = None;
                for (&arg, &dim) in node.args.iter().zip(from) {
                    let length = self.size(dim);
                    let (along, inside) = enter(b, place, *to, Window { start, length });
                    let inner = self.windowed(place, *to, Some(dim), along, inside);
                    let value = self.value(arg, &inner, known)?;
                    result = Some(result.map_or(value, |before| b.select(inside, value, before)));
                    start += length;
                }
                result.expect("invariant: `concat` has operands")
            }
            Op::Gather { dim } => self.gather(v, *dim, place, known)?,
            // Term by term, so that of many terms few are in registers at a time.
            Op::Add => {
                let (first, rest) = node.args.split_first().expect("invariant: `add` has operands");
                let mut sum = self.value(*first, place, known)?;
                for term in rest {
                    let term = self.value(*term, place, known)?;
                    b.locate(v);
                    sum = pointwise::plus(b, pointwise::lane(node.ty.dtype), sum, term);
                }
                pointwise::rounded(b, node.ty.dtype, sum)
            }
            _ => {
                let args = node.args.iter().map(|a| self.value(*a, place, known)).collect::<Result<Vec<_>, _>>()?;
                pointwise::apply(b, &self.kernel.body, v, &args)?
            }
        };
        known.insert((v, place.id), value);
        Ok(value)
    }

    /// The place of an operand that fills a window of dim `to`.
    fn windowed(&mut self, place: &Place<B>, to: Dim, from: Option<Dim>, along: Along<B>, inside: B::Vector) -> Place<B> {
        // Only lanes that walk the window can leave it; other indices were brought into bounds.
        let mask = match along {
            Along::Lanes(_) => Some(place.also(self.b, inside)),
            Along::Same(_) | Along::Each(_) => place.mask,
        };
        let mut inner = place.along.clone();
        inner.remove(&to);
        if let Some(dim) = from {
            inner.insert(dim, along);
        }
        Place { slot: place.slot, ..self.place(inner, mask) }
    }

    fn gather(&mut self, v: Value, dim: Dim, place: &Place<B>, known: &mut Known<B::Vector>) -> Result<B::Vector, CompileError> {
        let b = self.b;
        let node = &self.kernel.body[v];
        let (table, index) = (node.args[0], node.args[1]);
        let indices = widen(b, self.value(index, place, known)?);
        let (row, inside) = local_row(b, self.scalars, &self.kernel.body.dims[dim].index, indices);
        let varies = self.kernel.body.dims_of(index).iter().any(|d| matches!(place.along.get(d), Some(Along::Lanes(_) | Along::Each(_))));
        let along = if varies { Along::Each(row) } else { Along::Same(b.first_as_index(row)) };
        let inner = self.moved(place, dim, along, place.mask);
        let value = self.value(table, &inner, known)?;
        Ok(b.select(inside, value, zero(b, pointwise::lane(node.ty.dtype))))
    }
}

/// Takes in the elements at some places: the state before, the state after.
type FoldBody<'a, L, P, V> = dyn FnMut(&mut L, &[P], &[V]) -> Vec<V> + 'a;

/// The innermost loop of a reduction.
#[derive(Clone, Copy)]
struct Innermost {
    dim: Option<Dim>,
    /// It is the vector dim.
    lanes_along: bool,
}

/// The direction of a running sum.
#[derive(Clone, Copy)]
struct Order {
    along: Dim,
    reverse: bool,
}

/// What is there and what is added to it.
pub fn accumulated<B: Builder>(b: &B, dtype: DType, old: B::Vector, value: B::Vector) -> B::Vector {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => pointwise::rounded(b, dtype, b.add(old, value)),
        DType::I32 => b.int2(IntBinary::Add, old, value),
        DType::Bool => b.int2(IntBinary::Or, old, value),
    }
}

pub fn zero<B: Builder>(b: &B, lane: Lane) -> B::Vector {
    match lane {
        Lane::F32 | Lane::Bf16 | Lane::F16 => b.f32(0.0),
        Lane::F64 => b.f64(0.0),
        Lane::I32 => b.i32(0),
        Lane::I64 => b.i64(0),
        Lane::Mask => b.mask_first(0),
    }
}

/// The local row of a global index in a (sharded) dim, 0 where there is none, and whether there is one.
pub fn local_row<B: Builder>(b: &B, scalars: B::Pointer, map: &IndexMap, global: B::Vector) -> (B::Vector, B::Vector) {
    let mut rest = match &map.base {
        Base::Zero => global,
        Base::Slot(slot) => b.int2(IntBinary::Sub, global, b.load_splat(b.at_const(scalars, 8 * i64::from(*slot)), Lane::I64)),
        Base::Coords(_) => unreachable!("invariant: a verified kernel has slots only"),
    };
    let mut inside = b.compare_int(Compare::Ge, rest, b.i64(0));
    let mut row = b.i64(0);
    if map.is_contiguous() {
        inside = within(b, rest, map.len() as i64);
        row = rest;
    } else {
        for &(extent, stride) in &map.parts {
            let digit = b.int2(IntBinary::Div, rest, b.i64(stride as i64));
            inside = b.int2(IntBinary::And, inside, b.compare_int(Compare::Lt, digit, b.i64(extent as i64)));
            rest = b.int2(IntBinary::Sub, rest, b.int2(IntBinary::Mul, digit, b.i64(stride as i64)));
            row = b.int2(IntBinary::Add, b.int2(IntBinary::Mul, row, b.i64(extent as i64)), digit);
        }
        inside = b.int2(IntBinary::And, inside, b.compare_int(Compare::Eq, rest, b.i64(0)));
    }
    (b.select(inside, row, b.i64(0)), inside)
}
