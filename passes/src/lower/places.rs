//! Where values lie: buffers that are made for them, and those of parameters, states and tables.

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::kernels::{self, Target};
use crate::lower::view::View;
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Family;
use ir::local::Chunk;
use ir::op::Op;
use ir::program::{Arena, Buffer, BufferAddress, BufferId, Content};

impl LocalLowering<'_, '_, '_> {
    /// A new buffer for the value, dense in `order`. Its arena is settled at the end.
    pub(super) fn buffer(&mut self, v: Value, order: &[Dim], content: Content) -> View {
        let body = &self.local.body;
        let node = &body[v];
        let id = BufferId(self.l.program.buffers.len() as u32);
        self.l.program.buffers.push(Buffer {
            name: format!("{}{v}", self.names.prefix),
            dtype: node.ty.dtype,
            dims: order.iter().map(|d| (body.dims.name(*d).to_string(), body.dims.size(*d))).collect(),
            arena: self.space.temporary(),
            offset: 0,
            content,
            origin: Some(node.origin.clone()),
        });
        self.touched.insert(id, [self.chunk].into());
        View { place: BufferAddress::start(id), dims: order.to_vec(), strides: body.dims.strides(order) }
    }

    /// Where the running chunk finds a value, in the memory in which it works.
    pub(super) fn view(&mut self, v: Value) -> View {
        let view = self.own_view(v);
        if self.memory(&view) == self.space { view } else { self.moved(v, view) }
    }

    /// Where the running chunk finds a value, in whatever memory.
    pub(super) fn own_view(&mut self, v: Value) -> View {
        let from = self.local.chunks[v.index()];
        let view = match self.sums.get(&v) {
            Some(sum) if self.crosses(from, self.chunk) => sum.clone(),
            _ => self.views.get(&v).expect("invariant: operands are computed first").clone(),
        };
        if let Some(t) = self.touched.get_mut(&view.place.buffer) {
            t.insert(self.chunk);
        }
        view
    }

    /// Like `view`, for an op that wants the elements in storage order one after the other.
    pub(super) fn dense_view(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let order = body[v].ty.dims.clone();
        if role(body, v) == Role::Inline {
            let to = self.buffer(v, &order, Content::Activation);
            let family = Family::Loops { grid: order };
            let launch = kernels::build(body, &[], &family, vec![Target { value: v, view: to.clone(), accumulate: false }], &|_| {
                unreachable!("invariant: a source has no operands")
            });
            self.launch(launch, v);
            return to;
        }
        let view = self.view(v);
        if view.is_dense(&body.dims, &order) {
            return view;
        }
        self.copied(v, &view, &order)
    }

    /// A source in memory, for kernels that do not make it. Indices that count alike are stored once per chunk.
    pub(super) fn stored(&mut self, v: Value) -> View {
        let body = &self.local.body;
        let Op::Iota(d) = body[v].op else { return self.dense_view(v) };
        let key = (self.chunk, self.space, body.dims[d].index.clone(), body.dims[d].order);
        if let Some(place) = self.indices.get(&key) {
            return View { place: place.clone(), dims: vec![d], strides: vec![1] };
        }
        let view = self.by_bool_of(v, |l| l.dense_view(v));
        self.indices.insert(key, view.place.clone());
        view
    }

    pub(super) fn copied(&mut self, v: Value, from: &View, order: &[Dim]) -> View {
        let to = self.buffer(v, order, Content::Activation);
        let launch = kernels::copy(&self.local.body, v, from, to.clone(), false);
        self.launch(launch, v);
        to
    }

    /// The buffer of a parameter's copy in another precision, if a value is one that is made once a step.
    pub(super) fn copy_of_param(&mut self, v: Value) -> Option<View> {
        let body = &self.local.body;
        let slot = body.copied_param(v).filter(|_| self.chunk == Chunk::PrologueReduce)?;
        let slot = self.names.slots[slot as usize];
        let order = body.dims_of(v).to_vec();
        let key = (Content::Param { slot, index: order.iter().map(|d| body.dims[*d].index.clone()).collect() }, body[v].ty.dtype);
        if let Some(id) = self.l.copies.get(&key) {
            return Some(View { place: BufferAddress::start(*id), strides: body.dims.strides(&order), dims: order });
        }
        let view = self.buffer(v, &order, Content::Accumulator);
        let id = view.place.buffer;
        self.touched.remove(&id);
        let buffer = &mut self.l.program.buffers[id.index()];
        buffer.arena = Arena::Persistent;
        buffer.name = format!("{}.{}", self.l.names[slot as usize], buffer.dtype.name());
        self.l.copies.insert(key, id);
        Some(view)
    }

    /// The buffer of a parameter, state or table, which lives over steps.
    pub(super) fn hold(&mut self, v: Value, name: String, content: Content) -> View {
        let body = &self.local.body;
        let order = body[v].ty.dims.clone();
        if let Some(id) = ir::fault!("lower.names.held", None, self.l.held.get(&content)) {
            return View { place: BufferAddress::start(*id), dims: order.clone(), strides: body.dims.strides(&order) };
        }
        let view = self.buffer(v, &order, content.clone());
        let id = view.place.buffer;
        self.touched.remove(&id);
        let buffer = &mut self.l.program.buffers[id.index()];
        buffer.arena = self.space.lasting();
        buffer.name = name;
        self.l.held.insert(content, id);
        view
    }
}
