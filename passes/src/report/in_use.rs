//! What a rank has in use while a step goes on, from command to command, and which lines of the text it is for.
//!
//! Arenas are planned once and stay as large as they are ([`footprint`](super::footprint)). What is in use of them
//! rises and falls: a temporary buffer is in use while commands of its call need it, a slot of a stash from the call
//! that fills it to the one that reads it last.

use super::footprint::{MemoryCategory, of_messages};
use crate::commands::best_fit::{ALIGN, LiveRange};
use crate::commands::liveness::{self, lifetimes, stashed, temporaries_of_run};
use crate::commands::runs::CallRuns;
use ir::diag::Span;
use ir::program::{Buffer, BufferId, Call, Job, Program, ProgramPhase, Space, Stage};
use std::collections::BTreeMap;

/// For whom bytes are in use: what for, and the file and line.
pub type MemoryOwner = (MemoryCategory, Option<(u16, u32)>);

/// Bytes that are in use from a moment to another, both included.
#[derive(Clone, Copy, Debug)]
struct BytesInUse {
    from: usize,
    to: usize,
    owner: usize,
    bytes: u64,
}

/// What is in use of a memory of a stage's ranks in a step. A step has a moment for each command that it issues, and
/// for the end of each call; passes come first, then the update.
pub struct InUse {
    /// For whom bytes are in use, by number.
    pub owners: Vec<MemoryOwner>,
    /// Of each owner, bytes that last longer than a step.
    pub lasting: Vec<u64>,
    uses: Vec<BytesInUse>,
    /// Per phase and call, the moment of the first command of its part, minus that command's index in the body.
    begins: [Vec<usize>; 2],
    moments: usize,
}

const PHASES: [ProgramPhase; 2] = [ProgramPhase::Train, ProgramPhase::Update];

impl InUse {
    /// Of the ranks of a stage, in one of their memories.
    pub fn of(job: &Job, stage: usize, space: Space) -> InUse {
        let Stage { program, schedule, .. } = &job.stages[stage];
        let program = &job.programs[*program as usize];
        let (messages, is_message) = (of_messages(program), liveness::of_messages(program));
        let mut owners = Owners::default();
        let whose: Vec<usize> = program.buffers.iter().map(|b| owners.number(whose(program, &messages, b))).collect();
        let mut stashes: Vec<BTreeMap<usize, u64>> = vec![BTreeMap::new(); program.stashes.len()];
        let mut lasting = vec![0; owners.list.len()];
        for (k, b) in program.buffers.iter().enumerate() {
            let bytes = b.bytes().next_multiple_of(ALIGN);
            match program.stash(b).filter(|_| b.arena.is_stash()) {
                Some((stash, _)) => *stashes[stash].entry(whose[k]).or_default() += bytes,
                None if b.arena == space.lasting() => lasting[whose[k]] += bytes,
                None => {}
            }
        }
        let mut out = InUse { owners: owners.list, lasting, uses: vec![], begins: [vec![], vec![]], moments: 0 };
        for (number, phase) in PHASES.into_iter().enumerate() {
            let calls = schedule.calls(phase);
            let runs = CallRuns::of(program, calls);
            let starts: Vec<usize> = runs
                .list
                .iter()
                .scan(out.moments, |next, run| {
                    *next += run.moments;
                    Some(*next - run.moments)
                })
                .collect();
            let moment = |call: usize, command: usize| starts[runs.run(call)] + runs.moment(call, command);
            out.begins[number] = calls.iter().enumerate().map(|(c, call)| first(program, call, moment, c)).collect();
            let of_kind: Vec<Vec<(usize, LiveRange)>> = runs.kinds.iter().map(|run| temporary(space, program, &runs, *run, &whose)).collect();
            for (run, start) in runs.list.iter().zip(&starts) {
                let spans = of_kind[run.kind].iter().flat_map(|(owner, need)| need.spans.iter().map(move |s| (*owner, need.bytes, *s)));
                out.uses.extend(spans.map(|(owner, bytes, (from, to))| BytesInUse { from: start + from, to: start + to, owner, bytes }));
            }
            let end = out.moments + runs.list.iter().map(|r| r.moments).sum::<usize>();
            let touched: Vec<_> = program.bodies.iter().map(|b| stashed(program, &b.commands)).collect();
            for (k, lives) in lifetimes(program, calls).into_iter().enumerate().filter(|(k, _)| program.stashes[*k].space == space) {
                let span = |from: usize, to: usize, copies: u64, uses: &mut Vec<BytesInUse>| {
                    uses.extend(stashes[k].iter().map(|(owner, bytes)| BytesInUse { from, to, owner: *owner, bytes: bytes * copies }));
                };
                if is_message[k] {
                    // A message may come and go while other calls run, so all slots are in use from the first call to
                    // the last.
                    let (first, last) = (lives.first().map(|l| l.first), lives.iter().map(|l| l.last).max());
                    if let (Some(first), Some(last)) = (first, last) {
                        let (run, until) = (runs.run(first), runs.run(last));
                        span(starts[run], starts[until] + runs.list[until].moments - 1, u64::from(schedule.slots[k].count), &mut out.uses);
                    }
                    continue;
                }
                for life in lives {
                    let own = |c: usize| touched[calls[c].body.index()].get(&k);
                    let from = own(life.first).map_or(out.moments, |s| moment(life.first, s.0));
                    let to = own(life.last).map_or(end - 1, |s| moment(life.last, s.1));
                    span(from, to, 1, &mut out.uses);
                }
            }
            out.moments = end;
        }
        out
    }

