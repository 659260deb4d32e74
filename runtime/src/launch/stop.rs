//! Runs that are asked to end early: after the step that is under way, with everything saved. `shm/asked.rs`
//! has the protocol by which ranks of one machine stop after the same step. Over several machines rank 0's
//! launcher asks all others, each of which reads what its own rank has begun (`ranks.rs`).

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks a run to end early, from another thread. All clones are one.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<StopFlags>);

#[derive(Debug, Default)]
struct StopFlags {
    stop: AtomicBool,
    meeting: AtomicBool,
    interpreting: AtomicBool,
}

impl StopRequest {
    /// The run shall end after the step that is under way. A run without one saves what it began with.
    pub fn ask(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }

    /// Whether the run has been asked to end, through any clone.
    pub fn is_asked(&self) -> bool {
        self.0.stop.load(Ordering::SeqCst)
    }

    /// What the run waits for before its first step, if it does: ranks that other launchers start, or what the
    /// step should come to. Nothing has been done then that could be saved, and whoever asked may as well end
    /// the process.
    pub fn awaited(&self) -> Option<&'static str> {
        if self.0.interpreting.load(Ordering::SeqCst) {
            return Some("the first step was interpreted");
        }
        self.0.meeting.load(Ordering::SeqCst).then_some("all ranks had met")
    }

    /// Until the result is dropped, the run finds out what its first step should come to.
    pub fn interpreting(&self) -> Interpreting<'_> {
        self.0.interpreting.store(true, Ordering::SeqCst);
        Interpreting(self)
    }

    pub(super) fn set_meeting(&self, now: RendezvousState) {
        self.0.meeting.store(now == RendezvousState::Begun, Ordering::SeqCst);
    }
}

/// A run that finds out what its first step should come to.
pub struct Interpreting<'a>(&'a StopRequest);

impl Drop for Interpreting<'_> {
    fn drop(&mut self) {
        self.0.0.interpreting.store(false, Ordering::SeqCst);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RendezvousState {
    Begun,
    Over,
}

/// How far a run came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunEnd {
    /// All steps are done.
    #[default]
    Whole,
    /// It was asked to end before.
    Early,
}
