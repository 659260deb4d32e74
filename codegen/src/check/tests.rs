use super::draw::Draw;
use super::*;
use crate::object::{self, Emit};
use crate::testing::KernelDraft;
use ir::graph::{Type, Value};
use ir::kernel::Family;
use ir::op::{Attention, AttentionGrad, Binary, Compare, DType, Op, Real, Reduce, Scoring, Unary};

/// What comes of a kernel's code, held to another kernel's body.
fn checked(code: &Kernel, body: &Kernel) -> Result<Verification, Wrong> {
    checked_on(&Target::host().expect("a supported machine"), code, body)
}

fn checked_on(target: &Target, code: &Kernel, body: &Kernel) -> Result<Verification, Wrong> {
    [code, body].into_iter().for_each(|k| k.verify().expect("a well-formed test"));
    let compiled = object::compile(code, target, Emit::default()).expect("the kernel compiles");
    Checker { emulates: true, ..Checker::default() }.check(body, &compiled, target)
}

/// A kernel's code is what its body says.
pub fn passes(kernel: &Kernel, target: &Target) {
    let compiled = object::compile(kernel, target, Emit::default()).expect("the kernel compiles");
    let passed = Checker::default().check(kernel, &compiled, target);
    assert!(matches!(passed, Ok(Verification::Passed { .. })), "{passed:?}");
}

/// A kernel is what it says; and its code is not what another one says.
fn is_told_from(kernel: &Kernel, other: &Kernel) {
    let passed = checked(kernel, kernel);
    assert!(matches!(passed, Ok(Verification::Passed { places }) if places > 0), "{passed:?}");
    let wrong = checked(kernel, other).expect_err("another kernel");
    let Wrong::Value { place, got, want } = &wrong else { panic!("{wrong:?}") };
    let ty = &kernel.body[kernel.outputs[place.output].value].ty;
    let inside = place.index.iter().zip(&ty.dims).all(|((_, i), d)| *i < kernel.body.dims.size(*d));
    assert!(place.index.len() == ty.dims.len() && inside && got != want, "{wrong:?}");
}

/// Rows whose sum, maximum and softmax are of this dtype.
fn loops(dtype: DType, function: Unary, sizes: [u64; 2]) -> Kernel {
    let mut make = KernelDraft::default();
    let [s, h] = [("s", sizes[0]), ("h", sizes[1])].map(|(n, size)| make.dim(n, size));
    let x = make.input(dtype, &[s, h]);
    let y = make.op(Op::Unary(function), &[x]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![h] }, &[y]);
    let quotient = make.op(Op::Binary(Binary::Div), &[y, sum]);
    make.kernel(Family::Loops { grid: vec![s] }, &[quotient, sum])
}

fn gemm(dtype: DType, function: Unary, sizes: [u64; 3]) -> Kernel {
    let mut make = KernelDraft::default();
    let [m, n, k] = [("m", sizes[0]), ("n", sizes[1]), ("k", sizes[2])].map(|(n, size)| make.dim(n, size));
    let (a, b) = (make.input(dtype, &[m, k]), make.input(dtype, &[k, n]));
    let c = make.op(Op::dot(vec![k]), &[a, b]);
    let c = make.op(Op::Unary(function), &[c]);
    make.kernel(Family::Gemm, &[c])
}

fn experts(function: Unary, sums_rows: bool) -> Kernel {
    let mut make = KernelDraft::default();
    let [rows, e, h, f] = [("rows", 70), ("e", 5), ("h", 24), ("f", 33)].map(|(n, size)| make.dim(n, size));
    let a = make.input(DType::F32, &[rows, h]);
    let factor = if sums_rows { vec![rows, f] } else { vec![e, h, f] };
    let b = make.input(DType::F32, &factor);
    let ends = make.input(DType::I32, &[e]);
    let over = if sums_rows { vec![rows] } else { vec![h, e] };
    let result = if sums_rows { vec![e, h, f] } else { vec![rows, f] };
    let ty = Type::new(DType::F32, result);
    let c = make.op_as(Op::grouped_dot(rows, e, over), &[a, b, ends], ty);
    let c = make.op(Op::Unary(function), &[c]);
    make.kernel(Family::Gemm, &[c])
}

