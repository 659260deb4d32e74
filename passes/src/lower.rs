//! From local graphs to programs: kernels, buffers, commands, memory.
//!
//! Each chunk of a local graph becomes a body of commands. A value becomes a buffer where a kernel or a transfer writes it, and
//! a view of one where a view, slice or shard only renames it. Which arena a buffer is in follows from who reads it: within
//! its chunk, temporary; by later passes of the same microbatch, in a stash; by a chunk that runs once, persistent.

mod in_place;
mod spaces;

use crate::fuse::{Group as Fused, Role, fuse, role};
use crate::kernels::{self, Launch, Target};
use crate::memory::{self, ALIGN, Need};
use crate::storage::View;
use ir::dim::{Dim, IndexMap, Order};
use ir::graph::{Origin, Phase, Value};
use ir::kernel::{Family, Kernel};
use ir::local::{Chunk, Local};
use ir::mesh::Axis;
use ir::op::{Collective, DType, Op, Real};
use ir::program::{
    Action, Arena, Body, BodyId, BodyKind, Bucket, Buffer, BufferId, Command, Content, Group, GroupId, KernelId, Place, Program, Space, Stream,
};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

/// The kernels of all programs, each once.
#[derive(Default)]
pub struct Kernels {
    pub list: Vec<Kernel>,
    by_name: HashMap<String, KernelId>,
}

impl Kernels {
    fn add(&mut self, kernel: Kernel) -> KernelId {
        let next = KernelId(self.list.len() as u32);
        let id = *self.by_name.entry(kernel.name()).or_insert(next);
        if id == next {
            self.list.push(kernel);
        }
        id
    }
}

/// The bodies of one local graph, by chunk.
pub type Bodies = BTreeMap<Chunk, BodyId>;

/// How a local graph's numbers lead to the program's and the job's.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    /// Parameter slot of the program, per slot of the graph.
    pub slots: &'a [u32],
    /// Table of the job, per table of the graph.
    pub tables: &'a [u32],
    /// Begins the names of its bodies and buffers.
    pub prefix: &'a str,
}

/// Builds one program from a training graph and an evaluation graph of the same stage.
pub struct Lowering<'a> {
    pub program: Program,
    kernels: &'a mut Kernels,
    /// Buffers of parameters, optimizer states and tables, by what they hold.
    held: HashMap<Content, BufferId>,
    /// Copies of parameters in another precision, which training and evaluation share: each makes them before it reads them.
    copies: HashMap<(Content, DType), BufferId>,
    /// Names of parameters by slot of the program.
    names: Vec<String>,
    /// Buffers that pass from chunk to chunk, by graph, the chunk that writes them and all that touch them: those that live equally long are
    /// one stash, whose slots are as many as that needs.
    stashed: BTreeMap<(String, Chunk, BTreeSet<Chunk>), Vec<BufferId>>,
}

impl<'a> Lowering<'a> {
    pub fn new(kernels: &'a mut Kernels, names: Vec<String>, copied: BTreeSet<u32>, buckets: Vec<Bucket>) -> Lowering<'a> {
        let arena_bytes = [0; Arena::ALL.len()];
        let program = Program { buffers: vec![], arena_bytes, stashes: vec![], groups: vec![], copied, buckets, bodies: vec![] };
        Lowering { program, kernels, held: HashMap::new(), copies: HashMap::new(), names, stashed: BTreeMap::new() }
    }

    /// Lowers a local graph to bodies of the program.
    pub fn add(&mut self, local: &Local, names: &Names) -> Bodies {
        LocalLowering::new(self, local, names).run()
    }

    /// Assigns the offsets of what lives beyond one body; call once, after all graphs.
    pub fn finish(mut self) -> Program {
        let Program { buffers, arena_bytes, stashes, .. } = &mut self.program;
        let put = |buffer: &mut Buffer, end: &mut u64| {
            buffer.offset = *end;
            *end += buffer.bytes().next_multiple_of(ALIGN);
        };
        for arena in Space::ALL.map(Space::lasting) {
            buffers.iter_mut().filter(|b| b.arena == arena).for_each(|b| put(b, &mut arena_bytes[arena as usize]));
        }
        let stash = &mut arena_bytes[Arena::Stash as usize];
        for ids in self.stashed.values() {
            let begin = *stash;
            ids.iter().for_each(|id| put(&mut buffers[id.index()], stash));
            stashes.push(*stash - begin);
        }
        self.program
    }

    fn group(&mut self, group: Group) -> GroupId {
        let k = match self.program.groups.iter().position(|g| *g == group) {
            Some(k) => k,
            None => {
                self.program.groups.push(group);
                self.program.groups.len() - 1
            }
        };
        GroupId(k as u32)
    }
}

/// A unit of work that becomes commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Group(usize),
    Node(Value),
}

