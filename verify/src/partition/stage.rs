//! A stage, node by node.

use super::shards::{Local, ShardView, ShardViews, behind, is_mask, moved};
use super::sums::Sums;
use crate::Invariant;
use crate::violation::{Breach, Checked};
use ir::dim::Dim;
use ir::graph::{Users, Value};
use ir::local::{Chunk, Local as Graph};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Compare, DType, Op, Scalar};
use ir::sharded::{Partial, Placement};
use std::collections::HashSet;
use std::rc::Rc;

/// The check of one stage, as far as it has come.
pub struct Stage<'a, 'p> {
    pub shards: &'p mut ShardViews<'a>,
    pub local: &'p Graph,
    pub users: &'p Users,
    pub held: Vec<Option<Local>>,
    /// Local dims that were found to be parts of dims, by the sub-axes that split these.
    pub parts: HashSet<(Dim, Dim, u64)>,
    /// Limits that must hold: for each home and size of a group of experts, how many rows a group may have at most.
    pub bounds: HashSet<(usize, u64, u64)>,
    /// Limits that the graph checks, in the same form.
    pub limits: HashSet<(usize, u64, u64)>,
}

impl Stage<'_, '_> {
    pub fn node(&mut self, w: Value, sums: &mut Sums) -> Checked<Option<Local>> {
        let (local, s) = (self.local, self.shards.s);
        let node = &local.body[w];
        let (chunk, accumulated) = (local.chunks[w.index()], local.accumulate[w.index()]);
        let Some((v, sharding)) = &local.source[w.index()] else {
            if accumulated {
                return Err(Invariant::AccumulatedValue.breach("it is accumulated, and holds no value of the sharded graph"));
            }
            return match &node.op {
                Op::Send { .. } => self.sent(node.args[0]).map(|()| None),
                Op::Recv { .. } => self.message(w).map(|()| None),
                Op::Concat { .. } => Ok(self.joined(w)),
                _ => self.derived(w),
            };
        };
        let (v, g) = (*v, &s.graph.body[*v]);
        if sharding != s.sharding(v) || g.ty.dtype != node.ty.dtype || g.ty.dims.len() != node.ty.dims.len() {
            return Err(Invariant::HeldType.breach(format!("it has not the type or the sharding of {v}")));
        }
        self.dims(v, &node.ty.dims)?;
        let over_batches = s.mesh.of(Axis::Microbatch).any(|u| sharding[u] == Placement::SUM);
        if accumulated != (over_batches && chunk.per_microbatch()) {
            return Err(Invariant::Accumulation.breach(format!("whether it is accumulated is not what the sharding of {v} says")));
        }
        let want = self.want(v, chunk)?;
        if matches!((&node.op, &g.op), (Op::Add, Op::Add)) && self.is_term(w, v) {
            return Ok(None);
        }
        let got = match self.shown(w, v, &want, sums) {
            Ok(got) => got,
            // The value may be computed from rows of experts.
            Err(e) => match self.derived(w)? {
                Some(Local::One(one)) => one,
                _ => return Err(self.because(w, e)),
            },
        };
        let got = self.of_all_passes(got);
        if got == want {
            Ok(Some(Local::One(want)))
        } else {
            Err(self.because(w, Invariant::HeldPart.breach(format!("it holds {}, and {v} should be {}", got.text(&s.mesh), want.text(&s.mesh)))))
        }
    }

    /// The reason of an error, with the first node of rows about which nothing is known, if there is one.
    pub fn because(&self, w: Value, e: Breach) -> Breach {
        let body = &self.local.body;
        let unknown = |a: &&Value| self.local.source[a.index()].is_none() && self.held[a.index()].is_none();
        let mut at = w;
        while let Some(a) = body[at].args.iter().find(unknown) {
            at = *a;
        }
        if at == w || self.shards.routed.is_empty() {
            return e;
        }
        let line = body[at].origin.span.map_or(String::new(), |span| format!(", line {}", span.line));
        Breach { found: format!("{}; nothing shows what {at} ({}{line}) holds", e.found, body[at].op.name()), ..e }
    }

    /// The view that a node is shown to hold which claims to hold `v`, and should hold `want`.
    pub fn shown(&mut self, w: Value, v: Value, want: &Rc<ShardView>, sums: &mut Sums) -> Checked<Rc<ShardView>> {
        match (&self.local.body[w].op, &self.shards.s.graph.body[v].op) {
            (Op::Recv { .. }, _) => {}
            (Op::Collective { stages: Some(_), .. }, _) => self.sum_over_stages(w, v, sums)?,
            (Op::View { .. } | Op::Slice { .. }, _) if self.is_piece(w) => {}
            (_, op) if is_mask(op) => return self.masked(w),
            (_, Op::Reshard { .. }) => {
                return match self.derived(w)? {
                    Some(Local::One(one)) => Ok(one),
                    _ => Err(Invariant::ReshardSteps.breach(format!("nothing leads to {v}"))),
                };
            }
            _ if self.is_ring(v) => self.ring(w, v)?,
            _ => self.same_op(w, v)?,
        }
        Ok(want.clone())
    }

