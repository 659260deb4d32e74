//! What a value of a rewritten graph holds of terms: a part of one, or parts of several, one after the other, as
//! buckets and chunks do.

use super::per_rank::Each;
use super::rules::{Rules, own_part};
use crate::Invariant;
use crate::terms::digits::Digits;
use crate::terms::{TermKey, TermKind, TermView};
use crate::violation::Checked;
use ir::dim::{Dim, IndexMap, Order};
use ir::mesh::{Mesh, SubAxis};
use ir::op::{DType, Op};
use ir::program::{Bucket, Piece};
use std::rc::Rc;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum SymbolicValue {
    One(TermView),
    Joined(Joined),
    Each(Each),
    /// Sums, each of some of the elements of such parts. Together they sum each element once.
    Sums(Joined),
}

/// Parts of terms that follow each other along one index, row-major: all dims except the `lead` outermost and `trail`
/// innermost ones, which each part has by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Joined {
    /// The number of dims that each part has before that index.
    pub lead: usize,
    /// The number of dims that each part has after that index.
    pub trail: usize,
    /// If not empty, a rank has only its own part of that index. All parts are equal, and numbered by the ranks'
    /// order along these sub-axes.
    pub own: Vec<SubAxis>,
    /// Shared, since each of a bucket's users reads a few of its many.
    pub pieces: Rc<[JoinedPiece]>,
}

/// A run of `count` elements along the index: a view of a term, with one more dim than those that each part has by
/// itself, or an unknown value.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinedPiece {
    pub count: u64,
    pub of: Option<TermView>,
}

impl Joined {
    /// The parts of a view along one dim, if digits can describe them.
    pub fn split(mesh: &Mesh, x: &TermView, lead: usize, at: u64, count: u64) -> Option<Joined> {
        let mut pieces = vec![];
        split(mesh, x, lead, at, count, &mut pieces)?;
        Some(Joined { lead, trail: x.dims.len() - lead - 1, own: vec![], pieces: pieces.into() })
    }

    pub fn count(&self) -> u64 {
        self.pieces.iter().map(|p| p.count).sum()
    }

    /// Whether two lists of parts have the same form.
    fn is_like(&self, other: &Joined) -> bool {
        (self.lead, self.trail, &self.own, self.count()) == (other.lead, other.trail, &other.own, other.count())
    }

    /// Joins neighbouring runs where one view can describe both.
    pub fn merged(mut self) -> Joined {
        let mut pieces: Vec<JoinedPiece> = vec![];
        for p in self.pieces.iter() {
            match pieces.last_mut().and_then(|last| Some((follow(last, p, self.lead)?, last))) {
                Some((both, last)) => *last = both,
                None => pieces.push(p.clone()),
            }
        }
        let all: Option<Vec<&TermView>> = pieces.iter().map(|p| p.of.as_ref()).collect();
        if let Some(x) = all.and_then(|all| in_a_row(&all, self.lead)) {
            pieces = vec![JoinedPiece { count: x.dims[self.lead].extent(), of: Some(x) }];
        }
        self.pieces = pieces.into();
        self
    }

    /// A single view for a value with dims of these sizes, if there is only one part.
    pub fn held(self, mesh: &Mesh, sizes: &[u64]) -> SymbolicValue {
        let mut pieces = self.pieces.iter().filter(|p| p.count > 0);
        let (Some(JoinedPiece { of: Some(x), .. }), None) = (pieces.next(), pieces.next()) else { return SymbolicValue::Joined(self) };
        let middle = &sizes[self.lead..sizes.len() - self.trail];
        let viewed = if self.own.is_empty() {
            x.dims[self.lead].reshaped(middle).map(|new| (x.clone(), new))
        } else {
            let ranks: u64 = self.own.iter().map(|u| mesh[*u].size).product();
            let parts = x.flat().dims[0].reshaped(&[ranks, x.dims[0].extent() / ranks]);
            let own = parts.and_then(|dims| own_part(mesh, &self.own, &TermView { dims, ..x.clone() }));
            own.and_then(|x| x.dims[0].reshaped(middle).map(|new| (x, new)))
        };
        match viewed {
            Some((own, new)) => {
                let (lead, trail) = (&x.dims[..self.lead], &x.dims[self.lead + 1..]);
                SymbolicValue::One(TermView { dims: [lead, &new, trail].concat(), ..own })
            }
            None => SymbolicValue::Joined(self),
        }
    }

