//! Random texts through elaboration and `differentiate`, against what PyTorch's autograd has for them in
//! float64.
//!
//! `passes/tests/autograd/record.py` wrote the texts, and the numbers, twice: for mcc and for PyTorch. Here the
//! text is elaborated with its library, differentiated and evaluated in f64; the loss and each gradient have to
//! be PyTorch's.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Graph, Type};
use ir::op::{Op, Scalar};
use ir::options::Options;
use ir::progress::Progress;
use passes::compile::Compile;
use passes::table::PASSES;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(serde::Deserialize)]
struct Recorded {
    text: String,
    tokens: Vec<f64>,
    targets: Vec<f64>,
    seeds: BTreeMap<String, u64>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f64>>,
}

/// Element `i` of a tensor, as `record.py` has it.
fn value(seed: u64, i: u64) -> f64 {
    ((seed * 2_654_435_761 + i * 40_503 + i * i * 17) % 10_007) as f64 / 10_007.0 * 2.0 - 1.0
}

struct Numbers<'r> {
    recorded: &'r Recorded,
    graph: &'r Graph,
}

impl Env for Numbers<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => {
                let param = &self.graph.params[*p as usize];
                let seed = self.recorded.seeds[&param.name];
                let own: Vec<f64> = (0..self.graph.body.dims.elements(&param.ty.dims)).map(|i| value(seed, i)).collect();
                eval::reorder(&self.graph.body.dims, &own, &param.ty.dims, &ty.dims)
            }
            Op::Input(k) if self.graph.inputs[*k as usize].name == "tokens" => self.recorded.tokens.clone(),
            Op::Input(_) => self.recorded.targets.clone(),
            other => unreachable!("no `{}` before the optimizer", other.name()),
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        unreachable!("no {scalar:?} before the optimizer")
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

/// The graph with its gradients, and the names of parameters that have none.
fn differentiated(text: &str, number: usize) -> Graph {
    let mut sources = Sources::default();
    let elaboration = Text { batch: 2, ..Text::default() };
    let models = frontend::compile_both(&mut sources, "random.mdl", text, &elaboration, &mut |_| Err("no imports".into()));
    let models = models.unwrap_or_else(|e| panic!("text {number}: {:?}\n{text}", e.iter().map(|d| &d.message).collect::<Vec<_>>()));
    let (options, progress) = (Options { global_batch: 2, micro_batch: 2, ..Options::default() }, Progress::default());
    let mut compile = Compile::by(PASSES, models.training, models.evaluation, &options, &progress).unwrap_or_else(|e| panic!("text {number}: {e:?}"));
    while compile.step().unwrap_or_else(|e| panic!("text {number}: {e:?}")).is_some_and(|pass| pass.name != "differentiate") {}
    compile.module().training.whole.graph().clone()
}

/// What differs from PyTorch's numbers.
fn difference(recorded: &Recorded, number: usize) -> Option<String> {
    let graph = differentiated(&recorded.text, number);
    let values = eval::run(&graph.body, &mut Numbers { recorded, graph: &graph });
    let near = |x: f64, y: f64, size: f64| (x - y).abs() <= 1e-9 * size.max(1.0);
    let loss = values[graph.loss.expect("differentiated").index()][0];
    if !near(loss, recorded.loss, recorded.loss.abs()) {
        return Some(format!("the loss is {loss}, PyTorch's {}", recorded.loss));
    }
    let mut gradients: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (p, v) in &graph.grads {
        let param = &graph.params[*p as usize];
        gradients.insert(&param.name, eval::reorder(&graph.body.dims, &values[v.index()], graph.body.dims_of(*v), &param.ty.dims));
    }
    for (name, want) in &recorded.gradients {
        let size = want.iter().fold(0.0, |n: f64, x| n.max(x.abs()));
        let zero = vec![0.0; want.len()];
        let found = gradients.get(name.as_str()).unwrap_or(&zero);
        if found.len() != want.len() || found.iter().zip(want).any(|(x, y)| !near(*x, *y, size)) {
            return Some(format!("the gradient of `{name}` is {found:?}, PyTorch's {want:?}"));
        }
    }
    None
}

#[test]
fn random_texts_have_the_gradients_of_autograd() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/autograd/texts.json");
    let all: Vec<Recorded> = serde_json::from_slice(&std::fs::read(path).expect("recorded texts")).expect("JSON");
    assert_eq!(all.len(), 200);
    let wrong: Vec<String> = all.iter().enumerate().filter_map(|(k, r)| difference(r, k).map(|why| format!("text {k}: {why}\n{}", r.text))).collect();
    assert!(wrong.is_empty(), "{} texts differ:\n{}", wrong.len(), wrong.join("\n"));
}
