//! Tensor-parallel collectives beside the matrix products that they feed or complete (`--tp-comm-overlap`).
//!
//! A product whose operand is gathered, or whose result is reduced, is cut into chunks of rows: while one chunk is computed, the collective
//! of the next one (of the one before) is under way. A row's sum has the same terms in the same order whatever rows stand beside it, and a
//! collective's element those of its ranks; so results are the same to the bit. What sums over rows, as gradients of weights do,
//! reads the whole value as before. (Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023, where
//! chunks are those of ranks.)

use crate::local::role::roots;
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Type, Users, Value};
use ir::local::Local;
use ir::mesh::Axis;
use ir::op::{Collective, Op};
use ir::options::TpOverlap;
use ir::sharded::Sharding;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Cuts the products beside tensor-parallel collectives of a local graph, and these, into chunks.
pub fn split(local: Local, overlap: TpOverlap) -> Local {
    let chunks = match overlap {
        TpOverlap::Off => return local,
        TpOverlap::Pipeline { chunks } => chunks,
    };
    let found = OverlapPlan::new(&local, chunks);
    if found.gathers.is_empty() && found.reductions.is_empty() {
        return local;
    }
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], ..local.clone() };
    let mut s = OverlapRewriter { old: &local, out, map: vec![None; local.body.nodes.len()], found: &found, gathered: HashMap::new() };
    for v in local.body.values() {
        s.node(v);
    }
    let OverlapRewriter { mut out, map, .. } = s;
    let new = |v: Value| map[v.index()].expect("invariant: what the step leaves is in no chunk");
    out.reports.iter_mut().for_each(|r| r.1 = new(r.1));
    for u in &mut out.updates {
        u.new = new(u.new);
        u.states.iter_mut().for_each(|s| *s = new(*s));
    }
    out
}

/// A gathered value with products that map the gathered dim.
struct Gather {
    /// The dims of group members, of each member's rows, and of all rows.
    part: Dim,
    rows: Dim,
    whole: Dim,
    chunks: u64,
    products: Vec<Value>,
}

/// A reduction of products.
struct Reduction {
    /// The products and the pointwise ops after them, in order; the last one is what is reduced.
    cone: Vec<Value>,
    along: Dim,
    /// For a reduce-scatter, the dims of group members and of each member's rows.
    parts: Option<(Dim, Dim)>,
    chunks: u64,
}

struct OverlapPlan {
    /// Gathers by their collective.
    gathers: BTreeMap<Value, Gather>,
    reductions: BTreeMap<Value, Reduction>,
    /// The gather of each product.
    gather_of: HashMap<Value, Value>,
    /// Nodes that are emitted only where they are needed: a gathered value, from the collective to the view of all
    /// parts as one dim; or nodes of a cone, which exist in chunks alone.
    late: BTreeSet<Value>,
}

/// The greatest number of equal chunks, at most `most`.
fn divide(size: u64, most: u64) -> u64 {
    (1..=most.min(size)).rev().find(|c| size.is_multiple_of(*c)).unwrap_or(1)
}

impl OverlapPlan {
    fn new(local: &Local, most: u64) -> OverlapPlan {
        let f = OverlapFinder { local, users: local.body.users(), roots: roots(local) };
        let (mut gathers, mut reductions, mut late) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        for v in local.body.values() {
            if let Some((reduction, between)) = f.reduction(v, most) {
                late.extend(reduction.cone.iter().chain(&between));
                reductions.insert(v, reduction);
            }
        }
        let mut gather_of = HashMap::new();
        for v in local.body.values() {
            if let Some((gather, between)) = f.gather(v, most, &late) {
                gather_of.extend(gather.products.iter().map(|p| (*p, v)));
                late.extend(between);
                gathers.insert(v, gather);
            }
        }
        OverlapPlan { gathers, reductions, gather_of, late }
    }
}

struct OverlapFinder<'a> {
    local: &'a Local,
    users: Users,
    roots: BTreeSet<Value>,
}

