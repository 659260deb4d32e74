//! A part of a kernel that is too large to be interpreted whole.
//!
//! Along a dim that no op of the kernel looks along, an element of a result depends on operands at its own index
//! alone. Of such dims a few indices are chosen; operands are cut to these, and so is what the kernel wrote. Which
//! index an element has in the whole kernel is kept: to `Iota`, to random numbers, and to the ends of experts' rows.

use crate::dim::{Base, Dim, Dims, IndexMap};
use crate::eval::{self, Env};
use crate::graph::{Type, Value};
use crate::kernel::{Kernel, KernelEnv, dense};
use crate::op::{AttentionGrad, Op, Scalar};
use crate::random::mix;
use std::collections::BTreeSet;

/// A kernel of fewer indices.
pub struct PartialKernel {
    /// The whole kernel's ops, inputs and outputs, with shorter dims.
    pub kernel: Kernel,
    /// Dims of the whole kernel.
    dims: Dims,
    /// Per dim, which indices are left, in order; `None` if all are.
    left: Vec<Option<Vec<u64>>>,
    /// Operands that hold the ends of experts' rows, each with the dim of the rows.
    ends: Vec<(u32, Dim)>,
}

/// How much of a kernel a part may be, if dims can be cut that far.
#[derive(Clone, Copy, Debug)]
pub struct PartLimits {
    /// Points of the loops of all nodes.
    pub points: u64,
    /// Elements of all results.
    pub places: u64,
}

/// Operands that only grouped dots read, as the ends of rows, each with the dim of rows, which the dots' results
/// keep.
fn ends(kernel: &Kernel) -> Vec<(u32, Dim)> {
    let body = &kernel.body;
    let users = body.users();
    let mut out = vec![];
    for v in body.values() {
        let Op::Input(i) = body[v].op else { continue };
        let rows: BTreeSet<Option<Dim>> = users[v.index()]
            .iter()
            .map(|(user, slot)| match &body[*user].op {
                Op::GroupedDot { rows, over, .. } if *slot == 2 && !over.contains(rows) => Some(*rows),
                _ => None,
            })
            .collect();
        if let [Some(rows)] = rows.into_iter().collect::<Vec<_>>()[..]
            && body.nodes.iter().filter(|n| n.op == Op::Input(i)).count() == 1
        {
            out.push((i, rows));
        }
    }
    out
}

/// Dims along which elements depend on each other.
fn bound(kernel: &Kernel) -> BTreeSet<Dim> {
    let body = &kernel.body;
    let ends = ends(kernel);
    let mut out = BTreeSet::new();
    for node in &body.nodes {
        match &node.op {
            // Queries do not depend on each other.
            Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, AttentionGrad::Q) => out.extend([a.keys, a.d, a.values]),
            // Keys do not depend on each other; their gradients are summed over the queries that share them.
            Op::AttentionGrad(a, AttentionGrad::K | AttentionGrad::V) => {
                out.extend([a.at, a.d, a.values]);
                out.extend(body[node.args[0]].ty.dims.iter().filter(|d| !body[node.args[1]].ty.dims.contains(d)));
            }
            // Pairs of a query and a key do not depend on each other; the gradient is summed over the dims that the
            // bias lacks.
            Op::AttentionGrad(a, AttentionGrad::Bias) => {
                out.extend([a.d, a.values]);
                out.extend(body[node.args[0]].ty.dims.iter().filter(|d| !node.ty.dims.contains(d)));
            }
            // A scatter sums over the dims of its index.
            Op::Scatter { dim } => {
                out.insert(*dim);
                out.extend(&body[node.args[1]].ty.dims);
            }
            // A row is multiplied by its expert's matrix, which follows from the row's index and the ends.
            Op::GroupedDot { rows, experts, over, .. } => {
                out.insert(*experts);
                out.extend(over);
                let known = |input: &Op| ends.iter().any(|(i, dim)| *input == Op::Input(*i) && dim == rows);
                if !known(&body[node.args[2]].op) {
                    out.insert(*rows);
                }
            }
            Op::Iota(_) | Op::Uniform { .. } => {}
            op => out.extend(op.dims()),
        }
    }
    out
}

