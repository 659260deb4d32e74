//! Attention whose keys go round, as a refinement of attention: the lemma is in [`ir::algebra`].
//!
//! A rank at place r of c has, n turns later, the block of keys of rank r - n. Shown is that
//! - each part of a result is of the op's own queries and of one block, with the values and positions of the same
//!   block;
//! - two parts are merged as the lemma says, `exp(lse - lse of both)` of each, where no number is too small and no
//!   divisor zero;
//! - a result's parts are those of all c blocks, each once; a gradient of queries is the sum of these;
//! - a gradient of keys or values, which goes round with its block, has been added to on all c ranks, on each once,
//!   and is home.

use super::shards::{Local, ShardView};
use super::stage::Stage;
use crate::Invariant;
use crate::violation::Checked;
use ir::dim::Dim;
use ir::graph::{Body, Node, Value};
use ir::mesh::SubAxis;
use ir::op::{Attention, AttentionGrad, Binary, Collective, Op, Unary};
use std::collections::BTreeSet;
use std::rc::Rc;

fn attention(op: &Op) -> Option<&Attention> {
    match op {
        Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => Some(a),
        _ => None,
    }
}

/// The ring that a node is shown to be a part of.
struct Ring {
    /// The op whose ring it is.
    v: Value,
    subs: Vec<SubAxis>,
    ranks: u64,
    w: Value,
}

/// A gradient that goes round: the ranks that have added to it, counted backwards from here, and whose block it
/// belongs to.
struct RingGradient {
    from: BTreeSet<u64>,
    block: u64,
}

const BROKEN: &str = "it is no step of a ring";

