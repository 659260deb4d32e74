//! Turns of sends: a rank's exchanges one by one, without buffers.
//!
//! NCCL buffers no message, and two of its kernels may not run at once on a card, as each holds its place until the
//! other end has come. So a rank does its exchanges one by one: in the order of issue, but for sends, which are
//! copied away where they are issued and go out at a turn that follows from the other end. This is the order of the
//! nominal machine ([`crate::commands::cost_model`]): all stages are played with it, and of the exchanges that could
//! be next the one goes first that can begin first. Messages that pass each other, or follow each other around a
//! ring, go at once.
//!
//! The play takes what it does from the lists alone, so it comes to its end where the play with buffers does
//! ([`Job::in_flight`]), and its order is one in which nobody waits for ever.

use crate::commands::cost_model::CostModel;
use ir::mesh::SubAxis;
use ir::program::{Action, Channel, Command, Job, Program, ProgramBody, ProgramPhase, SendTurn, Stage, Stream};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Gives the sends of all stages their turns.
pub fn order(mut job: Job) -> Job {
    let costs = CostModel::new(&job.mesh, &job.kernels);
    let bodies = JobSteps::new(&job, &costs);
    let turns = ProgramPhase::ALL.map(|phase| PhaseSimulation::new(&job, &bodies, phase).run());
    for (s, stage) in job.stages.iter_mut().enumerate() {
        let s = ir::fault!("send_turns.stage.first", 0, s);
        stage.schedule.sends = std::array::from_fn(|phase| turns[ir::fault!("send_turns.phase.train", 0, phase)][s].clone());
    }
    job
}

/// What the simulation does for a command.
#[derive(Clone, Copy)]
enum StreamStep {
    Busy(u64),
    Record(u32),
    Wait(u32),
    Send { to: usize, channel: Channel, time: u64 },
    Other(BlockingExchange, u64),
}

/// An exchange that is no send.
#[derive(Clone, Copy)]
enum BlockingExchange {
    Receive {
        from: usize,
        channel: Channel,
    },
    /// A collective, by the index of its group.
    Collective(usize),
}

/// Who takes part in a collective: the sub-axes and stages of its group.
type GroupKey = (Vec<SubAxis>, Vec<u64>);

/// The steps of a body, by part.
type Parts = Vec<Vec<(Stream, StreamStep)>>;

/// The steps of all stages of a job.
struct JobSteps {
    /// Steps by stage, body and part.
    stages: Vec<Vec<Parts>>,
    /// The stages of each group.
    groups: Vec<Vec<usize>>,
}

impl JobSteps {
    fn new(job: &Job, costs: &CostModel) -> JobSteps {
        let (mut numbers, mut groups) = (HashMap::new(), vec![]);
        let mut stages = vec![];
        for (s, stage) in job.stages.iter().enumerate() {
            let program = &job.programs[stage.program as usize];
            let mut step = |c: &Command| (c.stream, step(costs, program, s, &c.action, &mut numbers, &mut groups));
            let mut parts = |b: &ProgramBody| (0..b.parts()).map(|part| joined(b.commands[b.part(part)].iter().map(&mut step))).collect();
            stages.push(program.bodies.iter().map(&mut parts).collect());
        }
        JobSteps { stages, groups }
    }
}

fn step(
    costs: &CostModel,
    program: &Program,
    s: usize,
    action: &Action,
    numbers: &mut HashMap<GroupKey, usize>,
    groups: &mut Vec<Vec<usize>>,
) -> StreamStep {
    let time = costs.time(program, action);
    let peer = |hops: i64| (s as u64).wrapping_add_signed(hops) as usize;
    match action {
        Action::Record { event } => StreamStep::Record(*event),
        Action::Wait { event } => StreamStep::Wait(*event),
        Action::Send { hops, channel, .. } => StreamStep::Send { to: peer(*hops), channel: *channel, time },
        Action::Recv { hops, channel, .. } => StreamStep::Other(BlockingExchange::Receive { from: peer(*hops), channel: *channel }, time),
        Action::Collective { group, .. } => {
            let group = &program.groups[group.index()];
            let stages = group.stages.clone().unwrap_or_else(|| vec![s as u64]);
            let mut subs = group.subs.clone();
            subs.sort_unstable();
            let number = *numbers.entry((subs, stages.clone())).or_insert_with(|| {
                groups.push(stages.iter().map(|t| *t as usize).collect());
                groups.len() - 1
            });
            StreamStep::Other(BlockingExchange::Collective(number), time)
        }
        Action::Launch { .. } | Action::Copy { .. } | Action::Fill { .. } | Action::Load { .. } | Action::Report { .. } | Action::Limit { .. } => {
            StreamStep::Busy(time)
        }
    }
}

