//! Mutants of local graphs: what changes a result is refused before it is lowered.
//!
//! The oracle is the reference device: a mutant that the verifiers accept must compute, to the last bit, what the original does.

use crate::generate::triple;
use crate::harness::{Case, Outcomes, Ranges, Runner, models, options};
use crate::models::{GPT2, LLAMA, MIXTRAL, case};
use crate::random::number;
use crate::verdicts::Verdicts;
use frontend::Models;
use ir::dim::Base;
use ir::graph::Value;
use ir::local::{Chunk, Local};
use ir::mesh::SubAxis;
use ir::op::{Collective, Op, Real, Reduce, Scalar, Unary};
use ir::options::{RowChoice, Zero};
use ir::pipeline::{PassOrder, WeightGradients};
use ir::random::mix;
use ir::sharded::Sharded;
use passes::compile::{Compiled, compile, job_of};
use passes::partition::partition;
use passes::partition::stored_rows::RowBudget;
use passes::pipeline::plan;
use std::ops::Range;

pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        ((self.0 >> 11) % n.max(1) as u64) as usize
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        from.get(self.below(from.len())).cloned()
    }
}

/// 250 mutants, or `MUTANTS`, from number `MUTANTS_FIRST` on.
pub fn mutants() -> Range<u64> {
    let first = number("MUTANTS_FIRST", 0);
    first..first + number("MUTANTS", 250)
}

pub struct Sample {
    compiled: Compiled,
    pub stages: Vec<Local>,
    order: PassOrder,
    runner: Runner,
    want: Outcomes,
}

impl Sample {
    /// Whether these are shown to compute the sharded graph.
    pub fn holds(&self, stages: &[Local]) -> bool {
        verify(&self.compiled.sharded, stages).is_ok()
    }
}

pub fn sample(text: &str, defines: &[(&str, &str)], case: &Case, ranges: &Ranges) -> Option<Sample> {
    let Models { training, evaluation, .. } = models(text, defines, case).unwrap_or_else(|e| panic!("{e}"));
    let options = options(case);
    let microbatches = case.global_batch / (case.dp * case.micro_batch);
    let plan = plan::plan(&training.graph, microbatches as u32, &options).ok()?;
    let compiled = compile(training, evaluation, &options).ok()?;
    let weights = if plan.order.splits_backward() { WeightGradients::Apart } else { WeightGradients::InBackward };
    let stages = partition(&compiled.sharded, None, &plan.layout, weights, RowBudget { buffer: case.moe_buffer, passes: case.moe_passes }).ok()?;
    let runner = Runner::new(&compiled, case, ranges);
    // NaN is equal to nothing, so such samples are left out.
    let want = runner.outcomes(&job_of(&compiled, stages.clone(), &plan.order)).ok()?;
    Some(Sample { compiled, stages, order: plan.order, runner, want })
}

fn samples() -> Vec<Sample> {
    let named = [
        (GPT2, "dp2 tp2 pp2 sp m2"),
        (GPT2, "cp2 tp2 m2"),
        (LLAMA, "cp4 pp2 m2"),
        (LLAMA, "dp2 m2 zero3"),
        (LLAMA, "tp4 pp2 m2 zbh1"),
        (MIXTRAL, "dp2 tp2 sp ep4 etp1"),
    ];
    let mut out: Vec<Sample> = named.iter().filter_map(|(model, words)| sample(model.0, model.1, &case(words), &Ranges::new())).collect();
    assert_eq!(out.len(), named.len());
    for seed in 0..6 {
        let mut random = triple(seed);
        random.case.rows = RowChoice::Rules;
        // Flat buckets are formed after the graphs that are verified here.
        random.case.zero = Zero::None;
        out.extend(sample(&random.text, &[], &random.case, &random.ranges));
    }
    out
}

fn verify(s: &Sharded, stages: &[Local]) -> Result<(), verify::Violation> {
    stages.iter().try_for_each(|l| verify::partition::local::verify(l, s))?;
    verify::partition::exchanges::verify(stages)?;
    verify::partition::verify(s, stages)
}

/// A node that `keep` wants.
pub fn node(d: &mut Rng, l: &Local, keep: impl Fn(&Op) -> bool) -> Option<Value> {
    d.pick(&l.body.values().filter(|v| keep(&l.body[*v].op)).collect::<Vec<_>>())
}

fn collective(op: &Op) -> bool {
    matches!(op, Op::Collective { .. })
}

pub fn replace(l: &mut Local, from: Value, to: Value) {
    for n in &mut l.body.nodes {
        n.args.iter_mut().filter(|a| **a == from).for_each(|a| *a = to);
    }
    l.reports.iter_mut().filter(|r| r.1 == from).for_each(|r| r.1 = to);
    for u in &mut l.updates {
        std::iter::once(&mut u.new).chain(&mut u.states).filter(|v| **v == from).for_each(|v| *v = to);
    }
}

pub type Mutate = fn(&mut Rng, &mut Local) -> Option<()>;

