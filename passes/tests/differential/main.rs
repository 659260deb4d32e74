//! Compiled programs, all ranks of them, against the reference interpreter on the logical graph; and what partitioning costs.

mod bubbles;
mod buckets;
mod chunks;
mod counts;
mod events;
mod everywhere;
mod experts;
mod explain;
mod formulas;
mod generate;
mod harness;
mod labels;
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
mod shared;
mod shrink;
mod wanted;
