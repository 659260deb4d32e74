//! Sums, over elements, microbatches, ranks and pipeline stages, in one form.

use super::rules::{Rules, SubAxisBits, bits, in_rank_order, of_coords, own_part};
use crate::terms::digits::Digits;
use crate::terms::normal::through;
use crate::terms::{Term, TermKey, TermKind, TermView};
use ir::dim::Dim;
use ir::graph::{Body, Value};
use ir::mesh::SubAxis;
use ir::op::{Collective, DType, Op, Reduce};

/// The rank of a linear, elementwise function: sums over microbatches come before sums over ranks. `None` for any
/// other function.
fn rank(function: &TermKind) -> Option<u8> {
    match function {
        TermKind::Sum | TermKind::Last => Some(0),
        TermKind::Exchange { kind: Collective::AllReduce(_), stages: None, .. } => Some(1),
        TermKind::Exchange { .. } | TermKind::Op(..) | TermKind::Held(..) | TermKind::Stored | TermKind::Joined | TermKind::Parts(_) => None,
        TermKind::Message { .. } | TermKind::Met(_) | TermKind::Fill(_) | TermKind::Unknown(_) => None,
    }
}

fn is_sum(function: &TermKind) -> bool {
    rank(function).is_some() && !matches!(function, TermKind::Exchange { kind: Collective::AllReduce(Reduce::Max | Reduce::Any), .. })
}

