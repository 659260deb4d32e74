//! What a run leaves for whoever watches it or looks at it later: a directory with all that happened, and
//! TensorBoard's events. It never ends a run: what cannot be written is said once.

mod clock;
mod log;
mod profile;
pub mod report;
mod tensorboard;

pub use log::{METRICS, Record, RunOutcome, RunStart};

use crate::cli::{self, RunArgs};
use crate::print::note;
use anyhow::{Context, anyhow};
use log::{Log, Stamped};
use runtime::artifact::Artifact;
use runtime::launch::{Existing, Note, RunEnd, RunError, RunEvent, Summary, replaceable};
use runtime::lines::ExistingLines;
use runtime::profile::breakdown::Breakdown;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tensorboard::TensorBoard;

/// Nothing is opened before the first step: a run that does not begin changes nothing.
pub struct Watch<'a> {
    log: File<'a, Log>,
    board: File<'a, TensorBoard>,
    artifact: &'a Artifact,
    earlier: ExistingLines,
    /// The last step that was done.
    last: u64,
}

/// A file that may be asked for, not open yet, or no longer.
enum File<'a, F> {
    None,
    Named(&'a Path),
    Open(F),
}

impl<'a, F> File<'a, F> {
    fn asked(dir: &'a Option<PathBuf>) -> Self {
        dir.as_ref().map_or(File::None, |dir| File::Named(dir))
    }

    /// Opens it if it is not, and writes; what fails is said.
    fn write(&mut self, open: impl FnOnce(&Path) -> io::Result<F>, write: impl FnOnce(&mut F) -> io::Result<()>) {
        if let File::Named(dir) = self {
            *self = open(dir).map_or_else(|e| File::failed(&dir.display(), &e), File::Open);
        }
        if let File::Open(file) = self
            && let Err(e) = write(file)
        {
            *self = File::failed(&"what is logged", &e);
        }
    }

    fn failed(what: &dyn std::fmt::Display, cause: &io::Error) -> Self {
        note!("warning: cannot write {what}: {cause}; training goes on");
        File::None
    }
}

/// The file of metrics of a run, which is in its log's directory unless it is named.
pub fn metrics(args: &RunArgs) -> Option<PathBuf> {
    args.metrics.clone().or_else(|| Some(args.log_dir.as_ref()?.join(METRICS)))
}

impl<'a> Watch<'a> {
    /// Makes directories and looks whether something would be replaced that is to stay.
    ///
    /// # Errors
    /// Such a file, or what the file system says.
    pub fn new(args: &'a RunArgs, artifact: &'a Artifact, earlier: ExistingLines) -> anyhow::Result<Watch<'a>> {
        let existing = if args.force || earlier == ExistingLines::Keep { Existing::Replace } else { Existing::Refuse };
        for dir in args.log_dir.iter().chain(&args.tensorboard_dir) {
            if fs::metadata(dir).is_ok_and(|about| !about.is_dir()) {
                return Err(anyhow!("`{}` is a file, and a directory is asked for", dir.display()));
            }
            fs::create_dir_all(dir).with_context(|| format!("cannot make `{}`", dir.display()))?;
        }
        if let Some(dir) = &args.log_dir {
            replaceable(&dir.join(log::RUN), existing)?;
            replaceable(&dir.join(profile::PROFILE), if args.profile { existing } else { Existing::Replace })?;
        }
        Ok(Watch { log: File::asked(&args.log_dir), board: File::asked(&args.tensorboard_dir), artifact, earlier, last: 0 })
    }

    /// What a run says of itself.
    pub fn event(&mut self, event: &RunEvent) {
        let first = if let RunEvent::Step(p) = event { p.step } else { 0 };
        match event {
            RunEvent::Step(p) => {
                self.last = p.step;
                self.board.write(|dir| TensorBoard::create(dir, first), |board| board.step(p));
                self.open(p.steps, first);
            }
            RunEvent::Saved(s) => self.record(Record::Saved {
                step: s.step,
                dir: s.dir.display().to_string(),
                bytes: s.bytes,
                milliseconds: s.milliseconds,
                stalled: s.stalled,
            }),
            RunEvent::Ranks(t) => self.record(Record::Ranks { step: t.step, steps: t.steps, busy_ms: t.busy.clone() }),
            RunEvent::Note(Note::Detail(_)) => {}
            RunEvent::Note(note) => self.record(Record::Note { text: note.text().to_owned() }),
        }
    }

    /// How it ended.
    pub fn ended(&mut self, outcome: &Result<Summary, RunError>) {
        let (step, how, why) = match outcome {
            Ok(summary) => (summary.steps, if summary.ended == RunEnd::Early { RunOutcome::Early } else { RunOutcome::Whole }, None),
            Err(RunError::Ranks(failure)) => (self.last, RunOutcome::Failed, Some(failure.spelled(cli::help))),
            Err(e) => (self.last, RunOutcome::Failed, Some(e.to_string())),
        };
        self.record(Record::Ended { step, how, why });
    }

    /// Where the time of its steps went.
    pub fn profile(dir: &Path, artifact: &Artifact, breakdown: &Breakdown) {
        if let Err(e) = profile::write(dir, &artifact.id, breakdown) {
            note!("warning: cannot write `{}`: {e}", dir.join(profile::PROFILE).display());
        }
    }

    /// Writes the first record, if none was.
    fn open(&mut self, steps: u64, first: u64) {
        let (artifact, earlier) = (self.artifact, self.earlier);
        let open = |dir: &Path| {
            let mut log = Log::create(dir, earlier)?;
            log.write(&Stamped::now(Record::Began(Box::new(RunStart::new(artifact, steps, first)))))?;
            Ok(log)
        };
        self.log.write(open, |_| Ok(()));
    }

    /// Something happened; before the first step nothing is kept.
    pub fn record(&mut self, record: Record) {
        if let File::Open(log) = &mut self.log
            && let Err(e) = log.write(&Stamped::now(record))
        {
            self.log = File::failed(&"what is logged", &e);
        }
    }
}
