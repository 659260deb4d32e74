//! Which stages hold each parameter.

use ir::graph::{Graph, Phase, Update, Value};
use ir::op::Op;
use ir::pipeline::Layout;
use std::collections::{BTreeSet, HashMap};

/// A set of stages; none means all.
pub(super) type StageSet = Option<BTreeSet<u32>>;

pub(super) fn intersect(a: &StageSet, b: &StageSet) -> StageSet {
    match (a, b) {
        (None, x) | (x, None) => x.clone(),
        (Some(a), Some(b)) => Some(a & b),
    }
}

/// The stages that hold each parameter; those that it does not have are held by all.
pub(super) type ParamStages = HashMap<u32, BTreeSet<u32>>;

/// The stages whose values use a parameter hold and update it. A state that updates alone read is where what it
/// follows from is. Parameters that no stage uses are where `of_training` has them, or everywhere; and so are those
/// that something loose combines though no stage has them all.
pub(super) fn held(graph: &Graph, layout: &Layout, virtual_stage: &[Option<u32>], of_training: &ParamStages) -> ParamStages {
    let body = &graph.body;
    let stage = |v: Value| virtual_stage[v.index()].map(|g| layout.stage(g));
    let mut held = ParamStages::new();
    let mut reaches: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); body.nodes.len()];
    for v in body.values().rev().filter(|v| body[*v].origin.phase != Phase::Update) {
        let mut set = std::mem::take(&mut reaches[v.index()]);
        set.extend(stage(v));
        if let Op::Param(p) = body[v].op {
            held.entry(p).or_default().extend(set);
            continue;
        }
        for a in &body[v].args {
            if virtual_stage[a.index()].is_none() {
                reaches[a.index()].extend(&set);
            }
        }
    }
    held.retain(|_, stages| !stages.is_empty());
    for (param, stages) in of_training {
        held.entry(*param).or_insert_with(|| stages.clone());
    }
    while let Some((state, stages)) = follows(graph, &stage, &held) {
        held.insert(state, stages);
    }
    let mut params: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); body.nodes.len()];
    for v in body.values().filter(|v| virtual_stage[v.index()].is_none() && body[*v].origin.phase != Phase::Update) {
        let mut of: BTreeSet<u32> = body[v].args.iter().flat_map(|a| params[a.index()].iter().copied()).collect();
        if let Op::Param(p) = body[v].op {
            of.insert(p);
        }
        let common = of.iter().fold(None, |set, p| intersect(&set, &held.get(p).cloned()));
        if common.is_some_and(|c| c.is_empty()) {
            of.iter().for_each(|p| drop(held.remove(p)));
        }
        params[v.index()] = of;
    }
    held
}

/// A state that no stage uses yet, with the stages that have all that its new value is made of.
fn follows(graph: &Graph, stage: &impl Fn(Value) -> Option<u32>, held: &ParamStages) -> Option<(u32, BTreeSet<u32>)> {
    let open = |u: &&Update| graph.params[u.param as usize].state && !held.contains_key(&u.param);
    graph.updates.iter().find(open)?;
    let mut origin: Vec<StageSet> = vec![None; graph.body.nodes.len()];
    for v in graph.body.values() {
        let node = &graph.body[v];
        origin[v.index()] = match (&node.op, stage(v)) {
            (_, Some(s)) => Some([s].into()),
            (Op::Param(p), None) => held.get(p).cloned(),
            (_, None) => node.args.iter().fold(None, |set, a| intersect(&set, &origin[a.index()])),
        };
    }
    graph.updates.iter().filter(open).find_map(|u| Some((u.param, origin[u.new.index()].clone().filter(|set| !set.is_empty())?)))
}
