//! Kernels of PTX: what is the same on a GPU and in the emulator. One allocation per arena and one for scratch; parameters are packed as
//! the artifact says. What is to be done is put together until somebody waits for it, so that a card can do all of it at once.

pub mod cuda;
mod emulated;
mod graph;
pub mod nccl;

pub use cuda::Cuda;
pub use emulated::Emulated;

use crate::artifact::{Artifact, KernelEntry};
use crate::comm::Terms;
use crate::device::{Beside, Device, DeviceError, Element, Fabric, Location, Memory, bits, decode, encode};
use crate::executor::{Transfer, arena_bytes};
use crate::target::DeviceKind;
use ir::kernel::Kernel;
use ir::launch::{MAP_BYTES, TensorMap};
use ir::op::DType;
use ir::program::{Arena, Channel, KernelId, Space, Stream};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// Which of a card's streams does something: that of kernels, or one beside it for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    Compute,
    Beside,
}

/// Something for a card, on its stream of kernels if no other is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// The parameters are packed ([`ir::launch::Launch::pack`]).
    Launch {
        kernel: KernelId,
        parameters: Vec<u8>,
    },
    /// Repeats the first `width` bytes, 1, 2 or 4.
    Fill {
        address: u64,
        element: [u8; 4],
        width: u8,
        count: u64,
    },
    Write {
        address: u64,
        bytes: Vec<u8>,
    },
    /// The card exchanges with those of other ranks.
    Exchange {
        stream: Stream,
        between: Between,
    },
    Record {
        stream: Stream,
        event: u32,
    },
    /// For the last record of the event before this in the order of issue.
    Wait {
        stream: Stream,
        event: u32,
    },
}

/// What cards exchange, at addresses of this one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Between {
    Collective { members: Vec<u64>, terms: Terms, from: u64, to: u64 },
    Message { end: End, channel: Channel, dtype: DType, count: u64, address: u64 },
}

/// An end of a message, with the rank at the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    SendTo(u64),
    ReceiveFrom(u64),
}

impl Work {
    /// Where it goes.
    fn stream(&self) -> Stream {
        match self {
            Work::Exchange { stream, .. } | Work::Record { stream, .. } | Work::Wait { stream, .. } => *stream,
            Work::Launch { .. } | Work::Fill { .. } | Work::Write { .. } => Stream::Compute,
        }
    }

    /// Bytes that come from the host.
    fn bytes(&self) -> usize {
        match self {
            Work::Write { bytes, .. } => bytes.len(),
            Work::Launch { .. } | Work::Fill { .. } | Work::Exchange { .. } | Work::Record { .. } | Work::Wait { .. } => 0,
        }
    }
}

/// Most bytes from the host that are put together.
const MOST_BYTES: usize = 16 << 20;

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
    /// The bytes of a tensor map, as kernels take it, whose operand lies at an address.
    ///
    /// # Errors
    /// What is wrong with it.
    fn encode(&self, map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String>;
    /// Does something, on each stream one after the other; maybe later.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn run(&self, work: &[Work]) -> Result<(), String>;
    /// Whether it exchanges with the cards of other ranks by itself ([`Work::Exchange`]).
    fn is_connected(&self) -> bool {
        false
    }
    /// Waits until all is done.
    ///
    /// # Errors
    /// As for [`Card::write`].
    fn synchronize(&self) -> Result<(), String>;
}

/// What kernels and communication share.
struct Held<C> {
    card: C,
    /// Addresses of those in its memory.
    arenas: [u64; Arena::ALL.len()],
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

/// The arenas, as communication beside kernels sees them.
struct Arenas<C>(Arc<Held<C>>);

/// A card for one rank alone, with the arenas that it needs: a GPU, or the emulator on so many threads.
///
/// # Errors
/// If the artifact's kernels do not load, there is not enough memory, or the device is neither.
pub fn open<'a>(artifact: &'a Artifact, device: DeviceKind, threads: usize) -> Result<Box<dyn Device + 'a>, DeviceError> {
    let bytes = arena_bytes(&artifact.job, 0);
    match device {
        DeviceKind::Cuda => Ok(Box::new(Gpu::new(artifact, Cuda::load(artifact, &artifact.manifest.target.arch(), 0)?, bytes)?)),
        DeviceKind::Emulated => Ok(Box::new(Gpu::new(artifact, Emulated::load(artifact, threads)?, bytes)?)),
        DeviceKind::Cpu | DeviceKind::Reference => Err(DeviceError::Failed(format!("the device `{}` is no GPU", device.name()))),
    }
}

