//! Which values outside of a table a text means.
//!
//! A text may choose another index for some values of an input: `where(label != -100, label, 0)` names the
//! number that it means, and `where(label < 10, label, 0)` says nothing of a label of 9999, which is rather a
//! wrong one. So an input whose values matter as an index alone is to be within the table, or one of the
//! numbers that a test of the text gives alone. What is a test is for [`pieces`](super::pieces) to say; a clamp
//! (`minimum`, `maximum`) is none, as it has no other purpose than to take any value. `@any` beside the input
//! says that any value is meant.

use super::pieces::{Bounds, Element, Piece};
use super::{Walk, outside};
use ir::diag::Diagnostic;
use ir::dim::Dim;
use ir::graph::{Body, Graph, Value};
use ir::op::{Compare, DType, Op};
use std::collections::BTreeMap;

/// A value that is used as an index, and the dim that it indexes.
pub struct IndexUse {
    pub at: Value,
    pub index: Value,
    /// The dim that it is an index of, and how many it has.
    pub dim: String,
    pub rows: u64,
    pub kind: IndexKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexKind {
    /// An index of a table's rows; outside of the table it reads 0.
    Gather,
    /// The index of the true element in `i == index(d)`, as in `one_hot`; outside of the dim no element is true.
    OneHot,
}

/// All that a graph uses as an index.
pub fn uses(body: &Body) -> Vec<IndexUse> {
    let of = |at, dim, index, kind| IndexUse { at, index, dim: body.dims.name(dim).to_string(), rows: body.dims[dim].logical, kind };
    let found = body.values().filter_map(|at| {
        let args = &body[at].args;
        match body[at].op {
            Op::Gather { dim } => Some(of(at, dim, args[1], IndexKind::Gather)),
            Op::Compare(Compare::Eq) => {
                let (dim, index) = one_hot(body, args[0], args[1]).or_else(|| one_hot(body, args[1], args[0]))?;
                Some(of(at, dim, index, IndexKind::OneHot))
            }
            _ => None,
        }
    });
    found.collect()
}

/// The dim and the index, if `all` is the iota of a dim that `one` lacks.
fn one_hot(body: &Body, one: Value, all: Value) -> Option<(Dim, Value)> {
    let unexpanded = |mut v: Value| {
        while let Op::Expand = body[v].op {
            v = body[v].args[0];
        }
        v
    };
    let (one, all) = (unexpanded(one), unexpanded(all));
    match body[all].op {
        Op::Iota(dim) if !body[one].ty.dims.contains(&dim) => Some((dim, one)),
        _ => None,
    }
}

/// Inputs whose numbers are more than indices: they become floats.
pub fn quantities(graph: &Graph) -> Vec<bool> {
    let body = &graph.body;
    // `from` holds, per value, the inputs whose values it is computed from.
    let mut from: Vec<Vec<u32>> = vec![vec![]; body.nodes.len()];
    let mut found = vec![false; graph.inputs.len()];
    for v in body.values() {
        let node = &body[v];
        let numbers = match node.op {
            // A gather's table counts, its index does not.
            Op::Gather { .. } => &node.args[..1],
            _ => &node.args[..],
        };
        let mut inputs: Vec<u32> = numbers.iter().flat_map(|a| from[a.index()].clone()).collect();
        if let Op::Input(k) = node.op {
            inputs.push(k);
        }
        inputs.sort_unstable();
        inputs.dedup();
        match node.ty.dtype {
            DType::I32 => from[v.index()] = inputs,
            // A bool does not keep the size of the compared values.
            DType::Bool => {}
            DType::F32 | DType::Bf16 | DType::F16 => inputs.into_iter().for_each(|k| found[k as usize] = true),
        }
    }
    found
}

/// Values that inputs may not hold although the text replaces them: an element and its bounds for each case.
pub fn unnamed(walk: &Walk, pieces: &[Piece], rows: u64) -> Vec<(Element, Bounds)> {
    let mut found = vec![];
    for piece in pieces {
        for (x, values) in piece.when.iter().filter(|(x, _)| piece.tested.contains(x) && !piece.named.contains(x)) {
            let is = |p: &&Piece| p.times.is_some_and(|(y, _)| y == *x);
            if is(&piece) || walk.quantities[walk.elements[*x].input as usize] {
                continue;
            }
            let mut left: Option<Vec<Bounds>> = None;
            for used in pieces.iter().filter(is) {
                let all = Piece { when: BTreeMap::new(), ..used.clone() };
                let bad: Vec<Bounds> = outside(&all, rows).iter().filter_map(|when| when.get(x)?.meet(*values)).collect();
                left = Some(match left {
                    None => bad,
                    Some(before) => both(&before, &bad),
                });
            }
            found.extend(left.into_iter().flatten().map(|b| (*x, b)));
        }
    }
    found
}

/// The intersection of both.
fn both(a: &[Bounds], b: &[Bounds]) -> Vec<Bounds> {
    a.iter().flat_map(|a| b.iter().filter_map(|b| a.meet(*b))).collect()
}

/// W0646: an input takes any value by the text, and as an index not all of them are in the table.
pub fn unchecked(graph: &Graph, used: &IndexUse, input: u32) -> Diagnostic {
    let input = &graph.inputs[input as usize];
    let (dim, most) = (&used.dim, used.rows.saturating_sub(1));
    let d = Diagnostic::warning("W0646", format!("`{}` is `@any`: nothing checks that this index of `{dim}` is within 0 to {most}", input.name));
    let span = graph.body[used.at].origin.span;
    let d = span.into_iter().fold(d, |d, span| d.label(span, "outside of these it reads 0, without a word"));
    d.help(format!("bound it: `minimum(maximum(i, 0), {dim} - 1)`; or leave `@any` out"))
}
