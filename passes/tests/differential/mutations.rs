//! The verifier of the sharded level refuses graphs that are wrong in one place.

use crate::generate::triple;
use crate::harness::{compiled, models, options};
use crate::models::{GPT2, LLAMA, case};
use crate::random::number;
use frontend::Models;
use ir::graph::Value;
use ir::op::Op;
use ir::options::RowChoice;
use ir::sharded::{Placement, Sharded};
use passes::compile::compile;
use std::collections::BTreeMap;
use verify::sharded::verify;
use verify::{Invariant, LocationPart};

/// Sharded graphs of models and of random ones. Rows follow the rules: those chosen at random have reshards that nothing needs.
fn samples() -> Vec<Sharded> {
    let mut out = vec![
        compiled(GPT2.0, GPT2.1, &case("dp2 tp2 sp m2")).sharded,
        compiled(LLAMA.0, LLAMA.1, &case("tp4 sp m2")).sharded,
        compiled(LLAMA.0, LLAMA.1, &case("dp2 tp2 zero3 m2")).sharded,
        compiled(GPT2.0, &[GPT2.1, &[("vocab", "23")]].concat(), &case("tp4")).sharded,
    ];
    for seed in 0..12 {
        let mut random = triple(seed);
        random.case.rows = RowChoice::Rules;
        let Models { training, evaluation, .. } = models(&random.text, &[], &random.case).unwrap_or_else(|e| panic!("{e}"));
        out.extend(compile(training, evaluation, &options(&random.case)).ok().map(|c| c.sharded));
    }
    out
}

/// Mutants of every sample by `mutate`, which makes a list of changes, of every other value; each must be refused, for
/// one of these reasons.
fn all_are_refused(reasons: &[Invariant], mutate: impl Fn(&Sharded, Value) -> Vec<Sharded>) {
    refused_of(2, reasons, mutate);
}

/// As [`all_are_refused`], of one in so many values; with `MUTANTS` (`make test-long-mutants`) of every one.
fn refused_of(one_in: usize, reasons: &[Invariant], mutate: impl Fn(&Sharded, Value) -> Vec<Sharded>) {
    let mut tried: BTreeMap<Invariant, u32> = BTreeMap::new();
    for s in samples() {
        assert_eq!(verify(&s), Ok(()));
        let users = s.graph.body.users();
        let roots = s.graph.roots();
        let live = s.graph.body.values().filter(|v| !users[v.index()].is_empty() || roots.contains(v));
        for v in live.step_by(if number("MUTANTS", 0) > 0 { 1 } else { one_in }) {
            for mutant in mutate(&s, v) {
                let what = || format!("{v} of {}: {:?}, {:?}", s.graph.name, s.graph.body[v], s.sharding(v));
                let violation = verify(&mutant).err().unwrap_or_else(|| panic!("accepted: {}", what()));
                assert!(violation.locus.0.iter().any(|part| matches!(part, LocationPart::Node(..))), "{violation}");
                *tried.entry(violation.invariant).or_default() += 1;
            }
        }
    }
    tried.iter().for_each(|(invariant, n)| println!("{invariant} {:<24} {n:>6}", invariant.name()));
    assert!(tried.values().sum::<u32>() > 300, "only {tried:?}");
    assert_eq!(tried.keys().copied().collect::<Vec<_>>(), reasons);
}

#[test]
fn a_missing_reshard_is_refused() {
    all_are_refused(&[Invariant::OpRow, Invariant::ReshardSubAxes, Invariant::ReportEverywhere], |s, v| {
        let Op::Reshard { .. } = s.graph.body[v].op else { return vec![] };
        let from = s.graph.body[v].args[0];
        let mut m = s.clone();
        for node in &mut m.graph.body.nodes {
            node.args.iter_mut().filter(|a| **a == v).for_each(|a| *a = from);
        }
        m.graph.map_roots(|w| if w == v { from } else { w });
        vec![m]
    });
}

#[test]
fn a_reshard_over_another_sub_axis_is_refused() {
    all_are_refused(&[Invariant::ReshardSubAxes, Invariant::ReshardRow], |s, v| {
        let Op::Reshard { kind, subs } = &s.graph.body[v].op else { return vec![] };
        let others = s.mesh.ids().filter(|u| !subs.contains(u));
        others
            .map(|u| {
                let mut m = s.clone();
                let mut subs = subs.clone();
                subs[0] = u;
                m.graph.body[v].op = Op::Reshard { kind: *kind, subs };
                m
            })
            .collect()
    });
}

#[test]
fn a_sum_that_is_claimed_complete_is_refused() {
    all_are_refused(&[Invariant::OpRow, Invariant::ReshardSubAxes, Invariant::ReshardRow], |s, v| {
        let partial = s.mesh.ids().filter(|u| s.sharding(v)[*u].is_partial());
        partial.map(|u| with(s, v, u, Placement::Replicated)).collect()
    });
}

#[test]
fn a_part_that_is_claimed_whole_or_split_otherwise_is_refused() {
    refused_of(12, &[Invariant::SplitDim, Invariant::OpRow, Invariant::ReshardSubAxes, Invariant::ReshardRow], |s, v| {
        let body = &s.graph.body;
        let mut out = vec![];
        for u in s.mesh.ids() {
            let Placement::Split(d) = s.sharding(v)[u] else { continue };
            // Any sharding of a source is valid, as the pass decides it.
            if body[v].op.is_source() && body[v].args.is_empty() {
                continue;
            }
            out.push(with(s, v, u, Placement::Replicated));
            out.push(with(s, v, u, Placement::SUM));
            out.extend(body.dims_of(v).iter().filter(|e| **e != d).map(|e| with(s, v, u, Placement::Split(*e))));
        }
        out
    });
}

fn with(s: &Sharded, v: Value, u: ir::mesh::SubAxis, placement: Placement) -> Sharded {
    let mut m = s.clone();
    m.shardings[v.index()][u] = placement;
    m
}
