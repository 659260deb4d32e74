//! Logits by chunks of tokens: the head's product, softmax, loss and their gradients are computed for some tokens at a
//! time, so that no buffer has all tokens times all words.
//!
//! A chunk's gradients are made while its logits are there, without a second product. So in training all of it runs in
//! the backward pass, and what only reads the loss does too. Results of single tokens are joined; what sums over
//! tokens, as the gradient of the head's weights, is a sum of the chunks' ([`crate::lower`] makes these where their sum
//! lies).
//! (Liger Kernel's fused linear cross entropy, Hsu et al. 2024, does the same for one loss; here it follows from the
//! graph, for whatever is computed of logits token by token.)

mod find;

use crate::local::role::without_dead;
use find::{CutObstacle, LogitsRegion, alike, regions};
use ir::diag::Span;
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Type, Value};
use ir::local::{Chunk, Local};
use ir::op::{Collective, Op};
use ir::sharded::Sharding;
use std::collections::{BTreeSet, HashMap};

/// Logits of a graph that are to be cut, and what became of that.
#[derive(Default)]
pub struct LogitsChunking {
    /// How many were.
    pub done: usize,
    /// Those that could not be cut, in graph order.
    pub whole: Vec<WholeLogits>,
}

/// Logits that stay whole.
pub struct WholeLogits {
    /// Bytes of all of them, on one rank and for one microbatch.
    pub bytes: u64,
    /// Where they are made.
    pub logits: Option<Span>,
    /// What that is due to, and why.
    pub by: Option<Span>,
    /// Why they stay whole, as the label of a diagnostic at `by`.
    pub why: &'static str,
}

/// Cuts the logits of a local graph into so many chunks, or, where nothing is said, where they are large.
pub fn chunk(local: Local, chunks: Option<u64>) -> (Local, LogitsChunking) {
    let (regions, uncut) = regions(&local, chunks);
    let said = |u: &CutObstacle| {
        let (body, ty) = (&local.body, &local.body[u.logits].ty);
        let bytes = body.dims.elements(&ty.dims).saturating_mul(ty.dtype.bytes());
        WholeLogits { bytes, logits: body[u.logits].origin.span, by: body[u.by].origin.span, why: u.why }
    };
    let cut = LogitsChunking { done: regions.len(), whole: uncut.iter().map(said).collect() };
    let local = if regions.is_empty() { local } else { chunked(local, &regions) };
    (local, cut)
}

fn chunked(local: Local, regions: &[LogitsRegion]) -> Local {
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], host: BTreeSet::new(), ..local.clone() };
    let at = moved(&local, regions);
    let mut c = LogitsChunker { old: &local, out, map: vec![None; local.body.nodes.len()], at, first: alike(&local.body) };
    let inside: BTreeSet<Value> = regions.iter().flat_map(|r| &r.nodes).copied().collect();
    let (mut waiting, mut open): (Vec<Value>, Vec<&LogitsRegion>) = (vec![], regions.iter().collect());
    for v in local.body.values() {
        if inside.contains(&v) {
            // A region is emitted after its last node, once its operands are there.
            open.retain(|region| {
                let over = region.nodes.last().is_some_and(|last| *last <= v) && c.has_operands(region);
                if over {
                    c.region(region);
                }
                !over
            });
        } else if c.is_there(v) {
            c.copy(v);
        } else {
            waiting.push(v);
        }
        waiting.retain(|w| {
            let ready = c.is_there(*w);
            if ready {
                c.copy(*w);
            }
            !ready
        });
    }
    let LogitsChunker { mut out, map, .. } = c;
    let new = |v: Value| map[v.index()].expect("invariant: what a step leaves is no value of single tokens");
    out.reports.iter_mut().for_each(|r| r.1 = new(r.1));
    for u in &mut out.updates {
        u.new = new(u.new);
        u.states.iter_mut().for_each(|s| *s = new(*s));
    }
    without_dead(out)
}

