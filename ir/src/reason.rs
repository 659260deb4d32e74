//! Why something is communicated, and what would do without it.

use crate::mesh::Axis;
use serde::{Deserialize, Serialize};

/// Why a reshard, a collective or a copy is there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reason {
    /// `operand 0 of dot: split along seq -> whole`.
    pub why: String,
    /// Of several changes that would do without it, the one of least consequence; none where nothing would.
    pub avoided_by: Option<AvoidedBy>,
}

/// A change of options or of the plan. How options are spelled is for those to say who read them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AvoidedBy {
    /// Sequence parallelism off.
    NoSequenceParallelism,
    /// Nothing shared out among data-parallel ranks.
    NoZero,
    /// Nothing computed again by the backward pass.
    NoRecomputation,
    /// A greater factor of the buffers of experts.
    GreaterMoeBuffer,
    /// One rank along an axis.
    OneRank(Axis),
    /// One rank along an axis whose ranks see other data: that is what the axis is for.
    SameData(Axis),
    /// One pipeline stage, or one that has all that is summed.
    OneStage,
    /// A plan in which the axis does not list the dim.
    Unlisted {
        /// An axis of the plan.
        axis: Axis,
        /// The name of the dim that the axis would not list.
        dim: String,
    },
    /// A plan in which the axis splits nothing that is summed over there.
    Unsplit(Axis),
}

impl Reason {
    /// A reason with a change that would do without.
    pub fn avoided(why: impl Into<String>, by: AvoidedBy) -> Reason {
        Reason { why: why.into(), avoided_by: Some(by) }
    }

    /// The same with more to say of it; what avoids it still does.
    #[must_use]
    pub fn and(&self, more: &str) -> Reason {
        Reason { why: format!("{}{more}", self.why), avoided_by: self.avoided_by.clone() }
    }
}

impl From<&str> for Reason {
    fn from(why: &str) -> Reason {
        Reason { why: why.into(), avoided_by: None }
    }
}
