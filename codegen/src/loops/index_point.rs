//! Points of a kernel's index space, and how tensors are read and written there.

use crate::build::{Builder, Compare, Convert, IntBinary, Lane};
use ir::dim::Dim;
use std::collections::BTreeMap;
use std::convert::Infallible;

/// The direction of a running sum.
#[derive(Clone, Copy)]
pub struct ScanDirection {
    pub along: Dim,
    pub reverse: bool,
}

/// An index along one dim.
pub enum LaneIndex<B: Builder> {
    /// The same in every lane.
    Same(B::Index),
    /// Lane `i` is at this index plus `i`.
    Lanes(B::Index),
    /// Lane `i` is at a run of neighbours, as many as the point's width: from this index plus `i` times the width on.
    Run(B::Index),
    /// Any index in each lane, as `I64`: one, or one for each element of the runs.
    Each(Vec<B::Vector>),
}

impl<B: Builder> Clone for LaneIndex<B> {
    fn clone(&self) -> Self {
        match self {
            LaneIndex::Same(index) => LaneIndex::Same(*index),
            LaneIndex::Lanes(first) => LaneIndex::Lanes(*first),
            LaneIndex::Run(first) => LaneIndex::Run(*first),
            LaneIndex::Each(indices) => LaneIndex::Each(indices.clone()),
        }
    }
}

/// A point of the index space, or one per lane, or a run of points per lane. A value there is one vector, the same
/// for all elements of the runs, or one vector for each element.
pub struct IndexPoint<B: Builder> {
    pub along: BTreeMap<Dim, LaneIndex<B>>,
    /// Elements of a run.
    pub width: usize,
    /// The lanes that are points at all; memory is not touched for the others.
    pub mask: Option<B::Vector>,
    /// Distinguishes points in the table of known values.
    pub id: usize,
    /// Which of the vectors of grid points that are computed together.
    pub slot: usize,
}

impl<B: Builder> Clone for IndexPoint<B> {
    fn clone(&self) -> Self {
        IndexPoint { along: self.along.clone(), width: self.width, mask: self.mask, id: self.id, slot: self.slot }
    }
}

/// The vector of element `k` of a run.
pub fn element<V: Copy>(values: &[V], k: usize) -> V {
    if values.len() == 1 { values[0] } else { values[k] }
}

/// Applies a function to several values element by element; the result is one vector if no value differs along runs.
pub fn zipped<V: Copy, E>(values: &[&[V]], mut f: impl FnMut(&[V]) -> Result<V, E>) -> Result<Vec<V>, E> {
    let width = values.iter().map(|v| v.len()).max().unwrap_or(1);
    (0..width).map(|k| f(&values.iter().map(|v| element(v, k)).collect::<Vec<_>>())).collect()
}

impl<B: Builder> IndexPoint<B> {
    /// The index along a dim in each lane; 0 for a dim that has no loop (its size is 1).
    pub fn each(&self, b: &B, dim: Dim) -> Vec<B::Vector> {
        match self.along.get(&dim) {
            None => vec![b.i64(0)],
            Some(LaneIndex::Same(index)) => vec![b.splat(*index)],
            Some(LaneIndex::Lanes(first)) => vec![b.int2(IntBinary::Add, b.splat(*first), b.lane_numbers())],
            Some(LaneIndex::Run(first)) => {
                let lanes = b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(self.width as i64));
                (0..self.width as i64).map(|k| b.int2(IntBinary::Add, b.splat(b.index_add(*first, b.index(k))), lanes)).collect()
            }
            Some(LaneIndex::Each(indices)) => indices.clone(),
        }
    }

    /// Along which dim lanes have runs.
    pub fn run(&self) -> Option<Dim> {
        self.along.iter().find(|(_, along)| matches!(along, LaneIndex::Run(_))).map(|(dim, _)| *dim)
    }

    /// The lanes of both masks.
    pub fn also(&self, b: &B, mask: B::Vector) -> B::Vector {
        self.mask.map_or(mask, |m| b.int2(IntBinary::And, m, mask))
    }
}

/// A tensor in memory: a kernel's argument or a value kept in scratch. Strides in elements.
pub struct StridedTensor<B: Builder> {
    pub start: B::Pointer,
    pub lane: Lane,
    pub strides: Vec<(Dim, i64)>,
    /// Elements between the lanes beside all dims: 1 for values kept per lane, else 0.
    pub lane_stride: i64,
}

