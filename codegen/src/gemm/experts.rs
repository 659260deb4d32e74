//! Products whose rows, or contracted elements, are of experts: which ones each expert has is read at run time.
//!
//! The tiles are those of all rows, whoever owns them. A tile of rows goes through the experts that own some of them
//! and cuts these into panels of their own; so micro-kernels are made for every height. Work is that of owned rows,
//! rows of nobody are filled with what follows a sum of 0.

use super::copies::{Copies, ScratchCell};
use super::prefetch::Range;
use super::product::Experts;
use super::tile::{Pass, RowPanels, TileBuilder, TileProduct};
use crate::build::llvm::{Index, Pointer};
use crate::build::{Builder, Lane};

impl<'c> TileBuilder<'_, 'c> {
    fn experts(&self) -> &Experts {
        self.g.plan.experts.as_ref().expect("invariant: asked for plans with experts")
    }

    /// What `expert` owns of `size`: from the end before its own, at `end`, to that.
    fn owned(&self, end: Pointer<'c>, expert: Index<'c>, size: i64) -> Range<'c> {
        let (b, experts) = (self.g.b, self.experts());
        let is_first = b.index_equal(expert, b.index(0));
        let back = b.index_select(is_first, b.index(0), b.index(-4 * experts.axis.strides[experts.ends]));
        let read = |at: Pointer<'c>| b.index_min(b.load_integer(at, Lane::I32), b.index(size));
        let from = b.index_select(is_first, b.index(0), read(b.at(end, back)));
        Range { from, to: b.index_max(from, read(end)) }
    }

    /// The rows `tile`: those of every expert with its `B`, then those of nobody. Copies of one `B` for equal
    /// `copies` are the same.
    pub fn rows_of_experts(
        &self,
        tile: Range<'c>,
        columns: Range<'c>,
        outer: Index<'c>,
        starts: &[Pointer<'c>],
        copies: Index<'c>,
        next: Copies<'c>,
    ) {
        let (b, plan, experts) = (self.g.b, self.g.plan, self.experts());
        let ends = starts[experts.ends];
        let count = b.index(experts.axis.size);
        let end_of = |expert: Index<'c>| b.at(ends, b.index_mul(expert, b.index(4 * experts.axis.strides[experts.ends])));
        b.for_each(b.index(0), count, 1, &mut |expert| {
            let own = self.owned(end_of(expert), expert, plan.m.size);
            let (from, to) = (b.index_max(own.from, tile.from), b.index_min(own.to, tile.to));
            let some = || {
                let mut starts = starts.to_vec();
                let factor = b.index_mul(expert, b.index(self.bytes(plan.b) * experts.axis.strides[plan.b]));
                starts[plan.b] = b.at(starts[plan.b], factor);
                let copy = ir::fault!("gemm.experts.copy", copies, b.index_add(b.index_mul(copies, count), expert));
                let renew = b.index_unequal(self.get(ScratchCell::Copy), copy);
                self.set(ScratchCell::Copy, copy);
                self.passes(&TileProduct { rows: self.panels(from, to), columns, outer, starts: &starts }, renew, next);
            };
            b.branch(b.index_less(from, to), some, || ());
        });
        let last = b.index(experts.axis.size - 1);
        let from = b.index_max(ir::fault!("gemm.experts.nobody", b.index(plan.m.size), self.owned(end_of(last), last, plan.m.size).to), tile.from);
        b.branch(
            b.index_less(from, tile.to),
            || self.nothing(&TileProduct { rows: self.panels(from, tile.to), columns, outer, starts }, next),
            || (),
        );
    }

    /// Rows `from..to`, at least one, in panels.
    fn panels(&self, from: Index<'c>, to: Index<'c>) -> RowPanels<'c> {
        let (b, most) = (self.g.b, self.g.plan.blocks.height);
        let rows = b.index_sub(to, from);
        let panels = b.index_div(b.index_add(rows, b.index(most - 1)), b.index(most));
        let panels_of = Range { from: b.index(0), to: panels };
        RowPanels { base: from, panels: panels_of, height: b.index_div(rows, panels), tall: b.index_rem(rows, panels) }
    }

    /// A tile of sums of 0.
    fn nothing(&self, part: &TileProduct<'_, 'c>, next: Copies<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let always = b.index_equal(b.index(0), b.index(0));
        let (a, factor) = (part.starts[plan.a], part.starts[plan.b]);
        self.products(part, &Pass { a, b: factor, depth: b.index(0), first: always, last: always, renew: None, next });
    }

    /// A tile of the sum over what one expert owns of the contracted elements, in every repetition of these.
    pub fn elements_of_expert(&self, part: &TileProduct<'_, 'c>, next: Copies<'c>) {
        let (b, plan, experts) = (self.g.b, self.g.plan, self.experts());
        let depth = plan.blocks.depth;
        let expert = b.index_div(part.outer, b.index(plan.outer[1..].iter().map(|x| x.size).product()));
        let repeats = b.index(plan.outer_k.iter().map(|x| x.size).product());
        let owned = |repeat: Index<'c>| {
            let end = self.shifted(part.starts[experts.ends], repeat, &plan.outer_k, experts.ends);
            let own = self.owned(end, expert, plan.k.size);
            (own, b.index_div(b.index_add(b.index_sub(own.to, own.from), b.index(ir::fault!("gemm.experts.blocks", 0, depth - 1))), b.index(depth)))
        };
        // The blocks are counted first, so that the last one is known.
        self.set(ScratchCell::Passes, b.index(0));
        self.set(ScratchCell::Done, b.index(0));
        b.for_each(b.index(0), repeats, 1, &mut |repeat| self.set(ScratchCell::Passes, b.index_add(self.get(ScratchCell::Passes), owned(repeat).1)));
        let some = || {
            b.for_each(b.index(0), repeats, 1, &mut |repeat| {
                let (own, blocks) = owned(repeat);
                b.for_each(b.index(0), blocks, 1, &mut |block| {
                    let k = b.index_add(own.from, b.index_mul(block, b.index(depth)));
                    let (number, passes) = (self.get(ScratchCell::Done), self.get(ScratchCell::Passes));
                    let after = b.index_add(number, b.index(1));
                    self.set(ScratchCell::Done, after);
                    let [a, factor] = self.factors(part.starts, repeat, k);
                    let depth = b.index_min(b.index(depth), b.index_sub(ir::fault!("gemm.experts.end", b.index(plan.k.size), own.to), k));
                    let (first, last) = (b.index_equal(number, b.index(0)), b.index_equal(after, passes));
                    self.pass(part, &Pass { a, b: factor, depth, first, last, renew: None, next });
                });
            });
        };
        b.branch(b.index_equal(self.get(ScratchCell::Passes), b.index(0)), || self.nothing(part, next), some);
    }
}

#[cfg(test)]
mod tests;
