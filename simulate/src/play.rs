//! Plays the programs of all stages on a machine, from event to event.
//!
//! One rank of each stage is played: ranks of a stage do the same at the same time. A stream runs its items one after
//! the other; what is under way goes on at a rate that follows from what else is, and the play jumps to the next end
//! of any of it. Each time carries the seconds that led to it by cause (its [`Mark`]): what starts has the mark of
//! the last thing that it waited for. So the seconds from the end of one step to that of the next are known by cause,
//! and add up.

mod exchanges;
mod stage;

use crate::cost::{Cause, Cost};
use crate::machine::Machine;
use crate::tape::{BY_ITSELF, CostOverride, Costs, Item, Meetings, StageTape, WorkKind};
use crate::{Deadlock, Options};
use exchanges::Route;
use ir::op::Channel;
use ir::program::{Job, ProgramPhase, Stream};
use stage::{PoolShare, RunningOp, StagePlay, State};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

pub use stage::{StageTimes, TimeBreakdown};

/// Steps at most until they are taken to be steady: the fill of a pipeline, or of what is prefetched, takes one.
const STEPS: usize = 8;
/// Steps that differ by less are alike.
const ALIKE: f64 = 1e-6;

const STREAMS: usize = Stream::ALL.len();

/// A time, and the seconds by cause that led to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mark {
    /// Seconds from the beginning of the play.
    pub time: f64,
    /// Seconds by cause, along what was waited for; they add up to `time`.
    pub path: Cost,
}

impl Mark {
    fn later(self, other: Mark) -> Mark {
        if other.time > self.time { other } else { self }
    }
}

/// Something that a stream did.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Pipeline stage, from 0.
    pub stage: usize,
    /// The stream that did it.
    pub stream: Stream,
    /// Passes ([`ProgramPhase::Train`]) or update ([`ProgramPhase::Update`]).
    pub phase: ProgramPhase,
    /// Index into the calls that the stage's schedule has for the phase.
    pub call: u32,
    /// Of the called body, both included.
    pub first: u32,
    /// Index of the last command in the called body, inclusive.
    pub last: u32,
    /// Seconds from the beginning of the play at which it began.
    pub start: f64,
    /// Seconds from the beginning of the play at which it ended.
    pub end: f64,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct SimulationResult {
    /// The step that is like the one before: its number, from 0.
    pub step: usize,
    /// Whether it is, or only the last one that was played.
    pub steady: bool,
    /// When it begins, as the one before ends, and when it ends, on the last of the stages.
    pub begin: f64,
    /// Seconds from the beginning of the play at which the last stage ends the step.
    pub end: f64,
    /// From the one to the other, by cause.
    pub path: Cost,
    /// Of each stage.
    pub times: Vec<StageTimes>,
}

/// The end of an op, if its rate stays the same.
#[derive(Clone, Copy, Debug, PartialEq)]
struct EndEvent {
    time: f64,
    op: usize,
    generation: u32,
}

impl Eq for EndEvent {}

impl PartialOrd for EndEvent {
    fn partial_cmp(&self, other: &EndEvent) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for EndEvent {
    fn cmp(&self, other: &EndEvent) -> Ordering {
        self.time.total_cmp(&other.time).then(self.op.cmp(&other.op)).then(self.generation.cmp(&other.generation))
    }
}

/// The resources that ranks of one machine share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Cores,
    HostMemory,
    Disk,
}

/// Stages whose ranks share machines.
#[derive(Clone, Debug, Default)]
struct Cluster {
    stages: Vec<usize>,
    /// The part of each [`Pool`] that is in use; more than 1 is too much.
    used: [f64; 3],
}

struct Simulation<'a> {
    job: &'a Job,
    machine: &'a Machine,
    /// Whether a rank does its exchanges one by one.
    serial: bool,
    options: Options,
    /// The time until a thread that has waited goes on.
    wake: Cost,
    tapes: Vec<StageTape>,
    stages: Vec<StagePlay>,
    clusters: Vec<Cluster>,
    meetings: Vec<Vec<usize>>,
    /// The stage, stream and exchange of those who have come to each meeting.
    met: Vec<Vec<(usize, usize, u32)>>,
    routes: HashMap<(usize, usize, Channel), Route>,
    due: BinaryHeap<Reverse<EndEvent>>,
    now: f64,
    /// Streams that can go on.
    ready: Vec<(usize, usize)>,
    /// Stages in which something has begun or ended.
    dirty: Vec<usize>,
    record: Option<(usize, &'a mut dyn FnMut(Slice))>,
}

