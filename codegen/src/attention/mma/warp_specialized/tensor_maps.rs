//! How rows of an operand are read by its tensor map.

use super::*;
use crate::build::swizzle::LINE_ELEMENTS;
use crate::layout::merge;
use crate::tensor_maps::{self, MapDim};
use ir::launch::TensorMap;

/// What a dim of a map stands for.
enum OperandDim {
    /// Queries, or keys.
    Rows,
    /// Dims that number heads, outermost first.
    Heads(Vec<Dim>),
}

/// How an operand is read: so many rows at a time.
pub struct OperandMap {
    pub map: TensorMap,
    /// Dims of the map other than the elements of a head.
    directions: Vec<OperandDim>,
    rows: i64,
}

impl OperandMap {
    /// `None` if the operand has no tensor map.
    pub fn new(plan: &AttentionPlan, tensor: usize, side: ScoreSide, rows: i64) -> Option<OperandMap> {
        let kernel = plan.kernel;
        let (ty, strides) = tensors(kernel)[tensor];
        let (dim, size) = match side {
            ScoreSide::Queries => (plan.attention.at, plan.queries),
            ScoreSide::Keys => (plan.attention.keys, plan.keys),
        };
        let mut heads: Vec<Dim> = plan.heads().into_iter().filter(|d| plan.stride(tensor, *d) != 0).collect();
        heads.sort_by_key(|d| std::cmp::Reverse(plan.stride(tensor, *d)));
        let heads = merge(&kernel.body.dims, &heads, &[(ty, strides)]);
        let along = heads.into_iter().map(|axis| (MapDim { size: axis.size, stride: axis.strides[0], extent: 1 }, OperandDim::Heads(axis.dims)));
        let of_rows = (MapDim { size, stride: plan.stride(tensor, dim), extent: rows }, OperandDim::Rows);
        let (map, directions) = tensor_maps::map(kernel, tensor, plan.d.d, std::iter::once(of_rows).chain(along).collect())?;
        Some(OperandMap { map, directions, rows })
    }

    /// Begins to copy `count` rows of a head, from `first` on, to a matrix in shared memory; their bytes are
    /// completed at `full`. `map` is the map's address.
    pub fn copy<'c>(&self, mma: &MmaAttention<'_, 'c>, map: Index<'c>, heads: &HeadIndices<'c>, rows: [Index<'c>; 2], count: i64, full: Index<'c>) {
        let (b, plan, [first, to]) = (mma.b, mma.plan, rows);
        let number = |dims: &Vec<Dim>| {
            let digit = |dim: &Dim| heads.iter().find(|(d, _)| d == dim).expect("invariant: the map's dims number heads").1;
            dims[1..].iter().fold(digit(&dims[0]), |number, dim| b.index_add(b.index_mul(number, b.word(plan.sizes(&[*dim]))), digit(dim)))
        };
        for done in (0..count).step_by(self.rows as usize) {
            let others = self.directions.iter().map(|direction| match direction {
                OperandDim::Rows => b.index_add(first, b.word(done)),
                OperandDim::Heads(dims) => number(dims),
            });
            let mut coordinates: Vec<Index<'c>> = std::iter::once(b.word(0)).chain(others).collect();
            for part in 0..plan.d.d / LINE_ELEMENTS {
                coordinates[0] = b.word(part * LINE_ELEMENTS);
                let to = b.index_add(to, b.word((part * count + done) * LINE));
                tensor_maps::copy_box(b, map, &coordinates, [to, full], 1);
            }
        }
    }
}
