//! Attention and the logarithm of its sums: a tile is a run of queries of one head.

use super::*;
use std::f64::consts::{LN_2, LOG2_E};

impl<'c> MmaAttention<'_, 'c> {
    pub(super) fn forward(&self) -> Result<MmaTiles<'_, 'c>, CompileError> {
        let plan = self.plan;
        let results = self.outputs(|op| matches!(op, Op::Attention(_)));
        let args = &plan.kernel.body[results.first().expect("invariant: there is a result").1.value].args;
        let operand = |slot: usize| plan.operand(args[slot]);
        let [q, k, v] = [plan.query_rows(operand(0)?), plan.key_rows(operand(1)?), plan.key_rows(operand(2)?)];
        // Longer heads get smaller tiles, so that for most of them two thread blocks share a multiprocessor's memory.
        let (d, values) = (plan.d, plan.values);
        let small = d.d.max(values.d) <= 64;
        let sizes =
            TileSizes { warps: WARPS, tall: if values.d <= 128 && !plan.program.reads_pairs() { 2 } else { 1 }, others: if small { 64 } else { 32 } };
        let [of_keys, of_values] = [d, values].map(|size| sizes.others * Self::row_bytes(size));
        let stages = sizes.own() * Self::row_bytes(d);
        let list = stages + 2 * (of_keys + of_values);
        let write = move |at: &GpuArguments<'c>, run: Index<'c>| {
            let b = self.b;
            let first = b.index_mul(run, b.index(sizes.own()));
            let own = RowTile { side: ScoreSide::Queries, sizes, first };
            let part = |offset: i64| self.plus(b.shared(), offset);
            let mask = self.block_mask(at, &own, 1, part(list));
            let rows = 2 * sizes.tall as usize;
            // The carried values are the softmax state of each row, then the sums of values.
            let start = [self.nothing_seen(sizes), vec![b.f32(0.0); rows * values.padded() as usize / 4]].concat();
            let begin = || self.copy_rows(at, &q, first, sizes.own(), part(0));
            let load = |block: &VisibleBlock<'c>, stage: Index<'c>| {
                let first = b.widen(self.scaled(block.index, sizes.others));
                self.copy_rows(at, &k, first, sizes.others, stage);
                self.copy_rows(at, &v, first, sizes.others, self.plus(stage, of_keys));
            };
            let end = self.stream(&mask, [part(stages), b.word(of_keys + of_values)], begin, &load, &start, &mut |block, stage, carried| {
                let scores = self.products(sizes, d, part(0), stage);
                let (scores, _) = self.changed(at, &own, block, &scores);
                let scores = self.hide(at, &own, block, &scores, b.f32(f64::NEG_INFINITY));
                let (state, sums) = carried.split_at(2 * rows);
                let mut sums = sums.to_vec();
                let (mut weights, state) = self.softmax(sizes, scores, state, &mut |k, factor| self.rescale(k, factor, &mut sums));
                for (e, weight) in weights.iter_mut().zip(self.weights(at, &own, block).into_iter().flatten()) {
                    *e = ir::fault!("gpu.mma.weight.values", *e, b.mul(*e, weight));
                }
                self.weigh(sizes, values, &weights, self.plus(stage, of_keys), &mut sums);
                [state, sums].concat()
            });
            self.finish(at, &own, &end);
        };
        let heads = plan.heads();
        let shared_bytes = list + self.list_bytes(ScoreSide::Queries, sizes);
        Ok(MmaTiles { heads, order: TileOrder::new(plan, true, sizes.own()), shared_bytes, write: Box::new(write) })
    }

    /// Initial softmax state: for each row the greatest score, then for each row this lane's share of the sum of
    /// exponentials.
    pub(super) fn nothing_seen(&self, sizes: TileSizes) -> Vec<Value<'c>> {
        let (b, rows) = (self.b, 2 * sizes.tall as usize);
        [vec![b.f32(f64::NEG_INFINITY); rows], vec![b.f32(0.0); rows]].concat()
    }

    /// Stores a tile: `end` is the state of each row, then the sums of values.
    pub(super) fn finish(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, end: &[Value<'c>]) {
        let (b, rows) = (self.b, 2 * own.sizes.tall as usize);
        let (greatest, rest) = end.split_at(rows);
        let (shares, sums) = rest.split_at(rows);
        let weights: Vec<_> = shares.iter().map(|s| self.across_row(*s, |x, y| b.add(x, y))).collect();
        let inverse = |weight: &Value<'c>| {
            // A query that sees no key has weight 0. Its result is then 0 and its logarithm minus infinity.
            let none = b.compare_float(Compare::Eq, *weight, b.f32(0.0));
            b.select(none, b.f32(0.0), b.div(b.f32(1.0), *weight))
        };
        let factors: Vec<_> = weights.iter().map(inverse).collect();
        for output in self.outputs(|op| matches!(op, Op::Attention(_))) {
            self.store_sums(at, own, output, sums, &factors);
        }
        for (tensor, output) in self.outputs(|op| matches!(op, Op::AttentionLse(_))) {
            self.each_row(at, own, tensor, &|k, place| {
                let log = b.add(b.fast_log2(weights[k]), self.relative_to(greatest[k]));
                let log = b.mul(log, b.f32(LN_2));
                let log = if output.accumulate { b.add(log, b.load_splat(place, Lane::F32)) } else { log };
                let first = b.equal(self.lane_bits(0, 2), b.word(0));
                b.if_so(first, || b.store_each(place, log, Lane::F32));
            });
        }
    }

    /// Factor from scores to exponents of 2. Scores are already scaled where the program changes them.
    pub(super) fn scale(&self) -> Value<'c> {
        self.b.f32(if self.plan.program.changes() { LOG2_E } else { self.plan.attention.scale.0 * LOG2_E })
    }

    /// The exponent that powers are taken relative to: the greatest, or 0 where no key was seen.
    fn relative_to(&self, greatest: Value<'c>) -> Value<'c> {
        let b = self.b;
        let none = b.compare_float(Compare::Eq, greatest, b.f32(f64::NEG_INFINITY));
        b.select(none, b.f32(0.0), b.mul(greatest, self.scale()))
    }

    /// Exponentials of a block of scores, relative to the greatest score of their row so far, and the rows' new
    /// state. `rescaled` gets the factor by which a row's earlier sums must be multiplied.
    pub(super) fn softmax(
        &self,
        sizes: TileSizes,
        scores: Vec<Value<'c>>,
        state: &[Value<'c>],
        rescaled: &mut dyn FnMut(usize, Value<'c>),
    ) -> (Vec<Value<'c>>, Vec<Value<'c>>) {
        let b = self.b;
        let (mut weights, mut next) = (scores, state.to_vec());
        let rows = 2 * sizes.tall as usize;
        let across = sizes.others as usize / 2;
        for k in 0..rows {
            let own: Vec<usize> = of_row(k, across).collect();
            let greatest = own[1..].iter().fold(weights[own[0]], |top, i| b.maximum(top, weights[*i]));
            let greatest = b.maximum(self.across_row(greatest, |x, y| b.maximum(x, y)), state[k]);
            let base = self.relative_to(greatest);
            let minus = b.float1(crate::build::FloatUnary::Neg, base);
            let factor = b.fast_exp2(b.fma(state[k], self.scale(), minus));
            let mut sum = b.mul(state[rows + k], factor);
            for i in own {
                weights[i] = b.fast_exp2(b.fma(weights[i], self.scale(), minus));
                sum = b.add(sum, weights[i]);
            }
            next[k] = greatest;
            next[rows + k] = sum;
            rescaled(k, factor);
        }
        (weights, next)
    }

    /// Multiplies the sums of values of a row.
    pub(super) fn rescale(&self, row: usize, factor: Value<'c>, sums: &mut [Value<'c>]) {
        for i in of_row(row, self.plan.values.padded() as usize / ir::fault!("gpu.mma.rescaled", 4, 2)) {
            sums[i] = self.b.mul(sums[i], factor);
        }
    }
}

/// Indices of the sums of row k, where each group of 16 rows has `of_rows` sums: two of every four belong to one row.
fn of_row(k: usize, of_rows: usize) -> impl Iterator<Item = usize> {
    (k / 2 * of_rows..(k / 2 + 1) * of_rows).filter(move |i| i / 2 % 2 == k % 2)
}