/// Plays steps until they are alike, in which commands take what `takes` says.
///
/// # Errors
/// Streams that wait for ever: a job that is verified has none.
pub fn play(job: &Job, machine: &Machine, options: Options, takes: CostOverride<'_>) -> Result<SimulationResult, Deadlock> {
    Simulation::new(job, machine, options, takes, None).run()
}

/// The same of commands that take what they cost by themselves, and tells what is done in the step that [`play`]
/// found.
///
/// # Errors
/// As [`play`].
pub fn record(job: &Job, machine: &Machine, options: Options, step: usize, each: &mut dyn FnMut(Slice)) -> Result<(), Deadlock> {
    Simulation::new(job, machine, options, BY_ITSELF, Some((step, each))).run().map(|_| ())
}

impl<'a> Simulation<'a> {
    fn new(
        job: &'a Job,
        machine: &'a Machine,
        options: Options,
        takes: CostOverride<'_>,
        record: Option<(usize, &'a mut dyn FnMut(Slice))>,
    ) -> Simulation<'a> {
        let (mut costs, mut meetings) = (Costs::new(job, machine, &options), Meetings::default());
        let tapes: Vec<StageTape> = (0..job.stages.len()).map(|s| StageTape::new(&mut costs, s, &mut meetings, takes)).collect();
        // GPUs exchange one by one, as NCCL asks for, even if no stage sends.
        let serial = !machine.is_cpu();
        let mut clusters: Vec<Cluster> = vec![];
        let each = job.mesh.world() / job.stages.len() as u64;
        // All ranks on CPUs are on one machine.
        let size = if machine.is_cpu() { u64::MAX } else { machine.devices };
        let stages = (0..job.stages.len()).map(|s| {
            let first = job.mesh.first_of_stage(s as u64) / size;
            if each >= size || s == 0 || first != job.mesh.first_of_stage(s as u64 - 1) / size {
                clusters.push(Cluster::default());
            }
            let cluster = clusters.len() - 1;
            clusters[cluster].stages.push(s);
            StagePlay::new(job, s, &tapes[s], cluster, each.min(size))
        });
        let stages = stages.collect();
        Simulation {
            job,
            machine,
            serial,
            options,
            wake: machine.wake(job.mesh.world(), options.threads),
            stages,
            clusters,
            met: vec![vec![]; meetings.stages.len()],
            meetings: meetings.stages,
            routes: HashMap::new(),
            due: BinaryHeap::new(),
            now: 0.0,
            ready: vec![],
            dirty: vec![],
            tapes,
            record,
        }
    }

    fn run(mut self) -> Result<SimulationResult, Deadlock> {
        for s in 0..self.stages.len() {
            let used: Vec<usize> = self.stages[s].used().collect();
            self.ready.extend(used.into_iter().map(|k| (s, k)));
        }
        self.settle();
        let mut looked = 0;
        while let Some(Reverse(due)) = self.due.pop() {
            let (s, k) = (due.op / STREAMS, due.op % STREAMS);
            if self.stages[s].ops[k].as_ref().is_none_or(|op| op.generation != due.generation) {
                continue;
            }
            self.now = due.time;
            self.finish(s, k);
            self.settle();
            let ended = self.stages.iter().map(|s| s.ended.len()).min().unwrap_or(0);
            if ended > looked {
                looked = ended;
                if let Some(played) = self.steady(ended) {
                    return Ok(played);
                }
            }
        }
        Err(self.deadlock())
    }

