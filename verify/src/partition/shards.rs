//! What a rank holds of a value of the sharded graph: which of its elements, and of which sum they are a term.

use super::rows::{self, Routed};
use crate::Invariant;
use crate::terms::digits::{Digits, LinearForm, add};
use crate::terms::{Term, TermView, Terms};
use crate::violation::Checked;
use ir::dim::{Base, Dim, DimInfo, IndexMap};
use ir::graph::{Body, Type, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Collective, Op, Reduce, Reshard};
use ir::sharded::{Partial, Placement, Sharded};
use std::collections::HashMap;
use std::rc::Rc;

/// Element `(i0, i1, ..)` on the rank at some coordinates is the element of the whole value, row-major, that `x`
/// says: the value itself, or a term of it as the sum (or the maximum) over the coordinates of `partial`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardView {
    /// The view of a term, which is the number of the value before all reshards, or of a tensor of rows
    /// ([`crate::partition::rows`]).
    pub x: TermView,
    /// In order of sub-axes.
    pub partial: Vec<(SubAxis, Partial)>,
    /// If set, it is what the rank so many positions back along these sub-axes held: keys that go round.
    pub turn: Option<(Vec<SubAxis>, u64)>,
}

impl ShardView {
    /// Whether it is a part along a sub-axis of microbatches, rather than a term of a sum.
    pub fn is_split_over(&self, u: SubAxis) -> bool {
        self.x.coords.iter().any(|c| c.0 == u)
    }

    /// For messages: `elements 0 + tp (2):(32) + (4):(8) + (8):(1) of %12, a term of its sum over dp`. An element's
    /// place is the sum of an offset, of what each coordinate adds, and of what each dim adds, as `(sizes):(strides)`.
    pub fn text(&self, mesh: &Mesh) -> String {
        let digits = |d: &Digits| {
            let list = |of: fn((u64, u64)) -> u64| d.iter().map(|n| of(n).to_string()).collect::<Vec<_>>().join(" ");
            format!("({}):({})", list(|n| n.0), list(|n| n.1))
        };
        let coords: String = self.x.coords.iter().map(|(u, d)| format!(" + {} {}", mesh.describe(&[*u]), digits(d))).collect();
        let dims: String = self.x.dims.iter().map(|d| format!(" + {}", digits(d))).collect();
        let partial: String = self
            .partial
            .iter()
            .map(|(u, p)| format!(", a term of its {} over {}", if *p == Partial::Sum { "sum" } else { "maximum" }, mesh.describe(&[*u])))
            .collect();
        let turn = self.turn.as_ref().map_or(String::new(), |(subs, n)| format!(", as held {n} positions back along {}", mesh.describe(subs)));
        format!("elements {}{coords}{dims} of %{}{partial}{turn}", self.x.offset, self.x.term.0)
    }
}

/// A value held without communication, or what a message of several values is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Local {
    One(Rc<ShardView>),
    /// Values along one dim each, one after the other, with their numbers of elements.
    Joined(Vec<(u64, Rc<ShardView>)>),
}

/// A rank's part of a dim: extents and strides of its index's digits, and what coordinates add.
pub type DimShard = (Vec<(u64, u64)>, Vec<(SubAxis, u64)>);

/// The parts of a sharded graph's values that ranks hold.
pub struct ShardViews<'a> {
    pub s: &'a Sharded,
    /// For each value, the one of which it is a reshard, directly or not, or that is computed alike; or the value
    /// itself.
    pub root: Vec<Value>,
    known: Vec<Option<Rc<ShardView>>>,
    /// For each parameter, the value that reads it.
    pub params: HashMap<u32, Value>,
    pub routed: Routed,
}

