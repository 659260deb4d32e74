//! Chooses a sharding for every value and inserts the reshards between them: four linear passes over the graph.
//!
//! Per op and sub-axis, the loop that is split is the first listed dim among the op's own loops. What remains is when sums are
//! completed. Pass 1 (forward) finds the natural placement of every value; pass 2 (backward) finds the partial sums that may
//! flow on, because every use is linear and ends in a sum that happens anyway; pass 3 (backward) finds small values that
//! someone needs whole; pass 4 (forward) places every op and inserts reshards. The rules and what each saves are in `docs/sharding.md`.

use crate::plan::{Chooser, Lists, Tiers, Zero};
use crate::reasons::{Change, reason};
use ir::algebra::{Algebra, Loop, LoopKind, algebra};
use ir::dim::Dim;
use ir::graph::{Body, Graph, Node, Origin, Phase, Type, Value};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Op, Reduce, Reshard};
use ir::sharded::{Partial, Placement, Sharded, Sharding};
use std::collections::HashMap;

/// How rows of the ops' tables are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// By the rules of this module.
    Rules,
    /// At random among the sound ones, by seed: whatever the algebra allows must compute the same.
    Random(u64),
}

/// Chooses shardings and inserts reshards.
pub fn propagate(graph: Graph, mesh: &Mesh, lists: &Lists, rows: Rows) -> Sharded {
    let mut chooser = Chooser::new(mesh, lists, &graph.body.dims);
    chooser.params_first(&graph);
    let rules: Vec<Algebra> = graph.body.values().map(|v| algebra(&graph.body, v)).collect();
    let choice: Vec<Vec<Option<usize>>> = graph
        .body
        .values()
        .map(|v| {
            let loops = &rules[v.index()].loops;
            let open = |l: &Loop| !matches!(l.kind, LoopKind::Block | LoopKind::Ring);
            let dims: Vec<Dim> = loops.iter().filter(|l| open(l)).flat_map(Loop::dims).collect();
            let tiers = match graph.body[v].op {
                Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..) => Tiers::Attention,
                _ if graph.body[v].origin.phase == Phase::Update => Tiers::States,
                _ => Tiers::All,
            };
            let chosen = chooser.choose(&graph.body.dims, &dims, tiers);
            let row = |(u, d): (SubAxis, Option<Dim>)| {
                let has = |l: &Loop| l.dims().any(|e| Some(e) == d);
                let ring = loops.iter().position(|l| l.kind == LoopKind::Ring && has(l) && chooser.rings(&graph.body.dims, u, l));
                ring.or_else(|| loops.iter().position(|l| open(l) && has(l)))
            };
            mesh.ids().zip(chosen).map(row).collect()
        })
        .collect();
    let update = |v: &Value| graph.body[*v].origin.phase == Phase::Update;
    let reports: Vec<Value> = graph.loss.iter().copied().chain(graph.losses.iter().chain(&graph.metrics).map(|r| r.value)).collect();
    let terms = graph.body.values().filter(update).flat_map(|v| graph.body[v].args.clone()).filter(|a| !update(a) && !graph.body[*a].op.is_source());
    let sinks: Vec<Value> = graph.grads.iter().map(|g| g.1).chain(reports.iter().copied()).chain(terms).collect();
    let mut is_gradient = vec![false; graph.body.nodes.len()];
    graph.grads.iter().for_each(|(_, g)| is_gradient[g.index()] = true);
    let originals = originals(&graph.body);
    let mut users = users_of_all(&graph.body, &originals);
    let mut is_sink = vec![false; graph.body.nodes.len()];
    for s in sinks.iter().filter(|v| !update(v)) {
        is_sink[s.index()] = true;
        // After the microbatches, a sink goes on from where it rests.
        users[s.index()].retain(|(c, _)| graph.body[*c].origin.phase != Phase::Update);
    }
    for v in graph.body.values() {
        let original = originals[v.index()].index();
        is_sink[v.index()] = is_sink[original];
        users[v.index()] = users[original].clone();
    }
    let token_dims = token_dims(&graph, lists);
    let random = match rows {
        Rows::Rules => None,
        Rows::Random(seed) => Some(Lottery(ir::random::mix(seed))),
    };
    let mut p = Propagation {
        old: &graph.body,
        mesh,
        rules: &rules,
        choice: &choice,
        users: &users,
        originals: &originals,
        is_sink: &is_sink,
        is_gradient: &is_gradient,
        chooser,
        natural: vec![],
        later: vec![],
        whole: vec![],
        token_dims,
        compared: random.as_ref().map_or(vec![], |_| compared(&graph.body)),
        random,
        out: Body { dims: graph.body.dims.clone(), nodes: vec![] },
        shardings: vec![],
        reasons: vec![],
        known: HashMap::new(),
        indices: HashMap::new(),
        current: vec![],
        rests: HashMap::new(),
        drawn: HashMap::new(),
    };
    p.natural();
    p.sums_later();
    p.whole_uses();
    let (steps, updates): (Vec<Value>, Vec<Value>) = graph.body.values().partition(|v| graph.body[*v].origin.phase != Phase::Update);
    p.current = vec![Value(u32::MAX); graph.body.nodes.len()];
    for v in steps {
        p.current[v.index()] = p.place(v);
    }
    let mut sums = p.current.clone();
    let end = |origin: &Origin| Origin { phase: Phase::Update, ..origin.clone() };
    for (param, g) in &graph.grads {
        let dims = &graph.params[*param as usize].ty.dims;
        let rest = p.rest(dims, Tiers::States);
        let origin = end(&graph.body[*g].origin);
        sums[g.index()] = p.reshard(p.current[g.index()], &rest, &origin, "the gradient is needed where the optimizer state rests");
    }
    for v in reports.iter().copied().filter(|v| !update(v)) {
        let rest = Sharding::replicated(mesh);
        let origin = end(&graph.body[v].origin);
        sums[v.index()] = p.reshard(p.current[v.index()], &rest, &origin, "a report is known on every rank");
    }
    p.current = sums;
    for v in updates {
        p.current[v.index()] = p.place(v);
    }
    let mut ends: HashMap<Value, Value> = HashMap::new();
    for u in &graph.updates {
        let dims = &graph.params[u.param as usize].ty.dims;
        let (param, state) = (p.rest(dims, Tiers::All), p.rest(dims, Tiers::States));
        let states = u.states.iter().map(|v| (*v, &state));
        for (v, rest) in std::iter::once((u.new, &param)).chain(states) {
            let origin = graph.body[v].origin.clone();
            ends.insert(v, p.reshard(p.current[v.index()], rest, &origin, "the new value rests where the old one did"));
        }
    }
    for v in reports.into_iter().filter(update).chain(graph.grad_norm) {
        let origin = graph.body[v].origin.clone();
        let rest = Sharding::replicated(mesh);
        ends.insert(v, p.reshard(p.current[v.index()], &rest, &origin, "a report is known on every rank"));
    }
    let Propagation { out, shardings, reasons, current, chooser, .. } = p;
    let digits = chooser.digits;
    let mut graph = Graph { body: out, ..graph };
    graph.map_roots(|v| ends.get(&v).copied().unwrap_or(current[v.index()]));
    Sharded { graph, mesh: mesh.clone(), digits, shardings, reasons }
}

