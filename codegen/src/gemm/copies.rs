//! Which blocks of the factors are copied when, and where to. A factor whose next block products copy
//! ([`super::prefetch`]) has memory for two: one is used while the other is filled.

use super::plan::KeptFactor;
use super::prefetch::{BlockPrefetch, FactorBlock, PassShare};
use super::tile::{Pass, TileBuilder, TileRun};
use crate::build::Builder;
use crate::build::llvm::{Index, Pointer};

/// The next block of each factor.
pub type Copies<'c> = [FactorBlock<'c>; 2];

/// What the tiles of a range remember, in 64-bit cells of the scratch.
#[derive(Clone, Copy)]
pub enum ScratchCell {
    /// The expert whose copy of `B` there is.
    Copy,
    /// Blocks of contracted elements of a tile: their number, and how many are done.
    Passes,
    Done,
    /// For each factor, the offset of the copy in use, and whether the next one is complete.
    PlaceA,
    PlaceB,
    MadeA,
    MadeB,
}

const PLACE: [ScratchCell; 2] = [ScratchCell::PlaceA, ScratchCell::PlaceB];
const MADE: [ScratchCell; 2] = [ScratchCell::MadeA, ScratchCell::MadeB];

impl<'c> TileBuilder<'_, 'c> {
    /// Before the first tile of a range: there is no copy yet.
    pub fn begin(&self) {
        let b = self.g.b;
        if self.g.plan.experts.is_some() {
            self.set(ScratchCell::Copy, b.index(-1));
        }
        for factor in [KeptFactor::A, KeptFactor::B].into_iter().filter(|f| self.is_made_ahead(*f)) {
            self.set(PLACE[factor as usize], b.index(0));
            self.set(MADE[factor as usize], b.index(0));
        }
    }

    fn cell(&self, cell: ScratchCell) -> Pointer<'c> {
        self.g.b.at_const(self.area, self.scratch.cells + 8 * cell as i64)
    }

    pub fn set(&self, cell: ScratchCell, value: Index<'c>) {
        self.g.b.store_index(self.cell(cell), value);
    }

    pub fn get(&self, cell: ScratchCell) -> Index<'c> {
        self.g.b.load_index(self.cell(cell))
    }

    fn is_made_ahead(&self, factor: KeptFactor) -> bool {
        self.g.next[factor as usize].as_ref().is_some_and(BlockPrefetch::is_copied)
    }

    /// The copy of a factor in use.
    pub fn current(&self, factor: KeptFactor) -> Pointer<'c> {
        let (b, buffer) = (self.g.b, &self.scratch.packed[factor as usize]);
        let start = b.at_const(self.area, buffer.start);
        if self.is_made_ahead(factor) { b.at(start, self.get(PLACE[factor as usize])) } else { start }
    }

    /// Offset of the other copy of a factor.
    fn other(&self, factor: KeptFactor) -> Index<'c> {
        let b = self.g.b;
        b.index_sub(b.index(self.scratch.packed[factor as usize].bytes), self.get(PLACE[factor as usize]))
    }

    /// Makes the copy that this pass needs by `copy(to)`, unless the previous tile left it or the previous products
    /// made it.
    pub fn renew(&self, factor: KeptFactor, pass: &Pass<'c>, copy: impl FnOnce(Pointer<'c>)) {
        let b = self.g.b;
        let make = || {
            if !self.is_made_ahead(factor) {
                return copy(self.current(factor));
            }
            let is_made = b.index_equal(self.get(MADE[factor as usize]), b.index(1));
            b.branch(is_made, || self.set(PLACE[factor as usize], self.other(factor)), || copy(self.current(factor)));
        };
        match pass.renew {
            Some(renew) if factor == self.g.plan.kept() => b.branch(renew, make, || ()),
            Some(_) | None => make(),
        }
    }

    /// Divides the next block of a factor among the `micros` micro-kernels of a pass, before its products.
    pub fn begin_next(&self, factor: KeptFactor, block: FactorBlock<'c>, micros: Index<'c>) -> Option<PassShare<'c>> {
        let b = self.g.b;
        let next = self.g.next[factor as usize].as_ref()?;
        if !next.is_copied() {
            return Some(next.share(b, block, self.area, micros));
        }
        let to = b.at(b.at_const(self.area, self.scratch.packed[factor as usize].start), self.other(factor));
        let share = next.share(b, block, to, micros);
        self.set(MADE[factor as usize], ir::fault!("gemm.next.made", b.index(1), share.complete));
        Some(share)
    }

    /// The blocks that are copied first after the tiles `tile_run` of `line`. Tiles of the range end before `until`,
    /// those of this line before `to`. The blocks may serve more tiles than are then computed together. With experts
    /// they are not known.
    pub fn after(&self, line: Index<'c>, tile_run: &TileRun<'c>, to: Index<'c>, until: Index<'c>) -> Copies<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let (fast, [all_rows, all_columns]) = (plan.line(), plan.divisions());
        let same = b.index_less(tile_run.end, to);
        let line = b.index_select(same, line, b.index_add(line, b.index(1)));
        let tile = b.index_select(same, tile_run.end, b.index(0));
        let flag = |condition| b.index_select(condition, b.index(1), b.index(0));
        let some = if plan.experts.is_none() { flag(b.index_less(b.index_mul(line, b.index(fast)), until)) } else { b.index(0) };
        // A kept copy serves all tiles of a line.
        let kept = if plan.passes() == Some(1) { ir::fault!("gemm.next.kept", some, b.index_select(same, b.index(0), some)) } else { some };
        let wanted = match plan.kept() {
            KeptFactor::A => [kept, some],
            KeptFactor::B => [some, kept],
        };
        let to = b.index_min(b.index_sub(until, b.index_mul(line, b.index(fast))), b.index(fast));
        let tile_run = self.tile_run(line, tile, to);
        let rows = self.share(tile_run.rows, all_rows, blocks.panels);
        let columns = self.share(tile_run.columns, all_columns, blocks.column_panels);
        let [a, factor] = self.factors(&self.starts(tile_run.outer), b.index(0), b.index(0));
        let row = plan.panels(KeptFactor::A as usize).start(b, rows.from);
        let block = |start, panels, wanted| FactorBlock { start, panels, depth: b.index(blocks.depth.min(plan.k.size)), wanted };
        [block(self.row_at(a, row), rows, wanted[0]), block(self.column_at(factor, columns.from), columns, wanted[1])]
    }
}
