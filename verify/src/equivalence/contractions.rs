//! Sums of products in one form: over one dim, whichever steps they are taken in.

use super::rules::Rules;
use crate::terms::digits::Digits;
use crate::terms::{Labels, TermKey, TermKind, TermView};
use ir::dim::Dim;
use ir::op::{DType, Op, Reduce};

impl Rules<'_> {
    /// Brings an op that is a dot, or a sum over some dims, to one form.
    pub fn contraction(&mut self, key: TermKey) -> TermKey {
        let mut key = self.dot_of(&key).unwrap_or(key);
        if summed(&key).is_none() {
            return key;
        }
        // Operands are normalised first, because their strides give the order of the summed dims. The second round is
        // for copies whose original can be read along the joined dim but not along the separate ones.
        for _ in 0..2 {
            key.args = key.args.into_iter().map(|x| self.terms.normal(x)).collect();
            key = over_one(key);
        }
        key
    }

    /// The dot that equals a sum of two dots, if the second sums over what comes behind the first.
    pub fn sum_of_dots(&self, key: &TermKey) -> Option<TermKey> {
        let (TermKind::Op(Op::Add, _), [x, y]) = (&key.kind, key.args.as_slice()) else { return None };
        let own: Vec<u64> = key.labels.last()?.iter().map(|d| key.sizes[d.0 as usize]).collect();
        let whole = |x: &TermView| *x == TermView::whole(x.term, &own);
        let in_order = key.labels.iter().all(|row| row == &key.labels[0]);
        (in_order && whole(x) && whole(y)).then(|| both_of(self.terms.key(x.term), self.terms.key(y.term)))?
    }

    /// The dot that equals a sum of a dot over some dims, or a dot that is rounded: a dot is the rounded sum in f32.
    fn dot_of(&self, key: &TermKey) -> Option<TermKey> {
        let TermKind::Op(op, _) = &key.kind else { return None };
        let [x] = key.args.as_slice() else { return None };
        let TermKind::Op(Op::Dot { over: inner, tf32 }, maps) = &self.terms.key(x.term).kind else { return None };
        let mut dot = (**self.terms.key(x.term)).clone();
        let own = dot.labels.last()?.clone();
        if dot.dtype != DType::F32 || (x.offset, x.coords.len(), x.dims.len()) != (0, 0, own.len()) {
            return None;
        }
        let sizes: Vec<u64> = own.iter().map(|d| dot.sizes[d.0 as usize]).collect();
        for ((d, digits), whole) in own.iter().zip(&x.dims).zip(TermView::whole(x.term, &sizes).dims) {
            if *digits == whole {
                continue;
            }
            // All factors are repeated along this dim, so it was taken out of the dot. Here it is put back.
            let all = digits.extent();
            if dot.sizes[d.0 as usize] != 1 || *digits != Digits::new([(all, 0)]) {
                return None;
            }
            dot.sizes[d.0 as usize] = all;
            let rows = dot.labels.iter().zip(&mut dot.args);
            rows.flat_map(|(row, x)| row.iter().zip(&mut x.dims)).filter(|(e, _)| *e == d).for_each(|(_, x)| *x = digits.clone());
        }
        // The sum has its own names for the dims of the dot's result. They are mapped to the dot's names.
        let renamed = |d: &Dim| Some(own[key.labels[0].iter().position(|e| e == d)?]);
        let result = key.labels[1].iter().map(renamed).collect::<Option<Vec<Dim>>>()?;
        let summed = match op {
            Op::Cast if key.dtype.is_half() => vec![],
            Op::Reduce { kind: Reduce::Sum, over } if key.dtype == DType::F32 => over.iter().map(renamed).collect::<Option<Vec<Dim>>>()?,
            _ => return None,
        };
        let factors = &dot.labels[..2];
        if !summed.iter().all(|d| factors.iter().all(|row| row.contains(d))) {
            return None;
        }
        let op = Op::Dot { over: [inner.as_slice(), &summed].concat(), tf32: *tf32 };
        let labels = [factors, &[result]].concat();
        Some(TermKey { kind: TermKind::Op(op, maps.clone()), labels, dtype: key.dtype, ..dot })
    }
}

/// The dims that a dot or a sum sums over.
fn summed(key: &TermKey) -> Option<&[Dim]> {
    match &key.kind {
        TermKind::Op(Op::Dot { over, .. } | Op::Reduce { over, .. }, _) if key.labels.last().is_some_and(|own| !own.is_empty()) => Some(over),
        TermKind::Op(Op::Dot { over, .. }, _) => Some(over),
        _ => None,
    }
}

/// The digits of a dim that is summed over, and their strides in each operand.
fn steps(key: &TermKey, d: Dim) -> Option<Vec<(u64, [u64; 2])>> {
    let digits = |k: usize| key.labels[k].iter().position(|e| *e == d).map(|i| &key.args[k].dims[i]);
    match key.args.len() {
        1 => Some(digits(0)?.iter().map(|(n, s)| (n, [s, 0])).collect()),
        _ => digits(0)?.beside(digits(1)?),
    }
}

