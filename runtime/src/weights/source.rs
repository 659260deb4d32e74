//! What files and directories offer to a job, and what is found wrong when it is read.

use super::mark::Mark;
use crate::conditions::Conditions;
use crate::host::Whole;
use ir::provenance::Provenance;
use std::cell::OnceCell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Why weights could not be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum WeightsError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` is not a safetensors file: {what}", .file.display())]
    Malformed { file: PathBuf, what: String },
    /// The first tensors of each kind, how many there are more, and the likely reason.
    #[error("`{}` does not fit the model:{}", .file.display(), .what.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Mismatch { file: PathBuf, what: Vec<String> },
    #[error("`{}`: element {element} of `{tensor}` is {value}, with which nothing can be trained; take what was saved before it became so", .file.display())]
    NotFinite { file: PathBuf, tensor: String, element: u64, value: f64 },
    #[error("`{}`: element {element} of `{tensor}` is a whole number beyond 2^24 that f32, in which mcc stores all, does not hold exactly: store it in another way, or leave it out", .file.display())]
    Inexact { file: PathBuf, tensor: String, element: u64 },
    /// What is said of a directory.
    #[error("{0}")]
    Checkpoint(String),
    /// Found while it was read.
    #[error("{what}; an earlier checkpoint may be whole")]
    Damaged { what: String },
    #[error("`{}` does not say after which step it was saved, so no run can go on from it: `--init {}` starts a new one from its weights (`--save-state` writes what `--resume` reads)", .file.display(), .file.display())]
    Unmarked { file: PathBuf },
}

/// The first that was read and cannot be used.
pub(crate) enum WeightsFault {
    NotFinite {
        tensor: String,
        element: u64,
        value: f64,
    },
    /// A whole number that f32 does not hold.
    Inexact {
        tensor: String,
        element: u64,
    },
    /// Bytes that are not as they were written.
    Damaged(String),
}

/// # Errors
/// What was found wrong with a file when it was read.
pub(crate) fn sound(file: &Path, wrong: &OnceCell<WeightsFault>) -> Result<(), WeightsError> {
    match wrong.get() {
        None => Ok(()),
        Some(WeightsFault::NotFinite { tensor, element, value }) => {
            Err(WeightsError::NotFinite { file: file.to_path_buf(), tensor: tensor.clone(), element: *element, value: *value })
        }
        Some(WeightsFault::Inexact { tensor, element }) => {
            Err(WeightsError::Inexact { file: file.to_path_buf(), tensor: tensor.clone(), element: *element })
        }
        Some(WeightsFault::Damaged(what)) => Err(WeightsError::Damaged { what: what.clone() }),
    }
}

/// What a file or directory holds, and what is found when it is read.
pub(crate) struct WeightsSource {
    pub file: PathBuf,
    pub content: Content,
    pub wrong: Rc<OnceCell<WeightsFault>>,
}

/// What a file holds.
pub(crate) struct Content {
    pub tensors: Vec<FileTensor>,
    /// Where its run stood.
    pub run: Option<Mark>,
    pub model: Option<Provenance>,
    pub conditions: Option<Conditions>,
    /// Names of what is no tensor.
    pub others: Vec<String>,
}

/// A tensor that a file has.
pub(crate) struct FileTensor {
    pub name: String,
    pub shape: Vec<u64>,
    /// Values, or a description of elements that cannot be read.
    pub values: Result<Box<dyn Whole>, String>,
}
