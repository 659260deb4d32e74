//! Between dense values and rows.

use super::super::emit::Emitter;
use super::tables::SlotTable;
use super::{RowContext, RowDim, RowSharding};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::{DType, Op};
use ir::sharded::Placement;

impl Emitter<'_> {
    /// An operand of an op on rows: rows; or, if it has neither tokens nor experts, what is the same for all.
    pub(super) fn placed(&mut self, a: Value, at: &RowSharding, context: RowContext) -> Value {
        let job = self.job;
        if job.rows.layout(a) == Some(at.layout) {
            return self.in_pass(a, context);
        }
        let l = &job.rows.layouts[at.layout];
        let ty = &job.s.graph.body[a].ty;
        let mut x = self.get(a, context.chunk);
        let (token, group) = (self.row_dim(RowDim::Token(at.layout)), self.group(at.layout));
        let (has_tokens, has_experts) = (l.tokens.iter().any(|d| ty.has(*d)), ty.has(l.routing.experts));
        if has_tokens {
            x = self.by_home(x, a, at, context);
        }
        if has_experts {
            x = self.by_group(x, a, at, context);
        }
        let (dim, table) = match (has_tokens, has_experts) {
            (false, false) => return x,
            (true, false) => (token, SlotTable::Token),
            (false, true) => (group, SlotTable::Expert),
            (true, true) => {
                let place = self.row_dim(RowDim::Place(at.layout));
                x = self.view(x, &[token, group], &[place], context.chunk, context.origin, None);
                (place, SlotTable::Place)
            }
        };
        let index = self.table(table, at, context);
        self.build(context, |b| b.op(Op::Gather { dim }, &[x, index]))
    }

    /// Rows at their places in the dense value that they are, which is zero elsewhere: by home, group and place.
    pub(super) fn spread(&mut self, x: Value, v: Value, at: &RowSharding, context: RowContext) -> Value {
        let dtype = self.job.s.graph.body[v].ty.dtype;
        let index = self.table(SlotTable::Place, at, context);
        let place = self.row_dim(RowDim::Place(at.layout));
        let dims = [self.home_dims(at), self.group_dims(at), vec![place], self.rest(v, at.layout)].concat();
        let ty = Type::new(if dtype == DType::Bool { DType::I32 } else { dtype }, dims);
        self.build(context, |b| {
            let x = b.cast(x, ty.dtype);
            let w = b.typed(Op::Scatter { dim: place }, &[x, index], ty.clone());
            b.body[w].ty = ty;
            w
        })
    }

    /// The dense value that rows of all passes were spread in.
    pub(super) fn spread_out(&mut self, w: Value, v: Value, at: &RowSharding, context: RowContext) -> Value {
        let dtype = self.job.s.graph.body[v].ty.dtype;
        let [place, token] = [RowDim::Place(at.layout), RowDim::Token(at.layout)].map(|d| self.row_dim(d));
        let group = self.group(at.layout);
        let w = self.build(context, |b| {
            let w = b.cast(w, dtype);
            b.op(Op::View { from: vec![place], to: vec![token, group] }, &[w])
        });
        let w = self.of_home(w, at, context);
        let w = self.of_groups(w, at, context);
        self.finish(w, v, context)
    }

    /// For each dim of tokens where rows are: the local dim, its pieces in order, and those of them that count a home's tokens.
    fn pieces_of_tokens(&mut self, at: &RowSharding) -> Vec<(Dim, Vec<Dim>, Vec<Dim>)> {
        let s = self.job.s;
        let l = &self.job.rows.layouts[at.layout];
        let dims = &s.graph.body.dims;
        let mut out = vec![];
        for d in &l.tokens {
            let home = s.sharding(l.chosen);
            let kept: Vec<_> = home.splits(*d).into_iter().filter(|u| !at.gathered.contains(u)).collect();
            let mut rest = dims.size(*d);
            let (mut order, mut own, mut run) = (vec![], vec![], 1);
            for u in &s.digits[dims.original(*d).0 as usize] {
                let n = s.mesh[*u].size;
                rest /= n;
                if kept.contains(u) {
                    continue;
                }
                if home[*u] != Placement::Split(*d) {
                    run *= n;
                    continue;
                }
                if run > 1 {
                    own.push(self.piece("piece", run));
                    order.extend(own.last());
                    run = 1;
                }
                order.push(self.row_dim(RowDim::Home(*u)));
            }
            own.push(self.piece("piece", run * rest));
            order.extend(own.last());
            out.push((self.dim(*d, &kept), order, own));
        }
        out
    }

    /// `[tokens..]` to `[homes.., token]`. Dims of tokens that the value lacks are added.
    pub(super) fn by_home(&mut self, x: Value, v: Value, at: &RowSharding, context: RowContext) -> Value {
        let job = self.job;
        let l = &job.rows.layouts[at.layout];
        let token = self.row_dim(RowDim::Token(at.layout));
        let pieces = self.pieces_of_tokens(at);
        let missing = l.tokens.iter().zip(&pieces).filter(|(d, _)| !job.s.graph.body[v].ty.has(**d)).map(|(_, p)| p.0);
        let dims: Vec<Dim> = missing.chain(self.out.body.dims_of(x).iter().copied()).collect();
        let mut x = self.build(context, |b| b.expand(x, &dims));
        for (local, order, _) in &pieces {
            x = self.view(x, &[*local], order, context.chunk, context.origin, None);
        }
        let own: Vec<Dim> = pieces.into_iter().flat_map(|p| p.2).collect();
        if own.is_empty() {
            let dims: Vec<Dim> = [token].into_iter().chain(self.out.body.dims_of(x).iter().copied()).collect();
            return self.build(context, |b| b.expand(x, &dims));
        }
        let homes = self.home_dims(at);
        let rest = self.out.body.dims_of(x).iter().copied().filter(|d| !own.contains(d) && !homes.contains(d));
        let dims: Vec<Dim> = homes.iter().chain(&own).copied().chain(rest).collect();
        let x = self.permute(x, &dims, context.chunk, context.origin);
        self.view(x, &own, &[token], context.chunk, context.origin, None)
    }

    /// The inverse of [`Emitter::by_home`].
    pub(super) fn of_home(&mut self, x: Value, at: &RowSharding, context: RowContext) -> Value {
        let token = self.row_dim(RowDim::Token(at.layout));
        let pieces = self.pieces_of_tokens(at);
        let own: Vec<Dim> = pieces.iter().flat_map(|p| p.2.iter().copied()).collect();
        if own.is_empty() {
            return self.build(context, |b| b.op(Op::Slice { from: token, to: None, at: 0 }, &[x]));
        }
        let mut x = self.view(x, &[token], &own, context.chunk, context.origin, None);
        for (local, order, _) in pieces {
            x = self.view(x, &order, &[local], context.chunk, context.origin, None);
        }
        x
    }

    /// `[experts]` to `[groups.., group]`.
    pub(super) fn by_group(&mut self, x: Value, v: Value, at: &RowSharding, context: RowContext) -> Value {
        let experts = self.dim_of(v, self.job.rows.layouts[at.layout].routing.experts);
        let to = [self.group_dims(at), vec![self.group(at.layout)]].concat();
        self.view(x, &[experts], &to, context.chunk, context.origin, None)
    }

    /// The inverse of [`Emitter::by_group`].
    pub(super) fn of_groups(&mut self, x: Value, at: &RowSharding, context: RowContext) -> Value {
        let experts = self.dim(self.job.rows.layouts[at.layout].routing.experts, &at.split);
        let from = [self.group_dims(at), vec![self.group(at.layout)]].concat();
        self.view(x, &from, &[experts], context.chunk, context.origin, None)
    }
}
