//! The reference interpreter: plain loops in f64 over a body. It defines every op; results of 16-bit types are rounded to them.
//!
//! Ints and bools are f64 too (exact below 2^53). Values are dense, in the storage order of their type.

mod attention;
mod contract;
mod numbers;

pub use numbers::erf;

use crate::dim::{Base, Dim, DimInfo, Dims, IndexMap};
use crate::graph::{Body, Type, Value};
use crate::op::{self, Binary, DType, Op, Reduce, Routing, Scalar};
use crate::random;
use contract::contract;
use numbers::{binary, compare, unary};
use std::borrow::Cow;

/// What a body's sources hold, and where the shards it computes on begin.
pub trait Env {
    /// The elements of `Input`, `Param`, `State` or `Table` (or of `Recv` or `Collective`, where other ranks matter), dense in
    /// the type's storage order.
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64>;
    /// The value of a number known at run time; of an i32 one too, as f64.
    fn scalar(&self, scalar: &Scalar) -> f64;
    /// The value of an index map's base.
    fn base(&self, base: &Base) -> u64;
    /// The model's index of a dim's element.
    fn index(&self, dims: &Dims, dim: Dim, i: u64) -> u64 {
        let DimInfo { index, order, .. } = &dims[dim];
        order.index(self.base(&index.base) + index.offset(i))
    }
}

/// What sees a node's operands and its value, and may change that, before others are made of it.
pub type Change<'a> = dyn FnMut(Value, &[&[f64]], &mut [f64], &mut dyn Env) + 'a;

/// Evaluates all nodes in order; the result holds one tensor per node.
pub fn run(body: &Body, env: &mut dyn Env) -> Vec<Vec<f64>> {
    run_changed(body, env, &mut |_, _, _, _| {})
}

/// As [`run`], of values that are changed.
pub fn run_changed(body: &Body, env: &mut dyn Env, change: &mut Change<'_>) -> Vec<Vec<f64>> {
    let mut values: Vec<Vec<f64>> = Vec::with_capacity(body.nodes.len());
    for v in body.values() {
        let args: Vec<&[f64]> = body[v].args.iter().map(|a| values[a.index()].as_slice()).collect();
        let mut out = eval(body, v, &args, env);
        change(v, &args, &mut out, env);
        values.push(out);
    }
    values
}

/// Positions in an operand for every element of a result: operand dims that the result lacks are fixed at 0.
struct Walk {
    sizes: Vec<usize>,
    at: Vec<usize>,
}

impl Walk {
    fn new(dims: &Dims, over: &[Dim]) -> Walk {
        let sizes: Vec<usize> = over.iter().map(|d| dims.size(*d) as usize).collect();
        Walk { at: vec![0; sizes.len()], sizes }
    }

    fn total(&self) -> usize {
        self.sizes.iter().product()
    }

    fn step(&mut self) {
        for k in (0..self.at.len()).rev() {
            self.at[k] += 1;
            if self.at[k] < self.sizes[k] {
                return;
            }
            self.at[k] = 0;
        }
    }

    /// The offset for strides given per walked dim.
    fn offset(&self, strides: &[usize]) -> usize {
        self.at.iter().zip(strides).map(|(i, s)| i * s).sum()
    }
}

/// Strides of a dense tensor along each of `over`; 0 for dims it lacks.
fn strides(dims: &Dims, ty: &[Dim], over: &[Dim]) -> Vec<usize> {
    let mut dense = vec![1usize; ty.len()];
    for k in (1..ty.len()).rev() {
        dense[k - 1] = dense[k] * dims.size(ty[k]) as usize;
    }
    over.iter().map(|d| ty.iter().position(|e| e == d).map_or(0, |k| dense[k])).collect()
}

fn pointwise(body: &Body, v: Value, args: &[&[f64]], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let of: Vec<(&[f64], &[Dim])> = args.iter().zip(&body[v].args).map(|(x, a)| (*x, body.dims_of(*a))).collect();
    mapped(&body.dims, &body[v].ty.dims, &of, f)
}

