//! What happened in a run, a line each: beside its metrics, all that a report is made of.

use super::clock::now;
use super::profile::PROFILE;
use passes::report::footprint::Footprint;
use runtime::artifact::Artifact;
use runtime::launch;
use runtime::lines::{ExistingLines, Lines};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// The file of steps.
pub const METRICS: &str = "metrics.jsonl";
/// The file of everything else.
pub const RUN: &str = "run.jsonl";

/// A record, and when it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stamped {
    /// Seconds since 1970.
    pub time: f64,
    #[serde(flatten)]
    pub record: Record,
}

impl Stamped {
    pub fn now(record: Record) -> Stamped {
        Stamped { time: now(), record }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Record {
    /// At the first step of a run, or of one that goes on.
    Began(Box<RunStart>),
    Saved {
        step: u64,
        dir: String,
        bytes: u64,
        /// From the step's end until it was complete.
        milliseconds: f64,
        /// How long a rank did nothing else.
        stalled: f64,
    },
    /// Of each rank, means over so many steps up to this one: milliseconds of the passes, and of updates, in
    /// which its kernels did not stand still for other ranks.
    Ranks { step: u64, steps: u64, busy_ms: Vec<[f64; 2]> },
    /// A warning or a remark.
    Note { text: String },
    /// Ranks failed and all start again.
    Restarted {
        why: String,
        /// The checkpoint from which; none is the beginning.
        from: Option<String>,
        /// Done again.
        steps: u64,
        seconds: f64,
        /// Sequences of the data that are left out, as a loss jumped.
        #[serde(default)]
        skipped: u64,
        /// This restart, and how many there may be.
        count: u64,
        most: u64,
    },
    Ended {
        /// After this step.
        step: u64,
        how: RunOutcome,
        why: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    Whole,
    /// The run ended when asked to, with everything saved.
    Early,
    Failed,
}

/// The start of a run: what runs, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// mcc's version.
    pub mcc: String,
    /// The words of the command line, behind `mcc`.
    pub command: Vec<String>,
    pub artifact: String,
    pub id: String,
    pub model: String,
    pub target: String,
    /// Axes with their sizes, outermost first.
    pub mesh: Vec<(String, u64)>,
    pub ranks: u64,
    /// Elements of all.
    pub parameters: u64,
    /// Sequences of a step, and microbatches that a data-parallel rank makes of its own.
    pub batch: u64,
    pub microbatches: u64,
    pub host: String,
    /// The first step of this run, and the last that it was to have.
    pub first: u64,
    pub steps: u64,
    /// Planned bytes of a rank of each pipeline stage, by what they are for.
    pub memory: Vec<BTreeMap<String, u64>>,
}

impl RunStart {
    pub fn new(artifact: &Artifact, steps: u64, first: u64) -> RunStart {
        let (job, manifest) = (&artifact.job, &artifact.manifest);
        let footprint = |stage: usize| {
            let footprint = Footprint::of(job, stage);
            let mut bytes: BTreeMap<String, u64> = footprint.bytes.iter().map(|(kind, n)| (kind.name().to_owned(), *n)).collect();
            bytes.extend(footprint.host.iter().map(|(kind, n)| (format!("{} on the host", kind.name()), *n)));
            bytes.extend(footprint.disk.iter().map(|(kind, n)| (format!("{} on a disk", kind.name()), *n)));
            bytes.retain(|_, n| *n > 0);
            bytes
        };
        RunStart {
            mcc: env!("CARGO_PKG_VERSION").into(),
            command: std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect(),
            artifact: artifact.dir.display().to_string(),
            id: artifact.id.clone(),
            model: manifest.model.clone(),
            target: manifest.target.to_string(),
            mesh: manifest.mesh.clone(),
            ranks: manifest.ranks,
            parameters: job.parameters(),
            batch: job.global_batch,
            microbatches: job.microbatches,
            host: launch::host(),
            first,
            steps,
            memory: (0..job.stages.len()).map(footprint).collect(),
        }
    }
}

/// The file, which goes on where one is and the run does.
pub struct Log(Lines);

impl Log {
    pub fn create(dir: &Path, earlier: ExistingLines) -> io::Result<Log> {
        if earlier == ExistingLines::Replace {
            // The profile belongs to the earlier run.
            let _ = fs::remove_file(dir.join(PROFILE));
        }
        Lines::create(&dir.join(RUN), earlier).map(Log)
    }

    pub fn write(&mut self, record: &Stamped) -> io::Result<()> {
        self.0.write(record).map_or(Ok(()), Err)
    }
}
