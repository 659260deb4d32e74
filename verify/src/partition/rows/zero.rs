//! Values that are zero where there is no row.

use super::ShardViews;
use ir::algebra::{LoopKind, algebra};
use ir::dim::Dim;
use ir::graph::Value;
use ir::op::{Binary, Compare, Op, Unary};

/// The dims that an op names, in the order in which it names them.
pub fn named(op: &Op) -> Vec<Dim> {
    let mut named = vec![];
    op.map_dims(&mut |d| {
        named.push(d);
        d
    });
    named
}

impl ShardViews<'_> {
    /// Whether a value has all dims of tokens and experts, and is computed in the same way at every position of
    /// these.
    pub fn maps(&self, v: Value, home: usize) -> bool {
        let body = &self.s.graph.body;
        let home = &self.routed.homes[home];
        let Some(experts) = self.experts_of(v, home) else { return false };
        let op = &body[v].op;
        if matches!(op, Op::Dispatch(_) | Op::Combine(_) | Op::Reshard { .. } | Op::Send { .. } | Op::Recv { .. } | Op::Collective { .. }) {
            return false;
        }
        let (named, loops) = (named(op), algebra(body, v).loops);
        home.tokens.iter().chain([&experts]).all(|d| {
            let along = loops.iter().filter(|l| l.dims().any(|e| e == *d));
            body[v].ty.has(*d) && !named.contains(d) && along.into_iter().all(|l| l.kind == LoopKind::Map)
        })
    }

    /// Whether a value has all dims of tokens and experts.
    pub fn has_places(&self, v: Value, home: usize) -> bool {
        let (home, ty) = (&self.routed.homes[home], &self.s.graph.body[v].ty);
        self.experts_of(v, home).is_some() && home.tokens.iter().all(|d| ty.has(*d))
    }

    /// Whether a value is zero wherever a token has not chosen an expert. None of the tokens and experts may be
    /// missing.
    pub fn is_zero_elsewhere(&mut self, v: Value, home: usize) -> bool {
        let v = self.root[v.index()];
        let Some(experts) = self.experts_of(v, &self.routed.homes[home]) else { return false };
        if let Some(known) = self.routed.zero.get(&(v, home, experts)) {
            return *known;
        }
        let node = &self.s.graph.body[v];
        let zero = match &node.op {
            Op::Dispatch(r) => self.root[node.args[1].index()] == self.routed.homes[home].chosen && r.experts == experts,
            op if self.maps(v, home) => {
                let zero: Vec<bool> = node.args.iter().map(|a| self.is_zero(*a) || self.is_zero_elsewhere(*a, home)).collect();
                keeps_zero(op, &zero)
            }
            _ => false,
        };
        self.routed.zero.insert((v, home, experts), zero);
        zero
    }

    /// Whether a value is zero everywhere: a constant, or what follows from it place by place.
    fn is_zero(&self, v: Value) -> bool {
        let node = &self.s.graph.body[v];
        match &node.op {
            Op::Const(c) => c.0 == 0.0,
            Op::Expand | Op::Cast | Op::Cut | Op::StopGradient | Op::Reshard { .. } => self.is_zero(node.args[0]),
            _ => false,
        }
    }
}

/// Whether an op is zero at a position where these operands are.
fn keeps_zero(op: &Op, zero: &[bool]) -> bool {
    let all = zero.iter().all(|z| *z);
    match op {
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
        Op::Add | Op::Concat { .. } => all,
        Op::Cast
        | Op::StopGradient
        | Op::Cut
        | Op::Expand
        | Op::View { .. }
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::Reduce { .. }
        | Op::Cumsum { .. } => zero[0],
        // The index only says which element is read, or where it goes, so zeros stay zeros.
        Op::Gather { .. } | Op::Scatter { .. } => zero[0],
        Op::Input(_)
        | Op::Param(_)
        | Op::State(..)
        | Op::Table(_)
        | Op::Const(_)
        | Op::Iota(_)
        | Op::Uniform { .. }
        | Op::Scalar(_)
        | Op::Shard { .. }
        | Op::Reshard { .. }
        | Op::Collective { .. }
        | Op::Recv { .. }
        | Op::Send { .. }
        | Op::Limit { .. }
        | Op::GroupedDot { .. }
        | Op::ArgMax { .. }
        | Op::Dispatch(_)
        | Op::Combine(_)
        | Op::Attention(_)
        | Op::AttentionLse(_)
        | Op::AttentionGrad(..) => false,
    }
}
