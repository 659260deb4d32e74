//! What is said once of each op: its name, its kind and operands, the dims that it names, where zero stays zero, what it costs.
//!
//! Passes ask here in place of lists of their own. Beside it stand the type rule ([`crate::infer`]), the loops ([`crate::algebra`]), the value
//! ([`crate::eval`]) and the text ([`crate::text`]). Verifiers of what a rule here led to have rules of their own, on purpose: see `verify`.

use super::{Attention, AttentionGrad, Binary, Collective, Compare, Op, Reduce, Unary};
use crate::dim::Dim;
use OpKind::{Contraction, Exchange, Generated, Lookup, Mark, Move, Pointwise, Reduction, Reshard, Routing, Stored, View};

/// What an op is to passes that need not know which one it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Memory that is filled from outside. No operands.
    Stored,
    /// Made anew wherever it is used. No operands.
    Generated,
    /// The result at a point depends on the operands at that point alone.
    Pointwise,
    /// The operand itself, under a mark: pointwise as well, and no work.
    Mark,
    /// Some of the operand's elements, or other names for them: the same memory, where the layout allows.
    View,
    /// Elements of the operands, in other places.
    Move,
    /// Sums of products, or of rows: what a kernel of it is built around.
    Contraction,
    /// Along a dim of the operand.
    Reduction,
    /// Elements of a table, by their index.
    Lookup,
    /// Tokens to experts and back. Partitioning makes lookups, or rows, of it.
    Routing,
    /// Between values of one sharding and of another: logically nothing. Partitioning makes collectives of it.
    Reshard,
    /// Between ranks, or with what runs the ranks.
    Exchange,
}

/// How many operands an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arity {
    /// So many and no others.
    Exactly(usize),
    /// One or more.
    Any,
}

impl Arity {
    /// Why so many operands are wrong, if they are.
    pub fn refuses(self, given: usize) -> Option<String> {
        match self {
            Arity::Exactly(n) if given != n => Some(format!("takes {n} operands, has {given}")),
            Arity::Any if given == 0 => Some("takes one operand or more, has none".into()),
            Arity::Exactly(_) | Arity::Any => None,
        }
    }
}

impl Op {
    /// The name in the text form, the kind, the operands.
    fn facts(&self) -> (&'static str, OpKind, Arity) {
        let takes = Arity::Exactly;
        let attends = |a: &Attention, operands: usize| takes(operands + a.scoring.operands());
        match self {
            Op::Input(_) => ("input", Stored, takes(0)),
            Op::Param(_) => ("param", Stored, takes(0)),
            Op::State(..) => ("state", Stored, takes(0)),
            Op::Table(_) => ("table", Stored, takes(0)),
            Op::Const(_) => ("const", Generated, takes(0)),
            Op::Iota(_) => ("iota", Generated, takes(0)),
            Op::Uniform { .. } => ("uniform", Generated, takes(0)),
            Op::Scalar(_) => ("scalar", Generated, takes(0)),
            Op::Unary(u) => (u.name(), Pointwise, takes(1)),
            Op::Binary(b) => (b.name(), Pointwise, takes(2)),
            Op::Compare(c) => (c.name(), Pointwise, takes(2)),
            Op::Select => ("select", Pointwise, takes(3)),
            Op::Add => ("add", Pointwise, Arity::Any),
            Op::Cast => ("cast", Pointwise, takes(1)),
            Op::Expand => ("expand", Pointwise, takes(1)),
            Op::StopGradient => ("stop_gradient", Mark, takes(1)),
            Op::Cut => ("cut", Mark, takes(1)),
            Op::View { .. } => ("view", View, takes(1)),
            Op::Slice { .. } => ("slice", View, takes(1)),
            Op::Shard { .. } => ("shard", View, takes(1)),
            Op::Pad { .. } => ("pad", Move, takes(1)),
            Op::Concat { .. } => ("concat", Move, Arity::Any),
            Op::Dot { .. } => ("dot", Contraction, takes(2)),
            Op::GroupedDot { .. } => ("grouped_dot", Contraction, takes(3)),
            Op::Scatter { .. } => ("scatter", Contraction, takes(2)),
            Op::Attention(a) => ("attention", Contraction, attends(a, 3)),
            Op::AttentionLse(a) => ("attention_lse", Contraction, attends(a, 2)),
            Op::AttentionGrad(a, which) => (which.name(), Contraction, attends(a, 6)),
            Op::Reduce { kind: Reduce::Sum, .. } => ("reduce_sum", Reduction, takes(1)),
            Op::Reduce { kind: Reduce::Max, .. } => ("reduce_max", Reduction, takes(1)),
            Op::Reduce { kind: Reduce::Any, .. } => ("reduce_any", Reduction, takes(1)),
            Op::ArgMax { .. } => ("argmax", Reduction, takes(1)),
            Op::Cumsum { .. } => ("cumsum", Reduction, takes(1)),
            Op::Gather { .. } => ("gather", Lookup, takes(2)),
            Op::Dispatch(_) => ("dispatch", Routing, takes(2)),
            Op::Combine(_) => ("combine", Routing, takes(2)),
            Op::Reshard { kind, .. } => (kind.name(), Reshard, takes(1)),
            Op::Collective { kind, .. } => (kind.name(), Exchange, takes(1)),
            Op::Send { .. } => ("send", Exchange, takes(1)),
            Op::Recv { .. } => ("recv", Exchange, takes(0)),
            Op::Limit { .. } => ("limit", Exchange, takes(1)),
        }
    }

