//! A time that no step of a plan is below, without a compile.
//!
//! A rank of stage `s` computes the products of its layers for all its `m` microbatches, forward and backward: at
//! least `m * t_s` seconds, `t_s` being their operations on a rank over the rate that the best tiles reach. Nothing
//! else that it does is counted.
//!
//! Steps do not overlap: whether a step's update follows is known once all stages have done all passes, and a stage
//! begins the next step after its update. So within a step
//!
//! - the first pass of a stage is the first one forward through its first virtual stage, which waits for the same of
//!   all stages before: `a_s = f_0 + .. + f_(s-1)`, `f` being seconds of a pass forward through the first virtual
//!   stages;
//! - where gradients of parameters have no passes of their own, the last pass of a stage is one backward through its
//!   first virtual stage, and those of all stages before follow: `b_s`, of passes backward. Else `b_s = 0`.
//!
//! A step takes no less than `a_s + m * t_s + b_s` of any stage. Tests hold first and last passes to that, and the
//! bound to every plan of small worlds.
//!
//! What passes of a microbatch compute is that of the whole batch over ranks and microbatches. Of rows of experts
//! only those that are chosen count, where ranks compute all that there is room for; attention over ranks that split
//! the sequence does not count at all, as its masked parts are left out by rules of their own.

use crate::space::{ModelFacts, parts, splits_backward};
use ir::dim::Dim;
use ir::graph::{Graph, Phase, Value};
use ir::op::{DType, Op};
use ir::options::{MoeBuffer, Options};
use ir::pipeline::{Schedule, VirtualStage};
use passes::pipeline::stage_layout::computed;
use simulate::machine::Machine;

/// Operations of one sequence's pass through a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Operations {
    /// Operations of matrix products, two per multiply-add.
    pub products: f64,
    /// Operations of attention, two per multiply-add, of pairs that its mask leaves.
    pub attention: f64,
}

/// Operations of the products of a differentiated graph, forward and backward: before the layers, of each layer, and
/// after them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arithmetic(Vec<[Operations; 2]>);

impl Arithmetic {
    /// The arithmetic of a graph whose sizes do not depend on ranks yet.
    pub fn of(graph: &Graph) -> Arithmetic {
        let body = &graph.body;
        let size = |d: &Dim| body.dims.size(*d) as f64;
        let sequences = graph.batch.map_or(1.0, |d| size(&d)).max(1.0);
        let computed = computed(body);
        let last = graph.layers as usize + 1;
        let mut units = vec![[Operations::default(); 2]; last + 1];
        // Whether a value depends on a value of a layer, in the forward pass and in the backward pass.
        let mut after = vec![[false; 2]; body.nodes.len()];
        for v in body.values() {
            let node = &body[v];
            let way = match node.origin.phase {
                Phase::Forward => 0,
                Phase::Backward => 1,
                Phase::Update => continue,
            };
            let depends = |a: &Value| after[a.index()][way] && (way == 0 || body[*a].origin.phase == Phase::Backward);
            after[v.index()][way] = node.origin.layer.is_some() || node.args.iter().any(depends);
            // In the backward pass, values after the layers come first.
            let unit = match (node.origin.layer, after[v.index()][way] == (way == 0)) {
                (Some(l), _) => l as usize + 1,
                (None, true) => last,
                (None, false) => 0,
            };
            let done = &mut units[unit][way];
            match &node.op {
                Op::Dot { over, .. } => done.products += 2.0 * over.iter().map(size).product::<f64>() * computed[v.index()] as f64 / sequences,
                Op::Attention(a) | Op::AttentionGrad(a, _) => {
                    let [d, values] = [a.d, a.values].map(|d| body.dims.size(d));
                    let rows = (body.elements(node.args[0]) / d.max(1)) as f64;
                    let seen = a.pairs(body.dims.size(a.keys)) as f64 / size(&a.keys).max(1.0);
                    done.attention += 2.0 * node.op.products_of_pairs(d, values) as f64 * rows * seen / sequences;
                }
                _ => {}
            }
        }
        Arithmetic(units)
    }

    /// Operations of a pass through a virtual stage that begins with a layer.
    fn of_part(&self, part: &VirtualStage, first: usize, way: usize, is_split: bool) -> f64 {
        let layers = first + 1..first + 1 + part.layers as usize;
        let outside = part.embedding.then_some(0).into_iter().chain(part.loss.then_some(self.0.len() - 1));
        let of_unit = |u: usize| self.0.get(u).map_or(0.0, |o| o[way].products + if is_split { 0.0 } else { o[way].attention });
        layers.chain(outside).map(of_unit).sum()
    }
}

/// Operations a second that no kernel exceeds.
fn rate(machine: &Machine, precision: DType, tf32: bool, threads: u64) -> f64 {
    let device = &machine.device;
    let tiles = match (&device.products.tiles, machine.generation()) {
        (Some(tiles), _) => tiles.sizes.iter().map(|t| t.2).fold(0.0, f64::max),
        (None, Some(generation)) => generation.tiles(precision, tf32).iter().map(|t| t.rate as f64 / 100.0).fold(0.0, f64::max),
        (None, None) => 1.0,
    };
    let products = device.products.efficiency.value * tiles;
    let most = products.max(device.attention.forward.value).max(device.attention.backward.value);
    let peak = [(precision, tf32), (DType::F32, tf32), (DType::F32, false)].map(|(dtype, tf32)| machine.peak(dtype, tf32));
    peak.into_iter().fold(0.0, f64::max) * most * threads as f64
}

/// A lower bound of a plan's step, in seconds; 0 where nothing is known.
pub fn least(options: &Options, model: &ModelFacts, arithmetic: &Arithmetic, machine: &Machine, precision: DType, threads: u64) -> f64 {
    let Some(parts) = parts(options, model) else { return 0.0 };
    // With less room than rows, the rest is computed in further passes, which the play leaves out.
    if matches!(options.moe_buffer, MoeBuffer::Factor(room) if room < 1.0) {
        return 0.0;
    }
    let rate = rate(machine, precision, options.tf32, threads) * (options.cp * options.tp) as f64 / options.micro_batch as f64;
    let microbatches = (options.global_batch / (options.dp * options.micro_batch)) as f64;
    let splits = splits_backward(options);
    // These are the seconds of each virtual stage's passes, forward and backward.
    let mut first = 0;
    let mut each = vec![];
    for part in &parts {
        each.push([0, 1].map(|way| arithmetic.of_part(part, first, way, options.cp > 1) / rate));
        first += part.layers as usize;
    }
    let stages = options.pp as usize;
    let is_folded = matches!(options.schedule, Schedule::ZbV | Schedule::DualPipeV);
    let stage = |g: usize| if is_folded && (g / stages) % 2 == 1 { stages - 1 - g % stages } else { g % stages };
    let mut busy = vec![0.0; stages];
    each.iter().enumerate().for_each(|(g, [f, b])| busy[stage(g)] += microbatches * (f + b));
    let (mut most, mut before) = (0.0f64, 0.0);
    for (s, busy) in busy.into_iter().enumerate() {
        most = most.max(before + busy);
        // A given order need not begin and end with the first virtual stage.
        if !matches!(options.schedule, Schedule::Given(_)) {
            before += each[s][0] + if splits { 0.0 } else { each[s][1] };
        }
    }
    most
}
