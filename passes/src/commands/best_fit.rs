//! Offsets for buffers with lifetimes: those whose lifetimes overlap never overlap in memory; offsets are 64-byte aligned.
//! A lifetime is a list of spans of time: what is kept from one call to another lives in some commands of either.

use std::collections::BTreeMap;
use std::ops::Range;

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGN: u64 = 64;

/// First and last moment, both inclusive.
pub type Span = (usize, usize);

/// A buffer's need: bytes, and when it has something in them. A span is from a first write to a last use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveRange {
    /// Bytes of the buffer, before rounding up to [`ALIGN`].
    pub bytes: u64,
    /// At least one; in order and apart.
    pub spans: Vec<Span>,
}

impl LiveRange {
    /// A need of one span.
    pub fn new(bytes: u64, first: usize, last: usize) -> LiveRange {
        LiveRange { bytes, spans: vec![(first, last)] }
    }

    fn first(&self) -> usize {
        self.spans[0].0
    }

    /// Whether both are alive at some moment.
    #[cfg(test)]
    fn meets(&self, other: &LiveRange) -> bool {
        self.spans.iter().any(|a| other.spans.iter().any(|b| a.0 <= b.1 && b.0 <= a.1))
    }

    /// The number of moments at which it is alive.
    fn life(&self) -> u64 {
        self.spans.iter().map(|s| (s.1 - s.0 + 1) as u64).sum()
    }
}

/// Offsets for buffers with lifetimes beside what has its offsets, and where the last of all ends: one buffer after
/// the other, each in the smallest gap that is free over its lifetime (best fit; greedy by size, Pisarchyk & Lee
/// 2020). Where that needs more than the bytes that live at once, other orders are tried, and the best is taken.
pub fn assign(placed: &[(LiveRange, u64)], needs: &[LiveRange]) -> (Vec<u64>, u64) {
    let least = most_alive(needs.iter().chain(placed.iter().map(|p| &p.0)));
    type Key<'a> = &'a dyn Fn(&LiveRange) -> (u64, u64);
    let orders: [Key; 4] = [&|n| (n.bytes, n.life()), &|n| (n.bytes.saturating_mul(n.life()), n.bytes), &|n| (n.life(), n.bytes), &|n| {
        (u64::MAX - n.first() as u64, n.bytes)
    }];
    let mut best: Option<(Vec<u64>, u64)> = None;
    for key in orders {
        let mut order: Vec<usize> = (0..needs.len()).collect();
        order.sort_by_key(|k| (std::cmp::Reverse(key(&needs[*k])), needs[*k].first(), *k));
        for _ in 0..ROUNDS {
            let found = place(placed, needs, &order);
            // The buffer with the greatest end comes first in the next round.
            let top = (0..needs.len()).max_by_key(|k| found.0[*k].saturating_add(needs[*k].bytes.next_multiple_of(ALIGN)));
            if best.as_ref().is_none_or(|b| found.1 < b.1) {
                best = Some(found);
            }
            if best.as_ref().is_some_and(|b| b.1 <= least.saturating_add(least / GOOD)) {
                return best.expect("invariant: just found");
            }
            let Some(at) = top.and_then(|t| order.iter().position(|k| *k == t)) else { break };
            order[..=at].rotate_right(1);
        }
    }
    best.expect("invariant: there is an order")
}

/// Placements that are tried per order, while they need more than a `GOOD`th beyond the bytes that live at once.
const ROUNDS: usize = 8;
const GOOD: u64 = 50;

/// Offsets of buffers that are placed in this order beside others, and where the last of all ends.
fn place(others: &[(LiveRange, u64)], needs: &[LiveRange], order: &[usize]) -> (Vec<u64>, u64) {
    let mut offsets = vec![0; needs.len()];
    let mut placed = Occupied::new(needs.iter().chain(others.iter().map(|o| &o.0)));
    let mut busy: Vec<(u64, u64)> = vec![];
    let mut total = 0;
    for (need, offset) in others {
        placed.insert(need, *offset);
        total = total.max(offset.saturating_add(need.bytes.next_multiple_of(ALIGN)));
    }
    for &k in order {
        let bytes = needs[k].bytes.next_multiple_of(ALIGN);
        busy.clear();
        placed.meet(&needs[k], &mut busy);
        busy.sort_unstable();
        let (mut end, mut gap): (u64, Option<(u64, u64)>) = (0, None);
        for &(from, to) in &busy {
            if ir::fault!("best_fit.gap.small", end <= from, end.saturating_add(bytes) <= from) && gap.is_none_or(|g| from - end < g.0) {
                gap = Some((from - end, end));
            }
            end = end.max(to);
        }
        offsets[k] = gap.map_or(end, |g| g.1);
        total = total.max(offsets[k].saturating_add(bytes));
        placed.insert(&needs[k], offsets[k]);
    }
    (offsets, total)
}

