//! What reads bytes from outside, as functions that must hold for any bytes: none may panic, hang or take memory
//! beyond a constant times its input, and what is accepted must keep its promises (a text that was read prints as one
//! that reads back to the same).
//!
//! `make test` replays the corpora of `fuzz/corpus` and the seeds through them. `make test-long-fuzz` searches for
//! inputs that break them, with libFuzzer, on a stable compiler: the counters of coverage are a pass of LLVM's.

mod files;
mod levels;
pub mod seeds;
mod texts;
mod wire;

// This is the small job that the runtime's own tests run.
#[allow(dead_code)]
#[path = "../../runtime/tests/fixture/mod.rs"]
mod fixture;

/// Takes any bytes, and panics if they break a promise.
pub type Check = fn(&[u8]);

/// Every target by its name, which is also that of its corpus.
pub const TARGETS: [(&str, Check); 9] = [
    ("texts", texts::text),
    ("levels", levels::level),
    ("job", levels::packed),
    ("weights", files::weights),
    ("dcp", files::distributed),
    ("data", files::data),
    ("hello", wire::hello),
    ("message", wire::message),
    ("frames", wire::frames),
];

/// The target of a name.
pub fn target(name: &str) -> Option<Check> {
    TARGETS.iter().find(|t| t.0 == name).map(|t| t.1)
}
