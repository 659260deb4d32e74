//! `mcc simulate`, `mcc machine` and `mcc explain --time`.

use crate::mcc::{Dir, models};
use serde_json::Value;
use std::fs;

const SMALL: &str = "-D layers=4 -D hidden=64 -D heads=4 -D seq=32 -D vocab=128 --global-batch-size 8";

pub fn gpt2() -> String {
    models().join("gpt2.mdl").display().to_string()
}

pub fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn a_step_is_predicted_for_a_text_and_for_its_artifact_alike() {
    let dir = Dir::new();
    let flags = format!("{SMALL} --dp 2 --tp 2 --pp 2 --zero 1");
    let said = dir.line(&format!("simulate {} --machine h100-dgx --bf16 {flags}", gpt2())).succeeds().stdout;
    for what in
        ["step  ", "8 ranks on DGX H100", "tokens/s", "waits for other stages (bubble)", "bytes over NVLink", "all_reduce over tp", "gpt2.mdl:44"]
    {
        assert!(said.contains(what), "no {what}: {said}");
    }
    let of_text = dir.line(&format!("simulate {} --machine h100-dgx --json --bf16 {flags}", gpt2())).succeeds().stdout;
    dir.line(&format!("compile {} --target sm_90a --bf16 {flags} -o out.mcc", gpt2())).succeeds();
    let of_artifact = dir.line("simulate out.mcc --machine h100-dgx --json").succeeds().stdout;
    assert_eq!(of_text, of_artifact);
    let step = json(&of_text);
    let seconds = step["seconds"].as_f64().expect("a number");
    let spent = step["spent"].as_object().expect("parts").values().filter_map(Value::as_f64).sum::<f64>();
    let path = step["path"].as_array().expect("causes").iter().filter_map(|c| c[1].as_f64()).sum::<f64>();
    assert!((spent - seconds).abs() < 1e-6 * seconds && (path - seconds).abs() < 1e-6 * seconds, "{spent} {path} {seconds}");
    // A slow stage makes the step longer, and so does slower memory.
    let slow = json(&dir.line("simulate out.mcc --machine h100-dgx --json --slow-stage 1=2").succeeds().stdout);
    assert!(slow["seconds"].as_f64() > Some(1.2 * seconds), "{slow}");
    let mut machine = json(&dir.line("machine show h100-dgx").succeeds().stdout);
    machine["device"]["memory"]["bytes_per_second"]["value"] = 1e12.into();
    dir.write("mine.json", machine.to_string());
    let slow = json(&dir.line("simulate out.mcc --machine mine.json --json").succeeds().stdout);
    assert!(slow["seconds"].as_f64() > Some(seconds), "{slow}");
}

/// More than the device has is predicted all the same, and said.
#[test]
fn a_plan_that_does_not_fit_is_said() {
    let dir = Dir::new();
    let mut machine = json(&dir.line("machine show h100-dgx").succeeds().stdout);
    machine["device"]["memory"]["bytes"]["value"] = 1e5.into();
    dir.write("small.json", machine.to_string());
    let ran = dir.line(&format!("simulate {} --machine small.json {SMALL}", gpt2())).succeeds();
    assert!(ran.stderr.contains("and the device has 97.66 KiB: `mcc compile --memory 100000` says what would fit"), "{}", ran.stderr);
    assert!(ran.stdout.contains("memory     "), "{}", ran.stdout);
}

/// The data of a page, which reads nothing else.
pub fn drawn(page: &str) -> Value {
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("default-src 'none'"), "{page:.300}");
    for fetched in ["src=", "href=", "url(", "import "] {
        // The script that draws contains these words itself.
        let own = page.split("<script>").next().expect("a page");
        assert!(!own.contains(fetched), "{fetched} in the page");
    }
    let data = page.split_once(r#"id="curves">"#).and_then(|p| p.1.split_once("</script>")).expect("data").0;
    json(data)
}

