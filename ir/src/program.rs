//! What a rank executes: buffers at planned offsets, bodies of commands, and the order in which a step calls them.
//!
//! A [`Job`] is everything an artifact says; its [`Program`]s are one per class of ranks. Ranks of one pipeline stage share a
//! program and differ only in their coordinates, from which run-time offsets are computed ([`crate::dim::Linear`]). Stages that
//! share a program differ in their parameters and in their [`CallSchedule`].

mod commands;
mod memory;
mod params;

pub use crate::op::{Channel, Collective};
pub use commands::{Action, BodyKind, Call, Command, ProgramBody, Stream};
pub use memory::{Arena, BLOCK, Buffer, BufferAddress, Content, MOST_BYTES, Space, linear, own_part};
pub use params::{Bucket, ParamRole, ParamShard, Piece, Role};

use crate::diag::{Source, Span};
use crate::dim::Order;
use crate::graph::{Init, InputDefault};
use crate::kernel::Kernel;
use crate::mesh::{Mesh, SubAxis};
use crate::model::Train;
use crate::op::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub u32);
        impl $name {
            /// Its place in the list that it refers to.
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
    /// The model's name in its text; empty if the text declares no model.
    pub model: String,
    /// The texts that spans refer to, by file number: the model's, what it imports, and, by their names alone, the standard library's.
    pub sources: Vec<Source>,
    /// Every setting with its value, as text.
    pub settings: Vec<(String, String)>,
    /// The axes of all ranks and microbatches.
    pub mesh: Mesh,
    /// How the step trains: optimizer, schedule, clipping, loss scale.
    pub train: Train,
    /// Sequences (rows of the batch) in a step, over all microbatches and ranks.
    pub global_batch: u64,
    /// Microbatches of a step, counted on one rank.
    pub microbatches: u64,
    /// Messages that can be under way on each channel: as many sends complete before their receives.
    pub in_flight: u32,
    /// Indexed by [`Stage::params`]; states are among them.
    pub params: Vec<ParamEntry>,
    /// Indexed by [`Action::Load`].
    pub inputs: Vec<InputEntry>,
    /// Indexed by [`Content::Table`]; those of training and those of evaluation.
    pub tables: Vec<TableEntry>,
    /// Names of the reported scalars: `loss` first, then `grad_norm`, then the named losses and metrics.
    pub reports: Vec<String>,
    /// Indexed by [`KernelId`].
    pub kernels: Vec<Kernel>,
    /// One per class of ranks; indexed by [`Stage::program`].
    pub programs: Vec<Program>,
    /// For each pipeline stage, its program and what fills the program's parameter slots.
    pub stages: Vec<Stage>,
}

/// A pipeline stage: the program of its ranks, and what it runs with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Index into [`Job::programs`].
    pub program: u32,
    /// Parameter (of [`Job::params`]) in each slot of the program.
    pub params: Vec<u32>,
    /// In which order it calls the program's bodies.
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
    /// When what is sent goes out where no channel has buffers, by phase in the order of [`ProgramPhase::ALL`]: each
    /// send of a phase once, in the order in which they go. All empty unless exchanges are to be serial.
    pub sends: [Vec<SendTurn>; ProgramPhase::ALL.len()],
}

/// A send's place among the other exchanges of its phase, which are its collectives and receives in the order of
/// issue.
///
/// NCCL buffers no message, and kernels of two communicators may not run at once on a card. So a rank does its
/// exchanges one by one, and a send, which is copied away where it is issued, waits for its turn: the other end then
/// comes to it too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendTurn {
    /// Its number among the sends of the phase, in the order of issue.
    pub send: u32,
    /// So many other exchanges come before it.
    pub after: u32,
    /// Whether it is at once with the next of them, a receive.
    pub grouped: bool,
}

/// What calls leave for later ones of their microbatch, together: buffers that live equally long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stash {
    /// The memory that it lies in.
    pub space: Space,
    /// Of a slot.
    pub bytes: u64,
}

