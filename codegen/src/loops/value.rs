//! The value of a node at a point, computed from its operands there or at points of their own.

use super::emit::Loops;
use super::index_point::{IndexPoint, LaneIndex, Window, element, enter, widen, within, zipped};
use crate::CompileError;
use crate::build::{Builder, Compare, IntBinary, Lane};
use crate::pointwise::{self, Sources};
use ir::dim::{Base, Dim, IndexMap};
use ir::graph::Value;
use ir::op::Op;
use std::collections::HashMap;

/// Values known at a point: each is one vector, or one for each element of the point's runs.
pub type KnownValues<V> = HashMap<(Value, usize), Vec<V>>;

impl<B: Builder> Loops<'_, B> {
    /// The value at a point: one vector, or one for each element of the point's runs.
    pub fn value(&mut self, v: Value, point: &IndexPoint<B>, known: &mut KnownValues<B::Vector>) -> Result<Vec<B::Vector>, CompileError> {
        if let Some(value) = known.get(&(v, point.id)) {
            return Ok(value.clone());
        }
        let b = self.b;
        let node = &self.kernel.body[v];
        if !node.op.is_source() {
            b.locate(v);
        }
        let value = match &node.op {
            Op::Input(i) => self.inputs[*i as usize].load(b, point),
            op if op.is_source() => {
                let sources = Sources { b, body: &self.kernel.body, scalars: self.scalars, scalar_count: self.kernel.scalars.len() };
                let differs = point.run().is_some_and(|d| self.kernel.body.dims_of(v).contains(&d));
                let width = if differs { point.width } else { 1 };
                (0..width).map(|k| sources.value(v, &mut |dim| element(&point.each(b, dim), k))).collect::<Result<_, _>>()?
            }
            Op::Reduce { .. } | Op::Dot { .. } | Op::ArgMax { .. } | Op::Cumsum { .. } => match self.reduced.get(&v) {
                Some(values) => values[point.slot].clone(),
                None => self.kept[&v].load(b, point),
            },
            // Scratch holds the sum before rounding.
            Op::Scatter { .. } => self.kept[&v].load(b, point).into_iter().map(|x| pointwise::rounded(b, node.ty.dtype, x)).collect(),
            Op::Pad { from, to, at } => {
                let length = from.map_or(1, |d| self.size(d));
                let (along, inside) = enter(b, point, *to, Window { start: ir::fault!("loops.pad.at", *at as i64 + 1, *at as i64), length });
                let inner = self.windowed(point, *to, *from, along, &inside);
                let value = self.value(node.args[0], &inner, known)?;
                let zero = zero(b, pointwise::lane(node.ty.dtype));
                zipped(&[&inside, &value], |x| Ok::<_, CompileError>(b.select(x[0], x[1], zero)))?
            }
            Op::Concat { from, to } => {
                let mut start = 0;
                let mut result: Option<Vec<B::Vector>> = None;
                for (&arg, &dim) in node.args.iter().zip(from) {
                    let length = self.size(dim);
                    let (along, inside) = enter(b, point, *to, Window { start, length });
                    let inner = self.windowed(point, *to, Some(dim), along, &inside);
                    let value = self.value(arg, &inner, known)?;
                    result = Some(match result {
                        None => value,
                        Some(before) => zipped(&[&inside, &value, &before], |x| Ok::<_, CompileError>(b.select(x[0], x[1], x[2])))?,
                    });
                    start = ir::fault!("loops.concat.start", length, start + length);
                }
                result.expect("invariant: `concat` has operands")
            }
            Op::Gather { dim } => self.gather(v, *dim, point, known)?,
            // Terms are added one by one, so that only few are in registers at a time.
            Op::Add => {
                let (first, rest) = node.args.split_first().expect("invariant: `add` has operands");
                let mut sum = self.value(*first, point, known)?;
                for term in rest {
                    let term = self.value(*term, point, known)?;
                    b.locate(v);
                    sum = zipped(&[&sum, &term], |x| Ok::<_, CompileError>(pointwise::plus(b, pointwise::lane(node.ty.dtype), x[0], x[1])))?;
                }
                sum.into_iter().map(|x| pointwise::rounded(b, node.ty.dtype, x)).collect()
            }
            _ => {
                let args = node.args.iter().map(|a| self.value(*a, point, known)).collect::<Result<Vec<_>, _>>()?;
                zipped(&args.iter().map(Vec::as_slice).collect::<Vec<_>>(), |x| pointwise::apply(b, &self.kernel.body, v, x))?
            }
        };
        known.insert((v, point.id), value.clone());
        Ok(value)
    }

    /// The point of an operand that fills a window of dim `to`.
    fn windowed(&mut self, point: &IndexPoint<B>, to: Dim, from: Option<Dim>, along: LaneIndex<B>, inside: &[B::Vector]) -> IndexPoint<B> {
        // Only lanes that walk the window can leave it; other indices were clamped. A run lies inside or outside.
        let mask = match along {
            LaneIndex::Lanes(_) | LaneIndex::Run(_) => Some(point.also(self.b, inside[0])),
            LaneIndex::Same(_) | LaneIndex::Each(_) => point.mask,
        };
        let mut inner = point.along.clone();
        inner.remove(&to);
        if let Some(dim) = from {
            inner.insert(dim, along);
        }
        IndexPoint { slot: point.slot, width: point.width, ..self.new_point(inner, mask) }
    }

    fn gather(&mut self, v: Value, dim: Dim, point: &IndexPoint<B>, known: &mut KnownValues<B::Vector>) -> Result<Vec<B::Vector>, CompileError> {
        let b = self.b;
        let node = &self.kernel.body[v];
        let (table, index) = (node.args[0], node.args[1]);
        let indices = self.value(index, point, known)?;
        let found = indices.into_iter().map(|i| local_row(b, self.scalars, &self.kernel.body.dims[dim].index, widen(b, i)));
        let (rows, inside): (Vec<_>, Vec<_>) = found.unzip();
        let differs = |d| matches!(point.along.get(d), Some(LaneIndex::Lanes(_) | LaneIndex::Run(_) | LaneIndex::Each(_)));
        let varies = self.kernel.body.dims_of(ir::fault!("loops.gather.varies", table, index)).iter().any(differs);
        let along = if varies { LaneIndex::Each(rows) } else { LaneIndex::Same(b.first_as_index(rows[0])) };
        let inner = self.moved(point, dim, along, point.mask);
        let value = self.value(table, &inner, known)?;
        let zero = zero(b, pointwise::lane(node.ty.dtype));
        let inside = ir::fault!("loops.gather.outside", vec![b.mask_first(b.lanes())], inside);
        zipped(&[&inside, &value], |x| Ok(b.select(x[0], x[1], zero)))
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
        inside = ir::fault!("loops.row.below", b.compare_int(Compare::Lt, rest, b.i64(map.len() as i64)), within(b, rest, map.len() as i64));
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
