//! The process that leads a run: it has orders, metrics and files to save, and follows all ranks to the end.

use super::checkpoints::Checkpoints;
use super::error::{RunError, RunFailure};
use super::gather::Gather;
use super::metrics::Metrics;
use super::options::RunOptions;
use super::pace::Pace;
use super::placement::placement;
use super::process::LauncherEvent;
use super::progress::{Note, RunEvent, Summary};
use super::ranks::Ranks;
use super::replicas::Replicas;
use super::save::{Existing, FileAccess, SaveTarget, replaceable};
use super::sensible::EventChecker;
use super::spike::Spikes;
use super::stop::RunEnd;
use crate::artifact::Artifact;
use crate::data::DataSets;
use crate::executor::{arena_bytes, named};
use crate::gpu::cuda;
use crate::lines::ExistingLines;
use crate::paths;
use crate::profile::{self, Ceilings, Profile};
use crate::protocol::{Event, FirstStep, HeldOut, Orders, Saves, Spread};
use crate::shm::RunRequest;
use crate::target::{DeviceKind, Exchanges};
use crate::weights::{self, Mark};
use ir::program::{Arena, Job, Space};
use ir::provenance::few;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often a launcher looks.
pub const TICK: Duration = Duration::from_millis(100);

/// What the process that leads a run writes beside its ranks: metrics and files to save. It has the orders, too.
pub struct RunOutputs {
    pub orders: Orders,
    metrics: Option<Metrics>,
    weights: Option<SaveTarget>,
    state: Option<SaveTarget>,
    checkpoints: Option<Checkpoints>,
}

impl RunOutputs {
    pub fn new(artifact: &Artifact, options: &RunOptions, orders: Orders) -> Result<RunOutputs, RunError> {
        let resumed = orders.resume.as_ref().map(|r| &r.0);
        let earlier = if resumed.is_some() { ExistingLines::Keep } else { options.earlier };
        for file in options.save_weights.iter().chain(&options.save_state) {
            let is_resumed = resumed.is_some_and(|r| paths::same(r, file));
            replaceable(file, if is_resumed { Existing::Replace } else { options.existing })?;
        }
        options.metrics.iter().try_for_each(|file| Metrics::check(file, earlier, options.existing))?;
        let reached = match &orders.spread {
            Some(spread) if spread.places.iter().any(|p| p.machine > 0) => FileAccess::ByName { tag: spread.tag() },
            Some(_) | None => FileAccess::ByProcess,
        };
        // The mark only reserves room in the file: ranks write what the run comes to.
        let mark = Mark { step: orders.steps, seed: orders.seed, ..Mark::default() };
        let weights = match &options.save_weights {
            Some(file) => Some(SaveTarget::create(file, &weights::SafetensorsLayout::new(&artifact.job), &reached, &[])?),
            None => None,
        };
        let state = match &options.save_state {
            Some(file) => {
                let others: Vec<&SaveTarget> = weights.iter().collect();
                Some(SaveTarget::create(
                    file,
                    &weights::SafetensorsLayout::of_run(&artifact.job, &mark, Some(&orders.conditions)),
                    &reached,
                    &others,
                )?)
            }
            None => None,
        };
        let metrics = match &options.metrics {
            Some(file) => Some(Metrics::create(file, earlier).map_err(|cause| RunError::Io { file: file.clone(), cause })?),
            None => None,
        };
        let tag = orders.spread.as_ref().map_or_else(|| std::process::id().to_string(), Spread::tag);
        let saves = orders.saves.clone().map(|saves| Saves { tag, ..saves });
        let checkpoints = match &saves {
            Some(saves) => Some(Checkpoints::new(artifact, &orders, saves, options)?),
            None => None,
        };
        let (save_weights, save_state) = (weights.as_ref().map(SaveTarget::file), state.as_ref().map(SaveTarget::file));
        let orders = Orders { save_weights, save_state, saves, ..orders };
        Ok(RunOutputs { orders, metrics, weights, state, checkpoints })
    }
}

