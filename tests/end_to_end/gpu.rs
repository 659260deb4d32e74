//! Artifacts for GPUs, run in the emulator: the PTX, parameters and launches that a GPU would get, several ranks.

use crate::mcc::{Dir, load_weights, metrics, models, save_array};
use codegen::ptxas::Ptxas;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::Op;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// What training came to: per step the loss and the gradient norm, and the trained weights.
struct Trained {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    weights: Vec<f64>,
}

impl Trained {
    fn parts(&self) -> [(&str, &[f64]); 3] {
        [("losses", &self.losses), ("gradient norms", &self.grad_norms), ("weights", &self.weights)]
    }
}

/// Compiles and trains a model, on the CPU or in the emulator.
fn train(dir: &Dir, compile: &str, run: &str, target: &str) -> Trained {
    let device = if target == "cpu" { "cpu" } else { "emulated" };
    dir.line(&format!("{compile} --target {target} -o {target}.mcc")).succeeds();
    dir.line(&format!("run {target}.mcc --device {device} {run} --force --metrics m.jsonl --save-weights w.safetensors")).succeeds();
    let steps = metrics(&dir.path("m.jsonl"));
    let of = |name: &str| steps.iter().map(|s| s[name].as_f64().expect("a number")).collect();
    let weights = load_weights(&dir.path("w.safetensors"));
    Trained { losses: of("loss"), grad_norms: of("grad_norm"), weights: weights.values().flat_map(|w| w.1.iter().map(|x| f64::from(*x))).collect() }
}

/// Trains on the CPU and in the emulator, and holds all numbers to each other within 1e-4 of their size, or of 1.
fn agree(dir: &Dir, compile: &str, run: &str, targets: &[&str]) -> Trained {
    agree_within(dir, compile, run, targets, 1e-4)
}

fn agree_within(dir: &Dir, compile: &str, run: &str, targets: &[&str], tolerance: f64) -> Trained {
    let want = train(dir, compile, run, "cpu");
    for target in targets {
        let got = train(dir, compile, run, target);
        for ((what, got), (_, want)) in got.parts().into_iter().zip(want.parts()) {
            assert_eq!(got.len(), want.len());
            for (k, (g, w)) in got.iter().zip(want).enumerate() {
                assert!((g - w).abs() <= tolerance * w.abs().max(1.0), "{target}, {what} {k}: {g}, not {w}");
            }
        }
    }
    want
}

#[test]
fn emulated_ranks_train_as_cpus_do() {
    let dir = Dir::new();
    data(&dir);
    agree(&dir, &format!("{MLP} --tp 2 --pp 2"), "--data x=x.npy --data label=label.npy", &["sm_80", "sm_90a"]);
}

/// A result of one tile, made in segments of what it sums over, whose results are added up in f32.
#[test]
fn products_in_segments_train_as_on_cpus() {
    let dir = Dir::new();
    save_array(
        &dir.path("x.npy"),
        &[2, 32, 2048],
        (0..2 * 32 * 2048u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0),
    );
    save_array(&dir.path("label.npy"), &[2, 32], (0..2 * 32).map(|i| i % 16));
    let compile = "compile {models}/mlp.mdl --global-batch-size 32 --micro-batch-size 32 -D features=2048 -D hidden=64 -D classes=16";
    let run = "--data x=x.npy --data label=label.npy --steps 2";
    for (dtype, target, tolerance) in [("", "sm_80", 1e-4), ("--bf16", "sm_90a", 2e-2)] {
        agree_within(&dir, &format!("{compile} {dtype}"), run, &[target], tolerance);
        let split = |target: &str| dir.line(&format!("dump {target}.mcc --level local")).succeeds().stdout.contains(" over [segment]");
        assert_eq!([split(target), split("cpu")], [true, false], "{target}");
    }
}

/// Small, but with steps that move the weights; where a gradient is rounding and nothing else, so is the step.
const TINY: &str = "--pp 2 --tp 2 -D vocab=256 -D hidden=32 -D layers=2 -D seq=8 --lr 1e-2 --min-lr 1e-2 --lr-warmup-iters 0 --adam-eps 1e-3";

/// Root of the mean square of differences.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}

