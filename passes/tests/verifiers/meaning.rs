//! Graphs with something wrong at random: what changes a result of a step, the verifier of meaning refuses.
//!
//! The sharded graphs of small models are changed in one node or one root. A judge of its own evaluates all of
//! both graphs on random numbers: a mutant whose reports, new parameters or new states differ has to be
//! refused, and the graph as it was has to be accepted. `MEANING_MUTANTS=1000` tries so many of each model, in
//! place of as many as take a few seconds.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Graph, Node, Type, Value};
use ir::module::{GlobalGraph, Module};
use ir::op::{Attention, Binary, Compare, DType, Op, Real, Reduce, Scalar, Unary};
use ir::options::{Options, Recompute};
use ir::progress::Progress;
use ir::random::{key, mix, stream, uniform};
use passes::compile::{BugEvidence, Compile, holds};
use passes::table::{MEANING, PASSES};
use std::collections::BTreeMap;
use std::path::Path;

/// A text with what the models have not: a state, a running sum, the greatest of a row, a window, drops, two
/// losses and a metric.
pub const ODD: &str = "
model odd(batch, seq = 6, vocab = 5, hidden = 4) {
  input tokens: i32[batch, seq];
  input targets: i32[batch, seq] = next(tokens);
  param embed: [vocab, hidden] ~ normal(0.5);
  param scale: [hidden] = 1;
  param out: [hidden, vocab] ~ normal(0.5);
  state seen: [hidden] = 0;
  let x = dropout(embed[vocab: tokens], rate: 0.25);
  let sums = cumsum(x * scale, over: seq);
  let y = tanh(sums) + max(x, over: seq);
  let logits = dot(y, out, over: hidden);
  loss ce = token_loss(logits, targets, over: vocab);
  loss small = 0.01 * mean(x * x);
  metric largest = mean(max(logits, over: vocab));
  update seen = 0.5 * seen + mean(x, over: [batch, seq]);
}
train {
  optimizer: adamw(betas: [0.8, 0.9], eps: 1e-6);
  weight_decay: 0.1;
  lr: constant(0.05);
  clip: 0.5;
}
";

/// Compiles up to the sharded graph.
pub fn sharded(name: &str, text: &str, defines: &[(&str, &str)], options: &Options) -> Module {
    let defines = defines.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let mut sources = Sources::default();
    let elaboration = Text { defines, batch: options.global_batch, ..Text::default() };
    let models = frontend::compile_both(&mut sources, name, text, &elaboration, &mut |_| Err("no imports".into()));
    let models = models.unwrap_or_else(|e| panic!("{name}: {:?}", e.iter().map(|d| &d.message).collect::<Vec<_>>()));
    let progress = Progress::default();
    let mut compile = Compile::by(PASSES, models.training, models.evaluation, options, &progress).unwrap_or_else(|e| panic!("{name}: {e:?}"));
    while compile.step().unwrap_or_else(|e| panic!("{name}: {e:?}")).is_some_and(|pass| pass.name != "propagate") {}
    compile.module().clone()
}

/// The text of a model of `models/`.
pub fn model(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    std::fs::read_to_string(folder.join(format!("{name}.mdl"))).expect("a model")
}

fn models() -> Vec<(String, Module)> {
    let base = Options { global_batch: 2, pad_vocab_to: 4, ..Options::default() };
    let gpt2 = &[("hidden", "4"), ("heads", "2"), ("layers", "2"), ("seq", "4"), ("vocab", "6")];
    let llama = &[("hidden", "8"), ("heads", "4"), ("kv_heads", "2"), ("layers", "1"), ("seq", "4"), ("vocab", "6"), ("ffn", "6")];
    vec![
        ("gpt2".into(), sharded("gpt2.mdl", &model("gpt2"), gpt2, &Options { tp: 2, ..base.clone() })),
        ("llama".into(), sharded("llama.mdl", &model("llama"), llama, &Options { cp: 2, recompute: Recompute::Uniform(1), ..base.clone() })),
        ("mlp".into(), sharded("mlp.mdl", &model("mlp"), &[("hidden", "4")], &base)),
        ("odd".into(), sharded("odd.mdl", ODD, &[], &base)),
    ]
}

/// Numbers at random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % n.max(1) as u64) as usize
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { Some(&all[self.below(all.len())]) }
    }
}

