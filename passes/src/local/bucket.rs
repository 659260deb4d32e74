//! Joins collectives that a step does once into buckets: one for many gradients, one for many new parameters.
//!
//! Collectives of one kind over the same axes that do not depend on each other are one collective of their operands one after the other. Nothing
//! is computed otherwise, and sums are taken in the same order, so results are the same to the bit. Gradients come in the order in which
//! the backward pass completes them, which is the reverse order of use.

use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Origin, Type, Value};
use ir::local::{Chunk, Local};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Collective, DType, Op};
use ir::options::Options;
use ir::sharded::{Placement, Sharding};
use std::collections::{BTreeMap, HashMap};

/// The least number of elements of a full bucket, unless the user says otherwise: 40 M, and 1 M per data-parallel rank, below which
/// a collective's messages get short (Megatron-Core's `DistributedDataParallelConfig`).
fn default_size(dp: u64) -> u64 {
    40_000_000.max(dp.saturating_mul(1_000_000))
}

/// The number of elements with which a bucket is full.
pub fn size(options: &Options) -> u64 {
    options.bucket_size.unwrap_or_else(|| default_size(options.dp))
}

/// The key that collectives of one bucket have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BucketKey {
    chunk: Chunk,
    /// The number of such collectives before it on a path of operands; it differs for those that depend on each
    /// other.
    depth: u32,
    kind: Collective,
    subs: Vec<SubAxis>,
    dtype: DType,
    /// The sub-axes along which it is not replicated; a bucket's copies are equal along the others.
    split: Vec<SubAxis>,
    /// The chunk whose passes leave its operand, which is then computed in the bucket's memory.
    accumulated: Option<Chunk>,
}

/// Joins the collectives of a local graph that run once per step; a bucket is full with `size` elements.
pub fn join(local: Local, size: u64) -> Local {
    let buckets = buckets(&local, size);
    let mut of: HashMap<Value, usize> = HashMap::new();
    for (k, bucket) in buckets.iter().enumerate() {
        of.extend(bucket.iter().map(|v| (*v, k)));
    }
    let nodes = local.body.nodes.len();
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], ..local.clone() };
    let mut j = BucketJoiner { old: &local, out, map: vec![None; nodes], buckets: &buckets, of: &of };
    for v in local.body.values() {
        j.emit(v);
    }
    let BucketJoiner { mut out, map, .. } = j;
    let new = |v: Value| map[v.index()].expect("invariant: every node is emitted");
    out.reports.iter_mut().for_each(|r| r.1 = new(r.1));
    for u in &mut out.updates {
        u.new = new(u.new);
        u.states.iter_mut().for_each(|s| *s = new(*s));
    }
    out
}

/// The collectives of each bucket that has more than one.
fn buckets(local: &Local, size: u64) -> Vec<Vec<Value>> {
    let body = &local.body;
    let mut depth = vec![0; body.nodes.len()];
    let mut open: BTreeMap<BucketKey, Vec<(Value, Value)>> = BTreeMap::new();
    for v in body.values() {
        let node = &body[v];
        depth[v.index()] = node.args.iter().map(|a| depth[a.index()]).max().unwrap_or(0);
        let Op::Collective { kind, subs, stages, .. } = &node.op else { continue };
        let chunk = local.chunks[v.index()];
        let arg = node.args[0];
        // For a gather, the sharding is that of its operand.
        let Some((_, sharding)) = local.source[v.index()].as_ref().or(local.source[arg.index()].as_ref()) else { continue };
        // Results of the forward pass (losses, metrics, inputs of states) are small and stay in collectives of their
        // own.
        let forward = matches!(local.chunks[first_of_step(local, arg).index()], Chunk::Prologue | Chunk::PrologueReduce | Chunk::Forward(_));
        if stages.is_none() && !forward && matches!(chunk, Chunk::Reduce | Chunk::Update) && joins(body, v, *kind) {
            let split = local.mesh.ids().filter(|u| ir::fault!("bucket.split.ignored", false, sharding[*u] != Placement::Replicated)).collect();
            let of_pass = local.accumulate[arg.index()] || local.chunks[arg.index()].per_microbatch() && local.mesh.size(Axis::Microbatch) == 1;
            let accumulated = (of_pass && matches!(kind, Collective::AllReduce(_))).then(|| local.chunks[arg.index()]);
            let key = BucketKey { chunk, depth: depth[v.index()], kind: *kind, subs: subs.clone(), dtype: node.ty.dtype, split, accumulated };
            depth[v.index()] += 1;
            open.entry(key).or_default().push((first_of_step(local, arg), v));
        }
    }
    // Sums over stages must keep their order on all stages. So a bucket leaves out members that depend on a sum
    // behind its first member, given that earlier buckets run as a whole.
    let mut out = vec![];
    for mut members in open.into_values() {
        members.sort_unstable();
        let first = members.iter().map(|m| m.1).min();
        let after = last_sums_over_stages(body, &out);
        members.retain(|(_, v)| after[v.index()] < first);
        let (mut bucket, mut elements) = (vec![], 0);
        for (_, v) in members {
            bucket.push(v);
            elements += body.elements(v).max(body.elements(body[v].args[0]));
            if elements >= size {
                out.push(std::mem::take(&mut bucket));
                elements = 0;
            }
        }
        out.push(bucket);
    }
    out.retain(|b| b.len() > 1);
    out
}

