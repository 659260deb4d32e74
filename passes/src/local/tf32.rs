//! Marks the matrix products of f32 factors that tensor cores are to multiply as tf32 (`--tf32`).
//!
//! What the mark means is the op's own affair ([`ir::op::tf32`]), so kernels that have it differ from those that do not, and the reference device rounds as
//! they do. It is made last, before graphs are lowered: the passes before prove that sums are those of real numbers, whatever rounds them.
//! Dots that are reductions go through loops, in f32, and so does attention of f32: neither has a mark.

use ir::local::Local;
use ir::op::{DType, Op};

/// The graph with its products marked.
pub fn mark(mut local: Local) -> Local {
    for v in local.body.values() {
        let body = &local.body;
        let rounds = match &body[v].op {
            Op::Dot { .. } => ir::fault!("tf32.products.any", true, body.is_matrix_product(v)),
            Op::GroupedDot { .. } => true,
            _ => false,
        };
        if !rounds || ir::fault!("tf32.dtype.any", false, body[body[v].args[0]].ty.dtype != DType::F32) {
            continue;
        }
        if let Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. } = &mut local.body.nodes[v.index()].op {
            *tf32 = true;
        }
    }
    local
}
