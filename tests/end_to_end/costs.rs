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
    // A step has two microbatches.
    let gather = said.lines().find(|l| l.contains("gather")).expect("rows of the embedding");
    assert_eq!(gather.split_whitespace().nth(3), Some("2"), "{gather}");
    dir.line("dump a.mcc --costs").misuses_with(&["--costs goes with --level ptx"]);
    dir.line("dump a.mcc --level ptx --costs --card v100").misuses_with(&["no card is called `v100`", "`A100 SXM 80GB`"]);
    dir.line("dump a.mcc --level ptx --costs --card a100").misuses_with(&["code for sm_90a does not run on `A100 SXM 80GB`"]);
    let said = dir.line("dump a.mcc --level ptx --costs --card h200").succeeds().stdout;
    assert!(said.starts_with("predicted for H200 SXM"), "{said}");
}

/// Warps that fill the largest GPU of today.
const ENOUGH: f64 = 8.0 * 132.0;
/// Bytes of all operands that a warp is worth: some runs of 16 bytes a lane.
const WORTH: f64 = 4096.0;
/// Bytes of memory a second, and seconds of a launch and of what a kernel may wait beside.
const MEMORY: f64 = 3.02e12;
const BESIDE: f64 = 12e-6;

/// What a kernel asks for and should not, if anything.
fn found(row: &Value) -> Vec<String> {
    let number = |key: &str| row[key].as_f64().expect("a number");
    let of = |key: &str| row["predicted"][key].as_f64().unwrap_or(0.0);
    let (family, name) = (row["family"].as_str().expect("a word"), row["name"].as_str().expect("a name"));
    let (warps, bytes) = (number("blocks") * number("warps"), number("bytes"));
    let mut found = vec![];
    if matches!(family, "loops" | "sums by index") && warps < ENOUGH.min(bytes / WORTH) / 4.0 {
        found.push(format!("{warps} warps for {bytes} bytes"));
    }
    // Each row by index is one request, whatever its size, and a warp adds its rows one after the other.
    let beside = if family == "sums by index" { 3.0 * BESIDE } else { BESIDE };
    if matches!(family, "loops" | "sums by index") && of("seconds") > 2.0 * bytes / MEMORY + beside {
        found.push(format!("{} us for {bytes} bytes, {} trips", 1e6 * of("seconds"), of("trips")));
    }
    let most = match family {
        "loops" if !name.starts_with("gather") => 1.1,
        // The last tiles of a product reach beyond its operands.
        "product" => 1.2,
        _ => f64::INFINITY,
    };
    if of("sectors") > most {
        found.push(format!("{} times the sectors that it needs", of("sectors")));
    }
    // In sums over rows each lane has a column of 16 bits. Rotations work on halves of a head: for heads of 64 a lane
    // has one pair, and half of the bytes are such pairs.
    let most = if name.starts_with("cast, mul, neg, add") { 0.51 } else { 0.34 };
    if family == "loops" && of("narrow") > most && !name.starts_with("reduce_sum") && !name.starts_with("dot") {
        found.push(format!("{} of its bytes by less than 4", of("narrow")));
    }
    if of("banks") > 1.1 {
        found.push(format!("{} times the wavefronts that it needs", of("banks")));
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
            let what = format!("{name}: {} ({})", row["name"].as_str().expect("a name"), row["kernel"].as_str().expect("a symbol"));
            all.extend(found(&row).into_iter().map(|found| format!("{what}: {found}")));
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}