/// A model on emulated ranks: in f32 it trains as on CPUs within 1e-4. In bf16 its losses, gradient norms and weights
/// are from the CPU's in bf16 at most twice as far as those are from f32's: both round alike, but sum in other
/// orders.
fn trains_as_on_cpus(model: &str, [f32_target, bf16_target]: [&str; 2]) {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let (compile, run) = (format!("compile {{models}}/{model} {TINY}"), "--data text.txt --steps 3");
    let exact = agree(&dir, &compile, run, &[f32_target]);
    let compile = format!("{compile} --bf16");
    let want = train(&dir, &compile, run, "cpu");
    let got = train(&dir, &compile, run, bf16_target);
    for (((what, exact), (_, want)), (_, got)) in exact.parts().into_iter().zip(want.parts()).zip(got.parts()) {
        let [own, rounding] = [distance(got, want), distance(want, exact)];
        assert!(own <= 2.0 * rounding, "{what} in bf16 on {bf16_target}: {own:e} from the CPU's, which are {rounding:e} from those in f32");
    }
}

#[test]
fn emulated_ranks_train_gpt2_as_cpus_do() {
    trains_as_on_cpus("gpt2.mdl -D heads=2 -D head_dim=64", ["sm_80", "sm_90a"]);
}

#[test]
fn emulated_ranks_train_llama_as_cpus_do() {
    trains_as_on_cpus("llama.mdl -D heads=4 -D kv_heads=2 -D head_dim=64 -D ffn=32", ["sm_90a", "sm_80"]);
}

const EXPERTS: &str = "-D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=32 --micro-batch-size 2 --global-batch-size 2";

#[test]
fn emulated_ranks_train_mixtral_as_cpus_do() {
    trains_as_on_cpus(&format!("mixtral.mdl {EXPERTS}"), ["sm_80", "sm_90a"]);
}

#[test]
#[ignore = "half a minute: make test-long-native"]
fn emulated_ranks_train_mixtral_with_experts_split_as_cpus_do() {
    trains_as_on_cpus(&format!("mixtral.mdl {EXPERTS} --ep 2 --etp 1"), ["sm_90a", "sm_80"]);
}

/// Each factor of a product is off by 2^-11 of itself at most: what comes of it is near to f32, and something else.
#[test]
fn emulated_ranks_train_in_tf32() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ");
    let compile = format!("compile {{models}}/llama.mdl -D heads=4 -D kv_heads=2 -D head_dim=8 -D ffn=32 {TINY}");
    let run = "--data text.txt --steps 3";
    let want = train(&dir, &compile, run, "cpu");
    for target in ["sm_80", "sm_90a"] {
        let plain = train(&dir, &compile, run, target);
        let got = train(&dir, &format!("{compile} --tf32"), run, target);
        for (((what, got), (_, want)), (_, plain)) in got.parts().into_iter().zip(want.parts()).zip(plain.parts()) {
            let most = got.iter().zip(want).map(|(g, w)| (g - w).abs() / w.abs().max(1.0)).fold(0.0, f64::max);
            assert!(most < 2e-3 && got != plain, "{target}, {what}: {most:e} from the CPU's");
        }
        let ptx = dir.line(&format!("dump {target}.mcc --level ptx")).succeeds().stdout;
        assert!(ptx.contains("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"), "{ptx}");
        assert_eq!(ptx.contains(".f32.tf32.tf32 {"), target == "sm_90a", "{ptx}");
    }
    dir.line(&format!("{compile} --tf32 -o cpu.mcc")).misuses_with(&["error[E0642]: --tf32 is for tensor cores", "= help: "]);
}

