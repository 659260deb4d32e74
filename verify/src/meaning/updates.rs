//! What a step makes of its gradients: their norm, new parameters, new states.
//!
//! Gradients are replaced by random numbers of two kinds: even ones, so large that they are clipped, of which
//! each parameter has a part in the norm; and uneven ones, which are not clipped, down to where an optimizer's
//! epsilon counts.

use super::claims::{GraphComparison, Values, alike, near};
use super::muon::{self, Side};
use super::optimizer::{self, StepScalars};
use super::sample::Gradients;
use crate::violation::fail;
use crate::{Invariant, Violation};
use ir::graph::{Param, Phase, Update, Value};
use ir::model::Optimizer;
use ir::op::Scalar;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// V153 to V155.
pub fn verify(claims: &GraphComparison<'_, '_>, model: &Values, values: &Values) -> Result<(), Violation> {
    let (graph, text) = (claims.graph.graph, claims.model.graph);
    let trained: BTreeSet<u32> = graph.grads.iter().map(|g| g.0).collect();
    let stated: BTreeSet<u32> = text.updates.iter().map(|u| u.param).collect();
    let mut updated = BTreeSet::new();
    for u in &graph.updates {
        let name = &graph.params[u.param as usize].name;
        if !updated.insert(u.param) {
            return fail(Invariant::Renewed, u.new, format!("`{name}` is updated twice"));
        }
        if u.grad != graph.grads.iter().find(|g| g.0 == u.param).map(|g| g.1) {
            return fail(Invariant::Renewed, u.new, format!("`{name}` is updated by another gradient than its own"));
        }
    }
    let wanted: BTreeSet<u32> = trained.union(&stated).copied().collect();
    if let Some(p) = wanted.symmetric_difference(&updated).next() {
        let (name, has) = (&graph.params[*p as usize].name, if updated.contains(p) { "should not be" } else { "is not" });
        return fail(Invariant::Renewed, graph.loss.unwrap_or(Value(0)), format!("`{name}` {has} updated"));
    }
    for u in &graph.updates {
        clean(claims, u, |v| &values[v.index()])?;
        if u.grad.is_none() {
            state(claims, u, model, values)?;
        }
    }
    if trained.is_empty() {
        return Ok(());
    }
    for kind in [Gradients::Even, Gradients::Uneven] {
        GivenStep::new(claims, values, kind).verify()?;
    }
    Ok(())
}

/// Checks that the padding of what lives over steps stays zero.
fn clean<'v>(claims: &GraphComparison<'_, '_>, u: &Update, value: impl Fn(Value) -> &'v Vec<f64>) -> Result<(), Violation> {
    for v in std::iter::once(&u.new).chain(&u.states) {
        if let Some(x) = claims.graph.dirty(*v, value(*v)) {
            let name = &claims.graph.graph.params[u.param as usize].name;
            return fail(Invariant::CleanPadding, *v, format!("the padding of `{name}` or of its states holds {x}"));
        }
    }
    Ok(())
}

/// Checks that a state is renewed as the text says.
fn state(claims: &GraphComparison<'_, '_>, u: &Update, model: &Values, values: &Values) -> Result<(), Violation> {
    let param = &claims.graph.graph.params[u.param as usize];
    let want = claims.model.graph.updates.iter().find(|w| w.param == u.param).expect("invariant: wanted ones are updated");
    let x = claims.model.counted(want.new, &model[want.new.index()], &param.ty.dims);
    let y = claims.graph.counted(u.new, &values[u.new.index()], &param.ty.dims);
    let size = x.iter().fold(0.0, |n: f64, x| n.max(x.abs()));
    match x.iter().zip(&y).find(|(x, y)| !alike(**x, **y, size)) {
        Some((x, y)) => fail(Invariant::Renewed, u.new, format!("state `{}` becomes {y:.9}; by the text {x:.9}", param.name)),
        None => Ok(()),
    }
}

/// A step whose gradients are given.
struct GivenStep<'r, 's, 'a> {
    claims: &'r GraphComparison<'s, 'a>,
    values: &'r Values,
    /// The values of the step that the given gradients change.
    changed: HashMap<Value, Vec<f64>>,
    scale: f64,
}

