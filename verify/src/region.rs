//! What a strided operand reaches of a buffer.

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
            match shape.outer.last_mut() {
                None if stride == shape.run => shape.run = shape.run.saturating_mul(size),
                Some(inner) if inner.0.saturating_mul(inner.1) == stride => inner.0 = inner.0.saturating_mul(size),
                _ => shape.outer.push((size, stride)),
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

    /// Consecutive elements innermost.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// `(size, stride)` of the dims around a run, by stride.
    pub fn outer(&self) -> &[(u64, u64)] {
        &self.outer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_dims_are_one_run_in_any_order() {
        let shape = Shape::new([(4, 1), (1, 99), (3, 4)]);
        assert_eq!((shape.run(), shape.outer(), shape.reach(), shape.is_injective()), (12, &[][..], 12, true));
    }

    #[test]
    fn strided_dims_are_runs_apart() {
        let shape = Shape::new([(3, 10), (2, 1)]);
        assert_eq!((shape.run(), shape.outer(), shape.reach()), (2, &[(3, 10)][..], 22));
    }

    #[test]
    fn dims_that_continue_each_other_are_one() {
        assert_eq!(Shape::new([(5, 6), (3, 2), (4, 40)]).outer(), [(15, 2), (4, 40)]);
    }

    #[test]
    fn a_broadcast_reaches_its_elements_more_than_once() {
        assert!(!Shape::new([(3, 0), (2, 1)]).is_injective());
        assert!(!Shape::new([(3, 1), (2, 2)]).is_injective());
        assert_eq!(Shape::new([(3, 1), (0, 2)]).reach(), 0);
    }
}
