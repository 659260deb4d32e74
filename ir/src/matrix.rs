//! Which parameters are hidden matrices, and which of their dims are which: what Muon takes.
//!
//! **Rule.** The first product of the forward pass that a parameter, or a copy of it in another precision, is a
//! factor of, says what its dims are: those that it sums over are inputs, those that the other factor has too and
//! keeps (as `experts`) number a batch of matrices, the rest are outputs. A parameter is a hidden matrix if it
//! trains, inputs and outputs have two elements or more each, none of its uses looks rows up (an embedding), and
//! another product of a parameter follows on the way to the results (else it is a head).

use crate::dim::Dim;
use crate::graph::{Body, Graph, Phase, Value};
use crate::op::Op;

/// The dims of a parameter that is a matrix, or a batch of matrices; each in the parameter's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    /// Dims that number a batch of matrices, such as `experts`; empty for one matrix.
    pub batch: Vec<Dim>,
    /// Dims that its product sums over.
    pub inputs: Vec<Dim>,
    /// Dims that its product keeps and the other factor lacks.
    pub outputs: Vec<Dim>,
}

/// By parameter: what it is as a matrix, if it is a hidden one and no group of the text says otherwise.
pub fn hidden(graph: &Graph) -> Vec<Option<Matrix>> {
    let body = &graph.body;
    let users = body.users();
    let forward = |v: Value| body[v].origin.phase == Phase::Forward;
    let product = |v: Value| if let Op::Dot { over, .. } = &body[v].op { Some(over) } else { None };
    // A value is `followed` if a product with a parameter depends on it.
    let mut followed = vec![false; body.nodes.len()];
    for v in body.values().rev() {
        let of_param = |(user, slot): &(Value, usize)| product(*user).is_some() && param(body, body[*user].args[1 - slot]).is_some();
        let after = |u: &&(Value, usize)| forward(u.0);
        followed[v.index()] = users[v.index()].iter().filter(after).any(|u| followed[u.0.index()] || of_param(u));
    }
    let mut out: Vec<Option<Matrix>> = vec![None; graph.params.len()];
    let mut looked_up = vec![false; graph.params.len()];
    let mut heads = vec![false; graph.params.len()];
    for v in body.values().filter(|v| forward(*v)) {
        if let Op::Gather { .. } = body[v].op
            && let Some(p) = viewed(body, body[v].args[0])
        {
            looked_up[p as usize] = true;
        }
        let Some(over) = product(v) else { continue };
        for (slot, a) in body[v].args.iter().enumerate() {
            let Some(p) = param(body, *a) else { continue };
            heads[p as usize] |= !crate::fault!("matrix.hidden.heads", true, followed[v.index()]);
            let other = &body[body[v].args[1 - slot]].ty;
            let pick = |keep: &dyn Fn(Dim) -> bool| body.dims_of(*a).iter().copied().filter(|d| keep(*d)).collect::<Vec<_>>();
            out[p as usize].get_or_insert_with(|| Matrix {
                batch: pick(&|d| other.has(d) && !over.contains(&d)),
                inputs: pick(&|d| over.contains(&d)),
                outputs: pick(&|d| !other.has(d) && !over.contains(&d)),
            });
        }
    }
    for (p, info) in graph.params.iter().enumerate() {
        let several = |dims: &[Dim]| body.dims.elements(dims) > 1;
        let is_matrix = out[p].as_ref().is_some_and(|m| several(&m.inputs) && several(&m.outputs));
        if !is_matrix || looked_up[p] || heads[p] || info.adam || !info.trains() {
            out[p] = None;
        }
    }
    out
}

/// The parameter that a value is, or is a copy of in another precision.
fn param(body: &Body, v: Value) -> Option<u32> {
    if let Op::Param(p) = body[v].op { Some(p) } else { body.copied_param(v) }
}

/// The parameter that a value holds the elements of.
fn viewed(body: &Body, mut v: Value) -> Option<u32> {
    while let Op::View { .. } | Op::Cast = body[v].op {
        v = body[v].args[0];
    }
    param(body, v)
}