/// Joins consecutive steps of a stream that only take time.
fn joined(steps: impl Iterator<Item = (Stream, StreamStep)>) -> Vec<(Stream, StreamStep)> {
    let mut out: Vec<(Stream, StreamStep)> = vec![];
    for (stream, step) in steps {
        match (out.last_mut(), step) {
            (Some((last, StreamStep::Busy(before))), StreamStep::Busy(time)) if *last == stream => *before = before.saturating_add(time),
            _ => out.push((stream, step)),
        }
    }
    out
}

/// A message that was issued and has not gone out.
#[derive(Clone, Copy)]
struct PendingMessage {
    send: u32,
    ready: u64,
    time: u64,
}

/// The position and state of a stage within a phase.
struct StageCursor<'a> {
    stage: &'a Stage,
    bodies: &'a [Parts],
    call: usize,
    step: usize,
    /// When each stream, and the exchanges together, have finished what was issued.
    clocks: [u64; Stream::ALL.len()],
    exchanges: u64,
    events: BTreeMap<u32, u64>,
    /// The numbers of sends that were issued, and of other exchanges that have ended.
    sends: u32,
    others: u32,
    /// The exchange that the stage has reached and that is no send.
    head: Option<(BlockingExchange, Stream, u64)>,
    turns: Vec<SendTurn>,
}

/// Sender, receiver, channel.
type MessageRoute = (usize, usize, Channel);

struct PhaseSimulation<'a> {
    in_flight: usize,
    groups: &'a [Vec<usize>],
    phase: ProgramPhase,
    cursors: Vec<StageCursor<'a>>,
    mail: HashMap<MessageRoute, VecDeque<PendingMessage>>,
    /// Per stage, the routes on which it sends.
    routes: Vec<BTreeSet<MessageRoute>>,
}

