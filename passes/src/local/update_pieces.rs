//! Cuts large updates on the host into pieces, so that it works on some of their elements at a time (ZeRO-Infinity's
//! pipelined optimizer, Rajbhandari et al. 2021): then its memory holds a few pieces of gradients and new parameters,
//! and of states that rest on a disk, and what comes, is computed and goes does so at the same time.
//!
//! An update is computed element by element ([`crate::local::offload`]), so that a piece of it is that of a piece of
//! its operands. Pieces are along the first dim of more than one element, which is one range of memory. New states are
//! the concatenation of their pieces on the host, new parameters that on the device. Lowering makes both in their
//! place, if it can ([`crate::lower`]). An update that looks at all of what it has computed, as Muon's does, stays whole.

use crate::local::offload::own_part;
use crate::local::role::{Role, role, without_dead};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Type, Users, Value};
use ir::kernel::ALIGN;
use ir::local::Local;
use ir::op::Op;
use ir::options::{Offload, Options, ParamOffload};
use ir::program::BLOCK;
use std::collections::{BTreeSet, HashMap};

/// Elements of a piece, at most, if no other size of buckets is asked for: 32 MiB of each state.
const PIECE: u64 = 8 << 20;

/// Pieces of an update, at most: each has commands of its own.
const MOST: u64 = 256;

/// The length of pieces, in elements.
#[derive(Clone, Copy, Debug)]
pub struct PieceSize {
    /// The greatest length, unless a row or a unit is longer.
    most: u64,
    /// Pieces begin at multiples of so many elements.
    unit: u64,
}

impl PieceSize {
    /// The bucket size that was asked for, or a default, in units that suit where states and parameters wait.
    pub fn of(options: &Options) -> PieceSize {
        let on_disk = options.offload == Offload::Disk || options.param_offload == ParamOffload::Disk;
        // On a disk a unit is a whole block even in 16 bits; in memory it is aligned for kernels of any type.
        let unit = if on_disk { BLOCK / 2 } else { ALIGN };
        PieceSize { most: options.bucket_size.unwrap_or(PIECE), unit }
    }

    /// The lengths of pieces of so many rows of some elements each, in rows.
    fn pieces(self, rows: u64, elements: u64) -> Vec<u64> {
        let most = self.most.max((rows * elements).div_ceil(MOST));
        // `step` is the least number of rows that fills whole units.
        let step = (1..=self.unit).find(|n| (n * elements).is_multiple_of(self.unit)).unwrap_or(self.unit);
        let of_piece = (most / elements / step).max(1) * step;
        (0..ir::fault!("update_pieces.last.lost", rows / of_piece, rows.div_ceil(of_piece))).map(|k| of_piece.min(rows - k * of_piece)).collect()
    }
}

/// An update in pieces.
struct UpdateSplit {
    /// The nodes that it computes element by element, in order.
    nodes: Vec<Value>,
    /// The operands of `nodes` from outside.
    read: Vec<Value>,
    along: Dim,
    /// Rows of each piece.
    rows: Vec<u64>,
}

/// Cuts the updates that are longer than a piece.
pub fn cut(local: Local, size: PieceSize) -> Local {
    let users = local.body.users();
    let mut taken = BTreeSet::new();
    let cuts: Vec<UpdateSplit> = (0..local.updates.len()).filter_map(|k| find(&local, &users, k, size, &mut taken)).collect();
    if cuts.is_empty() { local } else { in_pieces(&local, &users, &cuts) }
}

/// How an update is cut, if it is large and computed element by element. No two updates share nodes.
fn find(local: &Local, users: &Users, k: usize, size: PieceSize, taken: &mut BTreeSet<Value>) -> Option<UpdateSplit> {
    let (body, update) = (&local.body, &local.updates[k]);
    let own = own_part(body, update.new);
    let along = body.dims_of(own).iter().copied().find(|d| body.dims.size(*d) > 1)?;
    let (all, elements) = (body.dims.size(along), body.elements(own));
    if elements <= size.most {
        return None;
    }
    let rows = size.pieces(all, elements / all);
    if rows.len() < 2 {
        return None;
    }
    let shape = |v: Value| body.dims_of(v).iter().copied().collect::<BTreeSet<Dim>>();
    let whole = shape(own);
    let computed = |v: Value| local.host.contains(&v) && role(body, v) == Role::Compute && shape(v) == whole;
    let (mut nodes, mut stack): (BTreeSet<Value>, Vec<Value>) = (BTreeSet::new(), update.states.iter().copied().chain([own]).collect());
    while let Some(v) = stack.pop() {
        if computed(v) && nodes.insert(v) {
            stack.extend(body[v].args.iter().filter(|a| computed(**a)));
        }
    }
    // Operands must have the whole shape and be in memory, or be scalars.
    let read: BTreeSet<Value> = nodes.iter().flat_map(|v| &body[*v].args).copied().filter(|a| !nodes.contains(a)).collect();
    let fits = read.iter().all(|a| shape(*a).is_empty() || shape(*a) == whole && role(body, *a) != Role::Inline);
    let roots = update.states.iter().chain([&own]).all(|v| nodes.contains(v));
    // Another update that reads these values would wait for the last piece.
    let alone = nodes.iter().all(|v| !taken.contains(v) && users[v.index()].iter().all(|(c, _)| nodes.contains(c) || !local.host.contains(c)));
    if !fits || !roots || !alone || follows(body, &read, &nodes) {
        return None;
    }
    taken.extend(&nodes);
    Some(UpdateSplit { nodes: nodes.into_iter().collect(), read: read.into_iter().collect(), along, rows })
}

