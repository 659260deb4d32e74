//! What the parts of a kernel under construction share.

use super::plan::GemmPlan;
use super::prefetch::BlockPrefetch;
use crate::build::Lane;
use crate::build::llvm::Llvm;
use crate::pointwise;
use crate::target::Target;
use ir::kernel::Kernel;

/// The kernel, its plan, and what follows from both.
pub struct Gemm<'a, 'c> {
    pub b: &'a Llvm<'c>,
    pub kernel: &'a Kernel,
    pub plan: &'a GemmPlan,
    pub target: &'a Target,
    /// The row stride of the sums of a tile that wait in scratch between blocks of contracted elements. With one
    /// block they never leave registers.
    pub partials: Option<i64>,
    /// The ops after the product are many: they are written as a loop over rows.
    pub long_epilogue: bool,
    /// How micro-kernels prepare the next blocks of `A` and `B`, if these are copied.
    pub next: [Option<BlockPrefetch>; 2],
}

impl Gemm<'_, '_> {
    /// A tensor's elements in memory.
    pub fn lane(&self, tensor: usize) -> Lane {
        let kernel = self.kernel;
        let ty = match kernel.inputs.get(tensor) {
            Some(input) => &input.ty,
            None => &kernel.body[kernel.outputs[tensor - kernel.inputs.len()].value].ty,
        };
        pointwise::stored(ty.dtype)
    }

    /// Bytes of an element of a tensor in memory.
    pub fn bytes(&self, tensor: usize) -> i64 {
        self.lane(tensor).bytes()
    }
}
