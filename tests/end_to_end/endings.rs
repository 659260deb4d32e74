//! Runs that end otherwise than by themselves: a signal at any instant, a rank or launcher that is killed, a reader
//! that leaves, a disk that is full. What should be saved is there and whole, which is to say: a run that goes on
//! from it ends with the bytes of one that nothing disturbed. `ENDINGS=200` tries so many of each, from number
//! `ENDINGS_FIRST` on.

use crate::mcc::{CommandOutput, Dir, metrics};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: u64 = 60;

/// The numbers of the cases that are tried for each kind of end.
fn cases() -> Range<u64> {
    let number = |variable: &str, default: u64| std::env::var(variable).map_or(default, |n| n.parse().expect("a number"));
    let first = number("ENDINGS_FIRST", 0);
    first..first + number("ENDINGS", 3)
}

/// A number below `end` that is another one for every case of every kind.
fn random(kind: u64, case: u64, end: u64) -> u64 {
    ir::random::mix(ir::random::mix(kind) ^ case) % end
}

/// A model for two ranks that has been trained to the end once.
struct UninterruptedRun {
    dir: Dir,
    weights: Vec<u8>,
    state: Vec<u8>,
    losses: Vec<String>,
    took: Duration,
}

const RUN: &str = "run out.mcc --data text.txt --steps 60 --threads-per-rank 1";

fn losses(dir: &Dir, name: &str) -> Vec<String> {
    metrics(&dir.path(name)).iter().map(|l| format!("{} {}", l["step"], l["loss"])).collect()
}

