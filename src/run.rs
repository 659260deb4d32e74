//! `mcc run`.

use crate::cli::{self, Changed, DataDtype, DeviceKind, Exchanges, OnNonfinite, OnSpike, RunArgs};
use crate::compare::Compared;
use crate::costs;
use crate::damaged;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::first_step;
use crate::idle;
use crate::misuse::misuse;
use crate::print::{note, progress, report};
use crate::sets;
use crate::shown::{StepDisplay, Verbosity};
use crate::signals::{self, Announce};
use crate::text::show;
use crate::tokenizer;
use crate::watch::{self, Record, Watch};
use anyhow::{Context, anyhow};
use ir::diag::{Diagnostic, Sources};
use ir::model::LearningRateSchedule;
use ir::provenance::Provenance;
use runtime::artifact::{AcceptedArtifacts, Artifact};
use runtime::checkpoint;
use runtime::conditions::{Change, model_changes};
use runtime::data::{Encoding, Spec};
use runtime::executor::CommandOrder;
use runtime::launch::{self, Existing, RunEnd, RunError, RunEvent, RunOptions, StopRequest, Summary, replaceable};
use runtime::lines::ExistingLines;
use runtime::profile::breakdown::Breakdown;
use runtime::profile::{table, trace};
use runtime::rendezvous::Trust;
use runtime::signature::PublicKey;
use runtime::world::{World, WorldError};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub fn run(args: &RunArgs, typed: &[String]) -> Result<(), Failure> {
    let verbosity = match (args.quiet, args.verbose) {
        (true, _) => Verbosity::Quiet,
        (false, true) => Verbosity::Verbose,
        (false, false) => Verbosity::Usual,
    };
    let stop = StopRequest::default();
    signals::listen(stop.clone(), if verbosity == Verbosity::Quiet { Announce::No } else { Announce::Yes })?;
    files::look(&args.artifact, ExpectedInput::Artifact)?;
    let keys = args.trust.iter().map(|file| PublicKey::read(file)).collect::<Result<Vec<_>, _>>()?;
    let accept = if keys.is_empty() { AcceptedArtifacts::Anyones } else { AcceptedArtifacts::SignedBy(&keys) };
    let artifact = runtime::artifact::read(&args.artifact, &accept)?;
    let find = |artifact: &Artifact| World::find(artifact.manifest.ranks, |name| std::env::var(name).ok(), args.rendezvous.as_deref());
    let (artifact, world) = match find(&artifact) {
        Err(WorldError::Size { found, .. }) if !args.fallback.is_empty() => fallback(args, &accept, found).and_then(|other| {
            let world = find(&other)?;
            Ok((other, world))
        })?,
        world => (artifact, world?),
    };
    files::apart(args)?;
    if world.is_none() {
        alone(args, typed)?;
        files::of_run(args)?;
    }
    let leads = world.as_ref().is_none_or(|w| w.rank == 0);
    if leads {
        of_one_model(args, &accept, &artifact)?;
    }
    if leads {
        show(&idle::in_job(args, typed, &artifact.job), &Sources::default());
    }
    let compared = args.compare.as_ref().filter(|_| leads).map(|m| Compared::new(m, &artifact, args, world.as_ref())).transpose()?;
    let trust = trust(args, world.as_ref())?;
    let existing = if args.force { Existing::Replace } else { Existing::Refuse };
    if let Some(trace) = args.trace.as_ref().filter(|_| leads) {
        replaceable(trace, existing)?;
    }
    let encoding = match args.data_dtype {
        None if args.bytes => Encoding::Bytes,
        None => Encoding::Text,
        Some(DataDtype::Uint16) => Encoding::U16,
        Some(DataDtype::Uint32) => Encoding::U32,
        Some(DataDtype::Int32) => Encoding::I32,
    };
    let resume = resumed(args, typed, leads)?;
    if args.resume.is_some() && !is_auto(args) && !args.init.is_empty() {
        return Err(misuse!(
            "--init begins a run, --resume goes on with one: leave out either; `--resume auto` begins only where there is nothing to go on from"
        )
        .into());
    }
    let begins = resume.is_none();
    // A run that ended before its first checkpoint has left lines of logs but nothing to resume from, so `auto` keeps
    // the lines.
    let earlier = if resume.is_some() || is_auto(args) { ExistingLines::Keep } else { ExistingLines::Replace };
    let specs = |texts: &[String]| texts.iter().map(|t| Spec::parse(t, encoding)).collect();
    let defaults = RunOptions::new(rank_binary()?);
    let options = RunOptions {
        data: specs(&args.data),
        valid_data: specs(&args.valid_data),
        sets: sets::of(args)?,
        eval_interval: args.eval_interval,
        eval_batches: args.eval_iters,
        steps: args.steps,
        exit_interval: args.exit_interval,
        exit_duration: args.exit_duration_in_mins.map(|minutes| Duration::from_secs_f64(minutes * 60.0)),
        init: if begins { args.init.clone() } else { vec![] },
        allow_missing: if begins { args.allow_missing.clone() } else { vec![] },
        resume,
        allowed: args.allow_changed.iter().map(|c| changed(*c)).collect(),
        save: args.save.clone(),
        save_interval: args.save_interval,
        save_seconds: args.save_seconds.map(Duration::from_secs),
        keep: args.keep,
        save_weights: args.save_weights.clone(),
        save_state: args.save_state.clone(),
        metrics: watch::metrics(args),
        earlier,
        spike: (args.on_spike == OnSpike::Back).then_some(args.spike_factor),
        straggler_interval: args.straggler_interval,
        check_replicas: args.check_replicas,
        existing,
        profile: (args.profile || args.compare.is_some()).then_some(args.profile_steps),
        threads_per_rank: args.threads_per_rank,
        seed: args.seed,
        on_nonfinite: match args.on_nonfinite {
            OnNonfinite::Stop => runtime::protocol::OnNonfinite::Stop,
            OnNonfinite::Skip => runtime::protocol::OnNonfinite::Skip { most: args.max_skips },
        },
        exchanges: match args.exchanges {
            Exchanges::Host => runtime::target::Exchanges::Host,
            Exchanges::Mpi => runtime::target::Exchanges::Mpi,
            Exchanges::Nccl => runtime::target::Exchanges::Nccl,
        },
        nccl_max_ctas: args.nccl_max_ctas,
        offload_to: args.offload_to.clone(),
        device: args.device.map(|d| match d {
            DeviceKind::Cpu => runtime::target::DeviceKind::Cpu,
            DeviceKind::Cuda => runtime::target::DeviceKind::Cuda,
            DeviceKind::Emulated => runtime::target::DeviceKind::Emulated,
        }),
        order: if args.in_order { CommandOrder::List } else { CommandOrder::Streams },
        world,
        meeting_limit: Duration::from_secs(args.rendezvous_timeout),
        trust,
        stop,
        ..defaults
    };
    if leads && verbosity == Verbosity::Verbose {
        let mesh: Vec<String> = artifact.manifest.mesh.iter().map(|(axis, size)| format!("{axis} {size}")).collect();
        progress!(
            "{}: {}, {}, for {}, id {}",
            artifact.dir.display(),
            artifact.manifest.model,
            mesh.join(" "),
            artifact.manifest.target,
            artifact.id
        );
        options.data.iter().for_each(|spec| progress!("data: {}", spec.file.display()));
        options.valid_data.iter().for_each(|spec| progress!("held-out data: {}", spec.file.display()));
    }
    if args.restarts > 0 && options.world.is_some() {
        return Err(misuse!(
            "--restarts starts ranks of one machine again; where a launcher starts them it does that (torchrun --max-restarts, scontrol requeue), with --resume auto"
        )
        .into());
    }
    let mut options = options;
    if let (true, Some(sequences)) = (leads, args.check_first_step) {
        options.first_step = first_step::expected(&artifact, &options, sequences, verbosity)?;
    }
    let begins: Vec<PathBuf> = options.resume.iter().chain(&options.init).cloned().collect();
    let tokenizer = if leads { tokenizer::of_run(options.sets.as_ref(), &begins) } else { None };
    let mut shown = StepDisplay::new(verbosity, args.log_interval);
    let mut watch = Watch::new(args, &artifact, earlier)?;
    let is_named = !is_auto(args) && args.load.as_ref().is_none_or(|dir| options.resume.as_ref() == Some(dir));
    let mut tokenizer_saver = TokenizerSaver { tokenizer, dir: args.save.clone() };
    let summary = restarted(&artifact, options, is_named, args.restarts, &mut shown, &mut watch, &mut tokenizer_saver);
    watch.ended(&summary);
    shown.end();
    let summary = match summary {
        Err(RunError::Done { .. }) if is_auto(args) => {
            if leads {
                note!(
                    "nothing is left to do: the last checkpoint in `{}` is of the last step",
                    args.save.iter().map(|d| d.display().to_string()).collect::<String>()
                );
            }
            return Ok(());
        }
        other => other,
    };
    let summary = summary.map_err(|e| match e {
        RunError::Ranks(failure) => anyhow!(failure.spelled(cli::help)),
        RunError::Data(e) if e.help().is_some() => {
            anyhow!([e.to_string()].into_iter().chain(e.help().iter().map(cli::help)).collect::<Vec<_>>().join("; "))
        }
        e => e.into(),
    })?;
    // Weights and state are saved by now, and nothing below can undo that.
    let says = leads && verbosity != Verbosity::Quiet;
    if says && summary.skipped > 0 {
        progress!("{} of {} steps were skipped: loss or gradient norm not finite", summary.skipped, summary.steps);
    }
    let saved: Vec<_> = args.save_weights.iter().chain(&args.save_state).collect();
    saved.iter().for_each(|file| tokenizer_saver.put(&tokenizer::beside(file)));
    if says {
        saved.iter().for_each(|file| progress!("saved {}", file.display()));
    }
    if says && summary.ended == RunEnd::Early {
        let nothing = saved.is_empty() && args.save.is_none();
        note!("ended early, after step {}{}", summary.steps, if nothing { "; nothing was to be saved" } else { "" });
    }
    let profile = summary.profile.as_ref().filter(|p| p.ranks.iter().any(|r| !r.steps.is_empty()));
    if let Some(profile) = profile.filter(|_| args.profile) {
        let breakdown = Breakdown::new(&artifact.job, profile);
        if says {
            progress!("{}", table::text(&breakdown).trim_end());
            if args.device == Some(DeviceKind::Emulated) {
                let card = costs::card(&artifact, None)?;
                costs::of_classes(&artifact, card, None).iter().for_each(|(k, rows)| progress!("{}", costs::table(card, *k, rows).trim_end()));
            }
        }
        args.log_dir.iter().for_each(|dir| Watch::profile(dir, &artifact, &breakdown));
        let file = args.trace.clone().unwrap_or_else(|| artifact.dir.with_extension("trace.json"));
        let written = runtime::paths::write_whole(&file, |out| trace::write(&artifact.job, profile, out));
        written.with_context(|| format!("cannot write the trace `{}`", file.display()))?;
        if says {
            progress!("wrote {}", file.display());
        }
    }
    if let Some((compared, profile)) = compared.as_ref().zip(profile) {
        report!("{}", compared.text(&artifact.job, profile));
    }
    match summary.ended {
        RunEnd::Whole => Ok(()),
        RunEnd::Early => Err(Failure::Early),
    }
}

