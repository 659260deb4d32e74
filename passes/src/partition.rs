//! From the sharded graph to one local graph per program class: local shapes, collectives, transfers between stages.
//!
//! Every stage's graph is emitted by walking the sharded graph once; stages whose graphs are equal up to names become one
//! class. Values that a step needs once are separated from those of each microbatch here: the sum over the axis
//! `mb` is an accumulation, legal only where a step has all microbatches behind it, or before it (sums of data alone).

use crate::stages::{Layout, assign};
use ir::diag::Diagnostic;
use ir::dim::{Base, Dim, DimInfo, Dims, IndexMap};
use ir::graph::{Body, Node, Origin, Phase, Type, Value};
use ir::local::{Chunk, Local, LocalParam, LocalUpdate};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Attention, Collective, Op, Real, Reduce, Reshard};
use ir::sharded::{Placement, Sharded, Sharding};
use std::collections::{BTreeSet, HashMap};

/// The local graphs, one per program class; together they cover every stage once.
///
/// # Errors
/// E0631: a sum over the whole batch is used in a way that neither precedes nor follows the microbatches.
/// E0632: a value is used on another stage than at the border of layers.
pub fn partition(s: &Sharded, layout: &Layout) -> Result<Vec<Local>, Vec<Diagnostic>> {
    let job = JobView::new(s, layout)?;
    let mut classes: Vec<Local> = vec![];
    let mut errors = vec![];
    for stage in 0..layout.stages {
        match Emitter::new(&job, stage).run() {
            Ok(local) => match classes.iter_mut().find(|c| same_class(c, &local)) {
                Some(class) => class.stages.extend(local.stages),
                None => classes.push(local),
            },
            Err(e) => errors.push(e),
        }
    }
    if errors.is_empty() { Ok(classes) } else { Err(errors) }
}

/// Equal up to names and places.
fn same_class(a: &Local, b: &Local) -> bool {
    a.body.nodes.len() == b.body.nodes.len()
        && a.body.dims == b.body.dims
        && a.params == b.params
        && a.chunks == b.chunks
        && a.accumulate == b.accumulate
        && a.reports == b.reports
        && a.updates == b.updates
        && a.body.nodes.iter().zip(&b.body.nodes).all(|(x, y)| x.op == y.op && x.args == y.args && x.ty == y.ty)
}

/// A set of stages; none means all.
type StageSet = Option<BTreeSet<u32>>;

fn intersect(a: &StageSet, b: &StageSet) -> StageSet {
    match (a, b) {
        (None, x) | (x, None) => x.clone(),
        (Some(a), Some(b)) => Some(a & b),
    }
}

/// What holds for all stages together.
struct JobView<'a> {
    s: &'a Sharded,
    stages: u32,
    /// Stage of values of the forward and backward pass, unless loose.
    stage: Vec<Option<u32>>,
    /// Chunk of values: of loose ones that of their user.
    chunk: Vec<Chunk>,
    /// Completions of sums over data: they run before the first microbatch.
    prologue: Vec<bool>,
    /// Sums over stages: for each, the stages that add and need it.
    stage_sums: HashMap<Value, BTreeSet<u32>>,
    /// Of operands of a sum over stages, the one stage that adds it.
    adds_on: HashMap<(Value, usize), u32>,
    /// Stages that compute a value of the update.
    demand: Vec<BTreeSet<u32>>,
    /// Values that another stage uses in the same chunk: `(from, to)`.
    transfers: Vec<BTreeSet<u32>>,
    reports: Vec<(u32, Value)>,
}

