//! `mcc import` and `mcc export`.

use crate::Failure;
use crate::cli::{ExportArgs, ImportArgs};
use crate::files::{self, Wanted};
use crate::print::{note, out};
use crate::report::count;
use crate::text::show;
use convert::ConvertError;

pub fn import(args: &ImportArgs) -> Result<(), Failure> {
    files::look(&args.directory, Wanted::Checkpoint)?;
    args.model.iter().try_for_each(|text| files::look_for("--model", text, Wanted::Text))?;
    let done = match &args.model {
        Some(model) => convert::import_as(&args.directory, model, &args.define, &args.output),
        None => convert::import(&args.directory, &args.output),
    };
    let done = done.map_err(failure)?;
    for w in &done.warnings {
        note!("warning: {w}");
    }
    if !done.skipped.is_empty() {
        out!("left out, as the model does not need them: {}\n", done.skipped.join(", "))?;
    }
    for (dtype, n) in &done.widened {
        out!("widened {n} tensors of {dtype} to f32\n")?;
    }
    let text = if args.model.is_some() { String::new() } else { format!("{} and ", done.model.display()) };
    out!("{}: wrote {text}{} ({} parameters in {} tensors)\n", done.architecture, done.weights.display(), count(done.elements), done.parameters)?;
    Ok(())
}

pub fn export(args: &ExportArgs) -> Result<(), Failure> {
    files::look(&args.weights, Wanted::Weights)?;
    args.model.iter().try_for_each(|text| files::look_for("--model", text, Wanted::Text))?;
    let done = convert::export(&args.weights, args.model.as_deref(), &args.define, &args.output).map_err(failure)?;
    show(&done.warnings, &done.sources);
    out!("wrote {} tensors to {}\n", count(done.tensors as u64), args.output.display())?;
    Ok(())
}

/// Errors of a model text are shown with their lines.
fn failure(e: ConvertError) -> Failure {
    match e {
        ConvertError::Text { sources, diagnostics } => {
            show(&diagnostics, &sources);
            Failure::Reported
        }
        other => other.into(),
    }
}
