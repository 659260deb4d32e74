//! All passes, in order.
//!
//! Each is a function of its own file; [`Trace::step`] verifies what came out and times it. A broken invariant is a bug in mcc and
//! says which pass broke it.
//!
//! A step and an evaluation are graphs of their own that go the same way, as far as they have the same to do: first as if one rank did all,
//! then sharded, then as local graphs of stages and of their classes, and at last in one job of programs that do both.

mod complaints;
mod job;
mod options;

pub use job::{Evaluation, job_of, job_of_classes};
pub use options::ranks;

use crate::commands::overlap;
use crate::graph::accumulate_f32;
use crate::graph::differentiate;
use crate::graph::fold_constants;
use crate::graph::indices;
use crate::graph::optimize;
use crate::graph::pad;
use crate::graph::rematerialize;
use crate::graph::simplify;
use crate::graph::stage_sums;
use crate::local::bucket;
use crate::local::offload;
use crate::local::split_reduction;
use crate::local::tf32;
use crate::local::tp_overlap;
use crate::local::zero;
use crate::partition;
use crate::pipeline::plan;
use crate::report::sizes;
use crate::sharding::axes::{self, Lists};
use crate::sharding::check_cp;
use crate::sharding::propagate;
use crate::sharding::zigzag;
use ir::diag::{Diagnostic, Severity};
use ir::graph::Graph;
use ir::local::Local;
use ir::mesh::{Axis, Mesh};
use ir::model::{Model, Plan, Train};
use ir::options::Options;
use ir::options::{Offload, Overlap, Recompute, Rows, Zero};
use ir::pipeline::Order;
use ir::pipeline::Pipeline;
use ir::program::Job;
use ir::progress::Progress;
use ir::sharded::Sharded;
use std::time::{Duration, Instant};
use verify::equivalence::{self, Graphs};

/// What a compile leaves: every level, for dumps, and the job.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Differentiated, optimized, simplified.
    pub graph: Graph,
    pub sharded: Sharded,
    /// As they were partitioned, one per stage.
    pub stages: Vec<Local>,
    /// One per program.
    pub locals: Vec<Local>,
    pub evaluation: Evaluation,
    /// The passes of all stages.
    pub order: Order,
    pub job: Job,
    pub warnings: Vec<Diagnostic>,
    /// Seconds of each pass.
    pub times: Vec<(&'static str, Duration)>,
}

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error("the model cannot be compiled so")]
    User(Vec<Diagnostic>),
    /// A verifier's word: a bug in mcc, whatever the input.
    #[error("bug in mcc: after `{pass}`: {text}")]
    Broken { pass: &'static str, text: String },
}

/// Times passes, says which one runs, and verifies what they make.
struct Trace<'a> {
    progress: &'a Progress,
    times: Vec<(&'static str, Duration)>,
}

impl Trace<'_> {
    fn step<T>(&mut self, pass: &'static str, run: impl FnOnce() -> T, verify: impl FnOnce(&T) -> Result<(), String>) -> Result<T, CompileError> {
        self.progress.enter(pass);
        let start = Instant::now();
        let out = run();
        verify(&out).map_err(|text| CompileError::Broken { pass, text })?;
        let took = start.elapsed();
        match self.times.iter_mut().find(|t| t.0 == pass) {
            Some(t) => t.1 += took,
            None => self.times.push((pass, took)),
        }
        Ok(out)
    }
}

/// What passes go by beside what they work on.
struct Given<'a> {
    options: &'a Options,
    plan: &'a Plan,
    mesh: &'a Mesh,
    pipe: &'a Pipeline,
}

/// Local graphs of a step, each with that of an evaluation of the same stages.
type Pairs = Vec<(Local, Local)>;

/// Compiles a model, elaborated for training and (without random drops) for evaluation, into a job.
///
/// # Errors
/// What the user can mend, all of it; or a broken invariant.
pub fn compile(training: Model, evaluation: Model, options: &Options) -> Result<Compiled, CompileError> {
    compile_watched(training, evaluation, options, &Progress::default())
}

