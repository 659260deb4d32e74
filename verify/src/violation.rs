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
    pub locus: Locus,
    /// What is there, beside what should be.
    pub found: String,
}

impl Violation {
    /// The same, within something larger.
    pub fn within(mut self, part: LocusPart) -> Violation {
        self.locus.0.insert(0, part);
        self
    }
}

/// Where in a module, from the outside in: `stage 1, train, backward microbatch 0, command 3 (recv of 64 f32 from 1
/// stages on)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Locus(pub Vec<LocusPart>);

/// A part of a module that others may be within.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocusPart {
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

impl fmt::Display for Locus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, part) in self.0.iter().enumerate() {
            write!(f, "{}{part}", if k == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for LocusPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LocusPart::Graph => f.write_str("graph"),
            LocusPart::Training => f.write_str("training"),
            LocusPart::Evaluation => f.write_str("evaluation"),
            LocusPart::Job => f.write_str("job"),
            LocusPart::Stage(s) => write!(f, "stage {s}"),
            LocusPart::Class(s) => write!(f, "class of stage {s}"),
            LocusPart::Calls(phase) => f.write_str(phase),
            LocusPart::EndOf(phase) => write!(f, "end of {phase}"),
            LocusPart::Kernel(k) => write!(f, "kernel {k}"),
            LocusPart::Group(g) => write!(f, "group {g}"),
            LocusPart::Buffer(name) => write!(f, "buffer `{name}`"),
            LocusPart::Bucket(k) => write!(f, "bucket {k}"),
            LocusPart::Body(name) => f.write_str(name),
            LocusPart::Pass(name, microbatch) => write!(f, "{name} microbatch {microbatch}"),
            LocusPart::Call(c) => write!(f, "call {c}"),
            LocusPart::Microbatch(m) => write!(f, "microbatch {m}"),
            LocusPart::Number(k) => write!(f, "command {k}"),
            LocusPart::Command(k, what) => write!(f, "command {k} ({what})"),
            LocusPart::Value(v) => write!(f, "{v}"),
            LocusPart::Node(v, op) => write!(f, "{v} ({op})"),
            LocusPart::Axes(subs) => write!(f, "on {subs}"),
            LocusPart::Results => f.write_str("results"),
        }
    }
}

impl Locus {
    /// A stage of the pipeline, by its number.
    pub fn stage(stage: u64) -> Locus {
        Locus(vec![LocusPart::Stage(stage)])
    }

    /// A part within this one.
    pub fn of(&self, part: LocusPart) -> Locus {
        let mut parts = self.0.clone();
        parts.push(part);
        Locus(parts)
    }

    /// A body within this place, by its name.
    pub fn body(&self, name: &str) -> Locus {
        self.of(LocusPart::Body(name.into()))
    }

    /// A buffer within this place, by its name.
    pub fn buffer(&self, name: &str) -> Locus {
        self.of(LocusPart::Buffer(name.into()))
    }

    /// A command within this place, by its number in its body.
    pub fn command(&self, k: usize, command: &Command) -> Locus {
        self.of(LocusPart::Command(k, describe(command)))
    }

    /// What is wrong here.
    pub(crate) fn error(&self, Breach { invariant, found }: Breach) -> Violation {
        Violation { invariant, locus: self.clone(), found }
    }
}

impl From<LocusPart> for Locus {
    fn from(part: LocusPart) -> Locus {
        Locus(vec![part])
    }
}

impl From<Value> for Locus {
    fn from(v: Value) -> Locus {
        LocusPart::Value(v).into()
    }
}

/// A violated invariant at a place that the caller knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Breach {
    pub invariant: Invariant,
    pub found: String,
}

impl Breach {
    pub fn at(self, locus: impl Into<Locus>) -> Violation {
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
pub(crate) fn fail<T>(invariant: Invariant, locus: impl Into<Locus>, found: impl Into<String>) -> Result<T, Violation> {
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
