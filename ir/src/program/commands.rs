//! What a rank does: bodies of commands, each on a stream.

use super::{BodyId, BufferAddress, BufferId, GroupId, KernelId};
use crate::dim::IndexMap;
use crate::graph::Origin;
use crate::op::{Channel, Collective, DType, Real, Scalar};
use crate::reason::Reason;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a body is for, and so when it is called.
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
    /// The word for it, without the number of a virtual stage.
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

    /// Of the rank's virtual stages, the one that it is of.
    pub fn virtual_stage(self) -> Option<u32> {
        match self {
            BodyKind::Forward(stage) | BodyKind::Backward(stage) | BodyKind::Weight(stage) => Some(stage),
            BodyKind::Prologue | BodyKind::Reduce | BodyKind::Update => None,
        }
    }
}

/// A list of commands that a schedule calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramBody {
    /// `forward1`; those of an evaluation begin with `eval_`.
    pub name: String,
    /// What it is for.
    pub kind: BodyKind,
    /// In the order in which a rank issues them.
    pub commands: Vec<Command>,
    /// The commands with which its parts begin, ascending, but that of the first part: none if it is one part.
    pub cuts: Vec<u32>,
}

impl ProgramBody {
    /// The number of its parts.
    pub fn parts(&self) -> u32 {
        self.cuts.len() as u32 + 1
    }

    /// The commands of a part; none if there is no such part.
    pub fn part(&self, part: u32) -> Range<usize> {
        let cut = |k: usize| self.cuts.get(k).map(|c| *c as usize);
        let begin = (part as usize).checked_sub(1).map_or(Some(0), cut);
        let end = cut(part as usize).unwrap_or(self.commands.len()).min(self.commands.len());
        begin.filter(|begin| *begin <= end).map_or(0..0, |begin| begin..end)
    }

    /// The part that a command is in.
    pub fn part_of(&self, command: usize) -> u32 {
        self.cuts.partition_point(|c| *c as usize <= command) as u32
    }
}

/// One call of a part of a body: for this microbatch, in slot `microbatch % slots` of each stash. A microbatch goes
/// through all parts of a body in order; what other calls come between them are of other bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Call {
    /// A body of the stage's program.
    pub body: BodyId,
    /// From 0, within the step; 0 if the body is called once per step.
    pub microbatch: u32,
    /// 0 unless the body has several.
    pub part: u32,
}

impl Call {
    /// Of a body of one part.
    pub fn whole(body: BodyId, microbatch: u32) -> Call {
        Call { body, microbatch, part: 0 }
    }
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
    /// What goes to other pipeline stages.
    Send,
    /// What comes from other pipeline stages.
    Receive,
    /// Kernels of the host.
    Host,
    /// Copies of the device's memory to the host's.
    ToHost,
    /// Copies to the device's memory.
    ToDevice,
    /// Copies to disks.
    ToDisk,
    /// Copies of disks to the host's memory.
    FromDisk,
}

impl Stream {
    /// Every stream, in the order of declaration.
    pub const ALL: [Stream; 10] = [
        Stream::Compute,
        Stream::Tensor,
        Stream::Data,
        Stream::Send,
        Stream::Receive,
        Stream::Host,
        Stream::ToHost,
        Stream::ToDevice,
        Stream::ToDisk,
        Stream::FromDisk,
    ];

    /// The word for it in the text form.
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
            Stream::ToDisk => "to_disk",
            Stream::FromDisk => "from_disk",
        }
    }
}

/// A command with its queue and the reason it is there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Command {
    /// The queue that it goes to.
    pub stream: Stream,
    /// What it does.
    pub action: Action,
    /// A bool scalar, the same throughout a call; where it is false, the command is left out. What it would have
    /// written is not there then; what it would have added to is as it was. All members of a collective have the same
    /// bool.
    pub predicate: Option<BufferAddress>,
    /// Where the node that it carries out comes from.
    pub origin: Origin,
    /// Of a collective: which operand of which op needs it, and which sharding rule.
    pub reason: Option<Reason>,
}

