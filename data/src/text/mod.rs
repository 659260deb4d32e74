//! Text to data sets of tokens, as Megatron's `tools/preprocess_data.py` makes them, and new tokenizers.
//!
//! | file | does |
//! |---|---|
//! | `documents.rs` | reads documents from JSON lines and plain text, compressed or not, and from Parquet |
//! | `parquet/` | a column of a Parquet file, row by row |
//! | `tokenizer.rs` | a `tokenizer.json`, and which of its tokens ends a document |
//! | `tokenize.rs` | all documents to tokens, on all cores, in order |
//! | `journal.rs` | what an interrupted one goes on from |
//! | `error.rs` | what can be wrong |
//! | `train.rs` | a byte-level BPE tokenizer of documents |

mod documents;
mod error;
mod journal;
mod parquet;
mod tokenize;
mod tokenizer;
mod train;

pub use documents::{LONGEST, Position};
pub use error::TextError;
pub use tokenize::{Begin, Existing, Outcome, Progress, Request, Summary, tokenize};
pub use tokenizer::{Special, Tokenizer};
pub use train::{Recipe, train};

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What code does that is not ours. Where it panics, that is its error.
fn unwound<T, E: ToString>(who: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => Err(format!("{who} has failed")),
    }
}

#[cfg(test)]
mod tests;