/// A run's tokenizer, which goes along with what it saves. That it cannot be written ends no run.
struct TokenizerSaver {
    tokenizer: Option<tokenizer::TokenizerFiles>,
    /// Directory of checkpoints, until it has the tokenizer.
    dir: Option<PathBuf>,
}

impl TokenizerSaver {
    fn saved(&mut self) {
        if let Some(dir) = self.dir.take() {
            self.put(&dir);
        }
    }

    fn put(&self, dir: &Path) {
        if let Some(tokenizer) = &self.tokenizer
            && let Err(e) = tokenizer.put(dir)
        {
            note!("warning: cannot keep the tokenizer in `{}`: {e}", dir.display());
        }
    }
}

/// Runs an artifact, again from its last checkpoint where ranks have failed, or from that before a loss jumped.
fn restarted(
    artifact: &Artifact,
    mut options: RunOptions,
    is_named: bool,
    restarts: u64,
    shown: &mut StepDisplay,
    watch: &mut Watch,
    tokenizer_saver: &mut TokenizerSaver,
) -> Result<Summary, RunError> {
    let schedule = &artifact.job.train.schedule;
    let mut first = true;
    let mut count = 0;
    // A checkpoint that the user named is not replaced by an earlier one.
    let named = options.resume.clone().filter(|_| is_named);
    // These are the checkpoints that this run has written, in order of steps.
    let mut saved: Vec<(u64, PathBuf)> = vec![];
    let mut losses: Vec<(u64, f64)> = vec![];
    loop {
        // `begun` is when this attempt began, and `done` has the time at which each step was done.
        let (begun, mut done) = (Instant::now(), vec![]);
        let outcome = launch::run(artifact, &options, &mut |event| {
            watch.event(&event);
            match event {
                RunEvent::Note(note) => shown.note(&note),
                RunEvent::Step(p) => {
                    if std::mem::take(&mut first) {
                        show(short_of_warm_up(schedule, p.steps).as_slice(), &Sources::default());
                    }
                    shown.step(p);
                    done.push((p.step, Instant::now()));
                    losses.extend(p.loss.map(|loss| (p.step, loss)));
                }
                RunEvent::Ranks(_) => {}
                RunEvent::Saved(s) => {
                    tokenizer_saver.saved();
                    shown.saved(s);
                    saved.push((s.step, s.dir.clone()));
                }
            }
        });
        // In a world that another launcher started, rank 0 alone looks for damage.
        let may_look = done.is_empty() && !options.stop.is_asked() && options.world.as_ref().is_none_or(|w| w.rank == 0);
        if let (Err(_), true, Some(dir)) = (&outcome, may_look, &options.resume)
            && let Some(what) = damaged::damage(dir)
        {
            if named.as_ref() == Some(dir) {
                return outcome;
            }
            let (dir, save) = (dir.clone(), options.save.clone());
            let mut before = None;
            shown.aside(|| {
                note!("warning: {what}");
                before = damaged::before(&dir, save.as_deref());
                damaged::set_aside(&dir, save.as_deref());
            });
            if let (Some(before), None) = (before, &options.world) {
                shown.aside(|| note!("going on from `{}`", before.display()));
                saved.retain(|(_, at)| *at != dir);
                options.resume = Some(before);
                options.existing = Existing::Replace;
                continue;
            }
            return outcome;
        }
        let (why, spike) = match outcome {
            Err(RunError::Ranks(failure)) if count < restarts && !options.stop.is_asked() => (failure.spelled(cli::help), None),
            Err(RunError::Spike { step, .. }) if count < restarts && !options.stop.is_asked() => {
                let before = saved.iter().rposition(|(at, dir)| *at < step && dir.exists());
                // Later checkpoints contain what made the loss jump.
                saved.truncate(before.map_or(0, |k| k + 1));
                if saved.is_empty() && options.resume.is_none() {
                    shown.aside(|| note!("warning: --on-spike back has no checkpoint before step {step} to go back to"));
                    return outcome;
                }
                (outcome.map_or_else(|e| e.to_string(), |_| String::new()), Some(step))
            }
            // The ranks had failed after the last checkpoint was complete, so no step is left.
            Err(RunError::Done { steps, .. }) if count > 0 => return Ok(Summary { steps, ..Summary::default() }),
            outcome => return outcome,
        };
        count += 1;
        let start = done.first().map_or(0, |(step, _)| step - 1);
        let from = saved.last().map_or(start, |s| s.0);
        let since = done.iter().find(|(step, _)| *step == from).map_or(begun, |(_, at)| *at);
        let lost = done.iter().filter(|(step, _)| *step > from).count() as u64;
        if from != start {
            // The checkpoint is already past the data that were skipped before.
            options.skip = 0;
        }
        if from != start || spike.is_some() {
            // The expectation is for another step than the one that comes first now.
            options.first_step = None;
        }
        losses.retain(|(step, _)| *step <= from);
        options.losses = losses.iter().map(|l| l.1).collect();
        let batch = artifact.job.global_batch;
        options.skip += spike.map_or(0, |step| (step - from) * batch);
        if let Some((_, dir)) = saved.last() {
            (options.resume, options.init) = (Some(dir.clone()), vec![]);
            options.allow_missing.clear();
        }
        // Existing metrics and later checkpoints are this run's own.
        options.existing = Existing::Replace;
        let place = options.resume.as_ref().map_or("the beginning".into(), |dir| format!("`{}`", dir.display()));
        watch.record(Record::Restarted {
            why: why.clone(),
            from: options.resume.as_ref().map(|dir| dir.display().to_string()),
            steps: lost,
            seconds: since.elapsed().as_secs_f64(),
            skipped: options.skip,
            count,
            most: restarts,
        });
        shown.aside(|| {
            note!("error: {why}");
            let left_out = spike.map_or(String::new(), |step| format!(", without the data of steps {} to {step}", from + 1));
            note!("going on from {place}{left_out}, restart {count} of {restarts}: {lost} steps and {:.1} s are lost", since.elapsed().as_secs_f64());
        });
    }
}

