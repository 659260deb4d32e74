//! One form for what graphs may say in several ways: terms of ops on parts of values, of sums over ranks, and of sums
//! of sums.

use super::alike::part_of;
use crate::terms::digits::{Digits, LinearForm, add};
use crate::terms::normal::through;
use crate::terms::{NodeTerm, Term, TermKey, TermKind, TermView, Terms};
use hashbrown::{HashMap, HashSet};
use ir::dim::{Base, Dim};
use ir::graph::{Body, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Binary, Collective, DType, Op, Real, Scalar};

/// Sub-axes as bits.
pub type SubAxisBits = u64;

/// Terms in one form.
pub struct Rules<'a> {
    pub mesh: &'a Mesh,
    pub terms: Terms,
    /// For each term with a key of its own, the view of an older term that it equals.
    same: HashMap<Term, TermView>,
    /// Terms by op, operands and type, their dims left out.
    alike: HashMap<(TermKind, Vec<Term>, DType), Vec<Term>>,
    /// For each term, the sub-axes along which it may differ.
    varies: Vec<SubAxisBits>,
    /// Linear functions of whole terms, along one dim.
    pub linear: HashMap<(TermKind, Term), TermView>,
    /// Copies in the graphs before, which digits cannot describe as views of other values.
    pub copied: HashSet<TermView>,
}

pub fn bits<'s>(subs: impl IntoIterator<Item = &'s SubAxis>) -> SubAxisBits {
    subs.into_iter().fold(0, |set, u| set | 1 << u.0)
}

/// The sub-axes of a collective in the order in which its members are numbered: that of ranks.
pub fn in_rank_order(subs: &[SubAxis]) -> Vec<SubAxis> {
    let mut out = subs.to_vec();
    out.sort_unstable();
    out.dedup();
    out
}

pub fn of_coords(x: &TermView) -> SubAxisBits {
    bits(x.coords.iter().map(|c| &c.0))
}

fn of_base(mesh: &Mesh, base: &Base) -> SubAxisBits {
    match base {
        Base::Coords(form) => bits(form.iter().map(|f| &f.0).filter(|u| mesh[**u].size > 1)),
        Base::Zero => 0,
        Base::Slot(_) => SubAxisBits::MAX,
    }
}

