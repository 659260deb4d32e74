//! What holds for all stages together: which stage computes what, and when.

use crate::partition::param_stages::{ParamStages, StageSet, held, intersect};
use crate::partition::stored_rows::{RowBudget, StoredRows};
use crate::pipeline::stages::assign;
use crate::sharding::axes::one_microbatch;
use ir::algebra::algebra;
use ir::diag::{Diagnostic, Span};
use ir::dim::{Base, Dim, IndexMap};
use ir::graph::{Phase, Users, Value};
use ir::local::Chunk;
use ir::mesh::{Axis, SubAxis};
use ir::op::{Op, Reshard};
use ir::pipeline::{Layout, WeightGradients};
use ir::sharded::{Placement, Sharded};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// The facts that hold for all stages together.
pub(super) struct JobView<'a> {
    pub(super) s: &'a Sharded,
    pub(super) layout: &'a Layout,
    pub(super) weights: WeightGradients,
    pub(super) room: RowBudget,
    /// Virtual stage of values of the forward and backward pass, unless loose.
    pub(super) virtual_stage: Vec<Option<u32>>,
    /// Chunk of each value; a loose value has that of its user.
    pub(super) chunk: Vec<Chunk>,
    /// Completions of sums over data, and 16-bit copies of parameters: they run once, before the first microbatch.
    pub(super) prologue: Vec<bool>,
    /// The values of the forward or backward pass of a virtual stage, in order.
    pub(super) of_pass: HashMap<(Phase, u32), Vec<Value>>,
    /// The node of each parameter that has one.
    pub(super) of_params: HashMap<u32, Value>,
    /// The stages that hold each parameter, if not all do.
    held: ParamStages,
    /// Sums over stages, in order: for each, the stages that add and need it.
    pub(super) stage_sums: BTreeMap<Value, BTreeSet<u32>>,
    /// Per operand of a sum over stages, the one stage that adds it.
    pub(super) adds_on: HashMap<(Value, usize), u32>,
    /// Stages that compute a value of the update.
    pub(super) demand: Vec<BTreeSet<u32>>,
    /// The values that a virtual stage receives in a pass, from the one before it in that pass.
    pub(super) received: HashMap<(Phase, u32), Vec<Value>>,
    pub(super) reports: Vec<(u32, Value)>,
    /// Which values are stored in rows of experts.
    pub(super) rows: StoredRows,
}

