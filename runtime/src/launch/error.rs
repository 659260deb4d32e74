//! Why there is no run, or why it ended.

use crate::conditions::Change;
use crate::data::DataError;
use crate::gpu::cuda::Unavailable;
use crate::weights::WeightsError;
use crate::world::WorldError;
use ir::diag::Help;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a run does not begin, or ends without all that it was asked for.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum RunError {
    #[error(transparent)]
    World(#[from] WorldError),
    /// Why ranks that were started one by one did not come together.
    #[error("{0}")]
    Meeting(String),
    #[error("ranks of other machines could not be reached: {0}")]
    Network(io::Error),
    #[error("`{}` was saved after step {done} and {steps} steps are asked for, counted from the first: nothing is left to do", .file.display())]
    Done { file: PathBuf, done: u64, steps: u64 },
    #[error(
        "this run cannot become what that of `{}` would have been:{}\n\
         --allow-changed {} goes on with what is here",
        .file.display(),
        .changes.iter().map(|(_, what)| format!("\n  {what}")).collect::<String>(),
        .changes.iter().map(|(change, _)| change.name()).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(",")
    )]
    Changed { file: PathBuf, changes: Vec<(Change, String)> },
    #[error("`{}` is compiled for {target}, which the device `{device}` does not run: {can} does", .dir.display())]
    Device { dir: PathBuf, target: String, device: &'static str, can: String },
    #[error("`{}` is compiled for {target}, but {cause}; --device emulated runs it slowly without one", .dir.display())]
    NoGpu { dir: PathBuf, target: String, cause: Unavailable },
    #[error("ranks cannot exchange through NCCL: {0}")]
    Exchanges(String),
    #[error(
        "parameters or optimizer states of `{}` rest on a disk, {bytes} bytes of a rank: --offload-to names a directory for them, best on a fast drive of this machine",
        .dir.display()
    )]
    NoDisk { dir: PathBuf, bytes: u64 },
    #[error("ranks cannot exchange by MPI: {0}")]
    Mpi(String),
    #[error("the first step has no reference: {0}")]
    Reference(String),
    #[error("seed {0} is not below 2^53")]
    Seed(u64),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` exists: --force replaces it, another name keeps it", .file.display())]
    Exists { file: PathBuf },
    #[error("`{}` holds something else than metrics, to which a resumed run would append: name another file", .file.display())]
    Foreign { file: PathBuf },
    #[error(
        "`{}` takes {bytes} bytes, which cannot be reserved: {cause}; {free} bytes are free there. Nothing was trained",
        .file.display()
    )]
    Space { file: PathBuf, bytes: u64, free: String, cause: io::Error },
    #[error("`{}` could not be saved: {cause}; what it should hold is lost, and a file of that name that was there before stays", .file.display())]
    Unsaved { file: PathBuf, cause: io::Error },
    #[error("the last checkpoint, `{}`, could not be written: {why}; earlier ones stay", .dir.display())]
    Uncheckpointed { dir: PathBuf, why: String },
    #[error("`{}` is a file, and --save names a directory of checkpoints; --save-weights writes weights alone to a file", .file.display())]
    NoDirectory { file: PathBuf },
    #[error(
        "`{}` has checkpoints up to step {last}, {}; another directory keeps them, --force replaces them when there is a new one",
        .dir.display(),
        match .own {
            Some(step) => format!("later ones than step {step}, from which this run goes on"),
            None => "from which this run does not go on (--load does, and --resume auto)".into(),
        }
    )]
    Later { dir: PathBuf, last: u64, own: Option<u64> },
    #[error("another run is saving its checkpoints in `{}`: name another directory", .dir.display())]
    Busy { dir: PathBuf },
    #[error("ranks would not write each number once: {0}; this is a bug in mcc, or the artifact was not made by it")]
    Catalog(String),
    #[error("ranks ended after different steps ({}), so nothing is saved; this is a bug in mcc", .0.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))]
    Uneven(BTreeSet<u64>),
    #[error("{bytes} bytes of memory that the ranks share could not be had: {cause}")]
    Memory { bytes: u64, cause: io::Error },
    #[error("`{}` could not be started: {cause}", .binary.display())]
    Start { binary: PathBuf, cause: io::Error },
    #[error("{0}")]
    Ranks(RunFailure),
    #[error(
        "{skips} steps in a row were skipped by step {step}, as loss or gradient norm was not finite, and --max-skips allows {most}. Nothing is saved; \
         --on-nonfinite stop says where such numbers come from"
    )]
    Skips { step: u64, skips: u64, most: u64 },
    #[error(
        "nothing was trained: loss or gradient norm was not finite in all of {skips} steps. Nothing is saved; \
         --on-nonfinite stop says where such numbers come from"
    )]
    Untrained { skips: u64 },
    #[error("`--allow-missing {pattern}` fits no parameter of the model: `*` stands for any text, and numbers of layers may be left out")]
    Pattern { pattern: String },
    #[error("the loss of step {step} jumped to {loss:.4} from about {usual:.4}")]
    Spike { step: u64, loss: f64, usual: f64 },
    #[error(
        "after step {step}, {groups} hold different numbers of {tensor}, which should be the same to the bit ({differ} of {parts} parts that several ranks \
         hold differ); {}",
        .same.map_or("they were not compared before".into(), |same| {
            format!("they were the same after step {same}, and checkpoints of later steps may be wrong")
        })
    )]
    Replicas {
        step: u64,
        tensor: String,
        /// Ranks that hold the same, the most first.
        groups: String,
        differ: usize,
        parts: usize,
        same: Option<u64>,
    },
    #[error("step {step}: {} is not finite; {}", .values.join(", "), .blame)]
    NonFinite { step: u64, values: Vec<String>, blame: String },
}

/// Why the ranks of a run could not go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFailure {
    /// What went wrong, in words for the user.
    pub reason: String,
    /// What may keep it from happening again.
    pub help: Option<Help>,
    /// Which rank was waiting for which.
    pub waiting: Vec<String>,
}

impl RunFailure {
    /// A failure with this reason, no help, and nobody who waits.
    pub fn new(reason: impl Into<String>) -> RunFailure {
        RunFailure { reason: reason.into(), help: None, waiting: vec![] }
    }

    /// As a text; `spell` says how the options of a way out are written.
    pub fn spelled(&self, spell: impl Fn(&Help) -> String) -> String {
        let help = self.help.iter().map(|h| format!("; {}", spell(h)));
        let waiting = self.waiting.iter().map(|w| format!("\n  {w}"));
        [self.reason.clone()].into_iter().chain(help).chain(waiting).collect()
    }
}

/// With the names that options have in [`Options`](ir::options::Options).
impl fmt::Display for RunFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spelled(Help::to_string))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::options::OptionName;

    #[test]
    fn a_way_out_follows_the_reason_as_it_is_spelled() {
        let help = Help::from("a greater ").option(OptionName::MoeBuffer).and(" makes room for more");
        let failure = RunFailure { help: Some(help), waiting: vec!["rank 0 waits".into()], ..RunFailure::new("9 is more than 8: rows") };
        assert_eq!(failure.to_string(), "9 is more than 8: rows; a greater moe_buffer makes room for more\n  rank 0 waits");
        assert_eq!(failure.spelled(|_| "--flags".into()), "9 is more than 8: rows; --flags\n  rank 0 waits");
    }
}
