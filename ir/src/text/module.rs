//! The text form of a module: all that passes go by and work on, at any level.

use super::body::{mesh, row_number, span};
use super::graph::graph;
use super::io::{Hints, Io, Result};
use super::local::{blank_local, local};
use super::program::{blank_job, intervals, job, settings, train};
use super::sharded::{blank_sharded, sharded};
use crate::graph::Graph;
use crate::local::Local;
use crate::mesh::Mesh;
use crate::model::{Plan, PlanEntry, Train};
use crate::module::{GlobalGraph, Graphs, JobLevel, Module};
use crate::options::{
    ActivationOffload, Counts, CpComm, Cuts, MemoryOrder, MoeBuffer, Offload, Options, Overlap, ParamOffload, Recompute, RowChoice, SequenceParallel,
    SplitK, TpOverlap, Zero,
};
use crate::pipeline::{Layout, Pass, PassKind, PassOrder, Pipeline, Schedule, StagePlacement};
use crate::program::Interval;
use crate::tiles::Generation;

pub(super) fn blank_module() -> Module {
    Module {
        settings: vec![],
        asks_training: false,
        train: Train::default(),
        plan: Plan::default(),
        options: Options::default(),
        mesh: Mesh { subs: vec![] },
        pipeline: one_stage(),
        takes: vec![],
        training: Graphs::new(Graph::default()),
        evaluation: Graphs::new(Graph::default()),
        job: None,
        settled: JobLevel::default(),
    }
}

/// All layers on one stage, one microbatch.
fn one_stage() -> Pipeline {
    let layout = Layout { stages: 1, chunks: 1, placement: StagePlacement::Interleaved, embedding: 0, loss: 0, of_layer: vec![] };
    let pass = |kind| Pass { kind, chunk: 0, microbatch: 0 };
    Pipeline {
        layout,
        order: PassOrder { placement: StagePlacement::Interleaved, stages: vec![vec![pass(PassKind::Forward), pass(PassKind::Backward)]] },
    }
}

/// What says nothing new is left out: what is as by default, and a mesh of one rank.
pub(super) fn module(io: &mut Io, m: &mut Module) -> Result {
    io.line("module")?;
    settings(io, &mut m.settings)?;
    m.asks_training = io.line_if(m.asks_training, "asks training");
    if io.line_follows(m.train != Train::default(), "optimizer ") {
        train(io, &mut m.train)?;
    }
    io.rows(&mut m.plan.entries, PlanEntry { axis: String::new(), tiers: vec![], span: None }, "plan ", |io, _, entry| {
        io.name(&mut entry.axis)?;
        io.with(" = ", &mut entry.tiers, |io, tiers| io.list(tiers, vec![], |io, names| io.list(names, String::new(), Io::name)))?;
        span(io, &mut entry.span)
    })?;
    if io.line_if(m.options != Options::default(), "options") {
        options(io, &mut m.options)?;
    }
    if io.line_follows(!m.mesh.subs.is_empty(), "mesh ") {
        mesh(io, &mut m.mesh)?;
    }
    if io.line_follows(m.pipeline != one_stage(), "layout ") {
        pipeline(io, &mut m.pipeline)?;
    }
    if io.line_if(!m.takes.is_empty(), "takes ") {
        takes(io, &mut m.takes)?;
    }
    let blank = Graphs::new(Graph::default());
    for (heading, part) in [("training:", &mut m.training), ("evaluation:", &mut m.evaluation)] {
        if io.line_if(*part != blank, heading) {
            graphs(io, part)?;
        }
    }
    for (heading, part) in [("text of training:", &mut m.training), ("text of evaluation:", &mut m.evaluation)] {
        if io.line_if(part.model.is_some(), heading) {
            graph(io, part.model.get_or_insert_with(Graph::default))?;
            io.hints = Hints::default();
        }
    }
    // Hints for names of one level do not apply to the next.
    io.hints = Hints::default();
    if io.line_if(m.settled != JobLevel::default(), "settled ") {
        io.variant(&mut m.settled, "what of a job is settled", &[("commands", JobLevel::Commands), ("memory", JobLevel::Memory)])?;
    }
    if io.line_follows(m.job.is_some(), "job ") {
        job(io, m.job.get_or_insert_with(blank_job))?;
    }
    Ok(())
}

