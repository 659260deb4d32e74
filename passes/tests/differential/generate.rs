//! Random models as .mdl text, with a mesh, a schedule and ranges of inputs that fit them.
//!
//! A model is a stream of values `[batch, hidden]` or `[batch, seq, hidden]` through `repeat`s of random blocks, with one or more losses
//! at its end. All sizes are small, few divide by all that they are split by, and dims that axes split are chosen at random, so
//! that most sharding decisions come up somewhere. Models for [`Data::Exact`] compute integers alone: values are clamped
//! from layer to layer, so that every sum is exact.

mod blocks;
mod captures;
mod extras;
mod schedules;

use crate::harness::{Case, Data, Range, Ranges};
use captures::Captures;
use extras::Extras;
use ir::op::DType;
use ir::options::{Counts, CpComm, Cuts, MOE_PASSES, MemoryOrder, MoeBuffer, Offload, ParamOffload, Recompute, RowChoice, TpOverlap, Zero};
use ir::pipeline::Schedule;
use ir::random::mix;
use std::fmt::Write;

/// A model and how to run it.
pub struct Triple {
    pub text: String,
    pub case: Case,
    pub ranges: Ranges,
    /// The part of the model that several microbatches rule out, if there is one.
    pub whole: BatchNeeds,
}

/// The part of a model that needs the whole batch before the step's end.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchNeeds {
    /// Rows of the batch meet: E0636 with several microbatches.
    pub meets: bool,
    /// A sum over the batch of what parameters make is used other than linearly: E0631 with several microbatches.
    pub sums: bool,
}

/// The model, mesh and schedule of a seed.
pub fn triple(seed: u64) -> Triple {
    let mut dice = Rng(mix(seed));
    let case = case(&mut dice, seed);
    let mut writer = Writer::new(dice, case);
    writer.model();
    Triple { text: writer.text, case: writer.case, ranges: writer.ranges, whole: writer.extras.whole }
}

/// Deterministic random choices.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 11) % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    fn pick2(&mut self, a: &'static str, b: &'static str) -> &'static str {
        self.pick(&[a, b])
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