/// Threes of numbers: what, and from when to when, in ticks.
fn spans(list: &Value) -> Vec<(i64, i64, i64)> {
    let (mut what, mut end) = (0, 0);
    let numbers: Vec<i64> = list.as_array().expect("numbers").iter().filter_map(Value::as_i64).collect();
    let three = |n: &[i64]| {
        (what, end) = (what + n[0], end + n[1] + n[2]);
        (what, end - n[2], end)
    };
    numbers.chunks(3).map(three).collect()
}

/// What a page draws is what is said: the time of kernels, memory that is planned, the lines that own it.
#[test]
fn a_predicted_step_is_a_page() {
    let dir = Dir::new();
    let flags = format!("{SMALL} --bf16 --tp 2 --pp 2 --vpp 2");
    let line = format!("simulate {} --machine h100-dgx {flags} --json --html step.html", gpt2());
    let ran = dir.line(&line).succeeds();
    assert!(ran.stderr.contains("wrote step.html"), "{}", ran.stderr);
    let step = json(&ran.stdout);
    let page = fs::read_to_string(dir.path("step.html")).expect("a page");
    for what in [
        "gpt2: a predicted step",
        "DGX H100",
        "all_reduce over tp",
        "NVLink",
        "messages between stages",
        "gpt2.mdl:44",
        "bytes of the device's memory",
    ] {
        assert!(page.contains(what), "no {what}");
    }
    let data = drawn(&page);
    let tick = data["tick"].as_f64().expect("seconds");
    let stages = data["stages"].as_array().expect("stages");
    assert_eq!(stages.len(), 2);
    for (stage, said) in stages.iter().zip(step["stages"].as_array().expect("stages")) {
        let calls = stage["calls"].as_array().expect("calls");
        let computes = spans(&stage["computes"]);
        assert!(computes.iter().all(|s| (s.0 as usize) < calls.len() && s.1 <= s.2) && computes.is_sorted_by_key(|s| s.1), "{computes:?}");
        // Eight microbatches pass each of two virtual stages, there and back.
        let of_kind = |kind: &str| {
            let k = data["kinds"].as_array().expect("kinds").iter().position(|k| k[0] == kind).expect("a kind");
            calls.iter().filter(|c| c[0] == k).count()
        };
        assert_eq!([of_kind("forward"), of_kind("backward")], [16, 16]);
        let computed = tick * computes.iter().map(|s| s.2 - s.1).sum::<i64>() as f64;
        let kernels = said["kernels"].as_f64().expect("seconds");
        assert!((computed / kernels - 1.0).abs() < 0.02, "{computed} of {kernels}");
        assert!(spans(&stage["exchanges"]).iter().any(|s| data["exchanges"][s.0 as usize] == "messages between stages"), "{stage}");
    }
    let memory = data["memory"].as_array().expect("curves");
    let planned = memory.iter().filter_map(|m| m["planned"].as_u64()).max();
    assert_eq!(planned, step["memory"].as_u64());
    for curve in memory {
        let owners = curve["owners"].as_array().expect("owners");
        assert!(
            owners.iter().any(|o| o["label"].as_str().is_some_and(|l| l.starts_with("activations of ") && l.contains("gpt2.mdl:"))),
            "{owners:?}"
        );
        let unit = curve["unit"].as_u64().expect("bytes");
        let at = |k: usize| owners.iter().filter_map(|o| o["bytes"][k].as_u64()).sum::<u64>() * unit;
        let points = owners[0]["bytes"].as_array().expect("points").len();
        let most = (0..points).map(at).max().expect("points");
        let (peak, planned) = (curve["peak"].as_u64().expect("bytes"), curve["planned"].as_u64().expect("bytes"));
        assert!(most.abs_diff(peak) <= unit * owners.len() as u64 && peak <= planned && peak > planned / 2, "{most} {peak} {planned}");
        // Memory rises until backward passes begin, and falls again.
        assert!(at(0) < most && at(points - 1) < most, "{} {most} {}", at(0), at(points - 1));
    }
    let links: Vec<&str> = data["links"].as_array().expect("links").iter().filter_map(|l| l["name"].as_str()).collect();
    assert!(links.contains(&"NVLink"), "{links:?}");
    dir.line(&format!("simulate {} --machine h100-dgx {flags} --html none/step.html", gpt2()))
        .fails_with(&["`--html none/step.html` cannot be written"]);
}

