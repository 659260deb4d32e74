//! Which blocks of the factors are copied when, and where to. A factor whose next block products copy
//! ([`super::prefetch`]) has room for two: one is used while the other is filled.

use super::plan::Kept;
use super::prefetch::{FactorBlock, Next, Share};
use super::tile::{Pass, TileBuilder, TileRun};
use crate::build::Builder;
use crate::build::llvm::{Index, Pointer};

/// The next block of each factor.
pub type Copies<'c> = [FactorBlock<'c>; 2];

/// What the tiles of a range remember, in 64-bit cells of the scratch.
#[derive(Clone, Copy)]
pub enum Cell {
    /// Which expert's copy of `B` there is.
    Copy,
    /// Blocks of contracted elements of a tile: of all, and of those done.
    Passes,
    Done,
    /// Of each factor: how far into its room the copy in use begins, and whether the next is made.
    PlaceA,
    PlaceB,
    MadeA,
    MadeB,
}

const PLACE: [Cell; 2] = [Cell::PlaceA, Cell::PlaceB];
const MADE: [Cell; 2] = [Cell::MadeA, Cell::MadeB];

impl<'c> TileBuilder<'_, 'c> {
    /// Before the first tile of a range: there is no copy yet.
    pub fn begin(&self) {
        let b = self.g.b;
        if self.g.plan.experts.is_some() {
            self.set(Cell::Copy, b.index(-1));
        }
        for factor in [Kept::A, Kept::B].into_iter().filter(|f| self.is_made_ahead(*f)) {
            self.set(PLACE[factor as usize], b.index(0));
            self.set(MADE[factor as usize], b.index(0));
        }
    }

    fn cell(&self, cell: Cell) -> Pointer<'c> {
        self.g.b.at_const(self.area, self.scratch.cells + 8 * cell as i64)
    }

    pub fn set(&self, cell: Cell, value: Index<'c>) {
        self.g.b.store_index(self.cell(cell), value);
    }

    pub fn get(&self, cell: Cell) -> Index<'c> {
        self.g.b.load_index(self.cell(cell))
    }

    fn is_made_ahead(&self, factor: Kept) -> bool {
        self.g.next[factor as usize].as_ref().is_some_and(Next::is_copied)
    }

    /// The copy of a factor in use.
    pub fn current(&self, factor: Kept) -> Pointer<'c> {
        let (b, room) = (self.g.b, &self.scratch.packed[factor as usize]);
        let start = b.at_const(self.area, room.start);
        if self.is_made_ahead(factor) { b.at(start, self.get(PLACE[factor as usize])) } else { start }
    }

    /// How far into its room the other copy of a factor begins.
    fn other(&self, factor: Kept) -> Index<'c> {
        let b = self.g.b;
        b.index_sub(b.index(self.scratch.packed[factor as usize].bytes), self.get(PLACE[factor as usize]))
    }

    /// Makes the copy that this pass needs, with `copy` to where it is to be, unless the tile before left the same, or the products before made it.
    pub fn renew(&self, factor: Kept, pass: &Pass<'c>, copy: impl FnOnce(Pointer<'c>)) {
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

    /// Before the products of a pass, of so many micro-kernels: how they share the next block of a factor.
    pub fn begin_next(&self, factor: Kept, block: FactorBlock<'c>, micros: Index<'c>) -> Option<Share<'c>> {
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

    /// What is copied first after the tiles `tile_run` of `line`; the range's tiles end before `until`, those of this
    /// line before its number `to`. It may be of more tiles than then come together. Where experts own anything it is
    /// not known.
    pub fn after(&self, line: Index<'c>, tile_run: &TileRun<'c>, to: Index<'c>, until: Index<'c>) -> Copies<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let (fast, [all_rows, all_columns]) = (plan.line(), plan.divisions());
        let same = b.index_less(tile_run.end, to);
        let line = b.index_select(same, line, b.index_add(line, b.index(1)));
        let tile = b.index_select(same, tile_run.end, b.index(0));
        let flag = |condition| b.index_select(condition, b.index(1), b.index(0));
        let some = if plan.experts.is_none() { flag(b.index_less(b.index_mul(line, b.index(fast)), until)) } else { b.index(0) };
        // Copies that are kept serve a line.
        let kept = if plan.passes() == Some(1) { ir::fault!("gemm.next.kept", some, b.index_select(same, b.index(0), some)) } else { some };
        let wanted = match plan.kept() {
            Kept::A => [kept, some],
            Kept::B => [some, kept],
        };
        let to = b.index_min(b.index_sub(until, b.index_mul(line, b.index(fast))), b.index(fast));
        let tile_run = self.tile_run(line, tile, to);
        let rows = self.share(tile_run.rows, all_rows, blocks.panels);
        let columns = self.share(tile_run.columns, all_columns, blocks.column_panels);
        let [a, factor] = self.factors(&self.starts(tile_run.outer), b.index(0), b.index(0));
        let row = plan.panels(Kept::A as usize).start(b, rows.from);
        let block = |start, panels, wanted| FactorBlock { start, panels, depth: b.index(blocks.depth.min(plan.k.size)), wanted };
        [block(self.row_at(a, row), rows, wanted[0]), block(self.column_at(factor, columns.from), columns, wanted[1])]
    }
}
