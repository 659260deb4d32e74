//! Text to data sets of tokens, as Megatron's `tools/preprocess_data.py` makes them, and new tokenizers.
//!
//! | file | does |
//! |---|---|
//! | `documents.rs` | reads documents from JSON lines and plain text, compressed or not, and from Parquet |
//! | `chat.rs` | lists of messages as text, by a tokenizer's chat template |
//! | `parquet/` | a column of a Parquet file, row by row |
//! | `bounds.rs` | the longest document, and where panics of others' code end |
//! | `tokenizer.rs` | a `tokenizer.json`, and which of its tokens ends a document |
//! | `tokenize.rs` | all documents to tokens, on all cores, in order |
//! | `journal.rs` | what an interrupted one goes on from |
//! | `error.rs` | what can be wrong |
//! | `train.rs` | a byte-level BPE tokenizer of documents |

mod bounds;
mod chat;
mod documents;
mod error;
mod journal;
mod parquet;
mod tokenize;
mod tokenizer;
mod train;

pub use bounds::LONGEST;
pub use chat::Chat;
pub use documents::{Fields, Position};
pub use error::TextError;
pub use tokenize::{Begin, Existing, Outcome, Progress, Summary, TokenizeRequest, tokenize, written};
pub use tokenizer::{Special, Tokenizer};
pub use train::{Recipe, train};

#[cfg(test)]
mod tests;
