//! Passes over the logical graph, as if one rank did all.

pub mod accumulate_f32;
pub mod differentiate;
pub mod fold_constants;
pub mod indices;
pub mod optimize;
pub mod pad;
pub mod rematerialize;
pub mod simplify;
pub mod stage_sums;
