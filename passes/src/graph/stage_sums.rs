//! Sums whose terms are made on several pipeline stages: each stage adds its own terms, and one value goes on.
//!
//! So what layers capture (an encoder's output in a decoder) has one gradient on its way back, whatever the number of layers, and what layers
//! leave for the end of the model is one sum on its way up. What leads to gradients of parameters alone (through a function of parameters, say a
//! bias by distance that layers share) does not go on at all, since it is linear: each stage takes its own terms to the gradient, whose
//! sum over stages is taken once per step. Where weight gradients have passes of their own, each virtual stage does: these passes are in no order.

use crate::graph::simplify;
use crate::pipeline::stages;
use ir::algebra::algebra;
use ir::graph::{Body, Graph, Node, Origin, Phase, Type, Value};
use ir::op::Op;
use ir::pipeline::{Layout, WeightGradients};
use std::collections::{BTreeMap, HashMap};

/// Splits the sums of the forward and backward pass by stage. The values are the same but for the order of sums.
pub fn sum_by_stage(mut graph: Graph, layout: &Layout, weights: WeightGradients) -> Graph {
    if layout.virtual_stages() == 1 {
        return graph;
    }
    let old = std::mem::take(&mut graph.body);
    let stage = stages::assign(&old, layout);
    let ends = leads_to_gradients(&old, &stage);
    let out = Body { dims: old.dims.clone(), nodes: vec![] };
    let mut splitting = SumSplitter { old: &old, layout, weights, stage, ends, out, map: vec![], parts: HashMap::new() };
    for v in old.values() {
        let w = splitting.split(v);
        splitting.map.push(w);
    }
    let SumSplitter { out, map, .. } = splitting;
    graph.body = out;
    graph.map_roots(|v| map[v.index()]);
    simplify::clean(graph)
}

/// For each value of the backward pass, whether it leads to gradients of parameters alone, without a forward value that has a stage, or what follows from one:
/// any stage can take its own terms there. So what is no sum has one operand at most that has a stage: the gradient.
fn leads_to_gradients(body: &Body, stage: &[Option<u32>]) -> Vec<bool> {
    let users = body.users();
    let mut leads = vec![false; body.nodes.len()];
    for v in body.values().rev().filter(|v| body[*v].origin.phase == Phase::Backward) {
        let node = &body[v];
        let later = |c: &Value| body[*c].origin.phase == Phase::Update;
        let of = &users[v.index()];
        let mut staged = node.args.iter().filter(|a| stage[a.index()].is_some());
        let needs_none = staged.clone().all(|a| body[*a].origin.phase == Phase::Backward) && (node.op == Op::Add || staged.nth(1).is_none());
        let anywhere = node.origin.layer.is_none() || of.iter().all(|(c, _)| later(c));
        leads[v.index()] = needs_none && anywhere && of.iter().all(|(c, _)| later(c) || leads[c.index()]);
    }
    leads
}

struct SumSplitter<'a> {
    old: &'a Body,
    layout: &'a Layout,
    weights: WeightGradients,
    stage: Vec<Option<u32>>,
    /// Values that lead to gradients of parameters alone.
    ends: Vec<bool>,
    out: Body,
    /// For each old value, the new one.
    map: Vec<Value>,
    /// Old values that are sums of one term for each of these stages or virtual stages.
    parts: HashMap<Value, BTreeMap<u32, Value>>,
}

