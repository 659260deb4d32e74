//! A graph on the elements chosen, evaluated in f64.
//!
//! Nothing is rounded, but for what follows from constants alone: tables are evaluated when compiling, as the
//! text's types say.

use super::chance::{self, DrawAnalysis};
use super::chosen::ChosenElements;
use super::sample::Sample;
use ir::dim::{Base, Dim, IndexMap};
use ir::eval::{self, Env};
use ir::graph::{Body, Graph, Type, Value};
use ir::op::{Binary, DType, Op, Routing, Scalar, Scoring, Unary};
use ir::random;
use std::collections::HashMap;

/// How random draws go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawMode {
    /// Draws are keyed, as in a run.
    Keyed,
    /// Where a draw chooses between two values, what comes out is their mean.
    Mean,
}

/// A graph with the dims that are chosen of it.
pub struct SmallGraph<'a> {
    pub graph: &'a Graph,
    chosen: &'a ChosenElements,
    sample: &'a Sample,
    draws: DrawMode,
    /// The graph's body, with small dims.
    pub body: Body,
    /// For each dim, the positions of its chosen elements, and the model's indices of them.
    places: Vec<Vec<u64>>,
    indices: Vec<Vec<u64>>,
}

impl<'a> SmallGraph<'a> {
    pub fn new(graph: &'a Graph, chosen: &'a ChosenElements, sample: &'a Sample, draws: DrawMode) -> SmallGraph<'a> {
        let tabled = tabled(&graph.body);
        let mut body = graph.body.clone();
        let places: Vec<Vec<u64>> = body.dims.ids().map(|d| chosen.places(d)).collect();
        let index = |d: Dim| places[d.0 as usize].iter().map(|p| graph.body.dims[d].order.index(*p)).collect();
        let indices = body.dims.ids().map(index).collect();
        for d in body.dims.ids() {
            let n = chosen.count(d);
            let info = &mut body.dims[d];
            (info.size, info.global, info.index) = (n, n, IndexMap::whole(n));
        }
        let drawn = match draws {
            DrawMode::Keyed => vec![],
            DrawMode::Mean => programs_at_mean(&body),
        };
        for (v, program) in drawn {
            if let Op::Attention(a) = &mut body.nodes[v.index()].op {
                a.scoring = program;
            }
        }
        for (node, tabled) in body.nodes.iter_mut().zip(tabled) {
            // Values are evaluated as real numbers. Only tables keep their 16-bit type, since compiling rounds them.
            if node.ty.dtype.is_half() && (!tabled || node.ty.dims.is_empty() || node.op.is_source()) {
                node.ty.dtype = DType::F32;
            }
            match &mut node.op {
                Op::Slice { from, at, .. } => *at = chosen.before(*from, *at),
                Op::Pad { to, at, .. } => *at = chosen.before(*to, *at),
                Op::Dot { tf32, .. } => *tf32 = false,
                _ => {}
            }
        }
        SmallGraph { graph, chosen, sample, draws, body, places, indices }
    }

    /// All values.
    pub fn run(&self) -> Vec<Vec<f64>> {
        let mut values: Vec<Vec<f64>> = Vec::with_capacity(self.body.nodes.len());
        for v in self.body.values() {
            let args: Vec<&[f64]> = self.body[v].args.iter().map(|a| values[a.index()].as_slice()).collect();
            let out = self.node(v, &args);
            values.push(out);
        }
        values
    }

    /// The values that change if some are replaced by `others`: what depends on those is evaluated again.
    pub fn with(&self, values: &[Vec<f64>], others: HashMap<Value, Vec<f64>>) -> HashMap<Value, Vec<f64>> {
        let mut changed = others;
        for v in self.body.values() {
            let node = &self.body[v];
            if changed.contains_key(&v) || !node.args.iter().any(|a| changed.contains_key(a)) {
                continue;
            }
            let args: Vec<&[f64]> = node.args.iter().map(|a| changed.get(a).map_or(values[a.index()].as_slice(), Vec::as_slice)).collect();
            let out = self.node(v, &args);
            changed.insert(v, out);
        }
        changed
    }

    /// One value, computed from those of its operands.
    pub fn node(&self, v: Value, args: &[&[f64]]) -> Vec<f64> {
        let node = &self.body[v];
        let env = &mut Sources { small: self };
        match &node.op {
            Op::Iota(d) => self.indices[d.0 as usize].iter().map(|i| *i as f64).collect(),
            Op::Uniform { key } => self.uniform(*key, &node.ty.dims),
            Op::Gather { dim } | Op::Scatter { dim } | Op::Dispatch(Routing { experts: dim, .. }) | Op::Combine(Routing { experts: dim, .. }) => {
                let rows: Vec<f64> = args[1].iter().map(|i| self.row(*dim, *i)).collect();
                eval::eval(&self.body, v, &[args[0], &rows], env)
            }
            Op::ArgMax { over } => {
                eval::eval(&self.body, v, args, env).into_iter().map(|k| self.places[over.0 as usize][k as usize] as f64).collect()
            }
            Op::Select if self.draws == DrawMode::Mean => match chances(&self.body).of(node.args[0]) {
                Some(p) => {
                    let [yes, no] = [1, 2].map(|k| self.spread(node.args[k], args[k], &node.ty.dims));
                    yes.iter().zip(no).map(|(a, b)| p * a + (1.0 - p) * b).collect()
                }
                None => eval::eval(&self.body, v, args, env),
            },
            _ => eval::eval(&self.body, v, args, env),
        }
    }

    /// The row of a small table that holds an index, or minus one if it was not chosen.
    fn row(&self, d: Dim, index: f64) -> f64 {
        let places = &self.places[d.0 as usize];
        if index < 0.0 { -1.0 } else { places.binary_search(&(index as u64)).map_or(-1.0, |k| k as f64) }
    }

    /// A value along more dims, in their order.
    pub fn spread(&self, v: Value, data: &[f64], dims: &[Dim]) -> Vec<f64> {
        spread(&self.body, self.body.dims_of(v), data, dims)
    }

    fn uniform(&self, key: u64, dims: &[Dim]) -> Vec<f64> {
        let stream = random::stream(key, self.sample.scalar(&Scalar::Seed) as u64, self.sample.scalar(&Scalar::Step) as u64);
        self.elements(dims, dims, |d| self.graph.body.dims[d].logical).into_iter().map(|i| random::uniform(stream, i)).collect()
    }

    /// The number of each chosen element within the whole tensor, by the model's indices and row-major in the order
    /// of `numbered`.
    fn elements(&self, dims: &[Dim], numbered: &[Dim], size: impl Fn(Dim) -> u64) -> Vec<u64> {
        let mut out = vec![0u64];
        for d in dims {
            let inside = numbered.iter().rev().take_while(|e| *e != d);
            let step = inside.fold(1u64, |n, e| n.wrapping_mul(size(*e)));
            out = out.iter().flat_map(|x| self.indices[d.0 as usize].iter().map(move |i| x.wrapping_add(i.wrapping_mul(step)))).collect();
        }
        out
    }

    /// For each chosen element of a tensor, whether it is outside of the padding.
    pub fn counts(&self, dims: &[Dim]) -> Vec<bool> {
        let mut out = vec![true];
        for d in dims {
            let logical = self.graph.body.dims[*d].logical;
            out = out.iter().flat_map(|x| self.indices[d.0 as usize].iter().map(move |i| *x && *i < logical)).collect();
        }
        out
    }

    /// The elements of a tensor that is filled from outside: a number for each, and zero in the padding.
    pub fn fill(&self, dims: &[Dim], numbered: &[Dim], of: impl Fn(u64) -> f64) -> Vec<f64> {
        let all = self.elements(dims, numbered, |d| self.graph.body.dims[d].logical);
        self.counts(dims).into_iter().zip(all).map(|(counts, i)| if counts { of(i) } else { 0.0 }).collect()
    }

    /// The elements outside of the padding, in the order `dims` and by the model's indices, so that two graphs
    /// compare.
    pub fn counted(&self, v: Value, data: &[f64], dims: &[Dim]) -> Vec<f64> {
        let own = self.body.dims.strides(self.body.dims_of(v));
        let mut at = vec![0usize];
        for d in dims {
            let step = self.body.dims_of(v).iter().position(|e| e == d).map_or(0, |k| own[k]) as usize;
            let (indices, logical) = (&self.indices[d.0 as usize], self.graph.body.dims[*d].logical);
            let mut order: Vec<usize> = (0..indices.len()).filter(|k| indices[*k] < logical).collect();
            order.sort_by_key(|k| indices[*k]);
            at = at.iter().flat_map(|x| order.iter().map(move |k| x + k * step)).collect();
        }
        at.into_iter().map(|i| data[i]).collect()
    }

    /// An element of the padding that is not zero, if there is one.
    pub fn dirty(&self, v: Value, data: &[f64]) -> Option<f64> {
        self.counts(self.body.dims_of(v)).into_iter().zip(data).find(|(counts, x)| !counts && **x != 0.0).map(|(_, x)| *x)
    }

    fn table(&self, t: u32) -> Vec<f64> {
        let table = &self.graph.tables[t as usize];
        let dims = &self.graph.body.dims;
        let padded = dims.elements(&table.ty.dims) == table.data.len() as u64;
        let all = self.elements(&table.ty.dims, &table.ty.dims, |d| if padded { dims.size(d) } else { dims[d].logical });
        let counts = self.counts(&table.ty.dims);
        all.into_iter()
            .zip(counts)
            .map(|(i, counts)| if padded || counts { table.data.get(i as usize).copied().unwrap_or(f64::NAN) } else { 0.0 })
            .collect()
    }

    /// How many values there are of each kind, to bound what an evaluation takes.
    pub fn work(&self) -> u64 {
        let of = |v: Value| {
            let node = &self.body[v];
            let most = node.args.iter().map(|a| self.body.elements(*a)).max().unwrap_or(0).max(self.body.elements(v));
            most.saturating_mul(node.op.over().iter().map(|d| self.chosen.count(*d)).product::<u64>().max(1))
        };
        self.body.values().fold(0, |sum, v| sum.saturating_add(of(v)))
    }
}

/// The draws of a graph, in which no input is a draw.
fn chances(body: &Body) -> DrawAnalysis<'_> {
    DrawAnalysis { body, input: &|_| false }
}