/// Disjoint ranges of bytes that do not touch: the end of each by its begin.
#[derive(Clone, Default)]
struct Runs(BTreeMap<u64, u64>);

impl Runs {
    fn insert(&mut self, mut from: u64, mut to: u64) {
        while let Some((&begin, &end)) = self.0.range(..=to).next_back().filter(|run| *run.1 >= from) {
            self.0.remove(&begin);
            (from, to) = (from.min(begin), to.max(end));
        }
        self.0.insert(from, to);
    }
}

/// The bytes that are occupied at each time: a segment tree over time (Bentley 1977). A buffer is at the few nodes
/// whose spans make up its lifetime. Buffers alive at the same time mostly lie side by side, so they form few ranges,
/// and neither placing nor finding a buffer looks at all others.
struct Occupied {
    /// The moments at which some buffer's lifetime begins, in order. A leaf is the time from one to the next.
    begins: Vec<usize>,
    /// Node n is the parent of 2n and 2n + 1. `own` has the bytes of buffers at the node itself, `below` those at it
    /// or below.
    own: Vec<Runs>,
    below: Vec<Runs>,
}

impl Occupied {
    fn new<'n>(needs: impl Iterator<Item = &'n LiveRange>) -> Occupied {
        let mut begins: Vec<usize> = needs.flat_map(|n| &n.spans).map(|s| s.0).collect();
        begins.sort_unstable();
        begins.dedup();
        let nodes = vec![Runs::default(); 2 * begins.len().next_power_of_two()];
        Occupied { begins, own: nodes.clone(), below: nodes }
    }

    /// The leaves that a span covers. Two overlapping spans share the leaf at which the later one begins.
    fn leaves(&self, (first, last): Span) -> Range<usize> {
        let at = |moment: usize| self.begins.partition_point(|b| *b <= moment);
        at(first) - 1..ir::fault!("best_fit.life.first", at(first), at(last))
    }

    fn insert(&mut self, need: &LiveRange, offset: u64) {
        let bytes = (offset, offset.saturating_add(need.bytes.next_multiple_of(ALIGN)));
        for span in &need.spans {
            self.put(1, 0..self.own.len() / 2, &self.leaves(*span), bytes);
        }
    }

    fn put(&mut self, node: usize, span: Range<usize>, life: &Range<usize>, bytes: (u64, u64)) {
        if span.end <= life.start || life.end <= span.start {
            return;
        }
        self.below[node].insert(bytes.0, bytes.1);
        if life.start <= span.start && span.end <= life.end {
            return self.own[node].insert(bytes.0, bytes.1);
        }
        let middle = span.start.midpoint(span.end);
        self.put(2 * node, span.start..middle, life, bytes);
        self.put(2 * node + 1, middle..span.end, life, bytes);
    }

    /// The ranges of bytes that are occupied at some time of this lifetime, in no order; they may overlap.
    fn meet(&self, need: &LiveRange, busy: &mut Vec<(u64, u64)>) {
        for span in &need.spans {
            self.find(1, 0..self.own.len() / 2, &self.leaves(*span), busy);
        }
    }

    fn find(&self, node: usize, span: Range<usize>, life: &Range<usize>, busy: &mut Vec<(u64, u64)>) {
        if span.end <= life.start || life.end <= span.start {
            return;
        }
        if life.start <= span.start && span.end <= life.end {
            return busy.extend(self.below[node].0.iter().map(|(from, to)| (*from, *to)));
        }
        busy.extend(self.own[node].0.iter().map(|(from, to)| (*from, *to)));
        let middle = span.start.midpoint(span.end);
        self.find(2 * node, span.start..middle, life, busy);
        self.find(2 * node + 1, middle..span.end, life, busy);
    }
}

