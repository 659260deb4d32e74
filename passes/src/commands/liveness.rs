//! What lives when: a stash from a command of one call to one of another, a temporary buffer from command to command of
//! a call.

use crate::commands::best_fit::{LiveRange, Span};
use crate::commands::runs::CallRuns;
use crate::commands::stash_slots;
use crate::commands::streams::messages;
use ir::program::{Action, Arena, Buffer, BufferId, Call, CallSchedule, Command, Program, ProgramPhase, Space, Stream};
use std::collections::{BTreeMap, BTreeSet};

/// A microbatch in a stash: the first and the last of the calls that touch it there, of all parts of their bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StashLifetime {
    /// Index of the first call, in the list of calls.
    pub first: usize,
    /// Index of the last call, inclusive.
    pub last: usize,
    /// The microbatch, as calls number it.
    pub microbatch: u32,
}

/// For each stash of a program, the lives of microbatches in it, in the order in which they begin.
pub fn lifetimes(program: &Program, calls: &[Call]) -> Vec<Vec<StashLifetime>> {
    let mut touches: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); program.bodies.len()];
    for (body, touches) in program.bodies.iter().zip(&mut touches) {
        let buffers = body.commands.iter().flat_map(|c| c.buffers());
        for buffer in buffers.map(|id| &program.buffers[id.index()]).filter(|b| b.arena.is_stash()) {
            // A stash beyond addressable memory is not found; that is the user's error, reported for the whole job.
            if let Some((k, _)) = program.stash(buffer) {
                touches.insert(k);
            }
        }
    }
    let mut lives: Vec<BTreeMap<u32, StashLifetime>> = vec![BTreeMap::new(); program.stashes.len()];
    for (at, call) in calls.iter().enumerate() {
        // Parts between the first and the last do not change a lifetime.
        let last = call.part + 1 == program.bodies[call.body.index()].parts();
        if !(call.part == 0 || ir::fault!("liveness.parts.first", false, last)) {
            continue;
        }
        for stash in &touches[call.body.index()] {
            lives[*stash].entry(call.microbatch).or_insert(StashLifetime { first: at, last: at, microbatch: call.microbatch }).last = at;
        }
    }
    let in_order = |lives: BTreeMap<u32, StashLifetime>| {
        let mut lives: Vec<StashLifetime> = lives.into_values().collect();
        lives.sort_unstable();
        lives
    };
    lives.into_iter().map(in_order).collect()
}

/// Of each stash, whether messages are in it.
pub fn of_messages(program: &Program) -> Vec<bool> {
    let mut is_message = vec![false; program.stashes.len()];
    for id in messages(program) {
        if let Some((k, _)) = program.stash(&program.buffers[id.index()]) {
            is_message[k] = true;
        }
    }
    is_message
}

/// What lives in the temporary arena of a stage in one memory, and when. Runs of the same calls in a phase are
/// taken as one ([`CallRuns`]): the moments are those of one kind of run after the other, phase by phase.
pub struct ArenaLiveness {
    /// Each temporary buffer that a call uses, with its bytes and moments.
    pub temporary: BTreeMap<BufferId, LiveRange>,
    /// Of each stash, all slots; no spans if no call touches it, or it is in another memory.
    pub stashes: Vec<LiveRange>,
    /// The first moment of each call, ascending, with its phase, its body and its first command.
    begins: Vec<(usize, ProgramPhase, usize, usize)>,
}

