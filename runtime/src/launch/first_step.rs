//! What the first step of a run should come to: the same model on one rank, interpreted in f64.
//!
//! The whole first batch may be too much for that. So a run looks at a few of its sequences first, each as often as
//! makes a batch, before it trains: means over copies are those of what was copied.

use super::error::RunError;
use super::options::RunOptions;
use super::orders::orders;
use crate::artifact::Artifact;
use crate::checkpoint;
use crate::data_loader::RunData;
use crate::host::Tensor;
use crate::protocol::{Expected, FirstStep};
use crate::reference::{self, DIGIT, Numbers};
use crate::weights::Weights;
use ir::kernel::distance::narrowest;
use ir::op::{DType, Op, Real};
use ir::program::Job;

/// How far losses and gradient norms of a step may be apart, relatively. In 32 bits orders of sums and approximations
/// of functions differ.
pub const WIDE: [f64; 2] = [1e-4, 1e-4];
/// In fewer bits every rounding may go the other way.
pub const NARROW: [f64; 2] = [4e-3, 4e-2];
/// How far numbers in f64 may be apart that should be the same.
const EQUAL: f64 = 1e-6;
/// The part of its size without cancellation that a number counts as at least. Losses of usual models are of a
/// size of one to two times themselves, gradient norms of one to four.
const SIZE: f64 = 0.25;

/// What is compared.
const COMPARED: [&str; 2] = ["loss", "grad_norm"];

/// Interprets the passes of the first step of `references`: the model on one rank, with fewer sequences. Those after
/// the first show that copies of sequences come to the same as these do, which a model need not be like.
///
/// # Errors
/// As of a run before its first rank starts; a model that is not like that.
pub fn first_step(artifact: &Artifact, options: &RunOptions, references: &[Job]) -> Result<Option<FirstStep>, RunError> {
    let job = &artifact.job;
    let orders = orders(artifact, options)?;
    let (done, _) = orders.start(job.global_batch);
    if done >= orders.steps {
        return Ok(None);
    }
    let Some(run_data) = RunData::open(job, &orders)? else { return Ok(None) };
    let whole = run_data.training.batch(done)?;
    let Some(first) = references.first() else { return Ok(None) };
    let found = |reference: &Job, numbers: Numbers| -> Result<Vec<f64>, RunError> {
        let weights = match &orders.resume {
            Some((path, _)) => checkpoint::resume(path, reference)?.weights,
            None if orders.init.is_empty() => Weights::random(reference, orders.seed),
            None => checkpoint::initial(&orders.init, reference, &orders.drawn, orders.seed)?.0,
        };
        let few = spread(&whole, job.global_batch, first.global_batch, reference.global_batch);
        let reports = reference::passes(reference, &weights, &few, done + 1, orders.seed, numbers).map_err(|e| RunError::Reference(e.to_string()))?;
        weights.check()?;
        Ok(COMPARED.map(|name| reports.get(name).copied().unwrap_or(f64::NAN)).to_vec())
    };
    let expected = found(first, Numbers::Exact)?;
    if let Some((name, value)) = COMPARED.iter().zip(&expected).find(|(_, value)| !value.is_finite()) {
        return Err(RunError::Reference(format!("`{name}` is {value} where the model is interpreted, without rounding")));
    }
    // The size of a number without cancellation is how far it moves when the last digits of all that it is made of
    // change, in units of such a digit.
    let sizes: Vec<f64> = expected.iter().zip(found(first, Numbers::Noisy)?).map(|(a, b)| (a - b).abs() / DIGIT).collect();
    for other in &references[1..] {
        for ((name, size), (a, b)) in COMPARED.iter().zip(&sizes).zip(expected.iter().zip(found(other, Numbers::Exact)?)) {
            if is_beyond(b, *a, allowed(*a, *size, EQUAL)) {
                let (few, more) = (first.global_batch, other.global_batch);
                return Err(RunError::Reference(format!(
                    "with {few} of its sequences `{name}` is {a:e}, and {b:e} with each of them {} times. All {} show what it should be (--check-first-step={1})",
                    more / few,
                    job.global_batch
                )));
            }
        }
    }
    let relative = if is_narrow(job) { NARROW } else { WIDE };
    let expected = COMPARED.iter().zip(expected).zip(sizes.iter().zip(relative)).map(|((name, value), (size, relative))| Expected {
        report: (*name).into(),
        value: Real(value),
        allowed: Real(allowed(value, *size, relative)),
    });
    Ok(Some(FirstStep { sequences: first.global_batch, expected: expected.collect() }))
}

