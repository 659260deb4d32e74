//! Programs, command by command: streams, order, memory, events.

pub mod allocate;
pub mod cost_model;
pub mod effects;
pub mod list_schedule;
pub mod liveness;
pub mod overlap;
pub mod p2p_buffers;
pub mod stash_slots;
pub mod streams;