/// Follows all ranks to the end of a run.
pub fn conduct(
    artifact: &Artifact,
    options: &RunOptions,
    lead: RunOutputs,
    ranks: Ranks,
    limits: Limits,
    observe: &mut dyn FnMut(RunEvent),
) -> Result<Summary, RunError> {
    let RunOutputs { orders, mut metrics, weights, state, mut checkpoints } = lead;
    // Ranks are dropped before the files that they write to.
    let mut ranks = ranks;
    let mut gather = Gather::new(&artifact.job, &orders, limits.peak);
    let (mut spikes, mut replicas) = (Spikes::new(options.spike, &options.losses), Replicas::new(&artifact.job));
    // This is why ranks were told to end.
    let mut given_up = None;
    let (mut holding, mut has_first) = (vec![], false);
    let mut pace = Pace::new(&artifact.job, options.straggler_interval);
    let mut checker = EventChecker::new(&artifact.job, &orders);
    let profile = orders.profile.map(|_| Profile::new(artifact.job.mesh.world(), orders.order, limits.ceilings));
    let device = (orders.device == DeviceKind::Cuda).then(|| planned(&artifact.job));
    let mut summary = Summary { profile, ..Summary::default() };
    let mut finished = BTreeSet::new();
    let own = drawn(&orders, options).into_iter().chain(left_out(&orders)).chain(many_machines(&orders));
    let remarks = own.chain(orders.remarks.iter().cloned());
    remarks.for_each(|text| observe(RunEvent::Note(Note::Remark(text))));
    let mut notes: Vec<Note> = placement(&orders, &artifact.job.mesh).into_iter().map(Note::Detail).collect();
    let begun = Instant::now();
    // The first look is due at once.
    let mut looked = begun.checked_sub(TICK).unwrap_or(begun);
    while !ranks.finished() {
        if options.stop.is_asked() || options.exit_duration.is_some_and(|most| begun.elapsed() >= most) {
            ranks.ask(RunRequest::Stop);
        }
        if checkpoints.as_ref().is_some_and(Checkpoints::is_due) {
            ranks.ask(RunRequest::Save);
        }
        match ranks.listen(TICK).map(|said| checker.believed(said)) {
            None => {}
            Some(LauncherEvent::Event(rank, Event::Step(event))) => {
                pace.said(rank, &event);
                if let Some(step) = gather.step(event, device.unwrap_or_else(|| ranks.memory())) {
                    checkpoints.iter_mut().for_each(Checkpoints::trained);
                    notes.extend(metrics.as_mut().and_then(|m| m.write(&step)).map(Note::Warning));
                    notes.drain(..).for_each(|note| observe(RunEvent::Note(note)));
                    observe(RunEvent::Step(&step));
                    if let Some((times, note)) = pace.look(step.step, |rank| host_of(&orders, rank)) {
                        observe(RunEvent::Ranks(&times));
                        notes.extend(note);
                    }
                    if let Some((usual, loss)) = spikes.look(step.loss).zip(step.loss) {
                        let error = RunError::Spike { step: step.step, loss, usual };
                        ranks.give_up(error.to_string());
                        given_up = Some(error);
                    }
                    summary.skipped += u64::from(step.skipped);
                    summary.last = Some(step);
                }
            }
            Some(LauncherEvent::Event(_, Event::Holds { milliseconds })) => {
                holding.push(milliseconds);
                if holding.len() as u64 == artifact.job.mesh.world() {
                    notes.push(Note::Detail(held(&orders, &holding)));
                }
            }
            // All ranks that know the reports say the same.
            Some(LauncherEvent::Event(_, Event::First { reports })) if !std::mem::replace(&mut has_first, true) => {
                notes.extend(first(&artifact.job, &orders, &reports).map(Note::Remark));
            }
            Some(LauncherEvent::Event(_, Event::First { .. })) => {}
            Some(LauncherEvent::Event(_, Event::Evaluated { part, reports })) => {
                summary.held_out.extend(named(&artifact.job, &reports).remove("loss").map(|loss| (part, loss)));
            }
            Some(LauncherEvent::Event(rank, Event::Sums { step, sums })) => match replicas.said(rank, step, &sums, |rank| host_of(&orders, rank)) {
                None => {}
                Some(Ok(note)) => observe(RunEvent::Note(note)),
                Some(Err(error)) => {
                    ranks.give_up(error.to_string());
                    given_up = Some(error);
                }
            },
            Some(LauncherEvent::Event(rank, Event::NonFinite { step, reports, blame })) => gather.nonfinite(rank, step, &reports, blame),
            Some(LauncherEvent::Event(_, Event::Skipped { step, skips, most })) => gather.skipped(step, skips, most),
            Some(LauncherEvent::Event(rank, Event::Profile(part))) => {
                if let Some(profile) = &mut summary.profile {
                    profile.add(rank, part);
                }
            }
            Some(LauncherEvent::Event(rank, event @ (Event::Saved { .. } | Event::Unsaved { .. }))) => {
                if let Some(step) = checkpoints.as_mut().and_then(|c| c.said(rank, event, observe)) {
                    ranks.saved(step);
                }
            }
            Some(LauncherEvent::Event(rank, Event::Failed { message, help, aborted })) => {
                ranks.failed(rank, RunFailure { help, ..RunFailure::new(message) }, aborted)
            }
            Some(LauncherEvent::Event(rank, Event::Finished { step })) => {
                finished.insert(step);
                ranks.done(rank);
            }
            Some(LauncherEvent::Stop) => ranks.ask(RunRequest::Stop),
            Some(LauncherEvent::Begun(rank, ask, step)) => ranks.begun(rank, ask, step),
            Some(LauncherEvent::Health(rank, pulse)) => ranks.pulse(rank, pulse),
            Some(LauncherEvent::Closed(rank, ended)) => ranks.closed(rank, ended),
            Some(LauncherEvent::Lost(rank)) => ranks.lost(rank),
        }
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.poll(observe);
        }
        if looked.elapsed() >= TICK {
            looked = Instant::now();
            ranks.watch(options.patience.as_millis().div_ceil(TICK.as_millis()) as u32, TICK);
        }
        if let Some(failure) = ranks.failure() {
            // A checkpoint that all ranks have written may be getting its name.
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.settle(observe);
            }
            return Err(given_up.unwrap_or(RunError::Ranks(failure)));
        }
    }
    if let Some(error) = gather.error() {
        ranks.end(RunFailure::new(error.to_string()));
        return Err(error);
    }
    if !summary.held_out.is_empty() {
        observe(RunEvent::Note(Note::Remark(held_out(&summary.held_out, orders.sets.as_ref().map_or(&[], DataSets::valid_names)))));
    }
    if let (Some(profile), Some(spread)) = (&mut summary.profile, &orders.spread) {
        profile.align(spread);
    }
    summary.steps = match finished.last() {
        Some(step) if finished.len() == 1 => *step,
        Some(_) | None => {
            let error = RunError::Uneven(finished);
            ranks.end(RunFailure::new(error.to_string()));
            return Err(error);
        }
    };
    summary.ended = if summary.steps < orders.steps { RunEnd::Early } else { RunEnd::Whole };
    // Ranks need not wait until files are complete on their disks.
    ranks.is_well(summary.ended);
    drop(ranks);
    // Each file is finished, whatever becomes of the others.
    let ends = [checkpoints.map_or(Ok(()), |c| c.end(observe)), weights.map_or(Ok(()), SaveTarget::finish), state.map_or(Ok(()), SaveTarget::finish)];
    ends.into_iter().collect::<Result<(), RunError>>()?;
    Ok(summary)
}

