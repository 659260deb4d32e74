//! Groups the nodes of a local graph into kernels.
//!
//! A group of loops has one domain (the union of its nodes' dims) and at most one set of reduced dims; every value that leaves
//! it has the whole domain, or the domain without the reduced dims. So a norm, a softmax with its cross entropy, an
//! optimizer update are one kernel each, and a tile of its grid needs nothing of another tile. A contraction takes the
//! pointwise ops that follow it on the same dims. What its readers compute as well as read is not stored ([`duplicate`]). Views, slices and shards are other names for the same memory, and no kernel.

mod duplicate;
mod order;

use super::added::InPlaceSums;
use crate::local::role::{MAX_NODES, MAX_OPERANDS, Role, role};
use ir::dim::Dim;
use ir::graph::{Body, Users, Value};
use ir::kernel::Family;
use ir::local::{Chunk, Local};
use ir::op::{AttentionGrad, Op, OpKind};
use ir::program::Space;
use order::GroupOrder;
use std::collections::{BTreeSet, HashMap};

/// Nodes of one kernel, in graph order.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Values of the local graph that it computes.
    pub nodes: Vec<Value>,
    /// What form the kernel has; dims of a grid are the local graph's.
    pub family: Family,
    /// When it runs, which is the same for all its nodes.
    pub chunk: Chunk,
    /// Whether the device or the host computes it.
    pub space: Space,
    /// The bool that must be true for it to run.
    pub predicate: Option<Value>,
    /// Of `nodes`, those that are stored.
    pub outputs: Vec<Value>,
}

/// The groups of a local graph, in an order in which every group follows those it reads. Additions of `added` are no
/// part of any, and no two terms of a sum are part of one. Nodes with different `predicates` are in different groups.
pub fn fuse(local: &Local, added: &InPlaceSums, predicates: &[Option<Value>]) -> Vec<Group> {
    let body = &local.body;
    let mut f = Fusion {
        body,
        users: body.users(),
        kept: kept(local, &added.adds),
        added,
        predicates,
        groups: vec![],
        of: vec![None; body.nodes.len()],
        order: GroupOrder::default(),
        aliased: vec![],
        holders: vec![],
        attends: HashMap::new(),
        last_exchange: HashMap::new(),
    };
    for v in body.values() {
        match role(body, v) {
            Role::Compute if added.adds.contains(&v) => {}
            Role::Compute => f.add(v, (local.chunks[v.index()], local.space(v), predicates[v.index()])),
            Role::Exchange => f.exchange(v, local.chunks[v.index()]),
            Role::Inline | Role::Source | Role::Alias => {}
        }
    }
    f.join_readers();
    f.finish()
}

/// Values that must be stored whatever their users are.
fn kept(local: &Local, added: &BTreeSet<Value>) -> Vec<bool> {
    let body = &local.body;
    let mut kept = vec![false; body.nodes.len()];
    for (_, v) in &local.reports {
        kept[v.index()] = true;
    }
    for u in &local.updates {
        kept[u.new.index()] = true;
        u.states.iter().for_each(|s| kept[s.index()] = true);
    }
    for v in body.values() {
        let exchange = matches!(role(body, v), Role::Exchange | Role::Alias) || added.contains(&v);
        for a in &body[v].args {
            if exchange || local.chunks[a.index()] != local.chunks[v.index()] {
                kept[a.index()] = true;
            }
        }
    }
    kept
}

type ExecutionContext = (Chunk, Space, Option<Value>);

struct GroupDraft {
    nodes: BTreeSet<Value>,
    /// When and where it runs, and under which bool.
    at: ExecutionContext,
    anchor: Option<Value>,
    /// A kernel of its own: not merged into another one, and not an exchange.
    live: bool,
}

struct Fusion<'a> {
    body: &'a Body,
    users: Users,
    kept: Vec<bool>,
    added: &'a InPlaceSums,
    predicates: &'a [Option<Value>],
    groups: Vec<GroupDraft>,
    of: Vec<Option<usize>>,
    order: GroupOrder,
    /// Per group, the groups whose values it reads through a view, which must be in memory before it begins.
    aliased: Vec<BTreeSet<usize>>,
    /// The groups that compute each node, once nodes are grouped: one, unless readers compute it again.
    holders: Vec<BTreeSet<usize>>,
    /// Groups of attention by its queries and keys.
    attends: HashMap<[Value; 2], Vec<usize>>,
    /// Exchanges of a chunk happen in graph order: each waits for the one before.
    last_exchange: HashMap<Chunk, usize>,
}

