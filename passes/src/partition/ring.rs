//! Ring attention (Liu et al. 2023): keys and values go round the ranks that split them, and each rank computes with the ones it has.
//!
//! With c ranks there are c blocks of keys. A rank begins with its own block; c - 1 times it gets the next one from the rank before it,
//! which does not depend on what is computed, so that a block can be under way while the one before it is used. Results of blocks are
//! merged by their log-sum-exps (the lemma is in [`ir::algebra`]). Gradients of keys and values travel with their block, each rank
//! adding its part, and come home with the c-th step.

use super::emit::Emitter;
use ir::dim::Dim;
use ir::graph::{Origin, Type, Value};
use ir::local::Chunk;
use ir::mesh::{Axis, SubAxis};
use ir::op::{Attention, AttentionGrad, Binary, Collective, DType, Op, Real, Unary};
use ir::reason::{AvoidedBy, Reason};

/// A log-sum-exp below all that occur: where no key is seen, differences from it are taken instead of from minus infinity.
const FLOOR: f64 = -1e30;
/// The least sum of exponentials by which is divided, where the sum is zero.
const TINY: f64 = 1e-30;

fn reason() -> Reason {
    Reason::avoided("attention needs the keys of every rank of its ring", AvoidedBy::OneRank(Axis::Cp))
}

fn attention(op: &Op) -> Option<&Attention> {
    match op {
        Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => Some(a),
        _ => None,
    }
}

/// A ring of one attention, as it is emitted.
struct RingAttention<'o> {
    /// Its results: values of the sharded graph.
    results: Vec<Value>,
    subs: Vec<SubAxis>,
    chunk: Chunk,
    origin: &'o Origin,
}

