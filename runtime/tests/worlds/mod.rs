//! Ranks that were started one by one, as torchrun and srun do: each has a launcher of its own. What stands for
//! another machine here is another node in the environment: its ranks have memory of their own and are reached over
//! TCP.

mod besieged;

use crate::bench::{Bench, STEPS, children, run};
use crate::fixture::{self, Split};
use runtime::executor::CommandOrder;
use runtime::launch::{RunEnd, RunOptions, StepMetrics, StopRequest, Summary};
use runtime::profile::ProfileChunk;
use runtime::protocol::{self, Event, StepEvent};
use runtime::schedule::learning_rate;
use runtime::world::{Launcher, RendezvousEndpoint, World};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A port that nobody listens at.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The world in which rank `k` is on node `nodes[k]`, as each of its ranks sees it.
fn world(nodes: &[u64]) -> Vec<World> {
    let meeting = RendezvousEndpoint { host: "127.0.0.1".into(), port: port() };
    let size = nodes.len() as u64;
    let rank = |(rank, node): (u64, &u64)| World { launcher: Launcher::Torchrun, rank, size, node: Some(*node), meeting: meeting.clone() };
    (0..).zip(nodes).map(rank).collect()
}

/// Runs each of these ranks with a launcher of its own; `progress` is told the rank too. How each run ended.
fn join(
    bench: &Bench,
    worlds: &[World],
    options: impl Fn(u64) -> RunOptions + Sync,
    progress: impl Fn(u64, &StepMetrics) + Sync,
) -> Vec<Result<u64, String>> {
    summaries(bench, worlds, options, progress).into_iter().map(|s| s.map(|s| s.steps)).collect()
}

