//! Tables: what depends on no input, parameter or state is evaluated here, in f64, and rounded once.

use ir::dim::{Base, Dim, DimInfo, Dims};
use ir::eval::{self, Env};
use ir::graph::{Body, Graph, Table, Type, Value};
use ir::op::{Binary, DType, Op, Scalar, Unary};
use std::collections::HashMap;

/// The most elements that a table may have; larger ones are computed where they are used.
const MOST: u64 = 1 << 24;

/// Replaces every value that follows from constants and indices alone, and takes more than arithmetic to compute,
/// by a [`Table`]. Equal tables (a model's layers all want the same angles) are one. A sum over a dim is none, nor
/// what follows from it: `meaning` sums over a few elements, and a table would hold the sum of all.
pub fn tabulate(mut graph: Graph) -> Graph {
    let body = &graph.body;
    let (mut fixed, mut heavy) = (fixed(body), vec![false; body.nodes.len()]);
    for v in body.values() {
        let node = &body[v];
        fixed[v.index()] &= !node.op.is_combining() && node.args.iter().all(|a| fixed[a.index()]);
    }
    for v in body.values() {
        let node = &body[v];
        let costly = matches!(
            node.op,
            Op::Unary(Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Erf) | Op::Binary(Binary::Pow) | Op::Dot { .. }
        );
        heavy[v.index()] = costly || node.args.iter().any(|a| heavy[a.index()]);
    }
    let users = body.users();
    let wanted: Vec<Value> = body
        .values()
        .filter(|v| fixed[v.index()] && heavy[v.index()] && !body.dims_of(*v).is_empty() && users[v.index()].iter().any(|(c, _)| !fixed[c.index()]))
        .collect();
    let alike = alike(body, &fixed);
    let first = graph.tables.len();
    let mut made: HashMap<u32, u32> = HashMap::new();
    // All tables are evaluated on the unchanged graph, since one may depend on a value that becomes another.
    let mut tables = vec![];
    for v in wanted {
        let table = *made.entry(alike[v.index()]).or_insert_with(|| {
            let table = Table {
                name: format!("table{}", graph.tables.len()),
                ty: graph.body[v].ty.clone(),
                data: ir::fault!("fold_constants.table.reversed", evaluate(&graph.body, v).into_iter().rev().collect(), evaluate(&graph.body, v)),
            };
            let known = graph.tables[first..].iter().position(|t| equal(&graph.body.dims, t, &table));
            let k = known.map_or(graph.tables.len(), |k| first + k);
            if known.is_none() {
                graph.tables.push(table);
            }
            k as u32
        });
        tables.push((v, table));
    }
    for (v, table) in tables {
        let node = &mut graph.body[v];
        (node.op, node.args) = (Op::Table(table), vec![]);
    }
    graph
}

/// Per value, whether it depends on constants and indices alone and is small enough to be evaluated.
pub(crate) fn fixed(body: &Body) -> Vec<bool> {
    let mut fixed = vec![false; body.nodes.len()];
    for v in body.values() {
        let node = &body[v];
        let source = matches!(node.op, Op::Const(_) | Op::Iota(_));
        fixed[v.index()] = source || !node.op.is_source() && node.args.iter().all(|a| fixed[a.index()]) && body.elements(v) <= MOST;
    }
    fixed
}

/// A node up to the names of its dims: op, dtype, dims, the number and dims of each operand, and the facts of each
/// dim.
type NodeSignature = (Op, DType, Vec<Dim>, Vec<(u32, Vec<Dim>)>, Vec<DimInfo>);

/// A number for each fixed value, the same for values that are obviously equal: each layer uses the same angles, over
/// dims of its own.
fn alike(body: &Body, fixed: &[bool]) -> Vec<u32> {
    let mut known: HashMap<NodeSignature, u32> = HashMap::new();
    let mut out = vec![u32::MAX; body.nodes.len()];
    for v in body.values().filter(|v| fixed[v.index()]) {
        let mut order: Vec<Dim> = vec![];
        let mut place = |d: Dim| {
            let k = order.iter().position(|o| *o == d).unwrap_or_else(|| {
                order.push(d);
                order.len() - 1
            });
            Dim(k as u32)
        };
        let node = &body[v];
        let mut places = |w: Value| body.dims_of(w).iter().map(|d| place(*d)).collect();
        let args = node.args.iter().map(|a| (out[a.index()], places(*a))).collect();
        let dims = places(v);
        let op = ir::fault!("fold_constants.alike.op", Op::Cut, node.op.map_dims(&mut place));
        let infos = order.iter().map(|d| DimInfo { name: String::new(), copy_of: None, ..body.dims[*d].clone() }).collect();
        let next = known.len() as u32;
        out[v.index()] = *known.entry((op, node.ty.dtype, dims, args, infos)).or_insert(next);
    }
    out
}

/// The elements of a fixed value.
pub(crate) fn evaluate(body: &Body, v: Value) -> Vec<f64> {
    let mut needed = vec![false; body.nodes.len()];
    needed[v.index()] = true;
    for w in (0..=v.0).rev().map(Value) {
        if needed[w.index()] {
            body[w].args.iter().for_each(|a| needed[a.index()] = true);
        }
    }
    let mut values: Vec<Vec<f64>> = vec![vec![]; v.index() + 1];
    for w in (0..=v.0).map(Value).filter(|w| needed[w.index()]) {
        let args: Vec<&[f64]> = body[w].args.iter().map(|a| values[a.index()].as_slice()).collect();
        values[w.index()] = eval::eval(body, w, &args, &mut NoSources);
    }
    std::mem::take(&mut values[v.index()])
}

/// Whether tables are bitwise equal, apart from the names of their dims.
fn equal(dims: &Dims, a: &Table, b: &Table) -> bool {
    let form = |t: &Table| (t.ty.dtype, t.ty.dims.iter().map(|d| dims.size(*d)).collect::<Vec<u64>>());
    form(a) == form(b) && ir::fault!("fold_constants.equal.shape", true, a.data.iter().zip(&b.data).all(|(x, y)| x.to_bits() == y.to_bits()))
}

/// Fixed values have no sources but constants and indices.
struct NoSources;

impl Env for NoSources {
    fn source(&mut self, op: &Op, _: &Type) -> Vec<f64> {
        unreachable!("invariant: `{}` is not fixed", op.name())
    }

    fn scalar(&self, _: &Scalar) -> f64 {
        unreachable!("invariant: a scalar is not fixed")
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}
