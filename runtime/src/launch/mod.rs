//! Starts the ranks of an artifact as processes of this machine, watches them, and gathers what they say; or takes part in a world that another launcher has
//! started ([`joined`]).
//!
//! Nothing of a run has a name that could stay behind: memory is an inherited anonymous file, ranks die with the process that
//! started them, the saved file has no name before it is complete. A dead or stuck rank ends the run within a few
//! seconds ([`RunOptions::patience`]), with who waits for whom.

mod joined;
mod process;
mod ranks;
mod save;

use crate::artifact::Artifact;
use crate::data::{Data, DataError, Spec};
use crate::executor::{Order, named};
use crate::gpu::cuda::{self, Unavailable};
use crate::gpu::nccl;
use crate::profile::{self, Ceilings, Profile, WARM_UP, Window};
use crate::protocol::{self, Blamed, Event, OnNonfinite, Orders, StepEvent};
use crate::shm::{Board, Layout, Segment};
use crate::target::{DeviceKind, Exchanges};
use crate::weights::{self, Mark, Weights, WeightsError};
use crate::world::{World, WorldError};
use ir::op::DType;
use ir::program::Job;
use process::Said;
use ranks::Ranks;
use save::{Reached, Target};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The default patience: how long a rank may show no sign of life, that is no command begun, no piece of a communication done and no time on a core.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// The default time for ranks to meet.
pub const MEETING: Duration = Duration::from_secs(300);

/// How often the launcher looks.
const TICK: Duration = Duration::from_millis(100);

/// What to run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The `mcc-rank` program.
    pub rank_binary: PathBuf,
    pub data: Vec<Spec>,
    pub valid_data: Vec<Spec>,
    /// Steps between held-out losses; 0 is never.
    pub eval_interval: u64,
    /// Most global batches of a held-out loss.
    pub eval_batches: u64,
    /// Default: all of the data if it ends, else the schedule's steps, else once through the data.
    pub steps: Option<u64>,
    pub init: Option<PathBuf>,
    /// What `save_state` wrote: the run goes on after that step, with that run's seed.
    pub resume: Option<PathBuf>,
    pub save: Option<PathBuf>,
    /// Parameters, optimizer states and the step.
    pub save_state: Option<PathBuf>,
    /// One JSON object per step.
    pub metrics: Option<PathBuf>,
    /// Default: the cores of this machine over the ranks, at least one.
    pub threads_per_rank: Option<usize>,
    /// Below 2^53.
    pub seed: u64,
    pub on_nonfinite: OnNonfinite,
    /// Whether communication runs beside compute; the same numbers either way.
    pub order: Order,
    /// So many steps are timed, behind a warm-up; without `steps`, the run ends with them.
    pub profile: Option<u64>,
    /// Default: the usual one for the artifact's target.
    pub device: Option<DeviceKind>,
    pub exchanges: Exchanges,
    /// How long a rank may show no sign of life.
    pub patience: Duration,
    /// The world that another launcher started, if one did.
    pub world: Option<World>,
    /// How long ranks of such a world may take to meet.
    pub meeting_limit: Duration,
}

impl RunOptions {
    /// The defaults, with the `mcc-rank` program at this path.
    pub fn new(rank_binary: PathBuf) -> RunOptions {
        RunOptions {
            rank_binary,
            data: vec![],
            valid_data: vec![],
            eval_interval: 0,
            eval_batches: 8,
            steps: None,
            init: None,
            resume: None,
            save: None,
            save_state: None,
            metrics: None,
            threads_per_rank: None,
            seed: 0,
            on_nonfinite: OnNonfinite::Stop,
            order: Order::Streams,
            profile: None,
            device: None,
            exchanges: Exchanges::Host,
            patience: PATIENCE,
            world: None,
            meeting_limit: MEETING,
        }
    }
}