impl<'a> ShardViews<'a> {
    pub fn new(s: &'a Sharded) -> ShardViews<'a> {
        let body = &s.graph.body;
        let params = body.values().filter_map(|v| if let Op::Param(p) = body[v].op { Some((p, v)) } else { None }).collect();
        let mut shards = ShardViews { s, root: rows::same(s), known: vec![None; body.nodes.len()], params, routed: Routed::default() };
        shards.route();
        shards
    }

    /// A rank's part of a dim that these sub-axes split: digits of its index, and what coordinates add. Every
    /// sub-axis that ever splits the dim takes its own digit.
    pub fn part_of(&self, d: Dim, is_split: &dyn Fn(SubAxis) -> bool) -> DimShard {
        let dims = &self.s.graph.body.dims;
        let (mut kept, mut coords) = (vec![], vec![]);
        let mut rest = dims.size(d);
        for u in &self.s.digits[dims.original(d).0 as usize] {
            rest /= self.s.mesh[*u].size;
            match is_split(*u) {
                true => coords.push((*u, rest)),
                false => kept.push((self.s.mesh[*u].size, rest)),
            }
        }
        kept.push((rest, 1));
        (kept, coords)
    }

    /// The view of a value that its sharding says.
    pub fn of(&mut self, v: Value) -> Rc<ShardView> {
        if let Some(held) = &self.known[v.index()] {
            return held.clone();
        }
        let (body, sharding) = (&self.s.graph.body, self.s.sharding(v));
        let root = self.root[v.index()];
        let order = body.dims_of(root);
        let strides = body.dims.strides(order);
        let (mut dims, mut form) = (vec![], LinearForm::new());
        for d in body.dims_of(v) {
            let stride = order.iter().position(|e| e == d).map_or(0, |k| strides[k]);
            let (kept, coords) = self.part_of(*d, &|u| sharding[u] == Placement::Split(*d));
            dims.push(Digits::new(kept.into_iter().map(|(n, s)| (n, s * stride))));
            form.extend(coords.into_iter().map(|(u, s)| (u, Digits::new([(self.s.mesh[u].size, s * stride)]))));
        }
        let coords = add(&vec![], &form).unwrap_or_default();
        let partial = self.s.mesh.ids().filter_map(|u| match sharding[u] {
            Placement::Partial(kind) => Some((u, kind)),
            Placement::Replicated | Placement::Split(_) => None,
        });
        let held = Rc::new(ShardView { x: TermView { term: Term(root.0), offset: 0, coords, dims }, partial: partial.collect(), turn: None });
        self.known[v.index()] = Some(held.clone());
        held
    }

    /// The same view after all microbatches: sums over them are complete, and no part belongs to one of them.
    pub fn once(&mut self, v: Value) -> Checked<Rc<ShardView>> {
        let held = self.of(v);
        behind(&self.s.mesh, &held)
    }

    /// Whether a local dim is the part of a dim that these sub-axes split: size, indices, order.
    pub fn is_part(&self, info: &DimInfo, d: Dim, is_split: &dyn Fn(SubAxis) -> bool) -> bool {
        let whole = &self.s.graph.body.dims[d];
        let same = (info.logical, info.global, info.order) == (whole.logical, whole.size, whole.order);
        same && info.size == info.index.len() && self.finds(&info.index, d, is_split)
    }

    /// Whether an index map finds the part of a dim that these sub-axes split.
    pub fn finds(&self, index: &IndexMap, d: Dim, is_split: &dyn Fn(SubAxis) -> bool) -> bool {
        let (kept, mut coords) = self.part_of(d, is_split);
        let mut form = match &index.base {
            Base::Zero => vec![],
            Base::Coords(form) => form.clone(),
            Base::Slot(_) => return false,
        };
        // A sub-axis of one rank adds nothing.
        for list in [&mut form, &mut coords] {
            list.retain(|(u, _)| self.s.mesh[*u].size > 1);
            list.sort_unstable();
        }
        form == coords && Digits::new(index.parts.iter().copied()) == Digits::new(kept)
    }
}

/// A value after all microbatches, if it was a partial sum over them.
pub fn behind(mesh: &Mesh, held: &Rc<ShardView>) -> Checked<Rc<ShardView>> {
    let batches = |u: &SubAxis| mesh[*u].axis == Axis::Microbatch;
    if mesh.of(Axis::Microbatch).any(|u| held.is_split_over(u)) {
        return Err(Invariant::OnceForAll.breach("a part that belongs to one microbatch is used after all of them"));
    }
    if held.partial.iter().all(|p| !batches(&p.0)) {
        return Ok(held.clone());
    }
    if held.partial.iter().any(|p| batches(&p.0) && p.1 != Partial::Sum) {
        return Err(Invariant::MicrobatchSum.breach("what is accumulated over microbatches is no sum"));
    }
    let partial = held.partial.iter().copied().filter(|p| !batches(&p.0)).collect();
    Ok(Rc::new(ShardView { partial, ..(**held).clone() }))
}

/// The sub-axes of a collective in the order in which its members are numbered: that of ranks.
fn in_rank_order(subs: &[SubAxis]) -> Vec<SubAxis> {
    let mut out = subs.to_vec();
    out.sort_unstable();
    out.dedup();
    out
}

/// The result of an op that only moves elements, or of a collective within the stage. `None` for other ops, and where
/// the result is no part of a value.
pub fn moved(mesh: &Mesh, body: &Body, w: Value, from: &Local) -> Option<Local> {
    let node = &body[w];
    let one = match (from, &node.op) {
        (Local::One(one), _) => one,
        (Local::Joined(parts), Op::Collective { kind: Collective::Shift, subs, stages: None, part: None }) => {
            let turned = parts.iter().map(|(n, held)| Some((*n, Rc::new(turned(mesh, held, subs)?))));
            return Some(Local::Joined(turned.collect::<Option<_>>()?));
        }
        (Local::Joined(parts), Op::Slice { to: Some(to), at, .. }) => {
            let mut start = 0;
            for (n, held) in parts {
                if (start, *n) == (*at, body.dims.size(*to)) {
                    return Some(Local::One(held.clone()));
                }
                start += n;
            }
            return None;
        }
        (Local::Joined(_), _) => return None,
    };
    let held = match &node.op {
        Op::Expand | Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } => {
            let base = |b: &Base| Some(b.clone());
            let x = Terms::default().node(mesh, body, w, std::slice::from_ref(&one.x), &base, &|_| None)?;
            ShardView { x, ..(**one).clone() }
        }
        Op::Collective { kind, subs, stages: None, part } => exchanged(mesh, body, node.args[0], &node.ty, one, (*kind, subs, *part))?,
        _ => return None,
    };
    Some(Local::One(Rc::new(held)))
}

