//! A compile: the passes of [`crate::table`] in order, each verified and timed.

use crate::commands::allocate::allocate;
use crate::lower::job;
use crate::table::{PASSES, Pass, Verifier, verifiers};
use crate::{partition, start};
use ir::diag::Diagnostic;
use ir::graph::Graph;
use ir::local::Local;
use ir::model::Model;
use ir::module::{GlobalGraph, Graphs, JobLevel, Level, Module};
use ir::op::DType;
use ir::options::Options;
use ir::pipeline::PassOrder;
use ir::program::Job;
use ir::progress::Progress;
use ir::sharded::Sharded;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use verify::{Invariant, Violation};

/// What a compile leaves: every level, for dumps, and the job.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Differentiated, optimized, simplified.
    pub graph: Graph,
    /// The training graph of all ranks, with reshards and a sharding for each value.
    pub sharded: Sharded,
    /// As they were partitioned, one per stage.
    pub stages: Vec<Local>,
    /// One per program.
    pub locals: Vec<Local>,
    /// Graphs of an evaluation, each a counterpart of a training graph.
    pub evaluation: Graphs,
    /// The passes of all stages.
    pub order: PassOrder,
    /// The programs of all ranks, as they are run.
    pub job: Job,
    /// What passes and verifiers warned of, in the order in which they ran.
    pub warnings: Vec<Diagnostic>,
    /// One for each pass that ran, in order.
    pub times: Vec<PassDuration>,
}

/// How long a pass took, and the verifiers after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassDuration {
    /// Name of the pass, as in [`Pass::name`].
    pub pass: &'static str,
    /// Wall time of the pass alone, without verifiers.
    pub run: Duration,
    /// The verifiers after it.
    pub verified: Vec<(&'static str, Duration)>,
}

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// Errors that the user can mend, in the model or in its options.
    #[error("the model cannot be compiled so")]
    User(Vec<Diagnostic>),
    /// A bug in mcc.
    #[error(transparent)]
    Broken(Box<CompilerBug>),
}

/// A bug in mcc, whatever the input: what a verifier or a panic says of a pass.
#[derive(Debug, thiserror::Error)]
#[error("bug in mcc: after `{pass}`: {complaint}")]
pub struct CompilerBug {
    /// Name of the pass after which it showed; `start` if it was before all passes.
    pub pass: &'static str,
    /// The broken invariant, or the panic.
    pub complaint: BugEvidence,
    /// What repeats it, if there was a module.
    pub reproducer: Option<Reproducer>,
}

/// The module that a compile began with, and the passes that it ran, up to the one that failed: passes are
/// deterministic.
#[derive(Debug)]
pub struct Reproducer {
    /// The module before its first pass.
    pub first: Module,
    /// Names of passes in the order in which they ran; the last one failed.
    pub passes: Vec<&'static str>,
}

/// What shows a bug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BugEvidence {
    /// An invariant that a verifier found broken.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// Message of a panic in a pass or a verifier.
    #[error("panic: {0}")]
    Panic(String),
}

impl BugEvidence {
    /// The invariant that does not hold.
    pub fn invariant(&self) -> Option<Invariant> {
        match self {
            BugEvidence::Violation(v) => Some(v.invariant),
            BugEvidence::Panic(_) => None,
        }
    }
}

/// Compiles a model, elaborated for training and (without random drops) for evaluation, into a job.
///
/// # Errors
/// What the user can mend, all of it; or a broken invariant.
pub fn compile(training: Model, evaluation: Model, options: &Options) -> Result<Compiled, CompileError> {
    let progress = Progress::default();
    let mut compile = Compile::new(training, evaluation, options, &progress)?;
    while compile.step()?.is_some() {}
    Ok(compile.finish())
}

/// As [`compile`], without a look of any verifier at what the passes leave: for who compares many plans, of which
/// those that are taken are compiled again.
///
/// # Errors
/// What the user can mend; or a bug in mcc that shows without verifiers.
pub fn unverified(training: Model, evaluation: Model, options: &Options) -> Result<Compiled, CompileError> {
    let progress = Progress::default();
    let mut compile = Compile { verifies: false, ..Compile::new(training, evaluation, options, &progress)? };
    while compile.step()?.is_some() {}
    Ok(compile.finish())
}

/// A compile on its way, pass by pass.
pub struct Compile<'a> {
    module: Module,
    /// Whether verifiers check the module after passes.
    verifies: bool,
    /// The initial module, from which a failure can be reproduced.
    first: Module,
    passes: std::slice::Iter<'static, Pass>,
    done: Vec<&'static Pass>,
    /// The logical graph that dumps show.
    graph: Graph,
    warnings: Vec<Diagnostic>,
    times: Vec<PassDuration>,
    progress: &'a Progress,
}

