//! Tables: what depends on no input, parameter or state is evaluated here, in f64, and rounded once.

use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Body, Graph, Table, Type, Value};
use ir::op::{Binary, Op, Scalar, Unary};

/// The most elements that a table may have; larger ones are computed where they are used.
const MOST: u64 = 1 << 24;

/// Replaces every value that follows from constants and indices alone, and takes more than arithmetic to compute, by a
/// [`Table`]. Equal tables (a model's layers all want the same angles) are one.
pub fn tabulate(mut graph: Graph) -> Graph {
    let body = &graph.body;
    let (mut fixed, mut heavy) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    for v in body.values() {
        let node = &body[v];
        let source = matches!(node.op, Op::Const(_) | Op::Iota(_));
        fixed[v.index()] = source || !node.op.is_source() && node.args.iter().all(|a| fixed[a.index()]) && body.elements(v) <= MOST;
        let costly = matches!(
            node.op,
            Op::Unary(Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Erf)
                | Op::Binary(Binary::Pow)
                | Op::Dot { .. }
                | Op::Cumsum { .. }
        );
        heavy[v.index()] = costly || node.args.iter().any(|a| heavy[a.index()]);
    }
    let users = body.users();
    let wanted: Vec<Value> = body
        .values()
        .filter(|v| fixed[v.index()] && heavy[v.index()] && !body.dims_of(*v).is_empty() && users[v.index()].iter().any(|(c, _)| !fixed[c.index()]))
        .collect();
    let mut known: std::collections::HashMap<Vec<u8>, u32> = std::collections::HashMap::new();
    for v in wanted {
        let (key, data) = evaluate(&graph.body, v);
        let ty = graph.body[v].ty.clone();
        let table = *known.entry(key).or_insert_with(|| {
            let name = format!("table{}", graph.tables.len());
            graph.tables.push(Table { name, ty: ty.clone(), data: data.clone() });
            graph.tables.len() as u32 - 1
        });
        let node = &mut graph.body[v];
        (node.op, node.args) = (Op::Table(table), vec![]);
    }
    graph
}

/// The elements of a fixed value, and a key that is equal for equal tables.
fn evaluate(body: &Body, v: Value) -> (Vec<u8>, Vec<f64>) {
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
        values[w.index()] = eval::eval(body, w, &args, &mut Fixed);
    }
    let data = std::mem::take(&mut values[v.index()]);
    let mut key: Vec<u8> = data.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
    key.extend(body.dims_of(v).iter().flat_map(|d| body.dims.size(*d).to_le_bytes()));
    key.extend(body[v].ty.dtype.name().bytes());
    (key, data)
}

/// Fixed values have no sources but constants and indices.
struct Fixed;

impl Env for Fixed {
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