impl ArenaLiveness {
    /// A slot of a stash is in use from the first command that touches it for a microbatch to the last one. One of
    /// messages is from the first call of all to the last one: a message may come and go while other calls run, and
    /// these are not to wait for it.
    pub fn of_stage(program: &Program, schedule: &CallSchedule, space: Space) -> ArenaLiveness {
        let is_message = of_messages(program);
        let all = |k: usize| program.stashes[k].bytes.saturating_mul(u64::from(schedule.slots[k].count));
        let mut out = ArenaLiveness {
            temporary: BTreeMap::new(),
            stashes: (0..program.stashes.len()).map(|k| LiveRange { bytes: all(k), spans: vec![] }).collect(),
            begins: vec![],
        };
        let mut next = 0;
        for phase in ProgramPhase::ALL {
            let calls = schedule.calls(phase);
            let runs = CallRuns::of(program, calls);
            let (mut begins, mut touched) = (vec![], BTreeMap::new());
            for first in &runs.kinds {
                for (id, need) in temporaries_of_run(space.temporary(), program, &runs, *first) {
                    let known = out.temporary.entry(id).or_insert(LiveRange { bytes: need.bytes, spans: vec![] });
                    known.spans.extend(need.spans.iter().map(|(from, to)| (next + from, next + to)));
                }
                for (_, b) in runs.bodies(*first) {
                    touched.entry(b).or_insert_with(|| stashed(program, &program.bodies[b].commands));
                }
                begins.push(next);
                out.begins.extend(runs.parts(*first).map(|(at, body, command)| (next + at, phase, body, command)));
                next += runs.list[*first].moments;
            }
            let here = |(k, _): &(usize, Vec<StashLifetime>)| program.stashes[*k].space == space;
            for (k, mut lives) in lifetimes(program, calls).into_iter().enumerate().filter(here) {
                if is_message[k] {
                    lives = joined(&lives).into_iter().collect();
                }
                let mut used: BTreeMap<usize, Span> = BTreeMap::new();
                for life in lives {
                    let own = |c: usize| touched[&calls[c].body.index()].get(&k).filter(|_| !is_message[k]);
                    let (begin, end) = (runs.run(life.first), runs.run(life.last));
                    for (r, run) in runs.list.iter().enumerate().take(end + 1).skip(begin) {
                        let from = own(life.first).filter(|_| r == ir::fault!("liveness.stash.first", end, begin));
                        let from = from.map_or(0, |s| runs.moment(life.first, s.0));
                        let to = own(life.last).filter(|_| r == ir::fault!("liveness.stash.last", begin, end));
                        let to = to.map_or(run.moments - 1, |s| runs.moment(life.last, s.1));
                        let span = used.entry(run.kind).or_insert((from, to));
                        *span = (span.0.min(from), span.1.max(to));
                    }
                }
                out.stashes[k].spans.extend(used.iter().map(|(kind, (from, to))| (begins[*kind] + from, begins[*kind] + to)));
            }
        }
        out
    }

    /// The phase, the body and the command of a moment. (One past the last command is the end of a call.)
    pub fn at(&self, moment: usize) -> (ProgramPhase, usize, usize) {
        let (begin, phase, body, command) = self.begins[self.begins.partition_point(|b| b.0 <= moment) - 1];
        (phase, body, command + moment - begin)
    }
}

/// One life from the first of these calls to the last one.
fn joined(lives: &[StashLifetime]) -> Option<StashLifetime> {
    let first = lives.first()?;
    Some(StashLifetime { last: lives.iter().map(|life| life.last).max()?, ..*first })
}

/// Buffers stashed on the device that all schedules of a program keep for one microbatch at a time. What a body does
/// with the memory of one before it is written there, and after its last use, is its own matter, before there are
/// places.
pub struct SingleSlotBuffers {
    /// The buffers that are kept so, none of which holds messages.
    pub singly: BTreeSet<BufferId>,
    /// Per body and buffer, whether its content comes from an earlier call, and whether a later one needs it.
    passes: Vec<BTreeMap<BufferId, (bool, bool)>>,
}

