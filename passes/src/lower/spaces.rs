//! Values between the memories of the device and the host: copied where the other one uses them, and new parameters to where passes read them.

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::kernels;
use crate::lower::view::View;
use ir::graph::Value;
use ir::local::{Chunk, LocalUpdate};
use ir::program::{Action, BufferAddress, Content, Space};
use std::cmp::Reverse;

impl LocalLowering<'_, '_, '_> {
    /// Where a node is: another name for a value where that is, else where its graph says.
    pub(super) fn space_of(&self, v: Value) -> Space {
        let arg = self.local.body[v].args.first().and_then(|a| self.views.get(a));
        match (role(&self.local.body, v), arg) {
            (Role::Alias, Some(view)) => self.memory(view),
            (Role::Alias | Role::Compute | Role::Inline | Role::Source | Role::Exchange, _) => self.local.space(v),
        }
    }

    /// The memory in which a view lies.
    pub(super) fn memory(&self, view: &View) -> Space {
        self.l.program.buffers[view.place.buffer.index()].arena.space().expect("invariant: nothing is on a disk before lowering")
    }

    /// A value in the other memory than the one it lies in, once per chunk.
    pub(super) fn moved(&mut self, v: Value, from: View) -> View {
        if let Some(view) = self.moved.get(&(v, self.chunk)) {
            return view.clone();
        }
        let mut order = from.dims.clone();
        order.sort_by_key(|d| Reverse(from.stride(*d)));
        let part = match self.space {
            Space::Device => self.part_in_place(v, &[]).or_else(|| self.piece_in_place(v)),
            Space::Host => None,
        };
        let to = match part {
            Some(part) => {
                order = part.dims.clone();
                part
            }
            None => {
                if !from.is_dense(&self.local.body.dims, &order) {
                    order = self.local.body.dims_of(v).to_vec();
                }
                self.buffer(v, &order, Content::Activation)
            }
        };
        self.by_bool_of(v, |l| l.transfer(v, from, &order, to.place.clone()));
        self.moved.insert((v, self.chunk), to.clone());
        to
    }

    /// Copies a value to a place in the other memory, where it lies dense in this order.
    fn transfer(&mut self, v: Value, mut from: View, order: &[ir::dim::Dim], to: BufferAddress) {
        let body = &self.local.body;
        if !from.is_dense(&body.dims, order) {
            let own = self.memory(&from);
            let space = std::mem::replace(&mut self.space, own);
            from = self.copied(v, &from, order);
            self.space = space;
        }
        let node = &body[v];
        let rests = matches!(self.l.program.buffers[from.place.buffer.index()].content, Content::Param { .. });
        let reason = match self.space {
            Space::Host => "the optimizer runs where its states are, on the host",
            Space::Device if rests => "parameters rest on the host, passes read them on the device",
            Space::Device => "the optimizer runs on the host, passes read parameters on the device",
        };
        let action = Action::Copy { dtype: node.ty.dtype, count: body.elements(v), src: from.place, dst: to };
        self.push(action, &node.origin, Some(reason.into()));
    }

    /// Brings the parameters whose new values are among these to where they rest.
    pub(super) fn renew_params(&mut self, made: &[Value]) {
        let local = self.local;
        for u in local.updates.iter().filter(|u| made.contains(&u.new)) {
            self.renew(u.slot, None, u.new);
            self.renewed.insert(u.slot);
        }
    }

    /// New values that could not be written in place.
    pub(super) fn write_updates(&mut self) {
        self.chunk = Chunk::Update;
        let local = self.local;
        for LocalUpdate { slot, new, states } in &local.updates {
            for (k, v) in states.iter().enumerate() {
                self.renew(*slot, Some(k as u32), *v);
            }
            if !self.renewed.contains(slot) {
                self.renew(*slot, None, *new);
            }
        }
    }

    /// Writes the new value of a parameter or state over the old one, if it is not there yet.
    fn renew(&mut self, slot: u32, state: Option<u32>, v: Value) {
        let body = &self.local.body;
        let old = self.readers.get(&(slot, state)).and_then(|all| all.iter().find_map(|w| self.views.get(w)));
        let old = old.expect("invariant: what is updated is read").clone();
        let new = self.own_view(v);
        if new.place == old.place {
            return;
        }
        self.space = self.memory(&old);
        if self.memory(&new) != self.space {
            return self.transfer(v, new, &old.dims, old.place);
        }
        let strides = body.dims_of(v).iter().map(|d| old.stride(*d).unwrap_or(0)).collect();
        let target = View { dims: body.dims_of(v).to_vec(), strides, place: old.place };
        let launch = kernels::copy(body, v, &new, target, false);
        self.launch(launch, v);
    }
}