    /// The name in the text form.
    pub fn name(&self) -> &'static str {
        self.facts().0
    }

    /// What it is to passes that need not know which op it is.
    pub fn kind(&self) -> OpKind {
        self.facts().1
    }

    /// How many operands it takes.
    pub fn arity(&self) -> Arity {
        self.facts().2
    }

    /// Whether the op has no operands.
    pub fn is_source(&self) -> bool {
        self.arity() == Arity::Exactly(0)
    }

    /// Whether the result at a point depends on the operands at that point alone.
    pub fn is_pointwise(&self) -> bool {
        matches!(self.kind(), Pointwise | Mark)
    }

    /// The dims of operands along which one element of the result is made of many.
    pub fn over(&self) -> &[Dim] {
        match self {
            Op::Dot { over, .. } | Op::GroupedDot { over, .. } | Op::Reduce { over, .. } => over,
            Op::ArgMax { over } | Op::Cumsum { over, .. } => std::slice::from_ref(over),
            _ => &[],
        }
    }

    /// Whether one element of the result is made of many of an operand.
    pub fn is_combining(&self) -> bool {
        let outer = matches!(self, Op::Dot { over, .. } if over.is_empty());
        matches!(self.kind(), Contraction | Reduction | Routing) && !outer
    }

    /// The dims that it names beside those of its operands and result.
    pub fn dims(&self) -> Vec<Dim> {
        let mut out = vec![];
        self.map_dims(&mut |d| {
            out.push(d);
            d
        });
        out
    }

    /// The op with other dims.
    pub fn map_dims(&self, f: &mut dyn FnMut(Dim) -> Dim) -> Op {
        let mut list = |dims: &[Dim]| dims.iter().map(|d| f(*d)).collect::<Vec<_>>();
        match self {
            Op::View { from, to } => Op::View { from: list(from), to: list(to) },
            Op::Concat { from, to } => Op::Concat { from: list(from), to: f(*to) },
            Op::Dot { over, tf32 } => Op::Dot { over: list(over), tf32: *tf32 },
            Op::GroupedDot { rows, experts, over, tf32 } => {
                let [rows, experts] = [f(*rows), f(*experts)];
                Op::GroupedDot { rows, experts, over: over.iter().map(|d| f(*d)).collect(), tf32: *tf32 }
            }
            Op::Reduce { kind, over } => Op::Reduce { kind: *kind, over: list(over) },
            Op::Iota(d) => Op::Iota(f(*d)),
            Op::Slice { from, to, at } => Op::Slice { from: f(*from), to: to.map(f), at: *at },
            Op::Pad { from, to, at } => Op::Pad { from: from.map(&mut *f), to: f(*to), at: *at },
            Op::Shard { from, to, index } => Op::Shard { from: f(*from), to: f(*to), index: index.clone() },
            Op::ArgMax { over } => Op::ArgMax { over: f(*over) },
            Op::Cumsum { over, reverse } => Op::Cumsum { over: f(*over), reverse: *reverse },
            Op::Gather { dim } => Op::Gather { dim: f(*dim) },
            Op::Scatter { dim } => Op::Scatter { dim: f(*dim) },
            Op::Dispatch(r) => Op::Dispatch(r.map_dims(f)),
            Op::Combine(r) => Op::Combine(r.map_dims(f)),
            Op::Attention(a) => Op::Attention(a.map_dims(f)),
            Op::AttentionLse(a) => Op::AttentionLse(a.map_dims(f)),
            Op::AttentionGrad(a, which) => Op::AttentionGrad(a.map_dims(f), *which),
            Op::Collective { kind, subs, stages, part } => {
                Op::Collective { kind: *kind, subs: subs.clone(), stages: stages.clone(), part: part.map(f) }
            }
            Op::Input(_)
            | Op::Param(_)
            | Op::State(..)
            | Op::Table(_)
            | Op::Const(_)
            | Op::Uniform { .. }
            | Op::Scalar(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select
            | Op::Add
            | Op::Cast
            | Op::StopGradient
            | Op::Cut
            | Op::Expand
            | Op::Reshard { .. }
            | Op::Recv { .. }
            | Op::Send { .. }
            | Op::Limit { .. } => self.clone(),
        }
    }

    /// Whether the result is zero at a place where these operands are: where each of them has the place's dims, or is zero everywhere. What has
    /// another operand besides, such as an index, is zero whatever that holds. Where `0 * inf` may come up, zero is not kept: that is for the caller to know.
    pub fn keeps_zero(&self, zero: &[bool]) -> bool {
        let all = zero.iter().all(|z| *z);
        match self {
            Op::Const(c) => c.0 == 0.0,
            Op::Unary(u) => match u {
                Unary::Neg | Unary::Sqrt | Unary::Tanh | Unary::Sin | Unary::Erf | Unary::Abs | Unary::Floor | Unary::Sign => all,
                Unary::Exp | Unary::Log | Unary::Rsqrt | Unary::Recip | Unary::Cos | Unary::Not => false,
            },
            Op::Binary(b) => match b {
                Binary::Mul | Binary::And => zero[0] || zero[1],
                Binary::Div | Binary::Rem => zero[0],
                Binary::Sub | Binary::Max | Binary::Min | Binary::Or => all,
                Binary::Pow | Binary::Mix => false,
            },
            Op::Compare(c) => match c {
                Compare::Ne | Compare::Lt | Compare::Gt => all,
                Compare::Eq | Compare::Le | Compare::Ge => false,
            },
            Op::Select => zero[2] && (zero[0] || zero[1]),
            Op::Dot { .. } => zero[0] || zero[1],
            Op::ArgMax { .. } | Op::Shard { .. } => false,
            op => match op.kind() {
                Pointwise | Move => all,
                Mark | View | Reduction | Lookup | Routing | Reshard => zero[0],
                Contraction => matches!(op, Op::Scatter { .. }) && zero[0],
                Stored | Generated | Exchange => false,
            },
        }
    }

    /// Of attention, multiply-adds for each query and key, given the elements of a head of keys and of one of
    /// values: two products forward and four backward. The gradient of a bias computes two of these again.
    pub fn products_of_pairs(&self, d: u64, values: u64) -> u64 {
        match self {
            Op::Attention(_) | Op::AttentionGrad(_, AttentionGrad::Q | AttentionGrad::Bias) => d + values,
            Op::AttentionGrad(_, AttentionGrad::K) => d,
            Op::AttentionGrad(_, AttentionGrad::V) => values,
            _ => 0,
        }
    }
}

