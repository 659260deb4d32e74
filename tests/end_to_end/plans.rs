//! Plans that must not change what is computed, as processes with native kernels.

use crate::mcc::{Dir, metrics};
use std::fs;

const TEXT: &str = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. ";

/// A small GPT-2, Llama or Mixtral.
fn model(name: &str) -> &'static str {
    match name {
        "gpt2" => "{models}/gpt2.mdl -D vocab=128 -D hidden=32 -D heads=4 -D layers=4 -D seq=32",
        "llama" => "{models}/llama.mdl -D vocab=128 -D hidden=32 -D heads=4 -D kv_heads=2 -D ffn=48 -D layers=4 -D seq=32",
        _ => "{models}/mixtral.mdl -D vocab=128 -D hidden=32 -D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=32 -D layers=2 -D seq=32",
    }
}

/// Three steps of one plan: the metrics, and the bytes of the weights.
fn train(name: &str, plan: &str, steps: u32) -> (Vec<serde_json::Value>, Vec<u8>) {
    let dir = Dir::new();
    dir.write("corpus.txt", TEXT.repeat(200));
    let batch = if name == "mixtral" { "--micro-batch-size" } else { "--global-batch-size" };
    let rows = if name == "mixtral" && plan.contains("--dp 2") { 2 } else { 4 };
    dir.line(&format!("compile {} {plan} {batch} {rows} --lr 2e-3 --lr-warmup-iters 0 -o out.mcc", model(name))).succeeds();
    dir.line(&format!("run out.mcc --data corpus.txt --steps {steps} --force --metrics m.jsonl --save-weights w.safetensors --threads-per-rank 1"))
        .succeeds();
    (metrics(&dir.path("m.jsonl")), fs::read(dir.path("w.safetensors")).expect("weights"))
}

#[test]
fn recomputation_changes_no_bit() {
    for (name, mesh) in [("gpt2", "--tp 2 --sp"), ("llama", "--cp 2"), ("gpt2", "--bf16")] {
        let kept = train(name, mesh, 3).1;
        let full = "--recompute full --recompute-method";
        let named = "--recompute selective --recompute-modules mlp,norm";
        for how in
            ["--recompute selective", named, &format!("{full} uniform --recompute-num-layers 2"), &format!("{full} block --recompute-num-layers 2")]
        {
            assert!(train(name, &format!("{mesh} {how}"), 3).1 == kept, "{name} {mesh} {how}");
        }
    }
}

#[test]
fn products_in_chunks_change_no_bit() {
    for (name, mesh) in [("gpt2", "--tp 2 --sp"), ("llama", "--tp 2"), ("llama", "--tp 2 --sp --bf16")] {
        let whole = train(name, mesh, 2).1;
        for how in ["--tp-comm-overlap", "--tp-comm-overlap=pipeline --tp-comm-overlap-chunks 2"] {
            assert!(train(name, &format!("{mesh} {how}"), 2).1 == whole, "{name} {mesh} {how}");
        }
    }
}

/// The order of a pipeline's passes decides nothing but time. Where layers are decides how the gradient norm's terms
/// are added up.
#[test]
fn every_schedule_ends_with_the_same_weights() {
    let (reports, weights) = train("gpt2", "--pp 2", 3);
    for schedule in ["--pipeline-schedule gpipe", "--pipeline-schedule zb-h1"] {
        assert!(train("gpt2", &format!("--pp 2 {schedule}"), 3).1 == weights, "{schedule}");
    }
    for schedule in ["--vpp 2", "--pipeline-schedule zb-v"] {
        let got = train("gpt2", &format!("--pp 2 {schedule}"), 3).0;
        assert!(agree(&got, &reports), "{schedule}: {got:?} instead of {reports:?}");
    }
}

/// A schedule that runs passes in pairs begins one backward pass later; sums are made in the same order.
#[test]
fn passes_side_by_side_end_with_the_same_weights() {
    for (name, flags) in [
        ("gpt2", "--tp 2 --pp 2"),
        ("mixtral", "--dp 2 --ep 2 --global-batch-size 16 --moe-buffer-factor 0.3"),
        ("mixtral", "--dp 2 --ep 2 --pp 2 --zero 1 --global-batch-size 16"),
    ] {
        let [apart, paired] = ["", "--overlap-moe-expert-parallel-comm"].map(|more| train(name, &format!("{flags} {more}"), 3).1);
        assert!(apart == paired, "{name} {flags}");
    }
}

/// Whether losses and gradient norms are those of another run but for rounding.
fn agree(got: &[serde_json::Value], want: &[serde_json::Value]) -> bool {
    let number = |m: &serde_json::Value, name: &str| m[name].as_f64().unwrap_or(f64::NAN);
    let near = |(g, w): (&serde_json::Value, &serde_json::Value)| ["loss", "grad_norm"].iter().all(|k| (number(g, k) - number(w, k)).abs() < 1e-4);
    got.len() == want.len() && got.iter().zip(want).all(near)
}

