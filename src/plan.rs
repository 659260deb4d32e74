//! `mcc plan`.

mod show;

use crate::cli::{self, PlanArgs, PlannerArgs};
use crate::compile::{self, cache_dir, footprint, request};
use crate::failure::Failure;
use crate::limits::Watch;
use crate::misuse::misuse;
use crate::options::override_train;
use crate::plan_file::{OWN, PlanFile, hash};
use crate::print::note;
use crate::shown::escapes;
use crate::simulate::fits;
use crate::text::{Shown, Text};
use anyhow::Context;
use codegen::Verify;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ir::options::Options;
use ir::program::{Job, Space as Memory};
use mcc::Request;
use passes::report::footprint::{Footprints, size};
use planner::sample::Sample;
use planner::search::{At, Effort, Found, Kept, Models, Search};
use planner::space::{Choice, Facts, Space};
use simulate::machine::Machine;
use std::collections::BTreeSet;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

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

/// `typed` are the flags that were given, with their words.
///
/// # Errors
/// Flags that say nothing about what is asked for; a text that is wrong; no plan that fits, or that compiles.
pub fn run(args: &PlannerArgs, typed: &[(String, String)], machine: &Machine) -> Result<(), Failure> {
    let (plan, start) = (&args.plan, Instant::now());
    let threads = args.threads_per_rank;
    if threads > 1 && !machine.is_cpu() {
        return Err(misuse!("`--threads-per-rank` is of CPUs, and `{}` has GPUs", machine.name).into());
    }
    if threads > machine.devices && machine.is_cpu() {
        return Err(misuse!("`--threads-per-rank {threads}`: `{}` has {} cores", machine.name, machine.devices).into());
    }
    if plan.host_memory.is_some() && !machine.is_cpu() {
        return Err(misuse!("`--host-memory` is not looked at by a search: `mcc compile --host-memory` checks a plan").into());
    }
    // More are absurd.
    let ranks = passes::start::ranks(&Options { dp: args.gpus, ..Options::default() });
    if ranks.is_err() || [plan.tp, plan.cp, plan.pp, plan.ep].iter().any(|n| *n > args.gpus) {
        return Err(misuse!("no plan has {} ranks so: `--gpus`, `--tp`, `--cp`, `--pp` or `--ep` is too large", args.gpus).into());
    }
    if plan.global_batch_size.is_none() {
        return Err(misuse!("`--global-batch-size G` is missing: the sequences of a step, which all plans share").into());
    }
    fits(machine, &plan.target, &format!("`--target {}`", plan.target))?;
    let watch = Watch::start(&plan.limits, Shown::Text);
    let text = Text::read(&args.model, Shown::Text)?;
    // What was measured of kernels would make plans of which nothing was measured look slow, or fast.
    let machine = &Machine { measured: None, ..machine.clone() };
    let mut base = request(&text, plan, None, Verify::Off)?;
    let fixed: BTreeSet<Choice> = HELD.iter().filter(|(flag, _)| typed.iter().any(|t| t.0 == *flag)).map(|h| h.1).collect();
    // Without a rank of a mesh to begin with, the text is looked at on one.
    let one = Request { options: Options { dp: 1, cp: 1, tp: 1, pp: 1, ep: 1, etp: None, vpp: None, ..base.options.clone() }, ..base.clone() };
    let first = compile::elaborated(&text, &one, plan, watch.progress())?;
    base.options.global_batch = first.options.global_batch;
    let layers = first.training.plan.get("pp").and_then(|e| e.tiers.first()?.first()).cloned();
    let layers = layers.filter(|name| first.training.settings.iter().any(|(setting, value)| setting == name && value.parse::<u32>().is_ok()));
    let models = |options: &Options, few: Option<u32>| -> Option<Models> { models(&text, &base, plan, options, layers.as_deref().zip(few)) };
    let scratch = 0;
    let memory = if machine.is_cpu() { Memory::Host } else { Memory::Device };
    let bytes = |job: &Job| Footprints::new(job, &|job, stage| footprint(job, stage, &base.targets, scratch)).most_of(memory).1.of_space(memory);
    let bar = bar();
    let progress = |at: At, done: usize, most: usize| {
        let Some(bar) = &bar else { return };
        bar.set_message(match at {
            At::Samples => "samples of layers",
            At::Plans => "whole plans",
            At::Changes => "changes to the best",
            At::Settled => "the best as they run",
        });
        bar.set_length(most as u64);
        bar.set_position(done as u64);
    };
    let kept = Cache { directory: cache_dir().filter(|_| !args.no_cache), key: key(&text, &base, machine, threads, typed) };
    let search = Search {
        space: Space { ranks: args.gpus, devices: machine.devices, base: base.options.clone(), fixed, model: Facts::of(&first.training) },
        machine,
        threads,
        precision: base.elaboration.precision,
        budget: budget(args, machine),
        models: &models,
        bytes: &bytes,
        kept: &kept,
        progress: &progress,
        effort: Effort { plans: args.whole as usize, top: args.top as usize, ..Effort::default() },
    };
    watch.progress().enter("search");
    let found = search.run();
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    drop(watch);
    if found.plans.is_empty() {
        return Err(none(&search, &found, &text, &base, plan));
    }
    let asked = Asked { base: &base.options, typed, model: &args.model, target: &plan.target };
    if args.json {
        show::json(&search, &found, &asked, args.top as usize)?;
    } else {
        show::text(&search, &found, &asked, args.top as usize, start.elapsed())?;
    }
    if let Some(path) = &args.output {
        let best = &found.plans[0];
        let file = PlanFile {
            mcc: env!("CARGO_PKG_VERSION").into(),
            model: text.name.clone(),
            text: hash(&text.text),
            machine: machine.name.clone(),
            ranks: args.gpus,
            seconds: best.step.seconds,
            give_or_take: best.step.give_or_take,
            flags: asked.words(&best.options),
        };
        let written = serde_json::to_string_pretty(&file).map(|json| json + "\n");
        fs::write(path, written?).with_context(|| format!("`-o {}` cannot be written", path.display()))?;
        note!("wrote {}", path.display());
    }
    Ok(())
}

