//! Where stashes lie: in the memory of temporary buffers. A stash lives in a phase (a training pass or an evaluation) from the first call that touches it to the last,
//! temporary buffers within their call; what lives at once lies apart, and nothing else does. So an evaluation, an update, and whatever comes before the
//! forward passes and after the backward passes have their temporary buffers where training keeps what it needs in between.

use crate::commands::best_fit::ALIGN;
use crate::commands::liveness::{Life, lives};
use crate::commands::streams::messages;
use ir::program::{Arena, BufferId, Call, CallSchedule, Program, Slots, Space};
use std::collections::{BTreeMap, BTreeSet};

/// Makes one stash of stashed buffers that live equally long, which are those that the same bodies touch. Messages
/// have their own. Says of each stash whether it is one of messages.
pub fn lay_out(program: &mut Program) -> Vec<bool> {
    let messages = messages(program);
    let stashed = (0..program.buffers.len() as u32).map(BufferId).filter(|id| program.buffers[id.index()].arena == Arena::Stash);
    let mut bodies: BTreeMap<BufferId, BTreeSet<usize>> = stashed.map(|id| (id, BTreeSet::new())).collect();
    for (b, body) in program.bodies.iter().enumerate() {
        for id in body.commands.iter().flat_map(|c| c.action.buffers()) {
            if let Some(all) = bodies.get_mut(&id) {
                all.insert(b);
            }
        }
    }
    let mut stashes: BTreeMap<(bool, BTreeSet<usize>), Vec<BufferId>> = BTreeMap::new();
    for (id, bodies) in bodies {
        stashes.entry((messages.contains(&id), bodies)).or_default().push(id);
    }
    let mut end = 0u64;
    program.stashes.clear();
    for ids in stashes.values() {
        let begin = end;
        for id in ids {
            let buffer = &mut program.buffers[id.index()];
            buffer.offset = end;
            end = end.saturating_add(buffer.bytes().next_multiple_of(ALIGN));
        }
        program.stashes.push(end - begin);
    }
    program.arena_bytes[Arena::Stash as usize] = end;
    stashes.into_keys().map(|(message, _)| message).collect()
}

/// Gives each stash of a stage the slots that its schedule needs, and messages one more: so one is received while
/// the pass before still reads the last one, and a pass does not wait for what the one before it sends.
pub fn count(program: &Program, messages: &[bool], schedule: &mut CallSchedule) {
    let CallSchedule { slots: counted, train, eval, .. } = schedule;
    let needed = slots(program, [train, eval], |_| 1);
    let counts = slots(program, [train, eval], |k| needed[k] + ir::fault!("stash_slots.messages.slot", 0, u32::from(messages[k])));
    *counted = counts.into_iter().map(|count| Slots { count, at: 0 }).collect();
}

/// For each stash of a program, the fewest slots, but `least(stash)` if there are so many microbatches, with which microbatch k can have slot
/// `k % slots` from the first call of a list that touches the stash to the last one.
pub fn slots(program: &Program, lists: [&[Call]; 2], least: impl Fn(usize) -> u32) -> Vec<u32> {
    let [train, eval] = lists.map(|calls| lives(program, calls));
    let of_stash = |stash: usize| {
        let lists = [&train[stash], &eval[stash]];
        let most = lists.iter().copied().flatten().map(|life| life.microbatch + 1).max().unwrap_or(1);
        let apart = |slots: &u32| {
            lists.iter().all(|lives| {
                let mut busy: Vec<Option<usize>> = vec![None; *slots as usize];
                lives.iter().all(|life| {
                    busy[(life.microbatch % slots) as usize]
                        .replace(life.last)
                        .is_none_or(|until| ir::fault!("stash_slots.slots.one", true, until < life.first))
                })
            })
        };
        (least(stash)..most).find(apart).unwrap_or(most)
    };
    (0..program.stashes.len()).map(of_stash).collect()
}

/// Gives every stash of a stage the lowest place that is free while it lives, beyond the temporary buffers of all calls meanwhile: long ones first. Their numbers of slots
/// stay.
pub fn place(program: &Program, schedule: &mut CallSchedule) {
    let CallSchedule { slots, train, update, eval, .. } = schedule;
    let lists = [&*train, &*update, &*eval];
    let ends: Vec<u64> = program.bodies.iter().map(|b| program.end_of_temporaries(b, Space::Device)).collect();
    let spans = lists.map(|calls| spans(program, calls));
    let bytes = |k: usize, count: u32| u64::from(count).saturating_mul(program.stashes[k]);
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|k| (std::cmp::Reverse(bytes(*k, slots[*k].count)), *k));
    let mut placed: Vec<usize> = vec![];
    for k in order {
        let meanwhile = lists.iter().zip(&spans).filter_map(|(calls, spans)| spans[k].map(|(first, last)| &calls[first..=last])).flatten();
        let mut at =
            meanwhile.map(|call| ir::fault!("stash_slots.place.temporaries", 0, ends[call.body.index()])).max().unwrap_or(0).next_multiple_of(ALIGN);
        let meets = |j: &&usize| {
            spans
                .iter()
                .any(|s| matches!((s[k], s[**j]), (Some(a), Some(b)) if ir::fault!("stash_slots.place.apart", false, a.0 <= b.1 && b.0 <= a.1)))
        };
        let mut taken: Vec<(u64, u64)> =
            placed.iter().filter(meets).map(|j| (slots[*j].at, slots[*j].at.saturating_add(bytes(*j, slots[*j].count)))).collect();
        taken.sort_unstable();
        for (from, to) in taken {
            if from < at.saturating_add(bytes(k, slots[k].count)) {
                at = at.max(to);
            }
        }
        slots[k].at = at;
        placed.push(k);
    }
}

/// For each stash of a program, the first and the last of the calls that touch it.
pub fn spans(program: &Program, calls: &[Call]) -> Vec<Option<(usize, usize)>> {
    let span = |lives: Vec<Life>| {
        let last = lives.iter().map(|life| life.last).max()?;
        Some((lives.iter().map(|life| life.first).min()?, last))
    };
    lives(program, calls).into_iter().map(span).collect()
}

#[cfg(test)]
mod tests;
