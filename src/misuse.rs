//! Exit code 2: which errors are of the command line, though they are found only beside the text, the artifact
//! or the data.
//!
//! What a file holds is none of them: a text that is wrong, a file that is missing or damaged, and all that
//! happens in a run end with 1.

use crate::failure::Failure;
use codegen::target::TargetError;
use convert::ConvertError;
use ir::diag::{Diagnostic, Severity};
use mcc::targets::TargetsError;
use runtime::data::DataError;
use runtime::launch::RunError;
use runtime::world::WorldError;

/// A command line that means nothing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Misuse(pub String);

/// `anyhow!` of a [`Misuse`].
macro_rules! misuse {
    ($($words:tt)*) => {
        anyhow::Error::from($crate::misuse::Misuse(format!($($words)*)))
    };
}
pub(crate) use misuse;

/// Diagnostics that are about flags: a setting that is not there or has no value (E0406 to E0408), a mesh,
/// batch or schedule that cannot be (E0204, E0208, E063x), flags that contradict the text or the target (E0642,
/// E070x).
const FLAGS: [&str; 14] =
    ["E0204", "E0208", "E0406", "E0407", "E0408", "E0633", "E0634", "E0635", "E0637", "E0638", "E0642", "E0702", "E0703", "E0704"];

/// Why a command ends whose errors were shown.
pub fn shown(diagnostics: &[Diagnostic]) -> Failure {
    let mut errors = diagnostics.iter().filter(|d| d.severity == Severity::Error).peekable();
    let are_flags = errors.peek().is_some() && errors.all(|d| FLAGS.contains(&d.code.as_str()));
    if are_flags { Failure::Misused } else { Failure::Reported }
}

/// Whether an error is one of the command line.
pub fn is(error: &anyhow::Error) -> bool {
    let has = |e: &(dyn std::error::Error + 'static)| {
        e.is::<Misuse>()
            || e.is::<TargetsError>()
            || e.is::<TargetError>()
            || e.downcast_ref().is_some_and(of_run)
            || e.downcast_ref().is_some_and(of_data)
            || e.downcast_ref().is_some_and(of_world)
            || e.downcast_ref().is_some_and(of_conversion)
    };
    error.chain().any(has)
}

fn of_run(error: &RunError) -> bool {
    match error {
        RunError::Device { .. }
        | RunError::NoDisk { .. }
        | RunError::Exchanges(_)
        | RunError::Mpi(_)
        | RunError::Seed(_)
        | RunError::Pattern { .. } => true,
        RunError::Data(e) => of_data(e),
        RunError::World(e) => of_world(e),
        // These errors are about what is there or what happened, not about the command line.
        RunError::Meeting(_)
        | RunError::Network(_)
        | RunError::Reference(_)
        | RunError::Done { .. }
        | RunError::Changed { .. }
        | RunError::NoGpu { .. }
        | RunError::Weights(_)
        | RunError::Io { .. }
        | RunError::Exists { .. }
        | RunError::Foreign { .. }
        | RunError::Space { .. }
        | RunError::Unsaved { .. }
        | RunError::Uncheckpointed { .. }
        | RunError::NoDirectory { .. }
        | RunError::Later { .. }
        | RunError::Busy { .. }
        | RunError::Catalog(_)
        | RunError::Uneven(_)
        | RunError::Memory { .. }
        | RunError::Start { .. }
        | RunError::Ranks(_)
        | RunError::Skips { .. }
        | RunError::Untrained { .. }
        | RunError::Spike { .. }
        | RunError::Replicas { .. }
        | RunError::NonFinite { .. } => false,
    }
}

/// `--data` that is missing, or names inputs wrongly.
fn of_data(error: &DataError) -> bool {
    match error {
        DataError::Unknown { .. }
        | DataError::Ambiguous { .. }
        | DataError::Twice(_)
        | DataError::Missing { .. }
        | DataError::Said(_)
        | DataError::Blend { .. }
        | DataError::Names(_)
        | DataError::Split(_)
        | DataError::Untrained(_)
        | DataError::Inputs(..)
        | DataError::Joined
        | DataError::Counted(_)
        | DataError::Unlabelled(_)
        | DataError::Unsized
        | DataError::Seed(_) => true,
        DataError::Io { .. }
        | DataError::Malformed { .. }
        | DataError::Token { .. }
        | DataError::Derived { .. }
        | DataError::NotFinite { .. }
        | DataError::Beyond { .. }
        | DataError::Default { .. }
        | DataError::Midst { .. }
        | DataError::Sets(_)
        | DataError::Shards(_)
        | DataError::Short { .. }
        | DataError::Sample(_)
        | DataError::Exhausted { .. } => false,
    }
}

fn of_world(error: &WorldError) -> bool {
    match error {
        WorldError::Meeting(_) => true,
        // These values come from the environment.
        WorldError::Value { .. } | WorldError::Range { .. } | WorldError::Missing { .. } | WorldError::Hosts(_) | WorldError::Size { .. } => false,
    }
}

fn of_conversion(error: &ConvertError) -> bool {
    match error {
        ConvertError::Unexplained(_) | ConvertError::Contradiction { .. } => true,
        ConvertError::Io { .. }
        | ConvertError::Malformed { .. }
        | ConvertError::Config { .. }
        | ConvertError::Unsaid(_)
        | ConvertError::Tensors { .. }
        | ConvertError::Text { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_are_all_of_flags_are_a_misuse() {
        let code = |d: fn(&str, &str) -> Diagnostic, codes: &[&str]| codes.iter().map(|c| d(c, "wrong")).collect::<Vec<_>>();
        let error = |codes: &[&str]| code(|c, text| Diagnostic::error(c, text), codes);
        let is_misuse = |all: &[Diagnostic]| matches!(shown(all), Failure::Misused);
        assert!(is_misuse(&error(&["E0204"])) && is_misuse(&error(&FLAGS)));
        assert!(!is_misuse(&error(&["E0204", "E0205"])) && !is_misuse(&[]));
        let warned = code(|c, text| Diagnostic::warning(c, text), &["W0401"]);
        assert!(is_misuse(&[warned, error(&["E0407"])].concat()));
        let page = include_str!("../docs/errors.md");
        let listed = page.split_once("errors which are all about flags").and_then(|(_, rest)| rest.split_once("\n\n")).map_or("", |l| l.0);
        let codes: Vec<&str> = listed.split(|c: char| !c.is_alphanumeric()).filter(|w| w.starts_with("E0")).collect();
        assert_eq!(codes, FLAGS);
    }

    #[test]
    fn errors_of_a_run_are_told_from_those_of_its_flags() {
        let lacking = DataError::Missing { input: "x".into(), how: "pass --data".into() };
        assert!(is(&RunError::Data(lacking).into()));
        assert!(is(&misuse!("leave it out").context("a plan")));
        assert!(!is(&RunError::Data(DataError::Midst { sequences: 1, batch: 2 }).into()));
        assert!(!is(&RunError::Exists { file: "x".into() }.into()));
        assert!(!is(&anyhow::anyhow!("the disk is full")));
    }
}