/// A step, as all ranks have done it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// From 1.
    pub step: u64,
    #[serde(skip)]
    pub steps: u64,
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub lr: f64,
    pub tokens_per_s: f64,
    pub step_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
    /// What the loss was multiplied by for the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The update was left out, as loss or gradient norm were not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The other reports, by name.
    #[serde(flatten)]
    pub reports: BTreeMap<String, f64>,
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub steps: u64,
    pub skipped: u64,
    pub last: Option<Progress>,
    /// Of the steps that were timed.
    pub profile: Option<Profile>,
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    World(#[from] WorldError),
    /// Why ranks that were started one by one did not come together.
    #[error("{0}")]
    Meeting(String),
    #[error("ranks of other machines could not be reached: {0}")]
    Network(io::Error),
    #[error("`{}` was saved after step {done} and {steps} steps are asked for, counted from the first: nothing is left to do", .file.display())]
    Done { file: PathBuf, done: u64, steps: u64 },
    #[error("`{}` is compiled for {target}, which the device `{device}` does not run: {can} does", .dir.display())]
    Device { dir: PathBuf, target: String, device: &'static str, can: String },
    #[error("`{}` is compiled for {target}, but {cause}; --device emulated runs it slowly without one", .dir.display())]
    NoGpu { dir: PathBuf, target: String, cause: Unavailable },
    #[error("ranks cannot exchange through NCCL: {0}")]
    Exchanges(String),
    #[error("seed {0} is not below 2^53")]
    Seed(u64),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("{bytes} bytes of memory that the ranks share could not be had: {cause}")]
    Memory { bytes: u64, cause: io::Error },
    #[error("`{}` could not be started: {cause}", .binary.display())]
    Start { binary: PathBuf, cause: io::Error },
    /// Why the run ended, then who was waiting.
    #[error("{reason}{}", .waiting.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Ranks { reason: String, waiting: Vec<String> },
    #[error("step {step}: {} is not finite; {}", .values.join(", "), .blame)]
    NonFinite { step: u64, values: Vec<String>, blame: String },
}

/// Runs an artifact: all ranks on this machine, or one rank of a world. `progress` is called after every step, in a world by rank 0 alone.
///
/// # Errors
/// If options, data or weights are wrong, before any rank starts; then whatever ends a rank, on all ranks of a world. No process is left in any case.
pub fn run(artifact: &Artifact, options: &RunOptions, progress: &mut dyn FnMut(&Progress)) -> Result<Summary, RunError> {
    let orders = orders(artifact, options);
    if let Some(world) = &options.world {
        world.has(artifact.manifest.ranks)?;
        return joined::run(artifact, options, world, orders, progress);
    }
    let orders = orders?;
    let nccl = nccl_id(&orders, options)?;
    let world = artifact.job.mesh.world();
    let ceilings = ceilings(&orders, world, 0..world);
    let lead = Lead::new(artifact, options, Orders { nccl, ..orders })?;
    let (job, said) = (&artifact.job, protocol::pack(&lead.orders, 0));
    let layout = Layout::new(job, &artifact.manifest.target, said.len() as u64);
    let (memory, segment) = Segment::create(layout.bytes).map_err(|cause| RunError::Memory { bytes: layout.bytes, cause })?;
    segment.slice_mut(0, said.len()).copy_from_slice(&said);
    let mut ranks = Ranks::new(job, Board { segment: &segment, layout: &layout });
    for _ in 0..job.mesh.world() {
        let started = ranks.start(&options.rank_binary, &memory);
        started.map_err(|cause| RunError::Start { binary: options.rank_binary.clone(), cause })?;
    }
    conduct(artifact, options, lead, ranks, ceilings, progress)
}

/// What the threads of these ranks, which are on this machine, can do at most, if that is asked for.
fn ceilings(orders: &Orders, world: u64, ranks: Range<u64>) -> Option<Ceilings> {
    orders.profile.filter(|_| orders.device == DeviceKind::Cpu)?;
    Some(profile::measure(&ranks.map(|r| orders.threads(r, world)).collect::<Vec<_>>()))
}

/// What one process of a run has to do beside its ranks: orders, metrics, files to save.
struct Lead {
    orders: Orders,
    metrics: Option<(PathBuf, io::LineWriter<fs::File>)>,
    weights: Option<Target>,
    state: Option<Target>,
}