impl SingleSlotBuffers {
    /// Finds them, with stashes laid out for the schedules in a copy of the program.
    pub fn of(program: &Program, schedules: &[&CallSchedule]) -> SingleSlotBuffers {
        let mut laid = program.clone();
        let messages = stash_slots::lay_out(&mut laid, schedules);
        let single = stash_slots::single(&laid, schedules);
        let stash_of = |id: &BufferId| laid.stash(&laid.buffers[id.index()]).map(|s| s.0);
        let stashed = (0..laid.buffers.len() as u32).map(BufferId).filter(|id| laid.buffers[id.index()].arena == Arena::Stash);
        let owners: BTreeMap<usize, BufferId> =
            stashed.filter_map(|id| Some((stash_of(&id)?, id))).filter(|s| single[s.0] && !messages[s.0]).collect();
        let mut passes: Vec<BTreeMap<BufferId, (bool, bool)>> = vec![BTreeMap::new(); laid.bodies.len()];
        for calls in schedules.iter().flat_map(|s| ProgramPhase::ALL.map(|phase| s.calls(phase))) {
            for (k, lives) in lifetimes(&laid, calls).into_iter().enumerate() {
                let Some(id) = owners.get(&k) else { continue };
                for life in lives {
                    for (c, call) in calls.iter().enumerate().take(life.last + 1).skip(life.first) {
                        let (before, behind) = passes[call.body.index()].entry(*id).or_default();
                        (*before, *behind) = (*before || c > life.first, *behind || c < life.last);
                    }
                }
            }
        }
        SingleSlotBuffers { singly: owners.into_values().collect(), passes }
    }

    /// When a body has something in each, its commands in this order.
    pub fn needs(&self, program: &Program, body: usize, commands: &[Command]) -> Vec<LiveRange> {
        let used = uses(program, commands, |b| b.arena == Arena::Stash);
        let need = |(id, (before, behind)): (&BufferId, &(bool, bool))| {
            let (first, last) = used.get(id).copied().unwrap_or((0, commands.len()));
            let (first, last) = (if *before { 0 } else { first }, if *behind { commands.len() } else { last });
            LiveRange::new(program.buffers[id.index()].bytes(), first, last)
        };
        self.passes[body].iter().map(need).collect()
    }

    /// Whether a body finds something in a buffer, and whether it leaves something there.
    pub fn passes(&self, body: usize, id: BufferId) -> (bool, bool) {
        self.passes[body].get(&id).copied().unwrap_or_default()
    }
}

/// Temporary buffers of a body in this arena and how long they live ([`uses`]).
pub fn temporaries(arena: Arena, program: &Program, commands: &[Command]) -> (Vec<BufferId>, Vec<LiveRange>) {
    let uses = uses(program, commands, |b| b.arena == arena);
    let needs = uses.iter().map(|(id, (first, last))| LiveRange::new(program.buffers[id.index()].bytes(), *first, *last)).collect();
    (uses.into_keys().collect(), needs)
}

/// Temporary buffers of the bodies of a run in this arena, and how long they live there.
pub fn temporaries_of_run(arena: Arena, program: &Program, runs: &CallRuns, run: usize) -> Vec<(BufferId, LiveRange)> {
    let of_body = |(call, body): (usize, usize)| {
        let moment = move |command: &usize| runs.moment(call, *command);
        let uses = uses(program, &program.bodies[body].commands, |b| b.arena == arena);
        uses.into_iter().map(move |(id, (first, last))| (id, LiveRange::new(program.buffers[id.index()].bytes(), moment(&first), moment(&last))))
    };
    runs.bodies(run).flat_map(of_body).collect()
}

/// The stashes that a body touches, and from which command to which ([`uses`]).
pub fn stashed(program: &Program, commands: &[Command]) -> BTreeMap<usize, Span> {
    let mut out: BTreeMap<usize, Span> = BTreeMap::new();
    for (id, (first, last)) in uses(program, commands, |b| b.arena.is_stash()) {
        if let Some((stash, _)) = program.stash(&program.buffers[id.index()]) {
            let span = out.entry(stash).or_insert((first, last));
            *span = (span.0.min(first), span.1.max(last));
        }
    }
    out
}

