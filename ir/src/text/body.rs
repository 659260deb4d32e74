//! What the text forms of all levels share: types, origins, the table of dims, and nodes.

use super::io::{Io, Result};
use super::labels::Labels;
use super::op::{dim, dims, index, op, zig_zag};
use super::tokens::numbered;
use crate::diag::Span;
use crate::dim::{Dim, DimInfo, IndexMap, Order};
use crate::graph::{Body, Node, Origin, Phase, Type, Value};
use crate::mesh::{Axis, Mesh, SubAxisInfo};
use crate::op::{DType, Op};
use crate::reason::{AvoidedBy, Reason};
use std::rc::Rc;
use std::sync::Arc;

/// What a level says beside the nodes of a body.
pub(super) trait NodeAnnotations {
    /// Lines before node `i`.
    fn before(&mut self, _: &mut Io, _i: usize) -> Result {
        Ok(())
    }
    /// After the type of node `i`.
    fn after_type(&mut self, _: &mut Io, _i: usize) -> Result {
        Ok(())
    }
    /// At the end of the line of node `i`.
    fn at_end(&mut self, _: &mut Io, _i: usize) -> Result {
        Ok(())
    }
}

/// Nothing: of the logical graph and of kernels.
pub(super) struct NoAnnotations;
impl NodeAnnotations for NoAnnotations {}

/// The entry of node `i` in a list beside the nodes, made if it is missing.
pub(super) fn entry<T: Clone>(list: &mut Vec<T>, i: usize, blank: T) -> &mut T {
    if list.len() <= i {
        list.resize(i + 1, blank);
    }
    &mut list[i]
}

pub(super) fn blank_type() -> Type {
    Type::scalar(DType::F32)
}

pub(super) fn blank_origin() -> Origin {
    Origin::new(Phase::Forward)
}

pub(super) fn dtype(io: &mut Io, t: &mut DType) -> Result {
    io.variant(t, "an element type", &[DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool].map(|t| (t.name(), t)))
}

/// `f32[batch, seq]`.
pub(super) fn ty(io: &mut Io, t: &mut Type) -> Result {
    dtype(io, &mut t.dtype)?;
    dims(io, &mut t.dims)
}

/// `@file:line:column+length`.
pub(super) fn span(io: &mut Io, s: &mut Option<Span>) -> Result {
    io.option(s, Span { file: 0, line: 0, col: 0, len: 0 }, " @", |io, s| {
        io.number(&mut s.file)?;
        io.with(":", &mut s.line, Io::number)?;
        io.with(":", &mut s.col, Io::number)?;
        io.with("+", &mut s.len, Io::number)
    })
}

/// `// forward layers.0.attn.q layer 0 in "attention" offloaded recomputed @0:23:11+6 because "..."`.
pub(super) fn origin(io: &mut Io, o: &mut Origin) -> Result {
    io.lit("  // ")?;
    io.variant(&mut o.phase, "a phase", &[Phase::Forward, Phase::Backward, Phase::Update].map(|p| (p.name(), p)))?;
    let mut scope = o.scope.to_string();
    io.name_or_nothing(&mut scope, " ", &["layer", "in", "offloaded", "recomputed", "because"])?;
    if io.reading() {
        o.scope = Arc::from(scope);
    }
    io.option(&mut o.layer, 0, " layer ", Io::number)?;
    let mut within = o.within.as_ref().map(ToString::to_string);
    io.option(&mut within, String::new(), " in ", Io::string)?;
    if io.reading() {
        o.within = within.map(Arc::from);
    }
    io.flag(&mut o.offloaded, " offloaded")?;
    io.flag(&mut o.recomputed, " recomputed")?;
    span(io, &mut o.span)
}

/// `because "operand 0 of dot: split along seq -> whole" avoided by sp off`.
pub(super) fn reason(io: &mut Io, r: &mut Option<Reason>) -> Result {
    io.option(r, Reason::from(""), " because ", |io, r| {
        io.string(&mut r.why)?;
        io.option(&mut r.avoided_by, AvoidedBy::OneStage, " avoided by ", avoided_by)
    })
}

/// Options have the names that they have in a module.
pub(super) fn avoided_by(io: &mut Io, a: &mut AvoidedBy) -> Result {
    let all = [
        ("sp", AvoidedBy::NoSequenceParallelism),
        ("zero", AvoidedBy::NoZero),
        ("recompute", AvoidedBy::NoRecomputation),
        ("moe_buffer", AvoidedBy::GreaterMoeBuffer),
        ("one_rank", AvoidedBy::OneRank(Axis::Pp)),
        ("same_data", AvoidedBy::SameData(Axis::Dp)),
        ("one_stage", AvoidedBy::OneStage),
        ("unlisted", AvoidedBy::Unlisted { axis: Axis::Tp, dim: String::new() }),
        ("unsplit", AvoidedBy::Unsplit(Axis::Tp)),
    ];
    io.variant(a, "what avoids it", &all)?;
    match a {
        AvoidedBy::NoSequenceParallelism => io.lit(" off"),
        AvoidedBy::NoZero | AvoidedBy::NoRecomputation => io.lit(" none"),
        AvoidedBy::GreaterMoeBuffer => io.lit(" greater"),
        AvoidedBy::OneRank(of) | AvoidedBy::SameData(of) | AvoidedBy::Unsplit(of) => io.with(" ", of, axis),
        AvoidedBy::OneStage => Ok(()),
        AvoidedBy::Unlisted { axis: of, dim } => {
            io.with(" ", of, axis)?;
            io.with(" ", dim, Io::string)
        }
    }
}

