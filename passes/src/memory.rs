//! Assigns arena offsets. Buffers whose lifetimes overlap never overlap in memory; offsets are 64-byte aligned.

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGN: u64 = 64;

/// A buffer's need: bytes, and the commands from its first write to its last use, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub bytes: u64,
    pub first: usize,
    pub last: usize,
}

/// Offsets for buffers with lifetimes, and the arena's size: one buffer after the other, each in the smallest gap that is free over its
/// lifetime (best fit; greedy by size, Pisarchyk & Lee 2020). Where that needs more than the bytes that live at once, other orders are tried, and the best is taken.
pub fn assign(needs: &[Need]) -> (Vec<u64>, u64) {
    let least = most_alive(needs);
    let life = |n: &Need| (n.last - n.first + 1) as u64;
    type Key<'a> = &'a dyn Fn(&Need) -> (u64, u64);
    let orders: [Key; 4] =
        [&|n| (n.bytes, life(n)), &|n| (n.bytes * life(n), n.bytes), &|n| (life(n), n.bytes), &|n| (u64::MAX - n.first as u64, n.bytes)];
    let mut best: Option<(Vec<u64>, u64)> = None;
    for key in orders {
        let mut order: Vec<usize> = (0..needs.len()).collect();
        order.sort_by_key(|k| (std::cmp::Reverse(key(&needs[*k])), needs[*k].first, *k));
        for _ in 0..ROUNDS {
            let found = place(needs, &order);
            // The buffer that sticks out comes first in the next round.
            let top = (0..needs.len()).max_by_key(|k| found.0[*k] + needs[*k].bytes.next_multiple_of(ALIGN));
            if best.as_ref().is_none_or(|b| found.1 < b.1) {
                best = Some(found);
            }
            if best.as_ref().is_some_and(|b| b.1 <= least + least / GOOD) {
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

/// Offsets of buffers that are placed in this order, and the arena's size.
fn place(needs: &[Need], order: &[usize]) -> (Vec<u64>, u64) {
    let mut offsets = vec![0; needs.len()];
    let mut placed = Lives::new(needs);
    let mut busy: Vec<(u64, u64)> = vec![];
    let mut total = 0;
    for &k in order {
        let bytes = needs[k].bytes.next_multiple_of(ALIGN);
        busy.clear();
        placed.meet(&needs[k], &mut |j| busy.push((offsets[j], offsets[j] + needs[j].bytes.next_multiple_of(ALIGN))));
        busy.sort_unstable();
        let (mut end, mut gap): (u64, Option<(u64, u64)>) = (0, None);
        for &(from, to) in &busy {
            if end + bytes <= from && gap.is_none_or(|g| from - end < g.0) {
                gap = Some((from - end, end));
            }
            end = end.max(to);
        }
        offsets[k] = gap.map_or(end, |g| g.1);
        total = total.max(offsets[k] + bytes);
        placed.insert(k);
    }
    (offsets, total)
}

/// A set of buffers that finds those which live at some time without a look at all others: a tree over all buffers in the order of their first
/// writes, whose nodes know the last use of what is in the set below them.
struct Lives<'a> {
    needs: &'a [Need],
    by_first: Vec<usize>,
    /// Where each buffer is in this order.
    at: Vec<usize>,
    /// Node n is above 2n and 2n + 1, the last ones are of one buffer each. One more than the last use; 0 if nothing is in the set.
    until: Vec<usize>,
}

impl<'a> Lives<'a> {
    fn new(needs: &'a [Need]) -> Lives<'a> {
        let mut by_first: Vec<usize> = (0..needs.len()).collect();
        by_first.sort_by_key(|k| needs[*k].first);
        let mut at = vec![0; needs.len()];
        by_first.iter().enumerate().for_each(|(place, k)| at[*k] = place);
        Lives { needs, by_first, at, until: vec![0; 2 * needs.len().next_power_of_two()] }
    }

    fn insert(&mut self, k: usize) {
        let mut node = self.until.len() / 2 + self.at[k];
        while node > 0 {
            self.until[node] = self.until[node].max(self.needs[k].last + 1);
            node /= 2;
        }
    }

    /// Calls `found` with each buffer in the set whose lifetime meets this one's.
    fn meet(&self, need: &Need, found: &mut dyn FnMut(usize)) {
        let begun = self.by_first.partition_point(|k| self.needs[*k].first <= need.last);
        self.below(1, 0, self.until.len() / 2, begun, need.first, found);
    }

    /// Of a node above `count` buffers from `start` on, those in the set, among the first `begun`, that are used at or after `first`.
    fn below(&self, node: usize, start: usize, count: usize, begun: usize, first: usize, found: &mut dyn FnMut(usize)) {
        if start >= begun || self.until[node] <= first {
            return;
        }
        if count == 1 {
            return found(self.by_first[start]);
        }
        self.below(2 * node, start, count / 2, begun, first, found);
        self.below(2 * node + 1, start + count / 2, count / 2, begun, first, found);
    }
}

/// The greatest sum of bytes that live at once: no plan needs less.
pub fn most_alive(needs: &[Need]) -> u64 {
    let mut changes: Vec<(usize, i64)> = vec![];
    for n in needs {
        let bytes = n.bytes.next_multiple_of(ALIGN) as i64;
        changes.extend([(n.first, bytes), (n.last + 1, -bytes)]);
    }
    // What ends before a command is gone when another begins there.
    changes.sort_unstable();
    changes
        .iter()
        .scan(0i64, |now, (_, change)| {
            Some({
                *now += change;
                *now
            })
        })
        .max()
        .unwrap_or(0)
        .max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_memory_only_when_their_lifetimes_do_not_meet() {
        let needs = [Need { bytes: 100, first: 0, last: 2 }, Need { bytes: 64, first: 2, last: 3 }, Need { bytes: 128, first: 3, last: 5 }];
        let (at, total) = assign(&needs);
        for (i, a) in needs.iter().enumerate() {
            for (j, b) in needs.iter().enumerate().skip(i + 1) {
                let time = a.first <= b.last && b.first <= a.last;
                let space = at[i] < at[j] + b.bytes && at[j] < at[i] + a.bytes;
                assert!(!(time && space), "{i} and {j}");
            }
        }
        assert_eq!(total, 192);
    }
}
