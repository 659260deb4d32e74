//! What layers of a plan take, from a compile of few of them.
//!
//! Kernels and exchanges of a layer are the same whatever stage it is on, and however many there are. So plans that
//! differ in stages, microbatches, order of passes, data-parallel ranks and ZeRO share a *sample*: few layers, of
//! each kind one at least, on one stage, three microbatches. Its middle one is played, and each command's seconds
//! count for its layer.

use ir::graph::{Graph, Origin, Phase};
use ir::model::Model;
use ir::op::Op;
use ir::options::{Counts, Cuts, Options, Recompute, SequenceParallel, Zero};
use ir::pipeline::Schedule;
use ir::program::{Arena, BodyKind, Content, Job, Space, Stream};
use serde::{Deserialize, Serialize};
use simulate::machine::Machine;
use simulate::play::play;
use simulate::tape::{BY_ITSELF, Costs, WorkKind};
use simulate::{Deadlock, Options as PlayOptions};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Microbatches of a sample: the first and the last do what others do not.
const MICROBATCHES: u64 = 3;
/// Layers at most of which there may be one of each kind.
const MOST_LAYERS: u32 = 16;

/// What tells samples apart: of all that is chosen, all else being as in the space's base.
pub type Key = (u64, u64, u64, Option<u64>, u64, SequenceParallel, Recompute);

/// Plans of a space with the same key share a sample.
pub fn key(plan: &Options) -> Key {
    (plan.tp, plan.cp, plan.ep, plan.etp, plan.micro_batch, plan.sp, plan.recompute)
}

/// The options of a plan's sample.
pub fn options(plan: &Options) -> Options {
    let own = plan.cp * plan.tp;
    let experts = plan.ep * plan.etp.unwrap_or(plan.tp);
    let dp = (1..=plan.dp).find(|d| (d * own).is_multiple_of(experts)).unwrap_or(plan.dp);
    Options {
        dp,
        pp: 1,
        vpp: None,
        group: None,
        zero: Zero::None,
        replicas: 1,
        global_batch: dp * plan.micro_batch * MICROBATCHES,
        schedule: Schedule::OneFOneB,
        layout: Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing },
        pass_pairs: false,
        ..plan.clone()
    }
}

/// A number for each layer. Layers with different times have different numbers.
fn kinds(graph: &Graph) -> Vec<u64> {
    let body = &graph.body;
    let mut hashes = vec![DefaultHasher::new(); graph.layers as usize];
    for node in body.nodes.iter().filter(|n| n.origin.phase == Phase::Forward) {
        let Some(hash) = node.origin.layer.and_then(|l| hashes.get_mut(l as usize)) else { continue };
        node.op.name().hash(hash);
        node.ty.dtype.bytes().hash(hash);
        node.ty.dims.iter().for_each(|d| body.dims.size(*d).hash(hash));
        if let Op::Attention(a) = &node.op {
            a.pairs(body.dims.size(a.keys)).hash(hash);
        }
    }
    hashes.iter().map(Hasher::finish).collect()
}

/// The kinds of a model's layers, by number, and of those of its samples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The kind of each layer of the whole model, in order.
    pub whole: Vec<usize>,
    /// The kind of each layer of a sample, in order.
    pub sample: Vec<usize>,
    /// How many a sample has; none: all, as no fewer have one of each kind.
    pub few: Option<u32>,
}

impl Layers {
    /// Of a model, and with so many layers. Plans differ in sizes, and not in which layers are alike.
    pub fn of(whole: &Model, with: &dyn Fn(u32) -> Option<Model>) -> Layers {
        let all = kinds(&whole.graph);
        let mut known: Vec<u64> = vec![];
        for kind in &all {
            if !known.contains(kind) {
                known.push(*kind);
            }
        }
        let number = |kinds: &[u64]| kinds.iter().map(|k| known.iter().position(|n| n == k)).collect::<Option<Vec<usize>>>();
        let numbers = number(&all).unwrap_or_default();
        let found = (1..=MOST_LAYERS.min(whole.graph.layers)).find_map(|n| {
            let few = number(&kinds(&with(n)?.graph))?;
            (0..known.len()).all(|k| few.contains(&k)).then_some((n, few))
        });
        match found {
            Some((n, sample)) => Layers { whole: numbers, sample, few: Some(n) },
            None => Layers { sample: numbers.clone(), whole: numbers, few: None },
        }
    }
}

/// A layer, or what is outside of layers: seconds of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerCost {
    /// Of a pass, forward and backward, with exchanges beside which nothing is computed.
    pub forward: f64,
    /// Seconds of a microbatch's backward passes, gradients of parameters included.
    pub backward: f64,
    /// Of what is once a step, exchanges among data-parallel ranks apart.
    pub update: f64,
    /// A rank's elements of parameters, of experts and others.
    pub experts: f64,
    /// Elements of a rank's parameters that are not split along experts.
    pub dense: f64,
    /// Bytes that a microbatch keeps for its backward pass.
    pub kept: f64,
}

