//! Streams and events: which commands of a rank come after which, and that no two touch the same bytes in an order
//! that is left open.
//!
//! A rank's commands are issued in one order. Each comes after the commands of its own stream issued before it; a
//! wait, and so all after it on its stream, comes after the last record of its event issued before it. What follows
//! from these two is *before*; everything else may happen in either order, or at once.
//!
//! **Invariants** (each rank, over any number of training passes, updates and evaluations):
//! - Of two commands that touch the same byte of an arena, one of them writing, the one issued first is before the
//!   other.
//! - Only communication, copies and what the host runs are on other streams than compute. An event is recorded on one
//!   stream; collectives over the same ranks are issued on one, as are a channel's messages to one stage, and those
//!   from it. So what meets is what meets in order of issue.
//!
//! Shown by vector clocks (Fidge 1988, Mattern 1989). A *moment* of a stream is the number of commands issued on it
//! so far; `clocks[s][t]` is the last moment of stream `t` that is before the next command of `s`. A byte's last
//! write, and each stream's last read since, suffice: what came earlier is before them. Bytes that one stream alone
//! touches are left out. Bytes of temporary buffers are those of stashes of other phases, so their order is shown
//! with that of what stashes hold.
//!
//! What a call does depends on the moments it finds through comparisons of a byte's moments with clocks alone, so
//! states in which all of these have the same outcomes have the same future ([`StreamState::normalise`]). A run of
//! calls is looked at once per such state; so a schedule of thousands of microbatches costs what its first rounds do,
//! and following phases by phases ends.

#[cfg(test)]
use super::access::KernelFacts;
use super::access::{Access, Effect};
use super::cells::{ArenaCells, Bytes, CellAccess, Streams};
use crate::violation::{Breach, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::ProgramPhase;
use ir::program::{Action, Call, CallSchedule, Channel, Command, GroupId, Program, Slots, Space, Stream};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

const STREAMS: usize = Stream::ALL.len();

/// For each stream, a moment; 0 is before its first command.
type Clock = [u32; STREAMS];

/// The bytes that a body's commands touch, in order.
#[derive(Default)]
pub struct AccessTrace(Vec<Vec<Bytes>>);

impl AccessTrace {
    /// Appends a command with its accesses, as they were checked.
    pub fn push(&mut self, program: &Program, accesses: &[Access]) {
        let bytes = |a: &Access| {
            let buffer = &program.buffers[a.buffer.index()];
            let (from, to) = a.hull();
            let at = |element: u64| buffer.offset + element * buffer.dtype.bytes();
            Bytes { arena: buffer.arena, from: at(from), to: at(to), writes: a.effect != Effect::Read }
        };
        self.0.push(accesses.iter().map(bytes).filter(|b| b.from < b.to).collect());
    }
}

/// Bytes that are always touched together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ByteCell {
    /// The last write: its stream and moment.
    written: (usize, u32),
    /// Each stream's last read since.
    read: Clock,
}

/// A body, a part of it, and the call's slots, which only the first part lists.
type Called = (usize, u32, Vec<usize>);

enum StreamAction {
    Touch(Vec<CellAccess>),
    Record(usize),
    Wait(usize),
}

/// What is known at one point of the issue: the order that streams and events give, and what is in flight.
#[derive(Clone, PartialEq, Eq, Hash)]
struct StreamState {
    clocks: [Clock; STREAMS],
    /// The clock of each event's last record.
    events: Vec<Clock>,
    cells: Vec<ByteCell>,
}

impl StreamState {
    /// Replaces moments by smaller ones of which all comparisons that are still to come have the same outcome. A
    /// cell's moment is compared with clocks only, as are clocks with clocks; so each becomes the number of different
    /// clock values below it. One that is before whatever other streams may still do there becomes 0, as does an
    /// event's if all who wait for that know it. `users` are the streams of each cell, `waiters` those that wait for
    /// each event. Of streams that are not among `used`, there are no moments.
    fn normalise(&mut self, users: &[Streams], waiters: &[Streams], used: Streams) {
        for t in (0..STREAMS).filter(|t| used >> t & 1 == 1) {
            for (event, waiters) in self.events.iter_mut().zip(waiters) {
                let news = (0..STREAMS).any(|s| waiters >> s & 1 == 1 && self.clocks[s][t] < event[t]);
                event[t] = if news { event[t] } else { 0 };
            }
            // For each set of other streams, the last moment of `t` that all of them know.
            let mut known = vec![u32::MAX; 1 << STREAMS];
            for users in 1..known.len() {
                let s = users.trailing_zeros() as usize;
                let own = if s == t { u32::MAX } else { self.clocks[s][t] };
                known[users] = own.min(known[users & (users - 1)]);
            }
            let mut values: Vec<u32> = self.clocks.iter().chain(&self.events).map(|c| c[t]).collect();
            values.push(0);
            values.sort_unstable();
            values.dedup();
            let small = |moment: u32| values.partition_point(|v| *v < moment) as u32;
            for (cell, users) in self.cells.iter_mut().zip(users) {
                let known = Some(known[usize::from(*users)]).filter(|k| *k < u32::MAX).unwrap_or(0);
                let renew = |moment: &mut u32| *moment = if *moment <= known { 0 } else { small(*moment) };
                if cell.written.0 == t {
                    renew(&mut cell.written.1);
                    if cell.written.1 == 0 {
                        cell.written.0 = 0;
                    }
                }
                renew(&mut cell.read[t]);
            }
            self.clocks.iter_mut().chain(&mut self.events).for_each(|c| c[t] = small(c[t]));
        }
    }
}

