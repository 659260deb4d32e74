//! `mcc calibrate`: a machine file of what this machine does.
//!
//! Kernels are timed on one rank of each program, by itself ([`runtime::standalone`]); exchanges in small models on
//! two ranks, and waits by whole steps of these, on two ranks and on four that share two cores. The formulas of `mcc
//! simulate` are fitted to all of these ([`simulate::fit`]), and kernels' own times go into the file beside them. Of
//! artifacts that are named, kernels' times are all that is taken.

use crate::cli::CalibrateArgs;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::itself;
use crate::machines;
use crate::misuse::misuse;
use crate::print::{note, progress, report};
use crate::run::rank_binary;
use crate::simulate::fits_artifact;
use anyhow::{Context, anyhow};
use ir::kernel::Kernel;
use ir::op::Collective;
use ir::program::Job;
use procfs::{CpuInfo, Current, Meminfo};
use runtime::artifact::{self, AcceptedArtifacts, Artifact};
use runtime::cpu::{Threads, allowed_cores, stay_on};
use runtime::data::{Encoding, Spec};
use runtime::executor::{CommandOrder, arena_bytes};
use runtime::launch::{self, RunOptions};
use runtime::profile::exchanges::exchanges;
use runtime::profile::named::NamedCommands;
use runtime::profile::{self, Profile};
use runtime::standalone::{StandaloneOptions, measure};
use runtime::target::{DeviceKind, Target};
use simulate::fit::{self, ExchangeTime, Fit, KernelTime, StepTime, round};
use simulate::machine::{Figure, Machine, Measured, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What is timed if no artifact is named: a layer or two of each kind of model, on one rank.
const KERNELS: [(&str, &str); 3] = [
    ("gpt2", "-D vocab=8192 -D hidden=768 -D heads=12 -D layers=1 -D seq=512 --global-batch-size 2 --micro-batch-size 2"),
    ("llama", "-D vocab=8192 -D hidden=1024 -D heads=16 -D kv_heads=4 -D ffn=2816 -D layers=1 -D seq=1024 --global-batch-size 1"),
    ("mixtral", "-D vocab=2048 -D hidden=256 -D heads=8 -D kv_heads=4 -D experts=4 -D expert_ffn=512 -D layers=1 -D seq=256 --global-batch-size 4"),
];

/// What exchanges are timed in: sums, gathers and scatters, rings, messages, and what goes to all.
const EXCHANGES: [(&str, &str); 6] = [
    ("gpt2", "--dp 2"),
    ("gpt2", "--dp 2 --zero 1"),
    ("gpt2", "--tp 2 --sp"),
    ("gpt2", "--cp 2"),
    ("gpt2", "--pp 2"),
    ("mixtral", "--dp 2 --ep 2 -D kv_heads=4 -D experts=4 -D expert_ffn=64"),
];

/// What ranks are timed in that share two cores: who waits has to wait for a core, too.
const CROWDED: [(&str, &str); 4] = [("gpt2", "--dp 4"), ("gpt2", "--tp 4 --sp"), ("gpt2", "--tp 2 --sp --pp 2"), ("gpt2", "--pp 2 --dp 2")];

/// Small ones and large ones.
const SIZES: [&str; 2] = [
    "-D vocab=256 -D hidden=64 -D heads=4 -D layers=2 -D seq=64 --global-batch-size 8",
    "-D vocab=512 -D hidden=512 -D heads=8 -D layers=2 -D seq=512 --global-batch-size 4",
];

/// Copies of a rank on each core at most: with more they only take longer.
const MOST_COPIES: u64 = 4;

/// Steps of these that are timed.
const EXCHANGE_STEPS: u64 = 8;

/// Seconds of a kernel on a GPU from which on it has a time of its own: the device is waited for after each, which
/// takes some microseconds.
const LEAST_ON_GPU: f64 = 50e-6;

/// Calls of a kernel.
#[derive(Default)]
struct KernelCalls {
    /// Calls in one step of one rank.
    calls: f64,
    seconds: Vec<f64>,
}

pub fn run(args: &CalibrateArgs) -> Result<(), Failure> {
    let mut machine = machines::read(&args.machine)?;
    if args.output.exists() && !args.force {
        return Err(misuse!("`{}` exists: `--force` replaces it", args.output.display()).into());
    }
    let is_standard = args.artifacts.is_empty();
    if !machine.is_cpu() && is_standard {
        return Err(misuse!("`{}` has GPUs, of which kernels of artifacts alone are timed: name some", machine.name).into());
    }
    if !machine.is_cpu() && args.threads_per_rank > 1 {
        return Err(misuse!("`--threads-per-rank` is of CPUs, and `{}` has GPUs", machine.name).into());
    }
    let cores = allowed_cores().len() as u64;
    if machine.is_cpu() && args.threads_per_rank > cores {
        return Err(misuse!("`--threads-per-rank {}`: this machine has {cores} cores", args.threads_per_rank).into());
    }
    let rank_binary = rank_binary()?;
    let work = tempfile::tempdir().context("a directory for small models")?;
    let artifacts = if is_standard { standard(work.path())? } else { args.artifacts.clone() };
    let artifacts: Vec<Artifact> = artifacts.iter().map(|dir| read(&machine, dir)).collect::<Result<_, Failure>>()?;
    let source = (0..).map(|k| format!("calibrated{}", if k == 0 { String::new() } else { format!("-{k}") }));
    let source = source.into_iter().find(|name| !machine.sources.contains_key(name)).expect("invariant: there are more numbers than sources");
    machine.sources.insert(source.clone(), about(args));
    if is_standard {
        here(&mut machine, &source);
    }
    let mut fits = kernels(&mut machine, &artifacts, args, work.path(), &source)?;
    if is_standard && cores < 2 {
        note!("this machine has one core: exchanges and waits are as they were in `{}`", args.machine);
    } else if is_standard {
        let (exchanged, steps) = exchange(work.path(), &rank_binary)?;
        fits.extend(fit::links(&mut machine, &exchanged, &source));
        fits.extend(fit::steps(&mut machine, &steps, &source));
    }
    unlist_idle(&mut machine);
    let text = serde_json::to_string_pretty(&machine)? + "\n";
    Machine::parse(&text).map_err(|e| anyhow!("what was measured is no machine: {e}"))?;
    runtime::paths::write_whole(&args.output, |out| out.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write `{}`", args.output.display()))?;
    table(&fits);
    progress!("wrote {}", args.output.display());
    Ok(())
}

/// Times kernels; those of small models are what the formulas are fitted to.
fn kernels(machine: &mut Machine, artifacts: &[Artifact], args: &CalibrateArgs, work: &Path, source: &str) -> Result<Vec<Fit>, Failure> {
    let threads = args.threads_per_rank;
    let mut times = KernelTimes::new();
    for artifact in artifacts {
        progress!("timing kernels of `{}`", artifact.dir.display());
        let how = StandaloneOptions { steps: args.profile_steps, ..how(artifact.manifest.target.devices()[0], threads, work) };
        of_artifact(artifact, &how, &mut times)?;
    }
    let known = machine.measured.take();
    if let Some(lost) = known.as_ref().filter(|m| m.threads != threads) {
        note!(
            "warning: {} kernels that `{}` has times of are left out: they are with `--threads-per-rank {}`",
            lost.kernels.len(),
            args.machine,
            lost.threads
        );
    }
    let mut kernels = known.filter(|m| m.threads == threads).map_or(BTreeMap::new(), |m| m.kernels);
    let mut samples = vec![];
    for (symbol, (kernel, calls)) in &mut times {
        calls.seconds.sort_by(f64::total_cmp);
        let quarter = |k: usize| calls.seconds[(calls.seconds.len() - 1) * k / 4];
        if !machine.is_cpu() && quarter(2) < LEAST_ON_GPU {
            continue;
        }
        let spread = ((quarter(3) - quarter(1)) / 2.0 / quarter(2).max(1e-12)).clamp(0.0, 0.9);
        kernels.insert(symbol.clone(), Figure { value: round(quarter(2).max(1e-9)), source: source.into(), spread: round(spread) });
        samples.push(KernelTime { kernel, threads, calls: calls.calls, seconds: quarter(2) });
    }
    let fits = if args.artifacts.is_empty() { fit::kernels(machine, &samples, source) } else { fit::off_kernels(machine, &samples) };
    progress!("{} kernels were timed, {} have times in the file", times.len(), kernels.len());
    machine.measured = Some(Measured { threads, kernels });
    Ok(fits)
}

/// Compiles what is timed if nothing is named.
fn standard(work: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let compiled = |(k, (model, flags)): (usize, &(&str, &str))| compiled(work, model, flags, &format!("{k}.mcc"));
    KERNELS.iter().enumerate().map(compiled).collect()
}

fn compiled(work: &Path, model: &str, flags: &str, out: &str) -> anyhow::Result<PathBuf> {
    progress!("compiling {model} {flags}");
    itself::model(work, model).context("a model")?;
    itself::mcc(&format!("compile {model}.mdl {flags} --target cpu -o {out}"), work)?;
    Ok(work.join(out))
}

fn read(machine: &Machine, dir: &Path) -> Result<Artifact, Failure> {
    files::look(dir, ExpectedInput::Artifact)?;
    let artifact = artifact::read(dir, &AcceptedArtifacts::Anyones)?;
    fits_artifact(machine, &artifact.manifest.target)?;
    if artifact.manifest.target == Target::Reference {
        return Err(misuse!("`{}` is interpreted: its kernels take no time of a machine", dir.display()).into());
    }
    Ok(artifact)
}

fn about(args: &CalibrateArgs) -> Source {
    let names: Vec<String> = args.artifacts.iter().map(|a| a.display().to_string()).collect();
    let of = if names.is_empty() { "Cores, kernels, exchanges and waits of small models".into() } else { format!("Kernels of {}", names.join(", ")) };
    let note = format!("{of}; threads of a rank: {}, steps: {}", args.threads_per_rank, args.profile_steps);
    Source { title: "mcc calibrate".into(), url: None, date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(), note: Some(note) }
}

/// What this machine is called, and what its cores do at most, all of them at once.
fn here(machine: &mut Machine, source: &str) {
    let cores = allowed_cores().len() as u64;
    let model = CpuInfo::current().ok().and_then(|all| all.model_name(0).map(str::to_owned)).unwrap_or_else(|| "CPU".into());
    (machine.name, machine.note, machine.devices) = (format!("{model}, {cores} cores"), None, cores);
    let ranks: Vec<Threads> = (0..cores).map(|rank| Threads::of_rank(rank, cores, 1)).collect();
    let ceilings = profile::measure(&ranks);
    progress!("{}: {:.1} GFLOP/s in f32 and {:.1} GB/s each", machine.name, ceilings.flops / 1e9, ceilings.bytes / 1e9);
    let figure = |value: f64| Figure { value: round(value), source: source.into(), spread: 0.05 };
    let peaks = &mut machine.device.flops;
    [&mut peaks.half, &mut peaks.tf32, &mut peaks.f32].into_iter().for_each(|peak| *peak = figure(ceilings.flops));
    machine.device.memory.bytes_per_second = figure(ceilings.bytes);
}

/// Sources that numbers no longer come from are left out.
fn unlist_idle(machine: &mut Machine) {
    let tiles = machine.device.products.tiles.iter().map(|t| t.source.clone());
    let kernels = machine.measured.iter().flat_map(|m| m.kernels.values()).map(|f| f.source.clone());
    let used: BTreeSet<String> = machine.numbers().into_iter().map(|g| g.figure.source.clone()).chain(tiles).chain(kernels).collect();
    machine.sources.retain(|name, _| used.contains(name));
}

fn how(device: DeviceKind, threads: u64, dir: &Path) -> StandaloneOptions<'_> {
    StandaloneOptions { device, threads: threads as usize, copies: 1, steps: 1, seed: 1, dir }
}

/// Kernels by their symbols, with their calls.
type KernelTimes = BTreeMap<String, (Kernel, KernelCalls)>;

/// Times the kernels of an artifact, on one rank of each program; on CPUs on several copies of it at once
/// ([`copies`]).
fn of_artifact(artifact: &Artifact, how: &StandaloneOptions, times: &mut KernelTimes) -> Result<(), Failure> {
    let job = &artifact.job;
    let names = NamedCommands::new(job);
    let mut seen = BTreeSet::new();
    for (stage, of_stage) in job.stages.iter().enumerate() {
        if !seen.insert(of_stage.program) {
            continue;
        }
        let rank = job.mesh.first_of_stage(stage as u64);
        let copies = if how.device == DeviceKind::Cpu { copies(job, rank, how.threads as u64) } else { 1 };
        for recorded in measure(artifact, rank, &StandaloneOptions { copies, ..*how })? {
            for ran in recorded.ran {
                let Some(kernel) = names.at(rank, ran.at).and_then(|(_, _, named)| named.kernel) else { continue };
                let kernel = &job.kernels[kernel.index()];
                let (_, calls) = times.entry(kernel.name()).or_insert_with(|| (kernel.clone(), KernelCalls::default()));
                calls.calls += 1.0 / (how.steps * copies as u64) as f64;
                calls.seconds.push(ran.time as f64 / 1e9);
            }
        }
    }
    Ok(())
}

/// So many of a rank at once as there are ranks of CPUs, which share caches and memory, if there is room for all; of
/// ranks with several threads, as many as there are cores for.
fn copies(job: &Job, rank: u64, threads: u64) -> usize {
    let bytes: u64 = arena_bytes(job, rank).iter().sum();
    let free = Meminfo::current().ok().and_then(|m| m.mem_available).unwrap_or(u64::MAX);
    let room = free / 10 * 9 / bytes.max(1);
    let cores = allowed_cores().len() as u64;
    let most = if threads == 1 { MOST_COPIES * cores } else { cores / threads };
    most.min(job.mesh.world()).min(room).max(1) as usize
}

/// Times exchanges in small models, in list order, so that nothing is computed beside them; and steps of these, with
/// all streams at once.
fn exchange(work: &Path, rank_binary: &Path) -> Result<(Vec<ExchangeTime>, Vec<StepTime>), Failure> {
    let text = work.join("text.txt");
    itself::text(&text, 1).context("a text to train on")?;
    let (mut all, mut steps) = (vec![], vec![]);
    let kinds = EXCHANGES.iter().map(|e| (e, false)).chain(CROWDED.iter().map(|e| (e, true)));
    for (((model, mesh), is_crowded), size) in kinds.flat_map(|kind| SIZES.iter().map(move |size| (kind, size))) {
        let line = format!("{model} {mesh} {size}");
        let out = compiled(work, model, &format!("{mesh} {size}"), "exchanges.mcc")?;
        let artifact = artifact::read(&out, &AcceptedArtifacts::Anyones)?;
        let timed = |order: CommandOrder| -> Result<Profile, Failure> {
            let options = RunOptions {
                data: vec![Spec::parse(&text.display().to_string(), Encoding::Text)],
                profile: Some(EXCHANGE_STEPS),
                threads_per_rank: Some(1),
                order,
                ..RunOptions::new(rank_binary.to_path_buf())
            };
            let summary = launch::run(&artifact, &options, &mut |_| {}).with_context(|| line.clone())?;
            Ok(summary.profile.context("the run was not timed")?)
        };
        if !is_crowded {
            all.extend(of_profile(&artifact.job, &timed(CommandOrder::List)?));
        }
        let timed = || {
            let (profile, mut times) = (timed(CommandOrder::Streams)?, KernelTimes::new());
            of_artifact(&artifact, &StandaloneOptions { steps: 3, ..how(DeviceKind::Cpu, 1, work) }, &mut times)?;
            Ok::<_, Failure>((allowed_cores().len() as u64, profile, times))
        };
        let (cores, profile, times) = if is_crowded { on_two_cores(timed)? } else { timed()? };
        let kernels = times.into_iter().map(|(name, (_, mut calls))| (name, median(&mut calls.seconds))).collect();
        let ended = profile.ranks.iter().flat_map(|r| &r.steps);
        let mut seconds: Vec<f64> = ended.map(|s| (s.end - s.start) as f64 / 1e9).collect();
        steps.push(StepTime { job: artifact.job, cores, kernels, seconds: median(&mut seconds) });
    }
    Ok((all, steps))
}

/// Exchanges are alike if they share kind, bytes, ranks, and the end of a message.
type ExchangeKey = (Option<Collective>, u64, Vec<u64>, usize);

/// The median time of exchanges that are alike. Both ends of a message count by themselves.
fn of_profile(job: &Job, profile: &Profile) -> Vec<ExchangeTime> {
    let mut seconds_by_key: BTreeMap<ExchangeKey, Vec<f64>> = BTreeMap::new();
    for e in exchanges(job, profile) {
        for (end, seconds) in e.seconds.iter().enumerate() {
            seconds_by_key.entry((e.kind, e.bytes, e.ranks.clone(), end)).or_default().push(*seconds);
        }
    }
    let exchange =
        |((kind, bytes, ranks, _), mut seconds): (ExchangeKey, Vec<f64>)| ExchangeTime { kind, ranks, bytes, seconds: median(&mut seconds) };
    seconds_by_key.into_iter().map(exchange).collect()
}

/// Has what is started run on two cores of this machine, if it has so many.
fn on_two_cores<T>(run: impl FnOnce() -> T) -> T {
    let all = allowed_cores();
    stay_on(&all[..all.len().min(2)]);
    let outcome = run();
    stay_on(&all);
    outcome
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// How well the formulas fit.
fn table(fits: &[Fit]) {
    let part = |x: f64| format!("{:>6.1} %", 100.0 * x);
    report!("measured  off before    after  at most  what\n");
    for Fit { what, samples, before, after, most, numbers } in fits {
        report!("{samples:>8}    {} {} {}  {what}\n", part(*before), part(*after), part(*most));
        for (name, value) in numbers {
            report!("{:>40}  {name} = {value}\n", "");
        }
    }
}
