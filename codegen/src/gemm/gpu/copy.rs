//! How a stage of a factor comes to shared memory.
//!
//! A stage is lines of units. Factors for tensor cores keep their order in memory, in units of 16 bytes that change
//! places so that the eight that `ldmatrix` reads at a time lie in different banks; lines of one contracted element
//! that has 32 bits, which it cannot turn, are padded instead. f32 factors for multiply-adds are turned to lines of
//! one contracted element each. Copies run in the background (`cp.async`), and what lies beyond the factor is filled
//! with zeros. Only where a unit of 16 bytes need not be aligned, or not be dense, it is collected by ordinary loads.

use super::parts::Gpu;
use super::tile::TileConfig;
use crate::build::asm::Instruction;
use crate::build::block::Index;
use crate::build::simt::Simt;
use crate::build::swizzle::LINE;
use crate::build::{Builder, IntBinary};
use crate::gemm::product::{ExpertDim, Product};
use crate::layout::Axis;

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 16 bits, in lines as long as the stage.
    Half,
    /// 16 bits, in lines of 128 bytes: where lines are contracted elements, 64 rows (columns) after the other. As
    /// `wgmma` wants them.
    Narrow,
    /// f32 that tensor cores multiply as tf32, in lines as long as the stage.
    Tf32,
    /// f32.
    Word,
}

impl Element {
    fn bytes(self) -> i64 {
        match self {
            Element::Half | Element::Narrow => 2,
            Element::Tf32 | Element::Word => 4,
        }
    }
}

/// The dim along which the lines of a factor are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineDim {
    /// Rows of the first factor, columns of the second.
    Own,
    Contracted,
}

impl LineDim {
    /// The dim of a factor's lines: the one that is not contiguous, if one is.
    pub fn of(product: &Product, tensor: usize) -> LineDim {
        let axis = if tensor == product.a { &product.m } else { &product.n };
        if product.k.strides[tensor] == 1 || axis.strides[tensor] != 1 { LineDim::Own } else { LineDim::Contracted }
    }
}

/// How one factor is copied to shared memory.
#[derive(Clone, Debug)]
pub struct FactorCopy {
    pub tensor: usize,
    element: Element,
    /// The lines in global memory; for tensor cores, in shared memory too.
    pub lines: LineDim,
    /// Rows or columns of a tile, and contracted elements of a stage.
    own: i64,
    depth: i64,
    threads: i64,
    /// The factor's rows or columns, and its strides in elements along these and along the contracted dim.
    own_size: i64,
    own_stride: i64,
    k_stride: i64,
    /// Whether every tile, and every stage, is within the factor.
    own_whole: bool,
    k_whole: bool,
    /// Units are dense in global memory and, if the factor is aligned, aligned.
    in_units: bool,
}

/// Elements of a unit, by its bytes.
const UNIT_BYTES: i64 = 16;
/// f32 beside a line of words.
const WORDS_PAD: i64 = 4;
/// Bytes beside a line of tf32 of one contracted element: four lines of eight elements each, which a warp reads at a
/// time, lie in different banks.
const TF32_PAD: i64 = 32;

/// What a thread's copies have in common in all stages of a tile.
pub struct ThreadCopy<'c> {
    /// Line, unit in the line, and offset in the stage of the thread's first unit.
    line: Index<'c>,
    unit: Index<'c>,
    to: Index<'c>,
    /// The first row or column of the tile.
    own: Index<'c>,
    /// The factor's first element in this repetition of the product, and bytes from there to the tile.
    start: Index<'c>,
    offset: Index<'c>,
    /// Whether the factor is aligned to units.
    aligned: Option<inkwell::values::IntValue<'c>>,
}

/// What a stage holds.
#[derive(Clone, Copy)]
pub struct Stage<'c> {
    /// Where it begins in shared memory.
    pub to: Index<'c>,
    /// Its first contracted element, and the end of those that count. 32 bits.
    pub k: Index<'c>,
    pub k_end: Index<'c>,
    /// Which repetition of the contracted dim it is of.
    pub repeat: Index<'c>,
}

