//! Which dims each mesh axis may split, in order of preference: the plan of the model text over the dims of a graph.

use ir::algebra::{Loop, LoopKind, algebra};
use ir::diag::Diagnostic;
use ir::dim::{Dim, Dims};
use ir::graph::{Graph, Node, Phase};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::model::Plan;
use ir::op::Op;
use ir::options::{CpComm, Options, SequenceParallel, Zero};
use ir::sharded::Digits;
use std::collections::BTreeSet;

/// Axis -> tiers -> dims. A later tier is used only where no dim of an earlier one took any part of the axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AxisTiers {
    /// Of the dense grid, and `Ep` and `Etp`: where an op has a dim that experts' axes split, their sub-axes take it first.
    pub tiers: Vec<(Axis, Vec<Vec<Dim>>)>,
    /// For attention, in place of `tiers`.
    pub attention: Vec<(Axis, Vec<Vec<Dim>>)>,
    /// Which of states, gradients and parameters data-parallel ranks share out.
    pub zero: Zero,
    /// Sub-axes along which `zero` shares nothing out.
    pub replicas: Vec<SubAxis>,
    /// Per axis, the dims that it splits for the sake of what `zero` shares out alone, as one more tier. Their digits are those of
    /// parameters, so that every graph over the same parameters, whatever its ops, has them rest alike.
    pub shared: Vec<(Axis, Vec<Dim>)>,
    /// How attention gets at keys of other context-parallel ranks.
    pub cp: CpComm,
}

impl AxisTiers {
    /// Tiers of dims that an axis may split, the preferred first; empty if there are none.
    pub fn of(&self, axis: Axis) -> &[Vec<Dim>] {
        self.tiers.iter().find(|t| t.0 == axis).map_or(&[], |t| &t.1)
    }

    /// Every dim that a sub-axis may split, by itself or as part of the grid of experts.
    pub fn dims_of(&self, mesh: &Mesh, u: SubAxis) -> Vec<Dim> {
        let info = mesh[u];
        let experts = if info.role == info.axis { &[] } else { self.of(info.role) };
        let attention = self.attention.iter().filter(|t| t.0 == info.axis).flat_map(|t| &t.1);
        experts.iter().chain(self.of(info.axis)).chain(attention).flatten().copied().collect()
    }
}

/// Resolves the names of a plan. A name stands for every dim declared under it, and then for their copies; not for those that
/// are to stay whole.
pub fn lists(plan: &Plan, graph: &Graph, mesh: &Mesh, options: &Options) -> AxisTiers {
    let Options { sp, cp_comm: cp, zero, .. } = *options;
    let dims = &graph.body.dims;
    let resolve = |names: &[String]| -> Vec<Dim> {
        let mut out = vec![];
        for name in names {
            let named = dims.ids().filter(|d| dims.name(*d) == name);
            let copies = dims.ids().filter(|d| dims.original(*d) != *d && dims.name(dims.original(*d)) == name);
            for d in named.chain(copies) {
                if !dims[dims.original(d)].whole && !out.contains(&d) {
                    out.push(d);
                }
            }
        }
        out
    };
    let entry = |axis: &str| plan.get(axis).map_or(vec![], |e| e.tiers.iter().map(|t| resolve(t)).collect::<Vec<_>>());
    let (mut tiers, mut shared) = (vec![], vec![]);
    for axis in [Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep, Axis::Etp] {
        let mut list = entry(axis.name());
        if axis == Axis::Tp && sp == SequenceParallel::On {
            list.extend(entry("sp"));
        }
        if matches!(axis, Axis::Dp | Axis::Cp) && zero == Zero::Params {
            shared.push((axis, dims_of_params(graph, &list)));
        }
        tiers.push((axis, list));
    }
    // Microbatches split the batch, as data-parallel ranks do.
    tiers.push((Axis::Microbatch, vec![graph.batch.into_iter().collect()]));
    let mut attention = vec![];
    for axis in [Axis::Dp, Axis::Cp, Axis::Tp] {
        let name = format!("attention.{axis}");
        if plan.get(&name).is_some() {
            attention.push((axis, entry(&name)));
        } else if axis == Axis::Cp {
            // The heads are the first tier of tensor parallelism.
            let heads = entry(Axis::Tp.name()).into_iter().take(1);
            match cp {
                CpComm::Ring | CpComm::AllGather => {}
                CpComm::AllToAll => attention.push((axis, heads.collect())),
                CpComm::AllToAllAndRing => attention.push((axis, vec![heads.chain(entry(axis.name()).into_iter().take(1)).flatten().collect()])),
            }
        }
    }
    // A mesh in a handwritten module may have no such groups.
    let replicas = mesh.replicas(options.replicas).unwrap_or_default();
    AxisTiers { tiers, attention, cp, zero, replicas, shared }
}

