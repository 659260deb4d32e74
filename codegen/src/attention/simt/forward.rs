//! Attention and the logarithm of its sums: a tile is a few queries of one head.

use super::*;

/// Stands for a hidden score, whose probability is set to zero.
const HIDDEN: f64 = -1e30;

impl<'c> SimtAttention<'_, 'c> {
    pub(super) fn forward(&self) -> Result<SimtTiles<'_, 'c>, CompileError> {
        let plan = self.plan;
        let args = &plan.kernel.body[plan.kernel.outputs[0].value].args;
        let results = self.outputs(|op| matches!(op, Op::Attention(_)));
        // A kernel of the logarithm alone has no values.
        let values = results.first().map(|(_, o)| plan.operand(plan.kernel.body[o.value].args[2])).transpose()?.map(|v| plan.key_rows(v));
        let (q, k) = (plan.query_rows(plan.operand(args[0])?), plan.key_rows(plan.operand(args[1])?));
        let wide = if values.is_some() { Self::columns(plan.values) } else { 0 };
        let rows = self.rows_of_tile(wide);
        let write = move |at: &GpuArguments<'c>, first| {
            let b = self.b;
            let own = self.own(at, ScoreSide::Queries, first, rows);
            let starts = self.starts(at, &q, &own);
            let kept = own.numbers.len();
            // Carried values are the greatest score of each query so far, each lane's share of the sum of
            // exponentials relative to it, and the sums of values.
            let start = [vec![b.f32(HIDDEN); kept], vec![b.f32(0.0); kept + kept * wide]].concat();
            let end = self.for_visible_rows(at, &own, &start, &mut |others, carried| {
                let mut next = carried.to_vec();
                let products = self.products(at, (&q, &starts), &k, others);
                let mut weights = Vec::new();
                for (row, product) in products.into_iter().enumerate() {
                    let WeightedScores { score, mask, weight, .. } =
                        self.scored(at, &own, row, others, b.mul(product, b.f32(plan.attention.scale.0)));
                    let score = mask.map_or(score, |m| b.select(m, score, b.f32(HIDDEN)));
                    let before = carried[row];
                    let greatest = b.max(across(b, score, |x, y| b.max(x, y)), before);
                    let e = math::exp(b, b.sub(score, greatest));
                    let e = mask.map_or(e, |m| b.select(m, e, b.f32(0.0)));
                    let rescale = math::exp(b, b.sub(before, greatest));
                    next[row] = greatest;
                    next[kept + row] = b.fma(carried[kept + row], ir::fault!("gpu.lanes.rescaled", b.f32(1.0), rescale), e);
                    for sum in &mut next[2 * kept + row * wide..][..wide] {
                        *sum = b.mul(*sum, rescale);
                    }
                    weights.push(weight.map_or(e, |w| b.mul(e, w)));
                }
                if let Some(v) = &values {
                    let sums = self.weigh(at, &weights, v, others, &next[2 * kept..]);
                    next.splice(2 * kept.., sums);
                }
                next
            });
            let (greatest, rest) = end.split_at(kept);
            let (shares, sums) = rest.split_at(kept);
            let weights: Vec<_> = shares.iter().map(|s| across(b, *s, |x, y| b.add(x, y))).collect();
            let scaled: Vec<_> = sums
                .iter()
                .enumerate()
                .map(|(i, sum)| {
                    let weight = weights[i / wide];
                    // A query that sees no key has weight 0. Its result is then 0 and its logarithm minus infinity.
                    let none = b.compare_float(Compare::Eq, weight, b.f32(0.0));
                    b.select(none, b.f32(0.0), b.mul(*sum, b.div(b.f32(1.0), weight)))
                })
                .collect();
            for output in &results {
                self.store_sums(at, &own, *output, &scaled);
            }
            for (tensor, output) in self.outputs(|op| matches!(op, Op::AttentionLse(_))) {
                self.store_rows(at, &own, tensor, &|row, place| {
                    let log = b.add(greatest[row], math::log(b, weights[row]));
                    let log = if output.accumulate { b.add(log, b.load_splat(place, Lane::F32)) } else { log };
                    b.store_first(place, log, Lane::F32);
                });
            }
        };
        let heads = plan.shared.iter().chain(&plan.group).copied().collect();
        Ok(SimtTiles { heads, rows, runs: div_ceil(plan.queries, rows), write: Box::new(write) })
    }
}
