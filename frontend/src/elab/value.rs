//! What names stand for during elaboration.

use crate::ast::Function;
use ir::diag::Span;
use ir::dim::Dim;
use ir::graph::Value;
use std::collections::HashMap;
use std::rc::Rc;

/// A compile-time value, or a tensor of the graph.
#[derive(Clone, Debug)]
pub enum Val {
    /// The result of something that was reported as an error; whoever meets it stays silent.
    Bad,
    None,
    Int(i64),
    Real(f64),
    Bool(bool),
    Text(Rc<str>),
    /// One number or more; without numbers a list is one of dims.
    Reals(Rc<[f64]>),
    Dim(DimId),
    Dims(Vec<DimId>),
    Tensor(Value),
    /// What a function returned, if not exactly one value.
    Tuple(Vec<Val>),
}

impl Val {
    /// What it is called in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Val::Bad => "an error",
            Val::None => "none",
            Val::Int(_) => "an int",
            Val::Real(_) => "a real",
            Val::Bool(_) => "a bool",
            Val::Text(_) => "a text",
            Val::Reals(_) => "a list of numbers",
            Val::Dim(_) => "a dim",
            Val::Dims(_) => "a list of dims",
            Val::Tensor(_) => "a tensor",
            Val::Tuple(items) if items.is_empty() => "nothing",
            Val::Tuple(_) => "several values",
        }
    }
}

/// Whether a value is a list of numbers, or a list of nothing.
pub fn is_reals(val: &Val) -> bool {
    matches!(val, Val::Reals(_)) || matches!(val, Val::Dims(dims) if dims.is_empty())
}

/// A declared dim: position in the elaborator's table. It enters the graph when a tensor first has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DimId(pub usize);

#[derive(Clone, Debug)]
pub struct DimEntry {
    pub name: Rc<str>,
    /// None is a ragged dim (`dim slot;`).
    pub size: Option<i64>,
    pub copy_of: Option<DimId>,
    pub span: Span,
    /// The dim in the graph, once a tensor has it.
    pub ir: Option<Dim>,
}

/// A lexical scope: of a file, the model, or one call of a function.
#[derive(Debug, Default)]
pub struct Frame {
    pub parent: Option<FrameId>,
    pub vars: HashMap<Rc<str>, Var>,
    pub fns: HashMap<Rc<str>, Closure>,
    pub modules: HashMap<Rc<str>, FrameId>,
    /// Names declared in branches that were not taken, with the place of the condition.
    pub absent: HashMap<Rc<str>, Span>,
    /// Names in the order of declaration, so that a `repeat` iteration can take back its own.
    pub declared: Vec<Rc<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameId(pub usize);

#[derive(Clone, Debug)]
pub struct Var {
    pub val: Val,
    pub span: Span,
    /// The last assignment that changed the type, for messages about `repeat`.
    pub changed: Option<Span>,
}

#[derive(Clone, Debug)]
pub struct Closure {
    pub function: Rc<Function>,
    pub env: FrameId,
}

/// How a statement ended.
pub enum Flow {
    Next,
    Return(Vec<Val>, Span),
    /// A limit was reached: nothing more is elaborated.
    Stop,
}
