//! Causal attention: `cargo run --release -p codegen --example attention_bench [BATCHxHEADS[/KV]xSEQxD
//! [documents|ragged|alibi|capped|dropped|padded]]`.
//!
//! Prints medians of thread time, and rates of the work that the mask leaves. Backward and forward take turns in one
//! thread.

mod common;

use codegen::abi::KernelFn;
use codegen::{Emit, Target, Verify, Workers};
use common::{Heads, Scores, attention, thread_seconds};
use ir::graph::Type;
use ir::kernel::Family;
use ir::op::DType;
use std::error::Error;

const TURNS: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let target = Target::host()?;
    let shape = std::env::args().nth(1).unwrap_or_else(|| "1x12x512x64".into());
    let sizes = Heads::parse(&shape)?;
    let scores = std::env::args().nth(2).map_or(Ok(Scores::Causal), |word| Scores::parse(&word))?;
    let kernels = [Family::Attention, Family::AttentionGrad].map(|family| attention(sizes, family, scores));
    let compiled =
        codegen::compile(&kernels, &target, Emit::default(), Verify::Off, None, &Workers::InProcess, &ir::progress::Progress::default())?.kernels;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("attention.so");
    std::fs::write(&path, codegen::link_shared(compiled.iter().map(|c| c.object.as_slice()))?)?;
    // SAFETY: the library was just made and has no initialisers.
    let library = unsafe { libloading::Library::new(&path)? };
    let mut seconds = [vec![], vec![]];
    let mut buffers: Vec<Vec<Vec<u32>>> = vec![];
    for k in &kernels {
        let inputs = k.inputs.iter().map(|i| scores.fill(k, &i.ty, 0.5));
        let outputs = k.outputs.iter().map(|o| scores.fill(k, &Type::new(DType::F32, k.body.dims_of(o.value)), 0.5));
        buffers.push(inputs.chain(outputs).collect());
    }
    for _ in 0..TURNS {
        for ((compiled, buffers), seconds) in compiled.iter().zip(&mut buffers).zip(&mut seconds) {
            // SAFETY: the symbol has the kernel ABI.
            let function: KernelFn = unsafe { *library.get::<KernelFn>(compiled.name.as_bytes())? };
            let pointers: Vec<*mut u8> = buffers.iter_mut().map(|b| b.as_mut_ptr().cast::<u8>()).collect();
            let mut scratch = vec![0u64; compiled.shape.scratch_bytes as usize / 8 + 16];
            let scratch = scratch.as_mut_ptr().cast::<u8>();
            let start = thread_seconds();
            // SAFETY: the buffers have the kernel's sizes and the scratch is aligned to 64 bytes here.
            unsafe {
                function(pointers.as_ptr(), std::ptr::null(), 0, compiled.shape.tiles, scratch.add(scratch.align_offset(64)), 0, compiled.shape.tiles)
            };
            seconds.push(thread_seconds() - start);
        }
    }
    // Forward has two products, of queries with keys and of probabilities with values; backward has five. The mask
    // hides half of each.
    for ((name, products), seconds) in [("forward", 2.0), ("backward", 5.0)].into_iter().zip(&mut seconds) {
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        println!("{shape} {name}: {:.3} ms, {:.0} GFLOP/s", median * 1e3, sizes.flops(products) / median / 1e9);
    }
    Ok(())
}
