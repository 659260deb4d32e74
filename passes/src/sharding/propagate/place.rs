//! Pass 4 (forward): places every op by its row and completes the sums that do not flow on.

use super::flow::Flow;
use super::random_rows::RandomRules;
use super::reshard::ReshardWriter;
use crate::sharding::axes::{Chooser, Tiers};
use ir::algebra::{Algebra, LoopKind, algebra};
use ir::dim::Dim;
use ir::graph::{Node, Phase, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::Op;
use ir::options::Zero;
use ir::sharded::{Partial, Placement, Sharding};
use std::collections::HashMap;

/// What an op does on one sub-axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubAxisRule {
    Whole,
    Split(usize),
    /// All operands are partial sums, and so is the result.
    Sums,
    /// The operand in this slot is a partial sum, and so is the result.
    Through(usize),
}

/// The pass as it goes through the graph.
pub(super) struct Propagator<'a> {
    pub flow: &'a Flow<'a>,
    pub mesh: &'a Mesh,
    pub chooser: Chooser<'a>,
    /// Draws rows in place of the rules.
    pub random: Option<RandomRules>,
    pub written: ReshardWriter<'a>,
    /// For each old value, the new one that stands for it.
    pub current: Vec<Value>,
    rests: HashMap<(Vec<Dim>, Tiers), Sharding>,
}