    /// The runs of several values of one form, cut where any of them begins a new one.
    pub fn aligned(mesh: &Mesh, all: &[Joined]) -> Checked<Vec<(u64, Vec<Option<TermView>>)>> {
        let mut all = all.to_vec();
        if all.iter().any(|j| (j.count(), &j.own) != (all[0].count(), &all[0].own)) {
            return Err(Invariant::BucketAligned.breach("its operands are parts of different buckets"));
        }
        // Digits may end beside a cut and make further cuts necessary, so this repeats until all values have the same
        // runs.
        loop {
            let mut cuts: Vec<u64> = all.iter().flat_map(Joined::ends).collect();
            cuts.sort_unstable();
            cuts.dedup();
            for j in &mut all {
                j.pieces = j.cut_at(mesh, &cuts)?.into();
            }
            if all.iter().all(|j| j.pieces.len() == cuts.len()) {
                let run = |k: usize| (all[0].pieces[k].count, all.iter().map(|j| j.pieces[k].of.clone()).collect());
                return Ok((0..cuts.len()).map(run).collect());
            }
        }
    }

    /// Whether a value agrees with these parts wherever it is known.
    pub fn agrees(&self, rules: &mut Rules, got: &SymbolicValue) -> Checked<bool> {
        let got = match got {
            SymbolicValue::Joined(j) => j.clone(),
            SymbolicValue::Each(e) => e.joined()?,
            SymbolicValue::Sums(_) => return Ok(false),
            SymbolicValue::One(x) => {
                as_joined(rules.mesh, x, self).ok_or_else(|| Invariant::BucketAligned.breach("it is of ranks' parts, and of others"))?
            }
        };
        if !self.is_like(&got) {
            return Ok(false);
        }
        for (_, of) in Joined::aligned(rules.mesh, &[self.clone(), got])? {
            let mut of = of.into_iter().map(|x| x.map(|x| rules.terms.normal(x)));
            if let (Some(Some(want)), Some(got)) = (of.next(), of.next())
                && got.as_ref() != Some(&want)
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The index at which each run ends.
    fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        let ends = self.pieces.iter().scan(0, |end, p| {
            *end += p.count;
            Some(*end)
        });
        ends.filter(|end| *end > 0)
    }

    /// The elements from `at` on.
    pub fn cut(&self, mesh: &Mesh, at: u64, count: u64) -> Checked<Vec<JoinedPiece>> {
        let (mut out, mut start) = (vec![], 0);
        for p in self.pieces.iter() {
            let (from, to) = (at.max(start), (at + count).min(start + p.count));
            if from < to {
                self.within(mesh, p, from - start, to - from, &mut out)?;
            }
            start += p.count;
        }
        Ok(out)
    }

    /// All elements, in runs that do not cross any of these cuts, which are in order.
    fn cut_at(&self, mesh: &Mesh, cuts: &[u64]) -> Checked<Vec<JoinedPiece>> {
        let (mut out, mut start, mut cuts) = (vec![], 0, cuts);
        for p in self.pieces.iter() {
            let mut from = 0;
            while from < p.count {
                cuts = &cuts[cuts.partition_point(|c| *c <= start + from)..];
                let to = cuts.first().map_or(p.count, |c| p.count.min(c - start));
                self.within(mesh, p, from, to - from, &mut out)?;
                from = to;
            }
            start += p.count;
        }
        Ok(out)
    }

    /// Appends elements of a run.
    fn within(&self, mesh: &Mesh, p: &JoinedPiece, at: u64, count: u64, out: &mut Vec<JoinedPiece>) -> Checked<()> {
        match &p.of {
            None => out.push(JoinedPiece { count, of: None }),
            Some(x) => {
                split(mesh, x, self.lead, at, count, out).ok_or_else(|| Invariant::DigitView.breach("a part of a run that digits cannot say"))?
            }
        }
        Ok(())
    }
}

/// Appends elements along dim `k` of a view, in as few runs as digits can describe.
fn split(mesh: &Mesh, x: &TermView, k: usize, at: u64, count: u64, out: &mut Vec<JoinedPiece>) -> Option<()> {
    if count == 0 {
        return Some(());
    }
    if let Some(part) = x.part(mesh, k, at, &vec![], &[(count, 1)]) {
        out.push(JoinedPiece { count, of: Some(part) });
        return Some(());
    }
    let end = at + count;
    let mut block = x.dims[k].extent();
    for (n, _) in x.dims[k].iter() {
        block /= n;
        let first = (at + 1).next_multiple_of(block);
        if block > 1 && first < end {
            // The first part begins at the block's own beginning if `at` lies on it.
            let first = if at.is_multiple_of(block) { at } else { first };
            let last = end / block * block;
            if (first, last) == (at, end) {
                return None;
            }
            split(mesh, x, k, at, first - at, out)?;
            split(mesh, x, k, first, last - first, out)?;
            return split(mesh, x, k, last, end - last, out);
        }
    }
    None
}

/// Two runs as one, if the second goes on where the first ends.
fn follow(a: &JoinedPiece, b: &JoinedPiece, place: usize) -> Option<JoinedPiece> {
    let (x, y) = (a.of.as_ref()?, b.of.as_ref()?);
    let around = |x: &TermView| (x.dims[..place].to_vec(), x.dims[place + 1..].to_vec());
    if (x.term, &x.coords) != (y.term, &y.coords) || around(x) != around(y) {
        return None;
    }
    let steps = |x: &TermView| x.dims[place].iter().collect::<Vec<_>>();
    let ahead = y.offset.checked_sub(x.offset)?;
    let step = match (steps(x).as_slice(), steps(y).as_slice()) {
        ([(_, s)], [(_, t)]) if s == t => *s,
        ([(_, s)], []) | ([], [(_, s)]) => *s,
        ([], []) => ahead,
        _ => return None,
    };
    let count = a.count + b.count;
    let mut all = x.clone();
    all.dims[place] = Digits::new([(count, step)]);
    (ahead == a.count * step).then_some(JoinedPiece { count, of: Some(all) })
}

/// All elements of a parameter or state, row-major.
pub fn source(rules: &mut Rules, op: Op, index: &[IndexMap], dtype: DType) -> TermView {
    let maps = index.iter().map(|m| (m.clone(), 0, Order::Plain)).collect();
    let sizes: Vec<u64> = index.iter().map(IndexMap::len).collect();
    TermView::whole(rules.terms.plain(TermKind::Held(op, maps), vec![], sizes.clone(), dtype), &sizes)
}

/// The elements of a bucket, from what its pieces are; nothing is known of what lies between them.
pub fn bucket(b: &Bucket, of: &mut dyn FnMut(&Piece) -> Checked<TermView>) -> Checked<Joined> {
    let (mut pieces, mut end) = (vec![], 0);
    for p in &b.pieces {
        let gap = p.at.checked_sub(end).ok_or_else(|| Invariant::BucketPieces.breach("pieces of a bucket overlap"))?;
        let x = of(p)?.flat();
        let count = x.dims[0].extent();
        if count != p.elements() {
            return Err(Invariant::BucketPieces.breach("a piece of a bucket is not as large as its parameter"));
        }
        pieces.extend([JoinedPiece { count: gap, of: None }, JoinedPiece { count, of: Some(x) }]);
        end = p.at + count;
    }
    let rest = b.size.checked_sub(end).ok_or_else(|| Invariant::BucketPieces.breach("a bucket is smaller than its pieces"))?;
    pieces.push(JoinedPiece { count: rest, of: None });
    pieces.retain(|p| p.count > 0);
    Ok(Joined { lead: 0, trail: 0, own: vec![], pieces: pieces.into() })
}

/// A value in another precision.
pub fn cast(rules: &mut Rules, x: TermView, dtype: DType) -> TermView {
    if rules.terms.key(x.term).dtype == dtype {
        return x;
    }
    let sizes: Vec<u64> = x.dims.iter().map(Digits::extent).collect();
    let labels = vec![(0..sizes.len() as u32).map(Dim).collect(); 2];
    rules.apply(TermKey { kind: TermKind::Op(Op::Cast, vec![]), args: vec![x], labels, sizes, dtype })
}

/// A view as ranks' own parts of a value in one dim, or as all of it.
pub fn as_joined(mesh: &Mesh, x: &TermView, shape: &Joined) -> Option<Joined> {
    let mut digits = vec![];
    for u in &shape.own {
        match x.coords.iter().find(|c| c.0 == *u) {
            Some((_, d)) => digits.extend(d.iter()),
            None => digits.push((mesh[*u].size, 0)),
        }
    }
    digits.extend(x.dims.iter().flat_map(Digits::iter));
    let all = Digits::new(digits);
    let coords = x.coords.iter().filter(|c| !shape.own.contains(&c.0)).cloned().collect();
    let count = all.extent();
    let of = Some(TermView { dims: vec![all], coords, ..x.clone() });
    Some(Joined { lead: 0, trail: 0, own: shape.own.clone(), pieces: [JoinedPiece { count, of }].into() })
}

/// Joins equal parts of a term at equal distances along dim `place` into one part.
fn in_a_row(all: &[&TermView], place: usize) -> Option<TermView> {
    let first = *all.first()?;
    let step = match all.get(1) {
        Some(x) => x.offset.checked_sub(first.offset)?,
        None => 0,
    };
    for (k, x) in (0u64..).zip(all) {
        let apart = (x.term, &x.coords, &x.dims) != (first.term, &first.coords, &first.dims);
        if apart || x.offset != first.offset + k * step {
            return None;
        }
    }
    let mut out = first.clone();
    let own: Vec<(u64, u64)> = out.dims[place].iter().collect();
    out.dims[place] = Digits::new([(all.len() as u64, step)].into_iter().chain(own));
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element `i` of an index of digits `(2, 100) (3, 10) (2, 1)`.
    fn element(i: u64) -> u64 {
        i / 6 * 100 + i / 2 % 3 * 10 + i % 2
    }

    #[test]
    fn any_slice_is_a_few_runs_and_these_are_it() {
        let mesh = Mesh::new(1, 1, 1, 1, 1);
        let mut rules = Rules::new(&mesh);
        let term = rules.terms.plain(TermKind::Held(Op::Param(0), vec![]), vec![], vec![200], DType::F32);
        let x = TermView { term, offset: 0, coords: vec![], dims: vec![Digits::new([(2, 100), (3, 10), (2, 1)])] };
        for at in 0..12 {
            for count in 1..=12 - at {
                let runs = Joined::split(&mesh, &x, 0, at, count).expect("runs");
                assert!(runs.pieces.len() <= 5, "{runs:?}");
                let mut found = vec![];
                for run in runs.pieces.iter() {
                    let part = run.of.as_ref().expect("a part");
                    for i in 0..run.count {
                        let (mut rest, mut sum) = (i, part.offset);
                        for (n, s) in part.dims[0].iter().rev() {
                            sum += rest % n * s;
                            rest /= n;
                        }
                        found.push(sum);
                    }
                }
                assert_eq!(found, (at..at + count).map(element).collect::<Vec<_>>());
            }
        }
        // Runs that cover a term in order merge into one.
        let all = TermView::whole(term, &[12]);
        let [a, b, c] = [(0, 5), (5, 1), (6, 6)].map(|(at, n)| Joined::split(&mesh, &all, 0, at, n).expect("runs").pieces);
        let joined = Joined { lead: 0, trail: 0, own: vec![], pieces: [a, b, c].concat().into() };
        assert_eq!(joined.merged().held(&mesh, &[3, 4]), SymbolicValue::One(TermView::whole(term, &[3, 4])));
    }
}