/// The programs of attention, with each choice by a draw at its mean.
fn programs_at_mean(body: &Body) -> Vec<(Value, Scoring)> {
    let of = |v: Value| match &body[v].op {
        Op::Attention(a) if a.scoring.weight.is_some() => {
            let further = a.further(&body[v].args);
            let drawn = |n: u32| n.checked_sub(1).is_some_and(|n| chances(body).is_drawn(further[n as usize]));
            Some((v, chance::at_mean(&a.scoring, &drawn)))
        }
        _ => None,
    };
    body.values().filter_map(of).collect()
}

/// A value along more dims, in their order.
pub fn spread(body: &Body, from: &[Dim], data: &[f64], to: &[Dim]) -> Vec<f64> {
    let own = body.dims.strides(from);
    let mut at = vec![0u64];
    for d in to {
        let step = from.iter().position(|e| e == d).map_or(0, |k| own[k]);
        at = at.iter().flat_map(|x| (0..body.dims.size(*d)).map(move |i| x + i * step)).collect();
    }
    at.into_iter().map(|i| data[i as usize]).collect()
}

/// For each value, whether it becomes a table: it follows from constants and indices alone, element by element, and
/// takes a function or a product to compute, or it is computed from such a value. A constant that is repeated is
/// none.
fn tabled(body: &Body) -> Vec<bool> {
    let (mut fixed, mut heavy) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    for v in body.values() {
        let node = &body[v];
        let all = |of: &[bool]| node.args.iter().all(|a| of[a.index()]);
        fixed[v.index()] = matches!(node.op, Op::Const(_) | Op::Iota(_)) || !node.op.is_source() && !node.op.is_combining() && all(&fixed);
        let costly = match &node.op {
            Op::Unary(u) => matches!(u, Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Erf),
            Op::Binary(Binary::Pow) | Op::Dot { .. } => true,
            _ => false,
        };
        heavy[v.index()] = fixed[v.index()] && (costly || node.args.iter().any(|a| heavy[a.index()]));
    }
    for v in body.values().rev().filter(|v| fixed[v.index()]).collect::<Vec<_>>() {
        if heavy[v.index()] {
            body[v].args.iter().for_each(|a| heavy[a.index()] = true);
        }
    }
    heavy
}

/// The values of the sources of a small graph.
struct Sources<'s, 'a> {
    small: &'s SmallGraph<'a>,
}

impl Env for Sources<'_, '_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        let (small, graph) = (self.small, self.small.graph);
        let sample = small.sample;
        match op {
            Op::Table(t) => small.table(*t),
            Op::Param(p) => {
                let param = &graph.params[*p as usize];
                small.fill(&ty.dims, &param.ty.dims, sample.param(param))
            }
            Op::State(p, slot) => {
                let param = &graph.params[*p as usize];
                small.fill(&ty.dims, &param.ty.dims, sample.state(param, *slot))
            }
            Op::Input(k) => {
                let input = &graph.inputs[*k as usize];
                small.fill(&ty.dims, &input.ty.dims, sample.input(input))
            }
            _ => vec![f64::NAN; small.body.dims.elements(&ty.dims) as usize],
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        self.small.sample.scalar(scalar)
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}
