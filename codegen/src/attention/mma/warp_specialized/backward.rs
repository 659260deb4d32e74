//! The gradients of attention, in the two kinds of tiles that they have on sm_80 too: of keys, for the gradients of k and v, and of queries, for that of q.
//!
//! A tile has its rows of both operands of its side, k and v or q and dout; of the other side come blocks of as many rows of both, a pair in a stage. Of each pair there are
//! two products, scores and the gradients of probabilities, with the tile's rows first: so both become weights of the other side's rows where they are, in
//! registers. What has no tensor map, the logarithms and deltas of the queries that a tile of keys meets and the positions of either side, all lanes of the warp that copies put
//! beside the pair.
//!
//! While scores become probabilities, the gradients of these are computed; what else a warpgroup waits for, the other one has arithmetic beside it. Every sum is one warp's, in
//! a fixed order.

use super::pairs::WarpgroupTask;
use super::*;
use crate::build::FloatUnary;
use ir::launch::most_shared;

/// Pairs of blocks that can be there or under way, at most.
const STAGES: i64 = 4;
/// A tile's rows, and those of a block: with more, a warpgroup's sums and products of a pair have no room beside all else that it must know.
const SIZES: Sizes = Sizes { warps: GROUPS * WARPS, tall: 1, others: 64 };
/// Numbers of a row that comes by, before those of the program's operands.
pub const NUMBERS: i64 = 2;

/// What the kernel has beside the attention: maps of q, k, v and dout.
pub struct BackwardConfig {
    maps: [OperandMap; 4],
    /// Bytes of shared memory of a block, at most.
    most_shared: i64,
}

impl BackwardConfig {
    /// Nothing if an operand has no tensor map, or if the program asks for more than whether a pair is seen: then
    /// products cannot begin with what is subtracted of them.
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
    let (tiles, shared_bytes) = b.kernel_of_roles(name, [count, kernel.scalars.len()], config.maps.len(), BOUNDS, |given| {
        let cores = |team| Cores { b, plan, half, team };
        let (copiers, multipliers) = (cores(COPIERS), cores(MULTIPLIERS));
        let kinds = copiers.kinds();
        let list_bytes = kinds.iter().map(|kind| copiers.list_bytes(kind.side, SIZES)).max().unwrap_or(0);
        let places = Places::new(plan, config.most_shared - list_bytes);
        let tiles: i64 = kinds.iter().map(|kind| order(plan, kind).tiles()).sum();
        let stages = |offset: i64, count| Stages::new(b, b.index_add(b.shared(), b.word(offset)), count);
        let backward = WarpSpecializedBackward {
            config,
            given,
            arguments: arguments(b, kernel, given),
            of_query: [operands.lse, operands.delta],
            kinds: &kinds,
            copiers: &copiers,
            multipliers: &multipliers,
            matrices: Matrices { b, half, d: plan.d.d },
            own: stages(places.barriers, 1),
            blocks: stages(places.barriers + Stages::bytes(1), places.stages),
            scheduler: Scheduler::new(b, given, b.index_add(b.shared(), b.word(places.scheduler))),
            places,
        };
        prepare(b, &[&backward.own, &backward.blocks], &backward.scheduler);
        b.either(b.equal(warpgroup(b), b.word(0)), || backward.copy(), || backward.multiply());
        Ok((tiles, backward.places.list + list_bytes))
    })?;
    let shape = Shape { tiles: tiles as u64, line: 1, scratch_bytes: 0 };
    let maps = config.maps.iter().map(|m| m.map.clone()).collect();
    Ok((shape, launch_of_roles(kernel, &shape, BOUNDS, shared_bytes as u32, maps)))
}

/// The program's operands that are of one side alone.
pub fn of_side<'p>(plan: &'p AttentionPlan, side: ScoreSide) -> impl Iterator<Item = &'p Operand> {
    plan.program.operands.iter().filter(move |o| o.side() == side.which())
}

