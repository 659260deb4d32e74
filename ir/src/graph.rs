//! Bodies of named-dim ops in SSA form, and the logical graph.
//!
//! A [`Body`] is what the logical graph, a rank's local graph and a kernel have in common: a table of dims and a
//! list of nodes, each with one result, operands before users. Text form: [`crate::text`].

use crate::diag::Span;
use crate::dim::{Dim, Dims};
use crate::op::{DType, Op, Real};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The result of a node: its position in the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Value(pub u32);

impl Value {
    /// Its place in [`Body::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// Element type and dims in storage order, outermost first. No dim occurs twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Type {
    /// The type of each element.
    pub dtype: DType,
    /// In storage order, outermost first.
    pub dims: Vec<Dim>,
}

impl Type {
    /// A type with these dims, in storage order.
    pub fn new(dtype: DType, dims: impl Into<Vec<Dim>>) -> Type {
        Type { dtype, dims: dims.into() }
    }

    /// A type of one element, without dims.
    pub fn scalar(dtype: DType) -> Type {
        Type { dtype, dims: vec![] }
    }

    /// Whether it has this very dim, not a copy of it.
    pub fn has(&self, dim: Dim) -> bool {
        self.dims.contains(&dim)
    }
}

/// When an op runs: within a microbatch's forward or backward pass, or once per step, after accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Of every microbatch, from inputs to losses.
    Forward,
    /// Of every microbatch, from losses to gradients.
    Backward,
    /// Once per step, when all microbatches are done.
    Update,
}

impl Phase {
    /// The word for it in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Update => "update",
        }
    }

    /// The phase of this name, if there is one.
    pub fn parse(name: &str) -> Option<Phase> {
        [Phase::Forward, Phase::Backward, Phase::Update].into_iter().find(|p| p.name() == name)
    }
}

/// Where a node comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// When the node runs.
    pub phase: Phase,
    /// The `repeat` iteration it belongs to, counted over all repeats of the model in text order.
    pub layer: Option<u32>,
    /// Path of names: `layers.3.attn.q`; empty at the top.
    pub scope: Arc<str>,
    /// Of the functions whose values the backward pass may recompute (the plan's `recompute`), the outermost whose call it is inside of.
    pub within: Option<Arc<str>>,
    /// Whether its value may wait in the host's memory for the backward pass.
    pub offloaded: bool,
    /// It is computed a second time, for the backward pass.
    pub recomputed: bool,
    /// The place in a model text that it follows from; `None` if there is none to name.
    pub span: Option<Span>,
}

impl Origin {
    /// Of no layer, scope or place in a text.
    pub fn new(phase: Phase) -> Origin {
        Origin { phase, layer: None, scope: Arc::from(""), within: None, offloaded: false, recomputed: false, span: None }
    }
}

/// One operation and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Operands, in the order that the op gives; each comes before this node.
    pub args: Vec<Value>,
    /// The type of the result.
    pub ty: Type,
    /// Where it comes from.
    pub origin: Origin,
}

/// Dims and nodes. Operands come before their users.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Body {
    /// The dims of all nodes; [`Dim`] is an index into them.
    pub dims: Dims,
    /// Indexed by [`Value`], operands before their users.
    pub nodes: Vec<Node>,
}

impl Body {
    /// Appends a node, without a look at its type rule.
    pub fn push(&mut self, op: Op, args: impl Into<Vec<Value>>, ty: Type, origin: Origin) -> Value {
        self.nodes.push(Node { op, args: args.into(), ty, origin });
        Value(u32::try_from(self.nodes.len() - 1).expect("invariant: fewer than 2^32 nodes"))
    }

