use crate::object::{self, Emit};
use crate::target::Target;
use crate::testing::ordering::every_line_is_needed;
use crate::testing::{KernelDraft, assembling, check_with, golden, random_inputs};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, Compare, DType, Op, Real, Scoring};

mod work;

/// An attention problem.
#[derive(Clone)]
struct AttentionCase {
    batch: u64,
    kv: u64,
    group: u64,
    queries: u64,
    keys: u64,
    d: u64,
    /// Elements of a head of values, if they differ from `d`.
    values: Option<u64>,
    causal: bool,
    /// Dtype of q, k, v and their gradients.
    dtype: DType,
    window: Option<u32>,
    /// Whether positions are numbers of documents instead, of which a query sees its own.
    documents: bool,
    /// Position of a query and of a key, by its number and how many there are.
    positions: [fn(u64, u64) -> u64; 2],
}

const IN_ORDER: fn(u64, u64) -> u64 = |i, _| i;
const BASE: AttentionCase = AttentionCase {
    batch: 2,
    kv: 2,
    group: 1,
    queries: 20,
    keys: 20,
    d: 16,
    values: None,
    causal: true,
    dtype: DType::F32,
    window: None,
    documents: false,
    positions: [IN_ORDER; 2],
};

struct Parts {
    make: KernelDraft,
    attention: Attention,
    q_dims: Vec<Dim>,
    k_dims: Vec<Dim>,
    v_dims: Vec<Dim>,
    out_dims: Vec<Dim>,
}

fn parts(case: &AttentionCase) -> Parts {
    let mut make = KernelDraft::default();
    let [batch, kv, group] = [("batch", case.batch), ("kv", case.kv), ("group", case.group)].map(|(n, s)| make.dim(n, s));
    let d = make.dim("d", case.d);
    let values = case.values.map_or(d, |size| make.dim("values", size));
    let (at, keys) = (make.dim("at", case.queries), make.dim("keys", case.keys));
    let mut scoring = if case.causal { Scoring::causal(case.window) } else { Scoring::PLAIN };
    if case.documents {
        let [query, key] = [1, 2].map(|n| scoring.step(Op::Input(n), DType::I32, &[]));
        scoring.seen = Some(scoring.step(Op::Compare(Compare::Eq), DType::Bool, &[query, key]));
    }
    let attention = Attention { at, keys, d, values, scale: Real(0.3), scoring };
    Parts {
        make,
        attention,
        q_dims: vec![batch, at, kv, group, d],
        k_dims: vec![batch, keys, kv, d],
        v_dims: vec![batch, keys, kv, values],
        out_dims: vec![batch, at, kv, group, values],
    }
}

/// The last two operands, if there is a mask; the last two inputs of the kernel.
fn position_inputs(make: &mut KernelDraft, a: &Attention) -> Vec<Value> {
    if !a.scoring.is_plain() { [a.at, a.keys].map(|d| make.input(DType::I32, &[d])).to_vec() } else { vec![] }
}

fn forward(case: &AttentionCase) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims, v_dims, .. } = parts(case);
    let q = make.input(case.dtype, &q_dims);
    let (k, v) = (make.input(case.dtype, &k_dims), make.input(case.dtype, &v_dims));
    let positions = position_inputs(&mut make, &attention);
    let out = make.op(Op::Attention(attention.clone()), &[&[q, k, v], &positions[..]].concat());
    let lse = make.op(Op::AttentionLse(attention.without_values()), &[&[q, k], &positions[..]].concat());
    make.kernel(Family::Attention, &[out, lse])
}

fn backward(case: &AttentionCase) -> Kernel {
    let Parts { mut make, attention, q_dims, k_dims, v_dims, out_dims } = parts(case);
    let q = make.input(case.dtype, &q_dims);
    let (k, v) = (make.input(case.dtype, &k_dims), make.input(case.dtype, &v_dims));
    let row_dims = &q_dims[..4];
    let (lse, delta) = (make.input(DType::F32, row_dims), make.input(DType::F32, row_dims));
    let dout = make.input(case.dtype, &out_dims);
    let positions = position_inputs(&mut make, &attention);
    let grads = [(AttentionGrad::Q, q), (AttentionGrad::K, k), (AttentionGrad::V, v)];
    let outputs = grads.map(|(which, of)| {
        let grad = Op::AttentionGrad(attention.clone(), which);
        let ty = make.body[of].ty.clone();
        make.op_as(grad, &[&[q, k, v, lse, delta, dout], &positions[..]].concat(), ty)
    });
    make.kernel(Family::AttentionGrad, &outputs)
}

