//! A rank by itself, timed: its kernels on the device that they are for, with exchanges that are answered at once.
//!
//! What a rank is answered is what it gave itself, as if all other ranks gave the same; what it receives from other
//! stages is drawn. So nothing that is computed means anything, but each kernel takes as long as it would. It needs
//! no more devices than one, however many ranks the job has.

use crate::artifact::Artifact;
use crate::comm::{CommError, Communicator, Exchange, Message, Progress};
use crate::cpu::{Cpu, KernelLibrary, Threads};
use crate::device::{Device, DeviceError, Memory};
use crate::executor::{Advance, CommandOrder, ExecError, PersistentId, Rank, Step, arena_bytes};
use crate::gpu::{Cuda, Gpu};
use crate::host::{Tensor, Whole, sizes};
use crate::profile::{Clock, Recorded, TimedStep, now};
use crate::scale::Scaler;
use crate::target::DeviceKind;
use crate::weights::Weights;
use ir::graph::InputDefault;
use ir::op::DType;
use ir::program::{InputEntry, Interval, Job, ProgramPhase};
use ir::random::{mix, uniform};
use std::collections::HashMap;
use std::path::Path;

/// How a rank is measured.
#[derive(Clone, Copy, Debug)]
pub struct StandaloneOptions<'a> {
    /// What runs the kernels; only [`DeviceKind::Cpu`] and [`DeviceKind::Cuda`] can be timed.
    pub device: DeviceKind,
    /// Of a rank, on CPUs.
    pub threads: usize,
    /// Copies of the rank that run at once, as the ranks of a machine would.
    pub copies: usize,
    /// Steps that are timed, behind one that is not.
    pub steps: u64,
    /// Seed of weights, batch and dropout.
    pub seed: u64,
    /// Where what rests on a disk is.
    pub dir: &'a Path,
}

impl StandaloneOptions<'_> {
    /// Copies may be more than there are cores, and others may be at work too: what a thread had of a core does not
    /// depend on them, where a rank has one.
    fn clock(&self) -> Clock {
        if self.device == DeviceKind::Cpu && self.threads == 1 { Clock::Thread } else { Clock::Wall }
    }
}

/// Why a rank could not be timed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum StandaloneError {
    #[error("rank {rank}: {cause}")]
    Device { rank: u64, cause: DeviceError },
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("what the device `{0}` takes is no time of a machine that it stands for")]
    Untimed(&'static str),
}