/// `[any, [0 to 255]]`: what each input may hold.
fn takes(io: &mut Io, inputs: &mut Vec<Option<Vec<Interval>>>) -> Result {
    io.list(inputs, None, |io, takes| {
        if io.opt(takes.is_none(), "any") {
            return Ok(());
        }
        intervals(io, takes.get_or_insert_default())
    })
}

fn graphs(io: &mut Io, g: &mut Graphs) -> Result {
    if io.line_follows(matches!(g.whole, GlobalGraph::Sharded(_)), "sharded") && io.reading() {
        g.whole = GlobalGraph::Sharded(blank_sharded());
    }
    match &mut g.whole {
        GlobalGraph::Logical(whole) => graph(io, whole)?,
        GlobalGraph::Sharded(whole) => sharded(io, whole)?,
    }
    io.hints = Hints::default();
    for (heading, list) in [("stages:", &mut g.stages), ("classes:", &mut g.locals)] {
        if io.line_if(!list.is_empty(), heading) {
            locals(io, list)?;
        }
    }
    Ok(())
}

fn locals(io: &mut Io, list: &mut Vec<Local>) -> Result {
    for i in 0.. {
        if !io.line_follows(i < list.len(), "local") {
            break;
        }
        if io.reading() {
            list.push(blank_local());
        }
        local(io, &mut list[i])?;
    }
    Ok(())
}

