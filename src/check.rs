//! `mcc check`.

use crate::cli::CheckArgs;
use crate::compile::{levels, request};
use crate::failure::Failure;
use crate::limits::LimitWatch;
use crate::misuse;
use crate::print::{PrintError, out};
use crate::report::{axes, count};
use crate::text::{DiagnosticFormat, ModelFile};
use codegen::Verify;
use ir::progress::Progress;

impl CheckArgs {
    /// How this command shows what is wrong.
    pub fn shown(&self) -> DiagnosticFormat {
        if self.json { DiagnosticFormat::Json } else { DiagnosticFormat::Text }
    }
}

/// Everything that `mcc compile` would say with these flags, but for what kernels add to a rank's memory.
///
/// # Errors
/// Whatever is wrong with the text or its plan; with `--json` all of it is on standard output.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let shown = args.shown();
    match (levels(&args.model, &args.plan, shown, LimitWatch::start(&args.plan.limits, shown).progress()), shown) {
        (Ok(_), DiagnosticFormat::Json) => weights(args),
        (Ok(levels), DiagnosticFormat::Text) => {
            weights(args)?;
            let (graph, job) = (&levels.compiled.graph, &levels.compiled.job);
            let ranks = job.mesh.world();
            let on = if ranks > 1 { format!(" on {ranks} ranks ({})", axes(&job.mesh)) } else { String::new() };
            let (numbers, tensors) = (count(job.parameters()), job.params.len());
            Ok(out!("{}: {numbers} parameters in {tensors} tensors, {} layers; no errors{on}\n", graph.name, graph.layers)?)
        }
        // Errors such as an unreadable text or an unknown target have no position in the text.
        (Err(Failure::Other(e)), DiagnosticFormat::Json) if e.downcast_ref::<PrintError>().is_none() => {
            shown.message(&format!("{e:#}"))?;
            Err(Failure::Reported)
        }
        (Err(e), DiagnosticFormat::Json | DiagnosticFormat::Text) => Err(e),
    }
}

/// Shows what is wrong with `weights` sections, which a compile does not read.
fn weights(args: &CheckArgs) -> Result<(), Failure> {
    let text = ModelFile::read(&args.model, args.shown())?;
    let request = request(&text, &args.plan, None, Verify::Off)?;
    // The text was elaborated a moment ago, and its errors were reported then.
    let Ok(models) = request.elaborate(&mut text.imports(), &Progress::default()) else { return Ok(()) };
    let mistakes = convert::mistakes(&models.training);
    if mistakes.is_empty() {
        return Ok(());
    }
    text.shown.show(&mistakes, &models.sources)?;
    Err(misuse::shown(&mistakes))
}