    /// The result, if the last of so many steps is like the one before, or if no more are played.
    fn steady(&self, ended: usize) -> Option<SimulationResult> {
        if ended < 2 {
            return None;
        }
        let end = |step: usize| self.stages.iter().map(|s| s.ended[step].0).reduce(Mark::later).unwrap_or_default();
        let (before, after) = (end(ended - 2), end(ended - 1));
        let period = after.time - before.time;
        // Steps are alike if the stages end at the same times relative to each other.
        let lie = |step: usize, end: f64| self.stages.iter().map(move |s| end - s.ended[step].0.time);
        let alike = lie(ended - 2, before.time).zip(lie(ended - 1, after.time)).all(|(a, b)| (a - b).abs() <= ALIKE * period);
        let again = ended > 2 && ((before.time - end(ended - 3).time) - period).abs() <= ALIKE * period;
        let recorded = self.record.as_ref().map(|r| r.0 + 1);
        let stop = recorded.map_or((alike && again) || ended == STEPS, |last| ended == last);
        stop.then(|| SimulationResult {
            step: ended - 1,
            steady: alike && again,
            begin: before.time,
            end: after.time,
            path: after.path - before.path,
            times: self.stages.iter().map(|s| s.ended[ended - 1].1.clone()).collect(),
        })
    }

    fn deadlock(&self) -> Deadlock {
        let waiting = |(s, stage): (usize, &StagePlay)| {
            let names = stage.used().filter(|k| stage.streams[*k].state != State::Ready).map(move |k| (s, Stream::ALL[k].name()));
            names.collect::<Vec<_>>()
        };
        Deadlock { seconds: self.now, streams: self.stages.iter().enumerate().flat_map(waiting).collect() }
    }

    /// Goes on with all that can, and then schedules the ends of what is under way.
    fn settle(&mut self) {
        while let Some((s, k)) = self.ready.pop() {
            self.advance(s, k);
        }
        while let Some(s) = self.dirty.pop() {
            if std::mem::take(&mut self.stages[s].dirty) {
                self.rerate(s);
            }
        }
    }

    /// Lets a stream go on until it is busy, or has to wait.
    fn advance(&mut self, s: usize, k: usize) {
        self.stages[s].streams[k].state = State::Ready;
        loop {
            let (stage, tapes) = (&mut self.stages[s], &self.tapes[s].tapes);
            let stream = &mut stage.streams[k];
            if stream.phase > stage.phase {
                stream.state = State::AtEnd;
                return self.end_phase(s);
            }
            let calls = self.job.stages[s].schedule.calls(StagePlay::kind(stream.phase));
            let Some(call) = calls.get(stream.call) else {
                stream.next_phase();
                continue;
            };
            let tape = &tapes[call.body.index()][call.part as usize];
            let Some(item) = tape.streams[k].get(stream.item) else {
                stream.next_call(tape);
                continue;
            };
            match item {
                Item::Work { kind, cost, .. } => {
                    stream.state = State::Busy;
                    let (kind, cost, mark) = (*kind, **cost, stream.mark);
                    return self.begin(s, k, kind, cost, mark, &[]);
                }
                Item::Record { event } => {
                    let (event, mark) = (*event, stream.mark);
                    stream.item += 1;
                    stage.reached[event as usize] += 1;
                    let reached = stage.reached[event as usize];
                    let waits = |state: State| matches!(state, State::Waits { event: e, count } if e == event && count <= reached);
                    let waiters = (0..STREAMS).filter(|k| waits(stage.streams[*k].state)).collect::<Vec<_>>();
                    for other in waiters {
                        let waited = self.now - self.stages[s].streams[other].mark.time;
                        self.wake(s, other, waited, Mark { time: self.now, ..mark });
                    }
                }
                Item::Wait { event, before } => {
                    let count = stream.issued[*event as usize] + before;
                    if stage.reached[*event as usize] < count {
                        stream.state = State::Waits { event: *event, count };
                        return;
                    }
                    stream.item += 1;
                }
                Item::Exchange { exchange, other } => {
                    let (exchange, number) = (*exchange, stream.others + other);
                    stream.state = State::Exchanges;
                    return self.arrive(s, k, exchange, number);
                }
                Item::Send { exchange } => {
                    stream.state = State::Exchanges;
                    let exchange = *exchange;
                    return self.send(s, k, exchange);
                }
            }
        }
    }

    /// Begins an op on a stream. `parties` are the stages whose exchange it is.
    fn begin(&mut self, s: usize, k: usize, kind: WorkKind, cost: Cost, mark: Mark, parties: &[(usize, u32)]) {
        self.touch(s);
        for (other, exchange) in parties {
            self.touch(*other);
            self.stages[*other].moving.push(*exchange);
            self.soil(*other);
        }
        self.share(s, kind, 1.0);
        debug_assert!((self.now - mark.time).abs() <= 1e-9 * self.now, "what begins at {} waited for nothing after {}", self.now, mark.time);
        let (seconds, mark) = (cost.seconds(), Mark { time: self.now, ..mark });
        let op = RunningOp {
            kind,
            seconds,
            cost,
            mark,
            left: seconds,
            rate: 0.0,
            alone: 0.0,
            own: 0.0,
            generation: self.stages[s].generation(),
            parties: parties.to_vec(),
        };
        self.stages[s].ops[k] = Some(op);
        self.soil(s);
    }