/// Applies `f` at each point over some dims to the elements of tensors that have some of these dims each.
fn mapped(dims: &Dims, over: &[Dim], of: &[(&[f64], &[Dim])], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    // Dims that are contiguous in all tensors are walked as one loop, given by a size and a stride in each tensor.
    let steps: Vec<Vec<usize>> = of.iter().map(|(_, has)| strides(dims, has, over)).collect();
    let mut walks: Vec<(usize, Vec<usize>)> = vec![];
    for (d, size) in over.iter().map(|d| dims.size(*d) as usize).enumerate() {
        let step: Vec<usize> = steps.iter().map(|s| s[d]).collect();
        match walks.last_mut() {
            Some((outer, far)) if far.iter().zip(&step).all(|(far, near)| *far == near * size) => (*outer, *far) = (*outer * size, step),
            _ => walks.push((size, step)),
        }
    }
    let (row, near) = walks.pop().unwrap_or((1, vec![0; of.len()]));
    let rows: usize = walks.iter().map(|(size, _)| size).product();
    let (mut out, mut point) = (Vec::with_capacity(rows * row), vec![0.0; of.len()]);
    let (mut at, mut first) = (vec![0; walks.len()], vec![0; of.len()]);
    for _ in 0..rows {
        out.extend((0..row).map(|i| {
            point.iter_mut().zip(of).zip(first.iter().zip(&near)).for_each(|((x, (data, _)), (first, step))| *x = data[first + i * step]);
            f(&point)
        }));
        for (at, (size, steps)) in at.iter_mut().zip(&walks).rev() {
            *at += 1;
            first.iter_mut().zip(steps).for_each(|(first, step)| *first += step);
            if *at < *size {
                break;
            }
            first.iter_mut().zip(steps).for_each(|(first, step)| *first -= *at * step);
            *at = 0;
        }
    }
    out
}

/// The result of a pointwise op, of this type, from single numbers of type `from`. A 16-bit result is rounded.
pub fn number(op: &Op, dtype: DType, from: DType, args: &[f64]) -> f64 {
    let x = at_a_point(op, dtype, from, args);
    if dtype.is_half() { dtype.round(x) } else { x }
}

fn at_a_point(op: &Op, dtype: DType, from: DType, args: &[f64]) -> f64 {
    match op {
        Op::Const(c) => c.0,
        Op::Unary(u) => unary(*u, args[0]),
        Op::Binary(b) => binary(*b, from, args[0], args[1]),
        Op::Compare(c) => compare(*c, args[0], args[1]),
        Op::Select => {
            if args[0] != 0.0 {
                args[1]
            } else {
                args[2]
            }
        }
        Op::Add => args.iter().sum(),
        Op::Cast => match dtype {
            DType::F32 | DType::Bf16 | DType::F16 => args[0],
            DType::I32 => args[0].trunc(),
            DType::Bool => f64::from(args[0] != 0.0),
        },
        Op::StopGradient => args[0],
        _ => unreachable!("invariant: a pointwise op"),
    }
}

/// Evaluates one node from its operands' values. A 16-bit result is rounded, once.
pub fn eval(body: &Body, v: Value, args: &[&[f64]], env: &mut dyn Env) -> Vec<f64> {
    let mut out = unrounded(body, v, args, env);
    let dtype = body[v].ty.dtype;
    if dtype.is_half() {
        out.iter_mut().for_each(|x| *x = dtype.round(*x));
    }
    out
}

