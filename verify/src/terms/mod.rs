//! Terms: what a value is, down to sources. Equal terms are equal values, whatever computed them and wherever they
//! lie.

pub mod digits;
pub mod memory;
pub mod normal;

use digits::{Digits, LinearForm, Walk, add};
use hashbrown::{DefaultHashBuilder, HashTable};
use ir::dim::{Base, Dim, IndexMap, Linear, Order};
use ir::graph::{Body, Value};
use ir::mesh::{Mesh, SubAxis};
use ir::op::{Channel, Collective, DType, Op, Real, Scalar};
use std::hash::BuildHasher;
use std::rc::Rc;

/// A term of [`Terms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Term(pub u32);

/// A view of a term: element `(i0, i1, ..)` is the term's element, in its storage order, at
/// `offset + coords + dims[0](i0) + dims[1](i1) + ..`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TermView {
    pub term: Term,
    pub offset: u64,
    pub coords: LinearForm,
    pub dims: Vec<Digits>,
}

impl TermView {
    /// The whole term, with dims of these sizes.
    pub fn whole(term: Term, sizes: &[u64]) -> TermView {
        let mut stride = 1;
        let mut dims: Vec<Digits> = vec![];
        for n in sizes.iter().rev() {
            dims.push(Digits::new([(*n, stride)]));
            stride *= n;
        }
        dims.reverse();
        TermView { term, offset: 0, coords: vec![], dims }
    }

    /// All elements along one dim, row-major.
    pub fn flat(&self) -> TermView {
        let all = Digits::new(self.dims.iter().flat_map(Digits::iter));
        TermView { dims: vec![all], ..self.clone() }
    }

    /// Dim `k` replaced by what an index `start + coords + digits` into it reaches.
    pub fn part(&self, mesh: &Mesh, k: usize, start: u64, coords: &Linear, digits: &[(u64, u64)]) -> Option<TermView> {
        let mut walk = Walk::new(&self.dims[k]);
        let mut inner = vec![];
        for (extent, stride) in digits {
            inner.extend(walk.step(*extent, *stride)?.iter().collect::<Vec<_>>());
        }
        let mut form: LinearForm = vec![];
        for (u, stride) in coords {
            form = add(&form, &vec![(*u, walk.step(mesh[*u].size, *stride)?)])?;
        }
        let offset = self.offset + walk.finish(start)?;
        let mut dims = self.dims.clone();
        dims[k] = Digits::new(inner);
        Some(TermView { term: self.term, offset, coords: add(&self.coords, &form)?, dims })
    }
}

/// What makes a term, besides its operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TermKind {
    /// An op whose dims are numbered by first appearance, and the index maps of those dims whose indices it asks for.
    Op(Op, Vec<(Dim, Index)>),
    /// A parameter, state or table of the program, or an input of the job: the part that the maps say.
    Held(Op, Vec<Index>),
    /// The same elements in a storage order of their own, which views can tell from the operand's.
    Stored,
    /// The operands' elements one after the other.
    Joined,
    /// The sum over all microbatches.
    Sum,
    /// The value after the last microbatch.
    Last,
    /// Terms of a sum: each rank of these sub-axes has a part of each operand.
    Parts(Vec<SubAxis>),
    /// The result of a collective on a dense operand.
    Exchange {
        kind: Collective,
        subs: Vec<SubAxis>,
        stages: Option<Vec<u64>>,
    },
    /// The n-th message of a channel in a pass of a microbatch through the stage.
    Message {
        hops: i64,
        channel: Channel,
        number: usize,
    },
    /// A sum over pipeline stages: those of each list, which are alike, have an operand each.
    Met(Vec<Vec<u64>>),
    Fill(Real),
    /// A value of which nothing is known, by a number of its own.
    Unknown(usize),
}

/// An index map whose base is known, the whole extent where it matters, and the order in which the whole is stored.
pub type Index = (IndexMap, u64, Order);

impl TermKind {
    fn name(&self) -> &'static str {
        match self {
            TermKind::Op(op, _) | TermKind::Held(op, _) => op.name(),
            TermKind::Stored => "copy",
            TermKind::Joined => "concat",
            TermKind::Sum => "sum over microbatches",
            TermKind::Last => "value of the last microbatch",
            TermKind::Parts(_) => "parts of a sum",
            TermKind::Exchange { kind, .. } => kind.name(),
            TermKind::Message { .. } => "recv",
            TermKind::Met(_) => "sum over stages",
            TermKind::Fill(_) => "fill",
            TermKind::Unknown(_) => "padding",
        }
    }
}

