//! Tables of rows: integers that follow from what is chosen.
//!
//! What each holds, per home, is its meaning; a rule says of an op on tables what its result holds. Experts are
//! numbered by group and then within it, tokens within their home. An expert is *hit* by a token that chooses it,
//! once or more often. Slots of a group are numbered by expert, then by token, over all hits.

use super::space::{all, some};
use super::{Count, Layout, RoutedTensor, Stage, Steps, View};
use crate::partition::shards::Local;
use crate::terms::TermView;
use crate::terms::digits::{Digits, add};
use ir::dim::{Dim, IndexMap, Order};
use ir::graph::Value;
use ir::local::Chunk;
use ir::op::{Binary, Collective, Compare, DType, Op, Reduce, Unary};
use std::rc::Rc;

/// All whole numbers below this are exact in f64.
const EXACT: f64 = (1u64 << 53) as f64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Table {
    /// `[expert, token, choice]`: whether the choice is the expert.
    Named,
    /// `[expert, token]`: whether the token hits the expert.
    Hit,
    /// `[expert]`: its hits.
    Total,
    /// `[expert]`: its hits, less than zero.
    MinusTotal,
    /// `[expert]`: hits of it and of experts before it in its group: where its slots end. Of a pass, as many of them
    /// as are in it.
    Ends,
    /// `[expert]`: the same hits, less those before the pass, which may be less than none.
    Less,
    /// `[expert]`: of the same hits, those that are not before the pass.
    Past,
    /// `[expert]`: hits of experts before it in its group.
    Begin,
    /// `[]`: the most rows that the home has for a group.
    Most,
    /// `[]`: the most rows that a home has for a group, of those that differ from each other along the sub-axes of
    /// these numbers, a bit each.
    Peak(u64),
    /// `[]`: whether one of these homes has more rows for a group than come before the pass.
    Further(u64),
    /// `[expert, token]`: hits of the expert by tokens up to this one.
    Among,
    /// `[expert, token]`: of a hit, its number in its group, from 1; of a pass, from 1 for the first of its rows.
    Rank,
    /// `[expert, token]`: whether the rank is not more than there are slots.
    Fits,
    /// `[expert, token]`: whether the rank is not that of a row before those of the pass.
    Behind,
    /// `[expert, token]`: both: whether the rank is one of the slots.
    Within,
    /// `[expert, token]`: of a hit, its number among all slots of the home, from 1.
    Number,
    /// `[expert, token]`: the same; 0 where there is no hit.
    NumberOrZero,
    /// `[token, choice]`: the slot's number from 1, 0 of a choice that is no expert's.
    NumberOf,
    /// `[token, choice]`: the slot's number from 0, -1 of a choice that is no expert's.
    SlotOf,
    /// `[slot]`: how many choices name it.
    Times,
    /// `[slot]`: the same, 1 if none does.
    TimesOrOne,
    /// `[slot]`: the token's number from 1, as often as choices name the slot.
    Tokens,
    /// `[slot]`: the token's number from 1, 0 if it is nobody's.
    TokenOrZero,
    /// `[slot]`: the token, -1 if it is nobody's.
    Token,
    /// `[expert, slot]`: whether the slot of the expert's group is not before the expert's end.
    Ended,
    /// `[slot]`: how many experts of the group have ended.
    Before,
    /// `[slot]`: whether it is a row's.
    Someones,
    /// `[slot]`: the expert in its group, -1 if it is nobody's.
    Expert,
    /// `[slot]`: the token times the experts of a group.
    TokenTimes,
    /// `[slot]`: of a row, the next; else anything.
    AnyPlace,
    /// `[slot]`: the token times the experts of a group, and the expert; -1 if it is nobody's.
    Place,
}

impl Stage<'_, '_> {
    /// Whether a dim's indices are those of its elements.
    pub(super) fn is_plain(&self, d: Dim) -> bool {
        let info = &self.local.body.dims[d];
        info.index == IndexMap::whole(info.size) && info.order == Order::Plain
    }

