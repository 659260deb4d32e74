//! What a report makes of files, whatever is in them.

use super::*;
use std::collections::BTreeMap;

const NASTY: &str = "</script><script>alert(1)</script><!-- ' \" & \u{2028}";

/// The page of a log with these files.
fn page(files: &[(&str, &[u8])]) -> (String, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
    let report = report(dir.path());
    let damage = report.damage.clone();
    (page::page(vec![report]), damage)
}

fn report(run: &Path) -> Report {
    let found = Files::of(run, None).unwrap_or_else(|_| panic!("there are files"));
    read(run, &found).unwrap_or_else(|_| panic!("they can be read"))
}

/// The curves within a page, as its script reads them.
fn curves(page: &str) -> serde_json::Value {
    let begin = "<script type=\"application/json\" id=\"curves\">";
    let text = &page[page.find(begin).unwrap() + begin.len()..];
    serde_json::from_str(&text[..text.find("</script>").unwrap()]).unwrap()
}

fn step(n: u64, loss: &str) -> String {
    format!("{{\"step\":{n},\"loss\":{loss},\"grad_norm\":1.5,\"lr\":0.001,\"tokens_per_s\":100.0,\"step_ms\":20.0,\"memory_bytes\":1048576}}\n")
}

fn began(model: &str) -> String {
    let record = super::super::log::Record::Began(Box::new(super::super::log::RunStart {
        mcc: "0".into(),
        command: vec!["run".into(), model.into()],
        artifact: model.into(),
        id: model.into(),
        model: model.into(),
        target: model.into(),
        mesh: vec![("tp".into(), 2), (model.into(), 3)],
        ranks: 2,
        parameters: 1000,
        batch: 8,
        microbatches: 2,
        host: model.into(),
        first: 1,
        steps: 9,
        memory: vec![BTreeMap::from([(model.into(), u64::MAX), ("parameters".into(), u64::MAX)])],
    }));
    serde_json::to_string(&super::super::log::Stamped { time: 1.0, record }).unwrap() + "\n"
}

#[test]
fn whatever_names_are_they_stay_text() {
    let events = [
        serde_json::json!({"time": 2.0, "event": "saved", "step": 1, "dir": NASTY, "bytes": 5, "milliseconds": 0.0, "stalled": 0.0}),
        serde_json::json!({"time": 3.0, "event": "note", "text": NASTY}),
        serde_json::json!({"time": 4.0, "event": "restarted", "why": NASTY, "from": NASTY, "steps": 1, "seconds": 1.0, "count": 1, "most": 2}),
        serde_json::json!({"time": 5.0, "event": "ended", "step": 2, "how": "failed", "why": NASTY}),
    ];
    let run = began(NASTY) + &events.map(|e| e.to_string() + "\n").concat();
    let mut metrics = serde_json::json!({"step": 1, "loss": 2.0});
    metrics[NASTY] = 1.0.into();
    let (page, damage) = page(&[(METRICS, metrics.to_string().as_bytes()), (RUN, run.as_bytes())]);
    assert_eq!(damage, Vec::<String>::new());
    // The four scripts are the data, the library, what pages share, and the drawing.
    assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (4, 4));
    assert!(!page.contains("alert(1)</script>") && !page.contains("<!--") && page.contains("&lt;/script&gt;"));
    assert_eq!(curves(&page)["charts"][1]["title"], format!("Reported: {NASTY}"));
}

#[test]
fn a_page_reads_nothing_else() {
    let (page, _) = page(&[(METRICS, step(1, "2.0").as_bytes())]);
    // The library names its home in a comment.
    let page = page.replace("https://github.com/leeoniya/uPlot", "");
    for word in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(word), "{word}");
    }
}

#[test]
fn damaged_lines_are_left_out_and_counted() {
    let mut text = step(1, "5.0").into_bytes();
    text.extend(b"\xff\x00\xfe junk\n{\"step\":-1}\n\n");
    text.extend(step(2, "null").bytes());
    text.extend(step(3, "1e999").bytes());
    text.extend(step(4, "3.0").bytes());
    text.extend(&step(5, "2.0").as_bytes()[..30]);
    let (page, damage) = page(&[(METRICS, &text), (RUN, b"{\"time\":1.0,\"event\":\"exploded\"}\n"), (profile::PROFILE, b"{")]);
    assert_eq!(damage[..2], ["4 lines of metrics.jsonl could not be read", "1 line of run.jsonl could not be read"]);
    assert!(damage[2].starts_with("profile.json could not be read: ") && page.contains(&damage[0]));
    let series = &curves(&page)["charts"][0]["series"][0];
    assert_eq!((&series["x"], &series["y"]), (&serde_json::json!([1, 2, 4]), &serde_json::json!([5.0, null, 3.0])));
}