/// Numbers of a row that comes by, at most.
fn rows_numbers(plan: &AttentionPlan) -> i64 {
    let of = |side| of_side(plan, side).count() as i64;
    NUMBERS + of(ScoreSide::Queries).max(of(ScoreSide::Keys))
}

fn order(plan: &AttentionPlan, kind: &Kind) -> TileOrder {
    TileOrder::new(plan, kind.side == ScoreSide::Queries, SIZES.own())
}

/// Where what lies in shared memory, after a tile's two matrices: pairs of blocks, mbarriers, the number of the next
/// tile, numbers of blocks' rows, words (of the tile how many it meets and its number, then those of blocks), the list
/// of visits.
struct Places {
    stages: i64,
    /// Bytes of one of the tile's matrices, of one of a pair's, and of one number of all rows of a block.
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

impl Places {
    /// With as many stages as fit before a list that begins there at the latest.
    fn new(plan: &AttentionPlan, last_list: i64) -> Places {
        let row = ELEMENT * plan.d.d;
        let (own_bytes, block_bytes, number_bytes) = (SIZES.own() * row, SIZES.others * row, Lane::F32.bytes() * SIZES.others);
        let at = |stages: i64| {
            let blocks = 2 * own_bytes;
            let barriers = blocks + stages * 2 * block_bytes;
            let scheduler = barriers + Stages::bytes(1) + Stages::bytes(stages);
            let numbers = scheduler + Scheduler::BYTES;
            let words = numbers + stages * rows_numbers(plan) * number_bytes;
            Places { stages, own_bytes, block_bytes, number_bytes, blocks, barriers, scheduler, numbers, words, list: words + 4 * (2 + stages) }
        };
        let fit = (2..=STAGES).rev().find(|stages| at(*stages).list <= last_list);
        at(fit.unwrap_or(1))
    }
}

/// The kernel under construction: what the warps that copy and those that multiply share.
pub struct WarpSpecializedBackward<'a, 'c> {
    config: &'a BackwardConfig,
    given: &'a Given<'c>,
    arguments: GpuArguments<'c>,
    /// The logarithm and the delta of each query.
    of_query: [usize; 2],
    kinds: &'a [Kind<'a>],
    copiers: &'a Cores<'a, 'c>,
    pub multipliers: &'a Cores<'a, 'c>,
    pub matrices: Matrices<'a, 'c>,
    places: Places,
    /// Of a tile's matrices: one stage. Of pairs of blocks, with the numbers of queries.
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

