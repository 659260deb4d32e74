//! Matrix products with fused pointwise ops, as register-blocked loops over packed operands (after Goto and van de
//! Geijn, 2008).
//!
//! A tile is a block of rows and columns of one product. Inside: for each block of contracted elements, copy what the
//! tile needs of the factors, then run the micro-kernel over row panels and column panels. A copy that the next tile
//! of the same range needs too is kept. What is numbered, and what threads get, are parts of tiles
//! ([`plan::BlockSizes::parts`]), computed together where a call has several; the rest of this module calls these
//! tiles too. Rows are divided into panels of two heights that differ by one, so no thin remainder is left; the last
//! column panel has constant masks. Where experts own rows or contracted elements, which ones is known at run time
//! only ([`experts`]).

mod context;
mod copies;
mod epilogue;
mod experts;
pub mod gpu;
mod micro;
mod pack;
pub mod plan;
mod prefetch;
pub mod product;
#[cfg(test)]
mod tests;
mod tile;
mod vector;

pub use vector::as_loops;

use crate::CompileError;
use crate::build::Builder;
use crate::build::llvm::{Llvm, Pointer};
use crate::layout::{Axis, div_ceil};
use crate::pointwise;
use crate::target::Target;
use context::Gemm;
use inkwell::values::FunctionValue;
use ir::kernel::Kernel;
use ir::op::{Binary, Op, Unary};
use micro::{PassPosition, Variant};
use plan::GemmPlan;
use prefetch::BlockPrefetch;
use product::ExpertDim;
use std::collections::BTreeMap;
use tile::{TileBuilder, TileCall};

/// Offsets of the parts of scratch, at multiples of 64 bytes.
struct GemmScratch {
    /// Copies of `A` and `B`.
    packed: [PackBuffer; 2],
    partials: i64,
    spill: i64,
    cells: i64,
    bytes: i64,
}

/// Memory for one packed copy of a factor, or for two, one after the other.
struct PackBuffer {
    start: i64,
    /// Bytes of one copy.
    bytes: i64,
}

impl GemmScratch {
    fn new(g: &Gemm) -> GemmScratch {
        let (plan, blocks) = (g.plan, &g.plan.blocks);
        let aligned = |elements: i64| div_ceil(4 * elements, 64) * 64;
        let copies = [(blocks.pack_a, blocks.most_panels() * blocks.packed_a()), (blocks.pack_b, blocks.tile_columns * blocks.packed_b())];
        let mut bytes = 0;
        let mut part = |count: i64, of: i64| {
            bytes += count * of;
            bytes - count * of
        };
        let packed = [0, 1].map(|factor| {
            let (is_copied, elements) = copies[factor];
            let of = if is_copied { aligned(elements) } else { 0 };
            let is_made_ahead = g.next[factor].as_ref().is_some_and(BlockPrefetch::is_copied);
            PackBuffer { start: part(1 + i64::from(is_made_ahead), of), bytes: of }
        });
        let partials = part(1, g.partials.map_or(0, |row_stride| aligned(blocks.most_panels() * blocks.tallest() * row_stride)));
        let spill = part(1, if g.long_epilogue { aligned(micro::spill_bytes(plan) / 4) } else { 0 });
        let cells = part(1, 64);
        GemmScratch { packed, partials, spill, cells, bytes }
    }
}

/// Whether an op takes more than a few instructions.
fn is_long(op: &Op) -> bool {
    match op {
        Op::Unary(unary) => {
            matches!(unary, Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Erf | Unary::Rsqrt | Unary::Sign)
        }
        Op::Binary(binary) => matches!(binary, Binary::Pow | Binary::Rem | Binary::Mix),
        Op::Uniform { .. } | Op::Iota(_) => true,
        _ => false,
    }
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Llvm, kernel: &Kernel, target: &Target, name: &str) -> Result<crate::Shape, CompileError> {
    let plan = GemmPlan::new(kernel, target)?;
    let passes = plan.passes();
    let partials = (passes != Some(1)).then(|| plan.blocks.partial_stride());
    let long_epilogue = kernel.body.nodes.iter().any(|n| is_long(&n.op));
    let mut g = Gemm { b, kernel, plan: &plan, target, partials, long_epilogue, next: [None, None] };
    g.next = [0, 1].map(|factor| BlockPrefetch::new(&g, factor));
    let scratch = GemmScratch::new(&g);
    let functions = GemmFunctions::new(&g, passes)?;
    let entry = b.kernel(name);
    let tensors: Vec<Pointer> =
        (0..kernel.inputs.len() + kernel.outputs.len()).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
    let tiles = TileBuilder { g: &g, functions: &functions, scratch: &scratch, tensors: &tensors, scalars: entry.scalars, area: entry.scratch };
    b.branch(b.index_equal(entry.first_tile, entry.begin), || tiles.begin(), || ());
    tiles.emit(&TileCall { first: entry.first_tile, end: entry.end_tile, begin: entry.begin, until: entry.until });
    b.finish_function();
    Ok(crate::Shape { tiles: plan.tiles() as u64, line: plan.line() as u64, scratch_bytes: scratch.bytes as u64 })
}

