//! The parts of tiles: each is one product.

use super::super::epilogue::Epilogue;
use super::super::product::{ExpertDim, Experts, Product};
use super::tile::TileConfig;
use crate::build::block::Index;
use crate::build::simt::{Pointer, Simt, Value};
use crate::build::{Builder, IntBinary};
use crate::layout::{Axis, tensors};
use crate::{CompileError, pointwise};
use ir::kernel::Kernel;

/// Tiles of rows that are computed at about the same time, with all their columns, for each team.
const GROUP: i64 = 8;

/// What the parts of a kernel under construction share.
pub struct Gpu<'a, 'c> {
    pub b: &'a Simt<'c>,
    pub kernel: &'a Kernel,
    pub product: &'a Product,
    pub tile: &'a TileConfig,
    /// Tiles of rows that follow one another and go through the same parts: those of a cluster.
    pub together: i64,
}

/// A part of a tile that is one product: rows `from..to`, contracted elements `k_from..k_to`. All but `outer` have 32
/// bits. A part of which only another tile of its cluster has rows has none.
pub struct TilePart<'c> {
    /// The tile's first row and column.
    pub row: Index<'c>,
    pub column: Index<'c>,
    pub from: Index<'c>,
    pub to: Index<'c>,
    pub k_from: Index<'c>,
    pub k_to: Index<'c>,
    /// Which repetition of the product it is, and the first element of every tensor there.
    pub outer: Index<'c>,
    /// The expert whose rows they are, or the last one where they are nobody's.
    pub expert: Option<Index<'c>>,
    /// Whether it is the tile's last part, one bit.
    pub is_last: Index<'c>,
    pub starts: Vec<Pointer<'c>>,
}

