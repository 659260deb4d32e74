//! The gradients of attention, in two kinds of tiles: of queries, for the gradient of q, and of keys, for those of k
//! and v, which meet the queries of all heads that share them. Both compute the scores and the gradients of
//! probabilities again; every sum is one warp's, in a fixed order.

use super::super::LOWEST;
use super::*;
use std::f64::consts::LOG2_E;

/// The weights with which a gradient sums rows of the other side.
#[derive(Clone, Copy, PartialEq)]
pub enum SumWeights {
    /// Probabilities weigh the rows of the second operand.
    Probabilities,
    /// Gradients of scores weigh the rows of the first operand.
    Scores,
}

impl SumWeights {
    /// Elements of a row of the sums.
    pub fn size(self, plan: &AttentionPlan) -> HeadSize {
        match self {
            SumWeights::Probabilities => plan.values,
            SumWeights::Scores => plan.d,
        }
    }
}

/// The tiles of one side.
pub struct GradientTiles<'s> {
    pub side: ScoreSide,
    /// The sums of a tile, each with the outputs that it is stored to.
    pub sums: Vec<(SumWeights, Vec<(usize, &'s Output)>)>,
}

impl GradientTiles<'_> {
    /// Dims that number heads of the tiles' rows.
    pub fn heads(&self, plan: &AttentionPlan) -> Vec<Dim> {
        match self.side {
            ScoreSide::Queries => plan.heads(),
            ScoreSide::Keys => plan.shared.clone(),
        }
    }

    /// Dims that number the heads of the other side that a tile meets.
    pub fn other_heads<'p>(&self, plan: &'p AttentionPlan) -> &'p [Dim] {
        match self.side {
            ScoreSide::Queries => &[],
            ScoreSide::Keys => &plan.group,
        }
    }
}