fn inputs(case: &AttentionCase, kernel: &Kernel) -> Vec<Vec<f64>> {
    let mut inputs = random_inputs(kernel, 4, 1);
    if case.causal || case.documents {
        let first = inputs.len() - 2;
        for (input, (n, position)) in inputs[first..].iter_mut().zip([case.queries, case.keys].into_iter().zip(case.positions)) {
            *input = (0..n).map(|i| position(i, n) as f64).collect();
        }
    }
    inputs
}

/// Scores are sums of as many products, so they differ by more where factors have few bits.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 1e-2,
        DType::F16 => 2e-3,
        DType::F32 | DType::I32 | DType::Bool => 1e-5,
    }
}

/// The inputs of the gradients, with the logarithms that belong to them.
fn backward_inputs(case: &AttentionCase, kernel: &Kernel) -> Vec<Vec<f64>> {
    let mut operands = inputs(case, kernel);
    let first = forward(case);
    let positions = operands.len() - first.inputs.len() + 3;
    let of_forward = [&operands[..3], &operands[positions..]].concat();
    operands[3] = first.run(&of_forward, &[]).swap_remove(1);
    operands
}

fn check_case(case: &AttentionCase) {
    let kernel = forward(case);
    check_with(&kernel, &inputs(case, &kernel), &[], tolerance(case.dtype));
    let kernel = backward(case);
    check_with(&kernel, &backward_inputs(case, &kernel), &[], 3.0 * tolerance(case.dtype));
}

#[test]
fn whole_blocks_agree_with_and_without_a_mask() {
    for causal in [false, true] {
        check_case(&AttentionCase { queries: 128, keys: 128, batch: 1, kv: 1, d: 32, causal, ..BASE });
    }
}

#[test]
fn sizes_that_fill_no_block_and_no_vector_agree() {
    for (queries, keys, d) in [(1, 1, 1), (7, 7, 5), (65, 65, 24), (70, 131, 17), (300, 40, 8)] {
        check_case(&AttentionCase { queries, keys, d, batch: 1, causal: queries == keys, ..BASE });
    }
}

#[test]
fn grouped_queries_share_their_keys() {
    check_case(&AttentionCase { group: 3, queries: 33, keys: 33, ..BASE });
}

#[test]
fn positions_decide_what_a_mask_hides() {
    let backwards = |i: u64, n: u64| n - 1 - i;
    // The positions are those of chunks 1 and 4 of 6, as in zig-zag context parallelism.
    let zig_zag = |i: u64, n: u64| if i < n / 2 { n / 2 + i } else { n / 2 * 3 + i };
    for positions in [[IN_ORDER, backwards], [backwards, IN_ORDER], [|i, _| i + 10, |i, _| i + 3], [zig_zag, IN_ORDER], [|i, _| i / 7, |i, _| i / 5]]
    {
        check_case(&AttentionCase { positions, queries: 140, keys: 150, ..BASE });
    }
    check_case(&AttentionCase { positions: [zig_zag, zig_zag], queries: 128, keys: 128, ..BASE });
}

#[test]
fn a_window_hides_what_is_too_far_back() {
    let zig_zag = |i: u64, n: u64| if i < n / 2 { n / 2 + i } else { n / 2 * 3 + i };
    for window in [1, 64, 65, 1000] {
        check_case(&AttentionCase { window: Some(window), queries: 200, keys: 200, batch: 1, kv: 1, ..BASE });
        check_case(&AttentionCase {
            window: Some(window),
            positions: [zig_zag, IN_ORDER],
            queries: 70,
            keys: 140,
            batch: 1,
            kv: 1,
            group: 2,
            ..BASE
        });
    }
}

