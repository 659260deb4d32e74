//! The `Local` level: what the ranks of one program class compute, with local shapes and explicit communication.
//!
//! Stages of the pipeline whose graphs are equal up to names share one `Local`. Within a stage all ranks run the same graph
//! and differ only in coordinates: dims carry index maps ([`crate::dim::IndexMap`]) whose base is a linear form over them.

use crate::dim::IndexMap;
use crate::graph::{Body, Node, Value};
use crate::mesh::Mesh;
use crate::program::{Bucket, Space};
use crate::reason::Reason;
use crate::sharded::Sharding;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;

/// When a node runs. Numbers are those of a stage's virtual stages, in the order of the forward pass.
///
/// Chunks are ordered as those of one microbatch, and then the step, come after each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Chunk {
    /// Per microbatch, before the first forward: sums of data over the whole batch.
    Prologue,
    /// Once, after the last prologue: completes those sums.
    PrologueReduce,
    /// Per microbatch.
    Forward(u32),
    /// Per microbatch: gradients of activations; those of parameters too, where no chunk of weights follows.
    Backward(u32),
    /// Per microbatch: gradients of parameters, apart.
    Weight(u32),
    /// Once per step: gradients to rest, reports, gradient norm.
    Reduce,
    /// Once per step, if the reports are finite.
    Update,
}

impl Chunk {
    /// What kind it is, as a word.
    pub fn name(self) -> &'static str {
        match self {
            Chunk::Prologue => "prologue",
            Chunk::PrologueReduce => "prologue_reduce",
            Chunk::Forward(_) => "forward",
            Chunk::Backward(_) => "backward",
            Chunk::Weight(_) => "weight",
            Chunk::Reduce => "reduce",
            Chunk::Update => "update",
        }
    }

    /// Whether it runs for every microbatch.
    pub fn per_microbatch(self) -> bool {
        match self {
            Chunk::Prologue | Chunk::Forward(_) | Chunk::Backward(_) | Chunk::Weight(_) => true,
            Chunk::PrologueReduce | Chunk::Reduce | Chunk::Update => false,
        }
    }

    /// Whether it belongs to the passes of a microbatch through the stages, so that it may use what earlier ones left.
    pub fn is_pass(self) -> bool {
        match self {
            Chunk::Forward(_) | Chunk::Backward(_) | Chunk::Weight(_) => true,
            Chunk::Prologue | Chunk::PrologueReduce | Chunk::Reduce | Chunk::Update => false,
        }
    }

    /// Whether it has always run for a microbatch when another does, both of the same virtual stage.
    pub fn precedes(self, other: Chunk) -> bool {
        match (self, other) {
            (Chunk::Forward(a), Chunk::Backward(b) | Chunk::Weight(b)) | (Chunk::Backward(a), Chunk::Weight(b)) => a == b,
            _ => false,
        }
    }

    /// The backward pass goes down the virtual stages.
    fn place(self) -> (u8, u32) {
        match self {
            Chunk::Prologue => (0, 0),
            Chunk::PrologueReduce => (1, 0),
            Chunk::Forward(l) => (2, l),
            Chunk::Backward(l) => (3, u32::MAX - l),
            Chunk::Weight(l) => (4, u32::MAX - l),
            Chunk::Reduce => (5, 0),
            Chunk::Update => (6, 0),
        }
    }
}

impl Ord for Chunk {
    fn cmp(&self, other: &Chunk) -> Ordering {
        self.place().cmp(&other.place())
    }
}

impl PartialOrd for Chunk {
    fn partial_cmp(&self, other: &Chunk) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// `forward`, `forward1`: the number of the virtual stage, unless it is the first.
impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Chunk::Forward(l) | Chunk::Backward(l) | Chunk::Weight(l) if *l > 0 => write!(f, "{l}"),
            _ => Ok(()),
        }
    }
}

/// A parameter slot of the class: `Op::Param(slot)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalParam {
    /// Local to global index, per dim in storage order.
    pub index: Vec<IndexMap>,
    /// Number of optimizer state tensors that it has for itself.
    pub states: u32,
}

/// What happens to a parameter or bucket at the end of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalUpdate {
    /// Index into [`Local::params`], or behind these into [`Local::buckets`].
    pub slot: u32,
    /// What `Op::Param` of the slot is after the step.
    pub new: Value,
    /// What its states are after the step, by number.
    pub states: Vec<Value>,
}

/// The graph of one program class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Local {
    /// That of all ranks, not of this class alone.
    pub mesh: Mesh,
    /// Per pipeline stage of the class, the parameter (of the graph) in each slot of `params`.
    pub stages: Vec<(u64, Vec<u32>)>,
    /// The nodes, with local dims.
    pub body: Body,
    /// Indexed by slot.
    pub params: Vec<LocalParam>,
    /// Slots after those of `params`, in order.
    pub buckets: Vec<Bucket>,
    /// Slots of `params` of which `Op::Param` is a copy of the weights, for the model to compute with; the weights are state 0.
    pub copied: BTreeSet<u32>,
    /// Nodes that rest, or are computed, in the host's memory. Lowering copies what is used in the other one.
    pub host: BTreeSet<Value>,
    /// Per node: when it runs.
    pub chunks: Vec<Chunk>,
    /// Per node: whether its value is a sum over microbatches still to be taken, so that a use in a chunk that runs once
    /// sees the accumulated value.
    pub accumulate: Vec<bool>,
    /// Per node: the value of the sharded graph that it holds, and in which sharding.
    pub source: Vec<Option<(Value, Sharding)>>,
    /// Per node: why it communicates; `None` if it does not.
    pub reasons: Vec<Option<Reason>>,
    /// `(report, value)`.
    pub reports: Vec<(u32, Value)>,
    /// Of every slot that a step changes.
    pub updates: Vec<LocalUpdate>,
}

impl Local {
    /// Adds a node that is computed at a time, on the device. It holds no value of the sharded graph, and is no sum over
    /// microbatches, as far as is said.
    pub fn push(&mut self, node: Node, chunk: Chunk) -> Value {
        self.chunks.push(chunk);
        self.accumulate.push(false);
        self.source.push(None);
        self.reasons.push(None);
        self.body.nodes.push(node);
        Value(self.body.nodes.len() as u32 - 1)
    }

    /// Where a node rests or is computed.
    pub fn space(&self, v: Value) -> Space {
        if self.host.contains(&v) { Space::Host } else { Space::Device }
    }
}
