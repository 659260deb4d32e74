//! The gradients of attention. Tiles of one kind keep queries and sum the gradient of q; those of the other keep
//! keys, meet the queries of all heads that share them, and sum the gradients of k and v. Every sum is one warp's, in
//! a fixed order; for that, scores are computed twice.

use super::super::LOWEST;
use super::*;
use ir::op::AttentionGrad;

impl<'c> SimtAttention<'_, 'c> {
    pub(super) fn backward(&self) -> Result<Vec<SimtTiles<'_, 'c>>, CompileError> {
        let plan = self.plan;
        let operands = plan.gradient_operands()?;
        if let Some(bias) = plan.bias() {
            return Ok(vec![self.pairs(operands, bias)]);
        }
        let [dq, dk, dv] = [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V]
            .map(|which| self.outputs(move |op| matches!(op, Op::AttentionGrad(_, w) if *w == which)));
        let mut parts = Vec::new();
        if !dq.is_empty() {
            parts.push(self.queries(operands, dq));
        }
        if !(dk.is_empty() && dv.is_empty()) {
            parts.push(self.keys(operands, [dk, dv]));
        }
        Ok(parts)
    }

    /// Probabilities and the gradients of scores times a factor, from the products of `q` with `k` and of `dout` with
    /// `v`, and the query's logarithm and delta.
    fn slopes(
        &self,
        scored: &dyn Fn(Value<'c>) -> WeightedScores<'c>,
        [product, dp]: [Value<'c>; 2],
        [lse, delta]: [Value<'c>; 2],
        factor: f64,
    ) -> [Value<'c>; 2] {
        let b = self.b;
        let WeightedScores { score, slope, weight, mask } = scored(b.mul(product, b.f32(self.plan.attention.scale.0)));
        let scale = b.f32(factor);
        // A program may make all scores of a query minus infinity. Without a bound on the logarithm, their difference
        // from it would be NaN.
        let lse = if self.plan.program.changes() { b.max(lse, b.f32(LOWEST)) } else { lse };
        let p = math::exp(b, b.sub(score, lse));
        let scale = slope.map_or(scale, |slope| b.mul(scale, slope));
        let [counted, dp] = weight.map_or([p, dp], |w| [p, ir::fault!("gpu.lanes.weight.slope", b.f32(1.0), dp)].map(|x| b.mul(x, w)));
        let ds = b.mul(b.mul(p, scale), b.sub(dp, delta));
        [counted, ds].map(|x| mask.map_or(x, |m| b.select(m, x, b.f32(0.0))))
    }

    /// Bytes between the values of neighbouring queries.
    fn step(&self, tensor: usize) -> i64 {
        Lane::F32.bytes() * self.plan.stride(tensor, self.plan.attention.at)
    }

    fn queries<'s>(&'s self, operands: GradientOperands, outputs: Vec<(usize, &'s Output)>) -> SimtTiles<'s, 'c> {
        let plan = self.plan;
        let rows = self.rows_of_tile(Self::columns(plan.d));
        let write = move |at: &GpuArguments<'c>, first| {
            let own = self.own(at, ScoreSide::Queries, first, rows);
            let start = vec![self.b.f32(0.0); own.numbers.len() * Self::columns(plan.d)];
            let slopes = self.slopes_of_queries(at, &own, &operands, plan.attention.scale.0);
            let sums = self.for_visible_rows(at, &own, &start, &mut |others, sums| self.weigh(at, &slopes(others), &operands.k, others, sums));
            for output in &outputs {
                self.store_sums(at, &own, *output, &sums);
            }
        };
        let heads = plan.shared.iter().chain(&plan.group).copied().collect();
        SimtTiles { heads, rows, runs: div_ceil(plan.queries, rows), write: Box::new(write) }
    }

    /// The gradients of the scores of a tile's queries with the lanes' keys, times a factor.
    fn slopes_of_queries(
        &self,
        at: &GpuArguments<'c>,
        own: &WarpRows<'c>,
        operands: &GradientOperands,
        factor: f64,
    ) -> impl Fn(&OtherRows<'c>) -> Vec<Value<'c>> {
        let (b, GradientOperands { q, k, v, dout, lse, delta }) = (self.b, *operands);
        let [queries, gradients] = [q, dout].map(|rows| self.starts(at, &rows, own));
        let number = |n: &IntValue<'c>, t: usize| b.load_splat(b.at(at.tensors[t], b.index_mul(*n, b.index(self.step(t)))), Lane::F32);
        let numbers: Vec<[Value; 2]> = own.numbers.iter().map(|n| [lse, delta].map(|t| number(n, t))).collect();
        move |others| {
            let scores = self.products(at, (&q, &queries), &k, others);
            let dp = self.products(at, (&dout, &gradients), &v, others);
            let rows = scores.into_iter().zip(dp).enumerate();
            rows.map(|(row, (s, dp))| self.slopes(&|x| self.scored(at, own, row, others, x), [s, dp], numbers[row], factor)[1]).collect()
        }
    }

    /// The gradient of a bias: a tile has some queries of one head of the bias and goes through the keys, for each
    /// run of which it sums over what the bias has no dim of.
    fn pairs<'s>(&'s self, operands: GradientOperands, bias: &'s Output) -> SimtTiles<'s, 'c> {
        let plan = self.plan;
        let [own_heads, summed] = plan.heads_of_bias(bias);
        let tensor = plan.kernel.inputs.len();
        let write = move |at: &GpuArguments<'c>, first| {
            let b = self.b;
            b.repeat(b.index(0), b.index(plan.keys), LANES as i64, &[], &mut |key, _| {
                let zeros = vec![b.f32(0.0); ROWS as usize];
                let sums = b.repeat(b.index(0), b.index(ir::fault!("gpu.lanes.bias.first", 1, plan.sizes(&summed))), 1, &zeros, &mut |one, sums| {
                    let at = at.at(b, plan, &summed, one);
                    let own = self.own(&at, ScoreSide::Queries, first, ROWS);
                    let others = self.others(&at, ScoreSide::Keys, key);
                    let add = || {
                        let slopes = self.slopes_of_queries(&at, &own, &operands, 1.0)(&others);
                        sums.iter().zip(slopes).map(|(sum, slope)| ir::fault!("gpu.lanes.bias.last", slope, b.add(*sum, slope))).collect()
                    };
                    match self.any_visible(&at, &own, &others) {
                        None => add(),
                        Some(any) => b.when(any, sums, add),
                    }
                });
                let (own, others) = (self.own(at, ScoreSide::Queries, first, ROWS), self.others(at, ScoreSide::Keys, key));
                let dtype = plan.kernel.body[bias.value].ty.dtype;
                let stride = plan.stride(tensor, plan.attention.keys);
                let stored = OutputRows { dtype, stride, size: HeadSize { d: LANES as i64, width: LANES as i64 }, accumulate: bias.accumulate };
                let bytes = pointwise::stored(dtype).bytes();
                self.store_rows(at, &own, tensor, &|row, place| {
                    let place = b.at(place, b.index_mul(key, b.index(bytes * stride)));
                    store_column(b, place, &Column { first: 0, mask: others.present }, stored, sums[row]);
                });
                vec![]
            });
        };
        SimtTiles { heads: own_heads, rows: ROWS, runs: div_ceil(plan.queries, ROWS), write: Box::new(write) }
    }

    fn keys<'s>(&'s self, operands: GradientOperands, outputs: [Vec<(usize, &'s Output)>; 2]) -> SimtTiles<'s, 'c> {
        let plan = self.plan;
        let rows = self.rows_of_tile(Self::columns(plan.d) + Self::columns(plan.values));
        let write = move |at: &GpuArguments<'c>, first| {
            let (b, GradientOperands { q, k, v, dout, lse, delta }) = (self.b, operands);
            let own = self.own(at, ScoreSide::Keys, first, rows);
            let [keys, values] = [k, v].map(|rows| self.starts(at, &rows, &own));
            let [first_half, second_half] = [plan.d, plan.values].map(|size| own.numbers.len() * Self::columns(size));
            let start = vec![b.f32(0.0); first_half + second_half];
            let sums = b.repeat(b.index(0), b.index(plan.sizes(&plan.group)), 1, &start, &mut |member, sums| {
                let at = at.at(b, plan, &plan.group, member);
                // Operands of keys may differ for each head of queries.
                let own = WarpRows { operand_values: self.own(&at, ScoreSide::Keys, first, rows).operand_values, ..own.clone() };
                self.for_visible_rows(&at, &own, sums, &mut |others, sums| {
                    let numbers = [lse, delta].map(|t| self.each(at.tensors[t], others.numbers, self.step(t), Lane::F32));
                    let scores = self.products(&at, (&k, &keys), &q, others);
                    let dp = self.products(&at, (&v, &values), &dout, others);
                    let rows = scores.into_iter().zip(dp).enumerate();
                    let (p, ds): (Vec<_>, Vec<_>) = rows
                        .map(|(row, (s, dp))| {
                            self.slopes(&|x| self.scored(&at, &own, row, others, x), [s, dp], numbers, plan.attention.scale.0).into()
                        })
                        .unzip();
                    let (dk, dv) = sums.split_at(first_half);
                    let dk = if outputs[0].is_empty() { dk.to_vec() } else { self.weigh(&at, &ds, &q, others, dk) };
                    let dv = if outputs[1].is_empty() { dv.to_vec() } else { self.weigh(&at, &p, &dout, others, dv) };
                    [dk, dv].concat()
                })
            });
            for (outputs, sums) in outputs.iter().zip(<[_; 2]>::from(sums.split_at(first_half))) {
                for output in outputs {
                    self.store_sums(at, &own, *output, sums);
                }
            }
        };
        SimtTiles { heads: plan.shared.clone(), rows, runs: div_ceil(plan.keys, rows), write: Box::new(write) }
    }
}