/// The greatest sum of bytes that live at once: no plan needs less.
pub fn most_alive<'n>(needs: impl IntoIterator<Item = &'n LiveRange>) -> u64 {
    fullest(needs).0
}

/// The greatest sum of bytes that live at once, and the first moment when they do.
pub fn fullest<'n>(needs: impl IntoIterator<Item = &'n LiveRange>) -> (u64, usize) {
    let mut changes: Vec<(usize, i128)> = vec![];
    for n in needs {
        let bytes = i128::from(n.bytes.next_multiple_of(ALIGN));
        for (first, last) in &n.spans {
            changes.extend([(*first, bytes), (last + 1, -bytes)]);
        }
    }
    // At the same moment, the ends of buffers count before the begins.
    changes.sort_unstable();
    let (mut now, mut most, mut at) = (0, 0, 0);
    for (moment, change) in changes {
        now += change;
        if now > most {
            (most, at) = (now, moment);
        }
    }
    (u64::try_from(most).unwrap_or(u64::MAX), at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_memory_only_when_their_lifetimes_do_not_meet() {
        let needs = [LiveRange::new(100, 0, 2), LiveRange::new(64, 2, 3), LiveRange::new(128, 3, 5)];
        let (at, total) = assign(&[], &needs);
        for (i, a) in needs.iter().enumerate() {
            for (j, b) in needs.iter().enumerate().skip(i + 1) {
                let time = a.meets(b);
                let space = at[i] < at[j] + b.bytes && at[j] < at[i] + a.bytes;
                assert!(!(time && space), "{i} and {j}");
            }
        }
        assert_eq!(total, 192);
    }

    #[test]
    fn what_is_placed_stays_and_others_lie_where_it_is_not_alive() {
        let placed = [(LiveRange::new(64, 0, 3), 128), (LiveRange::new(64, 4, 9), 0)];
        // The buffers are alive when neither placed one is, when the first is, and when either is.
        let needs =
            [LiveRange { bytes: 256, spans: vec![(10, 12)] }, LiveRange::new(128, 0, 3), LiveRange { bytes: 64, spans: vec![(1, 1), (4, 4)] }];
        assert_eq!(assign(&placed, &needs), (vec![0, 0, 192], 256));
    }

    /// The offset of each buffer by comparison with all others alive at some time with it: the lowest of the smallest
    /// gaps that it fits into.
    fn by_all(needs: &[LiveRange], order: &[usize]) -> Vec<u64> {
        let mut offsets = vec![0; needs.len()];
        for (done, &k) in order.iter().enumerate() {
            let meets = |j: &&usize| needs[k].meets(&needs[**j]);
            let mut busy: Vec<(u64, u64)> = order[..done].iter().filter(meets).map(|j| (offsets[*j], offsets[*j] + needs[*j].bytes)).collect();
            busy.sort_unstable();
            let (mut end, mut gaps) = (0, vec![]);
            for (from, to) in busy {
                gaps.extend((end + needs[k].bytes <= from).then(|| (from - end, end)));
                end = end.max(to);
            }
            offsets[k] = gaps.into_iter().min().map_or(end, |g| g.1);
        }
        offsets
    }

    #[test]
    fn buffers_lie_where_a_look_at_all_others_would_put_them() {
        let mut dice = 1;
        let mut below = |n: u64| {
            dice = ir::random::mix(dice);
            (dice >> 11) % n
        };
        for _ in 0..200 {
            let mut need = || {
                let (first, gap) = (below(40) as usize, 1 + below(9) as usize);
                let last = first + below(20) as usize;
                let spans = [(first, last), (last + gap, last + gap + below(5) as usize)];
                LiveRange { bytes: ALIGN * (1 + below(5)), spans: spans[..1 + below(2) as usize].to_vec() }
            };
            let needs: Vec<LiveRange> = (0..60).map(|_| need()).collect();
            let order: Vec<usize> = (0..needs.len()).rev().collect();
            assert_eq!(place(&[], &needs, &order).0, by_all(&needs, &order), "{needs:?}");
        }
    }

    #[test]
    fn more_than_can_be_counted_is_the_most_that_can() {
        let needs = [const { u64::MAX / 64 * 64 - 64 }; 3].map(|bytes| LiveRange::new(bytes, 0, 1));
        assert_eq!(assign(&[], &needs).1, u64::MAX);
        assert_eq!(most_alive(&needs), u64::MAX);
    }
}
