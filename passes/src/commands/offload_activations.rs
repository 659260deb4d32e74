//! Has activations wait on the host for the backward pass: what a forward pass stashes of them is copied to the host
//! once it is written, and back before a later pass uses it. (Register allocators call it spilling. vDNN, Rhu et al.
//! 2016; Megatron-LM's fine-grained activation offloading.)
//!
//! The stash moves to the host's memory, and each pass has a temporary buffer in its place. Copies are commands like
//! others: which stream they go on is for later passes to say. One goes to the host where the value is complete; one
//! comes back before its first use, or earlier ([`crate::commands::prefetch`]).
//!
//! Some stay on the device: what passes of other virtual stages read, or write again for others; small ones, which
//! would cost more time than they are worth; and what the last layer's backward pass reads where it comes next, as it
//! would wait.

use crate::commands::effects::memory_effects;
use crate::commands::spills::{BufferReplacement, Spills, added, copy};
use ir::graph::{Origin, Phase};
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::options::ActivationOffload;
use ir::program::{Action, Arena, BodyKind, Buffer, BufferAddress, BufferId, Call, CallSchedule, Job, Program, ProgramBody, Space};
use std::collections::{BTreeMap, BTreeSet};

/// A value that is smaller than the largest by more than this factor stays on the device.
const LARGEST: u64 = 64;

/// Moves the stashed activations that are asked for.
pub fn offload(mut job: Job, which: ActivationOffload) -> Job {
    let Job { mesh, kernels, programs, stages, .. } = &mut job;
    for (p, program) in programs.iter_mut().enumerate() {
        let schedules: Vec<&CallSchedule> = stages.iter().filter(|s| s.program as usize == p).map(|s| &s.schedule).collect();
        let mut spills: BTreeMap<usize, Spills> = BTreeMap::new();
        for (id, passes) in chosen(mesh, kernels, program, &schedules, which) {
            spill(program, id, &passes, &mut spills);
        }
        for (body, mut spills) in spills {
            spills.copies.sort_by_key(|c| c.0);
            spills.insert(&mut program.bodies[body]);
        }
    }
    job
}

/// The uses of a stashed buffer: by the forward pass that writes it, up to the last command that does; and by later
/// passes, from the first command on.
struct SpillUses {
    written: (usize, usize),
    read: Vec<(usize, usize)>,
}

/// The buffers that are to wait on the host, with their uses.
fn chosen(mesh: &Mesh, kernels: &[Kernel], program: &Program, schedules: &[&CallSchedule], which: ActivationOffload) -> Vec<(BufferId, SpillUses)> {
    let (layers, marked) = match which {
        ActivationOffload::Off => return vec![],
        ActivationOffload::Layers(layers) => (layers, false),
        ActivationOffload::Marked(layers) => (layers, true),
    };
    let ends: Vec<Option<[u32; 2]>> = program.bodies.iter().map(ends).collect();
    let mut found: Vec<(BufferId, SpillUses, u32)> = vec![];
    for (id, uses) in uses(mesh, kernels, program) {
        let Some(Origin { layer: Some(layer), offloaded, .. }) = &program.buffers[id.index()].origin else { continue };
        if let Some(passes) = spillable(program, &uses).filter(|_| *offloaded || !marked) {
            let [first, _] = ends[passes.written.0].unwrap_or([*layer; 2]);
            // A value from the stage before enters the first layer.
            found.push((id, passes, first.max(*layer)));
        }
    }
    let all: BTreeSet<u32> = found.iter().map(|f| f.2).collect();
    let first: BTreeSet<u32> = all.into_iter().take(layers.map_or(usize::MAX, |n| n as usize)).collect();
    let turning: BTreeSet<usize> = schedules.iter().flat_map(|s| turning(program, &s.train)).collect();
    // These values are read first in the backward pass: by the last layer, or before it.
    let at_once = |passes: &SpillUses| {
        let backward = passes.read.iter().filter(|(body, _)| matches!(program.bodies[*body].kind, BodyKind::Backward(_)));
        let layers = backward.map(|(body, first)| program.bodies[*body].commands[*first].origin.layer);
        let [_, last] = ends[passes.written.0].unwrap_or_default();
        turning.contains(&passes.written.0) && layers.clone().any(|layer| layer.is_none_or(|layer| layer >= last))
    };
    let bytes = |id: BufferId| program.buffers[id.index()].bytes();
    let largest = found.iter().map(|f| bytes(f.0)).max().unwrap_or(0);
    let wanted =
        |(id, passes, layer): &(BufferId, SpillUses, u32)| !at_once(passes) && first.contains(layer) && bytes(*id).saturating_mul(LARGEST) >= largest;
    found.into_iter().filter(wanted).map(|(id, passes, _)| (id, passes)).collect()
}

/// The first and the last layer of which a body runs kernels.
fn ends(body: &ProgramBody) -> Option<[u32; 2]> {
    let kernels = body.commands.iter().filter(|c| matches!(c.action, Action::Launch { .. }));
    let layers = || kernels.clone().filter_map(|c| c.origin.layer);
    Some([layers().min()?, layers().max()?])
}

