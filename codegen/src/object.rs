//! One kernel to one object file, in this process.

use crate::build::llvm::Llvm;
use crate::target::Target;
use crate::{CompileError, Shape, attention, gemm, loops};
use inkwell::context::Context;
use inkwell::targets::{FileType, TargetMachine};
use ir::kernel::{Family, Kernel};
use serde::{Deserialize, Serialize};

/// What compilation keeps beside the object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Emit {
    pub mlir: bool,
    pub llvm: bool,
    pub asm: bool,
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compiled {
    /// The kernel's name, and its symbol in the object.
    pub name: String,
    pub shape: Shape,
    /// A relocatable ELF object.
    #[serde(skip)]
    pub object: Vec<u8>,
    /// Texts, where asked for and where the kernel passes through that form.
    pub mlir: Option<String>,
    pub llvm: Option<String>,
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
    let machine = target.machine()?;
    let context = Context::create();
    let b = Llvm::new(&context, &name, target);
    let shape = match &kernel.family {
        Family::Gemm => gemm::emit(&b, kernel, target, &name)?,
        Family::Loops { grid } => loops::emit(&b, kernel, grid, target, &name)?,
        Family::Scatter => loops::emit_scatter(&b, kernel, target, &name)?,
        Family::Attention => attention::emit_forward(&b, kernel, target, &name)?,
        Family::AttentionGrad => attention::emit_backward(&b, kernel, target, &name)?,
    };
    b.module.set_triple(&machine.get_triple());
    b.module.set_data_layout(&machine.get_target_data().get_data_layout());
    let module = &b.module;
    module.verify().map_err(|e| CompileError::Invalid { text: e.to_string() })?;
    let write = |kind| write(&machine, module, kind);
    Ok(Compiled {
        shape,
        mlir: None,
        llvm: emit.llvm.then(|| module.print_to_string().to_string()),
        asm: if emit.asm { Some(String::from_utf8_lossy(&write(FileType::Assembly)?).into_owned()) } else { None },
        object: write(FileType::Object)?,
        name,
    })
}

fn write(machine: &TargetMachine, module: &inkwell::module::Module, kind: FileType) -> Result<Vec<u8>, CompileError> {
    let buffer = machine.write_to_memory_buffer(module, kind).map_err(|e| CompileError::Invalid { text: e.to_string() })?;
    Ok(buffer.as_slice().to_vec())
}