/// The models of `models/` at small sizes, with the flags of their jobs and the GPUs whose kernels are assembled.
/// Heads of 64 and 128, as tensor cores take them.
const JOBS: [(&str, &[&str]); 11] = [
    ("gpt2.mdl --bf16 --tp 2 --pp 2 -D vocab=256 -D hidden=128 -D heads=2 -D layers=2 -D seq=128", &["sm_80", "sm_90a"]),
    ("gpt2.mdl --tp 2 --pp 2 -D vocab=256 -D hidden=128 -D heads=4 -D layers=4 -D seq=128", &["sm_80"]),
    (
        "llama.mdl --bf16 --tp 2 --pp 2 --sp -D vocab=256 -D hidden=256 -D heads=4 -D kv_heads=2 -D head_dim=128 -D ffn=512 -D layers=2 -D seq=128",
        &["sm_80", "sm_90a"],
    ),
    (
        "llama.mdl --tf32 --tp 2 -D vocab=256 -D hidden=256 -D heads=4 -D kv_heads=2 -D head_dim=64 -D ffn=512 -D layers=1 -D seq=128",
        &["sm_80", "sm_90a"],
    ),
    (
        "mixtral.mdl --tf32 --ep 2 --dp 2 --micro-batch-size 2 --global-batch-size 4 -D vocab=256 -D hidden=128 -D heads=2 -D kv_heads=2 -D experts=4 \
         -D expert_ffn=64 -D layers=1 -D seq=64",
        &["sm_80", "sm_90a"],
    ),
    (
        "mixtral.mdl --bf16 --tp 2 --pp 2 --ep 2 --etp 1 --micro-batch-size 2 --global-batch-size 2 -D vocab=256 -D hidden=128 -D heads=2 -D kv_heads=2 \
         -D experts=4 -D expert_ffn=64 -D layers=2 -D seq=128",
        &["sm_80", "sm_90a"],
    ),
    (
        "deepseek_v3.mdl --bf16 --tp 2 --ep 2 --etp 1 -D vocab=256 -D hidden=64 -D heads=2 -D layers=2 -D first_dense=1 -D ffn=64 -D seq=64 -D q_rank=32 \
         -D kv_rank=32 -D nope=32 -D turned=32 -D v_dim=64 -D experts=8 -D top_k=2 -D expert_ffn=32 -D groups=4 -D top_groups=2 -D bias_rate=0.125",
        &["sm_90a"],
    ),
    ("bert.mdl --bf16 --tp 2 -D vocab=256 -D hidden=128 -D heads=2 -D layers=2 -D seq=64", &["sm_80"]),
    ("t5.mdl --bf16 -D vocab=256 -D hidden=128 -D heads=2 -D ffn=128 -D encoder_layers=1 -D decoder_layers=1 -D source=64 -D target=48", &["sm_90a"]),
    ("nemotron.mdl --bf16 --tp 2 -D vocab=256 -D hidden=256 -D heads=2 -D kv_heads=2 -D ffn=256 -D layers=2 -D seq=64", &["sm_80"]),
    ("vit.mdl -D height=32 -D width=32 -D hidden=64 -D heads=2 -D layers=2 -D classes=16", &["sm_90a"]),
];

/// What must be among the instructions of a kernel: 16-bit factors that both have dims of their own, and attention of
/// 16 bits with heads of 64 or 128, are multiplied by tensor cores; by those of warpgroups where there are any and
/// attention has no number of each pair. Factors of tf32 too, by the latter only if they lie right.
fn meant(kernel: &Kernel, target: &str) -> Option<&'static str> {
    let body = &kernel.body;
    let of_groups = if target == "sm_90a" { "HGMMA" } else { "HMMA" };
    let long = |v: Value| body.dims_of(v).iter().filter(|d| body.dims.size(**d) > 1).collect::<Vec<_>>();
    body.values().find_map(|v| {
        let args = &body[v].args;
        match &body[v].op {
            Op::Dot { tf32: true, .. } | Op::GroupedDot { tf32: true, .. } => (target == "sm_80").then_some("HMMA"),
            Op::Dot { .. } | Op::GroupedDot { .. } if kernel.family == Family::Gemm => {
                let [a, b] = [long(args[0]), long(args[1])];
                let both = a.iter().any(|d| !b.contains(d)) && b.iter().any(|d| !a.contains(d));
                let halves = args[..2].iter().all(|a| body[*a].ty.dtype.is_half());
                (both && halves).then_some(of_groups)
            }
            Op::Attention(a) | Op::AttentionGrad(a, _) => {
                let of_pairs = a.further(args).iter().any(|v| [a.at, a.keys].iter().all(|d| body[*v].ty.has(*d)));
                let fits = body[args[0]].ty.dtype.is_half() && [64, 128].contains(&body.dims.size(a.d));
                fits.then_some(if of_pairs { "HMMA" } else { of_groups })
            }
            _ => None,
        }
    })
}

/// Of so many kernels one is assembled, and of so many of these one is disassembled too, which takes three times as
/// long; with `KERNELS` (`make test-long-kernels`) every one. Each may be there for two generations.
const ASSEMBLED: usize = 3;
const DISASSEMBLED: usize = 16;

/// A kernel's text in the assembler: no stack, no spilled register, no warning (of tensor cores that wait for each
/// other, C7508 or C7517, too), and what is meant to be in it; with `to_the_end`, in what the assembler makes of it
/// too.
fn assembles(ptxas: &Ptxas, kernel: &Kernel, ptx: &str, target: &str, to_the_end: bool) -> Result<(), String> {
    let assembled = ptxas.assemble(ptx, target).map_err(|e| e.to_string())?;
    if (assembled.stack_bytes, assembled.spill_bytes) != (0, 0) || !assembled.warnings.is_empty() {
        return Err(format!("{} bytes of stack, {} of spills, {:?}", assembled.stack_bytes, assembled.spill_bytes, assembled.warnings));
    }
    let Some(instruction) = meant(kernel, target) else { return Ok(()) };
    let in_ptx = if instruction == "HGMMA" { "wgmma.mma_async" } else { "mma.sync" };
    if !ptx.contains(in_ptx) {
        return Err(format!("no {in_ptx}"));
    }
    if !to_the_end {
        return Ok(());
    }
    let counts = ptxas.instructions(&assembled.cubin).map_err(|e| e.to_string())?;
    if counts.contains_key(instruction) { Ok(()) } else { Err(format!("no {instruction} in {counts:?}")) }
}