fn unrounded(body: &Body, v: Value, args: &[&[f64]], env: &mut dyn Env) -> Vec<f64> {
    let node = &body[v];
    let dims = &body.dims;
    let total = dims.elements(&node.ty.dims) as usize;
    match &node.op {
        Op::Input(_) | Op::Param(_) | Op::State(..) | Op::Table(_) | Op::Recv { .. } | Op::Collective { .. } => env.source(&node.op, &node.ty),
        Op::Const(c) => vec![c.0; total],
        Op::Iota(d) => (0..dims.size(*d)).map(|i| env.index(dims, *d, i) as f64).collect(),
        Op::Uniform { key } => {
            let (seed, step) = (env.scalar(&Scalar::Seed) as u64, env.scalar(&Scalar::Step) as u64);
            let stream = random::stream(*key, seed, step);
            let mut walk = Walk::new(dims, &node.ty.dims);
            (0..total)
                .map(|_| {
                    let mut index = 0u64;
                    for (k, d) in node.ty.dims.iter().enumerate() {
                        index = index * dims[*d].logical + env.index(dims, *d, walk.at[k] as u64);
                    }
                    walk.step();
                    random::uniform(stream, index)
                })
                .collect()
        }
        Op::Scalar(s) => vec![env.scalar(s)],
        Op::Unary(u) => args[0].iter().map(|x| unary(*u, *x)).collect(),
        Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Add | Op::Cast => {
            let from = body[node.args[0]].ty.dtype;
            pointwise(body, v, args, |p| at_a_point(&node.op, node.ty.dtype, from, p))
        }
        Op::StopGradient | Op::Cut | Op::Expand | Op::Reshard { .. } | Op::Send { .. } | Op::Limit { .. } => pointwise(body, v, args, |p| p[0]),
        Op::View { from, to } => view(body, v, args[0], from, to),
        Op::Slice { from, to, at } => {
            let source = body.dims_of(node.args[0]);
            let whole = strides(dims, source, &[*from])[0];
            // The walk goes over the result, whose dim `to` moves along the operand's `from`.
            let over: Vec<Dim> = node.ty.dims.iter().map(|d| if Some(*d) == *to { *from } else { *d }).collect();
            let steps = strides(dims, source, &over);
            let mut walk = Walk::new(dims, &node.ty.dims);
            (0..total)
                .map(|_| {
                    let x = args[0][walk.offset(&steps) + *at as usize * whole];
                    walk.step();
                    x
                })
                .collect()
        }
        Op::Pad { from, to, at } => {
            let source = body.dims_of(node.args[0]);
            let steps: Vec<usize> = {
                let over: Vec<Dim> = node.ty.dims.iter().filter(|d| *d != to).copied().collect();
                strides(dims, source, &over)
            };
            let along = from.map_or(0, |d| strides(dims, source, &[d])[0]);
            let len = from.map_or(1, |d| dims.size(d));
            let place = node.ty.dims.iter().position(|d| d == to).expect("invariant: checked by infer");
            let mut walk = Walk::new(dims, &node.ty.dims);
            (0..total)
                .map(|_| {
                    let i = walk.at[place] as u64;
                    let mut rest = walk.at.clone();
                    rest.remove(place);
                    let base: usize = rest.iter().zip(&steps).map(|(i, s)| i * s).sum();
                    walk.step();
                    if i >= *at && i < at + len { args[0][base + (i - at) as usize * along] } else { 0.0 }
                })
                .collect()
        }
        Op::Concat { from, to } => {
            let place = node.ty.dims.iter().position(|d| d == to).expect("invariant: checked by infer");
            let mut walk = Walk::new(dims, &node.ty.dims);
            let steps: Vec<Vec<usize>> = node
                .args
                .iter()
                .zip(from)
                .map(|(a, f)| {
                    let over: Vec<Dim> = node.ty.dims.iter().map(|d| if d == to { *f } else { *d }).collect();
                    strides(dims, body.dims_of(*a), &over)
                })
                .collect();
            (0..total)
                .map(|_| {
                    let (mut k, mut i) = (0, walk.at[place]);
                    while i >= dims.size(from[k]) as usize {
                        i -= dims.size(from[k]) as usize;
                        k += 1;
                    }
                    let at = walk.at.iter().zip(&steps[k]).enumerate().map(|(n, (x, s))| if n == place { i * s } else { x * s }).sum::<usize>();
                    walk.step();
                    args[k][at]
                })
                .collect()
        }
        Op::Shard { from, to, index } => {
            let source = body.dims_of(node.args[0]);
            let base = env.base(&index.base);
            let place = node.ty.dims.iter().position(|d| d == to).expect("invariant: checked by infer");
            let over: Vec<Dim> = node.ty.dims.iter().map(|d| if d == to { *from } else { *d }).collect();
            let steps = strides(dims, source, &over);
            let mut walk = Walk::new(dims, &node.ty.dims);
            (0..total)
                .map(|_| {
                    let i = (base + index.offset(walk.at[place] as u64)) as usize;
                    let at = walk.at.iter().zip(&steps).enumerate().map(|(n, (x, s))| if n == place { i * s } else { x * s }).sum::<usize>();
                    walk.step();
                    args[0][at]
                })
                .collect()
        }
        Op::Dot { over, tf32 } => {
            let [a, b] = factors(args, *tf32);
            contract(dims, &node.ty.dims, over, (&a, body.dims_of(node.args[0])), (&b, body.dims_of(node.args[1])))
        }
        Op::GroupedDot { rows, experts, tf32, .. } => {
            let [a, b] = factors(args, *tf32);
            grouped(body, v, *rows, *experts, &[&a, &b, args[2]])
        }
        Op::Reduce { kind, over } => {
            let mut out = vec![if *kind == Reduce::Max { f64::NEG_INFINITY } else { 0.0 }; total];
            let source = body.dims_of(node.args[0]);
            let place = strides(dims, &node.ty.dims, source);
            let mut walk = Walk::new(dims, source);
            debug_assert!(over.iter().all(|d| source.contains(d)));
            for x in args[0] {
                let o = &mut out[walk.offset(&place)];
                *o = match kind {
                    Reduce::Sum => *o + x,
                    Reduce::Max => binary(Binary::Max, DType::F32, *o, *x),
                    Reduce::Any => f64::from(*o != 0.0 || *x != 0.0),
                };
                walk.step();
            }
            out
        }
        Op::ArgMax { over } => {
            let source = body.dims_of(node.args[0]);
            let place = strides(dims, &node.ty.dims, source);
            let along = source.iter().position(|d| d == over).expect("invariant: checked by infer");
            let index = &dims[*over].index;
            let base = env.base(&index.base);
            let mut best = vec![(f64::NEG_INFINITY, u64::MAX); total];
            let mut walk = Walk::new(dims, source);
            for x in args[0] {
                let o = &mut best[walk.offset(&place)];
                let i = base + index.offset(walk.at[along] as u64);
                if *x > o.0 || o.1 == u64::MAX || (*x == o.0 && i < o.1) {
                    *o = (*x, i);
                }
                walk.step();
            }
            best.into_iter().map(|b| b.1 as f64).collect()
        }
        Op::Cumsum { over, reverse } => {
            let (n, step) = (dims.size(*over) as usize, strides(dims, &node.ty.dims, &[*over])[0]);
            let mut out = reorder(dims, args[0], body.dims_of(node.args[0]), &node.ty.dims);
            for i in 0..total {
                if i / step % n == 0 {
                    let mut sum = 0.0;
                    for k in 0..n {
                        let at = i + step * if *reverse { n - 1 - k } else { k };
                        sum += out[at];
                        out[at] = sum;
                    }
                }
            }
            out
        }
        Op::Gather { dim } | Op::Combine(Routing { experts: dim, .. }) => {
            let (table, index) = (body.dims_of(node.args[0]), body.dims_of(node.args[1]));
            let (t, i) = (strides(dims, table, &node.ty.dims), strides(dims, index, &node.ty.dims));
            let along = strides(dims, table, &[*dim])[0];
            let rows = TableRows::new(&dims[*dim].index, env);
            let mut walk = Walk::new(dims, &node.ty.dims);
            (0..total)
                .map(|_| {
                    let row = rows.find(args[1][walk.offset(&i)]);
                    let at = walk.offset(&t);
                    walk.step();
                    row.map_or(0.0, |r| args[0][at + r * along])
                })
                .collect()
        }
        Op::Scatter { dim } | Op::Dispatch(Routing { experts: dim, .. }) => {
            let (values, index) = (body.dims_of(node.args[0]), body.dims_of(node.args[1]));
            let mut over = values.to_vec();
            over.extend(index.iter().filter(|d| !values.contains(d)));
            let (x, i, o) = (strides(dims, values, &over), strides(dims, index, &over), strides(dims, &node.ty.dims, &over));
            let along = strides(dims, &node.ty.dims, &[*dim])[0];
            let rows = TableRows::new(&dims[*dim].index, env);
            let mut out = vec![0.0; total];
            let mut walk = Walk::new(dims, &over);
            for _ in 0..walk.total() {
                if let Some(r) = rows.find(args[1][walk.offset(&i)]) {
                    out[walk.offset(&o) + r * along] += args[0][walk.offset(&x)];
                }
                walk.step();
            }
            out
        }
        Op::Attention(a) => attention::result(body, v, a, args),
        Op::AttentionLse(a) => attention::log_sums(body, v, a, args),
        Op::AttentionGrad(a, which) => attention::gradient(body, v, a, *which, args),
    }
}

