//! From the logical graph to the sharded one.

pub mod axes;
pub mod check_cp;
pub mod propagate;
pub mod reason;
pub mod zigzag;
