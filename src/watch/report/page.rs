//! The page.

use super::charts::Charts;
use super::history::History;
use super::metrics::Metrics;
use super::timeline::Timeline;
use super::{comparison, parts, spent};
use crate::pages::numbers::{count, duration, of, percent, short};
use crate::pages::{self, Script, json};
use crate::watch::log::{RunOutcome, RunStart};
use crate::watch::profile::Profiled;
use maud::{Markup, html};

/// What is known of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// What the user named.
    pub name: String,
    pub metrics: Metrics,
    pub history: History,
    pub timeline: Timeline,
    pub profile: Option<Profiled>,
    /// What could not be read.
    pub damage: Vec<String>,
    /// When the page is made, and when the last line was written.
    pub made: f64,
    pub written: f64,
}

const SCRIPT: &str = include_str!("page.js");

/// The page of one run, or of several side by side.
pub fn page(mut runs: Vec<Report>) -> String {
    let charts = Charts::of(&mut runs);
    match &runs[..] {
        [one] => one.page(&charts),
        several => comparison::page(several, &charts),
    }
}

/// A page around what is in it.
pub fn whole(title: &str, header: &Markup, main: &Markup, charts: &Charts, made: f64) -> String {
    let script = (!charts.charts.is_empty()).then(|| Script { data: json(charts), code: SCRIPT });
    pages::page(title, header, main, script.as_ref(), made)
}

impl Report {
    fn page(&self, charts: &Charts) -> String {
        let began = self.began();
        let title = began.map_or(self.name.as_str(), |b| b.model.as_str());
        let header = html! {
            h1 { (title) }
            p.faint { (self.state(began)) " " code { (self.name) } }
            (self.cards(began))
        };
        let main = html! {
            @for what in &self.damage { p.warn { (what) } }
            (curves(charts, &self.notes()))
            (self.details())
        };
        whole(&format!("{title}: a run of mcc"), &header, &main, charts, self.made)
    }

    /// The last run of its log.
    pub fn began(&self) -> Option<&RunStart> {
        self.history.runs.last.back().map(|run| &run.began)
    }

    /// All but its state and its curves.
    pub fn details(&self) -> Markup {
        let began = self.began();
        html! {
            @if let Some(profile) = &self.profile { (spent::section(profile, began)) }
            (parts::plan(&self.history))
            (parts::memory(began))
            (parts::checkpoints(&self.history))
            (parts::restarts(&self.history))
            (parts::notes(&self.history))
        }
    }

    /// How long it took, and what of it.
    pub fn seconds(&self) -> (f64, &'static str) {
        let (m, h) = (&self.metrics, &self.history);
        if h.runs.is_empty() { (m.seconds, "of all steps") } else { (h.seconds, "from first step to end") }
    }

    /// How it ended, or that it has not.
    fn state(&self, began: Option<&RunStart>) -> Markup {
        let end = self.history.runs.last.back().map(|run| run.end.as_ref());
        let ago = || duration(self.made - self.written);
        html! {
            @match end {
                None => { "Metrics of" }
                Some(None) => {
                    span.state { "no end yet" } " after step " (count(self.metrics.steps.map_or(0, |s| s.1) as f64))
                    ", written " (ago()) " before this page: it trains, or was killed. Log:"
                }
                Some(Some(end)) => {
                    @match end.how {
                        RunOutcome::Whole => { span.state.good { "finished" } }
                        RunOutcome::Early => { span.state { "ended early" } ", everything saved," }
                        RunOutcome::Failed => { span.state.bad { "failed" } }
                    }
                    " after step " (count(end.step as f64))
                    @if let Some(b) = began { " of " (count(b.steps as f64)) }
                    ". Log:"
                }
            }
        }
    }

    /// The row on top.
    fn cards(&self, began: Option<&RunStart>) -> Markup {
        let (m, h) = (&self.metrics, &self.history);
        let last = m.steps.map(|s| s.1);
        let (seconds, whose) = self.seconds();
        let card = |name: &str, value: Option<String>, below: String| {
            html! { div { dt { (name) } dd { (value.as_deref().unwrap_or("–")) @if !below.is_empty() { span { (below) } } } } }
        };
        let skipped = if m.skipped > 0 { format!(", {} skipped", count(m.skipped as f64)) } else { String::new() };
        let steps = began.map_or(String::new(), |b| format!("of {}", count(b.steps as f64))) + &skipped;
        let restarts = h.restarts.last.len() as u64 + h.restarts.before;
        html! {
            dl.cards {
                (card("Last step", last.map(|s| count(s as f64)), steps))
                (card("Last loss", m.loss.map(short), String::new()))
                @if let Some((step, loss)) = m.best { (card("Best held-out loss", Some(short(loss)), format!("at step {}", count(step as f64)))) }
                (card("Tokens per second", m.tokens_per_s.map(count), "median".into()))
                @if let Some(mfu) = m.mfu { (card("MFU", Some(percent(mfu)), "median".into())) }
                (card("Time", Some(duration(seconds)), whose.into()))
                @if !h.runs.is_empty() {
                    (card("Time lost", Some(duration(h.lost + h.stalled)),
                        format!("{} in {}, {} in checkpoints", duration(h.lost), of(restarts, "restart"), duration(h.stalled))))
                }
            }
        }
    }

    /// What is not drawn of its curves.
    fn notes(&self) -> Markup {
        let m = &self.metrics;
        html! {
            @if m.width > 1 {
                "Of every " (count(m.width as f64)) " steps, each curve has the least number, the greatest and, drawn over them, the mean. "
            }
            @if m.repeated > 0 {
                (of(m.repeated, "step")) " that were done again after a restart or by a run that went on: only the last time is drawn. "
            }
            @if m.left_out > 0 { "Of the model's reports, only the first are drawn. " }
        }
    }
}

/// The charts, which the script fills in, and notes below them.
pub fn curves(charts: &Charts, notes: &Markup) -> Markup {
    const KINDS: [(&str, &str); 5] =
        [("saved", "checkpoint"), ("restart", "restart"), ("resumed", "a run goes on"), ("end", "end"), ("failed", "failure")];
    html! {
        h2 { "Curves" }
        @if charts.charts.is_empty() {
            p { "There are no metrics of a step to draw." }
        } @else {
            noscript { p.warn { "Curves are drawn by a script, which is in this page and does not run." } }
            ul.key {
                @for (kind, name) in KINDS.iter().filter(|(kind, _)| charts.has(kind)) { li { i.mark.(kind).sign[charts.is_of_several()] {} (name) } }
                @if charts.axes.len() > 1 {
                    li.screen {
                        label { "along " select id="axis" { @for (k, axis) in charts.axes.iter().enumerate() { option value=(k) { (axis.name()) } } } }
                    }
                }
                li.faint.screen { "drag to zoom, double-click for all" }
            }
            div.charts {
                @for chart in &charts.charts {
                    figure.chart {
                        figcaption { span { (chart.title) } label { input type="checkbox" checked[chart.log]; "log scale" } }
                        div {}
                    }
                }
            }
            p.faint.small { (notes) }
        }
    }
}