    /// The view of a value that a chunk should hold.
    pub fn want(&mut self, v: Value, chunk: Chunk) -> Checked<Rc<ShardView>> {
        if chunk.per_microbatch() { Ok(self.shards.of(v)) } else { self.shards.once(v) }
    }

    /// An operand as its user sees it.
    pub fn seen(&self, a: Value, to: Chunk) -> Checked<Option<Local>> {
        let from = self.local.chunks[a.index()];
        let later = !to.per_microbatch() || from == Chunk::Prologue && to != Chunk::Prologue;
        let Some(held) = &self.held[a.index()] else { return Ok(None) };
        if !later || !from.per_microbatch() {
            return Ok(Some(held.clone()));
        }
        let Local::One(one) = held else { return Ok(None) };
        let summed = behind(&self.shards.s.mesh, one)?;
        if summed != *one && !self.local.accumulate[a.index()] {
            return Err(Invariant::SumBehind.breach(format!("{a} is not accumulated")));
        }
        Ok(Some(Local::One(summed)))
    }

    /// Whether a user in a chunk sees in `a` the value `v` as it should.
    pub fn sees(&mut self, a: Value, v: Value, to: Chunk) -> Checked<bool> {
        let want = self.want(v, to)?;
        let same = self.local.body[a].ty.dtype == self.shards.s.graph.body[v].ty.dtype;
        Ok(same && self.seen(a, to)? == Some(Local::One(want)))
    }

    /// The value of a node that claims to hold none, or cannot be shown as what it claims: an operand whose elements
    /// it moves, or rows.
    pub fn derived(&mut self, w: Value) -> Checked<Option<Local>> {
        let out = match self.moves(w)? {
            None => self.routed(w),
            moved => moved,
        };
        if let (Some(Local::One(one)), false) = (&out, self.local.chunks[w.index()].per_microbatch())
            && self.shards.s.mesh.of(Axis::Microbatch).any(|u| one.is_split_over(u))
        {
            return Err(Invariant::OnceForAll.breach("what runs once asks for the microbatch"));
        }
        Ok(out)
    }

