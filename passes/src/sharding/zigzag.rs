//! Stores the positions of causal attention so that context-parallel ranks have equal work.
//!
//! With positions split in order, the first of c ranks would see few keys and the last one all. In a zig-zag, rank r of c has the chunks r and
//! 2c - 1 - r of 2c, as in Megatron-LM. Nothing but the order of storage changes: ops that go by it keep it plain.

use crate::sharding::axes::AxisTiers;
use ir::algebra::goes_by_order;
use ir::diag::{Diagnostic, Span};
use ir::dim::{Dim, Dims, Order};
use ir::graph::Graph;
use ir::mesh::{Axis, Mesh};
use ir::op::Op;
use ir::options::CpComm;

/// A dim along which causal attention is split; and its order, or why it stays plain.
#[derive(Clone, Debug, PartialEq)]
pub struct ZigzagChoice {
    dim: DeclaredDim,
    order: Result<Order, PlainReason>,
}

/// A dim as all graphs of one text know it: another one may have its name and its size, and is declared elsewhere.
#[derive(Clone, Debug, PartialEq)]
struct DeclaredDim {
    name: String,
    size: u64,
    /// How many of that name and size are declared before it.
    before: usize,
}

impl DeclaredDim {
    fn of(dims: &Dims, d: Dim) -> DeclaredDim {
        let (name, size) = (dims.name(d).to_string(), dims.size(d));
        let before = alike(dims, &name, size).take_while(|e| *e != d).count();
        DeclaredDim { name, size, before }
    }

    fn among(&self, dims: &Dims) -> Option<Dim> {
        alike(dims, &self.name, self.size).nth(self.before)
    }
}

/// The dims of a name and a size that are no copies.
fn alike<'a>(dims: &'a Dims, name: &'a str, size: u64) -> impl Iterator<Item = Dim> + 'a {
    dims.ids().filter(move |d| dims.original(*d) == *d && dims.size(*d) == size && dims.name(*d) == name)
}

#[derive(Clone, Debug, PartialEq)]
struct PlainReason {
    text: String,
    span: Option<Span>,
}

/// What to do with each dim along which context parallelism splits causal attention.
pub fn choose(graph: &Graph, mesh: &Mesh, lists: &AxisTiers) -> Vec<ZigzagChoice> {
    let (body, dims) = (&graph.body, &graph.body.dims);
    let ranks = mesh.size(Axis::Cp);
    let splits_positions = match lists.cp {
        CpComm::Ring | CpComm::AllGather | CpComm::AllToAllAndRing => ranks > 1,
        CpComm::AllToAll => false,
    };
    let mut out: Vec<(Dim, ZigzagChoice)> = vec![];
    for node in body.nodes.iter().filter(|_| splits_positions) {
        let Op::Attention(a) = &node.op else { continue };
        let (d, keys) = (dims.original(a.at), dims.original(a.keys));
        let split = lists.of(Axis::Cp).iter().flatten().any(|l| *l == d);
        let further = a.further(&node.args);
        let by_index = |[query, key]: [usize; 2]| [query, key].iter().all(|k| matches!(body[further[*k]].op, Op::Iota(_)));
        if !a.scoring.ordered().is_some_and(by_index) || d != keys || !split || out.iter().any(|(e, _)| *e == d) {
            continue;
        }
        let dim = DeclaredDim::of(dims, d);
        let DeclaredDim { name, size, .. } = &dim;
        let stuck = body.nodes.iter().find(|n| goes_by_order(body, &n.op).iter().any(|e| dims.original(*e) == d));
        let order = if let Some(n) = stuck {
            Err(PlainReason { text: format!("`{}` goes by the order of `{name}`", n.op.name()), span: n.origin.span })
        } else if !size.is_multiple_of(2 * ranks) || dims[d].logical != *size {
            let text = format!("{name} = {size} does not divide by 2 * cp = {}", 2 * ranks);
            Err(PlainReason { text, span: node.origin.span })
        } else {
            Ok(Order::ZigZag { pairs: ranks, chunk: ir::fault!("zigzag.chunk.size", size / ranks, size / (2 * ranks)) })
        };
        out.push((d, ZigzagChoice { dim, order }));
    }
    out.into_iter().map(|c| c.1).collect()
}

/// Those of `choices` that another graph over the same dims makes too; W0205 for each that stays in order.
pub fn agreed(choices: Vec<ZigzagChoice>, other: &[ZigzagChoice]) -> (Vec<ZigzagChoice>, Vec<Diagnostic>) {
    let mut warnings = vec![];
    let mut out = vec![];
    for choice in choices {
        let same = other.iter().find(|o| o.dim == choice.dim);
        let reason = [Some(&choice), same].into_iter().flatten().find_map(|c| c.order.as_ref().err());
        match reason {
            None => out.push(choice),
            Some(PlainReason { text, span }) => {
                let what = format!("`{}` is split over `cp` in order: later ranks have more of causal attention to compute", choice.dim.name);
                let mut d = Diagnostic::warning("W0205", what);
                if let Some(span) = span {
                    d = d.label(*span, text.clone());
                }
                warnings.push(d.help(format!("a zig-zag of chunks would balance it, but {text}")));
            }
        }
    }
    (out, warnings)
}

/// Gives the dims, and their copies, their orders.
pub fn apply(mut graph: Graph, choices: &[ZigzagChoice]) -> Graph {
    let dims = &mut graph.body.dims;
    let orders: Vec<(Dim, Order)> = choices.iter().filter_map(|c| Some((c.dim.among(dims)?, *c.order.as_ref().ok()?))).collect();
    for d in dims.ids() {
        let original = ir::fault!("zigzag.copies.plain", d, dims.original(d));
        if let Some((_, order)) = orders.iter().find(|(e, _)| *e == original) {
            dims[d].order = *order;
        }
    }
    graph
}
