//! Causal attention of one sequence: `cargo run --release -p codegen --example attention_bench [HEADSxSEQxD]`.
//!
//! Prints medians of thread time, and rates of the work that the mask leaves. Backward and forward take turns in one thread.

use codegen::abi::KernelFn;
use codegen::{Emit, Target, Workers};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Origin, Phase, Type, Value};
use ir::kernel::{Family, Kernel, Operand, Output, dense};
use ir::op::{Attention, AttentionGrad, DType, Op, Real};
use std::error::Error;

const TURNS: usize = 40;

struct Maker {
    body: Body,
    inputs: Vec<Operand>,
}

impl Maker {
    fn input(&mut self, dtype: DType, dims: &[Dim]) -> Value {
        let ty = Type::new(dtype, dims);
        self.inputs.push(Operand { strides: dense(&self.body.dims, &ty), ty: ty.clone() });
        self.body.push(Op::Input(self.inputs.len() as u32 - 1), [], ty, Origin::new(Phase::Forward))
    }

    fn kernel(mut self, family: Family, results: Vec<(Op, Vec<Value>, Type)>) -> Kernel {
        let mut outputs = vec![];
        for (op, args, ty) in results {
            let strides = dense(&self.body.dims, &ty);
            outputs.push(Output { value: self.body.push(op, args, ty, Origin::new(Phase::Forward)), strides, accumulate: false });
        }
        Kernel { on: ir::program::Space::Device, family, body: self.body, inputs: self.inputs, scalars: vec![], outputs }
    }
}

/// Forward with its logarithms, or all three gradients.
fn kernel([heads, seq, d]: [u64; 3], family: Family) -> Kernel {
    let mut m = Maker { body: Body::default(), inputs: vec![] };
    let [at, keys, head, d] = [("at", seq), ("keys", seq), ("head", heads), ("d", d)].map(|(n, s)| m.body.dims.add(DimInfo::new(n, s)));
    let a = Attention { at, keys, d, scale: Real(0.125), causal: true, window: None };
    let q = m.input(DType::F32, &[at, head, d]);
    let [k, v] = [0, 1].map(|_| m.input(DType::F32, &[keys, head, d]));
    let (q_ty, k_ty, row) = (m.body[q].ty.clone(), m.body[k].ty.clone(), Type::new(DType::F32, [at, head]));
    if family == Family::Attention {
        let places = [m.input(DType::I32, &[at]), m.input(DType::I32, &[keys])];
        let out = (Op::Attention(a.clone()), [&[q, k, v], &places[..]].concat(), q_ty);
        return m.kernel(family, vec![out, (Op::AttentionLse(a), [&[q, k], &places[..]].concat(), row)]);
    }
    let [lse, delta] = [0, 1].map(|_| m.input(DType::F32, &row.dims));
    let dout = m.input(DType::F32, &q_ty.dims);
    let places = [m.input(DType::I32, &[at]), m.input(DType::I32, &[keys])];
    let args = [&[q, k, v, lse, delta, dout], &places[..]].concat();
    let grads = [(AttentionGrad::Q, q_ty), (AttentionGrad::K, k_ty.clone()), (AttentionGrad::V, k_ty)];
    m.kernel(family, grads.map(|(which, ty)| (Op::AttentionGrad(a.clone(), which), args.clone(), ty)).to_vec())
}

fn thread_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn main() -> Result<(), Box<dyn Error>> {
    let target = Target::host()?;
    let shape = std::env::args().nth(1).unwrap_or_else(|| "12x512x64".into());
    let sizes: Vec<u64> = shape.split('x').map(str::parse).collect::<Result<_, _>>()?;
    let sizes: [u64; 3] = sizes.try_into().map_err(|_| "a shape is written HEADSxSEQxD")?;
    let kernels = [Family::Attention, Family::AttentionGrad].map(|family| kernel(sizes, family));
    let compiled = codegen::compile(&kernels, &target, Emit::default(), None, &Workers::InProcess)?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("attention.so");
    codegen::link_shared(compiled.iter().map(|c| c.object.as_slice()), &path)?;
    // SAFETY: the library was just made and has no initialisers.
    let library = unsafe { libloading::Library::new(&path)? };
    let mut seconds = [vec![], vec![]];
    let mut buffers: Vec<Vec<Vec<u32>>> = vec![];
    for k in &kernels {
        let fill = |dtype: DType, n: u64| (0..n as u32).map(|i| if dtype == DType::I32 { i } else { 0.5f32.to_bits() }).collect();
        let inputs = k.inputs.iter().map(|i| fill(i.ty.dtype, k.body.dims.elements(&i.ty.dims)));
        let outputs = k.outputs.iter().map(|o| fill(DType::F32, k.body.elements(o.value)));
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
            unsafe { function(pointers.as_ptr(), std::ptr::null(), 0, compiled.shape.tiles, scratch.add(scratch.align_offset(64))) };
            seconds.push(thread_seconds() - start);
        }
    }
    // A product of queries and keys, one of probabilities and values; backward five. Half is masked.
    let [heads, seq, d] = sizes.map(|s| s as f64);
    for ((name, products), seconds) in [("forward", 2.0), ("backward", 5.0)].into_iter().zip(&mut seconds) {
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        println!("{shape} {name}: {:.3} ms, {:.0} GFLOP/s", median * 1e3, products * heads * seq * seq * d / median / 1e9);
    }
    Ok(())
}
