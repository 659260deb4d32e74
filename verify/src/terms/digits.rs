//! Indices as mixed-radix numbers: how views, slices, strides and parts of ranks are the same thing.

use ir::mesh::SubAxis;
use smallvec::SmallVec;

/// An index read as a mixed-radix number, outermost digit first: a digit `(extent, stride)` counts `extent` steps of
/// `stride`. Canonical: no digit of extent 1, no two neighbours that are one. So equal functions of the index are
/// equal digits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digits(SmallVec<[(u64, u64); 1]>);

impl Digits {
    pub fn new(digits: impl IntoIterator<Item = (u64, u64)>) -> Digits {
        let mut out = SmallVec::<[(u64, u64); 1]>::new();
        for (n, s) in digits.into_iter().filter(|d| d.0 != 1) {
            match out.last_mut() {
                Some(last) if last.1 == n.saturating_mul(s) => *last = (last.0.saturating_mul(n), s),
                _ => out.push((n, s)),
            }
        }
        Digits(out)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    /// The number of indices.
    pub fn extent(&self) -> u64 {
        self.0.iter().map(|d| d.0).product()
    }

    /// The only digit, if there is no other.
    fn single(&self) -> Option<(u64, u64)> {
        match self.0.as_slice() {
            [] => Some((1, 0)),
            [one] => Some(*one),
            _ => None,
        }
    }

    /// Cuts off the innermost digits that count `extent`: `(outer, inner)`. `None` if the cut is within a digit that
    /// it does not divide.
    fn split(&self, extent: u64) -> Option<(Digits, Digits)> {
        let (mut outer, mut inner) = (self.0.clone(), vec![]);
        let mut left = extent;
        while left != 1 {
            let (n, s) = outer.pop()?;
            if left.is_multiple_of(n) {
                inner.push((n, s));
                left /= n;
            } else if n % left == 0 {
                inner.push((left, s));
                outer.push((n / left, left * s));
                left = 1;
            } else {
                return None;
            }
        }
        Some((Digits(outer), Digits::new(inner.into_iter().rev())))
    }

    /// Splits two functions of one index at the same digits, outermost first: extents, and the strides of both.
    /// `None` where a digit of one ends within one of the other that it does not divide, or where indices differ.
    pub fn beside(&self, other: &Digits) -> Option<Vec<(u64, [u64; 2])>> {
        let (mut a, mut b, mut out) = (self.0.clone(), other.0.clone(), vec![]);
        while let (Some((n, s)), Some((m, t))) = (a.pop(), b.pop()) {
            let both = n.min(m);
            for (list, n, s) in [(&mut a, n, s), (&mut b, m, t)] {
                match (n % both, n / both) {
                    (0, 1) => {}
                    (0, rest) => list.push((rest, both * s)),
                    _ => return None,
                }
            }
            out.push((both, [s, t]));
        }
        out.reverse();
        (self.extent() == other.extent()).then_some(out)
    }

    /// The sum of two functions of one index. None as for [`Digits::beside`].
    pub fn plus(&self, other: &Digits) -> Option<Digits> {
        Some(Digits::new(self.beside(other)?.into_iter().map(|(n, [s, t])| (n, s + t))))
    }

    /// The same indices in row-major order, as dims of these extents.
    pub fn reshaped(&self, extents: &[u64]) -> Option<Vec<Digits>> {
        let mut rest = self.clone();
        let mut out = vec![];
        for n in extents.iter().rev() {
            let (outer, inner) = rest.split(*n)?;
            out.push(inner);
            rest = outer;
        }
        out.reverse();
        (rest.extent() == 1).then_some(out)
    }
}

/// Adds up what several readers add to one index, and shows that none of its digits overflows into the next.
pub struct Walk<'a> {
    digits: &'a Digits,
    used: Vec<u64>,
}

