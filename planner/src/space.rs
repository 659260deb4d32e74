//! Which plans there are: all ways to split so many ranks, and what else is chosen beside.

use ir::graph::Graph;
use ir::model::Model;
use ir::op::Op;
use ir::options::{Cuts, MOE_ROOM, MoeBuffer, Options, Overlap, Recompute, SequenceParallel, Zero};
use ir::pipeline::{Schedule, VirtualStage};
use passes::pipeline::stage_layout::{balanced, costs, even_parts, parse};
use std::collections::BTreeSet;

/// What a search chooses, unless it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// Ranks of data parallelism.
    Dp,
    /// Ranks of context parallelism, over which the sequence is split.
    Cp,
    /// Ranks of tensor parallelism.
    Tp,
    /// Stages of the pipeline.
    Pp,
    /// Ranks over which experts are split.
    Ep,
    /// Ranks over which each expert is split.
    Etp,
    /// Whether sequence parallelism is on.
    Sp,
    /// Sequences per microbatch and data-parallel rank.
    MicroBatch,
    /// What data-parallel ranks share out: ZeRO's level.
    Zero,
    /// What the backward pass computes again.
    Recompute,
    /// The order of the pipeline's passes.
    Schedule,
    /// Virtual stages of a stage.
    Vpp,
    /// How attention gets at keys of other context-parallel ranks.
    CpComm,
    /// Groups of data-parallel ranks within which ZeRO shares out.
    Replicas,
    /// Whether products are cut to run beside their tensor-parallel collectives.
    TpOverlap,
    /// Which layers each virtual stage holds.
    Layout,
    /// Of optimizer, parameters or activations.
    Offload,
}

/// The most virtual stages of a stage, rows of a microbatch and context-parallel ranks that are tried.
const MOST_CHUNKS: u64 = 8;
const MOST_ROWS: u64 = 16;
const MOST_CP: u64 = 16;

/// All plans of so many ranks.
#[derive(Clone, Debug)]
pub struct Space {
    /// Ranks of every plan: the product of its `dp`, `cp`, `tp` and `pp`.
    pub ranks: u64,
    /// Devices of a machine: tensor parallelism does not reach beyond one.
    pub devices: u64,
    /// What is not chosen is as here.
    pub base: Options,
    /// What was given, and is as in `base`.
    pub fixed: BTreeSet<Choice>,
    /// The model that all plans are for.
    pub model: ModelFacts,
}

/// What plans depend on of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// Layers that stages are cut from: iterations of `repeat`, over all of them.
    pub layers: u32,
    /// Arithmetic before the layers, of each, and after them ([`costs`]).
    pub costs: Vec<u64>,
    /// Axes that the text's plan lists; of `ep`, how many experts there are.
    pub axes: BTreeSet<String>,
    /// Experts of a layer, the fewest of all layers; `None` if no dim is listed for `ep`.
    pub experts: Option<u64>,
    /// Experts that a token chooses, the fewest of all layers.
    pub choices: Option<u64>,
}

impl ModelFacts {
    /// Reads them off an elaborated model.
    pub fn of(model: &Model) -> ModelFacts {
        let graph = &model.graph;
        let axes: BTreeSet<String> = model.plan.entries.iter().map(|e| e.axis.clone()).collect();
        let experts = model.plan.get("ep").and_then(|e| e.tiers.iter().flatten().filter_map(|name| size(graph, name)).min());
        let dispatched =
            graph.body.nodes.iter().filter_map(|n| if let Op::Dispatch(r) = &n.op { Some(graph.body.dims.size(r.choice)) } else { None });
        ModelFacts { layers: graph.layers, costs: costs(graph), axes, experts, choices: dispatched.min() }
    }

    /// A plan that takes as long, nearly, and is compiled in less time: rows of experts have the same room, and no
    /// further passes, which a step whose router is balanced leaves out. None if there are none.
    pub fn short(&self, plan: &Options) -> Option<Options> {
        let (experts, choices) = (self.experts?, self.choices?.max(1));
        if plan.ep == 1 || plan.moe_passes == 1 {
            return None;
        }
        let moe_buffer = match plan.moe_buffer {
            // This is the most that one rank can get relative to its share: a row for each of its experts, or for all
            // choices.
            MoeBuffer::Whole => {
                let most = (experts / plan.ep).min(choices) * plan.ep / choices;
                MoeBuffer::Factor(MOE_ROOM.max(most as f64 / plan.moe_passes as f64))
            }
            given @ MoeBuffer::Factor(_) => given,
        };
        Some(Options { moe_buffer, moe_passes: 1, ..plan.clone() })
    }
}