/// The chunk in which each node runs. It changes for regions, for values that depend on them in the forward pass, for
/// cheap values that are computed for them alone, and for values that they read from a later pass.
fn moved(local: &Local, regions: &[LogitsRegion]) -> Vec<Chunk> {
    let (body, users) = (&local.body, local.body.users());
    let mut at = local.chunks.clone();
    for region in regions.iter().filter(|r| matches!(r.at, Chunk::Backward(_))) {
        region.nodes.iter().chain(&region.behind).for_each(|v| at[v.index()] = region.at);
        for v in body.values().rev() {
            let own = local.chunks[v.index()];
            let before = own.precedes(region.at) && at[v.index()] == own;
            let cheap =
                body[v].op.is_source() || body[v].op.is_pointwise() || matches!(body[v].op, Op::View { .. } | Op::Slice { .. } | Op::Shard { .. });
            let gathers = matches!(body[v].op, Op::Collective { kind: Collective::AllGather, stages: None, .. });
            let later = |c: Value| at[c.index()] == region.at && local.chunks[c.index()] == own;
            // A value with other readers is kept for the backward pass anyway.
            let alone = !users[v.index()].is_empty() && users[v.index()].iter().all(|(c, _)| later(*c));
            // A value that the region reads from a later pass, as of gradients of weights, has to be computed
            // earlier.
            let awaited = region.at.precedes(at[v.index()]) && users[v.index()].iter().any(|(c, _)| at[c.index()] == region.at);
            if awaited || before && alone && (cheap || gathers) && !local.accumulate[v.index()] {
                at[v.index()] = region.at;
            }
        }
    }
    at
}

struct LogitsChunker<'a> {
    old: &'a Local,
    out: Local,
    map: Vec<Option<Value>>,
    /// When each old node is to run.
    at: Vec<Chunk>,
    /// Per value, the first equal one.
    first: Vec<usize>,
}

