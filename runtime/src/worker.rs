//! A rank's process: reads its orders, trains, says what happens.

use crate::artifact::{self, AcceptedArtifacts, Artifact, ArtifactError};
use crate::checkpoint;
use crate::comm::{CommError, Communicator};
use crate::cpu::{Cpu, KernelLibrary};
use crate::data::{Data, DataError, LoadRegions};
use crate::data_loader::{DataLoader, RunData};
use crate::device::{Device, DeviceError};
use crate::executor::{CommandOrder, ExecError, Fault, PersistentId, Rank, Step, arena_bytes};
use crate::gpu::nccl::NcclSetup;
use crate::gpu::{Cuda, Emulated, Gpu};
use crate::host::{Tensor, Whole, sizes};
use crate::launch::{is_beyond, spread};
use crate::mpi::{self, Mpi, Tags};
use crate::profile::{Clock, ProfileChunk, now};
use crate::protocol::{self, Blamed, Event, Expected, FirstStep, OnNonfinite, Orders, SaveFile, StepEvent};
use crate::reference::{Plans, Reference};
use crate::saver::{NotFinite, Saver};
use crate::scale::{Norm, Scaler};
use crate::schedule::learning_rate;
use crate::shm::{Begin, Segment, SegmentLayout, Shm, StatusBoard, Wires};
use crate::target::{DeviceKind, Exchanges};
use crate::weights::{self, Mark, Weights, WeightsError};
use ir::diag::Help;
use ir::op::Real;
use ir::options::OptionName;
use ir::program::Job;
use ir::program::ProgramPhase;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// How long ranks wait for each other until they can exchange, where they do not by memory that they share.
const MEETING: Duration = Duration::from_secs(120);

/// Why a rank's process could not take part in a run to its end.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum WorkerError {
    #[error("cannot take part in a run: {0}; `mcc-rank` and `mcc` must be of one build (`cargo build --workspace` makes both)")]
    Orders(io::Error),
    #[error("rank {rank} is not in a mesh of {world} ranks")]
    World { rank: u64, world: u64 },
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("rank {rank}: {cause}")]
    Device { rank: u64, cause: DeviceError },
    #[error("rank {rank} cannot exchange by MPI: {cause}")]
    Mpi { rank: u64, cause: String },
    #[error("rank {rank}, after step {step}, when all ranks leave MPI: {cause}")]
    Leave { rank: u64, step: u64, cause: CommError },
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error(
        "rank {rank} cannot write `{}`: {cause}{}; what the run came to with step {step} is lost, and a file of that name that was there before stays",
        .file.name.display(),
        if *.shared { " (all machines must share the directory of what is saved)" } else { "" }
    )]
    Save { rank: u64, file: SaveFile, step: u64, cause: io::Error, shared: bool },
    #[error(
        "rank {rank} cannot reserve {bytes} bytes for its part of a checkpoint in `{}`: {cause}{}; nothing was trained",
        .dir.display(),
        if *.shared { " (all machines must share that directory)" } else { "" }
    )]
    Reserve { rank: u64, dir: PathBuf, bytes: u64, cause: io::Error, shared: bool },
    #[error("rank {rank}, before step {step}: {cause}")]
    Stop { rank: u64, step: u64, cause: CommError },
    #[error("rank {rank}: element {element} of `{tensor}` is {value} after step {step}. That is not saved, and what was saved before stays")]
    NotFinite { rank: u64, tensor: String, element: u64, value: f64, step: u64 },
    #[error(
        "rank {rank}: the first step is not the reference's: on {sequences} sequences `{report}` is {found:e} and should be {expected:e}; \
         they are {:.1e} apart, and rounding explains {allowed:.1e}. Nothing was trained", (.found - .expected).abs()
    )]
    FirstStep { rank: u64, report: String, sequences: u64, found: f64, expected: f64, allowed: f64 },
    #[error("rank {rank} cannot have a thread that reads its data: {cause}")]
    Thread { rank: u64, cause: io::Error },
    #[error("the launcher does not listen any more: {0}")]
    Silence(io::Error),
}

