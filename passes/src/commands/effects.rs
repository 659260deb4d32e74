//! What a command reads and writes: parts of buffers.

use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::{Action, BufferAddress, BufferId, Command, Program};

/// Elements `from..to` of a buffer that a command may touch, whatever the rank and microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEffect {
    /// The buffer, of the program that the command is in.
    pub buffer: BufferId,
    /// First element, counted from the buffer's beginning.
    pub from: u64,
    /// One past the last element.
    pub to: u64,
    /// Whether the elements may be written; if not, they are only read.
    pub writes: bool,
}

/// All that a command touches. Of a kernel's operands, what lies between the first and the last element.
pub fn memory_effects(mesh: &Mesh, kernels: &[Kernel], program: &Program, command: &Command) -> Vec<MemoryEffect> {
    let part = |place: &BufferAddress, elements: u64, writes: bool| {
        let spread: u64 = place.coords.iter().map(|(u, stride)| (mesh[*u].size - 1) * stride).sum();
        MemoryEffect { buffer: place.buffer, from: place.offset, to: place.offset + spread + elements, writes }
    };
    let whole = |buffer: BufferId| MemoryEffect { buffer, from: 0, to: program.buffers[buffer.index()].elements(), writes: true };
    let of_action = match &command.action {
        Action::Launch { kernel, args, .. } => {
            let kernel = &kernels[kernel.index()];
            let inputs = kernel.inputs.iter().map(|i| (&i.ty.dims, &i.strides, false));
            let outputs = kernel.outputs.iter().map(|o| (&kernel.body[o.value].ty.dims, &o.strides, ir::fault!("effects.launch.reads", false, true)));
            let reach = |dims: &[ir::dim::Dim], strides: &[u64]| {
                1 + dims.iter().zip(strides).map(|(d, s)| kernel.body.dims.size(*d).saturating_sub(1) * s).sum::<u64>()
            };
            inputs.chain(outputs).zip(args).map(|((dims, strides, writes), place)| part(place, reach(dims, strides), writes)).collect()
        }
        Action::Collective { kind, group, count, src, dst, .. } => {
            let (give, get) = kind.elements(*count, program.groups[group.index()].size(mesh));
            vec![part(src, give, false), part(dst, get, true)]
        }
        Action::Copy { count, src, dst, .. } => vec![part(src, *count, false), part(dst, *count, true)],
        Action::Send { count, src, .. } => vec![part(src, *count, false)],
        Action::Report { src, .. } | Action::Limit { src, .. } => vec![part(src, 1, false)],
        Action::Recv { count, dst, .. } => vec![part(dst, *count, true)],
        Action::Fill { buffer, .. } | Action::Load { dst: buffer, .. } => vec![whole(*buffer)],
        Action::Record { .. } | Action::Wait { .. } => vec![],
    };
    let predicate = command.predicate.iter().filter(|_| ir::fault!("effects.predicate.lost", false, true));
    of_action.into_iter().chain(predicate.map(|p| part(p, 1, false))).collect()
}
