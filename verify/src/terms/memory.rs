//! What buffers hold while commands run: terms at strided places.

use super::digits::{Digits, LinearForm, Walk, add};
use super::{Term, TermKind, TermView, Terms};
use crate::cover::Cover;
use crate::region::Shape;
use ir::dim::Linear;
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::DType;

/// `(extent, stride)` in elements of a buffer.
pub type Strided = Vec<(u64, u64)>;

/// A strided place of a buffer.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    pub offset: u64,
    pub coords: Linear,
    pub dims: Strided,
}

/// Dim k of `holds` lies along `layout[k]`, from `offset` on.
#[derive(Clone, Debug)]
struct Region {
    offset: u64,
    /// Coordinates that its offset depends on as well. Only a slice that depends on them likewise finds it.
    coords: Linear,
    layout: Strided,
    holds: TermView,
    /// The values that were added to it, in order, if any were.
    added: Option<BodySum>,
    /// The body that wrote it.
    body: usize,
    /// Whether it is the rest of a value that was partly overwritten. A rest never joins with what is written now,
    /// even if that is the same again.
    is_rest: bool,
}

/// The values that one body adds up at a position.
#[derive(Clone, Debug)]
struct BodySum {
    /// Whether each microbatch adds them to the sum of the microbatches before, which began at zero.
    of_microbatches: bool,
    values: Vec<TermView>,
}

/// The content of one buffer.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    regions: Vec<Region>,
    body: usize,
}

impl Memory {
    /// Notes that another body runs from now on.
    pub fn enter(&mut self, body: usize) {
        self.body = body;
    }

    /// Writes a value to a slice. What it overlaps is gone, except for outermost rows before it and behind it.
    pub fn write(&mut self, mesh: &Mesh, slice: &BufferSlice, holds: TermView) {
        self.clear(mesh, slice);
        let mut new = Region {
            offset: slice.offset,
            coords: slice.coords.clone(),
            layout: slice.dims.clone(),
            holds,
            added: None,
            body: self.body,
            is_rest: false,
        };
        // Pieces of one value, written one by one, are one region.
        while let Some((k, joined)) = self.regions.iter().enumerate().filter(|r| !r.1.is_rest).find_map(|(k, r)| Some((k, r.joined(&new)?))) {
            self.regions.swap_remove(k);
            new = joined;
        }
        self.regions.push(new);
    }

    fn clear(&mut self, mesh: &Mesh, slice: &BufferSlice) {
        let new = Shape::new(slice.dims.iter().copied());
        let end = slice.offset + spread(mesh, &slice.coords) + new.reach();
        let mut left = vec![];
        self.regions.retain(|old| {
            let shape = Shape::new(old.layout.iter().copied());
            if old.offset + spread(mesh, &old.coords) + shape.reach() <= slice.offset || end <= old.offset {
                return true;
            }
            // Regions whose offsets depend on the same coordinates are equally far apart at all of them.
            let fixed = slice.coords == old.coords && is_steady(mesh, &slice.coords) && shape.is_injective() && new.is_injective();
            let apart = || Cover::of(&shape, old.offset)?.is_apart(&Cover::of(&new, slice.offset)?);
            let kept = fixed && apart() == Ok(true);
            if fixed && !kept {
                left.extend(old.outside(mesh, slice.offset, end));
            }
            kept
        });
        self.regions.extend(left);
    }

