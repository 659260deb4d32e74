//! Matrix products against the peak of this machine: `cargo run --release -p codegen --example gemm_bench [MxKxN
//! ...]`. With `experts`, or without any shape, also those of experts' rows, balanced and skewed, against one product
//! of as many rows. With `threads=N` the thread goes through the ranges that each of N threads would have, one range
//! after the other, and the slowest counts for all: how well a product divides, whatever cores this machine has (not
//! how these share memory).
//!
//! A loop of independent multiply-adds gives the peak. It runs between the products, in this process and thread, so
//! that both see the same clock and the same neighbours. Times are of this thread, so other work on the machine
//! counts only where it shares caches. Prints medians.

mod common;

use codegen::abi::KernelFn;
use codegen::{Emit, Target, Verify, Workers};
use common::{Layout, PEAK_FLOPS, peak, product, thread_seconds};
use ir::dim::DimInfo;
use ir::graph::{Body, Origin, Phase, Type};
use ir::kernel::{Family, Kernel, Operand, Output, dense};
use ir::op::{DType, Op};
use std::error::Error;
use std::time::{Duration, Instant};

/// Time spent on each shape.
const BUDGET: Duration = Duration::from_millis(1500);
const SHAPES: [&str; 6] = ["1024x1024x1024", "2048x384x1536", "1024x768x3072", "1024x3072x768", "64x768x3072", "1000x777x333"];

const LAYOUTS: [Layout; 3] = [
    Layout { name: "NN", a_transposed: false, b_transposed: false },
    Layout { name: "NT", a_transposed: false, b_transposed: true },
    Layout { name: "TN", a_transposed: true, b_transposed: false },
];

struct Product {
    label: String,
    flops: f64,
    function: KernelFn,
    tiles: u64,
    buffers: Vec<Vec<f32>>,
    scratch: Vec<u64>,
    seconds: Vec<f64>,
}

impl Product {
    /// The ranges of so many threads; counted is what all take if each takes as long as the slowest.
    fn run(&mut self, threads: u64) {
        let pointers: Vec<*mut u8> = self.buffers.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
        let scratch = self.scratch.as_mut_ptr().cast::<u8>();
        let mut slowest: f64 = 0.0;
        for thread in 0..threads {
            let [begin, until] = [thread, thread + 1].map(|border| border * self.tiles / threads);
            // One of several threads of a rank goes through its range in two calls.
            let middle = if threads > 1 { begin + (until - begin).div_ceil(2) } else { until };
            let start = thread_seconds();
            for [first, end] in [[begin, middle], [middle, until]] {
                // SAFETY: the buffers have the kernel's sizes and the scratch is aligned to 64 bytes below.
                unsafe { (self.function)(pointers.as_ptr(), std::ptr::null(), first, end, scratch.add(scratch.align_offset(64)), begin, until) };
            }
            slowest = slowest.max(thread_seconds() - start);
        }
        self.seconds.push(slowest * threads as f64);
    }
}

/// Sizes of the products of experts: of one dense layer's forward product, gradient of its operand, and gradient of
/// its weights.
const ROWS: u64 = 4096;
const HIDDEN: u64 = 512;
const FFN: u64 = 768;
/// A name, experts, and where the rows of each end.
type Experts = (&'static str, u64, fn(u64) -> u64);

/// Experts, and where their rows end: equal parts; one has half of them and some have none; half of the bound is
/// used; many experts.
const ENDS: [Experts; 4] = [
    ("balanced", 8, |e| 512 * (e + 1)),
    ("skewed", 8, |e| [2100, 2100, 2900, 2950, 3500, 3500, 3999, 4096][e as usize]),
    ("half", 8, |e| 256 * (e + 1)),
    ("many", 128, |e| 32 * (e + 1)),
];

/// `[rows, k] [experts, k, n]`, the same with matrices stored `[experts, n, k]`, or `[rows, m] [rows, n] -> [experts,
/// m, n]`.
fn of_experts(layout: Layout, experts: u64) -> Kernel {
    let mut body = Body::default();
    let [rows, experts, h, f] =
        [("rows", ROWS), ("experts", experts), ("h", HIDDEN), ("f", FFN)].map(|(n, size)| body.dims.add(DimInfo::new(n, size)));
    let (a, b, over, out) = match (layout.a_transposed, layout.b_transposed) {
        (false, false) => (vec![rows, h], vec![experts, h, f], vec![experts, h], vec![rows, f]),
        (false, true) => (vec![rows, f], vec![experts, h, f], vec![experts, f], vec![rows, h]),
        (true, _) => (vec![rows, h], vec![rows, f], vec![rows], vec![experts, h, f]),
    };
    let types = [Type::new(DType::F32, a), Type::new(DType::F32, b), Type::new(DType::I32, [experts])];
    let inputs: Vec<Operand> = types.into_iter().map(|ty| Operand { strides: dense(&body.dims, &ty), ty, unaligned: false }).collect();
    let origin = || Origin::new(Phase::Forward);
    let args: Vec<_> = (0..3).map(|i| body.push(Op::Input(i), [], inputs[i as usize].ty.clone(), origin())).collect();
    let value = body.push(Op::grouped_dot(rows, experts, over), args, Type::new(DType::F32, out), origin());
    let outputs = vec![Output { value, strides: dense(&body.dims, &body[value].ty), accumulate: false }];
    Kernel { on: ir::program::Space::Device, family: Family::Gemm, body, inputs, scalars: vec![], outputs }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    if !std::is_x86_feature_detected!("avx512f") {
        return Err("this benchmark's peak loop needs AVX-512".into());
    }
    let target = Target::host()?;
    let directory = tempfile::tempdir()?;
    let (threads, given): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|word| word.starts_with("threads="));
    let threads = threads.last().map_or("1", |word| &word["threads=".len()..]).parse::<std::num::NonZeroU64>()?.get();
    let all = given.is_empty();
    let shapes = if all { SHAPES.map(String::from).to_vec() } else { given };
    println!("{}: {} lanes of f32", target.cpu, target.lanes());
    for shape in shapes.iter().filter(|s| *s != "experts") {
        let sizes: Vec<u64> = shape.split('x').map(str::parse).collect::<Result<_, _>>()?;
        let sizes: [u64; 3] = sizes.try_into().map_err(|_| "shapes are written MxKxN")?;
        let kernels: Vec<Kernel> = LAYOUTS.iter().map(|layout| product(sizes, *layout, false)).collect();
        let [m, k, n] = sizes.map(|s| s as usize);
        let all = LAYOUTS.iter().map(|layout| BenchCase { label: format!("{shape} {}", layout.name), flops: 2.0 * (m * n * k) as f64, ends: None });
        measure(&kernels, &all.collect::<Vec<_>>(), &target, &directory.path().join(format!("{shape}.so")), threads)?;
    }
    if all || shapes.iter().any(|s| s == "experts") {
        for layout in LAYOUTS {
            let (product, cases) = experts_and_one(layout);
            measure(&product, &cases, &target, &directory.path().join(format!("experts_{}.so", layout.name)), threads)?;
        }
    }
    Ok(())
}