fn scatter(function: Unary, accumulate: bool) -> Kernel {
    let mut make = KernelDraft::default();
    let [s, v, h] = [("s", 40), ("v", 60), ("h", 35)].map(|(n, size)| make.dim(n, size));
    let (values, index) = (make.input(DType::F32, &[s, h]), make.input(DType::I32, &[s]));
    let table = make.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(DType::F32, [v, h]));
    let table = make.op(Op::Unary(function), &[table]);
    let mut kernel = make.kernel(Family::Scatter, &[table]);
    kernel.outputs[0].accumulate = accumulate;
    kernel
}

fn attention(scale: f64, gradients: &[AttentionGrad]) -> Kernel {
    let mut make = KernelDraft::default();
    let [heads, at, keys, d] = [("heads", 3), ("at", 50), ("keys", 50), ("d", 16)].map(|(n, size)| make.dim(n, size));
    let a = Attention { at, keys, d, values: d, scale: Real(scale), scoring: Scoring::causal(None) };
    let q = make.input(DType::F32, &[at, heads, d]);
    let (k, v) = (make.input(DType::F32, &[keys, heads, d]), make.input(DType::F32, &[keys, heads, d]));
    let rows = (!gradients.is_empty()).then(|| [(); 2].map(|()| make.input(DType::F32, &[at, heads])));
    let dout = rows.map(|_| make.input(DType::F32, &[at, heads, d]));
    let positions = [at, keys].map(|d| make.input(DType::I32, &[d]));
    let Some(([lse, delta], dout)) = rows.zip(dout) else {
        let out = make.op(Op::Attention(a.clone()), &[&[q, k, v], &positions[..]].concat());
        let lse = make.op(Op::AttentionLse(a), &[&[q, k], &positions[..]].concat());
        return make.kernel(Family::Attention, &[out, lse]);
    };
    let args: Vec<Value> = [&[q, k, v, lse, delta, dout], &positions[..]].concat();
    let outputs: Vec<Value> = gradients
        .iter()
        .map(|which| {
            let ty = make.body[if *which == AttentionGrad::Q { q } else { k }].ty.clone();
            make.op_as(Op::AttentionGrad(a.clone(), *which), &args, ty)
        })
        .collect();
    make.kernel(Family::AttentionGrad, &outputs)
}

#[test]
fn code_of_loops_is_held_to_its_body() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        is_told_from(&loops(dtype, Unary::Exp, [9, 70]), &loops(dtype, Unary::Cos, [9, 70]));
    }
    // Only some tiles of a kernel this large run.
    is_told_from(&loops(DType::F32, Unary::Exp, [3000, 3000]), &loops(DType::F32, Unary::Cos, [3000, 3000]));
}

/// Sums over this many rows, as gradients of biases are; of so many columns.
fn columns([rows, columns]: [u64; 2], function: Unary) -> Kernel {
    let mut make = KernelDraft::default();
    let [s, h] = [("s", rows), ("h", columns)].map(|(n, size)| make.dim(n, size));
    let x = make.input(DType::F32, &[s, h]);
    let x = make.op(Op::Unary(function), &[x]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![s] }, &[x]);
    make.kernel(Family::Loops { grid: vec![h] }, &[sum])
}

