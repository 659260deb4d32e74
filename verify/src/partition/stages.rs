//! What stages give each other: messages of one or several values, and sums over stages.

use super::stage::Stage;
use super::sums::{StageTerm, Sums};
use crate::Invariant;
use crate::violation::Checked;
use ir::graph::Value;
use ir::op::{Collective, Op, Reduce};

impl Stage<'_, '_> {
    fn is_zero(&self, w: Value) -> bool {
        match (&self.local.body[w].op, self.local.body[w].args.as_slice()) {
            (Op::Const(c), _) => c.0 == 0.0,
            (Op::Expand, [a]) => self.is_zero(*a),
            _ => false,
        }
    }

    /// Whether a sum that claims to be `v` is only what this stage adds to it.
    pub fn is_term(&self, w: Value, v: Value) -> bool {
        let is_sum = |c: &Value| matches!(self.local.body[*c].op, Op::Collective { stages: Some(_), .. });
        let holds = |c: &Value| self.local.source[c.index()].as_ref().is_some_and(|s| s.0 == v);
        matches!(&self.users[w.index()], [(c, _)] if is_sum(c) && holds(c))
    }

    /// The positions of the terms of a sum that these operands are, all different.
    fn terms(&mut self, args: &[Value], v: Value, w: Value) -> Checked<Vec<usize>> {
        let wanted = &self.shards.s.graph.body[v].args;
        let (mut out, mut taken) = (vec![], vec![false; wanted.len()]);
        for a in args {
            let mut found = None;
            for (k, b) in wanted.iter().enumerate().filter(|(k, _)| !taken[*k]) {
                if self.sees(*a, *b, self.local.chunks[w.index()])? {
                    found = Some(k);
                    break;
                }
            }
            let k = found.ok_or_else(|| Invariant::StageSumTerm.breach(format!("{a} is no term of {v}")))?;
            taken[k] = true;
            out.push(k);
        }
        Ok(out)
    }

    /// Checks an all-reduce over stages, to which each adds what it has.
    pub fn sum_over_stages(&mut self, w: Value, v: Value, sums: &mut Sums) -> Checked<()> {
        let local = self.local;
        let (node, stage) = (&local.body[w], local.stages[0].0);
        let Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs, stages: Some(stages), part: None } = &node.op else {
            return Err(Invariant::StageSumForm.breach("stages exchange no sum"));
        };
        if !subs.is_empty() || local.chunks[w.index()].per_microbatch() {
            return Err(Invariant::StageSumForm.breach("a sum over stages is one over ranks of a stage, or of one microbatch"));
        }
        let term = node.args[0];
        let is_add = self.shards.s.graph.body[v].op == Op::Add;
        let adds = if self.is_zero(term) {
            StageTerm::Terms(vec![])
        } else if is_add && local.body[term].op == Op::Add && self.held[term.index()].is_none() && self.is_term(term, v) {
            let args = local.body[term].args.clone();
            let mut locals = vec![(v, local.body.dims_of(term).to_vec())];
            let terms = self.terms(&args, v, w)?;
            let wanted = &self.shards.s.graph.body[v].args;
            locals.extend(args.iter().zip(&terms).map(|(a, k)| (wanted[*k], local.body.dims_of(*a).to_vec())));
            self.names(&locals)?;
            StageTerm::Terms(terms)
        } else if self.sees(term, v, local.chunks[w.index()])? {
            StageTerm::All
        } else if is_add {
            StageTerm::Terms(self.terms(&[term], v, w)?)
        } else {
            return Err(Invariant::StageSumTerm.breach(format!("{term} is no part of {v}")));
        };
        sums.0.entry((v, stages.clone())).or_default().push((stage, adds));
        Ok(())
    }

    /// Checks that a message holds values, each whole and in its own order.
    pub fn sent(&self, x: Value) -> Checked<()> {
        let body = &self.local.body;
        let holds = |w: Value| self.local.source[w.index()].is_some() && self.held[w.index()].is_some();
        let flat = |a: &Value| match (&body[*a].op, body[*a].args.as_slice()) {
            (Op::View { from, to }, [x]) => from == body.dims_of(*x) && to == body.dims_of(*a) && holds(*x),
            (Op::Expand, [x]) => body.dims_of(*x).is_empty() && holds(*x),
            _ => false,
        };
        let joined = matches!(body[x].op, Op::Concat { .. }) && self.local.source[x.index()].is_none() && body.dims_of(x).len() == 1;
        if holds(x) || joined && body[x].args.iter().all(flat) {
            return Ok(());
        }
        Err(Invariant::SentValue.breach("what it sends is no value of the sharded graph"))
    }

    /// The piece of a message that a value is: the message, its first element, and its elements.
    fn piece(&self, w: Value) -> Option<(Value, u64, u64)> {
        let body = &self.local.body;
        let node = &body[w];
        let of_message = |a: Value| matches!(body[a].op, Op::Recv { .. }) && self.local.source[a.index()].is_none();
        match &node.op {
            Op::Slice { to: None, at, .. } if node.ty.dims.is_empty() && of_message(node.args[0]) => Some((node.args[0], *at, 1)),
            Op::View { from, to } if *to == node.ty.dims => {
                let cut = &body[node.args[0]];
                match (&cut.op, from.as_slice()) {
                    (Op::Slice { to: Some(flat), at, .. }, [d]) if flat == d && cut.ty.dims == [*d] && of_message(cut.args[0]) => {
                        Some((cut.args[0], *at, body.dims.size(*d)))
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    pub fn is_piece(&self, w: Value) -> bool {
        self.piece(w).is_some()
    }

    /// Checks that a message of several values is cut into these, one after the other, with nothing between and
    /// nothing left.
    pub fn message(&self, w: Value) -> Checked<()> {
        let body = &self.local.body;
        let mut end = 0;
        for (cut, _) in &self.users[w.index()] {
            let value = match &body[*cut].op {
                Op::Slice { to: None, .. } => Some(*cut),
                _ => self.users[cut.index()].first().map(|u| u.0).filter(|_| self.users[cut.index()].len() == 1),
            };
            let piece = value.filter(|v| self.local.source[v.index()].is_some()).and_then(|v| self.piece(v));
            match piece {
                Some((_, at, size)) if at == end => end += size,
                _ => return Err(Invariant::MessagePieces.breach(format!("{cut} is no value of a message"))),
            }
        }
        if end == body.elements(w) { Ok(()) } else { Err(Invariant::MessagePieces.breach("a message holds more than is cut out of it")) }
    }
}
