//! From which call to which a stash holds something.

use ir::program::{Arena, Call, Program};
use std::collections::BTreeMap;

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
        let buffers = body.commands.iter().flat_map(|c| c.action.buffers());
        for buffer in buffers.map(|id| &program.buffers[id.index()]).filter(|b| b.arena == Arena::Stash) {
            // Beyond what can be addressed there are none: that is the user's error, which is told of the whole job.
            if let Some((k, _)) = program.stash(buffer) {
                touches[k] = true;
            }
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
