//! Why a kernel could not be compiled.

use crate::target::TargetError;
use ir::kernel::KernelError;

/// Why a kernel could not be compiled, and whose fault it is.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CompileError {
    /// The kernel breaks an invariant: a bug of the pass that built it.
    #[error("kernel {name} is not well formed: {error}")]
    Malformed { name: String, error: KernelError },
    /// What the code generator cannot do yet.
    #[error("not supported by the code generator: {what}")]
    Unsupported { what: String },
    /// LLVM or MLIR refused what the code generator wrote: a bug of it.
    #[error("the code generator wrote invalid code: {text}")]
    Invalid { text: String },
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl CompileError {
    pub(crate) fn unsupported(what: impl Into<String>) -> CompileError {
        CompileError::Unsupported { what: what.into() }
    }
}
