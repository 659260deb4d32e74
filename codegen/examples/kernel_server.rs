//! Kernels on request, for `bench/`: `cargo run --release -p codegen --example kernel_server`. Reads a line, answers
//! with a line: the seconds of each call.
//!
//! - `peak THREADS SECONDS`: of a loop of independent multiply-adds, their rate in GFLOP/s instead.
//! - `gemm MxKxN NN|NT|TN|TT 0|1 THREADS SECONDS`: a product, or one that is added to its result.
//! - `attention forward|backward BATCHxHEADS[/KV]xSEQxD [documents|ragged|alibi|capped] THREADS SECONDS`: causal,
//!   and what is said beside.
//!
//! Threads share the tiles of a call as those of a rank do, and its time is that of the clock.

mod common;
/// Ranges of tiles, as the threads of a rank take them.
#[path = "../../runtime/src/cpu/ranges.rs"]
mod ranges;

use codegen::abi::KernelFn;
use codegen::{Emit, Target, Verify, Workers};
use common::{Heads, Layout, PEAK_FLOPS, Scores, attention, peak, product};
use ir::graph::Type;
use ir::kernel::{Family, Kernel};
use ir::op::DType;
use ranges::{Ranges, TileRange};
use std::collections::HashMap;
use std::error::Error;
use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const LAYOUTS: [Layout; 4] = [
    Layout { name: "NN", a_transposed: false, b_transposed: false },
    Layout { name: "NT", a_transposed: false, b_transposed: true },
    Layout { name: "TN", a_transposed: true, b_transposed: false },
    Layout { name: "TT", a_transposed: true, b_transposed: true },
];

/// Fewest calls that are measured, after one that is not.
const CALLS: usize = 3;

/// A compiled kernel with memory to work on.
struct RunnableKernel {
    function: KernelFn,
    tiles: u64,
    scratch_bytes: usize,
    buffers: Vec<Vec<u32>>,
    _library: libloading::Library,
}

/// The arguments of a call, for threads that share them.
struct Arguments(Vec<*mut u8>);

// SAFETY: the buffers outlive the threads, and each tile is written by one of them.
unsafe impl Sync for Arguments {}

fn prepare(kernel: &Kernel, scores: Scores, target: &Target) -> Result<RunnableKernel, Box<dyn Error>> {
    let compiled = codegen::compile(
        std::slice::from_ref(kernel),
        target,
        Emit::default(),
        Verify::Off,
        None,
        &Workers::InProcess,
        &ir::progress::Progress::default(),
    )?
    .kernels
    .remove(0);
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("kernel.so");
    std::fs::write(&path, codegen::link_shared([compiled.object.as_slice()])?)?;
    // SAFETY: the library was just made and has no initialisers.
    let library = unsafe { libloading::Library::new(&path)? };
    // SAFETY: the symbol has the kernel ABI.
    let function: KernelFn = unsafe { *library.get::<KernelFn>(compiled.name.as_bytes())? };
    let inputs = kernel.inputs.iter().map(|i| scores.fill(kernel, &i.ty, 0.01));
    let outputs = kernel.outputs.iter().map(|o| scores.fill(kernel, &Type::new(DType::F32, kernel.body.dims_of(o.value)), 0.01));
    let buffers = inputs.chain(outputs).collect();
    Ok(RunnableKernel { function, tiles: compiled.shape.tiles, scratch_bytes: compiled.shape.scratch_bytes as usize, buffers, _library: library })
}

