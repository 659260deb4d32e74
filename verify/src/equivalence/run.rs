//! Graphs on terms. All classes of stages run side by side, since a sum over stages is of what each of them has then.

use super::per_rank::Each;
use super::pieces::{self, Joined, SymbolicValue};
use super::rules::{self, Rules};
use super::step::NodeEvaluator;
use super::{StageClass, place};
use crate::terms::{Index, TermKind, TermView};
use crate::violation::{Breach, Checked, fail};
use crate::{Invariant, Violation};
use ir::dim::Order;
use ir::graph::Value;
use ir::local::{Chunk, Local};
use ir::mesh::SubAxis;
use ir::op::{Channel, Collective, DType, Op, Reduce};
use ir::sharded::Placement;
use std::collections::BTreeMap;

/// What can be seen of a step from outside.
#[derive(Default)]
pub struct ClassOutcome {
    pub reports: BTreeMap<u32, (Value, SymbolicValue)>,
    /// By slot: the new parameter and its states.
    pub updates: BTreeMap<u32, (Value, SymbolicValue, Vec<SymbolicValue>)>,
    pub limits: Vec<(u64, SymbolicValue)>,
    /// In order.
    pub sent: BTreeMap<(i64, Channel), Vec<(Value, SymbolicValue)>>,
    /// By bucket: the ranks that have parts of its states.
    pub owners: BTreeMap<u32, Vec<SubAxis>>,
    /// Of each value of the graph: whether it is a term that none of the graphs before has made.
    pub new: Vec<bool>,
}

/// The n-th collective across some stages: the values that classes have given to it, and its result.
type StageCollectives = BTreeMap<(Vec<u64>, usize), (BTreeMap<usize, SymbolicValue>, Option<SymbolicValue>)>;

/// Runs the graphs of all classes, those before or those after.
pub fn all(rules: &mut Rules, classes: &[StageClass], before: bool) -> Result<Vec<ClassOutcome>, Violation> {
    let known = rules.terms.count();
    let mut runs: Vec<GraphRun> = classes.iter().enumerate().map(|(number, class)| GraphRun::new(number, class, before)).collect();
    let mut meetings = StageCollectives::new();
    loop {
        let at = |runs: &[GraphRun]| runs.iter().map(|r| r.values.len()).sum::<usize>();
        let start = at(&runs);
        for run in &mut runs {
            while run.next(rules, classes, &mut meetings)? {}
        }
        if let Some(run) = runs.iter().find(|r| r.values.len() < r.local.body.nodes.len() && at(&runs) == start) {
            return run.fail(Invariant::AllMeet.breach("other stages do not take part in it"), Value(run.values.len() as u32));
        }
        if runs.iter().all(|r| r.values.len() == r.local.body.nodes.len()) {
            return runs.into_iter().map(|r| r.outcome(rules, known)).collect();
        }
    }
}

/// A graph as far as it has run.
struct GraphRun<'a> {
    number: usize,
    class: &'a StageClass<'a>,
    local: &'a Local,
    before: bool,
    values: Vec<SymbolicValue>,
    received: BTreeMap<(i64, Channel), usize>,
    met: BTreeMap<Vec<u64>, usize>,
    out: ClassOutcome,
}

