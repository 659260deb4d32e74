//! Tensor maps: which operands they describe, and the copies that read by them.
//!
//! **The rule:** the operand is aligned, one direction is dense, all others have strides that are multiples of 16
//! bytes and of each other, and there are at most five. Copies begin at multiples of 16 bytes too.

use crate::build::asm::Instruction;
use crate::build::block::Index;
use crate::build::simt::{Simt, Value};
use crate::build::swizzle::LINE;
use ir::kernel::Kernel;
use ir::launch::{MAP_ALIGN, Swizzle, TensorMap};

/// A direction of a tensor: how many indices it has, elements from one to the next, and how many of them a box takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapDim {
    pub size: i64,
    pub stride: i64,
    pub extent: i64,
}

/// The map of an input, in boxes of swizzled lines along the dense direction, which has `dense` elements; with what
/// the other directions are, in the map's order. Nothing if there can be none.
pub fn map<T>(kernel: &Kernel, tensor: usize, dense: i64, mut others: Vec<(MapDim, T)>) -> Option<(TensorMap, Vec<T>)> {
    let dtype = kernel.inputs[tensor].ty.dtype;
    // A dim of size 1 may have any stride.
    let bytes = |along: &MapDim| if along.size > 1 { along.stride as u64 * dtype.bytes() } else { MAP_ALIGN };
    others.sort_by_key(|(along, _)| bytes(along));
    let map = TensorMap {
        argument: tensor as u32,
        dtype,
        tf32: false,
        sizes: std::iter::once(dense).chain(others.iter().map(|(along, _)| along.size)).map(|s| s as u64).collect(),
        strides: others.iter().map(|(along, _)| bytes(along)).collect(),
        extents: std::iter::once(LINE / dtype.bytes() as i64).chain(others.iter().map(|(along, _)| along.extent)).map(|e| e as u32).collect(),
        swizzle: Swizzle::B128,
    };
    map.check(kernel).ok()?;
    Some((map, others.into_iter().map(|(_, what)| what).collect()))
}

/// Copies the box at `coordinates` in the background to `to`; its bytes are completed at `barrier`. One thread does
/// it. `map`: its address.
pub fn copy_box<'c>(b: &Simt<'c>, map: Index<'c>, coordinates: &[Index<'c>], [to, barrier]: [Index<'c>; 2], blocks: i64) {
    let mut operands: Vec<Value> = vec![to.into(), map.into()];
    operands.extend(coordinates.iter().map(|x| Value::from(*x)));
    operands.push(barrier.into());
    b.asm(Instruction::CopyBox { dims: coordinates.len() as u32, blocks: blocks as u32 }, &operands);
}
