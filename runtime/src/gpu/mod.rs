//! Kernels of PTX: what is the same on a GPU and in the emulator. One allocation per arena and one for scratch;
//! parameters are packed as the artifact says. What is to be done is put together until somebody waits for it, so
//! that a card can do all of it at once.
//!
//! Arenas of the host are memory of this process, and its kernels native code. The card copies between them and its
//! own.

mod card;
pub mod cuda;
mod emulated;
mod host;
pub mod nccl;
mod outbox;
mod send_turns;

pub use card::{CardExchange, CardMessage, GpuDevice, Outgoing, Queue, Work};
pub use cuda::Cuda;
pub use emulated::Emulated;

use crate::artifact::{Artifact, KernelEntry, launch_bytes};
use crate::comm;
use crate::cpu::{Threads, flush_denormals};
use crate::device::{
    Device, DeviceError, DeviceHandle, Element, Fabric, Launches, Location, Memory, ThreadResources, advanced, bits, decode, encode,
};
use crate::executor::{Copied, Transfer, arena_bytes};
use crate::target::DeviceKind;
use host::{HostArenas, HostKernels};
use ir::kernel::Kernel;
use ir::launch::{COUNTER_BYTES, TensorMap};
use ir::op::DType;
use ir::program::{Arena, KernelId, SendTurn, Space, Stream};
use send_turns::SendTurns;
use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Most bytes from the host that are put together.
const MOST_BYTES: usize = 16 << 20;

/// Bytes of a card that its driver takes for a process: the context, code of kernels, captured graphs. An estimate,
/// as the driver says nothing of it beforehand. A context with kernels that are loaded when they are needed takes
/// about 400 MiB since CUDA 11.7 (maintainers of PyTorch in its issues 107667 and 109888); code and graphs are some
/// MiB more.
pub const CONTEXT_BYTES: u64 = 512 << 20;

/// Error of a copy that does not go between the two memories.
const WITHIN: &str = "a copy within one memory, or between a card and a disk";

/// A card with the arenas on it and beside it, which kernels and communication share.
struct CardArenas<C> {
    card: C,
    /// Addresses of all, in its memory or the host's.
    arenas: [u64; Arena::ALL.len()],
    /// Arenas of the host.
    host: HostArenas,
    /// What failed first where nobody could be told: a copy.
    failed: Mutex<Option<String>>,
}

impl<C: GpuDevice> CardArenas<C> {
    fn address(&self, at: Location) -> u64 {
        self.arenas[at.arena as usize] + at.byte
    }

    fn load(&self, queue: Queue, at: Location, out: &mut [u8]) {
        match at.arena.space() {
            Some(Space::Device) => self.note(self.card.read(queue, self.address(at), out)),
            Some(Space::Host) | None => self.host.load(at, DType::Bool, out),
        }
    }

    /// Copies from one memory to the other.
    fn copy(&self, queue: Queue, from: Location, to: Location, bytes: usize) {
        let mut host = self.host.clone();
        self.note(match [from, to].map(|at| at.arena.space()) {
            [Some(Space::Device), Some(Space::Host)] => self.card.read(queue, self.address(from), host.range_mut(to, bytes)),
            [Some(Space::Host), Some(Space::Device)] => self.card.write(queue, self.address(to), host.range(from, bytes)),
            [None, Some(Space::Host)] | [Some(Space::Host), None] => {
                host.copy(from, to, DType::Bool, bytes as u64);
                Ok(())
            }
            _ => Err(WITHIN.into()),
        });
    }

    fn note(&self, outcome: Result<(), String>) {
        if let Err(e) = outcome {
            self.failed.lock().expect("invariant: no holder panics").get_or_insert(e);
        }
    }

    fn outcome(&self, outcome: Result<(), String>) -> Result<(), DeviceError> {
        let first = self.failed.lock().expect("invariant: no holder panics").take();
        first.map_or(outcome, Err).map_err(DeviceError::Failed)?;
        self.host.outcome()
    }
}

/// The arenas, as communication beside kernels sees them.
struct SharedArenas<C>(Arc<CardArenas<C>>);