/// What is done to the graph of a stage, by name.
pub const KINDS: &[(&str, Mutate)] = &[
    ("drop a collective", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Collective { kind: Collective::AllReduce(_) | Collective::Shift, .. }))?;
        let arg = l.body[v].args[0];
        replace(l, v, arg);
        Some(())
    }),
    ("another group", |d, l| {
        let v = node(d, l, collective)?;
        let all: Vec<SubAxis> = l.mesh.ids().collect();
        let (to, n) = (d.pick(&all)?, d.below(8));
        if let Op::Collective { subs, stages: None, .. } = &mut l.body[v].op {
            let k = n % subs.len().max(1);
            *subs.get_mut(k)? = to;
            return Some(());
        }
        None
    }),
    ("fewer ranks", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Collective { kind: Collective::AllReduce(_), subs, .. } if subs.len() > 1))?;
        if let Op::Collective { subs, .. } = &mut l.body[v].op {
            subs.pop();
        }
        Some(())
    }),
    ("another reduction", |d, l| {
        let v = node(d, l, collective)?;
        if let Op::Collective { kind: Collective::AllReduce(r) | Collective::ReduceScatter(r), .. } = &mut l.body[v].op {
            *r = if *r == Reduce::Sum { Reduce::Max } else { Reduce::Sum };
            return Some(());
        }
        None
    }),
    ("another operand", |d, l| {
        let v = node(d, l, |op| !op.is_source())?;
        let k = d.below(l.body[v].args.len());
        let old = l.body[v].args[k];
        let alike = |w: &Value| w.0 < v.0 && *w != old && l.body[*w].ty == l.body[old].ty && l.chunks[w.index()] <= l.chunks[v.index()];
        let to = d.pick(&l.body.values().filter(alike).collect::<Vec<_>>())?;
        l.body[v].args[k] = to;
        Some(())
    }),
    ("exchange operands", |d, l| {
        let v = node(d, l, |op| !op.is_source())?;
        let args = &mut l.body[v].args;
        let (i, j) = (d.below(args.len()), d.below(args.len()));
        args.swap(i, j);
        Some(())
    }),
    ("dims of a view in another order", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::View { from, to } if from.len() > 1 || to.len() > 1))?;
        if let Op::View { from, to } = &mut l.body[v].op {
            if from.len() > 1 { from.reverse() } else { to.reverse() }
        }
        Some(())
    }),
    ("another part of a dim", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Shard { .. }))?;
        if let Op::Shard { index, .. } = &mut l.body[v].op {
            match &mut index.base {
                Base::Coords(form) if form[0].1 > 1 => form[0].1 /= 2,
                other => *other = Base::Zero,
            }
        }
        Some(())
    }),
    ("indices of another part", |d, l| {
        let all: Vec<ir::dim::Dim> = l.body.dims.ids().filter(|x| l.body.dims[*x].index.base != Base::Zero).collect();
        let dim = d.pick(&all)?;
        l.body.dims[dim].index.base = Base::Zero;
        Some(())
    }),
    ("another piece", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Slice { .. }))?;
        if let Op::Slice { at, .. } = &mut l.body[v].op {
            *at = if *at == 0 { 1 } else { *at - 1 };
        }
        Some(())
    }),
    ("another chunk", |d, l| {
        let n = d.below(l.chunks.len());
        let all = [Chunk::Prologue, Chunk::PrologueReduce, Chunk::Forward(0), Chunk::Backward(0), Chunk::Reduce, Chunk::Update];
        l.chunks[n] = d.pick(&all)?;
        Some(())
    }),
    ("accumulate or not", |d, l| {
        let summed = d.below(3) > 0;
        let all: Vec<usize> = (0..l.accumulate.len()).filter(|k| l.accumulate[*k] == summed).collect();
        let n = d.pick(&all)?;
        l.accumulate[n] = !summed;
        Some(())
    }),
    ("another op", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Unary(_) | Op::Const(_) | Op::Scalar(Scalar::Linear(_))))?;
        l.body[v].op = match &l.body[v].op {
            Op::Unary(Unary::Neg) => Op::Unary(Unary::Abs),
            Op::Unary(_) => Op::Unary(Unary::Neg),
            Op::Const(c) => Op::Const(Real(c.0 + 1.0)),
            Op::Scalar(Scalar::Linear(form)) => Op::Scalar(Scalar::Linear(form[1..].to_vec())),
            _ => return None,
        };
        Some(())
    }),
    ("another parameter", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Param(_) | Op::State(..)))?;
        let n = d.below(l.params.len()) as u32;
        l.body[v].op = match l.body[v].op {
            Op::Param(_) => Op::Param(n),
            Op::State(slot, _) if d.below(2) == 0 => Op::State(slot, d.below(2) as u32),
            _ => Op::State(n, 0),
        };
        Some(())
    }),
    ("exchange updates", |d, l| {
        let (i, j) = (d.below(l.updates.len()), d.below(l.updates.len()));
        let (a, b) = (l.updates.get(i)?.new, l.updates[j].new);
        if l.body[a].ty != l.body[b].ty {
            return None;
        }
        (l.updates[i].new, l.updates[j].new) = (b, a);
        Some(())
    }),
    ("another report", |d, l| {
        let k = d.below(l.reports.len());
        let scalars: Vec<Value> = l.body.values().filter(|v| l.body[*v].ty == l.body[l.reports[k].1].ty).collect();
        l.reports[k].1 = d.pick(&scalars)?;
        Some(())
    }),
];

/// Tries [`mutants`], one of each kind after the other: what changes a result must be refused. How many were.
pub fn judge(samples: &[Sample], kinds: &[(&'static str, Mutate)]) -> u32 {
    let mut verdicts = Verdicts::default();
    for seed in mutants() {
        let mut dice = Rng(mix(!seed));
        let s = &samples[dice.below(samples.len())];
        let (name, mutate) = kinds[seed as usize % kinds.len()];
        let mut stages = s.stages.clone();
        let k = dice.below(stages.len());
        if mutate(&mut dice, &mut stages[k]).is_none() || stages == s.stages {
            continue;
        }
        let run = || Some(s.runner.outcomes(&job_of(&s.compiled, stages.clone(), &s.order)));
        verdicts.judge((seed, name), || verify(&s.compiled.sharded, &stages), run, &s.want);
    }
    verdicts.end(0)
}

#[test]
fn a_stage_that_computes_something_else_is_refused() {
    judge(&samples(), KINDS);
}
