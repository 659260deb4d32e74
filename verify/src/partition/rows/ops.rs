//! Ops that make rows, ops on rows, and combinations.

use super::space::{all, some};
use super::zero::named;
use super::{Count, Layout, Local, Packed, ShardView, Stage, Steps, Table, View};
use crate::terms::digits::{Digits, LinearForm, add};
use crate::terms::{Term, TermView};
use ir::dim::Dim;
use ir::graph::Value;
use ir::local::{Chunk, Local as Graph};
use ir::mesh::SubAxis;
use ir::op::{Binary, Op};
use ir::sharded::{Partial, Placement};
use std::collections::BTreeSet;
use std::mem::discriminant;

/// Local dims and the dims of the graph that they are parts of, where they have more than one element.
pub type Names = Vec<(Dim, Dim)>;

impl Stage<'_, '_> {
    pub(super) fn of_rows(&mut self, w: Value) -> Option<Local> {
        let chunk = self.local.chunks[w.index()];
        let p = match (&self.local.body[w].op, self.local.body[w].args.as_slice()) {
            (Op::Gather { dim }, [a, t]) => {
                let (dim, a, t) = (*dim, *a, *t);
                match self.read_table(t, chunk) {
                    Some((Table::SlotOf, layout, view)) => return self.combined(w, dim, a, layout, &view),
                    Some((table, layout, view)) => self.looked_up(dim, a, table, layout, &view, chunk),
                    None => None,
                }
            }
            (Op::Scatter { dim }, [a, t]) => self.dispatched_by_choice(w, *dim, *a, *t),
            (Op::Binary(Binary::Mul), [a, b]) => {
                let (a, b) = (*a, *b);
                self.dispatched(w, a, b).or_else(|| self.dispatched(w, b, a))
            }
            (Op::GroupedDot { rows, experts, over, .. }, [a, b, ends]) => self.weighted(w, (*rows, *experts, over.as_slice()), [*a, *b, *ends]),
            _ => None,
        };
        match p {
            Some(p) => self.write_rows(w, &p),
            None => self.place_by_place(w),
        }
    }

    /// The rows of a dense value at the positions that rows and a dim `key` name, or of a value without other dims of
    /// tokens and experts.
    fn placed(&self, a: Value, layout: Layout, row: &View, key: Option<(Dim, Steps)>, chunk: Chunk) -> Option<Packed> {
        let (v, held) = self.dense_value(a, chunk)?;
        let home = self.shards.home(layout);
        let dims = self.local.body.dims_of(a);
        let moves = |digits: &Digits| digits.iter().any(|d| d.1 != 0);
        for (d, steps) in row.dims.iter().chain(&key) {
            let want = self.shards.dense(v, home, steps)?;
            let fits = match dims.iter().position(|e| e == d) {
                Some(k) => held.x.dims[k] == want,
                None => !moves(&want),
            };
            if !fits {
                return None;
            }
        }
        let mut inside: LinearForm = held.x.coords.clone();
        for (u, steps) in &row.coords {
            let want = self.shards.dense(v, home, steps)?;
            let at = inside.iter().position(|c| c.0 == *u);
            match (moves(&want), at) {
                (true, Some(k)) if inside[k].1 == want => drop(inside.remove(k)),
                (false, None) => {}
                _ => return None,
            }
        }
        let named = |d: &Dim| row.of(*d).is_some() || key.as_ref().is_some_and(|k| k.0 == *d);
        let rest = dims.iter().zip(&held.x.dims).filter(|(d, _)| !named(d)).map(|(d, digits)| (*d, digits.clone())).collect();
        Some(Packed { of: v, layout, row: row.clone(), rest, inside, partial: held.partial.clone() })
    }

    /// A dense value, looked up by the token, the expert or both of each slot.
    fn looked_up(&self, dim: Dim, a: Value, table: Table, layout: Layout, view: &View, chunk: Chunk) -> Option<Packed> {
        let (tokens, experts) = (all(Count::Token, self.shards.home(layout).count()), all(Count::Expert, layout.group));
        let key = match table {
            Table::Token => tokens,
            Table::Expert => experts,
            Table::Place => [tokens, experts].concat(),
            _ => return None,
        };
        self.is_plain(dim).then(|| self.placed(a, layout, view, Some((dim, key)), chunk)).flatten()
    }