/// The dims of parameters beside those listed, that of most elements first: in a transformer, `hidden`.
fn dims_of_params(graph: &Graph, listed: &[Vec<Dim>]) -> Vec<Dim> {
    let dims = &graph.body.dims;
    let mut found: Vec<(u64, Dim)> = vec![];
    for p in &graph.params {
        let elements = dims.elements(&p.ty.dims);
        for d in p.ty.dims.iter().map(|d| dims.original(*d)).filter(|d| !listed.iter().flatten().any(|l| l == d)) {
            match found.iter_mut().find(|f| f.1 == d) {
                Some(f) => f.0 += elements,
                None => found.push((elements, d)),
            }
        }
    }
    // The sort is stable, so equal dims stay in text order.
    found.sort_by_key(|f| std::cmp::Reverse(f.0));
    found.into_iter().map(|f| f.1).collect()
}

/// The digits of dims, admitted on first need while sizes stay divisible.
#[derive(Clone, Debug)]
pub struct Chooser<'a> {
    /// The mesh whose sub-axes split dims.
    pub mesh: &'a Mesh,
    /// Which dims each axis may split.
    pub lists: &'a AxisTiers,
    /// By original dim, the sub-axes that were admitted so far, in mesh order.
    pub digits: Digits,
    /// Parameters have chosen: see [`AxisTiers::shared`].
    ops: bool,
}

impl<'a> Chooser<'a> {
    /// A chooser for a graph with these dims, with no sub-axis admitted to any.
    pub fn new(mesh: &'a Mesh, lists: &'a AxisTiers, dims: &Dims) -> Chooser<'a> {
        Chooser { mesh, lists, digits: vec![vec![]; dims.list.len()], ops: false }
    }

    /// Gives parameters, in text order, the first choice.
    pub fn params_first(&mut self, graph: &Graph) {
        for p in &graph.params {
            self.choose(&graph.body.dims, &p.ty.dims, Tiers::States);
        }
        self.ops = true;
    }

    /// Whether sub-axis `u` splits dim `d`, or can be admitted to.
    pub fn fits(&mut self, dims: &Dims, u: SubAxis, d: Dim) -> bool {
        let root = dims.original(d);
        let digits = &mut self.digits[root.0 as usize];
        if digits.contains(&u) {
            return true;
        }
        let axis = self.mesh[u].axis;
        if self.ops && self.lists.shared.iter().any(|(a, dims)| *a == axis && dims.contains(&root)) {
            return false;
        }
        let parts: u64 = digits.iter().map(|u| self.mesh[*u].size).product();
        if ir::fault!("axes.fits.remainder", false, !dims.size(root).is_multiple_of(parts * self.mesh[u].size)) {
            return false;
        }
        digits.push(u);
        digits.sort_unstable();
        true
    }

    /// For each sub-axis the dim among `of` that it splits: what the experts' grid splits first; then, per axis, the first tier in
    /// which some sub-axis finds one.
    pub fn choose(&mut self, dims: &Dims, of: &[Dim], tiers: Tiers) -> Vec<Option<Dim>> {
        let mut out = vec![None; self.mesh.subs.len()];
        let (mesh, lists) = (self.mesh, self.lists);
        for u in mesh.ids().filter(|u| matches!(mesh[*u].role, Axis::Ep | Axis::Etp)) {
            let listed = lists.of(mesh[u].role).iter().flatten();
            out[u.0 as usize] = listed.copied().find(|d| of.contains(d) && self.fits(dims, u, *d));
        }
        for (axis, list) in lists.tiers.iter().filter(|t| !matches!(t.0, Axis::Ep | Axis::Etp)) {
            let other = lists.attention.iter().find(|t| t.0 == *axis && tiers == Tiers::Attention);
            let own = match tiers {
                Tiers::All | Tiers::States | Tiers::Attention => &list[..],
                Tiers::First => &list[..list.len().min(1)],
            };
            let shared = lists.shared.iter().find(|t| t.0 == *axis).map(|t| &t.1).filter(|_| match tiers {
                Tiers::States => true,
                Tiers::All => lists.zero == Zero::Params,
                // For cp, the plan's entry for attention concerns heads and keys alone.
                Tiers::Attention => *axis == Axis::Dp && lists.zero == Zero::Params,
                Tiers::First => false,
            });
            let open: Vec<SubAxis> = mesh.of(*axis).filter(|u| out[u.0 as usize].is_none()).collect();
            let Some((_, other)) = other else {
                self.choose_tiers(dims, of, &open, own, shared, &mut out);
                continue;
            };
            let rings = usize::from(*axis == Axis::Cp && lists.cp == CpComm::AllToAllAndRing).min(open.len());
            self.choose_tiers(dims, of, &open[..rings], own, shared, &mut out);
            self.choose_tiers(dims, of, &open[rings..], other, shared, &mut out);
        }
        out
    }

    /// The first of these tiers in which some sub-axis finds a dim. The last one, which is shared out, has nothing for
    /// those between replicas.
    fn choose_tiers(&mut self, dims: &Dims, of: &[Dim], open: &[SubAxis], own: &[Vec<Dim>], shared: Option<&Vec<Dim>>, out: &mut [Option<Dim>]) {
        let lists = self.lists;
        let within: Vec<SubAxis> = open.iter().copied().filter(|u| !lists.replicas.contains(u)).collect();
        for (tier, open) in own.iter().map(|tier| (tier, open)).chain(shared.map(|tier| (tier, &within[..]))) {
            let mut any = false;
            for u in open {
                let found = tier.iter().copied().find(|d| of.contains(d) && self.fits(dims, *u, *d));
                out[u.0 as usize] = found;
                any |= found.is_some();
            }
            if any {
                break;
            }
        }
    }

    /// Whether queries and keys of attention form a ring along a sub-axis that splits one of them.
    pub fn rings(&mut self, dims: &Dims, u: SubAxis, ring: &Loop) -> bool {
        let chosen = match self.lists.cp {
            CpComm::Ring | CpComm::AllToAllAndRing => self.mesh[u].axis == Axis::Cp,
            CpComm::AllGather | CpComm::AllToAll => false,
        };
        let listed = self.lists.of(Axis::Cp).iter().flatten().copied().collect::<Vec<_>>();
        chosen && ring.dims().all(|d| listed.contains(&d) && self.fits(dims, u, d))
    }
}