/// Checks one program with its numbers of stash slots.
struct RaceChecker<'a> {
    program: &'a Program,
    /// For each body, its commands.
    bodies: Vec<Vec<(usize, StreamAction)>>,
    homes: ArenaCells,
    /// For each body, the arenas and stashes that it touches and that have more than one slot.
    touched: Vec<BTreeSet<usize>>,
    /// Per cell, the streams that touch it.
    users: Vec<Streams>,
    /// Per event, the streams that wait for it.
    waiters: Vec<Streams>,
    /// The streams that have commands.
    used: Streams,
    states: Vec<Rc<StreamState>>,
    numbers: HashMap<Rc<StreamState>, usize>,
    /// For each state and run of calls, the state after the run.
    after: HashMap<(usize, Vec<Called>), usize>,
}

/// Checks the invariants of the module's documentation for the program of a stage, given what its bodies touch.
///
/// # Errors
/// The first command that does not keep to them.
pub fn check(
    mesh: &Mesh,
    kernels: &[Kernel],
    program: &Program,
    schedule: &CallSchedule,
    traces: &[AccessTrace],
    at: &Location,
) -> Result<(), Violation> {
    queues(mesh, kernels, program, at)?;
    RaceChecker::new(program, &schedule.slots, traces).steps(schedule, at)
}

/// The stream on which a command that is no communication may be, besides the compute stream.
fn own_stream(kernels: &[Kernel], program: &Program, action: &Action) -> Stream {
    match action {
        Action::Launch { kernel, .. } => match kernels[kernel.index()].on {
            Space::Device => Stream::Compute,
            Space::Host => Stream::Host,
        },
        Action::Copy { src, dst, .. } => match [src, dst].map(|p| program.buffers[p.buffer.index()].arena.space()) {
            [_, Some(Space::Device)] => Stream::ToDevice,
            [_, None] => Stream::ToDisk,
            [None, Some(Space::Host)] => Stream::FromDisk,
            [Some(_), Some(Space::Host)] => Stream::ToHost,
        },
        Action::Fill { .. }
        | Action::Load { .. }
        | Action::Report { .. }
        | Action::Limit { .. }
        | Action::Collective { .. }
        | Action::Send { .. }
        | Action::Recv { .. }
        | Action::Record { .. }
        | Action::Wait { .. } => Stream::Compute,
    }
}

