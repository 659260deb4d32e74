//! The passes, in rooms that stand in the order of the pipeline: what a room does needs none of those after it. No LLVM, no CUDA.
//!
//! | room | what it does |
//! |---|---|
//! | [`pipeline`] | which layers a stage holds, and the order of its forward and backward passes |
//! | [`graph`] | the logical graph: its backward pass, its optimizer, its normal form |
//! | [`sharding`] | a sharding for every value, and the reshards between them |
//! | [`partition`] | from the sharded graph to a local graph for each stage |
//! | [`local`] | local graphs: ZeRO, buckets, offload, overlapped tensor parallelism |
//! | [`lower`] | from local graphs to kernels, buffers and commands |
//! | [`commands`] | programs: streams, the order of commands, memory, events |
//! | [`report`] | what a job communicates, holds and waits for, and what is too large |
//! | [`mod@table`] | all passes, in order |
//! | [`compile`] | a compile: walks the table |
//! | [`mod@shrink`] | makes modules on which a pass fails smaller |
//! | [`reference`] | the page of all passes |

#![allow(clippy::result_large_err, reason = "a diagnostic is the last thing that a compile makes")]

pub mod commands;
pub mod compile;
pub mod graph;
pub mod local;
pub mod lower;
pub mod page;
pub mod partition;
pub mod pipeline;
pub mod remedy;
pub mod report;
pub mod sharding;
pub mod shrink;
pub mod start;
pub mod table;
