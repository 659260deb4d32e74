//! Dense values that follow from rows.

use super::super::emit::Emitter;
use super::tables::SlotTable;
use super::{RowContext, RowDim, RowSharding, there};
use crate::partition::stored_rows::RowExit;
use ir::build::Builder;
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::local::Chunk;
use ir::op::{DType, Op, Reduce};
use std::collections::HashMap;

impl Emitter<'_> {
    /// Emits a dense value that follows from rows. Of several passes, each gives what it has to all such values that it
    /// can before the next begins: then its rows are of no more use.
    pub(in crate::partition) fn out_of_rows(&mut self, v: Value, layout: usize, how: RowExit, chunk: Chunk) -> Value {
        let job = self.job;
        let passes = self.passes(layout);
        let together = if passes == 1 { vec![(v, how)] } else { self.leaving_with(v, layout, how, chunk) };
        let mut sums: Vec<Option<Value>> = vec![None; together.len()];
        for pass in 0..ir::fault!("rows.passes.lost", 1, passes) {
            for ((v, how), sum) in together.iter().zip(&mut sums) {
                let context = RowContext { chunk, origin: &job.s.graph.body[*v].origin, pass };
                let further = self.has_rows(layout, context);
                let share = self.share(*v, layout, *how, context);
                *sum = Some(self.with_share(*sum, share, further, context));
            }
        }
        let mut own = None;
        for ((u, how), sum) in together.into_iter().zip(sums) {
            let context = RowContext { chunk, origin: &job.s.graph.body[u].origin, pass: 0 };
            let w = self.summed_up(u, layout, how, sum.expect("invariant: there is a pass"), context);
            self.map.insert((u, chunk), w);
            own = own.or((u == v).then_some(w));
        }
        own.expect("invariant: it is the first of them")
    }

    /// Adds what a pass gives, if it has rows. A sum begins with that of the first pass, which has no bool.
    fn with_share(&mut self, sum: Option<Value>, share: Value, further: Option<Value>, context: RowContext) -> Value {
        self.build(context, |b| {
            let share = match further {
                Some(further) => {
                    let none = b.constant_like(ir::fault!("rows.passes.none", 1.0, 0.0), share);
                    b.select(further, share, none)
                }
                None => share,
            };
            match sum {
                Some(sum) => b.add(&[sum, share]),
                None => share,
            }
        })
    }

    /// The dense values of a chunk that follow from rows of a layout and need no other such value that is not there yet,
    /// first of all this one.
    fn leaving_with(&self, v: Value, layout: usize, how: RowExit, chunk: Chunk) -> Vec<(Value, RowExit)> {
        let (job, body) = (self.job, &self.job.s.graph.body);
        let mut out = vec![(v, how)];
        let here = job.virtual_stage[v.index()].and_then(|g| job.of_pass.get(&(body[v].origin.phase, g)));
        // `waits` marks values that depend on another value which leaves rows and is not emitted yet.
        let mut waits: HashMap<Value, bool> = HashMap::new();
        for u in here.into_iter().flatten().filter(|u| **u != v && job.chunk[u.index()] == chunk && !self.map.contains_key(&(**u, chunk))) {
            let waiting = body[*u].args.iter().any(|a| waits.get(a).copied().unwrap_or(false) || *a == v);
            let leaves = job.rows.from(body, *u);
            waits.insert(*u, waiting || leaves.is_some());
            match leaves {
                Some((l, how)) if l == layout && !waiting => out.push((*u, how)),
                _ => {}
            }
        }
        out
    }

    /// What a pass gives of a dense value that follows from rows.
    fn share(&mut self, v: Value, layout: usize, how: RowExit, context: RowContext) -> Value {
        match how {
            RowExit::Dispatched => {
                let x = self.dispatched(v, layout, context);
                self.spread(x, v, &self.at_layout(v, layout), context)
            }
            RowExit::Combined => self.combined(v, layout, context),
            RowExit::OverTokens => self.over_tokens(v, layout, context),
            RowExit::OverExperts => self.over_experts(v, layout, context),
        }
    }

    /// The dense value that all passes have given their share of. It is rounded now.
    fn summed_up(&mut self, v: Value, layout: usize, how: RowExit, w: Value, context: RowContext) -> Value {
        let job = self.job;
        let ty = &job.s.graph.body[v].ty;
        match how {
            RowExit::Dispatched => self.spread_out(w, v, &self.at_layout(v, layout), context),
            RowExit::Combined => {
                let w = self.of_home(w, &self.home(layout), context);
                self.finish(w, v, context)
            }
            RowExit::OverTokens => {
                let at = self.at_of_operand(v, layout);
                let w = self.build(context, |b| b.cast(w, ty.dtype));
                let experts = job.rows.layouts[layout].routing.experts;
                if self.rests(v, layout, &at) {
                    self.stands_for(w, v);
                    return w;
                }
                let w = if ty.has(experts) { self.of_groups(w, &at, context) } else { w };
                self.finish(w, v, context)
            }
            RowExit::OverExperts => {
                let at = self.at_of_operand(v, layout);
                let w = self.build(context, |b| b.cast(w, ty.dtype));
                let w = self.of_home(w, &at, context);
                self.finish(w, v, context)
            }
        }
    }

    /// The dense form of a value in rows: zero where there is no row.
    pub(in crate::partition) fn dense(&mut self, v: Value, chunk: Chunk) -> Value {
        if let Some(w) = there(self.rows.dense.get(&v), chunk) {
            return w;
        }
        let job = self.job;
        let (at, context) = (self.at(v), RowContext { chunk, origin: &job.s.graph.body[v].origin, pass: 0 });
        let mut sum = None;
        for pass in 0..self.passes(at.layout) {
            let context = RowContext { pass, ..context };
            let further = self.has_rows(at.layout, context);
            let x = self.in_pass(v, context);
            let share = self.spread(x, v, &at, context);
            sum = Some(self.with_share(sum, share, further, context));
        }
        let w = self.spread_out(sum.expect("invariant: there is a pass"), v, &at, context);
        self.rows.dense.entry(v).or_default().push((chunk, w));
        w
    }

    /// Each choice's row. A choice has it in one pass: of the others it gets zero.
    fn combined(&mut self, v: Value, layout: usize, context: RowContext) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let at = self.home(layout);
        let y = self.placed(node.args[0], &at, context);
        let home = self.tables(layout, context);
        let (slots, from) = (self.row_dim(RowDim::Slots(layout)), self.slot_dims(&at));
        let y = self.view(y, &from, &[slots], context.chunk, context.origin, None);
        self.build(context, |b| b.op(Op::Gather { dim: slots }, &[y, home.slot_of]))
    }

    /// Whether a sum over tokens is made as it rests: the gradient of a rank's experts.
    fn rests(&self, v: Value, layout: usize, at: &RowSharding) -> bool {
        let (node, experts) = (&self.job.s.graph.body[v], self.job.rows.layouts[layout].routing.experts);
        node.args.len() == 2 && node.ty.has(experts) && self.digits(experts).iter().all(|u| at.split.contains(u))
    }

    /// What a sum over rows is of: where they are, the local dims that are summed beside, and the operands there.
    fn summands(&mut self, v: Value, layout: usize, context: RowContext) -> (RowSharding, Vec<Dim>, Vec<Value>) {
        let at = self.at_of_operand(v, layout);
        let over = self.summed(v, layout);
        let args = self.job.s.graph.body[v].args.iter().map(|a| self.placed(*a, &at, context)).collect();
        (at, over, args)
    }

    /// Each expert's sum over its rows, or the sum over all rows.
    fn over_tokens(&mut self, v: Value, layout: usize, context: RowContext) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let (at, over, args) = self.summands(v, layout, context);
        let (rows, experts) = (self.row_dim(RowDim::Slot(layout)), self.group(layout));
        let by_group = [self.group_dims(&at), vec![experts]].concat();
        let ty = Type::new(sum_type(node.ty.dtype), [by_group.clone(), self.rest(v, layout)].concat());
        let table = self.table(
            if args.len() == 2 { SlotTable::Ends } else { ir::fault!("rows.sum.experts", SlotTable::Ends, SlotTable::Expert) },
            &at,
            context,
        );
        let homes = self.home_dims(&at);
        if self.rests(v, layout, &at) {
            let own = self.dim(job.rows.layouts[layout].routing.experts, &at.split);
            let ends = self.view(table, &[experts], &[own], context.chunk, context.origin, None);
            let (op, rests) = (Op::grouped_dot(rows, own, [vec![rows], homes, over].concat()), self.local_type(v));
            let ty = if self.passes(layout) == 1 { rests } else { Type::new(ty.dtype, rests.dims) };
            return self.push(op, vec![args[0], args[1], ends], ty, context.chunk, context.origin, None);
        }
        self.build(context, |b| {
            let sum = match args[..] {
                [x, y] => {
                    let over = [vec![rows], homes, over].concat();
                    b.typed(Op::grouped_dot(rows, experts, over), &[x, y, table], ty.clone())
                }
                _ => {
                    let x = wide_sum(b, args[0], &over);
                    b.typed(Op::Scatter { dim: experts }, &[x, table], ty.clone())
                }
            };
            b.body[sum].ty = ty;
            if node.ty.has(job.rows.layouts[layout].routing.experts) { sum } else { b.sum(sum, &by_group) }
        })
    }

    /// Each token's sum over its rows.
    fn over_experts(&mut self, v: Value, layout: usize, context: RowContext) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let (at, over, args) = self.summands(v, layout, context);
        let token = self.row_dim(RowDim::Token(layout));
        let ty = Type::new(sum_type(node.ty.dtype), [self.home_dims(&at), vec![token], self.rest(v, layout)].concat());
        let table = self.table(SlotTable::Token, &at, context);
        self.build(context, |b| {
            let x = match args[..] {
                [x, y] if over.is_empty() => {
                    let [x, y] = [x, y].map(|x| b.cast(x, ty.dtype));
                    b.mul(x, y)
                }
                [x, y] => b.typed(Op::dot(over), &[x, y], Type::scalar(ty.dtype)),
                _ => wide_sum(b, args[0], &over),
            };
            let sum = b.typed(Op::Scatter { dim: token }, &[x, table], ty.clone());
            b.body[sum].ty = ty;
            sum
        })
    }

    /// The local dims that a sum is over, other than tokens and experts.
    fn summed(&mut self, v: Value, layout: usize) -> Vec<Dim> {
        let job = self.job;
        let (node, l) = (&job.s.graph.body[v], &job.rows.layouts[layout]);
        let over = match &node.op {
            Op::Dot { over, .. } | Op::Reduce { over, .. } => over,
            other => unreachable!("invariant: `{}` is no sum", other.name()),
        };
        let rest = over.iter().filter(|d| !l.tokens.contains(d) && **d != l.routing.experts);
        rest.map(|d| self.dim_of(node.args[0], *d)).collect()
    }
}

/// The type in which values of a type are summed, to be rounded once.
fn sum_type(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}

fn wide_sum(b: &mut Builder, x: Value, over: &[Dim]) -> Value {
    let wide = sum_type(b.body[x].ty.dtype);
    if over.is_empty() { b.cast(x, wide) } else { b.typed(Op::Reduce { kind: Reduce::Sum, over: over.to_vec() }, &[x], Type::scalar(wide)) }
}