fn axis(io: &mut Io, a: &mut Axis) -> Result {
    io.variant(a, "an axis", &Axis::ALL.map(|a| (a.name(), a)))
}

/// `mesh [pp.0=2, dp.0.ep=2, tp.0=2]`, which the rest of the text refers to. A role among experts follows where it is not the usual one.
pub(super) fn mesh(io: &mut Io, m: &mut Mesh) -> Result {
    io.line("mesh ")?;
    io.list(&mut m.subs, SubAxisInfo::new(Axis::Tp, 0, 1), |io, s| {
        if io.reading() {
            let mark = io.mark();
            let word = io.word("a sub-axis")?;
            let mut parts = word.split('.');
            let mut of = || Some((Axis::parse(parts.next()?)?, parts.next()?.parse().ok()?, parts.next().map(Axis::parse)));
            match of() {
                Some((axis, factor, role)) if role != Some(None) => {
                    (s.axis, s.factor, s.role) = (axis, factor, role.flatten().unwrap_or(axis.usual_role()));
                }
                _ => return io.wrong(mark, format!("`{word}` is no sub-axis")),
            }
        } else {
            let role = if s.role == s.axis.usual_role() { String::new() } else { format!(".{}", s.role) };
            io.lit(&format!("{}.{}{role}", s.axis, s.factor))?;
        }
        io.with("=", &mut s.size, Io::number)
    })?;
    let twice = m.subs.iter().enumerate().any(|(k, s)| m.subs[..k].iter().any(|t| (s.axis, s.factor) == (t.axis, t.factor)));
    if io.reading() && (twice || m.subs.len() > 64) {
        return io.wrong(io.mark(), "sub-axes must be distinct, 64 at most");
    }
    io.mesh = m.clone();
    Ok(())
}

/// The dims of a body; what follows can name them.
fn dim_table(io: &mut Io, list: &mut Vec<DimInfo>) -> Result {
    if io.reading() {
        // Names are read first, so that a dim can be a copy of a later one.
        io.dims = Rc::default();
        let mark = io.mark();
        while io.line_if(true, "  dim ") {
            let (at, mut name, mut count) = (io.mark(), String::new(), 0);
            numbered(io, &mut name, &mut count)?;
            let position = io.dims.len() as u32;
            Rc::make_mut(&mut io.dims).add(&name);
            let want = io.dims.text(position);
            if want != if count == 0 { name.clone() } else { format!("{name}#{count}") } {
                return io.wrong(at, format!("the next dim of this name is `{want}`"));
            }
            io.skip_line();
        }
        io.rewind(mark);
    } else {
        io.dims = Rc::new(Labels::of(list.iter().map(|d| d.name.as_str())));
    }
    io.rows(list, DimInfo::new("", 0), "  dim ", |io, i, info| {
        let mut d = Dim(i as u32);
        dim(io, &mut d)?;
        if io.reading() {
            info.name = io.dims.get(i).0;
        }
        io.with(" = ", &mut info.size, Io::number)?;
        io.or(&mut info.logical, info.size, " logical ", Io::number)?;
        io.option(&mut info.copy_of, Dim(0), " copy of ", dim)?;
        io.flag(&mut info.whole, " whole")?;
        io.or(&mut info.global, info.size, " global ", Io::number)?;
        io.or(&mut info.index, IndexMap::whole(info.size), " index ", index)?;
        io.or(&mut info.order, Order::Plain, " zigzag ", zig_zag)
    })
}

/// A body: its dims, then its nodes.
pub(super) fn body(io: &mut Io, b: &mut Body, beside: &mut dyn NodeAnnotations) -> Result {
    io.line("dims:")?;
    dim_table(io, &mut b.dims.list)?;
    io.line("body:")?;
    io.values = 0;
    for i in 0.. {
        if i < b.nodes.len() || io.reading() {
            beside.before(io, i)?;
        }
        if !io.line_if(i < b.nodes.len(), "  %") {
            break;
        }
        if io.reading() {
            b.nodes.push(Node { op: Op::Add, args: vec![], ty: blank_type(), origin: blank_origin() });
        }
        row_number(io, i)?;
        io.lit(" = ")?;
        let node = &mut b.nodes[i];
        op(io, node)?;
        io.with(" : ", &mut node.ty, ty)?;
        beside.after_type(io, i)?;
        origin(io, &mut node.origin)?;
        beside.at_end(io, i)?;
        io.values = i + 1;
    }
    Ok(())
}

/// The number of a row, which must be its position.
pub(super) fn row_number(io: &mut Io, i: usize) -> Result {
    let (mark, mut number) = (io.mark(), i);
    io.number(&mut number)?;
    if number == i { Ok(()) } else { io.wrong(mark, format!("the next number is {i}")) }
}

/// `[%1, %2]`.
pub(super) fn values(io: &mut Io, vs: &mut Vec<Value>) -> Result {
    io.list(vs, Value(0), Io::value)
}
