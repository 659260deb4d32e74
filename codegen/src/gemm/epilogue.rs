//! The pointwise ops that follow a product, at one vector of the result.

use super::Gemm;
use super::micro::{COLUMN, OUTER, ROW, SCALARS, TENSORS, first_index};
use crate::CompileError;
use crate::build::llvm::{Index, Pointer, Vector};
use crate::build::{Builder, IntBinary, Lane};
use crate::loops::accumulated;
use crate::pointwise::{self, Sources};
use inkwell::values::FunctionValue;
use ir::dim::Dim;
use ir::graph::Value;
use ir::op::Op;
use std::collections::BTreeMap;

/// A vector of the result inside a micro-kernel's block.
#[derive(Clone, Copy)]
pub struct Spot<'c> {
    pub row: Index<'c>,
    pub column: i64,
    /// The lanes that are columns, unless all are.
    pub mask: Option<Vector<'c>>,
}

/// What follows the product in a micro-kernel.
pub struct Epilogue<'a, 'c> {
    pub g: &'a Gemm<'a, 'c>,
    pub function: FunctionValue<'c>,
}

impl<'c> Epilogue<'_, 'c> {
    /// Computes the ops after the product and stores the outputs.
    ///
    /// # Errors
    /// An op is not supported.
    pub fn write(&self, spot: Spot<'c>, sum: Vector<'c>) -> Result<(), CompileError> {
        let (b, kernel) = (self.g.b, self.g.kernel);
        let dot = self.g.plan.dot;
        let mut known = BTreeMap::from([(dot, pointwise::rounded(b, kernel.body[dot].ty.dtype, sum))]);
        // All values before any store: an output may lie over an input.
        let values = kernel.outputs.iter().map(|o| self.value(o.value, spot, &mut known)).collect::<Result<Vec<_>, _>>()?;
        for ((position, output), mut value) in kernel.outputs.iter().enumerate().zip(values) {
            let dtype = kernel.body[output.value].ty.dtype;
            let lane = pointwise::stored(dtype);
            let tensor = kernel.inputs.len() + position;
            if output.accumulate {
                let old = self.read(spot, tensor, lane);
                value = accumulated(b, dtype, old, value);
            }
            let place = self.place(spot, tensor, lane);
            match self.g.plan.n.strides[tensor] {
                1 => b.store(place, value, lane, spot.mask),
                stride => b.scatter(place, self.offsets(stride, lane), value, lane, spot.mask),
            }
        }
        Ok(())
    }

    fn value(&self, v: Value, spot: Spot<'c>, known: &mut BTreeMap<Value, Vector<'c>>) -> Result<Vector<'c>, CompileError> {
        if let Some(value) = known.get(&v) {
            return Ok(*value);
        }
        let (b, kernel) = (self.g.b, self.g.kernel);
        let node = &kernel.body[v];
        let value = match &node.op {
            Op::Input(i) => self.read(spot, *i as usize, pointwise::stored(node.ty.dtype)),
            op if op.is_source() => {
                let scalars = b.pointer_parameter(self.function, SCALARS);
                let sources = Sources { b, body: &kernel.body, scalars, scalar_count: kernel.scalars.len() };
                sources.value(v, &mut |dim| self.local_index(spot, dim))?
            }
            _ => {
                let args = node.args.iter().map(|a| self.value(*a, spot, known)).collect::<Result<Vec<_>, _>>()?;
                pointwise::apply(b, &kernel.body, v, &args)?
            }
        };
        known.insert(v, value);
        Ok(value)
    }

    /// The local index along a dim of the result in each lane.
    fn local_index(&self, spot: Spot<'c>, dim: Dim) -> Vector<'c> {
        let (b, plan, dims) = (self.g.b, self.g.plan, &self.g.kernel.body.dims);
        let parameter = |position: u32| b.index_parameter(self.function, first_index(self.g) + position);
        if let Some((inner, size)) = plan.m.digit(dims, dim) {
            let row = b.index_add(parameter(ROW), spot.row);
            return b.splat(b.index_rem(b.index_div(row, b.index(inner)), b.index(size)));
        }
        if let Some((inner, size)) = plan.n.digit(dims, dim) {
            let first = b.index_add(parameter(COLUMN), b.index(spot.column));
            let column = b.int2(IntBinary::Add, b.splat(first), b.lane_numbers());
            return b.int2(IntBinary::Rem, b.int2(IntBinary::Div, column, b.i64(inner)), b.i64(size));
        }
        // The repetitions are numbered with the last direction fastest.
        let mut inner_axes = 1;
        for axis in plan.outer.iter().rev() {
            if let Some((inner, size)) = axis.digit(dims, dim) {
                let outer = b.index_div(parameter(OUTER), b.index(inner * inner_axes));
                return b.splat(b.index_rem(outer, b.index(size)));
            }
            inner_axes *= axis.size;
        }
        b.i64(0)
    }

    fn place(&self, spot: Spot<'c>, tensor: usize, lane: Lane) -> Pointer<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        let row = b.index_mul(spot.row, b.index(plan.m.strides[tensor] * lane.bytes()));
        let start = b.at(b.pointer_parameter(self.function, TENSORS + tensor as u32), row);
        b.at_const(start, spot.column * plan.n.strides[tensor] * lane.bytes())
    }

    fn offsets(&self, stride: i64, lane: Lane) -> Vector<'c> {
        let b = self.g.b;
        b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(stride * lane.bytes()))
    }

    fn read(&self, spot: Spot<'c>, tensor: usize, lane: Lane) -> Vector<'c> {
        let b = self.g.b;
        let place = self.place(spot, tensor, lane);
        match self.g.plan.n.strides[tensor] {
            0 => b.load_splat(place, lane),
            1 => b.load(place, lane, spot.mask),
            stride => b.gather(place, self.offsets(stride, lane), lane, spot.mask),
        }
    }
}
