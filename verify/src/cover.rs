//! Sets of elements of a buffer, as nested regular strides: what was written so far. A million rows of which
//! each has a part written are one part that repeats, so sets are united and compared without a look at each
//! row.
//!
//! Where two strides meet, the pattern of both repeats after their least common multiple, and one such span is
//! looked at, in which the wider is unrolled. Only strides of which the multiple is longer than the buffer cost
//! more, and what they cost is bounded.

use crate::region::Shape;
use std::rc::Rc;

/// Elements `from ..to` of a buffer.
pub type ElementRange = (u64, u64);

/// The most parts that one question may make: what the verifier takes does not depend on what a job from
/// elsewhere claims.
pub const MOST_PARTS: u64 = 1 << 20;

/// More parts than [`MOST_PARTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

/// Elements `from ..to`: all of them, or those of a pattern that repeats from `from` on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CoverSegment {
    from: u64,
    to: u64,
    pattern: Option<Rc<Pattern>>,
}

/// Some elements of `0 ..period`, neither none nor all. It stands at least twice in a part, and whole.
#[derive(Debug, PartialEq, Eq)]
struct Pattern {
    period: u64,
    parts: Vec<CoverSegment>,
}

/// A set of elements, as parts in ascending order that do not touch. All elements of a range are one part when the
/// set is cut to that range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cover {
    parts: Vec<CoverSegment>,
}

/// The number of parts that may still be made for one question.
struct Budget(u64);

impl Budget {
    fn spend(&mut self, parts: usize) -> Result<(), TooMany> {
        self.0 = self.0.checked_sub(parts as u64).ok_or(TooMany)?;
        Ok(())
    }

    /// Appends a part, and joins it with the part before if it continues that one.
    fn push(&mut self, out: &mut Vec<CoverSegment>, part: CoverSegment) -> Result<(), TooMany> {
        self.spend(1)?;
        match out.last_mut() {
            Some(last) if last.to == part.from && self.alike(&last.pattern, &part.pattern)? => last.to = part.to,
            _ => out.push(part),
        }
        Ok(())
    }

    fn alike(&mut self, a: &Option<Rc<Pattern>>, b: &Option<Rc<Pattern>>) -> Result<bool, TooMany> {
        match (a, b) {
            (None, None) => Ok(true),
            (Some(a), Some(b)) if Rc::ptr_eq(a, b) => Ok(true),
            (Some(a), Some(b)) => {
                self.spend(a.parts.len())?;
                Ok(a == b)
            }
            (Some(_), None) | (None, Some(_)) => Ok(false),
        }
    }

    /// Appends the elements of `parts` that lie within `range`, moved to `at`.
    fn slice(&mut self, parts: &[CoverSegment], range: ElementRange, at: u64, out: &mut Vec<CoverSegment>) -> Result<(), TooMany> {
        if range.0 >= range.1 {
            return Ok(());
        }
        let first = parts.partition_point(|p| p.to <= range.0);
        for part in parts[first..].iter().take_while(|p| p.from < range.1) {
            let (from, to) = (part.from.max(range.0), part.to.min(range.1));
            let to_lie = |element: u64| element - range.0 + at;
            let Some(pattern) = &part.pattern else {
                self.push(out, CoverSegment { from: to_lie(from), to: to_lie(to), pattern: None })?;
                continue;
            };
            let (period, phase) = (pattern.period, (from - part.from) % pattern.period);
            let mut rest = from;
            if (to - from) / period >= 2 {
                rest = to - (to - from) % period;
                let pattern = if phase == 0 { pattern.clone() } else { self.rotated(pattern, phase)? };
                self.push(out, CoverSegment { from: to_lie(from), to: to_lie(rest), pattern: Some(pattern) })?;
            }
            self.unroll(part, pattern, (rest, to), to_lie(rest), out)?;
        }
        Ok(())
    }

    /// The same pattern, starting at another of its elements.
    fn rotated(&mut self, pattern: &Pattern, phase: u64) -> Result<Rc<Pattern>, TooMany> {
        let (period, mut parts) = (pattern.period, vec![]);
        self.slice(&pattern.parts, (phase, period), 0, &mut parts)?;
        self.slice(&pattern.parts, (0, phase), period - phase, &mut parts)?;
        Ok(Rc::new(Pattern { period, parts }))
    }