/// Checks which commands are on which stream.
fn queues(mesh: &Mesh, kernels: &[Kernel], program: &Program, at: &Location) -> Result<(), Violation> {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Queue {
        Event(u32),
        Group(Vec<u8>, Option<Vec<u64>>),
        Send(i64, Channel),
        Receive(i64, Channel),
        Disk(Stream),
    }
    // Groups with the same ranks are equal. Sub-axes of one rank do not tell ranks apart.
    let members = |group: GroupId| {
        let group = &program.groups[group.index()];
        let mut subs: Vec<u8> = group.subs.iter().filter(|u| mesh[**u].size > 1).map(|u| u.0).collect();
        subs.sort_unstable();
        Queue::Group(subs, group.stages.clone().filter(|s| s.len() > 1))
    };
    let mut streams: BTreeMap<Queue, Stream> = BTreeMap::new();
    for body in &program.bodies {
        for (k, command) in body.commands.iter().enumerate() {
            let fail = |what: Breach| at.body(&body.name).command(k, command).error(what);
            let queue = match &command.action {
                Action::Record { event } => Queue::Event(*event),
                Action::Collective { group, .. } => members(*group),
                Action::Send { hops, channel, .. } => Queue::Send(*hops, *channel),
                Action::Recv { hops, channel, .. } => Queue::Receive(*hops, *channel),
                Action::Wait { .. } => continue,
                Action::Launch { .. }
                | Action::Copy { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Limit { .. } => {
                    let own = own_stream(kernels, program, &command.action);
                    let fits = [Stream::Compute, own].contains(&command.stream);
                    ensure(fits, Invariant::OwnStream, || format!("it is on stream {}", command.stream.name())).map_err(fail)?;
                    // A rank's disk is read by one copy at a time, and written by one copy at a time.
                    if ![Stream::FromDisk, Stream::ToDisk].contains(&own) {
                        continue;
                    }
                    Queue::Disk(own)
                }
            };
            let first = *streams.entry(queue).or_insert(command.stream);
            ensure(first == command.stream, Invariant::OneStream, || {
                format!("it is on stream {}, others like it on {}", command.stream.name(), first.name())
            })
            .map_err(fail)?;
        }
    }
    Ok(())
}

impl<'a> RaceChecker<'a> {
    fn new(program: &'a Program, slots: &[Slots], traces: &[AccessTrace]) -> RaceChecker<'a> {
        let mut homes = ArenaCells::new(program, slots);
        let commands = program.bodies.iter().zip(traces).flat_map(|(body, trace)| body.commands.iter().zip(&trace.0));
        let users = homes.divide(commands.map(|(c, bytes)| (c.stream, bytes.as_slice())));
        let mut events: BTreeMap<u32, usize> = BTreeMap::new();
        let mut event = |event: u32| {
            let next = events.len();
            *events.entry(event).or_insert(next)
        };
        let mut act = |command: &Command, bytes: &[Bytes]| match command.action {
            Action::Record { event: e } => StreamAction::Record(event(e)),
            Action::Wait { event: e } => StreamAction::Wait(event(e)),
            Action::Launch { .. }
            | Action::Collective { .. }
            | Action::Send { .. }
            | Action::Recv { .. }
            | Action::Copy { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Report { .. }
            | Action::Limit { .. } => StreamAction::Touch(bytes.iter().map(|b| homes.touch(b)).collect()),
        };
        let bodies: Vec<Vec<(usize, StreamAction)>> = program
            .bodies
            .iter()
            .zip(traces)
            .map(|(body, trace)| body.commands.iter().zip(&trace.0).map(|(c, bytes)| (c.stream as usize, act(c, bytes))).collect())
            .collect();
        let mut waiters = vec![0; events.len()];
        for (s, act) in bodies.iter().flatten() {
            if let StreamAction::Wait(e) = act {
                waiters[*e] |= 1 << s;
            }
        }
        RaceChecker {
            program,
            touched: bodies.iter().map(|acts| touched(&homes, acts)).collect(),
            bodies,
            homes,
            users,
            waiters,
            used: program.bodies.iter().flat_map(|b| &b.commands).fold(0, |set, c| set | 1 << c.stream as usize),
            states: vec![],
            numbers: HashMap::new(),
            after: HashMap::new(),
        }
    }

    fn number(&mut self, state: StreamState) -> usize {
        let state = Rc::new(state);
        let next = self.states.len();
        let number = *self.numbers.entry(state.clone()).or_insert(next);
        if number == next {
            self.states.push(state);
        }
        number
    }

    /// Follows any number of steps and evaluations.
    fn steps(&mut self, schedule: &CallSchedule, at: &Location) -> Result<(), Violation> {
        let start = self.number(StreamState {
            clocks: [[0; STREAMS]; STREAMS],
            events: vec![[0; STREAMS]; self.waiters.len()],
            cells: vec![ByteCell::default(); self.users.len()],
        });
        // These are the states between steps. An update may or may not have led to each of them.
        let (mut seen, mut open) = (BTreeSet::from([start]), vec![start]);
        while let Some(state) = open.pop() {
            let trained = self.phase(state, schedule, ProgramPhase::Train, at)?;
            let updated = self.phase(trained, schedule, ProgramPhase::Update, at)?;
            let evaluated = self.phase(state, schedule, ProgramPhase::Eval, at)?;
            open.extend([trained, updated, evaluated].into_iter().filter(|s| seen.insert(*s)));
        }
        Ok(())
    }

    /// The state after a phase that begins in this one.
    fn phase(&mut self, from: usize, schedule: &CallSchedule, phase: ProgramPhase, at: &Location) -> Result<usize, Violation> {
        let mut now = from;
        let calls = schedule.calls(phase);
        for run in self.program.runs(calls) {
            // All parts of a call use the same slots, so only the first part names them.
            let slots = |call: &Call| if call.part == 0 { self.slots(call) } else { vec![] };
            let called = |call: &Call| (call.body.index(), call.part, slots(call));
            let key = (now, calls[run.clone()].iter().map(called).collect());
            if let Some(next) = self.after.get(&key) {
                now = *next;
                continue;
            }
            let mut state = StreamState::clone(&self.states[now]);
            for (c, call) in run.map(|c| (c, &calls[c])) {
                let (body, microbatch) = (call.body.index(), call.microbatch as usize);
                for k in self.program.bodies[body].part(call.part) {
                    self.step(&mut state, body, k, microbatch).map_err(|race| {
                        let body = &self.program.bodies[body];
                        let pass = at.of(LocationPart::Calls(phase.name())).of(LocationPart::Pass(body.name.clone(), call.microbatch));
                        pass.command(k, &body.commands[k]).error(Invariant::NoRace.breach(self.explain(&race, calls, c, k)))
                    })?;
                }
            }
            state.normalise(&self.users, &self.waiters, self.used);
            let next = self.number(state);
            self.after.insert(key, next);
            now = next;
        }
        Ok(now)
    }

    /// The slots of a call, one for each arena or stash with several that its body touches.
    fn slots(&self, call: &Call) -> Vec<usize> {
        self.touched[call.body.index()].iter().map(|home| call.microbatch as usize % self.homes.slots(*home)).collect()
    }

    fn step(&self, state: &mut StreamState, body: usize, k: usize, microbatch: usize) -> Result<(), Race> {
        let (s, act) = &self.bodies[body][k];
        let s = *s;
        match act {
            StreamAction::Record(e) => state.events[*e] = state.clocks[s],
            StreamAction::Wait(e) => {
                let event = state.events[*e];
                state.clocks[s].iter_mut().zip(event).for_each(|(mine, theirs)| *mine = theirs.max(*mine));
            }
            StreamAction::Touch(touches) => {
                state.clocks[s][s] += 1;
                let clock = state.clocks[s];
                for touch in touches {
                    for c in self.homes.cells(touch, microbatch) {
                        let cell = &mut state.cells[c];
                        let race = |stream: usize, wrote: bool| Race { stream, wrote, cell: c };
                        let (writer, moment) = cell.written;
                        if clock[writer] < moment {
                            return Err(race(writer, true));
                        }
                        if touch.writes {
                            if let Some(reader) = (0..STREAMS).find(|t| clock[*t] < cell.read[*t]) {
                                return Err(race(reader, false));
                            }
                            *cell = ByteCell { written: (s, clock[s]), read: [0; STREAMS] };
                        } else {
                            cell.read[s] = clock[s];
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Says which command a race is with: the last one of that stream that touched the bytes before command `k` of
    /// call `now`.
    fn explain(&self, race: &Race, calls: &[Call], now: usize, k: usize) -> String {
        let stream = Stream::ALL[race.stream].name();
        let verb = if race.wrote { "writes" } else { "reads" };
        for (c, call) in calls[..=now].iter().enumerate().rev() {
            let (body, microbatch) = (&self.program.bodies[call.body.index()], call.microbatch as usize);
            let acts = &self.bodies[call.body.index()];
            let same = |touch: &CellAccess| touch.writes == race.wrote && self.homes.cells(touch, microbatch).contains(&race.cell);
            let touched = |k: &usize| match &acts[*k] {
                (s, StreamAction::Touch(touches)) => *s == race.stream && touches.iter().any(same),
                (_, StreamAction::Record(_) | StreamAction::Wait(_)) => false,
            };
            let other = body.part(call.part).rev().filter(|j| c < now || *j < k).find(touched);
            if let Some(other) = other {
                let other = Location::from(LocationPart::Body(body.name.clone())).command(other, &body.commands[other]);
                return format!("nothing orders it after {other} on stream {stream}, which {verb} the same memory");
            }
        }
        format!("nothing orders it after what stream {stream} does in an earlier phase, which {verb} the same memory")
    }
}

/// The arenas and stashes that a body touches and that have more than one slot.
fn touched(homes: &ArenaCells, acts: &[(usize, StreamAction)]) -> BTreeSet<usize> {
    let touches = acts.iter().filter_map(|(_, act)| if let StreamAction::Touch(touches) = act { Some(touches) } else { None });
    touches.flatten().map(|t| t.home).filter(|h| homes.slots(*h) > 1).collect()
}

/// A cell that a stream may still be reading or writing.
struct Race {
    stream: usize,
    wrote: bool,
    cell: usize,
}

/// Calls that the check of a stage looks at.
#[cfg(test)]
pub fn distinct_calls(job: &ir::program::Job, stage: usize) -> usize {
    let at = Location::stage(stage as u64);
    let ir::program::Stage { program, schedule, .. } = &job.stages[stage];
    let program = &job.programs[*program as usize];
    let kernels: Vec<KernelFacts> = job.kernels.iter().map(KernelFacts::new).collect();
    let class = super::check_bodies(job, program, &kernels, ir::module::JobLevel::All, &at).expect("a sound program");
    let mut order = RaceChecker::new(program, &schedule.slots, &class.traces);
    order.steps(schedule, &at).expect("no races");
    order.after.len()
}
