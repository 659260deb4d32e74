//! Optimizers on the host beside GPUs, in less of the device's memory, and their states on a disk: the same bits as
//! without, and code for both in one artifact.

use crate::endings::children;
use crate::mcc::{CommandOutput, Dir};
use ir::program::Space;
use passes::report::footprint::Footprint;
use runtime::artifact::{self, Artifact, Manifest};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

const GPT2: &str = "compile {models}/gpt2.mdl --global-batch-size 4 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 --lr 1e-2 --lr-warmup-iters 0 --lr-decay-style constant --clip-grad 0.1";

/// Few steps, with held-out losses, and what they came to: weights, states, metrics.
fn trained(dir: &Dir, more: &str) -> [Vec<u8>; 3] {
    let valid = "--valid-data text.txt --eval-interval 2 --eval-iters 1";
    let files = ["w.safetensors", "s.safetensors", "m.jsonl"];
    let [weights, states, metrics] = files;
    let device = if more.contains("--device") { "" } else { "--device emulated" };
    dir.line(&format!(
        "run out.mcc {device} --data text.txt {valid} --force --save-weights {weights} --save-state {states} --metrics {metrics} {more}"
    ))
    .succeeds();
    // Times differ between runs.
    let timeless = |line: &str| {
        let mut line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line.as_object_mut()
            .expect("an object")
            .retain(|name, _| !["tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_bytes"].contains(&name.as_str()));
        line.to_string()
    };
    let read = |name: &str| fs::read(dir.path(name)).expect("a file");
    let lines: Vec<String> = String::from_utf8(read(metrics)).expect("UTF-8").lines().map(timeless).collect();
    [read(weights), read(states), lines.join("\n").into_bytes()]
}

/// The same four steps, with a stop after two.
fn resumed(dir: &Dir, run: &str) -> [Vec<u8>; 3] {
    trained(dir, &format!("--steps 2 {run}"));
    fs::rename(dir.path("s.safetensors"), dir.path("half.safetensors")).expect("renamed");
    trained(dir, &format!("--steps 4 {run} --resume half.safetensors"))
}

fn text(dir: &Dir) {
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(10));
}

fn compiled(dir: &Dir, flags: &str) -> (Artifact, CommandOutput) {
    let ran = dir.line(&format!("{GPT2} {flags} -o out.mcc")).succeeds();
    (artifact::read(&dir.path("out.mcc"), &artifact::AcceptedArtifacts::Anyones).expect("an artifact"), ran)
}

/// Bytes of the devices and of the host that each stage's ranks are planned to hold.
fn planned(artifact: &Artifact) -> Vec<[u64; 2]> {
    (0..artifact.job.stages.len()).map(|stage| Footprint::of(&artifact.job, stage)).map(|f| [f.total(), f.on_host()]).collect()
}

/// Also after a stop, on threads of streams and in the order of issue.
#[test]
fn an_optimizer_on_the_host_beside_gpus_gives_the_same_bits_in_less_memory() {
    host_optimizer_keeps_the_bits(&[
        ("--target sm_90a --bf16 --tp 2 --pp 2", "--in-order"),
        ("--target sm_80 --bf16 --dp 2 --zero 1 --overlap off", ""),
    ]);
}

#[test]
#[ignore = "two more plans: make test-long-native"]
fn an_optimizer_on_the_host_beside_gpus_gives_the_same_bits_in_other_dtypes() {
    host_optimizer_keeps_the_bits(&[
        ("--target sm_80 --dp 2 --zero 1", ""),
        ("--target sm_90a --fp16 --initial-loss-scale 1024 --dp 2 --zero 3", "--threads-per-rank 2"),
    ]);
}

/// Each case is the flags of a compile and those of its runs.
fn host_optimizer_keeps_the_bits(cases: &[(&str, &str)]) {
    let dir = Dir::new();
    text(&dir);
    for (flags, run) in cases {
        let (artifact, _) = compiled(&dir, flags);
        let (all, device) = (planned(&artifact), trained(&dir, &format!("--steps 4 {run}")));
        let (artifact, said) = compiled(&dir, &format!("{flags} --optimizer-offload"));
        for ([before, none], [after, host]) in all.into_iter().zip(planned(&artifact)) {
            assert!(none == 0 && host > 0 && after < before, "{flags}: {before} bytes of a device, then {after} and {host} of the host");
        }
        assert!(said.stdout.contains("\nhost       "), "{}", said.stdout);
        assert!(trained(&dir, &format!("--steps 4 {run}")) == device, "{flags}");
        let [weights, states, _] = resumed(&dir, run);
        assert!([&weights, &states] == [&device[0], &device[1]], "{flags}, resumed");
    }
    // Weights that are loaded and saved without a step stay as they were.
    trained(&dir, "--steps 0 --init w.safetensors");
    let [again, ..] = trained(&dir, "--steps 0 --init w.safetensors");
    assert!(again == fs::read(dir.path("w.safetensors")).expect("weights"));
}

