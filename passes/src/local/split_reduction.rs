//! Cuts large sums in steps: those of all elements of a value over all but the first dims, then over these, in rows
//! of them where they are many themselves; those of many scalars into sums of as many as a kernel reads.
//!
//! A kernel computes a result by one thread (of a GPU: by one warp), so a norm in one step would read a whole gradient
//! by itself. A rank's part of a flat bucket has one dim: its sum is made of rows of it, as many as there are elements
//! in one, as nearly as its size can be cut. What is pointwise before the sum is done in these rows, so that it stays
//! in the kernel. Of sums over elements only those that run once per step are looked at; losses are sums of few
//! results. A sum of many scalars has a term per parameter, as the norm of all gradients has. Sums of many tensors
//! stay: the proof of rewrites knows sums of sums of scalars alone.
//!
//! For GPUs, products of few tiles are cut along what they sum over ([`products`]).

pub mod products;

use crate::local::role::{MAX_OPERANDS, without_dead};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Type, Value};
use ir::local::{Chunk, Local};
use ir::op::{DType, Op, Reduce};
use ir::options::Options;

/// A sum of at least so many elements is cut, such that the second step is of at least this many results of the
/// first: each is made by one warp, and a GPU is full with a thousand. Where there are less, it is of this many or
/// more.
const LARGE: u64 = 1 << 16;
const RESULTS: u64 = 1 << 10;
const FEW: u64 = 64;
/// So many results of a step take one step more: a sum is made by one thread, or by one block of a GPU.
const MANY: u64 = 1 << 14;

