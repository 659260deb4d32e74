//! Places in memory, once the order of commands is known: every buffer gets its offset, every stash its slots.
//!
//! What lives over steps has a place of its own. Temporary buffers of a body share memory where their lives do not meet
//! ([`crate::commands::best_fit`]). Stashed buffers that live equally long are one stash, with as many slots as the
//! schedule needs ([`crate::commands::stash_slots`]); stashes lie where temporary buffers are not alive.

use crate::commands::best_fit::{ALIGN, LiveRange, assign};
use crate::commands::liveness::{ArenaLiveness, temporaries, temporaries_of_run};
use crate::commands::runs::CallRuns;
use crate::commands::stash_slots;
use ir::program::{Arena, BLOCK, BufferId, Call, CallSchedule, Job, Program, ProgramPhase, Space};
use std::collections::{BTreeMap, BTreeSet};

/// Gives the buffers and stashes of all programs their places.
pub fn allocate(mut job: Job) -> Job {
    let Job { programs, stages, .. } = &mut job;
    for (p, program) in programs.iter_mut().enumerate() {
        place_lasting(program);
        let schedules: Vec<&CallSchedule> = stages.iter().filter(|s| s.program as usize == p).map(|s| &s.schedule).collect();
        place_temporaries(program, &schedules);
        let messages = stash_slots::lay_out(program, &schedules);
        for stage in stages.iter_mut().filter(|s| s.program as usize == p) {
            stash_slots::count(program, &messages, &mut stage.schedule);
            stash_slots::place(program, &mut stage.schedule);
        }
        for space in Space::ALL {
            place_together(space, program, stages.iter_mut().filter(|s| s.program as usize == p).map(|s| &mut s.schedule).collect());
        }
    }
    job
}

/// Where all stages of a program have the same schedule, temporary buffers and stashes of a memory can be placed
/// together, which is done if it needs less memory.
fn place_together(space: Space, program: &mut Program, mut schedules: Vec<&mut CallSchedule>) {
    let Some(first) = schedules.first().filter(|first| schedules.iter().all(|s| s == *first)) else { return };
    let ArenaLiveness { temporary, stashes, .. } = ArenaLiveness::of_stage(program, first, space);
    let used: Vec<usize> = (0..stashes.len()).filter(|k| !stashes[*k].spans.is_empty()).collect();
    let needs: Vec<LiveRange> = temporary.values().chain(used.iter().map(|k| &stashes[*k])).cloned().collect();
    let (offsets, total) = assign(&[], &needs);
    let arena = space.temporary() as usize;
    if total >= first.arena_bytes(program)[arena] {
        return;
    }
    program.arena_bytes[arena] = 0;
    for (id, offset) in temporary.keys().zip(&offsets) {
        let buffer = &mut program.buffers[id.index()];
        buffer.offset = *offset;
        program.arena_bytes[arena] = program.arena_bytes[arena].max(offset.saturating_add(buffer.bytes()));
    }
    for schedule in &mut schedules {
        for (k, offset) in used.iter().zip(&offsets[temporary.len()..]) {
            schedule.slots[*k].at = *offset;
        }
    }
}

/// Places the buffers that live over steps, one after the other.
fn place_lasting(program: &mut Program) {
    let Program { buffers, arena_bytes, .. } = program;
    for arena in Arena::ALL.into_iter().filter(|a| a.lasts()) {
        let align = if arena == Arena::Disk { ir::fault!("allocate.disk.align", ALIGN, BLOCK) } else { ALIGN };
        let mut end = 0u64;
        for buffer in buffers.iter_mut().filter(|b| b.arena == arena) {
            buffer.offset = end;
            end = end.saturating_add(ir::fault!("allocate.lasting.overlap", align, buffer.bytes().next_multiple_of(align)));
        }
        arena_bytes[arena as usize] = end;
    }
}

/// Places temporary buffers. Those of a body share memory, and all bodies share that of the largest. Bodies that a
/// schedule runs side by side count as one.
fn place_temporaries(program: &mut Program, schedules: &[&CallSchedule]) {
    let beside = beside(program, schedules);
    let mut distinct: Vec<&[Call]> = vec![];
    for calls in schedules.iter().flat_map(|s| ProgramPhase::ALL.map(|phase| s.calls(phase))) {
        if !distinct.contains(&calls) {
            distinct.push(calls);
        }
    }
    let runs: Vec<CallRuns> = distinct.into_iter().map(|calls| CallRuns::of(program, calls)).collect();
    let (mut placed, mut bytes) = (vec![], vec![]);
    for arena in Space::ALL.map(Space::temporary) {
        let mut most = 0;
        for together in beside.values() {
            let (ids, needs) = match together[..] {
                [alone] => temporaries(arena, program, &program.bodies[alone].commands),
                _ => temporaries_together(arena, program, &runs, together),
            };
            let (offsets, total) = assign(&[], &needs);
            placed.extend(ids.into_iter().zip(offsets));
            most = ir::fault!("allocate.arena.last", total, most.max(total));
        }
        bytes.push((arena, most));
    }
    drop(runs);
    for (id, offset) in placed {
        program.buffers[id.index()].offset = offset;
    }
    for (arena, most) in bytes {
        program.arena_bytes[arena as usize] = most;
    }
}

/// The temporary buffers in this arena of bodies that run side by side, with their lifetimes in all kinds of runs,
/// one after the other.
fn temporaries_together(arena: Arena, program: &Program, all: &[CallRuns], together: &[usize]) -> (Vec<BufferId>, Vec<LiveRange>) {
    let mut needs: BTreeMap<BufferId, LiveRange> = BTreeMap::new();
    let mut next = 0;
    for runs in all {
        for run in runs.kinds.iter().copied().filter(|run| runs.bodies(*run).any(|(_, b)| together.contains(&b))) {
            for (id, need) in temporaries_of_run(arena, program, runs, run) {
                let spans = need.spans.iter().map(|(from, to)| (next + from, next + to));
                needs.entry(id).or_insert(LiveRange { bytes: need.bytes, spans: vec![] }).spans.extend(spans);
            }
            next += runs.list[run].moments;
        }
    }
    needs.into_iter().unzip()
}

/// Lists of bodies, by the first of each. Two bodies that some run has side by side are in the same list.
fn beside(program: &Program, schedules: &[&CallSchedule]) -> BTreeMap<usize, Vec<usize>> {
    let mut first: Vec<usize> = (0..program.bodies.len()).collect();
    for calls in schedules.iter().flat_map(|s| ProgramPhase::ALL.map(|phase| s.calls(phase))) {
        for run in program.runs(calls) {
            let called: BTreeSet<usize> = calls[run].iter().map(|c| first[c.body.index()]).collect();
            let Some(least) = called.first().copied().filter(|_| ir::fault!("allocate.beside.none", false, called.len() > 1)) else { continue };
            first.iter_mut().filter(|f| called.contains(f)).for_each(|f| *f = least);
        }
    }
    let mut out: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    first.into_iter().enumerate().for_each(|(b, first)| out.entry(first).or_default().push(b));
    out
}