    /// Ends the op that is under way on a stream.
    fn finish(&mut self, s: usize, k: usize) {
        self.touch(s);
        let op = self.stages[s].ops[k].take().expect("invariant: it is due");
        // A stage that shares a pool takes longer for its own work. Only the rest is lost to what else is under way.
        let held = if op.kind == WorkKind::Exchange { Cause::HeldExchanges } else { Cause::HeldKernels };
        let longer = if op.seconds > 0.0 { op.own / op.seconds } else { 1.0 };
        let lost = (self.now - op.mark.time - op.own).max(0.0);
        let mark = Mark { time: self.now, path: op.mark.path + op.cost.times(longer).and(held, lost) };
        for (other, exchange) in &op.parties {
            self.touch(*other);
            let moving = &mut self.stages[*other].moving;
            let at = moving.iter().position(|e| e == exchange).expect("invariant: it has begun");
            moving.swap_remove(at);
            self.soil(*other);
        }
        self.share(s, op.kind, -1.0);
        self.soil(s);
        match op.kind {
            WorkKind::Gap => self.next_phase(s, mark),
            WorkKind::Wake => self.pass(s, k, mark),
            WorkKind::Exchange => self.exchanged(s, k, &op, mark),
            WorkKind::Device | WorkKind::Host | WorkKind::Copy | WorkKind::Disk => {
                self.tell(s, k, op.mark.time);
                if let Some(Item::Send { .. }) = self.item(s, k) {
                    return self.copied(s, k, mark);
                }
                self.pass(s, k, mark);
            }
        }
    }

    /// Moves a stream to its next item.
    fn pass(&mut self, s: usize, k: usize, mark: Mark) {
        let stream = &mut self.stages[s].streams[k];
        (stream.mark, stream.item, stream.state) = (mark, stream.item + 1, State::Ready);
        self.ready.push((s, k));
    }

    /// Moves a stream that has waited so long to its next item. Its thread takes a while to go on.
    fn wake(&mut self, s: usize, k: usize, waited: f64, mark: Mark) {
        if self.wake.seconds() == 0.0 || waited <= 0.0 {
            return self.pass(s, k, mark);
        }
        self.stages[s].streams[k].state = State::Busy;
        self.begin(s, k, WorkKind::Wake, self.wake, mark, &[]);
    }

    /// The item at which a stream is.
    fn item(&self, s: usize, k: usize) -> Option<&Item> {
        let stream = &self.stages[s].streams[k];
        let call = self.job.stages[s].schedule.calls(StagePlay::kind(stream.phase)).get(stream.call)?;
        self.tapes[s].tapes[call.body.index()][call.part as usize].streams[k].get(stream.item)
    }

    /// Records the item at which a stream is, from `start` until now.
    fn tell(&mut self, s: usize, k: usize, start: f64) {
        let Some(step) = self.record.as_ref().map(|r| r.0) else { return };
        let stream = &self.stages[s].streams[k];
        if stream.phase / 2 != step {
            return;
        }
        let (first, last) = match self.item(s, k) {
            Some(Item::Work { first, last, .. }) => (*first, *last),
            Some(Item::Exchange { exchange, .. } | Item::Send { exchange, .. }) => {
                let command = self.tapes[s].exchanges[*exchange as usize].command;
                (command, command)
            }
            _ => return,
        };
        let (phase, call) = (StagePlay::kind(stream.phase), stream.call as u32);
        let slice = Slice { stage: s, stream: Stream::ALL[k], phase, call, first, last, start, end: self.now };
        if let Some((_, each)) = &mut self.record {
            each(slice);
        }
    }

