//! Reverse-mode differentiation of the logical graph (Griewank & Walther 2008, section 3.2).
//!
//! The forward graph stays as it is; the backward pass is appended. A backward op carries the layer and scope of the forward op
//! that it differentiates. Sums of cotangents are one n-ary `add` per value, so that partial terms can later be
//! reduced together. Cotangents have the dtype of their value; gradients that of their parameter, f32.

use ir::build::Builder;
use ir::dim::Dim;
use ir::graph::{Body, Graph, Origin, Phase, Report, Type, Value};
use ir::model::Train;
use ir::op::{Attention, AttentionGrad, Binary, Compare, DType, Op, Reduce, Scalar, Unary};

/// A loss that has no gradient in some op it depends on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum DifferentiateError {
    #[error("`{op}` has no gradient")]
    NoGradient {
        op: String,
        /// Where the operation is from, for labels of a diagnostic.
        origin: Box<Origin>,
    },
    #[error("the model has no loss")]
    NoLoss,
    #[error("there is nothing to train: the loss depends on no parameter that is not frozen")]
    NothingToTrain,
}

/// Sums the loss terms into `graph.loss` and appends the gradient of every trainable parameter it depends on, times the loss scale if
/// there is one.
///
/// # Errors
/// There is no loss, it depends on no trainable parameter, or a parameter reaches it through an op without a gradient (`%`).
pub fn differentiate(graph: Graph, train: &Train) -> Result<Graph, DifferentiateError> {
    let mut graph = sum_losses(graph);
    let Some(loss) = graph.loss else { return Err(DifferentiateError::NoLoss) };

    let trains: Vec<bool> = depends(&graph.body, |op| matches!(op, Op::Param(p) if graph.params[*p as usize].trains()));
    let mut cotangents: Vec<Vec<Value>> = vec![vec![]; graph.body.nodes.len()];
    // `by_logarithm` holds, per attention, the cotangents of its log-sum-exp.
    let mut by_logarithm: Vec<Vec<Value>> = vec![vec![]; graph.body.nodes.len()];
    {
        let mut b = Builder { body: &mut graph.body, origin: Origin::new(Phase::Backward) };
        let seed = if ir::fault!("differentiate.seed.scale", false, train.loss_scale.is_some()) {
            b.op(Op::Scalar(Scalar::LossScale), &[])
        } else {
            b.constant(1.0)
        };
        cotangents[loss.index()].push(seed);
    }
    for v in (0..=loss.0).rev().map(Value) {
        let terms = std::mem::take(&mut cotangents[v.index()]);
        if terms.is_empty() || !trains[v.index()] {
            match by_logarithm[v.index()].is_empty() {
                true => continue,
                false => return Err(DifferentiateError::NoGradient { op: "attention_lse".into(), origin: Box::new(graph.body[v].origin.clone()) }),
            }
        }
        let node = graph.body[v].clone();
        let origin = Origin { phase: Phase::Backward, ..node.origin.clone() };
        // The gradients of an attention's two results are computed by one kernel.
        if let Op::AttentionLse(a) = &node.op {
            let whole = attention_of(&graph.body, v, a);
            let Some(whole) = whole else { return Err(DifferentiateError::NoGradient { op: "attention_lse".into(), origin: Box::new(origin) }) };
            by_logarithm[whole.index()].extend(terms);
            continue;
        }
        let mut b = Builder { body: &mut graph.body, origin };
        // Gradients are f32, so each term of a parameter's 16-bit copy is cast before the sum.
        if b.body.copied_param(v).is_some() {
            let x = node.args[0];
            let dtype = b.body[x].ty.dtype;
            let terms: Vec<Value> =
                ir::fault!("differentiate.copies.half", vec![b.add(&terms)], terms).into_iter().map(|t| b.cast(t, dtype)).collect();
            cotangents[x.index()].extend(terms);
            continue;
        }
        let dz = ir::fault!("differentiate.terms.first", b.add(&vec![terms[0]; terms.len()]), b.add(&terms));
        if let Op::Param(p) = node.op {
            graph.grads.push((p, dz));
            continue;
        }
        let mut give = |b: &mut Builder, slot: usize, dx: Value| {
            let x = node.args[slot];
            let dims = b.dims(x);
            let dx = ir::fault!("differentiate.give.unsummed", dx, b.sum_to(dx, &dims));
            cotangents[x.index()].push(dx);
        };
        let wants = |slot: usize| trains[node.args[slot].index()];
        let by_logarithm = std::mem::take(&mut by_logarithm[v.index()]);
        adjoint(&mut b, v, (&node.op, &by_logarithm), &node.args, &node.ty, dz, &wants, &mut give)?;
    }
    if graph.grads.is_empty() {
        return Err(DifferentiateError::NothingToTrain);
    }
    graph.grads.sort_by_key(|g| g.0);
    Ok(graph)
}