impl FactorCopy {
    pub fn new(product: &Product, tensor: usize, element: Element, tile: &TileConfig) -> FactorCopy {
        let (axis, own) = if tensor == product.a { (&product.m, tile.rows) } else { (&product.n, tile.columns) };
        let (own_stride, k_stride) = (axis.strides[tensor], product.k.strides[tensor]);
        let lines = LineDim::of(product, tensor);
        let elements = UNIT_BYTES / element.bytes();
        let (dense, other) = match lines {
            LineDim::Own => (k_stride == 1, own_stride),
            LineDim::Contracted => (own_stride == 1, k_stride),
        };
        // An expert's contracted elements may begin anywhere, so units along them are not aligned.
        let anywhere = lines == LineDim::Own && product.owns(ExpertDim::Contracted);
        let expert = product.experts.as_ref().map(|x| &x.axis);
        let others = product.outer.iter().chain(&product.outer_k).chain(expert).map(|x: &Axis| x.strides[tensor]);
        let in_units = dense && !anywhere && others.chain([other]).all(|s| s % elements == 0);
        FactorCopy {
            tensor,
            element,
            lines,
            own,
            depth: tile.depth,
            threads: tile.threads(),
            own_size: axis.size,
            own_stride,
            k_stride,
            own_whole: ir::fault!("gpu.copy.whole", axis.size % 8, axis.size % own) == 0,
            k_whole: product.k.size % tile.depth == 0 && !product.owns(ExpertDim::Contracted),
            in_units,
        }
    }

    fn unit(&self) -> i64 {
        match self.element {
            Element::Half | Element::Narrow | Element::Tf32 => UNIT_BYTES / self.element.bytes(),
            Element::Word => 1,
        }
    }

    fn units_per_line(&self) -> i64 {
        match self.lines {
            LineDim::Own => self.depth / self.unit(),
            LineDim::Contracted => self.own / self.unit(),
        }
    }

    /// Units that each thread copies, and the lines from one to the next.
    fn count(&self) -> i64 {
        self.own * self.depth / self.unit() / self.threads
    }

    fn line_step(&self) -> i64 {
        self.threads / self.units_per_line()
    }

    /// Bytes of a line of units in shared memory.
    pub fn line_bytes(&self) -> i64 {
        let units = self.units_per_line() * UNIT_BYTES;
        match (self.element, self.lines) {
            (Element::Narrow, _) => LINE,
            (Element::Tf32, LineDim::Contracted) => units + TF32_PAD,
            (Element::Half | Element::Tf32 | Element::Word, _) => units,
        }
    }

    /// Bytes of a line of words, which has one contracted element.
    pub fn words_line(&self) -> i64 {
        4 * (self.own + WORDS_PAD)
    }

    /// Bytes of a stage.
    pub fn bytes(&self) -> i64 {
        match self.element {
            Element::Half | Element::Narrow => 2 * self.own * self.depth,
            Element::Tf32 => self.line_bytes() * if self.lines == LineDim::Own { self.own } else { self.depth },
            Element::Word => self.depth * self.words_line(),
        }
    }

    /// What the number of a unit is combined with in this line (exclusive or): eight lines in turn, or four pairs, if
    /// a line is as long as half of all banks.
    pub fn swizzle<'c>(&self, b: &Simt<'c>, line: Index<'c>) -> Index<'c> {
        let (shift, mask) = if self.line_bytes() >= 128 { (0, 7) } else { (1, 3) };
        b.bits(IntBinary::And, b.bits(IntBinary::ShrLogical, line, b.word(shift)), b.word(mask))
    }

    /// Bytes from one line, and from one unit, to the next in global memory.
    fn steps(&self) -> [i64; 2] {
        let bytes = self.element.bytes();
        match self.lines {
            LineDim::Own => [bytes * self.own_stride, bytes * self.unit() * self.k_stride],
            LineDim::Contracted => [bytes * self.k_stride, bytes * self.unit() * self.own_stride],
        }
    }

