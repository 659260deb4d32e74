//! The form of a product whose warps differ in what they do: one thread copies (tensor maps, `cp.async.bulk.tensor`),
//! warpgroups multiply (`wgmma`) and store.
//!
//! Stages are a ring. For each there are two mbarriers: one that it is full, which bytes that arrive complete, and
//! one that it is empty, at which warps arrive when their products with it are done. All go through the same parts of
//! the same tiles in the same order, so the ring is all that they share: while a tile's sums are stored, stages of
//! the next one come. The warpgroup of the thread that copies gives registers to the others.
//!
//! Two blocks whose tiles have the same columns are a cluster if there is such a pair for every tile. Each copies half
//! of the columns' factor to both, which halves what is read of it from the second-level cache.
//!
//! Where storing takes long, the two warpgroups that multiply **take turns** (CUTLASS's ping-pong): each has every
//! second tile of the block, so one stores while the other multiplies.

use super::copy::LineDim;
use super::parts::{Gpu, TilePart};
use super::plan::WarpSpecializedPlan;
use super::store::WarpEpilogue;
use super::wgmma::{SQUARE, Wgmma};
use crate::abi::{LaunchBounds, launch_of_specialized_warps};
use crate::build::asm::Instruction;
use crate::build::block::Index;
use crate::build::scheduler::Scheduler;
use crate::build::simt::{KernelParameters, LANES, Pointer, Simt, Value};
use crate::build::stages::{Cluster, FEW_REGISTERS, Position, Stages, Turns, WARPGROUP, elected, more_registers};
use crate::build::swizzle::LINE;
use crate::build::{Builder, Frame, IntBinary};
use crate::gemm::product::Product;
use crate::{CompileError, Shape};
use ir::kernel::Kernel;
use ir::launch::Launch;

/// Bytes that a thread clears at a time.
const UNIT: i64 = 16;
/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Simt, kernel: &Kernel, product: &Product, plan: &WarpSpecializedPlan, name: &str) -> Result<(Shape, Launch), CompileError> {
    let g = Gpu { b, kernel, product, tile: &plan.tile, together: plan.cluster };
    let count = kernel.inputs.len() + kernel.outputs.len();
    let bounds = LaunchBounds { threads: (WARPGROUP + plan.tile.all_threads()) as u32, blocks: plan.tile.blocks, cluster: plan.cluster as u32 };
    b.kernel_of_specialized_warps(name, [count, kernel.scalars.len()], plan.maps.len(), bounds, |parameters| {
        let tensors = (0..count).map(|i| b.load_pointer(b.at_const(parameters.arguments, 8 * i as i64))).collect();
        let base = b.shared();
        let cluster = Cluster::new(b, plan.cluster);
        let stages = Stages::new(b, b.index_add(base, b.word(plan.barriers_at())), plan.tile.stages).of(cluster);
        let scheduler = Scheduler::new(b, parameters, b.index_add(base, b.word(plan.scheduler_at()))).of(cluster);
        let gemm = WarpSpecializedGemm { g, plan, parameters, tensors, base, cluster, stages, scheduler };
        gemm.prepare();
        let group = b.uniform(b.index_div(b.thread(), b.word(WARPGROUP)));
        let (mut copied, mut multiplied) = (Ok(()), Ok(()));
        b.either(b.equal(group, b.word(0)), || copied = gemm.copy(), || multiplied = gemm.multiply());
        if !cluster.is_alone() {
            // While a block runs, others may copy to it and arrive at its mbarriers.
            b.warp_barrier();
            cluster.meet(b);
        }
        copied.and(multiplied)
    })?;
    let shape = Shape { tiles: (plan.tile.count(product) / plan.cluster) as u64, line: 1, scratch_bytes: 0 };
    let maps = plan.maps.iter().map(|m| m.map.clone()).collect();
    Ok((shape, launch_of_specialized_warps(kernel, &shape, bounds, plan.shared_bytes() as u32, maps)))
}

/// The kernel under construction: what the warps that copy and those that multiply share.
struct WarpSpecializedGemm<'a, 'c> {
    g: Gpu<'a, 'c>,
    plan: &'a WarpSpecializedPlan,
    parameters: &'a KernelParameters<'c>,
    tensors: Vec<Pointer<'c>>,
    /// Start of shared memory.
    base: Index<'c>,
    cluster: Cluster<'c>,
    stages: Stages<'a, 'c>,
    scheduler: Scheduler<'a, 'c>,
}

