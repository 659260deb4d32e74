//! All passes, in order.
//!
//! Each is a function of its own file; [`Trace::step`] verifies what came out and times it. A broken invariant is a bug in mcc and
//! says which pass broke it.

use crate::differentiate::{self, DifferentiateError};
use crate::layout::{Counts, Cuts};
use crate::lower::{Bodies, Kernels, Lowering, Names};
use crate::offload::{self, Offload};
use crate::overlap::{self, Overlap};
use crate::partition::{self, Buffer};
use crate::pipeline::{self, Plan as Pipeline};
use crate::plan::{self, CpComm, SequenceParallel, Zero};
use crate::propagate::{self, Rows};
use crate::rematerialize::{self, Recompute};
use crate::schedule::{Kind, Order, Pass, Schedule};
use crate::tp_overlap::{self, TpOverlap};
use crate::{bucket, heads, optimize, order, pad, simplify, stashes, sums, tables, terms, tf32, widen, zero};
use ir::diag::{Diagnostic, Severity};
use ir::dim::Dim;
use ir::graph::{Graph, Param, Table};
use ir::local::{Chunk, Local};
use ir::mesh::{Axis, Mesh, Sizes};
use ir::model::{Model, Plan};
use ir::op::Op;
use ir::program::{BodyId, Call, CallSchedule, Extent, InputEntry, Job, ParamEntry, Program, Slots, Stage, TableEntry};
use ir::refine::{self, Meaning};
use ir::rewrites::{self, Graphs};
use ir::sharded::Sharded;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// How a model is split and run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub dp: u64,
    pub cp: u64,
    pub tp: u64,
    pub pp: u64,
    /// Ranks over which experts are split; a part of dp x cp x tp.
    pub ep: u64,
    /// Ranks over which each expert is split; none: tp.
    pub etp: Option<u64>,
    pub sp: SequenceParallel,
    pub cp_comm: CpComm,
    pub zero: Zero,
    /// Sequences per microbatch and data-parallel rank.
    pub micro_batch: u64,
    pub global_batch: u64,
    pub schedule: Schedule,
    /// Virtual stages of a stage; none: as many as the schedule needs, or one.
    pub vpp: Option<u64>,
    /// Microbatches in a group, of an interleaved schedule; none: as many as stages.
    pub group: Option<u64>,
    pub layout: Cuts,
    /// Vocabularies are padded to a multiple of this times the axes that split them.
    pub pad_vocab_to: u64,
    pub overlap: Overlap,
    /// Whether optimizers run on the host, in its memory.
    pub offload: Offload,
    /// Whether products of f32 factors are multiplied as tf32.
    pub tf32: bool,
    pub tp_overlap: TpOverlap,
    pub recompute: Recompute,
    pub rows: Rows,
    /// Elements with which a bucket of gradients or parameters is full; none: by the number of data-parallel ranks.
    pub bucket_size: Option<u64>,
    /// How many rows go from a rank to the experts of another at most.
    pub moe_buffer: Buffer,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            dp: 1,
            cp: 1,
            tp: 1,
            pp: 1,
            ep: 1,
            etp: None,
            sp: SequenceParallel::Off,
            cp_comm: CpComm::Ring,
            zero: Zero::None,
            micro_batch: 1,
            global_batch: 1,
            schedule: Schedule::OneFOneB,
            vpp: None,
            group: None,
            layout: Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing },
            pad_vocab_to: 1,
            overlap: Overlap::On,
            offload: Offload::Off,
            tf32: false,
            tp_overlap: TpOverlap::Off,
            recompute: Recompute::None,
            rows: Rows::Rules,
            bucket_size: None,
            moe_buffer: Buffer::Whole,
        }
    }
}

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