/// A rank's card.
pub struct Gpu<'a, C> {
    signatures: &'a [Kernel],
    entries: &'a [KernelEntry],
    held: Arc<Held<C>>,
    scratch: u64,
    /// What the card has not been told yet.
    work: RefCell<Vec<Work>>,
}

impl<'a, C: Card + 'static> Gpu<'a, C> {
    /// Arenas of so many bytes on a card that has the artifact's kernels.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(artifact: &'a Artifact, mut card: C, bytes: [u64; Arena::ALL.len()]) -> Result<Gpu<'a, C>, DeviceError> {
        let mut allocate =
            |arena: &'static str, bytes: u64| card.allocate(bytes.max(1)).map_err(|cause| DeviceError::OutOfMemory { arena, bytes, cause });
        let mut arenas = [0; Arena::ALL.len()];
        for arena in Arena::ALL.into_iter().filter(|a| a.space() == Space::Device) {
            arenas[arena as usize] = allocate(arena.name(), bytes[arena as usize])?;
        }
        let most = artifact.kernels.iter().filter_map(|k| k.launch.as_ref()).map(|l| l.scratch_bytes).max().unwrap_or(0);
        let scratch = allocate("scratch", most)?;
        let held = Arc::new(Held { card, arenas, failed: Mutex::new(None) });
        Ok(Gpu { signatures: &artifact.job.kernels, entries: &artifact.kernels, held, scratch, work: RefCell::default() })
    }

    fn later(&self, work: Work) {
        if self.work.borrow().iter().map(Work::bytes).sum::<usize>() + work.bytes() > MOST_BYTES {
            self.held.note(self.begin());
        }
        self.work.borrow_mut().push(work);
    }

    /// Gives the card what it has not been told yet.
    fn begin(&self) -> Result<(), String> {
        match self.work.take() {
            work if work.is_empty() => Ok(()),
            work => self.held.card.run(&work),
        }
    }
}

impl<C: Card> Memory for Arenas<C> {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        self.0.note(self.0.card.read(Queue::Beside, self.0.address(at), out));
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        self.0.note(self.0.card.write(Queue::Beside, self.0.address(at), bytes));
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        numbers(dtype, out, |bytes| self.load(at, dtype, bytes));
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.store(at, dtype, &elements(dtype, values));
    }
}

impl<C: Card + 'static> Memory for Gpu<'_, C> {
    fn element(&self, dtype: DType) -> Element {
        Element::native(dtype)
    }

    fn load(&self, at: Location, _: DType, out: &mut [u8]) {
        self.held.note(self.begin().and_then(|()| self.held.card.read(Queue::Compute, self.held.address(at), out)));
    }