    /// The number that a value is everywhere, if it is constant.
    pub(super) fn constant(&self, a: Value) -> Option<f64> {
        let node = &self.local.body[a];
        match &node.op {
            Op::Const(c) => Some(c.0),
            Op::Expand => self.constant(node.args[0]),
            _ => None,
        }
    }

    fn numbers(&self, a: Value, to: Chunk) -> Option<TermView> {
        let one = self.one(a, to)?;
        (self.shards.tensor(one.x.term) == Some(RoutedTensor::Numbers) && one.partial.is_empty()).then(|| one.x.clone())
    }

    /// The numbers of a value that moves along one dim only: the first one, the dim, and its digits.
    fn along_one(&self, a: Value, to: Chunk) -> Option<(u64, Dim, Digits)> {
        let x = self.numbers(a, to)?;
        let still = |digits: &Digits| digits.iter().all(|d| d.1 == 0);
        let mut moving = self.local.body.dims_of(a).iter().zip(&x.dims).filter(|(_, digits)| !still(digits));
        let first = moving.next().or_else(|| self.local.body.dims_of(a).iter().zip(&x.dims).next());
        let (d, digits) = first?;
        (moving.next().is_none() && x.coords.is_empty()).then(|| (x.offset, *d, digits.clone()))
    }

    /// The table or the numbers that a node holds.
    pub(super) fn table(&mut self, w: Value) -> Option<Local> {
        let chunk = self.local.chunks[w.index()];
        let node = self.local.body[w].clone();
        let number = |stage: &mut Self, x: TermView| {
            let term = stage.shards.term(RoutedTensor::Numbers);
            Some(Local::One(Rc::new(super::ShardView { x: TermView { term, ..x }, partial: vec![], turn: None })))
        };
        let view = |offset: u64, dims: Vec<Digits>| TermView { term: super::Term(0), offset, coords: vec![], dims };
        match (&node.op, node.args.as_slice()) {
            (Op::Const(c), []) if c.0 >= 0.0 && c.0.fract() == 0.0 && c.0 < EXACT => return number(self, view(c.0 as u64, vec![])),
            (Op::Iota(d), []) if self.is_plain(*d) => return number(self, view(0, vec![Digits::new([(self.local.body.dims.size(*d), 1)])])),
            (Op::Binary(Binary::Mul), [a, b]) => {
                for (a, b) in [(a, b), (b, a)] {
                    if let (Some(x), Some(c)) = (self.numbers(*a, chunk), self.constant(*b))
                        && (0.0..EXACT).contains(&c)
                        && self.local.body.dims_of(*a) == node.ty.dims
                    {
                        let times = |digits: &Digits| Digits::new(digits.iter().map(|(n, s)| (n, s * c as u64)));
                        let coords = x.coords.iter().map(|(u, digits)| (*u, times(digits))).collect();
                        return number(self, TermView { offset: x.offset * c as u64, coords, dims: x.dims.iter().map(times).collect(), ..x });
                    }
                }
            }
            (Op::Add, args) => {
                if let Some(all) = args.iter().map(|a| self.numbers(*a, chunk)).collect::<Option<Vec<_>>>() {
                    return self.sum_of_numbers(w, &all).and_then(|x| number(self, x));
                }
            }
            _ => {}
        }
        let (table, layout, view) = self.rule(w, chunk)?;
        self.write(w, RoutedTensor::Table(table, layout), &view, vec![])
    }

    /// The sum of numbers, at most one of which moves along each dim.
    fn sum_of_numbers(&self, w: Value, all: &[TermView]) -> Option<TermView> {
        let body = &self.local.body;
        let mut out = TermView { term: all[0].term, offset: 0, coords: vec![], dims: vec![] };
        for x in all {
            out.offset += x.offset;
            out.coords = add(&out.coords, &x.coords)?;
        }
        for d in body.dims_of(w) {
            let still = Digits::new([(body.dims.size(*d), 0)]);
            let of = body[w].args.iter().zip(all).filter_map(|(a, x)| body.dims_of(*a).iter().position(|e| e == d).map(|k| &x.dims[k]));
            let mut moving = of.filter(|digits| **digits != still);
            out.dims.push(moving.next().cloned().unwrap_or(still.clone()));
            if moving.next().is_some() {
                return None;
            }
        }
        Some(out)
    }

