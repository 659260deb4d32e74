use crate::testing::{Make, check_with, random_inputs};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, DType, Op, Real};

/// An attention problem.
#[derive(Clone)]
struct Case {
    batch: u64,
    kv: u64,
    group: u64,
    queries: u64,
    keys: u64,
    d: u64,
    causal: bool,
    window: Option<u32>,
    /// Position of a query and of a key, by its number and how many there are.
    positions: [fn(u64, u64) -> u64; 2],
}

const IN_ORDER: fn(u64, u64) -> u64 = |i, _| i;
const BASE: Case = Case { batch: 2, kv: 2, group: 1, queries: 20, keys: 20, d: 16, causal: true, window: None, positions: [IN_ORDER; 2] };

struct Parts {
    make: Make,
    attention: Attention,
    q_dims: Vec<Dim>,
    k_dims: Vec<Dim>,
}

fn parts(case: &Case) -> Parts {
    let mut make = Make::default();
    let [batch, kv, group] = [("batch", case.batch), ("kv", case.kv), ("group", case.group)].map(|(n, s)| make.dim(n, s));
    let d = make.dim("d", case.d);
    let (at, keys) = (make.dim("at", case.queries), make.dim("keys", case.keys));
    let attention = Attention { at, keys, d, scale: Real(0.3), causal: case.causal, window: case.window };
    Parts { make, attention, q_dims: vec![batch, at, kv, group, d], k_dims: vec![batch, keys, kv, d] }
}

/// The last two operands, if there is a mask; the last two inputs of the kernel.
fn position_inputs(make: &mut Make, a: &Attention) -> Vec<Value> {
    if a.causal { [a.at, a.keys].map(|d| make.input(DType::I32, &[d])).to_vec() } else { vec![] }
}

fn forward(case: &Case) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims } = parts(case);
    let q = make.input(DType::F32, &q_dims);
    let (k, v) = (make.input(DType::F32, &k_dims), make.input(DType::F32, &k_dims));
    let positions = position_inputs(&mut make, &attention);
    let out = make.op(Op::Attention(attention.clone()), &[&[q, k, v], &positions[..]].concat());
    let lse = make.op(Op::AttentionLse(attention), &[&[q, k], &positions[..]].concat());
    make.kernel(Family::Attention, &[out, lse])
}

fn backward(case: &Case) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims } = parts(case);
    let q = make.input(DType::F32, &q_dims);
    let (k, v) = (make.input(DType::F32, &k_dims), make.input(DType::F32, &k_dims));
    let row_dims = &q_dims[..4];
    let (lse, delta) = (make.input(DType::F32, row_dims), make.input(DType::F32, row_dims));
    let dout = make.input(DType::F32, &q_dims);
    let positions = position_inputs(&mut make, &attention);
    let grads = [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V];
    let outputs = grads.map(|which| {
        let grad = Op::AttentionGrad(attention.clone(), which);
        let ty = make.body[if which == AttentionGrad::Q { q } else { k }].ty.clone();
        make.op_as(grad, &[&[q, k, v, lse, delta, dout], &positions[..]].concat(), ty)
    });
    make.kernel(Family::AttentionGrad, &outputs)
}

fn inputs(case: &Case, kernel: &Kernel) -> Vec<Vec<f64>> {
    let mut inputs = random_inputs(kernel, 4, 1);
    if case.causal {
        let first = inputs.len() - 2;
        for (input, (n, position)) in inputs[first..].iter_mut().zip([case.queries, case.keys].into_iter().zip(case.positions)) {
            *input = (0..n).map(|i| position(i, n) as f64).collect();
        }
    }
    inputs
}

fn check_case(case: &Case) {
    let kernel = forward(case);
    let operands = inputs(case, &kernel);
    check_with(&kernel, &operands, &[], 1e-5);
    let lse = kernel.run(&operands, &[]).swap_remove(1);
    let kernel = backward(case);
    let mut operands = inputs(case, &kernel);
    operands[3] = lse;
    check_with(&kernel, &operands, &[], 3e-5);
}

#[test]
fn whole_blocks_agree_with_and_without_a_mask() {
    for causal in [false, true] {
        check_case(&Case { queries: 128, keys: 128, batch: 1, kv: 1, d: 32, causal, ..BASE });
    }
}

#[test]
fn sizes_that_fill_no_block_and_no_vector_agree() {
    for (queries, keys, d) in [(1, 1, 1), (7, 7, 5), (65, 65, 24), (70, 131, 17), (300, 40, 8)] {
        check_case(&Case { queries, keys, d, batch: 1, causal: queries == keys, ..BASE });
    }
}

#[test]
fn grouped_queries_share_their_keys() {
    check_case(&Case { group: 3, queries: 33, keys: 33, ..BASE });
}

#[test]
fn positions_decide_what_a_mask_hides() {
    let backwards = |i: u64, n: u64| n - 1 - i;
    // Chunk 1 of 6 and chunk 4.
    let zig_zag = |i: u64, n: u64| if i < n / 2 { n / 2 + i } else { n / 2 * 3 + i };
    for positions in [[IN_ORDER, backwards], [backwards, IN_ORDER], [|i, _| i + 10, |i, _| i + 3], [zig_zag, IN_ORDER], [|i, _| i / 7, |i, _| i / 5]]
    {
        check_case(&Case { positions, queries: 140, keys: 150, ..BASE });
    }
    check_case(&Case { positions: [zig_zag, zig_zag], queries: 128, keys: 128, ..BASE });
}

#[test]
fn a_window_hides_what_is_too_far_back() {
    let zig_zag = |i: u64, n: u64| if i < n / 2 { n / 2 + i } else { n / 2 * 3 + i };
    for window in [1, 5, 64, 65, 100, 1000] {
        check_case(&Case { window: Some(window), queries: 200, keys: 200, batch: 1, kv: 1, ..BASE });
        check_case(&Case { window: Some(window), positions: [zig_zag, IN_ORDER], queries: 70, keys: 140, batch: 1, kv: 1, group: 2, ..BASE });
    }
}

#[test]
fn a_query_that_sees_no_key_has_no_result() {
    let case = Case { positions: [IN_ORDER, |i, _| i + 70], queries: 80, keys: 80, ..BASE };
    let kernel = forward(&case);
    let results = kernel.run(&inputs(&case, &kernel), &[]);
    assert!(results[0][..case.d as usize].iter().all(|x| *x == 0.0) && results[1][0] == f64::NEG_INFINITY);
    check_case(&case);
}

#[test]
fn heads_wider_than_the_registers_of_a_warp_agree() {
    for d in [96, 260] {
        check_case(&Case { queries: 9, keys: 35, batch: 1, kv: 1, group: 2, d, ..BASE });
    }
}

#[test]
fn each_result_alone_agrees_and_may_be_added_to_what_is_there() {
    let case = Case { group: 2, queries: 40, keys: 37, batch: 1, ..BASE };
    for (kernel, tolerance) in [(forward(&case), 1e-5), (backward(&case), 3e-5)] {
        for output in kernel.outputs.clone() {
            let alone = Kernel { outputs: vec![ir::kernel::Output { accumulate: true, ..output }], ..kernel.clone() };
            check_with(&alone, &inputs(&case, &kernel), &[], tolerance);
        }
    }
}
