//! One kernel to one object file, in this process.

use crate::build::Builder;
use crate::build::lines::AddedValues;
use crate::build::llvm::{Llvm, set_target_attributes};
use crate::build::masked;
use crate::build::mlir::{self, Mlir};
use crate::build::simt::Simt;
use crate::check::Verification;
use crate::target::{Arch, Target};
use crate::{CompileError, Shape, abi, attention, gemm, loops, narrow};
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::targets::{FileType, TargetMachine};
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::launch::Launch;
use ir::op::Op;
use serde::{Deserialize, Serialize};

/// What compilation keeps beside the object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Emit {
    /// Text in MLIR, of kernels that are written in it.
    pub mlir: bool,
    /// Text in LLVM IR.
    pub llvm: bool,
    /// Assembly; PTX for a GPU.
    pub asm: bool,
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compiled {
    /// The kernel's name, and its symbol in the object.
    pub name: String,
    /// How many tiles it has, and what they need.
    pub shape: Shape,
    /// Whether its code was held to its body.
    pub verification: Verification,
    /// How a GPU launches it.
    pub launch: Option<Launch>,
    /// A relocatable ELF object; the PTX text for a GPU.
    #[serde(skip)]
    pub object: Vec<u8>,
    /// Text in MLIR, where asked for and where the kernel is written in it.
    pub mlir: Option<String>,
    /// Text in LLVM IR, where asked for.
    pub llvm: Option<String>,
    /// Assembly, or PTX for a GPU, where asked for.
    pub asm: Option<String>,
}

impl Compiled {
    /// The kernel as bytes: the length of a JSON header, the header, the object.
    pub fn encode(&self) -> Vec<u8> {
        let header = serde_json::to_vec(self).expect("invariant: a compiled kernel is plain data");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(&self.object);
        bytes
    }

    /// The inverse of [`Compiled::encode`]; nothing if the bytes are not of that form.
    pub fn decode(bytes: &[u8]) -> Option<Compiled> {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (header, object) = rest.split_at_checked(length)?;
        let compiled: Compiled = serde_json::from_slice(header).ok()?;
        Some(Compiled { object: object.to_vec(), ..compiled })
    }
}

/// Compiles one kernel.
///
/// LLVM ends the process on code that it cannot select; callers that must survive that compile in worker processes.
///
/// # Errors
/// The kernel is malformed or uses what is not supported, or LLVM does not know the target.
pub fn compile(kernel: &Kernel, target: &Target, emit: Emit) -> Result<Compiled, CompileError> {
    let name = kernel.name();
    kernel.verify().map_err(|error| CompileError::Malformed { name: name.clone(), error })?;
    let target = &match target.arch {
        Arch::X86_64 => target.clone(),
        Arch::Nvptx => target.taking(abi::parameter_bytes(kernel)),
    };
    let rewritten = if kernel.family == Family::Gemm { gemm::as_loops(kernel) } else { None };
    let given = kernel;
    let kernel = rewritten.as_ref().unwrap_or(given);
    let machine = target.machine()?;
    let context = Context::create();
    let written = match target.arch {
        Arch::X86_64 => for_cpu(&context, kernel, target, &name)?,
        Arch::Nvptx => for_gpu(&context, [given, kernel], target, &name)?,
    };
    finish(&context, target, &machine, written, emit, name)
}

/// Code for a CPU that a test writes itself.
#[cfg(test)]
pub fn compile_written(name: &str, target: &Target, write: impl FnOnce(&Llvm) -> Result<Shape, CompileError>) -> Result<Compiled, CompileError> {
    let context = Context::create();
    let written = directly(&context, target, name, write)?;
    finish(&context, target, &target.machine()?, written, Emit::default(), name.into())
}

/// A kernel for a CPU whose code a test changes before it is machine code.
#[cfg(test)]
pub fn compile_changed(kernel: &Kernel, target: &Target, change: impl FnOnce(&Module)) -> Result<Compiled, CompileError> {
    let context = Context::create();
    let written = for_cpu(&context, kernel, target, &kernel.name())?;
    change(&written.module);
    finish(&context, target, &target.machine()?, written, Emit::default(), kernel.name())
}