impl<'a> Walk<'a> {
    pub fn new(digits: &'a Digits) -> Walk<'a> {
        Walk { digits, used: vec![0; digits.0.len()] }
    }

    /// The digits of index `i * stride`, i below `extent`.
    pub fn step(&mut self, extent: u64, stride: u64) -> Option<Digits> {
        if extent <= 1 || stride == 0 {
            return Some(Digits::new([(extent, 0)]));
        }
        let (mut m, mut q, mut out) = (extent, stride, vec![]);
        for k in (0..self.digits.0.len()).rev() {
            let (n, s) = self.digits.0[k];
            if k > 0 && q >= n {
                if q % n != 0 {
                    return None;
                }
                q /= n;
                continue;
            }
            let reach = (m - 1).checked_mul(q)?;
            if k == 0 || reach < n {
                out.push((m, q.checked_mul(s)?));
                self.used[k] += reach;
                return Some(Digits::new(out.into_iter().rev()));
            }
            let c = n / q;
            if n % q != 0 || m % c != 0 {
                return None;
            }
            out.push((c, q * s));
            self.used[k] += (c - 1) * q;
            (m, q) = (m / c, 1);
        }
        None
    }

    /// The offset of index `start`, or `None` if digits overflow when all steps are added to it.
    pub fn finish(self, start: u64) -> Option<u64> {
        let (mut rest, mut sum) = (start, 0u64);
        for (k, ((n, s), used)) in self.digits.0.iter().zip(&self.used).enumerate().rev() {
            let digit = if k == 0 { rest } else { rest % n };
            if digit + used >= *n {
                return None;
            }
            sum += digit * s;
            rest /= n;
        }
        (rest == 0 || !self.digits.0.is_empty()).then_some(sum)
    }
}

/// A linear form over coordinates, whose terms may be mixed-radix numbers of a coordinate.
pub type LinearForm = Vec<(SubAxis, Digits)>;

/// The sum of two forms, if that is one.
pub fn add(a: &LinearForm, b: &LinearForm) -> Option<LinearForm> {
    let mut out = a.clone();
    for (u, digits) in b.iter().filter(|f| f.1 != Digits::default()) {
        match out.iter_mut().find(|f| f.0 == *u) {
            None => out.push((*u, digits.clone())),
            Some((_, old)) => {
                let ((n, s), (m, t)) = (old.single()?, digits.single()?);
                if n != m {
                    return None;
                }
                *old = Digits::new([(n, s + t)]);
            }
        }
    }
    out.retain(|f| f.1.iter().any(|d| d.1 != 0));
    out.sort_unstable_by_key(|f| f.0);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::{Digits, Walk};

    #[test]
    fn neighbours_that_are_one_merge() {
        assert_eq!(Digits::new([(2, 12), (1, 7), (3, 4), (4, 1)]), Digits::new([(24, 1)]));
        assert_ne!(Digits::new([(2, 1), (3, 2)]), Digits::new([(6, 1)]));
    }

    #[test]
    fn functions_of_an_index_add_up() {
        let rows = Digits::new([(3, 3), (3, 0)]);
        assert_eq!(rows.plus(&Digits::new([(3, 0), (3, 1)])), Some(Digits::new([(9, 1)])));
        assert_eq!(Digits::new([(2, 5), (6, 0)]).plus(&Digits::new([(4, 1), (3, 7)])), Some(Digits::new([(2, 7), (2, 1), (3, 7)])));
        assert_eq!(rows.plus(&Digits::new([(9, 2)])), Some(Digits::new([(3, 9), (3, 2)])));
        assert_eq!(Digits::new([(2, 5), (3, 0)]).plus(&Digits::new([(3, 1), (2, 7)])), None);
        assert_eq!(rows.plus(&Digits::new([(3, 1)])), None);
    }

    #[test]
    fn a_row_major_index_is_cut_into_dims() {
        let dims = Digits::new([(4, 100), (6, 1)]).reshaped(&[2, 2, 6]);
        assert_eq!(dims, Some(vec![Digits::new([(2, 200)]), Digits::new([(2, 100)]), Digits::new([(6, 1)])]));
        assert_eq!(Digits::new([(2, 100), (3, 1)]).reshaped(&[3, 2]), None);
    }

    /// Compares steps through digits with a walk over every index.
    #[test]
    fn steps_through_digits_are_those_of_every_index() {
        let digits = Digits::new([(3, 100), (4, 10), (2, 1)]);
        let value = |i: u64| i / 8 * 100 + i / 2 % 4 * 10 + i % 2;
        let mut found = 0;
        for extent in 1..=24 {
            for stride in 1..=24 {
                for start in 0..24 {
                    if start + (extent - 1) * stride >= 24 {
                        continue;
                    }
                    let mut walk = Walk::new(&digits);
                    let Some(step) = walk.step(extent, stride) else { continue };
                    let Some(at) = walk.finish(start) else { continue };
                    found += 1;
                    for i in 0..extent {
                        let (mut rest, mut sum) = (i, at);
                        for (n, s) in step.iter().rev() {
                            sum += rest % n * s;
                            rest /= n;
                        }
                        assert_eq!(sum, value(start + i * stride), "{extent} x {stride} from {start}");
                    }
                }
            }
        }
        assert!(found > 60, "only {found} can be said in digits");
    }
}