/// The trace is the profiler's, of a rank of each stage, and ends when the step does.
#[test]
fn a_predicted_step_is_a_trace() {
    let dir = Dir::new();
    let flags = format!("{SMALL} --bf16 --tp 2 --pp 2 --json --trace step.json");
    let said = json(&dir.line(&format!("simulate {} --machine a100-80g-dgx {flags}", gpt2())).succeeds().stdout);
    let trace = json(&fs::read_to_string(dir.path("step.json")).expect("a trace"));
    let events = trace["traceEvents"].as_array().expect("events");
    let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
    let ranks: std::collections::BTreeSet<u64> = events.iter().filter_map(|e| e["pid"].as_u64()).collect();
    assert_eq!(ranks.into_iter().collect::<Vec<_>>(), [0, 2]);
    let step = 1e6 * said["seconds"].as_f64().expect("a number");
    let whole = of("X").into_iter().find(|e| e["name"] == "step 1").expect("a step");
    assert!((whole["dur"].as_f64().expect("a number") - step).abs() < 1.0, "{whole}");
    let last = of("X").into_iter().filter_map(|e| Some(e["ts"].as_f64()? + e["dur"].as_f64()?)).fold(0.0, f64::max);
    assert!(last > 0.9 * step && last < 1.1 * step, "{last} of {step}");
    // A microbatch's activations, and its gradients, go to another stage.
    assert_eq!(of("s").len(), 2 * 8);
    // Kernels take as long as predicted, on average of the two stages.
    let kernels: f64 = of("X").into_iter().filter(|e| e["cat"] == "kernel").filter_map(|e| e["dur"].as_f64()).sum();
    let said = 1e6 * said["spent"]["kernels"].as_f64().expect("a number");
    assert!((kernels / 2.0 / said - 1.0).abs() < 0.05, "{} of {said}", kernels / 2.0);
}

#[test]
fn a_line_has_a_time() {
    let dir = Dir::new();
    let flags = format!("{SMALL} --bf16 --tp 2");
    let said = dir.line(&format!("explain {}:44 --time h100-dgx {flags}", gpt2())).succeeds().stdout;
    let line = said.lines().find(|l| l.starts_with("time ")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("on DGX H100") && line.contains("without it"), "{line}");
    let said = json(&dir.line(&format!("explain {}:44 --time h100-dgx --json {flags}", gpt2())).succeeds().stdout);
    let number = |key: &str| said["time"][key].as_f64().expect("a number");
    assert!(number("exposed") > 0.0 && number("without") < number("step"), "{said}");
    let said = dir.line(&format!("explain {} --collectives --time h100-dgx {flags}", gpt2())).succeeds().stdout;
    assert!(said.contains("time of all_reduce over tp: "), "{said}");
}

#[test]
fn machines_are_listed_checked_and_refused() {
    let dir = Dir::new();
    let said = dir.line("machine ls").succeeds().stdout;
    assert!(said.contains("a100-80g-dgx   8 of DGX A100 80GB, for sm_80"), "{said}");
    let said = dir.line("machine check a100-80g-dgx cpu").succeeds().stdout;
    assert!(said.contains("of NVIDIA A100 Tensor Core GPU data sheet (2021-06)"), "{said}");
    dir.write("wrong.json", "{\"name\": \"mine\"}");
    dir.line("machine check wrong.json").misuses_with(&["`wrong.json` is no machine file", "missing field", "mcc machine show"]);
    dir.line("machine show v100").misuses_with(&["no machine is called `v100`", "mcc machine ls"]);
    let simulate = |rest: &str| dir.line(&format!("simulate {} {SMALL} {rest}", gpt2()));
    simulate("--machine v100").misuses_with(&["machine file `v100` cannot be read", "`h100-dgx`"]);
    simulate("--machine h100-dgx --target cpu").misuses_with(&["`--target cpu` is not for `DGX H100`", "`sm_90a`"]);
    simulate("--machine cpu --slow-stage 3=2").misuses_with(&["`--slow-stage 3`: there are 1 stages"]);
    simulate("--machine cpu --slow-stage 0=1e300").misuses_with(&["0.001 to 1000"]);
    simulate("--machine cpu --threads-per-rank 3").misuses_with(&["`--threads-per-rank 3`", "has 2 cores"]);
    simulate("--machine h100-dgx --target sm_80").misuses_with(&["`--target sm_80` is not for `DGX H100`"]);
    simulate("--machine cpu --slow-stage 3").misuses_with(&["`3` is no stage with how many times as long"]);
    simulate("--machine h100-dgx --threads-per-rank 2").misuses_with(&["`--threads-per-rank` is of CPUs"]);
    dir.line(&format!("compile {} {SMALL} -o out.mcc", gpt2())).succeeds();
    dir.line("simulate out.mcc --machine h100-dgx").misuses_with(&["this artifact is not for `DGX H100`"]);
    dir.line("simulate out.mcc --machine cpu --tp 2").misuses_with(&["`--tp` is for a model text"]);
    dir.line("explain V213 --time cpu").misuses_with(&["`--time` says nothing about a code"]);
}