impl WorkerError {
    fn is_abort(&self) -> bool {
        matches!(
            self,
            WorkerError::Exec(ExecError { fault: Fault::Comm(CommError::Aborted(_)), .. })
                | WorkerError::Stop { cause: CommError::Aborted(_), .. }
                | WorkerError::Leave { cause: CommError::Aborted(_), .. }
        )
    }

    /// What may keep it from happening again.
    fn help(&self) -> Option<Help> {
        match self {
            WorkerError::Exec(e) => e.fault.help(),
            WorkerError::Data(e) => e.help(),
            WorkerError::NotFinite { .. } => Some(Help::from("a lower learning rate or ").option(OptionName::Clip).and(" may keep it finite")),
            WorkerError::FirstStep { found, .. } if !found.is_finite() => Some(Help::from(
                "in f64 it is finite, so a number is most likely beyond the range of the run's dtype: without --check-first-step the run ends at this step \
                 too and names the op, with the range of its operands",
            )),
            WorkerError::FirstStep { .. } => Some(Help::from(
                "the same artifact on other machines shows whether it is the hardware, and the text compiled for one rank whether it is \
                 kernels or exchanges: please report these with the text; without --check-first-step the run trains with what it has",
            )),
            WorkerError::Orders(_)
            | WorkerError::World { .. }
            | WorkerError::Artifact(_)
            | WorkerError::Weights(_)
            | WorkerError::Device { .. }
            | WorkerError::Mpi { .. }
            | WorkerError::Leave { .. }
            | WorkerError::Save { .. }
            | WorkerError::Reserve { .. }
            | WorkerError::Stop { .. }
            | WorkerError::Thread { .. }
            | WorkerError::Silence(_) => None,
        }
    }
}

/// Takes part in a run: `memory` is the segment that the launcher made, `events` goes to the launcher. An error has
/// been told to the launcher, and ended the run for the others, if that was possible.
///
/// # Errors
/// What ended this rank.
pub fn run(rank: u64, memory: OwnedFd, mut events: impl Write) -> Result<(), WorkerError> {
    let outcome = start(rank, memory, &mut events);
    let last = match &outcome {
        Ok(step) => Event::Finished { step: *step },
        Err(e) => Event::Failed { message: e.to_string(), help: e.help(), aborted: e.is_abort() },
    };
    protocol::say(&mut events, &last).map_err(WorkerError::Silence)?;
    outcome.map(|_| ())
}

