//! Why a reshard is there: what it changes for whom, and what would do without it.

use crate::sharding::axes::AxisTiers;
use ir::dim::{Dim, Dims};
use ir::graph::{Origin, Phase};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::reason::{AvoidedBy, Reason};
use ir::sharded::{Partial, Placement};

/// A change of placement on some sub-axes.
pub struct Change<'a> {
    /// The placement before, which is the same on all of `subs`.
    pub from: Placement,
    /// The placement after, on all of `subs`.
    pub to: Placement,
    /// The sub-axes that change.
    pub subs: &'a [SubAxis],
}

/// `operand 0 of dot: split along seq -> whole`, which sequence parallelism would not need if it were off.
pub fn reason(why: &str, change: &Change, origin: &Origin, mesh: &Mesh, dims: &Dims, lists: &AxisTiers) -> Reason {
    let name = |p: Placement| match p {
        Placement::Replicated => "whole".to_string(),
        Placement::Split(d) => format!("split along {}", dims.name(d)),
        Placement::Partial(Partial::Sum) => "partial sum".into(),
        Placement::Partial(Partial::Max) => "partial maximum".into(),
    };
    let why = format!("{why}: {} -> {}", name(change.from), name(change.to));
    Reason { why, avoided_by: avoided_by(change, origin, mesh, dims, lists) }
}

fn avoided_by(change: &Change, origin: &Origin, mesh: &Mesh, dims: &Dims, lists: &AxisTiers) -> Option<AvoidedBy> {
    let axis = mesh[*change.subs.iter().find(|u| mesh[**u].axis != Axis::Microbatch)?].axis;
    if origin.recomputed {
        return Some(AvoidedBy::NoRecomputation);
    }
    // `listed` tells what would keep a dim unsplit: turning off an option, or unlisting the dim in the plan.
    let listed = |d: Dim| {
        let shared = lists.shared.iter().filter(|s| s.0 == axis).flat_map(|s| &s.1).any(|e| dims.original(*e) == dims.original(d));
        let tier = lists.of(axis).iter().position(|t| t.iter().any(|e| dims.original(*e) == dims.original(d)));
        match (axis, tier) {
            (_, _) if shared => AvoidedBy::NoZero,
            (Axis::Tp, Some(k)) if k > 0 => AvoidedBy::NoSequenceParallelism,
            _ => AvoidedBy::Unlisted { axis, dim: dims.name(d).to_string() },
        }
    };
    match (change.from, change.to) {
        (Placement::Split(d), _) => Some(listed(d)),
        (Placement::Partial(_), _) if origin.phase == Phase::Update && matches!(axis, Axis::Dp | Axis::Cp) => Some(AvoidedBy::SameData(axis)),
        (Placement::Partial(_), _) => Some(AvoidedBy::Unsplit(axis)),
        (Placement::Replicated, _) => None,
    }
}