impl<'a> GraphRun<'a> {
    fn new(number: usize, class: &'a StageClass, before: bool) -> GraphRun<'a> {
        let local = if before { class.before } else { class.after };
        GraphRun { number, class, local, before, values: vec![], received: BTreeMap::new(), met: BTreeMap::new(), out: ClassOutcome::default() }
    }

    fn fail<T>(&self, breach: Breach, v: Value) -> Result<T, Violation> {
        fail(breach.invariant, v, format!("{}{}", breach.found, place(self.local, v)))
    }

    /// Runs one node, unless there is none left or it waits for other stages.
    fn next(&mut self, rules: &mut Rules, classes: &[StageClass], meetings: &mut StageCollectives) -> Result<bool, Violation> {
        let (local, v) = (self.local, Value(self.values.len() as u32));
        let body = &local.body;
        let (Some(node), Some(chunk)) = (body.nodes.get(v.index()), local.chunks.get(v.index())) else { return Ok(false) };
        if !chunk.per_microbatch() && rules.asks_for_microbatch(body, v) {
            return self.fail(Invariant::RewrittenOnce.breach("what runs once asks for the microbatch"), v);
        }
        let args: Vec<SymbolicValue> = node.args.iter().map(|a| self.seen(rules, *a, Some(*chunk))).collect();
        let value = match &node.op {
            Op::Collective { stages: Some(stages), .. } => {
                let number = self.met.get(stages).copied().unwrap_or(0);
                match self.meet(rules, classes, meetings.entry((stages.clone(), number)).or_default(), v, &args[0]) {
                    Ok(Some(value)) => {
                        self.met.insert(stages.clone(), number + 1);
                        Ok(value)
                    }
                    Ok(None) => return Ok(false),
                    Err(e) => Err(e),
                }
            }
            Op::Recv { hops, channel } => {
                let number = self.received.entry((*hops, *channel)).or_insert(0);
                *number += 1;
                let kind = TermKind::Message { hops: *hops, channel: *channel, number: self.class.first_message + *number - 1 };
                let sizes = sizes(local, v);
                Ok(SymbolicValue::One(TermView::whole(rules.terms.plain(kind, vec![], vec![sizes.iter().product()], node.ty.dtype), &sizes)))
            }
            Op::Param(_) | Op::State(..) | Op::Input(_) | Op::Table(_) => self.source(rules, v),
            op => self.made(rules, v, op, &args),
        };
        let value = value.or_else(|e| self.fail(e, v))?;
        // The sharding of the value that a node comes from says along which sub-axes it is the same. That has been
        // proved of the graph before.
        if let (true, SymbolicValue::One(x), Some((_, sharding))) = (self.before, &value, &local.source[v.index()])
            && x.flat() == TermView::whole(x.term, &[body.elements(v)])
        {
            let same = local.mesh.ids().filter(|u| sharding[*u] == Placement::Replicated);
            rules.same_along(x.term, rules::bits(&same.collect::<Vec<_>>()));
        }
        match &node.op {
            Op::Limit { most } => self.out.limits.push((*most, value.clone())),
            Op::Send { hops, channel } => self.out.sent.entry((*hops, *channel)).or_default().push((v, flat(&value))),
            _ => {}
        }
        self.values.push(value);
        Ok(true)
    }

    /// The value of a parameter, state, input or table.
    fn source(&mut self, rules: &mut Rules, v: Value) -> Checked<SymbolicValue> {
        let (local, class) = (self.local, self.class);
        let node = &local.body[v];
        let (Op::Param(slot) | Op::State(slot, _)) = node.op else {
            return Ok(SymbolicValue::One(self.held(rules, v, node.op.clone(), node.ty.dtype)));
        };
        if let Some(k) = (slot as usize).checked_sub(local.params.len()) {
            let b = local.buckets.get(k).ok_or_else(|| Invariant::BucketExists.breach("there is no such bucket"))?;
            let (held, own) = NodeEvaluator { rules, body: &local.body, v, before: self.before }.bucket(b, &node.op, class.first_slot)?;
            if let Op::State(..) = node.op
                && *self.out.owners.entry(slot).or_insert(own.clone()) != own
            {
                return Err(Invariant::BucketOwners.breach("its states are parts of different ranks"));
            }
            return Ok(held);
        }
        let own = class.slots[slot as usize];
        if !self.before && class.home(own) {
            return Err(Invariant::BucketAlone.breach("it is in a bucket"));
        }
        // Where passes compute with copies, the first state holds the weights.
        let copied = !self.before && class.training.copied.contains(&own);
        let (weights, slot) = (Op::Param(class.first_slot + own), class.first_slot + own);
        Ok(SymbolicValue::One(match (&node.op, copied) {
            (Op::Param(_), true) => {
                let x = self.held(rules, v, weights, DType::F32);
                pieces::cast(rules, x, node.ty.dtype)
            }
            (Op::State(_, 0), true) | (Op::Param(_), false) => self.held(rules, v, weights, node.ty.dtype),
            (Op::State(_, k), _) => self.held(rules, v, Op::State(slot, k - u32::from(copied)), node.ty.dtype),
            _ => unreachable!("invariant: it is a parameter or a state"),
        }))
    }

    fn held(&self, rules: &mut Rules, v: Value, op: Op, dtype: DType) -> TermView {
        let body = &self.local.body;
        let maps: Vec<Index> = body.dims_of(v).iter().map(|d| (body.dims[*d].index.clone(), 0, Order::Plain)).collect();
        let sizes = sizes(self.local, v);
        TermView::whole(rules.terms.plain(TermKind::Held(op, maps), vec![], sizes.clone(), dtype), &sizes)
    }

    /// The result of an op, rank by rank, on operands of which each rank has its own.
    fn each(&self, rules: &mut Rules, v: Value, op: &Op, args: &[SymbolicValue]) -> Checked<Option<SymbolicValue>> {
        let body = &self.local.body;
        let node = &body[v];
        let own = |j: &SymbolicValue| matches!(j, SymbolicValue::Joined(j) if !j.own.is_empty() && (j.lead, j.trail) == (0, 0));
        let parts = match (op, args.first()) {
            (Op::Slice { .. }, Some(x @ SymbolicValue::Joined(j))) if own(x) => {
                Some([SymbolicValue::Each(Each::of_parts(rules, j, body[node.args[0]].ty.dtype)?)])
            }
            _ => None,
        };
        let args = parts.as_ref().map_or(args, |p| &p[..]);
        let Some(all) = args.iter().find_map(|x| if let SymbolicValue::Each(e) = x { Some(e) } else { None }) else { return Ok(None) };
        if let Op::Collective { kind, subs, stages, part } = op {
            let (subs, arg, own) = (rules::in_rank_order(subs), body.dims_of(node.args[0]), body.dims_of(v));
            let gathers = *kind == Collective::AllGather && stages.is_none() && subs == all.own;
            if gathers && own.split_first().is_some_and(|(p, from)| Some(*p) == *part && from == arg) {
                return all.gathered(rules).map(Some);
            }
            if stages.is_some() || rules::bits(&subs) & rules::bits(&all.own) != 0 {
                return Err(Invariant::OpOnPieces.breach(format!("{} of values that its ranks have each", kind.name())));
            }
        }
        let mut of = vec![];
        for rank in 0..all.of.len() {
            let args: Vec<SymbolicValue> = args.iter().map(|x| all.on(rules.mesh, rank, x)).collect::<Checked<_>>()?;
            of.push(self.made(rules, v, op, &args)?);
        }
        Ok(Some(SymbolicValue::Each(Each { own: all.own.clone(), of: of.into() })))
    }

    /// The result of an op on operands.
    fn made(&self, rules: &mut Rules, v: Value, op: &Op, args: &[SymbolicValue]) -> Checked<SymbolicValue> {
        let body = &self.local.body;
        if let Some(each) = self.each(rules, v, op, args)? {
            return Ok(each);
        }
        let plain: Option<Vec<TermView>> = args.iter().map(|a| if let SymbolicValue::One(x) = a { Some(x.clone()) } else { None }).collect();
        let step = |rules| NodeEvaluator { rules, body, v, before: self.before };
        match (op, plain) {
            (Op::Concat { from, to }, _) => step(rules).concat(args, from, *to),
            (Op::Collective { .. }, Some(x)) => Ok(SymbolicValue::One(rules.collective(body, v, &x[0]))),
            (_, Some(x)) => {
                let found = match (rules.value(body, v, &x), op) {
                    (Some(x), _) => Some(SymbolicValue::One(x)),
                    (None, Op::Slice { from, to: Some(_), at }) => step(rules).slice(&x[0], *from, *at),
                    (None, _) => rules.node(body, v, &x).map(SymbolicValue::One),
                };
                found.ok_or_else(|| Invariant::DigitView.breach("it is a view that digits cannot say"))
            }
            (_, None) => step(rules).joined(args),
        }
    }

    /// The result of a collective across stages, once all of them have come to it.
    fn meet(
        &self,
        rules: &mut Rules,
        classes: &[StageClass],
        (given, known): &mut (BTreeMap<usize, SymbolicValue>, Option<SymbolicValue>),
        v: Value,
        x: &SymbolicValue,
    ) -> Checked<Option<SymbolicValue>> {
        let (local, dtype) = (self.local, self.local.body[v].ty.dtype);
        let Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs, stages: Some(stages), .. } = &local.body[v].op else {
            return Err(Invariant::StageSum.breach("it is no sum over stages"));
        };
        let of = |class: usize| classes[class].training.stages.iter().map(|s| s.0).collect::<Vec<u64>>();
        if !of(self.number).iter().all(|s| stages.contains(s)) {
            return Err(Invariant::StageSum.breach("a stage takes part in a sum of others"));
        }
        if let std::collections::btree_map::Entry::Vacant(e) = given.entry(self.number) {
            let over = TermKind::Exchange { kind: Collective::AllReduce(Reduce::Sum), subs: rules::in_rank_order(subs), stages: None };
            e.insert(match x {
                x if subs.is_empty() => flat(x),
                SymbolicValue::One(x) => SymbolicValue::One(rules.linear(&over, x, dtype).flat()),
                SymbolicValue::Joined(j) => {
                    SymbolicValue::Joined(NodeEvaluator { rules, body: &local.body, v, before: self.before }.linear(j, &over))
                }
                SymbolicValue::Each(_) | SymbolicValue::Sums(_) => return Err(Invariant::StageSum.breach("it is a sum of what ranks have each")),
            });
        }
        if given.keys().map(|class| of(*class).len()).sum::<usize>() < stages.len() {
            return Ok(None);
        }
        if known.is_none() {
            let parts: Vec<(Vec<u64>, SymbolicValue)> = given.iter().map(|(class, x)| (of(*class), x.clone())).collect();
            *known = Some(sum(rules, parts, dtype)?);
        }
        let sizes = sizes(local, v);
        match known.clone() {
            Some(SymbolicValue::One(x)) => {
                let dims = x.dims[0].reshaped(&sizes).ok_or_else(|| Invariant::StagesAlike.breach("stages give values of different sizes"))?;
                Ok(Some(SymbolicValue::One(TermView { dims, ..x })))
            }
            joined => Ok(joined),
        }
    }

