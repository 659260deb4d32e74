//! What the logical graph computes, and how far from it a program may be.
//!
//! A program in 16 bits is compared twice. Without rounding, all of it in f64, it must compute what the graph computes to 1e-9: whatever is
//! wrong with its commands shows. With rounding the bound is measured, since each sum of parts rounds where the whole sum does not, and what
//! later values make of that depends on the model (a norm over two nearly equal values makes anything of it): the graph is run several
//! times with each 16-bit result moved at random by what rounding of parts may do to it (Monte Carlo arithmetic, Parker 1997), and a value
//! may be off by a few times of what it was moved by then.

use super::harness::{Logical, StepInputs};
use ir::eval;
use ir::graph::{Body, Graph, Value};
use ir::op::{DType, Op, Reduce};
use ir::program::{Action, Job};
use ir::random;

/// Runs of the graph with noise: first, and where a result is off by more than these show. A comparison that only few of them turn (two elements
/// that are nearly the greatest) is seen by many.
pub const RUNS: [u64; 2] = [8, 256];
/// How many times further than the furthest of them is still rounding.
const BEYOND: f64 = 4.0;
/// How many times greater than a sum its parts may be.
const PARTS: f64 = 16.0;
/// Roundings on the way of a part of a sum into it, each of them half of the last place: its own, of a sum of some parts on a rank, of all.
const ROUNDINGS: f64 = 3.0;

pub struct ExpectedStep {
    pub values: Vec<Vec<f64>>,
    /// Per value: most by which an element may be off.
    bounds: Vec<f64>,
    /// Per value of 16 bits: whether rounding changed nothing.
    unmoved: Vec<bool>,
    is_sharp: bool,
    /// Whether parts of sums stay below the greatest number too, however large beside the sums.
    pub fits: bool,
}

impl ExpectedStep {
    /// With bounds from `runs` of the graph with noise.
    pub fn new(graph: &Graph, given: &StepInputs, precision: DType, runs: u64) -> ExpectedStep {
        if !precision.is_half() {
            return ExpectedStep::unrounded(graph, given);
        }
        let values = eval::run(&graph.body, &mut Logical { graph, given });
        let plain = ExpectedStep::unrounded(graph, given);
        let unmoved = values.iter().zip(&plain.values).map(|(v, w)| v == w).collect();
        let most = match precision {
            DType::F16 => 65504.0,
            DType::F32 | DType::Bf16 | DType::I32 | DType::Bool => f64::MAX,
        };
        let halves = graph.body.nodes.iter().zip(&plain.values).filter(|(n, _)| n.ty.dtype.is_half()).flat_map(|(_, v)| v);
        let fits = halves.filter(|x| x.is_finite()).all(|x| x.abs() * PARTS < most);
        let mut bounds = plain.bounds;
        for run in 0..runs {
            let moved = noisy(graph, given, run);
            for ((bound, v), w) in bounds.iter_mut().zip(&values).zip(&moved) {
                *bound = v.iter().zip(w).fold(*bound, |m, (x, y)| m.max(BEYOND * (x - y).abs()));
            }
        }
        ExpectedStep { values, bounds, unmoved, is_sharp: false, fits }
    }

    /// As if all floats had all bits.
    pub fn unrounded(graph: &Graph, given: &StepInputs) -> ExpectedStep {
        let mut plain = graph.clone();
        widen(&mut plain.body);
        let values = eval::run(&plain.body, &mut Logical { graph: &plain, given });
        let bounds = values.iter().map(|v| 1e-9 * v.iter().fold(1e-3f64, |m, x| m.max(x.abs()))).collect();
        ExpectedStep { unmoved: vec![true; values.len()], values, bounds, is_sharp: true, fits: true }
    }

    pub fn exactly(mut self) -> ExpectedStep {
        self.bounds.fill(0.0);
        self.is_sharp = true;
        self
    }

    /// Whether nothing but the order of exact sums in f64 may differ.
    pub fn is_sharp(&self) -> bool {
        self.is_sharp
    }

    /// Whether sums of some thousands of the numbers of the first `count` values, and these times the learning rate, are exact; in 16
    /// bits, sums of a few: all are small multiples of one power of two, and none was rounded to be so.
    pub fn is_exact(&self, graph: &Graph, count: usize) -> bool {
        let nodes = graph.body.nodes.iter().zip(&self.values).zip(&self.unmoved).take(count);
        nodes.into_iter().all(|((node, values), unmoved)| {
            if !node.ty.dtype.is_half() {
                return values.iter().all(|x| x.abs() < 2f64.powi(40) && (x * 256.0).fract() == 0.0);
            }
            let most = values.iter().fold(0f64, |m, x| m.max(x.abs()));
            let unit = 2f64.powi(most.max(2f64.powi(-60)).log2().ceil() as i32 - 5);
            *unmoved && values.iter().all(|x| (x / unit).fract() == 0.0)
        })
    }

