//! `mcc checkpoint`.

use crate::cli::{Checkpoint as Command, ConvertArgs, DiffArgs, Format, WhichArgs};
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::misuse::misuse;
use crate::print::{PrintError, note, out, report};
use anyhow::{Context, anyhow};
use indicatif::{HumanBytes, HumanDuration};
use ir::provenance;
use runtime::checkpoint::{Checkpoint, ComparedSide, Difference, Distributed, MANIFEST, METADATA, Stored, is_distributed, step_name, steps};
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
    files::look(dir, ExpectedInput::Listed)?;
    if dir.join(MANIFEST).exists() || is_distributed(dir) {
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
        let failed = |e| {
            note!("error: {e}");
            Ok(false)
        };
        if is_distributed(dir) {
            return Distributed::open(dir).map_or_else(failed, |d| list_distributed(args, dir, &d).map(|()| true));
        }
        let checkpoint = match Checkpoint::open(dir) {
            Ok(checkpoint) => checkpoint,
            Err(e) => return failed(e),
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
        let age = age(&dir.join(MANIFEST));
        out!("{}  step {}{of}  {}  {}  {mesh}{age}\n", dir.display(), m.run.step, HumanBytes(bytes(&checkpoint)), m.model.model)?;
        Ok(true)
    })
}

/// One of PyTorch's, of which only mcc's say at which step they are.
fn list_distributed(args: &WhichArgs, dir: &Path, distributed: &Distributed) -> Result<(), PrintError> {
    let (about, tensors, bytes) = (distributed.about.as_ref(), distributed.tensors(), distributed.bytes());
    let run = about.and_then(|a| a.run);
    if args.json {
        let (step, model) = (run.map(|r| r.step), about.map(|a| &a.model.model));
        let dir = dir.display().to_string();
        return out!(
            "{}\n",
            json!({"dir": dir, "format": "dcp", "step": step, "bytes": bytes, "tensors": tensors, "model": model, "others": distributed.others})
        );
    }
    let step = run.map_or(String::new(), |r| format!("  step {}", r.step));
    let model = about.map_or(String::new(), |a| format!("  {}", a.model.model));
    let age = age(&dir.join(METADATA));
    out!("{}  PyTorch (DCP){step}  {}  {tensors} tensors{model}{age}\n", dir.display(), HumanBytes(bytes))
}

/// How long ago a file was written.
fn age(file: &Path) -> String {
    let age = fs::metadata(file).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
    age.map_or(String::new(), |age| format!("  {} ago", HumanDuration(age)))
}

