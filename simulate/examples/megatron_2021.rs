//! Steps of GPTs as Megatron-LM ran them in 2021, from mcc's programs of the same models and what those programs did
//! differently: `bench/foresight.py` asks for them, a line of JSON each, and fits what is left open.
//!
//! Stored scores and probabilities, and one product for Q, K and V, are in the text (`bench/megatron_2021.mdl`); that
//! nothing is communicated beside kernels is a flag of the compile. Each other part changes what commands take, and
//! can be left out ([`Part`]). Sources are `Paper`, Narayanan et al., "Efficient Large-Scale Language Model Training
//! on GPU Clusters Using Megatron-LM" (2021), and Megatron-LM 2.5 with PyTorch 1.8, which ran it.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::graph::Phase;
use ir::kernel::{Family, Kernel};
use ir::op::DType;
use ir::options::{Options as Plan, Overlap, Recompute};
use ir::program::{Action, BodyKind, Job, ProgramBody};
use ir::work::Work;
use passes::compile::unverified;
use serde::{Deserialize, Serialize};
use simulate::Options;
use simulate::cost::{Cause, Cost};
use simulate::kernels::{Product, memory, product};
use simulate::links::{Reach, collective, message};
use simulate::machine::Machine;
use simulate::play::play;
use simulate::tape::Costs;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Write};

/// A model and its plan.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    heads: u64,
    hidden: u64,
    layers: u64,
    tp: u64,
    pp: u64,
    dp: u64,
    batch: u64,
    micro_batch: u64,
    vpp: u64,
    seq: u64,
    vocab: u64,
    /// Whether the text stores scores; otherwise attention is fused.
    stores_scores: bool,
    serial: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "snake_case")]
enum Part {
    /// Of attention's core, products read and write 16 bits, and a kernel each makes probabilities and their
    /// gradients. It reads scores, or probabilities and gradients, up to the diagonal, and writes whole rows; the
    /// mask is no kernel of its own (`scaled_upper_triang_masked_softmax.h`).
    Softmax,
    /// A layer is computed again to its end, with its last product and all-reduce (`random.py`, `checkpoint`).
    WholeLayer,
    /// Gradients have 16 bits: from a step's second microbatch on, a kernel of its own adds those of layers to the
    /// sums, and data-parallel groups exchange half the bytes (`distributed.py`).
    HalfGradients,
    /// Without a pipeline gradients are exchanged beside the last backward pass, which takes longer meanwhile
    /// (torch's DDP, in `run_table_1.sh`).
    TorchDdp,
    /// A rank sends its share of what a stage gives, and the receivers gather it (Paper, section 4.1).
    ScatterGather,
    /// Dropout of probabilities and of what each half of a layer gives, with stored masks (`transformer.py`).
    Dropout,
    /// What products do not do on the way: bias and GeLU, bias of Q, K and V, copies of the context, sums of two
    /// gradients (Paper, section 4.2; `fused_bias_gelu.py`, `transformer.py`, PyTorch's `Linear.cpp`).
    Pointwise,
    /// The loss is a chain of kernels over logits in 32 bits (`cross_entropy.py`, and the casts around it).
    CrossEntropy,
}

#[derive(Deserialize)]
struct Request {
    row: Row,
    parts: BTreeSet<Part>,
    /// A machine file.
    machine: String,
    /// Efficiencies of products and of memory.
    points: Vec<[f64; 2]>,
}

#[derive(Serialize)]
struct Response {
    seconds: Vec<f64>,
}

/// Bytes that the loss moves for a logit: to 32 bits 6, the greatest 4, less that 8, exponentials 8, their sum 4,
/// divided by it 8, times the loss's gradient 8, to 16 bits 6. And those that mcc's loops move.
const LOSS: f64 = 52.0;
const OWN_LOSS: f64 = 6.0;

