use crate::testing::{Make, check_with, random_inputs};
use ir::dim::{Base, Dim, DimInfo, IndexMap};
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
    /// Global position of the first query and of the first key.
    positions: [f64; 2],
    /// Queries in two chunks this far apart.
    chunks: Option<u64>,
}

const BASE: Case = Case { batch: 2, kv: 2, group: 1, queries: 20, keys: 20, d: 16, causal: true, positions: [0.0; 2], chunks: None };

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
    let parts = case.chunks.map_or(vec![(case.queries, 1)], |apart| vec![(2, apart), (case.queries / 2, 1)]);
    let index = IndexMap { parts, base: Base::Slot(0) };
    let at = make.body.dims.add(DimInfo { index, global: 4000, ..DimInfo::new("at", case.queries) });
    let keys = make.sharded_dim("keys", case.keys, 4000, 1);
    make.scalar(DType::I32);
    make.scalar(DType::I32);
    let attention = Attention { at, keys, d, scale: Real(0.3), causal: case.causal };
    Parts { make, attention, q_dims: vec![batch, at, kv, group, d], k_dims: vec![batch, keys, kv, d] }
}

fn forward(case: &Case) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims } = parts(case);
    let q = make.input(DType::F32, &q_dims);
    let (k, v) = (make.input(DType::F32, &k_dims), make.input(DType::F32, &k_dims));
    let out = make.op(Op::Attention(attention.clone()), &[q, k, v]);
    let lse = make.op(Op::AttentionLse(attention), &[q, k]);
    make.kernel(Family::Attention, &[out, lse])
}

fn backward(case: &Case) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims } = parts(case);
    let q = make.input(DType::F32, &q_dims);
    let (k, v) = (make.input(DType::F32, &k_dims), make.input(DType::F32, &k_dims));
    let row_dims = &q_dims[..4];
    let (lse, delta) = (make.input(DType::F32, row_dims), make.input(DType::F32, row_dims));
    let dout = make.input(DType::F32, &q_dims);
    let grads = [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V];
    let outputs = grads.map(|which| {
        let grad = Op::AttentionGrad(attention.clone(), which);
        let ty = make.body[if which == AttentionGrad::Q { q } else { k }].ty.clone();
        make.op_as(grad, &[q, k, v, lse, delta, dout], ty)
    });
    make.kernel(Family::AttentionGrad, &outputs)
}

fn check_case(case: &Case) {
    let kernel = forward(case);
    let inputs = random_inputs(&kernel, 4, 1);
    check_with(&kernel, &inputs, &case.positions, 1e-5);
    let lse = kernel.run(&inputs, &case.positions).swap_remove(1);
    let kernel = backward(case);
    let mut inputs = random_inputs(&kernel, 4, 1);
    inputs[3] = lse;
    check_with(&kernel, &inputs, &case.positions, 3e-5);
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
fn positions_of_shards_decide_what_a_mask_hides() {
    for positions in [[0.0, 0.0], [20.0, 0.0], [0.0, 20.0], [10.0, 3.0], [3.0, 10.0]] {
        check_case(&Case { positions, queries: 40, keys: 90, ..BASE });
    }
    check_case(&Case { positions: [10.0, 0.0], chunks: Some(60), queries: 140, keys: 150, ..BASE });
}