/// A line `  name value` for each option that is not what it is by default.
fn options(io: &mut Io, o: &mut Options) -> Result {
    let d = Options::default();
    for (slot, default, name) in [
        (&mut o.dp, d.dp, "dp"),
        (&mut o.cp, d.cp, "cp"),
        (&mut o.tp, d.tp, "tp"),
        (&mut o.pp, d.pp, "pp"),
        (&mut o.ep, d.ep, "ep"),
        (&mut o.micro_batch, d.micro_batch, "micro_batch"),
        (&mut o.global_batch, d.global_batch, "global_batch"),
        (&mut o.pad_vocab_to, d.pad_vocab_to, "pad_vocab_to"),
        (&mut o.replicas, d.replicas, "replicas"),
    ] {
        option(io, slot, default, name, |io, x| io.number(x))?;
    }
    for (slot, name) in [
        (&mut o.etp, "etp"),
        (&mut o.vpp, "vpp"),
        (&mut o.group, "group"),
        (&mut o.bucket_size, "bucket_size"),
        (&mut o.logits_chunks, "logits_chunks"),
    ] {
        option(io, slot, None, name, |io, x| io.number(x.get_or_insert(0)))?;
    }
    option(io, &mut o.sp, d.sp, "sp", |io, x| io.variant(x, "a switch", &[("on", SequenceParallel::On), ("off", SequenceParallel::Off)]))?;
    option(io, &mut o.cp_comm, d.cp_comm, "cp_comm", |io, x| {
        io.variant(x, "a way to the keys of other ranks", &CpComm::ALL.map(|way| (way.name(), way)))
    })?;
    option(io, &mut o.zero, d.zero, "zero", |io, x| {
        io.variant(x, "a ZeRO level", &[("none", Zero::None), ("states", Zero::States), ("gradients", Zero::Gradients), ("params", Zero::Params)])
    })?;
    option(io, &mut o.schedule, d.schedule, "schedule", schedule)?;
    option(io, &mut o.layout, d.layout, "layout", cuts)?;
    option(io, &mut o.overlap, d.overlap, "overlap", |io, x| io.variant(x, "a switch", &[("on", Overlap::On), ("off", Overlap::Off)]))?;
    option(io, &mut o.memory_order, d.memory_order, "memory_order", |io, x| {
        io.variant(x, "what the order of commands saves", &[("time", MemoryOrder::Time), ("memory", MemoryOrder::Memory)])
    })?;
    option(io, &mut o.offload, d.offload, "offload", |io, x| {
        io.variant(x, "what is offloaded", &[("off", Offload::Off), ("optimizer", Offload::Optimizer), ("disk", Offload::Disk)])
    })?;
    option(io, &mut o.param_offload, d.param_offload, "param_offload", |io, x| {
        io.variant(x, "where parameters rest", &[("off", ParamOffload::Off), ("host", ParamOffload::Host), ("disk", ParamOffload::Disk)])
    })?;
    option(io, &mut o.activation_offload, d.activation_offload, "activation_offload", |io, x| {
        let all = [("off", ActivationOffload::Off), ("layers", ActivationOffload::Layers(None)), ("marked", ActivationOffload::Marked(None))];
        io.variant(x, "which activations are offloaded", &all)?;
        match x {
            ActivationOffload::Off => Ok(()),
            ActivationOffload::Layers(layers) | ActivationOffload::Marked(layers) => io.option(layers, 0, " of ", Io::number),
        }
    })?;
    for (slot, name) in [(&mut o.serial_exchanges, "serial_exchanges"), (&mut o.tf32, "tf32"), (&mut o.pass_pairs, "pass_pairs")] {
        option(io, slot, false, name, |io, x| {
            io.opt(true, "on").then(|| *x = true);
            Ok(())
        })?;
    }
    option(io, &mut o.split_k, d.split_k, "split_k", |io, x| {
        let ways = [("off", SplitK::Off), ("for", SplitK::For(Generation::Sm80)), ("into", SplitK::Into(1))];
        io.variant(x, "a way to split products", &ways)?;
        match x {
            SplitK::Off => Ok(()),
            SplitK::For(generation) => io.with(" ", generation, |io, x| io.variant(x, "a GPU", &Generation::ALL.map(|g| (g.name(), g)))),
            SplitK::Into(segments) => io.with(" ", segments, Io::number),
        }
    })?;
    option(io, &mut o.tp_overlap, d.tp_overlap, "tp_overlap", |io, x| {
        io.variant(x, "a way to overlap", &[("off", TpOverlap::Off), ("pipeline", TpOverlap::Pipeline { chunks: 1 })])?;
        if let TpOverlap::Pipeline { chunks } = x { io.with(" ", chunks, Io::number) } else { Ok(()) }
    })?;
    option(io, &mut o.recompute, d.recompute, "recompute", |io, x| {
        let all =
            [("none", Recompute::None), ("selective", Recompute::Selective), ("uniform", Recompute::Uniform(1)), ("block", Recompute::Block(1))];
        io.variant(x, "what is recomputed", &all)?;
        if let Recompute::Uniform(layers) | Recompute::Block(layers) = x { io.with(" ", layers, Io::number) } else { Ok(()) }
    })?;
    option(io, &mut o.rows, d.rows, "rows", |io, x| {
        io.variant(x, "a choice of rows", &[("rules", RowChoice::Rules), ("random", RowChoice::Random(0))])?;
        if let RowChoice::Random(seed) = x { io.with(" ", seed, Io::number) } else { Ok(()) }
    })?;
    option(io, &mut o.moe_buffer, d.moe_buffer, "moe_buffer", |io, x| {
        io.variant(x, "a size of buffers", &[("whole", MoeBuffer::Whole), ("factor", MoeBuffer::Factor(1.0))])?;
        if let MoeBuffer::Factor(factor) = x { io.with(" ", factor, Io::real) } else { Ok(()) }
    })?;
    option(io, &mut o.moe_passes, d.moe_passes, "moe_passes", |io, x| io.number(x))
}

