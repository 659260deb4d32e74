//! Programs, command by command: streams, order, memory, events.

pub mod allocate;
pub mod best_fit;
pub mod cost_model;
pub mod effects;
pub mod events;
pub mod list_schedule;
pub mod liveness;
pub mod offload_activations;
pub mod offload_states;
pub mod pair_passes;
pub mod prefetch;
pub mod runs;
pub mod send_turns;
pub mod spills;
pub mod stash_slots;
pub mod streams;
