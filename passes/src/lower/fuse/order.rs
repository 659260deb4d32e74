//! Which groups read which, and an order of them that is kept as groups grow.
//!
//! Every group has a place, and reads groups of lower places only. So a search for what lies between groups stays between their places, however
//! large the graph. Where a group grows and comes to read one of a higher place, only groups between the two change places
//! (Pearce & Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2006).

use std::collections::{BTreeSet, BinaryHeap};

#[derive(Default)]
pub(super) struct GroupOrder {
    /// For each group, those whose values it reads, as they are or through views.
    direct: Vec<BTreeSet<usize>>,
    /// For each group, those that read its values.
    readers: Vec<BTreeSet<usize>>,
    place: Vec<usize>,
}

impl GroupOrder {
    /// A new group that reads these.
    pub fn push(&mut self, direct: BTreeSet<usize>) {
        let own = self.place.len();
        for g in &direct {
            self.readers[*g].insert(own);
        }
        self.direct.push(direct);
        self.readers.push(BTreeSet::new());
        self.place.push(own);
    }

    pub fn direct(&self, group: usize) -> &BTreeSet<usize> {
        &self.direct[group]
    }

    pub fn readers(&self, group: usize) -> &BTreeSet<usize> {
        &self.readers[group]
    }

    /// Whether something that `merged` or one more node, which reads `direct`, would read from outside reads one of `merged` itself.
    pub fn is_between(&self, merged: &[usize], direct: &BTreeSet<usize>) -> bool {
        let all: BTreeSet<usize> = merged.iter().copied().collect();
        let Some(first) = merged.iter().map(|g| self.place[*g]).min() else { return false };
        let read = direct.iter().chain(merged.iter().flat_map(|g| &self.direct[*g])).filter(|g| !all.contains(g));
        // Groups of high places come first, so that repeated entries of a group are adjacent.
        let mut open: BinaryHeap<(usize, usize)> = read.map(|g| (self.place[*g], *g)).filter(|g| g.0 > first).collect();
        let mut last = None;
        while let Some(next) = open.pop() {
            if last.replace(next) == Some(next) {
                continue;
            }
            for g in &self.direct[next.1] {
                if all.contains(g) {
                    return true;
                }
                if self.place[*g] > first {
                    open.push((self.place[*g], *g));
                }
            }
        }
        false
    }

    /// Makes groups one, the first of them, which also reads `direct` from now on. Nothing [is between](Self::is_between).
    pub fn merge(&mut self, merged: &[usize], direct: BTreeSet<usize>) {
        let into = merged[0];
        let mut reads = direct;
        for g in &merged[1..] {
            for d in std::mem::take(&mut self.direct[*g]) {
                self.readers[d].remove(g);
                reads.insert(d);
            }
            for r in std::mem::take(&mut self.readers[*g]) {
                self.direct[r].remove(g);
                self.direct[r].insert(into);
                self.readers[into].insert(r);
            }
        }
        for g in merged {
            reads.remove(g);
            self.direct[into].remove(g);
            self.readers[into].remove(g);
        }
        for d in reads {
            self.readers[d].insert(into);
            self.direct[into].insert(d);
        }
        self.restore(merged);
    }

    /// Gives new places to the first of these groups, which now stands for all, and to groups on the wrong side of it
    /// that it reads or that read it.
    fn restore(&mut self, merged: &[usize]) {
        let into = merged[0];
        let places = || merged.iter().map(|g| self.place[*g]);
        let (Some(first), Some(last)) = (places().min(), places().max()) else { return };
        let last = self.direct[into].iter().map(|d| self.place[*d]).fold(last, usize::max);
        let before = self.reached(into, &self.direct, |place| place > first);
        let after = self.reached(into, &self.readers, |place| place < last);
        let mut free: Vec<usize> = before.iter().chain(&after).map(|g| g.0).chain(places()).collect();
        free.sort_unstable();
        let of_after = free.split_off(free.len() - after.len());
        before.iter().map(|g| g.1).chain([into]).zip(free).for_each(|(g, place)| self.place[g] = place);
        after.iter().map(|g| g.1).zip(of_after).for_each(|(g, place)| self.place[g] = place);
    }

    /// Places and groups, in order, that edges lead to from a group, as long as places are `within`.
    fn reached(&self, from: usize, edges: &[BTreeSet<usize>], within: impl Fn(usize) -> bool) -> BTreeSet<(usize, usize)> {
        let mut out = BTreeSet::new();
        let mut open = vec![from];
        while let Some(g) = open.pop() {
            open.extend(edges[g].iter().copied().filter(|d| within(self.place[*d]) && out.insert((self.place[*d], *d))));
        }
        out
    }

    /// These groups and those that they read, each after those it reads; otherwise by number.
    pub fn list(&self, groups: &[usize]) -> Vec<usize> {
        let mut out = vec![];
        let mut done = vec![false; self.direct.len()];
        for g in groups {
            self.visit(*g, &mut done, &mut out);
        }
        out
    }

    fn visit(&self, group: usize, done: &mut [bool], out: &mut Vec<usize>) {
        if std::mem::replace(&mut done[group], true) {
            return;
        }
        // Groups that are done already precede this one, with all that they read.
        let mut read = BTreeSet::new();
        let mut open = vec![group];
        while let Some(g) = open.pop() {
            open.extend(self.direct[g].iter().copied().filter(|d| !done[*d] && read.insert(*d)));
        }
        for g in read {
            self.visit(g, done, out);
        }
        out.push(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::random::mix;

    /// A group is between others exactly if there is a path, and places follow what groups read after any merges.
    #[test]
    fn places_follow_what_groups_read() {
        for seed in 0..200 {
            let mut dice = seed;
            let mut below = |n: usize| {
                dice = mix(dice);
                (dice >> 11) as usize % n.max(1)
            };
            let mut order = GroupOrder::default();
            let mut live: Vec<usize> = vec![];
            let (mut merges, mut refused) = (0, 0);
            for _ in 0..60 {
                let pick = |below: &mut dyn FnMut(usize) -> usize, n: usize| -> BTreeSet<usize> {
                    if live.is_empty() { BTreeSet::new() } else { (0..below(n)).map(|_| live[below(live.len())]).collect() }
                };
                let direct = pick(&mut below, 4);
                let mut merged: Vec<usize> = pick(&mut below, 3).into_iter().collect();
                merged.reverse();
                let reads = |from: usize| order.reached(from, &order.direct, |_| true);
                let from = direct.iter().chain(merged.iter().flat_map(|g| &order.direct[*g])).filter(|g| !merged.contains(g));
                let between = from.clone().any(|g| reads(*g).iter().any(|r| merged.contains(&r.1)));
                assert_eq!(order.is_between(&merged, &direct), between, "seed {seed}");
                if merged.is_empty() || between {
                    refused += usize::from(between);
                    live.push(order.place.len());
                    order.push(direct);
                } else {
                    merges += 1;
                    order.merge(&merged, direct);
                    live.retain(|g| *g == merged[0] || !merged.contains(g));
                }
                for g in &live {
                    assert!(order.direct[*g].iter().all(|d| order.place[*d] < order.place[*g] && live.contains(d)), "seed {seed}");
                    assert!(order.direct[*g].iter().all(|d| order.readers[*d].contains(g)), "seed {seed}");
                }
            }
            assert!(merges > 0 && refused > 0, "seed {seed}");
            let list = order.list(&live);
            assert!(list.iter().enumerate().all(|(k, g)| order.direct[*g].iter().all(|d| list[..k].contains(d))), "seed {seed}");
        }
    }
}
