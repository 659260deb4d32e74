//! What a run reads and reports.

use crate::mcc::{Dir, metrics, save_array};
use std::fs;

const GPT2: &str = "compile {models}/gpt2.mdl --tp 2 --global-batch-size 2 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 -o out.mcc";
const TEXT: &str = "The quick brown fox jumps over the lazy dog, and then over a wall. ";

fn compiled(flags: &str) -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", TEXT);
    dir.line(&format!("{GPT2} {flags}")).succeeds();
    dir
}

fn run(dir: &Dir, flags: &str) -> Vec<serde_json::Value> {
    dir.line(&format!("run out.mcc --force --metrics m.jsonl {flags}")).succeeds();
    metrics(&dir.path("m.jsonl"))
}

#[test]
fn every_step_has_its_line_of_metrics() {
    let dir = compiled("--lr 0.5 --min-lr 0.1 --lr-decay-style linear --lr-warmup-iters 2 --lr-decay-iters 4");
    let lines = run(&dir, "--data text.txt --steps 5");
    let of = |name: &str| lines.iter().map(|l| l[name].as_f64().expect("a number")).collect::<Vec<f64>>();
    assert_eq!(of("step"), [1.0, 2.0, 3.0, 4.0, 5.0]);
    let rates = of("lr");
    assert!(rates.iter().zip([0.25, 0.5, 0.3, 0.1, 0.1]).all(|(got, want)| (got - want).abs() < 1e-12), "{rates:?}");
    for name in ["loss", "grad_norm", "tokens_per_s", "step_ms"] {
        assert!(of(name).iter().all(|x| *x > 0.0), "{name}: {:?}", of(name));
    }
}

/// Of the passes of rows of experts, those run that a rank has rows for: some where room is scarce, none where it is
/// not.
#[test]
fn steps_say_how_many_further_passes_ran() {
    let dir = Dir::new();
    dir.write("text.txt", TEXT.repeat(20));
    let model = "{models}/mixtral.mdl -D vocab=256 -D hidden=16 -D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=8 -D layers=2 -D seq=32";
    let trained = |room: &str| {
        dir.line(&format!("compile {model} --dp 2 --ep 2 --micro-batch-size 2 --global-batch-size 8 {room} -o out.mcc")).succeeds();
        let lines = run(&dir, "--data text.txt --steps 3");
        let of = |name: &str| lines.iter().map(|l| l[name].as_f64()).collect::<Vec<_>>();
        (of("loss"), of("moe_further_passes"))
    };
    let (want, none) = trained("--moe-passes 1");
    assert_eq!(none, [None; 3], "one pass has room for all");
    for (room, some) in [("--moe-buffer-factor 0.3", true), ("--moe-buffer-factor 1.8", false)] {
        let (losses, further) = trained(room);
        let near = |(got, want): (&Option<f64>, &Option<f64>)| got.zip(*want).is_some_and(|(got, want)| (got - want).abs() < 1e-5 * want);
        assert!(losses.len() == 3 && losses.iter().zip(&want).all(near), "{room}: {losses:?}, in one pass {want:?}");
        let ran = |part: &Option<f64>| part.is_some_and(|part| if some { 0.0 < part && part < 1.0 } else { part == 0.0 });
        assert!(further.iter().all(ran), "{room}: {further:?}");
    }
}

/// By flags, and by the text, whose numbers flags override.
#[test]
fn a_rate_stays_and_falls_at_the_end() {
    let dir = compiled(
        "--lr 0.5 --min-lr 0.1 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 2 --lr-warmup-iters 1 --lr-decay-iters 5",
    );
    let rates = |dir: &Dir| run(dir, "--data text.txt --steps 6").iter().map(|l| l["lr"].as_f64().expect("a number")).collect::<Vec<f64>>();
    let near = |got: Vec<f64>, wanted: [f64; 6]| assert!(got.iter().zip(wanted).all(|(got, want)| (got - want).abs() < 1e-12), "{got:?}");
    near(rates(&dir), [0.5, 0.5, 0.5, 0.3, 0.1, 0.1]);
    let text = fs::read_to_string(crate::mcc::models().join("gpt2.mdl")).expect("a text");
    let (before, rest) = text.split_once("lr: ").expect("a rate");
    let (_, after) = rest.split_once(';').expect("its end");
    dir.write("wsd.mdl", format!("{before}lr: minus_sqrt(0.5, to: 0.1, steps: 5, falling: 4);{after}"));
    let line = GPT2.replace("{models}/gpt2.mdl", "wsd.mdl");
    dir.line(&line).succeeds();
    near(rates(&dir), [0.5, 0.3, 0.1 + 0.4 * (1.0 - 0.5f64.sqrt()), 0.1 + 0.4 * (1.0 - 0.75f64.sqrt()), 0.1, 0.1]);
    dir.line(&format!("{line} --lr-wsd-decay-iters 2 --lr-wsd-decay-style exponential")).succeeds();
    near(rates(&dir), [0.5, 0.5, 0.5, 0.1 + 0.4 * (2.0 * 0.5f64.sqrt() - 1.0), 0.1, 0.1]);
    dir.line(&format!("{line} --lr-decay-style linear")).succeeds();
    near(rates(&dir), [0.42, 0.34, 0.26, 0.18, 0.1, 0.1]);
}

