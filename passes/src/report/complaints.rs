//! What the user can mend and no pass can say alone.

use crate::graph::differentiate::DifferentiateError;
use crate::local::chunk_logits::{LogitsChunking, WholeLogits};
use crate::report::footprint::size;
use crate::sharding::axes;
use ir::diag::{Diagnostic, Help, Severity};
use ir::graph::{Graph, Param};
use ir::model::Plan;
use ir::module::Module;
use ir::op::Op;
use ir::options::{OptionName, Options, Recompute, Zero};
use std::collections::BTreeSet;

/// Parameters that no stage would have. Those of one line of the text, as a repeated block has them, are one mistake.
pub fn unused(graph: &Graph) -> Vec<Diagnostic> {
    let used: BTreeSet<u32> = graph.body.nodes.iter().filter_map(|n| if let Op::Param(p) = n.op { Some(p) } else { None }).collect();
    let mut by_line: Vec<(&Param, u64)> = vec![];
    for (param, _) in graph.params.iter().zip(0..).filter(|(_, k)| !used.contains(k)) {
        match by_line.iter_mut().find(|(first, _)| param.span.is_some() && first.span == param.span) {
            Some((_, count)) => *count += 1,
            None => by_line.push((param, 1)),
        }
    }
    let diagnostic = |(param, count): (&Param, u64)| {
        let others = match count {
            1 => String::new(),
            _ => format!(", and {} more of the same line", count - 1),
        };
        let d = Diagnostic::error("E0507", format!("training does not use parameter `{}`{others}", param.name));
        let d = param.span.into_iter().fold(d, |d, span| d.label(span, "declared here"));
        d.help("remove it, or let the loss depend on it")
    };
    by_line.into_iter().map(diagnostic).collect()
}

/// Sizes of a step's graph, which are final, that axes do not divide; and options that do nothing for it.
///
/// # Errors
/// Those that end a compile.
pub fn sizes(m: &Module) -> Result<Vec<Diagnostic>, Vec<Diagnostic>> {
    let Module { plan, options, mesh, settings, .. } = m;
    let graph = m.training.whole.graph();
    let lists = axes::lists(plan, graph, mesh, &Options { zero: Zero::None, ..options.clone() });
    let found = [axes::check(graph, mesh, &lists, plan, settings), axes::check_microbatches(graph, mesh)];
    let (errors, mut warnings): (Vec<Diagnostic>, Vec<Diagnostic>) = found.into_iter().flatten().partition(|d| d.severity == Severity::Error);
    if options.recompute == Recompute::Selective && graph.body.nodes.iter().all(|n| n.origin.within.is_none()) {
        warnings.push(nothing_selected(plan));
    }
    if errors.is_empty() { Ok(warnings) } else { Err(errors) }
}

/// Selective recomputation of a model that calls none of the functions.
fn nothing_selected(plan: &Plan) -> Diagnostic {
    let entry = plan.get("recompute");
    let names: Vec<&str> = entry.map_or(vec!["attention"], |e| e.tiers.iter().flatten().map(String::as_str).collect());
    let mut d = Diagnostic::warning("W0641", format!("selective recomputation recomputes nothing: the model does not call `{}`", names.join("`, `")));
    if let Some(span) = entry.and_then(|e| e.span) {
        d = d.label(span, "these are what it recomputes");
    }
    d.help("name functions that the model calls: `plan { recompute: attention; }`")
}

/// W0647: logits that are large, or that were asked to be cut, and stay whole.
pub fn whole_logits(cuts: &[LogitsChunking], chunks: Option<u64>) -> Vec<Diagnostic> {
    // With a given number of chunks, small products that end in the loss count as well, so cutting one is enough.
    let fine = chunks.is_some() && cuts.iter().any(|c| c.done > 0);
    let mut whole: Vec<_> = cuts.iter().flat_map(|c| &c.whole).filter(|_| !fine).collect();
    whole.sort_by_key(|w| std::cmp::Reverse(w.bytes));
    whole.dedup_by_key(|w| (w.logits, w.by));
    let said = |w: &WholeLogits| {
        let d = Diagnostic::warning("W0647", format!("logits stay whole on each rank, {}", size(w.bytes)));
        let d = w.logits.iter().fold(d, |d, span| d.label(*span, "these"));
        let d = w.by.iter().fold(d, |d, span| d.label(*span, w.why));
        let help = Help::from("compute the loss token by token, and sums over tokens last; `").option(OptionName::LogitsChunks);
        d.help(help.and(" 1` leaves logits whole without a word"))
    };
    whole.into_iter().map(said).collect()
}

/// W0701: passes were asked for, and one has room for all rows of experts.
pub fn one_pass() -> Diagnostic {
    let help = Help::from("leave `").option(OptionName::MoePasses).and("` out, or a smaller `").option(OptionName::MoeBuffer).and("`");
    Diagnostic::warning("W0701", "one pass has room for all rows of experts that there can be: more passes do nothing").help(help)
}

/// W0801: logical graphs that were not compared with their text.
pub fn unproved(why: String) -> Diagnostic {
    let d = Diagnostic::warning("W0801", format!("gradients and rewrites of this model were not checked against its text: {why}"));
    d.help("everything below the sharded graph was; please report the text, so that this one can be checked too")
}

/// Why the loss has no gradient.
pub fn no_gradient(e: DifferentiateError) -> Vec<Diagnostic> {
    let mut d = Diagnostic::error("E0502", e.to_string());
    match e {
        DifferentiateError::NoGradient { origin, .. } => {
            if let Some(span) = origin.span {
                d = d.label(span, "a parameter reaches the loss through this");
            }
            d = d.help("wrap it in `stop_gradient(..)` if none should flow");
        }
        DifferentiateError::NoLoss => d = d.help("end the model with `loss ..;`"),
        DifferentiateError::NothingToTrain => d = d.help("leave a `param` out of `frozen: true` groups and `stop_gradient(..)`"),
    }
    vec![d]
}