    /// The results of all nodes, in order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = Value> + use<> {
        (0..self.nodes.len() as u32).map(Value)
    }

    /// The dims of a value, in storage order.
    pub fn dims_of(&self, v: Value) -> &[Dim] {
        &self[v].ty.dims
    }

    /// The parameter of which a value is a copy in another precision: made once a step, and there wherever it is wanted.
    pub fn copied_param(&self, v: Value) -> Option<u32> {
        match (&self[v].op, self[v].args.first().map(|a| &self[*a].op)) {
            (Op::Cast, Some(Op::Param(p))) => Some(*p),
            _ => None,
        }
    }

    /// Whether both factors of a dot have dims of their own. Else no element is used twice: it is a reduction.
    pub fn is_matrix_product(&self, dot: Value) -> bool {
        let [a, b] = [0, 1].map(|k| &self[self[dot].args[k]].ty);
        let own = |of: &Type, other: &Type| of.dims.iter().any(|d| !other.has(*d) && self.dims.size(*d) > 1);
        own(a, b) && own(b, a)
    }

    /// Whether a dot multiplies factors of the same dims: a reduction of all that it reads, like one of their elementwise product.
    pub fn is_elementwise_dot(&self, dot: Value) -> bool {
        let [a, b] = [0, 1].map(|k| &self[self[dot].args[k]].ty.dims);
        a.len() == b.len() && a.iter().all(|d| b.contains(d))
    }

    /// Elements of a value.
    pub fn elements(&self, v: Value) -> u64 {
        self.dims.elements(self.dims_of(v))
    }

    /// For each value, the nodes that use it and in which operand slot.
    pub fn users(&self) -> Users {
        let mut first = vec![0; self.nodes.len() + 1];
        for a in self.nodes.iter().flat_map(|n| &n.args) {
            first[a.index() + 1] += 1;
        }
        for v in 0..self.nodes.len() {
            first[v + 1] += first[v];
        }
        let mut list = vec![(Value(0), 0); first[self.nodes.len()]];
        let mut next = first.clone();
        for v in self.values() {
            for (slot, a) in self[v].args.iter().enumerate() {
                list[next[a.index()]] = (v, slot);
                next[a.index()] += 1;
            }
        }
        Users { first, list }
    }
}

/// For each value of a body, by its index, the nodes that use it and in which operand slot, in the order of the body.
#[derive(Clone, Debug, Default)]
pub struct Users {
    /// Where the users of each value begin in the list; at last, where the list ends.
    first: Vec<usize>,
    list: Vec<(Value, usize)>,
}

impl std::ops::Index<usize> for Users {
    type Output = [(Value, usize)];
    fn index(&self, v: usize) -> &[(Value, usize)] {
        &self.list[self.first[v]..self.first[v + 1]]
    }
}

impl std::ops::Index<Value> for Body {
    type Output = Node;
    fn index(&self, v: Value) -> &Node {
        &self.nodes[v.index()]
    }
}

impl std::ops::IndexMut<Value> for Body {
    fn index_mut(&mut self, v: Value) -> &mut Node {
        &mut self.nodes[v.index()]
    }
}

/// A tensor that lives over steps: one that trains, or a state, which changes by its `update` alone. Parameters of a `repeat` are
/// one per iteration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// Full name, `layers.3.attn.q.w`.
    pub name: String,
    /// Element type and dims of the whole parameter.
    pub ty: Type,
    /// What its elements are at first.
    pub init: Init,
    /// Whether weight decay applies: two or more dims and not `@no_decay`.
    pub decay: bool,
    /// Attributes of the `train` section's groups.
    pub lr_scale: Real,
    /// It does not train: it has no gradient, and keeps what it starts with.
    pub frozen: bool,
    /// Where the optimizer is Muon, a group leaves it to AdamW, whatever it is.
    pub adam: bool,
    /// A `state`: no gradient, no optimizer; initialized, stored and exported as parameters are.
    pub state: bool,
    /// The `repeat` iteration it belongs to, counted as in [`Origin::layer`]; `None` outside of all.
    pub layer: Option<u32>,
    /// Where the model text declares it; `None` if that is not known.
    pub span: Option<Span>,
}

impl Param {
    /// Whether it has a gradient.
    pub fn trains(&self) -> bool {
        !self.frozen && !self.state
    }
}

/// How a parameter starts. Keyed by its full name and the global index of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Init {
    /// The same number everywhere.
    Const(Real),
    /// Gaussian with mean zero and this standard deviation.
    Normal(Real),
}

/// A tensor fed at every step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// As the model text declares it.
    pub name: String,
    /// Element type and dims, of which the batch is the global one.
    pub ty: Type,
    /// What it holds if no file is named for it; `None` if one has to be.
    pub default: Option<InputDefault>,
    /// `@any`: the text means whatever the data holds, also where it is no index of a table.
    pub any: bool,
    /// Where the model text declares it; `None` if that is not known.
    pub span: Option<Span>,
}

/// What an input holds if no file is named for it. The number is the input it derives from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum InputDefault {
    /// The same number everywhere.
    Const(Real),
    /// The element after this one along the last dim.
    Next(u32),
    /// The element before this one; the first is this number.
    Prev(u32, i64),
    /// The number of separators before each element.
    Documents(u32, i64),
    /// The distance to the last separator.
    Positions(u32, i64),
    /// The n-th row of the dim before the last: what comes n + 1 elements after this one; -100 past the end.
    Ahead(u32),
}

impl InputDefault {
    /// The input that it derives from.
    pub fn source(&self) -> Option<u32> {
        match self {
            InputDefault::Const(_) => None,
            InputDefault::Next(i)
            | InputDefault::Prev(i, _)
            | InputDefault::Documents(i, _)
            | InputDefault::Positions(i, _)
            | InputDefault::Ahead(i) => Some(*i),
        }
    }

