//! Passes over the local graphs of stages, which keep what these compute.

pub mod bucket;
pub mod chunk_logits;
pub mod offload;
pub mod role;
pub mod split_reduction;
pub mod tf32;
pub mod tp_overlap;
pub mod update_pieces;
pub mod zero;