/// What training came to on data that it has not seen.
fn held_out(losses: &BTreeMap<HeldOut, f64>, names: &[String]) -> String {
    let name = |part: &HeldOut| match part {
        HeldOut::Valid(set) => names.get(*set as usize).map_or("validation loss".into(), |name| format!("validation loss of `{name}`")),
        HeldOut::Test => "test loss".into(),
    };
    let losses: Vec<String> = losses.iter().map(|(part, loss)| format!("{} {loss:.4}", name(part))).collect();
    format!("after the last step: {}", losses.join(", "))
}

/// How long it took until all ranks held what they begin with.
fn held(orders: &Orders, milliseconds: &[f64]) -> String {
    let most = milliseconds.iter().copied().fold(0.0, f64::max) / 1e3;
    match (&orders.resume, orders.init.is_empty()) {
        (Some((from, _)), _) => format!("weights and states were read from `{}` in {most:.3} s", from.display()),
        (None, false) => format!("weights were read in {most:.3} s"),
        (None, true) => format!("weights were drawn in {most:.3} s"),
    }
}

/// That the first step is what it should be.
fn first(job: &Job, orders: &Orders, reports: &[Option<f64>]) -> Option<String> {
    let FirstStep { sequences, expected } = orders.first_step.as_ref()?;
    let said = expected.iter().filter_map(|e| {
        let found = job.reports.iter().zip(reports).find(|(name, _)| **name == e.report)?;
        let found = (*found.1)?;
        let (apart, value) = ((found - e.value.0).abs(), e.value.0.abs());
        Some(if apart < value || apart == 0.0 {
            format!("{} {found:.5}, {:.1e} from the reference's", e.report, apart / value.max(f64::MIN_POSITIVE))
        } else {
            format!("{} {found:.1e}, as near zero as the reference's {value:.1e} up to rounding", e.report)
        })
    });
    let said: Vec<String> = said.collect();
    let of = if *sequences == job.global_batch { format!("all {sequences}") } else { format!("{sequences} of the {}", job.global_batch) };
    (!said.is_empty()).then(|| format!("the first step, on {of} sequences: {}", said.join("; ")))
}