    /// Shows that rows are those of `b`: all that its sharding gives to a rank, except for the dims of tokens and
    /// experts. Returns the names of the other dims.
    pub(super) fn fits(&self, p: &Packed, b: Value) -> Option<Names> {
        self.fits_but(p, b, None)
    }

    fn fits_but(&self, p: &Packed, b: Value, but: Option<Dim>) -> Option<Names> {
        let (mut dims, form) = self.shards.rest(b, p.layout);
        dims.retain(|d| Some(d.0) != but);
        let space = self.shards.space(super::RoutedTensor::Rows(p.of, p.layout))?;
        let rows = super::Space(space.0[1..].to_vec());
        let same = self.shards.root[b.index()] == p.of && form == p.inside && self.partial(b) == p.partial;
        if !same || !p.row.covers(&rows) {
            return None;
        }
        let mut names = vec![];
        for (d, digits) in dims.iter().filter(|d| d.1 != Digits::default()) {
            names.push((p.rest.iter().find(|r| r.1 == *digits)?.0, *d));
        }
        (names.len() == p.rest.iter().filter(|r| r.1 != Digits::default()).count()).then_some(names)
    }

    pub(super) fn partial(&self, v: Value) -> Vec<(SubAxis, Partial)> {
        let of = |u| match self.shards.s.sharding(v)[u] {
            Placement::Partial(kind) => Some((u, kind)),
            Placement::Replicated | Placement::Split(_) => None,
        };
        self.shards.s.mesh.ids().filter_map(of).collect()
    }

    /// Rows of tokens, times how many choices name the slot.
    fn dispatched(&mut self, w: Value, x: Value, times: Value) -> Option<Packed> {
        let chunk = self.local.chunks[w.index()];
        let (Table::Times, layout, view) = self.read_table(times, chunk)? else { return None };
        // A dense value without tokens is the same in all rows.
        let p = self.read_rows(x, chunk).or_else(|| self.placed(x, layout, &view, None, chunk))?;
        if p.layout != layout || !p.row.is_like(&view) {
            return None;
        }
        self.dispatch_of(w, p, false)
    }

    /// The sum over the choices that name a slot.
    fn dispatched_by_choice(&mut self, w: Value, dim: Dim, x: Value, slots: Value) -> Option<Packed> {
        let chunk = self.local.chunks[w.index()];
        let (Table::SlotOf, layout, view) = self.read_table(slots, chunk)? else { return None };
        let p = self.placed(x, layout, &view, None, chunk)?;
        let summed = view.dims.iter().all(|(d, _)| !self.local.body[w].ty.has(*d));
        let layout = self.with_slots(layout, self.local.body.dims.size(dim)).filter(|_| self.is_plain(dim) && summed)?;
        let row = View { dims: vec![(dim, self.slots(layout))], coords: view.coords };
        self.dispatch_of(w, Packed { layout, row, ..p }, true)
    }

    /// The steps of all slots of a home, by group.
    fn slots(&self, layout: Layout) -> Steps {
        let groups = self.shards.home(layout).size / layout.group;
        [some(Count::Expert, groups, layout.group), all(Count::Slot, layout.slots)].concat()
    }

    /// The dispatch of these rows. `summed` says whether the sum over choices is done already.
    fn dispatch_of(&self, w: Value, p: Packed, summed: bool) -> Option<Packed> {
        let body = &self.shards.s.graph.body;
        let home = self.shards.home(p.layout);
        for v in &self.shards.routed.users[p.of.index()] {
            let Op::Dispatch(r) = &body[*v].op else { continue };
            let chosen = self.shards.root[body[*v].args[1].index()] == home.chosen && home.experts.contains(&r.experts);
            if !chosen || body[*v].ty.dtype != self.local.body[w].ty.dtype || self.shards.row_coords(*v, p.layout).as_ref() != Some(&p.row.coords) {
                continue;
            }
            if let Some(names) = self.fits_but(&p, body[*v].args[0], summed.then_some(r.choice)) {
                return self.result(w, *v, p.layout, &p.row, &names);
            }
        }
        None
    }

