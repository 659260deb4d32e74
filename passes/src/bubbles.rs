//! How a pipeline's schedule spends its time and memory, counted from the compiled programs.
//!
//! The calls of all stages are played through the sends and receives of the programs: a call begins when its stage is free and all its messages
//! are there, and takes as long as its kind. Messages and what is outside of the passes take no time. So a bubble is what the programs make
//! of a schedule, not what its author had in mind.

use crate::lower::buffers_of;
use ir::program::{Action, Arena, BodyKind, Call, Channel, Job, Program};
use std::collections::{BTreeMap, VecDeque};

/// How long passes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    pub forward: u64,
    pub backward: u64,
    /// Of gradients of weights; where they have no pass of their own, a backward pass takes as much longer.
    pub weight: u64,
}

/// All passes take equally long.
pub const UNIT: Costs = Costs { forward: 1, backward: 1, weight: 1 };

/// A step as its stages spend it.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    pub stages: Vec<StageTime>,
    /// From the first pass to the last.
    pub length: u64,
}

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
}

impl Timeline {
    /// The bubble, relative to the time of the passes: of the stage where it is greatest.
    pub fn bubble(&self) -> f64 {
        let share = |s: &StageTime| if s.busy == 0 { 0.0 } else { s.idle as f64 / s.busy as f64 };
        self.stages.iter().map(share).fold(0.0, f64::max)
    }
}

/// The training step of a job. A verified one does not get stuck; of another, what comes before it does.
pub fn timeline(job: &Job, costs: Costs) -> Timeline {
    let splits = job.programs.iter().flat_map(|p| &p.bodies).any(|b| matches!(b.kind, BodyKind::Weight(_)));
    let cost = |kind: BodyKind| match kind {
        BodyKind::Forward(_) => costs.forward,
        BodyKind::Backward(_) if splits => costs.backward,
        BodyKind::Backward(_) => costs.backward + costs.weight,
        BodyKind::Weight(_) => costs.weight,
        BodyKind::Prologue | BodyKind::Reduce | BodyKind::Update => 0,
    };
    let mut playing: Vec<Playing> = job.stages.iter().map(|s| Playing { calls: &s.schedule.train, at: 0, first: None, now: 0, busy: 0 }).collect();
    // When messages under way arrive.
    let mut messages: BTreeMap<(i64, i64, Channel), VecDeque<u64>> = BTreeMap::new();
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (s, stage) in playing.iter_mut().enumerate() {
            let program = &job.programs[job.stages[s].program as usize];
            let s = s as i64;
            while let Some(call) = stage.calls.get(stage.at) {
                let body = &program.bodies[call.body.index()];
                let mut wanted: BTreeMap<(i64, i64, Channel), usize> = BTreeMap::new();
                for command in &body.commands {
                    if let Action::Recv { hops, channel, .. } = command.action {
                        *wanted.entry((s + hops, s, channel)).or_default() += 1;
                    }
                }
                if wanted.iter().any(|(key, n)| messages.get(key).is_none_or(|queue| queue.len() < *n)) {
                    break;
                }
                let mut begin = stage.now;
                for (key, n) in wanted {
                    let arrived = messages.get_mut(&key).into_iter().flat_map(|queue| queue.drain(..n));
                    begin = arrived.fold(begin, u64::max);
                }
                let takes = cost(body.kind);
                if takes > 0 {
                    stage.first.get_or_insert(begin);
                    (stage.now, stage.busy) = (begin + takes, stage.busy + takes);
                }
                for command in &body.commands {
                    if let Action::Send { hops, channel, .. } = command.action {
                        messages.entry((s, s + hops, channel)).or_default().push_back(begin + takes);
                    }
                }
                stage.at += 1;
                moved = true;
            }
        }
    }
    let length = playing.iter().map(|p| p.now).max().unwrap_or(0);
    let stages = playing.iter().zip(&job.stages).map(|(played, stage)| {
        let program = &job.programs[stage.program as usize];
        let kinds = played.calls.iter().map(|c| program.bodies[c.body.index()].kind);
        let warmup = kinds.take_while(|k| !matches!(k, BodyKind::Backward(_))).filter(|k| matches!(k, BodyKind::Forward(_))).count();
        StageTime {
            warmup: warmup as u64,
            busy: played.busy,
            idle: played.now - played.first.unwrap_or(0) - played.busy,
            in_flight: in_flight(program, played.calls),
        }
    });
    Timeline { stages: stages.collect(), length }
}

/// A stage on its way through its calls.
struct Playing<'a> {
    calls: &'a [Call],
    at: usize,
    /// When its first pass begins.
    first: Option<u64>,
    now: u64,
    busy: u64,
}

/// A microbatch in a stash: the first and the last of the calls that touch it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    pub first: usize,
    pub last: usize,
    pub microbatch: u32,
}

/// For each stash of a program, the lives of microbatches in it, in the order in which they begin.
pub fn lives(program: &Program, calls: &[Call]) -> Vec<Vec<Life>> {
    let mut touches = vec![vec![false; program.stashes.len()]; program.bodies.len()];
    for (body, touches) in program.bodies.iter().zip(&mut touches) {
        let buffers = body.commands.iter().flat_map(|c| buffers_of(&c.action));
        for buffer in buffers.map(|id| &program.buffers[id.index()]).filter(|b| b.arena == Arena::Stash) {
            let (k, _) = program.stash(buffer).expect("invariant: a buffer of the stash arena is in a stash");
            touches[k] = true;
        }
    }
    let of_stash = |stash: usize| {
        let mut lives: BTreeMap<u32, Life> = BTreeMap::new();
        for (at, call) in calls.iter().enumerate().filter(|(_, call)| touches[call.body.index()][stash]) {
            lives.entry(call.microbatch).or_insert(Life { first: at, last: at, microbatch: call.microbatch }).last = at;
        }
        let mut lives: Vec<Life> = lives.into_values().collect();
        lives.sort_unstable();
        lives
    };
    (0..program.stashes.len()).map(of_stash).collect()
}

/// The most bytes that microbatches have in the stashes of forward passes at a time, over those of one.
fn in_flight(program: &Program, calls: &[Call]) -> f64 {
    let mut bytes = vec![0i128; calls.len() + 1];
    let mut one = 0;
    for (lives, size) in lives(program, calls).iter().zip(&program.stashes) {
        let forward = |life: &Life| matches!(program.bodies[calls[life.first].body.index()].kind, BodyKind::Forward(_));
        if !lives.iter().all(forward) {
            continue;
        }
        one += if lives.is_empty() { 0 } else { *size };
        for life in lives {
            bytes[life.first] += i128::from(*size);
            bytes[life.last + 1] -= i128::from(*size);
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
