//! Dots that are no matrix products: without rows or without columns nothing is used twice, so they are reductions.

use crate::layout::tensors;
use ir::dim::Dim;
use ir::graph::{Node, Type, Value};
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op, Reduce};

/// The `dot` of a kernel, of factors as they are, and what it sums over.
fn product(kernel: &Kernel) -> Option<(Value, Vec<Dim>)> {
    let body = &kernel.body;
    body.values().find_map(|v| if let Op::Dot { over, tf32: false } = &body[v].op { Some((v, over.clone())) } else { None })
}

/// The kernel as loops that multiply and sum, if one factor of its `dot` has no dims of its own.
pub fn as_loops(kernel: &Kernel) -> Option<Kernel> {
    let (dot, _) = product(kernel)?;
    if kernel.body.is_matrix_product(dot) { None } else { spelled_out(kernel) }
}

/// The kernel as loops that multiply and sum, unless an output lacks a dim of the product.
fn spelled_out(kernel: &Kernel) -> Option<Kernel> {
    let body = &kernel.body;
    let (dot, over) = product(kernel)?;
    // The grid is that of the product's dims, which every output must have.
    let grid: Vec<Dim> = body.dims_of(dot).to_vec();
    if tensors(kernel)[kernel.inputs.len()..].iter().any(|(ty, _)| grid.iter().any(|d| !ty.has(*d))) {
        return None;
    }
    let mut out = kernel.clone();
    let node = out.body.nodes[dot.index()].clone();
    // The factors in f32 and their product go before the sum, which takes the dot's place; later values move by
    // three.
    let moved = |v: Value| if v.0 >= dot.0 { Value(v.0 + 3) } else { v };
    for later in &mut out.body.nodes[dot.index()..] {
        later.args.iter_mut().for_each(|a| *a = moved(*a));
    }
    out.outputs.iter_mut().for_each(|o| o.value = moved(o.value));
    let wide = |arg: Value| Node { op: Op::Cast, args: vec![arg], ty: Type::new(DType::F32, body.dims_of(arg)), origin: node.origin.clone() };
    let factors: Vec<Node> = node.args.iter().map(|a| wide(*a)).collect();
    let mut product = node.clone();
    product.op = Op::Binary(Binary::Mul);
    product.args = vec![dot, Value(dot.0 + 1)];
    product.ty.dtype = DType::F32;
    product.ty.dims.extend(&over);
    let sum = &mut out.body.nodes[dot.index()];
    sum.op = Op::Reduce { kind: Reduce::Sum, over };
    sum.args = vec![Value(dot.0 + 2)];
    out.body.nodes.splice(dot.index()..dot.index(), factors.into_iter().chain([product]));
    out.family = Family::Loops { grid };
    Some(out)
}