    /// Appends a part's elements within `range`, each time that its pattern stands there.
    fn unroll(&mut self, part: &CoverSegment, pattern: &Pattern, range: ElementRange, at: u64, out: &mut Vec<CoverSegment>) -> Result<(), TooMany> {
        let mut from = range.0;
        while from < range.1 {
            self.spend(1)?;
            let phase = (from - part.from) % pattern.period;
            let next = range.1.min(from + (pattern.period - phase));
            self.slice(&pattern.parts, (phase, phase + (next - from)), from - range.0 + at, out)?;
            from = next;
        }
        Ok(())
    }

    /// The union of two sets, or `None` if they share an element.
    fn union(&mut self, a: &[CoverSegment], b: &[CoverSegment]) -> Result<Option<Vec<CoverSegment>>, TooMany> {
        let (mut i, mut j, mut at, mut out) = (0, 0, 0, vec![]);
        loop {
            i += usize::from(a.get(i).is_some_and(|p| p.to <= at));
            j += usize::from(b.get(j).is_some_and(|p| p.to <= at));
            let begin = |part: Option<&CoverSegment>| part.map_or(u64::MAX, |p| p.from.max(at));
            let (x, y) = (begin(a.get(i)), begin(b.get(j)));
            if x == y {
                let (Some(p), Some(q)) = (a.get(i), b.get(j)) else { return Ok(Some(out)) };
                at = p.to.min(q.to);
                if !self.both(p, q, (x, at), &mut out)? {
                    return Ok(None);
                }
            } else {
                let (part, from) = if x < y { (&a[i], x) } else { (&b[j], y) };
                at = part.to.min(x.max(y));
                self.slice(std::slice::from_ref(part), (from, at), from, &mut out)?;
            }
        }
    }

    /// Appends the elements of both parts within a range. Returns false if they share one.
    fn both(&mut self, a: &CoverSegment, b: &CoverSegment, range: ElementRange, out: &mut Vec<CoverSegment>) -> Result<bool, TooMany> {
        let (Some(p), Some(q)) = (&a.pattern, &b.pattern) else {
            let (mut meets, other) = (vec![], if a.pattern.is_none() { b } else { a });
            self.slice(std::slice::from_ref(other), range, range.0, &mut meets)?;
            self.push(out, CoverSegment { from: range.0, to: range.1, pattern: None })?;
            return Ok(meets.is_empty());
        };
        let (mut from, to) = range;
        let period = lcm(p.period, q.period);
        let times = (to - from) / period;
        if times >= 2 {
            let Some(once) = self.unrolled(a, b, (from, from + period))? else { return Ok(false) };
            let mut parts = vec![];
            self.slice(&once, (from, from + period), 0, &mut parts)?;
            let whole = parts == [CoverSegment { from: 0, to: period, pattern: None }];
            let pattern = if whole { None } else { Some(Rc::new(Pattern { period, parts })) };
            let part = CoverSegment { from, to: from + times * period, pattern };
            from = part.to;
            self.push(out, part)?;
        }
        let Some(rest) = self.unrolled(a, b, (from, to))? else { return Ok(false) };
        rest.into_iter().try_for_each(|part| self.push(out, part))?;
        Ok(true)
    }

    /// The elements of both parts within a range. The wider pattern is unrolled.
    fn unrolled(&mut self, a: &CoverSegment, b: &CoverSegment, range: ElementRange) -> Result<Option<Vec<CoverSegment>>, TooMany> {
        let period = |part: &CoverSegment| part.pattern.as_ref().map_or(0, |p| p.period);
        let (wide, other) = if period(a) < period(b) { (b, a) } else { (a, b) };
        let (mut unrolled, mut sliced) = (vec![], vec![]);
        if let Some(pattern) = &wide.pattern {
            self.unroll(wide, pattern, range, range.0, &mut unrolled)?;
        }
        self.slice(std::slice::from_ref(other), range, range.0, &mut sliced)?;
        self.union(&unrolled, &sliced)
    }

    /// The elements of a range that are in none of `parts`, which lie within it.
    fn complement(&mut self, parts: &[CoverSegment], range: ElementRange) -> Result<Vec<CoverSegment>, TooMany> {
        let (mut at, mut out) = (range.0, vec![]);
        for part in parts {
            if at < part.from {
                self.push(&mut out, CoverSegment { from: at, to: part.from, pattern: None })?;
            }
            if let Some(pattern) = &part.pattern {
                let parts = self.complement(&pattern.parts, (0, pattern.period))?;
                let pattern = Some(Rc::new(Pattern { period: pattern.period, parts }));
                self.push(&mut out, CoverSegment { pattern, ..*part })?;
            }
            at = part.to;
        }
        if at < range.1 {
            self.push(&mut out, CoverSegment { from: at, to: range.1, pattern: None })?;
        }
        Ok(out)
    }
}

