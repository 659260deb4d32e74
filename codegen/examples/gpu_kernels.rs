//! What ptxas makes of kernels for GPUs: `cargo run --release -p codegen --example gpu_kernels -- TOOLS [OUT.md]
//! [PTX_DIRECTORY]`.
//!
//! TOOLS is the directory that `codegen/tools/ptxas.sh` filled. Prints a table, or writes it to OUT.md; with a
//! directory, keeps the texts too.

use codegen::ptxas::Ptxas;
use codegen::{Emit, Target, object};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Origin, Phase, Type, Value};
use ir::kernel::{Family, Kernel, Operand, Output, dense};
use ir::op::{Attention, AttentionGrad, DType, Op, Real, Scoring, Unary};
use ir::program::Space;
use std::error::Error;
use std::fmt::Write;
use std::path::Path;

#[derive(Default)]
struct GpuDraft {
    body: Body,
    inputs: Vec<Operand>,
}

impl GpuDraft {
    fn dims<const N: usize>(&mut self, dims: [(&str, u64); N]) -> [Dim; N] {
        dims.map(|(name, size)| self.body.dims.add(DimInfo::new(name, size)))
    }

    fn input(&mut self, dtype: DType, dims: &[Dim]) -> Value {
        let ty = Type::new(dtype, dims);
        self.inputs.push(Operand { strides: dense(&self.body.dims, &ty), ty: ty.clone(), unaligned: false });
        self.body.push(Op::Input(self.inputs.len() as u32 - 1), [], ty, Origin::new(Phase::Forward))
    }

    fn op(&mut self, op: Op, args: &[Value], ty: Type) -> Value {
        self.body.push(op, args.to_vec(), ty, Origin::new(Phase::Forward))
    }

    fn kernel(self, result: Value, accumulate: bool) -> Kernel {
        let strides = dense(&self.body.dims, &self.body[result].ty);
        let outputs = vec![Output { value: result, strides, accumulate }];
        Kernel { on: Space::Device, family: Family::Gemm, body: self.body, inputs: self.inputs, scalars: vec![], outputs }
    }
}

/// Which factor has its contracted dim outermost: `NN`, `NT`, `TN`, `TT`, of m x k by k x n.
fn product(layout: &str, [m, n, k]: [u64; 3], dtype: DType, to: DType) -> (GpuDraft, [Dim; 2], Value) {
    let mut make = GpuDraft::default();
    let [m, n, k] = make.dims([("m", m), ("n", n), ("k", k)]);
    let a = make.input(dtype, &if layout.starts_with('T') { [k, m] } else { [m, k] });
    let b = make.input(dtype, &if layout.ends_with('T') { [n, k] } else { [k, n] });
    let c = make.op(Op::dot(vec![k]), &[a, b], Type::new(to, [m, n]));
    (make, [m, n], c)
}

fn plain(layout: &str, sizes: [u64; 3], dtype: DType) -> Kernel {
    let (make, _, c) = product(layout, sizes, dtype, dtype);
    make.kernel(c, false)
}

/// A product with bias and tanh, as in a feed-forward layer.
fn activated(sizes: [u64; 3]) -> Kernel {
    let (mut make, [m, n], c) = product("NN", sizes, DType::Bf16, DType::Bf16);
    let bias = make.input(DType::Bf16, &[n]);
    let sum = make.op(Op::Add, &[c, bias], Type::new(DType::Bf16, [m, n]));
    let out = make.op(Op::Unary(Unary::Tanh), &[sum], Type::new(DType::Bf16, [m, n]));
    make.kernel(out, false)
}

/// A weight's gradient, added to what is there in f32.
fn gradient(sizes: [u64; 3]) -> Kernel {
    let (make, _, c) = product("TN", sizes, DType::Bf16, DType::F32);
    make.kernel(c, true)
}