fn summaries(
    bench: &Bench,
    worlds: &[World],
    options: impl Fn(u64) -> RunOptions + Sync,
    progress: impl Fn(u64, &StepMetrics) + Sync,
) -> Vec<Result<Summary, String>> {
    std::thread::scope(|scope| {
        let start = |world: &World| {
            let options = RunOptions { world: Some(world.clone()), ..options(world.rank) };
            let (rank, progress) = (world.rank, &progress);
            scope.spawn(move || {
                let ran = run(&bench.artifact, &options, &mut |p| progress(rank, p));
                assert_eq!(children(), Vec::<u32>::new());
                ran.map_err(|e| e.to_string())
            })
        };
        let threads: Vec<_> = worlds.iter().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn errors(ends: Vec<Result<u64, String>>) -> Vec<String> {
    ends.into_iter().map(|e| e.unwrap_err()).collect()
}

#[test]
fn ranks_on_any_machines_train_to_the_bits_of_one_launchers() {
    for split in [Split { microbatches: 2, pp: 1, dp: 2, tp: 2 }, Split { microbatches: 2, pp: 2, dp: 1, tp: 2 }] {
        let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
        let (bytes, steps) = bench.train();
        let lines = |text: &str| {
            let timeless = |l: &str| {
                let mut line: serde_json::Value = serde_json::from_str(l).unwrap();
                line.as_object_mut()
                    .unwrap()
                    .retain(|key, _| !["tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_bytes"].contains(&key.as_str()));
                line
            };
            text.lines().map(timeless).collect::<Vec<_>>()
        };
        let metrics = lines(&fs::read_to_string(bench.path("metrics")).unwrap());
        assert_eq!(metrics.len(), steps.len());
        for nodes in [[0, 0, 0, 0], [0, 0, 1, 1], [7, 3, 7, 3], [0, 1, 2, 3]] {
            for order in [CommandOrder::Streams, CommandOrder::List] {
                fs::remove_file(bench.path("out")).unwrap();
                let options =
                    |_| RunOptions { save_weights: Some(bench.path("out")), metrics: Some(bench.path("metrics")), order, ..bench.options() };
                let ends = join(&bench, &world(&nodes), options, |rank, _| assert_eq!(rank, 0));
                assert_eq!(ends, [Ok(STEPS), Ok(0), Ok(0), Ok(0)], "{nodes:?}");
                assert_eq!(fs::read(bench.path("out")).unwrap(), bytes, "{nodes:?}");
                assert_eq!(lines(&fs::read_to_string(bench.path("metrics")).unwrap()), metrics, "{nodes:?}");
            }
        }
        let mut names: Vec<_> = fs::read_dir(bench.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["init", "linear.mcc", "metrics", "out", "t.npy", "x.npy"]);
    }
}

/// Many chunks of every collective, and messages that go around their rings.
/// By the launcher of any rank, or by all at once as batch systems do; on one machine, on two, on four.
#[test]
fn a_world_that_is_asked_to_stop_stops_everywhere_after_the_same_step() {
    const MANY: u64 = 200;
    let split = Split { microbatches: 2, pp: 2, dp: 1, tp: 2 };
    let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
    bench.feed(MANY);
    let whole = RunOptions { save_weights: Some(bench.path("whole")), ..bench.options() };
    run(&bench.artifact, &whole, &mut |_| {}).unwrap();
    for (nodes, who, at) in [([0, 0, 1, 1], vec![3], 5), ([0, 1, 2, 3], vec![0, 1, 2, 3], 9), ([0, 0, 0, 0], vec![2, 0], 1)] {
        let stops: Vec<StopRequest> = (0..4).map(|_| StopRequest::default()).collect();
        let options = |rank: u64| RunOptions { save_state: Some(bench.path("state")), stop: stops[rank as usize].clone(), ..bench.options() };
        let ends = summaries(&bench, &world(&nodes), options, |_, p| {
            if p.step == at {
                who.iter().for_each(|r: &usize| stops[*r].ask());
            }
        });
        let ends: Vec<Summary> = ends.into_iter().map(Result::unwrap).collect();
        assert!(ends.iter().all(|s| s.ended == RunEnd::Early), "{nodes:?}");
        assert!((at..MANY).contains(&ends[0].steps), "{nodes:?}: {}", ends[0].steps);
        let rest = RunOptions { init: vec![], resume: Some(bench.path("state")), save_weights: Some(bench.path("out")), ..bench.options() };
        run(&bench.artifact, &rest, &mut |_| {}).unwrap();
        assert!(fs::read(bench.path("out")).unwrap() == fs::read(bench.path("whole")).unwrap(), "{nodes:?}, stopped after {}", ends[0].steps);
    }
}

/// After steps that nobody knows beforehand: each checkpoint is complete, and the last one is a run's that was
/// never asked.
#[test]
fn a_world_saves_everywhere_after_the_same_steps_when_time_has_passed() {
    const MANY: u64 = 150;
    let split = Split { microbatches: 2, pp: 2, dp: 1, tp: 2 };
    let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
    bench.feed(MANY);
    let whole = RunOptions { save_weights: Some(bench.path("whole")), ..bench.options() };
    run(&bench.artifact, &whole, &mut |_| {}).unwrap();
    for nodes in [[0, 0, 1, 1], [0, 0, 0, 0]] {
        let saves = bench.path(&format!("saves{}", nodes[3]));
        let options = |_| RunOptions { save: Some(saves.clone()), save_seconds: Some(Duration::from_millis(1)), ..bench.options() };
        summaries(&bench, &world(&nodes), options, |_, _| {}).into_iter().for_each(|s| drop(s.unwrap()));
        let steps = runtime::checkpoint::steps(&saves).unwrap();
        assert!(steps.len() > 2 && steps[0] == MANY, "{nodes:?}: {steps:?}");
        for step in [steps[1], steps[steps.len() - 1]] {
            let resume = Some(saves.join(runtime::checkpoint::step_name(step)));
            let rest = RunOptions { init: vec![], resume, save_weights: Some(bench.path("out")), ..bench.options() };
            run(&bench.artifact, &rest, &mut |_| {}).unwrap();
            assert!(fs::read(bench.path("out")).unwrap() == fs::read(bench.path("whole")).unwrap(), "{nodes:?}, saved after {step}");
        }
    }
}

#[test]
fn long_runs_over_tcp_end_like_those_in_memory() {
    let split = Split { microbatches: 2, pp: 2, dp: 2, tp: 1 };
    let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
    bench.feed(200);
    let mut here = vec![];
    run(&bench.artifact, &bench.options(), &mut |p| here.push((p.loss, p.grad_norm))).unwrap();
    let there = std::sync::Mutex::new(vec![]);
    let ends = join(&bench, &world(&[0, 1, 1, 2]), |_| bench.options(), |_, p| there.lock().unwrap().push((p.loss, p.grad_norm)));
    assert_eq!(ends, [Ok(200), Ok(0), Ok(0), Ok(0)]);
    assert_eq!(there.into_inner().unwrap(), here);
}

/// Sends a signal to the process of rank 1 after the first of very many steps; how the run ended for all.
fn hit(nodes: &[u64], signal: Signal) -> Vec<String> {
    let split = Split { microbatches: 1, pp: 1, dp: nodes.len() as u64, tp: 1 };
    let bench = Bench::native(&fixture::streamed(fixture::job(&split)), &split);
    bench.feed(100_000);
    let strike = |_, p: &StepMetrics| {
        if p.step == 1 {
            kill_process(Pid::from_raw(process_of(&bench, 1) as i32).unwrap(), signal).unwrap();
        }
    };
    errors(join(&bench, &world(nodes), |_| bench.options(), strike))
}

/// The process of a rank whose memory names this bench's artifact.
fn process_of(bench: &Bench, rank: u64) -> u32 {
    let artifact = bench.artifact.dir.display().to_string();
    let own = std::process::id().to_string();
    let is = |p: &u32| {
        let line = fs::read(format!("/proc/{p}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        let memory = || {
            let mut text = vec![];
            let file = fs::File::open(format!("/proc/{p}/fd/0"));
            file.and_then(|f| f.take(1 << 12).read_to_end(&mut text)).is_ok() && String::from_utf8_lossy(&text).contains(&artifact)
        };
        words.get(1..5) == Some(&[b"--rank", rank.to_string().as_bytes(), b"--parent", own.as_bytes()]) && memory()
    };
    let mut processes = fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    processes.find(is).unwrap()
}

#[test]
fn a_rank_that_is_killed_is_named_on_every_rank() {
    for nodes in [[0, 0, 1, 1], [0, 1, 1, 0]] {
        for error in hit(&nodes, Signal::KILL) {
            assert!(error.starts_with("rank 1 was killed by signal 9 at step"), "{error}");
            assert!(error.contains("rank 2 waits for rank"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_found_stuck_on_every_rank() {
    for error in hit(&[0, 1], Signal::STOP) {
        assert!(error.starts_with("rank 1 is stuck at step"), "{error}");
        assert!(error.contains("\n  rank 0 waits for rank 1 at step"), "{error}");
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_to_those_that_did() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 4, tp: 1 });
    let worlds: Vec<World> = world(&[0, 0, 1, 1]).into_iter().filter(|w| w.rank != 2).collect();
    let options = |_| RunOptions { meeting_limit: Duration::from_secs(1), ..bench.options() };
    assert_eq!(errors(join(&bench, &worlds, options, |_, _| {})), ["rank 2 did not come in time"; 3]);
    let alone: Vec<World> = world(&[0, 0, 1, 1]).into_iter().skip(3).collect();
    let error = errors(join(&bench, &alone, options, |_, _| {})).remove(0);
    assert!(error.starts_with("rank 3 does not reach rank 0 at 127.0.0.1:"), "{error}");
}

#[test]
fn what_is_wrong_on_one_rank_is_said_on_all() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    let ends = |options: &(dyn Fn(u64) -> RunOptions + Sync)| errors(join(&bench, &world(&[0, 1]), options, |_, _| {}));
    for error in ends(&|rank| RunOptions { seed: rank, ..bench.options() }) {
        assert!(error.contains("was started with other options than rank 0: seed is 1, not 0"), "{error}");
    }
    for error in ends(&|rank| RunOptions { steps: Some(4 + 5 * rank), ..bench.options() }) {
        assert!(error.contains("has 4 steps; step 5 was asked for"), "{error}");
    }
    for error in ends(&|_| RunOptions { save_weights: Some(bench.path("none/out")), ..bench.options() }) {
        assert!(error.contains("none/out"), "{error}");
    }
    for error in ends(&|rank| if rank == 1 { RunOptions { rank_binary: "/none".into(), ..bench.options() } } else { bench.options() }) {
        assert!(error.contains("could not be started"), "{error}");
    }
}

#[test]
fn a_world_of_another_size_is_refused_with_ways_out() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    for error in errors(join(&bench, &world(&[0, 0, 0]), |_| bench.options(), |_, _| {})) {
        assert!(error.starts_with("torchrun started 3 ranks, but the artifact is for 2: start that many"), "{error}");
    }
}

/// Set for the processes that [`a_launcher_that_is_killed_is_missed_by_all`] starts: the directory, and the rank, of
/// which 0 and 1 are on two nodes.
const JOINER: &str = "MCC_TEST_JOINER";

#[test]
fn a_launcher_that_is_killed_is_missed_by_all() {
    let split = Split { microbatches: 1, pp: 1, dp: 2, tp: 1 };
    if let Ok(text) = std::env::var(JOINER) {
        let [dir, rank, port] = text.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let bench = Bench::at(dir.into());
        let meeting = RendezvousEndpoint { host: "127.0.0.1".into(), port: port.parse().unwrap() };
        let rank = rank.parse().unwrap();
        let world = World { launcher: Launcher::Torchrun, rank, size: 2, node: Some(rank), meeting };
        let options = RunOptions { world: Some(world), ..bench.options() };
        let ran = run(&bench.artifact, &options, &mut |p| {
            if p.step == 1 {
                println!("began");
            }
        });
        println!("[{}]", ran.unwrap_err());
        return;
    }
    for (victim, says) in [(0, "rank 0's `mcc run` on 127.0.0.1 is gone"), (1, "rank 1's `mcc run` on ")] {
        let bench = Bench::new(&split);
        bench.feed(100_000);
        let port = port();
        let name = "worlds::a_launcher_that_is_killed_is_missed_by_all";
        let start = |rank: u64| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let text = format!("{} {rank} {port}", bench.dir.path().display());
            command.args(["--exact", name, "--nocapture"]).env(JOINER, text).stdout(Stdio::piped()).spawn().unwrap()
        };
        let mut joined = [0, 1].map(start);
        // Rank 0's launcher says when the first step is done.
        let mut out = BufReader::new(joined[0].stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("began") {
            assert!(out.read_line(&mut line).unwrap() > 0, "{line}");
        }
        joined[victim].kill().unwrap();
        let mut said = String::new();
        out.read_to_string(&mut said).unwrap();
        let [first, second] = joined;
        let other = second.wait_with_output().unwrap();
        first.wait_with_output().unwrap();
        said += &String::from_utf8(other.stdout).unwrap();
        assert!(said.contains(says), "{said}");
    }
}

/// Whatever rank 1 says in place of what it does ends the run with its name, on one machine and on two.
#[test]
fn what_a_rank_says_that_cannot_be_is_not_believed() {
    let bench = Bench::new(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    let [lies, liar] = ["lies", "liar"].map(|f| bench.path(f));
    let binary = bench.options().rank_binary;
    let text = format!("#!/bin/sh\nif [ $2 = 1 ]; then cat '{}'; exec sleep 60; fi\nexec '{}' \"$@\"\n", lies.display(), binary.display());
    fs::write(&liar, text).unwrap();
    fs::set_permissions(&liar, fs::Permissions::from_mode(0o755)).unwrap();

    let reports = vec![None; bench.artifact.job.reports.len()];
    let rate = learning_rate(&bench.artifact.job.train.schedule, 1, STEPS);
    let step = StepEvent {
        step: 1,
        learning_rate: rate,
        milliseconds: 1.0,
        busy: [0.5; 2],
        read: 0,
        waited: 0.0,
        further_passes: [0; 2],
        reports: reports.clone(),
        valid: vec![],
        loss_scale: None,
        skipped: false,
    };
    let with = |edit: &dyn Fn(&mut StepEvent)| {
        let mut event = step.clone();
        edit(&mut event);
        Event::Step(event)
    };
    let [first, ninth] = [with(&|_| {}), with(&|s| s.step = 9)];
    let timed: Vec<Event> = ProfileChunk::of(vec![(1, 0, 1)], vec![]).into_iter().map(Event::Profile).collect();
    let cases: [(&[Event], &str); 10] = [
        (&[ninth], "step 9 of 4 after step 0"),
        (&[first.clone(), first.clone()], "step 1 of 4 after step 1"),
        (&[with(&|s| s.reports.push(Some(1.0)))], "values of"),
        (&[with(&|s| s.valid = vec![reports.clone()])], "of step 1, StepEvent"),
        (&[with(&|s| s.milliseconds = f64::NAN)], "milliseconds: NaN"),
        (&[with(&|s| s.learning_rate *= 2.0)], "of step 1, StepEvent"),
        (&[Event::Finished { step: 3 }], "it is done with step 3 after step 0"),
        (&[Event::Skipped { step: 0, skips: 1, most: None }], "it skipped 1 steps by step 0, after step 0"),
        (&timed, "it was timed"),
        (&[Event::NonFinite { step: 1, reports: reports.clone(), blame: None }, first], "it goes on after steps that ended early"),
    ];
    for (events, says) in cases {
        let mut said = vec![];
        events.iter().for_each(|e| protocol::say(&mut said, e).unwrap());
        fs::write(&lies, said).unwrap();
        let options = |_| RunOptions { rank_binary: liar.clone(), ..bench.options() };
        let alone = run(&bench.artifact, &options(0), &mut |_| {}).unwrap_err().to_string();
        for error in errors(join(&bench, &world(&[0, 1]), options, |_, _| {})).into_iter().chain([alone]) {
            assert!(error.contains("what rank 1 says of itself cannot be: ") && error.contains(says), "{says}: {error}");
        }
    }
}
