//! The reference cases: models trained for 20 steps by Hugging Face transformers, to agree with on every mesh. Imported, compiled,
//! run as processes, exported, and judged as strictly as their noise allows.

#[path = "../cases/judge.rs"]
mod judge;

use crate::mcc::{Dir, metrics};
use judge::{Run, judge};
use std::fs;
use std::path::PathBuf;

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");

/// AdamW as in the cases' README.
const TRAIN: &str = "--optimizer adamw --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0";

fn agrees(case: &str, mesh: &str) {
    let dir = Dir::new();
    let from = format!("{CASES}/{case}");
    dir.line(&format!("import hf {from} -o model")).succeeds();
    dir.line(&format!("compile model/model.mdl {mesh} -D seq=64 --global-batch-size 8 {TRAIN} -o out.mcc")).succeeds();
    dir.line(&format!("run out.mcc --data {from}/tokens.npy --init model/weights.safetensors --save trained.safetensors --metrics m.jsonl"))
        .succeeds();
    dir.line("export hf trained.safetensors --model model/model.mdl -D seq=64 -o exported").succeeds();
    let steps = metrics(&dir.path("m.jsonl"));
    let of = |name: &str| steps.iter().map(|s| s[name].as_f64().expect("a number")).collect::<Vec<f64>>();
    let norms = convert::norms(&dir.path("exported/model.safetensors")).expect("exported weights");
    let expected = fs::read(PathBuf::from(&from).join("expected.json")).expect("the case");
    let expected = serde_json::from_slice(&expected).expect("JSON");
    let wrong = judge(&Run { losses: &of("loss"), grad_norms: &of("grad_norm"), param_norms: Some(&norms) }, &expected);
    assert!(wrong.is_empty(), "{case} {mesh}: {wrong:#?}");
}

fn agrees_on(mesh: &str) {
    agrees("gpt2", mesh);
    agrees("llama", mesh);
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
