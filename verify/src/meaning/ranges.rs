//! V158: what inputs of integers may hold keeps indices within their tables.
//!
//! The pass that finds it goes backwards from indices, by intervals. Here inputs hold what they may, least and most
//! of all, each of their elements in its turn, and indices are what the text makes of that.

use super::chosen::ChosenElements;
use super::sample::Sample;
use super::small::{DrawMode, SmallGraph};
use crate::violation::fail;
use crate::{Invariant, Violation};
use ir::graph::{Graph, Value};
use ir::op::{Binary, DType, Op, Reduce, Unary};
use ir::program::Interval;
use ir::random;
use std::collections::BTreeSet;

/// If there are more than twice as many intervals, only so many of the first ones and the last ones are checked.
const INTERVALS: usize = 4;

/// Checks that no index of a text leaves its table while its inputs hold what they may, by input. What is made of
/// several numbers together, as a sum of two inputs, and what is `@any`, is not claimed to stay within: the compile
/// warned of it.
pub fn verify(model: &Graph, chosen: &ChosenElements, takes: &[Option<Vec<Interval>>]) -> Result<(), Violation> {
    let body = &model.body;
    let pools: Vec<Vec<f64>> = takes.iter().map(|t| t.as_deref().map_or(vec![], ends)).collect();
    let tables: Vec<(Value, Value, u64)> = body
        .values()
        .filter_map(|v| match body[v].op {
            Op::Gather { dim } => Some((v, body[v].args[1], body.dims[dim].logical)),
            _ => None,
        })
        .collect();
    let needed = behind(model, tables.iter().map(|t| t.1));
    let open = open(model, &pools, &needed);
    let sample = Sample::new(model, chosen, 0, 0.0);
    let small = SmallGraph::new(model, chosen, &sample, DrawMode::Keyed);
    for turn in 0..pools.iter().map(Vec::len).max().unwrap_or(0) {
        let (mut values, mut given) = (vec![vec![]; body.nodes.len()], vec![vec![]; body.nodes.len()]);
        for &v in &needed {
            values[v.index()] = value(&small, v, &values, &pools, turn);
            given[v.index()] = given_by_inputs(&small, v, &values, &given);
        }
        for &(at, index, rows) in tables.iter().filter(|t| !open[t.1.index()]) {
            let mut all = values[index.index()].iter().zip(&given[index.index()]);
            if let Some((x, _)) = all.find(|(x, given)| **given != 0.0 && !(0.0..rows as f64).contains(*x)) {
                return fail(Invariant::IndexWithin, at, format!("inputs may be such that it reads row {x} of {rows}"));
            }
        }
    }
    Ok(())
}

/// The ends of the intervals and a number within each.
fn ends(intervals: &[Interval]) -> Vec<f64> {
    let last = intervals.len().saturating_sub(INTERVALS).max(INTERVALS.min(intervals.len()));
    let looked_at = intervals.iter().take(INTERVALS).chain(&intervals[last..]);
    let numbers = looked_at.flat_map(|i| [i.least, i.least.midpoint(i.most), i.most]).collect::<BTreeSet<i32>>();
    numbers.into_iter().map(f64::from).collect()
}

/// These values and all integers and bools that they depend on, in order.
fn behind(model: &Graph, values: impl Iterator<Item = Value>) -> BTreeSet<Value> {
    let (mut open, mut seen) = (values.collect::<Vec<_>>(), BTreeSet::new());
    while let Some(v) = open.pop() {
        if seen.insert(v) {
            open.extend(model.body[v].args.iter().filter(|a| !model.body[**a].ty.dtype.is_float()));
        }
    }
    seen
}

