//! Attention on the tensor cores of sm_90a, after FlashAttention-3 (Shah et al. 2024): one thread copies by tensor
//! maps, two warpgroups multiply (`wgmma`).
//!
//! A tile is 128 rows of one side of one head, 64 to a warpgroup, in a stage of its own. Blocks of the other side's
//! rows come by in stages that go around ([`Stages`]). Products of two factors in shared memory give scores; what
//! becomes of them stays in registers, where it is the first factor of the next product. The warpgroup that copies
//! also finds which blocks a tile meets; each block says whether it needs the mask, and the tile says how many there
//! are, in words beside the stages.

mod backward;
mod forward;
mod matrices;
mod pairs;
mod tensor_maps;

use super::*;
use crate::abi::launch_of_specialized_warps;
use crate::build::scheduler::Scheduler;
use crate::build::simt::KernelParameters;
use crate::build::stages::{FEW_REGISTERS, Position, Stages, WARPGROUP, elected, first_warp, more_registers, one_lane, release};
use crate::build::swizzle::{self, LINE};
use crate::target::Target;
use ir::kernel::Family;
use matrices::{Matrices, Matrix};
use tensor_maps::OperandMap;

/// Warpgroups that multiply.
const GROUPS: i64 = 2;
/// The warps that copy, and those that multiply.
const BLOCK: i64 = (1 + GROUPS) * WARPGROUP;
const COPIERS: WarpTeam = WarpTeam { first: 0, warps: WARPS, threads: BLOCK };
const MULTIPLIERS: WarpTeam = WarpTeam { first: WARPS, warps: GROUPS * WARPS, threads: BLOCK };
/// One block runs on a multiprocessor at a time.
const BOUNDS: LaunchBounds = LaunchBounds { threads: BLOCK as u32, blocks: 1, cluster: 1 };

/// Tensor maps and sizes of a warp-specialized kernel.
pub enum WarpSpecializedConfig {
    Forward(forward::ForwardConfig),
    Backward(backward::BackwardConfig),
}

impl WarpSpecializedConfig {
    /// `None` if the GPU has no tensor copies, an operand has no tensor map, heads have other than 64 or 128
    /// elements, scores depend on an operand of pairs, or probabilities have weights: the last two would need more
    /// registers than there are.
    pub fn new(plan: &AttentionPlan, target: &Target) -> Option<WarpSpecializedConfig> {
        if !target.has_wgmma() || plan.program.reads_pairs() || plan.program.weighs() || plan.d != plan.values || ![64, 128].contains(&plan.d.d) {
            return None;
        }
        match plan.kernel.family {
            Family::Attention => forward::ForwardConfig::new(plan).map(WarpSpecializedConfig::Forward),
            Family::AttentionGrad => backward::BackwardConfig::new(plan, target).map(WarpSpecializedConfig::Backward),
            Family::Gemm | Family::Loops { .. } | Family::Scatter => None,
        }
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An operand is not an input.
pub fn emit(b: &Simt, plan: &AttentionPlan, half: Half, config: &WarpSpecializedConfig, name: &str) -> Result<(Shape, Launch), CompileError> {
    match config {
        WarpSpecializedConfig::Forward(config) => forward::emit(b, plan, half, config, name),
        WarpSpecializedConfig::Backward(config) => backward::emit(b, plan, half, config, name),
    }
}

/// A tile: the arguments at its head, the head's indices along its dims, and its rows.
struct AttentionTile<'c> {
    at: GpuArguments<'c>,
    heads: HeadIndices<'c>,
    own: RowTile<'c>,
}

/// The number of a head along each of its dims.
type HeadIndices<'c> = Vec<(Dim, Index<'c>)>;

impl<'c> MmaAttention<'_, 'c> {
    /// The digits of a number of 32 bits that counts in `dims`, the last fastest.
    fn digits(&self, dims: &[Dim], number: Index<'c>) -> HeadIndices<'c> {
        let (b, mut rest) = (self.b, number);
        let digit = |dim: &Dim| {
            let size = b.word(self.plan.sizes(&[*dim]));
            let digit = b.index_rem(rest, size);
            rest = b.index_div(rest, size);
            (*dim, digit)
        };
        dims.iter().rev().map(digit).collect()
    }
}

/// The kernel's tensors. `scratch` is unused, as such kernels have none.
fn arguments<'c>(b: &Simt<'c>, kernel: &Kernel, parameters: &KernelParameters<'c>) -> GpuArguments<'c> {
    let count = kernel.inputs.len() + kernel.outputs.len();
    let tensors = (0..count).map(|i| b.load_pointer(b.at_const(parameters.arguments, 8 * i as i64))).collect();
    Arguments { tensors, scratch: parameters.arguments }
}

/// The number of this thread's warpgroup in the block.
fn warpgroup<'c>(b: &Simt<'c>) -> Index<'c> {
    b.uniform(b.index_div(b.thread(), b.word(WARPGROUP)))
}

/// Makes mbarriers, for all of the block.
fn prepare(b: &Simt, all: &[&Stages], scheduler: &Scheduler) {
    b.if_so(b.equal(b.thread(), b.word(0)), || {
        for stages in all {
            stages.prepare(MULTIPLIERS.warps);
        }
        scheduler.prepare(COPIERS.warps + MULTIPLIERS.warps);
        b.asm(Instruction::FenceBarriers, &[]);
    });
    b.barrier();
}