/// Joins two sums of products or of elements into one, if the second goes on where the first ends: along one digit of
/// the summed index, in all operands.
fn both_of(first: &TermKey, second: &TermKey) -> Option<TermKey> {
    let &[d] = summed(first)? else { return None };
    let sums = !matches!(&first.kind, TermKind::Op(Op::Reduce { kind, .. }, _) if *kind != Reduce::Sum);
    let alike = (&first.kind, &first.labels, first.dtype) == (&second.kind, &second.labels, second.dtype);
    let others = |key: &TermKey| key.sizes.iter().enumerate().filter(|s| s.0 != d.0 as usize).map(|s| *s.1).collect::<Vec<_>>();
    if !sums || !alike || first.dtype != DType::F32 || others(first) != others(second) {
        return None;
    }
    let at = |k: usize| first.labels[k].iter().position(|e| *e == d);
    let places: Vec<usize> = (0..first.args.len()).map(at).collect::<Option<_>>()?;
    let mut further = [0; 2];
    for (k, at) in places.iter().enumerate() {
        let (x, y) = (&first.args[k], &second.args[k]);
        let rest = |x: &TermView| x.dims.iter().enumerate().filter(|e| e.0 != *at).map(|e| e.1.clone()).collect::<Vec<_>>();
        if (x.term, &x.coords, rest(x)) != (y.term, &y.coords, rest(y)) {
            return None;
        }
        further[k] = y.offset.checked_sub(x.offset)?;
    }
    let (mut all, mut more) = (steps(first, d)?, steps(second, d)?);
    // A part of one element has no digit along which it could grow, so one is added.
    let grows = |(n, of): &(u64, [u64; 2])| (0..places.len()).all(|k| n * of[k] == further[k]) && further[0] > 0;
    let digit = match all.iter().position(grows) {
        Some(digit) => digit,
        None => {
            all.push((1, further));
            all.sort_unstable_by_key(|(n, of)| std::cmp::Reverse((*of, *n)));
            all.iter().position(grows)?
        }
    };
    if more.len() < all.len() {
        more.insert(digit, (1, all[digit].1));
    }
    let (n, m) = (all[digit].0, more[digit].0);
    all[digit].0 = m;
    if all != more {
        return None;
    }
    all[digit].0 = n + m;
    let mut out = first.clone();
    out.sizes[d.0 as usize] = all.iter().map(|s| s.0).product();
    for (k, at) in places.into_iter().enumerate() {
        out.args[k].dims[at] = Digits::new(all.iter().map(|(n, of)| (*n, of[k])));
    }
    Some(out)
}

