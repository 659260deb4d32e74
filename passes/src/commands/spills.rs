//! Buffers that wait in another memory than the one that passes work in: each pass that uses one has a temporary
//! buffer in its place, with copies beside its own commands.

use ir::graph::{Origin, Phase};
use ir::program::{Action, Body, Buffer, BufferId, Command, Place, Program, Stream};
use std::collections::{BTreeMap, BTreeSet};

/// What a body has of values that wait elsewhere.
#[derive(Default)]
pub struct Spills {
    /// A temporary buffer in the place of each that it uses.
    pub own: BTreeMap<BufferId, BufferId>,
    /// Copies, and before which command.
    pub copies: Vec<(usize, Command)>,
}

impl Spills {
    /// Puts the copies among the commands of the body, which have their own buffers from now on. Copies are in order.
    pub fn insert(self, body: &mut Body) {
        let Spills { own, copies } = self;
        let (mut copies, mut seen) = (copies.into_iter().peekable(), BTreeSet::new());
        for (k, mut command) in std::mem::take(&mut body.commands).into_iter().enumerate() {
            while let Some((_, copy)) = copies.next_if(|c| c.0 <= k) {
                body.commands.push(copy);
            }
            for id in command.buffers_mut() {
                if ir::fault!("spills.read.first", seen.insert(*id), true) {
                    *id = own.get(id).copied().unwrap_or(*id);
                }
            }
            body.commands.push(command);
        }
        body.commands.extend(copies.map(|c| c.1));
    }
}

/// One more buffer.
pub fn added(program: &mut Program, buffer: Buffer) -> BufferId {
    program.buffers.push(buffer);
    BufferId(program.buffers.len() as u32 - 1)
}

/// A copy of a whole buffer from one memory to another.
pub fn copy(buffer: &Buffer, from: BufferId, to: BufferId, phase: Phase, reason: &str) -> Command {
    let (dtype, count) = (buffer.dtype, ir::fault!("spills.copy.half", buffer.elements().div_ceil(2), buffer.elements()));
    let action = Action::Copy { dtype, count, src: Place::start(from), dst: Place::start(to) };
    let origin = Origin { phase, ..buffer.origin.clone().unwrap_or_else(|| Origin::new(phase)) };
    Command { stream: Stream::Compute, action, predicate: None, origin, reason: Some(reason.into()) }
}