/// Seconds of `1.19 s`, `637 ms` and `42.1 us`, as tables have them in columns of two words.
fn seconds(number: &str, unit: &str) -> f64 {
    let number: f64 = number.trim_start_matches(['+', '-']).parse().unwrap_or_else(|_| panic!("`{number}` is no number"));
    number * [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)].into_iter().find(|u| u.0 == unit).unwrap_or_else(|| panic!("`{unit}`")).1
}

/// Kernels of one rank of each stage are timed by themselves, and steps of all of them lie beside what follows.
#[test]
fn a_machine_is_calibrated_and_a_run_compared_with_it() {
    let dir = Dir::new();
    dir.line(&format!("compile {} {SMALL} --tp 2 --sp --pp 2 -o out.mcc", gpt2())).succeeds();
    let calibrate = "calibrate out.mcc --profile-steps 2 -o mine.json";
    let said = dir.line(calibrate).succeeds().stdout;
    for what in ["kernels were timed", "product\n", "loops and scatters\n", "attention\n", "wrote mine.json"] {
        assert!(said.contains(what), "no {what}: {said}");
    }
    let checked = dir.line("machine check mine.json").succeeds().stdout;
    assert!(checked.contains("of mcc calibrate (20"), "{checked}");
    // Everything else in the file is the base machine's.
    let [mine, base] = ["machine check mine.json", "machine check cpu"].map(|line| dir.line(line).succeeds().stdout.lines().count());
    assert_eq!(mine, base + 1);
    let step = json(&dir.line("simulate out.mcc --machine mine.json --json").succeeds().stdout);
    assert!(step["measured"].as_u64() > Some(20) && step["measured"] == step["all_kernels"], "{step}");
    // The times do not hold for ranks with more threads.
    let step = json(&dir.line("simulate out.mcc --machine mine.json --threads-per-rank 2 --json").succeeds().stdout);
    assert_eq!(step["measured"], 0);
    // Kernels of another artifact are added to those in the file, whose times stay.
    let all = |file: &str| json(&fs::read_to_string(dir.path(file)).expect("a file"))["measured"]["kernels"].as_object().expect("kernels").clone();
    dir.line(&format!("compile {} {SMALL} -o other.mcc", gpt2())).succeeds();
    dir.line("calibrate other.mcc --machine mine.json --profile-steps 1 -o both.json").succeeds();
    let (mine, both) = (all("mine.json"), all("both.json"));
    assert!(both.len() > mine.len() && mine.keys().all(|k| both.contains_key(k)), "{} {}", mine.len(), both.len());

    dir.line(calibrate).misuses_with(&["`mine.json` exists", "--force"]);
    dir.line("calibrate --machine h100-dgx -o new.json").misuses_with(&["`DGX H100` has GPUs", "kernels of artifacts alone"]);
    dir.line("calibrate out.mcc --machine h100-dgx -o new.json").misuses_with(&["this artifact is not for `DGX H100`"]);
    dir.line("calibrate --threads-per-rank 4096 -o new.json").misuses_with(&["`--threads-per-rank 4096`", "cores"]);
    assert!(!dir.path("new.json").exists());

    dir.write("text.txt", "What is timed says nothing about what is learnt. ".repeat(200));
    let run = "run out.mcc --data text.txt --threads-per-rank 1 --profile-steps 3";
    let other = dir.line("calibrate out.mcc --machine mine.json --threads-per-rank 2 --profile-steps 1 -o two.json").succeeds().stderr;
    assert!(other.contains("are left out: they are with `--threads-per-rank 1`"), "{other}");
    let said = dir.line(&format!("{run} --compare mine.json")).succeeds().stdout;
    for what in ["a step on Xeon", "what a rank does", "exchanges, once all have come", "all_gather over tp", "messages between stages", "product"] {
        assert!(said.contains(what), "no {what}: {said}");
    }
    assert!(!said.contains("profile of steps") && !dir.path("out.trace.json").exists(), "{said}");
    // The rows add up to the step, as measured and as predicted.
    let mut lines = said.lines().skip_while(|l| !l.starts_with("a step on")).map(|l| l.split_whitespace().collect::<Vec<_>>());
    let head = lines.next().expect("a step");
    let found = |what: &str| head.iter().position(|w| *w == what).map(|k| seconds(head[k - 2], head[k - 1])).expect("a time");
    let whole = [found("measured,"), found("predicted")];
    let rows = lines.skip(1).take_while(|l| l[0] != "measured").collect::<Vec<_>>();
    // A time of zero is printed as `0`, without a unit.
    let pair = |row: &Vec<&str>| {
        let (first, rest) = if row[0] == "0" { (0.0, 1) } else { (seconds(row[0], row[1]), 2) };
        [first, if row[rest] == "0" { 0.0 } else { seconds(row[rest], row[rest + 1]) }]
    };
    let of = |k: usize| rows.iter().map(|row| pair(row)[k]).sum::<f64>();
    assert!(rows.len() > 5, "{said}");
    for (sum, whole) in [of(0), of(1)].into_iter().zip(whole) {
        assert!((sum / whole - 1.0).abs() < 0.03, "{sum} of {whole}: {said}");
    }
    dir.line(&format!("{run} --compare h100-dgx")).misuses_with(&["this artifact is not for `DGX H100`"]);
    dir.line(&format!("{run} --compare mine.json --in-order")).misuses_with(&["`--compare` cannot be", "`--in-order`"]);
    dir.line("run out.mcc --data text.txt --profile-steps 3").misuses_with(&["--profile"]);
}

