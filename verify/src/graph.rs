//! The verifier of logical graphs.

use crate::violation::fail;
use crate::{Invariant, Violation, references};
use ir::graph::{Graph, Phase};
use ir::infer;
use ir::op::{Op, OpKind};
use std::collections::{BTreeMap, BTreeSet};

/// Invariants of a logical graph:
/// 1. Every node obeys its type rule, operands come first, no op of a lower level occurs.
/// 2. Phases only look back: forward nodes use forward ones, backward nodes not those of the update.
/// 3. After differentiation, losses are scalars and every gradient has its parameter's dims, one per parameter.
/// 4. After optimization, every parameter with a gradient has one update, of its own type.
///
/// # Errors
/// The first invariant that does not hold.
pub fn verify(g: &Graph) -> Result<(), Violation> {
    references::graph(g)?;
    let body = &g.body;
    for v in body.values() {
        infer::check(body, v).or_else(|e| fail(Invariant::NodeType, v, e.to_string()))?;
        let node = &body[v];
        if matches!(node.op.kind(), OpKind::Reshard | OpKind::Exchange) || matches!(node.op, Op::Shard { .. }) {
            return fail(Invariant::LogicalOp, v, format!("`{}` in a logical graph", node.op.name()));
        }
        if let Some(a) = node.args.iter().find(|a| !body[**a].op.is_source() && body[**a].origin.phase > node.origin.phase) {
            return fail(Invariant::PhaseOrder, v, format!("a {} node uses {a} of the {}", node.origin.phase.name(), body[*a].origin.phase.name()));
        }
    }
    if let Some(r) = g.losses.iter().find(|r| !body[r.value].ty.dims.is_empty()) {
        return fail(Invariant::ScalarLoss, r.value, "a loss is a scalar");
    }
    let mut seen = BTreeSet::new();
    for (p, grad) in &g.grads {
        let want = &g.params[*p as usize].ty.dims;
        let has = body.dims_of(*grad);
        if want.len() != has.len() || has.iter().any(|d| !want.contains(d)) {
            return fail(Invariant::GradientDims, *grad, format!("the gradient of `{}` has other dims", g.params[*p as usize].name));
        }
        if !seen.insert(*p) {
            return fail(Invariant::OneGradient, *grad, format!("`{}` has two gradients", g.params[*p as usize].name));
        }
    }
    if g.grad_norm.is_some() {
        let mut of: BTreeMap<u32, usize> = BTreeMap::new();
        g.updates.iter().for_each(|u| *of.entry(u.param).or_default() += 1);
        for (p, grad) in &g.grads {
            let updates = of.get(p).copied().unwrap_or(0);
            if updates != 1 {
                return fail(Invariant::OneUpdate, *grad, format!("`{}` has {updates} updates", g.params[*p as usize].name));
            }
        }
    }
    for u in &g.updates {
        if std::iter::once(&u.new).chain(&u.states).any(|v| body[*v].origin.phase != Phase::Update) {
            return fail(Invariant::UpdatePhase, u.new, "an update outside of the update phase");
        }
    }
    Ok(())
}
