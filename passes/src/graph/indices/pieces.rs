//! What an integer may be, depending on what inputs hold: abstract values for [`super`].
//!
//! A value is a list of pieces that together cover all that can happen; of pieces that overlap, any may be true. Each is a linear form of at most
//! one input's element, known up to an interval. Numbers are those of mathematics: what leaves 32 bits is outside of every table.

use ir::op::Compare;
use std::collections::{BTreeMap, BTreeSet};

/// An element of an input, as it gets to some place: the same number is the same element wherever both are defined.
pub type Element = usize;

/// The most pieces of a value; a value that would have more is unknown.
const MOST: usize = 64;

/// Integers from `least` to `most`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bounds {
    pub least: i64,
    pub most: i64,
}

impl Bounds {
    /// All values that an element of an input can have.
    pub const I32: Bounds = Bounds::new(i32::MIN as i64, i32::MAX as i64);
    pub const BOOL: Bounds = Bounds::new(0, 1);
    /// An unknown value.
    pub const ANY: Bounds = Bounds::new(-(1 << 40), 1 << 40);

    pub const fn new(least: i64, most: i64) -> Bounds {
        Bounds { least, most }
    }

    pub const fn one(x: i64) -> Bounds {
        Bounds::new(x, x)
    }

    pub fn meet(self, other: Bounds) -> Option<Bounds> {
        let both = Bounds::new(self.least.max(other.least), self.most.min(other.most));
        (both.least <= both.most).then_some(both)
    }

    pub fn hull(self, other: Bounds) -> Bounds {
        Bounds::new(self.least.min(other.least), self.most.max(other.most))
    }

    /// The rest of `from`, disjoint bounds in ascending order, without these bounds.
    pub fn cut(self, from: &[Bounds]) -> Vec<Bounds> {
        let parts =
            |b: &Bounds| [b.meet(Bounds::new(i64::MIN, self.least.saturating_sub(1))), b.meet(Bounds::new(self.most.saturating_add(1), i64::MAX))];
        from.iter().flat_map(parts).flatten().collect()
    }

    /// Each value times a factor of at most 2^40; unknown if the result is too large.
    pub fn times(self, factor: i64) -> Bounds {
        let ends = [self.least.saturating_mul(factor), self.most.saturating_mul(factor)];
        Bounds::new(ends[0].min(ends[1]), ends[0].max(ends[1])).near()
    }

    pub fn plus(self, other: Bounds) -> Bounds {
        Bounds::new(self.least.saturating_add(other.least), self.most.saturating_add(other.most)).near()
    }

    fn near(self) -> Bounds {
        if Bounds::ANY.least < self.least && self.most < Bounds::ANY.most { self } else { Bounds::ANY }
    }
}

/// The bounds of elements; elements that are not in the map may have any value.
pub type ElementBounds = BTreeMap<Element, Bounds>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The case that the piece is about.
    pub when: ElementBounds,
    /// The value is a factor times an element, and
    pub times: Option<(Element, i64)>,
    /// a number within these.
    pub plus: Bounds,
    /// Elements whose comparison selected this piece.
    pub tested: BTreeSet<Element>,
    /// Those of `tested` that equal the constant of a comparison by `==` or `!=`.
    pub named: BTreeSet<Element>,
}

impl Piece {
    pub fn number(plus: Bounds) -> Piece {
        Piece { when: ElementBounds::new(), times: None, plus, tested: BTreeSet::new(), named: BTreeSet::new() }
    }

    pub fn element(x: Element) -> Piece {
        Piece { times: Some((x, 1)), ..Piece::number(Bounds::one(0)) }
    }

    /// The bounds of the value.
    pub fn range(&self) -> Bounds {
        let element = |x: Element| self.when.get(&x).copied().unwrap_or(Bounds::I32);
        self.times.map_or(self.plus, |(x, factor)| element(x).times(factor).plus(self.plus))
    }

    fn scaled(&self, factor: i64) -> Piece {
        let times = self.times.map(|(x, f)| (x, f.saturating_mul(factor))).filter(|t| t.1 != 0);
        let near = times.is_none_or(|t| t.1.abs() <= 1 << 31);
        if near { Piece { times, plus: self.plus.times(factor), ..self.clone() } } else { self.unknown() }
    }

    fn unknown(&self) -> Piece {
        Piece { times: None, plus: Bounds::ANY, ..self.clone() }
    }

