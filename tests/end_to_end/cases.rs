//! The reference cases: models trained for 20 steps by Hugging Face transformers, to agree with on every mesh.
//! Imported, compiled, run as processes, exported, and judged as strictly as their noise allows.

#[path = "../cases/judge.rs"]
mod judge;

use crate::differential::meshes::{meshes, mixed};
use crate::harness::Case;
use crate::mcc::{CommandOutput, Dir, metrics};
use crate::triples::mesh_arguments;
use judge::{Bounds, Run, judge, judge_within};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");

/// AdamW as in the cases' README, but for its epsilon.
const TRAIN: &str =
    "--optimizer adamw --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0";

/// Cases with the same batch, lengths and epsilon.
struct Series {
    batch: u64,
    /// Lengths of sequences, as settings.
    lengths: &'static str,
    epsilon: &'static str,
    names: &'static [&'static str],
}

/// Cases of 20 steps.
const LONG: Series = Series { batch: 8, lengths: "-D seq=64", epsilon: "1e-8", names: &["gpt2", "llama"] };

/// Cases of 6 steps, one per architecture.
const SHORT: Series = Series {
    batch: 4,
    lengths: "-D seq=24",
    epsilon: "1e-6",
    names: &[
        "llama31",
        "llama_yarn",
        "mistral",
        "qwen2",
        "qwen3",
        "olmo2",
        "phi3",
        "phi3_long",
        "phi3_short",
        "nemotron",
        "gemma2",
        "gemma3",
        "bert",
    ],
};

/// Cases of 6 steps with experts, whose balance loss is a mean over the batch: one microbatch.
const EXPERTS: Series = Series {
    batch: 4,
    lengths: "-D seq=24",
    epsilon: "1e-6",
    names: &["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_mtp", "deepseek_yarn", "gpt_oss"],
};

/// Cases of 6 steps with an encoder and a decoder.
const STACKS: Series = Series { batch: 4, lengths: "-D source=20 -D target=16", epsilon: "1e-6", names: &["t5", "t5_relu"] };

/// Arrays beside the tokens, by the input's name.
const FURTHER: [&str; 2] = ["labels", "kinds"];

fn agrees(case: &str, series: &Series, mesh: &str) {
    let dir = Dir::new();
    compiles(&dir, case, series, &format!("{mesh} --global-batch-size {}", series.batch)).succeeds();
    trains(&dir, case, series, mesh);
}

fn compiles(dir: &Dir, case: &str, Series { lengths, epsilon, .. }: &Series, mesh: &str) -> CommandOutput {
    dir.line(&format!("import hf {CASES}/{case} -o model")).succeeds();
    dir.line(&format!("compile model/model.mdl {mesh} {lengths} {TRAIN} --adam-eps {epsilon} -o out.mcc"))
}

/// What training a compiled case came to.
struct Trained {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    param_norms: BTreeMap<String, f64>,
}

fn trained(dir: &Dir, case: &str, Series { lengths, .. }: &Series) -> Trained {
    let from = format!("{CASES}/{case}");
    let further = FURTHER.into_iter().map(|name| (name, format!("{from}/{name}.npy"))).filter(|(_, path)| PathBuf::from(path).exists());
    let further: String = further.map(|(name, path)| format!(" --data {name}={path}")).collect();
    let data = if further.is_empty() { format!("--data {from}/tokens.npy") } else { format!("--data tokens={from}/tokens.npy{further}") };
    dir.line(&format!("run out.mcc {data} --init model/weights.safetensors --save-weights trained.safetensors --metrics m.jsonl")).succeeds();
    dir.line(&format!("export hf trained.safetensors --model model/model.mdl {lengths} -o exported")).succeeds();
    let steps = metrics(&dir.path("m.jsonl"));
    let of = |name: &str| steps.iter().map(|s| s[name].as_f64().expect("a number")).collect::<Vec<f64>>();
    let param_norms = convert::norms(&dir.path("exported/model.safetensors")).expect("exported weights");
    Trained { losses: of("loss"), grad_norms: of("grad_norm"), param_norms }
}

fn expected(case: &str, file: &str) -> serde_json::Value {
    let text = fs::read(PathBuf::from(CASES).join(case).join(file)).expect("the case");
    serde_json::from_slice(&text).expect("JSON")
}

fn trains(dir: &Dir, case: &str, series: &Series, mesh: &str) {
    let Trained { losses, grad_norms, param_norms } = trained(dir, case, series);
    let run = Run { losses: &losses, grad_norms: &grad_norms, param_norms: Some(&param_norms) };
    let wrong = judge(&run, &expected(case, "expected.json"));
    assert!(wrong.is_empty(), "{case} {mesh}: {wrong:#?}");
}

