//! The state of barriers and mbarriers, of a block or of all blocks of a cluster (PTX ISA, sections 9.7.13.1 and
//! 9.7.13.15).

use crate::fault::Wrong;
use crate::order::{Stamp, View};
use std::collections::BTreeMap;

pub struct Barriers {
    pub count: usize,
    /// By the rank of their block, and their number.
    pub named: BTreeMap<(u64, u32), Named>,
    /// By their place in shared memory.
    pub phases: BTreeMap<u64, Phases>,
    pub cluster: ClusterBarrier,
    /// The number of mbarrier phases that have completed.
    pub completed: u64,
}

/// The barrier of a cluster.
pub struct ClusterBarrier {
    pub phase: u64,
    /// What those that arrived make known, and the same of the last completed phase.
    pub arrivals: View,
    pub done: View,
}

/// A barrier of the block that warps are arriving at.
pub struct Named {
    pub arrived: u32,
    /// The number of threads that it waits for; `None` for all of the block.
    pub threads: Option<u32>,
    pub waiting: Vec<usize>,
    pub view: View,
}

/// An mbarrier.
pub struct Phases {
    pub count: u32,
    pub pending: u32,
    /// Bytes that copies must still bring.
    pub bytes: i64,
    pub phase: u64,
    /// What those that arrived have seen: in the mbarrier's block, and in others of the cluster.
    pub arrivals: [View; 2],
    /// The same, up to the last completed phase.
    pub done: [View; 2],
    pub init: Stamp,
    /// Whether a fence makes the initialisation visible to copies.
    pub fenced: bool,
}

impl Barriers {
    pub fn new(warps: usize) -> Barriers {
        let cluster = ClusterBarrier { phase: 0, arrivals: View::new(warps), done: View::new(warps) };
        Barriers { count: warps, named: BTreeMap::new(), phases: BTreeMap::new(), cluster, completed: 0 }
    }

    pub fn describe(&self, address: u64) -> String {
        match self.phases.get(&address) {
            Some(b) => format!("the mbarrier at {address:#x}: {} of {} arrivals and {} bytes are missing", b.pending, b.count, b.bytes),
            None => format!("the mbarrier at {address:#x}, which is not initialised"),
        }
    }

    pub fn find(&mut self, address: u64) -> Result<&mut Phases, Wrong> {
        self.phases.get_mut(&address).ok_or(Wrong::Barrier { address, what: "it is not initialised".into() })
    }

    pub fn settle(&mut self, address: u64) -> bool {
        let Some(b) = self.phases.get_mut(&address) else { return false };
        if b.pending != 0 || b.bytes != 0 {
            return false;
        }
        b.phase += 1;
        b.pending = b.count;
        b.done.iter_mut().zip(&b.arrivals).for_each(|(done, arrivals)| done.join(arrivals));
        self.completed += 1;
        true
    }
}