/// Times passes and verifies what they make.
#[derive(Default)]
struct Trace {
    times: Vec<(&'static str, Duration)>,
}

impl Trace {
    fn step<T>(&mut self, pass: &'static str, run: impl FnOnce() -> T, verify: impl FnOnce(&T) -> Result<(), String>) -> Result<T, CompileError> {
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

/// Compiles a model, elaborated for training and (without random drops) for evaluation, into a job.
///
/// # Errors
/// What the user can mend, all of it; or a broken invariant.
pub fn compile(training: Model, evaluation: Model, options: &Options) -> Result<Compiled, CompileError> {
    let mut trace = Trace::default();
    let mesh = mesh(options)?;
    let pipe = pipeline::plan(&training.graph, mesh.size(Axis::Microbatch) as u32, options).map_err(|d| CompileError::User(vec![d]))?;
    let valid = |g: &Graph| ir::verify::graph(g).map_err(|e| e.to_string());
    let Model { graph, settings, train, plan, .. } = training;
    let mut warnings = vec![];

    let graph = trace.step("elaborate", || without_outputs(graph), valid)?;
    let graph =
        trace.step("differentiate", || differentiate::differentiate(graph, &train), |g| g.as_ref().map_or(Ok(()), valid))?.map_err(no_gradient)?;
    let graph = trace.step("optimize", || optimize::optimize(graph, &train), valid)?;
    let graph = trace.step("simplify", || simplify::simplify(graph), valid)?;
    let unused = unused(&graph);
    if !unused.is_empty() {
        return Err(CompileError::User(unused));
    }
    let graph = trace.step("widen", || simplify::simplify(widen::widen(graph)), valid)?;
    let graph = trace.step("tabulate", || simplify::simplify(tables::tabulate(graph)), valid)?;
    let logical = graph.clone();
    let mut graph = graph;
    let lists = plan::lists(&plan, &graph, options.sp, options.cp_comm, options.zero);
    let padded = plan::pad_vocabularies(&mut graph, &mesh, &lists, options.pad_vocab_to);
    let graph = trace.step("pad", || simplify::simplify(pad::mask_padding(graph, &padded)), valid)?;
    let found = [
        plan::check(&graph, &mesh, &plan::lists(&plan, &graph, options.sp, options.cp_comm, Zero::None), &plan, &settings),
        plan::check_microbatches(&graph, &mesh),
    ];
    let (errors, found): (Vec<Diagnostic>, Vec<Diagnostic>) = found.into_iter().flatten().partition(|d| d.severity == Severity::Error);
    warnings.extend(found);
    if !errors.is_empty() {
        return Err(CompileError::User(errors));
    }
    if options.recompute == Recompute::Selective && graph.body.nodes.iter().all(|n| n.origin.within.is_none()) {
        warnings.push(nothing_selected(&plan));
    }
    let weights = pipe.weights();
    let graph = trace.step("terms", || terms::sum_by_stage(graph, &pipe.layout, weights), valid)?;
    let graph = trace.step("rematerialize", || rematerialize::rematerialize(graph, options.recompute, &pipe.layout), valid)?;

    let mut other = trace.step("elaborate", || without_updates(without_outputs(evaluation.graph)), valid)?;
    other = trace.step("simplify", || simplify::simplify(differentiate::sum_losses(other)), valid)?;
    other = trace.step("widen", || simplify::simplify(widen::widen(other)), valid)?;
    other = trace.step("tabulate", || simplify::simplify(tables::tabulate(other)), valid)?;
    let other_lists = plan::lists(&plan, &other, options.sp, options.cp_comm, options.zero);
    let padded = plan::pad_vocabularies(&mut other, &mesh, &other_lists, options.pad_vocab_to);
    let other = trace.step("pad", || simplify::simplify(pad::mask_padding(other, &padded)), valid)?;
    let other = trace.step("terms", || terms::sum_by_stage(other, &pipe.layout, weights), valid)?;

    // Both graphs read the same parameters and data, so they store them alike.
    let (orders, found) = order::agreed(order::choose(&graph, &mesh, &lists), &order::choose(&other, &mesh, &other_lists));
    warnings.extend(found);
    let graph = trace.step("order", || order::apply(graph, &orders), valid)?;
    let other = trace.step("order", || order::apply(other, &orders), valid)?;

    let proved = |s: &Sharded| ir::sharded::verify(s).map_err(|e| e.to_string());
    let sharded = trace.step("propagate", || propagate::propagate(graph, &mesh, &lists, options.rows), proved)?;
    // Rows at random may repeat work; they are for tests of what is computed.
    if options.rows == Rows::Rules {
        let repeated = heads::check(&sharded, &lists);
        if !repeated.is_empty() {
            return Err(CompileError::User(repeated));
        }
    }
    let (stages, locals) = locals(&mut trace, &sharded, &pipe, options)?;
    let evaluated = trace.step("propagate", || propagate::propagate(other, &mesh, &other_lists, options.rows), proved)?;
    let (evaluated_stages, evaluations) = self::locals(&mut trace, &evaluated, &pipe, options)?;
    let size = options.bucket_size.unwrap_or_else(|| bucket::default_size(options.dp));
    let shared = |both: &Vec<(Local, Local)>| {
        let valid = |(l, e): &(Local, Local)| ir::verify::local(l, &sharded).and_then(|()| ir::verify::local(e, &evaluated));
        both.iter().try_for_each(valid).map_err(|e| e.to_string())
    };
    let pairs = |l: Local| {
        let e = of_stages(&evaluations, &l).clone();
        (l, e)
    };
    let both = trace.step("zero", || zero::share_out(locals.into_iter().map(pairs).collect(), options.zero, size), shared)?;
    let (locals, evaluations): (Vec<Local>, Vec<Local>) = both.into_iter().unzip();
    let joined = |l: &Vec<Local>| l.iter().try_for_each(|l| ir::verify::local(l, &sharded).map_err(|e| e.to_string()));
    let locals: Vec<Local> = trace.step("bucket", || locals.into_iter().map(|l| bucket::join(l, size)).collect(), joined)?;
    let (locals, evaluations): (Vec<Local>, Vec<Local>) = match options.offload {
        Offload::Off => (locals, evaluations),
        Offload::Optimizer => {
            let both = locals.into_iter().zip(evaluations);
            trace.step("offload", || both.map(|(l, e)| offload::offload(l, e)).collect::<Vec<_>>(), shared)?.into_iter().unzip()
        }
    };
    let locals: Vec<Local> = trace.step("sums", || locals.into_iter().map(sums::cut).collect(), joined)?;
    let (before, after) = (Graphs { training: &stages, evaluation: &evaluated_stages }, Graphs { training: &locals, evaluation: &evaluations });
    trace.step("rewrites", || (), |()| rewrites::verify(before, after).map_err(|e| e.to_string()))?;
    let (locals, evaluations): (Vec<Local>, Vec<Local>) = match options.tf32 {
        false => (locals, evaluations),
        true => {
            let both = locals.into_iter().zip(evaluations);
            trace.step("tf32", || both.map(|(l, e)| (tf32::mark(l), tf32::mark(e))).collect::<Vec<_>>(), shared)?.into_iter().unzip()
        }
    };

    // Both graphs have tables, mostly the same.
    let mut job = describe(&sharded, options, &mesh);
    (job.settings, job.train) = (settings, train);
    let tables: Vec<u32> = evaluated.graph.tables.iter().map(|t| add_table(&mut job.tables, table(&evaluated.graph, t))).collect();
    let mut evaluation = Evaluation { stages: evaluated_stages, locals: evaluations, tables, slots: vec![] };
    let job = trace.step(
        "lower",
        || {
            lower(&mut job, &locals, &mut evaluation, &pipe.order);
            job.in_flight = ir::job::least_in_flight(&job);
            job
        },
        |job| ir::job::verify(job).map_err(|e| e.to_string()),
    )?;
    let job = match options.overlap {
        Overlap::Off => job,
        Overlap::On => trace.step("overlap", || overlap::overlap(job), |job| ir::job::verify(job).map_err(|e| e.to_string()))?,
    };
    trace.step("refine", || (), |()| refines(&job, &locals, &evaluation).map_err(|e| e.to_string()))?;
    Ok(Compiled { graph: logical, sharded, stages, locals, evaluation, order: pipe.order, job, warnings, times: trace.times })
}

/// The local graphs of all stages, and of classes of them.
fn locals(trace: &mut Trace, sharded: &Sharded, pipe: &Pipeline, options: &Options) -> Result<(Vec<Local>, Vec<Local>), CompileError> {
    let valid = |l: &[Local]| l.iter().try_for_each(|l| ir::verify::local(l, sharded).map_err(|e| e.to_string()));
    let agree = |l: &Vec<Local>| ir::exchanges::verify(l).and_then(|()| ir::parts::verify(sharded, l)).map_err(|e| e.to_string());
    let stages = trace
        .step("partition", || partition::partition(sharded, &pipe.layout, pipe.weights(), options.moe_buffer), |l| l.as_ref().map_or(Ok(()), agree))?
        .map_err(CompileError::User)?;
    let locals = trace.step("classes", || partition::classes(stages.clone()), |l| valid(l))?;
    let split = |l| tp_overlap::split(l, options.tp_overlap);
    let locals = trace.step("tp_overlap", || locals.into_iter().map(split).collect(), |l: &Vec<Local>| valid(l))?;
    Ok((stages, locals))
}

/// The graph of the same stages as another one.
fn of_stages<'a>(all: &'a [Local], other: &Local) -> &'a Local {
    let first = other.stages[0].0;
    all.iter().find(|l| l.stages.iter().any(|s| s.0 == first)).expect("invariant: evaluation covers every stage")
}

/// Named outputs are for inference; a training step does not compute what only they need.
fn without_outputs(mut graph: Graph) -> Graph {
    graph.outputs.clear();
    graph
}

/// Parameters that no stage would have.
fn unused(graph: &Graph) -> Vec<Diagnostic> {
    let used: BTreeSet<u32> = graph.body.nodes.iter().filter_map(|n| if let Op::Param(p) = n.op { Some(p) } else { None }).collect();
    let params = graph.params.iter().zip(0..).filter(|(_, k)| !used.contains(k));
    let diagnostic = |(param, _): (&Param, u32)| {
        let d = Diagnostic::error("E0507", format!("training does not use parameter `{}`", param.name));
        let d = param.span.into_iter().fold(d, |d, span| d.label(span, "declared here"));
        d.help("remove it, or let the loss depend on it")
    };
    params.map(diagnostic).collect()
}

/// Evaluation leaves states as they are.
fn without_updates(mut graph: Graph) -> Graph {
    graph.updates.clear();
    graph
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

fn no_gradient(e: DifferentiateError) -> CompileError {
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
    CompileError::User(vec![d])
}

fn mesh(o: &Options) -> Result<Mesh, CompileError> {
    let rows = o.micro_batch.saturating_mul(o.dp);
    let empty = [o.tp, o.cp, o.pp, o.ep, o.etp.unwrap_or(1)].contains(&0);
    if rows == 0 || empty || o.global_batch == 0 || !o.global_batch.is_multiple_of(rows) {
        let above = o.global_batch.max(1).checked_next_multiple_of(rows.max(1)).unwrap_or(rows);
        let d = Diagnostic::error(
            "E0208",
            format!("global batch {} does not divide into microbatches of {} on dp = {}", o.global_batch, o.micro_batch, o.dp),
        );
        return Err(CompileError::User(vec![d.help(format!("`--global-batch-size {above}` does"))]));
    }
    // A schedule is a list, and meshes are searched for factors: absurd sizes are refused before any work is done for them.
    let microbatches = o.global_batch / rows;
    let too_many = |what: &str, n: Option<u64>, help: &str| {
        let n = n.map_or("far".to_string(), |n| n.to_string());
        let d = Diagnostic::error("E0634", format!("{n} {what} are more than {MOST}"));
        Err(CompileError::User(vec![d.help(help)]))
    };
    let ranks = [o.cp, o.tp, o.pp].into_iter().try_fold(o.dp, u64::checked_mul);
    if ranks.is_none_or(|n| n > MOST) {
        return too_many("ranks", ranks, "reduce --dp, --cp, --tp or --pp");
    }
    let passes = microbatches.checked_mul(o.pp).and_then(|n| n.checked_mul(o.vpp.unwrap_or(1)));
    if passes.is_none_or(|n| n > MOST) {
        return too_many("passes of microbatches through pipeline stages", passes, "raise --micro-batch-size, or lower --global-batch-size");
    }
    let sizes = Sizes { microbatches, pp: o.pp, dp: o.dp, cp: o.cp, tp: o.tp, ep: o.ep, etp: o.etp };
    Mesh::of_sizes(&sizes).ok_or_else(|| {
        let etp = o.etp.unwrap_or(o.tp);
        let d = Diagnostic::error(
            "E0635",
            format!("ep = {} and etp = {etp} do not divide the ranks of a stage, dp x cp x tp = {}", o.ep, o.dp * o.cp * o.tp),
        );
        CompileError::User(vec![
            d.help("experts are split over the ranks that dense layers are split over: --ep times --etp must divide --dp x --cp x --tp"),
        ])
    })
}

/// Most ranks, and most passes of a step over all stages.
const MOST: u64 = 1 << 20;

fn extents(g: &Graph, dims: &[Dim]) -> Vec<Extent> {
    let extent = |d: &Dim| {
        let info = &g.body.dims[*d];
        Extent { name: info.name.clone(), size: info.logical, padded: info.size, order: info.order }
    };
    dims.iter().map(extent).collect()
}

fn table(g: &Graph, t: &Table) -> TableEntry {
    TableEntry { name: t.name.clone(), dtype: t.ty.dtype, dims: extents(g, &t.ty.dims), data: t.data.clone() }
}

/// The number of an equal table, or of a new one.
fn add_table(tables: &mut Vec<TableEntry>, t: TableEntry) -> u32 {
    let k = match tables.iter().position(|o| o.data == t.data && o.dims == t.dims && o.dtype == t.dtype) {
        Some(k) => k,
        None => {
            tables.push(t);
            tables.len() - 1
        }
    };
    k as u32
}

/// The job without its programs.
fn describe(s: &Sharded, options: &Options, mesh: &Mesh) -> Job {
    let g = &s.graph;
    let limit = |input: u32| {
        let from = g.body.values().find(|v| g.body[*v].op == Op::Input(input))?;
        g.body.values().find_map(|v| match g.body[v].op {
            Op::Gather { dim } if g.body[v].args[1] == from => Some(g.body.dims[dim].logical),
            _ => None,
        })
    };
    let mut reports = vec!["loss".to_string(), "grad_norm".to_string()];
    reports.extend(g.losses.iter().chain(&g.metrics).map(|r| r.name.clone()));
    Job {
        model: g.name.clone(),
        sources: vec![],
        settings: vec![],
        mesh: mesh.clone(),
        train: ir::model::Train::default(),
        global_batch: options.global_batch,
        microbatches: options.global_batch / (options.micro_batch * options.dp),
        in_flight: 1,
        params: g.params.iter().map(|p| ParamEntry { name: p.name.clone(), dims: extents(g, &p.ty.dims), init: p.init }).collect(),
        inputs: g
            .inputs
            .iter()
            .enumerate()
            .map(|(k, i)| InputEntry {
                name: i.name.clone(),
                dtype: i.ty.dtype,
                dims: extents(g, &i.ty.dims),
                default: i.default.clone(),
                limit: limit(k as u32),
            })
            .collect(),
        tables: g.tables.iter().map(|t| table(g, t)).collect(),
        reports,
        kernels: vec![],
        programs: vec![],
        stages: vec![],
    }
}

/// The graphs of evaluation, and how they are part of the programs.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// As they were partitioned, one per stage.
    pub stages: Vec<Local>,
    /// One per program.
    pub locals: Vec<Local>,
    /// Table of the job, per table of the graphs.
    pub tables: Vec<u32>,
    /// Per program: its parameter slot of each of the graph's.
    pub slots: Vec<Vec<u32>>,
}

impl Compiled {
    /// Verifies the programs as they are now: what every compile ends with.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn verify(&self) -> Result<(), ir::job::JobError> {
        ir::job::verify(&self.job)?;
        refines(&self.job, &self.locals, &self.evaluation)
    }
}

