//! The gradient of a bias: that of the changed scores, summed over what the bias has no dim of.
//!
//! A tile is a run of queries and one of keys, of one head of the bias. It goes through the sequences (and whatever
//! else the bias lacks) one after the other, with the sums in registers; their scores are computed a third time.

use super::*;

impl<'c> MmaAttention<'_, 'c> {
    pub(super) fn pairs<'s>(&'s self, operands: GradientOperands, bias: &'s Output) -> MmaTiles<'s, 'c> {
        let plan = self.plan;
        let [heads, summed] = plan.heads_of_bias(bias);
        let sizes = TileSizes { warps: WARPS, tall: 1, others: 64 };
        let blocks = div_ceil(plan.keys, sizes.others);
        // Shared memory holds queries, keys, output gradients and values, in this order.
        let [of_d, of_values] = [plan.d, plan.values].map(|size| sizes.own().max(sizes.others) * Self::row_bytes(size));
        let offsets = [0, of_d, 2 * of_d, 2 * of_d + of_values];
        let write = move |at: &GpuArguments<'c>, run: Index<'c>| {
            let b = self.b;
            let block = b.index_rem(run, b.index(blocks));
            let first = b.index_mul(b.index_div(run, b.index(blocks)), b.index(sizes.own()));
            let own = RowTile { side: ScoreSide::Queries, sizes, first };
            let block = self.block_of(ScoreSide::Queries, sizes, b.narrow(block));
            let zeros = vec![b.f32(0.0); (sizes.of_warp() * sizes.others / LANES as i64) as usize];
            let sums =
                b.loop_over([b.word(0), b.word(ir::fault!("gpu.mma.bias.first", 1, plan.sizes(&summed))), b.word(1)], &zeros, &mut |one, sums| {
                    b.asm(Instruction::LeaveRolled, &[]);
                    let at = at.at(b, plan, &summed, b.widen(one));
                    match self.any_seen(&at, &own, &block) {
                        None => self.add_pairs(&at, &own, &block, &operands, offsets, sums),
                        Some(any) => b.when(any, sums, || self.add_pairs(&at, &own, &block, &operands, offsets, sums)),
                    }
                });
            self.store_pairs(at, &own, &block, bias, &sums);
        };
        let runs = div_ceil(plan.queries, sizes.own()) * blocks;
        MmaTiles { order: TileOrder::by_head(plan.sizes(&heads), runs), heads, shared_bytes: 2 * (of_d + of_values), write: Box::new(write) }
    }

    /// Adds the gradients of a block's changed scores to its sums.
    fn add_pairs(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        operands: &GradientOperands,
        offsets: [i64; 4],
        sums: &[Value<'c>],
    ) -> Vec<Value<'c>> {
        let (b, plan, sizes) = (self.b, self.plan, own.sizes);
        let GradientOperands { q, k, v, dout, lse, delta } = *operands;
        let key = b.widen(self.scaled(block.index, sizes.others));
        let [queries, keys, gradients, values] = offsets.map(|offset| self.plus(b.shared(), offset));
        // All warps must have read the previous copies before new ones replace them.
        b.barrier();
        self.copy_rows(at, &q, own.first, sizes.own(), queries);
        self.copy_rows(at, &k, key, sizes.others, keys);
        self.copy_rows(at, &dout, own.first, sizes.own(), gradients);
        self.copy_rows(at, &v, key, sizes.others, values);
        b.asm(Instruction::CommitCopies, &[]);
        b.asm(Instruction::WaitCopies { left: ir::fault!("gpu.mma.bias.early", 1, 0) }, &[]);
        b.barrier();
        let numbers = self.exponents_of_rows(at, own, [lse, delta]);
        let (scores, _) = self.changed(at, own, block, &self.products(sizes, plan.d, queries, keys));
        let p = self.probabilities(at, own, block, &scores, &numbers);
        let (_, slopes) = self.weighted(at, own, block, &p, self.products(sizes, plan.values, gradients, values), &numbers);
        sums.iter().zip(slopes).map(|(sum, slope)| ir::fault!("gpu.mma.bias.last", slope, b.add(*sum, slope))).collect()
    }

    /// Stores the sums element by element, as the bias may have any layout.
    fn store_pairs(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, block: &VisibleBlock<'c>, bias: &Output, sums: &[Value<'c>]) {
        let (b, plan) = (self.b, self.plan);
        let tensor = plan.kernel.inputs.len();
        let dtype = plan.kernel.body[bias.value].ty.dtype;
        let lane = pointwise::stored(dtype);
        let step = lane.bytes() * plan.stride(tensor, plan.attention.keys);
        self.each_row(at, own, tensor, &|k, start| {
            for n in 0..own.sizes.others / COLUMNS {
                for e in 0..2 {
                    let key = b.index_add(self.scaled(block.index, own.sizes.others), self.plus(self.column(n), e));
                    let place = b.at(start, b.index_mul(b.widen(key), b.index(step)));
                    let value = pointwise::rounded(b, dtype, sums[block_mask::place(own.sizes, n, e, k as i64)]);
                    let store = || {
                        let sum = if bias.accumulate { accumulated(b, dtype, b.load_splat(place, lane), value) } else { value };
                        b.store_each(place, sum, lane);
                    };
                    match self.present(own, key) {
                        None => store(),
                        Some(present) => b.if_so(present.into_int_value(), store),
                    }
                }
            }
        });
    }
}