#[test]
fn the_last_line_of_a_step_counts() {
    let steps = [(1, "9"), (2, "8"), (3, "7"), (4, "6"), (3, "5"), (4, "4"), (5, "3"), (2, "2.5"), (3, "2")];
    let text: String = steps.iter().map(|(n, loss)| step(*n, loss)).collect();
    let (page, _) = page(&[(METRICS, text.as_bytes())]);
    let series = &curves(&page)["charts"][0]["series"][0];
    assert_eq!((&series["x"], &series["y"]), (&serde_json::json!([1, 2, 3]), &serde_json::json!([9.0, 2.5, 2.0])));
    assert!(page.contains("6 steps that were done again"));
}

#[test]
fn numbers_at_the_edge_of_what_there_is_make_a_page() {
    let events = [
        serde_json::json!({"time": 1e300, "event": "saved", "step": u64::MAX, "dir": "", "bytes": u64::MAX, "milliseconds": -1e300, "stalled": 1e300}),
        serde_json::json!({"time": -1e300, "event": "restarted", "why": "", "from": null, "steps": u64::MAX, "seconds": -1.0, "count": 0, "most": 0}),
        serde_json::json!({"time": 0.0, "event": "ended", "step": u64::MAX, "how": "whole", "why": null}),
    ];
    let run = began("m") + &events.map(|e| e.to_string() + "\n").concat();
    let far = [0, 1 << 53, u64::MAX].map(|n| step(n, "-1e308")).concat();
    let (_, damage) = page(&[(METRICS, far.as_bytes()), (RUN, run.as_bytes())]);
    assert_eq!(damage, ["1 line of metrics.jsonl could not be read"]);
}

#[test]
fn a_long_run_makes_a_page_of_few_points() {
    let text: String = (1..=20_000).map(|n| step(n, if n == 7777 { "99.5" } else { "2.0" })).collect();
    let (page, _) = page(&[(METRICS, text.as_bytes())]);
    let x = curves(&page)["charts"][0]["series"][0]["x"].as_array().unwrap().len();
    assert!(x <= 4000 && page.contains("7777,") && page.contains("99.5"), "{x}");
    assert!(page.contains("Of every 11 steps, each curve has the least number, the greatest and, drawn over them, the mean"));
}

#[test]
fn curves_can_be_drawn_along_tokens_and_time_where_a_run_says_them() {
    let text: String = (3..=5).map(|n| step(n, "2.0")).collect();
    let (with, _) = page(&[(METRICS, text.as_bytes())]);
    let drawn = curves(&with);
    // Each step has two tokens and takes 20 ms; steps before the first had tokens too.
    let elapsed = serde_json::json!({"step": [3, 4, 5], "tokens": [6.0, 8.0, 10.0], "seconds": [0.02, 0.04, 0.06]});
    assert_eq!((&drawn["axes"], &drawn["runs"][0]["elapsed"]), (&serde_json::json!(["step", "tokens", "seconds"]), &elapsed));
    assert!(with.contains("<option value=\"2\">time</option>"));
    let (without, _) = page(&[(METRICS, b"{\"step\":1,\"loss\":2.0}\n{\"step\":2,\"loss\":1.0}\n")]);
    assert_eq!(curves(&without)["axes"], serde_json::json!(["step"]));
    assert!(!without.contains("<select"));
}

#[test]
fn several_runs_are_drawn_in_the_same_charts_under_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let named = [("a", "m", 3), ("b", "m", 5000), (NASTY, "other", 2)].map(|(name, model, steps)| {
        let run = dir.path().join(name.replace('/', "_"));
        fs::create_dir(&run).unwrap();
        let valid = format!("{{\"step\":{},\"loss\":1.0,\"valid_loss\":1.5,\"bleu\":0.5}}\n", steps + 1);
        let text: String = (1..=steps).map(|n| step(n, "2.0")).chain((name == "a").then_some(valid)).collect();
        fs::write(run.join(METRICS), text).unwrap();
        fs::write(run.join(RUN), began(model)).unwrap();
        run
    });
    let page = page::page(named.iter().map(|run| report(run)).collect());
    let drawn = curves(&page);
    let titles: Vec<&str> = drawn["charts"].as_array().unwrap().iter().map(|c| c["title"].as_str().unwrap()).collect();
    let usual = ["Loss", "Gradient norm", "Learning rate", "Tokens per second", "Time of a step (ms)"];
    assert_eq!(titles[..5], usual);
    assert_eq!(titles[5..], ["Memory of the rank that has the most (MiB)", "Reported: bleu"]);
    let series: Vec<(String, u64, &str)> = drawn["charts"][0]["series"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| (s["label"].as_str().unwrap().to_owned(), s["run"].as_u64().unwrap(), s["style"].as_str().unwrap()))
        .collect();
    let [a, b, c] = named.each_ref().map(|run| run.display().to_string());
    let wanted = [(a.clone(), 0, "line"), (b, 1, "line"), (c, 2, "line"), (format!("{a}, held-out"), 0, "sparse")];
    assert_eq!(series, wanted);
    assert_eq!((&drawn["marks"], drawn["runs"].as_array().unwrap().len()), (&serde_json::json!([]), 3));
    // A long run is drawn as one curve of means.
    let x = drawn["charts"][0]["series"][1]["x"].as_array().unwrap().len();
    assert!((1000..=2000).contains(&x), "{x}");
    assert!(page.contains("<h1>3 runs</h1>") && page.contains("curves are means of as many neighbours as needed"));
    assert_eq!((page.matches("<script").count(), page.matches("<details class=\"run\">").count()), (4, 3));
}

