//! Kernels to native code.
//!
//! **Invariant:** the only crate of the workspace that links LLVM and MLIR. It prints nothing and reads no
//! environment.

pub mod abi;
mod attention;
pub mod batch;
pub mod build;
pub mod cache;
mod check;
pub mod costs;
mod error;
mod gemm;
mod layout;
pub mod link;
mod loops;
pub mod math;
mod narrow;
pub mod object;
mod pointwise;
pub mod ptxas;
#[cfg(test)]
mod sixteen_bits;
pub mod target;
mod tensor_maps;
#[cfg(test)]
mod testing;
pub mod worker;

pub use batch::{Batch, BatchError, Workers, compile};
pub use check::{INVARIANT, Verification, Verify, Wrong};
pub use error::CompileError;
pub use link::{LinkError, link_shared};
pub use object::{Compiled, Emit};
use serde::{Deserialize, Serialize};
pub use target::Target;
pub use worker::WorkerCommand;

/// How a kernel is called: beside its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Tiles of the whole kernel; a call computes a range of them.
    pub tiles: u64,
    /// Tiles of a line: those that follow one another in it share a copy of an operand, and the first of the next one
    /// makes another. 1 where tiles share nothing.
    pub line: u64,
    /// Bytes of scratch that each thread, or warp, needs.
    pub scratch_bytes: u64,
}
