//! What may be written over what: new parameters and states over old ones, results over operands that nothing reads any more, sums over ranks over their
//! operands, and ranks' parts within the whole.

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::fuse::Group as Fused;
use crate::lower::view::View;
use ir::graph::Value;
use ir::kernel::Family;
use ir::local::Chunk;
use ir::mesh::SubAxis;
use ir::op::{Collective, Op};
use ir::program::{BufferAddress, BufferId, Content, own_part};
use std::collections::BTreeSet;

impl LocalLowering<'_, '_, '_> {
    /// The buffer of the parameter or state that a value replaces, if nothing else reads the old one any more.
    pub(super) fn in_place(&mut self, v: Value, group: &Fused) -> Option<View> {
        let body = &self.local.body;
        if !group.nodes.iter().all(|n| body[*n].op.is_pointwise()) || group.chunk != Chunk::Update {
            return None;
        }
        let Some(update) = self.renews.get(&v).map(|k| &self.local.updates[*k]) else {
            return self.part_in_place(v, &group.nodes).or_else(|| self.piece_in_place(v));
        };
        // On the host, f32 weights can be both a state and the new parameter.
        let states = (0..update.states.len()).filter(|k| update.states[*k] == v).map(|k| Some(k as u32));
        (update.new == v).then_some(None).into_iter().chain(states).find_map(|state| {
            let holders: Vec<Value> = self.renewed_readers(update.slot, state).collect();
            let alone = holders.iter().all(|h| self.users[h.index()].iter().all(|(c, _)| group.nodes.contains(c)));
            // Without a reader in the update, the view of a pass is used, if nothing in the update reads through it.
            let done = |h: &Value| self.users[h.index()].iter().all(|(c, _)| self.local.chunks[c.index()] != Chunk::Update);
            let others = self.readers.get(&(update.slot, state)).into_iter().flatten().copied();
            let others = others.filter(|h| holders.is_empty() && done(h));
            let holder = holders.iter().copied().chain(others).find(|h| alone && self.views.contains_key(h))?;
            let old = self.own_view(holder);
            (body[holder].ty == body[v].ty && self.memory(&old) == self.space).then_some(old)
        })
    }

    /// As [`Self::in_place`], for this rank's part of a parameter whose parts are all gathered afterwards; `group`
    /// are the nodes that may still read it.
    pub(super) fn part_in_place(&mut self, v: Value, group: &[Value]) -> Option<View> {
        let body = &self.local.body;
        let [(gather, _)] = self.users[v.index()][..] else { return None };
        let (slot, subs) = self.gathers(gather)?;
        let mut reads = self.renewed_readers(slot, None).flat_map(|h| &self.users[h.index()]);
        // All readers of the parameter must be views of its parts that this group alone uses.
        let alone = reads.all(|(c, _)| role(body, *c) == Role::Alias && self.users[c.index()].iter().all(|(d, _)| group.contains(d)));
        // A parameter that rests in another memory than the gather's is written as a whole after the gather.
        let gathered = alone && self.space == self.local.space(gather);
        let whole = self.held(slot).filter(|whole| gathered && self.memory(whole) == self.space)?;
        if self.l.program.buffers[whole.place.buffer.index()].dtype != body[v].ty.dtype {
            return None;
        }
        let order = body.dims_of(v).to_vec();
        let coords = own_part(&self.local.mesh, &subs, body.elements(v));
        Some(View {
            place: BufferAddress { coords: ir::fault!("in_place.part.coords", vec![], coords), ..whole.place },
            strides: body.dims.strides(&order),
            dims: order,
        })
    }

    /// The buffer of an operand that a group reads element by element and is the last to read: less memory, and less to fetch into caches.
    /// So the gradient of the logits comes where they were. `taken` are those of the group's other results.
    pub(super) fn over_operand(&mut self, v: Value, group: &Fused, taken: &[BufferId]) -> Option<View> {
        let body = &self.local.body;
        let fits = match group.family {
            Family::Loops { .. } | Family::Gemm => true,
            Family::Attention | Family::AttentionGrad | Family::Scatter => false,
        };
        if !fits || self.renews.contains_key(&v) {
            return None;
        }
        // A product or a reduction reads its operands for several elements of the result.
        let mut factors: BTreeSet<Value> = BTreeSet::new();
        let mut open: Vec<Value> = group.nodes.iter().copied().filter(|n| !body[*n].op.is_pointwise()).collect();
        while let Some(n) = open.pop() {
            let new = body[n].args.iter().filter(|a| factors.insert(**a));
            open.extend(new.filter(|a| group.nodes.contains(a)));
        }
        let operands =
            group.nodes.iter().flat_map(|n| &body[*n].args).copied().filter(|x| ir::fault!("in_place.operand.factors", true, !factors.contains(x)));
        let x = operands.filter(|x| body[*x].ty == body[v].ty && self.is_last_read(*x, group)).find(|x| {
            let view = &self.views[x];
            view.is_dense(&body.dims, body.dims_of(v)) && !taken.contains(&view.place.buffer) && self.memory(view) == self.space
        })?;
        Some(self.own_view(x))
    }

    /// Whether a group is the last to read a value, which has a buffer of its own.
    fn is_last_read(&self, x: Value, group: &Fused) -> bool {
        let body = &self.local.body;
        let Some(view) = self.views.get(&x).filter(|_| role(body, x) == Role::Compute) else { return false };
        let own =
            self.touched.contains_key(&view.place.buffer) && !self.is_summed(x) && !self.homes.contains_key(&x) && !self.renews.contains_key(&x);
        own && view.place == BufferAddress::start(view.place.buffer) && self.is_behind(x, self.local.chunks[x.index()], &group.nodes)
    }

    /// Whether all readers of a value made in chunk `from` are done, except the nodes of a group.
    fn is_behind(&self, x: Value, from: Chunk, group: &[Value]) -> bool {
        let body = &self.local.body;
        // A view of the value may become a parameter or state, which is read last of all.
        let renewed = ir::fault!("in_place.operand.renewed", false, self.renews.contains_key(&x));
        !self.is_root(x)
            && !renewed
            && self.users[x.index()].iter().all(|(c, _)| match role(body, *c) {
                // A predicate is read before each command that it controls.
                _ if self.added.adds.contains(c) => false,
                // A reader of a view may read other elements.
                Role::Alias => self.is_behind(*c, from, &[]),
                Role::Compute => {
                    let at = self.local.chunks[c.index()];
                    // The group that is not done is the given one.
                    match self.groups_of[c].iter().filter(|g| !self.done.contains(g)).count() {
                        0 => group.contains(c) || at == self.chunk || at == from && from.precedes(self.chunk),
                        1 => group.contains(c),
                        _ => false,
                    }
                }
                // An exchange may still be under way beside later kernels.
                Role::Exchange => false,
                Role::Source | Role::Inline => unreachable!("invariant: they read nothing"),
            })
    }

    /// The nodes of the update that read a parameter, or a state of it.
    fn renewed_readers(&self, slot: u32, state: Option<u32>) -> impl Iterator<Item = Value> {
        let all = self.readers.get(&(slot, state)).into_iter().flatten().copied();
        all.filter(|v| self.local.chunks[v.index()] == Chunk::Update)
    }

    /// The slot whose new parameter an all-gather yields without a copy, and the sub-axes over which it gathers.
    pub(super) fn gathers(&self, v: Value) -> Option<(u32, Vec<SubAxis>)> {
        let body = &self.local.body;
        let Op::Collective { kind: Collective::AllGather, subs, stages: None, .. } = &body[v].op else { return None };
        let [(view, _)] = self.users[v.index()][..] else { return None };
        let whole = matches!(&body[view].op, Op::View { from, .. } if *from == body.dims_of(v)) && body.dims_of(view).len() == 1;
        let update = self.renews.get(&view).map(|k| &self.local.updates[*k]).filter(|u| whole && u.new == view)?;
        Some((update.slot, subs.clone()))
    }

    /// The view of a parameter that some chunk has read.
    pub(super) fn held(&self, slot: u32) -> Option<View> {
        self.readers.get(&(slot, None))?.iter().find_map(|v| self.views.get(v)).cloned()
    }

    /// Where a collective writes: over its operand, to this rank's part of it, to the whole of which the operand is a
    /// part, or to a new buffer.
    pub(super) fn destination(&mut self, v: Value, kind: Collective, subs: &[SubAxis], src: &View) -> View {
        let body = &self.local.body;
        let order = body.dims_of(v).to_vec();
        if self.reduces_in_place(v, kind, src) {
            return src.clone();
        }
        let dense = |place: BufferAddress| View { place, strides: body.dims.strides(&order), dims: order.clone() };
        // If the operand is made for the collective alone, the result stays at its part of it; other operands are
        // released.
        let made = |mut x: Value| {
            while role(body, x) == Role::Alias {
                x = body[x].args[0];
            }
            self.joined.contains_key(&x) || self.is_left(x) && self.local.chunks[x.index()] != self.chunk
        };
        let scatters = matches!(kind, Collective::ReduceScatter(_)) && src.place.coords.is_empty();
        if scatters && self.is_owned(body[v].args[0]) && made(body[v].args[0]) && !self.would_keep(v, src) {
            return dense(BufferAddress { coords: own_part(&self.local.mesh, subs, body.elements(v)), ..src.place.clone() });
        }
        if let Some(whole) = self.gathers(v).and_then(|(slot, _)| self.held(slot)) {
            let part = own_part(&self.local.mesh, subs, body.elements(body[v].args[0]));
            if src.place == (BufferAddress { coords: part, ..whole.place.clone() }) {
                return dense(whole.place);
            }
        }
        self.buffer(v, &order, Content::Activation)
    }

    /// Whether a part that stays where it is would keep a whole buffer alive for later chunks that this chunk could
    /// release, as where each rank keeps its part of a backward pass's gradients.
    fn would_keep(&self, v: Value, src: &View) -> bool {
        let here = self.touched.get(&src.place.buffer).is_some_and(|chunks| chunks.iter().all(|c| *c == self.chunk));
        here && !self.is_summed(v) && self.outlives(v)
    }

    /// Whether a value, or a view of it, is read in another chunk than the running one.
    fn outlives(&self, v: Value) -> bool {
        let body = &self.local.body;
        self.users[v.index()].iter().any(|(c, _)| match role(body, *c) {
            Role::Alias => self.outlives(*c),
            _ => self.local.chunks[c.index()] != self.chunk,
        })
    }

    /// Whether a value, or what it is a view of, has a buffer of its own that nothing else reads.
    fn is_owned(&self, v: Value) -> bool {
        let body = &self.local.body;
        let alone = self.users[v.index()].len() == 1 && !self.is_root(v);
        alone
            && match role(body, v) {
                Role::Compute => true,
                Role::Exchange => !matches!(body[v].op, Op::Send { .. } | Op::Limit { .. }),
                Role::Alias => self.is_owned(body[v].args[0]),
                Role::Inline | Role::Source => false,
            }
    }

    /// Whether an all-reduce may write over its operand: a value with a buffer of its own that nothing else reads.
    fn reduces_in_place(&self, v: Value, kind: Collective, src: &View) -> bool {
        let body = &self.local.body;
        let arg = body[v].args[0];
        // If the operand is a part of another value, the result has its own buffer.
        let dense = src.dims == body[v].ty.dims && role(body, arg) != Role::Alias && src.place.coords.is_empty();
        matches!(kind, Collective::AllReduce(_)) && dense && ir::fault!("in_place.reduce.owned", true, self.is_owned(arg))
    }
}
