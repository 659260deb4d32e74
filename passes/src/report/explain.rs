//! What a job communicates and what a line of the model text costs, from the programs and the sharded graph themselves.

use crate::partition::stored_rows::StoredRows;
use crate::report::footprint::owners;
use ir::diag::Span;
use ir::dim::Dim;
use ir::graph::{Phase, Value};
use ir::mesh::Axis;
use ir::op::{AttentionGrad, Op};
use ir::program::{Action, Command, Job, Program, Space};
use ir::reason::Reason;
use ir::sharded::{Placement, Sharded};
use serde::Serialize;
use std::collections::BTreeMap;

/// Equal collectives (or sends, or copies between memories) of one line of text, as the ranks of some stages issue them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exchange {
    /// Where in the model text the first one is from; `None` if from no line.
    pub span: Option<Span>,
    /// `model.mdl:25`.
    pub place: String,
    /// Of the first one.
    pub scope: String,
    /// `all_reduce` and other collectives; `send`; `copy to host` and other copies.
    pub kind: &'static str,
    /// `tp`, `dp*cp`; `pp` for what goes from stage to stage, `bus` from memory to memory.
    pub axis: String,
    /// The group of the first rank of the first stage; of a send, sender and receiver.
    pub members: Vec<u64>,
    /// Pipeline stages whose ranks issue it alike, in ascending order.
    pub stages: Vec<u64>,
    /// Name of the body of commands that it is in.
    pub body: String,
    /// It repeats what the forward pass did.
    pub recomputed: bool,
    /// It is left out of steps that do not need it, and its calls are those of a step that needs all of them.
    pub optional: bool,
    /// What the value is to one rank: its part of a gather, the whole of a sum.
    pub bytes: u64,
    /// How often a rank issues it in a step, over all calls of the body.
    pub calls_per_step: u64,
    /// Sent by one rank in a step: (n-1)/n of the whole in gathers and scatters, twice that in all-reduces.
    pub sent_per_step: u64,
    /// How that is said is for those to say who read it.
    #[serde(skip)]
    pub reason: Option<Reason>,
}

/// Everything that a step communicates, in program order; what several stages do alike once.
pub fn exchanges(job: &Job) -> Vec<Exchange> {
    let mut out: Vec<Exchange> = vec![];
    for (k, stage) in (0u64..).zip(&job.stages) {
        let mut found: Vec<Exchange> = vec![];
        let mut calls: BTreeMap<u32, u64> = BTreeMap::new();
        stage
            .schedule
            .train
            .iter()
            .chain(ir::fault!("report.exchanges.update", &[][..], &stage.schedule.update[..]))
            .filter(|c| c.part == 0)
            .for_each(|c| *calls.entry(c.body.0).or_default() += 1);
        let program = &job.programs[stage.program as usize];
        for (body, times) in calls {
            let body = &program.bodies[body as usize];
            for c in &body.commands {
                let Some(mut e) = exchange(job, program, k, c) else { continue };
                (e.body, e.calls_per_step, e.sent_per_step) =
                    (body.name.clone(), times, ir::fault!("report.exchanges.times", e.sent_per_step, e.sent_per_step * times));
                match found.iter_mut().find(|f| alike(f, &e) && f.body == e.body) {
                    Some(f) => (f.calls_per_step, f.sent_per_step) = (f.calls_per_step + e.calls_per_step, f.sent_per_step + e.sent_per_step),
                    None => found.push(e),
                }
            }
        }
        for e in found {
            let same = |f: &&mut Exchange| alike(f, &e) && (f.calls_per_step, &f.body) == (e.calls_per_step, &e.body);
            match out.iter_mut().find(same) {
                Some(f) => f.stages.extend(&e.stages),
                None => out.push(e),
            }
        }
    }
    out
}

fn alike(a: &Exchange, b: &Exchange) -> bool {
    let key = |e: &Exchange| {
        (
            e.place.clone(),
            e.kind,
            e.axis.clone(),
            ir::fault!("report.exchanges.recomputed", false, e.recomputed),
            e.bytes,
            e.optional,
            e.reason.clone(),
        )
    };
    key(a) == key(b)
}

