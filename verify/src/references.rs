//! What the verifiers of graphs take for granted, and so what each of them checks before all else: that what a graph
//! names exists, that nodes have operands, and that sizes can be counted.
//!
//! The parser of texts checks that operands come first and that names of dims are known. Numbers of parameters, of
//! values of another graph and of elements it takes as they are.

use crate::violation::{Checked, ensure, fail};
use crate::{Invariant, LocationPart, Violation};
use ir::dim::{Base, Dim, Dims, IndexMap, Linear};
use ir::graph::{Body, Graph, Value};
use ir::local::Local;
use ir::mesh::Mesh;
use ir::module::{GlobalGraph, Graphs};
use ir::op::{Op, Scalar};
use ir::sharded::Sharded;

/// The bound of numbers of elements, indices and ranks. Texts have tensors of 2^53 elements at most, and a job
/// without room for as many is the user's error much later (E0644).
const MOST: u64 = 1 << 54;

/// The sharded graph of a module that should have one, with what it names checked.
///
/// # Errors
/// It is not sharded, or the first name of nothing.
pub fn whole(graphs: &Graphs) -> Result<&Sharded, Violation> {
    match &graphs.whole {
        GlobalGraph::Sharded(s) => sharded(s).map(|()| s),
        GlobalGraph::Logical(_) => fail(Invariant::GraphsOfLevel, LocationPart::Graph, "it is not sharded"),
    }
}

/// Checks what a logical graph names.
///
/// # Errors
/// The first name of nothing.
pub fn graph(g: &Graph) -> Result<(), Violation> {
    body(&g.body, &Mesh { subs: vec![] })?;
    names(g)
}

fn names(g: &Graph) -> Result<(), Violation> {
    let known = |what: &'static str, number: u32, all: usize| {
        ensure((number as usize) < all, Invariant::GraphNames, || format!("there is no {what} {number}, but {all} of them"))
    };
    for v in g.body.values() {
        let named = match &g.body[v].op {
            Op::Param(p) | Op::State(p, _) => known("parameter", *p, g.params.len()),
            Op::Input(i) => known("input", *i, g.inputs.len()),
            Op::Table(t) => known("table", *t, g.tables.len()),
            _ => Ok(()),
        };
        named.map_err(|e| e.at(v))?;
    }
    let ends = g.grads.iter().copied().chain(g.updates.iter().map(|u| (u.param, u.new)));
    ends.into_iter().try_for_each(|(p, v)| known("parameter", p, g.params.len()).map_err(|e| e.at(v)))
}

/// Checks what a sharded graph names.
///
/// # Errors
/// The first name of nothing.
pub fn sharded(s: &Sharded) -> Result<(), Violation> {
    mesh(&s.mesh).map_err(|e| e.at(LocationPart::Graph))?;
    body(&s.graph.body, &s.mesh)?;
    names(&s.graph)?;
    let (digits, dims) = (s.digits.len(), s.graph.body.dims.list.len());
    ensure(digits == dims, Invariant::GraphNames, || format!("there are digits of {digits} dims, not of {dims}"))
        .map_err(|e| e.at(LocationPart::Graph))
}

/// Checks what local graphs name, of the sharded graph too where that is at hand.
///
/// # Errors
/// The first name of nothing.
pub fn locals<'a>(all: impl IntoIterator<Item = &'a Local>, of: Option<&Sharded>) -> Result<(), Violation> {
    all.into_iter().try_for_each(|l| {
        let stage = LocationPart::Stage(l.stages.first().map_or(0, |s| s.0));
        local(l, of).map_err(|e| e.within(stage))
    })
}

