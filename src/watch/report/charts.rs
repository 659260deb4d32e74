//! What the page's script draws: curves and marks, as JSON within the page.

use super::curve::{Drawn, Points};
use super::history::{History, Run};
use super::metrics::{Metrics, USUAL};
use super::numbers::{bytes, duration, of};
use crate::watch::log::How;
use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct Charts {
    pub charts: Vec<Chart>,
    marks: Vec<Mark>,
    /// Of the time axis.
    steps: (u64, u64),
}

#[derive(Debug, Serialize)]
pub struct Chart {
    pub title: String,
    /// Whether it begins with a logarithmic scale.
    pub log: bool,
    series: Vec<Series>,
}

#[derive(Debug, Serialize)]
struct Series {
    label: String,
    style: Style,
    #[serde(flatten)]
    points: Points,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Style {
    Line,
    /// A faint line, behind the means of the same numbers.
    Spread,
    /// A line over steps that have no number, in another colour.
    Sparse,
}

/// One curve; of one that is thinned also the means, drawn over it.
fn series(label: &str, drawn: Drawn) -> Vec<Series> {
    let one = |label: String, style, points| Series { label, style, points };
    match drawn.means.x.is_empty() {
        true => vec![one(label.into(), Style::Line, drawn.points)],
        false => vec![one("least and greatest".into(), Style::Spread, drawn.points), one(format!("{label}, mean"), Style::Line, drawn.means)],
    }
}

#[derive(Debug, Serialize)]
struct Mark {
    step: u64,
    kind: &'static str,
    text: String,
}

impl Charts {
    /// Takes the curves.
    pub fn new(metrics: &mut Metrics, history: &History) -> Charts {
        let mut charts = vec![];
        let mut take = |name: &str| metrics.curves.remove(name).filter(|drawn| drawn.greatest().is_some());
        let mut losses = take("loss").map_or(vec![], |drawn| series("loss", drawn.scaled(1.0)));
        losses.extend(take("valid_loss").map(|d| Series { label: "held-out loss".into(), style: Style::Sparse, points: d.scaled(1.0).points }));
        if !losses.is_empty() {
            charts.push(Chart { title: "Loss".into(), log: false, series: losses });
        }
        let [norm, time, memory] = ["grad_norm", "step_ms", "memory_bytes"].map(&mut take);
        let [norm_log, time_log] = [&norm, &time].map(|drawn| drawn.as_ref().is_some_and(Drawn::has_spikes));
        let (unit, factor) = match memory.as_ref().and_then(Drawn::greatest) {
            Some(most) if most < f64::from(1 << 30) => ("MiB", 1.0 / f64::from(1 << 20)),
            _ => ("GiB", 1.0 / f64::from(1 << 30)),
        };
        let memory_title = format!("Memory of the rank that has the most ({unit})");
        let usual = [
            ("Gradient norm", "gradient norm", norm, 1.0, norm_log),
            ("Learning rate", "learning rate", take("lr"), 1.0, false),
            ("Loss scale", "loss scale", take("loss_scale"), 1.0, true),
            ("Tokens per second", "tokens/s", take("tokens_per_s"), 1.0, false),
            ("Time of a step (ms)", "ms", time, 1.0, time_log),
            ("Model FLOP utilisation (%)", "MFU, %", take("mfu"), 100.0, false),
            (&memory_title, unit, memory, factor, false),
        ];
        let usual = usual.map(|(title, label, points, factor, log)| (title.to_owned(), label.to_owned(), points, factor, log));
        let reports: Vec<String> = metrics.curves.keys().filter(|name| !USUAL.contains(&name.as_str())).cloned().collect();
        let mut take = |name: &str| metrics.curves.remove(name).filter(|drawn| drawn.greatest().is_some());
        let reports = reports.into_iter().map(|name| (format!("Reported: {name}"), name.clone(), take(&name), 1.0, false));
        for (title, label, points, factor, log) in usual.into_iter().chain(reports) {
            charts.extend(points.map(|drawn| Chart { title, log, series: series(&label, drawn.scaled(factor)) }));
        }
        Charts { charts, marks: marks(history), steps: metrics.steps.unwrap_or_default() }
    }

    /// Whether there is such a mark.
    pub fn has(&self, kind: &str) -> bool {
        self.marks.iter().any(|mark| mark.kind == kind)
    }

    /// As the text of a `<script>`: nothing in it ends that, or begins anything.
    pub fn json(&self) -> String {
        let text = serde_json::to_string(self).expect("invariant: plain data with text keys");
        // Outside of texts JSON has none of these.
        let escapes = [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")];
        escapes.into_iter().fold(text, |text, (c, escape)| text.replace(c, escape))
    }
}

fn marks(history: &History) -> Vec<Mark> {
    let saved = history.saved.last.iter().map(|s| {
        let text = format!("step {}: checkpoint, {} in {:.0} ms; training waited {:.0} ms", s.step, bytes(s.bytes), s.milliseconds, s.stalled);
        Mark { step: s.step, kind: "saved", text }
    });
    let restarts = history.restarts.last.iter().map(|r| {
        let text = format!("step {}: restart {} of {}; {} and {} lost", r.at, r.count, r.most, of(r.steps, "step"), duration(r.seconds));
        Mark { step: r.at, kind: "restart", text }
    });
    let goes_on = |run: &&Run| run.began.first > 1;
    let resumed = history.runs.last.iter().filter(goes_on).map(|run| {
        let text = format!("step {}: a run went on here", run.began.first);
        Mark { step: run.began.first, kind: "resumed", text }
    });
    let ends = history.runs.last.iter().filter_map(|run| run.end.as_ref()).map(|end| {
        let (kind, how) = match end.how {
            How::Whole => ("end", "the end of a run"),
            How::Early => ("end", "a run ended early, with everything saved"),
            How::Failed => ("failed", "a run failed"),
        };
        Mark { step: end.step, kind, text: format!("step {}: {how}", end.step) }
    });
    saved.chain(restarts).chain(resumed).chain(ends).collect()
}
