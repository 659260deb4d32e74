//! Sums of products: plain loops, and where these would take long, a library's products of matrices.

use super::{Walk, reorder, strides};
use crate::dim::{Dim, Dims};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use std::num::NonZero;
use std::thread;

/// Terms of a sum from which on matrices are worth their copies. How many sums there are does not count: a
/// chunk of rows has the same sums as all of them, to the bit.
const FEW: u64 = 32;

/// Products from which on all cores take part.
const MANY: usize = 1 << 26;

/// `sum over over of a * b`, in the storage order `out`.
pub(super) fn contract(dims: &Dims, out: &[Dim], over: &[Dim], a: (&[f64], &[Dim]), b: (&[f64], &[Dim])) -> Vec<f64> {
    let matrices = if dims.elements(over) < FEW { None } else { matrices(dims, out, over, a, b) };
    matrices.unwrap_or_else(|| loops(dims, out, over, a, b))
}

/// The definition.
fn loops(dims: &Dims, out: &[Dim], over: &[Dim], a: (&[f64], &[Dim]), b: (&[f64], &[Dim])) -> Vec<f64> {
    let (ao, bo) = (strides(dims, a.1, out), strides(dims, b.1, out));
    let (ai, bi) = (strides(dims, a.1, over), strides(dims, b.1, over));
    let mut inner = Walk::new(dims, over);
    let pairs: Vec<(usize, usize)> = (0..inner.total())
        .map(|_| {
            let p = (inner.offset(&ai), inner.offset(&bi));
            inner.step();
            p
        })
        .collect();
    let mut walk = Walk::new(dims, out);
    (0..walk.total())
        .map(|_| {
            let (x, y) = (walk.offset(&ao), walk.offset(&bo));
            walk.step();
            pairs.iter().map(|(i, j)| a.0[x + i] * b.0[y + j]).sum()
        })
        .collect()
}

/// The contraction as matrix products, one for each element of the dims that both factors and the result have. `None`
/// if a factor has a dim that is no batch, row, column or summed dim.
fn matrices(dims: &Dims, out: &[Dim], over: &[Dim], a: (&[f64], &[Dim]), b: (&[f64], &[Dim])) -> Option<Vec<f64>> {
    let of = |in_a: bool, in_b: bool| out.iter().copied().filter(|d| a.1.contains(d) == in_a && b.1.contains(d) == in_b).collect::<Vec<_>>();
    let (each, rows, columns) = (of(true, true), of(true, false), of(false, true));
    let (of_a, of_b) = ([&each[..], &rows, over].concat(), [&each[..], over, &columns].concat());
    let known = |has: &[Dim], all: &[Dim]| has.len() == all.len() && all.iter().all(|d| has.contains(d));
    if !known(a.1, &of_a) || !known(b.1, &of_b) || each.len() + rows.len() + columns.len() != out.len() {
        return None;
    }
    let [m, n, k] = [&rows[..], &columns, over].map(|of| dims.elements(of) as usize);
    let (x, y) = (reorder(dims, a.0, a.1, &of_a), reorder(dims, b.0, b.1, &of_b));
    let mut z = vec![0.0; dims.elements(out) as usize];
    let cores = if z.len().saturating_mul(k) < MANY { 1 } else { thread::available_parallelism().map_or(1, NonZero::get) };
    // Rows, of one matrix or of several, are divided evenly among the threads.
    let tall = m.div_ceil(cores.div_ceil(dims.elements(&each).max(1) as usize)).max(1);
    let mut shares: Vec<Vec<(usize, usize, &mut [f64])>> = (0..cores).map(|_| vec![]).collect();
    for (matrix, z) in z.chunks_mut((m * n).max(1)).enumerate() {
        for (piece, z) in z.chunks_mut((tall * n).max(1)).enumerate() {
            shares[(matrix * m.div_ceil(tall) + piece) % cores].push((matrix, piece * tall, z));
        }
    }
    let multiply = |(matrix, row, z): (usize, usize, &mut [f64])| {
        let height = z.len() / n;
        let x = ArrayView2::from_shape((height, k), &x[(matrix * m + row) * k..][..height * k]);
        let y = ArrayView2::from_shape((k, n), &y[matrix * k * n..][..k * n]);
        let z = ArrayViewMut2::from_shape((height, n), z);
        let (Ok(x), Ok(y), Ok(mut z)) = (x, y, z) else { unreachable!("invariant: as many elements as their sizes say") };
        general_mat_mul(1.0, &x, &y, 0.0, &mut z);
    };
    thread::scope(|scope| {
        let mine = shares.pop();
        shares.into_iter().for_each(|share| drop(scope.spawn(move || share.into_iter().for_each(multiply))));
        mine.into_iter().flatten().for_each(multiply);
    });
    Some(reorder(dims, &z, &[&each[..], &rows, &columns].concat(), out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::DimInfo;
    use crate::random;

    /// Loops and matrix products agree exactly on integers: for dims in any order, one matrix and several, small and
    /// large.
    #[test]
    fn matrices_are_the_sums_that_loops_make() {
        let names = ["batch", "heads", "rows", "more", "columns", "k", "l"];
        for (number, sizes) in [[3, 2, 5, 1, 7, 4, 3], [1, 1, 600, 1, 500, 300, 1], [2, 3, 40, 5, 60, 70, 30]].into_iter().enumerate() {
            let mut dims = Dims::default();
            let d: Vec<Dim> = names.iter().zip(sizes).map(|(name, size)| dims.add(DimInfo::new(*name, size))).collect();
            let [batch, heads, rows, more, columns, k, l] = d[..] else { unreachable!("seven dims") };
            let (of_a, of_b) = (vec![rows, k, batch, more, l, heads], vec![heads, l, columns, batch, k]);
            let out = [batch, rows, columns, heads, more];
            let data = |of: &[Dim], seed: u64| -> Vec<f64> {
                (0..dims.elements(of)).map(|i| (random::uniform(random::stream(seed, number as u64, 0), i) * 64.0).floor() - 32.0).collect()
            };
            let (a, b) = (data(&of_a, 1), data(&of_b, 2));
            let got = matrices(&dims, &out, &[k, l], (&a, &of_a), (&b, &of_b)).expect("matrices");
            assert!(got == loops(&dims, &out, &[k, l], (&a, &of_a), (&b, &of_b)), "sizes {sizes:?}");
            // A dim of both factors that is neither summed nor in the result is no dim of a matrix product.
            assert_eq!(matrices(&dims, &out, &[k], (&a, &of_a), (&b, &of_b)), None);
        }
    }

    /// A chunk of rows has bitwise the same sums as the whole, however few terms a sum has.
    #[test]
    fn chunks_of_rows_are_rows_of_the_whole() {
        let mut dims = Dims::default();
        let [rows, chunk, columns] = [("rows", 12), ("chunk", 3), ("columns", 200)].map(|(name, n)| dims.add(DimInfo::new(name, n)));
        for terms in [8, 31, 32, 300] {
            let k = dims.add(DimInfo::new("k", terms));
            let data = |n: u64, seed: u64| -> Vec<f64> { (0..n).map(|i| random::uniform(random::stream(seed, 0, 0), i) - 0.5).collect() };
            let (a, b) = (data(12 * terms, 1), data(terms * 200, 2));
            let whole = contract(&dims, &[rows, columns], &[k], (&a, &[rows, k]), (&b, &[k, columns]));
            let part = contract(&dims, &[chunk, columns], &[k], (&a[..3 * terms as usize], &[chunk, k]), (&b, &[k, columns]));
            assert_eq!(part, whole[..600], "{terms} terms");
        }
    }
}
