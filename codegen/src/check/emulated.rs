//! Code for a GPU, in the emulator: some blocks of a launch, each of which computes one tile or a few.

use crate::check::operands::Operands;
use emulator::{Device, LaunchError, LoadError, Module, Options, Statistics};
use ir::launch::{Launch, MAP_BYTES, Swizzle, TensorMap, WARP};
use std::collections::BTreeSet;

/// Points of loops that emulated code may go through: some seconds. An emulated one takes a thousand times as long.
const RUN: u64 = 1 << 22;
/// Points of a block beyond which it is not run.
const LONGEST: u64 = 1 << 28;
/// Most blocks of a launch.
const MOST_BLOCKS: u64 = 1 << 24;

/// A kernel's code for a GPU, and how it is launched.
pub struct GpuCode<'a> {
    pub name: &'a str,
    pub ptx: &'a str,
    pub tiles: u64,
    pub launch: Option<&'a Launch>,
}

/// What the emulator says of code.
#[derive(Debug, thiserror::Error)]
pub enum EmulationError {
    /// It cannot be run here, which says nothing of it.
    #[error("code for a GPU, which the emulator cannot run: {0}")]
    Unknown(String),
    /// The first thing that it does and must not.
    #[error("{0}")]
    Fault(String),
}

impl From<LoadError> for EmulationError {
    fn from(e: LoadError) -> EmulationError {
        EmulationError::Unknown(e.to_string())
    }
}

impl From<LaunchError> for EmulationError {
    fn from(e: LaunchError) -> EmulationError {
        match e {
            LaunchError::Fault(_) => EmulationError::Fault(e.to_string()),
            LaunchError::Arguments { .. } => EmulationError::Unknown(e.to_string()),
        }
    }
}

/// The blocks that run: all, or the first, one in between and the last.
fn some(blocks: u32, cost: u64, between: u64) -> BTreeSet<usize> {
    if cost <= RUN {
        return (0..blocks as usize).collect();
    }
    [0, between % u64::from(blocks), u64::from(blocks) - 1].map(|b| b as usize).into()
}

/// As many blocks as there are tiles for, so that each computes the fewest; where they share scratch, as many as a
/// card would run.
fn spread(launch: &Launch, tiles: u64) -> Launch {
    // Kernels whose warps compute tiles by themselves have no shared memory.
    let of_block = if launch.shared_bytes == 0 { u64::from(launch.block / WARP) } else { 1 };
    let clusters = tiles.div_ceil(of_block).clamp(1, MOST_BLOCKS / u64::from(launch.cluster)) as u32;
    let grid = if launch.scratch_bytes > 0 { launch.grid } else { clusters * launch.cluster };
    Launch { grid, ..launch.clone() }
}

/// A tensor map as the emulator has it.
///
/// # Errors
/// What the driver would not take.
pub fn encode(map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String> {
    let swizzle = match map.swizzle {
        Swizzle::B128 => emulator::Swizzle::B128,
    };
    let (size, stride, extent) = (map.sizes.clone(), map.strides.clone(), map.extents.clone());
    emulator::TensorMap { base: address, element: map.dtype.bytes() as u32, size, stride, extent, swizzle, tf32: map.tf32 }.encode()
}

/// A kernel in the emulator, with operands that outlive it.
pub struct EmulatedKernel {
    device: Device,
    module: Module,
    name: String,
    launch: emulator::Launch,
    parameters: Vec<u8>,
    /// Address of the kernel's tile counter.
    counter: u64,
}

impl EmulatedKernel {
    /// Decodes code and lends it operands, to be launched so.
    ///
    /// # Errors
    /// What the emulator does not know.
    pub fn new(code: &GpuCode, operands: &Operands, launch: &Launch, options: Options) -> Result<EmulatedKernel, EmulationError> {
        let mut device = Device::new(options);
        let module = device.load(code.ptx)?;
        // SAFETY: operands outlive the device, begin at multiples of 64, and only its blocks use them.
        let mut lent = |at: *const u8, bytes: u64| unsafe { device.lend(at, bytes) };
        let addresses: Vec<u64> = operands.all().map(|m| lent(m.start(), m.bytes())).collect();
        let scratch = device.allocate(launch.scratch_bytes);
        let counter = device.allocate(4);
        device.write(counter, &[0; 4])?;
        let parameters = launch.pack(&addresses, &operands.scalar_bits, [scratch, counter], encode).map_err(EmulationError::Unknown)?;
        let launch = emulator::Launch { grid: [launch.grid, 1, 1], threads: [launch.block, 1, 1], shared: launch.shared_bytes };
        Ok(EmulatedKernel { device, module, name: code.name.into(), launch, parameters, counter })
    }

    /// The kernel, and its launch.
    ///
    /// # Errors
    /// If its module does not have it.
    pub fn kernel(&self) -> Result<(&emulator::Kernel, &emulator::Launch), EmulationError> {
        let kernel = self.module.kernel(&self.name).ok_or_else(|| EmulationError::Unknown("its PTX has no kernel of its name".into()))?;
        Ok((kernel, &self.launch))
    }

    /// Whether the kernel has left its counter at 0, as its next launch wants it.
    ///
    /// # Errors
    /// At what it has left it.
    pub fn counter(&self) -> Result<(), EmulationError> {
        let mut count = [0; 4];
        self.device.read(self.counter, &mut count)?;
        match u32::from_le_bytes(count) {
            0 => Ok(()),
            n => Err(EmulationError::Fault(format!("it leaves its counter of tiles at {n}"))),
        }
    }

    /// Runs these blocks.
    ///
    /// # Errors
    /// What the emulator finds wrong, or cannot do.
    pub fn blocks(&self, blocks: &[usize]) -> Result<Statistics, EmulationError> {
        Ok(self.device.launch_some(self.kernel()?.0, self.launch, &self.parameters, Some(blocks))?)
    }
}

/// Runs some blocks of code that goes through so many points; whether these are all.
///
/// # Errors
/// What the emulator finds wrong, or cannot do.
pub fn run(code: &GpuCode, operands: &Operands, cost: u64, between: u64) -> Result<bool, EmulationError> {
    let launch = code.launch.ok_or_else(|| EmulationError::Unknown("nothing says how it is launched".into()))?;
    let launch = spread(launch, code.tiles);
    let of_block = cost / u64::from(launch.grid);
    if of_block > LONGEST {
        return Err(EmulationError::Unknown(format!("a block of it goes through {of_block} points")));
    }
    let loaded = EmulatedKernel::new(code, operands, &launch, Options { threads: 1, ..Options::default() })?;
    let blocks: Vec<usize> = some(launch.grid, cost, between).into_iter().collect();
    loaded.blocks(&blocks)?;
    let all = blocks.len() == launch.grid as usize;
    if all {
        loaded.counter()?;
    }
    Ok(all)
}