/// How the elements of a grid point lie in memory.
struct AccessPattern<B: Builder> {
    /// Address of the first element.
    start: B::Pointer,
    /// Elements between the lanes, and between the elements of a run.
    between_lanes: i64,
    in_run: i64,
    /// Further offsets of each lane, in bytes: none, one for all elements of a run, or one for each.
    offsets: Vec<B::Vector>,
}

impl<B: Builder> AccessPattern<B> {
    fn differs_along_runs(&self) -> bool {
        self.in_run != 0 || self.offsets.len() > 1
    }

    /// In each lane a run lies together, aligned if its start is.
    fn is_run(&self) -> bool {
        self.in_run == 1 && self.offsets.len() <= 1
    }

    /// Address of the element `k` of a run.
    fn start_of(&self, b: &B, lane: Lane, k: usize) -> B::Pointer {
        b.at_const(self.start, k as i64 * self.in_run * lane.bytes())
    }

    /// The bytes from there on of each lane.
    fn offsets_of(&self, b: &B, lane: Lane, k: usize) -> B::Vector {
        let lanes = || b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(self.between_lanes * lane.bytes()));
        match (self.offsets.is_empty(), self.between_lanes) {
            (true, _) => lanes(),
            (false, 0) => element(&self.offsets, k),
            (false, _) => ir::fault!("loops.place.lanes", element(&self.offsets, k), b.int2(IntBinary::Add, element(&self.offsets, k), lanes())),
        }
    }

    fn load(&self, b: &B, lane: Lane, k: usize, mask: Option<B::Vector>) -> B::Vector {
        let start = self.start_of(b, lane, k);
        match (self.offsets.is_empty(), self.between_lanes) {
            (true, 0) => b.load_splat(start, lane),
            (true, 1) => b.load(start, lane, mask),
            _ => b.gather(start, self.offsets_of(b, lane, k), lane, mask),
        }
    }

    fn store(&self, b: &B, lane: Lane, k: usize, mask: Option<B::Vector>, value: B::Vector) {
        let start = self.start_of(b, lane, k);
        match (self.offsets.is_empty(), self.between_lanes) {
            (true, 0) => b.store_first(start, value, lane),
            (true, 1) => b.store(start, value, lane, mask),
            _ => b.scatter(start, self.offsets_of(b, lane, k), value, lane, mask),
        }
    }
}

impl<B: Builder> StridedTensor<B> {
    fn access(&self, b: &B, point: &IndexPoint<B>) -> AccessPattern<B> {
        let bytes = self.lane.bytes();
        let mut access = AccessPattern { start: self.start, between_lanes: self.lane_stride, in_run: 0, offsets: vec![] };
        for &(dim, stride) in &self.strides {
            let Some(along) = point.along.get(&dim) else { continue };
            match along {
                LaneIndex::Same(index) => access.start = b.at(access.start, b.index_mul(*index, b.index(stride * bytes))),
                LaneIndex::Lanes(first) => {
                    access.start = b.at(access.start, b.index_mul(*first, b.index(stride * bytes)));
                    access.between_lanes += stride;
                }
                LaneIndex::Run(first) => {
                    access.start = b.at(access.start, b.index_mul(*first, b.index(stride * bytes)));
                    access.between_lanes += ir::fault!("loops.place.run", stride, stride * point.width as i64);
                    access.in_run += stride;
                }
                LaneIndex::Each(indices) => {
                    let term = |index| b.int2(IntBinary::Mul, index, b.i64(stride * bytes));
                    access.offsets = match access.offsets.is_empty() {
                        true => indices.iter().map(|i| term(*i)).collect(),
                        false => {
                            let sum = |x: &[B::Vector]| Ok::<_, Infallible>(b.int2(IntBinary::Add, x[0], term(x[1])));
                            let Ok(sums) = zipped(&[&access.offsets, indices], sum);
                            sums
                        }
                    };
                }
            }
        }
        access
    }

    /// What is there: one vector, or one for each element of the runs.
    pub fn load(&self, b: &B, point: &IndexPoint<B>) -> Vec<B::Vector> {
        let access = self.access(b, point);
        if !access.differs_along_runs() {
            return vec![access.load(b, self.lane, 0, point.mask)];
        }
        // Runs are chosen only where operands are aligned (see `LoopPlan`).
        match access.is_run() {
            true => b.gather_run(access.start, access.offsets_of(b, self.lane, 0), self.lane, point.width, point.mask),
            false => (0..point.width).map(|k| access.load(b, self.lane, k, point.mask)).collect(),
        }
    }

