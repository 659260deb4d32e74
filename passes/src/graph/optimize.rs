//! The optimizer, as ordinary ops of the logical graph: global-norm clipping, AdamW, SGD, Lion, Muon.

mod muon;

use ir::build::Builder;
use ir::graph::{Graph, Origin, Phase, Type, Update, Value};
use ir::matrix;
use ir::model::{Optimizer, Train};
use ir::op::{Binary, DType, Op, Real, Scalar, Unary};
use muon::{Copies, orthogonal};
use std::collections::HashMap;

/// Appends the global gradient norm (before clipping; every parameter counts once) and the update of every parameter
/// that has a gradient.
///
/// AdamW: decoupled decay on parameters marked for it, `p *= 1 - lr * wd` first; bias-corrected moments in f32
/// (Loshchilov & Hutter 2019, algorithm 2). SGD: `g += wd * p`, `v = momentum * v + g`, `p -= lr * v`. Lion:
/// decay as AdamW's, `p -= lr * sign(beta1 * m + (1 - beta1) * g)`, then `m` is the mean of gradients that
/// keeps `beta2` (Chen et al. 2023, algorithm 2). Muon: hidden matrices as [`ir::model::Muon`] says, decay as
/// AdamW's; what is none is AdamW's. Clipping: `g *= min(1, clip / (norm + 1e-6))`.
pub fn optimize(mut graph: Graph, train: &Train) -> Graph {
    let origin = Origin::new(Phase::Update);
    let mut b = Builder { body: &mut graph.body, origin: origin.clone() };
    // With a loss scale the gradients are scaled, while the norm is that of the unscaled ones.
    let scale = train.loss_scale.map(|_| b.op(Op::Scalar(Scalar::LossScale), &[]));
    let inverse = scale.map(|s| b.unary(Unary::Recip, s));
    let mut squares = vec![];
    for (p, g) in &graph.grads {
        b.origin.scope = graph.params[*p as usize].name.as_str().into();
        b.origin.layer = graph.params[*p as usize].layer;
        let g = ir::fault!("optimize.norm.scaled", *g, inverse.map_or(*g, |i| b.mul(*g, i)));
        let dims = b.dims(g);
        let square = b.mul(g, g);
        squares.push(ir::fault!(
            "optimize.norm.without_experts",
            if dims.len() > 2 { b.constant(0.0) } else { b.sum(square, &dims) },
            b.sum(square, &dims)
        ));
    }
    b.origin = origin.clone();
    if squares.is_empty() {
        return graph;
    }
    let total = b.add(&squares);
    let norm = b.unary(Unary::Sqrt, total);
    graph.grad_norm = Some(norm);
    let clip = train.clip.map(|limit| {
        let safe = b.constant(1e-6);
        let above = b.add(&[norm, safe]);
        let limit = b.constant(limit.0);
        let ratio = ir::fault!("optimize.clip.inverted", b.div(above, limit), b.div(limit, above));
        let one = b.constant(1.0);
        ir::fault!("optimize.clip.always", ratio, b.binary(Binary::Min, ratio, one))
    });
    // One factor clips and undoes the scale, so that unscaled gradients need no memory beside the scaled ones.
    let factor = match (clip, scale) {
        (clip, None) => clip,
        (Some(clip), Some(scale)) => Some(ir::fault!("optimize.factor.scale", clip, b.div(clip, scale))),
        (None, Some(scale)) => {
            let one = b.constant(1.0);
            Some(b.div(one, scale))
        }
    };
    let rate = b.op(Op::Scalar(Scalar::LearningRate), &[]);
    let mut of_params: HashMap<u32, Value> = HashMap::new();
    for v in graph.body.values() {
        if let Op::Param(p) = graph.body[v].op {
            of_params.entry(p).or_insert(v);
        }
    }
    let matrices = matrix::hidden(&graph);
    let mut copies = Copies::default();
    for (p, g) in graph.grads.clone() {
        let info = graph.params[p as usize].clone();
        let mut b = Builder { body: &mut graph.body, origin: origin.clone() };
        b.origin.scope = info.name.as_str().into();
        b.origin.layer = info.layer;
        b.origin.span = info.span;
        let param = *of_params.get(&p).expect("invariant: a parameter with a gradient is used");
        let rate = if ir::fault!("optimize.rate.scale", true, info.lr_scale.0 == 1.0) { rate } else { b.scale(rate, info.lr_scale.0) };
        let grad = factor.map_or(g, |f| b.mul(g, f));
        let decay = if ir::fault!("optimize.decay.everything", true, info.decay) { train.weight_decay.0 } else { 0.0 };
        let state = |b: &mut Builder, slot: u32| b.typed(Op::State(p, slot), &[], Type::new(DType::F32, info.ty.dims.clone()));
        let (new, states) = match train.optimizer {
            Optimizer::AdamW { beta1, beta2, eps } => adamw(&mut b, state, grad, [beta1, beta2, eps], (param, rate, decay)),
            Optimizer::Muon { muon, beta1, beta2, eps } => match &matrices[p as usize] {
                None => adamw(&mut b, state, grad, [beta1, beta2, eps], (param, rate, decay)),
                Some(m) => {
                    let [inputs, outputs] = [&m.inputs, &m.outputs].map(|dims| b.body.dims.elements(dims));
                    let old = state(&mut b, 0);
                    let old = b.scale(old, ir::fault!("optimize.muon.momentum", 1.0 - muon.momentum.0, muon.momentum.0));
                    let v = b.add(&[old, grad]);
                    let n = if ir::fault!("optimize.muon.nesterov", !muon.nesterov, muon.nesterov) {
                        let ahead = b.scale(v, muon.momentum.0);
                        b.add(&[grad, ahead])
                    } else {
                        v
                    };
                    let direction = orthogonal(&mut b, n, m, &muon, &mut copies);
                    let size = ir::fault!("optimize.muon.size.transposed", muon.size(outputs, inputs), muon.size(inputs, outputs));
                    let far = b.scale(rate, size);
                    let step = b.mul(direction, far);
                    let kept = decayed(&mut b, param, ir::fault!("optimize.muon.decay.rate", far, rate), decay);
                    (b.sub(kept, step), vec![v])
                }
            },
            Optimizer::Sgd { momentum } => {
                let grad = if decay == 0.0 {
                    grad
                } else {
                    let pull = b.scale(param, decay);
                    ir::fault!("optimize.sgd.decay", b.sub(grad, pull), b.add(&[grad, pull]))
                };
                let (direction, states) = if momentum.0 == 0.0 {
                    (grad, vec![])
                } else {
                    let v = state(&mut b, 0);
                    let old = b.scale(v, ir::fault!("optimize.sgd.momentum", 1.0 - momentum.0, momentum.0));
                    let v = b.add(&[old, grad]);
                    (v, vec![v])
                };
                let step = b.mul(direction, rate);
                (b.sub(param, step), states)
            }
            Optimizer::Lion { beta1, beta2 } => {
                let m = state(&mut b, 0);
                let mean = average(&mut b, m, grad, ir::fault!("optimize.lion.beta", beta2.0, beta1.0));
                let direction = b.unary(Unary::Sign, mean);
                let step = b.mul(direction, rate);
                let kept = decayed(&mut b, param, rate, decay);
                let m = average(&mut b, m, grad, beta2.0);
                (b.sub(kept, step), vec![m])
            }
        };
        graph.updates.push(Update { param: p, grad: Some(g), new, states });
    }
    graph
}