fn case(dice: &mut Rng, seed: u64) -> Case {
    let (mut dp, mut tp, mut pp) = (dice.pick(&[1, 1, 2, 2, 3, 4]), dice.pick(&[1, 2, 2, 3, 4, 4, 6, 8]), dice.pick(&[1, 1, 2, 2, 3, 4]));
    let mut cp = dice.pick(&[1, 1, 1, 2, 2, 3, 4]);
    if is_steered(seed) {
        (cp, pp) = (2, 2);
        (dp, tp) = dice.pick(&[(1, 1), (2, 1), (1, 2), (1, 3)]);
    }
    // Twelve ranks are enough, as more find nothing new.
    while dp * cp * tp * pp > 12 {
        match dice.below(4) {
            0 => dp = 1,
            1 => tp = dice.pick(&[1, 2]),
            2 => cp = dice.pick(&[1, 2]),
            _ => pp = dice.pick(&[1, 2]),
        }
    }
    // The grid of experts follows tensor parallelism or is drawn by itself.
    let divisor = |dice: &mut Rng, n: u64| dice.pick(&(1..=n).filter(|d| n.is_multiple_of(*d)).collect::<Vec<u64>>());
    let etp = if dice.chance(50) { Some(divisor(dice, tp)) } else { None };
    let ep = divisor(dice, dp * cp * tp / etp.unwrap_or(tp));
    let micro_batch = dice.pick(&[1, 1, 2]);
    let (schedule, vpp, group, microbatches) = schedules::schedule(dice, pp);
    let (schedule, pairs) = schedules::pairs(seed, schedule);
    let random = dice.chance(40);
    let data = dice.pick(&[Data::Real, Data::Real, Data::Exact]);
    let precision = dice.pick(&[DType::F32, DType::F32, DType::F32, DType::Bf16, DType::F16]);
    let tp_overlap = Rng(mix(!seed ^ 2)).pick(&[TpOverlap::Off, TpOverlap::Pipeline { chunks: 2 }, TpOverlap::Pipeline { chunks: 3 }]);
    let moe_passes = Rng(mix(!seed ^ 10)).pick(&[1, 2, 3, MOE_PASSES]);
    Case {
        dp,
        cp,
        cp_comm: dice.pick(&[CpComm::Ring, CpComm::Ring, CpComm::AllGather, CpComm::AllToAll, CpComm::AllToAllAndRing]),
        tp,
        ep,
        etp,
        pp,
        sp: dice.chance(50),
        tp_overlap,
        // Later options have their own random generators, so that the models of seeds do not change.
        zero: Rng(mix(!seed)).pick(&Zero::ALL),
        replicas: divisor(&mut Rng(mix(!seed ^ 7)), dp),
        pairs,
        memory_order: Rng(mix(!seed ^ 9)).pick(&[MemoryOrder::Time, MemoryOrder::Time, MemoryOrder::Memory]),
        offload: Rng(mix(!seed ^ 4)).pick(&[Offload::Off, Offload::Off, Offload::Optimizer, Offload::Disk]),
        param_offload: Rng(mix(!seed ^ 12)).pick(&[ParamOffload::Off, ParamOffload::Off, ParamOffload::Host, ParamOffload::Disk]),
        activation_offload: Rng(mix(!seed ^ 11)).pick(&schedules::ACTIVATIONS),
        bucket_size: Rng(mix(!seed ^ 1)).pick(&[None, Some(1), Some(50), Some(300)]),
        moe_buffer: Rng(mix(!seed ^ 3)).pick(match moe_passes {
            MOE_PASSES => &[MoeBuffer::Whole, MoeBuffer::Factor(0.3), MoeBuffer::Factor(0.7)],
            _ => &[MoeBuffer::Whole, MoeBuffer::Factor(1.0), MoeBuffer::Factor(1.5)],
        }),
        moe_passes,
        micro_batch,
        global_batch: dp * micro_batch * microbatches,
        schedule,
        vpp,
        group,
        // Random rules complete sums late, which rounds 16-bit sums too much.
        rows: if random && (precision == DType::F32 || data == Data::Exact) { RowChoice::Random(seed) } else { RowChoice::Rules },
        layout: Cuts::Even { embedding: counts(dice), loss: counts(dice) },
        seed,
        data,
        inline_ops: dice.chance(20),
        recompute: dice.pick(&[
            Recompute::None,
            Recompute::None,
            Recompute::Selective,
            Recompute::Uniform(1),
            Recompute::Uniform(2),
            Recompute::Block(1),
        ]),
        precision,
        tf32: Rng(mix(!seed ^ 5)).pick(&[false, false, true]),
        logits: Rng(mix(!seed ^ 8)).pick(&[1, 1, 2, 3]),
        // With chunks, all products stay whole.
        segments: if tp_overlap == TpOverlap::Off { Rng(mix(!seed ^ 6)).pick(&[1, 2, 4]) } else { 1 },
    }
}

/// Whether a seed is forced to a rare combination: attention of context-parallel ranks in a pipeline.
fn is_steered(seed: u64) -> bool {
    seed % 6 == 5
}

fn counts(dice: &mut Rng) -> Counts {
    if dice.chance(30) { Counts::AsLayer } else { Counts::AsNothing }
}

fn virtual_stages(case: &Case) -> u64 {
    let chunks = match &case.schedule {
        Schedule::GPipe | Schedule::OneFOneB => case.vpp.unwrap_or(1),
        Schedule::ZbH1 => 1,
        Schedule::ZbV | Schedule::DualPipeV => 2,
        Schedule::Given(order) => u64::from(order.chunks()),
    };
    case.pp * chunks
}

/// The dims of the token stream beside `hidden`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tokens {
    Rows,
    Sequences,
}

struct Writer {
    dice: Rng,
    case: Case,
    text: String,
    ranges: Ranges,
    indent: usize,
    tokens: Tokens,
    sizes: Sizes,
    /// Iterations of each repeat.
    layers: Vec<u64>,
    blocks: u32,
    /// Where the last block begins in the text.
    before: usize,
    dropout: bool,
    /// Labels carry -100.
    ignored: bool,
    /// No two positions are equal up to rounding, which would decide the gradient of a maximum.
    distinct: bool,
    captures: Captures,
    extras: Extras,
}

