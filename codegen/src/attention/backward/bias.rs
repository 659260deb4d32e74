//! The gradient of a bias: that of the changed scores, summed over what the bias has no dim of.
//!
//! A tile is a block of keys of one head of the bias with all queries. It goes through the sequences (and whatever
//! else the bias lacks) one after the other, so that no two tiles add to the same number; their scores are computed
//! a third time.

use super::*;
use ir::kernel::Output;

impl<'c> Backward<'_, 'c> {
    /// Writes the kernel `name` and reports what it needs.
    pub(super) fn of_bias(&self, functions: &BackwardFunctions<'c>, bias: &Output, name: &str) -> Shape {
        let (b, plan) = (self.b, self.plan);
        let [own, summed] = plan.heads_of_bias(bias);
        let entry = b.kernel(name);
        let arguments = Arguments::new(plan.kernel, &entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
        let blocks = b.index(plan.key_blocks());
        b.for_each(entry.first_tile, entry.end_tile, 1, &mut |tile| {
            let (head, block) = (b.index_div(tile, blocks), b.index_rem(tile, blocks));
            let head = arguments.at(b, plan, &own, head);
            self.clear(&head, self.scratch.pairs, plan.query_blocks() * plan.query_block * plan.key_block);
            b.for_each(b.index(0), b.index(ir::fault!("attention.bias.first", 1, plan.sizes(&summed))), 1, &mut |one| {
                let at = head.at(b, plan, &summed, one);
                self.measure_queries(functions, &at);
                self.copy_queries(functions, &at);
                self.keys(functions, &at, block);
            });
            self.store_pairs(&head, bias, span(b, block, plan.key_block, plan.keys));
        });
        b.finish_function();
        let tiles = plan.sizes(&own) * plan.key_blocks();
        Shape { tiles: tiles as u64, line: 1, scratch_bytes: self.scratch.bytes as u64 }
    }

    /// Address of the sums of a query's pairs.
    fn pairs(&self, at: &Arguments<Pointer<'c>>, query: Index<'c>) -> Pointer<'c> {
        let b = self.b;
        b.at(b.at_const(at.scratch, self.scratch.pairs), b.index_mul(query, b.index(4 * self.plan.key_block)))
    }

    /// Adds a block of gradients of scores to the sums.
    pub(super) fn add_pairs(&self, at: &Arguments<Pointer<'c>>, ds: Pointer<'c>, queries: Span<'c>) {
        let (b, block) = (self.b, self.plan.key_block);
        b.for_each(b.index(0), queries.count, 1, &mut |row| {
            let from = b.at(ds, b.index_mul(row, b.index(4 * block)));
            let sums = self.pairs(at, b.index_add(queries.first, row));
            for first in (0..block).step_by(b.lanes()) {
                let [from, sum] = [from, sums].map(|start| b.at_const(start, 4 * first));
                let [value, before] = [from, sum].map(|place| b.load(place, Lane::F32, None));
                b.store(sum, ir::fault!("attention.bias.last", value, b.add(before, value)), Lane::F32, None);
            }
        });
    }

    fn store_pairs(&self, at: &Arguments<Pointer<'c>>, bias: &Output, keys: Span<'c>) {
        let (b, plan) = (self.b, self.plan);
        let tensor = plan.kernel.inputs.len();
        let dtype = plan.kernel.body[bias.value].ty.dtype;
        let [row, stride] = [plan.attention.at, plan.attention.keys].map(|d| plan.stride(tensor, d));
        let bytes = pointwise::stored(dtype).bytes();
        let size = HeadSize { d: plan.key_block, width: plan.key_block };
        let stored = OutputRows { dtype, stride, size, accumulate: bias.accumulate };
        let start = b.at(at.tensors[tensor], b.index_mul(keys.first, b.index(bytes * stride)));
        b.for_each(b.index(0), b.index(plan.queries), 1, &mut |query| {
            let to = b.at(start, b.index_mul(query, b.index(bytes * row)));
            for first in (0..plan.key_block).step_by(b.lanes()) {
                let mask = (plan.keys % plan.key_block != 0).then(|| b.mask_below(b.index_sub(keys.count, b.index(first))));
                let sums = self.pairs(at, ir::fault!("attention.bias.query", b.index(0), query));
                let value = b.load(b.at_const(sums, 4 * first), Lane::F32, None);
                store_column(b, to, &Column { first, mask }, stored, value);
            }
        });
    }
}