impl<'a> Rules<'a> {
    pub fn new(mesh: &'a Mesh) -> Rules<'a> {
        let terms = Terms::default();
        Rules { mesh, terms, same: HashMap::new(), alike: HashMap::new(), varies: vec![], linear: HashMap::new(), copied: HashSet::new() }
    }

    /// The sub-axes along which a term may differ from rank to rank, or from microbatch to microbatch.
    pub fn varies(&mut self, term: Term) -> SubAxisBits {
        while self.varies.len() <= term.0 as usize {
            let key = self.terms.key(Term(self.varies.len() as u32)).clone();
            let operands = key.args.iter().fold(0, |set, x| set | self.varies[x.term.0 as usize] | of_coords(x));
            let set = match &key.kind {
                TermKind::Op(Op::Scalar(Scalar::Linear(form)), _) => of_base(self.mesh, &Base::Coords(form.clone())),
                TermKind::Op(_, maps) => maps.iter().fold(operands, |set, m| set | of_base(self.mesh, &m.1.0.base)),
                TermKind::Held(_, maps) => maps.iter().fold(0, |set, m| set | of_base(self.mesh, &m.0.base)),
                TermKind::Stored | TermKind::Joined | TermKind::Met(_) => operands,
                TermKind::Sum | TermKind::Last => operands & !bits(&self.batches()),
                TermKind::Parts(subs) => operands | bits(subs),
                TermKind::Exchange { kind: Collective::AllReduce(_) | Collective::AllGather, subs, .. } => operands & !bits(subs),
                TermKind::Exchange { kind: Collective::ReduceScatter(_) | Collective::AllToAll | Collective::Shift, subs, .. } => {
                    operands | bits(subs)
                }
                TermKind::Message { .. } => SubAxisBits::MAX,
                TermKind::Fill(_) | TermKind::Unknown(_) => 0,
            };
            self.varies.push(set);
        }
        self.varies[term.0 as usize]
    }

    /// Takes note that a term is the same along these sub-axes.
    pub fn same_along(&mut self, term: Term, subs: SubAxisBits) {
        let known = self.varies(term);
        self.varies[term.0 as usize] = known & !subs;
    }

    /// The sub-axes of microbatches.
    pub fn batches(&self) -> Vec<SubAxis> {
        self.mesh.of(Axis::Microbatch).filter(|u| self.mesh[*u].size > 1).collect()
    }

    pub fn is_zero(&self, term: Term) -> bool {
        matches!(&self.terms.key(term).kind, TermKind::Op(Op::Const(c), _) if c.0 == 0.0)
    }

    pub fn zero(&mut self, dtype: DType) -> TermView {
        let kind = TermKind::Op(Op::Const(Real(0.0)), vec![]);
        TermView::whole(self.terms.intern(TermKey { kind, args: vec![], labels: vec![vec![]], sizes: vec![], dtype }), &[])
    }

    /// The value of a node, if digits can describe it from its operands as they are.
    pub fn value(&mut self, body: &Body, v: Value, args: &[TermView]) -> Option<TermView> {
        let (base, scalar) = (|b: &Base| Some(b.clone()), |s: &Scalar| Some(s.clone()));
        Some(match self.terms.made(self.mesh, body, v, args, &base, &scalar)? {
            NodeTerm::View(x) => x,
            NodeTerm::Op(key) => self.apply(key),
        })
    }

    /// The value of a node with these operands, or `None` if digits cannot describe a view.
    pub fn node(&mut self, body: &Body, v: Value, args: &[TermView]) -> Option<TermView> {
        if let Some(x) = self.value(body, v, args) {
            return Some(x);
        }
        let stored: Vec<TermView> = args.iter().zip(&body[v].args).map(|(x, a)| self.terms.stored(x, body[*a].ty.dtype)).collect();
        self.value(body, v, &stored)
    }

    /// The value of a node whose operands, and result, have `count` elements of a dim.
    pub fn piece(&mut self, body: &Body, v: Value, args: &[TermView], along: Dim, count: u64) -> Option<TermView> {
        let (base, scalar) = (|b: &Base| Some(b.clone()), |s: &Scalar| Some(s.clone()));
        match self.terms.made(self.mesh, body, v, args, &base, &scalar)? {
            NodeTerm::View(x) => Some(x),
            NodeTerm::Op(mut key) => {
                let mut rows = key.labels.iter().zip(body[v].args.iter().map(|a| body.dims_of(*a)).chain([body.dims_of(v)]));
                let label = rows.find_map(|(row, dims)| Some(row[dims.iter().position(|d| *d == along)?]))?;
                key.sizes[label.0 as usize] = count;
                Some(self.apply(key))
            }
        }
    }

    /// Whether a node itself, not its operands, is another one in each microbatch.
    pub fn asks_for_microbatch(&self, body: &Body, v: Value) -> bool {
        let node = &body[v];
        let batches = bits(&self.batches());
        let of = |base: &Base| of_base(self.mesh, base) & batches != 0;
        match &node.op {
            Op::Shard { index, .. } => of(&index.base),
            Op::Scalar(Scalar::Linear(form)) => of(&Base::Coords(form.clone())),
            op => op.is_source() && node.ty.dims.iter().any(|d| of(&body.dims[*d].index.base)),
        }
    }

    /// The value of an op of operands, in one form.
    pub fn apply(&mut self, mut key: TermKey) -> TermView {
        // Terms are of real numbers, so rounding to TF32 makes no difference.
        if let TermKind::Op(Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. }, _) = &mut key.kind {
            *tf32 = false;
        }
        let key = self.contraction(key);
        let own: Vec<u64> = key.labels.last().into_iter().flatten().map(|d| key.sizes[d.0 as usize]).collect();
        let TermKind::Op(op, _) = &key.kind else { return self.known(key, &own) };
        let scalar = own.is_empty() && key.labels.last().is_some();
        match op {
            // Zeros times a scalar are zeros: the scalar counts as finite, since otherwise no result would be finite.
            Op::Binary(Binary::Mul) => {
                let zero = |k: usize| self.is_zero(key.args[k].term);
                for (k, other) in [(0, 1), (1, 0)] {
                    if zero(k) && (zero(other) || key.labels[other].is_empty()) {
                        let dims = own.iter().map(|n| Digits::new([(*n, 0)])).collect();
                        return TermView { offset: 0, coords: vec![], dims, term: key.args[k].term };
                    }
                }
            }
            Op::Add if scalar && key.dtype == DType::F32 => return self.sum(key.args),
            Op::Add => {
                if let Some(dot) = self.sum_of_dots(&key) {
                    return self.apply(dot);
                }
            }
            Op::Select if scalar && self.is_zero(key.args[2].term) => {
                let masked = self.terms.key(key.args[1].term).clone();
                if masked.kind == TermKind::Op(Op::Add, vec![]) && masked.labels.last().is_some_and(Vec::is_empty) {
                    let of = |x: &TermView| TermKey { args: vec![key.args[0].clone(), x.clone(), key.args[2].clone()], ..key.clone() };
                    let keys: Vec<TermKey> = masked.args.iter().map(of).collect();
                    let terms = keys.into_iter().map(|k| self.apply(k)).collect();
                    return self.sum(terms);
                }
            }
            Op::Reduce { kind, .. } if scalar => {
                let (kind, x, dtype) = (*kind, key.args[0].flat(), key.dtype);
                return self.reduce(kind, &x, dtype);
            }
            _ => {}
        }
        self.known(key, &own)
    }