    /// Adds a value of each microbatch to a sum that begins at the term `zero`, or to what the same body has written
    /// or added there. Returns false where there is neither.
    pub fn add(&mut self, slice: &BufferSlice, value: TermView, zero: Term) -> bool {
        let body = self.body;
        let filled = self.regions.iter().position(|r| r.holds.term == zero && r.added.is_none());
        let here = |r: &&mut Region| r.offset == slice.offset && r.layout == slice.dims && r.coords.is_empty() && slice.coords.is_empty();
        let at = self.regions.iter_mut().filter(|r| r.holds.term != zero || r.added.is_some()).find(here);
        match (at, filled) {
            // It is not known here how often each of two bodies runs.
            (Some(region), _) if region.body != body => false,
            (Some(region), _) => {
                let own = BodySum { of_microbatches: false, values: vec![region.holds.clone()] };
                region.added.get_or_insert(own).values.push(value);
                true
            }
            (None, Some(k)) if slice.coords.is_empty() => {
                // The part of the zero that is not added to stays zero.
                let rest = self.regions.swap_remove(k);
                let whole = Shape::new(rest.layout.iter().copied()).reach() == Shape::new(slice.dims.iter().copied()).reach();
                let (offset, layout) = (slice.offset, slice.dims.clone());
                let added = BodySum { of_microbatches: true, values: vec![value.clone()] };
                self.regions.push(Region { offset, coords: vec![], layout, holds: value, added: Some(added), body, is_rest: false });
                self.regions.extend((!whole).then_some(rest));
                true
            }
            (None, _) => false,
        }
    }

    /// The value that a reader finds, dim by dim. `None` if it is more than one value, or none.
    pub fn read(&self, mesh: &Mesh, terms: &mut Terms, slice: &BufferSlice, dtype: DType) -> Option<TermView> {
        // Filled regions lie under the sums that were added to parts of them.
        let (under, over): (Vec<&Region>, Vec<&Region>) = self.regions.iter().partition(|r| terms.is_fill(r.holds.term) && r.added.is_none());
        let one = over.iter().find_map(|r| r.read(mesh, terms, slice, dtype));
        let found = one.or_else(|| {
            // Pieces may have been written in another order than they lie in.
            let merged = Memory::merged(&over);
            let one = merged.iter().find_map(|r| r.read(mesh, terms, slice, dtype));
            let joined = one.or_else(|| Memory::joined(&over, mesh, terms, slice, dtype));
            joined.or_else(|| Memory::joined(&merged.iter().collect::<Vec<_>>(), mesh, terms, slice, dtype))
        });
        let end = slice.offset + spread(mesh, &slice.coords) + Shape::new(slice.dims.iter().copied()).reach();
        let bare = over.iter().all(|r| end <= r.offset || r.offset + spread(mesh, &r.coords) + r.reach() <= slice.offset);
        found.or_else(|| under.iter().filter(|_| bare).find_map(|r| r.read(mesh, terms, slice, dtype)))
    }

    /// Regions in their order, with pieces of one value joined.
    fn merged(regions: &[&Region]) -> Vec<Region> {
        let mut sorted = regions.to_vec();
        sorted.sort_unstable_by_key(|r| r.offset);
        let mut out: Vec<Region> = vec![];
        for r in sorted {
            match out.last_mut().and_then(|last| Some((last.joined(r)?, last))) {
                Some((joined, last)) => *last = joined,
                None => out.push(r.clone()),
            }
        }
        out
    }

    /// The concatenation of values that lie one after the other.
    fn joined(regions: &[&Region], mesh: &Mesh, terms: &mut Terms, slice: &BufferSlice, dtype: DType) -> Option<TermView> {
        let sizes: Vec<u64> = slice.dims.iter().map(|d| d.0).collect();
        let dense = slice.dims.iter().rev().try_fold(1, |row, (n, stride)| (*n == 1 || *stride == row).then_some(row * n));
        let end = slice.offset + dense?;
        let mut inside: Vec<&Region> =
            regions.iter().copied().filter(|r| r.coords == slice.coords && r.offset >= slice.offset && r.offset + r.reach() <= end).collect();
        inside.sort_unstable_by_key(|r| r.offset);
        let (mut at, mut parts) = (slice.offset, vec![]);
        for r in inside {
            if r.offset != at {
                return None;
            }
            let piece = BufferSlice { offset: at, coords: slice.coords.clone(), dims: vec![(r.reach(), 1)] };
            parts.push(r.read(mesh, terms, &piece, dtype)?);
            at += r.reach();
        }
        // One part with several dims is no concatenation.
        (at == end && (parts.len() > 1 || sizes.len() == 1)).then(|| TermView::whole(terms.joined(parts, dtype).term, &sizes))
    }
}