/// Which of these buffers a body uses, and from which command to which. A buffer that another stream than compute
/// reads is in use until compute waits for that stream, at the latest at the first use of the result.
///
/// If the result is not used in the call, as with some collectives and with copies for later calls, the operand is in
/// use until as many further bytes have been handed to its stream, so that waiting for its memory leaves the stream
/// as much to do. The operand of a send is in use to the end of the call.
fn uses(program: &Program, commands: &[Command], which: impl Fn(&Buffer) -> bool) -> BTreeMap<BufferId, Span> {
    let wanted = |id: &BufferId| which(&program.buffers[id.index()]);
    let mut lives: BTreeMap<BufferId, Span> = BTreeMap::new();
    // `used` holds the next use of each buffer by the compute stream.
    let mut used: BTreeMap<BufferId, usize> = BTreeMap::new();
    // These are the kernels of the host, with the bytes of staging buffers that each touches.
    let of_host = commands.iter().enumerate().filter(|(_, c)| c.stream == Stream::Host && matches!(c.action, Action::Launch { .. }));
    let staged = |c: &Command| c.buffers().into_iter().map(|id| &program.buffers[id.index()]).filter(|b| b.arena == Arena::Staging);
    let kernels: Vec<(usize, u64)> = of_host.map(|(k, c)| (k, staged(c).map(Buffer::bytes).sum())).collect();
    // While bytes are copied from command `k` on, the host's kernels work on as many bytes, up to the returned one,
    // and none of these waits for the copy.
    let meanwhile = |k: usize, bytes: u64| {
        let mut left = bytes;
        let later = &kernels[kernels.partition_point(|h| h.0 <= k)..];
        let until = later.iter().find(|(_, bytes)| {
            left = left.saturating_sub(*bytes);
            left == 0
        });
        until.or(later.last()).map_or(k, |h| h.0)
    };
    // `handed` holds, per stream, the commands that read, the last one first, each with the bytes that it and the
    // later ones read.
    let mut handed: BTreeMap<Stream, Vec<(usize, u64)>> = BTreeMap::new();
    // `until` finds the command by which the stream has been handed as many further bytes as command `k` reads.
    let mut until = |k: usize, stream: Stream, bytes: u64| {
        let behind = handed.entry(stream).or_default();
        let all = behind.last().map_or(0, |b| b.1);
        // This is the first command up to which the later ones read that many bytes.
        let enough = all.checked_sub(bytes).map(|rest| behind.partition_point(|b| b.1 <= rest));
        let until = enough.and_then(|at| behind.get(at)).map(|b| b.0);
        behind.push((k, all.saturating_add(bytes)));
        until
    };
    for (k, c) in commands.iter().enumerate().rev() {
        for id in c.buffers().into_iter().filter(wanted) {
            lives.entry(id).or_insert((k, k)).0 = ir::fault!("liveness.first.late", k + 1, k);
        }
        let read = match &c.action {
            Action::Collective { src, dst, .. } => {
                let until = until(k, c.stream, program.buffers[src.buffer.index()].bytes());
                Some((src.buffer, used.get(&dst.buffer).copied().or(until)))
            }
            Action::Copy { src, dst, .. } if program.buffers[dst.buffer.index()].arena == Space::Host.stash() => {
                let until = until(k, c.stream, program.buffers[src.buffer.index()].bytes());
                Some((src.buffer, ir::fault!("liveness.spill.read", Some(k), until)))
            }
            Action::Send { src, .. } => Some((src.buffer, None)),
            Action::Copy { src, .. } => Some((src.buffer, Some(meanwhile(k, program.buffers[src.buffer.index()].bytes())))),
            Action::Launch { .. }
            | Action::Recv { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Report { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => None,
        };
        if let Some((from, end)) = read
            && c.stream != Stream::Compute
            && let Some(life) = lives.get_mut(&from)
        {
            life.1 = life.1.max(ir::fault!("liveness.last.read", k, end.unwrap_or(commands.len())));
        }
        if c.stream == Stream::Compute {
            used.extend(c.buffers().into_iter().map(|id| (id, k)));
        }
    }
    lives
}
