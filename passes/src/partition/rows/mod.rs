//! Emits what is stored in rows of experts ([`crate::partition::stored_rows`]).
//!
//! Rows are `[parts.., slot, rest..]`, sorted by expert and then by token; slots beyond the last row are nobody's, and what lies there is never of use.
//! At home a rank has a part for each *group* of experts that the sub-axes of the experts' dim make, so that what goes to another rank lies together.
//! An exchange of experts for tokens trades such a part for one of the rank that tokens come from. So no row is ever moved within a rank
//! between its dispatch and its combination. Tables of i32 say what slots hold (`tables.rs`).

mod exchange;
mod leaves;
mod places;
mod tables;

use super::emit::Emitter;
use ir::build::Builder;
use ir::dim::Dim;
use ir::graph::{Origin, Type, Value};
use ir::local::Chunk;
use ir::mesh::SubAxis;
use ir::op::Op;
use ir::options::{MOE_ROOM, MoeBuffer};
use ir::sharded::Placement;
use std::collections::HashMap;
use tables::{HomeTables, SlotTable, Sorted};

/// A dim of rows or of their tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RowDim {
    /// Homes along a sub-axis whose tokens were gathered.
    Home(SubAxis),
    /// Groups of experts along a sub-axis that splits the experts' dim, here or elsewhere.
    Groups(SubAxis),
    /// The experts of a group.
    Group(Dim),
    /// Rows of a home and a group.
    Slot(usize),
    /// All slots of a home.
    Slots(usize),
    /// The tokens of a home.
    Token(usize),
    /// Pairs of a token of a home and an expert of a group.
    Place(usize),
}

/// Where rows are: the layout, the sub-axes along which tokens were gathered, and those along which a rank has its part of the experts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RowSharding {
    layout: usize,
    gathered: Vec<SubAxis>,
    split: Vec<SubAxis>,
}

/// When and for what nodes are emitted.
#[derive(Clone, Copy)]
struct RowContext<'o> {
    chunk: Chunk,
    origin: &'o Origin,
    /// Of rows: the pass, whose slots of a group are `pass * slots ..` of all that there can be.
    pass: u64,
}

/// What was emitted for a chunk, and is there for later ones.
type PerChunk<T> = Vec<(Chunk, T)>;

fn there<T: Clone>(known: Option<&PerChunk<T>>, chunk: Chunk) -> Option<T> {
    let reaches = |from: Chunk| from == chunk || from.is_pass() && chunk.is_pass() && from <= chunk;
    known?.iter().find(|(c, _)| reaches(*c)).map(|(_, t)| t.clone())
}

/// Whether what a chunk made of later passes is kept for another one: for gradients of weights, apart.
fn keeps_passes(from: Chunk, to: Chunk) -> bool {
    from == to || matches!((from, to), (Chunk::Backward(a), Chunk::Weight(b)) if a == b)
}

/// What an emitter knows of rows.
#[derive(Default)]
pub(super) struct RowState {
    dims: HashMap<RowDim, Dim>,
    sorted: HashMap<usize, PerChunk<Sorted>>,
    /// The most rows of a group, of all homes whose rows meet.
    peaks: HashMap<usize, PerChunk<Value>>,
    /// By layout: whether each pass after the first has rows.
    further: HashMap<usize, PerChunk<Vec<Value>>>,
    /// By layout and pass.
    homes: HashMap<(usize, u64), PerChunk<HomeTables>>,
    tables: HashMap<(SlotTable, RowSharding, u64), PerChunk<Value>>,
    dense: HashMap<Value, PerChunk<Value>>,
    /// Values in rows, of passes after the first.
    later: HashMap<(Value, u64), PerChunk<Value>>,
}