/// Whether some values depend on others, as Muon's update does on the whole new momentum.
fn follows(body: &Body, values: &BTreeSet<Value>, from: &BTreeSet<Value>) -> bool {
    let Some(first) = from.first() else { return false };
    let (mut seen, mut stack): (BTreeSet<Value>, Vec<Value>) = (BTreeSet::new(), values.iter().copied().collect());
    while let Some(v) = stack.pop() {
        if from.contains(&v) {
            return true;
        }
        // Operands precede their users, so values before `first` cannot depend on `from`.
        if v > *first && seen.insert(v) {
            stack.extend(&body[v].args);
        }
    }
    false
}

/// The graph with cut updates.
fn in_pieces(local: &Local, users: &Users, cuts: &[UpdateSplit]) -> Local {
    let body = Body { dims: local.body.dims.clone(), nodes: vec![] };
    let out = Local { body, chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], host: BTreeSet::new(), ..local.clone() };
    let n = local.body.nodes.len();
    let made: HashMap<Value, u32> = local.updates.iter().map(|u| (u.new, u.slot)).collect();
    let kept = local.updates.iter().flat_map(|u| &u.states).copied().collect();
    let slot = |v: &Value| if let Op::Param(slot) = local.body[*v].op { Some(slot) } else { None };
    let resting = local.host.iter().filter_map(slot).collect();
    let mut c = UpdateCutter { old: local, users, made, kept, resting, out, map: vec![None; n], states: HashMap::new() };
    let of: HashMap<Value, &UpdateSplit> = cuts.iter().flat_map(|cut| cut.nodes.iter().map(move |v| (*v, cut))).collect();
    let (mut waiting, mut open): (Vec<Value>, Vec<&UpdateSplit>) = (vec![], vec![]);
    for v in local.body.values() {
        match of.get(&v) {
            // A cut update begins as soon as all its operands are there.
            Some(cut) => open.extend(Some(*cut).filter(|cut| cut.nodes.first() == Some(&v))),
            None if c.is_there(v) => c.copy(v),
            None => waiting.push(v),
        }
        open.retain(|cut| {
            let ready = c.has_operands(cut);
            if ready {
                c.pieces(cut);
            }
            !ready
        });
        waiting.retain(|w| {
            let ready = c.is_there(*w);
            if ready {
                c.copy(*w);
            }
            !ready
        });
    }
    // Updates that wait for each other stay whole.
    if !open.is_empty() {
        return local.clone();
    }
    let UpdateCutter { mut out, map, states, .. } = c;
    let new = |v: Value| map[v.index()].expect("invariant: what a step leaves is there at its end");
    out.reports.iter_mut().for_each(|r| r.1 = new(r.1));
    for u in &mut out.updates {
        u.new = new(u.new);
        u.states.iter_mut().for_each(|s| *s = states.get(s).copied().unwrap_or_else(|| new(*s)));
    }
    without_dead(out)
}

struct UpdateCutter<'a> {
    old: &'a Local,
    users: &'a Users,
    /// The slot whose new parameter a value is.
    made: HashMap<Value, u32>,
    /// New states.
    kept: BTreeSet<Value>,
    /// Slots of parameters that rest on the host.
    resting: BTreeSet<u32>,
    out: Local,
    /// Per old value, the new one, for readers and new parameters.
    map: Vec<Option<Value>>,
    /// New states that are in pieces.
    states: HashMap<Value, Value>,
}