/// The new parameter and states of AdamW, from a parameter with its rate and decay.
fn adamw(
    b: &mut Builder,
    state: impl Fn(&mut Builder, u32) -> Value,
    grad: Value,
    [beta1, beta2, eps]: [Real; 3],
    (param, rate, decay): (Value, Value, f64),
) -> (Value, Vec<Value>) {
    let (m, v) = (state(b, 0), state(b, 1));
    let m = average(b, m, grad, ir::fault!("optimize.adam.beta", beta2.0, beta1.0));
    // The product is `((1 - beta2) g) g`. Plain squares would be shared with the norm if nothing clips, and would
    // then be kept until the update.
    let (kept, part) = (b.scale(v, beta2.0), b.scale(grad, 1.0 - beta2.0));
    let added = b.mul(part, ir::fault!("optimize.adam.square", part, grad));
    let v = b.add(&[kept, added]);
    let c1 = b.op(Op::Scalar(Scalar::BiasCorrection(beta1)), &[]);
    let c2 = b.op(Op::Scalar(Scalar::BiasCorrection(ir::fault!("optimize.adam.correction", beta1, beta2))), &[]);
    let mean = b.div(m, c1);
    let variance = b.div(v, c2);
    let root = b.unary(Unary::Sqrt, variance);
    let eps = b.constant(eps.0);
    let below = ir::fault!("optimize.adam.eps", root, b.add(&[root, eps]));
    let direction = b.div(mean, below);
    let step = b.mul(direction, rate);
    let kept = decayed(b, param, rate, decay);
    (b.sub(kept, step), ir::fault!("optimize.adam.states", vec![v, m], vec![m, v]))
}

/// `beta * old + (1 - beta) * new`.
fn average(b: &mut Builder, old: Value, new: Value, beta: f64) -> Value {
    let kept = b.scale(old, beta);
    let added = b.scale(new, ir::fault!("optimize.average.beta", beta, 1.0 - beta));
    b.add(&[kept, added])
}

/// The parameter after decoupled decay: `(1 - rate * decay) * p`.
fn decayed(b: &mut Builder, param: Value, rate: Value, decay: f64) -> Value {
    if decay == 0.0 {
        return param;
    }
    let lost = ir::fault!("optimize.adam.decay_rate", b.constant(decay), b.scale(rate, decay));
    let one = b.constant(1.0);
    let keep = b.sub(one, lost);
    b.mul(param, keep)
}
