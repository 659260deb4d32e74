//! What a rank executes: buffers at planned offsets, bodies of commands, and the order in which a step calls them.
//!
//! A [`Job`] is everything an artifact says; its [`Program`]s are one per class of ranks. Ranks of one pipeline stage share a
//! program and differ only in their coordinates, from which run-time offsets are computed ([`crate::dim::Linear`]). Stages that
//! share a program differ in their parameters and in their [`CallSchedule`].

use crate::diag::Span;
use crate::dim::{IndexMap, Linear, Order};
use crate::graph::{Feed, Init, Origin};
use crate::kernel::Kernel;
use crate::mesh::{Coords, Mesh, SubAxis};
use crate::model::Train;
pub use crate::op::{Channel, Collective};
use crate::op::{DType, Real, Scalar};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub u32);
        impl $name {
            pub fn index(self) -> usize { self.0 as usize }
        }
    };
}

id!(/// A buffer of a program.
    BufferId);
id!(/// A kernel of the job.
    KernelId);
id!(/// A group of a program.
    GroupId);
id!(/// A body of a program.
    BodyId);

/// The whole of an artifact, kernels' code apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub model: String,
    /// Names of the texts that spans refer to, by file number.
    pub sources: Vec<String>,
    /// Every setting with its value, as text.
    pub settings: Vec<(String, String)>,
    pub mesh: Mesh,
    pub train: Train,
    /// Sequences (rows of the batch) in a step, over all microbatches and ranks.
    pub global_batch: u64,
    pub microbatches: u64,
    /// Messages that can be under way on each channel: as many sends complete before their receives.
    pub in_flight: u32,
    pub params: Vec<ParamEntry>,
    pub inputs: Vec<InputEntry>,
    pub tables: Vec<TableEntry>,
    /// Names of the reported scalars: `loss` first, then `grad_norm`, then the named losses and metrics.
    pub reports: Vec<String>,
    pub kernels: Vec<Kernel>,
    pub programs: Vec<Program>,
    /// For each pipeline stage, its program and what fills the program's parameter slots.
    pub stages: Vec<Stage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub program: u32,
    /// Parameter (of [`Job::params`]) in each slot of the program.
    pub params: Vec<u32>,
    pub schedule: CallSchedule,
}

/// The order in which a stage calls the bodies of its program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallSchedule {
    /// Where each stash of the program lies.
    pub slots: Vec<Slots>,
    /// A training step up to the gradient norm.
    pub train: Vec<Call>,
    /// The rest of a step, once loss and gradient norm were found finite.
    pub update: Vec<Call>,
    /// A forward pass alone, without random drops, over one global batch; reports the losses and metrics.
    pub eval: Vec<Call>,
}

/// Slots of a stash, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slots {
    /// Microbatches that have something there at a time.
    pub count: u32,
    /// Byte of the temporary arena at which the first begins.
    pub at: u64,
}

impl CallSchedule {
    /// Bytes of each arena of a rank, in the order of [`Arena::ALL`]: the temporary one reaches to the end of the last stash, which has none of its own.
    /// Saturates instead of overflowing.
    pub fn arena_bytes(&self, program: &Program) -> [u64; Arena::ALL.len()] {
        let ends = self.slots.iter().zip(&program.stashes).map(|(s, bytes)| bytes.saturating_mul(u64::from(s.count)).saturating_add(s.at));
        let mut bytes = program.arena_bytes;
        bytes[Arena::Stash as usize] = 0;
        bytes[Arena::Temporary as usize] = ends.fold(bytes[Arena::Temporary as usize], u64::max);
        bytes
    }
}

impl Job {
    /// A place in a text, for people: `models/gpt2.mdl:25:5`.
    pub fn place(&self, span: Span) -> String {
        match self.sources.get(usize::from(span.file)) {
            Some(name) => format!("{name}:{}:{}", span.line, span.col),
            None => span.to_string(),
        }
    }
}

/// A parameter as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamEntry {
    pub name: String,
    pub dims: Vec<Extent>,
    pub init: Init,
}

