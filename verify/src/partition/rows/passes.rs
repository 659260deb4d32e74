//! Passes: where there is not room for all rows at once, each pass has some, and what comes of rows is a sum of what
//! passes add.
//!
//! Rows of a group are numbered ([`Table::Rank`]), and a pass has those of some numbers in a row. A row is in one
//! pass, whatever is chosen. So a sum over rows is the sum of what passes add to it. What looks rows up, or spreads
//! them, has each element of one pass, and zero of the others. Where passes end before all rows that there can be, a
//! limit is asked for.
//!
//! [`Table::Rank`]: super::Table::Rank

use super::{Layout, Local, RoutedTensor, ShardView, Stage, Table, View};
use crate::terms::{Term, TermView};
use ir::graph::Value;
use ir::mesh::SubAxis;
use ir::op::Op;
use std::rc::Rc;

impl Stage<'_, '_> {
    /// The value of an op on rows at these indices: a value of the sharded graph, or what one pass adds to it.
    pub(super) fn of_pass(&mut self, held: ShardView, layout: Layout, apart: bool, row: &View) -> Local {
        if layout.from.is_none() {
            return Local::One(Rc::new(held));
        }
        let of = Value(held.x.term.0);
        let own = self.at_home(layout).coords;
        let homes = self.shards.home(layout).homes.iter().enumerate();
        let met = homes.filter(|(_, h)| own.iter().any(|c| c.0 == h.0 && !row.coords.contains(c))).fold(0, |set, (k, _)| set | 1 << k);
        let term = self.shards.term(RoutedTensor::Share { of, layout, apart, met });
        Local::One(Rc::new(ShardView { x: TermView { term, ..held.x }, ..held }))
    }

    /// The value of which a local one is a share.
    pub fn shared(&self, term: Term) -> Option<Value> {
        match self.shards.tensor(term)? {
            RoutedTensor::Share { of, .. } => Some(of),
            RoutedTensor::Numbers | RoutedTensor::Table(..) | RoutedTensor::Rows(..) => None,
        }
    }

    /// The sum of what two passes add, of which the second has the rows right after those of the first, in a type
    /// that does not round it.
    pub(super) fn sum_of_shares(&mut self, w: Value) -> Option<Local> {
        let (body, chunk) = (&self.local.body, self.local.chunks[w.index()]);
        let (Op::Add, [a, b]) = (&body[w].op, body[w].args.as_slice()) else { return None };
        let alike = [a, b].iter().all(|x| body[**x].ty == body[w].ty);
        let (x, y) = (self.one(*a, chunk)?, self.one(*b, chunk)?);
        let (RoutedTensor::Share { of, layout, apart, met }, RoutedTensor::Share { of: other, layout: next, apart: both, met: others }) =
            (self.shards.tensor(x.x.term)?, self.shards.tensor(y.x.term)?)
        else {
            return None;
        };
        let follows = (of, layout.home, layout.group, apart, met) == (other, next.home, next.group, both, others)
            && next.from == Some(layout.from? + layout.slots);
        let same = (x.x.offset, &x.x.coords, &x.x.dims, &x.partial) == (y.x.offset, &y.x.coords, &y.x.dims, &y.partial);
        if !alike || !follows || !same || !apart && body[w].ty.dtype.is_half() {
            return None;
        }
        let term = self.shards.term(RoutedTensor::Share { of, layout: Layout { slots: layout.slots + next.slots, ..layout }, apart, met });
        Some(Local::One(Rc::new(ShardView { x: TermView { term, ..x.x.clone() }, ..(*x).clone() })))
    }

    /// `select(further, share, 0)`: what a pass adds, or zero where no home whose rows are in it has rows for the
    /// pass. That is the share all the same, as sums, look-ups and places of no rows are zero.
    pub(super) fn share_if_any(&mut self, w: Value) -> Option<Local> {
        let (body, chunk) = (&self.local.body, self.local.chunks[w.index()]);
        let (Op::Select, [further, x, none]) = (&body[w].op, body[w].args.as_slice()) else { return None };
        let scalar = |a: &Value| body.dims_of(*a).is_empty();
        let (Table::Further(among), bound, view) = self.read_table(*further, chunk)? else { return None };
        let share = self.one(*x, chunk)?;
        let RoutedTensor::Share { layout, met, .. } = self.shards.tensor(share.x.term)? else { return None };
        // Only these ops make a share. What was exchanged since has rows of more homes.
        let here = matches!(body[*x].op, Op::Gather { .. } | Op::Scatter { .. } | Op::GroupedDot { .. } | Op::Reduce { .. });
        let rows = (bound.home, bound.group) == (layout.home, layout.group) && bound.from <= layout.from;
        let homes = &self.shards.home(layout).homes;
        let is_among = |u: SubAxis| homes.iter().enumerate().any(|(k, h)| h.0 == u && among & 1 << k != 0);
        let own = self.at_home(layout).coords.into_iter().filter(|c| !is_among(c.0));
        let all = met & !among == 0 && own.eq(view.coords);
        let zero = scalar(none) && self.constant(*none) == Some(0.0);
        let same = scalar(further) && body[*x].ty == body[w].ty;
        (here && rows && all && zero && same).then_some(Local::One(share))
    }

    /// The value of the sharded graph of which all shares are there, or all that a limit allows.
    pub fn of_all_passes(&mut self, got: Rc<ShardView>) -> Rc<ShardView> {
        let Some(RoutedTensor::Share { of, layout, .. }) = self.shards.tensor(got.x.term) else { return got };
        if layout.from != Some(0) {
            return got;
        }
        if layout.slots < self.shards.home(layout).most(layout.group) {
            self.bounds.insert((layout.home, layout.group, layout.slots));
        }
        Rc::new(ShardView { x: TermView { term: Term(of.0), ..got.x.clone() }, ..(*got).clone() })
    }
}
