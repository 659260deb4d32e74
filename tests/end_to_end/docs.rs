//! The commands in the documentation run: every fenced block marked `console`, in a directory of its own (or in that
//! of the block before, if marked `console continued`), with `models/`, a Hugging Face model of Llama's architecture
//! as `Llama-3.2-1B`, a launch script `train.sh`, a `corpus.txt`, and prompts with answers, `answers.jsonl`.
//!
//! A block holds one command a line. Those of `mcc` are run; `make`, `cd` and other tools are the reader's. A block
//! marked `output` behind it shows lines of the last command's output in their order; a line `..` stands for others.
//! A picture that a command writes with `> NAME.svg` is `docs/images/NAME.svg` (`UPDATE_EXPECT=1` writes it).

use crate::mcc::{Dir, models};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A `console` block's commands, and the lines of the `output` block that follows it.
struct Example {
    /// Whether it goes on in the directory of the one before.
    continued: bool,
    commands: Vec<String>,
    output: Vec<String>,
}

/// All `console` blocks.
fn blocks(text: &str) -> Vec<Example> {
    let mut out: Vec<Example> = vec![];
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let fence = line.trim_start();
        if !fence.starts_with("```") {
            continue;
        }
        let block: Vec<String> = lines.by_ref().take_while(|l| !l.trim_start().starts_with("```")).map(String::from).collect();
        match fence {
            "```console" | "```console continued" => {
                out.push(Example { continued: fence.ends_with("continued"), commands: joined(&block), output: vec![] });
            }
            "```output" => out.last_mut().expect("a block of commands before").output = block,
            _ => {}
        }
    }
    out
}

/// Joins lines that end in a backslash; drops prompts, comments and empty lines.
fn joined(block: &[String]) -> Vec<String> {
    let text = block.join("\n").replace("\\\n", " ");
    let commands = text.lines().map(|l| l.trim().trim_start_matches("$ ").split(" #").next().unwrap_or("").trim().to_string());
    commands.filter(|l| !l.is_empty() && !l.starts_with('#')).collect()
}

fn documents() -> Vec<std::path::PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).expect("a folder").map(|e| e.expect("an entry").path());
        entries.filter(|p| p.extension().is_some_and(|e| e == "md")).collect::<Vec<_>>()
    };
    let mut found = [pages("docs"), pages("docs/guides")].concat();
    found.push(root.join("README.md"));
    found.sort();
    found
}

/// A directory in which an example runs.
fn prepared() -> Dir {
    let dir = Dir::new();
    symlink(models(), dir.path("models")).expect("linked");
    symlink(models().with_file_name("tests/cases/llama"), dir.path("Llama-3.2-1B")).expect("linked");
    symlink(models().with_file_name("tests/megatron/train.sh"), dir.path("train.sh")).expect("linked");
    dir.write("corpus.txt", "The quick brown fox jumps over the lazy dog. ".repeat(100));
    let answer = |n| format!("{{\"prompt\": \"Count to {n}: \", \"completion\": \"{:?}\"}}\n", (1..=n).collect::<Vec<u32>>());
    dir.write("answers.jsonl", (1..40).map(answer).collect::<String>());
    dir
}

#[test]
fn commands_in_the_documentation_run() {
    let mut ran = 0;
    for document in documents() {
        let mut dir = Dir::new();
        for block in blocks(&fs::read_to_string(&document).expect("UTF-8")) {
            if !block.continued {
                dir = prepared();
            }
            let mut last = String::new();
            for command in block.commands {
                let Some(arguments) = command.strip_prefix("mcc ").or_else(|| command.strip_prefix("target/release/mcc ")) else { continue };
                let (arguments, picture) =
                    arguments.split_once(" > ").filter(|(_, p)| p.ends_with(".svg")).map_or((arguments, None), |(a, p)| (a, Some(p)));
                // Quotes keep a shell from reading patterns.
                let done = dir.line(&arguments.replace('\'', ""));
                if let Some(name) = picture {
                    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/images").join(name);
                    if std::env::var_os("UPDATE_EXPECT").is_some() {
                        fs::write(&path, &done.stdout).expect("written");
                    }
                    assert!(fs::read_to_string(&path).is_ok_and(|p| p == done.stdout), "docs/images/{name} is not what `{command}` draws");
                }
                assert_eq!(done.code, Some(0), "{}: `{command}`\n{}{}", document.display(), done.stdout, done.stderr);
                // An example with such a warning is a bad one: its loss does not fall, or one of its flags does
                // nothing.
                assert!(!done.stderr.contains("warning[W07"), "{}: `{command}`\n{}", document.display(), done.stderr);
                ran += 1;
                last = done.stdout;
            }
            let mut lines = last.lines();
            for shown in block.output.iter().filter(|l| *l != "..") {
                assert!(lines.any(|l| l == shown), "{}: no output has this line, in this order: {shown}", document.display());
            }
        }
    }
    assert!(ran > 0, "no block is marked `console`");
}

/// All files of Rust below a folder of sources.
fn sources(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    let built = |p: &Path| p.file_name().is_some_and(|n| n == "target" || n == "out" || n.to_string_lossy().starts_with('.'));
    let of = |p: std::path::PathBuf| if p.is_dir() { sources(&p) } else { vec![p.display().to_string()] };
    entries.filter(|p| !built(p)).flat_map(of).filter(|p| p.ends_with(".rs")).collect()
}

/// Files that a text names in backticks.
fn named(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.lines().flat_map(|l| l.split('`').skip(1).step_by(2));
    quoted.filter(|w| w.ends_with(".rs") && w.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c)))
}

#[test]
fn sources_that_the_documentation_names_are_there() {
    let all = sources(Path::new(env!("CARGO_MANIFEST_DIR")));
    let text = documents().iter().map(|d| fs::read_to_string(d).expect("UTF-8")).collect::<String>();
    assert!(named(&text).count() > 50, "documents name sources");
    let gone: Vec<&str> = named(&text).filter(|w| !all.iter().any(|p| p.ends_with(&format!("/{w}")))).collect();
    assert_eq!(gone, Vec::<&str>::new());
    assert_eq!(named("`a/b.rs` and `c.rs`, not `x = y.rs` nor d.rs").collect::<Vec<_>>(), ["a/b.rs", "c.rs"]);
}

#[test]
fn blocks_are_found_whole() {
    let text = "```mdl\nmodel m() {}\n```\ntext\n```console\n$ mcc check a.mdl  # as it is\nmcc run \\\n  a.mcc\n\nmake demo\n```\n";
    let found = blocks(text);
    assert_eq!(
        found.iter().map(|e| (e.continued, e.commands.clone(), e.output.clone())).collect::<Vec<_>>(),
        [(false, vec!["mcc check a.mdl".into(), "mcc run    a.mcc".into(), "make demo".into()], vec![]),]
    );
}
