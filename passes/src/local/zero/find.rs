//! Which updates can be shared out, and which of them are alike.

use ir::dim::Dim;
use ir::graph::{Body, Users, Value};
use ir::local::{Chunk, Local};
use ir::mesh::SubAxis;
use ir::op::{Collective, Compare, DType, Op, Real, Reduce};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A parameter whose gradient is summed over ranks that each compute the same new value from it.
#[derive(Clone, Debug)]
pub struct ShardedUpdate {
    pub slot: u32,
    /// The parameter's dims in storage order.
    pub dims: Vec<Dim>,
    /// This rank's term of the gradient.
    pub term: Value,
    /// The masks of the gradient's padding, `select(mask, gradient, 0)`, innermost first.
    pub masks: Vec<Value>,
    /// The whole gradient, masked.
    pub gradient: Value,
    /// The sum over the stages that have terms of it too.
    pub stages: Option<Value>,
    /// The sum of its squares, a scalar; of several pipeline stages that have the parameter, one counts it.
    pub square: Option<Value>,
    /// The node that adds `square` to others, and the mask in between, if there is one.
    pub sum: Option<(Value, Option<Value>)>,
    pub new: Value,
    pub states: Vec<Value>,
    /// The values that its update computes from the gradient and the old values, these included.
    pub own: HashSet<Value>,
    pub class: BucketClass,
}

/// The elements that one element of a new value depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpdateGranularity {
    /// Only elements with the same index, so any part of a parameter can be updated by itself.
    Elements,
    /// The whole parameter, as where a matrix is multiplied by itself.
    Whole,
}

/// The properties that the parameters of a bucket have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BucketClass {
    pub takes: UpdateGranularity,
    /// The chunk in which its term is known.
    pub chunk: Chunk,
    /// Ranks with a term of the gradient and a copy of the parameter.
    pub subs: Vec<SubAxis>,
    /// The 16-bit type of the copy which is all that the model reads.
    pub copies: Option<DType>,
    /// Whether the term is one of several microbatches.
    pub accumulates: bool,
    /// The sum of squares, and the mask's condition.
    sum: Option<(Value, Option<String>)>,
    /// The slot of a parameter that has its own bucket, so that stages with terms of it agree on its position.
    alone: Option<u32>,
    /// The expression of new values from the gradient and the old values.
    update: String,
}

impl ShardedUpdate {
    /// The value of its squares that is added to others'.
    pub fn added(&self) -> Option<Value> {
        self.sum.and_then(|s| s.1).or(self.square)
    }
}

impl BucketClass {
    /// The same class with terms that are known in another chunk.
    pub fn at(&self, chunk: Chunk) -> BucketClass {
        BucketClass { chunk, ..self.clone() }
    }

    /// The key of buckets whose squares form one term.
    pub fn adds(&self) -> impl PartialEq {
        (self.subs.clone(), self.sum.clone())
    }
}

/// Finds the updates of a graph that can be sharded.
struct UpdateFinder<'a> {
    local: &'a Local,
    users: Users,
    /// Scalars that are computed alike have one number.
    numbers: HashMap<Value, usize>,
    old: HashMap<u32, Vec<Dim>>,
}

/// The parameters that can be shared out, in the order in which their gradients' terms are known. `copied` tells the type of copies.
pub fn find(local: &Local, copied: &dyn Fn(u32) -> Option<DType>) -> Vec<ShardedUpdate> {
    let body = &local.body;
    let mut old = HashMap::new();
    for v in body.values() {
        if let Op::Param(slot) = body[v].op {
            old.entry(slot).or_insert_with(|| body.dims_of(v).to_vec());
        }
    }
    let f = UpdateFinder { local, users: body.users(), numbers: numbers(body), old };
    let mut out: Vec<ShardedUpdate> = local.updates.iter().enumerate().filter_map(|(k, _)| f.shared(k, copied)).collect();
    out.sort_by_key(|s| s.term);
    out
}

