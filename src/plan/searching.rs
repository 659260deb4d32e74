//! Searches as a command line asks for them.

use crate::cli::{self, PlanArgs, PlannerArgs};
use crate::compile::{self, cache_dir, footprint, request};
use crate::failure::Failure;
use crate::limits::LimitWatch;
use crate::misuse::misuse;
use crate::options::override_train;
use crate::plan_file::{OWN, hash};
use crate::print::note;
use crate::shown::escapes;
use crate::simulate::fits;
use crate::text::ModelFile;
use codegen::Verify;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ir::diag::Source;
use ir::options::Options;
use ir::program::{Job, Space as Memory};
use mcc::Request;
use passes::report::footprint::{Footprints, size};
use planner::sample::Sample;
use planner::search::{Effort, Models, SampleCache, Search, SearchPhase, SearchResult};
use planner::space::{Choice, ModelFacts, Space};
use simulate::machine::Machine;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What flags hold a choice.
const HELD: [(&str, Choice); 24] = [
    ("--dp", Choice::Dp),
    ("--cp", Choice::Cp),
    ("--tp", Choice::Tp),
    ("--pp", Choice::Pp),
    ("--ep", Choice::Ep),
    ("--etp", Choice::Etp),
    ("--sp", Choice::Sp),
    ("--micro-batch-size", Choice::MicroBatch),
    ("--zero", Choice::Zero),
    ("--use-distributed-optimizer", Choice::Zero),
    ("--recompute", Choice::Recompute),
    ("--pipeline-schedule", Choice::Schedule),
    ("--vpp", Choice::Vpp),
    ("--cp-comm-type", Choice::CpComm),
    ("--dp-replicate", Choice::Replicas),
    ("--tp-comm-overlap", Choice::TpOverlap),
    ("--pipeline-layout", Choice::Layout),
    ("--pipeline-layers", Choice::Layout),
    ("--account-for-embedding-in-pipeline-split", Choice::Layout),
    ("--account-for-loss-in-pipeline-split", Choice::Layout),
    ("--optimizer-offload", Choice::Offload),
    ("--param-offload", Choice::Offload),
    ("--activation-offload", Choice::Offload),
    ("--activation-offload-layers", Choice::Offload),
];

/// What searches of a command line share.
pub struct Searching<'a> {
    pub args: &'a PlannerArgs,
    pub text: ModelFile,
    /// That and what it imports, as programs have them.
    sources: Vec<Source>,
    /// Without what was measured of kernels.
    pub machine: Machine,
    /// As for one rank, with what was given.
    pub base: Request,
    fixed: BTreeSet<Choice>,
    facts: ModelFacts,
    /// The setting that says how many layers there are.
    layers: Option<String>,
    kept: Cache,
    bar: Option<ProgressBar>,
    /// Where there is no terminal for a bar.
    lines: ProgressLines,
}

/// How far a search is, in lines of a log: one each [`ProgressLines::EVERY`].
struct ProgressLines {
    begun: Instant,
    last: Mutex<Instant>,
}

impl ProgressLines {
    const EVERY: Duration = Duration::from_secs(30);

    fn new() -> ProgressLines {
        let begun = Instant::now();
        ProgressLines { begun, last: Mutex::new(begun) }
    }

    fn say(&self, what: &str, done: usize) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= ProgressLines::EVERY {
            *last = Instant::now();
            note!("{what}: {done} so far, after {} s; --search-seconds S ends sooner", self.begun.elapsed().as_secs());
        }
    }
}

