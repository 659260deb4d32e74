//! `mcc check`.

use crate::cli::CheckArgs;
use crate::compile::levels;
use crate::failure::Failure;
use crate::limits::Watch;
use crate::print::{PrintError, out};
use crate::report::{axes, count};
use crate::text::Shown;

impl CheckArgs {
    /// How this command shows what is wrong.
    pub fn shown(&self) -> Shown {
        if self.json { Shown::Json } else { Shown::Text }
    }
}

/// Everything that `mcc compile` would say with these flags, but for what kernels add to a rank's memory.
///
/// # Errors
/// Whatever is wrong with the text or its plan; with `--json` all of it is on standard output.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let shown = args.shown();
    match (levels(&args.model, &args.plan, shown, Watch::start(&args.plan.limits, shown).progress()), shown) {
        (Ok(_), Shown::Json) => Ok(()),
        (Ok(levels), Shown::Text) => {
            let (graph, job) = (&levels.compiled.graph, &levels.compiled.job);
            let ranks = job.mesh.world();
            let on = if ranks > 1 { format!(" on {ranks} ranks ({})", axes(&job.mesh)) } else { String::new() };
            let (numbers, tensors) = (count(job.parameters()), job.params.len());
            Ok(out!("{}: {numbers} parameters in {tensors} tensors, {} layers; no errors{on}\n", graph.name, graph.layers)?)
        }
        // A text that cannot be read, a target that there is not: errors without a place.
        (Err(Failure::Other(e)), Shown::Json) if e.downcast_ref::<PrintError>().is_none() => {
            shown.message(&format!("{e:#}"))?;
            Err(Failure::Reported)
        }
        (Err(e), Shown::Json | Shown::Text) => Err(e),
    }
}