impl<'l> Stage<'_, 'l> {
    fn ring_axes(&self, v: Value) -> Vec<SubAxis> {
        let s = self.shards.s;
        attention(&s.graph.body[v].op).map_or(vec![], |a| s.sharding(s.graph.body[v].args[1]).splits(a.keys))
    }

    pub fn is_ring(&self, v: Value) -> bool {
        !self.ring_axes(v).is_empty()
    }

    /// Shows that a node holds attention to the keys of all ranks.
    pub fn ring(&mut self, w: Value, v: Value) -> Checked<()> {
        let s = self.shards.s;
        let mut subs = self.ring_axes(v);
        subs.sort_unstable();
        let ranks = subs.iter().map(|u| s.mesh[*u].size).product();
        let r = Ring { v, subs, ranks, w };
        let mut x = w;
        // The result may be rounded, and its dims may be in another order.
        while let Op::Cast | Op::Expand = self.local.body[x].op {
            let arg = self.of_ring(x, &r)?.args[0];
            if self.local.body.dims_of(arg).len() != self.local.body.dims_of(x).len() {
                return Err(Invariant::RingStep.breach(BROKEN));
            }
            x = arg;
        }
        let all: BTreeSet<u64> = (0..ranks).collect();
        let blocks = match s.graph.body[v].op {
            Op::Attention(_) => self.merged(x, &r)?,
            Op::AttentionLse(_) => self.blocks(None, x, &r)?,
            Op::AttentionGrad(_, AttentionGrad::Q) => self.summed(x, &r)?,
            Op::AttentionGrad(_, AttentionGrad::K | AttentionGrad::V) => {
                let load = self.load(x, None, None, &r)?;
                if load.block != 0 {
                    return Err(Invariant::RingHome.breach("the gradient of a block is not where its block is"));
                }
                load.from
            }
            _ => return Err(Invariant::RingStep.breach(BROKEN)),
        };
        if blocks == all { Ok(()) } else { Err(Invariant::RingBlocks.breach(format!("of {ranks} blocks it has {blocks:?}"))) }
    }

    /// A node in the ring's own chunk.
    fn of_ring(&self, w: Value, r: &Ring) -> Checked<&'l Node> {
        let l = self.local;
        let beside = l.chunks[w.index()] == l.chunks[r.w.index()] && (w == r.w || !l.accumulate[w.index()]);
        if beside { Ok(&l.body[w]) } else { Err(Invariant::RingStep.breach(BROKEN)) }
    }

    fn operands<const N: usize>(&self, w: Value, op: &Op, r: &Ring) -> Checked<[Value; N]> {
        let node = self.of_ring(w, r)?;
        match node.args.clone().try_into() {
            Ok(args) if node.op == *op => Ok(args),
            _ => Err(Invariant::RingStep.breach(format!("{w} is not the `{}` of a merge", op.name()))),
        }
    }

    /// The operand of a maximum with a constant that keeps to a bound.
    fn bounded(&self, w: Value, bound: impl Fn(f64) -> bool, r: &Ring) -> Checked<Value> {
        let [x, c] = self.operands(w, &Op::Binary(Binary::Max), r)?;
        match &self.local.body[c].op {
            Op::Const(c) if bound(c.0) => Ok(x),
            _ => Err(Invariant::RingBounds.breach(format!("{w} is not bounded"))),
        }
    }

    /// For a sum of two exponentials below their greater exponent: the exponentials, the exponents, and the greater
    /// one.
    fn weights(&self, sum: Value, r: &Ring) -> Checked<([Value; 2], [Value; 2], Value)> {
        let parts: [Value; 2] = self.operands(sum, &Op::Add, r)?;
        let mut tops = [sum; 2];
        let mut exponents = [sum; 2];
        for k in 0..2 {
            let [below] = self.operands(parts[k], &Op::Unary(Unary::Exp), r)?;
            [exponents[k], tops[k]] = self.operands(below, &Op::Binary(Binary::Sub), r)?;
        }
        let both = self.bounded(tops[0], |c| (-1e35..=-1e29).contains(&c), r)?;
        let same = tops[0] == tops[1] && self.operands(both, &Op::Binary(Binary::Max), r)? == exponents;
        if same { Ok((parts, exponents, tops[0])) } else { Err(Invariant::RingMerge.breach(format!("{sum} is no sum below a common exponent"))) }
    }

    /// The two parts that a node merges, and the sum of their weights.
    fn parts(&self, w: Value, r: &Ring) -> Checked<([Value; 2], Value)> {
        let terms: [Value; 2] = self.operands(w, &Op::Add, r)?;
        let mut parts = [w; 2];
        let mut sums = [w; 2];
        let mut own = [w; 2];
        for k in 0..2 {
            let [part, weight] = self.operands(terms[k], &Op::Binary(Binary::Mul), r)?;
            let [weight, over] = self.operands(weight, &Op::Binary(Binary::Div), r)?;
            (parts[k], own[k]) = (part, weight);
            sums[k] = self.bounded(over, |c| c > 0.0 && c <= 1e-29, r)?;
        }
        let same = sums[0] == sums[1] && self.weights(sums[0], r)?.0 == own;
        if same { Ok((parts, sums[0])) } else { Err(Invariant::RingMerge.breach(format!("{w} does not weigh its parts by their own sums"))) }
    }

    /// The blocks of a merged result.
    fn merged(&mut self, w: Value, r: &Ring) -> Checked<BTreeSet<u64>> {
        let (parts, sum) = self.parts(w, r)?;
        let (_, lse, _) = self.weights(sum, r)?;
        let [a, b] = [self.blocks(Some(parts[0]), lse[0], r)?, self.blocks(Some(parts[1]), lse[1], r)?];
        apart(a, b)
    }

    /// The blocks of a log-sum-exp and, if there is one, of a result that has it.
    fn blocks(&mut self, out: Option<Value>, lse: Value, r: &Ring) -> Checked<BTreeSet<u64>> {
        if let Op::AttentionLse(_) = self.of_ring(lse, r)?.op {
            let turn = self.block(lse, r)?;
            if let Some(w) = out
                && (!matches!(self.local.body[w].op, Op::Attention(_)) || self.block(w, r)? != turn)
            {
                return Err(Invariant::RingMerge.breach(format!("{w} is not the attention of {lse}")));
            }
            return Ok([turn].into());
        }
        let [top, log] = self.operands(lse, &Op::Add, r)?;
        let [sum] = self.operands(log, &Op::Unary(Unary::Log), r)?;
        let (_, exponents, greater) = self.weights(sum, r)?;
        if top != greater {
            return Err(Invariant::RingMerge.breach(format!("{lse} is no log-sum-exp")));
        }
        let parts = match out {
            None => [None, None],
            Some(w) => match self.parts(w, r)? {
                (parts, own) if own == sum => parts.map(Some),
                _ => return Err(Invariant::RingMerge.breach(format!("{w} is not merged as its log-sum-exp is"))),
            },
        };
        let [a, b] = [self.blocks(parts[0], exponents[0], r)?, self.blocks(parts[1], exponents[1], r)?];
        apart(a, b)
    }

    /// The blocks of a sum of gradients of queries.
    fn summed(&mut self, w: Value, r: &Ring) -> Checked<BTreeSet<u64>> {
        let node = self.of_ring(w, r)?;
        if node.op != Op::Add {
            return Ok([self.block(w, r)?].into());
        }
        let args = node.args.clone();
        args.into_iter().try_fold(BTreeSet::new(), |all, a| apart(all, self.summed(a, r)?))
    }

    /// A gradient that goes round. It is whole, or the piece `(first element, elements)` of a message, whose
    /// row-major elements have these dims.
    fn load(&mut self, w: Value, piece: Option<(u64, u64)>, dims: Option<&[Dim]>, r: &Ring) -> Checked<RingGradient> {
        let body: &'l Body = &self.local.body;
        let node = self.of_ring(w, r)?;
        let broken = || Err(Invariant::RingStep.breach(format!("{w}: {BROKEN}")));
        match &node.op {
            Op::Collective { kind: Collective::Shift, subs, stages: None, part: None } => {
                let mut own = subs.clone();
                own.sort_unstable();
                if own != r.subs {
                    return broken();
                }
                let back = |n: u64| (n + 1) % r.ranks;
                let load = self.load(node.args[0], piece, dims, r)?;
                Ok(RingGradient { from: load.from.into_iter().map(back).collect(), block: back(load.block) })
            }
            Op::Add => {
                let mut all: Option<RingGradient> = None;
                for a in node.args.clone() {
                    let load = self.load(a, piece, dims, r)?;
                    all = Some(match all {
                        None => load,
                        Some(before) if before.block == load.block => RingGradient { from: apart(before.from, load.from)?, block: load.block },
                        Some(_) => return Err(Invariant::RingHome.breach("gradients of different blocks are added")),
                    });
                }
                all.map_or_else(broken, Ok)
            }
            Op::Slice { to: Some(to), at, .. } if piece.is_none() => self.load(node.args[0], Some((*at, body.dims.size(*to))), dims, r),
            Op::View { from, to } => match (from.as_slice(), to.as_slice()) {
                ([a], [b]) if body.dims.size(*a) == body.dims.size(*b) => self.load(node.args[0], piece, dims, r),
                ([_], all) if all == node.ty.dims && dims.is_none() => self.load(node.args[0], piece, Some(all), r),
                (all, [_]) if all == body.dims_of(node.args[0]) && dims == Some(all) && piece.is_none() => self.load(node.args[0], None, None, r),
                _ => broken(),
            },
            Op::Concat { from, .. } => {
                let mut start = 0;
                for (a, d) in node.args.iter().zip(from) {
                    let size = body.dims.size(*d);
                    if piece == Some((start, size)) {
                        return self.load(*a, None, dims, r);
                    }
                    start += size;
                }
                broken()
            }
            Op::AttentionGrad(..) if piece.is_none() && dims.is_none() => Ok(RingGradient { from: [0].into(), block: self.block(w, r)? }),
            _ => broken(),
        }
    }

    /// The block, counted in turns, that an attention op of the ring reads.
    fn block(&mut self, w: Value, r: &Ring) -> Checked<u64> {
        let (local, s) = (self.local, self.shards.s);
        let (node, g) = (self.of_ring(w, r)?.clone(), &s.graph.body[r.v]);
        let (Some(a), Some(b)) = (attention(&g.op), attention(&node.op)) else {
            return Err(Invariant::RingStep.breach(format!("{w} is no attention")));
        };
        let same_kind = match (&node.op, &g.op) {
            (Op::AttentionLse(_), Op::Attention(_) | Op::AttentionLse(_)) | (Op::Attention(_), Op::Attention(_)) => true,
            (Op::AttentionGrad(_, x), Op::AttentionGrad(_, y)) => x == y,
            _ => false,
        };
        // A log-sum-exp does not read the values.
        let wanted = match &node.op {
            Op::AttentionLse(_) => [&g.args[..2], a.further(&g.args)].concat(),
            _ => g.args.clone(),
        };
        if !same_kind || wanted.len() != node.args.len() {
            return Err(Invariant::RingOperands.breach(format!("{w} is another attention than {}", r.v)));
        }
        // The keys, the values, and the program's operands with the dim of keys go round the ring.
        let first = wanted.len() - a.scoring.operands();
        let keys = |k: usize| {
            k == 1 || k == 2 && k < first && !matches!(node.op, Op::AttentionLse(_)) || k >= first && s.graph.body[wanted[k]].ty.has(a.keys)
        };
        let mut turn = None;
        let mut pairs = vec![];
        for (k, (x, v)) in node.args.iter().zip(&wanted).enumerate() {
            let held = match self.seen(*x, local.chunks[w.index()])? {
                Some(Local::One(held)) => held,
                _ => return Err(Invariant::RingOperands.breach(format!("operand {x} of {w} is no value"))),
            };
            let own = match &held.turn {
                None => 0,
                Some((subs, n)) if *subs == r.subs => *n,
                Some(_) => return Err(Invariant::RingOperands.breach(format!("{x} goes round another ring"))),
            };
            let home = Rc::new(ShardView { turn: None, ..(*held).clone() });
            let fits = if keys(k) { *turn.get_or_insert(own) == own } else { own == 0 };
            if !fits || home != self.want(*v, local.chunks[w.index()])? {
                return Err(Invariant::RingOperands.breach(format!("operand {x} of {w} does not hold its block of {v}")));
            }
            pairs.push((*v, local.body.dims_of(*x).to_vec()));
        }
        let names = self.names(&pairs)?;
        let mapped = a.map_dims(&mut |d| names.iter().find(|n| n.0 == d).map_or(d, |n| n.1));
        let is_log = matches!(node.op, Op::AttentionLse(_));
        if (if is_log { mapped.without_values() } else { mapped }) != *b {
            return Err(Invariant::RingOperands.breach(format!("{w} runs along other dims than {}", r.v)));
        }
        turn.ok_or_else(|| Invariant::RingStep.breach(BROKEN))
    }
}

/// The union of two sets that have nothing in common.
fn apart(mut a: BTreeSet<u64>, b: BTreeSet<u64>) -> Checked<BTreeSet<u64>> {
    match b.iter().find(|n| a.contains(n)) {
        Some(n) => Err(Invariant::RingBlocks.breach(format!("block {n} counts twice"))),
        None => {
            a.extend(b);
            Ok(a)
        }
    }
}