impl Region {
    /// Elements from the first to the last, both included.
    fn reach(&self) -> u64 {
        Shape::new(self.layout.iter().copied()).reach()
    }

    /// Whether the whole region repeats one element of its value.
    fn is_constant(&self) -> bool {
        self.holds.dims.iter().flat_map(Digits::iter).all(|d| d.1 == 0)
    }

    /// This region joined with one more piece: one of the same form, or the next piece along its last dim.
    fn joined(&self, next: &Region) -> Option<Region> {
        if self.added.is_some()
            || next.added.is_some()
            || self.coords != next.coords
            || (self.holds.term, &self.holds.coords) != (next.holds.term, &next.holds.coords)
        {
            return None;
        }
        let further = next.offset.checked_sub(self.offset).filter(|n| *n > 0)?;
        let later = next.holds.offset.checked_sub(self.holds.offset)?;
        let mut out = self.clone();
        out.body = if self.body == next.body { self.body } else { usize::MAX };
        // Constants that lie apart, such as zeros, are no pieces of one constant, but constants that interleave are.
        if self.is_constant() && later == 0 && further > self.reach() {
            return None;
        }
        if self.layout == next.layout && self.holds.dims == next.holds.dims {
            out.layout.push((2, further));
            out.holds.dims.push(Digits::new([(2, later)]));
            return Some(out);
        }
        let n = self.layout.len().checked_sub(1)?;
        let (count, stride) = self.layout[n];
        let mut step = self.holds.dims[n].iter();
        let (Some((_, inner)), None) = (step.next(), step.next()) else { return None };
        let follows = further == count * stride && later == count * inner;
        if !follows || self.layout[..n] != next.layout || self.holds.dims[..n] != next.holds.dims {
            return None;
        }
        out.layout[n].0 += 1;
        out.holds.dims[n] = Digits::new([(count + 1, inner)]);
        Some(out)
    }

    /// The outermost rows of the region that end before element `from`, and those that begin at `to` or behind it.
    /// Empty for a constant, since what is added to a zero is added to all of it.
    fn outside(&self, mesh: &Mesh, from: u64, to: u64) -> Vec<Region> {
        if self.is_constant() {
            return vec![];
        }
        let Some((rows, stride, k)) = self.radix().and_then(|radix| radix.first().copied()).filter(|_| self.added.is_none()) else { return vec![] };
        let head = from.saturating_sub(self.offset) / stride;
        let tail = to.saturating_sub(self.offset).div_ceil(stride);
        let rows_of = |(first, end): (u64, u64)| {
            let (offset, mut layout) = (self.offset + first * stride, self.layout.clone());
            layout[k].0 = end - first;
            let holds = self.find(mesh, &BufferSlice { offset, coords: self.coords.clone(), dims: layout.clone() })?;
            Some(Region { offset, layout, holds, is_rest: true, ..self.clone() })
        };
        [(0, head.min(rows)), (tail, rows)].into_iter().filter(|r| r.0 < r.1).filter_map(rows_of).collect()
    }

    fn read(&self, mesh: &Mesh, terms: &mut Terms, slice: &BufferSlice, dtype: DType) -> Option<TermView> {
        if let Some(added) = &self.added {
            let sizes: Vec<u64> = self.layout.iter().map(|d| d.0).collect();
            let all = added.values.iter().cloned().reduce(|x, y| terms.sum_of_two([x, y], &sizes, dtype))?;
            let holds = match added.of_microbatches {
                true => TermView::whole(terms.plain(TermKind::Sum, vec![all], sizes.clone(), dtype), &sizes),
                false => all,
            };
            return Region { holds, added: None, ..self.clone() }.find(mesh, slice);
        }
        if let Some(found) = self.find(mesh, slice) {
            return Some(found);
        }
        // A slice across dims that are contiguous reads a copy of them as one dim.
        let radix = self.radix()?;
        let dense = radix.last().is_none_or(|r| r.1 == 1) && radix.windows(2).all(|w| w[0].1 == w[1].0 * w[1].1);
        let dims = radix.iter().map(|r| self.holds.dims[r.2].clone()).collect();
        let flat = dense.then(|| TermView { dims, ..self.holds.clone() }.flat())?;
        let count = flat.dims[0].extent();
        Region { layout: vec![(count, 1)], holds: terms.stored(&flat, dtype), ..self.clone() }.find(mesh, slice)
    }