/// Local rows of a (sharded) table by global index.
struct TableRows<'a> {
    index: &'a IndexMap,
    base: u64,
}

impl<'a> TableRows<'a> {
    fn new(index: &'a IndexMap, env: &dyn Env) -> Self {
        TableRows { index, base: env.base(&index.base) }
    }

    fn find(&self, global: f64) -> Option<usize> {
        if global < self.base as f64 {
            return None;
        }
        self.index.find(global as u64 - self.base).map(|r| r as usize)
    }
}

/// Copies into another storage order of the same dims.
pub fn reorder(dims: &Dims, data: &[f64], from: &[Dim], to: &[Dim]) -> Vec<f64> {
    mapped(dims, to, &[(data, from)], |x| x[0])
}

fn view(body: &Body, v: Value, data: &[f64], from: &[Dim], to: &[Dim]) -> Vec<f64> {
    let source = body.dims_of(body[v].args[0]);
    // With the replaced dims innermost on both sides, the elements have the same order.
    let rest: Vec<Dim> = source.iter().copied().filter(|d| !from.contains(d)).collect();
    let (inner, outer) = ([&rest[..], from].concat(), [&rest[..], to].concat());
    let flat = reorder(&body.dims, data, source, &inner);
    reorder(&body.dims, &flat, &outer, body.dims_of(v))
}