/// Sizes of the dims that every model has.
struct Sizes {
    seq: u64,
    hidden: u64,
    ffn: u64,
    kv: u64,
    group: u64,
    head_dim: u64,
    vocab: u64,
    classes: u64,
    experts: u64,
    expert_ffn: u64,
    top: u64,
}

impl Writer {
    fn new(mut dice: Rng, case: Case) -> Writer {
        let tp = case.tp;
        // Most sizes are multiples of tp; the others need not be.
        let mut split = |likely: u64| if dice.chance(likely) { tp * dice.pick(&[1, 1, 2, 3]) } else { dice.pick(&[2, 3, 4, 5, 6]) };
        let (ffn, seq, vocab, classes) = (split(90), split(70), split(40) + 3, split(80));
        let experts = if dice.chance(95) { (case.ep * dice.pick(&[1, 1, 2])).max(case.ep.max(2).next_multiple_of(case.ep)) } else { 3 };
        // An all-to-all needs heads for every rank.
        let shared = if case.cp_comm == CpComm::AllToAll { case.cp * tp } else { 1 };
        let sizes = Sizes {
            // Context parallelism refuses sequences that it does not divide.
            seq: seq.clamp(2, 12).next_multiple_of(case.cp),
            hidden: dice.pick(&[2, 4, 4, 6]),
            ffn,
            kv: dice.pick(&[1, 1, 2, 2, 3, 4]),
            group: dice.pick::<u64>(&[1, 2, 2, 3, 4]).next_multiple_of(shared),
            head_dim: dice.pick(&[2, 4]),
            vocab,
            classes,
            experts,
            expert_ffn: if dice.chance(95) { case.etp.unwrap_or(tp) * dice.pick(&[1, 2]) } else { dice.pick(&[2, 3]) },
            top: dice.pick(&[1, 2, 2, 3]).min(experts),
        };
        let repeats = if dice.chance(25) { 2 } else { 1 };
        let mut layers: Vec<u64> = (0..repeats).map(|_| 1 + dice.below(3)).collect();
        let short = virtual_stages(&case).saturating_sub(layers.iter().sum());
        layers[0] += short;
        let tokens = if dice.chance(80) || is_steered(case.seed) { Tokens::Sequences } else { Tokens::Rows };
        let (captures, extras) = (Captures::new(case.seed), Extras::new(case.seed));
        let (dropout, ignored) = (case.data == Data::Real && dice.chance(15), dice.chance(40));
        Writer {
            dice,
            case,
            text: String::new(),
            ranges: Ranges::new(),
            indent: 0,
            tokens,
            sizes,
            layers,
            blocks: 0,
            before: 0,
            dropout,
            ignored,
            distinct: false,
            captures,
            extras,
        }
    }

    fn line(&mut self, line: impl AsRef<str>) {
        let line = line.as_ref();
        if line.starts_with('}') {
            self.indent -= 1;
        }
        writeln!(self.text, "{}{line}", "  ".repeat(self.indent)).expect("writing to a string");
        if line.ends_with('{') {
            self.indent += 1;
        }
    }

    fn exact(&self) -> bool {
        self.case.data == Data::Exact
    }

    fn sequences(&self) -> bool {
        self.tokens == Tokens::Sequences
    }

