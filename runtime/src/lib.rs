//! Everything that happens after compilation.
//!
//! **Invariant:** links no LLVM. Prints nothing and reads no environment; only `mcc-rank`'s `main` does.
//!
//! The executor ([`executor::Rank`]) runs one rank's program over two traits: [`device::Device`] holds memory and
//! runs kernels, [`comm::Communicator`] connects ranks. `docs/runtime.md` is the tour.

pub mod artifact;
pub mod check;
pub mod checked;
pub mod checkpoint;
pub mod comm;
pub mod conditions;
pub mod cpu;
mod cursor;
pub mod data;
mod data_loader;
pub mod device;
pub mod disk;
pub mod executor;
mod first_nonfinite;
pub mod gpu;
mod headers;
pub mod host;
mod hosted;
pub mod launch;
pub mod lines;
pub mod loopback;
mod memory_file;
pub mod mpi;
pub mod paths;
mod pickle;
pub mod profile;
pub mod protocol;
pub mod reference;
pub mod rendezvous;
mod saver;
pub mod scale;
pub mod schedule;
pub mod shm;
pub mod signature;
pub mod standalone;
mod streams;
mod strides;
mod sums;
pub mod target;
pub mod weights;
pub mod worker;
pub mod world;

// The fixture is shared with the integration tests, which know the crate by its name.
#[cfg(test)]
extern crate self as runtime;
#[cfg(test)]
#[path = "../tests/fixture/mod.rs"]
mod fixture;
#[cfg(test)]
#[path = "../tests/hostile/mod.rs"]
mod hostile;
