//! Matrix products with fused pointwise ops, as register-blocked loops over packed operands (after Goto and van de Geijn, 2008).
//!
//! A tile is a block of rows and columns of one product. Inside: for each block of contracted elements, copy what the tile needs of the
//! factors, then run the micro-kernel over row panels and column panels. A copy that the next tile of the same call needs too is kept. Rows are divided into panels of two heights that differ by one, so
//! no thin remainder is left; the last column panel has constant masks.

mod epilogue;
mod micro;
mod pack;
pub mod plan;
#[cfg(test)]
mod tests;
mod vector;

pub use vector::as_loops;

use crate::CompileError;
use crate::build::Builder;
use crate::build::llvm::{Index, Llvm, Pointer};
use crate::layout::div_ceil;
use crate::pointwise;
use inkwell::values::{FunctionValue, IntValue};
use ir::kernel::Kernel;
use ir::op::{Binary, Op, Unary};
use micro::{Stage, Variant};
use plan::Plan;
use std::collections::BTreeMap;

/// What the parts of a kernel under construction share.
pub struct Gemm<'a, 'c> {
    pub b: &'a Llvm<'c>,
    pub kernel: &'a Kernel,
    pub plan: &'a Plan,
    pub partials: Partials,
    /// The ops after the product are many: they are written as a loop over rows.
    pub long_epilogue: bool,
}

/// Where the sums of a tile wait between blocks of contracted elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partials {
    /// One block: they never leave registers.
    None,
    /// In the output itself, with its row stride. Only for an f32 output that is the product and nothing else.
    Output { row_stride: i64 },
    /// In scratch, dense, in rows of the tile's width.
    Scratch { row_stride: i64 },
}

impl Partials {
    fn row_stride(self) -> i64 {
        match self {
            Partials::None => 0,
            Partials::Output { row_stride } | Partials::Scratch { row_stride } => row_stride,
        }
    }

    /// The sums at a row and column of the micro-kernel whose first sum is at `first`.
    fn place<'c>(self, b: &Llvm<'c>, first: Pointer<'c>, row: i64, column: i64) -> Pointer<'c> {
        b.at_const(first, 4 * (row * self.row_stride() + column))
    }
}

/// Bytes of scratch by part; each part starts at a multiple of 64.
struct Scratch {
    packed_a: i64,
    partials: i64,
    spill: i64,
    bytes: i64,
}

/// Whether an op takes more than a few instructions.
fn is_long(op: &Op) -> bool {
    match op {
        Op::Unary(unary) => {
            matches!(unary, Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Erf | Unary::Rsqrt | Unary::Sign)
        }
        Op::Binary(binary) => matches!(binary, Binary::Pow | Binary::Rem),
        Op::Uniform { .. } | Op::Iota(_) => true,
        _ => false,
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Llvm, kernel: &Kernel, target: &crate::target::Target, name: &str) -> Result<crate::Shape, CompileError> {
    plan::check_epilogue(kernel)?;
    let plan = Plan::new(kernel, target)?;
    let blocks = &plan.blocks;
    let passes = blocks.depths * plan.outer_k.iter().map(|x| x.size).product::<i64>();
    let output = kernel.inputs.len();
    let partials = if passes == 1 {
        Partials::None
    } else if plan.is_plain(kernel) && plan.n.strides[output] == 1 {
        Partials::Output { row_stride: plan.m.strides[output] }
    } else {
        Partials::Scratch { row_stride: blocks.tile_columns * blocks.width }
    };
    let g = Gemm { b, kernel, plan: &plan, partials, long_epilogue: kernel.body.nodes.iter().any(|n| is_long(&n.op)) };

    let aligned = |elements: i64| div_ceil(4 * elements, 64) * 64;
    let packed_a = if blocks.pack_b { aligned(blocks.tile_columns * blocks.packed_b()) } else { 0 };
    let partial_start = packed_a + if blocks.pack_a { aligned(blocks.tile_rows * blocks.packed_a()) } else { 0 };
    let partial_bytes = match partials {
        Partials::Scratch { row_stride } => aligned(blocks.tile_rows * blocks.tallest() * row_stride),
        Partials::None | Partials::Output { .. } => 0,
    };
    let spill = partial_start + partial_bytes;
    let spill_bytes = if g.long_epilogue { aligned(micro::spill_bytes(&plan) / 4) } else { 0 };
    let scratch = Scratch { packed_a, partials: partial_start, spill, bytes: spill + spill_bytes };

    let functions = Functions::new(&g, passes)?;
    let entry = b.kernel(name);
    let tensors: Vec<Pointer> =
        (0..kernel.inputs.len() + kernel.outputs.len()).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
    b.for_each(entry.first_tile, entry.end_tile, 1, &mut |tile| {
        Tile { g: &g, functions: &functions, scratch: &scratch, tensors: &tensors, scalars: entry.scalars, area: entry.scratch }
            .emit(tile, b.index_equal(tile, entry.first_tile));
    });
    b.finish_function();
    Ok(crate::Shape { tiles: plan.tiles() as u64, scratch_bytes: scratch.bytes as u64 })
}

/// The functions of one kernel.
struct Functions<'c> {
    /// Panels of `A` by height, of `B` by width; empty where that factor is used in place.
    pack_a: BTreeMap<i64, FunctionValue<'c>>,
    pack_b: BTreeMap<i64, FunctionValue<'c>>,
    micro: BTreeMap<Variant, FunctionValue<'c>>,
    stages: Vec<Stage>,
}