/// As [`compile`]; says meanwhile which pass runs, and how many operations, kernels and commands there are.
///
/// # Errors
/// As [`compile`].
pub fn compile_watched(training: Model, evaluation: Model, options: &Options, progress: &Progress) -> Result<Compiled, CompileError> {
    let mut trace = Trace { progress, times: vec![] };
    let mesh = options::mesh(options)?;
    let pipe = plan::plan(&training.graph, mesh.size(Axis::Microbatch) as u32, options).map_err(|d| CompileError::User(vec![d]))?;
    let Model { graph, settings, train, plan, .. } = training;
    let given = Given { options, plan: &plan, mesh: &mesh, pipe: &pipe };

    progress.size("operations of the model", graph.body.nodes.len());
    let logical = training_graph(&mut trace, graph, &train)?;
    progress.size("operations of a step", logical.body.nodes.len());
    let (graph, lists) = padded(&mut trace, &given, logical.clone())?;
    let mut warnings = checked(&given, &graph, &settings)?;
    let graph = by_stage(&mut trace, &pipe, graph)?;
    // Copies are ops of the backward pass like others: whoever comes later need not know of them.
    let graph = trace.step("rematerialize", || rematerialize::rematerialize(graph, options.recompute, &pipe.layout), valid)?;

    let other = evaluation_graph(&mut trace, evaluation.graph)?;
    let indices = trace.step("indices", || indices::indices(&logical).and(indices::indices(&other)), |_| Ok(()))?;
    warnings.extend(indices.warnings);
    let (other, other_lists) = padded(&mut trace, &given, other)?;
    let other = by_stage(&mut trace, &pipe, other)?;

    // Both graphs read the same parameters and data, so they store them alike.
    let (orders, found) = zigzag::agreed(zigzag::choose(&graph, &mesh, &lists), &zigzag::choose(&other, &mesh, &other_lists));
    warnings.extend(found);
    let graph = trace.step("order", || zigzag::apply(graph, &orders), valid)?;
    let other = trace.step("order", || zigzag::apply(other, &orders), valid)?;

    let proved = |s: &Sharded| verify::sharded::verify(s).map_err(|e| e.to_string());
    let sharded = trace.step("propagate", || propagate::propagate(graph, &mesh, &lists, options.rows), proved)?;
    // Rows at random may repeat work; they are for tests of what is computed.
    if options.rows == Rows::Rules {
        none(check_cp::check(&sharded, &lists))?;
    }
    let (stages, locals) = partitioned(&mut trace, &given, &sharded)?;
    progress.size("operations of all stages", stages.iter().map(|l| l.body.nodes.len()).sum());
    let evaluated = trace.step("propagate", || propagate::propagate(other, &mesh, &other_lists, options.rows), proved)?;
    let (evaluated_stages, evaluations) = partitioned(&mut trace, &given, &evaluated)?;

    let pairs = locals.into_iter().map(|l| {
        let e = job::of_stages(&evaluations, &l).clone();
        (l, e)
    });
    let before = Graphs { training: &stages, evaluation: &evaluated_stages };
    let pairs = rewritten(&mut trace, options, pairs.collect(), [&sharded, &evaluated], before)?;
    let (locals, evaluations): (Vec<Local>, Vec<Local>) = pairs.into_iter().unzip();

    let mut job = Job { settings, train, ..job::describe(&sharded, indices.takes, options) };
    let tables = job::add_tables(&mut job, &evaluated.graph);
    let mut evaluation = Evaluation { stages: evaluated_stages, locals: evaluations, tables, slots: vec![] };
    let fits = |job: Job| -> Result<Job, Vec<Diagnostic>> {
        let found = sizes::addressable(&job, &sharded.graph);
        if found.is_empty() { Ok(job) } else { Err(found) }
    };
    let sound = |job: &Result<Job, _>| job.as_ref().map_or(Ok(()), |job| verify::job::verify(job).map_err(|e| e.to_string()));
    let job = trace.step("lower", || fits(job::lower(job, &locals, &mut evaluation, &pipe.order)), sound)?.map_err(CompileError::User)?;
    progress.size("kernels", job.kernels.len());
    progress.size("commands", job.programs.iter().flat_map(|p| &p.bodies).map(|b| b.commands.len()).sum());
    // Of commands, not of values: what may run at the same time follows from the bytes that commands touch.
    let job = match options.overlap {
        Overlap::Off => job,
        Overlap::On => trace.step("overlap", || fits(overlap::overlap(job)), sound)?.map_err(CompileError::User)?,
    };
    trace.step("refine", || (), |()| job::refines(&job, &locals, &evaluation).map_err(|e| e.to_string()))?;
    Ok(Compiled { graph: logical, sharded, stages, locals, evaluation, order: pipe.order, job, warnings, times: trace.times })
}

