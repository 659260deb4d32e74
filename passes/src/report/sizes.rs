//! Sizes beyond what can be addressed: the user's errors, found before anything is computed with them.
//!
//! Graphs have tensors of up to 2^53 elements, as elaboration sees to, and those of padded vocabularies are held to that here. Until arenas are checked, sums and products of their bytes
//! saturate.

use crate::report::footprint::size;
use ir::diag::{Diagnostic, Help, Span};
use ir::graph::{Graph, Value};
use ir::options::OptionName;
use ir::program::MOST_BYTES;
use ir::program::{Buffer, Content, Job, Stage};

/// Elements of a tensor, as elaboration allows them.
const MOST_ELEMENTS: u64 = 1 << 53;

/// E0302 if padding made a tensor too large.
pub fn padded(graph: &Graph) -> Vec<Diagnostic> {
    let body = &graph.body;
    let fits = |v: &Value| {
        let elements = body.dims_of(*v).iter().try_fold(1u64, |n, d| n.checked_mul(body.dims.size(*d)));
        elements.is_some_and(|n| n <= MOST_ELEMENTS)
    };
    let Some(v) = body.values().find(|v| !fits(v)) else { return vec![] };
    let dims: Vec<String> = body.dims_of(v).iter().map(|d| format!("{} = {}", body.dims.name(*d), body.dims.size(*d))).collect();
    let text = format!("with padded vocabularies a tensor [{}] has more than {MOST_ELEMENTS} elements", dims.join(", "));
    let d = Diagnostic::error("E0302", text).help(Help::from("lower ").option(OptionName::PadVocabTo));
    vec![match body[v].origin.span {
        Some(span) => d.label(span, "this tensor"),
        None => d,
    }]
}

/// E0644 if the memory of a rank cannot be addressed, with the largest of its tensors. `graph` is what was sharded.
pub fn addressable(job: &Job, graph: &Graph) -> Vec<Diagnostic> {
    let too_large = |s: &&Stage| total(job, s) > MOST_BYTES;
    let Some(stage) = job.stages.iter().find(too_large) else { return vec![] };
    let program = &job.programs[stage.program as usize];
    let copies = |b: &Buffer| program.stash(b).map_or(1, |(stash, _)| u64::from(stage.schedule.slots[stash].count));
    let bytes = |b: &&Buffer| b.bytes().saturating_mul(copies(b));
    let text = format!("a rank needs {}, which is more than the {} that can be addressed", at_least(total(job, stage)), size(MOST_BYTES));
    let d = Diagnostic::error("E0644", text).help("smaller sizes or microbatches, or more ranks to split them over");
    let Some(largest) = program.buffers.iter().max_by_key(bytes) else { return vec![d] };
    let dims: Vec<String> = largest.dims.iter().map(|(name, size)| format!("{name} = {size}")).collect();
    let text = match copies(largest) {
        1 => format!("[{}] of {}: {}", dims.join(", "), largest.dtype.name(), size(largest.bytes())),
        slots => format!("[{}] of {}, for {slots} microbatches in flight: {}", dims.join(", "), largest.dtype.name(), at_least(bytes(&largest))),
    };
    let span = largest.origin.as_ref().and_then(|o| o.span).or_else(|| declared(graph, stage, largest));
    vec![match span {
        Some(span) => d.label(span, format!("its largest tensor: {text}")),
        None => d.note(format!("its largest tensor is `{}`: {text}", largest.name)),
    }]
}

/// Where the parameter of a buffer is declared.
fn declared(graph: &Graph, stage: &Stage, buffer: &Buffer) -> Option<Span> {
    match &buffer.content {
        Content::Param { slot, .. } | Content::State { slot, .. } => graph.params.get(*stage.params.get(*slot as usize)? as usize)?.span,
        Content::Table { .. } | Content::Accumulator | Content::Activation => None,
    }
}

/// Bytes of all arenas of a stage.
fn total(job: &Job, stage: &Stage) -> u64 {
    stage.schedule.arena_bytes(&job.programs[stage.program as usize]).into_iter().fold(0, u64::saturating_add)
}

/// Sums that saturate say so.
fn at_least(bytes: u64) -> String {
    if bytes == u64::MAX { format!("more than {}", size(bytes)) } else { size(bytes) }
}