fn changed(what: Changed) -> Change {
    match what {
        Changed::Model => Change::Model,
        Changed::Data => Change::Data,
        Changed::Batch => Change::Batch,
        Changed::Rate => Change::Rate,
        Changed::Optimizer => Change::Optimizer,
        Changed::Precision => Change::Precision,
    }
}

/// Whether the run goes on from what `--save` names, if anything is there.
fn is_auto(args: &RunArgs) -> bool {
    args.resume.as_ref().is_some_and(|r| r.as_os_str() == files::AUTO)
}

/// What the run goes on from, if it does.
fn resumed(args: &RunArgs, typed: &[String], leads: bool) -> Result<Option<PathBuf>, Failure> {
    let dir = match (&args.load, &args.resume, &args.save) {
        (Some(dir), _, _) => dir,
        (None, Some(_), Some(save)) if is_auto(args) => {
            let steps = checkpoint::steps(save).with_context(|| format!("cannot read `{}`", save.display()))?;
            if steps.is_empty() {
                let named = watch::metrics(args).filter(|file| fs::metadata(file).is_ok_and(|about| about.is_file() && about.len() > 0));
                if let Some(file) = named.filter(|_| leads) {
                    let (save, file) = (save.display(), file.display());
                    note!(
                        "`{save}` has no checkpoint, so the run begins; lines in `{file}` are of a life of it before that, and stay: the last of a step counts"
                    );
                }
                return Ok(None);
            }
            save
        }
        (None, file, _) => return Ok(file.clone()),
    };
    let found = checkpoint::newest(dir)?;
    if leads {
        for (dir, what) in &found.damaged {
            note!("warning: {what}");
            damaged::set_aside(dir, args.save.as_deref());
        }
        note!("going on from `{}`", found.dir.display());
    }
    let seed = found.checkpoint.manifest.run.seed;
    if args.seed != seed && typed.iter().any(|flag| flag == "--seed") {
        return Err(misuse!("the run of `{}` has seed {seed}, with which it goes on: leave out --seed {}", found.dir.display(), args.seed).into());
    }
    Ok(Some(found.dir))
}

