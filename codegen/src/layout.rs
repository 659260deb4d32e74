//! Dims of a kernel merged into axes: several dims that every operand walks with one stride count as one.

use ir::dim::{Dim, Dims};
use ir::graph::Type;
use ir::kernel::Kernel;

/// One or more dims as one direction.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The dims, outermost first.
    pub dims: Vec<Dim>,
    pub size: i64,
    /// Elements between neighbours, for each tensor; 0 where it lacks the axis.
    pub strides: Vec<i64>,
}

/// All inputs, then all outputs, with their strides.
pub fn tensors(kernel: &Kernel) -> Vec<(&Type, &[u64])> {
    let inputs = kernel.inputs.iter().map(|i| (&i.ty, i.strides.as_slice()));
    let outputs = kernel.outputs.iter().map(|o| (&kernel.body[o.value].ty, o.strides.as_slice()));
    inputs.chain(outputs).collect()
}

/// The stride of a dim in a tensor, in elements; 0 if the tensor lacks it.
pub fn stride(ty: &Type, strides: &[u64], dim: Dim) -> i64 {
    ty.dims.iter().position(|d| *d == dim).map_or(0, |k| strides[k] as i64)
}

/// Merges neighbours of `order` (outermost first) where every tensor allows it. Dims of size 1 disappear.
pub fn merge(dims: &Dims, order: &[Dim], tensors: &[(&Type, &[u64])]) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    for &dim in order.iter().filter(|d| dims.size(**d) != 1) {
        let size = dims.size(dim) as i64;
        let strides: Vec<i64> = tensors.iter().map(|(ty, strides)| stride(ty, strides, dim)).collect();
        match axes.last_mut() {
            Some(outer) if outer.strides.iter().zip(&strides).all(|(o, s)| *o == s * size) => {
                outer.dims.push(dim);
                outer.size *= size;
                outer.strides = strides;
            }
            _ => axes.push(Axis { dims: vec![dim], size, strides }),
        }
    }
    axes
}

impl Axis {
    /// An axis of one element.
    pub fn unit(tensors: usize) -> Axis {
        Axis { dims: Vec::new(), size: 1, strides: vec![0; tensors] }
    }

    /// How the index along one of the axis's dims follows from the index along the axis: `index / .0 % .1`.
    pub fn digit(&self, dims: &Dims, dim: Dim) -> Option<(i64, i64)> {
        let at = self.dims.iter().position(|d| *d == dim)?;
        let inner = self.dims[at + 1..].iter().map(|d| dims.size(*d) as i64).product();
        Some((inner, dims.size(dim) as i64))
    }
}

/// The quotient of numbers that are not negative, rounded up.
pub fn div_ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
