use super::plan::GemmPlan;
use crate::target::Target;
use crate::testing::{KernelDraft, RandomNumbers, check, random_inputs, run_in_calls, seeds};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op, Unary};

/// Which factor has its contracted dim outermost.
#[derive(Clone, Copy)]
struct Layout {
    a_transposed: bool,
    b_transposed: bool,
}

const LAYOUTS: [Layout; 4] = [
    Layout { a_transposed: false, b_transposed: false },
    Layout { a_transposed: false, b_transposed: true },
    Layout { a_transposed: true, b_transposed: false },
    Layout { a_transposed: true, b_transposed: true },
];

fn product(make: &mut KernelDraft, layout: Layout, [m, n, k]: [u64; 3]) -> ([Dim; 2], Value) {
    let [m, n, k] = [("m", m), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
    let a = make.input(DType::F32, &if layout.a_transposed { [k, m] } else { [m, k] });
    let b = make.input(DType::F32, &if layout.b_transposed { [n, k] } else { [k, n] });
    let c = make.op(Op::dot(vec![k]), &[a, b]);
    let c = if layout.a_transposed { make.ordered(c, &[m, n]) } else { c };
    ([m, n], c)
}

fn plain(layout: Layout, sizes: [u64; 3]) -> Kernel {
    let mut make = KernelDraft::default();
    let (_, c) = product(&mut make, layout, sizes);
    make.kernel(Family::Gemm, &[c])
}

#[test]
fn products_of_odd_sizes_agree_in_all_four_layouts() {
    for layout in LAYOUTS {
        for sizes in [[1, 1, 1], [3, 5, 7], [15, 33, 17], [29, 70, 45], [130, 50, 19], [101, 97, 260]] {
            check(&plain(layout, sizes), &[], 1e-5);
        }
    }
}

#[test]
fn several_blocks_of_contracted_elements_add_up() {
    // With few rows, few micro-kernels copy large shares of the next blocks; with a single panel, they copy nothing.
    for sizes in [[105, 40, 1030], [30, 300, 1100], [9, 70, 1030]] {
        for layout in LAYOUTS {
            check(&plain(layout, sizes), &[], 1e-4);
        }
    }
}

#[test]
fn tiles_with_a_panel_more_or_less_cover_the_product() {
    let target = Target::host().expect("invariant: the tests run where kernels do");
    for layout in LAYOUTS {
        // Which sizes have uneven tiles depends on registers and caches of the processor.
        let kernels = [150, 166, 182, 198, 214, 230].map(|columns| plain(layout, [113, columns, 260]));
        let uneven = kernels.iter().find(|kernel| {
            let blocks = GemmPlan::new(kernel, &target).expect("invariant: a product").blocks;
            blocks.panels % blocks.row_tiles != 0 || blocks.column_panels % blocks.column_tiles != 0
        });
        check(uneven.expect("a product with uneven tiles"), &[], 1e-5);
    }
}

/// Ranges of random lengths, the last first, in calls of random lengths, each cut short where `until` says otherwise.
fn random_calls(numbers: &mut RandomNumbers, tiles: u64) -> Vec<[u64; 4]> {
    let (mut ranges, mut begin) = (vec![], 0);
    while begin < tiles {
        let range_end = begin + 1 + numbers.below(tiles - begin);
        let mut until = range_end + numbers.below(tiles - range_end + 1);
        let (mut calls, mut first) = (vec![], begin);
        while first < range_end {
            let most = if numbers.below(2) == 0 { 3 } else { range_end - first };
            let end = first + 1 + numbers.below((range_end - first).min(most));
            until -= numbers.below(until - range_end + 1);
            calls.push([first, end, begin, until]);
            first = end;
        }
        ranges.push(calls);
        begin = range_end;
    }
    ranges.into_iter().rev().flatten().collect()
}

#[test]
fn copies_outlive_calls_and_nothing_depends_on_who_computes_what() {
    let host = Target::host().expect("invariant: the tests run where kernels do");
    let mut reached = [false; 4];
    for (sizes, l2_kib) in [([60, 600, 260], 128), ([400, 300, 260], 128), ([900, 400, 400], 512), ([520, 48, 1100], 1024), ([1040, 100, 1100], 512)]
    {
        let target = Target { l2_bytes: l2_kib << 10, ..host.clone() };
        for layout in LAYOUTS {
            let kernel = plain(layout, sizes);
            let plan = GemmPlan::new(&kernel, &target).expect("invariant: a product");
            let several = plan.passes() != Some(1);
            reached[usize::from(several) * 2 + usize::from(plan.blocks.pack_a)] |= plan.line() > 2 && plan.blocks.parts > 1;
            let inputs = random_inputs(&kernel, 1, 7);
            let want = run_in_calls(&kernel, &target, &inputs, &|tiles| vec![[0, tiles, 0, tiles]]);
            for seed in 0..3 {
                let got = run_in_calls(&kernel, &target, &inputs, &|tiles| random_calls(&mut RandomNumbers::new(seed), tiles));
                assert!(got == want, "{sizes:?}, calls {:?}", random_calls(&mut RandomNumbers::new(seed), plan.tiles() as u64));
            }
        }
    }
    assert_eq!(reached, [true; 4], "lines of tiles that calls divide, of one pass and of several, with the first factor in place and copied");
}

#[test]
fn parts_of_tiles_cover_the_product() {
    let host = Target::host().expect("invariant: the tests run where kernels do");
    for layout in [LAYOUTS[0], LAYOUTS[2]] {
        let kernel = plain(layout, [330, 330, 330]);
        let plan = GemmPlan::new(&kernel, &host).expect("invariant: a product");
        assert!(plan.blocks.parts > 1, "{:?}", plan.blocks);
        check(&kernel, &[], 1e-5);
    }
}

#[test]
fn threads_get_nearly_equal_shares_of_the_models_products() {
    let target = Target { vector_bytes: 64, registers: 32, l2_bytes: 1 << 20, ..Target::x86_64_v3() };
    for sizes in [[2048, 512, 512], [2048, 1536, 512], [2048, 512, 1536], [512, 1536, 2048], [1536, 512, 2048], [2048, 8192, 512], [2048, 384, 8192]]
    {
        for layout in LAYOUTS {
            let plan = GemmPlan::new(&plain(layout, sizes), &target).expect("invariant: a product");
            assert_eq!(plan.tiles() % 8, 0, "{sizes:?}: {:?}", plan.blocks);
            for (threads, percent) in [(3, 5), (6, 5), (12, 10), (16, 10), (24, 15), (32, 10)] {
                let idle = (plan.tiles() + threads - 1) / threads * threads - plan.tiles();
                assert!(100 * idle <= percent * plan.tiles(), "{sizes:?}, {threads} threads: {:?}", plan.blocks);
            }
        }
    }
}

#[test]
fn an_accumulated_product_adds_to_its_output() {
    for sizes in [[20, 40, 30], [105, 40, 1030]] {
        let mut kernel = plain(LAYOUTS[2], sizes);
        kernel.outputs[0].accumulate = true;
        check(&kernel, &[], 1e-4);
    }
}

#[test]
fn bias_activation_residual_and_scale_follow_the_product() {
    for sizes in [[13, 37, 20], [104, 40, 1100]] {
        let mut make = KernelDraft::default();
        let ([m, n], c) = product(&mut make, LAYOUTS[0], sizes);
        let bias = make.input(DType::F32, &[n]);
        let row = make.input(DType::F32, &[m]);
        let residual = make.input(DType::F32, &[m, n]);
        let scale = make.scalar(DType::F32);
        let sum = make.op(Op::Add, &[c, bias]);
        let active = make.op(Op::Unary(Unary::Tanh), &[sum]);
        let scaled = make.op(Op::Binary(Binary::Mul), &[active, row]);
        let scaled = make.op(Op::Binary(Binary::Mul), &[scaled, scale]);
        let out = make.op(Op::Add, &[scaled, residual]);
        let mut kernel = make.kernel(Family::Gemm, &[out, active]);
        kernel.outputs[0].accumulate = true;
        check(&kernel, &[0.5], 1e-4);
    }
}

#[test]
fn an_index_and_a_random_number_in_the_epilogue_count_rows_and_columns() {
    let mut make = KernelDraft::default();
    let ([m, n], c) = product(&mut make, LAYOUTS[0], [20, 40, 9]);
    let column = make.source(Op::Iota(n), DType::I32, &[n]);
    let column = make.op_as(Op::Cast, &[column], ir::graph::Type::new(DType::F32, [n]));
    let uniform = make.source(Op::Uniform { key: 77 }, DType::F32, &[m, n]);
    let (_, _) = (make.scalar(DType::I32), make.scalar(DType::I32));
    let out = make.op(Op::Add, &[c, column, uniform]);
    check(&make.kernel(Family::Gemm, &[out]), &[5.0, 6.0], 1e-5);
}

#[test]
fn an_index_in_the_epilogue_counts_repetitions_too() {
    let mut make = KernelDraft::default();
    let [b, c, m, n, k] = [("b", 3), ("c", 2), ("m", 5), ("n", 20), ("k", 4)].map(|(name, size)| make.dim(name, size));
    let x = make.input(DType::F32, &[b, m, k, c]);
    let w = make.input(DType::F32, &[c, k, b, n]);
    let y = make.op(Op::dot(vec![k]), &[x, w]);
    let y = make.ordered(y, &[b, c, m, n]);
    let uniform = make.source(Op::Uniform { key: 77 }, DType::F32, &[b, c, m, n]);
    let (_, _) = (make.scalar(DType::I32), make.scalar(DType::I32));
    let out = make.op(Op::Add, &[y, uniform]);
    check(&make.kernel(Family::Gemm, &[out]), &[5.0, 6.0], 1e-5);
}

#[test]
fn batch_dims_and_several_dims_of_each_kind_collapse_or_loop() {
    let mut make = KernelDraft::default();
    let [b, s, t, h, d, e, k] = [("b", 3), ("s", 5), ("t", 4), ("h", 2), ("d", 9), ("e", 3), ("k", 6)].map(|(name, size)| make.dim(name, size));
    let x = make.input(DType::F32, &[b, s, t, k, e]);
    let w = make.input(DType::F32, &[b, k, e, h, d]);
    let y = make.op(Op::dot(vec![k, e]), &[x, w]);
    check(&make.kernel(Family::Gemm, &[y]), &[], 1e-5);

    // No single stride walks these storage orders.
    let mut make = KernelDraft::default();
    let [b, s, t, h, d, e, k] = [("b", 3), ("s", 5), ("t", 4), ("h", 2), ("d", 9), ("e", 3), ("k", 6)].map(|(name, size)| make.dim(name, size));
    let x = make.input(DType::F32, &[t, e, b, s, k]);
    let w = make.input(DType::F32, &[h, k, b, e, d]);
    let y = make.op(Op::dot(vec![k, e]), &[x, w]);
    let y = make.ordered(y, &[h, s, d, b, t]);
    check(&make.kernel(Family::Gemm, &[y]), &[], 1e-5);
}

#[test]
fn a_weight_gradient_has_the_weights_layout() {
    let mut make = KernelDraft::default();
    let [batch, seq, hidden, ffn] = [("batch", 3), ("seq", 11), ("hidden", 40), ("ffn", 21)].map(|(n, s)| make.dim(n, s));
    let x = make.input(DType::F32, &[batch, seq, hidden]);
    let dy = make.input(DType::F32, &[batch, seq, ffn]);
    let dw = make.op(Op::dot(vec![batch, seq]), &[dy, x]);
    let dw = make.ordered(dw, &[hidden, ffn]);
    check(&make.kernel(Family::Gemm, &[dw]), &[], 1e-5);
}

#[test]
fn a_strided_view_is_read_and_written_in_place() {
    let mut make = KernelDraft::default();
    let [m, n, k] = [("m", 21), ("n", 34), ("k", 10)].map(|(name, size)| make.dim(name, size));
    let a = make.strided_input(DType::F32, &[m, k], &[40, 2]);
    let b = make.strided_input(DType::F32, &[k, n], &[100, 2]);
    let c = make.op(Op::dot(vec![k]), &[a, b]);
    let mut kernel = make.kernel(Family::Gemm, &[c]);
    kernel.outputs[0].strides = vec![150, 3];
    check(&kernel, &[], 1e-5);
}

#[test]
fn a_dot_without_rows_or_columns_of_its_own_is_a_reduction() {
    let sizes = [("b", 3), ("s", 20), ("h", 37)];
    for over in [vec![0, 1], vec![2], vec![0, 1, 2]] {
        let mut make = KernelDraft::default();
        let dims = sizes.map(|(n, s)| make.dim(n, s));
        let (x, y) = (make.input(DType::F32, &dims), make.input(DType::F32, &dims));
        let over: Vec<Dim> = over.iter().map(|i: &usize| dims[*i]).collect();
        let z = make.op(Op::dot(over), &[x, y]);
        let half = make.number(0.5);
        let w = make.op(Op::Binary(Binary::Mul), &[z, half]);
        let kernel = make.kernel(Family::Gemm, &[w, z]);
        assert!(super::as_loops(&kernel).is_some());
        check(&kernel, &[], 1e-5);
    }
    // The last cases multiply a vector by a matrix.
    for transposed in [false, true] {
        let mut make = KernelDraft::default();
        let [m, k] = [("m", 21), ("k", 50)].map(|(n, s)| make.dim(n, s));
        let a = make.input(DType::F32, &if transposed { [k, m] } else { [m, k] });
        let v = make.input(DType::F32, &[k]);
        let z = make.op(Op::dot(vec![k]), &[v, a]);
        check(&make.kernel(Family::Gemm, &[z]), &[], 1e-5);
    }
}

/// A product of random dims in random storage orders, with a random epilogue.
fn random_product(seed: u64) -> Kernel {
    let mut numbers = RandomNumbers::new(seed);
    let mut make = KernelDraft::default();
    let sizes = [1, 1, 2, 3, 4, 7, 16, 17, 33];
    let some = |make: &mut KernelDraft, name: &str, most: u64, numbers: &mut RandomNumbers| -> Vec<Dim> {
        (0..numbers.below(most + 1)).map(|_| make.dim(name, sizes[numbers.below(9) as usize])).collect()
    };
    let [batch, rows, columns, over] = [("b", 1), ("m", 2), ("n", 2), ("k", 2)].map(|(name, most)| some(&mut make, name, most, &mut numbers));
    let shuffled = |parts: &[&[Dim]], numbers: &mut RandomNumbers| {
        let mut dims = parts.concat();
        for i in (1..dims.len()).rev() {
            dims.swap(i, numbers.below(i as u64 + 1) as usize);
        }
        dims
    };
    let a = make.input(DType::F32, &shuffled(&[&batch, &rows, &over], &mut numbers));
    let b = make.input(DType::F32, &shuffled(&[&batch, &columns, &over], &mut numbers));
    let result = shuffled(&[&batch, &rows, &columns], &mut numbers);
    let dot = make.op(Op::dot(over), &[a, b]);
    let dot = make.ordered(dot, &result);
    let some_dims: Vec<Dim> = result.iter().copied().filter(|_| numbers.below(2) == 0).collect();
    let other = make.input(DType::F32, &shuffled(&[&some_dims], &mut numbers));
    let out = match numbers.below(3) {
        0 => dot,
        1 => make.op(Op::Add, &[dot, other]),
        _ => {
            let product = make.op(Op::Binary(Binary::Mul), &[dot, other]);
            make.op(Op::Unary(Unary::Tanh), &[product])
        }
    };
    let out = make.ordered(out, &result);
    let mut kernel = make.kernel(Family::Gemm, &[out]);
    kernel.outputs[0].accumulate = numbers.below(2) == 0;
    kernel
}

#[test]
fn random_products_agree_with_the_evaluator() {
    for seed in seeds(16) {
        check(&random_product(seed), &[], 2e-5);
    }
}