impl LayerCost {
    /// Adds all that is in another unit, `times` times.
    pub fn add(&mut self, other: &LayerCost, times: f64) {
        let LayerCost { forward, backward, update, experts, dense, kept } = other;
        let to = [&mut self.forward, &mut self.backward, &mut self.update, &mut self.experts, &mut self.dense, &mut self.kept];
        to.into_iter().zip([forward, backward, update, experts, dense, kept]).for_each(|(a, b)| *a += times * b);
    }
}

/// Bytes of an element of a parameter that live over steps, without ZeRO: as passes read it, the weight beside it
/// that the optimizer works on, its gradient and its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PersistentBytes {
    /// Bytes of the form that passes read: the parameter itself, or its 16-bit copy.
    pub read: f64,
    /// Bytes of the weight beside a 16-bit copy; 0 where passes read the weight itself.
    pub weight: f64,
    /// Bytes of the gradient's accumulator.
    pub gradient: f64,
    /// Bytes of all optimizer states.
    pub states: f64,
}

/// What layers of some plans take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// By kind, the mean of those that there are.
    pub layers: Vec<LayerCost>,
    /// What is before the first layer, as an embedding.
    pub before: LayerCost,
    /// What is after the last layer, as the loss.
    pub after: LayerCost,
    /// Bytes for each element of a rank's parameters that live over steps.
    pub lasting: PersistentBytes,
    /// Bytes within a call.
    pub temporary: f64,
    /// Bytes that a rank sends to the next stage in a pass.
    pub message: f64,
    /// Seconds of the host between the phases of a step.
    pub gaps: f64,
}

impl Sample {
    /// Of a job with [`options`], of one stage, and the graph that it was compiled from, of whose layers these are
    /// the kinds. `experts` are the names of dims that experts are split along.
    ///
    /// # Errors
    /// Streams that wait for ever: a job that is verified has none.
    pub fn of(job: &Job, graph: &Graph, kinds: &[usize], machine: &Machine, threads: u64, experts: &[String]) -> Result<Sample, Deadlock> {
        let mut units = vec![LayerCost::default(); graph.layers as usize + 2];
        let last = units.len() - 1;
        let gaps = seconds(&mut units, job, machine, threads)?;
        let (stage, program) = (&job.stages[0], &job.programs[job.stages[0].program as usize]);
        let lasting = elements(&mut units, job, graph, experts);
        for buffer in program.buffers.iter().filter(|b| b.arena == Arena::Stash) {
            units[unit(buffer.origin.as_ref(), last)].kept += buffer.bytes() as f64;
        }
        let arenas = stage.schedule.arena_bytes(program);
        let slots = stage.schedule.slots.iter().zip(&program.stashes).filter(|(_, s)| s.space == Space::Device);
        let stashed: u64 = slots.map(|(n, s)| u64::from(n.count) * s.bytes).sum();
        let mut layers = vec![LayerCost::default(); kinds.iter().map(|k| k + 1).max().unwrap_or(0)];
        for (unit, kind) in units[1..last].iter().zip(kinds) {
            let alike = kinds.iter().filter(|k| *k == kind).count();
            layers[*kind].add(unit, 1.0 / alike as f64);
        }
        Ok(Sample {
            layers,
            before: units[0],
            after: units[last],
            lasting,
            temporary: arenas[Arena::Temporary as usize].saturating_sub(stashed) as f64,
            message: message(graph) * job.global_batch as f64 / MICROBATCHES as f64 / job.mesh.world() as f64,
            gaps,
        })
    }
}

/// The index of a unit: 0 before the layers, one for each layer, and one after them all.
fn unit(origin: Option<&Origin>, outside: usize) -> usize {
    origin.and_then(|o| o.layer).map_or(outside, |l| l as usize + 1)
}

