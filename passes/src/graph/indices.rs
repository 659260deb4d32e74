//! What inputs of integers may hold, so that no index leaves its table. The data of a run is checked against it, element by element.
//!
//! Nothing of this goes by the names of functions. Each index of a `gather` is followed back to the inputs that it is made of, through whatever a text does
//! with them on the way ([`pieces`]): `where(labels != -100, labels, 0)` as an index of 256 rows lets labels be -100 or 0 to 255. What several
//! indices are made of has to satisfy all. Of values that a text replaces, those count as meant that it names one by one ([`meant`]): with
//! `where(labels >= 0, labels, 0)` labels are 0 to 255. An input that is `@any` holds anything. The size that counts is that of the model, not the padded one, as rows of padding mean nothing.
//!
//! Two simplifications, both on the side of refusing data. A value counts as an index if it is one for anything that *other* inputs may hold.
//! And of what a text does with an index beyond sums, multiples by numbers, comparisons, minima, maxima and choices, nothing is known; neither is it of what comes
//! from floats. Such an index cannot be checked before it is made, so there is a warning: at run time what leaves the table reads as 0.
//! Numbers of experts (`dispatch`, `combine`) are no indices in this sense: one that is no expert's goes nowhere, by definition.

mod meant_values;
mod pieces;
#[cfg(test)]
mod tests;

use crate::graph::fold_constants;
use ir::diag::Diagnostic;
use ir::graph::{Body, Graph, Value};
use ir::op::{Binary, Compare, DType, Op, Reduce, Unary};
use ir::program::Interval;
use meant_values::{IndexKind, IndexUse};
use pieces::{Bounds, Element, ElementBounds, Extremum, Piece};
use std::collections::BTreeSet;

/// What is found in a graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Indices {
    /// Per input: what it may hold, least first; none if it holds no integers.
    pub takes: Vec<Option<Vec<Interval>>>,
    /// Indices that nothing bounds, at their places in the text.
    pub warnings: Vec<Diagnostic>,
}

impl Indices {
    /// The intervals that satisfy this graph and another one of the same inputs.
    #[must_use]
    pub fn and(self, other: Indices) -> Indices {
        let both = |(a, b): (Option<Vec<Interval>>, Option<Vec<Interval>>)| {
            let (a, b) = (a?, b?);
            Some(
                a.iter()
                    .flat_map(|a| {
                        b.iter()
                            .filter_map(|b| ir::fault!("indices.intersection.first", bounds(*a).meet(bounds(*a)), bounds(*a).meet(bounds(*b))))
                            .map(interval)
                    })
                    .collect(),
            )
        };
        let mut warnings = self.warnings;
        warnings.extend(other.warnings.into_iter().filter(|w| !warnings.contains(w)).collect::<Vec<_>>());
        Indices { takes: self.takes.into_iter().zip(other.takes).map(both).collect(), warnings }
    }
}

fn bounds(i: Interval) -> Bounds {
    Bounds::new(i.least.into(), i.most.into())
}

fn interval(b: Bounds) -> Interval {
    let end = |x: i64| i32::try_from(x).expect("invariant: within 32 bits");
    Interval { least: end(b.least), most: end(b.most) }
}

/// What the inputs of a logical graph may hold.
pub fn indices(graph: &Graph) -> Indices {
    let body = &graph.body;
    let (fixed, quantities) = (fold_constants::fixed(body), meant_values::quantities(graph));
    let mut walk = Walk { graph, fixed, quantities, elements: vec![], values: vec![vec![]; body.nodes.len()] };
    let uses = meant_values::uses(body);
    walk.follow(uses.iter().map(|u| u.index).collect());
    let mut left: Vec<Vec<Bounds>> = vec![vec![Bounds::I32]; graph.inputs.len()];
    let mut found = Indices::default();
    for used in uses {
        let pieces = &walk.values[used.index.index()];
        let mut warnings = vec![];
        for (x, bad) in meant_values::unnamed(&walk, pieces, used.rows) {
            let input = walk.elements[x].input as usize;
            if !graph.inputs[input].any {
                left[input] = bad.cut(&left[input]);
            }
        }
        for piece in pieces {
            for when in outside(piece, ir::fault!("indices.rows.last", used.rows + 1, used.rows)) {
                let element = match piece.times {
                    Some((x, _)) => Some(x),
                    None if piece.plus == Bounds::ANY => None,
                    // The index is outside because of this element's value.
                    None => when.keys().next().copied().filter(|_| when.len() == 1),
                };
                match element.and_then(|x| Some((walk.elements[x].input, when.get(&x)?))) {
                    Some((input, _)) if graph.inputs[input as usize].any => warnings.push(meant_values::unchecked(graph, &used, input)),
                    Some((input, bad)) => left[input as usize] = bad.cut(&left[input as usize]),
                    None => warnings.push(warning(graph, &used)),
                }
            }
        }
        // A one-hot row may be all false, so only gathers give warnings.
        if used.kind == IndexKind::Gather {
            warnings.into_iter().for_each(|w| {
                if !found.warnings.contains(&w) {
                    found.warnings.push(w)
                }
            });
        }
    }
    let integer = |(k, left): (usize, Vec<Bounds>)| (graph.inputs[k].ty.dtype == DType::I32).then(|| left.into_iter().map(interval).collect());
    found.takes = left.into_iter().enumerate().map(integer).collect();
    found
}