    /// The same of another input.
    #[must_use]
    pub fn derived_from(self, new: impl Fn(u32) -> u32) -> InputDefault {
        match self {
            InputDefault::Const(x) => InputDefault::Const(x),
            InputDefault::Next(i) => InputDefault::Next(new(i)),
            InputDefault::Prev(i, first) => InputDefault::Prev(new(i), first),
            InputDefault::Documents(i, separator) => InputDefault::Documents(new(i), separator),
            InputDefault::Positions(i, separator) => InputDefault::Positions(new(i), separator),
            InputDefault::Ahead(i) => InputDefault::Ahead(new(i)),
        }
    }
}

/// A table of numbers known at compile time, in its type's storage order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// As the pass that made it calls it: `table0`.
    pub name: String,
    /// Element type and dims, in storage order.
    pub ty: Type,
    /// One number per element, row-major.
    pub data: Vec<f64>,
}

/// What a run says of every step, whatever its model: no report of a text has such a name.
pub const OF_EVERY_STEP: [&str; 14] = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "step_ms",
    "data_wait_ms",
    "mfu",
    "memory_bytes",
    "data_bytes",
    "valid_loss",
    "loss_scale",
    "moe_further_passes",
    "skipped",
];

/// A scalar that a step reports. `loss` terms of equal name add up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Report {
    /// As the text calls it: the `aux` of `loss aux = ...;`; `loss` if it gives no name.
    pub name: String,
    /// The value reported: a scalar if a loss or metric, any tensor if an output.
    pub value: Value,
}

/// What happens to a parameter at the end of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// Index into [`Graph::params`].
    pub param: u32,
    /// The gradient, before clipping; a state has none.
    pub grad: Option<Value>,
    /// The parameter after the step.
    pub new: Value,
    /// The optimizer states after the step, by slot of [`Op::State`].
    pub states: Vec<Value>,
}

/// The logical, unpartitioned graph: forward at first; after `differentiate` also the backward pass, after
/// `optimize` the update.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// The model's name in its text; empty if the text declares no model.
    pub name: String,
    /// The nodes of all phases.
    pub body: Body,
    /// Indexed by the number of [`Op::Param`].
    pub params: Vec<Param>,
    /// Indexed by the number of [`Op::Input`].
    pub inputs: Vec<Input>,
    /// Indexed by the number of [`Op::Table`].
    pub tables: Vec<Table>,
    /// The settings' dim `batch`, which microbatches split.
    pub batch: Option<Dim>,
    /// Number of `repeat` iterations, over all repeats; what pipelines cut.
    pub layers: u32,
    /// The terms of the loss, scalars, by name.
    pub losses: Vec<Report>,
    /// What `metric` statements report: scalars, by name.
    pub metrics: Vec<Report>,
    /// What `output` statements name: tensors of any dims.
    pub outputs: Vec<Report>,
    /// Gradient of each parameter that has one, after `differentiate`: `(param, value)`.
    pub grads: Vec<(u32, Value)>,
    /// The whole loss (sum of all terms), after `differentiate`.
    pub loss: Option<Value>,
    /// Global gradient norm before clipping, after `optimize`.
    pub grad_norm: Option<Value>,
    /// Of each parameter that trains, after `optimize`; of each state with an `update` from the start.
    pub updates: Vec<Update>,
}

impl Graph {
    /// Every value that something outside of the body refers to.
    pub fn roots(&self) -> Vec<Value> {
        let mut out = vec![];
        self.clone_refs().map_roots(|v| {
            out.push(v);
            v
        });
        out
    }

    /// The references alone, without the body.
    fn clone_refs(&self) -> Graph {
        Graph {
            losses: self.losses.clone(),
            metrics: self.metrics.clone(),
            outputs: self.outputs.clone(),
            grads: self.grads.clone(),
            loss: self.loss,
            grad_norm: self.grad_norm,
            updates: self.updates.clone(),
            ..Graph::default()
        }
    }

    /// Replaces every value that something outside of the body refers to.
    pub fn map_roots(&mut self, mut f: impl FnMut(Value) -> Value) {
        for r in self.losses.iter_mut().chain(&mut self.metrics).chain(&mut self.outputs) {
            r.value = f(r.value);
        }
        for (_, g) in &mut self.grads {
            *g = f(*g);
        }
        for v in self.loss.iter_mut().chain(&mut self.grad_norm) {
            *v = f(*v);
        }
        for u in &mut self.updates {
            u.grad = u.grad.map(&mut f);
            u.new = f(u.new);
            u.states.iter_mut().for_each(|s| *s = f(*s));
        }
    }
}
