//! Where a stage is in the play.

use super::exchanges::Queue;
use super::{Mark, STREAMS};
use crate::cost::Cost;
use crate::tape::{PartTape, StageTape, WorkKind};
use ir::program::{CallSchedule, Job, ProgramPhase, Stream};
use serde::Serialize;

/// Seconds of a step of a stage's rank, by what its compute stream does meanwhile: they add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeBreakdown {
    /// The device is at work: kernels, and fills of buffers.
    pub kernels: f64,
    /// Nothing is computed, and an exchange, a copy, a disk or the host is at work.
    pub exchanges: f64,
    /// A copy is under way, with no device kernel or exchange.
    pub copies: f64,
    /// A disk is at work, with no device kernel, exchange or copy.
    pub disk: f64,
    /// Kernels of the host run, with no device kernel, exchange, copy or disk at work.
    pub host: f64,
    /// A thread of a rank on CPUs wakes up.
    pub wakes: f64,
    /// The host looks at the reports.
    pub gaps: f64,
    /// The rank waits for other stages.
    pub bubble: f64,
}

impl TimeBreakdown {
    /// Each part with its name.
    pub fn named(&self) -> [(&'static str, f64); 8] {
        [
            ("kernels", self.kernels),
            ("exchanges", self.exchanges),
            ("copies", self.copies),
            ("disk", self.disk),
            ("host", self.host),
            ("threads that wake up", self.wakes),
            ("between phases", self.gaps),
            ("bubble", self.bubble),
        ]
    }

    /// Adds a part of another one.
    pub fn add(&mut self, other: &TimeBreakdown, part: f64) {
        let TimeBreakdown { kernels, exchanges, copies, disk, host, wakes, gaps, bubble } = self;
        let all = [kernels, exchanges, copies, disk, host, wakes, gaps, bubble];
        all.into_iter().zip(other.named()).for_each(|(to, (_, x))| *to += part * x);
    }
}

/// The same, with what of exchanges it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// Seconds of the step, by what the compute stream does.
    pub spent: TimeBreakdown,
    /// The seconds of `spent.exchanges`, by the stage's exchanges.
    pub exposed: Vec<f64>,
}

/// A part of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolShare {
    pub pool: usize,
    pub part: f64,
}

/// Something under way.
#[derive(Clone, Debug)]
pub(super) struct RunningOp {
    pub kind: WorkKind,
    /// Seconds that it would take alone.
    pub seconds: f64,
    pub cost: Cost,
    /// The time at which it began.
    pub mark: Mark,
    /// The part of `seconds` that is left.
    pub left: f64,
    /// The seconds of `left` that pass in a second.
    pub rate: f64,
    /// The rate that it would have if it shared no pool.
    pub alone: f64,
    /// Seconds so far that are due to itself and to those with whom it shares a pool. The others are due to what else
    /// is under way.
    pub own: f64,
    pub generation: u32,
    /// The stages and the exchanges of theirs that it is.
    pub parties: Vec<(usize, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    Busy,
    Waits { event: u32, count: u32 },
    Exchanges,
    AtEnd,
}

#[derive(Clone, Debug)]
pub(super) struct StreamPlay {
    /// The number of the phase, over all steps: even ones are training passes, odd ones updates.
    pub phase: usize,
    pub call: usize,
    pub item: usize,
    pub state: State,
    pub mark: Mark,
    /// For each event, the number of records that were issued before the call.
    pub issued: Vec<u32>,
    /// The number of exchanges of the phase before the call that are no sends.
    pub others: u32,
}

impl StreamPlay {
    pub fn next_call(&mut self, tape: &PartTape) {
        tape.records.iter().for_each(|(event, count)| self.issued[*event as usize] += count);
        (self.call, self.item, self.others) = (self.call + 1, 0, self.others + tape.others);
    }

