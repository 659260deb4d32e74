//! The commands in the documentation run: every fenced block marked `console`, in a directory of its own, with
//! `models/`, a Hugging Face model of Llama's architecture as `Llama-3.2-1B`, a launch script `train.sh`, a
//! `corpus.txt`, and prompts with answers, `answers.jsonl`.
//!
//! A block holds one command a line. Those of `mcc` are run; `make`, `cd` and other tools are the reader's.

use crate::mcc::{Dir, models};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The lines of all `console` blocks, block by block.
fn blocks(text: &str) -> Vec<Vec<String>> {
    let mut out = vec![];
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let fence = line.trim_start();
        if !fence.starts_with("```") {
            continue;
        }
        let block: Vec<String> = lines.by_ref().take_while(|l| !l.trim_start().starts_with("```")).map(String::from).collect();
        if fence == "```console" {
            out.push(joined(&block));
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
    let mut found: Vec<_> = fs::read_dir(root.join("docs"))
        .expect("docs")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .collect();
    found.push(root.join("README.md"));
    found.sort();
    found
}

#[test]
fn commands_in_the_documentation_run() {
    let mut ran = 0;
    for document in documents() {
        for block in blocks(&fs::read_to_string(&document).expect("UTF-8")) {
            let dir = Dir::new();
            symlink(models(), dir.path("models")).expect("linked");
            symlink(models().with_file_name("tests/cases/llama"), dir.path("Llama-3.2-1B")).expect("linked");
            symlink(models().with_file_name("tests/megatron/train.sh"), dir.path("train.sh")).expect("linked");
            dir.write("corpus.txt", "The quick brown fox jumps over the lazy dog. ".repeat(100));
            let answer = |n| format!("{{\"prompt\": \"Count to {n}: \", \"completion\": \"{:?}\"}}\n", (1..=n).collect::<Vec<u32>>());
            dir.write("answers.jsonl", (1..40).map(answer).collect::<String>());
            for command in block {
                let Some(arguments) = command.strip_prefix("mcc ").or_else(|| command.strip_prefix("target/release/mcc ")) else { continue };
                let done = dir.line(arguments);
                assert_eq!(done.code, Some(0), "{}: `{command}`\n{}{}", document.display(), done.stdout, done.stderr);
                // An example that a reader would be warned of is a bad one: its loss does not fall, or a flag of it does nothing.
                assert!(!done.stderr.contains("warning[W07"), "{}: `{command}`\n{}", document.display(), done.stderr);
                ran += 1;
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
    assert_eq!(blocks(text), [["mcc check a.mdl", "mcc run    a.mcc", "make demo"]]);
}
