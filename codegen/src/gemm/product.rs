//! What product a kernel with one `Dot` or `GroupedDot` is: its factors and the directions of both.

use crate::CompileError;
use crate::layout::{self, Axis, tensors};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::kernel::Kernel;
use ir::op::Op;

/// A factor of the product, by position in the kernel's inputs and outputs.
pub type Tensor = usize;

/// One matrix product `C[m, n] = sum over k of A[m, k] * B[k, n]`, repeated over `outer`, then pointwise ops on `C`.
pub struct Product {
    pub dot: Value,
    /// Positions of the two factors among the kernel's inputs. `a` is broadcast, `b` is read by vectors.
    pub a: Tensor,
    pub b: Tensor,
    pub m: Axis,
    pub n: Axis,
    pub k: Axis,
    /// Directions of the result that are not part of the matrix product proper: batch dims, and rows or columns that
    /// no single stride walks.
    pub outer: Vec<Axis>,
    /// Contracted directions beside `k`, because no single stride walks both.
    pub outer_k: Vec<Axis>,
    /// Factors are rounded to tf32.
    pub tf32: bool,
    pub experts: Option<Experts>,
}

/// What is known at run time only of a `GroupedDot`: which part of a direction is each expert's.
pub struct Experts {
    /// The tensor that says where the part of each expert ends.
    pub ends: Tensor,
    /// Along it `b` (of rows) or the result (of contracted elements) differ. It is the outermost of `outer` in the
    /// latter case.
    pub axis: Axis,
    pub own: ExpertDim,
}

/// The direction of which experts have parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertDim {
    /// `m`: a tile of rows multiplies those of each expert with the expert's `b`; rows of nobody are 0.
    Rows,
    /// `k`: the product is repeated for each expert, over its contracted elements.
    Contracted,
}

impl Product {
    /// Finds the product of a kernel of family `Gemm`.
    ///
    /// # Errors
    /// The kernel's factors are not inputs or not floats, which is not supported yet.
    pub fn new(kernel: &Kernel) -> Result<Product, CompileError> {
        let body = &kernel.body;
        let (dot, over, tf32, grouped) = body
            .values()
            .find_map(|v| match &body[v].op {
                Op::Dot { over, tf32 } => Some((v, over.clone(), *tf32, None)),
                Op::GroupedDot { rows, experts, over, tf32 } => Some((v, over.clone(), *tf32, Some((*rows, *experts)))),
                _ => None,
            })
            .ok_or_else(|| CompileError::unsupported("a matrix product without `dot`"))?;
        let factor = |slot: usize| match body[body[dot].args[slot]].op {
            Op::Input(i) if body[body[dot].args[slot]].ty.dtype.is_float() => Ok(i as usize),
            _ => Err(CompileError::unsupported("a factor of `dot` that is not a float input")),
        };
        check_epilogue(kernel)?;
        let (mut a, mut b) = (factor(0)?, factor(1)?);
        let tensors: Vec<(&Type, &[u64])> = tensors(kernel);
        let single = |d: Dim| Axis {
            dims: vec![d],
            size: body.dims.size(d) as i64,
            strides: tensors.iter().map(|(ty, strides)| layout::stride(ty, strides, d)).collect(),
        };
        let experts = match grouped {
            None => None,
            Some((rows, experts)) => {
                let Op::Input(ends) = body[body[dot].args[2]].op else {
                    return Err(CompileError::unsupported("ends of a `grouped_dot` that are no input"));
                };
                let own = if over.contains(&rows) { ExpertDim::Contracted } else { ExpertDim::Rows };
                Some(Experts { ends: ends as usize, axis: single(experts), own })
            }
        };
        // Dims of experts and of the rows that they share are not merged. Dims that the ends have are repetitions.
        let of_rows = experts.as_ref().is_some_and(|x| x.own == ExpertDim::Rows);
        let apart = |d: &Dim| grouped.is_some_and(|(rows, experts)| *d == experts || *d == rows);
        let part = |d: &Dim| !apart(d) && experts.as_ref().is_some_and(|x| tensors[x.ends].0.has(*d));
        let result = &kernel.outputs[0];
        let result_type = &body[result.value].ty;
        // `order` has the dims of the result by descending stride.
        let mut order = body[dot].ty.dims.clone();
        order.sort_by_key(|d| std::cmp::Reverse(layout::stride(result_type, &result.strides, *d)));
        let has = |tensor: usize, d: &Dim| tensors[tensor].0.has(*d);
        // Vectors run along the innermost dim of the result, so it must come from `b`.
        let last = order.iter().rev().find(|d| body.dims.size(**d) != 1 && has(a, d) != has(b, d));
        if last.is_some_and(|d| has(a, d)) && !of_rows {
            std::mem::swap(&mut a, &mut b);
        }
        let only =
            |own: usize, other: usize| order.iter().copied().filter(|d| has(own, d) && !has(other, d) && !apart(d) && !part(d)).collect::<Vec<_>>();
        let (rows, columns) = (only(a, b), only(b, a));
        let both: Vec<Dim> = order.iter().copied().filter(|d| has(a, d) && has(b, d) || part(d)).collect();
        let mut over: Vec<Dim> = over.into_iter().filter(|d| !apart(d)).collect();
        over.sort_by_key(|d| std::cmp::Reverse(layout::stride(tensors[b].0, tensors[b].1, *d)));

        let mut outer = layout::merge(&body.dims, &both, &tensors);
        match &experts {
            Some(Experts { own: ExpertDim::Rows, .. }) => outer.extend(layout::merge(&body.dims, &rows, &tensors)),
            Some(Experts { own: ExpertDim::Contracted, axis, .. }) => outer.insert(0, axis.clone()),
            None => {}
        }
        let mut split = |dims: &[Dim]| {
            let mut axes = layout::merge(&body.dims, dims, &tensors);
            let inner = axes.pop().unwrap_or_else(|| Axis::unit(tensors.len()));
            outer.extend(axes);
            inner
        };
        let m = match grouped {
            Some((of, _)) if of_rows => single(of),
            _ => split(&rows),
        };
        let n = split(&columns);
        let mut outer_k = layout::merge(&body.dims, &over, &tensors);
        let k = match grouped {
            Some((of, _)) if !of_rows => single(of),
            _ => outer_k.pop().unwrap_or_else(|| Axis::unit(tensors.len())),
        };
        Ok(Product { dot, a, b, m, n, k, outer, outer_k, tf32, experts })
    }

    /// How often the product is repeated.
    pub fn repeats(&self) -> i64 {
        self.outer.iter().map(|x| x.size).product::<i64>()
    }

    pub fn owns(&self, own: ExpertDim) -> bool {
        self.experts.as_ref().is_some_and(|x| x.own == own)
    }
}

/// Checks that every value between the product and the outputs is one that the epilogue can compute.
///
/// # Errors
/// Names the first op that it cannot.
fn check_epilogue(kernel: &Kernel) -> Result<(), CompileError> {
    for v in kernel.body.values() {
        match &kernel.body[v].op {
            Op::Pad { .. } | Op::Concat { .. } | Op::Gather { .. } => {
                return Err(CompileError::unsupported(format!("`{}` beside a matrix product", kernel.body[v].op.name())));
            }
            _ => {}
        }
    }
    Ok(())
}