/// Adds the loss terms up, if there are any, as `graph.loss`, and those of equal names for their report. Terms without a name are
/// reported with the total alone. Sums are of the update phase: nothing needs them before the last microbatch, and their terms
/// may come from several pipeline stages.
pub fn sum_losses(mut graph: Graph) -> Graph {
    let terms = std::mem::take(&mut graph.losses);
    let mut sum = |values: Vec<Value>| {
        let mut origin = Origin::new(Phase::Update);
        origin.span = values.last().and_then(|v| graph.body[*v].origin.span);
        match values.as_slice() {
            [] => None,
            [one] => Some(*one),
            many => Some(Builder { body: &mut graph.body, origin }.add(many)),
        }
    };
    graph.loss = sum(terms.iter().take(ir::fault!("differentiate.losses.first", 1, terms.len())).map(|t| t.value).collect());
    let mut names: Vec<&str> = vec![];
    for t in terms.iter().filter(|t| t.name != "loss") {
        if !names.contains(&t.name.as_str()) {
            names.push(&t.name);
        }
    }
    for name in names {
        let value = sum(terms.iter().filter(|t| t.name == name).map(|t| t.value).collect()).expect("invariant: a name has a term");
        graph.losses.push(Report { name: name.into(), value });
    }
    graph
}

/// For each value, whether it depends on a node that `on` accepts through differentiable edges.
fn depends(body: &Body, on: impl Fn(&Op) -> bool) -> Vec<bool> {
    let mut out = vec![false; body.nodes.len()];
    for v in body.values() {
        let node = &body[v];
        out[v.index()] = on(&node.op)
            || node.ty.dtype.is_float()
                && ir::fault!("differentiate.depends.stopped", true, node.op != Op::StopGradient)
                && node.args.iter().any(|a| out[a.index()]);
    }
    out
}

