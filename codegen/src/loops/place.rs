//! Where in the kernel's index space a value is wanted.

use crate::build::{Builder, Compare, Convert, IntBinary, Lane};
use ir::dim::Dim;
use std::collections::BTreeMap;

/// The direction of a running sum.
#[derive(Clone, Copy)]
pub struct Order {
    pub along: Dim,
    pub reverse: bool,
}

/// An index along one dim.
pub enum Along<B: Builder> {
    /// The same in every lane.
    Same(B::Index),
    /// Lane `i` is at this index plus `i`.
    Lanes(B::Index),
    /// Any index in each lane, as `I64`.
    Each(B::Vector),
}

impl<B: Builder> Clone for Along<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Builder> Copy for Along<B> {}

/// A point of the index space, or one per lane.
pub struct Place<B: Builder> {
    pub along: BTreeMap<Dim, Along<B>>,
    /// The lanes that are points at all; memory is not touched for the others.
    pub mask: Option<B::Vector>,
    /// Distinguishes places in the memory of known values.
    pub id: usize,
    /// Which of the vectors of grid points that are computed together.
    pub slot: usize,
}

impl<B: Builder> Clone for Place<B> {
    fn clone(&self) -> Self {
        Place { along: self.along.clone(), mask: self.mask, id: self.id, slot: self.slot }
    }
}

impl<B: Builder> Place<B> {
    /// The index along a dim in each lane; 0 for a dim that has no loop (its size is 1).
    pub fn each(&self, b: &B, dim: Dim) -> B::Vector {
        match self.along.get(&dim) {
            None => b.i64(0),
            Some(Along::Same(index)) => b.splat(*index),
            Some(Along::Lanes(first)) => b.int2(IntBinary::Add, b.splat(*first), b.lane_numbers()),
            Some(Along::Each(indices)) => *indices,
        }
    }

    /// The lanes of both masks.
    pub fn also(&self, b: &B, mask: B::Vector) -> B::Vector {
        self.mask.map_or(mask, |m| b.int2(IntBinary::And, m, mask))
    }
}

/// A tensor in memory: a kernel's argument or a value kept in scratch. Strides in elements.
pub struct Stored<B: Builder> {
    pub start: B::Pointer,
    pub lane: Lane,
    pub strides: Vec<(Dim, i64)>,
    /// Elements between the lanes beside all dims: 1 for values kept per lane, else 0.
    pub lane_stride: i64,
}

/// How the lanes of an access lie.
enum Access<B: Builder> {
    One(B::Pointer),
    Adjacent(B::Pointer),
    Scattered(B::Pointer, B::Vector),
}

impl<B: Builder> Stored<B> {
    fn access(&self, b: &B, place: &Place<B>) -> Access<B> {
        let bytes = self.lane.bytes();
        let mut pointer = self.start;
        let mut step = self.lane_stride;
        let mut each: Option<B::Vector> = None;
        for &(dim, stride) in &self.strides {
            let Some(along) = place.along.get(&dim) else { continue };
            match along {
                Along::Same(index) => pointer = b.at(pointer, b.index_mul(*index, b.index(stride * bytes))),
                Along::Lanes(first) => {
                    pointer = b.at(pointer, b.index_mul(*first, b.index(stride * bytes)));
                    step += stride;
                }
                Along::Each(indices) => {
                    let term = b.int2(IntBinary::Mul, *indices, b.i64(stride * bytes));
                    each = Some(each.map_or(term, |sum| b.int2(IntBinary::Add, sum, term)));
                }
            }
        }
        let lanes = || b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(step * bytes));
        match (each, step) {
            (Some(offsets), 0) => Access::Scattered(pointer, offsets),
            (Some(offsets), _) => Access::Scattered(pointer, b.int2(IntBinary::Add, offsets, lanes())),
            (None, 0) => Access::One(pointer),
            (None, 1) => Access::Adjacent(pointer),
            (None, _) => Access::Scattered(pointer, lanes()),
        }
    }

    pub fn load(&self, b: &B, place: &Place<B>) -> B::Vector {
        match self.access(b, place) {
            Access::One(pointer) => b.load_splat(pointer, self.lane),
            Access::Adjacent(pointer) => b.load(pointer, self.lane, place.mask),
            Access::Scattered(pointer, offsets) => b.gather(pointer, offsets, self.lane, place.mask),
        }
    }

    pub fn store(&self, b: &B, place: &Place<B>, value: B::Vector) {
        match self.access(b, place) {
            Access::One(pointer) => b.store_first(pointer, value, self.lane),
            Access::Adjacent(pointer) => b.store(pointer, value, self.lane, place.mask),
            Access::Scattered(pointer, offsets) => b.scatter(pointer, offsets, value, self.lane, place.mask),
        }
    }
}

/// The part of a longer dim that an operand fills: `start .. start + length`.
#[derive(Clone, Copy)]
pub struct Window {
    pub start: i64,
    pub length: i64,
}

/// An index along a longer dim as one along the operand's own dim, kept in bounds, and the lanes inside the window.
pub fn enter<B: Builder>(b: &B, place: &Place<B>, dim: Dim, window: Window) -> (Along<B>, B::Vector) {
    let indices = b.int2(IntBinary::Sub, place.each(b, dim), b.i64(window.start));
    let inside = within(b, indices, window.length);
    let along = match place.along.get(&dim) {
        None => Along::Same(b.index(0)),
        // Unsigned: an index before the window is beyond its end.
        Some(Along::Same(index)) => Along::Same(b.index_min(b.index_sub(*index, b.index(window.start)), b.index(window.length - 1))),
        // Lanes outside of the window are masked, so the first may lie before it.
        Some(Along::Lanes(first)) => Along::Lanes(b.index_sub(*first, b.index(window.start))),
        Some(Along::Each(_)) => Along::Each(b.select(inside, indices, b.i64(0))),
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
