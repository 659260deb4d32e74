//! Communication and copies, once their operands are found.

use crate::comm::{CommError, Communicator, Exchange, Message, Progress};
use crate::device::{Location, Memory};
use ir::op::DType;

/// A communication or copy whose operands are found.
#[derive(Clone, Copy, Debug)]
pub enum Transfer<'a> {
    Collective(&'a [u64], Exchange),
    /// To this rank.
    Send(u64, Message),
    /// From this rank.
    Recv(u64, Message),
    /// Within this rank.
    Copy(Copied),
}

/// A copy from one memory of a rank to another, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    pub dtype: DType,
    pub count: u64,
    pub src: Location,
    pub dst: Location,
}

impl Copied {
    /// Copies up to `most` bytes from element `done` on, and says how many elements are through.
    pub fn go(&self, memory: &mut dyn Memory, done: u64, most: usize) -> u64 {
        let width = memory.element(self.dtype).bytes();
        let elements = (self.count - done).min((most / width) as u64);
        let at = |start: Location| Location { byte: start.byte + done * self.dtype.bytes(), ..start };
        memory.copy(at(self.src), at(self.dst), self.dtype, elements);
        done + elements
    }
}

impl Transfer<'_> {
    pub(super) fn go(&self, memory: &mut dyn Memory, comm: &mut dyn Communicator) -> Result<Progress, CommError> {
        match self {
            Transfer::Collective(members, exchange) => comm.collective(memory, members, exchange),
            Transfer::Send(to, message) => comm.send(memory, *to, message),
            Transfer::Recv(from, message) => comm.recv(memory, *from, message),
            Transfer::Copy(copied) => {
                copied.go(memory, 0, usize::MAX);
                Ok(Progress::Done)
            }
        }
    }
}
