//! What a verifier says of a module that it refuses: which invariant, where, and what is there instead.

use crate::Invariant;
use ir::graph::Value;
use ir::program::{Action, Command};
use std::fmt;

/// A violated invariant: a bug of the pass before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {locus}: {found}")]
pub struct Violation {
    /// What should hold.
    pub invariant: Invariant,
    /// Where it does not.
    pub locus: Location,
    /// What is there, beside what should be.
    pub found: String,
}

impl Violation {
    /// The same, within something larger.
    pub fn within(mut self, part: LocationPart) -> Violation {
        self.locus.0.insert(0, part);
        self
    }
}

/// Where in a module, from the outside in: `stage 1, train, backward microbatch 0, command 3 (recv of 64 f32 from 1
/// stages on)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location(pub Vec<LocationPart>);

/// A part of a module that others may be within.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocationPart {
    /// A graph as a whole, not one of its values.
    Graph,
    /// The graphs of a step, or what a program does for it.
    Training,
    /// The graphs of an evaluation, or what a program does for it.
    Evaluation,
    /// The job as a whole.
    Job,
    /// A stage of the pipeline, by its number.
    Stage(u64),
    /// The graphs or the program of several stages, by the first.
    Class(u64),
    /// A list of calls of a stage: `train`.
    Calls(&'static str),
    /// The end of a list of calls of a stage: `end of train`.
    EndOf(&'static str),
    /// A kernel, by its number in the job.
    Kernel(usize),
    /// A group of ranks, by its number in its program.
    Group(usize),
    /// A buffer, by its name.
    Buffer(String),
    /// A bucket, by its number in its graph or program.
    Bucket(usize),
    /// A body, by its name.
    Body(String),
    /// A body that is called for a microbatch.
    Pass(String, u32),
    /// The number of a call in its list.
    Call(usize),
    /// What is done for one microbatch, by its number.
    Microbatch(u32),
    /// The number of a command in its body.
    Number(usize),
    /// The number of a command in its body, and what it does.
    Command(usize, String),
    /// A value of a graph.
    Value(Value),
    /// With its op.
    Node(Value, &'static str),
    /// Sub-axes, as the mesh describes them.
    Axes(String),
    /// What a program leaves.
    Results,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, part) in self.0.iter().enumerate() {
            write!(f, "{}{part}", if k == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for LocationPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LocationPart::Graph => f.write_str("graph"),
            LocationPart::Training => f.write_str("training"),
            LocationPart::Evaluation => f.write_str("evaluation"),
            LocationPart::Job => f.write_str("job"),
            LocationPart::Stage(s) => write!(f, "stage {s}"),
            LocationPart::Class(s) => write!(f, "class of stage {s}"),
            LocationPart::Calls(phase) => f.write_str(phase),
            LocationPart::EndOf(phase) => write!(f, "end of {phase}"),
            LocationPart::Kernel(k) => write!(f, "kernel {k}"),
            LocationPart::Group(g) => write!(f, "group {g}"),
            LocationPart::Buffer(name) => write!(f, "buffer `{name}`"),
            LocationPart::Bucket(k) => write!(f, "bucket {k}"),
            LocationPart::Body(name) => f.write_str(name),
            LocationPart::Pass(name, microbatch) => write!(f, "{name} microbatch {microbatch}"),
            LocationPart::Call(c) => write!(f, "call {c}"),
            LocationPart::Microbatch(m) => write!(f, "microbatch {m}"),
            LocationPart::Number(k) => write!(f, "command {k}"),
            LocationPart::Command(k, what) => write!(f, "command {k} ({what})"),
            LocationPart::Value(v) => write!(f, "{v}"),
            LocationPart::Node(v, op) => write!(f, "{v} ({op})"),
            LocationPart::Axes(subs) => write!(f, "on {subs}"),
            LocationPart::Results => f.write_str("results"),
        }
    }
}

impl Location {
    /// A stage of the pipeline, by its number.
    pub fn stage(stage: u64) -> Location {
        Location(vec![LocationPart::Stage(stage)])
    }

    /// A part within this one.
    pub fn of(&self, part: LocationPart) -> Location {
        let mut parts = self.0.clone();
        parts.push(part);
        Location(parts)
    }

    /// A body within this place, by its name.
    pub fn body(&self, name: &str) -> Location {
        self.of(LocationPart::Body(name.into()))
    }

    /// A buffer within this place, by its name.
    pub fn buffer(&self, name: &str) -> Location {
        self.of(LocationPart::Buffer(name.into()))
    }

    /// A command within this place, by its number in its body.
    pub fn command(&self, k: usize, command: &Command) -> Location {
        self.of(LocationPart::Command(k, describe(command)))
    }

    /// What is wrong here.
    pub(crate) fn error(&self, Breach { invariant, found }: Breach) -> Violation {
        Violation { invariant, locus: self.clone(), found }
    }
}

impl From<LocationPart> for Location {
    fn from(part: LocationPart) -> Location {
        Location(vec![part])
    }
}

impl From<Value> for Location {
    fn from(v: Value) -> Location {
        LocationPart::Value(v).into()
    }
}

/// A violated invariant at a place that the caller knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Breach {
    pub invariant: Invariant,
    pub found: String,
}

impl Breach {
    pub fn at(self, locus: impl Into<Location>) -> Violation {
        locus.into().error(self)
    }
}

impl Invariant {
    /// It does not hold: what is there, beside what should be.
    pub(crate) fn breach(self, found: impl Into<String>) -> Breach {
        Breach { invariant: self, found: found.into() }
    }
}

/// What is known where an invariant holds.
pub(crate) type Checked<T = ()> = Result<T, Breach>;

/// That an invariant holds, or what is there instead.
pub(crate) fn ensure(condition: bool, invariant: Invariant, found: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(invariant.breach(found())) }
}

/// What is wrong at a place.
pub(crate) fn fail<T>(invariant: Invariant, locus: impl Into<Location>, found: impl Into<String>) -> Result<T, Violation> {
    Err(invariant.breach(found).at(locus))
}

/// `send of 64 f32 to 1 stages on, channel 0 for layers.3`.
fn describe(command: &Command) -> String {
    let what = match &command.action {
        Action::Launch { kernel, .. } => format!("launch of kernel {}", kernel.0),
        Action::Collective { kind, group, dtype, count, .. } => format!("{} of {count} {} in group {}", kind.name(), dtype.name(), group.0),
        Action::Send { hops, channel, dtype, count, .. } => format!("send of {count} {} to {hops} stages on, {channel}", dtype.name()),
        Action::Recv { hops, channel, dtype, count, .. } => format!("recv of {count} {} from {hops} stages on, {channel}", dtype.name()),
        Action::Copy { dtype, count, .. } => format!("copy of {count} {}", dtype.name()),
        Action::Fill { buffer, .. } => format!("fill of buffer {}", buffer.0),
        Action::Load { input, .. } => format!("load of input {input}"),
        Action::Report { report, .. } => format!("report {report}"),
        Action::Limit { most, .. } => format!("limit to {most}"),
        Action::Record { event } => format!("record of event {event}"),
        Action::Wait { event } => format!("wait for event {event}"),
    };
    let scope = &command.origin.scope;
    let why = if scope.is_empty() { String::new() } else { format!(" for {scope}") };
    format!("{what}{why}")
}