impl<'c> MmaAttention<'_, 'c> {
    pub(super) fn backward(&self) -> Result<Vec<MmaTiles<'_, 'c>>, CompileError> {
        let operands = self.plan.gradient_operands()?;
        if let Some(bias) = self.plan.bias() {
            return Ok(vec![self.pairs(operands, bias)]);
        }
        Ok(self.kinds().into_iter().map(|kind| self.part(operands, kind)).collect())
    }

    /// The kinds of tiles that the kernel has.
    pub fn kinds(&self) -> Vec<GradientTiles<'_>> {
        let of = |which| self.outputs(move |op| matches!(op, Op::AttentionGrad(_, w) if *w == which));
        let kind = |side, sums: &[(SumWeights, AttentionGrad)]| {
            let sums = sums.iter().map(|(of_what, which)| (*of_what, of(*which))).filter(|(_, outputs)| !outputs.is_empty());
            GradientTiles { side, sums: sums.collect() }
        };
        let of_keys = [(SumWeights::Probabilities, AttentionGrad::V), (SumWeights::Scores, AttentionGrad::K)];
        // The sums of both gradients would not fit into the registers, so each gets tiles of its own.
        let keys = match self.plan.d.padded() + self.plan.values.padded() > MOST_ELEMENTS {
            true => of_keys.iter().map(|sum| kind(ScoreSide::Keys, &[*sum])).collect(),
            false => vec![kind(ScoreSide::Keys, &of_keys)],
        };
        let queries = kind(ScoreSide::Queries, &[(SumWeights::Scores, AttentionGrad::Q)]);
        keys.into_iter().chain([queries]).filter(|kind| !kind.sums.is_empty()).collect()
    }

    fn part<'s>(&'s self, operands: GradientOperands, kind: GradientTiles<'s>) -> MmaTiles<'s, 'c> {
        let (plan, side) = (self.plan, kind.side);
        let GradientOperands { q, k, v, dout, lse, delta } = operands;
        let (mine, theirs) = match side {
            ScoreSide::Queries => ([q, dout], [k, v]),
            ScoreSide::Keys => ([k, v], [q, dout]),
        };
        let (d, values) = (plan.d, plan.values);
        let sizes = TileSizes { warps: WARPS, tall: 1, others: if d.d.max(values.d) <= 64 { 64 } else { 32 } };
        // `bytes` are those of the first operand, queries or keys, and of the second, which is as wide as values.
        let bytes = |rows: i64| [d, values].map(|size| rows * Self::row_bytes(size));
        let ([tile_bytes, second_tile], [block_bytes, second_block]) = (bytes(sizes.own()), bytes(sizes.others));
        // A stage of queries ends with the logarithm and the delta of each query.
        let numbers = block_bytes + second_block;
        let stage_bytes = numbers + if side == ScoreSide::Keys { 8 * sizes.others } else { 0 };
        let stages = tile_bytes + second_tile;
        let list = stages + 2 * stage_bytes;
        let (heads, runs_of) = (plan.sizes(kind.other_heads(plan)), kind.heads(plan));
        let write = move |at: &GpuArguments<'c>, run: Index<'c>| {
            let b = self.b;
            let first = b.index_mul(run, b.index(sizes.own()));
            let own = RowTile { side, sizes, first };
            let part = |offset: i64| self.plus(b.shared(), offset);
            let mask = self.block_mask(at, &own, heads, part(list));
            // A tile of keys meets the queries of several heads, a tile of queries meets one head of keys.
            let at_head = |block: &VisibleBlock<'c>| {
                if heads == 1 { at.at(b, plan, &[], b.index(0)) } else { at.at(b, plan, kind.other_heads(plan), b.widen(block.head)) }
            };
            let begin = || {
                for (rows, place) in mine.iter().zip([0, tile_bytes]) {
                    self.copy_rows(at, rows, first, sizes.own(), part(place));
                }
            };
            let load = |block: &VisibleBlock<'c>, stage: Index<'c>| {
                let at = at_head(block);
                let first = b.widen(self.scaled(block.index, sizes.others));
                for (rows, place) in theirs.iter().zip([0, block_bytes]) {
                    self.copy_rows(&at, rows, first, sizes.others, self.plus(stage, place));
                }
                if side == ScoreSide::Keys {
                    self.copy_numbers(&at, [lse, delta], first, sizes.others, self.plus(stage, numbers));
                }
            };
            let kept = (side == ScoreSide::Queries).then(|| self.exponents_of_rows(at, &own, [lse, delta]));
            let halves: Vec<usize> = kind.sums.iter().map(|(of, _)| (sizes.tall * of.size(plan).padded() / 2) as usize).collect();
            let start = vec![b.f32(0.0); halves.iter().sum()];
            let sums = self.stream(&mask, [part(stages), b.word(stage_bytes)], begin, &load, &start, &mut |block, stage, sums| {
                let scores = self.products(sizes, d, part(0), stage);
                // The gradient of v alone needs no gradients of probabilities.
                let of_scores = kind.sums.iter().any(|(of, _)| *of == SumWeights::Scores);
                let dp = if of_scores { self.products(sizes, values, part(tile_bytes), self.plus(stage, block_bytes)) } else { vec![] };
                let numbers = kept.clone().unwrap_or_else(|| self.numbers_of_columns(sizes, self.plus(stage, numbers)));
                let here = if plan.program.grouped { at_head(block) } else { at.at(b, plan, &[], b.index(0)) };
                let (scores, slopes) = self.changed(&here, &own, block, &scores);
                let p = self.probabilities(&here, &own, block, &scores, &numbers);
                let (counted, mut ds) = self.weighted(&here, &own, block, &p, dp, &numbers);
                for ((ds, p), slope) in ds.iter_mut().zip(&p).zip(slopes.into_iter().flatten()) {
                    // A hidden score has no slope, whatever the program computes for it.
                    let none = b.compare_float(Compare::Eq, *p, b.f32(0.0));
                    *ds = b.select(none, b.f32(0.0), ir::fault!("gpu.mma.slope", *ds, b.mul(*ds, slope)));
                }
                let mut sums = sums.to_vec();
                let mut rest = &mut sums[..];
                for (half, (of, _)) in halves.iter().zip(&kind.sums) {
                    let (sums, more) = rest.split_at_mut(*half);
                    rest = more;
                    match of {
                        SumWeights::Scores => self.weigh(sizes, d, &ds, stage, sums),
                        SumWeights::Probabilities => self.weigh(sizes, values, &counted, self.plus(stage, block_bytes), sums),
                    }
                }
                sums
            });
            self.store_gradients(at, &own, &kind, &sums);
        };
        let shared_bytes = list + self.list_bytes(side, sizes);
        MmaTiles { heads: runs_of, order: TileOrder::new(plan, side == ScoreSide::Queries, sizes.own()), shared_bytes, write: Box::new(write) }
    }

    /// For each score of a tile of queries, the two values of its row: minus the logarithm to base 2, and the delta.
    pub(super) fn exponents_of_rows(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, numbers: [usize; 2]) -> Vec<[Value<'c>; 2]> {
        let numbers = self.numbers_of_rows(at, own, numbers);
        numbers.into_iter().map(|[lse, delta]| [self.minus_log2(lse), delta]).collect()
    }

    /// Probabilities of changed scores; zero where they are hidden.
    pub(super) fn probabilities(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        scores: &[Value<'c>],
        numbers: &[[Value<'c>; 2]],
    ) -> Vec<Value<'c>> {
        let b = self.b;
        let p: Vec<_> = scores.iter().zip(numbers).map(|(score, [log, _])| b.fast_exp2(b.fma(*score, self.scale(), *log))).collect();
        self.hide(at, own, block, &p, b.f32(0.0))
    }

    /// Weighted probabilities and the gradients of changed scores, from probabilities and their gradients.
    pub(super) fn weighted(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        p: &[Value<'c>],
        mut dp: Vec<Value<'c>>,
        numbers: &[[Value<'c>; 2]],
    ) -> (Vec<Value<'c>>, Vec<Value<'c>>) {
        let b = self.b;
        let mut counted = p.to_vec();
        if let Some(weights) = self.weights(at, own, block) {
            dp.iter_mut().zip(&weights).for_each(|(dp, w)| *dp = ir::fault!("gpu.mma.weight.slope", *dp, b.mul(*dp, *w)));
            counted.iter_mut().zip(&weights).for_each(|(p, w)| *p = b.mul(*p, *w));
        }
        let slope =
            |((p, dp), [log, delta]): ((&Value<'c>, &Value<'c>), &[Value<'c>; 2])| b.mul(*p, b.sub(*dp, *ir::fault!("gpu.mma.delta", log, delta)));
        let slopes = p.iter().zip(&dp).zip(numbers).map(slope).collect();
        (counted, slopes)
    }

    /// Stores the sums of a tile.
    pub fn store_gradients(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, kind: &GradientTiles, sums: &[Value<'c>]) {
        let mut rest = sums;
        for (of, outputs) in &kind.sums {
            let (sums, more) = rest.split_at((own.sizes.tall * of.size(self.plan).padded() / 2) as usize);
            rest = more;
            let factor = match of {
                SumWeights::Scores => self.plan.attention.scale.0,
                SumWeights::Probabilities => 1.0,
            };
            for output in outputs {
                self.store_sums(at, own, *output, sums, &vec![self.b.f32(factor); 2 * own.sizes.tall as usize]);
            }
        }
    }

    fn minus_log2(&self, lse: Value<'c>) -> Value<'c> {
        // A program may make all scores of a query minus infinity. Without a bound on the logarithm, their difference
        // from it would be NaN.
        let lse = if self.plan.program.changes() { self.b.max(lse, self.b.f32(LOWEST)) } else { lse };
        self.b.mul(lse, self.b.f32(-LOG2_E))
    }

    /// Bytes between the values of neighbouring queries.
    pub fn step(&self, tensor: usize) -> i64 {
        Lane::F32.bytes() * self.plan.stride(tensor, self.plan.attention.at)
    }

    /// For each element, the two values of its row, a query of the tile.
    pub fn numbers_of_rows(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, tensors: [usize; 2]) -> Vec<[Value<'c>; 2]> {
        let b = self.b;
        let of_row: Vec<_> = (0..2 * own.sizes.tall)
            .map(|k| {
                let row = b.least(self.row(own, k / 2, k % 2), b.index(self.count(own.side) - 1));
                tensors.map(|t| b.load_splat(b.at(at.tensors[t], b.index_mul(row, b.index(self.step(t)))), Lane::F32))
            })
            .collect();
        let across = own.sizes.others as usize / 2;
        (0..across * own.sizes.tall as usize).map(|i| of_row[i / across * 2 + i / 2 % 2]).collect()
    }

    /// Starts the copy of two values of each of `count` queries: all of one tensor, then all of the other. Past the
    /// end, the last query is copied.
    fn copy_numbers(&self, at: &GpuArguments<'c>, tensors: [usize; 2], first: Index<'c>, count: i64, to: Index<'c>) {
        let b = self.b;
        let thread = b.thread();
        let copy = || {
            let row = b.least(b.index_add(first, b.widen(b.index_rem(thread, b.word(count)))), b.index(self.plan.queries - 1));
            let [lse, delta] = tensors.map(|t| b.address(b.at(at.tensors[t], b.index_mul(row, b.index(self.step(t))))));
            let from = b.choose(b.less(thread, b.word(count)), lse, delta);
            b.asm(Instruction::CopyAsync { bytes: 4 }, &[b.index_add(to, self.scaled(thread, 4)).into(), from.into()]);
        };
        match 2 * count < THREADS {
            true => b.if_so(b.less(thread, b.word(2 * count)), copy),
            false => copy(),
        }
    }

    /// For each element, the two values of its column, a query of the block.
    fn numbers_of_columns(&self, sizes: TileSizes, from: Index<'c>) -> Vec<[Value<'c>; 2]> {
        let [lse, delta] = [0, 4 * sizes.others].map(|offset| self.of_columns(sizes, self.plus(from, offset)));
        lse.into_iter().map(|lse| self.minus_log2(lse)).zip(delta).map(|(lse, delta)| [lse, delta]).collect()
    }

    /// For each element, the value of its column in shared memory.
    pub fn of_columns(&self, sizes: TileSizes, from: Index<'c>) -> Vec<Value<'c>> {
        let pairs: Vec<_> =
            (0..sizes.others / COLUMNS).map(|n| self.b.load_shared(self.b.index_add(from, self.scaled(self.column(n), 4)), 2)).collect();
        (0..(sizes.tall * sizes.others / 2) as usize).map(|i| pairs[i / 4 % pairs.len()][i % 2]).collect()
    }
}
