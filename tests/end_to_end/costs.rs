//! `mcc dump --level ptx --costs`, and what the kernels of a step may ask of a card.

use crate::mcc::{Dir, models};
use serde_json::Value;

/// The kernels of a step of one rank, on an H100 or A100.
fn kernels(dir: &Dir, name: &str, target: &str, flags: &str) -> Vec<Value> {
    dir.line(&format!("compile {} --target {target} {flags} -o {name}.mcc", models().join(format!("{name}.mdl")).display())).succeeds();
    let said = dir.line(&format!("dump {name}.mcc --level ptx --costs --json")).succeeds().stdout;
    let all: Value = serde_json::from_str(&said).expect("JSON");
    let rows = all["classes"]["0"].as_array().expect("a list").clone();
    for row in &rows {
        assert!(row["predicted"].is_object(), "{row}");
    }
    rows
}

#[test]
fn each_kernel_has_a_time_and_a_reason() {
    let dir = Dir::new();
    let flags = "--dtype bf16 -D hidden=128 -D heads=2 -D layers=1 -D seq=64 -D vocab=256 --micro-batch-size 2 --global-batch-size 4";
    dir.line(&format!("compile {} --target sm_90a {flags} -o a.mcc", models().join("gpt2.mdl").display())).succeeds();
    let said = dir.line("dump a.mcc --level ptx --costs").succeeds().stdout;
    assert!(said.starts_with("predicted for H100 SXM, class 0: "), "{said}");
    for what in ["dot 128x512x128", "attention, attention_lse 2x64x2x64", "scatter 256x128", "launch", "latency"] {
        assert!(said.contains(what), "no {what}: {said}");
    }
    // Two microbatches a step.
    let gather = said.lines().find(|l| l.contains("gather")).expect("rows of the embedding");
    assert_eq!(gather.split_whitespace().nth(3), Some("2"), "{gather}");
    dir.line("dump a.mcc --costs").fails_with(&["--costs goes with --level ptx"]);
    dir.line("dump a.mcc --level ptx --costs --card v100").fails_with(&["no card is called `v100`", "`A100 SXM 80GB`"]);
    dir.line("dump a.mcc --level ptx --costs --card a100").fails_with(&["code for sm_90a does not run on `A100 SXM 80GB`"]);
    let said = dir.line("dump a.mcc --level ptx --costs --card h200").succeeds().stdout;
    assert!(said.starts_with("predicted for H200 SXM"), "{said}");
}

/// Warps that fill the largest GPU of today.
const ENOUGH: f64 = 8.0 * 132.0;
/// Bytes that a warp is worth.
const WORTH: f64 = 512.0;

/// What a kernel asks for and should not, if anything.
fn found(row: &Value) -> Vec<String> {
    let number = |key: &str| row[key].as_f64().expect("a number");
    let of = |key: &str| row["predicted"][key].as_f64();
    let mut found = vec![];
    let warps = number("blocks") * number("warps");
    let asked = ENOUGH.min(number("bytes") / WORTH);
    if matches!(row["family"].as_str(), Some("loops" | "sums by index")) && warps < asked / 2.0 {
        found.push(format!("{warps} warps for {} bytes", number("bytes")));
    }
    if of("sectors") > Some(1.1) {
        found.push(format!("{:?} times the sectors that it needs", of("sectors")));
    }
    if of("narrow") > Some(0.05) {
        found.push(format!("{:?} of its bytes by less than 4", of("narrow")));
    }
    if of("banks") > Some(1.1) {
        found.push(format!("{:?} times the wavefronts that it needs", of("banks")));
    }
    found
}

#[test]
fn kernels_fill_a_card_and_ask_for_no_more_than_they_need() {
    let dir = Dir::new();
    let sizes = "-D hidden=1024 -D heads=16 -D layers=1 -D seq=512 -D vocab=8192 --dtype bf16 --micro-batch-size 2 --global-batch-size 2";
    let models = [("gpt2", ""), ("llama", "-D kv_heads=4 -D ffn=2816"), ("mixtral", "-D kv_heads=4 -D experts=4 -D expert_ffn=1408")];
    let mut all = vec![];
    for (name, own) in models {
        for row in kernels(&dir, name, "sm_90a", &format!("{sizes} {own}")) {
            for found in found(&row) {
                all.push(format!("{name}: {} ({}): {found}", row["name"].as_str().unwrap_or_default(), row["kernel"].as_str().unwrap_or_default()));
            }
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}
