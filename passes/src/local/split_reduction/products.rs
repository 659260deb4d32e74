//! Split-K: matrix products whose results make too few tiles to fill a GPU are made in segments of what they sum over,
//! as one product that has these as repetitions; then the results of all segments are added up, in f32.
//!
//! Into how many follows from the shapes, and the GPU's generation, alone; so the bits of a result do not depend on the
//! card at hand. Segments are all alike, and those of the outermost contracted dims: so each is as dense in memory as
//! the whole. Products that are cut into chunks of rows beside communication (`--tp-comm-overlap`) stay whole, as do
//! all beside them.

use super::push;
use crate::local::role::{Role, role};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Node, Type, Value};
use ir::local::Local;
use ir::op::{DType, Op, Reduce};
use ir::options::{Options, SplitK, TpOverlap};
use ir::tiles::{Generation, ProductSize};

/// The least contracted elements of a segment. With fewer, a segment ends before the copies of its first tiles
/// arrive.
const LEAST: u64 = 256;
/// The fraction of the unsplit time that a split must stay below, since the rates of tiles are estimates.
const MARGIN: f64 = 7.0 / 8.0;
/// The least contracted elements of a segment in tests, whose products are small.
const LEAST_INTO: u64 = 2;

/// Into how many segments a value is split, if it is a product for which that pays.
pub fn segments(local: &Local, v: Value, options: &Options) -> Option<u64> {
    let body = &local.body;
    let Op::Dot { over, .. } = &body[v].op else { return None };
    let in_chunks = options.tp > 1 && options.tp_overlap != TpOverlap::Off;
    let of_part = body[v].args.iter().any(|x| is_part(body, *x));
    if in_chunks || of_part || local.host.contains(&v) || !body.is_matrix_product(v) {
        return None;
    }
    let all = body.dims.elements(over);
    match options.split_k {
        SplitK::Off => None,
        SplitK::Into(most) => (2..=most.min(all / LEAST_INTO)).rev().find(|n| cut(body, v, *n).is_some()),
        SplitK::For(generation) => {
            let possible = (2..=all / LEAST).take_while(|n| *n <= generation.multiprocessors()).filter(|n| cut(body, v, *n).is_some());
            let time = |n: u64| split_time(body, v, (generation, options.tf32), n);
            let best = possible.map(|n| (time(n), n)).min_by(|a, b| a.0.total_cmp(&b.0))?;
            (best.0 < MARGIN * time(1)).then_some(best.1)
        }
    }
}

/// Whether a value is a part of another one in memory. The verifier normalizes a part of an exchanged copy, but not
/// segments of such a part.
fn is_part(body: &Body, mut v: Value) -> bool {
    while role(body, v) == Role::Alias {
        if matches!(body[v].op, Op::Slice { .. } | Op::Shard { .. }) {
            return true;
        }
        v = body[v].args[0];
    }
    false
}

/// Nanoseconds of a product in this many segments, with the sum of their results.
fn split_time(body: &Body, v: Value, (generation, tf32): (Generation, bool), segments: u64) -> f64 {
    let [a, b] = [0, 1].map(|k| body.dims_of(body[v].args[k]));
    let Op::Dot { over, .. } = &body[v].op else { unreachable!("invariant: it is a product") };
    let size = |of: &mut dyn Iterator<Item = &Dim>| of.map(|d| body.dims.size(*d)).product::<u64>();
    let both = size(&mut a.iter().filter(|d| b.contains(d) && !over.contains(d)));
    let [rows, columns] = [(a, b), (b, a)].map(|(own, other)| size(&mut own.iter().filter(|d| !other.contains(d))));
    let shape = ProductSize { repeats: both, rows, columns, more: 0 };
    let (contracted, dtype) = (body.dims.elements(over), body[body[v].args[0]].ty.dtype);
    let factors = (dtype, dtype.bytes() * body[v].args.iter().map(|x| body.elements(*x)).sum::<u64>());
    let product = generation.product(&ProductSize { repeats: both * segments, ..shape }, contracted / segments, factors, tf32);
    if segments == 1 { product } else { product + generation.sum(&shape, segments) }
}

