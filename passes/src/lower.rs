//! From local graphs to programs: kernels, buffers, commands.
//!
//! Each chunk of a local graph becomes a body of commands. A value becomes a buffer where a kernel or a transfer
//! writes it, and a view of one where a view, slice or shard only renames it. Which arena a buffer is in follows
//! from who reads it: within its chunk, temporary; by later passes of the same microbatch, in a stash; by a chunk
//! that runs once, persistent. The last to read an operand element by element writes over it. Buffers have no
//! places yet: these follow from the order of commands ([`crate::commands::allocate`]).

mod added;
mod arenas;
mod emit;
pub mod fuse;
mod in_place;
mod items;
pub mod job;
pub mod kernels;
mod pieces;
mod places;
mod predicates;
mod spaces;
mod sums;
pub mod view;

use crate::lower::fuse::{Group as Fused, fuse};
use crate::lower::view::View;
use hashbrown::{DefaultHashBuilder, HashTable};
use ir::dim::{IndexMap, Order};
use ir::graph::{Users, Value};
use ir::kernel::Kernel;
use ir::local::{Chunk, Local};
use ir::op::{DType, Op};
use ir::program::{Arena, BodyId, Bucket, BufferAddress, BufferId, Command, Content, Group, GroupId, KernelId, Program, Space};
use items::WorkItem;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::BuildHasher;

/// The kernels of all programs, without duplicates.
#[derive(Default)]
pub struct Kernels {
    /// Kernels by [`KernelId`], in the order in which they were first added.
    pub list: Vec<Kernel>,
    by_name: HashMap<String, KernelId>,
    /// The added kernels in plain form, by hash. Most kernels repeat those of other layers, and a hash is faster than
    /// a name.
    known: HashTable<(u64, Kernel, KernelId)>,
    hasher: DefaultHashBuilder,
}

impl Kernels {
    fn add(&mut self, kernel: Kernel) -> KernelId {
        let plain = kernel.plain();
        let hash = self.hasher.hash_one((&plain.family, &plain.inputs, &plain.outputs));
        let hash = plain.body.nodes.iter().fold(hash, |hash, n| self.hasher.hash_one((hash, &n.op, &n.args)));
        if let Some((_, _, id)) = self.known.find(hash, |k| ir::fault!("kernels.known.sizes", k.1.body.nodes == plain.body.nodes, k.1 == plain)) {
            return *id;
        }
        let next = KernelId(self.list.len() as u32);
        let id = *self.by_name.entry(kernel.name()).or_insert(next);
        if id == next {
            self.list.push(kernel);
        }
        self.known.insert_unique(hash, (hash, plain, id), |k| k.0);
        id
    }
}

/// The bodies of one local graph, by chunk.
pub type ChunkBodies = BTreeMap<Chunk, BodyId>;

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
    /// What has been lowered so far; its buffers have no places yet.
    pub program: Program,
    kernels: &'a mut Kernels,
    /// Buffers of parameters, optimizer states and tables, by what they hold.
    held: HashMap<Content, BufferId>,
    /// Copies of parameters in another precision, which training and evaluation share: each makes them before it reads them.
    copies: HashMap<(Content, DType), BufferId>,
    /// Names of parameters by slot of the program.
    names: Vec<String>,
}

