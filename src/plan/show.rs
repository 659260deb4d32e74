//! What `mcc plan` prints.

use super::PlanRequest;
use crate::pages::numbers;
use crate::print::{PrintError, out};
use crate::simulate::time;
use passes::report::footprint::size;
use planner::search::{Planned, Search, SearchResult};
use serde::Serialize;
use simulate::goodput::{Goodput, goodput};
use simulate::step::Step;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Reasons of each difference that are named.
const REASONS: usize = 3;
/// Numbers that change which plan is the fastest, of those that are named.
pub const NUMBERS: usize = 6;

/// For people.
pub fn text(search: &Search<'_>, found: &SearchResult, asked: &PlanRequest<'_>, top: usize, took: Duration) -> Result<(), PrintError> {
    let mut out = String::new();
    let plans = &found.plans[..found.plans.len().min(top)];
    let SearchResult { considered, too_large, samples, compiled, .. } = found;
    let _ = writeln!(
        out,
        "searched   {considered} plans of {} ranks on {}: {samples} samples of layers, {compiled} plans compiled whole, {:.1} s",
        search.space.ranks,
        search.machine.name,
        took.as_secs_f64()
    );
    let _ = writeln!(out, "memory     {} a device; {too_large} plans are expected to need more", size(search.budget));
    let _ = writeln!(out, "left       {}", left(found));
    let best = &found.plans[0];
    if let Some(g) = goodput(search.machine, search.space.ranks, best.checkpoint, best.step.seconds) {
        let _ = writeln!(
            out,
            "failures   every {} in the mean, {} until training goes on: {:.0} % of the time remains with --save-interval {}",
            duration(g.between_failures),
            duration(g.restart),
            100.0 * g.part,
            g.save_interval
        );
        let waits = if g.wait > 0.0 { format!(", of which training waits {}", duration(g.wait)) } else { String::new() };
        let every = duration(g.save_interval as f64 * best.step.seconds);
        let _ = writeln!(out, "           every {every} a checkpoint of {} in {}{waits}", size(g.bytes), duration(g.write));
    }
    let _ = writeln!(out, "\n       step  give or take      memory   tokens/s     MFU  kernels  exchanges  bubble  plan");
    for (k, plan) in plans.iter().enumerate() {
        let Step { seconds, give_or_take, tokens_per_second, mfu, spent, .. } = &plan.step;
        let part = |of: f64| 100.0 * of / seconds;
        let _ = writeln!(
            out,
            "{:>2} {:>8} {:>11.0} % {:>11} {:>10.0} {:>5.1} % {:>6.1} % {:>8.1} % {:>5.1} %  {}",
            k + 1,
            time(*seconds),
            part(*give_or_take),
            size(plan.bytes),
            tokens_per_second,
            100.0 * mfu,
            part(spent.kernels),
            part(spent.exchanges),
            part(spent.bubble),
            chosen(asked, plan)
        );
    }
    if plans.len() > 1 {
        let _ = writeln!(out, "\nwhy the others take longer");
    }
    for (k, plan) in plans.iter().enumerate().skip(1) {
        let longer = 100.0 * (plan.step.seconds / plans[0].step.seconds - 1.0);
        let _ = writeln!(out, "{:>2} {longer:>+7.1} %  {}", k + 1, why(&plans[0].step, &plan.step));
    }
    if let Some((name, seconds)) = plans[0].step.limits.first() {
        let gain = 100.0 * seconds / plans[0].step.seconds;
        let _ = writeln!(out, "\nof the best, {name} limits most: a tenth better, a step takes {} ({gain:.1} %) less", time(*seconds));
    }
    let rests = rests(plans);
    match rests.is_empty() {
        true if plans.len() > 1 => {
            let _ = writeln!(out, "no number of the machine that is a tenth off, to first order, changes which of these is the fastest");
        }
        true => {}
        false => {
            let _ = writeln!(out, "another of these is the fastest, to first order, if a number of the machine is");
            rests.iter().take(NUMBERS).for_each(|(name, way, k)| {
                let _ = writeln!(out, "  a tenth {way}: {name} (plan {})", k + 1);
            });
        }
    }
    let _ = writeln!(out, "\n{}", compile_line(asked, &plans[0]));
    out!("{out}")
}

/// What compiles a plan.
pub fn compile_line(asked: &PlanRequest<'_>, plan: &Planned) -> String {
    let words: Vec<String> = asked.words(&plan.options).iter().map(|w| spelled(w)).collect();
    format!("mcc compile {} {}", quoted(&asked.model.display().to_string()), words.join(" "))
}

/// The flags of a plan that were chosen, as they are typed.
pub fn chosen(asked: &PlanRequest<'_>, plan: &Planned) -> String {
    asked.chosen(&plan.options).iter().map(|w| spelled(w)).collect::<Vec<_>>().join(" ")
}

/// Why another plan takes longer than the best.
pub fn why(best: &Step, other: &Step) -> String {
    let reasons: Vec<String> = reasons(best, other).into_iter().map(|(name, s)| format!("{name} {}", signed(s))).collect();
    if reasons.is_empty() { "nothing by more than a thousandth of the step".into() } else { reasons.join(", ") }
}

/// Of what takes long.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 48.0 * 3600.0 => format!("{:.0} days", s / 86400.0),
        s if s >= 2.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.0} min", s / 60.0),
        s => time(s),
    }
}