    /// Rows of `v` with this layout, given the names of the other dims.
    fn result(&self, w: Value, v: Value, layout: Layout, row: &View, names: &Names) -> Option<Packed> {
        let (dims, inside) = self.shards.rest(v, layout);
        let mut rest = vec![];
        for l in self.local.body.dims_of(w) {
            if row.of(*l).is_some() || self.local.body.dims.size(*l) == 1 {
                continue;
            }
            let d = names.iter().find(|n| n.0 == *l)?.1;
            rest.push((*l, dims.iter().find(|e| e.0 == d)?.1.clone()));
        }
        let shown = |d: &(Dim, Digits)| d.1 == Digits::default() || rest.iter().any(|r| r.1 == d.1);
        let kept = row.dims.iter().all(|(l, steps)| steps.is_empty() || self.local.body[w].ty.has(*l));
        if !kept || !dims.iter().all(shown) {
            return None;
        }
        Some(Packed { of: self.shards.root[v.index()], layout, row: row.clone(), rest, inside, partial: self.partial(v) })
    }

    /// An op that does the same at every token and expert.
    pub fn place_by_place(&mut self, w: Value) -> Option<Local> {
        let chunk = self.local.chunks[w.index()];
        let args = self.local.body[w].args.clone();
        let packs: Vec<Option<Packed>> = args.iter().map(|a| self.read_rows(*a, chunk)).collect();
        let lead = packs.iter().flatten().next()?.clone();
        for k in 0..self.shards.routed.users[lead.of.index()].len() {
            let v = self.shards.routed.users[lead.of.index()][k];
            if let Some(p) = self.is_op(w, v, &lead, &packs) {
                return self.write_rows(w, &p);
            }
        }
        None
    }

    fn is_op(&mut self, w: Value, v: Value, lead: &Packed, packs: &[Option<Packed>]) -> Option<Packed> {
        let (local, s) = (self.local, self.shards.s);
        let (node, g) = (&local.body[w], &s.graph.body[v]);
        let same = discriminant(&node.op) == discriminant(&g.op) && node.ty.dtype == g.ty.dtype && node.args.len() == g.args.len();
        if !same || !self.shards.maps(v, lead.layout.home) {
            return None;
        }
        let coords = self.shards.row_coords(v, lead.layout)?;
        let mut names = Names::new();
        for ((a, b), p) in node.args.iter().zip(&g.args).zip(packs) {
            names.extend(match p {
                Some(p) => self.fits_here(p, *b, *a, lead, &coords)?,
                None => self.same_for_all(*a, *b, lead.layout, local.chunks[w.index()])?,
            });
        }
        // The dims of rows come first, then those of what is in a row, in order.
        let rest = self.shards.rest_of(v, self.shards.home(lead.layout));
        let first = node.ty.dims.len().checked_sub(rest.len())?;
        if node.ty.dims[..first].iter().any(|l| lead.row.of(*l).is_none() && local.body.dims.size(*l) != 1) {
            return None;
        }
        for (l, d) in node.ty.dims[first..].iter().zip(&rest) {
            if lead.row.of(*l).is_some() || !self.is_part_of(*l, *d, v) {
                return None;
            }
            names.push((*l, *d));
        }
        let large = |n: &(Dim, Dim)| local.body.dims.size(n.0) > 1;
        names.retain(large);
        names.sort_unstable();
        names.dedup();
        if names.iter().enumerate().any(|(k, n)| names[..k].iter().any(|m| m.0 == n.0 || m.1 == n.1)) {
            return None;
        }
        let (ours, theirs) = (named(&node.op), named(&g.op));
        let holder = |d: Dim| std::iter::once(&v).chain(&g.args).find(|a| s.graph.body[**a].ty.has(d)).copied();
        let is_named = |(l, d): (&Dim, &Dim)| {
            let part = holder(*d).is_some_and(|of| self.is_part_of(*l, *d, of));
            part && (local.body.dims.size(*l) == 1 || names.contains(&(*l, *d)))
        };
        if ours.len() != theirs.len() || !ours.iter().zip(&theirs).all(is_named) {
            return None;
        }
        let mut next = ours.iter();
        if g.op.map_dims(&mut |d| next.next().copied().unwrap_or(d)) != node.op {
            return None;
        }
        self.result(w, v, lead.layout, &lead.row, &names)
    }

