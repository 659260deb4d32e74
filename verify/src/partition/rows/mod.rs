//! Rows of experts: what is stored between a dispatch and the next dense values holds what the sharded graph says.
//!
//! To a choice `chosen` of experts by tokens belong *tensors* that no rank has as a whole, and each local value is a
//! view of one, element by element, as it is of values of the sharded graph ([`super::shards`]): its index is a
//! mixed-radix number of local indices and coordinates. So one rule shows that exchanges of rows and of their tables,
//! and what arranges them, hold the right part. Such a tensor is
//! - a table: integers that are defined by what is chosen ([`tables`]);
//! - the rows of a value `v` of the sharded graph, `[rest of v, home, group, slot]`: element `(r, h, g, s)` is `v` at
//!   r, the token of home h and the expert of group g that the tables of tokens and of experts name there. Dims of
//!   tokens or experts that v lacks are repeated. What lies in a slot that is nobody's is anything.
//!
//! A *home* is where the sharding of `chosen` puts tokens: their numbers there are the row-major index of what a rank
//! has of them. The tables are proved op by op, from the choices on: each rule leads from what operands are to what
//! the result is, and says why. Then
//! - looking up a dense value by a table of slots gives its rows ([`ops`]);
//! - what an op makes of rows are the rows of what it makes of the values, if it does the same at every token and
//!   expert;
//! - a grouped dot by ends is the product of each row with its expert's matrix, since slots are in order of experts;
//! - a dispatch is the rows of what is dispatched times how many choices name the slot, or the sum over these
//!   choices;
//! - choices look up their slot's row: that is what a combination is;
//! - sums of rows by token, by expert or by both are sums over tokens or experts of the dense value, or that value
//!   itself, if it is zero where there is no row ([`sums`], [`zero`]). A slot is one pair of a token and an expert,
//!   and each chosen pair has one, so each counts once.
//!
//! That there is a slot for each chosen pair is so if there are as many as pairs can be, or if a limit stops the step
//! otherwise; such a limit is asked for.

mod ops;
mod passes;
mod space;
mod sums;
mod tables;
mod zero;

use super::shards::{Local, ShardView, ShardViews};
use super::stage::Stage;
use crate::Invariant;
use crate::terms::digits::{Digits, LinearForm, add};
use crate::terms::{Term, TermView};
use crate::violation::Checked;
use ir::dim::Dim;
use ir::graph::Value;
use ir::local::Chunk;
use ir::mesh::SubAxis;
use ir::op::Op;
use ir::sharded::{Partial, Placement, Sharded};
use space::{Count, Space, Steps, View, decompose};
use std::collections::HashMap;
use std::rc::Rc;
pub use tables::Table;

/// Where tokens that choose experts are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenHomes {
    /// The value that holds their choices, before all reshards.
    chosen: Value,
    /// The number of experts.
    size: u64,
    /// The dims of values per expert.
    experts: Vec<Dim>,
    choice: Dim,
    picks: u64,
    tokens: Vec<Dim>,
    /// The sub-axes along which homes differ, in the order of the tokens' dims: the dim that each splits, into how
    /// many parts, and the tokens of each.
    homes: Vec<(SubAxis, Dim, u64, u64)>,
    /// A home's part of each of the tokens' dims: the number of steps, and the size of each.
    pieces: Vec<(Dim, u64, u64)>,
}

impl TokenHomes {
    /// Tokens of a home.
    fn count(&self) -> u64 {
        self.pieces.iter().map(|p| p.1).product()
    }

    /// The most rows that there can be for a group of so many experts.
    fn most(&self, group: u64) -> u64 {
        self.count() * self.picks.min(group)
    }
}

/// How rows are arranged: their home, the experts of a group, and the slots of a home for a group. What does not
/// matter or is not known yet is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    home: usize,
    group: u64,
    slots: u64,
    /// For a pass, whose slots are for some rows only: how many rows of its group come before these. `None` means
    /// that the slots are for all rows.
    from: Option<u64>,
}

impl Layout {
    /// Whether the slots of both layouts are for the same rows.
    fn has_rows_of(&self, other: &Layout) -> bool {
        let slots = self.from.is_none() || self.slots == other.slots;
        (self.home, self.group, self.from) == (other.home, other.group, other.from) && slots
    }
}