#[test]
fn what_happens_in_a_run_is_logged() {
    let dir = compiled("--lr-warmup-iters 2");
    let job = "run out.mcc --data text.txt --log-dir log --tensorboard-dir board --save ck --save-interval 2";
    dir.line(&format!("{job} --steps 5")).succeeds();
    dir.line(&format!("{job} --steps 6")).fails_with(&["`log/run.jsonl` exists: --force replaces it"]);
    dir.line(&format!("{job} --steps 7 --load ck")).succeeds();
    let lines = |name: &str| -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(dir.path("log").join(name)).expect("a log");
        text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
    };
    assert_eq!(lines("metrics.jsonl").iter().map(|l| l["step"].as_u64()).collect::<Vec<_>>(), (1..=7).map(Some).collect::<Vec<_>>());
    assert!(lines("metrics.jsonl").iter().all(|l| l["memory_bytes"].as_u64() > Some(0) && l["mfu"].as_f64() > Some(0.0)));
    let run = lines("run.jsonl");
    let told: Vec<_> = run.iter().map(|r| (r["event"].as_str().expect("an event"), r["step"].as_u64(), r["first"].as_u64())).collect();
    let saved = |step| ("saved", Some(step), None);
    let began = |first| ("began", None, Some(first));
    let ended = |step| ("ended", Some(step), None);
    assert_eq!(told, [began(1), saved(2), saved(4), saved(5), ended(5), began(6), saved(6), saved(7), ended(7)]);
    let words: Vec<&str> = run[0]["command"].as_array().expect("words").iter().filter_map(|w| w.as_str()).collect();
    assert_eq!(words.join(" "), format!("{job} --steps 5"));
    assert!(run[0]["memory"][0]["parameters"].as_u64() > Some(0) && run[4]["how"] == "whole");
    // Each of the two runs has a file of events.
    assert_eq!(std::fs::read_dir(dir.path("board")).expect("a directory").count(), 2);
    dir.write("file", "x");
    dir.line("run out.mcc --data text.txt --steps 1 --log-dir file").fails_with(&["`file` is a file, and a directory is asked for"]);
}

#[test]
fn text_tokens_and_arrays_are_the_same_data() {
    let dir = compiled("");
    let losses = |flags: &str| run(&dir, flags).iter().map(|l| l["loss"].to_string()).collect::<Vec<_>>();
    let text = losses("--data text.txt --steps 3");
    // Sequence n is the window of 9 tokens from 8 n on.
    let bytes = TEXT.as_bytes();
    let windows = (0..6).flat_map(|n| bytes[8 * n..8 * n + 9].iter().map(|b| i32::from(*b)));
    save_array(&dir.path("windows.npy"), &[3, 2, 9], windows);
    assert_eq!(losses("--data windows.npy"), text);
    let header = [20240520u32, 1, bytes.len() as u32].into_iter().chain([0; 253]).flat_map(u32::to_le_bytes);
    dir.write("tokens.bin", header.chain(bytes.iter().flat_map(|b| u16::from(*b).to_le_bytes())).collect::<Vec<u8>>());
    assert_eq!(losses("--data tokens.bin --steps 3"), text);
    let part = |from: usize| (0..6).flat_map(move |n| bytes[8 * n + from..8 * n + from + 8].iter().map(|b| i32::from(*b)));
    save_array(&dir.path("tokens.npy"), &[3, 2, 8], part(0));
    save_array(&dir.path("targets.npy"), &[3, 2, 8], part(1));
    assert_eq!(losses("--data tokens=tokens.npy --data targets=targets.npy"), text);
}