impl<'a> JobView<'a> {
    pub(super) fn new(
        s: &'a Sharded,
        training: Option<&Sharded>,
        layout: &'a Layout,
        weights: WeightGradients,
        room: RowBudget,
    ) -> Result<JobView<'a>, Vec<Diagnostic>> {
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
            reports.push((ir::fault!("partition.reports.number", 1, 2) + k as u32, r.value));
        }
        let of_training = training.map_or_else(ParamStages::new, |t| held(&t.graph, layout, &assign(&t.graph.body, layout), &ParamStages::new()));
        let virtual_stage = assign(body, layout);
        let mut job = JobView {
            s,
            layout,
            weights,
            room,
            held: held(&s.graph, layout, &virtual_stage, &of_training),
            virtual_stage,
            chunk: vec![Chunk::Forward(0); n],
            prologue: vec![false; n],
            of_pass: HashMap::new(),
            of_params: HashMap::new(),
            stage_sums: BTreeMap::new(),
            adds_on: HashMap::new(),
            demand: vec![BTreeSet::new(); n],
            received: HashMap::new(),
            reports,
            rows: StoredRows::default(),
        };
        for v in body.values() {
            if let Op::Param(p) = body[v].op {
                job.of_params.entry(p).or_insert(v);
            }
            if let Some(virtual_stage) = job.virtual_stage[v.index()] {
                job.of_pass.entry((body[v].origin.phase, virtual_stage)).or_default().push(v);
            }
        }
        let errors = job.chunks();
        if !errors.is_empty() {
            return Err(errors);
        }
        job.sums_over_stages();
        job.relays();
        job.rows = job.in_rows();
        Ok(job)
    }

    /// The values that are stored in rows. Values that belong to no pass, go to another stage, or are computed
    /// wherever they are used, are dense.
    pub(super) fn in_rows(&self) -> StoredRows {
        let body = &self.s.graph.body;
        let own = |v: Value| self.chunk[v.index()].is_pass() && !self.prologue[v.index()] && !self.stage_sums.contains_key(&v);
        let moves = |v: Value| matches!(body[v].op, Op::Reshard { .. }) && self.virtual_stage[v.index()].is_none();
        let mut fixed: Vec<bool> = body.values().map(|v| !own(v) || moves(v)).collect();
        self.received.values().flatten().for_each(|v| fixed[v.index()] = true);
        for v in body.values().filter(|v| !own(*v) || moves(*v)) {
            body[v].args.iter().for_each(|a| fixed[a.index()] = true);
        }
        self.s.graph.roots().into_iter().for_each(|v| fixed[v.index()] = true);
        StoredRows::of(self.s, &|v| fixed[v.index()])
    }

    /// The stage of a value of the forward and backward pass, unless it is loose.
    pub(super) fn stage(&self, v: Value) -> Option<u32> {
        self.virtual_stage[v.index()].map(|g| self.layout.stage(g))
    }

    /// The values of the backward pass that are on the way to the gradients of another layer's activations: all others lead to gradients of
    /// parameters alone, and nothing waits for them before the end of the step.
    pub(super) fn on_the_way(&self) -> Vec<bool> {
        let body = &self.s.graph.body;
        let users = body.users();
        let unit = |v: Value| (self.virtual_stage[v.index()], body[v].origin.layer);
        let mut sunk = vec![false; body.nodes.len()];
        let mut on_the_way = vec![false; body.nodes.len()];
        for v in body.values().rev().filter(|v| body[*v].origin.phase == Phase::Backward) {
            let later = |c: &Value| body[*c].origin.phase == Phase::Update;
            // A sum of terms of several layers belongs to no layer.
            let sums = matches!(body[v].op, Op::Add | Op::Cast | Op::Reshard { .. });
            sunk[v.index()] = sums && users[v.index()].iter().all(|(c, _)| later(c) || sunk[c.index()]);
            let leads = |c: &Value| !later(c) && !sunk[c.index()] && (on_the_way[c.index()] || unit(*c) != unit(v));
            on_the_way[v.index()] = users[v.index()].iter().any(|(c, _)| leads(c));
        }
        on_the_way
    }

    pub(super) fn chunks(&mut self) -> Vec<Diagnostic> {
        let on_the_way = match self.weights {
            WeightGradients::InBackward => vec![true; self.s.graph.body.nodes.len()],
            WeightGradients::Apart => self.on_the_way(),
        };
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
        // `sums` holds, per value, the sum over the batch that it depends on.
        let mut sums: Vec<Option<Value>> = vec![None; body.nodes.len()];
        for v in body.values() {
            let node = &body[v];
            params[v.index()] = matches!(node.op, Op::Param(_)) || node.args.iter().any(|a| params[a.index()]);
            sums[v.index()] = node.args.iter().find_map(|a| sums[a.index()]);
            let chunk = self.virtual_stage[v.index()].map_or(0, |g| self.layout.chunk(g));
            self.chunk[v.index()] = match node.origin.phase {
                Phase::Forward => Chunk::Forward(chunk),
                Phase::Backward if on_the_way[v.index()] => Chunk::Backward(chunk),
                Phase::Backward => Chunk::Weight(chunk),
                Phase::Update if reported[v.index()] => Chunk::Reduce,
                Phase::Update => Chunk::Update,
            };
            let completes = completes_batch(self.s, v);
            if ir::fault!("partition.prologue.copies", false, node.origin.phase != Phase::Update && body.copied_param(v).is_some()) {
                self.prologue[v.index()] = true;
            }
            if completes && node.origin.phase != Phase::Update {
                self.prologue[v.index()] = true;
                let span = |v: Value| body[v].origin.span;
                let summed = span(node.args[0]);
                let used = not_linear(self.s, &users, v).and_then(span);
                let (text, labels) = match sums[v.index()] {
                    _ if params[v.index()] => (
                        "a sum over the whole batch is used before the last microbatch: its backward would need every microbatch's forward",
                        [(summed, "this sums over the batch"), (used, "and this is not linear in it")],
                    ),
                    Some(first) => (
                        "a sum over the whole batch follows from another one: each would go through all microbatches before the first of a step",
                        [(summed, "this sums over the batch"), (span(body[first].args[0]), "what follows from this sum")],
                    ),
                    None => {
                        sums[v.index()] = Some(v);
                        continue;
                    }
                };
                let label = |e: Diagnostic, (span, text): (Option<Span>, &str)| match span {
                    Some(span) => e.label(span, text),
                    None => e,
                };
                let e = labels.into_iter().fold(Diagnostic::error("E0631", text), label);
                let instead = match params[v.index()] {
                    true => "a mean per sequence instead of one over the batch",
                    false => "sums of which none needs another: a variance is mean(x * x) - mean(x) ^ 2",
                };
                let e = e.help(format!("{}, or {instead}", one_microbatch(&self.s.graph, &self.s.mesh)));
                // Equal errors of several layers are reported once.
                if !errors.contains(&e) {
                    errors.push(e);
                }
            }
        }
        errors
    }

    /// Decides for every value of the update which stages compute it, and where values of several stages are summed.
    pub(super) fn sums_over_stages(&mut self) {
        let body = &self.s.graph.body;
        let all: BTreeSet<u32> = (0..self.layout.stages).collect();
        let users = body.users();
        let uses = &self.held;
        let mut gradients: HashMap<Value, Vec<u32>> = HashMap::new();
        for (param, v) in &self.s.graph.grads {
            gradients.entry(*v).or_default().push(*param);
        }
        // `ends` marks gradients, and values that only resharding separates from gradients.
        let mut ends = vec![false; body.nodes.len()];
        for v in body.values().rev() {
            let ended = |c: &Value| body[*c].origin.phase == Phase::Update || ends[c.index()] && matches!(body[*c].op, Op::Reshard { .. });
            let used = &users[v.index()];
            ends[v.index()] = gradients.contains_key(&v) || !used.is_empty() && used.iter().all(|(c, _)| ended(c));
        }
        // `origin` holds the stages that have a value without communication; `None` stands for all.
        let mut origin: Vec<StageSet> = vec![None; body.nodes.len()];
        // `shared` holds the values that are sent to every stage that needs them: reports, and gradients of
        // parameters that several stages use.
        let mut shared: BTreeSet<Value> = self.reports.iter().map(|r| r.1).collect();
        for v in body.values() {
            let node = &body[v];
            let once = node.origin.phase == Phase::Update;
            origin[v.index()] = match (&node.op, self.stage(v)) {
                (_, Some(s)) => Some([s].into()),
                // A value that depends on parameters alone is where they are.
                (Op::Param(p), None) => uses.get(p).cloned(),
                (_, None) if !once => node.args.iter().fold(None, |set, a| intersect(&set, &origin[a.index()])),
                _ => {
                    let args: Vec<StageSet> = node.args.iter().map(|a| origin[a.index()].clone().filter(|_| !shared.contains(a))).collect();
                    let common = args.iter().fold(None, |x, y| intersect(&x, y)).filter(|set| !set.is_empty());
                    let apart = common.is_none() && args.iter().any(Option::is_some);
                    // Terms are summed where they are. For any other op, each stage that needs the result gets the
                    // operands.
                    if apart && node.op == Op::Add {
                        self.stage_sums.insert(v, BTreeSet::new());
                    }
                    common
                }
            };
            // This is the gradient of a parameter that several virtual stages use, or a reshard of it.
            if !once && node.origin.phase == Phase::Backward && ends[v.index()] && self.layout.virtual_stages() > 1 {
                let stages: BTreeSet<u32> = node.args.iter().filter_map(|a| self.virtual_stage[a.index()]).collect();
                let sums = node.op == Op::Add && stages.len() > 1;
                if sums {
                    self.stage_sums.insert(v, BTreeSet::new());
                }
                if sums || node.args.iter().any(|a| self.chunk[a.index()] == Chunk::Reduce) {
                    self.virtual_stage[v.index()] = None;
                    self.chunk[v.index()] = Chunk::Reduce;
                    origin[v.index()] = None;
                }
            }
            if let (Some(set), Some(params)) = (&origin[v.index()], gradients.get(&v))
                && params.iter().filter_map(|p| uses.get(p)).flatten().any(|s| !set.contains(s))
            {
                shared.insert(v);
            }
        }
        for u in &self.s.graph.updates {
            let stages = uses.get(&u.param).unwrap_or(&all);
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
                // A term that all stages have is added by a stage that adds another term.
                let own = |a: &Value| origin[a.index()].as_ref().filter(|_| !shared.contains(a)).and_then(|set| set.first().copied());
                let adds = body[v].args.iter().find_map(own).or(wanted.first().copied()).unwrap_or(0);
                let places: Vec<u32> = body[v].args.iter().map(|a| own(a).unwrap_or(adds)).collect();
                for (k, (a, on)) in body[v].args.iter().zip(places).enumerate() {
                    members.insert(on);
                    self.adds_on.insert((v, k), on);
                    self.demand[a.index()].insert(on);
                }
                self.stage_sums.insert(v, members);
                continue;
            }
            // A value that only some stages can compute reaches the others as a sum with one term.
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
        // Sums over stages come before the update, and so do their operands.
        let mut summed = vec![false; body.nodes.len()];
        for v in body.values().rev().filter(|v| once(self, *v)).collect::<Vec<Value>>() {
            if summed[v.index()] || self.stage_sums.contains_key(&v) {
                self.chunk[v.index()] = Chunk::Reduce;
                body[v].args.iter().for_each(|a| summed[a.index()] = true);
            }
        }
        // Per-microbatch values and parameters that other stages need at the end reach them in the same way.
        let anywhere = |op: &Op| op.is_source() && !matches!(op, Op::Param(_));
        for v in body.values() {
            if let (Some(set), false, false) = (&origin[v.index()], once(self, v), anywhere(&body[v].op))
                && !self.demand[v.index()].is_subset(set)
            {
                let on = *set.first().expect("invariant: a value has a stage");
                let mut members = self.demand[v.index()].clone();
                members.insert(on);
                self.stage_sums.insert(v, members);
                self.adds_on.insert((v, usize::MAX), on);
            }
        }
    }
}