    /// The result of a node that only moves elements of an operand.
    pub fn moves(&mut self, w: Value) -> Checked<Option<Local>> {
        let node = &self.local.body[w];
        let chunk = self.local.chunks[w.index()];
        match node.op {
            Op::Expand | Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } | Op::Collective { .. } => {
                // On rows, the node is tried as an op of the sharded graph before it counts as a movement between
                // ranks.
                if let Some(rows) = self.place_by_place(w) {
                    return Ok(Some(rows));
                }
                let from = self.seen(node.args[0], chunk)?;
                Ok(from.and_then(|from| moved(&self.shards.s.mesh, &self.local.body, w, &from)))
            }
            // A conversion may round a sum that was kept in the wider type of its summation.
            Op::Cast => Ok(self.seen(node.args[0], chunk)?.filter(|from| self.is_rounded(w, from))),
            Op::Select if !self.shards.routed.is_empty() && self.local.body.dims_of(node.args[1]) == node.ty.dims => {
                Ok(self.masked(w).ok().map(Local::One))
            }
            _ => Ok(None),
        }
    }

    /// Whether a conversion returns to the value's type from the type in which the value was summed.
    pub fn is_rounded(&self, w: Value, from: &Local) -> bool {
        let (body, Local::One(one)) = (&self.local.body, from) else { return false };
        let value = self.shared(one.x.term).map_or(one.x.term.0, |v| v.0);
        let of = self.shards.s.graph.body.nodes.get(value as usize).map(|g| g.ty.dtype);
        let wide = body[body[w].args[0]].ty.dtype;
        let sums = |of: DType| of.is_half() && wide == DType::F32 || of == DType::Bool && wide == DType::I32;
        of == Some(body[w].ty.dtype) && of.is_some_and(sums)
    }

    /// Checks that local dims are the parts of a value's dims.
    pub fn dims(&mut self, v: Value, locals: &[Dim]) -> Checked<()> {
        let s = self.shards.s;
        let sharding = s.sharding(v);
        for (l, d) in locals.iter().zip(s.graph.body.dims_of(v)) {
            let split = |u: SubAxis| sharding[u] == Placement::Split(*d);
            let key = (*l, *d, s.mesh.ids().filter(|u| split(*u)).fold(0u64, |set, u| set | 1 << u.0));
            if !self.parts.contains(&key) {
                if !self.shards.is_part(&self.local.body.dims[*l], *d, &split) {
                    return Err(Invariant::DimPart.breach(format!(
                        "`{}` is not the part of `{}`",
                        self.local.body.dims.name(*l),
                        s.graph.body.dims.name(*d)
                    )));
                }
                self.parts.insert(key);
            }
        }
        Ok(())
    }

    /// The local names of the dims of an op's result and operands, on which all of them agree.
    pub fn names(&mut self, pairs: &[(Value, Vec<Dim>)]) -> Checked<Vec<(Dim, Dim)>> {
        let mut names: Vec<(Dim, Dim)> = vec![];
        for (v, locals) in pairs {
            self.dims(*v, locals)?;
            for (d, l) in self.shards.s.graph.body.dims_of(*v).iter().zip(locals) {
                match names.iter().find(|n| n.0 == *d || n.1 == *l) {
                    Some(n) if *n == (*d, *l) => {}
                    Some(_) => return Err(Invariant::DimNames.breach(format!("`{}` is not one dim to its operands", self.local.body.dims.name(*l)))),
                    None => names.push((*d, *l)),
                }
            }
        }
        Ok(names)
    }

    /// Checks that a node is an op of the sharded graph, on the parts of its operands.
    pub fn same_op(&mut self, w: Value, v: Value) -> Checked<()> {
        let (local, s) = (self.local, self.shards.s);
        let (node, g) = (&local.body[w], &s.graph.body[v]);
        if node.args.len() != g.args.len() {
            return Err(Invariant::OperandPart.breach(format!("it has not the operands of {v}")));
        }
        for (a, b) in node.args.iter().zip(&g.args) {
            if !self.sees(*a, *b, local.chunks[w.index()])? {
                return Err(Invariant::OperandPart.breach(format!("its operand {a} does not hold {b}")));
            }
        }
        let mut pairs = vec![(v, node.ty.dims.clone())];
        pairs.extend(node.args.iter().zip(&g.args).map(|(a, b)| (*b, local.body.dims_of(*a).to_vec())));
        let names = self.names(&pairs)?;
        let params = &local.stages[0].1;
        let same = match (&node.op, &g.op) {
            (Op::Param(slot), Op::Param(p)) => params.get(*slot as usize) == Some(p),
            (Op::State(slot, k), Op::State(p, n)) => params.get(*slot as usize) == Some(p) && k == n,
            (op, want) => {
                let mut unknown = false;
                // A combination of dense values looks up the chosen expert's value.
                let want = if let Op::Combine(r) = want { &Op::Gather { dim: r.experts } } else { want };
                let want = want.map_dims(&mut |d| match names.iter().find(|n| n.0 == d) {
                    Some(n) => n.1,
                    None => {
                        unknown = true;
                        d
                    }
                });
                !unknown && *op == want
            }
        };
        if same { Ok(()) } else { Err(Invariant::SameOp.breach(format!("it is not {} of {v}'s dims", g.op.name()))) }
    }

    /// `select(coordinates == 0, x, 0)`: a term of a sum that is x.
    pub fn masked(&mut self, w: Value) -> Checked<Rc<ShardView>> {
        let (local, chunk) = (self.local, self.local.chunks[w.index()]);
        let node = &local.body[w];
        let op = |a: Value| &local.body[a].op;
        let zero = |a: Value| matches!(op(a), Op::Const(c) if c.0 == 0.0);
        let form = match (&node.op, node.args.as_slice()) {
            (Op::Select, [first, _, none]) if *op(*first) == Op::Compare(Compare::Eq) && zero(*none) => match local.body[*first].args[..] {
                [at, other] if zero(other) => match op(at) {
                    Op::Scalar(Scalar::Linear(form)) => Some(form),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        let form = form.ok_or_else(|| Invariant::MaskedTerm.breach("it masks nothing"))?;
        let Some(Local::One(x)) = self.seen(node.args[1], chunk)? else { return Err(Invariant::MaskedTerm.breach("it masks no value")) };
        let mut partial = x.partial.clone();
        for (u, step) in form {
            let known = partial.iter().any(|p| p.0 == *u) || x.is_split_over(*u);
            if known || *step == 0 || self.shards.s.mesh[*u].axis == Axis::Microbatch && !chunk.per_microbatch() {
                return Err(Invariant::MaskedTerm.breach("it masks what is not replicated"));
            }
            partial.push((*u, Partial::Sum));
        }
        partial.sort_unstable();
        Ok(Rc::new(ShardView { partial, ..(*x).clone() }))
    }

    /// Values along one dim each, one after the other.
    pub fn joined(&self, w: Value) -> Option<Local> {
        let body = &self.local.body;
        let part = |a: &Value| match (&self.held[a.index()], body.dims_of(*a)) {
            (Some(Local::One(one)), [d]) if self.local.chunks[a.index()] == self.local.chunks[w.index()] => Some((body.dims.size(*d), one.clone())),
            _ => None,
        };
        body[w].args.iter().map(part).collect::<Option<Vec<_>>>().map(Local::Joined)
    }
}