/// The job of other local graphs of its stages than those that were compiled, in list order: what a mistake in them comes to.
pub fn job_of(c: &Compiled, stages: Vec<Local>, order: &Order) -> Job {
    let locals: Vec<Local> = partition::classes(stages);
    let evaluations = locals.iter().map(|l| of_stages(&c.evaluation.locals, l).clone()).collect();
    job_of_classes(c, &locals, evaluations, order)
}

/// The job of other graphs of its programs, of training and of evaluation, than those that were compiled, in list order.
pub fn job_of_classes(c: &Compiled, locals: &[Local], evaluations: Vec<Local>, order: &Order) -> Job {
    let mut job = Job { kernels: vec![], programs: vec![], stages: vec![], ..c.job.clone() };
    let mut evaluation = Evaluation { locals: evaluations, slots: vec![], ..c.evaluation.clone() };
    lower(&mut job, locals, &mut evaluation, order);
    job.in_flight = ir::job::least_in_flight(&job);
    job
}

/// Every program, with every schedule it has, computes its graphs.
fn refines(job: &Job, locals: &[Local], evaluation: &Evaluation) -> Result<(), ir::job::JobError> {
    let own_tables: Vec<u32> = (0..job.tables.len() as u32).collect();
    for (class, ((local, other), other_slots)) in locals.iter().zip(&evaluation.locals).zip(&evaluation.slots).enumerate() {
        let schedules: Vec<&CallSchedule> = job.stages.iter().filter(|s| s.program as usize == class).map(|s| &s.schedule).collect();
        let slots: Vec<u32> = (0..(local.params.len() + local.buckets.len()) as u32).collect();
        let training = Meaning { local, slots: &slots, tables: &own_tables };
        let evaluation = Meaning { local: other, slots: other_slots, tables: &evaluation.tables };
        refine::check(job, &job.programs[class], &schedules, &training, &evaluation)?;
    }
    Ok(())
}

