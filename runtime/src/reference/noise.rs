//! What rounding may do, as a change of what is interpreted: each result of an op that rounds is made another in its
//! last digit, up or down, as in Monte Carlo arithmetic (Parker 1997). A number that goes far by that is what is left
//! of greater ones that cancel, and no device is closer to it.

use ir::eval::Env;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::{Binary, Op, Reduce, Unary};
use ir::random::mix;

/// Half the last digit of an f32, in parts of it, at most.
pub const DIGIT: f64 = 1.0 / (1 << 24) as f64;

/// Whether numbers are interpreted as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numbers {
    /// Values are interpreted as they are.
    #[default]
    Exact,
    /// Changed in their last digits.
    Noisy,
}

/// Whether an op leaves numbers that neither it nor an operand has had: what moves, picks or negates does not.
fn rounds(op: &Op) -> bool {
    match op {
        Op::Unary(Unary::Neg | Unary::Abs | Unary::Floor | Unary::Sign | Unary::Not) => false,
        Op::Unary(_) => true,
        Op::Binary(Binary::Max | Binary::Min | Binary::Rem | Binary::And | Binary::Or | Binary::Mix) => false,
        Op::Binary(_) | Op::Add => true,
        Op::Dot { .. } | Op::GroupedDot { .. } | Op::Cumsum { .. } | Op::Scatter { .. } => true,
        Op::Reduce { kind, .. } => *kind == Reduce::Sum,
        Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..) => true,
        Op::Input(_) | Op::Param(_) | Op::State(..) | Op::Table(_) | Op::Const(_) | Op::Iota(_) | Op::Uniform { .. } | Op::Scalar(_) => false,
        Op::Compare(_) | Op::Select | Op::Cast | Op::StopGradient | Op::Cut | Op::Expand | Op::View { .. } | Op::Slice { .. } => false,
        Op::Pad { .. } | Op::Concat { .. } | Op::Shard { .. } | Op::ArgMax { .. } | Op::Gather { .. } => false,
        Op::Reshard { .. } | Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } | Op::Limit { .. } => false,
        Op::Dispatch(_) | Op::Combine(_) => false,
    }
}

/// Changes what one launch of a kernel makes.
pub fn change(kernel: &Kernel, launch: u64) -> impl FnMut(Value, &[&[f64]], &mut [f64], &mut dyn Env) {
    move |v, _, out, _| {
        let node = &kernel.body[v];
        if !node.ty.dtype.is_float() || !rounds(&node.op) {
            return;
        }
        let key = mix(launch << 20 ^ v.index() as u64);
        out.iter_mut().zip(0u64..).for_each(|(x, k)| *x *= 1.0 + if mix(key ^ k) & 1 == 0 { DIGIT } else { -DIGIT });
    }
}
