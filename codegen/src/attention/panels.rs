//! What the forward pass computes of a panel of queries: exponentials of its scores, and values weighted with them.
//!
//! Scores are exponents of two, as queries are copied times the scale and log2(e). Exponentials are taken as soon as
//! a strip's scores are there, relative to a reference of each query. Any reference does, as sums, weights and
//! exponentials carry the same factor: it is the greatest score when it was last raised, which happens only where a
//! score is above it by more than [`MARGIN`].

use super::tiles::{self, Factors, RegisterBlock, StoreMode, across, multiply, store_sums};
use super::{AttentionPlan, MaskedScores, ScorePosition, div_ceil};
use crate::build::llvm::{Index, Llvm, Pointer, Visibility};
use crate::build::{Builder, Compare, Lane};
use crate::math;
use crate::target::Target;
use inkwell::values::FunctionValue;
use std::f64::consts::LOG2_E;

/// Queries of a tile at least, if there are as many: they share copies of keys and values.
const TILE: i64 = 256;
/// Tiles to aim for: eight threads have two each.
const TILES: i64 = 16;
/// Keys of a block at most.
const KEYS: i64 = 128;
/// Stands for a hidden score: lower than any reference, so its exponential is zero.
const HIDDEN: f64 = -1e30;
/// The reference of a query that has seen no key: above what is hidden, below all else.
pub const NOTHING: f64 = -5e29;
/// Largest exponent, to base 2, of an exponential: sums stay far from infinity, and underflow loses less than 2^-(126
/// - MARGIN) of the greatest one.
const MARGIN: f64 = 32.0;

/// How queries and keys are divided.
#[derive(Clone, Copy)]
pub struct Division {
    /// Panels of queries, the first `tall` of them of `height + 1` rows, the others of `height`.
    pub panels: i64,
    pub height: i64,
    pub tall: i64,
    /// Runs of panels that are tiles.
    pub runs: i64,
    /// Keys of a block, and of a strip, whose scores a panel has in registers.
    pub block: i64,
    pub strip: i64,
    /// Columns of a panel of values.
    pub columns: i64,
}

impl Division {
    pub fn new(plan: &AttentionPlan, target: &Target) -> Division {
        let lanes = target.lanes() as i64;
        let panels = div_ceil(plan.queries, tiles::tallest(target.registers, 2));
        let strip = 2 * lanes;
        // A tile with more queries needs fewer copies of keys and values. Its queries and sums may fill half of the
        // L2 cache, unless that leaves too few tiles.
        let most = (i64::from(target.l2_bytes) / 2 / (4 * (plan.d.width + plan.values.width))).max(TILE);
        let enough = div_ceil(TILES, plan.sizes(&plan.heads())).min(div_ceil(plan.queries, TILE));
        Division {
            panels,
            height: plan.queries / panels,
            tall: plan.queries % panels,
            runs: div_ceil(plan.queries, most).max(enough),
            block: KEYS.min(div_ceil(plan.keys, strip) * strip),
            strip,
            columns: lanes * tiles::vectors_abreast(plan.values.width, lanes),
        }
    }

    /// Panels of a tile at most.
    pub fn tile_panels(&self) -> i64 {
        div_ceil(self.panels, self.runs)
    }

    /// Rows of a panel at most.
    pub fn tallest(&self) -> i64 {
        self.height + i64::from(self.tall > 0)
    }

    pub fn strips(&self) -> i64 {
        self.block / self.strip
    }

    /// The first row of a panel.
    pub fn row<'c>(&self, b: &Llvm<'c>, panel: Index<'c>) -> Index<'c> {
        b.index_add(b.index_mul(panel, b.index(self.height)), b.index_min(panel, b.index(self.tall)))
    }

    /// Splits the panels `first..end` of a run by height, the taller ones first.
    pub fn by_height<'c>(&self, b: &Llvm<'c>, [first, end]: [Index<'c>; 2]) -> Vec<[Index<'c>; 2]> {
        let tall = b.index(self.tall);
        let all = [[first, b.index_min(end, tall)], [b.index_max(first, tall), end]];
        all.into_iter().skip(usize::from(self.tall == 0)).collect()
    }
}

