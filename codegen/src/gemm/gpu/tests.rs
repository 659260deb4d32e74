use crate::object::{self, Compiled, Emit};
use crate::target::Target;
use crate::testing::ordering::every_line_is_needed;
use crate::testing::{Make, assembling, check_with, golden, random_inputs};
use emulator::Options;
use ir::kernel::{Family, Kernel};
use ir::op::{DType, Op, Unary};

/// `[m, k]` times `[k, n]`, both perhaps stored the other way round, in f32.
fn product([a_turned, b_turned]: [bool; 2], [m, n, k]: [u64; 3], dtype: DType) -> Kernel {
    let mut make = Make::default();
    let [m, n, k] = [("m", m), ("n", n), ("k", k)].map(|(name, size)| make.dim(name, size));
    let a = make.input(dtype, &if a_turned { [k, m] } else { [m, k] });
    let b = make.input(dtype, &if b_turned { [n, k] } else { [k, n] });
    let c = make.op_as(Op::Dot { over: vec![k] }, &[a, b], ir::graph::Type::new(DType::F32, [m, n]));
    make.kernel(Family::Gemm, &[c])
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
    // Two tiles for a block, more steps than stages, edges everywhere.
    for (kernel, at_least) in [(product([false, false], [100, 72, 200], DType::Bf16), 8), (product([false, true], [100, 70, 75], DType::F32), 7)] {
        let inputs = integers(&kernel);
        check_with(&kernel, &inputs, &[], 0.0);
        every_line_is_needed(&kernel, "sm_80", &inputs, &["cp.async.commit", "cp.async.wait", "bar.sync"], at_least);
    }
}

#[test]
fn warpgroups_need_every_wait_fence_and_barrier() {
    let ordering = ["cp.async.commit", "cp.async.wait", "bar.sync", "fence.proxy", "wgmma.fence", "wgmma.commit", "wgmma.wait"];
    let kernel = product([false, false], [100, 72, 400], DType::Bf16);
    every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &ordering, 12);
    // So many tiles that one has two warpgroups; five steps, so that the last stage lies where sums are put.
    let kernel = product([false, true], [704, 704, 300], DType::Bf16);
    every_line_is_needed(&kernel, "sm_90a", &integers(&kernel), &["bar.sync"], 4);
}

#[test]
fn tensor_cores_multiply_all_layouts_and_sizes_of_tiles() {
    for turned in [[false, false], [false, true], [true, false], [true, true]] {
        // Tiles of 64 x 64, and of 128 x 128 with and without edges; units aligned, in part, not at all.
        for sizes in [[72, 80, 40], [136, 128, 64], [256, 128, 96], [65, 66, 35]] {
            let kernel = product(turned, sizes, DType::F16);
            check_with(&kernel, &integers(&kernel), &[], 0.0);
        }
    }
}

/// Rows that begin anywhere, as those of a shard may.
#[test]
fn factors_that_are_not_aligned_are_collected_by_element() {
    let kernel = product([false, false], [40, 48, 40], DType::Bf16);
    for (cpu, shift) in [("sm_80", 2), ("sm_80", 8), ("sm_90a", 14)] {
        let (compiled, text) = compiled(&kernel, cpu);
        let inputs = integers(&kernel);
        let want = kernel.run(&inputs, &[]);
        let got =
            crate::testing::run_ptx_shifted(&kernel, &compiled, &text, Options { threads: 1, ..Options::default() }, &inputs, &[], f64::NAN, shift);
        assert_eq!(got.unwrap_or_else(|e| panic!("{e}\n{text}")), want, "{shift} bytes");
    }
}

#[test]
fn the_instructions_of_tensor_cores_are_there() {
    for (cpu, names) in [("sm_80", ["HMMA", "LDGSTS", "LDSM"].as_slice()), ("sm_90a", &["HGMMA", "LDGSTS"])] {
        let (_, text) = compiled(&product([false, true], [128, 128, 64], DType::Bf16), cpu);
        let Some(assembled) = assembling::assemble(&text, &Target::gpu(cpu)) else { return };
        let counts = assembling::ptxas().expect("it assembled").instructions(&assembled.cubin).expect("nvdisasm knows the code");
        for name in names {
            assert!(counts.get(*name).is_some_and(|n| *n > 0), "{name} in {counts:?}");
        }
    }
}

#[test]
fn texts_are_as_they_were() {
    let mut make = Make::default();
    let [m, n, k] = [("m", 64), ("n", 64), ("k", 64)].map(|(name, size)| make.dim(name, size));
    let (a, b, bias) = (make.input(DType::Bf16, &[m, k]), make.input(DType::Bf16, &[n, k]), make.input(DType::F32, &[n]));
    let c = make.op_as(Op::Dot { over: vec![k] }, &[a, b], ir::graph::Type::new(DType::F32, [m, n]));
    let sum = make.op(Op::Add, &[c, bias]);
    let out = make.op(Op::Unary(Unary::Abs), &[sum]);
    let kernel = make.kernel(Family::Gemm, &[out]);
    for cpu in ["sm_80", "sm_90a"] {
        golden(&format!("gemm_bf16_{cpu}.ptx"), &compiled(&kernel, cpu).1);
    }
}
