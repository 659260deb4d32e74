//! Attention and the logarithm of its sums: tiles of queries meet blocks of 128 keys, then of as many values, in one
//! ring of stages.
//!
//! Scores are products of queries and keys in shared memory; their exponentials stay in registers, where they are the
//! first factor of the next product. While a block of scores becomes exponentials, the values of the block before are
//! summed: the order is that of keys 0, keys 1, values 0, keys 2, values 1, ..

use super::*;

const SIZES: TileSizes = TileSizes { warps: GROUPS * WARPS, tall: 1, others: 128 };

/// Tensor maps of q, k and v, and the number of stages.
pub struct ForwardConfig {
    maps: [OperandMap; 3],
    /// Stages of keys and values.
    stages: i64,
}

impl ForwardConfig {
    /// `None` if an operand has no tensor map.
    pub fn new(plan: &AttentionPlan) -> Option<ForwardConfig> {
        let kernel = plan.kernel;
        let node = kernel.outputs.iter().map(|o| &kernel.body[o.value]).find(|node| matches!(node.op, Op::Attention(_)))?;
        let map = |slot: usize, side: ScoreSide, rows| OperandMap::new(plan, plan.operand(node.args[slot]).ok()?, side, rows);
        let keys = |slot: usize| map(slot, ScoreSide::Keys, SIZES.others);
        Some(ForwardConfig { maps: [map(0, ScoreSide::Queries, SIZES.own())?, keys(1)?, keys(2)?], stages: if plan.d.d == 64 { 8 } else { 5 } })
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// Those of the builder.
pub fn emit(b: &Simt, plan: &AttentionPlan, half: Half, config: &ForwardConfig, name: &str) -> Result<(Shape, Launch), CompileError> {
    let kernel = plan.kernel;
    let count = kernel.inputs.len() + kernel.outputs.len();
    let (tiles, shared_bytes) = b.kernel_of_specialized_warps(name, [count, kernel.scalars.len()], config.maps.len(), BOUNDS, |parameters| {
        let forward = WarpSpecializedForward::new(b, plan, half, config, parameters);
        prepare(b, &[&forward.queries, &forward.blocks], &forward.scheduler);
        let group = warpgroup(b);
        b.either(b.equal(group, b.word(0)), || forward.copy(), || forward.multiply(b.index_sub(group, b.word(1))));
        Ok((forward.order().tiles(), forward.list_at() + forward.copiers.list_bytes(ScoreSide::Queries, SIZES)))
    })?;
    let shape = Shape { tiles: tiles as u64, line: 1, scratch_bytes: 0 };
    let maps = config.maps.iter().map(|m| m.map.clone()).collect();
    Ok((shape, launch_of_specialized_warps(kernel, &shape, BOUNDS, shared_bytes as u32, maps)))
}

/// The kernel under construction: what the warps that copy and those that multiply share.
struct WarpSpecializedForward<'a, 'c> {
    config: &'a ForwardConfig,
    parameters: &'a KernelParameters<'c>,
    arguments: GpuArguments<'c>,
    copiers: MmaAttention<'a, 'c>,
    multipliers: MmaAttention<'a, 'c>,
    matrices: Matrices<'a, 'c>,
    /// The single stage of queries, and the stages of keys and values.
    queries: Stages<'a, 'c>,
    blocks: Stages<'a, 'c>,
    scheduler: Scheduler<'a, 'c>,
}

impl<'a, 'c> WarpSpecializedForward<'a, 'c> {
    fn new(b: &'a Simt<'c>, plan: &'a AttentionPlan<'a>, half: Half, config: &'a ForwardConfig, parameters: &'a KernelParameters<'c>) -> Self {
        let mma = |team| MmaAttention { b, plan, half, team };
        let barriers = SIZES.own() * ELEMENT * plan.d.d + config.stages * SIZES.others * ELEMENT * plan.d.d;
        let at = |offset: i64| b.index_add(b.shared(), b.word(offset));
        WarpSpecializedForward {
            config,
            parameters,
            arguments: arguments(b, plan.kernel, parameters),
            copiers: mma(COPIERS),
            multipliers: mma(MULTIPLIERS),
            matrices: Matrices { b, half, d: plan.d.d },
            queries: Stages::new(b, at(barriers), 1),
            blocks: Stages::new(b, at(barriers + Stages::bytes(1)), config.stages),
            scheduler: Scheduler::new(b, parameters, at(barriers + Stages::bytes(1) + Stages::bytes(config.stages))),
        }
    }

    fn b(&self) -> &'a Simt<'c> {
        self.copiers.b
    }

    fn plan(&self) -> &'a AttentionPlan<'a> {
        self.copiers.plan
    }

    /// Bytes of a stage of queries, of keys or of values.
    fn stage_bytes(&self, rows: i64) -> i64 {
        rows * ELEMENT * self.plan().d.d
    }

    /// The address at so many bytes of shared memory.
    fn at(&self, offset: i64) -> Index<'c> {
        self.b().index_add(self.b().shared(), self.b().word(offset))
    }

    fn stage(&self, slot: Index<'c>) -> Index<'c> {
        let bytes = self.stage_bytes(SIZES.others);
        self.b().index_add(self.at(self.stage_bytes(SIZES.own())), self.b().index_mul(slot, self.b().word(bytes)))
    }

    /// Offset of the words beside the stages: that of the queries, then those of keys.
    fn words_at(&self) -> i64 {
        let stages = self.config.stages;
        let barriers = self.stage_bytes(SIZES.own()) + stages * self.stage_bytes(SIZES.others);
        barriers + Stages::bytes(1) + Stages::bytes(stages) + Scheduler::BYTES
    }

    fn word(&self, slot: Index<'c>) -> Index<'c> {
        self.b().index_add(self.at(self.words_at() + 4), self.b().index_mul(slot, self.b().word(4)))
    }

    fn list_at(&self) -> i64 {
        self.words_at() + 4 * (1 + self.config.stages)
    }

    fn order(&self) -> TileOrder {
        TileOrder::new(self.plan(), true, SIZES.own())
    }

    /// A tile by its number.
    fn tile(&self, number: Index<'c>) -> AttentionTile<'c> {
        let (b, plan) = (self.b(), self.plan());
        let [head, run] = self.order().place(b, number);
        let heads = self.copiers.digits(&plan.heads(), head);
        let at = self.arguments.at(b, plan, &plan.heads(), b.widen(head));
        AttentionTile { at, heads, own: RowTile { side: ScoreSide::Queries, sizes: SIZES, first: b.widen(b.index_mul(run, b.word(SIZES.own()))) } }
    }

    /// Code of the first warpgroup: all of it lists the blocks that a tile meets; one thread copies and takes tile
    /// numbers.
    fn copy(&self) {
        let b = self.b();
        b.asm(Instruction::FewerRegisters(FEW_REGISTERS), &[]);
        let (queries, blocks) = (self.queries.filling(), self.blocks.filling());
        let taking = self.scheduler.taking();
        elected(b, || {
            self.scheduler.first(taking);
        });
        self.scheduler.each(|number| {
            let tile = self.tile(number);
            // The previous tile's list is no longer read: its reader has since handed out this tile's number.
            let mask = self.copiers.block_mask(&tile.at, &tile.own, 1, self.at(self.list_at()));
            elected(b, || {
                let slot = self.queries.slot(queries);
                self.queries.wait_empty(slot, queries);
                if self.plan().program.tells() {
                    b.store_shared(self.at(self.words_at()), &[mask.count.into()]);
                }
                let first = b.narrow(tile.own.first);
                self.fill(&tile, 0, first, SIZES.own(), [self.at(0), self.queries.full(slot)]);
                self.queries.advance(queries);
                let copy_block = |map: usize, block: Index<'c>, entry: Option<Index<'c>>| {
                    let slot = self.blocks.slot(blocks);
                    self.blocks.wait_empty(slot, blocks);
                    if let Some(entry) = entry {
                        b.store_shared(self.word(slot), &[entry.into()]);
                    }
                    let first = b.index_mul(block, b.word(SIZES.others));
                    self.fill(&tile, map, first, SIZES.others, [self.stage(slot), self.blocks.full(slot)]);
                    self.blocks.advance(blocks);
                };
                let last = b.loop_over([b.word(0), mask.count, b.word(1)], &[b.word(0).into()], &mut |i, before| {
                    let block = mask.block(&self.copiers, i);
                    copy_block(1, block.index, block.entry);
                    b.if_so(b.less(b.word(0), i), || copy_block(2, before[0].into_int_value(), None));
                    vec![block.index.into()]
                });
                b.if_so(b.less(b.word(0), mask.count), || copy_block(2, last[0].into_int_value(), None));
                self.scheduler.next(taking);
            });
        });
    }

    /// Begins to fill a stage with rows of an operand.
    fn fill(&self, tile: &AttentionTile<'c>, map: usize, first: Index<'c>, rows: i64, [to, full]: [Index<'c>; 2]) {
        let b = self.b();
        b.asm(Instruction::ArriveExpecting, &[full.into(), b.word(self.stage_bytes(rows)).into()]);
        self.config.maps[map].copy(&self.copiers, self.parameters.maps[map], &tile.heads, [first, to], rows, full);
    }

    /// Code of the other warpgroups.
    fn multiply(&self, group: Index<'c>) {
        let (b, plan, mma, matrices) = (self.b(), self.plan(), &self.multipliers, &self.matrices);
        b.asm(Instruction::MoreRegisters(more_registers(GROUPS, 1)), &[]);
        let (queries, blocks) = (self.queries.using(), self.blocks.using());
        let own_rows = matrices.at(b.index_add(self.at(0), b.index_mul(group, b.word(WARPGROUP / 2 * LINE))), SIZES.own());
        let rows = 2 * SIZES.tall as usize;
        self.scheduler.each_beside(queries, |number| {
            let tile = self.tile(number);
            let slot = self.queries.slot(queries);
            self.queries.wait_full(slot, queries);
            self.queries.advance(queries);
            let (unlisted, count) = if plan.program.tells() {
                (None, b.uniform(b.load_shared_word(self.at(self.words_at()))))
            } else {
                let mask = mma.full_mask(ScoreSide::Queries, SIZES, 1);
                let count = mask.count;
                (Some(mask), count)
            };
            let block = |i: Index<'c>, slot: Index<'c>| match &unlisted {
                Some(mask) => mask.block(mma, i),
                None => VisibleBlock::listed(mma, b.word(0), b.uniform(b.load_shared_word(self.word(slot)))),
            };
            // `weigh` applies the program and the mask to finished scores and takes their exponentials.
            let weigh = |block: &VisibleBlock<'c>, scores: &[Value<'c>], state: &[Value<'c>]| {
                let (scores, _) = mma.changed(&tile.at, &tile.own, block, scores);
                let scores = mma.hide(&tile.at, &tile.own, block, &scores, b.f32(f64::NEG_INFINITY));
                let mut factors = vec![b.f32(1.0); rows];
                let (weights, state) = mma.softmax(SIZES, scores, state, &mut |row, factor| factors[row] = factor);
                (weights, state, factors)
            };
            let none = vec![b.f32(0.0); plan.d.d as usize / 2];
            let start = [mma.nothing_seen(SIZES), none.clone()].concat();
            let some = b.less(b.word(0), count);
            b.if_so(b.equal(count, b.word(0)), || release(b, self.queries.empty(slot)));
            let end = b.when(some.into(), &start, || {
                self.ready(blocks);
                b.asm(Instruction::GroupFence, &[]);
                let (keys, scores) = self.scores(own_rows, blocks);
                let first = block(b.word(0), keys);
                let scores = matrices.wait(0, &scores);
                release(b, self.blocks.empty(keys));
                let (weights, state, _) = weigh(&first, &scores, &start[..2 * rows]);
                self.ready(blocks);
                let carried = [state, none, matrices.halves(&weights)].concat();
                let (state, sums) = (2 * rows, 2 * rows + plan.d.d as usize / 2);
                let end = b.loop_over([b.word(1), count, b.word(1)], &carried, &mut |i, carried| {
                    b.asm(Instruction::LeaveRolled, &[]);
                    let before = matrices.fence(&carried[state..sums]);
                    let (keys, scores) = self.scores(own_rows, blocks);
                    let block = block(i, keys);
                    self.ready(blocks);
                    let (values, summed) = self.sum(&carried[sums..], &before, blocks);
                    let scores = matrices.wait(1, &scores);
                    release(b, self.blocks.empty(keys));
                    let (weights, next, factors) = weigh(&block, &scores, &carried[..state]);
                    // This wait loop stands here, and not where the stage is used: the assembler moves nothing past a
                    // loop, so the exponentials stay before the next wait for products.
                    self.ready(blocks);
                    let landed = matrices.wait(0, &[summed, weights].concat());
                    release(b, self.blocks.empty(values));
                    let (summed, weights) = landed.split_at(sums - state);
                    let mut summed = summed.to_vec();
                    factors.iter().enumerate().for_each(|(row, factor)| mma.rescale(row, *factor, &mut summed));
                    [next, summed, matrices.halves(weights)].concat()
                });
                release(b, self.queries.empty(slot));
                let before = matrices.fence(&end[state..sums]);
                let (values, summed) = self.sum(&end[sums..], &before, blocks);
                let summed = matrices.wait(0, &summed);
                release(b, self.blocks.empty(values));
                [end[..state].to_vec(), summed].concat()
            });
            mma.finish(&tile.at, &tile.own, &end);
        });
    }

    /// Waits for the next stage.
    fn ready(&self, position: Position<'c>) {
        self.blocks.wait_full(self.blocks.slot(position), position);
    }

    /// Begins the products of the queries with the keys of the next stage, which is full. Returns the stage and the
    /// pending scores.
    fn scores(&self, queries: Matrix<'c>, position: Position<'c>) -> (Index<'c>, Vec<Value<'c>>) {
        let slot = self.blocks.slot(position);
        let sums = self.matrices.products(queries, self.matrices.at(self.stage(slot), SIZES.others));
        self.matrices.commit();
        self.blocks.advance(position);
        (slot, sums)
    }

    /// Begins to add the values of the next stage, which is full, to sums, with 16-bit weights. Returns the stage and
    /// the pending sums.
    fn sum(&self, weights: &[Value<'c>], sums: &[Value<'c>], position: Position<'c>) -> (Index<'c>, Vec<Value<'c>>) {
        let slot = self.blocks.slot(position);
        let sums = self.matrices.weigh(weights, self.matrices.at(self.stage(slot), SIZES.others), sums);
        self.matrices.commit();
        self.blocks.advance(position);
        (slot, sums)
    }
}