/// Gives the last step that was done.
fn start(rank: u64, memory: OwnedFd, events: &mut dyn Write) -> Result<u64, WorkerError> {
    let segment = Segment::map(&memory).map_err(WorkerError::Orders)?;
    let (orders, first) = protocol::unpack(&segment).map_err(WorkerError::Orders)?;
    // The launcher has verified the artifact, and its signature if it was to.
    let artifact = artifact::read(&orders.artifact, &AcceptedArtifacts::Verified(&orders.id))?;
    let layout = SegmentLayout::new(&artifact.job, &artifact.manifest.target, first);
    if rank >= layout.world {
        return Err(WorkerError::World { rank, world: layout.world });
    }
    if layout.bytes > segment.bytes() {
        return Err(WorkerError::Orders(io::Error::new(io::ErrorKind::InvalidData, "its memory is too small")));
    }
    let board = StatusBoard { segment: &segment, layout: &layout };
    let [near, _] = orders.seats(rank, layout.world);
    let threads = orders.threads(rank, layout.world);
    let spins = threads.spins;
    let job = &artifact.job;
    let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
    let failed = |cause| WorkerError::Device { rank, cause };
    let by_mpi = orders.exchanges == Exchanges::Mpi && layout.world > 1;
    let wires = orders.spread.as_ref().filter(|_| !by_mpi).and_then(|spread| Wires::new(rank, spread));
    let mut shm = Shm::new(board, rank, spins, wires);
    if by_mpi {
        let tags = Tags::new(layout.groups(), layout.channels());
        let met = shm.together(MEETING, || mpi::connect(rank, layout.world));
        let met = met.and_then(|wires| Mpi::new(rank, job.in_flight, tags, wires)).map_err(|cause| WorkerError::Mpi { rank, cause });
        match met {
            Ok(mpi) => shm.exchange_by(mpi),
            Err(e) => {
                shm.abort(&e.to_string());
                return Err(e);
            }
        }
    }
    let dir = orders.offload_to.as_deref();
    let outcome = match orders.device {
        DeviceKind::Cpu => KernelLibrary::load(&artifact)
            .and_then(|library| Cpu::new(&job.kernels, library, arena_bytes(job, rank), dir, &threads))
            .map_err(failed)
            .and_then(|device| train(&artifact, &orders, Rank::new(job, rank, device, orders.order), &mut shm, events)),
        DeviceKind::Cuda => Cuda::load(&artifact, &artifact.manifest.target.arch(), near.index)
            .and_then(|card| {
                let setup = orders.nccl.as_ref().map(|id| NcclSetup { id, max_ctas: orders.nccl_max_ctas });
                setup.map_or(Ok(()), |setup| card.connect(&artifact, rank, &setup, MEETING))?;
                Gpu::new(&artifact, card, arena_bytes(job, rank), dir, &threads)
            })
            .map_err(failed)
            .and_then(|device| {
                // A GPU that exchanges by itself orders its own streams, and is told of everything in the order of
                // the list.
                let order = if orders.nccl.is_some() { CommandOrder::List } else { orders.order };
                train(&artifact, &orders, Rank::new(job, rank, device, order), &mut shm, events)
            }),
        DeviceKind::Emulated => Emulated::load(&artifact, threads.count)
            .and_then(|card| Gpu::new(&artifact, card, arena_bytes(job, rank), dir, &threads))
            .map_err(failed)
            .and_then(|device| train(&artifact, &orders, Rank::new(job, rank, device, orders.order), &mut shm, events)),
        DeviceKind::Reference => {
            let plans = Plans::new(job);
            let device = Reference::new(job, &plans, program, arena_bytes(job, rank));
            train(&artifact, &orders, Rank::new(job, rank, device, CommandOrder::List), &mut shm, events)
        }
    };
    let outcome = outcome.and_then(|step| shm.leave(MEETING).map(|()| step).map_err(|cause| WorkerError::Leave { rank, step, cause }));
    if let Err(e) = &outcome {
        shm.abort(&e.to_string());
    }
    outcome
}

/// Trains to the last step, or to that after which the run was asked to stop, and saves; gives the step.
fn train<D: Device>(artifact: &Artifact, orders: &Orders, rank: Rank<D>, shm: &mut Shm, events: &mut dyn Write) -> Result<u64, WorkerError> {
    let wanted = LoadRegions::of_rank(&artifact.job, rank.rank());
    thread::scope(|scope| train_in(scope, artifact, orders, &wanted, rank, shm, events))
}

