//! Why a reshard is there, in words: what it changes for whom, and what would do without it.

use crate::sharding::axes::Lists;
use ir::dim::{Dim, Dims};
use ir::graph::{Origin, Phase};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::sharded::{Partial, Placement};

/// Between the reason of a reshard and what would do without it.
pub const WITHOUT: &str = "; not needed ";

/// A change of placement on some sub-axes.
pub struct Change<'a> {
    pub from: Placement,
    pub to: Placement,
    pub subs: &'a [SubAxis],
}

/// `operand 0 of dot: split along seq -> whole; not needed without --sp`.
pub fn reason(why: &str, change: &Change, origin: &Origin, mesh: &Mesh, dims: &Dims, lists: &Lists) -> String {
    let name = |p: Placement| match p {
        Placement::Replicated => "whole".to_string(),
        Placement::Split(d) => format!("split along {}", dims.name(d)),
        Placement::Partial(Partial::Sum) => "partial sum".into(),
        Placement::Partial(Partial::Max) => "partial maximum".into(),
    };
    let without = without(change, origin, mesh, dims, lists).map_or(String::new(), |w| format!("{WITHOUT}{w}"));
    format!("{why}: {} -> {}{without}", name(change.from), name(change.to))
}

fn without(change: &Change, origin: &Origin, mesh: &Mesh, dims: &Dims, lists: &Lists) -> Option<String> {
    let axis = mesh[*change.subs.iter().find(|u| mesh[**u].axis != Axis::Microbatch)?].axis;
    if origin.recomputed {
        return Some("without recomputation".into());
    }
    // Where the plan lists a dim: in its first tier, or in one that a flag adds.
    let listed = |d: Dim| {
        let shared = lists.shared.iter().filter(|s| s.0 == axis).flat_map(|s| &s.1).any(|e| dims.original(*e) == dims.original(d));
        let tier = lists.of(axis).iter().position(|t| t.iter().any(|e| dims.original(*e) == dims.original(d)));
        match (axis, tier) {
            (_, _) if shared => "without --zero".to_string(),
            (Axis::Tp, Some(k)) if k > 0 => "without --sp".into(),
            _ => format!("if the plan's `{axis}` did not list `{}`", dims.name(d)),
        }
    };
    match (change.from, change.to) {
        (Placement::Split(d), _) => Some(listed(d)),
        (Placement::Partial(_), _) if origin.phase == Phase::Update && matches!(axis, Axis::Dp | Axis::Cp) => {
            Some(format!("with --{axis} 1: its ranks see other data"))
        }
        (Placement::Partial(_), _) => Some(format!("if the plan's `{axis}` split nothing that is summed over here")),
        (Placement::Replicated, _) => None,
    }
}
