//! Exchanges by MPI (`mcc run --exchanges mpi`), for ranks that an MPI launcher started.
//!
//! **Guarantees** are those of every communicator: members of a group get the same bits in every run, as each number
//! is combined in rank order by one member, or by all alike; channels take as many messages as the job has in flight,
//! from copies that the sender keeps. So collectives are made of non-blocking sends and receives; MPI's own
//! reductions are not used, which add in an order of their choice.
//!
//! All goes through one communicator and is told apart by tags ([`Tags`]), of which each has its receives and its
//! sends in one order on both sides. Of a group at most two chunks are under way, of a channel as many messages as
//! are guaranteed and one more; whatever has been begun and is not taken is of that number, so nothing grows without
//! bound.
//!
//! What is here knows MPI by [`PointToPoint`] alone, so that it can be tried without one. The library itself is
//! behind the feature `mpi` (`library.rs`), and its calls are made by one thread at a time: a rank's ends share one
//! [`Mpi`].

mod collective;
#[cfg(feature = "mpi")]
mod library;
mod message;
mod start;
mod tags;

pub use start::{Connected, connect, library_of, version};
pub use tags::Tags;

use crate::comm::{CommError, Polled};
use crate::device::Memory;
use crate::executor::Transfer;
use collective::Group;
use ir::program::Channel;
use message::{Incoming, SendQueue};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sends and receives between two ranks. Messages of a sender, a receiver and a tag arrive as they were sent, and are
/// taken by the receives in the order of these. Errors are the library's, in words.
pub trait PointToPoint: Send {
    /// Begins to send.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn send(&mut self, to: u64, tag: u32, bytes: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, String>;
    /// Begins to receive a message of at most so many bytes.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn recv(&mut self, from: u64, tag: u32, most: usize) -> Result<Box<dyn Receiving>, String>;
    /// The greatest tag.
    fn tags(&self) -> u32;
    /// Leaves, with all other ranks. Nothing is under way.
    fn leave(self: Box<Self>);
}

/// A message that is being sent.
pub trait Sending: Send {
    /// Whether its bytes are no more needed.
    ///
    /// # Errors
    /// If it cannot be sent.
    fn is_done(&mut self) -> Result<bool, String>;
}

/// A message that is being received.
pub trait Receiving: Send {
    /// The message, once, when it is there.
    ///
    /// # Errors
    /// If it is longer than was said, or cannot be received.
    fn received(&mut self) -> Result<Option<Vec<u8>>, String>;
}

/// A message to this rank that is being sent.
struct PendingSend {
    to: u64,
    request: Box<dyn Sending>,
}

/// Bytes of the numbers of one message. Small enough that the next is copied while one is under way.
const MESSAGE: usize = 1 << 20;
/// How long a rank sleeps between two looks at what is under way: at least, at most, and as a part of how long
/// nothing has moved. MPI has nothing that wakes.
const NAPS: (Duration, Duration, u32) = (Duration::from_micros(10), Duration::from_millis(2), 16);

/// What a rank has under way.
pub struct Mpi {
    rank: u64,
    /// Messages that a channel takes without the receiver's doing.
    in_flight: usize,
    tags: Tags,
    wires: Box<dyn PointToPoint>,
    /// Groups, by their members.
    groups: BTreeMap<Vec<u64>, Group>,
    incoming: BTreeMap<(u64, Channel), Incoming>,
    outgoing: BTreeMap<(u64, Channel), SendQueue>,
    /// When something last moved.
    moved: Instant,
    /// What went wrong between two polls.
    failed: Option<String>,
    /// Of the chunk that is being combined.
    sum: Vec<u8>,
}

impl Mpi {
    /// # Errors
    /// If the library has not as many tags as the job needs.
    pub fn new(rank: u64, in_flight: u32, tags: Tags, wires: Box<dyn PointToPoint>) -> Result<Mpi, String> {
        if tags.most() > wires.tags() {
            return Err(format!("the job needs tags up to {}, and the library has {}", tags.most(), wires.tags()));
        }
        let (groups, incoming, outgoing) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (in_flight, moved) = (in_flight as usize, Instant::now());
        Ok(Mpi { rank, in_flight, tags, wires, groups, incoming, outgoing, moved, failed: None, sum: vec![] })
    }

    /// Goes on with a communication as far as it can. Until it is done, no other of its group, or of its channel and
    /// direction, may be begun; if it is left, it is taken up again where it was.
    ///
    /// # Errors
    /// If the other ranks think they exchange something else, or the library fails.
    pub fn poll(&mut self, memory: &mut dyn Memory, transfer: &Transfer) -> Result<Polled, CommError> {
        if let Some(why) = &self.failed {
            return Err(failed(why));
        }
        let polled = match transfer {
            Transfer::Collective(members, exchange) => self.exchange(memory, members, exchange)?,
            Transfer::Send(to, message) => self.push(memory, *to, message)?,
            Transfer::Recv(from, message) => self.pull(memory, *from, message)?,
            Transfer::Copy(_) => unreachable!("invariant: copies are within a rank"),
        };
        if polled.moved {
            self.moved = Instant::now();
        }
        Ok(polled)
    }

    /// The ranks that have to act before a communication can go on.
    pub fn waits_for(&self, transfer: &Transfer) -> Vec<u64> {
        match transfer {
            Transfer::Send(other, _) | Transfer::Recv(other, _) => vec![*other],
            Transfer::Copy(_) => vec![],
            Transfer::Collective(members, _) => self.groups.get(*members).map_or(vec![], Group::waits_for),
        }
    }

    /// Whether anything is under way, which only goes on while this rank looks.
    pub fn is_busy(&mut self) -> bool {
        let looked = self.look();
        self.failed = self.failed.take().or(looked.err());
        self.groups.values().any(Group::is_busy) || !self.incoming.is_empty() || self.outgoing.values().any(|o| !o.sent.is_empty())
    }

    /// How long to sleep until the next look; none if nothing is under way.
    pub fn nap(&mut self) -> Option<Duration> {
        let (least, most, part) = NAPS;
        self.is_busy().then(|| (self.moved.elapsed() / part).clamp(least, most))
    }

    /// Forgets what has been sent.
    fn look(&mut self) -> Result<(), String> {
        for group in self.groups.values_mut() {
            group.look()?;
        }
        for outgoing in self.outgoing.values_mut() {
            outgoing.look()?;
        }
        Ok(())
    }

    /// Sees everything that was sent to its end, then leaves with all other ranks. `ended` says why the run has
    /// ended, if it has.
    ///
    /// # Errors
    /// If the run ends meanwhile, or the library fails.
    pub fn leave(mut self, ended: impl Fn() -> Option<String>) -> Result<(), CommError> {
        while let Some(nap) = self.nap() {
            if let Some(why) = ended() {
                return Err(CommError::Aborted(why));
            }
            std::thread::sleep(nap);
        }
        match self.failed {
            Some(why) => Err(failed(&why)),
            None => {
                self.wires.leave();
                Ok(())
            }
        }
    }
}

fn failed(why: &str) -> CommError {
    CommError::Failed(format!("MPI: {why}"))
}

#[cfg(test)]
mod tests;
