//! (Model, mesh, schedule) through native code and rank processes, against the reference interpreter: every loss,
//! gradient norm and updated weight, within bounds of f32, and exactly where integers are all there is.

use crate::differential::generate;
use crate::harness::{self, Case, Data, Ranges};
use crate::mcc::{Dir, Weights, load_weights, metrics, models, save_array, save_weights};
use crate::reference::{InitialState, Rounding, Trained, train};
use frontend::Models;
use ir::model::{Model, Optimizer};
use ir::op::{DType, Real};
use ir::options::{Counts, CpComm, Cuts, Options, Recompute, RowChoice, Zero};
use ir::pipeline::Schedule;
use ir::random;
use passes::compile::{CompileError, Compiled};
use std::collections::BTreeMap;
use std::fs;

const SEED: u64 = 5;
const STEPS: u64 = 2;

/// A model text and how to compile it.
struct Triple {
    text: String,
    defines: Vec<(String, String)>,
    case: Case,
    ranges: Ranges,
    recipe: Recipe,
}

impl Triple {
    /// Integers stay integers at 1.
    fn rate(&self) -> f64 {
        match self.case.data {
            Data::Real => 0.0625,
            Data::Exact => 1.0,
        }
    }
}

/// How to train.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recipe {
    /// As the text says.
    Text,
    Sgd,
    /// With a large epsilon: where a gradient is rounding and nothing else, so is the step.
    AdamW,
}

