//! Places in memory, once the order of commands is known: every buffer gets its offset, every stash its slots.
//!
//! What lives over steps has a place of its own. Stashed buffers that live equally long are one stash, with as many
//! slots as the schedule needs ([`crate::commands::stash_slots`]). Temporary buffers of a body share memory where
//! their lives do not meet ([`crate::commands::best_fit`]).

use crate::commands::best_fit::{ALIGN, assign};
use crate::commands::liveness::temporaries;
use crate::commands::stash_slots;
use ir::program::{Job, Program, Space};

/// Gives the buffers and stashes of all programs their places.
pub fn allocate(mut job: Job) -> Job {
    let Job { programs, stages, .. } = &mut job;
    for (p, program) in programs.iter_mut().enumerate() {
        place_lasting(program);
        place_temporaries(program);
        let messages = stash_slots::lay_out(program);
        for stage in stages.iter_mut().filter(|s| s.program as usize == p) {
            stash_slots::count(program, &messages, &mut stage.schedule);
            stash_slots::place(program, &mut stage.schedule);
        }
    }
    job
}

/// What lives over steps lies side by side.
fn place_lasting(program: &mut Program) {
    let Program { buffers, arena_bytes, .. } = program;
    for arena in Space::ALL.map(Space::lasting) {
        let mut end = 0u64;
        for buffer in buffers.iter_mut().filter(|b| b.arena == arena) {
            buffer.offset = end;
            end = end.saturating_add(ir::fault!("allocate.lasting.overlap", ALIGN, buffer.bytes().next_multiple_of(ALIGN)));
        }
        arena_bytes[arena as usize] = end;
    }
}

/// Temporary buffers of a body share its memory, bodies that of the largest.
fn place_temporaries(program: &mut Program) {
    for arena in Space::ALL.map(Space::temporary) {
        let mut most = 0;
        for b in 0..program.bodies.len() {
            let (ids, needs) = temporaries(arena, program, &program.bodies[b].commands);
            let (offsets, total) = assign(&needs);
            for (id, offset) in ids.into_iter().zip(offsets) {
                program.buffers[id.index()].offset = offset;
            }
            most = ir::fault!("allocate.arena.last", total, most.max(total));
        }
        program.arena_bytes[arena as usize] = most;
    }
}
