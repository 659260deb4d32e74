//! What a warpgroup multiplies, in the background: rows of matrices in shared memory, and rows that it has in
//! registers.

use super::*;
use crate::build::swizzle::{DEPTH, LINE_ELEMENTS};

/// A matrix in shared memory whose lines are elements of a head: its descriptor, and how many rows it has.
#[derive(Clone, Copy)]
pub struct Matrix<'c> {
    descriptor: Index<'c>,
    rows: i64,
}

/// Products of a warpgroup with heads of `d` elements.
pub struct Matrices<'a, 'c> {
    pub b: &'a Simt<'c>,
    pub half: Half,
    pub d: i64,
}

impl<'c> Matrices<'_, 'c> {
    /// The matrix of so many rows at an address.
    pub fn at(&self, address: Index<'c>, rows: i64) -> Matrix<'c> {
        Matrix { descriptor: swizzle::descriptor(self.b, address, rows), rows }
    }

    /// Begins the products of 64 rows of one matrix with all rows of another. Returns the pending sums: four for
    /// every eight rows of the other.
    pub fn products(&self, first: Matrix<'c>, second: Matrix<'c>) -> Vec<Value<'c>> {
        self.add_products(first, second, None)
    }

    /// The same, added to sums.
    pub fn products_onto(&self, first: Matrix<'c>, second: Matrix<'c>, sums: &[Value<'c>]) -> Vec<Value<'c>> {
        self.add_products(first, second, Some(sums.to_vec()))
    }

    fn add_products(&self, first: Matrix<'c>, second: Matrix<'c>, mut sums: Option<Vec<Value<'c>>>) -> Vec<Value<'c>> {
        let (b, half, columns) = (self.b, self.half, second.rows as u32);
        for step in 0..self.d / DEPTH {
            let (part, within) = (step * DEPTH / LINE_ELEMENTS, step * DEPTH % LINE_ELEMENTS / DEPTH);
            let at = |m: Matrix<'c>| b.index_add(m.descriptor, b.index(part * m.rows * LINE / 16 + within * swizzle::advance(false))).into();
            let factors = [at(first), at(second)];
            sums = Some(match sums {
                None => b.asm(Instruction::GroupProduct { half, columns }, &factors),
                Some(sums) => {
                    b.asm(Instruction::GroupMultiply { factor: half.into(), columns, transposed: [false; 2] }, &[&factors, &*sums].concat())
                }
            });
        }
        sums.expect("invariant: a head has elements")
    }

    /// Begins to add the rows of a matrix, times the 16-bit weights that each of 64 rows of sums has for them.
    /// Returns the pending sums.
    pub fn weigh(&self, weights: &[Value<'c>], rows: Matrix<'c>, sums: &[Value<'c>]) -> Vec<Value<'c>> {
        let b = self.b;
        let multiply = Instruction::GroupMultiplyWords { half: self.half, columns: self.d as u32, transposed: true };
        let mut sums = sums.to_vec();
        for (step, words) in (0..).zip(weights.chunks_exact(4)) {
            let at = b.index_add(rows.descriptor, b.index(step * swizzle::advance(true)));
            sums = b.asm(multiply, &[words, &[at.into()], &*sums].concat());
        }
        sums
    }

    /// Closes a group of what was begun, which is waited for together.
    pub fn commit(&self) {
        self.b.asm(Instruction::CommitProducts, &[]);
    }

    /// Gives these sums, and all that was made before, to the matrix engine.
    pub fn fence(&self, sums: &[Value<'c>]) -> Vec<Value<'c>> {
        self.b.asm(Instruction::FenceSums { count: sums.len() }, sums)
    }

    /// Waits until all but the last `left` groups of products are done. `values` are the sums waited for, and others
    /// that must not be used before the wait.
    pub fn wait(&self, left: u32, values: &[Value<'c>]) -> Vec<Value<'c>> {
        self.b.asm(Instruction::WaitSums { left, count: values.len() }, values)
    }

    /// Weights as a product's first factor, in words of two.
    pub fn halves(&self, weights: &[Value<'c>]) -> Vec<Value<'c>> {
        weights.chunks_exact(2).map(|pair| self.b.half_pair(self.half, [pair[0], pair[1]])).collect()
    }
}
