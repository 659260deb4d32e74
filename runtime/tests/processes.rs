//! Ranks as real processes: the fixture's job with interpreted kernels, trained, killed, stopped.

mod bench;
mod fixture;
mod hostile;
mod profile;
mod worlds;

use bench::{Bench, STEPS, TRAINING, children, npy, run};
use fixture::Split;
use ir::model::{Decay, LearningRateSchedule};
use ir::op::Real;
use runtime::executor::{CommandOrder, PersistentId};
use runtime::launch::{self, Existing, Note, RunEnd, RunEvent, RunOptions, StepMetrics, Summary};
use runtime::protocol::{Expected, FirstStep, OnNonfinite};
use runtime::weights::Weights;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[test]
fn every_mesh_trains_to_the_same_bits_and_saves_the_same_file() {
    let (bytes, steps) = Bench::new(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 }).train();
    let (loss, norm, ..) = fixture::expected(TRAINING);
    assert_eq!((steps[0].loss, steps[0].grad_norm, steps[0].lr), (Some(loss), Some(norm), TRAINING));
    assert!(steps[3].loss.unwrap() < loss);
    for split in [Split { microbatches: 2, pp: 1, dp: 2, tp: 1 }, Split { microbatches: 1, pp: 2, dp: 1, tp: 2 }] {
        let bench = Bench::new(&split);
        let (same, more) = bench.train();
        assert_eq!(same, bytes);
        let numbers = |list: &[StepMetrics]| list.iter().map(|p| (p.loss, p.grad_norm, p.lr)).collect::<Vec<_>>();
        assert_eq!(numbers(&more), numbers(&steps));
        let lines = fs::read_to_string(bench.path("metrics")).unwrap();
        let first: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        assert_eq!(first["step"], 1);
        assert_eq!(first["loss"], loss);
        for key in ["grad_norm", "lr", "tokens_per_s", "step_ms"] {
            assert!(first[key].is_f64(), "{key}");
        }
        assert_eq!(lines.lines().count() as u64, STEPS);
        let mut names: Vec<_> = fs::read_dir(bench.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["init", "linear.mcc", "metrics", "out", "t.npy", "x.npy"]);
    }
}

/// Native kernels: their numbers are f32, as those in files are.
#[test]
fn a_run_resumed_on_another_mesh_ends_as_if_it_had_never_stopped() {
    let [one, other] = [Split { microbatches: 1, pp: 1, dp: 1, tp: 2 }, Split { microbatches: 2, pp: 2, dp: 1, tp: 1 }];
    let first = Bench::native(&fixture::job(&one), &one);
    let (whole, _) = first.train();
    let options = RunOptions { steps: Some(2), seed: 3, save_state: Some(first.path("state")), ..first.options() };
    run(&first.artifact, &options, &mut |_| {}).unwrap();
    let second = Bench::native(&fixture::job(&other), &other);
    let options = RunOptions { init: vec![], resume: Some(first.path("state")), save_weights: Some(second.path("out")), ..second.options() };
    let mut steps = vec![];
    run(&second.artifact, &options, &mut |p| steps.push(p.step)).unwrap();
    assert_eq!(steps, [3, 4]);
    assert_eq!(fs::read(second.path("out")).unwrap(), whole);
    // A run whose steps are done can still write files; without any it has nothing to do.
    let done = RunOptions { steps: Some(2), ..options };
    assert_eq!(run(&second.artifact, &done, &mut |_| {}).unwrap().steps, 2);
    let done = RunOptions { save_weights: None, save_state: None, ..done };
    assert!(second.fails(&done, &mut |_| {}).contains("was saved after step 2 and 2 steps are asked for"));
}