/// Writes the code for each part of a tile.
pub type WritePart<'a, 'c> = dyn FnMut(&TilePart<'c>) -> Result<(), CompileError> + 'a;

/// Writes the code for contracted elements of a part, those of all repetitions or of the one with this number: maps
/// the carried values to the next ones.
pub type WriteSpan<'a, 'c> = dyn FnMut(&TilePart<'c>, Option<Index<'c>>, Vec<Value<'c>>) -> Vec<Value<'c>> + 'a;

impl<'c> Gpu<'_, 'c> {
    pub fn bytes(&self, tensor: usize) -> i64 {
        pointwise::stored(tensors(self.kernel)[tensor].0.dtype).bytes()
    }

    /// One tile, part by part; numbers count those of a group of rows first. `each` is written once.
    pub fn tile(&self, number: Index<'c>, tensors: &[Pointer<'c>], each: &mut WritePart<'_, 'c>) -> Result<(), CompileError> {
        let (b, product, tile) = (self.b, self.product, self.tile);
        let [rows, columns] = tile.grid(product);
        let (outer, number) = (b.index_div(number, b.word(rows * columns)), b.index_rem(number, b.word(rows * columns)));
        let most = GROUP * tile.teams;
        let (group, within) = (b.index_div(number, b.word(most * columns)), b.index_rem(number, b.word(most * columns)));
        let first = b.index_mul(group, b.word(most));
        let height = b.least(b.word(most), b.index_sub(b.word(rows), first));
        let row = b.index_mul(b.index_add(first, b.index_rem(within, height)), b.word(tile.rows));
        let column = b.index_mul(b.index_div(within, height), b.word(tile.columns));
        let outer = b.widen(outer);
        let starts: Vec<Pointer> = (0..tensors.len()).map(|t| self.shifted(tensors[t], outer, &product.outer, t)).collect();
        let end = b.least(b.index_add(row, b.word(tile.rows)), b.word(product.m.size));
        let (none, all) = (b.word(0), b.word(product.k.size));
        let whole = TilePart { row, column, from: row, to: end, k_from: none, k_to: all, outer, expert: None, is_last: b.equal(none, none), starts };
        match &product.experts {
            Some(experts) if experts.own == ExpertDim::Rows => self.rows_of_experts(experts, &whole, each),
            Some(_) | None => each(&whole),
        }
    }

    /// `start` moved to the repetition `number` of `axes`, whose last is the fastest.
    pub fn shifted(&self, start: Pointer<'c>, number: Index<'c>, axes: &[Axis], tensor: usize) -> Pointer<'c> {
        let b = self.b;
        let (mut place, mut rest) = (start, number);
        for axis in axes.iter().rev() {
            let digit = b.index_rem(rest, b.index(axis.size));
            rest = b.index_div(rest, b.index(axis.size));
            place = b.at(place, b.index_mul(digit, b.index(self.bytes(tensor) * axis.strides[tensor])));
        }
        place
    }

    /// What an expert, whose end is at `end`, owns of `size`: from the end of the one before to its own.
    pub fn owned(&self, experts: &Experts, end: Pointer<'c>, expert: Index<'c>, size: i64) -> [Index<'c>; 2] {
        let b = self.b;
        let is_first = b.equal(expert, b.word(0));
        let back = b.choose(is_first, b.index(0), b.index(-4 * experts.axis.strides[experts.ends]));
        let read = |at| b.least(b.load_splat(at, crate::build::Lane::I32).into_int_value(), b.word(size));
        let from = b.choose(is_first, b.word(0), read(b.at(end, back)));
        [from, b.most(from, read(end))]
    }

    /// A tile of rows: those of every expert with its factor, then those of nobody, without any contracted element.
    /// Tiles of a cluster go through the experts of all of their rows.
    pub fn rows_of_experts(&self, experts: &Experts, whole: &TilePart<'c>, each: &mut WritePart<'_, 'c>) -> Result<(), CompileError> {
        let (b, product) = (self.b, self.product);
        let count = experts.axis.size;
        let all_rows = self.together * self.tile.rows;
        let first = b.index_sub(whole.row, b.index_rem(whole.row, b.word(all_rows)));
        let end = b.least(b.index_add(first, b.word(all_rows)), b.word(product.m.size));
        let mut result = Ok(());
        b.loop_over([b.word(0), b.word(count + 1), b.word(1)], &[], &mut |number, _| {
            let nobody = b.equal(number, b.word(count));
            let expert = b.least(number, b.word(count - 1));
            let moved = |tensor: usize| {
                let step = b.index(self.bytes(tensor) * experts.axis.strides[tensor]);
                b.at(whole.starts[tensor], b.index_mul(b.widen(expert), step))
            };
            let [from, to] = self.owned(experts, moved(experts.ends), expert, product.m.size);
            let (from, to) = (b.choose(nobody, to, from), b.choose(nobody, ir::fault!("gpu.experts.nobody", to, b.word(product.m.size)), to));
            let (from, to) = (b.most(from, first), b.least(to, end));
            let k_to = b.choose(nobody, b.word(0), whole.k_to);
            let mut starts = whole.starts.clone();
            starts[product.b] = moved(product.b);
            let is_some = b.less(from, to);
            let is_last = b.equal(to, end);
            let (from, to) = (b.most(from, whole.from), b.least(to, whole.to));
            let part = TilePart { from, to, k_to, expert: Some(expert), is_last, starts, ..*whole };
            b.if_so(is_some, || result = each(&part));
            vec![]
        });
        result
    }

    /// How often the contracted elements are repeated.
    pub fn repeats(&self) -> i64 {
        self.product.outer_k.iter().map(|x| x.size).product()
    }

    /// Goes through the contracted elements of a part: through all of them at once, or, where experts own them,
    /// through those of the part's expert in one repetition after the other. `carried` goes along. `each` is written
    /// once.
    pub fn spans(&self, part: &TilePart<'c>, carried: Vec<Value<'c>>, each: &mut WriteSpan<'_, 'c>) -> Vec<Value<'c>> {
        let (b, product) = (self.b, self.product);
        let experts = product.experts.as_ref().filter(|x| x.own == ExpertDim::Contracted);
        let Some(experts) = experts else { return each(part, None, carried) };
        // The elements that an expert owns may differ among repetitions.
        b.loop_over([b.word(0), b.word(self.repeats()), b.word(1)], &carried, &mut |repeat, carried| {
            let of_expert = product.repeats() / experts.axis.size;
            let expert = b.narrow(b.index_div(part.outer, b.index(of_expert)));
            // `starts` already points at the end of this expert, as experts are repetitions of the product.
            let end = self.shifted(part.starts[experts.ends], b.widen(repeat), &product.outer_k, experts.ends);
            let [k_from, k_to] = self.owned(experts, end, expert, product.k.size);
            let is_last = b.bits(IntBinary::And, part.is_last, b.equal(repeat, b.word(self.repeats() - 1)));
            let part = TilePart { k_from, k_to, is_last, starts: part.starts.clone(), ..*part };
            each(&part, Some(repeat), carried.to_vec())
        })
    }

    /// What follows the product, in a part from `column` on.
    pub fn epilogue<'e>(&'e self, part: &TilePart<'c>, column: Index<'c>, scalars: Pointer<'c>) -> Epilogue<'e, Simt<'c>> {
        let (b, product) = (self.b, self.product);
        let (row, column) = (b.widen(part.row), b.widen(column));
        let place = |(tensor, start): (usize, &Pointer<'c>)| {
            let bytes = |stride: i64| b.index(self.bytes(tensor) * stride);
            let down = b.at(*start, b.index_mul(row, bytes(product.m.strides[tensor])));
            b.at(down, b.index_mul(column, bytes(product.n.strides[tensor])))
        };
        let tensors = part.starts.iter().enumerate().map(place).collect();
        Epilogue { b, kernel: self.kernel, product, scalars, tensors, row, column, outer: part.outer, runs: None }
    }
}