/// The graph of a step. Its backward pass and its update are ops like those of the model, appended before anything is split: so they are sharded,
/// verified and fused by the rules for these.
fn training_graph(trace: &mut Trace<'_>, graph: Graph, train: &Train) -> Result<Graph, CompileError> {
    let graph = trace.step("elaborate", || without_outputs(graph), valid)?;
    let graph = trace.step("differentiate", || differentiate::differentiate(graph, train), |g| g.as_ref().map_or(Ok(()), valid))?;
    let graph = graph.map_err(complaints::no_gradient)?;
    let graph = trace.step("optimize", || optimize::optimize(graph, train), valid)?;
    let graph = trace.step("simplify", || simplify::simplify(graph), valid)?;
    none(complaints::unused(&graph))?;
    normalized(trace, graph)
}

/// The graph of an evaluation: losses alone.
fn evaluation_graph(trace: &mut Trace<'_>, graph: Graph) -> Result<Graph, CompileError> {
    let graph = trace.step("elaborate", || without_updates(without_outputs(graph)), valid)?;
    let graph = trace.step("simplify", || simplify::simplify(differentiate::sum_losses(graph)), valid)?;
    normalized(trace, graph)
}

/// What both graphs are before anything depends on ranks: sums that are wanted in f32 are not rounded, and what follows from constants alone is a table.
fn normalized(trace: &mut Trace<'_>, graph: Graph) -> Result<Graph, CompileError> {
    let graph = trace.step("widen", || simplify::simplify(accumulate_f32::widen(graph)), valid)?;
    trace.step("tabulate", || simplify::simplify(fold_constants::tabulate(graph)), valid)
}

/// Gives padded vocabularies the sizes that the mesh asks for. Beside the graph: which of its dims each axis may split.
fn padded(trace: &mut Trace<'_>, given: &Given, mut graph: Graph) -> Result<(Graph, Lists), CompileError> {
    let options = given.options;
    let lists = axes::lists(given.plan, &graph, options.sp, options.cp_comm, options.zero);
    let padded = axes::pad_vocabularies(&mut graph, given.mesh, &lists, options.pad_vocab_to);
    none(sizes::padded(&graph))?;
    let graph = trace.step("pad", || simplify::simplify(pad::mask_padding(graph, &padded)), valid)?;
    Ok((graph, lists))
}

/// Warnings about the sizes of a step's graph, which are final, and about options that do nothing for it.
fn checked(given: &Given, graph: &Graph, settings: &[(String, String)]) -> Result<Vec<Diagnostic>, CompileError> {
    let Given { options, plan, mesh, .. } = given;
    let lists = axes::lists(plan, graph, options.sp, options.cp_comm, Zero::None);
    let found = [axes::check(graph, mesh, &lists, plan, settings), axes::check_microbatches(graph, mesh)];
    let (errors, mut warnings): (Vec<Diagnostic>, Vec<Diagnostic>) = found.into_iter().flatten().partition(|d| d.severity == Severity::Error);
    none(errors)?;
    if options.recompute == Recompute::Selective && graph.body.nodes.iter().all(|n| n.origin.within.is_none()) {
        warnings.push(complaints::nothing_selected(plan));
    }
    Ok(warnings)
}

/// After the last `simplify`, which makes sums of sums one.
fn by_stage(trace: &mut Trace<'_>, pipe: &Pipeline, graph: Graph) -> Result<Graph, CompileError> {
    trace.step("terms", || stage_sums::sum_by_stage(graph, &pipe.layout, pipe.weights()), valid)
}

