//! The gradients of attention, in the two kinds of tiles that they have on sm_80 too: of keys, for the gradients of k
//! and v, and of queries, for that of q.
//!
//! A tile has its rows of both operands of its side, k and v or q and dout; of the other side come blocks of as many
//! rows of both, a pair in a stage. Of each pair there are two products, scores and the gradients of probabilities,
//! with the tile's rows first: so both become weights of the other side's rows where they are, in registers. What has
//! no tensor map, the logarithms and deltas of the queries that a tile of keys meets and the positions of either
//! side, all lanes of the warp that copies put beside the pair.
//!
//! While scores become probabilities, the gradients of these are computed; what else a warpgroup waits for, the other
//! one has arithmetic beside it. Every sum is one warp's, in a fixed order.

use super::pairs::WarpgroupTask;
use super::*;
use crate::build::FloatUnary;
use ir::launch::most_shared;

/// Pairs of blocks that can be there or under way, at most.
const STAGES: i64 = 4;
/// Rows of a tile and of a block. With more, the sums and products of a warpgroup would not fit into its registers.
const SIZES: TileSizes = TileSizes { warps: GROUPS * WARPS, tall: 1, others: 64 };
/// Values of a block's row that precede those of the program's operands.
pub const NUMBERS: i64 = 2;

/// Tensor maps of q, k, v and dout, and the limit of shared memory.
pub struct BackwardConfig {
    maps: [OperandMap; 4],
    /// Bytes of shared memory of a block, at most.
    most_shared: i64,
}

impl BackwardConfig {
    /// `None` if an operand has no tensor map, if the program changes scores, so that products cannot start from the
    /// values that are subtracted, or if its operands differ among queries that share keys.
    pub fn new(plan: &AttentionPlan, target: &Target) -> Option<BackwardConfig> {
        if plan.program.changes() || plan.program.grouped {
            return None;
        }
        let GradientOperands { q, k, v, dout, .. } = plan.gradient_operands().ok()?;
        let map = |rows: &OperandRows, side| OperandMap::new(plan, rows.tensor, side, SIZES.others);
        let maps = [map(&q, ScoreSide::Queries)?, map(&k, ScoreSide::Keys)?, map(&v, ScoreSide::Keys)?, map(&dout, ScoreSide::Queries)?];
        Some(BackwardConfig { maps, most_shared: most_shared(&target.cpu).into() })
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An operand is not an input.
pub fn emit(b: &Simt, plan: &AttentionPlan, half: Half, config: &BackwardConfig, name: &str) -> Result<(Shape, Launch), CompileError> {
    let kernel = plan.kernel;
    let operands = plan.gradient_operands()?;
    let count = kernel.inputs.len() + kernel.outputs.len();
    let (tiles, shared_bytes) = b.kernel_of_specialized_warps(name, [count, kernel.scalars.len()], config.maps.len(), BOUNDS, |parameters| {
        let mma = |team| MmaAttention { b, plan, half, team };
        let (copiers, multipliers) = (mma(COPIERS), mma(MULTIPLIERS));
        let kinds = copiers.kinds();
        let list_bytes = kinds.iter().map(|kind| copiers.list_bytes(kind.side, SIZES)).max().unwrap_or(0);
        let layout = SharedLayout::new(plan, config.most_shared - list_bytes);
        let tiles: i64 = kinds.iter().map(|kind| order(plan, kind).tiles()).sum();
        let stages = |offset: i64, count| Stages::new(b, b.index_add(b.shared(), b.word(offset)), count);
        let backward = WarpSpecializedBackward {
            config,
            parameters,
            arguments: arguments(b, kernel, parameters),
            of_query: [operands.lse, operands.delta],
            kinds: &kinds,
            copiers: &copiers,
            multipliers: &multipliers,
            matrices: Matrices { b, half, d: plan.d.d },
            own: stages(layout.barriers, 1),
            blocks: stages(layout.barriers + Stages::bytes(1), layout.stages),
            scheduler: Scheduler::new(b, parameters, b.index_add(b.shared(), b.word(layout.scheduler))),
            layout,
        };
        prepare(b, &[&backward.own, &backward.blocks], &backward.scheduler);
        b.either(b.equal(warpgroup(b), b.word(0)), || backward.copy(), || backward.multiply());
        Ok((tiles, backward.layout.list + list_bytes))
    })?;
    let shape = Shape { tiles: tiles as u64, line: 1, scratch_bytes: 0 };
    let maps = config.maps.iter().map(|m| m.map.clone()).collect();
    Ok((shape, launch_of_specialized_warps(kernel, &shape, BOUNDS, shared_bytes as u32, maps)))
}

/// The program's operands that are of one side alone.
pub fn of_side<'p>(plan: &'p AttentionPlan, side: ScoreSide) -> impl Iterator<Item = &'p Operand> {
    plan.program.operands.iter().filter(move |o| o.side() == side.index())
}

