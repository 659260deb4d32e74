//! What a command reads and writes: pipes, links to open files, limits on files, and outputs that are inputs.

use crate::mcc::{CommandOutput, Dir, models};
use std::fs;
use std::process::{Command, Stdio};

const GPT2: &str = "compile {models}/gpt2.mdl -D vocab=256 -D hidden=8 -D heads=4 -D layers=1 -D seq=4 --lr-warmup-iters 0";
const RUN: &str = "run out.mcc --data text.txt --steps 2";

fn gpt2() -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(10));
    dir.line(&format!("{GPT2} -o out.mcc")).succeeds();
    dir
}

fn shell(dir: &Dir, script: &str, line: &str) -> CommandOutput {
    CommandOutput::new(dir.within(&["bash", "-c", script, "bash"], line).stdin(Stdio::null()).output().expect("bash starts"))
}

fn pipe(dir: &Dir, name: &str) {
    assert!(Command::new("mkfifo").arg(dir.path(name)).status().expect("mkfifo starts").success());
}

#[test]
fn what_ranks_cannot_open_by_themselves_is_refused() {
    let dir = gpt2();
    pipe(&dir, "pipe");
    let cases = [
        ("exec \"$@\" --data /dev/stdin < text.txt", "`/dev/stdin`: it is a link to what this process alone has open"),
        ("cat text.txt | \"$@\" --data /dev/stdin", "`/dev/stdin`: it is a pipe"),
        ("exec \"$@\" --data /dev/fd/5 5< text.txt", "`/dev/fd/5`: it is a link to what"),
        ("\"$@\" --data <(cat text.txt)", "it is a pipe, and every rank reads the file by itself"),
        ("\"$@\" --data pipe", "`pipe`: it is a pipe"),
    ];
    for (script, says) in cases {
        shell(&dir, script, "run out.mcc --steps 1").fails_with(&[says, "write it to a file first"]);
    }
    dir.line(&format!("{RUN} --trust pipe")).fails_with(&["`pipe` is a pipe: keys and signatures are read from files"]);
    dir.line(&format!("{RUN} --metrics pipe")).fails_with(&["`pipe`: it is a pipe that nobody reads: start its reader first"]);
    dir.line(&format!("{RUN} --profile --trace pipe")).fails_with(&["`pipe`", "it is a pipe that nobody reads"]);
    // A pipe with a reader and devices work as files of metrics.
    let ran = shell(&dir, "cat pipe > got & \"$@\" --metrics pipe; wait", RUN).succeeds();
    assert_eq!(fs::read_to_string(dir.path("got")).expect("metrics").lines().count(), 2, "{}", ran.stderr);
    dir.line(&format!("{RUN} --metrics /dev/null")).succeeds();
    assert!(dir.line(&format!("{RUN} --quiet --metrics /dev/stdout")).succeeds().stdout.starts_with("{\"step\":1,"));
}

#[test]
fn outputs_that_are_inputs_are_refused() {
    let dir = gpt2();
    dir.line(&format!("{RUN} --save-weights w --save-state s")).succeeds();
    fs::hard_link(dir.path("text.txt"), dir.path("hard.txt")).expect("linked");
    std::os::unix::fs::symlink("w", dir.path("soft")).expect("linked");
    let cases = [
        ("--metrics text.txt", "`--metrics text.txt` would destroy what `--data` names"),
        ("--metrics hard.txt", "`--metrics hard.txt` would destroy what `--data` names"),
        ("--save-weights text.txt", "`--save-weights text.txt` would destroy what `--data` names"),
        ("--init w --metrics soft", "`--metrics soft` would destroy what `--init` names"),
        ("--save-weights new --metrics ./new", "`--metrics ./new` would destroy what `--save-weights` names"),
        ("--resume s --profile --trace s", "`--trace s` would destroy what `--resume` names"),
        ("--metrics out.mcc/manifest.json", "is in the artifact, which would be damaged by it"),
    ];
    let before = fs::read(dir.path("text.txt")).expect("a text");
    for (flags, says) in cases {
        dir.line(&format!("{RUN} --force {flags}")).misuses_with(&[says, "name a"]);
    }
    assert!(fs::read(dir.path("text.txt")).expect("still there") == before && !dir.path("new").exists());
    // A resumed run appends to metrics alone.
    dir.write("prose", "My notes.\n");
    dir.line("run out.mcc --data text.txt --steps 4 --resume s --metrics prose --force").fails_with(&["`prose` holds something else than metrics"]);
    assert_eq!(fs::read(dir.path("prose")).expect("still there"), b"My notes.\n");
    // The files that a run begins with may be replaced when it has ended.
    dir.line("run out.mcc --data text.txt --steps 4 --resume s --save-state s").succeeds();
    dir.line(&format!("{RUN} --init w --save-weights w --force")).succeeds();
}