    /// The table that a node computes from other tables.
    fn rule(&mut self, w: Value, chunk: Chunk) -> Option<(Table, Layout, View)> {
        let node = self.local.body[w].clone();
        let args = node.args.as_slice();
        let is = |found: &Option<(Table, Layout, View)>, table: Table| found.as_ref().is_some_and(|f| f.0 == table);
        let read: Vec<Option<(Table, Layout, View)>> = args.iter().map(|a| self.read_table(*a, chunk)).collect();
        // Reads operand `k` as another table with the same indices.
        let same = |k: usize, table: Table| read[k].clone().map(|(_, layout, view)| (table, layout, view));
        // Combines two tables of one layout, given in either order.
        let both = |x: Table, y: Table, z: Table| {
            let (a, b) = (read.first()?.as_ref()?, read.get(1)?.as_ref()?);
            let fits = ((a.0, b.0) == (x, y) || (a.0, b.0) == (y, x)) && a.1 == b.1;
            Some((z, a.1, a.2.and(&b.2)?)).filter(|_| fits && args.len() == 2)
        };
        // Finds the operand that holds this table, and the constant that the other operand is.
        let with_constant = |table: Table| {
            let k = (0..2).find(|k| is(&read[*k], table))?;
            Some((k, self.constant(args[1 - k])?)).filter(|_| args.len() == 2 && self.fills(w, args[k]))
        };
        match &node.op {
            // This says whether a choice is the expert of this number.
            Op::Compare(Compare::Eq) => (0..2).find_map(|k| self.named(args[k], args[1 - k], chunk)),
            Op::Reduce { kind: Reduce::Any, over } if is(&read[0], Table::Named) => {
                let (_, layout, view) = read[0].clone()?;
                // A token hits an expert if any of its choices names it.
                let picks = all(Count::Choice, self.shards.home(layout).picks);
                Some((Table::Hit, layout, reduced(&view, over, &picks)?))
            }
            Op::Cast if is(&read[0], Table::Hit) || is(&read[0], Table::Ended) || is(&read[0], Table::Times) && node.ty.dtype != DType::Bool => {
                read[0].clone()
            }
            Op::Reduce { kind: Reduce::Sum, over } => {
                let (table, layout, view) = read[0].clone()?;
                let home = self.shards.home(layout);
                match table {
                    Table::Hit if layout.from.is_none() => Some((Table::Total, layout, reduced(&view, over, &all(Count::Token, home.count()))?)),
                    Table::Ended => Some((Table::Before, layout, reduced(&view, over, &all(Count::Expert, layout.group))?)),
                    _ => None,
                }
            }
            Op::Cumsum { over, reverse: false } => {
                let (table, layout, view) = read[0].clone()?;
                let (home, n) = (self.shards.home(layout), self.local.body.dims.size(*over));
                match table {
                    // The dim counts the consecutive experts of a group.
                    Table::Total if home.size.is_multiple_of(n) && view.of(*over) == Some(&all(Count::Expert, n)) => {
                        Some((Table::Ends, Layout { group: n, ..layout }, view))
                    }
                    Table::Hit if layout.from.is_none() && view.of(*over) == Some(&all(Count::Token, home.count())) => {
                        Some((Table::Among, layout, view))
                    }
                    _ => None,
                }
            }
            Op::Unary(Unary::Neg) if is(&read[0], Table::Total) => same(0, Table::MinusTotal),
            Op::Add if args.len() == 2 => {
                if let Some((k, c)) = with_constant(Table::NumberOf).filter(|f| f.1 == -1.0) {
                    return same(k, Table::SlotOf).filter(|_| c == -1.0);
                }
                // The constant takes off the rows before a pass.
                for (table, less) in [(Table::Rank, Table::Rank), (Table::Ends, Table::Less)] {
                    if let Some((k, c)) = with_constant(table).filter(|f| f.1 < 0.0 && f.1 > -EXACT && f.1.fract() == 0.0) {
                        let (less, layout, view) = same(k, less)?;
                        return Some((less, Layout { from: Some(-c as u64), ..layout }, view)).filter(|_| layout.from.is_none());
                    }
                }
                if let Some((k, _)) = with_constant(Table::TokenOrZero).filter(|f| f.1 == -1.0) {
                    return same(k, Table::Token);
                }
                // A layout of totals has no group, since totals do not depend on the groups' size.
                let (a, b) = (read.first()?.as_ref(), read.get(1)?.as_ref());
                if let (Some(a), Some(b)) = (a, b) {
                    let (a, b) = if a.1.group == 0 { (b, a) } else { (a, b) };
                    let of_ends = Layout { group: 0, ..a.1 } == b.1;
                    return match (a.0, b.0) {
                        (Table::Ends, Table::MinusTotal) if of_ends => Some((Table::Begin, a.1, a.2.and(&b.2)?)),
                        // Hits of the experts before, plus hits of this expert up to this token, are all hits of the
                        // group up to this one.
                        (Table::Begin, Table::Among) if of_ends => Some((Table::Rank, a.1, a.2.and(&b.2)?)),
                        _ => both(Table::TokenTimes, Table::Expert, Table::AnyPlace),
                    };
                }
                (0..2).find_map(|k| self.numbered(&read[k], args[1 - k], chunk))
            }
            Op::Compare(Compare::Le) => match (&read[0], self.constant(args[1])) {
                (Some((Table::Rank, layout, view)), Some(room)) if room >= 0.0 && self.fills(w, args[0]) => {
                    Some((Table::Fits, Layout { slots: room as u64, from: layout.from.or(Some(0)), ..*layout }, view.clone()))
                }
                (Some((Table::Ends, layout, view)), None) => {
                    let (first, d, digits) = self.along_one(args[1], chunk)?;
                    let slots = self.local.body.dims.size(d);
                    let counts = first == 0 && digits == Digits::new([(slots, 1)]) && self.local.body.dims_of(args[1]).len() == 1;
                    let mut view = view.clone();
                    if !counts || view.of(d).is_some() || layout.from.is_some() && layout.slots != slots {
                        return None;
                    }
                    view.dims.push((d, all(Count::Slot, slots)));
                    Some((Table::Ended, Layout { slots, ..*layout }, view))
                }
                _ => None,
            },
            Op::Collective { kind: Collective::AllReduce(Reduce::Max), subs, stages: None, .. } if node.ty.dims.is_empty() => {
                let (_, layout, view) = self.most(args[0], &read[0], chunk)?;
                let homes = self.shards.home(layout).homes.iter().enumerate().filter(|(_, h)| subs.contains(&h.0));
                let among = homes.fold(0u64, |set, (k, _)| set | 1 << k);
                let coords = view.coords.into_iter().filter(|c| !subs.contains(&c.0)).collect();
                Some((Table::Peak(among), layout, View { dims: vec![], coords }))
            }
            Op::Compare(Compare::Gt) if args.len() == 2 && node.ty.dims.is_empty() => {
                let (among, layout, view) = match read[0].clone() {
                    Some((Table::Peak(among), layout, view)) => (among, layout, view),
                    own => {
                        let (_, layout, view) = self.most(args[0], &own, chunk)?;
                        (0, layout, view)
                    }
                };
                let before = self.constant(args[1]).filter(|c| (0.0..EXACT).contains(c) && c.fract() == 0.0)?;
                Some((Table::Further(among), Layout { from: Some(before as u64), ..layout }, view)).filter(|_| layout.from.is_none())
            }
            Op::Compare(Compare::Gt) => match (&read[0], self.constant(args[1])) {
                (Some((Table::Rank, layout, view)), Some(0.0)) if layout.from.is_some() && self.fills(w, args[0]) => {
                    Some((Table::Behind, *layout, view.clone()))
                }
                _ => None,
            },
            Op::Binary(Binary::And) => {
                let (a, b) = (read[0].clone()?, read[1].clone()?);
                let view = a.2.and(&b.2)?;
                let (a, b) = if b.0 == Table::Hit || a.0 == Table::Behind { (b, a) } else { (a, b) };
                match (a.0, b.0) {
                    (Table::Fits, Table::Behind) if Layout { slots: 0, ..a.1 } == b.1 => Some((Table::Within, a.1, view)),
                    // This leaves the hits of a pass. The first pass needs no lower bound, as no rows come before it.
                    (Table::Hit, Table::Within) if a.1.from.is_none() && a.1.home == b.1.home => Some((Table::Hit, b.1, view)),
                    (Table::Hit, Table::Fits) if a.1.from.is_none() && a.1.home == b.1.home && b.1.from == Some(0) => Some((Table::Hit, b.1, view)),
                    _ => None,
                }
            }
            Op::Compare(Compare::Lt) => match with_constant(Table::Before)? {
                // All experts have ended before a slot that is nobody's.
                (0, c) if c == read[0].as_ref()?.1.group as f64 => same(0, Table::Someones),
                _ => None,
            },
            Op::Compare(Compare::Ge) => with_constant(Table::Expert).filter(|f| *f == (0, 0.0)).and_then(|_| same(0, Table::Someones)),
            Op::Select => {
                let (cond, then, none) = (read[0].clone()?, read[1].clone()?, self.constant(args[2])?);
                if !self.local.body.dims_of(args[2]).is_empty() {
                    return None;
                }
                let view = cond.2.and(&then.2)?;
                let table = match (cond.0, then.0, none) {
                    (Table::Hit, Table::Number, 0.0) => Table::NumberOrZero,
                    // If there is one group, the number within it is the number among all rows.
                    (Table::Hit, Table::Rank, 0.0) if then.1.group == self.shards.home(then.1).size => Table::NumberOrZero,
                    (Table::Someones, Table::Before, -1.0) => Table::Expert,
                    (Table::Someones, Table::AnyPlace, -1.0) => Table::Place,
                    _ => return None,
                };
                if cond.0 != Table::Hit {
                    return (cond.1 == then.1).then_some((table, then.1, view));
                }
                let layout = match cond.1.from {
                    None => Some(then.1).filter(|l| l.home == cond.1.home && l.from.is_none()),
                    Some(from) => {
                        let same = (then.1.home, then.1.group, then.1.from.unwrap_or(0)) == (cond.1.home, cond.1.group, from);
                        Some(cond.1).filter(|l| same && [0, l.slots].contains(&then.1.slots))
                    }
                };
                Some((table, layout?, view))
            }
            Op::Gather { dim } if is(&read[0], Table::NumberOrZero) => {
                // A choice looks up its expert's number at its own token, where there is a hit. A choice of no expert
                // is out of the table.
                let (_, layout, view) = read[0].clone()?;
                let chosen = self.choices(args[1], layout.home, chunk)?;
                let experts = all(Count::Expert, self.shards.home(layout).size);
                let fits = self.is_plain(*dim) && view.of(*dim) == Some(&experts);
                Some((Table::NumberOf, layout, view.without(*dim).and(&chosen)?)).filter(|_| fits)
            }
            Op::Scatter { dim } if is(&read[1], Table::SlotOf) => {
                let (_, layout, view) = read[1].clone()?;
                let all_slots = self.local.body.dims.size(*dim);
                if !self.is_plain(*dim) || node.ty.dims != [*dim] {
                    return None;
                }
                let table = if self.constant(args[0]) == Some(1.0) {
                    Table::Times
                } else {
                    // All choices that name a slot are of one token.
                    let (first, d, digits) = self.along_one(args[0], chunk)?;
                    let tokens = self.shards.home(layout).count();
                    if first != 1 || digits != Digits::new([(tokens, 1)]) || view.of(d) != Some(&all(Count::Token, tokens)) {
                        return None;
                    }
                    Table::Tokens
                };
                let layout = self.with_slots(layout, all_slots)?;
                let groups = self.shards.home(layout).size / layout.group;
                let steps: Steps = [some(Count::Expert, groups, layout.group), all(Count::Slot, layout.slots)].concat();
                Some((table, layout, View { dims: vec![(*dim, steps)], coords: view.coords }))
            }
            Op::Binary(Binary::Max) => match with_constant(Table::Less) {
                Some((k, 0.0)) => same(k, Table::Past),
                _ => with_constant(Table::Times).filter(|f| f.1 == 1.0).and_then(|(k, _)| same(k, Table::TimesOrOne)),
            },
            // A pass takes as many of the rows that are not before it as it has slots.
            Op::Binary(Binary::Min) => {
                let (k, room) =
                    with_constant(Table::Past).or_else(|| with_constant(Table::Ends)).filter(|f| f.1 >= 1.0 && f.1 < EXACT && f.1.fract() == 0.0)?;
                let (was, layout, view) = read[k].clone()?;
                let from = if was == Table::Ends { Some(0).filter(|_| layout.from.is_none()) } else { layout.from };
                Some((Table::Ends, Layout { slots: room as u64, from: Some(from?), ..layout }, view))
            }
            Op::Binary(Binary::Div) if is(&read[0], Table::Tokens) => both(Table::Tokens, Table::TimesOrOne, Table::TokenOrZero),
            Op::Binary(Binary::Mul) => {
                let (k, c) = with_constant(Table::Token)?;
                same(k, Table::TokenTimes).filter(|f| f.1.group as f64 == c)
            }
            Op::Reduce { kind: Reduce::Max, .. } if node.ty.dims.is_empty() => {
                let layout = self.last_ends(args[0], chunk)?;
                Some((Table::Most, layout, self.at_home(layout)))
            }
            Op::Limit { most } => {
                let found = self.most(args[0], &read[0], chunk)?;
                self.limits.insert((found.1.home, found.1.group, *most));
                Some(found)
            }
            _ => None,
        }
    }

