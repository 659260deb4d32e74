//! Where sums of 16-bit values are rounded: as the text says, and never before their end.

use crate::violation::fail;
use crate::{Invariant, Violation};
use ir::graph::{Graph, Phase, Users, Value};
use ir::op::{DType, Op, OpKind, Reduce};
use std::collections::BTreeSet;

/// V156: no sum of 16-bit values is rounded to 16 bits and then wanted in f32, in the forward pass or as the gradient
/// of a parameter, if nothing else wants it rounded. A function that takes a sum number by number, in f32, to results
/// of 16 bits does not want it.
///
/// # Errors
/// The first sum that is.
pub fn verify(g: &Graph) -> Result<(), Violation> {
    let body = &g.body;
    if body.nodes.iter().all(|n| !n.ty.dtype.is_half()) {
        return Ok(());
    }
    let users = body.users();
    let roots: BTreeSet<Value> = g.roots().into_iter().collect();
    let wanted_forward = stays(g, &users, &roots);
    // These are gradients, and the terms of their sums, before ranks and microbatches sum them up.
    let mut gradients: BTreeSet<Value> = BTreeSet::new();
    let mut open: Vec<Value> = g.grads.iter().map(|(_, grad)| *grad).collect();
    while let Some(v) = open.pop() {
        if gradients.insert(v) && matches!(body[v].op, Op::Add | Op::Reshard { .. }) {
            open.extend(&body[v].args);
        }
    }
    for v in body.values() {
        let node = &body[v];
        // In the forward pass, the text itself may add in 16 bits.
        let adds = node.op == Op::Add && node.origin.phase == Phase::Backward;
        let sums = adds || matches!(node.op, Op::Dot { .. } | Op::Scatter { .. } | Op::Reduce { kind: Reduce::Sum, .. });
        if !sums || !node.ty.dtype.is_half() {
            continue;
        }
        // Follows the sum through ops that only move elements, as long as it has one user.
        let mut at = v;
        while let ([(user, _)], false) = (&users[at.index()], roots.contains(&at)) {
            let next = &body[*user];
            let moves = matches!(next.op, Op::View { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::Reshard { .. }) && next.ty.dtype.is_half();
            let wanted = match next.origin.phase {
                Phase::Forward => wanted_forward[user.index()],
                Phase::Backward => gradients.contains(user),
                Phase::Update => false,
            };
            if next.op == Op::Cast && next.ty.dtype == DType::F32 && wanted {
                return fail(Invariant::UnroundedSum, v, format!("{user} wants this sum in f32, and it is rounded to {}", node.ty.dtype.name()));
            }
            if !moves {
                break;
            }
            at = *user;
        }
    }
    Ok(())
}

/// For each value, whether the forward pass sums it, or ends with it, before it is rounded to 16 bits.
fn stays(g: &Graph, users: &Users, roots: &BTreeSet<Value>) -> Vec<bool> {
    let mut stays = vec![true; g.body.nodes.len()];
    for v in g.body.values().rev() {
        let ends = roots.contains(&v);
        let mut after = users[v.index()].iter().map(|(user, _)| *user).filter(|u| g.body[*u].origin.phase == Phase::Forward).peekable();
        let unread = after.peek().is_none();
        let user_stays = |u: Value| {
            let node = &g.body[u];
            let rounds = node.op == Op::Cast && node.ty.dtype.is_half();
            let by_itself = matches!(node.op.kind(), OpKind::Pointwise | OpKind::Mark | OpKind::Reshard);
            !rounds && (!by_itself || stays[u.index()])
        };
        let any = after.any(user_stays);
        stays[v.index()] = ends || unread || any;
    }
    stays
}
