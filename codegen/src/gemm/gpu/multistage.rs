//! The form of a product whose threads all copy (`cp.async`), multiply and store: for f32, for GPUs before sm_90, and
//! for factors that tensor maps cannot describe or `wgmma` not read.
//!
//! While one stage is multiplied the next ones are on their way. The sums go through shared memory once more, so that
//! the epilogue, which is the CPU's, sees neighbouring columns in neighbouring lanes.

use super::copy::{LineDim, Stage};
use super::fma::Fma;
use super::mma::Mma;
use super::parts::{Gpu, TilePart};
use super::plan::{MultistagePlan, ProductInstruction};
use super::wgmma::{self, Wgmma};
use crate::abi::{LaunchBounds, launch_of_blocks};
use crate::build::Builder;
use crate::build::Frame;
use crate::build::asm::Instruction;
use crate::build::block::Index;
use crate::build::simt::{LANES, Pointer, Simt, Value};
use crate::gemm::epilogue::{Memory, ResultVector};
use crate::gemm::product::Product;
use crate::layout::div_ceil;
use crate::{CompileError, Shape};
use ir::kernel::Kernel;
use ir::launch::Launch;

/// The kernel under construction.
struct MultistageGemm<'a, 'c> {
    g: Gpu<'a, 'c>,
    plan: &'a MultistagePlan,
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Simt, kernel: &Kernel, product: &Product, plan: &MultistagePlan, name: &str) -> Result<(Shape, Launch), CompileError> {
    let gemm = MultistageGemm { g: Gpu { b, kernel, product, tile: &plan.tile, together: 1 }, plan };
    let tensors = kernel.inputs.len() + kernel.outputs.len();
    let bounds = LaunchBounds { threads: plan.tile.threads() as u32, blocks: plan.tile.blocks, cluster: 1 };
    b.kernel_of_blocks(name, [tensors, kernel.scalars.len()], bounds, &mut |entry| {
        let tensors: Vec<Pointer> = (0..tensors).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        gemm.g.tile(b.narrow(entry.first_tile), &tensors, &mut |part| gemm.part(part, entry.scalars))
    })?;
    let shape = Shape { tiles: plan.tile.count(product) as u64, line: 1, scratch_bytes: 0 };
    Ok((shape, launch_of_blocks(kernel, &shape, bounds, plan.shared_bytes() as u32)))
}