    /// What the graph leaves, where there were `known` terms before it.
    fn outcome(mut self, rules: &mut Rules, known: usize) -> Result<ClassOutcome, Violation> {
        let local = self.local;
        let is_new = |x: &SymbolicValue| matches!(x, SymbolicValue::One(x) if x.term.0 as usize >= known);
        self.out.new = self.values.iter().map(is_new).collect();
        for (report, v) in &local.reports {
            let x = flat(&self.seen(rules, *v, None));
            self.out.reports.insert(*report, (*v, x));
        }
        for u in &local.updates {
            let new = flat(&self.seen(rules, u.new, None));
            let states = u.states.iter().map(|s| flat(&self.seen(rules, *s, None))).collect();
            let slot = self.class.slots.get(u.slot as usize).copied().unwrap_or(u.slot);
            if self.out.updates.insert(slot, (u.new, new, states)).is_some() {
                return self.fail(Invariant::UpdatedOnce.breach("a parameter is updated twice"), u.new);
            }
        }
        Ok(self.out)
    }

    /// An operand as its user sees it, or, without a user, what a step leaves of it. After all microbatches, an
    /// accumulated value is their sum, and any other value is that of the last one unless all are the same.
    fn seen(&self, rules: &mut Rules, a: Value, user: Option<Chunk>) -> SymbolicValue {
        let (local, held) = (self.local, &self.values[a.index()]);
        let from = local.chunks[a.index()];
        let behind = user.is_none_or(|to| !to.per_microbatch() || from == Chunk::Prologue && to != Chunk::Prologue);
        if !from.per_microbatch() || !behind {
            return held.clone();
        }
        let function = if local.accumulate[a.index()] { TermKind::Sum } else { TermKind::Last };
        self.behind(rules, a, &function, held)
    }