/// The factors of a dot, rounded to tf32 if the dot does so.
fn factors<'a>(args: &[&'a [f64]], tf32: bool) -> [Cow<'a, [f64]>; 2] {
    [args[0], args[1]].map(|x| if tf32 { x.iter().map(|x| op::tf32(*x)).collect() } else { x.into() })
}

/// `a * b`, summed for each expert over its own rows; all other rows stay zero.
fn grouped(body: &Body, v: Value, rows: Dim, experts: Dim, args: &[&[f64]]) -> Vec<f64> {
    let (node, dims) = (&body[v], &body.dims);
    let of: Vec<&[Dim]> = node.args.iter().map(|a| body.dims_of(*a)).collect();
    let mut over = vec![experts];
    for d in of.iter().copied().flatten().copied().filter(|d| *d != rows) {
        if !over.contains(&d) {
            over.push(d);
        }
    }
    let steps: Vec<Vec<usize>> = of.iter().map(|has| strides(dims, has, &over)).collect();
    let place = strides(dims, &node.ty.dims, &over);
    let [a, b, o] = [of[0], of[1], &node.ty.dims].map(|has| strides(dims, has, &[rows])[0]);
    let expert = strides(dims, of[2], &[experts])[0];
    let row = |end: f64| (end as usize).min(dims.size(rows) as usize);
    let mut out = vec![0.0; dims.elements(&node.ty.dims) as usize];
    let mut walk = Walk::new(dims, &over);
    for _ in 0..walk.total() {
        let [x, y, end, z] = [&steps[0], &steps[1], &steps[2], &place].map(|s| walk.offset(s));
        let first = if walk.at[0] == 0 { 0 } else { row(args[2][end - expert]) };
        for i in first..row(args[2][end]) {
            out[z + i * o] += args[0][x + i * a] * args[1][y + i * b];
        }
        walk.step();
    }
    out
}

#[cfg(test)]
mod tests;
