//! What a compile is at, for whoever watches it from another thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The pass that runs, how large what it works on is, and the processes that work for it.
#[derive(Debug)]
pub struct Progress(Mutex<State>);

#[derive(Clone, Debug)]
struct State {
    pass: &'static str,
    since: Instant,
    sizes: BTreeMap<&'static str, u64>,
    workers: BTreeSet<u32>,
}

/// A moment of a compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// What was entered last: a pass, or another part of the compile, such as `parse`; `start` at first.
    pub pass: &'static str,
    /// How long the pass has run.
    pub running: Duration,
    /// What has been made so far, by what is counted: `operations`, `kernels`.
    pub sizes: BTreeMap<&'static str, u64>,
    /// Process ids.
    pub workers: BTreeSet<u32>,
}

impl Default for Progress {
    fn default() -> Self {
        Progress(Mutex::new(State { pass: "start", since: Instant::now(), sizes: BTreeMap::new(), workers: BTreeSet::new() }))
    }
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("invariant: no holder panics")
    }

    /// A pass begins.
    pub fn enter(&self, pass: &'static str) {
        let mut state = self.state();
        (state.pass, state.since) = (pass, Instant::now());
    }

    /// There are so many of something by now.
    pub fn size(&self, what: &'static str, count: usize) {
        self.state().sizes.insert(what, count as u64);
    }

    /// A process works for the compile.
    pub fn begins(&self, worker: u32) {
        self.state().workers.insert(worker);
    }

    /// It works no more.
    pub fn ends(&self, worker: u32) {
        self.state().workers.remove(&worker);
    }

    /// What the compile is at.
    pub fn now(&self) -> ProgressSnapshot {
        let State { pass, since, sizes, workers } = self.state().clone();
        ProgressSnapshot { pass, running: since.elapsed(), sizes, workers }
    }
}
