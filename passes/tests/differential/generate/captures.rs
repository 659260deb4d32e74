//! Values that layers use without carrying them: across pipeline stages they are relayed.

use super::{Rng, Writer};
use ir::random::mix;

/// The values that a model captures. They are drawn by their own random generator, so that the models of seeds do not
/// change.
pub struct Captures {
    /// A value from before all layers, used by layers.
    first: Option<&'static str>,
    /// A value from between two repeats, used by the layers of the second.
    middle: Option<&'static str>,
    /// A function of a parameter alone, used by layers.
    curve: bool,
    /// A value of all layers, summed at the end.
    total: bool,
    /// The value from before all layers is used after them, too.
    last: bool,
}

impl Captures {
    pub fn new(seed: u64) -> Captures {
        let mut dice = Rng(mix(!seed ^ 3));
        let mut way = |percent| {
            let ways = [
                "z = z + kept;",
                "z = z * kept;",
                "z = z + linear(linear(kept, hidden, ffn) as from_kept, ffn, hidden) as kept_stream;",
                "if i % 2 == 0 {\nz = kept - z;\n}",
            ];
            let way = dice.pick(&ways);
            dice.chance(percent).then_some(way)
        };
        let (first, middle) = (way(20), way(40));
        Captures { first, middle, curve: dice.chance(10), total: dice.chance(10), last: first.is_some() && dice.chance(40) }
    }
}

impl Writer {
    pub(super) fn before_layers(&mut self) {
        if self.captures.first.is_some() {
            self.line("let kept0 = norm(x) as kept_norm0;");
        }
        if self.captures.curve {
            self.line("param curved: [hidden] ~ normal(0.02);");
            self.line("let curve = act(curved * 2);");
        }
        if self.captures.total {
            self.line("let total = x;");
        }
    }

    /// Between the repeats `k` and `k + 1`.
    pub(super) fn between_layers(&mut self, k: usize) {
        if k == 0 && self.layers.len() > 1 && self.captures.middle.is_some() {
            self.line("let kept1 = norm(x) as kept_norm1;");
        }
    }

    /// Where a layer of repeat `k` has its input, `z`.
    pub(super) fn in_layers(&mut self, k: usize) {
        let uses = [self.captures.first, self.captures.middle.filter(|_| k == 1)];
        for (n, way) in uses.into_iter().enumerate() {
            for line in way.iter().flat_map(|way| way.lines()) {
                let line = line.replace("kept", &format!("kept{n}"));
                self.line(line);
            }
        }
        if self.captures.curve {
            self.line("z = z + curve;");
        }
    }

    pub(super) fn at_layers_end(&mut self) {
        if self.captures.total {
            self.line("total = total + x;");
        }
    }

    pub(super) fn after_layers(&mut self) {
        if self.captures.last {
            self.line("x = x + kept0;");
        }
        if self.captures.total {
            self.line("x = x + total;");
        }
    }
}