/// Where the part of a dim split by `splits` lies within the part split by `within` (a subset): each sub-axis takes its own
/// digit of the mixed-radix index.
pub(super) fn index_map(s: &Sharded, d: Dim, splits: &[SubAxis], within: &[SubAxis]) -> IndexMap {
    let dims = &s.graph.body.dims;
    let digits = &s.digits[dims.original(d).0 as usize];
    let mut rest = dims.size(d);
    // The pieces are (sub-axis, size), followed by the part that no sub-axis splits.
    let mut pieces: Vec<(Option<SubAxis>, u64)> = vec![];
    for u in digits {
        rest /= s.mesh[*u].size;
        if !within.contains(u) {
            pieces.push((Some(*u), s.mesh[*u].size));
        }
    }
    pieces.push((None, rest));
    let mut parts: Vec<(u64, u64)> = vec![];
    let mut base: Vec<(SubAxis, u64)> = vec![];
    let mut stride: u64 = pieces.iter().map(|p| p.1).product();
    for (u, n) in pieces {
        stride /= n;
        match u {
            Some(u) if splits.contains(&u) => base.push((u, ir::fault!("partition.index.stride", 1, stride))),
            _ => match parts.last_mut() {
                Some((extent, step)) if *step == n * stride => (*extent, *step) = (*extent * n, stride),
                _ => parts.push((n, stride)),
            },
        }
    }
    IndexMap { parts, base: if base.is_empty() { Base::Zero } else { Base::Coords(base) } }
}

