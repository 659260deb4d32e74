//! `mcc import` and `mcc export`: checkpoints of other programs.

use crate::cli::{ExportArgs, ImportArgs};
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::misuse::{self, misuse};
use crate::print::{note, report};
use crate::report::count;
use crate::text::show;
use crate::tokenizer::TokenizerFiles;
use anyhow::{Context, anyhow};
use convert::{CONFIG, ConvertError, DTYPES, MODEL, WEIGHTS, WHOLE};
use runtime::checkpoint::Stored;
use runtime::paths::same;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

pub fn import(args: &ImportArgs) -> Result<(), Failure> {
    files::look(&args.directory, ExpectedInput::Checkpoint)?;
    let Some(output) = &args.output else {
        let name = args.directory.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy());
        return Err(misuse!("-o says where model.mdl and the weights go: `mcc import hf {} -o {name}-mcc`", args.directory.display()).into());
    };
    args.model.iter().try_for_each(|text| files::look_for("--model", text, ExpectedInput::Text))?;
    free(output, if args.model.is_some() { &[WEIGHTS, DTYPES] } else { &[MODEL, WEIGHTS, CONFIG, DTYPES] }, args.force)?;
    let tokenizer = TokenizerFiles::within(&args.directory);
    free(output, tokenizer.as_ref().map_or(&[], TokenizerFiles::names), args.force)?;
    let done = match &args.model {
        Some(model) => convert::import_as(&args.directory, model, &args.define, output),
        None => convert::import(&args.directory, output),
    };
    let done = done.map_err(failure)?;
    keep(tokenizer.as_ref(), output)?;
    for w in &done.warnings {
        note!("warning: {w}");
    }
    if !done.skipped.is_empty() {
        report!("left out, as the model does not need them: {}\n", listed(&done.skipped));
    }
    if let Some((scheme, n)) = done.decoded {
        report!("computed {n} tensors from {scheme} to f32; an export writes them as bf16\n");
    }
    for (dtype, n) in &done.widened {
        report!("widened {n} tensors of {dtype} to f32\n");
    }
    let text = if args.model.is_some() { String::new() } else { format!("{} and ", done.model.display()) };
    report!("{}: wrote {text}{} ({} parameters in {} tensors)\n", done.architecture, done.weights.display(), count(done.elements), done.parameters);
    Ok(())
}

pub fn export(args: &ExportArgs) -> Result<(), Failure> {
    files::look(&args.weights, ExpectedInput::Weights)?;
    args.model.iter().try_for_each(|text| files::look_for("--model", text, ExpectedInput::Text))?;
    free(&args.output, &[WHOLE, CONFIG], args.force)?;
    let kept = kept(args);
    let own = TokenizerFiles::of_weights(&args.weights);
    let tokenizer = own.or_else(|| TokenizerFiles::within(&kept));
    free(&args.output, tokenizer.as_ref().map_or(&[], TokenizerFiles::names), args.force)?;
    if same(&args.weights, &args.output.join(WHOLE)) {
        return Err(misuse!("`{}` would be replaced by its own export: another -o keeps it", args.weights.display()).into());
    }
    // The weights of a checkpoint, or of a file with optimizer states, are first written to a file of their own.
    let stored = Stored::open(&args.weights)?;
    let whole = if args.weights.is_dir() || stored.has_states() { Some(weights_of(stored, &args.weights, &args.output)?) } else { None };
    let weights = whole.as_ref().map_or(args.weights.as_path(), |file| file.path());
    let model = args.model.as_deref();
    let done = convert::export_with(weights, model, &kept, &args.define, args.dtype.map(Into::into), &args.output).map_err(failure)?;
    keep(tokenizer.as_ref(), &args.output)?;
    show(&done.warnings, &done.sources);
    if done.rounded > 0 {
        report!("rounded {} of {} values to {}, to nearest even\n", count(done.rounded), count(done.elements), done.dtype.name());
    }
    report!("wrote {} tensors to {}\n", count(done.tensors as u64), args.output.display());
    if done.config.is_none() {
        report!("without a {CONFIG}, as no architecture that mcc knows computes this text: `mcc import hf --model` reads it back\n");
    }
    Ok(())
}

/// Where an export looks for what the import has left: beside the text; without one in a checkpoint, or beside it.
fn kept(args: &ExportArgs) -> PathBuf {
    let of_weights = || {
        let within = args.model.is_none() && [CONFIG, DTYPES].iter().any(|name| args.weights.join(name).is_file());
        if within { args.weights.clone() } else { args.weights.with_file_name("") }
    };
    args.model.as_ref().map_or_else(of_weights, |text| text.with_file_name(""))
}

/// A tokenizer goes along.
fn keep(tokenizer: Option<&TokenizerFiles>, dir: &Path) -> Result<(), Failure> {
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    tokenizer.put(dir).with_context(|| format!("cannot copy the tokenizer from `{}` into `{}`", tokenizer.dir().display(), dir.display()))?;
    report!("with the tokenizer's {}\n", tokenizer.names().join(", "));
    Ok(())
}

/// Names, or the first of many and their number.
fn listed(names: &[String]) -> String {
    match names {
        [first, .., last] if names.len() > 64 => format!("{} tensors from {first} to {last}", count(names.len() as u64)),
        _ => names.join(", "),
    }
}

/// Weights without optimizer states, in a file that goes when it is dropped.
fn weights_of(stored: Stored, from: &Path, beside: &Path) -> Result<NamedTempFile, Failure> {
    let parent = beside.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = || format!("cannot write the weights of `{}` into `{}`", from.display(), parent.display());
    let mut file = tempfile::Builder::new().prefix(".mcc-").suffix(".safetensors").tempfile_in(parent).with_context(failed)?;
    stored.weights_alone().write_file(file.as_file_mut())?;
    Ok(file)
}

/// Whether files of these names can be written: none is there, or it may be replaced.
fn free(dir: &Path, names: &[&str], force: bool) -> Result<(), Failure> {
    match names.iter().map(|name| dir.join(name)).find(|file| !force && file.symlink_metadata().is_ok()) {
        Some(file) => Err(anyhow!("`{}` exists: --force replaces it, another -o keeps it", file.display()).into()),
        None => Ok(()),
    }
}

/// Errors of a model text are shown with their lines.
fn failure(e: ConvertError) -> Failure {
    match e {
        ConvertError::Text { sources, diagnostics } => {
            show(&diagnostics, &sources);
            misuse::shown(&diagnostics)
        }
        other => other.into(),
    }
}