impl Recipe {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Recipe::Text => &[],
            Recipe::Sgd => &["--optimizer", "sgd", "--sgd-momentum", "0"],
            Recipe::AdamW => &["--optimizer", "adamw", "--adam-eps", "0.001"],
        }
    }

    fn set(self, model: &mut Model) {
        match (self, &mut model.train.optimizer) {
            (Recipe::Text, _) => {}
            (Recipe::Sgd, o) => *o = Optimizer::Sgd { momentum: Real(0.0) },
            (Recipe::AdamW, Optimizer::AdamW { eps, .. }) => *eps = Real(1e-3),
            (Recipe::AdamW, o) => *o = Optimizer::AdamW { beta1: Real(0.9), beta2: Real(0.95), eps: Real(1e-3) },
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Within bounds of f32.
    Right,
    /// To the last bit.
    Exact,
    /// What the compiler says.
    Refused(String),
    /// The logical graph itself leaves what f32 can hold.
    NotFinite,
    /// Rounding changes results by more than the bounds: a maximum of equals, an edge.
    Unstable,
}

/// Compiles and trains a triple, and compares.
fn run(triple: &Triple) -> Result<Outcome, String> {
    let compiled = match logical(triple)? {
        Ok(c) => c,
        Err(why) => return Ok(Outcome::Refused(why)),
    };
    let start = start(&compiled, triple);
    let want = train(&compiled.graph, &start, Rounding::None);
    if !want.finite {
        return Ok(Outcome::NotFinite);
    }
    let dir = Dir::new();
    dir.write("model.mdl", &triple.text);
    if let Schedule::Given(order) = &triple.case.schedule {
        dir.write(ORDER, order.text());
    }
    let done = dir.mcc(compile_arguments(triple));
    if matches!(done.code, Some(1 | 2)) && !done.stderr.contains("bug") && done.stderr.contains("error[E") {
        return Ok(Outcome::Refused(done.stderr));
    }
    let ended = |what: &str, done: &crate::mcc::CommandOutput| match done.code {
        Some(0) => Ok(()),
        code => Err(format!("{what} ended with {code:?}: {}{}", done.stdout, done.stderr)),
    };
    ended("mcc compile", &done)?;
    save_weights(&dir.path("init.safetensors"), &start.weights);
    let mut arguments = vec!["run".to_string(), "out.mcc".into(), "--steps".into(), STEPS.to_string(), "--seed".into(), SEED.to_string()];
    arguments.extend(
        "--init init.safetensors --force --save-weights out.safetensors --metrics metrics.jsonl --threads-per-rank 1".split(' ').map(String::from),
    );
    for input in &compiled.job.inputs {
        let name = &input.name;
        let data = start.inputs.iter().flat_map(|step| step[name].iter().copied());
        let shape: Vec<u64> = std::iter::once(STEPS).chain(input.dims.iter().map(|d| d.size)).collect();
        let path = dir.path(&format!("{name}.npy"));
        match input.dtype {
            DType::I32 => save_array(&path, &shape, data.map(|x| x as i32)),
            DType::Bool => save_array(&path, &shape, data.map(|x| x != 0.0)),
            DType::F32 | DType::Bf16 | DType::F16 => save_array(&path, &shape, data.map(|x| x as f32)),
        }
        arguments.extend(["--data".into(), format!("{name}={name}.npy")]);
    }
    ended("mcc run", &dir.mcc(&arguments))?;
    match compare(&start, &want, &metrics(&dir.path("metrics.jsonl")), &load_weights(&dir.path("out.safetensors"))) {
        Err(_) if !want.exact && unstable(&compiled, &start, &want) => Ok(Outcome::Unstable),
        other => other.map(|()| if want.exact { Outcome::Exact } else { Outcome::Right }),
    }
}

/// Whether the reference disagrees with itself once its ops round as f32 does.
fn unstable(c: &Compiled, start: &InitialState, want: &Trained) -> bool {
    (0..8).any(|seed| {
        let other = train(&c.graph, start, Rounding::Noise(seed));
        let reports: Vec<serde_json::Value> = other.reports.iter().map(|r| serde_json::json!(r)).collect();
        let weights = other.params.iter().map(|(n, d)| (n.clone(), (start.weights[n].0.clone(), d.iter().map(|x| *x as f32).collect()))).collect();
        compare(start, want, &reports, &weights).is_err()
    })
}

/// The logical graph, compiled for one rank; the inner error is the user's.
fn logical(triple: &Triple) -> Result<Result<Compiled, String>, String> {
    let defines: Vec<(&str, &str)> = triple.defines.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    let Models { mut training, evaluation, .. } = match harness::models(&triple.text, &defines, &triple.case) {
        Ok(models) => models,
        Err(text) => return Ok(Err(text)),
    };
    triple.recipe.set(&mut training);
    let batch = triple.case.global_batch;
    match passes::compile::compile(training, evaluation, &Options { micro_batch: batch, global_batch: batch, ..Options::default() }) {
        Ok(c) => Ok(Ok(c)),
        Err(CompileError::User(errors)) => Ok(Err(format!("{errors:?}"))),
        Err(e @ CompileError::Broken(_)) => Err(e.to_string()),
    }
}

/// Weights and inputs that f32 holds exactly.
fn start(c: &Compiled, triple: &Triple) -> InitialState {
    let float = |stream: u64, i: u64| match triple.case.data {
        Data::Real => random::normal(stream, i) as f32 * 0.5,
        Data::Exact => random::normal(stream, i).round() as f32,
    };
    let weights = c.job.params.iter().map(|p| {
        let sizes: Vec<u64> = p.dims.iter().map(|d| d.size).collect();
        let stream = random::stream(random::key(&p.name), triple.case.seed, 0);
        let data = (0..sizes.iter().product()).map(|i| float(stream, i)).collect();
        (p.name.clone(), (sizes, data))
    });
    let weights = weights.collect();
    let input = |step: u64| {
        let one = |input: &ir::program::InputEntry| {
            let stream = random::stream(random::key(&input.name), triple.case.seed, 1 + step);
            let range = triple.ranges.get(&input.name);
            let most = input.takes.iter().flatten().last().filter(|i| i.most < i32::MAX);
            let below = range.map_or(most.map_or(4, |i| i.most as u64 + 1), |r| r.below);
            let element = |i: u64| match input.dtype {
                DType::I32 if range.is_some_and(|r| r.ignored) && random::uniform(stream, !i) < 0.3 => -100.0,
                DType::I32 => (random::uniform(stream, i) * below as f64).floor(),
                DType::Bool => f64::from(random::uniform(stream, i) < 0.7),
                DType::F32 | DType::Bf16 | DType::F16 => f64::from(float(stream, i)),
            };
            (0..input.dims.iter().map(|d| d.size).product()).map(element).collect()
        };
        c.job.inputs.iter().map(|i| (i.name.clone(), one(i))).collect::<BTreeMap<String, Vec<f64>>>()
    };
    InitialState { weights, inputs: (0..STEPS).map(input).collect(), rate: triple.rate(), seed: SEED }
}

/// The file of a schedule that has no name.
const ORDER: &str = "order.txt";

fn compile_arguments(triple: &Triple) -> Vec<String> {
    let line = format!("compile model.mdl -o out.mcc --emit graph --lr {} --lr-decay-style constant --lr-warmup-iters 0", triple.rate());
    let mut out: Vec<String> = line.split_whitespace().map(String::from).collect();
    out.extend(mesh_arguments(&triple.case));
    out.extend(triple.defines.iter().flat_map(|(n, v)| ["-D".into(), format!("{n}={v}")]));
    out.extend(triple.recipe.flags().iter().map(|f| f.to_string()));
    out
}

/// The flags of a case's mesh and schedule.
pub fn mesh_arguments(case: &Case) -> Vec<String> {
    let Case { dp, cp, cp_comm, tp, pp, ep, etp, sp, micro_batch, global_batch, schedule, layout, recompute, zero, vpp, group, bucket_size, .. } =
        case;
    let schedule = match schedule {
        Schedule::GPipe => "gpipe",
        Schedule::OneFOneB => "1f1b",
        Schedule::ZbH1 => "zb-h1",
        Schedule::ZbV => "zb-v",
        Schedule::DualPipeV => "dualpipev",
        Schedule::Given(_) => ORDER,
    };
    let cp_comm = match cp_comm {
        CpComm::Ring => "p2p",
        CpComm::AllGather => "all_gather",
        CpComm::AllToAll => "a2a",
        CpComm::AllToAllAndRing => "a2a+p2p",
    };
    let line = format!(
        "--dp {dp} --cp {cp} --cp-comm-type {cp_comm} --tp {tp} --pp {pp} --ep {ep} --micro-batch-size {micro_batch} --global-batch-size {global_batch} \
         --pipeline-schedule {schedule}"
    );
    let mut out: Vec<String> = line.split_whitespace().map(String::from).collect();
    if *sp {
        out.push("--sp".into());
    }
    let full = |method: &str, n: u32| format!("--recompute full --recompute-method {method} --recompute-num-layers {n}");
    let recompute = match recompute {
        Recompute::None => String::new(),
        Recompute::Selective => "--recompute selective".into(),
        Recompute::Uniform(n) => full("uniform", *n),
        Recompute::Block(n) => full("block", *n),
    };
    out.extend(recompute.split_whitespace().map(String::from));
    let level = Zero::ALL.iter().position(|z| z == zero).map(|k| k as u64);
    let group_size = "--microbatch-group-size-per-virtual-pipeline-stage";
    for (flag, n) in [("--etp", *etp), ("--zero", level), ("--vpp", *vpp), (group_size, *group), ("--bucket-size", *bucket_size)] {
        out.extend(n.iter().flat_map(|n| [flag.to_string(), n.to_string()]));
    }
    match layout {
        Cuts::Even { embedding, loss } => {
            let counted = [(embedding, "--account-for-embedding-in-pipeline-split"), (loss, "--account-for-loss-in-pipeline-split")];
            out.extend(counted.iter().filter(|(counts, _)| **counts == Counts::AsLayer).map(|(_, flag)| flag.to_string()));
        }
        Cuts::Sizes(sizes) => {
            let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
            out.extend(["--pipeline-layers".into(), sizes.join(",")]);
        }
        Cuts::Text(text) => out.extend(["--pipeline-layout".into(), text.clone()]),
        Cuts::Balanced => out.extend(["--pipeline-layout".into(), "auto".into()]),
    }
    out
}

fn compare(start: &InitialState, want: &Trained, reports: &[serde_json::Value], weights: &Weights) -> Result<(), String> {
    for (step, (want_reports, got)) in want.reports.iter().zip(reports).enumerate() {
        for (name, x) in want_reports {
            let got = got[name].as_f64().ok_or_else(|| format!("no number `{name}` in {got}"))?;
            let bound = if want.exact && name != "grad_norm" { 0.0 } else { 1e-4 * x.abs().max(1e-2) };
            let near = (got - x).abs() <= bound;
            if !near {
                return Err(format!("step {}: {name} is {got} instead of {x}", step + 1));
            }
        }
    }
    if reports.len() != want.reports.len() || weights.keys().ne(want.params.keys()) {
        return Err(format!("{} steps, weights {:?}", reports.len(), weights.keys()));
    }
    for (name, want_data) in &want.params {
        let (old, (sizes, got)) = (&start.weights[name], &weights[name]);
        if *sizes != old.0 || got.len() != want_data.len() {
            return Err(format!("{name} is {sizes:?}"));
        }
        // Errors are relative to how far the tensor moved. Rounding of gradients that should be zero, and of the
        // weights themselves, adds to the bound.
        let most = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0f64, |m, x| m.max(x.abs()));
        let moved = most(&mut want_data.iter().zip(&old.1).map(|(w, o)| w - f64::from(*o)));
        let size = most(&mut want_data.iter().copied());
        let bound = if want.exact { 0.0 } else { 2e-4 * moved + start.rate * 3e-5 + size * f64::from(f32::EPSILON) * 2.0 };
        for (i, (g, w)) in got.iter().zip(want_data).enumerate() {
            let near = (f64::from(*g) - w).abs() <= bound;
            if !near {
                return Err(format!("{name}[{i}] went from {} to {g} instead of {w}, the greatest way of an element being {moved}", old.1[i]));
            }
        }
    }
    Ok(())
}