#[test]
fn kernels_of_the_models_assemble_without_spills_and_use_tensor_cores() {
    // CARGO_TARGET_TMPDIR is `target/tmp`.
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target directory").join("cuda-13.5.37");
    let ptxas = match Ptxas::fetched(&directory) {
        Ok(ptxas) => ptxas,
        Err(why) => {
            assert!(std::env::var_os("CI").is_none_or(|v| v != "true"), "ptxas cannot be had:\n{why}");
            // A test's captured output does not include this.
            let _ = writeln!(std::io::stderr(), "NOT CHECKED: no kernel of the models is assembled, since ptxas cannot be had:\n{why}");
            return;
        }
    };
    let dir = Dir::new();
    let mut kernels: BTreeMap<(String, &str), (Kernel, String)> = BTreeMap::new();
    let everything = std::env::var_os("KERNELS").is_some();
    for (k, (job, targets)) in JOBS.iter().enumerate() {
        // In a run of all tests, each job is compiled for one of its targets.
        let sampled = std::slice::from_ref(&targets[(k + 1) % targets.len()]);
        for &target in if everything { targets } else { sampled } {
            dir.line(&format!("compile {{models}}/{job} --target {target} -o out.mcc")).succeeds();
            let artifact = runtime::artifact::read(&dir.path("out.mcc"), &runtime::artifact::AcceptedArtifacts::Anyones).expect("an artifact");
            for (kernel, entry) in artifact.job.kernels.iter().zip(&artifact.kernels) {
                let text = artifact.ptx(entry).to_owned();
                kernels.entry((entry.name.clone(), target)).or_insert_with(|| (kernel.clone(), text));
            }
        }
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(vec![]));
    let (every, one_in) = if everything { (1, 1) } else { (ASSEMBLED, DISASSEMBLED) };
    let all: Vec<_> = kernels.iter().step_by(every).collect();
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            s.spawn(|| {
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    let Some(((name, target), (kernel, ptx))) = all.get(k) else { break };
                    if let Err(why) = assembles(&ptxas, kernel, ptx, target, k.is_multiple_of(one_in)) {
                        wrong.lock().expect("no panic").push(format!("{name} for {target}: {why}\n{}", ir::text::print_kernel(kernel)));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    assert!(wrong.is_empty(), "{} of {} kernels:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    // Enough of the kernels are for tensor cores. Most jobs have a second target, which a sample leaves out.
    let every = if everything { every } else { 3 * every / 2 };
    let with = |what: &str| all.iter().filter(|((_, target), (kernel, _))| meant(kernel, target) == Some(what)).count();
    assert!(
        every * all.len() > 400 && every * with("HMMA") > 50 && every * with("HGMMA") > 50,
        "{} kernels, {} and {} on tensor cores",
        all.len(),
        with("HMMA"),
        with("HGMMA")
    );
}

/// Factors in bf16 have tensor maps, which the launch of each kernel gets from the device.
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
    run("gpu.mcc --device cpu")
        .misuses_with(&["`gpu.mcc` is compiled for GPUs (sm_80), which the device `cpu` does not run", "cuda or emulated does"]);
    run("cpu.mcc --device emulated").misuses_with(&["`cpu.mcc` is compiled for the CPU", "which the device `emulated` does not run: cpu does"]);
    run("gpu.mcc --device emulated --exchanges nccl").misuses_with(&["cannot exchange through NCCL: GPUs do, the device `emulated` does not"]);
    dir.line("dump cpu.mcc --level ptx").misuses_with(&["has no PTX: compile with --target sm_80 or sm_90a"]);
    dir.line(&format!("{MLP} --target sm_1")).misuses_with(&["unknown target `sm_1`", "sm_90a"]);
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
    // Lines of the model stand above a kernel of loops, and before the code of each of its ops.
    let kernel = text.split("// kernel ").find(|k| k.contains("reduce_sum")).expect("there are sums");
    let head: Vec<&str> = kernel.lines().skip(1).take(96).collect();
    expect_test::expect_file!["./expected/ptx.txt"].assert_eq(&(head.join("\n").replace(&models().display().to_string(), "models") + "\n"));
}
