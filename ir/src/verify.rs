//! Verifiers of the `Graph` and `Local` levels. That of `Sharded` is in [`crate::sharded`]; programs are checked by [`crate::job`].

use crate::graph::{Graph, Phase, Value};
use crate::infer;
use crate::local::{Chunk, Local};
use crate::op::Op;
use std::collections::{BTreeMap, BTreeSet};

/// A broken invariant: a bug of the pass before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value}: {text}")]
pub struct VerifyError {
    pub value: Value,
    pub text: String,
}

fn fail<T>(value: Value, text: impl Into<String>) -> Result<T, VerifyError> {
    Err(VerifyError { value, text: text.into() })
}

/// Invariants of a logical graph:
/// 1. Every node obeys its type rule, operands come first, no op of a lower level occurs.
/// 2. Phases only look back: forward nodes use forward ones, backward nodes not those of the update.
/// 3. After differentiation, losses are scalars and every gradient has its parameter's dims, one per parameter.
/// 4. After optimization, every parameter with a gradient has one update, of its own type.
///
/// # Errors
/// The first invariant that does not hold.
pub fn graph(g: &Graph) -> Result<(), VerifyError> {
    let body = &g.body;
    for v in body.values() {
        infer::check(body, v).or_else(|e| fail(v, e.to_string()))?;
        let node = &body[v];
        if matches!(node.op, Op::Shard { .. } | Op::Reshard { .. } | Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } | Op::Limit { .. }) {
            return fail(v, format!("`{}` in a logical graph", node.op.name()));
        }
        if let Some(a) = node.args.iter().find(|a| !body[**a].op.is_source() && body[**a].origin.phase > node.origin.phase) {
            return fail(v, format!("a {} node uses {a} of the {}", node.origin.phase.name(), body[*a].origin.phase.name()));
        }
    }
    if let Some(r) = g.losses.iter().find(|r| !body[r.value].ty.dims.is_empty()) {
        return fail(r.value, "a loss is a scalar");
    }
    let mut seen = BTreeSet::new();
    for (p, grad) in &g.grads {
        let want = &g.params[*p as usize].ty.dims;
        let has = body.dims_of(*grad);
        if want.len() != has.len() || has.iter().any(|d| !want.contains(d)) {
            return fail(*grad, format!("the gradient of `{}` has other dims", g.params[*p as usize].name));
        }
        if !seen.insert(*p) {
            return fail(*grad, format!("`{}` has two gradients", g.params[*p as usize].name));
        }
    }
    if g.grad_norm.is_some() {
        let mut of: BTreeMap<u32, usize> = BTreeMap::new();
        g.updates.iter().for_each(|u| *of.entry(u.param).or_default() += 1);
        for (p, grad) in &g.grads {
            let updates = of.get(p).copied().unwrap_or(0);
            if updates != 1 {
                return fail(*grad, format!("`{}` has {updates} updates", g.params[*p as usize].name));
            }
        }
    }
    for u in &g.updates {
        if std::iter::once(&u.new).chain(&u.states).any(|v| body[*v].origin.phase != Phase::Update) {
            return fail(u.new, "an update outside of the update phase");
        }
    }
    Ok(())
}

/// Invariants of a local graph:
/// 1. Every node obeys its type rule; per-node tables have one entry per node.
/// 2. No node uses one of a later chunk; a chunk that runs per microbatch uses no per-microbatch value of another one, except
///    a pass those of passes before it.
/// 3. Every node that holds a value of the sharded graph has its local shape: the dims of the value, each as large as the
///    value's sharding says.
/// 4. A value that is a sum over microbatches is used by a chunk that runs once only by linear ops.
///
/// # Errors
/// The first invariant that does not hold.
pub fn local(l: &Local, sharded: &crate::sharded::Sharded) -> Result<(), VerifyError> {
    let body = &l.body;
    let n = body.nodes.len();
    if [l.chunks.len(), l.accumulate.len(), l.source.len(), l.reasons.len()] != [n; 4] {
        return fail(Value(0), "a table has not one entry per node");
    }
    for v in body.values() {
        infer::check(body, v).or_else(|e| fail(v, e.to_string()))?;
        let (node, chunk) = (&body[v], l.chunks[v.index()]);
        if matches!(node.op, Op::Reshard { .. }) {
            return fail(v, "a reshard in a local graph");
        }
        for a in &node.args {
            let from = l.chunks[a.index()];
            if from > chunk {
                return fail(v, format!("the {chunk} uses {a} of the {from}"));
            }
            let other = from != chunk && from.per_microbatch() && chunk.per_microbatch();
            let stash = from.is_pass() && chunk.is_pass();
            if other && !stash && !(from == Chunk::Prologue && l.accumulate[a.index()]) {
                return fail(v, format!("the {chunk} uses {a} of another microbatch's {from}"));
            }
        }
        if let Some((s, sharding)) = &l.source[v.index()] {
            if sharding != sharded.sharding(*s) {
                return fail(v, format!("its sharding is not that of {s}"));
            }
            let global = &sharded.graph.body;
            let want = global.dims_of(*s);
            if want.len() != node.ty.dims.len() {
                return fail(v, format!("it has not the dims of {s}"));
            }
            for (d, w) in node.ty.dims.iter().zip(want) {
                let parts: u64 = sharding.splits(*w).iter().map(|u| sharded.mesh[*u].size).product();
                if body.dims.size(*d) * parts != global.dims.size(*w) {
                    return fail(v, format!("`{}` is {} of {} over {parts} parts", body.dims.name(*d), body.dims.size(*d), global.dims.size(*w)));
                }
            }
        }
    }
    Ok(())
}
