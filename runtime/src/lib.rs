//! Everything that happens after compilation.
//!
//! **Invariant:** links no LLVM. Prints nothing and reads no environment; only `mcc-rank`'s `main` does.
//!
//! The executor ([`executor::Rank`]) runs one rank's program over two traits: [`device::Device`] holds memory and runs
//! kernels, [`comm::Communicator`] connects ranks. `docs/runtime.md` is the tour.

pub mod comm;
pub mod device;
pub mod executor;
pub mod host;
pub mod reference;
