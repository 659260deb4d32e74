//! The layout of layers on pipeline stages, and the order of passes through them.

pub mod plan;
pub mod schedule;
pub mod stage_layout;
pub mod stages;
