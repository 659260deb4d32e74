//! Ops of parts of the operands of other ops, as parts of their results.

use crate::terms::digits::{Digits, LinearForm, add};
use crate::terms::memory::{BufferSlice, find};
use crate::terms::normal::through;
use crate::terms::{Term, TermKey, TermKind, TermView};
use ir::dim::Dim;
use ir::mesh::Mesh;
use ir::op::Op;

/// The dims of an op that are missing in its result.
fn summed(key: &TermKey) -> &[Dim] {
    match &key.kind {
        TermKind::Op(Op::Dot { over, .. } | Op::Reduce { over, .. }, _) => over,
        // A gather and an argmax read all of their dim, so it counts as summed.
        TermKind::Op(Op::Gather { dim } | Op::ArgMax { over: dim }, _) => std::slice::from_ref(dim),
        _ => &[],
    }
}

/// The view of `old` that `new` is, if both are the same op of alike operands. Each element of the result follows
/// from the operands' elements at the same position, or from all of them along summed dims. The view is guessed from
/// the operands' offsets and strides, and then checked for each operand.
pub fn part_of(mesh: &Mesh, term: Term, old: &TermKey, new: &TermKey) -> Option<TermView> {
    let (Some(olds), Some(news)) = (old.labels.last(), new.labels.last()) else { return None };
    let digits = |key: &TermKey, k: usize, d: Dim| key.labels[k].iter().position(|e| *e == d).map(|i| key.args[k].dims[i].clone());
    for (d, e) in summed(old).iter().zip(summed(new)) {
        if (0..old.args.len()).any(|k| digits(old, k, *d) != digits(new, k, *e)) {
            return None;
        }
    }
    let size = |key: &TermKey, d: Dim| key.sizes[d.0 as usize];
    let arranged = |key: &TermKey, k: usize, own: &[Dim]| -> Vec<Digits> {
        own.iter().map(|d| digits(key, k, *d).unwrap_or_else(|| Digits::new([(size(key, *d), 0)]))).collect()
    };
    let mut strides = vec![1; olds.len()];
    for k in (1..olds.len()).rev() {
        strides[k - 1] = strides[k] * size(old, olds[k]);
    }
    let mut out = TermView { term, offset: 0, coords: vec![], dims: news.iter().map(|d| Digits::new([(size(new, *d), 0)])).collect() };
    let mut known = vec![false; olds.len()];
    for k in 0..old.args.len() {
        let (from, to) = (&old.args[k], &new.args[k]);
        let mut lies = vec![];
        let mut tells = false;
        for (i, d) in arranged(old, k, olds).iter().enumerate() {
            let mut step = if known[i] { 0 } else { strides[i] };
            let whole = d.iter().all(|a| a.1 > 0);
            for (n, s) in d.iter().rev() {
                if s > 0 {
                    lies.push((n, s, step));
                }
                step *= n;
            }
            tells |= whole && !known[i] && d.extent() > 1;
            known[i] |= whole;
        }
        if !tells {
            continue;
        }
        let coords: LinearForm = to.coords.iter().filter(|c| !from.coords.contains(c)).cloned().collect();
        let spread = coords.iter().map(|(u, d)| match d.iter().collect::<Vec<_>>().as_slice() {
            [(_, s)] => Some((*u, *s)),
            _ => None,
        });
        let dims = arranged(new, k, news);
        let slice = BufferSlice { offset: to.offset, coords: spread.collect::<Option<_>>()?, dims: dims.iter().flat_map(Digits::iter).collect() };
        let (layout, holds) = in_rows(lies).into_iter().map(|(n, s, step)| ((n, s), Digits::new([(n, step)]))).unzip();
        let found = find(mesh, from.offset, layout, TermView { term, offset: 0, coords: vec![], dims: holds }, &slice)?;
        let mut atoms = found.dims.iter();
        for (own, digits) in out.dims.iter_mut().zip(&dims) {
            let here: Vec<(u64, u64)> = atoms.by_ref().take(digits.iter().count()).flat_map(Digits::iter).collect();
            // Each operand may determine some digits of the index.
            *own = own.plus(&Digits::new(here))?;
        }
        out.offset += found.offset;
        out.coords = add(&out.coords, &found.coords)?;
    }
    let holds = |k: &usize| {
        let (from, to) = (&old.args[*k], &new.args[*k]);
        let all = Digits::new(arranged(old, *k, olds).iter().flat_map(Digits::iter).collect::<Vec<_>>());
        let reached = through(&out, &TermView { dims: vec![all], ..from.clone() });
        reached.is_some_and(|x| (x.offset, &x.coords) == (to.offset, &to.coords) && x.dims == arranged(new, *k, news))
    };
    (0..old.args.len()).all(|k| holds(&k)).then_some(out)
}

/// Extents with their strides in an operand and in a result. Neighbours that continue each other in both are joined,
/// since a part may begin and end anywhere in such a row.
fn in_rows(mut all: Vec<(u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    all.sort_unstable_by_key(|d| std::cmp::Reverse(d.1));
    let mut out: Vec<(u64, u64, u64)> = vec![];
    for (n, s, step) in all.into_iter().filter(|d| d.0 > 1) {
        match out.last_mut() {
            Some(last) if (last.1, last.2) == (n * s, n * step) => *last = (last.0 * n, s, step),
            _ => out.push((n, s, step)),
        }
    }
    out
}