/// What makes two nodes compute the same: op, operands, type and layer.
type Computation<'a> = (&'a Op, Vec<Value>, &'a Type, Option<u32>);

/// For each value, the one of the forward pass that it computes again; itself for all others.
fn originals(body: &Body) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(body.nodes.len());
    let mut known: HashMap<Computation, Value> = HashMap::new();
    for v in body.values() {
        let node = &body[v];
        let key = (&node.op, node.args.iter().map(|a| out[a.index()]).collect(), &node.ty, node.origin.layer);
        out.push(match node.origin.phase {
            Phase::Forward => *known.entry(key).or_insert(v),
            Phase::Backward => known.get(&key).copied().unwrap_or(v),
            Phase::Update => v,
        });
    }
    out
}

/// For each value, the nodes that use it or a copy of it; copies of nodes are left out, since they do as their originals.
fn users_of_all(body: &Body, originals: &[Value]) -> Vec<Vec<(Value, usize)>> {
    let mut users: Vec<Vec<(Value, usize)>> = vec![vec![]; body.nodes.len()];
    for v in body.values().filter(|v| originals[v.index()] == *v) {
        for (slot, a) in body[v].args.iter().enumerate() {
            users[originals[a.index()].index()].push((v, slot));
        }
    }
    users
}

/// The values that are compared, as they are or moved. Two copies of one (a value and its greatest, an element and its rivals) must hold the same
/// bits, so a sum is completed once for both: two orders of adding round differently. The rules do so for every value; the lottery only for these.
fn compared(body: &Body) -> Vec<bool> {
    let mut out = vec![false; body.nodes.len()];
    for v in body.values().rev() {
        let moves = match body[v].op {
            Op::Compare(_) => true,
            Op::Cast
            | Op::StopGradient
            | Op::Cut
            | Op::Expand
            | Op::View { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Concat { .. }
            | Op::Reduce { kind: Reduce::Max, .. } => out[v.index()],
            _ => false,
        };
        if moves {
            body[v].args.iter().for_each(|a| out[a.index()] = true);
        }
    }
    out
}

/// The dims that tell one token from another: of inputs, and split by data or sequence parallelism.
fn token_dims(graph: &Graph, lists: &Lists) -> Vec<Dim> {
    let by_data = [Axis::Dp, Axis::Cp].into_iter().flat_map(|a| lists.of(a).iter().take(1));
    let by_sequence = lists.of(Axis::Tp).iter().skip(1);
    let listed: Vec<Dim> = graph.batch.into_iter().chain(by_data.chain(by_sequence).flatten().copied()).collect();
    listed.into_iter().filter(|d| graph.inputs.iter().any(|i| i.ty.has(*d))).collect()
}

/// A value's placement if every op took its chosen row and nothing were completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Natural {
    Whole,
    Split,
    Sum,
    Max,
}