/// Slots of a stash, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slots {
    /// Microbatches that have something there at a time.
    pub count: u32,
    /// Byte of its memory's temporary arena at which the first begins.
    pub at: u64,
}

/// The lists of calls of a program. Evaluations come between steps; an update follows its training pass or is left out,
/// on all ranks alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramPhase {
    /// A training step up to the gradient norm.
    #[default]
    Train,
    /// The rest of a training step.
    Update,
    /// An evaluation of one global batch.
    Eval,
}

impl ProgramPhase {
    /// Every phase; [`CallSchedule::sends`] is in this order.
    pub const ALL: [ProgramPhase; 3] = [ProgramPhase::Train, ProgramPhase::Update, ProgramPhase::Eval];

    /// The word for it: `train`.
    pub fn name(self) -> &'static str {
        match self {
            ProgramPhase::Train => "train",
            ProgramPhase::Update => "update",
            ProgramPhase::Eval => "eval",
        }
    }
}

impl CallSchedule {
    /// The calls of a phase, in order.
    pub fn calls(&self, phase: ProgramPhase) -> &[Call] {
        match phase {
            ProgramPhase::Train => &self.train,
            ProgramPhase::Update => &self.update,
            ProgramPhase::Eval => &self.eval,
        }
    }

    /// The turns of a phase's sends; empty unless exchanges are to be serial.
    pub fn sends(&self, phase: ProgramPhase) -> &[SendTurn] {
        &self.sends[phase as usize]
    }

    /// Bytes of each arena of a rank, in the order of [`Arena::ALL`]: the temporary one of a memory reaches to the
    /// end of the last stash there, which has none of its own. Saturates instead of overflowing.
    pub fn arena_bytes(&self, program: &Program) -> [u64; Arena::ALL.len()] {
        let mut bytes = program.arena_bytes;
        Space::ALL.into_iter().for_each(|space| bytes[space.stash() as usize] = 0);
        for (slots, stash) in self.slots.iter().zip(&program.stashes) {
            let all = &mut bytes[stash.space.temporary() as usize];
            *all = stash.bytes.saturating_mul(u64::from(slots.count)).saturating_add(slots.at).max(*all);
        }
        bytes
    }
}

impl Job {
    /// A place in a text, for people: `models/gpt2.mdl:25:5`.
    pub fn place(&self, span: Span) -> String {
        match self.sources.get(usize::from(span.file)) {
            Some(source) => format!("{}:{}:{}", source.name, span.line, span.col),
            None => span.to_string(),
        }
    }

    /// Whether its sends have turns ([`SendTurn`]), so that ranks can do their exchanges one by one.
    pub fn is_serial(&self) -> bool {
        self.stages.iter().flat_map(|s| &s.schedule.sends).any(|turns| !turns.is_empty())
    }

    /// Elements of all parameters.
    pub fn parameters(&self) -> u64 {
        self.params.iter().map(|p| p.dims.iter().map(|d| d.size).product::<u64>()).sum()
    }
}

/// A parameter as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamEntry {
    /// Full name, `layers.3.attn.q.w`; no other parameter has it.
    pub name: String,
    /// Whole dims, in storage order.
    pub dims: Vec<Extent>,
    /// What its elements are at first.
    pub init: Init,
}

/// A dim of a whole tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// As the model declares it, `hidden`; other dims may have the same name.
    pub name: String,
    /// Elements that exist for the user: in checkpoints and data.
    pub size: u64,
    /// Elements as stored, counting padding, which is zero.
    pub padded: u64,
    /// The order in which ranks together store them.
    pub order: Order,
}

/// An input as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputEntry {
    /// As the model declares it; no other input has it.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Whole dims, `batch` being the global batch.
    pub dims: Vec<Extent>,
    /// What it holds if no file is named for it; `None` if one has to be.
    pub default: Option<InputDefault>,
    /// Of an input of integers: all that it may hold, least first and apart from each other. Whatever else would be an index outside of its table.
    pub takes: Option<Vec<Interval>>,
}