impl<'a> PhaseSimulation<'a> {
    fn new(job: &'a Job, bodies: &'a JobSteps, phase: ProgramPhase) -> PhaseSimulation<'a> {
        let cursor = |(stage, bodies): (&'a Stage, &'a Vec<_>)| StageCursor {
            stage,
            bodies,
            call: 0,
            step: 0,
            clocks: [0; Stream::ALL.len()],
            exchanges: 0,
            events: BTreeMap::new(),
            sends: 0,
            others: 0,
            head: None,
            turns: vec![],
        };
        let cursors: Vec<StageCursor> = job.stages.iter().zip(&bodies.stages).map(cursor).collect();
        let routes = vec![BTreeSet::new(); cursors.len()];
        PhaseSimulation { in_flight: job.in_flight as usize, groups: &bodies.groups, phase, cursors, mail: HashMap::new(), routes }
    }

    /// The turns of each stage. If the simulation does not come to its end, the verifier reports why.
    fn run(mut self) -> Vec<Vec<SendTurn>> {
        (0..self.cursors.len()).for_each(|s| self.advance(s));
        while let Some((_, s)) = (0..self.cursors.len()).filter_map(|s| Some((self.begins(s)?, s))).min() {
            match self.cursors[s].head.expect("invariant: it can begin").0 {
                BlockingExchange::Receive { .. } => self.messages(s),
                BlockingExchange::Collective(group) => self.collective(group),
            }
        }
        self.cursors.into_iter().map(|p| ir::fault!("send_turns.turns.backward", p.turns.into_iter().rev().collect(), p.turns)).collect()
    }

    /// Goes through a stage's list up to its next exchange that is no send, or to a send for which there is no room.
    fn advance(&mut self, s: usize) {
        let p = &mut self.cursors[s];
        let calls = p.stage.schedule.calls(self.phase);
        while p.head.is_none() {
            let Some(call) = calls.get(p.call) else { return };
            let Some((stream, step)) = p.bodies[call.body.index()][call.part as usize].get(p.step).copied() else {
                (p.call, p.step) = (p.call + 1, 0);
                continue;
            };
            let clock = &mut p.clocks[stream as usize];
            match step {
                StreamStep::Busy(time) => *clock = clock.saturating_add(time),
                StreamStep::Record(event) => drop(p.events.insert(event, *clock)),
                StreamStep::Wait(event) => {
                    let reached = p.events.get(&event).copied().unwrap_or(0);
                    *clock = ir::fault!("send_turns.wait.none", *clock, (*clock).max(reached));
                }
                StreamStep::Send { to, channel, time } => {
                    let route = (s, to, channel);
                    let letters = self.mail.entry(route).or_default();
                    if letters.len() >= ir::fault!("send_turns.room.endless", usize::MAX, self.in_flight) {
                        return;
                    }
                    let send = ir::fault!("send_turns.send.other", p.others, p.sends);
                    letters.push_back(PendingMessage { send, ready: *clock, time });
                    self.routes[s].insert(route);
                    p.sends += 1;
                }
                StreamStep::Other(exchange, time) => p.head = Some((exchange, stream, time)),
            }
            p.step += 1;
        }
    }

    /// When a stage has finished all that comes before its next exchange.
    fn free(&self, s: usize) -> u64 {
        let p = &self.cursors[s];
        p.head.map_or(p.exchanges, |(_, stream, _)| p.exchanges.max(p.clocks[stream as usize]))
    }

    /// When a stage's next exchange can begin; `None` if the other side has not come yet.
    fn begins(&self, s: usize) -> Option<u64> {
        match self.cursors[s].head?.0 {
            BlockingExchange::Receive { from, channel } => {
                let letter = self.mail.get(&(from, s, channel))?.front()?;
                Some(letter.ready.max(self.cursors[from].exchanges).max(self.free(s)))
            }
            BlockingExchange::Collective(group) => {
                let there = |t: &usize| matches!(self.cursors[*t].head, Some((BlockingExchange::Collective(g), ..)) if g == group);
                let stages = &self.groups[group];
                stages.iter().all(there).then(|| stages.iter().map(|t| self.free(*t)).max().unwrap_or(0))
            }
        }
    }

    /// Ends a stage's current exchange.
    fn end(&mut self, s: usize, at: u64) {
        let p = &mut self.cursors[s];
        let (_, stream, _) = p.head.take().expect("invariant: it has begun");
        (p.clocks[stream as usize], p.exchanges) = (at, at);
        p.others += ir::fault!("send_turns.others.none", 0, 1);
    }

    fn collective(&mut self, group: usize) {
        let stages = &self.groups[group];
        let time = stages.iter().filter_map(|t| self.cursors[*t].head).map(|head| head.2).max().unwrap_or(0);
        let end = stages.iter().map(|t| self.free(*t)).max().unwrap_or(0).saturating_add(time);
        stages.iter().for_each(|t| self.end(*t, end));
        stages.iter().for_each(|t| self.advance(*t));
    }

    /// Receives a stage's message. Stages that take part exchange at once the other messages that could begin before
    /// its end.
    fn messages(&mut self, first: usize) {
        let letter = |play: &PhaseSimulation, s: usize| match play.cursors[s].head?.0 {
            BlockingExchange::Receive { from, channel } => Some(((from, s, channel), *play.mail.get(&(from, s, channel))?.front()?)),
            BlockingExchange::Collective(_) => None,
        };
        let (_, own) = letter(self, first).expect("invariant: it can begin");
        let until = self.begins(first).expect("invariant: it can begin").saturating_add(own.time);
        // `all` are the stages that receive.
        let (mut all, mut open) = (BTreeSet::from([first]), vec![first]);
        while let Some(s) = open.pop() {
            let ((from, ..), _) = letter(self, s).expect("invariant: only those with a letter are taken in");
            // These are the stage that sends to it, and the stages to which it sends.
            let beside = [from].into_iter().chain(self.routes[s].iter().map(|r| r.1)).collect::<Vec<_>>();
            for t in beside {
                let takes = |((sender, ..), _): &(MessageRoute, PendingMessage)| t == from || *sender == s;
                if letter(self, t).filter(takes).is_some()
                    && self.begins(t).is_some_and(|at| at < ir::fault!("send_turns.until.ever", u64::MAX, until))
                    && all.insert(t)
                {
                    open.push(t);
                }
            }
        }
        let begin = all.iter().filter_map(|s| self.begins(*s)).max().unwrap_or(0);
        let mut concerned = all.clone();
        let mut end = begin;
        for s in &all {
            let (route, own) = letter(self, *s).expect("invariant: as above");
            let letters = self.mail.entry(route).or_default();
            ir::fault!("send_turns.letter.last", letters.pop_back(), letters.pop_front());
            let sender = &mut self.cursors[route.0];
            let after = ir::fault!("send_turns.after.next", sender.others + 1, sender.others);
            let grouped = ir::fault!("send_turns.grouped.never", false, all.contains(&route.0));
            let grouped = ir::fault!("send_turns.grouped.always", true, grouped);
            sender.turns.push(SendTurn { send: own.send, after, grouped });
            end = end.max(begin.saturating_add(own.time));
            concerned.insert(route.0);
        }
        for s in &concerned {
            self.cursors[*s].exchanges = end;
        }
        all.iter().for_each(|s| self.end(*s, end));
        concerned.iter().for_each(|s| self.advance(*s));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_stream_that_only_take_time_are_one() {
        let steps = [(Stream::Compute, StreamStep::Busy(2)), (Stream::Compute, StreamStep::Busy(3)), (Stream::Host, StreamStep::Busy(4))];
        let times: Vec<u64> = joined(steps.into_iter()).iter().map(|(_, s)| if let StreamStep::Busy(t) = s { *t } else { 0 }).collect();
        assert_eq!(times, [5, 4]);
    }
}
