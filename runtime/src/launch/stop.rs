//! Runs that are asked to end early: after the step that is under way, with everything saved. `shm/stop.rs` has the protocol by which ranks of one machine stop
//! after the same step. Over several machines rank 0's launcher asks all others, each of which reads what its own rank has begun.

use super::joined::Down;
use super::ranks::{Hold, Ranks, TAKES};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks a run to end early, from another thread. All clones are one.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<Asked>);

#[derive(Debug, Default)]
struct Asked {
    stop: AtomicBool,
    meeting: AtomicBool,
}

impl StopRequest {
    /// The run shall end after the step that is under way. A run without one saves what it began with.
    pub fn ask(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }

    pub fn is_asked(&self) -> bool {
        self.0.stop.load(Ordering::SeqCst)
    }

    /// Whether the run waits for ranks that other launchers start: nothing has been done then that could be saved, and whoever asked may as well end the process.
    pub fn is_meeting(&self) -> bool {
        self.0.meeting.load(Ordering::SeqCst)
    }

    pub(super) fn set_meeting(&self, now: Meeting) {
        self.0.meeting.store(now == Meeting::Begun, Ordering::SeqCst);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Meeting {
    Begun,
    Over,
}

/// How far a run came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// All steps are done.
    #[default]
    Whole,
    /// It was asked to end before.
    Early,
}

/// How far all launchers are with ending a run early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stopping {
    No,
    /// What each rank has begun, as far as its launcher has said so.
    Asked(Vec<Option<u64>>),
    Known,
}

impl Ranks<'_> {
    /// Asks all ranks to stop, unless they have been.
    pub fn stop(&mut self) {
        if self.stopping != Stopping::No {
            return;
        }
        self.board.ask_to_stop();
        let begun = (0..).zip(&mut self.ranks).map(|(rank, held)| match &mut held.hold {
            Hold::Own(_) => Some(self.board.begun(rank)),
            Hold::Far { link, .. } => {
                // A launcher that is gone is heard of soon enough.
                let _ = link.say(&Down::Stop, TAKES);
                None
            }
        });
        self.stopping = Stopping::Asked(begun.collect());
        self.settle_stop();
    }

    /// Another launcher says what its rank has begun.
    pub fn begun(&mut self, rank: u64, step: u64) {
        if let Stopping::Asked(begun) = &mut self.stopping {
            begun[rank as usize] = Some(step);
            self.settle_stop();
        }
    }

    fn settle_stop(&mut self) {
        let Stopping::Asked(begun) = &self.stopping else { return };
        let Some(last) = begun.iter().copied().collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max()) else { return };
        self.board.stop_after(last);
        for held in &mut self.ranks {
            if let Hold::Far { link, .. } = &mut held.hold {
                let _ = link.say(&Down::StopAfter(last), TAKES);
            }
        }
        self.stopping = Stopping::Known;
    }
}