    /// `(extent, stride, dim)`, outermost first. `None` if a dim's stride is not more than all that the dims after it
    /// reach.
    fn radix(&self) -> Option<Vec<(u64, u64, usize)>> {
        let dims = self.layout.iter().enumerate().filter(|d| d.1.0 > 1);
        let mut radix: Vec<(u64, u64, usize)> = dims.map(|(k, (n, s))| (*n, *s, k)).collect();
        radix.sort_unstable_by_key(|r| std::cmp::Reverse(r.1));
        let mut reach = 0;
        for (n, s, _) in radix.iter().rev() {
            if *s <= reach {
                return None;
            }
            reach += (n - 1) * s;
        }
        Some(radix)
    }

    fn find(&self, mesh: &Mesh, slice: &BufferSlice) -> Option<TermView> {
        let radix = self.radix()?;
        let rest = slice.offset.checked_sub(self.offset)?;
        let mut reader =
            AddressWalker { radix: &radix, used: vec![0; radix.len()], walks: radix.iter().map(|r| Walk::new(&self.holds.dims[r.2])).collect() };
        let dims = slice.dims.iter().map(|(n, s)| reader.step(*n, *s)).collect::<Option<Vec<_>>>()?;
        let mut form: LinearForm = vec![];
        // The region's own coordinates move it as a whole. The reader's other coordinates are steps within the
        // region.
        let asked = |c: &&(SubAxis, u64)| !self.coords.contains(c);
        if !self.coords.iter().all(|c| slice.coords.contains(c)) {
            return None;
        }
        for (u, stride) in slice.coords.iter().filter(asked) {
            form = add(&form, &vec![(*u, reader.step(mesh[*u].size, *stride)?)])?;
        }
        let offset = reader.finish(rest)?;
        let holds = &self.holds;
        Some(TermView { term: holds.term, offset: holds.offset + offset, coords: add(&holds.coords, &form)?, dims })
    }
}

/// The value of a slice, if dim k of a value lies along `layout[k]` from `offset` on. `None` if the slice is not all
/// within it.
pub fn find(mesh: &Mesh, offset: u64, layout: Strided, holds: TermView, slice: &BufferSlice) -> Option<TermView> {
    Region { offset, coords: vec![], layout, holds, added: None, body: 0, is_rest: false }.find(mesh, slice)
}

/// Steps through the addresses of a region.
struct AddressWalker<'a> {
    /// `(extent, stride, dim)`, outermost first, each within the one before.
    radix: &'a [(u64, u64, usize)],
    used: Vec<u64>,
    walks: Vec<Walk<'a>>,
}

impl AddressWalker<'_> {
    fn step(&mut self, extent: u64, stride: u64) -> Option<Digits> {
        if extent <= 1 || stride == 0 {
            return Some(Digits::new([(extent, 0)]));
        }
        let (mut m, mut r) = (extent, stride);
        let mut parts: Vec<Digits> = vec![];
        loop {
            let k = self.radix.iter().position(|d| d.1 <= r)?;
            let (n, s, _) = self.radix[k];
            let q = r / s;
            if r % s != 0 || q >= n && m > 1 {
                return None;
            }
            let reach = (m - 1).checked_mul(q)?;
            if reach < n {
                self.used[k] += reach;
                parts.push(self.walks[k].step(m, q)?);
                break;
            }
            let c = n / q;
            if n % q != 0 || m % c != 0 || k == 0 || self.radix[k - 1].1 != n * s {
                return None;
            }
            self.used[k] += (c - 1) * q;
            parts.push(self.walks[k].step(c, q)?);
            (m, r) = (m / c, n * s);
        }
        Some(Digits::new(parts.iter().rev().flat_map(Digits::iter).collect::<Vec<_>>()))
    }

    /// The offset in the value that a start at element `rest` of the region adds.
    fn finish(self, mut rest: u64) -> Option<u64> {
        let mut sum = 0;
        for ((walk, used), (n, s, _)) in self.walks.into_iter().zip(&self.used).zip(self.radix) {
            let index = rest / s;
            rest %= s;
            if index + used >= *n {
                return None;
            }
            sum += walk.finish(index)?;
        }
        (rest == 0).then_some(sum)
    }
}

