//! Kernels of 16-bit floats against their definition.
//!
//! Data are 16-bit values, so that products are exact in f32 and what is compared is where results are rounded, and
//! how.

use crate::testing::{KernelDraft, check, check_with, everything, random_inputs};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, Binary, DType, Op, Real, Reduce, Scoring, Unary};

const HALVES: [DType; 2] = [DType::Bf16, DType::F16];

/// A unit in the last place, of one.
fn place(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { 2f64.powi(-7) } else { 2f64.powi(-10) }
}

/// Small integers: sums of some hundred products are exact in f32, and few of them in 16 bits.
fn integers(kernel: &Kernel) -> Vec<Vec<f64>> {
    let mut inputs = random_inputs(kernel, 5, 7);
    for (input, data) in kernel.inputs.iter().zip(&mut inputs) {
        if input.ty.dtype.is_float() {
            data.iter_mut().for_each(|x| *x = (*x * 15.0).round());
        }
    }
    inputs
}

fn cast(make: &mut KernelDraft, x: Value, dtype: DType) -> Value {
    let dims = make.body.dims_of(x).to_vec();
    make.op_as(Op::Cast, &[x], Type::new(dtype, dims))
}

#[test]
fn numbers_round_to_the_nearest_and_ties_to_even() {
    for dtype in HALVES {
        let mut make = KernelDraft::default();
        let d = make.dim("d", 64);
        let x = make.input(DType::F32, &[d]);
        let y = cast(&mut make, x, dtype);
        let kernel = make.kernel(Family::Loops { grid: vec![d] }, &[y]);
        let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65504.0, 65519.0, 65520.0, 3.4e38, -3.4e38, 1e30];
        // `near` has ties and their neighbours, of numbers with odd and even last places and of f16's subnormal ones.
        let near = [1.0, 1.0 + place(dtype), 3.0, 1e-6, 6e-8, 2e-5].into_iter().flat_map(|x: f64| {
            let half = place(dtype) * 2f64.powi(x.log2().floor() as i32) / 2.0;
            [x + half, -(x + half), x + half * 1.0001, x + half * 0.9999]
        });
        let mut data: Vec<f64> = special.into_iter().chain(near).map(|x| f64::from(x as f32)).collect();
        data.resize(64, 1.0);
        check_with(&kernel, &[data], &[], 0.0);
    }
}

#[test]
fn every_op_of_a_fused_kernel_rounds_its_result() {
    for dtype in HALVES {
        let mut make = KernelDraft::default();
        let [m, n] = [make.dim("m", 9), make.dim("n", 37)];
        let (x, y, row) = (make.input(dtype, &[m, n]), make.input(dtype, &[m, n]), make.input(dtype, &[n]));
        // A product such as 259 is no bf16: were it kept in f32, the sum would differ.
        let product = make.op(Op::Binary(Binary::Mul), &[x, y]);
        let sum = make.op(Op::Add, &[product, row, x]);
        let again = make.op(Op::Binary(Binary::Sub), &[sum, product]);
        let most = make.op(Op::Binary(Binary::Max), &[again, y]);
        let wide = cast(&mut make, most, DType::F32);
        let kernel = make.kernel(Family::Loops { grid: vec![m, n] }, &[sum, again, wide]);
        check_with(&kernel, &integers(&kernel), &[], 0.0);
        check(&kernel, &[], 0.0);
    }
}

#[test]
fn functions_of_sixteen_bits_are_within_one_place() {
    for dtype in HALVES {
        for op in [Unary::Exp, Unary::Tanh, Unary::Erf, Unary::Sin, Unary::Neg, Unary::Abs, Unary::Floor, Unary::Sign] {
            let mut make = KernelDraft::default();
            let d = make.dim("d", 50);
            let x = make.input(dtype, &[d]);
            let y = make.op(Op::Unary(op), &[x]);
            check(&make.kernel(Family::Loops { grid: vec![d] }, &[y]), &[], place(dtype));
        }
    }
}

#[test]
fn sums_are_rounded_once_or_not_at_all() {
    for dtype in HALVES {
        for inner in [false, true] {
            let mut make = KernelDraft::default();
            let [m, n] = [make.dim("m", 11), make.dim("n", 300)];
            let x = make.input(dtype, &[m, n]);
            let (over, left) = if inner { (n, m) } else { (m, n) };
            let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![over] }, &[x]);
            let wide = make.op_as(Op::Reduce { kind: Reduce::Sum, over: vec![over] }, &[x], Type::scalar(DType::F32));
            let top = make.op(Op::Reduce { kind: Reduce::Max, over: vec![over] }, &[x]);
            let kernel = make.kernel(Family::Loops { grid: vec![left] }, &[sum, wide, top]);
            check_with(&kernel, &integers(&kernel), &[], 0.0);
        }
    }
}

#[test]
fn running_sums_round_what_they_leave_and_not_what_they_carry() {
    for dtype in HALVES {
        let mut make = KernelDraft::default();
        let [m, n] = [make.dim("m", 5), make.dim("n", 90)];
        let x = make.input(dtype, &[m, n]);
        let y = make.op(Op::Cumsum { over: n, reverse: false }, &[x]);
        let kernel = make.kernel(Family::Loops { grid: vec![m] }, &[y]);
        check_with(&kernel, &integers(&kernel), &[], 0.0);
    }
}

