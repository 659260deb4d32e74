//! The passes: each one file, one entry function, from one level to the next. No LLVM, no CUDA.

pub mod differentiate;
pub mod optimize;
pub mod partition;
pub mod plan;
pub mod propagate;
pub mod simplify;
pub mod stages;