/// What an op does on one sub-axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Whole,
    Split(usize),
    /// All operands are partial sums, and so is the result.
    Sums,
    /// The operand in this slot is a partial sum, and so is the result.
    Through(usize),
}

struct Lottery(u64);

impl Lottery {
    fn draw<T: Copy>(&mut self, from: &[T]) -> T {
        self.0 = ir::random::mix(self.0);
        from[(self.0 % from.len() as u64) as usize]
    }
}

/// What makes two reshards the same: operand, kind, placement reached, sub-axes; of a gather the phase too.
type Known = (Value, Reshard, Placement, Vec<SubAxis>, Option<Phase>);

/// One collective (or slice, or mask) of a reshard.
struct Move {
    kind: Reshard,
    from: Placement,
    to: Placement,
    /// The axis it exchanges along; none where several can be done together.
    axis: Option<Axis>,
    subs: Vec<SubAxis>,
}

struct Propagation<'a> {
    old: &'a Body,
    mesh: &'a Mesh,
    rules: &'a [Algebra],
    choice: &'a [Vec<Option<usize>>],
    users: &'a [Vec<(Value, usize)>],
    originals: &'a [Value],
    is_sink: &'a [bool],
    is_gradient: &'a [bool],
    chooser: Chooser<'a>,
    natural: Vec<Vec<Natural>>,
    later: Vec<Vec<bool>>,
    whole: Vec<Vec<bool>>,
    token_dims: Vec<Dim>,
    /// With random rows, the values whose bits matter; see [`compared`].
    compared: Vec<bool>,
    random: Option<Lottery>,
    /// What the lottery gave, by value that is no copy.
    drawn: HashMap<(Value, SubAxis), Mode>,
    out: Body,
    shardings: Vec<Sharding>,
    reasons: Vec<Option<String>>,
    known: HashMap<Known, Value>,
    /// Indices made in another sharding.
    indices: HashMap<(Value, Sharding), Value>,
    /// For each old value, the new one that stands for it.
    current: Vec<Value>,
    rests: HashMap<(Vec<Dim>, Tiers), Sharding>,
}

