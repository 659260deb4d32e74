//! The page of all passes, `docs/passes.md`, and the picture of all levels, `docs/images/levels.svg`, from their table.

use crate::table::{PASSES, VERIFIERS};
use ir::module::Level;
use ir::options::Options;
use std::fmt::Write;

/// The page, as Markdown. A test holds the file to it.
pub fn passes() -> String {
    let mut out = String::from(
        "# Passes

A compile is these passes, in this order. Each takes a module and leaves one, which a verifier checks. This page is made
of their table, [`passes/src/table.rs`](../passes/src/table.rs); [ir.md](ir.md) explains levels and modules.

`mcc compile MODEL.mdl --print-after PASS` prints the module after a pass, and `--stop-after PASS` ends there.
`mcc opt` runs passes on such a text:

```console
mcc compile models/gpt2.mdl -D layers=2 --tp 2 --stop-after partition
mcc passes
```

```
mcc compile models/gpt2.mdl --tp 2 --stop-after partition > partitioned.mir
mcc opt partitioned.mir --verify
mcc opt partitioned.mir --passes classes,bucket | less
```

A compile that ends in \"bug in mcc\" leaves the model's graph, none of its weights, as `mcc-bug-PASS.mir`, with the
passes up to the one that failed. `mcc opt` with that file repeats what happened, and `mcc reduce` with it leaves out
of both what is not needed to fail in the same way; please send either with a report.

`mcc reduce` takes a module at any level. Of graphs and sharded graphs it leaves out operations, results and sizes, and
few lines are left. The parts of a later module have to agree, so that hardly any can go: it is better to begin at a
graph with `--passes` up to the one in question.

The files in `passes/tests/files/PASS` show what a pass does: each is a model text (`.mdl`) or a module (`.mir`), with
its command and what must come of it.

| pass | from | to | what it does | verifier | by default |
|---|---|---|---|---|---|
",
    );
    for p in PASSES {
        let default = if (p.wanted)(&Options::default()) { "yes" } else { "when asked for" };
        let files = format!("[`{0}`](../passes/tests/files/{0})", p.name);
        let verifiers: Vec<&str> = p.verifiers.iter().map(|v| v.name).collect();
        let _ = writeln!(out, "| {files} | {} | {} | {} | {} | {default} |", p.levels.0, p.levels.1, p.summary, verifiers.join(", "));
    }
    out.push_str(
        "
## Verifiers

A verifier believes nothing of the passes before it. `mcc opt MODULE --verify` runs all that are for the module's level.
What each shows, invariant by invariant, is numbered in [verifier.md](verifier.md).

| verifier | at levels | what holds of a module that it accepts |
|---|---|---|
",
    );
    for v in VERIFIERS {
        let levels = if v.levels.0 == v.levels.1 { v.levels.0.to_string() } else { format!("{} to {}", v.levels.0, v.levels.1) };
        let _ = writeln!(out, "| {} | {levels} | {} |", v.name, v.summary);
    }
    out
}

/// The levels, from top to bottom, and what `mcc dump --level` calls them.
const LEVELS: [(Level, &str); 6] = [
    (Level::Graph, "what a step computes, as one rank would; --level graph"),
    (Level::Sharded, "a sharding for every value, and the reshards between; --level sharded"),
    (Level::Local, "what each class of ranks computes, with collectives; --level local"),
    (Level::Commands, "kernels, buffers, commands of streams"),
    (Level::Memory, "with a place for every buffer"),
    (Level::Job, "with events between streams: what ranks execute; --level program"),
];

/// Words of a list in lines of at most so many characters.
fn lines(words: &[&str], width: usize) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    for word in words {
        match out.last_mut() {
            Some(line) if line.len() + 2 + word.len() <= width => *line += &format!(", {word}"),
            _ => out.push((*word).to_string()),
        }
    }
    out
}

/// The picture of the levels, as SVG: a box for each, before it the passes that lead there, beside it the verifiers
/// that look at it. A test holds the file to it.
pub fn levels() -> String {
    let mut body = String::new();
    let mut y = 8;
    let mut boxed = |name: &str, what: &str, passes: &[&str], beside: &[&str]| {
        for line in lines(passes, 92) {
            let _ = writeln!(body, "<text class='pass' x='40' y='{}'>{line}</text>", y + 13);
            y += 16;
        }
        let beside = lines(beside, 38);
        let height = 24.max(16 * beside.len() + 8);
        let _ = writeln!(
            body,
            "<rect x='8' y='{y}' width='560' height='{height}'/><text x='16' y='{}'><tspan class='level'>{name}</tspan>  {what}</text>",
            y + 16
        );
        for (k, line) in beside.iter().enumerate() {
            let _ = writeln!(body, "<text class='verifier' x='580' y='{}'>{line}</text>", y + 16 + 16 * k);
        }
        y += height + 6;
    };
    boxed("text", "the model, its plan and its training, as .mdl", &[], &["(verifiers)"]);
    for (level, what) in LEVELS {
        let to: Vec<&str> = PASSES.iter().filter(|p| p.levels.1 == level).map(|p| p.name).collect();
        let parse = ["parse", "elaborate"];
        let passes: Vec<&str> = if level == Level::Graph { parse.into_iter().chain(to).collect() } else { to };
        let verifiers: Vec<&str> = VERIFIERS.iter().filter(|v| v.levels.0 <= level && level <= v.levels.1).map(|v| v.name).collect();
        boxed(&level.to_string(), what, &passes, &verifiers);
    }
    boxed("kernels", "the graph of each kernel; --level kernel", &["lower, with the commands"], &["lowering"]);
    boxed("code", "LLVM IR and assembly, or PTX; --level llvm, asm, ptx", &["codegen, a family for each kind of kernel"], &["kernels, on numbers"]);
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='860' height='{y}' viewBox='0 0 860 {y}'>
<style>text{{font:12px sans-serif;fill:#222}}.level{{font-weight:bold}}.pass{{fill:#1c5a96}}.verifier{{fill:#3a7a34}}
rect{{fill:#eef3f8;stroke:#8db8e8}}</style>
<rect width='860' height='{y}' style='fill:#fff;stroke:none'/>
{body}</svg>
"
    )
}
