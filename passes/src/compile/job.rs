//! The job of a compile: what its local graphs come to as programs, and beside these what a run needs to know of the model.

use super::Compiled;
use crate::commands::stash_slots;
use crate::lower::{Bodies, Kernels, Lowering, Names};
use crate::partition;
use crate::pipeline::plan;
use ir::dim::Dim;
use ir::graph::{Graph, Table};
use ir::local::{Chunk, Local};
use ir::options::Options;
use ir::pipeline::{Kind, Order, Pass};
use ir::program::{BodyId, Call, CallSchedule, Extent, InputEntry, Interval, Job, ParamEntry, Program, Slots, Stage, TableEntry};
use ir::sharded::Sharded;
use std::collections::HashMap;
use verify::lowering::{self, Meaning};

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

/// The graph of the same stages as another one.
pub(super) fn of_stages<'a>(all: &'a [Local], other: &Local) -> &'a Local {
    let first = other.stages[0].0;
    all.iter().find(|l| l.stages.iter().any(|s| s.0 == first)).expect("invariant: evaluation covers every stage")
}

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

/// The job's number of each table of another graph, which has mostly the same.
pub(super) fn add_tables(job: &mut Job, other: &Graph) -> Vec<u32> {
    other.tables.iter().map(|t| add_table(&mut job.tables, table(other, t))).collect()
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

/// The job without its programs. `takes` is what each input may hold.
pub(super) fn describe(s: &Sharded, takes: Vec<Option<Vec<Interval>>>, options: &Options) -> Job {
    let g = &s.graph;
    let mut reports = vec!["loss".to_string(), "grad_norm".to_string()];
    reports.extend(g.losses.iter().chain(&g.metrics).map(|r| r.name.clone()));
    Job {
        model: g.name.clone(),
        sources: vec![],
        settings: vec![],
        mesh: s.mesh.clone(),
        train: ir::model::Train::default(),
        global_batch: options.global_batch,
        microbatches: options.global_batch / (options.micro_batch * options.dp),
        in_flight: 1,
        params: g.params.iter().map(|p| ParamEntry { name: p.name.clone(), dims: extents(g, &p.ty.dims), init: p.init }).collect(),
        inputs: g
            .inputs
            .iter()
            .zip(takes)
            .map(|(i, takes)| InputEntry { name: i.name.clone(), dtype: i.ty.dtype, dims: extents(g, &i.ty.dims), default: i.default.clone(), takes })
            .collect(),
        tables: g.tables.iter().map(|t| table(g, t)).collect(),
        reports,
        kernels: vec![],
        programs: vec![],
        stages: vec![],
    }
}

/// Lowers every class to a program and gives every stage its schedule.
pub(super) fn lower(mut job: Job, locals: &[Local], evaluation: &mut Evaluation, order: &Order) -> Job {
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
                eval: calls(&program, "eval_zero", &eval, &plan::forward(passes), m),
            };
            s.slots = stash_slots::slots(&program, [&s.train, &s.eval], |_| 1).into_iter().map(|count| Slots { count, at: 0 }).collect();
            stash_slots::place(&program, &mut s);
            of_stage[*stage as usize] = Some(Stage { program: class, params: params.clone(), schedule: s });
        }
        job.programs.push(program);
        evaluated.push(slots);
    }
    evaluation.slots = evaluated;
    job.kernels = kernels.list;
    job.stages = of_stage.into_iter().map(|s| s.expect("invariant: classes cover every stage")).collect();
    job.in_flight = verify::job::least_in_flight(&job);
    job
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

/// Every program, with every schedule it has, computes its graphs.
pub(super) fn refines(job: &Job, locals: &[Local], evaluation: &Evaluation) -> Result<(), verify::job::JobError> {
    let own_tables: Vec<u32> = (0..job.tables.len() as u32).collect();
    for (class, ((local, other), other_slots)) in locals.iter().zip(&evaluation.locals).zip(&evaluation.slots).enumerate() {
        let schedules: Vec<&CallSchedule> = job.stages.iter().filter(|s| s.program as usize == class).map(|s| &s.schedule).collect();
        let slots: Vec<u32> = (0..(local.params.len() + local.buckets.len()) as u32).collect();
        let training = Meaning { local, slots: &slots, tables: &own_tables };
        let evaluation = Meaning { local: other, slots: other_slots, tables: &evaluation.tables };
        lowering::check(job, &job.programs[class], &schedules, &training, &evaluation)?;
    }
    Ok(())
}

/// The job of other local graphs of its stages than those that were compiled, in list order: what a mistake in them comes to.
pub fn job_of(c: &Compiled, stages: Vec<Local>, order: &Order) -> Job {
    let locals: Vec<Local> = partition::classes(stages);
    let evaluations = locals.iter().map(|l| of_stages(&c.evaluation.locals, l).clone()).collect();
    job_of_classes(c, &locals, evaluations, order)
}

/// The job of other graphs of its programs, of training and of evaluation, than those that were compiled, in list order.
pub fn job_of_classes(c: &Compiled, locals: &[Local], evaluations: Vec<Local>, order: &Order) -> Job {
    let job = Job { kernels: vec![], programs: vec![], stages: vec![], ..c.job.clone() };
    let mut evaluation = Evaluation { locals: evaluations, slots: vec![], ..c.evaluation.clone() };
    lower(job, locals, &mut evaluation, order)
}