/// Machine code of what is written, or PTX.
fn finish<'c>(
    context: &'c Context,
    target: &Target,
    machine: &TargetMachine,
    written: KernelModule<'c>,
    emit: Emit,
    name: String,
) -> Result<Compiled, CompileError> {
    let KernelModule { shape, launch, mlir, module } = written;
    module.set_triple(&machine.get_triple());
    module.set_data_layout(&machine.get_target_data().get_data_layout());
    masked::spell_out_single_stores(context, &module)?;
    module.verify().map_err(|e| CompileError::Invalid { text: e.to_string() })?;
    let write = |kind| write(machine, &module, kind);
    Ok(Compiled {
        shape,
        verification: Verification::None,
        launch,
        mlir: mlir.filter(|_| emit.mlir),
        llvm: emit.llvm.then(|| module.print_to_string().to_string()),
        asm: if emit.asm { Some(String::from_utf8_lossy(&write(FileType::Assembly)?).into_owned()) } else { None },
        object: write(match target.arch {
            Arch::X86_64 => FileType::Object,
            Arch::Nvptx => FileType::Assembly,
        })?,
        name,
    })
}

/// A kernel as LLVM IR.
struct KernelModule<'c> {
    shape: Shape,
    launch: Option<Launch>,
    mlir: Option<String>,
    module: Module<'c>,
}

fn for_cpu<'c>(context: &'c Context, kernel: &Kernel, target: &Target, name: &str) -> Result<KernelModule<'c>, CompileError> {
    match &kernel.family {
        Family::Loops { grid } => through_mlir(context, target, name, |b| loops::emit(b, kernel, grid, target, name)),
        Family::Scatter => through_mlir(context, target, name, |b| loops::emit_scatter(b, kernel, target, name)),
        Family::Gemm => directly(context, target, name, |b| gemm::emit(b, kernel, target, name)),
        Family::Attention => directly(context, target, name, |b| attention::emit_forward(b, kernel, target, name)),
        Family::AttentionGrad => directly(context, target, name, |b| attention::emit_backward(b, kernel, target, name)),
    }
}

/// Writes a kernel for a GPU. Lines of its text refer to values of the kernel as it was given.
fn for_gpu<'c>(context: &'c Context, [given, kernel]: [&Kernel; 2], target: &Target, name: &str) -> Result<KernelModule<'c>, CompileError> {
    let b = Simt::new(context, name, target)?;
    b.approximate_functions_of(narrow::values(kernel));
    let count = (kernel.body.nodes.len() - given.body.nodes.len()) as u32;
    let dot = given.body.values().find(|v| matches!(&given.body[*v].op, Op::Dot { .. })).filter(|_| count > 0);
    b.add_values(AddedValues { before: dot.map_or(u32::MAX, |v| v.0), count });
    // Code that belongs to no op in particular is attributed to the kernel's main op.
    let body = &kernel.body;
    let of_family =
        |v: &Value| matches!(&body[*v].op, Op::Dot { .. } | Op::GroupedDot { .. } | Op::Scatter { .. } | Op::Attention(_) | Op::AttentionGrad(..));
    b.locate(body.values().find(of_family).unwrap_or(kernel.outputs[0].value));
    let of_warps = |shape| (shape, abi::launch_of_warps(kernel, &shape));
    let (shape, launch) = match &kernel.family {
        Family::Loops { grid } => {
            let shape = loops::emit(&b, kernel, grid, target, name)?;
            match loops::team(kernel, grid, target) {
                Some((members, shared)) => (shape, abi::launch_of_teams(kernel, &shape, members, shared as u32)),
                None => of_warps(shape),
            }
        }
        Family::Scatter => of_warps(loops::emit_scatter(&b, kernel, target, name)?),
        Family::Attention | Family::AttentionGrad => attention::emit_for_gpu(&b, kernel, target, name)?,
        Family::Gemm => gemm::gpu::emit(&b, kernel, target, name)?,
    };
    launch.check(kernel, &target.cpu).map_err(CompileError::unsupported)?;
    Ok(KernelModule { shape, launch: Some(launch), mlir: None, module: b.finish()? })
}

fn directly<'c>(
    context: &'c Context,
    target: &Target,
    name: &str,
    emit: impl FnOnce(&Llvm<'c>) -> Result<Shape, CompileError>,
) -> Result<KernelModule<'c>, CompileError> {
    let b = Llvm::new(context, name, target);
    let shape = emit(&b)?;
    Ok(KernelModule { shape, launch: None, mlir: None, module: b.module })
}

