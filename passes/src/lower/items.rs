//! The order in which a chunk's nodes and groups become commands.

use super::LocalLowering;
use crate::local::role::{Role, role};
use ir::graph::Value;
use ir::local::Chunk;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A unit of work that becomes commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WorkItem {
    Group(usize),
    Node(Value),
}

impl LocalLowering<'_, '_, '_> {
    /// The items of a chunk, each after those it needs, otherwise in graph order; exchanges keep their order.
    pub(super) fn order(&self, chunk: Chunk) -> Vec<WorkItem> {
        let body = &self.local.body;
        let items = |v: Value| match (self.groups_of.get(&v), role(body, v)) {
            (Some(groups), _) => groups.iter().map(|g| WorkItem::Group(*g)).collect(),
            (None, Role::Alias | Role::Exchange | Role::Source) => vec![WorkItem::Node(v)],
            (None, Role::Compute | Role::Inline) => vec![],
        };
        // `stored` gives the items that store a value; for a sum, those of all its terms.
        let stored = |a: Value| {
            let (mut out, mut stack) = (vec![], vec![a]);
            while let Some(a) = stack.pop() {
                match self.added.adds.contains(&a) {
                    true => stack.extend(body[a].args.iter().filter(|a| self.local.chunks[a.index()] == chunk)),
                    false => out.push(items(a)),
                }
            }
            out
        };
        let mut needs: BTreeMap<WorkItem, BTreeSet<WorkItem>> = BTreeMap::new();
        let mut last_exchange = None;
        for v in body.values().filter(|v| self.local.chunks[v.index()] == chunk) {
            let made: Vec<Vec<WorkItem>> = body[v].args.iter().filter(|a| self.local.chunks[a.index()] == chunk).flat_map(|a| stored(*a)).collect();
            for own in items(v) {
                let set = needs.entry(own).or_default();
                set.extend(made.iter().filter(|m| !m.contains(&own)).filter_map(|m| m.first()));
                let here = self.predicates[v.index()].filter(|bool| self.local.chunks[bool.index()] == chunk);
                let earlier = self.added.before.get(&v).copied().into_iter().chain(here);
                set.extend(earlier.filter_map(|e| items(e).first().copied()));
                if role(body, v) == Role::Exchange {
                    set.extend(last_exchange);
                    last_exchange = Some(own);
                }
            }
        }
        let key = |i: &WorkItem| match i {
            WorkItem::Group(g) => self.groups[*g].nodes[0].0,
            WorkItem::Node(v) => v.0,
        };
        let mut blocks: BTreeMap<WorkItem, Vec<WorkItem>> = BTreeMap::new();
        let mut open: BTreeMap<WorkItem, usize> = BTreeMap::new();
        let mut ready = BinaryHeap::new();
        for (i, set) in &needs {
            open.insert(*i, set.len());
            set.iter().for_each(|d| blocks.entry(*d).or_default().push(*i));
            if set.is_empty() {
                ready.push(std::cmp::Reverse((key(i), *i)));
            }
        }
        let mut out = vec![];
        while let Some(std::cmp::Reverse((_, i))) = ready.pop() {
            out.push(i);
            for next in blocks.remove(&i).unwrap_or_default() {
                let left = open.get_mut(&next).expect("invariant: every item is open");
                *left -= 1;
                if *left == 0 {
                    ready.push(std::cmp::Reverse((key(&next), next)));
                }
            }
        }
        assert_eq!(out.len(), needs.len(), "invariant: fusion keeps the graph acyclic");
        out
    }
}
