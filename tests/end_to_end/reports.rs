//! `mcc report`: pages of real runs.

use crate::mcc::Dir;
use serde_json::Value;
use std::fs;

/// A small model on two ranks, its text, and held-out text.
fn small() -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(40));
    dir.write("other.txt", "The lazy dog sleeps behind a wall, and the quick brown fox is gone. ".repeat(20));
    let model = "compile {models}/gpt2.mdl -D vocab=251 -D hidden=32 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 2";
    dir.line(&format!("{model} --tp 2 -o small.mcc")).succeeds();
    dir
}

const RUN: &str = "run small.mcc --data text.txt --valid-data other.txt --eval-interval 2 --threads-per-rank 1 --quiet --save ck --log-dir log";

/// What the script of a page draws: of each chart its title, and of each of its curves the steps and the numbers.
fn curves(page: &str) -> Value {
    let text = page.split("id=\"curves\">").nth(1).and_then(|rest| rest.split("</script>").next()).expect("curves");
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn a_report_has_all_that_happened_in_a_run_and_in_one_that_went_on() {
    let dir = small();
    dir.line("report log").fails_with(&["`log`: there is no such directory; `mcc run --log-dir` writes one"]);
    assert_eq!(dir.line(&format!("{RUN} --steps 9 --save-interval 3 --exit-interval 6")).code, Some(75));
    dir.line("report log").succeeds();
    dir.line("report log").fails_with(&["`log/report.html` exists: --force replaces it, another name keeps it"]);
    dir.line(&format!("{RUN} --steps 9 --load ck/step-3 --force --profile --profile-steps 2")).succeeds();
    assert_eq!(dir.line("report log --force").succeeds().stdout, "wrote log/report.html\n");
    let page = fs::read_to_string(dir.path("log/report.html")).expect("a page");
    let metrics = fs::read_to_string(dir.path("log/metrics.jsonl")).expect("metrics");
    let lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    // Steps 4 to 6 were done twice.
    assert_eq!(lines.len(), 12);
    let counted: Vec<&Value> = lines[..3].iter().chain(&lines[6..]).collect();
    let drawn = curves(&page);
    let [loss, valid] = [0, 1].map(|k| &drawn["charts"][0]["series"][k]);
    assert_eq!(loss["x"], serde_json::json!([1, 2, 3, 4, 5, 6, 7, 8, 9]));
    for (line, y) in counted.iter().zip(loss["y"].as_array().expect("numbers")) {
        let (exact, y) = (line["loss"].as_f64().expect("a loss"), y.as_f64().expect("a number"));
        assert!((exact - y).abs() <= 1e-5 * exact, "{exact} {y}");
    }
    assert_eq!(valid["x"], serde_json::json!([2, 4, 6, 8]));
    let best = counted.iter().filter_map(|l| l["valid_loss"].as_f64()).fold(f64::INFINITY, f64::min);
    let marks: Vec<(u64, &str)> = drawn["marks"]
        .as_array()
        .expect("marks")
        .iter()
        .map(|m| (m["step"].as_u64().expect("a step"), m["kind"].as_str().expect("a kind")))
        .collect();
    for mark in [(3, "saved"), (6, "saved"), (9, "saved"), (4, "resumed"), (6, "end"), (9, "end")] {
        assert!(marks.contains(&mark), "{mark:?} in {marks:?}");
    }
    let profile: Value = serde_json::from_str(&fs::read_to_string(dir.path("log/profile.json")).expect("a profile")).expect("JSON");
    let kernel = profile["own"][0]["name"].as_str().expect("a name");
    assert_eq!((&profile["steps"], &profile["ranks"]), (&serde_json::json!([6, 7]), &2.into()));
    let shown = [
        "<title>gpt2: a run of mcc</title>",
        "<span class=\"state good\">finished</span> after step 9 of 9",
        &format!("Best held-out loss</dt><dd>{best:.3}"),
        "3 steps that were done again",
        "<td>tp 2</td>",
        "stage 0",
        "ck/step-3",
        "early, with everything saved",
        "mcc run small.mcc --data text.txt",
        kernel,
        "gpt2.mdl:",
    ];
    shown.iter().for_each(|text| assert!(page.contains(text), "no `{text}`"));
}

#[test]
fn a_report_is_made_of_metrics_alone_and_of_whatever_is_left_of_them() {
    let dir = small();
    dir.line("run small.mcc --data text.txt --steps 4 --quiet --metrics m.jsonl").succeeds();
    assert_eq!(dir.line("report m.jsonl").succeeds().stdout, "wrote m.html\n");
    let text = fs::read(dir.path("m.jsonl")).expect("metrics");
    dir.write("m.jsonl", [b"\xff\xfe\n", &text[..text.len() - 20]].concat());
    let says = dir.line("report m.jsonl -o cut.html").succeeds().stderr;
    assert_eq!(says, "warning: 2 lines of m.jsonl could not be read\n");
    let page = fs::read_to_string(dir.path("cut.html")).expect("a page");
    assert!(page.contains("2 lines of m.jsonl could not be read"));
    assert_eq!(curves(&page)["charts"][0]["series"][0]["x"], serde_json::json!([1, 2, 3]));
    dir.line("report m.jsonl -o m.jsonl --force").misuses_with(&["`m.jsonl` is what the report is made of: name another file for it"]);
    dir.line("report text.txt").fails_with(&["`text.txt` holds no metrics: `mcc run --metrics FILE` writes such a file"]);
    dir.line("report small.mcc").fails_with(&["`small.mcc` is an artifact, not the log of a run: `mcc run small.mcc --data FILE` trains it"]);
    fs::create_dir(dir.path("empty")).expect("made");
    dir.line("report empty").fails_with(&["`empty` has neither metrics.jsonl nor run.jsonl: `mcc run --log-dir empty` writes them"]);
}

#[test]
fn a_report_of_several_runs_has_their_curves_in_the_same_charts() {
    let dir = small();
    let run = "run small.mcc --data text.txt --threads-per-rank 1 --quiet";
    dir.line(&format!("{run} --steps 3 --log-dir one")).succeeds();
    dir.line(&format!("{run} --steps 2 --seed 5 --metrics two.jsonl")).succeeds();
    assert_eq!(dir.line("report one two.jsonl -o both.html").succeeds().stdout, "wrote both.html\n");
    let page = fs::read_to_string(dir.path("both.html")).expect("a page");
    let drawn = curves(&page);
    let names: Vec<&str> = (0..2).map(|k| drawn["runs"][k]["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["one", "two.jsonl"]);
    let loss = &drawn["charts"][0]["series"];
    assert_eq!((&loss[0]["label"], &loss[0]["x"]), (&"one".into(), &serde_json::json!([1, 2, 3])));
    assert_eq!((&loss[1]["label"], &loss[1]["x"]), (&"two.jsonl".into(), &serde_json::json!([1, 2])));
    // Sequences have 8 tokens, and each step has as many sequences.
    let tokens = |run: usize| drawn["runs"][run]["elapsed"]["tokens"].as_array().expect("sums").iter().map(|x| x.as_f64()).collect::<Vec<_>>();
    let step = tokens(0)[0].expect("a number");
    assert!(step >= 8.0 && tokens(0) == [Some(step), Some(2.0 * step), Some(3.0 * step)] && tokens(1) == tokens(0)[..2], "{:?}", tokens(0));
    let seconds = drawn["runs"][0]["elapsed"]["seconds"].as_array().expect("sums");
    assert!(seconds.is_sorted_by(|a, b| a.as_f64() <= b.as_f64()) && seconds[2].as_f64() > Some(0.0), "{seconds:?}");
    dir.line("report one two.jsonl").misuses_with(&["add `-o FILE.html`"]);
    dir.line("report one one/metrics.jsonl -o c.html").misuses_with(&["`one` and `one/metrics.jsonl` are one run: name it once"]);
    dir.line("report one none -o c.html").fails_with(&["`none`: there is no such directory"]);
}
