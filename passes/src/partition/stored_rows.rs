//! Which values of experts are stored as rows.
//!
//! A dispatched value is `[tokens.., experts, rest..]`, and of its places `(token, expert)` only those are of use where the token has chosen the
//! expert. A value *in rows* has one row `[rest..]` for each of these and nothing for the others. Rows follow from rows, place by place, wherever an
//! op maps tokens and experts. Sums over tokens or experts leave rows, if what they sum is zero where there is no row; whatever else wants
//! such places gets the dense value, which must be zero there, or it is not in rows to begin with.

use ir::algebra::{LoopKind, algebra};
use ir::dim::Dim;
use ir::graph::{Body, Type, Value};
use ir::mesh::Axis;
use ir::op::{Op, Reduce, Reshard, Routing};
use ir::options::MoeBuffer;
use ir::sharded::{Placement, Sharded, Sharding};
use std::collections::HashMap;

/// The room for rows of experts, and how many passes may use it.
#[derive(Clone, Copy, Debug)]
pub struct RowBudget {
    /// How many rows one pass has room for.
    pub buffer: MoeBuffer,
    /// Passes at most over the rows of a layer, each with that room.
    pub passes: u64,
}

/// A layout of rows: what is chosen, and by which tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// i32 `[tokens.., choice]`; as it is split, ranks have rows of their own tokens: the rows' *home*.
    pub chosen: Value,
    /// The dim of experts, and that of a token's choices.
    pub routing: Routing,
    /// Dims that index tokens, in the order of `chosen`.
    pub tokens: Vec<Dim>,
}

/// How a dense value follows from rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowExit {
    /// A dispatch that is wanted dense.
    Dispatched,
    /// A combination: choices look up their rows.
    Combined,
    /// A sum over all tokens, and over experts if it says so.
    OverTokens,
    /// A sum over experts.
    OverExperts,
}

/// How the values of a sharded graph are stored: dense, or in rows of a layout.
#[derive(Clone, Debug, Default)]
pub struct StoredRows {
    /// All layouts, by the numbers that [`StoredRows::layout`] gives.
    pub layouts: Vec<Layout>,
    /// Per value: its layout if it is in rows. Empty if all are dense.
    of: Vec<Option<usize>>,
    /// Per dense value: how it follows from values that may be in rows.
    from: Vec<Option<(usize, RowExit)>>,
    /// Exchanges of rows that the next one makes along with its own.
    joined: Vec<bool>,
}

impl StoredRows {
    /// Decides it for every value; `fixed` ones are dense.
    pub fn of(s: &Sharded, fixed: &dyn Fn(Value) -> bool) -> StoredRows {
        let body = &s.graph.body;
        let n = body.nodes.len();
        if !body.nodes.iter().any(|node| matches!(node.op, Op::Dispatch(_) | Op::Combine(_))) {
            return StoredRows::default();
        }
        let same = same(s);
        let mut rows = StoredRows { layouts: vec![], of: vec![None; n], from: vec![None; n], joined: vec![false; n] };
        let mut zero = ZeroValues { everywhere: vec![false; n], elsewhere: vec![false; n] };
        for v in body.values() {
            let layout = rows.follows(s, v, &same);
            let dispatched = matches!(body[v].op, Op::Dispatch(_));
            rows.of[v.index()] = layout.filter(|l| !fixed(v) && rows.fits(s, v, *l));
            if dispatched && rows.of[v.index()].is_none() {
                rows.from[v.index()] = layout.map(|l| (l, RowExit::Dispatched));
            }
            zero.everywhere[v.index()] = keeps_zero(body, v, &|a| zero.everywhere[a.index()]);
            zero.elsewhere[v.index()] = rows.of[v.index()].is_some_and(|l| dispatched || keeps_zero(body, v, &|a| rows.is_zero(&zero, a, l)));
        }
        let mut whole = vec![false; n];
        for v in body.values().rev() {
            if whole[v.index()] && !zero.elsewhere[v.index()] {
                rows.of[v.index()] = None;
            }
            if rows.of[v.index()].is_none() && rows.from[v.index()].is_none() {
                rows.from[v.index()] = rows.leaves(body, v, &zero, &same);
            }
            let layout = rows.of[v.index()].or(rows.from[v.index()].map(|f| f.0));
            for a in &body[v].args {
                whole[a.index()] |= rows.of[a.index()].is_some() && rows.of[a.index()] != layout;
            }
        }
        rows.join_exchanges(s);
        rows
    }

