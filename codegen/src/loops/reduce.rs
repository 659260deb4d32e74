//! Reductions and running sums of a kernel of loops: what they carry through which loops, and where their results are
//! kept.

use super::emit::Loops;
use super::fold::{Fold, join_sets};
use super::index_point::{IndexPoint, LaneIndex, ScanDirection, StridedTensor, element, zipped};
use super::value::{KnownValues, zero};
use crate::CompileError;
use crate::build::{Builder, Compare, IntBinary, Lane, LoopBody};
use crate::pointwise;
use ir::dim::Dim;
use ir::graph::Value;
use ir::op::{Op, Reduce};

/// Accumulators that a reduction keeps apart, to hide the latency of an addition.
const PARALLEL: i64 = 4;

/// Terms that an accumulator takes in one after the other, at least, before what they come to is added to the sum of
/// all those before. What rounding adds to a sum grows with the additions that follow each other: of a million terms
/// in blocks of a thousand they are two thousand.
const BLOCK: i64 = 256;

/// Terms of a block, for an accumulator that takes in `terms` of them.
fn block(terms: i64) -> i64 {
    BLOCK.max(terms.isqrt().unsigned_abs().next_power_of_two() as i64)
}

/// Takes in the elements at some grid points: maps the states of some sets to the states after.
type FoldBody<'a, L, P, V> = dyn FnMut(&mut L, &[P], &[&[V]]) -> Vec<V> + 'a;

/// The innermost loop of a reduction.
#[derive(Clone, Copy)]
struct Innermost {
    dim: Option<Dim>,
    /// It is the vector dim.
    lanes_along: bool,
    /// Elements of the runs that lanes have along it.
    run: Option<i64>,
}

/// What the loops of a reduction carry.
struct Accumulators<'a, V> {
    /// Folds of one set of accumulators, and their initial values.
    folds: &'a [Fold],
    start: &'a [V],
    sets: i64,
    /// Terms of a block, where floats are summed.
    block: Option<i64>,
}

/// Where a reduction leaves a result: element `k` of a grid point's runs.
struct ResultSlot {
    point: usize,
    k: usize,
}

/// A loop of a reduction, in which an accumulator takes in `terms` at each iteration. Where a block has several
/// iterations, and the loop more than a block, accumulators begin anew for each block.
fn in_blocks<B: Builder>(
    b: &B,
    (to, step): (i64, i64),
    terms: i64,
    accumulators: &Accumulators<'_, B::Vector>,
    state: &[B::Vector],
    body: &mut LoopBody<'_, B::Index, B::Vector>,
) -> Vec<B::Vector> {
    let Some(iterations) = accumulators.block.map(|n| n / terms).filter(|n| (1..to / step).contains(n)) else {
        return b.repeat(b.index(0), b.index(to), step, state, body);
    };
    let (per_block, per_set) = (iterations * step, accumulators.start.len());
    let fresh: Vec<B::Vector> = (0..accumulators.sets).flat_map(|_| accumulators.start.to_vec()).collect();
    b.repeat(b.index(0), b.index(to), per_block, state, &mut |first, totals| {
        let end = b.index_add(first, b.index(ir::fault!("reduce.block.end", per_block - step, per_block)));
        let end = if to % per_block == 0 { end } else { b.index_min(end, b.index(to)) };
        let sums = b.repeat(first, end, step, ir::fault!("reduce.block.fresh", totals, fresh.as_slice()), &mut *body);
        let sets = totals.chunks(per_set).zip(sums.chunks(per_set));
        sets.flat_map(|(total, sum)| join_sets(b, accumulators.folds, ir::fault!("reduce.block.total", sum, total), sum)).collect()
    })
}