    /// The most rows that a rank's own home has for a group, which may have been found already; of one group they are
    /// its last ends.
    fn most(&self, a: Value, found: &Option<(Table, Layout, View)>, chunk: Chunk) -> Option<(Table, Layout, View)> {
        if let Some((Table::Most, layout, view)) = found {
            return found.clone().filter(|_| *view == self.at_home(*layout));
        }
        let layout = self.last_ends(a, chunk).filter(|_| self.local.body.dims_of(a).is_empty())?;
        Some((Table::Most, layout, self.at_home(layout)))
    }

    /// Whether a result has the dims of this operand, so that the other one is a number.
    fn fills(&self, w: Value, a: Value) -> bool {
        let (out, own) = (self.local.body.dims_of(w), self.local.body.dims_of(a));
        out.len() == own.len() && own.iter().all(|d| out.contains(d))
    }

    /// A view with nothing but the coordinates of a home.
    pub(super) fn at_home(&self, layout: Layout) -> View {
        let mut coords: Vec<_> = self.shards.home(layout).homes.iter().enumerate().map(|(k, h)| (h.0, all(Count::Home(k), h.2))).collect();
        coords.retain(|c| !c.1.is_empty());
        coords.sort_unstable();
        View { dims: vec![], coords }
    }

    /// The view of choices, if they are those of a home.
    fn choices(&self, a: Value, k: usize, chunk: Chunk) -> Option<View> {
        let (v, held) = self.dense_value(a, chunk)?;
        let home = &self.shards.routed.homes[k];
        let mut view = self.at_home(Layout { home: k, group: 0, slots: 0, from: None });
        let form = view.coords.iter().map(|(u, steps)| Some((*u, self.shards.dense(v, home, steps)?))).collect::<Option<Vec<_>>>()?;
        if home.chosen != v || add(&vec![], &form)? != held.x.coords || !held.partial.is_empty() {
            return None;
        }
        let counts = [all(Count::Token, home.count()), all(Count::Choice, home.picks)];
        for (d, digits) in self.local.body.dims_of(a).iter().zip(&held.x.dims) {
            let steps = counts.iter().find(|steps| self.shards.dense(v, home, steps).as_ref() == Some(digits))?;
            view.dims.push((*d, steps.clone()));
        }
        Some(view)
    }