    /// The value after all microbatches.
    fn behind(&self, rules: &mut Rules, a: Value, function: &TermKind, held: &SymbolicValue) -> SymbolicValue {
        let (body, batches) = (&self.local.body, rules::bits(&rules.batches()));
        let differs = |x: &TermView, rules: &mut Rules| (rules.varies(x.term) | rules::of_coords(x)) & batches != 0;
        let last = *function == TermKind::Last;
        match held {
            SymbolicValue::One(x) if last && !differs(x, rules) => held.clone(),
            SymbolicValue::Joined(j) | SymbolicValue::Sums(j)
                if last && !j.pieces.iter().filter_map(|p| p.of.as_ref()).any(|x| differs(x, rules)) =>
            {
                held.clone()
            }
            SymbolicValue::Sums(j) => SymbolicValue::Sums(NodeEvaluator { rules, body, v: a, before: false }.linear(j, function)),
            SymbolicValue::One(x) => SymbolicValue::One(rules.linear(function, x, body[a].ty.dtype)),
            SymbolicValue::Joined(j) => SymbolicValue::Joined(NodeEvaluator { rules, body, v: a, before: false }.linear(j, function)),
            SymbolicValue::Each(e) => {
                SymbolicValue::Each(Each { own: e.own.clone(), of: e.of.iter().map(|x| self.behind(rules, a, function, x)).collect() })
            }
        }
    }
}

