use crate::object::{self, Compiled, Emit};
use crate::target::Target;
use crate::testing::ordering::{every_line_but, every_line_is_needed};
use crate::testing::{KernelDraft, assembling, check_with, golden, random_inputs, run_ptx, with_tf32};
use emulator::{Options, Timing};
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op, Unary};

/// `[m, k]` times `[k, n]`, both perhaps stored the other way round, in f32.
fn product(turned: [bool; 2], sizes: [u64; 3], dtype: DType) -> Kernel {
    negated(turned, sizes, dtype, 0)
}

/// The same, negated so often.
fn negated([a_turned, b_turned]: [bool; 2], [m, n, k]: [u64; 3], dtype: DType, times: usize) -> Kernel {
    let mut make = KernelDraft::default();
    let [m, n, k] = [("m", m), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
    let a = make.input(dtype, &if a_turned { [k, m] } else { [m, k] });
    let b = make.input(dtype, &if b_turned { [n, k] } else { [k, n] });
    let c = make.op_as(Op::dot(vec![k]), &[a, b], ir::graph::Type::new(DType::F32, [m, n]));
    let result = (0..times).fold(c, |x, _| make.op(Op::Unary(Unary::Neg), &[x]));
    make.kernel(Family::Gemm, &[result])
}

/// Such a product of f32 in tf32.
fn rounding(turned: [bool; 2], sizes: [u64; 3]) -> Kernel {
    with_tf32(&product(turned, sizes, DType::F32)).expect("a product of f32")
}

/// Small integers: all sums are exact, in whatever order.
fn integers(kernel: &Kernel) -> Vec<Vec<f64>> {
    let round = |data: Vec<f64>| data.into_iter().map(|x| (x * 4.0).round()).collect();
    random_inputs(kernel, 3, 7).into_iter().map(round).collect()
}

fn compiled(kernel: &Kernel, cpu: &str) -> (Compiled, String) {
    let compiled = object::compile(kernel, &Target::gpu(cpu), Emit::default()).expect("the kernel compiles");
    let text = String::from_utf8(compiled.object.clone()).expect("PTX is text");
    (compiled, text)
}

#[test]
fn asynchronous_copies_need_every_wait_and_barrier() {
    // Each thread block computes two tiles, with more steps than stages and partial tiles at all edges.
    for (kernel, at_least) in [(product([false, false], [100, 72, 200], DType::Bf16), 8), (product([false, true], [100, 70, 75], DType::F32), 7)] {
        let inputs = integers(&kernel);
        check_with(&kernel, &inputs, &[], 0.0);
        every_line_is_needed(&kernel, "sm_80", &inputs, &["cp.async.commit", "cp.async.wait", "bar.sync"], at_least);
    }
    // The tf32 cases have lines of rows and columns, lines of contracted elements, and the latter on a GPU whose
    // `wgmma` cannot transpose them. With nine steps, the last stage lies where sums are put.
    for (turned, cpu) in [([false, true], "sm_80"), ([true, false], "sm_80"), ([true, false], "sm_90a")] {
        let kernel = rounding(turned, [100, 72, 132]);
        every_line_is_needed(&kernel, cpu, &integers(&kernel), &["cp.async.commit", "cp.async.wait", "bar.sync"], 8);
    }
}

/// The sums over an expert's rows of products of `[rows, m]` and `[rows, n]`, negated so often.
fn gradient([rows, experts, m, n]: [u64; 4], times: usize) -> Kernel {
    let mut make = KernelDraft::default();
    let [rows, experts, m, n] = [("rows", rows), ("experts", experts), ("m", m), ("n", n)].map(|(name, size)| make.dim(name, size));
    let a = make.input(DType::Bf16, &[rows, m]);
    let b = make.input(DType::Bf16, &[rows, n]);
    let ends = make.input(DType::I32, &[experts]);
    let dot = Op::grouped_dot(rows, experts, vec![rows]);
    let c = make.op_as(dot, &[a, b, ends], ir::graph::Type::new(DType::F32, [experts, m, n]));
    let result = (0..times).fold(c, |x, _| make.op(Op::Unary(Unary::Neg), &[x]));
    make.kernel(Family::Gemm, &[result])
}

/// Rows times the factor of their expert, negated so often.
fn of_experts([rows, experts, n, k]: [u64; 4], times: usize) -> Kernel {
    let mut make = KernelDraft::default();
    let [rows, experts, n, k] = [("rows", rows), ("experts", experts), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
    let a = make.input(DType::Bf16, &[rows, k]);
    let b = make.input(DType::Bf16, &[experts, n, k]);
    let ends = make.input(DType::I32, &[experts]);
    let c = make.op_as(Op::grouped_dot(rows, experts, vec![experts, k]), &[a, b, ends], ir::graph::Type::new(DType::F32, [rows, n]));
    let result = (0..times).fold(c, |x, _| make.op(Op::Unary(Unary::Neg), &[x]));
    make.kernel(Family::Gemm, &[result])
}

/// A product whose first factor has no tensor map: its two repetitions are a distance apart that is no multiple of
/// the row stride.
fn apart([m, n, k]: [u64; 3]) -> Kernel {
    let mut make = KernelDraft::default();
    let [b, m, n, k] = [("b", 2), ("m", m), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
    let sizes = [m, k].map(|d| make.body.dims.size(d));
    let x = make.strided_input(DType::Bf16, &[b, m, k], &[sizes[0] * sizes[1] + 8, sizes[1], 1]);
    let w = make.input(DType::Bf16, &[b, k, n]);
    let y = make.op_as(Op::dot(vec![k]), &[x, w], ir::graph::Type::new(DType::F32, [b, m, n]));
    make.kernel(Family::Gemm, &[y])
}

#[test]
fn warpgroups_that_copy_need_every_wait_fence_and_barrier() {
    let ordering = ["cp.async.commit", "cp.async.wait", "bar.sync", "fence.proxy", "wgmma.fence", "wgmma.commit", "wgmma.wait"];
    let kernel = apart([104, 72, 400]);
    every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &ordering, 12);
    // The product is so large that a tile has two warpgroups. With five steps, sums lie over the last stage.
    let kernel = apart([520, 520, 304]);
    every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &["bar.sync"], 4);
}

#[test]
fn rings_need_every_arrival_wait_fence_and_barrier() {
    let ordering =
        ["mbarrier.", "fence.", "bar.sync", "barrier.cluster", "st.shared::cluster", "cp.async.bulk", "wgmma.fence", "wgmma.commit", "wgmma.wait"];
    // Each thread block computes several tiles, with more steps than stages and partial tiles at all edges; factors
    // come in boxes of rows, then of contracted elements. One wait is spare: the thread that has copied such a tile
    // knows that the others began it, and so have read its number.
    // Those with two rows of tiles are computed by clusters, those with three are not.
    for (turned, rows, is_cluster) in [([false, true], 104, true), ([true, false], 104, true), ([true, false], 136, false)] {
        let kernel = product(turned, [rows, 72, 400], DType::Bf16);
        assert_eq!(compiled(&kernel, "sm_90a").1.contains(".reqnctapercluster 2"), is_cluster);
        every_line_but(&kernel, "sm_90a", &integers(&kernel), &ordering, 20, 1);
    }
    for rows in [104, 136] {
        let kernel = rounding([false, true], [rows, 72, 200]);
        every_line_but(&kernel, "sm_90a", &integers(&kernel), &ordering, 20, 1);
    }
    // The wait is needed where tiles have no more steps than there are stages.
    let kernel = product([false, true], [104, 72, 304], DType::Bf16);
    every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &["mbarrier.try_wait"], 4);
    // The products are so large that a block has two warpgroups: for a tile together, or, where much is done with the
    // result, for a tile each in turns. There are more steps than stages, and fewer.
    for (negations, depth, tiles) in [(0, 400, 36), (30, 600, 72), (30, 152, 72)] {
        let kernel = negated([false, true], [768, 768, depth], DType::Bf16, negations);
        assert_eq!(compiled(&kernel, "sm_90a").0.shape.tiles, tiles);
        every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &["mbarrier.arrive", "mbarrier.try_wait", "wgmma.wait"], 6);
    }
    // The last of two experts ends within a stage. The two lines after its end are nobody's and NaN.
    let kernel = gradient([592, 2, 104, 72], 0);
    let mut inputs = integers(&kernel);
    inputs[2] = vec![300.0, 590.0];
    inputs.iter_mut().take(2).for_each(|data| {
        let line = data.len() / 592;
        data[590 * line..].fill(f64::NAN);
    });
    every_line_is_needed(&kernel, "sm_90a", &inputs, &["bar.sync", "fence.proxy", "mbarrier.arrive"], 5);
}

