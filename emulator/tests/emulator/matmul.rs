//! Matrix products with copies in the background: right in every timing, and wrong in some as soon as any wait, fence
//! or arrival is missing.

use super::{all_options, bytes, reals, upload};
use emulator::{Device, Launch, LaunchError, Options, Statistics, Swizzle, TensorMap};
use half::{bf16, f16};

/// Small integers, so that sums are exact.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|k| ((k * 7919 + seed * 104_729 + k / 13) % 9) as f32 - 4.0).collect()
}

/// `a[m, k] b[n, k]^T`.
fn product(a: &[f32], b: &[f32], m: usize, n: usize) -> Vec<f32> {
    let k = a.len() / m;
    (0..m * n).map(|i| (0..k).map(|x| a[i / n * k + x] * b[i % n * k + x]).sum()).collect()
}

pub const STEPS: usize = 5;

pub fn hopper() -> String {
    let text = include_str!("../kernels/matmul_sm90.ptx");
    let sums: Vec<String> = (0..32).map(|k| format!("%f{k}")).collect();
    let multiply: String = (0..4)
        .map(|k| {
            let next = format!("add.u64 %d5, %d2, {};\nadd.u64 %d6, %d3, {};\n", 2 * k, 2 * k);
            let set = if k == 0 { "" } else { "setp.eq.u32 %p5, 0, 0;\n" };
            format!("{next}{set}wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{}}}, %d5, %d6, %p5, 1, 1, 0, 0;\n", sums.join(", "))
        })
        .collect();
    let store: String = (0..8)
        .flat_map(|j| (0..2).map(move |h| (j, h)))
        .map(|(j, h)| format!("st.shared.v2.f32 [%r17+{}], {{%f{}, %f{}}};\n", 32 * j + 2048 * h, 4 * j + 2 * h, 4 * j + 2 * h + 1))
        .collect();
    text.replace("MULTIPLY_16\n", &multiply).replace("STORE_SUMS\n", &store)
}

/// Runs it on so many blocks, which all compute the same.
pub fn run_hopper(text: &str, blocks: u32, options: Options) -> Result<(Vec<f32>, Statistics), LaunchError> {
    let (a, b) = (numbers(64 * 64 * STEPS, 1), numbers(64 * 64 * STEPS, 2));
    let mut device = Device::new(Options { limit: 1 << 20, ..options });
    let module = device.load(text).unwrap_or_else(|e| panic!("{e}"));
    let mut parameters = vec![];
    for x in [&a, &b] {
        let base = upload(&mut device, &bytes(x, |v| f16::from_f32(v).to_le_bytes()));
        let size = vec![64 * STEPS as u64, 64];
        let map = TensorMap { base, element: 2, size, stride: vec![128 * STEPS as u64], extent: vec![64, 64], swizzle: Swizzle::B128, tf32: false };
        parameters.extend(map.encode().expect("it is sound"));
    }
    let out = device.allocate(64 * 64 * 4);
    parameters.extend(out.to_le_bytes());
    parameters.extend((STEPS as u32).to_le_bytes());
    let launch = Launch { grid: [blocks, 1, 1], threads: [160, 1, 1], shared: 0 };
    let done = device.launch(module.kernel("matmul").expect("it is there"), launch, &parameters)?;
    Ok((reals(&device, out, 64 * 64), done))
}

pub fn run_ampere(text: &str, options: Options) -> Result<(Vec<f32>, Statistics), LaunchError> {
    let (a, b) = (numbers(16 * 16 * STEPS, 1), numbers(8 * 16 * STEPS, 2));
    let mut device = Device::new(Options { limit: 1 << 20, ..options });
    let module = device.load(text).unwrap_or_else(|e| panic!("{e}"));
    let mut parameters = vec![];
    for x in [&a, &b] {
        parameters.extend(upload(&mut device, &bytes(x, |v| bf16::from_f32(v).to_le_bytes())).to_le_bytes());
    }
    let out = device.allocate(16 * 8 * 4);
    parameters.extend(out.to_le_bytes());
    parameters.extend((STEPS as u32).to_le_bytes());
    let launch = Launch { grid: [1, 1, 1], threads: [32, 1, 1], shared: 0 };
    let done = device.launch(module.kernel("matmul").expect("it is there"), launch, &parameters)?;
    Ok((reals(&device, out, 16 * 8), done))
}

type Run = fn(&str, Options) -> Result<(Vec<f32>, Statistics), LaunchError>;

/// Checks that a kernel is right in every timing, and that without any one line that orders something, some timing
/// has a fault or a wrong result.
fn check(text: &str, run: Run, expected: &[f32], ordering: &[&str], at_least: usize) {
    for options in all_options() {
        assert_eq!(run(text, options).unwrap_or_else(|e| panic!("{options:?}: {e}")).0, expected, "{options:?}");
    }
    let lines: Vec<&str> = text.lines().collect();
    let mut tried = 0;
    for (n, line) in lines.iter().enumerate() {
        if !ordering.iter().any(|o| line.trim_start().starts_with(o)) {
            continue;
        }
        tried += 1;
        let without: String = lines.iter().enumerate().filter(|(k, _)| *k != n).map(|(_, l)| format!("{l}\n")).collect();
        // Without its wait, a loop would branch on a predicate that nothing sets, so the branch is left out too.
        let without = match lines.get(n + 1) {
            Some(next) if line.contains("try_wait") => without.replacen(&format!("{next}\n"), "", 1),
            _ => without,
        };
        let found = all_options().into_iter().any(|o| run(&without, o).map_or(true, |(out, _)| out != expected));
        assert!(found, "nothing is found without `{}`", line.trim());
    }
    assert!(tried >= at_least, "only {tried} lines order something");
}

#[test]
fn tensor_copies_and_wgmma() {
    let expected = product(&numbers(64 * 64 * STEPS, 1), &numbers(64 * 64 * STEPS, 2), 64, 64);
    let ordering = ["mbarrier", "fence", "bar.sync", "wgmma.fence", "wgmma.commit", "wgmma.wait", "cp.async.bulk.commit", "cp.async.bulk.wait"];
    check(&hopper(), |text, options| run_hopper(text, 1, options), &expected, &ordering, 15);
}

/// An H100 requires it, although no document says so.
#[test]
fn a_tensor_copy_begins_at_a_multiple_of_16_bytes() {
    let copy = "[%d0, {%r12, %r13}]";
    let shifted = |by: u32| {
        hopper().replacen(
            "cp.async.bulk.tensor.2d.shared::cluster",
            &format!("add.u32 %r12, %r12, {by};\ncp.async.bulk.tensor.2d.shared::cluster"),
            1,
        )
    };
    assert!(hopper().contains(copy));
    for options in all_options() {
        assert!(run_hopper(&shifted(8), 1, options).is_ok(), "8 halves are 16 bytes");
        let error = run_hopper(&shifted(4), 1, options).expect_err("4 halves are 8 bytes");
        assert!(error.to_string().contains("begins at element 4 of a row, which is no multiple of 16 bytes"), "{error}");
    }
}

#[test]
fn asynchronous_copies_and_mma() {
    let expected = product(&numbers(16 * 16 * STEPS, 1), &numbers(8 * 16 * STEPS, 2), 16, 8);
    check(include_str!("../kernels/matmul_sm80.ptx"), run_ampere, &expected, &["cp.async.commit", "cp.async.wait"], 2);
}
