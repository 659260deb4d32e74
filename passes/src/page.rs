//! The page of all passes, `docs/passes.md`, from their table.

use crate::table::{PASSES, VERIFIERS};
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