/// Which part of the lists counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tiers {
    /// Every tier, with that of [`AxisTiers::shared`] where parameters are shared out.
    All,
    /// The first tier of each axis, and every tier of experts' axes.
    First,
    /// For what a step does once with gradients, parameters and states.
    States,
    /// All, with what the plan says of attention in particular.
    Attention,
}

/// Dims of a node whose sizes follow from those of others.
fn measures(node: &Node) -> Vec<Dim> {
    match &node.op {
        Op::View { from, to } if from.len() != 1 || to.len() != 1 => [from.as_slice(), to].concat(),
        Op::Concat { from, to } => [from.as_slice(), &[*to]].concat(),
        Op::Slice { from: d, to: other, .. } | Op::Pad { to: d, from: other, .. } => other.iter().chain([d]).copied().collect(),
        _ => vec![],
    }
}

/// Pads every dim along which parameters are looked up (a vocabulary) to the least multiple that its axes divide, `multiple`
/// included. Returns the dims that grew. Nothing is masked yet: see [`crate::graph::pad`].
pub fn pad_vocabularies(graph: &mut Graph, mesh: &Mesh, lists: &AxisTiers, multiple: u64) -> Vec<Dim> {
    let body = &graph.body;
    let mut looked_up: Vec<Dim> = body
        .nodes
        .iter()
        .filter_map(|n| match n.op {
            Op::Gather { dim } if matches!(body[n.args[0]].op, Op::Param(_)) || body.copied_param(n.args[0]).is_some() => Some(dim),
            _ => None,
        })
        .collect();
    // The size of a dim that is a part of another one, or made of others, follows from those.
    let measured: BTreeSet<Dim> = body.nodes.iter().flat_map(measures).map(|d| body.dims.original(d)).collect();
    looked_up.retain(|d| !measured.contains(&body.dims.original(*d)));
    looked_up.sort_unstable();
    looked_up.dedup();
    let mut grown = vec![];
    for d in looked_up {
        let parts: u64 = lists.tiers.iter().filter(|(_, t)| t.iter().flatten().any(|x| *x == d)).map(|(a, _)| mesh.size(*a)).product();
        let size = graph.body.dims.size(d);
        let padded = size.next_multiple_of(parts.max(1) * multiple.max(1));
        if padded != size && graph.body.dims.original(d) == d {
            for e in graph.body.dims.ids().filter(|e| graph.body.dims.original(*e) == d).collect::<Vec<_>>() {
                let info = &mut graph.body.dims[e];
                (info.size, info.global, info.index) = (padded, padded, ir::dim::IndexMap::whole(ir::fault!("axes.pad.index", size, padded)));
                info.logical = ir::fault!("axes.pad.logical", padded, info.logical);
                grown.push(e);
            }
        }
    }
    grown
}