impl OverlapFinder<'_> {
    /// Whether a collective goes over tensor-parallel ranks in a pass of a microbatch.
    fn is_tensor_parallel(&self, v: Value) -> bool {
        let Op::Collective { subs, stages: None, .. } = &self.local.body[v].op else { return false };
        let tp = !subs.is_empty() && subs.iter().all(|u| self.local.mesh[*u].axis == Axis::Tp);
        tp && self.local.chunks[v.index()].is_pass() && !self.local.accumulate[v.index()]
    }

    fn only_user(&self, v: Value) -> Option<Value> {
        match &self.users[v.index()] {
            [(user, _)] if !self.roots.contains(&v) => Some(*user),
            _ => None,
        }
    }

    /// Whether a product maps a dim, and stays a product of matrices if it has `size` elements.
    fn maps(&self, v: Value, along: Dim, size: u64) -> bool {
        let body = &self.local.body;
        let Op::Dot { over, .. } = &body[v].op else { return false };
        let [a, b] = [body.dims_of(body[v].args[0]), body.dims_of(body[v].args[1])];
        let own = |x: &[Dim], y: &[Dim]| {
            let sizes = x.iter().filter(|d| !y.contains(d)).map(|d| if *d == along { size } else { body.dims.size(*d) });
            sizes.product::<u64>()
        };
        let alike = body[v].args.iter().any(|x| self.is_alike(*x, along));
        a.contains(&along) != b.contains(&along) && !over.contains(&along) && own(a, b) > 1 && own(b, a) > 1 && !alike
    }

    /// Whether a value is broadcast along the dim, as the gradient of a plain sum is. It would be
    /// unknown which rows a chunk of it has.
    fn is_alike(&self, v: Value, along: Dim) -> bool {
        let body = &self.local.body;
        match body[v].op {
            Op::Expand => !body[body[v].args[0]].ty.has(along),
            Op::Cast => self.is_alike(body[v].args[0], along),
            _ => false,
        }
    }

    /// Whether a value is made in the same pass as another one, and is of one microbatch.
    fn beside(&self, v: Value, other: Value) -> bool {
        let l = self.local;
        l.chunks[v.index()] == l.chunks[other.index()] && !l.accumulate[v.index()] && !self.roots.contains(&v)
    }

    /// A gather to cut, with the nodes between it and the value with the whole dim, both included.
    fn gather(&self, v: Value, most: u64, late: &BTreeSet<Value>) -> Option<(Gather, Vec<Value>)> {
        let body = &self.local.body;
        let Op::Collective { kind: Collective::AllGather, part: Some(part), .. } = body[v].op else { return None };
        if !self.is_tensor_parallel(v) {
            return None;
        }
        let mut between = vec![v];
        let mut last = self.only_user(v)?;
        if body[last].op == Op::Expand {
            between.push(last);
            last = self.only_user(last)?;
        }
        between.push(last);
        let Op::View { from, to } = &body[last].op else { return None };
        let (&[outer, rows], &[whole]) = (from.as_slice(), to.as_slice()) else { return None };
        let chunks = divide(body.dims.size(rows), most);
        let size = body.dims.size(whole) / chunks;
        let products: Vec<Value> = self.users[last.index()]
            .iter()
            .map(|(user, _)| *user)
            .filter(|p| self.beside(*p, v) && self.maps(*p, whole, size) && !late.contains(p))
            .collect();
        let fits = outer == part && chunks > 1 && !products.is_empty();
        fits.then_some((Gather { part, rows, whole, chunks, products }, between))
    }

    /// A reduction to cut, with the nodes between what it reduces and the collective, this one excluded.
    fn reduction(&self, v: Value, most: u64) -> Option<(Reduction, Vec<Value>)> {
        let body = &self.local.body;
        if !self.is_tensor_parallel(v) {
            return None;
        }
        let arg = body[v].args[0];
        match &body[v].op {
            Op::Collective { kind: Collective::AllReduce(_), .. } => body.dims_of(v).iter().find_map(|along| {
                let chunks = divide(body.dims.size(*along), most);
                let cone = self.cone(arg, v, *along, body.dims.size(*along) / chunks)?;
                (chunks > 1 && body.dims_of(arg) == body.dims_of(v)).then_some((Reduction { cone, along: *along, parts: None, chunks }, vec![]))
            }),
            Op::Collective { kind: Collective::ReduceScatter(_), part: Some(part), .. } => {
                let mut between = vec![];
                let (mut top, mut user) = (arg, v);
                while let Op::Expand | Op::View { .. } = body[top].op {
                    if self.only_user(top) != Some(user) || between.len() == 2 {
                        return None;
                    }
                    between.push(top);
                    (top, user) = (body[top].args[0], top);
                }
                let Op::View { from, to } = &body[*between.last()?].op else { return None };
                let (&[along], &[outer, rows]) = (from.as_slice(), to.as_slice()) else { return None };
                let chunks = divide(body.dims.size(rows), most);
                let scattered: Vec<Dim> = body.dims_of(top).iter().map(|d| if *d == along { rows } else { *d }).collect();
                let expands = between.len() == 1 || body[between[0]].op == Op::Expand;
                let fits = outer == *part && body.dims_of(v) == scattered && expands && chunks > 1;
                let cone = self.cone(top, user, along, body.dims.size(along) / chunks).filter(|_| fits)?;
                Some((Reduction { cone, along, parts: Some((outer, rows)), chunks }, between))
            }
            _ => None,
        }
    }

    /// The products of which a value consists, and the pointwise ops after them, as far as nothing but `user` sees them.
    fn cone(&self, top: Value, user: Value, along: Dim, size: u64) -> Option<Vec<Value>> {
        let body = &self.local.body;
        let mut cone: BTreeSet<Value> = BTreeSet::new();
        let mut open: BTreeSet<Value> = [top].into();
        while let Some(v) = open.pop_last() {
            let hidden = self.users[v.index()].iter().all(|(c, _)| cone.contains(c) || *c == user);
            if !hidden || !self.beside(v, user) || !body[v].ty.has(along) {
                continue;
            }
            if self.maps(v, along, size) {
                cone.insert(v);
            } else if body[v].op.is_pointwise() {
                cone.insert(v);
                open.extend(&body[v].args);
            }
        }
        // Pointwise ops that depend on no product are better computed at once.
        let mut reaching: BTreeSet<Value> = BTreeSet::new();
        for v in &cone {
            if matches!(body[*v].op, Op::Dot { .. }) || body[*v].args.iter().any(|a| reaching.contains(a)) {
                reaching.insert(*v);
            }
        }
        reaching.contains(&top).then(|| reaching.into_iter().collect())
    }
}