    /// The moment of a command of a call.
    pub fn moment(&self, phase: ProgramPhase, call: usize, command: usize) -> usize {
        self.begins[usize::from(phase == ProgramPhase::Update)][call].wrapping_add(command)
    }

    /// Bytes in use at each moment, those that last apart.
    pub fn totals(&self) -> Vec<u64> {
        let mut changes = vec![0i64; self.moments + 1];
        for BytesInUse { from, to, bytes, .. } in &self.uses {
            changes[*from] += *bytes as i64;
            changes[to + 1] -= *bytes as i64;
        }
        let sum = |sum: &mut i64, change: i64| {
            *sum += change;
            Some(*sum as u64)
        };
        changes.into_iter().take(self.moments).scan(0, sum).collect()
    }

    /// Bytes in use at each of these moments, which ascend, by owner, those that last with them.
    pub fn by_owner(&self, moments: &[usize]) -> Vec<Vec<u64>> {
        let mut changes = vec![vec![0i64; self.owners.len()]; moments.len() + 1];
        for BytesInUse { from, to, owner, bytes } in &self.uses {
            let (first, behind) = (moments.partition_point(|m| m < from), moments.partition_point(|m| m <= to));
            changes[first][*owner] += *bytes as i64;
            changes[behind][*owner] -= *bytes as i64;
        }
        let mut now: Vec<i64> = self.lasting.iter().map(|b| *b as i64).collect();
        let add = |change: Vec<i64>| {
            now.iter_mut().zip(change).for_each(|(sum, change)| *sum += change);
            now.iter().map(|b| *b as u64).collect()
        };
        changes.into_iter().take(moments.len()).map(add).collect()
    }
}

/// Owners by number.
#[derive(Default)]
struct Owners {
    list: Vec<MemoryOwner>,
    numbers: BTreeMap<MemoryOwner, usize>,
}

impl Owners {
    fn number(&mut self, whose: MemoryOwner) -> usize {
        *self.numbers.entry(whose).or_insert_with(|| {
            self.list.push(whose);
            self.list.len() - 1
        })
    }
}

fn whose(program: &Program, messages: &[bool], buffer: &Buffer) -> MemoryOwner {
    let line = |span: Span| (span.file, span.line);
    (MemoryCategory::of(program, messages, buffer), buffer.origin.as_ref().and_then(|o| o.span).map(line))
}

/// The moment at which the body would begin if the called part were preceded by all other parts.
fn first(program: &Program, call: &Call, moment: impl Fn(usize, usize) -> usize, at: usize) -> usize {
    let part = program.bodies[call.body.index()].part(call.part);
    match part.is_empty() {
        true => 0,
        false => moment(at, part.start).wrapping_sub(part.start),
    }
}

/// Temporary buffers of a run, by owner, with their lifetimes.
fn temporary(space: Space, program: &Program, runs: &CallRuns<'_>, run: usize, whose: &[usize]) -> Vec<(usize, LiveRange)> {
    let of = |(id, mut need): (BufferId, LiveRange)| {
        need.bytes = need.bytes.next_multiple_of(ALIGN);
        (whose[id.index()], need)
    };
    temporaries_of_run(space.temporary(), program, runs, run).into_iter().map(of).collect()
}