/// Most values that a row of a block has.
fn rows_numbers(plan: &AttentionPlan) -> i64 {
    let of = |side| of_side(plan, side).count() as i64;
    NUMBERS + of(ScoreSide::Queries).max(of(ScoreSide::Keys))
}

fn order(plan: &AttentionPlan, kind: &GradientTiles) -> TileOrder {
    TileOrder::new(plan, kind.side == ScoreSide::Queries, SIZES.own())
}

/// Offsets in shared memory, in bytes. After a tile's two matrices lie pairs of blocks, mbarriers, the number of the
/// next tile, values of the blocks' rows, words (two of the tile: its count of blocks and its number; then one of
/// each stage), and the list of blocks.
struct SharedLayout {
    stages: i64,
    /// Bytes of one of the tile's matrices, of one of a pair's, and of one value for all rows of a block.
    own_bytes: i64,
    block_bytes: i64,
    number_bytes: i64,
    blocks: i64,
    barriers: i64,
    scheduler: i64,
    numbers: i64,
    words: i64,
    list: i64,
}

impl SharedLayout {
    /// The layout with the most stages for which the list begins at `last_list` or before.
    fn new(plan: &AttentionPlan, last_list: i64) -> SharedLayout {
        let row = ELEMENT * plan.d.d;
        let (own_bytes, block_bytes, number_bytes) = (SIZES.own() * row, SIZES.others * row, Lane::F32.bytes() * SIZES.others);
        let at = |stages: i64| {
            let blocks = 2 * own_bytes;
            let barriers = blocks + stages * 2 * block_bytes;
            let scheduler = barriers + Stages::bytes(1) + Stages::bytes(stages);
            let numbers = scheduler + Scheduler::BYTES;
            let words = numbers + stages * rows_numbers(plan) * number_bytes;
            SharedLayout { stages, own_bytes, block_bytes, number_bytes, blocks, barriers, scheduler, numbers, words, list: words + 4 * (2 + stages) }
        };
        let fit = (2..=STAGES).rev().find(|stages| at(*stages).list <= last_list);
        at(fit.unwrap_or(1))
    }
}

/// The kernel under construction: what the warps that copy and those that multiply share.
pub struct WarpSpecializedBackward<'a, 'c> {
    config: &'a BackwardConfig,
    parameters: &'a KernelParameters<'c>,
    arguments: GpuArguments<'c>,
    /// The logarithm and the delta of each query.
    of_query: [usize; 2],
    kinds: &'a [GradientTiles<'a>],
    copiers: &'a MmaAttention<'a, 'c>,
    pub multipliers: &'a MmaAttention<'a, 'c>,
    pub matrices: Matrices<'a, 'c>,
    layout: SharedLayout,
    /// The single stage of a tile's matrices, and the stages of pairs of blocks with the values of their rows.
    own: Stages<'a, 'c>,
    pub blocks: Stages<'a, 'c>,
    scheduler: Scheduler<'a, 'c>,
}

impl<'a, 'c> WarpSpecializedBackward<'a, 'c> {
    pub fn b(&self) -> &'a Simt<'c> {
        self.copiers.b
    }

    fn plan(&self) -> &'a AttentionPlan<'a> {
        self.copiers.plan
    }