/// The least common multiple, or more than any buffer has.
fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

impl Cover {
    /// The elements of an injective operand whose first element is at `start`.
    ///
    /// # Errors
    /// If it has too many parts.
    pub fn of(shape: &Shape, start: u64) -> Result<Cover, TooMany> {
        let (mut budget, outer) = (Budget(MOST_PARTS), shape.outer());
        let mut parts = if shape.reach() == 0 { vec![] } else { vec![CoverSegment { from: 0, to: shape.run(), pattern: None }] };
        let mut reach = shape.run();
        for (k, (size, stride)) in outer.iter().enumerate() {
            reach += (size - 1) * stride;
            let whole = CoverSegment { from: 0, to: size * stride, pattern: Some(Rc::new(Pattern { period: *stride, parts })) };
            parts = vec![];
            // The gap after the last element may not fit the stride of the next dim, so it is cut off then.
            let to = if outer.get(k + 1).is_some_and(|next| next.1 < whole.to) { reach } else { whole.to };
            budget.slice(&[whole], (0, to), 0, &mut parts)?;
        }
        for part in &mut parts {
            (part.from, part.to) = (part.from + start, part.to + start);
        }
        Ok(Cover { parts })
    }

    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether the set holds all of `run`.
    ///
    /// # Errors
    /// If that takes too many parts to tell.
    pub fn contains(&self, run: ElementRange) -> Result<bool, TooMany> {
        let mut out = vec![];
        Budget(MOST_PARTS).slice(&self.parts, run, run.0, &mut out)?;
        Ok(run.0 >= run.1 || out == [CoverSegment { from: run.0, to: run.1, pattern: None }])
    }

    /// Whether the set holds any of `run`.
    ///
    /// # Errors
    /// If that takes too many parts to tell.
    pub fn meets(&self, run: ElementRange) -> Result<bool, TooMany> {
        let mut out = vec![];
        Budget(MOST_PARTS).slice(&self.parts, run, 0, &mut out)?;
        Ok(!out.is_empty())
    }

    /// Whether the set holds all of another one.
    ///
    /// # Errors
    /// If that takes too many parts to tell.
    pub fn holds(&self, other: &Cover) -> Result<bool, TooMany> {
        let (Some(first), Some(last)) = (other.parts.first(), other.parts.last()) else { return Ok(true) };
        let (mut budget, mut within, range) = (Budget(MOST_PARTS), vec![], (first.from, last.to));
        budget.slice(&self.parts, range, range.0, &mut within)?;
        let missing = budget.complement(&within, range)?;
        Ok(budget.union(&other.parts, &missing)?.is_some())
    }

    /// Adds a set. If some of it was there before, returns false and adds nothing.
    ///
    /// # Errors
    /// If that takes too many parts to tell.
    pub fn insert(&mut self, new: &Cover) -> Result<bool, TooMany> {
        let (Some(first), Some(last)) = (new.parts.first(), new.parts.last()) else { return Ok(true) };
        let near = self.parts.partition_point(|p| p.to < first.from)..self.parts.partition_point(|p| p.from <= last.to);
        let Some(union) = Budget(MOST_PARTS).union(&self.parts[near.clone()], &new.parts)? else { return Ok(false) };
        self.parts.splice(near, union);
        Ok(true)
    }

