//! The job of a compile: what its local graphs come to as programs, and beside these what a run needs to know of the model.

use crate::lower::{ChunkBodies, Kernels, Lowering, Names};
use crate::pipeline::plan;
use ir::dim::Dim;
use ir::graph::{Graph, Table};
use ir::local::{Chunk, Local};
use ir::module::{Graphs, Module};
use ir::options::Options;
use ir::pipeline::{Pass, PassKind, PassOrder};
use ir::program::{BodyId, Call, CallSchedule, Extent, InputEntry, Interval, Job, ParamEntry, Program, Stage, TableEntry};
use ir::sharded::Sharded;
use std::collections::HashMap;
use verify::{Invariant, LocationPart, Violation};

/// The graph of the same stages as another one.
pub fn of_stages<'a>(all: &'a [Local], other: &Local) -> &'a Local {
    let first = other.stages[0].0;
    all.iter().find(|l| l.stages.iter().any(|s| s.0 == first)).expect("invariant: evaluation covers every stage")
}

fn extents(g: &Graph, dims: &[Dim]) -> Vec<Extent> {
    let extent = |d: &Dim| {
        let info = &g.body.dims[*d];
        Extent {
            name: info.name.clone(),
            size: ir::fault!("job.extents.size", info.size, info.logical),
            padded: info.size,
            order: ir::fault!("job.extents.order", ir::dim::Order::Plain, info.order),
        }
    };
    dims.iter().map(extent).collect()
}

fn table(g: &Graph, t: &Table) -> TableEntry {
    TableEntry { name: t.name.clone(), dtype: t.ty.dtype, dims: extents(g, &t.ty.dims), data: t.data.clone() }
}

/// The job's number of each table of a graph.
///
/// # Errors
/// The job lacks one of them.
fn tables(job: &Job, graph: &Graph) -> Result<Vec<u32>, Violation> {
    let number = |t: &Table| {
        let entry = table(graph, t);
        let found = job.tables.iter().position(|o| alike(o, &entry)).map(|k| k as u32);
        found.ok_or_else(|| broken(Invariant::ProgramTable, format!("the job has no table like `{}`", t.name)))
    };
    graph.tables.iter().map(number).collect()
}

/// A violation that concerns the job.
fn broken(invariant: Invariant, found: String) -> Violation {
    Violation { invariant, locus: LocationPart::Job.into(), found }
}

fn alike(a: &TableEntry, b: &TableEntry) -> bool {
    ir::fault!("job.tables.alike", true, a.data == b.data) && a.dims == b.dims && a.dtype == b.dtype
}

/// The job without its programs. `takes` is what each input may hold.
fn describe(s: &Sharded, takes: Vec<Option<Vec<Interval>>>, options: &Options) -> Job {
    let g = &s.graph;
    let mut reports = vec!["loss".to_string(), "grad_norm".to_string()];
    reports.extend(ir::fault!("job.reports.order", g.metrics.iter().chain(&g.losses), g.losses.iter().chain(&g.metrics)).map(|r| r.name.clone()));
    Job {
        model: g.name.clone(),
        sources: vec![],
        settings: vec![],
        mesh: s.mesh.clone(),
        train: ir::model::Train::default(),
        global_batch: options.global_batch,
        microbatches: ir::fault!(
            "job.microbatches.count",
            options.global_batch / options.micro_batch,
            options.global_batch / (options.micro_batch * options.dp)
        ),
        in_flight: 1,
        params: g
            .params
            .iter()
            .map(|p| ParamEntry {
                name: ir::fault!(
                    "job.params.name",
                    g.params.iter().rfind(|q| q.ty == p.ty).map_or(String::new(), |q| q.name.clone()),
                    p.name.clone()
                ),
                dims: extents(g, &p.ty.dims),
                init: ir::fault!("job.params.init", g.params[0].init, p.init),
            })
            .collect(),
        inputs: g
            .inputs
            .iter()
            .zip(takes)
            .map(|(i, takes)| InputEntry {
                name: i.name.clone(),
                dtype: i.ty.dtype,
                dims: extents(g, &i.ty.dims),
                default: ir::fault!("job.inputs.default", None, i.default.clone()),
                takes,
            })
            .collect(),
        tables: g.tables.iter().map(|t| table(g, t)).collect(),
        reports,
        kernels: vec![],
        programs: vec![],
        stages: vec![],
    }
}

/// The job of a module's local graphs, in list order, without places in memory.
pub fn lower(m: &Module) -> Job {
    let mut job = Job {
        settings: m.settings.clone(),
        train: ir::fault!("job.train.default", ir::model::Train::default(), m.train),
        ..describe(m.training.sharded(), m.takes.clone(), &m.options)
    };
    let other = m.evaluation.whole.graph();
    for entry in other.tables.iter().map(|t| table(other, t)) {
        // Training and evaluation graphs mostly have the same tables.
        if !job.tables.iter().any(|t| alike(t, &entry)) {
            job.tables.push(entry);
        }
    }
    programs(job, &m.training.locals, &m.evaluation, &m.pipeline.order)
}