/// The size of the dim with that name.
fn size(graph: &Graph, name: &str) -> Option<u64> {
    let dims = &graph.body.dims;
    dims.ids().find(|d| dims.name(*d) == name).map(|d| dims.size(d))
}

/// The powers of two up to `most` that divide a number, including 1.
fn powers(n: u64, most: u64) -> Vec<u64> {
    (0..63).map(|k| 1 << k).take_while(|p| *p <= most.max(1) && n.is_multiple_of(*p)).collect()
}

fn divisors(n: u64, most: u64) -> Vec<u64> {
    (1..=n.min(most)).filter(|d| n.is_multiple_of(*d)).collect()
}

impl Space {
    /// The values of a choice: the given one, or all.
    fn of<T: Clone>(&self, choice: Choice, given: T, all: impl FnOnce() -> Vec<T>) -> Vec<T> {
        if self.fixed.contains(&choice) { vec![given] } else { all() }
    }

    fn splits(&self, axis: &str, n: Vec<u64>) -> Vec<u64> {
        if self.model.axes.contains(axis) { n } else { vec![1] }
    }

    /// All plans, as far as sizes alone tell that they are none: what else the model forbids, a compile says.
    pub fn plans(&self) -> Vec<Options> {
        let (base, mut out) = (&self.base, vec![]);
        let tps = self.of(Choice::Tp, base.tp, || self.splits("tp", powers(self.ranks, self.devices)));
        let cps = self.of(Choice::Cp, base.cp, || self.splits("cp", powers(self.ranks, MOST_CP)));
        for (tp, cp) in tps.iter().flat_map(|t| cps.iter().map(|c| (*t, *c))).filter(|(t, c)| self.ranks.is_multiple_of(t.saturating_mul(*c))) {
            let left = self.ranks / (tp * cp);
            // A stage has at least one layer.
            let stages = || self.splits("pp", divisors(left, u64::from(self.model.layers).max(1)));
            for pp in self.of(Choice::Pp, base.pp, stages).into_iter().filter(|p| left.is_multiple_of(*p)) {
                let dp = left / pp;
                let is_given = matches!(&base.schedule, Schedule::Given(order) if order.stages.len() as u64 != pp);
                if is_given || !dp.is_multiple_of(base.replicas) {
                    continue;
                }
                if (self.fixed.contains(&Choice::Dp) && dp != base.dp) || !base.global_batch.is_multiple_of(dp) {
                    continue;
                }
                let mesh = Options { dp, cp, tp, pp, ..base.clone() };
                for mesh in self.experts(&mesh) {
                    out.extend(self.of_mesh(&mesh));
                }
            }
        }
        out
    }

    /// All ways to split experts on a mesh.
    fn experts(&self, mesh: &Options) -> Vec<Options> {
        let base = &self.base;
        let ranks = mesh.dp * mesh.cp * mesh.tp;
        let eps = self.of(Choice::Ep, base.ep, || self.model.experts.map_or(vec![1], |n| powers(n, n)));
        let mut out = vec![];
        for ep in eps {
            // By default, each expert is split like everything else.
            let etps = self.of(Choice::Etp, base.etp, || if ep > 1 && mesh.tp > 1 { vec![None, Some(1)] } else { vec![base.etp] });
            for etp in etps.into_iter().filter(|etp| ranks.is_multiple_of(ep.saturating_mul(etp.unwrap_or(mesh.tp)))) {
                out.push(Options { ep, etp, ..mesh.clone() });
            }
        }
        out
    }

