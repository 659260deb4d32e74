//! One tile: what is copied when, and which micro-kernel runs where.

use super::context::Gemm;
use super::copies::Copies;
use super::micro::{PassPosition, Variant};
use super::plan::{KeptFactor, PanelSizes};
use super::prefetch::{self, FactorBlock, MicroTile, Range};
use super::product::ExpertDim;
use super::{GemmFunctions, GemmScratch};
use crate::build::Builder;
use crate::build::llvm::{Index, Pointer};
use crate::layout::Axis;
use inkwell::values::{FunctionValue, IntValue};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// One tile under construction.
pub struct TileBuilder<'a, 'c> {
    pub g: &'a Gemm<'a, 'c>,
    pub functions: &'a GemmFunctions<'c>,
    pub scratch: &'a GemmScratch,
    pub tensors: &'a [Pointer<'c>],
    pub scalars: Pointer<'c>,
    pub area: Pointer<'c>,
}

/// Tiles `first..end`, and the range that they are part of (see [`crate::abi`]).
pub struct TileCall<'c> {
    pub first: Index<'c>,
    pub end: Index<'c>,
    pub begin: Index<'c>,
    pub until: Index<'c>,
}

/// Rows in panels `from..to`. Panel 0 begins at row `base`; the `tall` first ones have `height` + 1 rows, the others
/// `height`.
#[derive(Clone, Copy)]
pub struct RowPanels<'c> {
    pub base: Index<'c>,
    pub panels: Range<'c>,
    pub height: Index<'c>,
    pub tall: Index<'c>,
}

/// What a tile computes: its rows and columns, in which repetition of the product, and the first element of every
/// tensor there.
pub struct TileProduct<'a, 'c> {
    pub rows: RowPanels<'c>,
    pub columns: Range<'c>,
    pub outer: Index<'c>,
    pub starts: &'a [Pointer<'c>],
}

/// Tiles of a line that are computed together: their rows and columns, the repetition of the product, and the number
/// in the line after them.
pub struct TileRun<'c> {
    pub rows: Range<'c>,
    pub columns: Range<'c>,
    pub outer: Index<'c>,
    pub end: Index<'c>,
}

/// One block of contracted elements of a tile.
pub struct Pass<'c> {
    /// The factors at the block's first contracted element.
    pub a: Pointer<'c>,
    pub b: Pointer<'c>,
    pub depth: Index<'c>,
    /// Whether it is the first, or the last one, of its part of the tile.
    pub first: IntValue<'c>,
    pub last: IntValue<'c>,
    /// Whether the kept copy must be made anew; absent if it always must.
    pub renew: Option<IntValue<'c>>,
    /// What is copied next.
    pub next: Copies<'c>,
}

