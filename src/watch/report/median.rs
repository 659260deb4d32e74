//! The number in the middle, of as many as there may be.

/// Numbers that are kept.
const MOST: usize = 1 << 16;

/// Exact up to 65,536 numbers; of more, the median of every second, fourth, .. one.
#[derive(Clone, Debug)]
pub struct Median {
    kept: Vec<f64>,
    every: u64,
    seen: u64,
}

impl Default for Median {
    fn default() -> Median {
        Median { kept: vec![], every: 1, seen: 0 }
    }
}

impl Median {
    pub fn push(&mut self, number: f64) {
        if self.seen.is_multiple_of(self.every) {
            if self.kept.len() == MOST {
                let mut at = 0;
                self.kept.retain(|_| {
                    at += 1;
                    at % 2 == 1
                });
                self.every *= 2;
            }
            self.kept.push(number);
        }
        self.seen += 1;
    }

    /// The median; for an even number of values, the later of the two in the middle.
    pub fn get(&self) -> Option<f64> {
        let mut sorted = self.kept.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_few_it_is_exact_and_of_many_it_is_near() {
        let of = |n: u32| {
            let mut median = Median::default();
            (0..n).for_each(|x| median.push(f64::from(x)));
            assert!(median.kept.len() <= MOST);
            median.get()
        };
        assert_eq!((of(0), of(1), of(5), of(65_536)), (None, Some(0.0), Some(2.0), Some(32_768.0)));
        assert!((of(1_000_000).unwrap() - 500_000.0).abs() < 100.0);
    }
}
