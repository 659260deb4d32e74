//! The `Sharded` level: the graph with a sharding per value. What of it is proved is said where it is verified, in the crate `verify`.

use crate::dim::Dim;
use crate::graph::{Graph, Value};
use crate::mesh::{Mesh, SubAxis};
use crate::reason::Reason;
use serde::{Deserialize, Serialize};

/// How a partial value is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Partial {
    /// By adding what all coordinates have.
    Sum,
    /// By the maximum of what all coordinates have.
    Max,
}

/// A value on one sub-axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Placement {
    /// Every coordinate holds the same bits.
    Replicated,
    /// Every coordinate holds its part along this dim.
    Split(Dim),
    /// The value is the sum (or maximum) over the coordinates.
    Partial(Partial),
}

impl Placement {
    /// Partial, to be completed by a sum.
    pub const SUM: Placement = Placement::Partial(Partial::Sum);

    /// Whether the value is still to be completed.
    pub fn is_partial(self) -> bool {
        matches!(self, Placement::Partial(_))
    }
}

/// A value on the whole mesh: a placement per sub-axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sharding(pub Vec<Placement>);

impl Sharding {
    /// The same on all ranks and in all microbatches.
    pub fn replicated(mesh: &Mesh) -> Sharding {
        Sharding(vec![Placement::Replicated; mesh.subs.len()])
    }

    /// The sub-axes that split a dim, in mesh order.
    pub fn splits(&self, dim: Dim) -> Vec<SubAxis> {
        (0..self.0.len() as u8).map(SubAxis).filter(|u| self[*u] == Placement::Split(dim)).collect()
    }
}

impl std::ops::Index<SubAxis> for Sharding {
    type Output = Placement;
    fn index(&self, u: SubAxis) -> &Placement {
        &self.0[u.0 as usize]
    }
}

impl std::ops::IndexMut<SubAxis> for Sharding {
    fn index_mut(&mut self, u: SubAxis) -> &mut Placement {
        &mut self.0[u.0 as usize]
    }
}

/// For each dim, the sub-axes that ever split it, in mesh order. A dim's index is a mixed-radix number with these digits
/// outermost; each sub-axis always takes its own digit, so any subset of them nests. A copy has its original's digits.
pub type Digits = Vec<Vec<SubAxis>>;

/// The graph with reshards, and a sharding per value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sharded {
    /// Nodes with global dims, reshards among them.
    pub graph: Graph,
    /// What values are split over.
    pub mesh: Mesh,
    /// Indexed by [`Dim`].
    pub digits: Digits,
    /// Indexed by [`Value`].
    pub shardings: Vec<Sharding>,
    /// Why each value that is a reshard is there.
    pub reasons: Vec<Option<Reason>>,
}

impl Sharded {
    /// The sharding of a value.
    pub fn sharding(&self, v: Value) -> &Sharding {
        &self.shardings[v.index()]
    }

    /// Elements of a value that one rank holds.
    pub fn local_elements(&self, v: Value) -> u64 {
        let all = self.graph.body.elements(v);
        let s = self.sharding(v);
        all / self.mesh.ids().filter(|u| matches!(s[*u], Placement::Split(_))).map(|u| self.mesh[u].size).product::<u64>()
    }
}
