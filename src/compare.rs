//! `mcc run --compare`: steps that were timed beside what `mcc simulate` says of them.

use crate::cli::RunArgs;
use crate::failure::Failure;
use crate::machines;
use crate::misuse::misuse;
use crate::simulate::{fits_artifact, time};
use ir::program::{Action, Job, ProgramPhase};
use runtime::artifact::Artifact;
use runtime::cpu::allowed_cores;
use runtime::profile::breakdown::Breakdown;
use runtime::profile::exchanges::exchanges;
use runtime::profile::named::NamedCommands;
use runtime::profile::{Profile, is_own};
use runtime::target::Target;
use runtime::world::World;
use simulate::Options;
use simulate::machine::Machine;
use simulate::step::{Step, exchange_name, predict, work_name};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Something that was predicted and measured: seconds of a step, mean of the ranks.
#[derive(Clone, Copy, Debug, Default)]
struct ComparedTime {
    predicted: f64,
    measured: f64,
}

impl ComparedTime {
    fn difference(&self) -> f64 {
        self.measured - self.predicted
    }
}

/// What a run's steps are to be compared with.
pub struct Compared {
    machine: Machine,
    options: Options,
    step: Step,
}

impl Compared {
    /// Reads the machine and predicts a step on it, before anything runs.
    ///
    /// # Errors
    /// No machine file; one of other devices than the artifact is for; runs that predictions are not of; a machine on
    /// which steps have no time.
    pub fn new(name: &str, artifact: &Artifact, args: &RunArgs, world: Option<&World>) -> Result<Compared, Failure> {
        let machine = machines::read(name)?;
        fits_artifact(&machine, &artifact.manifest.target)?;
        let refused = match &artifact.manifest.target {
            Target::Reference => Some("the artifact is interpreted"),
            Target::Gpu { .. } => Some("where GPUs are timed each command is waited for, and steps are others"),
            Target::Cpu(_) if world.is_some() => Some("ranks that another launcher has started may be on several machines"),
            Target::Cpu(_) if args.in_order => Some("`--in-order` does one thing after the other, and predictions are of all streams at once"),
            Target::Cpu(_) => None,
        };
        if let Some(why) = refused {
            return Err(misuse!("`--compare` cannot be: {why}").into());
        }
        let ranks = artifact.job.mesh.world() as usize;
        let threads = args.threads_per_rank.unwrap_or(allowed_cores().len() / ranks).max(1) as u64;
        if threads > machine.devices {
            return Err(misuse!("`--compare`: a rank has {threads} threads, and `{}` has {} cores", machine.name, machine.devices).into());
        }
        let options = Options { threads, slow: None };
        let step = predict(&artifact.job, &machine, options).map_err(anyhow::Error::from)?;
        Ok(Compared { machine, options, step })
    }

    /// For people.
    pub fn text(&self, job: &Job, profile: &Profile) -> String {
        let step = &self.step;
        let breakdown = Breakdown::new(job, profile);
        let (mut rows, mut exchange_rows) = measured(job, profile);
        // Kernels take longer when they share cores or run beside exchanges, each by the same factor.
        let alone: f64 = step.kernels.iter().map(|row| row.exposed).sum();
        let longer = if alone > 0.0 { step.spent.kernels / alone } else { 1.0 };
        step.kernels.iter().for_each(|row| rows.entry(row.name.clone()).or_default().predicted += row.exposed * longer);
        step.exchanges.iter().for_each(|row| exchange_rows.entry(row.name.clone()).or_default().predicted += row.seconds);
        let waits = step.spent.exchanges + step.spent.copies + step.spent.disk + step.spent.host + step.spent.wakes + step.spent.bubble;
        let all = ComparedTime { predicted: step.seconds, measured: breakdown.whole.ms / 1e3 };
        rows.entry(WAITS.into()).or_default().predicted += waits;
        rows.entry(WAITS.into()).or_default().measured += breakdown.waiting.ms / 1e3;
        rows.insert(BETWEEN.into(), ComparedTime { predicted: step.spent.gaps, measured: breakdown.between.ms / 1e3 });
        let mut out = format!(
            "a step on {}: {} measured, {} predicted ({:+.1} %)\n",
            self.machine.name,
            time(all.measured),
            time(all.predicted),
            100.0 * (all.predicted / all.measured.max(1e-9) - 1.0)
        );
        let largest_first = table(&mut out, "what a rank does", rows);
        if !exchange_rows.is_empty() {
            table(&mut out, "exchanges, once all have come", exchange_rows);
        }
        // Only a row that differs in the same direction as the whole step explains the difference.
        let most = largest_first.into_iter().find(|(_, time)| time.difference() * all.difference() > 0.0);
        if let Some((name, pair)) = most.filter(|_| all.difference().abs() > 0.01 * all.measured) {
            let _ = writeln!(out, "the largest part of the difference: {name}, {} and not {}", time(pair.measured), time(pair.predicted));
        }
        let _ = write!(out, "{} of {} kernels have times of their own in the machine file", step.measured, step.all_kernels);
        let threads = if self.options.threads > 1 { format!(" --threads-per-rank {}", self.options.threads) } else { String::new() };
        let help = format!(": `mcc calibrate ARTIFACT --machine FILE{threads}` takes them");
        let _ = writeln!(out, "{}", if step.measured < step.all_kernels { help.as_str() } else { "" });
        out
    }
}

