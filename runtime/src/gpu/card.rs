//! What a card can do, and in what words it is told.

use super::host::Natively;
use crate::comm::Terms;
use crate::device::{Location, Needs};
use crate::executor::Copied;
use ir::launch::{MAP_BYTES, TensorMap};
use ir::op::DType;
use ir::program::{Channel, KernelId, Space, Stream};

/// Which of a card's streams does something: that of kernels, or one beside it for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    Compute,
    Beside,
}

/// Something for a card, on its stream of kernels if no other is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// The parameters are packed ([`ir::launch::Launch::pack`]).
    Launch {
        kernel: KernelId,
        parameters: Vec<u8>,
    },
    /// Repeats the first `width` bytes, 1, 2 or 4.
    Fill {
        address: u64,
        element: [u8; 4],
        width: u8,
        count: u64,
    },
    Write {
        address: u64,
        bytes: Vec<u8>,
    },
    /// Bytes go from one memory to the other.
    Copy {
        stream: Stream,
        to: Space,
        device: u64,
        host: u64,
        bytes: u64,
    },
    /// A copy between the host's memory and its disk.
    Disk {
        stream: Stream,
        copied: Copied,
    },
    /// A kernel of the host, and its scalars as bits.
    Host {
        stream: Stream,
        kernel: KernelId,
        args: Vec<Location>,
        scalars: Vec<u64>,
    },
    /// A message is copied to its slot, whose last message has gone.
    Post {
        stream: Stream,
        address: u64,
        outgoing: Outgoing,
    },
    /// A message goes out, of all that was posted: after the exchange before and before the next one.
    Send(Outgoing),
    /// The card exchanges with those of other ranks: after the exchange before, and at once with what goes out.
    Exchange {
        stream: Stream,
        between: Between,
        outgoing: Vec<Outgoing>,
    },
    Record {
        stream: Stream,
        event: u32,
    },
    /// For the last record of the event before this in the order of issue.
    Wait {
        stream: Stream,
        event: u32,
    },
}

/// What cards exchange, at addresses of this one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Between {
    Collective { members: Vec<u64>, terms: Terms, from: u64, to: u64 },
    Receive { from: u64, message: Message },
}

/// A message, at an address of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    pub channel: Channel,
    pub dtype: DType,
    pub count: u64,
    pub address: u64,
}

/// A message to a rank, which was copied to a slot of its channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outgoing {
    pub to: u64,
    pub channel: Channel,
    pub slot: u32,
    pub dtype: DType,
    pub count: u64,
}

impl Work {
    /// Where it goes.
    pub(super) fn stream(&self) -> Stream {
        match self {
            Work::Copy { stream, .. }
            | Work::Disk { stream, .. }
            | Work::Host { stream, .. }
            | Work::Post { stream, .. }
            | Work::Exchange { stream, .. }
            | Work::Record { stream, .. }
            | Work::Wait { stream, .. } => *stream,
            Work::Launch { .. } | Work::Fill { .. } | Work::Write { .. } | Work::Send(_) => Stream::Compute,
        }
    }

    /// Bytes that come from the host.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Work::Write { bytes, .. } => bytes.len(),
            Work::Launch { .. }
            | Work::Fill { .. }
            | Work::Copy { .. }
            | Work::Disk { .. }
            | Work::Host { .. }
            | Work::Post { .. }
            | Work::Send(_)
            | Work::Exchange { .. }
            | Work::Record { .. }
            | Work::Wait { .. } => 0,
        }
    }
}

/// A GPU, or what stands for one. It has been given the kernels of an artifact, which it numbers as the job does.
pub trait Card: Send + Sync {
    /// Reserves device memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// If there is not so much.
    fn allocate(&mut self, bytes: u64) -> Result<u64, String>;
    /// Makes memory of the host known that copies come from and go to, before anybody uses it. It stays as long as the card.
    ///
    /// # Errors
    /// What the card says.
    fn lend(&mut self, memory: &mut [u8]) -> Result<(), String>;
    /// Copies to the device; done when it returns, after everything before on that stream.
    ///
    /// # Errors
    /// What the card says, also of what was begun before.
    fn write(&self, queue: Queue, address: u64, bytes: &[u8]) -> Result<(), String>;
    /// Copies from the device; likewise.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn read(&self, queue: Queue, address: u64, out: &mut [u8]) -> Result<(), String>;
    /// The bytes of a tensor map, as kernels take it, whose operand lies at an address.
    ///
    /// # Errors
    /// What is wrong with it.
    fn encode(&self, map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String>;
    /// What a kernel takes, where it has been assembled.
    fn needs(&self, _kernel: KernelId) -> Option<Needs> {
        None
    }
    /// Does something, on each stream one after the other; maybe later. What the host does, it does natively.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn run(&self, work: &[Work], natively: Option<&Natively>) -> Result<(), String>;
    /// Whether it exchanges with the cards of other ranks by itself ([`Work::Exchange`]).
    fn is_connected(&self) -> bool {
        false
    }
    /// Waits until all is done.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn synchronize(&self) -> Result<(), String>;
}
