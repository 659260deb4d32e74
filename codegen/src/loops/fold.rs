//! Reductions: what is carried, how an element is taken in, how accumulators join.

use super::emit::Loops;
use super::index_point::{IndexPoint, element};
use super::value::zero;
use crate::build::{Builder, Compare, Convert, IntBinary, Lane};
use crate::pointwise;
use ir::dim::Dim;
use ir::op::Reduce;

/// How elements join into a result.
#[derive(Clone, Copy)]
pub enum Fold {
    Join {
        kind: Reduce,
        lane: Lane,
    },
    /// Carries the greatest element and its global index.
    ArgMax {
        over: Dim,
        lane: Lane,
    },
}

impl Fold {
    /// Vectors that it carries.
    pub fn width(self) -> usize {
        match self {
            Fold::Join { .. } => 1,
            Fold::ArgMax { .. } => 2,
        }
    }

    /// Whether joins are rounded.
    pub fn rounds(self) -> bool {
        match self {
            Fold::Join { kind: Reduce::Sum, lane } => lane == Lane::F32,
            Fold::Join { kind: Reduce::Max | Reduce::Any, .. } | Fold::ArgMax { .. } => false,
        }
    }

    pub fn start<B: Builder>(self, b: &B) -> Vec<B::Vector> {
        let least = |lane| if lane == Lane::F32 { b.f32(ir::fault!("reduce.max.start", 0.0, f64::NEG_INFINITY)) } else { b.i32(i32::MIN) };
        match self {
            Fold::Join { kind: Reduce::Max, lane } => vec![least(lane)],
            Fold::Join { kind: Reduce::Sum | Reduce::Any, lane } => vec![zero(b, lane)],
            Fold::ArgMax { lane, .. } => vec![least(lane), b.i64(i64::MAX)],
        }
    }

    /// Takes in element `k` of a grid point's runs. Lanes outside of the mask change nothing.
    pub fn step<B: Builder>(self, loops: &Loops<'_, B>, (point, k): (&IndexPoint<B>, usize), state: &[B::Vector], x: B::Vector) -> Vec<B::Vector> {
        let b = loops.b;
        let neutral = self.start(b);
        let only = |x, neutral| ir::fault!("reduce.tail.neutral", None, point.mask).map_or(x, |m| b.select(m, x, neutral));
        match self {
            Fold::Join { .. } => self.join(b, state, &[only(x, neutral[0])]),
            Fold::ArgMax { over, .. } => {
                let index = pointwise::global_index(b, loops.scalars, &loops.kernel.body.dims[over], element(&point.each(b, over), k));
                self.join(b, state, &[only(x, neutral[0]), only(index, neutral[1])])
            }
        }
    }

    fn join<B: Builder>(self, b: &B, x: &[B::Vector], y: &[B::Vector]) -> Vec<B::Vector> {
        match self {
            Fold::Join { kind: Reduce::Sum, lane: Lane::F32 } => vec![b.add(x[0], y[0])],
            Fold::Join { kind: Reduce::Sum, .. } => vec![b.int2(IntBinary::Add, x[0], y[0])],
            Fold::Join { kind: Reduce::Max, lane: Lane::F32 } => vec![pointwise::greater(b, x[0], y[0])],
            Fold::Join { kind: Reduce::Max, .. } => vec![b.select(b.compare_int(Compare::Gt, x[0], y[0]), x[0], y[0])],
            Fold::Join { kind: Reduce::Any, .. } => vec![b.int2(IntBinary::Or, x[0], y[0])],
            Fold::ArgMax { lane, .. } => {
                let compare = |op| if lane == Lane::F32 { b.compare_float(op, y[0], x[0]) } else { b.compare_int(op, y[0], x[0]) };
                let tie = b.int2(
                    IntBinary::And,
                    compare(Compare::Eq),
                    b.compare_int(ir::fault!("reduce.arg_max.tie", Compare::Gt, Compare::Lt), y[1], x[1]),
                );
                let better = b.int2(IntBinary::Or, compare(Compare::Gt), tie);
                vec![b.select(better, y[0], x[0]), b.select(better, y[1], x[1])]
            }
        }
    }

    pub fn finish<B: Builder>(self, b: &B, state: &[B::Vector]) -> B::Vector {
        match self {
            Fold::Join { .. } => state[0],
            Fold::ArgMax { .. } => b.convert(Convert::Int(Lane::I32), state[1]),
        }
    }
}

/// Joins two sets of accumulators of the same folds.
pub fn join_sets<B: Builder>(b: &B, folds: &[Fold], x: &[B::Vector], y: &[B::Vector]) -> Vec<B::Vector> {
    let (mut out, mut at) = (Vec::new(), 0);
    for fold in folds {
        let own = at..at + fold.width();
        out.extend(fold.join(b, &x[own.clone()], &y[own.clone()]));
        at = own.end;
    }
    out
}
