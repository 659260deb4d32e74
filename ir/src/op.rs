//! The operations of every graph level, and what each computes.
//!
//! One set of ops serves the logical graph, the per-rank graphs and the bodies of kernels, so one evaluator
//! ([`crate::eval`]) defines them all. Every op has one result. Dims go by name: an operand that lacks a dim of
//! the result is broadcast along it.

mod facts;
mod numbers;
mod scoring;

pub use facts::{Arity, OpKind};
pub use numbers::{DType, Real, tf32};
pub use scoring::{Scoring, Step};

use crate::dim::{Dim, IndexMap, Linear};
use crate::mesh::SubAxis;
use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$inner:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$inner])* $variant),* }
        impl $name {
            /// Every variant, in the order of declaration.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];
            /// The name in the text form.
            pub fn name(self) -> &'static str { match self { $($name::$variant => $text),* } }
            /// The variant with this name in the text form, if there is one.
            pub fn parse(name: &str) -> Option<$name> { Self::ALL.iter().copied().find(|o| o.name() == name) }
        }
    };
}

named! {
    /// Pointwise functions of one operand. `Not` is of bools; the others of floats (`Neg`, `Abs`, `Sign` of ints too).
    Unary {
        /// `-x`.
        Neg = "neg",
        /// `e` to the power of `x`.
        Exp = "exp",
        /// The natural logarithm.
        Log = "log",
        /// The square root.
        Sqrt = "sqrt",
        /// `1 / sqrt(x)`.
        Rsqrt = "rsqrt",
        /// `1 / x`.
        Recip = "recip",
        /// The hyperbolic tangent.
        Tanh = "tanh",
        /// The sine, of radians.
        Sin = "sin",
        /// The cosine, of radians.
        Cos = "cos",
        /// The error function.
        Erf = "erf",
        /// The absolute value.
        Abs = "abs",
        /// The greatest integer that is not above `x`.
        Floor = "floor",
        /// -1, 0 or 1; what is not a number stays so.
        Sign = "sign",
        /// Whether `x` is false.
        Not = "not",
    }
}

named! {
    /// Pointwise functions of two operands. `Rem` has the sign of its second operand (floored). `And`, `Or` are of bools.
    /// Division of ints is floored. `Mix` is of ints: 32 bits that depend on all of both
    /// ([`crate::random::mix_two`]).
    Binary {
        /// `x - y`.
        Sub = "sub",
        /// `x * y`.
        Mul = "mul",
        /// `x / y`.
        Div = "div",
        /// The remainder of the floored division, with the sign of `y`.
        Rem = "rem",
        /// `x` to the power of `y`.
        Pow = "pow",
        /// The greater of both; not a number if either is none.
        Max = "maximum",
        /// The smaller of both; not a number if either is none.
        Min = "minimum",
        /// Whether both are true.
        And = "and",
        /// Whether one or both are true.
        Or = "or",
        /// A hash of both, of 32 bits.
        Mix = "mix",
    }
}

impl Binary {
    /// Whether there is such a function of two numbers of this type.
    pub fn takes(self, dtype: DType) -> bool {
        match self {
            Binary::And | Binary::Or => dtype == DType::Bool,
            Binary::Mix => dtype == DType::I32,
            _ => dtype != DType::Bool,
        }
    }
}

named! {
    /// Comparisons; the result is bool.
    Compare {
        /// `x == y`.
        Eq = "eq",
        /// `x != y`.
        Ne = "ne",
        /// `x < y`.
        Lt = "lt",
        /// `x <= y`.
        Le = "le",
        /// `x > y`.
        Gt = "gt",
        /// `x >= y`.
        Ge = "ge",
    }
}

named! {
    /// What a reduction does. `Any` is of bools.
    Reduce {
        /// The sum of all elements.
        Sum = "sum",
        /// The greatest element.
        Max = "max",
        /// Whether an element is true.
        Any = "any",
    }
}

named! {
    /// The gradients of attention: of its three operands, and of the bias that its program adds last
    /// ([`Scoring::bias`]).
    AttentionGrad {
        /// The gradient of queries.
        Q = "attention_dq",
        /// The gradient of keys.
        K = "attention_dk",
        /// The gradient of values.
        V = "attention_dv",
        /// The gradient of the bias.
        Bias = "attention_dbias",
    }
}

