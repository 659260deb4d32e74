//! Tables of the page: the plan, planned memory, checkpoints, restarts, warnings.

use super::history::{History, Restart, Run, Saved, Tail};
use crate::pages::colour;
use crate::pages::numbers::{bytes, count, duration, of, quoted, time};
use crate::watch::log::{RunOutcome, RunStart};
use maud::{Markup, html};
use passes::report::footprint::MemoryCategory;
use std::collections::BTreeSet;

/// Rows that are seen without asking.
const ROWS: usize = 20;

/// Axes that split anything: `pp 2 × tp 2`. With experts, also how those are split.
pub fn mesh(began: &RunStart) -> String {
    let has_experts = began.mesh.iter().any(|(axis, size)| axis == "ep" && *size > 1);
    let is_shown = |axis: &str| axis != "mb" && (has_experts || !matches!(axis, "etp" | "edp"));
    let axes = began.mesh.iter().filter(|(axis, size)| *size > 1 && is_shown(axis));
    let axes = axes.map(|(axis, size)| format!("{axis} {size}")).collect::<Vec<_>>().join(" × ");
    if axes.is_empty() { "one rank".into() } else { axes }
}

pub fn plan(history: &History) -> Markup {
    let Some(last) = history.runs.last.back() else { return html! {} };
    let b = &last.began;
    let rows = [
        ("Model", b.model.clone()),
        ("Parameters", count(b.parameters as f64)),
        ("Mesh", mesh(b)),
        ("Ranks", count(b.ranks as f64)),
        ("Batch", format!("{}, in {} of a data-parallel rank", of(b.batch, "sequence"), of(b.microbatches, "microbatch"))),
        ("Target", b.target.clone()),
        ("Host", b.host.clone()),
        ("mcc", b.mcc.clone()),
    ];
    html! {
        h2 { "Plan" }
        div.scroll {
            table.data.plan {
                @for (name, value) in rows { tr { th { (name) } td { (value) } } }
                tr { th { "Artifact" } td { code { (b.artifact) } } }
                tr { th { "Artifact id" } td { code { (b.id) } } }
                tr { th { "Command" } td { code { "mcc " (quoted(&b.command)) } } }
            }
        }
        h3 { "Runs of this log" }
        (left_out(&history.runs, "run"))
        div.scroll {
            table.data {
                thead { tr { th { "began" } th.n { "from step" } th.n { "to step" } th.n { "time" } th { "end" } th { "on" } } }
                tbody { @for run in &history.runs.last { (run_row(run, b)) } }
            }
        }
    }
}

fn run_row(run: &Run, last: &RunStart) -> Markup {
    let end = run.end.as_ref();
    let how = match end.map(|end| end.how) {
        None => "no end in the log",
        Some(RunOutcome::Whole) => "whole",
        Some(RunOutcome::Early) => "early, with everything saved",
        Some(RunOutcome::Failed) => "failed",
    };
    let b = &run.began;
    html! {
        tr {
            td.t { (time(run.time)) }
            td.n { (count(b.first as f64)) }
            td.n { @if let Some(end) = end { (count(end.step as f64)) " of " } @else { "… of " } (count(b.steps as f64)) }
            td.n { (duration(run.until - run.time)) }
            td.what {
                (how)
                @if let Some(why) = end.and_then(|end| end.why.as_ref()) { div.said.small { (why) } }
            }
            td.t {
                (mesh(b)) ", " (b.host)
                @if b.id != last.id { div.faint.small { "another artifact, id " code { (b.id) } } }
            }
        }
    }
}

/// How many earlier ones are in no table.
fn left_out<T>(kept: &Tail<T>, one: &str) -> Markup {
    html! { @if kept.before > 0 { p.faint { (of(kept.before, one)) " before these are left out." } } }
}

const HOST: &str = " on the host";
const DISK: &str = " on a disk";

/// What stages hold, in the order of the compiler's table, and what other versions of mcc may name.
fn kinds(began: &RunStart) -> Vec<String> {
    let named: BTreeSet<&String> = began.memory.iter().flat_map(|stage| stage.keys()).collect();
    let place = |name: &&String| {
        let kind = name.trim_end_matches(HOST).trim_end_matches(DISK);
        (name.ends_with(DISK), name.ends_with(HOST), MemoryCategory::ALL.iter().position(|k| k.name() == kind).unwrap_or(usize::MAX))
    };
    let mut names: Vec<&String> = named.into_iter().collect();
    names.sort_by_key(place);
    names.into_iter().cloned().collect()
}