/// The tensors that local values may be views of, besides values of the sharded graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutedTensor {
    /// Element n is n.
    Numbers,
    Table(Table, Layout),
    Rows(Value, Layout),
    /// What the rows of one pass, or of several passes in a row, add to a value. The shares are `apart` if each
    /// element has its share of one pass alone. `met` has a bit for each of the homes' sub-axes along which a rank
    /// adds rows of other homes than its own.
    Share {
        of: Value,
        layout: Layout,
        apart: bool,
        met: u64,
    },
}

/// The routings of a sharded graph.
#[derive(Default)]
pub struct Routed {
    homes: Vec<TokenHomes>,
    /// For each value before reshards, the values that are computed from it.
    users: Vec<Vec<Value>>,
    tensors: Vec<RoutedTensor>,
    known: HashMap<RoutedTensor, Term>,
    zero: HashMap<(Value, usize, Dim), bool>,
}

impl Routed {
    /// Whether there are any rows.
    pub fn is_empty(&self) -> bool {
        self.homes.is_empty()
    }
}

/// For every value, the first one that equals it: the value of which it is a reshard, or that is computed alike from
/// equal values.
pub fn same(s: &Sharded) -> Vec<Value> {
    let body = &s.graph.body;
    let mut known = HashMap::new();
    let mut same: Vec<Value> = Vec::with_capacity(body.nodes.len());
    for v in body.values() {
        let node = &body[v];
        let args: Vec<Value> = node.args.iter().map(|a| same[a.index()]).collect();
        same.push(match node.op {
            Op::Reshard { .. } => args[0],
            _ => *known.entry((&node.op, args, &node.ty)).or_insert(v),
        });
    }
    same
}

/// Rows of a value: `row` are the indices of rows, and `rest` those of what is in a row, in digits of the dense
/// value.
#[derive(Clone)]
struct Packed {
    /// The dense value, before reshards.
    of: Value,
    layout: Layout,
    row: View,
    rest: Vec<(Dim, Digits)>,
    /// What coordinates add to the index of what is in a row.
    inside: LinearForm,
    partial: Vec<(SubAxis, Partial)>,
}