/// Adds the seconds that units take of the middle microbatch, and of what is done once a step. Returns the seconds
/// between phases.
fn seconds(units: &mut [LayerCost], job: &Job, machine: &Machine, threads: u64) -> Result<f64, Deadlock> {
    let plays = PlayOptions { threads, slow: None };
    let played = play(job, machine, plays, BY_ITSELF)?;
    let mut costs = Costs::new(job, machine, &plays);
    let (stage, program) = (&job.stages[0], &job.programs[job.stages[0].program as usize]);
    let (mut calls, mut is_middle) = (vec![0u64; program.bodies.len()], vec![false; program.bodies.len()]);
    for call in stage.schedule.train.iter().chain(&stage.schedule.update).filter(|c| c.part == 0) {
        calls[call.body.index()] += 1;
        is_middle[call.body.index()] |= call.microbatch == 1;
    }
    let (last, mut exchange) = (units.len() - 1, 0);
    for (k, body) in program.bodies.iter().enumerate() {
        let is_backward = matches!(body.kind, BodyKind::Backward(_) | BodyKind::Weight(_));
        let is_pass = is_backward || matches!(body.kind, BodyKind::Forward(_));
        // In the backward pass, what is after the layers comes before them.
        let mut seen = false;
        for command in body.commands.iter().filter(|c| c.predicate.is_none()) {
            seen |= command.origin.layer.is_some();
            let times = calls[k].max(1) as f64;
            let each = match costs.exchange(0, &command.action) {
                Some(_) => {
                    exchange += 1;
                    // Exchanges among data-parallel ranks depend on how many there are, so a sample has none of them.
                    if command.stream == Stream::Data { 0.0 } else { played.times[0].exposed[exchange - 1] / times }
                }
                None => match costs.work(0, &command.action) {
                    (WorkKind::Device, cost) => cost.seconds(),
                    _ => 0.0,
                },
            };
            let unit = &mut units[unit(Some(&command.origin), if seen == is_backward { 0 } else { last })];
            match body.kind {
                BodyKind::Forward(_) if is_middle[k] => unit.forward += each,
                BodyKind::Backward(_) | BodyKind::Weight(_) if is_middle[k] => unit.backward += each,
                _ if !is_pass && calls[k] > 0 => unit.update += each * times,
                _ => {}
            }
        }
    }
    Ok(played.times[0].spent.gaps)
}

/// Adds the elements of parameters of units, and says what bytes each has.
fn elements(units: &mut [LayerCost], job: &Job, graph: &Graph, experts: &[String]) -> PersistentBytes {
    let (stage, program) = (&job.stages[0], &job.programs[job.stages[0].program as usize]);
    let (last, uses) = (units.len() - 1, uses(graph));
    let is_half = program.buffers.iter().any(|b| b.arena == Arena::Persistent && b.dtype.is_half());
    let (mut all, mut lasting) = (0.0, PersistentBytes::default());
    for buffer in program.buffers.iter().filter(|b| b.arena == Arena::Persistent) {
        let bytes = buffer.bytes() as f64;
        match &buffer.content {
            Content::Param { slot, .. } => {
                let name = stage.params.get(*slot as usize).map_or("", |p| &job.params[*p as usize].name);
                let used = uses.get(name).cloned().unwrap_or_default();
                let of_experts = buffer.dims.iter().any(|(d, _)| experts.iter().any(|e| d.split('/').next() == Some(e)));
                for u in if used.is_empty() { vec![unit(buffer.origin.as_ref(), last)] } else { used } {
                    *if of_experts { &mut units[u].experts } else { &mut units[u].dense } += buffer.elements() as f64;
                }
                all += buffer.elements() as f64;
                *if is_half && !buffer.dtype.is_half() { &mut lasting.weight } else { &mut lasting.read } += bytes;
            }
            Content::State { .. } => lasting.states += bytes,
            Content::Accumulator | Content::Activation if buffer.dtype.is_half() => lasting.read += bytes,
            Content::Accumulator => lasting.gradient += bytes,
            Content::Activation | Content::Table { .. } => {}
        }
    }
    let PersistentBytes { read, weight, gradient, states } = &mut lasting;
    [read, weight, gradient, states].into_iter().for_each(|bytes| *bytes /= f64::max(all, 1.0));
    lasting
}

/// The units outside of layers that use each parameter.
fn uses(graph: &Graph) -> BTreeMap<&str, Vec<usize>> {
    let body = &graph.body;
    let mut after = vec![false; body.nodes.len()];
    let mut out: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward) {
        let node = &body[v];
        after[v.index()] = node.origin.layer.is_some() || node.args.iter().any(|a| after[a.index()]);
        let own = if after[v.index()] { graph.layers as usize + 1 } else { 0 };
        for a in node.args.iter().filter(|_| node.origin.layer.is_none()) {
            if let Op::Param(p) = &body[*a].op {
                let used = out.entry(&graph.params[*p as usize].name).or_default();
                if !used.contains(&own) {
                    used.push(own);
                }
            }
        }
    }
    out
}

/// Bytes of a sequence that the first layer gives the next one, or what is after it.
fn message(graph: &Graph) -> f64 {
    let body = &graph.body;
    let sequences = graph.batch.map_or(1, |d| body.dims.size(d)).max(1) as f64;
    let mut crosses = vec![false; body.nodes.len()];
    for node in body.nodes.iter().filter(|n| n.origin.phase == Phase::Forward && n.origin.layer != Some(0)) {
        node.args.iter().filter(|a| body[**a].origin.layer == Some(0)).for_each(|a| crosses[a.index()] = true);
    }
    let all = body.values().filter(|v| crosses[v.index()]);
    all.map(|v| (body.elements(v) * body[v].ty.dtype.bytes()) as f64).sum::<f64>() / sequences
}
