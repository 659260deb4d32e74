//! Exchanges one by one: what a rank does where kernels of communicators may not run at once, and no message is
//! buffered.
//!
//! A rank goes through its exchanges as its list issues them, but each send has its turn ([`SendTurn`]): it is copied
//! away where it is issued, and goes out later. What has its turn is a *group*, most often one exchange alone; it
//! begins when the one before has ended, and ends when all of it has: a message when both its ends have begun, a
//! collective when all its members have. What comes next in the list is not issued meanwhile.

use super::exchange::{GroupKey, MessageRoute, key};
use crate::violation::{Breach, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::program::{Action, Channel, Job, ProgramBody, ProgramPhase, SendTurn};
use std::collections::HashMap;

/// An exchange of a stage, as other stages see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    Send {
        to: usize,
        channel: Channel,
    },
    Recv {
        from: usize,
        channel: Channel,
    },
    /// A collective within the stage, whose ranks come to it together.
    Within,
    /// A collective with other stages, by the number of its group, which all of these stages share.
    Meet(usize),
}

/// A stage's position in a phase.
struct SerialCursor<'a> {
    /// The turns of sends that have not gone out.
    turns: &'a [SendTurn],
    exchanges: Vec<Exchange>,
    /// The exchange of the list that comes next.
    next: usize,
    /// Exchanges that were issued and are no sends.
    others: u32,
    /// Routes of the sends that were issued.
    issued: Vec<MessageRoute>,
    /// Messages of the group under way that have not been taken.
    offered: usize,
    /// Whether it has begun its next exchange, which is no send, and waits for its end.
    waits: bool,
}

/// What a stage does next.
enum SerialStep {
    /// A send goes out by itself.
    Out(u32),
    /// The next exchange of the list begins, together with these sends.
    Begin(Vec<u32>),
    End,
}

/// Simulates the phases of a job whose sends have turns, with one rank of each stage. With buffers they come to their
/// end ([`super::exchange::ExchangeSimulation`]).
///
/// # Errors
/// Sends without a turn of their own, ones that go out before they are issued, or out of order; stages that wait for
/// each other.
pub fn check(job: &Job) -> Result<(), Violation> {
    if !job.is_serial() {
        return Ok(());
    }
    let mut groups = Groups::default();
    let bodies: Vec<Vec<Vec<Vec<Exchange>>>> = (0..job.stages.len()).map(|s| bodies(job, s, &mut groups)).collect();
    ProgramPhase::ALL.into_iter().try_for_each(|phase| SerialSimulation::new(job, &bodies, &groups.stages, phase)?.run())
}

/// Groups that span stages, numbered.
#[derive(Default)]
struct Groups {
    numbers: HashMap<GroupKey, usize>,
    stages: Vec<Vec<usize>>,
}

/// The exchanges of each body of a stage's program, part by part.
fn bodies(job: &Job, s: usize, groups: &mut Groups) -> Vec<Vec<Vec<Exchange>>> {
    let program = &job.programs[job.stages[s].program as usize];
    // The simulation with buffers has already refused a peer that does not exist.
    let peer = |hops: i64| (s as u64).wrapping_add_signed(hops) as usize;
    let mut exchange = |action: &Action| match action {
        Action::Send { hops, channel, .. } => Some(Exchange::Send { to: peer(*hops), channel: *channel }),
        Action::Recv { hops, channel, .. } => Some(Exchange::Recv { from: peer(*hops), channel: *channel }),
        Action::Collective { group, .. } => {
            let key = key(s as u64, &program.groups[group.index()]);
            if key.1.len() < 2 {
                return Some(Exchange::Within);
            }
            let stages = key.1.iter().map(|t| *t as usize).collect();
            Some(Exchange::Meet(*groups.numbers.entry(key).or_insert_with(|| {
                groups.stages.push(stages);
                groups.stages.len() - 1
            })))
        }
        Action::Launch { .. }
        | Action::Copy { .. }
        | Action::Fill { .. }
        | Action::Load { .. }
        | Action::Report { .. }
        | Action::Limit { .. }
        | Action::Record { .. }
        | Action::Wait { .. } => None,
    };
    let mut of_part = |b: &ProgramBody, part: u32| b.commands[b.part(part)].iter().filter_map(|c| exchange(&c.action)).collect();
    program.bodies.iter().map(|b| (0..b.parts()).map(|part| of_part(b, part)).collect()).collect()
}

