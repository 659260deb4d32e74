//! Chooses a sharding for every value and inserts the reshards between them: four linear passes over the graph.
//!
//! Per op and sub-axis, the loop that is split is the first listed dim among the op's own loops ([`choices`]). What remains is when sums are
//! completed: passes 1 to 3 look ahead for that ([`flow`]), pass 4 places every op ([`place`]) and inserts reshards ([`reshard`]). The rules and what each
//! saves are in `docs/sharding.md`.

mod flow;
mod place;
mod random_rows;
mod reshard;
mod uses;

use crate::sharding::axes::{AxisTiers, Chooser, Tiers};
use flow::Flow;
use ir::algebra::{Algebra, Loop, LoopKind, algebra};
use ir::dim::Dim;
use ir::graph::{Body, Graph, Origin, Phase, Value};
use ir::mesh::{Mesh, SubAxis};
use ir::op::Op;
use ir::options::RowChoice;
use ir::sharded::{Sharded, Sharding};
use place::Propagator;
use random_rows::RandomRules;
use reshard::ReshardWriter;
use std::collections::HashMap;
use uses::ValueUses;

/// Chooses shardings and inserts reshards.
pub fn propagate(graph: Graph, mesh: &Mesh, lists: &AxisTiers, rows: RowChoice) -> Sharded {
    let mut chooser = Chooser::new(mesh, lists, &graph.body.dims);
    chooser.params_first(&graph);
    let rules: Vec<Algebra> = graph.body.values().map(|v| algebra(&graph.body, v)).collect();
    let choice = choices(&graph.body, mesh, &rules, &mut chooser);
    let update = |v: &Value| graph.body[*v].origin.phase == Phase::Update;
    let reports: Vec<Value> = graph.loss.iter().copied().chain(graph.losses.iter().chain(&graph.metrics).map(|r| r.value)).collect();
    let flow = Flow::new(&graph, mesh, lists, rules, choice, ValueUses::new(&graph, &reports));
    let random = match rows {
        RowChoice::Rules => None,
        RowChoice::Random(seed) => Some(RandomRules::new(seed, &graph.body)),
    };
    let mut p = Propagator::new(&flow, chooser, random);
    let (steps, updates): (Vec<Value>, Vec<Value>) = graph.body.values().partition(|v| graph.body[*v].origin.phase != Phase::Update);
    for v in steps {
        p.current[v.index()] = p.place(v);
    }
    // After the microbatches, gradients and reports are summed to the shardings in which the update reads them.
    let mut sums = p.current.clone();
    let end = |origin: &Origin| Origin { phase: Phase::Update, ..origin.clone() };
    for (param, g) in &graph.grads {
        let dims = &graph.params[*param as usize].ty.dims;
        let rest = p.rest(dims, Tiers::States);
        let origin = end(&graph.body[*g].origin);
        sums[g.index()] = ir::fault!(
            "propagate.gradient.partial",
            p.current[g.index()],
            p.written.reshard(p.current[g.index()], &rest, &origin, "the gradient is needed where the optimizer state rests")
        );
    }
    for v in reports.iter().copied().filter(|v| !update(v)) {
        let rest = Sharding::replicated(mesh);
        let origin = end(&graph.body[v].origin);
        sums[v.index()] = ir::fault!(
            "propagate.report.partial",
            p.current[v.index()],
            p.written.reshard(p.current[v.index()], &rest, &origin, "a report is known on every rank")
        );
    }
    p.current = sums;
    for v in updates {
        p.current[v.index()] = p.place(v);
    }
    let mut ends: HashMap<Value, Value> = HashMap::new();
    for u in &graph.updates {
        let dims = &graph.params[u.param as usize].ty.dims;
        let (param, state) = (p.rest(dims, Tiers::All), p.rest(dims, Tiers::States));
        let states = u.states.iter().map(|v| (*v, &state));
        for (v, rest) in std::iter::once((u.new, &param)).chain(states) {
            let origin = graph.body[v].origin.clone();
            ends.insert(v, p.written.reshard(p.current[v.index()], rest, &origin, "the new value rests where the old one did"));
        }
    }
    for v in reports.into_iter().filter(update).chain(graph.grad_norm) {
        let origin = graph.body[v].origin.clone();
        let rest = Sharding::replicated(mesh);
        ends.insert(v, p.written.reshard(p.current[v.index()], &rest, &origin, "a report is known on every rank"));
    }
    let Propagator { written: ReshardWriter { out, shardings, reasons, .. }, current, chooser, .. } = p;
    let digits = chooser.digits;
    let mut graph = Graph { body: out, ..graph };
    graph.map_roots(|v| ends.get(&v).copied().unwrap_or(current[v.index()]));
    Sharded { graph, mesh: mesh.clone(), digits, shardings, reasons }
}

/// Of each op, the loop that each sub-axis splits.
fn choices(body: &Body, mesh: &Mesh, rules: &[Algebra], chooser: &mut Chooser) -> Vec<Vec<Option<usize>>> {
    let of_op = |v: Value| {
        let loops = &rules[v.index()].loops;
        let open = |l: &Loop| !matches!(l.kind, LoopKind::Block | LoopKind::Ring);
        let dims: Vec<Dim> = loops.iter().filter(|l| open(l)).flat_map(Loop::dims).collect();
        let tiers = match body[v].op {
            Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..) => Tiers::Attention,
            _ if body[v].origin.phase == Phase::Update => Tiers::States,
            _ => Tiers::All,
        };
        let chosen = chooser.choose(&body.dims, &dims, tiers);
        let row = |(u, d): (SubAxis, Option<Dim>)| {
            let has = |l: &Loop| l.dims().any(|e| Some(e) == d);
            let ring = loops.iter().position(|l| l.kind == LoopKind::Ring && has(l) && chooser.rings(&body.dims, u, l));
            ring.or_else(|| loops.iter().position(|l| open(l) && has(l)))
        };
        mesh.ids().zip(chosen).map(row).collect()
    };
    body.values().map(of_op).collect()
}