impl Fusion<'_> {
    /// An exchange takes part as a group that nothing joins, so that no kernel is on both of its sides, or on both sides of its order.
    fn exchange(&mut self, v: Value, chunk: Chunk) {
        let mut direct = self.direct(&self.body[v].args);
        direct.extend(self.last_exchange.insert(chunk, self.groups.len()));
        direct.extend(self.chooses(v));
        self.open(GroupDraft { nodes: [v].into(), at: (chunk, Space::Device, None), anchor: None, live: false }, direct, BTreeSet::new());
    }

    /// A new group of one node.
    fn open(&mut self, draft: GroupDraft, direct: BTreeSet<usize>, aliased: BTreeSet<usize>) {
        for v in &draft.nodes {
            self.of[v.index()] = Some(self.groups.len());
        }
        self.order.push(direct);
        self.groups.push(draft);
        self.aliased.push(aliased);
    }

    /// The group that computes the predicate of a node.
    fn chooses(&self, v: Value) -> Option<usize> {
        self.predicates[v.index()].and_then(|bool| self.of[bool.index()])
    }

    fn add(&mut self, v: Value, at: ExecutionContext) {
        let anchor = is_anchor(self.body, v);
        // `near` holds the groups whose values it reads directly, the latest first.
        let mut near: Vec<usize> = self.body[v].args.iter().filter_map(|a| self.of[a.index()]).collect();
        near.sort_unstable_by(|a, b| b.cmp(a));
        near.dedup();
        near.retain(|g| self.groups[*g].live && self.groups[*g].at == at);
        let mut candidates: Vec<Vec<usize>> = vec![];
        if anchor {
            candidates.extend(self.sibling(v).map(|g| vec![g]));
        } else {
            if near.len() > 1 {
                candidates.push(near.clone());
            }
            candidates.extend(near.iter().map(|g| vec![*g]));
        }
        let mut direct = self.direct(&self.body[v].args);
        direct.extend(self.added.before.get(&v).and_then(|term| self.of[term.index()]));
        direct.extend(self.chooses(v));
        let views: Vec<Value> = self.body[v].args.iter().copied().filter(|a| self.of[a.index()].is_none()).collect();
        let aliased = self.direct(&views);
        match candidates.into_iter().find(|merged| self.fits(merged, v, &direct, &aliased)) {
            Some(merged) => self.join(v, &merged, direct, aliased),
            None => {
                if let Op::Attention(_) | Op::AttentionGrad(..) = self.body[v].op {
                    self.attends.entry(attended(self.body, v)).or_default().push(self.groups.len());
                }
                self.open(GroupDraft { nodes: [v].into(), at, anchor: anchor.then_some(v), live: true }, direct, aliased);
            }
        }
    }

    /// Puts a node into the first of these groups, and the others as well.
    fn join(&mut self, v: Value, merged: &[usize], direct: BTreeSet<usize>, aliased: BTreeSet<usize>) {
        let into = merged[0];
        for g in &merged[1..] {
            let nodes = std::mem::take(&mut self.groups[*g].nodes);
            for n in &nodes {
                self.of[n.index()] = Some(into);
            }
            self.groups[into].nodes.extend(nodes);
            self.groups[into].anchor = self.groups[into].anchor.or(self.groups[*g].anchor);
            self.groups[*g].live = false;
            for reader in self.order.readers(*g) {
                if self.aliased[*reader].remove(g) {
                    self.aliased[*reader].insert(into);
                }
            }
            let own = std::mem::take(&mut self.aliased[*g]);
            self.aliased[into].extend(own);
        }
        self.groups[into].nodes.insert(v);
        self.of[v.index()] = Some(into);
        self.aliased[into].extend(aliased);
        self.order.merge(merged, direct);
    }

    /// Joins groups of pointwise ops with others that read them. A node comes to a group that holds no node after it, so
    /// values that later nodes read keep it out; now these are known. Sums stay apart: those of one kernel would wait
    /// for each other.
    fn join_readers(&mut self) {
        for reader in 0..self.groups.len() {
            while self.groups[reader].live && self.is_pointwise(reader) {
                let Some(&v) = self.groups[reader].nodes.first() else { break };
                let fits =
                    |g: &&usize| self.groups[**g].live && self.is_pointwise(**g) && self.fits(&[reader, **g], v, &BTreeSet::new(), &BTreeSet::new());
                let Some(read) = self.order.direct(reader).iter().find(fits).copied() else { break };
                self.join(v, &[reader, read], BTreeSet::new(), BTreeSet::new());
            }
        }
    }

    /// Whether a group has neither a contraction nor a reduction.
    fn is_pointwise(&self, group: usize) -> bool {
        let draft = &self.groups[group];
        draft.anchor.is_none() && draft.nodes.iter().all(|n| self.body[*n].op.over().is_empty())
    }

    /// Groups that make these values, or what they are views of.
    fn direct(&self, values: &[Value]) -> BTreeSet<usize> {
        let mut out = BTreeSet::new();
        let mut stack = values.to_vec();
        while let Some(a) = stack.pop() {
            match self.of[a.index()] {
                Some(g) => drop(out.insert(g)),
                None => stack.extend(&self.body[a].args),
            }
        }
        out
    }

    /// A group that already computes another result of the same attention.
    fn sibling(&self, v: Value) -> Option<usize> {
        let node = &self.body[v];
        let same = |w: Value| match (&self.body[w].op, &node.op) {
            (Op::Attention(a), Op::AttentionLse(b)) => {
                let args = &self.body[w].args;
                a.without_values() == *b && args[..2] == node.args[..2] && a.further(args) == b.further(&node.args)
            }
            // The gradient of a bias has an element per pair, the other ones per row.
            (Op::AttentionGrad(_, AttentionGrad::Bias), _) | (_, Op::AttentionGrad(_, AttentionGrad::Bias)) => false,
            (Op::AttentionGrad(a, _), Op::AttentionGrad(b, _)) => a == b && self.body[w].args == node.args,
            _ => false,
        };
        // A kernel computes each result once; a second computation for another reader is a kernel of its own.
        let again = |g: &GroupDraft| g.nodes.iter().any(|w| self.body[*w].op == node.op);
        let fits = |k: &usize| self.groups[*k].anchor.is_some_and(same) && !again(&self.groups[*k]);
        let alike = matches!(node.op, Op::AttentionLse(_) | Op::AttentionGrad(..)).then(|| self.attends.get(&attended(self.body, v)));
        alike??.iter().copied().rev().find(fits)
    }

    /// Whether a node can be in one kernel with these groups.
    fn fits(&self, merged: &[usize], v: Value, direct: &BTreeSet<usize>, aliased: &BTreeSet<usize>) -> bool {
        let views = |set: &BTreeSet<usize>| merged.iter().any(|g| set.contains(g));
        if ir::fault!("fuse.views.joined", false, views(aliased) || merged.iter().any(|g| views(&self.aliased[*g]))) {
            return false;
        }
        let at = self.groups[merged[0]].at;
        if merged.iter().any(|g| self.groups[*g].at != at) || merged.iter().map(|g| self.groups[*g].nodes.len()).sum::<usize>() >= MAX_NODES {
            return false;
        }
        let mut nodes: BTreeSet<Value> = merged.iter().flat_map(|g| self.groups[*g].nodes.iter().copied()).collect();
        let anchors: Vec<Value> = merged.iter().filter_map(|g| self.groups[*g].anchor).collect();
        nodes.insert(v);
        let mut sums: Vec<Value> = nodes.iter().filter_map(|n| self.added.of.get(n).copied()).collect();
        sums.sort_unstable();
        if sums.windows(2).any(|s| s[0] == s[1]) {
            return false;
        }
        // A table that is looked up must be in memory.
        let table = matches!(self.body[v].op, Op::Gather { .. }) && nodes.contains(&self.body[v].args[0]);
        let one_kernel = match anchors.as_slice() {
            _ if is_anchor(self.body, v) => anchors.len() == 1 && merged.len() == 1,
            _ if table => false,
            [] => self.loops(&nodes, &|n| self.leaves(&nodes, n)).is_some(),
            [anchor] => self.epilogue(&nodes, *anchor),
            _ => false,
        };
        // No group in between: what v or a merged group reads must not itself read a merged group.
        one_kernel && self.operands(&nodes) <= MAX_OPERANDS && ir::fault!("fuse.between.ignored", true, !self.order.is_between(merged, direct))
    }

    /// How many values a kernel of these nodes reads and stores.
    fn operands(&self, nodes: &BTreeSet<Value>) -> usize {
        let outside = |a: &Value| !nodes.contains(a) && role(self.body, *a) != Role::Inline;
        let read: BTreeSet<Value> = nodes.iter().flat_map(|n| &self.body[*n].args).copied().filter(outside).collect();
        read.len() + nodes.iter().filter(|n| self.leaves(nodes, **n)).count()
    }

    /// Pointwise ops on the result of a contraction.
    fn epilogue(&self, nodes: &BTreeSet<Value>, anchor: Value) -> bool {
        let dims: BTreeSet<Dim> = self.body.dims_of(anchor).iter().copied().collect();
        matches!(self.body[anchor].op, Op::Dot { .. } | Op::GroupedDot { .. })
            && nodes.iter().filter(|n| **n != anchor).all(|n| {
                let own: BTreeSet<Dim> = self.body.dims_of(*n).iter().copied().collect();
                self.body[*n].op.is_pointwise() && own == dims && self.body.dims_of(*n) == self.body.dims_of(anchor)
            })
    }

    /// The grid of a group of loops, if its nodes can be one.
    fn loops(&self, nodes: &BTreeSet<Value>, leaves: &dyn Fn(Value) -> bool) -> Option<Vec<Dim>> {
        let body = self.body;
        let mut domain: BTreeSet<Dim> = BTreeSet::new();
        let mut common: Option<BTreeSet<Dim>> = None;
        for n in nodes {
            domain.extend(body.dims_of(*n));
            let over: BTreeSet<Dim> = body[*n].op.over().iter().copied().collect();
            if over.is_empty() {
                continue;
            }
            domain.extend(&over);
            match &common {
                None => common = Some(over),
                Some(r) if *r == over => {}
                Some(_) => return None,
            }
        }
        let common = common.unwrap_or_default();
        let inner: BTreeSet<Dim> = &domain - &common;
        let long = |d: &&Dim| body.dims.size(**d) > 1;
        let runs = nodes.iter().any(|n| matches!(body[*n].op, Op::Cumsum { .. }));
        for n in nodes.iter().filter(|n| leaves(**n)) {
            let dims: BTreeSet<Dim> = body.dims_of(*n).iter().copied().collect();
            if dims != domain && dims != inner {
                return None;
            }
            // A sum of rows leaves few grid points, while a value that is not summed has more and is written row by
            // row.
            if dims != inner && !runs && body.dims_of(*n).iter().find(long).is_some_and(|d| common.contains(d)) {
                return None;
            }
        }
        let mut grid: Vec<Dim> = vec![];
        for n in nodes.iter().filter(|n| leaves(**n)) {
            for d in body.dims_of(*n) {
                if inner.contains(d) && !grid.contains(d) {
                    grid.push(*d);
                }
            }
        }
        Some(ir::fault!("fuse.grid.order", vec![], grid))
    }

    /// Whether a value is used outside of the group.
    fn leaves(&self, nodes: &BTreeSet<Value>, v: Value) -> bool {
        self.kept[v.index()] || self.users[v.index()].is_empty() || self.users[v.index()].iter().any(|(c, _)| !nodes.contains(c))
    }

    fn finish(mut self) -> Vec<Group> {
        self.holders = self.of.iter().map(|g| g.iter().copied().filter(|g| self.groups[*g].live).collect()).collect();
        self.compute_again();
        let open: Vec<usize> = (0..self.groups.len()).filter(|g| self.groups[*g].live).collect();
        let order = self.order.list(&open);
        order
            .into_iter()
            .filter(|g| self.groups[*g].live)
            .map(|g| {
                let draft = &self.groups[g];
                let family = match draft.anchor.map(|a| &self.body[a].op) {
                    None => Family::Loops { grid: self.loops(&draft.nodes, &|n| self.stores(g, n)).expect("invariant: the group was checked") },
                    Some(Op::Scatter { .. }) => Family::Scatter,
                    Some(Op::Attention(_) | Op::AttentionLse(_)) => Family::Attention,
                    Some(Op::AttentionGrad(..)) => Family::AttentionGrad,
                    Some(_) => Family::Gemm,
                };
                let outputs = draft.nodes.iter().copied().filter(|v| self.stores(g, *v)).collect();
                let (chunk, space, predicate) = draft.at;
                Group { nodes: draft.nodes.iter().copied().collect(), family, chunk, space, predicate, outputs }
            })
            .collect()
    }
}

/// Queries and keys of an op of attention.
fn attended(body: &Body, v: Value) -> [Value; 2] {
    [body[v].args[0], body[v].args[1]]
}

/// Whether a node makes a kernel of a family other than loops. A dot of factors with the same dims is a reduction.
fn is_anchor(body: &Body, v: Value) -> bool {
    body[v].op.kind() == OpKind::Contraction && !(matches!(body[v].op, Op::Dot { .. }) && body.is_elementwise_dot(v))
}