impl<'c> Functions<'c> {
    fn new(g: &Gemm<'_, 'c>, passes: i64) -> Result<Self, CompileError> {
        let (plan, blocks) = (g.plan, &g.plan.blocks);
        let heights: Vec<i64> = if blocks.tall > 0 { vec![blocks.height + 1, blocks.height] } else { vec![blocks.height] };
        let last = plan.n.size - (blocks.column_panels - 1) * blocks.width;
        let widths: Vec<i64> = if last != blocks.width && blocks.column_panels > 1 { vec![blocks.width, last] } else { vec![last] };
        // A product that adds to its output begins from what is there.
        let resumes = matches!(g.partials, Partials::Output { .. }) && g.kernel.outputs[0].accumulate;
        let stages = match passes {
            1 => vec![Stage { resumes: false, finishes: true }],
            _ if matches!(g.partials, Partials::Output { .. }) => {
                vec![Stage { resumes, finishes: false }, Stage { resumes: true, finishes: false }]
            }
            _ => vec![Stage { resumes: false, finishes: false }, Stage { resumes: true, finishes: false }, Stage { resumes: true, finishes: true }],
        };
        let panel = |name: &str, items, [out_stride, out_panel]: [i64; 2], axis: &crate::layout::Axis, tensor: usize| {
            let panel = pack::Panel {
                name: format!("{name}_{items}"),
                lane: pointwise::stored(g.kernel.inputs[tensor].ty.dtype),
                items,
                out_stride,
                out_panel,
                item_stride: axis.strides[tensor],
                k_stride: plan.k.strides[tensor],
            };
            (items, pack::function(g.b, &panel))
        };
        let pack_a = heights.iter().filter(|_| blocks.pack_a).map(|h| panel("rows", *h, [*h, blocks.packed_a()], &plan.m, plan.a)).collect();
        let pack_b =
            widths.iter().filter(|_| blocks.pack_b).map(|w| panel("columns", *w, [blocks.width, blocks.packed_b()], &plan.n, plan.b)).collect();
        let mut micro = BTreeMap::new();
        for &rows in &heights {
            for &columns in &widths {
                for &stage in &stages {
                    let variant = Variant { rows, columns, stage };
                    if let std::collections::btree_map::Entry::Vacant(slot) = micro.entry(variant) {
                        slot.insert(micro::function(g, variant)?);
                    }
                }
            }
        }
        Ok(Functions { pack_a, pack_b, micro, stages })
    }
}