impl<'a> Compile<'a> {
    /// A compile by all passes; `progress` is told which one runs, and how many operations, kernels and commands there are.
    ///
    /// # Errors
    /// What the user can mend, or a bug in mcc.
    pub fn new(training: Model, evaluation: Model, options: &Options, progress: &'a Progress) -> Result<Compile<'a>, CompileError> {
        Compile::by(PASSES, training, evaluation, options, progress)
    }

    /// A compile by these passes.
    ///
    /// # Errors
    /// What the user can mend, or a bug in mcc.
    pub fn by(
        passes: &'static [Pass],
        training: Model,
        evaluation: Model,
        options: &Options,
        progress: &'a Progress,
    ) -> Result<Compile<'a>, CompileError> {
        let evaluation = ir::fault!("start.evaluation.drops", training.clone(), evaluation);
        let started = unwound(|| start::module(training, evaluation, options));
        let bug = |complaint| CompileError::Broken(Box::new(CompilerBug { pass: "start", complaint, reproducer: None }));
        let module = started.map_err(bug)?.map_err(CompileError::User)?;
        progress.size("operations of the model", module.training.whole.graph().body.nodes.len());
        let passes = passes.iter();
        let (first, graph) = (module.clone(), Graph::default());
        Ok(Compile { first, module, verifies: true, passes, done: vec![], graph, warnings: vec![], times: vec![], progress })
    }

    /// The module as the last pass that ran left it.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// The next pass that options ask for; none when all are done.
    pub fn next_pass(&self) -> Option<&'static Pass> {
        self.passes.clone().find(|p| (p.wanted)(&self.module.options))
    }

    /// Runs the next pass that options ask for, and its verifier; none when all are done.
    ///
    /// # Errors
    /// What the user can mend, or a bug in mcc.
    pub fn step(&mut self) -> Result<Option<&'static Pass>, CompileError> {
        let Some(pass) = self.passes.find(|p| (p.wanted)(&self.module.options)) else { return Ok(None) };
        // Dumps show the model before its sizes depend on the mesh.
        if pass.name == LOGICAL {
            self.graph = self.module.training.whole.graph().clone();
        }
        let verifiers = if self.verifies { pass.verifiers } else { &[] };
        let ran = run_with(&mut self.module, pass, verifiers, &mut self.warnings, self.progress);
        self.times.push(ran.map_err(|error| self.reproducible(error))?);
        sizes(&self.module, self.progress);
        self.done.push(pass);
        Ok(Some(pass))
    }

    /// Damages the module ([`damage`]) as if the last pass had done so, and runs its verifier.
    ///
    /// # Errors
    /// A bug, as it would be shown.
    pub fn damage(&mut self) -> Result<(), CompileError> {
        let Some(pass) = self.done.pop() else { return Ok(()) };
        damage(&mut self.module);
        verify(&self.module, pass).map_err(|error| self.reproducible(error))?;
        self.done.push(pass);
        Ok(())
    }

    /// A bug with what repeats it.
    fn reproducible(&self, error: CompileError) -> CompileError {
        let CompileError::Broken(broken) = error else { return error };
        let broken = self.blamed().unwrap_or(*broken);
        let done = self.done.iter().map(|p| p.name).take_while(|name| *name != broken.pass);
        let passes = done.chain([broken.pass]).collect();
        CompileError::Broken(Box::new(CompilerBug { reproducer: Some(Reproducer { first: self.first.clone(), passes }), ..broken }))
    }

    /// The first pass after which a verifier refuses the module. A compile runs `meaning`, `equivalence` and
    /// `lowering` once for several passes, so the pass before a refusal need not be the wrong one.
    fn blamed(&self) -> Option<CompilerBug> {
        let mut module = self.first.clone();
        for pass in &self.done {
            if unwound(|| (pass.run)(&mut module)).ok()?.is_err() {
                return None;
            }
            if let Err(complaint) = verifiers(&module).try_for_each(|v| holds(v, &module).map(|_| ())) {
                return Some(CompilerBug { pass: pass.name, complaint, reproducer: None });
            }
        }
        None
    }

    /// What all passes left.
    ///
    /// # Panics
    /// Not all were run.
    pub fn finish(self) -> Compiled {
        let Compile { module, graph, warnings, times, .. } = self;
        let Module { training, evaluation, pipeline, job, .. } = module;
        let GlobalGraph::Sharded(sharded) = training.whole else { panic!("invariant: the passes end with a job") };
        let job = job.expect("invariant: the passes end with a job");
        Compiled { graph, sharded, stages: training.stages, locals: training.locals, evaluation, order: pipeline.order, job, warnings, times }
    }
}

/// The pass before which the logical graph is that of any mesh.
const LOGICAL: &str = "pad";

/// Runs a pass and its verifier. A panic of one of them is a bug like another.
///
/// # Errors
/// What the user can mend, or a bug in mcc, without what repeats it.
pub fn run(module: &mut Module, pass: &'static Pass, warnings: &mut Vec<Diagnostic>, progress: &Progress) -> Result<PassDuration, CompileError> {
    run_with(module, pass, pass.verifiers, warnings, progress)
}

