//! What the products of a block do for the blocks that follow it. They wait for arithmetic alone: loads and stores
//! between their steps cost next to nothing, while a copy by itself waits for memory.

use super::context::Gemm;
use super::pack;
use super::plan::PanelSizes;
use crate::build::llvm::{CacheLevel, Index, Llvm, Pointer, Vector};
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
    /// Panels of rows or columns.
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
/// With this many vector registers, and separate ones for masks, products leave one free.
const REGISTERS: u32 = 32;

/// Iterations from when a contracted element is brought near to when it is copied: as long as memory takes to answer.
const DELAY: i64 = 8;

/// How the micro-kernels of a pass prepare the next block of a factor.
pub enum BlockPrefetch {
    /// The factor's own dim is contiguous, and the micro-kernels copy the block.
    Copied(Strips),
    /// The contracted dim is contiguous. A copy would transpose, which takes registers that products do not leave, so
    /// the micro-kernels only prefetch the block.
    Fetched(PrefetchedLines),
}

/// A copy in strips: some contracted elements of one panel for each micro-kernel. Strips that follow one another are
/// of adjacent panels, which share pages.
pub struct Strips {
    panels: PanelSizes,
    lane: Lane,
    /// Bytes in the factor: of an element, and from one contracted element to the next.
    bytes: i64,
    stride: i64,
    /// Bytes in the copy: from one contracted element to the next, if that is not by the panel's size, and of a
    /// panel.
    copied_stride: Option<i64>,
    copied_panel: i64,
    /// Contracted elements of one iteration.
    times: i64,
}

/// Lines (contracted elements or rows, whichever are apart in memory) for row panels, and what is dense of a line for
/// column panels: pieces, in the size of the cache's lines, for the iterations.
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
pub struct PassShare<'c> {
    block: FactorBlock<'c>,
    /// Address of the copy.
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
    /// Start of the strip in the factor and in the copy. For lines, the start of the first line.
    pub pointers: [Pointer<'c>; POINTERS as usize],
    /// Contracted elements of the strip, and items of its panel. For lines, their number.
    pub numbers: [Index<'c>; NUMBERS as usize],
}

pub const POINTERS: u32 = 2;
pub const NUMBERS: u32 = 2;

impl<'c> PrefetchPart<'c> {
    /// The empty part, of a factor that is not copied or of which nothing is known.
    pub fn none(b: &Llvm<'c>, anywhere: Pointer<'c>) -> PrefetchPart<'c> {
        PrefetchPart { pointers: [anywhere; POINTERS as usize], numbers: [b.index(0); NUMBERS as usize] }
    }
}

impl BlockPrefetch {
    /// The preparation of `A` (0) or `B` (1). `None` if the factor is used in place, or neither of its dims is
    /// contiguous.
    pub fn new(g: &Gemm, factor: usize) -> Option<BlockPrefetch> {
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
            return Some(BlockPrefetch::Copied(Strips {
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
        Some(BlockPrefetch::Fetched(PrefetchedLines {
            lines,
            stride: bytes * stride,
            pieces,
            times: times(lines * pieces, blocks.tile_rows, iterations),
        }))
    }

    pub fn is_copied(&self) -> bool {
        matches!(self, BlockPrefetch::Copied(_))
    }

    /// Divides `block`, whose copy is to be at `to`, among `micros` micro-kernels. If there are fewer of these than
    /// panels, nothing is copied.
    pub fn share<'c>(&self, b: &Llvm<'c>, block: FactorBlock<'c>, to: Pointer<'c>, micros: Index<'c>) -> PassShare<'c> {
        let (one, zero) = (b.index(1), b.index(0));
        let wanted = b.index_equal(block.wanted, one);
        let panels = b.index_select(wanted, b.index_sub(block.panels.to, block.panels.from), one);
        let strips = b.index_div(micros, panels);
        let complete = b.both(wanted, b.index_less(zero, strips));
        let depth = b.index_select(complete, block.depth, zero);
        let strips = b.index_max(strips, one);
        let each = ir::fault!("gemm.next.strip", b.index_div(depth, strips), b.index_div(b.index_add(depth, b.index_sub(strips, one)), strips));
        PassShare { block, to, panels, depth, each, complete: b.index_select(complete, one, zero) }
    }

    pub fn part<'c>(&self, b: &Llvm<'c>, share: &PassShare<'c>, micro_tile: MicroTile<'c>) -> PrefetchPart<'c> {
        match self {
            BlockPrefetch::Copied(strips) => strips.part(b, share, micro_tile),
            BlockPrefetch::Fetched(lines) => lines.part(b, &share.block, micro_tile),
        }
    }
}

impl Strips {
    fn part<'c>(&self, b: &Llvm<'c>, share: &PassShare<'c>, micro_tile: MicroTile<'c>) -> PrefetchPart<'c> {
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
    /// The lines of one micro-kernel; none if the block is not wanted.
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
            b.branch(b.index_less(line, part.numbers[0]), || b.prefetch(place, CacheLevel::Second), || ());
        }
    }
}

/// The part of one micro-kernel, and how far it is.
pub struct PrefetchTask<'a, 'c> {
    next: &'a BlockPrefetch,
    part: PrefetchPart<'c>,
    /// Vectors of a panel, with the lanes that are its items'.
    vectors: Vec<(i64, Vector<'c>)>,
}

impl<'a, 'c> PrefetchTask<'a, 'c> {
    pub fn new(b: &Llvm<'c>, next: &'a BlockPrefetch, part: PrefetchPart<'c>) -> PrefetchTask<'a, 'c> {
        let vectors = match next {
            BlockPrefetch::Copied(strips) => (0..strips.panels.largest()).step_by(b.lanes()),
            BlockPrefetch::Fetched(_) => (0..0).step_by(1),
        };
        let vectors = vectors.map(|first| (first, b.mask_below(b.index_sub(part.numbers[1], b.index(first))))).collect();
        PrefetchTask { next, part, vectors }
    }

    /// Does the share of one iteration of the micro-kernel.
    pub fn step(&self, b: &Llvm<'c>, iteration: Index<'c>) {
        match self.next {
            BlockPrefetch::Fetched(lines) => lines.fetch(b, &self.part, iteration),
            BlockPrefetch::Copied(strips) => {
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

    /// Copies what is left after `iterations`: a pass may have fewer micro-kernels than most, or less depth.
    pub fn finish(&self, b: &Llvm<'c>, iterations: Index<'c>) {
        if let BlockPrefetch::Copied(strips) = self.next {
            let iterations = b.index_sub(b.index_max(iterations, b.index(DELAY)), b.index(DELAY));
            let done = b.index_mul(b.index_add(iterations, b.index(ir::fault!("gemm.next.done", 1, 0))), b.index(strips.times));
            b.for_each(done, self.part.numbers[0], 1, &mut |element| self.copy(b, strips, element));
        }
    }

    /// Prefetches a contracted element of the strip and the line after it, which is the next strip's: memory may take
    /// longer than the delay to answer.
    fn fetch(&self, b: &Llvm<'c>, strips: &Strips, element: Index<'c>) {
        let from = b.at(self.part.pointers[0], b.index_mul(element, b.index(strips.stride)));
        let end = strips.bytes * strips.panels.largest() + LINE;
        for byte in (0..end).step_by(LINE as usize).chain([end - 1]) {
            b.prefetch(b.at_const(from, byte), CacheLevel::First);
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
