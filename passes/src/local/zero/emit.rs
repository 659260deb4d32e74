//! Writes the graph in which updates are shared out.

use super::BucketPlan;
use super::find::ShardedUpdate;
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Origin, Phase, Type, Users, Value};
use ir::local::{Chunk, Local, LocalUpdate};
use ir::mesh::SubAxis;
use ir::op::{Collective, DType, Op, Real, Reduce};
use ir::options::Zero;
use ir::program::ParamRole;
use ir::reason::Reason;
use ir::sharded::Sharding;
use std::collections::{HashMap, HashSet};

/// A local graph that is written node by node, from another one.
pub(super) struct LocalWriter<'a> {
    pub(super) old: &'a Local,
    pub(super) out: Local,
    /// Per old value, the new one that replaces it.
    map: Vec<Option<Value>>,
    /// The nodes by which chunks read buckets and the parameters in them.
    buckets: HashMap<(usize, Chunk), Value>,
    params: HashMap<(u32, Chunk), Value>,
    /// Per bucket: a dim of all its elements.
    all: Vec<Dim>,
    dtypes: Vec<DType>,
}

impl<'a> LocalWriter<'a> {
    fn new(old: &'a Local, planned: &[BucketPlan]) -> LocalWriter<'a> {
        let body = Body { dims: old.body.dims.clone(), nodes: vec![] };
        let buckets = planned.iter().map(|p| p.bucket.clone()).collect();
        let mut out = Local { body, buckets, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], ..old.clone() };
        let all = planned.iter().map(|p| out.body.dims.add(DimInfo::new("bucket", p.bucket.size))).collect();
        let dtypes = planned.iter().map(|p| p.members[0].class.copies.unwrap_or(DType::F32)).collect();
        LocalWriter { old, out, map: vec![None; old.body.nodes.len()], buckets: HashMap::new(), params: HashMap::new(), all, dtypes }
    }

    pub(super) fn push(&mut self, op: Op, args: Vec<Value>, ty: Type, chunk: Chunk, origin: &Origin) -> Value {
        self.out.push(Node { op, args, ty, origin: origin.clone() }, chunk)
    }

    pub(super) fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.out.body.dims.add(DimInfo::new(name, size))
    }

    pub(super) fn new_value(&self, v: Value) -> Value {
        self.map[v.index()].expect("invariant: operands are written first")
    }

    /// An old node with the new values of its operands.
    fn copy(&mut self, v: Value) {
        let k = v.index();
        let node = &self.old.body[v];
        let args = node.args.iter().map(|a| self.new_value(*a)).collect();
        let w = self.push(node.op.clone(), args, node.ty.clone(), self.old.chunks[k], &node.origin);
        self.out.accumulate[w.index()] = self.old.accumulate[k];
        self.out.source[w.index()] = self.old.source[k].clone();
        self.out.reasons[w.index()] = self.old.reasons[k].clone();
        self.map[k] = Some(w);
    }

    /// All of a bucket of parameters.
    fn bucket(&mut self, k: usize, chunk: Chunk) -> Value {
        if let Some(v) = self.buckets.get(&(k, chunk)) {
            return *v;
        }
        let slot = (self.old.params.len() + k) as u32;
        let ty = Type::new(self.dtypes[k], [self.all[k]]);
        let v = self.push(Op::Param(slot), vec![], ty, chunk, &Origin::new(Phase::Forward));
        self.buckets.insert((k, chunk), v);
        v
    }

    /// A parameter in its bucket, in place of a node that reads it, or a copy of it.
    fn param(&mut self, node: Value, slot: u32, (k, at): (usize, u64), source: Option<(Value, Sharding)>) -> Value {
        let chunk = self.old.chunks[node.index()];
        if let Some(v) = self.params.get(&(slot, chunk)) {
            return *v;
        }
        let (dims, origin) = (self.old.body.dims_of(node).to_vec(), self.old.body[node].origin.clone());
        let all = self.bucket(k, chunk);
        let piece = self.dim("piece", self.old.body.dims.elements(&dims));
        let cut = Op::Slice { from: self.all[k], to: Some(piece), at: ir::fault!("zero.piece.at", 0, at) };
        let cut = self.push(cut, vec![all], Type::new(self.dtypes[k], [piece]), chunk, &origin);
        let view = Op::View { from: vec![piece], to: dims.clone() };
        let v = self.push(view, vec![cut], Type::new(self.dtypes[k], dims), chunk, &origin);
        self.out.source[v.index()] = source;
        self.params.insert((slot, chunk), v);
        v
    }

    /// Writes a node that reads a parameter of a bucket, if it is one.
    fn reads(&mut self, v: Value, planned: &[BucketPlan], home: &dyn Fn(u32) -> Option<(usize, u64)>) -> bool {
        let body = &self.old.body;
        let (node, slot) = match (&body[v].op, body[v].args.first().map(|a| &body[*a].op)) {
            (Op::Param(slot), _) => (v, *slot),
            (Op::Cast, Some(Op::Param(slot))) => (body[v].args[0], *slot),
            _ => return false,
        };
        let Some(home) = home(slot) else { return false };
        let copies = planned[home.0].bucket.holds == ParamRole::Copies;
        // A bucket of copies holds the cast, not the parameter itself.
        if copies == (node == v) {
            return copies;
        }
        self.map[v.index()] = Some(self.param(v, slot, home, self.old.source[v.index()].clone()));
        true
    }
}

