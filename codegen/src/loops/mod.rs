//! Generic loops: any fusion of pointwise ops, reductions, gathers and copies, vectorised along one dim.
//!
//! At each grid point a kernel runs a few loop nests, one after the other: reductions, then the stores. A nest computes the pointwise values that
//! it needs anew from inputs and from results of earlier nests.

mod emit;
mod fold;
mod place;
mod plan;
mod reduce;
mod scatter;
#[cfg(test)]
mod tests;
mod value;

pub use emit::accumulated;

use crate::build::Frame;
use crate::target::Target;
use crate::{CompileError, Shape};
use ir::dim::Dim;
use ir::kernel::Kernel;
use plan::Plan;
pub use scatter::emit as emit_scatter;

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op of the kernel is not supported.
pub fn emit<B: Frame>(b: &B, kernel: &Kernel, grid: &[Dim], target: &Target, name: &str) -> Result<Shape, CompileError> {
    let plan = Plan::new(kernel, grid, target);
    let count = kernel.inputs.len() + kernel.outputs.len();
    let scratch = b.kernel(name, [count, kernel.scalars.len()], &mut |entry| {
        let pointers: Vec<_> = (0..count).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        emit::emit(b, kernel, &plan, entry, &pointers)
    })?;
    Ok(Shape { tiles: plan.tiles() as u64, scratch_bytes: scratch as u64 })
}
