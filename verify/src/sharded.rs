//! The verifier of sharded graphs, which believes the algebra's tables where numbers show them ([`crate::algebra`]).
//!
//! What [`verify`] proves, for every sub-axis on its own (section 6 of the sharding rules):
//! 1. A split value has the dim, the sub-axis is one of the dim's digits, and the digits' sizes divide the dim.
//! 2. Every op stands in exactly one row of its table: all operands replicated; one loop split, in every operand that
//!    has it; a partial sum passed through one linear slot; or a sum of partial sums. (Queries and keys of attention
//!    count as one loop, a ring: see [`ir::algebra`].)
//! 3. So no partial value reaches a slot that is not linear, two slots of a product, a cut, or the optimizer.
//! 4. No value is a partial sum and a partial maximum when it is reduced: the two do not commute.
//! 5. A reshard changes only its sub-axes, by a row of the reshard table, with the reduction of its operand.
//! 6. No op goes by the order of a dim that is stored in another one; copies are stored as their originals.
//! 7. Every parameter, state and report ends in the sharding it must have at rest, nothing partial.

use crate::algebra::{self, Row};
use crate::violation::{Breach, Checked};
use crate::{Invariant, Location, LocationPart, Violation, references};
use ir::algebra::{Algebra, LoopKind, goes_by_order};
use ir::dim::{Dim, Dims, Order};
use ir::graph::{Body, Value};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Op, Reshard};
use ir::sharded::{Partial, Placement, Sharded};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Checks the invariants of the module's documentation. Uses nothing of the pass but its result.
///
/// # Errors
/// The first invariant that does not hold.
pub fn verify(s: &Sharded) -> Result<(), Violation> {
    verify_by(s, ir::algebra::algebra)
}

/// The same by another table of ops than mcc's.
///
/// # Errors
/// The first invariant that does not hold.
pub fn verify_by(s: &Sharded, table: impl Fn(&Body, Value) -> Algebra) -> Result<(), Violation> {
    references::sharded(s)?;
    let body = &s.graph.body;
    let stored_plain = |d: Dim| body.dims[d].order == Order::Plain;
    for v in body.values() {
        let fail = |u: Option<SubAxis>, breach: Breach| Err(at(s, v, u).error(breach));
        if let Err(e) = ir::infer::check(body, v) {
            return fail(None, Invariant::ShardedNodeType.breach(e.to_string()));
        }
        let node = &body[v];
        let out = s.sharding(v);
        if let Some(d) = goes_by_order(body, &node.op).into_iter().find(|d| !stored_plain(*d)) {
            return fail(
                None,
                Invariant::StoredInOrder.breach(format!("goes by the order of `{}`, which is stored in another one", body.dims.name(d))),
            );
        }
        let strays = |d: &&Dim| body.dims[**d].order != body.dims[body.dims.original(**d)].order || !body.dims[**d].order.fits(body.dims.size(**d));
        if let Some(d) = node.ty.dims.iter().find(strays) {
            return fail(None, Invariant::OrderOfOriginal.breach(format!("`{}` has an order of its own", body.dims.name(*d))));
        }
        let rule = (!node.op.is_source() && !matches!(node.op, Op::Reshard { .. })).then(|| table(body, v));
        let mut used: SmallVec<[Row; 4]> = SmallVec::new();
        for u in s.mesh.ids() {
            if let Placement::Split(d) = out[u] {
                let digits = &s.digits[body.dims.original(d).0 as usize];
                let parts: u64 = digits.iter().map(|u| s.mesh[*u].size).product();
                if !node.ty.has(d) || !digits.contains(&u) || !body.dims.size(d).is_multiple_of(parts) {
                    return fail(Some(u), Invariant::SplitDim.breach(format!("cannot be split along `{}`", body.dims.name(d))));
                }
            }
            let args: Vec<Placement> = node.args.iter().map(|a| s.sharding(*a)[u]).collect();
            if let Err(breach) = match (&node.op, &rule) {
                (Op::Reshard { kind, subs }, _) => verify_reshard(s, v, *kind, subs, u),
                (_, Some(rule)) => verify_row(rule, &body.dims, s.mesh[u].axis, &args, out[u]).and_then(|row| match row {
                    Some(row) if !used.contains(&row) => {
                        used.push(row);
                        algebra::holds(body, v, row).map_err(|why| Invariant::RowHolds.breach(format!("a row of its table does not hold: {why}")))
                    }
                    _ => Ok(()),
                }),
                (_, None) => match out[u] {
                    Placement::Partial(_) => Err(Invariant::WholeSource.breach("a source is partial")),
                    _ => Ok(()),
                },
            } {
                return fail(Some(u), breach);
            }
        }
    }
    verify_ends(s)
}

/// A node, and a sub-axis.
fn at(s: &Sharded, v: Value, u: Option<SubAxis>) -> Location {
    let place = Location::from(LocationPart::Node(v, s.graph.body[v].op.name()));
    u.map_or(place.clone(), |u| place.of(LocationPart::Axes(s.mesh.describe(&[u]))))
}