impl Collective {
    /// The name in the text form, without the reduction.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce(_) => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter(_) => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Shift => "shift",
        }
    }

    /// How it reduces, if it does.
    pub fn reduction(self) -> Option<Reduce> {
        match self {
            Collective::AllReduce(how) | Collective::ReduceScatter(how) => Some(how),
            Collective::AllGather | Collective::AllToAll | Collective::Shift => None,
        }
    }

    /// Parts of `count` elements, which is what a command says, that each of `members` gives and gets.
    pub fn parts(self, members: u64) -> (u64, u64) {
        match self {
            Collective::AllReduce(_) | Collective::Shift => (1, 1),
            Collective::AllGather => crate::fault!("collective.parts.gathered", (1, 1), (1, members)),
            Collective::ReduceScatter(_) => crate::fault!("collective.parts.scattered", (1, 1), (members, 1)),
            Collective::AllToAll => crate::fault!("collective.parts.swapped", (1, members), (members, members)),
        }
    }

    /// Elements that each of `members` gives and gets. Saturates.
    pub fn elements(self, count: u64, members: u64) -> (u64, u64) {
        let (give, get) = self.parts(members);
        (count.saturating_mul(give), count.saturating_mul(get))
    }

    /// The `count` by which each of `members` gives so many elements.
    pub fn count(self, given: u64, members: u64) -> u64 {
        crate::fault!("collective.count.whole", given, given / self.parts(members).0)
    }

    /// Elements (or bytes, of as many) that each of `members` sends to others by an algorithm that sends no more than it must: a ring, or straight. An
    /// all-reduce is a reduce-scatter and an all-gather of an n-th each, so it sends `2 (n - 1) / n` of all ("Performance", nccl-tests).
    pub fn sent(self, count: u64, members: u64) -> u64 {
        match self {
            Collective::AllReduce(_) => crate::fault!("collective.sent.twice", 1, 2) * count * (members - 1) / members,
            Collective::Shift => count,
            Collective::AllGather | Collective::ReduceScatter(_) | Collective::AllToAll => count * (members - 1),
        }
    }
}