fn option<T: PartialEq>(io: &mut Io, slot: &mut T, default: T, name: &str, form: impl FnOnce(&mut Io, &mut T) -> Result) -> Result {
    if io.line_if(*slot != default, &format!("  {name}")) {
        io.lit(" ")?;
        form(io, slot)
    } else {
        *slot = default;
        Ok(())
    }
}

fn schedule(io: &mut Io, s: &mut Schedule) -> Result {
    let all = [
        ("gpipe", Schedule::GPipe),
        ("one_f_one_b", Schedule::OneFOneB),
        ("zb_h1", Schedule::ZbH1),
        ("zb_v", Schedule::ZbV),
        ("dual_pipe_v", Schedule::DualPipeV),
        ("given", Schedule::Given(blank_order())),
    ];
    io.variant(s, "a schedule", &all)?;
    if let Schedule::Given(given) = s { io.with(" ", given, order) } else { Ok(()) }
}

fn cuts(io: &mut Io, c: &mut Cuts) -> Result {
    let all = [
        ("even", Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing }),
        ("sizes", Cuts::Sizes(vec![])),
        ("text", Cuts::Text(String::new())),
        ("balanced", Cuts::Balanced),
    ];
    io.variant(c, "a layout", &all)?;
    match c {
        Cuts::Even { embedding, loss } => {
            for (counts, words) in [(embedding, " embedding"), (loss, " loss")] {
                *counts = if io.opt(*counts == Counts::AsLayer, words) { Counts::AsLayer } else { Counts::AsNothing };
            }
            Ok(())
        }
        Cuts::Sizes(sizes) => io.with(" ", sizes, |io, s| io.list(s, 0, Io::number)),
        Cuts::Text(text) => io.with(" ", text, Io::string),
        Cuts::Balanced => Ok(()),
    }
}

/// `layout 2 stages x 1 interleaved embedding 0 loss 1 layers [0, 0, 1, 1]`: by layer the virtual stage; then the order of passes.
fn pipeline(io: &mut Io, p: &mut Pipeline) -> Result {
    let l = &mut p.layout;
    io.line("layout ")?;
    io.number(&mut l.stages)?;
    io.with(" stages x ", &mut l.chunks, Io::number)?;
    io.with(" ", &mut l.placement, placement)?;
    io.with(" embedding ", &mut l.embedding, Io::number)?;
    io.with(" loss ", &mut l.loss, Io::number)?;
    io.with(" layers ", &mut l.of_layer, |io, layers| io.list(layers, 0, Io::number))?;
    io.line("order ")?;
    order(io, &mut p.order)
}

fn placement(io: &mut Io, p: &mut StagePlacement) -> Result {
    io.variant(p, "a placement", &[("interleaved", StagePlacement::Interleaved), ("v", StagePlacement::V)])
}

fn blank_order() -> PassOrder {
    PassOrder { placement: StagePlacement::Interleaved, stages: vec![] }
}

/// `interleaved`, and a line `    stage 0: [F0.0, B0.0]` for each stage.
fn order(io: &mut Io, o: &mut PassOrder) -> Result {
    if io.reading() {
        *o = blank_order();
    }
    placement(io, &mut o.placement)?;
    io.rows(&mut o.stages, vec![], "    stage ", |io, i, passes| {
        row_number(io, i)?;
        io.with(": ", passes, |io, passes| {
            io.list(passes, Pass { kind: PassKind::Forward, chunk: 0, microbatch: 0 }, |io, pass| {
                if !io.reading() {
                    return io.lit(&pass.to_string());
                }
                let mark = io.mark();
                match Pass::parse(io.word("a pass")?) {
                    Some(read) => *pass = read,
                    None => return io.wrong(mark, "expected a pass, `F0.3`, `B0.3` or `W0.3`"),
                }
                Ok(())
            })
        })
    })
}
