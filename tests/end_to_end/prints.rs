//! Standard output without a reader, and one that is full: no command panics, and no run is lost.

use crate::mcc::{Dir, Ran};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const TINY: &str = "-D vocab=256 -D hidden=16 -D heads=4 -D layers=1 -D seq=8";

fn gpt2() -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.line(&format!("compile {{models}}/gpt2.mdl {TINY} -o out.mcc")).succeeds();
    dir
}

/// Commands that print what they were asked for. `{models}` stands for the models of this repository.
const PRINTING: [&str; 7] = [
    "check {models}/gpt2.mdl",
    "compile {models}/mlp.mdl -D features=4 -D hidden=4 -D classes=3 -o mlp.mcc",
    "dump out.mcc",
    "dump out.mcc --level graph",
    "explain out.mcc",
    "explain out.mcc --json",
    "import hf {models}/../tests/cases/llama -o imported",
];

fn command(dir: &Dir, line: &str) -> Command {
    let models = crate::mcc::models().display().to_string();
    dir.command(line.split_whitespace().map(|w| w.replace("{models}", &models)))
}

/// Standard output is a pipe whose reader leaves after so many lines.
fn read_lines(mut command: Command, lines: usize) -> Ran {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    assert_eq!(out.lines().take(lines).filter(Result::is_ok).count(), lines);
    Ran::new(child.wait_with_output().expect("the end"))
}

fn full(mut command: Command) -> Ran {
    let full = File::options().write(true).open("/dev/full").expect("a full device");
    Ran::new(command.stdout(full).stderr(Stdio::piped()).output().expect("mcc starts"))
}

#[test]
fn a_command_whose_reader_leaves_ends_quietly() {
    let dir = gpt2();
    for line in PRINTING {
        let ran = read_lines(command(&dir, line), 0).succeeds();
        assert_eq!(ran.stderr, "", "{line}");
    }
}

#[test]
fn a_command_that_cannot_print_says_so() {
    let dir = gpt2();
    for line in PRINTING {
        let ran = full(command(&dir, line)).fails_with(&["error: cannot write to standard output: No space left on device"]);
        assert_eq!(ran.stderr.lines().count(), 1, "{line}: {}", ran.stderr);
    }
}

#[test]
fn a_run_that_cannot_print_says_so_once_and_saves() {
    let dir = gpt2();
    let run = |name: &str| command(&dir, &format!("run out.mcc --data text.txt --steps 5 --profile --profile-steps 1 --save {name}.safetensors"));
    let ran = read_lines(run("left"), 1).succeeds();
    assert_eq!(ran.stderr.matches("the reader of standard output is gone").count(), 1, "{}", ran.stderr);
    let ran = full(run("full")).succeeds();
    assert_eq!(ran.stderr.matches("cannot write to standard output: No space left on device").count(), 1, "{}", ran.stderr);
    let mut silent = run("silent");
    let (out, err) = (File::options().write(true).open("/dev/full").expect("full"), File::options().write(true).open("/dev/full").expect("full"));
    assert!(silent.stdout(out).stderr(err).status().expect("mcc starts").success());
    let bytes = |name: &str| std::fs::read(dir.path(&format!("{name}.safetensors"))).expect("saved");
    assert!(bytes("left") == bytes("full") && bytes("full") == bytes("silent"));
}
