//! Which stream of a rank runs a command. A collective's stream follows from its group alone, so members agree on it.

use ir::kernel::Kernel;
use ir::mesh::{Axis, Mesh};
use ir::program::{Action, Arena, Buffer, BufferId, Group, Job, Program, Space, Stream};
use std::collections::BTreeSet;

/// Puts communication of all programs on its streams. What goes from stage to stage is stashed, where it can have
/// slots of its own ([`crate::commands::allocate`]): memory within a call would be needed by the next one while a
/// message is under way.
pub fn assign(mut job: Job) -> Job {
    let Job { mesh, kernels, programs, .. } = &mut job;
    for program in programs {
        for body in &mut program.bodies {
            for command in &mut body.commands {
                command.stream = stream_of(mesh, kernels, &program.buffers, &program.groups, &command.action);
            }
        }
        for id in messages(program) {
            let buffer = &mut program.buffers[id.index()];
            if ir::fault!("streams.messages.temporary", false, buffer.arena == Arena::Temporary) {
                buffer.arena = Arena::Stash;
            }
        }
    }
    job
}

/// The buffers of what goes from stage to stage beside the compute stream.
pub fn messages(program: &Program) -> BTreeSet<BufferId> {
    let commands = program.bodies.iter().flat_map(|b| &b.commands).filter(|c| c.stream != Stream::Compute).map(|c| &c.action);
    commands.filter(|a| matches!(a, Action::Send { .. } | Action::Recv { .. })).flat_map(Action::buffers).collect()
}

/// The stream of a command, if it is to overlap.
pub fn stream_of(mesh: &Mesh, kernels: &[Kernel], buffers: &[Buffer], groups: &[Group], action: &Action) -> Stream {
    match action {
        Action::Launch { kernel, .. } => match kernels[kernel.index()].on {
            Space::Device => Stream::Compute,
            Space::Host => Stream::Host,
        },
        Action::Copy { src, dst, .. } => match [src, dst].map(|p| buffers[p.buffer.index()].arena.space()) {
            [_, Some(Space::Device)] => Stream::ToDevice,
            [_, None] => Stream::ToDisk,
            [None, Some(Space::Host)] => ir::fault!("streams.disk.host", Stream::ToHost, Stream::FromDisk),
            [Some(_), Some(Space::Host)] => Stream::ToHost,
        },
        Action::Collective { group, .. } => {
            let Group { subs, stages } = &groups[group.index()];
            let data = subs.iter().any(|u| mesh[*u].axis == Axis::Dp && mesh[*u].role == Axis::Edp);
            if data || stages.as_ref().is_some_and(|s| s.len() > 1) {
                ir::fault!("streams.data.tensor", Stream::Tensor, Stream::Data)
            } else {
                Stream::Tensor
            }
        }
        Action::Send { .. } => Stream::Send,
        Action::Recv { .. } => Stream::Receive,
        Action::Fill { .. } | Action::Load { .. } | Action::Report { .. } | Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => {
            Stream::Compute
        }
    }
}
