//! Generic loops: any fusion of pointwise ops, reductions, gathers and copies, vectorised along one dim.
//!
//! At each grid point a kernel runs a few loop nests, one after the other: reductions, then the stores. A nest
//! computes the pointwise values that it needs anew from inputs and from results of earlier nests.

mod emit;
mod fold;
mod index_point;
mod plan;
mod reduce;
mod runs;
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
use plan::{LoopPlan, Step};
pub use scatter::emit as emit_scatter;

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op of the kernel is not supported.
pub fn emit<B: Frame>(b: &B, kernel: &Kernel, grid: &[Dim], target: &Target, name: &str) -> Result<Shape, CompileError> {
    let plan = LoopPlan::new(kernel, grid, target);
    let count = kernel.inputs.len() + kernel.outputs.len();
    let members = plan.team.map_or(1, |t| t.members);
    let scratch = b.kernel_of_teams(name, [count, kernel.scalars.len()], members, &mut |entry| {
        let pointers: Vec<_> = (0..count).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        emit::emit(b, kernel, &plan, entry, &pointers)
    })?;
    Ok(Shape { tiles: plan.tiles() as u64, line: 1, scratch_bytes: scratch as u64 })
}

/// Workers that compute a tile together, where there are several, and bytes that they share: a vector of each sum
/// from each worker.
pub fn team(kernel: &Kernel, grid: &[Dim], target: &Target) -> Option<(i64, i64)> {
    let plan = LoopPlan::new(kernel, grid, target);
    let sums = plan.steps.iter().map(|s| if let Step::Reduce { values, .. } = s { values.len() as i64 } else { 0 }).max().unwrap_or(0);
    plan.team.map(|t| (t.members, t.members * sums * 4 * target.lanes() as i64))
}