pub fn memory(began: Option<&RunStart>) -> Markup {
    let Some(b) = began.filter(|b| b.memory.iter().any(|stage| !stage.is_empty())) else { return html! {} };
    let kinds = kinds(b);
    let total = |stage: usize| b.memory[stage].values().fold(0u64, |sum, n| sum.saturating_add(*n));
    let most = (0..b.memory.len()).map(total).max().unwrap_or(0).max(1);
    let held = |stage: usize, kind: &String| b.memory[stage].get(kind).copied().unwrap_or(0);
    html! {
        h2 { "Planned memory of a rank" }
        ul.key { @for (k, kind) in kinds.iter().enumerate() { li { i.(colour(k)) {} (kind) } } }
        div.stages {
            @for stage in 0..b.memory.len() {
                span { "stage " (stage) }
                div.stack {
                    @for (k, kind) in kinds.iter().enumerate().filter(|(_, kind)| held(stage, kind) > 0) {
                        i.(colour(k)) title={ (kind) ": " (bytes(held(stage, kind))) }
                            style={ "width:" (format!("{:.3}", 100.0 * held(stage, kind) as f64 / most as f64)) "%" } {}
                    }
                }
                span.n.total { (bytes(total(stage))) }
            }
        }
        div.scroll {
            table.data {
                thead { tr { th { "stage" } @for kind in &kinds { th.n { (kind) } } th.n { "all" } } }
                tbody {
                    @for stage in 0..b.memory.len() {
                        tr {
                            th { (stage) }
                            @for kind in &kinds { td.n { @match held(stage, kind) { 0 => "", n => (bytes(n)) } } }
                            td.n { (bytes(total(stage))) }
                        }
                    }
                }
            }
        }
    }
}

pub fn checkpoints(history: &History) -> Markup {
    let saved = &history.saved;
    let (earlier, last) = saved.last.as_slices_of_last(ROWS);
    let table = |rows: &[&Saved]| {
        html! {
            div.scroll {
                table.data {
                    thead { tr { th.n { "step" } th { "complete at" } th.n { "size" } th.n { "time" } th.n { "GB/s" } th.n { "training waited" } th { "directory" } } }
                    tbody {
                        @for s in rows {
                            tr {
                                td.n { (count(s.step as f64)) }
                                td.t { (time(s.time)) }
                                td.n { (bytes(s.bytes)) }
                                td.n { (count(s.milliseconds)) " ms" }
                                td.n { (format!("{:.2}", s.bytes as f64 / 1e6 / s.milliseconds.max(1e-6))) }
                                td.n { (count(s.stalled)) " ms" }
                                td { code { (s.dir) } }
                            }
                        }
                    }
                }
            }
        }
    };
    html! {
        @if !saved.is_empty() {
            h2 { "Checkpoints" }
            (left_out(saved, "checkpoint"))
            @if !earlier.is_empty() { details { summary { (of(earlier.len() as u64, "earlier checkpoint")) } (table(&earlier)) } }
            (table(&last))
        }
    }
}

/// Splits a list into earlier items, which are shown on request, and the last ones.
trait SplitLast<T> {
    fn as_slices_of_last(&self, n: usize) -> (Vec<&T>, Vec<&T>);
}

impl<T> SplitLast<T> for std::collections::VecDeque<T> {
    fn as_slices_of_last(&self, n: usize) -> (Vec<&T>, Vec<&T>) {
        let mut all: Vec<&T> = self.iter().collect();
        let last = all.split_off(all.len().saturating_sub(n));
        (all, last)
    }
}

pub fn restarts(history: &History) -> Markup {
    let row = |r: &Restart| {
        html! {
            tr {
                td.t { (time(r.time)) }
                td.n { (count(r.at as f64)) }
                td.n { (r.count) " of " (r.most) }
                td.n { (count(r.steps as f64)) }
                td.n { (duration(r.seconds)) }
                td { @if let Some(from) = &r.from { code { (from) } } @else { "the beginning" } }
                td.what.said { (r.why) }
            }
        }
    };
    html! {
        @if !history.restarts.is_empty() {
            h2 { "Restarts" }
            (left_out(&history.restarts, "restart"))
            div.scroll {
                table.data {
                    thead { tr { th { "at" } th.n { "after step" } th.n { "restart" } th.n { "steps lost" } th.n { "time lost" } th { "from" } th { "why" } } }
                    tbody { @for r in &history.restarts.last { (row(r)) } }
                }
            }
        }
    }
}

pub fn notes(history: &History) -> Markup {
    html! {
        @if !history.notes.is_empty() {
            h2 { "Warnings and remarks" }
            (left_out(&history.notes, "other text"))
            div.scroll {
                table.data {
                    thead { tr { th { "first at" } th.n { "times" } th { "what" } } }
                    tbody {
                        @for said in &history.notes.last {
                            tr { td.t { (time(said.time)) } td.n { (said.times) } td.what.said { (said.text) } }
                        }
                    }
                }
            }
        }
    }
}
