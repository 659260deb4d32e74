//! Parameters that are drawn.

use crate::host::Whole;
use ir::graph::Init;
use ir::program::ParamEntry;
use ir::random;

/// The initial values of a parameter, by its name, the seed and each element's index.
pub(super) struct Random {
    init: Init,
    stream: u64,
}

impl Random {
    pub(super) fn new(entry: &ParamEntry, seed: u64) -> Random {
        Random { init: entry.init, stream: random::stream(random::key(&entry.name), seed, 0) }
    }
}

impl Whole for Random {
    fn read(&self, at: u64, out: &mut [f64]) {
        match self.init {
            Init::Const(value) => out.fill(value.0),
            Init::Normal(deviation) => {
                out.iter_mut().zip(at..).for_each(|(x, i)| *x = random::normal(self.stream, i) * deviation.0);
            }
        }
    }
}