/// Does what [`train`] does, with threads that read ahead and may write checkpoints meanwhile.
fn train_in<'scope, 'env, D: Device>(
    scope: &'scope Scope<'scope, 'env>,
    artifact: &'env Artifact,
    orders: &'env Orders,
    wanted: &'env LoadRegions,
    mut rank: Rank<D>,
    shm: &mut Shm,
    events: &mut dyn Write,
) -> Result<u64, WorkerError> {
    let job = &artifact.job;
    let run_data = RunData::open(job, orders)?;
    let saver = orders.saves.as_ref().map(|saves| {
        let (rank, shared) = (rank.rank(), orders.spread.is_some());
        Saver::new(scope, job, rank, saves).map_err(|(bytes, cause)| WorkerError::Reserve { rank, dir: saves.name.clone(), bytes, cause, shared })
    });
    let mut saver = saver.transpose()?;
    let begun = Instant::now();
    let weights = match &orders.resume {
        Some((path, _)) => checkpoint::resume(path, job)?.weights,
        None if orders.init.is_empty() => Weights::random(job, orders.seed),
        None => checkpoint::initial(&orders.init, job, &orders.drawn, orders.seed)?.0,
    };
    let tables: Vec<Tensor> = job.tables.iter().map(|t| Tensor { sizes: sizes(&t.dims), data: t.data.clone() }).collect();
    rank.initialise(|held| match held {
        PersistentId::Param(_) | PersistentId::State(..) => weights.get(held),
        PersistentId::Table(t) => Some(&tables[t as usize] as &dyn Whole),
    });
    weights.check()?;
    drop(weights);
    protocol::say(&mut &mut *events, &Event::Holds { milliseconds: begun.elapsed().as_secs_f64() * 1e3 }).map_err(WorkerError::Silence)?;
    if let (Some(first), Some(run_data)) = (&orders.first_step, &run_data) {
        compare_first(artifact, orders, first, &run_data.training, &mut rank, shm, events)?;
    }
    let schedule = run_data.as_ref().map(|r| r.schedule.clone());
    let started = run_data.map(|run_data| DataLoader::start(scope, run_data, wanted)).transpose();
    let mut loader = started.map_err(|cause| WorkerError::Thread { rank: rank.rank(), cause })?;
    // This counts the steps that were skipped since the last one that was not.
    let (mut skips, mut has_trained) = (0, false);
    let mut scaler = Scaler::resume(job.train.loss_scale, orders.resume.as_ref().and_then(|r| r.1.scaling));
    let mut timed = vec![];
    let idle = |number| Step::idle(number, orders.seed);
    let (first, sequences) = orders.start(job.global_batch);
    let mark = |step: u64, scaler: &Scaler| {
        let sequences = Some(sequences.saturating_add((step - first).saturating_mul(job.global_batch)));
        Mark { step, seed: orders.seed, scaling: scaler.stands(), sequences }
    };
    let mut done = first;
    let mut saved = None;
    for number in done + 1..=orders.steps {
        match shm.begin(number).map_err(|cause| WorkerError::Stop { rank: rank.rank(), step: number, cause })? {
            Begin::Run => {}
            Begin::Save if saved == Some(done) => {}
            Begin::Save => {
                save_beside(&mut rank, shm, &mut saver, &mark(done, &scaler), events)?;
                saved = Some(done);
            }
            Begin::Stop => break,
        }
        if orders.profile.is_some_and(|w| w.first == number) {
            rank.settle(&idle(number), shm)?;
            rank.profile(orders.profile.map_or(0, |w| w.steps()), Clock::Wall);
        }
        let (begun, start) = (Instant::now(), now());
        let Some((loader, schedule)) = loader.as_mut().zip(schedule.as_ref()) else { break };
        let batch = loader.take()?;
        let waited = begun.elapsed().as_secs_f64() * 1e3;
        let learning_rate = learning_rate(&job.train.schedule, number, orders.steps);
        let step = Step { number, learning_rate, loss_scale: scaler.scale(), seed: orders.seed, batch: &batch };
        let mut busy = [busy_in(shm, |shm| rank.phase(ProgramPhase::Train, &step, shm))?, 0.0];
        let (reports, further_passes) = (rank.reports().to_vec(), rank.further_passes());
        let finite = rank.is_finite();
        let overflow = rank.finite("loss") && !rank.finite("grad_norm") && scaler.may_fall();
        let loss_scale = scaler.is_scaled().then(|| scaler.scale());
        scaler.after(if rank.finite("grad_norm") { Norm::Finite } else { Norm::NotFinite });
        match orders.on_nonfinite {
            _ if overflow => {}
            OnNonfinite::Stop if !finite => {
                rank.settle(&step, shm)?;
                let blame = blame(artifact, &mut rank, &step, shm)?;
                rank.settle(&step, shm)?;
                let event = Event::NonFinite { step: number, reports, blame };
                return protocol::say(&mut &mut *events, &event).map(|()| done).map_err(WorkerError::Silence);
            }
            OnNonfinite::Skip { .. } if !finite => skips += 1,
            OnNonfinite::Stop | OnNonfinite::Skip { .. } => {
                // The update is about to change what is being saved.
                saver.as_mut().map_or(Ok(()), Saver::copied).map_err(|e| not_finite(rank.rank(), e))?;
                busy[1] = busy_in(shm, |shm| rank.phase(ProgramPhase::Update, &step, shm))?;
                (skips, has_trained) = (0, true);
            }
        }
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        if orders.profile.is_some_and(|w| w.has(number)) {
            timed.push((number, start, now()));
        }
        let read = batch.bytes;
        let due = schedule.after(number);
        let valid = due.map(|(_, batches)| evaluate(&mut rank, loader, batches, &idle(number), shm)).collect::<Result<_, _>>()?;
        if orders.profile.is_some_and(|w| w.last == number) {
            rank.settle(&idle(number), shm)?;
            profiled(&mut rank, std::mem::take(&mut timed), events)?;
        }
        let skipped = !finite;
        let event = StepEvent { step: number, learning_rate, milliseconds, busy, read, waited, further_passes, reports, valid, loss_scale, skipped };
        protocol::say(&mut &mut *events, &Event::Step(event)).map_err(WorkerError::Silence)?;
        done = number;
        if orders.is_compared(done) {
            rank.settle(&idle(done), shm)?;
            protocol::say(&mut &mut *events, &Event::Sums { step: done, sums: rank.sums() }).map_err(WorkerError::Silence)?;
        }
        if let Some(event) = saver.as_mut().and_then(Saver::poll) {
            protocol::say(&mut &mut *events, &event).map_err(WorkerError::Silence)?;
        }
        match orders.on_nonfinite {
            OnNonfinite::Skip { most } if skips >= most => {
                rank.settle(&idle(done), shm)?;
                let event = Event::Skipped { step: done, skips, most: Some(most) };
                return protocol::say(&mut &mut *events, &event).map(|()| done).map_err(WorkerError::Silence);
            }
            OnNonfinite::Stop | OnNonfinite::Skip { .. } => {}
        }
        if orders.exit_interval > 0 && done.is_multiple_of(orders.exit_interval) {
            break;
        }
        if done < orders.steps && orders.is_save_due(done) {
            save_beside(&mut rank, shm, &mut saver, &mark(done, &scaler), events)?;
            saved = Some(done);
        }
    }
    rank.settle(&idle(done), shm)?;
    if !timed.is_empty() {
        profiled(&mut rank, timed, events)?;
    }
    if skips > 0 && !has_trained {
        let event = Event::Skipped { step: done, skips, most: None };
        return protocol::say(&mut &mut *events, &event).map(|()| done).map_err(WorkerError::Silence);
    }
    if let (Some(loader), Some(schedule), true) = (&mut loader, &schedule, done == orders.steps) {
        for (part, batches) in schedule.at_end() {
            let reports = evaluate(&mut rank, loader, batches, &idle(done), shm)?;
            protocol::say(&mut &mut *events, &Event::Evaluated { part, reports }).map_err(WorkerError::Silence)?;
        }
        rank.settle(&idle(done), shm)?;
    }
    let mark = mark(done, &scaler);
    if let Some(mut saver) = saver {
        let before = if saved == Some(done) { Ok(None) } else { saver.begin(&rank.device, &mark, false) };
        for event in [before, saver.finish()] {
            let event = event.map_err(|e| not_finite(rank.rank(), e))?;
            event.map_or(Ok(()), |event| protocol::say(&mut &mut *events, &event)).map_err(WorkerError::Silence)?;
        }
    }
    saveable(&rank, job, orders, done)?;
    for (file, layout) in [
        (&orders.save_weights, weights::SafetensorsLayout::new(job)),
        (&orders.save_state, weights::SafetensorsLayout::of_run(job, &mark, Some(&orders.conditions))),
    ] {
        if let Some(file) = file {
            let shared = orders.spread.is_some();
            save(&rank, &layout, &file.at).map_err(|cause| WorkerError::Save { rank: rank.rank(), file: file.clone(), step: done, cause, shared })?;
        }
    }
    Ok(done)
}