/// The definition of a term, by which it is found again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TermKey {
    pub kind: TermKind,
    pub args: Vec<TermView>,
    /// Numbers of the dims of each operand, then of the result. Empty if no operands have dims to tell apart.
    pub labels: Vec<Vec<Dim>>,
    /// Extents of the numbered dims, or of the result's.
    pub sizes: Vec<u64>,
    pub dtype: DType,
}

impl TermKey {
    /// Elements of the term.
    pub fn count(&self) -> u64 {
        match self.labels.last() {
            Some(own) => own.iter().map(|d| self.sizes[d.0 as usize]).product(),
            None => self.sizes.iter().product(),
        }
    }
}

/// All terms, each once.
#[derive(Default)]
pub struct Terms {
    /// Terms, with the hashes of their keys.
    known: HashTable<(u64, Term)>,
    hasher: DefaultHashBuilder,
    keys: Vec<Rc<TermKey>>,
}

impl Terms {
    /// A term with no dims of operands to tell apart.
    pub fn plain(&mut self, kind: TermKind, args: Vec<TermView>, sizes: Vec<u64>, dtype: DType) -> Term {
        self.intern(TermKey { kind, args, labels: vec![], sizes, dtype })
    }

    /// The elements of a view stored row-major: a slice across its digits is none of the original.
    pub fn stored(&mut self, x: &TermView, dtype: DType) -> TermView {
        let sizes: Vec<u64> = x.dims.iter().map(Digits::extent).collect();
        TermView::whole(self.plain(TermKind::Stored, vec![x.flat()], vec![sizes.iter().product()], dtype), &sizes)
    }

    /// Values along one dim each, one after the other.
    pub fn joined(&mut self, parts: Vec<TermView>, dtype: DType) -> TermView {
        let count = parts.iter().flat_map(|p| &p.dims).map(Digits::extent).sum();
        TermView::whole(self.plain(TermKind::Joined, parts, vec![count], dtype), &[count])
    }

    /// The sum, element by element, of two values with dims of these sizes, as an op of the same dims makes it.
    pub fn sum_of_two(&mut self, args: [TermView; 2], sizes: &[u64], dtype: DType) -> TermView {
        let labels = vec![(0..sizes.len() as u32).map(Dim).collect(); 3];
        let key = TermKey { kind: TermKind::Op(Op::Add, vec![]), args: args.to_vec(), labels, sizes: sizes.to_vec(), dtype };
        TermView::whole(self.intern(key), sizes)
    }

    /// A value with dims of these sizes where a bool is true, else zero, as a `select` of local graphs makes it.
    pub fn value_or_zero(&mut self, bool: &TermView, value: TermView, sizes: &[u64], dtype: DType) -> TermView {
        let zero = TermKey { kind: TermKind::Op(Op::Const(Real(0.0)), vec![]), args: vec![], labels: vec![vec![]], sizes: vec![], dtype };
        let zero = TermView::whole(self.intern(zero), &[]);
        let own: Vec<Dim> = (0..sizes.len() as u32).map(Dim).collect();
        let labels = vec![vec![], own.clone(), vec![], own];
        let args = vec![bool.clone(), value, zero];
        let key = TermKey { kind: TermKind::Op(Op::Select, vec![]), args, labels, sizes: sizes.to_vec(), dtype };
        TermView::whole(self.intern(key), sizes)
    }

    /// The original of a copy, along one dim, and the copy's dtype.
    pub fn original(&self, copy: Term) -> Option<(TermView, DType)> {
        let key = &self.keys[copy.0 as usize];
        (key.kind == TermKind::Stored).then(|| (key.args[0].clone(), key.dtype))
    }

