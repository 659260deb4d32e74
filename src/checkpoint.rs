//! `mcc checkpoint`.

use crate::Failure;
use crate::cli::{Checkpoint as Command, ConvertArgs, DiffArgs, WhichArgs};
use crate::files::{self, Wanted};
use crate::print::{PrintError, note, out, report};
use anyhow::{Context, anyhow};
use indicatif::{HumanBytes, HumanDuration};
use runtime::checkpoint::{Checkpoint, Difference, MANIFEST, Side, Stored, step_name, steps};
use runtime::paths::{exchange, same, write_whole};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

pub fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Ls(args) => list(args),
        Command::Verify(args) => verify(args),
        Command::Diff(args) => diff(args),
        Command::Convert(args) => convert(args),
    }
}

/// The checkpoint that a directory is, or those that are in it, the first step first.
fn named(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    files::look(dir, Wanted::Saves)?;
    if dir.join(MANIFEST).exists() {
        return Ok(vec![dir.to_path_buf()]);
    }
    let mut steps = steps(dir).with_context(|| format!("cannot read `{}`", dir.display()))?;
    steps.reverse();
    Ok(steps.into_iter().map(|step| dir.join(step_name(step))).collect())
}

fn bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.manifest.shards.iter().filter_map(|s| s.bytes()).sum()
}

/// Looks at all, of which each says what there is to say and whether it is whole.
fn each(dirs: Vec<PathBuf>, look: impl Fn(&Path) -> Result<bool, PrintError>) -> Result<(), Failure> {
    let mut whole = true;
    for dir in dirs {
        whole &= look(&dir)?;
    }
    if whole { Ok(()) } else { Err(Failure::Reported) }
}

fn list(args: &WhichArgs) -> Result<(), Failure> {
    each(named(&args.directory)?, |dir| {
        let checkpoint = match Checkpoint::open(dir) {
            Ok(checkpoint) => checkpoint,
            Err(e) => {
                note!("error: {e}");
                return Ok(false);
            }
        };
        let m = &checkpoint.manifest;
        if args.json {
            let mesh: serde_json::Map<_, _> = m.mesh.iter().map(|(axis, n)| (axis.clone(), json!(n))).collect();
            out!(
                "{}\n",
                json!({"dir": dir.display().to_string(), "step": m.run.step, "steps": m.conditions.as_ref().map(|c| c.steps), "bytes": bytes(&checkpoint), "shards": m.shards.len(),
                       "mesh": mesh, "model": m.model.model, "seed": m.run.seed, "artifact": m.artifact, "version": m.model.version})
            )?;
            return Ok(true);
        }
        let mesh: Vec<String> = m.mesh.iter().map(|(axis, size)| format!("{axis} {size}")).collect();
        let mesh = if mesh.is_empty() { "one rank".into() } else { mesh.join(" ") };
        let of = m.conditions.as_ref().map_or(String::new(), |c| format!(" of {}", c.steps));
        let age = fs::metadata(dir.join(MANIFEST)).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
        let age = age.map_or(String::new(), |age| format!("  {} ago", HumanDuration(age)));
        out!("{}  step {}{of}  {}  {}  {mesh}{age}\n", dir.display(), m.run.step, HumanBytes(bytes(&checkpoint)), m.model.model)?;
        Ok(true)
    })
}

fn verify(args: &WhichArgs) -> Result<(), Failure> {
    each(named(&args.directory)?, |dir| {
        let checked = Checkpoint::open(dir).map_err(|e| vec![e.to_string()]).and_then(|c| c.verify().map(|()| bytes(&c)));
        match &checked {
            _ if args.json => {
                let damage = checked.as_ref().err().cloned().unwrap_or_default();
                out!("{}\n", json!({"dir": dir.display().to_string(), "whole": damage.is_empty(), "damage": damage}))?;
            }
            Ok(bytes) => out!("{}: whole, {}\n", dir.display(), HumanBytes(*bytes))?,
            Err(damage) => damage.iter().for_each(|what| note!("error: {what}")),
        }
        Ok(checked.is_ok())
    })
}

fn diff(args: &DiffArgs) -> Result<(), Failure> {
    for path in [&args.first, &args.second] {
        files::look(path, Wanted::Weights)?;
    }
    let (first, second) = (Stored::open(&args.first)?, Stored::open(&args.second)?);
    let mut compared = 0;
    let differences = first.differences(&second, args.tolerance, |n| compared += n)?;
    let side = |side| if side == Side::First { args.first.display() } else { args.second.display() };
    for difference in &differences {
        match difference {
            Difference::Missing { name, from } => out!("{name}: not in {}\n", side(*from))?,
            Difference::Shape { name, first, second } => out!("{name}: {first:?} and {second:?}\n")?,
            Difference::Values { name, count, of, most, at } => out!("{name}: {count} of {of} differ, by {most:e} at most (element {at})\n")?,
        }
    }
    if first.run != second.run {
        let step = |s: &Stored| s.run.map_or("no step".into(), |r| format!("step {} with seed {}", r.step, r.seed));
        out!("they are of {} and {}\n", step(&first), step(&second))?;
    }
    if !differences.is_empty() {
        return Err(Failure::Reported);
    }
    out!("the same: {compared} numbers\n")?;
    Ok(())
}

fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    files::look(&args.from, Wanted::Weights)?;
    let (to, shown) = (&args.to, args.to.display());
    if same(&args.from, to) {
        return Err(anyhow!("`{shown}` is what it is made of: name another").into());
    }
    let taken = if to.is_dir() { to.read_dir().is_ok_and(|mut entries| entries.next().is_some()) } else { to.exists() };
    if taken && !args.force {
        return Err(anyhow!("`{shown}` exists: --force replaces it, another name keeps it").into());
    }
    let stored = Stored::open(&args.from)?;
    let stored = if args.weights { stored.weights_alone() } else { stored };
    let is_file = to.extension().is_some_and(|e| e == "safetensors");
    if is_file {
        if to.is_dir() {
            return Err(anyhow!("`{shown}` is a directory, and a file of that name is asked for").into());
        }
        let mut failed = Ok(());
        let written = write_whole(to, |file| {
            failed = stored.write_file(file);
            if failed.is_err() { Err(std::io::ErrorKind::Other.into()) } else { file.sync_all() }
        });
        failed?;
        written.with_context(|| format!("cannot write `{shown}`"))?;
    } else {
        if args.weights {
            return Err(anyhow!("`{shown}` would be a checkpoint, from which a run goes on, and `--weights` leaves out what it needs: a name that ends in .safetensors makes a file").into());
        }
        directory(&stored, to, taken)?;
    }
    report!("wrote {shown}\n");
    Ok(())
}

/// Writes a checkpoint that is whole or not there.
fn directory(stored: &Stored, to: &Path, taken: bool) -> Result<(), Failure> {
    if taken && !to.join(MANIFEST).exists() {
        return Err(anyhow!("`{}` is no checkpoint, and is not replaced by one; name another directory", to.display()).into());
    }
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = || format!("cannot write `{}`", to.display());
    let staging = tempfile::Builder::new().prefix(".unfinished-convert-").tempdir_in(parent).with_context(failed)?;
    stored.write_checkpoint(staging.path())?;
    // What was there goes with the staging directory.
    exchange(staging.path(), to).with_context(failed)?;
    Ok(())
}