struct SerialSimulation<'a> {
    in_flight: usize,
    phase: ProgramPhase,
    cursors: Vec<SerialCursor<'a>>,
    /// Stages of each group that spans some.
    groups: &'a [Vec<usize>],
    /// Messages that have begun at the sender.
    offers: HashMap<MessageRoute, usize>,
    /// Messages that were issued and not taken, for which there must be room.
    held: HashMap<MessageRoute, usize>,
    /// The number of stages that have reached the next collective of a group.
    meetings: HashMap<usize, usize>,
}

impl<'a> SerialSimulation<'a> {
    fn new(
        job: &'a Job,
        bodies: &[Vec<Vec<Vec<Exchange>>>],
        groups: &'a [Vec<usize>],
        phase: ProgramPhase,
    ) -> Result<SerialSimulation<'a>, Violation> {
        let mut cursors = vec![];
        for (s, stage) in job.stages.iter().enumerate() {
            let calls = stage.schedule.calls(phase).iter();
            let exchanges: Vec<Exchange> = calls.flat_map(|c| &bodies[s][c.body.index()][c.part as usize]).copied().collect();
            let turns = stage.schedule.sends(phase);
            numbered(turns, &exchanges).map_err(|e| Location::stage(s as u64).of(LocationPart::Calls(phase.name())).error(e))?;
            cursors.push(SerialCursor { turns, exchanges, next: 0, others: 0, issued: vec![], offered: 0, waits: false });
        }
        let in_flight = job.in_flight as usize;
        Ok(SerialSimulation { in_flight, phase, cursors, groups, offers: HashMap::new(), held: HashMap::new(), meetings: HashMap::new() })
    }

    fn fail(&self, s: usize, breach: Breach) -> Violation {
        Location::stage(s as u64).of(LocationPart::Calls(self.phase.name())).error(breach)
    }

    /// Simulates the phase to its end.
    fn run(mut self) -> Result<(), Violation> {
        let mut ready: Vec<usize> = (0..self.cursors.len()).rev().collect();
        while let Some(s) = ready.pop() {
            while self.go_on(s, &mut ready)? {}
        }
        let stuck = |p: &SerialCursor| p.waits || p.offered > 0 || p.next < p.exchanges.len();
        match self.cursors.iter().position(stuck) {
            None => Ok(()),
            Some(s) => {
                let p = &self.cursors[s];
                let what = match p.exchanges.get(p.next) {
                    Some(Exchange::Send { to, channel }) => format!("a message to stage {to} on {channel}"),
                    Some(Exchange::Recv { from, channel }) => format!("a message of stage {from} on {channel}"),
                    Some(Exchange::Within) => "a collective within the stage".into(),
                    Some(Exchange::Meet(group)) => format!("a collective of stages {:?}", self.groups[*group]),
                    None => "its end".into(),
                };
                let left = if p.offered > 0 { format!(", and {} that it sent not taken", p.offered) } else { String::new() };
                let what = format!("one by one it waits forever at its exchange {}, {what}{left}", p.next);
                Err(self.fail(s, Invariant::NoSerialDeadlock.breach(what)))
            }
        }
    }

    /// Lets a stage take a step if it can, and adds the stages that may go on then to `ready`.
    fn go_on(&mut self, s: usize, ready: &mut Vec<usize>) -> Result<bool, Violation> {
        if self.cursors[s].waits {
            return self.takes(s, ready);
        }
        if self.cursors[s].offered > 0 {
            return Ok(false);
        }
        match self.step(s)? {
            Some(SerialStep::Out(send)) => self.offer(s, &[send], ready),
            Some(SerialStep::Begin(sends)) => {
                self.cursors[s].waits = true;
                self.offer(s, &sends, ready);
                if let Exchange::Meet(group) = self.cursors[s].exchanges[self.cursors[s].next] {
                    *self.meetings.entry(group).or_default() += 1;
                    ready.extend(&self.groups[group]);
                }
            }
            Some(SerialStep::End) | None => return Ok(false),
        }
        Ok(true)
    }

    /// The stage's next step, after it has issued the sends that it can. `None` if a send has to wait for room.
    fn step(&mut self, s: usize) -> Result<Option<SerialStep>, Violation> {
        loop {
            let p = &mut self.cursors[s];
            let turn = p.turns.first().filter(|t| t.after == p.others).copied();
            if let Some(turn) = turn.filter(|t| !t.grouped && (t.send as usize) < p.issued.len()) {
                p.turns = &p.turns[1..];
                return Ok(Some(SerialStep::Out(turn.send)));
            }
            let begun = match p.exchanges.get(p.next).copied() {
                Some(Exchange::Send { to, channel }) => {
                    let held = self.held.entry((s, to, channel)).or_default();
                    if *held >= self.in_flight {
                        return Ok(None);
                    }
                    *held += 1;
                    p.issued.push((s, to, channel));
                    p.next += 1;
                    continue;
                }
                Some(other) => {
                    let count = p.turns.iter().take_while(|t| t.after == p.others).count();
                    let (grouped, rest) = p.turns.split_at(count);
                    p.turns = rest;
                    let late = grouped.iter().find(|t| !t.grouped || t.send as usize >= p.issued.len());
                    let alone = grouped.is_empty() || matches!(other, Exchange::Recv { .. });
                    let is_receive = ensure(alone, Invariant::SendGroup, || format!("send {} is at once with no receive", grouped[0].send));
                    late.map_or(is_receive, |t| Err(early(t))).map(|()| SerialStep::Begin(grouped.iter().map(|t| t.send).collect()))
                }
                None => p.turns.first().map_or(Ok(SerialStep::End), |t| Err(early(t))),
            };
            return begun.map(Some).map_err(|e| self.fail(s, e));
        }
    }

    /// Begins messages of a stage.
    fn offer(&mut self, s: usize, sends: &[u32], ready: &mut Vec<usize>) {
        for send in sends {
            let route = self.cursors[s].issued[*send as usize];
            *self.offers.entry(route).or_default() += 1;
            ready.push(route.1);
        }
        self.cursors[s].offered += sends.len();
    }

    /// Ends the exchange that a stage waits for, if the other members are there.
    fn takes(&mut self, s: usize, ready: &mut Vec<usize>) -> Result<bool, Violation> {
        match self.cursors[s].exchanges[self.cursors[s].next] {
            Exchange::Recv { from, channel } => {
                let route = (from, s, channel);
                let Some(offers) = self.offers.get_mut(&route).filter(|n| **n > 0) else { return Ok(false) };
                *offers -= 1;
                *self.held.entry(route).or_default() -= 1;
                self.cursors[from].offered -= 1;
                ready.push(from);
                self.pass(s);
            }
            Exchange::Meet(group) => {
                if self.meetings.get(&group).copied().unwrap_or(0) < self.groups[group].len() {
                    return Ok(false);
                }
                self.meetings.remove(&group);
                for t in self.groups[group].iter().copied() {
                    self.pass(t);
                    ready.push(t);
                }
            }
            Exchange::Within => self.pass(s),
            Exchange::Send { .. } => unreachable!("invariant: sends are issued, not waited for"),
        }
        Ok(true)
    }

    /// Moves a stage past an exchange of its list.
    fn pass(&mut self, s: usize) {
        let p = &mut self.cursors[s];
        (p.waits, p.next, p.others) = (false, p.next + 1, p.others + 1);
    }
}