    /// The token dims, as in types.
    fn at(&self) -> &'static str {
        match self.tokens {
            Tokens::Rows => "batch",
            Tokens::Sequences => "batch, seq",
        }
    }

    fn model(&mut self) {
        let s = &self.sizes;
        let layers: Vec<String> = self.layers.iter().enumerate().map(|(k, n)| format!("depth{k} = {n}")).collect();
        let header = format!(
            "model random(batch, seq = {}, hidden = {}, ffn = {}, kv = {}, group = {}, head_dim = {}, vocab = {}, classes = {}, experts = {}, expert_ffn = {}, top = {}, {}) {{",
            s.seq,
            s.hidden,
            s.ffn,
            s.kv,
            s.group,
            s.head_dim,
            s.vocab,
            s.classes,
            s.experts,
            s.expert_ffn,
            s.top,
            layers.join(", ")
        );
        self.line(header);
        self.helpers();
        self.entry();
        self.extra(Self::beside_entry);
        let shared = self.dice.chance(20);
        if shared {
            self.line("param shared: [hidden] ~ normal(0.02);");
        }
        let second = self.dice.chance(15);
        if second {
            self.line("let y = stop_gradient(x) * 2;");
        }
        self.before_layers();
        let last = self.layers.len() - 1;
        for k in 0..self.layers.len() {
            let blocks: Vec<String> = (0..1 + self.dice.below(2)).map(|_| self.block()).collect();
            let beside = if k == last { self.extra(Self::extra_block) } else { None };
            self.repeat(k, &blocks, beside, shared, second);
        }
        if second {
            self.line("x = x + y;");
        }
        self.after_layers();
        self.head();
        self.extra(Self::beside_head);
        self.line("}");
        self.train();
        self.plan();
    }

    fn helpers(&mut self) {
        let norm = if self.exact() {
            "minimum(maximum(x, -2), 2)"
        } else {
            let norm = self.dice.pick(&["rms_norm(x, over: hidden)", "layer_norm(x, over: hidden)", "tanh(x)"]);
            // A layer norm of two elements is a sign; if they are equal in 16 bits, it and its gradient are noise.
            let sign = norm.starts_with("layer_norm") && self.sizes.hidden == 2 && self.case.precision.is_half();
            if sign { "rms_norm(x, over: hidden)" } else { norm }
        };
        self.line(format!("fn norm(x) = {norm};"));
        let act = match self.exact() {
            true => self.dice.pick(&["relu(x)", "abs(x)", "minimum(maximum(x, -3), 3)", "where(x > 1, x, 0)", "relu2(minimum(x, 2))"]),
            false => self.dice.pick(&["gelu_tanh(x)", "gelu(x)", "silu(x)", "relu(x)", "tanh(x)", "x * rsqrt(1 + x * x)", "sigmoid(x)"]),
        };
        self.line(format!("fn act(x) = {act};"));
        let drop = if self.dropout { "dropout(x, 0.5)" } else { "x" };
        self.line(format!("fn drop(x) = {drop};"));
    }

    /// `x` from inputs.
    fn entry(&mut self) {
        let at = self.at();
        let kind = self.dice.below(3);
        // Two elements become plus and minus one by normalisation.
        self.distinct = (kind != 1 || self.exact()) && self.sizes.hidden > 2;
        if kind != 0 {
            self.line(format!("input tokens: i32[{at}];"));
            self.ranges.insert("tokens".into(), Range { below: self.sizes.vocab, ignored: false });
            self.line("param wte: [vocab, hidden] ~ normal(0.02);");
            self.line("let x = wte[vocab: tokens];");
        }
        if kind != 1 {
            self.line("dim features = 3;");
            self.line(format!("input feats: [{at}, features];"));
            let bias = self.dice.chance(50);
            let first = format!("linear(feats, features, hidden, bias: {bias}) as embed");
            self.line(if kind == 0 { format!("let x = {first};") } else { format!("x = x + {first};") });
        }
        if self.sequences() && self.dice.chance(50) {
            self.line("param wpe: [seq, hidden] ~ normal(0.02);");
            self.line("x = x + wpe;");
            self.distinct = self.sizes.hidden > 2 || self.exact();
        }
        if self.dice.chance(30) {
            // A statistic of data alone is computed before the first microbatch.
            self.line(format!("input weight: [{at}];"));
            let whole = if self.exact() { "maximum(minimum(sum(weight), 2), -2)" } else { "1 / (1 + abs(mean(weight)))" };
            self.line(format!("let weigh = {whole};"));
            self.line("x = x * weigh;");
        }
        self.line("x = drop(norm(x) as norm0);");
    }

    fn repeat(&mut self, k: usize, blocks: &[String], beside: Option<&str>, shared: bool, second: bool) {
        self.line(format!("repeat i in depth{k} as layers{k} {{"));
        let parallel = blocks.len() > 1 && self.dice.chance(40);
        let alternate = self.dice.chance(25);
        if alternate {
            self.line("let z = x;");
            self.line("if i % 2 == 0 {");
            self.line("z = x * 2;");
            self.line("}");
        } else {
            self.line("let z = x;");
        }
        if shared {
            self.line("z = z * shared;");
        }
        self.in_layers(k);
        if let Some(beside) = beside {
            self.line(format!("z = z + real({beside}(norm(z) as norm_{beside}) as {beside});"));
            if self.exact() {
                self.line("z = minimum(maximum(z, -3), 3);");
            }
        }
        if parallel {
            let calls: Vec<String> = blocks.iter().enumerate().map(|(n, b)| format!("{b}(n) as part{n}")).collect();
            self.line("let n = norm(z) as norm;");
            for (n, call) in calls.iter().enumerate() {
                self.line(format!("let p{n} = {call};"));
            }
            let sum: Vec<String> = (0..blocks.len()).map(|n| format!("p{n}")).collect();
            self.line(format!("x = x + {};", sum.join(" + ")));
        } else {
            for (n, b) in blocks.iter().enumerate() {
                let input = if n == 0 { "z" } else { "x" };
                match self.dice.below(4) {
                    0 => self.line(format!("x = norm({b}({input}) as part{n}) as norm{n};")),
                    1 => self.line(format!("x = norm(x + {b}({input}) as part{n}) as norm{n};")),
                    _ => self.line(format!("x = x + drop({b}(norm({input}) as norm{n}) as part{n});")),
                }
            }
        }
        if self.exact() {
            self.line("x = minimum(maximum(x, -3), 3);");
        }
        if second {
            let carry = self.dice.pick2("y = y + x;", "y = x - y;");
            self.line(carry);
        }
        self.at_layers_end();
        if self.dice.chance(20) {
            let term = if self.exact() { "sum(x)" } else { "mean(x * x)" };
            self.line(format!("loss aux = {term};"));
        }
        self.line("}");
        self.between_layers(k);
    }

    fn head(&mut self) {
        let at = self.at();
        self.line("x = norm(x) as last_norm;");
        let tied = self.text.contains("param wte") && self.dice.chance(60);
        let mut losses = 0;
        if !self.exact() && self.dice.chance(75) {
            self.line(format!("input targets: i32[{at}];"));
            let below = if tied { self.sizes.vocab } else { self.sizes.classes };
            self.ranges.insert("targets".into(), Range { below, ignored: self.ignored });
            let over = if tied { "vocab" } else { "classes" };
            self.line(if tied { "let logits = dot(x, wte, over: hidden);" } else { "let logits = linear(x, hidden, classes, bias: true) as head;" });
            self.line(format!("loss token_loss(logits, targets, over: {over});"));
            if self.dice.chance(40) {
                self.line(format!("metric accuracy = mean(f32(argmax(logits, over: {over}) == targets));"));
            }
            losses += 1;
        }
        if losses == 0 || self.dice.chance(30) {
            self.pooled();
        }
        if self.dice.chance(15) && self.text.contains("param wte") {
            // A loss of parameters alone is the same in every microbatch, and counts once.
            self.line("loss size_of_embedding = sum(wte * wte);");
        }
        if self.dice.chance(25) {
            let what = if self.exact() { "sum(x)" } else { "mean(x * x)" };
            self.line(format!("metric size = {what};"));
        }
    }

    /// A loss over what remains after pooling the sequence, or over everything.
    fn pooled(&mut self) {
        let at = self.at();
        let pool = if self.sequences() { self.dice.below(5) } else { 4 };
        let (rows, at) = match pool {
            0 => ("sum(x, over: seq)", "batch"),
            1 if self.distinct => ("max(x, over: seq)", "batch"),
            2 => ("x[seq: 0]", "batch"),
            3 => {
                self.line("dim picks = 2;");
                self.line("input pick: i32[batch, picks];");
                self.ranges.insert("pick".into(), Range { below: self.sizes.seq, ignored: false });
                ("x[seq: pick]", "batch, picks")
            }
            _ => ("x", at),
        };
        self.line(format!("let pooled = {rows};"));
        self.line(format!("input goal: [{at}, classes];"));
        self.line("let guess = linear(pooled, hidden, classes) as guess;");
        let loss = match self.exact() {
            true => self.dice.pick(&["sum(abs(guess - goal))", "sum(guess * goal)", "sum(maximum(guess, goal))", "sum((guess - goal) ^ 2)"]),
            false => self.dice.pick(&[
                "mean((guess - goal) ^ 2)",
                "sum(abs(guess - goal))",
                "mean(tanh(guess) * goal)",
                "mean(log_sum_exp(guess - goal, classes))",
            ]),
        };
        self.line(format!("loss fit = {loss};"));
    }

    fn train(&mut self) {
        let optimizer = match (self.exact(), self.dice.below(3)) {
            (true, 0) => "sgd(momentum: 0.5)",
            (true, _) => "sgd(momentum: 0)",
            (false, 0) => "sgd(momentum: 0.9)",
            (false, _) => "adamw(betas: [0.9, 0.95], eps: 1e-3)",
        };
        self.line("train {");
        self.line(format!("optimizer: {optimizer};"));
        let decay = if self.exact() { self.dice.pick(&["0.0", "0.25"]) } else { self.dice.pick(&["0.0", "0.1"]) };
        self.line(format!("weight_decay: {decay};"));
        if !self.exact() && self.dice.chance(40) {
            self.line("clip: 0.1;");
        }
        if self.dice.chance(20) {
            let pattern = self.dice.pick(&["wte", "*.w", "layers0.*"]);
            let setting = self.dice.pick(&["frozen: true", "lr_scale: 0.5", "decay: false"]);
            self.line(format!("group \"{pattern}\" {{"));
            self.line(format!("{setting};"));
            self.line("}");
        }
        self.line("}");
    }

    fn plan(&mut self) {
        // Dims that tp may split come in random order; most that it does not divide are left out.
        let tp = self.case.tp;
        let s = &self.sizes;
        let all = [
            ("kv", s.kv),
            ("group", s.group),
            ("ffn", s.ffn),
            ("classes", s.classes),
            ("vocab", tp),
            ("hidden", s.hidden),
            ("head_dim", s.head_dim),
            ("mixed", s.ffn),
            ("experts", s.experts),
        ];
        let mut listed: Vec<&str> = vec![];
        for (name, size) in all {
            let fits = (2..=tp).find(|p| tp.is_multiple_of(*p)).is_none_or(|p| size.is_multiple_of(p));
            let wanted = match name {
                "hidden" => 15,
                "head_dim" | "experts" => 10,
                _ => 85,
            };
            let exists = name != "mixed" || self.text.contains("dim mixed");
            if exists && self.dice.chance(wanted) && (fits || self.dice.chance(3)) {
                let at = self.dice.below(listed.len() as u64 + 1) as usize;
                listed.insert(at, name);
            }
        }
        self.line("plan {");
        let dp = if self.dice.chance(15) { "dp: batch | hidden;" } else { "dp: batch;" };
        self.line(dp);
        self.line("cp: seq;");
        if self.case.cp_comm == CpComm::AllToAll {
            self.line("attention.cp: group, kv;");
        }
        self.line("ep: experts;");
        self.line("etp: expert_ffn;");
        if !listed.is_empty() {
            let tiers = self.dice.below(5) == 0 && listed.len() > 1;
            let bar = 1 + self.dice.below(listed.len() as u64 - u64::from(tiers)) as usize;
            let text = if tiers { format!("{} | {}", listed[..bar].join(", "), listed[bar..].join(", ")) } else { listed.join(", ") };
            self.line(format!("tp: {text};"));
        }
        if self.sequences() {
            self.line("sp: seq;");
        }
        let depths: Vec<String> = (0..self.layers.len()).map(|k| format!("depth{k}")).collect();
        self.line(format!("pp: {};", depths.join(", ")));
        self.line("}");
        let total: u64 = self.layers.iter().sum();
        let parts = virtual_stages(&self.case);
        if parts > 1 && total > parts && self.dice.chance(50) {
            if self.dice.chance(30) {
                self.case.layout = Cuts::Balanced;
                return;
            }
            let mut sizes = vec![1u32; parts as usize];
            for _ in parts..total {
                let k = self.dice.below(parts) as usize;
                sizes[k] += 1;
            }
            self.case.layout = Cuts::Sizes(sizes);
        }
    }
}
