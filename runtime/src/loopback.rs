//! Ranks that take turns in one thread, and their communication. Deterministic, so a deadlock is found, not timed.

use crate::comm::{CommError, Communicator, Exchange, Message, Phase, Progress, Terms, ranks};
use crate::device::Device;
use crate::executor::{Advance, ExecError, Rank, Step, describe};
use ir::op::Reduce;
use ir::program::{Channel, Collective, Job};
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("deadlock: {}", .0.join("; "))]
    Deadlock(Vec<String>),
}

/// Lets all ranks of a job take turns until each has finished a phase; each runs until it waits.
///
/// # Errors
/// What stopped a rank; if none can go on, who waits for whom and where.
pub fn run_phase<D: Device>(job: &Job, all: &mut [Rank<D>], hub: &mut Hub, phase: Phase, step: &Step) -> Result<(), TurnError> {
    all.iter_mut().for_each(|r| r.begin(phase));
    let mut waits: Vec<Option<Vec<u64>>> = vec![Some(vec![]); all.len()];
    while waits.iter().any(Option::is_some) {
        let mut moved = false;
        for (rank, wait) in all.iter_mut().zip(&mut waits) {
            if wait.is_none() {
                continue;
            }
            let before = rank.completed;
            let number = rank.rank();
            *wait = match rank.advance(step, &mut hub.end(number))? {
                Advance::Finished => None,
                Advance::Blocked(on) => Some(on),
            };
            moved |= wait.is_none() || rank.completed != before;
        }
        // A turn without a completed command may still have posted the last part of a collective for a rank before it.
        if !moved && !hub.take_posted() {
            let stuck = all.iter().zip(&waits).filter_map(|(rank, wait)| {
                let wait = wait.as_ref()?;
                Some(format!("rank {} waits for {} at {}", rank.rank(), ranks(wait), describe(job, rank.rank(), rank.position())))
            });
            return Err(TurnError::Deadlock(stuck.collect()));
        }
    }
    Ok(())
}

/// Where all ranks meet.
pub struct Hub {
    world: u64,
    /// By members.
    meetings: BTreeMap<Vec<u64>, Meeting>,
    /// By sender, receiver and channel.
    mail: BTreeMap<(u64, u64, Channel), Mailbox>,
    /// Messages that a mailbox takes.
    in_flight: usize,
    posted: bool,
}

type Mailbox = VecDeque<(Message, Vec<f64>)>;

#[derive(Default)]
struct Meeting {
    /// Per member: what it gives, until all have come.
    posts: Vec<Option<(Terms, Vec<f64>)>>,
    /// Per member: what it gets, until it takes it.
    results: Vec<Option<Vec<f64>>>,
}

impl Hub {
    pub fn new(job: &Job) -> Hub {
        Hub { world: job.mesh.world(), in_flight: job.in_flight as usize, meetings: BTreeMap::new(), mail: BTreeMap::new(), posted: false }
    }

    /// One rank's end.
    pub fn end(&mut self, rank: u64) -> End<'_> {
        debug_assert!(rank < self.world);
        End { hub: self, rank }
    }

    /// Whether a rank has come to a collective since the last call.
    pub fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.posted)
    }
}

pub struct End<'a> {
    hub: &'a mut Hub,
    rank: u64,
}

impl Communicator for End<'_> {
    fn collective(&mut self, device: &mut dyn Device, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError> {
        let n = members.len();
        let me = members.iter().position(|r| *r == self.rank).expect("invariant: a rank is in its own group");
        if !self.hub.meetings.contains_key(members) {
            self.hub.meetings.insert(members.to_vec(), Meeting { posts: (0..n).map(|_| None).collect(), results: vec![None; n] });
        }
        let meeting = self.hub.meetings.get_mut(members).expect("invariant: just inserted");
        if meeting.results[me].is_none() && meeting.posts[me].is_none() {
            let terms = exchange.terms();
            if let Some((k, other)) = meeting.posts.iter().enumerate().find_map(|(k, p)| Some((k, p.as_ref()?.0)))
                && other != terms
            {
                return Err(CommError::Mismatch { here: self.rank, mine: terms.to_string(), there: members[k], theirs: other.to_string() });
            }
            let mut data = vec![0.0; exchange.elements(n as u64).0 as usize];
            device.read(exchange.src, exchange.dtype, &mut data);
            meeting.posts[me] = Some((terms, data));
            self.hub.posted = true;
            if meeting.posts.iter().all(Option::is_some) {
                let data: Vec<Vec<f64>> = meeting.posts.iter_mut().filter_map(Option::take).map(|p| p.1).collect();
                meeting.results = combine(exchange.kind, exchange.count as usize, &data).into_iter().map(Some).collect();
            }
        }
        match meeting.results[me].take() {
            Some(result) => {
                device.write(exchange.dst, exchange.dtype, &result);
                Ok(Progress::Done)
            }
            None => Ok(Progress::Blocked(members.iter().zip(&meeting.posts).filter(|(_, p)| p.is_none()).map(|(r, _)| *r).collect())),
        }
    }

    fn send(&mut self, device: &mut dyn Device, to: u64, message: &Message) -> Result<Progress, CommError> {
        let queue = self.hub.mail.entry((self.rank, to, message.channel)).or_default();
        if queue.len() >= self.hub.in_flight {
            return Ok(Progress::Blocked(vec![to]));
        }
        let mut data = vec![0.0; message.count as usize];
        device.read(message.at, message.dtype, &mut data);
        queue.push_back((*message, data));
        Ok(Progress::Done)
    }

    fn recv(&mut self, device: &mut dyn Device, from: u64, message: &Message) -> Result<Progress, CommError> {
        let Some((sent, data)) = self.hub.mail.entry((from, self.rank, message.channel)).or_default().pop_front() else {
            return Ok(Progress::Blocked(vec![from]));
        };
        if (sent.dtype, sent.count) != (message.dtype, message.count) {
            let text = |m: &Message| format!("{} {}", m.count, m.dtype.name());
            return Err(CommError::Message { here: self.rank, mine: text(message), there: from, theirs: text(&sent) });
        }
        device.write(message.at, message.dtype, &data);
        Ok(Progress::Done)
    }
}

/// What each member gets, from what each gives, in rank order.
fn combine(kind: Collective, count: usize, data: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let n = data.len();
    let part = |k: usize, j: usize| &data[k][j * count..][..count];
    match kind {
        Collective::AllReduce(reduce) => vec![fold(reduce, data.iter().map(Vec::as_slice)); n],
        Collective::AllGather => vec![data.concat(); n],
        Collective::ReduceScatter(reduce) => (0..n).map(|j| fold(reduce, (0..n).map(|k| part(k, j)))).collect(),
        Collective::AllToAll => (0..n).map(|j| (0..n).flat_map(|k| part(k, j)).copied().collect()).collect(),
    }
}

fn fold<'a>(reduce: Reduce, mut parts: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    let mut sum = parts.next().map(<[f64]>::to_vec).unwrap_or_default();
    for part in parts {
        for (x, y) in sum.iter_mut().zip(part) {
            *x = match reduce {
                Reduce::Sum => *x + y,
                Reduce::Max if x.is_nan() || *x > *y => *x,
                Reduce::Max => *y,
                Reduce::Any => f64::from(*x != 0.0 || *y != 0.0),
            };
        }
    }
    sum
}