impl Emitter<'_> {
    /// Emits a value in rows, of the first pass.
    pub(super) fn in_rows(&mut self, v: Value, chunk: Chunk) -> Value {
        let job = self.job;
        self.rows_of(v, RowContext { chunk, origin: &job.s.graph.body[v].origin, pass: 0 })
    }

    /// A value in rows. Those of later passes are computed in each chunk that uses them: nothing of them outlives it.
    fn in_pass(&mut self, v: Value, context: RowContext) -> Value {
        if context.pass == 0 {
            return self.value(v, context.chunk);
        }
        let known = self.rows.later.get(&(v, context.pass)).and_then(|k| k.iter().find(|(c, _)| keeps_passes(*c, context.chunk)));
        if let Some((_, w)) = known {
            return *w;
        }
        let job = self.job;
        let own = &job.s.graph.body[v].origin;
        let origin = Origin { recomputed: own.recomputed || !keeps_passes(job.chunk[v.index()], context.chunk), ..own.clone() };
        let w = self.rows_of(v, RowContext { origin: &origin, ..context });
        self.rows.later.entry((v, context.pass)).or_default().push((context.chunk, w));
        w
    }

    fn rows_of(&mut self, v: Value, context: RowContext) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let at = self.at(v);
        match &node.op {
            Op::Dispatch(_) => self.dispatched(v, at.layout, context),
            Op::Reshard { kind, subs } => self.rows_resharded(v, *kind, subs, context),
            Op::Dot { over, .. } => match self.weights(v, at.layout) {
                Some(k) => self.grouped(v, over, k, &at, context),
                None => self.place_by_place(v, &at, context),
            },
            _ => self.place_by_place(v, &at, context),
        }
    }

    /// The op on rows, all operands being rows or the same for all places.
    fn place_by_place(&mut self, v: Value, at: &RowSharding, context: RowContext) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let args: Vec<Value> = node.args.iter().map(|a| self.placed(*a, at, context)).collect();
        let op = self.local_op(v);
        let lead = node.args.iter().position(|a| job.rows.layout(*a) == Some(at.layout)).unwrap_or(0);
        let ty = self.type_like(v, at, args[lead]);
        self.push(op, args, ty, context.chunk, context.origin, None)
    }

    /// Of a product of rows with experts' matrices, which operand these are.
    fn weights(&self, v: Value, layout: usize) -> Option<usize> {
        let body = &self.job.s.graph.body;
        let l = &self.job.rows.layouts[layout];
        let args = &body[v].args;
        let has = |k: usize, d: &Dim| body[args[k]].ty.has(*d);
        (0..2).find(|k| has(*k, &l.routing.experts) && !l.tokens.iter().any(|d| has(*k, d)) && l.tokens.iter().all(|d| has(1 - k, d)))
    }

    /// Each row times its expert's matrix, operand `k`.
    fn grouped(&mut self, v: Value, over: &[Dim], k: usize, at: &RowSharding, context: RowContext) -> Value {
        let job = self.job;
        let args = &job.s.graph.body[v].args;
        let a = self.placed(args[1 - k], at, context);
        let b = self.get(args[k], context.chunk);
        let b = self.by_group(b, args[k], at, context);
        let ends = self.table(SlotTable::Ends, at, context);
        let (rows, experts) = (self.row_dim(RowDim::Slot(at.layout)), self.group(at.layout));
        let over = over.iter().map(|d| self.dim_of(args[k], *d)).chain([experts]).collect();
        let ty = self.type_like(v, at, a);
        self.push(Op::grouped_dot(rows, experts, over), vec![a, b, ends], ty, context.chunk, context.origin, None)
    }

    /// Rows of tokens at their home.
    fn dispatched(&mut self, v: Value, layout: usize, context: RowContext) -> Value {
        let job = self.job;
        let x = job.s.graph.body[v].args[0];
        let at = self.at_layout(v, layout);
        let home = self.tables(layout, context);
        let (slots, choice) = (self.row_dim(RowDim::Slots(layout)), job.rows.layouts[layout].routing.choice);
        let to = self.slot_dims(&at);
        let has = |d: &Dim| job.s.graph.body[x].ty.has(*d);
        let per_choice = has(&choice);
        let mut w = self.get(x, context.chunk);
        if per_choice || job.rows.layouts[layout].tokens.iter().any(has) {
            w = self.by_home(w, x, &at, context);
        }
        let rest = self.rest(v, layout);
        if per_choice {
            let ty = Type::new(job.s.graph.body[v].ty.dtype, [vec![slots], rest].concat());
            return self.build(context, |b| {
                let sum = b.typed(Op::Scatter { dim: slots }, &[w, home.slot_of], ty.clone());
                b.body[sum].ty = ty;
                b.op(Op::View { from: vec![slots], to }, &[sum])
            });
        }
        let token = self.row_dim(RowDim::Token(layout));
        let ty = self.type_like(v, &at, home.token);
        self.build(context, |b| {
            let rows = if b.body[w].ty.has(token) { b.op(Op::Gather { dim: token }, &[w, home.token]) } else { w };
            // If a token chooses an expert twice, its row counts twice.
            let count = b.op(Op::View { from: vec![slots], to }, &[home.count]);
            let count = b.cast(count, ty.dtype);
            let rows = ir::fault!("rows.dispatch.count", rows, b.mul(rows, count));
            b.body[rows].ty = ty;
            rows
        })
    }

    /// Adds nodes to the graph.
    fn build<T>(&mut self, context: RowContext, f: impl FnOnce(&mut Builder) -> T) -> T {
        let out = f(&mut Builder { body: &mut self.out.body, origin: context.origin.clone() });
        let n = self.out.body.nodes.len();
        self.out.chunks.resize(n, context.chunk);
        self.out.accumulate.resize(n, false);
        self.out.source.resize(n, None);
        self.out.reasons.resize(n, None);
        out
    }

    /// The last node of a dense value, in its storage order.
    fn finish(&mut self, w: Value, v: Value, context: RowContext) -> Value {
        let want = self.local_type(v);
        let w = self.permute(w, &want.dims, context.chunk, context.origin);
        self.stands_for(w, v);
        w
    }

    fn at(&self, v: Value) -> RowSharding {
        self.at_layout(v, self.job.rows.layout(v).expect("invariant: the value is in rows"))
    }

    fn at_of_operand(&self, v: Value, layout: usize) -> RowSharding {
        let args = &self.job.s.graph.body[v].args;
        let a = args.iter().find(|a| self.job.rows.layout(**a) == Some(layout)).expect("invariant: an operand is in rows");
        self.at(*a)
    }

    /// Where rows of a value are, as it is split.
    fn at_layout(&self, v: Value, layout: usize) -> RowSharding {
        let s = self.job.s;
        let l = &self.job.rows.layouts[layout];
        let (own, home) = (s.sharding(v), s.sharding(l.chosen));
        let moved = |d: &Dim| {
            ir::fault!(
                "rows.gathered.own",
                own.splits(*d).into_iter().filter(|u| home[*u] != Placement::Split(*d)).collect::<Vec<_>>(),
                home.splits(*d).into_iter().filter(|u| own[*u] != Placement::Split(*d)).collect::<Vec<_>>()
            )
        };
        let mut gathered: Vec<SubAxis> = l.tokens.iter().flat_map(moved).collect();
        gathered.sort_unstable();
        RowSharding { layout, gathered, split: own.splits(l.routing.experts) }
    }

    fn home(&self, layout: usize) -> RowSharding {
        RowSharding { layout, gathered: vec![], split: vec![] }
    }

    /// The sub-axes that split the experts somewhere, outermost first.
    fn digits(&self, experts: Dim) -> &[SubAxis] {
        let s = self.job.s;
        &s.digits[s.graph.body.dims.original(experts).0 as usize]
    }

    fn row_dim(&mut self, d: RowDim) -> Dim {
        if let Some(k) = self.rows.dims.get(&d) {
            return *k;
        }
        let s = self.job.s;
        let product = |subs: &[SubAxis]| subs.iter().map(|u| s.mesh[*u].size).product::<u64>();
        let (name, size) = match d {
            RowDim::Home(u) => ("home", s.mesh[u].size),
            RowDim::Groups(u) => ("group", s.mesh[u].size),
            RowDim::Group(experts) => ("expert", s.graph.body.dims.size(experts) / product(self.digits(experts))),
            RowDim::Slot(l) => ("slot", self.slots(l)),
            RowDim::Slots(l) => ("slots", self.groups(l) * self.slots(l)),
            RowDim::Token(l) => ("token", self.tokens(l)),
            RowDim::Place(l) => {
                let group = self.group(l);
                ("place", self.tokens(l) * self.out.body.dims.size(group))
            }
        };
        let k = self.piece(name, size);
        self.rows.dims.insert(d, k);
        k
    }

    fn group(&mut self, layout: usize) -> Dim {
        self.row_dim(RowDim::Group(self.job.rows.layouts[layout].routing.experts))
    }

    /// Tokens of a home.
    fn tokens(&self, layout: usize) -> u64 {
        let s = self.job.s;
        let l = &self.job.rows.layouts[layout];
        let parts = |d: Dim| s.sharding(l.chosen).splits(d).iter().map(|u| s.mesh[*u].size).product::<u64>();
        l.tokens.iter().map(|d| s.graph.body.dims.size(*d) / parts(*d)).product()
    }

    /// Groups of the experts of a layout.
    fn groups(&self, layout: usize) -> u64 {
        let digits = self.digits(self.job.rows.layouts[layout].routing.experts);
        digits.iter().map(|u| self.job.s.mesh[*u].size).product()
    }

    /// The most rows that a home can have for a group of experts: a token has one per expert, and no more than choices.
    fn most_rows(&mut self, layout: usize) -> u64 {
        let choice = self.job.rows.layouts[layout].routing.choice;
        let group = self.group(layout);
        self.tokens(layout) * self.job.s.graph.body.dims.size(choice).min(self.out.body.dims.size(group))
    }

    /// The rows that a home has room for in a pass, per group: whole cache lines of numbers, where there are several.
    fn slots(&mut self, layout: usize) -> u64 {
        let most = self.most_rows(layout);
        let choice = self.job.rows.layouts[layout].routing.choice;
        let rows = self.tokens(layout) * self.job.s.graph.body.dims.size(choice);
        let share = |factor: f64| ((factor * rows as f64 / self.groups(layout) as f64).ceil() as u64).clamp(1, most);
        let room = match self.job.room.buffer {
            MoeBuffer::Whole => share(MOE_ROOM).max(most.div_ceil(self.job.room.passes)),
            MoeBuffer::Factor(factor) => share(factor),
        };
        if room < 8 { room } else { room.next_multiple_of(8).min(most) }
    }

    /// The passes that a layout's rows may need, as many as there may be at most.
    pub(super) fn passes(&mut self, layout: usize) -> u64 {
        self.most_rows(layout).div_ceil(self.slots(layout)).min(self.job.room.passes)
    }

    fn home_dims(&mut self, at: &RowSharding) -> Vec<Dim> {
        at.gathered.iter().map(|u| self.row_dim(RowDim::Home(*u))).collect()
    }

    fn group_dims(&mut self, at: &RowSharding) -> Vec<Dim> {
        let digits = self.digits(self.job.rows.layouts[at.layout].routing.experts).to_vec();
        digits.into_iter().filter(|u| !at.split.contains(u)).map(|u| self.row_dim(RowDim::Groups(u))).collect()
    }

    /// The dims of all slots.
    fn slot_dims(&mut self, at: &RowSharding) -> Vec<Dim> {
        let slot = self.row_dim(RowDim::Slot(at.layout));
        [self.home_dims(at), self.group_dims(at), vec![slot]].concat()
    }

    /// The local dims of a value other than tokens and experts.
    fn rest(&mut self, v: Value, layout: usize) -> Vec<Dim> {
        let job = self.job;
        let l = &job.rows.layouts[layout];
        let of = job.s.graph.body.dims_of(v).iter().filter(|d| !l.tokens.contains(d) && **d != l.routing.experts);
        of.map(|d| self.dim_of(v, *d)).collect()
    }

    /// The type of a value in rows, with slots stored in the order in which `lead` has them.
    fn type_like(&mut self, v: Value, at: &RowSharding, lead: Value) -> Type {
        let slots = self.slot_dims(at);
        let mut dims: Vec<Dim> = self.out.body.dims_of(lead).iter().copied().filter(|d| slots.contains(d)).collect();
        dims.extend(slots.into_iter().filter(|d| !self.out.body[lead].ty.has(*d)));
        dims.extend(self.rest(v, at.layout));
        Type::new(self.job.s.graph.body[v].ty.dtype, dims)
    }
}