/// Milliseconds that something takes, less those in which kernels stand still for other ranks.
fn busy_in(shm: &mut Shm, phase: impl FnOnce(&mut Shm) -> Result<(), ExecError>) -> Result<f64, ExecError> {
    let (begun, waited) = (Instant::now(), shm.waited);
    phase(shm)?;
    Ok(begun.elapsed().saturating_sub(shm.waited - waited).as_secs_f64() * 1e3)
}

/// Begins to write this rank's part of a checkpoint, if the run has any.
fn save_beside<D: Device>(
    rank: &mut Rank<D>,
    shm: &mut Shm,
    saver: &mut Option<Saver>,
    mark: &Mark,
    events: &mut dyn Write,
) -> Result<(), WorkerError> {
    let Some(saver) = saver else { return Ok(()) };
    rank.settle(&Step::idle(mark.step, mark.seed), shm)?;
    let before = saver.begin(&rank.device, mark, true).map_err(|e| not_finite(rank.rank(), e))?;
    before.map_or(Ok(()), |event| protocol::say(&mut &mut *events, &event)).map_err(WorkerError::Silence)
}

fn not_finite(rank: u64, found: NotFinite) -> WorkerError {
    let NotFinite { tensor, element, value, step } = found;
    WorkerError::NotFinite { rank, tensor, element, value, step }
}