    /// The number of terms. All terms have numbers below this.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    pub fn key(&self, term: Term) -> &Rc<TermKey> {
        &self.keys[term.0 as usize]
    }

    /// The term of a key, whose operands are brought to their normal form.
    pub fn intern(&mut self, mut key: TermKey) -> Term {
        key.args = key.args.into_iter().map(|x| self.normal(x)).collect();
        let hash = self.hasher.hash_one(&key);
        if let Some((_, term)) = self.known.find(hash, |k| *self.keys[k.1.0 as usize] == key) {
            return *term;
        }
        let term = Term(self.keys.len() as u32);
        self.keys.push(Rc::new(key));
        self.known.insert_unique(hash, (hash, term), |k| k.0);
        term
    }

    pub fn is_fill(&self, term: Term) -> bool {
        matches!(self.keys[term.0 as usize].kind, TermKind::Fill(_))
    }

    /// Where two values first differ, for messages: `minimum for maximum, as operand 0 of exp of operand 1 of add`.
    /// Results are compared first, then their operands. Of a long way down, its last three ops are said.
    pub fn difference(&self, want: &TermView, got: &TermView) -> String {
        let (mut want, mut got, mut path) = (want, got, vec![]);
        while let Some((k, name)) = self.differing_operand(want, got) {
            path.push(format!(" of operand {k} of {name}"));
            (want, got) = (&self.keys[want.term.0 as usize].args[k], &self.keys[got.term.0 as usize].args[k]);
        }
        let shown: String = path.iter().rev().take(3).cloned().collect();
        let way = match shown.strip_prefix(" of ") {
            Some(way) if path.len() > 3 => format!(", as {way}, {} ops before the result", path.len()),
            Some(way) => format!(", as {way}"),
            None => String::new(),
        };
        self.difference_here(want, got) + &way
    }

    /// The first operand that is another one, of ops that are otherwise alike.
    fn differing_operand(&self, want: &TermView, got: &TermView) -> Option<(usize, &'static str)> {
        let (w, g) = (&self.keys[want.term.0 as usize], &self.keys[got.term.0 as usize]);
        let differs = w.args.iter().zip(&g.args).position(|(a, b)| a != b)?;
        (w.kind == g.kind).then(|| (differs, w.kind.name()))
    }

    /// What is unlike in two values, whatever their operands are.
    fn difference_here(&self, want: &TermView, got: &TermView) -> String {
        if want.term == got.term {
            return format!("another view of the same {}: {got:?}, not {want:?}", self.keys[want.term.0 as usize].kind.name());
        }
        let (w, g) = (&self.keys[want.term.0 as usize], &self.keys[got.term.0 as usize]);
        let name = w.kind.name();
        if w.kind != g.kind {
            let (a, b) = (format!("{:?}", g.kind), format!("{:?}", w.kind));
            return if g.kind.name() == name { format!("{a} for {b}") } else { format!("{} for {name}", g.kind.name()) };
        }
        if w.args.len() != g.args.len() {
            return format!("{name} of {} operands, not {}", g.args.len(), w.args.len());
        }
        format!("{name} of other dims or dtype: {:?} {:?} {:?} for {:?} {:?} {:?}", g.labels, g.sizes, g.dtype, w.labels, w.sizes, w.dtype)
    }

    /// The value of node `v` of a body whose operands are these; `base` resolves bases of index maps, `scalar`
    /// arguments. None if a view cannot be said in digits.
    pub fn node(
        &mut self,
        mesh: &Mesh,
        body: &Body,
        v: Value,
        args: &[TermView],
        base: &dyn Fn(&Base) -> Option<Base>,
        scalar: &dyn Fn(&Scalar) -> Option<Scalar>,
    ) -> Option<TermView> {
        match self.made(mesh, body, v, args, base, scalar)? {
            NodeTerm::View(x) => Some(x),
            NodeTerm::Op(key) => {
                let sizes: Vec<u64> = body.dims_of(v).iter().map(|d| body.dims.size(*d)).collect();
                Some(TermView::whole(self.intern(key), &sizes))
            }
        }
    }

    /// As [`Terms::node`], but for an op that makes a new value, which that is.
    pub fn made(
        &mut self,
        mesh: &Mesh,
        body: &Body,
        v: Value,
        args: &[TermView],
        base: &dyn Fn(&Base) -> Option<Base>,
        scalar: &dyn Fn(&Scalar) -> Option<Scalar>,
    ) -> Option<NodeTerm> {
        let node = &body[v];
        let dims = &node.ty.dims;
        let position = |k: usize, d: Dim| body.dims_of(node.args[k]).iter().position(|e| *e == d);
        // Arranges the operand's dims as the result's. The operand is repeated along dims that it lacks.
        let arranged = |x: &TermView, find: &dyn Fn(Dim) -> Option<usize>| {
            let dims = dims.iter().map(|d| find(*d).map_or(Digits::new([(body.dims.size(*d), 0)]), |k| x.dims[k].clone())).collect();
            TermView { dims, ..x.clone() }
        };
        match &node.op {
            Op::Expand | Op::Cut | Op::StopGradient | Op::Send { .. } | Op::Limit { .. } => {
                Some(NodeTerm::View(arranged(&args[0], &|d| position(0, d))))
            }
            Op::Slice { from, to, at } => {
                let k = position(0, *from)?;
                let n = to.map_or(1, |d| body.dims.size(d));
                let x = args[0].part(mesh, k, *at, &vec![], &[(n, 1)])?;
                Some(NodeTerm::View(arranged(&x, &|d| if Some(d) == *to { Some(k) } else { position(0, d) })))
            }
            Op::Shard { from, to, index } => {
                let k = position(0, *from)?;
                let coords = match base(&index.base)? {
                    Base::Coords(form) => form,
                    Base::Zero => vec![],
                    Base::Slot(_) => return None,
                };
                let x = args[0].part(mesh, k, 0, &coords, &index.parts)?;
                Some(NodeTerm::View(arranged(&x, &|d| if d == *to { Some(k) } else { position(0, d) })))
            }
            Op::View { from, to } => {
                let x = &args[0];
                let all = Digits::new(from.iter().map(|d| position(0, *d)).collect::<Option<Vec<_>>>()?.into_iter().flat_map(|k| x.dims[k].iter()));
                let extents: Vec<u64> = to.iter().map(|d| body.dims.size(*d)).collect();
                let parts = all.reshaped(&extents)?;
                let of = |d: Dim| match to.iter().position(|e| *e == d) {
                    Some(k) => Some(parts[k].clone()),
                    None => position(0, d).map(|k| x.dims[k].clone()),
                };
                Some(NodeTerm::View(TermView { dims: dims.iter().map(|d| of(*d)).collect::<Option<Vec<_>>>()?, ..x.clone() }))
            }
            // Along the outermost dim, the operands lie one after the other, and a program may write them piece by
            // piece.
            Op::Concat { from, to } if dims.iter().take_while(|d| *d != to).all(|d| body.dims.size(*d) == 1) => {
                let sizes: Vec<u64> = dims.iter().map(|d| body.dims.size(*d)).collect();
                let own = |(k, x): (usize, &TermView)| arranged(x, &|d| position(k, if d == *to { from[k] } else { d })).flat();
                let joined = self.joined(args.iter().enumerate().map(own).collect(), node.ty.dtype);
                Some(NodeTerm::View(TermView::whole(joined.term, &sizes)))
            }
            op => {
                let op = match op {
                    Op::Scalar(s) => Op::Scalar(scalar(s)?),
                    other => other.clone(),
                };
                let mut labels = Labels::default();
                let mut rows: Vec<Vec<Dim>> = node.args.iter().map(|a| labels.list(body.dims_of(*a))).collect();
                rows.push(labels.list(dims));
                let asked: Vec<Dim> = match &node.op {
                    Op::Iota(d) | Op::Gather { dim: d } | Op::Scatter { dim: d } | Op::ArgMax { over: d } => vec![*d],
                    Op::Uniform { .. } => dims.clone(),
                    _ => vec![],
                };
                let numbered = matches!(node.op, Op::Uniform { .. });
                let index = |d: &Dim| {
                    let info = &body.dims[*d];
                    let map = IndexMap { base: base(&info.index.base)?, ..info.index.clone() };
                    Some((map, if numbered { info.logical } else { 0 }, info.order))
                };
                let maps = asked.iter().map(|d| Some((labels.of(*d), index(d)?))).collect::<Option<Vec<_>>>()?;
                let op = op.map_dims(&mut |d| labels.of(d));
                let all = labels.0.iter().map(|d| body.dims.size(*d)).collect();
                Some(NodeTerm::Op(TermKey { kind: TermKind::Op(op, maps), args: args.to_vec(), labels: rows, sizes: all, dtype: node.ty.dtype }))
            }
        }
    }
}

/// The result of a node of a body.
pub enum NodeTerm {
    /// A view of one of them, or of several one after the other.
    View(TermView),
    /// A value of its own.
    Op(TermKey),
}

/// Dims, numbered by first appearance.
#[derive(Default)]
pub struct Labels(pub Vec<Dim>);

impl Labels {
    pub fn of(&mut self, d: Dim) -> Dim {
        let k = self.0.iter().position(|e| *e == d).unwrap_or_else(|| {
            self.0.push(d);
            self.0.len() - 1
        });
        Dim(k as u32)
    }

    pub fn list(&mut self, dims: &[Dim]) -> Vec<Dim> {
        dims.iter().map(|d| self.of(*d)).collect()
    }
}