/// The graph with parameters cut out of their buckets.
pub fn read_from_buckets(local: Local, planned: &[BucketPlan], home: &dyn Fn(u32) -> Option<(usize, u64)>) -> Local {
    let mut w = LocalWriter::new(&local, planned);
    for v in local.body.values() {
        if !w.reads(v, planned, home) {
            w.copy(v);
        }
    }
    let LocalWriter { mut out, map, .. } = w;
    let new = |v: Value| map[v.index()].expect("invariant: every value but parameters is written");
    out.reports.iter_mut().for_each(|r| r.1 = new(r.1));
    out
}

/// Writes the training graph.
pub struct UpdateSharder<'a> {
    pub(super) w: LocalWriter<'a>,
    pub(super) planned: &'a [BucketPlan],
    homes: &'a HashMap<u32, (usize, u64)>,
    zero: Zero,
    /// Per bucket: a dim of a rank's part, with its place.
    pub(super) parts: Vec<Dim>,
    /// Per bucket: this rank's part of the gradient.
    gradients: Vec<Option<Value>>,
    /// The buckets that are complete after a value, the last of theirs to be computed.
    complete: HashMap<Value, Vec<usize>>,
}

impl<'a> UpdateSharder<'a> {
    pub fn new(old: &'a Local, planned: &'a [BucketPlan], homes: &'a HashMap<u32, (usize, u64)>, zero: Zero) -> UpdateSharder<'a> {
        let mut w = LocalWriter::new(old, planned);
        let part = |p: &BucketPlan| DimInfo { index: p.part.clone(), global: p.bucket.size, ..DimInfo::new("part", p.part.len()) };
        let parts = planned.iter().map(|p| w.out.body.dims.add(part(p))).collect();
        UpdateSharder { w, planned, homes, zero, parts, gradients: vec![None; planned.len()], complete: HashMap::new() }
    }

    /// Whether a bucket's gradient is completed in every microbatch.
    fn per_microbatch(&self, k: usize) -> bool {
        self.zero >= Zero::Gradients && self.planned[k].members[0].class.chunk.is_pass()
    }

    pub fn run(mut self) -> Local {
        let old = self.w.old;
        for (k, p) in self.planned.iter().enumerate() {
            let when = |m: &ShardedUpdate| if self.per_microbatch(k) { m.term } else { m.stages.unwrap_or(m.gradient) };
            let last = p.members.iter().map(when).max().expect("invariant: a bucket has members");
            self.complete.entry(last).or_default().push(k);
        }
        let needed = self.needed();
        // `sums` maps sums of squares to the buckets that add to them, `met` sums over stages to their bucket.
        let mut sums: HashMap<Value, Vec<usize>> = HashMap::new();
        let mut met: HashMap<Value, usize> = HashMap::new();
        for (k, p) in self.planned.iter().enumerate() {
            let first = &p.members[0];
            if let Some(at) = first.sum.map(|s| s.0).or(first.square) {
                sums.entry(at).or_default().push(k);
            }
            met.extend(first.stages.map(|v| (v, k)));
        }
        let (passes, once): (Vec<Value>, Vec<Value>) = old.body.values().partition(|v| old.chunks[v.index()] < Chunk::Reduce);
        let (reduce, update): (Vec<Value>, Vec<Value>) = once.into_iter().partition(|v| old.chunks[v.index()] == Chunk::Reduce);
        for v in passes.into_iter().chain(reduce).chain(update) {
            let homes = self.homes;
            if needed.contains(&v) || sums.contains_key(&v) {
                match sums.get(&v) {
                    Some(buckets) => self.add_squares(v, buckets),
                    None if self.w.reads(v, self.planned, &|slot| homes.get(&slot).copied()) => {}
                    None => self.w.copy(v),
                }
            }
            for k in self.complete.remove(&v).unwrap_or_default() {
                self.reduce(k);
            }
            if let Some(k) = met.get(&v) {
                self.sum_stages(*k, v);
            }
        }
        self.w.out.updates.clear();
        for u in old.updates.iter().filter(|u| !self.homes.contains_key(&u.slot)) {
            let (new, states) = (self.w.new_value(u.new), u.states.iter().map(|s| self.w.new_value(*s)).collect());
            self.w.out.updates.push(LocalUpdate { new, states, slot: u.slot });
        }
        for k in self.order_of_use() {
            self.update(k);
        }
        let mut out = self.w.out;
        let map = self.w.map;
        out.reports.iter_mut().for_each(|r| r.1 = map[r.1.index()].expect("invariant: reports are written"));
        for slot in self.homes.keys() {
            out.params[*slot as usize].states = 0;
        }
        out
    }

    /// The nodes of the old graph that stay.
    fn needed(&self) -> HashSet<Value> {
        let (old, body) = (self.w.old, &self.w.old.body);
        let members = || self.planned.iter().flat_map(|p| &p.members);
        let gradients: HashSet<Value> = members().map(|m| m.gradient).collect();
        let gone: HashSet<Value> = members().flat_map(|m| [Some(m.gradient), m.square, m.added()]).flatten().collect();
        let mut stack: Vec<Value> = old.reports.iter().map(|r| r.1).collect();
        stack.extend(old.updates.iter().filter(|u| !self.homes.contains_key(&u.slot)).flat_map(|u| u.states.iter().chain([&u.new])));
        stack.extend(members().map(|m| m.term));
        // The scalars that updates use stay in the graph.
        let own: HashSet<Value> = members().flat_map(|m| m.own.iter().copied()).collect();
        let mut seen: HashSet<Value> = HashSet::new();
        let mut steps: Vec<Value> = members().flat_map(|m| m.states.iter().copied().chain([m.new]).chain(m.added())).collect();
        while let Some(v) = steps.pop() {
            if gradients.contains(&v) || !seen.insert(v) {
                continue;
            }
            match body.dims_of(v).is_empty() && !gone.contains(&v) && !own.contains(&v) {
                true => stack.push(v),
                false => steps.extend(&body[v].args),
            }
        }
        // Exchanges between stages stay even without a user, as both ends are needed, and so do limits.
        let met: HashSet<Value> = members().filter_map(|m| m.stages).collect();
        stack.extend(body.values().filter(|v| match &body[*v].op {
            Op::Send { .. } | Op::Recv { .. } | Op::Limit { .. } => true,
            Op::Collective { stages, .. } => stages.is_some() && !met.contains(v),
            _ => false,
        }));
        let mut needed: HashSet<Value> = HashSet::new();
        while let Some(v) = stack.pop() {
            if !gone.contains(&v) && needed.insert(v) {
                stack.extend(&body[v].args);
            }
        }
        needed
    }

    /// Emits a node of the old graph again, with all nodes that it depends on, in another chunk.
    fn again(&mut self, v: Value, chunk: Chunk) -> Value {
        let node = &self.w.old.body[v];
        let args = node.args.iter().map(|a| self.again(*a, chunk)).collect();
        self.w.push(node.op.clone(), args, node.ty.clone(), chunk, &node.origin)
    }

    /// Completes the gradient of a bucket: concatenates terms, with zeros between them, and reduce-scatters the
    /// result.
    fn reduce(&mut self, k: usize) {
        let planned = self.planned;
        let BucketPlan { bucket, members, part, owners, .. } = &planned[k];
        let (body, class) = (&self.w.old.body, &members[0].class);
        let chunk = if self.per_microbatch(k) { class.chunk } else { Chunk::Reduce };
        let origin = body[members[0].gradient].origin.clone();
        let (mut dims, mut args, mut end) = (vec![], vec![], 0);
        for (m, piece) in members.iter().zip(&bucket.pieces) {
            self.zeros(k, piece.at - end, &mut dims, &mut args);
            let (own, origin) = (Type::new(DType::F32, m.dims.clone()), &body[m.term].origin);
            let mut x = self.w.new_value(m.term);
            if body.dims_of(m.term) != m.dims {
                x = self.w.push(Op::Expand, vec![x], own.clone(), m.class.chunk, origin);
                self.w.out.accumulate[x.index()] = class.accumulates && !self.per_microbatch(k);
            }
            for mask in ir::fault!("zero.gradient.unmasked", &[][..], &m.masks[..]) {
                let args = &body[*mask].args;
                let (inside, zero) = (self.again(args[0], chunk), self.again(args[2], chunk));
                x = self.w.push(Op::Select, vec![inside, x, zero], own.clone(), chunk, origin);
            }
            let flat = self.w.dim("piece", body.dims.elements(&m.dims));
            let view = Op::View { from: m.dims.clone(), to: vec![flat] };
            args.push(self.w.push(view, vec![x], Type::new(DType::F32, [flat]), chunk, origin));
            dims.push(flat);
            end = piece.at + body.dims.elements(&m.dims);
        }
        self.zeros(k, bucket.size - end, &mut dims, &mut args);
        let f32 = |dims: &[Dim]| Type::new(DType::F32, dims);
        let (mut x, mut all) = (args[0], dims[0]);
        if args.len() > 1 {
            all = self.w.all[k];
            x = self.w.push(Op::Concat { from: dims, to: all }, args, f32(&[all]), chunk, &origin);
        }
        let ranks = self.w.dim("rank", bucket.size / part.len());
        let own = self.parts[k];
        x = self.w.push(Op::View { from: vec![all], to: vec![ranks, own] }, vec![x], f32(&[ranks, own]), chunk, &origin);
        let op = Op::Collective { kind: Collective::ReduceScatter(Reduce::Sum), subs: owners.clone(), stages: None, part: Some(ranks) };
        x = self.w.push(op, vec![x], f32(&[own]), chunk, &origin);
        self.w.out.accumulate[x.index()] = ir::fault!("zero.gradient.accumulate", false, class.accumulates && self.per_microbatch(k));
        let why = below(body, &members[0]).into_iter().find_map(|v| self.w.old.reasons[v.index()].as_ref().filter(|_| Some(v) != members[0].stages));
        let why = why.map(|w| w.and(&format!("; {} in one bucket", members.len())));
        self.w.out.reasons[x.index()].clone_from(&why);
        // Ranks that are no owners of matrices have terms too.
        let others: Vec<SubAxis> = class.subs.iter().copied().filter(|u| !owners.contains(u)).collect();
        if !others.is_empty() {
            let op = Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: others, stages: None, part: None };
            x = ir::fault!("zero.whole.others", x, self.w.push(op, vec![x], f32(&[own]), Chunk::Reduce, &origin));
            self.w.out.reasons[x.index()] = why;
        }
        self.gradients[k] = Some(x);
    }

