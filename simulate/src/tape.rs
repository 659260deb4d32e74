//! What a stage's rank issues, stream by stream, with what each thing costs by itself.
//!
//! Commands of a stream that follow each other without an event or an exchange between them are one item: a body of
//! thousands of commands has tens of items.

use crate::cost::{Cause, Cost};
use crate::links::{self, Reach};
use crate::machine::Machine;
use crate::{Options, kernels};
use ir::op::Channel;
use ir::program::{Action, Arena, Job, ProgramBody, Space, Stream};
use ir::work::sent;
use std::collections::{BTreeMap, BTreeSet};

/// What a busy stream keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// The device: kernels, and what is done of their memory.
    Device,
    /// Cores of the host, by kernels that run there.
    Host,
    /// Copies between memories, which no kernel makes.
    Copy,
    /// Copies to or from a disk.
    Disk,
    /// Collectives and messages.
    Exchange,
    /// The host, between phases.
    Gap,
    /// A thread that goes on after it has waited.
    Wake,
}

/// What a stream comes to next.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// Commands `first` to `last` of the body.
    Work {
        /// What the commands keep busy.
        kind: WorkKind,
        /// Seconds of all these commands, by cause.
        cost: Box<Cost>,
        /// Index of the first command in its body.
        first: u32,
        /// Index of the last command in its body, inclusive; commands of other streams may lie between.
        last: u32,
    },
    /// Marks an event as reached.
    Record {
        /// The event's number in the program.
        event: u32,
    },
    /// For the record of the event that is the last before it; so many of them are in this part of the body.
    Wait {
        /// The event's number in the program.
        event: u32,
        /// Records of the event that precede the wait in this part of the body.
        before: u32,
    },
    /// Number `other` of the part's exchanges that are no sends.
    Exchange {
        /// Index into [`StageTape::exchanges`].
        exchange: u32,
        /// From 0, in the order of the part's commands.
        other: u32,
    },
    /// Begins a message to another stage.
    Send {
        /// Index into [`StageTape::exchanges`].
        exchange: u32,
    },
}

/// With whom.
#[derive(Clone, Debug, PartialEq)]
pub enum ExchangePartner {
    /// Ranks of the same stage, which come to it together.
    Within,
    /// Ranks of other stages too: the number of their meeting.
    Meeting(usize),
    /// A message to another stage.
    Send {
        /// The stage that receives it.
        to: usize,
        /// Messages of one channel arrive in the order in which they are sent.
        channel: Channel,
    },
    /// A message from another stage.
    Recv {
        /// The stage that sends it.
        from: usize,
        /// Messages of one channel arrive in the order in which they are sent.
        channel: Channel,
    },
}

/// A collective, or one end of a message, as a rank of a stage issues it.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// Who takes part in it.
    pub with: ExchangePartner,
    /// Its place in the program.
    pub body: u32,
    /// Index of its command in the body.
    pub command: u32,
    /// That a rank sends, or receives.
    pub bytes: u64,
    /// Seconds that it takes by itself, by cause.
    pub cost: Cost,
}

/// A part of a body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartTape {
    /// By stream, in the order of [`Stream::ALL`].
    pub streams: [Vec<Item>; Stream::ALL.len()],
    /// How often it records each event.
    pub records: Vec<(u32, u32)>,
    /// Its exchanges that are no sends.
    pub others: u32,
    /// For each number of an exchange that is no send, as the program counts them, how many before it are played.
    pub played: Vec<u32>,
}

/// All of a stage.
pub struct StageTape {
    /// By body and part.
    pub tapes: Vec<Vec<PartTape>>,
    /// Those of all bodies, in the order of bodies and commands.
    pub exchanges: Vec<Exchange>,
    /// One more than the highest number of an event; 0 if there are none.
    pub events: usize,
}

/// Stages that come together, by what tells such groups apart.
#[derive(Default)]
pub struct Meetings {
    numbers: BTreeMap<(Vec<u8>, Vec<u64>), usize>,
    /// The stages of each meeting, by its number.
    pub stages: Vec<Vec<usize>>,
}

/// What a command takes, by stage, body and number, from what it costs by itself.
pub type CostOverride<'a> = &'a dyn Fn(usize, &ProgramBody, usize, Cost) -> Cost;

/// What it costs by itself.
pub const BY_ITSELF: CostOverride<'static> = &|_, _, _, cost| cost;

/// What commands of a job cost by themselves.
pub struct Costs<'a> {
    job: &'a Job,
    machine: &'a Machine,
    kernels: Vec<Cost>,
    options: Options,
    /// For each stage and group, how the groups lie. Those that lie alike are kept once.
    reaches: BTreeMap<(usize, Vec<u64>), Vec<Reach>>,
}

