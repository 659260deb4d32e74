//! How matrices lie in shared memory for `wgmma`: in lines of 128 bytes, swizzled, as tensor copies put them there.
//!
//! Lines have 64 elements of 16 bits. Where a matrix is longer along them, 64 elements of all lines come first, then
//! the next 64 of all. Matrices of tf32 have 32 elements a line, contracted ones.

use super::block::Index;
use super::simt::Simt;
use super::{Builder, IntBinary};

/// Bytes of a line.
pub const LINE: i64 = 128;
/// Elements of 16 bits of a line.
pub const LINE_ELEMENTS: i64 = 64;
/// Contracted elements of an instruction, of 16 bits.
pub const DEPTH: i64 = 16;
/// The code of a swizzle of 128 bytes in a matrix descriptor.
const SWIZZLE_128: i64 = 1 << 62;

/// What the matrix engine is told of a matrix: where it begins; its swizzle; how many lines it has, so how far it is
/// to the next 64 rows (columns) where lines are contracted elements; how far to the next eight lines.
pub fn descriptor<'c>(b: &Simt<'c>, start: Index<'c>, lines: i64) -> Index<'c> {
    let constant = (lines * LINE / 16) << 16 | (8 * LINE / 16) << 32 | SWIZZLE_128;
    b.bits(IntBinary::Or, b.widen(b.bits(IntBinary::ShrLogical, start, b.word(4))), b.index(constant))
}

/// What a descriptor grows by from the contracted elements of an instruction, 32 bytes, to those of the next: within
/// a line or, transposed, where lines are contracted elements.
pub fn advance(transposed: bool) -> i64 {
    if transposed { DEPTH * LINE / 16 } else { 2 * DEPTH / 16 }
}