fn exchange(job: &Job, program: &Program, stage: u64, c: &Command) -> Option<Exchange> {
    let first = job.mesh.first_of_stage(ir::fault!("report.exchanges.stage", 0, stage));
    let (kind, axis, members, bytes, sent) = match &c.action {
        Action::Collective { kind, group, dtype, count, .. } => {
            let group = &program.groups[group.index()];
            let members = group.members(&job.mesh, first);
            let (n, bytes) = (members.len() as u64, count * dtype.bytes());
            (kind.name(), group.describe(&job.mesh), members, bytes, ir::fault!("report.exchanges.sent", bytes, kind.sent(bytes, n)))
        }
        Action::Send { hops, dtype, count, .. } => {
            let per_stage = job.mesh.world() / job.mesh.size(Axis::Pp);
            let to = first.checked_add_signed(hops * per_stage as i64).unwrap_or(first);
            ("send", "pp".into(), vec![first, to], count * dtype.bytes(), count * dtype.bytes())
        }
        Action::Copy { dtype, count, src, dst } => {
            let [from, to] = [src, dst].map(|p| program.buffers[p.buffer.index()].arena);
            let (kind, way) = match [from.space(), to.space()] {
                [_, Some(Space::Device)] => ("copy to device", "bus"),
                [_, None] => ("copy to disk", "disk"),
                [None, Some(Space::Host)] => ("copy from disk", "disk"),
                [Some(_), Some(Space::Host)] => ("copy to host", "bus"),
            };
            (kind, way.into(), vec![first], count * dtype.bytes(), count * dtype.bytes())
        }
        _ => return None,
    };
    Some(Exchange {
        span: c.origin.span,
        place: c.origin.span.map_or(String::new(), |s| line_of(job, s)),
        scope: c.origin.scope.to_string(),
        kind,
        axis,
        members,
        stages: vec![stage],
        body: String::new(),
        recomputed: c.origin.recomputed,
        optional: c.predicate.is_some(),
        bytes,
        calls_per_step: 1,
        sent_per_step: sent,
        reason: c.reason.clone(),
    })
}

fn line_of(job: &Job, s: Span) -> String {
    job.sources.get(usize::from(s.file)).map_or(format!("{}:{}", s.file, s.line), |source| format!("{}:{}", source.name, s.line))
}

