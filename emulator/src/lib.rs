//! A functional emulator of PTX: executes kernels on the CPU and says what is wrong with them.
//!
//! It runs the text that a GPU would run, for compilers and kernel authors without one at hand, and for tests. A
//! module is decoded once; the warps of a block take turns in an order drawn from a seed; what a kernel starts and
//! later waits for (`cp.async`, tensor copies, `wgmma`) happens as early or as late as its waits allow. Memory that
//! nobody wrote is NaN. A kernel that is right gives the same results whatever the seed and timing; what is wrong is
//! reported with its line: accesses out of bounds, races on shared and global memory, waits and fences that are
//! missing, barriers that never open, instructions that are not supported.
//!
//! ```
//! use emulator::{Device, Launch};
//!
//! let mut device = Device::default();
//! let module = device.load("
//!     .version 8.0
//!     .target sm_80
//!     .address_size 64
//!     .visible .entry twice(.param .u64 p) {
//!         .reg .b32 %r<3>; .reg .b64 %d<4>;
//!         ld.param.u64 %d1, [p];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %d2, %r1, 4;
//!         add.s64 %d3, %d1, %d2;
//!         ld.global.u32 %r2, [%d3];
//!         add.s32 %r2, %r2, %r2;
//!         st.global.u32 [%d3], %r2;
//!         ret;
//!     }").unwrap();
//! let p = device.allocate(4 * 64);
//! device.write(p, &(0u32..64).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
//! let launch = Launch { grid: [1, 1, 1], threads: [64, 1, 1], shared: 0 };
//! device.launch(module.kernel("twice").unwrap(), launch, &p.to_le_bytes()).unwrap();
//! let mut out = [0; 4];
//! device.read(p + 4 * 21, &mut out).unwrap();
//! assert_eq!(u32::from_le_bytes(out), 42);
//! ```
//!
//! **What is modelled.** Warps of 32 lanes that part at branches and meet at the immediate post-dominator; barriers,
//! mbarriers with byte counts, clusters of blocks with copies to several of them, the generic and the async proxy and the fences between them, tensor maps with
//! swizzles, `ldmatrix`, `mma.sync`, `wgmma`, shuffles, votes, atomics. Matrix products sum in f32 along k in order,
//! hardware in an order of its own; approximate functions (`ex2.approx`, `tanh.approx`, ..) are computed more exactly
//! than hardware does.
//!
//! **What is counted**, with [`Options::count`]: what a launch asks of a GPU ([`Counts`]), from which follows how
//! long a card would take ([`Card::cost`]).
//!
//! **What is not.** Caches, calls of functions, lanes of a warp out of step.

mod access;
mod alu;
mod barrier;
mod block;
mod card;
mod counting;
mod counts;
mod decode;
mod device;
mod engine;
mod fault;
mod float;
mod flow;
mod history;
mod inst;
mod launch_races;
mod liveness;
mod matrix;
mod memory;
mod order;
mod pool;
mod registers;
mod shared;
mod synchronise;
mod syntax;
mod tensor_map;
mod touched;
mod warp;
mod wgmma;

pub use block::{Options, Statistics, Timing};
pub use card::{A100, Bound, CARDS, Card, Cost, H100, H200};
pub use counts::{Banks, CounterTiles, Counts, Pipe, SECTOR, Traffic, WIDTHS};
pub use decode::Kernel;
pub use device::{Device, Launch, Module};
pub use fault::{Fault, LaunchError, LoadError, Wrong};
pub use tensor_map::{Swizzle, TensorMap};
pub use touched::Ranges;
