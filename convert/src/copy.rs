//! Strided copies between tensors, widened to f32.

use crate::layout::Loop;
use safetensors::Dtype;

/// The direction of a copy between a parameter and a foreign tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Direction {
    Import,
    Export,
}

/// Side of the blocks in which a transposition runs: both sides' cache lines are used up while they are at hand.
const TILE: usize = 32;

/// One loop of a nest, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CopyLoop {
    size: usize,
    from: usize,
    to: usize,
}

/// Copies every element of a nest. `from` holds elements of `dtype` (f32, f16 or bf16, little-endian), `to` f32; the
/// nest begins at the given elements of each.
///
/// # Panics
/// A nest that leaves a slice, or another dtype: the caller checks both.
pub fn copy(loops: &[Loop], direction: Direction, from: (&[u8], Dtype, u64), to: (&mut [u8], u64)) {
    let dims = loops.iter().map(|l| {
        let (from, to) = match direction {
            Direction::Import => (l.foreign, l.own),
            Direction::Export => (l.own, l.foreign),
        };
        CopyLoop { size: l.size as usize, from: from as usize, to: to as usize }
    });
    let nest = LoopNest::new(dims.collect());
    let ((source, dtype, start), (target, first)) = (from, to);
    let (start, first) = (start as usize, first as usize);
    match dtype {
        Dtype::F32 => nest.copy::<4>(&|b| b, source, start, target, first),
        Dtype::F16 => nest.copy::<2>(&|b| half::f16::from_le_bytes(b).to_f32().to_le_bytes(), source, start, target, first),
        Dtype::BF16 => nest.copy::<2>(
            &|b| ir::fault!("convert.copy.bf16", half::f16::from_le_bytes(b).to_f32(), half::bf16::from_le_bytes(b).to_f32()).to_le_bytes(),
            source,
            start,
            target,
            first,
        ),
        other => unreachable!("invariant: {other:?} was refused"),
    }
}

/// Loops with the innermost two apart: `across` is dense on the side of the source, `along` on that of the target.
struct LoopNest {
    outer: Vec<CopyLoop>,
    across: CopyLoop,
    along: CopyLoop,
}

const ONCE: CopyLoop = CopyLoop { size: 1, from: 0, to: 0 };

impl LoopNest {
    fn new(mut dims: Vec<CopyLoop>) -> LoopNest {
        dims.retain(|r| r.size != 1);
        dims.sort_by_key(|r| std::cmp::Reverse(r.to));
        let mut merged: Vec<CopyLoop> = vec![];
        for dim in dims {
            match merged.last_mut() {
                Some(last) if last.from == dim.from * dim.size && last.to == dim.to * dim.size => {
                    *last = CopyLoop { size: last.size * dim.size, ..dim }
                }
                _ => merged.push(dim),
            }
        }
        let along = merged.pop().unwrap_or(ONCE);
        let across = match merged.iter().position(|r| r.from == 1) {
            Some(i) => merged.remove(i),
            None => ONCE,
        };
        LoopNest { outer: merged, across, along }
    }

    fn copy<const N: usize>(&self, widen: &impl Fn([u8; N]) -> [u8; 4], source: &[u8], start: usize, target: &mut [u8], first: usize) {
        let (source, _) = source.as_chunks::<N>();
        let (target, _) = target.as_chunks_mut::<4>();
        let total: usize = self.outer.iter().map(|r| r.size).product();
        for mut index in 0..total {
            let (mut from, mut to) = (start, first);
            for dim in self.outer.iter().rev() {
                from += index % dim.size * dim.from;
                to += index % dim.size * dim.to;
                index /= dim.size;
            }
            self.plane(widen, source, from, target, to);
        }
    }

    fn plane<const N: usize>(&self, widen: &impl Fn([u8; N]) -> [u8; 4], source: &[[u8; N]], start: usize, target: &mut [[u8; 4]], first: usize) {
        let (across, along) = (self.across, self.along);
        if across.size == 1 && along.from == 1 && along.to == 1 {
            let row = &source[start..start + along.size];
            target[first..first + along.size].iter_mut().zip(row).for_each(|(t, s)| *t = widen(*s));
            return;
        }
        for i0 in (0..across.size).step_by(TILE) {
            for j0 in (0..along.size).step_by(TILE) {
                for i in i0..across.size.min(i0 + TILE) {
                    for j in j0..along.size.min(j0 + TILE) {
                        target[first + i * across.to + j * along.to] = widen(source[start + i * across.from + j * along.from]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn a_transposition_of_any_size_goes_and_comes_back() {
        let (rows, columns) = (37u64, 70u64);
        let values: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        // The foreign tensor is [columns, rows], the own one [rows, columns].
        let loops = [Loop { size: columns, own: 1, foreign: rows }, Loop { size: rows, own: columns, foreign: 1 }];
        let (source, mut own, mut back) = (bytes(&values), vec![0; values.len() * 4], vec![0; values.len() * 4]);
        copy(&loops, Direction::Import, (&source, Dtype::F32, 0), (&mut own, 0));
        assert_eq!(floats(&own)[1], rows as f32);
        assert_eq!(floats(&own)[columns as usize], 1.0);
        copy(&loops, Direction::Export, (&own, Dtype::F32, 0), (&mut back, 0));
        assert_eq!(back, source);
    }

    #[test]
    fn narrow_floats_are_widened() {
        let loops = [Loop { size: 2, own: 1, foreign: 1 }];
        let mut out = vec![0; 12];
        let source: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        copy(&loops, Direction::Import, (&source, Dtype::BF16, 0), (&mut out, 1));
        assert_eq!(floats(&out), [0.0, 1.5, -2.0]);
        let source: Vec<u8> = [0.25f32, 3.0].iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
        copy(&loops, Direction::Import, (&source, Dtype::F16, 0), (&mut out, 0));
        assert_eq!(floats(&out), [0.25, 3.0, -2.0]);
    }

    #[test]
    fn dims_that_lie_alike_are_one_loop() {
        let loops = [CopyLoop { size: 2, from: 12, to: 12 }, CopyLoop { size: 3, from: 4, to: 4 }, CopyLoop { size: 4, from: 1, to: 1 }];
        let nest = LoopNest::new(loops.to_vec());
        assert_eq!((nest.outer.len(), nest.along), (0, CopyLoop { size: 24, from: 1, to: 1 }));
    }
}