fn verify(args: &WhichArgs) -> Result<(), Failure> {
    each(named(&args.directory)?, |dir| {
        if is_distributed(dir) {
            return verify_distributed(args, dir);
        }
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

fn verify_distributed(args: &WhichArgs, dir: &Path) -> Result<bool, PrintError> {
    let checked = Distributed::open(dir).map_err(|e| vec![e.to_string()]).and_then(|d| d.verify().map(|()| d));
    match &checked {
        _ if args.json => {
            let damage = checked.as_ref().err().cloned().unwrap_or_default();
            out!("{}\n", json!({"dir": dir.display().to_string(), "format": "dcp", "hashes": false, "whole": damage.is_empty(), "damage": damage}))?;
        }
        Ok(d) => out!(
            "{}: each element of its {} tensors is there once, and CRC-32 checksums are right, {}; PyTorch's checkpoints have no hashes\n",
            dir.display(),
            d.tensors(),
            HumanBytes(d.bytes())
        )?,
        Err(damage) => damage.iter().for_each(|what| note!("error: {what}")),
    }
    Ok(checked.is_ok())
}

fn diff(args: &DiffArgs) -> Result<(), Failure> {
    for path in [&args.first, &args.second] {
        files::look(path, ExpectedInput::Weights)?;
    }
    let (first, second) = (Stored::open(&args.first)?, Stored::open(&args.second)?);
    let mut compared = 0;
    let differences = first.differences(&second, args.tolerance, |n| compared += n)?;
    let side = |side| if side == ComparedSide::First { args.first.display() } else { args.second.display() };
    for difference in &differences {
        match difference {
            Difference::Missing { name, from } => out!("{name}: not in {}\n", side(*from))?,
            Difference::Shape { name, first, second } => out!("{name}: {first:?} and {second:?}\n")?,
            Difference::Values { name, count, of, most, at } => out!("{name}: {count} of {of} differ, by {most:.2e} at most (element {at})\n")?,
        }
    }
    let by = |d: &&Difference| if let Difference::Values { most, .. } = d { *most } else { f64::NEG_INFINITY };
    if let Some(Difference::Values { name, most, .. }) = differences.iter().max_by(|a, b| by(a).total_cmp(&by(b)))
        && differences.len() > 1
    {
        out!("{} tensors differ, most of all {name}, by {most:.2e}\n", differences.len())?;
    }
    for (stored, path) in [(&first, &args.first), (&second, &args.second)] {
        if !stored.others.is_empty() {
            note!("note: of `{}` was not compared what is no tensor: {}", path.display(), few(&stored.others));
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
    files::look(&args.from, ExpectedInput::Weights)?;
    let (to, shown) = (&args.to, args.to.display());
    if same(&args.from, to) {
        return Err(misuse!("`{shown}` is what it is made of: name another").into());
    }
    let taken = if to.is_dir() { to.read_dir().is_ok_and(|mut entries| entries.next().is_some()) } else { to.exists() };
    if taken && !args.force {
        return Err(anyhow!("`{shown}` exists: --force replaces it, another name keeps it").into());
    }
    let stored = Stored::open(&args.from)?;
    let stored = if args.weights { stored.weights_alone() } else { stored };
    let by_name = if to.extension().is_some_and(|e| e == "safetensors") { Format::Safetensors } else { Format::Checkpoint };
    let format = args.format.unwrap_or(by_name);
    if format == Format::Safetensors {
        if to.is_dir() {
            return Err(misuse!("`{shown}` is a directory, and a file of that name is asked for").into());
        }
        let mut failed = Ok(());
        let written = write_whole(to, |file| {
            failed = stored.write_file(file);
            if failed.is_err() { Err(std::io::ErrorKind::Other.into()) } else { file.sync_all() }
        });
        failed?;
        written.with_context(|| format!("cannot write `{shown}`"))?;
    } else {
        if args.weights && format == Format::Checkpoint {
            return Err(misuse!("`{shown}` would be a checkpoint, from which a run goes on, and `--weights` leaves out what it needs: a name that ends in .safetensors makes a file").into());
        }
        directory(&stored, to, taken, format)?;
    }
    if !stored.others.is_empty() {
        note!("note: left out, as it is no tensor: {}", few(&stored.others));
    }
    report!("wrote {shown}\n");
    Ok(())
}

/// The first of some names, and how many more there are.
fn few(names: &[String]) -> String {
    provenance::few(&names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>()).join(", ")
}

/// Writes a checkpoint that is whole or not there.
fn directory(stored: &Stored, to: &Path, taken: bool, format: Format) -> Result<(), Failure> {
    if taken && !to.join(MANIFEST).exists() && !is_distributed(to) {
        return Err(anyhow!("`{}` is no checkpoint, and is not replaced by one; name another directory", to.display()).into());
    }
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = || format!("cannot write `{}`", to.display());
    let staging = tempfile::Builder::new().prefix(".unfinished-convert-").tempdir_in(parent).with_context(failed)?;
    match format {
        Format::Dcp => stored.write_distributed(staging.path())?,
        Format::Checkpoint | Format::Safetensors => stored.write_checkpoint(staging.path())?,
    }
    // The earlier contents of `to` are removed with the staging directory.
    exchange(staging.path(), to).with_context(failed)?;
    Ok(())
}
