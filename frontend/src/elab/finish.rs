//! The finished model: what nothing depends on is dropped, the rest is numbered anew.

use super::experts::separate_routers;
use super::sections::Sections;
use super::value::Val;
use super::{Elab, Elaborated};
use crate::ast::Ident;
use ir::algebra::{Algebra, algebra};
use ir::diag::{Diagnostic, Severity};
use ir::graph::{Body, Graph, InputDefault, Phase, Value};
use ir::model::Model;
use ir::op::{Op, Reduce};
use ir::pattern;

impl Elab<'_> {
    pub fn finish(
        mut self,
        name: Option<&Ident>,
        batch: Option<Val>,
        settings: Vec<(String, String)>,
        sections: Sections,
    ) -> Result<Elaborated, Vec<Diagnostic>> {
        let failed = self.diagnostics.iter().any(|d| d.severity == Severity::Error);
        if let (false, true, true, Some(name)) = (failed, self.losses.is_empty(), self.outputs.is_empty(), name) {
            let e = Diagnostic::error("E0506", format!("model `{}` computes nothing", name.name)).label(name.span, "no loss, no output");
            self.report(e.help("end it with `loss token_loss(logits, targets, over: vocab);` or `output logits;`"));
        }
        if self.diagnostics.iter().any(|d| d.severity == Severity::Error) {
            self.diagnostics.retain(|d| d.severity == Severity::Error);
            self.diagnostics.sort_by_key(|d| d.labels.first().map(|l| (l.span.file, l.span.line, l.span.col)));
            return Err(self.diagnostics);
        }
        let batch = match batch {
            Some(Val::Dim(d)) => self.dims[d.0].ir,
            _ => None,
        };
        let mut graph = Graph {
            name: name.map_or(String::new(), |n| n.name.to_string()),
            body: self.body,
            params: self.params,
            inputs: self.inputs,
            batch: ir::fault!("elaborate.outputs.batch", None, batch),
            layers: self.layers,
            losses: self.losses,
            metrics: self.metrics,
            outputs: self.outputs,
            updates: self.updates,
            ..Graph::default()
        };
        drop_unused(&mut graph);
        self.diagnostics.extend(drop_unread(&mut graph));
        drop_unused(&mut graph);
        separate_routers(&mut graph);
        postpone(&mut graph);
        for (pattern, group) in &sections.groups {
            for param in graph.params.iter_mut().filter(|p| pattern::matches(pattern, &p.name)) {
                param.lr_scale = ir::fault!("elaborate.group.rate", param.lr_scale, group.lr_scale.unwrap_or(param.lr_scale));
                param.frozen = ir::fault!("elaborate.group.frozen", false, group.frozen.unwrap_or(param.frozen));
                param.decay = group.decay.unwrap_or(param.decay);
                param.adam = group.muon.map_or(param.adam, |muon| !muon);
            }
        }
        let model =
            Model { graph, settings, asks_training: self.asks_training, train: sections.train, plan: sections.plan, weights: sections.weights };
        Ok(Elaborated { model, warnings: self.diagnostics })
    }
}

/// Moves what only updates of states need to the end of the step, and what only metrics that no microbatch
/// knows, from where it no longer tells one element of the batch from another: there the sums over all
/// microbatches are complete.
fn postpone(graph: &mut Graph) {
    let body = &graph.body;
    let of_batch = |v: Value| body.dims_of(v).iter().any(|d| Some(body.dims.original(*d)) == graph.batch);
    let late = late(body, &of_batch);
    let mut early = vec![false; body.nodes.len()];
    for r in graph.losses.iter().chain(graph.metrics.iter().filter(|m| !late[m.value.index()])).chain(&graph.outputs) {
        early[r.value.index()] = true;
    }
    for v in body.values().rev() {
        let node = &body[v];
        early[v.index()] |= of_batch(v) || node.args.iter().any(|a| of_batch(*a)) || node.op.is_source();
        if early[v.index()] {
            node.args.iter().for_each(|a| early[a.index()] = true);
        }
    }
    for (node, early) in graph.body.nodes.iter_mut().zip(early) {
        if ir::fault!("elaborate.postpone.never", false, !early) {
            node.origin.phase = Phase::Update;
        }
    }
}

