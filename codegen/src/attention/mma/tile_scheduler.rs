//! In which order tiles are handed out: long ones first, and those that meet the same rows at about the same time.
//!
//! Of a causal head the last queries meet most, and the first keys. Blocks that come for their next tile when they
//! are through with one end at about the same time if the long tiles go first (Graham, "Bounds on multiprocessing
//! timing anomalies", 1969). But tiles of all heads at once would have the rows of all heads come from memory again
//! and again: so heads are taken in groups whose rows stay in the second-level cache.

use crate::abi::CACHED;
use crate::attention::AttentionPlan;
use crate::build::Builder;
use crate::build::block::Index;
use crate::build::simt::Simt;
use crate::layout::div_ceil;

/// Bytes of an element.
const ELEMENT: i64 = 2;

/// Tiles of one kind: runs of rows of each head.
#[derive(Clone, Copy)]
pub struct TileOrder {
    /// The last runs first.
    from_last: bool,
    heads: i64,
    runs: i64,
    /// Heads whose tiles alternate.
    together: i64,
}

impl TileOrder {
    /// Order of tiles of `rows` queries, or of `rows` keys.
    pub fn new(plan: &AttentionPlan, queries: bool, rows: i64) -> TileOrder {
        let [shared, group] = [&plan.shared, &plan.group].map(|dims| plan.sizes(dims));
        let (own, others, heads) = match queries {
            true => (plan.queries, plan.keys, group),
            false => (plan.keys, plan.queries * group, 1),
        };
        let groups = (CACHED / (others * ELEMENT * (plan.d.d + plan.values.d))).clamp(1, shared);
        TileOrder { from_last: queries, heads: heads * shared, runs: div_ceil(own, rows), together: heads * groups }
    }

    /// Order of `runs` tiles for each head, one head after the other.
    pub fn by_head(heads: i64, runs: i64) -> TileOrder {
        TileOrder { from_last: true, heads, runs, together: 1 }
    }

    pub fn tiles(&self) -> i64 {
        self.heads * self.runs
    }

    /// The head of a tile, and the tile's run in that head.
    pub fn place<'c>(&self, b: &Simt<'c>, number: Index<'c>) -> [Index<'c>; 2] {
        let group = b.word(self.together * self.runs);
        let first = b.index_mul(b.index_div(number, group), b.word(self.together));
        let mixed = match self.heads % self.together {
            0 => b.word(self.together),
            _ => b.least(b.word(self.together), b.index_sub(b.word(self.heads), first)),
        };
        let within = b.index_rem(number, group);
        let (head, run) = (b.index_add(first, b.index_rem(within, mixed)), b.index_div(within, mixed));
        [head, if self.from_last { b.index_sub(b.word(self.runs - 1), run) } else { run }]
    }
}