impl<'a> Costs<'a> {
    /// Works out each kernel's cost once; those of exchanges follow on demand.
    pub fn new(job: &'a Job, machine: &'a Machine, options: &Options) -> Costs<'a> {
        let kernels = job.kernels.iter().map(|k| kernels::launch(machine, k, options.threads)).collect();
        Costs { job, machine, kernels, options: *options, reaches: BTreeMap::new() }
    }

    /// Of a command that is neither an exchange nor an event, with what it keeps busy.
    pub fn work(&self, stage: usize, action: &Action) -> (WorkKind, Cost) {
        let program = &self.job.programs[self.job.stages[stage].program as usize];
        let device = &self.machine.device;
        let of_memory = |bytes: u64| {
            let seconds = kernels::memory(self.machine, bytes as f64, self.options.threads);
            Cost::new(Cause::Memory, seconds).and(Cause::Launch, device.launch.value)
        };
        let bytes = |b: &ir::program::BufferId| program.buffers[b.index()].bytes();
        match action {
            Action::Launch { kernel, .. } => {
                let on = self.job.kernels[kernel.index()].on;
                let cost = self.kernels[kernel.index()];
                let slow = self.options.slow.filter(|s| s.0 == stage).map_or(1.0, |s| s.1);
                (if on == Space::Host { WorkKind::Host } else { WorkKind::Device }, cost.times(slow))
            }
            // A CPU reads each cache line before it writes to it.
            Action::Fill { buffer, .. } => (WorkKind::Device, of_memory(bytes(buffer) * if self.machine.is_cpu() { 2 } else { 1 })),
            // A batch comes from the host.
            Action::Load { dst, .. } if self.machine.is_cpu() => (WorkKind::Device, of_memory(bytes(dst))),
            Action::Load { dst, .. } => {
                let copied = Cost::new(Cause::Bus, bytes(dst) as f64 / self.machine.host.bus_bytes_per_second.value);
                (WorkKind::Copy, copied.and(Cause::Launch, device.launch.value))
            }
            Action::Copy { dtype, count, src, dst } => {
                let moved = (count * dtype.bytes()) as f64;
                let is_disk = [src, dst].iter().any(|p| program.buffers[p.buffer.index()].arena == Arena::Disk);
                match is_disk {
                    true => (WorkKind::Disk, Cost::new(Cause::Disk, moved / self.machine.host.disk_bytes_per_second.value)),
                    false => (WorkKind::Copy, Cost::new(Cause::Bus, moved / self.machine.host.bus_bytes_per_second.value)),
                }
            }
            Action::Collective { .. }
            | Action::Send { .. }
            | Action::Recv { .. }
            | Action::Report { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => (WorkKind::Device, Cost::default()),
        }
    }

    /// Of an exchange; none of what is no exchange.
    pub fn exchange(&mut self, stage: usize, action: &Action) -> Option<Cost> {
        let (job, machine) = (self.job, self.machine);
        let program = &job.programs[job.stages[stage].program as usize];
        let first = job.mesh.first_of_stage(stage as u64);
        let apart = job.mesh.world() / job.stages.len() as u64;
        match action {
            Action::Collective { kind, group, dtype, count, .. } => {
                let group = &program.groups[group.index()];
                let key = (stage, group.subs.iter().map(|u| u64::from(u.0)).chain(group.stages.iter().flatten().map(|s| 1 << 32 | s)).collect());
                // Groups of different ranks may lie differently on the links, and ranks wait for the slowest.
                let all = self.reaches.entry(key).or_insert_with(|| {
                    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
                    for rank in first..first + apart {
                        if !seen.contains(&rank) {
                            let members = group.members(&job.mesh, rank);
                            found.insert(Reach::of(machine, &members));
                            seen.extend(members);
                        }
                    }
                    found.into_iter().collect()
                });
                let part = count * dtype.bytes();
                let each = all.iter().map(|reach| links::collective(machine, *kind, reach, part));
                // If ranks share cores, each chunk waits until all members have had a core.
                let wake = machine.wake(job.mesh.world(), self.options.threads);
                let chunks = if wake.of(Cause::CrowdedWake) > 0.0 { links::chunks(*kind, group.size(&job.mesh), part) } else { 0 };
                each.max_by(|a, b| a.seconds().total_cmp(&b.seconds())).map(|cost| cost + wake.times(chunks as f64))
            }
            Action::Send { hops, .. } | Action::Recv { hops, .. } => {
                let other = job.mesh.first_of_stage((stage as u64).wrapping_add_signed(*hops));
                // This takes the pair of ranks that lies farthest apart.
                let pairs = (0..apart).map(|k| (first + k, other + k));
                let level = |(a, b): (u64, u64)| Reach::of(machine, &[a.min(b), a.max(b)]).top();
                let (from, to) = pairs.max_by_key(|p| level(*p)).unwrap_or((first, other));
                Some(links::message(machine, from, to, sent(&job.mesh, program, action)))
            }
            _ => None,
        }
    }
}

