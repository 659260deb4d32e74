//! Groups the nodes of a local graph into kernels.
//!
//! A group of loops has one domain (the union of its nodes' dims) and at most one set of reduced dims; every value that leaves
//! it has the whole domain, or the domain without the reduced dims. So a norm, a softmax with its cross entropy, an
//! optimizer update are one kernel each, and a tile of its grid needs nothing of another tile. A contraction takes the
//! pointwise ops that follow it on the same dims. Views, slices and shards are other names for the same memory, and no kernel.

use ir::dim::Dim;
use ir::graph::{Body, Value};
use ir::kernel::Family;
use ir::local::{Chunk, Local};
use ir::op::Op;
use ir::program::Space;
use std::collections::{BTreeSet, HashMap};

/// Nodes of one kernel, in graph order.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub nodes: Vec<Value>,
    pub family: Family,
    pub chunk: Chunk,
    pub space: Space,
    /// Of `nodes`, those that are stored.
    pub outputs: Vec<Value>,
}

/// What becomes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Part of a kernel.
    Compute,
    /// Made anew by every kernel that uses it.
    Inline,
    /// A buffer filled from outside: parameter, state, table, input.
    Source,
    /// The same memory as its operand, if the layout allows.
    Alias,
    /// A collective, a send, a receive, a limit.
    Exchange,
}

pub fn role(body: &Body, v: Value) -> Role {
    match &body[v].op {
        Op::Input(_) | Op::Param(_) | Op::State(..) | Op::Table(_) => Role::Source,
        Op::Const(_) | Op::Iota(_) | Op::Uniform { .. } | Op::Scalar(_) => Role::Inline,
        Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } | Op::Cut | Op::StopGradient => Role::Alias,
        // A permutation that moves only dims of one element moves nothing.
        Op::Expand if is_renumbering(body, v) => Role::Alias,
        Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } | Op::Limit { .. } => Role::Exchange,
        Op::Expand
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Add
        | Op::Cast
        | Op::Pad { .. }
        | Op::Concat { .. }
        | Op::Dot { .. }
        | Op::GroupedDot { .. }
        | Op::Reduce { .. }
        | Op::ArgMax { .. }
        | Op::Cumsum { .. }
        | Op::Gather { .. }
        | Op::Scatter { .. }
        | Op::Attention(_)
        | Op::AttentionLse(_)
        | Op::AttentionGrad(..) => Role::Compute,
        Op::Dispatch(_) | Op::Combine(_) => unreachable!("invariant: local graphs have rows, or gathers and scatters"),
        Op::Reshard { .. } => unreachable!("invariant: the local level has collectives, not reshards"),
    }
}

fn is_renumbering(body: &Body, v: Value) -> bool {
    let long = |dims: &[Dim]| dims.iter().copied().filter(|d| body.dims.size(*d) != 1).collect::<Vec<_>>();
    let arg = body[v].args[0];
    body.dims_of(arg).len() == body.dims_of(v).len() && long(body.dims_of(arg)) == long(body.dims_of(v))
}

/// The groups of a local graph, in an order in which every group follows those it reads.
pub fn fuse(local: &Local) -> Vec<Group> {
    let body = &local.body;
    let mut f = Fusion {
        body,
        users: body.users(),
        kept: kept(local),
        groups: vec![],
        of: HashMap::new(),
        direct: vec![],
        after: vec![],
        aliased: vec![],
        last_exchange: HashMap::new(),
    };
    for v in body.values() {
        match role(body, v) {
            Role::Compute => f.add(v, (local.chunks[v.index()], local.space(v))),
            Role::Exchange => f.exchange(v, local.chunks[v.index()]),
            Role::Inline | Role::Source | Role::Alias => {}
        }
    }
    f.finish()
}

/// Values that must be stored whoever uses them.
fn kept(local: &Local) -> Vec<bool> {
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
        let exchange = matches!(role(body, v), Role::Exchange | Role::Alias);
        for a in &body[v].args {
            if exchange || local.chunks[a.index()] != local.chunks[v.index()] {
                kept[a.index()] = true;
            }
        }
    }
    kept
}

