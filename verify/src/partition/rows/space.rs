//! Indices of rows and their tables, by what they count.

use crate::terms::digits::Digits;
use ir::dim::Dim;
use ir::mesh::SubAxis;

/// The thing that an index counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Count {
    /// Elements of the dense value, row-major, at tokens and experts zero, from its first other dim on: what is in a
    /// row.
    Rest,
    /// Homes along the sub-axis of this number.
    Home(usize),
    Expert,
    /// Tokens of a home.
    Token,
    /// Choices of a token.
    Choice,
    /// Slots of a home and a group.
    Slot,
}

/// An index by what it counts, outermost first: `(what, how many, of how many each)`. Canonical, as digits are.
pub type Steps = Vec<(Count, u64, u64)>;

/// Steps through all of `n`, one by one.
pub fn all(what: Count, n: u64) -> Steps {
    some(what, n, 1)
}

/// `n` steps of `step`.
pub fn some(what: Count, n: u64, step: u64) -> Steps {
    if n == 1 { vec![] } else { vec![(what, n, step)] }
}

/// The dims of a tensor, row-major: `(what, how many, of how many each)`.
pub struct Space(pub Vec<(Count, u64, u64)>);

impl Space {
    /// The number of elements.
    pub fn size(&self) -> u64 {
        self.0.iter().map(|f| f.1).product()
    }

    /// The steps that digits of the row-major index count. `None` if they cut a dim where it has no border, or stand
    /// still.
    pub fn read(&self, digits: &Digits) -> Option<Steps> {
        let extents: Vec<u64> = self.0.iter().map(|f| f.1).collect();
        let mut out: Steps = vec![];
        for (n, s) in digits.iter() {
            for (k, n, s) in decompose(&extents, n, s)? {
                let (what, _, unit) = self.0[k];
                out.push((what, n, s * unit));
            }
        }
        Some(out)
    }

    /// The digits of the row-major index that count this.
    pub fn write(&self, steps: &Steps) -> Option<Digits> {
        let mut digits = vec![];
        for (what, n, s) in steps {
            let k = self.0.iter().position(|f| f.0 == *what)?;
            let unit = self.0[k].2;
            if s % unit != 0 {
                return None;
            }
            digits.push((*n, s / unit * self.0[k + 1..].iter().map(|f| f.1).product::<u64>()));
        }
        Some(Digits::new(digits))
    }
}

/// Splits `n` steps of `s` through a row-major index with these extents into steps through single dims, outermost
/// first: `(dim, steps, of how many each)`.
pub fn decompose(extents: &[u64], mut n: u64, mut s: u64) -> Option<Vec<(usize, u64, u64)>> {
    let (mut below, mut out) = (1, vec![]);
    for (k, extent) in extents.iter().enumerate().rev() {
        let whole = u64::saturating_mul(below, *extent);
        if n > 1 && s > 0 && s < whole {
            let step = s / below;
            let room = extent / step;
            if !s.is_multiple_of(below) || !extent.is_multiple_of(step) {
                return None;
            }
            let m = n.min(room);
            if !n.is_multiple_of(m) {
                return None;
            }
            out.push((k, m, step));
            (n, s) = (n / m, whole);
        }
        below = whole;
    }
    out.reverse();
    (n == 1).then_some(out)
}

/// The steps of each dim of a local value, and those that coordinates add.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    pub dims: Vec<(Dim, Steps)>,
    /// The steps of coordinates, in order of sub-axes.
    pub coords: Vec<(SubAxis, Steps)>,
}

impl View {
    pub fn of(&self, d: Dim) -> Option<&Steps> {
        self.dims.iter().find(|e| e.0 == d).map(|e| &e.1)
    }

    /// The same view without one dim.
    pub fn without(&self, d: Dim) -> View {
        View { dims: self.dims.iter().filter(|e| e.0 != d).cloned().collect(), coords: self.coords.clone() }
    }

    /// The indices of both, where dims that both have count the same, on the same ranks.
    pub fn and(&self, other: &View) -> Option<View> {
        let mut out = self.clone();
        for (d, steps) in &other.dims {
            match self.of(*d) {
                None => out.dims.push((*d, steps.clone())),
                Some(own) if own == steps => {}
                Some(_) => return None,
            }
        }
        (self.coords == other.coords).then_some(out)
    }

    /// Whether both have the same dims, but for those of one element, on the same ranks.
    pub fn is_like(&self, other: &View) -> bool {
        let within = |a: &View, b: &View| a.dims.iter().all(|(d, steps)| steps.is_empty() || b.of(*d) == Some(steps));
        within(self, other) && within(other, self) && self.coords == other.coords
    }

    /// Whether dims and coordinates together count each element of a space once.
    pub fn covers(&self, space: &Space) -> bool {
        let all = self.dims.iter().map(|d| &d.1).chain(self.coords.iter().map(|c| &c.1));
        let Some(digits) = all.map(|steps| space.write(steps)).collect::<Option<Vec<_>>>() else { return false };
        let mut digits: Vec<(u64, u64)> = digits.iter().flat_map(Digits::iter).collect();
        digits.sort_unstable_by_key(|d| std::cmp::Reverse(d.1));
        Digits::new(digits) == Digits::new([(space.size(), 1)])
    }
}