impl SumSplitter<'_> {
    fn split(&mut self, v: Value) -> Value {
        let node = &self.old[v];
        let sums = node.op == Op::Add && self.stage[v.index()].is_some();
        let parts = match (sums, self.ends[v.index()]) {
            (true, true) => self.terms(v),
            (true, false) => return self.chain(v),
            (false, true) => self.images(v),
            (false, false) => None,
        };
        let Some(parts) = parts else {
            let args = node.args.iter().map(|a| self.map[a.index()]).collect();
            return self.push(Node { args, ..node.clone() });
        };
        let args = parts.values().copied().collect();
        self.parts.insert(v, parts);
        self.push(Node { op: Op::Add, args, ..node.clone() })
    }

    /// The terms of a sum, if several stages have some.
    fn terms(&mut self, v: Value) -> Option<BTreeMap<u32, Value>> {
        let place = |g: u32| match self.weights {
            WeightGradients::InBackward => self.layout.stage(g),
            WeightGradients::Apart => g,
        };
        let mut terms: BTreeMap<u32, Vec<Value>> = BTreeMap::new();
        let mut loose = vec![];
        for a in &self.old[v].args {
            match (self.parts.get(a), self.stage[a.index()]) {
                (Some(parts), _) => parts.iter().for_each(|(s, w)| terms.entry(*s).or_default().push(*w)),
                (None, Some(g)) => terms.entry(place(g)).or_default().push(self.map[a.index()]),
                (None, None) => loose.push(self.map[a.index()]),
            }
        }
        if terms.len() < 2 {
            return None;
        }
        terms.values_mut().next()?.extend(loose);
        let ty = &self.old[v].ty;
        let sum = |(stage, terms): (u32, Vec<Value>)| {
            let sum = self.add(terms, v);
            let whole = self.out[sum].ty.dims.len() == ty.dims.len();
            let expand = Node { op: Op::Expand, args: vec![sum], ty: ty.clone(), origin: self.between(v) };
            (stage, if whole { sum } else { self.push(expand) })
        };
        Some(terms.into_iter().map(sum).collect())
    }

    /// The op applied to each term of its one operand that has terms, if the op is linear in it.
    fn images(&mut self, v: Value) -> Option<BTreeMap<u32, Value>> {
        let node = &self.old[v];
        let mut split = (0..node.args.len()).filter(|k| self.parts.contains_key(&node.args[*k]));
        let (slot, None) = (split.next()?, split.next()) else { return None };
        if !algebra(self.old, v).linear.contains(&slot) {
            return None;
        }
        let parts = self.parts[&node.args[slot]].clone();
        let image = |(stage, term): (u32, Value)| {
            let args = (0..node.args.len())
                .map(|k| {
                    if k == slot {
                        ir::fault!("stage_sums.images.whole", self.map[node.args[k].index()], term)
                    } else {
                        self.map[node.args[k].index()]
                    }
                })
                .collect();
            (stage, self.push(Node { args, ..node.clone() }))
        };
        Some(parts.into_iter().map(image).collect())
    }

    /// A sum on one stage. The terms of other stages come as one value, to which each stage on the way adds its own.
    fn chain(&mut self, v: Value) -> Value {
        let node = &self.old[v];
        let forward = node.origin.phase == Phase::Forward;
        let home = self.stage[v.index()].map(|g| self.layout.stage(g));
        // `others` holds, per stage, the terms and the last of its virtual stages with a term, in the order of the
        // pass.
        let mut others: BTreeMap<u32, (u32, Vec<Value>)> = BTreeMap::new();
        let mut own = vec![];
        for a in &node.args {
            let w = self.map[a.index()];
            match self.stage[a.index()].filter(|g| Some(self.layout.stage(*g)) != home && self.old[*a].origin.phase == node.origin.phase) {
                Some(g) => {
                    let (last, terms) = others.entry(self.layout.stage(g)).or_insert((g, vec![]));
                    *last = if forward { g.max(*last) } else { g.min(*last) };
                    terms.push(w);
                }
                None => own.push(w),
            }
        }
        let mut others: Vec<(u32, Vec<Value>)> = others.into_values().collect();
        others.sort_by_key(|(g, _)| if ir::fault!("stage_sums.chain.order", !forward, forward) { i64::from(*g) } else { -i64::from(*g) });
        let mut sum = vec![];
        for (_, terms) in others {
            sum.extend(terms);
            sum = vec![self.add(sum, v)];
        }
        sum.extend(ir::fault!("stage_sums.chain.own", vec![], own));
        match sum.as_slice() {
            [one] if node.args.len() > 1 => *one,
            _ => self.push(Node { args: sum, ..node.clone() }),
        }
    }

    /// The sum of some terms of `v`; for a single term, the term itself.
    fn add(&mut self, terms: Vec<Value>, v: Value) -> Value {
        if let [one] = terms.as_slice() {
            return *one;
        }
        let ty = &self.old[v].ty;
        let has = |d: &ir::dim::Dim| terms.iter().any(|t| self.out[*t].ty.has(*d));
        let ty = Type::new(ty.dtype, ty.dims.iter().copied().filter(has).collect::<Vec<_>>());
        self.push(Node { op: Op::Add, args: terms, ty, origin: self.between(v) })
    }

    /// The origin of a part of `v`, which belongs to no layer.
    fn between(&self, v: Value) -> Origin {
        Origin { layer: None, within: None, ..self.old[v].origin.clone() }
    }

    fn push(&mut self, node: Node) -> Value {
        self.out.nodes.push(node);
        Value(self.out.nodes.len() as u32 - 1)
    }
}