fn through_mlir<'c>(
    context: &'c Context,
    target: &Target,
    name: &str,
    emit: impl FnOnce(&Mlir) -> Result<Shape, CompileError>,
) -> Result<KernelModule<'c>, CompileError> {
    let dialects = mlir::context();
    let b = Mlir::new(&dialects, target);
    let shape = emit(&b)?;
    let (text, module) = b.lower(context)?;
    let function = module.get_function(name).ok_or_else(|| CompileError::Invalid { text: "the kernel was lost in lowering".into() })?;
    set_target_attributes(context, function, &target.cpu, &target.features);
    Ok(KernelModule { shape, launch: None, mlir: Some(text), module })
}

fn write(machine: &TargetMachine, module: &Module, kind: FileType) -> Result<Vec<u8>, CompileError> {
    let buffer = machine.write_to_memory_buffer(module, kind).map_err(|e| CompileError::Invalid { text: e.to_string() })?;
    Ok(buffer.as_slice().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::KernelDraft;
    use ir::op::{DType, Op, Reduce, Unary};

    #[test]
    fn the_same_kernel_gives_the_same_bytes_and_texts() {
        let mut make = KernelDraft::default();
        let [s, h] = [("s", 5), ("h", 40)].map(|(n, size)| make.dim(n, size));
        let x = make.input(DType::F32, &[s, h]);
        let e = make.op(Op::Unary(Unary::Exp), &[x]);
        let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![h] }, &[e]);
        let loops = make.kernel(Family::Loops { grid: vec![s] }, &[e, sum]);
        let mut make = KernelDraft::default();
        let [m, n, k] = [("m", 17), ("n", 40), ("k", 9)].map(|(n, size)| make.dim(n, size));
        let (a, b) = (make.input(DType::F32, &[m, k]), make.input(DType::F32, &[n, k]));
        let c = make.op(Op::dot(vec![k]), &[a, b]);
        let product = make.kernel(Family::Gemm, &[c]);
        let emit = Emit { mlir: true, llvm: true, asm: true };
        for kernel in [loops, product] {
            let compiled = || compile(&kernel, &Target::x86_64_v3(), emit).expect("compiled");
            let first = compiled();
            assert_eq!(first, compiled());
            assert!(first.asm.is_some_and(|text| text.contains("vfmadd")));
            assert_eq!(first.mlir.is_some_and(|text| text.contains("scf.for")), matches!(kernel.family, Family::Loops { .. }));
        }
    }

    #[test]
    fn ptx_reads_and_writes_global_memory_lane_by_lane_or_in_runs() {
        for (size, access) in [(33, "b32"), (64, "v2.b32"), (128, "v4.b32")] {
            let mut make = KernelDraft::default();
            let [s, h] = [("s", 5), ("h", size)].map(|(n, size)| make.dim(n, size));
            let x = make.input(DType::F32, &[s, h]);
            let e = make.op(Op::Unary(Unary::Exp), &[x]);
            let kernel = make.kernel(Family::Loops { grid: vec![s, h] }, &[e]);
            let compiled = || compile(&kernel, &Target::gpu("sm_90a"), Emit::default()).expect("compiled");
            assert_eq!(compiled(), compiled());
            let text = String::from_utf8(compiled().object).expect("PTX is text");
            let entry = format!(".visible .entry {}(", kernel.name());
            let [load, store] = ["ld", "st"].map(|x| format!("{x}.global.{access}"));
            for part in [".target sm_90a", ".maxntid 128", &entry, "%laneid", &load, &store] {
                assert!(text.contains(part), "{part} in\n{text}");
            }
        }
    }

    #[test]
    fn a_malformed_kernel_is_refused_by_name() {
        let mut make = KernelDraft::default();
        let d = make.dim("d", 4);
        let x = make.input(DType::F32, &[d]);
        let mut kernel = make.kernel(Family::Gemm, &[x]);
        kernel.outputs[0].strides.clear();
        let error = compile(&kernel, &Target::x86_64_v3(), Emit::default()).expect_err("no contraction");
        assert!(error.to_string().contains(&kernel.name()), "{error}");
    }
}