/// Joins all summed dims of a dot or sum into one, in the order in which they lie in the first factor, then in the
/// second. The order does not matter to a sum.
fn over_one(key: TermKey) -> TermKey {
    let Some((&kept, rest)) = summed(&key).and_then(<[Dim]>::split_first) else { return key };
    let over = [&[kept], rest].concat();
    let Some(mut steps) = over.iter().map(|d| steps(&key, *d)).collect::<Option<Vec<_>>>().map(|all| all.concat()) else { return key };
    steps.sort_unstable_by_key(|(n, of)| std::cmp::Reverse((*of, *n)));
    let sizes: Vec<u64> =
        key.sizes.iter().enumerate().map(|(i, n)| if i == kept.0 as usize { steps.iter().map(|s| s.0).product() } else { *n }).collect();
    let (mut names, mut args) = (vec![], vec![]);
    for (k, (row, x)) in key.labels.iter().zip(&key.args).enumerate() {
        // The joined dim takes the position of the first summed dim.
        let first = row.iter().find(|d| over.contains(d)).copied();
        let joined = Digits::new(steps.iter().map(|(n, of)| (*n, of[k])));
        let places = row.iter().zip(&x.dims).filter(|(d, _)| Some(**d) == first || !over.contains(d));
        let (own, dims) = places.map(|(d, x)| if Some(*d) == first { (kept, joined.clone()) } else { (*d, x.clone()) }).unzip();
        names.push(own);
        args.push(TermView { dims, ..x.clone() });
    }
    names.extend(key.labels.last().cloned());
    if over.len() == 1 {
        return TermKey { args, ..key };
    }
    // Dims are renumbered by first appearance, as in all keys.
    let mut labels = Labels::default();
    let names: Vec<Vec<Dim>> = names.iter().map(|row: &Vec<Dim>| labels.list(row)).collect();
    let (over, TermKind::Op(op, maps)) = (vec![labels.of(kept)], &key.kind) else { unreachable!("invariant: it is a sum") };
    let op = match op {
        Op::Reduce { kind, .. } => Op::Reduce { kind: *kind, over },
        _ => Op::Dot { over, tf32: false },
    };
    let sizes = labels.0.iter().map(|d| sizes[d.0 as usize]).collect();
    TermKey { kind: TermKind::Op(op, maps.clone()), args, labels: names, sizes, dtype: key.dtype }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::dim::DimInfo;
    use ir::graph::{Body, Origin, Phase, Type, Value};
    use ir::mesh::Mesh;

    /// `[rows, heads, elements] x [heads, elements, columns]`: at once, and as the sum of two segments of the
    /// elements of each head, whose results have a type of their own.
    fn both(dtype: DType, of_parts: DType) -> [TermView; 2] {
        let (mesh, mut body) = (Mesh::new(1, 1, 1, 1, 1), Body::default());
        let dim = |body: &mut Body, name, n| body.dims.add(DimInfo::new(name, n));
        let [rows, heads, elements, columns] = [("rows", 3), ("heads", 5), ("elements", 8), ("columns", 7)].map(|(name, n)| dim(&mut body, name, n));
        let [part, within] = [("part", 2), ("within", 4)].map(|(name, n)| dim(&mut body, name, n));
        let mut push = |op, args, dtype, dims: &[Dim]| body.push(op, args, Type::new(dtype, dims.to_vec()), Origin::new(Phase::Forward));
        let a = push(Op::Input(0), vec![], DType::Bf16, &[rows, heads, elements]);
        let b = push(Op::Input(1), vec![], DType::Bf16, &[heads, elements, columns]);
        let whole = push(Op::dot(vec![heads, elements]), vec![a, b], dtype, &[rows, columns]);
        let view = || Op::View { from: vec![elements], to: vec![part, within] };
        let [x, y] =
            [(a, [rows, heads, part, within]), (b, [heads, part, within, columns])].map(|(v, dims)| push(view(), vec![v], DType::Bf16, &dims));
        let parts = push(Op::dot(vec![within, heads]), vec![x, y], of_parts, &[part, rows, columns]);
        let sum = push(Op::Reduce { kind: Reduce::Sum, over: vec![part] }, vec![parts], DType::F32, &[rows, columns]);
        let sum = if dtype == DType::F32 { sum } else { push(Op::Cast, vec![sum], dtype, &[rows, columns]) };
        let mut rules = Rules::new(&mesh);
        let mut made: Vec<TermView> = vec![];
        for v in body.values() {
            let args: Vec<TermView> = body[v].args.iter().map(|a| made[a.index()].clone()).collect();
            made.push(rules.node(&body, v, &args).expect("digits"));
        }
        [whole, sum].map(|v: Value| made[v.index()].clone())
    }

    #[test]
    fn a_product_in_segments_is_the_product() {
        for dtype in [DType::F32, DType::Bf16] {
            let [whole, sum] = both(dtype, DType::F32);
            assert_eq!(whole, sum);
        }
    }

    #[test]
    fn segments_that_are_rounded_are_another_sum() {
        let [whole, sum] = both(DType::Bf16, DType::Bf16);
        assert_ne!(whole, sum);
    }

    /// `[batch, tokens, words] x [batch, tokens, hidden]`, summed over batch and tokens: at once, and as the sum of
    /// two parts of the tokens, the second of which begins at `at`.
    fn over_tokens(at: u64) -> [TermView; 2] {
        let (mesh, mut body) = (Mesh::new(1, 1, 1, 1, 1), Body::default());
        let dim = |body: &mut Body, name, n| body.dims.add(DimInfo::new(name, n));
        let [batch, tokens, words, hidden] = [("batch", 3), ("tokens", 8), ("words", 5), ("hidden", 7)].map(|(name, n)| dim(&mut body, name, n));
        let parts = [("first", 4), ("second", 4)].map(|(name, n)| dim(&mut body, name, n));
        let mut push = |op, args, dims: &[Dim]| body.push(op, args, Type::new(DType::F32, dims.to_vec()), Origin::new(Phase::Forward));
        let a = push(Op::Input(0), vec![], &[batch, tokens, words]);
        let b = push(Op::Input(1), vec![], &[batch, tokens, hidden]);
        let whole = push(Op::dot(vec![batch, tokens]), vec![a, b], &[words, hidden]);
        let dots: Vec<Value> = [(parts[0], 0), (parts[1], at)]
            .into_iter()
            .map(|(part, at)| {
                let mut slice = |v, last| push(Op::Slice { from: tokens, to: Some(part), at }, vec![v], &[batch, part, last]);
                let args = vec![slice(a, words), slice(b, hidden)];
                push(Op::dot(vec![batch, part]), args, &[words, hidden])
            })
            .collect();
        let sum = push(Op::Add, dots, &[words, hidden]);
        let mut rules = Rules::new(&mesh);
        let mut made: Vec<TermView> = vec![];
        for v in body.values() {
            let args: Vec<TermView> = body[v].args.iter().map(|a| made[a.index()].clone()).collect();
            made.push(rules.node(&body, v, &args).expect("digits"));
        }
        [whole, sum].map(|v: Value| made[v.index()].clone())
    }

    #[test]
    fn sums_over_parts_that_follow_one_another_are_the_sum_over_all() {
        let [whole, sum] = over_tokens(4);
        assert_eq!(whole, sum);
        // Parts that overlap do not make up the sum.
        for at in [0, 2, 3] {
            let [whole, sum] = over_tokens(at);
            assert_ne!(whole, sum, "{at}");
        }
    }
}
