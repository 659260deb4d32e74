use super::{Env, run};
use crate::build::Builder;
use crate::dim::{Base, Dim, DimInfo};
use crate::graph::{Body, Origin, Phase, Type};
use crate::op::{Binary, DType, Op, Scalar};

struct Inputs(Vec<Vec<f64>>);

impl Env for Inputs {
    fn source(&mut self, op: &Op, _: &Type) -> Vec<f64> {
        match op {
            Op::Input(i) => self.0[*i as usize].clone(),
            other => unreachable!("no {} here", other.name()),
        }
    }

    fn scalar(&self, _: &Scalar) -> f64 {
        unreachable!("no scalars here")
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

/// Compares a grouped dot of `a` and `b`, given by their dims out of `part, row, expert, h, f`, with a plain dot
/// whose operand is masked by ones and zeros.
fn check(a: &[usize], b: &[usize], over: &[usize], out: &[usize]) {
    let sizes = [2, 7, 3, 4, 5];
    // In the first part, the last two rows belong to no expert. In the second, the first expert has no row and the
    // last one has all rows up to the end.
    let ends = [2, 2, 5, 0, 3, 9];
    let member = |p: usize, row: usize, e: usize| {
        let first = if e == 0 { 0 } else { ends[3 * p + e - 1] };
        f64::from(first <= row && row < ends[3 * p + e])
    };
    let m: Vec<f64> = (0..42).map(|i| member(i / 21, i / 3 % 7, i % 3)).collect();
    let mut body = Body::default();
    let dims: Vec<Dim> = ["part", "row", "expert", "h", "f"].iter().zip(sizes).map(|(name, n)| body.dims.add(DimInfo::new(*name, n))).collect();
    let list = |of: &[usize]| of.iter().map(|k| dims[*k]).collect::<Vec<Dim>>();
    let values = |of: &[usize], seed: usize| {
        let n: u64 = of.iter().map(|k| sizes[*k]).product();
        (0..n as usize).map(|i| ((i * 37 + seed) % 23) as f64 - 11.0).collect::<Vec<f64>>()
    };
    let mut make = Builder { body: &mut body, origin: Origin::new(Phase::Forward) };
    let mut input = |k: u32, dtype: DType, of: &[usize]| make.typed(Op::Input(k), &[], Type::new(dtype, list(of)));
    let (x, y) = (input(0, DType::F32, a), input(1, DType::F32, b));
    let (z, ones) = (input(2, DType::I32, &[0, 2]), input(3, DType::F32, &[0, 1, 2]));
    let got = make.op(Op::grouped_dot(dims[1], dims[2], list(over)), &[x, y, z]);
    let own = make.op(Op::Binary(Binary::Mul), &[x, ones]);
    let want = make.op(Op::dot(list(over)), &[own, y]);
    for v in [got, want] {
        let mut have = make.dims(v);
        make.body[v].ty.dims = list(out);
        have.sort();
        assert_eq!(have, {
            let mut all = list(out);
            all.sort();
            all
        });
    }
    let mut env = Inputs(vec![values(a, 3), values(b, 8), ends.iter().map(|e| *e as f64).collect(), m.clone()]);
    let whole = run(&body, &mut env);
    assert_eq!(whole[got.index()], whole[want.index()]);
    assert!(whole[got.index()].iter().any(|x| *x != 0.0));
    // Rows of no expert are never read, so NaN there does not matter.
    let nobody = |p: usize, row: usize| m[(p * 7 + row) * 3..][..3].iter().all(|x| *x == 0.0);
    for (k, of) in [a, b].into_iter().enumerate().filter(|(_, of)| of.starts_with(&[0, 1])) {
        let inner: usize = of[2..].iter().map(|k| sizes[*k] as usize).product();
        for i in (0..env.0[k].len()).filter(|i| nobody(i / inner / 7, i / inner % 7)) {
            env.0[k][i] = f64::NAN;
        }
    }
    assert_eq!(run(&body, &mut env)[got.index()], whole[got.index()]);
}

#[test]
fn each_row_of_a_grouped_dot_meets_its_experts_matrix() {
    check(&[0, 1, 3], &[2, 3, 4], &[3, 2], &[0, 1, 4]);
    check(&[0, 1, 4], &[2, 3, 4], &[2, 4], &[1, 0, 3]);
}

#[test]
fn each_expert_of_a_grouped_dot_sums_over_its_rows() {
    check(&[0, 1, 3], &[0, 1, 4], &[1, 0], &[2, 3, 4]);
    check(&[0, 1, 3], &[0, 1, 4], &[1], &[3, 0, 2, 4]);
}