/// Whether offsets that depend on these coordinates stay the same throughout a step.
fn is_steady(mesh: &Mesh, coords: &Linear) -> bool {
    coords.iter().all(|(u, _)| mesh[*u].axis != Axis::Microbatch)
}

/// How much further an offset can lie at other coordinates.
fn spread(mesh: &Mesh, coords: &Linear) -> u64 {
    coords.iter().map(|(u, stride)| (mesh[*u].size - 1) * stride).sum()
}

#[cfg(test)]
mod tests {
    use super::{BufferSlice, Digits, Memory, TermKind, TermView, Terms};
    use ir::mesh::{Mesh, Sizes};
    use ir::op::{DType, Op, Real};

    /// A constant is written at every second element, in two copies, and then all elements are read.
    #[test]
    fn pieces_of_a_constant_that_interleave_are_one() {
        let one = Sizes::default();
        let mesh = Mesh::of_sizes(&one).expect("a mesh");
        let mut terms = Terms::default();
        let scalar = terms.plain(TermKind::Held(Op::Param(0), vec![]), vec![], vec![], DType::F32);
        let constant = |n: u64| TermView { term: scalar, offset: 0, coords: vec![], dims: vec![Digits::new([(n, 0)])] };
        let slice = |offset: u64, dims: Vec<(u64, u64)>| BufferSlice { offset, coords: vec![], dims };
        let mut memory = Memory::default();
        memory.write(&mesh, &slice(0, vec![(4, 2)]), constant(4));
        assert_eq!(memory.read(&mesh, &mut terms, &slice(0, vec![(8, 1)]), DType::F32), None);
        memory.write(&mesh, &slice(1, vec![(4, 2)]), constant(4));
        assert_eq!(memory.read(&mesh, &mut terms, &slice(0, vec![(8, 1)]), DType::F32), Some(constant(8)));
        // Constants that lie apart stay apart, so that a write to one leaves the other.
        memory.write(&mesh, &slice(12, vec![(8, 1)]), constant(8));
        memory.write(&mesh, &slice(12, vec![(2, 1)]), TermView::whole(scalar, &[2]));
        assert_eq!(memory.read(&mesh, &mut terms, &slice(0, vec![(8, 1)]), DType::F32), Some(constant(8)));
    }