/// Rows of experts times their matrices.
fn experts([rows, experts, h, f]: [u64; 4], dtype: DType) -> Kernel {
    let mut make = GpuDraft::default();
    let [rows, experts, h, f] = make.dims([("rows", rows), ("experts", experts), ("h", h), ("f", f)]);
    let a = make.input(dtype, &[rows, h]);
    let b = make.input(dtype, &[experts, h, f]);
    let ends = make.input(DType::I32, &[experts]);
    let y = make.op(Op::grouped_dot(rows, experts, vec![experts, h]), &[a, b, ends], Type::new(dtype, [rows, f]));
    make.kernel(y, false)
}

/// The gradients of experts' matrices, added to what is there in f32.
fn gradients_of_experts([rows, experts, h, f]: [u64; 4]) -> Kernel {
    let mut make = GpuDraft::default();
    let [rows, experts, h, f] = make.dims([("rows", rows), ("experts", experts), ("h", h), ("f", f)]);
    let a = make.input(DType::Bf16, &[rows, h]);
    let b = make.input(DType::Bf16, &[rows, f]);
    let ends = make.input(DType::I32, &[experts]);
    let y = make.op(Op::grouped_dot(rows, experts, vec![rows]), &[a, b, ends], Type::new(DType::F32, [experts, h, f]));
    make.kernel(y, true)
}

/// The same of factors that are rounded to tf32.
fn rounding(mut kernel: Kernel) -> Kernel {
    for node in &mut kernel.body.nodes {
        if let Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. } = &mut node.op {
            *tf32 = true;
        }
    }
    kernel
}