/// For each value, whether nothing bounds it: it is made of floats, of several numbers of the inputs, or of inputs
/// that may hold anything.
fn open(model: &Graph, pools: &[Vec<f64>], needed: &BTreeSet<Value>) -> Vec<bool> {
    let body = &model.body;
    let (mut open, mut varies) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    for &v in needed {
        let node = &body[v];
        let of = |what: &[bool]| node.args.iter().filter(|a| what[a.index()]).count();
        (varies[v.index()], open[v.index()]) = match &node.op {
            Op::Input(k) => (true, model.inputs[*k as usize].any || pools[*k as usize].is_empty() && node.ty.dtype == DType::I32),
            Op::Const(_) | Op::Iota(_) | Op::Table(_) | Op::ArgMax { .. } => (false, false),
            _ if node.ty.dtype == DType::Bool => (true, false),
            // These ops return one of their operands' numbers, so they are bounded if the operands are.
            Op::Select => (true, node.args[1..].iter().any(|a| open[a.index()])),
            Op::Binary(Binary::Max | Binary::Min) | Op::Concat { .. } | Op::Reduce { kind: Reduce::Max, .. } => (of(&varies) > 0, of(&open) > 0),
            Op::Gather { .. } => (true, open[node.args[0].index()]),
            Op::Reduce { .. } | Op::Cumsum { .. } => (of(&varies) > 0, of(&varies) > 0),
            Op::Add | Op::Binary(_) => (of(&varies) > 0, of(&varies) > 1 || of(&open) > 0),
            Op::Unary(Unary::Neg | Unary::Abs | Unary::Sign) | Op::Cast => {
                (of(&varies) > 0, of(&open) > 0 || node.args.iter().any(|a| body[*a].ty.dtype.is_float()))
            }
            Op::View { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::Shard { .. } | Op::Expand | Op::StopGradient | Op::Cut => {
                (of(&varies) > 0, of(&open) > 0)
            }
            _ => (true, true),
        };
    }
    open
}

/// The numbers of a value, computed from those of its operands.
fn value(small: &SmallGraph, v: Value, values: &[Vec<f64>], pools: &[Vec<f64>], turn: usize) -> Vec<f64> {
    let (node, graph) = (&small.body[v], small.graph);
    let elements = small.body.elements(v) as usize;
    let any = |i: usize| random::uniform(random::stream(v.index() as u64, turn as u64, 0), i as u64);
    let of_floats = node.args.iter().any(|a| small.body[*a].ty.dtype.is_float());
    match node.op {
        Op::Input(k) if !pools[k as usize].is_empty() => {
            let (pool, first) = (&pools[k as usize], random::key(&graph.inputs[k as usize].name));
            // Over all turns, each element takes every number of its pool.
            let at = |i: u64| (random::uniform(random::stream(first, 0, 0), i) * pool.len() as f64) as usize + turn;
            small.fill(&node.ty.dims, &graph.inputs[k as usize].ty.dims, |i| pool[at(i) % pool.len()])
        }
        Op::Input(_) if node.ty.dtype == DType::Bool => (0..elements).map(|i| f64::from(any(i) < 0.5)).collect(),
        // Values made of floats are not evaluated. A comparison may come out either way, and an argmax is the first
        // or the last index of its dim.
        Op::ArgMax { over } => (0..elements).map(|i| if any(i) < 0.5 { 0.0 } else { graph.body.dims[over].logical as f64 - 1.0 }).collect(),
        _ if node.ty.dtype == DType::Bool && of_floats => (0..elements).map(|i| f64::from(any(i) < 0.5)).collect(),
        _ if of_floats => vec![f64::NAN; elements],
        _ => small.node(v, &node.args.iter().map(|a| values[a.index()].as_slice()).collect::<Vec<_>>()),
    }
}

/// For each element of a value, whether inputs gave its number (1) or the text alone (0), of which a compile warns.
fn given_by_inputs(small: &SmallGraph, v: Value, values: &[Vec<f64>], given: &[Vec<f64>]) -> Vec<f64> {
    let (node, elements) = (&small.body[v], small.body.elements(v) as usize);
    let of = |what: &[&[f64]]| small.node(v, what);
    let arg = |k: usize, of: &'_ [Vec<f64>]| of[node.args[k].index()].clone();
    match node.op {
        Op::Const(_) | Op::Iota(_) | Op::Table(_) => vec![0.0; elements],
        Op::Select => of(&[&arg(0, values), &arg(1, given), &arg(2, given)]),
        Op::Gather { .. } => of(&[&arg(0, given), &arg(1, values)]),
        Op::View { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } | Op::Shard { .. } | Op::Expand | Op::StopGradient | Op::Cut => {
            of(&node.args.iter().map(|a| given[a.index()].as_slice()).collect::<Vec<_>>())
        }
        Op::Unary(_) | Op::Binary(_) | Op::Add | Op::Cast if node.args.iter().all(|a| !small.body[*a].ty.dtype.is_float()) => {
            let spread = node.args.iter().map(|a| small.spread(*a, &given[a.index()], &node.ty.dims));
            spread.fold(vec![0.0; elements], |all, one| all.iter().zip(one).map(|(a, b)| a.max(b)).collect())
        }
        _ => vec![1.0; elements],
    }
}
