//! Masks for padded dims: whatever the padding holds, no result that the user sees depends on it.
//!
//! Parameters, optimizer states and inputs are zero in the padding. The analysis follows where zero stays zero; a sum, maximum
//! or contraction over a padded dim whose operand is not known to be zero there gets a mask, and so does the gradient of a
//! parameter, so that its padding stays zero for ever.

use ir::build::Builder;
use ir::dim::Dim;
use ir::graph::{Body, Graph, Origin, Phase, Type, Value};
use ir::op::{Binary, Compare, DType, Op, Real, Reduce, Unary};
use std::collections::HashMap;

/// Inserts the masks for the dims in `padded` (with all their copies), whose `size` exceeds their `logical` size.
pub fn mask_padding(mut graph: Graph, padded: &[Dim]) -> Graph {
    if padded.is_empty() {
        return graph;
    }
    let old = std::mem::take(&mut graph.body);
    let mut body = Body { dims: old.dims.clone(), nodes: vec![] };
    let mut map: Vec<Value> = vec![];
    let mut zero: HashMap<(Value, Dim), bool> = HashMap::new();
    let gradients: Vec<Value> = graph.grads.iter().map(|g| g.1).collect();
    // Gradients are masked once per step: before that they may still be sums over microbatches and pipeline stages.
    let mut masked: HashMap<Value, Value> = HashMap::new();
    for v in old.values() {
        let mut node = old[v].clone();
        let update = node.origin.phase == Phase::Update;
        node.args = node.args.iter().map(|a| masked.get(a).copied().filter(|_| update).unwrap_or(map[a.index()])).collect();
        let mut b = Builder { body: &mut body, origin: node.origin.clone() };
        match &node.op {
            Op::Reduce { kind, over } => {
                for d in over.iter().filter(|d| padded.contains(d)) {
                    let clean = *kind != Reduce::Max && zero[&(node.args[0], *d)];
                    if !clean {
                        node.args[0] = mask(&mut b, node.args[0], *d, if *kind == Reduce::Max { f64::NEG_INFINITY } else { 0.0 });
                    }
                }
            }
            Op::ArgMax { over } if padded.contains(over) => node.args[0] = mask(&mut b, node.args[0], *over, f64::NEG_INFINITY),
            Op::Cumsum { over, .. } if padded.contains(over) => node.args[0] = mask(&mut b, node.args[0], *over, 0.0),
            Op::Dot { over, .. } => {
                for d in over.iter().filter(|d| padded.contains(d)) {
                    if !zero[&(node.args[0], *d)] && !zero[&(node.args[1], *d)] {
                        node.args[0] = mask(&mut b, node.args[0], *d, 0.0);
                    }
                }
            }
            _ => {}
        }
        let w = body.push(node.op, node.args, node.ty, node.origin);
        note(&body, &mut zero, padded, w);
        if gradients.contains(&v) {
            let mut clean = w;
            for d in padded {
                if body[w].ty.has(*d) && !zero[&(w, *d)] {
                    let origin = Origin { phase: Phase::Update, ..body[w].origin.clone() };
                    clean = mask(&mut Builder { body: &mut body, origin }, clean, *d, 0.0);
                    note(&body, &mut zero, padded, clean);
                }
            }
            masked.insert(v, clean);
        }
        // Masks put in front of the node are noted late; nothing asks for them before.
        map.push(w);
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()]);
    graph
}

fn mask(b: &mut Builder, x: Value, d: Dim, outside: f64) -> Value {
    let dtype = b.body[x].ty.dtype;
    let index = b.op(Op::Iota(d), &[]);
    let logical = b.body.dims[d].logical;
    let end = b.int(i64::try_from(logical).expect("invariant: dims fit i64"));
    let inside = b.compare(Compare::Lt, index, end);
    let none = b.typed(Op::Const(Real(outside)), &[], Type::scalar(dtype));
    let dims = b.dims(x);
    let masked = b.select(inside, x, none);
    b.body[masked].ty.dims = dims;
    masked
}

