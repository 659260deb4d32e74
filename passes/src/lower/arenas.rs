//! Which arena each buffer is in, which follows from who touches it; and the plan of temporary ones.

use super::{Bodies, LocalLowering};
use crate::commands::allocate::{self, Need};
use ir::local::Chunk;
use ir::program::{Arena, Body, BodyId, BodyKind, BufferId, Command, Content, Space};
use std::collections::BTreeMap;

impl LocalLowering<'_, '_, '_> {
    /// Settles arenas, plans the temporary one of each chunk, and adds the bodies.
    pub(super) fn finish(mut self) -> Bodies {
        for (id, (chunk, all)) in &self.touched {
            let space = self.l.program.buffers[id.index()].arena.space();
            let arena = if all.len() == 1 {
                space.temporary()
            } else if all.iter().all(|c| c.is_pass()) {
                let lifetime = (self.names.prefix.to_string(), *chunk, all.clone());
                self.l.stashed.entry(lifetime).or_default().push(*id);
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
        let mut bodies = Bodies::new();
        for (chunk, commands) in std::mem::take(&mut self.commands) {
            self.plan_temporary(&commands);
            let kind = match chunk {
                Chunk::Prologue | Chunk::PrologueReduce => BodyKind::Prologue,
                Chunk::Forward(l) => BodyKind::Forward(l),
                Chunk::Backward(l) => BodyKind::Backward(l),
                Chunk::Weight(l) => BodyKind::Weight(l),
                Chunk::Reduce => BodyKind::Reduce,
                Chunk::Update => BodyKind::Update,
            };
            bodies.insert(chunk, BodyId(self.l.program.bodies.len() as u32));
            self.l.program.bodies.push(Body { name: format!("{}{chunk}", self.names.prefix), kind, commands });
        }
        bodies
    }

    fn plan_temporary(&mut self, commands: &[Command]) {
        for arena in Space::ALL.map(Space::temporary) {
            let mut lives: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
            for (k, c) in commands.iter().enumerate() {
                for id in c.action.buffers() {
                    if self.l.program.buffers[id.index()].arena == arena {
                        lives.entry(id).or_insert((k, k)).1 = k;
                    }
                }
            }
            let ids: Vec<BufferId> = lives.keys().copied().collect();
            let needs: Vec<Need> =
                ids.iter().map(|id| Need { bytes: self.l.program.buffers[id.index()].bytes(), first: lives[id].0, last: lives[id].1 }).collect();
            let (offsets, total) = allocate::assign(&needs);
            for (id, offset) in ids.iter().zip(offsets) {
                self.l.program.buffers[id.index()].offset = offset;
            }
            let bytes = &mut self.l.program.arena_bytes[arena as usize];
            *bytes = total.max(*bytes);
        }
    }
}