    /// Bytes from one line to the next, and from one unit to the next, in shared memory, but for the swizzle.
    fn shared_steps(&self) -> [i64; 2] {
        match (self.element, self.lines) {
            (Element::Half | Element::Narrow | Element::Tf32, _) => [self.line_bytes(), UNIT_BYTES],
            (Element::Word, LineDim::Own) => [4, self.words_line()],
            (Element::Word, LineDim::Contracted) => [self.words_line(), 4],
        }
    }

    /// What a thread's copies share in all stages of a tile, whose first row or column is `own`; the factor begins at
    /// `start`.
    pub fn thread_copy<'c>(&self, b: &Simt<'c>, start: Index<'c>, own: Index<'c>) -> ThreadCopy<'c> {
        let thread = b.thread();
        let per_line = b.word(self.units_per_line());
        let (line, unit) = (b.index_div(thread, per_line), b.index_rem(thread, per_line));
        let [line_step, unit_step] = self.shared_steps();
        let shifted = match (self.element, self.lines) {
            (Element::Half, _) | (Element::Tf32, LineDim::Own) => b.bits(IntBinary::Xor, unit, self.swizzle(b, line)),
            (Element::Narrow, _) => {
                let in_line = b.word(LINE / UNIT_BYTES);
                let lines = b.index_mul(b.index_div(unit, in_line), b.word(self.depth * LINE / UNIT_BYTES));
                b.index_add(b.bits(IntBinary::Xor, b.index_rem(unit, in_line), self.swizzle(b, line)), lines)
            }
            (Element::Tf32, LineDim::Contracted) | (Element::Word, _) => unit,
        };
        let to = b.index_add(b.index_mul(line, b.word(line_step)), b.index_mul(shifted, b.word(unit_step)));
        let [line_step, unit_step] = self.steps();
        let own_bytes = self.element.bytes() * self.own_stride;
        let mut offset = b.index_mul(b.widen(own), b.index(own_bytes));
        for (number, step) in [(line, line_step), (unit, unit_step)] {
            offset = b.index_add(offset, b.index_mul(b.widen(number), b.index(step)));
        }
        let aligned = (self.element != Element::Word && self.in_units).then(|| {
            let rest = b.bits(IntBinary::And, start, b.index(UNIT_BYTES - 1));
            b.equal(rest, b.index(0))
        });
        ThreadCopy { line, unit, to, own, start, offset, aligned }
    }

    /// Begins to fill a stage.
    pub fn fill<'c>(&self, g: &Gpu<'_, 'c>, thread: &ThreadCopy<'c>, stage: Stage<'c>) {
        let b = g.b;
        let bytes = self.element.bytes();
        let mut from = b.index_add(thread.start, thread.offset);
        from = b.index_add(from, b.index_mul(b.widen(stage.k), b.index(bytes * self.k_stride)));
        let mut rest = stage.repeat;
        for axis in g.product.outer_k.iter().rev() {
            let digit = b.index_rem(rest, b.word(axis.size));
            rest = b.index_div(rest, b.word(axis.size));
            from = b.index_add(from, b.index_mul(b.widen(digit), b.index(bytes * axis.strides[self.tensor])));
        }
        let to = b.index_add(stage.to, thread.to);
        match (self.element, thread.aligned) {
            (Element::Half | Element::Narrow | Element::Tf32, Some(aligned)) => {
                b.either(aligned, || self.units(g, thread, stage, from, to), || self.collected(g, thread, stage, from, to));
            }
            (Element::Half | Element::Narrow | Element::Tf32, None) => self.collected(g, thread, stage, from, to),
            (Element::Word, _) => self.units(g, thread, stage, from, to),
        }
    }

    /// How many elements of a unit lie within the factor, in the line `lines` after this thread's first; `None` if
    /// all do. 32 bits.
    fn counted<'c>(&self, b: &Simt<'c>, thread: &ThreadCopy<'c>, stage: Stage<'c>, lines: Index<'c>) -> Option<Index<'c>> {
        let line = b.index_add(thread.line, lines);
        let within = b.index_mul(thread.unit, b.word(self.unit()));
        let own_left = |at| b.index_sub(b.word(self.own_size), b.index_add(thread.own, at));
        let k_left = |at| b.index_sub(stage.k_end, ir::fault!("gpu.copy.depth", at, b.index_add(stage.k, at)));
        let (own_whole, k_whole) = (self.own_whole, self.k_whole);
        let (line_left, unit_left) = match self.lines {
            LineDim::Own => ((!own_whole).then(|| own_left(line)), (!k_whole).then(|| k_left(within))),
            LineDim::Contracted => ((!k_whole).then(|| k_left(line)), (!own_whole).then(|| own_left(within))),
        };
        let whole = b.word(self.unit());
        let unit = unit_left.map(|left| b.most(b.least(left, whole), b.word(0)));
        match (line_left, unit) {
            (None, unit) => unit,
            (Some(left), unit) => Some(b.choose(b.less(b.word(0), left), unit.unwrap_or(whole), b.word(0))),
        }
    }

    /// Copies units in the background.
    fn units<'c>(&self, g: &Gpu<'_, 'c>, thread: &ThreadCopy<'c>, stage: Stage<'c>, from: Index<'c>, to: Index<'c>) {
        let b = g.b;
        let (global, shared) = (self.steps()[0], self.shared_steps()[0]);
        let bytes = match self.element {
            Element::Half | Element::Narrow | Element::Tf32 => UNIT_BYTES,
            Element::Word => 4,
        };
        for number in 0..self.count() {
            let lines = number * self.line_step();
            let from = b.index_add(from, b.index(lines * global));
            let to = b.index_add(to, b.word(lines * shared));
            let counted = self.counted(b, thread, stage, b.word(lines));
            match counted {
                None => b.asm(Instruction::CopyAsync { bytes: bytes as u32 }, &[to.into(), from.into()]),
                Some(count) => {
                    let count = b.index_mul(count, b.word(bytes / self.unit()));
                    b.asm(Instruction::CopyAsyncFilled { bytes: bytes as u32 }, &[to.into(), from.into(), count.into()])
                }
            };
        }
    }

    /// Collects units of several elements by ordinary loads.
    fn collected<'c>(&self, g: &Gpu<'_, 'c>, thread: &ThreadCopy<'c>, stage: Stage<'c>, from: Index<'c>, to: Index<'c>) {
        let b = g.b;
        let (global, shared) = (self.steps()[0], self.shared_steps()[0]);
        let step = self.steps()[1] / self.unit();
        let lines = self.line_step();
        b.loop_over([b.word(0), b.word(self.count() * lines), b.word(lines)], &[], &mut |lines, _| {
            let from = b.index_add(from, b.index_mul(b.widen(lines), b.index(global)));
            let to = b.index_add(to, b.index_mul(lines, b.word(shared)));
            let counted = self.counted(b, thread, stage, lines);
            let load = |at| b.load_bits(at, self.element.bytes());
            let element = |k: i64| {
                let at = b.index_add(from, b.index(k * step));
                let Some(counted) = counted else { return load(at) };
                let counts = b.less(b.word(k), counted);
                b.choose(counts, load(b.choose(counts, at, thread.start)), b.word(0))
            };
            let word = |k: i64| match self.element {
                Element::Half | Element::Narrow => {
                    let upper = b.bits(IntBinary::Shl, element(2 * k + 1), b.word(16));
                    b.bits(IntBinary::Or, element(2 * k), upper).into()
                }
                Element::Tf32 | Element::Word => element(k).into(),
            };
            let words: Vec<_> = (0..UNIT_BYTES / 4).map(word).collect();
            b.store_shared(to, &words);
            vec![]
        });
    }
}