named! {
    /// A change of sharding on some sub-axes.
    Reshard {
        /// Replicated to split: every rank keeps its part.
        Slice = "slice",
        /// Partial to split.
        ReduceScatter = "reduce_scatter",
        /// Split along one dim to split along another.
        AllToAll = "all_to_all",
        /// Partial to replicated.
        AllReduce = "all_reduce",
        /// Split to replicated.
        AllGather = "all_gather",
        /// Replicated to partial: kept where all coordinates are 0, zero elsewhere.
        Mask = "mask",
    }
}

/// Orders messages: those of one sender, receiver and channel arrive as they were sent, those of others whenever they are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Channel(pub u32);

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "channel {}", self.0)
    }
}

/// A collective and, where it reduces, how. Members are in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Collective {
    /// Every member gets the reduction of what all members have.
    AllReduce(Reduce),
    /// Every member gets what all members have, one after the other.
    AllGather,
    /// Every member gets its own part of the reduction of what all members have.
    ReduceScatter(Reduce),
    /// Part k of what each member has goes to member k.
    AllToAll,
    /// Every member's value goes to the next member, the last one's to the first.
    Shift,
}

/// A number known at run time, the same for all elements, that the executor passes to kernels.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scalar {
    /// The learning rate of this step (before a parameter's own factor).
    LearningRate,
    /// What the seed of the backward pass is multiplied by and gradients are divided by, so that small ones survive 16 bits.
    LossScale,
    /// The number of this step, from 1.
    Step,
    /// The seed of the run.
    Seed,
    /// `1 - beta^step`: Adam's bias correction.
    BiasCorrection(Real),
    /// A linear form over the rank's (and microbatch's) coordinates: where a shard begins.
    Linear(Linear),
    /// In a kernel: the scalar argument of this number.
    Slot(u32),
}

/// `softmax(scoring(scale * q k^T)) v` over `keys`, contracted over `d`, per definition `std.attention`. The last
/// operands are those that `scoring` reads, of any dims of q but `d`, and `keys`. A query that sees no key has
/// result 0 and log-sum-exp -inf, and gives no gradients.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attention {
    /// Positions of queries.
    pub at: Dim,
    /// Positions of keys, and of their values.
    pub keys: Dim,
    /// The elements of a head of queries and of keys.
    pub d: Dim,
    /// The elements of a head of values and of the result: `d`, or a dim of their own.
    pub values: Dim,
    /// What products of queries and keys are multiplied by.
    pub scale: Real,
    /// What becomes of scaled scores: masks, biases, caps, dropout.
    pub scoring: Scoring,
}

impl Attention {
    /// The same over other dims.
    pub fn map_dims(&self, f: &mut dyn FnMut(Dim) -> Dim) -> Attention {
        Attention { at: f(self.at), keys: f(self.keys), d: f(self.d), values: f(self.values), ..self.clone() }
    }
}

/// Between which dims rows are dispatched and combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Routing {
    /// The dim that numbers experts.
    pub experts: Dim,
    /// The dim along which a token's experts are listed.
    pub choice: Dim,
}

impl Routing {
    /// The same over other dims.
    pub fn map_dims(&self, f: &mut dyn FnMut(Dim) -> Dim) -> Routing {
        Routing { experts: f(self.experts), choice: f(self.choice) }
    }
}

