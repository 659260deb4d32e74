//! The host beside a card: arenas in memory of this process, and kernels of native code.

use super::GpuDevice;
use crate::artifact::Artifact;
use crate::cpu::{Arenas, Cpu, KernelLibrary, Threads, flush_denormals};
use crate::device::{DeviceError, Launches, Location, Memory};
use crate::executor::Copied;
use ir::program::{Arena, KernelId, Space};
use std::path::Path;
use std::sync::{Arc, Mutex};

pub(super) type HostArenas = Arenas;

/// The host's arenas, as the card knows them, and their addresses.
///
/// # Errors
/// If there is not so much memory, or the card does not take it; or no directory for what rests on a disk.
pub(super) fn arenas<C: GpuDevice>(
    bytes: [u64; Arena::ALL.len()],
    dir: Option<&Path>,
    card: &mut C,
) -> Result<(HostArenas, [u64; Arena::ALL.len()]), DeviceError> {
    let of_host = |arena: &Arena| arena.space() == Some(Space::Host);
    let own = Arena::ALL.map(|arena| if arena.space() == Some(Space::Device) { 0 } else { bytes[arena as usize] });
    let mut arenas = Arenas::new(own, dir)?;
    let mut addresses = [0; Arena::ALL.len()];
    for arena in Arena::ALL.into_iter().filter(of_host) {
        let (start, bytes) = (Location { arena, byte: 0 }, bytes[arena as usize]);
        addresses[arena as usize] = arenas.address(start);
        if bytes > 0 {
            let lent = card.lend(arenas.range_mut(start, bytes as usize));
            lent.map_err(|cause| DeviceError::OutOfMemory { arena: arena.name(), bytes, cause })?;
        }
    }
    Ok((arenas, addresses))
}

/// Runs the host's kernels of an artifact, in its arenas.
#[derive(Clone)]
pub struct HostKernels(Arc<Mutex<Cpu>>, HostArenas);

impl HostKernels {
    /// None if there are no such kernels. Threads go where the system puts them: a card's own may need their cores.
    ///
    /// # Errors
    /// If the code does not load or a thread does not start.
    pub(super) fn load(artifact: &Artifact, arenas: &HostArenas, threads: &Threads) -> Result<Option<HostKernels>, DeviceError> {
        if artifact.kernels.iter().all(|k| k.launch.is_some()) {
            return Ok(None);
        }
        let threads = Threads { cores: None, ..threads.clone() };
        let cpu = Cpu::with(arenas.clone(), &artifact.job.kernels, KernelLibrary::load(artifact)?, &threads)?;
        Ok(Some(HostKernels(Arc::new(Mutex::new(cpu)), arenas.clone())))
    }

    pub(super) fn arenas(&self) -> HostArenas {
        self.1.clone()
    }
}

impl Launches for HostKernels {
    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        self.0.lock().expect("invariant: no holder panics").launch(kernel, args, scalars)
    }
}

/// What the host does, for whoever comes to its turn.
pub(super) enum HostCall {
    /// A kernel with its operands.
    Kernel { host_kernels: HostKernels, kernel: KernelId, args: Vec<Location>, scalars: Mutex<Vec<f64>> },
    /// A copy to or from its disk.
    Disk(HostArenas, Copied),
}

impl HostCall {
    pub(super) fn new(host_kernels: &HostKernels, kernel: KernelId, args: &[Location], scalars: &[u64]) -> HostCall {
        let call = HostCall::Kernel { host_kernels: host_kernels.clone(), kernel, args: args.to_vec(), scalars: Mutex::default() };
        call.set(scalars);
        call
    }

    /// Other scalars of a kernel, as bits. It is nobody's turn.
    pub(super) fn set(&self, bits: &[u64]) {
        if let HostCall::Kernel { scalars, .. } = self {
            *scalars.lock().expect("invariant: no holder panics") = bits.iter().map(|x| f64::from_bits(*x)).collect();
        }
    }

    /// Does it on this thread. A disk's failure is its arenas' to tell.
    pub(super) fn run(&self) {
        match self {
            HostCall::Kernel { host_kernels, kernel, args, scalars } => {
                flush_denormals();
                let scalars = scalars.lock().expect("invariant: no holder panics");
                host_kernels.clone().launch(*kernel, args, &scalars).expect("invariant: kernels of the host are loaded");
            }
            HostCall::Disk(arenas, c) => arenas.clone().copy(c.src, c.dst, c.dtype, c.count),
        }
    }
}
