//! The same command gives the same bits.

use crate::mcc::Dir;
use std::fs;

const COMPILE: &str =
    "compile {models}/gpt2.mdl --dp 2 --tp 2 --pp 2 --sp --global-batch-size 8 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16 --lr 1e-2";

/// The weights and the losses that a run leaves, as bytes.
fn trained(dir: &Dir, flags: &str) -> (Vec<u8>, Vec<(String, String)>) {
    dir.line(&format!("run out.mcc --data text.txt --steps 3 --force --save-weights w.safetensors --metrics m.jsonl {flags}")).succeeds();
    let losses = crate::mcc::metrics(&dir.path("m.jsonl")).iter().map(|m| (m["loss"].to_string(), m["grad_norm"].to_string())).collect();
    (fs::read(dir.path("w.safetensors")).expect("weights"), losses)
}

#[test]
fn two_runs_give_the_same_bits_with_any_number_of_threads() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.line(&format!("{COMPILE} -o out.mcc")).succeeds();
    let first = trained(&dir, "--threads-per-rank 1");
    assert!(first == trained(&dir, "--threads-per-rank 1"), "a second run differs");
    assert!(first == trained(&dir, "--threads-per-rank 3"), "three threads differ from one");
    assert!(first != trained(&dir, "--threads-per-rank 1 --seed 1"), "the seed makes no difference");
}

/// An evaluation has its memory where a step keeps what its backward passes need.
#[test]
fn an_evaluation_before_each_step_changes_no_bit_of_it() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    for flags in ["", "--pp 2 --micro-batch-size 1"] {
        dir.line(&format!("compile {{models}}/gpt2.mdl --global-batch-size 2 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16 --lr 1e-2 {flags} -o out.mcc"))
            .succeeds();
        assert!(trained(&dir, "") == trained(&dir, "--valid-data text.txt --eval-interval 1 --eval-iters 2"), "{flags}");
    }
}

#[test]
fn two_compiles_give_the_same_artifact() {
    let dir = Dir::new();
    dir.line(&format!("{COMPILE} -o a.mcc")).succeeds();
    dir.line(&format!("{COMPILE} -o b.mcc --no-cache")).succeeds();
    for file in ["manifest.json", "job.bin", "kernels.so"] {
        let read = |artifact: &str| fs::read(dir.path(artifact).join(file)).expect("part of an artifact");
        assert!(read("a.mcc") == read("b.mcc"), "{file} differs");
    }
}

#[test]
fn weights_saved_on_one_mesh_go_on_on_another() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.line(&format!("{COMPILE} -o out.mcc")).succeeds();
    let (saved, _) = trained(&dir, "");
    dir.line("compile {models}/gpt2.mdl -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16 -o one.mcc").succeeds();
    dir.line("run one.mcc --data text.txt --steps 0 --init w.safetensors --save-weights again.safetensors").succeeds();
    assert!(saved == fs::read(dir.path("again.safetensors")).expect("weights"), "loading and saving changes weights");
}

/// All that layers keep, or what some functions compute, on any mesh and by any schedule.
#[test]
fn activations_on_the_host_give_the_same_bits() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    let compile = "compile {models}/llama.mdl --global-batch-size 8 -D vocab=256 -D hidden=16 -D heads=4 -D kv_heads=2 -D ffn=32 -D layers=4 -D seq=16 --lr 1e-2 --lr-warmup-iters 0";
    for (flags, offload) in [
        ("--dp 2 --zero 1", "--activation-offload all"),
        ("--pp 2 --vpp 2 --recompute full", "--activation-offload all"),
        ("--bf16 --tp 2 --sp --pp 2 --pipeline-schedule zb-h1", "--activation-offload mlp,attention"),
        ("--bf16 --dp 2 --zero 3 --optimizer-offload", "--activation-offload-layers 2"),
    ] {
        let run = |more: &str| {
            dir.line(&format!("{compile} {flags} {more} -o out.mcc")).succeeds();
            trained(&dir, "--valid-data text.txt --eval-interval 2 --eval-iters 1")
        };
        assert!(run("") == run(offload), "{flags} {offload}");
    }
}

/// Weights, losses (held-out ones too) and states; and after a stop, with the optimizer elsewhere.
#[test]
fn an_optimizer_on_the_host_gives_the_same_bits() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    let compile = "compile {models}/gpt2.mdl --dp 2 --global-batch-size 4 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16 --lr 1e-2 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0.1";
    let valid = "--valid-data text.txt --eval-interval 2 --eval-iters 1 --save-state s.safetensors";
    for flags in ["", "--bf16 --zero 1", "--fp16 --initial-loss-scale 1024 --zero 2 --pp 2", "--bf16 --zero 3"] {
        let run = |artifact: &str, more: &str| {
            dir.line(&format!("{compile} {flags} {artifact} -o out.mcc")).succeeds();
            let (weights, losses) = trained(&dir, &format!("{valid} {more}"));
            (weights, losses, fs::read(dir.path("s.safetensors")).expect("states"))
        };
        let device = run("", "");
        assert!(device == run("--optimizer-offload", ""), "{flags}");
        dir.line("run out.mcc --data text.txt --steps 2 --force --save-state half.safetensors").succeeds();
        let (weights, _, states) = run("", "--resume half.safetensors");
        assert!((&device.0, &device.2) == (&weights, &states), "{flags}, resumed");
    }
}
