//! Artifacts for GPUs, run in the emulator: the PTX, parameters and launches that a GPU would get, several ranks.

use crate::mcc::{Dir, load_weights, metrics, save_array};

const MLP: &str = "compile {models}/mlp.mdl --micro-batch-size 4 -D features=12 -D hidden=16 -D classes=4";

/// Vectors and labels for four steps of two microbatches.
fn data(dir: &Dir) {
    let mut x = 7u32;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        x >> 8
    };
    save_array(&dir.path("x.npy"), &[4, 8, 12], (0..4 * 8 * 12).map(|_| next() as f32 / (1 << 23) as f32 - 1.0));
    save_array(&dir.path("label.npy"), &[4, 8], (0..4 * 8).map(|_| (next() % 4) as i32));
}

/// Losses and gradient norms of all steps, and the trained weights, of a model compiled with `flags`.
fn train(dir: &Dir, compile: &str, run: &str, target: &str) -> Vec<f64> {
    let device = if target == "cpu" { "cpu" } else { "emulated" };
    dir.line(&format!("{compile} --target {target} -o {target}.mcc")).succeeds();
    dir.line(&format!("run {target}.mcc --device {device} {run} --metrics m.jsonl --save w.safetensors")).succeeds();
    let steps = metrics(&dir.path("m.jsonl"));
    let reports = steps.iter().flat_map(|s| ["loss", "grad_norm"].map(|n| s[n].as_f64().expect("a number")));
    let weights = load_weights(&dir.path("w.safetensors"));
    reports.chain(weights.values().flat_map(|w| w.1.iter().map(|x| f64::from(*x)))).collect()
}

/// Trains on the CPU and in the emulator, and holds all numbers to each other within 1e-4 of their size, or of 1.
fn agree(dir: &Dir, compile: &str, run: &str, targets: &[&str]) {
    agree_within(dir, compile, run, targets, 1e-4);
}

fn agree_within(dir: &Dir, compile: &str, run: &str, targets: &[&str], tolerance: f64) {
    let want = train(dir, compile, run, "cpu");
    for target in targets {
        let got = train(dir, compile, run, target);
        assert_eq!(got.len(), want.len());
        for (k, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!((g - w).abs() <= tolerance * w.abs().max(1.0), "{target}, number {k}: {g}, not {w}");
        }
    }
}

#[test]
fn emulated_ranks_train_as_cpus_do() {
    let dir = Dir::new();
    data(&dir);
    agree(&dir, &format!("{MLP} --tp 2 --pp 2"), "--data x=x.npy --data label=label.npy", &["sm_80", "sm_90a"]);
}

#[test]
fn emulated_ranks_train_transformers_as_cpus_do() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let tiny = "--tp 2 --pp 2 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3";
    let run = "--data text.txt --steps 2";
    agree(&dir, &format!("compile {{models}}/gpt2.mdl {tiny}"), run, &["sm_80"]);
    agree(&dir, &format!("compile {{models}}/llama.mdl {tiny} -D kv_heads=2 -D ffn=32"), run, &["sm_90a"]);
}

/// In bf16, where factors have tensor maps, which the launch of each kernel gets from the device.
#[test]
fn emulated_ranks_copy_by_tensor_maps() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let compile = "compile {models}/gpt2.mdl --bf16 -D vocab=256 -D hidden=16 -D heads=2 -D layers=1 -D seq=8 --lr 1e-3";
    agree_within(&dir, compile, "--data text.txt --steps 2", &["sm_90a"], 0.02);
    let ptx = dir.line("dump sm_90a.mcc --level ptx").succeeds().stdout;
    assert!(ptx.contains("cp.async.bulk.tensor.2d"), "{ptx}");
}

#[test]
fn a_machine_without_a_gpu_says_so() {
    let dir = Dir::new();
    data(&dir);
    dir.line(&format!("{MLP} --target sm_80 -o gpu.mcc")).succeeds();
    let ran = dir.line("run gpu.mcc --data x=x.npy --data label=label.npy --steps 1");
    match runtime::gpu::cuda::probe() {
        Ok(_) => drop(ran.succeeds()),
        Err(e) => drop(ran.fails_with(&["`gpu.mcc` is compiled for GPUs (sm_80), but", &e.to_string(), "--device emulated"])),
    }
}

#[test]
fn an_artifact_runs_only_where_it_can() {
    let dir = Dir::new();
    data(&dir);
    dir.line(&format!("{MLP} -o cpu.mcc")).succeeds();
    dir.line(&format!("{MLP} --target sm_80 -o gpu.mcc")).succeeds();
    let run = |what: &str| dir.line(&format!("run {what} --data x=x.npy --data label=label.npy"));
    run("gpu.mcc --device cpu").fails_with(&["`gpu.mcc` is compiled for GPUs (sm_80), which the device `cpu` does not run", "cuda or emulated does"]);
    run("cpu.mcc --device emulated").fails_with(&["`cpu.mcc` is compiled for the CPU", "which the device `emulated` does not run: cpu does"]);
    run("gpu.mcc --device emulated --exchanges nccl").fails_with(&["cannot exchange through NCCL: GPUs do, the device `emulated` does not"]);
    dir.line("dump cpu.mcc --level ptx").fails_with(&["has no PTX: compile with --target sm_80 or sm_90a"]);
    dir.line(&format!("{MLP} --target sm_1")).fails_with(&["unknown target `sm_1`", "sm_90a"]);
}

#[test]
fn ptx_is_shown_below_the_lines_of_the_model() {
    let dir = Dir::new();
    let compiled = dir.line(&format!("{MLP} --target sm_90a --emit ptx -o gpu.mcc")).succeeds().stdout;
    assert!(compiled.contains("scratch") || compiled.contains("temporary"), "{compiled}");
    let text = dir.line("dump gpu.mcc --level ptx").succeeds().stdout;
    for part in ["blocks of 128 threads", "models/mlp.mdl:7:3: dot of first\n", ".target sm_90a", ".visible .entry k_"] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
}