/// Whether a node takes the sum over all microbatches.
fn completes_batch(s: &Sharded, v: Value) -> bool {
    matches!(&s.graph.body[v].op, Op::Reshard { kind: Reshard::AllReduce | Reshard::ReduceScatter, subs }
        if subs.iter().any(|u| s.mesh[*u].axis == Axis::Microbatch))
}

/// The first value that depends on a sum over the batch in a nonlinear way; if there is none, the first user of the
/// sum.
fn not_linear(s: &Sharded, users: &Users, sum: Value) -> Option<Value> {
    let body = &s.graph.body;
    let mut sums = vec![false; body.nodes.len()];
    for v in body.values() {
        let of_batch = body.dims_of(v).iter().any(|d| Some(body.dims.original(*d)) == s.graph.batch);
        let parts = s.mesh.of(Axis::Microbatch).any(|u| s.shardings[v.index()][u] == Placement::SUM);
        sums[v.index()] = completes_batch(s, v) || parts || !of_batch && body[v].args.iter().any(|a| sums[a.index()]);
    }
    let (mut open, mut seen) = (VecDeque::from([sum]), BTreeSet::from([sum]));
    while let Some(v) = open.pop_front() {
        for (c, slot) in users[v.index()].iter().filter(|(c, _)| body[*c].origin.phase == Phase::Forward) {
            let rule = algebra(body, *c);
            let alone = body[*c].args.iter().filter(|a| sums[a.index()]).count() == 1;
            let is_sum = rule.joint || matches!(body[*c].op, Op::Reshard { .. }) || rule.linear.contains(slot) && alone;
            if !is_sum {
                return Some(*c);
            }
            if seen.insert(*c) {
                open.push_back(*c);
            }
        }
    }
    users[sum.index()].first().map(|u| u.0)
}
