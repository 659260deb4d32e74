//! Where sums of 16-bit values are rounded: as the text says, and never before their end.

use crate::violation::fail;
use crate::{Invariant, Violation};
use ir::graph::{Graph, Phase, Value};
use ir::op::{DType, Op, Reduce};
use std::collections::BTreeSet;

/// V156: no sum of 16-bit values is rounded to 16 bits and then wanted in f32, in the forward pass or as the
/// gradient of a parameter, if nothing else wants it rounded.
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
    let mut gradients: BTreeSet<Value> = BTreeSet::new();
    for (_, grad) in &g.grads {
        gradients.insert(*grad);
        let node = &body[*grad];
        if node.op == Op::Add {
            gradients.extend(&node.args);
        }
    }
    for v in body.values() {
        let node = &body[v];
        let sums = matches!(node.op, Op::Dot { .. } | Op::Scatter { .. } | Op::Reduce { kind: Reduce::Sum, .. });
        if !sums || !node.ty.dtype.is_half() {
            continue;
        }
        // From the sum down through what only moves elements, as long as there is one user.
        let mut at = v;
        while let ([(user, _)], false) = (&users[at.index()], roots.contains(&at)) {
            let next = &body[*user];
            let moves = matches!(next.op, Op::View { .. } | Op::Slice { .. } | Op::Pad { .. }) && next.ty.dtype.is_half();
            let wanted = next.origin.phase == Phase::Forward || next.origin.phase == Phase::Backward && gradients.contains(user);
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