impl<B: Builder> Loops<'_, B> {
    /// Room in scratch for a value at one grid point.
    fn keep(&self, v: Value, used: &mut i64) -> Result<StridedTensor<B>, CompileError> {
        let body = &self.kernel.body;
        let lane = pointwise::lane(body[v].ty.dtype);
        let on_grid = |d: &Dim| self.plan.grid.contains(d) || (self.plan.vector_in_grid && Some(*d) == self.plan.vector);
        // The vector dim comes last, so that the elements of a vector are adjacent. If lanes are grid points, each
        // element is a whole vector.
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
        Ok(StridedTensor { start, lane, strides, lane_stride })
    }

    pub fn reduce(&mut self, point: &IndexPoint<B>, values: &[Value], over: &[Dim], left: &[Dim], used: &mut i64) -> Result<(), CompileError> {
        let kept = values.iter().map(|v| self.keep(*v, used)).collect::<Result<Vec<_>, _>>()?;
        let mut result = Ok(());
        self.nest(point, left, None, &mut |this, point| match this.reduce_at(std::slice::from_ref(point), values, over) {
            Ok(results) => {
                for (target, value) in kept.iter().zip(results) {
                    target.store(this.b, point, &value[0]);
                }
            }
            Err(error) => result = Err(error),
        });
        self.kept.extend(values.iter().copied().zip(kept));
        result
    }

    /// Reductions over `over` at points of the dims left, for each value one result per point, of as many vectors as
    /// the point's runs have elements; the same in every lane if the vector dim is reduced.
    pub fn reduce_at(&mut self, points: &[IndexPoint<B>], values: &[Value], over: &[Dim]) -> Result<Vec<Vec<Vec<B::Vector>>>, CompileError> {
        let b = self.b;
        let folds: Vec<Fold> = values.iter().map(|v| self.fold(*v)).collect::<Result<_, _>>()?;
        let vector = self.plan.vector.filter(|d| over.contains(d));
        let mut others: Vec<Dim> = over.iter().copied().filter(|d| Some(*d) != vector).collect();
        let innermost =
            Innermost { dim: vector.or_else(|| others.pop()), lanes_along: vector.is_some(), run: self.plan.run.filter(|_| vector.is_some()) };
        // Several grid points are parallel enough with one set. Members of a team take more sets, as they have little
        // else to hide latency.
        let sets = match self.plan.team {
            Some(_) if innermost.run.is_none() => 2 * PARALLEL,
            _ if points.iter().map(|p| p.width).sum::<usize>() > 1 => 1,
            // The sets cover more than one run, if the dim divides evenly into them.
            _ => innermost.run.map_or(PARALLEL, |width| {
                let (several, size) = (width.max(2 * PARALLEL), innermost.dim.map_or(1, |d| self.own(d).1));
                if size % (b.lanes() as i64 * several) == 0 { several } else { width }
            }),
        };
        // Accumulators are ordered by grid point, then by element of its runs, then by fold.
        let slots: Vec<ResultSlot> = points.iter().enumerate().flat_map(|(point, p)| (0..p.width).map(move |k| ResultSlot { point, k })).collect();
        let all: Vec<Fold> = slots.iter().flat_map(|_| folds.iter().copied()).collect();
        let one_set: Vec<B::Vector> = all.iter().flat_map(|f| f.start(b)).collect();
        let state: Vec<B::Vector> = (0..sets).flat_map(|_| one_set.clone()).collect();
        let terms = self.terms(&others, innermost, sets);
        let block = all.iter().any(|f| f.rounds()).then(|| block(terms));
        let accumulators = Accumulators { folds: &all, start: &one_set, sets, block };
        let mut result = Ok(());
        let state = self.fold_nest(points, &others, innermost, &accumulators, &state, &mut |this, points, sets| {
            let mut known: Vec<KnownValues<B::Vector>> = points.iter().map(|_| KnownValues::new()).collect();
            let mut out = Vec::new();
            for (number, set) in sets.iter().enumerate() {
                let mut rest = *set;
                for slot in &slots {
                    let point = &points[slot.point];
                    // Each set takes its own element of a run that is reduced; of other runs, each point takes its
                    // own.
                    let k = if innermost.lanes_along { number } else { slot.k };
                    for (fold, v) in folds.iter().zip(values) {
                        let (own, others) = rest.split_at(fold.width());
                        rest = others;
                        match this.element(*v, point, &mut known[slot.point]) {
                            Ok(x) => {
                                b.locate(*v);
                                out.extend(fold.step(this, (point, k), own, element(&x, k)));
                            }
                            Err(error) => {
                                result = Err(error);
                                out.extend_from_slice(own);
                            }
                        }
                    }
                }
            }
            out
        });
        result?;
        let mut sets = state.chunks(one_set.len()).map(<[B::Vector]>::to_vec);
        let mut total = sets.next().expect("invariant: at least one set of accumulators");
        for set in sets.skip(ir::fault!("reduce.sets.join", 1, 0)) {
            total = join_sets(b, &all, &total, &set);
        }
        if let Some(team) = self.plan.team {
            let mut members = b.exchange(&total, team.members).into_iter();
            total = members.next().expect("invariant: a team has a member");
            for other in members {
                total = join_sets(b, &all, &total, &other);
            }
        }
        if vector.is_some() {
            let mut distance = b.lanes() / ir::fault!("reduce.lanes.half", 4, 2);
            while distance > 0 {
                let other: Vec<B::Vector> = total.iter().map(|x| b.swap_lanes(*x, distance)).collect();
                total = join_sets(b, &all, &total, &other);
                distance /= 2;
            }
        }
        let mut out = vec![vec![vec![]; points.len()]; folds.len()];
        let mut rest = &total[..];
        for slot in &slots {
            for (number, fold) in folds.iter().enumerate() {
                let (own, others) = rest.split_at(fold.width());
                rest = others;
                let dtype = self.kernel.body[values[number]].ty.dtype;
                out[number][slot.point].push(pointwise::rounded(b, dtype, fold.finish(b, own)));
            }
        }
        Ok(out)
    }

    /// Terms that an accumulator takes in, in loops over these dims.
    fn terms(&self, others: &[Dim], innermost: Innermost, sets: i64) -> i64 {
        let width = if innermost.lanes_along { self.b.lanes() as i64 } else { 1 };
        let last = innermost.dim.map_or(1, |d| self.own(d).1);
        others.iter().map(|d| self.own(*d).1).product::<i64>() * (last / (width * sets)).max(1)
    }

    /// Loops that carry sets of accumulators; the innermost loop hands each set, or all that share runs, their
    /// own elements.
    fn fold_nest(
        &mut self,
        points: &[IndexPoint<B>],
        others: &[Dim],
        innermost: Innermost,
        accumulators: &Accumulators<'_, B::Vector>,
        state: &[B::Vector],
        body: &mut FoldBody<'_, Self, IndexPoint<B>, B::Vector>,
    ) -> Vec<B::Vector> {
        let (b, sets) = (self.b, accumulators.sets);
        if let Some((&dim, rest)) = others.split_first() {
            let (from, size) = self.own(dim);
            let terms = self.terms(rest, innermost, sets);
            return in_blocks(b, (size, 1), terms, accumulators, state, &mut |index, state| {
                let points = self.all_moved(points, dim, &LaneIndex::Same(b.index_add(from, index)), None);
                self.fold_nest(&points, rest, innermost, accumulators, state, body)
            });
        }
        let per_set = state.len() / sets as usize;
        let Some(dim) = innermost.dim else {
            let first = body(self, points, &[&state[..per_set]]);
            return first.into_iter().chain(state[per_set..].iter().copied()).collect();
        };
        let (from, size) = self.own(dim);
        let width = if innermost.lanes_along { b.lanes() as i64 } else { 1 };
        let along = |index| {
            let index = b.index_add(from, index);
            if innermost.lanes_along { LaneIndex::Lanes(index) } else { LaneIndex::Same(index) }
        };
        let together = size / (width * sets) * (width * sets);
        let whole = size / width * width;
        let state = in_blocks(b, (together, width * sets), 1, accumulators, state, &mut |index, state| {
            let mut out = Vec::new();
            let run = innermost.run.unwrap_or(1) as usize;
            for (number, own) in state.chunks(per_set * run).enumerate() {
                let index = b.index_add(index, b.index((number * run) as i64 * width));
                let points = match innermost.run {
                    Some(run) => self
                        .all_moved(points, dim, &LaneIndex::Run(b.index_add(from, index)), None)
                        .into_iter()
                        .map(|p| IndexPoint { width: run as usize, ..p })
                        .collect(),
                    None => self.all_moved(points, dim, &along(index), None),
                };
                out.extend(body(self, &points, &own.chunks(per_set).collect::<Vec<_>>()));
            }
            out
        });
        let mut first = state[..per_set].to_vec();
        if together < whole {
            first = b.repeat(b.index(ir::fault!("reduce.rest.first", 0, together)), b.index(whole), width, &first, &mut |index, state| {
                let points = self.all_moved(points, dim, &along(index), None);
                body(self, &points, &[state])
            });
        }
        if whole < size {
            let points = self.all_moved(
                points,
                dim,
                &along(b.index(whole)),
                ir::fault!("reduce.tail.mask", None, Some(b.mask_first((size - whole) as usize))),
            );
            first = body(self, &points, &[&first]);
        }
        first.into_iter().chain(state[per_set..].iter().copied()).collect()
    }

    /// Start and size of this worker's share of a dim that is summed over: all of it, unless it is a team's dim.
    pub fn own(&self, dim: Dim) -> (B::Index, i64) {
        let b = self.b;
        match self.plan.team.filter(|t| t.dim == dim) {
            Some(team) => (b.index_mul(b.member(), b.index(ir::fault!("reduce.team.share", team.share - 1, team.share))), team.share),
            None => (b.index(0), self.size(dim)),
        }
    }

    fn all_moved(&mut self, points: &[IndexPoint<B>], dim: Dim, to: &LaneIndex<B>, mask: Option<B::Vector>) -> Vec<IndexPoint<B>> {
        let b = self.b;
        points
            .iter()
            .map(|point| {
                let mask = mask.map_or(point.mask, |m| Some(point.also(b, m)));
                self.moved(point, dim, to.clone(), mask)
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

    /// The elements that a reduction takes in at a grid point. For a dot, they are products of the factors, which are
    /// not rounded.
    fn element(&mut self, v: Value, point: &IndexPoint<B>, known: &mut KnownValues<B::Vector>) -> Result<Vec<B::Vector>, CompileError> {
        let node = &self.kernel.body[v];
        let first = self.value(node.args[0], point, known)?;
        let Op::Dot { .. } = node.op else { return Ok(first) };
        let second = self.value(node.args[1], point, known)?;
        self.b.locate(v);
        zipped(&[&first, &second], |x| Ok(self.b.mul(x[0], x[1])))
    }

    /// A running sum, kept for later steps: one element after the other, or vectors of them where lanes go along it.
    pub fn cumsum(&mut self, point: &IndexPoint<B>, v: Value, direction: ScanDirection, others: &[Dim], used: &mut i64) -> Result<(), CompileError> {
        let b = self.b;
        let kept = self.keep(v, used)?;
        if self.plan.vector == Some(direction.along) {
            let mut result = Ok(());
            self.nest(point, others, None, &mut |this, point| {
                if result.is_ok() {
                    result = this.scan(point, v, direction, &kept);
                }
            });
            self.kept.insert(v, kept);
            return result;
        }
        let (lane, dtype) = (kept.lane, self.kernel.body[v].ty.dtype);
        let arg = self.kernel.body[v].args[0];
        let size = self.size(direction.along);
        let mut result = Ok(());
        self.nest(point, others, None, &mut |this, point| {
            let zero = zero(b, lane);
            b.repeat(b.index(0), b.index(size), 1, &[zero], &mut |index, sum| {
                let index =
                    if ir::fault!("reduce.running.reverse", false, direction.reverse) { b.index_sub(b.index(size - 1), index) } else { index };
                let point = this.moved(point, direction.along, LaneIndex::Same(index), point.mask);
                match this.value(arg, &point, &mut KnownValues::new()) {
                    Ok(x) => {
                        let sum = if lane == Lane::F32 { b.add(sum[0], x[0]) } else { b.int2(IntBinary::Add, sum[0], x[0]) };
                        kept.store(b, &point, &[pointwise::rounded(b, dtype, sum)]);
                        vec![ir::fault!("reduce.running.carried", pointwise::rounded(b, dtype, sum), sum)]
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

    /// A running sum whose lanes have neighbours: of some vectors at a time, so that they are loaded together.
    fn scan(&mut self, point: &IndexPoint<B>, v: Value, direction: ScanDirection, kept: &StridedTensor<B>) -> Result<(), CompileError> {
        let b = self.b;
        let (lanes, size) = (b.lanes() as i64, self.size(direction.along));
        let (whole, tail) = (size / lanes, size % lanes);
        let mut carried = vec![zero(b, kept.lane)];
        let mut result = Ok(());
        let mut some = |this: &mut Self, firsts: &[B::Index], mask: Option<B::Vector>, carried: &[B::Vector]| {
            let after = this.scan_vectors(point, v, direction, kept, firsts, mask, carried[0]);
            vec![after.unwrap_or_else(|error| {
                result = Err(error);
                carried[0]
            })]
        };
        let rest = (b.index(whole * lanes), (tail > 0).then(|| b.mask_first(tail as usize)));
        if direction.reverse && tail > 0 {
            carried = some(self, &[rest.0], rest.1, &carried);
        }
        let count = if whole % PARALLEL == 0 { PARALLEL } else { 1 };
        carried = b.repeat(b.index(0), b.index(whole * lanes), lanes * count, &carried, &mut |at, carried| {
            let first = |k: i64| match direction.reverse {
                true => b.index_sub(b.index((whole - k - 1) * lanes), at),
                false => b.index_add(at, b.index(k * lanes)),
            };
            some(self, &(0..count).map(first).collect::<Vec<_>>(), None, carried)
        });
        if !direction.reverse && tail > 0 {
            some(self, &[rest.0], rest.1, &carried);
        }
        result
    }

    /// Adds the preceding sum to each vector in turn and returns the sum after the last. Within a vector, in groups
    /// of 2, 4, .. lanes, the sum of the earlier half is added to the later half (Blelloch, "Prefix Sums and Their
    /// Applications", 1990).
    #[expect(clippy::too_many_arguments, reason = "a place of a value, and some of its vectors")]
    fn scan_vectors(
        &mut self,
        point: &IndexPoint<B>,
        v: Value,
        direction: ScanDirection,
        kept: &StridedTensor<B>,
        firsts: &[B::Index],
        mask: Option<B::Vector>,
        before: B::Vector,
    ) -> Result<B::Vector, CompileError> {
        let b = self.b;
        let arg = self.kernel.body[v].args[0];
        let add = |x, y| if kept.lane == Lane::F32 { b.add(x, y) } else { b.int2(IntBinary::Add, x, y) };
        let only = mask.map(|m| point.also(b, m));
        let points: Vec<IndexPoint<B>> =
            firsts.iter().map(|first| self.moved(point, direction.along, LaneIndex::Lanes(*first), only.or(point.mask))).collect();
        let values = points.iter().map(|p| Ok(self.value(arg, p, &mut KnownValues::new())?[0])).collect::<Result<Vec<_>, CompileError>>()?;
        let mut carried = before;
        for (point, x) in points.iter().zip(values) {
            let x = mask.map_or(x, |m| b.select(m, x, zero(b, kept.lane)));
            let (mut sum, mut total) = (x, x);
            for distance in (0..b.lanes().ilog2()).map(|k| 1 << k) {
                let other = b.swap_lanes(total, distance);
                let bit = b.int2(IntBinary::And, b.lane_numbers(), b.i64(distance as i64));
                let later = if direction.reverse { Compare::Eq } else { Compare::Ne };
                sum = b.select(b.compare_int(later, bit, b.i64(0)), add(other, sum), sum);
                total = add(total, other);
            }
            kept.store(b, point, &[pointwise::rounded(b, self.kernel.body[v].ty.dtype, add(carried, sum))]);
            carried = add(carried, total);
        }
        Ok(carried)
    }
}