fn job(row: &Row) -> Job {
    let path = format!("{}/../{}", env!("CARGO_MANIFEST_DIR"), if row.stores_scores { "bench/megatron_2021.mdl" } else { "models/gpt2.mdl" });
    let text = std::fs::read_to_string(path).expect("a model text");
    let Row { heads, hidden, layers, seq, vocab, .. } = row;
    let settings = [("heads", heads), ("hidden", hidden), ("layers", layers), ("seq", seq), ("vocab", vocab)];
    let plan = Plan {
        dp: row.dp,
        tp: row.tp,
        pp: row.pp,
        vpp: (row.vpp > 1).then_some(row.vpp),
        micro_batch: row.micro_batch,
        global_batch: row.batch,
        recompute: Recompute::Uniform(1),
        overlap: if row.serial { Overlap::Off } else { Overlap::On },
        serial_exchanges: true,
        ..Plan::default()
    };
    let elaboration = Text {
        defines: settings.iter().map(|(n, v)| ((*n).into(), v.to_string())).collect(),
        batch: row.batch,
        micro_batch: Some(row.micro_batch * row.dp),
        precision: DType::F16,
        ..Text::default()
    };
    let models = frontend::compile_both(&mut Sources::default(), "gpt.mdl", &text, &elaboration, &mut |_| Err("it imports nothing".into()));
    let models = models.expect("the text is right");
    unverified(models.training, models.evaluation, &plan).expect("the plan is right").job
}

/// The costs that replace those of a body's commands, and those that are added.
#[derive(Default)]
struct OfBody {
    instead: BTreeMap<usize, Cost>,
    more: BTreeMap<usize, Cost>,
}

/// The changes of costs that the parts make, by program and body.
struct Adapter<'a> {
    row: &'a Row,
    parts: &'a BTreeSet<Part>,
    machine: &'a Machine,
    job: &'a Job,
    bodies: Vec<Vec<OfBody>>,
}

