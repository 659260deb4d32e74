//! Mutants of local graphs after the passes that rewrite them: what changes a result is refused before it is lowered.
//!
//! The oracle is the reference device: a mutant that the verifiers accept must compute, to the last bit, what the original does.

use crate::generate::triple;
use crate::harness::{Case, Outcomes, Ranges, Runner, models, options};
use crate::models::{GPT2, LLAMA, MIXTRAL, case};
use crate::parts::{KINDS, Mutate, Rng, mutants, node};
use crate::verdicts::Verdicts;
use frontend::Models;
use ir::local::Local;
use ir::op::Op;
use ir::options::MoeBuffer;
use ir::random::mix;
use passes::compile::{Compiled, compile, job_of_classes};
use std::panic::{AssertUnwindSafe, catch_unwind};
use verify::equivalence::{Graphs, verify};

struct Sample {
    compiled: Compiled,
    runner: Runner,
    want: Outcomes,
}

fn sample(text: &str, defines: &[(&str, &str)], case: &Case, ranges: &Ranges) -> Option<Sample> {
    let Models { training, evaluation, .. } = models(text, defines, case).unwrap_or_else(|e| panic!("{e}"));
    let compiled = compile(training, evaluation, &options(case)).ok()?;
    let runner = Runner::new(&compiled, case, ranges);
    // NaN is equal to nothing, so such samples are left out.
    let want = runner.outcomes(&job_of_classes(&compiled, &compiled.locals, compiled.evaluation.locals.clone(), &compiled.order)).ok()?;
    Some(Sample { compiled, runner, want })
}

fn samples() -> Vec<Sample> {
    let named = [
        (GPT2, "dp2 tp2 sp chunks2 m2 zero1"),
        (GPT2, "dp2 pp2 m2 zero1"),
        (GPT2, "dp3 pp2 m2 zero2"),
        (LLAMA, "tp2 sp chunks2 m2"),
        (LLAMA, "dp2 tp2 m2 zero2"),
        (LLAMA, "bf16 dp2 zero1 m2"),
        (LLAMA, "dp2 cp2 m2"),
        (MIXTRAL, "dp2 tp2 sp ep4 etp1 zero1"),
        (GPT2, "bf16 offload dp2 zero1 m2"),
        (LLAMA, "offload dp2 pp2 m2"),
        (GPT2, "bf16 tp2 m2 segments4"),
    ];
    let mut out: Vec<Sample> = named
        .iter()
        .filter_map(|(model, words)| {
            let case = Case { bucket_size: Some(300), ..case(words) };
            sample(model.0, model.1, &case, &Ranges::new())
        })
        .collect();
    assert_eq!(out.len(), named.len());
    // The last ones have chunks across the digits of an index, and sums over stages of parts.
    for seed in (0..6).chain([125, 467, 933]) {
        let mut random = triple(seed);
        // A step that a limit stops has no results to compare.
        random.case.moe_buffer = MoeBuffer::Whole;
        out.extend(sample(&random.text, &[], &random.case, &random.ranges));
    }
    out
}

fn concat(op: &Op) -> bool {
    matches!(op, Op::Concat { .. })
}

/// Two indices into the operands of a concatenation.
fn two(d: &mut Rng, l: &Local) -> Option<(ir::graph::Value, usize, usize)> {
    let v = node(d, l, concat)?;
    let n = l.body[v].args.len();
    let (i, j) = (d.below(n), d.below(n));
    (i != j).then_some((v, i, j))
}