#[test]
fn a_query_that_sees_no_key_has_no_result() {
    let case = AttentionCase { positions: [IN_ORDER, |i, _| i + 70], queries: 80, keys: 80, ..BASE };
    let kernel = forward(&case);
    let results = kernel.run(&inputs(&case, &kernel), &[]);
    assert!(results[0][..case.d as usize].iter().all(|x| *x == 0.0) && results[1][0] == f64::NEG_INFINITY);
    check_case(&case);
}

/// Scores reach hundreds. Where they grow from key to key, earlier sums become negligible again and again.
#[test]
fn scores_far_apart_agree() {
    let case = AttentionCase { queries: 70, keys: 300, batch: 1, causal: false, ..BASE };
    let kernel = forward(&case);
    let growing: fn(u64, u64) -> u64 = |key, _| key;
    for size in [growing, |key, keys| keys - 1 - key] {
        let mut inputs = inputs(&case, &kernel);
        inputs[0].iter_mut().for_each(|q| *q *= 20.0);
        for (i, k) in inputs[1].iter_mut().enumerate() {
            *k *= size(i as u64 / (case.kv * case.d), case.keys) as f64 / 50.0;
        }
        check_with(&kernel, &inputs, &[], 1e-3);
    }
}

#[test]
fn heads_wider_than_the_registers_of_a_warp_agree() {
    for d in [96, 260] {
        check_case(&AttentionCase { queries: 9, keys: 35, batch: 1, kv: 1, group: 2, d, ..BASE });
    }
}

#[test]
fn each_result_alone_agrees_and_may_be_added_to_what_is_there() {
    let case = AttentionCase { group: 2, queries: 40, keys: 37, batch: 1, ..BASE };
    let halves = AttentionCase { dtype: DType::F16, d: 64, ..case.clone() };
    for case in [&case, &halves] {
        let (first, second, tolerance) = (forward(case), backward(case), tolerance(case.dtype));
        let both = [(&first, inputs(case, &first), tolerance), (&second, backward_inputs(case, &second), 3.0 * tolerance)];
        for (kernel, inputs, tolerance) in both {
            for output in kernel.outputs.clone() {
                let alone = Kernel { outputs: vec![ir::kernel::Output { accumulate: true, ..output }], ..kernel.clone() };
                check_with(&alone, &inputs, &[], tolerance);
            }
        }
    }
}

/// Base case for tensor cores: 16-bit operands and heads of 64.
const CORES: AttentionCase = AttentionCase { d: 64, dtype: DType::Bf16, batch: 1, kv: 1, ..BASE };

#[test]
fn tensor_cores_agree_with_and_without_a_mask() {
    for (dtype, d) in [(DType::Bf16, 64), (DType::F16, 128)] {
        for (causal, queries, keys) in [(false, 128, 128), (true, 256, 256), (false, 75, 200), (true, 33, 33), (true, 1, 1)] {
            check_case(&AttentionCase { queries, keys, d, dtype, causal, ..CORES });
        }
    }
}

#[test]
fn tensor_cores_share_keys_among_queries_and_skip_what_is_hidden() {
    let zig_zag = |i: u64, n: u64| if i < n / 2 { n / 2 + i } else { n / 2 * 3 + i };
    check_case(&AttentionCase { batch: 2, kv: 2, group: 3, queries: 70, keys: 70, ..CORES });
    check_case(&AttentionCase { group: 2, queries: 150, keys: 130, causal: false, d: 128, ..CORES });
    for (d, window) in [(64, 5), (128, 100)] {
        check_case(&AttentionCase { d, window: Some(window), queries: 300, keys: 300, ..CORES });
        check_case(&AttentionCase { d, window: Some(window), positions: [zig_zag, IN_ORDER], queries: 140, keys: 280, group: 2, ..CORES });
    }
    check_case(&AttentionCase { positions: [|i, _| i / 7, |i, n| (n - 1 - i) / 5], queries: 140, keys: 150, ..CORES });
    // The first queries see nothing.
    check_case(&AttentionCase { positions: [IN_ORDER, |i, _| i + 150], queries: 300, keys: 80, ..CORES });
}