/// On CPUs, on cards of which the host's threads copy, with and without streams, and after a stop.
#[test]
fn states_on_a_disk_give_the_same_bits() {
    let dir = Dir::new();
    text(&dir);
    fs::create_dir(dir.path("drive")).expect("a directory");
    for (flags, run) in [
        ("", "--device cpu"),
        ("--bf16 --dp 2 --zero 1", "--device cpu --in-order"),
        ("--dp 2 --zero 3 --overlap off", "--device cpu --threads-per-rank 2"),
        ("--target sm_80 --bf16 --dp 2 --zero 1", ""),
    ] {
        let (artifact, _) = compiled(&dir, &format!("{flags} --optimizer-offload"));
        let (all, host) = (planned(&artifact), trained(&dir, &format!("--steps 4 {run}")));
        let (artifact, said) = compiled(&dir, &format!("{flags} --optimizer-offload=disk"));
        for ((stage, [device, of_host]), [then, after]) in all.into_iter().enumerate().zip(planned(&artifact)) {
            let disk = Footprint::of(&artifact.job, stage).on_disk();
            assert!(device == then && disk > 0 && after <= of_host, "{flags}: {of_host} bytes of the host, then {after} and {disk} of a disk");
        }
        assert!(said.stdout.contains("\ndisk       "), "{}", said.stdout);
        let run = format!("{run} --offload-to drive");
        assert!(trained(&dir, &format!("--steps 4 {run}")) == host, "{flags}");
        let [weights, states, _] = resumed(&dir, &run);
        assert!([&weights, &states] == [&host[0], &host[1]], "{flags}, resumed");
    }
    assert_eq!(fs::read_dir(dir.path("drive")).expect("a directory").count(), 0, "nothing is left");
    let run = |more: &str| dir.line(&format!("run out.mcc --device emulated --data text.txt --steps 1 {more}"));
    run("").misuses_with(&["optimizer states of `", "bytes of a rank: --offload-to names a directory"]);
    run("--offload-to none").fails_with(&["none`: No such file or directory"]);
    let said = run("--offload-to /dev/shm").succeeds().stderr;
    assert!(said.contains("`/dev/shm` is in memory (tmpfs or ramfs)"), "{said}");
    compiled(&dir, "--target sm_80");
    let said = run("--offload-to drive").succeeds().stderr;
    assert!(said.contains("`--offload-to` does nothing: this artifact keeps nothing on a disk"), "{said}");
}

/// In the host's memory and on a disk, also in pieces and after a stop; a rank's device holds less. Both have the
/// same buckets: the norm of all gradients sums them one by one.
#[test]
fn parameters_that_rest_elsewhere_give_the_same_bits() {
    let dir = Dir::new();
    text(&dir);
    fs::create_dir(dir.path("drive")).expect("a directory");
    for (flags, more, run) in [
        ("", "--param-offload", "--device cpu"),
        ("--bf16 --dp 2 --zero 1 --bucket-size 2048", "--param-offload=disk", "--device cpu --in-order"),
        ("--dp 2 --zero 3", "--param-offload=disk", "--device cpu --threads-per-rank 2"),
        ("--target sm_80 --bf16 --pp 2 --bucket-size 500", "--param-offload --activation-offload all", ""),
        ("--target sm_80 --bf16 --dp 2 --zero 1", "--param-offload=disk", ""),
    ] {
        let (artifact, _) = compiled(&dir, &format!("{flags} --optimizer-offload"));
        let (all, device) = (planned(&artifact), trained(&dir, &format!("--steps 4 {run}")));
        let (artifact, _) = compiled(&dir, &format!("{flags} --optimizer-offload {more}"));
        for ([before, _], [after, _]) in all.into_iter().zip(planned(&artifact)) {
            assert!(after < before, "{flags} {more}: {before} bytes of a device, then {after}");
        }
        let disk = if more.contains("=disk") { "--offload-to drive" } else { "" };
        let run = format!("{run} {disk}");
        assert!(trained(&dir, &format!("--steps 4 {run}")) == device, "{flags} {more}");
        let [weights, states, _] = resumed(&dir, &run);
        assert!([&weights, &states] == [&device[0], &device[1]], "{flags} {more}, resumed");
    }
    let run = "run out.mcc --device emulated --data text.txt --steps 1";
    dir.line(run).misuses_with(&["parameters or optimizer states of `", "--offload-to names a directory"]);
}

