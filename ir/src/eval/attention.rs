//! Attention, its log-sum-exp and its gradients, row of scores by row.

use super::contract::contract;
use super::{Walk, reorder, strides};
use crate::dim::Dim;
use crate::graph::{Body, Value};
use crate::op::{Attention, AttentionGrad};

/// An intermediate tensor.
struct Tensor {
    data: Vec<f64>,
    dims: Vec<Dim>,
}

/// Scores as the softmax takes them, `keys` innermost; if `slopes`, their derivatives by the scaled products; and the
/// weights of probabilities. Derivatives and weights are empty where all are 1.
fn scores(body: &Body, v: Value, a: &Attention, args: &[&[f64]], slopes: bool) -> (Tensor, [Vec<f64>; 2]) {
    let (dims, q, k) = (&body.dims, body[v].args[0], body[v].args[1]);
    let mut over: Vec<Dim> = body.dims_of(q).iter().copied().filter(|d| *d != a.d).collect();
    over.push(a.keys);
    let mut data = contract(dims, &over, &[a.d], (args[0], body.dims_of(q)), (args[1], body.dims_of(k)));
    data.iter_mut().for_each(|x| *x *= a.scale.0);
    let (program, slope) = if slopes { a.scoring.with_slope() } else { (a.scoring.clone(), None) };
    let (mut out, mut weights) = (vec![], vec![]);
    if !program.is_plain() {
        let further = a.further(args);
        let steps: Vec<Vec<usize>> = a.further(&body[v].args).iter().map(|w| strides(dims, body.dims_of(*w), &over)).collect();
        let mut walk = Walk::new(dims, &over);
        let mut numbers = vec![0.0; further.len()];
        for x in &mut data {
            numbers.iter_mut().zip(further.iter().zip(&steps)).for_each(|(n, (data, steps))| *n = data[walk.offset(steps)]);
            if let Some(slope) = slope {
                out.push(program.run(*x, &numbers)[slope as usize]);
            }
            if program.weight.is_some() {
                weights.push(program.weight(&numbers));
            }
            *x = program.apply(*x, &numbers);
            walk.step();
        }
    }
    (Tensor { data, dims: over }, [out, weights])
}

/// Softmax over `keys`, from its own sums or from given log-sum-exps. A row without any key is all zero.
fn probabilities(body: &Body, a: &Attention, scores: Tensor, lse: Option<(&[f64], &[Dim])>) -> Tensor {
    let mut s = scores;
    let n = body.dims.size(a.keys) as usize;
    let lse = lse.map(|(data, dims)| reorder(&body.dims, data, dims, &s.dims[..s.dims.len() - 1]));
    for (r, row) in s.data.chunks_mut(n).enumerate() {
        if greatest(row) == f64::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let log = lse.as_ref().map_or_else(|| log_sum(row), |l| l[r]);
        row.iter_mut().for_each(|x| *x = (*x - log).exp());
    }
    s
}

fn greatest(row: &[f64]) -> f64 {
    row.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// The logarithm of a row's sum of exponentials; minus infinity without any key.
fn log_sum(row: &[f64]) -> f64 {
    let top = greatest(row);
    if top == f64::NEG_INFINITY { top } else { row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top }
}

pub(super) fn result(body: &Body, v: Value, a: &Attention, args: &[&[f64]]) -> Vec<f64> {
    let node = &body[v];
    let (s, [_, weights]) = scores(body, v, a, args, false);
    let mut p = probabilities(body, a, s, None);
    p.data.iter_mut().zip(&weights).for_each(|(p, w)| *p *= w);
    contract(&body.dims, &node.ty.dims, &[a.keys], (&p.data, &p.dims), (args[2], body.dims_of(node.args[2])))
}

pub(super) fn log_sums(body: &Body, v: Value, a: &Attention, args: &[&[f64]]) -> Vec<f64> {
    let (s, _) = scores(body, v, a, args, false);
    let rows: Vec<f64> = s.data.chunks(body.dims.size(a.keys) as usize).map(log_sum).collect();
    reorder(&body.dims, &rows, &s.dims[..s.dims.len() - 1], &body[v].ty.dims)
}

/// Gradients of attention (Dao et al. 2022, appendix B.2): `dS = P * (W * dP - delta)`, times the slope of the
/// program of scores. W are the weights of probabilities.
pub(super) fn gradient(body: &Body, v: Value, a: &Attention, which: AttentionGrad, args: &[&[f64]]) -> Vec<f64> {
    let (node, dims) = (&body[v], &body.dims);
    let of = |k: usize| (args[k], body.dims_of(node.args[k]));
    let of_products = matches!(which, AttentionGrad::Q | AttentionGrad::K);
    let (s, [slopes, weights]) = scores(body, v, a, args, of_products);
    let mut p = probabilities(body, a, s, Some(of(3)));
    // Sums over dims that the result lacks (the queries of a group) are part of the contraction.
    let rest = |has: &[Dim], out: &[Dim]| has.iter().copied().filter(|d| !out.contains(d)).collect::<Vec<_>>();
    if which == AttentionGrad::V {
        let over = rest(&p.dims, &node.ty.dims);
        p.data.iter_mut().zip(&weights).for_each(|(p, w)| *p *= w);
        return contract(dims, &node.ty.dims, &over, (&p.data, &p.dims), of(5));
    }
    let mut ds = contract(dims, &p.dims, &[a.values], of(5), of(2));
    let delta = reorder(dims, args[4], body.dims_of(node.args[4]), &p.dims[..p.dims.len() - 1]);
    let n = dims.size(a.keys) as usize;
    for (k, x) in ds.iter_mut().enumerate() {
        let slope = slopes.get(k).copied().unwrap_or(1.0) * if of_products { a.scale.0 } else { 1.0 };
        // A masked key has gradient 0, even where the program's slope is infinite or NaN.
        let weight = weights.get(k).copied().unwrap_or(1.0);
        *x = if p.data[k] == 0.0 { 0.0 } else { p.data[k] * (weight * *x - delta[k / n]) * slope };
    }
    let summed = rest(&p.dims, &node.ty.dims);
    let (other, over) = match which {
        AttentionGrad::Bias => return contract(dims, &node.ty.dims, &summed, (&ds, &p.dims), (&[1.0], &[])),
        AttentionGrad::Q => (of(1), vec![a.keys]),
        AttentionGrad::K | AttentionGrad::V => (of(0), summed),
    };
    contract(dims, &node.ty.dims, &over, (&ds, &p.dims), other)
}