/// The dims of parameters that an axis should split and cannot: E0204 where no sub-axis fits and no other dim takes the axis
/// in their place, a warning where only some do.
pub fn check(graph: &Graph, mesh: &Mesh, lists: &AxisTiers, plan: &Plan, settings: &[(String, String)]) -> Vec<Diagnostic> {
    let dims = &graph.body.dims;
    let mut out = vec![];
    let mut seen: Vec<(Axis, String)> = vec![];
    for axis in [Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep, Axis::Etp] {
        let size = mesh.size(axis);
        if size == 1 {
            continue;
        }
        if axis == Axis::Cp {
            out.extend(check_inputs(graph, mesh, lists, plan));
        }
        for tier in lists.of(axis) {
            for &d in tier {
                let n = dims.size(d);
                // `took` is the part of the axis that the dim can take, factor by factor.
                let mut took = 1;
                for u in mesh.of(axis) {
                    if n.is_multiple_of(took * mesh[u].size) {
                        took *= mesh[u].size;
                    }
                }
                let user = graph.params.iter().find(|p| p.ty.has(d));
                let Some(param) = user else { continue };
                let covered = graph.params.iter().filter(|p| p.ty.has(d)).any(|p| {
                    p.ty.dims.iter().any(|e| *e != d && tier.contains(e) && mesh.of(axis).any(|u| dims.size(*e).is_multiple_of(mesh[u].size)))
                });
                if took == size || covered || seen.contains(&(axis, dims.name(d).into())) {
                    continue;
                }
                seen.push((axis, dims.name(d).into()));
                let (name, below, above) = (dims.name(d), n / size * size, n.next_multiple_of(size));
                let nearest = if below == 0 { above.to_string() } else { format!("{below}, {above}") };
                let mut e = if took == 1 {
                    Diagnostic::error(
                        "E0204",
                        format!(
                            "dim `{name}` of `{}` cannot be split over axis `{axis}`: {name} = {n} does not divide by {axis} = {size}",
                            param.name
                        ),
                    )
                } else {
                    Diagnostic::warning(
                        "W0204",
                        format!(
                            "dim `{name}` of `{}` is split {took} ways over axis `{axis}` = {size}: the rest of the axis repeats the same work",
                            param.name
                        ),
                    )
                };
                if let Some(span) = param.span {
                    e = e.label(span, format!("{name} = {n} does not divide by {axis} = {size}"));
                }
                if let Some(span) = plan.get(axis.name()).and_then(|p| p.span) {
                    e = e.label(span, format!("`{axis}` splits `{name}` here"));
                }
                // A derived dim cannot be set, as it follows from others.
                let how = if settings.iter().any(|s| s.0 == name) { format!(" (`-D {name}={above}`)") } else { String::new() };
                out.push(e.help(format!("nearest sizes that divide: {nearest}{how}")));
            }
        }
    }
    out
}

