//! Products on GPUs: a block of threads computes a tile, which it takes through shared memory in stages of contracted
//! elements.
//!
//! While one stage is multiplied the next ones are on their way. 16-bit factors meet in tensor cores, f32 ones that
//! are to be rounded to tf32 too, others in f32 multiply-adds. There are two forms: all threads do the same
//! ([`multistage`]), or some copy and others multiply ([`warp_specialized`]), where tensor maps describe both factors
//! ([`plan::WarpSpecializedPlan`]). Blocks take tiles in an order in which those at work at a time share rows and
//! columns. Where experts own rows or contracted elements, a tile of rows goes through the experts that own some of
//! them, and then through nobody's, whose sums are 0.

mod copy;
mod fma;
mod mma;
mod multistage;
mod parts;
pub mod plan;
mod store;
mod tensor_maps;
#[cfg(test)]
mod tests;
mod tile;
mod warp_specialized;
mod wgmma;

use super::product::Product;
use crate::build::simt::Simt;
use crate::target::Target;
use crate::{CompileError, Shape};
use ir::kernel::Kernel;
use ir::launch::Launch;
use plan::{MultistagePlan, WarpSpecializedPlan};

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Simt, kernel: &Kernel, target: &Target, name: &str) -> Result<(Shape, Launch), CompileError> {
    let product = Product::new(kernel)?;
    match WarpSpecializedPlan::new(kernel, &product, target) {
        Some(plan) => warp_specialized::emit(b, kernel, &product, &plan, name),
        None => multistage::emit(b, kernel, &product, &MultistagePlan::new(kernel, &product, target), name),
    }
}