/// A dim of a whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    pub name: String,
    /// Elements that exist for the user: in checkpoints and data.
    pub size: u64,
    /// Elements as stored, counting padding, which is zero.
    pub padded: u64,
    /// The order in which ranks together store them.
    pub order: Order,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputEntry {
    pub name: String,
    pub dtype: DType,
    /// Whole dims, `batch` being the global batch.
    pub dims: Vec<Extent>,
    pub default: Option<Feed>,
    /// Greatest valid value + 1 of an integer input that only indexes tables, for a check of the data.
    pub limit: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableEntry {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<Extent>,
    pub data: Vec<f64>,
}

/// The program of one class of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub buffers: Vec<Buffer>,
    /// Bytes of each arena, in the order of [`Arena::ALL`]; the stash's is for one slot of each stash, the temporary one's without stashes.
    pub arena_bytes: [u64; Arena::ALL.len()],
    /// Bytes of a slot of each stash. They divide the stash arena, in this order.
    pub stashes: Vec<u64>,
    pub groups: Vec<Group>,
    /// Slots of [`Stage::params`] whose parameter [`Holds::Copies`].
    pub copied: BTreeSet<u32>,
    /// Slots after those of [`Stage::params`], in order.
    pub buckets: Vec<Bucket>,
    pub bodies: Vec<Body>,
}

/// Parameters that lie one after the other and are updated as one. What lies between them, and after the last, means nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Elements.
    pub size: u64,
    pub holds: Holds,
    /// In ascending order.
    pub pieces: Vec<Piece>,
}

/// What the parameter of a slot or a bucket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Holds {
    Weights,
    /// A copy for the model to compute with, in less precision or in another memory. The weights themselves are state 0; the optimizer's follow.
    Copies,
}

impl Holds {
    /// What its parameter is, or its state of this number.
    pub fn role(self, state: Option<u32>) -> Role {
        match (self, state) {
            (Holds::Weights, None) | (Holds::Copies, Some(0)) => Role::Weights,
            (Holds::Copies, None) => Role::Copy,
            (Holds::Weights, Some(k)) => Role::State(k),
            (Holds::Copies, Some(k)) => Role::State(k - 1),
        }
    }
}

/// A parameter of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// Of [`Stage::params`].
    pub slot: u32,
    /// The element of the bucket that it begins at.
    pub at: u64,
    /// Local to global, per dim in storage order.
    pub index: Vec<IndexMap>,
}

impl Piece {
    pub fn elements(&self) -> u64 {
        self.index.iter().map(IndexMap::len).product()
    }
}

/// What a part of a buffer is to a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Weights,
    Copy,
    State(u32),
}

/// A parameter, copy or state of which a buffer holds a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part<'a> {
    /// Of [`Stage::params`].
    pub slot: u32,
    pub role: Role,
    pub index: &'a [IndexMap],
    /// In a bucket: the element that it begins at, and the bucket's elements that the buffer holds.
    pub bucket: Option<(u64, &'a IndexMap)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Arena {
    /// Lives over steps: parameters, optimizer state, gradients, tables.
    Persistent,
    /// One copy per microbatch in flight: what a call leaves for later calls of its microbatch, such as the backward pass. It lies in the memory of
    /// temporary buffers, where the stage says ([`Slots`]): beyond those of all calls from the first to the last of a phase that touch it.
    Stash,
    /// Within one call of a body.
    Temporary,
    /// Lives over steps, in the host's memory.
    Host,
    /// Within one call of a body, in the host's memory.
    Staging,
}

/// A memory, and the processor that works on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Space {
    #[default]
    Device,
    Host,
}

impl Space {
    pub const ALL: [Space; 2] = [Space::Device, Space::Host];

    pub fn name(self) -> &'static str {
        match self {
            Space::Device => "device",
            Space::Host => "host",
        }
    }

    /// The arena of what lives over steps.
    pub fn lasting(self) -> Arena {
        match self {
            Space::Device => Arena::Persistent,
            Space::Host => Arena::Host,
        }
    }

    /// The arena of what lives within one call.
    pub fn temporary(self) -> Arena {
        match self {
            Space::Device => Arena::Temporary,
            Space::Host => Arena::Staging,
        }
    }
}

