//! Products that are only added up: each adds to the buffer of their sum, and no term has one of its own. So the
//! gradient of a head's weights, whose terms are those of chunks of tokens, takes the memory of one.

use super::LocalLowering;
use crate::local::role::roots;
use crate::lower::kernels::Target;
use ir::graph::{Body, Users, Value};
use ir::local::Local;
use ir::mesh::Axis;
use ir::op::{DType, Op};
use std::collections::{BTreeSet, HashMap};

/// Sums of products that a step leaves.
#[derive(Default)]
pub struct Sums {
    /// The sum of each product.
    pub of: HashMap<Value, Value>,
    /// The additions, which no kernel makes.
    pub adds: BTreeSet<Value>,
}

/// Those of a graph: what a pass of a microbatch adds up, and leaves to what a step does once.
pub fn sums(local: &Local) -> Sums {
    let (body, users, roots) = (&local.body, local.body.users(), roots(local));
    let mut out = Sums::default();
    for v in body.values().rev().filter(|v| body[*v].op == Op::Add && !out.adds.contains(v)).collect::<Vec<_>>() {
        let (mut adds, mut terms) = (BTreeSet::new(), vec![]);
        if !roots.contains(&v) && is_left(local, &users, v) && collect(local, &users, v, &mut adds, &mut terms) {
            out.of.extend(terms.into_iter().map(|t| (t, v)));
            out.adds.extend(adds);
        }
    }
    out
}

/// Whether a value of a pass is read by what a step does once alone, as a sum over microbatches or as of the only one.
fn is_left(local: &Local, users: &Users, v: Value) -> bool {
    let own = local.chunks[v.index()];
    let lasts = local.accumulate[v.index()] || local.mesh.size(Axis::Microbatch) == 1;
    let used = &users[v.index()];
    own.is_pass() && lasts && !used.is_empty() && used.iter().all(|(c, _)| !local.chunks[c.index()].per_microbatch())
}

/// The additions and the products that a value is made of: to the first two, which come in order, one by one those
/// behind. False if it is made of anything else.
fn collect(local: &Local, users: &Users, v: Value, adds: &mut BTreeSet<Value>, terms: &mut Vec<Value>) -> bool {
    let body: &Body = &local.body;
    let node = &body[v];
    if node.ty.dtype != DType::F32 || node.ty.dims.is_empty() || local.host.contains(&v) {
        return false;
    }
    adds.insert(v);
    let &[before, last] = node.args.as_slice() else { return false };
    let in_order = before < last && !matches!(body[last].op, Op::Add);
    in_order
        && [before, last].iter().all(|a| {
            let alone = users[a.index()].len() == 1 && !local.accumulate[a.index()] && local.chunks[a.index()] == local.chunks[v.index()];
            let is_product = matches!(body[*a].op, Op::Dot { .. }) && body.is_matrix_product(*a) && !local.host.contains(a);
            match &body[*a].op {
                _ if !alone || body[*a].ty != node.ty => false,
                Op::Add => collect(local, users, *a, adds, terms),
                _ if is_product => {
                    terms.push(*a);
                    true
                }
                _ => false,
            }
        })
}

impl LocalLowering<'_, '_, '_> {
    /// Where a product is added to its sum; the first one of a microbatch is its beginning, unless that is zero.
    pub(super) fn added_to(&mut self, term: Value, sum: Value) -> Target {
        let summed = self.is_summed(sum);
        let known = if summed { self.sums.get(&sum) } else { self.views.get(&sum) }.cloned();
        let accumulate = ir::fault!("lower.added.first", summed, summed || known.is_some());
        let view = known.unwrap_or_else(|| self.sum_buffer(sum));
        let all = if summed { &mut self.sums } else { &mut self.views };
        all.insert(sum, view.clone());
        Target { value: term, view, accumulate }
    }
}