/// What is said of what no weights are.
fn left_out(orders: &Orders) -> Option<String> {
    let names: Vec<String> = orders.left_out.iter().map(|name| format!("`{name}`")).collect();
    (!names.is_empty()).then(|| format!("left out of --init, as it is no tensor: {}", few(&names).join(", ")))
}

/// Most machines for which mcc's own wires are meant.
const FEW: u32 = 4;

/// What is said of a world for which mcc's own wires are not meant.
fn many_machines(orders: &Orders) -> Option<String> {
    let machines = orders.spread.as_ref().and_then(|s| s.places.iter().map(|p| p.machine + 1).max()).unwrap_or(1);
    (orders.exchanges == Exchanges::Host && machines > FEW).then(|| {
        format!(
            "{machines} machines exchange over mcc's own TCP connections, which are for small worlds: of a sum each is sent all. --exchanges mpi goes by \
             the machines' MPI, and --exchanges nccl by GPUs"
        )
    })
}

/// What is said of weights that no file has.
fn drawn(orders: &Orders, options: &RunOptions) -> Option<String> {
    if orders.drawn.is_empty() {
        return (!options.allow_missing.is_empty()).then(|| "no weights are missing: --allow-missing changes nothing".into());
    }
    Some(format!("drawn, as no file of --init has them: {}", few(&orders.drawn).join(", ")))
}

/// ` on node03`, of a rank of a world.
fn host_of(orders: &Orders, rank: u64) -> String {
    orders.spread.as_ref().map_or(String::new(), |spread| format!(" on {}", spread.places[rank as usize].host))
}

/// What ranks can do at most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Of a rank on this machine, if the run is profiled.
    ceilings: Option<Ceilings>,
    /// Operations a second of all ranks, if all are like those of this machine.
    peak: Option<f64>,
}

/// Measurements of a peak: it is shown with every step, and nothing depends on it.
const ROUNDS: usize = 4;

impl Limits {
    /// Measures the limits for these ranks of this machine.
    pub fn new(orders: &Orders, world: u64, ranks: Range<u64>) -> Limits {
        let threads = || ranks.map(|r| orders.threads(r, world)).collect::<Vec<_>>();
        match orders.device {
            DeviceKind::Cpu if orders.steps == 0 => Limits::default(),
            DeviceKind::Cpu if orders.profile.is_some() => {
                let ceilings = profile::measure(&threads());
                Limits { peak: Some(ceilings.flops * world as f64), ceilings: Some(ceilings) }
            }
            DeviceKind::Cpu => Limits { peak: Some(profile::flops(&threads(), ROUNDS) * world as f64), ceilings: None },
            // Ranks of a machine that share a GPU share its peak.
            DeviceKind::Cuda => {
                let count = cuda::probe().unwrap_or(1);
                let gpus = orders.spread.as_ref().map_or(world.min(count), |_| world);
                Limits { peak: cuda::describe().ok().and_then(|gpu| gpu.peak()).map(|peak| peak * gpus as f64), ceilings: None }
            }
            DeviceKind::Emulated | DeviceKind::Reference => Limits::default(),
        }
    }
}

/// Bytes of a GPU that the rank takes which takes the most.
fn planned(job: &Job) -> u64 {
    let of_device =
        |bytes: [u64; Arena::ALL.len()]| Arena::ALL.iter().zip(bytes).filter(|(arena, _)| arena.space() == Some(Space::Device)).map(|b| b.1).sum();
    (0..job.mesh.world()).map(|rank| of_device(arena_bytes(job, rank))).max().unwrap_or(0)
}