/// The points of a node's loops, over all dims of its operands and result. An index picks one row of a table, and a
/// row has one expert, so these dims do not count. An op that moves elements reads one per element of its result.
pub fn points(kernel: &Kernel, v: Value) -> u64 {
    let (body, node) = (&kernel.body, &kernel.body[v]);
    if let Op::Concat { .. } | Op::Slice { .. } | Op::Pad { .. } | Op::View { .. } | Op::Shard { .. } = node.op {
        return body.elements(v);
    }
    let picked = match &node.op {
        Op::Gather { dim } | Op::Scatter { dim } => Some(*dim),
        Op::GroupedDot { experts, .. } => Some(*experts),
        _ => None,
    };
    let dims: BTreeSet<Dim> = node.args.iter().flat_map(|a| &body[*a].ty.dims).chain(&node.ty.dims).copied().collect();
    let all = dims.iter().filter(|d| Some(**d) != picked).map(|d| body.dims.size(*d)).fold(1, u64::saturating_mul);
    all.max(body.elements(v))
}

/// The points of all nodes.
pub fn all_points(kernel: &Kernel) -> u64 {
    kernel.body.values().map(|v| points(kernel, v)).fold(0, u64::saturating_add)
}

/// The dims of a kernel that a part may cut to a few indices.
fn free(kernel: &Kernel) -> Vec<Dim> {
    let (bound, has) = (bound(kernel), kernel.body.nodes.iter().flat_map(|n| &n.ty.dims).collect::<BTreeSet<_>>());
    kernel.body.dims.ids().filter(|d| has.contains(d) && !bound.contains(d)).collect()
}

/// `count` of `size` indices: the first, the last, and random others, in order.
fn some(size: u64, count: u64, seed: u64) -> Vec<u64> {
    let mut out: BTreeSet<u64> = [0, size - 1].into_iter().take(count as usize).collect();
    let mut state = seed;
    while (out.len() as u64) < count {
        state = mix(state);
        out.insert(state % size);
    }
    out.into_iter().collect()
}

impl PartialKernel {
    /// Of a kernel with more than so many points; as few of its indices as that takes, or the fewest that there can
    /// be, the first and the last among them.
    pub fn of(kernel: &Kernel, points: u64, seed: u64) -> Option<PartialKernel> {
        let part = PartialKernel::among(kernel, PartLimits { points, places: u64::MAX }, seed, &mut |d| (0..kernel.body.dims.size(d)).collect());
        part.left.iter().any(Option::is_some).then_some(part)
    }

    /// The same, of indices that `known` gives in order, for each dim that is cut.
    pub fn among(kernel: &Kernel, most: PartLimits, seed: u64, known: &mut dyn FnMut(Dim) -> Vec<u64>) -> PartialKernel {
        let mut less = kernel.clone();
        let free = free(kernel);
        let places = |k: &Kernel| k.outputs.iter().map(|o| k.body.elements(o.value)).fold(0, u64::saturating_add);
        while all_points(&less) > most.points || places(&less) > most.places {
            let size = |d: &Dim| less.body.dims.size(*d);
            let Some(greatest) = free.iter().copied().filter(|d| size(d) > 1).max_by_key(size) else { break };
            less.body.dims[greatest].size = size(&greatest).div_ceil(2);
        }
        let mut left = vec![None; kernel.body.dims.list.len()];
        for d in free {
            let all = known(d);
            let count = less.body.dims.size(d).min(all.len() as u64);
            let chosen = || some(all.len() as u64, count, seed ^ mix(u64::from(d.0))).into_iter().map(|k| all[k as usize]).collect();
            less.body.dims[d].size = count;
            less.body.dims[d].index = IndexMap::whole(count);
            left[d.0 as usize] = (count < kernel.body.dims.size(d)).then(chosen);
        }
        PartialKernel { kernel: less, dims: kernel.body.dims.clone(), left, ends: ends(kernel) }
    }

    /// Which indices of a dim are left; none: all.
    pub fn left(&self, dim: Dim) -> Option<&[u64]> {
        self.left[dim.0 as usize].as_deref()
    }

