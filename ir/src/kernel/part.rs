//! A part of a kernel that is too large to be interpreted whole.
//!
//! Along a dim that no op of the kernel looks along, an element of a result depends on operands at its own index
//! alone. Of such dims a few indices are chosen, the first and the last among them; operands are cut to these, and so
//! is what the kernel wrote.

use crate::dim::{Dim, IndexMap};
use crate::graph::{Type, Value};
use crate::kernel::Kernel;
use crate::op::Op;
use crate::random::mix;
use std::collections::BTreeSet;

/// A kernel of fewer indices.
pub struct Part {
    pub kernel: Kernel,
    /// Of each dim, which of its indices are left, in order; none: all.
    left: Vec<Option<Vec<u64>>>,
}

/// Dims along which elements depend on each other, or know their place.
fn bound(kernel: &Kernel) -> BTreeSet<Dim> {
    let body = &kernel.body;
    let mut out = BTreeSet::new();
    for node in &body.nodes {
        match &node.op {
            // Queries know nothing of each other.
            Op::Attention(a) | Op::AttentionLse(a) => out.extend([a.keys, a.d]),
            // Keys and values get sums over the queries that share them.
            Op::AttentionGrad(a, _) => {
                out.extend([a.at, a.keys, a.d]);
                out.extend(body[node.args[0]].ty.dims.iter().filter(|d| !body[node.args[1]].ty.dims.contains(d)));
            }
            // Sums over the dims of the index, and random numbers know where they are.
            Op::Scatter { dim } => {
                out.insert(*dim);
                out.extend(&body[node.args[1]].ty.dims);
            }
            Op::Uniform { .. } => out.extend(&node.ty.dims),
            op => out.extend(op.dims()),
        }
    }
    out
}

/// The points of a node's loops: of all dims that it has to do with.
fn points(kernel: &Kernel, v: Value) -> u64 {
    let (body, node) = (&kernel.body, &kernel.body[v]);
    let dims: BTreeSet<Dim> = node.args.iter().flat_map(|a| &body[*a].ty.dims).chain(&node.ty.dims).copied().collect();
    dims.iter().map(|d| body.dims.size(*d)).fold(1, u64::saturating_mul)
}

fn all_points(kernel: &Kernel) -> u64 {
    kernel.body.values().map(|v| points(kernel, v)).fold(0, u64::saturating_add)
}

/// So many of `size` indices: the first, the last, and others at random, in order.
fn some(size: u64, count: u64, seed: u64) -> Vec<u64> {
    let mut out: BTreeSet<u64> = [0, size - 1].into_iter().take(count as usize).collect();
    let mut state = seed;
    while (out.len() as u64) < count {
        state = mix(state);
        out.insert(state % size);
    }
    out.into_iter().collect()
}

impl Part {
    /// Of a kernel with more than so many points; as few of its indices as that takes, or the fewest that there can be.
    pub fn of(kernel: &Kernel, most: u64, seed: u64) -> Option<Part> {
        let mut part = Part { kernel: kernel.clone(), left: vec![None; kernel.body.dims.list.len()] };
        let bound = bound(kernel);
        let free: Vec<Dim> = kernel.body.dims.ids().filter(|d| !bound.contains(d)).collect();
        while all_points(&part.kernel) > most {
            let size = |d: &Dim| part.kernel.body.dims.size(*d);
            let Some(greatest) = free.iter().copied().filter(|d| size(d) > 1).max_by_key(size) else { break };
            let half = size(&greatest).div_ceil(2);
            let dim = &mut part.kernel.body.dims[greatest];
            (dim.size, dim.index) = (half, IndexMap::whole(half));
        }
        for d in free {
            let (size, count) = (kernel.body.dims.size(d), part.kernel.body.dims.size(d));
            if count < size {
                part.left[d.0 as usize] = Some(some(size, count, seed ^ mix(u64::from(d.0))));
            }
        }
        part.left.iter().any(Option::is_some).then_some(part)
    }

    /// What is left of a tensor of the whole kernel.
    pub fn of_values(&self, whole: &Kernel, ty: &Type, values: &[f64]) -> Vec<f64> {
        let mut out = vec![0];
        for d in &ty.dims {
            let size = whole.body.dims.size(*d);
            let indices = self.left[d.0 as usize].clone().unwrap_or_else(|| (0..size).collect());
            out = out.iter().flat_map(|base| indices.iter().map(move |i| base * size + i)).collect();
        }
        out.into_iter().map(|at| values[at as usize]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_are_always_left() {
        assert_eq!(some(9, 2, 1), [0, 8]);
        assert_eq!(some(3, 3, 1), [0, 1, 2]);
        assert_eq!(some(5, 1, 1).len(), 1);
        let five = some(1000, 5, 3);
        assert!(five.len() == 5 && five[0] == 0 && five[4] == 999, "{five:?}");
    }
}
