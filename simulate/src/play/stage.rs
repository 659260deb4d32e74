//! Where a stage is in the play.

use super::exchanges::Queue;
use super::{Mark, STREAMS};
use crate::cost::Cost;
use crate::tape::{Kind, StageTape, Tape};
use ir::program::{CallSchedule, Job, ProgramPhase, Stream};
use serde::Serialize;

/// Seconds of a step of a stage's rank, by what its compute stream does meanwhile: they add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
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

impl Spent {
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
    pub fn add(&mut self, other: &Spent, part: f64) {
        let Spent { kernels, exchanges, copies, disk, host, wakes, gaps, bubble } = self;
        let all = [kernels, exchanges, copies, disk, host, wakes, gaps, bubble];
        all.into_iter().zip(other.named()).for_each(|(to, (_, x))| *to += part * x);
    }
}

/// The same, with what of exchanges it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Seconds of the step, by what the compute stream does.
    pub spent: Spent,
    /// The seconds of `spent.exchanges`, by the stage's exchanges.
    pub exposed: Vec<f64>,
}

/// A part of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub pool: usize,
    pub part: f64,
}

/// Something under way.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub kind: Kind,
    /// If it were alone.
    pub seconds: f64,
    pub cost: Cost,
    /// When it began.
    pub mark: Mark,
    /// Of `seconds`.
    pub left: f64,
    pub rate: f64,
    /// That, but for what shares of pools make of it.
    pub alone: f64,
    /// Seconds so far that are due to itself and to those with whom it shares; the others, to what else is under way.
    pub own: f64,
    pub generation: u32,
    /// Stages and exchanges of theirs that it is.
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
    /// Of all steps: even ones are training passes, odd ones updates.
    pub phase: usize,
    pub call: usize,
    pub item: usize,
    pub state: State,
    pub mark: Mark,
    /// Of each event, records that were issued before the call.
    pub issued: Vec<u32>,
    /// Exchanges of the phase before the call: those that are no sends.
    pub others: u32,
}

impl StreamPlay {
    pub fn next_call(&mut self, tape: &Tape) {
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
    pub ops: [Option<Op>; STREAMS],
    /// Exchanges that are under way.
    pub moving: Vec<u32>,
    pub reached: Vec<u32>,
    pub phase: usize,
    /// Whether the host looks at reports.
    pub closing: bool,
    pub queue: Queue,
    pub cluster: usize,
    /// Its ranks that share a machine.
    pub neighbours: u64,
    pub dirty: bool,
    /// When its clock was brought forward last.
    clock: f64,
    generations: u32,
    times: Times,
    /// Of each step that has ended: when, and what it was spent on.
    pub ended: Vec<(Mark, Times)>,
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
            times: Times { exposed: vec![0.0; tape.exchanges.len()], ..Times::default() },
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
        self.ops.iter().flatten().any(|op| op.kind == Kind::Device)
    }

    /// Brings its clock to `now`.
    pub fn touch(&mut self, now: f64) {
        let passed = now - self.clock;
        if passed <= 0.0 {
            return;
        }
        self.clock = now;
        let has = |kind: Kind| self.ops.iter().flatten().any(|op| op.kind == kind);
        let times = &mut self.times.spent;
        let exposed = &mut self.times.exposed;
        let spent = if has(Kind::Device) {
            &mut times.kernels
        } else if !self.moving.is_empty() {
            let each = passed / self.moving.len() as f64;
            self.moving.iter().for_each(|e| exposed[*e as usize] += each);
            &mut times.exchanges
        } else if has(Kind::Copy) {
            &mut times.copies
        } else if has(Kind::Disk) {
            &mut times.disk
        } else if has(Kind::Host) {
            &mut times.host
        } else if has(Kind::Wake) {
            &mut times.wakes
        } else if has(Kind::Gap) {
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
            let fresh = Times { exposed: vec![0.0; self.times.exposed.len()], ..Times::default() };
            self.ended.push((mark, std::mem::replace(&mut self.times, fresh)));
        }
    }
}
