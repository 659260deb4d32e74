//! The files of `passes/tests/files/verify`: a sound module with one thing wrong, and the invariant that refuses it.
//!
//! A file names a base, a sound module beside it, and says with `sed` what is another way: `RUN: not sed -e 'EDIT'
//! %S/BASE | mcc opt --verify -`. `check: verifier .. V304: ..` is what a verifier says. The command runs in the
//! tests of the command line; here the verifiers alone do. `UPDATE_EXPECT=1` writes what they say anew.

mod autograd;
mod derivatives;
mod forged;
mod meaning;
mod rows;
mod search;

use ir::text::parse_module;
use passes::compile::{BugEvidence, holds};
use passes::table::verifiers;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use verify::{BEYOND_TEXTS, Invariant};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files/verify")
}

/// The files of modules with something wrong.
fn files() -> Vec<PathBuf> {
    let entries = fs::read_dir(folder()).expect("the folder").map(|e| e.expect("an entry").path());
    let mut found: Vec<PathBuf> = entries.filter(|p| name(p).starts_with('V')).collect();
    found.sort();
    found
}

fn name(path: &Path) -> String {
    path.file_stem().expect("a file has a name").to_string_lossy().into_owned()
}

/// The invariant that a file is called after: `V304_chunk_order`.
fn of(path: &Path) -> Option<Invariant> {
    Invariant::ALL.iter().copied().find(|i| format!("{i}_{}", i.name()) == name(path))
}

/// The violations of all verifiers for the module that a file's command makes.
fn said(text: &str) -> Result<Vec<(Option<Invariant>, String)>, String> {
    let run = text.lines().find_map(|l| l.strip_prefix("; RUN: not ")).ok_or("no line `; RUN: not ..`")?;
    let edit = run.strip_suffix(" | mcc opt --verify -").ok_or("the command ends with `| mcc opt --verify -`")?;
    let mut shell = Command::new("sh");
    let out = shell.args(["-e", "-c", &edit.replace("%S", &folder().display().to_string())]).output().map_err(|e| e.to_string())?;
    if !out.status.success() {
        return Err(String::from_utf8_lossy(&out.stderr).into_owned());
    }
    let module = parse_module(&String::from_utf8(out.stdout).map_err(|e| e.to_string())?).map_err(|e| format!("{e:?}"))?;
    let complaint = |e: BugEvidence, by: &str| (e.invariant(), format!("verifier `{by}`: {e}"));
    Ok(verifiers(&module).filter_map(|v| holds(v, &module).err().map(|e| complaint(e, v.name))).collect())
}

fn check(path: &Path) -> Result<(), String> {
    let mut text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    let invariant = of(path).ok_or("its name is that of no invariant")?;
    let all = said(&text)?;
    let of_it = all.iter().find(|s| s.0 == Some(invariant)).map(|s| &s.1).ok_or_else(|| format!("{invariant} does not refuse it, but {all:?}"))?;
    let first = format!("; {invariant}: {}", invariant.holds());
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let kept = text.lines().skip(1).filter(|l| !l.starts_with("; check:"));
        text = std::iter::once(first.as_str()).chain(kept).fold(String::new(), |out, l| out + l + "\n") + &format!("; check: {of_it}\n");
        fs::write(path, &text).map_err(|e| e.to_string())?;
    }
    if !text.starts_with(&first) {
        return Err(format!("its first line is not `{first}`"));
    }
    match text.lines().find_map(|l| l.strip_prefix("; check: ")) {
        Some(want) if want == of_it => Ok(()),
        want => Err(format!("{want:?} is not what is said: {of_it}")),
    }
}

#[test]
fn verifiers_refuse_what_their_files_say() {
    let wrong: Vec<String> = files().iter().filter_map(|f| check(f).err().map(|why| format!("{}: {why}", f.display()))).collect();
    assert!(wrong.is_empty(), "{} files; `UPDATE_EXPECT=1` renews what verifiers say\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn what_is_broken_is_sound_otherwise() {
    for path in fs::read_dir(folder()).expect("the folder").map(|e| e.expect("an entry").path()).filter(|p| name(p).starts_with("base")) {
        let module = parse_module(&fs::read_to_string(&path).expect("UTF-8")).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
        for v in verifiers(&module) {
            assert_eq!(holds(v, &module), Ok(vec![]), "{}: verifier `{}`", path.display(), v.name);
        }
    }
}

#[test]
fn every_invariant_has_a_file_that_is_refused_or_a_reason_for_none() {
    let of_files: BTreeSet<Invariant> = files().iter().filter_map(|f| of(f)).collect();
    let beyond: BTreeSet<Invariant> = BEYOND_TEXTS.iter().map(|b| b.0).collect();
    let without: Vec<Invariant> = Invariant::ALL.iter().copied().filter(|i| of_files.contains(i) == beyond.contains(i)).collect();
    assert!(without.is_empty(), "either a file in {} or a line of `BEYOND_TEXTS` is for {without:?}", folder().display());
}
