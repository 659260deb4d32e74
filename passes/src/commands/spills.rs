//! Buffers that wait in another memory than the one that passes work in: each pass that uses one has a temporary
//! buffer in its place, with copies beside its own commands.

use ir::graph::{Origin, Phase};
use ir::program::{Action, Arena, Buffer, BufferAddress, BufferId, Command, Program, ProgramBody, Stream};
use std::collections::{BTreeMap, BTreeSet};

/// The temporary buffers and copies of a body for values that wait in another memory.
#[derive(Default)]
pub struct Spills {
    /// Temporary buffers in the place of each that it uses, in the order of commands.
    pub own: BTreeMap<BufferId, Vec<BufferReplacement>>,
    /// Copies, and before which command.
    pub copies: Vec<(usize, Command)>,
}

/// A temporary buffer in the place of some elements of another one, from a command on.
pub struct BufferReplacement {
    /// Index of the first command that may use it, copies not counted.
    pub since: usize,
    /// The first of the elements, and the end.
    pub part: (u64, u64),
    /// The temporary buffer, whose element 0 is the first of `part`.
    pub buffer: BufferId,
}

impl Spills {
    /// Puts the copies among the commands of the body, which have their own buffers from now on. Copies are in order.
    pub fn insert(self, body: &mut ProgramBody) {
        let Spills { own, copies } = self;
        let (mut copies, mut seen) = (copies.into_iter().peekable(), BTreeSet::new());
        for (k, mut command) in std::mem::take(&mut body.commands).into_iter().enumerate() {
            while let Some((_, copy)) = copies.next_if(|c| c.0 <= k) {
                body.commands.push(copy);
            }
            let here = |id: BufferId, element: u64| {
                own.get(&id).and_then(|own| own.iter().rfind(|o| o.since <= k && (o.part.0..o.part.1).contains(&element)))
            };
            for place in command.places_mut() {
                let Some(own) = here(place.buffer, place.offset) else { continue };
                if ir::fault!("spills.read.first", seen.insert(place.buffer), true) {
                    (place.buffer, place.offset) = (own.buffer, ir::fault!("spills.part.first", 0, place.offset - own.part.0));
                }
            }
            // A fill or a load covers its whole buffer, so element 0 finds the replacement.
            for id in command.buffers_mut() {
                *id = here(*id, 0).map_or(*id, |own| own.buffer);
            }
            body.commands.push(command);
        }
        body.commands.extend(copies.map(|c| c.1));
    }
}

/// Which commands are copies that only bring a value from the host to the device for one call. A value that rests on
/// a disk has been read from there before.
pub fn returns(program: &Program, commands: &[Command]) -> Vec<bool> {
    let arena = |id: BufferId| program.buffers[id.index()].arena;
    // A buffer that commands other than copies touch is computed in this call, not at rest.
    let from_disk = |c: &Command| matches!(&c.action, Action::Copy { src, .. } if arena(src.buffer) == Arena::Disk);
    let read: BTreeSet<BufferId> = commands.iter().filter(|c| from_disk(c)).flat_map(|c| c.buffers()).collect();
    let is_copy = |c: &Command| matches!(c.action, Action::Copy { .. });
    let made: BTreeSet<BufferId> = commands.iter().filter(|c| !is_copy(c)).flat_map(|c| c.buffers()).collect();
    let rests = |id: BufferId| match arena(id) {
        Arena::Host | Arena::HostStash => !made.contains(&id),
        Arena::Staging => !made.contains(&id) && read.contains(&id),
        Arena::Persistent | Arena::Stash | Arena::Temporary | Arena::Disk => false,
    };
    let returns = |c: &Command| matches!(&c.action, Action::Copy { src, dst, .. } if rests(src.buffer) && arena(dst.buffer) == Arena::Temporary);
    commands.iter().map(returns).collect()
}

/// One more buffer.
pub fn added(program: &mut Program, buffer: Buffer) -> BufferId {
    program.buffers.push(buffer);
    BufferId(program.buffers.len() as u32 - 1)
}

/// A copy of some elements of a buffer from one memory to another.
pub fn copy(buffer: &Buffer, [src, dst]: [BufferAddress; 2], elements: u64, phase: Phase, reason: &str) -> Command {
    let count = ir::fault!("spills.copy.half", elements.div_ceil(2), elements);
    let action = Action::Copy { dtype: buffer.dtype, count, src, dst };
    let origin = Origin { phase, ..buffer.origin.clone().unwrap_or_else(|| Origin::new(phase)) };
    Command { stream: Stream::Compute, action, predicate: None, origin, reason: Some(reason.into()) }
}