    /// Tokens that are split over several axes go to their experts, and come back, axis by axis. As rows, all of these are one exchange of parts.
    fn join_exchanges(&mut self, s: &Sharded) {
        let body = &s.graph.body;
        let users = body.users();
        // `direction` tells whether rows go to their experts or back.
        let direction = |v: Value| {
            let (l, Op::Reshard { kind: Reshard::AllToAll, subs }) = (&self.layouts[self.layout(v)?], &body[v].op) else { return None };
            let of = |v: Value| match s.sharding(v)[subs[0]] {
                Placement::Split(d) if d == l.routing.experts => Some(true),
                Placement::Split(d) if l.tokens.contains(&d) => Some(false),
                Placement::Split(_) | Placement::Replicated | Placement::Partial(_) => None,
            };
            Some((of(body[v].args[0])?, of(v)?))
        };
        let place = |v: Value| (body[v].origin.phase, body[v].origin.layer, self.layout(v));
        let roots = s.graph.roots();
        let joined = |v: Value| {
            let [(next, _)] = users[v.index()][..] else { return false };
            direction(v).is_some() && direction(v) == direction(next) && place(v) == place(next) && !roots.contains(&v)
        };
        self.joined = body.values().map(joined).collect();
    }

    /// Whether a reshard is made along with the one that it leads to.
    pub fn joined(&self, v: Value) -> bool {
        self.joined.get(v.index()).copied().unwrap_or(false)
    }

    /// The layout of a value in rows.
    pub fn layout(&self, v: Value) -> Option<usize> {
        self.of.get(v.index()).copied().flatten()
    }

    /// The layout of those operands of a dense value that are in rows, and how the value follows from them.
    pub fn from(&self, body: &Body, v: Value) -> Option<(usize, RowExit)> {
        let (l, how) = self.from.get(v.index()).copied().flatten()?;
        (how == RowExit::Dispatched || body[v].args.iter().any(|a| self.layout(*a) == Some(l))).then_some((l, how))
    }

    /// How many of so many places (pairs of a token and an expert) of what is computed from rows have one at most: a token's choices of its experts.
    pub fn computed(&self, body: &Body, v: Value, places: u128) -> u128 {
        match self.layout(v).or(self.from(body, v).map(|f| f.0)) {
            None => places,
            Some(l) => {
                let Routing { experts, choice } = self.layouts[l].routing;
                let (all, some) = (u128::from(body.dims.size(experts)), u128::from(body.dims.size(choice)));
                places / all * some.min(all)
            }
        }
    }

    /// Whether a value is zero wherever the layout has no row.
    fn is_zero(&self, zero: &ZeroValues, v: Value, layout: usize) -> bool {
        zero.everywhere[v.index()] || self.of[v.index()] == Some(layout) && zero.elsewhere[v.index()]
    }

    /// The layout in which a value can be, going by its operands.
    fn follows(&mut self, s: &Sharded, v: Value, same: &[Value]) -> Option<usize> {
        let body = &s.graph.body;
        let node = &body[v];
        let of = |a: &Value| self.of[a.index()];
        match &node.op {
            Op::Dispatch(r) => {
                let chosen = same[node.args[1].index()];
                let known = self.layouts.iter().position(|l| l.chosen == chosen && l.routing == *r);
                Some(known.unwrap_or_else(|| {
                    let tokens = body.dims_of(chosen).iter().copied().filter(|d| *d != r.choice).collect();
                    self.layouts.push(Layout { chosen, routing: *r, tokens });
                    self.layouts.len() - 1
                }))
            }
            Op::Combine(_) => None,
            Op::Reshard { subs, .. } => of(&node.args[0]).filter(|_| subs.iter().all(|u| s.mesh[*u].axis != Axis::Microbatch)),
            _ => node.args.iter().filter_map(of).find(|l| maps(body, v, &self.layouts[*l])),
        }
    }

