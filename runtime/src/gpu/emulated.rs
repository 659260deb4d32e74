//! A card that is the emulator: the PTX, parameters and launches of a GPU, on this machine's CPU. Memory that nobody
//! wrote is NaN.

use super::host::HostKernels;
use super::{GpuDevice, Queue, Work};
use crate::artifact::Artifact;
use crate::device::DeviceError;
use emulator::{Device, Launch, Module, Options};
use ir::launch::{MAP_BYTES, Swizzle, TensorMap};
use ir::program::KernelId;
use std::collections::BTreeMap;

/// Each byte of memory that nobody wrote: NaN in every float.
const NOBODY: u8 = 0xff;

/// The kernels of an artifact in the emulator.
pub struct Emulated {
    device: Device,
    /// Its module, its name there, and its launch, of each kernel that is not the host's.
    kernels: BTreeMap<KernelId, (Module, String, Launch)>,
}

/// Number of multiprocessors: as many as an H100 has.
const MULTIPROCESSORS: u32 = 132;

impl Emulated {
    /// Decodes the kernels of an artifact for a GPU. Blocks run on so many threads.
    ///
    /// # Errors
    /// PTX that cannot be read or decoded, with its line.
    pub fn load(artifact: &Artifact, threads: usize) -> Result<Emulated, DeviceError> {
        let mut device = Device::new(Options { threads, ..Options::default() });
        let mut kernels = BTreeMap::new();
        for (id, entry) in artifact.launched() {
            let failed = |e: &dyn std::fmt::Display| DeviceError::Failed(format!("kernel {}: {e}", entry.name));
            let module = device.load(artifact.ptx(entry)).map_err(|e| failed(&e))?;
            let launch = entry.launch.as_ref().ok_or_else(|| failed(&"nothing about its launch"))?;
            let launch = Launch { grid: [launch.blocks_on(MULTIPROCESSORS), 1, 1], threads: [launch.block, 1, 1], shared: launch.shared_bytes };
            kernels.insert(id, (module, entry.name.clone(), launch));
        }
        Ok(Emulated { device, kernels })
    }
}

impl GpuDevice for Emulated {
    fn allocate(&mut self, bytes: u64) -> Result<u64, String> {
        Ok(self.device.allocate(bytes))
    }

    fn lend(&mut self, memory: &mut [u8]) -> Result<(), String> {
        memory.fill(NOBODY);
        Ok(())
    }

    fn write(&self, _: Queue, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.device.write(address, bytes).map_err(|e| e.to_string())
    }

    fn read(&self, _: Queue, address: u64, out: &mut [u8]) -> Result<(), String> {
        self.device.read(address, out).map_err(|e| e.to_string())
    }

    fn encode(&self, map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String> {
        let swizzle = match map.swizzle {
            Swizzle::B128 => emulator::Swizzle::B128,
        };
        let (size, stride, extent) = (map.sizes.clone(), map.strides.clone(), map.extents.clone());
        emulator::TensorMap { base: address, element: map.dtype.bytes() as u32, size, stride, extent, swizzle, tf32: map.tf32 }.encode()
    }

    fn run(&self, work: &[Work], _: Option<&HostKernels>) -> Result<(), String> {
        for work in work {
            let done = match work {
                Work::Launch { kernel, parameters } => {
                    let (module, name, launch) = &self.kernels[kernel];
                    let code = module.kernel(name).ok_or_else(|| format!("its PTX has no kernel {name}"))?;
                    self.device.launch(code, *launch, parameters).map(drop)
                }
                Work::Fill { address, element, width, count } => self.device.write(*address, &element[..usize::from(*width)].repeat(*count as usize)),
                Work::Write { address, bytes } => self.device.write(*address, bytes),
                Work::Copy { .. }
                | Work::Disk { .. }
                | Work::Host { .. }
                | Work::Post { .. }
                | Work::Send(_)
                | Work::Exchange { .. }
                | Work::Record { .. }
                | Work::Wait { .. } => {
                    unreachable!("invariant: only a card that is connected is told of other streams")
                }
            };
            done.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), String> {
        Ok(())
    }
}