impl<'a> JobView<'a> {
    fn new(s: &'a Sharded, layout: &Layout) -> Result<JobView<'a>, Vec<Diagnostic>> {
        let body = &s.graph.body;
        let n = body.nodes.len();
        let mut reports: Vec<(u32, Value)> = vec![];
        if let Some(v) = s.graph.loss {
            reports.push((0, v));
        }
        if let Some(v) = s.graph.grad_norm {
            reports.push((1, v));
        }
        for (k, r) in s.graph.losses.iter().chain(&s.graph.metrics).enumerate() {
            reports.push((2 + k as u32, r.value));
        }
        let mut job = JobView {
            s,
            stages: layout.stages,
            stage: assign(body, layout),
            chunk: vec![Chunk::Forward; n],
            prologue: vec![false; n],
            stage_sums: HashMap::new(),
            adds_on: HashMap::new(),
            demand: vec![BTreeSet::new(); n],
            transfers: vec![BTreeSet::new(); n],
            reports,
        };
        let errors = job.chunks();
        if !errors.is_empty() {
            return Err(errors);
        }
        job.sums_over_stages();
        let errors = job.transfers();
        if errors.is_empty() { Ok(job) } else { Err(errors) }
    }

    fn chunks(&mut self) -> Vec<Diagnostic> {
        let body = &self.s.graph.body;
        let mut errors = vec![];
        let mut reported = vec![false; body.nodes.len()];
        for (_, v) in &self.reports {
            reported[v.index()] = true;
        }
        for v in body.values().rev() {
            if reported[v.index()] {
                for a in &body[v].args {
                    reported[a.index()] = true;
                }
            }
        }
        let users = body.users();
        let mut params = vec![false; body.nodes.len()];
        for v in body.values() {
            let node = &body[v];
            params[v.index()] = matches!(node.op, Op::Param(_)) || node.args.iter().any(|a| params[a.index()]);
            self.chunk[v.index()] = match node.origin.phase {
                Phase::Forward => Chunk::Forward,
                Phase::Backward => Chunk::Backward,
                Phase::Update if reported[v.index()] => Chunk::Reduce,
                Phase::Update => Chunk::Update,
            };
            let completes = matches!(&node.op, Op::Reshard { kind: Reshard::AllReduce | Reshard::ReduceScatter, subs }
                if subs.iter().any(|u| self.s.mesh[*u].axis == Axis::Microbatch));
            if completes && node.origin.phase != Phase::Update {
                self.prologue[v.index()] = true;
                if params[v.index()] {
                    let mut e = Diagnostic::error(
                        "E0631",
                        "a sum over the whole batch is used before the last microbatch: its backward would need every microbatch's forward",
                    );
                    if let Some(span) = body[node.args[0]].origin.span {
                        e = e.label(span, "this sums over the batch");
                    }
                    if let Some(span) = users[v.index()].first().and_then(|(c, _)| body[*c].origin.span) {
                        e = e.label(span, "and this is not linear in it");
                    }
                    errors.push(e.help("use one microbatch (a micro-batch-size of global batch / dp), or a mean per sequence (over: seq)"));
                }
            }
        }
        errors
    }

    /// Decides for every value of the update which stages compute it, and where values of several stages are summed.
    fn sums_over_stages(&mut self) {
        let body = &self.s.graph.body;
        let all: BTreeSet<u32> = (0..self.stages).collect();
        let users = body.users();
        // Where a value can be had without communication; none: everywhere.
        let mut origin: Vec<StageSet> = vec![None; body.nodes.len()];
        for v in body.values() {
            let node = &body[v];
            let once = node.origin.phase == Phase::Update;
            origin[v.index()] = match (&node.op, self.stage[v.index()]) {
                (_, Some(s)) => Some([s].into()),
                _ if !once => None,
                _ => {
                    let args: Vec<StageSet> = node.args.iter().map(|a| origin[a.index()].clone()).collect();
                    let common = args.iter().fold(None, |x, y| intersect(&x, y));
                    if common.as_ref().is_some_and(BTreeSet::is_empty) {
                        self.stage_sums.insert(v, BTreeSet::new());
                        None
                    } else {
                        common
                    }
                }
            };
            // The gradient of a parameter that several stages use.
            if !once && node.op == Op::Add && self.stages > 1 {
                let stages: BTreeSet<u32> = node.args.iter().filter_map(|a| self.stage[a.index()]).collect();
                let in_step = |c: &Value| body[*c].origin.phase == Phase::Update;
                let sunk = self.s.graph.grads.iter().any(|g| g.1 == v) || !users[v.index()].is_empty() && users[v.index()].iter().all(|(c, _)| in_step(c));
                if stages.len() > 1 && sunk && node.origin.phase == Phase::Backward {
                    self.stage_sums.insert(v, BTreeSet::new());
                    self.stage[v.index()] = None;
                    self.chunk[v.index()] = Chunk::Reduce;
                    origin[v.index()] = None;
                }
            }
        }
        // Every stage that uses a parameter updates it.
        let mut uses: HashMap<u32, BTreeSet<u32>> = HashMap::new();
        let mut reaches: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); body.nodes.len()];
        for v in body.values().rev().filter(|v| body[*v].origin.phase != Phase::Update) {
            let mut set = reaches[v.index()].clone();
            set.extend(self.stage[v.index()]);
            if let Op::Param(p) = body[v].op {
                uses.entry(p).or_default().extend(set);
                continue;
            }
            for a in &body[v].args {
                if self.stage[a.index()].is_none() {
                    let set = set.clone();
                    reaches[a.index()].extend(set);
                }
            }
        }
        for u in &self.s.graph.updates {
            let stages = uses.get(&u.param).filter(|s| !s.is_empty()).unwrap_or(&all);
            for v in std::iter::once(&u.new).chain(&u.states) {
                self.demand[v.index()].extend(stages);
            }
        }
        for (_, v) in self.reports.clone() {
            self.demand[v.index()].extend(&all);
        }
        let once = |job: &Self, v: Value| matches!(job.chunk[v.index()], Chunk::Reduce | Chunk::Update);
        for v in body.values().rev() {
            if !once(self, v) {
                continue;
            }
            let wanted = self.demand[v.index()].clone();
            if let Some(members) = self.stage_sums.get(&v) {
                let mut members = members.clone();
                members.extend(&wanted);
                for (k, a) in body[v].args.iter().enumerate() {
                    let on = match &origin[a.index()] {
                        Some(set) => *set.first().expect("invariant: a value has a stage"),
                        None => *wanted.first().unwrap_or(&0),
                    };
                    members.insert(on);
                    self.adds_on.insert((v, k), on);
                    self.demand[a.index()].insert(on);
                }
                self.stage_sums.insert(v, members);
                continue;
            }
            // What only some stages can compute, the others get as a sum with one term.
            if let Some(set) = &origin[v.index()]
                && !wanted.is_subset(set)
            {
                let on = *set.first().expect("invariant: a value has a stage");
                let mut members = wanted.clone();
                members.insert(on);
                self.stage_sums.insert(v, members);
                self.adds_on.insert((v, usize::MAX), on);
                for a in &body[v].args {
                    self.demand[a.index()].insert(on);
                }
                continue;
            }
            for a in &body[v].args {
                self.demand[a.index()].extend(&wanted);
            }
        }
        // A per-microbatch value that other stages need at the end goes the same way.
        for v in body.values() {
            if let (Some(s), false) = (self.stage[v.index()], self.demand[v.index()].is_empty())
                && self.demand[v.index()] != [s].into()
            {
                let mut members = self.demand[v.index()].clone();
                members.insert(s);
                self.stage_sums.insert(v, members);
                self.adds_on.insert((v, usize::MAX), s);
            }
        }
    }

    /// Finds the values that cross from stage to stage within a microbatch.
    fn transfers(&mut self) -> Vec<Diagnostic> {
        let body = &self.s.graph.body;
        let mut errors = vec![];
        for v in body.values() {
            let Some(s) = self.stage[v.index()] else { continue };
            for a in &body[v].args {
                let Some(from) = self.stage[a.index()] else { continue };
                if from == s {
                    continue;
                }
                let phase = body[v].origin.phase;
                let forward = phase == Phase::Forward && s == from + 1;
                let backward = phase == Phase::Backward && from == s + 1;
                if body[*a].origin.phase != phase || !(forward || backward) {
                    let mut e = Diagnostic::error(
                        "E0632",
                        format!("a value of pipeline stage {from} is used on stage {s}: only what a `repeat` carries can cross from stage to stage"),
                    );
                    for span in [body[*a].origin.span, body[v].origin.span].into_iter().flatten() {
                        e = e.label(span, "here");
                    }
                    errors.push(e.help("use fewer pipeline stages, or carry the value through the `repeat`"));
                    if errors.len() > 20 {
                        return errors;
                    }
                } else {
                    self.transfers[a.index()].insert(s);
                }
            }
        }
        errors
    }
}