    fn store(&mut self, at: Location, _: DType, bytes: &[u8]) {
        self.later(Work::Write { address: self.held.address(at), bytes: bytes.to_vec() });
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        numbers(dtype, out, |bytes| self.load(at, dtype, bytes));
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.later(Work::Write { address: self.held.address(at), bytes: elements(dtype, values) });
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

impl<C: Card + 'static> Device for Gpu<'_, C> {
    fn beside(&self) -> Option<Beside> {
        Some(Beside { memory: Box::new(Arenas(self.held.clone())), begin: Box::new(|| {}) })
    }

    fn fabric(&mut self) -> Option<&mut dyn Fabric> {
        if self.held.card.is_connected() { Some(self) } else { None }
    }

    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        let (mut element, width) = ([0; 4], dtype.bytes());
        encode(dtype, value, &mut element[..width as usize]);
        self.later(Work::Fill { address: self.held.address(at), element, width: width as u8, count });
    }

    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        let not_loaded = || DeviceError::NotLoaded(kernel.0);
        let launch = self.entries.get(kernel.index()).and_then(|e| e.launch.as_ref()).ok_or_else(not_loaded)?;
        let operands: Vec<u64> = args.iter().map(|at| self.held.address(*at)).collect();
        let scalars: Vec<u64> = scalars.iter().zip(&self.signatures[kernel.index()].scalars).map(|(x, t)| bits(*t, *x)).collect();
        let encode = |map: &TensorMap, address| self.held.card.encode(map, address);
        let parameters = launch.pack(&operands, &scalars, self.scratch, encode).map_err(DeviceError::Failed)?;
        self.later(Work::Launch { kernel, parameters });
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.held.outcome(self.begin().and_then(|()| self.held.card.synchronize()))
    }
}

impl<C: Card + 'static> Fabric for Gpu<'_, C> {
    fn transfer(&mut self, stream: Stream, transfer: &Transfer) {
        let between = match transfer {
            Transfer::Collective(members, e) => {
                let [from, to] = [e.src, e.dst].map(|at| self.held.address(at));
                Between::Collective { members: members.to_vec(), terms: e.terms(), from, to }
            }
            Transfer::Send(other, m) | Transfer::Recv(other, m) => {
                let end = if matches!(transfer, Transfer::Send(..)) { End::SendTo(*other) } else { End::ReceiveFrom(*other) };
                Between::Message { end, channel: m.channel, dtype: m.dtype, count: m.count, address: self.held.address(m.at) }
            }
            Transfer::Copy(_) => return self.held.note(Err("a copy to or from the host's memory, of which a GPU has none".into())),
        };
        self.later(Work::Exchange { stream, between });
    }

    fn record(&mut self, stream: Stream, event: u32) {
        self.later(Work::Record { stream, event });
    }

    fn wait(&mut self, stream: Stream, event: u32) {
        self.later(Work::Wait { stream, event });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::{self, Code, Kernels, Parts};
    use crate::comm::{CommError, Communicator, Exchange, Message, Phase, Progress};
    use crate::executor::{Order, Rank, Step};
    use crate::fixture::{self, Split};
    use crate::target::Target;
    use ir::launch::{Launch, Parameter};
    use ir::program::Action;
    use std::collections::BTreeSet;

    /// A card that is connected, and keeps what it is told.
    struct Told(Arc<Mutex<Vec<Work>>>, u64);

    impl Card for Told {
        fn allocate(&mut self, _: u64) -> Result<u64, String> {
            self.1 += 1 << 20;
            Ok(self.1)
        }
        fn write(&self, _: Queue, _: u64, _: &[u8]) -> Result<(), String> {
            Err("nothing communicates beside it".into())
        }
        fn read(&self, queue: Queue, _: u64, out: &mut [u8]) -> Result<(), String> {
            assert_eq!(queue, Queue::Compute);
            out.fill(0);
            Ok(())
        }
        fn encode(&self, _: &TensorMap, _: u64) -> Result<[u8; MAP_BYTES], String> {
            Err("its kernels have no tensor maps".into())
        }
        fn run(&self, work: &[Work]) -> Result<(), String> {
            self.0.lock().unwrap().extend_from_slice(work);
            Ok(())
        }
        fn is_connected(&self) -> bool {
            true
        }
        fn synchronize(&self) -> Result<(), String> {
            Ok(())
        }
    }

    /// Nobody asks it.
    struct Nobody;

    impl Communicator for Nobody {
        fn collective(&mut self, _: &mut dyn Memory, _: &[u64], _: &Exchange) -> Result<Progress, CommError> {
            unreachable!("the card exchanges by itself")
        }
        fn send(&mut self, _: &mut dyn Memory, _: u64, _: &Message) -> Result<Progress, CommError> {
            unreachable!("the card exchanges by itself")
        }
        fn recv(&mut self, _: &mut dyn Memory, _: u64, _: &Message) -> Result<Progress, CommError> {
            unreachable!("the card exchanges by itself")
        }
    }

    #[test]
    fn a_connected_card_is_told_launches_exchanges_and_events_in_the_order_of_issue() {
        let job = fixture::streamed(fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 }));
        let dir = tempfile::tempdir().unwrap();
        let entry = |k: &Kernel| {
            let arguments = (0..(k.inputs.len() + k.outputs.len()) as u32).map(Parameter::Argument);
            let parameters = arguments.chain([Parameter::Scratch]).collect();
            let launch = Launch { grid: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters };
            KernelEntry { name: k.name(), tiles: 1, scratch_bytes: 0, launch: Some(launch) }
        };
        let entries: Vec<KernelEntry> = job.kernels.iter().map(entry).collect();
        let modules = vec![b"".as_slice(); entries.len()];
        let kernels = Some(Kernels { code: Code::Ptx(&modules), entries: &entries });
        let out = dir.path().join("gpu.mcc");
        artifact::write(&out, &Parts { job: &job, target: &Target::Gpu { arch: "sm_80".into() }, kernels, dumps: &[] }).unwrap();
        let artifact = artifact::read(&out).unwrap();