/// As a signal would, asked by another thread or from within: before the first step, in one, in the last.
#[test]
fn a_run_that_is_asked_to_stop_saves_what_an_undisturbed_one_goes_through() {
    let split = Split { microbatches: 1, pp: 2, dp: 1, tp: 2 };
    let bench = Bench::native(&fixture::job(&split), &split);
    const MANY: u64 = 60;
    bench.feed(MANY);
    let whole = RunOptions { save_weights: Some(bench.path("whole")), ..bench.options() };
    let mut losses = vec![];
    run(&bench.artifact, &whole, &mut |p| losses.push(p.loss)).unwrap();
    for at in [0, 1, 2, 17, MANY] {
        let first = RunOptions { save_state: Some(bench.path("state")), ..bench.options() };
        let (mut seen, stop) = (vec![], first.stop.clone());
        if at == 0 {
            stop.ask();
        }
        let summary = run(&bench.artifact, &first, &mut |p| {
            seen.push(p.loss);
            if p.step == at {
                stop.ask();
            }
        });
        let Summary { steps, ended, .. } = summary.unwrap();
        assert_eq!(seen.len() as u64, steps);
        assert!(steps >= at && (at != 0 || steps <= 1), "{steps}");
        assert_eq!(ended == RunEnd::Early, steps < MANY);
        if ended == RunEnd::Whole {
            continue;
        }
        let rest = RunOptions { init: vec![], resume: Some(bench.path("state")), save_weights: Some(bench.path("out")), ..bench.options() };
        let summary = run(&bench.artifact, &rest, &mut |p| {
            assert_eq!(p.step, seen.len() as u64 + 1);
            seen.push(p.loss);
        });
        assert_eq!((summary.unwrap().steps, &seen), (MANY, &losses));
        assert!(fs::read(bench.path("out")).unwrap() == fs::read(bench.path("whole")).unwrap(), "stopped after {steps}");
    }
}

/// Numbers before the update are exact in f32 too.
#[test]
fn native_kernels_on_threads_train_like_interpreted_ones() {
    for split in [Split { microbatches: 1, pp: 1, dp: 1, tp: 1 }, Split { microbatches: 2, pp: 2, dp: 1, tp: 2 }] {
        let bench = Bench::native(&fixture::job(&split), &split);
        let options = RunOptions { steps: Some(1), threads_per_rank: Some(2), save_weights: Some(bench.path("out")), ..bench.options() };
        let summary = run(&bench.artifact, &options, &mut |_| {}).unwrap();
        let (loss, norm, w, _) = fixture::expected(TRAINING);
        let last = summary.last.unwrap();
        assert_eq!((last.loss, last.grad_norm), (Some(loss), Some(f64::from(norm as f32))));
        let saved = Weights::open(&bench.path("out"), &bench.artifact.job).unwrap();
        let mut new = vec![0.0; w.len()];
        saved.get(PersistentId::Param(0)).unwrap().read(0, &mut new);
        assert!(new.iter().zip(&w).all(|(a, b)| (a - b).abs() < 1e-6), "{new:?} {w:?}");
    }
}

#[test]
fn streams_at_once_give_the_bits_of_list_order() {
    for split in [Split { microbatches: 2, pp: 2, dp: 1, tp: 2 }, Split { microbatches: 2, pp: 1, dp: 2, tp: 2 }] {
        let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
        let saved = |order: CommandOrder| {
            let options = RunOptions { save_weights: Some(bench.path("out")), order, ..bench.options() };
            let mut losses = vec![];
            run(&bench.artifact, &options, &mut |p| losses.push((p.loss, p.grad_norm))).unwrap();
            (fs::read(bench.path("out")).unwrap(), losses)
        };
        assert_eq!(saved(CommandOrder::Streams), saved(CommandOrder::List));
    }
}

#[test]
fn a_rank_that_is_killed_ends_a_run_whose_streams_wait_for_it() {
    let split = Split { microbatches: 1, pp: 1, dp: 2, tp: 1 };
    let error = hit(Bench::native(&fixture::streamed(fixture::job(&split)), &split), rustix::process::Signal::KILL);
    assert!(error.starts_with("rank 1 was killed by signal 9 at step"), "{error}");
}

