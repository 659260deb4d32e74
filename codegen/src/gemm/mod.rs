//! Matrix products with fused pointwise ops, as register-blocked loops over packed operands (after Goto and van de Geijn, 2008).
//!
//! A tile is a block of rows and columns of one product. Inside: for each block of contracted elements, copy what the tile needs of the
//! factors, then run the micro-kernel over row panels and column panels. A copy that the next tile of the same call needs too is kept. Rows are divided into panels of two heights that differ by one, so
//! no thin remainder is left; the last column panel has constant masks. Where experts own rows or contracted elements, which ones is known at run
//! time only ([`experts`]).

mod epilogue;
mod experts;
pub mod gpu;
mod micro;
mod next;
mod pack;
pub mod plan;
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
use inkwell::values::FunctionValue;
use ir::kernel::Kernel;
use ir::op::{Binary, Op, Unary};
use micro::{Stage, Variant};
use next::Next;
use plan::Plan;
use product::Own;
use std::collections::BTreeMap;
use tile::Tile;

/// What the parts of a kernel under construction share.
pub struct Gemm<'a, 'c> {
    pub b: &'a Llvm<'c>,
    pub kernel: &'a Kernel,
    pub plan: &'a Plan,
    /// The row stride of the sums of a tile that wait in scratch between blocks of contracted elements. With one block they never leave registers.
    pub partials: Option<i64>,
    /// The ops after the product are many: they are written as a loop over rows.
    pub long_epilogue: bool,
    /// How the next blocks of `A` and `B` are brought near, of those that are copied and have one.
    pub next: [Option<Next>; 2],
}

impl Gemm<'_, '_> {
    /// Bytes of an element of a tensor in memory.
    pub fn bytes(&self, tensor: usize) -> i64 {
        let kernel = self.kernel;
        let ty = match kernel.inputs.get(tensor) {
            Some(input) => &input.ty,
            None => &kernel.body[kernel.outputs[tensor - kernel.inputs.len()].value].ty,
        };
        pointwise::stored(ty.dtype).bytes()
    }

    fn next_blocks(&self) -> [Option<Next>; 2] {
        let (plan, blocks) = (self.plan, &self.plan.blocks);
        let rows = blocks.most_panels().min(blocks.panels) * blocks.tallest();
        let strides = |axis: &Axis, tensor: usize| [axis.strides[tensor], plan.k.strides[tensor]];
        let a = blocks.pack_a.then(|| Next::new(self, plan.a, rows, strides(&plan.m, plan.a)));
        let b = blocks.pack_b.then(|| Next::new(self, plan.b, blocks.tile_columns * blocks.width, strides(&plan.n, plan.b)));
        [a.flatten(), b.flatten()]
    }
}

/// Bytes of scratch by part; each part starts at a multiple of 64.
struct Scratch {
    packed_a: i64,
    partials: i64,
    spill: i64,
    /// What experts' tiles remember.
    cells: i64,
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
    let plan = Plan::new(kernel, target)?;
    let blocks = &plan.blocks;
    let passes = plan.passes();
    let partials = (passes != Some(1)).then(|| blocks.partial_stride());
    let mut g = Gemm { b, kernel, plan: &plan, partials, long_epilogue: kernel.body.nodes.iter().any(|n| is_long(&n.op)), next: [None, None] };
    g.next = g.next_blocks();

    let aligned = |elements: i64| div_ceil(4 * elements, 64) * 64;
    let packed_a = if blocks.pack_b { aligned(blocks.tile_columns * blocks.packed_b()) } else { 0 };
    let partial_start = packed_a + if blocks.pack_a { aligned(blocks.most_panels() * blocks.packed_a()) } else { 0 };
    let partial_bytes = partials.map_or(0, |row_stride| aligned(blocks.most_panels() * blocks.tallest() * row_stride));
    let spill = partial_start + partial_bytes;
    let spill_bytes = if g.long_epilogue { aligned(micro::spill_bytes(&plan) / 4) } else { 0 };
    let cells = spill + spill_bytes;
    let cell_bytes = if plan.experts.is_some() { 64 } else { 0 };
    let scratch = Scratch { packed_a, partials: partial_start, spill, cells, bytes: cells + cell_bytes };

    let functions = Functions::new(&g, passes)?;
    let entry = b.kernel(name);
    let tensors: Vec<Pointer> =
        (0..kernel.inputs.len() + kernel.outputs.len()).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
    let tiles = Tile { g: &g, functions: &functions, scratch: &scratch, tensors: &tensors, scalars: entry.scalars, area: entry.scratch };
    tiles.begin();
    tiles.emit(entry.first_tile, entry.end_tile);
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
    fn new(g: &Gemm<'_, 'c>, passes: Option<i64>) -> Result<Self, CompileError> {
        let (plan, blocks) = (g.plan, &g.plan.blocks);
        let of_rows = plan.owns(Own::Rows);
        let heights: Vec<i64> = match (of_rows, blocks.tall) {
            (true, _) => (1..=blocks.height).collect(),
            (false, 0) => vec![blocks.height],
            (false, _) => vec![blocks.height + 1, blocks.height],
        };
        let last = plan.n.size - (blocks.column_panels - 1) * blocks.width;
        let widths: Vec<i64> = if last != blocks.width && blocks.column_panels > 1 { vec![blocks.width, last] } else { vec![last] };
        let several = [Stage { resumes: false, finishes: false }, Stage { resumes: true, finishes: false }, Stage { resumes: true, finishes: true }];
        let whole = Stage { resumes: false, finishes: true };
        let stages = match passes {
            Some(1) => vec![whole],
            // An expert may have nothing to add, or little.
            _ if plan.experts.is_some() => several.into_iter().chain([whole]).collect(),
            _ => several.to_vec(),
        };
        let panel = |name: &str, items, [out_stride, out_panel]: [i64; 2], axis: &Axis, tensor: usize| {
            let panel = pack::Panel {
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
        // Rows of an expert are copied as panels of one height, of which the last may have fewer.
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
                for &stage in &stages {
                    let variant = Variant { rows, columns, stage };
                    if let std::collections::btree_map::Entry::Vacant(slot) = micro.entry(variant) {
                        slot.insert(micro::function(g, variant, finish.get(&columns).copied())?);
                    }
                }
            }
        }
        Ok(Functions { pack_a, pack_b, micro, stages })
    }
}