struct OverlapRewriter<'a> {
    old: &'a Local,
    out: Local,
    map: Vec<Option<Value>>,
    found: &'a OverlapPlan,
    /// The chunks of each emitted gather, with their dims.
    gathered: HashMap<Value, Vec<(Value, Dim)>>,
}

impl OverlapRewriter<'_> {
    fn node(&mut self, v: Value) {
        let found = self.found;
        if self.map[v.index()].is_some() {
        } else if let Some(gather) = found.gathers.get(&v) {
            self.gather(v, gather);
        } else if let Some(reduction) = found.reductions.get(&v) {
            self.reduction(v, reduction);
        } else if let Some(gather) = found.gather_of.get(&v) {
            self.products(v, *gather);
        } else if !found.late.contains(&v) {
            self.copy(v);
        }
    }

    /// The new value of an old one.
    fn get(&mut self, v: Value) -> Value {
        if self.map[v.index()].is_none() {
            self.late(v);
        }
        self.map[v.index()].expect("invariant: operands come first")
    }

    /// The whole of a gathered value, for users that do not map its rows.
    fn late(&mut self, v: Value) {
        let Some(gather) = self.found.gathers.get(&v) else { return self.copy(v) };
        let pieces = self.gathered[&v].clone();
        let whole = self.join(v, pieces, gather.rows, self.old.body.dims_of(v).to_vec());
        self.map[v.index()] = Some(whole);
    }

    fn copy(&mut self, v: Value) {
        let node = &self.old.body[v];
        let args: Vec<Value> = node.args.iter().map(|a| self.get(*a)).collect();
        let w = self.push(Node { args, ..node.clone() }, v, self.old.source[v.index()].clone());
        self.out.accumulate[w.index()] = self.old.accumulate[v.index()];
        self.out.reasons[w.index()] = self.old.reasons[v.index()].clone();
        self.map[v.index()] = Some(w);
    }

    fn push(&mut self, node: Node, like: Value, source: Option<(Value, Sharding)>) -> Value {
        let w = self.out.push(node, self.old.chunks[like.index()]);
        self.out.source[w.index()] = source;
        w
    }

    /// A view of a value for the chunks of `like`.
    fn view(&mut self, op: Op, x: Value, dims: Vec<Dim>, like: Value) -> Value {
        let ty = Type::new(self.out.body[x].ty.dtype, dims);
        let origin = self.old.body[like].origin.clone();
        self.push(Node { op, args: vec![x], ty, origin }, like, None)
    }

    /// A node that leads to a chunk of `like`, or from its chunks to it.
    fn step(&mut self, op: Op, args: Vec<Value>, dims: Vec<Dim>, like: Value) -> Value {
        let Node { ty, origin, .. } = &self.old.body[like];
        let node = Node { op, args, ty: Type::new(ty.dtype, dims), origin: origin.clone() };
        self.push(node, like, None)
    }

    /// Dims of the chunks of a dim.
    fn pieces(&mut self, dim: Dim, chunks: u64) -> Vec<Dim> {
        let size = self.old.body.dims.size(dim) / chunks;
        (0..chunks).map(|_| self.out.body.dims.add(DimInfo::new("chunk", size))).collect()
    }

    /// Chunks along their own dims as one value along `to`.
    fn join(&mut self, like: Value, pieces: Vec<(Value, Dim)>, to: Dim, dims: Vec<Dim>) -> Value {
        let (args, from): (Vec<Value>, Vec<Dim>) =
            ir::fault!("tp_overlap.join.reversed", pieces.into_iter().rev().collect::<Vec<_>>(), pieces).into_iter().unzip();
        self.step(Op::Concat { from, to }, args, dims, like)
    }

    /// One chunk's part of a collective.
    fn exchange(&mut self, v: Value, x: Value, dims: Vec<Dim>, chunks: u64) -> Value {
        let w = self.step(self.old.body[v].op.clone(), vec![x], dims, v);
        self.out.reasons[w.index()] = self.old.reasons[v.index()].as_ref().map(|why| why.and(&format!(", in {chunks} chunks")));
        w
    }

    /// Every chunk of a gather.
    fn gather(&mut self, v: Value, gather: &Gather) {
        let old = self.old;
        let x = self.get(old.body[v].args[0]);
        let own = old.body.dims_of(old.body[v].args[0]);
        let pieces = self.pieces(gather.rows, gather.chunks);
        let size = old.body.dims.size(gather.rows) / gather.chunks;
        let mut out = vec![];
        for (k, piece) in (0u64..).zip(pieces) {
            let slice = Op::Slice { from: gather.rows, to: Some(piece), at: ir::fault!("tp_overlap.gather.chunk", 0, k * size) };
            let rows = self.view(slice, x, replaced(own, gather.rows, &[piece]), v);
            let all = replaced(old.body.dims_of(v), gather.rows, &[piece]);
            out.push((self.exchange(v, rows, all, gather.chunks), piece));
        }
        self.gathered.insert(v, out);
    }

    /// Emits the products of a gathered value, chunk by chunk: all those whose other operand is available, so that
    /// each gather has the most compute to hide behind.
    fn products(&mut self, first: Value, gathered: Value) {
        let (old, gather) = (self.old, &self.found.gathers[&gathered]);
        let other = |p: Value| old.body[p].args.iter().position(|a| !old.body[*a].ty.has(gather.whole)).expect("invariant: one operand has the rows");
        let waiting = gather.products.iter().copied().filter(|p| self.map[p.index()].is_none());
        let members: Vec<Value> = waiting.filter(|p| *p == first || self.is_at_hand(old.body[*p].args[other(*p)])).collect();
        let factors: Vec<Value> = members.iter().map(|p| self.at_hand(old.body[*p].args[other(*p)])).collect();
        let mut pieces: Vec<Vec<(Value, Dim)>> = vec![vec![]; members.len()];
        for (rows, piece) in self.gathered[&gathered].clone() {
            for (k, p) in members.iter().enumerate() {
                let slot = other(*p);
                let args = (0..2).map(|i| if i == slot { factors[k] } else { rows }).collect();
                let dims = replaced(old.body.dims_of(*p), gather.whole, &[gather.part, piece]);
                pieces[k].push((self.step(old.body[*p].op.clone(), args, dims, *p), piece));
            }
        }
        for (p, pieces) in members.into_iter().zip(pieces) {
            let dims = old.body.dims_of(p);
            let joined = self.join(p, pieces, gather.rows, replaced(dims, gather.whole, &[gather.part, gather.rows]));
            let view = Op::View { from: vec![gather.part, gather.rows], to: vec![gather.whole] };
            let w = self.step(view, vec![joined], dims.to_vec(), p);
            self.out.source[w.index()] = old.source[p.index()].clone();
            self.map[p.index()] = Some(w);
        }
    }

    /// Whether a value is emitted, or can be computed from emitted ones without communication.
    fn is_at_hand(&self, v: Value) -> bool {
        let apart = |v: Value| self.found.late.contains(&v) || self.found.gather_of.contains_key(&v) || self.found.reductions.contains_key(&v);
        let exchange = matches!(self.old.body[v].op, Op::Collective { .. } | Op::Send { .. } | Op::Recv { .. } | Op::Limit { .. });
        self.map[v.index()].is_some() || !apart(v) && !exchange && self.old.body[v].args.iter().all(|a| self.is_at_hand(*a))
    }

    fn at_hand(&mut self, v: Value) -> Value {
        if self.map[v.index()].is_none() {
            for a in &self.old.body[v].args {
                self.at_hand(*a);
            }
        }
        self.get(v)
    }

    /// Emits a reduction chunk by chunk: its operand, then the collective.
    fn reduction(&mut self, v: Value, r: &Reduction) {
        let old = self.old;
        let (inside, to) = (r.cone.iter().copied().collect::<BTreeSet<Value>>(), r.parts.map_or(r.along, |p| p.1));
        let has = |v: &Value| old.body[*v].ty.has(r.along);
        // `rows` holds the operands, with ranks' parts as a separate dim where they have the rows.
        let mut rows: HashMap<Value, Value> = HashMap::new();
        for a in r.cone.iter().flat_map(|c| &old.body[*c].args).filter(|a| !inside.contains(a)) {
            let mut x = self.get(*a);
            if let (true, Some((part, each)), false) = (has(a), r.parts, rows.contains_key(a)) {
                let dims = replaced(old.body.dims_of(*a), r.along, &[part, each]);
                x = self.view(Op::View { from: vec![r.along], to: vec![part, each] }, x, dims, v);
            }
            rows.entry(*a).or_insert(x);
        }
        let size = old.body.dims.size(to) / r.chunks;
        let mut out = vec![];
        for (k, piece) in (0u64..).zip(self.pieces(to, r.chunks)) {
            let mut of: HashMap<Value, Value> = HashMap::new();
            for c in &r.cone {
                for a in &old.body[*c].args {
                    if of.contains_key(a) {
                        continue;
                    }
                    let mut x = rows[a];
                    if has(a) {
                        let dims = replaced(self.out.body.dims_of(x), to, &[piece]);
                        x = self.view(Op::Slice { from: to, to: Some(piece), at: ir::fault!("tp_overlap.reduce.chunk", 0, k * size) }, x, dims, v);
                    }
                    of.insert(*a, x);
                }
                let args = old.body[*c].args.iter().map(|a| of[a]).collect();
                // Parts are outermost, in the order in which they are sent.
                let own = replaced(old.body.dims_of(*c), r.along, &[piece]);
                let dims = r.parts.iter().map(|p| p.0).chain(own).collect();
                let x = self.step(old.body[*c].op.clone(), args, dims, *c);
                of.insert(*c, x);
            }
            let top = of[r.cone.last().expect("invariant: a cone has products")];
            out.push((self.exchange(v, top, replaced(old.body.dims_of(v), to, &[piece]), r.chunks), piece));
        }
        let joined = self.join(v, out, to, old.body.dims_of(v).to_vec());
        self.out.source[joined.index()] = old.source[v.index()].clone();
        self.map[v.index()] = Some(joined);
    }
}

/// Dims with one of them replaced by others.
fn replaced(dims: &[Dim], from: Dim, to: &[Dim]) -> Vec<Dim> {
    dims.iter().flat_map(|d| if *d == from { to.to_vec() } else { vec![*d] }).collect()
}
