//! Communication and copies, once their operands are found.

use crate::comm::{CommError, Communicator, Exchange, Message, Progress};
use crate::device::{Location, Memory};
use ir::op::DType;
use std::time::Duration;

/// How long to wait for a disk before looking again, with nothing else to do.
const LONG: Duration = Duration::from_millis(100);

/// A communication or copy whose operands are found.
#[derive(Clone, Copy, Debug)]
pub enum Transfer<'a> {
    /// Among these ranks, in rank order, this one included.
    Collective(&'a [u64], Exchange),
    /// A message from this rank, and its receiver.
    Send(u64, Message),
    /// From this rank.
    Recv(u64, Message),
    /// A copy within this rank.
    Copy(Copied),
}

/// A copy from one memory of a rank to another, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Copied {
    /// Dtype of the elements, the same in both memories.
    pub dtype: DType,
    /// How many elements are copied.
    pub count: u64,
    /// Where the elements that are copied begin.
    pub src: Location,
    /// Where the copy of the first element goes.
    pub dst: Location,
}

impl Transfer<'_> {
    pub(super) fn go(&self, memory: &mut dyn Memory, comm: &mut dyn Communicator) -> Result<Progress, CommError> {
        match self {
            Transfer::Collective(members, exchange) => comm.collective(memory, members, exchange),
            Transfer::Send(to, message) => comm.send(memory, *to, message),
            Transfer::Recv(from, message) => comm.recv(memory, *from, message),
            Transfer::Copy(copied) => {
                let mut done = 0;
                while done < copied.count {
                    done = memory.advance(copied, done, usize::MAX).map_err(|e| CommError::Failed(e.to_string()))?;
                    memory.rest(LONG);
                }
                Ok(Progress::Done)
            }
        }
    }
}
