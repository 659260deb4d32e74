//! How a pipeline's schedule spends its time and memory, counted from the compiled programs.
//!
//! The calls of all stages are played through the sends and receives of the programs: a call begins when its stage is free and all its messages
//! are there, and takes as long as its kind. Messages and what is outside of the passes take no time. So a bubble is what the programs make
//! of a schedule, not what its author had in mind.

use crate::commands::liveness::lifetimes;
use ir::pipeline::PassOrder;
use ir::program::{Action, BodyKind, Call, Channel, Job, Program, ProgramBody, Stash};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// How long passes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassTimes {
    /// Time of a forward pass, in any unit.
    pub forward: u64,
    /// Time of a backward pass without gradients of weights.
    pub backward: u64,
    /// Of gradients of weights; where they have no pass of their own, a backward pass takes as much longer.
    pub weight: u64,
}

/// All passes take equally long.
pub const UNIT: PassTimes = PassTimes { forward: 1, backward: 1, weight: 1 };

/// A step as its stages spend it.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The times of passes that it was played with.
    pub costs: PassTimes,
    /// Whether gradients of weights have passes of their own.
    pub splits: bool,
    /// One for each pipeline stage, in order.
    pub stages: Vec<StageTime>,
    /// From the first pass to the last.
    pub length: u64,
}

/// How a stage spends a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTime {
    /// Forward passes before the first backward pass.
    pub warmup: u64,
    /// Time in passes.
    pub busy: u64,
    /// Time between the first pass and the last in none.
    pub idle: u64,
    /// The most that is kept at a time of what forward passes leave, in units of what those of one microbatch leave on the stage.
    pub in_flight: f64,
    /// All passes that take time, in the order in which they begin.
    pub passes: Vec<PassTime>,
}

/// When a stage runs a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassTime {
    /// Forward, backward or gradients of weights, with the virtual stage.
    pub kind: BodyKind,
    /// From 0, within the step.
    pub microbatch: u32,
    /// When it begins, in the unit of [`PassTimes`].
    pub begin: u64,
    /// How long it takes, in the unit of [`PassTimes`].
    pub takes: u64,
}

impl Timeline {
    /// The bubble, relative to the time of the passes: of the stage where it is greatest.
    pub fn bubble(&self) -> f64 {
        let share = |s: &StageTime| if s.busy == 0 { 0.0 } else { s.idle as f64 / s.busy as f64 };
        self.stages.iter().map(share).fold(0.0, f64::max)
    }

    /// The passes as a file of a schedule, with what they cost as comments.
    pub fn text(&self, order: &PassOrder) -> String {
        let mut out = format!("# takes {}, with a bubble of {:.1} % of the work, where {}\n", self.length, 100.0 * self.bubble(), self.assumed());
        for (k, s) in self.stages.iter().enumerate() {
            out.push_str(&format!("# stage {k}: {s}, idle for {} of {}\n", s.idle, s.idle + s.busy));
        }
        out + &order.text()
    }

    fn assumed(&self) -> String {
        let PassTimes { forward, backward, weight } = self.costs;
        match self.splits {
            true => format!("a forward pass takes {forward}, a backward pass {backward}, gradients of weights {weight}"),
            false => format!("a forward pass takes {forward}, a backward pass {}", backward + weight),
        }
    }
}

/// For the compile table.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bubble {:.1} % of the work, where {}", 100.0 * self.bubble(), self.assumed())?;
        let mut ends = self.stages.iter().enumerate().filter(|(k, _)| *k == 0 || k + 1 == self.stages.len());
        ends.try_for_each(|(k, s)| write!(f, "; stage {k}: {s}"))
    }
}

impl fmt::Display for StageTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: u64| if n == 1 { "" } else { "es" };
        write!(f, "{} forward pass{} before the first backward pass, {:.1} microbatches in flight", self.warmup, plural(self.warmup), self.in_flight)
    }
}

/// The messages that a part of a body receives and sends, as hops and channel.
struct Exchanges {
    received: Vec<(i64, Channel)>,
    sent: Vec<(i64, Channel)>,
}

impl Exchanges {
    fn of(body: &ProgramBody, part: u32) -> Exchanges {
        let commands = &body.commands[body.part(part)];
        let received = commands.iter().filter_map(|c| if let Action::Recv { hops, channel, .. } = c.action { Some((hops, channel)) } else { None });
        let sent = commands.iter().filter_map(|c| if let Action::Send { hops, channel, .. } = c.action { Some((hops, channel)) } else { None });
        Exchanges { received: received.collect(), sent: sent.collect() }
    }
}