/// The cases in which a piece of an index is outside of a table with `rows` rows.
fn outside(piece: &Piece, rows: u64) -> Vec<ElementBounds> {
    let least = Piece { plus: Bounds::one(piece.plus.least), ..piece.clone() };
    let last = rows.min(1 << 32) as i64 - 1;
    let most = Piece { plus: Bounds::one(piece.plus.most - last), ..piece.clone() };
    let below = least.signs().into_iter().filter(|(_, sign)| sign.least < 0);
    let above = most.signs().into_iter().filter(|(_, sign)| sign.most > 0);
    // Each case constrains the piece's element, if it has one.
    below.chain(above).map(|(when, _)| when).collect()
}

fn warning(graph: &Graph, used: &IndexUse) -> Diagnostic {
    let (dim, most) = (&used.dim, used.rows.saturating_sub(1));
    let text = format!("nothing keeps this index of `{dim}` within 0 to {most}, and no check of the data can");
    let d = Diagnostic::warning("W0643", text);
    let span = graph.body[used.at].origin.span;
    let d = span.into_iter().fold(d, |d, span| d.label(span, "outside of these it reads 0, without a word"));
    d.help(format!("bound it: `minimum(maximum(i, 0), {dim} - 1)`"))
}

/// An input's element, and how it gets to where it is used, pointwise ops apart.
#[derive(Clone, Debug, PartialEq)]
struct Origin {
    input: u32,
    path: Vec<ElementMove>,
}

/// An op that moves elements.
#[derive(Clone, Debug, PartialEq)]
enum ElementMove {
    By(Op),
    /// An op of which several operands count.
    At(Value),
}

struct Walk<'a> {
    graph: &'a Graph,
    /// Values that depend on no input, parameter or state.
    fixed: Vec<bool>,
    /// Per input, whether its values are more than indices.
    quantities: Vec<bool>,
    elements: Vec<Origin>,
    /// Pieces of the values that were followed.
    values: Vec<Vec<Piece>>,
}

