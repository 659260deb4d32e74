//! `mcc plan`, and plans that `mcc compile` takes.

use crate::mcc::Dir;
use crate::simulate::{drawn, gpt2, json};
use serde_json::Value;
use std::fs;

const SMALL: &str = "-D layers=4 -D hidden=256 -D heads=4 -D seq=128 -D vocab=512";

#[test]
fn a_plan_is_searched_written_and_compiled() {
    let dir = Dir::new();
    fs::copy(gpt2(), dir.path("gpt2.mdl")).expect("copied");
    let flags = format!("gpt2.mdl --gpus 4 --machine h100-dgx --bf16 --global-batch-size 16 {SMALL}");
    let said = dir.line(&format!("plan {flags} --top 3 -o plan.json --html plan.html")).succeeds();
    for what in ["plans of 4 ranks on DGX H100", "samples of layers", "tokens/s", "why the others take longer", "limits most"] {
        assert!(said.stdout.contains(what), "no {what}: {}", said.stdout);
    }
    let line = said.stdout.lines().find(|l| l.starts_with("mcc compile gpt2.mdl ")).expect("a line to paste");
    let file = json(&fs::read_to_string(dir.path("plan.json")).expect("a plan"));
    let step = |flags: &str| json(&dir.line(&format!("simulate gpt2.mdl --machine h100-dgx --json {flags}")).succeeds().stdout);
    // The proposed plan compiles, and takes the time that was predicted.
    let seconds = file["seconds"].as_f64().expect("seconds");
    assert_eq!(step("--plan plan.json")["seconds"].as_f64(), Some(seconds));
    let pasted = line.strip_prefix("mcc compile gpt2.mdl ").expect("flags");
    assert_eq!(step(pasted)["seconds"].as_f64(), Some(seconds), "{pasted}");
    assert_eq!(step("--plan plan.json")["ranks"], 4);
    dir.line("compile gpt2.mdl --plan plan.json -o out.mcc").succeeds();
    let of_artifact = json(&dir.line("simulate out.mcc --machine h100-dgx --json").succeeds().stdout);
    assert_eq!(of_artifact["seconds"].as_f64(), Some(seconds));
    // The page shows the plans beside each other, and the best one as it runs.
    let page = fs::read_to_string(dir.path("plan.html")).expect("a page");
    assert!(page.contains("why it takes longer than the first") && page.contains("Compiled by"), "{page:.2000}");
    step("--plan plan.json --html step.html");
    let of_step = fs::read_to_string(dir.path("step.html")).expect("a page");
    assert_eq!(drawn(&page), drawn(&of_step), "what is drawn is the plan as it runs");
    // Another text may want another plan.
    fs::write(dir.path("gpt2.mdl"), fs::read_to_string(gpt2()).expect("a text") + "\n// Mine.\n").expect("written");
    let warned = dir.line("check gpt2.mdl --plan plan.json").succeeds();
    assert!(warned.stderr.contains("plan.json was searched for another text"), "{}", warned.stderr);
    // Flags that are typed beside a plan take precedence.
    let ranks = |flags: &str| json(&dir.line(&format!("simulate gpt2.mdl --machine h100-dgx --json {flags}")).succeeds().stdout)["ranks"].clone();
    let other = dir.line("compile gpt2.mdl --plan plan.json --tp 2 --pp 2 --dp 2 -o other.mcc").succeeds();
    assert!(other.stderr.contains("note: the command line says otherwise than the plan's `--"), "{}", other.stderr);
    assert_eq!(ranks("--plan plan.json --tp 2 --pp 2 --dp 2"), 8);
}

/// What flags say is held, and samples that were kept give what they gave.
#[test]
fn what_flags_say_of_a_plan_is_held() {
    let dir = Dir::new();
    let search = |flags: &str| {
        let line = format!("plan {} --gpus 4 --machine a100-80g-dgx --fp16 --global-batch-size 8 {SMALL} --json {flags}", gpt2());
        json(&dir.line(&line).succeeds().stdout)
    };
    let found = search("--tp 2 --recompute selective --top 4");
    let plans = found["plans"].as_array().expect("plans");
    assert_eq!(plans.len(), 4);
    let has = |plan: &Value, word: &str| plan["flags"].as_array().expect("words").iter().any(|w| w == word);
    assert!(plans.iter().all(|p| has(p, "--tp=2") && has(p, "--recompute=selective")), "{found}");
    let seconds: Vec<f64> = plans.iter().filter_map(|p| p["step"]["seconds"].as_f64()).collect();
    assert!(seconds.is_sorted(), "{seconds:?}");
    assert_eq!(search("--tp 2 --recompute selective --top 4"), found);
    assert_eq!(search("--tp 2 --recompute selective --top 4 --no-cache"), found);
    // The best of all is no slower than the best of some.
    let free = search("--top 1");
    assert!(free["plans"][0]["step"]["seconds"].as_f64() <= Some(seconds[0] * (1.0 + 1e-9)), "{free}");
}

