//! Results in the place of operands: a launch may say so where a result at a point depends on the operand at that
//! point alone. Code must then read what it needs of the operand before it writes there.

use crate::check::memory::MappedMemory;
use crate::check::operands::{InPlaceOperands, Operands};
use crate::check::{ResultElement, Wrong};
use ir::graph::Type;
use ir::kernel::Kernel;
use ir::random::mix;

/// Places of a result that are compared: all, or so many, of which few are in the middle, where each is a page of
/// its own.
const PLACES: u64 = 1 << 12;
const BETWEEN: u64 = 1 << 8;

/// A result and an operand in whose place it may be, if there are such; of a kernel with several results, the first
/// one, as code that writes it early is wrong in the others.
pub fn pair(kernel: &Kernel) -> Option<(usize, usize)> {
    let of = |(k, operands): (usize, Vec<bool>)| Some((k, operands.iter().position(|may| *may)?));
    kernel.in_place().into_iter().enumerate().find_map(of)
}

/// That code computes the same with a result in an operand's place, wherever it wrote.
///
/// # Errors
/// A place where it does not.
pub fn same(kernel: &Kernel, apart: &Operands, over: &InPlaceOperands, seed: u64) -> Result<(), Wrong> {
    for ((k, o), now) in kernel.outputs.iter().enumerate().zip(over.outputs()) {
        let ty = &kernel.body[o.value].ty;
        if let Some((index, got, want)) = differs(kernel, ty, &o.strides, (&apart.outputs[k], now), seed) {
            let names = ty.dims.iter().map(|d| kernel.body.dims.name(*d).to_string());
            let place = ResultElement { output: k, index: names.zip(index).collect() };
            return Err(Wrong::InPlace { place, operand: over.pair.1, got, want });
        }
    }
    Ok(())
}

/// A place that was written and holds another number, with both.
fn differs(kernel: &Kernel, ty: &Type, strides: &[u64], (before, now): (&MappedMemory, &MappedMemory), seed: u64) -> Option<(Vec<u64>, f64, f64)> {
    let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
    let all = sizes.iter().product::<u64>();
    for k in 0..all.min(PLACES) {
        // Most positions lie near both ends, where tiles surely ran.
        let mut number = match k {
            _ if all <= PLACES => k,
            k if k < BETWEEN => mix(seed ^ k) % all,
            k if k % 2 == 0 => k,
            k => all - k,
        };
        let mut index = vec![0; sizes.len()];
        for (i, n) in index.iter_mut().zip(&sizes).rev() {
            (*i, number) = (number % n, number / n);
        }
        let offset: u64 = index.iter().zip(strides).map(|(i, s)| i * s).sum();
        let (want, got) = (before.get(ty.dtype, offset), now.get(ty.dtype, offset));
        if !before.is_unwritten(ty.dtype, offset) && want.to_bits() != got.to_bits() {
            return Some((index, got, want));
        }
    }
    None
}
