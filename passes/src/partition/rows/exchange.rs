//! Rows between ranks.

use super::super::emit::Emitter;
use super::super::job_view::index_map;
use super::RowContext;
use ir::dim::{Base, Dim, IndexMap};
use ir::graph::{Type, Value};
use ir::mesh::SubAxis;
use ir::op::{Collective, Op, Reduce, Reshard};
use ir::reason::Reason;
use ir::sharded::{Partial, Placement};

/// One side of an exchange: dims of rows that count its members, or a dim of what is in a row.
enum Side {
    Parts(Vec<Dim>),
    Rest(Dim),
}

impl Emitter<'_> {
    /// A reshard of a value in rows.
    pub(super) fn rows_resharded(&mut self, v: Value, kind: Reshard, subs: &[SubAxis], context: RowContext) -> Value {
        let job = self.job;
        let s = job.s;
        let layout = job.rows.layout(v).expect("invariant: the value is in rows");
        let (mut arg, mut subs) = (s.graph.body[v].args[0], subs.to_vec());
        while let (Op::Reshard { subs: more, .. }, true) = (&s.graph.body[arg].op, job.rows.joined(arg)) {
            subs.extend(more);
            arg = s.graph.body[arg].args[0];
        }
        subs.sort_unstable();
        let from = self.at_layout(arg, layout);
        let x = self.placed(arg, &from, context);
        let why = s.reasons[v.index()].clone();
        let reduce = match s.sharding(arg)[subs[0]] {
            Placement::Partial(Partial::Max) => Reduce::Max,
            Placement::Partial(Partial::Sum) | Placement::Replicated | Placement::Split(_) => Reduce::Sum,
        };
        match kind {
            Reshard::AllReduce => self.exchange(x, Collective::AllReduce(reduce), &subs, None, &why, context),
            Reshard::Mask => {
                let ty = self.out.body[x].ty.clone();
                self.mask(x, ty, &subs, context.chunk, context.origin, None)
            }
            Reshard::Slice => match self.side(v, &subs, layout) {
                Side::Parts(dims) => self.own_part(x, &subs, &dims, context),
                Side::Rest(d) => {
                    let (from, to) = (self.dim_of(arg, d), self.dim_of(v, d));
                    let index = index_map(s, d, &s.sharding(v).splits(d), &s.sharding(arg).splits(d));
                    self.build(context, |b| b.op(Op::Shard { from, to, index }, &[x]))
                }
            },
            Reshard::AllGather | Reshard::ReduceScatter | Reshard::AllToAll => {
                let scattered = (kind != Reshard::AllGather).then(|| self.side(v, &subs, layout));
                let gathered = (kind != Reshard::ReduceScatter).then(|| self.side(arg, &subs, layout));
                let kind = match kind {
                    Reshard::AllGather => ir::fault!("rows.gather.sum", Collective::AllReduce(Reduce::Sum), Collective::AllGather),
                    Reshard::ReduceScatter => {
                        ir::fault!("rows.reduce.max", Collective::ReduceScatter(Reduce::Max), Collective::ReduceScatter(reduce))
                    }
                    _ => Collective::AllToAll,
                };
                // A dim within a row takes part as two dims: the members, and the rest.
                let (x, from) = match scattered {
                    None => (x, vec![]),
                    Some(Side::Parts(dims)) => (x, dims),
                    Some(Side::Rest(d)) => {
                        let part = self.members(&subs);
                        (self.split_parts(x, arg, d, part, v, &subs, context.chunk), vec![part])
                    }
                };
                match gathered {
                    None => self.trade(x, kind, &subs, &from, &[], &why, context),
                    Some(Side::Parts(to)) => self.trade(x, kind, &subs, &from, &to, &why, context),
                    Some(Side::Rest(d)) => {
                        let part = self.members(&subs);
                        let x = self.trade(x, kind, &subs, &from, &[part], &why, context);
                        self.merged(x, v, d, part, arg, &subs, context.chunk, None)
                    }
                }
            }
        }
    }

    fn side(&mut self, v: Value, subs: &[SubAxis], layout: usize) -> Side {
        let l = &self.job.rows.layouts[layout];
        match self.job.s.sharding(v)[subs[0]] {
            Placement::Split(d) if d == l.routing.experts => Side::Parts(self.groups_of(subs)),
            Placement::Split(d) if l.tokens.contains(&d) => Side::Parts(self.homes_of(subs)),
            Placement::Split(d) => Side::Rest(d),
            Placement::Replicated | Placement::Partial(_) => unreachable!("invariant: the verifier has seen this reshard"),
        }
    }

    fn members(&mut self, subs: &[SubAxis]) -> Dim {
        let n = subs.iter().map(|u| self.job.s.mesh[*u].size).product();
        self.piece("part", n)
    }

    /// A collective that scatters along `from` and gathers along `to`, dims with one index per member along each sub-axis.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one collective")]
    pub(super) fn trade(
        &mut self,
        x: Value,
        kind: Collective,
        subs: &[SubAxis],
        from: &[Dim],
        to: &[Dim],
        why: &Option<Reason>,
        context: RowContext,
    ) -> Value {
        let one = |dims: &[Dim]| if let [d] = dims { Some(*d) } else { None };
        let mut x = x;
        let part = match (one(from), one(to)) {
            (Some(d), _) => d,
            (None, Some(d)) if from.is_empty() => d,
            _ => self.members(subs),
        };
        if !from.is_empty() {
            let rest = self.out.body.dims_of(x).iter().copied().filter(|d| !from.contains(d));
            let dims: Vec<Dim> = from.iter().copied().chain(rest).collect();
            x = self.permute(x, &dims, context.chunk, context.origin);
            x = self.view(x, from, &[part], context.chunk, context.origin, None);
        }
        x = self.exchange(x, kind, subs, Some(part), why, context);
        if to.is_empty() { x } else { self.view(x, &[part], to, context.chunk, context.origin, None) }
    }

    pub(super) fn exchange(
        &mut self,
        x: Value,
        kind: Collective,
        subs: &[SubAxis],
        part: Option<Dim>,
        why: &Option<Reason>,
        context: RowContext,
    ) -> Value {
        let mut ty: Type = self.out.body[x].ty.clone();
        match kind {
            Collective::AllGather => ty.dims.splice(0..0, part).for_each(drop),
            Collective::ReduceScatter(_) => ty.dims.retain(|d| Some(*d) != part),
            Collective::AllReduce(_) | Collective::AllToAll | Collective::Shift => {}
        }
        let op = Op::Collective { kind, subs: subs.to_vec(), stages: None, part };
        let w = self.push(op, vec![x], ty, context.chunk, context.origin, None);
        self.out.reasons[w.index()] = why.clone();
        w
    }

    /// This rank's part along dims with one index per coordinate.
    pub(super) fn own_part(&mut self, x: Value, subs: &[SubAxis], dims: &[Dim], context: RowContext) -> Value {
        let mut x = x;
        for (u, from) in subs.iter().zip(dims) {
            let one = self.piece("own", 1);
            let index = IndexMap { parts: vec![(1, 1)], base: Base::Coords(vec![(*u, 1)]) };
            x = self.build(context, |b| {
                let x = b.op(Op::Shard { from: *from, to: one, index }, &[x]);
                b.op(Op::Slice { from: one, to: None, at: 0 }, &[x])
            });
        }
        x
    }
}
