//! The one form of an access to a copy. A slice of a copy is the copy of a slice, so programs and graphs may have
//! either; and a copy is a term of its own only for views that its original cannot say in digits.

use super::digits::{Digits, LinearForm, Walk, add};
use super::{TermView, Terms};

impl Terms {
    /// The same elements, read from the original of a copy if digits can say that, else from a copy of no more than
    /// is read of it.
    pub fn normal(&mut self, mut x: TermView) -> TermView {
        while let Some((original, dtype)) = self.original(x.term) {
            if let Some(direct) = through(&x, &original) {
                x = direct;
                continue;
            }
            let Some((part, rest)) = cropped(&x, &original) else { break };
            let term = self.stored(&part, dtype).term;
            if term == x.term {
                break;
            }
            x = TermView { term, ..rest };
        }
        x
    }
}

/// What an access to a copy reads of the original, which has one dim.
pub fn through(x: &TermView, original: &TermView) -> Option<TermView> {
    let mut walk = Walk::new(&original.dims[0]);
    let dims = x.dims.iter().map(|d| stepped(&mut walk, d, 1)).collect::<Option<Vec<_>>>()?;
    let mut form: LinearForm = vec![];
    for (u, digits) in &x.coords {
        form = add(&form, &vec![(*u, stepped(&mut walk, digits, 1)?)])?;
    }
    let offset = original.offset + walk.finish(x.offset)?;
    Some(TermView { term: original.term, offset, coords: add(&original.coords, &form)?, dims })
}

/// The digits that an index leads to, counted in `unit`s.
fn stepped(walk: &mut Walk, digits: &Digits, unit: u64) -> Option<Digits> {
    let parts = digits.iter().map(|(n, s)| walk.step(n, s / unit)).collect::<Option<Vec<_>>>()?;
    Some(Digits::new(parts.iter().flat_map(Digits::iter).collect::<Vec<_>>()))
}

/// The part of the original that an access to its copy reads, and the access to a copy of that (whose term is to be
/// set). Each digit of the index is cut by itself, where the original's digits allow it.
fn cropped(x: &TermView, original: &TermView) -> Option<(TermView, TermView)> {
    let moves = |d: &(u64, u64)| d.0 > 1 && d.1 > 0;
    let of_coords = x.coords.iter().flat_map(|f| f.1.iter());
    let mut strides: Vec<u64> = x.dims.iter().flat_map(Digits::iter).chain(of_coords).filter(moves).map(|d| d.1).chain([1]).collect();
    strides.sort_unstable_by_key(|s| std::cmp::Reverse(*s));
    strides.dedup();
    let mut above = original.dims[0].extent();
    let mut sizes = vec![];
    for s in &strides {
        if *s == 0 || !above.is_multiple_of(*s) {
            return None;
        }
        sizes.push(above / s);
        above = *s;
    }
    let (mut part, mut rest) = (TermView { dims: vec![], ..original.clone() }, TermView { offset: 0, coords: vec![], ..x.clone() });
    let mut kept: Vec<(u64, u64, LinearForm)> = vec![];
    for ((stride, size), digits) in strides.iter().zip(&sizes).zip(original.dims[0].reshaped(&sizes)?) {
        let here = |d: &(u64, u64)| moves(d) && d.1 == *stride;
        let reach = |d: (u64, u64)| d.0 - 1;
        let first = x.offset / stride % size;
        let count = 1 + x.dims.iter().flat_map(Digits::iter).filter(here).map(reach).sum::<u64>();
        let coords: LinearForm = x.coords.iter().filter(|f| f.1.iter().any(|d| here(&d))).cloned().collect();
        let moved = coords.iter().flat_map(|f| f.1.iter());
        if coords.iter().any(|f| !f.1.iter().all(|d| here(&d))) || first + count + moved.map(reach).sum::<u64>() > *size {
            return None;
        }
        let mut walk = Walk::new(&digits);
        let cut = (|| {
            let inner = walk.step(count, 1)?;
            let form = coords.iter().map(|(u, d)| Some((*u, stepped(&mut walk, d, *stride)?))).collect::<Option<LinearForm>>()?;
            Some((inner, add(&part.coords, &form)?, walk.finish(first)?))
        })();
        match cut {
            Some((inner, form, offset)) => {
                part.dims.push(inner);
                part.coords = form;
                part.offset += offset;
                kept.push((count, 0, vec![]));
            }
            None => {
                part.dims.push(digits);
                kept.push((*size, first, coords));
            }
        }
    }
    let mut unit = 1;
    let mut units = vec![0; strides.len()];
    for (k, (count, first, _)) in kept.iter().enumerate().rev() {
        units[k] = unit;
        rest.offset += first * unit;
        unit *= count;
    }
    let renamed = |digits: &Digits| {
        let unit = |s: u64| strides.iter().position(|t| *t == s).map_or(0, |k| units[k]);
        Digits::new(digits.iter().map(|(n, s)| (n, unit(s))).collect::<Vec<_>>())
    };
    for (_, _, coords) in &kept {
        rest.coords = add(&rest.coords, &coords.iter().map(|(u, d)| (*u, renamed(d))).collect())?;
    }
    rest.dims = x.dims.iter().map(renamed).collect();
    Some((part.flat(), rest))
}

