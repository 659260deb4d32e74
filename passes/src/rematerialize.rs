//! Recomputes cheap values in the backward pass instead of keeping them from the forward pass.
//!
//! A pointwise function of one large value (an activation of a matrix product, a normalised row of its input and statistics) costs
//! less to compute again than to store and load. Values of two large operands, such as residual sums, are kept: to recompute
//! them would keep both operands. So are operands of attention, which its backward pass reads as its forward pass does: what they
//! follow from (a matrix product without its bias, or before it is turned) is needed by nothing else.

use ir::graph::{Body, Graph, Node, Phase, Value};
use ir::op::Op;
use std::collections::{BTreeSet, HashMap};

/// Gives every backward use of such a forward value its own copy of the ops, in the backward pass and the user's layer.
pub fn rematerialize(mut graph: Graph) -> Graph {
    let old = std::mem::take(&mut graph.body);
    let cheap = cheap(&old);
    let mut body = Body { dims: old.dims.clone(), nodes: vec![] };
    let mut map: Vec<Value> = vec![];
    let mut copies: HashMap<(Value, Option<u32>), Value> = HashMap::new();
    for v in old.values() {
        let node = old[v].clone();
        let args = node
            .args
            .iter()
            .map(|a| {
                if node.origin.phase == Phase::Backward && old[*a].origin.phase == Phase::Forward && cheap[a.index()] {
                    copy(&old, &cheap, *a, node.origin.layer, &mut body, &map, &mut copies)
                } else {
                    map[a.index()]
                }
            })
            .collect();
        body.nodes.push(Node { args, ..node });
        map.push(Value(body.nodes.len() as u32 - 1));
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()]);
    graph
}

fn copy(
    old: &Body,
    cheap: &[bool],
    v: Value,
    layer: Option<u32>,
    body: &mut Body,
    map: &[Value],
    copies: &mut HashMap<(Value, Option<u32>), Value>,
) -> Value {
    // A value of another layer crosses a border, where only what is carried does.
    if !cheap[v.index()] || old[v].origin.layer != layer {
        return map[v.index()];
    }
    if let Some(w) = copies.get(&(v, layer)) {
        return *w;
    }
    let mut node = old[v].clone();
    node.args = node.args.iter().map(|a| copy(old, cheap, *a, layer, body, map, copies)).collect();
    node.origin.phase = Phase::Backward;
    body.nodes.push(node);
    let w = Value(body.nodes.len() as u32 - 1);
    copies.insert((v, layer), w);
    w
}

/// The forward values that are pointwise functions of at most one large value that is kept anyway.
fn cheap(body: &Body) -> Vec<bool> {
    let mut cheap = vec![false; body.nodes.len()];
    // Large values that a cheap one is computed from: itself, if it is not cheap.
    let mut leaves: Vec<BTreeSet<Value>> = vec![BTreeSet::new(); body.nodes.len()];
    let attends = |v: &Value| matches!(body[*v].op, Op::Attention(_) | Op::AttentionLse(_));
    let read: BTreeSet<Value> = body.values().filter(attends).flat_map(|v| body[v].args.clone()).collect();
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward) {
        let node = &body[v];
        let free = matches!(node.op, Op::Const(_) | Op::Iota(_) | Op::Scalar(_) | Op::Param(_) | Op::Table(_) | Op::Input(_) | Op::Uniform { .. });
        if free {
            continue;
        }
        let size = body.elements(v);
        let from: BTreeSet<Value> =
            node.args.iter().flat_map(|a| leaves[a.index()].iter().copied()).filter(|l| body.elements(*l) * 8 > size).collect();
        cheap[v.index()] = node.op.is_pointwise() && node.op != Op::Cut && !node.args.is_empty() && from.len() <= 1 && !read.contains(&v);
        leaves[v.index()] = if cheap[v.index()] { node.args.iter().flat_map(|a| leaves[a.index()].iter().copied()).collect() } else { [v].into() };
    }
    cheap
}
