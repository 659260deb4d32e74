//! Megatron's indexed data set: `PREFIX.bin` has the tokens of all sequences one after the other, `PREFIX.idx` says
//! where each begins.
//!
//! | bytes of `PREFIX.idx` | hold |
//! |---|---|
//! | 9 | `MMIDIDX\0\0` |
//! | 8 | the version, 1 |
//! | 1 | the [`Dtype`] of tokens |
//! | 8 | the number of sequences, `s` |
//! | 8 | the number of borders, `d`: documents and one more |
//! | 4 s | the tokens of each sequence, as i32 |
//! | 8 s | the byte of `PREFIX.bin` at which each begins, as i64 |
//! | 8 d | the sequence with which each document begins, as i64; the last is `s` |
//!
//! All numbers are little-endian. A document without tokens has no sequence. The source is
//! `megatron/core/datasets/indexed_dataset.py` of megatron-core 0.16.

mod format;
mod read;
mod write;

pub(crate) use format::with;
pub use format::{Dtype, HEADER, IndexedError, MAGIC, Token, VERSION, bare, paths};
pub use read::Indexed;
pub use write::{Writer, write_index};

#[cfg(test)]
mod tests;