impl<'a> Searching<'a> {
    /// # Errors
    /// Flags that contradict each other or the machine; a text that is wrong.
    pub fn new(
        args: &'a PlannerArgs,
        typed: &[(String, String)],
        machine: &Machine,
        text: ModelFile,
        watch: &LimitWatch,
    ) -> Result<Searching<'a>, Failure> {
        let (plan, threads) = (&args.plan, args.threads_per_rank);
        if threads > 1 && !machine.is_cpu() {
            return Err(misuse!("`--threads-per-rank` is of CPUs, and `{}` has GPUs", machine.name).into());
        }
        if threads > machine.devices && machine.is_cpu() {
            return Err(misuse!("`--threads-per-rank {threads}`: `{}` has {} cores", machine.name, machine.devices).into());
        }
        if plan.host_memory.is_some() && !machine.is_cpu() {
            return Err(misuse!("`--host-memory` is not looked at by a search: `mcc compile --host-memory` checks a plan").into());
        }
        // No axis can have more ranks than the largest number of devices.
        let most = args.gpus.most();
        let ranks = passes::start::ranks(&Options { dp: most, ..Options::default() });
        if ranks.is_err() || [plan.tp, plan.cp, plan.pp, plan.ep].iter().any(|n| *n > most) {
            return Err(misuse!("no plan has {most} ranks so: `--gpus`, `--tp`, `--cp`, `--pp` or `--ep` is too large").into());
        }
        if plan.define.iter().any(|d| d.0 == "batch") {
            return Err(misuse!("`-D batch` is not taken by a search: `--global-batch-size G` says how many sequences a step has").into());
        }
        if plan.global_batch_size.is_none() {
            return Err(misuse!("`--global-batch-size G` is missing: the sequences of a step, which all plans share").into());
        }
        fits(machine, &plan.target, &format!("`--target {}`", plan.target))?;
        // Measured times of some kernels would make plans with other kernels look slow or fast, so none are used.
        let machine = Machine { measured: None, ..machine.clone() };
        let mut base = request(&text, plan, None, Verify::Off)?;
        let fixed: BTreeSet<Choice> = HELD.iter().filter(|(flag, _)| typed.iter().any(|t| t.0 == *flag)).map(|h| h.1).collect();
        // No mesh is known yet, so the text is elaborated for one rank.
        let one = Request { options: Options { dp: 1, cp: 1, tp: 1, pp: 1, ep: 1, etp: None, vpp: None, ..base.options.clone() }, ..base.clone() };
        let first = compile::elaborated(&text, &one, plan, watch.progress())?;
        base.options.global_batch = first.options.global_batch;
        let layers = first.training.plan.get("pp").and_then(|e| e.tiers.first()?.first()).cloned();
        let layers = layers.filter(|name| first.training.settings.iter().any(|(setting, value)| setting == name && value.parse::<u32>().is_ok()));
        let kept =
            Cache { directory: cache_dir().filter(|_| !args.no_cache), key: key(&text, &base, &machine, threads, typed), own: Mutex::default() };
        let (facts, sources) = (ModelFacts::of(&first.training), frontend::without_library(&first.sources));
        Ok(Searching { args, text, sources, machine, base, fixed, facts, layers, kept, bar: bar(), lines: ProgressLines::new() })
    }

    /// Searches for so many ranks and sequences of a step.
    pub fn search<R>(&self, ranks: u64, batch: u64, effort: Effort, then: impl FnOnce(&Search<'_>, SearchResult) -> R) -> R {
        let (args, machine, base) = (self.args, &self.machine, &self.base);
        let models = |options: &Options, few: Option<u32>| models(&self.text, base, &args.plan, options, self.layers.as_deref().zip(few));
        let memory = if machine.is_cpu() { Memory::Host } else { Memory::Device };
        // No kernels are compiled, so their scratch memory counts as 0.
        let of_stage = |job: &Job, stage| footprint(job, stage, &base.targets, 0);
        let bytes = |job: &Job| Footprints::new(job, &of_stage).most_of(memory).1.of_space(memory);
        let progress = |phase: SearchPhase, done: usize, most: usize| {
            let what = match phase {
                SearchPhase::Samples => "samples of layers",
                SearchPhase::Plans => "whole plans",
                SearchPhase::Changes => "changes to the best",
                SearchPhase::Settled => "the best as they run",
            };
            let Some(bar) = &self.bar else { return self.lines.say(what, done) };
            bar.set_message(if args.gpus.all().len() > 1 { format!("{what} of {ranks} devices") } else { what.into() });
            bar.set_length(most.max(done) as u64);
            bar.set_position(done as u64);
        };
        let options = Options { global_batch: batch, ..base.options.clone() };
        let search = Search {
            space: Space { ranks, devices: machine.devices, base: options, fixed: self.fixed.clone(), model: self.facts.clone() },
            machine,
            threads: args.threads_per_rank,
            precision: base.elaboration.precision,
            budget: budget(args, machine, ranks),
            models: &models,
            sources: &self.sources,
            bytes: &bytes,
            kept: &self.kept,
            progress: &progress,
            effort,
        };
        let found = search.run();
        then(&search, found)
    }

    /// No search follows.
    pub fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Why there is no plan.
    pub fn none(&self, search: &Search<'_>, found: &SearchResult) -> Failure {
        none(search, found, &self.text, &self.base, &self.args.plan)
    }
}

/// The models of a plan, with fewer layers if these are named.
fn models(text: &ModelFile, base: &Request, plan: &PlanArgs, options: &Options, layers: Option<(&str, u32)>) -> Option<Models> {
    let mut request = Request { options: options.clone(), ..base.clone() };
    if let Some((name, n)) = layers {
        request.elaboration.defines.push((name.into(), n.to_string()));
    }
    let mut found = request.elaborate(&mut text.imports(), &Default::default()).ok()?;
    override_train(&mut found.training.train, plan);
    Some((found.training, found.evaluation, found.options))
}