/// The local graphs of all stages, and of classes of them.
fn partitioned(trace: &mut Trace<'_>, given: &Given, sharded: &Sharded) -> Result<(Vec<Local>, Vec<Local>), CompileError> {
    let Given { options, pipe, .. } = given;
    let valid = |l: &Vec<Local>| l.iter().try_for_each(|l| verify::partition::local::verify(l, sharded).map_err(|e| e.to_string()));
    let agree =
        |l: &Vec<Local>| verify::partition::exchanges::verify(l).and_then(|()| verify::partition::verify(sharded, l)).map_err(|e| e.to_string());
    let partition = || partition::partition(sharded, &pipe.layout, pipe.weights(), options.moe_buffer);
    let stages = trace.step("partition", partition, |l| l.as_ref().map_or(Ok(()), agree))?.map_err(CompileError::User)?;
    let locals = trace.step("classes", || partition::classes(stages.clone()), valid)?;
    let split = |l| tp_overlap::split(l, options.tp_overlap);
    let locals = trace.step("tp_overlap", || locals.into_iter().map(split).collect(), valid)?;
    Ok((stages, locals))
}

/// The passes over local graphs of classes, which keep what graphs compute as they were partitioned; that is proved of all of them together. `of` is
/// what the graphs of steps, and what those of evaluations, are parts of.
fn rewritten(trace: &mut Trace<'_>, options: &Options, pairs: Pairs, of: [&Sharded; 2], before: Graphs) -> Result<Pairs, CompileError> {
    let valid = |l: &Local, of| verify::partition::local::verify(l, of).map_err(|e| e.to_string());
    let steps = |pairs: &Pairs| pairs.iter().try_for_each(|(l, _)| valid(l, of[0]));
    let both = |pairs: &Pairs| pairs.iter().try_for_each(|(l, e)| valid(l, of[0]).and_then(|()| valid(e, of[1])));
    let each = |pairs: Pairs, pass: &dyn Fn(Local, Local) -> (Local, Local)| -> Pairs { pairs.into_iter().map(|(l, e)| pass(l, e)).collect() };
    let size = options.bucket_size.unwrap_or_else(|| bucket::default_size(options.dp));
    // Shared out first: what is in buckets of parameters is reduced and gathered as one already.
    let pairs = trace.step("zero", || zero::share_out(pairs, options.zero, size), both)?;
    let pairs = trace.step("bucket", || each(pairs, &|l, e| (bucket::join(l, size), e)), steps)?;
    // Updates move as they are by now: by themselves, or a bucket of them as one.
    let pairs = match options.offload {
        Offload::Off => pairs,
        Offload::Optimizer => trace.step("offload", || each(pairs, &offload::offload), both)?,
    };
    // Of what is in no flat bucket by now: sums of parts of those stay as they are.
    let pairs = trace.step("sums", || each(pairs, &|l, e| (split_reduction::cut(l), split_reduction::cut(e))), both)?;
    let (locals, evaluations): (Vec<Local>, Vec<Local>) = pairs.into_iter().unzip();
    let after = Graphs { training: &locals, evaluation: &evaluations };
    trace.step("rewrites", || (), |()| equivalence::verify(before, after).map_err(|e| e.to_string()))?;
    let pairs = locals.into_iter().zip(evaluations).collect();
    // After the proof, to which sums are those of real numbers.
    if options.tf32 { trace.step("tf32", || each(pairs, &|l, e| (tf32::mark(l), tf32::mark(e))), both) } else { Ok(pairs) }
}

fn valid(g: &Graph) -> Result<(), String> {
    verify::graph::verify(g).map_err(|e| e.to_string())
}

/// Complaints that end a compile, if there are any.
fn none(complaints: Vec<Diagnostic>) -> Result<(), CompileError> {
    if complaints.is_empty() { Ok(()) } else { Err(CompileError::User(complaints)) }
}

/// Named outputs are for inference; a training step does not compute what only they need.
fn without_outputs(mut graph: Graph) -> Graph {
    graph.outputs.clear();
    graph
}

/// Evaluation leaves states as they are.
fn without_updates(mut graph: Graph) -> Graph {
    graph.updates.clear();
    graph
}

impl Compiled {
    /// Verifies the programs as they are now: what every compile ends with.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn verify(&self) -> Result<(), verify::job::JobError> {
        verify::job::verify(&self.job)?;
        job::refines(&self.job, &self.locals, &self.evaluation)
    }
}