/// A card for one rank alone, with the arenas that it needs: a GPU, or the emulator on so many threads; the host's
/// kernels run on as many.
///
/// # Errors
/// If the artifact's kernels do not load, there is not enough memory, something rests on a disk, or the device is
/// neither.
pub fn open<'a>(artifact: &'a Artifact, device: DeviceKind, threads: usize) -> Result<Box<dyn Device + 'a>, DeviceError> {
    let (bytes, of_host) = (arena_bytes(&artifact.job, 0), Threads::of_rank(0, 1, threads));
    match device {
        DeviceKind::Cuda => Ok(Box::new(Gpu::new(artifact, Cuda::load(artifact, &artifact.manifest.target.arch(), 0)?, bytes, None, &of_host)?)),
        DeviceKind::Emulated => Ok(Box::new(Gpu::new(artifact, Emulated::load(artifact, threads)?, bytes, None, &of_host)?)),
        DeviceKind::Cpu | DeviceKind::Reference => Err(DeviceError::Failed(format!("the device `{}` is no GPU", device.name()))),
    }
}

/// Work that is put together.
#[derive(Default)]
struct PendingWork {
    list: Vec<Work>,
    /// Bytes that come from the host, in the whole list.
    bytes: usize,
}

/// A rank's card.
pub struct Gpu<'a, C> {
    signatures: &'a [Kernel],
    entries: &'a [KernelEntry],
    held: Arc<CardArenas<C>>,
    scratch: u64,
    /// Where kernels count, one after the other by their number.
    counters: u64,
    /// Runs the host's kernels, if there are any.
    host_kernels: Option<HostKernels>,
    /// What the card has not been told yet.
    work: RefCell<PendingWork>,
    turns: SendTurns,
    /// Slots of each channel.
    slots: u32,
}

impl<'a, C: GpuDevice + 'static> Gpu<'a, C> {
    /// Arenas of so many bytes on a card that has the artifact's kernels, and beside it; what rests on a disk, in
    /// this directory. Kernels of the host run on these threads.
    ///
    /// # Errors
    /// If there is not enough memory, or the code for the host does not load.
    pub fn new(
        artifact: &'a Artifact,
        mut card: C,
        bytes: [u64; Arena::ALL.len()],
        dir: Option<&Path>,
        threads: &Threads,
    ) -> Result<Gpu<'a, C>, DeviceError> {
        let (host, lent) = host::arenas(bytes, dir, &mut card)?;
        let mut allocate =
            |arena: &'static str, bytes: u64| card.allocate(bytes.max(1)).map_err(|cause| DeviceError::OutOfMemory { arena, bytes, cause });
        let mut arenas = lent;
        for arena in Arena::ALL.into_iter().filter(|a| a.space() == Some(Space::Device)) {
            arenas[arena as usize] = allocate(arena.name(), bytes[arena as usize])?;
        }
        let [scratch_bytes, counter_bytes] = launch_bytes(&artifact.kernels);
        let (scratch, counters) = (allocate("scratch", scratch_bytes)?, allocate("counters of tiles", counter_bytes)?);
        if counter_bytes > 0 {
            card.write(Queue::Compute, counters, &vec![0; counter_bytes as usize]).map_err(DeviceError::Failed)?;
        }
        let host_kernels = HostKernels::load(artifact, &host, threads)?;
        let held = Arc::new(CardArenas { card, arenas, host, failed: Mutex::new(None) });
        Ok(Gpu {
            signatures: &artifact.job.kernels,
            entries: &artifact.kernels,
            held,
            scratch,
            counters,
            host_kernels,
            work: RefCell::default(),
            turns: SendTurns::default(),
            slots: artifact.job.in_flight.max(1),
        })
    }

    fn later(&self, work: Work) {
        let bytes = work.bytes();
        if self.work.borrow().bytes + bytes > MOST_BYTES {
            self.held.note(self.begin());
        }
        let mut later = self.work.borrow_mut();
        later.bytes += bytes;
        later.list.push(work);
    }

    /// Gives the card what it has not been told yet.
    fn begin(&self) -> Result<(), String> {
        match self.work.take().list {
            work if work.is_empty() => Ok(()),
            work => self.held.card.run(&work, self.host_kernels.as_ref()),
        }
    }

    /// Waits until the card is through, whose copies may use the host's memory.
    fn finish(&self) {
        self.held.note(self.begin().and_then(|()| self.held.card.synchronize()));
    }
}

