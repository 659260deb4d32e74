//! The text form of the logical graph.

use super::body::{NoAnnotations, NodeAnnotations, blank_type, body, row_number, span, ty, values};
use super::io::{Io, Result};
use super::op::dim;
use crate::dim::Dim;
use crate::graph::{Graph, Init, Input, InputDefault, Param, Report, Table, Update, Value};
use crate::op::Real;

/// A graph on its own.
pub(super) fn graph(io: &mut Io, g: &mut Graph) -> Result {
    io.line("graph ")?;
    graph_with(io, g, &mut NoAnnotations)
}

/// A graph from its name on, and what a level says beside its nodes.
pub(super) fn graph_with(io: &mut Io, g: &mut Graph, beside: &mut dyn NodeAnnotations) -> Result {
    io.name(&mut g.name)?;
    io.or(&mut g.layers, 0, " layers ", Io::number)?;
    io.hints.params = g.params.iter().map(|p| p.name.clone()).collect();
    io.hints.inputs = g.inputs.iter().map(|x| x.name.clone()).collect();
    io.hints.tables = g.tables.iter().map(|t| t.name.clone()).collect();
    body(io, &mut g.body, beside)?;
    if io.line_if(g.batch.is_some(), "batch ") {
        dim(io, g.batch.get_or_insert(Dim(0)))?;
    }
    let blank = Param {
        name: String::new(),
        ty: blank_type(),
        init: Init::Const(Real(0.0)),
        decay: false,
        lr_scale: Real(1.0),
        frozen: false,
        adam: false,
        state: false,
        layer: None,
        span: None,
    };
    numbered_rows(io, &mut g.params, blank, "param ", param)?;
    numbered_rows(io, &mut g.inputs, Input { name: String::new(), ty: blank_type(), default: None, any: false, span: None }, "input ", |io, x| {
        io.with(" : ", &mut x.ty, ty)?;
        io.option(&mut x.default, InputDefault::Next(0), " default ", feed)?;
        io.flag(&mut x.any, " any")?;
        span(io, &mut x.span)
    })?;
    numbered_rows(io, &mut g.tables, Table { name: String::new(), ty: blank_type(), data: vec![] }, "table ", |io, t| {
        io.with(" : ", &mut t.ty, ty)?;
        io.with(" = ", &mut t.data, |io, data| io.list(data, 0.0, Io::real))
    })?;
    for (list, words) in [(&mut g.losses, "loss "), (&mut g.metrics, "metric "), (&mut g.outputs, "output ")] {
        io.rows(list, Report { name: String::new(), value: Value(0) }, words, |io, _, r| {
            io.name(&mut r.name)?;
            io.with(" = ", &mut r.value, Io::value)
        })?;
    }
    for (slot, words) in [(&mut g.loss, "total_loss "), (&mut g.grad_norm, "grad_norm ")] {
        if io.line_if(slot.is_some(), words) {
            io.value(slot.get_or_insert(Value(0)))?;
        }
    }
    io.rows(&mut g.grads, (0, Value(0)), "grad ", |io, _, (p, v)| {
        io.number(p)?;
        io.with(" = ", v, Io::value)
    })?;
    io.rows(&mut g.updates, Update { param: 0, grad: None, new: Value(0), states: vec![] }, "update ", |io, _, u| {
        io.number(&mut u.param)?;
        io.option(&mut u.grad, Value(0), " from ", Io::value)?;
        io.with(" to ", &mut u.new, Io::value)?;
        io.with(" states ", &mut u.states, values)
    })
}

/// Something with a name that texts refer to by number.
pub(super) trait Named: Clone {
    fn name(&mut self) -> &mut String;
}

macro_rules! named {
    ($($t:ty),*) => { $(impl Named for $t { fn name(&mut self) -> &mut String { &mut self.name } })* };
}
named!(Param, Input, Table, crate::program::ParamEntry, crate::program::InputEntry, crate::program::TableEntry);

/// Lines `param 3 layers.0.w ...`, numbered from 0.
pub(super) fn numbered_rows<T: Named>(
    io: &mut Io,
    items: &mut Vec<T>,
    blank: T,
    words: &str,
    mut form: impl FnMut(&mut Io, &mut T) -> Result,
) -> Result {
    io.rows(items, blank, words, |io, i, x| {
        row_number(io, i)?;
        io.lit(" ")?;
        io.name(x.name())?;
        form(io, x)
    })
}

fn param(io: &mut Io, p: &mut Param) -> Result {
    io.with(" : ", &mut p.ty, ty)?;
    io.with(" init ", &mut p.init, init)?;
    io.flag(&mut p.decay, " decay")?;
    io.or(&mut p.lr_scale, Real(1.0), " lr_scale ", |io, x| io.real(&mut x.0))?;
    io.flag(&mut p.frozen, " frozen")?;
    io.flag(&mut p.adam, " adam")?;
    io.flag(&mut p.state, " state")?;
    io.option(&mut p.layer, 0, " layer ", Io::number)?;
    span(io, &mut p.span)
}

/// `normal 0.02`.
pub(super) fn init(io: &mut Io, x: &mut Init) -> Result {
    io.variant(x, "an initial value", &[("const", Init::Const(Real(0.0))), ("normal", Init::Normal(Real(0.0)))])?;
    match x {
        Init::Const(r) | Init::Normal(r) => io.with(" ", &mut r.0, Io::real),
    }
}

/// `prev 0 or -1`: the rule and the input it derives from.
pub(super) fn feed(io: &mut Io, f: &mut InputDefault) -> Result {
    let all = [
        ("const", InputDefault::Const(Real(0.0))),
        ("next", InputDefault::Next(0)),
        ("prev", InputDefault::Prev(0, 0)),
        ("documents", InputDefault::Documents(0, 0)),
        ("positions", InputDefault::Positions(0, 0)),
        ("ahead", InputDefault::Ahead(0)),
    ];
    io.variant(f, "a feed", &all)?;
    match f {
        InputDefault::Const(r) => io.with(" ", &mut r.0, Io::real),
        InputDefault::Next(i) | InputDefault::Ahead(i) => io.with(" ", i, Io::number),
        InputDefault::Prev(i, first) => {
            io.with(" ", i, Io::number)?;
            io.with(" first ", first, Io::number)
        }
        InputDefault::Documents(i, separator) | InputDefault::Positions(i, separator) => {
            io.with(" ", i, Io::number)?;
            io.with(" separator ", separator, Io::number)
        }
    }
}