impl Lead {
    fn new(artifact: &Artifact, options: &RunOptions, orders: Orders) -> Result<Lead, RunError> {
        let failed = |file: &PathBuf, cause| RunError::Io { file: file.clone(), cause };
        let metrics = match &options.metrics {
            None => None,
            Some(file) => Some((file.clone(), io::LineWriter::new(fs::File::create(file).map_err(|e| failed(file, e))?))),
        };
        let reached = match &orders.spread {
            Some(spread) if spread.places.iter().any(|p| p.machine > 0) => Reached::ByName,
            Some(_) | None => Reached::ByProcess,
        };
        let target = |file: &Option<PathBuf>, layout: &dyn Fn() -> weights::Layout| match file {
            None => Ok(None),
            Some(file) => Target::create(file, &layout(), reached).map(Some).map_err(|cause| failed(file, cause)),
        };
        let mark = Mark { step: orders.steps, seed: orders.seed, scaling: None };
        let weights = target(&options.save, &|| weights::Layout::new(&artifact.job))?;
        let state = target(&options.save_state, &|| weights::Layout::of_run(&artifact.job, &mark))?;
        let orders = Orders { save: weights.as_ref().map(Target::path), save_state: state.as_ref().map(Target::path), ..orders };
        Ok(Lead { orders, metrics, weights, state })
    }
}