/// A thread's part of the arithmetic.
enum Multiplier<'c> {
    Mma(Mma<'c>),
    Wgmma(Wgmma<'c>),
    Fma(Fma<'c>),
}

impl<'c> Multiplier<'c> {
    fn new(b: &Simt<'c>, plan: &MultistagePlan) -> Self {
        match plan.instruction {
            ProductInstruction::Mma(factor) => Multiplier::Mma(Mma::new(b, plan, factor)),
            ProductInstruction::Wgmma(half) => {
                let transposed = [plan.a.lines, plan.b.lines].map(|lines| lines == LineDim::Contracted);
                Multiplier::Wgmma(Wgmma::new(b, half.into(), &plan.tile, transposed, b.uniform(b.index_div(b.thread(), b.word(LANES as i64)))))
            }
            ProductInstruction::Fma => Multiplier::Fma(Fma::new(b, plan)),
        }
    }

    fn zero(&self, b: &Simt<'c>) -> Vec<Value<'c>> {
        match self {
            Multiplier::Mma(x) => x.zero(b),
            Multiplier::Wgmma(x) => x.zero(b),
            Multiplier::Fma(x) => x.zero(b),
        }
    }

    fn multiply(&self, b: &Simt<'c>, factors: [Index<'c>; 2], sums: &mut [Value<'c>]) {
        match self {
            Multiplier::Mma(x) => x.multiply(b, factors, sums),
            Multiplier::Wgmma(x) => x.multiply(b, factors, sums),
            Multiplier::Fma(x) => x.multiply(b, factors, sums),
        }
    }

    /// Makes what this thread copied visible to the products of other threads.
    fn show(&self, b: &Simt<'c>) {
        match self {
            Multiplier::Mma(_) | Multiplier::Fma(_) => {}
            Multiplier::Wgmma(x) => x.show(b),
        }
    }

    /// Whether other warps may still read the stages after the last products. Those of a warpgroup wait for each
    /// other's.
    fn leaves_readers(&self, plan: &MultistagePlan) -> bool {
        match self {
            Multiplier::Mma(_) | Multiplier::Fma(_) => true,
            Multiplier::Wgmma(_) => plan.tile.threads() > wgmma::THREADS,
        }
    }

    /// Waits for the last products.
    fn finish(&self, b: &Simt<'c>) {
        match self {
            Multiplier::Mma(_) | Multiplier::Fma(_) => {}
            Multiplier::Wgmma(x) => x.finish(b),
        }
    }

    fn store(&self, b: &Simt<'c>, to: Index<'c>, row_bytes: i64, sums: &[Value<'c>]) {
        match self {
            Multiplier::Mma(x) => x.store(b, to, row_bytes, sums),
            Multiplier::Wgmma(x) => x.store(b, to, row_bytes, sums),
            Multiplier::Fma(x) => x.store(b, to, row_bytes, sums),
        }
    }
}

impl<'c> MultistageGemm<'_, 'c> {
    /// One product, and what follows it.
    fn part(&self, part: &TilePart<'c>, scalars: Pointer<'c>) -> Result<(), CompileError> {
        let b = self.g.b;
        let multiplier = Multiplier::new(b, self.plan);
        let sums = self.sums(&multiplier, part);
        // The sums overwrite the stages, so all warps must have read these.
        if multiplier.leaves_readers(self.plan) {
            b.barrier();
        }
        multiplier.store(b, b.shared(), self.plan.sums_row(), &sums);
        b.barrier();
        self.epilogue(part, scalars)?;
        b.barrier();
        Ok(())
    }

    /// The sums over all contracted elements.
    fn sums(&self, multiplier: &Multiplier<'c>, part: &TilePart<'c>) -> Vec<Value<'c>> {
        let b = self.g.b;
        self.g.spans(part, multiplier.zero(b), &mut |part, repeat, sums| {
            let sums = self.stages(multiplier, part, repeat, sums);
            if repeat.is_some() && self.g.repeats() > 1 {
                b.barrier();
            }
            sums
        })
    }

    /// The sums of all stages, in one repetition of the contracted elements or in all, added to others.
    fn stages(&self, multiplier: &Multiplier<'c>, part: &TilePart<'c>, repeat: Option<Index<'c>>, sums: Vec<Value<'c>>) -> Vec<Value<'c>> {
        let (b, plan) = (self.g.b, self.plan);
        let (depth, stages, ahead) = (b.word(plan.tile.depth), plan.tile.stages, plan.ahead());
        let [first, second] =
            [(&plan.a, part.row), (&plan.b, part.column)].map(|(copy, own)| copy.thread_copy(b, b.address(part.starts[copy.tensor]), own));
        let length = b.index_sub(part.k_to, part.k_from);
        let rounds = b.index_div(b.index_add(length, b.word(plan.tile.depth - 1)), depth);
        let repeats = self.g.repeats();
        let steps = if repeat.is_some() { rounds } else { b.index_mul(rounds, b.word(repeats)) };
        let base = b.shared();
        let fill = |step: Index<'c>, offset: Index<'c>| {
            let (repeat, round) = match repeat {
                Some(repeat) => (repeat, step),
                None if repeats == 1 => (b.word(0), step),
                None => (b.index_div(step, rounds), b.index_rem(step, rounds)),
            };
            let k = b.index_add(part.k_from, b.index_mul(round, depth));
            let to = b.index_add(base, offset);
            plan.a.fill(&self.g, &first, Stage { to, k, k_end: part.k_to, repeat });
            plan.b.fill(&self.g, &second, Stage { to: b.index_add(to, b.word(plan.a.bytes())), k, k_end: part.k_to, repeat });
        };
        let commit = || b.asm(Instruction::CommitCopies, &[]);
        for step in 0..ahead {
            let number = b.word(step);
            b.if_so(b.less(number, steps), || fill(number, b.word(step * plan.stage_bytes())));
            commit();
        }
        let bytes = b.word(plan.stage_bytes());
        let next = |offset: Index<'c>| {
            let end = b.equal(offset, b.word((stages - 1) * plan.stage_bytes()));
            b.choose(end, b.word(0), b.index_add(offset, bytes))
        };
        let (count, mut carried) = (sums.len(), sums);
        carried.extend([b.word(0), b.word(ahead * plan.stage_bytes())].map(Value::from));
        let out = b.loop_over([b.word(0), steps, b.word(1)], &carried, &mut |step, carried| {
            let [read, write] = [0, 1].map(|k| carried[count + k].into_int_value());
            b.asm(Instruction::WaitCopies { left: ir::fault!("gpu.stages.wait", ahead as u32, ahead as u32 - 1) }, &[]);
            multiplier.show(b);
            // Behind the barrier this stage is complete, and all warps have read the one that is filled next.
            b.barrier();
            let later = b.index_add(step, b.word(ir::fault!("gpu.stages.later", ahead - 1, ahead)));
            b.if_so(b.less(later, steps), || fill(later, write));
            commit();
            let mut sums = carried[..count].to_vec();
            let at = b.index_add(base, read);
            multiplier.multiply(b, [at, b.index_add(at, b.word(plan.a.bytes()))], &mut sums);
            sums.extend([next(read), next(write)].map(Value::from));
            sums
        });
        multiplier.finish(b);
        out[..count].to_vec()
    }

    /// The ops after the product, a row to a warp.
    fn epilogue(&self, part: &TilePart<'c>, scalars: Pointer<'c>) -> Result<(), CompileError> {
        let (b, plan, product) = (self.g.b, self.plan, self.g.product);
        let epilogue = self.g.epilogue(part, part.column, scalars);
        let thread = b.thread();
        let (warp, lane) = (b.index_div(thread, b.word(LANES as i64)), b.index_rem(thread, b.word(LANES as i64)));
        let lanes = b.index_add(b.shared(), b.index_mul(lane, b.word(4)));
        let warps = b.word(plan.tile.threads() / LANES as i64);
        let mut result = Ok(());
        let from = b.index_add(b.index_sub(part.from, part.row), warp);
        b.loop_over([from, b.index_sub(part.to, part.row), warps], &[], &mut |row, _| {
            let line = b.index_add(lanes, b.index_mul(row, b.word(plan.sums_row())));
            for j in 0..div_ceil(plan.tile.columns, LANES as i64) {
                let first = j * LANES as i64;
                let sum = b.load_shared(b.index_add(line, b.word(4 * first)), 1)[0];
                let left = || b.index_sub(b.word(product.n.size - first), part.column);
                let mask = (product.n.size % plan.tile.columns != 0).then(|| b.less(lane, left()).into());
                let done = epilogue.write(ResultVector { row: b.widen(row), column: first, mask }, &[sum], Memory::unread());
                if result.is_ok() {
                    result = done;
                }
            }
            vec![]
        });
        result
    }
}
