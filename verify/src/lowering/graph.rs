//! A local graph on terms.

use super::GraphBinding;
use crate::terms::{Index, TermKind, TermView, Terms};
use crate::{Invariant, LocationPart, Violation};
use ir::dim::{Base, Order};
use ir::graph::Value;
use ir::local::Chunk;
use ir::op::{Channel, Op, Scalar};
use std::collections::{BTreeMap, HashSet};

/// What can be seen of a step from outside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepOutcome {
    pub reports: BTreeMap<u32, TermView>,
    /// New parameters by slot of the program, and new states by slot and number.
    pub params: BTreeMap<u32, TermView>,
    pub states: BTreeMap<(u32, u32), TermView>,
    /// Values that are held to limits.
    pub held: HashSet<(u64, TermView)>,
    /// Values that are sent, in order.
    pub sent: BTreeMap<(i64, Channel), Vec<TermView>>,
    /// Results of collectives across stages, by their stages, in order.
    pub met: BTreeMap<Vec<u64>, Vec<TermView>>,
}

impl StepOutcome {
    /// The outcome of a local graph.
    pub fn of(terms: &mut Terms, meaning: &GraphBinding) -> Result<StepOutcome, Violation> {
        let local = meaning.local;
        let body = &local.body;
        let mut out = StepOutcome::default();
        let mut values: Vec<TermView> = Vec::with_capacity(body.nodes.len());
        let mut received: BTreeMap<(i64, Channel), usize> = BTreeMap::new();
        let base = |b: &Base| Some(b.clone());
        let scalar = |s: &Scalar| Some(s.clone());
        for v in body.values() {
            let node = &body[v];
            let fail = |invariant: Invariant, found: &str| invariant.breach(found).at(LocationPart::Node(v, node.op.name()));
            let args: Vec<TermView> = node.args.iter().map(|a| seen(terms, meaning, &values, *a, v)).collect();
            let sizes: Vec<u64> = node.ty.dims.iter().map(|d| body.dims.size(*d)).collect();
            let held = |op: Op| {
                let maps: Vec<Index> = node.ty.dims.iter().map(|d| (body.dims[*d].index.clone(), 0, Order::Plain)).collect();
                TermKind::Held(op, maps)
            };
            let slot = |s: u32| meaning.slots.get(s as usize).copied().ok_or_else(|| fail(Invariant::ProgramSlot, "has no slot in the program"));
            let kind = match &node.op {
                Op::Input(k) => Some(held(Op::Input(*k))),
                Op::Param(s) => Some(held(Op::Param(slot(*s)?))),
                Op::State(s, k) => Some(held(Op::State(slot(*s)?, *k))),
                Op::Table(t) => {
                    let table = meaning.tables.get(*t as usize).copied().ok_or_else(|| fail(Invariant::ProgramTable, "has no table in the job"))?;
                    Some(held(Op::Table(table)))
                }
                Op::Collective { kind, subs, stages, .. } => Some(TermKind::Exchange { kind: *kind, subs: subs.clone(), stages: stages.clone() }),
                Op::Recv { hops, channel } => {
                    let number = received.entry((*hops, *channel)).or_insert(0);
                    *number += 1;
                    Some(TermKind::Message { hops: *hops, channel: *channel, number: *number - 1 })
                }
                _ => None,
            };
            let value = match kind {
                Some(kind @ (TermKind::Exchange { .. } | TermKind::Message { .. })) => {
                    let count = sizes.iter().product();
                    let term = terms.plain(kind, args.iter().map(TermView::flat).collect(), vec![count], node.ty.dtype);
                    TermView::whole(term, &sizes)
                }
                Some(kind) => TermView::whole(terms.plain(kind, vec![], sizes.clone(), node.ty.dtype), &sizes),
                None => match terms.node(&local.mesh, body, v, &args, &base, &scalar) {
                    Some(value) => value,
                    None => {
                        let stored: Vec<TermView> = args.iter().zip(&node.args).map(|(x, a)| terms.stored(x, body[*a].ty.dtype)).collect();
                        let found = terms.node(&local.mesh, body, v, &stored, &base, &scalar);
                        found.ok_or_else(|| fail(Invariant::LoweredView, "is a view that digits cannot say"))?
                    }
                },
            };
            match &node.op {
                Op::Limit { most } => {
                    out.held.insert((*most, value.flat()));
                }
                Op::Send { hops, channel } => out.sent.entry((*hops, *channel)).or_default().push(value.flat()),
                Op::Collective { stages: Some(stages), .. } if stages.len() > 1 => out.met.entry(stages.clone()).or_default().push(value.flat()),
                _ => {}
            }
            values.push(value);
        }
        // Reports and updates are taken by chunks that run once, which see sums over the microbatches.
        let once = |terms: &mut Terms, v: Value| if summed(meaning, v) { sum(terms, meaning, &values, v) } else { values[v.index()].clone() };
        for (report, v) in &local.reports {
            out.reports.insert(*report, once(terms, *v).flat());
        }
        for u in &local.updates {
            let slot = meaning.slots.get(u.slot as usize).copied();
            let slot =
                slot.ok_or_else(|| Invariant::ProgramSlot.breach(format!("it updates slot {}, which has none in the program", u.slot)).at(u.new))?;
            out.params.insert(slot, once(terms, u.new).flat());
            for (k, v) in u.states.iter().enumerate() {
                out.states.insert((slot, k as u32), once(terms, *v).flat());
            }
        }
        Ok(out)
    }
}

fn summed(meaning: &GraphBinding, v: Value) -> bool {
    meaning.local.accumulate[v.index()] && meaning.local.chunks[v.index()].per_microbatch()
}

fn sum(terms: &mut Terms, meaning: &GraphBinding, values: &[TermView], v: Value) -> TermView {
    let body = &meaning.local.body;
    let sizes: Vec<u64> = body.dims_of(v).iter().map(|d| body.dims.size(*d)).collect();
    let term = terms.plain(TermKind::Sum, vec![values[v.index()].clone()], sizes.clone(), body[v].ty.dtype);
    TermView::whole(term, &sizes)
}

/// An operand as its user sees it: an accumulated value is its sum if the user runs after all microbatches.
fn seen(terms: &mut Terms, meaning: &GraphBinding, values: &[TermView], a: Value, user: Value) -> TermView {
    let (from, to) = (meaning.local.chunks[a.index()], meaning.local.chunks[user.index()]);
    let behind = !to.per_microbatch() || from == Chunk::Prologue && to != Chunk::Prologue;
    match summed(meaning, a) && behind {
        true => sum(terms, meaning, values, a),
        false => values[a.index()].clone(),
    }
}
