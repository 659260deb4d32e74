//! What may be left out of a run: a term of a sum, where the bool that chooses it is false, and whatever only such
//! terms read. So passes of rows of experts that have no rows cost nothing.
//!
//! It follows from who reads what, backwards from the terms ([`InPlaceSums::only_if`]). A collective is left out only if all
//! its members have the same bool, which is so if that is computed of what these ranks have in common.

use super::added::{InPlaceSums, is_before};
use crate::local::role::{Role, role, roots};
use ir::graph::Value;
use ir::local::Local;
use ir::mesh::SubAxis;
use ir::op::{Collective, Op};

/// Per value, the bool that must be true for the value to be needed.
pub fn predicates(local: &Local, added: &InPlaceSums) -> Vec<Option<Value>> {
    let (body, users, roots) = (&local.body, local.body.users(), roots(local));
    let mut out: Vec<Option<Value>> = vec![None; body.nodes.len()];
    if added.only_if.is_empty() {
        return out;
    }
    for v in body.values().rev() {
        let by = match added.only_if.get(&v) {
            Some(bool) => ir::fault!("predicates.term.always", None, Some(*bool)),
            // The predicate is on the chosen term; the select itself and its bool have none.
            None if added.adds.contains(&v) && body[v].op == Op::Select => None,
            None if roots.contains(&v) || local.accumulate[v.index()] => None,
            None => {
                let mut readers = users[v.index()].iter().map(|(c, _)| out[c.index()]).rev();
                let last = readers.next().flatten();
                last.filter(|_| ir::fault!("predicates.readers.last", true, readers.all(|p| p == last)))
            }
        };
        out[v.index()] = by.filter(|bool| {
            let agrees = match (role(body, v), &body[v].op) {
                (Role::Compute | Role::Alias, _) => true,
                (Role::Exchange, Op::Collective { subs, stages: None, .. }) => is_common(local, *bool, subs),
                (Role::Exchange | Role::Inline | Role::Source, _) => false,
            };
            is_before(local, *bool, v) && agrees
        });
    }
    out
}

/// Whether ranks that differ along these axes alone have the same value.
fn is_common(local: &Local, v: Value, subs: &[SubAxis]) -> bool {
    let node = &local.body[v];
    match &node.op {
        Op::Const(_) => true,
        Op::Collective { kind: Collective::AllReduce(_), subs: over, stages: None, .. } => subs.iter().all(|u| over.contains(u)),
        Op::Binary(_) | Op::Compare(_) | Op::Unary(_) | Op::Select | Op::Cast | Op::Expand | Op::View { .. } => {
            node.args.iter().all(|a| is_common(local, *a, subs))
        }
        _ => false,
    }
}