/// Runs a rank by itself and gives what each of its copies did, in list order.
///
/// # Errors
/// A device that there is not, or that fails; a number that is more than the program has room for.
pub fn measure(artifact: &Artifact, rank: u64, options: &StandaloneOptions) -> Result<Vec<Recorded>, StandaloneError> {
    let batch: Vec<Tensor> = artifact.job.inputs.iter().map(|input| drawn(input, options.seed)).collect();
    std::thread::scope(|scope| {
        let batch = &batch;
        let copies: Vec<_> = (0..options.copies.max(1)).map(|copy| scope.spawn(move || one(artifact, rank, copy, options, batch))).collect();
        copies.into_iter().map(|copy| copy.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn one(artifact: &Artifact, rank: u64, copy: usize, options: &StandaloneOptions, batch: &Vec<Tensor>) -> Result<Recorded, StandaloneError> {
    let job = &artifact.job;
    let failed = |cause| StandaloneError::Device { rank, cause };
    let (bytes, threads) = (arena_bytes(job, rank), Threads::of_rank(copy as u64, options.copies as u64, options.threads));
    match options.device {
        DeviceKind::Cpu => {
            let device = KernelLibrary::load(artifact).and_then(|library| Cpu::new(&job.kernels, library, bytes, Some(options.dir), &threads));
            timed(job, rank, device.map_err(failed)?, options, batch)
        }
        DeviceKind::Cuda => {
            let card = Cuda::load(artifact, &artifact.manifest.target.arch(), copy as u64);
            let device = card.and_then(|card| Gpu::new(artifact, card, bytes, Some(options.dir), &threads));
            timed(job, rank, device.map_err(failed)?, options, batch)
        }
        DeviceKind::Emulated | DeviceKind::Reference => Err(StandaloneError::Untimed(options.device.name())),
    }
}

fn timed<D: Device>(job: &Job, rank: u64, device: D, options: &StandaloneOptions, batch: &Vec<Tensor>) -> Result<Recorded, StandaloneError> {
    let mut rank = Rank::new(job, rank, device, CommandOrder::List);
    let weights = Weights::random(job, options.seed);
    let tables: Vec<Tensor> = job.tables.iter().map(|t| Tensor { sizes: sizes(&t.dims), data: t.data.clone() }).collect();
    rank.initialise(|held| match held {
        PersistentId::Param(_) | PersistentId::State(..) => weights.get(held),
        PersistentId::Table(t) => Some(&tables[t as usize] as &dyn Whole),
    });
    drop(weights);
    let mut echo = EchoCommunicator::default();
    // With the scale that training in f16 begins with, gradients would be infinite.
    let loss_scale = Scaler::new(job.train.loss_scale).scale().min(256.0);
    let mut out = Recorded::default();
    for number in 1..=options.steps + 1 {
        if number == 2 {
            rank.profile(options.steps as usize, options.clock());
        }
        let start = now();
        // A rate of 0 keeps the weights as they are.
        let step = Step { number, learning_rate: 0.0, loss_scale, seed: options.seed, batch };
        for phase in [ProgramPhase::Train, ProgramPhase::Update] {
            rank.begin(phase);
            while rank.advance(&step, &mut echo)? != Advance::Finished {}
        }
        if number > 1 {
            out.steps.push(TimedStep { step: number, start, end: now() });
        }
    }
    out.ran = rank.profiled();
    Ok(out)
}

/// Answers a rank at once, as if all other ranks gave what it gives.
#[derive(Default)]
struct EchoCommunicator {
    /// What is received of each type and count.
    drawn: HashMap<(DType, u64), Vec<f64>>,
    bytes: Vec<u8>,
}

impl Communicator for EchoCommunicator {
    fn collective(&mut self, memory: &mut dyn Memory, members: &[u64], exchange: &Exchange) -> Result<Progress, CommError> {
        let (given, got) = exchange.elements(members.len() as u64);
        let width = memory.element(exchange.dtype).bytes();
        self.bytes.resize(given as usize * width, 0);
        memory.load(exchange.src, exchange.dtype, &mut self.bytes);
        // The result is one part of what is given, or that part once for each member.
        let own = &self.bytes[..(given.min(got) as usize * width)];
        let all: Vec<u8> = own.iter().copied().cycle().take(got as usize * width).collect();
        memory.store(exchange.dst, exchange.dtype, &all);
        Ok(Progress::Done)
    }

    fn send(&mut self, _: &mut dyn Memory, _: u64, _: &Message) -> Result<Progress, CommError> {
        Ok(Progress::Done)
    }

    fn recv(&mut self, memory: &mut dyn Memory, _: u64, message: &Message) -> Result<Progress, CommError> {
        let Message { dtype, count, at, .. } = *message;
        let value = |k: u64| if dtype.is_float() { 2.0 * uniform(1, k) - 1.0 } else { 0.0 };
        let values = self.drawn.entry((dtype, count)).or_insert_with(|| (0..count).map(value).collect());
        memory.write(at, dtype, values);
        Ok(Progress::Done)
    }
}

/// Something that an input may hold.
fn drawn(input: &InputEntry, seed: u64) -> Tensor {
    let sizes = sizes(&input.dims);
    let (elements, columns) = (sizes.iter().product::<u64>(), sizes.last().copied().unwrap_or(1).max(1));
    let widest = input.takes.iter().flatten().max_by_key(|i| i64::from(i.most) - i64::from(i.least));
    let value = |k: u64| match (&input.default, widest) {
        (Some(InputDefault::Const(value)), _) => value.0,
        // Each line is one document.
        (Some(InputDefault::Documents(..)), _) => 0.0,
        (Some(InputDefault::Positions(..)), _) => (k % columns) as f64,
        (_, Some(Interval { least, most })) if input.dtype == DType::I32 => {
            f64::from(*least) + (mix(mix(seed) ^ k) % (i64::from(*most) - i64::from(*least) + 1) as u64) as f64
        }
        _ if input.dtype.is_float() => 2.0 * uniform(seed, k) - 1.0,
        _ => 0.0,
    };
    Tensor { sizes, data: (0..elements).map(value).collect() }
}