    /// Whether the set shares no element with another one.
    ///
    /// # Errors
    /// If that takes too many parts to tell.
    pub fn is_apart(&self, other: &Cover) -> Result<bool, TooMany> {
        Ok(Budget(MOST_PARTS).union(&self.parts, &other.parts)?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn set(dims: &[(u64, u64)], start: u64) -> Cover {
        Cover::of(&Shape::new(dims.iter().copied()), start).expect("few parts")
    }

    #[test]
    fn a_set_grows_run_by_run_and_notices_what_it_has() {
        let mut cover = set(&[(2, 4), (2, 1)], 0);
        assert_eq!(cover.insert(&set(&[(1, 1)], 2)), Ok(true));
        assert_eq!([(0, 3), (0, 4), (9, 9)].map(|r| cover.contains(r)), [Ok(true), Ok(false), Ok(true)]);
        assert_eq!([(3, 5), (3, 4), (6, 9)].map(|r| cover.meets(r)), [Ok(true), Ok(false), Ok(false)]);
        assert_eq!(cover.insert(&set(&[(2, 1)], 5)), Ok(false));
        assert_eq!(cover.insert(&set(&[(1, 1)], 3)), Ok(true));
        assert_eq!(cover, set(&[(6, 1)], 0));
    }

    /// A latent-attention tensor of 16,384 tokens, 128 heads and 192 elements per head. Each head's first 128
    /// elements are written at once and each half of its rotated pairs by itself, which makes 134 million contiguous
    /// runs.
    #[test]
    fn halves_of_pairs_of_every_head_make_up_a_tensor_without_a_look_at_each() {
        let heads = 16_384 * 128;
        let (even, odd) = (set(&[(heads, 192), (32, 2)], 128), set(&[(heads, 192), (32, 2)], 129));
        let mut written = set(&[(heads, 192), (128, 1)], 0);
        assert_eq!(written.insert(&even), Ok(true));
        assert_eq!(written.holds(&odd), Ok(false));
        assert_eq!(written.insert(&even), Ok(false));
        assert_eq!(written.contains((0, heads * 192)), Ok(false));
        assert_eq!(written.insert(&odd), Ok(true));
        assert_eq!(written.contains((0, heads * 192)), Ok(true));
        assert_eq!(written.holds(&odd), Ok(true));
    }

    #[test]
    fn strides_that_meet_after_the_buffer_ends_are_refused_not_followed() {
        let (a, b) = (set(&[(1 << 22, (1 << 22) + 1)], 0), set(&[(1 << 22, 1 << 22)], 1 << 21));
        assert_eq!(a.is_apart(&b), Err(TooMany));
        assert_eq!(Cover::of(&Shape::new((0..40).map(|k| (2, 3 << (k + k / 2)))), 0).map(|_| ()), Ok(()));
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }

        /// Dims of an injective operand, innermost first.
        fn dims(&mut self) -> Vec<(u64, u64)> {
            let (mut reach, mut out) = (1, vec![]);
            for k in 0..self.below(4) {
                let (size, gap) = (1 + self.below(5), if k == 0 { self.below(2) } else { self.below(4) * self.below(3) });
                out.push((size, reach + gap));
                reach += (size - 1) * (reach + gap);
            }
            out
        }
    }

    fn each(dims: &[(u64, u64)], start: u64) -> BTreeSet<u64> {
        dims.iter().fold(BTreeSet::from([start]), |all, (size, stride)| all.iter().flat_map(|at| (0..*size).map(move |i| at + i * stride)).collect())
    }

    /// Compares covers with sets that keep each element by itself.
    #[test]
    fn random_operands_are_united_and_compared_as_their_elements_are() {
        let mut random = Random(7);
        let (mut grown, mut refused, mut whole) = (0, 0, 0);
        for _ in 0..4000 {
            let (mut cover, mut all) = (Cover::default(), BTreeSet::new());
            let mut dims = random.dims();
            for _ in 0..8 {
                // Parts of one tensor often have the same strides, so the same dims are often reused.
                if random.below(3) == 0 {
                    dims = random.dims();
                }
                let start = random.below(24);
                let (new, elements) = (set(&dims, start), each(&dims, start));
                assert_eq!(cover.holds(&new), Ok(elements.is_subset(&all)), "{all:?} {elements:?}");
                let apart = elements.is_disjoint(&all);
                assert_eq!(cover.is_apart(&new), Ok(apart), "{all:?} {elements:?}");
                assert_eq!(cover.insert(&new), Ok(apart));
                if apart {
                    all.extend(elements);
                }
                *(if apart { &mut grown } else { &mut refused }) += 1;
                let from = random.below(40);
                let run = (from, from + random.below(30));
                let contained = (run.0..run.1).all(|e| all.contains(&e));
                whole += usize::from(contained && run.1 > run.0 + 4);
                assert_eq!(cover.contains(run), Ok(contained), "{run:?} {all:?}");
                assert_eq!(cover.meets(run), Ok((run.0..run.1).any(|e| all.contains(&e))));
            }
        }
        assert!(grown > 4000 && refused > 4000 && whole > 500, "{grown} {refused} {whole}");
    }
}