/// The kernels of one layout, one after the other: a plain product, and that of experts' rows with each of the ends.
/// A gradient of weights is compared with that of one expert.
fn experts_and_one(layout: Layout) -> (Vec<Kernel>, Vec<BenchCase>) {
    let sizes = match (layout.a_transposed, layout.b_transposed) {
        (false, false) => [ROWS, HIDDEN, FFN],
        (false, true) => [ROWS, FFN, HIDDEN],
        (true, _) => [HIDDEN, ROWS / ENDS[0].1, FFN],
    };
    let mut kernels = vec![product(sizes, layout, false)];
    let mut cases = vec![BenchCase { label: format!("one {}", layout.name), flops: 2.0 * sizes.iter().product::<u64>() as f64, ends: None }];
    for (name, experts, end) in ENDS {
        kernels.push(of_experts(layout, experts));
        let ends: Vec<u64> = (0..experts).map(end).collect();
        let flops = 2.0 * (HIDDEN * FFN * end(experts - 1)) as f64;
        cases.push(BenchCase { label: format!("experts {} {name}", layout.name), flops, ends: Some(ends) });
    }
    (kernels, cases)
}

/// A kernel's name in the table, its useful operations, and the ends of experts' rows.
struct BenchCase {
    label: String,
    flops: f64,
    ends: Option<Vec<u64>>,
}

/// Compiles the kernels, runs them in turn, and prints a line for each.
fn measure(kernels: &[Kernel], cases: &[BenchCase], target: &Target, path: &std::path::Path, threads: u64) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let compiled =
        codegen::compile(kernels, target, Emit::default(), Verify::Off, None, &Workers::InProcess, &ir::progress::Progress::default())?.kernels;
    let spent = begin.elapsed();
    std::fs::write(path, codegen::link_shared(compiled.iter().map(|c| c.object.as_slice()))?)?;
    // SAFETY: the library was just made and has no initialisers.
    let library = unsafe { libloading::Library::new(path)? };
    let mut products = Vec::new();
    for (case, kernel) in cases.iter().zip(kernels) {
        let name = kernel.name();
        let compiled = compiled.iter().find(|c| c.name == name).ok_or("a kernel is missing")?;
        let elements = |ty: &Type| kernel.body.dims.elements(&ty.dims) as usize;
        let mut buffers: Vec<Vec<f32>> = kernel.inputs.iter().zip([0.5, 0.25, 0.0]).map(|(i, x)| vec![x; elements(&i.ty)]).collect();
        if let Some(ends) = &case.ends {
            buffers[2] = ends.iter().map(|e| f32::from_bits(*e as u32)).collect();
        }
        buffers.push(vec![0.0; elements(&kernel.body[kernel.outputs[0].value].ty)]);
        products.push(Product {
            label: case.label.clone(),
            flops: case.flops,
            // SAFETY: the symbol has the kernel ABI.
            function: unsafe { *library.get::<KernelFn>(compiled.name.as_bytes())? },
            tiles: compiled.shape.tiles,
            buffers,
            scratch: vec![0; compiled.shape.scratch_bytes as usize / 8 + 16],
            seconds: Vec::new(),
        });
    }
    let (mut peaks, begin) = (Vec::new(), Instant::now());
    while begin.elapsed() < BUDGET || peaks.len() < 5 {
        products.iter_mut().for_each(|product| product.run(threads));
        let start = thread_seconds();
        // SAFETY: the feature was detected above.
        unsafe { peak() };
        peaks.push(PEAK_FLOPS / (thread_seconds() - start));
    }
    let top = median(&mut peaks);
    for product in &mut products {
        let rate = product.flops / median(&mut product.seconds);
        println!("{:>20}  {:6.1} GFLOP/s  {:5.1} % of {:.0}", product.label, rate / 1e9, 100.0 * rate / top, top / 1e9);
    }
    println!("{:>20}  compiled in {:.2} s", "", spent.as_secs_f64());
    Ok(())
}
