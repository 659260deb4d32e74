//! Muon's direction: a momentum whose singular values are brought near one.

use ir::build::Builder;
use ir::dim::{Dim, DimInfo};
use ir::graph::Value;
use ir::matrix::Matrix;
use ir::model::Muon;
use ir::op::{Op, Unary};
use std::collections::HashMap;

/// Coefficients of `a x + b x^3 + c x^5`, which each iteration applies to every singular value.
const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Two copies of each dim that products of a matrix and itself need, the same for all parameters.
#[derive(Default)]
pub struct Copies(HashMap<(Dim, usize), Dim>);

impl Copies {
    fn of(&mut self, b: &mut Builder, d: Dim, number: usize) -> Dim {
        *self.0.entry((d, number)).or_insert_with(|| {
            let dims = &mut b.body.dims;
            let info = DimInfo { copy_of: Some(d), ..dims[d].clone() };
            dims.add(info)
        })
    }

    /// A value with copies of these dims in their place.
    fn renamed(&mut self, b: &mut Builder, x: Value, from: &[(Dim, Dim)]) -> Value {
        from.iter().fold(x, |x, (from, to)| b.op(Op::View { from: vec![*from], to: vec![*to] }, &[x]))
    }
}

/// `x` over its norm, then `x = a x + (b s + c s^2) x` with `s = x x^T`, as often as asked (Jordan et al. 2024). `s`
/// sums over the more elements of inputs and outputs, since the result is the same either way.
pub fn orthogonal(b: &mut Builder, n: Value, matrix: &Matrix, muon: &Muon, copies: &mut Copies) -> Value {
    let elements = |dims: &[Dim], b: &Builder| b.body.dims.elements(dims);
    let (short, long) = match elements(&matrix.inputs, b) <= elements(&matrix.outputs, b) {
        true => (&matrix.inputs, &matrix.outputs),
        false => (&matrix.outputs, &matrix.inputs),
    };
    let all: Vec<Dim> = matrix.inputs.iter().chain(&matrix.outputs).copied().collect();
    let square = b.mul(n, n);
    let square = ir::fault!(
        "optimize.muon.norm.batch",
        {
            let every = b.dims(n);
            b.sum(square, &every)
        },
        b.sum(square, &all)
    );
    let norm = b.unary(Unary::Sqrt, square);
    let least = b.constant(1e-7);
    let norm = b.add(&[norm, least]);
    let mut x = b.div(n, norm);
    let [first, second]: [Vec<Dim>; 2] = [0, 1].map(|k| short.iter().map(|d| copies.of(b, *d, k)).collect());
    let pairs = |from: &[Dim], to: &[Dim]| from.iter().copied().zip(to.iter().copied()).collect::<Vec<_>>();
    let [a, linear, squared] = ir::fault!("optimize.muon.quintic.order", [QUINTIC[0], QUINTIC[2], QUINTIC[1]], QUINTIC);
    for _ in 0..ir::fault!("optimize.muon.iterations", 1, muon.iterations) {
        // If ranks split the momentum, this renaming gathers it once; `x` is read back whole.
        let other = copies.renamed(b, x, &pairs(short, &first));
        x = copies.renamed(b, other, &pairs(&first, short));
        // The rows of `s` are `short`, its columns `first`.
        let s = b.op(Op::dot(long.clone()), &[x, other]);
        let left = copies.renamed(b, s, &pairs(&first, &second));
        let right = copies.renamed(b, s, &pairs(short, &second));
        let s2 = b.op(Op::dot(second.clone()), &[left, right]);
        let (s, s2) = (b.scale(s, linear), b.scale(s2, squared));
        let factor = b.add(&[s, s2]);
        let moved = b.op(Op::dot(first.clone()), &[factor, other]);
        let kept = b.scale(x, a);
        x = b.add(&[kept, moved]);
    }
    x
}