        let told = Arc::new(Mutex::new(vec![]));
        let gpu = Gpu::new(&artifact, Told(told.clone(), 0), arena_bytes(&job, 0)).unwrap();
        let mut rank = Rank::new(&job, 0, gpu, Order::List);
        let inputs = fixture::inputs();
        let batch: Vec<_> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
        let step = Step { number: 1, learning_rate: 0.5, loss_scale: 1.0, seed: 0, batch: &batch };
        rank.begin(Phase::Train);
        rank.advance(&step, &mut Nobody).unwrap();
        rank.device.synchronize().unwrap();

        let program = &job.programs[0];
        let calls = &job.stages[0].schedule.train;
        let commands = || calls.iter().flat_map(|c| &program.bodies[c.body.index()].commands);
        let issued: Vec<_> = commands()
            .filter_map(|c| match &c.action {
                Action::Launch { .. } => Some((c.stream, "launch")),
                Action::Collective { .. } => Some((c.stream, "exchange")),
                Action::Record { .. } => Some((c.stream, "record")),
                Action::Wait { .. } => Some((c.stream, "wait")),
                _ => None,
            })
            .collect();
        let told = told.lock().unwrap();
        let got: Vec<_> = told
            .iter()
            .filter_map(|w| match w {
                Work::Launch { .. } => Some((w.stream(), "launch")),
                Work::Exchange { .. } => Some((w.stream(), "exchange")),
                Work::Record { .. } => Some((w.stream(), "record")),
                Work::Wait { .. } => Some((w.stream(), "wait")),
                Work::Fill { .. } | Work::Write { .. } => None,
            })
            .collect();
        assert_eq!(got, issued);
        assert!(got.iter().any(|(stream, what)| *what == "exchange" && *stream != Stream::Compute), "{got:?}");

        let mut recorded = BTreeSet::new();
        for work in told.iter() {
            match work {
                Work::Record { event, .. } => {
                    recorded.insert(*event);
                }
                Work::Wait { event, .. } => assert!(recorded.contains(event), "event {event} was never recorded"),
                Work::Exchange { between: Between::Collective { members, from, to, .. }, .. } => {
                    assert!(*members == [0] || *members == [0, 1], "{members:?}");
                    assert!([from, to].iter().all(|a| (1 << 20..4 << 20).contains(*a)), "{from:#x}, {to:#x}");
                }
                // The last parameter is the scratch, which was allocated last.
                Work::Launch { parameters, .. } => assert_eq!(parameters[parameters.len() - 8..], (4u64 << 20).to_le_bytes()),
                Work::Exchange { .. } | Work::Fill { .. } | Work::Write { .. } => {}
            }
        }
    }
}
