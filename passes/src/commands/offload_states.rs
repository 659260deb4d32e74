//! Has what the host keeps over steps rest on a disk: the optimizer's states, and the weights that it works on; what
//! passes read of parameters; or both (ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! The optimizer runs on the host already, and passes copy parameters from there ([`crate::local::offload`]). Each
//! buffer of them moves to the disk, and each body that uses it has a temporary one in the host's memory in its place:
//! read before its first use, unless that writes all of it, and written back after the last command that changes it.
//! So the host holds what is worked on, what comes next and what has just gone
//! ([`crate::commands::list_schedule`] says how much that may be), and reading, computing and writing go on at the same
//! time, each on its stream. A part of a buffer that is used by itself, as a piece of an update is, comes and goes by
//! itself ([`crate::local::update_pieces`]). The smallest buffers stay ([`crate::local::offload::small`]). So does one
//! of which an update neither changes a part in place nor writes all anew.

use crate::commands::effects::{MemoryEffect, memory_effects};
use crate::commands::spills::{BufferReplacement, Spills, added, copy};
use crate::local::offload::small;
use ir::graph::Phase;
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::{Action, Arena, BLOCK, BodyKind, Buffer, BufferAddress, BufferId, Command, Content, Job, Program, Space};
use std::collections::BTreeMap;

/// Moves the states that the host keeps, the parameters, or both.
pub fn offload(mut job: Job, states: bool, params: bool) -> Job {
    let Job { mesh, kernels, programs, .. } = &mut job;
    for program in programs {
        let mut spills: BTreeMap<usize, Spills> = BTreeMap::new();
        let kept = |b: &Buffer| {
            let moves = match b.content {
                Content::State { .. } => states,
                Content::Param { .. } => params,
                Content::Table { .. } | Content::Accumulator | Content::Activation => false,
            };
            moves && b.arena == Space::Host.lasting()
        };
        let small = small(program.buffers.iter().filter(|b| kept(b)).map(Buffer::bytes).collect());
        let moved = program.buffers.iter().map(|b| kept(b) && b.bytes() > small).collect::<Vec<_>>();
        for (id, uses) in uses(mesh, kernels, program, &moved) {
            spill(program, id, &uses, &mut spills);
        }
        for (body, mut spills) in spills {
            spills.copies.sort_by_key(|c| c.0);
            spills.insert(&mut program.bodies[body]);
        }
    }
    job
}

/// A range of elements of a buffer: the first one, and the end.
type ElementRange = (u64, u64);

/// The commands of a body that touch a part of a buffer, from one that begins with what it finds there, or writes all
/// of it anew, to the next one that does so.
struct PartUses {
    first: usize,
    last_write: Option<usize>,
    /// Whether the first command overwrites the whole part.
    is_new: bool,
    /// Whether each other write is to elements that its command reads, so that one buffer suffices.
    is_in_place: bool,
}

impl PartUses {
    fn at(first: usize, is_new: bool) -> PartUses {
        PartUses { first, last_write: is_new.then_some(first), is_new, is_in_place: true }
    }

    /// Adds a command that touches the part in this way.
    fn and(&mut self, k: usize, touched: &[MemoryEffect]) {
        let (written, read): (Vec<&MemoryEffect>, Vec<&MemoryEffect>) = touched.iter().partition(|t| t.writes);
        if !written.is_empty() {
            self.last_write = Some(k);
            self.is_in_place &= written.iter().all(|w| read.iter().any(|r| (r.from, r.to) == (w.from, w.to)));
        }
    }
}

/// The uses of the parts of a buffer, by body.
type UsesByBody = BTreeMap<usize, BTreeMap<ElementRange, Vec<PartUses>>>;

/// The uses of each buffer that is to move.
fn uses(mesh: &Mesh, kernels: &[Kernel], program: &Program, moved: &[bool]) -> BTreeMap<BufferId, UsesByBody> {
    let mut out: BTreeMap<BufferId, UsesByBody> = BTreeMap::new();
    for (b, body) in program.bodies.iter().enumerate() {
        let mut touched: BTreeMap<BufferId, Vec<(usize, MemoryEffect)>> = BTreeMap::new();
        for (k, command) in body.commands.iter().enumerate() {
            for touch in memory_effects(mesh, kernels, program, command).into_iter().filter(|t| moved[t.buffer.index()]) {
                touched.entry(touch.buffer).or_default().push((k, touch));
            }
        }
        for (id, touched) in touched {
            let buffer = &program.buffers[id.index()];
            let mut by_part: BTreeMap<ElementRange, Vec<PartUses>> = parts(buffer, &touched).into_iter().map(|part| (part, vec![])).collect();
            for of_command in touched.chunk_by(|a, b| a.0 == b.0) {
                let k = of_command[0].0;
                let mut here: BTreeMap<ElementRange, Vec<MemoryEffect>> = BTreeMap::new();
                for (_, touch) in of_command {
                    let (part, _) = by_part.range(..=(touch.from, u64::MAX)).next_back().expect("invariant: parts have all that is touched");
                    here.entry(*part).or_default().push(*touch);
                }
                for (part, touched) in here {
                    let uses = by_part.get_mut(&part).expect("invariant: it is one of them");
                    if touched.iter().all(|t| t.writes) && renews(kernels, &body.commands[k], id, part) {
                        uses.push(PartUses::at(k, true));
                        continue;
                    }
                    if uses.is_empty() {
                        uses.push(PartUses::at(k, false));
                    }
                    uses.last_mut().expect("invariant: it has one by now").and(k, &touched);
                }
            }
            out.entry(id).or_default().insert(b, by_part);
        }
    }
    out.retain(|_, bodies| bodies.values().flat_map(BTreeMap::values).flatten().all(|uses| uses.is_in_place));
    out
}

