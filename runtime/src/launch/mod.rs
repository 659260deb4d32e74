//! Starts the ranks of an artifact as processes of this machine, watches them, and gathers what they say; or takes part in a world that another launcher has
//! started ([`joined`]).
//!
//! Nothing of a run has a name that could stay behind: memory is an inherited anonymous file, ranks die with the process that
//! started them, the saved file has no name before it is complete. A dead or stuck rank ends the run within a few
//! seconds ([`RunOptions::patience`]), with who waits for whom.

mod gather;
mod joined;
mod metrics;
mod orders;
#[doc(hidden)]
pub mod overheard;
mod placement;
mod plan;
mod process;
mod ranks;
mod save;
mod sensible;
mod shielded;
mod stop;

pub use metrics::From as MetricsFrom;
pub use save::{Existing, replaceable};
pub use stop::{Ended, StopRequest};

use crate::artifact::Artifact;
use crate::data::{DataError, Spec};
use crate::executor::Order;
use crate::gpu::cuda::Unavailable;
use crate::paths;
use crate::profile::{self, Ceilings, Profile};
use crate::protocol::{self, Event, OnNonfinite, Orders};
use crate::rendezvous::Trust;
use crate::shm::{Board, Layout, Segment};
use crate::target::{DeviceKind, Exchanges};
use crate::weights::{self, Mark, WeightsError};
use crate::world::{World, WorldError};
use gather::Gather;
use metrics::Metrics;
use orders::{nccl_id, orders};
use placement::placement;
use process::Said;
use ranks::Ranks;
use save::{Reached, Target};
use sensible::Course;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc;
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
    /// One JSON object per step. A run that resumes appends.
    pub metrics: Option<PathBuf>,
    /// What happens to files of `save`, `save_state` and `metrics` that exist. What is resumed from may always be saved to.
    pub existing: Existing,
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
    /// By what they know each other.
    pub trust: Trust,
    /// Is told what a user should know and nothing depends on.
    pub note: fn(&str),
    /// Ends the run early.
    pub stop: StopRequest,
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
            existing: Existing::Refuse,
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
            trust: Trust::Loopback,
            note: |_| {},
            stop: StopRequest::default(),
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
    /// What else there is to say by now.
    #[serde(skip)]
    pub notes: Vec<Note>,
    /// The other reports, by name.
    #[serde(flatten)]
    pub reports: BTreeMap<String, f64>,
}

/// Something that whoever watches a run may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// At once.
    Warning(String),
    /// If they look closely.
    Detail(String),
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// The last step that was done, counted from the first of all runs that this one goes on with.
    pub steps: u64,
    pub ended: Ended,
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
    #[error("`{}` exists: --force replaces it, another name keeps it", .file.display())]
    Exists { file: PathBuf },
    #[error("`{}` holds something else than metrics, to which a resumed run would append: name another file", .file.display())]
    Foreign { file: PathBuf },
    #[error(
        "`{}` takes {bytes} bytes, which cannot be reserved: {cause}; {free} bytes are free there. Nothing was trained",
        .file.display()
    )]
    Space { file: PathBuf, bytes: u64, free: String, cause: io::Error },
    #[error("`{}` could not be saved: {cause}; what it should hold is lost, and a file of that name that was there before stays", .file.display())]
    Unsaved { file: PathBuf, cause: io::Error },
    #[error("ranks ended after different steps ({}), so nothing is saved; this is a bug in mcc", .0.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))]
    Uneven(BTreeSet<u64>),
    #[error("{bytes} bytes of memory that the ranks share could not be had: {cause}")]
    Memory { bytes: u64, cause: io::Error },
    #[error("`{}` could not be started: {cause}", .binary.display())]
    Start { binary: PathBuf, cause: io::Error },
    /// Why the run ended, then who was waiting.
    #[error("{reason}{}", .waiting.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Ranks { reason: String, waiting: Vec<String> },
    #[error(
        "{skips} steps in a row were skipped by step {step}, as loss or gradient norm was not finite, and --max-skips allows {most}. Nothing is saved; \
         --on-nonfinite stop says where such numbers come from"
    )]
    Skips { step: u64, skips: u64, most: u64 },
    #[error(
        "nothing was trained: loss or gradient norm was not finite in all of {skips} steps. Nothing is saved; \
         --on-nonfinite stop says where such numbers come from"
    )]
    Untrained { skips: u64 },
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
    let mut ranks = Ranks::new(job, Board { segment: &segment, layout: &layout }, mpsc::channel());
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
    metrics: Option<Metrics>,
    weights: Option<Target>,
    state: Option<Target>,
}

