//! How long a kernel takes by itself.
//!
//! A matrix product takes waves of tiles, as many at a time as there are multiprocessors; a tile as long as its
//! contracted elements, and some more in which it begins and ends. Attention has a rate of its own. All other
//! kernels, and these at least, take as long as their bytes. This is how Calculon (Isaev et al., 2023) and the
//! roofline of Williams et al. (2009) see a kernel, with waves as NVIDIA's guide to matrix products describes them.

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
    /// Repetitions, rows and columns of the result.
    pub shape: ProductSize,
    /// Elements that each result sums over.
    pub contracted: u64,
    /// Dtype of the left factor, by which the peak rate is taken.
    pub factors: DType,
    /// Whether f32 factors are rounded to tf32.
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
            Op::GroupedDot { rows, experts, over, tf32, .. } => {
                let others = |of: &[Dim], other: &[Dim]| size(of, &|d| !over.contains(d) && d != rows && d != experts && !other.contains(d));
                let (count, summed) = (body.dims.size(*experts), size(a, &|d| over.contains(d) && d != rows && d != experts));
                if over.contains(rows) {
                    // Each expert's gradient sums over its own rows.
                    let shape = ProductSize { repeats: count, rows: others(a, b), columns: others(b, a), more: 0 };
                    let own = (body.dims.size(*rows) / count.max(1)).max(1);
                    Product { shape, contracted: own * summed, factors, tf32: *tf32 }
                } else {
                    let shape = ProductSize { repeats: 1, rows: body.dims.size(*rows), columns: others(b, a), more: count - 1 };
                    Product { shape, contracted: summed, factors, tf32: *tf32 }
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

/// Seconds of a product. `threads` are those of a rank, of CPUs.
pub fn product(machine: &Machine, p: &Product, threads: u64) -> Cost {
    let Product { shape, contracted, .. } = p;
    let products = &machine.device.products;
    let peak = machine.peak(p.factors, p.tf32) * products.efficiency.value * threads as f64;
    let (depth, contracted) = (products.depth.value, *contracted as f64);
    // The product takes the time of `tiles` tiles, and that of `idle` more in waves that are not full.
    let cost = |tiles: f64, idle: f64, operations: f64, rate: f64| {
        let each = |elements: f64| 2.0 * operations * elements / (peak * rate);
        let full = Cost::new(Cause::Product, tiles * each(contracted)).and(Cause::Depth, tiles * each(depth));
        full.and(Cause::Tail, idle * each(contracted)).and(Cause::DepthOfTail, idle * each(depth))
    };
    let in_tiles = |(rows, columns, rate): (u64, u64, f64)| {
        let multiprocessors = machine.device.multiprocessors.value;
        let tiles = shape.repeats as f64 * (shape.rows.div_ceil(rows) + shape.more) as f64 * shape.columns.div_ceil(columns) as f64;
        let full = (tiles / multiprocessors).ceil() * multiprocessors;
        cost(tiles, products.tail.value * (full - tiles), rows as f64 * columns as f64, rate)
    };
    let own = |t: &ir::tiles::TileSize| (t.rows, t.columns, t.rate as f64 / 100.0);
    let least = |times: &mut dyn Iterator<Item = Cost>| times.min_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    let found = match (&products.tiles, machine.generation()) {
        (Some(tiles), _) => least(&mut tiles.sizes.iter().map(|t| in_tiles(*t))),
        (None, Some(generation)) => least(&mut generation.tiles(p.factors, p.tf32).iter().map(|t| in_tiles(own(t)))),
        (None, None) => None,
    };
    let whole = || cost(1.0, 0.0, shape.repeats as f64 * shape.rows as f64 * shape.columns as f64, 1.0);
    found.unwrap_or_else(whole)
}

/// Seconds in which the device's memory moves so many bytes; of CPUs, for all threads of a rank.
pub fn memory(machine: &Machine, bytes: f64, threads: u64) -> f64 {
    let memory = &machine.device.memory;
    bytes / (memory.bytes_per_second.value * memory.efficiency.value * threads as f64)
}

/// Seconds of a launch on its own, as it was measured, else by the formula. `threads` are those of a rank, of CPUs.
pub fn launch(machine: &Machine, kernel: &Kernel, threads: u64) -> Cost {
    let Some(seconds) = machine.measured(&kernel.name(), threads) else { return formula(machine, kernel, threads) };
    let cause = match kernel.family {
        _ if kernel.on == Space::Host => Cause::Host,
        Family::Gemm => Cause::Product,
        Family::Attention => Cause::AttentionForward,
        Family::AttentionGrad => Cause::AttentionBackward,
        Family::Loops { .. } | Family::Scatter => Cause::Memory,
    };
    Cost::new(cause, seconds)
}

/// Seconds of a launch by what the kernel has to do.
pub fn formula(machine: &Machine, kernel: &Kernel, threads: u64) -> Cost {
    let (rates, work) = (&machine.device.attention, Work::needed(kernel));
    if kernel.on == Space::Host {
        return Cost::new(Cause::Host, work.bytes as f64 / machine.host.bytes_per_second.value);
    }
    let of_bytes = Cost::new(Cause::Memory, memory(machine, work.bytes as f64, threads));
    let attention = |cause: Cause, rate: f64, operations: f64| {
        let half = kernel.inputs.iter().any(|i| i.ty.dtype.is_half());
        let peak = machine.peak(if half { DType::Bf16 } else { DType::F32 }, false);
        Cost::new(cause, operations / (peak * threads as f64 * rate))
    };
    let of_arithmetic = match kernel.family {
        Family::Gemm => Product::of(kernel).map_or(Cost::default(), |p| product(machine, &p, threads)),
        Family::Attention => attention(Cause::AttentionForward, rates.forward.value, work.flops as f64),
        // Scores are computed again, which is one product more than the four that `Work` counts.
        Family::AttentionGrad => attention(Cause::AttentionBackward, rates.backward.value, work.flops as f64 * 1.25),
        Family::Loops { .. } | Family::Scatter => Cost::default(),
    };
    let busy = if of_arithmetic.seconds() >= of_bytes.seconds() { of_arithmetic } else { of_bytes };
    busy.and(Cause::Launch, machine.device.launch.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::dim::{DimInfo, Dims};
    use ir::graph::{Body, Origin, Phase, Type};
    use ir::kernel::{Operand, Output, dense};
    use ir::op::{Attention, AttentionGrad, Real, Scoring, Unary};
    use std::collections::BTreeMap;

    /// A machine with 100 multiprocessors, and 1,000 operations a second in f32, 2,000 in tf32 and 4,000 in 16 bits,
    /// all of which are reached. Its memory moves 10 bytes a second.
    fn machine() -> Machine {
        let mut machine = Machine::named("a100-80g-dgx").expect("a machine");
        let device = &mut machine.device;
        let peaks = &mut device.flops;
        (peaks.f32.value, peaks.tf32.value, peaks.half.value) = (1e3, 2e3, 4e3);
        device.multiprocessors.value = 100.0;
        let products = &mut device.products;
        (products.efficiency.value, products.tail.value, products.depth.value) = (1.0, 0.5, 0.0);
        products.tiles = Some(crate::machine::Tiles { sizes: vec![(10, 10, 1.0)], source: "a100".into() });
        (device.memory.bytes_per_second.value, device.memory.efficiency.value, device.launch.value) = (10.0, 1.0, 0.25);
        machine
    }

    fn shape(rows: u64, columns: u64) -> Product {
        let shape = ProductSize { repeats: 1, rows, columns, more: 0 };
        Product { shape, contracted: 7, factors: DType::F32, tf32: false }
    }

    #[test]
    fn a_product_takes_waves_of_tiles() {
        let (mut machine, seconds) = (machine(), |m: &Machine, p: &Product| product(m, p, 1).seconds());
        // 100 tiles are one wave and 200 are two. A single tile more waits for half of the rest of its wave.
        assert_eq!(seconds(&machine, &shape(100, 100)), 2.0 * 10_000.0 * 7.0 / 1e3);
        assert_eq!(seconds(&machine, &shape(1000, 11)), 2.0 * 20_000.0 * 7.0 / 1e3);
        assert_eq!(seconds(&machine, &shape(1010, 10)), 2.0 * 7.0 * 100.0 * (101.0 + 0.5 * 99.0) / 1e3);
        // Each further expert begins tiles of its own.
        let experts = Product { shape: ProductSize { more: 99, ..shape(10, 10).shape }, ..shape(10, 10) };
        assert_eq!(seconds(&machine, &experts), 2.0 * 10_000.0 * 7.0 / 1e3);
        machine.device.products.depth.value = 3.0;
        assert_eq!(seconds(&machine, &shape(100, 100)), 2.0 * 10_000.0 * 10.0 / 1e3);
        // tf32 has twice and bf16 four times the operations a second of f32.
        let of = |factors, tf32| seconds(&machine, &Product { factors, tf32, ..shape(100, 100) });
        assert_eq!([of(DType::F32, true), of(DType::Bf16, false)], [100.0, 50.0]);
        machine.device.products.tiles.as_mut().expect("tiles").sizes.push((50, 50, 0.9));
        assert_eq!(seconds(&machine, &shape(100, 100)), 200.0, "fewer waves, but slower ones");
    }

    /// A kernel of one op over operands of these types.
    fn kernel(family: Family, body: Body, op: Op, operands: &[(DType, Vec<Dim>)], result: Vec<Dim>) -> Kernel {
        let mut body = body;
        let types = operands.iter().map(|(dtype, dims)| Type::new(*dtype, dims.clone()));
        let inputs: Vec<Operand> = types.map(|ty| Operand { strides: dense(&body.dims, &ty), ty, unaligned: false }).collect();
        let origin = || Origin::new(Phase::Forward);
        let args: Vec<_> = (0..).zip(&inputs).map(|(i, o)| body.push(Op::Input(i), [], o.ty.clone(), origin())).collect();
        let value = body.push(op, args, Type::new(DType::F32, result), origin());
        let outputs = vec![Output { value, strides: dense(&body.dims, &body[value].ty), accumulate: false }];
        Kernel { on: Space::Device, family, body, inputs, scalars: vec![], outputs }
    }

    fn dims<const N: usize>(sizes: [u64; N]) -> (Body, [Dim; N]) {
        let mut dims = Dims::default();
        let ids = sizes.map(|size| dims.add(DimInfo::new("d", size)));
        (Body { dims, ..Body::default() }, ids)
    }

    #[test]
    fn shapes_are_those_of_the_products() {
        let (body, [b, m, n, k]) = dims([3, 5, 11, 7]);
        let op = Op::Dot { over: vec![k], tf32: true };
        let found = kernel(Family::Gemm, body, op, &[(DType::F32, vec![b, m, k]), (DType::F32, vec![b, n, k])], vec![b, m, n]);
        let shape = ProductSize { repeats: 3, rows: 5, columns: 11, more: 0 };
        assert_eq!(Product::of(&found), Some(Product { shape, contracted: 7, factors: DType::F32, tf32: true }));
        // These are the rows of four experts, and the gradient of their weights.
        let (body, [rows, e, n, k]) = dims([40, 4, 11, 7]);
        let op = Op::GroupedDot { rows, experts: e, over: vec![k], tf32: true };
        let operands = [(DType::Bf16, vec![rows, k]), (DType::Bf16, vec![e, n, k]), (DType::I32, vec![e])];
        let found = Product::of(&kernel(Family::Gemm, body, op, &operands, vec![rows, n])).expect("a product");
        assert_eq!((found.shape, found.contracted, found.tf32), (ProductSize { repeats: 1, rows: 40, columns: 11, more: 3 }, 7, true));
        let (body, [rows, e, n, k]) = dims([40, 4, 11, 7]);
        let op = Op::GroupedDot { rows, experts: e, over: vec![rows], tf32: false };
        let operands = [(DType::Bf16, vec![rows, k]), (DType::Bf16, vec![rows, n]), (DType::I32, vec![e])];
        let found = Product::of(&kernel(Family::Gemm, body, op, &operands, vec![e, k, n])).expect("a product");
        assert_eq!((found.shape, found.contracted), (ProductSize { repeats: 4, rows: 7, columns: 11, more: 0 }, 10));
    }

    #[test]
    fn other_kernels_take_their_bytes_or_attentions_rate_and_a_launch() {
        let mut machine = machine();
        let (body, [m, k]) = dims([5, 7]);
        let loops = Family::Loops { grid: vec![m, k] };
        let add = kernel(loops, body, Op::Unary(Unary::Exp), &[(DType::F32, vec![m, k])], vec![m, k]);
        assert_eq!(launch(&machine, &add, 1).seconds(), 2.0 * 35.0 * 4.0 / 10.0 + 0.25);
        assert_eq!(launch(&machine, &add, 2).seconds(), 2.0 * 35.0 * 4.0 / 20.0 + 0.25);
        let kernels = BTreeMap::from([(add.name(), machine.device.launch.clone())]);
        machine.measured = Some(crate::machine::Measured { threads: 1, kernels });
        assert_eq!(launch(&machine, &add, 1).seconds(), 0.25, "it was measured");
        (machine.device.attention.forward.value, machine.device.attention.backward.value) = (0.5, 0.25);
        machine.device.memory.bytes_per_second.value = 1e9;
        let attention = |op: fn(Attention) -> Op, family: Family| {
            let (body, [at, keys, d]) = dims([8, 8, 4]);
            let op = op(Attention { at, keys, d, values: d, scale: Real(1.0), scoring: Scoring::PLAIN });
            let operands = [(DType::F32, vec![at, d]), (DType::F32, vec![keys, d]), (DType::F32, vec![keys, d])];
            launch(&machine, &kernel(family, body, op, &operands, vec![at, d]), 1).seconds() - 0.25
        };
        // The forward pass has two products of 8 x 8 x 4, at half of 1,000 operations a second. A gradient has one
        // and a quarter, at a quarter.
        assert_eq!(attention(Op::Attention, Family::Attention), 2.0 * 2.0 * 256.0 / 500.0);
        let gradient = |a| Op::AttentionGrad(a, AttentionGrad::V);
        assert_eq!(attention(gradient, Family::AttentionGrad), 2.0 * 256.0 * 1.25 / 250.0);
    }
}