/// Refuses a fallback that is none: it may be needed when nobody looks.
fn of_one_model(args: &RunArgs, accept: &AcceptedArtifacts, artifact: &Artifact) -> Result<(), Failure> {
    for path in [&args.artifact].into_iter().chain(&args.fallback).filter(|path| **path != artifact.dir) {
        files::look(path, ExpectedInput::Artifact)?;
        let other = runtime::artifact::read(path, accept)?;
        if let Some((_, what)) = model_changes(&Provenance::of(&other.job), &artifact.job) {
            return Err(misuse!("--fallback: `{}` and `{}` are of different models: {what}", path.display(), artifact.dir.display()).into());
        }
    }
    Ok(())
}

/// What runs where so many ranks are, which are not those of the artifact.
fn fallback(args: &RunArgs, accept: &AcceptedArtifacts, ranks: u64) -> Result<Artifact, Failure> {
    let mut have = vec![];
    for path in &args.fallback {
        files::look(path, ExpectedInput::Artifact)?;
        let other = runtime::artifact::read(path, accept)?;
        if other.manifest.ranks == ranks {
            note!("warning: {ranks} ranks are here: `{}` runs in place of `{}`", path.display(), args.artifact.display());
            return Ok(other);
        }
        have.push(format!("`{}` has {}", path.display(), other.manifest.ranks));
    }
    Err(anyhow!("{ranks} ranks are here, for which neither `{}` nor a --fallback is compiled: {}", args.artifact.display(), have.join(", ")).into())
}

