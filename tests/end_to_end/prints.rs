//! Standard output without a reader, and one that is full: no command panics, and no run is lost.

use crate::mcc::{CommandOutput, Dir};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const TINY: &str = "-D vocab=256 -D hidden=16 -D heads=4 -D layers=1 -D seq=8 --lr-warmup-iters 0";

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
fn read_lines(mut command: Command, lines: usize) -> CommandOutput {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    assert_eq!(out.lines().take(lines).filter(Result::is_ok).count(), lines);
    CommandOutput::new(child.wait_with_output().expect("the end"))
}

fn full(mut command: Command) -> CommandOutput {
    let full = File::options().write(true).open("/dev/full").expect("a full device");
    CommandOutput::new(command.stdout(full).stderr(Stdio::piped()).output().expect("mcc starts"))
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
    let (writing, asked): (Vec<&str>, Vec<&str>) = PRINTING.iter().partition(|line| line.contains(" -o "));
    for line in asked {
        let ran = full(command(&dir, line)).fails_with(&["error: cannot write to standard output: No space left on device"]);
        assert_eq!(ran.stderr.lines().count(), 1, "{line}: {}", ran.stderr);
    }
    // The files are written, which is worth more than the report of it.
    for line in writing {
        let ran = full(command(&dir, line)).succeeds();
        let said = "warning: cannot write to standard output: No space left on device (os error 28); what was to be written is written";
        assert_eq!(ran.stderr.lines().filter(|l| l.contains("standard output")).collect::<Vec<_>>(), [said], "{line}");
    }
}

#[test]
fn a_run_that_cannot_print_says_so_once_and_saves() {
    let dir = gpt2();
    let run =
        |name: &str| command(&dir, &format!("run out.mcc --data text.txt --steps 5 --profile --profile-steps 1 --save-weights {name}.safetensors"));
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

/// The steps that have lines.
fn steps(text: &str) -> Vec<u64> {
    let number = |l: &str| l.strip_prefix("step")?.split('/').next()?.trim().parse().ok();
    text.lines().filter_map(number).collect()
}

#[test]
fn a_run_prints_as_much_as_is_asked_for() {
    let dir = gpt2();
    let run = |flags: &str| dir.line(&format!("run out.mcc --data text.txt --steps 25 --force --save-weights w.safetensors {flags}")).succeeds();
    let usual = run("");
    assert_eq!(steps(&usual.stdout), [1, 10, 20, 25]);
    assert!(usual.stdout.ends_with("saved w.safetensors\n") && usual.stderr.is_empty(), "{}{}", usual.stdout, usual.stderr);
    assert_eq!(steps(&run("--log-interval 7").stdout), [1, 7, 14, 21, 25]);
    let quiet = run("-q");
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let verbose = run("-v --threads-per-rank 3").stdout;
    for part in ["out.mcc: gpt2, ", "text.txt", "rank 0: cpu, 3 threads"] {
        assert!(verbose.contains(part), "no `{part}` in {verbose}");
    }
    dir.line("run out.mcc --data text.txt -q -v").refused();
}

/// What a command shows on a terminal.
fn on_terminal(command: &Command, variables: &[(&str, &str)]) -> String {
    let words: Vec<&str> = [command.get_program()].into_iter().chain(command.get_args()).map(|w| w.to_str().expect("UTF-8")).collect();
    let mut script = Command::new("script");
    script.args(["--quiet", "--command", &words.join(" "), "/dev/null"]).current_dir(command.get_current_dir().expect("a directory"));
    script.envs(command.get_envs().filter_map(|(k, v)| Some((k, v?)))).env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied());
    String::from_utf8(script.stdin(Stdio::null()).output().expect("script starts").stdout).expect("UTF-8")
}

#[test]
fn escape_codes_are_for_terminals_that_want_them() {
    let dir = gpt2();
    dir.write("wrong.mdl", "model m(batch, hidden = 8) {\n  input x: f32[batch, hidden];\n  loss sum(y);\n}\n");
    for (line, shows) in [("check wrong.mdl", "nothing is called `y` here"), ("run out.mcc --data text.txt --steps 3", "loss")] {
        let command = command(&dir, line);
        let coloured = on_terminal(&command, &[]);
        assert!(coloured.contains('\u{1b}') && coloured.contains(shows), "{line}: {coloured:?}");
        for variable in [("NO_COLOR", "1"), ("TERM", "dumb")] {
            let plain = on_terminal(&command, &[variable]);
            assert!(!plain.contains('\u{1b}') && plain.contains(shows), "{line}: {plain:?}");
        }
    }
}
