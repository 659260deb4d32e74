//! Communication: groups, and the programs of all stages played against each other.

use crate::violation::{Breach, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Collective, DType};
use ir::program::{Action, Call, CallSchedule, Channel, Group, Job, Program, ProgramBody, ProgramPhase};
use std::collections::{HashMap, VecDeque};

/// The sub-axes and stages of a group, each in order. They tell one group's members from another's.
pub type GroupKey = (Vec<SubAxis>, Vec<u64>);

/// The key of a group of a stage.
pub fn key(stage: u64, group: &Group) -> GroupKey {
    let mut subs = group.subs.clone();
    subs.sort_unstable();
    (subs, group.stages.clone().unwrap_or_else(|| vec![stage]))
}

/// The groups of a stage's program have distinct members that exist, this stage's ranks among them.
pub fn groups(mesh: &Mesh, stage: u64, groups: &[Group], at: &Location) -> Result<(), Violation> {
    for rank in looked_at(mesh, stage) {
        let own = coordinates(mesh, rank);
        let same = mesh.coords(rank) == own && mesh.rank(&own) == rank && mesh.stage(rank) == stage;
        let wrong = || format!("rank {rank} is not at {own:?}, on stage {stage}");
        ensure(same, Invariant::RankPlaces, wrong).map_err(|breach| at.error(breach))?;
    }
    for (g, group) in groups.iter().enumerate() {
        let fail = |breach: Breach| at.of(LocationPart::Group(g)).error(breach);
        for (k, u) in group.subs.iter().enumerate() {
            let axis = mesh.subs.get(u.0 as usize).map(|s| s.axis);
            let within = axis.is_some_and(Axis::within_stage);
            ensure(within, Invariant::GroupAxes, || format!("axis {} does not tell ranks of a stage apart", u.0)).map_err(fail)?;
            ensure(!group.subs[..k].contains(u), Invariant::GroupAxes, || format!("axis {} occurs twice", u.0)).map_err(fail)?;
        }
        if let Some(stages) = &group.stages {
            let known = stages.iter().all(|s| *s < mesh.size(Axis::Pp)) && stages.is_sorted_by(|a, b| a < b);
            ensure(known, Invariant::GroupStages, || format!("stages {stages:?} do not all exist, once and in order")).map_err(fail)?;
            ensure(stages.contains(&stage), Invariant::GroupStages, || format!("stages {stages:?} do not include this one")).map_err(fail)?;
        }
        for rank in looked_at(mesh, stage) {
            let (own, want) = (group.members(mesh, rank), members(mesh, group, rank));
            ensure(own == want, Invariant::RankPlaces, || format!("rank {rank} meets {own:?} and not {want:?}")).map_err(fail)?;
        }
    }
    Ok(())
}

/// For each sub-axis that tells ranks apart, how many ranks further one step along it leads. The last one counts
/// fastest.
fn steps(mesh: &Mesh) -> Vec<u64> {
    let (mut steps, mut ranks) = (vec![0; mesh.subs.len()], 1u64);
    for (step, sub) in steps.iter_mut().zip(&mesh.subs).rev().filter(|(_, sub)| sub.axis != Axis::Microbatch) {
        (*step, ranks) = (ranks, ranks.saturating_mul(sub.size));
    }
    steps
}

/// The coordinate of a rank along each sub-axis.
fn coordinates(mesh: &Mesh, rank: u64) -> Vec<u64> {
    mesh.subs.iter().zip(steps(mesh)).map(|(sub, step)| rank.checked_div(step).map_or(0, |r| r % sub.size)).collect()
}

