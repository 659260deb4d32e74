//! The jobs that faults are tried on: small models, with all that a compile can be asked for. Quick and usual ones come first.

use crate::harness::Case;
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, T5, case};
use crate::scores::SCORES;
use std::fmt;

/// A compile to try faults in: a model with settings and options.
pub struct FaultJob {
    name: String,
    pub text: String,
    pub defines: Vec<(String, String)>,
    pub case: Case,
}

impl fmt::Display for FaultJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

pub type Model = (&'static str, &'static [(&'static str, &'static str)]);

/// Every function with a slope, SGD with momentum and decay, a group of its own, a loss and a metric by name.
const FUNCTIONS: &str = "
model functions(batch, hidden = 8, classes = 5) {
  input x: f32[batch, hidden];
  input id: i32[batch];
  param w: [hidden] ~ normal(1);
  param table: [classes, hidden] ~ normal(1);
  let y = x * w + table[classes: id];
  let z = y * y + 1;
  let a = sin(y) + cos(y) * erf(y) + abs(y) - tanh(y);
  let b = maximum(y, w) - minimum(y, w * 2) * log(z);
  let c = sqrt(z) + rsqrt(z) / (1 + exp(minimum(y, 4))) + z ^ 1.5;
  let d = cumsum(y, over: hidden) * stop_gradient(y) + where(y > 0, y * w, z);
  dim half = hidden / 2, rest = half;
  let e = slice(a, hidden -> half, at: half) * slice(b, hidden -> half, at: 0);
  let f = concat(e, slice(c, hidden -> rest, at: 2), [half, rest] -> hidden);
  loss main = mean(f * d);
  loss other = mean((max(y, over: hidden) - 0.5) ^ 2);
  metric size = mean(y * y);
  metric least = mean(minimum(y, 0));
}
train { optimizer: sgd(momentum: 0.9); lr: linear(0.05, to: 0.001, warmup: 5, steps: 50); weight_decay: 0.1; clip: 0.5; group \"w\" { lr_scale: 0.5; } }
plan { dp: batch; tp: hidden; }";

/// Experts with a capacity per sequence.
const CAPACITY: &str = "
model capacity(batch, seq = 4, hidden = 4, ffn = 4, experts = 4, k = 2) {
  input x: f32[batch, seq, hidden];
  let score, chosen = top_k(linear(x, hidden, experts) as router, over: experts, k: k);
  let y = experts_mlp(x, chosen, score, [batch, seq], k, experts, hidden, ffn, capacity: 2, counted: seq) as experts;
  loss mean((y - x) ^ 2);
}
train { optimizer: adamw(betas: [0.9, 0.95], eps: 1e-8); lr: cosine(6e-4, to: 6e-5, warmup: 20, steps: 600); weight_decay: 0.1; clip: 1.0;
  group \"router.*\" { frozen: true; } }
plan { dp: batch; cp: seq; ep: experts; }";

/// Gradients that are large enough to be summed in two steps, also where ranks share them out.
const WIDE: &str = "
model wide(batch, hidden = 256) {
  input x: f32[batch, hidden];
  dim out = hidden;
  param w: [hidden, out] ~ normal(0.02);
  param b: [out] = 0;
  loss mean((dot(x, w, over: hidden) + b) ^ 2);
}
train { optimizer: sgd(momentum: 0.0); lr: constant(0.001); clip: 1.0; }
plan { dp: batch; }";

/// Experts with biases, and what tells their rows apart beside the expert.
const EXPERTS: &str = "
model experts(batch, seq = 4, hidden = 4, ffn = 4, experts = 4, k = 2) {
  input x: f32[batch, seq, hidden];
  let prob = softmax(linear(x, hidden, experts) as router, over: experts);
  let score, chosen = top_k(prob, over: experts, k: k);
  param up: [experts, hidden, ffn] ~ normal(0.5);
  param bias: [experts, ffn] ~ normal(0.5);
  param share: [seq, experts] ~ normal(0.5);
  param down: [experts, ffn, hidden] ~ normal(0.5);
  dim slot;
  let h = dispatch(x, chosen, over: [batch, seq, k], into: [experts, slot]);
  let a = tanh(dot(h, up, over: hidden) + bias) * share;
  let y = combine(dot(a, down, over: ffn), chosen, over: [batch, seq, k], from: [experts, slot]);
  loss mean(dot(score, y, over: k) ^ 2);
}
train { optimizer: lion(betas: [0.9, 0.99]); lr: constant(0.001); weight_decay: 0.1; clip: 1.0; }
plan { dp: batch; sp: seq; ep: experts; etp: ffn; }";

/// Matrices of heads and of experts, a router, a bias, norms' weights and a head, all with Muon.
const MUON: &str = "
model muon(batch, seq = 4, hidden = 8, heads = 2, head_dim = 4, ffn = 6, experts = 2, k = 1, classes = 3, layers = 2) {
  input x0: f32[batch, seq, hidden];
  let x = x0;
  repeat layers {
    let h = tanh(linear(rms_norm(x, over: hidden) as norm, hidden, [heads, head_dim], bias: true, std: 0.5) as q);
    x = x + linear(h, [heads, head_dim], hidden, std: 0.5) as o;
  }
  let score, chosen = top_k(linear(x, hidden, experts, std: 0.5) as router, over: experts, k: k);
  let y = experts_mlp(x, chosen, score, [batch, seq], k, experts, hidden, ffn) as experts;
  loss mean(linear(x + y, hidden, classes, std: 0.5) ^ 2);
}
train { optimizer: muon(momentum: 0.9, nesterov: false, scale: \"shape_scaling\"); lr: constant(0.01); weight_decay: 0.1; clip: 1.0; group \"experts.up.*\" { lr_scale: 0.5; } }
plan { dp: batch; tp: heads, ffn; pp: layers; ep: experts; }";

const NOTHING: &[(&str, &str)] = &[];

/// Models with the meshes to compile each for; settings that differ from the model's come before a bar.
const JOBS: &[(&str, Model, &[&str])] = &[
    (
        "gpt2",
        GPT2,
        &[
            "m2",
            "tp2 sp m2",
            "dp2 tp2 m2",
            "dp2 tp2 sp zero2 logits2",
            "frugal dp2 tp2 zero2",
            "dp4 zero1 replicas2 m2",
            "dp4 zero3 replicas2",
            "pp2 m3",
            "dp2 zero1 m2",
            "dp3 zero1 m2",
            "vocab=23 | tp2 m2",
            "bf16 m2",
            "f16 dp2 m2",
            "m2 full1",
            "dp2 zero3 m2",
            "dp2 zero2 m2 bucket40",
            "offload dp2 zero1 m2",
            "spill m2",
            "spill offload pp2 m4",
            "bf16 offload m2",
            "offload m2",
            "disk m2",
            "bf16 disk dp2 zero1 m2",
            "offload params m2",
            "vocab=26 | bucket40 offload m2",
            "bucket100 bf16 offload params m2",
            "bucket40 offload params dp2 zero1 m2",
            "vocab=512 hidden=16 | bucket2048 bf16 disk params_disk m2",
            "vocab=512 hidden=16 | bf16 disk params_disk dp2 zero1 m2",
            "seq=8 | tp2 sp chunks2",
            "seq=8 | cp2 m2",
            "seq=8 | cp2 ulysses",
            "seq=16 | cp4",
            "seq=8 | cp2 gather m2",
            "tf tp2 sp m2",
            "bf16 tf m2",
            "dropout_rate=0.25 | tp2 sp m2 full1",
            "dropout_rate=0.25 | dp2 m2",
            "m2 selective",
            "m2 segments2",
            "bf16 tp2 pp2 m2 segments4",
            "pp2 v2 m5 group3",
            "pp2 v2 m2 gpipe",
            "pp2 m3 zbh1",
            "pp2 m4 zbv",
            "spill pp2 m4 zbv",
            "paired tp2 m4",
            "paired tp2 pp2 m2",
            "paired tp2 pp2 v2 m6",
            "paired tp2 pp2 m6 dualpipev",
            "pp4 m3",
            "dp4 tp2 zero1 sp m2",
            "vocab=23 | dp2 tp2 zero1 m2",
            "vocab=23 | bf16 dp2 tp2 pp2 sp zero1 m2",
            "bf16 dp2 zero1 m2",
            "bf16 dp2 tp2 sp zero2 m2",
            "dp2 tp2 pp2 sp m2 b2",
            "dp2 pp2 zero3 m2",
            "f16 offload pp2 v2 m2",
            "bf16 offload dp2 zero3 m2",
            "seq=16 | cp4 both",
            "tp2 pp2 sp m4 full1",
        ],
    ),
    (
        "llama",
        LLAMA,
        &[
            "m2",
            "m2 logits2",
            "dp2 logits2",
            "tp4 sp m2",
            "window=3 seq=8 | cp2",
            "window=2 window_every=2 | tp2 sp m2",
            "packed=true | tp2 sp m2",
            "tied=true | pp4 m2",
            "tied=true | dp2 pp2 zero1 m2",
            "bf16 pp2 tp2 sp m2",
            "bf16 dp2 zero1 m2 b2 segments8",
            "seq=8 | cp4 tp2 gather",
            "seq=8 | tp4 sp chunks2 full1",
        ],
    ),
    ("functions", (FUNCTIONS, NOTHING), &["m2", "dp2 tp2 m2", "f16 tp2 m2", "dp2 zero1"]),
    (
        "mixtral",
        MIXTRAL,
        &[
            "",
            "dp2 ep2",
            "tp2 sp ep2 etp1",
            "dp2 tp2 sp ep2 pp2 m2",
            "dp2 ep2 b4 room175",
            "bf16 dp2 ep2 b4 room70 passes3",
            "spill dp2 ep2 b4 room70 passes3 m2",
            "offload params dp2 ep2 b4 room70 passes3",
            "seq=8 | dp2 ep2 room70 passes3 selective m2",
        ],
    ),
    (
        "experts",
        (EXPERTS, NOTHING),
        &["b2", "dp2 ep2", "dp2 tp2 sp ep4 etp1", "dp2 ep2 b4 room175", "dp2 ep2 b4 room70 passes3", "dp2 ep2 b4 room50 passes3"],
    ),
    ("deepseek", DEEPSEEK, &["m2", "dp2 ep2 m2", "dp2 pp2 ep2 m2", "bf16 offload dp2 ep2 zero1 m2"]),
    (
        "t5",
        T5,
        &[
            "m2",
            "tp2 sp m2",
            "pp2 m2",
            "encoder_layers=2 decoder_layers=2 | pp2 m2 zbv",
            "encoder_layers=2 decoder_layers=2 | pp4 m3 zbh1 full1",
            "encoder_layers=3 decoder_layers=5 | pp4 m2",
        ],
    ),
    ("capacity", (CAPACITY, NOTHING), &["b2", "dp2 ep2", "dp2 ep2 b4 room175"]),
    ("muon", (MUON, NOTHING), &["m2", "dp2 tp2 m2", "dp2 zero1 m2", "bf16 dp4 zero2 m2", "layers=4 | dp2 zero2 m2"]),
    ("wide", (WIDE, NOTHING), &["m2", "hidden=512 | dp2 zero1 m2"]),
    ("scores", SCORES, &["m2", "dp2 tp2 m2", "cp2", "table=false | cp2"]),
];

/// All compiles in which faults are tried.
pub fn jobs() -> Vec<FaultJob> {
    JOBS.iter().flat_map(|(name, model, all)| all.iter().map(|words| FaultJob::new(name, *model, words))).collect()
}

impl FaultJob {
    /// A model with `settings | mesh`, or with a mesh alone.
    pub fn new(name: &str, (text, defines): Model, words: &str) -> FaultJob {
        let (settings, mesh) = words.split_once(" | ").unwrap_or(("", words));
        let own: Vec<(&str, &str)> = settings.split_whitespace().filter_map(|s| s.split_once('=')).collect();
        let others = defines.iter().filter(|(n, _)| own.iter().all(|o| o.0 != *n));
        let defines = others.chain(&own).map(|(n, v)| (n.to_string(), v.to_string())).collect();
        FaultJob { name: format!("{name} {words}"), text: text.to_string(), defines, case: case(mesh) }
    }
}