impl Lead {
    fn new(artifact: &Artifact, options: &RunOptions, orders: Orders) -> Result<Lead, RunError> {
        let resumed = orders.resume.as_ref().map(|r| &r.0);
        let from = if resumed.is_some() { metrics::From::Resumed } else { metrics::From::Start };
        for file in options.save.iter().chain(&options.save_state) {
            let is_resumed = resumed.is_some_and(|r| paths::same(r, file));
            replaceable(file, if is_resumed { Existing::Replace } else { options.existing })?;
        }
        options.metrics.iter().try_for_each(|file| Metrics::check(file, from, options.existing))?;
        let reached = match &orders.spread {
            Some(spread) if spread.places.iter().any(|p| p.machine > 0) => Reached::ByName { tag: spread.tag() },
            Some(_) | None => Reached::ByProcess,
        };
        // Laid out only: ranks write what the run comes to.
        let mark = Mark { step: orders.steps, seed: orders.seed, scaling: None };
        let weights = match &options.save {
            Some(file) => Some(Target::create(file, &weights::Layout::new(&artifact.job), &reached, &[])?),
            None => None,
        };
        let state = match &options.save_state {
            Some(file) => {
                let others: Vec<&Target> = weights.iter().collect();
                Some(Target::create(file, &weights::Layout::of_run(&artifact.job, &mark), &reached, &others)?)
            }
            None => None,
        };
        let metrics = match &options.metrics {
            Some(file) => Some(Metrics::create(file, from).map_err(|cause| RunError::Io { file: file.clone(), cause })?),
            None => None,
        };
        let orders = Orders { save: weights.as_ref().map(Target::file), save_state: state.as_ref().map(Target::file), ..orders };
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
    let mut course = Course::new(&artifact.job, &orders);
    let profile = orders.profile.map(|_| Profile::new(artifact.job.mesh.world(), orders.order, ceilings));
    let mut summary = Summary { profile, ..Summary::default() };
    let mut finished = BTreeSet::new();
    let mut notes: Vec<Note> = placement(&orders, &artifact.job.mesh).into_iter().map(Note::Detail).collect();
    let mut looked = Instant::now();
    while !ranks.finished() {
        if options.stop.is_asked() {
            ranks.stop();
        }
        match ranks.listen(TICK).map(|said| course.believed(said)) {
            None => {}
            Some(Said::Event(_, Event::Step(event))) => {
                if let Some(mut step) = gather.step(event) {
                    step.notes.append(&mut notes);
                    step.notes.extend(metrics.as_mut().and_then(|m| m.write(&step)).map(Note::Warning));
                    progress(&step);
                    summary.skipped += u64::from(step.skipped);
                    summary.last = Some(step);
                }
            }
            Some(Said::Event(rank, Event::NonFinite { step, reports, blame })) => gather.nonfinite(rank, step, &reports, blame),
            Some(Said::Event(_, Event::Skipped { step, skips, most })) => gather.skipped(step, skips, most),
            Some(Said::Event(rank, Event::Profile(part))) => {
                if let Some(profile) = &mut summary.profile {
                    profile.add(rank, part);
                }
            }
            Some(Said::Event(rank, Event::Failed { message, aborted })) => ranks.failed(rank, message, aborted),
            Some(Said::Event(rank, Event::Finished { step })) => {
                finished.insert(step);
                ranks.done(rank);
            }
            Some(Said::Stop) => ranks.stop(),
            Some(Said::Begun(rank, step)) => ranks.begun(rank, step),
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
    summary.steps = match finished.last() {
        Some(step) if finished.len() == 1 => *step,
        Some(_) | None => {
            let error = RunError::Uneven(finished);
            ranks.end(&error.to_string(), &[]);
            return Err(error);
        }
    };
    summary.ended = if summary.steps < orders.steps { Ended::Early } else { Ended::Whole };
    // Before files are complete on their disks, which others need not wait for.
    ranks.is_well(summary.ended);
    drop(ranks);
    // Each, whatever becomes of the other.
    [weights, state].map(|target| target.map_or(Ok(()), Target::finish)).into_iter().collect::<Result<(), RunError>>()?;
    Ok(summary)
}
