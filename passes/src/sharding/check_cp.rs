//! Context parallelism has to split attention. A part of the axis that splits neither positions nor heads would repeat what another part
//! computes: Ulysses of fewer heads than ranks.

use crate::sharding::axes::AxisTiers;
use ir::diag::{Diagnostic, Help};
use ir::dim::Dim;
use ir::mesh::Axis;
use ir::op::{Attention, Op};
use ir::options::{CpComm, OptionName};
use ir::sharded::{Placement, Sharded};

/// E0204 for each attention, of those whose positions `cp` is to split, that a part of the axis does not split at all.
pub fn check(s: &Sharded, lists: &AxisTiers) -> Vec<Diagnostic> {
    let body = &s.graph.body;
    let positions: Vec<Dim> = lists.of(Axis::Cp).iter().flatten().map(|d| body.dims.original(*d)).collect();
    let mut out: Vec<Diagnostic> = vec![];
    for v in body.values() {
        let Op::Attention(a) = &body[v].op else { continue };
        let repeats = s.mesh.of(Axis::Cp).any(|u| s.sharding(v)[u] == Placement::Replicated);
        if !repeats || !positions.contains(&body.dims.original(a.at)) {
            continue;
        }
        let mut d = refusal(s, lists, a, body.dims_of(v));
        if let Some(span) = body[v].origin.span {
            d = d.label(span, "this attention");
        }
        if out.iter().all(|o| o.labels != d.labels) {
            out.push(d);
        }
    }
    out
}

fn refusal(s: &Sharded, lists: &AxisTiers, a: &Attention, dims: &[Dim]) -> Diagnostic {
    let all = &s.graph.body.dims;
    let sizes = |of: &mut dyn Iterator<Item = Dim>| of.map(|d| format!("{} = {}", all.name(d), all.size(d))).collect::<Vec<_>>().join(", ");
    let (cp, tp) = (s.mesh.size(Axis::Cp), s.mesh.size(Axis::Tp));
    let by_heads = lists.attention.iter().find(|t| t.0 == Axis::Cp && lists.cp != CpComm::AllToAllAndRing);
    let parts = if tp > 1 { format!("tp * cp = {}", tp * cp) } else { format!("cp = {cp}") };
    let (why, help) = match by_heads {
        Some((_, tiers)) => {
            let heads = sizes(&mut tiers.iter().flatten().copied().filter(|d| dims.contains(d)));
            let what = if heads.is_empty() {
                "it has none of the dims that the plan splits as heads".into()
            } else {
                format!("heads, {heads}, do not divide by {parts}")
            };
            let help = Help::from("`").option(OptionName::CpComm).and(" ").cp_comm(CpComm::Ring).and("` and `").cp_comm(CpComm::AllGather);
            (what, help.and("` split positions alone, `").cp_comm(CpComm::AllToAllAndRing).and("` heads as far as they go"))
        }
        None => (
            format!("positions, {}, do not divide by {parts}", sizes(&mut [a.at].into_iter())),
            "a sequence that all axes divide which split it, or fewer ranks".into(),
        ),
    };
    Diagnostic::error("E0204", format!("attention cannot be split over axis `cp` = {cp}: {why}")).help(help)
}
