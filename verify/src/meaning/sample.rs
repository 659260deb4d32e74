//! Numbers for what graphs are evaluated on: parameters, states, inputs, gradients, directions. Keyed by names
//! and the model's indices, so that two graphs are given the same, whatever their sizes and orders of storage.

use super::chosen::ChosenElements;
use ir::graph::{Body, Graph, Init, Input, Param, Value};
use ir::op::{DType, Op, Real, Routing, Scalar};
use ir::random;
use std::collections::{BTreeMap, BTreeSet};

/// The numbers of one evaluation.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The number of the sample.
    number: u64,
    /// The bound of weights that begin at random.
    scale: f64,
    /// For each integer input, the numbers that it is drawn from.
    pools: BTreeMap<String, Vec<f64>>,
}

/// Kinds of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// Gradients of one size.
    Even,
    /// Gradients from very small to large.
    Uneven,
}

/// The number of the step: large enough that Adam's bias corrections of 1 - beta^step differ.
const STEP: f64 = 3.0;

impl Sample {
    /// A sample for a model, of which these elements are chosen.
    pub fn new(model: &Graph, chosen: &ChosenElements, number: u64, scale: f64) -> Sample {
        let pools = pools(model, chosen).into_iter().map(|(k, pool)| (model.inputs[k as usize].name.clone(), pool));
        Sample { number, scale, pools: pools.collect() }
    }

    pub fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::LearningRate => 0.375,
            Scalar::LossScale => 8.0,
            Scalar::Step => STEP,
            Scalar::Seed => 7.0 + self.number as f64,
            Scalar::BiasCorrection(Real(beta)) => 1.0 - beta.powf(STEP),
            Scalar::Linear(_) | Scalar::Slot(_) => f64::NAN,
        }
    }

    /// The values of a parameter, near where it begins. Like all that follows, by the number of an element.
    pub fn param(&self, param: &Param) -> impl Fn(u64) -> f64 {
        let (x, init, scale) = (self.signed(&param.name), param.init, self.scale);
        move |i| match init {
            Init::Const(Real(c)) if c.abs() < 1e6 => c + x(i) / 2.0,
            Init::Const(_) | Init::Normal(_) => scale * x(i),
        }
    }

    /// The values of a state. The first slot is a mean of gradients, the other one of their squares: from very small
    /// to large.
    pub fn state(&self, param: &Param, slot: u32) -> impl Fn(u64) -> f64 {
        let of = self.spread_out(&format!("state {slot} of {}", param.name));
        move |i| {
            let x = of(i);
            if slot == 0 { x } else { x * x }
        }
    }

    pub fn input(&self, input: &Input) -> impl Fn(u64) -> f64 {
        let (of, dtype, pool) = (self.unit(&format!("input {}", input.name)), input.ty.dtype, self.pools.get(&input.name));
        move |i| {
            let x = of(i);
            match (dtype, pool) {
                (DType::Bool, _) => f64::from(x < 0.5),
                (DType::I32, Some(pool)) => pool[(x * pool.len() as f64) as usize],
                (DType::I32, None) => (x * 4.0).floor(),
                (DType::F32 | DType::Bf16 | DType::F16, _) => 2.0 * x - 1.0,
            }
        }
    }

    /// A direction in which a parameter moves.
    pub fn direction(&self, param: &Param) -> impl Fn(u64) -> f64 + use<> {
        self.signed(&format!("direction of {}", param.name))
    }

    /// A gradient to put in the place of the true one.
    pub fn gradient(&self, param: &Param, kind: Gradients) -> impl Fn(u64) -> f64 {
        let name = format!("gradient of {}", param.name);
        let (even, uneven) = (self.signed(&name), self.spread_out(&name));
        move |i| match kind {
            Gradients::Even => even(i),
            Gradients::Uneven => uneven(i),
        }
    }

    /// Random numbers in [0, 1).
    fn unit(&self, name: &str) -> impl Fn(u64) -> f64 + use<> {
        let stream = random::stream(random::key(name), self.number, 0);
        move |i| random::uniform(stream, i)
    }

    /// Random numbers of either sign, up to about 1 and not near zero.
    fn signed(&self, name: &str) -> impl Fn(u64) -> f64 + use<> {
        let unit = self.unit(name);
        move |i| {
            let x = 2.0 * unit(i) - 1.0;
            x + x.signum() * 0.0625
        }
    }

    /// Random numbers of either sign, from 1e-9 to 1.
    fn spread_out(&self, name: &str) -> impl Fn(u64) -> f64 + use<> {
        let (signed, size) = (self.signed(name), self.unit(&format!("size of {name}")));
        move |i| signed(i).signum() * 10f64.powf(-9.0 * size(i))
    }
}

/// For each integer input: the chosen rows of what it looks up, and the numbers that it is compared with.
fn pools(model: &Graph, chosen: &ChosenElements) -> BTreeMap<u32, Vec<f64>> {
    let body = &model.body;
    let mut pools: BTreeMap<u32, BTreeSet<i64>> = BTreeMap::new();
    for node in &body.nodes {
        let (index, numbers): (Vec<Value>, Vec<i64>) = match &node.op {
            Op::Gather { dim } | Op::Scatter { dim } | Op::Dispatch(Routing { experts: dim, .. }) | Op::Combine(Routing { experts: dim, .. }) => {
                (vec![node.args[1]], chosen.places(*dim).iter().map(|p| *p as i64).collect())
            }
            Op::Compare(_) => {
                let number = |v: &Value| match body[*v].op {
                    Op::Const(Real(c)) if c.fract() == 0.0 && body[*v].ty.dtype == DType::I32 => Some(c as i64),
                    _ => None,
                };
                (node.args.clone(), node.args.iter().filter_map(number).flat_map(|c| [c, c + 1]).collect())
            }
            _ => continue,
        };
        for k in index.into_iter().flat_map(|v| inputs_behind(body, v)) {
            pools.entry(k).or_default().extend(&numbers);
        }
    }
    pools.into_iter().filter(|(_, p)| !p.is_empty()).map(|(k, pool)| (k, pool.into_iter().map(|x| x as f64).collect())).collect()
}

/// The integer inputs from which an integer is computed.
fn inputs_behind(body: &Body, v: Value) -> BTreeSet<u32> {
    let (mut open, mut seen, mut out) = (vec![v], BTreeSet::new(), BTreeSet::new());
    while let Some(v) = open.pop() {
        if body[v].ty.dtype.is_float() || !seen.insert(v) {
            continue;
        }
        match body[v].op {
            Op::Input(k) => {
                out.insert(k);
            }
            _ => open.extend(&body[v].args),
        }
    }
    out
}
