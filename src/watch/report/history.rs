//! What a log says beside its metrics: runs, checkpoints, restarts, warnings.

use super::lines;
use super::timeline::{TimedEvent, TimedEvents, TimelineEvent};
use crate::watch::log::{Record, RunOutcome, RunStart, Stamped};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

/// The last ones, and how many there were before.
#[derive(Debug)]
pub struct Tail<T> {
    pub last: VecDeque<T>,
    pub before: u64,
}

impl<T> Default for Tail<T> {
    fn default() -> Tail<T> {
        Tail { last: VecDeque::new(), before: 0 }
    }
}

impl<T> Tail<T> {
    fn push(&mut self, one: T, most: usize) {
        if self.last.len() == most {
            self.last.pop_front();
            self.before += 1;
        }
        self.last.push_back(one);
    }

    pub fn is_empty(&self) -> bool {
        self.last.is_empty()
    }
}

/// A run, which may go on with the one before.
#[derive(Debug)]
pub struct Run {
    pub began: RunStart,
    pub time: f64,
    /// The last that it said.
    pub until: f64,
    pub end: Option<RunEnding>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RunEnding {
    /// Seconds of all runs so far.
    pub seconds_so_far: f64,
    pub step: u64,
    pub how: RunOutcome,
    pub why: Option<String>,
}

#[derive(Debug)]
pub struct Saved {
    pub time: f64,
    pub step: u64,
    pub dir: String,
    pub bytes: u64,
    pub milliseconds: f64,
    pub stalled: f64,
}

#[derive(Debug)]
pub struct Restart {
    pub time: f64,
    /// Seconds of all runs so far.
    pub seconds_so_far: f64,
    /// The last step before it.
    pub at: u64,
    pub why: String,
    pub from: Option<String>,
    pub steps: u64,
    pub seconds: f64,
    pub count: u64,
    pub most: u64,
}

#[derive(Debug)]
pub struct LoggedMessage {
    pub time: f64,
    pub text: String,
    pub times: u64,
}

#[derive(Debug, Default)]
pub struct History {
    pub runs: Tail<Run>,
    pub saved: Tail<Saved>,
    pub restarts: Tail<Restart>,
    pub notes: Tail<LoggedMessage>,
    pub damaged: u64,
    /// Seconds of all runs, of stalls and of what was done again.
    pub seconds: f64,
    pub stalled: f64,
    pub lost: f64,
    /// Events that say when steps were done.
    pub events: TimedEvents,
}

/// Runs that are kept, and of everything else.
const RUNS: usize = 100;
const OTHERS: usize = 500;
/// Bytes of a text that are kept.
const TEXT: usize = 4000;

impl History {
    /// # Errors
    /// What the file system says.
    pub fn read(name: &Path) -> io::Result<History> {
        let mut history = History::default();
        lines::each(BufReader::new(File::open(name)?), |line| {
            match line.and_then(|line| serde_json::from_slice::<Stamped>(line).ok()).filter(|s| s.time.is_finite()) {
                Some(stamped) => history.record(stamped),
                None => history.damaged += 1,
            }
        })?;
        Ok(history)
    }

    fn record(&mut self, Stamped { time, record }: Stamped) {
        if let (Some(run), false) = (self.runs.last.back_mut(), matches!(record, Record::Began(_))) {
            self.seconds += (time - run.until).max(0.0);
            run.until = run.until.max(time);
        }
        match record {
            Record::Began(began) => {
                self.event(began.first, self.seconds, TimelineEvent::Began);
                self.runs.push(Run { began: *began, time, until: time, end: None }, RUNS);
            }
            Record::Saved { step, dir, bytes, milliseconds, stalled } => {
                let waited = stalled.max(0.0) / 1e3;
                self.stalled += waited;
                self.event(step, self.seconds - milliseconds.max(0.0) / 1e3, TimelineEvent::Done { waited });
                self.saved.push(Saved { time, step, dir: clipped(dir), bytes, milliseconds, stalled }, OTHERS);
            }
            // Slow ranks are named by notes.
            Record::Ranks { step, .. } => self.event(step, self.seconds, TimelineEvent::Done { waited: 0.0 }),
            Record::Note { text } => {
                let text = clipped(text);
                match self.notes.last.iter_mut().find(|said| said.text == text) {
                    Some(said) => said.times += 1,
                    None => self.notes.push(LoggedMessage { time, text, times: 1 }, OTHERS),
                }
            }
            Record::Restarted { why, from, steps, seconds, skipped, count, most } => {
                self.lost += seconds.max(0.0);
                let left_out = if skipped > 0 { format!("; {skipped} sequences of the data are left out") } else { String::new() };
                let (why, from) = (clipped(why + &left_out), from.map(clipped));
                let base = self.base(from.as_deref());
                self.event(base, self.seconds, TimelineEvent::Restarted);
                let (at, seconds_so_far) = (base.saturating_add(steps), self.seconds);
                self.restarts.push(Restart { time, seconds_so_far, at, why, from, steps, seconds, count, most }, OTHERS);
            }
            Record::Ended { step, how, why } => {
                if how != RunOutcome::Failed {
                    self.event(step, self.seconds, TimelineEvent::Done { waited: 0.0 });
                }
                if let Some(run) = self.runs.last.back_mut() {
                    run.end = Some(RunEnding { seconds_so_far: self.seconds, step, how, why: why.map(clipped) });
                }
            }
        }
    }

    fn event(&mut self, step: u64, seconds: f64, what: TimelineEvent) {
        self.events.push(TimedEvent { step, seconds, what });
    }

    /// The step of a checkpoint; of what the run began with, that before its first.
    fn base(&self, from: Option<&str>) -> u64 {
        let saved = from.and_then(|from| self.saved.last.iter().rfind(|saved| saved.dir == from));
        saved.map(|saved| saved.step).or_else(|| Some(self.runs.last.back()?.began.first.saturating_sub(1))).unwrap_or(0)
    }

    /// The run that trains still, as far as can be told, has lasted until then.
    pub fn lasts_until(&mut self, time: f64) {
        if let Some(run) = self.runs.last.back_mut().filter(|run| run.end.is_none() && run.until < time) {
            self.seconds += time - run.until;
            run.until = time;
        }
    }
}

fn clipped(mut text: String) -> String {
    if text.len() > TEXT {
        text.truncate(text.floor_char_boundary(TEXT));
        text += " ..";
    }
    text
}