/// Runs `work(thread)` on each of the threads, again and again, all of them together: the seconds of each turn.
fn turns(threads: usize, budget: f64, begin: impl Fn() + Sync, work: impl Fn(usize) + Sync) -> Vec<f64> {
    let (turn, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let stop = usize::MAX;
    std::thread::scope(|scope| {
        for thread in 1..threads {
            let (turn, done, work) = (&turn, &done, &work);
            scope.spawn(move || {
                let mut seen = 0;
                loop {
                    while turn.load(Ordering::Acquire) == seen {
                        std::hint::spin_loop();
                    }
                    seen = turn.load(Ordering::Acquire);
                    if seen == stop {
                        return;
                    }
                    work(thread);
                    done.fetch_add(1, Ordering::Release);
                }
            });
        }
        let (mut seconds, all) = (vec![], Instant::now());
        while seconds.len() <= CALLS || all.elapsed().as_secs_f64() < budget {
            begin();
            done.store(0, Ordering::Relaxed);
            let start = Instant::now();
            turn.fetch_add(1, Ordering::AcqRel);
            work(0);
            while done.load(Ordering::Acquire) + 1 < threads {
                std::hint::spin_loop();
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
        turn.store(stop, Ordering::Release);
        seconds.remove(0);
        seconds
    })
}

fn call(runnable: &mut RunnableKernel, threads: usize, budget: f64) -> Vec<f64> {
    let arguments = Arguments(runnable.buffers.iter_mut().map(|b| b.as_mut_ptr().cast()).collect());
    let mut scratch: Vec<Vec<u64>> = vec![vec![0; runnable.scratch_bytes / 8 + 16]; threads];
    let scratch = Arguments(scratch.iter_mut().map(|s| s.as_mut_ptr().cast::<u8>()).map(|s| s.wrapping_add(s.align_offset(64))).collect());
    let ranges = Ranges::new(threads);
    let work = |thread: usize| {
        // The closure captures the whole structs, which may be shared, rather than their fields.
        let (arguments, scratch) = (&arguments, &scratch);
        for TileRange { first, end, begin, until } in ranges.calls(thread) {
            // SAFETY: the buffers have the kernel's sizes, the scratch is this thread's and aligned to 64 bytes.
            unsafe { (runnable.function)(arguments.0.as_ptr(), std::ptr::null(), first, end, scratch.0[thread], begin, until) };
        }
    };
    turns(threads, budget, || ranges.fill(runnable.tiles), work)
}

fn sizes(text: &str) -> Result<[u64; 3], Box<dyn Error>> {
    let sizes: Vec<u64> = text.split('x').map(str::parse).collect::<Result<_, _>>()?;
    sizes.try_into().map_err(|_| "three sizes, with an x in between".into())
}

fn answer(line: &str, target: &Target, known: &mut HashMap<String, RunnableKernel>) -> Result<Vec<f64>, Box<dyn Error>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [what @ .., threads, budget] = words.as_slice() else { return Err("too few words".into()) };
    let (threads, budget) = (threads.parse()?, budget.parse()?);
    let mut scores = Scores::Causal;
    let kernel = match what {
        // SAFETY: `main` has detected the feature.
        ["peak"] => return Ok(turns(threads, budget, || (), |_| unsafe { peak() }).iter().map(|s| threads as f64 * PEAK_FLOPS / s / 1e9).collect()),
        ["gemm", shape, layout, beta] => {
            let layout = LAYOUTS.iter().find(|l| l.name == *layout).ok_or("no such layout")?;
            product(sizes(shape)?, *layout, *beta == "1")
        }
        ["attention", pass @ ("forward" | "backward"), shape, program @ ..] => {
            scores = program.first().map_or(Ok(Scores::Causal), |word| Scores::parse(word))?;
            attention(Heads::parse(shape)?, if *pass == "forward" { Family::Attention } else { Family::AttentionGrad }, scores)
        }
        _ => return Err(format!("`{line}` is no request").into()),
    };
    let runnable = match known.entry(what.join(" ")) {
        std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
        std::collections::hash_map::Entry::Vacant(e) => e.insert(prepare(&kernel, scores, target)?),
    };
    Ok(call(runnable, threads, budget))
}

fn main() -> Result<(), Box<dyn Error>> {
    if !std::is_x86_feature_detected!("avx512f") {
        return Err("this benchmark's peak loop needs AVX-512".into());
    }
    let (target, mut known) = (Target::host()?, HashMap::new());
    for line in std::io::stdin().lock().lines() {
        let seconds = answer(&line?, &target, &mut known)?;
        println!("{}", seconds.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
    }
    Ok(())
}