/// Says what the rank did in the steps that were timed, which is settled.
fn profiled<D: Device>(rank: &mut Rank<D>, timed: Vec<(u64, u64, u64)>, events: &mut dyn Write) -> Result<(), WorkerError> {
    for part in ProfileChunk::of(timed, rank.profiled()) {
        protocol::say(&mut &mut *events, &Event::Profile(part)).map_err(WorkerError::Silence)?;
    }
    Ok(())
}

/// Holds the passes of the first step, on few sequences, against what they should come to. Nothing that is held
/// changes.
fn compare_first<D: Device>(
    artifact: &Artifact,
    orders: &Orders,
    first: &FirstStep,
    data: &Data,
    rank: &mut Rank<D>,
    shm: &mut Shm,
    events: &mut dyn Write,
) -> Result<(), WorkerError> {
    let job = &artifact.job;
    let (done, _) = orders.start(job.global_batch);
    if done >= orders.steps {
        return Ok(());
    }
    let batch = spread(&data.batch(done)?, job.global_batch, first.sequences, job.global_batch);
    let mut scaler = Scaler::resume(job.train.loss_scale, orders.resume.as_ref().and_then(|r| r.1.scaling));
    loop {
        let step = Step { number: done + 1, learning_rate: 0.0, loss_scale: scaler.scale(), seed: orders.seed, batch: &batch };
        rank.phase(ProgramPhase::Train, &step, shm)?;
        // A loss scale that begins too high is lowered, as steps would lower it.
        if rank.finite("grad_norm") || !rank.finite("loss") || !scaler.may_fall() {
            break;
        }
        scaler.after(Norm::NotFinite);
    }
    let reports = rank.reports().to_vec();
    for Expected { report, value: Real(value), allowed: Real(allowed) } in &first.expected {
        let found = job.reports.iter().zip(&reports).find(|(name, _)| *name == report).and_then(|(_, found)| *found);
        if let Some(found) = found.filter(|found| is_beyond(*found, *value, *allowed)) {
            let (rank, report, sequences) = (rank.rank(), report.clone(), first.sequences);
            return Err(WorkerError::FirstStep { rank, report, sequences, found, expected: *value, allowed: *allowed });
        }
    }
    protocol::say(&mut &mut *events, &Event::First { reports }).map_err(WorkerError::Silence)
}