/// A set of small numbers.
#[derive(Clone, Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    /// Whether it is new.
    fn insert(&mut self, k: usize) -> bool {
        if self.0.len() <= k / 64 {
            self.0.resize(k / 64 + 1, 0);
        }
        let new = !self.contains(k);
        self.0[k / 64] |= 1 << (k % 64);
        new
    }

    /// Whether it was there.
    fn remove(&mut self, k: usize) -> bool {
        let was = self.contains(k);
        if was {
            self.0[k / 64] &= !(1 << (k % 64));
        }
        was
    }

    fn contains(&self, k: usize) -> bool {
        self.0.get(k / 64).is_some_and(|w| w >> (k % 64) & 1 == 1)
    }

    fn extend(&mut self, other: &Bits) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a |= b;
        }
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(k, w)| (0..64).filter(move |b| w >> b & 1 == 1).map(move |b| k * 64 + b))
    }
}

struct Draft {
    nodes: BTreeSet<Value>,
    /// When and where it runs.
    at: (Chunk, Space),
    anchor: Option<Value>,
    /// A kernel of its own: not merged into another one, and not an exchange.
    live: bool,
}

struct Fusion<'a> {
    body: &'a Body,
    users: Vec<Vec<(Value, usize)>>,
    kept: Vec<bool>,
    groups: Vec<Draft>,
    of: HashMap<Value, usize>,
    /// For each group, those whose values it reads, as they are or through views.
    direct: Vec<BTreeSet<usize>>,
    /// For each group, those that it reads, directly or not.
    after: Vec<Bits>,
    /// For each group, those of which it reads another view: they must be in memory before it begins.
    aliased: Vec<Bits>,
    /// Exchanges of a chunk happen in graph order: each waits for the one before.
    last_exchange: HashMap<Chunk, usize>,
}

