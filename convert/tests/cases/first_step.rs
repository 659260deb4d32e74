//! The first step of every case, by the reference interpreter.

use crate::bench::{Bench, CASES, case, read, save};
use crate::judge;
use ir::dim::Base;
use ir::eval::{Env, eval};
use ir::graph::{Graph, Type, Value};
use ir::op::{Op, Scalar};
use std::collections::BTreeMap;
use std::fs;

/// The weights and the first batch of a case.
struct Data<'a> {
    graph: &'a Graph,
    weights: BTreeMap<String, Vec<f64>>,
    inputs: BTreeMap<String, Vec<f64>>,
}

impl Env for Data<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => self.weights[&self.graph.params[*p as usize].name].clone(),
            Op::Input(i) => self.inputs[&self.graph.inputs[*i as usize].name].clone(),
            Op::State(..) => vec![0.0; self.graph.body.dims.elements(&ty.dims) as usize],
            Op::Table(t) => self.graph.tables[*t as usize].data.clone(),
            other => panic!("{other:?} in a logical graph"),
        }
    }

    fn scalar(&self, _: &Scalar) -> f64 {
        0.0
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

/// An array of a case for each step, batch and place.
struct Array {
    name: String,
    shape: Vec<usize>,
    data: Vec<f64>,
}

fn arrays(name: &str) -> Vec<Array> {
    let mut out = vec![];
    for input in ["tokens", "labels", "kinds"] {
        let Ok(bytes) = fs::read(case(name).join(format!("{input}.npy"))) else { continue };
        let file = npyz::NpyFile::new(&bytes[..]).unwrap();
        let shape = file.shape().iter().map(|n| *n as usize).collect();
        out.push(Array { name: input.into(), shape, data: file.into_vec::<i32>().unwrap().into_iter().map(f64::from).collect() });
    }
    out
}

/// The inputs of the first step; tokens without labels are their own targets, one place later.
fn inputs(arrays: &[Array]) -> BTreeMap<String, Vec<f64>> {
    let mut out = BTreeMap::new();
    for array in arrays {
        let [batch, width] = [array.shape[1], array.shape[2]];
        let rows = || array.data.chunks(width).take(batch);
        if arrays.len() == 1 {
            out.insert("tokens".into(), rows().flat_map(|r| &r[..width - 1]).copied().collect());
            out.insert("targets".into(), rows().flat_map(|r| &r[1..]).copied().collect());
        } else {
            out.insert(array.name.clone(), rows().flatten().copied().collect());
        }
        // The decoder's input is the labels shifted by one position, with a zero in front.
        if array.name == "labels" && arrays.iter().all(|a| a.name != "kinds") {
            let shifted = rows().flat_map(|r| [0.0].into_iter().chain(r[..width - 1].iter().copied()));
            out.insert("shifted".into(), shifted.collect());
        }
    }
    out
}

/// What comes one element further than targets, two, and so on; -100 past the end.
fn further(targets: &[f64], seq: usize, depths: usize) -> Vec<f64> {
    let row = |row: &[f64], n: usize| (0..seq).map(|i| row.get(i + n).copied().unwrap_or(-100.0)).collect::<Vec<_>>();
    targets.chunks(seq).flat_map(|r| (1..=depths).flat_map(move |n| row(r, n))).collect()
}

/// What the reference interpreter computes for step 0 in f64.
struct Step {
    loss: f64,
    grad_norm: f64,
    /// L2 norm of each gradient, by the names of the checkpoint: gradients are exported as if they were weights.
    grad_norms: BTreeMap<String, f64>,
}

fn step(name: &str) -> Step {
    let bench = Bench::new(name);
    let settings = bench.import().unwrap().settings;
    let text = fs::read_to_string(bench.path("out/model.mdl")).unwrap();
    let arrays = arrays(name);
    let mut inputs = inputs(&arrays);
    let batch = arrays[0].shape[1];
    let seq = inputs["tokens"].len() / batch;
    let defines = match inputs.get("shifted") {
        Some(shifted) => vec![("source".into(), seq.to_string()), ("target".into(), (shifted.len() / batch).to_string())],
        None => vec![("seq".into(), seq.to_string())],
    };
    let options = frontend::Options { defines, batch: batch as u64, ..frontend::Options::default() };
    if let Some((_, depths)) = settings.iter().find(|(name, depths)| name == "mtp" && depths != "0") {
        inputs.insert("further".into(), further(&inputs["targets"], seq, depths.parse().unwrap()));
    }
    let mut sources = ir::diag::Sources::default();
    let model = frontend::compile(&mut sources, "model.mdl", &text, &options, &mut |_| Err("none".into())).unwrap().model;
    let graph = passes::graph::differentiate::differentiate(model.graph, &model.train).unwrap();
    let graph = passes::graph::optimize::optimize(graph, &model.train);
    let float = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
    let mut data = Data {
        graph: &graph,
        weights: read(&bench.path("out/weights.safetensors")).into_iter().map(|t| (t.0, t.3.chunks(4).map(float).collect())).collect(),
        inputs,
    };
    let (loss, norm) = (graph.loss.unwrap(), graph.grad_norm.unwrap());
    let needed = needed(&graph, &[loss, norm]);
    let mut values: Vec<Vec<f64>> = vec![];
    for v in graph.body.values() {
        let args: Vec<&[f64]> = graph.body[v].args.iter().map(|a| values[a.index()].as_slice()).collect();
        let value = if needed[v.index()] { eval(&graph.body, v, &args, &mut data) } else { vec![] };
        values.push(value);
    }
    let mut list = read(&bench.path("out/weights.safetensors"));
    // State parameters have no gradient.
    for tensor in list.iter_mut().filter(|t| graph.params.iter().any(|p| p.name == t.0 && p.state)) {
        tensor.3.fill(0);
    }
    for (param, v) in &graph.grads {
        let (param, dims) = (&graph.params[*param as usize], &graph.body[*v].ty.dims);
        assert_eq!(*dims, param.ty.dims, "{}", param.name);
        let tensor = list.iter_mut().find(|t| t.0 == param.name).unwrap();
        tensor.3 = values[v.index()].iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
    }
    save(&bench.path("out/weights.safetensors"), &list);
    bench.export().unwrap();
    let grad_norms = convert::norms(&bench.path("back/model.safetensors")).unwrap();
    Step { loss: values[loss.index()][0], grad_norm: values[norm.index()][0], grad_norms }
}

fn needed(graph: &Graph, roots: &[Value]) -> Vec<bool> {
    let mut needed = vec![false; graph.body.nodes.len()];
    let mut stack = roots.to_vec();
    while let Some(v) = stack.pop() {
        if !std::mem::replace(&mut needed[v.index()], true) {
            stack.extend(&graph.body[v].args);
        }
    }
    needed
}

fn expected(name: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(case(name).join("expected.json")).unwrap()).unwrap()
}

pub fn agrees(name: &str) {
    let (step, expected) = (step(name), expected(name));
    let first = serde_json::json!({
        "losses": [expected["losses"][0]],
        "grad_norms": [expected["grad_norms"][0]],
        "param_norms": expected["grad_norms_by_param_step0"],
    });
    let run = judge::Run { losses: &[step.loss], grad_norms: &[step.grad_norm], param_norms: Some(&step.grad_norms) };
    assert_eq!(judge::judge(&run, &first), Vec::<String>::new(), "{name}");
}

#[test]
fn the_first_step_of_every_case_agrees() {
    for name in CASES {
        agrees(name);
    }
}

#[test]
fn the_norms_of_the_cases_weights_are_the_expected_ones() {
    for name in CASES {
        let norms = convert::norms(&case(name).join("model.safetensors")).unwrap();
        let first = serde_json::json!({"losses": [1.0], "grad_norms": [1.0], "param_norms": expected(name)["param_norms_init"]});
        let run = judge::Run { losses: &[1.0], grad_norms: &[1.0], param_norms: Some(&norms) };
        assert_eq!(judge::judge(&run, &first), Vec::<String>::new(), "{name}");
    }
}