    /// All plans with this mesh.
    fn of_mesh(&self, mesh: &Options) -> Vec<Options> {
        let base = &self.base;
        let rows = base.global_batch / mesh.dp;
        let micro = self.of(Choice::MicroBatch, base.micro_batch, || powers(rows, MOST_ROWS));
        let sp = if mesh.tp > 1 && self.model.axes.contains("sp") { SequenceParallel::On } else { SequenceParallel::Off };
        let sp = self.of(Choice::Sp, base.sp, || vec![sp]);
        let zero = self.of(Choice::Zero, base.zero, || if mesh.dp * mesh.cp > 1 { Zero::ALL.to_vec() } else { vec![Zero::None] });
        let recompute = self.of(Choice::Recompute, base.recompute, || vec![Recompute::None, Recompute::Selective, Recompute::Uniform(1)]);
        let mut out = vec![];
        for micro_batch in micro.into_iter().filter(|n| rows.is_multiple_of(*n)) {
            let microbatches = rows / micro_batch;
            let order = self.orders(mesh, microbatches);
            for (schedule, vpp) in &order {
                for sp in &sp {
                    for zero in &zero {
                        // DualPipeV is designed for pairs of a forward and a backward pass.
                        let pass_pairs =
                            base.pass_pairs || (*schedule == Schedule::DualPipeV && mesh.ep * mesh.tp > 1 && base.overlap == Overlap::On);
                        let plan = Options { micro_batch, sp: *sp, zero: *zero, schedule: schedule.clone(), vpp: *vpp, pass_pairs, ..mesh.clone() };
                        let all = recompute.iter().map(|r| Options { recompute: *r, ..plan.clone() });
                        out.extend(all.filter(|plan| self.is_sensible(plan)));
                    }
                }
            }
        }
        out
    }

    /// Whether a plan makes sense. If gradients of parameters have passes of their own, these need the layers' values
    /// once more, so recomputing saves nothing, and parameters that a pass gathers would be gathered a third time.
    fn is_sensible(&self, plan: &Options) -> bool {
        let given = [Choice::Schedule, Choice::Recompute, Choice::Zero].iter().any(|c| self.fixed.contains(c));
        given || !splits_backward(plan) || (!matches!(plan.recompute, Recompute::Uniform(_)) && plan.zero < Zero::Params)
    }

    /// The orders of passes, each with its virtual stages.
    fn orders(&self, mesh: &Options, microbatches: u64) -> Vec<(Schedule, Option<u64>)> {
        let base = &self.base;
        if mesh.pp == 1 {
            if self.fixed.contains(&Choice::Vpp) && base.vpp > Some(1) {
                return vec![];
            }
            return vec![(self.of(Choice::Schedule, base.schedule.clone(), || vec![Schedule::OneFOneB]).remove(0), None)];
        }
        let schedules =
            self.of(Choice::Schedule, base.schedule.clone(), || vec![Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV, Schedule::DualPipeV]);
        let mut out = vec![];
        for schedule in schedules {
            let chunks = match schedule {
                Schedule::OneFOneB => self.of(Choice::Vpp, base.vpp, || {
                    let more = (2..=MOST_CHUNKS).filter(|_| microbatches.is_multiple_of(mesh.pp)).map(Some);
                    std::iter::once(None).chain(more).collect()
                }),
                Schedule::GPipe | Schedule::Given(_) => vec![base.vpp],
                // These schedules need one virtual stage or two, which is their default.
                Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV if self.fixed.contains(&Choice::Vpp) => vec![base.vpp],
                Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV => vec![None],
            };
            for vpp in chunks {
                let plan = Options { schedule: schedule.clone(), vpp, ..mesh.clone() };
                if parts(&plan, &self.model).is_some() {
                    out.push((schedule.clone(), vpp));
                }
            }
        }
        out
    }
}

/// Whether gradients of parameters have passes of their own.
pub fn splits_backward(options: &Options) -> bool {
    match &options.schedule {
        Schedule::GPipe | Schedule::OneFOneB => false,
        Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV => true,
        Schedule::Given(order) => order.splits_backward(),
    }
}

/// Virtual stages of a stage.
pub fn chunks(options: &Options) -> u64 {
    match &options.schedule {
        Schedule::ZbV | Schedule::DualPipeV => 2,
        Schedule::Given(order) => u64::from(order.chunks()),
        Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 => options.vpp.unwrap_or(1),
    }
}

/// What each virtual stage holds; none where a plan has no such layout.
pub fn parts(options: &Options, model: &ModelFacts) -> Option<Vec<VirtualStage>> {
    let parts = u32::try_from(options.pp.saturating_mul(chunks(options))).ok()?;
    let found = match &options.layout {
        Cuts::Even { embedding, loss } => even_parts(model.layers, parts, *embedding, *loss)?,
        Cuts::Balanced => balanced(&model.costs, parts)?,
        Cuts::Text(text) => parse(text).ok()?,
        Cuts::Sizes(sizes) => {
            let end = sizes.len().wrapping_sub(1);
            sizes.iter().enumerate().map(|(g, layers)| VirtualStage { layers: *layers, embedding: g == 0, loss: g == end }).collect()
        }
    };
    (found.len() == parts as usize).then_some(found)
}