#[test]
fn a_held_out_loss_is_reported_when_it_is_due() {
    let bench = Bench::new(&Split { microbatches: 2, pp: 2, dp: 1, tp: 1 });
    let options = RunOptions { valid_data: bench.options().data, eval_interval: 2, ..bench.options() };
    let mut valid = vec![];
    run(&bench.artifact, &options, &mut |p| valid.push((p.valid_loss, p.loss))).unwrap();
    assert_eq!(valid.iter().map(|v| v.0.is_some()).collect::<Vec<_>>(), [false, true, false, true]);
    // All steps have the same data, so the loss after step 2 is that of step 3.
    assert_eq!(valid[1].0, valid[2].1);
}

/// Sends a signal to the process of rank 1, once it has trained the first of very many steps; how the run ended.
fn hit(bench: Bench, signal: rustix::process::Signal) -> String {
    bench.feed(100_000);
    bench.fails(&bench.options(), &mut |p| {
        if p.step == 1 {
            let is_victim = |p: &u32| fs::read(format!("/proc/{p}/cmdline")).unwrap_or_default().starts_with_rank(1);
            let victim = children().into_iter().find(is_victim).unwrap();
            rustix::process::kill_process(rustix::process::Pid::from_raw(victim as i32).unwrap(), signal).unwrap();
        }
    })
}

/// Set for the process that [`a_launcher_that_is_killed_leaves_no_rank_behind`] starts and kills.
const VICTIM: &str = "MCC_TEST_LAUNCHER";

#[test]
fn a_launcher_that_is_killed_leaves_no_rank_behind() {
    if std::env::var_os(VICTIM).is_some() {
        let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
        bench.feed(100_000);
        let save = bench.path("out");
        println!("{}", bench.dir.path().display());
        let _ = run(&bench.artifact, &RunOptions { save_weights: Some(save), ..bench.options() }, &mut |p| {
            if p.step == 1 {
                println!("{:?}", children());
            }
        });
        return;
    }
    let name = "a_launcher_that_is_killed_leaves_no_rank_behind";
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map(Result::unwrap);
    let dir = PathBuf::from(lines.find(|l| l.starts_with('/')).unwrap());
    let ranks: Vec<u32> = serde_json::from_str(&lines.find(|l| l.starts_with('[')).unwrap()).unwrap();
    assert_eq!(ranks.len(), 2);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    // The ranks die of a signal, and this waits no longer than that takes.
    let is_rank = |p: &u32| fs::read(format!("/proc/{p}/cmdline")).is_ok_and(|c| !c.is_empty() && (c.starts_with_rank(0) || c.starts_with_rank(1)));
    while ranks.iter().any(is_rank) {
        std::thread::yield_now();
    }
    let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["init", "linear.mcc", "t.npy", "x.npy"]);
    fs::remove_dir_all(dir).unwrap();
}

trait CommandLine {
    fn starts_with_rank(&self, rank: u64) -> bool;
}

impl CommandLine for Vec<u8> {
    fn starts_with_rank(&self, rank: u64) -> bool {
        let words: Vec<&[u8]> = self.split(|b| *b == 0).collect();
        words.windows(2).any(|w| w[0] == b"--rank" && w[1] == rank.to_string().as_bytes())
    }
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named() {
    let error = hit(Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 }), rustix::process::Signal::KILL);
    assert!(error.starts_with("rank 1 was killed by signal 9 at"), "{error}");
}

#[test]
fn a_stopped_rank_is_found_stuck() {
    let error = hit(Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 }), rustix::process::Signal::STOP);
    assert!(error.starts_with("rank 1 is stuck at step"), "{error}");
    assert!(error.contains("\n  rank 0 waits for rank 1 at step"), "{error}");
}

#[test]
fn ranks_that_wait_for_each_other_are_a_deadlock() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 2, dp: 1, tp: 1 });
    // The last stage leaves out a collective with the first.
    job.programs[1].bodies[3].commands.remove(2);
    let bench = Bench::with(job);
    let error = bench.fails(&bench.options(), &mut |_| {});
    assert!(error.contains("deadlock: all ranks wait") || error.contains("issues"), "{error}");
}