/// How far others may be from a number of this size without cancellation.
fn allowed(value: f64, size: f64, relative: f64) -> f64 {
    relative * value.abs().max(SIZE * size).max(f64::from(f32::MIN_POSITIVE))
}

/// Whether a number is further from another than that, or is none.
pub(crate) fn is_beyond(found: f64, expected: f64, allowed: f64) -> bool {
    let apart = (found - expected).abs();
    apart.is_nan() || apart > allowed
}

/// The first `few` sequences of a batch of `batch`, repeated so that there are `many`, with copies beside each other.
pub(crate) fn spread(inputs: &[Tensor], batch: u64, few: u64, many: u64) -> Vec<Tensor> {
    let of = |tensor: &Tensor| {
        let Some((rows, rest)) = tensor.sizes.split_first().filter(|(rows, _)| **rows == batch) else { return tensor.clone() };
        let width = tensor.data.len() / (*rows).max(1) as usize;
        let row = |i: u64| {
            let from = (i * few / many) as usize * width;
            tensor.data[from..from + width].iter().copied()
        };
        Tensor { sizes: [&[many], rest].concat(), data: (0..many).flat_map(row).collect() }
    };
    inputs.iter().map(of).collect()
}

/// Whether something is computed in fewer than 32 bits.
fn is_narrow(job: &Job) -> bool {
    let rounds = |op: &Op| matches!(op, Op::Dot { tf32: true, .. } | Op::GroupedDot { tf32: true, .. });
    job.kernels.iter().any(|kernel| narrowest(kernel) != DType::F32 || kernel.body.nodes.iter().any(|n| rounds(&n.op)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_spread_over_a_batch() {
        let tokens = Tensor { sizes: vec![4, 2], data: (0..8).map(f64::from).collect() };
        let other = Tensor { sizes: vec![2], data: vec![7.0, 8.0] };
        let of = |few, many| spread(&[tokens.clone(), other.clone()], 4, few, many);
        assert_eq!(of(4, 4)[0], tokens);
        let [a, b] = of(2, 4).try_into().unwrap();
        assert_eq!((a.sizes, a.data, b), (vec![4, 2], vec![0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0], other.clone()));
        assert_eq!(of(1, 1)[0], Tensor { sizes: vec![1, 2], data: vec![0.0, 1.0] });
    }

    #[test]
    fn what_is_left_of_greater_numbers_is_as_good_as_these() {
        // The norm is as those of models are: off by a thousandth it is refused.
        assert!(is_beyond(2.0 * 1.001, 2.0, allowed(2.0, 4.0 * 2.0, WIDE[1])));
        assert!(!is_beyond(2.0 * 1.00009, 2.0, allowed(2.0, 4.0 * 2.0, WIDE[1])));
        // This is a mean of terms of size 0.3 that cancel.
        assert!(!is_beyond(-6.8307e-5, -6.8250e-5, allowed(-6.8250e-5, 0.3, WIDE[0])));
        assert!(is_beyond(-9e-5, -6.8250e-5, allowed(-6.8250e-5, 0.3, WIDE[0])));
    }

    #[test]
    fn what_is_no_number_is_far() {
        assert!(is_beyond(f64::NAN, 1.0, 1.0) && is_beyond(1.0, f64::NAN, 1.0) && is_beyond(f64::INFINITY, 1.0, 1.0));
        assert!(!is_beyond(1.0 + 1e-9, 1.0, 1e-8) && !is_beyond(0.0, 0.0, 0.0));
    }
}