const WAITS: &str = "waits for exchanges, copies, other streams and ranks";
/// What predictions leave out: an even router has none.
const FURTHER: &str = "further passes of rows of experts";
const BETWEEN: &str = "between phases and commands";

/// What ranks' own threads do, and their exchanges from when all had come, by what `mcc simulate` calls them.
fn measured(job: &Job, profile: &Profile) -> (BTreeMap<String, ComparedTime>, BTreeMap<String, ComparedTime>) {
    let (mut rows, mut exchange_rows): (BTreeMap<String, ComparedTime>, BTreeMap<String, ComparedTime>) = Default::default();
    let steps: usize = profile.ranks.iter().map(|r| r.steps.len()).sum();
    // Times are means over steps and ranks.
    let each = 1.0 / steps.max(1) as f64;
    let names = NamedCommands::new(job);
    for (rank, recorded) in (0..).zip(&profile.ranks) {
        for ran in recorded.ran.iter().filter(|r| r.at.phase != ProgramPhase::Eval) {
            let Some((_, command, _)) = names.at(rank, ran.at) else { continue };
            if !is_own(profile, command.stream) {
                continue;
            }
            let name = match &command.action {
                // The breakdown accounts for these.
                Action::Record { .. } | Action::Wait { .. } => continue,
                _ if command.predicate.is_some() => FURTHER,
                Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. } => WAITS,
                action => work_name(job, action),
            };
            rows.entry(name.into()).or_default().measured += ran.time as f64 / 1e9 * each;
        }
    }
    for e in exchanges(job, profile) {
        let program = &job.programs[job.stages[job.mesh.stage(e.rank) as usize].program as usize];
        // A collective counts for each member, a message for its receiver alone.
        let ranks = if e.kind.is_some() { e.ranks.len() as f64 } else { 1.0 };
        let seconds = e.seconds.last().copied().unwrap_or(0.0) * ranks * each;
        exchange_rows.entry(exchange_name(job, program, e.action)).or_default().measured += seconds;
    }
    (rows, exchange_rows)
}

/// Rows that are the furthest apart first; gives them.
fn table(out: &mut String, what: &str, rows: BTreeMap<String, ComparedTime>) -> Vec<(String, ComparedTime)> {
    let mut rows: Vec<(String, ComparedTime)> = rows.into_iter().filter(|r| r.1.measured > 0.0 || r.1.predicted > 0.0).collect();
    rows.sort_by(|a, b| b.1.difference().abs().total_cmp(&a.1.difference().abs()));
    let _ = writeln!(out, " measured  predicted  difference  {what}");
    for (name, pair) in &rows {
        let difference = format!("{}{}", if pair.difference() < 0.0 { "-" } else { "+" }, time(pair.difference().abs()));
        let _ = writeln!(out, "{:>9}  {:>9}  {difference:>10}  {name}", time(pair.measured), time(pair.predicted));
    }
    rows
}
