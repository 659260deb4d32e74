//! What nodes of local graphs come to as commands, and how much of them a kernel holds.

use ir::dim::Dim;
use ir::graph::{Body, Value};
use ir::op::Op;

/// Values that a kernel of several nodes reads, and results that it stores, at most. The time that LLVM takes for a kernel grows with their square, and the parameters of a GPU's
/// kernel are 4 KiB at most ("Function Parameters", CUDA C++ Programming Guide), which is 512 addresses.
pub const MAX_OPERANDS: usize = 256;

/// What becomes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Part of a kernel.
    Compute,
    /// Made anew by every kernel that uses it.
    Inline,
    /// A buffer filled from outside: parameter, state, table, input.
    Source,
    /// The same memory as its operand, if the layout allows.
    Alias,
    /// A collective, a send, a receive, a limit.
    Exchange,
}

pub fn role(body: &Body, v: Value) -> Role {
    match &body[v].op {
        Op::Input(_) | Op::Param(_) | Op::State(..) | Op::Table(_) => Role::Source,
        Op::Const(_) | Op::Iota(_) | Op::Uniform { .. } | Op::Scalar(_) => Role::Inline,
        Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } | Op::Cut | Op::StopGradient => Role::Alias,
        // A permutation that moves only dims of one element moves nothing.
        Op::Expand if is_renumbering(body, v) => Role::Alias,
        Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } | Op::Limit { .. } => Role::Exchange,
        Op::Expand
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Add
        | Op::Cast
        | Op::Pad { .. }
        | Op::Concat { .. }
        | Op::Dot { .. }
        | Op::GroupedDot { .. }
        | Op::Reduce { .. }
        | Op::ArgMax { .. }
        | Op::Cumsum { .. }
        | Op::Gather { .. }
        | Op::Scatter { .. }
        | Op::Attention(_)
        | Op::AttentionLse(_)
        | Op::AttentionGrad(..) => Role::Compute,
        Op::Dispatch(_) | Op::Combine(_) => unreachable!("invariant: local graphs have rows, or gathers and scatters"),
        Op::Reshard { .. } => unreachable!("invariant: the local level has collectives, not reshards"),
    }
}

fn is_renumbering(body: &Body, v: Value) -> bool {
    let long = |dims: &[Dim]| dims.iter().copied().filter(|d| body.dims.size(*d) != 1).collect::<Vec<_>>();
    let arg = body[v].args[0];
    body.dims_of(arg).len() == body.dims_of(v).len() && long(body.dims_of(arg)) == long(body.dims_of(v))
}