/// Per value, the last of the sums over stages that it depends on, where depending on a member of a bucket means
/// depending on all its members.
fn last_sums_over_stages(body: &Body, buckets: &[Vec<Value>]) -> Vec<Option<Value>> {
    let of: HashMap<Value, usize> = buckets.iter().enumerate().flat_map(|(k, bucket)| bucket.iter().map(move |v| (*v, k))).collect();
    let (mut last, mut whole) = (vec![None; body.nodes.len()], vec![None; buckets.len()]);
    loop {
        let before = whole.clone();
        for v in body.values() {
            let node = &body[v];
            let own = node.args.iter().filter_map(|a| last[a.index()]).max();
            let own = if matches!(node.op, Op::Collective { stages: Some(_), .. }) { Some(v) } else { own };
            last[v.index()] = match of.get(&v) {
                Some(k) => {
                    whole[*k] = own.max(whole[*k]);
                    whole[*k]
                }
                None => own,
            };
        }
        if whole == before {
            return last;
        }
    }
}

/// Whether the parts of a collective are outermost, and its result is in the order of its operand.
fn joins(body: &Body, v: Value, kind: Collective) -> bool {
    let (own, arg) = (body.dims_of(v), body.dims_of(body[v].args[0]));
    match kind {
        Collective::AllReduce(_) => own == arg && !own.is_empty(),
        Collective::AllGather => own[1..] == *arg,
        Collective::ReduceScatter(_) => *own == arg[1..],
        Collective::AllToAll | Collective::Shift => false,
    }
}

/// The value of a microbatch's pass that a value depends on, which determines when the value is known.
fn first_of_step(local: &Local, v: Value) -> Value {
    match local.body[v].args.first() {
        Some(a) if !local.chunks[v.index()].per_microbatch() => first_of_step(local, *a),
        _ => v,
    }
}

struct BucketJoiner<'a> {
    old: &'a Local,
    out: Local,
    map: Vec<Option<Value>>,
    buckets: &'a [Vec<Value>],
    of: &'a HashMap<Value, usize>,
}

impl BucketJoiner<'_> {
    fn emit(&mut self, v: Value) -> Value {
        if let Some(w) = self.map[v.index()] {
            return w;
        }
        if let Some(k) = self.of.get(&v) {
            self.join(*k);
        } else {
            let node = self.old.body[v].clone();
            let args: Vec<Value> = node.args.iter().map(|a| self.emit(*a)).collect();
            let k = v.index();
            let w = self.push(Node { args, ..node }, self.old.chunks[k], self.old.source[k].clone());
            self.out.accumulate[w.index()] = self.old.accumulate[k];
            self.out.reasons[w.index()] = self.old.reasons[k].clone();
            self.map[k] = Some(w);
        }
        self.map[v.index()].expect("invariant: just emitted")
    }

    fn push(&mut self, node: Node, chunk: Chunk, source: Option<(Value, Sharding)>) -> Value {
        let w = self.out.push(node, chunk);
        self.out.source[w.index()] = source;
        w
    }

    fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.out.body.dims.add(DimInfo::new(name, size))
    }

    /// Emits one collective for all of a bucket: operands become rows of parts, which are concatenated, and the
    /// results are sliced out again.
    fn join(&mut self, k: usize) {
        let members = &self.buckets[k];
        let first = members[0];
        let (chunk, origin) = (self.old.chunks[first.index()], self.old.body[first].origin.clone());
        let Op::Collective { kind, subs, stages, part } = self.old.body[first].op.clone() else {
            unreachable!("invariant: buckets have collectives")
        };
        let dtype = self.old.body[first].ty.dtype;
        let scatters = matches!(kind, Collective::ReduceScatter(_));
        let args: Vec<Value> = members.iter().map(|v| self.emit(self.old.body[*v].args[0])).collect();
        let part = part.map(|p| self.dim("part", self.old.body.dims.size(p)));
        let in_parts = part.filter(|_| scatters);
        let gathered = part.filter(|_| !scatters);
        let make = |op: Op, args: Vec<Value>, dims: Vec<Dim>, origin: &Origin| Node { op, args, ty: Type::new(dtype, dims), origin: origin.clone() };
        let (mut rows, mut sizes, mut flat) = (vec![], vec![], vec![]);
        for x in args {
            let dims = self.out.body.dims_of(x).to_vec();
            let row: u64 = dims.iter().skip(usize::from(scatters)).map(|d| self.out.body.dims.size(*d)).product();
            let d = self.dim("row", row);
            let to: Vec<Dim> = in_parts.into_iter().chain([d]).collect();
            let origin = self.out.body[x].origin.clone();
            flat.push(self.push(make(Op::View { from: dims, to: to.clone() }, vec![x], to, &origin), chunk, None));
            rows.push(d);
            sizes.push(row);
        }
        let all = self.dim("bucket", sizes.iter().sum());
        let wide = |part: Option<Dim>, d: Dim| part.into_iter().chain([d]).collect::<Vec<_>>();
        let joined = self.push(make(Op::Concat { from: rows, to: all }, flat, wide(in_parts, all), &origin), chunk, None);
        let op = Op::Collective { kind, subs, stages, part };
        let done = self.push(make(op, vec![joined], wide(gathered, all), &origin), chunk, None);
        let why = self.old.reasons[first.index()].clone();
        self.out.reasons[done.index()] = why.map(|w| w.and(&format!("; {} in one bucket", members.len())));
        let mut at = 0;
        for (v, row) in members.iter().zip(sizes) {
            let (ty, origin) = (self.old.body[*v].ty.clone(), self.old.body[*v].origin.clone());
            let d = self.dim("row", row);
            let slice = Op::Slice { from: all, to: Some(d), at };
            let cut = self.push(make(slice, vec![done], wide(gathered, d), &origin), chunk, None);
            let view = Op::View { from: wide(gathered, d), to: ty.dims.clone() };
            let w = self.push(Node { op: view, args: vec![cut], ty, origin }, chunk, self.old.source[v.index()].clone());
            self.map[v.index()] = Some(w);
            at += ir::fault!("bucket.result.offset", 0, row);
        }
    }
}