    /// Ends a phase once all streams that it waits for have come to its end. The host then looks at the reports.
    fn end_phase(&mut self, s: usize) {
        let stage = &self.stages[s];
        let all = self.serial;
        let waited = |k: &usize| all || [Stream::Compute, Stream::Host].contains(&Stream::ALL[*k]);
        let is_over = stage.used().filter(waited).all(|k| stage.streams[k].phase > stage.phase);
        if stage.closing || !is_over || (self.serial && !stage.queue.is_done()) {
            return;
        }
        let mark = stage.used().filter(waited).map(|k| stage.streams[k].mark).reduce(Mark::later).unwrap_or_default();
        let mark = mark.later(stage.queue.mark);
        let seconds = self.machine.device.phase.value;
        self.stages[s].closing = true;
        self.begin(s, Stream::Compute as usize, WorkKind::Gap, Cost::new(Cause::Gap, seconds), mark, &[]);
    }

    fn next_phase(&mut self, s: usize, mark: Mark) {
        let job = self.job;
        let stage = &mut self.stages[s];
        stage.next_phase(&job.stages[s].schedule, &self.tapes[s], mark);
        for k in stage.used().collect::<Vec<_>>() {
            let stream = &mut self.stages[s].streams[k];
            if stream.state == State::AtEnd {
                stream.mark = mark.later(stream.mark);
                self.ready.push((s, k));
            }
        }
    }

    /// Brings a stage's clock to now.
    fn touch(&mut self, s: usize) {
        self.stages[s].touch(self.now);
    }

    fn soil(&mut self, s: usize) {
        if !std::mem::replace(&mut self.stages[s].dirty, true) {
            self.dirty.push(s);
        }
    }

    /// The share of a pool that a stage takes while such work is under way.
    fn pool(&self, s: usize, kind: WorkKind) -> Option<PoolShare> {
        let ranks = self.stages[s].neighbours as f64;
        let share = |pool: Pool, part| Some(PoolShare { pool: pool as usize, part });
        match kind {
            WorkKind::Device | WorkKind::Host if self.machine.is_cpu() => {
                share(Pool::Cores, ranks * self.options.threads as f64 / self.machine.devices as f64)
            }
            WorkKind::Exchange | WorkKind::Copy if self.machine.is_cpu() => share(Pool::Cores, ranks / self.machine.devices as f64),
            WorkKind::Host => share(Pool::HostMemory, ranks),
            WorkKind::Disk => share(Pool::Disk, ranks),
            WorkKind::Device | WorkKind::Exchange | WorkKind::Copy | WorkKind::Gap | WorkKind::Wake => None,
        }
    }

    /// Takes a stage's share of a pool, or gives it back. All who share the pool go on at another rate.
    fn share(&mut self, s: usize, kind: WorkKind, sign: f64) {
        let Some(PoolShare { pool, part }) = self.pool(s, kind) else { return };
        let cluster = self.stages[s].cluster;
        let used = &mut self.clusters[cluster].used[pool];
        let before = *used;
        *used += sign * part;
        if before.max(*used) > 1.0 {
            for other in self.clusters[cluster].stages.clone() {
                self.touch(other);
                self.soil(other);
            }
        }
    }

    /// The rate of work, which is 1 if it runs alone, and its rate if it shared no pool.
    fn rate(&self, s: usize, kind: WorkKind) -> (f64, f64) {
        let stage = &self.stages[s];
        let contention = &self.machine.contention;
        let alone = match kind {
            WorkKind::Device if !stage.moving.is_empty() => 1.0 / (1.0 + contention.kernels.value),
            WorkKind::Exchange if stage.is_computing() => 1.0 / (1.0 + contention.exchanges.value),
            _ => 1.0,
        };
        let used = self.pool(s, kind).map_or(0.0, |share| self.clusters[stage.cluster].used[share.pool]);
        (alone / used.max(1.0), alone)
    }

    fn rerate(&mut self, s: usize) {
        for k in 0..STREAMS {
            let Some(kind) = self.stages[s].ops[k].as_ref().map(|op| op.kind) else { continue };
            let (rate, alone) = self.rate(s, kind);
            let generation = self.stages[s].generation();
            let op = self.stages[s].ops[k].as_mut().expect("invariant: it is under way");
            if op.rate != rate || op.alone != alone {
                (op.rate, op.alone, op.generation) = (rate, alone, generation);
                self.due.push(Reverse(EndEvent { time: self.now + op.left.max(0.0) / rate, op: s * STREAMS + k, generation }));
            }
        }
    }
}