fn run_with(
    module: &mut Module,
    pass: &'static Pass,
    verifiers: &[&Verifier],
    warnings: &mut Vec<Diagnostic>,
    progress: &Progress,
) -> Result<PassDuration, CompileError> {
    progress.enter(pass.name);
    let start = Instant::now();
    let said = unwound(|| (pass.run)(module)).map_err(|complaint| broken(pass, complaint))?;
    warnings.extend(said.map_err(CompileError::User)?);
    let run = start.elapsed();
    let mut verified = vec![];
    for verifier in verifiers {
        let start = Instant::now();
        warnings.extend(holds(verifier, module).map_err(|complaint| broken(pass, complaint))?);
        verified.push((verifier.name, start.elapsed()));
    }
    Ok(PassDuration { pass: pass.name, run, verified })
}

/// Runs the verifiers of a pass on what that left.
///
/// # Errors
/// A bug in mcc, without what repeats it.
pub fn verify(module: &Module, pass: &'static Pass) -> Result<(), CompileError> {
    pass.verifiers.iter().try_for_each(|v| holds(v, module).map(|_| ())).map_err(|complaint| broken(pass, complaint))
}

/// Runs the verifiers that a module has to hold up to beside those that its pass is followed by: a compile looks at
/// some passes together, and whoever runs one alone wants to know of that one. Warnings say what could not be looked at.
///
/// # Errors
/// A bug in mcc, without what repeats it.
pub fn verify_rest(module: &Module, pass: &'static Pass) -> Result<Vec<Diagnostic>, CompileError> {
    let rest = verifiers(module).filter(|v| pass.verifiers.iter().all(|own| own.name != v.name));
    let said: Result<Vec<_>, BugEvidence> = rest.map(|v| holds(v, module)).collect();
    said.map(|w| w.concat()).map_err(|complaint| broken(pass, complaint))
}

/// Runs a verifier, of which a panic is a complaint like another.
///
/// # Errors
/// What it says.
pub fn holds(verifier: &Verifier, module: &Module) -> Result<Vec<Diagnostic>, BugEvidence> {
    unwound(|| (verifier.run)(module)).and_then(|held| held.map_err(BugEvidence::Violation))
}

fn broken(pass: &'static Pass, complaint: BugEvidence) -> CompileError {
    CompileError::Broken(Box::new(CompilerBug { pass: pass.name, complaint, reproducer: None }))
}

/// Damages a module as a bug might, for those who want to see what verifiers and reproducers are like: the last command of a program is gone, or
/// the last value of a graph has another element type.
pub fn damage(m: &mut Module) {
    if let Some(job) = &mut m.job {
        let mut bodies = job.programs.iter_mut().flat_map(|p| &mut p.bodies);
        bodies.find(|b| !b.commands.is_empty()).and_then(|b| b.commands.pop());
        return;
    }
    let Graphs { whole, stages, locals, .. } = &mut m.training;
    let body = match (locals.last_mut().or(stages.last_mut()), whole) {
        (Some(local), _) => &mut local.body,
        (None, GlobalGraph::Sharded(sharded)) => &mut sharded.graph.body,
        (None, GlobalGraph::Logical(graph)) => &mut graph.body,
    };
    if let Some(node) = body.nodes.last_mut() {
        node.ty.dtype = if node.ty.dtype == DType::F32 { DType::I32 } else { DType::F32 };
    }
}

/// The result of a function, or the message of its panic.
fn unwound<T>(run: impl FnOnce() -> T) -> Result<T, BugEvidence> {
    // This is safe to unwind, as a module that a panic left behind is not read again.
    catch_unwind(AssertUnwindSafe(run)).map_err(|said| {
        let text = said.downcast_ref::<String>().map(String::as_str).or(said.downcast_ref::<&str>().copied());
        BugEvidence::Panic(text.unwrap_or("without a word").into())
    })
}

/// Says how large a module is.
fn sizes(module: &Module, progress: &Progress) {
    match (module.level(), &module.job) {
        (Level::Commands | Level::Memory | Level::Job, Some(job)) => {
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
    pub fn verify(&self) -> Result<(), Violation> {
        verify::job::verify(&self.job)?;
        verify::lowering::verify(&self.job, JobLevel::All, &self.locals, &self.evaluation)
    }
}

/// The job of other local graphs of its stages than those that were compiled, in list order: what a mistake in them comes to.
pub fn job_of(c: &Compiled, stages: Vec<Local>, order: &PassOrder) -> Job {
    let locals: Vec<Local> = partition::classes(stages);
    let evaluations = locals.iter().map(|l| job::of_stages(&c.evaluation.locals, l).clone()).collect();
    job_of_classes(c, &locals, evaluations, order)
}

/// The job of other graphs of its programs, of training and of evaluation, than those that were compiled, in list order.
pub fn job_of_classes(c: &Compiled, locals: &[Local], evaluations: Vec<Local>, order: &PassOrder) -> Job {
    let header = Job { kernels: vec![], programs: vec![], stages: vec![], ..c.job.clone() };
    allocate(job::programs(header, locals, &Graphs { locals: evaluations, ..c.evaluation.clone() }, order))
}