/// One number for all scalars that are the same op of the same scalars.
fn numbers(body: &Body) -> HashMap<Value, usize> {
    let mut known: HashMap<(String, Vec<usize>), usize> = HashMap::new();
    let mut out = HashMap::new();
    for v in body.values().filter(|v| body.dims_of(*v).is_empty()) {
        let node = &body[v];
        let args: Option<Vec<usize>> = node.args.iter().map(|a| out.get(a).copied()).collect();
        let pure = node.op.is_pointwise() || matches!(node.op, Op::Const(_) | Op::Scalar(_));
        let fresh = known.len();
        let key = match args.filter(|_| pure) {
            Some(args) => (format!("{:?} {}", node.op, node.ty.dtype.name()), args),
            None => (v.to_string(), vec![]),
        };
        out.insert(v, *known.entry(key).or_insert(fresh));
    }
    out
}

impl UpdateFinder<'_> {
    fn shared(&self, update: usize, copied: &dyn Fn(u32) -> Option<DType>) -> Option<ShardedUpdate> {
        let body = &self.local.body;
        let u = &self.local.updates[update];
        let dims = self.old.get(&u.slot)?.clone();
        if dims.is_empty() {
            return None;
        }
        let roots: Vec<Value> = u.states.iter().chain([&u.new]).copied().collect();
        let mut gradient = None;
        let (takes, own) = match self.steps(&roots, u.slot, &dims, &mut gradient) {
            Some(own) => (UpdateGranularity::Elements, own),
            None => (UpdateGranularity::Whole, self.whole(&roots, u.slot, &dims, &mut gradient)?),
        };
        let gradient = gradient?;
        // Below the masks are the sum over ranks and the sum over stages.
        let (mut masks, mut subs, mut stages) = (vec![], vec![], None);
        let mut v = gradient;
        let term = loop {
            if v != gradient && self.users[v.index()].len() != 1 {
                break v;
            }
            match &body[v].op {
                Op::Select if subs.is_empty() && self.masks(v) => masks.push(v),
                Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: over, stages: None, .. } if subs.is_empty() => subs = over.clone(),
                Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: over, stages: Some(_), .. }
                    if over.is_empty() && stages.is_none() =>
                {
                    stages = Some(v);
                }
                _ => break v,
            }
            v = body[v].args[usize::from(body[v].op == Op::Select)];
        };
        masks.reverse();
        let same_dims = body.dims_of(term).len() == dims.len() && dims.iter().all(|d| body[term].ty.has(*d));
        let known = self.local.chunks[term.index()] <= Chunk::Reduce;
        if subs.is_empty() || !same_dims || !known || body[term].ty.dtype != DType::F32 {
            return None;
        }
        // For a whole parameter, stages that add to the gradient would have to agree on its owner, and the owner
        // alone could not run an exchange over the sharding ranks.
        let meets = |v: &Value| matches!(&body[*v].op, Op::Collective { subs: over, .. } if over.iter().any(|u| subs.contains(u)));
        if takes == UpdateGranularity::Whole && (stages.is_some() || own.iter().any(meets)) {
            return None;
        }
        let square = self.square(gradient, &own, &dims)?;
        if let Some(square) = square {
            let mut of = None;
            self.steps(&body[square].args, u.slot, &dims, &mut of)?;
            if of != Some(gradient) {
                return None;
            }
        }
        let sum = square.and_then(|s| self.sum(s));
        let updated = UpdateFacts { gradient, own: &own, takes };
        let key = sum.map(|(sum, mask)| (sum, mask.map(|m| self.text(&[body[m].args[0], body[m].args[2]], &updated))));
        let class = BucketClass {
            takes,
            chunk: self.local.chunks[term.index()],
            subs,
            copies: ir::fault!("zero.class.copies", None, copied(u.slot)),
            accumulates: self.local.accumulate[term.index()],
            alone: ir::fault!("zero.class.alone", None, (stages.is_some() || sum.is_none()).then_some(u.slot)),
            sum: ir::fault!("zero.class.norm", None, key),
            update: ir::fault!("zero.class.update", String::new(), self.text(&roots.iter().copied().chain(square).collect::<Vec<_>>(), &updated)),
        };
        Some(ShardedUpdate { slot: u.slot, dims, term, masks, gradient, stages, square, sum, new: u.new, states: u.states.clone(), own, class })
    }

    /// The values of an update that are computed element by element, down to the old values, scalars, and the one value that `gradient`
    /// becomes. None if there are others.
    fn steps(&self, roots: &[Value], slot: u32, dims: &[Dim], gradient: &mut Option<Value>) -> Option<HashSet<Value>> {
        let body = &self.local.body;
        let mut seen: HashSet<Value> = HashSet::new();
        let mut stack = roots.to_vec();
        while let Some(v) = stack.pop() {
            if body.dims_of(v).is_empty() || *gradient == Some(v) || !seen.insert(v) {
                continue;
            }
            let node = &body[v];
            let full = node.ty.dims.len() == dims.len() && dims.iter().all(|d| node.ty.has(*d));
            let once = !self.local.chunks[v.index()].per_microbatch();
            match &node.op {
                Op::Param(s) | Op::State(s, _) if *s == slot && node.ty.dims == dims => {}
                op if full && once && op.is_pointwise() && !self.masks(v) => stack.extend(&node.args),
                Op::Select | Op::Collective { .. } if full && once && gradient.is_none() => {
                    seen.remove(&v);
                    *gradient = Some(v);
                }
                _ => return None,
            }
        }
        Some(seen)
    }

    /// As [`Self::steps`], of an update that multiplies, sums or gathers what it has of its parameter: the values
    /// that follow from the old ones and the gradient, scalars too. None if there are others but scalars of all
    /// parameters.
    fn whole(&self, roots: &[Value], slot: u32, dims: &[Dim], gradient: &mut Option<Value>) -> Option<HashSet<Value>> {
        let body = &self.local.body;
        let mut known: HashMap<Value, bool> = HashMap::new();
        *gradient = None;
        let mut stack: Vec<(Value, bool)> = roots.iter().map(|v| (*v, false)).collect();
        while let Some((v, behind)) = stack.pop() {
            if known.contains_key(&v) {
                continue;
            }
            let (node, scalar) = (&body[v], body.dims_of(v).is_empty());
            let full = node.ty.dims.len() == dims.len() && dims.iter().all(|d| node.ty.has(*d));
            let (updates, once) = (self.local.chunks[v.index()] == Chunk::Update, self.local.chunks[v.index()] == Chunk::Reduce);
            let is_own = match &node.op {
                Op::Param(s) | Op::State(s, _) => (*s == slot && node.ty.dims == dims).then_some(true)?,
                _ if !updates && scalar => false,
                Op::Select | Op::Collective { .. } if once && full && gradient.is_none_or(|g| g == v) => {
                    *gradient = Some(v);
                    true
                }
                op if updates && !behind => {
                    let fits = match op {
                        Op::Reduce { .. } | Op::Dot { .. } | Op::View { .. } | Op::Slice { .. } | Op::Shard { .. } => true,
                        Op::Collective { kind, stages, .. } => stages.is_none() && *kind != Collective::Shift,
                        op => scalar || op.is_pointwise() && !self.masks(v),
                    };
                    if !fits {
                        return None;
                    }
                    stack.push((v, true));
                    stack.extend(node.args.iter().map(|a| (*a, false)));
                    continue;
                }
                _ if updates => node.args.iter().any(|a| known[a]),
                _ => return None,
            };
            if !is_own && !scalar {
                return None;
            }
            known.insert(v, is_own);
        }
        let own: HashSet<Value> = known.into_iter().filter(|k| k.1 && Some(k.0) != *gradient).map(|k| k.0).collect();
        Some(own)
    }

    /// Whether a value is another one masked by an index.
    fn masks(&self, v: Value) -> bool {
        let body = &self.local.body;
        let node = &body[v];
        // For a dim that ranks split, each rank has its shard of the mask.
        let whole = |c: Value| if let Op::Shard { .. } = body[c].op { body[c].args[0] } else { c };
        let of_index = |c: Value| body[c].op == Op::Compare(Compare::Lt) && matches!(body[body[c].args[0]].op, Op::Iota(_));
        node.op == Op::Select && of_index(whole(node.args[0])) && body[node.args[2]].op == Op::Const(Real(0.0))
    }

    /// The sum of all elements of what follows from the gradient element by element, if there is one. None if anything but that and the update's
    /// steps uses the gradient.
    fn square(&self, gradient: Value, own: &HashSet<Value>, dims: &[Dim]) -> Option<Option<Value>> {
        let body = &self.local.body;
        let mut found: Option<Value> = None;
        let mut seen: HashSet<Value> = HashSet::new();
        let mut stack = vec![gradient];
        while let Some(v) = stack.pop() {
            for (user, _) in &self.users[v.index()] {
                if !seen.insert(*user) {
                    continue;
                }
                match &body[*user].op {
                    _ if own.contains(user) => stack.push(*user),
                    Op::Reduce { kind: Reduce::Sum, over } if over.len() == dims.len() && found.is_none() => found = Some(*user),
                    op if op.is_pointwise() && self.local.chunks[user.index()] == Chunk::Reduce => stack.push(*user),
                    _ => return None,
                }
            }
        }
        Some(found)
    }

    /// The node that adds a scalar to others, and the select in between.
    fn sum(&self, square: Value) -> Option<(Value, Option<Value>)> {
        let body = &self.local.body;
        let only = |v: Value| match &self.users[v.index()] {
            [(user, slot)] => Some((*user, *slot)),
            _ => None,
        };
        // Only sums of scalars count, since an update of elements may use the scalar in a sum, too.
        let adds = |v: Value| body[v].op == Op::Add && body[v].ty.dims.is_empty();
        let (user, slot) = only(square)?;
        match &body[user].op {
            Op::Add => adds(user).then_some((user, None)),
            Op::Select if slot == 1 => {
                let (sum, _) = only(user)?;
                adds(sum).then_some((sum, Some(user)))
            }
            _ => None,
        }
    }

    /// The expression of values from the gradient, the old values and scalars, as a text. Texts are comparable for
    /// parameters of any dims or, for whole ones, of like dims.
    fn text(&self, roots: &[Value], updated: &UpdateFacts) -> String {
        let mut text = ExpressionWriter { finding: self, updated, numbers: BTreeMap::new(), dims: vec![], out: String::new() };
        for v in roots {
            let name = text.visit(*v);
            text.out.push_str(&format!("{name}. "));
        }
        text.out
    }
}

