//! Commands for groups of fused nodes, for nodes that have a command of their own, and for views that strides cannot say.

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::kernels::{self, Launch, Target};
use crate::lower::view::View;
use ir::dim::Dim;
use ir::graph::{Origin, Value};
use ir::kernel::Kernel;
use ir::local::Chunk;
use ir::op::Op;
use ir::program::{Action, BufferId, Command, Content, Group, Space, Stream};
use ir::reason::Reason;
use std::collections::{BTreeSet, HashMap};

impl LocalLowering<'_, '_, '_> {
    pub(super) fn push(&mut self, action: Action, origin: &Origin, reason: Option<Reason>) {
        let predicate = ir::fault!("lower.predicate.lost", None, self.predicate.clone());
        self.commands.entry(self.chunk).or_default().push(Command { stream: Stream::Compute, action, predicate, origin: origin.clone(), reason });
    }

    /// Makes the commands that follow depend on a bool.
    pub(super) fn choose(&mut self, bool: Option<Value>) {
        let place = bool.map(|bool| self.own_view(bool).place);
        self.predicate = ir::fault!("lower.predicate.stays", place.or(self.predicate.take()), place);
    }

    /// Emits a value that later users share. Its commands have the predicate of that value, not of the first user.
    pub(super) fn by_bool_of<T>(&mut self, made: Value, f: impl FnOnce(&mut Self) -> T) -> T {
        let predicate = self.predicate.take();
        self.choose(self.predicates[made.index()]);
        let out = f(self);
        self.predicate = predicate;
        out
    }

    pub(super) fn launch(&mut self, launch: Launch, at: Value) {
        let kernel = self.l.kernels.add(Kernel { on: self.space, ..launch.kernel });
        let origin = self.local.body[at].origin.clone();
        self.push(Action::Launch { kernel, args: launch.args, scalars: launch.scalars }, &origin, None);
    }

    pub(super) fn emit_group(&mut self, g: usize) {
        let body = &self.local.body;
        let group = self.groups[g].clone();
        if let [c] = group.nodes[..]
            && let Some(view) = self.joined.get(&c)
        {
            self.views.insert(c, view.clone());
            return;
        }
        let inside: BTreeSet<Value> = group.nodes.iter().copied().collect();
        let mut views: HashMap<Value, View> = HashMap::new();
        for a in group.nodes.iter().flat_map(|v| &body[*v].args) {
            if inside.contains(a) || views.contains_key(a) {
                continue;
            }
            if role(body, *a) != Role::Inline {
                let view = self.view(*a);
                views.insert(*a, view);
            } else if !kernels::makes_sources(&group.family) {
                let view = self.stored(*a);
                views.insert(*a, view);
            }
        }
        if let [c] = group.nodes[..]
            && let Some(whole) = self.made_in_pieces(c, &views)
        {
            self.views.insert(c, whole);
            self.done.insert(g);
            return;
        }
        let (mut targets, mut taken): (Vec<Target>, Vec<BufferId>) = (vec![], vec![]);
        for v in &group.outputs {
            if let Some(sum) = self.added.of.get(v).copied() {
                targets.push(self.added_to(*v, sum));
                continue;
            }
            let order = body[*v].ty.dims.clone();
            let summed = self.is_summed(*v);
            if summed {
                let sum = self.sum_buffer(*v);
                self.sums.insert(*v, sum.clone());
                targets.push(Target { value: *v, view: sum, accumulate: ir::fault!("lower.sum.stored", false, true) });
            }
            let here = self.users[v.index()].iter().any(|(c, _)| !self.crosses(group.chunk, self.local.chunks[c.index()]));
            if !summed || here {
                let view = match self.in_place(*v, &group) {
                    Some(view) => view,
                    None if !summed && self.homes.contains_key(v) => self.sum_buffer(*v),
                    None => {
                        let copy = self.copy_of_param(*v).or_else(|| self.over_operand(*v, &group, &taken));
                        copy.unwrap_or_else(|| self.buffer(*v, &order, Content::Activation))
                    }
                };
                taken.push(view.place.buffer);
                self.views.insert(*v, view.clone());
                targets.push(Target { value: *v, view, accumulate: false });
            }
        }
        let launch = kernels::build(body, &group.nodes, &group.family, targets, &|v| views[&v].clone());
        let named = *group.outputs.last().unwrap_or(&group.nodes[0]);
        self.launch(launch, named);
        self.done.insert(g);
        if group.space == Space::Host {
            self.bring_pieces(&group.outputs);
            self.renew_params(&group.outputs);
        }
    }

    pub(super) fn emit_node(&mut self, v: Value) {
        let body = &self.local.body;
        let node = &body[v];
        let order = node.ty.dims.clone();
        let view = match &node.op {
            Op::Param(slot) => {
                let slot = self.names.slots[*slot as usize];
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                self.hold(v, self.l.names[slot as usize].clone(), Content::Param { slot, index })
            }
            Op::State(slot, state) => {
                let slot = self.names.slots[*slot as usize];
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let name = format!("{}.state{state}", self.l.names[slot as usize]);
                self.hold(v, name, Content::State { slot, state: ir::fault!("lower.state.number", 0, *state), index })
            }
            Op::Table(table) => {
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let table = self.names.tables[*table as usize];
                self.hold(v, format!("table{table}"), Content::Table { table, index })
            }
            Op::Input(input) => {
                let index = order.iter().map(|d| body.dims[*d].index.clone()).collect();
                let view = self.buffer(v, &order, Content::Activation);
                self.push(Action::Load { input: *input, dst: view.place.buffer, index }, &node.origin, None);
                view
            }
            Op::Recv { hops, channel } => {
                let view = self.buffer(v, &order, Content::Activation);
                let count = body.elements(v);
                self.push(
                    Action::Recv { hops: *hops, channel: *channel, dtype: node.ty.dtype, count, dst: view.place.clone() },
                    &node.origin,
                    self.local.reasons[v.index()].clone(),
                );
                view
            }
            Op::Limit { most } => {
                let view = self.dense_view(node.args[0]);
                self.push(Action::Limit { src: view.place.clone(), most: *most }, &node.origin, self.local.reasons[v.index()].clone());
                view
            }
            Op::Send { hops, channel } => {
                let view = self.dense_view(node.args[0]);
                let count = body.elements(v);
                self.push(
                    Action::Send { hops: *hops, channel: *channel, dtype: node.ty.dtype, count, src: view.place.clone() },
                    &node.origin,
                    self.local.reasons[v.index()].clone(),
                );
                view
            }
            Op::Collective { kind, subs, stages, .. } => {
                let src = self.dense_view(node.args[0]);
                let dst = self.destination(v, *kind, subs, &src);
                let group = Group {
                    subs: ir::fault!("lower.group.subs", vec![], subs.clone()),
                    stages: ir::fault!("lower.group.stages", None, stages.clone()),
                };
                let count = kind.count(body.elements(node.args[0]), group.size(&self.local.mesh));
                let group = self.l.group(group);
                let action = Action::Collective { kind: *kind, group, dtype: node.ty.dtype, count, src: src.place, dst: dst.place.clone() };
                if ir::fault!("lower.collective.lost", false, true) {
                    self.push(action, &node.origin, self.local.reasons[v.index()].clone());
                }
                dst
            }
            _ => self.alias(v),
        };
        self.views.insert(v, view);
        if self.is_summed(v) {
            let from = self.views[&v].clone();
            let sum = self.sum_buffer(v);
            let launch = kernels::copy(body, v, &from, sum.clone(), true);
            self.launch(launch, v);
            self.sums.insert(v, sum);
        }
    }

    fn alias(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let node = &body[v];
        let order = &node.ty.dims;
        let arg = node.args[0];
        let from = if role(body, arg) == Role::Inline { self.dense_view(arg) } else { self.view(arg) };
        if let Some(view) = from.through(&body.dims, &node.op, order) {
            return view;
        }
        match &node.op {
            // A copy first makes the dims to merge contiguous.
            Op::View { from: old, to } => {
                let at = order.iter().position(|d| to.contains(d)).unwrap_or(order.len());
                let mut dims: Vec<Dim> = order.iter().copied().filter(|d| !to.contains(d)).collect();
                dims.splice(at.min(dims.len())..at.min(dims.len()), old.iter().copied());
                let near = self.copied(arg, &from, &dims);
                near.through(&body.dims, &node.op, order).expect("invariant: dense dims side by side merge")
            }
            // A shard that is not contiguous is gathered piece by piece.
            Op::Shard { from: whole, to, index } => {
                let to_buffer = self.buffer(v, order, Content::Activation);
                let at = order.iter().position(|d| d == to).expect("invariant: the result has the dim");
                let stride = from.stride(*whole).expect("invariant: the operand has the dim");
                let mut base = from.place.clone();
                if let ir::dim::Base::Coords(form) = &index.base {
                    base.coords.extend(form.iter().map(|(u, s)| (*u, s * stride)));
                }
                // There is one copy per outer piece; the innermost piece is contiguous.
                let (inner, _) = *index.parts.last().expect("invariant: an index map has parts");
                let mut scratch = body.clone();
                let piece = scratch.dims.add(ir::dim::DimInfo::new("piece", inner));
                let dims: Vec<Dim> = order.iter().map(|d| if d == to { piece } else { *d }).collect();
                scratch.nodes[v.index()].ty.dims = dims.clone();
                let strides = |view: &View, own: Dim| {
                    dims.iter().map(|d| if *d == piece { view.stride(own) } else { view.stride(*d) }.unwrap_or(0)).collect::<Vec<_>>()
                };
                for k in 0..index.len() / inner {
                    let mut src = base.clone();
                    src.offset += index.offset(k * inner) * stride;
                    let mut dst = to_buffer.place.clone();
                    dst.offset += k * inner * to_buffer.strides[at];
                    let src = View { place: src, dims: dims.clone(), strides: strides(&from, *whole) };
                    let dst = View { place: dst, dims: dims.clone(), strides: strides(&to_buffer, *to) };
                    let launch = kernels::copy(&scratch, v, &src, dst, false);
                    self.launch(launch, v);
                }
                to_buffer
            }
            _ => self.copied(arg, &from, order),
        }
    }

    pub(super) fn report(&mut self) {
        self.chunk = Chunk::Reduce;
        for (report, v) in &self.local.reports {
            let view = self.dense_view(*v);
            let origin = self.local.body[*v].origin.clone();
            self.push(Action::Report { report: *report, src: view.place }, &origin, None);
        }
    }
}