/// What the command line asks for beside what is searched.
struct Asked<'a> {
    base: &'a Options,
    typed: &'a [(String, String)],
    model: &'a Path,
    /// What code is for: the machine's, unless it was typed.
    target: &'a str,
}

impl Asked<'_> {
    /// The flags of a plan that were chosen.
    fn chosen(&self, options: &Options) -> Vec<String> {
        cli::changes(self.base, options).iter().flat_map(|flags| joined(flags)).collect()
    }

    /// All words of a plan, those that were typed first.
    fn words(&self, options: &Options) -> Vec<String> {
        let chosen = self.chosen(options);
        let is_chosen = |flag: &str| chosen.iter().any(|c| c.split('=').next() == Some(flag));
        let has_target = self.typed.iter().any(|t| t.0 == "--target");
        let target = (!has_target).then(|| format!("--target={}", self.target));
        let typed = self.typed.iter().filter(|(flag, _)| !OWN.contains(&flag.as_str()) && !is_chosen(flag));
        typed.map(|(_, word)| word.clone()).chain(target).chain(chosen.iter().cloned()).collect()
    }
}

/// `--a 1 --b` as words, each flag with its value.
fn joined(flags: &str) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    for word in flags.split_whitespace() {
        match out.last_mut() {
            Some(flag) if !word.starts_with('-') => *flag = format!("{flag}={word}"),
            _ => out.push(word.into()),
        }
    }
    out
}

/// The models of a plan, with fewer layers if these are named.
fn models(text: &Text, base: &Request, plan: &PlanArgs, options: &Options, layers: Option<(&str, u32)>) -> Option<Models> {
    let mut request = Request { options: options.clone(), ..base.clone() };
    if let Some((name, n)) = layers {
        request.elaboration.defines.push((name.into(), n.to_string()));
    }
    let mut found = request.elaborate(&mut text.imports(), &Default::default()).ok()?;
    override_train(&mut found.training.train, plan);
    Some((found.training, found.evaluation, found.options))
}

/// Bytes that a rank may take of its device; on CPUs all share the machine's.
fn budget(args: &PlannerArgs, machine: &Machine) -> u64 {
    let all = machine.device.memory.bytes.value as u64;
    match machine.is_cpu() {
        true => args.plan.host_memory.or(args.plan.memory).unwrap_or(all / args.gpus.max(1)),
        false => args.plan.memory.unwrap_or(all),
    }
}

/// Why there is no plan.
fn none(search: &Search<'_>, found: &Found, text: &Text, base: &Request, plan: &PlanArgs) -> Failure {
    let (ranks, batch) = (search.space.ranks, search.space.base.global_batch);
    if let Some(p) = &found.smallest {
        let flags = cli::changes(&base.options, &p.options).join(" ");
        let (needs, has) = (size(p.bytes), size(search.budget));
        return misuse!("no plan of {ranks} ranks fits {has}: `{flags}` needs least of {} that were compiled, {needs}", found.compiled).into();
    }
    let Some(first) = search.space.plans().into_iter().next() else {
        return misuse!("no plan splits {ranks} ranks and {batch} sequences so: hold less of it, or take other numbers").into();
    };
    // What the first is refused for, as `mcc compile` says it.
    let flags = cli::changes(&base.options, &first).join(" ");
    note!("no plan was found of {}: all that were tried are refused, as `{flags}`", found.considered);
    match compile::refused(text, &Request { options: first, ..base.clone() }, plan) {
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
fn key(text: &Text, base: &Request, machine: &Machine, threads: u64, typed: &[(String, String)]) -> String {
    let mut hasher = blake3::Hasher::new();
    let own = std::env::current_exe().and_then(fs::metadata).ok();
    let built = own.map(|m| (m.len(), m.modified().ok()));
    let flags: Vec<&String> = typed.iter().filter(|(flag, _)| !OWN.contains(&flag.as_str())).map(|t| &t.1).collect();
    hasher.update(format!("{built:?} {flags:?} {threads} {:?}", base.targets.device.cpu).as_bytes());
    hasher.update(text.text.as_bytes());
    hasher.update(serde_json::to_string(machine).unwrap_or_default().as_bytes());
    // A text that it imports may have changed.
    let mut read = text.imports();
    let mut imports = |name: &str| {
        let found = read(name);
        hasher.update(format!("{found:?}").as_bytes());
        found
    };
    let _ = base.elaborate(&mut imports, &Default::default());
    hasher.finalize().to_hex().to_string()
}

/// Samples as files, of which a damaged one counts for nothing.
struct Cache {
    directory: Option<PathBuf>,
    key: String,
}

impl Cache {
    fn path(&self, sample: &Options, layers: Option<u32>) -> Option<PathBuf> {
        let name = hash(&format!("{} {sample:?} {layers:?}", self.key));
        Some(self.directory.as_ref()?.join("samples").join(format!("{name}.json")))
    }
}

impl Kept for Cache {
    fn get(&self, sample: &Options, layers: Option<u32>) -> Option<Sample> {
        serde_json::from_slice(&fs::read(self.path(sample, layers)?).ok()?).ok()
    }

    fn put(&self, sample: &Options, layers: Option<u32>, found: &Sample) {
        let Some(path) = self.path(sample, layers) else { return };
        let Some(directory) = path.parent() else { return };
        // Whoever reads it meanwhile reads all of it. A cache that cannot be written is none.
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
