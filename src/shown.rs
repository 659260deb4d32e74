//! What a run says of its steps: a line now and then, or one that moves on a terminal.

use crate::print::{note, progress};
use indicatif::{HumanBytes, HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use runtime::launch::{Note, Saved, StepMetrics};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors and warnings alone.
    Quiet,
    Usual,
    /// Also where ranks are, and all that the model reports of a step.
    Verbose,
}

/// Steps from one line to the next.
const INTERVAL: u64 = 10;
/// Slow steps have a line each.
const SLOW: Duration = Duration::from_secs(10);

pub struct StepDisplay {
    verbosity: Verbosity,
    interval: u64,
    moves: bool,
    bar: Option<ProgressBar>,
    last: Option<Instant>,
    /// The first step that was seen, and when.
    first: Option<(u64, Instant)>,
}

impl StepDisplay {
    /// A bar on a terminal, unless an interval is asked for or the terminal shall have no escape codes; lines
    /// elsewhere.
    pub fn new(verbosity: Verbosity, interval: Option<u64>) -> StepDisplay {
        let is_terminal = std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        let moves = interval.is_none() && verbosity == Verbosity::Usual && is_terminal && escapes();
        StepDisplay { verbosity, interval: interval.unwrap_or(INTERVAL), moves, bar: None, last: None, first: None }
    }

    pub fn note(&self, note: &Note) {
        match note {
            Note::Warning(text) => self.aside(|| note!("warning: {text}")),
            Note::Remark(text) if self.verbosity >= Verbosity::Usual => self.aside(|| note!("note: {text}")),
            Note::Detail(text) if self.verbosity == Verbosity::Verbose => progress!("{text}"),
            Note::Remark(_) | Note::Detail(_) => {}
        }
    }

    pub fn step(&mut self, p: &StepMetrics) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        let text = line(p, self.verbosity);
        let (first, begun) = *self.first.get_or_insert_with(|| (p.step, Instant::now()));
        if self.moves {
            let bar = self.bar.get_or_insert_with(|| {
                let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  {eta} left").expect("invariant: the template is right");
                ProgressBar::with_draw_target(Some(p.steps), ProgressDrawTarget::stderr()).with_style(style)
            });
            bar.set_position(p.step);
            bar.set_message(text);
            return;
        }
        let is_first = self.last.is_none();
        let slow = self.last.is_some_and(|t| t.elapsed() > SLOW);
        if is_first || p.step == p.steps || p.step.is_multiple_of(self.interval) || p.valid_loss.is_some() || p.skipped || slow {
            // The estimate leaves out the first step, which may have been slower.
            let left = (p.step > first && p.step < p.steps)
                .then(|| begun.elapsed().mul_f64((p.steps - p.step) as f64 / (p.step - first) as f64))
                .map_or(String::new(), |left| format!("  {} left", HumanDuration(left)));
            progress!("step {:>6}/{}  {text}{left}", p.step, p.steps);
            self.last = Some(Instant::now());
        }
    }

    pub fn saved(&self, saved: &Saved) {
        if self.verbosity >= Verbosity::Usual {
            self.aside(|| progress!("{}", saved_line(saved)));
        }
    }

    /// Prints without drawing over the bar.
    pub fn aside(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }
}

/// Whether terminals may be sent escape codes (<https://no-color.org>).
pub fn escapes() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()) && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

fn saved_line(saved: &Saved) -> String {
    let rate = saved.bytes as f64 / (saved.milliseconds / 1e3).max(1e-9);
    format!(
        "saved {} ({} in {:.0} ms, {}/s; training waited {:.0} ms)",
        saved.dir.display(),
        HumanBytes(saved.bytes),
        saved.milliseconds,
        HumanBytes(rate as u64),
        saved.stalled
    )
}

fn line(p: &StepMetrics, verbosity: Verbosity) -> String {
    let number = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.4}"));
    let rate = |tokens: f64| HumanCount(tokens.round() as u64);
    let mut text = format!("loss {}  grad norm {}  lr {:.2e}  {} tokens/s", number(p.loss), number(p.grad_norm), p.lr, rate(p.tokens_per_s));
    if p.ranks > 1 {
        text += &format!(" ({} a rank)", rate(p.tokens_per_s / p.ranks as f64));
    }
    if let Some(mfu) = p.mfu {
        text += &format!("  MFU {:.1} %", 100.0 * mfu);
    }
    if p.memory_bytes > 0 {
        text += &format!("  {}", HumanBytes(p.memory_bytes));
    }
    text += &format!("  {:.1} ms ({:.1} % for data)", p.step_ms, 100.0 * p.data_wait_ms / p.step_ms.max(1e-9));
    if let Some(v) = p.valid_loss {
        text += &format!("  held-out loss {v:.4}");
        let each = p.valid_losses.iter().map(|(name, loss)| format!("{} {loss:.4}", name.split_once('/').map_or(name.as_str(), |(_, name)| name)));
        let each: Vec<String> = each.collect();
        if !each.is_empty() {
            text += &format!(" ({})", each.join(", "));
        }
    }
    if let Some(scale) = p.loss_scale {
        text += &format!("  loss scale {scale}");
    }
    if let Some(part) = p.further_passes {
        text += &format!("  further passes {:.1} %", 100.0 * part);
    }
    if verbosity == Verbosity::Verbose {
        p.reports.iter().for_each(|(name, value)| text += &format!("  {name} {value:.4}"));
    }
    if p.skipped {
        text += "  skipped: not finite";
    }
    text
}