/// An operation. Operand order is given with each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Op {
    // Sources have no operands.
    /// A tensor fed from outside: data at the logical level, an operand in a kernel.
    Input(u32),
    /// A parameter's current value.
    Param(u32),
    /// Optimizer state of a parameter: `(parameter, slot)`, e.g. Adam's m and v; f32, dims of the parameter, zero at first.
    State(u32, u32),
    /// A table evaluated at compile time (in f64, rounded once).
    Table(u32),
    /// The same number everywhere.
    Const(Real),
    /// The global index along a dim: i32 `[dim]`.
    Iota(Dim),
    /// Uniform in [0, 1), keyed by `key`, the seed, the step and the element's global index (row-major over the
    /// result's whole dims without their padding; the definition is [`crate::random::uniform`]). f32.
    Uniform {
        /// Tells this draw from all others: a hash of where the text makes it.
        key: u64,
    },
    /// A run-time number, `[]`.
    Scalar(Scalar),

    // The result of a pointwise op has the union of the operands' dims.
    /// `(x)`.
    Unary(Unary),
    /// `(x, y)`, of one dtype.
    Binary(Binary),
    /// `(x, y)`, of one dtype; the result is bool.
    Compare(Compare),
    /// `(condition, if true, if false)`.
    Select,
    /// Sum of one or more operands. The only pointwise sum, so that sums of partial values can be regrouped.
    Add,
    /// Conversion to the result's dtype. Float to int truncates; to bool is `!= 0`.
    Cast,
    /// Identity without a gradient.
    StopGradient,
    /// Identity at the border of a `repeat` iteration, where a pipeline may be cut.
    Cut,
    /// Identity that adds dims or changes their storage order: a copy, if it comes to that.
    Expand,

    // These ops move or select elements and compute nothing.
    /// Dims `from` (in this order) replaced by `to`, the row-major order of elements unchanged; other dims as they are.
    View {
        /// Dims of the operand, outermost first.
        from: Vec<Dim>,
        /// Dims of the result, outermost first, of as many elements together.
        to: Vec<Dim>,
    },
    /// Elements `at ..` of dim `from`, called `to` (or, with `to` absent, the one element `at`).
    Slice {
        /// The dim of the operand.
        from: Dim,
        /// The dim of the result in its place; `None` if it has none there.
        to: Option<Dim>,
        /// Index along `from` of the first element that is kept.
        at: u64,
    },
    /// The adjoint of `Slice`: zero except at `at ..` of dim `to`, which hold `from`.
    Pad {
        /// The dim of the operand; `None` if it is one element of `to`.
        from: Option<Dim>,
        /// The dim of the result.
        to: Dim,
        /// Index along `to` of the operand's first element.
        at: u64,
    },
    /// Operand i has dim `from[i]`; one after the other they make dim `to`.
    Concat {
        /// The dim of each operand that is joined.
        from: Vec<Dim>,
        /// The dim of the result, as long as all of `from` together.
        to: Dim,
    },
    /// This rank's part of a dim, `Local` level and kernels only: element i of `to` is element `index(i)` of `from`.
    Shard {
        /// The operand's dim, of which `to` is a part.
        from: Dim,
        /// The result's dim, as long as the part.
        to: Dim,
        /// From indices along `to` to indices along `from`.
        index: IndexMap,
    },

    // These ops exchange data between ranks.
    /// `Sharded` level: another sharding of the same value, over these sub-axes. Logically the identity.
    Reshard {
        /// From which kind of placement to which.
        kind: Reshard,
        /// The sub-axes on which the placement changes.
        subs: Vec<SubAxis>,
    },
    /// `Local` level: a collective over the ranks that differ in `subs` (and, with `stages`, over these pipeline stages).
    /// `part` numbers the members: an all-gather adds it, a reduce-scatter removes it, an all-to-all keeps it.
    Collective {
        /// Which collective, and how it reduces.
        kind: Collective,
        /// Sub-axes in whose coordinates members differ.
        subs: Vec<SubAxis>,
        /// The pipeline stages of the members; `None` if all are of one stage.
        stages: Option<Vec<u64>>,
        /// The dim that numbers members; `None` for an all-reduce and a shift.
        part: Option<Dim>,
    },
    /// `Local` level, a source: the value that the rank `hops` stages further on sends on the channel.
    Recv {
        /// Pipeline stages from this one to the sender's; negative is back.
        hops: i64,
        /// The channel that the sender names too.
        channel: Channel,
    },
    /// `Local` level: sends to the rank `hops` stages further on; the result is the operand.
    Send {
        /// Pipeline stages from this one to the receiver's; negative is back.
        hops: i64,
        /// The channel that the receiver names too.
        channel: Channel,
    },
    /// `Local` level: the result is the operand, an i32 scalar. A run in which it is more stops there, with an error.
    Limit {
        /// The greatest number with which the run goes on.
        most: u64,
    },

    // Contractions and reductions. With 16-bit operands, the result of a dot, a `reduce_sum`, a `scatter` or
    // attention has either their dtype or, unrounded, f32.
    /// `(a, b)`: product summed over `over`; dims that both have go along. `tf32`: of f32 factors alone, each of which is first rounded ([`tf32`]), as
    /// tensor cores take them.
    Dot {
        /// Dims of both factors, along which products are summed.
        over: Vec<Dim>,
        /// Whether factors are rounded to tf32 first.
        tf32: bool,
    },
    /// `(a, b, ends)`, `Local` level and kernels only: the dot of `a`, `b` and the experts' rows. `ends` is i32, `[experts]` and any dims of `a`, its
    /// *parts*. The rows of an expert are those from the end of the expert before it (or 0) to its own end, which is not less and counts as
    /// the number of rows if it is more; rows from the last end on are nobody's. With m = 1 where a row is an expert's and 0 elsewhere,
    /// the result is the sum over `over` of `a * b * m`; operands of nobody's rows are never read.
    ///
    /// `a` has `rows`, `b` has either `experts` (then `over` has them too, and no part: each row times its expert's matrix, 0 for nobody's) or `rows` as
    /// well (then `over` has them: each expert's sum over its rows, and over the parts that `over` names). `tf32` as for `dot`.
    GroupedDot {
        /// The dim of rows, of which each expert has a range.
        rows: Dim,
        /// The dim that numbers experts.
        experts: Dim,
        /// Dims along which products are summed.
        over: Vec<Dim>,
        /// Whether factors are rounded to tf32 first.
        tf32: bool,
    },
    /// `(x)`: sum, maximum or disjunction along `over`, whose dims the result lacks.
    Reduce {
        /// Sum, maximum or disjunction.
        kind: Reduce,
        /// Dims of the operand that the result lacks.
        over: Vec<Dim>,
    },
    /// Index (i32, global) of the greatest element, the lowest one on ties.
    ArgMax {
        /// The dim along which the index counts, which the result lacks.
        over: Dim,
    },
    /// Running sum along `over`, inclusive; from the end if `reverse`.
    Cumsum {
        /// The dim that it runs along.
        over: Dim,
        /// Whether it runs from the last element to the first.
        reverse: bool,
    },
    /// `(table, index)`: `table[dim: index]`. Global indices; outside of the table's (local) rows the result is 0.
    Gather {
        /// The dim of the table that indices count along.
        dim: Dim,
    },
    /// `(values, index)`: adds values into rows of a zero table over `dim`; the adjoint of `Gather`. Sums over the
    /// dims of the index (those not in the result).
    Scatter {
        /// The dim of the result that indices count along.
        dim: Dim,
    },

    // Experts. `chosen` holds, along `choice`, the indices (i32) of the experts that a token goes to; an index out of
    // range goes nowhere.
    /// `(x, chosen)` -> x without `choice`, with `experts`: at each expert the sum of x over the choices that name it, else 0. An x
    /// without `choice` is the same for all choices. The adjoint of `Combine`.
    Dispatch(Routing),
    /// `(y, chosen)` -> chosen's dims and y's without `experts`: `y[experts: chosen]`, 0 for a choice that is no expert's.
    Combine(Routing),

    // Attention. q has `at`, `d` and any other dims; k has `keys`, `d` and a subset of q's others; v has `keys`, k's
    // others, and `values`. Dims of q that k lacks share their keys (grouped queries). What the program of scores
    // reads follows the operands named here.
    /// `(q, k, v)` -> dims of q, with `values` in place of `d`.
    Attention(Attention),
    /// `(q, k)` -> q's dims without `d`, f32: log of the sum of exponentials of the scaled scores.
    AttentionLse(Attention),
    /// `(q, k, v, lse, delta, dout)` -> dims of q, k or v. `delta` is `sum(dout * out, over: values)`, f32, in
    /// lse's dims. `lse` and `delta` may be those of attention to more keys than these: the result is these keys'
    /// part of the gradient.
    AttentionGrad(Attention, AttentionGrad),
}

impl Op {
    /// The dot of factors as they are.
    pub fn dot(over: Vec<Dim>) -> Op {
        Op::Dot { over, tf32: false }
    }

    /// Likewise, of experts' rows.
    pub fn grouped_dot(rows: Dim, experts: Dim, over: Vec<Dim>) -> Op {
        Op::GroupedDot { rows, experts, over, tf32: false }
    }
}
