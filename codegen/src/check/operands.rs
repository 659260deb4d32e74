//! What a kernel's code is run on.

use crate::check::memory::MappedMemory;

/// A result and the operand whose memory it takes, that memory, and all other results.
pub struct InPlaceOperands {
    pub pair: (usize, usize),
    pub place: MappedMemory,
    pub others: Vec<MappedMemory>,
}

impl InPlaceOperands {
    /// All results, in order.
    pub fn outputs(&self) -> impl Iterator<Item = &MappedMemory> {
        let (before, after) = self.others.split_at(self.pair.0);
        before.iter().chain([&self.place]).chain(after)
    }
}

/// What a kernel's code is run on.
pub struct Operands {
    pub inputs: Vec<MappedMemory>,
    pub outputs: Vec<MappedMemory>,
    /// What those outputs hold before that are added to.
    pub before: Vec<Option<MappedMemory>>,
    pub scratch: MappedMemory,
    pub scalars: Vec<f64>,
    pub scalar_bits: Vec<u64>,
}

impl Operands {
    pub fn all(&self) -> impl Iterator<Item = &MappedMemory> {
        self.inputs.iter().chain(&self.outputs)
    }
}
