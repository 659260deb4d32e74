//! What can be wrong with data.

use data::indexed::IndexedError;
use ir::diag::Help;
use ir::op::DType;
use ir::program::Interval;
use std::io;
use std::path::PathBuf;

/// Why data cannot feed a run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
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
    #[error(transparent)]
    Sets(Box<data::Error>),
    #[error(transparent)]
    Shards(#[from] data::shards::ShardsError),
    #[error("the validation data sets that have a loss each: {0}; --validation-set-names gives each a name of its own, as in `wiki code`")]
    Names(String),
    #[error("the data sets of {part}: {cause}")]
    Blend { part: &'static str, cause: data::blend::BlendError },
    #[error(transparent)]
    Split(data::split::SplitError),
    #[error("the split `{0}` leaves nothing for training: its weights are those of training, validation and test, as in 99,1,0")]
    Untrained(String),
    #[error("--data-path feeds one input of tokens, [batch, seq] of i32, and what derives from it; {0}: pass --data {1}=FILE.npy")]
    Inputs(String, String),
    #[error(
        "--packing puts several documents into a row, and this model does not keep them apart: compile it with -D packed=true, or have its text take `documents(tokens, separator)` for its attention"
    )]
    Joined,
    #[error(
        "some labels count for nothing with --packing and --loss-mask, which are -100 then, and `{0}` does not take that: let the text ignore labels of -100, as `token_loss` does"
    )]
    Counted(String),
    #[error("--loss-mask says which labels count, and this model takes none that follow from `{0}`, as `next({0})` does")]
    Unlabelled(String),
    #[error("--data-path needs to know how many samples are drawn: pass --steps N, as the text's schedule has no steps")]
    Unsized,
    #[error("seed {0}, by which samples are shuffled, is not below 2^32")]
    Seed(u64),
    #[error(
        "the data sets of {part} have {has} samples in one epoch, and the run takes {takes}: give each a weight, as in 1 A 1 B, to read them more than once, or run fewer steps"
    )]
    Short { part: &'static str, has: u64, takes: u64 },
    #[error(transparent)]
    Sample(Box<WrongToken>),
    #[error("`{}` has {available} steps; step {step} was asked for", .file.display())]
    Exhausted { file: PathBuf, available: u64, step: u64 },
}

/// A token of a data set that its input does not take.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{}`, byte {byte}: token {token} of document {document} is {value}, in sample {sample} of {part}, but `{input}` takes {}",
    .file.display(),
    list(.takes)
)]
pub struct WrongToken {
    pub file: PathBuf,
    pub byte: u64,
    /// Number of the token in its document, which is a sequence of the file.
    pub token: u64,
    pub document: u32,
    pub sample: u64,
    pub part: &'static str,
    pub value: f64,
    pub input: String,
    pub takes: Vec<Interval>,
}

impl From<data::Error> for DataError {
    fn from(error: data::Error) -> DataError {
        DataError::Sets(Box::new(error))
    }
}

impl DataError {
    /// A way out that the message does not name.
    pub fn help(&self) -> Option<Help> {
        match self {
            DataError::Token { input, value, takes, .. }
            | DataError::Derived { input, value, takes, .. }
            | DataError::Default { input, value, takes } => Some(taking(input, *value, takes)),
            DataError::Sample(wrong) => Some(taking(&wrong.input, wrong.value, &wrong.takes)),
            DataError::Sets(error) => misread(error),
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
            | DataError::Shards(_)
            | DataError::Names(_)
            | DataError::Blend { .. }
            | DataError::Split(_)
            | DataError::Untrained(_)
            | DataError::Inputs(..)
            | DataError::Joined
            | DataError::Counted(_)
            | DataError::Unlabelled(_)
            | DataError::Unsized
            | DataError::Seed(_)
            | DataError::Short { .. }
            | DataError::Exhausted { .. } => None,
        }
    }
}

/// What was read as a prefix of a data set that is not there, and is something else.
fn misread(error: &data::Error) -> Option<Help> {
    let data::Error::Indexed(IndexedError::Missing(prefix)) = error else { return None };
    if prefix.is_dir() {
        return Some(Help::from(format!("it is a directory: '{}' stands for all data sets in it", prefix.join("*").display())));
    }
    if prefix.is_file() {
        let name = prefix.display();
        return Some(Help::from(format!(
            "`{name}` is no data set: `--data {name}` reads a text or a file of tokens, `mcc data tokenize` makes data sets of texts"
        )));
    }
    let name = prefix.file_name()?.to_str().filter(|name| name.parse::<f64>().is_ok())?;
    Some(Help::from(format!("`{name}` is no weight here, as not each data set has one: weights and prefixes come in turn, as in 0.7 A 0.3 B")))
}

/// A way to have an input take a value: a greater size for one that is beyond all, such as a token beyond the vocabulary.
fn taking(input: &str, value: f64, takes: &[Interval]) -> Help {
    let any = format!("if any value of `{input}` is meant, the text says so: `@any` at the end of its `input`");
    match takes.iter().map(|t| f64::from(t.most)).reduce(f64::max) {
        Some(most) if value > most => Help::from(format!(
            "values are below the size of what they look up, {}: compile with the size of what wrote the data (a tokenizer's \
             vocabulary), at least -D vocab={}; {any}",
            most + 1.0,
            value + 1.0
        )),
        Some(_) | None => Help::from(any),
    }
}

/// `-100 or 0 to 255`.
fn list(takes: &[Interval]) -> String {
    if takes.is_empty() { "nothing".into() } else { takes.iter().map(Interval::to_string).collect::<Vec<_>>().join(" or ") }
}