/// Both blocks of a cluster, and both teams of a block, go through the same experts, whoever has their rows.
#[test]
fn rings_of_experts_need_every_arrival_and_wait() {
    let ordering = ["mbarrier.arrive", "mbarrier.try_wait", "barrier.cluster", "bar.sync", "fence.proxy"];
    // The rows of an expert end within a tile, and those of the last one within the first tile of a pair. Elements that
    // the last one has not are NaN.
    let cases = [
        (of_experts([2130, 2, 72, 104], 0), vec![900.0, 1990.0], false),
        (of_experts([1100, 1, 768, 152], 30), vec![1000.0], true),
        (gradient([592, 2, 768, 384], 30), vec![300.0, 590.0], true),
    ];
    for (kernel, ends, in_turns) in cases {
        let (compiled, text) = compiled(&kernel, "sm_90a");
        assert!(text.contains(".reqnctapercluster 2"), "{text}");
        assert_eq!(compiled.launch.as_ref().expect("a launch").block, if in_turns { 384 } else { 256 });
        let mut inputs = integers(&kernel);
        let rows = kernel.inputs[0].ty.dims[0];
        let last = *ends.last().expect("an expert") as usize;
        for (slot, data) in inputs.iter_mut().enumerate().take(2).filter(|(slot, _)| kernel.inputs[*slot].ty.dims[0] == rows) {
            let line = data.len() / kernel.body.dims.size(rows) as usize;
            assert!(last * line < data.len(), "of input {slot}");
            data[last * line..].fill(f64::NAN);
        }
        inputs[2] = ends;
        check_with(&kernel, &inputs, &[], 0.0);
        every_line_is_needed(&kernel, "sm_90a", &inputs, &ordering, 10);
    }
}

