//! `mcc plan`.

mod curve;
mod page;
mod searching;
mod show;

use crate::cli::{self, Devices, PlannerArgs};
use crate::failure::Failure;
use crate::limits::LimitWatch;
use crate::misuse::misuse;
use crate::pages::command_line;
use crate::plan_file::{OWN, PlanFile, hash};
use crate::print::note;
use crate::simulate::page::Predicted;
use crate::text::{DiagnosticFormat, ModelFile};
use anyhow::Context;
use ir::options::Options;
use planner::search::{Effort, Search, SearchResult};
use searching::Searching;
use simulate::machine::Machine;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// `typed` are the flags that were given, with their words.
///
/// # Errors
/// Flags that say nothing about what is asked for; a text that is wrong; no plan that fits, or that compiles.
pub fn run(args: &PlannerArgs, typed: &[(String, String)], machine: &Machine) -> Result<(), Failure> {
    let is_range = matches!(args.gpus, Devices::Range(..));
    let has = |flag: &str| typed.iter().any(|t| t.0 == flag);
    if let Some(flag) = ["--top", "--output", "--html"].into_iter().find(|f| is_range && has(f)) {
        return Err(misuse!("`{flag}` is of one number of devices: with `--gpus A..B` the best plan of each is shown").into());
    }
    if !is_range && has("--scaling") {
        return Err(misuse!("`--scaling` is of a range of devices, `--gpus A..B`").into());
    }
    let start = Instant::now();
    let watch = LimitWatch::start(&args.plan.limits, DiagnosticFormat::Text);
    let text = ModelFile::read(&args.model, DiagnosticFormat::Text)?;
    let searching = Searching::new(args, typed, machine, text, &watch)?;
    watch.progress().enter("search");
    if is_range {
        let curves = curve::search(&searching, typed);
        searching.done();
        drop(watch);
        return curve::show(&searching, &curves?);
    }
    let effort = Effort { plans: args.whole as usize, top: args.top as usize, until: args.until(), ..Effort::default() };
    let batch = searching.base.options.global_batch;
    searching.search(args.gpus.most(), batch, effort, |search, found| {
        searching.done();
        drop(watch);
        if found.plans.is_empty() {
            return Err(searching.none(search, &found));
        }
        let asked = PlanRequest { base: &searching.base.options, typed, model: &args.model, target: &args.plan.target };
        if args.json {
            show::json(search, &found, &asked, args.top as usize)?;
        } else {
            show::text(search, &found, &asked, args.top as usize, start.elapsed())?;
        }
        args.output.as_deref().map_or(Ok(()), |path| write(path, &searching, &found, &asked))?;
        args.html.as_deref().map_or(Ok(()), |path| write_page(path, args, search, &found, &asked))
    })
}

/// A page of the best, with those beside it.
fn write_page(path: &Path, args: &PlannerArgs, search: &Search<'_>, found: &SearchResult, asked: &PlanRequest<'_>) -> Result<(), Failure> {
    let best = &found.plans[0];
    let job = search.job(&best.options).expect("invariant: it has been compiled");
    let options = simulate::Options { threads: args.threads_per_rank, slow: None };
    let commands = vec![("Command", command_line()), ("Compiled by", show::compile_line(asked, best))];
    let plans = Some(page::plans(search, found, asked, args.top as usize));
    Predicted { job: &job, machine: search.machine, options, step: &best.step, commands, plans }.write(path)
}

/// The best as a file.
fn write(path: &Path, searching: &Searching<'_>, found: &SearchResult, asked: &PlanRequest<'_>) -> Result<(), Failure> {
    let (best, text) = (&found.plans[0], &searching.text);
    let file = PlanFile {
        mcc: env!("CARGO_PKG_VERSION").into(),
        model: text.name.clone(),
        text: hash(&text.text),
        machine: searching.machine.name.clone(),
        ranks: best.step.ranks,
        seconds: best.step.seconds,
        give_or_take: best.step.give_or_take,
        flags: asked.words(&best.options),
    };
    let written = serde_json::to_string_pretty(&file).map(|json| json + "\n");
    fs::write(path, written?).with_context(|| format!("`-o {}` cannot be written", path.display()))?;
    note!("wrote {}", path.display());
    Ok(())
}

/// What the command line asks for beside what is searched.
struct PlanRequest<'a> {
    base: &'a Options,
    typed: &'a [(String, String)],
    model: &'a Path,
    /// What code is for: the machine's, unless it was typed.
    target: &'a str,
}

impl PlanRequest<'_> {
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
