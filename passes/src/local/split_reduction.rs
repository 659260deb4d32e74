//! Cuts large sums in two steps: those of all elements of a value over all but the first dims, then over these; those of many scalars into sums of as many as a kernel reads.
//!
//! A kernel computes a result by one thread (of a GPU: by one warp), so a norm in one step would read a whole gradient by itself. Sums of parts of
//! a flat bucket, which has one dim, stay as they are. Of sums over elements only those that run once per step are looked at; losses are sums of few results.
//! A sum of many scalars has a term per parameter, as the norm of all gradients has. Sums of many tensors stay: the proof of rewrites knows sums of sums of scalars alone.

use crate::local::role::MAX_OPERANDS;
use ir::graph::{Body, Node, Type, Value};
use ir::local::{Chunk, Local};
use ir::op::{DType, Op, Reduce};

/// A sum of at least so many elements is cut, such that the second step is of at least this many results of the first.
const LARGE: u64 = 1 << 16;
const RESULTS: u64 = 64;

/// Rewrites a local graph.
pub fn cut(local: Local) -> Local {
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let mut out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], host: Default::default(), ..local.clone() };
    let mut new: Vec<Value> = vec![];
    for v in local.body.values() {
        let (node, k) = (&local.body[v], v.index());
        let mut node = Node { args: node.args.iter().map(|a| new[a.index()]).collect(), ..node.clone() };
        if let Some(dims) = first_results(&local, v) {
            let over = ir::fault!(
                "split_reduction.part.dims",
                local.body.dims_of(local.body[v].args[0])[dims.len() - 1..].to_vec(),
                local.body.dims_of(local.body[v].args[0])[dims.len()..].to_vec()
            );
            let part = Node {
                op: Op::Reduce { kind: ir::fault!("split_reduction.part.max", Reduce::Max, Reduce::Sum), over },
                ty: Type::new(node.ty.dtype, dims.clone()),
                ..node.clone()
            };
            node.args = vec![push(&mut out, part, &local, v)];
            node.op = Op::Reduce { kind: Reduce::Sum, over: dims };
        }
        while node.op == Op::Add && node.ty == Type::scalar(DType::F32) && node.args.len() > MAX_OPERANDS {
            let terms = std::mem::take(&mut node.args);
            let sum = |terms: &[Value]| push(&mut out, Node { args: terms.to_vec(), ..node.clone() }, &local, v);
            node.args = terms.chunks(MAX_OPERANDS).map(sum).collect();
        }
        let value = push(&mut out, node, &local, v);
        out.accumulate[value.index()] = local.accumulate[k];
        out.source[value.index()] = local.source[k].clone();
        out.reasons[value.index()] = local.reasons[k].clone();
        new.push(value);
    }
    out.reports.iter_mut().for_each(|r| r.1 = new[r.1.index()]);
    for u in &mut out.updates {
        u.new = new[u.new.index()];
        u.states.iter_mut().for_each(|s| *s = new[s.index()]);
    }
    out
}

/// Adds a node that runs when and where `like` does.
fn push(out: &mut Local, node: Node, old: &Local, like: Value) -> Value {
    let value = out.body.push(node.op, node.args, node.ty, node.origin);
    out.chunks.push(old.chunks[like.index()]);
    out.accumulate.push(false);
    out.source.push(None);
    out.reasons.push(None);
    if old.host.contains(&like) {
        out.host.insert(value);
    }
    value
}

/// The dims that the first step of a sum keeps, if it takes two.
fn first_results(local: &Local, v: Value) -> Option<Vec<ir::dim::Dim>> {
    let (body, node) = (&local.body, &local.body[v]);
    let once = matches!(local.chunks[v.index()], Chunk::Reduce | Chunk::Update);
    if !once || !matches!(node.op, Op::Reduce { kind: Reduce::Sum, .. }) || !node.ty.dims.is_empty() {
        return None;
    }
    let dims = body.dims_of(node.args[0]);
    let results = |k: usize| body.dims.elements(&dims[..k]);
    let all = results(dims.len());
    let first = (1..dims.len()).find(|k| results(*k) >= RESULTS)?;
    (all >= LARGE && results(first) < all).then(|| dims[..first].to_vec())
}
