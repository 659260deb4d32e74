//! Foreign checkpoints to model text and weights of mcc, and back.
//!
//! [`import`] reads a Hugging Face directory (`config.json` and safetensors) and writes `model.mdl`,
//! `weights.safetensors`, a copy of the `config.json`, and `dtypes.json`, which says of which type the tensors were;
//! [`import_as`] reads the tensors for a text of the user's; [`export`] goes back, with every tensor byte for byte as
//! it was.
//!
//! What is specific to a kind of model is data: its text in `models/`, whose `weights hf` section says how the
//! foreign tensors are named and laid out, and the table of its config's fields in [`family`].
//!
//! **Invariant:** nothing in here prints or reads the environment, and no file appears in an output directory before all of them are
//! complete.

mod check;
mod config;
mod copy;
mod dtypes;
mod export;
mod family;
mod header;
mod import;
mod layer_types;
mod layout;
#[cfg(test)]
mod page;
mod quantised;
mod rotary;
mod staging;
mod tensors;

pub use dtypes::{DTYPES, Float};
pub use export::{Exported, export, export_with};
pub use import::{CONFIG, Imported, MODEL, WEIGHTS, import, import_as};
pub use layout::mistakes;
pub use tensors::{WHOLE, norms};

use ir::diag::{Diagnostic, Sources};
use std::path::{Path, PathBuf};

/// Why nothing was converted. No file was written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ConvertError {
    #[error("`{}`: {cause}", .path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("`{}` {what}", .path.display())]
    Malformed { path: PathBuf, what: String },
    /// Fields that are missing, or that ask for a computation which the model text does not have.
    #[error("`{}` describes a model that cannot be imported:{}", .path.display(), list(.what))]
    Config { path: PathBuf, what: Vec<String> },
    /// Settings of an exported model that no architecture's config can say.
    #[error(
        "no config.json can be written for this model, as no architecture that mcc knows computes the same:{}\nA model with another name than one of \
         models/ and a section `weights hf` is exported without a config: `model my_llama(..)`, and `mcc export hf --model FILE.mdl`",
        list(.0)
    )]
    Unsaid(Vec<String>),
    /// Tensors that are missing, unread, of another shape or dtype.
    #[error("the tensors of `{}` do not fit the model:{}", .path.display(), list(.what))]
    Tensors { path: PathBuf, what: Vec<String> },
    /// Weights that another program has written.
    #[error("`{}` does not say which model it is of, as weights that mcc writes do: name the text with --model, and its settings with -D", .0.display())]
    Unexplained(PathBuf),
    /// A setting that was given is not that of the weights.
    #[error("`{}` was saved with {name} = {saved}, `-D {name}={given}` says otherwise: leave it out", .path.display())]
    Contradiction { path: PathBuf, name: String, saved: String, given: String },
    /// The model text is wrong; to be rendered with the sources.
    #[error("the model text has {} error(s)", .diagnostics.len())]
    Text { sources: Sources, diagnostics: Vec<Diagnostic> },
}

impl ConvertError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> ConvertError {
        let path = path.to_path_buf();
        move |cause| ConvertError::Io { path, cause }
    }
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}
