//! The page `docs/formats.md`, of the declarations of what is written.

use super::declared::{declared, wrapped};
use std::fmt::Write;

/// A type of a format: its source, its head there, what it is within.
struct Part {
    source: &'static str,
    head: &'static str,
    within: &'static str,
}

const fn part(source: &'static str, head: &'static str, within: &'static str) -> Part {
    Part { source, head, within }
}

const MANIFEST: &str = include_str!("../../runtime/src/artifact/manifest.rs");
const ARTIFACT: &str = include_str!("../../runtime/src/artifact.rs");
const TARGET: &str = include_str!("../../runtime/src/target.rs");
const LAUNCH: &str = include_str!("../../ir/src/launch.rs");
const CHECKPOINT: &str = include_str!("../../runtime/src/checkpoint/manifest.rs");
const MARK: &str = include_str!("../../runtime/src/weights/mark.rs");
const PROVENANCE: &str = include_str!("../../ir/src/provenance.rs");
const CONDITIONS: &str = include_str!("../../runtime/src/conditions.rs");
const JOB: &str = include_str!("../../ir/src/program.rs");

const ARTIFACT_PARTS: &[Part] = &[
    part(MANIFEST, "pub struct Manifest", "`manifest.json`"),
    part(MANIFEST, "pub struct FileEntry", "`files` of the manifest"),
    part(TARGET, "pub enum Target", "`target` of the manifest, by its `kind`"),
    part(TARGET, "pub struct Processor", "a target"),
    part(ARTIFACT, "pub struct KernelEntry", "`kernels.json`, a list"),
    part(LAUNCH, "pub struct Launch", "`launch` of a kernel"),
    part(JOB, "pub struct Job", "`job.bin`"),
];

const CHECKPOINT_PARTS: &[Part] = &[
    part(CHECKPOINT, "pub struct CheckpointManifest", "`checkpoint` of `checkpoint.json`"),
    part(MARK, "pub struct Mark", "`run`"),
    part(PROVENANCE, "pub struct Provenance", "`model`"),
    part(CONDITIONS, "pub struct Conditions", "`conditions`"),
    part(CONDITIONS, "pub struct DataMark", "`data` of the conditions"),
    part(CONDITIONS, "pub struct Recipe", "`recipe` of the conditions"),
    part(CHECKPOINT, "pub struct TensorEntry", "`tensors`"),
    part(CHECKPOINT, "pub struct PieceEntry", "`pieces` of a tensor"),
    part(CHECKPOINT, "pub struct ShardEntry", "`shards`"),
];

/// A table of each type's fields.
fn tables(parts: &[Part]) -> String {
    let mut out = String::new();
    for Part { source, head, within } in parts {
        let of = declared(source, head);
        let _ = write!(out, "\n### {}\n\nIn {within}. {}\n\n| field | type | is |\n|---|---|---|\n", of.name, wrapped(&of.says, 0));
        for member in &of.members {
            let cell = |text: &str| text.replace('\n', " ").replace('|', "\\|");
            let ty = if member.of.is_empty() { String::new() } else { format!("`{}`", member.of.trim_matches(['(', ')'])) };
            let inner: String = member.members.iter().map(|m| format!(" `{}`: {}", m.name, cell(&m.says))).collect();
            let _ = writeln!(out, "| `{}` | {ty} | {}{inner} |", member.name, cell(&member.says));
        }
    }
    out
}

pub fn page() -> String {
    format!(
        "# Formats

What artifacts and checkpoints hold on disk, made of the declarations of what mcc writes. For those who write a tool
that reads them. Types are Rust's: `Option` may be `null` or missing, a `Vec` is a list, a tuple a list of so many.

## Artifacts

A directory, whose files [the runtime's page](runtime.md#the-artifact) lists. JSON files are UTF-8. `job.bin` is the job
in [postcard](https://postcard.jamesmunns.com/wire-format), compressed with zstd; `mcc dump` prints it as text.
The format is number {}, and mcc reads no other.
{}
## Checkpoints

A directory of `checkpoint.json`, written last, and a file for each rank that owns elements. `checkpoint.json` is
`{{\"blake3\": HASH, \"checkpoint\": {{..}}}}`, where the hash is of the bytes of the inner object.

A rank's file is [safetensors](https://github.com/huggingface/safetensors) of pieces. Its last tensor, `mcc.blake3`, has
32 bytes for each MiB of the data before it: the hash of these. The safetensors library reads it without mcc;
`mcc checkpoint convert` makes whole tensors of it.
{}",
        runtime::artifact::FORMAT,
        tables(ARTIFACT_PARTS),
        tables(CHECKPOINT_PARTS)
    )
}
