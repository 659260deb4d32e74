//! Ranks that take turns in one thread, and their communication. Deterministic, so a deadlock is found, not timed.

use crate::comm::{CommError, Communicator, Exchange, Message, Progress, Terms, ranks};
use crate::device::{Device, Memory};
use crate::executor::{Advance, ExecError, Rank, Step, describe};
use crate::streams::PhaseEnd;
use ir::op::Reduce;
use ir::program::ProgramPhase;
use ir::program::{Channel, Collective, Job};
use ir::random::mix;
use std::collections::{BTreeMap, VecDeque};

/// Why ranks that take turns did not get through.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum TurnError {
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("deadlock: {}", .0.join("; "))]
    Deadlock(Vec<String>),
}

/// Who goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnOrder {
    /// Each rank in its turn runs until it waits.
    Long,
    /// Ranks and streams go one command at a time in an order drawn from these numbers.
    Random(u64),
}

impl TurnOrder {
    /// The ranks' or streams' numbers in the order in which they may go.
    fn order(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        if let TurnOrder::Random(state) = self {
            for k in (1..n).rev() {
                *state = mix(*state);
                order.swap(k, (*state % (k as u64 + 1)) as usize);
            }
        }
        order
    }
}

/// Lets all ranks of a job take turns until each has finished a phase; in random turns, until each is through its
/// compute: then communication may be left for the next phase ([`settle`]).
///
/// # Errors
/// What stopped a rank; if none can go on, who waits for whom and where.
pub fn run_phase<D: Device>(
    job: &Job,
    all: &mut [Rank<D>],
    hub: &mut Hub,
    phase: ProgramPhase,
    step: &Step,
    turns: &mut TurnOrder,
) -> Result<(), TurnError> {
    all.iter_mut().for_each(|r| r.begin(phase));
    let until = if *turns == TurnOrder::Long { PhaseEnd::Settled } else { PhaseEnd::Computed };
    take_turns(job, all, hub, until, step, turns)
}

/// Lets all ranks take turns until nothing is left to do.
///
/// # Errors
/// As for [`run_phase`].
pub fn settle<D: Device>(job: &Job, all: &mut [Rank<D>], hub: &mut Hub, step: &Step, turns: &mut TurnOrder) -> Result<(), TurnError> {
    take_turns(job, all, hub, PhaseEnd::Settled, step, turns)
}

fn take_turns<D: Device>(
    job: &Job,
    all: &mut [Rank<D>],
    hub: &mut Hub,
    until: PhaseEnd,
    step: &Step,
    turns: &mut TurnOrder,
) -> Result<(), TurnError> {
    loop {
        if until == PhaseEnd::Computed && all.iter_mut().all(Rank::is_computed) {
            return Ok(());
        }
        let (mut moved, mut stuck) = (false, vec![]);
        for r in turns.order(all.len()) {
            let rank = &mut all[r];
            let mut end = hub.end(r as u64);
            for stream in turns.order(rank.streams()) {
                let mut last = rank.turn(stream, step, &mut end)?;
                let one = last == Advance::Moved && *turns != TurnOrder::Long;
                moved |= last == Advance::Moved;
                while last == Advance::Moved && !one {
                    last = rank.turn(stream, step, &mut end)?;
                }
                match last {
                    Advance::Blocked(on) => stuck.push((r, stream, on)),
                    Advance::Finished => {}
                    Advance::Moved => break,
                }
            }
        }
        if !moved && stuck.is_empty() {
            return Ok(());
        }
        // A turn without a completed command may still have posted the last part of a collective for an earlier rank.
        if !moved && !hub.take_posted() {
            stuck.sort_unstable();
            let waits = stuck.into_iter().filter(|(_, _, on)| !on.is_empty());
            let text =
                waits.map(|(r, stream, on)| format!("rank {r} waits for {} at {}", ranks(&on), describe(job, r as u64, all[r].position(stream))));
            return Err(TurnError::Deadlock(text.collect()));
        }
    }
}

