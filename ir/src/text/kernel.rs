//! The text form of a kernel.

use super::body::{NoAnnotations, blank_type, body, dtype, ty};
use super::io::{Io, Result};
use super::op::dims;
use crate::graph::{Body, Value};
use crate::kernel::{Family, Kernel, Operand, Output};
use crate::op::DType;
use crate::program::Space;

pub(super) fn blank_kernel() -> Kernel {
    Kernel { on: Space::Device, family: Family::Gemm, body: Body::default(), inputs: vec![], scalars: vec![], outputs: vec![] }
}

/// A kernel from its family on.
pub(super) fn kernel(io: &mut Io, k: &mut Kernel) -> Result {
    let all = [
        ("loops", Family::Loops { grid: vec![] }),
        ("gemm", Family::Gemm),
        ("attention", Family::Attention),
        ("attention_grad", Family::AttentionGrad),
        ("scatter", Family::Scatter),
    ];
    io.variant(&mut k.family, "a family of kernels", &all)?;
    io.or(&mut k.on, Space::Device, " on ", |io, s| io.variant(s, "a space", &Space::ALL.map(|s| (s.name(), s))))?;
    io.with(" scalars ", &mut k.scalars, |io, s| io.list(s, DType::I32, dtype))?;
    body(io, &mut k.body, &mut NoAnnotations)?;
    match &mut k.family {
        Family::Loops { grid } => {
            io.line("grid ")?;
            dims(io, grid)?;
        }
        Family::Gemm | Family::Attention | Family::AttentionGrad | Family::Scatter => {}
    }
    io.rows(&mut k.inputs, Operand { ty: blank_type(), strides: vec![], unaligned: false }, "operand ", |io, _, x| {
        ty(io, &mut x.ty)?;
        io.with(" strides ", &mut x.strides, |io, s| io.list(s, 0, Io::number))?;
        io.flag(&mut x.unaligned, " unaligned")
    })?;
    io.rows(&mut k.outputs, Output { value: Value(0), strides: vec![], accumulate: false }, "result ", |io, _, x| {
        io.value(&mut x.value)?;
        io.with(" strides ", &mut x.strides, |io, s| io.list(s, 0, Io::number))?;
        io.flag(&mut x.accumulate, " accumulate")
    })
}
