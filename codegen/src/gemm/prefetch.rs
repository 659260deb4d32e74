//! What the products of a block do for the blocks that follow it. They wait for arithmetic alone: loads and stores between their steps cost next to
//! nothing, while a copy by itself waits for memory.

use super::context::Gemm;
use super::pack;
use super::plan::PanelSizes;
use crate::build::llvm::{Index, Level, Llvm, Pointer, Vector};
use crate::build::{Builder, Lane};
use crate::layout::div_ceil;
use inkwell::values::IntValue;

/// Panels, or tiles, `from..to`.
#[derive(Clone, Copy)]
pub struct Range<'c> {
    pub from: Index<'c>,
    pub to: Index<'c>,
}

/// A block of a factor that may be copied next.
#[derive(Clone, Copy)]
pub struct FactorBlock<'c> {
    pub start: Pointer<'c>,
    /// Of rows or columns.
    pub panels: Range<'c>,
    /// Contracted elements.
    pub depth: Index<'c>,
    /// 1 if it will be copied.
    pub wanted: Index<'c>,
}

impl<'c> FactorBlock<'c> {
    /// This one if the condition holds, else the other.
    pub fn unless(self, b: &Llvm<'c>, condition: IntValue<'c>, other: FactorBlock<'c>) -> FactorBlock<'c> {
        let index = |yes, no| b.index_select(condition, yes, no);
        FactorBlock {
            start: b.pointer_select(condition, self.start, other.start),
            panels: Range { from: index(self.panels.from, other.panels.from), to: index(self.panels.to, other.panels.to) },
            depth: index(self.depth, other.depth),
            wanted: index(self.wanted, other.wanted),
        }
    }
}

/// Bytes of a line of the cache.
const LINE: i64 = 64;
/// With so many vector registers, and others for masks, products leave one free.
const REGISTERS: u32 = 32;

/// Iterations from when a contracted element is brought near to when it is copied: as long as memory takes to answer.
const DELAY: i64 = 8;

/// How the micro-kernels of a pass see to the next block of a factor.
pub enum Next {
    /// Its own dim is dense: they copy it.
    Copied(Strips),
    /// Its contracted dim is: a copy transposes, which takes registers that products do not leave. They bring it near.
    Fetched(PrefetchedLines),
}

/// A copy in strips: some contracted elements of one panel for each micro-kernel. Strips that follow one another are of adjacent panels, which share pages.
pub struct Strips {
    panels: PanelSizes,
    lane: Lane,
    /// Bytes in the factor: of an element, and from one contracted element to the next.
    bytes: i64,
    stride: i64,
    /// Bytes in the copy: from one contracted element to the next, if that is not by the panel's size, and of a panel.
    copied_stride: Option<i64>,
    copied_panel: i64,
    /// Contracted elements of one iteration.
    times: i64,
}

/// Lines (contracted elements or rows, whichever are apart in memory) for row panels, and what is dense of a line for column panels: pieces, in the size of the
/// cache's lines, for the iterations.
pub struct PrefetchedLines {
    lines: i64,
    /// Bytes from line to line.
    stride: i64,
    /// Pieces of a line that one column panel sees to.
    pieces: i64,
    /// Pieces of one iteration.
    times: i64,
}

/// A micro-kernel of a pass: which of its row panels and column panels.
#[derive(Clone, Copy)]
pub struct MicroTile<'c> {
    pub row: Index<'c>,
    pub rows: Index<'c>,
    pub column: Index<'c>,
    pub columns: Index<'c>,
}

/// What all parts of a pass have in common.
pub struct Share<'c> {
    block: FactorBlock<'c>,
    /// Where the copy is to be.
    to: Pointer<'c>,
    /// Panels, contracted elements of all strips of one, and of each strip.
    panels: Index<'c>,
    depth: Index<'c>,
    each: Index<'c>,
    /// Whether the strips are the whole block.
    pub complete: Index<'c>,
}

/// The part of one micro-kernel.
#[derive(Clone, Copy)]
pub struct PrefetchPart<'c> {
    /// Of a strip: where it begins, in the factor and in the copy. Of lines: where the first begins.
    pub pointers: [Pointer<'c>; POINTERS as usize],
    /// Of a strip: contracted elements, and items of the panel. Of lines: how many.
    pub numbers: [Index<'c>; NUMBERS as usize],
}

pub const POINTERS: u32 = 2;
pub const NUMBERS: u32 = 2;

impl<'c> PrefetchPart<'c> {
    /// Of a factor that is not copied, or of which nothing is known.
    pub fn none(b: &Llvm<'c>, anywhere: Pointer<'c>) -> PrefetchPart<'c> {
        PrefetchPart { pointers: [anywhere; POINTERS as usize], numbers: [b.index(0); NUMBERS as usize] }
    }
}