/// Causal attention of 4,096 positions, 16 heads of which two share keys: forward, or the gradients.
fn attention(backward: bool, d: u64) -> Kernel {
    let mut make = GpuDraft::default();
    let [at, keys, kv, group, d] = make.dims([("at", 4096), ("keys", 4096), ("kv", 8), ("group", 2), ("d", d)]);
    let attention = Attention { at, keys, d, values: d, scale: Real(0.125), scoring: Scoring::causal(None) };
    let (rows, of_keys) = (vec![at, kv, group, d], [keys, kv, d]);
    let q = make.input(DType::Bf16, &rows);
    let [k, v] = [0, 1].map(|_| make.input(DType::Bf16, &of_keys));
    let numbers = Type::new(DType::F32, &rows[..3]);
    let mut args = vec![q, k, v];
    if backward {
        args.extend([make.input(DType::F32, &rows[..3]), make.input(DType::F32, &rows[..3]), make.input(DType::Bf16, &rows)]);
    }
    let positions = [at, keys].map(|d| make.input(DType::I32, &[d]));
    args.extend(positions);
    let results = if backward {
        [AttentionGrad::Q, AttentionGrad::K, AttentionGrad::V]
            .map(|w| {
                let ty = make.body[if w == AttentionGrad::Q { q } else { k }].ty.clone();
                make.op(Op::AttentionGrad(attention.clone(), w), &args, ty)
            })
            .to_vec()
    } else {
        let out = make.op(Op::Attention(attention.clone()), &args, Type::new(DType::Bf16, &rows[..]));
        let lse = make.op(Op::AttentionLse(attention), &[&[q, k], &positions[..]].concat(), numbers);
        vec![out, lse]
    };
    let outputs = results.iter().map(|v| Output { value: *v, strides: dense(&make.body.dims, &make.body[*v].ty), accumulate: false }).collect();
    let family = if backward { Family::AttentionGrad } else { Family::Attention };
    Kernel { on: Space::Device, family, body: make.body, inputs: make.inputs, scalars: vec![], outputs }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [tools, rest @ ..] = arguments.as_slice() else { return Err("the directory of ptxas is missing".into()) };
    let ptxas = Ptxas::at(Path::new(tools)).ok_or("ptxas is not there")?;
    let (square, gpt) = ([8192, 8192, 8192], [4096, 3072, 768]);
    let mut kernels: Vec<(String, Kernel)> =
        ["NN", "NT", "TN", "TT"].iter().map(|l| (format!("bf16 8192 x 8192 x 8192 {l}"), plain(l, square, DType::Bf16))).collect();
    kernels.extend([
        ("f16 4096 x 3072 x 768 NN".to_owned(), plain("NN", gpt, DType::F16)),
        ("bf16 4096 x 3072 x 768 NN, bias, tanh".into(), activated(gpt)),
        ("bf16 768 x 3072 x 4096 TN, added to f32".into(), gradient([768, 3072, 4096])),
        ("bf16 1000 x 777 x 333 NN (ragged, unaligned)".into(), plain("NN", [1000, 777, 333], DType::Bf16)),
        ("bf16 8 experts, 4096 rows, 512 x 768".into(), experts([4096, 8, 512, 768], DType::Bf16)),
        ("bf16 gradients of 8 experts, 4096 rows, 512 x 768, added to f32".into(), gradients_of_experts([4096, 8, 512, 768])),
        ("f32 4096 x 3072 x 768 NN".into(), plain("NN", gpt, DType::F32)),
        ("f32 4096 x 3072 x 768 NT".into(), plain("NT", gpt, DType::F32)),
    ]);
    kernels.extend(["NN", "NT", "TN", "TT"].iter().map(|l| (format!("tf32 4096 x 3072 x 768 {l}"), rounding(plain(l, gpt, DType::F32)))));
    kernels.extend([
        ("tf32 8192 x 8192 x 8192 NT".into(), rounding(plain("NT", square, DType::F32))),
        ("tf32 1000 x 777 x 333 NT (ragged, unaligned)".into(), rounding(plain("NT", [1000, 777, 333], DType::F32))),
        ("tf32 8 experts, 4096 rows, 512 x 768".into(), rounding(experts([4096, 8, 512, 768], DType::F32))),
    ]);
    for d in [64, 128] {
        kernels.push((format!("bf16 causal attention, heads of {d}"), attention(false, d)));
        kernels.push((format!("bf16 gradients of causal attention, heads of {d}"), attention(true, d)));
    }
    let mut table = String::from(
        "| kernel (m x n x k) | GPU | threads | registers | shared bytes | stack, spills | HMMA | HGMMA | FFMA | LDGSTS | UTMALDG | LDSM |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for (name, kernel) in &kernels {
        for cpu in ["sm_80", "sm_90a"] {
            let compiled = object::compile(kernel, &Target::gpu(cpu), Emit::default())?;
            let ptx = String::from_utf8(compiled.object)?;
            if let [_, directory] = rest {
                std::fs::write(Path::new(directory).join(format!("{}.{cpu}.ptx", name.replace(' ', "_"))), &ptx)?;
            }
            let assembled = ptxas.assemble(&ptx, cpu)?;
            let counts = ptxas.instructions(&assembled.cubin)?;
            let count = |name: &str| counts.get(name).copied().unwrap_or(0);
            let launch = compiled.launch.ok_or("a GPU's kernel says how it is launched")?;
            let (threads, shared) = (launch.block, u64::from(launch.shared_bytes) + assembled.shared_bytes);
            let instructions = ["HMMA", "HGMMA", "FFMA", "LDGSTS", "UTMALDG", "LDSM"].map(|n| count(n).to_string()).join(" | ");
            let (registers, lost) = (assembled.registers, assembled.stack_bytes + assembled.spill_bytes);
            writeln!(table, "| {name} | {cpu} | {threads} | {registers} | {shared} | {lost} | {instructions} |")?;
            for warning in &assembled.warnings {
                eprintln!("{name}, {cpu}: {warning}");
            }
        }
    }
    match rest.first() {
        Some(out) => std::fs::write(
            out,
            format!(
                "# GPU kernels, as ptxas sees them\n\n\
                 Registers of a thread, shared memory of a block, and how often instructions occur in the assembled code (not how often\n\
                 they run), by ptxas 13.5. No number here was measured on a GPU.\n\n\
                 Written by `cargo run --release -p codegen --example gpu_kernels -- TOOLS docs/benchmarks/gpu-kernels.md` after\n\
                 `codegen/tools/ptxas.sh TOOLS`.\n\n{table}"
            ),
        )?,
        None => print!("{table}"),
    }
    Ok(())
}
