//! Stores the positions of causal attention so that context-parallel ranks have equal work.
//!
//! With positions split in order, the first of c ranks would see few keys and the last one all. In a zig-zag, rank r of c has the chunks r and
//! 2c - 1 - r of 2c, as in Megatron-LM. Nothing but the order of storage changes: ops that go by it keep it plain.

use crate::sharding::axes::Lists;
use ir::algebra::goes_by_order;
use ir::diag::{Diagnostic, Span};
use ir::dim::{Dim, Order};
use ir::graph::Graph;
use ir::mesh::{Axis, Mesh};
use ir::op::Op;
use ir::options::CpComm;

/// A dim along which causal attention is split, by name and size; and its order, or why it stays plain.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    name: String,
    size: u64,
    order: Result<Order, Reason>,
}

#[derive(Clone, Debug, PartialEq)]
struct Reason {
    text: String,
    span: Option<Span>,
}

/// What to do with each dim along which context parallelism splits causal attention.
pub fn choose(graph: &Graph, mesh: &Mesh, lists: &Lists) -> Vec<Choice> {
    let (body, dims) = (&graph.body, &graph.body.dims);
    let ranks = mesh.size(Axis::Cp);
    let splits_positions = match lists.cp {
        CpComm::Ring | CpComm::AllGather | CpComm::AllToAllAndRing => ranks > 1,
        CpComm::AllToAll => false,
    };
    let mut out: Vec<(Dim, Choice)> = vec![];
    for node in body.nodes.iter().filter(|_| splits_positions) {
        let Op::Attention(a) = &node.op else { continue };
        let (d, keys) = (dims.original(a.at), dims.original(a.keys));
        let split = lists.of(Axis::Cp).iter().flatten().any(|l| *l == d);
        if !a.causal || d != keys || !split || out.iter().any(|(e, _)| *e == d) {
            continue;
        }
        let (name, size) = (dims.name(d).to_string(), dims.size(d));
        let stuck = body.nodes.iter().find(|n| goes_by_order(body, &n.op).iter().any(|e| dims.original(*e) == d));
        let order = if let Some(n) = stuck {
            Err(Reason { text: format!("`{}` goes by the order of `{name}`", n.op.name()), span: n.origin.span })
        } else if !size.is_multiple_of(2 * ranks) || dims[d].logical != size {
            let text = format!("{name} = {size} does not divide by 2 * cp = {}", 2 * ranks);
            Err(Reason { text, span: node.origin.span })
        } else {
            Ok(Order::ZigZag { pairs: ranks, chunk: size / (2 * ranks) })
        };
        out.push((d, Choice { name, size, order }));
    }
    out.into_iter().map(|c| c.1).collect()
}

/// Those of `choices` that another graph over the same dims makes too; W0205 for each that stays in order.
pub fn agreed(choices: Vec<Choice>, other: &[Choice]) -> (Vec<Choice>, Vec<Diagnostic>) {
    let mut warnings = vec![];
    let mut out = vec![];
    for choice in choices {
        let same = other.iter().find(|o| (&o.name, o.size) == (&choice.name, choice.size));
        let reason = [Some(&choice), same].into_iter().flatten().find_map(|c| c.order.as_ref().err());
        match reason {
            None => out.push(choice),
            Some(Reason { text, span }) => {
                let what = format!("`{}` is split over `cp` in order: later ranks have more of causal attention to compute", choice.name);
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
pub fn apply(mut graph: Graph, choices: &[Choice]) -> Graph {
    let dims = &mut graph.body.dims;
    for d in dims.ids() {
        let original = dims.original(d);
        let (name, size) = (dims.name(original), dims.size(original));
        let found = choices.iter().find(|c| c.name == name && c.size == size).and_then(|c| c.order.as_ref().ok());
        if let Some(order) = found {
            dims[d].order = *order;
        }
    }
    graph
}
