//! Compiled programs, all ranks of them, against the reference interpreter on the logical graph; and what partitioning costs.

mod alone;
mod bubbles;
mod buckets;
mod checkpoints;
mod chunks;
mod counts;
mod dumps;
mod events;
mod everywhere;
mod experts;
mod explain;
mod formulas;
mod generate;
mod harness;
mod labels;
mod loops;
mod memory;
mod meshes;
mod models;
mod mutations;
mod offload;
mod overlap;
mod parts;
mod parts_rows;
mod precision;
mod programs;
mod random;
mod rewrites;
mod shared;
mod shrink;
mod sums;
mod tf32;
mod verdicts;
mod wanted;
#[path = "../written/mod.rs"]
mod written;
