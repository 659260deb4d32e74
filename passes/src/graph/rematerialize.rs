//! Recomputes forward values in the backward pass instead of keeping them.
//!
//! Always: cheap ones. A pointwise function of one large value (an activation of a matrix product, a normalised row of its input
//! and statistics) costs less to compute again than to store and load. Values of two large operands, such as residual sums, are kept:
//! to recompute them would keep both operands; and so are the operands of attention. On demand: what named functions compute, or all of a unit of
//! layers but what enters it (Chen et al. 2016; selective: Korthikanti et al. 2022). Random draws are keyed by path, step and global index, so
//! that a copy draws the same.

use crate::graph::simplify;
use ir::graph::{Body, Graph, Node, Phase, Value};
use ir::op::Op;
use ir::options::Recompute;
use ir::pipeline::Layout;
use std::collections::{BTreeSet, HashMap};

/// Gives the backward uses of such forward values copies of the ops, in the backward pass, each just before the first op that needs it.
/// Forward values that nothing uses any more are dropped.
pub fn rematerialize(mut graph: Graph, recompute: Recompute, layout: &Layout) -> Graph {
    let old = std::mem::take(&mut graph.body);
    let regions = regions(recompute, layout);
    let again = again(&old, recompute, &regions);
    let region = |v: Value| old[v].origin.layer.map(|l| regions[l as usize].0);
    // Values of other regions are never recomputed, since they are carried across the border.
    let copied = |user: Value, v: Value| again[v.index()] && region(v) == region(user);
    let mut body = Body { dims: old.dims.clone(), nodes: vec![] };
    let mut map: Vec<Value> = vec![];
    let mut copies: HashMap<Value, Value> = HashMap::new();
    for v in old.values() {
        let mut node = old[v].clone();
        let backward = node.origin.phase == Phase::Backward;
        let wanted = |a: &Value| backward && copied(v, *a);
        let mut open: Vec<Value> = node.args.iter().copied().filter(wanted).collect();
        let mut needed = BTreeSet::new();
        while let Some(a) = open.pop() {
            if !copies.contains_key(&a) && needed.insert(a) {
                open.extend(old[a].args.iter().copied().filter(|b| copied(a, *b)));
            }
        }
        for a in needed {
            let mut copy: Node = old[a].clone();
            copy.args = copy
                .args
                .iter()
                .map(|b| {
                    ir::fault!("rematerialize.copy.first", map[b.index()], copies.get(b).filter(|_| copied(a, *b)).copied().unwrap_or(map[b.index()]))
                })
                .collect();
            (copy.origin.phase, copy.origin.recomputed) = (Phase::Backward, true);
            body.nodes.push(copy);
            copies.insert(a, Value(body.nodes.len() as u32 - 1));
        }
        node.args = node
            .args
            .iter()
            .map(|a| {
                if wanted(a) {
                    ir::fault!(
                        "rematerialize.operand.other",
                        *copies.iter().filter(|c| old[*c.0].ty == old[*a].ty).map(|c| c.1).max().expect("its own"),
                        copies[a]
                    )
                } else {
                    map[a.index()]
                }
            })
            .collect();
        body.nodes.push(node);
        map.push(Value(body.nodes.len() as u32 - 1));
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()]);
    simplify::clean(graph)
}

/// For every layer, the first layer of the region whose values are recomputed together, and whether all of them are.
fn regions(recompute: Recompute, layout: &Layout) -> Vec<(u32, bool)> {
    let mut out: Vec<(u32, bool)> = vec![];
    let mut start = 0;
    for (l, stage) in layout.of_layer.iter().enumerate() {
        if l > 0 && layout.of_layer[l - 1] != *stage {
            start = l;
        }
        let (layer, place) = (l as u32, (l - start) as u32);
        out.push(match recompute {
            Recompute::None | Recompute::Selective => (layer, false),
            Recompute::Uniform(n) => (layer - place % ir::fault!("rematerialize.region.size", n + 1, n.max(1)), true),
            Recompute::Block(n) => (layer, place < n),
        });
    }
    out
}

/// The forward values that the backward pass computes again.
fn again(body: &Body, recompute: Recompute, regions: &[(u32, bool)]) -> Vec<bool> {
    let mut again = cheap(body);
    let region = |v: Value| body[v].origin.layer.map(|l| regions[l as usize]);
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward && !body[*v].op.is_source()) {
        let node = &body[v];
        again[v.index()] |= match region(v) {
            Some((_, true)) => node.op != Op::Cut || node.args.iter().all(|a| region(*a) == region(v)),
            Some((_, false)) | None => recompute == Recompute::Selective && node.origin.within.is_some() && node.op != Op::Cut,
        };
    }
    again
}

/// The forward values that are pointwise functions of at most one large value that is kept anyway.
fn cheap(body: &Body) -> Vec<bool> {
    let mut cheap = vec![false; body.nodes.len()];
    // `leaves` holds the large values that a cheap value is computed from; for any other value, the value itself.
    let mut leaves: Vec<BTreeSet<Value>> = vec![BTreeSet::new(); body.nodes.len()];
    let attends = |v: &Value| matches!(body[*v].op, Op::Attention(_) | Op::AttentionLse(_));
    let read: BTreeSet<Value> = body.values().filter(attends).flat_map(|v| body[v].args.clone()).collect();
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward) {
        let node = &body[v];
        // The 16-bit copy of a parameter is made once per step and is still there in the backward pass.
        let copy = body.copied_param(v).is_some();
        let free = copy || node.op.is_source();
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
