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
    let mut known = PaddingMap::new();
    let gradients: Vec<Value> = graph.grads.iter().map(|g| g.1).collect();
    // Gradients are masked once per step, because before they may be unfinished sums over microbatches and stages.
    let mut masked: HashMap<Value, Value> = HashMap::new();
    for v in old.values() {
        let mut node = old[v].clone();
        let update = node.origin.phase == Phase::Update;
        node.args = node.args.iter().map(|a| masked.get(a).copied().filter(|_| update).unwrap_or(map[a.index()])).collect();
        let mut b = Builder { body: &mut body, origin: node.origin.clone() };
        match &node.op {
            Op::Reduce { kind, over } => {
                for d in over.iter().filter(|d| padded.contains(d)) {
                    let clean = ir::fault!("pad.sum.unmasked", true, *kind != Reduce::Max && known[&(node.args[0], *d)].zero);
                    if !clean {
                        let outside = ir::fault!("pad.max.zero", 0.0, if *kind == Reduce::Max { f64::NEG_INFINITY } else { 0.0 });
                        node.args[0] = mask(&mut b, &mut known, padded, (node.args[0], *d), outside);
                    }
                }
            }
            Op::ArgMax { over } if padded.contains(over) => {
                node.args[0] = mask(&mut b, &mut known, padded, (node.args[0], *over), f64::NEG_INFINITY);
            }
            Op::Cumsum { over, .. } if padded.contains(over) => node.args[0] = mask(&mut b, &mut known, padded, (node.args[0], *over), 0.0),
            Op::Dot { over, .. } => {
                for d in over.iter().filter(|d| padded.contains(d)) {
                    let [x, y] = [0, 1].map(|k| known[&(node.args[k], *d)]);
                    // A zero factor makes the product zero only if the other factor is finite.
                    if !(ir::fault!("pad.dot.unmasked", true, x.zero || y.zero && x.finite)) {
                        node.args[0] = mask(&mut b, &mut known, padded, (node.args[0], *d), 0.0);
                    }
                    if !y.finite {
                        node.args[1] = mask(&mut b, &mut known, padded, (node.args[1], *d), 0.0);
                    }
                }
            }
            _ => {}
        }
        let w = body.push(node.op, node.args, node.ty, node.origin);
        note(&body, &mut known, padded, w);
        if ir::fault!("pad.gradient.unmasked", false, gradients.contains(&v)) {
            let mut clean = w;
            for d in padded {
                if body[w].ty.has(*d) && !known[&(w, *d)].zero {
                    let origin = Origin { phase: Phase::Update, ..body[w].origin.clone() };
                    clean = mask(&mut Builder { body: &mut body, origin }, &mut known, padded, (clean, *d), 0.0);
                }
            }
            masked.insert(v, clean);
        }
        map.push(w);
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()]);
    graph
}

/// A value with `outside` in the padding of a dim; its padding is recorded in `known`.
fn mask(b: &mut Builder, known: &mut PaddingMap, padded: &[Dim], (x, d): (Value, Dim), outside: f64) -> Value {
    let dtype = b.body[x].ty.dtype;
    let index = b.op(Op::Iota(d), &[]);
    let logical = ir::fault!("pad.mask.size", b.body.dims[d].size, b.body.dims[d].logical);
    let end = b.int(i64::try_from(logical).expect("invariant: dims fit i64"));
    let inside = b.compare(ir::fault!("pad.mask.end", Compare::Le, Compare::Lt), index, end);
    let none = b.typed(Op::Const(Real(outside)), &[], Type::scalar(dtype));
    let dims = b.dims(x);
    let masked = b.select(inside, x, none);
    b.body[masked].ty.dims = dims;
    note(b.body, known, padded, masked);
    masked
}

/// What the padding along a dim is known to hold.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Padding {
    zero: bool,
    /// The padding is infinite or NaN only if elements inside are, so zero times this is zero.
    finite: bool,
}

type PaddingMap = HashMap<(Value, Dim), Padding>;

/// Records what the padding of a value holds along every padded dim, and of the nodes of a mask just inserted before it.
fn note(body: &Body, known: &mut PaddingMap, padded: &[Dim], v: Value) {
    let first = (0..v.0).rev().map(Value).take_while(|w| !known.contains_key(&(*w, padded[0]))).last().unwrap_or(v);
    for w in (first.0..=v.0).map(Value) {
        for d in padded {
            let is = padding(body, known, w, *d);
            known.insert((w, *d), is);
        }
    }
}

fn padding(body: &Body, known: &PaddingMap, v: Value, d: Dim) -> Padding {
    let node = &body[v];
    // A value without the dim is the same inside and in the padding.
    let of = |a: &Value, d: Dim| match &body[*a].op {
        Op::Const(Real(c)) => Padding { zero: *c == 0.0, finite: c.is_finite() },
        _ if body[*a].ty.has(d) => known.get(&(*a, d)).copied().unwrap_or(Padding { zero: false, finite: false }),
        _ => Padding { zero: false, finite: true },
    };
    if !node.ty.has(d) {
        return Padding { zero: false, finite: true };
    }
    let args: Vec<Padding> = node.args.iter().map(|a| of(a, d)).collect();
    let (zeros, finite) = (args.iter().map(|a| a.zero).collect::<Vec<_>>(), args.iter().all(|a| a.finite));
    let along = |k: usize| body[node.args[k]].ty.has(d);
    let is = |zero, finite| Padding { zero, finite };
    match &node.op {
        Op::Param(_) | Op::State(..) | Op::Input(_) => is(true, true),
        // The result may be infinite for zero; an exponential may be infinite for any other value, as padding is not
        // bounded like the elements inside.
        Op::Unary(Unary::Log | Unary::Rsqrt | Unary::Recip) => is(false, false),
        Op::Unary(Unary::Exp) => is(false, zeros[0]),
        Op::Binary(Binary::Div | Binary::Rem) => is(zeros[0] && !along(1), finite && !along(1)),
        Op::Binary(Binary::Pow) => is(false, finite && matches!(body[node.args[1]].op, Op::Const(Real(c)) if c >= 0.0)),
        Op::Binary(Binary::Mul) | Op::Dot { .. } => is((zeros[0] || zeros[1]) && finite, finite),
        // This select is the mask of the padded dim.
        Op::Select if is_mask(body, node.args[0], d) => args[2],
        Op::View { from, to } => match (from.as_slice(), to.as_slice()) {
            (&[a], &[b]) if b == d => of(&node.args[0], a),
            _ => is(!to.contains(&d) && zeros[0], finite),
        },
        Op::Slice { to, .. } => is(*to != Some(d) && zeros[0], finite),
        Op::Pad { to, .. } => is(*to != d && zeros[0], finite),
        Op::Concat { to, .. } => is(*to != d && zeros.iter().all(|z| *z), finite),
        // A running sum from the first element is not zero after the last one.
        Op::Cumsum { over, reverse } if *over == d => is(*reverse && zeros[0], finite),
        // No index points into the padding, so a scatter leaves it zero.
        Op::Scatter { dim } if *dim == d => is(true, true),
        op => is(op.keeps_zero(&zeros), finite),
    }
}

fn is_mask(body: &Body, v: Value, d: Dim) -> bool {
    let node = &body[v];
    node.op == Op::Compare(Compare::Lt)
        && body[node.args[0]].op == Op::Iota(d)
        && matches!(&body[node.args[1]].op, Op::Const(Real(c)) if *c as u64 <= body.dims[d].logical)
        && body[node.args[1]].ty.dtype == DType::I32
}
