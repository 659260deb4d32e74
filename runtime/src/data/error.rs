//! What can be wrong with data.

use ir::diag::Help;
use ir::op::DType;
use ir::program::Interval;
use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}`: {what}", .file.display())]
    Malformed { file: PathBuf, what: String },
    #[error("the model has no input `{name}`; its inputs are {}", .known.join(", "))]
    Unknown { name: String, known: Vec<String> },
    #[error("`{}` could feed any of {}; say which: NAME={}", .file.display(), .inputs.join(", "), .file.display())]
    Ambiguous { file: PathBuf, inputs: Vec<String> },
    #[error("input `{0}` is fed twice")]
    Twice(String),
    #[error("no data for input `{input}`: {how}")]
    Missing { input: String, how: String },
    #[error("`{}`: element {position} is {value}, but `{input}` takes {}", .file.display(), list(.takes))]
    Token { file: PathBuf, position: u64, value: f64, input: String, takes: Vec<Interval> },
    #[error("`{}`: at element {position} `{input}` is {value}, but it takes {}", .file.display(), list(.takes))]
    Derived { file: PathBuf, position: u64, value: f64, input: String, takes: Vec<Interval> },
    #[error("`{}`: element {position} is {value}, and `{input}` takes finite numbers alone", .file.display())]
    NotFinite { file: PathBuf, position: u64, value: f64, input: String },
    #[error("`{}`: element {position} is {value:e}, beyond the numbers of {}, in which `{input}` is stored", .file.display(), .dtype.name())]
    Beyond { file: PathBuf, position: u64, value: f64, input: String, dtype: DType },
    #[error("without a file `{input}` holds {value} by the model's text, but it takes {}: pass --data {input}=FILE.npy", list(.takes))]
    Default { input: String, value: f64, takes: Vec<Interval> },
    #[error("--bytes and --data-dtype are for files that do not say what they hold; of {}, all do", .0.iter().map(|f| format!("`{}`", f.display())).collect::<Vec<_>>().join(", "))]
    Said(Vec<PathBuf>),
    #[error(
        "{sequences} sequences were read, which is in the midst of a step of {batch}: arrays have whole steps; --init begins again with the weights"
    )]
    Midst { sequences: u64, batch: u64 },
    #[error("`{}` has {available} steps; step {step} was asked for", .file.display())]
    Exhausted { file: PathBuf, available: u64, step: u64 },
}

impl DataError {
    /// A way out that the message does not name.
    pub fn help(&self) -> Option<Help> {
        match self {
            DataError::Token { input, .. } | DataError::Derived { input, .. } | DataError::Default { input, .. } => {
                Some(Help::from(format!("if any value of `{input}` is meant, the text says so: `@any` at the end of its `input`")))
            }
            DataError::Io { .. }
            | DataError::Malformed { .. }
            | DataError::NotFinite { .. }
            | DataError::Beyond { .. }
            | DataError::Unknown { .. }
            | DataError::Ambiguous { .. }
            | DataError::Twice(_)
            | DataError::Missing { .. }
            | DataError::Said(_)
            | DataError::Midst { .. }
            | DataError::Exhausted { .. } => None,
        }
    }
}

/// `-100 or 0 to 255`.
fn list(takes: &[Interval]) -> String {
    if takes.is_empty() { "nothing".into() } else { takes.iter().map(Interval::to_string).collect::<Vec<_>>().join(" or ") }
}