impl Next {
    /// Of `A` (0) or `B` (1). Absent if the factor is used in place, or neither of its dims is dense.
    pub fn new(g: &Gemm, factor: usize) -> Option<Next> {
        let (plan, blocks) = (g.plan, &g.plan.blocks);
        if ![blocks.pack_a, blocks.pack_b][factor] {
            return None;
        }
        let (tensor, axis) = [(plan.a, &plan.m), (plan.b, &plan.n)][factor];
        let (own, k, bytes) = (axis.strides[tensor], plan.k.strides[tensor], g.bytes(tensor));
        let panels = plan.panels(factor);
        let most = [blocks.most_panels().min(blocks.panels), blocks.tile_columns];
        let iterations = div_ceil(blocks.depth, super::micro::UNROLL);
        let times = |lines: i64, parts: i64, iterations: i64| div_ceil(div_ceil(lines, parts.max(1)), iterations.max(1));
        if own == 1 && plan.experts.is_none() && g.target.registers >= REGISTERS {
            return Some(Next::Copied(Strips {
                panels,
                lane: g.lane(tensor),
                bytes,
                stride: bytes * k,
                copied_stride: [None, Some(4 * blocks.width)][factor],
                copied_panel: 4 * [blocks.packed_a(), blocks.packed_b()][factor],
                times: times(blocks.depth, most[0] * most[1] / most[factor], iterations - DELAY),
            }));
        }
        let items = most[factor] * panels.largest();
        let (lines, stride, dense) = match (own, k) {
            (1, _) => (blocks.depth, k, items),
            (_, 1) => (items, own, blocks.depth),
            _ => return None,
        };
        let pieces = div_ceil(bytes * dense, blocks.tile_columns * LINE);
        Some(Next::Fetched(PrefetchedLines { lines, stride: bytes * stride, pieces, times: times(lines * pieces, blocks.tile_rows, iterations) }))
    }

    pub fn is_copied(&self) -> bool {
        matches!(self, Next::Copied(_))
    }

    /// How `block`, whose copy is to be at `to`, is divided among so many micro-kernels. Fewer than panels copy nothing.
    pub fn share<'c>(&self, b: &Llvm<'c>, block: FactorBlock<'c>, to: Pointer<'c>, micros: Index<'c>) -> Share<'c> {
        let (one, zero) = (b.index(1), b.index(0));
        let wanted = b.index_equal(block.wanted, one);
        let panels = b.index_select(wanted, b.index_sub(block.panels.to, block.panels.from), one);
        let strips = b.index_div(micros, panels);
        let complete = b.both(wanted, b.index_less(zero, strips));
        let depth = b.index_select(complete, block.depth, zero);
        let strips = b.index_max(strips, one);
        let each = ir::fault!("gemm.next.strip", b.index_div(depth, strips), b.index_div(b.index_add(depth, b.index_sub(strips, one)), strips));
        Share { block, to, panels, depth, each, complete: b.index_select(complete, one, zero) }
    }

    pub fn part<'c>(&self, b: &Llvm<'c>, share: &Share<'c>, micro_tile: MicroTile<'c>) -> PrefetchPart<'c> {
        match self {
            Next::Copied(strips) => strips.part(b, share, micro_tile),
            Next::Fetched(lines) => lines.part(b, &share.block, micro_tile),
        }
    }
}

impl Strips {
    fn part<'c>(&self, b: &Llvm<'c>, share: &Share<'c>, micro_tile: MicroTile<'c>) -> PrefetchPart<'c> {
        let start = share.block.panels.from;
        let number = b.index_add(b.index_mul(micro_tile.row, micro_tile.columns), micro_tile.column);
        let part = b.index_div(number, share.panels);
        let panel = b.index_sub(number, b.index_mul(part, share.panels));
        let first = b.index_min(b.index_mul(part, share.each), share.depth);
        let before = b.index_sub(self.panels.start(b, b.index_add(start, panel)), self.panels.start(b, start));
        let down = b.at(share.block.start, b.index_mul(first, b.index(self.stride)));
        let from = b.at(down, b.index_mul(before, b.index(self.bytes)));
        let items = self.panels.size(b, b.index_add(start, panel));
        let along = b.at(share.to, b.index_mul(panel, b.index(self.copied_panel)));
        let to = b.at(along, b.index_mul(first, self.copied_stride(b, items)));
        PrefetchPart { pointers: [from, to], numbers: [b.index_min(share.each, b.index_sub(share.depth, first)), items] }
    }

    fn copied_stride<'c>(&self, b: &Llvm<'c>, items: Index<'c>) -> Index<'c> {
        self.copied_stride.map_or_else(|| b.index_mul(items, b.index(4)), |bytes| b.index(bytes))
    }
}

