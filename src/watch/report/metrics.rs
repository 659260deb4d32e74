//! The curves of a file of metrics, in two passes over it: which lines count, and what they say.

use super::curve::{Curve, PlottedCurve, width};
use super::elapsed::{Clock, Elapsed};
use super::lines;
use super::median::Median;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::ops::Range;
use std::path::Path;

/// Steps beyond are no numbers of a curve, nor of any run.
const MOST_STEP: u64 = 1 << 53;
/// Curves beside those that every run has: what the model reports.
const REPORTS: usize = 16;

/// What every run may have; other names are the model's own reports.
pub const USUAL: [&str; 12] = [
    "loss",
    "valid_loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "moe_further_passes",
    "tokens_per_s",
    "step_ms",
    "data_wait_ms",
    "data_bytes",
    "mfu",
    "memory_bytes",
];

#[derive(Debug, Default)]
pub struct Metrics {
    pub curves: BTreeMap<String, PlottedCurve>,
    /// The first step and the last, of which there may be none.
    pub steps: Option<(u64, u64)>,
    /// When steps that are drawn were done.
    pub elapsed: Elapsed,
    /// Steps of a bucket of the curves; 1 has all.
    pub width: u64,
    /// Lines of steps that were done again later: they are not drawn.
    pub repeated: u64,
    pub damaged: u64,
    /// Steps whose update was left out.
    pub skipped: u64,
    pub loss: Option<f64>,
    /// The least held-out loss, and its step.
    pub best: Option<(u64, f64)>,
    pub tokens_per_s: Option<f64>,
    pub mfu: Option<f64>,
    /// Seconds of all steps that are drawn.
    pub seconds: f64,
    /// Reports beyond those that are drawn.
    pub left_out: u64,
}

#[derive(Deserialize)]
struct Step {
    step: u64,
}

fn step(line: Option<&[u8]>) -> Option<u64> {
    let Step { step } = serde_json::from_slice(line?).ok()?;
    (step <= MOST_STEP).then_some(step)
}

/// Consecutive lines whose steps go up. Steps from `until` on were done again later.
#[derive(Debug, PartialEq)]
struct RisingLines {
    lines: Range<u64>,
    first: u64,
    last: u64,
    until: u64,
}

/// Which lines count: those of a step that no later line goes back to or behind.
#[derive(Default)]
struct CountedLines {
    rising: Vec<RisingLines>,
    lines: u64,
}

impl CountedLines {
    fn line(&mut self, step: Option<u64>) {
        let line = self.lines;
        self.lines += 1;
        let Some(step) = step else { return };
        match self.rising.last_mut() {
            Some(s) if s.last < step => (s.lines.end, s.last) = (self.lines, step),
            _ => {
                while self.rising.last().is_some_and(|s| s.first >= step) {
                    self.rising.pop();
                }
                if let Some(before) = self.rising.last_mut() {
                    before.until = before.until.min(step);
                }
                self.rising.push(RisingLines { lines: line..self.lines, first: step, last: step, until: u64::MAX });
            }
        }
    }
}

impl Metrics {
    /// Reads what is in the file now, though more may be written meanwhile.
    ///
    /// # Errors
    /// What the file system says.
    pub fn read(name: &Path) -> io::Result<Metrics> {
        let mut file = File::open(name)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file, and is read twice: write it to one first"));
        }
        let mut counted = CountedLines::default();
        lines::each(BufReader::new(&file).take(about.len()), |line| counted.line(step(line)))?;
        let ends = counted.rising.first().zip(counted.rising.last()).map(|(a, b)| (a.first, b.last));
        let width = ends.map_or(1, |(first, last)| width(first, last));
        let mut reading = Reading {
            metrics: Metrics { steps: ends, width, ..Metrics::default() },
            curves: BTreeMap::new(),
            clock: Clock::new(width),
            reports: 0,
            tokens_per_s: Median::default(),
            mfu: Median::default(),
        };
        file.rewind()?;
        let (mut number, mut rising) = (0, counted.rising.iter().peekable());
        lines::each(BufReader::new(&file).take(about.len()), |line| {
            while rising.next_if(|s| s.lines.end <= number).is_some() {}
            let until = rising.peek().filter(|s| s.lines.contains(&number)).map_or(0, |s| s.until);
            match step(line) {
                Some(step) if step < until => reading.line(step, line.unwrap_or_default()),
                Some(_) => reading.metrics.repeated += 1,
                None => reading.metrics.damaged += 1,
            }
            number += 1;
        })?;
        Ok(reading.metrics())
    }
}

struct Reading {
    metrics: Metrics,
    curves: BTreeMap<String, Curve>,
    clock: Clock,
    reports: usize,
    tokens_per_s: Median,
    mfu: Median,
}

impl Reading {
    /// A line that counts.
    fn line(&mut self, step: u64, line: &[u8]) {
        let m = &mut self.metrics;
        let Ok(numbers) = serde_json::from_slice::<Map<String, Value>>(line) else {
            m.damaged += 1;
            return;
        };
        let of = |name: &str| numbers.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        let seconds = of("step_ms") / 1e3;
        self.clock.push(step, of("tokens_per_s") * seconds, seconds);
        m.skipped += u64::from(numbers.get("skipped") == Some(&Value::Bool(true)));
        for (name, value) in numbers.iter().filter(|(name, value)| *name != "step" && (value.is_number() || value.is_null())) {
            // A rank that has just begun may not know yet how much memory it has.
            let number = value.as_f64().filter(|x| x.is_finite() && (*x > 0.0 || name != "memory_bytes"));
            match (name.as_str(), number) {
                ("loss", _) => m.loss = number,
                ("valid_loss", Some(x)) if m.best.is_none_or(|(_, best)| x < best) => m.best = Some((step, x)),
                ("tokens_per_s", Some(x)) => self.tokens_per_s.push(x),
                ("mfu", Some(x)) => self.mfu.push(x),
                ("step_ms", Some(x)) => m.seconds += x / 1e3,
                _ => {}
            }
            if !self.curves.contains_key(name) {
                let is_report = !USUAL.contains(&name.as_str());
                if is_report && self.reports == REPORTS {
                    m.left_out += 1;
                    continue;
                }
                self.reports += usize::from(is_report);
                self.curves.insert(name.clone(), Curve::new(m.width));
            }
            self.curves.get_mut(name).expect("invariant: it is there").push(step, number);
        }
    }

    fn metrics(self) -> Metrics {
        let curves = self.curves.into_iter().map(|(name, curve)| (name, curve.drawn())).collect();
        Metrics { curves, elapsed: self.clock.elapsed(), tokens_per_s: self.tokens_per_s.get(), mfu: self.mfu.get(), ..self.metrics }
    }
}