impl Rules<'_> {
    /// The sum of scalars, flattened so that no term is itself a sum.
    pub fn sum(&mut self, args: Vec<TermView>) -> TermView {
        let mut terms: Vec<TermView> = vec![];
        for x in args {
            let key = self.terms.key(x.term);
            match &key.kind {
                TermKind::Op(Op::Add, _) if key.labels.last().is_some_and(Vec::is_empty) && key.dtype == DType::F32 => {
                    terms.extend(key.args.iter().cloned())
                }
                _ if self.is_zero(x.term) => {}
                _ => terms.push(x),
            }
        }
        terms.sort_by(|a, b| (a.term, a.offset, &a.coords, &a.dims).cmp(&(b.term, b.offset, &b.coords, &b.dims)));
        match terms.len() {
            0 => self.zero(DType::F32),
            1 => terms.remove(0),
            n => {
                let key = TermKey { kind: TermKind::Op(Op::Add, vec![]), args: terms, labels: vec![vec![]; n + 1], sizes: vec![], dtype: DType::F32 };
                TermView::whole(self.terms.intern(key), &[])
            }
        }
    }

    /// Reduces all elements of a value, in whatever order they come and whichever rank has them.
    pub fn reduce(&mut self, kind: Reduce, x: &TermView, dtype: DType) -> TermView {
        let sums = kind == Reduce::Sum;
        if sums && self.is_zero(x.term) {
            return self.zero(dtype);
        }
        if let Some(of) = self.summed(kind, x) {
            return self.reduce(kind, &of, dtype);
        }
        let apart = of_coords(x);
        let mut digits: Vec<(u64, u64)> = x.dims.iter().flat_map(Digits::iter).collect();
        let parts = sums && apart != 0 && self.varies(x.term) & apart == 0;
        if parts {
            digits.extend(x.coords.iter().flat_map(|c| c.1.iter()));
        }
        digits.sort_unstable_by_key(|d| std::cmp::Reverse((d.1, d.0)));
        let all = Digits::new(digits);
        let n = all.extent();
        let coords = if parts { vec![] } else { x.coords.clone() };
        let x = TermView { dims: vec![all], coords, ..x.clone() };
        let subs: Vec<SubAxis> = self.mesh.ids().filter(|u| parts && apart & bits([u]) != 0).collect();
        let kind = TermKind::Op(Op::Reduce { kind, over: vec![Dim(0)] }, vec![]);
        let key = TermKey { kind, args: vec![x], labels: vec![vec![Dim(0)], vec![]], sizes: vec![n], dtype };
        let out = TermView::whole(self.terms.intern(key), &[]);
        if parts { self.parts(&subs, vec![out], dtype) } else { out }
    }

    /// The value whose sums `x` holds, each once. The sum of `x` is then the sum of all elements of that value.
    fn summed(&self, kind: Reduce, x: &TermView) -> Option<TermView> {
        let key = self.terms.key(x.term);
        let TermKind::Op(Op::Reduce { kind: inner, .. }, _) = &key.kind else { return None };
        let all: u64 = key.labels.last()?.iter().map(|d| key.sizes[d.0 as usize]).product();
        let mut digits: Vec<(u64, u64)> = x.dims.iter().flat_map(Digits::iter).filter(|d| d.0 > 1).collect();
        digits.sort_unstable_by_key(|d| d.1);
        let dense = digits.iter().try_fold(1, |next, (n, stride)| (*stride == next).then_some(next * n));
        let is_all = x.coords.is_empty() && x.offset == 0 && dense == Some(all);
        (kind == *inner && kind == Reduce::Sum && is_all).then(|| key.args[0].flat())
    }

    /// A scalar of which each rank has a part. The scalar is the sum of all parts.
    pub fn parts(&mut self, subs: &[SubAxis], of: Vec<TermView>, dtype: DType) -> TermView {
        TermView::whole(self.terms.plain(TermKind::Parts(subs.to_vec()), of, vec![], dtype), &[])
    }

    /// The sub-axes along which a linear function sums.
    fn along(&self, function: &TermKind) -> SubAxisBits {
        match function {
            TermKind::Exchange { subs, .. } => bits(subs),
            _ => bits(&self.batches()),
        }
    }

    /// A linear function of a value, element by element: the elements of the function of the whole term.
    pub fn linear(&mut self, function: &TermKind, x: &TermView, dtype: DType) -> TermView {
        if of_coords(x) & self.along(function) == 0 {
            let whole = self.of_whole(function, x.term, dtype);
            if let Some(out) = through(x, &whole) {
                return out;
            }
        }
        let sizes: Vec<u64> = x.dims.iter().map(Digits::extent).collect();
        TermView::whole(self.terms.plain(function.clone(), vec![x.flat()], sizes.clone(), dtype), &sizes)
    }

    /// A sum over ranks, restricted to some of its sub-axes.
    fn over(&self, function: &TermKind, keep: impl Fn(&SubAxis) -> bool) -> Option<TermKind> {
        let TermKind::Exchange { kind, subs, stages } = function else { return None };
        let subs: Vec<SubAxis> = subs.iter().copied().filter(keep).collect();
        (!subs.is_empty()).then(|| TermKind::Exchange { kind: *kind, subs, stages: stages.clone() })
    }

    fn of_whole(&mut self, function: &TermKind, term: Term, dtype: DType) -> TermView {
        if let Some(x) = self.linear.get(&(function.clone(), term)) {
            return x.clone();
        }
        let (key, along) = (self.terms.key(term).clone(), self.along(function));
        let scalar = key.labels.last().is_some_and(Vec::is_empty);
        let out = match &key.kind {
            _ if !is_sum(function) => None,
            TermKind::Op(Op::Const(_), _) if self.is_zero(term) => Some(TermView::whole(term, &[1])),
            TermKind::Op(Op::Select, _) if self.is_zero(key.args[2].term) => {
                let apart = self.varies(key.args[0].term) | of_coords(&key.args[0]) | of_coords(&key.args[1]);
                (apart & along == 0).then(|| {
                    let x = self.linear(function, &key.args[1], dtype);
                    self.apply(TermKey { args: vec![key.args[0].clone(), x, key.args[2].clone()], ..(*key).clone() }).flat()
                })
            }
            TermKind::Op(Op::Add, _) if scalar && key.dtype == DType::F32 => {
                let terms = key.args.iter().map(|x| self.linear(function, x, dtype)).collect();
                Some(self.sum(terms).flat())
            }
            TermKind::Met(stages) => {
                let terms = key.args.iter().map(|x| self.linear(function, x, dtype)).collect();
                Some(self.met(stages.clone(), terms, dtype))
            }
            TermKind::Parts(subs) if matches!(function, TermKind::Exchange { subs: all, .. } if subs.iter().all(|u| all.contains(u))) => {
                let sum = self.sum(key.args.clone()).flat();
                Some(self.over(function, |u| !subs.contains(u)).map_or(sum.clone(), |rest| self.linear(&rest, &sum, dtype)))
            }
            // A sum over ranks of a sum over other ranks is one sum over both sets of sub-axes.
            TermKind::Exchange { kind: Collective::AllReduce(Reduce::Sum), subs, stages: None }
                if rank(function) == Some(1) && bits(subs) & along == 0 =>
            {
                let subs = self.mesh.ids().filter(|u| (bits(subs) | along) & bits([u]) != 0).collect();
                let all = TermKind::Exchange { kind: Collective::AllReduce(Reduce::Sum), subs, stages: None };
                Some(self.linear(&all, &key.args[0], dtype))
            }
            inner if is_sum(inner) && rank(inner) > rank(function) => {
                let x = self.linear(function, &key.args[0], dtype);
                Some(self.linear(inner, &x, dtype).flat())
            }
            _ => None,
        };
        let out = out.unwrap_or_else(|| {
            let count = key.count();
            TermView::whole(self.terms.plain(function.clone(), vec![TermView::whole(term, &[count])], vec![count], dtype), &[count])
        });
        self.linear.insert((function.clone(), term), out.clone());
        out
    }

    /// The sum of the values that pipeline stages give, in one dim each. The stages of each list give one of them.
    pub fn met(&mut self, stages: Vec<Vec<u64>>, given: Vec<TermView>, dtype: DType) -> TermView {
        let count = given.first().map_or(1, |x| x.flat().dims[0].extent());
        let mut given: Vec<(Vec<u64>, TermView)> =
            stages.into_iter().zip(given.iter().map(TermView::flat)).filter(|g| !self.is_zero(g.1.term)).collect();
        given.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let Some((_, x)) = given.first().cloned() else {
            return TermView { dims: vec![Digits::new([(count, 0)])], ..self.zero(dtype) };
        };
        let size = |x: &TermView, rules: &Self| rules.terms.key(x.term).count();
        let all = size(&x, self);
        let alike = given.iter().all(|(_, y)| (y.offset, &y.coords, &y.dims) == (x.offset, &x.coords, &x.dims) && size(y, self) == all);
        if alike && x != TermView::whole(x.term, &[all]) {
            let (stages, terms) = given.iter().cloned().map(|(s, y)| (s, TermView::whole(y.term, &[all]))).unzip();
            let whole = self.met(stages, terms, dtype);
            if let Some(out) = through(&x, &whole) {
                return out;
            }
        } else if let Some(masked) = self.met_masked(&given, dtype).filter(|_| alike) {
            return masked;
        }
        let (stages, args): (Vec<Vec<u64>>, Vec<TermView>) = given.into_iter().unzip();
        let labels = vec![vec![Dim(0)]; args.len() + 1];
        self.known(TermKey { kind: TermKind::Met(stages), args, labels, sizes: vec![count], dtype }, &[count])
    }

    /// The masked sum of values that have the same mask.
    fn met_masked(&mut self, given: &[(Vec<u64>, TermView)], dtype: DType) -> Option<TermView> {
        let keys: Vec<_> = given.iter().map(|(_, x)| self.terms.key(x.term).clone()).collect();
        let first = keys.first()?.clone();
        let masks = |k: &TermKey| k.kind == first.kind && (&k.labels, &k.sizes, &k.args[0]) == (&first.labels, &first.sizes, &first.args[0]);
        let zero = |k: &TermKey| k.args.len() == 3 && self.is_zero(k.args[2].term);
        if first.kind != TermKind::Op(Op::Select, vec![]) || !keys.iter().all(|k| masks(k) && zero(k)) {
            return None;
        }
        let sizes: Vec<u64> = first.args[1].dims.iter().map(Digits::extent).collect();
        let stages = given.iter().map(|g| g.0.clone()).collect();
        let sum = self.met(stages, keys.iter().map(|k| k.args[1].flat()).collect(), dtype);
        let sum = TermView { dims: sum.dims[0].reshaped(&sizes)?, ..sum };
        Some(self.apply(TermKey { args: vec![first.args[0].clone(), sum, first.args[2].clone()], ..(*first).clone() }).flat())
    }

    /// The result of a collective on a value.
    pub fn collective(&mut self, body: &Body, v: Value, x: &TermView) -> TermView {
        let node = &body[v];
        let Op::Collective { kind, subs, stages, part } = &node.op else { unreachable!("invariant: it is a collective") };
        let (own, arg) = (body.dims_of(v), body.dims_of(node.args[0]));
        let (subs, dtype) = (in_rank_order(subs), node.ty.dtype);
        let found = match kind {
            Collective::AllReduce(_) if own == arg => {
                return self.linear(&TermKind::Exchange { kind: *kind, subs, stages: stages.clone() }, x, dtype);
            }
            Collective::ReduceScatter(r) if stages.is_none() && arg.split_first().is_some_and(|(p, rest)| Some(*p) == *part && rest == own) => {
                self.scattered(*r, &subs, x, dtype)
            }
            Collective::AllGather if stages.is_none() && own.split_first().is_some_and(|(p, rest)| Some(*p) == *part && rest == arg) => {
                self.gathered(&subs, x, dtype)
            }
            Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::AllGather | Collective::AllToAll | Collective::Shift => None,
        };
        found.unwrap_or_else(|| {
            let sizes: Vec<u64> = own.iter().map(|d| body.dims.size(*d)).collect();
            let kind = TermKind::Exchange { kind: *kind, subs, stages: stages.clone() };
            TermView::whole(self.terms.plain(kind, vec![x.flat()], vec![sizes.iter().product()], dtype), &sizes)
        })
    }

    /// A reduce-scatter of parts along the first dim: each rank's own part of the sum.
    fn scattered(&mut self, r: Reduce, subs: &[SubAxis], x: &TermView, dtype: DType) -> Option<TermView> {
        if of_coords(x) & bits(subs) != 0 {
            return None;
        }
        let kind = TermKind::Exchange { kind: Collective::AllReduce(r), subs: subs.to_vec(), stages: None };
        own_part(self.mesh, subs, &self.linear(&kind, x, dtype))
    }

    /// The result of an all-gather, whose first dim is the member. If a coordinate told the parts apart, it is the
    /// whole value; else it has each member's value.
    pub fn gathered(&mut self, subs: &[SubAxis], x: &TermView, dtype: DType) -> Option<TermView> {
        let alike = self.varies(x.term) & bits(subs) == 0;
        let count = self.terms.key(x.term).count();
        let mut member: Vec<(u64, u64)> = vec![];
        let mut step = if alike { 0 } else { count };
        for u in subs.iter().rev() {
            let n = self.mesh[*u].size;
            let of_coord: Vec<(u64, u64)> = match x.coords.iter().find(|c| c.0 == *u) {
                Some((_, digits)) => digits.iter().collect(),
                None => vec![(n, 0)],
            };
            match of_coord.as_slice() {
                all if alike => member.extend(all.iter().rev()),
                [(_, s)] => member.push((n, step + s)),
                _ => return None,
            }
            step *= n;
        }
        let mut dims = vec![Digits::new(member.into_iter().rev())];
        dims.extend(x.dims.iter().cloned());
        let coords = x.coords.iter().filter(|c| !subs.contains(&c.0)).cloned().collect();
        let term = if alike {
            x.term
        } else {
            let kind = TermKind::Exchange { kind: Collective::AllGather, subs: subs.to_vec(), stages: None };
            let all = subs.iter().map(|u| self.mesh[*u].size).product::<u64>() * count;
            self.terms.plain(kind, vec![TermView::whole(x.term, &[count])], vec![all], dtype)
        };
        Some(TermView { term, offset: x.offset, coords, dims })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::mesh::{Axis, Sizes};

    const EXCHANGE: fn(Collective, Vec<SubAxis>) -> TermKind = |kind, subs| TermKind::Exchange { kind, subs, stages: None };

    fn input(rules: &mut Rules, k: u32, sizes: &[u64]) -> TermView {
        TermView::whole(rules.terms.plain(TermKind::Held(Op::Input(k), vec![]), vec![], sizes.to_vec(), DType::F32), sizes)
    }

    /// `dot(a, b, over: 1)` of operands in dims `[0, 1]` and `[1, 2]`.
    fn product(rules: &mut Rules, a: &TermView, b: &TermView) -> TermView {
        let sizes = vec![a.dims[0].extent(), a.dims[1].extent(), b.dims[1].extent()];
        let labels = [[0, 1], [1, 2], [0, 2]].map(|l| l.map(Dim).to_vec()).to_vec();
        let kind = TermKind::Op(Op::dot(vec![Dim(1)]), vec![]);
        rules.apply(TermKey { kind, args: vec![a.clone(), b.clone()], labels, sizes, dtype: DType::F32 })
    }

    #[test]
    fn a_product_of_some_rows_is_these_rows_of_the_product() {
        let mesh = ir::mesh::Mesh::new(1, 1, 1, 1, 1);
        let mut rules = Rules::new(&mesh);
        let (a, b) = (input(&mut rules, 0, &[6, 4]), input(&mut rules, 1, &[4, 5]));
        let all = product(&mut rules, &a, &b);
        let rows = a.part(&mesh, 0, 2, &vec![], &[(3, 1)]).expect("rows");
        assert_eq!(product(&mut rules, &rows, &b), all.part(&mesh, 0, 2, &vec![], &[(3, 1)]).expect("rows"));
        // A part along a summed dim does not make a part of the result.
        let half = |x: &TermView, k: usize| x.part(&mesh, k, 0, &vec![], &[(2, 1)]).expect("half");
        assert_ne!(product(&mut rules, &half(&a, 1), &half(&b, 0)).term, all.term);
    }

    /// This is how a gather of ranks' parts of a sliced dim lies in memory: 36 is no multiple of 16, nor more than 3
    /// times 16.
    #[test]
    fn rows_may_lie_closer_than_strides_nest() {
        let mesh = ir::mesh::Mesh::new(1, 1, 1, 1, 1);
        let mut rules = Rules::new(&mesh);
        let (x, b) = (input(&mut rules, 0, &[72]), input(&mut rules, 1, &[2, 5]));
        let rows =
            |digits: &[(u64, u64)], offset| TermView { offset, dims: vec![Digits::new(digits.iter().copied()), Digits::new([(2, 1)])], ..x.clone() };
        let all = product(&mut rules, &rows(&[(2, 36), (3, 16), (2, 2)], 0), &b);
        for k in 0..2 {
            let chunk = product(&mut rules, &rows(&[(2, 36), (3, 16)], 2 * k), &b);
            let part = TermView { offset: 5 * k, dims: vec![Digits::new([(2, 30), (3, 10)]), Digits::new([(5, 1)])], ..all.clone() };
            assert_eq!(chunk, part);
        }
    }

    /// Ranks' parts of a flat bucket are such parts: a quarter of `[6, 4, 4, 4]` begins and ends within a row.
    #[test]
    fn part_of_an_op_may_begin_within_a_row() {
        let mesh = ir::mesh::Mesh::of_sizes(&Sizes { dp: 2, cp: 2, ..Sizes::default() }).expect("a mesh");
        let mut rules = Rules::new(&mesh);
        let x = input(&mut rules, 0, &[6, 4, 4, 4]);
        let square = |rules: &mut Rules, x: &TermView| {
            let sizes: Vec<u64> = x.dims.iter().map(Digits::extent).collect();
            let labels = vec![(0..sizes.len() as u32).map(Dim).collect::<Vec<_>>(); 3];
            let kind = TermKind::Op(Op::Binary(ir::op::Binary::Mul), vec![]);
            rules.apply(TermKey { kind, args: vec![x.clone(), x.clone()], labels, sizes, dtype: DType::F32 })
        };
        let all = square(&mut rules, &x);
        let subs: Vec<SubAxis> = mesh.ids().collect();
        let parts = |x: &TermView| TermView { dims: x.flat().dims[0].reshaped(&[4, 96]).expect("parts"), ..x.clone() };
        let own = own_part(&mesh, &subs, &parts(&x)).expect("a part");
        assert_eq!(square(&mut rules, &own), own_part(&mesh, &subs, &parts(&all)).expect("a part"));
    }

    #[test]
    fn the_gathered_parts_of_a_sum_are_the_sum() {
        let mesh = ir::mesh::Mesh::of_sizes(&Sizes { dp: 4, ..Sizes::default() }).expect("a mesh");
        let subs: Vec<SubAxis> = mesh.of(Axis::Dp).collect();
        let mut rules = Rules::new(&mesh);
        let x = input(&mut rules, 0, &[4, 3]);
        let sum = rules.linear(&EXCHANGE(Collective::AllReduce(Reduce::Sum), subs.clone()), &x, DType::F32);
        let own = rules.scattered(Reduce::Sum, &subs, &x, DType::F32).expect("parts");
        assert_eq!((own.dims.len(), own.coords.len()), (1, 2));
        assert_eq!(rules.gathered(&subs, &own, DType::F32), Some(sum.clone()));
        // The parts' sums, added up over all ranks, are the sum of the whole.
        let parts = rules.reduce(Reduce::Sum, &own, DType::F32);
        let whole = rules.reduce(Reduce::Sum, &sum, DType::F32);
        assert_ne!(parts, whole);
        assert_eq!(rules.linear(&EXCHANGE(Collective::AllReduce(Reduce::Sum), subs), &parts, DType::F32), whole);
    }

    #[test]
    fn the_sum_of_all_sums_is_that_of_the_elements_and_of_some_is_not() {
        let mesh = ir::mesh::Mesh::new(1, 1, 1, 1, 1);
        let mut rules = Rules::new(&mesh);
        let x = input(&mut rules, 0, &[6, 4]);
        let over = |dims: &[u32]| Op::Reduce { kind: Reduce::Sum, over: dims.iter().map(|d| Dim(*d)).collect() };
        let labels = vec![vec![Dim(0), Dim(1)], vec![Dim(0)]];
        let rows =
            rules.apply(TermKey { kind: TermKind::Op(over(&[1]), vec![]), args: vec![x.clone()], labels, sizes: vec![6, 4], dtype: DType::F32 });
        let whole = rules.reduce(Reduce::Sum, &x.flat(), DType::F32);
        assert_eq!(rules.reduce(Reduce::Sum, &rows, DType::F32), whole);
        let some = |n: u64, stride: u64| TermView { dims: vec![Digits::new([(n, stride)])], ..rows.clone() };
        for part in [some(5, 1), some(3, 2), some(6, 0), TermView { offset: 1, ..some(5, 1) }] {
            assert_ne!(rules.reduce(Reduce::Sum, &part, DType::F32), whole);
        }
        assert_ne!(rules.reduce(Reduce::Max, &rows, DType::F32), rules.reduce(Reduce::Max, &x.flat(), DType::F32));
    }

    #[test]
    fn what_ranks_have_by_themselves_is_gathered_and_not_taken_for_the_same() {
        let mesh = ir::mesh::Mesh::of_sizes(&Sizes { tp: 2, ..Sizes::default() }).expect("a mesh");
        let subs: Vec<SubAxis> = mesh.of(Axis::Tp).collect();
        let mut rules = Rules::new(&mesh);
        let kind = TermKind::Message { hops: 1, channel: ir::op::Channel(0), number: 0 };
        let x = TermView::whole(rules.terms.plain(kind, vec![], vec![3], DType::F32), &[3]);
        let all = rules.gathered(&subs, &x, DType::F32).expect("parts");
        assert_ne!(all.term, x.term);
        assert_eq!(all.dims, vec![Digits::new([(2, 3)]), Digits::new([(3, 1)])]);
    }

    #[test]
    fn a_sum_over_stages_goes_with_parts_and_sums_over_ranks_but_not_with_what_one_stage_does() {
        let mesh = ir::mesh::Mesh::of_sizes(&Sizes { dp: 2, ..Sizes::default() }).expect("a mesh");
        let subs: Vec<SubAxis> = mesh.of(Axis::Dp).collect();
        let mut rules = Rules::new(&mesh);
        let given: Vec<TermView> = (0..3).map(|k| input(&mut rules, k, &[4])).collect();
        let stages = || vec![vec![0], vec![1, 2], vec![3]];
        let over = EXCHANGE(Collective::AllReduce(Reduce::Sum), subs.clone());
        let whole = rules.met(stages(), given.clone(), DType::F32);
        let sum = rules.linear(&over, &whole, DType::F32);
        // Each stage scatters its own term before the sum over stages.
        let own: Vec<TermView> = given
            .iter()
            .map(|x| {
                rules
                    .scattered(Reduce::Sum, &subs, &TermView { dims: x.dims[0].reshaped(&[2, 2]).expect("parts"), ..x.clone() }, DType::F32)
                    .expect("parts")
            })
            .collect();
        let met = rules.met(stages(), own.clone(), DType::F32);
        assert_eq!(rules.gathered(&subs, &met, DType::F32).map(|x| x.flat()), Some(sum));
        let mixed = vec![own[0].clone(), own[1].clone(), own[1].clone()];
        assert_ne!(rules.met(stages(), mixed, DType::F32), met);
        // A stage that adds zero makes no difference.
        let zero = TermView { dims: vec![Digits::new([(4, 0)])], ..rules.zero(DType::F32) };
        let two = rules.met(vec![vec![0], vec![3]], vec![given[0].clone(), given[2].clone()], DType::F32);
        assert_eq!(rules.met(stages(), vec![given[0].clone(), zero, given[2].clone()], DType::F32), two);
    }
}