/// Rounding grows with the number of terms, of either sign or of one, and is not taken for another sum.
#[test]
fn long_sums_are_held_to_their_bodies_as_far_as_rounding_goes() {
    for sizes in [[1 << 16, 768], [100_000, 10], [1 << 20, 64], [1 << 22, 1]] {
        for function in [Unary::Neg, Unary::Abs] {
            let passed = checked(&columns(sizes, function), &columns(sizes, function));
            assert!(matches!(passed, Ok(Verification::Passed { .. })), "{sizes:?}: {passed:?}");
        }
    }
    // The code leaves out one of many rows.
    let (less, more) = (columns([(1 << 16) - 1, 64], Unary::Neg), columns([1 << 16, 64], Unary::Neg));
    assert!(matches!(checked(&less, &more), Err(Wrong::Value { .. })));
}

#[test]
fn code_of_products_is_held_to_its_body() {
    for dtype in [DType::F32, DType::Bf16] {
        is_told_from(&gemm(dtype, Unary::Neg, [30, 70, 40]), &gemm(dtype, Unary::Abs, [30, 70, 40]));
    }
    is_told_from(&gemm(DType::F32, Unary::Neg, [900, 3000, 800]), &gemm(DType::F32, Unary::Abs, [900, 3000, 800]));
}

#[test]
fn code_of_experts_is_held_to_its_body() {
    for sums_rows in [false, true] {
        is_told_from(&experts(Unary::Neg, sums_rows), &experts(Unary::Abs, sums_rows));
    }
}

#[test]
fn code_of_scatters_is_held_to_its_body() {
    for accumulate in [false, true] {
        is_told_from(&scatter(Unary::Neg, accumulate), &scatter(Unary::Abs, accumulate));
    }
}

#[test]
fn code_of_attention_is_held_to_its_body() {
    use AttentionGrad::{K, Q, V};
    for gradients in [&[][..], &[Q, K, V], &[K]] {
        is_told_from(&attention(0.25, gradients), &attention(0.3, gradients));
    }
}

#[test]
fn a_place_that_is_left_out_is_found() {
    let (less, more) = (loops(DType::F32, Unary::Exp, [9, 70]), loops(DType::F32, Unary::Exp, [10, 70]));
    let wrong = checked(&less, &more).expect_err("a row is left out");
    assert!(matches!(&wrong, Wrong::Unwritten(place) if place.index[0] == ("s".to_string(), 9)), "{wrong}");
}

#[test]
fn code_for_other_machines_is_not_run() {
    let kernel = gemm(DType::F32, Unary::Neg, [3, 7, 4]);
    let gpu = Target::gpu("sm_80");
    let compiled = object::compile(&kernel, &gpu, Emit::default()).expect("the kernel compiles");
    let said = Checker::default().check(&kernel, &compiled, &gpu);
    // Code for GPUs is emulated only on request, as that takes seconds.
    assert_eq!(said, Ok(Verification::Foreign("code for a GPU".into())));
}

/// Some blocks of it, in the emulator: products, attention, loops and sums by index, on tensor cores and without.
#[test]
fn code_for_gpus_is_held_to_its_body() {
    let kernels: [(Kernel, Kernel); 7] = [
        (gemm(DType::F32, Unary::Neg, [30, 70, 40]), gemm(DType::F32, Unary::Abs, [30, 70, 40])),
        (gemm(DType::Bf16, Unary::Neg, [700, 512, 128]), gemm(DType::Bf16, Unary::Abs, [700, 512, 128])),
        (loops(DType::F32, Unary::Exp, [9, 70]), loops(DType::F32, Unary::Cos, [9, 70])),
        (loops(DType::Bf16, Unary::Exp, [3000, 3000]), loops(DType::Bf16, Unary::Cos, [3000, 3000])),
        (experts(Unary::Neg, false), experts(Unary::Abs, false)),
        (scatter(Unary::Neg, true), scatter(Unary::Abs, true)),
        (attention(0.25, &[]), attention(0.3, &[])),
    ];
    for gpu in ["sm_80", "sm_90a"] {
        for (kernel, other) in &kernels {
            let target = Target::gpu(gpu);
            let passed = checked_on(&target, kernel, kernel);
            assert!(matches!(passed, Ok(Verification::Passed { places }) if places > 0), "{gpu} {passed:?}");
            let wrong = checked_on(&target, kernel, other);
            assert!(matches!(wrong, Err(Wrong::Value { .. })), "{gpu} {wrong:?}");
        }
    }
}