impl PrefetchedLines {
    /// Of a block that is not wanted, none.
    fn part<'c>(&self, b: &Llvm<'c>, block: &FactorBlock<'c>, micro_tile: MicroTile<'c>) -> PrefetchPart<'c> {
        let lines = b.index_mul(block.wanted, b.index(self.lines));
        let each = b.index_div(b.index_add(lines, b.index_sub(micro_tile.rows, b.index(1))), micro_tile.rows);
        let first = b.index_min(b.index_mul(micro_tile.row, each), lines);
        let count = b.index_min(each, b.index_sub(lines, first));
        let down = b.at(block.start, b.index_mul(first, b.index(self.stride)));
        let start = b.at(down, b.index_mul(micro_tile.column, b.index(LINE * self.pieces)));
        PrefetchPart { pointers: [start; 2], numbers: [count; 2] }
    }

    fn fetch<'c>(&self, b: &Llvm<'c>, part: &PrefetchPart<'c>, iteration: Index<'c>) {
        for time in 0..self.times {
            let number = b.index_add(b.index_mul(iteration, b.index(self.times)), b.index(time));
            let line = b.index_div(number, b.index(self.pieces));
            let piece = b.index_sub(number, b.index_mul(line, b.index(self.pieces)));
            let along = b.at(part.pointers[0], b.index_mul(piece, b.index(LINE)));
            let place = b.at(along, b.index_mul(line, b.index(self.stride)));
            b.branch(b.index_less(line, part.numbers[0]), || b.prefetch(place, Level::Second), || ());
        }
    }
}

/// A part, while the micro-kernel goes through it.
pub struct Work<'a, 'c> {
    next: &'a Next,
    part: PrefetchPart<'c>,
    /// Vectors of a panel, with the lanes that are its items'.
    vectors: Vec<(i64, Vector<'c>)>,
}

impl<'a, 'c> Work<'a, 'c> {
    pub fn new(b: &Llvm<'c>, next: &'a Next, part: PrefetchPart<'c>) -> Work<'a, 'c> {
        let vectors = match next {
            Next::Copied(strips) => (0..strips.panels.largest()).step_by(b.lanes()),
            Next::Fetched(_) => (0..0).step_by(1),
        };
        let vectors = vectors.map(|first| (first, b.mask_below(b.index_sub(part.numbers[1], b.index(first))))).collect();
        Work { next, part, vectors }
    }

    /// What belongs to an iteration of the micro-kernel.
    pub fn step(&self, b: &Llvm<'c>, iteration: Index<'c>) {
        match self.next {
            Next::Fetched(lines) => lines.fetch(b, &self.part, iteration),
            Next::Copied(strips) => {
                let is_mine = |element| b.index_less(element, self.part.numbers[0]);
                for time in 0..strips.times {
                    let element = b.index_add(b.index_mul(iteration, b.index(strips.times)), b.index(time));
                    b.branch(is_mine(element), || self.fetch(b, strips, element), || ());
                    let earlier = b.index_sub(element, b.index(strips.times * DELAY));
                    b.branch(is_mine(earlier), || self.copy(b, strips, earlier), || ());
                }
            }
        }
    }

    /// What is left after so many iterations: of a pass with fewer micro-kernels than most, or of less depth.
    pub fn finish(&self, b: &Llvm<'c>, iterations: Index<'c>) {
        if let Next::Copied(strips) = self.next {
            let iterations = b.index_sub(b.index_max(iterations, b.index(DELAY)), b.index(DELAY));
            let done = b.index_mul(b.index_add(iterations, b.index(ir::fault!("gemm.next.done", 1, 0))), b.index(strips.times));
            b.for_each(done, self.part.numbers[0], 1, &mut |element| self.copy(b, strips, element));
        }
    }

    /// Brings a contracted element of the strip near, and a line beyond: it is the next strip's, and memory may take longer than the delay to answer.
    fn fetch(&self, b: &Llvm<'c>, strips: &Strips, element: Index<'c>) {
        let from = b.at(self.part.pointers[0], b.index_mul(element, b.index(strips.stride)));
        let end = strips.bytes * strips.panels.largest() + LINE;
        for byte in (0..end).step_by(LINE as usize).chain([end - 1]) {
            b.prefetch(b.at_const(from, byte), Level::First);
        }
    }

    /// Copies a contracted element of the strip.
    fn copy(&self, b: &Llvm<'c>, strips: &Strips, element: Index<'c>) {
        let from = b.at(self.part.pointers[0], b.index_mul(element, b.index(strips.stride)));
        let to = b.at(self.part.pointers[1], b.index_mul(element, strips.copied_stride(b, self.part.numbers[1])));
        for &(first, mask) in &self.vectors {
            pack::copy_vector(b, [from, to], first, strips.lane, Some(mask));
        }
    }
}