impl Arena {
    pub const ALL: [Arena; 5] = [Arena::Persistent, Arena::Stash, Arena::Temporary, Arena::Host, Arena::Staging];

    pub fn space(self) -> Space {
        match self {
            Arena::Persistent | Arena::Stash | Arena::Temporary => Space::Device,
            Arena::Host | Arena::Staging => Space::Host,
        }
    }

    /// Whether what it holds lives over steps.
    pub fn lasts(self) -> bool {
        self == self.space().lasting()
    }

    /// Whether what it holds lives within one call of a body.
    pub fn is_temporary(self) -> bool {
        self == self.space().temporary()
    }

    pub fn name(self) -> &'static str {
        match self {
            Arena::Persistent => "persistent",
            Arena::Stash => "stash",
            Arena::Temporary => "temporary",
            Arena::Host => "host",
            Arena::Staging => "staging",
        }
    }
}

impl Program {
    /// The bucket of a slot, if it is not a parameter's.
    pub fn bucket(&self, stage: &Stage, slot: u32) -> Option<&Bucket> {
        self.buckets.get((slot as usize).checked_sub(stage.params.len())?)
    }

    /// What a buffer holds of parameters and states, on a stage of this program; none of slots that there are not.
    pub fn parts<'a>(&'a self, stage: &Stage, content: &'a Content) -> Vec<Part<'a>> {
        let (slot, state, index) = match content {
            Content::Param { slot, index } => (*slot, None, index),
            Content::State { slot, state, index } => (*slot, Some(*state), index),
            Content::Table { .. } | Content::Accumulator | Content::Activation => return vec![],
        };
        if (slot as usize) < stage.params.len() {
            let holds = if self.copied.contains(&slot) { Holds::Copies } else { Holds::Weights };
            return vec![Part { slot, role: holds.role(state), index, bucket: None }];
        }
        let (Some(bucket), [window]) = (self.bucket(stage, slot), index.as_slice()) else { return vec![] };
        let role = bucket.holds.role(state);
        bucket.pieces.iter().map(|p| Part { slot: p.slot, role, index: &p.index, bucket: Some((p.at, window)) }).collect()
    }

    /// The byte of a memory's temporary arena before which all temporary buffers of a body end.
    pub fn end_of_temporaries(&self, body: &Body, space: Space) -> u64 {
        let buffers = body.commands.iter().flat_map(|c| c.action.buffers()).map(|id| &self.buffers[id.index()]);
        buffers.filter(|b| b.arena == space.temporary()).map(|b| b.offset + b.bytes()).max().unwrap_or(0)
    }

    /// The stash in which a buffer of the stash arena lies, and where that begins; none if it lies in no one stash.
    pub fn stash(&self, buffer: &Buffer) -> Option<(usize, u64)> {
        let mut begin = 0u64;
        for (k, bytes) in self.stashes.iter().enumerate() {
            let end = begin.checked_add(*bytes)?;
            if begin <= buffer.offset && buffer.offset.checked_add(buffer.bytes())? <= end {
                return Some((k, begin));
            }
            begin = end;
        }
        None
    }
}

/// What a buffer holds, for the memory table and for loading.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Content {
    /// Parameter slot (see [`Stage::params`]) or bucket; `index` maps local to global, per dim in storage order.
    Param {
        slot: u32,
        index: Vec<IndexMap>,
    },
    /// Optimizer state `state` of a parameter slot or bucket.
    State {
        slot: u32,
        state: u32,
        index: Vec<IndexMap>,
    },
    /// Table of [`Job::tables`].
    Table {
        table: u32,
        index: Vec<IndexMap>,
    },
    /// Accumulated over microbatches: gradients, losses.
    Accumulator,
    Activation,
}

/// A typed range of an arena, dense, 64-byte aligned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    pub name: String,
    pub dtype: DType,
    /// Local dims, outermost first: name and size.
    pub dims: Vec<(String, u64)>,
    pub arena: Arena,
    /// Byte offset in the arena (of one slot of each stash, there).
    pub offset: u64,
    pub content: Content,
    pub origin: Option<Origin>,
}

