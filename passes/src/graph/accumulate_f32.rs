//! Sums of 16-bit values that are wanted in f32 are not rounded in between.

use ir::graph::{Body, Graph, Phase, Users, Value};
use ir::op::{DType, Op, Reduce};
use std::collections::BTreeSet;

/// Where a cast to f32 takes the 16-bit result of a contraction, a sum or a scatter that nothing else uses, that op yields f32 itself:
/// it summed in f32 anyway. So weight gradients are accumulated unrounded, and `f32(dot(..))` in a model means what it says.
///
/// Where the forward pass goes on number by number from there and rounds each to 16 bits again, as `silu` does, the sum
/// is rounded too: f32 is how the function computes, not what the model asks for, and the sum, which the backward pass
/// may read, is stored in half of the bytes.
///
/// In the backward pass gradients of parameters alone are widened: other casts there turn the gradient of an activation, whose sums over
/// ranks are exchanged in 16 bits.
pub fn widen(mut graph: Graph) -> Graph {
    let users = graph.body.users();
    let roots: BTreeSet<Value> = graph.roots().into_iter().collect();
    let mut gradients: BTreeSet<Value> = graph.grads.iter().map(|g| g.1).collect();
    for (_, g) in &graph.grads {
        if graph.body[*g].op == Op::Add {
            gradients.extend(&graph.body[*g].args);
        }
    }
    for v in graph.body.values() {
        let node = &graph.body[v];
        let wanted = match node.origin.phase {
            Phase::Forward => !ir::fault!("accumulate_f32.rounded", true, rounded_again(&graph.body, &users, &roots, v)),
            Phase::Backward => ir::fault!("accumulate_f32.gradients.half", false, gradients.contains(&v)),
            Phase::Update => false,
        };
        if node.op != Op::Cast || node.ty.dtype != DType::F32 || !wanted {
            continue;
        }
        let single = |x: Value| users[x.index()].len() == 1 && !roots.contains(&x);
        if let Some(path) = summed(&graph.body, node.args[0], &single) {
            for x in path {
                graph.body[x].ty.dtype = DType::F32;
            }
        }
    }
    graph
}

/// Whether all forward uses of `v` are pointwise up to casts to 16 bits.
fn rounded_again(body: &Body, users: &Users, roots: &BTreeSet<Value>, v: Value) -> bool {
    let mut seen = BTreeSet::from([v]);
    let mut open = vec![v];
    while let Some(x) = open.pop() {
        let mut forward = users[x.index()].iter().map(|(user, _)| *user).filter(|u| body[*u].origin.phase == Phase::Forward).peekable();
        if roots.contains(&x) || forward.peek().is_none() {
            return false;
        }
        for user in forward {
            let node = &body[user];
            let ends = node.op == Op::Cast && node.ty.dtype.is_half();
            if !ends && !node.op.is_pointwise() {
                return false;
            }
            if !ends && seen.insert(user) {
                open.push(user);
            }
        }
    }
    true
}

/// A sum of 16-bit values and the ops that move its elements up to `v`, if each is used once.
fn summed(body: &Body, mut v: Value, single: &dyn Fn(Value) -> bool) -> Option<Vec<Value>> {
    let mut path = vec![];
    loop {
        let node = &body[v];
        if !node.ty.dtype.is_half() || !single(v) {
            return None;
        }
        path.push(v);
        match &node.op {
            Op::Dot { .. } | Op::Scatter { .. } | Op::Reduce { kind: Reduce::Sum, .. } => return Some(path),
            Op::View { .. } | Op::Slice { .. } | Op::Pad { .. } => v = node.args[0],
            _ => return None,
        }
    }
}
