//! What lies in the memory of temporary buffers at a time, over the calls of a phase.

use super::body::{BodySummary, LiveRange, meeting};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::program::{BufferId, Call, CallSchedule, Program, ProgramPhase, Slots, Space};
use std::collections::BTreeMap;
use std::ops::Range;

/// Who owns bytes of a memory's temporary arena: a temporary buffer of a call, or a stash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TemporaryOwner {
    Temporary(BufferId),
    Stash(usize),
}

/// A stash is in use, for a microbatch, from the first command of a phase that touches it for that to the last one,
/// and a temporary buffer of a call likewise. Nothing else lies there meanwhile. All slots of a stash count as in use
/// then, and runs of the same calls ([`Program::runs`]) are taken as one. Nothing is stashed from phase to phase
/// ([`super::order`]), so phases share their memory.
///
/// # Errors
/// Two that have the same bytes at once.
pub fn apart(program: &Program, schedule: &CallSchedule, bodies: &[BodySummary], phase: ProgramPhase, at: &Location) -> Result<(), Violation> {
    let calls = schedule.calls(phase);
    let runs = CallRuns::of(program, calls);
    // For each stash and microbatch, the first and the last call that use the slot, with their moments.
    let mut lives: BTreeMap<(usize, u32), [(usize, usize); 2]> = BTreeMap::new();
    for (c, call) in calls.iter().enumerate() {
        let part = program.bodies[call.body.index()].part(call.part);
        for (k, (first, last)) in &bodies[call.body.index()].stashed {
            let moment = |command: &usize| (c, runs.moment[c] + command - part.start);
            let life = lives.entry((*k, call.microbatch));
            match (part.contains(first).then(|| moment(first)), part.contains(last).then(|| moment(last))) {
                (Some(first), last) => life.or_insert([first, first])[1] = last.unwrap_or(first),
                (None, Some(last)) => life.or_insert([last, last])[1] = last,
                (None, None) => {}
            }
        }
    }
    // For each kind of run and each stash, the first and the last moment of use.
    let mut stashed: Vec<BTreeMap<usize, (usize, usize)>> = vec![BTreeMap::new(); runs.first.len()];
    for ((k, _), [first, last]) in lives {
        let [begin, end] = [first, last].map(|(call, _)| runs.of_call[call]);
        for (r, run) in runs.list.iter().enumerate().take(end + 1).skip(begin) {
            let from = if r == begin { first.1 } else { 0 };
            let to = if r == end { last.1 } else { run.moments };
            let span = stashed[run.kind].entry(k).or_insert((from, to));
            *span = (span.0.min(from), span.1.max(to));
        }
    }
    for (run, stashed) in runs.first.iter().zip(&stashed) {
        let run = &calls[runs.list[*run].calls.clone()];
        let temporary = temporaries(program, run, bodies);
        for space in Space::ALL {
            let of_stash = |(k, (first, last)): (&usize, &(usize, usize))| {
                let Slots { count, at } = schedule.slots[*k];
                (TemporaryOwner::Stash(*k), (at, at + u64::from(count) * program.stashes[*k].bytes), *first, *last)
            };
            let of_buffer = |(u, first, last): &(LiveRange, usize, usize)| (TemporaryOwner::Temporary(u.id), (u.from, u.to), *first, *last);
            let stashes = stashed.iter().filter(|(k, _)| program.stashes[**k].space == space).map(of_stash);
            let temporary = temporary.iter().filter(|(u, ..)| program.buffers[u.id.index()].arena.space() == Some(space)).map(of_buffer);
            if let Some((moment, who, other)) = meeting(stashes.chain(temporary)) {
                let (body, command) = command(program, run, moment);
                let here = at.body(&program.bodies[body].name).of(LocationPart::Number(command));
                let name = |id: BufferId| &program.buffers[id.index()].name;
                return Err(here.error(match (who, other) {
                    (TemporaryOwner::Temporary(id), TemporaryOwner::Stash(k)) | (TemporaryOwner::Stash(k), TemporaryOwner::Temporary(id)) => {
                        Invariant::StashFromTemporary.breach(format!("buffer `{}` lies in stash {k}, both in use", name(id)))
                    }
                    (TemporaryOwner::Stash(j), TemporaryOwner::Stash(k)) => {
                        Invariant::StashesApart.breach(format!("stashes {} and {}, both in use, overlap", j.min(k), j.max(k)))
                    }
                    (TemporaryOwner::Temporary(id), TemporaryOwner::Temporary(other)) => {
                        let what = format!("buffers `{}` and `{}` of calls side by side, both in use, overlap", name(other), name(id));
                        Invariant::TemporaryApart.breach(what)
                    }
                }));
            }
        }
    }
    Ok(())
}

/// Calls grouped into runs, and runs grouped by what they call.
struct CallRuns {
    list: Vec<CallRun>,
    /// For each call, its run and the moment of its begin there. A call has one moment more than it has commands,
    /// which is its end.
    of_call: Vec<usize>,
    moment: Vec<usize>,
    /// The first run of each kind.
    first: Vec<usize>,
}

struct CallRun {
    calls: Range<usize>,
    kind: usize,
    moments: usize,
}

impl CallRuns {
    fn of(program: &Program, calls: &[Call]) -> CallRuns {
        let mut kinds: BTreeMap<Vec<(usize, u32)>, usize> = BTreeMap::new();
        let mut out = CallRuns { list: vec![], of_call: vec![], moment: vec![], first: vec![] };
        for run in program.runs(calls) {
            let next = kinds.len();
            let kind = *kinds.entry(calls[run.clone()].iter().map(|c| (c.body.index(), c.part)).collect()).or_insert(next);
            if kind == next {
                out.first.push(out.list.len());
            }
            let mut moments = 0;
            for call in &calls[run.clone()] {
                out.of_call.push(out.list.len());
                out.moment.push(moments);
                moments += moments_of(program, call);
            }
            out.list.push(CallRun { calls: run, kind, moments: moments - 1 });
        }
        out
    }
}

fn moments_of(program: &Program, call: &Call) -> usize {
    program.bodies[call.body.index()].part(call.part).len() + 1
}

/// The temporary buffers of the calls of a run, and when they are in use.
fn temporaries(program: &Program, run: &[Call], bodies: &[BodySummary]) -> Vec<(LiveRange, usize, usize)> {
    // For each body, the parts of the call that is under way: each part's first command and the moment of its begin.
    let mut begun: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    let (mut out, mut now) = (vec![], 0);
    for call in run {
        let (b, body) = (call.body.index(), &program.bodies[call.body.index()]);
        let parts = begun.entry(b).or_default();
        parts.push((body.part(call.part).start, now));
        if call.part + 1 == body.parts() {
            let moment = |command: usize| {
                let (start, begin) = parts[parts.partition_point(|p| p.0 <= command) - 1];
                begin + command - start
            };
            out.extend(bodies[b].temporary.iter().map(|u| (*u, moment(u.first), moment(u.last))));
            parts.clear();
        }
        now += moments_of(program, call);
    }
    out
}

/// The body and the command at a moment of a run.
fn command(program: &Program, run: &[Call], moment: usize) -> (usize, usize) {
    let mut left = moment;
    for call in run {
        let body = call.body.index();
        let moments = moments_of(program, call);
        if left < moments {
            return (body, program.bodies[body].part(call.part).start + left);
        }
        left -= moments;
    }
    unreachable!("invariant: it is one of the run's")
}