impl LogitsChunker<'_> {
    /// Whether all operands of a node are emitted.
    fn is_there(&self, v: Value) -> bool {
        self.old.body[v].args.iter().all(|a| self.map[a.index()].is_some())
    }

    /// Whether all operands of a region are emitted.
    fn has_operands(&self, region: &LogitsRegion) -> bool {
        let read = region.nodes.iter().flat_map(|v| &self.old.body[*v].args);
        read.into_iter().all(|a| region.nodes.contains(a) || self.map[self.read(*a).index()].is_some())
    }

    /// The value that a region reads in place of an operand from outside: if the backward pass recomputes a forward
    /// value that moved there with the logits, the moved one.
    fn read(&self, v: Value) -> Value {
        let first = self.first[v.index()];
        let moved = self.at[first] != self.old.chunks[first] && self.at[first] == self.at[v.index()];
        if moved && self.map[first].is_some() && self.old.body.nodes[first].ty == self.old.body[v].ty { Value(first as u32) } else { v }
    }

    fn get(&self, v: Value) -> Value {
        self.map[v.index()].expect("invariant: operands come first")
    }

    fn copy(&mut self, v: Value) {
        let node = &self.old.body[v];
        let args = node.args.iter().map(|a| self.get(*a)).collect();
        let w = self.push(Node { args, ..node.clone() }, v, self.old.source[v.index()].clone());
        self.out.accumulate[w.index()] = self.old.accumulate[v.index()];
        self.out.reasons[w.index()] = self.old.reasons[v.index()].clone();
        if self.old.host.contains(&v) {
            self.out.host.insert(w);
        }
        self.map[v.index()] = Some(w);
    }

    fn push(&mut self, node: Node, like: Value, source: Option<(Value, Sharding)>) -> Value {
        let w = self.out.push(node, ir::fault!("chunk_logits.node.chunk", self.old.chunks[like.index()], self.at[like.index()]));
        self.out.source[w.index()] = source;
        w
    }

    /// Emits all chunks of a region, one after the other, and the values that others read.
    fn region(&mut self, region: &LogitsRegion) {
        let (old, along) = (self.old, region.along);
        let size = old.body.dims.size(along) / region.chunks;
        let pieces: Vec<Dim> = (0..region.chunks)
            .map(|_| self.out.body.dims.add(DimInfo::new("tokens", ir::fault!("chunk_logits.chunk.size", size / 2, size))))
            .collect();
        let inside: BTreeSet<Value> = region.nodes.iter().copied().collect();
        // `parts` holds the values of each chunk, `sums` the sums over the tokens of the chunks so far.
        let (mut parts, mut sums): (HashMap<Value, Vec<Value>>, HashMap<Value, Value>) = (HashMap::new(), HashMap::new());
        for (k, piece) in (0u64..).zip(&pieces) {
            let mut of: HashMap<Value, Value> = HashMap::new();
            for v in &region.nodes {
                let node = &old.body[*v];
                for a in node.args.iter().filter(|a| !inside.contains(a)) {
                    let same = self.read(*a);
                    if let Some(x) = of.get(&same).copied() {
                        of.insert(*a, x);
                    }
                    if !of.contains_key(a) {
                        let x = self.slice(*a, *v, along, *piece, ir::fault!("chunk_logits.chunk.first", 0, k * size));
                        of.extend([(*a, x), (same, x)]);
                    }
                }
                let args = node.args.iter().map(|a| of[a]).collect();
                let mut here = |d: Dim| if d == along { *piece } else { d };
                let op = ir::fault!("chunk_logits.op.dims", node.op.clone(), node.op.map_dims(&mut here));
                let dims = node.ty.dims.iter().map(|d| here(*d)).collect::<Vec<_>>();
                let ty = Type::new(node.ty.dtype, dims);
                let mut x = self.push(Node { op, args, ty: ty.clone(), origin: node.origin.clone() }, *v, None);
                let why = old.reasons[v.index()].as_ref();
                self.out.reasons[x.index()] = why.map(|why| why.and(&format!(", in {} chunks of tokens", region.chunks)));
                of.insert(*v, x);
                if node.ty.has(along) {
                    parts.entry(*v).or_default().push(x);
                    continue;
                }
                ir::fault!("chunk_logits.sum.each", self.out.accumulate[x.index()] = old.accumulate[v.index()], {});
                if let Some(before) = sums.get(v) {
                    let args = vec![*before, ir::fault!("chunk_logits.sum.first", *before, x)];
                    x = self.push(Node { op: Op::Add, args, ty, origin: node.origin.clone() }, *v, None);
                }
                sums.insert(*v, x);
            }
        }
        for v in &region.left {
            let node = &old.body[*v];
            let source = old.source[v.index()].clone();
            let w = match sums.get(v) {
                Some(sum) => {
                    self.out.accumulate[sum.index()] = ir::fault!("chunk_logits.sum.last", false, old.accumulate[v.index()]);
                    self.out.source[sum.index()] = source;
                    *sum
                }
                None => {
                    let args = ir::fault!("chunk_logits.join.reversed", parts[v].iter().rev().copied().collect(), parts[v].clone());
                    let op = Op::Concat { from: pieces.clone(), to: along };
                    self.push(Node { op, args, ty: node.ty.clone(), origin: node.origin.clone() }, *v, source)
                }
            };
            self.map[v.index()] = Some(w);
        }
    }

    /// A chunk's slice of a value from outside, in the pass of `like`.
    fn slice(&mut self, a: Value, like: Value, along: Dim, piece: Dim, at: u64) -> Value {
        let (x, ty) = (self.get(self.read(a)), self.old.body[a].ty.clone());
        if ir::fault!("chunk_logits.slice.none", true, !ty.has(along)) {
            return x;
        }
        let dims: Vec<Dim> = ty.dims.iter().map(|d| if *d == along { piece } else { *d }).collect();
        let op = Op::Slice { from: along, to: Some(piece), at };
        let origin = self.old.body[like].origin.clone();
        self.push(Node { op, args: vec![x], ty: Type::new(ty.dtype, dims), origin }, like, None)
    }
}