/// Integers from `least` to `most`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Interval {
    /// The smallest, included.
    pub least: i32,
    /// The greatest, included.
    pub most: i32,
}

impl Interval {
    /// All that an i32 can be.
    pub const ALL: Interval = Interval { least: i32::MIN, most: i32::MAX };

    /// Whether a number is one of these.
    pub fn has(self, x: f64) -> bool {
        f64::from(self.least) <= x && x <= f64::from(self.most) && x.fract() == 0.0
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval { least, most } if least == most => write!(f, "{least}"),
            Interval { least, most } => write!(f, "{least} to {most}"),
        }
    }
}

/// A table of numbers known at compile time, as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableEntry {
    /// `table0`, by its number in the graph that it is from.
    pub name: String,
    /// The type that its numbers are rounded to.
    pub dtype: DType,
    /// Whole dims, in storage order.
    pub dims: Vec<Extent>,
    /// One number per element, row-major, padding left out.
    pub data: Vec<f64>,
}

/// The program of one class of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Bytes of each arena, in the order of [`Arena::ALL`]; those of stashes are for one slot of each stash,
    /// temporary ones without stashes.
    pub arena_bytes: [u64; Arena::ALL.len()],
    /// They divide the stash arenas of their memories, in this order.
    pub stashes: Vec<Stash>,
    /// Indexed by [`GroupId`].
    pub groups: Vec<Group>,
    /// Slots of [`Stage::params`] whose parameter [`ParamRole::Copies`].
    pub copied: BTreeSet<u32>,
    /// Slots after those of [`Stage::params`], in order.
    pub buckets: Vec<Bucket>,
    /// Indexed by [`BodyId`].
    pub bodies: Vec<ProgramBody>,
}

impl Program {
    /// The commands of a call, with their numbers in the body.
    pub fn commands(&self, call: &Call) -> impl Iterator<Item = (usize, &Command)> {
        let body = &self.bodies[call.body.index()];
        let part = body.part(call.part);
        part.clone().zip(&body.commands[part])
    }

    /// Calls in runs, by their places: between two runs no body is under way, within one there always is. A run of
    /// more than one call is of bodies side by side, or of the parts of one.
    pub fn runs(&self, calls: &[Call]) -> Vec<Range<usize>> {
        let (mut out, mut begin, mut open) = (vec![], 0, BTreeSet::new());
        for (at, call) in calls.iter().enumerate() {
            let last = self.bodies.get(call.body.index()).is_none_or(|b| call.part as usize >= b.cuts.len());
            if last {
                open.remove(&call.body)
            } else {
                open.insert(call.body)
            };
            if open.is_empty() {
                out.push(begin..at + 1);
                begin = at + 1;
            }
        }
        out.extend((begin < calls.len()).then_some(begin..calls.len()));
        out
    }

    /// The stash in which a buffer of a stash arena lies, and where that begins; none if it lies in no one stash.
    pub fn stash(&self, buffer: &Buffer) -> Option<(usize, u64)> {
        let mut begin = 0u64;
        for (k, stash) in self.stashes.iter().enumerate().filter(|(_, s)| s.space.stash() == buffer.arena) {
            let end = begin.checked_add(stash.bytes)?;
            if begin <= buffer.offset && buffer.offset.checked_add(buffer.bytes())? <= end {
                return Some((k, begin));
            }
            begin = end;
        }
        None
    }
}

/// Ranks that communicate: those which agree with this rank except in `subs`; with `stages`, also those of these pipeline
/// stages. Members are ordered by rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// Sub-axes in whose coordinates members differ.
    pub subs: Vec<SubAxis>,
    /// The pipeline stages of the members; `None` if all are of one stage.
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