    /// The table of choices compared with the numbers of experts.
    fn named(&self, chosen: Value, experts: Value, chunk: Chunk) -> Option<(Table, Layout, View)> {
        let (first, d, digits) = self.along_one(experts, chunk)?;
        let n = self.local.body.dims.size(d);
        if first != 0 || digits != Digits::new([(n, 1)]) || self.local.body.dims_of(experts) != [d] {
            return None;
        }
        let homes = (0..self.shards.routed.homes.len()).filter(|k| self.shards.routed.homes[*k].size == n);
        let (home, mut view) = homes.filter_map(|k| Some((k, self.choices(chosen, k, chunk)?))).find(|(_, view)| view.of(d).is_none())?;
        view.dims.push((d, all(Count::Expert, n)));
        Some((Table::Named, Layout { home, group: 0, slots: 0, from: None }, view))
    }

    /// The number of a slot among all, from its rank in its group and the slots of the groups before.
    fn numbered(&self, rank: &Option<(Table, Layout, View)>, before: Value, chunk: Chunk) -> Option<(Table, Layout, View)> {
        let Some((Table::Rank, layout, view)) = rank else { return None };
        let (first, d, digits) = self.along_one(before, chunk)?;
        let (size, group) = (self.shards.home(*layout).size, layout.group);
        let slots = digits.iter().next_back().filter(|_| group == 1).or(digits.iter().rev().nth(1))?.1;
        let stepped = digits == Digits::new([(size / group, slots), (group, 0)]) && slots > 0;
        let fits = first == 0 && stepped && size > group && view.of(d) == Some(&all(Count::Expert, size));
        Some((Table::Number, Layout { slots, ..*layout }, view.clone())).filter(|_| fits && self.local.body.dims_of(before) == [d])
    }