/// Means of the reports over held-out batches.
fn evaluate<D: Device>(
    rank: &mut Rank<D>,
    loader: &mut DataLoader,
    batches: u64,
    idle: &Step,
    shm: &mut Shm,
) -> Result<Vec<Option<f64>>, WorkerError> {
    let mut sums: Vec<Option<f64>> = vec![];
    for _ in 0..batches {
        let batch = loader.take()?;
        let step = Step { batch: &batch, ..*idle };
        rank.phase(ProgramPhase::Eval, &step, shm)?;
        sums.resize(rank.reports().len(), Some(0.0));
        for (sum, value) in sums.iter_mut().zip(rank.reports()) {
            *sum = sum.zip(*value).map(|(s, v)| s + v / batches as f64);
        }
    }
    Ok(sums)
}

/// Runs the step again, looking at everything; parameters and optimizer states are still those that it began with.
fn blame<D: Device>(artifact: &Artifact, rank: &mut Rank<D>, step: &Step, shm: &mut Shm) -> Result<Option<Blamed>, WorkerError> {
    let mut held = None;
    rank.collect(|what, at, values| {
        if let (None, PersistentId::Param(p), Some(k)) = (&held, what, values.iter().position(|x| !x.is_finite())) {
            let name = &artifact.job.params[p as usize].name;
            held = Some(format!("element {} of parameter {name} is {} before the step", at + k as u64, values[k]));
        }
    });
    rank.watch();
    rank.phase(ProgramPhase::Train, step, shm)?;
    let made = rank.blame().map(|b| {
        let op = b.op.map(|op| format!("{op}, ")).unwrap_or_default();
        Blamed::at(b.position, op + &b.command)
    });
    Ok(held.map(|what| Blamed { order: (0, 0), what }).or(made))
}

/// Whether all numbers of this rank are finite that are to be saved.
fn saveable<D: Device>(rank: &Rank<D>, job: &Job, orders: &Orders, step: u64) -> Result<(), WorkerError> {
    if orders.save_weights.is_none() && orders.save_state.is_none() {
        return Ok(());
    }
    let mut wrong = None;
    rank.collect(|held, at, values| {
        let saved = match held {
            PersistentId::Param(_) => true,
            PersistentId::State(..) => orders.save_state.is_some(),
            PersistentId::Table(_) => false,
        };
        // Files hold these values in 32 bits.
        if saved
            && wrong.is_none()
            && let Some(k) = values.iter().position(|x| !(*x as f32).is_finite())
        {
            wrong = weights::name(job, held).map(|tensor| (tensor, at + k as u64, values[k]));
        }
    });
    match wrong {
        Some((tensor, element, value)) => Err(WorkerError::NotFinite { rank: rank.rank(), tensor, element, value, step }),
        None => Ok(()),
    }
}

/// Writes this rank's part of what a file holds, which the launcher prepared.
fn save<D: Device>(rank: &Rank<D>, layout: &weights::SafetensorsLayout, file: &Path) -> io::Result<()> {
    let file = fs::OpenOptions::new().write(true).open(file)?;
    // Rank 0 writes the header, which says what the run came to.
    let mut outcome = if rank.rank() == 0 { layout.start(&file) } else { Ok(()) };
    rank.collect(|held, at, values| {
        if outcome.is_ok() {
            outcome = layout.write(&file, held, at, values);
        }
    });
    // A value that could not be read is no value of the run.
    outcome.and_then(|()| rank.device.outcome().map_err(io::Error::other))
}
