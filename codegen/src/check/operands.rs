//! What a kernel's code is run on.

use crate::check::memory::Mapped;

/// A result and an operand of its place, that place, and all other results.
pub struct Over {
    pub pair: (usize, usize),
    pub place: Mapped,
    pub others: Vec<Mapped>,
}

impl Over {
    /// In order.
    pub fn outputs(&self) -> impl Iterator<Item = &Mapped> {
        let (before, after) = self.others.split_at(self.pair.0);
        before.iter().chain([&self.place]).chain(after)
    }
}

/// What a kernel's code is run on.
pub struct Operands {
    pub inputs: Vec<Mapped>,
    pub outputs: Vec<Mapped>,
    /// What those outputs hold before that are added to.
    pub before: Vec<Option<Mapped>>,
    pub scratch: Mapped,
    pub scalars: Vec<f64>,
    pub scalar_bits: Vec<u64>,
}

impl Operands {
    pub fn all(&self) -> impl Iterator<Item = &Mapped> {
        self.inputs.iter().chain(&self.outputs)
    }
}
