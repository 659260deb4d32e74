//! The sharded graph as it is written: nodes with their shardings, and the reshards that lead values from one to another.

use crate::sharding::axes::AxisTiers;
use crate::sharding::reason::{Change, reason};
use ir::dim::Dims;
use ir::graph::{Body, Node, Origin, Phase, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Op, Reshard};
use ir::reason::Reason;
use ir::sharded::{Placement, Sharding};
use std::collections::HashMap;

/// What makes two reshards the same: operand, kind, placement reached, sub-axes; of a gather the phase too.
type ReshardKey = (Value, Reshard, Placement, Vec<SubAxis>, Option<Phase>);

/// One collective (or slice, or mask) of a reshard.
struct ReshardStep {
    kind: Reshard,
    from: Placement,
    to: Placement,
    /// The axis it exchanges along; none where several can be done together.
    axis: Option<Axis>,
    subs: Vec<SubAxis>,
}

pub(super) struct ReshardWriter<'a> {
    mesh: &'a Mesh,
    lists: &'a AxisTiers,
    pub out: Body,
    pub shardings: Vec<Sharding>,
    pub reasons: Vec<Option<Reason>>,
    known: HashMap<ReshardKey, Value>,
    /// Indices made in another sharding.
    indices: HashMap<(Value, Sharding), Value>,
}

impl<'a> ReshardWriter<'a> {
    /// Nothing yet, over these dims.
    pub fn new(dims: &Dims, mesh: &'a Mesh, lists: &'a AxisTiers) -> ReshardWriter<'a> {
        let out = Body { dims: dims.clone(), nodes: vec![] };
        ReshardWriter { mesh, lists, out, shardings: vec![], reasons: vec![], known: HashMap::new(), indices: HashMap::new() }
    }

    /// Adds a node.
    pub fn emit(&mut self, node: Node, sharding: Sharding, reason: Option<Reason>) -> Value {
        self.out.nodes.push(node);
        self.shardings.push(sharding);
        self.reasons.push(reason);
        Value(self.out.nodes.len() as u32 - 1)
    }

    /// Leads a value to another sharding: slices, sums, exchanges, gathers, masks, in this order; sub-axes together where one
    /// collective does. A reshard is made once per value; a gather once per phase, since keeping a gathered value from the
    /// forward to the backward pass would undo the saving.
    pub fn reshard(&mut self, v: Value, to: &Sharding, origin: &Origin, why: &str) -> Value {
        if matches!(self.out[v].op, Op::Iota(_)) && !to.0.iter().any(|p| p.is_partial()) {
            return self.index(v, to);
        }
        let mut moves: Vec<ReshardStep> = vec![];
        let from = self.shardings[v.index()].clone();
        for u in self.mesh.ids() {
            let (a, b) = (from[u], to[u]);
            if a == b {
                continue;
            }
            let kind = match (a, b) {
                (Placement::Partial(_), Placement::Split(_)) => Reshard::ReduceScatter,
                (Placement::Partial(_), Placement::Replicated) => Reshard::AllReduce,
                (Placement::Replicated, Placement::Split(_)) => Reshard::Slice,
                (Placement::Split(_), Placement::Replicated) => ir::fault!("propagate.reshard.kind", Reshard::AllReduce, Reshard::AllGather),
                (Placement::Split(_), Placement::Split(_)) => Reshard::AllToAll,
                (Placement::Replicated, Placement::Partial(_)) => Reshard::Mask,
                (Placement::Replicated, Placement::Replicated) | (Placement::Split(_) | Placement::Partial(_), Placement::Partial(_)) => {
                    unreachable!("invariant: no rule asks for a partial value of something split")
                }
            };
            // Sums over several axes form one collective; other collectives exchange along one axis.
            let axis = match kind {
                Reshard::AllReduce | Reshard::Slice | Reshard::Mask => None,
                Reshard::ReduceScatter | Reshard::AllToAll | Reshard::AllGather => {
                    ir::fault!("propagate.reshard.axis", None, Some(self.mesh[u].axis))
                }
            };
            match moves.iter_mut().find(|m| (m.kind, m.from, m.to, m.axis) == (kind, a, b, axis)) {
                Some(m) => m.subs.push(u),
                None => moves.push(ReshardStep { kind, from: a, to: b, axis, subs: vec![u] }),
            }
        }
        moves.sort_by_key(|m| m.kind);
        let mut v = v;
        for ReshardStep { kind, from, to: b, subs, .. } in moves {
            let phase = ir::fault!("propagate.reshard.phase", None, (kind == Reshard::AllGather).then_some(origin.phase));
            let key = (v, kind, b, subs.clone(), phase);
            // A known reshard is reused within its phase or layer, since the backward pass of another layer may be on
            // another stage.
            let made = |w: &Value| {
                let by = &self.out[*w].origin;
                by.phase == origin.phase || by.layer == origin.layer
            };
            v = match self.known.get(&key).copied().filter(made) {
                Some(w) => w,
                None => {
                    let mut sharding = self.shardings[v.index()].clone();
                    subs.iter().for_each(|u| sharding[*u] = b);
                    let ty = self.out[v].ty.clone();
                    let change = Change { from, to: b, subs: &subs };
                    let why = reason(why, &change, origin, self.mesh, &self.out.dims, self.lists);
                    let w = self.emit(Node { op: Op::Reshard { kind, subs }, args: vec![v], ty, origin: origin.clone() }, sharding, Some(why));
                    self.known.insert(key, w);
                    w
                }
            };
        }
        v
    }

    /// An index where another sharding of it is wanted: made there, without a reshard.
    fn index(&mut self, v: Value, to: &Sharding) -> Value {
        if self.shardings[v.index()] == *to {
            return v;
        }
        let key = (v, to.clone());
        if let Some(w) = self.indices.get(&key) {
            return *w;
        }
        let w = self.emit(self.out[v].clone(), to.clone(), None);
        self.indices.insert(key, w);
        w
    }
}
