//! A module: all that passes go by and work on, at any point of a compile.
//!
//! A pass takes a module and leaves one; nothing else is passed. Levels that were left stay, as what later ones are verified against and
//! explained by: the sharded graphs under the local ones, and the local graphs under the job.

use crate::graph::Graph;
use crate::local::Local;
use crate::mesh::Mesh;
use crate::model::{Plan, Train};
use crate::options::Options;
use crate::pipeline::Pipeline;
use crate::program::{Interval, Job};
use crate::sharded::Sharded;
use std::fmt;

/// How far a module has come down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The logical graph: as if one rank did all.
    Graph,
    /// A sharding for every value, and the reshards between them.
    Sharded,
    /// What the ranks of each program class compute, with local shapes and explicit communication.
    Local,
    /// Kernels, buffers and commands of all ranks.
    Commands,
    /// With places of all buffers in memory.
    Memory,
    /// With all events that streams need: what ranks execute.
    Job,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Graph => "graph",
            Level::Sharded => "sharded",
            Level::Local => "local",
            Level::Commands => "commands",
            Level::Memory => "memory",
            Level::Job => "job",
        })
    }
}

/// A compile between two passes.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// Every setting of the model text with its value, as text.
    pub settings: Vec<(String, String)>,
    /// Whether the text itself, beside the library, asks if it trains, or draws random numbers: then an evaluation may be anything.
    pub asks_training: bool,
    /// How the step trains: what the text says, where flags do not override it.
    pub train: Train,
    /// Which dims each axis splits, as the text says.
    pub plan: Plan,
    /// How it is split and run, as the command line says.
    pub options: Options,
    /// The axes of all ranks and microbatches.
    pub mesh: Mesh,
    /// Where layers are, and in which order stages run passes.
    pub pipeline: Pipeline,
    /// Per input, what it may hold, once that was found.
    pub takes: Vec<Option<Vec<Interval>>>,
    /// A training step.
    pub training: Graphs,
    /// An evaluation: of the same parameters and data, without random drops.
    pub evaluation: Graphs,
    /// What ranks execute; `None` until local graphs are lowered.
    pub job: Option<Job>,
    /// What of the job is settled, once there is one.
    pub settled: JobLevel,
}

/// What of a job is settled: each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobLevel {
    /// Kernels, buffers and commands, though not yet where buffers lie.
    Commands,
    /// Places in memory. Streams may still lack events.
    Memory,
    /// All that ranks execute.
    #[default]
    All,
}

/// The graphs of a training step, or of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Graphs {
    /// What the text says, before any pass: what later levels are held to. A module that was written by hand may lack it.
    pub model: Option<Graph>,
    /// The graph of all ranks: logical, until every value has a sharding.
    pub whole: GlobalGraph,
    /// As they were partitioned, one per pipeline stage.
    pub stages: Vec<Local>,
    /// One per program class; that of an evaluation is of the same stages as that of the step in the same place.
    pub locals: Vec<Local>,
}

/// The graph of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum GlobalGraph {
    /// As if one rank did all.
    Logical(Graph),
    /// With a sharding for every value, and reshards between them.
    Sharded(Sharded),
}

impl GlobalGraph {
    /// Its nodes, sharded or not.
    pub fn graph(&self) -> &Graph {
        match self {
            GlobalGraph::Logical(graph) => graph,
            GlobalGraph::Sharded(sharded) => &sharded.graph,
        }
    }
}

impl Graphs {
    /// A logical graph, of which the text is not known.
    pub fn new(graph: Graph) -> Graphs {
        Graphs { model: None, whole: GlobalGraph::Logical(graph), stages: vec![], locals: vec![] }
    }

    /// A logical graph as the text says it.
    pub fn of_text(graph: Graph) -> Graphs {
        Graphs { model: Some(graph.clone()), ..Graphs::new(graph) }
    }

    /// # Panics
    /// It is not sharded yet.
    pub fn sharded(&self) -> &Sharded {
        match &self.whole {
            GlobalGraph::Sharded(sharded) => sharded,
            GlobalGraph::Logical(_) => panic!("invariant: a pass runs at its level"),
        }
    }
}

impl Module {
    /// How far it has come down, from what it holds.
    pub fn level(&self) -> Level {
        match &self.training.whole {
            _ if self.job.is_some() => match self.settled {
                JobLevel::Commands => Level::Commands,
                JobLevel::Memory => Level::Memory,
                JobLevel::All => Level::Job,
            },
            _ if !self.training.stages.is_empty() => Level::Local,
            GlobalGraph::Sharded(_) => Level::Sharded,
            GlobalGraph::Logical(_) => Level::Graph,
        }
    }

    /// The graphs of the step and of the evaluation.
    pub fn both(&self) -> [&Graphs; 2] {
        [&self.training, &self.evaluation]
    }

    /// Runs a pass over both logical graphs.
    ///
    /// # Panics
    /// They are sharded already.
    pub fn on_graphs(&mut self, mut pass: impl FnMut(Graph) -> Graph) {
        for graphs in [&mut self.training, &mut self.evaluation] {
            graphs.on_graph(&mut pass);
        }
    }

    /// Runs a pass over the local graphs of each program class: that of the step, and that of the evaluation.
    pub fn on_classes(&mut self, mut pass: impl FnMut(Local, Local) -> (Local, Local)) {
        let pairs = std::mem::take(&mut self.training.locals).into_iter().zip(std::mem::take(&mut self.evaluation.locals));
        (self.training.locals, self.evaluation.locals) = pairs.map(|(training, evaluation)| pass(training, evaluation)).unzip();
    }
}

impl Graphs {
    /// Runs a pass over the logical graph.
    ///
    /// # Panics
    /// It is sharded already.
    pub fn on_graph(&mut self, pass: impl FnOnce(Graph) -> Graph) {
        self.whole = GlobalGraph::Logical(pass(self.take_graph()));
    }

    /// Takes the logical graph, for a pass that puts another one, or a sharded one, in its place.
    ///
    /// # Panics
    /// It is sharded already.
    pub fn take_graph(&mut self) -> Graph {
        match &mut self.whole {
            GlobalGraph::Logical(graph) => std::mem::take(graph),
            GlobalGraph::Sharded(_) => panic!("invariant: a pass runs at its level"),
        }
    }
}
