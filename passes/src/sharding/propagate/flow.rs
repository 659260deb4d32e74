//! How values flow before anything is placed: passes 1 to 3, each once through the graph.
//!
//! Pass 1 (forward) finds the natural placement of every value, pass 2 (backward) the partial sums that may flow on, because every use is linear and ends
//! in a sum that happens anyway, and pass 3 (backward) small values that someone needs whole.

use super::uses::ValueUses;
use crate::sharding::axes::AxisTiers;
use ir::algebra::{Algebra, LoopKind};
use ir::dim::Dim;
use ir::graph::{Body, Graph, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::Op;

/// A value's placement if every op took its chosen row and nothing were completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NaturalPlacement {
    Whole,
    Split,
    Sum,
    Max,
}

/// What the passes found, by value and sub-axis.
pub(super) struct Flow<'a> {
    pub old: &'a Body,
    pub mesh: &'a Mesh,
    pub rules: Vec<Algebra>,
    pub choice: Vec<Vec<Option<usize>>>,
    pub uses: ValueUses,
    natural: Vec<Vec<NaturalPlacement>>,
    later: Vec<Vec<bool>>,
    whole: Vec<Vec<bool>>,
}

impl<'a> Flow<'a> {
    /// `choice` is the loop that each op splits; what is small has dims that tell one token from another alone.
    pub fn new(
        graph: &'a Graph,
        mesh: &'a Mesh,
        lists: &AxisTiers,
        rules: Vec<Algebra>,
        choice: Vec<Vec<Option<usize>>>,
        uses: ValueUses,
    ) -> Flow<'a> {
        let mut flow = Flow { old: &graph.body, mesh, rules, choice, uses, natural: vec![], later: vec![], whole: vec![] };
        flow.natural();
        flow.sums_later();
        flow.whole_uses(&token_dims(graph, lists));
        flow
    }

    /// The loop that an op splits, by its number in the op's rule.
    pub fn choice(&self, v: Value, u: SubAxis) -> Option<usize> {
        self.choice[v.index()][u.0 as usize]
    }

    /// Whether a partial sum may flow on.
    pub fn later(&self, v: Value, u: SubAxis) -> bool {
        self.later[v.index()][u.0 as usize]
    }

    /// Whether someone needs a small value whole.
    pub fn whole(&self, v: Value, u: SubAxis) -> bool {
        self.whole[v.index()][u.0 as usize]
    }

    /// Whether it computes a forward value again. It is placed as that is, so that recomputation changes no result.
    fn repeats(&self, v: Value) -> bool {
        self.uses.originals[v.index()] != v
    }

    /// Pass 1.
    fn natural(&mut self) {
        for v in self.old.values() {
            if self.repeats(v) {
                self.natural.push(self.natural[self.uses.originals[v.index()].index()].clone());
                continue;
            }
            let node = &self.old[v];
            let rule = &self.rules[v.index()];
            let row = self
                .mesh
                .ids()
                .map(|u| {
                    if rule.joint && node.args.iter().all(|a| self.passes_sum(*a, u)) {
                        return NaturalPlacement::Sum;
                    }
                    match self.choice(v, u) {
                        None => NaturalPlacement::Whole,
                        Some(_) if is_free(&node.op) => NaturalPlacement::Whole,
                        Some(l) => match rule.loops[l].kind {
                            LoopKind::Map | LoopKind::Ring => NaturalPlacement::Split,
                            LoopKind::Sum => NaturalPlacement::Sum,
                            LoopKind::Max => NaturalPlacement::Max,
                            LoopKind::Block => unreachable!("invariant: block loops are not chosen"),
                        },
                    }
                })
                .collect();
            self.natural.push(row);
        }
    }

    fn is(&self, v: Value, u: SubAxis, what: NaturalPlacement) -> bool {
        self.natural[v.index()][u.0 as usize] == what
    }

    /// A partial sum that only sums use.
    pub fn passes_sum(&self, v: Value, u: SubAxis) -> bool {
        self.is(v, u, NaturalPlacement::Sum) && self.uses.users[v.index()].iter().all(|(c, _)| self.old[*c].op == Op::Add)
    }

    /// Pass 2: whether every use of a value is linear and ends in a sum over `u` that happens anyway, or in a sink.
    fn sums_later(&mut self) {
        let subs = self.mesh.subs.len();
        // `partial` counts, per op, the partial sums among the operands in which it is linear; other slots take the
        // completed sum.
        let of =
            |v: Value, u: SubAxis| self.rules[v.index()].linear.iter().filter(|k| self.is(self.old[v].args[**k], u, NaturalPlacement::Sum)).count();
        let partial: Vec<Vec<usize>> = self.old.values().map(|v| self.mesh.ids().map(|u| of(v, u)).collect()).collect();
        self.later = vec![vec![false; subs]; self.old.nodes.len()];
        for v in self.old.values().rev() {
            if self.repeats(v) {
                continue;
            }
            for u in self.mesh.ids() {
                let mut ok = self.uses.is_sink[v.index()] || !self.uses.users[v.index()].is_empty();
                for (c, slot) in &self.uses.users[v.index()] {
                    let rule = &self.rules[c.index()];
                    let is_linear = rule.joint || rule.linear.contains(slot);
                    let own = usize::from(is_linear && self.is(v, u, NaturalPlacement::Sum));
                    let others = partial[c.index()][u.0 as usize] > own;
                    let next = self.later(*c, u);
                    ok &= if rule.joint {
                        next || others
                    } else {
                        next && ir::fault!("propagate.later.nonlinear", true, is_linear) && self.choice(*c, u).is_none() && !others
                    };
                }
                self.later[v.index()][u.0 as usize] = ok;
            }
        }
        // Values through which a delayed sum flows are partial, too.
        for v in self.old.values() {
            if self.repeats(v) {
                let original = self.uses.originals[v.index()].index();
                self.later[v.index()] = self.later[original].clone();
                self.natural[v.index()] = self.natural[original].clone();
                continue;
            }
            for u in self.mesh.ids() {
                if self.choice(v, u).is_none() && self.later(v, u) {
                    let rule = &self.rules[v.index()];
                    if rule.linear.iter().any(|k| self.is(self.old[v].args[*k], u, NaturalPlacement::Sum)) {
                        self.natural[v.index()][u.0 as usize] = NaturalPlacement::Sum;
                    }
                }
            }
        }
    }

    /// Pass 3: whether a small value is needed whole by someone, directly or through small pointwise ops.
    fn whole_uses(&mut self, token_dims: &[Dim]) {
        let small = |v: Value| self.old.dims_of(v).iter().all(|d| token_dims.contains(d));
        let mut whole = vec![vec![false; self.mesh.subs.len()]; self.old.nodes.len()];
        for v in self.old.values().rev().filter(|v| small(*v) && !self.repeats(*v)) {
            for u in self.mesh.ids() {
                whole[v.index()][u.0 as usize] = self.uses.users[v.index()].iter().any(|(c, slot)| {
                    let chosen = self.choice(*c, u);
                    let has = chosen.is_some_and(|l| self.rules[c.index()].loops[l].args[*slot].is_some());
                    let alike =
                        self.old.dims_of(*c).len() == self.old.dims_of(v).len() && self.old.dims_of(*c).iter().all(|d| self.old[v].ty.has(*d));
                    !has || small(*c) && alike && whole[c.index()][u.0 as usize]
                });
            }
        }
        for v in self.old.values() {
            whole[v.index()] = whole[self.uses.originals[v.index()].index()].clone();
        }
        self.whole = whole;
    }
}

/// The dims that tell one token from another: of inputs, and split by data or sequence parallelism.
fn token_dims(graph: &Graph, lists: &AxisTiers) -> Vec<Dim> {
    let by_data = [Axis::Dp, Axis::Cp].into_iter().flat_map(|a| lists.of(a).iter().take(1));
    let by_sequence = lists.of(Axis::Tp).iter().skip(1);
    let listed: Vec<Dim> = graph.batch.into_iter().chain(by_data.chain(by_sequence).flatten().copied()).collect();
    listed.into_iter().filter(|d| graph.inputs.iter().any(|i| i.ty.has(*d))).collect()
}

/// Sources that every rank can make whole for itself.
fn is_free(op: &Op) -> bool {
    matches!(op, Op::Const(_) | Op::Iota(_) | Op::Scalar(_) | Op::Table(_))
}
