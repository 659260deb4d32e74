//! Rows of experts as dense values: `[tokens.., experts, rest..]`, zero where a token has not chosen an expert.

use ir::build::Builder;
use ir::dim::Dim;
use ir::graph::{Body, Node, Value};
use ir::local::Local;
use ir::op::{Compare, Op, Reduce, Routing};

/// Writes every dispatch and combination with the ops of loops: a combination looks up the chosen expert's row, a dispatch
/// compares choices with the experts' numbers. All experts of a routing are on the rank, so numbers are the global ones.
pub fn spell_out(mut local: Local) -> Local {
    if !local.body.nodes.iter().any(|n| matches!(n.op, Op::Dispatch(_) | Op::Combine(_))) {
        return local;
    }
    let old = std::mem::take(&mut local.body);
    let mut body = Body { dims: old.dims, nodes: Vec::with_capacity(old.nodes.len()) };
    let (chunks, accumulate) = (std::mem::take(&mut local.chunks), std::mem::take(&mut local.accumulate));
    let (source, reasons) = (std::mem::take(&mut local.source), std::mem::take(&mut local.reasons));
    let mut map: Vec<Value> = Vec::with_capacity(old.nodes.len());
    for (i, mut node) in old.nodes.into_iter().enumerate() {
        node.args.iter_mut().for_each(|a| *a = map[a.index()]);
        match node.op {
            Op::Dispatch(r) => dispatch(&mut body, &r, node),
            Op::Combine(r) => body.nodes.push(Node { op: Op::Gather { dim: r.experts }, ..node }),
            _ => body.nodes.push(node),
        }
        // The last node is the value itself; those before it are steps to it.
        let last = body.nodes.len() - 1;
        local.chunks.resize(last + 1, chunks[i]);
        local.accumulate.resize(last, false);
        local.accumulate.push(accumulate[i]);
        local.source.resize(last, None);
        local.source.push(source[i].clone());
        local.reasons.resize(last, None);
        local.reasons.push(reasons[i].clone());
        map.push(Value(last as u32));
    }
    local.body = body;
    local.reports.iter_mut().for_each(|r| r.1 = map[r.1.index()]);
    for u in &mut local.updates {
        u.new = map[u.new.index()];
        u.states.iter_mut().for_each(|s| *s = map[s.index()]);
    }
    local
}

fn dispatch(body: &mut Body, r: &Routing, node: Node) {
    let Node { args, ty, origin, .. } = node;
    let (x, chosen) = (args[0], args[1]);
    let mut b = Builder { body, origin };
    let number = b.op(Op::Iota(r.experts), &[]);
    let named = b.compare(Compare::Eq, chosen, number);
    let mut zero = b.constant(0.0);
    zero = b.cast(zero, ty.dtype);
    let tokens: Vec<Dim> = ty.dims.iter().copied().filter(|d| *d == r.experts || b.body[chosen].ty.has(*d)).collect();
    if b.body[x].ty.has(r.choice) {
        // The choice innermost: sums run along it.
        let rows = b.select(named, x, zero);
        b.body[rows].ty.dims = [ty.dims.clone(), vec![r.choice]].concat();
        let sum = b.op(Op::Reduce { kind: Reduce::Sum, over: vec![r.choice] }, &[rows]);
        b.body[sum].ty.dims = ty.dims;
        return;
    }
    b.body[named].ty.dims = [tokens.clone(), vec![r.choice]].concat();
    let hits = b.cast(named, ty.dtype);
    let count = b.op(Op::Reduce { kind: Reduce::Sum, over: vec![r.choice] }, &[hits]);
    b.body[count].ty.dims = tokens;
    let any = b.compare(Compare::Ne, count, zero);
    let times = b.mul(x, count);
    let rows = b.select(any, times, zero);
    b.body[times].ty.dims = ty.dims.clone();
    b.body[rows].ty.dims = ty.dims;
}
