//! What commands need that compile and run models of their own: the models, and this program with other arguments.

use anyhow::{Context, anyhow};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The models, so that such commands need no other files.
pub const MODELS: [(&str, &str); 8] = [
    ("gpt2", include_str!("../models/gpt2.mdl")),
    ("llama", include_str!("../models/llama.mdl")),
    ("gemma", include_str!("../models/gemma.mdl")),
    ("mixtral", include_str!("../models/mixtral.mdl")),
    ("gpt_oss", include_str!("../models/gpt_oss.mdl")),
    ("deepseek_v3", include_str!("../models/deepseek_v3.mdl")),
    ("t5", include_str!("../models/t5.mdl")),
    ("mlp", include_str!("../models/mlp.mdl")),
];

/// Writes a model into a directory.
///
/// # Errors
/// What the file system says.
pub fn model(dir: &Path, name: &str) -> std::io::Result<PathBuf> {
    let (name, text) = MODELS.iter().find(|m| m.0 == name).expect("invariant: it is one of them");
    let path = dir.join(name).with_extension("mdl");
    std::fs::write(&path, text)?;
    Ok(path)
}

/// This program with other arguments, in a directory; what it printed.
///
/// # Errors
/// If it cannot be started or fails: what it said.
pub fn mcc(line: &str, dir: &Path) -> anyhow::Result<String> {
    let program = std::env::current_exe().context("cannot find mcc's own executable")?;
    let ran = Command::new(program).args(line.split_whitespace()).current_dir(dir).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(anyhow!("mcc {line}: {}", text(&ran.stderr).trim())) }
}

/// Bytes below 128 for models of tokens to learn.
///
/// # Errors
/// What the file system says.
pub fn text(file: &Path, seed: u64) -> std::io::Result<()> {
    let mut state = seed;
    let bytes = (0..1 << 16).map(|_| {
        state = ir::random::mix(state);
        b' ' + (state % 90) as u8
    });
    std::fs::write(file, bytes.collect::<Vec<u8>>())
}