    /// Where the elements of a tensor that are left lie in the whole one.
    pub fn offsets(&self, ty: &Type, strides: &[u64]) -> Vec<u64> {
        let mut out = vec![0];
        for (d, stride) in ty.dims.iter().zip(strides) {
            out = match self.left(*d) {
                Some(left) => out.iter().flat_map(|base| left.iter().map(move |i| base + i * stride)).collect(),
                None => out.iter().flat_map(|base| (0..self.dims.size(*d)).map(move |i| base + i * stride)).collect(),
            };
        }
        out
    }

    /// What is left of a tensor of the whole kernel.
    pub fn of_values(&self, ty: &Type, values: &[f64]) -> Vec<f64> {
        self.offsets(ty, &dense(&self.dims, ty)).into_iter().map(|at| values[at as usize]).collect()
    }

    /// As [`Kernel::run`], on what is left of operands.
    pub fn run(&self, inputs: &[Vec<f64>], scalars: &[f64]) -> Vec<Vec<f64>> {
        self.run_changed(inputs, scalars, &mut |_, _, _, _| {})
    }

    /// As [`Kernel::run_changed`], on what is left of operands.
    pub fn run_changed(&self, inputs: &[Vec<f64>], scalars: &[f64], change: &mut eval::Change<'_>) -> Vec<Vec<f64>> {
        let mut env = PartEnv { part: self, whole: KernelEnv { kernel: &self.kernel, inputs, scalars } };
        let values = eval::run_changed(&self.kernel.body, &mut env, change);
        self.kernel.outputs.iter().map(|o| values[o.value.index()].clone()).collect()
    }
}

struct PartEnv<'a> {
    part: &'a PartialKernel,
    whole: KernelEnv<'a>,
}

impl Env for PartEnv<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        let mut values = self.whole.source(op, ty);
        let rows = self.part.ends.iter().find(|(i, _)| *op == Op::Input(*i)).and_then(|(_, rows)| self.part.left(*rows));
        if let Some(left) = rows {
            values.iter_mut().for_each(|end| *end = left.partition_point(|row| (*row as f64) < *end) as f64);
        }
        values
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        self.whole.scalar(scalar)
    }

    fn base(&self, base: &Base) -> u64 {
        self.whole.base(base)
    }

    fn index(&self, _: &Dims, dim: Dim, i: u64) -> u64 {
        self.whole.index(&self.part.dims, dim, self.part.left(dim).map_or(i, |left| left[i as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::DimInfo;
    use crate::graph::{Body, Origin, Phase};
    use crate::kernel::Family;
    use crate::op::DType;
    use crate::program::Space;

    /// An op that joins tensors reads each element once.
    #[test]
    fn a_place_of_what_moves_elements_is_one_point() {
        let mut body = Body::default();
        let [s, a, b, all, wide] = [("s", 3), ("a", 5), ("b", 6), ("all", 11), ("wide", 20)].map(|(n, size)| body.dims.add(DimInfo::new(n, size)));
        let mut push = |op, args: &[Value], dims: [Dim; 2]| body.push(op, args, Type::new(DType::F32, dims), Origin::new(Phase::Forward));
        let (x, y) = (push(Op::Input(0), &[], [s, a]), push(Op::Input(1), &[], [s, b]));
        let joined = push(Op::Concat { from: vec![a, b], to: all }, &[x, y], [s, all]);
        let padded = push(Op::Pad { from: Some(all), to: wide, at: 3 }, &[joined], [s, wide]);
        let slice = push(Op::Slice { from: all, to: Some(a), at: 2 }, &[joined], [s, a]);
        let kernel = Kernel { on: Space::Device, family: Family::Loops { grid: vec![s] }, body, inputs: vec![], scalars: vec![], outputs: vec![] };
        assert_eq!([joined, padded, slice].map(|v| points(&kernel, v)), [33, 60, 15]);
    }

    #[test]
    fn the_first_and_the_last_are_always_left() {
        assert_eq!(some(9, 2, 1), [0, 8]);
        assert_eq!(some(3, 3, 1), [0, 1, 2]);
        assert_eq!(some(5, 1, 1).len(), 1);
        let five = some(1000, 5, 3);
        assert!(five.len() == 5 && five[0] == 0 && five[4] == 999, "{five:?}");
    }
}
