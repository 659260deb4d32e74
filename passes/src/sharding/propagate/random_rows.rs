//! Rows at random: whatever the algebra allows must compute the same, so tests choose at random in place of the rules.

use super::place::{Propagator, SubAxisRule, adds};
use ir::algebra::LoopKind;
use ir::dim::Dim;
use ir::graph::{Body, Phase, Value};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Op, Reduce};
use ir::sharded::Placement;
use std::collections::HashMap;

pub(super) struct RandomRules {
    state: u64,
    /// What it gave, by value that is no copy.
    drawn: HashMap<(Value, SubAxis), SubAxisRule>,
    /// The values whose bits matter; see [`compared`].
    pub compared: Vec<bool>,
}

impl RandomRules {
    pub fn new(seed: u64, body: &Body) -> RandomRules {
        RandomRules { state: ir::random::mix(seed), drawn: HashMap::new(), compared: compared(body) }
    }

    /// What was drawn for a value before if that is among the rows, else one of them.
    fn draw(&mut self, original: (Value, SubAxis), rows: &[SubAxisRule]) -> SubAxisRule {
        if let Some(mode) = self.drawn.get(&original).filter(|m| rows.contains(m)) {
            return *mode;
        }
        self.state = ir::random::mix(self.state);
        let mode = rows[(self.state % rows.len() as u64) as usize];
        self.drawn.insert(original, mode);
        mode
    }
}

/// The values that are compared, as they are or moved. Two copies of one (a value and its greatest, an element and its rivals) must hold the same
/// bits, so a sum is completed once for both: two orders of adding round differently. The rules do so for every value; random choices only for these.
fn compared(body: &Body) -> Vec<bool> {
    let mut out = vec![false; body.nodes.len()];
    for v in body.values().rev() {
        let moves = match body[v].op {
            Op::Compare(_) => true,
            Op::Cast
            | Op::StopGradient
            | Op::Cut
            | Op::Expand
            | Op::View { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Concat { .. }
            | Op::Reduce { kind: Reduce::Max, .. } => out[v.index()],
            _ => false,
        };
        if moves {
            body[v].args.iter().for_each(|a| out[a.index()] = true);
        }
    }
    out
}

impl Propagator<'_> {
    /// A random one of the sound rules.
    pub fn any_row(&mut self, v: Value, current: &[Placement], u: SubAxis) -> SubAxisRule {
        let rule = &self.flow.rules[v.index()];
        let axis = self.mesh[u].axis;
        let mut rows = vec![];
        // Microbatches run one after the other, so their rule cannot be chosen freely.
        if axis == Axis::Microbatch {
            return match self.flow.choice(v, u) {
                Some(l) => SubAxisRule::Split(l),
                None => match current.iter().position(|c| *c == Placement::SUM) {
                    Some(_) if rule.joint && adds(current) && self.flow.old[v].origin.phase != Phase::Update => SubAxisRule::Sums,
                    Some(slot) if !rule.joint && rule.linear.contains(&slot) && self.flow.later(self.flow.old[v].args[slot], u) => {
                        SubAxisRule::Through(slot)
                    }
                    _ => SubAxisRule::Whole,
                },
            };
        }
        rows.push(SubAxisRule::Whole);
        let listed: Vec<Dim> = self.chooser.lists.dims_of(self.mesh, u);
        for (l, lp) in rule.loops.iter().enumerate() {
            if lp.kind != LoopKind::Block && lp.dims().all(|d| listed.contains(&d)) {
                let dims: Vec<Dim> = lp.dims().collect();
                if dims.iter().all(|d| self.chooser.fits(&self.flow.old.dims, u, *d)) {
                    rows.push(SubAxisRule::Split(l));
                }
            }
        }
        if rule.joint && current.contains(&Placement::SUM) && adds(current) {
            rows.extend([SubAxisRule::Sums; 2]);
        }
        if !rule.joint {
            rows.extend(rule.linear.iter().filter(|k| current[**k] == Placement::SUM).flat_map(|k| [SubAxisRule::Through(*k); 2]));
        }
        // A recomputed copy uses the rule of the original, since a comparison of both, as in the gradient of a
        // maximum, must find the same bits.
        let original = (self.flow.uses.originals[v.index()], u);
        self.random.as_mut().expect("invariant: asked for random rows").draw(original, &rows)
    }
}