impl UninterruptedRun {
    fn new() -> UninterruptedRun {
        let dir = Dir::new();
        dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(40));
        let model = "-D vocab=256 -D hidden=32 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 5";
        dir.line(&format!("compile {{models}}/gpt2.mdl {model} --tp 2 -o out.mcc")).succeeds();
        let start = Instant::now();
        dir.line(&format!("{RUN} --save-weights whole --save-state whole-state --metrics whole-metrics")).succeeds();
        let took = start.elapsed();
        let read = |name: &str| fs::read(dir.path(name)).expect("saved");
        let (weights, state, losses) = (read("whole"), read("whole-state"), losses(&dir, "whole-metrics"));
        assert_eq!(losses.len() as u64, STEPS);
        UninterruptedRun { dir, weights, state, losses, took }
    }

    /// Starts a run in a process group of its own, as a shell does.
    fn start(&self, flags: &str) -> Child {
        let mut command = self.dir.hearing(&format!("{RUN} {flags}"));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts")
    }

    /// Directories of checkpoints that are not complete: one is written, or a run was killed that wrote one.
    fn unfinished(&self) -> BTreeSet<OsString> {
        let entries = fs::read_dir(self.dir.path("ck")).into_iter().flatten().flatten();
        entries.map(|e| e.file_name()).filter(|name| name.as_encoded_bytes().starts_with(b".")).collect()
    }

    /// Waits for a run's save of this number to begin. False if the run ends before.
    fn save_begins(&self, run: &mut Child, number: u64) -> bool {
        let mut seen = self.unfinished();
        let before = seen.len() as u64;
        while run.try_wait().expect("a process").is_none() {
            let now = self.unfinished();
            seen.extend(now.iter().cloned());
            if seen.len() as u64 > before + number {
                return true;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        false
    }

    fn is(&self, weights: &str, state: &str) {
        assert!(fs::read(self.dir.path(weights)).expect("weights") == self.weights, "other weights");
        assert!(fs::read(self.dir.path(state)).expect("a state") == self.state, "another state");
    }

    fn forget(&self, names: &[&str]) {
        names.iter().for_each(|name| drop(fs::remove_file(self.dir.path(name))));
    }
}

fn kill(signal: &str, target: &str) {
    // The process may have ended by itself.
    let _ = Command::new("kill").args(["-s", signal, "--", target]).stderr(Stdio::null()).status().expect("kill starts");
}

/// The processes that a process has started. A launcher's are its ranks.
pub fn children(process: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Saves all the time, so that many of the ends come while a checkpoint is written.
const SAVES: &str = "--resume auto --save ck --save-interval 2 --keep 2 --metrics m";

/// How many ends there were, and during how many of them a checkpoint was written.
#[derive(Default)]
struct EndingCounts {
    all: u64,
    in_saves: u64,
}

impl EndingCounts {
    /// Waits for an instant of a run's life, every other time one at which it saves, and says whether it does.
    fn instant(&mut self, whole: &UninterruptedRun, run: &mut Child, kind: u64, case: u64, longest: Duration) {
        let saves = random(kind, case, 2) == 0 && whole.save_begins(run, random(kind + 1, case, 4));
        if !saves {
            std::thread::sleep(Duration::from_micros(random(kind + 2, case, longest.as_micros() as u64)));
        } else if case.is_multiple_of(2) {
            std::thread::sleep(Duration::from_micros(random(kind + 2, case, 2000)));
        }
        self.all += 1;
        self.in_saves += u64::from(run.try_wait().expect("a process").is_none() && !whole.unfinished().is_empty());
    }
}

#[test]
fn a_run_that_is_killed_goes_on_from_its_last_checkpoint_to_the_same_bits() {
    let whole = UninterruptedRun::new();
    let (mut resumed, mut left_unfinished, mut kinds, mut ends) = (0, 0, [0; 3], EndingCounts::default());
    for case in cases() {
        // Each case ends its run up to three times.
        for end in 0..1 + random(6, case, 3) {
            let mut run = whole.start(SAVES);
            ends.instant(&whole, &mut run, 40 + 3 * end, case, 2 * whole.took);
            let kind = random(10 + end, case, 3) as usize;
            match kind {
                0 => kill("KILL", &run.id().to_string()),
                1 => children(run.id()).first().into_iter().for_each(|rank| kill("KILL", rank)),
                _ => kill("TERM", &run.id().to_string()),
            }
            run.wait().expect("the end");
            kinds[kind] += 1;
            // Ranks whose launcher was killed may still be about to end.
            std::thread::sleep(Duration::from_millis(50));
            left_unfinished += whole.unfinished().len();
        }
        let ran = whole.dir.line(&format!("{RUN} {SAVES} --save-weights w --save-state s"));
        assert_eq!(ran.code, Some(0), "case {case}: {}", ran.stderr);
        resumed += usize::from(ran.stderr.contains("going on from"));
        whole.is("w", "s");
        // Steps after the last checkpoint are logged twice, with the same losses.
        let lines = losses(&whole.dir, "m");
        assert!(lines.iter().all(|line| whole.losses.contains(line)) && lines.len() as u64 >= STEPS, "case {case}");
        let mut left: Vec<String> = fs::read_dir(whole.dir.path("ck")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        // A run that SIGTERM ends after an odd step saves that step.
        assert!(
            matches!(&left[..], [before, last] if ["step-58", "step-59"].contains(&before.as_str()) && last == "step-60"),
            "case {case}: {left:?}"
        );
        whole.forget(&["w", "s", "m"]);
        fs::remove_dir_all(whole.dir.path("ck")).expect("removed");
    }
    let [launchers, ranks, stopped] = kinds;
    println!(
        "killed: {launchers} launchers, {ranks} ranks, {stopped} by SIGTERM, {} of {} in a save; {resumed} of {} runs went on from a checkpoint; {left_unfinished} were left unfinished",
        ends.in_saves,
        ends.all,
        cases().count()
    );
    assert!(3 * ends.in_saves >= ends.all || ends.all < 20, "few ends came in saves");
}

#[test]
fn a_run_whose_ranks_are_killed_starts_again_by_itself() {
    let whole = UninterruptedRun::new();
    let (mut restarts, mut ends) = (0, EndingCounts::default());
    for case in cases() {
        let mut run = whole.start("--restarts 9 --save ck --save-interval 3 --keep 1 --metrics m --save-weights w --save-state s");
        for end in 0..1 + random(20, case, 3) {
            ends.instant(&whole, &mut run, 60 + 3 * end, case, whole.took);
            let ranks = children(run.id());
            // SIGTERM is not among the signals, as ranks ignore it.
            ranks.get(random(30 + end, case, 2) as usize).into_iter().for_each(|rank| kill(["KILL", "SEGV"][case as usize % 2], rank));
        }
        let ran = CommandOutput::new(run.wait_with_output().expect("the end"));
        assert_eq!(ran.code, Some(0), "case {case}: {}", ran.stderr);
        let count = ran.stderr.matches("going on from ").count();
        assert_eq!(ran.stderr.matches(" are lost").count(), count, "{}", ran.stderr);
        restarts += count;
        whole.is("w", "s");
        assert!(losses(&whole.dir, "m").iter().all(|line| whole.losses.contains(line)), "case {case}");
        assert_eq!(fs::read_dir(whole.dir.path("ck")).expect("a directory").count(), 1, "case {case}");
        whole.forget(&["w", "s", "m"]);
        fs::remove_dir_all(whole.dir.path("ck")).expect("removed");
    }
    println!("killed ranks: {restarts} restarts in {} runs, {} of {} ends in a save", cases().count(), ends.in_saves, ends.all);
    assert!(restarts > 0 || cases().count() < 20, "nothing was killed in time");
}

#[test]
fn a_run_that_a_signal_ends_goes_on_as_if_nothing_had_happened() {
    let whole = UninterruptedRun::new();
    let (mut early, mut done, mut unheard) = (0, 0, 0);
    for case in cases() {
        let run = whole.start("--save-weights w --save-state s --metrics m");
        std::thread::sleep(Duration::from_micros(random(1, case, whole.took.as_micros() as u64)));
        let signal = ["TERM", "INT", "HUP", "USR1"][case as usize % 4];
        let target = if random(2, case, 2) == 0 { run.id().to_string() } else { format!("-{}", run.id()) };
        kill(signal, &target);
        let ran = CommandOutput::new(run.wait_with_output().expect("the end"));
        let said = format!("case {case}, {signal} to {target}: {:?}\n{}{}", ran.code, ran.stdout, ran.stderr);
        match ran.code {
            Some(0) => {
                whole.is("w", "s");
                done += 1;
            }
            Some(75) => {
                assert!(ran.stderr.contains("ended early, after step"), "{said}");
                let steps = losses(&whole.dir, "m").len();
                let ran = whole.dir.line(&format!("{RUN} --resume s --save-state s --save-weights w --force --metrics m"));
                assert_eq!(ran.code, Some(0), "{said}{}", ran.stderr);
                assert!(losses(&whole.dir, "m") == whole.losses, "{said}: {steps} steps, then others");
                whole.is("w", "s");
                early += 1;
            }
            // The signal came before mcc listened for it, so nothing was done.
            None => {
                assert!(ran.stdout.is_empty() && !whole.dir.path("w").exists() && !whole.dir.path("s").exists(), "{said}");
                unheard += 1;
            }
            Some(_) => panic!("{said}"),
        }
        whole.forget(&["w", "s", "m"]);
        let left: Vec<String> = whole.dir.entries().into_iter().filter(|n| n.starts_with('.')).collect();
        assert_eq!(left, Vec::<String>::new(), "{said}");
    }
    println!("signals: {early} ended early, {done} were done, {unheard} had not begun");
}

#[test]
fn a_run_ends_early_as_its_flags_say_and_goes_on_in_pieces() {
    let whole = UninterruptedRun::new();
    let run = |flags: &str| whole.dir.line(&format!("{RUN} --save-weights w --save-state s --metrics m {flags}"));
    for (k, resume) in ["", "--force --resume s", "--force --resume s"].into_iter().enumerate() {
        let ran = run(&format!("--exit-interval 25 {resume}"));
        let end = [25, 50, STEPS][k];
        assert_eq!(ran.code, Some(if end < STEPS { 75 } else { 0 }), "{}", ran.stderr);
        assert_eq!(ran.stderr.contains(&format!("ended early, after step {end}")), end < STEPS, "{}", ran.stderr);
        assert_eq!(losses(&whole.dir, "m"), whole.losses[..end as usize]);
    }
    whole.is("w", "s");
    whole.forget(&["w", "s", "m"]);
    let ran = run("--exit-duration-in-mins 1e-5");
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    let ran = run("--force --resume s --exit-duration 60");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    whole.is("w", "s");
}

#[test]
fn a_run_whose_reader_leaves_saves() {
    let whole = UninterruptedRun::new();
    for case in cases() {
        let mut run = whole.start("--save-weights w --save-state s --log-interval 1");
        let lines = BufReader::new(run.stdout.take().expect("a pipe")).lines();
        let wanted = random(3, case, STEPS) as usize;
        assert_eq!(lines.take(wanted).filter(Result::is_ok).count(), wanted);
        let ran = CommandOutput::new(run.wait_with_output().expect("the end")).succeeds();
        assert_eq!(ran.stderr.matches("warning:").count(), 1, "{}", ran.stderr);
        whole.is("w", "s");
        whole.forget(&["w", "s"]);
    }
}

/// Words before a command by which it has mounts of its own.
fn mounts() -> Option<&'static [&'static str]> {
    let ways: [&[&str]; 2] = [&["unshare", "--mount"], &["unshare", "--mount", "--map-root-user"]];
    ways.into_iter().find(|way| Command::new(way[0]).args(&way[1..]).arg("true").stderr(Stdio::null()).status().is_ok_and(|s| s.success()))
}

/// Fills the disk after a while, and brings what was saved back from it.
const FULL: &str = r#"
    mount -t tmpfs -o size=$SIZE tmpfs disk || exit 99
    "$@" & run=$!
    sleep $AFTER
    cat /dev/zero > disk/other 2>/dev/null
    wait $run; code=$?
    for file in w s m; do [ ! -e disk/$file ] || cp disk/$file $file || exit 98; done
    exit $code
"#;

#[test]
fn a_run_whose_disk_gets_full_saves() {
    let Some(way) = mounts() else {
        eprintln!("no mounts of one's own here: disks that get full are not tried, limits on the size of files are");
        return;
    };
    let whole = UninterruptedRun::new();
    fs::create_dir(whole.dir.path("disk")).expect("created");
    let mut short = 0;
    for case in cases() {
        let words: Vec<&str> = way.iter().copied().chain(["sh", "-c", FULL, "sh"]).collect();
        let mut script = whole.dir.within(&words, &format!("{RUN} --save-weights disk/w --save-state disk/s --metrics disk/m"));
        // The disk has room for both files and, at times, for some of the metrics.
        let size = (whole.weights.len() + whole.state.len()).next_multiple_of(4096) as u64 + 4096 * (1 + random(4, case, 8));
        let after = random(5, case, whole.took.as_micros() as u64);
        script.env("SIZE", size.to_string()).env("AFTER", format!("{}.{:06}", after / 1_000_000, after % 1_000_000));
        let ran = CommandOutput::new(script.output().expect("it starts"));
        let said = format!("case {case}: {:?}\n{}{}", ran.code, ran.stdout, ran.stderr);
        if ran.code == Some(1) {
            // The disk was full before the run could reserve space.
            assert!(ran.stderr.contains("`disk/") && ran.stderr.contains("bytes are free there. Nothing was trained"), "{said}");
            assert!(!whole.dir.path("w").exists() && !whole.dir.path("s").exists(), "{said}");
        } else {
            assert_eq!(ran.code, Some(0), "{said}");
            whole.is("w", "s");
            let lines = losses(&whole.dir, "m");
            assert!(lines == whole.losses[..lines.len()], "{said}");
            let warnings = ran.stderr.matches("warning: cannot write `disk/m`").count();
            assert_eq!(warnings, usize::from(lines.len() < whole.losses.len()), "{said}");
            short += u64::from(warnings > 0);
        }
        whole.forget(&["w", "s", "m"]);
    }
    println!("full disks: {short} runs had fewer metrics");
}

#[test]
fn space_for_a_save_is_there_before_a_run_begins() {
    let whole = UninterruptedRun::new();
    let bytes = whole.state.len();
    whole.dir.write("s", "the former state");
    // bash's ulimit counts blocks of 1,024 bytes. The weights are within `room`, and so are the kernels, which ranks
    // copy to memory that counts as a file. The state is not.
    let limited = |blocks: usize, steps: u64, flags: &str| {
        let limit = format!("ulimit -f {blocks}; exec \"$@\"");
        let mut bash = whole.dir.within(&["bash", "-c", &limit, "bash"], &RUN.replace("--steps 60", &format!("--steps {steps} {flags}")));
        CommandOutput::new(bash.output().expect("bash starts"))
    };
    let kernels = fs::metadata(whole.dir.path("out.mcc/kernels.so")).expect("kernels").len() as usize;
    let room = whole.weights.len().max(kernels).div_ceil(1024);
    assert!(room * 1024 < bytes, "kernels of {kernels} bytes leave nothing to test");
    let ran = limited(room, STEPS, "--force --save-weights w --save-state s --metrics m");
    let ran = ran.fails_with(&[&format!("`s` takes {bytes} bytes, which cannot be reserved: File too large"), "Nothing was trained"]);
    assert!(!ran.stderr.contains("/proc") && ran.stdout.is_empty(), "{}{}", ran.stdout, ran.stderr);
    assert_eq!(fs::read(whole.dir.path("s")).expect("still there"), b"the former state");
    assert!(!whole.dir.path("w").exists() && !whole.dir.path("m").exists());
    limited(kernels / 2048, STEPS, "--save-weights w").fails_with(&[
        &format!("`out.mcc/kernels.so`: it takes {kernels} bytes of memory that count as a file"),
        &format!("files may have {} here: `ulimit -f unlimited` lifts that limit", kernels / 2048 * 1024),
    ]);
    // Metrics beyond the limit end no run.
    let ran = limited(room, STEPS, "--save-weights w --metrics m").succeeds();
    assert!(losses(&whole.dir, "m") == whole.losses, "{}", ran.stderr);
    whole.dir.write("m", format!("{{\"step\":0,\"note\":\"{}\"}}\n", "x".repeat(room * 1024 - 320)));
    let ran = limited(room, STEPS + 3, "--resume whole-state --save-weights w --force --metrics m").succeeds();
    assert_eq!(ran.stderr.matches("warning: cannot write `m`: File too large").count(), 1, "{}", ran.stderr);
    let text = fs::read_to_string(whole.dir.path("m")).expect("metrics");
    assert!(text.ends_with("}\n") && text.lines().count() < 4, "{text}");
}

#[test]
fn what_exists_is_replaced_by_force_alone() {
    let whole = UninterruptedRun::new();
    for name in ["w", "s", "m", "t"] {
        whole.dir.write(name, "mine");
        let flag = match name {
            "w" => "--save-weights w",
            "s" => "--save-state s",
            "m" => "--metrics m",
            _ => "--profile --trace t",
        };
        let ran = whole.dir.line(&format!("{RUN} {flag}")).fails_with(&[&format!("`{name}` exists: --force replaces it")]);
        assert!(ran.stdout.is_empty(), "{}", ran.stdout);
        assert_eq!(fs::read(whole.dir.path(name)).expect("still there"), b"mine");
        whole.dir.line(&format!("{RUN} {flag} --force")).succeeds();
        assert_ne!(fs::read(whole.dir.path(name)).expect("new"), b"mine");
        whole.forget(&[name]);
    }
    // A run may replace the state that it goes on from, and it appends to its metrics.
    let half = RUN.replace("--steps 60", "--steps 25");
    whole.dir.line(&format!("{half} --save-state s --metrics m --quiet")).succeeds();
    whole.dir.line(&format!("{RUN} --resume s --save-state s --metrics m --save-weights w")).succeeds();
    // The first steps have the schedule of 25 steps, so their losses are not compared.
    assert_eq!(losses(&whole.dir, "m").len() as u64, STEPS);
    // An empty file may be replaced, as it holds nothing that could be lost.
    whole.dir.write("empty", "");
    whole.dir.line(&format!("{RUN} --save-weights empty")).succeeds();
}

#[test]
fn ctrl_c_twice_ends_a_run_at_once() {
    let whole = UninterruptedRun::new();
    // The evaluation of the second step takes minutes.
    whole.dir.write("long.txt", "The quick brown fox jumps over the lazy dog. ".repeat(100_000));
    let mut run = whole.start("--save-weights w --valid-data long.txt --eval-interval 2 --eval-iters 1000000000");
    let mut lines = BufReader::new(run.stdout.take().expect("a pipe")).lines();
    assert!(lines.next().expect("a line").expect("read").starts_with("step      1/"));
    let mut said = BufReader::new(run.stderr.take().expect("a pipe")).lines();
    for word in ["a second SIGINT ends it at once", "the run ends at once"] {
        kill("INT", &format!("-{}", run.id()));
        let line = said.next().expect("a line").expect("read");
        assert!(line.contains(word), "{line}");
    }
    assert_eq!(run.wait().expect("the end").code(), Some(130));
    assert!(!whole.dir.path("w").exists());
}

#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let whole = UninterruptedRun::new();
    let mut shell = whole.dir.within(&["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"], &format!("{RUN} --save-weights w --log-interval 1"));
    shell.stdout(Stdio::piped());
    let mut run = shell.spawn().expect("sh starts");
    let mut lines = BufReader::new(run.stdout.take().expect("a pipe")).lines();
    assert!(lines.next().is_some());
    kill("HUP", &run.id().to_string());
    assert_eq!(lines.filter(|l| l.as_ref().is_ok_and(|l| l.starts_with("step"))).count() as u64, STEPS - 1);
    assert!(run.wait().expect("the end").success());
}