    /// Appends zeros to the pieces of a bucket.
    fn zeros(&mut self, k: usize, count: u64, dims: &mut Vec<Dim>, args: &mut Vec<Value>) {
        if count == 0 {
            return;
        }
        // Zeros are accumulated as terms are, so that one chunk writes the whole bucket.
        let class = &self.planned[k].members[0].class;
        let origin = self.w.old.body[self.planned[k].members[0].term].origin.clone();
        let d = self.w.dim("padding", count);
        let zero = self.w.push(Op::Const(Real(0.0)), vec![], Type::scalar(DType::F32), class.chunk, &origin);
        let zeros = self.w.push(Op::Expand, vec![zero], Type::new(DType::F32, [d]), class.chunk, &origin);
        self.w.out.accumulate[zeros.index()] = class.accumulates && !self.per_microbatch(k);
        dims.push(d);
        args.push(zeros);
    }

    /// Adds the terms of the gradient on other stages.
    fn sum_stages(&mut self, k: usize, v: Value) {
        let node = &self.w.old.body[v];
        let x = self.gradient(k);
        let ty = self.w.out.body[x].ty.clone();
        let x = self.w.push(node.op.clone(), vec![x], ty, Chunk::Reduce, &node.origin);
        self.w.out.reasons[x.index()] = self.w.old.reasons[v.index()].clone();
        self.gradients[k] = Some(ir::fault!("zero.stages.lost", self.gradient(k), x));
    }