/// Follows all ranks to the end of a run.
fn conduct(
    artifact: &Artifact,
    options: &RunOptions,
    lead: Lead,
    mut ranks: Ranks,
    ceilings: Option<Ceilings>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Summary, RunError> {
    let Lead { orders, mut metrics, weights, state } = lead;
    let mut gather = Gather::new(&artifact.job, orders.steps);
    let profile = orders.profile.map(|_| Profile::new(artifact.job.mesh.world(), orders.order, ceilings));
    let mut summary = Summary { profile, ..Summary::default() };
    let mut looked = Instant::now();
    while !ranks.finished() {
        match ranks.listen(TICK) {
            None => {}
            Some(Said::Event(_, Event::Step(event))) => {
                if let Some(step) = gather.step(event) {
                    if let Some((file, out)) = &mut metrics {
                        let line = serde_json::to_string(&step).expect("invariant: plain data with text keys");
                        writeln!(out, "{line}").map_err(|cause| RunError::Io { file: file.to_path_buf(), cause })?;
                    }
                    progress(&step);
                    summary.steps = step.step;
                    summary.skipped += u64::from(step.skipped);
                    summary.last = Some(step);
                }
            }
            Some(Said::Event(rank, Event::NonFinite { step, reports, blame })) => gather.nonfinite(rank, step, &reports, blame),
            Some(Said::Event(rank, Event::Profile(part))) => {
                if let Some(profile) = &mut summary.profile {
                    profile.add(rank, part);
                }
            }
            Some(Said::Event(rank, Event::Failed { message, aborted })) => ranks.failed(rank, message, aborted),
            Some(Said::Event(rank, Event::Finished)) => ranks.done(rank),
            Some(Said::Pulse(rank, pulse)) => ranks.pulse(rank, pulse),
            Some(Said::Closed(rank, ended)) => ranks.closed(rank, ended),
            Some(Said::Lost(rank)) => ranks.lost(rank),
        }
        if looked.elapsed() >= TICK {
            looked = Instant::now();
            ranks.watch(options.patience.as_millis().div_ceil(TICK.as_millis()) as u32, TICK);
        }
        if let Some((reason, waiting)) = ranks.failure() {
            return Err(RunError::Ranks { reason, waiting });
        }
    }
    if let Some(error) = gather.error() {
        ranks.end(&error.to_string(), &[]);
        return Err(error);
    }
    if let (Some(profile), Some(spread)) = (&mut summary.profile, &orders.spread) {
        profile.align(spread);
    }
    // Before files are complete on their disks, which others need not wait for.
    ranks.is_well();
    drop(ranks);
    for (target, file) in [(weights, &options.save), (state, &options.save_state)] {
        if let (Some(target), Some(file)) = (target, file) {
            target.finish().map_err(|cause| RunError::Io { file: file.clone(), cause })?;
        }
    }
    Ok(summary)
}

/// The device that was asked for, if it runs what was compiled, or the usual one.
fn device(artifact: &Artifact, asked: Option<DeviceKind>) -> Result<DeviceKind, RunError> {
    let target = &artifact.manifest.target;
    let can = target.devices();
    match asked.unwrap_or(can[0]) {
        DeviceKind::Cuda if can.contains(&DeviceKind::Cuda) => match cuda::probe() {
            Ok(_) => Ok(DeviceKind::Cuda),
            Err(cause) => Err(RunError::NoGpu { dir: artifact.dir.clone(), target: target.to_string(), cause }),
        },
        device if can.contains(&device) => Ok(device),
        device => {
            let can = can.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
            Err(RunError::Device { dir: artifact.dir.clone(), target: target.to_string(), device: device.name(), can })
        }
    }
}

/// Whether GPUs can exchange by themselves, if they are to.
fn check_exchanges(artifact: &Artifact, device: DeviceKind, options: &RunOptions) -> Result<(), RunError> {
    if options.exchanges == Exchanges::Host {
        return Ok(());
    }
    let ranks = artifact.manifest.ranks;
    if device != DeviceKind::Cuda {
        return Err(RunError::Exchanges(format!("GPUs do, the device `{}` does not", device.name())));
    }
    if options.profile.is_some() {
        return Err(RunError::Exchanges("what GPUs exchange by themselves has no times that a profile could show".into()));
    }
    match cuda::probe() {
        // Of a world, only some ranks are on this machine.
        Ok(count) if count < ranks && options.world.is_none() => {
            Err(RunError::Exchanges(format!("each of {ranks} ranks needs a GPU of its own, there are {count}")))
        }
        Ok(_) => nccl::probe().map_err(RunError::Exchanges),
        Err(e) => Err(RunError::Exchanges(e.to_string())),
    }
}

/// By which GPUs find each other, made by the process that leads.
fn nccl_id(orders: &Orders, options: &RunOptions) -> Result<Option<Vec<u8>>, RunError> {
    match options.exchanges {
        Exchanges::Nccl if orders.device == DeviceKind::Cuda => nccl::unique_id().map(Some).map_err(RunError::Exchanges),
        Exchanges::Nccl | Exchanges::Host => Ok(None),
    }
}

/// Checks the options and settles what they leave open.
fn orders(artifact: &Artifact, options: &RunOptions) -> Result<Orders, RunError> {
    let job = &artifact.job;
    let device = device(artifact, options.device)?;
    check_exchanges(artifact, device, options)?;
    if options.seed >= 1 << 53 {
        return Err(RunError::Seed(options.seed));
    }
    // Ranks run in the same directory, but a path that is seen here and not there would be hard to explain.
    let absolute = |file: &PathBuf| std::path::absolute(file).map_err(|cause| RunError::Io { file: file.clone(), cause });
    let specs = |list: &[Spec]| -> Result<Vec<Spec>, RunError> {
        list.iter().map(|s| Ok(Spec { input: s.input.clone(), file: absolute(&s.file)? })).collect()
    };
    let steps = match options.steps {
        Some(0) => 0,
        given => {
            let data = Data::open(job, &options.data)?;
            // A first look finds files of another kind before anything starts.
            data.batch(0)?;
            let scheduled = Some(job.train.schedule.steps).filter(|s| *s > 0);
            let steps = given.or(data.end()).or(scheduled).unwrap_or_else(|| data.batches());
            if let Some(end) = data.end().filter(|end| *end < steps) {
                // Names the file.
                data.batch(end)?;
            }
            steps
        }
    };
    if !options.valid_data.is_empty() {
        Data::open(job, &options.valid_data)?.batch(0)?;
    }
    if let Some(file) = &options.init {
        Weights::open(file, job)?;
    }
    let resume = match &options.resume {
        None => None,
        Some(file) => {
            let (_, mark) = Weights::resume(file, job)?;
            if mark.step >= steps {
                return Err(RunError::Done { file: file.clone(), done: mark.step, steps });
            }
            Some((absolute(file)?, mark))
        }
    };
    let done = resume.as_ref().map_or(0, |r| r.1.step);
    let steps = match options.profile {
        Some(timed) if options.steps.is_none() => steps.min(done + WARM_UP + timed),
        Some(_) | None => steps,
    };
    Ok(Orders {
        artifact: absolute(&artifact.dir)?,
        id: artifact.id.clone(),
        data: specs(&options.data)?,
        valid_data: specs(&options.valid_data)?,
        eval_interval: options.eval_interval,
        eval_batches: options.eval_batches,
        steps,
        init: options.init.as_ref().map(absolute).transpose()?,
        save: None,
        save_state: None,
        threads: options.threads_per_rank,
        seed: resume.as_ref().map_or(options.seed, |r| r.1.seed),
        resume,
        on_nonfinite: options.on_nonfinite,
        order: options.order,
        profile: options.profile.and_then(|n| Window::new(done, steps, n)),
        device,
        nccl: None,
        spread: None,
    })
}

/// Puts together what ranks say about the same step.
struct Gather<'a> {
    job: &'a Job,
    steps: u64,
    tokens: f64,
    /// By step: events that have come, until all have.
    open: BTreeMap<u64, Vec<StepEvent>>,
    nonfinite: Option<(u64, Vec<String>)>,
    blame: Option<(Blamed, u64)>,
}