/// Context parallelism splits every position-wise value: E0204 where the positions of an input do not divide.
fn check_inputs(graph: &Graph, mesh: &Mesh, lists: &AxisTiers, plan: &Plan) -> Vec<Diagnostic> {
    let (dims, size) = (&graph.body.dims, mesh.size(Axis::Cp));
    let mut out: Vec<Diagnostic> = vec![];
    let mut seen: Vec<Dim> = vec![];
    for &d in lists.of(Axis::Cp).iter().flatten() {
        let n = dims.size(d);
        let Some(input) = graph.inputs.iter().find(|i| i.ty.has(d)) else { continue };
        if n.is_multiple_of(size) || seen.contains(&d) || graph.params.iter().any(|p| p.ty.has(d)) {
            continue;
        }
        seen.push(d);
        let name = dims.name(d);
        let text = format!("dim `{name}` of input `{}` cannot be split over axis `cp`: {name} = {n} does not divide by cp = {size}", input.name);
        let mut e = Diagnostic::error("E0204", text);
        if let Some(span) = input.span {
            e = e.label(span, format!("{name} = {n} does not divide by cp = {size}"));
        }
        if let Some(span) = plan.get("cp").and_then(|p| p.span) {
            e = e.label(span, format!("`cp` splits `{name}` here"));
        }
        let (below, above) = (n / size * size, n.next_multiple_of(size));
        let nearest = if below == 0 { above.to_string() } else { format!("{below}, {above}") };
        out.push(e.help(format!("nearest sizes that divide: {nearest} (`-D {name}={above}`)")));
    }
    out
}

/// The way out for what no microbatch has.
pub fn one_microbatch(graph: &Graph, mesh: &Mesh) -> String {
    let rows = graph.batch.map_or(1, |b| graph.body.dims.size(b)) / mesh.size(Axis::Dp);
    format!("use one microbatch (a micro-batch-size of {rows})")
}

/// What needs the whole batch at once cannot be had from microbatches that come one after another: E0636.
pub fn check_microbatches(graph: &Graph, mesh: &Mesh) -> Vec<Diagnostic> {
    let (body, dims) = (&graph.body, &graph.body.dims);
    let Some(batch) = graph.batch.filter(|_| mesh.size(Axis::Microbatch) > 1) else { return vec![] };
    let mut fed = vec![false; body.nodes.len()];
    let mut out: Vec<Diagnostic> = vec![];
    for v in body.values() {
        let node = &body[v];
        fed[v.index()] = matches!(node.op, Op::Input(_) | Op::Uniform { .. }) || node.args.iter().any(|a| fed[a.index()]);
        let rows = |d: Dim| dims.original(d) == batch;
        if let Op::Param(p) = node.op
            && node.ty.dims.iter().any(|d| rows(*d))
        {
            let param = &graph.params[p as usize];
            let text = format!("`{}` has a row for each of `{}`, and microbatches come one after another", param.name, dims.name(batch));
            let mut e = Diagnostic::error("E0636", text);
            if let Some(span) = param.span {
                e = e.label(span, "all of the batch is needed for its new value");
            }
            out.push(e.help(format!("{}, or a dim of a size of its own", one_microbatch(graph, mesh))));
        }
        if node.op.is_source() || node.origin.phase != Phase::Forward {
            continue;
        }
        let along = |kind: LoopKind| {
            let mut loops = algebra(body, v).loops.into_iter().filter(|l| l.kind == kind);
            loops.any(|l| l.args.iter().zip(&node.args).any(|(d, a)| fed[a.index()] && d.is_some_and(rows)))
        };
        // Any index may point to another row.
        let looks_up = matches!(node.op, Op::Gather { dim } if rows(dim)) && fed[node.args[0].index()];
        let met = node.args.iter().filter(|a| looks_up || fed[a.index()]);
        let mut meeting: Vec<Dim> = met.flat_map(|a| body.dims_of(*a)).copied().filter(|d| rows(*d)).collect();
        meeting.sort();
        meeting.dedup();
        // These are the names in model texts.
        let (op, name) = (node.op.name().trim_start_matches("reduce_"), dims.name(batch));
        let (what, instead) = if along(LoopKind::Block) {
            let routes = matches!(node.op, Op::Dispatch(_) | Op::Combine(_));
            (format!("`{op}` along `{name}`"), if routes { ", or leave the batch out: a capacity per sequence" } else { "" })
        } else if along(LoopKind::Max) {
            (format!("`{op}` along `{name}`"), ", or take the mean over the batch of what is greatest in a sequence")
        } else if meeting.len() > 1 {
            (format!("what each row of `{name}` has to do with each other one"), "; dp may split it: rows are gathered")
        } else {
            continue;
        };
        // Values that depend on it are not reported again.
        fed[v.index()] = false;
        let mut e = Diagnostic::error("E0636", format!("{what} needs the whole batch at once, and microbatches come one after another"));
        if let Some(span) = node.origin.span {
            e = e.label(span, "all of the batch meets here");
        }
        if !out.iter().any(|o| o.labels == e.labels) {
            out.push(e.help(format!("{}{instead}", one_microbatch(graph, mesh))));
        }
    }
    out
}