    /// Whether a local dim is a rank's part of a value's dim.
    fn is_part_of(&self, l: Dim, d: Dim, of: Value) -> bool {
        let sharding = self.shards.s.sharding(of);
        self.shards.is_part(&self.local.body.dims[l], d, &|u| sharding[u] == Placement::Split(d))
    }

    /// The names of an operand's dims, if its rows are at the same positions as others and where the result should
    /// be.
    fn fits_here(&self, p: &Packed, b: Value, a: Value, lead: &Packed, coords: &[(SubAxis, Steps)]) -> Option<Names> {
        let dtype = self.local.body[a].ty.dtype == self.shards.s.graph.body[b].ty.dtype;
        let here = p.layout == lead.layout && p.row.is_like(&lead.row) && p.row.coords == coords;
        if dtype && here { self.fits(p, b) } else { None }
    }

    /// The names of a dense operand's dims, if it has neither tokens nor experts.
    fn same_for_all(&mut self, a: Value, b: Value, layout: Layout, chunk: Chunk) -> Option<Names> {
        let s = self.shards.s;
        let dims = s.graph.body.dims_of(b);
        let rest = self.shards.rest_of(b, self.shards.home(layout)).len() == dims.len();
        if !rest || self.sees(a, b, chunk) != Ok(true) || self.dims(b, self.local.body.dims_of(a)).is_err() {
            return None;
        }
        Some(self.local.body.dims_of(a).iter().copied().zip(dims.iter().copied()).collect())
    }

    /// Checks that `ends` are the ends of experts for these rows.
    pub(super) fn ends_of(&self, p: &Packed, rows: Dim, experts: Dim, ends: Value, chunk: Chunk) -> Option<()> {
        let (Table::Ends, layout, view) = self.read_table(ends, chunk)? else { return None };
        let of_experts = view.of(experts) == Some(&all(Count::Expert, layout.group));
        let of_rows = match p.row.of(rows) {
            Some(steps) => *steps == all(Count::Slot, p.layout.slots),
            None => p.layout.slots == 1 && self.local.body.dims.size(rows) == 1,
        };
        let same = layout.has_rows_of(&p.layout) && view.without(experts).is_like(&p.row.without(rows));
        (of_experts && of_rows && same).then_some(())
    }

    /// Each row times its expert's matrix.
    fn weighted(&mut self, w: Value, (rows, experts, over): (Dim, Dim, &[Dim]), [a, b, ends]: [Value; 3]) -> Option<Packed> {
        let chunk = self.local.chunks[w.index()];
        let (local, s) = (self.local, self.shards.s);
        let p = self.read_rows(a, chunk)?;
        self.ends_of(&p, rows, experts, ends, chunk)?;
        let q = self.placed(b, p.layout, &p.row, Some((experts, all(Count::Expert, p.layout.group))), chunk)?;
        let over: Vec<Dim> = over.iter().copied().filter(|d| *d != experts).collect();
        for v in self.shards.routed.users[p.of.index()].clone() {
            let g = &s.graph.body[v];
            let Op::Dot { over: summed, .. } = &g.op else { continue };
            if g.ty.dtype != local.body[w].ty.dtype || !self.shards.maps(v, p.layout.home) {
                continue;
            }
            let Some(coords) = self.shards.row_coords(v, p.layout) else { continue };
            for (x, y) in [(g.args[0], g.args[1]), (g.args[1], g.args[0])] {
                let (of_p, of_q) = (self.fits_here(&p, x, a, &p, &coords), self.fits_here(&q, y, b, &p, &coords));
                if let (Some(names), Some(others)) = (of_p, of_q)
                    && let Some(names) = joined(names, others)
                    && same_sum(local, &over, summed, &names)
                {
                    return self.result(w, v, p.layout, &p.row, &names);
                }
            }
        }
        None
    }