/// Of cases with a run in bf16, by PyTorch's autocast, which keeps the stream between layers in f32 where mcc rounds
/// it. A rounding moves a number by 2^-9 of it at most, up or down. A loss is a mean over tokens, in which roundings
/// cancel: within one of them. An element of a gradient has some 50 behind it (12 operations a layer, there and
/// back), so it is off by sqrt(50) of them; those of the head are in all elements alike, and in the norm.
const BF16: Bounds = Bounds { losses: 1.0 / 512.0, grad_norms: 7.0 / 512.0, param_norms: f64::INFINITY };

fn agrees_in_bf16(mesh: &str) {
    for case in ["llama31", "qwen2"] {
        let dir = Dir::new();
        compiles(&dir, case, &SHORT, &format!("--bf16 {mesh} --global-batch-size {}", SHORT.batch)).succeeds();
        let Trained { losses, grad_norms, .. } = trained(&dir, case, &SHORT);
        let run = Run { losses: &losses, grad_norms: &grad_norms, param_norms: None };
        let wrong = judge_within(&run, &expected(case, "expected.bf16.json"), &BF16);
        assert!(wrong.is_empty(), "{case} {mesh}: {wrong:#?}");
        // Losses that differ from those of f32 show that bf16 was trained.
        let plain = judge(&run, &expected(case, "expected.json"));
        assert!(plain.len() == 2, "{case} {mesh} is exact: {plain:?}");
    }
}

fn agrees_on(mesh: &str) {
    all_agree(&LONG, mesh);
}

/// On one rank, and with `CASES` (`make test-long-native`), all cases of a series; on a mesh, every fifth one of many.
fn all_agree(series: &Series, mesh: &str) {
    let is_mesh = ["--dp", "--tp", "--pp", "--cp"].iter().any(|axis| mesh.contains(axis));
    let one_in = if is_mesh && series.names.len() > 2 && std::env::var_os("CASES").is_none() { 5 } else { 1 };
    // Which ones follows from the mesh, so that each case is tried on some meshes.
    let first = mesh.bytes().map(usize::from).sum::<usize>() % one_in;
    for name in series.names.iter().skip(first).step_by(one_in) {
        agrees(name, series, mesh);
    }
}

#[test]
fn reference_cases_on_one_rank() {
    agrees_on("");
}

#[test]
fn reference_cases_on_dp2() {
    agrees_on("--dp 2");
}