/// What is done to a graph beside [`KINDS`], by name.
const MORE: &[(&str, Mutate)] = &[
    ("exchange pieces", |d, l| {
        let (v, i, j) = two(d, l)?;
        let node = &mut l.body[v];
        node.args.swap(i, j);
        if let Op::Concat { from, .. } = &mut node.op {
            from.swap(i, j);
        }
        Some(())
    }),
    ("repeat a piece", |d, l| {
        let (v, i, j) = two(d, l)?;
        let sizes = |l: &Local, k: usize| l.body.elements(l.body[v].args[k]);
        if sizes(l, i) != sizes(l, j) {
            return None;
        }
        let again = l.body[v].args[i];
        let node = &mut l.body[v];
        node.args[j] = again;
        if let Op::Concat { from, .. } = &mut node.op {
            from[j] = from[i];
        }
        Some(())
    }),
    ("a piece elsewhere", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Slice { to: Some(_), .. }))?;
        let alike = |w: &ir::graph::Value| {
            matches!((&l.body[*w].op, &l.body[v].op), (Op::Slice { from: a, to: Some(b), at }, Op::Slice { from: c, to: Some(e), at: here })
                if a == c && l.body.dims.size(*b) == l.body.dims.size(*e) && at != here)
        };
        let other = d.pick(&l.body.values().filter(alike).collect::<Vec<_>>())?;
        let Op::Slice { at: there, .. } = l.body[other].op else { return None };
        if let Op::Slice { at, .. } = &mut l.body[v].op {
            *at = there;
        }
        Some(())
    }),
    ("a bucket's piece elsewhere", |d, l| {
        let k = d.below(l.buckets.len());
        let pieces = &mut l.buckets.get_mut(k)?.pieces;
        let n = d.below(pieces.len());
        pieces[n].at += 1;
        Some(())
    }),
    ("exchange a bucket's pieces", |d, l| {
        let k = d.below(l.buckets.len());
        let pieces = &mut l.buckets.get_mut(k)?.pieces;
        let (i, j) = (d.below(pieces.len()), d.below(pieces.len()));
        (pieces[i].slot, pieces[j].slot) = (pieces[j].slot, pieces[i].slot);
        Some(())
    }),
    ("exchange states", |d, l| {
        let k = d.below(l.updates.len());
        let states = &mut l.updates.get_mut(k)?.states;
        if states.len() < 2 || l.body[states[0]].ty != l.body[states[1]].ty {
            return None;
        }
        states.swap(0, 1);
        Some(())
    }),
    ("passes read weights", |d, l| {
        let slot = d.pick(&l.copied.iter().copied().collect::<Vec<u32>>())?;
        l.copied.remove(&slot).then_some(())
    }),
    ("no update", |d, l| {
        let k = d.below(l.updates.len());
        (k < l.updates.len()).then(|| drop(l.updates.remove(k)))
    }),
    ("no sum of parts", |d, l| {
        let v = node(d, l, |op| matches!(op, Op::Collective { kind: ir::op::Collective::AllReduce(_), .. }))?;
        let n = d.below(2);
        if let Op::Collective { subs, .. } = &mut l.body[v].op {
            let k = n.min(subs.len().saturating_sub(1));
            if subs.is_empty() {
                return None;
            }
            subs.remove(k);
        }
        Some(())
    }),
];

/// Also with experts, whose rows these passes leave as they are.
#[test]
fn a_rewritten_graph_that_computes_something_else_is_refused() {
    let samples = samples();
    let mut verdicts = Verdicts::default();
    let kinds: Vec<&(&str, Mutate)> = MORE.iter().chain(KINDS).collect();
    for seed in mutants() {
        let mut dice = Rng(mix(!seed ^ 7));
        let s = &samples[dice.below(samples.len())];
        let (name, mutate) = kinds[seed as usize % kinds.len()];
        let (mut training, mut evaluation) = (s.compiled.locals.clone(), s.compiled.evaluation.locals.clone());
        let k = dice.below(training.len());
        let graph = if dice.below(8) == 0 { &mut evaluation[k] } else { &mut training[k] };
        let before = graph.clone();
        if mutate(&mut dice, graph).is_none() || *graph == before {
            continue;
        }
        // Both graphs of a program have the same layout of buckets.
        let buckets = graph.buckets.clone();
        (training[k].buckets, evaluation[k].buckets) = (buckets.clone(), buckets);
        let c = &s.compiled;
        let verify = || {
            training.iter().try_for_each(|l| verify::partition::local::verify(l, &c.sharded))?;
            let before = Graphs { training: &c.stages, evaluation: &c.evaluation.stages };
            verify(before, Graphs { training: &training, evaluation: &evaluation })
        };
        // A graph that cannot be lowered, as with an operand of another chunk that is missing, ends the compile, too.
        let run = || {
            let job = catch_unwind(AssertUnwindSafe(|| job_of_classes(c, &training, evaluation.clone(), &c.order))).ok()?;
            Some(s.runner.outcomes(&job))
        };
        verdicts.judge((seed, name), verify, run, &s.want);
    }
    verdicts.end(0);
}