    /// The term of a key whose result has dims of these sizes, or the access to an older term that it is.
    pub fn known(&mut self, mut key: TermKey, own: &[u64]) -> TermView {
        let spread = spread(&mut key);
        let sizes: Vec<u64> = own.iter().enumerate().map(|(i, n)| if spread.contains(&i) { 1 } else { *n }).collect();
        let fresh = self.terms.count();
        let term = self.terms.intern(key);
        let plain = TermView::whole(term, &sizes);
        let known = if term.0 as usize >= fresh && !self.is_same(term) { None } else { self.same.get(&term) };
        let mut out = known.and_then(|x| through(&plain, x)).unwrap_or(plain);
        for i in spread {
            out.dims[i] = Digits::new([(own[i], 0)]);
        }
        out
    }

    /// Whether a term that was just made is part of an older one: the same op of parts of the same operands. If not,
    /// later ones may be part of it.
    fn is_same(&mut self, term: Term) -> bool {
        let key = self.terms.key(term).clone();
        let kind = match &key.kind {
            TermKind::Op(op, maps)
                if op.is_pointwise() || matches!(op, Op::Dot { .. } | Op::Reduce { .. } | Op::Gather { .. } | Op::ArgMax { .. }) =>
            {
                let maps = maps.iter().map(|m| (Dim(0), m.1.clone())).collect();
                TermKind::Op(op.map_dims(&mut |_| Dim(0)), maps)
            }
            TermKind::Met(_) => key.kind.clone(),
            _ => return false,
        };
        if key.args.is_empty() {
            return false;
        }
        let group = (kind, key.args.iter().map(|x| x.term).collect(), key.dtype);
        let known = self.alike.entry(group).or_default();
        let found = known.iter().find_map(|old| part_of(self.mesh, *old, self.terms.key(*old), &key));
        match found {
            Some(x) => {
                self.same.insert(term, x.flat());
                true
            }
            None => {
                known.push(term);
                false
            }
        }
    }
}

/// Removes the dims along which all operands, and so the result, are repeated. Returns their positions in the result.
fn spread(key: &mut TermKey) -> Vec<usize> {
    let TermKey { kind: TermKind::Op(op, _), args, labels, sizes, .. } = key else { return vec![] };
    let (Some((own, rows)), true) = (labels.split_last(), op.is_pointwise() || matches!(op, Op::Dot { .. })) else { return vec![] };
    let mut out = vec![];
    for (i, d) in own.iter().enumerate() {
        let places: Vec<(usize, usize)> = rows.iter().enumerate().filter_map(|(k, row)| Some((k, row.iter().position(|e| e == d)?))).collect();
        if sizes[d.0 as usize] > 1 && places.iter().all(|(k, at)| args[*k].dims[*at].iter().all(|a| a.1 == 0)) {
            places.iter().for_each(|(k, at)| args[*k].dims[*at] = Digits::new([]));
            sizes[d.0 as usize] = 1;
            out.push(i);
        }
    }
    out
}

/// The part along the first dim that belongs to a rank, counted by its coordinates.
pub fn own_part(mesh: &Mesh, subs: &[SubAxis], x: &TermView) -> Option<TermView> {
    let sizes: Vec<u64> = subs.iter().map(|u| mesh[*u].size).collect();
    let (first, rest) = x.dims.split_first()?;
    let form: LinearForm = subs.iter().copied().zip(first.reshaped(&sizes)?).collect();
    Some(TermView { term: x.term, offset: x.offset, coords: add(&x.coords, &form)?, dims: rest.to_vec() })
}