fn local(l: &Local, of: Option<&Sharded>) -> Result<(), Violation> {
    let here = |e: crate::violation::Breach| e.at(LocationPart::Graph);
    mesh(&l.mesh).map_err(here)?;
    if let Some(s) = of {
        let (axes, want) = (l.mesh.subs.len(), s.mesh.subs.len());
        ensure(axes == want, Invariant::AxisSizes, || format!("its mesh has {axes} axes, that of the sharded graph {want}")).map_err(here)?;
        let values = s.graph.body.nodes.len();
        for (v, source) in l.body.values().zip(&l.source) {
            if let Some((w, _)) = source.as_ref().filter(|h| h.0.index() >= values) {
                return fail(Invariant::GraphNames, v, format!("it holds {w} of {values} values"));
            }
        }
    }
    ensure(!l.stages.is_empty(), Invariant::StageOfGraph, || "it belongs to no stage".into()).map_err(here)?;
    for (stage, params) in &l.stages {
        let (got, slots) = (params.len(), l.params.len());
        ensure(got == slots, Invariant::StageOfGraph, || format!("stage {stage} has {got} parameters, not {slots}")).map_err(here)?;
    }
    for b in &l.buckets {
        ensure(b.size < MOST, Invariant::GraphSizes, || format!("a bucket has {} elements", b.size)).map_err(here)?;
        b.pieces.iter().try_for_each(|p| ensure(p.at < MOST, Invariant::GraphSizes, || format!("a piece begins at {}", p.at))).map_err(here)?;
    }
    let maps = l.params.iter().map(|p| &p.index).chain(l.buckets.iter().flat_map(|b| &b.pieces).map(|p| &p.index));
    maps.into_iter()
        .try_for_each(|maps| {
            maps.iter().try_for_each(|map| index(&l.mesh, map))?;
            let elements = maps.iter().fold(1u64, |n, map| n.saturating_mul(map.len()));
            ensure(elements < MOST, Invariant::GraphSizes, || format!("a parameter has {elements} elements"))
        })
        .map_err(here)?;
    body(&l.body, &l.mesh)
}

/// Checks that no axis is empty, and that ranks can be counted.
fn mesh(m: &Mesh) -> Checked {
    let ranks = m.subs.iter().fold(1u64, |n, s| n.saturating_mul(s.size));
    ensure(ranks > 0, Invariant::AxisSizes, || "its mesh has an empty axis".into())?;
    ensure(ranks < 1 << 32, Invariant::AxisSizes, || format!("its mesh has {ranks} ranks and microbatches"))
}

/// Checks dims and nodes.
fn body(b: &Body, mesh: &Mesh) -> Result<(), Violation> {
    b.dims.ids().try_for_each(|d| dim(&b.dims, d, mesh)).map_err(|e| e.at(LocationPart::Graph))?;
    b.values().try_for_each(|v| node(b, v, mesh).map_err(|e| e.at(v)))
}

fn dim(dims: &Dims, d: Dim, mesh: &Mesh) -> Checked {
    let (info, name) = (&dims[d], dims.name(d));
    ensure((1..MOST).contains(&info.size), Invariant::GraphSizes, || format!("dim `{name}` has {} elements", info.size))?;
    let mut from = Some(d);
    for _ in &dims.list {
        from = from.and_then(|d| dims[d].copy_of);
    }
    ensure(from.is_none(), Invariant::GraphNames, || format!("dim `{name}` is a copy of itself"))?;
    index(mesh, &info.index)
}

fn node(b: &Body, v: Value, mesh: &Mesh) -> Checked {
    let node = &b[v];
    if let Some(why) = node.op.arity().refuses(node.args.len()) {
        return Err(Invariant::OperandCount.breach(format!("{} {why}", node.op.name())));
    }
    let elements = |dims: &[Dim]| dims.iter().fold(1u64, |n, d| n.saturating_mul(b.dims.size(*d)));
    let counted = |dims: &[Dim]| ensure(elements(dims) < MOST, Invariant::GraphSizes, || format!("it has {} elements", elements(dims)));
    counted(&node.ty.dims)?;
    match &node.op {
        Op::View { from, to } => {
            counted(from)?;
            counted(to)
        }
        Op::Slice { at, .. } | Op::Pad { at, .. } => ensure(*at < MOST, Invariant::GraphSizes, || format!("it begins at {at}")),
        Op::Shard { index: map, .. } => index(mesh, map),
        Op::Scalar(Scalar::Linear(form)) => reached(mesh, &[], form),
        _ => Ok(()),
    }
}

/// Checks that an index map has elements, and that what it reaches can be counted.
fn index(mesh: &Mesh, map: &IndexMap) -> Checked {
    let form: &[_] = match &map.base {
        Base::Coords(form) => form,
        Base::Zero | Base::Slot(_) => &[],
    };
    reached(mesh, &map.parts, &form.to_vec())
}

fn reached(mesh: &Mesh, parts: &[(u64, u64)], form: &Linear) -> Checked {
    ensure(parts.iter().all(|p| p.0 > 0), Invariant::GraphSizes, || "an index map is empty".into())?;
    let steps = parts.iter().copied().chain(form.iter().map(|(u, stride)| (mesh.subs.get(usize::from(u.0)).map_or(1, |s| s.size), *stride)));
    let most = steps.fold(1u64, |n, (extent, stride)| n.saturating_add(extent.saturating_mul(stride)));
    let count = parts.iter().fold(1u64, |n, p| n.saturating_mul(p.0));
    ensure(most.max(count) < MOST, Invariant::GraphSizes, || format!("an index map reaches {most}"))
}