/// A model of `models/` with small sizes.
fn fixed(model: &str, defines: &str, case: Case, recipe: Recipe) {
    let text = fs::read_to_string(models().join(model)).expect("a model");
    let defines = defines.split_whitespace().map(|d| d.split_once('=').map(|(n, v)| (n.to_string(), v.to_string())).expect("name=value")).collect();
    let triple = Triple { text, defines, case: case.clone(), ranges: Ranges::new(), recipe };
    assert_eq!(run(&triple), Ok(Outcome::Right), "{case:?}");
}

const GPT2: &str = "vocab=24 hidden=8 heads=4 ffn=16 layers=4 seq=4";
const LLAMA: &str = "vocab=23 hidden=8 heads=4 kv_heads=2 ffn=16 layers=3 seq=6";

fn gpt2(case: Case) {
    fixed("gpt2.mdl", GPT2, case, Recipe::AdamW);
}

fn llama(case: Case) {
    fixed("llama.mdl", LLAMA, case, Recipe::AdamW);
}

#[test]
fn gpt2_on_one_rank() {
    gpt2(Case { global_batch: 4, micro_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_on_dp4() {
    gpt2(Case { dp: 4, global_batch: 8, ..Case::default() });
}

#[test]
fn gpt2_on_tp4() {
    gpt2(Case { tp: 4, global_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_on_tp4_with_sequence_parallelism() {
    gpt2(Case { tp: 4, sp: true, global_batch: 2, micro_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_on_pp4_with_1f1b() {
    gpt2(Case { pp: 4, global_batch: 6, ..Case::default() });
}

#[test]
fn gpt2_on_pp2_with_gpipe_and_an_uneven_split() {
    gpt2(Case { pp: 2, global_batch: 4, schedule: Schedule::GPipe, layout: Cuts::Sizes(vec![1, 3]), ..Case::default() });
}

#[test]
fn gpt2_with_stages_for_embedding_and_loss() {
    gpt2(Case { pp: 3, global_batch: 3, layout: Cuts::Text("E|t*4|L".into()), ..Case::default() });
}

#[test]
fn gpt2_on_dp2_tp2_pp2_with_sequence_parallelism() {
    gpt2(Case { dp: 2, tp: 2, pp: 2, sp: true, global_batch: 8, micro_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_with_a_vocabulary_that_does_not_divide() {
    fixed("gpt2.mdl", "vocab=21 hidden=8 heads=4 ffn=16 layers=2 seq=4", Case { tp: 4, pp: 2, global_batch: 4, ..Case::default() }, Recipe::Sgd);
}

#[test]
fn gpt2_with_dropout() {
    fixed("gpt2.mdl", &format!("{GPT2} dropout_rate=0.5"), Case { tp: 2, pp: 2, sp: true, global_batch: 4, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn llama_on_tp2_pp3() {
    llama(Case { tp: 2, pp: 3, sp: true, global_batch: 6, ..Case::default() });
}

#[test]
fn llama_with_fewer_key_heads_than_tp() {
    llama(Case { dp: 2, tp: 4, global_batch: 4, ..Case::default() });
}

#[test]
fn llama_with_every_option() {
    let defines = "vocab=16 hidden=8 heads=4 kv_heads=2 ffn=16 layers=4 seq=8 qkv_bias=true qk_norm=true window=3 window_every=2 packed=true rope_factor=8.0 rope_original=4";
    fixed("llama.mdl", defines, Case { dp: 2, tp: 2, pp: 2, global_batch: 8, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn gpt2_with_dropout_on_cp2_tp2_pp2() {
    let case = Case { cp: 2, tp: 2, pp: 2, sp: true, global_batch: 4, ..Case::default() };
    fixed("gpt2.mdl", &format!("{GPT2} dropout_rate=0.5"), case, Recipe::AdamW);
}

#[test]
fn llama_on_cp4() {
    fixed("llama.mdl", &LLAMA.replace("seq=6", "seq=8"), Case { cp: 4, global_batch: 4, micro_batch: 2, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn llama_on_cp3() {
    llama(Case { cp: 3, global_batch: 2, cp_comm: CpComm::AllToAllAndRing, ..Case::default() });
}

#[test]
fn bert_on_dp2_cp2() {
    let defines = "vocab=18 hidden=8 heads=4 ffn=16 layers=2 seq=6 padded=false";
    fixed("bert.mdl", defines, Case { dp: 2, cp: 2, global_batch: 4, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn mlp_trains_as_its_text_says() {
    let case = Case { dp: 2, tp: 2, pp: 2, global_batch: 8, micro_batch: 2, ..Case::default() };
    fixed("mlp.mdl", "features=5 hidden=8 classes=6 depth=3", case, Recipe::Text);
}

#[test]
fn bert_on_tp2_pp2() {
    let defines = "vocab=18 hidden=8 heads=4 ffn=16 layers=2 seq=5 padded=true";
    fixed("bert.mdl", defines, Case { tp: 2, pp: 2, global_batch: 4, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn mixtral_on_dp2_tp2_with_experts_over_all() {
    let defines = "vocab=18 hidden=8 heads=4 kv_heads=2 experts=4 expert_ffn=8 layers=2 seq=6 aux_per_sequence=true";
    let case = Case { dp: 2, tp: 2, sp: true, ep: 4, etp: Some(1), global_batch: 4, ..Case::default() };
    fixed("mixtral.mdl", defines, case, Recipe::AdamW);
}

#[test]
fn deepseek_on_dp2_pp2_with_experts_over_dp() {
    let defines = "vocab=18 hidden=8 heads=2 layers=2 first_dense=1 ffn=8 seq=4 q_rank=6 kv_rank=4 nope=4 turned=2 v_dim=4 experts=8 top_k=2 expert_ffn=4 groups=4 top_groups=2 bias_rate=0.125";
    fixed("deepseek_v3.mdl", defines, Case { dp: 2, pp: 2, ep: 2, global_batch: 4, ..Case::default() }, Recipe::AdamW);
}

/// Stages hold encoder and decoder layers; what the encoder makes is relayed.
#[test]
fn t5_on_tp2_pp2() {
    let defines = "vocab=40 hidden=16 heads=2 head_dim=8 ffn=16 encoder_layers=1 decoder_layers=3 source=8 target=4 buckets=8 max_distance=8";
    let on = |case: Case| fixed("t5.mdl", defines, Case { pp: 2, global_batch: 4, micro_batch: 1, ..case }, Recipe::AdamW);
    on(Case { tp: 2, sp: true, ..Case::default() });
    on(Case { vpp: Some(2), ..Case::default() });
}

#[test]
fn t5_on_dp2_tp4() {
    let defines = "vocab=18 hidden=8 heads=4 head_dim=4 ffn=12 encoder_layers=2 decoder_layers=2 source=6 target=5 buckets=8 max_distance=16";
    fixed("t5.mdl", defines, Case { dp: 2, tp: 4, global_batch: 4, ..Case::default() }, Recipe::AdamW);
}

#[test]
fn vit_on_tp2_pp2() {
    let defines = "height=8 width=4 channels=3 patch=2 hidden=8 heads=4 layers=2 ffn=16 classes=10";
    fixed("vit.mdl", defines, Case { tp: 2, pp: 2, global_batch: 4, ..Case::default() }, Recipe::Sgd);
}

#[test]
fn nemotron_on_dp2_tp4() {
    let defines = "vocab=20 hidden=16 heads=4 kv_heads=2 ffn=16 layers=2 seq=6";
    fixed("nemotron.mdl", defines, Case { dp: 2, tp: 4, sp: true, global_batch: 2, ..Case::default() }, Recipe::Sgd);
}

#[test]
fn umlp_on_dp2_tp2() {
    fixed("umlp.mdl", "width=16 levels=2", Case { dp: 2, tp: 2, global_batch: 4, ..Case::default() }, Recipe::Sgd);
}

/// Integers alone: no sum is rounded in any order.
const INTEGERS: &str = "model integers(batch, seq = 4, hidden = 4, ffn = 8, layers = 2) {
  input x: f32[batch, seq, hidden];
  input goal: f32[batch, hidden];
  fn clamp(x) = minimum(maximum(x, -2), 2);
  repeat layers {
    x = clamp(x + linear(relu(linear(x, hidden, ffn) as up), ffn, hidden, bias: true) as down);
  }
  loss sum(abs(sum(x, over: seq) - goal));
}
train { optimizer: sgd(momentum: 0); }
plan { dp: batch; tp: ffn; sp: seq; pp: layers; }
";

fn integers(case: Case) {
    let case = Case { data: Data::Exact, ..case };
    let triple = Triple { text: INTEGERS.into(), defines: vec![], case, ranges: Ranges::new(), recipe: Recipe::Text };
    assert_eq!(run(&triple), Ok(Outcome::Exact));
}

#[test]
fn integers_are_exact_on_dp2_tp2_pp2() {
    integers(Case { dp: 2, tp: 2, pp: 2, sp: true, global_batch: 8, ..Case::default() });
}

#[test]
fn integers_are_exact_on_tp4_with_gpipe() {
    integers(Case { tp: 4, pp: 2, global_batch: 6, micro_batch: 2, schedule: Schedule::GPipe, ..Case::default() });
}

#[test]
fn integers_are_exact_on_dp8() {
    integers(Case { dp: 8, global_batch: 8, ..Case::default() });
}

fn number<T: std::str::FromStr>(variable: &str, default: T) -> T {
    std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// Random models from this seed and `NATIVE_FIRST` on, until ten, or `NATIVE_TRIPLES`, have been compared.
/// `NATIVE_SEED=n` runs the one of seed n alone and prints it.
fn random_triples(first: u64) {
    let (first, count) = (first + number::<u64>("NATIVE_FIRST", 0), number::<usize>("NATIVE_TRIPLES", 10));
    let only = std::env::var("NATIVE_SEED").ok().and_then(|s| s.parse().ok());
    let mut failures = vec![];
    let (mut right, mut unstable) = (0, 0);
    for seed in only.map_or(first..first + 1000, |n| n..n + 1) {
        if right == count {
            break;
        }
        let generate::Triple { text, case, ranges, .. } = generate::triple(seed);
        // Cases are limited to options that the command line has, and to sizes that two cores can run.
        if case.dp * case.cp * case.tp * case.pp > 8 && only.is_none() {
            continue;
        }
        let triple = Triple {
            text,
            defines: vec![],
            case: Case { rows: RowChoice::Rules, inline_ops: false, precision: DType::F32, ..case },
            ranges,
            recipe: Recipe::Text,
        };
        if only.is_some() {
            println!("mcc {}\n{}", compile_arguments(&triple).join(" "), triple.text);
        }
        print!("NATIVE_SEED={seed}: ");
        let outcome = run(&triple);
        println!("{outcome:?}");
        match outcome {
            Ok(Outcome::Right | Outcome::Exact) => right += 1,
            Ok(Outcome::Unstable) => unstable += 1,
            Ok(Outcome::Refused(_) | Outcome::NotFinite) => {}
            Err(e) => failures.push(format!("NATIVE_SEED={seed}: {e}")),
        }
    }
    assert!(right == count || only.is_some() || !failures.is_empty(), "{right} of {count} models were taken");
    assert!(unstable <= count / 5, "{unstable} of {count} models cannot be compared");
    assert!(failures.is_empty(), "{} random models are wrong:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn random_models_0() {
    random_triples(0);
}

#[test]
fn random_models_1() {
    random_triples(1000);
}

#[test]
fn random_models_2() {
    random_triples(2000);
}

#[test]
fn random_models_3() {
    random_triples(3000);
}