/// The functions for panels of one height.
pub struct PanelFunctions<'c> {
    /// `(q, k, p, sums, reference, weight, operands of the program; query, key, keys' end, column)`: exponentials
    /// of a strip of keys go to the panel's rows of `block` at `p`, from `column` on; their sums are added to
    /// `weight`, by lanes.
    pub exponentials: FunctionValue<'c>,
    /// The same with a mask.
    pub exponentials_masked: FunctionValue<'c>,
    /// `(p, v, sums; keys)`: adds the values of so many keys.
    pub weigh: FunctionValue<'c>,
}

/// Reduces the values to one, pair by pair.
fn joined<T: Copy>(mut values: Vec<T>, join: impl Fn(T, T) -> T) -> T {
    while values.len() > 1 {
        values = values.chunks(2).map(|pair| pair[1..].iter().fold(pair[0], |x, y| join(x, *y))).collect();
    }
    values[0]
}

/// The functions of one kernel.
pub struct PanelBuilder<'a, 'c> {
    pub b: &'a Llvm<'c>,
    pub plan: &'a AttentionPlan<'a>,
    pub division: Division,
}

impl<'c> PanelBuilder<'_, 'c> {
    /// The functions for panels of `rows` rows.
    pub fn of(&self, rows: i64) -> PanelFunctions<'c> {
        let raise = self.raise(rows);
        PanelFunctions {
            exponentials: self.exponentials(rows, raise, false),
            exponentials_masked: self.exponentials(rows, raise, true),
            weigh: self.weigh(rows),
        }
    }

    fn exponentials(&self, rows: i64, raise: FunctionValue<'c>, masked: bool) -> FunctionValue<'c> {
        let (b, plan, division) = (self.b, self.plan, &self.division);
        let lanes = b.lanes() as i64;
        let name = if masked { "exponentials_masked" } else { "exponentials" };
        let further = plan.program.operands.len() as u32;
        let function = b.function(&format!("{name}_{rows}"), 6 + further as usize, 4, Visibility::Local);
        let [q, k, p, sums, reference, weight] = [0, 1, 2, 3, 4, 5].map(|i| b.pointer_parameter(function, i));
        let bases: Vec<Pointer> = (0..further).map(|i| b.pointer_parameter(function, 6 + i)).collect();
        let [query, key, end, column] = [6, 7, 8, 9].map(|i| b.index_parameter(function, further + i));
        let block = RegisterBlock { rows, vectors: division.strip / lanes };
        let factors = Factors { a: (plan.d.width, 1), b_row: division.strip, unroll: if plan.d.d % 4 == 0 { 4 } else { 1 } };
        let mut scores = multiply(b, block, &factors, b.index(plan.d.d), [q, k]);
        if masked || plan.program.changes() {
            for (row, scores) in scores.chunks_mut(block.vectors as usize).enumerate() {
                let query = b.index_add(query, b.index(row as i64));
                for (first, product) in (0..).step_by(lanes as usize).zip(scores) {
                    let position = ScorePosition { query, key: b.index_add(key, b.index(first)), end: masked.then_some(end) };
                    let MaskedScores { score, mask, .. } = plan.scored(b, &bases, position, *product);
                    let score = if plan.program.changes() { b.mul(score, b.f32(LOG2_E)) } else { score };
                    *product = mask.map_or(score, |mask| b.select(mask, score, b.f32(HIDDEN)));
                }
            }
        }
        let reference_of = |reference: Pointer<'c>| b.load_splat(reference, Lane::F32);
        let above = scores.chunks(block.vectors as usize).enumerate().map(|(row, scores)| {
            let greatest = joined(scores.to_vec(), |x, y| b.max(x, y));
            b.sub(greatest, reference_of(b.at_const(reference, 4 * row as i64)))
        });
        let above = joined(above.collect(), |x, y| b.max(x, y));
        let strip = b.at(p, b.index_mul(column, b.index(4)));
        store_sums(b, block, StoreMode::Store, (strip, division.block), &scores);
        let too_far =
            ir::fault!("attention.raise.never", b.index_equal(column, b.index(0)), b.any(b.compare_float(Compare::Gt, above, b.f32(MARGIN))));
        b.branch(too_far, || b.call(raise, &[p, sums, reference, weight], &[column]), || ());
        // Exponentials are computed row by row from memory, because the registers are full of scores.
        b.for_each(b.index(0), b.index(rows), 1, &mut |row| {
            let query = b.index_add(query, row);
            let line = |start: Pointer<'c>, elements: i64| b.at(start, b.index_mul(row, b.index(4 * elements)));
            let (strip, weight, reference) = (line(strip, division.block), line(weight, lanes), reference_of(line(reference, 1)));
            let mut sum = b.load(weight, Lane::F32, None);
            for first in (0..division.strip).step_by(lanes as usize) {
                let place = b.at_const(strip, 4 * first);
                let value = math::exp2(b, b.sub(b.load(place, Lane::F32, None), reference));
                let position = ScorePosition { query, key: b.index_add(key, b.index(first)), end: masked.then_some(end) };
                let counted = plan.weight(b, &bases, position).map_or(value, |weight| b.mul(value, weight));
                b.store(place, counted, Lane::F32, None);
                sum = b.add(sum, ir::fault!("attention.weight.sum", counted, value));
            }
            b.store(weight, sum, Lane::F32, None);
        });
        b.finish_function();
        function
    }

    /// A function `(p, sums, reference, weight; column)`: raises references to the greatest scores of a strip, which
    /// lie at `p` from `column` on, and rescales what was computed before.
    fn raise(&self, rows: i64) -> FunctionValue<'c> {
        let (b, plan, division) = (self.b, self.plan, &self.division);
        let lanes = b.lanes() as i64;
        let function = b.function(&format!("raise_{rows}"), 4, 1, Visibility::Local);
        let [p, sums, reference, weight] = [0, 1, 2, 3].map(|i| b.pointer_parameter(function, i));
        let column = b.index_parameter(function, 4);
        b.for_each(b.index(0), b.index(rows), 1, &mut |row| {
            let line = |start: Pointer<'c>, elements: i64| b.at(start, b.index_mul(row, b.index(4 * elements)));
            let (p, reference) = (line(p, division.block), line(reference, 1));
            let strip = b.at(p, b.index_mul(column, b.index(4)));
            let scores = (0..division.strip).step_by(lanes as usize).map(|first| b.load(b.at_const(strip, 4 * first), Lane::F32, None));
            let before = b.load_splat(reference, Lane::F32);
            let greatest = across(b, joined(scores.collect(), |x, y| b.max(x, y)), |x, y| b.max(x, y));
            let greatest = b.max(greatest, before);
            let factor = math::exp2(b, b.sub(before, greatest));
            b.store_first(reference, greatest, Lane::F32);
            let rescale = |start: Pointer<'c>, elements: Index<'c>| {
                b.for_each(b.index(0), elements, lanes, &mut |i| {
                    let place = b.at(start, b.index_mul(i, b.index(4)));
                    b.store(place, b.mul(b.load(place, Lane::F32, None), factor), Lane::F32, None);
                });
            };
            rescale(p, ir::fault!("attention.raise.exponentials", b.index(0), column));
            rescale(line(sums, plan.values.width), b.index(ir::fault!("attention.raise.sums", 0, plan.values.width)));
            rescale(line(weight, lanes), b.index(ir::fault!("attention.raise.weight", 0, lanes)));
        });
        b.finish_function();
        function
    }

    fn weigh(&self, rows: i64) -> FunctionValue<'c> {
        let (b, plan, division) = (self.b, self.plan, &self.division);
        let function = b.function(&format!("weigh_{rows}"), 3, 1, Visibility::Local);
        let [p, v, sums] = [0, 1, 2].map(|i| b.pointer_parameter(function, i));
        let keys = b.index_parameter(function, 3);
        let block = RegisterBlock { rows, vectors: division.columns / b.lanes() as i64 };
        let factors = Factors { a: (division.block, 1), b_row: division.columns, unroll: 4 };
        b.for_each(b.index(0), b.index(plan.values.width), division.columns, &mut |column| {
            let v = b.at(v, b.index_mul(column, b.index(4 * division.block)));
            let sums = b.at(sums, b.index_mul(column, b.index(4)));
            store_sums(
                b,
                block,
                StoreMode::Add,
                (sums, plan.values.width),
                &multiply(b, block, &factors, ir::fault!("attention.weigh.keys", b.index_sub(keys, b.index(4)), keys), [p, v]),
            );
        });
        b.finish_function();
        function
    }
}