impl<'c> TileBuilder<'_, 'c> {
    /// The tiles of a call. Their numbers count the blocks of the factor that is not kept fastest, then those of the
    /// other, then repetitions. Tiles of rows that follow one another are computed together, so that fewer copies of
    /// `B` are made the more tiles a call has.
    pub fn emit(&self, call: &TileCall<'c>) {
        let (b, fast) = (self.g.b, self.g.plan.line());
        let lines = b.index_div(b.index_add(call.end, b.index(fast - 1)), b.index(fast));
        b.for_each(b.index_div(call.first, b.index(fast)), lines, 1, &mut |line| {
            let start = b.index_mul(line, b.index(fast));
            let within = |tile| b.index_min(b.index_sub(tile, start), b.index(fast));
            let from_of = |tile| b.index_sub(b.index_max(tile, start), start);
            let to = within(call.end);
            b.for_each(from_of(call.first), to, self.g.plan.together(), &mut |tile| {
                let tile_run = self.tile_run(line, tile, to);
                let next = self.after(line, &tile_run, within(call.until), call.until);
                self.tiles(&tile_run, line, b.index_equal(tile, ir::fault!("gemm.line.begin", within(call.begin), from_of(call.begin))), next);
            });
        });
    }

    /// Tiles of a line from number `tile` on that are computed together, of which the last is before `to`.
    pub fn tile_run(&self, line: Index<'c>, tile: Index<'c>, to: Index<'c>) -> TileRun<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        let [rows, columns] = plan.divisions();
        let slow = if plan.kept() == KeptFactor::A { rows } else { columns };
        let (slow_tile, outer) = (b.index_rem(line, b.index(slow)), b.index_div(line, b.index(slow)));
        let fast_tiles = Range { from: tile, to: b.index_min(b.index_add(tile, b.index(plan.together())), to) };
        let slow_tiles = Range { from: slow_tile, to: b.index_add(slow_tile, b.index(1)) };
        let (rows, columns) = match plan.kept() {
            KeptFactor::A => (slow_tiles, fast_tiles),
            KeptFactor::B => (fast_tiles, slow_tiles),
        };
        TileRun { rows, columns, outer, end: fast_tiles.to }
    }

    /// The first factor, from `a`, at a row.
    pub fn row_at(&self, a: Pointer<'c>, row: Index<'c>) -> Pointer<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        b.at(a, b.index_mul(row, b.index(self.bytes(plan.a) * plan.m.strides[plan.a])))
    }

    /// The second factor, from `factor`, at the first column of a panel.
    pub fn column_at(&self, factor: Pointer<'c>, panel: Index<'c>) -> Pointer<'c> {
        let (b, plan) = (self.g.b, self.g.plan);
        b.at(factor, b.index_mul(panel, b.index(self.bytes(plan.b) * plan.blocks.width * plan.n.strides[plan.b])))
    }

    /// Computes the tiles of a run. Runs of the same `line` share the kept factor's copy; `renew` says whether this
    /// one is the first.
    fn tiles(&self, tile_run: &TileRun<'c>, line: Index<'c>, renew: IntValue<'c>, next: Copies<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let (rows, outer) = (tile_run.rows, tile_run.outer);
        let [all_rows, all_columns] = plan.divisions();
        let columns = self.share(tile_run.columns, all_columns, blocks.column_panels);
        let starts = self.starts(outer);
        if plan.owns(ExpertDim::Rows) {
            let panels = self.share(rows, all_rows, blocks.panels);
            let row = |panel| b.index_min(b.index_mul(panel, b.index(blocks.height)), b.index(plan.m.size));
            let rows = Range { from: row(panels.from), to: row(panels.to) };
            return self.rows_of_experts(rows, columns, outer, &starts, line, next);
        }
        let panels = self.share(rows, all_rows, blocks.panels);
        let rows = RowPanels { base: b.index(0), panels, height: b.index(blocks.height), tall: b.index(blocks.tall) };
        let part = TileProduct { rows, columns, outer, starts: &starts };
        if plan.owns(ExpertDim::Contracted) {
            return self.elements_of_expert(&part, next);
        }
        self.passes(&part, renew, next);
    }

    /// The share of `0..end`, divided into `parts`, that the parts `numbers` have.
    pub fn share(&self, numbers: Range<'c>, parts: i64, end: i64) -> Range<'c> {
        let b = self.g.b;
        let border = |number: Index<'c>| b.index_div(b.index_mul(number, b.index(end)), b.index(parts));
        Range { from: border(numbers.from), to: border(numbers.to) }
    }

    /// Computes all blocks of contracted elements. `renew` says whether the kept copy changes, `next` what is copied
    /// after them.
    pub fn passes(&self, part: &TileProduct<'_, 'c>, renew: IntValue<'c>, next: Copies<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let passes = blocks.depths * plan.outer_k.iter().map(|x| x.size).product::<i64>();
        b.for_each(b.index(0), b.index(passes), 1, &mut |number| {
            let k_of = |number| b.index_mul(b.index_rem(number, b.index(blocks.depths)), b.index(blocks.depth));
            let depth_of = |number| {
                b.index_min(b.index(blocks.depth), b.index_sub(b.index(ir::fault!("gemm.passes.end", plan.k.size - 1, plan.k.size)), k_of(number)))
            };
            let block_of = |number| self.factors(part.starts, b.index_div(number, b.index(blocks.depths)), k_of(number));
            let [a, factor] = block_of(number);
            // With several passes, the copies change within the tile.
            let renew = if ir::fault!("gemm.passes.renew", true, passes == 1) { Some(renew) } else { None };
            let (first, last) = (b.index_equal(number, b.index(0)), b.index_equal(number, b.index(passes - 1)));
            let next = if passes == 1 {
                next
            } else {
                let following = b.index_add(number, b.index(1));
                let [a, factor] = block_of(following);
                let row = self.first_row(part.rows, part.rows.panels.from);
                let starts = [(self.row_at(a, row), part.rows.panels), (self.column_at(factor, part.columns.from), part.columns)];
                let own = starts.map(|(start, panels)| FactorBlock { start, panels, depth: depth_of(following), wanted: b.index(1) });
                [0, 1].map(|f| next[f].unless(b, last, own[f]))
            };
            let depth = depth_of(number);
            self.pass(part, &Pass { a, b: factor, depth, first, last, renew, next });
        });
    }

    /// The factors at contracted element `k` of the repetition `repeat` of `k`.
    pub fn factors(&self, starts: &[Pointer<'c>], repeat: Index<'c>, k: Index<'c>) -> [Pointer<'c>; 2] {
        let (b, plan) = (self.g.b, self.g.plan);
        [plan.a, plan.b].map(|tensor| {
            let bytes = self.bytes(tensor);
            let along_k = b.index_mul(k, b.index(bytes * plan.k.strides[tensor]));
            b.at(self.shifted(starts[tensor], repeat, &plan.outer_k, tensor), along_k)
        })
    }

    /// `start` moved to the repetition `number` of `axes`, whose last is the fastest.
    pub fn shifted(&self, start: Pointer<'c>, number: Index<'c>, axes: &[Axis], tensor: usize) -> Pointer<'c> {
        let (b, bytes) = (self.g.b, self.bytes(tensor));
        let (mut place, mut rest) = (start, number);
        for axis in axes.iter().rev() {
            let digit = b.index_rem(rest, b.index(axis.size));
            rest = ir::fault!("gemm.outer.digit", rest, b.index_div(rest, b.index(axis.size)));
            place = b.at(place, b.index_mul(digit, b.index(bytes * axis.strides[tensor])));
        }
        place
    }

    /// The first element of every tensor in this repetition of the product.
    pub fn starts(&self, outer: Index<'c>) -> Vec<Pointer<'c>> {
        (0..self.tensors.len()).map(|t| self.shifted(self.tensors[t], outer, &self.g.plan.outer, t)).collect()
    }

    pub fn bytes(&self, tensor: usize) -> i64 {
        self.g.bytes(tensor)
    }

    /// One block of contracted elements.
    pub fn pass(&self, part: &TileProduct<'_, 'c>, pass: &Pass<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        if blocks.pack_b {
            self.renew(KeptFactor::B, pass, |copy| {
                let place = |panel| [self.column_start(pass, panel), self.packed_column(copy, part.columns, panel)];
                self.copy(&self.functions.pack_b, part.columns, plan.panels(KeptFactor::B as usize), pass.depth, &place);
            });
        }
        if blocks.pack_a {
            self.renew(KeptFactor::A, pass, |copy| {
                let rows = part.rows;
                let place = |panel| [self.row_start(pass, rows, panel), self.packed_row(copy, rows, panel)];
                if plan.owns(ExpertDim::Rows) {
                    let function = self.functions.pack_a[&blocks.height];
                    b.for_each(rows.panels.from, rows.panels.to, 1, &mut |panel| {
                        b.call(function, &place(panel), &[pass.depth, b.index(1), self.height(rows, panel)]);
                    });
                } else {
                    self.copy(&self.functions.pack_a, rows.panels, plan.panels(KeptFactor::A as usize), pass.depth, &place);
                }
            });
        }
        self.products(part, pass);
    }

    /// The micro-kernels of one block of contracted elements, which is copied.
    pub fn products(&self, part: &TileProduct<'_, 'c>, pass: &Pass<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let (blocks, rows, columns) = (&plan.blocks, part.rows, part.columns);
        let [packed_a, packed_b] = [KeptFactor::A, KeptFactor::B].map(|factor| self.current(factor));
        let [all_rows, all_columns] = [rows.panels, columns].map(|panels| b.index_sub(panels.to, panels.from));
        let micros = b.index_mul(all_rows, all_columns);
        let shares = [KeptFactor::A, KeptFactor::B].map(|factor| self.begin_next(factor, pass.next[factor as usize], micros));
        b.for_each(rows.panels.from, rows.panels.to, 1, &mut |row_panel| {
            let row = self.first_row(rows, row_panel);
            let number = b.index_sub(row_panel, rows.panels.from);
            let a = if blocks.pack_a { self.packed_row(packed_a, rows, row_panel) } else { self.row_start(pass, rows, row_panel) };
            b.for_each(columns.from, columns.to, 1, &mut |panel| {
                let column = b.index_mul(panel, b.index(blocks.width));
                let factor = if blocks.pack_b { self.packed_column(packed_b, columns, panel) } else { self.column_start(pass, panel) };
                let mut pointers = vec![a, factor, self.partial(part, row, column), self.scalars];
                pointers.push(b.at_const(self.area, self.scratch.spill));
                let mut indices = vec![row, column, part.outer, pass.depth];
                let micro_tile = MicroTile { row: number, rows: all_rows, column: b.index_sub(panel, columns.from), columns: all_columns };
                for (next, share) in self.g.next.iter().zip(&shares) {
                    let part = match (next, share) {
                        (Some(next), Some(share)) => next.part(b, share, micro_tile),
                        _ => prefetch::PrefetchPart::none(b, a),
                    };
                    pointers.extend(part.pointers);
                    indices.extend(part.numbers);
                }
                for (tensor, start) in part.starts.iter().enumerate() {
                    let bytes = self.bytes(tensor);
                    let down = b.at(*start, b.index_mul(row, b.index(bytes * plan.m.strides[tensor])));
                    pointers.push(b.at(down, b.index_mul(column, b.index(bytes * plan.n.strides[tensor]))));
                }
                self.by_height(rows, row_panel, &mut |rows| {
                    self.by_width(panel, &mut |columns| {
                        self.by_pass_position(pass, &mut |position| {
                            let micro = self.functions.micro[&Variant { rows, columns, pass: position }];
                            b.call(micro, &pointers, &indices);
                        });
                    });
                });
            });
        });
    }

    /// Address of a panel in a copy of `B`.
    fn packed_column(&self, copy: Pointer<'c>, columns: Range<'c>, panel: Index<'c>) -> Pointer<'c> {
        let b = self.g.b;
        b.at(copy, b.index_mul(b.index_sub(panel, columns.from), b.index(4 * self.g.plan.blocks.packed_b())))
    }

    fn column_start(&self, pass: &Pass<'c>, panel: Index<'c>) -> Pointer<'c> {
        self.column_at(pass.b, panel)
    }

    /// Address of a panel in a copy of `A`.
    fn packed_row(&self, copy: Pointer<'c>, rows: RowPanels<'c>, panel: Index<'c>) -> Pointer<'c> {
        let b = self.g.b;
        b.at(copy, b.index_mul(b.index_sub(panel, rows.panels.from), b.index(4 * self.g.plan.blocks.packed_a())))
    }

    fn row_start(&self, pass: &Pass<'c>, rows: RowPanels<'c>, panel: Index<'c>) -> Pointer<'c> {
        self.row_at(pass.a, self.first_row(rows, panel))
    }

    /// Copies the panels of `range`: those of equal size in one call.
    fn copy(
        &self,
        functions: &BTreeMap<i64, FunctionValue<'c>>,
        range: Range<'c>,
        sizes: PanelSizes,
        depth: Index<'c>,
        place: &dyn Fn(Index<'c>) -> [Pointer<'c>; 2],
    ) {
        let b = self.g.b;
        let border = b.index_max(range.from, b.index_min(range.to, b.index(sizes.border)));
        for (size, from, to) in [(sizes.before, range.from, border), (sizes.after, border, range.to)] {
            // One of the two sizes may not occur.
            if let Some(function) = functions.get(&size) {
                b.call(*function, &place(from), &[depth, b.index_sub(to, from)]);
            }
        }
    }

    /// Address at which the sums of the micro-kernel at this row and column wait.
    fn partial(&self, part: &TileProduct<'_, 'c>, row: Index<'c>, column: Index<'c>) -> Pointer<'c> {
        let (b, blocks) = (self.g.b, &self.g.plan.blocks);
        let Some(row_stride) = self.g.partials else { return self.area };
        let row = b.index_sub(row, self.first_row(part.rows, part.rows.panels.from));
        let column = b.index_sub(column, b.index_mul(part.columns.from, b.index(ir::fault!("gemm.partial.column", blocks.width - 1, blocks.width))));
        let down = b.at(b.at_const(self.area, self.scratch.partials), b.index_mul(row, b.index(4 * row_stride)));
        b.at(down, b.index_mul(column, b.index(4)))
    }

    fn first_row(&self, rows: RowPanels<'c>, panel: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        let longer = ir::fault!("gemm.rows.first", b.index(0), b.index_min(panel, rows.tall));
        b.index_add(rows.base, b.index_add(b.index_mul(panel, rows.height), longer))
    }

    /// Rows of a panel.
    fn height(&self, rows: RowPanels<'c>, panel: Index<'c>) -> Index<'c> {
        let b = self.g.b;
        b.index_select(b.index_less(panel, rows.tall), b.index_add(rows.height, b.index(1)), rows.height)
    }

    fn by_height(&self, rows: RowPanels<'c>, panel: Index<'c>, body: &mut dyn FnMut(i64)) {
        let (b, blocks) = (self.g.b, &self.g.plan.blocks);
        let body = RefCell::new(body);
        if self.g.plan.owns(ExpertDim::Rows) {
            return self.by_number(self.height(rows, panel), [1, blocks.height], &body);
        }
        if blocks.tall == 0 {
            return (*body.borrow_mut())(blocks.height);
        }
        let is_tall = b.index_less(panel, ir::fault!("gemm.rows.tall", b.index_add(rows.tall, b.index(1)), rows.tall));
        b.branch(is_tall, || (*body.borrow_mut())(blocks.height + 1), || (*body.borrow_mut())(blocks.height));
    }

    /// Writes `body` for every number from `least` to `most`, of which `value` is one.
    fn by_number(&self, value: Index<'c>, [least, most]: [i64; 2], body: &RefCell<&mut dyn FnMut(i64)>) {
        if least == most {
            return (*body.borrow_mut())(least);
        }
        let (b, middle) = (self.g.b, (least + most + 1) / 2);
        let below = b.index_less(value, b.index(middle));
        b.branch(below, || self.by_number(value, [least, middle - 1], body), || self.by_number(value, [middle, most], body));
    }

    fn by_width(&self, panel: Index<'c>, body: &mut dyn FnMut(i64)) {
        let (b, plan) = (self.g.b, self.g.plan);
        let last = plan.panels(KeptFactor::B as usize).after;
        if plan.blocks.column_panels == 1 || last == plan.blocks.width {
            return body(last);
        }
        let body = RefCell::new(body);
        let is_full = b.index_less(panel, b.index(ir::fault!("gemm.columns.last", plan.blocks.column_panels, plan.blocks.column_panels - 1)));
        b.branch(is_full, || (*body.borrow_mut())(plan.blocks.width), || (*body.borrow_mut())(last));
    }

    fn by_pass_position(&self, pass: &Pass<'c>, body: &mut dyn FnMut(PassPosition)) {
        let b = self.g.b;
        let body = RefCell::new(body);
        let run = |position: PassPosition| (*body.borrow_mut())(position);
        match *self.functions.pass_positions {
            [only] => run(only),
            [first, middle, last] => b.branch(pass.first, || run(first), || b.branch(pass.last, || run(last), || run(middle))),
            [first, middle, last, whole] => {
                b.branch(pass.first, || b.branch(pass.last, || run(whole), || run(first)), || b.branch(pass.last, || run(last), || run(middle)))
            }
            _ => unreachable!("invariant: one stage, three or four"),
        }
    }
}
