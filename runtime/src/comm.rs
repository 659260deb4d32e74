//! What connects ranks.

use crate::device::{Location, Memory};
use ir::op::DType;
use ir::program::{Channel, Collective, ProgramPhase};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A collective as one member sees it. Ranges as in [`Collective`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Which collective it is, and how it reduces, if it does.
    pub kind: Collective,
    /// Dtype of the elements that are exchanged.
    pub dtype: DType,
    /// Elements of a part; a member gives or gets one part, or one for each member.
    pub count: u64,
    /// Where the elements that this member gives begin.
    pub src: Location,
    /// Where the elements that this member gets are to begin.
    pub dst: Location,
}

impl Exchange {
    /// Elements that a member gives and gets, for a number of members.
    pub fn elements(&self, members: u64) -> (u64, u64) {
        self.kind.elements(self.count, members)
    }

    /// What all members must agree on.
    pub fn terms(&self) -> Terms {
        Terms { kind: self.kind, dtype: self.dtype, count: self.count }
    }
}

/// What all members of a collective must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Which collective it is, and how it reduces, if it does.
    pub kind: Collective,
    /// Dtype of the elements that are exchanged.
    pub dtype: DType,
    /// Elements of a part ([`Exchange::count`]).
    pub count: u64,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind.name())?;
        if let Some(reduce) = self.kind.reduction() {
            write!(f, " {}", reduce.name())?;
        }
        write!(f, " of {} {}", self.count, self.dtype.name())
    }
}

/// A dense range that is sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Messages on one channel between two ranks arrive in order.
    pub channel: Channel,
    /// Dtype of the elements, on which both ranks must agree.
    pub dtype: DType,
    /// Elements of the range, on which both ranks must agree.
    pub count: u64,
    /// Where the range begins in this rank's memory.
    pub at: Location,
}

/// Whether a communication is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Complete: nothing is left for this rank to do.
    Done,
    /// These ranks have to act first; the same call is to be made again.
    Blocked(Vec<u64>),
}

/// What a look at a communication came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polled {
    /// The communication is complete.
    pub done: bool,
    /// Something was sent, posted or taken, or has arrived.
    pub moved: bool,
}

/// Where a rank is: a call of a phase's list and a command of the called body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The phase in whose list the call is.
    pub phase: ProgramPhase,
    /// Index into the phase's list of calls.
    pub call: u32,
    /// Index into all commands of the body, whichever part of it is called.
    pub command: u32,
}

/// Why a communication failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CommError {
    #[error("rank {here} issues {mine}, rank {there} issues {theirs}")]
    Mismatch { here: u64, mine: String, there: u64, theirs: String },
    #[error("rank {here} receives {mine} from rank {there}, which sent {theirs}")]
    Message { here: u64, mine: String, there: u64, theirs: String },
    #[error("waited {seconds} s for {}", ranks(.waits))]
    Stuck { seconds: u64, waits: Vec<u64> },
    #[error("the run was ended: {0}")]
    Aborted(String),
    #[error("{kind} of {dtype} is not supported")]
    Unsupported { kind: &'static str, dtype: &'static str },
    #[error("{0}")]
    Failed(String),
}

/// `rank 3`, `ranks 1, 2`.
pub fn ranks(list: &[u64]) -> String {
    let names: Vec<String> = list.iter().map(u64::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, names.join(", "))
}

/// One rank's end. Collectives of a group happen in the order in which each member issues them, messages of a sender,
/// receiver and channel in the order in which they were sent. Reductions combine members in rank order, so all get
/// the same bits.
pub trait Communicator {
    /// `members` is in rank order and includes this rank.
    ///
    /// # Errors
    /// If members disagree on what they exchange, one of them is stuck or gone, or the run was aborted.
    fn collective(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError>;
    /// Takes a message for another rank. On every channel, as many messages as the job has in flight
    /// ([`in_flight`](ir::program::Job::in_flight)) are taken without the receiver's doing; the check of the whole
    /// job relies on it.
    ///
    /// # Errors
    /// As for [`Communicator::collective`].
    fn send(&mut self, memory: &mut dyn Memory, to: u64, message: &Message) -> Result<Progress, CommError>;
    /// Receives the next message of another rank on the channel.
    ///
    /// # Errors
    /// As for [`Communicator::collective`]; also if the message is of another type or length.
    fn recv(&mut self, memory: &mut dyn Memory, from: u64, message: &Message) -> Result<Progress, CommError>;
    /// Where this rank is, for reports about ranks that wait for each other.
    fn publish(&mut self, _step: u64, _position: Position) {}
    /// An event was reached: other threads of this rank may wait for it.
    fn recorded(&mut self) {}
    /// Tells the other ranks that this one gives up.
    fn abort(&mut self, _reason: &str) {}
}