impl ShardViews<'_> {
    /// Finds the routings of the graph.
    pub fn route(&mut self) {
        let body = &self.s.graph.body;
        for v in body.values() {
            let (Op::Dispatch(r) | Op::Combine(r)) = body[v].op else { continue };
            let chosen = body[v].args[1];
            let (of, sharding) = (self.root[chosen.index()], self.s.sharding(chosen));
            if self.s.mesh.ids().any(|u| sharding[u].is_partial() || sharding[u] == Placement::Split(r.choice)) {
                continue;
            }
            let tokens: Vec<Dim> = body.dims_of(chosen).iter().copied().filter(|d| *d != r.choice).collect();
            let (mut homes, mut pieces) = (vec![], vec![]);
            for d in &tokens {
                let (kept, split) = self.part_of(*d, &|u| sharding[u] == Placement::Split(*d));
                homes.extend(split.into_iter().map(|(u, s)| (u, *d, self.s.mesh[u].size, s)));
                pieces.extend(kept.into_iter().map(|(n, s)| (*d, n, s)));
            }
            let (size, picks) = (body.dims.size(r.experts), body.dims.size(r.choice));
            let new = TokenHomes { chosen: of, size, experts: vec![], choice: r.choice, picks, tokens, homes, pieces };
            let alike = |h: &&mut TokenHomes| **h == TokenHomes { experts: h.experts.clone(), ..new.clone() };
            match self.routed.homes.iter_mut().find(alike) {
                Some(h) if h.experts.contains(&r.experts) => {}
                Some(h) => h.experts.push(r.experts),
                None => self.routed.homes.push(TokenHomes { experts: vec![r.experts], ..new }),
            }
        }
        if self.routed.is_empty() {
            return;
        }
        self.routed.users = vec![vec![]; body.nodes.len()];
        for v in body.values().filter(|v| !matches!(body[*v].op, Op::Reshard { .. })) {
            for a in &body[v].args {
                let users = &mut self.routed.users[self.root[a.index()].index()];
                if users.last() != Some(&v) {
                    users.push(v);
                }
            }
        }
    }

    fn tensor(&self, term: Term) -> Option<RoutedTensor> {
        self.routed.tensors.get((term.0 as usize).checked_sub(self.root.len())?).copied()
    }

    fn term(&mut self, tensor: RoutedTensor) -> Term {
        let next = Term((self.root.len() + self.routed.tensors.len()) as u32);
        let term = *self.routed.known.entry(tensor).or_insert(next);
        if term == next {
            self.routed.tensors.push(tensor);
        }
        term
    }

    fn home(&self, layout: Layout) -> &TokenHomes {
        &self.routed.homes[layout.home]
    }

    /// The dims of a tensor.
    fn space(&self, tensor: RoutedTensor) -> Option<Space> {
        let layout = match tensor {
            RoutedTensor::Numbers | RoutedTensor::Share { .. } => return None,
            RoutedTensor::Table(_, layout) | RoutedTensor::Rows(_, layout) => layout,
        };
        let home = self.home(layout);
        let experts = (Count::Expert, home.size, 1);
        let groups = (Count::Expert, home.size / layout.group.max(1), layout.group.max(1));
        let (token, choice, slot) = ((Count::Token, home.count(), 1), (Count::Choice, home.picks, 1), (Count::Slot, layout.slots, 1));
        let inner = match tensor {
            RoutedTensor::Table(table, _) => match table {
                Table::Named => vec![experts, token, choice],
                Table::Hit | Table::Among | Table::Rank | Table::Fits | Table::Behind | Table::Within | Table::Number | Table::NumberOrZero => {
                    vec![experts, token]
                }
                Table::Total | Table::MinusTotal | Table::Ends | Table::Less | Table::Past | Table::Begin => vec![experts],
                Table::Most | Table::Peak(_) | Table::Further(_) => vec![],
                Table::NumberOf | Table::SlotOf => vec![token, choice],
                Table::Ended => vec![experts, slot],
                Table::Times | Table::TimesOrOne | Table::Tokens | Table::TokenOrZero | Table::Token => vec![groups, slot],
                Table::Before | Table::Someones | Table::Expert | Table::TokenTimes | Table::AnyPlace | Table::Place => vec![groups, slot],
            },
            RoutedTensor::Rows(..) | RoutedTensor::Numbers | RoutedTensor::Share { .. } => vec![groups, slot],
        };
        let mut out = vec![];
        if let RoutedTensor::Rows(v, _) = tensor {
            // This extent is no more than its strides need. The elements of the dense value times all slots can
            // exceed 2^64.
            let (dims, rest) = (self.s.graph.body.dims_of(v), self.rest_of(v, home));
            let inner = dims.iter().skip_while(|d| !rest.contains(d));
            out.push((Count::Rest, inner.map(|d| self.s.graph.body.dims.size(*d)).product(), 1));
        }
        let among = match tensor {
            RoutedTensor::Table(Table::Peak(among) | Table::Further(among), _) => among,
            _ => 0,
        };
        let apart = home.homes.iter().enumerate().filter(|(k, _)| among & 1 << k == 0);
        out.extend(apart.map(|(k, h)| (Count::Home(k), h.2, 1)));
        out.extend(inner);
        Some(Space(out))
    }

    /// The dim of experts of a value.
    fn experts_of(&self, v: Value, home: &TokenHomes) -> Option<Dim> {
        let mut of = home.experts.iter().copied().filter(|d| self.s.graph.body[v].ty.has(*d));
        of.next().filter(|_| of.next().is_none())
    }

    /// The dims of a value other than tokens and experts.
    fn rest_of(&self, v: Value, home: &TokenHomes) -> Vec<Dim> {
        let dims = self.s.graph.body.dims_of(v).iter().copied();
        dims.filter(|d| !home.tokens.contains(d) && !home.experts.contains(d)).collect()
    }

    /// Steps as digits of a dense value. Where the value lacks what they count, they have stride 0.
    fn dense(&self, v: Value, home: &TokenHomes, steps: &Steps) -> Option<Digits> {
        let body = &self.s.graph.body;
        let (order, strides) = (body.dims_of(v), body.dims.strides(body.dims_of(v)));
        let stride = |d: Dim| order.iter().position(|e| *e == d).map_or(0, |k| strides[k]);
        let mut digits = vec![];
        for (what, n, s) in steps {
            match what {
                Count::Rest => digits.push((*n, *s)),
                Count::Home(k) => digits.push((*n, s * home.homes[*k].3 * stride(home.homes[*k].1))),
                Count::Token => {
                    let extents: Vec<u64> = home.pieces.iter().map(|p| p.1).collect();
                    for (k, n, s) in decompose(&extents, *n, *s)? {
                        digits.push((n, s * home.pieces[k].2 * stride(home.pieces[k].0)));
                    }
                }
                Count::Choice => digits.push((*n, s * stride(home.choice))),
                Count::Expert => {
                    let dim = home.experts.iter().filter(|d| order.contains(d)).count();
                    if dim > 1 {
                        return None;
                    }
                    digits.push((*n, self.experts_of(v, home).map_or(0, |d| s * stride(d))));
                }
                Count::Slot => digits.push((*n, 0)),
            }
        }
        Some(Digits::new(digits))
    }

    /// What coordinates add to the index of rows of a value of tokens and experts, as its sharding says.
    fn row_coords(&self, v: Value, layout: Layout) -> Option<Vec<(SubAxis, Steps)>> {
        let (home, sharding) = (self.home(layout), self.s.sharding(v));
        let experts = self.experts_of(v, home);
        let mut out = vec![];
        for d in self.s.graph.body.dims_of(v) {
            for (u, s) in self.part_of(*d, &|u| sharding[u] == Placement::Split(*d)).1 {
                let n = self.s.mesh[u].size;
                if n == 1 {
                } else if home.tokens.contains(d) {
                    let k = home.homes.iter().position(|h| (h.0, h.1) == (u, *d))?;
                    out.push((u, vec![(Count::Home(k), n, 1)]));
                } else if Some(*d) == experts {
                    out.push((u, vec![(Count::Expert, n, s)]));
                }
            }
        }
        out.sort_unstable();
        Some(out)
    }

    /// For each other dim of a value, a rank's part in digits of the dense value, and what coordinates add to them.
    fn rest(&self, v: Value, layout: Layout) -> (Vec<(Dim, Digits)>, LinearForm) {
        let (body, sharding) = (&self.s.graph.body, self.s.sharding(v));
        let order = body.dims_of(self.root[v.index()]);
        let strides = body.dims.strides(order);
        let (mut dims, mut form) = (vec![], vec![]);
        for d in self.rest_of(v, self.home(layout)) {
            let stride = order.iter().position(|e| *e == d).map_or(0, |k| strides[k]);
            let (kept, coords) = self.part_of(d, &|u| sharding[u] == Placement::Split(d));
            dims.push((d, Digits::new(kept.into_iter().map(|(n, s)| (n, s * stride)))));
            form.extend(coords.into_iter().map(|(u, s)| (u, Digits::new([(self.s.mesh[u].size, s * stride)]))));
        }
        (dims, add(&vec![], &form).unwrap_or_default())
    }
}