impl Buffer {
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|d| d.1).product()
    }

    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }
}

/// A place in a buffer: `offset + sum(coordinate * stride)` elements from its start.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    pub buffer: BufferId,
    pub offset: u64,
    pub coords: Linear,
}

impl Place {
    pub fn start(buffer: BufferId) -> Place {
        Place { buffer, offset: 0, coords: vec![] }
    }

    /// Elements from the start of the buffer, for a rank and microbatch.
    pub fn resolve(&self, coords: &Coords) -> u64 {
        self.offset + linear(&self.coords, coords)
    }
}

/// The value of a linear form at coordinates.
pub fn linear(form: &Linear, coords: &Coords) -> u64 {
    form.iter().map(|(u, stride)| coords[u.0 as usize] * stride).sum()
}

/// Where each member's part begins, of as many parts of `count` elements one after the other as a group over `subs` has members.
pub fn own_part(mesh: &Mesh, subs: &[SubAxis], count: u64) -> Linear {
    let mut stride = count;
    let mut form: Linear = vec![];
    // Members are in rank order: the last sub-axis counts fastest.
    for u in mesh.ids().filter(|u| subs.contains(u)).collect::<Vec<_>>().into_iter().rev() {
        form.push((u, stride));
        stride = stride.saturating_mul(mesh[u].size);
    }
    form.reverse();
    form
}

/// Ranks that communicate: those which agree with this rank except in `subs`; with `stages`, also those of these pipeline
/// stages. Members are ordered by rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    pub subs: Vec<SubAxis>,
    pub stages: Option<Vec<u64>>,
}

impl Group {
    /// The number of its members.
    pub fn size(&self, mesh: &Mesh) -> u64 {
        let stages = self.stages.as_ref().map_or(1, |s| s.len() as u64);
        self.subs.iter().map(|u| mesh[*u].size).product::<u64>() * stages
    }

    /// The axes that it communicates along: `tp`, `dp*cp`, `pp`.
    pub fn describe(&self, mesh: &Mesh) -> String {
        let subs = mesh.describe(&self.subs);
        match (&self.stages, subs.is_empty()) {
            (None, _) => subs,
            (Some(_), true) => "pp".into(),
            (Some(_), false) => format!("pp*{subs}"),
        }
    }

    /// The members of the group that a rank is in, in rank order.
    pub fn members(&self, mesh: &Mesh, rank: u64) -> Vec<u64> {
        match &self.stages {
            None => mesh.group(rank, &self.subs),
            Some(stages) => {
                let mut subs = self.subs.clone();
                subs.extend(mesh.of(crate::mesh::Axis::Pp));
                mesh.group(rank, &subs).into_iter().filter(|r| stages.contains(&mesh.stage(*r))).collect()
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BodyKind {
    /// Once per step before the first forward: sums of data over the whole batch.
    Prologue,
    /// Of this virtual stage of the rank's, as are the next two.
    Forward(u32),
    /// Gradients of activations; those of parameters too, if no body computes them apart.
    Backward(u32),
    /// Gradients of parameters.
    Weight(u32),
    /// Gradients to their resting place, reports, gradient norm.
    Reduce,
    /// Optimizer.
    Update,
}

impl BodyKind {
    pub fn name(self) -> &'static str {
        match self {
            BodyKind::Prologue => "prologue",
            BodyKind::Forward(_) => "forward",
            BodyKind::Backward(_) => "backward",
            BodyKind::Weight(_) => "weight",
            BodyKind::Reduce => "reduce",
            BodyKind::Update => "update",
        }
    }
}

/// A list of commands that a schedule calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Body {
    pub name: String,
    pub kind: BodyKind,
    pub commands: Vec<Command>,
}

/// One call of a body: for this microbatch, in slot `microbatch % slots` of each stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Call {
    pub body: BodyId,
    pub microbatch: u32,
}

/// An ordered queue of commands. A rank issues its step in one order (calls as scheduled, commands as listed); each command
/// goes to its stream, which runs its own in the order of issue and, events apart, waits for no other stream. Nothing joins
/// streams where a call or phase ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stream {
    /// Everything but communication, and any of that and of what follows.
    Compute,
    /// Collectives within a pass over a microbatch.
    Tensor,
    /// Collectives of gradients, parameters and reports.
    Data,
    Send,
    Receive,
    /// Kernels of the host.
    Host,
    /// Copies to the host's memory.
    ToHost,
    /// Copies to the device's memory.
    ToDevice,
}