    fn add(&self, other: &Piece, when: ElementBounds) -> Piece {
        let times = match (self.times, other.times) {
            (t, None) | (None, t) => t,
            (Some((x, f)), Some((y, g))) if x == y => Some((x, f + g)).filter(|t| t.1 != 0),
            (Some(_), Some(_)) => return Piece { when, ..self.unknown() },
        };
        Piece { when, times, plus: self.plus.plus(other.plus), ..self.clone() }
    }

    /// The cases into which the sign divides this piece, each with the bounds of the sign, -1 to 1.
    pub fn signs(&self) -> Vec<(ElementBounds, Bounds)> {
        let Bounds { least, most } = self.plus;
        let Some((x, factor)) = self.times else { return vec![(self.when.clone(), Bounds::new(least.signum(), most.signum()))] };
        // `below` and `above` bound the elements for which the value is certainly negative or positive.
        let size = factor.abs();
        let (below, above) = match factor > 0 {
            true => (Bounds::new(i64::MIN, (-most - 1).div_euclid(size)), Bounds::new((-least).div_euclid(size) + 1, i64::MAX)),
            false => (Bounds::new(most.div_euclid(size) + 1, i64::MAX), Bounds::new(i64::MIN, (least - 1).div_euclid(size))),
        };
        let all = self.when.get(&x).copied().unwrap_or(Bounds::I32);
        let between = above.cut(&below.cut(&[all]));
        let unsure = if least == most { Bounds::one(0) } else { Bounds::new(-1, 1) };
        let cases = [(below.meet(all), Bounds::one(-1)), (above.meet(all), Bounds::one(1))];
        let cases = cases.into_iter().chain(between.into_iter().map(|b| (Some(b), unsure)));
        let case = |bounds: Bounds| {
            let mut when = self.when.clone();
            when.insert(x, bounds);
            when
        };
        cases.filter_map(|(bounds, sign)| Some((case(bounds?), sign))).collect()
    }
}

/// The intersection of both cases, if it is not empty.
fn meet(a: &ElementBounds, b: &ElementBounds) -> Option<ElementBounds> {
    let mut both = a.clone();
    for (x, bounds) in b {
        let here = both.get(x).copied().unwrap_or(Bounds::I32);
        both.insert(*x, here.meet(*bounds)?);
    }
    Some(both)
}

/// The pieces without repetition; unknown if there are too many.
pub fn settled(pieces: impl IntoIterator<Item = Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = vec![];
    for p in pieces {
        if p.plus == Bounds::ANY && p.when.is_empty() || out.len() == MOST {
            return vec![Piece::number(Bounds::ANY)];
        }
        if !out.contains(&p) {
            out.push(p);
        }
    }
    out
}

/// A function of two values, piece by piece.
fn each<F: IntoIterator<Item = Piece>>(a: &[Piece], b: &[Piece], f: impl Fn(&Piece, &Piece, ElementBounds) -> F) -> Vec<Piece> {
    let pairs = a.iter().flat_map(|p| b.iter().map(move |q| (p, q)));
    let with = |mut r: Piece, p: &Piece, q: &Piece| {
        r.tested.extend(p.tested.union(&q.tested));
        r.named.extend(p.named.union(&q.named));
        r
    };
    let possible = pairs.filter_map(|(p, q)| Some((p, q, meet(&p.when, &q.when)?)));
    settled(possible.flat_map(|(p, q, when)| f(p, q, when).into_iter().map(move |r| with(r, p, q))))
}

pub fn add(a: &[Piece], b: &[Piece]) -> Vec<Piece> {
    each(a, b, |p, q, when| [p.add(q, when)])
}

pub fn scale(a: &[Piece], factor: i64) -> Vec<Piece> {
    settled(a.iter().map(|p| p.scaled(factor)))
}

pub fn sub(a: &[Piece], b: &[Piece]) -> Vec<Piece> {
    add(a, &scale(b, -1))
}

pub fn mul(a: &[Piece], b: &[Piece]) -> Vec<Piece> {
    each(a, b, |p, q, when| {
        let product = match (p.times, q.times) {
            (_, None) if q.plus.least == q.plus.most => p.scaled(q.plus.least),
            (None, _) if p.plus.least == p.plus.most => q.scaled(p.plus.least),
            (None, None) => Piece::number(p.plus.times(q.plus.least).hull(p.plus.times(q.plus.most))),
            (Some(_), _) | (_, Some(_)) => p.unknown(),
        };
        [Piece { when, ..product }]
    })
}