/// Appends the cotangents of the operands of one op, given that of its result.
#[expect(clippy::too_many_arguments, reason = "one call site; a struct would only rename them")]
fn adjoint(
    b: &mut Builder,
    v: Value,
    (op, by_logarithm): (&Op, &[Value]),
    args: &[Value],
    ty: &Type,
    dz: Value,
    wants: &dyn Fn(usize) -> bool,
    give: &mut dyn FnMut(&mut Builder, usize, Value),
) -> Result<(), DifferentiateError> {
    let x = |k: usize| args[k];
    match op {
        Op::Add => {
            for k in (0..args.len()).filter(|k| wants(*k)) {
                give(b, k, dz);
            }
        }
        Op::Unary(u) => {
            let d = match u {
                Unary::Neg => Some(ir::fault!("differentiate.neg.sign", dz, b.neg(dz))),
                Unary::Exp => Some(b.mul(dz, v)),
                Unary::Log => Some(ir::fault!("differentiate.log.slope", b.mul(dz, x(0)), b.div(dz, x(0)))),
                Unary::Sqrt => {
                    let half = b.scale(dz, 0.5);
                    Some(b.div(half, v))
                }
                Unary::Rsqrt => {
                    let squared = b.mul(v, v);
                    let cubed = b.mul(squared, v);
                    let slope = b.scale(cubed, ir::fault!("differentiate.rsqrt.sign", 0.5, -0.5));
                    Some(b.mul(dz, slope))
                }
                Unary::Recip => {
                    let squared = b.mul(v, v);
                    let slope = b.neg(squared);
                    Some(b.mul(dz, slope))
                }
                Unary::Tanh => {
                    let squared = b.mul(v, v);
                    let one = b.constant_like(1.0, v);
                    let slope = ir::fault!("differentiate.tanh.order", b.sub(squared, one), b.sub(one, squared));
                    Some(b.mul(dz, slope))
                }
                Unary::Sin => {
                    let slope = b.unary(ir::fault!("differentiate.sin.same", Unary::Sin, Unary::Cos), x(0));
                    Some(b.mul(dz, slope))
                }
                Unary::Cos => {
                    let sin = b.unary(Unary::Sin, x(0));
                    let slope = ir::fault!("differentiate.cos.sign", sin, b.neg(sin));
                    Some(b.mul(dz, slope))
                }
                Unary::Erf => {
                    let squared = b.mul(x(0), x(0));
                    let power = b.neg(squared);
                    let bell = b.unary(Unary::Exp, power);
                    let slope = b.scale(bell, ir::fault!("differentiate.erf.constant", 1.0, 2.0) / std::f64::consts::PI.sqrt());
                    Some(b.mul(dz, slope))
                }
                Unary::Abs => {
                    let sign = b.unary(Unary::Sign, x(0));
                    Some(b.mul(dz, sign))
                }
                // These are step functions, whose slope is 0 wherever it exists.
                Unary::Floor | Unary::Sign | Unary::Not => None,
            };
            if let Some(d) = d {
                give(b, 0, d);
            }
        }
        Op::Binary(o) => match o {
            Binary::Sub => {
                if wants(0) {
                    give(b, 0, dz);
                }
                if wants(1) {
                    let d = ir::fault!("differentiate.sub.sign", dz, b.neg(dz));
                    give(b, 1, d);
                }
            }
            Binary::Mul => {
                for k in (0..2).filter(|k| wants(*k)) {
                    // If this factor is broadcast, the product and its sum are one contraction.
                    let over: Vec<Dim> = b.dims(dz).into_iter().filter(|d| !b.body[x(k)].ty.has(*d)).collect();
                    let contracts = !over.is_empty() && over.iter().all(|d| b.body[x(1 - k)].ty.has(*d));
                    let d = if contracts {
                        contract_like(b, dz, x(1 - k), over, x(k))
                    } else {
                        b.mul(dz, x(ir::fault!("differentiate.mul.operand", k, 1 - k)))
                    };
                    give(b, k, d);
                }
            }
            Binary::Div => {
                if wants(0) {
                    let d = b.div(dz, x(1));
                    give(b, 0, d);
                }
                if wants(1) {
                    // For a reciprocal, this saves a second division by the same value.
                    let is_reciprocal = matches!(b.body[x(0)].op, Op::Const(c) if c.0 == 1.0);
                    let slope = if is_reciprocal { b.mul(v, v) } else { b.div(v, ir::fault!("differentiate.div.operand", x(0), x(1))) };
                    let scaled = b.mul(dz, slope);
                    let d = b.neg(scaled);
                    give(b, 1, d);
                }
            }
            Binary::Pow => {
                if wants(0) {
                    let one = b.constant_like(1.0, x(1));
                    let less = b.sub(x(1), one);
                    let power = b.binary(Binary::Pow, x(0), less);
                    let slope = b.mul(x(1), power);
                    let d = b.mul(dz, slope);
                    give(b, 0, d);
                }
                if wants(1) {
                    let log = b.unary(Unary::Log, x(0));
                    let slope = b.mul(v, log);
                    let d = b.mul(dz, slope);
                    give(b, 1, d);
                }
            }
            // On a tie the second operand gets the gradient, since it is the result.
            Binary::Max | Binary::Min => {
                let first = b.compare(
                    if ir::fault!("differentiate.max.compare", *o == Binary::Min, *o == Binary::Max) { Compare::Gt } else { Compare::Lt },
                    x(0),
                    x(1),
                );
                let zero = b.constant_like(0.0, dz);
                if wants(0) {
                    let d = b.select(first, dz, zero);
                    give(b, 0, d);
                }
                if wants(1) {
                    let second = b.unary(Unary::Not, first);
                    let d = b.select(second, dz, zero);
                    give(b, 1, d);
                }
            }
            Binary::Rem => return Err(no_gradient(b, op)),
            Binary::And | Binary::Or | Binary::Mix => {}
        },
        Op::Select => {
            let zero = b.constant_like(0.0, dz);
            if wants(1) {
                let d = b.select(x(0), dz, zero);
                give(b, 1, d);
            }
            if wants(2) {
                let not = ir::fault!("differentiate.select.condition", x(0), b.unary(Unary::Not, x(0)));
                let d = b.select(not, dz, zero);
                give(b, 2, d);
            }
        }
        Op::Cast => {
            let to = b.body[x(0)].ty.dtype;
            let d = b.cast(dz, to);
            give(b, 0, d);
        }
        Op::Cut => {
            let d = b.op(Op::Cut, &[dz]);
            give(b, 0, d);
        }
        Op::Expand => give(b, 0, dz),
        Op::View { from, to } => {
            let d = b.op(Op::View { from: to.clone(), to: from.clone() }, &[dz]);
            give(b, 0, d);
        }
        Op::Slice { from, to, at } => {
            // The result has the dim order of the sliced value, so that a sum of such parts needs no transposition.
            let whole = b.body[x(0)].ty.clone();
            let d =
                b.body.push(Op::Pad { from: *to, to: *from, at: ir::fault!("differentiate.slice.offset", 0, *at) }, [dz], whole, b.origin.clone());
            give(b, 0, d);
        }
        Op::Pad { from, to, at } => {
            let d = b.op(Op::Slice { from: *to, to: *from, at: *at }, &[dz]);
            give(b, 0, d);
        }
        Op::Concat { from, to } => {
            let mut at = 0;
            for (k, f) in from.iter().enumerate() {
                if wants(k) {
                    let d = b.op(Op::Slice { from: *to, to: Some(*f), at }, &[dz]);
                    give(b, k, d);
                }
                at += ir::fault!("differentiate.concat.offset", 0, b.body.dims.size(*f));
            }
        }
        Op::Dot { .. } => {
            for k in (0..2).filter(|k| wants(*k)) {
                let over: Vec<Dim> = b.dims(dz).into_iter().filter(|d| !b.body[x(k)].ty.has(*d) && b.body[x(1 - k)].ty.has(*d)).collect();
                let d = contract_like(b, dz, x(1 - k), over, x(k));
                give(b, k, d);
            }
        }
        Op::Reduce { kind: Reduce::Sum, .. } => {
            let dims = b.dims(x(0));
            let d = b.expand(dz, &dims);
            give(b, 0, d);
        }
        // Every element that equals the maximum gets the gradient. Softmax stops this gradient, which would cancel.
        Op::Reduce { kind: Reduce::Max, .. } => {
            let top = b.compare(Compare::Eq, x(0), v);
            let zero = b.constant_like(0.0, dz);
            let d = b.select(top, dz, zero);
            give(b, 0, d);
        }
        Op::Cumsum { over, reverse } => {
            let d = b.op(Op::Cumsum { over: *over, reverse: ir::fault!("differentiate.cumsum.direction", *reverse, !reverse) }, &[dz]);
            give(b, 0, d);
        }
        Op::Gather { dim } => {
            let table = b.dims(x(0));
            let index = b.dims(x(1));
            let d = if index.iter().all(|d| table.contains(d)) {
                // This looks up one element per row, so a comparison, which fuses, takes the place of a scatter.
                let iota = b.op(Op::Iota(*dim), &[]);
                let wide = b.typed(Op::Expand, &[x(1)], Type::new(DType::I32, [index, vec![*dim]].concat()));
                let hit = b.compare(Compare::Eq, wide, iota);
                let zero = b.constant_like(0.0, dz);
                b.select(hit, dz, zero)
            } else {
                let dtype = ty.dtype;
                b.typed(Op::Scatter { dim: *dim }, &[dz, x(1)], Type::new(dtype, table))
            };
            let d = ir::fault!("differentiate.gather.lost", b.scale(d, 0.0), d);
            give(b, 0, d);
        }
        Op::Scatter { dim } => {
            let d = b.op(Op::Gather { dim: *dim }, &[dz, x(1)]);
            give(b, 0, d);
        }
        Op::Dispatch(r) => {
            let d = b.op(Op::Combine(*r), &[dz, x(1)]);
            give(b, 0, d);
        }
        Op::Combine(r) => {
            let d = b.op(Op::Dispatch(*r), &[dz, x(1)]);
            give(b, 0, d);
        }
        Op::Attention(a) => {
            let further = a.further(args).to_vec();
            let first = args.len() - further.len();
            let bias = a.scoring.bias().map(|k| first + k).filter(|k| wants(*k));
            if (first..args.len()).any(|k| wants(k) && Some(k) != bias) {
                return Err(no_gradient(b, op));
            }
            let scores = b.op(Op::AttentionLse(a.without_values()), &[&args[..2], &further].concat());
            b.body[scores].origin.phase = Phase::Forward;
            let (gradient, result) = (b.cast(dz, DType::F32), b.cast(v, DType::F32));
            let product = ir::fault!("differentiate.attention.delta", gradient, b.mul(gradient, result));
            let delta = b.sum(product, &[a.values]);
            // The derivative of the log-sum-exp by a score is the probability of that score.
            let delta = if by_logarithm.is_empty() {
                delta
            } else {
                let sum = b.add(by_logarithm);
                let minus = b.op(Op::Unary(Unary::Neg), &[sum]);
                ir::fault!("differentiate.attention.logarithm", b.add(&[delta, sum]), b.add(&[delta, minus]))
            };
            for (k, which) in ir::fault!(
                "differentiate.attention.swapped",
                [AttentionGrad::Q, AttentionGrad::V, AttentionGrad::K],
                [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V]
            )
            .into_iter()
            .enumerate()
            .chain(bias.map(|k| (k, AttentionGrad::Bias)))
            {
                if wants(k) {
                    let d = b.op(Op::AttentionGrad(a.clone(), which), &[&args[..3], &[scores, delta, dz], &further].concat());
                    give(b, k, d);
                }
            }
        }
        Op::Reduce { kind: Reduce::Any, .. } | Op::Compare(_) | Op::ArgMax { .. } | Op::StopGradient => {}
        op if op.is_source() => {}
        op => return Err(no_gradient(b, op)),
    }
    Ok(())
}