impl Emitter<'_> {
    fn ring_axes(&self, v: Value) -> Vec<SubAxis> {
        let (s, node) = (self.job.s, &self.job.s.graph.body[v]);
        attention(&node.op).map_or(vec![], |a| s.sharding(node.args[1]).splits(a.keys))
    }

    /// Whether a value is attention to keys that are split.
    pub(super) fn is_ring(&self, v: Value) -> bool {
        !self.ring_axes(v).is_empty()
    }

    /// Emits attention to keys that are split, and its siblings: other results of the same operands, for which the same keys go round.
    pub(super) fn ring(&mut self, v: Value, chunk: Chunk) -> Value {
        let job = self.job;
        let body = &job.s.graph.body;
        let node = &body[v];
        let a = attention(&node.op).expect("invariant: a ring is of attention");
        let gradient = matches!(node.op, Op::AttentionGrad(..));
        let inputs = |w: Value| (body[w].args[..2].to_vec(), a.further(&body[w].args).to_vec());
        let sibling = |w: &Value| {
            let other = &body[*w];
            let alike = match &other.op {
                Op::Attention(b) | Op::AttentionLse(b) => !gradient && a.without_values() == b.without_values() && inputs(*w) == inputs(v),
                Op::AttentionGrad(b, _) => gradient && a == b && other.args == node.args,
                _ => false,
            };
            alike
                && other.origin.phase == node.origin.phase
                && (job.virtual_stage[w.index()], job.chunk[w.index()]) == (job.virtual_stage[v.index()], job.chunk[v.index()])
        };
        let results: Vec<Value> = body.values().filter(sibling).collect();
        let ring = RingAttention { results, subs: self.ring_axes(v), chunk, origin: &node.origin };
        if gradient {
            self.ring_backward(&ring)
        } else {
            self.ring_forward(&ring)
        }
        self.map[&(v, chunk)]
    }

    /// The value passed on along the ring.
    fn shift(&mut self, x: Value, ring: &RingAttention) -> Value {
        let ty = self.out.body[x].ty.clone();
        let op = Op::Collective { kind: Collective::Shift, subs: ring.subs.clone(), stages: None, part: None };
        let w = self.push(op, vec![x], ty, ring.chunk, ring.origin, None);
        self.out.reasons[w.index()] = Some(reason());
        w
    }

    /// Values of one element type as one message; a single value is its own message.
    fn joined(&mut self, parts: &[Value], ring: &RingAttention) -> Value {
        if let [one] = parts {
            return *one;
        }
        let flat: Vec<(Dim, Value)> = parts
            .iter()
            .map(|w| {
                let ty = self.out.body[*w].ty.clone();
                let part = self.piece("part", self.out.body.dims.elements(&ty.dims));
                let view = Op::View { from: ty.dims, to: vec![part] };
                (part, self.push(view, vec![*w], Type::new(ty.dtype, [part]), ring.chunk, ring.origin, None))
            })
            .collect();
        let all = self.piece("message", flat.iter().map(|p| self.out.body.dims.size(p.0)).sum());
        let ty = Type::new(self.out.body[parts[0]].ty.dtype, [all]);
        let (from, args): (Vec<Dim>, Vec<Value>) = flat.into_iter().unzip();
        self.push(Op::Concat { from, to: all }, args, ty, ring.chunk, ring.origin, None)
    }

    /// The values in a message, by their types.
    fn parted(&mut self, message: Value, types: &[Type], ring: &RingAttention) -> Vec<Value> {
        if types.len() == 1 {
            return vec![message];
        }
        let all = self.out.body.dims_of(message)[0];
        let mut at = 0;
        let mut out = vec![];
        for ty in types {
            let part = self.piece("part", self.out.body.dims.elements(&ty.dims));
            let size = self.out.body.dims.size(part);
            let flat = Type::new(ty.dtype, [part]);
            let part_of = Op::Slice { from: all, to: Some(part), at };
            let x = self.push(part_of, vec![message], flat, ring.chunk, ring.origin, None);
            let view = Op::View { from: vec![part], to: ty.dims.clone() };
            out.push(self.push(view, vec![x], ty.clone(), ring.chunk, ring.origin, None));
            at += size;
        }
        out
    }

    /// The further operands of attention, and which of them belong to keys, so that they go round with these.
    fn further<'x>(&self, a: &Attention, args: &'x [Value]) -> (&'x [Value], Vec<usize>) {
        let further = a.further(args);
        (further, (0..further.len()).filter(|k| self.out.body[further[*k]].ty.has(a.keys)).collect())
    }

    /// Calls `each` with the blocks of keys in the order in which a rank has them: k, v (if asked for) and other
    /// operands of keys. The exchange for a block is emitted before the computation with the previous block.
    fn round(&mut self, own: &[Value], ring: &RingAttention, each: &mut dyn FnMut(&mut Self, &[Value])) {
        let steps: u64 = ring.subs.iter().map(|u| self.job.s.mesh[*u].size).product();
        let types: Vec<Type> = own.iter().map(|w| self.out.body[*w].ty.clone()).collect();
        // There is one message per element type, floats first, in order of appearance.
        let mut kinds: Vec<DType> = vec![];
        types.iter().filter(|t| t.dtype.is_float()).chain(types.iter().filter(|t| !t.dtype.is_float())).for_each(|t| {
            if !kinds.contains(&t.dtype) {
                kinds.push(t.dtype);
            }
        });
        let of = |kind: DType| (0..own.len()).filter(|k| types[*k].dtype == kind).collect::<Vec<usize>>();
        let mut messages: Vec<Value> = kinds.iter().map(|kind| self.joined(&of(*kind).iter().map(|k| own[*k]).collect::<Vec<_>>(), ring)).collect();
        let mut block = own.to_vec();
        for step in 0..ir::fault!("ring.blocks.last", steps - 1, steps) {
            let mut next = block.clone();
            if step + 1 < steps {
                for (kind, message) in kinds.iter().zip(&mut messages) {
                    *message = self.shift(*message, ring);
                    let members = of(*kind);
                    let wanted: Vec<Type> = members.iter().map(|k| types[*k].clone()).collect();
                    let parts = self.parted(*message, &wanted, ring);
                    members.iter().zip(parts).for_each(|(k, part)| next[*k] = part);
                }
            }
            each(self, &block);
            block = next;
        }
    }

    fn ring_forward(&mut self, ring: &RingAttention) {
        let body = &self.job.s.graph.body;
        let is = |lse: bool| ring.results.iter().copied().find(|w| matches!(body[*w].op, Op::AttentionLse(_)) == lse);
        let (out, lse) = (is(false), is(true));
        let first = out.or(lse).expect("invariant: a ring has a result");
        let args: Vec<Value> = body[first].args.iter().map(|a| self.get(*a, ring.chunk)).collect();
        let op = self.local_op(first);
        let a = attention(&op).expect("invariant: a ring is of attention").clone();
        let q = args[0];
        let (further, travel) = self.further(&a, &args);
        // Partial results are merged unrounded.
        let out_ty = Type::new(DType::F32, a.result_dims(self.out.body.dims_of(q)));
        let lse_ty = Type::new(DType::F32, out_ty.dims.iter().copied().filter(|d| *d != a.values).collect::<Vec<_>>());
        let mut own = vec![args[1]];
        own.extend(out.map(|_| args[2]));
        let first_of_keys = own.len();
        own.extend(travel.iter().map(|k| further[*k]));
        let mut sum: Option<(Option<Value>, Value)> = None;
        self.round(&own, ring, &mut |e, block| {
            let mut at = further.to_vec();
            travel.iter().zip(&block[first_of_keys..]).for_each(|(k, w)| at[*k] = ir::fault!("ring.positions.stay", at[*k], *w));
            let op = |e: &mut Self, op: Op, args: &[Value], ty: &Type| e.push(op, [args, &at].concat(), ty.clone(), ring.chunk, ring.origin, None);
            let part = out.map(|_| op(e, Op::Attention(a.clone()), &[q, block[0], block[1]], &out_ty));
            let part_lse = op(e, Op::AttentionLse(a.without_values()), &[q, block[0]], &lse_ty);
            sum = Some(match sum {
                None => (part, part_lse),
                Some(before) => e.merge(before, (part, part_lse), ring),
            });
        });
        let (sum, sum_lse) = sum.expect("invariant: a ring has ranks");
        for (v, w) in [(out, sum), (lse, Some(sum_lse))] {
            if let (Some(v), Some(w)) = (v, w) {
                let w = self.as_result(w, v, ring);
                self.map.insert((v, ring.chunk), w);
            }
        }
    }

    /// Marks a value as one of the sharded graph, in its storage order.
    fn as_result(&mut self, w: Value, v: Value, ring: &RingAttention) -> Value {
        let ty = self.local_type(v);
        let dims = self.out.body.dims_of(w).to_vec();
        let same = self.out.body[w].ty.dtype == ty.dtype;
        let w = if same { w } else { self.push(Op::Cast, vec![w], Type::new(ty.dtype, dims), ring.chunk, ring.origin, None) };
        if self.out.body[w].ty == ty {
            self.stands_for(w, v);
            return w;
        }
        self.push(Op::Expand, vec![w], ty, ring.chunk, ring.origin, Some(v))
    }

    /// Attention to two sets of keys, each given by its result and its log-sum-exp, as attention to both.
    fn merge(&mut self, x: (Option<Value>, Value), y: (Option<Value>, Value), ring: &RingAttention) -> (Option<Value>, Value) {
        let ty = self.out.body[x.1].ty.clone();
        let mut op = |op: Op, args: &[Value], ty: &Type| self.push(op, args.to_vec(), ty.clone(), ring.chunk, ring.origin, None);
        let number = Type::scalar(ty.dtype);
        let (floor, tiny) = (op(Op::Const(Real(FLOOR)), &[], &number), op(Op::Const(Real(TINY)), &[], &number));
        let top = op(Op::Binary(Binary::Max), &[x.1, y.1], &ty);
        let top = op(Op::Binary(Binary::Max), &[top, floor], &ty);
        let [a, b] = [x.1, y.1].map(|lse| {
            let below = op(Op::Binary(Binary::Sub), &[lse, top], &ty);
            op(Op::Unary(Unary::Exp), &[below], &ty)
        });
        let sum = op(Op::Add, &[a, b], &ty);
        let log = op(Op::Unary(Unary::Log), &[sum], &ty);
        let lse = op(Op::Add, &[ir::fault!("ring.merge.scale", x.1, top), log], &ty);
        let (Some(p), Some(q)) = (x.0, y.0) else { return (None, lse) };
        let sum = op(Op::Binary(Binary::Max), &[sum, tiny], &ty);
        let [a, b] = [a, b].map(|part| op(Op::Binary(Binary::Div), &[part, sum], &ty));
        let wide = self.out.body[p].ty.clone();
        let mut op = |op: Op, args: &[Value]| self.push(op, args.to_vec(), wide.clone(), ring.chunk, ring.origin, None);
        let [p, q] =
            ir::fault!("ring.merge.weights", [(p, b), (q, a)], [(p, a), (q, b)]).map(|(part, weight)| op(Op::Binary(Binary::Mul), &[part, weight]));
        (Some(op(Op::Add, &[p, q])), lse)
    }

    fn ring_backward(&mut self, ring: &RingAttention) {
        let body = &self.job.s.graph.body;
        let find = |which: AttentionGrad| ring.results.iter().copied().find(|w| matches!(&body[*w].op, Op::AttentionGrad(_, g) if *g == which));
        let dq = find(AttentionGrad::Q);
        let travels: Vec<(AttentionGrad, Value)> = [AttentionGrad::K, AttentionGrad::V].into_iter().filter_map(|w| Some((w, find(w)?))).collect();
        let first = ring.results[0];
        let args: Vec<Value> = body[first].args.iter().map(|a| self.get(*a, ring.chunk)).collect();
        let op = self.local_op(first);
        let a = attention(&op).expect("invariant: a ring is of attention").clone();
        let (further, travel) = self.further(&a, &args);
        let mut own = vec![args[1], args[2]];
        own.extend(travel.iter().map(|k| further[*k]));
        let types = |e: &Self, values: &[Value]| values.iter().map(|w| e.out.body[*w].ty.clone()).collect::<Vec<Type>>();
        // The gradient of queries stays on the rank in f32; gradients that travel have the precision of activations.
        let (q_ty, key_types) = (Type::new(DType::F32, self.out.body.dims_of(args[0])), types(self, &args[1..3]));
        let mut sum: Option<Value> = None;
        // `load` is one message with the gradients of the current block from the ranks that it has visited.
        let mut load: Option<Value> = None;
        self.round(&own, ring, &mut |e, block| {
            let mut operands = vec![args[0], block[0], block[1], args[3], args[4], args[5]];
            let first = operands.len();
            operands.extend(further);
            travel.iter().zip(&block[2..]).for_each(|(k, w)| operands[first + *k] = *w);
            load = load.map(|x| ir::fault!("ring.gradients.stay", x, e.shift(x, ring)));
            let grad = |e: &mut Self, which, ty: &Type| {
                e.push(Op::AttentionGrad(a.clone(), which), operands.clone(), ty.clone(), ring.chunk, ring.origin, None)
            };
            if dq.is_some() {
                let part = grad(e, AttentionGrad::Q, &q_ty);
                sum = Some(e.plus(sum, part, ring));
            }
            let parts: Vec<Value> = travels.iter().map(|(which, _)| grad(e, *which, &key_types[usize::from(*which == AttentionGrad::V)])).collect();
            if !parts.is_empty() {
                let part = e.joined(&parts, ring);
                load = Some(e.plus(load, part, ring));
            }
        });
        if let (Some(v), Some(w)) = (dq, sum) {
            let w = self.as_result(w, v, ring);
            self.map.insert((v, ring.chunk), w);
        }
        if let Some(load) = load {
            let home = ir::fault!("ring.gradients.away", load, self.shift(load, ring));
            let wanted: Vec<Type> = travels.iter().map(|(which, _)| key_types[usize::from(*which == AttentionGrad::V)].clone()).collect();
            let parts = self.parted(home, &wanted, ring);
            for ((_, v), w) in travels.iter().zip(parts) {
                let w = self.as_result(w, *v, ring);
                self.map.insert((*v, ring.chunk), w);
            }
        }
    }

    fn plus(&mut self, sum: Option<Value>, part: Value, ring: &RingAttention) -> Value {
        let Some(sum) = sum else { return part };
        // The dims of the part are those of its own message.
        let ty = self.out.body[sum].ty.clone();
        let from = self.out.body.dims_of(part).to_vec();
        let part = match from == ty.dims {
            true => part,
            false => self.push(Op::View { from, to: ty.dims.clone() }, vec![part], ty.clone(), ring.chunk, ring.origin, None),
        };
        self.push(Op::Add, vec![sum, part], ty, ring.chunk, ring.origin, None)
    }
}