/// The commands of a body that touch a stashed buffer.
#[derive(Default)]
struct StashUses {
    first: usize,
    last_write: Option<usize>,
    /// Whether a write has a predicate, so that the buffer may hold nothing.
    optional: bool,
}

/// The uses of each buffer stashed on the device, by body.
fn uses(mesh: &Mesh, kernels: &[Kernel], program: &Program) -> BTreeMap<BufferId, BTreeMap<usize, StashUses>> {
    let mut out: BTreeMap<BufferId, BTreeMap<usize, StashUses>> = BTreeMap::new();
    for (b, body) in program.bodies.iter().enumerate() {
        for (k, command) in body.commands.iter().enumerate() {
            for touch in memory_effects(mesh, kernels, program, command) {
                if program.buffers[touch.buffer.index()].arena == Arena::Stash {
                    let uses = out.entry(touch.buffer).or_default().entry(b).or_insert(StashUses { first: k, ..StashUses::default() });
                    if touch.writes {
                        uses.last_write = Some(k);
                        uses.optional |= command.predicate.is_some() && !adds(kernels, &command.action, touch.buffer);
                    }
                }
            }
        }
    }
    out
}

/// Whether all that a command does to a buffer is to add to what is there.
fn adds(kernels: &[Kernel], action: &Action, id: BufferId) -> bool {
    let Action::Launch { kernel, args, .. } = action else { return false };
    let Kernel { inputs, outputs, .. } = &kernels[kernel.index()];
    outputs.iter().zip(&args[inputs.len()..]).all(|(o, place)| o.accumulate || place.buffer != id)
}

/// The passes of a value that one forward pass computes in full for later passes of its own virtual stage; `None` for
/// other values. The last of these passes may overwrite it.
fn spillable(program: &Program, uses: &BTreeMap<usize, StashUses>) -> Option<SpillUses> {
    let mut in_order: Vec<(usize, &StashUses)> = uses.iter().map(|(b, u)| (*b, u)).collect();
    in_order.sort_by_key(|(b, _)| match program.bodies[*b].kind {
        BodyKind::Prologue | BodyKind::Forward(_) => 0,
        BodyKind::Backward(_) => 1,
        BodyKind::Weight(_) | BodyKind::Reduce | BodyKind::Update => 2,
    });
    let ((body, first), later) = in_order.split_first()?;
    let optional = ir::fault!("offload_activations.writes.optional", false, first.optional);
    let (BodyKind::Forward(own), Some(last), false) = (program.bodies[*body].kind, first.last_write, optional) else { return None };
    let of_own = |b: usize| {
        ir::fault!("offload_activations.stage.other", true, false)
            || matches!(program.bodies[b].kind, BodyKind::Backward(l) | BodyKind::Weight(l) if l == own)
    };
    let (_, between) = later.split_last()?;
    let kept = between.iter().all(|(_, u)| ir::fault!("offload_activations.between.written", true, u.last_write.is_none()))
        && later.iter().all(|(b, _)| of_own(*b));
    let later = later.iter().take(ir::fault!("offload_activations.passes.first", 1, usize::MAX));
    kept.then(|| SpillUses { written: (*body, last), read: later.map(|(b, u)| (*b, u.first)).collect() })
}

/// The forward passes that are directly followed by their own backward pass.
fn turning(program: &Program, calls: &[Call]) -> Vec<usize> {
    let kind = |c: &Call| program.bodies[c.body.index()].kind;
    let turns = |pair: &&[Call]| {
        let same = pair[0].microbatch == pair[1].microbatch;
        same && matches!((kind(&pair[0]), kind(&pair[1])), (BodyKind::Forward(a), BodyKind::Backward(b)) if a == b)
    };
    calls.windows(2).filter(turns).map(|pair| pair[0].body.index()).collect()
}

/// Moves a stashed buffer to the host. The pass that writes it, and each that reads it, has a temporary buffer in its
/// place.
fn spill(program: &mut Program, id: BufferId, passes: &SpillUses, spills: &mut BTreeMap<usize, Spills>) {
    let device = Buffer { arena: Space::Device.temporary(), ..program.buffers[id.index()].clone() };
    let arena = ir::fault!("offload_activations.host.lasts", Space::Host.lasting(), Space::Host.stash());
    let host = added(program, Buffer { arena, ..device.clone() });
    let (body, last) = passes.written;
    let before = ir::fault!("offload_activations.copy.soon", 0, last + 1);
    if ir::fault!("offload_activations.copy.none", false, true) {
        let out =
            copy(&device, [id, host].map(BufferAddress::start), device.elements(), Phase::Forward, "it waits on the host for the backward pass");
        spills.entry(body).or_default().copies.push((before, out));
    }
    for (body, first) in &passes.read {
        let own = ir::fault!("offload_activations.buffer.shared", id, added(program, device.clone()));
        let first = ir::fault!("offload_activations.copy.late", first + 1, *first);
        let spills = spills.entry(*body).or_default();
        spills.own.insert(id, vec![BufferReplacement { since: 0, part: (0, device.elements()), buffer: own }]);
        spills
            .copies
            .push((first, copy(&device, [host, own].map(BufferAddress::start), device.elements(), Phase::Backward, "it has waited on the host")));
    }
    program.buffers[id.index()] = device;
}
