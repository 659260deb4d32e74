//! What a card can do, and in what words it is told.

use super::host::HostKernels;
use crate::comm::Terms;
use crate::device::{Location, ThreadResources};
use crate::executor::Copied;
use ir::launch::{MAP_BYTES, TensorMap};
use ir::op::DType;
use ir::program::{Channel, KernelId, Space, Stream};

/// Which of a card's streams does something: that of kernels, or one beside it for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The stream of kernels, whose copies come after all work that was begun before.
    Compute,
    /// The stream for copies that go on while kernels run.
    Beside,
}

/// Something for a card, on its stream of kernels if no other is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// The parameters are packed ([`ir::launch::Launch::pack`]).
    Launch {
        /// Index of the kernel in the job.
        kernel: KernelId,
        /// Tensor maps, then words of 8 bytes: addresses, scalars and fixed numbers.
        parameters: Vec<u8>,
    },
    /// Repeats the first `width` bytes, 1, 2 or 4.
    Fill {
        /// Device address of the first element, a multiple of `width`.
        address: u64,
        /// The value, little-endian, in its first `width` bytes.
        element: [u8; 4],
        /// Bytes of an element.
        width: u8,
        /// Elements that are filled.
        count: u64,
    },
    /// Bytes of the host go to the device's memory.
    Write {
        /// Device address of the first byte.
        address: u64,
        /// What the device's memory gets.
        bytes: Vec<u8>,
    },
    /// Bytes go from one memory to the other.
    Copy {
        /// The stream that it runs on.
        stream: Stream,
        /// The memory that is written; the other one is read.
        to: Space,
        /// Address in the device's memory.
        device: u64,
        /// Address in the host's memory, which was lent to the card ([`GpuDevice::lend`]).
        host: u64,
        /// Length of the copy in bytes.
        bytes: u64,
    },
    /// A copy between the host's memory and its disk.
    Disk {
        /// The stream that it runs on.
        stream: Stream,
        /// Its source and destination, dtype and number of elements.
        copied: Copied,
    },
    /// A kernel of the host, and its scalars as bits.
    Host {
        /// The stream that it runs on.
        stream: Stream,
        /// Index of the kernel in the job.
        kernel: KernelId,
        /// Places of its inputs, then of its outputs.
        args: Vec<Location>,
        /// Its scalar arguments, each as the bits of an `f64`.
        scalars: Vec<u64>,
    },
    /// A message is copied to its slot, whose last message has gone.
    Post {
        /// The stream that the copy runs on.
        stream: Stream,
        /// Device address of the message before the copy.
        address: u64,
        /// The receiver, the slot, and what the message is.
        outgoing: Outgoing,
    },
    /// A message goes out, of all that was posted: after the exchange before and before the next one.
    Send(Outgoing),
    /// The card exchanges with those of other ranks: after the exchange before, and at once with what goes out.
    Exchange {
        /// The stream whose work before comes first, and which waits for the exchange.
        stream: Stream,
        /// The collective, or the message that is received.
        exchange: CardExchange,
        /// Posted messages that go out in the same group.
        outgoing: Vec<Outgoing>,
    },
    /// An event marks a point of a stream.
    Record {
        /// The stream that reaches the point.
        stream: Stream,
        /// Number of the event in the rank's program.
        event: u32,
    },
    /// For the last record of the event before this in the order of issue.
    Wait {
        /// The stream that is held.
        stream: Stream,
        /// Number of the event in the rank's program.
        event: u32,
    },
}

/// What cards exchange, at addresses of this one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CardExchange {
    /// A collective of a group that this rank is in.
    Collective {
        /// Ranks of the group in rank order, this one included.
        members: Vec<u64>,
        /// Kind, dtype and number of elements, the same for all members.
        terms: Terms,
        /// Device address of what this rank gives.
        from: u64,
        /// Device address of what this rank gets.
        to: u64,
    },
    /// A message that another rank sends to this one.
    Receive {
        /// The rank that sends it.
        from: u64,
        /// The message, with the address on this card that it goes to.
        message: CardMessage,
    },
}

/// A message, at an address of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CardMessage {
    /// The channel that it is sent on.
    pub channel: Channel,
    /// Dtype of its elements, which lie densely.
    pub dtype: DType,
    /// Number of its elements.
    pub count: u64,
    /// Device address of its first element.
    pub address: u64,
}

/// A message to a rank, which was copied to a slot of its channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outgoing {
    /// The rank that receives it.
    pub to: u64,
    /// The channel that it is sent on.
    pub channel: Channel,
    /// Index among the slots of the channel, which are as many as the job has messages in flight.
    pub slot: u32,
    /// Dtype of its elements, which lie densely.
    pub dtype: DType,
    /// Number of its elements.
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
pub trait GpuDevice: Send + Sync {
    /// Reserves device memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// If there is not so much.
    fn allocate(&mut self, bytes: u64) -> Result<u64, String>;
    /// Makes memory of the host known that copies come from and go to, before anybody uses it. It stays as long as
    /// the card.
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
    /// As for [`GpuDevice::write`].
    fn read(&self, queue: Queue, address: u64, out: &mut [u8]) -> Result<(), String>;
    /// The bytes of a tensor map, as kernels take it, whose operand lies at an address.
    ///
    /// # Errors
    /// What is wrong with it.
    fn encode(&self, map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String>;
    /// What a kernel takes, where it has been assembled.
    fn needs(&self, _kernel: KernelId) -> Option<ThreadResources> {
        None
    }
    /// Does something, on each stream one after the other; maybe later. What the host does, it does natively.
    ///
    /// # Errors
    /// As for [`GpuDevice::write`].
    fn run(&self, work: &[Work], host_kernels: Option<&HostKernels>) -> Result<(), String>;
    /// Whether it exchanges with the cards of other ranks by itself ([`Work::Exchange`]).
    fn is_connected(&self) -> bool {
        false
    }
    /// Waits until all is done.
    ///
    /// # Errors
    /// As for [`GpuDevice::write`].
    fn synchronize(&self) -> Result<(), String>;
}
