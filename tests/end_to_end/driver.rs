//! The `cuda` device and NCCL on a stand-in for the driver, which checks how it is used: graphs, copies, events and
//! exchanges as on GPUs, the kernels in the emulator. So the numbers are, bit by bit, those of emulated ranks.

use crate::mcc::{CommandOutput, Dir, models};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The library. Cargo builds it for a test of the whole workspace, but not for the first one of this package alone.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let profile = Path::new(env!("CARGO_BIN_EXE_mcc")).parent().expect("a profile's directory");
        let library = profile.join("libemulated_driver.so");
        if !library.exists() {
            let mut c = Command::new(env!("CARGO"));
            c.args(["build", "--quiet", "--package", "emulated-driver", "--target-dir"]).arg(profile.parent().expect("a target directory"));
            if profile.ends_with("release") {
                c.arg("--release");
            }
            assert!(c.status().expect("cargo starts").success(), "the stand-in for the driver does not build");
        }
        library
    })
}

/// Runs `mcc` where the stand-in is the driver and NCCL, with words about the machine.
fn on_driver(dir: &Dir, line: &str, machine: &[(&str, &str)]) -> CommandOutput {
    let libraries = dir.path("libraries");
    if !libraries.exists() {
        fs::create_dir(&libraries).expect("created");
        for name in ["libcuda.so.1", "libnccl.so.2"] {
            symlink(library(), libraries.join(name)).expect("linked");
        }
    }
    let models = models().display().to_string();
    let mut c = dir.command(line.split_whitespace().map(|w| w.replace("{models}", &models)));
    c.env("LD_LIBRARY_PATH", libraries).env("EMULATED_DRIVER_LOG", dir.path("complaints")).envs(machine.iter().copied());
    CommandOutput::new(c.output().expect("mcc starts"))
}

/// What the stand-in had to say.
fn complaints(dir: &Dir) -> String {
    fs::read_to_string(dir.path("complaints")).unwrap_or_default()
}

/// Metrics without times, and the bytes of the weights.
fn trained(dir: &Dir) -> (Vec<serde_json::Value>, Vec<u8>) {
    let mut steps = crate::mcc::metrics(&dir.path("m.jsonl"));
    for step in &mut steps {
        let step = step.as_object_mut().expect("an object");
        step.retain(|name, _| !["tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_bytes"].contains(&name.as_str()));
        assert!(step.contains_key("loss"), "{step:?}");
    }
    (steps, fs::read(dir.path("w.safetensors")).expect("saved weights"))
}

/// A job of four ranks: emulated, on one GPU that they share with exchanges through the host, and on four with NCCL.
fn all_ways_are_one(compile: &str, [host, nccl]: [&str; 2]) {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    dir.line(&format!("compile {compile} -o out.mcc")).succeeds();
    // The learning rate changes with each step: graphs get other parameters.
    let disk = if compile.contains("=disk") { "--offload-to ." } else { "" };
    let run = format!(
        "run out.mcc {disk} --data text.txt --steps 4 --valid-data text.txt --eval-interval 2 --eval-iters 1 --force --metrics m.jsonl \
         --save-weights w.safetensors --device"
    );
    dir.line(&format!("{run} emulated")).succeeds();
    let want = trained(&dir);
    for (how, machine) in [
        ("cuda", [("EMULATED_GPUS", "1"), ("EMULATED_GPU_SEED", host)]),
        ("cuda --exchanges nccl", [("EMULATED_GPUS", "4"), ("EMULATED_GPU_SEED", nccl)]),
    ] {
        on_driver(&dir, &format!("{run} {how}"), &machine).succeeds();
        assert_eq!(complaints(&dir), "", "{how}");
        let got = trained(&dir);
        assert_eq!(got.0, want.0, "{how}");
        assert!(got.1 == want.1, "{how}: other weights");
    }
}

const TINY: &str = "-D vocab=256 -D hidden=32 -D seq=8 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-iters 4";

#[test]
fn gpt2_trains_on_the_cuda_device_as_in_the_emulator() {
    all_ways_are_one(&format!("{{models}}/gpt2.mdl {TINY} -D layers=2 -D heads=2 -D head_dim=64 --pp 2 --tp 2 --target sm_80"), ["0", "0"]);
}

/// Products of 16 bits, whose factors have tensor maps; updates on the host, which the GPU copies from and to, and
/// whose states the host reads from a disk.
#[test]
fn llama_trains_on_the_cuda_device_as_in_the_emulator() {
    let model = "llama.mdl -D layers=2 -D heads=4 -D kv_heads=2 -D head_dim=64 -D ffn=32 --bf16 --sp --optimizer-offload=disk";
    all_ways_are_one(&format!("{{models}}/{model} {TINY} --dp 2 --tp 2 --zero 1 --target sm_90a"), ["1", "2"]);
}

/// Kernels of the host, and copies to and from its memory, of activations too.
#[test]
fn an_optimizer_on_the_host_beside_the_cuda_device_computes_as_beside_the_emulator() {
    let model = "gpt2.mdl -D layers=3 -D heads=2 -D head_dim=64 --bf16 --optimizer-offload --activation-offload all";
    all_ways_are_one(&format!("{{models}}/{model} {TINY} --dp 2 --tp 2 --zero 1 --target sm_90a"), ["5", "6"]);
}

/// Experts exchange all with all, in passes of which some are left out.
#[test]
fn mixtral_trains_on_the_cuda_device_as_in_the_emulator() {
    let model = "mixtral.mdl -D layers=2 -D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=32 --moe-buffer-factor 0.3 \
                 --micro-batch-size 2 --global-batch-size 2";
    all_ways_are_one(&format!("{{models}}/{model} {TINY} --pp 2 --tp 2 --ep 2 --etp 1 --target sm_90a"), ["3", "4"]);
}

