//! Why collectives are there, as a picture needs it: of each change of sharding the op before it, and who reads the result.

use super::explain::{Tensor, tensor};
use ir::graph::{Phase, Value};
use ir::op::Op;
use ir::sharded::Sharded;

/// A change of sharding between the op that makes a value and those that read it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardingChange {
    /// Which pass it is in: `forward`, `backward`, `recomputed` or `update`.
    pub phase: &'static str,
    /// The collective that makes the change: `all_reduce`, `slice`.
    pub kind: &'static str,
    /// The axes that it is over.
    pub axes: String,
    /// `operand 0 of dot: partial sum -> whole`; empty if nothing is known.
    pub why: String,
    /// What the op before reads.
    pub operands: Vec<Tensor>,
    /// What the op before makes, under the op's name.
    pub before: Tensor,
    /// The same value, as it is read.
    pub after: Tensor,
    /// The ops that read it.
    pub readers: Vec<&'static str>,
}

/// The changes of sharding of a line of file number `file`: those of its first layer, which stand for all.
pub fn changes(s: &Sharded, file: u16, line: u32) -> Vec<ShardingChange> {
    let body = &s.graph.body;
    let here = |v: &Value| body[*v].origin.span.is_some_and(|s| (s.file, s.line) == (file, line)) && matches!(body[*v].op, Op::Reshard { .. });
    let found: Vec<Value> = body.values().filter(here).collect();
    let layer = found.iter().filter_map(|v| body[*v].origin.layer).min();
    let named = |v: Value| match body[v].op {
        Op::Param(p) => s.graph.params[p as usize].name.clone(),
        Op::Input(k) => s.graph.inputs.get(k as usize).map_or("input".into(), |i| i.name.clone()),
        ref op => op.name().to_owned(),
    };
    let mut out: Vec<ShardingChange> = vec![];
    for v in found.into_iter().filter(|v| body[*v].origin.layer.is_none() || body[*v].origin.layer == layer) {
        let Op::Reshard { kind, subs } = &body[v].op else { continue };
        let before = body[v].args[0];
        let mut readers: Vec<&'static str> = body.values().filter(|r| body[*r].args.contains(&v)).map(|r| body[r].op.name()).collect();
        readers.dedup();
        let origin = &body[v].origin;
        let change = ShardingChange {
            phase: match (origin.phase, origin.recomputed) {
                (Phase::Forward, _) => "forward",
                (Phase::Backward, false) => "backward",
                (Phase::Backward, true) => "recomputed",
                (Phase::Update, _) => "update",
            },
            kind: kind.name(),
            axes: s.mesh.describe(subs),
            why: s.reasons.get(v.0 as usize).cloned().flatten().map_or(String::new(), |r| r.why),
            operands: body[before].args.iter().map(|a| tensor(s, *a, named(*a))).collect(),
            before: tensor(s, before, named(before)),
            after: tensor(s, v, kind.name().into()),
            readers,
        };
        if !out.contains(&change) {
            out.push(change);
        }
    }
    out
}
