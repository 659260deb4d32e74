//! What the page's script draws: curves and marks, as JSON within the page.

use super::curve::{PlottedCurve, Points};
use super::elapsed::Elapsed;
use super::history::Run;
use super::metrics::USUAL;
use super::page::Report;
use crate::pages::numbers::{bytes, duration, of};
use crate::watch::log::RunOutcome;
use serde::Serialize;
use std::collections::BTreeSet;

#[derive(Debug, Serialize)]
pub struct Charts {
    pub charts: Vec<Chart>,
    runs: Vec<ChartRun>,
    /// With several runs, each has its last end and no checkpoints.
    marks: Vec<ChartMark>,
    /// What curves can be drawn along.
    pub axes: Vec<Axis>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    Step,
    Tokens,
    Seconds,
}

#[derive(Debug, Serialize)]
struct ChartRun {
    name: String,
    elapsed: Elapsed,
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
    style: SeriesStyle,
    /// Which of the runs.
    run: usize,
    #[serde(flatten)]
    points: Points,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum SeriesStyle {
    Line,
    /// A faint line, behind the means of the same numbers.
    Spread,
    /// A line over steps that have no number, in another colour.
    Sparse,
}

#[derive(Debug, Serialize)]
struct ChartMark {
    run: usize,
    step: u64,
    /// On the clock, if it is at no step's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    kind: &'static str,
    text: String,
}

/// When a chart begins with a logarithmic scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Log,
    /// If a few numbers are far above the others.
    LogOfSpikes,
}

impl Axis {
    pub fn name(self) -> &'static str {
        match self {
            Axis::Step => "steps",
            Axis::Tokens => "tokens",
            Axis::Seconds => "time",
        }
    }
}

/// Takes curves out of runs and makes charts of them.
struct Drawing<'a> {
    runs: &'a mut [Report],
    charts: Vec<Chart>,
}

impl Drawing<'_> {
    /// The curve of each run that has a number of that name.
    fn take(&mut self, name: &str) -> Vec<(usize, PlottedCurve)> {
        let take = |(k, run): (usize, &mut Report)| Some((k, run.metrics.curves.remove(name)?));
        self.runs.iter_mut().enumerate().filter_map(take).filter(|(_, drawn)| drawn.greatest().is_some()).collect()
    }

    /// One curve; of one that is thinned also the means, drawn over it. Of several runs a curve has the run's name,
    /// and of what is thinned means alone.
    fn line(&self, label: &str, run: usize, drawn: PlottedCurve) -> Vec<Series> {
        let one = |label: String, style, points| Series { label, style, run, points };
        match (self.runs.len() > 1, drawn.means.x.is_empty()) {
            (true, is_whole) => vec![one(self.runs[run].name.clone(), SeriesStyle::Line, if is_whole { drawn.points } else { drawn.means })],
            (false, true) => vec![one(label.into(), SeriesStyle::Line, drawn.points)],
            (false, false) => {
                vec![
                    one("least and greatest".into(), SeriesStyle::Spread, drawn.points),
                    one(format!("{label}, mean"), SeriesStyle::Line, drawn.means),
                ]
            }
        }
    }

    fn chart(&mut self, title: &str, label: &str, curves: Vec<(usize, PlottedCurve)>, factor: f64, scale: Scale) {
        let log = scale == Scale::Log || scale == Scale::LogOfSpikes && curves.iter().any(|(_, drawn)| drawn.has_spikes());
        let series: Vec<Series> = curves.into_iter().flat_map(|(run, drawn)| self.line(label, run, drawn.scaled(factor))).collect();
        self.add(title, log, series);
    }

    fn add(&mut self, title: &str, log: bool, series: Vec<Series>) {
        if !series.is_empty() {
            self.charts.push(Chart { title: title.into(), log, series });
        }
    }

    fn loss(&mut self) {
        let (losses, held_out) = (self.take("loss"), self.take("valid_loss"));
        let mut series: Vec<Series> = losses.into_iter().flat_map(|(run, drawn)| self.line("loss", run, drawn.scaled(1.0))).collect();
        series.extend(held_out.into_iter().map(|(run, drawn)| {
            let label = if self.runs.len() > 1 { format!("{}, held-out", self.runs[run].name) } else { "held-out loss".into() };
            Series { label, style: SeriesStyle::Sparse, run, points: drawn.scaled(1.0).points }
        }));
        self.add("Loss", false, series);
    }

    fn all(&mut self) {
        self.loss();
        let usual = [
            ("grad_norm", "Gradient norm", "gradient norm", 1.0, Scale::LogOfSpikes),
            ("lr", "Learning rate", "learning rate", 1.0, Scale::Linear),
            ("loss_scale", "Loss scale", "loss scale", 1.0, Scale::Log),
            ("moe_further_passes", "Further passes of rows of experts (%)", "run, %", 100.0, Scale::Linear),
            ("tokens_per_s", "Tokens per second", "tokens/s", 1.0, Scale::Linear),
            ("step_ms", "Time of a step (ms)", "ms", 1.0, Scale::LogOfSpikes),
            ("data_wait_ms", "Wait for data in a step (ms)", "ms", 1.0, Scale::LogOfSpikes),
            ("data_bytes", "Data that a rank read for a step (KiB)", "KiB", 1.0 / 1024.0, Scale::Linear),
            ("mfu", "Model FLOP utilisation (%)", "MFU, %", 100.0, Scale::Linear),
        ];
        for (name, title, label, factor, scale) in usual {
            let curves = self.take(name);
            self.chart(title, label, curves, factor, scale);
        }
        let memory = self.take("memory_bytes");
        let (unit, factor) = match memory.iter().filter_map(|(_, drawn)| drawn.greatest()).max_by(f64::total_cmp) {
            Some(most) if most < f64::from(1 << 30) => ("MiB", 1.0 / f64::from(1 << 20)),
            _ => ("GiB", 1.0 / f64::from(1 << 30)),
        };
        self.chart(&format!("Memory of the rank that has the most ({unit})"), unit, memory, factor, Scale::Linear);
        let named = self.runs.iter().flat_map(|run| run.metrics.curves.keys());
        let reports: BTreeSet<String> = named.filter(|name| !USUAL.contains(&name.as_str())).cloned().collect();
        for name in reports {
            let curves = self.take(&name);
            let title = name.strip_prefix("valid_loss/").map_or_else(|| format!("Reported: {name}"), |set| format!("Held-out loss: {set}"));
            self.chart(&title, &name, curves, 1.0, Scale::Linear);
        }
    }
}

