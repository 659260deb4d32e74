//! Sums of products in one form: over one dim, whichever steps they are taken in.

use super::rules::Rules;
use crate::terms::digits::Digits;
use crate::terms::{Access, Key, Labels, What};
use ir::dim::Dim;
use ir::op::{DType, Op, Reduce};

impl Rules<'_> {
    /// An op in the form that a dot has, if it is one.
    pub fn contraction(&mut self, key: Key) -> Key {
        let mut key = self.dot_of(&key).unwrap_or(key);
        if !matches!(key.what, What::Op(Op::Dot { .. }, _)) {
            return key;
        }
        // Strides of what operands are of give the order, so these come first; and one dim of a copy may be digits of
        // what it is of where several were not.
        for _ in 0..2 {
            key.args = key.args.into_iter().map(|x| self.terms.normal(x)).collect();
            key = over_one(key);
        }
        key
    }

    /// What a sum over dims of a dot is, or a dot that is rounded: a dot by itself. A dot is the rounded sum in f32.
    fn dot_of(&self, key: &Key) -> Option<Key> {
        let What::Op(op, _) = &key.what else { return None };
        let [x] = key.args.as_slice() else { return None };
        let What::Op(Op::Dot { over: inner, tf32 }, maps) = &self.terms.key(x.term).what else { return None };
        let mut dot = (**self.terms.key(x.term)).clone();
        let own = dot.labels.last()?.clone();
        if dot.dtype != DType::F32 || (x.offset, x.coords.len(), x.dims.len()) != (0, 0, own.len()) {
            return None;
        }
        let sizes: Vec<u64> = own.iter().map(|d| dot.sizes[d.0 as usize]).collect();
        for ((d, digits), whole) in own.iter().zip(&x.dims).zip(Access::whole(x.term, &sizes).dims) {
            if *digits == whole {
                continue;
            }
            // A dim along which all factors are spread out, which was taken from the dot.
            let all = digits.extent();
            if dot.sizes[d.0 as usize] != 1 || *digits != Digits::new([(all, 0)]) {
                return None;
            }
            dot.sizes[d.0 as usize] = all;
            let rows = dot.labels.iter().zip(&mut dot.args);
            rows.flat_map(|(row, x)| row.iter().zip(&mut x.dims)).filter(|(e, _)| *e == d).for_each(|(_, x)| *x = digits.clone());
        }
        // The dot's names of the dims of its result, which the sum calls something else.
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
        Some(Key { what: What::Op(op, maps.clone()), labels, dtype: key.dtype, ..dot })
    }
}

/// A dot that sums over one dim: all that it sums over, in the order in which that lies in the first factor, then in
/// the second. In which order it is taken is all one to a sum.
fn over_one(key: Key) -> Key {
    let What::Op(Op::Dot { over, tf32 }, maps) = &key.what else { return key };
    let Some((&kept, rest)) = over.split_first() else { return key };
    let digits = |k: usize, d: &Dim| key.labels[k].iter().position(|e| e == d).map(|i| &key.args[k].dims[i]);
    let Some(mut steps) = over.iter().map(|d| digits(0, d)?.beside(digits(1, d)?)).collect::<Option<Vec<_>>>().map(|all| all.concat()) else {
        return key;
    };
    steps.sort_unstable_by_key(|(n, of)| std::cmp::Reverse((*of, *n)));
    let sizes: Vec<u64> =
        key.sizes.iter().enumerate().map(|(i, n)| if i == kept.0 as usize { steps.iter().map(|s| s.0).product() } else { *n }).collect();
    let (mut names, mut args) = (vec![], vec![]);
    for (k, (row, x)) in key.labels.iter().zip(&key.args).enumerate() {
        // In the place of the first of them.
        let first = row.iter().find(|d| over.contains(d)).copied();
        let joined = Digits::new(steps.iter().map(|(n, of)| (*n, of[k])));
        let places = row.iter().zip(&x.dims).filter(|(d, _)| Some(**d) == first || !over.contains(d));
        let (own, dims) = places.map(|(d, x)| if Some(*d) == first { (kept, joined.clone()) } else { (*d, x.clone()) }).unzip();
        names.push(own);
        args.push(Access { dims, ..x.clone() });
    }
    names.extend(key.labels.last().cloned());
    if rest.is_empty() {
        return Key { args, ..key };
    }
    // Numbers of dims in the order in which they come, as all keys have them.
    let mut labels = Labels::default();
    let names: Vec<Vec<Dim>> = names.iter().map(|row: &Vec<Dim>| labels.list(row)).collect();
    let op = Op::Dot { over: vec![labels.of(kept)], tf32: *tf32 };
    let sizes = labels.0.iter().map(|d| sizes[d.0 as usize]).collect();
    Key { what: What::Op(op, maps.clone()), args, labels: names, sizes, dtype: key.dtype }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::dim::DimInfo;
    use ir::graph::{Body, Origin, Phase, Type, Value};
    use ir::mesh::Mesh;

    /// `[rows, heads, elements] x [heads, elements, columns]`: at once, and as the sum of two segments of the
    /// elements of each head, whose results have a type of their own.
    fn both(dtype: DType, of_parts: DType) -> [Access; 2] {
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
        let mut made: Vec<Access> = vec![];
        for v in body.values() {
            let args: Vec<Access> = body[v].args.iter().map(|a| made[a.index()].clone()).collect();
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
}