#[test]
fn reference_cases_on_tp2() {
    agrees_on("--tp 2 --sp");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn reference_cases_on_tp2_without_sequence_parallelism() {
    agrees_on("--tp 2");
}

#[test]
fn reference_cases_on_tp4() {
    agrees_on("--tp 4 --sp");
}

#[test]
fn reference_cases_on_pp2() {
    agrees_on("--pp 2");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn reference_cases_on_pp4() {
    agrees_on("--pp 4");
}

#[test]
fn reference_cases_on_tp2_pp2() {
    agrees_on("--tp 2 --pp 2 --sp");
}

#[test]
fn reference_cases_on_dp2_tp2_pp2() {
    agrees_on("--dp 2 --tp 2 --pp 2 --sp");
}

#[test]
fn every_architecture_on_one_rank() {
    all_agree(&SHORT, "");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn every_architecture_on_one_rank_and_one_microbatch() {
    all_agree(&SHORT, "--micro-batch-size 4");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn every_architecture_on_dp2() {
    all_agree(&SHORT, "--dp 2");
}

#[test]
fn every_architecture_on_tp2() {
    all_agree(&SHORT, "--tp 2 --sp");
}

#[test]
fn every_architecture_on_pp2() {
    all_agree(&SHORT, "--pp 2");
}

#[test]
fn every_architecture_on_dp2_tp2_pp2() {
    all_agree(&SHORT, "--dp 2 --tp 2 --pp 2 --sp");
}

#[test]
fn reference_cases_on_cp2() {
    agrees_on("--cp 2");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn reference_cases_on_cp4() {
    agrees_on("--cp 4");
}

#[test]
fn reference_cases_on_cp2_tp2() {
    agrees_on("--cp 2 --tp 2 --sp");
}

#[test]
fn reference_cases_on_cp2_by_gathers_and_by_heads() {
    agrees("gpt2", &LONG, "--cp 2 --cp-comm-type all_gather");
    agrees("llama", &LONG, "--cp 2 --cp-comm-type a2a");
    agrees("llama", &LONG, "--cp 4 --cp-comm-type a2a+p2p");
}

#[test]
fn encoders_and_decoders_on_one_rank_and_on_dp2() {
    all_agree(&STACKS, "");
    all_agree(&STACKS, "--dp 2");
}

#[test]
fn encoders_and_decoders_on_tp2_and_on_cp2() {
    all_agree(&STACKS, "--tp 2 --sp");
    all_agree(&STACKS, "--cp 2");
}

#[test]
fn encoders_and_decoders_on_pp2_and_on_dp2_tp2_pp2() {
    all_agree(&STACKS, "--pp 2");
    all_agree(&STACKS, "--dp 2 --tp 2 --pp 2 --sp");
}

#[test]
fn experts_on_one_rank() {
    all_agree(&EXPERTS, "--micro-batch-size 4");
}

#[test]
fn experts_on_ep2() {
    all_agree(&EXPERTS, "--cp 2 --ep 2 --micro-batch-size 4");
}

#[test]
fn experts_on_tp2() {
    all_agree(&EXPERTS, "--tp 2 --sp --micro-batch-size 4");
    all_agree(&EXPERTS, "--tp 2 --ep 2 --etp 1 --micro-batch-size 4");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn experts_on_dp2_ep2() {
    all_agree(&EXPERTS, "--dp 2 --ep 2 --micro-batch-size 2");
}

#[test]
#[ignore = "one more mesh: make test-long-native"]
fn experts_on_etp2() {
    all_agree(&EXPERTS, "--dp 2 --tp 2 --sp --ep 2 --etp 2 --micro-batch-size 2");
}

#[test]
fn experts_on_pp2() {
    all_agree(&EXPERTS, "--pp 2 --micro-batch-size 4");
}

#[test]
fn every_architecture_on_cp2() {
    all_agree(&SHORT, "--cp 2");
}

#[test]
fn windows_on_cp2_by_gathers_and_by_heads() {
    agrees("mistral", &SHORT, "--cp 2 --cp-comm-type all_gather");
    agrees("mistral", &SHORT, "--cp 2 --cp-comm-type a2a");
    agrees("mixtral", &EXPERTS, "--cp 4 --cp-comm-type a2a+p2p --micro-batch-size 4");
}

/// Four of them, or `NATIVE_MESHES`, from place `NATIVE_FIRST` of the list on: any case on any mesh, as it falls.
/// Sizes, batches and layers that do not go round are refused, nothing else is.
#[test]
fn reference_cases_on_some_meshes_of_eight_ranks() {
    let number = |variable: &str, default: usize| std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default);
    let (count, first) = (number("NATIVE_MESHES", 4), number("NATIVE_FIRST", 0));
    let all = [&LONG, &SHORT, &EXPERTS, &STACKS].into_iter().flat_map(|series| series.names.iter().map(move |name| (series, *name)));
    let all: Vec<(&Series, &str, Case)> =
        all.flat_map(|(series, name)| meshes(EXPERTS.names.contains(&name)).into_iter().map(move |m| (series, name, m))).collect();
    let ran = mixed(all).into_iter().skip(first).filter(|(series, name, mesh)| {
        // A balance loss over the whole batch needs one microbatch; other cases have as many microbatches as fit.
        let rows = series.batch / mesh.dp;
        let mesh = Case { micro_batch: if EXPERTS.names.contains(name) { rows } else { 1 }, global_batch: series.batch, ..mesh.clone() };
        let dir = Dir::new();
        let words = mesh_arguments(&mesh).join(" ");
        if rows == 0 {
            return false;
        }
        let done = compiles(&dir, name, series, &words);
        if done.code == Some(2) && ["error[E0204]", "error[E0208]", "error[E0633]", "error[E0637]"].iter().any(|code| done.stderr.contains(code)) {
            return false;
        }
        done.succeeds();
        trains(&dir, name, series, &words);
        println!("{name} {words}");
        true
    });
    assert!(ran.take(count).count() > 0, "no mesh compiles");
}

#[test]
fn bf16_cases_on_one_rank() {
    agrees_in_bf16("");
}

#[test]
fn bf16_cases_on_tp2() {
    agrees_in_bf16("--tp 2 --sp");
}

#[test]
fn bf16_cases_on_pp2() {
    agrees_in_bf16("--pp 2");
}

#[test]
fn bf16_cases_on_dp2_zero1() {
    agrees_in_bf16("--dp 2 --zero 1");
}
