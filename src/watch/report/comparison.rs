//! The page of several runs: their curves in the same charts, a row for each, and what each one's own page would
//! have.

use super::charts::Charts;
use super::page::{Report, curves, whole};
use super::parts::mesh;
use crate::pages::colour;
use crate::pages::numbers::{count, duration, of, percent, short};
use crate::watch::log::RunOutcome;
use maud::{Markup, html};

pub fn page(runs: &[Report], charts: &Charts) -> String {
    let model = |run: &Report| run.began().map(|b| b.model.clone());
    let first = runs.first().and_then(model);
    let title = match first.filter(|first| runs.iter().all(|run| model(run).as_ref() == Some(first))) {
        Some(model) => format!("{model}: {}", of(runs.len() as u64, "run")),
        None => of(runs.len() as u64, "run"),
    };
    let made = runs.iter().map(|run| run.made).fold(0.0, f64::max);
    let header = html! { h1 { (title) } (table(runs)) };
    let main = html! {
        @for run in runs { @for what in &run.damage { p.warn { code { (run.name) } ": " (what) } } }
        (curves(charts, &notes(runs)))
        h2 { "Each run" }
        @for (k, run) in runs.iter().enumerate() {
            details.run { summary { (key(k)) (run.name) } (run.details()) }
        }
    };
    whole(&format!("{title} of mcc"), &header, &main, charts, made)
}

/// The colour of a run's curves.
fn key(run: usize) -> Markup {
    html! { i.swatch.(colour(run)) {} }
}

fn table(runs: &[Report]) -> Markup {
    let number = |x: Option<f64>, shown: fn(f64) -> String| x.map_or("–".into(), shown);
    let how = |run: &Report| match run.history.runs.last.back().map(|last| last.end.as_ref().map(|end| end.how)) {
        None => "–",
        Some(None) => "no end yet",
        Some(Some(RunOutcome::Whole)) => "finished",
        Some(Some(RunOutcome::Early)) => "ended early",
        Some(Some(RunOutcome::Failed)) => "failed",
    };
    html! {
        div.scroll {
            table.data {
                thead {
                    tr {
                        th { "run" } th { "end" } th.n { "last step" } th.n { "last loss" } th.n { "best held-out loss" } th.n { "tokens/s, median" }
                        th.n { "MFU, median" } th.n { "time" } th { "model" } th { "mesh" }
                    }
                }
                tbody {
                    @for (k, run) in runs.iter().enumerate() {
                        tr {
                            td.name { span { (key(k)) code { (run.name) } } }
                            td.t { (how(run)) }
                            td.n { (number(run.metrics.steps.map(|s| s.1 as f64), count)) }
                            td.n { (number(run.metrics.loss, short)) }
                            td.n { (number(run.metrics.best.map(|(_, loss)| loss), short)) }
                            td.n { (number(run.metrics.tokens_per_s, count)) }
                            td.n { (number(run.metrics.mfu, percent)) }
                            td.n { (duration(run.seconds().0)) }
                            td { @if let Some(b) = run.began() { (b.model) } }
                            td.t { @if let Some(b) = run.began() { (mesh(b)) } }
                        }
                    }
                }
            }
        }
    }
}

fn notes(runs: &[Report]) -> Markup {
    let sum = |of: fn(&Report) -> u64| runs.iter().map(of).sum::<u64>();
    html! {
        @if runs.iter().any(|run| run.metrics.width > 1) { "Of a run of more than 4,000 steps, curves are means of as many neighbours as needed. " }
        @if sum(|run| run.metrics.repeated) > 0 { "Of a step that was done again, only the last time is drawn. " }
        @if sum(|run| run.metrics.left_out) > 0 { "Of a model's reports, only the first are drawn. " }
    }
}