impl Charts {
    /// Takes the curves.
    pub fn of(runs: &mut [Report]) -> Charts {
        let mut drawing = Drawing { runs, charts: vec![] };
        drawing.all();
        let Drawing { runs, charts } = drawing;
        let marks = runs.iter().enumerate().flat_map(|(k, run)| marks(k, run, runs.len() > 1)).collect();
        let runs: Vec<ChartRun> =
            runs.iter_mut().map(|run| ChartRun { name: run.name.clone(), elapsed: std::mem::take(&mut run.metrics.elapsed) }).collect();
        let has = |sums: fn(&Elapsed) -> &[f64]| runs.iter().all(|run| run.elapsed.step.is_empty() || sums(&run.elapsed).last() > Some(&0.0));
        let axes = [(Axis::Step, true), (Axis::Tokens, has(|e| &e.tokens)), (Axis::Seconds, has(|e| &e.seconds))];
        Charts { charts, marks, axes: axes.into_iter().filter(|(_, has)| *has).map(|(axis, _)| axis).collect(), runs }
    }

    /// Marks are signs then, in the runs' colours.
    pub fn is_of_several(&self) -> bool {
        self.runs.len() > 1
    }

    /// Whether there is such a mark.
    pub fn has(&self, kind: &str) -> bool {
        self.marks.iter().any(|mark| mark.kind == kind)
    }
}

fn marks(run: usize, report: &Report, is_one_of_several: bool) -> Vec<ChartMark> {
    let (history, mut marks) = (&report.history, vec![]);
    let mut mark = |kind: &'static str, step: u64, so_far: Option<f64>, what: String| {
        let whose = if is_one_of_several { format!("{}, ", report.name) } else { String::new() };
        let seconds = so_far.map(|seconds| report.timeline.of_log(seconds));
        marks.push(ChartMark { run, step, seconds, kind, text: format!("{whose}step {step}: {what}") });
    };
    for s in history.saved.last.iter().filter(|_| !is_one_of_several) {
        let what = format!("checkpoint, {} in {:.0} ms; training waited {:.0} ms", bytes(s.bytes), s.milliseconds, s.stalled);
        mark("saved", s.step, None, what);
    }
    for r in &history.restarts.last {
        let what = format!("restart {} of {}; {} and {} lost", r.count, r.most, of(r.steps, "step"), duration(r.seconds));
        mark("restart", r.at, Some(r.seconds_so_far), what);
    }
    let goes_on = |run: &&Run| run.began.first > 1;
    history.runs.last.iter().filter(goes_on).for_each(|run| mark("resumed", run.began.first, None, "a run went on here".into()));
    let latest = history.runs.last.len().saturating_sub(1);
    let ends = history.runs.last.iter().enumerate().filter(|(k, _)| !is_one_of_several || *k == latest);
    for end in ends.filter_map(|(_, run)| run.end.as_ref()) {
        let (kind, how) = match end.how {
            RunOutcome::Whole => ("end", "the end of a run"),
            RunOutcome::Early => ("end", "a run ended early, with everything saved"),
            RunOutcome::Failed => ("failed", "a run failed"),
        };
        mark(kind, end.step, Some(end.seconds_so_far), how.into());
    }
    marks
}
