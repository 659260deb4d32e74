//! A compile: the passes of [`crate::table`] in order, each verified and timed.

use crate::lower::job;
use crate::table::{PASSES, Pass};
use crate::{partition, start};
use ir::diag::Diagnostic;
use ir::graph::Graph;
use ir::local::Local;
use ir::model::Model;
use ir::module::{Graphs, Level, Module, Whole};
use ir::options::Options;
use ir::pipeline::Order;
use ir::program::Job;
use ir::progress::Progress;
use ir::sharded::Sharded;
use std::time::{Duration, Instant};

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
    pub evaluation: Graphs,
    /// The passes of all stages.
    pub order: Order,
    pub job: Job,
    pub warnings: Vec<Diagnostic>,
    pub times: Vec<Took>,
}

/// How long a pass took, and its verifier after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    pub pass: &'static str,
    pub run: Duration,
    pub verifier: &'static str,
    pub verify: Duration,
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
    let mut module = start::module(training, evaluation, options).map_err(CompileError::User)?;
    progress.size("operations of the model", module.training.whole.graph().body.nodes.len());
    let (mut warnings, mut times, mut graph) = (vec![], vec![], None);
    for pass in PASSES.iter().filter(|p| (p.wanted)(options)) {
        // What dumps show as the model is what it is before its sizes depend on ranks.
        if pass.name == LOGICAL {
            graph = Some(module.training.whole.graph().clone());
        }
        let took = step(&mut module, pass, &mut warnings, progress)?;
        sizes(&module, progress);
        times.push(took);
    }
    let Module { training, evaluation, pipeline, job, .. } = module;
    let Whole::Sharded(sharded) = training.whole else { unreachable!("invariant: the passes end with a job") };
    let (graph, job) = (graph.unwrap_or_default(), job.expect("invariant: the passes end with a job"));
    Ok(Compiled { graph, sharded, stages: training.stages, locals: training.locals, evaluation, order: pipeline.order, job, warnings, times })
}

/// The pass before which the logical graph is that of any mesh.
const LOGICAL: &str = "pad";

/// Runs a pass and its verifier.
///
/// # Errors
/// What the user can mend, or a broken invariant.
pub fn step(module: &mut Module, pass: &Pass, warnings: &mut Vec<Diagnostic>, progress: &Progress) -> Result<Took, CompileError> {
    progress.enter(pass.name);
    let start = Instant::now();
    warnings.extend((pass.run)(module).map_err(CompileError::User)?);
    let run = start.elapsed();
    let start = Instant::now();
    (pass.verifier.run)(module).map_err(|text| CompileError::Broken { pass: pass.name, text })?;
    Ok(Took { pass: pass.name, run, verifier: pass.verifier.name, verify: start.elapsed() })
}

/// Says how large a module is.
fn sizes(module: &Module, progress: &Progress) {
    match (module.level(), &module.job) {
        (Level::Job, Some(job)) => {
            progress.size("kernels", job.kernels.len());
            progress.size("commands", job.programs.iter().flat_map(|p| &p.bodies).map(|b| b.commands.len()).sum());
        }
        (Level::Local, _) => progress.size("operations of all stages", module.training.stages.iter().map(|l| l.body.nodes.len()).sum()),
        _ => progress.size("operations of a step", module.training.whole.graph().body.nodes.len()),
    }
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

/// The job of other local graphs of its stages than those that were compiled, in list order: what a mistake in them comes to.
pub fn job_of(c: &Compiled, stages: Vec<Local>, order: &Order) -> Job {
    let locals: Vec<Local> = partition::classes(stages);
    let evaluations = locals.iter().map(|l| job::of_stages(&c.evaluation.locals, l).clone()).collect();
    job_of_classes(c, &locals, evaluations, order)
}

/// The job of other graphs of its programs, of training and of evaluation, than those that were compiled, in list order.
pub fn job_of_classes(c: &Compiled, locals: &[Local], evaluations: Vec<Local>, order: &Order) -> Job {
    let header = Job { kernels: vec![], programs: vec![], stages: vec![], ..c.job.clone() };
    job::programs(header, locals, &Graphs { locals: evaluations, ..c.evaluation.clone() }, order)
}
