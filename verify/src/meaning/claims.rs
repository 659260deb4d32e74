//! What a graph claims of a step, and what of an evaluation: reports, the gradient, and that nothing but drops
//! tells the one from the other.

use super::sample::Sample;
use super::small::SmallGraph;
use super::{tangent, updates};
use crate::violation::{Location, fail};
use crate::{Invariant, LocationPart, Violation};
use ir::graph::{Graph, Report, Value};
use ir::model::Train;
use ir::op::{Op, Scalar};
use std::collections::{BTreeMap, HashMap};

/// The greatest relative difference between numbers that are computed in another order.
const PRECISION: f64 = 1e-7;

/// The greatest absolute value that rounding leaves of sums that cancel, for numbers about 1: for instance of a
/// normalised row's gradient along itself.
const ZERO: f64 = 1e-10;

/// Why a module was not looked at, if it was not.
pub type Unproved = Option<String>;

/// `: log in line 12 makes the first of finite numbers`, of the values that are not finite. What a mask puts out of
/// reach is infinite on purpose.
fn first_not_finite(graph: &Graph, values: &Values) -> String {
    let body = &graph.body;
    let is_finite = |v: Value| values.get(v.index()).is_none_or(|all| all.iter().all(|x| x.is_finite()));
    let makes = |v: &Value| !body[*v].args.is_empty() && !is_finite(*v) && body[*v].args.iter().all(|a| is_finite(*a));
    body.values().find(makes).map_or(String::new(), |v| {
        let line = body[v].origin.span.map_or(String::new(), |s| format!(" in line {}", s.line));
        format!(": {}{line} makes the first of finite numbers", body[v].op.name())
    })
}

/// All values of a graph.
pub type Values = Vec<Vec<f64>>;

/// A graph beside that of its text, on the same sample.
pub struct GraphComparison<'s, 'a> {
    pub train: &'s Train,
    pub model: &'s SmallGraph<'a>,
    pub graph: &'s SmallGraph<'a>,
    pub sample: &'s Sample,
    /// Whether all passes over logical graphs are done: nothing may be missing.
    pub whole: bool,
}

impl GraphComparison<'_, '_> {
    /// Checks V151 to V155 of a step. Returns the values of the text's graph, and why they show nothing, if that is
    /// so.
    pub fn training(&self) -> Result<(Values, Unproved), Violation> {
        let within = |e: Violation| e.within(LocationPart::Training);
        let model = self.model.run();
        if terms(self.model.graph).iter().any(|t| !model[t.value.index()][0].is_finite()) {
            let why = format!("the loss of random weights is not a number{}", first_not_finite(self.model.graph, &model));
            return Ok((model, Some(why)));
        }
        let values = self.graph.run();
        self.reports(&model, &values).map_err(within)?;
        let (text, graph) = (self.model.graph, self.graph.graph);
        if let Some(loss) = graph.loss
            && (self.whole || !graph.grads.is_empty())
        {
            if let Some(why) = self.gradient(&model, &values, loss).map_err(within)? {
                return Ok((model, Some(why)));
            }
        } else if self.whole && !text.losses.is_empty() {
            return fail(Invariant::SameValues, Location::from(LocationPart::Training), "the loss of the text is gone");
        }
        if self.whole || graph.grad_norm.is_some() {
            updates::verify(self, &model, &values).map_err(within)?;
        }
        Ok((model, None))
    }

    /// Checks V151 of an evaluation, and that it changes nothing.
    pub fn evaluation(&self) -> Result<Values, Violation> {
        let within = |e: Violation| e.within(LocationPart::Evaluation);
        let model = self.model.run();
        self.reports(&model, &self.graph.run()).map_err(within)?;
        match self.graph.graph.updates.first() {
            Some(u) if self.whole => fail(Invariant::Renewed, u.new, "an evaluation changes parameters").map_err(within),
            _ => Ok(model),
        }
    }