#[test]
fn a_loss_that_is_not_finite_stops_with_the_first_op_or_skips() {
    let split = Split { microbatches: 2, pp: 1, dp: 2, tp: 1 };
    let bench = Bench::native(&fixture::job(&split), &split);
    let mut x = fixture::inputs()["x"].data.repeat(STEPS as usize);
    // The sum of the products with weights near 1, -2 and 3 is infinite in f32, and 0, the first input, times that is
    // NaN.
    let most = f64::from(f32::MAX);
    x[((fixture::BATCH + 5) * fixture::INS) as usize..][..3].copy_from_slice(&[0.0, -most, most]);
    npy(&bench.path("x.npy"), &format!("({STEPS}, {}, {})", fixture::BATCH, fixture::INS), &x);
    let error = bench.fails(&bench.options(), &mut |_| {});
    assert!(error.starts_with("step 2: loss = inf, grad_norm = NaN is not finite;"), "{error}");
    let options = RunOptions { on_nonfinite: OnNonfinite::Skip { most: 2 }, ..bench.options() };
    let Summary { steps, skipped, last, .. } = run(&bench.artifact, &options, &mut |_| {}).unwrap();
    assert_eq!((steps, skipped), (STEPS, 1));
    assert!(last.unwrap().loss.unwrap().is_finite());
}