    /// The layout, if a value holds the ends of the last experts of all groups, at home.
    fn last_ends(&self, a: Value, chunk: Chunk) -> Option<Layout> {
        let one = self.one(a, chunk)?;
        let Some(RoutedTensor::Table(Table::Ends, layout @ Layout { from: None, .. })) = self.shards.tensor(one.x.term) else { return None };
        let space = self.shards.space(RoutedTensor::Table(Table::Ends, layout))?;
        let of = |digits: &Digits| space.read(digits);
        let dims = self.local.body.dims_of(a).iter().zip(&one.x.dims).map(|(d, digits)| Some((*d, of(digits)?)));
        let coords = one.x.coords.iter().map(|(u, digits)| Some((*u, of(digits)?)));
        let mut view = View { dims: dims.collect::<Option<_>>()?, coords: coords.collect::<Option<_>>()? };
        let at_home = view.coords == self.at_home(layout).coords;
        // This dim may have any name. Together with the experts of a group, the dims must count all experts.
        view.dims.push((Dim(u32::MAX), all(Count::Expert, layout.group)));
        (at_home && one.x.offset == layout.group - 1 && view.covers(&space)).then_some(layout)
    }
}

/// The view without its one summed dim, if that counts all of something.
fn reduced(view: &View, over: &[Dim], counts: &Steps) -> Option<View> {
    match over {
        [d] if view.of(*d) == Some(counts) => Some(view.without(*d)),
        _ => None,
    }
}