/// Records along which padded dims a value is zero in the padding.
fn note(body: &Body, zero: &mut HashMap<(Value, Dim), bool>, padded: &[Dim], v: Value) {
    // Nodes of a mask just inserted before `v` have no entry yet.
    for w in (0..v.0).rev().map(Value) {
        if zero.contains_key(&(w, padded[0])) {
            break;
        }
        for d in padded {
            let is = is_zero(body, zero, w, *d);
            zero.insert((w, *d), is);
        }
    }
    for d in padded {
        let is = is_zero(body, zero, v, *d);
        zero.insert((v, *d), is);
    }
}

fn is_zero(body: &Body, zero: &HashMap<(Value, Dim), bool>, v: Value, d: Dim) -> bool {
    let node = &body[v];
    let of = |a: &Value, d: Dim| {
        matches!(&body[*a].op, Op::Const(Real(c)) if *c == 0.0) || body[*a].ty.has(d) && zero.get(&(*a, d)).copied().unwrap_or(false)
    };
    if !node.ty.has(d) {
        return false;
    }
    match &node.op {
        Op::Param(_) | Op::State(..) | Op::Input(_) => true,
        Op::Const(c) => c.0 == 0.0,
        Op::Unary(u) => match u {
            Unary::Neg | Unary::Sqrt | Unary::Tanh | Unary::Sin | Unary::Erf | Unary::Abs | Unary::Floor | Unary::Sign => of(&node.args[0], d),
            Unary::Exp | Unary::Log | Unary::Rsqrt | Unary::Recip | Unary::Cos | Unary::Not => false,
        },
        Op::Binary(b) => match b {
            Binary::Mul | Binary::And => node.args.iter().any(|a| of(a, d)),
            Binary::Div => of(&node.args[0], d),
            Binary::Sub | Binary::Max | Binary::Min | Binary::Or => node.args.iter().all(|a| of(a, d)),
            Binary::Rem | Binary::Pow => false,
        },
        Op::Add | Op::Cast | Op::StopGradient | Op::Cut | Op::Expand | Op::Reshard { .. } => node.args.iter().all(|a| of(a, d)),
        // The mask of a padded dim itself.
        Op::Select if is_mask(body, node.args[0], d) => of(&node.args[2], d),
        Op::Select => of(&node.args[1], d) && of(&node.args[2], d),
        Op::View { from, to } => match (from.as_slice(), to.as_slice()) {
            (&[a], &[b]) if b == d => of(&node.args[0], a),
            _ => !to.contains(&d) && of(&node.args[0], d),
        },
        Op::Slice { to, .. } => *to != Some(d) && of(&node.args[0], d),
        Op::Pad { to, .. } => *to != d && of(&node.args[0], d),
        Op::Concat { to, .. } => *to != d && node.args.iter().all(|a| of(a, d)),
        Op::Dot { .. } => node.args.iter().any(|a| of(a, d)),
        Op::Reduce { .. } | Op::Cumsum { .. } | Op::Gather { .. } | Op::Dispatch(_) | Op::Combine(_) => of(&node.args[0], d),
        // No index points into the padding.
        Op::Scatter { dim } => *dim == d || of(&node.args[0], d),
        Op::Compare(_)
        | Op::ArgMax { .. }
        | Op::Attention(_)
        | Op::AttentionLse(_)
        | Op::AttentionGrad(..)
        | Op::Iota(_)
        | Op::Uniform { .. }
        | Op::Scalar(_)
        | Op::Table(_)
        | Op::Shard { .. }
        | Op::GroupedDot { .. }
        | Op::Collective { .. }
        | Op::Recv { .. }
        | Op::Send { .. }
        | Op::Limit { .. } => false,
    }
}

fn is_mask(body: &Body, v: Value, d: Dim) -> bool {
    let node = &body[v];
    node.op == Op::Compare(Compare::Lt)
        && body[node.args[0]].op == Op::Iota(d)
        && matches!(&body[node.args[1]].op, Op::Const(Real(c)) if *c as u64 <= body.dims[d].logical)
        && body[node.args[1]].ty.dtype == DType::I32
}