/// The facts of an update that is written as a text.
struct UpdateFacts<'a> {
    gradient: Value,
    own: &'a HashSet<Value>,
    takes: UpdateGranularity,
}

struct ExpressionWriter<'a> {
    finding: &'a UpdateFinder<'a>,
    updated: &'a UpdateFacts<'a>,
    numbers: BTreeMap<Value, usize>,
    /// Dims in the order in which they appear.
    dims: Vec<Dim>,
    out: String,
}

impl ExpressionWriter<'_> {
    fn visit(&mut self, v: Value) -> String {
        let node = &self.finding.local.body[v];
        if v == self.updated.gradient {
            return match self.updated.takes {
                UpdateGranularity::Elements => "g".into(),
                UpdateGranularity::Whole => format!("g {}", self.named(&node.ty.dims)),
            };
        }
        let of_all = |_: &&usize| !matches!(node.op, Op::Reduce { .. }) && !self.updated.own.contains(&v);
        if let Some(n) = self.finding.numbers.get(&v).filter(of_all) {
            return format!("s{n}");
        }
        if let Some(n) = self.numbers.get(&v) {
            return format!("%{n}");
        }
        let args: Vec<String> = node.args.iter().map(|a| self.visit(*a)).collect();
        let op = match (&node.op, self.updated.takes) {
            (Op::Param(_), _) => "param".to_string(),
            (Op::State(_, k), _) => format!("state {k}"),
            (Op::Reduce { .. }, UpdateGranularity::Elements) => "sum".to_string(),
            (op, UpdateGranularity::Elements) => format!("{op:?}"),
            (op, UpdateGranularity::Whole) => {
                let op = op.map_dims(&mut |d| Dim(self.number(d) as u32));
                format!("{op:?}")
            }
        };
        let dims = match self.updated.takes {
            UpdateGranularity::Elements => String::new(),
            UpdateGranularity::Whole => self.named(&node.ty.dims),
        };
        self.numbers.insert(v, self.numbers.len());
        self.out.push_str(&format!("{op} {} {}{dims}; ", node.ty.dtype.name(), args.join(" ")));
        format!("%{}", self.numbers.len() - 1)
    }

    /// The number of a dim, whose size and index are written at its first appearance.
    fn number(&mut self, d: Dim) -> usize {
        if let Some(n) = self.dims.iter().position(|e| *e == d) {
            return n;
        }
        let info = &self.finding.local.body.dims[d];
        self.out.push_str(&format!("dim {} {:?}; ", info.size, info.index));
        self.dims.push(d);
        self.dims.len() - 1
    }

    fn named(&mut self, dims: &[Dim]) -> String {
        dims.iter().map(|d| format!(" d{}", self.number(*d))).collect()
    }
}
