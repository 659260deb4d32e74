//! How long a kernel takes by itself.
//!
//! A matrix product takes waves of tiles, as many at a time as there are multiprocessors; a tile as long as its
//! contracted elements, and some more in which it begins and ends. Attention has a rate of its own. All other kernels,
//! and these at least, take as long as their bytes. This is how Calculon (Isaev et al., 2023) and the roofline of
//! Williams et al. (2009) see a kernel, with waves as NVIDIA's guide to matrix products describes them.

use crate::cost::{Cause, Cost};
use crate::machine::Machine;
use ir::dim::Dim;
use ir::kernel::{Family, Kernel};
use ir::op::{DType, Op};
use ir::program::Space;
use ir::tiles::ProductSize;
use ir::work::Work;

/// A matrix product of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub shape: ProductSize,
    /// Elements that each result sums over.
    pub contracted: u64,
    pub factors: DType,
    pub tf32: bool,
}

impl Product {
    /// That of a kernel of the family of products.
    pub fn of(kernel: &Kernel) -> Option<Product> {
        let body = &kernel.body;
        let v = body.values().find(|v| matches!(body[*v].op, Op::Dot { .. } | Op::GroupedDot { .. }))?;
        let node = &body[v];
        let [a, b] = [0, 1].map(|k| body.dims_of(node.args[k]));
        let size = |of: &[Dim], keep: &dyn Fn(&Dim) -> bool| of.iter().filter(|d| keep(d)).map(|d| body.dims.size(*d)).fold(1, u64::saturating_mul);
        let factors = body[node.args[0]].ty.dtype;
        Some(match &node.op {
            Op::GroupedDot { rows, experts, over, .. } => {
                let others = |of: &[Dim], other: &[Dim]| size(of, &|d| !over.contains(d) && d != rows && d != experts && !other.contains(d));
                let (count, summed) = (body.dims.size(*experts), size(a, &|d| over.contains(d) && d != rows && d != experts));
                if over.contains(rows) {
                    // Each expert's gradient sums over its own rows.
                    let shape = ProductSize { repeats: count, rows: others(a, b), columns: others(b, a), more: 0 };
                    Product { shape, contracted: (body.dims.size(*rows) / count.max(1)).max(1), factors, tf32: false }
                } else {
                    let shape = ProductSize { repeats: 1, rows: body.dims.size(*rows), columns: others(b, a), more: count - 1 };
                    Product { shape, contracted: summed, factors, tf32: false }
                }
            }
            Op::Dot { over, tf32 } => {
                let kept = |of: &[Dim], other: &[Dim]| size(of, &|d| !over.contains(d) && !other.contains(d));
                let repeats = size(a, &|d| !over.contains(d) && b.contains(d));
                let shape = ProductSize { repeats, rows: kept(a, b), columns: kept(b, a), more: 0 };
                Product { shape, contracted: over.iter().map(|d| body.dims.size(*d)).product(), factors, tf32: *tf32 }
            }
            _ => unreachable!("invariant: it was found by its op"),
        })
    }
}

/// Seconds of a product in tiles of these sizes, `peak` operations a second being shared by `multiprocessors`.
pub fn product(machine: &Machine, p: &Product, threads: u64) -> f64 {
    let Product { shape, contracted, .. } = p;
    let products = &machine.device.products;
    let peak = machine.peak(p.factors, p.tf32) * products.efficiency.value * threads as f64;
    let multiprocessors = machine.device.multiprocessors.value;
    let in_tiles = |(rows, columns, rate): (u64, u64, f64)| {
        let tiles = shape.repeats as f64 * (shape.rows.div_ceil(rows) + shape.more) as f64 * shape.columns.div_ceil(columns) as f64;
        let waves = tiles / multiprocessors;
        let waves = waves + products.tail.value * (waves.ceil() - waves);
        let each = 2.0 * (rows * columns) as f64 * (*contracted as f64 + products.depth.value);
        waves * each * multiprocessors / (peak * rate)
    };
    let own = |t: &ir::tiles::TileSize| (t.rows, t.columns, t.rate as f64 / 100.0);
    let least = |times: &mut dyn Iterator<Item = f64>| times.min_by(f64::total_cmp);
    let found = match (&products.tiles, machine.generation()) {
        (Some(tiles), _) => least(&mut tiles.sizes.iter().map(|t| in_tiles(*t))),
        (None, Some(generation)) => least(&mut generation.tiles(p.factors, p.tf32).iter().map(|t| in_tiles(own(t)))),
        (None, None) => None,
    };
    found.unwrap_or_else(|| {
        let ProductSize { repeats, rows, columns, .. } = *shape;
        2.0 * (repeats as f64) * (rows as f64) * (columns as f64) * (*contracted as f64 + products.depth.value) / peak
    })
}

/// Seconds of a launch on its own. `threads` are those of a rank, of CPUs.
pub fn launch(machine: &Machine, kernel: &Kernel, threads: u64) -> Cost {
    if let Some(measured) = machine.kernels.get(&kernel.name()) {
        let cause = match kernel.family {
            Family::Gemm => Cause::Product,
            Family::Attention | Family::AttentionGrad => Cause::Attention,
            Family::Loops { .. } | Family::Scatter => Cause::Memory,
        };
        return Cost::new(cause, measured.value);
    }
    let work = Work::needed(kernel);
    if kernel.on == Space::Host {
        return Cost::new(Cause::Host, work.bytes as f64 / machine.host.bytes_per_second.value);
    }
    let memory = &machine.device.memory;
    let of_bytes = work.bytes as f64 / (memory.bytes_per_second.value * memory.efficiency.value);
    let attention = |rate: f64, operations: f64| {
        let half = kernel.inputs.iter().any(|i| i.ty.dtype.is_half());
        let peak = machine.peak(if half { DType::Bf16 } else { DType::F32 }, false);
        operations / (peak * threads as f64 * rate)
    };
    let rates = &machine.device.attention;
    let (cause, of_arithmetic) = match kernel.family {
        Family::Gemm => (Cause::Product, Product::of(kernel).map_or(0.0, |p| product(machine, &p, threads))),
        Family::Attention => (Cause::Attention, attention(rates.forward.value, work.flops as f64)),
        // Scores are computed again: a product more than the four of which `Work` tells.
        Family::AttentionGrad => (Cause::Attention, attention(rates.backward.value, work.flops as f64 * 1.25)),
        Family::Loops { .. } | Family::Scatter => (Cause::Memory, 0.0),
    };
    let busy = if of_arithmetic >= of_bytes { Cost::new(cause, of_arithmetic) } else { Cost::new(Cause::Memory, of_bytes) };
    busy.and(Cause::Launch, machine.device.launch.value)
}
