//! Has what the host keeps over steps rest on a disk: the optimizer's states, and the weights that it works on
//! (ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! The optimizer runs on the host already ([`crate::local::offload`]). Each buffer of its states moves to the disk,
//! and each body that uses it has a temporary one in the host's memory in its place: read before its first use,
//! written back after the last command that changes it. So the host holds what is worked on, what comes next and what
//! has just gone ([`crate::commands::list_schedule`] says how much that may be), and reading, computing and writing
//! go on at the same time, each on its stream. The smallest stay, a 64th of all bytes: a disk takes as long for a few
//! bytes as for many. So does a state that an update does not change in place.

use crate::commands::effects::{Touch, touches};
use crate::commands::spills::{Spills, added, copy};
use ir::graph::Phase;
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::{Arena, Buffer, BufferId, Content, Job, Program, Space};
use std::collections::BTreeMap;

/// The smallest states stay, as far as they are one part of so many of all.
const SMALL: u64 = 64;

/// Moves the states that the host keeps.
pub fn offload(mut job: Job) -> Job {
    let Job { mesh, kernels, programs, .. } = &mut job;
    for program in programs {
        let mut spills: BTreeMap<usize, Spills> = BTreeMap::new();
        for (id, uses) in uses(mesh, kernels, program) {
            spill(program, id, &uses, &mut spills);
        }
        for (body, mut spills) in spills {
            spills.copies.sort_by_key(|c| c.0);
            spills.insert(&mut program.bodies[body]);
        }
    }
    job
}

/// The commands of a body that touch a state: the first, and the last that writes it.
struct StateUses {
    first: usize,
    last_write: Option<usize>,
    /// Whether each write is over what its command reads: then one buffer does.
    is_in_place: bool,
}

impl StateUses {
    /// Those of one command more, which reads and writes these parts.
    fn and(&mut self, k: usize, read: &[Touch], written: &[Touch]) {
        if !written.is_empty() {
            self.last_write = Some(k);
            self.is_in_place &= written.iter().all(|w| read.iter().any(|r| (r.from, r.to) == (w.from, w.to)));
        }
    }
}

/// The size up to which states stay, all of which are together no more than a share of all.
fn small(mut sizes: Vec<u64>) -> u64 {
    sizes.sort_unstable();
    let most = sizes.iter().fold(0, |sum: u64, n| sum.saturating_add(*n)) / SMALL;
    let (mut sum, mut size) = (0u64, 0);
    for alike in sizes.chunk_by(|a, b| a == b) {
        sum = sum.saturating_add(alike[0].saturating_mul(alike.len() as u64));
        if sum > most {
            break;
        }
        size = alike[0];
    }
    size
}

/// Of each buffer that is to move, its uses by body.
fn uses(mesh: &Mesh, kernels: &[Kernel], program: &Program) -> BTreeMap<BufferId, BTreeMap<usize, StateUses>> {
    let kept = |b: &Buffer| b.arena == Space::Host.lasting() && matches!(b.content, Content::State { .. });
    let small = small(program.buffers.iter().filter(|b| kept(b)).map(Buffer::bytes).collect());
    let moves = |b: &Buffer| kept(b) && b.bytes() > small;
    let mut out: BTreeMap<BufferId, BTreeMap<usize, StateUses>> = BTreeMap::new();
    for (b, body) in program.bodies.iter().enumerate() {
        for (k, command) in body.commands.iter().enumerate() {
            let mut touched: BTreeMap<BufferId, [Vec<Touch>; 2]> = BTreeMap::new();
            for touch in touches(mesh, kernels, program, command).into_iter().filter(|t| moves(&program.buffers[t.buffer.index()])) {
                touched.entry(touch.buffer).or_default()[usize::from(touch.writes)].push(touch);
            }
            for (id, [read, written]) in touched {
                let new = StateUses { first: k, last_write: None, is_in_place: true };
                out.entry(id).or_default().entry(b).or_insert(new).and(k, &read, &written);
            }
        }
    }
    out.retain(|_, uses| uses.values().all(|uses| uses.is_in_place));
    out
}

/// Moves a buffer to the disk: each body that uses it has a temporary one in its place.
fn spill(program: &mut Program, id: BufferId, uses: &BTreeMap<usize, StateUses>, spills: &mut BTreeMap<usize, Spills>) {
    let buffer = program.buffers[id.index()].clone();
    let arena = ir::fault!("offload_states.staged.device", Space::Device.temporary(), Space::Host.temporary());
    let staged = Buffer { arena, content: Content::Activation, ..buffer.clone() };
    program.buffers[id.index()].arena = ir::fault!("offload_states.buffer.stays", buffer.arena, Arena::Disk);
    for (body, StateUses { first, last_write, .. }) in uses {
        let own = added(program, staged.clone());
        let spills = spills.entry(*body).or_default();
        spills.own.insert(id, own);
        let read = ir::fault!("offload_states.read.late", first + 1, *first);
        if ir::fault!("offload_states.read.none", false, true) {
            spills.copies.push((read, copy(&buffer, id, own, Phase::Update, "it rests on the disk")));
        }
        if let Some(last) = ir::fault!("offload_states.write.none", None, *last_write) {
            let written = ir::fault!("offload_states.write.soon", last, last + 1);
            spills.copies.push((written, copy(&buffer, own, id, Phase::Update, "it rests on the disk")));
        }
    }
}
