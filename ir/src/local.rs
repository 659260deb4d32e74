//! The `Local` level: what the ranks of one program class compute, with local shapes and explicit communication.
//!
//! Stages of the pipeline whose graphs are equal up to names share one `Local`. Within a stage all ranks run the same graph
//! and differ only in coordinates: dims carry index maps ([`crate::dim::IndexMap`]) whose base is a linear form over them.

use crate::dim::IndexMap;
use crate::graph::{Body, Value};
use crate::mesh::Mesh;
use crate::sharded::Sharding;
use serde::{Deserialize, Serialize};

/// When a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Chunk {
    /// Per microbatch, before the first forward: sums of data over the whole batch.
    Prologue,
    /// Once, after the last prologue: completes those sums.
    PrologueReduce,
    /// Per microbatch.
    Forward,
    /// Per microbatch.
    Backward,
    /// Once per step: gradients to rest, reports, gradient norm.
    Reduce,
    /// Once per step, if the reports are finite.
    Update,
}

impl Chunk {
    pub const ALL: [Chunk; 6] = [Chunk::Prologue, Chunk::PrologueReduce, Chunk::Forward, Chunk::Backward, Chunk::Reduce, Chunk::Update];

    pub fn name(self) -> &'static str {
        match self {
            Chunk::Prologue => "prologue",
            Chunk::PrologueReduce => "prologue_reduce",
            Chunk::Forward => "forward",
            Chunk::Backward => "backward",
            Chunk::Reduce => "reduce",
            Chunk::Update => "update",
        }
    }

    pub fn parse(name: &str) -> Option<Chunk> {
        Chunk::ALL.into_iter().find(|c| c.name() == name)
    }

    /// Whether it runs for every microbatch.
    pub fn per_microbatch(self) -> bool {
        match self {
            Chunk::Prologue | Chunk::Forward | Chunk::Backward => true,
            Chunk::PrologueReduce | Chunk::Reduce | Chunk::Update => false,
        }
    }
}

/// A parameter slot of the class: `Op::Param(slot)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalParam {
    /// Local to global index, per dim in storage order.
    pub index: Vec<IndexMap>,
    /// Number of optimizer state tensors.
    pub states: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalUpdate {
    pub slot: u32,
    pub new: Value,
    pub states: Vec<Value>,
}

/// The graph of one program class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Local {
    pub mesh: Mesh,
    /// Per pipeline stage of the class, the parameter (of the graph) in each slot.
    pub stages: Vec<(u64, Vec<u32>)>,
    pub body: Body,
    pub params: Vec<LocalParam>,
    /// Per node: when it runs.
    pub chunks: Vec<Chunk>,
    /// Per node: whether its value is a sum over microbatches still to be taken, so that a use in a chunk that runs once
    /// sees the accumulated value.
    pub accumulate: Vec<bool>,
    /// Per node: the value of the sharded graph that it holds, and in which sharding.
    pub source: Vec<Option<(Value, Sharding)>>,
    pub reasons: Vec<Option<String>>,
    /// `(report, value)`.
    pub reports: Vec<(u32, Value)>,
    pub updates: Vec<LocalUpdate>,
}