    pub(super) fn gradient(&self, k: usize) -> Value {
        self.gradients[k].expect("invariant: a gradient is complete before it is used")
    }

    /// A value of the update of a bucket's first parameter, for this rank's part of the bucket.
    fn step(&mut self, k: usize, v: Value, chunk: Chunk, known: &mut HashMap<Value, Value>) -> Value {
        let planned = self.planned;
        let first = &planned[k].members[0];
        let node = &self.w.old.body[v];
        if v == first.gradient {
            return self.gradient(k);
        }
        // Scalars are the same on all ranks. An update's own sum of squares is computed from a rank's part only once.
        if node.ty.dims.is_empty() && (Some(v) != first.square || chunk == Chunk::Update) {
            return self.w.new_value(v);
        }
        if let Some(w) = known.get(&v) {
            return *w;
        }
        let own = self.parts[k];
        let ty = Type::new(node.ty.dtype, [own]);
        let w = match &node.op {
            Op::Param(_) | Op::State(..) => self.old(k, v, chunk),
            op => {
                let args = node.args.iter().map(|a| self.step(k, *a, chunk, known)).collect();
                match op {
                    Op::Reduce { kind, .. } => {
                        let sum = Op::Reduce { kind: *kind, over: vec![own] };
                        self.w.push(sum, args, Type::scalar(node.ty.dtype), chunk, &node.origin)
                    }
                    op => self.w.push(op.clone(), args, ty, chunk, &node.origin),
                }
            }
        };
        known.insert(v, w);
        w
    }