/// What is known of plans that were not compiled.
pub fn left(found: &SearchResult) -> String {
    let open = match (found.open, found.next) {
        (0, _) => "no plan whose sample was taken: all others are refused, take longer by a bound, or are expected not to fit".into(),
        (open, Some(next)) => format!("{open} plans that no bound rules out; the best of them is expected to take {}", time(next)),
        (open, None) => format!("{open} plans that no bound rules out"),
    };
    let unsampled = match (found.unsampled, found.stopped) {
        (0, _) => String::new(),
        (n, false) => format!("; {n} of meshes that looked worse"),
        (n, true) => format!("; {n} without a sample"),
    };
    let stopped = if found.stopped { "; stopped by --search-seconds: more time may find a faster plan" } else { "" };
    format!("{open}{unsampled}{stopped}")
}

/// What a step waits for longer, or less long, than another: that which makes most of the difference first.
fn reasons(best: &Step, other: &Step) -> Vec<(String, f64)> {
    let mut all: BTreeMap<&str, f64> = BTreeMap::new();
    other.path.iter().for_each(|(name, s)| *all.entry(name).or_default() += s);
    best.path.iter().for_each(|(name, s)| *all.entry(name).or_default() -= s);
    let mut all: Vec<(String, f64)> = all.into_iter().map(|(name, s)| (name.into(), s)).filter(|r| r.1.abs() > 1e-3 * best.seconds).collect();
    all.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    all.truncate(REASONS);
    all
}

fn signed(seconds: f64) -> String {
    format!("{}{}", if seconds < 0.0 { "-" } else { "+" }, time(seconds.abs()))
}

/// Numbers of the machine that, a tenth better or worse, make another plan the fastest, to first order: which one.
pub fn rests(plans: &[Planned]) -> Vec<(String, &'static str, usize)> {
    let gain = |plan: &Planned, name: &str| plan.step.limits.iter().find(|l| l.0 == name).map_or(0.0, |l| l.1);
    let names: std::collections::BTreeSet<&String> = plans.iter().flat_map(|p| p.step.limits.iter().map(|l| &l.0)).collect();
    let mut out = vec![];
    for name in names {
        for (way, sign) in [("better", -1.0), ("worse", 1.0)] {
            let seconds = |p: &Planned| p.step.seconds + sign * gain(p, name);
            let least = (0..plans.len()).min_by(|a, b| seconds(&plans[*a]).total_cmp(&seconds(&plans[*b])));
            if let Some(k) = least.filter(|k| *k > 0) {
                out.push((name.clone(), way, k));
            }
        }
    }
    out
}

/// A word as it is typed in a shell: a flag and its value apart, as people write them.
pub fn spelled(word: &str) -> String {
    match word.split_once('=') {
        // These flags take their value with `=` alone.
        Some(("--optimizer-offload" | "--param-offload", _)) | None => quoted(word),
        Some((flag, value)) if flag.starts_with("--") => format!("{flag} {}", quoted(value)),
        Some(_) => word.strip_prefix("-D").map_or_else(|| quoted(word), |define| format!("-D {}", quoted(define))),
    }
}

fn quoted(word: &str) -> String {
    numbers::quoted(&[word.to_owned()])
}

#[derive(Serialize)]
struct PlanReport<'a> {
    machine: &'a str,
    ranks: u64,
    considered: usize,
    /// Of meshes that looked worse than others; and that the model forbids, as far as that was tried.
    unsampled: usize,
    refused: usize,
    too_large: usize,
    samples: usize,
    compiled: usize,
    /// Plans that were not compiled and that no bound rules out, and the least that one of them is expected to take.
    open: usize,
    next: Option<f64>,
    /// Whether --search-seconds were too few for all that would have been tried.
    stopped: bool,
    plans: Vec<PlanRow<'a>>,
}

#[derive(Serialize)]
struct PlanRow<'a> {
    flags: Vec<String>,
    bytes: u64,
    /// What was expected before it was compiled.
    expected_seconds: Option<f64>,
    expected_bytes: Option<f64>,
    /// Of machines that say how often they fail.
    goodput: Option<Goodput>,
    step: &'a Step,
}

/// For tools.
pub fn json(search: &Search<'_>, found: &SearchResult, asked: &PlanRequest<'_>, top: usize) -> anyhow::Result<()> {
    let rows = found.plans.iter().take(top).map(|plan| {
        let Planned { step, bytes, estimate, checkpoint, options, .. } = plan;
        PlanRow {
            flags: asked.words(options),
            bytes: *bytes,
            expected_seconds: estimate.map(|e| e.seconds),
            expected_bytes: estimate.map(|e| e.bytes),
            goodput: goodput(search.machine, search.space.ranks, *checkpoint, step.seconds),
            step,
        }
    });
    let SearchResult { considered, unsampled, refused, too_large, samples, compiled, open, next, stopped, .. } = *found;
    let (machine, ranks) = (search.machine.name.as_str(), search.space.ranks);
    let plans = rows.collect();
    let report = PlanReport { machine, ranks, considered, unsampled, refused, too_large, samples, compiled, open, next, stopped, plans };
    out!("{}\n", serde_json::to_string_pretty(&report)?)?;
    Ok(())
}
