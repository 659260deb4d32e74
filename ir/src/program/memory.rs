//! Where values lie: arenas, buffers in them, and places in those.

use super::BufferId;
use crate::dim::{IndexMap, Linear};
use crate::graph::Origin;
use crate::mesh::{Coords, Mesh, SubAxis};
use crate::op::DType;
use serde::{Deserialize, Serialize};

/// The most bytes of an arena: sums and products of sizes below it cannot overflow.
pub const MOST_BYTES: u64 = 1 << 48;

/// Bytes of a disk that are read and written as one: buffers there begin at a multiple of them.
pub const BLOCK: u64 = 4096;

/// A part of a rank's memory, by where it is and how long it holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Arena {
    /// Lives over steps: parameters, optimizer state, gradients, tables.
    Persistent,
    /// One copy per microbatch in flight: what a call leaves for later calls of its microbatch, such as the backward
    /// pass. It lies in the memory of temporary buffers, where the stage says ([`Slots`](super::Slots)): beside those
    /// that are in use from the first to the last command of a phase that touch it for a microbatch.
    Stash,
    /// Within one call of a body.
    Temporary,
    /// Lives over steps, in the host's memory.
    Host,
    /// As [`Arena::Stash`], in the host's memory, beside what is staged there.
    HostStash,
    /// Within one call of a body, in the host's memory.
    Staging,
    /// Lives over steps, on a disk of the host: copies alone use it.
    Disk,
}

/// A memory, and the processor that works on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Space {
    /// The memory in which ranks compute: of a GPU, or of the CPU where that is the target.
    #[default]
    Device,
    /// The memory of the machine that a device is in, and its CPU.
    Host,
}

impl Space {
    /// Both, the device first.
    pub const ALL: [Space; 2] = [Space::Device, Space::Host];

    /// The word for it: `device`.
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

    /// The arena of what calls leave for later ones of their microbatch.
    pub fn stash(self) -> Arena {
        match self {
            Space::Device => Arena::Stash,
            Space::Host => Arena::HostStash,
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
    /// Every arena, in the order in which lists of their sizes are.
    pub const ALL: [Arena; 7] = [Arena::Persistent, Arena::Stash, Arena::Temporary, Arena::Host, Arena::HostStash, Arena::Staging, Arena::Disk];

    /// The memory that it is a part of; none of a disk, on which no processor works.
    pub fn space(self) -> Option<Space> {
        match self {
            Arena::Persistent | Arena::Stash | Arena::Temporary => Some(Space::Device),
            Arena::Host | Arena::HostStash | Arena::Staging => Some(Space::Host),
            Arena::Disk => None,
        }
    }

    /// Where it is, for people.
    pub fn whereabouts(self) -> &'static str {
        self.space().map_or("disk", Space::name)
    }

    /// Whether it is that of stashes, which lie in the memory of temporary buffers.
    pub fn is_stash(self) -> bool {
        Space::ALL.iter().any(|space| self == space.stash())
    }

    /// Whether what it holds lives over steps.
    pub fn lasts(self) -> bool {
        self == Arena::Disk || Space::ALL.iter().any(|space| self == space.lasting())
    }

    /// Whether what it holds lives within one call of a body.
    pub fn is_temporary(self) -> bool {
        Space::ALL.iter().any(|space| self == space.temporary())
    }

    /// The word for it in the text form: `host_stash`.
    pub fn name(self) -> &'static str {
        match self {
            Arena::Persistent => "persistent",
            Arena::Stash => "stash",
            Arena::Temporary => "temporary",
            Arena::Host => "host",
            Arena::HostStash => "host_stash",
            Arena::Staging => "staging",
            Arena::Disk => "disk",
        }
    }
}

/// What a buffer holds, for the memory table and for loading.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Content {
    /// Parameter slot (see [`Stage::params`](super::Stage::params)) or bucket; `index` maps local to global, per dim in storage order.
    Param {
        /// Index into [`Stage::params`](super::Stage::params), or behind these into the program's buckets.
        slot: u32,
        /// From local to global index, per dim in storage order.
        index: Vec<IndexMap>,
    },
    /// Optimizer state `state` of a parameter slot or bucket.
    State {
        /// Index into [`Stage::params`](super::Stage::params), or behind these into the program's buckets.
        slot: u32,
        /// Which of the slot's states, from 0.
        state: u32,
        /// From local to global index, per dim in storage order.
        index: Vec<IndexMap>,
    },
    /// Table of [`Job::tables`](super::Job::tables).
    Table {
        /// Index into [`Job::tables`](super::Job::tables).
        table: u32,
        /// From local to global index, per dim in storage order.
        index: Vec<IndexMap>,
    },
    /// Accumulated over microbatches: gradients, losses.
    Accumulator,
    /// All else: what nodes compute, load, send and receive.
    Activation,
}

/// A typed range of an arena, dense, 64-byte aligned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    /// What reports call it: `layers.3.attn.q.w`, `table0`, or the number of a node.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Local dims, outermost first: name and size.
    pub dims: Vec<(String, u64)>,
    /// The memory that it is a range of.
    pub arena: Arena,
    /// Byte offset in the arena (of one slot of each stash, there).
    pub offset: u64,
    /// What it holds.
    pub content: Content,
    /// Where the node whose value it holds comes from; `None` if that is not known.
    pub origin: Option<Origin>,
}

impl Buffer {
    /// How many elements it has: the product of its dims.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|d| d.1).product()
    }

    /// Bytes of all its elements.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }
}

/// A place in a buffer: `offset + sum(coordinate * stride)` elements from its start.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BufferAddress {
    /// Which buffer of the program.
    pub buffer: BufferId,
    /// Elements from the buffer's start, for every rank and microbatch.
    pub offset: u64,
    /// Elements beyond `offset`, by the coordinates of a rank and microbatch.
    pub coords: Linear,
}

impl BufferAddress {
    /// The first element of a buffer, for every rank.
    pub fn start(buffer: BufferId) -> BufferAddress {
        BufferAddress { buffer, offset: 0, coords: vec![] }
    }

    /// Whether it is a multiple of [`ALIGN`](crate::kernel::ALIGN) bytes from the start of the buffer for every rank
    /// and microbatch; elements have so many bytes.
    pub fn is_aligned(&self, bytes: u64) -> bool {
        std::iter::once(self.offset).chain(self.coords.iter().map(|c| c.1)).all(|elements| (elements * bytes).is_multiple_of(crate::kernel::ALIGN))
    }

    /// Elements from the start of the buffer, for a rank and microbatch.
    pub fn resolve(&self, coords: &Coords) -> u64 {
        crate::fault!("place.resolve.offset", 0, self.offset) + linear(&self.coords, coords)
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
    let members: Vec<SubAxis> = mesh.ids().filter(|u| subs.contains(u)).collect();
    for u in crate::fault!("own_part.members.reversed", members.clone(), members.into_iter().rev().collect::<Vec<_>>()) {
        form.push((u, stride));
        stride = stride.saturating_mul(mesh[u].size);
    }
    form.reverse();
    form
}