    /// Where the thing of a slot is, of things of so many bytes.
    fn of_slot(&self, first: i64, bytes: i64, slot: Index<'c>) -> Index<'c> {
        self.b().index_add(self.at(first), self.b().index_mul(slot, self.b().word(bytes)))
    }

    /// The blocks of a stage.
    pub fn pair(&self, slot: Index<'c>) -> [Index<'c>; 2] {
        let first = self.of_slot(self.places.blocks, 2 * self.places.block_bytes, slot);
        [first, self.b().index_add(first, self.b().word(self.places.block_bytes))]
    }

    /// Numbers of the rows of a stage: of queries what scores and their gradients begin with, if keys meet them;
    /// of either side those of the program's operands that are of this side alone, in order.
    pub fn numbers(&self, slot: Index<'c>, k: usize) -> Index<'c> {
        let bytes = self.places.number_bytes;
        let first = self.of_slot(self.places.numbers, rows_numbers(self.plan()) * bytes, slot);
        self.b().index_add(first, self.b().word(k as i64 * bytes))
    }

    fn word(&self, slot: Index<'c>) -> Index<'c> {
        self.of_slot(self.places.words + 8, 4, slot)
    }

    /// Does something with a tile of the block: with its kind, and its number among those of that kind.
    fn by_kind(&self, number: Index<'c>, f: &mut dyn FnMut(&Kind<'a>, Index<'c>)) {
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
    fn tile(&self, kind: &Kind, number: Index<'c>) -> AttentionTile<'c> {
        let (b, plan) = (self.b(), self.plan());
        let dims = kind.heads(plan);
        let [head, run] = order(plan, kind).place(b, number);
        let at = self.arguments.at(b, plan, &dims, b.widen(head));
        let first = b.widen(b.index_mul(run, b.word(SIZES.own())));
        AttentionTile { at, heads: self.copiers.digits(&dims, head), own: RowTile { side: kind.side, sizes: SIZES, first } }
    }

    /// What the first warpgroup does: all of it lists what a tile meets, its first warp copies and takes the numbers of
    /// tiles.
    fn copy(&self) {
        let (b, plan) = (self.b(), self.plan());
        b.asm(Instruction::FewerRegisters(FEW_REGISTERS), &[]);
        let (own, blocks, taking) = (self.own.filling(), self.blocks.filling(), self.scheduler.taking());
        elected(b, || {
            self.scheduler.first(taking);
        });
        let mut copy = |kind: &Kind<'a>, number| {
            let tile = self.tile(kind, number);
            let visits = self.copiers.visits(&tile.at, &tile.own, plan.sizes(kind.met(plan)), self.at(self.places.list));
            first_warp(b, || {
                self.copy_matrices(kind, (&tile, number), &visits, [own, blocks]);
                // By then the list has been read by all lanes: the next tile's takes its place.
                b.meet();
                one_lane(b, || {
                    self.scheduler.next(taking);
                });
            });
        };
        self.scheduler.each(|number| self.by_kind(number, &mut copy));
    }

    /// Copies the matrices of a tile, then what it meets. One warp does it.
    fn copy_matrices(&self, kind: &Kind, (tile, number): (&AttentionTile<'c>, Index<'c>), visits: &Visits<'c>, [own, blocks]: [Position<'c>; 2]) {
        let (b, plan, places) = (self.b(), self.plan(), &self.places);
        let (mine, theirs) = match kind.side {
            ScoreSide::Queries => ([0, 3], [1, 2]),
            ScoreSide::Keys => ([1, 2], [0, 3]),
        };
        let fill = |maps: [usize; 2], heads: &HeadIndices<'c>, first: Index<'c>, to: [Index<'c>; 2], rows: i64, full: Index<'c>| {
            b.asm(Instruction::ArriveExpecting, &[full.into(), b.word(2 * rows * ELEMENT * plan.d.d).into()]);
            for (map, to) in maps.into_iter().zip(to) {
                self.config.maps[map].copy(self.copiers, self.given.maps[map], heads, [first, to], rows, full);
            }
        };
        let slot = self.own.slot(own);
        self.own.wait_empty(slot, own);
        one_lane(b, || {
            if plan.program.tells() {
                b.store_shared(self.at(places.words), &[visits.count.into()]);
            }
            b.store_shared(self.at(places.words + 4), &[number.into()]);
            fill(mine, &tile.heads, b.narrow(tile.own.first), [self.at(0), self.at(places.own_bytes)], SIZES.own(), self.own.full(slot));
        });
        self.own.advance(own);
        b.loop_over([b.word(0), visits.count, b.word(1)], &[], &mut |i, _| {
            let visit = visits.visit(self.copiers, i);
            let numbers = self.numbers_of(kind, tile, &visit);
            let slot = self.blocks.slot(blocks);
            self.blocks.wait_empty(slot, blocks);
            for (which, k, number) in &numbers {
                let place = b.index_add(self.numbers(slot, *which), self.copiers.scaled(self.copiers.lane(), 4));
                b.store_shared(b.index_add(place, b.word(4 * k)), &[*number]);
            }
            if !numbers.is_empty() {
                // The arrival is for all lanes.
                b.meet();
            }
            one_lane(b, || {
                if let Some(entry) = visit.entry {
                    b.store_shared(self.word(slot), &[entry.into()]);
                }
                let heads = [tile.heads.clone(), self.copiers.digits(kind.met(plan), visit.head)].concat();
                fill(theirs, &heads, b.index_mul(visit.block, b.word(SIZES.others)), self.pair(slot), SIZES.others, self.blocks.full(slot));
            });
            self.blocks.advance(blocks);
            vec![]
        });
    }

    /// What [`WarpSpecializedBackward::numbers`] has of a visit, every 32nd row for a lane: which, of the row how far
    /// after the lane's first, the number. Past the end there are those of the last row.
    fn numbers_of(&self, kind: &Kind, tile: &AttentionTile<'c>, visit: &Visit<'c>) -> Vec<(usize, i64, Value<'c>)> {
        let (b, plan, cores) = (self.b(), self.plan(), self.copiers);
        let side = kind.side.other();
        let at = tile.at.at(b, plan, kind.met(plan), b.widen(visit.head));
        let first = b.index_add(cores.scaled(visit.block, SIZES.others), cores.lane());
        let mut numbers = vec![];
        for k in (0..SIZES.others).step_by(LANES) {
            let row = cores.plus(first, k);
            if side == ScoreSide::Queries {
                let last = b.widen(b.least(row, b.word(plan.queries - 1)));
                let load = |tensor: usize| b.load_splat(b.at(at.tensors[tensor], b.index_mul(last, b.index(cores.step(tensor)))), Lane::F32);
                let [lse, delta] = self.of_query.map(load);
                let [score, dp] = self.starts([lse, delta]);
                numbers.extend([(0, k, score), (1, k, dp)]);
            }
            for (place, operand) in (NUMBERS as usize..).zip(of_side(plan, side)) {
                let number = cores.number(&at, side, operand, b.widen(row));
                let number = if operand.dtype == DType::Bool { b.select(number, b.i32(1), b.i32(0)) } else { number };
                numbers.push((place, k, number));
            }
        }
        numbers
    }

    /// What a query's scores, and their gradients, begin with: minus the logarithm, as a score, and minus the delta.
    fn starts(&self, [lse, delta]: [Value<'c>; 2]) -> [Value<'c>; 2] {
        let b = self.b();
        let minus = |x: Value<'c>| b.float1(FloatUnary::Neg, x);
        [b.mul(minus(lse), b.f32(1.0 / self.plan().attention.scale.0)), minus(delta)]
    }

    /// What the other warpgroups do.
    fn multiply(&self) {
        let (b, plan) = (self.b(), self.plan());
        b.asm(Instruction::MoreRegisters(more_registers(GROUPS, 1)), &[]);
        let (own, blocks) = (self.own.using(), self.blocks.using());
        let mut multiply = |kind: &Kind<'a>, number| {
            // Found anew for each tile, as no register is left for it from one to the next.
            let rows = b.index_mul(b.index_sub(warpgroup(b), b.word(1)), b.word(WARPGROUP / 2 * LINE));
            let mine = [0, self.places.own_bytes].map(|place| self.matrices.at(b.index_add(self.at(place), rows), SIZES.own()));
            let tile = self.tile(kind, number);
            let slot = self.own.slot(own);
            self.own.wait_full(slot, own);
            self.own.advance(own);
            let unlisted = self.multipliers.unlisted(kind.side, SIZES, plan.sizes(kind.met(plan)));
            let listed = plan.program.tells();
            let count = if listed { b.uniform(b.load_shared_word(self.at(self.places.words))) } else { unlisted.count };
            let visit = |i: Index<'c>, slot: Index<'c>| match listed {
                false => unlisted.visit(self.multipliers, i),
                true => Visit::listed(self.multipliers, b.word(0), b.uniform(b.load_shared_word(self.word(slot)))),
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
                task.meet(&|slot| visit(i, slot), sums, b.less(b.index_add(i, b.word(1)), count))
            });
            // Read and found once more, so that what it takes to store has no registers while pairs are met.
            let number = b.uniform(b.load_shared_word(self.at(self.places.words + 4)));
            release(b, self.own.empty(slot));
            let tile = self.tile(kind, number);
            self.multipliers.store_gradients(&tile.at, &tile.own, kind, &sums);
        };
        self.scheduler.each_beside(own, |number| self.by_kind(number, &mut multiply));
    }
}
