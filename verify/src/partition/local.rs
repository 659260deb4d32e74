//! The verifier of a local graph by itself.

use crate::violation::fail;
use crate::{Invariant, LocationPart, Violation, references};
use ir::infer;
use ir::local::{Chunk, Local};
use ir::op::Op;
use ir::sharded::Sharded;

/// Invariants of a local graph:
/// 1. Every node obeys its type rule; per-node tables have one entry per node.
/// 2. No node uses one of a later chunk; a chunk that runs per microbatch uses no per-microbatch value of another
///    one, except a pass those of passes before it.
/// 3. Every node that holds a value of the sharded graph has its local shape: the dims of the value, each as large as
///    the value's sharding says.
///
/// What a sum over microbatches may be used by is checked as partitions are, in `partition/stage.rs`.
///
/// # Errors
/// The first invariant that does not hold.
pub fn verify(l: &Local, sharded: &Sharded) -> Result<(), Violation> {
    references::locals([l], Some(sharded))?;
    let body = &l.body;
    let n = body.nodes.len();
    if [l.chunks.len(), l.accumulate.len(), l.source.len(), l.reasons.len()] != [n; 4] {
        return fail(Invariant::LocalTables, LocationPart::Graph, "a table has not one entry per node");
    }
    for v in body.values() {
        infer::check(body, v).or_else(|e| fail(Invariant::LocalNodeType, v, e.to_string()))?;
        let (node, chunk) = (&body[v], l.chunks[v.index()]);
        if matches!(node.op, Op::Reshard { .. }) {
            return fail(Invariant::NoReshard, v, "a reshard in a local graph");
        }
        for a in &node.args {
            let from = l.chunks[a.index()];
            if from > chunk {
                return fail(Invariant::ChunkOrder, v, format!("the {chunk} uses {a} of the {from}"));
            }
            let other = from != chunk && from.per_microbatch() && chunk.per_microbatch();
            let stash = from.is_pass() && chunk.is_pass();
            if other && !stash && !(from == Chunk::Prologue && l.accumulate[a.index()]) {
                return fail(Invariant::OwnMicrobatch, v, format!("the {chunk} uses {a} of another microbatch's {from}"));
            }
        }
        if let Some((s, sharding)) = &l.source[v.index()] {
            if sharding != sharded.sharding(*s) {
                return fail(Invariant::LocalSharding, v, format!("its sharding is not that of {s}"));
            }
            let global = &sharded.graph.body;
            let want = global.dims_of(*s);
            if want.len() != node.ty.dims.len() {
                return fail(Invariant::LocalShape, v, format!("it has not the dims of {s}"));
            }
            for (d, w) in node.ty.dims.iter().zip(want) {
                let parts: u64 = sharding.splits(*w).iter().map(|u| sharded.mesh[*u].size).product();
                if body.dims.size(*d) * parts != global.dims.size(*w) {
                    return fail(
                        Invariant::LocalShape,
                        v,
                        format!("`{}` is {} of {} over {parts} parts", body.dims.name(*d), body.dims.size(*d), global.dims.size(*w)),
                    );
                }
            }
        }
    }
    Ok(())
}