/// Changes one thing of a graph, and says what; none where the draw has nothing to change.
fn change(g: &mut Graph, random: &mut Random) -> Option<String> {
    if random.below(12) == 0 {
        return change_root(g, random);
    }
    let v = Value(random.below(g.body.nodes.len()) as u32);
    let before = g.body[v].clone();
    let earlier = |g: &Graph, like: &Type, but: Value| -> Vec<Value> {
        let set = |t: &Type| {
            let mut dims = t.dims.clone();
            dims.sort();
            (t.dtype, dims)
        };
        g.body.values().take(v.index()).filter(|a| *a != but && set(&g.body[*a].ty) == set(like)).collect()
    };
    let what = if !before.args.is_empty() && random.below(2) == 0 {
        let slot = random.below(before.args.len());
        let old = before.args[slot];
        let others = earlier(g, &g.body[old].ty.clone(), old);
        g.body[v].args[slot] = *random.of(&others)?;
        format!("operand {slot} is {}", g.body[v].args[slot])
    } else {
        let op = other(&before, random)?;
        let name = format!("{op:?}");
        g.body[v].op = op;
        name
    };
    let (phase, scope) = (before.origin.phase.name(), &before.origin.scope);
    (g.body[v] != before).then(|| format!("{v} = {} {:?} ({phase} of {scope}): {what}", before.op.name(), before.args))
}

fn change_root(g: &mut Graph, random: &mut Random) -> Option<String> {
    let mut roots = g.roots();
    let k = random.below(roots.len());
    let ty = g.body[roots[k]].ty.clone();
    let others: Vec<Value> =
        g.body.values().filter(|v| *v != roots[k] && g.body[*v].ty == ty && g.body[*v].origin.phase == g.body[roots[k]].origin.phase).collect();
    roots[k] = *random.of(&others)?;
    let mut next = roots.iter();
    g.map_roots(|_| *next.next().expect("as many roots"));
    Some(format!("root {k} is {}", roots[k]))
}

/// Another op for the same operands.
fn other(node: &Node, random: &mut Random) -> Option<Op> {
    let near = |at: u64, random: &mut Random| if at == 0 || random.below(2) == 0 { at + 1 } else { at - 1 };
    Some(match &node.op {
        Op::Const(Real(c)) => {
            let by = *random.of(&[-1.0, 0.0, 0.5, 1.5, 2.0])?;
            Op::Const(Real(if node.ty.dtype.is_float() { c * by } else { c + 1.0 }))
        }
        Op::Unary(u) if node.ty.dtype.is_float() => {
            let all: Vec<Unary> = Unary::ALL.iter().copied().filter(|o| o != u && *o != Unary::Not).collect();
            Op::Unary(*random.of(&all)?)
        }
        Op::Binary(b) if node.ty.dtype.is_float() => {
            let all: Vec<Binary> = Binary::ALL.iter().copied().filter(|o| o != b && !matches!(o, Binary::And | Binary::Or)).collect();
            Op::Binary(*random.of(&all)?)
        }
        Op::Compare(c) => {
            let all: Vec<Compare> = Compare::ALL.iter().copied().filter(|o| o != c).collect();
            Op::Compare(*random.of(&all)?)
        }
        Op::Reduce { kind: Reduce::Sum, over } => Op::Reduce { kind: Reduce::Max, over: over.clone() },
        Op::Reduce { kind: Reduce::Max, over } => Op::Reduce { kind: Reduce::Sum, over: over.clone() },
        Op::Cumsum { over, reverse } => Op::Cumsum { over: *over, reverse: !reverse },
        Op::Slice { from, to, at } => Op::Slice { from: *from, to: *to, at: near(*at, random) },
        Op::Pad { from, to, at } => Op::Pad { from: *from, to: *to, at: near(*at, random) },
        Op::Attention(a) => Op::Attention(Attention { scale: Real(a.scale.0 * 2.0), ..a.clone() }),
        Op::AttentionGrad(a, which) => Op::AttentionGrad(Attention { scale: Real(a.scale.0 * 2.0), ..a.clone() }, *which),
        Op::AttentionLse(a) => Op::AttentionLse(Attention { scale: Real(a.scale.0 * 2.0), ..a.clone() }),
        Op::Scalar(Scalar::BiasCorrection(Real(b))) => Op::Scalar(Scalar::BiasCorrection(Real(b / 2.0))),
        Op::Scalar(Scalar::LearningRate) => Op::Scalar(Scalar::LossScale),
        Op::State(p, k) => Op::State(*p, 1 - k.min(&1)),
        _ => return None,
    })
}

/// All of a graph, on random numbers.
struct RandomSources<'g>(&'g Graph, u64);

