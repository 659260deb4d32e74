//! Memory of what goes from stage to stage: slots of its own, one more than the schedule needs. So a message is received while the pass before
//! still reads the last one, and a pass does not wait for what the one before it sends.

use crate::commands::allocate::ALIGN;
use crate::commands::stash_slots;
use ir::program::{Action, Arena, BufferId, CallSchedule, Job, Program, Slots};
use std::collections::{BTreeMap, BTreeSet};

/// Gives the messages of all programs their slots, whose places follow from those of temporary buffers ([`crate::commands::stash_slots`]).
pub fn set_apart(job: &mut Job) {
    let Job { programs, stages, .. } = job;
    for (p, program) in programs.iter_mut().enumerate() {
        let messages = stashes(program);
        for stage in stages.iter_mut().filter(|s| s.program as usize == p) {
            let CallSchedule { slots, train, eval, .. } = &mut stage.schedule;
            let needed = stash_slots::slots(program, [train, eval], |_| 1);
            let counts = stash_slots::slots(program, [train, eval], |k| needed[k] + u32::from(messages[k]));
            *slots = counts.into_iter().map(|count| Slots { count, at: 0 }).collect();
        }
    }
}

/// Lays the stashes out anew, messages in some of their own. Says which these are.
fn stashes(program: &mut Program) -> Vec<bool> {
    let mut messages: BTreeSet<BufferId> = BTreeSet::new();
    let mut bodies: BTreeMap<BufferId, BTreeSet<usize>> = BTreeMap::new();
    for (b, body) in program.bodies.iter().enumerate() {
        for command in &body.commands {
            let touched = command.action.buffers();
            if matches!(command.action, Action::Send { .. } | Action::Recv { .. }) {
                messages.extend(&touched);
            }
            for id in touched {
                bodies.entry(id).or_default().insert(b);
            }
        }
    }
    // What lived equally long still does.
    let mut homes: BTreeMap<(Option<usize>, bool, BTreeSet<usize>), Vec<BufferId>> = BTreeMap::new();
    for (k, buffer) in program.buffers.iter().enumerate() {
        let id = BufferId(k as u32);
        let home = match (buffer.arena, messages.contains(&id)) {
            (Arena::Persistent | Arena::Host | Arena::Staging, _) | (Arena::Temporary, false) => continue,
            (Arena::Temporary, true) => (None, true, bodies[&id].clone()),
            (Arena::Stash, message) => (program.stash(buffer).map(|s| s.0), message, BTreeSet::new()),
        };
        homes.entry(home).or_default().push(id);
    }
    let mut end = 0;
    program.stashes.clear();
    for ids in homes.values() {
        let begin = end;
        for id in ids {
            let buffer = &mut program.buffers[id.index()];
            (buffer.arena, buffer.offset) = (Arena::Stash, end);
            end += buffer.bytes().next_multiple_of(ALIGN);
        }
        program.stashes.push(end - begin);
    }
    program.arena_bytes[Arena::Stash as usize] = end;
    homes.into_keys().map(|home| home.1).collect()
}