/// The first result lies where the operand was that the second one is made of too.
#[test]
fn results_in_the_place_of_operands_are_compared() {
    let mut make = KernelDraft::default();
    let d = make.dim("d", 100);
    let (x, y) = (make.input(DType::F32, &[d]), make.input(DType::F32, &[d]));
    let sum = make.op(Op::Add, &[x, y]);
    let product = make.op(Op::Binary(Binary::Mul), &[x, y]);
    let kernel = make.kernel(Family::Loops { grid: vec![d] }, &[sum, product]);
    assert_eq!(in_place::pair(&kernel), Some((0, 0)));
    assert!(matches!(checked(&kernel, &kernel), Ok(Verification::Passed { .. })));
    // The sum of a row depends on all of its elements, so no result may take the row's place.
    assert_eq!(in_place::pair(&loops(DType::F32, Unary::Exp, [9, 70])), None);
    let mut checker = Checker::default();
    let (Ok(apart), Ok(over)) = (checker.operands(&kernel, 0), checker.in_place_operands(&kernel, (0, 0))) else { panic!("operands") };
    let write = |to: &memory::MappedMemory, k: usize, x: f32| {
        // SAFETY: an element of the operand, which may be written.
        unsafe { to.start().cast::<f32>().add(k).write(x) }
    };
    for k in 0..100 {
        let [a, b] = [0, 1].map(|i| apart.inputs[i].get(DType::F32, k as u64) as f32);
        write(&apart.outputs[0], k, a + b);
        write(&apart.outputs[1], k, a * b);
        write(&over.place, k, a + b);
        // This is what code computes that reads the operand again after the first result was written.
        write(&over.others[0], k, if k < 70 { a * b } else { (a + b) * b });
    }
    let wrong = in_place::same(&kernel, &apart, &over, 1).expect_err("the second result is another one");
    assert!(matches!(&wrong, Wrong::InPlace { place, operand: 0, .. } if place.output == 1 && place.index[0].1 == 70), "{wrong}");
}

/// Roots of what is positive, indices below their tables' sizes.
#[test]
fn operands_are_such_as_results_say_something_of() {
    let mut make = KernelDraft::default();
    let [s, v] = [("s", 5), ("v", 9)].map(|(n, size)| make.dim(n, size));
    let (table, index, x) = (make.input(DType::F32, &[v]), make.input(DType::I32, &[s]), make.input(DType::F32, &[s]));
    let row = make.op_as(Op::Gather { dim: v }, &[table, index], Type::new(DType::F32, [s]));
    let square = make.op(Op::Binary(Binary::Mul), &[x, x]);
    let sum = make.op(Op::Add, &[row, square]);
    let root = make.op(Op::Unary(Unary::Rsqrt), &[sum]);
    let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[root]);
    assert_eq!(draw::draws(&kernel), [Draw::Positive, Draw::Below { first: 0, end: 9 }, Draw::Signed]);
    let mut make = KernelDraft::default();
    let [s, v] = [("s", 5), ("v", 700)].map(|(n, size)| make.dim(n, size));
    let index = make.input(DType::I32, &[s]);
    let iota = make.source(Op::Iota(v), DType::I32, &[v]);
    let one = make.op(Op::Compare(Compare::Eq), &[index, iota]);
    let kernel = make.kernel(Family::Loops { grid: vec![s, v] }, &[one]);
    assert_eq!(draw::draws(&kernel), [Draw::Below { first: 0, end: 700 }]);
    let mut make = KernelDraft::default();
    let [s, v] = [("s", 5), ("v", 9)].map(|(n, size)| make.dim(n, size));
    let (x, y, z) = (make.input(DType::Bf16, &[s, v]), make.input(DType::I32, &[s, v]), make.input(DType::I32, &[s, v]));
    let wide = make.op_as(Op::Cast, &[x], Type::new(DType::F32, [s, v]));
    let greatest = make.op(Op::Reduce { kind: Reduce::Max, over: vec![v] }, &[wide]);
    let quotient = make.op(Op::Binary(Binary::Div), &[y, z]);
    let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[greatest, quotient]);
    assert_eq!(draw::draws(&kernel), [Draw::Low, Draw::INTS, Draw::Ints { zero: false }]);
}