    /// The address at so many bytes of shared memory.
    fn at(&self, offset: i64) -> Index<'c> {
        self.b().index_add(self.b().shared(), self.b().word(offset))
    }

    /// Address of item `slot` in an array of items of `bytes` bytes at offset `first`.
    fn of_slot(&self, first: i64, bytes: i64, slot: Index<'c>) -> Index<'c> {
        self.b().index_add(self.at(first), self.b().index_mul(slot, self.b().word(bytes)))
    }

    /// Addresses of the two blocks of a stage.
    pub fn pair(&self, slot: Index<'c>) -> [Index<'c>; 2] {
        let first = self.of_slot(self.layout.blocks, 2 * self.layout.block_bytes, slot);
        [first, self.b().index_add(first, self.b().word(self.layout.block_bytes))]
    }

    /// Address of value `k` of the rows of a stage. For queries, values 0 and 1 are what scores and their gradients
    /// start from; the values of the program's operands of this side follow.
    pub fn numbers(&self, slot: Index<'c>, k: usize) -> Index<'c> {
        let bytes = self.layout.number_bytes;
        let first = self.of_slot(self.layout.numbers, rows_numbers(self.plan()) * bytes, slot);
        self.b().index_add(first, self.b().word(k as i64 * bytes))
    }

    fn word(&self, slot: Index<'c>) -> Index<'c> {
        self.of_slot(self.layout.words + 8, 4, slot)
    }

    /// Calls `f` with the kind of a tile and its number among the tiles of that kind.
    fn by_kind(&self, number: Index<'c>, f: &mut dyn FnMut(&GradientTiles<'a>, Index<'c>)) {
        let (b, plan) = (self.b(), self.plan());
        let mut before = 0;
        for kind in self.kinds {
            let count = order(plan, kind).tiles();
            let number = b.index_sub(number, b.word(before));
            b.if_so(b.bits(IntBinary::And, b.less(b.word(-1), number), b.less(number, b.word(count))), || f(kind, number));
            before += count;
        }
    }

    /// A tile by its number among those of its kind.
    fn tile(&self, kind: &GradientTiles, number: Index<'c>) -> AttentionTile<'c> {
        let (b, plan) = (self.b(), self.plan());
        let dims = kind.heads(plan);
        let [head, run] = order(plan, kind).place(b, number);
        let at = self.arguments.at(b, plan, &dims, b.widen(head));
        let first = b.widen(b.index_mul(run, b.word(SIZES.own())));
        AttentionTile { at, heads: self.copiers.digits(&dims, head), own: RowTile { side: kind.side, sizes: SIZES, first } }
    }

    /// Code of the first warpgroup: all of it lists the blocks that a tile meets; its first warp copies and takes
    /// tile numbers.
    fn copy(&self) {
        let (b, plan) = (self.b(), self.plan());
        b.asm(Instruction::FewerRegisters(FEW_REGISTERS), &[]);
        let (own, blocks, taking) = (self.own.filling(), self.blocks.filling(), self.scheduler.taking());
        elected(b, || {
            self.scheduler.first(taking);
        });
        let mut copy = |kind: &GradientTiles<'a>, number| {
            let tile = self.tile(kind, number);
            let mask = self.copiers.block_mask(&tile.at, &tile.own, plan.sizes(kind.other_heads(plan)), self.at(self.layout.list));
            first_warp(b, || {
                self.copy_matrices(kind, (&tile, number), &mask, [own, blocks]);
                // All lanes have now read the list, so the next tile's may replace it.
                b.warp_barrier();
                one_lane(b, || {
                    self.scheduler.next(taking);
                });
            });
        };
        self.scheduler.each(|number| self.by_kind(number, &mut copy));
    }

    /// Copies the matrices of a tile, then the blocks that it meets. One warp does it.
    fn copy_matrices(
        &self,
        kind: &GradientTiles,
        (tile, number): (&AttentionTile<'c>, Index<'c>),
        mask: &BlockMask<'c>,
        [own, blocks]: [Position<'c>; 2],
    ) {
        let (b, plan, layout) = (self.b(), self.plan(), &self.layout);
        let (mine, theirs) = match kind.side {
            ScoreSide::Queries => ([0, 3], [1, 2]),
            ScoreSide::Keys => ([1, 2], [0, 3]),
        };
        let fill = |maps: [usize; 2], heads: &HeadIndices<'c>, first: Index<'c>, to: [Index<'c>; 2], rows: i64, full: Index<'c>| {
            b.asm(Instruction::ArriveExpecting, &[full.into(), b.word(2 * rows * ELEMENT * plan.d.d).into()]);
            for (map, to) in maps.into_iter().zip(to) {
                self.config.maps[map].copy(self.copiers, self.parameters.maps[map], heads, [first, to], rows, full);
            }
        };
        let slot = self.own.slot(own);
        self.own.wait_empty(slot, own);
        one_lane(b, || {
            if plan.program.tells() {
                b.store_shared(self.at(layout.words), &[mask.count.into()]);
            }
            b.store_shared(self.at(layout.words + 4), &[number.into()]);
            fill(mine, &tile.heads, b.narrow(tile.own.first), [self.at(0), self.at(layout.own_bytes)], SIZES.own(), self.own.full(slot));
        });
        self.own.advance(own);
        b.loop_over([b.word(0), mask.count, b.word(1)], &[], &mut |i, _| {
            let block = mask.block(self.copiers, i);
            let numbers = self.numbers_of(kind, tile, &block);
            let slot = self.blocks.slot(blocks);
            self.blocks.wait_empty(slot, blocks);
            for (which, k, number) in &numbers {
                let place = b.index_add(self.numbers(slot, *which), self.copiers.scaled(self.copiers.lane(), 4));
                b.store_shared(b.index_add(place, b.word(4 * k)), &[*number]);
            }
            if !numbers.is_empty() {
                // One lane arrives for the whole warp, so the stores of all lanes must come first.
                b.warp_barrier();
            }
            one_lane(b, || {
                if let Some(entry) = block.entry {
                    b.store_shared(self.word(slot), &[entry.into()]);
                }
                let heads = [tile.heads.clone(), self.copiers.digits(kind.other_heads(plan), block.head)].concat();
                fill(theirs, &heads, b.index_mul(block.index, b.word(SIZES.others)), self.pair(slot), SIZES.others, self.blocks.full(slot));
            });
            self.blocks.advance(blocks);
            vec![]
        });
    }

    /// The values that [`WarpSpecializedBackward::numbers`] has for a block, every 32nd row for a lane, as (which
    /// value, offset from the lane's first row, value). Rows past the end have the last row's values.
    fn numbers_of(&self, kind: &GradientTiles, tile: &AttentionTile<'c>, block: &VisibleBlock<'c>) -> Vec<(usize, i64, Value<'c>)> {
        let (b, plan, mma) = (self.b(), self.plan(), self.copiers);
        let side = kind.side.other();
        let at = tile.at.at(b, plan, kind.other_heads(plan), b.widen(block.head));
        let first = b.index_add(mma.scaled(block.index, SIZES.others), mma.lane());
        let mut numbers = vec![];
        for k in (0..SIZES.others).step_by(LANES) {
            let row = mma.plus(first, k);
            if side == ScoreSide::Queries {
                let last = b.widen(b.least(row, b.word(plan.queries - 1)));
                let load = |tensor: usize| b.load_splat(b.at(at.tensors[tensor], b.index_mul(last, b.index(mma.step(tensor)))), Lane::F32);
                let [lse, delta] = self.of_query.map(load);
                let [score, dp] = self.starts([lse, delta]);
                numbers.extend([(0, k, score), (1, k, dp)]);
            }
            for (place, operand) in (NUMBERS as usize..).zip(of_side(plan, side)) {
                let number = mma.number(&at, side, operand, b.widen(row));
                let number = if operand.dtype == DType::Bool { b.select(number, b.i32(1), b.i32(0)) } else { number };
                numbers.push((place, k, number));
            }
        }
        numbers
    }

    /// Initial values of a query's products: minus the logarithm, as an unscaled score, and minus the delta.
    fn starts(&self, [lse, delta]: [Value<'c>; 2]) -> [Value<'c>; 2] {
        let b = self.b();
        let minus = |x: Value<'c>| b.float1(FloatUnary::Neg, x);
        [b.mul(minus(lse), b.f32(1.0 / self.plan().attention.scale.0)), minus(delta)]
    }

    /// Code of the other warpgroups.
    fn multiply(&self) {
        let (b, plan) = (self.b(), self.plan());
        b.asm(Instruction::MoreRegisters(more_registers(GROUPS, 1)), &[]);
        let (own, blocks) = (self.own.using(), self.blocks.using());
        let mut multiply = |kind: &GradientTiles<'a>, number| {
            // The descriptors are computed anew for each tile, as no register is left to keep them.
            let rows = b.index_mul(b.index_sub(warpgroup(b), b.word(1)), b.word(WARPGROUP / 2 * LINE));
            let mine = [0, self.layout.own_bytes].map(|place| self.matrices.at(b.index_add(self.at(place), rows), SIZES.own()));
            let tile = self.tile(kind, number);
            let slot = self.own.slot(own);
            self.own.wait_full(slot, own);
            self.own.advance(own);
            let unlisted = self.multipliers.full_mask(kind.side, SIZES, plan.sizes(kind.other_heads(plan)));
            let listed = plan.program.tells();
            let count = if listed { b.uniform(b.load_shared_word(self.at(self.layout.words))) } else { unlisted.count };
            let block = |i: Index<'c>, slot: Index<'c>| match listed {
                false => unlisted.block(self.multipliers, i),
                true => VisibleBlock::listed(self.multipliers, b.word(0), b.uniform(b.load_shared_word(self.word(slot)))),
            };
            let kept = (kind.side == ScoreSide::Queries).then(|| {
                let numbers = self.multipliers.numbers_of_rows(&tile.at, &tile.own, self.of_query);
                numbers.into_iter().map(|numbers| self.starts(numbers)).collect()
            });
            let task = WarpgroupTask { backward: self, kind, tile: &tile, mine, kept, blocks };
            let start = vec![b.f32(0.0); kind.sums.len() * plan.d.d as usize / 2];
            b.if_so(b.less(b.word(0), count), || task.ready());
            let sums = b.loop_over([b.word(0), count, b.word(1)], &start, &mut |i, sums| {
                b.asm(Instruction::LeaveRolled, &[]);
                task.add_pair(&|slot| block(i, slot), sums, b.less(b.index_add(i, b.word(1)), count))
            });
            // The tile is computed again here, so that what storing needs takes no registers in the loop.
            let number = b.uniform(b.load_shared_word(self.at(self.layout.words + 4)));
            release(b, self.own.empty(slot));
            let tile = self.tile(kind, number);
            self.multipliers.store_gradients(&tile.at, &tile.own, kind, &sums);
        };
        self.scheduler.each_beside(own, |number| self.by_kind(number, &mut multiply));
    }
}