#[test]
fn an_artifact_has_code_for_gpus_and_for_the_host() {
    let dir = Dir::new();
    text(&dir);
    let flags = "--target sm_80 --bf16 --optimizer-offload";
    let (artifact, _) = compiled(&dir, flags);
    let of = |space: Space| artifact.job.kernels.iter().filter(|k| k.on == space).count();
    let (host, device) = (of(Space::Host), of(Space::Device));
    assert_eq!((fs::read_dir(dir.path("out.mcc/ptx")).expect("modules").count(), artifact.launched().count()), (device, device));
    let dumped = |level: &str| dir.line(&format!("dump out.mcc --level {level}")).succeeds().stdout;
    let lines = |text: &str, what: &str| text.lines().filter(|l| l.contains(what)).count();
    assert_eq!(lines(&dumped("kernel"), " on host"), host);
    assert_eq!(lines(&dumped("ptx"), ".visible .entry"), device);
    let (asm, llvm) = (dumped("asm"), dumped("llvm"));
    assert_eq!((lines(&asm, ".visible .entry"), lines(&asm, "\t.globl\tk_")), (device, host));
    assert_eq!(["nvptx64-", "x86_64-"].map(|t| lines(&llvm, &format!("target triple = \"{t}"))), [device, host]);
    let manifest = fs::read_to_string(dir.path("out.mcc/manifest.json")).expect("a manifest");
    assert!(manifest.contains(r#""cpu": "x86-64-v3""#), "{manifest}");

    // Kernels for another CPU are refused, and so are damaged ones.
    let run = || dir.line("run out.mcc --device emulated --data text.txt --steps 1");
    let other: Manifest = serde_json::from_str(&manifest.replace(r#""features": """#, r#""features": "+tbm""#)).expect("a manifest");
    fs::write(dir.path("out.mcc/manifest.json"), other.sealed().bytes()).expect("written");
    if !std::is_x86_feature_detected!("tbm") {
        run().fails_with(&[
            "its kernels on the host need a CPU with tbm, which this one lacks",
            "--host-target x86-64-v3",
            "compile the model again",
        ]);
    }
    fs::write(dir.path("out.mcc/manifest.json"), &manifest).expect("written");
    let library = dir.path("out.mcc/kernels.so");
    let mut code = fs::read(&library).expect("code");
    code[99] ^= 1;
    fs::write(&library, code).expect("written");
    run().fails_with(&["kernels.so` is damaged: its hash is"]);

    // `--host-target cpu` is for this machine's CPU alone. Names that mean nothing are refused.
    compiled(&dir, &format!("{flags} --host-target cpu"));
    run().succeeds();
    let here = fs::read_to_string(dir.path("out.mcc/manifest.json")).expect("a manifest");
    assert!(!here.contains("x86-64-v3") && here.contains("+avx2"), "{here}");
    let refused = |flags: &str, words: &[&str]| drop(dir.line(&format!("{GPT2} {flags} -o out.mcc")).misuses_with(words));
    refused("--host-target x86-64-v3", &["--host-target is for kernels beside GPUs", "compiled for the same CPU"]);
    refused("--target sm_80 --host-target sm_80", &["--host-target `sm_80` is a GPU: hosts are `cpu` (this machine) or `x86-64-v3`"]);
}

/// What is on a disk is in no memory: where that of the host is limited, it is tried, and named.
#[test]
fn a_plan_beyond_the_hosts_memory_is_told_of_disks() {
    let dir = Dir::new();
    let model = "check {models}/gpt2.mdl -D vocab=256 -D hidden=256 -D heads=4 -D layers=12 -D seq=8 --bf16 --target sm_80 --optimizer-offload";
    dir.line(&format!("{model} --host-memory 64MiB")).fails_with(&[
        "E0640",
        "MiB of the host's memory, which is more than its budget of 64.00 MiB",
        "optimizer: ",
        "`--optimizer-offload=disk` needs",
    ]);
    dir.line(&format!("{model}=disk --host-memory 64MiB")).succeeds();
    // On a CPU, device memory is host memory too.
    let cpu = "check {models}/mlp.mdl --memory 1GiB --host-memory 1KiB";
    dir.line(cpu).fails_with(&["E0640", "of the host's memory, which is more than its budget of 1.00 KiB"]);
}

/// A file that loses its bytes stands for a drive that can no longer be read.
#[test]
fn a_disk_that_fails_ends_the_run_with_an_error() {
    let dir = Dir::new();
    text(&dir);
    fs::create_dir(dir.path("drive")).expect("a directory");
    compiled(&dir, "--optimizer-offload=disk");
    let mut run = dir.hearing("run out.mcc --data text.txt --steps 1000000 --log-interval 1 --offload-to drive --save-weights w");
    let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    let first = BufReader::new(run.stdout.as_mut().expect("a pipe")).lines().next();
    assert!(first.expect("a line").expect("read").starts_with("step"));
    let opened = children(run.id()).into_iter().flat_map(|rank| fs::read_dir(format!("/proc/{rank}/fd")).expect("its files"));
    let opened = opened.map(|file| file.expect("a file").path());
    let drive = dir.path("drive");
    let on_disk: Vec<_> = opened.filter(|file| fs::read_link(file).is_ok_and(|at| at.starts_with(&drive))).collect();
    // Nobody reads further lines, so that the run may print no more of them.
    drop(run.stdout.take());
    let file = File::options().write(true).open(on_disk.first().expect("a rank's file")).expect("opened");
    // What is written makes the file longer again, and reads of what is missing before it see zeros.
    let began = Instant::now();
    while run.try_wait().expect("a process").is_none() {
        file.set_len(0).expect("cut");
        if began.elapsed() > Duration::from_secs(120) {
            run.kill().expect("killed");
        }
    }
    let ended = run.wait_with_output().expect("the end");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(1) && said.contains("the disk of its optimizer states and parameters: "), "{:?}: {said}", ended.status);
    assert!(!dir.path("w").exists());
}