/// For each value, whether it is known only after all microbatches: it follows from a sum over the batch in another
/// way than a sum does, as the exponential of a loss, or from a maximum over it. What follows from no parameter is
/// known before the first one.
fn late(body: &Body, of_batch: &dyn Fn(Value) -> bool) -> Vec<bool> {
    let (mut params, mut late) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    let mut sums: Vec<Option<Reduce>> = vec![None; body.nodes.len()];
    for v in body.values() {
        let node = &body[v];
        params[v.index()] = matches!(node.op, Op::Param(_)) || node.args.iter().any(|a| params[a.index()]);
        if of_batch(v) || !params[v.index()] {
            continue;
        }
        if node.args.iter().any(|a| of_batch(*a)) {
            sums[v.index()] = Some(if let Op::Reduce { kind, .. } = node.op { kind } else { Reduce::Sum });
            continue;
        }
        let of: Vec<usize> = (0..node.args.len()).filter(|k| sums[node.args[*k].index()].is_some()).collect();
        let (Some(first), Algebra { linear, joint, .. }) = (of.first(), algebra(body, v)) else { continue };
        let summed = of.iter().all(|k| sums[node.args[*k].index()] == Some(Reduce::Sum));
        let is_sum = summed && (joint && of.len() == node.args.len() || of.len() == 1 && linear.contains(first));
        late[v.index()] = !is_sum || node.args.iter().any(|a| late[a.index()]);
        sums[v.index()] = Some(Reduce::Sum);
    }
    late
}

/// Removes updates of states that nothing reads, not even they themselves: a checkpoint alone would have them.
fn drop_unread(graph: &mut Graph) -> Vec<Diagnostic> {
    let Graph { body, updates, params, .. } = graph;
    let mut out = vec![];
    updates.retain(|u| {
        let read = body.nodes.iter().any(|n| n.op == Op::Param(u.param));
        if !read {
            let param = &params[u.param as usize];
            let e = Diagnostic::warning("W0403", format!("state `{}` is updated, but nothing reads it", param.name));
            out.push(match param.span {
                Some(span) => e.label(span, "keeps its first value"),
                None => e,
            });
        }
        read
    });
    out
}

/// Removes nodes that no loss, metric, output or update depends on, and inputs that are neither used nor read by a
/// used one. Parameters stay, used or not: a checkpoint has them.
fn drop_unused(graph: &mut Graph) {
    let mut live = vec![false; graph.body.nodes.len()];
    let mut stack = graph.roots();
    while let Some(v) = stack.pop() {
        if !std::mem::replace(&mut live[v.index()], true) {
            stack.extend(&graph.body[v].args);
        }
    }
    let mut read = vec![false; graph.inputs.len()];
    for (node, live) in graph.body.nodes.iter().zip(&live) {
        if let (Op::Input(n), true) = (&node.op, live) {
            read[*n as usize] = true;
        }
    }
    // An input derives only from earlier ones, so going backwards finds all sources.
    for n in (0..graph.inputs.len()).rev() {
        if let (true, Some(from)) = (read[n], graph.inputs[n].default.as_ref().and_then(InputDefault::source)) {
            read[from as usize] = true;
        }
    }
    let mut number = vec![0; graph.inputs.len()];
    let mut inputs = vec![];
    for (n, mut input) in std::mem::take(&mut graph.inputs).into_iter().enumerate() {
        if read[n] {
            number[n] = inputs.len() as u32;
            input.default = input.default.map(|feed| feed.derived_from(|i| number[i as usize]));
            inputs.push(input);
        }
    }
    graph.inputs = inputs;
    let mut place = vec![Value(0); graph.body.nodes.len()];
    let old = std::mem::take(&mut graph.body.nodes);
    let mut body = Body { dims: std::mem::take(&mut graph.body.dims), nodes: Vec::with_capacity(old.len()) };
    for (i, mut node) in old.into_iter().enumerate() {
        if live[i] {
            for arg in &mut node.args {
                *arg = place[arg.index()];
            }
            if let Op::Input(n) = &mut node.op {
                *n = ir::fault!("elaborate.inputs.number", 0, number[*n as usize]);
            }
            place[i] = body.push(node.op, node.args, node.ty, node.origin);
        }
    }
    graph.body = body;
    graph.map_roots(|v| place[v.index()]);
}
