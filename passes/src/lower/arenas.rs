//! Which arena each buffer is in, which follows from who touches it. Its place there follows later, from the order
//! of commands.

use super::{ChunkBodies, LocalLowering};
use ir::local::Chunk;
use ir::program::{Arena, BodyId, BodyKind, Content, ProgramBody};

impl LocalLowering<'_, '_, '_> {
    /// Settles arenas and adds the bodies.
    pub(super) fn finish(mut self) -> ChunkBodies {
        for (id, all) in &self.touched {
            let space = self.l.program.buffers[id.index()].arena.space().expect("invariant: nothing is on a disk before lowering");
            let arena = if ir::fault!("lower.arena.passes", all.len() <= 2, all.len() == 1) {
                space.temporary()
            } else if all.iter().all(|c| c.is_pass()) {
                Arena::Stash
            } else {
                space.lasting()
            };
            let buffer = &mut self.l.program.buffers[id.index()];
            buffer.arena = arena;
            if arena.lasts() {
                buffer.content = Content::Accumulator;
            }
        }
        let mut bodies = ChunkBodies::new();
        for (chunk, commands) in std::mem::take(&mut self.commands) {
            let kind = match chunk {
                Chunk::Prologue | Chunk::PrologueReduce => BodyKind::Prologue,
                Chunk::Forward(l) => BodyKind::Forward(l),
                Chunk::Backward(l) => BodyKind::Backward(l),
                Chunk::Weight(l) => BodyKind::Weight(l),
                Chunk::Reduce => BodyKind::Reduce,
                Chunk::Update => BodyKind::Update,
            };
            bodies.insert(chunk, BodyId(self.l.program.bodies.len() as u32));
            self.l.program.bodies.push(ProgramBody { name: format!("{}{chunk}", self.names.prefix), kind, commands, cuts: vec![] });
        }
        bodies
    }
}