    /// Whether a value that is split so can be in rows: all choices of a token are at its home, the tokens that a rank has were at home on one rank
    /// or several, and no sum over microbatches is to be taken, whose tokens differ.
    fn fits(&self, s: &Sharded, v: Value, layout: usize) -> bool {
        let Layout { chosen, tokens, routing } = &self.layouts[layout];
        let (own, home) = (s.sharding(v), s.sharding(*chosen));
        let adds = s.mesh.of(Axis::Microbatch).any(|u| own[u].is_partial());
        !adds && home.splits(routing.choice).is_empty() && tokens.iter().all(|d| own.splits(*d).iter().all(|u| home[*u] == Placement::Split(*d)))
    }

    fn leaves(&self, body: &Body, v: Value, zero: &ZeroValues, same: &[Value]) -> Option<(usize, RowExit)> {
        let node = &body[v];
        let l = node.args.iter().find_map(|a| self.of[a.index()])?;
        let Layout { chosen, routing, tokens } = &self.layouts[l];
        let over = match &node.op {
            Op::Combine(r) => {
                let matches = self.of[node.args[0].index()] == Some(l) && r == routing && same[node.args[1].index()] == *chosen;
                return matches.then_some((l, RowExit::Combined));
            }
            Op::Dot { over, .. } | Op::Reduce { kind: Reduce::Sum, over } => over,
            _ => return None,
        };
        // For a product, one zero factor is enough.
        if !node.args.iter().any(|a| self.is_zero(zero, *a, l)) {
            return None;
        }
        let summed = tokens.iter().filter(|d| over.contains(d)).count();
        match over.contains(&routing.experts) {
            _ if summed > 0 && summed == tokens.len() => Some((l, RowExit::OverTokens)),
            true if summed == 0 => Some((l, RowExit::OverExperts)),
            true | false => None,
        }
    }
}

/// Whether an op maps tokens and experts: it does the same at each place, so that rows follow from rows.
fn maps(body: &Body, v: Value, layout: &Layout) -> bool {
    let node = &body[v];
    let places: Vec<Dim> = layout.tokens.iter().copied().chain([layout.routing.experts]).collect();
    let named = node.op.dims();
    let sends = matches!(node.op, Op::Dispatch(_) | Op::Combine(_) | Op::Send { .. } | Op::Collective { .. });
    let loops = || algebra(body, v).loops;
    let mapped = |d: Dim| loops().iter().filter(|l| l.out == Some(d) || l.args.contains(&Some(d))).all(|l| l.kind == LoopKind::Map);
    !sends && places.iter().all(|d| node.ty.has(*d) && !named.contains(d) && mapped(*d))
}

/// For every value, the first one that is computed alike from the same and split alike: the value itself, unless it is computed again.
fn same(s: &Sharded) -> Vec<Value> {
    let body = &s.graph.body;
    let mut known: HashMap<(&Op, Vec<Value>, &Type, &Sharding), Value> = HashMap::new();
    let mut same: Vec<Value> = vec![];
    for v in body.values() {
        let node = &body[v];
        let args = node.args.iter().map(|a| same[a.index()]).collect();
        same.push(*known.entry((&node.op, args, &node.ty, s.sharding(v))).or_insert(v));
    }
    same
}

/// Values that are known to be zero.
struct ZeroValues {
    everywhere: Vec<bool>,
    /// Of values in rows: where there is no row.
    elsewhere: Vec<bool>,
}

/// Whether a value is zero where these operands are.
fn keeps_zero(body: &Body, v: Value, zero: &dyn Fn(Value) -> bool) -> bool {
    let node = &body[v];
    node.op.keeps_zero(&node.args.iter().map(|a| zero(*a)).collect::<Vec<_>>())
}