impl Env for RandomSources<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        let (g, dims) = (self.0, &self.0.body.dims);
        if let Op::Table(t) = op {
            return g.tables[*t as usize].data.clone();
        }
        let mut at = vec![Some(0u64)];
        for d in &ty.dims {
            let info = &dims[*d];
            let next = |x: Option<u64>, i: u64| Some(info.order.index(i)).filter(|i| *i < info.logical).and_then(|i| Some(x? * info.logical + i));
            at = at.iter().flat_map(|x| (0..info.size).map(|i| next(*x, i)).collect::<Vec<_>>()).collect();
        }
        let name = match op {
            Op::Param(p) => g.params[*p as usize].name.clone(),
            Op::State(p, k) => format!("{k} {}", g.params[*p as usize].name),
            Op::Input(k) => g.inputs[*k as usize].name.clone(),
            _ => unreachable!("no source of a logical graph"),
        };
        let stream = stream(key(&name), self.1, 0);
        let of = |i: u64| {
            let x = uniform(stream, i);
            match (op, ty.dtype) {
                (_, DType::I32) => (x * 4.0).floor(),
                (_, DType::Bool) => x.round(),
                (Op::State(_, 1), _) => x * 1e-3,
                _ => 2.0 * x - 1.0,
            }
        };
        at.into_iter().map(|i| i.map_or(0.0, of)).collect()
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::LearningRate => 0.25,
            Scalar::LossScale => 16.0,
            Scalar::Step => 2.0,
            Scalar::Seed => 3.0,
            Scalar::BiasCorrection(b) => 1.0 - b.0 * b.0,
            Scalar::Linear(_) | Scalar::Slot(_) => unreachable!("no scalar of a logical graph"),
        }
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

/// The results of a step that are visible outside.
fn results(g: &Graph, seed: u64) -> BTreeMap<String, Vec<f64>> {
    let values = eval::run(&g.body, &mut RandomSources(g, seed));
    // Results are compared in a fixed order of dims.
    let of = |v: Value| {
        let mut dims = g.body.dims_of(v).to_vec();
        dims.sort();
        eval::reorder(&g.body.dims, &values[v.index()], g.body.dims_of(v), &dims)
    };
    let mut out = BTreeMap::new();
    for (kind, list) in [("loss", &g.losses), ("metric", &g.metrics)] {
        out.extend(list.iter().map(|r| (format!("{kind} {}", r.name), of(r.value))));
    }
    out.extend(g.loss.map(|v| ("loss".to_string(), of(v))));
    out.extend(g.grad_norm.map(|v| ("norm".to_string(), of(v))));
    for u in &g.updates {
        let name = &g.params[u.param as usize].name;
        out.insert(format!("new {name}"), of(u.new));
        out.extend(u.states.iter().enumerate().map(|(k, s)| (format!("state {k} of {name}"), of(*s))));
    }
    out
}

/// The first result that differs by more than rounding.
fn difference(a: &Graph, b: &Graph) -> Option<String> {
    (0..3).find_map(|seed| {
        let (x, y) = (results(a, seed), results(b, seed));
        if x.keys().ne(y.keys()) {
            return Some("other results".into());
        }
        x.iter().zip(y.values()).find_map(|((name, x), y)| {
            let size = x.iter().fold(1e-6, |n: f64, x| n.max(x.abs()));
            let differs = |x: &f64, y: &f64| !(x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= 1e-5 * size);
            let found = x.iter().zip(y).find(|(x, y)| differs(x, y));
            found.map(|(x, y)| format!("{name}: {x} became {y}")).or((x.len() != y.len()).then(|| format!("{name} has another size")))
        })
    })
}

#[test]
fn a_change_of_any_result_is_refused() {
    let count: usize = std::env::var("MEANING_MUTANTS").map_or(120, |n| n.parse().expect("a number"));
    let (mut missed, mut refused, mut equal) = (vec![], 0, 0);
    for (name, module) in models() {
        let Ok(warnings) = holds(&MEANING, &module) else { panic!("{name}: refused as it is") };
        assert!(warnings.is_empty(), "{name}: {warnings:?}");
        let graph = module.training.whole.graph().clone();
        let mut random = Random(key(&name));
        for _ in 0..count {
            let mut mutant = module.clone();
            let GlobalGraph::Sharded(sharded) = &mut mutant.training.whole else { panic!("it is sharded") };
            let Some(what) = change(&mut sharded.graph, &mut random) else { continue };
            // The verifier of graphs refuses wrong types, so such mutants are left out.
            let body = &sharded.graph.body;
            if body.values().any(|v| ir::infer::check(body, v).is_err()) {
                continue;
            }
            let differs = difference(&graph, &sharded.graph);
            match (holds(&MEANING, &mutant), differs) {
                (Ok(_), Some(differs)) => missed.push(format!("{name}: {what}: {differs}")),
                (Ok(_), None) => equal += 1,
                (Err(BugEvidence::Violation(_)), _) => refused += 1,
                (Err(BugEvidence::Panic(p)), _) => panic!("{name}: {what}: {p}"),
            }
        }
    }
    println!("{refused} refused, {equal} equal, {} missed", missed.len());
    assert!(missed.is_empty(), "{} of {} mutants got through:\n{}", missed.len(), missed.len() + refused, missed.join("\n"));
    assert!(refused > count, "most changes change something: {refused} refused");
}