impl<'a> Adapter<'a> {
    fn new(row: &'a Row, parts: &'a BTreeSet<Part>, machine: &'a Machine, job: &'a Job) -> Adapter<'a> {
        let mut adapter = Adapter { row, parts, machine, job, bodies: vec![] };
        let mut costs = Costs::new(job, machine, &Options::default());
        adapter.bodies = (0..job.programs.len()).map(|p| adapter.of_program(p, &mut costs)).collect();
        adapter
    }

    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// The cost of a kernel that only moves bytes.
    fn moves(&self, bytes: f64) -> Cost {
        Cost::new(Cause::Memory, memory(self.machine, bytes, 1)).and(Cause::Launch, self.machine.device.launch.value)
    }

    fn kernel(&self, action: &Action) -> Option<&Kernel> {
        if let Action::Launch { kernel, .. } = action { Some(&self.job.kernels[kernel.index()]) } else { None }
    }

    /// The last command of a layer in a body for which `is` holds.
    fn last(body: &ProgramBody, layer: u32, is: impl Fn(&Action) -> bool) -> Option<&Action> {
        body.commands.iter().rev().find(|c| c.origin.layer == Some(layer) && is(&c.action)).map(|c| &c.action)
    }

    fn of_program(&self, number: usize, costs: &mut Costs<'_>) -> Vec<OfBody> {
        let (job, program) = (self.job, &self.job.programs[number]);
        let stage = job.stages.iter().position(|s| s.program as usize == number).expect("a program is of a stage");
        let is_product = |a: &Action| self.kernel(a).is_some_and(|k| k.family == Family::Gemm);
        let is_exchange = |a: &Action| matches!(a, Action::Collective { .. });
        let mut out = vec![];
        for body in &program.bodies {
            let mut of = OfBody::default();
            let (is_forward, chunk) = match body.kind {
                BodyKind::Forward(chunk) => (true, chunk),
                BodyKind::Backward(chunk) => (false, chunk),
                _ => {
                    out.push(of);
                    continue;
                }
            };
            let forward = program.bodies.iter().find(|b| b.kind == BodyKind::Forward(chunk)).expect("a forward pass");
            if self.has(Part::Softmax) && self.row.stores_scores {
                of.instead = self.softmax(body);
            }
            let mut seen: BTreeSet<u32> = BTreeSet::new();
            for (at, command) in body.commands.iter().enumerate().filter(|(_, c)| is_product(&c.action)) {
                let Some(layer) = command.origin.layer.filter(|layer| seen.insert(*layer)) else { continue };
                // A backward pass first computes each layer again.
                let mut cost = self.forward() + if is_forward { Cost::default() } else { self.backward() };
                if !is_forward && self.has(Part::WholeLayer) {
                    let product = Self::last(forward, layer, is_product).map(|a| costs.work(stage, a).1);
                    let exchange = Self::last(forward, layer, is_exchange).and_then(|a| costs.exchange(stage, a));
                    cost = [product, exchange].into_iter().flatten().fold(cost, |sum, cost| sum + cost);
                }
                if !is_forward && self.has(Part::HalfGradients) {
                    // The kernel reads both and writes the sum. The first microbatch's gradients are the sums
                    // themselves.
                    let microbatches = (self.row.batch / self.row.dp / self.row.micro_batch) as f64;
                    let weights = 12.0 * (self.row.hidden * self.row.hidden / self.row.tp) as f64;
                    cost += self.moves(6.0 * weights).times(1.0 - 1.0 / microbatches);
                }
                of.more.insert(at, cost);
            }
            // The product that makes the logits belongs to no layer.
            let head = body.commands.iter().position(|c| c.origin.layer.is_none() && is_product(&c.action));
            if let (Some(at), false, true) = (head, is_forward, self.has(Part::CrossEntropy)) {
                let Row { micro_batch, seq, vocab, tp, .. } = *self.row;
                *of.more.entry(at).or_default() += self.moves((LOSS - OWN_LOSS) * (micro_batch * seq * vocab / tp) as f64);
            }
            out.push(of);
        }
        out
    }

    /// The costs of attention's core, as the paper's programs compute it.
    fn softmax(&self, body: &ProgramBody) -> BTreeMap<usize, Cost> {
        let (_, scores, _) = self.sizes();
        let mut out = BTreeMap::new();
        for (at, command) in body.commands.iter().enumerate().filter(|(_, c)| c.origin.scope.ends_with(".attn")) {
            let Some(kernel) = self.kernel(&command.action) else { continue };
            let cost = if let Some(p) = Product::of(kernel).filter(|_| kernel.family == Family::Gemm) {
                let (m, n, k) = (p.shape.rows as f64, p.shape.columns as f64, p.contracted as f64);
                let bytes = self.moves(2.0 * p.shape.repeats as f64 * (m * k + k * n + m * n));
                let arithmetic = product(self.machine, &p, 1).and(Cause::Launch, self.machine.device.launch.value);
                if bytes.seconds() > arithmetic.seconds() { bytes } else { arithmetic }
            } else if (Work::needed(kernel).bytes as f64) < scores {
                Cost::default()
            } else {
                // The kernel reads half of its inputs, up to the diagonal, and writes whole rows.
                self.moves(if command.origin.phase == Phase::Backward && !command.origin.recomputed { 2.0 } else { 1.5 } * scores)
            };
            out.insert(at, cost);
        }
        out
    }

    /// The bytes of a layer's input or output, the bytes of a rank's scores, and the width of tensor parallelism.
    fn sizes(&self) -> (f64, f64, f64) {
        let Row { micro_batch, seq, hidden, heads, tp, .. } = *self.row;
        (2.0 * (micro_batch * seq * hidden) as f64, 2.0 * (micro_batch * heads / tp * seq * seq) as f64, tp as f64)
    }

    /// The cost of a kernel that moves so many times the bytes of scores, if these are stored.
    fn of_scores(&self, times: f64) -> Cost {
        if self.row.stores_scores { self.moves(times * self.sizes().1) } else { Cost::default() }
    }

    /// The additional cost of a layer's forward pass, also where it is recomputed.
    fn forward(&self) -> Cost {
        let (n, _, tp) = self.sizes();
        let mut cost = Cost::default();
        if self.has(Part::Dropout) {
            // Dropout of probabilities reads, writes and stores a mask of one byte. The two kernels of bias, dropout
            // and sum only add their masks.
            cost += self.of_scores(2.5) + self.moves(2.0 * 0.5 * n);
        }
        if self.has(Part::Pointwise) {
            cost += self.moves(2.0 * 4.0 * n / tp) + self.moves(2.0 * 3.0 * n / tp) + self.moves(2.0 * n / tp);
            if self.row.tp == 1 {
                // If nothing is exchanged in between, mcc's product adds bias and residual beside its arithmetic.
                cost += self.moves(3.0 * n).times(2.0);
            }
        }
        cost
    }

    fn backward(&self) -> Cost {
        let (n, _, tp) = self.sizes();
        let mut cost = Cost::default();
        if self.has(Part::Dropout) {
            cost += self.of_scores(2.5) + self.moves(2.5 * n).times(2.0);
        }
        if self.has(Part::Pointwise) {
            cost += self.moves(3.0 * 4.0 * n / tp) + self.moves(2.0 * n / tp) + self.moves(3.0 * n).times(2.0);
        }
        cost
    }

    fn takes(&self, stage: usize, body: &ProgramBody, at: usize, cost: Cost) -> Cost {
        let number = self.job.stages[stage].program as usize;
        let program = &self.job.programs[number];
        let place = program.bodies.iter().position(|b| std::ptr::eq(b, body)).expect("a body of the program");
        let of = &self.bodies[number][place];
        let mut cost = of.instead.get(&at).copied().unwrap_or(cost);
        match &body.commands[at].action {
            // Norms and losses, which have few elements, stay as they are.
            Action::Collective { kind, group, dtype: DType::F32, count, .. } if body.kind == BodyKind::Reduce && *count > 1024 => {
                let group = &program.groups[group.index()];
                let members = group.members(&self.job.mesh, self.job.mesh.first_of_stage(stage as u64));
                if self.has(Part::HalfGradients) {
                    cost = collective(self.machine, *kind, &Reach::of(self.machine, &members), count * 2);
                }
                if self.has(Part::TorchDdp) && self.row.pp == 1 {
                    // The exchange takes longer by what kernels lose beside it.
                    cost = cost.times(self.machine.contention.kernels.value);
                }
            }
            Action::Send { hops, dtype, count, .. } | Action::Recv { hops, dtype, count, .. } if self.has(Part::ScatterGather) => {
                let from = self.job.mesh.first_of_stage(stage as u64);
                let to = self.job.mesh.first_of_stage((stage as u64).wrapping_add_signed(*hops));
                let part = count * dtype.bytes() / self.row.tp;
                cost = message(self.machine, from, to, part);
                if matches!(body.commands[at].action, Action::Recv { .. }) && self.row.tp > 1 {
                    let members: Vec<u64> = (0..self.row.tp).collect();
                    cost += collective(self.machine, ir::op::Collective::AllGather, &Reach::of(self.machine, &members), part);
                }
            }
            _ => {}
        }
        cost + of.more.get(&at).copied().unwrap_or_default()
    }
}

fn main() {
    let mut jobs: BTreeMap<Row, Job> = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let asked: Request = serde_json::from_str(&line.expect("a line")).expect("a request");
        let job = jobs.entry(asked.row.clone()).or_insert_with(|| job(&asked.row));
        let mut machine = Machine::parse(&asked.machine).expect("a machine file");
        let mut told = Response { seconds: vec![] };
        for [products, bytes] in asked.points {
            (machine.device.products.efficiency.value, machine.device.memory.efficiency.value) = (products, bytes);
            let adapter = Adapter::new(&asked.row, &asked.parts, &machine, job);
            let takes = |stage: usize, body: &ProgramBody, at: usize, cost: Cost| adapter.takes(stage, body, at, cost);
            let played = play(job, &machine, Options::default(), &takes).expect("it ends");
            told.seconds.push(played.end - played.begin);
        }
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &told).expect("it is written");
        out.write_all(b"\n").expect("it is written");
    }
}
