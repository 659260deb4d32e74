//! Kernels of PTX: what is the same on a GPU and in the emulator. One allocation per arena and one for scratch; parameters are packed as
//! the artifact says.

mod emulated;

pub use emulated::Emulated;

use crate::artifact::{Artifact, KernelEntry};
use crate::device::{Beside, Device, DeviceError, Element, Location, Memory, bits, decode, encode};
use ir::kernel::Kernel;
use ir::launch::Launch;
use ir::op::DType;
use ir::program::{Arena, KernelId};
use std::sync::{Arc, Mutex};

/// Which of a card's streams does something: that of kernels, or one beside it for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    Compute,
    Beside,
}

/// A GPU, or what stands for one. It has been given the kernels of an artifact, which it numbers as the job does.
pub trait Card: Send + Sync {
    /// Reserves device memory, at an address that is a multiple of 256.
    ///
    /// # Errors
    /// If there is not so much.
    fn allocate(&mut self, bytes: u64) -> Result<u64, String>;
    /// Copies to the device; done when it returns, after everything before on that stream.
    ///
    /// # Errors
    /// What the card says, also of what was begun before.
    fn write(&self, queue: Queue, address: u64, bytes: &[u8]) -> Result<(), String>;
    /// Copies from the device; likewise.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn read(&self, queue: Queue, address: u64, out: &mut [u8]) -> Result<(), String>;
    /// Repeats an element of 1, 2 or 4 bytes. It may be done later, as what follows on the stream of kernels.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn fill(&self, address: u64, element: &[u8], count: u64) -> Result<(), String>;
    /// Launches a kernel, on the stream of kernels.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn launch(&self, kernel: KernelId, launch: &Launch, parameters: &[u8]) -> Result<(), String>;
    /// Waits until all is done.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn synchronize(&self) -> Result<(), String>;
}

/// What kernels and communication share.
struct Held<C> {
    card: C,
    arenas: [u64; 3],
    /// What failed first where nobody could be told: a copy.
    failed: Mutex<Option<String>>,
}

impl<C: Card> Held<C> {
    fn address(&self, at: Location) -> u64 {
        self.arenas[at.arena as usize] + at.byte
    }

    fn note(&self, outcome: Result<(), String>) {
        if let Err(e) = outcome {
            self.failed.lock().expect("invariant: no holder panics").get_or_insert(e);
        }
    }

    fn outcome(&self, outcome: Result<(), String>) -> Result<(), DeviceError> {
        let first = self.failed.lock().expect("invariant: no holder panics").take();
        first.map_or(outcome, Err).map_err(DeviceError::Failed)
    }
}

/// The arenas, as one of the streams sees them.
struct Arenas<C> {
    held: Arc<Held<C>>,
    queue: Queue,
}

/// A rank's card.
pub struct Gpu<'a, C> {
    signatures: &'a [Kernel],
    entries: &'a [KernelEntry],
    arenas: Arenas<C>,
    scratch: u64,
}

impl<'a, C: Card + 'static> Gpu<'a, C> {
    /// Arenas of so many bytes on a card that has the artifact's kernels.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(artifact: &'a Artifact, mut card: C, bytes: [u64; 3]) -> Result<Gpu<'a, C>, DeviceError> {
        let mut allocate =
            |arena: &'static str, bytes: u64| card.allocate(bytes.max(1)).map_err(|cause| DeviceError::OutOfMemory { arena, bytes, cause });
        let mut arenas = [0; 3];
        for arena in [Arena::Persistent, Arena::Stash, Arena::Temporary] {
            arenas[arena as usize] = allocate(arena.name(), bytes[arena as usize])?;
        }
        let most = artifact.kernels.iter().filter_map(|k| k.launch.as_ref()).map(|l| l.scratch_bytes).max().unwrap_or(0);
        let scratch = allocate("scratch", most)?;
        let held = Arc::new(Held { card, arenas, failed: Mutex::new(None) });
        Ok(Gpu { signatures: &artifact.job.kernels, entries: &artifact.kernels, arenas: Arenas { held, queue: Queue::Compute }, scratch })
    }
}

impl<C: Card> Memory for Arenas<C> {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        self.held.note(self.held.card.read(self.queue, self.held.address(at), out));
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        self.held.note(self.held.card.write(self.queue, self.held.address(at), bytes));
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        let size = dtype.bytes() as usize;
        let mut bytes = vec![0; out.len() * size];
        self.load(at, dtype, &mut bytes);
        bytes.chunks_exact(size).zip(out).for_each(|(b, x)| *x = decode(dtype, b));
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        let size = dtype.bytes() as usize;
        let mut bytes = vec![0; values.len() * size];
        bytes.chunks_exact_mut(size).zip(values).for_each(|(b, x)| encode(dtype, *x, b));
        self.store(at, dtype, &bytes);
    }
}

impl<C: Card> Memory for Gpu<'_, C> {
    fn element(&self, dtype: DType) -> Element {
        self.arenas.element(dtype)
    }

    fn load(&self, at: Location, dtype: DType, out: &mut [u8]) {
        self.arenas.load(at, dtype, out);
    }

    fn store(&mut self, at: Location, dtype: DType, bytes: &[u8]) {
        self.arenas.store(at, dtype, bytes);
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        self.arenas.read(at, dtype, out);
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.arenas.write(at, dtype, values);
    }
}

impl<C: Card + 'static> Device for Gpu<'_, C> {
    fn beside(&self) -> Option<Beside> {
        let memory = Arenas { held: self.arenas.held.clone(), queue: Queue::Beside };
        Some(Beside { memory: Box::new(memory), begin: Box::new(|| {}) })
    }

    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        let mut element = [0; 4];
        let element = &mut element[..dtype.bytes() as usize];
        encode(dtype, value, element);
        let held = &self.arenas.held;
        held.note(held.card.fill(held.address(at), element, count));
    }

    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        let not_loaded = || DeviceError::NotLoaded(kernel.0);
        let launch = self.entries.get(kernel.index()).and_then(|e| e.launch.as_ref()).ok_or_else(not_loaded)?;
        let held = &self.arenas.held;
        let operands: Vec<u64> = args.iter().map(|at| held.address(*at)).collect();
        let scalars: Vec<u64> = scalars.iter().zip(&self.signatures[kernel.index()].scalars).map(|(x, t)| bits(*t, *x)).collect();
        held.outcome(held.card.launch(kernel, launch, &launch.pack(&operands, &scalars, self.scratch)))
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        let held = &self.arenas.held;
        held.outcome(held.card.synchronize())
    }
}
