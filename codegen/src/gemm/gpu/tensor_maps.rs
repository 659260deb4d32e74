//! Factors that tensor maps describe ([`crate::tensor_maps`]): `cp.async.bulk.tensor` brings a stage of one in a few
//! copies. Where experts own the contracted elements these must be lines of both factors: what comes behind an
//! expert's last one can then be cleared line by line.
//!
//! The blocks of a cluster have the same columns. So each copies its part of the second factor's lines, to all.

use super::copy::LineDim;
use super::parts::{Gpu, TilePart};
use super::tile::TileConfig;
use super::wgmma::SQUARE;
use crate::build::Builder;
use crate::build::block::Index;
use crate::build::simt::Simt;
use crate::build::stages::Cluster;
use crate::build::swizzle::LINE;
use crate::gemm::product::{ExpertDim, Product};
use crate::layout::Axis;
use crate::tensor_maps::{self, MapDim};
use ir::kernel::Kernel;
use ir::launch::TensorMap;

/// What a dim of a map stands for in the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FactorDim {
    /// Rows of the first factor, columns of the second.
    Own,
    Contracted,
    /// An index into `Product::outer`, or into `Product::outer_k`.
    Outer(usize),
    OuterContracted(usize),
    Expert,
}

/// A factor's map.
pub struct FactorMap {
    pub map: TensorMap,
    pub lines: LineDim,
    directions: Vec<FactorDim>,
    /// Copies of a stage: more than one where lines are contracted elements, of 64 rows (columns) each.
    copies: i64,
    /// Lines that a block copies of each of these, of the stage's own or for all blocks of the cluster.
    lines_copied: i64,
    is_first: bool,
}

/// What all stages of a part share: the map's address, and the coordinates that do not change.
pub struct BoxOrigin<'c> {
    coordinates: Vec<Option<Index<'c>>>,
    map: Index<'c>,
}

impl FactorMap {
    /// The map of a factor, if it can have one. Where blocks are a cluster, they share the second one's lines.
    pub fn new(kernel: &Kernel, product: &Product, tensor: usize, tile: &TileConfig, cluster: i64) -> Option<FactorMap> {
        let is_first = tensor == product.a;
        let sharers = if is_first { 1 } else { cluster };
        let (own, own_tile) = if is_first { (&product.m, tile.rows) } else { (&product.n, tile.columns) };
        let lines = LineDim::of(product, tensor);
        let of_own = (own, FactorDim::Own, own_tile);
        let of_k = (&product.k, FactorDim::Contracted, tile.depth);
        let (dense, (axis, direction, in_stage)) = match lines {
            LineDim::Own => (of_k, of_own),
            LineDim::Contracted => (of_own, of_k),
        };
        if dense.0.strides[tensor] != 1 || product.owns(ExpertDim::Contracted) && lines == LineDim::Own {
            return None;
        }
        let outer = product.outer.iter().enumerate().map(|(i, axis)| (axis, FactorDim::Outer(i), 1));
        let outer_k = product.outer_k.iter().enumerate().map(|(i, axis)| (axis, FactorDim::OuterContracted(i), 1));
        let experts = product.experts.iter().map(|x| (&x.axis, FactorDim::Expert, 1));
        let others = outer.chain(outer_k).chain(experts).filter(|(axis, ..)| axis.size > 1 && axis.strides[tensor] != 0);
        let line = (axis, direction, in_stage / sharers);
        let along =
            |(axis, direction, extent): (&Axis, FactorDim, i64)| (MapDim { size: axis.size, stride: axis.strides[tensor], extent }, direction);
        let (map, directions) = tensor_maps::map(kernel, tensor, dense.0.size, std::iter::once(line).chain(others).map(along).collect())?;
        let map = TensorMap { tf32: product.tf32, ..map };
        let directions = std::iter::once(dense.1).chain(directions).collect();
        let copies = dense.2 / i64::from(map.extents[0]);
        Some(FactorMap { copies, lines_copied: line.2, map, lines, directions, is_first })
    }

    /// What all stages of a part share. `map` is the map's address.
    pub(super) fn origin<'c>(&self, b: &Simt<'c>, product: &Product, part: &TilePart<'c>, map: Index<'c>) -> BoxOrigin<'c> {
        let digit = |number: Index<'c>, axes: &[Axis], at: usize| {
            let inner: i64 = axes[at + 1..].iter().map(|x| x.size).product();
            b.index_rem(b.index_div(number, b.word(inner)), b.word(axes[at].size))
        };
        let coordinate = |direction: &FactorDim| match direction {
            FactorDim::Own => Some(if self.is_first { part.row } else { part.column }),
            FactorDim::Outer(at) => Some(digit(b.narrow(part.outer), &product.outer, *at)),
            FactorDim::Expert => part.expert,
            FactorDim::Contracted | FactorDim::OuterContracted(_) => None,
        };
        BoxOrigin { coordinates: self.directions.iter().map(coordinate).collect(), map }
    }

    /// Begins to fill a stage, at `to`, from contracted element `k` in one of their repetitions; its bytes are
    /// completed at `barrier`. What a cluster shares goes to the same places of all its blocks.
    pub fn copy<'c>(
        &self,
        Gpu { b, product, .. }: &Gpu<'_, 'c>,
        cluster: Cluster<'c>,
        origin: &BoxOrigin<'c>,
        [k, repeat]: [Index<'c>; 2],
        [to, barrier]: [Index<'c>; 2],
    ) {
        let sharers = if self.is_first { 1 } else { cluster.blocks };
        let along = match self.lines {
            LineDim::Own => FactorDim::Own,
            LineDim::Contracted => FactorDim::Contracted,
        };
        let skipped = b.index_mul(if sharers == 1 { b.word(0) } else { cluster.rank }, b.word(self.lines_copied));
        let to = b.index_add(to, b.index_mul(skipped, b.word(LINE)));
        for number in 0..self.copies {
            let coordinate = |(direction, known): (&FactorDim, &Option<Index<'c>>)| match direction {
                FactorDim::Contracted => k,
                FactorDim::OuterContracted(at) => {
                    let inner: i64 = product.outer_k[at + 1..].iter().map(|x| x.size).product();
                    b.index_rem(b.index_div(repeat, b.word(inner)), b.word(product.outer_k[*at].size))
                }
                FactorDim::Own | FactorDim::Outer(_) | FactorDim::Expert => known.expect("invariant: the part has it"),
            };
            let mut at: Vec<Index> = self.directions.iter().zip(&origin.coordinates).map(coordinate).collect();
            // Several copies advance coordinate 0. Only a factor whose own dim is contiguous needs more than one.
            at[0] = b.index_add(at[0], b.word(number * i64::from(self.map.extents[0])));
            for (at, _) in at.iter_mut().zip(&self.directions).filter(|(_, direction)| **direction == along) {
                *at = b.index_add(*at, skipped);
            }
            tensor_maps::copy_box(b, origin.map, &at, [b.index_add(to, b.word(number * SQUARE)), barrier], sharers);
        }
    }
}