/// Builds the local graph of one stage.
struct Emitter<'a> {
    job: &'a JobView<'a>,
    stage: u32,
    out: Local,
    /// The local value of a sharded one; loose values have one per chunk that uses them.
    map: HashMap<(Value, Chunk), Value>,
    dims: HashMap<(Dim, Vec<SubAxis>), Dim>,
    slots: HashMap<u32, u32>,
}

impl<'a> Emitter<'a> {
    fn new(job: &'a JobView<'a>, stage: u32) -> Emitter<'a> {
        let out = Local {
            mesh: job.s.mesh.clone(),
            stages: vec![(u64::from(stage), vec![])],
            body: Body { dims: Dims::default(), nodes: vec![] },
            params: vec![],
            chunks: vec![],
            accumulate: vec![],
            source: vec![],
            reasons: vec![],
            reports: vec![],
            updates: vec![],
        };
        Emitter { job, stage, out, map: HashMap::new(), dims: HashMap::new(), slots: HashMap::new() }
    }

    fn run(mut self) -> Result<Local, Diagnostic> {
        let (job, stage) = (self.job, self.stage);
        let body = &job.s.graph.body;
        for phase in [Phase::Forward, Phase::Backward] {
            // What other stages send, in the order in which they make it.
            for v in body.values().filter(|v| body[*v].origin.phase == phase && job.transfers[v.index()].contains(&stage)) {
                let hops = i64::from(job.stage[v.index()].expect("invariant: transfers have a stage")) - i64::from(self.stage);
                let chunk = job.chunk[v.index()];
                let ty = self.local_type(v);
                let w = self.push(Op::Recv { hops }, vec![], ty, chunk, &body[v].origin, Some(v));
                self.out.reasons[w.index()] = Some("crosses from stage to stage".into());
                self.map.insert((v, chunk), w);
            }
            for v in body.values().filter(|v| body[*v].origin.phase == phase && job.stage[v.index()] == Some(stage)) {
                let chunk = job.chunk[v.index()];
                let w = self.emit(v, chunk);
                for to in &job.transfers[v.index()] {
                    let hops = i64::from(*to) - i64::from(self.stage);
                    let ty = self.out.body[w].ty.clone();
                    let sent = self.push(Op::Send { hops }, vec![w], ty, chunk, &body[v].origin, None);
                    self.out.reasons[sent.index()] = Some("crosses from stage to stage".into());
                }
            }
        }
        // All stages visit the values of the update in one order, so that sums over stages meet.
        for v in body.values() {
            let once = matches!(job.chunk[v.index()], Chunk::Reduce | Chunk::Update);
            let member = job.stage_sums.get(&v).is_some_and(|m| m.contains(&self.stage));
            if member || once && job.demand[v.index()].contains(&self.stage) && job.stage_sums.contains_key(&v) {
                self.get(v, if once { job.chunk[v.index()] } else { Chunk::Reduce });
            }
        }
        for (report, v) in &job.reports {
            let w = self.get(*v, Chunk::Reduce);
            self.out.reports.push((*report, w));
        }
        for u in &job.s.graph.updates {
            if !job.demand[u.new.index()].contains(&self.stage) {
                continue;
            }
            let new = self.get(u.new, Chunk::Update);
            let states: Vec<Value> = u.states.iter().map(|v| self.get(*v, Chunk::Update)).collect();
            let slot = self.slot(u.param);
            self.out.params[slot as usize].states = states.len() as u32;
            self.out.updates.push(LocalUpdate { slot, new, states });
        }
        Ok(self.out)
    }

    /// The local value of `v`, for a user in `chunk`.
    fn get(&mut self, v: Value, chunk: Chunk) -> Value {
        let job = self.job;
        let once = matches!(chunk, Chunk::Reduce | Chunk::Update);
        if once && let Some(members) = job.stage_sums.get(&v) {
            if let Some(w) = self.map.get(&(v, Chunk::Reduce)) {
                return *w;
            }
            let members: Vec<u64> = members.iter().map(|s| u64::from(*s)).collect();
            return self.sum_over_stages(v, members);
        }
        let own = match job.stage[v.index()] {
            Some(_) => job.chunk[v.index()],
            None if job.prologue[v.index()] => Chunk::PrologueReduce,
            None if matches!(job.chunk[v.index()], Chunk::Reduce | Chunk::Update) => job.chunk[v.index()],
            None => chunk,
        };
        if let Some(w) = self.map.get(&(v, own)) {
            return *w;
        }
        self.emit(v, own)
    }

    fn emit(&mut self, v: Value, chunk: Chunk) -> Value {
        let node = &self.job.s.graph.body[v];
        let w = match &node.op {
            Op::Reshard { kind, subs } => self.reshard(v, *kind, subs, chunk),
            _ => {
                let args: Vec<Value> = node.args.iter().map(|a| self.get(*a, chunk)).collect();
                let op = self.local_op(v);
                let ty = self.local_type(v);
                self.push(op, args, ty, chunk, &node.origin, Some(v))
            }
        };
        self.map.insert((v, chunk), w);
        w
    }

    fn push(&mut self, op: Op, args: Vec<Value>, ty: Type, chunk: Chunk, origin: &Origin, source: Option<Value>) -> Value {
        let s = self.job.s;
        let over_batches = source.is_some_and(|v| s.mesh.of(Axis::Microbatch).any(|u| s.sharding(v)[u] == Placement::SUM));
        self.out.chunks.push(chunk);
        self.out.accumulate.push(over_batches && chunk.per_microbatch());
        self.out.source.push(source.map(|v| (v, s.sharding(v).clone())));
        self.out.reasons.push(None);
        self.out.body.nodes.push(Node { op, args, ty, origin: origin.clone() });
        Value(self.out.body.nodes.len() as u32 - 1)
    }

    fn slot(&mut self, param: u32) -> u32 {
        if let Some(s) = self.slots.get(&param) {
            return *s;
        }
        let s = self.job.s;
        let source = s.graph.body.values().find(|v| s.graph.body[*v].op == Op::Param(param)).expect("invariant: a parameter in use has a node");
        let dims = s.graph.body.dims_of(source).to_vec();
        let index = dims.iter().map(|d| index_map(s, *d, &s.sharding(source).splits(*d), &[])).collect();
        let slot = self.out.params.len() as u32;
        self.out.params.push(LocalParam { index, states: 0 });
        self.out.stages[0].1.push(param);
        self.slots.insert(param, slot);
        slot
    }

    /// The part of a dim that a rank has when these sub-axes split it.
    fn dim(&mut self, d: Dim, splits: &[SubAxis]) -> Dim {
        let key = (d, splits.to_vec());
        if let Some(l) = self.dims.get(&key) {
            return *l;
        }
        let s = self.job.s;
        let info = &s.graph.body.dims[d];
        let index = index_map(s, d, splits, &[]);
        let name = if splits.is_empty() { info.name.clone() } else { format!("{}/{}", info.name, s.mesh.describe(splits)) };
        let copy_of = info.copy_of.map(|o| self.dim(o, splits));
        let local = self.out.body.dims.add(DimInfo { name, size: index.len(), logical: info.logical, copy_of, index, global: info.size });
        self.dims.insert(key, local);
        local
    }

    /// A helper dim: the parts of a collective, a piece of an index.
    fn piece(&mut self, name: &str, size: u64) -> Dim {
        self.out.body.dims.add(DimInfo::new(name, size))
    }

    fn dim_of(&mut self, v: Value, d: Dim) -> Dim {
        let splits = self.job.s.sharding(v).splits(d);
        self.dim(d, &splits)
    }

    fn local_type(&mut self, v: Value) -> Type {
        let ty = self.job.s.graph.body[v].ty.clone();
        Type::new(ty.dtype, ty.dims.iter().map(|d| self.dim_of(v, *d)).collect::<Vec<_>>())
    }

    /// The op with its dims replaced by local ones: each as the result or an operand has it.
    fn local_op(&mut self, v: Value) -> Op {
        let body = &self.job.s.graph.body;
        let node = &body[v];
        let mut at = |d: Dim| {
            let holder = std::iter::once(&v).chain(&node.args).find(|w| body[**w].ty.has(d));
            match holder {
                Some(w) => self.dim_of(*w, d),
                None => self.dim(d, &[]),
            }
        };
        let mut list = |dims: &[Dim]| dims.iter().map(|d| at(*d)).collect::<Vec<_>>();
        match &node.op {
            Op::Param(p) => Op::Param(self.slot(*p)),
            Op::State(p, k) => Op::State(self.slot(*p), *k),
            Op::Iota(d) => Op::Iota(at(*d)),
            Op::View { from, to } => Op::View { from: list(from), to: list(to) },
            Op::Slice { from, to, at: k } => Op::Slice { from: at(*from), to: to.map(at), at: *k },
            Op::Pad { from, to, at: k } => Op::Pad { to: at(*to), from: from.map(at), at: *k },
            Op::Concat { from, to } => Op::Concat { from: list(from), to: at(*to) },
            Op::Dot { over } => Op::Dot { over: list(over) },
            Op::Reduce { kind, over } => Op::Reduce { kind: *kind, over: list(over) },
            Op::ArgMax { over } => Op::ArgMax { over: at(*over) },
            Op::Cumsum { over, reverse } => Op::Cumsum { over: at(*over), reverse: *reverse },
            Op::Gather { dim } => Op::Gather { dim: at(*dim) },
            Op::Scatter { dim } => Op::Scatter { dim: at(*dim) },
            Op::Attention(a) => Op::Attention(attention(a, &mut at)),
            Op::AttentionLse(a) => Op::AttentionLse(attention(a, &mut at)),
            Op::AttentionGrad(a, w) => Op::AttentionGrad(attention(a, &mut at), *w),
            op @ (Op::Input(_) | Op::Table(_) | Op::Const(_) | Op::Uniform { .. } | Op::Scalar(_) | Op::Unary(_) | Op::Binary(_)
            | Op::Compare(_) | Op::Select | Op::Add | Op::Cast | Op::StopGradient | Op::Cut | Op::Expand) => op.clone(),
            Op::Shard { .. } | Op::Reshard { .. } | Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } => {
                unreachable!("invariant: not an op of the sharded level, or handled as a reshard")
            }
        }
    }

    fn sum_over_stages(&mut self, v: Value, members: Vec<u64>) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let chunk = Chunk::Reduce;
        let ty = self.local_type(v);
        let alone = job.adds_on.get(&(v, usize::MAX));
        let terms: Vec<Value> = match alone {
            Some(on) if *on == self.stage => {
                let own = if job.stage[v.index()].is_some() { job.chunk[v.index()] } else { chunk };
                let w = match self.map.get(&(v, own)) {
                    Some(w) if own != chunk => *w,
                    _ => {
                        let args: Vec<Value> = node.args.iter().map(|a| self.get(*a, chunk)).collect();
                        match &node.op {
                            Op::Reshard { kind, subs } => self.reshard(v, *kind, subs, chunk),
                            _ => {
                                let op = self.local_op(v);
                                self.push(op, args, ty.clone(), chunk, &node.origin, Some(v))
                            }
                        }
                    }
                };
                vec![w]
            }
            Some(_) => vec![],
            None => {
                let mine: Vec<Value> = (0..node.args.len()).filter(|k| job.adds_on[&(v, *k)] == self.stage).map(|k| node.args[k]).collect();
                mine.into_iter().map(|a| self.get(a, chunk)).collect()
            }
        };
        let term = match terms.as_slice() {
            [] => {
                let zero = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(ty.dtype), chunk, &node.origin, None);
                if ty.dims.is_empty() { zero } else { self.push(Op::Expand, vec![zero], ty.clone(), chunk, &node.origin, None) }
            }
            [one] => *one,
            many => self.push(Op::Add, many.to_vec(), ty.clone(), chunk, &node.origin, Some(v)),
        };
        let w = if members.len() > 1 {
            let op = Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: vec![], stages: Some(members), part: None };
            let w = self.push(op, vec![term], ty, chunk, &node.origin, Some(v));
            self.out.reasons[w.index()] = Some("sums what several stages have, for those that need it".into());
            w
        } else {
            term
        };
        self.map.insert((v, chunk), w);
        w
    }

    /// A reshard as views, copies and a collective.
    fn reshard(&mut self, v: Value, kind: Reshard, subs: &[SubAxis], chunk: Chunk) -> Value {
        let s = self.job.s;
        let node = &s.graph.body[v];
        let arg = node.args[0];
        let batches = |u: &&SubAxis| s.mesh[**u].axis == Axis::Microbatch;
        let places: Vec<SubAxis> = subs.iter().filter(|u| !batches(u)).copied().collect();
        let completes = matches!(kind, Reshard::AllReduce | Reshard::ReduceScatter) && subs.iter().any(|u| batches(&u));
        // A sum over microbatches is complete once they are all behind: the accumulated value itself.
        let from = if completes && chunk == Chunk::PrologueReduce { Chunk::Prologue } else { chunk };
        let mut x = self.get(arg, from);
        let reduce = match s.sharding(arg)[subs[0]] {
            Placement::Partial(ir::sharded::Partial::Max) => Reduce::Max,
            Placement::Partial(ir::sharded::Partial::Sum) | Placement::Replicated | Placement::Split(_) => Reduce::Sum,
        };
        let split = |w: Value| match s.sharding(w)[subs[0]] {
            Placement::Split(d) => d,
            Placement::Replicated | Placement::Partial(_) => unreachable!("invariant: the verifier has seen this reshard"),
        };
        let parts: u64 = places.iter().map(|u| s.mesh[*u].size).product();
        let reason = s.reasons[v.index()].clone();
        let origin = &node.origin;
        let result = match kind {
            Reshard::Slice => {
                let d = split(v);
                let (from, to) = (self.dim_of(arg, d), self.dim_of(v, d));
                let index = index_map(s, d, &s.sharding(v).splits(d), &s.sharding(arg).splits(d));
                let ty = self.local_type(v);
                self.push(Op::Shard { from, to, index }, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::Mask => {
                let form = subs.iter().map(|u| (*u, 1)).collect();
                let at = self.push(Op::Scalar(ir::op::Scalar::Linear(form)), vec![], Type::scalar(ir::op::DType::I32), chunk, origin, None);
                let zero = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(ir::op::DType::I32), chunk, origin, None);
                let first = self.push(Op::Compare(ir::op::Compare::Eq), vec![at, zero], Type::scalar(ir::op::DType::Bool), chunk, origin, None);
                let ty = self.local_type(v);
                let none = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(ty.dtype), chunk, origin, None);
                self.push(Op::Select, vec![first, x, none], ty, chunk, origin, Some(v))
            }
            Reshard::AllReduce if places.is_empty() => return x,
            Reshard::AllReduce => {
                let ty = self.local_type(v);
                let op = Op::Collective { kind: Collective::AllReduce(reduce), subs: places, stages: None, part: None };
                self.push(op, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::AllGather => {
                let d = split(arg);
                let part = self.piece("part", parts);
                let mut ty = self.out.body[x].ty.clone();
                ty.dims.insert(0, part);
                let op = Op::Collective { kind: Collective::AllGather, subs: places.clone(), stages: None, part: Some(part) };
                x = self.push(op, vec![x], ty, chunk, origin, None);
                self.out.reasons[x.index()] = reason.clone();
                self.merge_parts(x, v, d, part, arg, &places, chunk)
            }
            Reshard::ReduceScatter => {
                let d = split(v);
                let part = self.piece("part", parts);
                let x = self.split_parts(x, arg, d, part, v, &places, chunk);
                let mut ty = self.out.body[x].ty.clone();
                ty.dims.retain(|e| *e != part);
                let op = Op::Collective { kind: Collective::ReduceScatter(reduce), subs: places, stages: None, part: Some(part) };
                self.push(op, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::AllToAll => {
                let (gathered, scattered) = (split(arg), split(v));
                let part = self.piece("part", parts);
                let x = self.split_parts(x, arg, scattered, part, v, &places, chunk);
                let ty = self.out.body[x].ty.clone();
                let op = Op::Collective { kind: Collective::AllToAll, subs: places.clone(), stages: None, part: Some(part) };
                let x = self.push(op, vec![x], ty, chunk, origin, None);
                self.out.reasons[x.index()] = reason.clone();
                self.merge_parts(x, v, gathered, part, arg, &places, chunk)
            }
        };
        if matches!(self.out.body[result].op, Op::Collective { .. }) {
            self.out.reasons[result.index()] = reason;
        }
        result
    }

    /// The pieces of a dim's index, outermost first, when `kept` split it before and after: per run of digits, whether it
    /// counts parts (`moving` sub-axes) or local elements, and its extent.
    fn runs(&self, d: Dim, kept: &[SubAxis], moving: &[SubAxis]) -> Vec<(bool, u64)> {
        let s = self.job.s;
        let body = &s.graph.body;
        let digits = &s.digits[body.dims.original(d).0 as usize];
        let mut runs: Vec<(bool, u64)> = vec![];
        let mut rest = body.dims.size(d);
        let pieces = digits.iter().map(|u| (Some(*u), s.mesh[*u].size)).collect::<Vec<_>>();
        for (u, n) in &pieces {
            rest /= n;
            let u = u.expect("invariant: digits are sub-axes");
            if !kept.contains(&u) {
                runs.push((moving.contains(&u), *n));
            }
        }
        runs.push((false, rest));
        runs.into_iter().fold(vec![], |mut out: Vec<(bool, u64)>, (m, n)| {
            match out.last_mut() {
                Some(last) if last.0 == m => last.1 *= n,
                _ => out.push((m, n)),
            }
            out
        })
    }

    /// Makes pieces of the dims that the runs describe: `(part pieces, local pieces, all in order)`.
    fn pieces(&mut self, runs: &[(bool, u64)], part: Dim, local: Dim) -> (Vec<Dim>, Vec<Dim>, Vec<Dim>) {
        let count = |m: bool| runs.iter().filter(|r| r.0 == m).count();
        let (single_part, single_local) = (count(true) == 1, count(false) == 1);
        let (mut parts, mut locals, mut order) = (vec![], vec![], vec![]);
        for (moving, n) in runs {
            let d = match moving {
                true if single_part => part,
                false if single_local => local,
                _ => self.piece("piece", *n),
            };
            if *moving { parts.push(d) } else { locals.push(d) }
            order.push(d);
        }
        (parts, locals, order)
    }

    fn view(&mut self, x: Value, from: &[Dim], to: &[Dim], chunk: Chunk, origin: &Origin, source: Option<Value>) -> Value {
        if from == to {
            return x;
        }
        let old = self.out.body[x].ty.clone();
        // Dims to merge must lie together, in order: copied so if they do not.
        let mut dims: Vec<Dim> = old.dims.iter().copied().filter(|d| !from.contains(d)).collect();
        let at = old.dims.iter().position(|d| *d == from[from.len() - 1]).expect("invariant: the value has the dim");
        let at = old.dims[..at].iter().filter(|d| !from.contains(d)).count();
        dims.splice(at..at, from.iter().copied());
        let x = self.permute(x, &dims, chunk, origin);
        let mut ty = Type::new(old.dtype, dims);
        ty.dims.splice(at..at + from.len(), to.iter().copied());
        self.push(Op::View { from: from.to_vec(), to: to.to_vec() }, vec![x], ty, chunk, origin, source)
    }

    /// Another storage order: a copy, unless it only moves dims of one element.
    fn permute(&mut self, x: Value, dims: &[Dim], chunk: Chunk, origin: &Origin) -> Value {
        let ty = self.out.body[x].ty.clone();
        if ty.dims == dims {
            return x;
        }
        self.push(Op::Expand, vec![x], Type::new(ty.dtype, dims), chunk, origin, None)
    }

    /// `[part, .., local, ..]` to the gathered dim.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one reshard")]
    fn merge_parts(&mut self, x: Value, v: Value, d: Dim, part: Dim, arg: Value, moving: &[SubAxis], chunk: Chunk) -> Value {
        let s = self.job.s;
        let origin = s.graph.body[v].origin.clone();
        let kept: Vec<SubAxis> = s.sharding(v).splits(d);
        let runs = self.runs(d, &kept, moving);
        let (local, whole) = (self.dim_of(arg, d), self.dim_of(v, d));
        let (parts, locals, order) = self.pieces(&runs, part, local);
        let x = self.view(x, &[part], &parts, chunk, &origin, None);
        let x = self.view(x, &[local], &locals, chunk, &origin, None);
        let x = self.view(x, &order, &[whole], chunk, &origin, Some(v));
        let want = self.local_type(v);
        self.permute(x, &want.dims, chunk, &origin)
    }

    /// A dim to `[part, .., local, ..]`, the parts outermost.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one reshard")]
    fn split_parts(&mut self, x: Value, arg: Value, d: Dim, part: Dim, v: Value, moving: &[SubAxis], chunk: Chunk) -> Value {
        let s = self.job.s;
        let origin = s.graph.body[v].origin.clone();
        let kept: Vec<SubAxis> = s.sharding(arg).splits(d);
        let runs = self.runs(d, &kept, moving);
        let (whole, local) = (self.dim_of(arg, d), self.dim_of(v, d));
        let (parts, locals, order) = self.pieces(&runs, part, local);
        let mut x = self.view(x, &[whole], &order, chunk, &origin, None);
        let dims: Vec<Dim> = {
            let rest = self.out.body[x].ty.dims.iter().copied().filter(|e| !parts.contains(e));
            parts.iter().copied().chain(rest).collect()
        };
        x = self.permute(x, &dims, chunk, &origin);
        x = self.view(x, &parts, &[part], chunk, &origin, None);
        self.view(x, &locals, &[local], chunk, &origin, None)
    }
}

fn attention(a: &Attention, at: &mut dyn FnMut(Dim) -> Dim) -> Attention {
    Attention { at: at(a.at), keys: at(a.keys), d: at(a.d), ..a.clone() }
}

/// Where the part of a dim split by `splits` lies within the part split by `within` (a subset): each sub-axis takes its own
/// digit of the mixed-radix index.
pub fn index_map(s: &Sharded, d: Dim, splits: &[SubAxis], within: &[SubAxis]) -> IndexMap {
    let dims = &s.graph.body.dims;
    let digits = &s.digits[dims.original(d).0 as usize];
    let mut rest = dims.size(d);
    // (sub-axis, its size), then what no sub-axis splits.
    let mut pieces: Vec<(Option<SubAxis>, u64)> = vec![];
    for u in digits {
        rest /= s.mesh[*u].size;
        if !within.contains(u) {
            pieces.push((Some(*u), s.mesh[*u].size));
        }
    }
    pieces.push((None, rest));
    let (mut parts, mut base): (Vec<(u64, u64)>, Vec<(SubAxis, u64)>) = (vec![], vec![]);
    let mut stride: u64 = pieces.iter().map(|p| p.1).product();
    for (u, n) in pieces {
        stride /= n;
        match u {
            Some(u) if splits.contains(&u) => base.push((u, stride)),
            _ => match parts.last_mut() {
                Some((extent, step)) if *step == n * stride => (*extent, *step) = (*extent * n, stride),
                _ => parts.push((n, stride)),
            },
        }
    }
    IndexMap { parts, base: if base.is_empty() { Base::Zero } else { Base::Coords(base) } }
}

/// A sharding's text, as in dumps.
pub fn describe(s: &Sharded, sharding: &Sharding) -> String {
    let mut out = vec![];
    for u in s.mesh.ids() {
        match sharding[u] {
            Placement::Replicated => {}
            Placement::Split(d) => out.push(format!("{}/{}", s.graph.body.dims.name(d), s.mesh.describe(&[u]))),
            Placement::Partial(_) => out.push(format!("partial {}", s.mesh.describe(&[u]))),
        }
    }
    out.join(" ")
}