/// What a command does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Runs a kernel where it is at home ([`Kernel::on`](crate::kernel::Kernel::on)): places of inputs, then of outputs, all in that memory; scalars in the kernel's order.
    Launch {
        /// Which kernel of the job.
        kernel: KernelId,
        /// Where inputs, then outputs begin.
        args: Vec<BufferAddress>,
        /// The values of its scalar arguments, in order.
        scalars: Vec<Scalar>,
    },
    /// Works on dense ranges; `count` is in elements. Reductions combine members in rank order, so every member gets the
    /// same bits, and every run too.
    /// All-reduce: `src` and `dst` hold `count`, may be the same. All-gather: `src` holds `count`, `dst` `count` per member in
    /// order. Reduce-scatter: `src` holds `count` per member, `dst` this member's part. Of these two, the part may lie at its place in the
    /// whole ([`own_part`](super::own_part)). All-to-all: both hold `count` per
    /// member; part k of `src` goes to member k. Shift: `src` and `dst` hold `count`; the next member gets it, the first the last one's.
    Collective {
        /// Which collective, and how it reduces.
        kind: Collective,
        /// Which group of the program.
        group: GroupId,
        /// The type of the elements.
        dtype: DType,
        /// Elements of a part.
        count: u64,
        /// Where this rank's operand begins.
        src: BufferAddress,
        /// Where this rank's result begins.
        dst: BufferAddress,
    },
    /// To the rank with the same coordinates `hops` stages further on (negative: back). Ordered per sender, receiver and channel.
    Send {
        /// Pipeline stages from this one to the receiver's; negative is back.
        hops: i64,
        /// The channel that the receiver names too.
        channel: Channel,
        /// The type of the elements.
        dtype: DType,
        /// Elements of the message.
        count: u64,
        /// Where the message begins here.
        src: BufferAddress,
    },
    /// From the rank with the same coordinates `hops` stages further on (negative: back).
    Recv {
        /// Pipeline stages from this one to the sender's; negative is back.
        hops: i64,
        /// The channel that the sender names too.
        channel: Channel,
        /// The type of the elements.
        dtype: DType,
        /// Elements of the message.
        count: u64,
        /// Where the message is to begin here.
        dst: BufferAddress,
    },
    /// Dense ranges of `count` elements, from one memory to another.
    Copy {
        /// The type of the elements.
        dtype: DType,
        /// Elements that are copied.
        count: u64,
        /// Where the elements begin that are copied.
        src: BufferAddress,
        /// Where the copy is to begin.
        dst: BufferAddress,
    },
    /// Every element of the buffer.
    Fill {
        /// Which buffer of the program.
        buffer: BufferId,
        /// What every element becomes.
        value: Real,
    },
    /// This microbatch's part of an input: `index` maps local to global, per dim in storage order (the base of a dim
    /// split by microbatches has their coordinate).
    Load {
        /// Index into [`Job::inputs`](super::Job::inputs).
        input: u32,
        /// Which buffer of the program; it is filled as a whole.
        dst: BufferId,
        /// From local to global index, per dim of the buffer.
        index: Vec<IndexMap>,
    },
    /// A scalar f32 for the host: number `report` of [`Job::reports`](super::Job::reports).
    Report {
        /// Index into [`Job::reports`](super::Job::reports).
        report: u32,
        /// Where the f32 is.
        src: BufferAddress,
    },
    /// Stops the run with an error if the i32 there is more. The command's reason says what it counts.
    Limit {
        /// Where the i32 is.
        src: BufferAddress,
        /// The greatest number with which the run goes on.
        most: u64,
    },
    /// Marks this point of the stream. Events are the program's: they live across calls and phases, and each is always
    /// recorded on one stream.
    Record {
        /// The number of the event, in the program.
        event: u32,
    },
    /// Holds the stream until the event's last record issued before is reached; goes on if there is none.
    Wait {
        /// The number of the event, in the program.
        event: u32,
    },
}

impl Command {
    /// The buffers that it reads or writes.
    pub fn buffers(&self) -> Vec<BufferId> {
        self.action.buffers().into_iter().chain(self.predicate.iter().map(|p| p.buffer)).collect()
    }

    /// The places that it reads or writes, to put others in their place; none of a fill or a load, which are of a whole
    /// buffer.
    pub fn places_mut(&mut self) -> Vec<&mut BufferAddress> {
        let of_action = match &mut self.action {
            Action::Launch { args, .. } => args.iter_mut().collect(),
            Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => vec![src, dst],
            Action::Send { src: place, .. }
            | Action::Report { src: place, .. }
            | Action::Limit { src: place, .. }
            | Action::Recv { dst: place, .. } => {
                vec![place]
            }
            Action::Fill { .. } | Action::Load { .. } | Action::Record { .. } | Action::Wait { .. } => vec![],
        };
        of_action.into_iter().chain(self.predicate.iter_mut()).collect()
    }

    /// As [`Command::buffers`], to put others in their place.
    pub fn buffers_mut(&mut self) -> Vec<&mut BufferId> {
        let of_action = match &mut self.action {
            Action::Launch { args, .. } => args.iter_mut().map(|p| &mut p.buffer).collect(),
            Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => vec![&mut src.buffer, &mut dst.buffer],
            Action::Send { src, .. } | Action::Report { src, .. } | Action::Limit { src, .. } => vec![&mut src.buffer],
            Action::Recv { dst, .. } => vec![&mut dst.buffer],
            Action::Fill { buffer, .. } => vec![buffer],
            Action::Load { dst, .. } => vec![dst],
            Action::Record { .. } | Action::Wait { .. } => vec![],
        };
        of_action.into_iter().chain(self.predicate.iter_mut().map(|p| &mut p.buffer)).collect()
    }
}

impl Action {
    /// The buffers that it reads or writes, where it is not left out.
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