struct LocalLowering<'l, 'a, 'k> {
    l: &'l mut Lowering<'k>,
    local: &'a Local,
    names: &'a Names<'a>,
    groups: Vec<Fused>,
    group_of: HashMap<Value, usize>,
    users: Vec<Vec<(Value, usize)>>,
    /// Where a value lies, once computed.
    views: HashMap<Value, View>,
    /// Indices in memory, by chunk, memory and what they count.
    indices: HashMap<(Chunk, Space, IndexMap, Order), Place>,
    /// Sums over microbatches that later chunks read.
    sums: HashMap<Value, View>,
    /// Sums that are made at their place in a concatenation, and how many elements lie before it.
    homes: HashMap<Value, (Value, u64)>,
    /// Concatenations that are made so.
    joined: HashMap<Value, View>,
    /// Per buffer made here: the chunk that writes it and all chunks that touch it.
    touched: BTreeMap<BufferId, (Chunk, BTreeSet<Chunk>)>,
    commands: BTreeMap<Chunk, Vec<Command>>,
    chunk: Chunk,
    /// Where what is being made is.
    space: Space,
    /// Where a value lies in the memory that it was not made in, by the chunk that uses it there.
    moved: HashMap<(Value, Chunk), View>,
    /// Slots whose new parameters are written.
    renewed: BTreeSet<u32>,
}

impl<'l, 'a, 'k> LocalLowering<'l, 'a, 'k> {
    fn new(l: &'l mut Lowering<'k>, local: &'a Local, names: &'a Names<'a>) -> Self {
        let groups = fuse(local);
        let group_of = groups.iter().enumerate().flat_map(|(k, g)| g.nodes.iter().map(move |v| (*v, k))).collect();
        let users = local.body.users();
        LocalLowering {
            l,
            local,
            names,
            groups,
            group_of,
            users,
            views: HashMap::new(),
            indices: HashMap::new(),
            sums: HashMap::new(),
            homes: HashMap::new(),
            joined: HashMap::new(),
            touched: BTreeMap::new(),
            commands: BTreeMap::new(),
            chunk: Chunk::Prologue,
            space: Space::Device,
            moved: HashMap::new(),
            renewed: BTreeSet::new(),
        }
    }

    fn run(mut self) -> Bodies {
        self.find_homes();
        let chunks: BTreeSet<Chunk> = self.local.chunks.iter().copied().collect();
        for chunk in chunks {
            self.chunk = chunk;
            for item in self.order(chunk) {
                match item {
                    Item::Group(g) => {
                        self.space = self.groups[g].space;
                        self.emit_group(g);
                    }
                    Item::Node(v) => {
                        self.space = self.space_of(v);
                        self.emit_node(v);
                    }
                }
            }
        }
        self.write_updates();
        self.space = Space::Device;
        self.report();
        self.zero_sums();
        self.finish()
    }