/// So that blocks of scores are skipped: a bool of each key says the same of many in a row.
#[test]
fn keys_are_there_in_long_runs() {
    let mut make = KernelDraft::default();
    let [at, keys, d] = [("at", 5), ("keys", 300), ("d", 8)].map(|(n, size)| make.dim(n, size));
    let mut scoring = Scoring::PLAIN;
    scoring.seen = Some(scoring.step(Op::Input(1), DType::Bool, &[]));
    let attention = Attention { at, keys, d, values: d, scale: Real(1.0), scoring };
    let args = [make.input(DType::F32, &[at, d]), make.input(DType::F32, &[keys, d]), make.input(DType::F32, &[keys, d])];
    let there = make.input(DType::Bool, &[keys]);
    let out = make.op(Op::Attention(attention), &[&args[..], &[there]].concat());
    let kernel = make.kernel(Family::Attention, &[out]);
    assert_eq!(draw::draws(&kernel)[3], Draw::There);
    let Ok(operands) = Checker::default().operands(&kernel, 0) else { panic!("operands") };
    let changes = (1..300).filter(|k| operands.inputs[3].get(DType::Bool, *k) != operands.inputs[3].get(DType::Bool, k - 1));
    assert_eq!(changes.collect::<Vec<u64>>(), [135, 270]);
}

/// What lies beside the elements of a result is another's.
#[test]
fn a_write_beside_the_elements_is_found() {
    let kernel = |size| {
        let mut make = KernelDraft::default();
        let [s, h] = [("s", 9), ("h", size)].map(|(n, size)| make.dim(n, size));
        let x = make.input(DType::F32, &[s, h]);
        let y = make.op(Op::Unary(Unary::Neg), &[x]);
        let mut kernel = make.kernel(Family::Loops { grid: vec![s, h] }, &[y]);
        kernel.inputs[0].strides = vec![80, 1];
        kernel.outputs[0].strides = vec![80, 1];
        kernel
    };
    assert!(checked(&kernel(70), &kernel(70)).is_ok());
    let wrong = checked(&kernel(70), &kernel(69)).expect_err("a column more");
    assert!(matches!(wrong, Wrong::Beyond(_)), "{wrong}");
}

#[test]
fn ranges_of_tiles_are_apart_and_reach_both_ends() {
    let ranges = |tiles, line, cost, seed| ranges(Shape { tiles, line, scratch_bytes: 0 }, cost, seed);
    assert_eq!(ranges(5, 1, 1000, 1), [[0, 2], [2, 5]]);
    assert_eq!(ranges(7, 1, 80 * RUN, 1), [[0, 1], [6, 7]]);
    assert_eq!(ranges(7, 1, 14 * RUN, 1), [[0, 2], [6, 7]]);
    for (tiles, cost) in [(100, 50 * RUN), (1000, 10 * RUN), (7, 6 * RUN)] {
        let [[zero, a], [b, c], [d, end]] = ranges(tiles, 1, cost, 3)[..] else { panic!("three ranges") };
        assert!(zero == 0 && 1 < a && a <= b && b + 1 < c && c <= d && d < end && end == tiles);
    }
    let [_, [from, to], _] = ranges(100, 10, 50 * RUN, 3)[..] else { panic!("three ranges") };
    assert!((1..10).any(|line| from < 10 * line && 10 * line < to), "{from}..{to} are of two lines");
}