impl Walk<'_> {
    /// Computes the pieces of these values, and of all integers and bools that they depend on.
    fn follow(&mut self, mut open: Vec<Value>) {
        let body = &self.graph.body;
        let mut needed = BTreeSet::new();
        while let Some(v) = open.pop() {
            if needed.insert(v) && !self.known(v) {
                open.extend(body[v].args.iter().filter(|a| !body[**a].ty.dtype.is_float()));
            }
        }
        for v in needed {
            self.values[v.index()] = if self.known(v) { constant(body, v) } else { self.value(v) };
        }
    }

    /// Whether a value is a constant that has to be evaluated.
    fn known(&self, v: Value) -> bool {
        self.fixed[v.index()] && !self.graph.body[v].op.is_source()
    }

    fn element(&mut self, origin: Origin) -> Element {
        self.elements.iter().position(|e| *e == origin).unwrap_or_else(|| {
            self.elements.push(origin);
            self.elements.len() - 1
        })
    }

    /// The pieces of a value after an op that moves its elements.
    fn moved(&mut self, pieces: &[Piece], by: &ElementMove) -> Vec<Piece> {
        let mut to = |x: Element| {
            let mut origin = self.elements[x].clone();
            origin.path.push(by.clone());
            self.element(origin)
        };
        let moved = pieces.iter().map(|p| Piece {
            when: p.when.iter().map(|(x, b)| (to(*x), *b)).collect(),
            times: p.times.map(|(x, f)| (to(x), f)),
            plus: p.plus,
            tested: p.tested.iter().map(|x| to(*x)).collect(),
            named: p.named.iter().map(|x| to(*x)).collect(),
        });
        moved.collect()
    }

    fn value(&mut self, v: Value) -> Vec<Piece> {
        let graph = self.graph;
        let (body, node) = (&graph.body, &graph.body[v]);
        let unknown = || vec![Piece::number(if node.ty.dtype == DType::Bool { Bounds::BOOL } else { Bounds::ANY })];
        let args: Vec<Vec<Piece>> = node.args.iter().map(|a| self.values[a.index()].clone()).collect();
        // An operand without pieces is a float, which is not followed.
        if args.iter().any(Vec::is_empty) && !matches!(node.op, Op::Gather { .. } | Op::ArgMax { .. }) {
            return unknown();
        }
        let size = |dim| i64::try_from(body.dims.size(dim)).unwrap_or(i64::MAX);
        let number = |x: i64| vec![Piece::number(Bounds::one(x))];
        match &node.op {
            Op::Input(input) if node.ty.dtype == DType::I32 => vec![Piece::element(self.element(Origin { input: *input, path: vec![] }))],
            Op::Input(_) => unknown(),
            Op::Const(c) if c.0.fract() == 0.0 && c.0.abs() < 4e9 => number(c.0 as i64),
            Op::Const(_) => unknown(),
            Op::Iota(dim) | Op::ArgMax { over: dim } => vec![Piece::number(Bounds::new(0, size(*dim) - 1))],
            Op::Table(t) => numbers(&graph.tables[*t as usize].data),
            Op::Unary(Unary::Neg) => pieces::scale(&args[0], -1),
            Op::Unary(Unary::Abs) => pieces::extreme(&args[0], &pieces::scale(&args[0], -1), Extremum::Max),
            Op::Unary(Unary::Not) => pieces::sub(&number(1), &args[0]),
            Op::Unary(Unary::Sign) => {
                pieces::sub(&pieces::compare(&args[0], &number(0), Compare::Gt), &pieces::compare(&args[0], &number(0), Compare::Lt))
            }
            Op::Binary(Binary::Sub) => pieces::sub(&args[0], &args[1]),
            Op::Binary(Binary::Mul) => pieces::mul(&args[0], &args[1]),
            Op::Binary(Binary::Div) => pieces::div(&args[0], &args[1]),
            Op::Binary(Binary::Rem) => pieces::rem(&args[0], &args[1]),
            Op::Binary(Binary::Max | Binary::Or) => pieces::extreme(&args[0], &args[1], Extremum::Max),
            Op::Binary(Binary::Min | Binary::And) => pieces::extreme(&args[0], &args[1], Extremum::Min),
            Op::Compare(op) => pieces::compare(&args[0], &args[1], *op),
            Op::Select => pieces::select(&args[0], &args[1], &args[2]),
            Op::Add => args[1..].iter().fold(args[0].clone(), |sum, a| pieces::add(&sum, a)),
            Op::Cast if node.ty.dtype == DType::Bool => pieces::compare(&args[0], &number(0), Compare::Ne),
            Op::Cast | Op::StopGradient | Op::Cut | Op::Expand | Op::Reshard { .. } | Op::Limit { .. } => args[0].clone(),
            Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } => self.moved(&args[0], &ElementMove::By(node.op.clone())),
            Op::Pad { .. } => pieces::settled(self.moved(&args[0], &ElementMove::By(node.op.clone())).into_iter().chain(number(0))),
            Op::Concat { .. } => {
                let parts: Vec<Piece> = args.iter().flat_map(|a| self.moved(a, &ElementMove::At(v))).collect();
                pieces::settled(parts)
            }
            // A maximum is one of the elements.
            Op::Reduce { kind: Reduce::Max, .. } => self.moved(&args[0], &ElementMove::At(v)),
            Op::Reduce { kind: Reduce::Sum, over } => {
                let terms = over.iter().map(|d| size(*d)).fold(1, i64::saturating_mul);
                vec![Piece::number(pieces::hull(&args[0]).times(terms))]
            }
            Op::Cumsum { over, .. } => {
                let one = pieces::hull(&args[0]);
                vec![Piece::number(one.hull(one.times(size(*over))))]
            }
            // A gather gives a row of a table of integers, or 0.
            Op::Gather { .. } if args[0].is_empty() => unknown(),
            Op::Gather { .. } => pieces::settled(self.moved(&args[0], &ElementMove::At(v)).into_iter().chain(number(0))),
            Op::Reduce { kind: Reduce::Any, .. }
            | Op::Unary(
                Unary::Exp
                | Unary::Log
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Recip
                | Unary::Tanh
                | Unary::Sin
                | Unary::Cos
                | Unary::Erf
                | Unary::Floor,
            )
            | Op::Binary(Binary::Pow | Binary::Mix)
            | Op::Param(_)
            | Op::State(..)
            | Op::Uniform { .. }
            | Op::Scalar(_)
            | Op::Collective { .. }
            | Op::Recv { .. }
            | Op::Send { .. }
            | Op::Dot { .. }
            | Op::GroupedDot { .. }
            | Op::Scatter { .. }
            | Op::Dispatch(_)
            | Op::Combine(_)
            | Op::Attention(_)
            | Op::AttentionLse(_)
            | Op::AttentionGrad(..) => unknown(),
        }
    }
}

/// The piece of a value that depends on no input, parameter or state.
fn constant(body: &Body, v: Value) -> Vec<Piece> {
    numbers(&fold_constants::evaluate(body, v))
}

fn numbers(data: &[f64]) -> Vec<Piece> {
    let ends = data.iter().fold(None, |ends: Option<(f64, f64)>, x| Some(ends.map_or((*x, *x), |(a, b)| (a.min(*x), b.max(*x)))));
    let near = ends.filter(|(least, most)| *least > -4e9 && *most < 4e9);
    vec![Piece::number(near.map_or(Bounds::ANY, |(least, most)| Bounds::new(least.floor() as i64, most.ceil() as i64)))]
}