/// Calls and bytes that a rank sends in a step, by axes and kind: the most of any stage. They are those of all steps,
/// or those that only some need.
pub fn totals(exchanges: &[Exchange], optional: bool) -> BTreeMap<(String, &'static str), (u64, u64)> {
    let mut of_stage: BTreeMap<(String, &'static str, u64), (u64, u64)> = BTreeMap::new();
    for e in exchanges.iter().filter(|e| e.optional == optional) {
        for stage in &e.stages {
            let (calls, bytes) = of_stage.entry((e.axis.clone(), e.kind, *stage)).or_default();
            (*calls, *bytes) = (*calls + e.calls_per_step, *bytes + e.sent_per_step);
        }
    }
    let mut out: BTreeMap<(String, &'static str), (u64, u64)> = BTreeMap::new();
    for ((axis, kind, _), (calls, bytes)) in of_stage {
        let most = out.entry((axis, kind)).or_default();
        *most = ir::fault!("report.totals.most", (most.0 + calls, most.1 + bytes), (most.0.max(calls), most.1.max(bytes)));
    }
    out
}

/// What a line of the model text costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Source and line, as in `model.mdl:25`.
    pub place: String,
    /// Stages that compute something of it, or hold what it declares.
    pub stages: Vec<u64>,
    /// Parameters that it declares or opens, with how each dim is split.
    pub parameters: Vec<Tensor>,
    /// Forward values, those of the first layer for all.
    pub values: Vec<Tensor>,
    /// Bytes that a rank of a stage holds for it, by stage and kind; activations in all microbatches in flight.
    pub memory: Vec<(u64, &'static str, u64)>,
    /// Floating-point operations of matrix products and attention in a step, by all ranks (masks not considered).
    pub forward_flops: u128,
    /// Floating-point operations that the backward pass repeats of the forward pass, in a step, by all ranks.
    pub recomputed_flops: u128,
    /// Floating-point operations of the backward pass proper and of the update, in a step, by all ranks.
    pub backward_flops: u128,
    /// What a step communicates for it; serialization leaves it out.
    #[serde(skip)]
    pub exchanges: Vec<Exchange>,
}

/// A value or parameter with its dims: `[batch = 8 / dp, seq = 64, heads = 4 / tp]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tensor {
    /// The parameter's name, or the operation that makes the value.
    pub name: String,
    /// `[batch = 8 / dp, seq = 64]`: global sizes, and the axes that split them.
    pub dims: String,
    /// Axes over which it is a sum that is not complete yet.
    pub partial: String,
    /// Of one rank, and of one microbatch where it depends on data.
    pub bytes: u64,
}

/// The cost of line `line` of file number `file`; none if nothing comes from there.
pub fn line(s: &Sharded, job: &Job, file: u16, line: u32) -> Option<Line> {
    let here = |span: Option<Span>| span.is_some_and(|s| (s.file, s.line) == (file, line));
    let body = &s.graph.body;
    let found: Vec<Value> = body.values().filter(|v| here(body[*v].origin.span)).collect();
    let named = |v: &Value| match body[*v].op {
        Op::Param(p) => here(s.graph.params[p as usize].span) || here(body[*v].origin.span),
        _ => false,
    };
    let parameters: Vec<Tensor> = body
        .values()
        .filter(named)
        .map(|v| match body[v].op {
            Op::Param(p) => tensor(s, v, s.graph.params[p as usize].name.clone()),
            _ => unreachable!("invariant: only parameters were kept"),
        })
        .collect();
    if found.is_empty() && parameters.is_empty() {
        return None;
    }
    let forward = |v: &&Value| body[**v].origin.phase == Phase::Forward && !body[**v].op.is_source();
    let layer = found.iter().filter(forward).filter_map(|v| body[*v].origin.layer).min();
    let shown = found.iter().filter(forward).filter(|v| body[**v].origin.layer == layer && !matches!(body[**v].op, Op::Reshard { .. }));
    let mut values: Vec<Tensor> = vec![];
    for t in shown.map(|v| tensor(s, *v, body[*v].op.name().into())) {
        if !values.contains(&t) {
            values.push(t);
        }
    }
    let ranks: u64 = s.mesh.subs.iter().filter(|u| u.axis != Axis::Pp).map(|u| u.size).product();
    let rows = StoredRows::of(s, &|_| false);
    let mut flops = [0_u128; 3];
    for v in &found {
        let origin = &body[*v].origin;
        let k = match (origin.phase, origin.recomputed) {
            (Phase::Forward, _) => 0,
            (Phase::Backward, true) => ir::fault!("report.line.recomputed", 2, 1),
            (Phase::Backward, false) | (Phase::Update, _) => 2,
        };
        flops[k] += rows.computed(body, *v, u128::from(local_flops(s, *v)) * u128::from(ranks));
    }
    let [forward_flops, recomputed_flops, backward_flops] = flops;
    let (mut stages, mut memory) = (vec![], vec![]);
    for (k, stage) in (0u64..).zip(&job.stages) {
        let program = &job.programs[stage.program as usize];
        let runs = program.bodies.iter().flat_map(|b| &b.commands).any(|c| here(c.origin.span));
        let holds = owners(job, k as usize).into_iter().filter(|o| here(o.span)).map(|o| (k, o.kind.name(), o.bytes)).collect::<Vec<_>>();
        if runs || !holds.is_empty() {
            stages.push(k);
        }
        memory.extend(holds);
    }
    let exchanges = exchanges(job).into_iter().filter(|e| here(e.span)).collect();
    let place = line_of(job, Span { file, line, col: 1, len: 0 });
    Some(Line { place, stages, parameters, values, memory, forward_flops, recomputed_flops, backward_flops, exchanges })
}

pub(super) fn tensor(s: &Sharded, v: Value, name: String) -> Tensor {
    let body = &s.graph.body;
    let dims: Vec<String> = body
        .dims_of(v)
        .iter()
        .map(|d| {
            let by = s.mesh.describe(&s.sharding(v).splits(*d));
            let size = format!("{} = {}", body.dims.name(*d), body.dims.size(*d));
            if by.is_empty() { size } else { format!("{size} / {by}") }
        })
        .collect();
    let partial: Vec<_> = s.mesh.ids().filter(|u| s.sharding(v)[*u].is_partial()).collect();
    let bytes = s.local_elements(v) * body[v].ty.dtype.bytes();
    Tensor { name, dims: format!("[{}]", dims.join(", ")), partial: s.mesh.describe(&partial), bytes }
}

/// Of one rank and microbatch: two per multiply-add. Attention is two products forward and four backward.
fn local_flops(s: &Sharded, v: Value) -> u64 {
    let body = &s.graph.body;
    let local = |v: Value, d: Dim| {
        let parts: u64 = s.mesh.ids().filter(|u| s.sharding(v)[*u] == Placement::Split(d)).map(|u| s.mesh[u].size).product();
        ir::fault!("report.line.whole", body.dims.size(d), body.dims.size(d) / parts)
    };
    let args = &body[v].args;
    match &body[v].op {
        Op::Dot { over, .. } => {
            ir::fault!("report.line.product", 1, 2) * s.local_elements(v) * over.iter().map(|d| local(args[0], *d)).product::<u64>()
        }
        // The gradient of a bias recomputes products, which are not counted as work of the model.
        Op::AttentionGrad(_, AttentionGrad::Bias) => 0,
        Op::Attention(a) | Op::AttentionGrad(a, _) => {
            let [d, values] = [a.d, a.values].map(|d| body.dims.size(d));
            2 * body[v].op.products_of_pairs(d, values) * (s.local_elements(args[0]) / d.max(1)) * local(args[1], a.keys)
        }
        _ => 0,
    }
}
