//! Which stream of a rank runs a command.

use ir::kernel::Kernel;
use ir::mesh::{Axis, Mesh};
use ir::program::{Action, Buffer, Group, Space, Stream};

/// The stream of a command, if it is to overlap.
pub fn stream_of(mesh: &Mesh, kernels: &[Kernel], buffers: &[Buffer], groups: &[Group], action: &Action) -> Stream {
    match action {
        Action::Launch { kernel, .. } => match kernels[kernel.index()].on {
            Space::Device => Stream::Compute,
            Space::Host => Stream::Host,
        },
        Action::Copy { dst, .. } => match buffers[dst.buffer.index()].arena.space() {
            Space::Device => Stream::ToDevice,
            Space::Host => Stream::ToHost,
        },
        Action::Collective { group, .. } => {
            let Group { subs, stages } = &groups[group.index()];
            let data = subs.iter().any(|u| mesh[*u].axis == Axis::Dp && mesh[*u].role == Axis::Edp);
            if data || stages.as_ref().is_some_and(|s| s.len() > 1) { Stream::Data } else { Stream::Tensor }
        }
        Action::Send { .. } => Stream::Send,
        Action::Recv { .. } => Stream::Receive,
        Action::Fill { .. } | Action::Load { .. } | Action::Report { .. } | Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => {
            Stream::Compute
        }
    }
}