#[test]
fn runs_that_cannot_be_told_apart_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b", "empty"] {
        fs::create_dir(at(name)).unwrap();
    }
    ["a", "b"].into_iter().for_each(|name| fs::write(at(name).join(METRICS), step(1, "2.0")).unwrap());
    let refused = |runs: &[&str], metrics: Option<&str>, output: Option<&str>| {
        let args = ReportArgs { runs: runs.iter().map(|r| at(r)).collect(), metrics: metrics.map(at), output: output.map(at), force: false };
        match run(&args) {
            Err(Failure::Other(e)) => format!("{e:#}"),
            _ => panic!("it is no refusal"),
        }
    };
    assert!(refused(&["a", "b"], None, None).contains("add `-o FILE.html`"));
    assert!(refused(&["a", "b"], Some("m.jsonl"), Some("o.html")).contains("`--metrics` is the file of one run, and there are 2"));
    for twice in [["a", "a/../a"], ["a", "a/metrics.jsonl"]] {
        assert!(refused(&twice, None, Some("o.html")).contains("are one run: name it once"));
    }
    assert!(refused(&["a", "empty"], None, Some("o.html")).contains("has neither metrics.jsonl nor run.jsonl"));
}

/// A run of four steps that was killed after the third, went on from its checkpoint of the second, and ended.
fn killed() -> (String, String) {
    let metrics = [1, 2, 3, 3, 4].map(|n| step(n, "2.0")).concat();
    let events = [
        serde_json::json!({"time": 2.0, "event": "saved", "step": 2, "dir": "ck/2", "bytes": 5, "milliseconds": 500.0, "stalled": 100.0}),
        serde_json::json!({"time": 3.0, "event": "restarted", "why": "", "from": "ck/2", "steps": 1, "seconds": 1.0, "count": 1, "most": 2}),
        serde_json::json!({"time": 9.0, "event": "ended", "step": 4, "how": "whole", "why": null}),
    ];
    (metrics, began("m") + &events.map(|e| e.to_string() + "\n").concat())
}

#[test]
fn time_is_that_of_the_clock_where_the_log_says_it() {
    let (metrics, run) = killed();
    let (page, _) = page(&[(METRICS, metrics.as_bytes()), (RUN, run.as_bytes())]);
    let drawn = curves(&page);
    // Each step takes 20 ms. The log begins at the end of the first step and ends with the fourth.
    assert_eq!(drawn["runs"][0]["elapsed"]["seconds"], serde_json::json!([0.02, 0.52, 8.0, 8.02]));
    let marks: Vec<_> =
        drawn["marks"].as_array().unwrap().iter().map(|m| (m["kind"].as_str().unwrap(), m["step"].as_u64(), m["seconds"].as_f64())).collect();
    assert_eq!(marks, [("saved", Some(2), None), ("restart", Some(3), Some(2.02)), ("end", Some(4), Some(8.02))]);
}

#[test]
fn of_several_runs_restarts_and_ends_are_marked_with_their_run() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ["a", "b"].map(|name| {
        let run = dir.path().join(name);
        fs::create_dir(&run).unwrap();
        let (metrics, log) = killed();
        fs::write(run.join(METRICS), metrics).unwrap();
        fs::write(run.join(RUN), log).unwrap();
        run
    });
    let page = page::page(runs.iter().map(|run| report(run)).collect());
    let drawn = curves(&page);
    let marks: Vec<_> = drawn["marks"].as_array().unwrap().iter().map(|m| (m["run"].as_u64().unwrap(), m["kind"].as_str().unwrap())).collect();
    assert_eq!(marks, [(0, "restart"), (0, "end"), (1, "restart"), (1, "end")]);
    assert_eq!(drawn["marks"][3]["text"], format!("{}, step 4: the end of a run", runs[1].display()));
    assert!(page.contains("<i class=\"mark restart sign\"></i>restart"));
}