impl Stream {
    pub const ALL: [Stream; 8] =
        [Stream::Compute, Stream::Tensor, Stream::Data, Stream::Send, Stream::Receive, Stream::Host, Stream::ToHost, Stream::ToDevice];

    pub fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::Tensor => "tensor",
            Stream::Data => "data",
            Stream::Send => "send",
            Stream::Receive => "receive",
            Stream::Host => "host",
            Stream::ToHost => "to_host",
            Stream::ToDevice => "to_device",
        }
    }
}

/// A command with its queue and the reason it is there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Command {
    pub stream: Stream,
    pub action: Action,
    pub origin: Origin,
    /// Of a collective: which operand of which op needs it, and which sharding rule.
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Runs a kernel where it is at home ([`Kernel::on`]): places of inputs, then of outputs, all in that memory; scalars in the kernel's order.
    Launch {
        kernel: KernelId,
        args: Vec<Place>,
        scalars: Vec<Scalar>,
    },
    /// Works on dense ranges; `count` is in elements. Reductions combine members in rank order, so every member gets the
    /// same bits, and every run too.
    /// All-reduce: `src` and `dst` hold `count`, may be the same. All-gather: `src` holds `count`, `dst` `count` per member in
    /// order. Reduce-scatter: `src` holds `count` per member, `dst` this member's part. Of these two, the part may lie at its place in the
    /// whole ([`own_part`]). All-to-all: both hold `count` per
    /// member; part k of `src` goes to member k. Shift: `src` and `dst` hold `count`; the next member gets it, the first the last one's.
    Collective {
        kind: Collective,
        group: GroupId,
        dtype: DType,
        count: u64,
        src: Place,
        dst: Place,
    },
    /// To the rank with the same coordinates `hops` stages further on (negative: back). Ordered per sender, receiver and channel.
    Send {
        hops: i64,
        channel: Channel,
        dtype: DType,
        count: u64,
        src: Place,
    },
    Recv {
        hops: i64,
        channel: Channel,
        dtype: DType,
        count: u64,
        dst: Place,
    },
    /// Dense ranges of `count` elements, from one memory to another.
    Copy {
        dtype: DType,
        count: u64,
        src: Place,
        dst: Place,
    },
    /// Every element of the buffer.
    Fill {
        buffer: BufferId,
        value: Real,
    },
    /// This microbatch's part of an input: `index` maps local to global, per dim in storage order (the base of a dim
    /// split by microbatches has their coordinate).
    Load {
        input: u32,
        dst: BufferId,
        index: Vec<IndexMap>,
    },
    /// A scalar f32 for the host: number `report` of [`Job::reports`].
    Report {
        report: u32,
        src: Place,
    },
    /// Stops the run with an error if the i32 there is more. The command's reason says what it counts.
    Limit {
        src: Place,
        most: u64,
    },
    /// Marks this point of the stream. Events are the program's: they live across calls and phases, and each is always
    /// recorded on one stream.
    Record {
        event: u32,
    },
    /// Holds the stream until the event's last record issued before is reached; goes on if there is none.
    Wait {
        event: u32,
    },
}

impl Action {
    /// The buffers that it reads or writes.
    pub fn buffers(&self) -> Vec<BufferId> {
        match self {
            Action::Launch { args, .. } => args.iter().map(|p| p.buffer).collect(),
            Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => vec![src.buffer, dst.buffer],
            Action::Send { src, .. } | Action::Report { src, .. } | Action::Limit { src, .. } => vec![src.buffer],
            Action::Recv { dst, .. } => vec![dst.buffer],
            Action::Fill { buffer, .. } => vec![*buffer],
            Action::Load { dst, .. } => vec![*dst],
            Action::Record { .. } | Action::Wait { .. } => vec![],
        }
    }
}