#[test]
fn large_products_have_tiles_that_fill_the_card() {
    // Both products have two rows of tiles: 200 tiles of 256 columns take two waves of the card, 132 tiles of 192
    // columns take one. Where more is done with the result, each tile is cut in two, for warpgroups in turns.
    let (many, few) = ([136, 25600, 72], [136, 12664, 72]);
    let (many_turns, few_turns) = ([200, 25600, 72], [200, 12664, 200]);
    let kernels = [
        (negated([false, true], many_turns, DType::F16, 4), many_turns, 256, [false, true], Timing::Random),
        (with_tf32(&negated([false, true], many_turns, DType::F32, 8)).expect("f32"), many_turns, 256, [false, true], Timing::Early),
        (negated([true, false], few_turns, DType::Bf16, 4), few_turns, 192, [true, false], Timing::Late),
        (product([false, true], many, DType::F16), many, 256, [false, true], Timing::Late),
        (product([true, false], many, DType::F16), many, 256, [true, false], Timing::Early),
        (rounding([false, true], many), many, 256, [false, true], Timing::Late),
        (product([false, true], few, DType::Bf16), few, 192, [false, true], Timing::Late),
        (product([true, false], few, DType::Bf16), few, 192, [true, false], Timing::Random),
        (rounding([false, true], few), few, 192, [false, true], Timing::Early),
    ];
    for (kernel, sizes, columns, turned, timing) in kernels {
        let (compiled, text) = compiled(&kernel, "sm_90a");
        let depth = 32 / kernel.inputs[0].ty.dtype.bytes();
        assert!(text.contains(&format!("m64n{columns}k{depth}")) && text.contains("setmaxnreg.inc.sync.aligned.u32 232"), "{text}");
        let rows = if sizes[0] == 200 { 4 } else { 2 };
        assert_eq!(compiled.shape.tiles, rows * sizes[1].div_ceil(columns) / 2, "tiles of two blocks of a cluster");
        let inputs = integers(&kernel);
        let options = Options { timing, ..Options::default() };
        let got = run_ptx(&kernel, &compiled, &text, options, &inputs, &[], f64::NAN).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let [m, n, k] = sizes.map(|x| x as usize);
        let a = |i: usize, l: usize| inputs[0][if turned[0] { l * m + i } else { i * k + l }];
        let b = |l: usize, j: usize| inputs[1][if turned[1] { j * k + l } else { l * n + j }];
        for (i, row) in got[0].chunks_exact(n).enumerate() {
            for (j, x) in row.iter().enumerate().step_by(7) {
                assert_eq!(*x, (0..k).map(|l| a(i, l) * b(l, j)).sum::<f64>(), "at {i}, {j}");
            }
        }
        assembling::assemble(&text, &Target::gpu("sm_90a"));
    }
}