/// The floored quotient by a positive constant, for dividends that depend on no element.
pub fn div(a: &[Piece], b: &[Piece]) -> Vec<Piece> {
    each(a, b, |p, q, when| {
        let by = Some(q.plus.least).filter(|n| *n > 0 && q.plus.most == *n && q.times.is_none() && p.times.is_none());
        let plus = by.map_or(Bounds::ANY, |n| Bounds::new(p.plus.least.div_euclid(n), p.plus.most.div_euclid(n)));
        [Piece { when, ..Piece::number(plus) }]
    })
}

/// The floored remainder.
pub fn rem(a: &[Piece], b: &[Piece]) -> Vec<Piece> {
    each(a, b, |p, q, when| {
        let (whole, by) = (p.range(), q.range());
        [match () {
            () if by.least <= 0 => Piece { when, ..Piece::number(Bounds::ANY) },
            () if whole.least >= 0 && whole.most < by.least => Piece { when, ..p.clone() },
            () => Piece { when, ..Piece::number(Bounds::new(0, by.most - 1)) },
        }]
    })
}

/// Whether the greater or the lesser of two values is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extremum {
    Max,
    Min,
}

pub fn extreme(a: &[Piece], b: &[Piece], which: Extremum) -> Vec<Piece> {
    each(a, b, |p, q, when| {
        if let (None, None) = (p.times, q.times) {
            let plus = match which {
                Extremum::Max => Bounds::new(p.plus.least.max(q.plus.least), p.plus.most.max(q.plus.most)),
                Extremum::Min => Bounds::new(p.plus.least.min(q.plus.least), p.plus.most.min(q.plus.most)),
            };
            return vec![Piece { when, ..Piece::number(plus) }];
        }
        let one = |of: &Piece, when: &ElementBounds| Piece { when: when.clone(), ..of.clone() };
        let (greater, less) = match which {
            Extremum::Max => (p, q),
            Extremum::Min => (q, p),
        };
        let signs = p.add(&q.scaled(-1), when).signs();
        let either = |(when, sign): &(ElementBounds, Bounds)| {
            [(sign.most >= 0).then(|| one(greater, when)), (sign.least < 0).then(|| one(less, when))].into_iter().flatten().collect::<Vec<_>>()
        };
        signs.iter().flat_map(either).collect()
    })
}

fn holds(op: Compare, sign: i64) -> bool {
    match op {
        Compare::Eq => sign == 0,
        Compare::Ne => sign != 0,
        Compare::Lt => sign < 0,
        Compare::Le => sign <= 0,
        Compare::Gt => sign > 0,
        Compare::Ge => sign >= 0,
    }
}

/// 1 where the comparison holds, else 0.
pub fn compare(a: &[Piece], b: &[Piece], op: Compare) -> Vec<Piece> {
    each(a, b, |p, q, when| {
        let difference = p.add(&q.scaled(-1), when);
        let truth = |(when, sign): (ElementBounds, Bounds)| {
            let known = (sign.least..=sign.most).map(|s| i64::from(holds(op, s)));
            let (least, most) = known.fold((1, 0), |(least, most), t| (t.min(least), t.max(most)));
            let tested: BTreeSet<Element> = difference.times.map(|(x, _)| x).into_iter().collect();
            let named = if matches!(op, Compare::Eq | Compare::Ne) && sign == Bounds::one(0) { tested.clone() } else { BTreeSet::new() };
            Piece { when, tested, named, ..Piece::number(Bounds::new(least, most)) }
        };
        difference.signs().into_iter().map(truth).collect::<Vec<_>>()
    })
}

pub fn select(condition: &[Piece], yes: &[Piece], no: &[Piece]) -> Vec<Piece> {
    let of = |value: &[Piece], can: &dyn Fn(&Piece) -> bool| {
        let cases: Vec<Piece> = condition.iter().filter(|c| can(c)).cloned().collect();
        each(&cases, value, |_, v, when| [Piece { when, ..v.clone() }])
    };
    settled(of(yes, &|c| c.plus.most > 0).into_iter().chain(of(no, &|c| c.plus.least < 1)))
}

/// The bounds of a value over all its pieces.
pub fn hull(a: &[Piece]) -> Bounds {
    a.iter().map(Piece::range).reduce(Bounds::hull).unwrap_or(Bounds::ANY)
}