/// How ranks that were started one by one know each other: by a secret, at a loopback address, or not at all.
fn trust(args: &RunArgs, world: Option<&World>) -> Result<Trust, Failure> {
    let variable = std::env::var_os("MCC_SECRET");
    let secret = match (&args.secret_file, &variable) {
        (Some(file), _) => Some(Trust::secret_file(file)?),
        (None, Some(value)) => Some(Trust::secret("MCC_SECRET", value.as_bytes())?),
        (None, None) => None,
    };
    match (secret, args.insecure_rendezvous, world) {
        (Some(_), true, _) => Err(misuse!("--insecure-rendezvous goes without a secret, but MCC_SECRET is one: leave out either").into()),
        (Some(trust), false, _) => Ok(trust),
        (None, true, Some(World { rank: 0, meeting, .. })) => {
            note!(
                "warning: --insecure-rendezvous: whoever reaches {}:{} or the ports of the ranks can join this run, read and change its data, and end it",
                meeting.host,
                meeting.port
            );
            Ok(Trust::Insecure)
        }
        (None, true, _) => Ok(Trust::Insecure),
        (None, false, _) => Ok(Trust::Loopback),
    }
}

/// What is said of flags that are about worlds, where no launcher has started one.
///
/// # Errors
/// A place to meet, where there is nobody to be met.
fn alone(args: &RunArgs, typed: &[String]) -> Result<(), Failure> {
    const LONELY: &str = "torchrun, mpirun or srun did not start this process, and `mcc run` by itself starts every rank on this machine";
    if args.rendezvous.is_some() {
        return Err(misuse!(
            "`--rendezvous` says where ranks of several machines meet, but {LONELY}: leave it out, or start each rank with one of them"
        )
        .into());
    }
    for flag in ["--rendezvous-timeout", "--secret-file", "--insecure-rendezvous"].into_iter().filter(|f| typed.iter().any(|t| t == f)) {
        let d = Diagnostic::warning("W0701", format!("`{flag}` does nothing: {LONELY}"));
        show(&[d.help("leave it out")], &Sources::default());
    }
    Ok(())
}

/// W0705: the run is over before the rate has reached its peak.
fn short_of_warm_up(schedule: &LearningRateSchedule, steps: u64) -> Option<Diagnostic> {
    let short = steps < schedule.warmup;
    short.then(|| {
        let text = format!("the learning rate warms up for {} steps, and this run ends after {steps}", schedule.warmup);
        let share = 100.0 * steps as f64 / schedule.warmup as f64;
        let d = Diagnostic::warning("W0705", text).note(format!("it comes to {share:.1} % of its peak, so that the loss may not fall"));
        d.help(format!("`mcc compile --lr-warmup-iters {}`, or more --steps", (steps / 10).max(1)))
    })
}

/// `mcc-rank` beside this executable, or what `MCC_RANK` names.
pub fn rank_binary() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("MCC_RANK").filter(|p| !p.is_empty()) {
        return Ok(path.into());
    }
    let own = std::env::current_exe().context("cannot find mcc's own executable")?;
    let path = own.with_file_name("mcc-rank");
    if !path.is_file() {
        return Err(anyhow!("`{}` is missing: `cargo build --workspace` builds it, and MCC_RANK can name it", path.display()).into());
    }
    Ok(path)
}