impl Stage<'_, '_> {
    /// The value of a node that is computed from rows, tables or other routed tensors.
    pub fn routed(&mut self, w: Value) -> Option<Local> {
        if self.shards.routed.is_empty() {
            return None;
        }
        self.table(w).or_else(|| self.of_rows(w)).or_else(|| self.sum_of_rows(w)).or_else(|| self.sum_of_shares(w)).or_else(|| self.share_if_any(w))
    }

    /// Checks that no home has more rows for a group than there is room for, unless there is room for all that there
    /// can be.
    pub fn room(&self) -> Checked {
        for (home, group, room) in &self.bounds {
            if !self.limits.iter().any(|(h, g, most)| (h, g) == (home, group) && most <= room) {
                return Err(Invariant::ExpertRoom.breach(format!("nothing stops a step with more than {room} rows for a group of experts")));
            }
        }
        Ok(())
    }

    /// The layout with so many slots for all groups together.
    fn with_slots(&mut self, layout: Layout, all: u64) -> Option<Layout> {
        let home = self.shards.home(layout);
        let slots = all / (home.size / layout.group);
        if all != slots * (home.size / layout.group) || ![0, slots].contains(&layout.slots) {
            return None;
        }
        if layout.from.is_none() && slots < home.most(layout.group) {
            self.bounds.insert((layout.home, layout.group, slots));
        }
        Some(Layout { slots, ..layout })
    }

    fn one(&self, a: Value, to: Chunk) -> Option<Rc<ShardView>> {
        match self.seen(a, to) {
            Ok(Some(Local::One(one))) if one.turn.is_none() => Some(one),
            _ => None,
        }
    }