/// Lowers every class to a program and gives every stage its schedule.
fn lower(job: &mut Job, locals: &[Local], evaluation: &mut Evaluation, order: &Order) {
    let mut kernels = Kernels::default();
    let m = job.microbatches as u32;
    let own_tables: Vec<u32> = (0..job.tables.len() as u32).collect();
    let mut of_stage: Vec<Option<Stage>> = vec![None; order.stages.len()];
    let mut evaluated = vec![];
    for (local, e) in locals.iter().zip(&evaluation.locals) {
        let (first, params) = &local.stages[0];
        let names = params.iter().map(|p| job.params[*p as usize].name.clone());
        let names = names.chain((0..local.buckets.len()).map(|k| format!("bucket{k}"))).collect();
        let mut lowering = Lowering::new(&mut kernels, names, local.copied.clone(), local.buckets.clone());
        let buckets = params.len() as u32..(params.len() + local.buckets.len()) as u32;
        let slots: Vec<u32> = (0..buckets.end).collect();
        let train = lowering.add(local, &Names { slots: &slots, tables: &own_tables, prefix: "" });
        let used = e.stages.iter().find(|s| s.0 == *first).map_or(&[][..], |s| &s.1);
        let of_params: HashMap<u32, u32> = params.iter().copied().zip(0..).collect();
        let of_param = |p: &u32| *of_params.get(p).expect("invariant: a stage evaluates with the parameters that it trains");
        let slots: Vec<u32> = used.iter().map(of_param).chain(buckets).collect();
        let eval = lowering.add(e, &Names { slots: &slots, tables: &evaluation.tables, prefix: "eval_" });
        let program = lowering.finish();
        let class = job.programs.len() as u32;
        for (stage, params) in &local.stages {
            let passes = &order.stages[*stage as usize];
            let mut s = CallSchedule {
                slots: vec![],
                train: calls(&program, "zero", &train, passes, m),
                update: train.get(&Chunk::Update).map(|body| Call { body: *body, microbatch: 0 }).into_iter().collect(),
                eval: calls(&program, "eval_zero", &eval, &pipeline::forward(passes), m),
            };
            s.slots = pipeline::slots(&program, [&s.train, &s.eval], |_| 1).into_iter().map(|count| Slots { count, at: 0 }).collect();
            stashes::place(&program, &mut s);
            of_stage[*stage as usize] = Some(Stage { program: class, params: params.clone(), schedule: s });
        }
        job.programs.push(program);
        evaluated.push(slots);
    }
    evaluation.slots = evaluated;
    job.kernels = kernels.list;
    job.stages = of_stage.into_iter().map(|s| s.expect("invariant: classes cover every stage")).collect();
}

/// The calls of a step or an evaluation: sums set to zero, the prologue, the passes, what comes once after them.
fn calls(program: &Program, zero: &str, bodies: &Bodies, passes: &[Pass], microbatches: u32) -> Vec<Call> {
    let mut out = vec![];
    let once = |body: Option<BodyId>| body.map(|body| Call { body, microbatch: 0 });
    out.extend(once(program.bodies.iter().position(|b| b.name == zero).map(|k| BodyId(k as u32))));
    if let Some(body) = bodies.get(&Chunk::Prologue) {
        out.extend((0..microbatches).map(|microbatch| Call { body: *body, microbatch }));
    }
    out.extend(once(bodies.get(&Chunk::PrologueReduce).copied()));
    for pass in passes {
        let chunk = match pass.kind {
            Kind::Forward => Chunk::Forward(pass.chunk),
            Kind::Backward => Chunk::Backward(pass.chunk),
            Kind::Weight => Chunk::Weight(pass.chunk),
        };
        out.extend(bodies.get(&chunk).map(|body| Call { body: *body, microbatch: pass.microbatch }));
    }
    out.extend(once(bodies.get(&Chunk::Reduce).copied()));
    out
}