    /// The second of four rows of three elements is overwritten. The other rows keep their values, and the whole is
    /// three values one after the other, whoever writes them in what order.
    #[test]
    fn rows_beside_what_is_written_over_stay() {
        let mesh = Mesh::of_sizes(&Sizes::default()).expect("a mesh");
        let mut terms = Terms::default();
        let [old, new] = [0, 1].map(|slot| terms.plain(TermKind::Held(Op::Param(slot), vec![]), vec![], vec![12], DType::F32));
        let rows = |first: u64, n: u64| BufferSlice { offset: 3 * first, coords: vec![], dims: vec![(n, 3), (3, 1)] };
        let of_old = |first: u64, n: u64| TermView { offset: 3 * first, ..TermView::whole(old, &[n, 3]) };
        let mut memory = Memory::default();
        memory.write(&mesh, &rows(0, 4), of_old(0, 4));
        memory.write(&mesh, &rows(1, 1), TermView::whole(new, &[1, 3]));
        assert_eq!(memory.read(&mesh, &mut terms, &rows(0, 1), DType::F32), Some(of_old(0, 1)));
        assert_eq!(memory.read(&mesh, &mut terms, &rows(2, 2), DType::F32), Some(of_old(2, 2)));
        let parts = [of_old(0, 1), TermView::whole(new, &[1, 3]), of_old(2, 2)].map(|x| x.flat());
        let all = TermView::whole(terms.joined(parts.to_vec(), DType::F32).term, &[4, 3]);
        assert_eq!(memory.read(&mesh, &mut terms, &rows(0, 4), DType::F32), Some(all));
        // Two columns cross the border between values, so no single value holds them.
        let columns = BufferSlice { offset: 0, coords: vec![], dims: vec![(4, 3), (2, 1)] };
        assert_eq!(memory.read(&mesh, &mut terms, &columns, DType::F32), None);
        // Once all rows are written again, from the last row on, they are one value.
        (0..4).rev().for_each(|k| memory.write(&mesh, &rows(k, 1), of_old(k, 1)));
        assert_eq!(memory.read(&mesh, &mut terms, &columns, DType::F32).map(|x| x.term), Some(old));
    }

    /// Nothing can be added to the rest of a zero that was partly overwritten.
    #[test]
    fn nothing_is_added_to_what_is_left_of_a_zero() {
        let mesh = Mesh::of_sizes(&Sizes::default()).expect("a mesh");
        let mut terms = Terms::default();
        let zero = terms.plain(TermKind::Fill(Real(0.0)), vec![], vec![], DType::F32);
        let x = TermView::whole(terms.plain(TermKind::Held(Op::Param(0), vec![]), vec![], vec![4], DType::F32), &[4]);
        let slice = |offset: u64, n: u64| BufferSlice { offset, coords: vec![], dims: vec![(n, 1)] };
        let mut memory = Memory::default();
        memory.write(&mesh, &slice(0, 8), TermView { term: zero, offset: 0, coords: vec![], dims: vec![Digits::new([(8, 0)])] });
        memory.write(&mesh, &slice(0, 4), x.clone());
        assert!(!memory.add(&slice(0, 2), x.clone(), zero) && !memory.add(&slice(4, 4), x, zero));
    }

    /// A body may add several times to what each microbatch leaves, but another body may not.
    #[test]
    fn what_one_body_adds_is_one_sum() {
        let mesh = Mesh::of_sizes(&Sizes::default()).expect("a mesh");
        let mut terms = Terms::default();
        let zero = terms.plain(TermKind::Fill(Real(0.0)), vec![], vec![], DType::F32);
        let [x, y] = [0, 1].map(|slot| TermView::whole(terms.plain(TermKind::Held(Op::Param(slot), vec![]), vec![], vec![4], DType::F32), &[4]));
        let slice = BufferSlice { offset: 0, coords: vec![], dims: vec![(4, 1)] };
        let filled = TermView { term: zero, offset: 0, coords: vec![], dims: vec![Digits::new([(4, 0)])] };
        let both = terms.sum_of_two([x.clone(), y.clone()], &[4], DType::F32);
        let sum = TermView::whole(terms.plain(TermKind::Sum, vec![both.clone()], vec![4], DType::F32), &[4]);
        // A sum may begin at zero, or at a value that the body has written itself.
        for (begin, want) in [(filled, sum), (x.clone(), both)] {
            let mut memory = Memory::default();
            memory.enter(1);
            memory.write(&mesh, &slice, begin.clone());
            if begin.term == zero {
                memory.enter(2);
                assert!(memory.add(&slice, x.clone(), zero));
            }
            assert!(memory.add(&slice, y.clone(), zero));
            assert_eq!(memory.read(&mesh, &mut terms, &slice, DType::F32), Some(want));
            memory.enter(3);
            assert!(!memory.add(&slice, y.clone(), zero));
        }
    }
}