#[test]
fn rows_are_looked_up_and_summed() {
    for dtype in HALVES {
        for result in [dtype, DType::F32] {
            let mut make = KernelDraft::default();
            let [b, s, v, h] = [("b", 2), ("s", 60), ("v", 7), ("h", 21)].map(|(n, s)| make.dim(n, s));
            let (values, index) = (make.input(dtype, &[b, s, h]), make.input(DType::I32, &[b, s]));
            let table = make.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(result, [v, h]));
            let kernel = make.kernel(Family::Scatter, &[table]);
            check_with(&kernel, &integers(&kernel), &[], 0.0);
        }
        let mut make = KernelDraft::default();
        let [s, v, h] = [("s", 13), ("v", 7), ("h", 21)].map(|(n, s)| make.dim(n, s));
        let (table, index) = (make.input(dtype, &[v, h]), make.input(DType::I32, &[s]));
        let rows = make.op(Op::Gather { dim: v }, &[table, index]);
        check(&make.kernel(Family::Loops { grid: vec![s, h] }, &[rows]), &[], 0.0);
    }
}

#[test]
fn a_stride_of_sixteen_bits_is_two_bytes() {
    for dtype in HALVES {
        let mut make = KernelDraft::default();
        let [m, n] = [make.dim("m", 6), make.dim("n", 35)];
        let x = make.strided_input(dtype, &[m, n], &[1, 9]);
        let y = make.op(Op::Add, &[x, x]);
        let mut kernel = make.kernel(Family::Loops { grid: vec![m, n] }, &[y]);
        kernel.outputs[0].accumulate = true;
        check(&kernel, &[], 0.0);
    }
}

/// `c[m, n]`, of factors in any order of their dims.
fn product(make: &mut KernelDraft, [m, n, k]: [Dim; 3], transposed: [bool; 2], from: DType, to: DType) -> Value {
    let a = make.input(from, &if transposed[0] { [k, m] } else { [m, k] });
    let b = make.input(from, &if transposed[1] { [n, k] } else { [k, n] });
    make.op_as(Op::dot(vec![k]), &[a, b], Type::new(to, [m, n]))
}

#[test]
fn products_sum_in_f32_and_round_once_in_all_four_layouts() {
    let all = [[1, 40, 70], [29, 70, 45], [25, 40, 1030]];
    let mut turn = 0;
    for dtype in HALVES {
        for to in [dtype, DType::F32] {
            for layout in [[false, false], [false, true], [true, false], [true, true]] {
                turn += 1;
                for sizes in if everything() { &all[..] } else { &all[turn % 3..][..1] } {
                    let mut make = KernelDraft::default();
                    let [m, n, k] = [("m", sizes[0]), ("n", sizes[1]), ("k", sizes[2])].map(|(n, s)| make.dim(n, s));
                    let c = product(&mut make, [m, n, k], layout, dtype, to);
                    let mut kernel = make.kernel(Family::Gemm, &[c]);
                    kernel.outputs[0].accumulate = to == DType::F32 && sizes[0] != 29;
                    check_with(&kernel, &integers(&kernel), &[], 0.0);
                }
            }
        }
    }
}

#[test]
fn what_follows_a_product_sees_it_rounded() {
    for dtype in HALVES {
        let mut make = KernelDraft::default();
        let [m, n, k] = [("m", 45), ("n", 37), ("k", 20)].map(|(n, s)| make.dim(n, s));
        let c = product(&mut make, [m, n, k], [false, true], dtype, dtype);
        let (bias, residual) = (make.input(dtype, &[n]), make.input(dtype, &[m, n]));
        let sum = make.op(Op::Add, &[c, bias]);
        let out = make.op(Op::Add, &[sum, residual]);
        let wide = cast(&mut make, sum, DType::F32);
        let kernel = make.kernel(Family::Gemm, &[out, wide]);
        check_with(&kernel, &integers(&kernel), &[], 0.0);
    }
}

#[test]
fn attention_reads_sixteen_bits_sums_in_f32_and_rounds_once() {
    for dtype in HALVES {
        // Heads of a multiple of 8 elements would run on tensor cores, which round probabilities too.
        for (queries, keys, size) in [(20, 20, 17), (70, 70, 23)] {
            let parts = |make: &mut KernelDraft| {
                let [b, at, heads, keys, d] = [("b", 2), ("at", queries), ("heads", 2), ("keys", keys), ("d", size)].map(|(n, s)| make.dim(n, s));
                let attention = Attention { at, keys, d, values: d, scale: Real(0.25), scoring: Scoring::PLAIN };
                let [q, k, v] = [at, keys, keys].map(|rows| make.input(dtype, &[b, rows, heads, d]));
                (attention, [q, k, v], vec![b, at, heads, d])
            };
            let mut make = KernelDraft::default();
            let (attention, [q, k, v], _) = parts(&mut make);
            let out = make.op(Op::Attention(attention.clone()), &[q, k, v]);
            let lse = make.op(Op::AttentionLse(attention), &[q, k]);
            check(&make.kernel(Family::Attention, &[out, lse]), &[], place(dtype));

            for result in [dtype, DType::F32] {
                let mut make = KernelDraft::default();
                let (attention, [q, k, v], rows) = parts(&mut make);
                let [lse, delta] = [0, 1].map(|_| make.input(DType::F32, &rows[..3]));
                let gradient = make.input(dtype, &rows);
                let grads = [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V]
                    .map(|which| make.op_as(Op::AttentionGrad(attention.clone(), which), &[q, k, v, lse, delta, gradient], Type::scalar(result)));
                check(&make.kernel(Family::AttentionGrad, &grads), &[], place(dtype));
            }
        }
    }
}