/// Cores, kernels, exchanges of two ranks and waits of four are timed in small models, and the file says what they
/// came to.
#[test]
#[ignore = "some minutes: make test-long-native"]
fn a_machine_is_calibrated_by_small_models() {
    let dir = Dir::new();
    let said = dir.line("calibrate -o mine.json").succeeds().stdout;
    for what in ["product\n", "exchanges over shared memory\n", "steps of ranks with a core each\n", "steps of ranks that share cores\n"] {
        let line = said.lines().find(|l| l.ends_with(what.trim_end())).unwrap_or_else(|| panic!("no {what}: {said}"));
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        // Twice or half of what was measured is off by 100 %.
        assert!(numbers[0] >= 8.0 && numbers[2] < 100.0, "{line}");
    }
    let machine = json(&fs::read_to_string(dir.path("mine.json")).expect("a file"));
    for place in ["/links/0/bytes_per_second", "/links/0/latency", "/links/0/hop", "/host/wake", "/host/crowded_wake", "/device/phase"] {
        let figure = machine.pointer(place).unwrap_or_else(|| panic!("no {place}: {machine}"));
        assert!(figure["source"] == "calibrated-1" && figure["value"].as_f64() > Some(0.0), "{place}: {figure}");
    }
    assert!(!machine["name"].as_str().expect("a name").contains("Xeon with AVX-512, two cores"), "{machine}");
}

/// Exchanges of ranks on CPUs are predicted as the runtime makes them.
#[test]
fn chunks_are_those_of_the_runtime() {
    use runtime::shm;
    use simulate::links;
    assert_eq!((links::CHUNK, links::APART, links::PIECE), (shm::CHUNK, shm::APART as u64, shm::PIECE as u64));
}