#[test]
fn tensor_cores_need_every_wait_and_barrier() {
    // Each thread block computes two tiles of several key blocks each, some of them hidden and some partial.
    let ordering = ["cp.async.commit", "cp.async.wait", "bar.sync"];
    let masked = AttentionCase { queries: 150, keys: 150, group: 2, ..CORES };
    let plain = AttentionCase { causal: false, ..masked };
    for (case, at_least) in [(masked, 7), (plain, 5)] {
        let (first, second) = (forward(&case), backward(&case));
        every_line_is_needed(&first, "sm_80", &inputs(&case, &first), &ordering, at_least);
        every_line_is_needed(&second, "sm_80", &backward_inputs(&case, &second), &ordering, 2 * at_least - 1);
    }
}

#[test]
fn warpgroups_need_every_arrival_wait_fence_and_barrier() {
    let ordering = ["mbarrier.", "fence.", "bar.sync", "cp.async.bulk", "wgmma.fence", "wgmma.commit", "wgmma.wait"];
    // Each thread block computes two tiles of none, five or seven key blocks, some hidden and some partial. The
    // stages wrap around within a tile.
    let masked = AttentionCase { queries: 300, keys: 1000, group: 2, positions: [|i, _| 5 * i, |i, _| i + 700], ..CORES };
    let plain = AttentionCase { queries: 200, keys: 640, causal: false, d: 128, ..masked };
    for (case, at_least) in [(masked, 36), (plain, 30)] {
        let kernel = forward(&case);
        every_line_is_needed(&kernel, "sm_90a", &inputs(&case, &kernel), &ordering, at_least);
    }
}

#[test]
fn warpgroups_need_every_arrival_wait_fence_and_barrier_for_gradients() {
    let ordering = ["mbarrier.", "fence.", "bar.sync", "cp.async.bulk", "wgmma.fence", "wgmma.commit", "wgmma.wait"];
    // Some thread blocks compute two tiles of keys and then several of queries. Tiles meet no block, a few, or so
    // many that stages wrap around within a tile; some are hidden and some partial.
    let masked = AttentionCase { kv: 3, group: 2, queries: 300, keys: 330, positions: [|i, _| 2 * i, |i, _| i + 260], ..CORES };
    let plain = AttentionCase { queries: 200, causal: false, d: 128, ..masked };
    for (case, at_least) in [(masked, 40), (plain, 40)] {
        let kernel = backward(&case);
        every_line_is_needed(&kernel, "sm_90a", &backward_inputs(&case, &kernel), &ordering, at_least);
    }
}

fn text(kernel: &Kernel, cpu: &str) -> String {
    let compiled = object::compile(kernel, &Target::gpu(cpu), Emit::default()).expect("the kernel compiles");
    String::from_utf8(compiled.object).expect("PTX is text")
}

#[test]
fn the_instructions_of_warpgroups_are_there() {
    for (d, causal, dtype, products, of_gradients) in
        [(64, true, DType::Bf16, 4 + 8, 28), (128, false, DType::F16, 8 + 8, 44), (128, true, DType::Bf16, 8 + 8, 44)]
    {
        let case = AttentionCase { queries: 512, keys: 512, d, causal, dtype, ..CORES };
        // The forward code has each product twice: with the first block of keys and with the others, and with the
        // last block of values and with the others. The backward code has scores and their gradients for two kinds of
        // tiles, and three sums over the rows of a block.
        for (kernel, products) in [(forward(&case), 2 * products), (backward(&case), of_gradients)] {
            let text = text(&kernel, "sm_90a");
            assert!(text.contains("setmaxnreg.inc.sync.aligned.u32 232"), "{text}");
            let Some(assembled) = assembling::assemble(&text, &Target::gpu("sm_90a")) else { return };
            let counts = assembling::ptxas().expect("it assembled").instructions(&assembled.cubin).expect("nvdisasm knows the code");
            assert_eq!(counts.get("HGMMA"), Some(&products), "{counts:?}");
            assert!(counts.contains_key("UTMALDG") && !counts.contains_key("HMMA") && !counts.contains_key("LDGSTS"), "{counts:?}");
        }
    }
}