    pub fn next_phase(&mut self) {
        (self.phase, self.call, self.item, self.others) = (self.phase + 1, 0, 0, 0);
    }
}

#[derive(Clone, Debug)]
pub(super) struct StagePlay {
    pub streams: Vec<StreamPlay>,
    is_used: [bool; STREAMS],
    pub ops: [Option<RunningOp>; STREAMS],
    /// Exchanges that are under way.
    pub moving: Vec<u32>,
    pub reached: Vec<u32>,
    pub phase: usize,
    /// Whether the host looks at reports.
    pub closing: bool,
    pub queue: Queue,
    pub cluster: usize,
    /// The number of its ranks that share a machine.
    pub neighbours: u64,
    pub dirty: bool,
    /// The time up to which its seconds are counted.
    clock: f64,
    generations: u32,
    times: StageTimes,
    /// For each step that has ended: the time, and what it was spent on.
    pub ended: Vec<(Mark, StageTimes)>,
}

impl StagePlay {
    pub fn new(job: &Job, s: usize, tape: &StageTape, cluster: usize, neighbours: u64) -> StagePlay {
        let has_items = |k: usize| tape.tapes.iter().flatten().any(|t| !t.streams[k].is_empty());
        let issued = vec![0; tape.events];
        let stream = StreamPlay { phase: 0, call: 0, item: 0, state: State::Ready, mark: Mark::default(), issued, others: 0 };
        StagePlay {
            streams: vec![stream; STREAMS],
            is_used: std::array::from_fn(|k| k == Stream::Compute as usize || has_items(k)),
            ops: std::array::from_fn(|_| None),
            moving: vec![],
            reached: vec![0; tape.events],
            phase: 0,
            closing: false,
            queue: Queue::new(&job.stages[s].schedule, ProgramPhase::Train, tape, Mark::default()),
            cluster,
            neighbours,
            dirty: false,
            clock: 0.0,
            generations: 0,
            times: StageTimes { exposed: vec![0.0; tape.exchanges.len()], ..StageTimes::default() },
            ended: vec![],
        }
    }

    pub fn kind(phase: usize) -> ProgramPhase {
        if phase.is_multiple_of(2) { ProgramPhase::Train } else { ProgramPhase::Update }
    }

    /// Streams that have something to do.
    pub fn used(&self) -> impl Iterator<Item = usize> + use<> {
        let is_used = self.is_used;
        (0..STREAMS).filter(move |k| is_used[*k])
    }

    pub fn generation(&mut self) -> u32 {
        self.generations += 1;
        self.generations
    }

    pub fn is_computing(&self) -> bool {
        self.ops.iter().flatten().any(|op| op.kind == WorkKind::Device)
    }

    /// Brings its clock to `now`.
    pub fn touch(&mut self, now: f64) {
        let passed = now - self.clock;
        if passed <= 0.0 {
            return;
        }
        self.clock = now;
        let has = |kind: WorkKind| self.ops.iter().flatten().any(|op| op.kind == kind);
        let times = &mut self.times.spent;
        let exposed = &mut self.times.exposed;
        let spent = if has(WorkKind::Device) {
            &mut times.kernels
        } else if !self.moving.is_empty() {
            let each = passed / self.moving.len() as f64;
            self.moving.iter().for_each(|e| exposed[*e as usize] += each);
            &mut times.exchanges
        } else if has(WorkKind::Copy) {
            &mut times.copies
        } else if has(WorkKind::Disk) {
            &mut times.disk
        } else if has(WorkKind::Host) {
            &mut times.host
        } else if has(WorkKind::Wake) {
            &mut times.wakes
        } else if has(WorkKind::Gap) {
            &mut times.gaps
        } else {
            &mut times.bubble
        };
        *spent += passed;
        for op in self.ops.iter_mut().flatten() {
            (op.left, op.own) = (op.left - passed * op.rate, op.own + passed * op.alone);
        }
    }

    pub fn next_phase(&mut self, schedule: &CallSchedule, tape: &StageTape, mark: Mark) {
        (self.phase, self.closing) = (self.phase + 1, false);
        self.queue = Queue::new(schedule, StagePlay::kind(self.phase), tape, mark);
        if self.phase.is_multiple_of(2) {
            let fresh = StageTimes { exposed: vec![0.0; self.times.exposed.len()], ..StageTimes::default() };
            self.ended.push((mark, std::mem::replace(&mut self.times, fresh)));
        }
    }
}