impl<'a> Propagator<'a> {
    pub fn new(flow: &'a Flow<'a>, chooser: Chooser<'a>, random: Option<RandomRules>) -> Propagator<'a> {
        let written = ReshardWriter::new(&flow.old.dims, flow.mesh, chooser.lists);
        let current = vec![Value(u32::MAX); flow.old.nodes.len()];
        Propagator { flow, mesh: flow.mesh, chooser, random, written, current, rests: HashMap::new() }
    }

    /// Where a value of these dims rests.
    pub fn rest(&mut self, dims: &[Dim], tiers: Tiers) -> Sharding {
        let key = (dims.to_vec(), tiers);
        if let Some(s) = self.rests.get(&key) {
            return s.clone();
        }
        let chosen = self.chooser.choose(&self.flow.old.dims, dims, tiers);
        let s = Sharding(chosen.into_iter().map(|d| d.map_or(Placement::Replicated, Placement::Split)).collect());
        self.rests.insert(key, s.clone());
        s
    }

    /// One op.
    pub fn place(&mut self, v: Value) -> Value {
        let node = self.flow.old[v].clone();
        if node.op.is_source() {
            let sharding = match node.op {
                Op::Input(_) => self.rest(&node.ty.dims, Tiers::First),
                Op::State(..) => self.rest(&node.ty.dims, Tiers::States),
                Op::Param(_) | Op::Uniform { .. } => self.rest(&node.ty.dims, Tiers::All),
                _ => Sharding::replicated(self.mesh),
            };
            return self.written.emit(node, sharding, None);
        }
        let mut args: Vec<Value> = node.args.iter().map(|a| self.current[a.index()]).collect();
        let rule = &self.flow.rules[v.index()];
        let several = rule.joint && args.len() > 2 && !node.ty.dims.is_empty() && self.random.is_none();
        let regrouped = if several { self.sum_partials_first(v, &node, &mut args) } else { None };
        let modes: Vec<SubAxisRule> = self.mesh.ids().map(|u| self.mode(v, &args, regrouped.is_some(), u)).collect();
        let (needs, result) = self.placements(v, &modes, regrouped.as_ref(), args.len());
        for (k, need) in needs.iter().enumerate() {
            let why = format!("operand {k} of {}", node.op.name());
            args[k] = self.written.reshard(args[k], need, &node.origin, &why);
        }
        let (origin, why) = (node.origin.clone(), format!("completes the partial result of {}", node.op.name()));
        let placed = self.written.emit(Node { args, ..node }, result.clone(), None);
        let to = self.completed(v, result);
        self.written.reshard(placed, &to, &origin, &why)
    }

    /// What becomes of a result: partial sums that do not flow on are completed, to where the value rests or to all of it.
    fn completed(&mut self, v: Value, result: Sharding) -> Sharding {
        let shared = self.is_shared(v) && !self.sums_stages(v);
        let drawn = self.random.as_ref().is_some_and(|l| !l.compared[v.index()]);
        if (self.flow.uses.is_sink[v.index()] || drawn) && !shared {
            return result;
        }
        let rest = self.rest(&self.flow.old[v].ty.dims, self.tiers_of(v));
        let mut to = result;
        for u in self.mesh.ids() {
            if shared && to[u].is_partial() && matches!(rest[u], Placement::Split(_)) && self.mesh[u].axis != Axis::Microbatch {
                to[u] = ir::fault!("propagate.shared.whole", Placement::Replicated, rest[u]);
            } else if !shared && to[u].is_partial() && ir::fault!("propagate.completed.never", false, !self.keeps(v, u)) {
                to[u] = if self.flow.whole(v, u) { Placement::Replicated } else { rest[u] };
            }
        }
        to
    }

    /// What the rows of an op, or of the sum that it is `regrouped` to, ask of its operands and make of its result.
    fn placements(&self, v: Value, modes: &[SubAxisRule], regrouped: Option<&Algebra>, operands: usize) -> (Vec<Sharding>, Sharding) {
        let mut needs = vec![Sharding::replicated(self.mesh); operands];
        let mut result = Sharding::replicated(self.mesh);
        for u in self.mesh.ids() {
            match modes[u.0 as usize] {
                SubAxisRule::Whole => {}
                SubAxisRule::Sums => {
                    needs.iter_mut().for_each(|n| n[u] = ir::fault!("propagate.sums.unmasked", Placement::Replicated, Placement::SUM));
                    result[u] = Placement::SUM;
                }
                SubAxisRule::Through(slot) => {
                    needs[slot][u] = Placement::SUM;
                    result[u] = Placement::SUM;
                }
                SubAxisRule::Split(l) => {
                    // After a sum was regrouped, its loops are found by name, otherwise by number.
                    let own = &self.flow.rules[v.index()].loops[l];
                    let of = regrouped.map_or(own, |rule| {
                        let name = own.dims().next();
                        rule.loops.iter().find(|m| m.dims().next() == name).expect("invariant: regrouping keeps the loops")
                    });
                    for (need, d) in needs.iter_mut().zip(&of.args) {
                        need[u] = ir::fault!("propagate.split.whole", Placement::Replicated, d.map_or(Placement::Replicated, Placement::Split));
                    }
                    result[u] = match of.kind {
                        LoopKind::Map | LoopKind::Ring => of.out.map_or(Placement::Replicated, Placement::Split),
                        LoopKind::Sum => ir::fault!("propagate.sum.whole", Placement::Replicated, Placement::SUM),
                        LoopKind::Max => ir::fault!("propagate.max.sum", Placement::SUM, Placement::Partial(Partial::Max)),
                        LoopKind::Block => unreachable!("invariant: block loops are not chosen"),
                    };
                }
            }
        }
        (needs, result)
    }

    /// A partial sum stays one only if all its users take it so; otherwise it is completed once, for all.
    fn keeps(&self, v: Value, u: SubAxis) -> bool {
        self.flow.uses.is_sink[v.index()]
            || self.flow.later(v, u)
            || self.flow.uses.users[v.index()]
                .iter()
                .all(|(c, _)| self.flow.old[*c].op == Op::Add && self.flow.old[*c].args.iter().filter(|a| self.flow.passes_sum(**a, u)).count() > 1)
    }

    /// Whether ranks share a gradient out: it is summed in every microbatch to where it rests, so that what they accumulate is a part.
    fn is_shared(&self, v: Value) -> bool {
        self.flow.uses.is_gradient[v.index()] && self.chooser.lists.zero == Zero::Params
    }

    /// Where a value rests once it is complete.
    fn tiers_of(&self, v: Value) -> Tiers {
        if self.is_shared(v) || self.flow.old[v].origin.phase == Phase::Update { Tiers::States } else { Tiers::All }
    }

    /// Whether it may be a sum of what several pipeline stages have, which is taken after all microbatches.
    fn sums_stages(&self, v: Value) -> bool {
        self.flow.old[v].op == Op::Add && self.mesh.size(Axis::Pp) > 1
    }

    /// Of a sum of many, adds the terms that are partial over the same sub-axes as an op of their own: one reduction for all. What the sum
    /// of the rest and these is then, if there are such terms.
    fn sum_partials_first(&mut self, v: Value, node: &Node, args: &mut Vec<Value>) -> Option<Algebra> {
        let partial = |s: &Self, a: Value| -> Vec<SubAxis> {
            s.mesh.ids().filter(|u| s.written.shardings[a.index()][*u] == Placement::SUM && !s.flow.later(v, *u)).collect()
        };
        let keys: Vec<Vec<SubAxis>> = args.iter().map(|a| partial(self, *a)).collect();
        let key = keys.iter().find(|k| !k.is_empty() && keys.iter().filter(|o| o == k).count() > 1).cloned()?;
        if keys.iter().all(|k| *k == key) {
            return None;
        }
        let inner: Vec<Value> = (0..args.len()).filter(|k| keys[*k] == key).map(|k| args[k]).collect();
        let rest = (0..args.len()).filter(|k| keys[*k] != key).map(|k| args[k]);
        let first = self.written.shardings[inner[0].index()].clone();
        let alike = inner.iter().all(|a| self.written.shardings[a.index()] == first && self.written.out.dims_of(*a).len() == node.ty.dims.len());
        if !alike {
            return None;
        }
        let outer: Vec<Value> = rest.collect();
        let sum = self.written.emit(Node { args: inner, ..node.clone() }, first, None);
        *args = outer.into_iter().chain([sum]).collect();
        self.written.out.nodes.push(Node { args: args.clone(), ..node.clone() });
        let rule = algebra(&self.written.out, Value(self.written.out.nodes.len() as u32 - 1));
        self.written.out.nodes.pop();
        Some(rule)
    }

    /// The row that the rules choose.
    fn mode(&mut self, v: Value, args: &[Value], regrouped: bool, u: SubAxis) -> SubAxisRule {
        let rule = &self.flow.rules[v.index()];
        let current: Vec<Placement> = args.iter().map(|a| self.written.shardings[a.index()][u]).collect();
        if self.random.is_some() {
            return self.any_row(v, &current, u);
        }
        if self.is_shared(v) && self.sums_stages(v) && self.mesh[u].axis != Axis::Microbatch {
            let rest = self.rest(&self.flow.old[v].ty.dims, Tiers::States)[u];
            if let Some(l) = rule.loops.iter().position(|l| matches!(rest, Placement::Split(d) if l.out == Some(d))) {
                return SubAxisRule::Split(l);
            }
        }
        let later = self.flow.later(v, u);
        let sums = current.iter().filter(|c| **c == Placement::SUM).count();
        let simple = adds(&current);
        if rule.joint {
            let scalar = self.flow.old[v].ty.dims.is_empty();
            if sums == current.len() || simple && sums > 0 && (scalar || later && !regrouped) {
                return SubAxisRule::Sums;
            }
        } else if self.flow.choice(v, u).is_none() {
            let mut partial = rule.linear.iter().filter(|k| current[**k] == Placement::SUM);
            if let (Some(slot), None) = (partial.next(), partial.next())
                && self.flow.later(self.flow.old[v].args[*slot], u)
            {
                return SubAxisRule::Through(*slot);
            }
        }
        match self.flow.choice(v, u) {
            None => SubAxisRule::Whole,
            // Slicing is lazy: a whole value stays whole until it meets a split one. A dim that an op adds itself (an
            // expansion) is whole only where a user needs it so.
            Some(l)
                if current.iter().all(|c| *c == Placement::Replicated)
                    && (rule.loops[l].args.iter().any(Option::is_some) || self.flow.whole(v, u)) =>
            {
                SubAxisRule::Whole
            }
            Some(l) => SubAxisRule::Split(l),
        }
    }
}

/// Whether a sum over all operands can wait: each is partial, or whole, and then masked but on one rank.
pub(super) fn adds(current: &[Placement]) -> bool {
    current.iter().all(|c| matches!(*c, Placement::SUM | Placement::Replicated))
}