fn early(turn: &SendTurn) -> Breach {
    Invariant::SendIssued.breach(format!("send {} goes out after {} other exchanges, when it has not been issued", turn.send, turn.after))
}

/// Checks that each send has one turn, and that the sends of a route go out in the order of issue.
fn numbered(turns: &[SendTurn], exchanges: &[Exchange]) -> Result<(), Breach> {
    let routes: Vec<Exchange> = exchanges.iter().copied().filter(|e| matches!(e, Exchange::Send { .. })).collect();
    let mut seen = vec![false; routes.len()];
    let mut last: Vec<(Exchange, u32)> = vec![];
    for turn in turns {
        let place = seen.get_mut(turn.send as usize);
        let fresh = place.is_some_and(|seen| !std::mem::replace(seen, true));
        ensure(fresh, Invariant::SendTurns, || format!("send {} of {} has a turn", turn.send, routes.len()))?;
        let route = routes[turn.send as usize];
        match last.iter_mut().find(|(r, _)| *r == route) {
            Some((_, before)) => {
                ensure(*before < turn.send, Invariant::SendTurns, || format!("send {} goes out after send {before} on its way", turn.send))?;
                *before = turn.send;
            }
            None => last.push((route, turn.send)),
        }
    }
    let missing = seen.iter().position(|seen| !seen);
    ensure(missing.is_none(), Invariant::SendTurns, || format!("send {} of {} has no turn", missing.unwrap_or(0), routes.len()))
}
