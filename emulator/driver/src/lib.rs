//! NVIDIA's driver and NCCL, as far as mcc calls them, with the emulator in place of GPUs: a library that programs
//! load in their stead.
//!
//! It is a checker. What CUDA or NCCL forbid, and what they allow but no sound program does, is an error with a line
//! on the standard error stream that begins with [`MARK`]. Work that is issued is done as late as can be, in an order
//! drawn from a seed, so that what is not waited for is not there. The README says what is checked, and what is not
//! modelled.
//!
//! The functions have the names and types of the C interfaces; tests of this crate call them directly.

mod capture;
mod clocks;
mod collective;
mod comm;
pub mod driver;
pub mod errors;
mod exchange;
mod launch;
mod mesh;
pub mod nccl;
mod objects;
mod settings;
mod state;
mod tasks;
mod touched;
mod watching;

pub use settings::Settings;
pub use state::{MARK, last_words};
