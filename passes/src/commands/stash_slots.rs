//! Where stashes lie: beside temporary buffers of their memory. A stash lives in a phase (a training pass or an
//! evaluation) from the first command of a call that touches it to the last one of another ([`ArenaLiveness`]), temporary
//! buffers within their call; what lives at once lies apart, and nothing else does. So an evaluation, an update, and
//! whatever comes before the forward passes and after the backward passes have their temporary buffers where training
//! keeps what it needs in between; and a backward pass has them where it has read of its microbatch what it needs, if
//! no other microbatch is in flight.

use crate::commands::best_fit::{ALIGN, LiveRange, assign};
use crate::commands::liveness::{ArenaLiveness, lifetimes};
use crate::commands::streams::messages;
use ir::program::{Arena, BufferId, Call, CallSchedule, Program, Slots, Space, Stash};
use std::collections::{BTreeMap, BTreeSet};

/// Makes one stash of stashed buffers of a memory that live equally long, which are those that the same bodies touch.
/// Messages have their own. What all of these schedules keep for one microbatch at a time is a stash for each buffer,
/// as it is of use until a certain command. Says of each stash whether it is one of messages.
pub fn lay_out(program: &mut Program, schedules: &[&CallSchedule]) -> Vec<bool> {
    let messages = messages(program);
    let stashed = (0..program.buffers.len() as u32).map(BufferId).filter(|id| program.buffers[id.index()].arena.is_stash());
    let mut bodies: BTreeMap<BufferId, BTreeSet<usize>> = stashed.map(|id| (id, BTreeSet::new())).collect();
    for (b, body) in program.bodies.iter().enumerate() {
        for id in body.commands.iter().flat_map(|c| c.buffers()) {
            if let Some(all) = bodies.get_mut(&id) {
                all.insert(b);
            }
        }
    }
    let mut stashes: BTreeMap<(Arena, bool, BTreeSet<usize>), Vec<BufferId>> = BTreeMap::new();
    for (id, bodies) in bodies {
        stashes
            .entry((ir::fault!("stash_slots.stash.joined", Arena::Stash, program.buffers[id.index()].arena), messages.contains(&id), bodies))
            .or_default()
            .push(id);
    }
    let alike: Vec<(bool, Vec<BufferId>)> = stashes.into_iter().map(|((_, message, _), ids)| (message, ids)).collect();
    divide(program, &alike);
    let single = single(program, schedules);
    let split = |(k, (message, ids)): (usize, (bool, Vec<BufferId>))| match !message && single[k] {
        true => ids.into_iter().map(|id| (false, vec![id])).collect::<Vec<_>>(),
        false => vec![(message, ids)],
    };
    let stashes: Vec<(bool, Vec<BufferId>)> = alike.into_iter().enumerate().flat_map(split).collect();
    divide(program, &stashes);
    stashes.into_iter().map(|s| s.0).collect()
}

/// Which stashes hold one microbatch at a time in all of these schedules.
pub fn single(program: &Program, schedules: &[&CallSchedule]) -> Vec<bool> {
    let counts: Vec<Vec<u32>> = schedules.iter().map(|s| slots(program, [&s.train, &s.eval], |_| 1)).collect();
    (0..program.stashes.len()).map(|k| counts.iter().all(|c| c[k] == 1)).collect()
}

/// Makes one stash of each of these lists of buffers. The buffers of a list are in the same memory.
fn divide(program: &mut Program, stashes: &[(bool, Vec<BufferId>)]) {
    let Program { buffers, arena_bytes, stashes: made, .. } = program;
    made.clear();
    Space::ALL.into_iter().for_each(|space| arena_bytes[space.stash() as usize] = 0);
    for ids in stashes.iter().map(|s| &s.1) {
        let space = ir::fault!("stash_slots.stash.space", Space::Device, buffers[ids[0].index()].arena.space().expect("invariant: it is stashed"));
        let end = &mut arena_bytes[space.stash() as usize];
        let begin = *end;
        for id in ids {
            let buffer = &mut buffers[id.index()];
            buffer.offset = *end;
            *end = end.saturating_add(buffer.bytes().next_multiple_of(ALIGN));
        }
        made.push(Stash { space, bytes: *end - begin });
    }
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
    let [train, eval] = lists.map(|calls| lifetimes(program, calls));
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

/// Gives every stash of a stage a place, beside temporary buffers of its memory, which have theirs. Their numbers of
/// slots stay.
pub fn place(program: &Program, schedule: &mut CallSchedule) {
    Space::ALL.into_iter().for_each(|space| place_in(space, program, schedule));
}

fn place_in(space: Space, program: &Program, schedule: &mut CallSchedule) {
    let ArenaLiveness { temporary, stashes, .. } = ArenaLiveness::of_stage(program, schedule, space);
    let placed = |(id, need): (BufferId, LiveRange)| (need, program.buffers[id.index()].offset);
    let placed: Vec<(LiveRange, u64)> = temporary.into_iter().map(placed).collect();
    let (used, needs): (Vec<usize>, Vec<LiveRange>) = stashes.into_iter().enumerate().filter(|(_, need)| !need.spans.is_empty()).unzip();
    let (offsets, _) = assign(ir::fault!("stash_slots.place.temporaries", &[], &placed), &needs);
    for (k, offset) in used.into_iter().zip(offsets) {
        schedule.slots[k].at = offset;
    }
}

#[cfg(test)]
mod tests;