#[cfg(test)]
mod tests {
    use super::super::digits::Digits;
    use super::super::{TermKind, TermView, Terms};
    use ir::mesh::SubAxis;
    use ir::op::{DType, Op};

    fn source(terms: &mut Terms, n: u64) -> TermView {
        TermView::whole(terms.plain(TermKind::Held(Op::Input(0), vec![]), vec![], vec![n], DType::F32), &[n])
    }

    fn at(term: TermView, offset: u64, coords: &[(u8, u64, u64)], dims: &[&[(u64, u64)]]) -> TermView {
        let coords = coords.iter().map(|(u, n, s)| (SubAxis(*u), Digits::new([(*n, *s)]))).collect();
        TermView { term: term.term, offset, coords, dims: dims.iter().map(|d| Digits::new(d.iter().copied())).collect() }
    }

    #[test]
    fn a_slice_of_a_copy_is_the_copy_of_a_slice() {
        let mut terms = Terms::default();
        let x = source(&mut terms, 16);
        let turned = at(x.clone(), 0, &[], &[&[(2, 4), (2, 8), (4, 1)]]);
        let copy = terms.stored(&turned, DType::F32);
        let sliced = at(copy, 0, &[(1, 2, 1)], &[&[(2, 8)], &[(3, 2)]]);
        let half = terms.stored(&at(x, 0, &[(1, 2, 1)], &[&[(2, 4), (2, 8), (2, 2)]]), DType::F32);
        let other = at(half, 0, &[], &[&[(2, 4)], &[(3, 1)]]);
        assert_eq!(terms.normal(sliced.clone()), other);
        assert_eq!(terms.normal(other.clone()), other);
        let shifted = TermView { offset: 2, ..sliced };
        assert_ne!(terms.normal(shifted), other);
    }

    #[test]
    fn what_digits_can_say_of_the_original_is_no_copy() {
        let mut terms = Terms::default();
        let x = source(&mut terms, 16);
        let copy = terms.stored(&at(x.clone(), 0, &[], &[&[(4, 1), (4, 4)]]), DType::F32);
        assert_eq!(terms.normal(at(copy.clone(), 2, &[(0, 2, 8)], &[&[(2, 4)], &[(2, 1)]])), at(x.clone(), 8, &[(0, 2, 2)], &[&[(2, 1)], &[(2, 4)]]));
        assert_eq!(terms.normal(copy), at(x, 0, &[], &[&[(4, 1), (4, 4)]]));
    }
}