    /// Checks that all reports have the values that the text gives them.
    fn reports(&self, model: &Values, values: &Values) -> Result<(), Violation> {
        let (text, graph) = (self.model.graph, self.graph.graph);
        let total: f64 = terms(text).iter().map(|t| model[t.value.index()][0]).sum();
        let size: f64 = terms(text).iter().map(|t| model[t.value.index()][0].abs()).sum();
        let mut named: BTreeMap<&str, f64> = BTreeMap::new();
        for t in terms(text) {
            *named.entry(&t.name).or_default() += model[t.value.index()][0];
        }
        // Once the graph has a whole loss, terms without a name of their own are reported only as part of it.
        if let Some(loss) = graph.loss {
            named.remove("loss");
            let found = values[loss.index()][0];
            if !alike(found, total, size) {
                return fail(Invariant::SameValues, loss, format!("the loss is {found:.9}; the text's is {total:.9}"));
            }
        }
        let mut found: BTreeMap<&str, f64> = BTreeMap::new();
        for t in &graph.losses {
            *found.entry(&t.name).or_default() += values[t.value.index()][0];
        }
        same_names("losses", found.keys().copied(), named.keys().copied())?;
        for (name, want) in &named {
            if !alike(found[name], *want, size) {
                let v = graph.losses.iter().find(|t| t.name == *name).map_or(Value(0), |t| t.value);
                return fail(Invariant::SameValues, v, format!("loss `{name}` is {:.9}; the text's is {want:.9}", found[name]));
            }
        }
        self.tensors("metric", &text.metrics, &graph.metrics, (model, values))?;
        // The outputs may be dropped all together, since no program writes them.
        if graph.outputs.is_empty() { Ok(()) } else { self.tensors("output", &text.outputs, &graph.outputs, (model, values)) }
    }

    fn tensors(&self, what: &str, want: &[Report], found: &[Report], (model, values): (&Values, &Values)) -> Result<(), Violation> {
        same_names(&format!("{what}s"), found.iter().map(|r| r.name.as_str()), want.iter().map(|r| r.name.as_str()))?;
        for (w, f) in want.iter().zip(found) {
            let dims = self.model.body.dims_of(w.value);
            let x = self.model.counted(w.value, &model[w.value.index()], dims);
            let y = self.graph.counted(f.value, &values[f.value.index()], dims);
            let size = x.iter().fold(0.0, |n: f64, x| n.max(x.abs()));
            if let Some((x, y)) = x.iter().zip(&y).find(|(x, y)| !alike(**x, **y, size)) {
                return fail(Invariant::SameValues, f.value, format!("{what} `{}` is {y:.9}; the text's is {x:.9}", f.name));
            }
        }
        Ok(())
    }

    /// Checks that `<gradient, direction>` is the derivative of the text's loss in the direction.
    fn gradient(&self, model: &Values, values: &Values, loss: Value) -> Result<Unproved, Violation> {
        let graph = self.graph.graph;
        if let Some((p, v)) = graph.grads.iter().find(|(p, _)| !graph.params[*p as usize].trains()) {
            return fail(Invariant::Gradient, *v, format!("`{}` does not train and has a gradient", graph.params[*p as usize].name));
        }
        let scale = if self.train.loss_scale.is_some() { self.sample.scalar(&Scalar::LossScale) } else { 1.0 };
        let mut along: HashMap<u32, f64> = HashMap::new();
        let mut size = 0.0;
        for (p, v) in &graph.grads {
            let param = &graph.params[*p as usize];
            let grad = self.graph.counted(*v, &values[v.index()], &param.ty.dims);
            let moves = self.model.fill(&param.ty.dims, &param.ty.dims, self.sample.direction(param));
            let terms = grad.iter().zip(&moves).map(|(g, d)| g * d / scale);
            size += terms.clone().map(f64::abs).sum::<f64>();
            *along.entry(*p).or_default() += terms.sum::<f64>();
        }
        let derivative = |only: Option<u32>| {
            let moves = tangent::run(self.model, model, |p, node| {
                let param = &self.model.graph.params[p as usize];
                let moves = param.trains() && only.is_none_or(|o| o == p);
                moves.then(|| self.model.fill(&node.ty.dims, &param.ty.dims, self.sample.direction(param)))
            });
            moves.map(|t| terms(self.model.graph).iter().filter_map(|r| t[r.value.index()].as_ref()).map(|t| t[0]).sum::<f64>())
        };
        let want = match derivative(None) {
            Ok(want) if !want.is_finite() => return Ok(Some("the derivative of the loss of random weights is not a number".into())),
            Ok(want) => want,
            Err(op) => return Ok(Some(format!("`{op}` has no forward derivative"))),
        };
        let found: f64 = along.values().sum();
        if alike(found, want, size) {
            return Ok(None);
        }
        // Parameters are checked one by one only after a mismatch, to find the wrong one.
        for (p, param) in graph.params.iter().enumerate().filter(|(_, p)| p.trains()) {
            let (want, found) = (derivative(Some(p as u32)).unwrap_or(0.0), along.get(&(p as u32)).copied().unwrap_or(0.0));
            if !alike(found, want, size.min(want.abs().max(found.abs()) * 16.0)) {
                let v = graph.grads.iter().find(|(q, _)| *q as usize == p).map_or(loss, |g| g.1);
                let found = format!("along a random direction the loss grows by {want:.9} with `{}`, and its gradient says {found:.9}", param.name);
                return fail(Invariant::Gradient, v, found);
            }
        }
        fail(Invariant::Gradient, loss, format!("along a random direction the loss grows by {want:.9}, and gradients say {found:.9}"))
    }
}

