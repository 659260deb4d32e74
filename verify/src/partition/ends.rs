//! What a stage holds where a step begins, and what it updates and reports.

use super::stage::Stage;
use crate::violation::fail;
use crate::{Invariant, LocationPart, Violation};
use ir::dim::{Dim, IndexMap};
use ir::graph::Value;
use ir::local::Chunk;
use ir::sharded::Placement;
use std::collections::HashSet;

impl Stage<'_, '_> {
    /// Parameters, updates and reports.
    pub fn ends(&mut self) -> Result<(), Violation> {
        let (local, s) = (self.local, self.shards.s);
        let graph = &s.graph;
        let (stage, params) = &local.stages[0];
        self.room().map_err(|e| e.at(LocationPart::Graph))?;
        for (slot, p) in params.iter().enumerate() {
            let Some(source) = self.shards.params.get(p).copied() else {
                return fail(Invariant::UsedParameter, LocationPart::Graph, format!("stage {stage} holds parameter {p}, which is not used"));
            };
            let is_part = |d: &Dim, map: &IndexMap| self.shards.finds(map, *d, &|u| s.sharding(source)[u] == Placement::Split(*d));
            let maps = &local.params[slot].index;
            let dims = graph.body.dims_of(source);
            if maps.len() != dims.len() || !dims.iter().zip(maps).all(|(d, map)| is_part(d, map)) {
                return fail(Invariant::ParameterPart, source, format!("slot {slot} of stage {stage} is another part of parameter {p}"));
            }
        }
        let held: HashSet<u32> = params.iter().copied().collect();
        let updates: Vec<_> = graph.updates.iter().filter(|u| held.contains(&u.param)).collect();
        if updates.len() != local.updates.len() {
            return fail(
                Invariant::UpdatesOfStage,
                LocationPart::Graph,
                format!("stage {stage} updates {} parameters, not {}", local.updates.len(), updates.len()),
            );
        }
        for u in &local.updates {
            let of_slot = |g: &&&ir::graph::Update| params.get(u.slot as usize) == Some(&g.param);
            let Some(g) = updates.iter().find(of_slot) else { return fail(Invariant::UpdatesOfStage, u.new, "it updates nothing") };
            let states = local.params[u.slot as usize].states as usize;
            if u.states.len() != g.states.len() || states != g.states.len() {
                return fail(Invariant::StatesOfUpdate, u.new, "it has not the states of its parameter");
            }
            for (w, v) in std::iter::once((u.new, g.new)).chain(u.states.iter().copied().zip(g.states.iter().copied())) {
                if self.sees(w, v, Chunk::Update) != Ok(true) {
                    return fail(Invariant::NewValue, w, format!("it does not hold {v}, the new value of parameter {}", g.param));
                }
            }
        }
        let totals = graph.loss.map(|v| (0, v)).into_iter().chain(graph.grad_norm.map(|v| (1, v)));
        let reports: Vec<(u32, Value)> = totals.chain((2..).zip(graph.losses.iter().chain(&graph.metrics).map(|r| r.value))).collect();
        let mut numbers: Vec<u32> = local.reports.iter().map(|r| r.0).collect();
        numbers.sort_unstable();
        if numbers.iter().ne(reports.iter().map(|r| &r.0)) {
            return fail(Invariant::ReportNumbers, LocationPart::Graph, format!("stage {stage} does not report what the graph reports"));
        }
        for (number, w) in &local.reports {
            let v = reports.iter().find(|r| r.0 == *number).expect("invariant: just compared").1;
            if self.sees(*w, v, Chunk::Reduce) != Ok(true) {
                return fail(Invariant::ReportedValue, *w, format!("it does not hold {v}, which is report {number}"));
            }
        }
        Ok(())
    }
}