#[test]
fn weights_that_are_not_finite_are_not_trained_from() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 1, tp: 2 });
    bench.weights("init", &[1.0, 2.0, f64::NAN]);
    let error = bench.fails(&bench.options(), &mut |_| {});
    assert!(error.contains("init`: element 2 of `w` is NaN, with which nothing can be trained"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_never_saved() {
    let split = Split { microbatches: 1, pp: 1, dp: 2, tp: 2 };
    let mut job = fixture::job(&split);
    // The last step computes its loss from the weights before its update.
    job.train.schedule = LearningRateSchedule { peak: Real(f64::MAX), warmup: 0, decay: Decay::Constant, ..job.train.schedule };
    let bench = Bench::with(job);
    let out = bench.path("out");
    fs::write(&out, "of another run").unwrap();
    let options = |steps| RunOptions {
        steps: Some(steps),
        save_weights: Some(out.clone()),
        save_state: Some(bench.path("state")),
        existing: Existing::Replace,
        ..bench.options()
    };
    let before = fs::read_dir(bench.dir.path()).unwrap().count();
    let error = bench.fails(&options(1), &mut |_| {});
    assert!(error.starts_with("rank ") && error.contains("of `w` is ") && error.contains(" after step 1. That is not saved"), "{error}");
    let error = bench.fails(&options(2), &mut |_| {});
    assert!(error.starts_with("step 2: ") && error.contains(" of parameter w is ") && error.contains(" before the step"), "{error}");
    assert_eq!(fs::read_to_string(&out).unwrap(), "of another run");
    assert_eq!(fs::read_dir(bench.dir.path()).unwrap().count(), before, "something stays behind");
}

#[test]
fn a_run_whose_steps_are_skipped_ends_with_an_error() {
    let split = Split { microbatches: 1, pp: 1, dp: 2, tp: 1 };
    let bench = Bench::native(&fixture::job(&split), &split);
    let (inputs, row) = (fixture::inputs(), fixture::BATCH * fixture::INS);
    // From step `first` on, nothing is finite, as the ranks compute in f32.
    let tried = |first: u64, most: u64| {
        let mut x = inputs["x"].data.repeat(STEPS as usize);
        x[(row * (first - 1)) as usize..].fill(f64::from(f32::MAX));
        npy(&bench.path("x.npy"), &format!("({STEPS}, {}, {})", fixture::BATCH, fixture::INS), &x);
        let options = RunOptions { on_nonfinite: OnNonfinite::Skip { most }, save_weights: Some(bench.path("out")), ..bench.options() };
        let mut done = 0;
        let outcome = run(&bench.artifact, &options, &mut |p| done = p.step).map(|s| s.skipped).map_err(|e| e.to_string());
        (outcome, done, fs::remove_file(bench.path("out")).is_ok())
    };
    let skips = "2 steps in a row were skipped by step 4, as loss or gradient norm was not finite, and --max-skips allows 2. Nothing is saved";
    for (first, most, want, saved) in [
        (3, 3, Ok(2), true),
        (3, 2, Err(skips), false),
        (1, 9, Err("nothing was trained: loss or gradient norm was not finite in all of 4 steps. Nothing is saved"), false),
    ] {
        let (outcome, done, is_saved) = tried(first, most);
        match (&outcome, want) {
            (Err(error), Err(want)) => assert!(error.starts_with(want), "{error}"),
            (outcome, want) => assert_eq!(*outcome, want.map_err(str::to_string)),
        }
        assert_eq!((done, is_saved), (STEPS, saved), "{outcome:?}");
    }
}

#[test]
fn an_overflow_is_traced_to_rank_and_op() {
    let split = Split { microbatches: 1, pp: 1, dp: 1, tp: 2 };
    let bench = Bench::native(&fixture::job(&split), &split);
    bench.weights("init", &[1e30, 0.0, 0.0]);
    let error = bench.fails(&bench.options(), &mut |_| {});
    assert!(error.starts_with("step 1: loss = inf"), "{error}");
    assert!(error.contains("it comes from rank 0, op mul of "), "{error}");
    assert!(error.contains(", forward microbatch 0 command 4 (kernel of sub, mul, reduce_sum"), "{error}");
}

#[test]
fn a_first_step_that_is_not_the_references_trains_nothing() {
    let bench = Bench::new(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
    let (loss, norm, ..) = fixture::expected(TRAINING);
    let held_against = |loss: f64, norm: f64| {
        let of = |report: &str, value| Expected { report: report.into(), value: Real(value), allowed: Real(1e-6 * value) };
        let first_step = FirstStep { sequences: bench.artifact.job.global_batch, expected: vec![of("loss", loss), of("grad_norm", norm)] };
        RunOptions {
            steps: Some(1),
            first_step: Some(first_step),
            metrics: Some(bench.path("metrics")),
            existing: Existing::Replace,
            ..bench.options()
        }
    };
    let mut said = vec![];
    let see = &mut |event: RunEvent| {
        if let RunEvent::Note(Note::Remark(text)) = event {
            said.push(text);
        }
    };
    let done = launch::run(&bench.artifact, &held_against(loss, norm), see).unwrap().last.unwrap();
    assert_eq!((done.loss, done.grad_norm), (Some(loss), Some(norm)));
    assert!(said.iter().any(|s| s.starts_with("the first step, on all") && s.contains("grad_norm")), "{said:?}");
    for (report, loss, norm) in [("loss", loss * (1.0 + 1e-5), norm), ("grad_norm", loss, norm * (1.0 - 1e-5))] {
        let error = bench.fails(&held_against(loss, norm), &mut |_| {});
        assert!(error.contains("the first step is not the reference's") && error.contains(&format!("`{report}` is")), "{error}");
        assert_eq!(fs::read_to_string(bench.path("metrics")).unwrap_or_default(), "");
    }
}

#[test]
fn wrong_options_are_refused_before_any_rank_starts() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    let refused = |options: RunOptions| bench.fails(&options, &mut |_| {});
    assert!(refused(RunOptions { data: vec![], ..bench.options() }).contains("no data for input `x`"));
    assert!(refused(RunOptions { steps: Some(9), ..bench.options() }).contains("has 4 steps; step 5 was asked for"));
    assert!(refused(RunOptions { init: vec![bench.path("x.npy")], ..bench.options() }).contains("is not a safetensors file"));
    assert!(refused(RunOptions { rank_binary: bench.path("missing"), ..bench.options() }).contains("could not be started"));
    assert!(refused(RunOptions { save_weights: Some(bench.path("none/out")), ..bench.options() }).contains("none/out"));
    assert!(refused(RunOptions { rank_binary: "/bin/false".into(), ..bench.options() }).contains("ended with code 1 at the start"));
}

#[test]
fn the_rank_binary_alone_says_what_it_is() {
    let output = Command::new(env!("CARGO_BIN_EXE_mcc-rank")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("mcc-rank is one rank of a run"));
}
