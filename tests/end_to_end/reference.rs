//! Steps of training by the reference interpreter, on the logical graph: no mesh, no microbatches, f64.

use crate::mcc::Weights;
use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Graph, Type, Value};
use ir::op::{DType, Op, Scalar};
use ir::random;
use std::collections::BTreeMap;

/// What a run starts from.
pub struct InitialState {
    pub weights: Weights,
    /// Per step, whole batches by the input's name.
    pub inputs: Vec<BTreeMap<String, Vec<f64>>>,
    pub rate: f64,
    pub seed: u64,
}

/// What comes out of it.
pub struct Trained {
    /// Per step, by name, with `loss` and `grad_norm`.
    pub reports: Vec<BTreeMap<String, f64>>,
    pub params: BTreeMap<String, Vec<f64>>,
    /// Every value but the gradient norm is a multiple of 2^-8 with few digits, so that f32 has no rounding in any
    /// order of sums.
    pub exact: bool,
    pub finite: bool,
}

struct Step<'a> {
    graph: &'a Graph,
    params: &'a BTreeMap<String, Vec<f64>>,
    states: &'a BTreeMap<(u32, u32), Vec<f64>>,
    inputs: &'a BTreeMap<String, Vec<f64>>,
    number: u64,
    rate: f64,
    seed: u64,
}

/// What becomes of the result of an op.
#[derive(Clone, Copy)]
pub enum Rounding {
    None,
    /// Random changes of about as much as f32 rounds by, from this seed.
    Noise(u64),
}

/// As [`eval::run`], with rounding.
fn evaluate(step: &mut Step, rounding: Rounding) -> Vec<Vec<f64>> {
    let body = &step.graph.body;
    let mut values: Vec<Vec<f64>> = vec![];
    for v in body.values() {
        let node = &body[v];
        let args: Vec<&[f64]> = node.args.iter().map(|a| values[a.index()].as_slice()).collect();
        let mut out = eval::eval(body, v, &args, step);
        if let Rounding::Noise(seed) = rounding
            && node.ty.dtype == DType::F32
            && !node.args.is_empty()
        {
            let stream = random::stream(u64::from(v.0), seed, step.number);
            out.iter_mut().zip(0..).for_each(|(x, i)| *x *= 1.0 + (random::uniform(stream, i) - 0.5) * 4.0 * f64::from(f32::EPSILON));
        }
        values.push(out);
    }
    values
}

pub fn train(graph: &Graph, start: &InitialState, rounding: Rounding) -> Trained {
    let mut params: BTreeMap<String, Vec<f64>> =
        start.weights.iter().map(|(n, (_, d))| (n.clone(), d.iter().map(|x| f64::from(*x)).collect())).collect();
    let mut states = BTreeMap::new();
    for u in &graph.updates {
        let elements = graph.body.dims.elements(&graph.params[u.param as usize].ty.dims);
        states.extend((0..u.states.len() as u32).map(|k| ((u.param, k), vec![0.0; elements as usize])));
    }
    let mut out = Trained { reports: vec![], params: BTreeMap::new(), exact: true, finite: true };
    for (inputs, number) in start.inputs.iter().zip(1..) {
        let values = evaluate(&mut Step { graph, params: &params, states: &states, inputs, number, rate: start.rate, seed: start.seed }, rounding);
        let used: Vec<&Vec<f64>> = graph.roots().iter().map(|v| &values[v.index()]).collect();
        out.finite &= used.iter().all(|v| v.iter().all(|x| x.abs() < 1e30));
        let counted = graph.grad_norm.map_or(values.len(), Value::index);
        out.exact &= values[..counted].iter().chain(graph.updates.iter().map(|u| &values[u.new.index()])).flatten().all(|x| is_exact(*x));
        let scalar = |v: Value| values[v.index()][0];
        let named = graph.losses.iter().chain(&graph.metrics).map(|r| (r.name.clone(), scalar(r.value)));
        let own = [("loss", graph.loss), ("grad_norm", graph.grad_norm)].into_iter().filter_map(|(n, v)| Some((n.to_string(), scalar(v?))));
        out.reports.push(named.chain(own).collect());
        for u in &graph.updates {
            let info = &graph.params[u.param as usize];
            let new = |v: Value| eval::reorder(&graph.body.dims, &values[v.index()], graph.body.dims_of(v), &info.ty.dims);
            params.insert(info.name.clone(), new(u.new));
            for (v, k) in u.states.iter().zip(0..) {
                states.insert((u.param, k), new(*v));
            }
        }
    }
    out.params = params;
    out
}

fn is_exact(x: f64) -> bool {
    x.abs() < 2f64.powi(13) && (x * 256.0).fract() == 0.0
}

impl Env for Step<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => self.params[&self.graph.params[*p as usize].name].clone(),
            Op::Input(i) => self.inputs[&self.graph.inputs[*i as usize].name].clone(),
            Op::State(p, k) => self.states[&(*p, *k)].clone(),
            Op::Table(t) => eval::reorder(&self.graph.body.dims, &self.graph.tables[*t as usize].data, &ty.dims, &ty.dims),
            other => panic!("{} is no source of a logical graph", other.name()),
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::LearningRate => self.rate,
            Scalar::Step => self.number as f64,
            Scalar::Seed => self.seed as f64,
            Scalar::BiasCorrection(beta) => 1.0 - beta.0.powi(self.number as i32),
            other => panic!("{other:?} is no scalar of a logical graph"),
        }
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}