    /// A value of the sharded graph.
    fn dense_value(&self, a: Value, to: Chunk) -> Option<(Value, Rc<ShardView>)> {
        let one = self.one(a, to)?;
        let v = Value(one.x.term.0);
        let known = v.index() < self.shards.root.len() && one.x.offset == 0;
        (known && self.local.body[a].ty.dtype == self.shards.s.graph.body[v].ty.dtype).then_some((v, one))
    }

    /// A view of a tensor whose indices start at zero.
    fn read(&self, a: Value, to: Chunk) -> Option<(RoutedTensor, View, Rc<ShardView>)> {
        let one = self.one(a, to)?;
        let tensor = self.shards.tensor(one.x.term)?;
        let space = self.shards.space(tensor)?;
        if one.x.offset != 0 {
            return None;
        }
        let dims = self.local.body.dims_of(a).iter().zip(&one.x.dims).map(|(d, digits)| Some((*d, space.read(digits)?)));
        let coords = one.x.coords.iter().map(|(u, digits)| Some((*u, space.read(digits)?)));
        let view = View { dims: dims.collect::<Option<_>>()?, coords: coords.collect::<Option<_>>()? };
        Some((tensor, view, one))
    }

    fn read_table(&self, a: Value, to: Chunk) -> Option<(Table, Layout, View)> {
        match self.read(a, to)? {
            (RoutedTensor::Table(table, layout), view, one) if one.partial.is_empty() => Some((table, layout, view)),
            _ => None,
        }
    }

    fn read_rows(&self, a: Value, to: Chunk) -> Option<Packed> {
        let (RoutedTensor::Rows(of, layout), view, one) = self.read(a, to)? else { return None };
        let inside = |steps: &Steps| steps.iter().all(|s| s.0 == Count::Rest);
        let row = |steps: &Steps| steps.iter().all(|s| s.0 != Count::Rest);
        let digits = |steps: &Steps| Digits::new(steps.iter().map(|s| (s.1, s.2)));
        let (mut rows, mut rest, mut form) = (View { dims: vec![], coords: vec![] }, vec![], LinearForm::new());
        // A dim of one element counts as whatever its user takes it for, so it is left out.
        for (d, steps) in view.dims.into_iter().filter(|d| !d.1.is_empty()) {
            match row(&steps) {
                true => rows.dims.push((d, steps)),
                false if inside(&steps) => rest.push((d, digits(&steps))),
                false => return None,
            }
        }
        for (u, steps) in view.coords {
            match row(&steps) {
                true => rows.coords.push((u, steps)),
                false if inside(&steps) => form.push((u, digits(&steps))),
                false => return None,
            }
        }
        Some(Packed { of, layout, row: rows, rest, inside: form, partial: one.partial.clone() })
    }

    /// Records that a node is this view of a tensor.
    fn write(&mut self, w: Value, tensor: RoutedTensor, view: &View, partial: Vec<(SubAxis, Partial)>) -> Option<Local> {
        let space = self.shards.space(tensor)?;
        let dims = &self.local.body.dims;
        let digits = |d: &Dim| match view.of(*d) {
            Some(steps) => space.write(steps),
            None => (dims.size(*d) == 1).then(Digits::default),
        };
        let dims = self.local.body.dims_of(w).iter().map(digits).collect::<Option<_>>()?;
        let form = view.coords.iter().map(|(u, steps)| Some((*u, space.write(steps)?))).collect::<Option<LinearForm>>()?;
        let x = TermView { term: self.shards.term(tensor), offset: 0, coords: add(&vec![], &form)?, dims };
        Some(Local::One(Rc::new(ShardView { x, partial, turn: None })))
    }

    fn write_rows(&mut self, w: Value, p: &Packed) -> Option<Local> {
        let steps = |digits: &Digits| digits.iter().map(|(n, s)| (Count::Rest, n, s)).collect::<Steps>();
        let mut view = p.row.clone();
        view.dims.extend(p.rest.iter().map(|(d, digits)| (*d, steps(digits))));
        view.coords.extend(p.inside.iter().map(|(u, digits)| (*u, steps(digits))));
        if view.coords.iter().enumerate().any(|(k, c)| view.coords[..k].iter().any(|e| e.0 == c.0)) {
            return None;
        }
        self.write(w, RoutedTensor::Rows(p.of, p.layout), &view, p.partial.clone())
    }
}