/// The sum of values that stages give, in one dim each. The stages of each list give one of them.
fn sum(rules: &mut Rules, given: Vec<(Vec<u64>, SymbolicValue)>, dtype: DType) -> Checked<SymbolicValue> {
    let (stages, given): (Vec<Vec<u64>>, Vec<SymbolicValue>) = given.into_iter().unzip();
    if given.iter().any(|x| matches!(x, SymbolicValue::Sums(_))) {
        return Err(Invariant::StagesAlike.breach("stages give sums of what is in pieces"));
    }
    let shape = given.iter().find_map(|x| if let SymbolicValue::Joined(j) = x { Some(j.clone()) } else { None });
    let Some(shape) = shape else {
        let all: Vec<TermView> = given.into_iter().filter_map(|x| if let SymbolicValue::One(x) = x { Some(x) } else { None }).collect();
        if all.iter().any(|x| x.dims[0].extent() != all[0].dims[0].extent()) {
            return Err(Invariant::StagesAlike.breach("stages give values of different sizes"));
        }
        return Ok(SymbolicValue::One(rules.met(stages, all, dtype)));
    };
    if (shape.lead, shape.trail) != (0, 0) {
        return Err(Invariant::StagesAlike.breach("stages give values in pieces, in several dims"));
    }
    let one = |x: &SymbolicValue| match x {
        SymbolicValue::Joined(j) => Some(j.clone()),
        SymbolicValue::Each(_) | SymbolicValue::Sums(_) => None,
        SymbolicValue::One(x) => pieces::as_joined(rules.mesh, x, &shape),
    };
    let all: Option<Vec<Joined>> = given.iter().map(one).collect();
    let mut pieces = vec![];
    for (count, of) in Joined::aligned(rules.mesh, &all.ok_or_else(|| Invariant::StagesAlike.breach("stages give parts of different ranks"))?)? {
        let of: Option<Vec<TermView>> = of.into_iter().collect();
        pieces.push(pieces::JoinedPiece { count, of: of.map(|of| rules.met(stages.clone(), of, dtype)) });
    }
    let count: u64 = pieces.iter().map(|p| p.count).sum();
    let ranks: u64 = shape.own.iter().map(|u| rules.mesh[*u].size).product();
    Ok(match (Joined { pieces: pieces.into(), ..shape }).held(rules.mesh, &[count / ranks]) {
        SymbolicValue::One(x) => SymbolicValue::One(x.flat()),
        joined => joined,
    })
}

/// Extents of a value's dims.
fn sizes(local: &Local, v: Value) -> Vec<u64> {
    local.body.dims_of(v).iter().map(|d| local.body.dims.size(*d)).collect()
}

/// A value along one dim.
fn flat(held: &SymbolicValue) -> SymbolicValue {
    match held {
        SymbolicValue::One(x) => SymbolicValue::One(x.flat()),
        SymbolicValue::Joined(_) | SymbolicValue::Sums(_) => held.clone(),
        SymbolicValue::Each(e) => e.joined().map_or_else(|_| held.clone(), SymbolicValue::Joined),
    }
}
