//! Checkpoints: damaged ones are refused; hostile ones, whose hashes were renewed, are refused or read, and neither panics.

use crate::{Rng, files, jobs, seeds, within, written};
use ir::random::mix;
use runtime::checkpoint::{Checkpoint, MANIFEST};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A checkpoint of each job in a directory of its own, with its files.
fn originals(dir: &Path) -> Vec<(PathBuf, BTreeMap<PathBuf, Vec<u8>>)> {
    let one = |(k, job)| {
        let at = dir.join(format!("{k}"));
        fs::create_dir(&at).unwrap();
        let manifest = written::write(job, &at).unwrap();
        assert_eq!(written::read(job, &at, &manifest).unwrap(), manifest.tensors.len());
        (at.clone(), files(&at))
    };
    jobs().iter().enumerate().map(one).collect()
}

#[test]
fn what_was_damaged_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (jobs, originals) = (jobs(), originals(dir.path()));
    let mut kinds = [0; 7];
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0xc4ec));
        let job = dice.below(originals.len());
        let (at, files) = &originals[job];
        let (path, bytes) = files.iter().nth(dice.below(files.len())).unwrap();
        let (other, others) = files.iter().nth(dice.below(files.len())).unwrap();
        let mut damaged = bytes.clone();
        let kind = dice.below(kinds.len());
        match kind {
            0 => dice.spoil(&mut damaged, 4),
            1 => damaged.truncate(dice.below(bytes.len())),
            2 => damaged.extend(vec![0; 1 + dice.below(5000)]),
            3 => damaged.clone_from(others),
            // This joins the header of one file with the data of another.
            4 => {
                let n = dice.below(bytes.len().min(others.len()));
                damaged[..n].copy_from_slice(&others[..n]);
            }
            // This moves a range within the file, as a disk may misplace a block.
            5 => {
                let n = 1 + dice.below(bytes.len() / 2);
                let (from, to) = (dice.below(bytes.len() - n), dice.below(bytes.len() - n));
                damaged.copy_within(from..from + n, to);
            }
            _ => {
                let n = 1 + dice.below(bytes.len());
                let from = dice.below(bytes.len() - n + 1);
                damaged[from..from + n].fill(0);
            }
        }
        let what = format!("seed {seed}, kind {kind}: {} and {}", path.display(), other.display());
        fs::write(path, &damaged).unwrap();
        let total = files.values().map(Vec::len).sum::<usize>() + damaged.len();
        let manifest = Checkpoint::open(at).map(|c| c.manifest);
        let verified = within(total, &what, || Checkpoint::open(at).map_err(|e| e.to_string()).and_then(|c| c.verify().map_err(|e| e.join("; "))));
        let read = within(total, &what, || manifest.map_err(|e| e.to_string()).and_then(|m| written::read(&jobs[job], at, &m)));
        assert!(damaged == *bytes || verified.is_err(), "{what} was found whole");
        // A read checks only what it reads, which includes the whole header.
        assert!(damaged == *bytes || read.is_err(), "{what} was accepted");
        kinds[kind] += usize::from(damaged != *bytes);
        fs::write(path, bytes).unwrap();
    }
    println!("damaged checkpoints refused, by kind: {kinds:?}");
}

/// A number or text somewhere in a manifest.
fn leaf<'a>(dice: &mut Rng, value: &'a mut Value) -> &'a mut Value {
    let count = value.as_array().map(Vec::len).or_else(|| value.as_object().map(serde_json::Map::len)).unwrap_or(0);
    if count == 0 {
        return value;
    }
    let k = dice.below(count);
    let inner = match value {
        Value::Array(items) => &mut items[k],
        Value::Object(fields) => fields.values_mut().nth(k).unwrap(),
        _ => unreachable!("it has no items"),
    };
    leaf(dice, inner)
}

/// A list somewhere in a manifest.
fn list<'a>(dice: &mut Rng, value: &'a mut Value) -> Option<&'a mut Vec<Value>> {
    match value {
        Value::Array(items) => {
            let k = dice.below(items.len() + 1);
            let goes_in = items.get(k).is_some_and(|item| item.is_array() || item.is_object());
            if goes_in { list(dice, &mut items[k]) } else { Some(items) }
        }
        Value::Object(fields) if !fields.is_empty() => {
            let k = dice.below(fields.len());
            list(dice, fields.values_mut().nth(k).unwrap())
        }
        _ => None,
    }
}

#[test]
fn hostile_manifests_neither_panic_nor_take_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (jobs, originals) = (jobs(), originals(dir.path()));
    let (mut refused, mut accepted) = (0, 0);
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0x4057));
        let job = dice.below(originals.len());
        let (at, files) = &originals[job];
        let path = at.join(MANIFEST);
        let sealed: Value = serde_json::from_slice(&files[&path]).unwrap();
        let mut own = sealed["checkpoint"].clone();
        for _ in 0..=dice.below(3) {
            if dice.below(3) == 0 {
                if let Some(items) = list(&mut dice, &mut own).filter(|items| !items.is_empty()) {
                    let (a, b) = (dice.below(items.len()), dice.below(items.len()));
                    match dice.below(3) {
                        0 => drop(items.remove(a)),
                        1 => items.insert(a, items[b].clone()),
                        _ => items.swap(a, b),
                    }
                }
                continue;
            }
            let leaf = leaf(&mut dice, &mut own);
            let n = leaf.as_u64().unwrap_or(0);
            *leaf = match leaf {
                Value::Number(_) => [n.wrapping_add(1), n.wrapping_sub(1), 0, u64::MAX, 1 << 40, n.wrapping_mul(2)][dice.below(6)].into(),
                Value::String(text) => ["", "../rank-0.safetensors", "rank-1.safetensors", "F16", "/dev/zero", "F32"].map(Value::from)[dice.below(6)]
                    .as_str()
                    .filter(|other| other != text)
                    .unwrap_or("x")
                    .into(),
                _ => Value::Null,
            };
        }
        let text = serde_json::to_string(&own).unwrap();
        let hash = blake3::hash(text.as_bytes()).to_hex().to_string();
        let forged = format!(r#"{{"blake3":"{hash}","checkpoint":{text}}}"#);
        fs::write(&path, &forged).unwrap();
        let total = files.values().map(Vec::len).sum::<usize>();
        let what = format!("seed {seed}");
        let read = within(total, &what, || {
            let checkpoint = Checkpoint::open(at).map_err(|e| e.to_string())?;
            checkpoint.verify().map_err(|e| e.join("; "))?;
            written::read(&jobs[job], at, &checkpoint.manifest)
        });
        if read.is_ok() {
            accepted += 1
        } else {
            refused += 1
        }
        fs::write(&path, &files[&path]).unwrap();
    }
    println!("hostile manifests: {refused} refused, {accepted} that say the same");
}
