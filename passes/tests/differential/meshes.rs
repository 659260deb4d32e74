//! Every mesh that fits 8 ranks, and what goes with it.

use crate::harness::Case;
use ir::options::{CpComm, Zero};

/// Ranks that a mesh may have.
const MOST: u64 = 8;

/// Every way to lay at most [`MOST`] ranks out: sizes of axes, sequence parallelism, how attention gets at keys, the grid of experts if
/// there are any, what data-parallel ranks share out, virtual stages. Two microbatches per pipeline stage.
pub fn meshes(has_experts: bool) -> Vec<Case> {
    let divisors = |n: u64| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut out = vec![];
    for ranks in 1..=MOST {
        for dp in divisors(ranks) {
            for cp in divisors(ranks / dp) {
                for tp in divisors(ranks / dp / cp) {
                    let pp = ranks / dp / cp / tp;
                    let global_batch = 2 * pp * dp;
                    spread(Case { dp, cp, tp, pp, global_batch, ..Case::default() }, has_experts, &mut out);
                }
            }
        }
    }
    out
}

/// A mesh with all that may go with it.
fn spread(mesh: Case, has_experts: bool, out: &mut Vec<Case>) {
    let stage = mesh.dp * mesh.cp * mesh.tp;
    let if_many = |n: u64, count: usize| if n > 1 { count } else { 1 };
    let grids = (1..=stage).flat_map(|ep| (1..=stage / ep).map(move |etp| (ep, etp))).filter(|(ep, etp)| stage.is_multiple_of(ep * etp));
    let grids: Vec<(u64, Option<u64>)> = if has_experts { grids.map(|(ep, etp)| (ep, Some(etp))).collect() } else { vec![(1, None)] };
    for sp in &[false, true][..if_many(mesh.tp, 2)] {
        for cp_comm in &[CpComm::Ring, CpComm::AllGather, CpComm::AllToAll, CpComm::AllToAllAndRing][..if_many(mesh.cp, 4)] {
            for zero in &Zero::ALL[..if_many(mesh.dp * mesh.cp, 4)] {
                for vpp in &[None, Some(2)][..if_many(mesh.pp, 2)] {
                    for (ep, etp) in &grids {
                        out.push(Case { sp: *sp, cp_comm: *cp_comm, zero: *zero, vpp: *vpp, ep: *ep, etp: *etp, ..mesh.clone() });
                    }
                }
            }
        }
    }
}

/// A list in a fixed order that mixes all kinds, so that its first elements stand for it.
pub fn mixed<T>(list: Vec<T>) -> Vec<T> {
    let stream = ir::random::stream(ir::random::key("meshes"), 1, 0);
    let mut order: Vec<(f64, T)> = (0..).map(|i| ir::random::uniform(stream, i)).zip(list).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    order.into_iter().map(|(_, x)| x).collect()
}