    /// This rank's part of the bucket that holds a parameter or state of the first member.
    pub(super) fn old(&mut self, k: usize, v: Value, chunk: Chunk) -> Value {
        let node = &self.w.old.body[v];
        let (own, slot, copies) = (self.parts[k], (self.w.old.params.len() + k) as u32, self.planned[k].bucket.holds == ParamRole::Copies);
        let ty = Type::new(node.ty.dtype, [own]);
        let op = match &node.op {
            Op::Param(_) if copies => Op::State(slot, 0),
            Op::Param(_) => {
                let all = self.w.bucket(k, chunk);
                let cut = Op::Shard { from: self.w.all[k], to: own, index: self.planned[k].part.clone() };
                return self.w.push(cut, vec![all], ty, chunk, &node.origin);
            }
            Op::State(_, n) => Op::State(slot, ir::fault!("zero.state.number", *n, n + u32::from(copies))),
            op => unreachable!("invariant: {} is no old value", op.name()),
        };
        self.w.push(op, vec![], ty, chunk, &node.origin)
    }

    /// The sum of squares of buckets that have the same owners and are added to other squares in the same way.
    fn squares(&mut self, buckets: &[usize]) -> Value {
        let planned = self.planned;
        let first = &planned[buckets[0]].members[0];
        let scalar = Type::scalar(DType::F32);
        let mut terms: Vec<Value> = vec![];
        for (k, square) in buckets.iter().filter_map(|k| Some((*k, planned[*k].members[0].square?))) {
            terms.push(self.step(k, square, Chunk::Reduce, &mut HashMap::new()));
        }
        let mut x = terms[0];
        let origin = self.w.out.body[x].origin.clone();
        if terms.len() > 1 {
            x = self.w.push(Op::Add, terms, scalar.clone(), Chunk::Reduce, &origin);
        }
        let subs = planned[buckets[0]].owners.clone();
        let op = Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs, stages: None, part: None };
        x = ir::fault!("zero.norm.part", x, self.w.push(op, vec![x], scalar, Chunk::Reduce, &origin));
        self.w.out.reasons[x.index()] = Some("each rank has the squares of its part of the gradients".into());
        match first.sum {
            Some((_, Some(mask))) => {
                let node = &self.w.old.body[mask];
                let args = vec![self.w.new_value(node.args[0]), x, self.w.new_value(node.args[2])];
                self.w.push(Op::Select, args, node.ty.clone(), Chunk::Reduce, &node.origin)
            }
            Some((_, None)) | None => x,
        }
    }

    /// A sum of squares, with those of buckets in place of their parameters'.
    fn add_squares(&mut self, v: Value, buckets: &[usize]) {
        let planned = self.planned;
        let body = &self.w.old.body;
        let mut groups: Vec<Vec<usize>> = vec![];
        for k in buckets {
            let key = |k: usize| (planned[k].owners.clone(), planned[k].members[0].class.adds());
            match groups.iter_mut().find(|g| ir::fault!("zero.norm.group", true, key(g[0]) == key(*k))) {
                Some(group) => group.push(*k),
                None => groups.push(vec![*k]),
            }
        }
        if planned[buckets[0]].members[0].square == Some(v) {
            self.w.map[v.index()] = Some(self.squares(buckets));
            return;
        }
        let gone: HashSet<Value> = buckets.iter().flat_map(|k| &planned[*k].members).filter_map(ShardedUpdate::added).collect();
        let mut args: Vec<Value> = body[v].args.iter().filter(|a| !gone.contains(a)).map(|a| self.w.new_value(*a)).collect();
        for group in groups {
            args.push(self.squares(&group));
        }
        let node = &body[v];
        let w = self.w.push(node.op.clone(), args, node.ty.clone(), Chunk::Reduce, &node.origin);
        self.w.out.source[w.index()] = self.w.old.source[v.index()].clone();
        self.w.map[v.index()] = Some(w);
    }

    /// Buckets in the order in which the forward pass first reads one of their parameters. They are updated and
    /// gathered in this order, so that the next step can begin when the first ones are there.
    fn order_of_use(&self) -> Vec<usize> {
        let old = self.w.old;
        let users = old.body.users();
        // 16-bit copies are made before the forward pass, so their own users count.
        fn first(old: &Local, users: &Users, v: Value) -> Option<Value> {
            let of = |u: Value| match old.chunks[u.index()] {
                Chunk::Prologue | Chunk::PrologueReduce => first(old, users, u),
                Chunk::Forward(_) | Chunk::Backward(_) | Chunk::Weight(_) => Some(u),
                Chunk::Reduce | Chunk::Update => None,
            };
            users[v.index()].iter().filter_map(|(u, _)| of(*u)).min()
        }
        let mut used: HashMap<u32, Value> = HashMap::new();
        for v in old.body.values() {
            if let (Op::Param(slot), Some(first)) = (&old.body[v].op, first(old, &users, v)) {
                let known = used.entry(*slot).or_insert(first);
                *known = first.min(*known);
            }
        }
        let mut order: Vec<usize> = (0..self.planned.len()).collect();
        order.sort_by_key(|k| self.planned[*k].members.iter().filter_map(|m| used.get(&m.slot)).min());
        order
    }

    /// The new values of a rank's part, and of all parameters from all ranks.
    fn update(&mut self, k: usize) {
        let planned = self.planned;
        let BucketPlan { bucket, members, part, owners, distance } = &planned[k];
        let (first, chunk) = (&members[0], Chunk::Update);
        let (mut new, mut states) = match distance {
            Some(distance) => self.whole(k, *distance),
            None => {
                let mut known = HashMap::new();
                let states = first.states.iter().map(|s| self.step(k, *s, chunk, &mut known)).collect();
                (self.step(k, first.new, chunk, &mut known), states)
            }
        };
        let origin = self.w.old.body[first.new].origin.clone();
        let (own, all, dtype) = (self.parts[k], self.w.all[k], self.w.dtypes[k]);
        if bucket.holds == ParamRole::Copies {
            states.insert(ir::fault!("zero.weights.last", states.len(), 0), new);
            new = self.w.push(Op::Cast, vec![new], Type::new(dtype, [own]), chunk, &origin);
        }
        let ranks = self.w.dim("rank", bucket.size / part.len());
        let op = Op::Collective { kind: Collective::AllGather, subs: owners.clone(), stages: None, part: Some(ranks) };
        new = self.w.push(op, vec![new], Type::new(dtype, [ranks, own]), chunk, &origin);
        self.w.out.reasons[new.index()] =
            Some(Reason::from("each rank has its part of the new parameters").and(&format!("; {} in one bucket", members.len())));
        new = self.w.push(Op::View { from: vec![ranks, own], to: vec![all] }, vec![new], Type::new(dtype, [all]), chunk, &origin);
        self.w.out.updates.push(LocalUpdate { slot: (self.w.old.params.len() + k) as u32, new, states });
    }
}

/// The masks and sums between a gradient and its term.
fn below(body: &Body, m: &ShardedUpdate) -> Vec<Value> {
    let mut out = vec![];
    let mut v = m.gradient;
    while v != m.term {
        out.push(v);
        v = body[v].args[usize::from(body[v].op == Op::Select)];
    }
    out
}