impl UpdateCutter<'_> {
    fn is_there(&self, v: Value) -> bool {
        self.old.body[v].args.iter().all(|a| self.map[a.index()].is_some())
    }

    fn has_operands(&self, cut: &UpdateSplit) -> bool {
        cut.read.iter().all(|a| self.map[a.index()].is_some())
    }

    fn get(&self, v: Value) -> Value {
        self.map[v.index()].expect("invariant: operands come first")
    }

    fn copy(&mut self, v: Value) {
        let node = &self.old.body[v];
        let args = node.args.iter().map(|a| self.get(*a)).collect();
        let w = self.push(Node { args, ..node.clone() }, v);
        self.out.accumulate[w.index()] = self.old.accumulate[v.index()];
        self.out.source[w.index()] = self.old.source[v.index()].clone();
        self.out.reasons[w.index()] = self.old.reasons[v.index()].clone();
        if self.old.host.contains(&v) {
            self.out.host.insert(w);
        }
        self.map[v.index()] = Some(w);
    }

    fn push(&mut self, node: Node, like: Value) -> Value {
        self.out.push(node, self.old.chunks[like.index()])
    }

    /// Emits all pieces of an update, one after the other, and their concatenations.
    fn pieces(&mut self, cut: &UpdateSplit) {
        let old = self.old;
        let dims: Vec<Dim> = cut.rows.iter().map(|rows| self.out.body.dims.add(DimInfo::new("piece", *rows))).collect();
        let mut parts: HashMap<Value, Vec<Value>> = HashMap::new();
        let mut at = 0;
        for (piece, rows) in dims.iter().zip(&cut.rows) {
            let mut of: HashMap<Value, Value> = HashMap::new();
            for v in &cut.nodes {
                for a in &old.body[*v].args {
                    if !of.contains_key(a) {
                        let x = self.slice(*a, *v, cut.along, *piece, at);
                        of.insert(*a, x);
                    }
                }
                let node = &old.body[*v];
                let here = |d: &Dim| if *d == cut.along { *piece } else { *d };
                let ty = Type::new(node.ty.dtype, node.ty.dims.iter().map(here).collect::<Vec<_>>());
                let args = node.args.iter().map(|a| of[a]).collect();
                let op = node.op.map_dims(&mut |d| here(&d));
                let x = self.push(Node { op, args, ty, origin: node.origin.clone() }, *v);
                self.out.host.insert(x);
                of.insert(*v, x);
                parts.entry(*v).or_default().push(x);
            }
            at += ir::fault!("update_pieces.next.first", 0, *rows);
        }
        let states: Vec<Value> = cut.nodes.iter().copied().filter(|v| self.kept.contains(v)).collect();
        for v in states {
            let w = self.joined(v, &parts[&v], &dims, cut.along);
            self.out.host.insert(w);
            self.out.source[w.index()] = old.source[v.index()].clone();
            self.states.insert(v, w);
        }
        let read: Vec<Value> = cut.nodes.iter().copied().filter(|v| self.is_read(*v, &parts)).collect();
        for v in read {
            let w = self.joined(v, &parts[&v], &dims, cut.along);
            self.out.source[w.index()] = old.source[v.index()].clone();
            if self.rests_on_host(v) {
                self.out.host.insert(w);
            }
            self.map[v.index()] = Some(w);
        }
    }

    /// Whether a value is a new parameter, or others than its own pieces read it.
    fn is_read(&self, v: Value, parts: &HashMap<Value, Vec<Value>>) -> bool {
        self.made.contains_key(&v) || self.users[v.index()].iter().any(|(c, _)| !parts.contains_key(c))
    }

    /// Whether a value is a new parameter that rests on the host.
    fn rests_on_host(&self, v: Value) -> bool {
        self.made.get(&v).is_some_and(|slot| self.resting.contains(slot))
    }

    fn joined(&mut self, v: Value, parts: &[Value], dims: &[Dim], along: Dim) -> Value {
        let node = &self.old.body[v];
        let op = Op::Concat { from: dims.to_vec(), to: along };
        let args = ir::fault!("update_pieces.join.reversed", parts.iter().rev().copied().collect(), parts.to_vec());
        self.push(Node { op, args, ty: node.ty.clone(), origin: node.origin.clone() }, v)
    }

    /// A piece's slice of an operand, in the chunk of `like`.
    fn slice(&mut self, a: Value, like: Value, along: Dim, piece: Dim, at: u64) -> Value {
        let (x, ty) = (self.get(a), &self.old.body[a].ty);
        if !ty.has(along) {
            return x;
        }
        let dims: Vec<Dim> = ty.dims.iter().map(|d| if *d == along { piece } else { *d }).collect();
        let op = Op::Slice { from: along, to: Some(piece), at: ir::fault!("update_pieces.slice.first", 0, at) };
        let origin = self.old.body[like].origin.clone();
        self.push(Node { op, args: vec![x], ty: Type::new(ty.dtype, dims), origin }, like)
    }
}