impl Propagation<'_> {
    fn rest(&mut self, dims: &[Dim], tiers: Tiers) -> Sharding {
        let key = (dims.to_vec(), tiers);
        if let Some(s) = self.rests.get(&key) {
            return s.clone();
        }
        let chosen = self.chooser.choose(&self.old.dims, dims, tiers);
        let s = Sharding(chosen.into_iter().map(|d| d.map_or(Placement::Replicated, Placement::Split)).collect());
        self.rests.insert(key, s.clone());
        s
    }

    /// Whether it computes a forward value again. It is placed as that is, so that recomputation changes no result.
    fn repeats(&self, v: Value) -> bool {
        self.originals[v.index()] != v
    }

    /// Pass 1.
    fn natural(&mut self) {
        for v in self.old.values() {
            if self.repeats(v) {
                self.natural.push(self.natural[self.originals[v.index()].index()].clone());
                continue;
            }
            let node = &self.old[v];
            let rule = &self.rules[v.index()];
            let row = self
                .mesh
                .ids()
                .map(|u| {
                    if rule.joint && node.args.iter().all(|a| self.passes_sum(*a, u)) {
                        return Natural::Sum;
                    }
                    match self.choice[v.index()][u.0 as usize] {
                        None => Natural::Whole,
                        Some(_) if is_free(&node.op) => Natural::Whole,
                        Some(l) => match rule.loops[l].kind {
                            LoopKind::Map | LoopKind::Ring => Natural::Split,
                            LoopKind::Sum => Natural::Sum,
                            LoopKind::Max => Natural::Max,
                            LoopKind::Block => unreachable!("invariant: block loops are not chosen"),
                        },
                    }
                })
                .collect();
            self.natural.push(row);
        }
    }

    fn is(&self, v: Value, u: SubAxis, what: Natural) -> bool {
        self.natural[v.index()][u.0 as usize] == what
    }

    /// A partial sum that only sums use.
    fn passes_sum(&self, v: Value, u: SubAxis) -> bool {
        self.is(v, u, Natural::Sum) && self.users[v.index()].iter().all(|(c, _)| self.old[*c].op == Op::Add)
    }

    /// Pass 2: whether every use of a value is linear and ends in a sum over `u` that happens anyway, or in a sink.
    fn sums_later(&mut self) {
        let subs = self.mesh.subs.len();
        self.later = vec![vec![false; subs]; self.old.nodes.len()];
        for v in self.old.values().rev() {
            if self.repeats(v) {
                continue;
            }
            for u in self.mesh.ids() {
                let mut ok = self.is_sink[v.index()] || !self.users[v.index()].is_empty();
                for (c, slot) in &self.users[v.index()] {
                    let rule = &self.rules[c.index()];
                    let mut others = self.old[*c].args.iter().enumerate().filter(|(k, _)| k != slot).map(|(_, a)| *a);
                    let next = self.later[c.index()][u.0 as usize];
                    ok &= if rule.joint {
                        next || others.any(|a| self.is(a, u, Natural::Sum))
                    } else {
                        next && rule.linear.contains(slot)
                            && self.choice[c.index()][u.0 as usize].is_none()
                            && !others.any(|a| self.is(a, u, Natural::Sum))
                    };
                }
                self.later[v.index()][u.0 as usize] = ok;
            }
        }
        // What a delayed sum flows through is partial too.
        for v in self.old.values() {
            if self.repeats(v) {
                let original = self.originals[v.index()].index();
                self.later[v.index()] = self.later[original].clone();
                self.natural[v.index()] = self.natural[original].clone();
                continue;
            }
            for u in self.mesh.ids() {
                if self.choice[v.index()][u.0 as usize].is_none() && self.later[v.index()][u.0 as usize] {
                    let rule = &self.rules[v.index()];
                    if rule.linear.iter().any(|k| self.is(self.old[v].args[*k], u, Natural::Sum)) {
                        self.natural[v.index()][u.0 as usize] = Natural::Sum;
                    }
                }
            }
        }
    }

    /// Pass 3: whether a small value is needed whole by someone, directly or through small pointwise ops.
    fn whole_uses(&mut self) {
        let small = |v: Value| self.old.dims_of(v).iter().all(|d| self.token_dims.contains(d));
        let mut whole = vec![vec![false; self.mesh.subs.len()]; self.old.nodes.len()];
        for v in self.old.values().rev().filter(|v| small(*v) && !self.repeats(*v)) {
            for u in self.mesh.ids() {
                whole[v.index()][u.0 as usize] = self.users[v.index()].iter().any(|(c, slot)| {
                    let chosen = self.choice[c.index()][u.0 as usize];
                    let has = chosen.is_some_and(|l| self.rules[c.index()].loops[l].args[*slot].is_some());
                    let alike =
                        self.old.dims_of(*c).len() == self.old.dims_of(v).len() && self.old.dims_of(*c).iter().all(|d| self.old[v].ty.has(*d));
                    !has || small(*c) && alike && whole[c.index()][u.0 as usize]
                });
            }
        }
        for v in self.old.values() {
            whole[v.index()] = whole[self.originals[v.index()].index()].clone();
        }
        self.whole = whole;
    }

    /// Pass 4, one op.
    fn place(&mut self, v: Value) -> Value {
        let node = self.old[v].clone();
        if node.op.is_source() {
            let sharding = match node.op {
                Op::Input(_) => self.rest(&node.ty.dims, Tiers::First),
                Op::State(..) => self.rest(&node.ty.dims, Tiers::States),
                Op::Param(_) | Op::Uniform { .. } => self.rest(&node.ty.dims, Tiers::All),
                _ => Sharding::replicated(self.mesh),
            };
            return self.emit(node, sharding, None);
        }
        let mut args: Vec<Value> = node.args.iter().map(|a| self.current[a.index()]).collect();
        let rule = &self.rules[v.index()];
        let mut inner_rule = None;
        if rule.joint && args.len() > 2 && !node.ty.dims.is_empty() && self.random.is_none() {
            self.sum_partials_first(v, &node, &mut args);
            if args.len() != node.args.len() {
                let probe = Node { args: args.clone(), ..node.clone() };
                self.out.nodes.push(probe);
                inner_rule = Some(algebra(&self.out, Value(self.out.nodes.len() as u32 - 1)));
                self.out.nodes.pop();
            }
        }
        let regrouped = inner_rule.is_some();
        let modes: Vec<Mode> = self.mesh.ids().map(|u| self.mode(v, &args, regrouped, u)).collect();
        let rule = inner_rule.unwrap_or_else(|| self.rules[v.index()].clone());
        let mut needs = vec![Sharding::replicated(self.mesh); args.len()];
        let mut result = Sharding::replicated(self.mesh);
        for u in self.mesh.ids() {
            match modes[u.0 as usize] {
                Mode::Whole => {}
                Mode::Sums => {
                    needs.iter_mut().for_each(|n| n[u] = Placement::SUM);
                    result[u] = Placement::SUM;
                }
                Mode::Through(slot) => {
                    needs[slot][u] = Placement::SUM;
                    result[u] = Placement::SUM;
                }
                Mode::Split(l) => {
                    // After regrouping a sum's loops are found by name; otherwise by number.
                    let of = if regrouped {
                        let name = self.rules[v.index()].loops[l].dims().next();
                        rule.loops.iter().find(|m| m.dims().next() == name).expect("invariant: regrouping keeps the loops")
                    } else {
                        &rule.loops[l]
                    };
                    for (need, d) in needs.iter_mut().zip(&of.args) {
                        need[u] = d.map_or(Placement::Replicated, Placement::Split);
                    }
                    result[u] = match of.kind {
                        LoopKind::Map | LoopKind::Ring => of.out.map_or(Placement::Replicated, Placement::Split),
                        LoopKind::Sum => Placement::SUM,
                        LoopKind::Max => Placement::Partial(Partial::Max),
                        LoopKind::Block => unreachable!("invariant: block loops are not chosen"),
                    };
                }
            }
        }
        for (k, need) in needs.iter().enumerate() {
            let why = format!("operand {k} of {}", node.op.name());
            args[k] = self.reshard(args[k], need, &node.origin, &why);
        }
        let (dims, origin, name) = (node.ty.dims.clone(), node.origin.clone(), node.op.name());
        let placed = self.emit(Node { args, ..node }, result.clone(), None);
        let shared = self.is_shared(v) && !self.sums_stages(v);
        let drawn = self.random.is_some() && !self.compared[v.index()];
        if (self.is_sink[v.index()] || drawn) && !shared {
            return placed;
        }
        let rest = self.rest(&dims, self.tiers_of(v));
        let mut to = result;
        for u in self.mesh.ids() {
            if shared && to[u].is_partial() && matches!(rest[u], Placement::Split(_)) && self.mesh[u].axis != Axis::Microbatch {
                to[u] = rest[u];
            } else if !shared && to[u].is_partial() && !self.keeps(v, u) {
                to[u] = if self.whole[v.index()][u.0 as usize] { Placement::Replicated } else { rest[u] };
            }
        }
        self.reshard(placed, &to, &origin, &format!("completes the partial result of {name}"))
    }

    /// A partial sum stays one only if all its users take it so; otherwise it is completed once, for all.
    fn keeps(&self, v: Value, u: SubAxis) -> bool {
        self.is_sink[v.index()]
            || self.later[v.index()][u.0 as usize]
            || self.users[v.index()]
                .iter()
                .all(|(c, _)| self.old[*c].op == Op::Add && self.old[*c].args.iter().filter(|a| self.passes_sum(**a, u)).count() > 1)
    }

    /// Whether ranks share a gradient out: it is summed in every microbatch to where it rests, so that what they accumulate is a part.
    fn is_shared(&self, v: Value) -> bool {
        self.is_gradient[v.index()] && self.chooser.lists.zero == Zero::Params
    }

    /// Where a value rests once it is complete.
    fn tiers_of(&self, v: Value) -> Tiers {
        if self.is_shared(v) || self.old[v].origin.phase == Phase::Update { Tiers::States } else { Tiers::All }
    }

    /// Whether it may be a sum of what several pipeline stages have, which is taken after all microbatches.
    fn sums_stages(&self, v: Value) -> bool {
        self.old[v].op == Op::Add && self.mesh.size(Axis::Pp) > 1
    }

    /// Of a sum of many, adds the terms that are partial over the same sub-axes as an op of their own: one reduction for all.
    fn sum_partials_first(&mut self, v: Value, node: &Node, args: &mut Vec<Value>) {
        let partial = |s: &Self, a: Value| -> Vec<SubAxis> {
            s.mesh.ids().filter(|u| s.shardings[a.index()][*u] == Placement::SUM && !s.later[v.index()][u.0 as usize]).collect()
        };
        let keys: Vec<Vec<SubAxis>> = args.iter().map(|a| partial(self, *a)).collect();
        let Some(key) = keys.iter().find(|k| !k.is_empty() && keys.iter().filter(|o| o == k).count() > 1).cloned() else { return };
        if keys.iter().all(|k| *k == key) {
            return;
        }
        let inner: Vec<Value> = (0..args.len()).filter(|k| keys[*k] == key).map(|k| args[k]).collect();
        let rest = (0..args.len()).filter(|k| keys[*k] != key).map(|k| args[k]);
        let first = self.shardings[inner[0].index()].clone();
        let alike = inner.iter().all(|a| self.shardings[a.index()] == first && self.out.dims_of(*a).len() == node.ty.dims.len());
        if !alike {
            return;
        }
        let outer: Vec<Value> = rest.collect();
        let sum = self.emit(Node { args: inner, ..node.clone() }, first, None);
        *args = outer.into_iter().chain([sum]).collect();
    }

    fn mode(&mut self, v: Value, args: &[Value], regrouped: bool, u: SubAxis) -> Mode {
        let rule = &self.rules[v.index()];
        let current: Vec<Placement> = args.iter().map(|a| self.shardings[a.index()][u]).collect();
        if self.random.is_some() {
            return self.any_row(v, &current, u);
        }
        if self.is_shared(v) && self.sums_stages(v) && self.mesh[u].axis != Axis::Microbatch {
            let rest = self.rest(&self.old[v].ty.dims, Tiers::States)[u];
            if let Some(l) = rule.loops.iter().position(|l| matches!(rest, Placement::Split(d) if l.out == Some(d))) {
                return Mode::Split(l);
            }
        }
        let later = self.later[v.index()][u.0 as usize];
        let sums = current.iter().filter(|c| **c == Placement::SUM).count();
        let simple = current.iter().all(|c| matches!(*c, Placement::SUM | Placement::Replicated));
        if rule.joint {
            let scalar = self.old[v].ty.dims.is_empty();
            if sums == current.len() || simple && sums > 0 && (scalar || later && !regrouped) {
                return Mode::Sums;
            }
        } else if sums == 1 && self.choice[v.index()][u.0 as usize].is_none() {
            let slot = current.iter().position(|c| *c == Placement::SUM).expect("invariant: one is");
            if rule.linear.contains(&slot) && self.later[self.old[v].args[slot].index()][u.0 as usize] {
                return Mode::Through(slot);
            }
        }
        match self.choice[v.index()][u.0 as usize] {
            None => Mode::Whole,
            // Lazy: what is whole stays whole, and is sliced where it meets something split. What an op adds by itself
            // (an expansion) is made whole only where someone needs it so.
            Some(l)
                if current.iter().all(|c| *c == Placement::Replicated)
                    && (rule.loops[l].args.iter().any(Option::is_some) || self.whole[v.index()][u.0 as usize]) =>
            {
                Mode::Whole
            }
            Some(l) => Mode::Split(l),
        }
    }

    fn any_row(&mut self, v: Value, current: &[Placement], u: SubAxis) -> Mode {
        let rule = &self.rules[v.index()];
        let axis = self.mesh[u].axis;
        let mut rows = vec![];
        // Microbatches are time: their row is not free to choose.
        if axis == Axis::Microbatch {
            return match self.choice[v.index()][u.0 as usize] {
                Some(l) => Mode::Split(l),
                None => match current.iter().position(|c| *c == Placement::SUM) {
                    Some(_)
                        if rule.joint
                            && current.iter().all(|c| matches!(*c, Placement::SUM | Placement::Replicated))
                            && self.old[v].origin.phase != Phase::Update =>
                    {
                        Mode::Sums
                    }
                    Some(slot) if !rule.joint && rule.linear.contains(&slot) && self.later[self.old[v].args[slot].index()][u.0 as usize] => {
                        Mode::Through(slot)
                    }
                    _ => Mode::Whole,
                },
            };
        }
        rows.push(Mode::Whole);
        let listed: Vec<Dim> = self.chooser.lists.dims_of(self.mesh, u);
        for (l, lp) in rule.loops.iter().enumerate() {
            if lp.kind != LoopKind::Block && lp.dims().all(|d| listed.contains(&d)) {
                let dims: Vec<Dim> = lp.dims().collect();
                if dims.iter().all(|d| self.chooser.fits(&self.old.dims, u, *d)) {
                    rows.push(Mode::Split(l));
                }
            }
        }
        if self.old[v].op != Op::Cut {
            if rule.joint && current.contains(&Placement::SUM) && current.iter().all(|c| matches!(*c, Placement::SUM | Placement::Replicated)) {
                rows.extend([Mode::Sums; 2]);
            }
            if !rule.joint {
                rows.extend(rule.linear.iter().filter(|k| current[**k] == Placement::SUM).flat_map(|k| [Mode::Through(*k); 2]));
            }
        }
        // A copy of a value is made as the value is: who compares the two (the gradient of a maximum does) must find the same bits.
        let original = (self.originals[v.index()], u);
        if let Some(mode) = self.drawn.get(&original).filter(|m| rows.contains(m)) {
            return *mode;
        }
        let mode = self.random.as_mut().expect("invariant: asked for random rows").draw(&rows);
        self.drawn.insert(original, mode);
        mode
    }

    fn emit(&mut self, node: Node, sharding: Sharding, reason: Option<String>) -> Value {
        self.out.nodes.push(node);
        self.shardings.push(sharding);
        self.reasons.push(reason);
        Value(self.out.nodes.len() as u32 - 1)
    }

    /// Leads a value to another sharding: slices, sums, exchanges, gathers, masks, in this order; sub-axes together where one
    /// collective does. A reshard is made once per value; a gather once per phase, since keeping a gathered value from the
    /// forward to the backward pass would undo the saving.
    fn reshard(&mut self, v: Value, to: &Sharding, origin: &Origin, why: &str) -> Value {
        if matches!(self.out[v].op, Op::Iota(_)) && !to.0.iter().any(|p| p.is_partial()) {
            return self.index(v, to);
        }
        let mut moves: Vec<Move> = vec![];
        let from = self.shardings[v.index()].clone();
        for u in self.mesh.ids() {
            let (a, b) = (from[u], to[u]);
            if a == b {
                continue;
            }
            let kind = match (a, b) {
                (Placement::Partial(_), Placement::Split(_)) => Reshard::ReduceScatter,
                (Placement::Partial(_), Placement::Replicated) => Reshard::AllReduce,
                (Placement::Replicated, Placement::Split(_)) => Reshard::Slice,
                (Placement::Split(_), Placement::Replicated) => Reshard::AllGather,
                (Placement::Split(_), Placement::Split(_)) => Reshard::AllToAll,
                (Placement::Replicated, Placement::Partial(_)) => Reshard::Mask,
                (Placement::Replicated, Placement::Replicated) | (Placement::Split(_) | Placement::Partial(_), Placement::Partial(_)) => {
                    unreachable!("invariant: no rule asks for a partial value of something split")
                }
            };
            // Sums over several axes are one; other collectives exchange along one axis.
            let axis = match kind {
                Reshard::AllReduce | Reshard::Slice | Reshard::Mask => None,
                Reshard::ReduceScatter | Reshard::AllToAll | Reshard::AllGather => Some(self.mesh[u].axis),
            };
            match moves.iter_mut().find(|m| (m.kind, m.from, m.to, m.axis) == (kind, a, b, axis)) {
                Some(m) => m.subs.push(u),
                None => moves.push(Move { kind, from: a, to: b, axis, subs: vec![u] }),
            }
        }
        moves.sort_by_key(|m| m.kind);
        let mut v = v;
        for Move { kind, from, to: b, subs, .. } in moves {
            let phase = (kind == Reshard::AllGather).then_some(origin.phase);
            let key = (v, kind, b, subs.clone(), phase);
            // The backward pass of a layer may be on another stage than the layer that made it in the forward pass.
            let made = |w: &Value| {
                let by = &self.out[*w].origin;
                by.phase == origin.phase || by.layer == origin.layer
            };
            v = match self.known.get(&key).copied().filter(made) {
                Some(w) => w,
                None => {
                    let mut sharding = self.shardings[v.index()].clone();
                    subs.iter().for_each(|u| sharding[*u] = b);
                    let ty = self.out[v].ty.clone();
                    let change = Change { from, to: b, subs: &subs };
                    let why = reason(why, &change, origin, self.mesh, &self.old.dims, self.chooser.lists);
                    let w = self.emit(Node { op: Op::Reshard { kind, subs }, args: vec![v], ty, origin: origin.clone() }, sharding, Some(why));
                    self.known.insert(key, w);
                    w
                }
            };
        }
        v
    }
}

impl Propagation<'_> {
    /// An index where another sharding of it is wanted: made there, without a reshard.
    fn index(&mut self, v: Value, to: &Sharding) -> Value {
        if self.shardings[v.index()] == *to {
            return v;
        }
        let key = (v, to.clone());
        if let Some(w) = self.indices.get(&key) {
            return *w;
        }
        let w = self.emit(self.out[v].clone(), to.clone(), None);
        self.indices.insert(key, w);
        w
    }
}

/// Sources that every rank can make whole for itself.
fn is_free(op: &Op) -> bool {
    matches!(op, Op::Const(_) | Op::Iota(_) | Op::Scalar(_) | Op::Table(_))
}
