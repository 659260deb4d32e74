//! The sharding algebra: for each op, its loops and what splitting one of them over ranks does.
//!
//! An op is a loop nest over named dims. Splitting a *map* loop splits operands and result alike; splitting a *sum* or *max*
//! loop splits operands and leaves the result partial; a *block* loop must be whole on every rank. This table is all that
//! partitioning knows of an op, and all that the verifier of the `Sharded` level believes.
//!
//! A *ring* loop is two loops of attention together, over queries and over keys. Every rank has a part of the queries and a part of the keys;
//! the keys go round, so that each part of the queries meets each part of the keys on some rank, once. The result is complete.
//! **Lemma** (Liu et al. 2023, after Milakov & Gimelshein 2018): let attention to the keys of block j alone be `out_j`, with log-sum-exp
//! `lse_j`, for disjoint blocks that cover all keys. Then attention to all keys has `lse = log(sum_j exp(lse_j))` and `out = sum_j exp(lse_j - lse) out_j`,
//! as `exp(lse_j)` is the block's part of the softmax's denominator, and `exp(lse_j) out_j` its part of the numerator; a block
//! that a query sees nothing of has `exp(lse_j) = 0`. Gradients are sums over pairs of a query and a key, of terms that need the
//! query's `lse` and `delta` over all keys and nothing else of other keys: dq is the sum over blocks of keys, dk and dv are those over blocks of queries.

use crate::dim::Dim;
use crate::graph::{Body, Value};
use crate::op::{Binary, Op, OpKind, Reduce, Unary};

/// What splitting a loop over ranks does to the op's operands and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoopKind {
    /// Operands and result are split alike.
    Map,
    /// Operands are split, and the result is a partial sum.
    Sum,
    /// Operands are split, and the result is a partial maximum.
    Max,
    /// It must be whole on every rank.
    Block,
    /// Queries and keys of attention together: the keys go round.
    Ring,
}

/// A loop of an op: the dim that it runs along in each operand and in the result, where they have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// What splitting it does.
    pub kind: LoopKind,
    /// Per operand, the dim that it runs along there; `None` if the operand has no such dim.
    pub args: Vec<Option<Dim>>,
    /// The dim that it runs along in the result; `None` if the result has none.
    pub out: Option<Dim>,
}

impl Loop {
    /// The names it goes by, the result's first.
    pub fn dims(&self) -> impl Iterator<Item = Dim> + '_ {
        self.out.iter().chain(self.args.iter().flatten()).copied()
    }
}

/// How an op can be split, and in which of its operands it is linear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algebra {
    /// All loops of the op, also those that must stay whole.
    pub loops: Vec<Loop>,
    /// Operand slots in which the op is linear, the others fixed.
    pub linear: Vec<usize>,
    /// Linear in all operands together (a sum).
    pub joint: bool,
}