/// The training step of a job. A verified one does not get stuck; of another, what comes before it does.
pub fn timeline(job: &Job, costs: PassTimes) -> Timeline {
    let splits = job.programs.iter().flat_map(|p| &p.bodies).any(|b| matches!(b.kind, BodyKind::Weight(_)));
    let cost = |kind: BodyKind| match kind {
        BodyKind::Forward(_) => costs.forward,
        BodyKind::Backward(_) if splits => costs.backward,
        BodyKind::Backward(_) => ir::fault!("report.timeline.weight", costs.backward, costs.backward + costs.weight),
        BodyKind::Weight(_) => costs.weight,
        BodyKind::Prologue | BodyKind::Reduce | BodyKind::Update => 0,
    };
    let of_body = |b: &ProgramBody| (0..b.parts()).map(|part| Exchanges::of(b, part)).collect();
    let exchanges: Vec<Vec<Vec<Exchanges>>> = job.programs.iter().map(|p| p.bodies.iter().map(of_body).collect()).collect();
    let mut playing: Vec<StageReplay> =
        job.stages.iter().map(|s| StageReplay { calls: &s.schedule.train, at: 0, passes: vec![], now: 0, busy: 0 }).collect();
    // `messages` holds the arrival times of messages under way. A body receives at most one message of a channel.
    let mut messages: BTreeMap<(i64, i64, Channel), VecDeque<u64>> = BTreeMap::new();
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (s, stage) in playing.iter_mut().enumerate() {
            let class = job.stages[s].program as usize;
            let s = s as i64;
            while let Some(call) = stage.calls.get(stage.at) {
                let Exchanges { received, sent } = &exchanges[class][call.body.index()][call.part as usize];
                let arrival = |(hops, channel): &(i64, Channel)| messages.get(&(s + hops, s, *channel))?.front().copied();
                let Some(arrived) = received.iter().map(arrival).collect::<Option<Vec<u64>>>() else { break };
                for (hops, channel) in received {
                    messages.get_mut(&(s + hops, s, *channel)).and_then(VecDeque::pop_front);
                }
                let begin = arrived.into_iter().fold(stage.now, u64::max);
                // A pass takes all its time at its first part, and none at the others.
                let kind = job.programs[class].bodies[call.body.index()].kind;
                let takes = if call.part == 0 { cost(kind) } else { 0 };
                if takes > 0 {
                    stage.passes.push(PassTime { kind, microbatch: call.microbatch, begin, takes });
                }
                if takes > 0 || call.part > 0 {
                    (stage.now, stage.busy) = (begin + takes, stage.busy + takes);
                }
                for (hops, channel) in sent {
                    messages.entry((s, s + hops, *channel)).or_default().push_back(ir::fault!("report.timeline.arrival", begin, begin + takes));
                }
                stage.at += 1;
                moved = true;
            }
        }
    }
    let length = playing.iter().map(|p| p.now).max().unwrap_or(0);
    let stages = playing.into_iter().zip(&job.stages).map(|(played, stage)| {
        let program = &job.programs[stage.program as usize];
        let kinds = played.calls.iter().filter(|c| c.part == 0).map(|c| program.bodies[c.body.index()].kind);
        let warmup = kinds.take_while(|k| !matches!(k, BodyKind::Backward(_))).filter(|k| matches!(k, BodyKind::Forward(_))).count();
        StageTime {
            warmup: warmup as u64,
            busy: played.busy,
            idle: played.now - ir::fault!("report.timeline.first", 0, played.passes.first().map_or(0, |p| p.begin)) - played.busy,
            in_flight: in_flight(program, played.calls),
            passes: played.passes,
        }
    });
    Timeline { costs, splits, stages: stages.collect(), length }
}

/// The position of a stage within its calls.
struct StageReplay<'a> {
    calls: &'a [Call],
    at: usize,
    /// The passes that have begun.
    passes: Vec<PassTime>,
    now: u64,
    busy: u64,
}

/// The most bytes that microbatches have in the stashes of forward passes at a time, over those of one.
fn in_flight(program: &Program, calls: &[Call]) -> f64 {
    let mut bytes = vec![0i128; calls.len() + 1];
    let mut one = 0;
    for (lives, Stash { bytes: size, .. }) in lifetimes(program, calls).iter().zip(&program.stashes) {
        // Stashes of messages do not count, since they only wait for their pass.
        let is_forward = |call: usize| matches!(program.bodies[calls[call].body.index()].kind, BodyKind::Forward(_));
        if !lives.iter().all(|life| is_forward(life.first) && !is_forward(life.last)) {
            continue;
        }
        one += if lives.is_empty() { 0 } else { *size };
        for life in lives {
            bytes[life.first] += i128::from(*size);
            bytes[ir::fault!("report.timeline.last", life.last, life.last + 1)] -= i128::from(*size);
        }
    }
    let mut now = 0;
    let most = bytes.iter().map(|change| {
        now += change;
        now
    });
    let most = most.max().unwrap_or(0);
    if one == 0 { 0.0 } else { most as f64 / one as f64 }
}
