//! What lives when: a stash from call to call, a temporary buffer from command to command of a call.

use crate::commands::best_fit::Need;
use ir::program::{Action, Arena, Buffer, BufferId, Call, Command, Program, Stream};
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

/// Temporary buffers of a body in this arena and how long they live. What a stream beside that of compute reads
/// lives until compute waits for that stream, at the first use of the result at the latest. What a collective reads
/// whose result is not used in the call lives until as many bytes of such have been handed to its stream behind it:
/// who waits for its memory then leaves the stream as much to do. What is sent lives to the end of the call.
pub fn temporaries(arena: Arena, program: &Program, commands: &[Command]) -> (Vec<BufferId>, Vec<Need>) {
    let temporary = |id: &BufferId| program.buffers[id.index()].arena == arena;
    let mut lives: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
    // The first use of each collective's result that comes after it.
    let mut used: BTreeMap<BufferId, usize> = BTreeMap::new();
    // Kernels of the host, and bytes that come and go through them.
    let of_host = commands.iter().enumerate().filter(|(_, c)| c.stream == Stream::Host && matches!(c.action, Action::Launch { .. }));
    let staged = |c: &Command| c.action.buffers().into_iter().map(|id| &program.buffers[id.index()]).filter(|b| b.arena == Arena::Staging);
    let kernels: Vec<(usize, u64)> = of_host.map(|(k, c)| (k, staged(c).map(Buffer::bytes).sum())).collect();
    // While bytes are copied from a command on, the host works on as many: up to this kernel, none of which waits
    // for the copy.
    let meanwhile = |k: usize, bytes: u64| {
        let mut left = bytes;
        let later = &kernels[kernels.partition_point(|h| h.0 <= k)..];
        let until = later.iter().find(|(_, bytes)| {
            left = left.saturating_sub(*bytes);
            left == 0
        });
        until.or(later.last()).map_or(k, |h| h.0)
    };
    // Of each stream the collectives, the last one first: the command, and the bytes that it and those behind it read.
    let mut handed: BTreeMap<Stream, Vec<(usize, u64)>> = BTreeMap::new();
    for (k, c) in commands.iter().enumerate().rev() {
        for id in c.action.buffers().into_iter().filter(temporary) {
            lives.entry(id).or_insert((k, k)).0 = ir::fault!("liveness.first.late", k + 1, k);
        }
        let read = match &c.action {
            Action::Collective { src, dst, .. } => {
                let bytes = program.buffers[src.buffer.index()].bytes();
                let behind = handed.entry(c.stream).or_default();
                let all = behind.last().map_or(0, |b| b.1);
                // The first command with which those behind this one are as many bytes.
                let enough = all.checked_sub(bytes).map(|rest| behind.partition_point(|b| b.1 <= rest));
                let until = enough.and_then(|at| behind.get(at)).map(|b| b.0);
                behind.push((k, all.saturating_add(bytes)));
                Some((src.buffer, used.get(&dst.buffer).copied().or(until)))
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
            used.extend(c.action.buffers().into_iter().map(|id| (id, k)));
        }
    }
    let needs = lives.iter().map(|(id, (first, last))| Need { bytes: program.buffers[id.index()].bytes(), first: *first, last: *last }).collect();
    (lives.into_keys().collect(), needs)
}