impl<'c> WarpSpecializedGemm<'_, 'c> {
    fn stage(&self, slot: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        b.index_add(self.base, b.index_mul(slot, b.word(self.plan.stage_bytes())))
    }

    /// Stages of one repetition of the contracted elements, and of all that are gone through, which may be that one.
    fn steps(&self, part: &TilePart<'c>, repeat: Option<Index<'c>>) -> [Index<'c>; 2] {
        let (b, depth) = (self.g.b, self.plan.tile.depth);
        let length = b.index_sub(part.k_to, part.k_from);
        let rounds = b.index_div(b.index_add(length, b.word(depth - 1)), b.word(depth));
        [rounds, if repeat.is_some() { rounds } else { b.index_mul(rounds, b.word(self.g.repeats())) }]
    }

    /// The block's tile of those of the cluster that have a number.
    fn tile(&self, number: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        b.index_add(b.index_mul(number, b.word(self.cluster.blocks)), self.cluster.rank)
    }

    /// Makes the mbarriers, for all of the cluster.
    fn prepare(&self) {
        let b = self.g.b;
        b.if_so(b.equal(b.thread(), b.word(0)), || {
            let [team, all] = [self.plan.tile.threads(), self.plan.tile.all_threads()].map(|n| n / LANES as i64);
            self.stages.prepare(team);
            self.scheduler.prepare(all);
            if let Some(at) = self.plan.turns_at() {
                Turns::prepare(b, b.index_add(self.base, b.word(at)), team);
            }
            b.asm(Instruction::FenceBarriers, &[]);
        });
        self.cluster.meet(b);
    }

    /// Code of the first warpgroup: one thread copies and takes tile numbers.
    fn copy(&self) -> Result<(), CompileError> {
        let b = self.g.b;
        let mut result = Ok(());
        b.asm(Instruction::FewerRegisters(FEW_REGISTERS), &[]);
        elected(b, || {
            let position = self.stages.filling();
            self.scheduler.each_taken(|number| {
                result = self.g.tile(self.tile(number), &self.tensors, &mut |part| {
                    self.fill(part, position);
                    Ok(())
                });
            });
        });
        result
    }

    /// Fills the stages of a part as they become empty.
    fn fill(&self, part: &TilePart<'c>, position: Position<'c>) {
        let (b, plan, product) = (self.g.b, self.plan, self.g.product);
        let origins = [0, 1].map(|f| plan.maps[f].origin(b, product, part, self.parameters.maps[f]));
        self.g.spans(part, vec![], &mut |part, repeat, none| {
            let [rounds, steps] = self.steps(part, repeat);
            b.loop_over([b.word(0), steps, b.word(1)], &[], &mut |step, _| {
                let (repeat, round) = match (repeat, self.g.repeats()) {
                    (Some(repeat), _) => (repeat, step),
                    (None, 1) => (b.word(0), step),
                    (None, _) => (b.index_div(step, rounds), b.index_rem(step, rounds)),
                };
                let k = b.index_add(part.k_from, b.index_mul(round, b.word(plan.tile.depth)));
                let slot = self.stages.slot(position);
                self.stages.wait_empty(slot, position);
                let (full, to) = (self.stages.full(slot), self.stage(slot));
                b.asm(Instruction::ArriveExpecting, &[full.into(), b.word(plan.stage_bytes()).into()]);
                for ((map, origin), to) in plan.maps.iter().zip(&origins).zip([to, b.index_add(to, b.word(plan.first_bytes()))]) {
                    map.copy(&self.g, self.cluster, origin, [k, repeat], [to, full]);
                }
                self.stages.advance(position);
                vec![]
            });
            none
        });
    }

    /// Code of the other warpgroups.
    fn multiply(&self) -> Result<(), CompileError> {
        let (b, plan) = (self.g.b, self.plan);
        b.asm(Instruction::MoreRegisters(more_registers(plan.tile.all_threads() / WARPGROUP, plan.tile.blocks)), &[]);
        let thread = b.index_sub(b.thread(), b.word(WARPGROUP));
        let transposed = plan.maps.each_ref().map(|m| m.lines == LineDim::Contracted);
        let warp = b.uniform(b.index_div(thread, b.word(LANES as i64)));
        let of_team = b.word(plan.tile.threads() / LANES as i64);
        let (team, in_team) = if plan.tile.teams == 1 { (b.word(0), warp) } else { (b.index_div(warp, of_team), b.index_rem(warp, of_team)) };
        let wgmma = Wgmma::new(b, plan.factor, &plan.tile, transposed, in_team);
        let rows = WarpEpilogue::new(&self.g, b.index_add(self.base, b.word(plan.sums_at())), [warp, in_team], &self.tensors);
        let position = self.stages.using();
        let (mut result, mut passed) = (Ok(()), Ok(()));
        let turns = plan.turns_at().map(|at| Turns::new(b, b.index_add(self.base, b.word(at)), team));
        self.scheduler.each(|number| {
            let number = self.tile(number);
            let mut computes = || {
                result = self.g.tile(number, &self.tensors, &mut |part| {
                    let sums = self.sums(part, &wgmma, position, turns.as_ref());
                    rows.store(part, &sums, self.parameters.scalars)
                });
            };
            let passes = || {
                passed = self.g.tile(number, &self.tensors, &mut |part| {
                    self.pass(part, position);
                    Ok(())
                });
            };
            match &turns {
                None => computes(),
                Some(turns) => turns.either(computes, passes),
            }
        });
        result.and(passed)
    }

    /// The sums of a part.
    fn sums(&self, part: &TilePart<'c>, wgmma: &Wgmma<'c>, position: Position<'c>, turns: Option<&Turns<'_, 'c>>) -> Vec<Value<'c>> {
        let zero = wgmma.zero(self.g.b);
        self.g.spans(part, zero, &mut |part, repeat, sums| self.span(part, repeat, sums, wgmma, position, turns))
    }

    /// Passes over the stages of a part that the other team computes.
    fn pass(&self, part: &TilePart<'c>, position: Position<'c>) {
        self.g.spans(part, vec![], &mut |part, repeat, none| {
            let [_, steps] = self.steps(part, repeat);
            self.stages.pass(position, steps);
            none
        });
    }

    /// Adds the products of contracted elements to sums. While the products of a stage run, it waits for those of the
    /// previous one.
    fn span(
        &self,
        part: &TilePart<'c>,
        repeat: Option<Index<'c>>,
        sums: Vec<Value<'c>>,
        wgmma: &Wgmma<'c>,
        position: Position<'c>,
        turns: Option<&Turns<'_, 'c>>,
    ) -> Vec<Value<'c>> {
        let (b, plan) = (self.g.b, self.plan);
        let [_, steps] = self.steps(part, repeat);
        let tells = self.stages.tells();
        let release = |steps: Index<'c>, slot: Index<'c>| {
            let before = self.stages.before(slot);
            let some = b.bits(IntBinary::And, b.less(b.word(0), steps), tells);
            b.if_so(some, || self.stages.tell_empty(before));
        };
        let sums = b.loop_over([b.word(0), steps, b.word(1)], &sums, &mut |step, sums| {
            let slot = self.stages.slot(position);
            self.stages.wait_full(slot, position);
            let (mut sums, at) = (sums.to_vec(), self.stage(slot));
            if repeat.is_some() {
                let left = b.index_sub(b.index_sub(part.k_to, part.k_from), b.index_mul(step, b.word(plan.tile.depth)));
                b.if_so(b.less(left, b.word(plan.tile.depth)), || self.clear(at, left));
            }
            wgmma.multiply(b, [at, b.index_add(at, b.word(plan.first_bytes()))], &mut sums);
            release(step, slot);
            self.stages.advance(position);
            sums
        });
        if let Some(turns) = turns {
            b.if_so(part.is_last, || turns.pass_on());
        }
        wgmma.finish(b);
        release(steps, self.stages.slot(position));
        sums
    }

    /// Clears the contracted elements of a stage from `from` on, so that those beyond the expert's add nothing. Each
    /// is a line in every 64 rows and columns.
    fn clear(&self, stage: Index<'c>, from: Index<'c>) {
        let (b, plan) = (self.g.b, self.plan);
        let (thread, threads) = (b.index_sub(b.thread(), b.word(WARPGROUP)), plan.tile.threads());
        let (team, in_team) = (b.index_div(thread, b.word(threads)), b.index_rem(thread, b.word(threads)));
        b.loop_over([in_team, b.word(plan.stage_bytes() / UNIT), b.word(threads)], &[], &mut |unit, _| {
            let line = b.index_div(b.index_rem(unit, b.word(SQUARE / UNIT)), b.word(LINE / UNIT));
            b.if_so(b.less(b.index_sub(from, b.word(1)), line), || {
                b.store_shared(b.index_add(stage, b.index_mul(unit, b.word(UNIT))), &[b.word(0).into(); 4]);
            });
            vec![]
        });
        // The fence makes the threads' writes visible to the matrix engine.
        b.asm(Instruction::FenceProxy, &[]);
        b.barrier_of_team(team, threads);
    }
}