/// The algebra of node `v`. Sources have none: their sharding follows from rest, or is free.
pub fn algebra(body: &Body, v: Value) -> Algebra {
    let node = &body[v];
    let arg_dims: Vec<&[Dim]> = node.args.iter().map(|a| body.dims_of(*a)).collect();
    let out_dims = &node.ty.dims;
    // There is one loop per dim. `map_or_sum` is its usual kind: a dim of the result is mapped, one of operands alone
    // summed.
    let by_name = |kind: &dyn Fn(Dim) -> LoopKind| -> Vec<Loop> {
        let mut seen: Vec<Dim> = vec![];
        for d in out_dims.iter().chain(arg_dims.iter().copied().flatten()) {
            if !seen.contains(d) {
                seen.push(*d);
            }
        }
        seen.into_iter()
            .map(|d| Loop {
                kind: kind(d),
                args: arg_dims.iter().map(|a| a.contains(&d).then_some(d)).collect(),
                out: out_dims.contains(&d).then_some(d),
            })
            .collect()
    };
    let map_or_sum = |d: Dim| if out_dims.contains(&d) { LoopKind::Map } else { LoopKind::Sum };
    let blocked = |dims: &[Dim]| by_name(&|d| if dims.contains(&d) { LoopKind::Block } else { map_or_sum(d) });
    let is_zero = |slot: usize| matches!(&body[node.args[slot]].op, Op::Const(c) if c.0 == 0.0);
    let plain = |loops: Vec<Loop>, linear: &[usize]| Algebra { loops, linear: linear.to_vec(), joint: false };
    match &node.op {
        Op::Add => Algebra { loops: by_name(&map_or_sum), linear: (0..node.args.len()).collect(), joint: true },
        Op::Unary(Unary::Neg) | Op::StopGradient | Op::Expand | Op::Cut => plain(by_name(&map_or_sum), &[0]),
        Op::Cast => {
            let float = node.ty.dtype.is_float() && body[node.args[0]].ty.dtype.is_float();
            plain(by_name(&map_or_sum), if float { &[0] } else { &[] })
        }
        Op::Binary(Binary::Mul) => plain(by_name(&map_or_sum), if node.ty.dtype.is_float() { &[0, 1] } else { &[] }),
        Op::Binary(Binary::Div) => {
            plain(by_name(&map_or_sum), if node.ty.dtype.is_float() { crate::fault!("algebra.div.linear", &[0, 1][..], &[0][..]) } else { &[] })
        }
        // A zero is partial and replicated at once, so the select is linear in its other branch.
        Op::Select => match (crate::fault!("algebra.select.linear", true, is_zero(1)), is_zero(2)) {
            (false, true) => plain(by_name(&map_or_sum), &[1]),
            (true, false) => plain(by_name(&map_or_sum), &[2]),
            _ => plain(by_name(&map_or_sum), &[]),
        },
        Op::View { from, to } => {
            let root = |d: Dim| body.dims.original(d);
            match (from.as_slice(), to.as_slice()) {
                // Renaming a dim to its copy is one loop, whose parts are the same on both sides.
                (&[a], &[b]) if root(a) == root(b) => {
                    let mut loops = by_name(&map_or_sum);
                    loops.retain(|l| l.out != Some(b) && l.args[0] != Some(a));
                    loops.push(Loop { kind: LoopKind::Map, args: vec![Some(a)], out: Some(b) });
                    plain(loops, &[0])
                }
                _ => plain(blocked(&[from.as_slice(), to].concat()), &[0]),
            }
        }
        Op::Slice { from, to, .. } => plain(blocked(&[&[*from], to.as_slice()].concat()), &[0]),
        Op::Pad { from, to, .. } => plain(blocked(&[from.as_slice(), &[*to]].concat()), &[0]),
        Op::Shard { from, to, .. } => plain(blocked(&[*from, *to]), &[0]),
        Op::Concat { from, to } => plain(blocked(&[from.as_slice(), &[*to]].concat()), &[]),
        Op::Dot { .. } => plain(by_name(&map_or_sum), &[0, 1]),
        Op::GroupedDot { rows, experts, .. } => plain(blocked(&[*rows, *experts]), &[0, 1]),
        Op::Reduce { kind, .. } => match kind {
            Reduce::Sum => plain(by_name(&map_or_sum), &[0]),
            Reduce::Max => plain(
                by_name(&|d| if out_dims.contains(&d) { LoopKind::Map } else { crate::fault!("algebra.max.sum", LoopKind::Sum, LoopKind::Max) }),
                &[],
            ),
            Reduce::Any => plain(by_name(&|d| if out_dims.contains(&d) { LoopKind::Map } else { LoopKind::Block }), &[]),
        },
        Op::ArgMax { over } => plain(blocked(&[*over]), &[]),
        Op::Cumsum { over, .. } => plain(blocked(&[*over]), &[0]),
        // A rank looks up the rows it has; the others are zero.
        Op::Gather { .. } | Op::Scatter { .. } => plain(by_name(&map_or_sum), &[0]),
        // Tokens stay on their ranks; the op on the dispatched rows determines which expert has which row.
        Op::Dispatch(r) | Op::Combine(r) => plain(blocked(&[r.experts]), &[0]),
        // Gradients of keys sum over the queries that share them: their positions, and the heads of a group.
        Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => {
            let mut loops = blocked(&[a.keys, a.d, a.values]);
            // An operand with an element per query and key (a bias) cannot travel round the ring with either.
            let of_pairs = arg_dims.iter().any(|dims| dims.contains(&a.at) && dims.contains(&a.keys));
            if crate::fault!("algebra.attention.pairs", false, of_pairs) {
                return plain(loops, &[]);
            }
            let along = |dims: &[Dim]| [a.at, a.keys].into_iter().find(|d| dims.contains(d));
            loops.push(Loop { kind: LoopKind::Ring, args: arg_dims.iter().map(|dims| along(dims)).collect(), out: along(out_dims) });
            plain(loops, &[])
        }
        op => match op.kind() {
            OpKind::Stored | OpKind::Generated | OpKind::Pointwise | OpKind::Mark | OpKind::Reshard | OpKind::Exchange => {
                plain(by_name(&map_or_sum), &[])
            }
            OpKind::View | OpKind::Move | OpKind::Contraction | OpKind::Reduction | OpKind::Lookup | OpKind::Routing => {
                unreachable!("invariant: each has its own loops")
            }
        },
    }
}

/// The dims in whose order of elements an op computes, so that they cannot be stored in another one. All others do not care, or ask for
/// indices, which are the model's.
pub fn goes_by_order(body: &Body, op: &Op) -> Vec<Dim> {
    match op {
        Op::View { from, to } => match (from.as_slice(), to.as_slice()) {
            (&[a], &[b]) if body.dims.original(a) == body.dims.original(b) => vec![],
            _ => [from.as_slice(), to].concat(),
        },
        Op::Slice { from, to, .. } => [&[*from], to.as_slice()].concat(),
        Op::Pad { from, to, .. } => [from.as_slice(), &[*to]].concat(),
        Op::Concat { from, to } => [from.as_slice(), &[*to]].concat(),
        Op::ArgMax { over } | Op::Cumsum { over, .. } => crate::fault!("algebra.order.cumsum", vec![], vec![*over]),
        Op::Gather { dim } | Op::Scatter { dim } => vec![*dim],
        Op::GroupedDot { rows, experts, .. } => vec![*rows, *experts],
        Op::Dispatch(r) | Op::Combine(r) => vec![r.experts],
        Op::Shard { .. } | Op::Dot { .. } | Op::Reduce { .. } | Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..) => vec![],
        op => match op.kind() {
            OpKind::Stored | OpKind::Generated | OpKind::Pointwise | OpKind::Mark | OpKind::Reshard | OpKind::Exchange => vec![],
            OpKind::View | OpKind::Move | OpKind::Contraction | OpKind::Reduction | OpKind::Lookup | OpKind::Routing => {
                unreachable!("invariant: each is named above")
            }
        },
    }
}