/// Each number of devices has a plan that is nearly as good as what a search for it alone finds, with its changes.
#[test]
fn ranges_of_devices_give_the_best_plan_of_each() {
    let dir = Dir::new();
    let plan = |flags: &str| {
        let line = format!("plan {} --machine h100-dgx --bf16 --tp 1 --zero 0 --pipeline-schedule 1f1b {SMALL} {flags}", gpt2());
        dir.line(&line).succeeds().stdout
    };
    let found = json(&plan("--gpus 2..5 --global-batch-size 20 --json"));
    let points = |k: usize| found["curves"][k]["points"].as_array().expect("points").clone();
    let of = |k: usize, what: &str| points(k).iter().map(|p| p[what].as_u64().expect("a number")).collect::<Vec<_>>();
    assert_eq!((of(0, "gpus"), of(0, "sequences")), (vec![2, 4, 5], vec![20, 20, 20]));
    assert_eq!((of(1, "gpus"), of(1, "sequences")), (vec![2, 4, 5], vec![20, 40, 50]));
    for point in points(0).iter().chain(&points(1)) {
        let flags = format!("--gpus {} --global-batch-size {} --json --top 1", point["gpus"], point["sequences"]);
        let alone = &json(&plan(&flags))["plans"][0];
        // Only the search for one number of devices tries changes to the best plan.
        assert!(point["best"]["seconds"].as_f64() >= alone["step"]["seconds"].as_f64(), "{point} {alone}");
        assert!(point["best"]["seconds"].as_f64().expect("s") < 1.1 * alone["step"]["seconds"].as_f64().expect("s"), "{point} {alone}");
        let part = point["best"]["goodput"]["part"].as_f64().expect("a part");
        assert!(part > 0.99 && part < 1.0, "{point}");
    }
    // Efficiency is the rate of a device relative to that with the fewest devices.
    let rate = |p: &Value| p["best"]["tokens_per_second"].as_f64().expect("a rate") / p["gpus"].as_f64().expect("a number");
    let efficiency = points(0)[1]["best"]["efficiency"].as_f64().expect("a part");
    assert!((efficiency - rate(&points(0)[1]) / rate(&points(0)[0])).abs() < 1e-9);
    // The flags to paste give the job of their point, even where the mesh is fixed and the batch alone grows.
    let held = json(&plan("--gpus 2..4 --global-batch-size 8 --scaling weak --dp 2 --pp 1 --micro-batch-size 1 --json"));
    let last = &held["curves"][0]["points"][1]["best"];
    let flags: Vec<&str> = last["flags"].as_array().expect("words").iter().filter_map(Value::as_str).collect();
    assert!(flags.contains(&"--global-batch-size=16") && flags.contains(&"--cp=2"), "{flags:?}");
    let step = json(&dir.line(&format!("simulate {} --machine h100-dgx --json {}", gpt2(), flags.join(" "))).succeeds().stdout);
    assert_eq!(step["seconds"].as_f64(), last["seconds"].as_f64());
    let said = plan("--gpus 2..4 --global-batch-size 2 --scaling strong --dp 2");
    for what in ["strong scaling on DGX H100", "efficiency", "goodput", "save every", "as given"] {
        assert!(said.contains(what) && !said.contains("weak"), "no {what}: {said}");
    }
    let none = plan("--gpus 2..3 --global-batch-size 2 --scaling strong --dp 2 --cp 1 --pp 1");
    assert!(none.lines().any(|l| l.trim_start().starts_with("3 ") && l.contains("no plan splits so")), "{none}");
}

#[test]
fn wrong_searches_say_what_is_wrong() {
    let dir = Dir::new();
    let plan = |flags: &str| dir.line(&format!("plan {} --machine h100-dgx --bf16 {SMALL} {flags}", gpt2()));
    plan("--gpus 4").misuses_with(&["`--global-batch-size G` is missing"]);
    plan("--gpus 4 --global-batch-size 8 --dp 3").misuses_with(&["no plan splits 4 ranks and 8 sequences"]);
    plan("--gpus 4 --global-batch-size 8 --tp 8").misuses_with(&["no plan has 4 ranks so"]);
    plan("--gpus 4 --global-batch-size 8 --host-memory 1GiB").misuses_with(&["`--host-memory` is not looked at"]);
    plan("--gpus 4 --global-batch-size 8 --threads-per-rank 2").misuses_with(&["`--threads-per-rank` is of CPUs"]);
    plan("--gpus 2 --global-batch-size 8 --memory 1MiB --whole 4").misuses_with(&["no plan of 2 ranks fits 1.00 MiB", "needs least"]);
    plan("--gpus 2 --global-batch-size 8 --target sm_80").misuses_with(&["`--target sm_80` is not for `DGX H100`"]);
    plan("--gpus 4..2 --global-batch-size 8").misuses_with(&["the least and the most", "such as 256..4096"]);
    plan("--gpus 2..4 --global-batch-size 8 --top 2").misuses_with(&["`--top` is of one number of devices"]);
    plan("--gpus 2..4 --global-batch-size 8 -o plan.json").misuses_with(&["`--output` is of one number of devices"]);
    plan("--gpus 2..4 --global-batch-size 8 --tp 8").misuses_with(&["no plan has 4 ranks so"]);
    plan("--gpus 2..4 --global-batch-size 8 --dp 3 --tp 1 --pp 1 --cp 1").misuses_with(&["no plan splits 2 ranks and 8 sequences"]);
    plan("--gpus 2 --global-batch-size 8 -D batch=8").misuses_with(&["`-D batch` is not taken by a search"]);
    plan("--gpus 2 --global-batch-size 8 --scaling weak").misuses_with(&["`--scaling` is of a range"]);
    plan("--gpus 2 --global-batch-size 8 -D heads=5").fails_with(&["heads = 5 does not divide hidden"]);
    dir.write("wrong.json", "{}");
    let with = |file: &str| dir.line(&format!("check {} --plan {file}", gpt2()));
    with("wrong.json").misuses_with(&["`--plan wrong.json` is no plan", "mcc plan -o PLAN.json"]);
    with("none.json").misuses_with(&["`--plan none.json` cannot be read"]);
    let file = r#"{"mcc": "1", "model": "m", "text": "", "machine": "m", "ranks": 1, "seconds": 1, "give_or_take": 0, "flags": ["other.mdl"]}"#;
    dir.write("words.json", file);
    with("words.json").misuses_with(&["`other.mdl` is no flag"]);
}
