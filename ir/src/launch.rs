//! How a compiled kernel is launched on a GPU: code generation says it, the artifact keeps it, devices do it.

use crate::kernel::Kernel;
use serde::{Deserialize, Serialize};

/// Lanes of a warp.
pub const WARP: u32 = 32;
/// Most threads of a block.
pub const MOST_THREADS: u32 = 1024;
/// Most bytes of shared memory of a block: that of sm_90.
pub const MOST_SHARED: u32 = 227 << 10;
/// Bytes of parameters that every driver takes.
pub const FEW_PARAMETERS: usize = 4096;
/// Most bytes of parameters, which drivers take from CUDA 12.1 on, of kernels of PTX 8.1.
pub const MOST_PARAMETERS: usize = 32_764;
/// Most blocks that mcc launches.
const MOST_BLOCKS: u32 = 1 << 24;
/// Most bytes of scratch of a launch.
const MOST_SCRATCH: u64 = 1 << 40;

/// One word of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    /// The address of an operand: inputs, then outputs.
    Argument(u32),
    /// A scalar argument: the bits of an f64 or i64.
    Scalar(u32),
    /// What code generation knows, such as the number of tiles.
    Number(u64),
    /// The address of the launch's scratch.
    Scratch,
}

/// A launch, but for the values of its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Blocks.
    pub grid: u32,
    /// Threads of each.
    pub block: u32,
    /// Bytes of shared memory that a block gets beside what its code declares.
    pub shared_bytes: u32,
    /// Bytes of device memory that the blocks share while they run; nothing in it is kept.
    pub scratch_bytes: u64,
    /// In order, each 8 bytes.
    pub parameters: Vec<Parameter>,
}

impl Launch {
    /// Whether a GPU can launch it, with what the kernel has.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, kernel: &Kernel) -> Result<(), String> {
        let fits = |what: &str, n: u64, least: u64, most: u64| match n {
            n if (least..=most).contains(&n) => Ok(()),
            n => Err(format!("{n} {what}, not {least} to {most}")),
        };
        fits("blocks", self.grid.into(), 1, MOST_BLOCKS.into())?;
        fits("threads a block", self.block.into(), WARP.into(), MOST_THREADS.into())?;
        if !self.block.is_multiple_of(WARP) {
            return Err(format!("{} threads a block are not whole warps", self.block));
        }
        fits("bytes of shared memory", self.shared_bytes.into(), 0, MOST_SHARED.into())?;
        fits("bytes of scratch", self.scratch_bytes, 0, MOST_SCRATCH)?;
        fits("bytes of parameters", 8 * self.parameters.len() as u64, 0, MOST_PARAMETERS as u64)?;
        let (arguments, scalars) = (kernel.inputs.len() + kernel.outputs.len(), kernel.scalars.len());
        for parameter in &self.parameters {
            let (what, k, count) = match parameter {
                Parameter::Argument(k) => ("operand", *k, arguments),
                Parameter::Scalar(k) => ("scalar", *k, scalars),
                Parameter::Number(_) | Parameter::Scratch => continue,
            };
            if k as usize >= count {
                return Err(format!("{what} {k} of {count}"));
            }
        }
        Ok(())
    }

    /// The parameters as the kernel reads them, little-endian, for the addresses of operands, the bits of scalars, the address of scratch. What
    /// they refer to has been checked ([`Launch::check`]).
    pub fn pack(&self, operands: &[u64], scalars: &[u64], scratch: u64) -> Vec<u8> {
        let word = |p: &Parameter| match p {
            Parameter::Argument(k) => operands[*k as usize],
            Parameter::Scalar(k) => scalars[*k as usize],
            Parameter::Number(n) => *n,
            Parameter::Scratch => scratch,
        };
        self.parameters.iter().flat_map(|p| word(p).to_le_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Body;
    use crate::kernel::Family;
    use crate::op::DType;

    fn launch() -> Launch {
        let parameters = vec![Parameter::Scalar(0), Parameter::Number(7), Parameter::Scratch];
        Launch { grid: 3, block: 128, shared_bytes: 0, scratch_bytes: 64, parameters }
    }

    fn kernel() -> Kernel {
        Kernel {
            on: crate::program::Space::Device,
            family: Family::Gemm,
            body: Body::default(),
            inputs: vec![],
            scalars: vec![DType::F32],
            outputs: vec![],
        }
    }

    #[test]
    fn parameters_are_words_in_order() {
        let words: Vec<u64> = launch().pack(&[], &[5], 9).chunks(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes"))).collect();
        assert_eq!(words, [5, 7, 9]);
    }

    #[test]
    fn what_no_gpu_can_launch_is_refused() {
        assert_eq!(launch().check(&kernel()), Ok(()));
        let refused = |change: fn(&mut Launch)| {
            let mut l = launch();
            change(&mut l);
            l.check(&kernel()).expect_err("it cannot be launched")
        };
        assert_eq!(refused(|l| l.grid = 0), "0 blocks, not 1 to 16777216");
        assert_eq!(refused(|l| l.block = 2048), "2048 threads a block, not 32 to 1024");
        assert_eq!(refused(|l| l.block = 100), "100 threads a block are not whole warps");
        assert_eq!(refused(|l| l.shared_bytes = 1 << 20), "1048576 bytes of shared memory, not 0 to 232448");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Argument(0)]), "operand 0 of 0");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Scalar(1)]), "scalar 1 of 1");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Scratch; 4096]), "32768 bytes of parameters, not 0 to 32764");
    }
}
