//! The host beside a card: arenas in memory of this process, and kernels of native code.

use super::Card;
use crate::artifact::Artifact;
use crate::cpu::{Arenas, Cpu, Library, Threads, flush_denormals};
use crate::device::{DeviceError, Launches, Location};
use ir::program::{Arena, KernelId, Space};
use std::sync::{Arc, Mutex};

pub(super) type HostArenas = Arenas;

/// The host's arenas, as the card knows them, and their addresses.
///
/// # Errors
/// If there is not so much memory, or the card does not take it.
pub(super) fn arenas<C: Card>(bytes: [u64; Arena::ALL.len()], card: &mut C) -> Result<(HostArenas, [u64; Arena::ALL.len()]), DeviceError> {
    let of_host = |arena: &Arena| arena.space() == Space::Host;
    let mut arenas = Arenas::new(Arena::ALL.map(|arena| if of_host(&arena) { bytes[arena as usize] } else { 0 }))?;
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

/// Runs the host's kernels of an artifact.
#[derive(Clone)]
pub struct Natively(Arc<Mutex<Cpu>>);

impl Natively {
    /// None if there are no such kernels. Threads go where the system puts them: a card's own may need their cores.
    ///
    /// # Errors
    /// If the code does not load or a thread does not start.
    pub(super) fn load(artifact: &Artifact, arenas: &HostArenas, threads: &Threads) -> Result<Option<Natively>, DeviceError> {
        if artifact.kernels.iter().all(|k| k.launch.is_some()) {
            return Ok(None);
        }
        let threads = Threads { cores: None, ..threads.clone() };
        let cpu = Cpu::with(arenas.clone(), &artifact.job.kernels, Library::load(artifact)?, &threads)?;
        Ok(Some(Natively(Arc::new(Mutex::new(cpu)))))
    }
}

impl Launches for Natively {
    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        self.0.lock().expect("invariant: no holder panics").launch(kernel, args, scalars)
    }
}

/// A kernel of the host with its operands, for whoever comes to its turn.
pub(super) struct Call {
    natively: Natively,
    kernel: KernelId,
    args: Vec<Location>,
    scalars: Mutex<Vec<f64>>,
}

impl Call {
    pub(super) fn new(natively: &Natively, kernel: KernelId, args: &[Location], scalars: &[u64]) -> Call {
        let call = Call { natively: natively.clone(), kernel, args: args.to_vec(), scalars: Mutex::default() };
        call.set(scalars);
        call
    }

    /// Other scalars, as bits. It is nobody's turn.
    pub(super) fn set(&self, scalars: &[u64]) {
        *self.scalars.lock().expect("invariant: no holder panics") = scalars.iter().map(|x| f64::from_bits(*x)).collect();
    }

    /// Runs it on this thread.
    pub(super) fn run(&self) {
        flush_denormals();
        let scalars = self.scalars.lock().expect("invariant: no holder panics");
        self.natively.clone().launch(self.kernel, &self.args, &scalars).expect("invariant: kernels of the host are loaded");
    }
}