/// Exchanges of one microbatch beside kernels of another, of which further passes over rows are left out.
#[test]
#[ignore = "two minutes: make test-long-native"]
fn passes_side_by_side_on_the_cuda_device_compute_as_in_the_emulator() {
    let model = "mixtral.mdl -D layers=4 -D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=32 --moe-buffer-factor 0.3 \
                 --micro-batch-size 1 --global-batch-size 8 --overlap-moe-expert-parallel-comm --pipeline-schedule dualpipev";
    all_ways_are_one(&format!("{{models}}/{model} {TINY} --pp 2 --dp 2 --ep 2 --target sm_90a"), ["3", "4"]);
}

/// A schedule whose sends would wait for each other if nothing were buffered.
#[test]
fn schedules_that_need_buffers_have_them() {
    let mesh = "--pp 2 --pipeline-schedule zb-v --micro-batch-size 1 --global-batch-size 4";
    all_ways_are_one(&format!("{{models}}/gpt2.mdl {TINY} -D layers=4 -D heads=2 {mesh} --target sm_80"), ["5", "6"]);
}

/// Products have four tiles, which one block computes, or four.
#[test]
fn weights_do_not_depend_on_how_many_multiprocessors_a_card_has() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let model = "gpt2.mdl --bf16 -D layers=1 -D heads=2 -D hidden=128 -D seq=64 -D vocab=512 --global-batch-size 4";
    dir.line(&format!("compile {{models}}/{model} --target sm_90a -o out.mcc")).succeeds();
    let run = "run out.mcc --data text.txt --steps 1 --force --metrics m.jsonl --save-weights w.safetensors --device cuda";
    let on = |multiprocessors| {
        on_driver(&dir, run, &[("EMULATED_GPU_MULTIPROCESSORS", multiprocessors)]).succeeds();
        trained(&dir)
    };
    assert!(on("1") == on("132"), "other weights");
}

/// The first wait is that of a list's streams for what was before it, which is through then: all others are for
/// something.
#[test]
fn waits_of_streams_for_each_other_that_are_left_out_are_noticed() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    dir.line(&format!("compile {{models}}/gpt2.mdl {TINY} -D layers=1 -D heads=2 --tp 2 --target sm_80 -o out.mcc")).succeeds();
    let run = "run out.mcc --data text.txt --steps 1 --force --metrics m.jsonl --save-weights w.safetensors --device cuda --exchanges nccl";
    on_driver(&dir, run, &[("EMULATED_GPUS", "2")]).succeeds();
    let want = trained(&dir);
    for wait in 1..=8 {
        let machine = [("EMULATED_GPUS", "2"), ("EMULATED_NCCL_PATIENCE", "8"), ("EMULATED_GPU_FORGETS", &wait.to_string())];
        let ran = on_driver(&dir, run, &machine);
        assert!(ran.code != Some(0) || trained(&dir) != want, "wait {wait} is for nothing");
    }
}

/// Assembled kernels are for GPUs of just their architecture; on others the driver compiles the PTX. The stand-in has
/// no code of GPUs, and says so where it is given some.
#[test]
fn cubins_are_loaded_where_they_are_of_the_gpus_own_architecture() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let tools = dir.path("bin");
    fs::create_dir(&tools).expect("created");
    // This script stands in for NVIDIA's assembler, and prints the same report.
    let elf = r"\177ELF\002\001............\276\000";
    let report = "Used 8 registers, 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    dir.write("bin/ptxas", format!("#!/bin/sh\nfor out; do :; done\nprintf '{elf}' > \"$out\"\necho '{report}'\n"));
    fs::set_permissions(tools.join("ptxas"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("it is there");
    let compile = |target: &str, path: &Path| {
        let line = format!("compile {} {TINY} -D layers=1 -D heads=2 --target {target} --cubin -o out.mcc", models().join("gpt2.mdl").display());
        let path = format!("{}:/usr/bin:/bin", path.display());
        CommandOutput::new(dir.command(line.split_whitespace()).env("PATH", path).env_remove("CUDA_HOME").output().expect("mcc starts"))
    };
    compile("cpu", &tools).fails_with(&["--cubin assembles kernels for GPUs", "sm_80"]);
    if !Path::new("/usr/local/cuda/bin/ptxas").exists() && !Path::new("/usr/bin/ptxas").exists() {
        compile("sm_80", &dir.path("nowhere")).fails_with(&["--cubin needs NVIDIA's `ptxas`", "leave --cubin out"]);
    }
    compile("sm_80", &tools).succeeds();
    let files = |of: &str| fs::read_dir(dir.path("out.mcc").join(of)).expect("a directory").count();
    assert!(files("cubin") > 10 && files("cubin") == files("ptx"));
    let run = "run out.mcc --data text.txt --steps 1 --device cuda";
    on_driver(&dir, run, &[("EMULATED_GPU_CAPABILITY", "9.0")]).succeeds();
    assert_eq!(complaints(&dir), "");
    on_driver(&dir, run, &[("EMULATED_GPU_CAPABILITY", "8.0")]).fails_with(&["the driver does not take its cubin", "without --cubin"]);
    assert!(complaints(&dir).contains("a cubin: code of a GPU is not modelled"), "{}", complaints(&dir));
    dir.line("run out.mcc --data text.txt --steps 1 --device emulated").succeeds();
}