#[test]
fn experts_and_zero_levels_agree_with_one_rank() {
    // The balance loss of mixtral is over the whole batch here, however many microbatches there are.
    for (name, settings, plans) in [
        (
            "mixtral",
            "-D aux_per_sequence=false",
            ["--dp 2 --ep 2 --moe-passes 3", "--dp 2 --tp 2 --sp --ep 4 --etp 1", "--dp 2 --tp 2 --sp --ep 2 --zero 1"],
        ),
        ("llama", "", ["--dp 2 --zero 1", "--dp 2 --zero 2", "--dp 2 --cp 2 --zero 3"]),
    ] {
        let one = train(name, settings, 3).0;
        for plan in plans {
            let got = train(name, &format!("{settings} {plan}"), 3).0;
            assert!(agree(&got, &one), "{name} {plan}: {got:?} instead of {one:?}");
        }
    }
}

#[test]
fn sixteen_bits_train_nearly_as_thirty_two_do() {
    let loss = |m: &[serde_json::Value]| m.last().and_then(|m| m["loss"].as_f64()).expect("a loss");
    let want = loss(&train("gpt2", "--tp 2", 12).0);
    for dtype in ["--bf16", "--fp16 --initial-loss-scale 1024"] {
        let got = train("gpt2", &format!("--tp 2 {dtype}"), 12).0;
        assert!((loss(&got) - want).abs() < 0.05, "{dtype}: {} instead of {want}", loss(&got));
        assert!(loss(&got) < got[0]["loss"].as_f64().expect("a loss") - 0.5, "{dtype} does not learn");
    }
}

/// Every overflow leaves the step out; after two the scale is halved each time, until a step counts.
#[test]
fn a_loss_scale_that_is_too_great_comes_down() {
    let got = train("gpt2", "--fp16 --initial-loss-scale 67108864", 12).0;
    let skipped = got.iter().take_while(|m| m["skipped"] == true).count();
    let scale = |k: usize| got[k]["loss_scale"].as_f64().expect("a scale");
    assert!((1..12).contains(&skipped), "{skipped} steps are skipped");
    assert!(scale(skipped) < scale(0) && got[skipped]["grad_norm"].is_f64(), "{got:?}");
}

/// A scale that falls, waits and grows goes on where it stood, as weights and optimizer states do.
#[test]
fn a_resumed_run_with_a_loss_scale_ends_with_the_same_bits() {
    let dir = Dir::new();
    dir.write("corpus.txt", TEXT.repeat(200));
    let scale = "--fp16 --initial-loss-scale 67108864 --loss-scale-window 3 --hysteresis 2";
    dir.line(&format!("compile {} {scale} --global-batch-size 4 --lr 2e-3 --lr-warmup-iters 0 --lr-decay-style constant -o out.mcc", model("gpt2")))
        .succeeds();
    let run = |flags: &str| {
        dir.line(&format!("run out.mcc --data corpus.txt --force --metrics m.jsonl --save-weights w.safetensors {flags}")).succeeds();
        let scales: Vec<f64> = metrics(&dir.path("m.jsonl")).iter().map(|m| m["loss_scale"].as_f64().expect("a scale")).collect();
        (scales, fs::read(dir.path("w.safetensors")).expect("weights"))
    };
    let (scales, weights) = run("--steps 14");
    assert!(scales.windows(2).any(|s| s[1] < s[0]) && scales.windows(2).any(|s| s[1] > s[0]), "{scales:?}");
    for cut in [1, 4, 9] {
        let (before, _) = run(&format!("--steps {cut} --save-state s.safetensors"));
        assert_eq!(before, scales[..cut], "cut after {cut}");
        // The resumed run appends to the metrics.
        let (both, resumed) = run("--steps 14 --resume s.safetensors");
        assert_eq!(both, scales, "cut after {cut}");
        assert!(resumed == weights, "cut after {cut}");
    }
}

#[test]
fn experts_train_in_sixteen_bits_nearly_as_in_thirty_two() {
    let loss = |m: &[serde_json::Value]| m.last().and_then(|m| m["loss"].as_f64()).expect("a loss");
    let want = loss(&train("mixtral", "", 12).0);
    for plan in ["--bf16", "--bf16 --dp 2 --ep 2"] {
        let got = train("mixtral", plan, 12).0;
        assert!((loss(&got) - want).abs() < 0.05, "{plan}: {} instead of {want}", loss(&got));
        assert!(loss(&got) < got[0]["loss"].as_f64().expect("a loss") - 0.5, "{plan} does not learn");
    }
}