#[test]
fn a_held_out_loss_of_the_same_data_is_the_loss() {
    let dir = compiled("--lr 0 --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0");
    let lines = run(&dir, "--data text.txt --steps 4 --valid-data text.txt --eval-interval 2 --eval-iters 1");
    let valid: Vec<Option<f64>> = lines.iter().map(|l| l["valid_loss"].as_f64()).collect();
    assert!(valid[0].is_none() && valid[2].is_none(), "{valid:?}");
    let first = lines[0]["loss"].as_f64().expect("a number");
    for v in [valid[1], valid[3]] {
        assert!(v.is_some_and(|v| (v - first).abs() < 1e-5 * first), "{valid:?} for {first}");
    }
}

#[test]
fn training_learns_a_text_by_heart() {
    let dir = compiled("--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --lr-warmup-iters 5");
    let lines = run(&dir, "--data text.txt --steps 120 --save-weights w.safetensors");
    let loss = |k: usize| lines[k]["loss"].as_f64().expect("a number");
    assert!((loss(0) - 256f64.ln()).abs() < 0.3, "{}", loss(0));
    assert!(loss(119) < 1.5, "{}", loss(119));
    assert!(fs::metadata(dir.path("w.safetensors")).is_ok());
}

#[test]
fn a_profile_names_kernels_by_lines_of_the_model_and_writes_a_trace_of_all_ranks() {
    let dir = compiled("--pp 2 --micro-batch-size 1");
    let out = dir.line("run out.mcc --data text.txt --profile --profile-steps 3").succeeds().stdout;
    let parts =
        ["step      5/5", "profile of steps 3 to 5, 4 ranks", "GFLOP/s in f32", "gpt2.mdl:", "forward", "the whole step", "wrote out.trace.json"];
    for part in parts {
        assert!(out.contains(part), "no `{part}` in\n{out}");
    }
    let trace: serde_json::Value = serde_json::from_slice(&fs::read(dir.path("out.trace.json")).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    for rank in 0..4 {
        let steps: Vec<_> = events.iter().filter(|e| e["pid"] == rank && e["tid"] == 0 && e["ph"] == "X").map(|e| &e["name"]).collect();
        assert_eq!(steps, ["step 3", "step 4", "step 5"]);
    }
}

/// Hugging Face's `_shift_right`: what stands before is 0, and so is what comes after a label that does not count.
#[test]
fn t5_reads_padding_after_labels_that_do_not_count() {
    let dir = Dir::new();
    let sizes = "-D vocab=32 -D hidden=8 -D heads=2 -D head_dim=4 -D ffn=8 -D encoder_layers=1 -D decoder_layers=1 -D source=8 -D target=6";
    dir.line(&format!("compile {{models}}/t5.mdl {sizes} -D buckets=4 -D max_distance=8 --lr-warmup-iters 0 -o out.mcc")).succeeds();
    let labels = [7, 3, 9, -100, -100, -100, 5, -100, 4, 2, 1, -100];
    save_array(&dir.path("source.npy"), &[2, 1, 8], (0..16).map(|k| k * 5 % 32));
    save_array(&dir.path("labels.npy"), &[2, 1, 6], labels);
    save_array(&dir.path("shifted.npy"), &[2, 1, 6], [0, 7, 3, 9, 0, 0, 0, 5, 0, 4, 2, 1]);
    let losses = |flags: &str| {
        let of_step = |l: &serde_json::Value| l["loss"].as_f64().expect("a finite loss");
        run(&dir, &format!("--data tokens=source.npy --data labels=labels.npy {flags}")).iter().map(of_step).collect::<Vec<_>>()
    };
    let derived = losses("");
    assert_eq!(derived.len(), 2);
    assert_eq!(derived, losses("--data shifted=shifted.npy"));
}

#[test]
fn tokens_that_steps_would_stumble_over_are_found_before_the_first() {
    let dir = compiled("");
    let tokens = |place: u64| (0..2000 * 18).map(move |k| if k == place { 256 } else { k as i32 % 256 });
    save_array(&dir.path("late.npy"), &[2000, 2, 9], tokens(35_990));
    let said = dir.line("run out.mcc --data late.npy --metrics m.jsonl").fails_with(&["`late.npy`", "element 35990 is 256"]);
    assert_eq!((said.stdout.as_str(), dir.path("m.jsonl").exists()), ("", false));
    // Tokens that no step asks for are not read.
    dir.line("run out.mcc --data late.npy --steps 3").succeeds();
}