/// Where all ranks meet.
pub struct Hub {
    world: u64,
    /// Collectives that are under way, by members.
    meetings: BTreeMap<Vec<u64>, PendingCollective>,
    /// By sender, receiver and channel.
    mail: BTreeMap<(u64, u64, Channel), Mailbox>,
    /// Messages that a mailbox takes.
    in_flight: usize,
    posted: bool,
}

type Mailbox = VecDeque<(Message, Vec<f64>)>;

#[derive(Default)]
struct PendingCollective {
    /// Per member: what it gives, until all have come.
    posts: Vec<Option<(Terms, Vec<f64>)>>,
    /// Per member: what it gets, until it takes it.
    results: Vec<Option<Vec<f64>>>,
}

impl Hub {
    /// The hub of all ranks of a job, with nothing under way.
    pub fn new(job: &Job) -> Hub {
        Hub { world: job.mesh.world(), in_flight: job.in_flight as usize, meetings: BTreeMap::new(), mail: BTreeMap::new(), posted: false }
    }

    /// The end of one rank.
    pub fn end(&mut self, rank: u64) -> End<'_> {
        debug_assert!(rank < self.world);
        End { hub: self, rank }
    }

    /// Whether a rank has come to a collective since the last call.
    pub fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.posted)
    }
}

/// One rank's end of a [`Hub`].
pub struct End<'a> {
    hub: &'a mut Hub,
    rank: u64,
}

impl Communicator for End<'_> {
    fn collective(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError> {
        let n = members.len();
        let me = members.iter().position(|r| *r == self.rank).expect("invariant: a rank is in its own group");
        if !self.hub.meetings.contains_key(members) {
            self.hub.meetings.insert(members.to_vec(), PendingCollective { posts: (0..n).map(|_| None).collect(), results: vec![None; n] });
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
            memory.read(exchange.src, exchange.dtype, &mut data);
            meeting.posts[me] = Some((terms, data));
            self.hub.posted = true;
            if meeting.posts.iter().all(Option::is_some) {
                let data: Vec<Vec<f64>> = meeting.posts.iter_mut().filter_map(Option::take).map(|p| p.1).collect();
                meeting.results = combine(exchange.kind, exchange.count as usize, &data).into_iter().map(Some).collect();
            }
        }
        match meeting.results[me].take() {
            Some(result) => {
                memory.write(exchange.dst, exchange.dtype, &result);
                Ok(Progress::Done)
            }
            None => Ok(Progress::Blocked(members.iter().zip(&meeting.posts).filter(|(_, p)| p.is_none()).map(|(r, _)| *r).collect())),
        }
    }

    fn send(&mut self, memory: &mut dyn Memory, to: u64, message: &Message) -> Result<Progress, CommError> {
        let queue = self.hub.mail.entry((self.rank, to, message.channel)).or_default();
        if queue.len() >= self.hub.in_flight {
            return Ok(Progress::Blocked(vec![to]));
        }
        let mut data = vec![0.0; message.count as usize];
        memory.read(message.at, message.dtype, &mut data);
        queue.push_back((*message, data));
        Ok(Progress::Done)
    }

    fn recv(&mut self, memory: &mut dyn Memory, from: u64, message: &Message) -> Result<Progress, CommError> {
        let Some((sent, data)) = self.hub.mail.entry((from, self.rank, message.channel)).or_default().pop_front() else {
            return Ok(Progress::Blocked(vec![from]));
        };
        if (sent.dtype, sent.count) != (message.dtype, message.count) {
            let text = |m: &Message| format!("{} {}", m.count, m.dtype.name());
            return Err(CommError::Message { here: self.rank, mine: text(message), there: from, theirs: text(&sent) });
        }
        memory.write(message.at, message.dtype, &data);
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
        Collective::ReduceScatter(reduce) => {
            (0..n).map(|j| fold(reduce, (0..n).map(|k| part(k, ir::fault!("loopback.scatter.part", n - 1 - j, j))))).collect()
        }
        Collective::Shift => (0..n).map(|j| data[ir::fault!("loopback.shift.direction", j + 1, j + n - 1) % n].clone()).collect(),
        Collective::AllToAll => {
            (0..n).map(|j| (0..n).flat_map(|k| ir::fault!("loopback.all_to_all.part", part(j, k), part(k, j))).copied().collect()).collect()
        }
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
