//! Updates of parameters that each belong whole to one rank: once for each that a rank has.

use super::emit::UpdateSharder;
use ir::graph::{Type, Value};
use ir::local::Chunk;
use ir::op::{DType, Op, Real};
use std::collections::HashMap;

impl UpdateSharder<'_> {
    /// The new values of a rank's part of a bucket, and its states, from those of its parameters, which are
    /// `distance` apart.
    pub(super) fn whole(&mut self, k: usize, distance: u64) -> (Value, Vec<Value>) {
        let first = &self.planned[k].members[0];
        let roots: Vec<Value> = [first.new].into_iter().chain(first.states.iter().copied()).collect();
        let mut made: Vec<Vec<Value>> = vec![vec![]; roots.len()];
        let mut parts: HashMap<Value, Value> = HashMap::new();
        for at in (0..self.planned[k].part.len()).step_by(distance as usize) {
            let at = ir::fault!("zero.whole.first", 0, at);
            let mut known: HashMap<Value, Value> = HashMap::new();
            for (root, made) in roots.iter().zip(&mut made) {
                made.push(self.of_one(k, *root, at, &mut parts, &mut known));
            }
        }
        let joined: Vec<Value> = roots.iter().zip(made).map(|(root, made)| self.joined(k, *root, made, distance)).collect();
        (joined[0], ir::fault!("zero.whole.momentum", vec![joined[0]; joined.len() - 1], joined[1..].to_vec()))
    }

    /// A value of the update of the parameter that begins at this element of a rank's part.
    fn of_one(&mut self, k: usize, v: Value, at: u64, parts: &mut HashMap<Value, Value>, known: &mut HashMap<Value, Value>) -> Value {
        let first = &self.planned[k].members[0];
        let node = &self.w.old.body[v];
        if let Some(w) = known.get(&v) {
            return *w;
        }
        if v != first.gradient && !first.own.contains(&v) {
            return self.w.new_value(v);
        }
        let w = if v == first.gradient || matches!(node.op, Op::Param(_) | Op::State(..)) {
            let part = match parts.get(&v) {
                Some(part) => *part,
                None if v == first.gradient => self.gradient(k),
                None => self.old(k, v, Chunk::Update),
            };
            parts.insert(v, part);
            let (dtype, origin) = (node.ty.dtype, node.origin.clone());
            let one = self.w.dim("piece", self.w.old.body.dims.elements(&first.dims));
            let cut = Op::Slice { from: self.parts[k], to: Some(one), at };
            let cut = self.w.push(cut, vec![part], Type::new(dtype, [one]), Chunk::Update, &origin);
            let view = Op::View { from: vec![one], to: first.dims.clone() };
            self.w.push(view, vec![cut], Type::new(dtype, first.dims.clone()), Chunk::Update, &origin)
        } else {
            let args = node.args.iter().map(|a| self.of_one(k, *a, at, parts, known)).collect();
            let w = self.w.push(node.op.clone(), args, node.ty.clone(), Chunk::Update, &node.origin);
            self.w.out.reasons[w.index()].clone_from(&self.w.old.reasons[v.index()]);
            w
        };
        known.insert(v, w);
        w
    }

    /// Joins the values of a rank's parameters into its part of the bucket.
    fn joined(&mut self, k: usize, root: Value, made: Vec<Value>, distance: u64) -> Value {
        let first = &self.planned[k].members[0];
        let origin = self.w.old.body[root].origin.clone();
        let elements = self.w.old.body.dims.elements(&first.dims);
        let own = self.parts[k];
        let f32 = |d| Type::new(DType::F32, [d]);
        if made.len() == 1 && elements == distance {
            let view = Op::View { from: first.dims.clone(), to: vec![own] };
            return self.w.push(view, made, f32(own), Chunk::Update, &origin);
        }
        let (mut from, mut args) = (vec![], vec![]);
        for v in ir::fault!("zero.whole.order", made.into_iter().rev().collect::<Vec<_>>(), made) {
            let one = self.w.dim("piece", elements);
            let view = Op::View { from: first.dims.clone(), to: vec![one] };
            args.push(self.w.push(view, vec![v], f32(one), Chunk::Update, &origin));
            from.push(one);
            if elements < distance {
                let gap = self.w.dim("padding", distance - elements);
                let zero = self.w.push(Op::Const(Real(0.0)), vec![], Type::scalar(DType::F32), Chunk::Update, &origin);
                args.push(self.w.push(Op::Expand, vec![zero], f32(gap), Chunk::Update, &origin));
                from.push(gap);
            }
        }
        self.w.push(Op::Concat { from, to: own }, args, f32(own), Chunk::Update, &origin)
    }
}
