//! What a warpgroup's rows of a tile of gradients make of the pairs of blocks that they meet.

use super::backward::{NUMBERS, WarpSpecializedBackward};
use super::*;
use crate::build::Convert;

/// A warpgroup's share of a tile: its rows, and the pairs of blocks that they meet.
pub struct WarpgroupTask<'m, 'a, 'c> {
    pub backward: &'m WarpSpecializedBackward<'a, 'c>,
    pub kind: &'m GradientTiles<'a>,
    pub tile: &'m AttentionTile<'c>,
    /// The tile's matrices, from the warpgroup's rows on.
    pub mine: [Matrix<'c>; 2],
    /// Initial values of each element's products, if queries are the tile's rows.
    pub kept: Option<Vec<[Value<'c>; 2]>>,
    pub blocks: Position<'c>,
}

impl<'c> WarpgroupTask<'_, '_, 'c> {
    /// Waits for the first pair.
    pub fn ready(&self) {
        let blocks = &self.backward.blocks;
        blocks.wait_full(blocks.slot(self.blocks), self.blocks);
    }

    /// Adds the terms of a pair of blocks, which has arrived, to the tile's sums. If there are more pairs, the next
    /// one has arrived when it returns.
    pub fn add_pair(&self, block: &dyn Fn(Index<'c>) -> VisibleBlock<'c>, sums: &[Value<'c>], more: Index<'c>) -> Vec<Value<'c>> {
        let (b, backward, mma, tile) = (self.backward.b(), self.backward, self.backward.multipliers, self.tile);
        let matrices = &backward.matrices;
        let slot = backward.blocks.slot(self.blocks);
        let theirs = backward.pair(slot).map(|at| matrices.at(at, tile.own.sizes.others));
        // Products start from what would be subtracted from them, which then needs no registers of its own.
        let starts = matrices.fence(&[self.start(0, slot), self.start(1, slot)].concat());
        let begin = |which: usize, starts| {
            let sums = matrices.products_onto(self.mine[which], theirs[which], starts);
            matrices.commit();
            sums
        };
        let (first, second) = starts.split_at(starts.len() / 2);
        let (scores, dp) = (begin(0, first), begin(1, second));
        let block = block(slot);
        let scores = matrices.wait(1, &scores);
        let scores = mma.hide_by(&tile.at, &tile.own, &block, &scores, b.f32(f64::NEG_INFINITY), &|n| self.column_values(&block, slot, n));
        let p: Vec<_> = scores.iter().map(|score| b.fast_exp2(b.mul(*score, mma.scale()))).collect();
        // This wait loop stands here, and not where the pair is used: the assembler moves nothing past a loop, so all
        // of the above stays before the next wait for products.
        b.if_so(more, || backward.blocks.wait_next_full(self.blocks));
        let both = matrices.wait(0, &[p, dp].concat());
        let (p, dp) = both.split_at(both.len() / 2);
        let ds: Vec<_> = p.iter().zip(dp).map(|(p, dp)| b.mul(*p, *dp)).collect();
        let words = |of: SumWeights| match of {
            SumWeights::Probabilities => (matrices.halves(p), theirs[1]),
            SumWeights::Scores => (matrices.halves(&ds), theirs[0]),
        };
        let weights: Vec<_> = self.kind.sums.iter().map(|(of, _)| words(*of)).collect();
        let sums = matrices.fence(sums);
        let each = sums.chunks(mma.plan.d.d as usize / 2).zip(weights);
        let sums: Vec<_> = each.flat_map(|(sums, (words, rows))| matrices.weigh(&words, rows, sums)).collect();
        matrices.commit();
        let sums = matrices.wait(0, &sums);
        release(b, backward.blocks.empty(slot));
        backward.blocks.advance(self.blocks);
        sums
    }

    /// Values of this lane's two columns in the n-th group of 8, from the stage.
    fn column_values(&self, block: &VisibleBlock<'c>, slot: Index<'c>, n: i64) -> [ColumnValues<'c>; 2] {
        let (b, mma, own) = (self.backward.b(), self.backward.multipliers, &self.tile.own);
        let first = b.index_add(mma.scaled(block.index, own.sizes.others), mma.column(n));
        let mut both = [0, 1].map(|e| ColumnValues { numbers: vec![], present: mma.present(own, mma.plus(first, e)) });
        let mut slots = NUMBERS as usize..;
        for operand in &mma.plan.program.operands {
            let theirs = operand.side() == own.side.other().index();
            let pair = slots.by_ref().take(usize::from(theirs)).next().map(|k| {
                let pair = b.load_shared(b.index_add(self.backward.numbers(slot, k), mma.scaled(mma.column(n), 4)), 2);
                let bits = |x: Value<'c>| b.convert(Convert::Bits(Lane::I32), x);
                [pair[0], pair[1]].map(|x| match operand.dtype {
                    DType::F32 | DType::Bf16 | DType::F16 => x,
                    DType::I32 => bits(x),
                    DType::Bool => b.compare_int(Compare::Ne, bits(x), b.i32(0)),
                })
            });
            for (e, column) in both.iter_mut().enumerate() {
                column.numbers.push(pair.map(|pair| pair[e]));
            }
        }
        both
    }

    /// Initial values of the products of a pair, from each element's query.
    fn start(&self, which: usize, slot: Index<'c>) -> Vec<Value<'c>> {
        match &self.kept {
            Some(kept) => kept.iter().map(|numbers| numbers[which]).collect(),
            None => self.backward.multipliers.of_columns(self.tile.own.sizes, self.backward.numbers(slot, which)),
        }
    }
}