impl<C: GpuDevice> Memory for SharedArenas<C> {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        self.0.load(Queue::Beside, at, out);
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        match at.arena.space() {
            Some(Space::Device) => self.0.note(self.0.card.write(Queue::Beside, self.0.address(at), bytes)),
            Some(Space::Host) | None => self.0.host.clone().store(at, DType::Bool, bytes),
        }
    }

    fn copy(&mut self, from: Location, to: Location, dtype: DType, count: u64) {
        self.0.copy(Queue::Beside, from, to, (count * dtype.bytes()) as usize);
    }

    fn advance(&mut self, copied: &Copied, done: u64, most: usize) -> Result<u64, DeviceError> {
        match [copied.src, copied.dst].iter().any(|at| at.arena == Arena::Disk) {
            true => self.0.host.clone().advance(copied, done, most),
            false => Ok(advanced(self, copied, done, most)),
        }
    }

    fn rest(&self, most: Duration) -> bool {
        self.0.host.rest(most)
    }

    fn outcome(&self) -> Result<(), DeviceError> {
        self.0.host.outcome()
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        numbers(dtype, out, |bytes| self.load(at, dtype, bytes));
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.store(at, dtype, &elements(dtype, values));
    }
}

impl<C: GpuDevice + 'static> Memory for Gpu<'_, C> {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        match at.arena.space() {
            Some(Space::Device) => self.held.note(self.begin()),
            Some(Space::Host) | None => self.finish(),
        }
        self.held.load(Queue::Compute, at, out);
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        match at.arena.space() {
            Some(Space::Device) => self.later(Work::Write { address: self.held.address(at), bytes: bytes.to_vec() }),
            Some(Space::Host) | None => {
                self.finish();
                self.held.host.clone().store(at, DType::Bool, bytes);
            }
        }
    }

    fn copy(&mut self, from: Location, to: Location, dtype: DType, count: u64) {
        self.held.note(self.begin());
        self.held.copy(Queue::Compute, from, to, (count * dtype.bytes()) as usize);
    }

    fn outcome(&self) -> Result<(), DeviceError> {
        self.held.host.outcome()
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        numbers(dtype, out, |bytes| self.load(at, dtype, bytes));
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.store(at, dtype, &elements(dtype, values));
    }
}

/// Numbers from elements that `load` gives.
fn numbers(dtype: DType, out: &mut [f64], load: impl FnOnce(&mut [u8])) {
    let size = dtype.bytes() as usize;
    let mut bytes = vec![0; out.len() * size];
    load(&mut bytes);
    bytes.chunks_exact(size).zip(out).for_each(|(b, x)| *x = decode(dtype, b));
}

/// Numbers as elements.
fn elements(dtype: DType, values: &[f64]) -> Vec<u8> {
    let size = dtype.bytes() as usize;
    let mut bytes = vec![0; values.len() * size];
    bytes.chunks_exact_mut(size).zip(values).for_each(|(b, x)| encode(dtype, *x, b));
    bytes
}

impl<C: GpuDevice + 'static> Launches for Gpu<'_, C> {
    fn needs(&self, kernel: KernelId) -> Option<ThreadResources> {
        self.held.card.needs(kernel)
    }

    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        let not_loaded = || DeviceError::NotLoaded(kernel.0);
        let entry = self.entries.get(kernel.index()).ok_or_else(not_loaded)?;
        let Some(launch) = &entry.launch else {
            // This keeps the order of issue: the operands are there, and later work finds the results.
            self.synchronize()?;
            return self.host_kernels.as_mut().ok_or_else(not_loaded)?.launch(kernel, args, scalars);
        };
        let operands: Vec<u64> = args.iter().map(|at| self.held.address(*at)).collect();
        let scalars: Vec<u64> = scalars.iter().zip(&self.signatures[kernel.index()].scalars).map(|(x, t)| bits(*t, *x)).collect();
        let counter = self.counters + COUNTER_BYTES * u64::from(kernel.0);
        let encode = |map: &TensorMap, address| self.held.card.encode(map, address);
        let parameters = launch.pack(&operands, &scalars, [self.scratch, counter], encode).map_err(DeviceError::Failed)?;
        self.later(Work::Launch { kernel, parameters });
        Ok(())
    }
}