/// Queries, keys and values lie in one row, as a fused product stores them. The row stride is a multiple of that of
/// heads, but not of that of groups of heads.
#[test]
fn warpgroups_read_heads_out_of_rows_of_queries_keys_and_values() {
    let case = AttentionCase { batch: 2, kv: 2, group: 3, queries: 40, keys: 150, causal: false, ..CORES };
    let (first, second) = (forward(&case), backward(&case));
    let (of_first, of_second) = (inputs(&case, &first), backward_inputs(&case, &second));
    for (mut kernel, inputs, tolerance) in [(first, of_first, tolerance(case.dtype)), (second, of_second, 3.0 * tolerance(case.dtype))] {
        for (input, rows) in kernel.inputs.iter_mut().zip([40, 150, 150]) {
            (input.strides[0], input.strides[1]) = (rows * 10 * 64, 10 * 64);
        }
        assert!(text(&kernel, "sm_90a").contains("cp.async.bulk.tensor.4d"));
        check_with(&kernel, &inputs, &[], tolerance);
    }
}

/// Keys and values have one sequence, as a hop of a ring receives them; the stride of a dim of size 1 may be
/// anything.
#[test]
fn one_sequence_of_a_hop_stays_on_tensor_cores() {
    let case = AttentionCase { batch: 1, kv: 2, group: 3, queries: 40, keys: 150, causal: false, ..CORES };
    let (first, second) = (forward(&case), backward(&case));
    let (of_first, of_second) = (inputs(&case, &first), backward_inputs(&case, &second));
    for (mut kernel, inputs, tolerance) in [(first, of_first, tolerance(case.dtype)), (second, of_second, 3.0 * tolerance(case.dtype))] {
        for input in &mut kernel.inputs[1..3] {
            input.strides[0] = 1;
        }
        assert!(text(&kernel, "sm_80").contains("mma.sync") && text(&kernel, "sm_90a").contains("wgmma"));
        check_with(&kernel, &inputs, &[], tolerance);
    }
}

/// The row stride is no multiple of the head stride, which no tensor map describes.
#[test]
fn warpgroups_leave_what_has_no_tensor_map_to_warps() {
    let case = AttentionCase { kv: 3, queries: 40, keys: 40, ..CORES };
    let (first, second) = (forward(&case), backward(&case));
    let (of_first, of_second) = (inputs(&case, &first), backward_inputs(&case, &second));
    for (mut kernel, inputs, tolerance) in [(first, of_first, tolerance(case.dtype)), (second, of_second, 3.0 * tolerance(case.dtype))] {
        assert!(text(&kernel, "sm_90a").contains("wgmma"));
        kernel.inputs[1].strides[1] = 3 * 64 + 8;
        let text = text(&kernel, "sm_90a");
        assert!(text.contains("mma.sync") && !text.contains("wgmma"), "{text}");
        check_with(&kernel, &inputs, &[], tolerance);
    }
}

#[test]
fn heads_of_any_eight_elements_are_on_tensor_cores_and_spill_nothing() {
    let sizes = [(64, None), (72, None), (80, None), (96, None), (112, None), (128, None), (160, None), (192, None), (192, Some(128)), (256, None)];
    for (d, values) in sizes {
        let case = AttentionCase { queries: 512, keys: 512, group: 2, d, values, dtype: DType::F16, ..CORES };
        for kernel in [forward(&case), backward(&case)] {
            for cpu in ["sm_80", "sm_90a"] {
                let text = text(&kernel, cpu);
                assert!(text.contains("mma.sync") || text.contains("wgmma"), "heads of {d} and {values:?}: {text}");
                assembling::assemble(&text, &Target::gpu(cpu));
            }
        }
    }
}

#[test]
fn the_texts_for_tensor_cores_are_as_they_were() {
    let kernel = forward(&AttentionCase { queries: 128, keys: 128, d: 64, dtype: DType::Bf16, ..BASE });
    for cpu in ["sm_80", "sm_90a"] {
        golden(&format!("attention_bf16_{cpu}.ptx"), &text(&kernel, cpu));
    }
}