#[test]
fn tensor_cores_multiply_all_layouts_and_sizes_of_tiles() {
    for turned in [[false, false], [false, true], [true, false], [true, true]] {
        // The sizes give tiles of 64 x 64, and of 128 x 128 with and without partial ones, and units that are
        // aligned, partly aligned or not at all.
        for sizes in [[72, 80, 40], [136, 128, 64], [256, 128, 96], [65, 66, 35]] {
            let kernel = product(turned, sizes, DType::F16);
            check_with(&kernel, &integers(&kernel), &[], 0.0);
        }
        // The tf32 products have the same variety.
        for sizes in [[72, 80, 40], [136, 128, 64], [65, 66, 35]] {
            let kernel = product(turned, sizes, DType::F32);
            check_with(&kernel, &integers(&kernel), &[], 0.0);
        }
    }
}

/// Rows and columns at multiples of 16 bytes, so that factors have tensor maps and lanes of the epilogue runs of
/// columns.
#[test]
fn rings_go_through_repetitions_of_rows_and_of_contracted_elements() {
    let mut make = KernelDraft::default();
    let [b, s, n, e, k] = [("b", 3), ("s", 40), ("n", 72), ("e", 2), ("k", 88)].map(|(name, size)| make.dim(name, size));
    let x = make.input(DType::Bf16, &[e, b, s, k]);
    let w = make.input(DType::Bf16, &[b, e, k, n]);
    let y = make.op_as(Op::dot(vec![e, k]), &[x, w], ir::graph::Type::new(DType::F32, [b, s, n]));
    let kernel = make.kernel(Family::Gemm, &[y]);
    assert!(compiled(&kernel, "sm_90a").1.contains("cp.async.bulk.tensor.4d"));
    check_with(&kernel, &integers(&kernel), &[], 0.0);
}