#[test]
fn imports_and_exports_replace_nothing_unless_told() {
    let dir = gpt2();
    dir.line(&format!("{RUN} --save-weights w")).succeeds();
    fs::create_dir(dir.path("hf")).expect("made");
    dir.write("hf/config.json", "mine");
    dir.line("export hf w -o hf").fails_with(&["`hf/config.json` exists: --force replaces it"]);
    assert_eq!(fs::read(dir.path("hf/config.json")).expect("still there"), b"mine");
    dir.line("export hf w -o hf --force").succeeds();
    dir.line("import hf hf -o in").succeeds();
    dir.line("import hf hf -o in").fails_with(&["`in/model.mdl` exists: --force replaces it"]);
    dir.line("import hf hf -o in --force").succeeds();
}

#[test]
fn exports_of_checkpoints_have_the_config_that_lies_in_them_or_beside_them() {
    let dir = gpt2();
    dir.line(&format!("{RUN} --save saved --save-state state")).succeeds();
    // The config beside the output is another model's.
    dir.write("config.json", "none of this model");
    let step = fs::read_dir(dir.path("saved"))
        .expect("saved")
        .find_map(|e| Some(e.ok()?.file_name().into_string().ok()?).filter(|n| n.starts_with("step-")));
    let step = format!("saved/{}", step.expect("a checkpoint"));
    dir.line(&format!("export hf {step} -o plain")).succeeds();
    let config = fs::read_to_string(dir.path("plain/config.json")).expect("a config");
    for (n, place) in ["saved", &step].into_iter().enumerate() {
        let own = config.replacen('{', &format!("{{\"_name_or_path\": \"{n}\", "), 1);
        dir.write(&format!("{place}/config.json"), &own);
        dir.line(&format!("export hf {step} -o out{n}")).succeeds();
        assert_eq!(fs::read_to_string(dir.path(&format!("out{n}/config.json"))).expect("a config"), own);
    }
    fs::rename(dir.path("state"), dir.path("saved/state")).expect("moved");
    dir.line("export hf saved/state -o of_state").succeeds();
    assert_eq!(fs::read(dir.path("of_state/config.json")).expect("a config"), fs::read(dir.path("saved/config.json")).expect("a config"));
}

#[test]
fn a_limit_on_files_is_an_error_that_leaves_nothing() {
    let dir = gpt2();
    dir.line(&format!("{RUN} --save-weights w")).succeeds();
    dir.line("export hf w -o hf").succeeds();
    dir.write("long.mdl", format!("//{}\n{}", "x".repeat(3000), fs::read_to_string(models().join("mlp.mdl")).expect("a model").replace("  ", "")));
    let before = dir.entries();
    let lines = [format!("{GPT2} -o new.mcc"), "export hf w -o back".into(), "import hf hf -o in".into(), "fmt long.mdl".into()];
    for line in &lines {
        let ran = shell(&dir, "ulimit -f 1; exec \"$@\"", line).fails_with(&["File too large"]);
        assert!(!ran.stderr.contains(".tmp") && !ran.stderr.contains("/."), "{}", ran.stderr);
        assert_eq!(dir.entries(), before, "{line}");
    }
}