/// How a product's contracted dims are cut.
struct ContractionSplit {
    /// The outermost dims, each of whose elements is a segment.
    whole: Vec<Dim>,
    /// The next dim, if it is cut, and its number of parts.
    parts: Option<(Dim, u64)>,
}

/// The split into so many segments; `None` if the outermost contracted dims cannot be cut that way.
fn cut(body: &Body, v: Value, mut segments: u64) -> Option<ContractionSplit> {
    let Op::Dot { over, .. } = &body[v].op else { return None };
    let mut whole = vec![];
    // Only contracted dims can number segments, not those of one factor or of a batch.
    for d in body.dims_of(body[v].args[0]).iter().filter(|d| ir::fault!("split_reduction.segments.any", true, over.contains(d))) {
        let size = body.dims.size(*d);
        if segments == 1 {
            break;
        } else if segments.is_multiple_of(size) {
            whole.push(*d);
            ir::fault!("split_reduction.segments.count", {}, segments /= size);
        } else {
            return size.is_multiple_of(segments).then_some(ContractionSplit { whole, parts: Some((*d, segments)) });
        }
    }
    (segments == 1).then_some(ContractionSplit { whole, parts: None })
}

/// Emits a product in this many segments, all but the last node, which is returned to replace `node`. The operands of
/// `node` are values of `out` already.
pub fn split(out: &mut Local, local: &Local, v: Value, node: Node, segments: u64) -> Node {
    let ContractionSplit { whole, parts } = cut(&local.body, v, segments).expect("invariant: it was found to have such segments");
    let Op::Dot { over, tf32 } = &node.op else { unreachable!("invariant: it is a product") };
    let (mut numbers, mut over, mut args) = (whole, over.clone(), node.args.clone());
    over.retain(|d| ir::fault!("split_reduction.segments.over", true, !numbers.contains(d)));
    if let Some((d, parts)) = parts {
        let size = out.body.dims.size(d);
        let [part, within] = [("segment", parts), ("within", ir::fault!("split_reduction.segments.size", size / parts - 1, size / parts))]
            .map(|(name, size)| out.body.dims.add(DimInfo::new(name, size)));
        for (k, arg) in args.iter_mut().enumerate() {
            let to = ir::fault!("split_reduction.segments.inner", if k == 0 { vec![part, within] } else { vec![within, part] }, vec![part, within]);
            let op = Op::View { from: vec![d], to };
            let dims: Vec<Dim> = out.body.dims_of(*arg).iter().flat_map(|e| if *e == d { vec![part, within] } else { vec![*e] }).collect();
            let ty = Type::new(out.body[*arg].ty.dtype, dims);
            *arg = push(out, Node { op, args: vec![*arg], ty, origin: node.origin.clone() }, local, v);
        }
        ir::fault!("split_reduction.segments.left", {}, numbers.push(part));
        over.iter_mut().filter(|e| **e == d).for_each(|e| *e = within);
    }
    let sum = ir::fault!("split_reduction.segments.max", Reduce::Max, Reduce::Sum);
    let op = Op::Dot { over, tf32: *tf32 };
    let summed = ir::fault!("split_reduction.segments.rounded", node.ty.dtype, DType::F32);
    let ty = Type::new(summed, [&numbers, &*node.ty.dims].concat());
    ir::fault!("split_reduction.segments.twice", args[1] = args[0], {});
    let each = push(out, Node { op, args, ty, origin: node.origin.clone() }, local, v);
    ir::fault!("split_reduction.segments.accumulated", out.accumulate[each.index()] = local.accumulate[v.index()], {});
    let last =
        Node { op: Op::Reduce { kind: sum, over: numbers }, args: vec![each], ty: Type::new(DType::F32, node.ty.dims.clone()), ..node.clone() };
    if ir::fault!("split_reduction.segments.type", true, node.ty.dtype == DType::F32) {
        return last;
    }
    let sum = push(out, last, local, v);
    Node { op: Op::Cast, args: vec![sum], ..node }
}