impl<C: GpuDevice + 'static> Device for Gpu<'_, C> {
    fn second_handle(&self) -> Option<DeviceHandle> {
        Some(DeviceHandle { memory: Box::new(SharedArenas(self.held.clone())), begin: Box::new(flush_denormals) })
    }

    fn host(&self) -> Option<Result<Box<dyn Launches + Send>, DeviceError>> {
        self.host_kernels.clone().map(|n| Ok(Box::new(n) as Box<dyn Launches + Send>))
    }

    fn fabric(&mut self) -> Option<&mut dyn Fabric> {
        if self.held.card.is_connected() { Some(self) } else { None }
    }

    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        let (mut element, width) = ([0; 4], dtype.bytes());
        encode(dtype, value, &mut element[..width as usize]);
        if at.arena.space() != Some(Space::Device) {
            self.finish();
            return self.held.host.clone().fill(at, &element[..width as usize], count);
        }
        self.later(Work::Fill { address: self.held.address(at), element, width: width as u8, count });
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.held.outcome(self.begin().and_then(|()| self.held.card.synchronize()))
    }
}

impl<C: GpuDevice + 'static> Gpu<'_, C> {
    /// Tells of messages whose turn has come.
    fn send(&mut self) {
        self.turns.due().into_iter().for_each(|o| self.later(Work::Send(o)));
    }

    /// Tells of an exchange, and of what has its turn before, with and after it.
    fn exchange(&mut self, stream: Stream, exchange: CardExchange) {
        match self.turns.pass() {
            Ok(outgoing) => self.later(Work::Exchange { stream, exchange, outgoing }),
            Err(e) => self.held.note(Err(e)),
        }
        self.send();
    }
}

impl<C: GpuDevice + 'static> Fabric for Gpu<'_, C> {
    fn phase(&mut self, sends: &[SendTurn]) {
        self.turns.begin(sends);
    }

    fn transfer(&mut self, stream: Stream, transfer: &Transfer) {
        let message = |m: &comm::Message| CardMessage { channel: m.channel, dtype: m.dtype, count: m.count, address: self.held.address(m.at) };
        match transfer {
            Transfer::Collective(members, e) => {
                let [from, to] = [e.src, e.dst].map(|at| self.held.address(at));
                self.exchange(stream, CardExchange::Collective { members: members.to_vec(), terms: e.terms(), from, to });
            }
            Transfer::Recv(from, m) => {
                let message = message(m);
                self.exchange(stream, CardExchange::Receive { from: *from, message });
            }
            Transfer::Send(to, m) => {
                let message = message(m);
                let outgoing = self.turns.post(*to, &message, self.slots);
                self.later(Work::Post { stream, address: message.address, outgoing });
                self.send();
            }
            Transfer::Copy(c) => {
                let [from, to] = [c.src, c.dst].map(|at| self.held.address(at));
                let (to, device, host) = match [c.src, c.dst].map(|at| at.arena.space()) {
                    [Some(Space::Device), Some(Space::Host)] => (Space::Host, from, to),
                    [Some(Space::Host), Some(Space::Device)] => (Space::Device, to, from),
                    [None, Some(Space::Host)] | [Some(Space::Host), None] => return self.later(Work::Disk { stream, copied: *c }),
                    _ => return self.held.note(Err(WITHIN.into())),
                };
                self.later(Work::Copy { stream, to, device, host, bytes: c.count * c.dtype.bytes() });
            }
        }
    }

    fn leave_out(&mut self) {
        match self.turns.pass() {
            Ok(none) if none.is_empty() => {}
            Ok(_) => self.held.note(Err("a send was to go out with a collective that is left out".into())),
            Err(e) => self.held.note(Err(e)),
        }
        self.send();
    }

    fn run_on_host(&mut self, stream: Stream, kernel: KernelId, args: &[Location], scalars: &[f64]) {
        self.later(Work::Host { stream, kernel, args: args.to_vec(), scalars: scalars.iter().map(|x| x.to_bits()).collect() });
    }

    fn record(&mut self, stream: Stream, event: u32) {
        self.later(Work::Record { stream, event });
    }

    fn wait(&mut self, stream: Stream, event: u32) {
        self.later(Work::Wait { stream, event });
    }
}

#[cfg(test)]
mod tests;