/// One tile under construction.
struct Tile<'a, 'c> {
    g: &'a Gemm<'a, 'c>,
    functions: &'a Functions<'c>,
    scratch: &'a Scratch,
    tensors: &'a [Pointer<'c>],
    scalars: Pointer<'c>,
    area: Pointer<'c>,
}

/// The factor whose copy outlives a tile: the tiles that share it follow one another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    A,
    B,
}

/// Panels before number `border` have one size, those from it on another.
#[derive(Clone, Copy)]
struct Sizes {
    before: i64,
    border: i64,
    after: i64,
}

/// Panels `from..to`.
#[derive(Clone, Copy)]
struct Range<'c> {
    from: Index<'c>,
    to: Index<'c>,
}

impl<'c> Tile<'_, 'c> {
    /// Tile numbers count the blocks of the factor that is not kept fastest, then those of the other, then repetitions. `is_first`: no tile went
    /// before it in this call.
    fn emit(&self, tile: Index<'c>, is_first: IntValue<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let (fast, slow) = match self.kept() {
            Kept::A => (blocks.column_tiles(), blocks.row_tiles()),
            Kept::B => (blocks.row_tiles(), blocks.column_tiles()),
        };
        let (fast_tile, rest) = (b.index_rem(tile, b.index(fast)), b.index_div(tile, b.index(fast)));
        let (slow_tile, outer) = (b.index_rem(rest, b.index(slow)), b.index_div(rest, b.index(slow)));
        let (row_tile, column_tile) = match self.kept() {
            Kept::A => (slow_tile, fast_tile),
            Kept::B => (fast_tile, slow_tile),
        };
        let renew = b.either(is_first, b.index_equal(fast_tile, b.index(0)));
        let range = |number: Index<'c>, length: i64, end: i64| {
            let from = b.index_mul(number, b.index(length));
            Range { from, to: b.index_min(b.index_add(from, b.index(length)), b.index(end)) }
        };
        let rows = range(row_tile, blocks.tile_rows, blocks.panels);
        let columns = range(column_tile, blocks.tile_columns, blocks.column_panels);
        let starts = self.starts(outer);
        let k_repeats: i64 = plan.outer_k.iter().map(|x| x.size).product();
        let passes = blocks.depths * k_repeats;
        b.for_each(b.index(0), b.index(passes), 1, &mut |pass| {
            let block = b.index_rem(pass, b.index(blocks.depths));
            let k = b.index_mul(block, b.index(blocks.depth));
            let depth = b.index_min(b.index(blocks.depth), b.index_sub(b.index(plan.k.size), k));
            let repeat = b.index_div(pass, b.index(blocks.depths));
            let factor = |tensor: usize| {
                let bytes = self.bytes(tensor);
                let along_k = b.index_mul(k, b.index(bytes * plan.k.strides[tensor]));
                b.at(self.shifted(starts[tensor], repeat, &plan.outer_k, tensor, bytes), along_k)
            };
            // With several passes the copies change within the tile.
            let renew = if passes == 1 { Some(renew) } else { None };
            let pass = Pass { a: factor(plan.a), b: factor(plan.b), depth, number: pass, passes, renew };
            self.pass(rows, columns, &starts, outer, &pass);
        });
    }

    /// `start` moved to the repetition `number` of `axes`, whose last is the fastest.
    fn shifted(&self, start: Pointer<'c>, number: Index<'c>, axes: &[crate::layout::Axis], tensor: usize, bytes: i64) -> Pointer<'c> {
        let b = self.g.b;
        let (mut place, mut rest) = (start, number);
        for axis in axes.iter().rev() {
            let digit = b.index_rem(rest, b.index(axis.size));
            rest = b.index_div(rest, b.index(axis.size));
            place = b.at(place, b.index_mul(digit, b.index(bytes * axis.strides[tensor])));
        }
        place
    }

    /// The first element of every tensor in this repetition of the product.
    fn starts(&self, outer: Index<'c>) -> Vec<Pointer<'c>> {
        (0..self.tensors.len()).map(|t| self.shifted(self.tensors[t], outer, &self.g.plan.outer, t, self.bytes(t))).collect()
    }

    fn bytes(&self, tensor: usize) -> i64 {
        let kernel = self.g.kernel;
        let ty = match kernel.inputs.get(tensor) {
            Some(input) => &input.ty,
            None => &kernel.body[kernel.outputs[tensor - kernel.inputs.len()].value].ty,
        };
        pointwise::stored(ty.dtype).bytes()
    }

    /// One block of contracted elements.
    fn pass(&self, rows: Range<'c>, columns: Range<'c>, starts: &[Pointer<'c>], outer: Index<'c>, pass: &Pass<'c>) {
        let (b, plan) = (self.g.b, self.g.plan);
        let blocks = &plan.blocks;
        let packed_column = |panel: Index<'c>| b.at(self.area, b.index_mul(b.index_sub(panel, columns.from), b.index(4 * blocks.packed_b())));
        let column_start = |panel: Index<'c>| b.at(pass.b, b.index_mul(panel, b.index(self.bytes(plan.b) * blocks.width * plan.n.strides[plan.b])));
        let packed_row = |panel: Index<'c>| {
            let number = b.index_sub(panel, rows.from);
            b.at(b.at_const(self.area, self.scratch.packed_a), b.index_mul(number, b.index(4 * blocks.packed_a())))
        };
        let row_start = |panel: Index<'c>| b.at(pass.a, b.index_mul(self.first_row(panel), b.index(self.bytes(plan.a) * plan.m.strides[plan.a])));
        self.if_needed(Kept::B, pass, || {
            if blocks.pack_b {
                let last = plan.n.size - (blocks.column_panels - 1) * blocks.width;
                let border = blocks.column_panels - i64::from(last != blocks.width);
                let place = |panel| [column_start(panel), packed_column(panel)];
                self.copy(&self.functions.pack_b, columns, Sizes { before: blocks.width, border, after: last }, pass.depth, &place);
            }
        });
        self.if_needed(Kept::A, pass, || {
            if blocks.pack_a {
                let place = |panel| [row_start(panel), packed_row(panel)];
                let sizes = Sizes { before: blocks.height + 1, border: blocks.tall, after: blocks.height };
                self.copy(&self.functions.pack_a, rows, sizes, pass.depth, &place);
            }
        });
        b.for_each(rows.from, rows.to, 1, &mut |row_panel| {
            let row = self.first_row(row_panel);
            let a = if blocks.pack_a { packed_row(row_panel) } else { row_start(row_panel) };
            b.for_each(columns.from, columns.to, 1, &mut |panel| {
                let column = b.index_mul(panel, b.index(blocks.width));
                let factor = if blocks.pack_b { packed_column(panel) } else { column_start(panel) };
                let mut pointers = vec![a, factor, self.partial(rows, columns, row, column, starts), self.scalars];
                pointers.push(b.at_const(self.area, self.scratch.spill));
                for (tensor, start) in starts.iter().enumerate() {
                    let bytes = self.bytes(tensor);
                    let down = b.at(*start, b.index_mul(row, b.index(bytes * plan.m.strides[tensor])));
                    pointers.push(b.at(down, b.index_mul(column, b.index(bytes * plan.n.strides[tensor]))));
                }
                self.by_height(row_panel, &mut |rows| {
                    self.by_width(panel, &mut |columns| {
                        self.by_stage(pass, &mut |stage| {
                            let micro = self.functions.micro[&Variant { rows, columns, stage }];
                            b.call(micro, &pointers, &[row, column, outer, pass.depth]);
                        });
                    });
                });
            });
        });
    }

    fn kept(&self) -> Kept {
        if self.g.plan.blocks.pack_a { Kept::A } else { Kept::B }
    }

    /// Writes the copying of a factor, to be skipped if the tile before it left the same copy.
    fn if_needed(&self, factor: Kept, pass: &Pass<'c>, copy: impl FnOnce()) {
        match pass.renew {
            Some(renew) if factor == self.kept() => self.g.b.branch(renew, copy, || ()),
            Some(_) | None => copy(),
        }
    }

    /// Copies the panels of `range`: those of equal size in one call.
    fn copy(
        &self,
        functions: &BTreeMap<i64, FunctionValue<'c>>,
        range: Range<'c>,
        sizes: Sizes,
        depth: Index<'c>,
        place: &dyn Fn(Index<'c>) -> [Pointer<'c>; 2],
    ) {
        let b = self.g.b;
        let border = b.index_max(range.from, b.index_min(range.to, b.index(sizes.border)));
        for (size, from, to) in [(sizes.before, range.from, border), (sizes.after, border, range.to)] {
            // One size may not occur at all.
            if let Some(function) = functions.get(&size) {
                b.call(*function, &place(from), &[depth, b.index_sub(to, from)]);
            }
        }
    }

    /// Where the sums of the micro-kernel at this row and column wait.
    fn partial(&self, rows: Range<'c>, columns: Range<'c>, row: Index<'c>, column: Index<'c>, starts: &[Pointer<'c>]) -> Pointer<'c> {
        let (b, blocks) = (self.g.b, &self.g.plan.blocks);
        let (start, row, column) = match self.g.partials {
            Partials::None => return self.area,
            Partials::Output { .. } => (starts[self.g.kernel.inputs.len()], row, column),
            Partials::Scratch { .. } => (
                b.at_const(self.area, self.scratch.partials),
                b.index_sub(row, self.first_row(rows.from)),
                b.index_sub(column, b.index_mul(columns.from, b.index(blocks.width))),
            ),
        };
        let down = b.at(start, b.index_mul(row, b.index(4 * self.g.partials.row_stride())));
        b.at(down, b.index_mul(column, b.index(4)))
    }

    fn first_row(&self, panel: Index<'c>) -> Index<'c> {
        let (b, blocks) = (self.g.b, &self.g.plan.blocks);
        b.index_add(b.index_mul(panel, b.index(blocks.height)), b.index_min(panel, b.index(blocks.tall)))
    }

    fn by_height(&self, panel: Index<'c>, body: &mut dyn FnMut(i64)) {
        let (b, blocks) = (self.g.b, &self.g.plan.blocks);
        if blocks.tall == 0 {
            return body(blocks.height);
        }
        let body = std::cell::RefCell::new(body);
        let is_tall = b.index_less(panel, b.index(blocks.tall));
        b.branch(is_tall, || (*body.borrow_mut())(blocks.height + 1), || (*body.borrow_mut())(blocks.height));
    }

    fn by_width(&self, panel: Index<'c>, body: &mut dyn FnMut(i64)) {
        let (b, plan) = (self.g.b, self.g.plan);
        let last = plan.n.size - (plan.blocks.column_panels - 1) * plan.blocks.width;
        if plan.blocks.column_panels == 1 || last == plan.blocks.width {
            return body(last);
        }
        let body = std::cell::RefCell::new(body);
        let is_full = b.index_less(panel, b.index(plan.blocks.column_panels - 1));
        b.branch(is_full, || (*body.borrow_mut())(plan.blocks.width), || (*body.borrow_mut())(last));
    }

    fn by_stage(&self, pass: &Pass<'c>, body: &mut dyn FnMut(Stage)) {
        let b = self.g.b;
        let body = std::cell::RefCell::new(body);
        let run = |stage: Stage| (*body.borrow_mut())(stage);
        let at = |number: i64| b.index_equal(pass.number, b.index(number));
        match *self.functions.stages {
            [only] => run(only),
            [first, rest] => b.branch(at(0), || run(first), || run(rest)),
            [first, middle, last] => {
                b.branch(at(0), || run(first), || b.branch(at(pass.passes - 1), || run(last), || run(middle)));
            }
            _ => unreachable!("invariant: one to three stages"),
        }
    }
}

/// One block of contracted elements of a tile.
struct Pass<'c> {
    /// The factors at the block's first contracted element.
    a: Pointer<'c>,
    b: Pointer<'c>,
    depth: Index<'c>,
    number: Index<'c>,
    passes: i64,
    /// Whether the kept copy must be made anew; absent if it always must.
    renew: Option<IntValue<'c>>,
}