impl<'r, 's, 'a> GivenStep<'r, 's, 'a> {
    fn new(claims: &'r GraphComparison<'s, 'a>, values: &'r Values, kind: Gradients) -> GivenStep<'r, 's, 'a> {
        let small = claims.graph;
        let scale = if claims.train.loss_scale.is_some() { claims.sample.scalar(&Scalar::LossScale) } else { 1.0 };
        let mut given: BTreeMap<Value, Vec<f64>> = BTreeMap::new();
        for (p, v) in &small.graph.grads {
            let (param, node) = (&small.graph.params[*p as usize], &small.body[*v]);
            // A value of the forward pass has other users than the gradient, so it is not replaced.
            if node.origin.phase != Phase::Forward && !node.op.is_source() {
                given.entry(*v).or_insert_with(|| small.fill(&node.ty.dims, &param.ty.dims, claims.sample.gradient(param, kind)));
            }
        }
        let round = GivenStep { claims, values, changed: given.clone().into_iter().collect(), scale };
        // Even gradients are longer than the norm that clips, and uneven ones are shorter.
        let norm = round.norm();
        let part = match kind {
            Gradients::Even => 3.0,
            Gradients::Uneven => 0.5,
        };
        let by = claims.train.clip.map_or(1.0, |clip| part * clip.0 / norm.max(1e-30));
        given.values_mut().flatten().for_each(|x| *x *= by);
        let changed = small.with(values, given.into_iter().collect());
        GivenStep { changed, ..round }
    }

    fn value(&self, v: Value) -> &Vec<f64> {
        self.changed.get(&v).unwrap_or(&self.values[v.index()])
    }

    /// A tensor of a parameter's shape, by the model's indices.
    fn tensor(&self, param: &Param, v: Value) -> Vec<f64> {
        self.claims.graph.counted(v, self.value(v), &param.ty.dims)
    }

    /// The norm of all gradients, each parameter's once.
    fn norm(&self) -> f64 {
        let graph = self.claims.graph.graph;
        let all = graph.grads.iter().flat_map(|(p, v)| self.tensor(&graph.params[*p as usize], *v));
        optimizer::norm(all, self.scale)
    }

    fn verify(&self) -> Result<(), Violation> {
        let GraphComparison { train, graph: small, model, sample, .. } = self.claims;
        let graph = small.graph;
        let norm = self.norm();
        let Some(v) = graph.grad_norm else {
            return fail(Invariant::Norm, graph.loss.unwrap_or(Value(0)), "a step has no norm of its gradients");
        };
        let found = self.value(v)[0];
        if !near(found, norm, norm) {
            return fail(Invariant::Norm, v, format!("the norm of gradients is {found:.9}; by the formula {norm:.9}"));
        }
        let factor = optimizer::factor(train.clip.map(|c| c.0), norm, self.scale);
        let step = StepScalars { rate: sample.scalar(&Scalar::LearningRate), number: sample.scalar(&Scalar::Step), factor };
        for u in &graph.updates {
            let Some(grad) = u.grad else { continue };
            let param = &graph.params[u.param as usize];
            let sides = if let Optimizer::Muon { .. } = train.optimizer { muon::sides(model.graph, u.param) } else { None };
            if u.states.len() != optimizer::states(train, sides.is_some()) {
                return fail(Invariant::Renewed, u.new, format!("`{}` has {} states", param.name, u.states.len()));
            }
            clean(self.claims, u, |v| self.value(v))?;
            let dims = &param.ty.dims;
            let [p, g] = [model.fill(dims, dims, sample.param(param)), self.tensor(param, grad)];
            let old: Vec<Vec<f64>> = (0..u.states.len() as u32).map(|k| model.fill(dims, dims, sample.state(param, k))).collect();
            let new: Vec<Vec<f64>> = std::iter::once(&u.new).chain(&u.states).map(|v| self.tensor(param, *v)).collect();
            let wanted = match sides {
                Some(sides) => self.matrix(param, &sides, &step, [&p, &g, &old[0]]),
                None => {
                    let of = |i: usize| {
                        let states: Vec<f64> = old.iter().map(|s| s[i]).collect();
                        let (want, states) = optimizer::update(train, &step, param, p[i], g[i], &states);
                        std::iter::once(want).chain(states).collect()
                    };
                    (0..p.len()).map(of).collect::<Vec<Vec<f64>>>()
                }
            };
            for (i, wanted) in wanted.into_iter().enumerate() {
                for (k, want) in wanted.into_iter().enumerate() {
                    let size = if k == 0 { p[i].abs() } else { old[k - 1][i].abs() };
                    if !near(new[k][i], want, size) {
                        let what = if k == 0 { "".to_string() } else { format!("state {} of ", k - 1) };
                        let found = format!("{what}`{}` becomes {:.12}; by the formula {want:.12}", param.name, new[k][i]);
                        return fail(Invariant::Renewed, if k == 0 { u.new } else { u.states[k - 1] }, found);
                    }
                }
            }
        }
        Ok(())
    }

    /// The new value of each element of a hidden matrix and of its momentum.
    fn matrix(&self, param: &Param, sides: &[Side], step: &StepScalars, tensors: [&[f64]; 3]) -> Vec<Vec<f64>> {
        let GraphComparison { train, model, .. } = self.claims;
        let Optimizer::Muon { muon, .. } = &train.optimizer else { unreachable!("invariant: only Muon knows matrices") };
        let dims = || param.ty.dims.iter();
        let looked_at: Vec<usize> = dims().map(|d| model.body.dims.size(*d) as usize).collect();
        let sizes: Vec<u64> = dims().map(|d| model.graph.body.dims.size(*d)).collect();
        let tensor = muon::MuonTensor { param, sides, looked_at: &looked_at, sizes: &sizes };
        let (new, momentum) = tensor.update(train, muon, step, tensors);
        new.into_iter().zip(momentum).map(|(p, m)| vec![p, m]).collect()
    }
}
