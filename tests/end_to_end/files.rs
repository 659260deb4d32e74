//! The files of `passes/tests/files/PASS`: a small input, the command that is run on it, and what has to come out.
//!
//! A line `RUN: mcc ..` is the command, for a shell; `%s` is the file, `%S` its folder, and `not mcc ..` has to
//! fail, and is held to its errors. Directives are those of [`filecheck`]: `check: TEXT` is in a line further down,
//! `nextln: TEXT` in the line after that. `UPDATE_EXPECT=1` writes the `nextln:` lines after a `check:` anew, where
//! there are some: all lines of the output that are indented deeper than the one of the `check:`, or, after `check:
//! module`, all.

use crate::mcc::{CommandOutput, Dir};
use filecheck::{CheckerBuilder, NO_VARIABLES};
use passes::table::PASSES;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("passes/tests/files")
}

/// The files of a folder with what is in them.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().map(|e| e.expect("an entry").path()).collect();
    found.sort();
    found
}

/// What stands after a word in a comment of either kind.
fn after<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let comment = line.strip_prefix(';').or_else(|| line.strip_prefix("//"))?;
    comment.trim_start().strip_prefix(word)
}

/// What the file's command prints: its output, or the errors of one that has to fail.
fn output(path: &Path, text: &str) -> Result<String, String> {
    let line = text.lines().find_map(|l| after(l, "RUN:")).ok_or("no line `RUN: mcc ..`")?.trim();
    let (fails, line) = line.strip_prefix("not ").map_or((false, line), |l| (true, l));
    let folder = path.parent().expect("a file has a folder").display().to_string();
    let command = line.replace("%s", &path.display().to_string()).replace("%S", &folder).replace("mcc ", &format!("{} ", env!("CARGO_BIN_EXE_mcc")));
    // The command runs in a temporary directory, which is removed with whatever a bug leaves.
    let dir = Dir::new();
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &command]).current_dir(dir.path(""));
    let ran = CommandOutput::new(shell.output().map_err(|e| e.to_string())?);
    match (fails, ran.code) {
        // Passes leave the text that follows the graphs alone, so it is not compared.
        (false, Some(0)) => Ok(ran.stdout.split("text of training:\n").next().unwrap_or_default().into()),
        (true, Some(1 | 2)) => Ok(ran.stderr.replace(&path.display().to_string(), "%s")),
        _ => Err(format!("`{line}` ended with {:?}\n{}", ran.code, ran.stderr)),
    }
}

/// The file with the lines after each `check:` that has some as they are now: what lies deeper than the line found,
/// or else as many lines as there were.
fn blessed(text: &str, output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let depth = |l: &str| l.len() - l.trim_start().len();
    let (mut at, mut out) = (0, String::new());
    let mut rest = text.lines().peekable();
    while let Some(line) = rest.next() {
        out += &format!("{line}\n");
        let Some(anchor) = after(line, "check:").map(str::trim) else { continue };
        at += lines[at..].iter().position(|l| l.contains(anchor)).map_or(0, |k| k + 1);
        let old = std::iter::from_fn(|| rest.next_if(|next| after(next, "nextln:").is_some())).count();
        if old == 0 {
            continue;
        }
        let own = lines.get(at.wrapping_sub(1)).map_or(0, |l| depth(l));
        let deeper = lines[at..].iter().take_while(|l| anchor == "module" || depth(l) > own).count();
        let new = if deeper == 0 { old } else { deeper };
        let sign = if line.starts_with(';') { ";" } else { "//" };
        lines[at..].iter().take(new).for_each(|l| out += &format!("{sign} nextln: {l}\n"));
    }
    out
}

fn check(path: &Path) -> Result<(), String> {
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    let output = output(path, &text)?;
    let text = if std::env::var_os("UPDATE_EXPECT").is_some() {
        let text = blessed(&text, &output);
        fs::write(path, &text).map_err(|e| e.to_string())?;
        text
    } else {
        text
    };
    let mut builder = CheckerBuilder::new();
    for line in text.lines().filter(|l| l.starts_with(';') || l.starts_with("//")) {
        builder.directive(line).map_err(|e| e.to_string())?;
    }
    let checker = builder.finish();
    if checker.is_empty() {
        return Err("nothing is checked".into());
    }
    match checker.explain(&output, NO_VARIABLES).map_err(|e| e.to_string())? {
        (true, _) => Ok(()),
        (false, why) => Err(format!("{why}\n`UPDATE_EXPECT=1` renews what follows each `check:`")),
    }
}

#[test]
fn passes_do_what_their_files_say() {
    let all: Vec<PathBuf> = files(&root()).iter().flat_map(|folder| files(folder)).collect();
    let held = |path: &PathBuf| check(path).err().map(|why| format!("{}: {why}", path.display()));
    // Each check waits for a command, so a few run at a time.
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            all.chunks(all.len().div_ceil(4)).map(|part| scope.spawn(move || part.iter().filter_map(held).collect::<Vec<_>>())).collect();
        threads.into_iter().flat_map(|t| t.join().expect("a thread ends")).collect()
    });
    assert!(wrong.is_empty(), "{} files:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_pass_has_five_files() {
    let few = PASSES.iter().map(|p| p.name).filter(|name| files(&root().join(name)).len() < 5);
    assert_eq!(few.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn files_that_expect_something_else_are_found() {
    let text = "; RUN: mcc opt --passes simplify %s\nmodule\n; check: module\n; nextln: old\n; check: dims:\n";
    let output = "module\ntraining:\n  deep\ndims:\n  dim a = 4\n";
    let new = blessed(text, output);
    assert_eq!(new.lines().filter(|l| l.starts_with("; nextln:")).count(), 4, "{new}");
    let beside = blessed("; check: %1 =\n; nextln: %2 = neg %0\n; check: %4 =\n", "  %1 = exp %0\n  %2 = neg %1\n  %3 = neg %2\n  %4 = neg %3\n");
    assert_eq!(beside, "; check: %1 =\n; nextln:   %2 = neg %1\n; check: %4 =\n");
    let dir = Dir::new();
    for (name, text) in [("none.mir", "module\n"), ("unchecked.mir", "; RUN: mcc opt --verify %s\nmodule\n")] {
        dir.write(name, text);
        assert!(check(&dir.path(name)).is_err(), "{name}");
    }
    dir.write("wrong.mir", "; RUN: mcc opt --verify %s\nmodule\n; check: sharded: holds\n");
    assert!(check(&dir.path("wrong.mir")).is_err_and(|e| e.contains("sharded: holds")));
    dir.write("right.mir", "; RUN: mcc opt --verify %s\nmodule\n; check: graph: holds\n");
    assert_eq!(check(&dir.path("right.mir")), Ok(()));
}
