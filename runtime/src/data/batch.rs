//! What is read of a step's batch: of each input, the elements that are wanted.

use super::load_regions::{LoadRegions, Regions};
use crate::executor::StepInputs;
use crate::host::{Tensor, Whole, sizes};
use ir::op::DType;
use ir::program::InputEntry;

/// The elements of each input of a job that were wanted.
pub struct Batch<'a> {
    held: Vec<WantedInput<'a>>,
    /// Bytes of files that were read for it.
    pub bytes: u64,
}

/// The elements of one input that were wanted.
struct WantedInput<'a> {
    regions: &'a Regions,
    values: Values,
}

/// Numbers as their input has them.
enum Values {
    Whole(Vec<i32>),
    Real(Vec<f64>),
}

impl<'a> Batch<'a> {
    pub(super) fn new(inputs: &[InputEntry], wanted: &'a LoadRegions) -> Batch<'a> {
        let values = |input: &InputEntry| match input.dtype {
            DType::I32 | DType::Bool => Values::Whole(vec![]),
            DType::F32 | DType::Bf16 | DType::F16 => Values::Real(vec![]),
        };
        let held = inputs.iter().zip(&wanted.0).map(|(input, regions)| WantedInput { regions, values: values(input) });
        Batch { held: held.collect(), bytes: 0 }
    }

    /// Adds the next elements of an input that are wanted. Whole numbers are those that the input takes.
    pub(super) fn extend(&mut self, input: usize, values: &[f64]) {
        match &mut self.held[input].values {
            Values::Whole(held) => held.extend(values.iter().map(|x| *x as i32)),
            Values::Real(held) => held.extend(values),
        }
    }

    /// The whole tensors, where all was wanted.
    pub(super) fn tensors(&self, inputs: &[InputEntry]) -> Vec<Tensor> {
        let tensor = |(held, input): (&WantedInput, &InputEntry)| {
            let mut tensor = Tensor::zeros(sizes(&input.dims));
            held.read(0, &mut tensor.data);
            tensor
        };
        self.held.iter().zip(inputs).map(tensor).collect()
    }
}

impl StepInputs for Batch<'_> {
    fn input(&self, number: u32) -> &dyn Whole {
        &self.held[number as usize]
    }
}

impl Whole for WantedInput<'_> {
    fn read(&self, at: u64, out: &mut [f64]) {
        if out.is_empty() {
            return;
        }
        // A command loads only elements that were wanted for it.
        let from = self.regions.find(at).expect("invariant: what is loaded was wanted");
        match &self.values {
            Values::Whole(held) => out.iter_mut().zip(&held[from..]).for_each(|(out, x)| *out = f64::from(*x)),
            Values::Real(held) => out.copy_from_slice(&held[from..][..out.len()]),
        }
    }
}