#[test]
fn epilogues_of_rings_take_runs_of_columns() {
    // Some products end within a tile, and rows of 90 columns are not aligned to runs.
    for (factor, [m, n, k], dtype, accumulate) in [
        (DType::Bf16, [64, 128, 64], DType::Bf16, false),
        (DType::Bf16, [72, 104, 40], DType::F16, false),
        (DType::Bf16, [64, 64, 64], DType::F32, true),
        (DType::Bf16, [72, 84, 40], DType::F32, true),
        (DType::Bf16, [40, 90, 40], DType::Bf16, true),
        (DType::F32, [72, 84, 40], DType::F32, true),
        (DType::F32, [40, 90, 40], DType::Bf16, false),
    ] {
        let mut make = KernelDraft::default();
        let [m, n, k] = [("m", m), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
        let (a, b) = (make.input(factor, &[m, k]), make.input(factor, &[n, k]));
        let c = make.op_as(Op::dot(vec![k]), &[a, b], ir::graph::Type::new(DType::F32, [m, n]));
        let (bias, row) = (make.input(DType::Bf16, &[n]), make.input(DType::F32, &[m]));
        let (residual, keep) = (make.input(DType::F32, &[m, n]), make.input(DType::Bool, &[m, n]));
        let uniform = make.source(Op::Uniform { key: 77 }, DType::F32, &[m, n]);
        let (_, _) = (make.scalar(DType::I32), make.scalar(DType::I32));
        let bias = make.op_as(Op::Cast, &[bias], ir::graph::Type::new(DType::F32, [n]));
        let sum = make.op(Op::Add, &[c, bias, uniform]);
        let scaled = make.op(Op::Binary(Binary::Mul), &[sum, row]);
        let kept = make.op(Op::Select, &[keep, scaled, residual]);
        let out = make.op_as(Op::Cast, &[kept], ir::graph::Type::new(dtype, [m, n]));
        let mut kernel = make.kernel(Family::Gemm, &[out, sum]);
        kernel.outputs[0].accumulate = accumulate;
        check_with(&kernel, &integers(&kernel), &[5.0, 6.0], if dtype.is_half() { 0.01 } else { 1e-5 });
        let text = compiled(&with_tf32(&kernel).unwrap_or_else(|| kernel.clone()), "sm_90a").1;
        assert!(text.contains("cp.async.bulk.tensor"), "{text}");
        // The widest output is f32, so lanes store four columns where the rows allow it.
        assert_eq!(text.contains("st.global.v4.b32"), kernel.body.dims.size(n).is_multiple_of(4), "{text}");
    }
}

/// Rows that begin anywhere, as those of a shard may.
#[test]
fn factors_that_are_not_aligned_are_collected_by_element() {
    let halves = product([false, false], [40, 48, 40], DType::Bf16);
    let [own, contracted] = [[false, true], [true, false]].map(|turned| rounding(turned, [40, 48, 40]));
    for (kernel, cpu, shift) in [
        (&halves, "sm_80", 2),
        (&halves, "sm_80", 8),
        (&halves, "sm_90a", 14),
        (&own, "sm_80", 4),
        (&contracted, "sm_80", 8),
        (&own, "sm_90a", 12),
        (&contracted, "sm_90a", 4),
    ] {
        let mut kernel = kernel.clone();
        kernel.inputs.iter_mut().for_each(|i| i.unaligned = true);
        let (compiled, text) = compiled(&kernel, cpu);
        let inputs = integers(&kernel);
        let want = kernel.run(&inputs, &[]);
        let got = crate::testing::run_ptx_shifted(
            &kernel,
            &compiled,
            &text,
            Options { threads: 1, ..Options::default() },
            &inputs,
            &[],
            f64::NAN,
            [shift, 0],
        );
        assert_eq!(got.unwrap_or_else(|e| panic!("{e}\n{text}")).0, want, "{shift} bytes");
    }
}

#[test]
fn the_instructions_of_tensor_cores_are_there() {
    let halves = product([false, true], [128, 128, 64], DType::Bf16);
    let [own, contracted] = [[false, true], [true, false]].map(|turned| rounding(turned, [128, 128, 64]));
    for (kernel, cpu, names) in [
        (&halves, "sm_80", ["HMMA", "LDGSTS", "LDSM"].as_slice()),
        (&halves, "sm_90a", &["HGMMA", "UTMALDG"]),
        (&own, "sm_80", &["HMMA", "LDGSTS", "LDSM"]),
        (&own, "sm_90a", &["HGMMA", "UTMALDG"]),
        (&contracted, "sm_80", &["HMMA", "LDGSTS", "LDS"]),
        (&contracted, "sm_90a", &["HMMA", "LDGSTS", "LDS"]),
    ] {
        let (_, text) = compiled(kernel, cpu);
        let Some(assembled) = assembling::assemble(&text, &Target::gpu(cpu)) else { return };
        let counts = assembling::ptxas().expect("it assembled").instructions(&assembled.cubin).expect("nvdisasm knows the code");
        for name in names {
            assert!(counts.get(*name).is_some_and(|n| *n > 0), "{name} in {counts:?}");
        }
    }
}

#[test]
fn texts_are_as_they_were() {
    let mut make = KernelDraft::default();
    let [m, n, k] = [("m", 64), ("n", 64), ("k", 64)].map(|(name, size)| make.dim(name, size));
    let (a, b, bias) = (make.input(DType::Bf16, &[m, k]), make.input(DType::Bf16, &[n, k]), make.input(DType::F32, &[n]));
    let c = make.op_as(Op::dot(vec![k]), &[a, b], ir::graph::Type::new(DType::F32, [m, n]));
    let sum = make.op(Op::Add, &[c, bias]);
    let out = make.op(Op::Unary(Unary::Abs), &[sum]);
    let kernel = make.kernel(Family::Gemm, &[out]);
    for cpu in ["sm_80", "sm_90a"] {
        golden(&format!("gemm_bf16_{cpu}.ptx"), &compiled(&kernel, cpu).1);
    }
}