/// The ranks that are checked: the first and the last rank of a stage, and those one step along each sub-axis from
/// the first.
fn looked_at(mesh: &Mesh, stage: u64) -> Vec<u64> {
    let own: Vec<(u64, u64)> =
        steps(mesh).into_iter().zip(&mesh.subs).filter(|(_, s)| s.axis.within_stage()).map(|(step, s)| (step, s.size - 1)).collect();
    let pipeline = mesh.subs.iter().zip(steps(mesh)).find(|(s, _)| s.axis == Axis::Pp).map_or(0, |(_, step)| step);
    let first = stage.saturating_mul(pipeline);
    let last = own.iter().fold(first, |rank, (step, most)| rank.saturating_add(step.saturating_mul(*most)));
    let mut ranks = vec![first, last];
    ranks.extend(own.iter().filter(|(_, most)| *most > 0).map(|(step, _)| first.saturating_add(*step)));
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The members of the group of a rank, ascending, by arithmetic on ranks: what exchanges do is defined in this order,
/// which [`Group::members`], of which all else asks, is held against.
fn members(mesh: &Mesh, group: &Group, rank: u64) -> Vec<u64> {
    let mut out = vec![rank];
    for (k, step) in steps(mesh).into_iter().enumerate() {
        let sub = &mesh.subs[k];
        let places: Vec<u64> = match &group.stages {
            Some(stages) if sub.axis == Axis::Pp => stages.clone(),
            _ if group.subs.iter().any(|u| u.0 as usize == k) => (0..sub.size).collect(),
            _ => continue,
        };
        let at = |rank: u64, place: u64| rank - rank / step % sub.size * step + place * step;
        out = out.iter().flat_map(|r| places.iter().map(move |p| at(*r, *p))).collect();
    }
    out
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    dtype: DType,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CollectiveSignature {
    kind: Collective,
    dtype: DType,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Send {
        hops: i64,
        channel: Channel,
        message: Message,
    },
    Recv {
        hops: i64,
        channel: Channel,
        message: Message,
    },
    /// A collective with other stages. `group` is the program's number of it.
    Meet {
        group: usize,
        signature: CollectiveSignature,
    },
}

/// The events of a program's bodies that concern other stages, part by part, with the numbers of their commands.
pub struct Events(Vec<Vec<Vec<(usize, Event)>>>);

impl Events {
    fn of(&self, call: &Call) -> &[(usize, Event)] {
        &self.0[call.body.index()][call.part as usize]
    }

    pub fn new(program: &Program) -> Events {
        let event = |action: &Action| match action {
            Action::Send { hops, channel, dtype, count, .. } => {
                Some(Event::Send { hops: *hops, channel: *channel, message: Message { dtype: *dtype, count: *count } })
            }
            Action::Recv { hops, channel, dtype, count, .. } => {
                Some(Event::Recv { hops: *hops, channel: *channel, message: Message { dtype: *dtype, count: *count } })
            }
            Action::Collective { kind, group, dtype, count, .. } => {
                let across = program.groups[group.index()].stages.as_ref().is_some_and(|s| s.len() > 1);
                across.then(|| Event::Meet { group: group.index(), signature: CollectiveSignature { kind: *kind, dtype: *dtype, count: *count } })
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
        let of_part = |b: &ProgramBody, part: u32| b.part(part).filter_map(|k| Some((k, event(&b.commands[k].action)?))).collect();
        let of = |b: &ProgramBody| (0..b.parts()).map(|part| of_part(b, part)).collect();
        Events(program.bodies.iter().map(of).collect())
    }
}

/// The fewest messages in flight per channel with which the calls of all stages come to their ends; if none suffices,
/// 1. More never hurt: what a stage waits for, only it takes away.
pub fn least_in_flight(job: &Job) -> u32 {
    let of_programs: Vec<Events> = job.programs.iter().map(Events::new).collect();
    let events: Vec<&Events> = job.stages.iter().map(|s| &of_programs[s.program as usize]).collect();
    let ends = |in_flight: u32| {
        let mut play = ExchangeSimulation { in_flight: in_flight as usize, ..ExchangeSimulation::new(job, &events) };
        ProgramPhase::ALL.into_iter().all(|phase| play.run(phase).is_ok())
    };
    let (mut low, mut high) = (1, u32::try_from(job.microbatches).unwrap_or(u32::MAX).max(1));
    if ends(low) || !ends(high) {
        return low;
    }
    // `high` suffices, `low` does not.
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if ends(middle) { high = middle } else { low = middle }
    }
    high
}

/// A stage's position in its calls and events.
struct StageCursor<'a> {
    program: &'a Program,
    schedule: &'a CallSchedule,
    events: &'a Events,
    /// For each group of the program, the number of its key.
    keys: Vec<usize>,
    call: usize,
    event: usize,
    /// Whether the stage waits at a collective with other stages and has been counted there.
    waits: bool,
}

impl StageCursor<'_> {
    /// The next event of a phase. Calls without further events are skipped.
    fn next(&mut self, phase: ProgramPhase) -> Option<Event> {
        let calls = self.schedule.calls(phase);
        while let Some(call) = calls.get(self.call) {
            if let Some((_, event)) = self.events.of(call).get(self.event) {
                return Some(*event);
            }
            (self.call, self.event) = (self.call + 1, 0);
        }
        None
    }

    /// Where the next event is.
    fn place(&self, stage: usize, phase: ProgramPhase) -> Location {
        let Some(call) = self.schedule.calls(phase).get(self.call) else {
            return Location::stage(stage as u64).of(LocationPart::EndOf(phase.name()));
        };
        let body = &self.program.bodies[call.body.index()];
        let at = Location::stage(stage as u64).of(LocationPart::Calls(phase.name())).of(LocationPart::Pass(body.name.clone(), call.microbatch));
        match self.events.of(call).get(self.event) {
            Some((k, _)) => at.command(*k, &body.commands[*k]),
            None => at,
        }
    }
}

/// Sender, receiver, channel.
pub type MessageRoute = (usize, usize, Channel);

/// A stage, a body and the number of a command.
pub type Site = (usize, usize, usize);

/// Which commands of different stages exchange with each other.
#[derive(Default)]
pub struct MatchedExchanges {
    /// For each receive, the sends that it may match.
    senders: HashMap<Site, Vec<Site>>,
    /// For each collective, the one that stands for all of its members.
    hubs: HashMap<Site, Site>,
}

impl MatchedExchanges {
    pub fn senders(&self, recv: Site) -> &[Site] {
        self.senders.get(&recv).map_or(&[], Vec::as_slice)
    }

    pub fn hub(&self, member: Site) -> Site {
        self.hubs.get(&member).copied().unwrap_or(member)
    }

    fn message(&mut self, from: Site, to: Site) {
        let senders = self.senders.entry(to).or_default();
        if !senders.contains(&from) {
            senders.push(from);
        }
    }
}

/// A collective that some stages have reached: the first of them, and how many there are.
struct PendingCollective {
    first: usize,
    signature: CollectiveSignature,
    come: usize,
}

/// Simulates the programs of all stages to their ends, with one rank of each.
pub struct ExchangeSimulation<'a> {
    cursors: Vec<StageCursor<'a>>,
    keys: Vec<GroupKey>,
    meetings: HashMap<usize, PendingCollective>,
    /// Messages under way, with the microbatch of the call that sent each.
    mail: HashMap<MessageRoute, VecDeque<(Message, u32, Site)>>,
    /// Messages that a mailbox takes.
    in_flight: usize,
    phase: ProgramPhase,
    matches: MatchedExchanges,
}