impl StageTape {
    /// What a rank of a stage issues, each command with what `takes` says; what a bool may leave out is left out, as
    /// in most steps.
    pub fn new(costs: &mut Costs, stage: usize, meetings: &mut Meetings, takes: CostOverride<'_>) -> StageTape {
        let program = &costs.job.programs[costs.job.stages[stage].program as usize];
        let (mut exchanges, mut events) = (vec![], 0);
        let mut of_part = |number: usize, body: &ProgramBody, part: u32| {
            let mut tape = PartTape::default();
            let mut recorded: BTreeMap<u32, u32> = BTreeMap::new();
            for at in body.part(part) {
                let command = &body.commands[at];
                let items = &mut tape.streams[command.stream as usize];
                let is_exchange = matches!(command.action, Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. });
                let is_send = matches!(command.action, Action::Send { .. });
                if is_exchange && !is_send {
                    tape.played.push(tape.others);
                }
                match &command.action {
                    Action::Record { event } => {
                        events = events.max(*event as usize + 1);
                        *recorded.entry(*event).or_default() += 1;
                        items.push(Item::Record { event: *event });
                    }
                    Action::Wait { event } => {
                        events = events.max(*event as usize + 1);
                        items.push(Item::Wait { event: *event, before: recorded.get(event).copied().unwrap_or(0) });
                    }
                    _ if command.predicate.is_some() => {}
                    action if is_exchange => {
                        let cost = costs.exchange(stage, action).expect("invariant: it is an exchange");
                        let cost = takes(stage, body, at, cost);
                        let kept = cost != Cost::default();
                        let with = with(costs.job, stage, action, meetings);
                        let exchange = exchanges.len() as u32;
                        let bytes = if kept { sent(&costs.job.mesh, program, action) } else { 0 };
                        exchanges.push(Exchange { with, body: number as u32, command: at as u32, bytes, cost });
                        if is_send {
                            items.push(Item::Send { exchange });
                        } else {
                            items.push(Item::Exchange { exchange, other: tape.others });
                            tape.others += 1;
                        }
                    }
                    action => {
                        let (kind, cost) = costs.work(stage, action);
                        let cost = takes(stage, body, at, cost);
                        if cost.seconds() == 0.0 {
                            continue;
                        }
                        match items.last_mut() {
                            Some(Item::Work { kind: before, cost: sum, last, .. }) if *before == kind => {
                                *last = at as u32;
                                **sum += cost;
                            }
                            _ => items.push(Item::Work { kind, cost: Box::new(cost), first: at as u32, last: at as u32 }),
                        }
                    }
                }
            }
            tape.records = recorded.into_iter().collect();
            tape
        };
        let mut tapes = vec![];
        for (number, body) in program.bodies.iter().enumerate() {
            tapes.push((0..body.parts()).map(|part| of_part(number, body, part)).collect());
        }
        StageTape { tapes, exchanges, events }
    }
}

fn with(job: &Job, stage: usize, action: &Action, meetings: &mut Meetings) -> ExchangePartner {
    let peer = |hops: i64| (stage as u64).wrapping_add_signed(hops) as usize;
    match action {
        Action::Send { hops, channel, .. } => ExchangePartner::Send { to: peer(*hops), channel: *channel },
        Action::Recv { hops, channel, .. } => ExchangePartner::Recv { from: peer(*hops), channel: *channel },
        Action::Collective { group, .. } => {
            let group = &job.programs[job.stages[stage].program as usize].groups[group.index()];
            let stages = group.stages.clone().unwrap_or_default();
            if stages.len() < 2 {
                return ExchangePartner::Within;
            }
            // Groups are told apart as in the verifier, whatever the order of their axes.
            let mut subs: Vec<u8> = group.subs.iter().map(|u| u.0).collect();
            subs.sort_unstable();
            let key = (subs, stages);
            let members = key.1.iter().map(|s| *s as usize).collect();
            ExchangePartner::Meeting(*meetings.numbers.entry(key).or_insert_with(|| {
                meetings.stages.push(members);
                meetings.stages.len() - 1
            }))
        }
        _ => unreachable!("invariant: it is an exchange"),
    }
}
