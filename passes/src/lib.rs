//! The passes: each one file, one entry function, from one level to the next. No LLVM, no CUDA.

#![allow(clippy::result_large_err, reason = "a diagnostic is the last thing that a compile makes")]

pub mod bubbles;
pub mod bucket;
pub mod compile;
pub mod differentiate;
pub mod explain;
pub mod footprint;
pub mod fuse;
pub mod heads;
pub mod indices;
pub mod issue;
pub mod kernels;
pub mod layout;
pub mod lower;
pub mod memory;
pub mod messages;
pub mod offload;
pub mod optimize;
pub mod order;
pub mod overlap;
pub mod pad;
pub mod partition;
pub mod pipeline;
pub mod plan;
pub mod propagate;
pub mod reasons;
pub mod rematerialize;
pub mod remedy;
pub mod rows;
pub mod schedule;
pub mod simplify;
mod sizes;
pub mod stages;
pub mod stashes;
pub mod storage;
pub mod sums;
pub mod tables;
pub mod terms;
pub mod tf32;
pub mod timeline;
pub mod touch;
pub mod tp_overlap;
pub mod widen;
pub mod zero;