/// V157: the values of a step whose drops are at their mean are those of an evaluation.
pub fn without_drops(mean: &SmallGraph<'_>, drawn: &Values, evaluation: &SmallGraph<'_>, values: &Values) -> Result<(), Violation> {
    let draws = |g: &Graph| g.body.values().find(|v| matches!(g.body[*v].op, Op::Uniform { .. }));
    if let Some(v) = draws(evaluation.graph) {
        return fail(Invariant::EvaluatesStep, v, "an evaluation draws random numbers").map_err(|e| e.within(LocationPart::Evaluation));
    }
    let draws = |g: &Graph| draws(g).is_some();
    let own = draws(mean.graph).then(|| mean.run());
    let (step, found) = (own.as_ref().unwrap_or(drawn), values);
    let unlike = |what: String| fail(Invariant::EvaluatesStep, Location::from(LocationPart::Evaluation), what);
    for (kind, of_step, of_evaluation) in
        [("loss", terms(mean.graph), terms(evaluation.graph)), ("metric", mean.graph.metrics.as_slice(), evaluation.graph.metrics.as_slice())]
    {
        if of_step.iter().map(|r| &r.name).ne(of_evaluation.iter().map(|r| &r.name)) {
            return unlike(format!("{kind}s have other names than in the step"));
        }
        for (a, b) in of_step.iter().zip(of_evaluation) {
            let (x, y) = (&step[a.value.index()], &found[b.value.index()]);
            let size = x.iter().fold(0.0, |n: f64, x| n.max(x.abs()));
            if x.len() == 1 && !alike(x[0], y[0], size) {
                return unlike(format!("{kind} `{}` is {:.9}; that of the step, with drops at their mean, is {:.9}", a.name, y[0], x[0]));
            }
        }
    }
    Ok(())
}

/// The terms of the loss.
fn terms(g: &Graph) -> &[Report] {
    &g.losses
}

fn same_names<'n>(what: &str, found: impl Iterator<Item = &'n str>, want: impl Iterator<Item = &'n str>) -> Result<(), Violation> {
    let [found, want] = [found.collect::<Vec<_>>(), want.collect::<Vec<_>>()];
    if found == want {
        return Ok(());
    }
    let list = |names: &[&str]| if names.is_empty() { "none".to_string() } else { names.join(", ") };
    fail(Invariant::SameNames, Location::from(LocationPart::Graph), format!("{what}: {}; the text has {}", list(&found), list(&want)))
}

/// Whether two numbers of this size are equal up to rounding. NaN equals NaN.
pub fn near(x: f64, y: f64, size: f64) -> bool {
    let rounded = |x: f64, y: f64| x.is_finite() && y.is_finite() && (x - y).abs() <= PRECISION * size.max(x.abs()).max(y.abs());
    x == y || x.is_nan() && y.is_nan() || rounded(x, y)
}

/// Whether two results are equal up to rounding, also where both are what rounding leaves of a zero sum.
pub fn alike(x: f64, y: f64, size: f64) -> bool {
    near(x, y, size) || (x - y).abs() <= ZERO
}