/// What is touched, in parts that are whole blocks of a disk and have nothing in common.
fn parts(buffer: &Buffer, touched: &[(usize, MemoryEffect)]) -> Vec<ElementRange> {
    let unit = ir::fault!("offload_states.part.blocks", 1, BLOCK / buffer.dtype.bytes());
    let blocks = |t: &MemoryEffect| (t.from / unit * unit, t.to.next_multiple_of(unit).min(buffer.elements()));
    let mut all: Vec<ElementRange> = touched.iter().map(|(_, t)| blocks(t)).collect();
    all.sort_unstable();
    let mut out: Vec<ElementRange> = vec![];
    for (from, to) in all {
        match out.last_mut().filter(|last| from < last.1) {
            Some(last) => last.1 = last.1.max(to),
            None => out.push((from, to)),
        }
    }
    out
}

/// Whether a command surely writes every element of a part of a buffer.
fn renews(kernels: &[Kernel], command: &Command, id: BufferId, (from, to): ElementRange) -> bool {
    let all = |place: &BufferAddress, elements: u64| *place == BufferAddress { offset: from, ..BufferAddress::start(id) } && elements == to - from;
    let writes = match &command.action {
        Action::Launch { kernel, args, .. } => {
            let Kernel { body, inputs, outputs, .. } = &kernels[kernel.index()];
            outputs.iter().zip(&args[inputs.len()..]).any(|(o, place)| !o.accumulate && all(place, body.elements(o.value)))
        }
        Action::Copy { count, dst, .. } => all(dst, *count),
        _ => false,
    };
    writes && command.predicate.is_none()
}

/// Moves a buffer to the disk. Each body has a temporary buffer in the place of each part that it uses.
fn spill(program: &mut Program, id: BufferId, uses: &UsesByBody, spills: &mut BTreeMap<usize, Spills>) {
    let buffer = program.buffers[id.index()].clone();
    let arena = ir::fault!("offload_states.staged.device", Space::Device.temporary(), Space::Host.temporary());
    program.buffers[id.index()].arena = ir::fault!("offload_states.buffer.stays", buffer.arena, Arena::Disk);
    for (body, parts) in uses {
        let phase = match program.bodies[*body].kind {
            BodyKind::Prologue | BodyKind::Forward(_) => Phase::Forward,
            BodyKind::Backward(_) | BodyKind::Weight(_) => Phase::Backward,
            BodyKind::Reduce | BodyKind::Update => Phase::Update,
        };
        let spills = spills.entry(*body).or_default();
        for (part, uses) in parts {
            let elements = part.1 - part.0;
            let dims = if elements == buffer.elements() { buffer.dims.clone() } else { vec![("part".into(), elements)] };
            let staged = Buffer { arena, dims, content: Content::Activation, ..buffer.clone() };
            let resting = BufferAddress { offset: ir::fault!("offload_states.part.first", 0, part.0), ..BufferAddress::start(id) };
            for (k, PartUses { first, last_write, is_new, .. }) in uses.iter().enumerate() {
                let own = added(program, staged.clone());
                spills.own.entry(id).or_default().push(BufferReplacement { since: *first, part: *part, buffer: own });
                let copied =
                    |from: &BufferAddress, to: &BufferAddress| copy(&buffer, [from.clone(), to.clone()], elements, phase, "it rests on the disk");
                let own = BufferAddress::start(own);
                let read = ir::fault!("offload_states.read.late", first + 1, *first);
                if ir::fault!("offload_states.read.none", false, !is_new) {
                    spills.copies.push((read, copied(&resting, &own)));
                }
                // Only the last version is written back, as a later use overwrites all of it.
                let last = last_write.filter(|_| k + 1 == uses.len());
                if let Some(last) = ir::fault!("offload_states.write.none", None, last) {
                    let written = ir::fault!("offload_states.write.soon", last, last + 1);
                    spills.copies.push((written, copied(&own, &resting)));
                }
            }
        }
    }
}