/// The functions of one kernel.
struct GemmFunctions<'c> {
    /// Panels of `A` by height, of `B` by width; empty where that factor is used in place.
    pack_a: BTreeMap<i64, FunctionValue<'c>>,
    pack_b: BTreeMap<i64, FunctionValue<'c>>,
    micro: BTreeMap<Variant, FunctionValue<'c>>,
    pass_positions: Vec<PassPosition>,
}

impl<'c> GemmFunctions<'c> {
    fn new(g: &Gemm<'_, 'c>, passes: Option<i64>) -> Result<Self, CompileError> {
        let (plan, blocks) = (g.plan, &g.plan.blocks);
        let of_rows = plan.owns(ExpertDim::Rows);
        let heights: Vec<i64> = match (of_rows, blocks.tall) {
            (true, _) => (1..=blocks.height).collect(),
            (false, 0) => vec![blocks.height],
            (false, _) => vec![blocks.height + 1, blocks.height],
        };
        let last = plan.panels(plan::KeptFactor::B as usize).after;
        let widths: Vec<i64> = if last != blocks.width && blocks.column_panels > 1 { vec![blocks.width, last] } else { vec![last] };
        let several = [
            PassPosition { resumes: false, finishes: false },
            PassPosition { resumes: true, finishes: false },
            PassPosition { resumes: true, finishes: true },
        ];
        let whole = PassPosition { resumes: false, finishes: true };
        let pass_positions = match passes {
            Some(1) => vec![whole],
            // An expert may have so few contracted elements that a single pass is both the first and the last.
            _ if plan.experts.is_some() => several.into_iter().chain([whole]).collect(),
            _ => several.to_vec(),
        };
        let panel = |name: &str, items, [out_stride, out_panel]: [i64; 2], axis: &Axis, tensor: usize| {
            let panel = pack::PackedPanel {
                name: format!("{name}_{items}"),
                bounded: of_rows && tensor == plan.a,
                lane: pointwise::stored(g.kernel.inputs[tensor].ty.dtype),
                items,
                out_stride,
                out_panel,
                item_stride: axis.strides[tensor],
                k_stride: plan.k.strides[tensor],
            };
            (items, pack::function(g.b, &panel))
        };
        // Rows of an expert are copied by one function, whose panels may have fewer rows than its height.
        let copied = if of_rows { vec![blocks.height] } else { heights.clone() };
        let pack_a = copied.iter().filter(|_| blocks.pack_a).map(|h| panel("rows", *h, [*h, blocks.packed_a()], &plan.m, plan.a)).collect();
        let pack_b =
            widths.iter().filter(|_| blocks.pack_b).map(|w| panel("columns", *w, [blocks.width, blocks.packed_b()], &plan.n, plan.b)).collect();
        let mut finish = BTreeMap::new();
        for &columns in widths.iter().filter(|_| g.long_epilogue) {
            finish.insert(columns, micro::finish(g, columns)?);
        }
        let mut micro = BTreeMap::new();
        for &rows in &heights {
            for &columns in &widths {
                for &pass in &pass_positions {
                    let variant = Variant { rows, columns, pass };
                    if let std::collections::btree_map::Entry::Vacant(slot) = micro.entry(variant) {
                        slot.insert(micro::function(g, variant, finish.get(&columns).copied())?);
                    }
                }
            }
        }
        Ok(GemmFunctions { pack_a, pack_b, micro, pass_positions })
    }
}
