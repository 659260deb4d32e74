//! Why text does not become tokens.

use crate::indexed::IndexedError;
use std::io;
use std::path::PathBuf;

/// Why text does not become tokens.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum TextError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    #[error("no text is named")]
    Nothing,
    #[error("`{}`: {what}; read are JSON lines (.jsonl, .json, .ndjson) and plain text (.txt), also with .gz or .zst, and .parquet", .file.display())]
    Kind { file: PathBuf, what: String },
    #[error("`{}`: a plain text has no prompts; those are fields of JSON lines or columns of Parquet", .0.display())]
    Promptless(PathBuf),
    #[error("`{}`, line {line}{}: {what}", .file.display(), in_column(*.column))]
    Line { file: PathBuf, line: u64, column: Option<usize>, what: String },
    #[error("`{}`: {what}", .file.display())]
    Table { file: PathBuf, what: String },
    #[error("`{}`, row {row} of row group {group}, both counted from 0: {what}", .file.display())]
    Row { file: PathBuf, group: u64, row: u64, what: String },
    #[error("`{}`: it is no tokenizer that can be read: {what}; what is meant is the tokenizer.json of Hugging Face's tokenizers", .file.display())]
    Tokenizer { file: PathBuf, what: String },
    #[error("`{}`: {what}", .file.display())]
    Template { file: PathBuf, what: String },
    #[error("`{}` has no messages; those are a field of JSON lines", .0.display())]
    Unspoken(PathBuf),
    #[error("`{}` has no token `{token}`; its tokens are listed under `model.vocab` and `added_tokens`", .file.display())]
    Token { file: PathBuf, token: String },
    #[error(
        "which token of `{}` ends a document is not known: put the tokenizer_config.json, which says it as `eos_token`, beside it, or name the token",
        .0.display()
    )]
    End(PathBuf),
    #[error("`{}` is there already; name another prefix, or ask for it to be replaced", .0.display())]
    Exists(PathBuf),
    #[error("`{}` is of another job, which is not finished and has {what}", .file.display())]
    Other { file: PathBuf, what: String },
    #[error("a tokenizer of {tokens} tokens; one of bytes has 256 and a token for each special one, so {least} or more")]
    Small { tokens: usize, least: usize },
}

fn in_column(column: Option<usize>) -> String {
    column.map_or(String::new(), |c| format!(", column {c}"))
}
