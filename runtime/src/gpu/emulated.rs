//! A card that is the emulator: the PTX, parameters and launches of a GPU, on this machine's CPU. Memory that nobody wrote is NaN.

use super::{Card, Queue};
use crate::artifact::Artifact;
use crate::device::DeviceError;
use emulator::{Device, Module, Options};
use ir::launch::Launch;
use ir::program::KernelId;

/// The kernels of an artifact in the emulator.
pub struct Emulated {
    device: Device,
    /// A module and a kernel's name, per kernel.
    kernels: Vec<(Module, String)>,
}

impl Emulated {
    /// Decodes the kernels of an artifact for a GPU. Blocks run on so many threads.
    ///
    /// # Errors
    /// PTX that cannot be read or decoded, with its line.
    pub fn load(artifact: &Artifact, threads: usize) -> Result<Emulated, DeviceError> {
        let mut device = Device::new(Options { threads, ..Options::default() });
        let mut kernels = vec![];
        for entry in &artifact.kernels {
            let failed = |e: &dyn std::fmt::Display| DeviceError::Failed(format!("kernel {}: {e}", entry.name));
            let text = artifact.ptx(entry).map_err(|e| failed(&e))?;
            kernels.push((device.load(&text).map_err(|e| failed(&e))?, entry.name.clone()));
        }
        Ok(Emulated { device, kernels })
    }
}

impl Card for Emulated {
    fn allocate(&mut self, bytes: u64) -> Result<u64, String> {
        Ok(self.device.allocate(bytes))
    }

    fn write(&self, _: Queue, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.device.write(address, bytes).map_err(|e| e.to_string())
    }

    fn read(&self, _: Queue, address: u64, out: &mut [u8]) -> Result<(), String> {
        self.device.read(address, out).map_err(|e| e.to_string())
    }

    fn fill(&self, address: u64, element: &[u8], count: u64) -> Result<(), String> {
        self.device.write(address, &element.repeat(count as usize)).map_err(|e| e.to_string())
    }

    fn launch(&self, kernel: KernelId, launch: &Launch, parameters: &[u8]) -> Result<(), String> {
        let (module, name) = &self.kernels[kernel.index()];
        let code = module.kernel(name).ok_or_else(|| format!("its PTX has no kernel {name}"))?;
        let launch = emulator::Launch { grid: [launch.grid, 1, 1], threads: [launch.block, 1, 1], shared: launch.shared_bytes };
        self.device.launch(code, launch, parameters).map(drop).map_err(|e| e.to_string())
    }

    fn synchronize(&self) -> Result<(), String> {
        Ok(())
    }
}