/// Bytes that a rank may take of its device; on CPUs all share the machine's.
fn budget(args: &PlannerArgs, machine: &Machine, ranks: u64) -> u64 {
    let all = machine.device.memory.bytes.value as u64;
    match machine.is_cpu() {
        true => args.plan.host_memory.or(args.plan.memory).unwrap_or(all / ranks.max(1)),
        false => args.plan.memory.unwrap_or(all),
    }
}

/// Why there is no plan.
fn none(search: &Search<'_>, found: &SearchResult, text: &ModelFile, base: &Request, plan: &PlanArgs) -> Failure {
    let (ranks, batch) = (search.space.ranks, search.space.base.global_batch);
    if let Some(p) = &found.smallest {
        let flags = cli::changes(&base.options, &p.options).join(" ");
        let (needs, has) = (size(p.bytes), size(search.budget));
        return misuse!("no plan of {ranks} ranks fits {has}: `{flags}` needs least of {} that were compiled, {needs}", found.compiled).into();
    }
    let Some(first) = search.space.plans().into_iter().next() else {
        return misuse!("no plan splits {ranks} ranks and {batch} sequences so: hold less of it, or take other numbers").into();
    };
    // The reason given is the first plan's, as `mcc compile` says it.
    let flags = cli::changes(&base.options, &first).join(" ");
    note!("no plan was found of {}: all that were tried are refused, as `{flags}`", found.considered);
    let plan = PlanArgs { global_batch_size: Some(batch), ..plan.clone() };
    match compile::refused(text, &Request { options: first, ..base.clone() }, &plan) {
        Some(failure) => failure,
        None => misuse!("`{flags}` compiles by itself: give these flags, or more with `--whole`").into(),
    }
}

fn bar() -> Option<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}, {elapsed}").expect("invariant: the template is right");
    let is_seen = std::io::stderr().is_terminal() && escapes();
    is_seen.then(|| ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr()).with_style(style))
}

/// What samples depend on beside their options: this program, the text and all it imports, the flags, the machine.
fn key(text: &ModelFile, base: &Request, machine: &Machine, threads: u64, typed: &[(String, String)]) -> String {
    let mut hasher = blake3::Hasher::new();
    let own = std::env::current_exe().and_then(fs::metadata).ok();
    let built = own.map(|m| (m.len(), m.modified().ok()));
    let flags: Vec<&String> = typed.iter().filter(|(flag, _)| !OWN.contains(&flag.as_str())).map(|t| &t.1).collect();
    hasher.update(format!("{built:?} {flags:?} {threads} {:?}", base.targets.device.cpu).as_bytes());
    hasher.update(text.text.as_bytes());
    hasher.update(serde_json::to_string(machine).unwrap_or_default().as_bytes());
    // Imported texts may have changed, so they enter the key.
    let mut read = text.imports();
    let mut imports = |name: &str| {
        let found = read(name);
        hasher.update(format!("{found:?}").as_bytes());
        found
    };
    let _ = base.elaborate(&mut imports, &Default::default());
    hasher.finalize().to_hex().to_string()
}

/// Samples as files, of which a damaged one counts for nothing; and those of this run.
struct Cache {
    directory: Option<PathBuf>,
    key: String,
    own: Mutex<BTreeMap<String, Sample>>,
}

impl Cache {
    /// Of a sample with these options.
    fn name(&self, sample: &Options, layers: Option<u32>) -> String {
        hash(&format!("{} {sample:?} {layers:?}", self.key))
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join("samples").join(format!("{name}.json")))
    }

    fn own(&self) -> MutexGuard<'_, BTreeMap<String, Sample>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SampleCache for Cache {
    fn get(&self, sample: &Options, layers: Option<u32>) -> Option<Sample> {
        let name = self.name(sample, layers);
        let own = self.own().get(&name).cloned();
        own.or_else(|| serde_json::from_slice(&fs::read(self.path(&name)?).ok()?).ok())
    }

    fn put(&self, sample: &Options, layers: Option<u32>, found: &Sample) {
        let name = self.name(sample, layers);
        self.own().insert(name.clone(), found.clone());
        let Some(path) = self.path(&name) else { return };
        let Some(directory) = path.parent() else { return };
        // A concurrent reader sees the whole file or none. A cache that cannot be written is no error.
        let written = || -> std::io::Result<()> {
            fs::create_dir_all(directory)?;
            let file = tempfile::NamedTempFile::new_in(directory)?;
            serde_json::to_writer(&file, found)?;
            file.persist(&path)?;
            Ok(())
        };
        let _ = written();
    }
}