/// Rewrites a local graph.
pub fn cut(local: Local, options: &Options) -> Local {
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let mut out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], host: Default::default(), ..local.clone() };
    let mut new: Vec<Value> = vec![];
    for v in local.body.values() {
        let (node, k) = (&local.body[v], v.index());
        let mut node = Node { args: node.args.iter().map(|a| new[a.index()]).collect(), ..node.clone() };
        if let Some(sizes) = rows(&local, v) {
            let [row, element] = [("row", sizes[0]), ("element", sizes[1])].map(|(name, size)| out.body.dims.add(DimInfo::new(name, size)));
            let arg = in_rows(&mut out, &local, &new, (v, local.body[v].args[0]), &[row, element]);
            let part = in_two(&mut out, &local, v, arg, &[row], &[element]);
            let (arg, over) = in_few(&mut out, &local, v, part);
            node.args = vec![arg];
            node.op = Op::Reduce { kind: ir::fault!("split_reduction.rows.max", Reduce::Max, Reduce::Sum), over };
        } else if let Some(kept) = first_results(&local, v) {
            let dims = local.body.dims_of(local.body[v].args[0]);
            let (kept, over) = dims.split_at(kept);
            let part = in_two(&mut out, &local, v, node.args[0], kept, over);
            let (arg, over) = in_few(&mut out, &local, v, part);
            node.args = vec![arg];
            node.op = Op::Reduce { kind: Reduce::Sum, over };
        } else if let Some(segments) = products::segments(&local, v, options) {
            node = products::split(&mut out, &local, v, node, segments);
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
    without_dead(out)
}

/// Adds a node that runs when and where `like` does.
fn push(out: &mut Local, node: Node, old: &Local, like: Value) -> Value {
    let value = out.push(node, old.chunks[like.index()]);
    if old.host.contains(&like) {
        out.host.insert(value);
    }
    value
}

/// The first step of a sum, over the inner dims of its operand.
fn in_two(out: &mut Local, local: &Local, v: Value, arg: Value, kept: &[Dim], over: &[Dim]) -> Value {
    let node = &local.body[v];
    let over = ir::fault!("split_reduction.part.dims", [&kept[kept.len() - 1..], over].concat(), over.to_vec());
    let op = Op::Reduce { kind: ir::fault!("split_reduction.part.max", Reduce::Max, Reduce::Sum), over };
    let ty = Type::new(node.ty.dtype, kept.to_vec());
    push(out, Node { op, args: vec![arg], ty, origin: node.origin.clone() }, local, v)
}

/// Results that are few enough for a last step, and their dims: sums of rows of them, while they are many.
fn in_few(out: &mut Local, local: &Local, v: Value, mut part: Value) -> (Value, Vec<Dim>) {
    loop {
        let dims = out.body.dims_of(part).to_vec();
        let Some(sizes) = Some(out.body.elements(part)).filter(|n| *n >= MANY).and_then(in_rows_of) else { return (part, dims) };
        let [row, element] = [("row", sizes[0]), ("element", sizes[1])].map(|(name, size)| out.body.dims.add(DimInfo::new(name, size)));
        let (op, node) = (Op::View { from: dims, to: vec![row, element] }, &local.body[v]);
        let ty = Type::new(node.ty.dtype, vec![row, element]);
        let rows = push(out, Node { op, args: vec![part], ty, origin: node.origin.clone() }, local, v);
        part = in_two(out, local, v, rows, &[row], &[element]);
    }
}

/// A value of one dim in rows, for its user: a view of it, or the same pointwise ops of views.
fn in_rows(out: &mut Local, local: &Local, new: &[Value], (user, v): (Value, Value), rows: &[Dim; 2]) -> Value {
    let node = &local.body[v];
    let ty = Type::new(node.ty.dtype, rows.to_vec());
    let alike = |a: &Value| local.body.dims_of(*a) == node.ty.dims;
    let own = node.op.is_pointwise() && node.args.iter().all(alike);
    if !own {
        let op = Op::View { from: node.ty.dims.clone(), to: rows.to_vec() };
        return push(out, Node { op, args: vec![new[v.index()]], ty, origin: node.origin.clone() }, local, user);
    }
    let mut args: Vec<Value> = vec![];
    for (k, a) in node.args.iter().enumerate() {
        let known = node.args[..k].iter().position(|b| b == a);
        args.push(known.map_or_else(|| in_rows(out, local, new, (v, *a), rows), |b| args[b]));
    }
    push(out, Node { args, ty, ..node.clone() }, local, v)
}

/// Whether a value is a sum of all elements of another that is to be cut.
fn is_large(local: &Local, v: Value) -> bool {
    let (body, node) = (&local.body, &local.body[v]);
    let once = matches!(local.chunks[v.index()], Chunk::Reduce | Chunk::Update);
    let all = once && matches!(node.op, Op::Reduce { kind: Reduce::Sum, .. }) && node.ty.dims.is_empty();
    all && body.elements(node.args[0]) >= LARGE
}

/// The number of dims that the first step of a sum keeps, if it takes two.
fn first_results(local: &Local, v: Value) -> Option<usize> {
    let (body, dims) = (&local.body, local.body[v].args.first().map_or(&[][..], |a| local.body.dims_of(*a)));
    let results = |k: usize| body.dims.elements(&dims[..k]);
    let enough = (1..dims.len()).find(|k| results(*k) >= RESULTS);
    let first = enough.or_else(|| (1..dims.len()).rev().find(|k| results(*k) >= FEW))?;
    (is_large(local, v) && results(first) < results(dims.len())).then_some(first)
}

/// The numbers of rows and of elements of each, if a sum over one dim takes two steps.
fn rows(local: &Local, v: Value) -> Option<[u64; 2]> {
    let arg = *local.body[v].args.first().filter(|_| is_large(local, v))?;
    let [dim] = *local.body.dims_of(arg) else { return None };
    in_rows_of(local.body.dims.size(dim))
}

/// The numbers of rows and of elements of each that so many elements are, as nearly alike as may be.
fn in_rows_of(size: u64) -> Option<[u64; 2]> {
    let elements = (FEW..=size.isqrt()).rev().find(|n| size.is_multiple_of(*n))?;
    Some([size / elements, elements])
}