    /// Choices look up their rows.
    fn combined(&mut self, w: Value, dim: Dim, y: Value, layout: Layout, view: &View) -> Option<Local> {
        let chunk = self.local.chunks[w.index()];
        let p = self.read_rows(y, chunk)?;
        let body = &self.shards.s.graph.body;
        let home = self.shards.home(p.layout);
        let same = layout.has_rows_of(&p.layout) && [0, p.layout.slots].contains(&layout.slots);
        let row = View { dims: vec![(dim, self.slots(p.layout))], coords: view.coords.clone() };
        if !same || !self.is_plain(dim) || !p.row.is_like(&row) {
            return None;
        }
        let is_combination = |v: &Value| {
            let Op::Combine(r) = &body[*v].op else { return None };
            let chosen = self.shards.root[body[*v].args[1].index()] == home.chosen && home.experts.contains(&r.experts);
            if !chosen || body[*v].ty.dtype != self.local.body[w].ty.dtype {
                return None;
            }
            let names = self.fits(&p, body[*v].args[0])?;
            self.dense_result(w, *v, p.layout, view, &names)
        };
        let held = self.shards.routed.users[p.of.index()].iter().find_map(is_combination)?;
        Some(self.of_pass(held, p.layout, true, view))
    }

    /// A dense value as its sharding says, given what these indices count and the names of other dims.
    pub(super) fn dense_result(&self, w: Value, v: Value, layout: Layout, view: &View, names: &Names) -> Option<ShardView> {
        let home = self.shards.home(layout);
        let (rest, inside) = self.shards.rest(v, layout);
        let mut dims = vec![];
        for l in self.local.body.dims_of(w) {
            let size = self.local.body.dims.size(*l);
            dims.push(match (view.of(*l), names.iter().find(|n| n.0 == *l)) {
                (Some(steps), _) => self.shards.dense(v, home, steps)?,
                (None, _) if size == 1 => Digits::default(),
                (None, Some(n)) => rest.iter().find(|e| e.0 == n.1)?.1.clone(),
                (None, None) => return None,
            });
        }
        let mut form = inside;
        for (u, steps) in &view.coords {
            let digits = self.shards.dense(v, home, steps)?;
            if digits.iter().any(|d| d.1 != 0) {
                form = add(&form, &vec![(*u, digits)])?;
            }
        }
        let x = TermView { term: Term(self.shards.root[v.index()].0), offset: 0, coords: form, dims };
        Some(ShardView { x, partial: self.partial(v), turn: None })
    }
}

/// The names of both operands' dims, if they agree.
pub(super) fn joined(mut a: Names, b: Names) -> Option<Names> {
    a.extend(b);
    a.sort_unstable();
    a.dedup();
    let clash = a.iter().enumerate().any(|(k, n)| a[..k].iter().any(|m| m.0 == n.0 || m.1 == n.1));
    (!clash).then_some(a)
}

/// Whether sums over local dims and over dims of the graph are the same.
pub(super) fn same_sum(local: &Graph, ours: &[Dim], theirs: &[Dim], names: &Names) -> bool {
    let known = |l: &Dim| names.iter().any(|n| n.0 == *l);
    let a: BTreeSet<Dim> = names.iter().filter(|n| ours.contains(&n.0)).map(|n| n.1).collect();
    let b: BTreeSet<Dim> = names.iter().filter(|n| theirs.contains(&n.1)).map(|n| n.1).collect();
    a == b && ours.iter().all(|l| known(l) || local.body.dims.size(*l) == 1)
}
