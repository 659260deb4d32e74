//! Building bodies node by node, with types inferred.

use crate::dim::Dim;
use crate::graph::{Body, Origin, Type, Value};
use crate::infer;
use crate::op::{Binary, Compare, DType, Op, Real, Reduce, Unary};

/// Appends nodes to a body under one origin at a time. For passes, whose nodes are right by construction: a node
/// that breaks its type rule panics as a broken invariant.
pub struct Builder<'a> {
    /// Where nodes are appended.
    pub body: &'a mut Body,
    /// Where nodes that are appended come from.
    pub origin: Origin,
}

impl Builder<'_> {
    /// Appends an op whose result type follows from its operands; a sum has their dtype.
    pub fn op(&mut self, op: Op, args: &[Value]) -> Value {
        let dtype = args.first().map_or(DType::F32, |a| self.body[*a].ty.dtype);
        self.typed(op, args, Type::scalar(dtype))
    }

    /// Appends an op; `declared` supplies what operands do not determine.
    pub fn typed(&mut self, op: Op, args: &[Value], declared: Type) -> Value {
        let types: Vec<&Type> = args.iter().map(|a| &self.body[*a].ty).collect();
        let ty = match infer::infer(self.body, &op, &types, &declared) {
            Ok(ty) => ty,
            Err(e) => unreachable!("invariant: a pass builds well-typed nodes: {e}"),
        };
        self.body.push(op, args, ty, self.origin.clone())
    }

    /// The dims of a value, in storage order.
    pub fn dims(&self, v: Value) -> Vec<Dim> {
        self.body.dims_of(v).to_vec()
    }

    /// An f32 number.
    pub fn constant(&mut self, c: f64) -> Value {
        self.typed(Op::Const(Real(c)), &[], Type::scalar(DType::F32))
    }

    /// A number of the dtype of `x`.
    pub fn constant_like(&mut self, c: f64, x: Value) -> Value {
        let dtype = self.body[x].ty.dtype;
        self.typed(Op::Const(Real(c)), &[], Type::scalar(dtype))
    }

    /// An i32 number.
    pub fn int(&mut self, c: i64) -> Value {
        self.typed(Op::Const(Real(c as f64)), &[], Type::scalar(DType::I32))
    }

    /// A pointwise function of `x`.
    pub fn unary(&mut self, op: Unary, x: Value) -> Value {
        self.op(Op::Unary(op), &[x])
    }

    /// `-x`.
    pub fn neg(&mut self, x: Value) -> Value {
        self.unary(Unary::Neg, x)
    }

    /// A pointwise function of `x` and `y`, broadcast to the dims of both.
    pub fn binary(&mut self, op: Binary, x: Value, y: Value) -> Value {
        self.op(Op::Binary(op), &[x, y])
    }

    /// `x * y`, broadcast to the dims of both.
    pub fn mul(&mut self, x: Value, y: Value) -> Value {
        self.binary(Binary::Mul, x, y)
    }

    /// `x / y`, broadcast to the dims of both; floored for ints.
    pub fn div(&mut self, x: Value, y: Value) -> Value {
        self.binary(Binary::Div, x, y)
    }

    /// `x * c`, with the constant in the dtype of `x`.
    pub fn scale(&mut self, x: Value, c: f64) -> Value {
        let c = self.constant_like(c, x);
        self.mul(x, c)
    }

    /// The sum of one or more values; of one, the value itself.
    pub fn add(&mut self, terms: &[Value]) -> Value {
        match terms {
            [x] => *x,
            _ => self.op(Op::Add, terms),
        }
    }

    /// `x - y`, as the sum of `x` and `-y`.
    pub fn sub(&mut self, x: Value, y: Value) -> Value {
        let y = self.neg(y);
        self.add(&[x, y])
    }

    /// The bools of a comparison of `x` with `y`, broadcast to the dims of both.
    pub fn compare(&mut self, op: Compare, x: Value, y: Value) -> Value {
        self.op(Op::Compare(op), &[x, y])
    }

    /// `x` where the bool `c` holds, else `y`.
    pub fn select(&mut self, c: Value, x: Value, y: Value) -> Value {
        self.op(Op::Select, &[c, x, y])
    }

    /// `x` converted to a dtype; `x` itself if it has that one.
    pub fn cast(&mut self, x: Value, dtype: DType) -> Value {
        let dims = self.dims(x);
        if self.body[x].ty.dtype == dtype { x } else { self.typed(Op::Cast, &[x], Type::new(dtype, dims)) }
    }

    /// Sum over those of `over` that `x` has.
    pub fn sum(&mut self, x: Value, over: &[Dim]) -> Value {
        let over: Vec<Dim> = over.iter().copied().filter(|d| self.body[x].ty.has(*d)).collect();
        if over.is_empty() { x } else { self.op(Op::Reduce { kind: Reduce::Sum, over }, &[x]) }
    }

    /// Summed to the dims of `like`: the adjoint of broadcasting.
    pub fn sum_to(&mut self, x: Value, like: &[Dim]) -> Value {
        let over: Vec<Dim> = self.dims(x).into_iter().filter(|d| !like.contains(d)).collect();
        self.sum(x, &over)
    }

    /// Broadcast to `dims`, in that storage order.
    pub fn expand(&mut self, x: Value, dims: &[Dim]) -> Value {
        let same = dims.len() == self.dims(x).len();
        let dtype = self.body[x].ty.dtype;
        if same { x } else { self.typed(Op::Expand, &[x], Type::new(dtype, dims)) }
    }
}