fn verify_reshard(s: &Sharded, v: Value, kind: Reshard, subs: &[SubAxis], u: SubAxis) -> Checked {
    let arg = s.graph.body[v].args[0];
    let (from, to) = (s.sharding(arg)[u], s.sharding(v)[u]);
    if !subs.contains(&u) {
        return if from == to { Ok(()) } else { Err(Invariant::ReshardSubAxes.breach("a reshard changes another sub-axis")) };
    }
    let sound = match (kind, from, to) {
        (Reshard::Slice, Placement::Replicated, Placement::Split(_))
        | (Reshard::AllGather, Placement::Split(_), Placement::Replicated)
        | (Reshard::ReduceScatter, Placement::Partial(_), Placement::Split(_))
        | (Reshard::AllReduce, Placement::Partial(_), Placement::Replicated)
        | (Reshard::Mask, Placement::Replicated, Placement::SUM) => true,
        (Reshard::AllToAll, Placement::Split(a), Placement::Split(b)) => a != b,
        _ => false,
    };
    if !sound {
        return Err(Invariant::ReshardRow.breach(format!("no {} leads from {from:?} to {to:?}", kind.name())));
    }
    if matches!(kind, Reshard::AllReduce | Reshard::ReduceScatter) {
        for w in s.mesh.ids() {
            if s.sharding(arg)[w].is_partial() && s.sharding(arg)[w] != from {
                return Err(Invariant::OneReduction.breach("a partial sum and a partial maximum do not commute"));
            }
        }
    }
    if s.mesh[u].axis == Axis::Microbatch && matches!(kind, Reshard::AllGather | Reshard::AllToAll) {
        return Err(Invariant::MicrobatchesApart.breach("microbatches cannot exchange parts"));
    }
    Ok(())
}

/// The row of an op's table that its placements on a sub-axis of this axis are, unless all is everywhere.
fn verify_row<'a>(rule: &'a Algebra, dims: &Dims, axis: Axis, args: &[Placement], out: Placement) -> Checked<Option<Row<'a>>> {
    let whole = |p: &Placement| *p == Placement::Replicated;
    if whole(&out) && args.iter().all(whole) {
        return Ok(None);
    }
    if out == Placement::SUM {
        if rule.joint && args.iter().all(|p| *p == Placement::SUM) {
            return Ok(Some(Row::Linear(&rule.linear)));
        }
        let partial: Vec<usize> = (0..args.len()).filter(|i| args[*i] == Placement::SUM).collect();
        let slot = rule.linear.chunks(1).find(|slot| *slot == partial);
        if let (false, Some(slot)) = (rule.joint, slot.filter(|_| args.iter().all(|p| whole(p) || *p == Placement::SUM))) {
            return Ok(Some(Row::Linear(slot)));
        }
    }
    for l in &rule.loops {
        let want = |d: Option<Dim>| d.map_or(Placement::Replicated, Placement::Split);
        let result = match l.kind {
            LoopKind::Block => continue,
            LoopKind::Ring if axis == Axis::Microbatch => continue,
            LoopKind::Map | LoopKind::Ring => want(l.out),
            LoopKind::Sum => Placement::SUM,
            LoopKind::Max => Placement::Partial(Partial::Max),
        };
        if result == out && l.args.iter().zip(args).all(|(d, p)| want(*d) == *p) {
            return Ok(Some(Row::Split(l)));
        }
    }
    let args: Vec<String> = args.iter().map(|p| words(dims, *p)).collect();
    Err(Invariant::OpRow.breach(format!("no row of its table takes operands ({}) to a result that is {}", args.join(", "), words(dims, out))))
}

/// `split along `hidden``.
fn words(dims: &Dims, placement: Placement) -> String {
    match placement {
        Placement::Replicated => "replicated".into(),
        Placement::Split(d) => format!("split along `{}`", dims.name(d)),
        Placement::Partial(Partial::Sum) => "a partial sum".into(),
        Placement::Partial(Partial::Max) => "a partial maximum".into(),
    }
}

fn verify_ends(s: &Sharded) -> Result<(), Violation> {
    let graph = &s.graph;
    let mut sources: HashMap<&Op, Value> = HashMap::new();
    for v in graph.body.values() {
        if let op @ (Op::Param(_) | Op::State(..)) = &graph.body[v].op {
            sources.entry(op).or_insert(v);
        }
    }
    for update in &graph.updates {
        let slots = std::iter::once((Op::Param(update.param), update.new))
            .chain(update.states.iter().enumerate().map(|(k, v)| (Op::State(update.param, k as u32), *v)));
        for (op, new) in slots {
            if let Some(old) = sources.get(&op).copied() {
                for u in s.mesh.ids() {
                    if s.sharding(new)[u] != s.sharding(old)[u] {
                        return Err(at(s, new, Some(u)).error(Invariant::RestingPlace.breach("does not rest where the old value does")));
                    }
                }
            }
        }
    }
    let reports = graph.loss.iter().chain(&graph.grad_norm).copied().chain(graph.losses.iter().chain(&graph.metrics).map(|r| r.value));
    for v in reports {
        if graph.updates.is_empty() && graph.grads.is_empty() {
            continue;
        }
        if let Some(u) = s.mesh.ids().find(|u| s.sharding(v)[*u] != Placement::Replicated) {
            return Err(at(s, v, Some(u)).error(Invariant::ReportEverywhere.breach("a report is not known on every rank")));
        }
    }
    Ok(())
}
