//! Sets of elements of a buffer: what a strided operand reaches, and what was written so far.

/// Elements `from ..to` of a buffer.
pub type Run = (u64, u64);

/// The elements that a strided operand reaches, relative to its first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Consecutive elements innermost.
    run: u64,
    /// `(size, stride)` of the dims around the run, by stride.
    outer: Vec<(u64, u64)>,
    reach: u64,
    injective: bool,
}

impl Shape {
    /// From the size and stride of each dim. Saturates instead of overflowing.
    pub fn new(dims: impl IntoIterator<Item = (u64, u64)>) -> Shape {
        let mut dims: Vec<(u64, u64)> = dims.into_iter().filter(|d| d.0 != 1).collect();
        if dims.iter().any(|d| d.0 == 0) {
            return Shape::dense(0);
        }
        let mut shape = Shape { run: 1, outer: vec![], reach: 1, injective: dims.iter().all(|d| d.1 != 0) };
        dims.retain(|d| d.1 != 0);
        dims.sort_unstable_by_key(|d| d.1);
        for (size, stride) in dims {
            shape.injective &= stride >= shape.reach;
            shape.reach = shape.reach.saturating_add((size - 1).saturating_mul(stride));
            if shape.outer.is_empty() && stride == shape.run {
                shape.run = shape.run.saturating_mul(size);
            } else {
                shape.outer.push((size, stride));
            }
        }
        shape
    }

    /// `count` elements one after the other.
    pub fn dense(count: u64) -> Shape {
        Shape { run: count, outer: vec![], reach: count, injective: true }
    }

    /// Elements from the first to the last, both included.
    pub fn reach(&self) -> u64 {
        self.reach
    }

    /// Whether no element is reached twice.
    pub fn is_injective(&self) -> bool {
        self.injective
    }

    /// How many runs there may be, at most.
    pub fn pieces(&self) -> u64 {
        self.outer.iter().fold(1, |n, d| n.saturating_mul(d.0))
    }

    /// The elements, with the first at `start`: ascending, disjoint, not adjacent. Meant for injective shapes.
    pub fn runs(&self, start: u64) -> Vec<Run> {
        let mut out: Vec<Run> = vec![];
        if self.run == 0 {
            return out;
        }
        let mut at = vec![0u64; self.outer.len()];
        loop {
            let from = start + at.iter().zip(&self.outer).map(|(i, d)| i * d.1).sum::<u64>();
            match out.last_mut() {
                Some(last) if last.1 == from => last.1 += self.run,
                _ => out.push((from, from + self.run)),
            }
            let Some(k) = (0..at.len()).find(|k| at[*k] + 1 < self.outer[*k].0) else { return out };
            at[k] += 1;
            at[..k].fill(0);
        }
    }
}

/// A set of elements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cover {
    /// Ascending, disjoint, not adjacent.
    runs: Vec<Run>,
}

impl Cover {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether it holds all of `run`.
    pub fn contains(&self, run: Run) -> bool {
        let k = self.runs.partition_point(|r| r.1 < run.1);
        run.0 >= run.1 || self.runs.get(k).is_some_and(|r| r.0 <= run.0 && run.1 <= r.1)
    }

    /// Whether it holds any of `run`.
    pub fn meets(&self, run: Run) -> bool {
        let k = self.runs.partition_point(|r| r.1 <= run.0);
        run.0 < run.1 && self.runs.get(k).is_some_and(|r| r.0 < run.1)
    }

    /// Adds runs in ascending order; false if one of them was (partly) there before.
    pub fn insert(&mut self, new: &[Run]) -> bool {
        let mut merged: Vec<Run> = Vec::with_capacity(self.runs.len() + new.len());
        let (mut i, mut j) = (0, 0);
        while i < self.runs.len() || j < new.len() {
            let old = j == new.len() || i < self.runs.len() && self.runs[i].0 <= new[j].0;
            let next = if old { self.runs[i] } else { new[j] };
            if old {
                i += 1
            } else {
                j += 1
            }
            match merged.last_mut() {
                Some(last) if next.0 < last.1 => return false,
                Some(last) if next.0 == last.1 => last.1 = next.1,
                _ => merged.push(next),
            }
        }
        self.runs = merged;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_dims_are_one_run_in_any_order() {
        let shape = Shape::new([(4, 1), (1, 99), (3, 4)]);
        assert_eq!((shape.runs(5), shape.reach(), shape.is_injective()), (vec![(5, 17)], 12, true));
    }

    #[test]
    fn strided_dims_are_runs_apart() {
        let shape = Shape::new([(3, 10), (2, 1)]);
        assert_eq!((shape.runs(1), shape.reach()), (vec![(1, 3), (11, 13), (21, 23)], 22));
    }

    #[test]
    fn a_broadcast_reaches_its_elements_more_than_once() {
        assert!(!Shape::new([(3, 0), (2, 1)]).is_injective());
        assert!(!Shape::new([(3, 1), (2, 2)]).is_injective());
        assert_eq!(Shape::new([(3, 1), (0, 2)]).reach(), 0);
    }

    #[test]
    fn a_set_grows_run_by_run_and_notices_what_it_has() {
        let mut cover = Cover::default();
        assert!(cover.insert(&[(0, 2), (4, 6)]));
        assert!(cover.insert(&[(2, 3)]));
        assert!(cover.contains((0, 3)) && !cover.contains((0, 4)) && cover.contains((9, 9)));
        assert!(cover.meets((3, 5)) && !cover.meets((3, 4)) && !cover.meets((6, 9)));
        assert!(!cover.insert(&[(5, 7)]));
        assert!(cover.insert(&[(3, 4)]) && cover.contains((0, 6)));
    }
}
