//! How much a document may be, and what code may do that is not ours.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes that a line, a file of plain text, or a page of Parquet has at most.
pub const LONGEST: u64 = 1 << 30;

/// What code does that is not ours. Where it panics, that is its error.
pub fn unwound<T, E: ToString>(who: &str, work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => Err(format!("{who} has failed")),
    }
}
