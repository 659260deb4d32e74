//! The harness: compiles a text, runs one step on all ranks, and compares with the logical graph.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Graph, Type};
use ir::op::{DType, Op, Scalar};
use ir::random;
use passes::compile::{Compiled, Options, compile};
use passes::plan::SequenceParallel;
use passes::propagate::Rows;
use passes::schedule::Schedule;
use runtime::host::Tensor;
use runtime::reference;
use std::collections::BTreeMap;

/// A mesh and a schedule.
#[derive(Clone, Debug)]
pub struct Case {
    pub dp: u64,
    pub tp: u64,
    pub pp: u64,
    pub sp: bool,
    pub micro_batch: u64,
    pub global_batch: u64,
    pub schedule: Schedule,
    pub rows: Rows,
    pub layout: Option<Vec<u32>>,
    pub seed: u64,
}

impl Default for Case {
    fn default() -> Self {
        Case { dp: 1, tp: 1, pp: 1, sp: false, micro_batch: 1, global_batch: 1, schedule: Schedule::OneFOneB, rows: Rows::Rules, layout: None, seed: 1 }
    }
}

pub fn elaborate(text: &str, defines: &[(&str, &str)], batch: u64, training: bool) -> ir::model::Model {
    let options = Text {
        defines: defines.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        batch: batch as i64,
        training,
        inline_ops: false,
    };
    let mut sources = Sources::default();
    match frontend::compile(&mut sources, "test.mdl", text, &options, &mut |_| Err("no imports".into())) {
        Ok(e) => e.model,
        Err(errors) => panic!("{}", errors.iter().map(|e| frontend::render(e, &sources, frontend::Style::Plain)).collect::<String>()),
    }
}

pub fn compiled(text: &str, defines: &[(&str, &str)], case: &Case) -> Compiled {
    let options = Options {
        dp: case.dp,
        tp: case.tp,
        pp: case.pp,
        sp: if case.sp { SequenceParallel::On } else { SequenceParallel::Off },
        micro_batch: case.micro_batch,
        global_batch: case.global_batch,
        schedule: case.schedule,
        layout: case.layout.clone(),
        pad_vocab_to: 1,
        rows: case.rows,
    };
    let model = |training| elaborate(text, defines, case.global_batch, training);
    match compile(model(true), model(false), &options) {
        Ok(c) => c,
        Err(e) => panic!("{case:?}: {e:?}"),
    }
}

struct Logical<'a> {
    graph: &'a Graph,
    params: &'a BTreeMap<String, Tensor>,
    inputs: &'a BTreeMap<String, Tensor>,
    states: &'a reference::States,
}

const RATE: f64 = 0.0625;
const SEED: u64 = 7;
const STEP: u64 = 3;

impl Env for Logical<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => self.params[&self.graph.params[*p as usize].name].data.clone(),
            Op::Input(i) => self.inputs[&self.graph.inputs[*i as usize].name].data.clone(),
            Op::State(p, k) => self.states[&(self.graph.params[*p as usize].name.clone(), *k)].data.clone(),
            Op::Table(t) => eval::reorder(&self.graph.body.dims, &self.graph.tables[*t as usize].data, &ty.dims, &ty.dims),
            other => panic!("{}", other.name()),
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::LearningRate => RATE,
            Scalar::Step => STEP as f64,
            Scalar::Seed => SEED as f64,
            Scalar::BiasCorrection(beta) => 1.0 - beta.0.powi(STEP as i32),
            other => panic!("{other:?}"),
        }
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

fn close(name: &str, case: &Case, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{name} {case:?}");
    let scale = want.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-9 * scale, "{name}[{i}]: {g} instead of {w} in {case:?}");
    }
}

/// Compiles for the case, runs one step, and compares every report, parameter and state with the logical graph's.
pub fn check(text: &str, defines: &[(&str, &str)], case: &Case) {
    let c = compiled(text, defines, case);
    let graph = &c.graph;
    let sizes = |ty: &Type| ty.dims.iter().map(|d| graph.body.dims[*d].logical).collect::<Vec<u64>>();
    let normal = |name: &str, n: u64| {
        let stream = random::stream(random::key(name), case.seed, 0);
        (0..n).map(|i| random::normal(stream, i)).collect::<Vec<f64>>()
    };
    let params: BTreeMap<String, Tensor> = graph
        .params
        .iter()
        .map(|p| {
            let s = sizes(&p.ty);
            (p.name.clone(), Tensor { data: normal(&p.name, s.iter().product()).into_iter().map(|x| x * 0.5).collect(), sizes: s })
        })
        .collect();
    let inputs: BTreeMap<String, Tensor> = graph
        .inputs
        .iter()
        .zip(&c.job.inputs)
        .map(|(i, entry)| {
            let s = sizes(&i.ty);
            let n: u64 = s.iter().product();
            let stream = random::stream(random::key(&i.name), case.seed, 1);
            let data = match i.ty.dtype {
                DType::I32 => (0..n).map(|k| (random::uniform(stream, k) * entry.limit.unwrap_or(4) as f64).floor()).collect(),
                DType::Bool => (0..n).map(|k| f64::from(random::uniform(stream, k) < 0.7)).collect(),
                DType::F32 | DType::Bf16 | DType::F16 => normal(&i.name, n),
            };
            (i.name.clone(), Tensor { data, sizes: s })
        })
        .collect();
    let states: reference::States = graph
        .updates
        .iter()
        .flat_map(|u| (0..u.states.len() as u32).map(move |k| (u.param, k)))
        .map(|(p, k)| {
            let info = &graph.params[p as usize];
            let s = sizes(&info.ty);
            let data = normal(&format!("{} state {k}", info.name), s.iter().product()).into_iter().map(|x| x * x * 0.1).collect();
            ((info.name.clone(), k), Tensor { data, sizes: s })
        })
        .collect();
    let values = eval::run(&graph.body, &mut Logical { graph, params: &params, inputs: &inputs, states: &states });
    let got = match reference::run_step(&c.job, &params, &states, &inputs, STEP, RATE, SEED) {
        Ok(r) => r,
        Err(e) => panic!("{e} in {case:?}"),
    };
    let report = |name: &str, v: Option<ir::graph::Value>| {
        if let Some(v) = v {
            close(name, case, &[got.reports[name]], &values[v.index()]);
        }
    };
    report("loss", graph.loss);
    report("grad_norm", graph.grad_norm);
    for r in graph.losses.iter().chain(&graph.metrics) {
        report(&r.name, Some(r.value));
    }
    for u in &graph.updates {
        let info = &graph.params[u.param as usize];
        let in_order = |v: ir::graph::Value| eval::reorder(&graph.body.dims, &values[v.index()], graph.body.dims_of(v), &info.ty.dims);
        close(&info.name, case, &got.params[&info.name].data, &in_order(u.new));
        for (k, v) in u.states.iter().enumerate() {
            close(&format!("{} state {k}", info.name), case, &got.states[&(info.name.clone(), k as u32)].data, &in_order(*v));
        }
    }
    let evaluated = reference::run_eval(&c.job, &params, &inputs, SEED).unwrap_or_else(|e| panic!("{e} in {case:?}"));
    if !text.contains("dropout_rate = 0.5") {
        close("eval loss", case, &[evaluated["loss"]], &values[graph.loss.expect("a loss").index()]);
    }
}
