//! The state of a block's barriers and mbarriers (PTX ISA, sections 9.7.13.1 and 9.7.13.15).

use crate::fault::Wrong;
use crate::order::{Stamp, View};
use std::collections::BTreeMap;

pub struct Barriers {
    pub count: usize,
    pub named: BTreeMap<u32, Named>,
    pub phases: BTreeMap<u64, Phases>,
    /// The number of mbarrier phases that have completed.
    pub completed: u64,
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
    /// What those that arrived have seen.
    pub arrivals: View,
    /// The same, up to the last completed phase.
    pub done: View,
    pub init: Stamp,
    /// Whether a fence makes the initialisation visible to copies.
    pub fenced: bool,
}

impl Barriers {
    pub fn new(warps: usize) -> Barriers {
        Barriers { count: warps, named: BTreeMap::new(), phases: BTreeMap::new(), completed: 0 }
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
        b.done.join(&b.arrivals);
        self.completed += 1;
        true
    }
}
