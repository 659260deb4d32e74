//! Results that their readers compute again instead of reading them.
//!
//! A pointwise function of values that are in memory anyway need not be stored, if kernels of loops alone read it, over its own dims, and
//! what it is a function of is no more to read than itself: then arithmetic takes the place of a pass over memory. So the product that makes
//! the gradient of a norm's result stores that alone, and not its product with the norm's weights as well.

use super::Fusion;
use crate::local::role::{Role, role};
use ir::dim::Dim;
use ir::graph::Value;
use ir::op::Op;
use std::collections::BTreeSet;

impl Fusion<'_> {
    /// Gives nodes to the groups that read them, from the last node to the first, so that a chain of them goes as one.
    pub(super) fn compute_again(&mut self) {
        for v in self.body.values().rev() {
            let Some(own) = self.of[v.index()].filter(|g| self.groups[*g].live) else { continue };
            let readers = self.readers(v);
            let pays = self.body[v].op.is_pointwise()
                && self.groups[own].at.0.is_pass()
                && !self.kept[v.index()]
                && !readers.is_empty()
                && self.body[v].args.iter().all(|a| self.is_in_memory(*a, own))
                && readers.iter().all(|g| self.reads_no_more(*g, v, own));
            if !pays {
                continue;
            }
            if !self.users[v.index()].iter().any(|(c, _)| self.groups[own].nodes.contains(c)) {
                self.groups[own].nodes.remove(&v);
                self.groups[own].live = !self.groups[own].nodes.is_empty();
                self.holders[v.index()].clear();
            }
            for g in &readers {
                self.groups[*g].nodes.insert(v);
            }
            self.holders[v.index()].extend(readers);
        }
    }

    /// Whether a group stores a value that it computes.
    pub(super) fn stores(&self, group: usize, v: Value) -> bool {
        self.of[v.index()] == Some(group)
            && (ir::fault!("fuse.stores.kept", false, self.kept[v.index()]) || self.users[v.index()].is_empty() || !self.readers(v).is_empty())
    }

    /// Groups that use a value and do not compute it.
    fn readers(&self, v: Value) -> BTreeSet<usize> {
        let users = self.users[v.index()].iter().flat_map(|(c, _)| &self.holders[c.index()]);
        users.copied().filter(|g| !self.groups[*g].nodes.contains(&v)).collect()
    }

    /// Whether a value that a group uses is a constant or the like, or stored. Random numbers cost more than to read what they decide.
    fn is_in_memory(&self, a: Value, group: usize) -> bool {
        let random = matches!(self.body[a].op, Op::Uniform { .. });
        !random && (!self.groups[group].nodes.contains(&a) || self.stores(group, a))
    }

    /// Whether a group of loops that reads a value of another group could compute it, and would read no more bytes then.
    fn reads_no_more(&self, group: usize, v: Value, own: usize) -> bool {
        let (body, draft) = (self.body, &self.groups[group]);
        let domain: BTreeSet<Dim> = draft.nodes.iter().flat_map(|n| body.dims_of(*n).iter().chain(body[*n].op.over())).copied().collect();
        let looked_up = |n: &Value| matches!(body[*n].op, Op::Gather { .. }) && body[*n].args[0] == v;
        if draft.anchor.is_some() || draft.at != self.groups[own].at || draft.nodes.iter().any(looked_up) {
            return false;
        }
        let read: BTreeSet<Value> = draft.nodes.iter().flat_map(|n| &body[*n].args).copied().collect();
        let bytes = |v: Value| body.elements(v) * body[v].ty.dtype.bytes();
        // Small operands, such as rows and columns, come from caches and do not count.
        let large = |a: &Value| role(body, *a) != Role::Inline && body.elements(*a) * 8 > body.elements(v);
        let more: BTreeSet<Value> = body[v].args.iter().copied().filter(|a| large(a) && !read.contains(a)).collect();
        body.dims_of(v).iter().copied().collect::<BTreeSet<Dim>>() == domain && more.into_iter().map(bytes).sum::<u64>() <= bytes(v)
    }
}