    /// The items of a chunk, each after those it needs, otherwise in graph order; exchanges keep their order.
    fn order(&self, chunk: Chunk) -> Vec<Item> {
        let body = &self.local.body;
        let item = |v: Value| match (self.group_of.get(&v), role(body, v)) {
            (Some(g), _) => Some(Item::Group(*g)),
            (None, Role::Alias | Role::Exchange | Role::Source) => Some(Item::Node(v)),
            (None, Role::Compute | Role::Inline) => None,
        };
        let mut needs: BTreeMap<Item, BTreeSet<Item>> = BTreeMap::new();
        let mut last_exchange = None;
        for v in body.values().filter(|v| self.local.chunks[v.index()] == chunk) {
            let Some(own) = item(v) else { continue };
            let set = needs.entry(own).or_default();
            set.extend(body[v].args.iter().filter(|a| self.local.chunks[a.index()] == chunk).filter_map(|a| item(*a)).filter(|i| *i != own));
            if role(body, v) == Role::Exchange {
                set.extend(last_exchange);
                last_exchange = Some(own);
            }
        }
        let key = |i: &Item| match i {
            Item::Group(g) => self.groups[*g].nodes[0].0,
            Item::Node(v) => v.0,
        };
        let mut blocks: BTreeMap<Item, Vec<Item>> = BTreeMap::new();
        let mut open: BTreeMap<Item, usize> = BTreeMap::new();
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

    fn push(&mut self, action: Action, origin: &Origin, reason: Option<String>) {
        self.commands.entry(self.chunk).or_default().push(Command { stream: Stream::Compute, action, origin: origin.clone(), reason });
    }

    /// A new buffer for the value, dense in `order`. Its arena is settled at the end.
    fn buffer(&mut self, v: Value, order: &[Dim], content: Content) -> View {
        let body = &self.local.body;
        let node = &body[v];
        let id = BufferId(self.l.program.buffers.len() as u32);
        self.l.program.buffers.push(Buffer {
            name: format!("{}{v}", self.names.prefix),
            dtype: node.ty.dtype,
            dims: order.iter().map(|d| (body.dims.name(*d).to_string(), body.dims.size(*d))).collect(),
            arena: self.space.temporary(),
            offset: 0,
            content,
            origin: Some(node.origin.clone()),
        });
        self.touched.insert(id, (self.chunk, [self.chunk].into()));
        View { place: Place::start(id), dims: order.to_vec(), strides: body.dims.strides(order) }
    }

    /// Where the running chunk finds a value, in the memory in which it works.
    fn view(&mut self, v: Value) -> View {
        let view = self.own_view(v);
        if self.memory(&view) == self.space { view } else { self.moved(v, view) }
    }

    /// Where the running chunk finds a value, in whatever memory.
    fn own_view(&mut self, v: Value) -> View {
        let from = self.local.chunks[v.index()];
        let view = match self.sums.get(&v) {
            Some(sum) if self.crosses(from, self.chunk) => sum.clone(),
            _ => self.views.get(&v).expect("invariant: operands are computed first").clone(),
        };
        if let Some(t) = self.touched.get_mut(&view.place.buffer) {
            t.1.insert(self.chunk);
        }
        view
    }

    /// Like `view`, for an op that wants the elements in storage order one after the other.
    fn dense_view(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let order = body[v].ty.dims.clone();
        if role(body, v) == Role::Inline {
            let to = self.buffer(v, &order, Content::Activation);
            let family = Family::Loops { grid: order };
            let launch = kernels::build(body, &[], &family, vec![Target { value: v, view: to.clone(), accumulate: false }], &|_| {
                unreachable!("invariant: a source has no operands")
            });
            self.launch(launch, v);
            return to;
        }
        let view = self.view(v);
        if view.is_dense(&body.dims, &order) {
            return view;
        }
        self.copied(v, &view, &order)
    }

    /// A source in memory, for kernels that do not make it. Indices that count alike are stored once per chunk.
    fn stored(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let Op::Iota(d) = body[v].op else { return self.dense_view(v) };
        let key = (self.chunk, self.space, body.dims[d].index.clone(), body.dims[d].order);
        if let Some(place) = self.indices.get(&key) {
            return View { place: place.clone(), dims: vec![d], strides: vec![1] };
        }
        let view = self.dense_view(v);
        self.indices.insert(key, view.place.clone());
        view
    }

    fn copied(&mut self, v: Value, from: &View, order: &[Dim]) -> View {
        let to = self.buffer(v, order, Content::Activation);
        let launch = kernels::copy(&self.local.body, v, from, to.clone(), false);
        self.launch(launch, v);
        to
    }

    fn launch(&mut self, launch: Launch, at: Value) {
        let kernel = self.l.kernels.add(Kernel { on: self.space, ..launch.kernel });
        let origin = self.local.body[at].origin.clone();
        self.push(Action::Launch { kernel, args: launch.args, scalars: launch.scalars }, &origin, None);
    }

    /// Whether a chunk that runs at another rhythm reads the value, and sums it over microbatches.
    fn is_summed(&self, v: Value) -> bool {
        let chunk = self.local.chunks[v.index()];
        self.local.accumulate[v.index()]
            && (self.users[v.index()].iter().any(|(c, _)| self.crosses(chunk, self.local.chunks[c.index()])) || self.is_root(v))
    }

    fn crosses(&self, from: Chunk, to: Chunk) -> bool {
        from != to && !(from.is_pass() && to.is_pass())
    }

    fn is_root(&self, v: Value) -> bool {
        self.local.reports.iter().any(|r| r.1 == v)
    }

    /// A concatenation of nothing but what the microbatches leave, each value in storage order, needs no copy: they are made in its buffer. So
    /// are values of its own chunk that nothing else reads.
    fn find_homes(&mut self) {
        let body = &self.local.body;
        let results: BTreeSet<Value> = self.local.updates.iter().flat_map(|u| u.states.iter().copied().chain([u.new])).collect();
        for group in &self.groups {
            let [c] = group.nodes[..] else { continue };
            if !matches!(body[c].op, Op::Concat { .. }) || body.dims_of(c).len() != 1 {
                continue;
            }
            let chunk = self.local.chunks[c.index()];
            let mut at = 0;
            // Values with their places, and the chunk that makes them first.
            let (mut found, mut makers): (Vec<(Value, u64)>, Vec<Chunk>) = (vec![], vec![]);
            for a in &body[c].args {
                let whole = matches!(&body[*a].op, Op::View { from, .. } if *from == body.dims_of(body[*a].args[0]));
                let x = if whole { body[*a].args[0] } else { *a };
                // What changes a sum element by element is made in its place.
                let alone = |v: Value| self.users[v.index()].len() == 1 && !self.is_root(v) && !results.contains(&v);
                let sum = body[x].args.iter().copied().find(|y| {
                    let alike = body[*y].ty == body[x].ty && alone(x) && alone(*y) && body[x].op.is_pointwise();
                    alike && self.local.chunks[x.index()] == chunk && chunk != self.local.chunks[y.index()] && self.is_left(*y)
                });
                let first = sum.unwrap_or(x);
                let maker = self.local.chunks[first.index()];
                let fits = role(body, first) == Role::Compute && alone(first) && (self.is_left(first) || maker == chunk);
                if fits && found.iter().all(|f| f.0 != first) && !self.homes.contains_key(&first) {
                    found.extend(sum.into_iter().chain([x]).map(|v| (v, at)));
                    makers.push(maker);
                }
                at += body.elements(*a);
            }
            // One body makes, or adds to, all of it.
            if makers.len() == body[c].args.len() && makers.iter().all(|m| *m == makers[0]) {
                self.homes.extend(found.into_iter().map(|(x, at)| (x, (c, at))));
            }
        }
    }

    /// Whether a value is there once the microbatches are behind: as their sum, or of the only one.
    fn is_left(&self, v: Value) -> bool {
        self.is_summed(v) || self.local.chunks[v.index()].per_microbatch() && self.local.mesh.size(Axis::Microbatch) == 1
    }

    /// A buffer for a value that is left.
    fn sum_buffer(&mut self, v: Value) -> View {
        let order = self.local.body[v].ty.dims.clone();
        let Some((c, at)) = self.homes.get(&v).copied() else { return self.buffer(v, &order, Content::Accumulator) };
        let whole = match self.joined.get(&c) {
            Some(view) => view.clone(),
            None => {
                let dims = self.local.body[c].ty.dims.clone();
                let view = self.buffer(c, &dims, Content::Accumulator);
                self.joined.insert(c, view.clone());
                view
            }
        };
        let place = Place { offset: whole.place.offset + at, ..whole.place };
        View { place, strides: self.local.body.dims.strides(&order), dims: order }
    }

    fn emit_group(&mut self, g: usize) {
        let body = &self.local.body;
        let group = self.groups[g].clone();
        if let [c] = group.nodes[..]
            && let Some(view) = self.joined.get(&c)
        {
            self.views.insert(c, view.clone());
            return;
        }
        let inside: BTreeSet<Value> = group.nodes.iter().copied().collect();
        let mut views: HashMap<Value, View> = HashMap::new();
        for a in group.nodes.iter().flat_map(|v| &body[*v].args) {
            if inside.contains(a) || views.contains_key(a) {
                continue;
            }
            if role(body, *a) != Role::Inline {
                let view = self.view(*a);
                views.insert(*a, view);
            } else if !kernels::makes_sources(&group.family) {
                let view = self.stored(*a);
                views.insert(*a, view);
            }
        }
        let mut targets = vec![];
        for v in &group.outputs {
            let order = body[*v].ty.dims.clone();
            let summed = self.is_summed(*v);
            if summed {
                let sum = self.sum_buffer(*v);
                self.sums.insert(*v, sum.clone());
                targets.push(Target { value: *v, view: sum, accumulate: true });
            }
            let here = self.users[v.index()].iter().any(|(c, _)| !self.crosses(group.chunk, self.local.chunks[c.index()]));
            if !summed || here {
                let view = match self.in_place(*v, &group) {
                    Some(view) => view,
                    None if !summed && self.homes.contains_key(v) => self.sum_buffer(*v),
                    None => self.copy_of_param(*v).unwrap_or_else(|| self.buffer(*v, &order, Content::Activation)),
                };
                self.views.insert(*v, view.clone());
                targets.push(Target { value: *v, view, accumulate: false });
            }
        }
        let launch = kernels::build(body, &group.nodes, &group.family, targets, &|v| views[&v].clone());
        let named = *group.outputs.last().unwrap_or(&group.nodes[0]);
        self.launch(launch, named);
        if group.space == Space::Host {
            self.renew_params(&group.outputs);
        }
    }

    /// The buffer of a parameter's copy in another precision, if a value is one that is made once a step.
    fn copy_of_param(&mut self, v: Value) -> Option<View> {
        let body = &self.local.body;
        let slot = body.copied_param(v).filter(|_| self.chunk == Chunk::PrologueReduce)?;
        let slot = self.names.slots[slot as usize];
        let order = body.dims_of(v).to_vec();
        let key = (Content::Param { slot, index: order.iter().map(|d| body.dims[*d].index.clone()).collect() }, body[v].ty.dtype);
        if let Some(id) = self.l.copies.get(&key) {
            return Some(View { place: Place::start(*id), strides: body.dims.strides(&order), dims: order });
        }
        let view = self.buffer(v, &order, Content::Accumulator);
        let id = view.place.buffer;
        self.touched.remove(&id);
        let buffer = &mut self.l.program.buffers[id.index()];
        buffer.arena = Arena::Persistent;
        buffer.name = format!("{}.{}", self.l.names[slot as usize], buffer.dtype.name());
        self.l.copies.insert(key, id);
        Some(view)
    }

    fn emit_node(&mut self, v: Value) {
        let body = &self.local.body;
        let node = &body[v];
        let order = node.ty.dims.clone();
        let view = match &node.op {
            Op::Param(slot) => {
                let slot = self.names.slots[*slot as usize];
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                self.hold(v, self.l.names[slot as usize].clone(), Content::Param { slot, index })
            }
            Op::State(slot, state) => {
                let slot = self.names.slots[*slot as usize];
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let name = format!("{}.state{state}", self.l.names[slot as usize]);
                self.hold(v, name, Content::State { slot, state: *state, index })
            }
            Op::Table(table) => {
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let table = self.names.tables[*table as usize];
                self.hold(v, format!("table{table}"), Content::Table { table, index })
            }
            Op::Input(input) => {
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let view = self.buffer(v, &order, Content::Activation);
                self.push(Action::Load { input: *input, dst: view.place.buffer, index }, &node.origin, None);
                view
            }
            Op::Recv { hops, channel } => {
                let view = self.buffer(v, &order, Content::Activation);
                let count = body.elements(v);
                self.push(
                    Action::Recv { hops: *hops, channel: *channel, dtype: node.ty.dtype, count, dst: view.place.clone() },
                    &node.origin,
                    self.local.reasons[v.index()].clone(),
                );
                view
            }
            Op::Limit { most } => {
                let view = self.dense_view(node.args[0]);
                self.push(Action::Limit { src: view.place.clone(), most: *most }, &node.origin, self.local.reasons[v.index()].clone());
                view
            }
            Op::Send { hops, channel } => {
                let view = self.dense_view(node.args[0]);
                let count = body.elements(v);
                self.push(
                    Action::Send { hops: *hops, channel: *channel, dtype: node.ty.dtype, count, src: view.place.clone() },
                    &node.origin,
                    self.local.reasons[v.index()].clone(),
                );
                view
            }
            Op::Collective { kind, subs, stages, .. } => {
                let src = self.dense_view(node.args[0]);
                let dst = self.destination(v, *kind, subs, &src);
                let group = self.l.group(Group { subs: subs.clone(), stages: stages.clone() });
                let count = match kind {
                    Collective::AllReduce(_) | Collective::Shift => body.elements(v),
                    Collective::AllGather => body.elements(node.args[0]),
                    Collective::ReduceScatter(_) => body.elements(v),
                    Collective::AllToAll => body.elements(v) / subs.iter().map(|u| self.local.mesh[*u].size).product::<u64>(),
                };
                let action = Action::Collective { kind: *kind, group, dtype: node.ty.dtype, count, src: src.place, dst: dst.place.clone() };
                self.push(action, &node.origin, self.local.reasons[v.index()].clone());
                dst
            }
            _ => self.alias(v),
        };
        self.views.insert(v, view);
        if self.is_summed(v) {
            let from = self.views[&v].clone();
            let sum = self.sum_buffer(v);
            let launch = kernels::copy(body, v, &from, sum.clone(), true);
            self.launch(launch, v);
            self.sums.insert(v, sum);
        }
    }

    fn alias(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let node = &body[v];
        let order = &node.ty.dims;
        let arg = node.args[0];
        let from = if role(body, arg) == Role::Inline { self.dense_view(arg) } else { self.view(arg) };
        if let Some(view) = from.through(&body.dims, &node.op, order) {
            return view;
        }
        match &node.op {
            // The dims to merge are brought together first.
            Op::View { from: old, to } => {
                let at = order.iter().position(|d| to.contains(d)).unwrap_or(order.len());
                let mut dims: Vec<Dim> = order.iter().copied().filter(|d| !to.contains(d)).collect();
                dims.splice(at.min(dims.len())..at.min(dims.len()), old.iter().copied());
                let near = self.copied(arg, &from, &dims);
                near.through(&body.dims, &node.op, order).expect("invariant: dense dims side by side merge")
            }
            // A part that is not consecutive: gathered piece by piece.
            Op::Shard { from: whole, to, index } => {
                let to_buffer = self.buffer(v, order, Content::Activation);
                let at = order.iter().position(|d| d == to).expect("invariant: the result has the dim");
                let stride = from.stride(*whole).expect("invariant: the operand has the dim");
                let mut base = from.place.clone();
                if let ir::dim::Base::Coords(form) = &index.base {
                    base.coords.extend(form.iter().map(|(u, s)| (*u, s * stride)));
                }
                // One copy per outer piece; the innermost piece is consecutive.
                let (inner, _) = *index.parts.last().expect("invariant: an index map has parts");
                let mut scratch = body.clone();
                let piece = scratch.dims.add(ir::dim::DimInfo::new("piece", inner));
                let dims: Vec<Dim> = order.iter().map(|d| if d == to { piece } else { *d }).collect();
                scratch.nodes[v.index()].ty.dims = dims.clone();
                let strides = |view: &View, own: Dim| {
                    dims.iter().map(|d| if *d == piece { view.stride(own) } else { view.stride(*d) }.unwrap_or(0)).collect::<Vec<_>>()
                };
                for k in 0..index.len() / inner {
                    let mut src = base.clone();
                    src.offset += index.offset(k * inner) * stride;
                    let mut dst = to_buffer.place.clone();
                    dst.offset += k * inner * to_buffer.strides[at];
                    let src = View { place: src, dims: dims.clone(), strides: strides(&from, *whole) };
                    let dst = View { place: dst, dims: dims.clone(), strides: strides(&to_buffer, *to) };
                    let launch = kernels::copy(&scratch, v, &src, dst, false);
                    self.launch(launch, v);
                }
                to_buffer
            }
            _ => self.copied(arg, &from, order),
        }
    }

    /// The buffer of something that lives over steps.
    fn hold(&mut self, v: Value, name: String, content: Content) -> View {
        let body = &self.local.body;
        let order = body[v].ty.dims.clone();
        if let Some(id) = self.l.held.get(&content) {
            return View { place: Place::start(*id), dims: order.clone(), strides: body.dims.strides(&order) };
        }
        let view = self.buffer(v, &order, content.clone());
        let id = view.place.buffer;
        self.touched.remove(&id);
        let buffer = &mut self.l.program.buffers[id.index()];
        buffer.arena = self.space.lasting();
        buffer.name = name;
        self.l.held.insert(content, id);
        view
    }

    fn report(&mut self) {
        self.chunk = Chunk::Reduce;
        for (report, v) in &self.local.reports {
            let view = self.dense_view(*v);
            let origin = self.local.body[*v].origin.clone();
            self.push(Action::Report { report: *report, src: view.place }, &origin, None);
        }
    }

    /// Every sum starts at zero.
    fn zero_sums(&mut self) {
        let mut ids: Vec<(BufferId, Chunk)> = self.sums.iter().map(|(v, s)| (s.place.buffer, self.local.chunks[v.index()])).collect();
        ids.sort_unstable();
        // Of one buffer there may be several.
        ids.dedup_by_key(|i| i.0);
        let fills: Vec<Command> = ids
            .into_iter()
            .map(|(buffer, _)| Command {
                stream: Stream::Compute,
                action: Action::Fill { buffer, value: Real(0.0) },
                origin: Origin::new(Phase::Forward),
                reason: None,
            })
            .collect();
        for f in &fills {
            if let Action::Fill { buffer, .. } = &f.action {
                self.touched.remove(buffer);
                self.l.program.buffers[buffer.index()].arena = Arena::Persistent;
            }
        }
        if !fills.is_empty() {
            self.l.program.bodies.push(Body { name: format!("{}zero", self.names.prefix), kind: BodyKind::Prologue, commands: fills });
        }
    }

    /// Settles arenas, plans the temporary one of each chunk, and adds the bodies.
    fn finish(mut self) -> Bodies {
        for (id, (chunk, all)) in &self.touched {
            let space = self.l.program.buffers[id.index()].arena.space();
            let arena = if all.len() == 1 {
                space.temporary()
            } else if all.iter().all(|c| c.is_pass()) {
                let lifetime = (self.names.prefix.to_string(), *chunk, all.clone());
                self.l.stashed.entry(lifetime).or_default().push(*id);
                Arena::Stash
            } else {
                space.lasting()
            };
            let buffer = &mut self.l.program.buffers[id.index()];
            buffer.arena = arena;
            if arena.lasts() {
                buffer.content = Content::Accumulator;
            }
        }
        let mut bodies = Bodies::new();
        for (chunk, commands) in std::mem::take(&mut self.commands) {
            self.plan_temporary(&commands);
            let kind = match chunk {
                Chunk::Prologue | Chunk::PrologueReduce => BodyKind::Prologue,
                Chunk::Forward(l) => BodyKind::Forward(l),
                Chunk::Backward(l) => BodyKind::Backward(l),
                Chunk::Weight(l) => BodyKind::Weight(l),
                Chunk::Reduce => BodyKind::Reduce,
                Chunk::Update => BodyKind::Update,
            };
            bodies.insert(chunk, BodyId(self.l.program.bodies.len() as u32));
            self.l.program.bodies.push(Body { name: format!("{}{chunk}", self.names.prefix), kind, commands });
        }
        bodies
    }

    fn plan_temporary(&mut self, commands: &[Command]) {
        for arena in Space::ALL.map(Space::temporary) {
            let mut lives: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
            for (k, c) in commands.iter().enumerate() {
                for id in buffers_of(&c.action) {
                    if self.l.program.buffers[id.index()].arena == arena {
                        lives.entry(id).or_insert((k, k)).1 = k;
                    }
                }
            }
            let ids: Vec<BufferId> = lives.keys().copied().collect();
            let needs: Vec<Need> =
                ids.iter().map(|id| Need { bytes: self.l.program.buffers[id.index()].bytes(), first: lives[id].0, last: lives[id].1 }).collect();
            let (offsets, total) = memory::assign(&needs);
            for (id, offset) in ids.iter().zip(offsets) {
                self.l.program.buffers[id.index()].offset = offset;
            }
            let bytes = &mut self.l.program.arena_bytes[arena as usize];
            *bytes = total.max(*bytes);
        }
    }
}

/// The buffers that an action reads or writes.
pub fn buffers_of(action: &Action) -> Vec<BufferId> {
    match action {
        Action::Launch { args, .. } => args.iter().map(|p| p.buffer).collect(),
        Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => vec![src.buffer, dst.buffer],
        Action::Send { src, .. } | Action::Report { src, .. } | Action::Limit { src, .. } => vec![src.buffer],
        Action::Recv { dst, .. } => vec![dst.buffer],
        Action::Fill { buffer, .. } => vec![*buffer],
        Action::Load { dst, .. } => vec![*dst],
        Action::Record { .. } | Action::Wait { .. } => vec![],
    }
}
