//! The built binaries from outside: texts are compiled to native code, ranks are processes.

mod cases;
mod checkpoints;
mod cli;
mod costs;
mod data;
mod docs;
mod driver;
mod dumps;
mod endings;
mod faults;
mod files;
mod first_step;
mod gpu;
mod gpu_check;
mod library;
mod limits;
mod mcc;
mod megatron;
mod mistakes;
mod offload;
mod pairs;
mod passes;
mod paths;
mod plan;
mod plans;
mod prints;
mod reference;
mod repeats;
mod reports;
mod simulate;
mod training;
mod triples;
mod trust;
mod worlds;

/// The generator of random models, and what it says of them.
#[path = "../../passes/tests/differential"]
#[allow(dead_code, reason = "the harness's own executor is not used here")]
mod differential {
    pub mod checkpoints;
    pub mod generate;
    pub mod harness;
    pub mod meshes;
    pub mod played;
    pub mod wanted;
    #[path = "../written/mod.rs"]
    pub mod written;
}
use differential::harness;