    pub fn store(&self, b: &B, point: &IndexPoint<B>, values: &[B::Vector]) {
        let access = self.access(b, point);
        let one_by_one = |count: usize| (0..count).for_each(|k| access.store(b, self.lane, k, point.mask, element(values, k)));
        if !access.differs_along_runs() {
            return one_by_one(1);
        }
        if !access.is_run() || point.mask.is_some() {
            return one_by_one(point.width);
        }
        let all: Vec<B::Vector> = (0..point.width).map(|k| element(values, k)).collect();
        let together = || b.scatter_run(access.start, access.offsets_of(b, self.lane, 0), &all, self.lane);
        self.if_aligned(b, point, &access, &together, &|| one_by_one(point.width));
    }

    /// Adds to what is there.
    pub fn add(&self, b: &B, point: &IndexPoint<B>, values: &[B::Vector], sum: &dyn Fn(B::Vector, B::Vector) -> B::Vector) {
        let access = self.access(b, point);
        let one_by_one = |count: usize| {
            // All elements are read before any is stored.
            let old: Vec<B::Vector> = (0..count).map(|k| access.load(b, self.lane, k, point.mask)).collect();
            (0..count).for_each(|k| access.store(b, self.lane, k, point.mask, sum(old[k], element(values, k))));
        };
        if !access.differs_along_runs() {
            return one_by_one(1);
        }
        if !access.is_run() || point.mask.is_some() {
            return one_by_one(point.width);
        }
        let together = || {
            let offsets = access.offsets_of(b, self.lane, 0);
            let old = b.gather_run(access.start, offsets, self.lane, point.width, None);
            let all: Vec<B::Vector> = (0..point.width).map(|k| sum(old[k], element(values, k))).collect();
            b.scatter_run(access.start, offsets, &all, self.lane);
        };
        self.if_aligned(b, point, &access, &together, &|| one_by_one(point.width));
    }

    /// Does one thing if runs begin at multiples of their length, or of 16 bytes, and else the other. Where outputs
    /// are is not known when a kernel is compiled.
    fn if_aligned(&self, b: &B, point: &IndexPoint<B>, access: &AccessPattern<B>, yes: &dyn Fn(), no: &dyn Fn()) {
        b.if_aligned(access.start, (point.width as i64 * self.lane.bytes()).min(16), yes, no);
    }
}

/// The part of a longer dim that an operand fills: `start .. start + length`.
#[derive(Clone, Copy)]
pub struct Window {
    pub start: i64,
    pub length: i64,
}

/// An index along a longer dim as one along the operand's own dim, kept in bounds, and the lanes inside the window.
pub fn enter<B: Builder>(b: &B, point: &IndexPoint<B>, dim: Dim, window: Window) -> (LaneIndex<B>, Vec<B::Vector>) {
    let indices: Vec<B::Vector> = point.each(b, dim).into_iter().map(|i| b.int2(IntBinary::Sub, i, b.i64(window.start))).collect();
    let inside: Vec<B::Vector> = indices.iter().map(|i| within(b, *i, window.length)).collect();
    let along = match point.along.get(&dim) {
        None => LaneIndex::Same(b.index(0)),
        // The minimum is unsigned: an index before the window wraps around to beyond its end.
        Some(LaneIndex::Same(index)) => LaneIndex::Same(b.index_min(b.index_sub(*index, b.index(window.start)), b.index(window.length - 1))),
        // Lanes outside of the window are masked, so the first lane may lie before it.
        Some(LaneIndex::Lanes(first)) => LaneIndex::Lanes(b.index_sub(*first, b.index(window.start))),
        Some(LaneIndex::Run(first)) => LaneIndex::Run(b.index_sub(*first, b.index(window.start))),
        Some(LaneIndex::Each(_)) => LaneIndex::Each(inside.iter().zip(&indices).map(|(inside, i)| b.select(*inside, *i, b.i64(0))).collect()),
    };
    (along, inside)
}

/// Lanes with `0 <= index < length`.
pub fn within<B: Builder>(b: &B, indices: B::Vector, length: i64) -> B::Vector {
    b.int2(IntBinary::And, b.compare_int(Compare::Ge, indices, b.i64(0)), b.compare_int(Compare::Lt, indices, b.i64(length)))
}

/// An i32 vector as `I64` lanes.
pub fn widen<B: Builder>(b: &B, indices: B::Vector) -> B::Vector {
    b.convert(Convert::Int(Lane::I64), indices)
}