impl<'a> Gather<'a> {
    fn new(job: &'a Job, steps: u64) -> Self {
        // Tokens are the elements of the first input of whole numbers; without one, rows count.
        let tokens = job.inputs.iter().find(|i| i.dtype == DType::I32).map_or(job.global_batch, |i| i.dims.iter().map(|d| d.size).product());
        Gather { job, steps, tokens: tokens as f64, open: BTreeMap::new(), nonfinite: None, blame: None }
    }

    /// The step that is complete with this event.
    fn step(&mut self, event: StepEvent) -> Option<Progress> {
        let step = event.step;
        let events = self.open.entry(step).or_default();
        events.push(event);
        if (events.len() as u64) < self.job.mesh.world() {
            return None;
        }
        let events = self.open.remove(&step)?;
        let step_ms = events.iter().map(|e| e.milliseconds).fold(0.0, f64::max);
        let mut reports: BTreeMap<String, f64> = BTreeMap::new();
        let mut valid_loss = None;
        for event in &events {
            reports.extend(named(self.job, &event.reports));
            valid_loss = event.valid.as_ref().and_then(|v| named(self.job, v).remove("loss")).or(valid_loss);
        }
        Some(Progress {
            step,
            steps: self.steps,
            loss: reports.remove("loss"),
            grad_norm: reports.remove("grad_norm"),
            lr: events[0].learning_rate,
            tokens_per_s: self.tokens / (step_ms / 1e3).max(1e-9),
            step_ms,
            valid_loss,
            loss_scale: events[0].loss_scale,
            skipped: events.iter().any(|e| e.skipped),
            reports,
        })
    }

    fn nonfinite(&mut self, rank: u64, step: u64, reports: &[Option<f64>], blame: Option<Blamed>) {
        let wrong = self.job.reports.iter().zip(reports).filter_map(|(n, v)| v.filter(|v| !v.is_finite()).map(|v| format!("{n} = {v}")));
        let (_, values) = self.nonfinite.get_or_insert((step, vec![]));
        wrong.for_each(|w| {
            if !values.contains(&w) {
                values.push(w)
            }
        });
        if let Some(blame) = blame
            && self.blame.as_ref().is_none_or(|(b, r)| (blame.order, rank) < (b.order, *r))
        {
            self.blame = Some((blame, rank));
        }
    }

    fn error(self) -> Option<RunError> {
        let (step, values) = self.nonfinite?;
        let blame = match self.blame {
            Some((blame, rank)) => format!("it comes from rank {rank}, {}", blame.what),
            None => "no single kernel made it from finite numbers".into(),
        };
        Some(RunError::NonFinite { step, values, blame })
    }
}
