//! Parameters that are drawn.

use crate::host::Whole;
use ir::graph::Init;
use ir::program::ParamEntry;
use ir::random;
use std::sync::LazyLock;

/// Elements for which a thread is worth its start: they take about a third of a millisecond.
const LEAST: usize = 1 << 14;

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
                let draw = |at: u64, out: &mut [f64]| out.iter_mut().zip(at..).for_each(|(x, i)| *x = random::normal(self.stream, i) * deviation.0);
                // Asking reads several files, so it is done once.
                static THREADS: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
                let threads = *THREADS;
                let share = out.len().div_ceil(threads).max(LEAST);
                if out.len() <= share {
                    return draw(at, out);
                }
                std::thread::scope(|scope| {
                    for (part, at) in out.chunks_mut(share).zip((at..).step_by(share)) {
                        scope.spawn(move || draw(at, part));
                    }
                });
            }
        }
    }
}