fn exchanged(mesh: &Mesh, body: &Body, arg: Value, ty: &Type, from: &ShardView, how: (Collective, &[SubAxis], Option<Dim>)) -> Option<ShardView> {
    let (kind, subs, part) = how;
    if !is_stored_by_parts(body, body.dims_of(arg), &ty.dims, part) {
        return None;
    }
    if let (Collective::Shift, None) = (kind, part) {
        return turned(mesh, from, subs);
    }
    if from.turn.is_some() || subs.iter().any(|u| !mesh[*u].axis.within_stage()) {
        return None;
    }
    let subs = in_rank_order(subs);
    let sizes: Vec<u64> = subs.iter().map(|u| mesh[*u].size).collect();
    let mut out = from.clone();
    // These find the position of the dim of parts, make its digits from members' coordinates, make coordinates from
    // its digits, and drop the members' coordinates.
    let place = |dims: &[Dim]| part.and_then(|p| dims.iter().position(|d| *d == p));
    let (at, to) = (place(body.dims_of(arg)), place(&ty.dims));
    let members = |coords: &LinearForm| {
        let digits = subs.iter().map(|u| coords.iter().find(|c| c.0 == *u).map(|c| c.1.clone()));
        Some(Digits::new(digits.collect::<Option<Vec<_>>>()?.iter().flat_map(Digits::iter).collect::<Vec<_>>()))
    };
    let scattered = |digits: &Digits| Some(subs.iter().copied().zip(digits.reshaped(&sizes)?).collect::<LinearForm>());
    let keep = |coords: &LinearForm| coords.iter().filter(|c| !subs.contains(&c.0)).cloned().collect::<LinearForm>();
    match kind {
        Collective::AllGather => {
            out.x.dims = vec![];
            for d in &ty.dims {
                out.x.dims.push(match body.dims_of(arg).iter().position(|e| e == d) {
                    Some(k) => from.x.dims[k].clone(),
                    None => members(&from.x.coords)?,
                });
            }
            to?;
            if ty.dims.iter().zip(&out.x.dims).any(|(d, digits)| digits.extent() != body.dims.size(*d)) {
                return None;
            }
            out.x.coords = keep(&from.x.coords);
        }
        Collective::AllReduce(r) | Collective::ReduceScatter(r) => {
            let sums = |u: &SubAxis| from.partial.iter().any(|p| p.0 == *u && (p.1 == Partial::Sum) == (r == Reduce::Sum) && r != Reduce::Any);
            if !subs.iter().all(sums) || subs.is_empty() {
                return None;
            }
            out.partial.retain(|p| !subs.contains(&p.0));
            if let Collective::ReduceScatter(_) = kind {
                let digits = out.x.dims.remove(at?);
                out.x.coords = add(&from.x.coords, &scattered(&digits)?)?;
            }
        }
        Collective::AllToAll => {
            let digits = std::mem::replace(&mut out.x.dims[at?], members(&from.x.coords)?);
            out.x.coords = add(&keep(&from.x.coords), &scattered(&digits)?)?;
        }
        Collective::Shift => return None,
    }
    Some(out)
}

/// Whether what members exchange lies together, part by part, and in the same order at both ends.
fn is_stored_by_parts(body: &Body, from: &[Dim], to: &[Dim], part: Option<Dim>) -> bool {
    let large = |dims: &[Dim]| dims.iter().copied().filter(|d| body.dims.size(*d) > 1).collect::<Vec<_>>();
    let first = |dims: &[Dim]| part.is_none_or(|p| !dims.contains(&p) || dims[0] == p);
    let (from, to) = (large(from), large(to));
    let rest = |dims: &[Dim]| dims.iter().copied().filter(|d| Some(*d) != part).collect::<Vec<_>>();
    first(&from) && first(&to) && rest(&from) == rest(&to)
}

fn turned(mesh: &Mesh, from: &ShardView, subs: &[SubAxis]) -> Option<ShardView> {
    let subs = in_rank_order(subs);
    let all: u64 = subs.iter().map(|u| mesh[*u].size).product();
    let before = match &from.turn {
        None => 0,
        Some((other, n)) if *other == subs => *n,
        Some(_) => return None,
    };
    let turn = Some((before + 1) % all).filter(|n| *n != 0);
    Some(ShardView { turn: turn.map(|n| (subs, n)), ..from.clone() })
}

/// Whether a node of the sharded graph is zero but on the ranks at coordinates zero: where a replicated value is a
/// term of a sum.
pub fn is_mask(op: &Op) -> bool {
    matches!(op, Op::Reshard { kind: Reshard::Mask, .. })
}