impl<'a> ExchangeSimulation<'a> {
    /// `events` are those of each stage's program.
    pub fn new(job: &'a Job, events: &[&'a Events]) -> ExchangeSimulation<'a> {
        let mut keys: Vec<GroupKey> = vec![];
        let mut numbers: HashMap<GroupKey, usize> = HashMap::new();
        let mut number = |stage: u64, group: &Group| {
            let key = key(stage, group);
            *numbers.entry(key.clone()).or_insert_with(|| {
                keys.push(key);
                keys.len() - 1
            })
        };
        let mut cursors = vec![];
        for (s, (stage, events)) in job.stages.iter().zip(events).enumerate() {
            let program = &job.programs[stage.program as usize];
            let keys = program.groups.iter().map(|g| number(s as u64, g)).collect();
            cursors.push(StageCursor { program, schedule: &stage.schedule, events, keys, call: 0, event: 0, waits: false });
        }
        ExchangeSimulation {
            cursors,
            keys,
            meetings: HashMap::new(),
            mail: HashMap::new(),
            in_flight: job.in_flight as usize,
            phase: ProgramPhase::Train,
            matches: MatchedExchanges::default(),
        }
    }

    /// The exchanges that matched in the phases that were simulated.
    pub fn matches(self) -> MatchedExchanges {
        self.matches
    }

    /// Simulates a phase. No message is under way at its begin and its end.
    ///
    /// # Errors
    /// Stages that disagree or wait for each other, messages that do not fit or are not received.
    pub fn run(&mut self, phase: ProgramPhase) -> Result<(), Violation> {
        self.phase = phase;
        for p in &mut self.cursors {
            (p.call, p.event, p.waits) = (0, 0, false);
        }
        let mut ready: Vec<usize> = (0..self.cursors.len()).rev().collect();
        while let Some(s) = ready.pop() {
            while let Some(event) = self.cursors[s].next(phase) {
                if self.cursors[s].waits || !self.act(s, event, &mut ready)? {
                    break;
                }
            }
        }
        if let Some(s) = (0..self.cursors.len()).find(|s| self.cursors[*s].next(phase).is_some()) {
            return Err(self.deadlock(s));
        }
        let left = self.mail.iter().filter(|m| !m.1.is_empty()).map(|m| *m.0).min();
        match left {
            None => Ok(()),
            Some((from, to, channel)) => Err(Location::stage(to as u64)
                .of(LocationPart::Calls(phase.name()))
                .error(Invariant::MessageReceived.breach(format!("it never receives the last message of stage {from} on {channel}")))),
        }
    }

    /// Lets a stage perform its next event if it can, and adds the stages that may go on then to `ready`.
    fn act(&mut self, s: usize, event: Event, ready: &mut Vec<usize>) -> Result<bool, Violation> {
        match event {
            Event::Send { hops, channel, message } => {
                let to = self.peer(s, hops)?;
                let (site, microbatch) = (self.site(s), self.microbatch(s));
                let letters = self.mail.entry((s, to, channel)).or_default();
                if letters.len() >= self.in_flight {
                    return Ok(false);
                }
                letters.push_back((message, microbatch, site));
                ready.push(to);
            }
            Event::Recv { hops, channel, message } => {
                let from = self.peer(s, hops)?;
                let Some((sent, microbatch, site)) = self.mail.entry((from, s, channel)).or_default().pop_front() else { return Ok(false) };
                let what = || format!("stage {from} sends {} {}", sent.count, sent.dtype.name());
                ensure(sent == message, Invariant::MessageType, what).map_err(|e| self.cursors[s].place(s, self.phase).error(e))?;
                let what = || format!("stage {from} sends what it has of microbatch {microbatch}");
                ensure(microbatch == self.microbatch(s), Invariant::MessageMicrobatch, what)
                    .map_err(|e| self.cursors[s].place(s, self.phase).error(e))?;
                self.matches.message(site, self.site(s));
                ready.push(from);
            }
            Event::Meet { group, signature } => {
                let key = self.cursors[s].keys[group];
                let stages = &self.keys[key].1;
                let meeting = self.meetings.entry(key).or_insert(PendingCollective { first: s, signature, come: 0 });
                if meeting.signature != signature {
                    let other = self.cursors[meeting.first].place(meeting.first, self.phase);
                    return Err(self.cursors[s]
                        .place(s, self.phase)
                        .error(Invariant::MembersAgree.breach(format!("another member of the group has come to {other}"))));
                }
                meeting.come += 1;
                if meeting.come < stages.len() {
                    self.cursors[s].waits = true;
                    return Ok(false);
                }
                self.meetings.remove(&key);
                let hub = self.site(stages[0] as usize);
                for t in stages {
                    let member = self.site(*t as usize);
                    self.matches.hubs.insert(member, hub);
                }
                for t in stages.iter().map(|t| *t as usize).filter(|t| *t != s) {
                    self.cursors[t].waits = false;
                    self.cursors[t].event += 1;
                    ready.push(t);
                }
            }
        }
        self.cursors[s].event += 1;
        Ok(true)
    }

    /// The command at which a stage stands. It must stand at one.
    fn site(&self, s: usize) -> Site {
        let p = &self.cursors[s];
        let call = &p.schedule.calls(self.phase)[p.call];
        (s, call.body.index(), p.events.of(call)[p.event].0)
    }

    /// The microbatch for which a stage runs its call.
    fn microbatch(&self, s: usize) -> u32 {
        let p = &self.cursors[s];
        p.schedule.calls(self.phase)[p.call].microbatch
    }

    fn peer(&self, s: usize, hops: i64) -> Result<usize, Violation> {
        let there = (s as u64).checked_add_signed(hops).map(|t| t as usize).filter(|t| *t < self.cursors.len() && hops != 0);
        there.ok_or_else(|| self.cursors[s].place(s, self.phase).error(Invariant::MessagePeer.breach(format!("there is no stage {hops} further on"))))
    }

    /// Describes who waits for whom, starting at a stage that cannot go on.
    fn deadlock(&mut self, from: usize) -> Violation {
        let (mut s, mut told) = (from, vec![]);
        while let Some(event) = self.cursors[s].next(self.phase).filter(|_| !told.contains(&s)) {
            told.push(s);
            s = match event {
                Event::Send { hops, .. } | Event::Recv { hops, .. } => match self.peer(s, hops) {
                    Ok(t) => t,
                    Err(e) => return e,
                },
                Event::Meet { group, .. } => {
                    let key = self.cursors[s].keys[group];
                    let absent = |t: &usize| {
                        let p = &self.cursors[*t];
                        let there = p.phase_event(self.phase);
                        !matches!(there, Some(Event::Meet { group, .. }) if p.keys[group] == key)
                    };
                    self.keys[key].1.iter().map(|t| *t as usize).find(absent).unwrap_or(s)
                }
            };
        }
        let chain: Vec<String> = told[1..].iter().chain([&s]).take(6).map(|t| self.cursors[*t].place(*t, self.phase).to_string()).collect();
        self.cursors[from]
            .place(from, self.phase)
            .error(Invariant::NoDeadlock.breach(format!("it waits forever, for {}", chain.join(", which waits for "))))
    }
}

impl StageCursor<'_> {
    /// The event at which the cursor stands.
    fn phase_event(&self, phase: ProgramPhase) -> Option<Event> {
        let call = self.schedule.calls(phase).get(self.call)?;
        self.events.of(call).get(self.event).map(|e| e.1)
    }
}
