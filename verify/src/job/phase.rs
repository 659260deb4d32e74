//! The phases of a rank's calls.

use ir::program::{Call, CallSchedule};

/// The lists of calls of a program. Evaluations come between steps; an update follows its training pass or is left out,
/// on all ranks alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Train,
    Update,
    Eval,
}

impl Phase {
    pub const ALL: [Phase; 3] = [Phase::Train, Phase::Update, Phase::Eval];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Train => "train",
            Phase::Update => "update",
            Phase::Eval => "eval",
        }
    }

    pub fn calls(self, schedule: &CallSchedule) -> &[Call] {
        match self {
            Phase::Train => &schedule.train,
            Phase::Update => &schedule.update,
            Phase::Eval => &schedule.eval,
        }
    }
}