/// The attention before `v` whose logarithm of sums that is.
fn attention_of(body: &Body, v: Value, log: &Attention) -> Option<Value> {
    let args = &body[v].args;
    (0..v.0).rev().map(Value).find(|w| match &body[*w].op {
        Op::Attention(a) => a.without_values() == *log && body[*w].args[..2] == args[..2] && a.further(&body[*w].args) == log.further(args),
        _ => false,
    })
}

/// A contraction whose result has the storage order of `like`, as far as it has its dims: a gradient lies as its parameter does.
fn contract_like(b: &mut Builder, x: Value, y: Value, over: Vec<Dim>, like: Value) -> Value {
    let has: Vec<Dim> = b.dims(x).into_iter().chain(b.dims(y)).filter(|d| !over.contains(d)).collect();
    let mut dims: Vec<Dim> = b.dims(like).into_iter().filter(|d| has.contains(d)).collect();
    for d in has {
        if !dims.contains(&d) {
            dims.insert(0, d);
        }
    }
    let d = b.op(Op::dot(over), &[x, y]);
    b.body[d].ty.dims = dims;
    d
}

fn no_gradient(b: &Builder, op: &Op) -> DifferentiateError {
    DifferentiateError::NoGradient { op: op.name().into(), origin: Box::new(b.origin.clone()) }
}
