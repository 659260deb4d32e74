//! Who uses a value, and which values end a sum. What the backward pass computes again counts as what it computes again, so that recomputation changes
//! no decision.

use ir::graph::{Body, Graph, Phase, Type, Value};
use ir::op::Op;
use std::collections::HashMap;

/// By value.
pub(super) struct ValueUses {
    /// The nodes that use it or a copy of it, and in which slot.
    pub users: Vec<Vec<(Value, usize)>>,
    /// The one of the forward pass that it computes again; itself for all others.
    pub originals: Vec<Value>,
    /// Whether its sum is taken after the microbatches if not before: a gradient, a report, what else the update reads.
    pub is_sink: Vec<bool>,
    pub is_gradient: Vec<bool>,
}

impl ValueUses {
    pub fn new(graph: &Graph, reports: &[Value]) -> ValueUses {
        let update = |v: &Value| graph.body[*v].origin.phase == Phase::Update;
        let read =
            graph.body.values().filter(update).flat_map(|v| graph.body[v].args.clone()).filter(|a| !update(a) && !graph.body[*a].op.is_source());
        let sinks: Vec<Value> = graph.grads.iter().map(|g| g.1).chain(reports.iter().copied()).chain(read).collect();
        let mut is_gradient = vec![false; graph.body.nodes.len()];
        graph.grads.iter().for_each(|(_, g)| is_gradient[g.index()] = true);
        let originals = originals(&graph.body);
        let mut users = users_of_all(&graph.body, &originals);
        let mut is_sink = vec![false; graph.body.nodes.len()];
        for s in sinks.iter().filter(|v| !update(v)) {
            is_sink[s.index()] = true;
            // After the microbatches, a sink is read in the sharding in which it rests.
            users[s.index()].retain(|(c, _)| graph.body[*c].origin.phase != Phase::Update);
        }
        for v in graph.body.values() {
            let original = originals[v.index()].index();
            is_sink[v.index()] = is_sink[original];
            users[v.index()] = users[original].clone();
        }
        ValueUses { users, originals, is_sink, is_gradient }
    }
}

/// What makes two nodes compute the same: op, operands, type and layer.
type Computation<'a> = (&'a Op, Vec<Value>, &'a Type, Option<u32>);

/// For each value, the one of the forward pass that it computes again; itself for all others.
fn originals(body: &Body) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(body.nodes.len());
    let mut known: HashMap<Computation, Value> = HashMap::new();
    for v in body.values() {
        let node = &body[v];
        let key = (&node.op, node.args.iter().map(|a| out[a.index()]).collect(), &node.ty, node.origin.layer);
        out.push(match node.origin.phase {
            Phase::Forward => *known.entry(key).or_insert(v),
            Phase::Backward => known.get(&key).copied().unwrap_or(v),
            Phase::Update => v,
        });
    }
    out
}

/// For each value, the nodes that use it or a copy of it; copies of nodes are left out, since they do as their originals.
fn users_of_all(body: &Body, originals: &[Value]) -> Vec<Vec<(Value, usize)>> {
    let mut users: Vec<Vec<(Value, usize)>> = vec![vec![]; body.nodes.len()];
    for v in body.values().filter(|v| originals[v.index()] == *v) {
        for (slot, a) in body[v].args.iter().enumerate() {
            users[originals[a.index()].index()].push((v, slot));
        }
    }
    users
}
