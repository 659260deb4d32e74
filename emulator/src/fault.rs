//! What can be wrong with a module, and with what its kernels do.

use std::fmt;
use thiserror::Error;

/// A module that cannot be executed, with the line of its text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct LoadError {
    /// Line of the PTX text, from 1; 0 where it is the kernel as a whole.
    pub line: u32,
    /// What is not PTX there, or not supported.
    pub message: String,
}

/// What a kernel did that it must not.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Wrong {
    #[error("{space} memory access of {bytes} bytes at {address:#x} is outside of {what}")]
    OutOfBounds { space: &'static str, address: u64, bytes: u64, what: String },
    #[error("{space} memory access of {bytes} bytes at {address:#x} is not aligned")]
    Misaligned { space: &'static str, address: u64, bytes: u64 },
    #[error("race on {space} memory at {address:#x}: {this} and {other}, line {line}, are not ordered")]
    Race { space: &'static str, address: u64, this: String, other: String, line: u32 },
    #[error(
        "{this} at {address:#x} of {space} memory is of the async proxy, {other} of the generic one, and no `fence.proxy.async` stands between them"
    )]
    Proxy { space: &'static str, address: u64, this: String, other: String },
    #[error("mbarrier at {address:#x}: {what}")]
    Barrier { address: u64, what: String },
    #[error("no warp can go on: {}", .0.join("; "))]
    Deadlock(Vec<String>),
    #[error("still running after {0} instructions of one warp")]
    Endless(u64),
    #[error("{0}")]
    Divergent(String),
    #[error("accumulator registers of a `wgmma` in flight are touched: {0}")]
    InFlight(String),
    #[error("{0}")]
    Descriptor(String),
    #[error("trap")]
    Trap,
    #[error("{0}")]
    Undefined(String),
}

/// Where and why a launch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text; 0 if it is no instruction's.
    pub line: u32,
    /// File and line of the source, by the nearest `.loc` before it.
    pub source: Option<(String, u32)>,
    /// Index of the block in the grid, along x, y and z.
    pub block: [u32; 3],
    /// Number of the warp in its block, or in its cluster.
    pub warp: u32,
    /// What the warp did and must not.
    pub wrong: Wrong,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "{}: line {}", self.kernel, self.line)?;
        if let Some((file, line)) = &self.source {
            write!(f, " ({file}:{line})")?;
        }
        write!(f, ", block ({x}, {y}, {z}), warp {}: {}", self.warp, self.wrong)
    }
}

/// Why a launch did not begin or did not end well.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum LaunchError {
    #[error("launch of {kernel}: {message}")]
    Arguments { kernel: String, message: String },
    #[error(transparent)]
    Fault(Box<Fault>),
}