impl Fusion<'_> {
    /// An exchange takes part as a group that nothing joins, so that no kernel is on both of its sides, or on both sides of its order.
    fn exchange(&mut self, v: Value, chunk: Chunk) {
        let mut direct = self.direct(&self.body[v].args);
        let own = self.groups.len();
        direct.extend(self.last_exchange.insert(chunk, own));
        let reads = self.reads(&direct);
        self.of.insert(v, own);
        self.groups.push(Draft { nodes: [v].into(), at: (chunk, Space::Device), anchor: None, live: false });
        self.direct.push(direct);
        self.after.push(reads);
        self.aliased.push(Bits::default());
    }

    fn add(&mut self, v: Value, at: (Chunk, Space)) {
        let anchor = is_anchor(&self.body[v].op);
        // The groups whose values it reads without a detour, latest first.
        let mut near: Vec<usize> = self.body[v].args.iter().filter_map(|a| self.of.get(a).copied()).collect();
        near.sort_unstable_by(|a, b| b.cmp(a));
        near.dedup();
        near.retain(|g| self.groups[*g].live && self.groups[*g].at == at);
        let mut candidates: Vec<Vec<usize>> = vec![];
        if anchor {
            candidates.extend(self.siblings(v).map(|g| vec![g]));
        } else {
            if near.len() > 1 {
                candidates.push(near.clone());
            }
            candidates.extend(near.iter().map(|g| vec![*g]));
        }
        let direct = self.direct(&self.body[v].args);
        let reads = self.reads(&direct);
        let views: Vec<Value> = self.body[v].args.iter().copied().filter(|a| !self.of.contains_key(a)).collect();
        let aliased = self.reads(&self.direct(&views));
        for merged in candidates {
            if self.fits(&merged, v, &direct, &aliased) {
                let into = merged[0];
                for g in &merged[1..] {
                    let nodes = std::mem::take(&mut self.groups[*g].nodes);
                    for n in &nodes {
                        self.of.insert(*n, into);
                    }
                    self.groups[into].nodes.extend(nodes);
                    self.groups[into].anchor = self.groups[into].anchor.or(self.groups[*g].anchor);
                    self.groups[*g].live = false;
                    let own = std::mem::take(&mut self.direct[*g]);
                    self.direct[into].extend(own);
                    for set in &mut self.direct {
                        if set.remove(g) {
                            set.insert(into);
                        }
                    }
                    for sets in [&mut self.after, &mut self.aliased] {
                        let own = std::mem::take(&mut sets[*g]);
                        sets[into].extend(&own);
                        for set in sets {
                            if set.remove(*g) {
                                set.insert(into);
                            }
                        }
                    }
                }
                self.groups[into].nodes.insert(v);
                self.direct[into].extend(direct);
                self.after[into].extend(&reads);
                self.aliased[into].extend(&aliased);
                for g in &merged {
                    self.direct[into].remove(g);
                    self.after[into].remove(*g);
                }
                // Whoever reads the group now also follows what it has come to read.
                let more = self.after[into].clone();
                for a in &mut self.after {
                    if a.contains(into) {
                        a.extend(&more);
                    }
                }
                self.of.insert(v, into);
                return;
            }
        }
        self.of.insert(v, self.groups.len());
        self.groups.push(Draft { nodes: [v].into(), at, anchor: anchor.then_some(v), live: true });
        self.direct.push(direct);
        self.after.push(reads);
        self.aliased.push(aliased);
    }

    /// Groups that make these values, or what they are views of.
    fn direct(&self, values: &[Value]) -> BTreeSet<usize> {
        let mut out = BTreeSet::new();
        let mut stack = values.to_vec();
        while let Some(a) = stack.pop() {
            match self.of.get(&a) {
                Some(g) => drop(out.insert(*g)),
                None => stack.extend(&self.body[a].args),
            }
        }
        out
    }

    /// These groups and all that they read.
    fn reads(&self, direct: &BTreeSet<usize>) -> Bits {
        let mut out = Bits::default();
        for g in direct {
            if out.insert(*g) {
                out.extend(&self.after[*g]);
            }
        }
        out
    }

    /// A group that already computes another result of the same attention.
    fn siblings(&self, v: Value) -> impl Iterator<Item = usize> {
        let node = &self.body[v];
        let same = |w: Value| match (&self.body[w].op, &node.op) {
            (Op::Attention(a), Op::AttentionLse(b)) => {
                let args = &self.body[w].args;
                a == b && args[..2] == node.args[..2] && a.positions(args) == b.positions(&node.args)
            }
            (Op::AttentionGrad(a, _), Op::AttentionGrad(b, _)) => a == b && self.body[w].args == node.args,
            _ => false,
        };
        // Each result once: what is computed twice, for another reader, is a kernel of its own.
        let again = |g: &Draft| g.nodes.iter().any(|w| self.body[*w].op == node.op);
        self.groups.iter().enumerate().rev().find(|(_, g)| g.live && g.anchor.is_some_and(same) && !again(g)).map(|(k, _)| k).into_iter()
    }

    fn fits(&self, merged: &[usize], v: Value, direct: &BTreeSet<usize>, aliased: &Bits) -> bool {
        let views = |set: &Bits| merged.iter().any(|g| set.contains(*g));
        if views(aliased) || merged.iter().any(|g| views(&self.aliased[*g])) {
            return false;
        }
        // No group in between: what v or a merged group reads must not itself read a merged group. It is enough to ask those that they read
        // directly: through one that is in between leads a way that begins with such a one, or with a merged one, whose own way it is.
        let between = |set: &BTreeSet<usize>| set.iter().any(|g| !merged.contains(g) && merged.iter().any(|h| self.after[*g].contains(*h)));
        if between(direct) || merged.iter().any(|g| between(&self.direct[*g])) {
            return false;
        }
        let at = self.groups[merged[0]].at;
        if merged.iter().any(|g| self.groups[*g].at != at) {
            return false;
        }
        let mut nodes: BTreeSet<Value> = merged.iter().flat_map(|g| self.groups[*g].nodes.iter().copied()).collect();
        let anchors: Vec<Value> = merged.iter().filter_map(|g| self.groups[*g].anchor).collect();
        nodes.insert(v);
        if is_anchor(&self.body[v].op) {
            return anchors.len() == 1 && merged.len() == 1;
        }
        // A table that is looked up must be in memory.
        if let Op::Gather { .. } = self.body[v].op
            && nodes.contains(&self.body[v].args[0])
        {
            return false;
        }
        match anchors.as_slice() {
            [] => self.loops(&nodes).is_some(),
            [anchor] => self.epilogue(&nodes, *anchor),
            _ => false,
        }
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
    fn loops(&self, nodes: &BTreeSet<Value>) -> Option<Vec<Dim>> {
        let body = self.body;
        let mut domain: BTreeSet<Dim> = BTreeSet::new();
        let mut reduced: Option<BTreeSet<Dim>> = None;
        for n in nodes {
            domain.extend(body.dims_of(*n));
            let over: BTreeSet<Dim> = match &body[*n].op {
                Op::Reduce { over, .. } => over.iter().copied().collect(),
                Op::ArgMax { over } | Op::Cumsum { over, .. } => [*over].into(),
                _ => continue,
            };
            domain.extend(&over);
            match &reduced {
                None => reduced = Some(over),
                Some(r) if *r == over => {}
                Some(_) => return None,
            }
        }
        let reduced = reduced.unwrap_or_default();
        let inner: BTreeSet<Dim> = &domain - &reduced;
        for n in nodes.iter().filter(|n| self.leaves(nodes, **n)) {
            let dims: BTreeSet<Dim> = body.dims_of(*n).iter().copied().collect();
            if dims != domain && dims != inner {
                return None;
            }
        }
        let mut grid: Vec<Dim> = vec![];
        for n in nodes.iter().filter(|n| self.leaves(nodes, **n)) {
            for d in body.dims_of(*n) {
                if inner.contains(d) && !grid.contains(d) {
                    grid.push(*d);
                }
            }
        }
        Some(grid)
    }

    /// Whether a value is used outside of the group.
    fn leaves(&self, nodes: &BTreeSet<Value>, v: Value) -> bool {
        self.kept[v.index()] || self.users[v.index()].is_empty() || self.users[v.index()].iter().any(|(c, _)| !nodes.contains(c))
    }

    fn finish(self) -> Vec<Group> {
        let mut order: Vec<usize> = vec![];
        let mut done = vec![false; self.groups.len()];
        // Groups were opened in graph order; a group waits for those it reads.
        fn visit(g: usize, f: &Fusion, done: &mut [bool], order: &mut Vec<usize>) {
            if !done[g] {
                done[g] = true;
                for h in f.after[g].iter() {
                    visit(h, f, done, order);
                }
                order.push(g);
            }
        }
        for g in 0..self.groups.len() {
            if self.groups[g].live {
                visit(g, &self, &mut done, &mut order);
            }
        }
        order
            .into_iter()
            .filter(|g| self.groups[*g].live)
            .map(|g| {
                let draft = &self.groups[g];
                let family = match draft.anchor.map(|a| &self.body[a].op) {
                    None => Family::Loops { grid: self.loops(&draft.nodes).expect("invariant: the group was checked") },
                    Some(Op::Scatter { .. }) => Family::Scatter,
                    Some(Op::Attention(_) | Op::AttentionLse(_)) => Family::Attention,
                    Some(Op::AttentionGrad(..)) => Family::AttentionGrad,
                    Some(_) => Family::Gemm,
                };
                let outputs = draft.nodes.iter().copied().filter(|v| self.leaves(&draft.nodes, *v)).collect();
                Group { nodes: draft.nodes.iter().copied().collect(), family, chunk: draft.at.0, space: draft.at.1, outputs }
            })
            .collect()
    }
}

fn is_anchor(op: &Op) -> bool {
    matches!(op, Op::Dot { .. } | Op::GroupedDot { .. } | Op::Scatter { .. } | Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..))
}
