//! What nodes of local graphs come to as commands, and how much of them a kernel holds.

use ir::dim::Dim;
use ir::graph::{Body, Node, Value};
use ir::local::Local;
use ir::op::{Op, OpKind};
use std::collections::BTreeSet;

/// Values that a kernel of several nodes reads, and results that it stores, at most. The time that LLVM takes for a kernel grows with their square, and the parameters of a GPU's
/// kernel are 4 KiB at most ("Function Parameters", CUDA C++ Programming Guide), which is 512 addresses.
pub const MAX_OPERANDS: usize = 256;

/// Nodes of a kernel, at most. Each node that joins one is looked at with all that are in it, so chains of any length
/// take time in proportion to it.
pub const MAX_NODES: usize = 512;

/// How a node is lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Part of a kernel.
    Compute,
    /// Computed again by every kernel that uses it.
    Inline,
    /// A buffer filled from outside: parameter, state, table, input.
    Source,
    /// The same memory as its operand, if the layout allows.
    Alias,
    /// A collective, a send, a receive, a limit.
    Exchange,
}

/// How node `v` of a local graph is lowered.
pub fn role(body: &Body, v: Value) -> Role {
    let op = &body[v].op;
    match op.kind() {
        OpKind::Stored => Role::Source,
        OpKind::Generated => Role::Inline,
        OpKind::View | OpKind::Mark => Role::Alias,
        // A permutation of dims of one element moves no data.
        OpKind::Pointwise if *op == Op::Expand && is_renumbering(body, v) => Role::Alias,
        OpKind::Pointwise | OpKind::Move | OpKind::Contraction | OpKind::Reduction | OpKind::Lookup => Role::Compute,
        OpKind::Exchange => Role::Exchange,
        OpKind::Routing => unreachable!("invariant: local graphs have rows, or gathers and scatters"),
        OpKind::Reshard => unreachable!("invariant: the local level has collectives, not reshards"),
    }
}

fn is_renumbering(body: &Body, v: Value) -> bool {
    let long = |dims: &[Dim]| dims.iter().copied().filter(|d| body.dims.size(*d) != 1).collect::<Vec<_>>();
    let arg = body[v].args[0];
    body.dims_of(arg).len() == body.dims_of(v).len() && long(body.dims_of(arg)) == long(body.dims_of(v))
}

/// Values that something outside of the body refers to.
pub fn roots(local: &Local) -> BTreeSet<Value> {
    let updated = local.updates.iter().flat_map(|u| std::iter::once(&u.new).chain(&u.states));
    local.reports.iter().map(|r| &r.1).chain(updated).copied().collect()
}

/// The graph without nodes that lead nowhere.
pub fn without_dead(local: Local) -> Local {
    let body = &local.body;
    let mut used = vec![false; body.nodes.len()];
    let mut stack: Vec<Value> = roots(&local).into_iter().collect();
    stack.extend(body.values().filter(|v| role(body, *v) == Role::Exchange));
    while let Some(v) = stack.pop() {
        if !std::mem::replace(&mut used[v.index()], true) {
            stack.extend(&body[v].args);
        }
    }
    let kept: Vec<Value> = body.values().filter(|v| used[v.index()]).collect();
    let mut new = vec![Value(0); used.len()];
    kept.iter().enumerate().for_each(|(k, v)| new[v.index()] = Value(k as u32));
    let node = |v: &Value| {
        let node = &body[*v];
        Node { args: node.args.iter().map(|a| new[a.index()]).collect(), ..node.clone() }
    };
    let nodes = kept.iter().map(node).collect();
    let mut updates = local.updates.clone();
    for u in &mut updates {
        u.new = new[u.new.index()];
        u.states.iter_mut().for_each(|s| *s = new[s.index()]);
    }
    Local {
        chunks: kept.iter().map(|v| local.chunks[v.index()]).collect(),
        accumulate: kept.iter().map(|v| local.accumulate[v.index()]).collect(),
        source: kept.iter().map(|v| local.source[v.index()].clone()).collect(),
        reasons: kept.iter().map(|v| local.reasons[v.index()].clone()).collect(),
        reports: local.reports.iter().map(|(r, v)| (*r, new[v.index()])).collect(),
        updates,
        host: local.host.iter().filter(|v| used[v.index()]).map(|v| new[v.index()]).collect(),
        body: Body { nodes, dims: local.body.dims },
        ..local
    }
}