impl<'a> Lowering<'a> {
    /// Begins a program without bodies; `names` and `copied` are of its parameter slots.
    pub fn new(kernels: &'a mut Kernels, names: Vec<String>, copied: BTreeSet<u32>, buckets: Vec<Bucket>) -> Lowering<'a> {
        let arena_bytes = [0; Arena::ALL.len()];
        let program = Program { buffers: vec![], arena_bytes, stashes: vec![], groups: vec![], copied, buckets, bodies: vec![] };
        Lowering { program, kernels, held: HashMap::new(), copies: HashMap::new(), names }
    }

    /// Lowers a local graph to bodies of the program.
    pub fn add(&mut self, local: &Local, names: &Names) -> ChunkBodies {
        LocalLowering::new(self, local, names).run()
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

struct LocalLowering<'l, 'a, 'k> {
    l: &'l mut Lowering<'k>,
    local: &'a Local,
    names: &'a Names<'a>,
    groups: Vec<Fused>,
    /// The groups that compute a value; first the one that stores it, if one does.
    groups_of: HashMap<Value, Vec<usize>>,
    /// Groups that have their command.
    done: BTreeSet<usize>,
    users: Users,
    /// The update that makes a value a new parameter or state.
    renews: HashMap<Value, usize>,
    /// The nodes that read a parameter (of a slot), or a state of it.
    readers: HashMap<(u32, Option<u32>), Vec<Value>>,
    /// Where a value lies, once computed.
    views: HashMap<Value, View>,
    /// Indices in memory, by chunk, memory and what they count.
    indices: HashMap<(Chunk, Space, IndexMap, Order), BufferAddress>,
    /// Sums over microbatches that later chunks read.
    sums: HashMap<Value, View>,
    /// Products that are added to the buffer of their sum.
    added: added::InPlaceSums,
    /// Of each value: the bool without which it is not made.
    predicates: Vec<Option<Value>>,
    /// Sums that are made at their place in a concatenation, and how many elements lie before it.
    homes: HashMap<Value, (Value, u64)>,
    /// Concatenations of updates whose pieces are made in their places.
    pieced: BTreeSet<Value>,
    /// Concatenations that are made so.
    joined: HashMap<Value, View>,
    /// Per buffer made here: all chunks that touch it.
    touched: BTreeMap<BufferId, BTreeSet<Chunk>>,
    commands: BTreeMap<Chunk, Vec<Command>>,
    chunk: Chunk,
    /// Where what is being made is.
    space: Space,
    /// Where the bool is without which it is left out.
    predicate: Option<BufferAddress>,
    /// Where a value lies in the memory that it was not made in, by the chunk that uses it there.
    moved: HashMap<(Value, Chunk), View>,
    /// Slots whose new parameters are written.
    renewed: BTreeSet<u32>,
}

impl<'l, 'a, 'k> LocalLowering<'l, 'a, 'k> {
    fn new(l: &'l mut Lowering<'k>, local: &'a Local, names: &'a Names<'a>) -> Self {
        let added = added::sums(local);
        let predicates = predicates::predicates(local, &added);
        let groups = fuse(local, &added, &predicates);
        let mut groups_of: HashMap<Value, Vec<usize>> = HashMap::new();
        for (k, group) in groups.iter().enumerate() {
            for v in &group.nodes {
                let of = groups_of.entry(*v).or_default();
                of.insert(if group.outputs.contains(v) { 0 } else { of.len() }, k);
            }
        }
        let users = local.body.users();
        let mut renews = HashMap::new();
        for (k, u) in local.updates.iter().enumerate() {
            for v in [u.new].iter().chain(&u.states) {
                renews.entry(*v).or_insert(k);
            }
        }
        let mut readers: HashMap<(u32, Option<u32>), Vec<Value>> = HashMap::new();
        for v in local.body.values() {
            match local.body[v].op {
                Op::Param(slot) => readers.entry((slot, None)).or_default().push(v),
                Op::State(slot, state) => readers.entry((slot, Some(state))).or_default().push(v),
                _ => {}
            }
        }
        LocalLowering {
            l,
            local,
            names,
            groups,
            groups_of,
            done: BTreeSet::new(),
            users,
            renews,
            readers,
            views: HashMap::new(),
            indices: HashMap::new(),
            sums: HashMap::new(),
            added,
            predicates,
            homes: HashMap::new(),
            pieced: BTreeSet::new(),
            joined: HashMap::new(),
            touched: BTreeMap::new(),
            commands: BTreeMap::new(),
            chunk: Chunk::Prologue,
            space: Space::Device,
            predicate: None,
            moved: HashMap::new(),
            renewed: BTreeSet::new(),
        }
    }

    fn run(mut self) -> ChunkBodies {
        self.find_pieced();
        self.find_homes();
        let chunks: BTreeSet<Chunk> = self.local.chunks.iter().copied().collect();
        for chunk in chunks {
            self.chunk = chunk;
            for item in self.order(chunk) {
                match item {
                    WorkItem::Group(g) => {
                        self.space = self.groups[g].space;
                        self.choose(self.groups[g].predicate);
                        self.emit_group(g);
                    }
                    WorkItem::Node(v) => {
                        self.space = self.space_of(v);
                        self.choose(self.predicates[v.index()]);
                        self.emit_node(v);
                    }
                }
            }
        }
        self.predicate = None;
        self.write_updates();
        self.space = Space::Device;
        self.report();
        self.zero_sums();
        self.finish()
    }
}