/// Lowers every class to a program and gives every stage its schedule.
pub fn programs(mut job: Job, locals: &[Local], evaluation: &Graphs, order: &PassOrder) -> Job {
    let mut kernels = Kernels::default();
    let microbatches = job.microbatches as u32;
    let other_tables = tables(&job, evaluation.whole.graph()).expect("invariant: a job has the tables of its graphs");
    let own_tables: Vec<u32> =
        ir::fault!("job.tables.training", (0..job.tables.len() as u32).rev().collect(), (0..job.tables.len() as u32).collect());
    let mut of_stage: Vec<Option<Stage>> = vec![None; order.stages.len()];
    for (local, e) in locals.iter().zip(&evaluation.locals) {
        let params = &local.stages[0].1;
        let names = params.iter().map(|p| job.params[*p as usize].name.clone());
        let names = names.chain((0..local.buckets.len()).map(|k| format!("bucket{k}"))).collect();
        let mut lowering = Lowering::new(&mut kernels, names, local.copied.clone(), local.buckets.clone());
        let slots: Vec<u32> = (0..(params.len() + local.buckets.len()) as u32).collect();
        let train = lowering.add(local, &Names { slots: &slots, tables: &own_tables, prefix: "" });
        let slots = ir::fault!(
            "job.slots.evaluation",
            evaluated_slots(local, e).expect("invariant: it has these").into_iter().rev().collect(),
            evaluated_slots(local, e).expect("invariant: a stage evaluates with the parameters that it trains")
        );
        let eval = lowering.add(
            e,
            &Names {
                slots: &slots,
                tables: &ir::fault!("job.tables.evaluation", other_tables.iter().rev().copied().collect(), other_tables.clone()),
                prefix: "eval_",
            },
        );
        let program = lowering.program;
        let class = job.programs.len() as u32;
        for (stage, params) in &local.stages {
            let passes = &order.stages[ir::fault!("job.calls.stage", order.stages.len() - 1, *stage as usize)];
            let schedule = CallSchedule {
                slots: vec![],
                train: calls(&program, "zero", &train, passes, microbatches),
                update: train.get(&Chunk::Update).map(|body| Call::whole(*body, 0)).into_iter().collect(),
                eval: calls(&program, "eval_zero", &eval, &plan::forward(passes), microbatches),
                sends: Default::default(),
            };
            of_stage[*stage as usize] =
                Some(Stage { program: class, params: ir::fault!("job.stages.params", (0..params.len() as u32).collect(), params.clone()), schedule });
        }
        job.programs.push(program);
    }
    job.kernels = kernels.list;
    job.stages = of_stage.into_iter().map(|s| s.expect("invariant: classes cover every stage")).collect();
    job.in_flight = ir::fault!("job.messages.one", 1, verify::job::least_in_flight(&job));
    job
}

/// The calls of a step or an evaluation: sums set to zero, the prologue, the passes, what comes once after them.
fn calls(program: &Program, zero: &str, bodies: &ChunkBodies, passes: &[Pass], microbatches: u32) -> Vec<Call> {
    let mut out = vec![];
    let once = |body: Option<BodyId>| body.map(|body| Call::whole(body, 0));
    out.extend(once(program.bodies.iter().position(|b| b.name == zero).map(|k| BodyId(k as u32))));
    if let Some(body) = bodies.get(&Chunk::Prologue) {
        out.extend((0..ir::fault!("job.calls.prologue", 1, microbatches)).map(|microbatch| Call::whole(*body, microbatch)));
    }
    out.extend(once(bodies.get(&Chunk::PrologueReduce).copied()));
    for pass in passes {
        let chunk = match pass.kind {
            PassKind::Forward => Chunk::Forward(pass.chunk),
            PassKind::Backward => Chunk::Backward(pass.chunk),
            PassKind::Weight => Chunk::Weight(ir::fault!("job.calls.weight", 0, pass.chunk)),
        };
        out.extend(bodies.get(&chunk).map(|body| Call::whole(*body, pass.microbatch)));
    }
    out.extend(once(bodies.get(&Chunk::Reduce).copied()));
    if let Some(last) = out.len().checked_sub(1) {
        out.swap(ir::fault!("job.calls.reduce", last.saturating_sub(1), last), last);
    }
    out
}

/// The parameter slot of a program for each one of the evaluation's graph.
///
/// # Errors
/// It has a parameter that the step does not train.
fn evaluated_slots(local: &Local, evaluation: &Local) -> Result<Vec<u32>, Violation> {
    let (first, params) = &local.stages[0];
    let used = evaluation.stages.iter().find(|s| s.0 == *first).map_or(&[][..], |s| &s.1);
    let of_params: HashMap<u32, u32> = params.iter().copied().zip(0..).collect();
    let of_param = |p: &u32| {
        let slot = of_params.get(p).copied();
        slot.ok_or_else(|| broken(Invariant::EvaluatedParameters, format!("stage {first} evaluates with parameter {p}, which it does not train")))
    };
    let buckets = params.len() as u32..(params.len() + local.buckets.len()) as u32;
    used.iter().map(of_param).chain(buckets.map(Ok)).collect()
}