    /// `want` is `v` in the order of `got`.
    pub fn differs(&self, name: &str, got: &[f64], v: Value, want: &[f64]) -> Option<String> {
        if got.len() != want.len() {
            return Some(format!("{name} has {} elements instead of {}", got.len(), want.len()));
        }
        let bound = self.bounds[v.index()];
        let i = got.iter().zip(want).position(|(g, w)| (g - w).abs() > bound || g.is_nan())?;
        Some(format!("{name}[{i}] is {} instead of {}, off by more than {bound:e}", got[i], want[i]))
    }
}

/// The graph's values where every 16-bit sum is moved up or down at random, in proportion to the sum of its absolute terms. Other ops do the same in
/// parts as in whole. Only odd runs round: there values may become equal, and share a maximum, that are not otherwise.
fn noisy(graph: &Graph, given: &StepInputs, run: u64) -> Vec<Vec<f64>> {
    let mut plain = graph.clone();
    widen(&mut plain.body);
    let mut env = Logical { graph: &plain, given };
    let mut values: Vec<Vec<f64>> = vec![];
    for (v, node) in graph.body.values().zip(&graph.body.nodes) {
        let args: Vec<&[f64]> = node.args.iter().map(|a| values[a.index()].as_slice()).collect();
        let mut out = eval::eval(&plain.body, v, &args, &mut env);
        let unit = match node.ty.dtype {
            DType::Bf16 => 2f64.powi(-9),
            DType::F16 => 2f64.powi(-12),
            DType::F32 | DType::I32 | DType::Bool => 0.0,
        };
        let absolute = || -> Vec<Vec<f64>> { args.iter().map(|a| a.iter().map(|x| x.abs()).collect()).collect() };
        let sums = match node.op {
            _ if unit == 0.0 => None,
            Op::Dot { .. } | Op::Reduce { kind: Reduce::Sum, .. } | Op::Scatter { .. } | Op::Add | Op::Cumsum { .. } => {
                let parts = absolute();
                Some(eval::eval(&plain.body, v, &parts.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut env))
            }
            Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..) => {
                let most = out.iter().fold(0f64, |m, x| m.max(x.abs()));
                Some(vec![most; out.len()])
            }
            _ => None,
        };
        if let Some(sums) = sums {
            let stream = random::stream(u64::from(v.0), run, 0);
            let noise = |i: u64| if random::uniform(stream, i) < 0.5 { -ROUNDINGS * unit } else { ROUNDINGS * unit };
            // Masked scores are infinite and get no noise.
            let finite = out.iter_mut().zip(&sums).zip(0..).filter(|((x, _), _)| x.is_finite());
            finite.for_each(|((x, sum), i)| *x += noise(i) * sum);
        }
        if run % 2 == 1 {
            out.iter_mut().for_each(|x| *x = node.ty.dtype.round(*x));
        }
        values.push(out);
    }
    values
}

fn widen(body: &mut Body) {
    body.nodes.iter_mut().for_each(|n| n.ty.dtype = wide(n.ty.dtype));
}

fn wide(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}

/// The job with f32 for every 16-bit float. All that lies in memory moves to twice its offset, so that what shares bytes still does.
pub fn unrounded(job: &Job) -> Job {
    let mut job = job.clone();
    for kernel in &mut job.kernels {
        widen(&mut kernel.body);
        kernel.inputs.iter_mut().for_each(|i| i.ty.dtype = wide(i.ty.dtype));
        kernel.scalars.iter_mut().for_each(|s| *s = wide(*s));
    }
    job.tables.iter_mut().for_each(|t| t.dtype = wide(t.dtype));
    job.inputs.iter_mut().for_each(|i| i.dtype = wide(i.dtype));
    job.stages.iter_mut().flat_map(|s| &mut s.schedule.slots).for_each(|s| s.at *= 2);
    for program in &mut job.programs {
        for b in &mut program.buffers {
            b.dtype = wide(b.dtype);
            b.offset *= 2;
        }
        program.arena_bytes.iter_mut().chain(program.stashes.iter_mut().map(|s| &mut s.bytes)).for_each(|n| *n *= 2);
        for command in program.bodies.iter_mut().flat_map(|b| &mut b.commands) {
            match &mut command.action {
                Action::Collective { dtype, .. } | Action::Send { dtype, .. } | Action::Recv { dtype, .. } | Action::Copy { dtype, .. } => {
                    *dtype = wide(*dtype);
                }
                Action::Launch { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Limit { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => {}
            }
        }
    }
    job
}
