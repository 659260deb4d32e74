//! What crosses from stage to stage.
//!
//! All values of one element type that cross a border in one pass of a microbatch, split over the same axes, are one message. Values that
//! are split differently do not share a message, since copies of one would no longer be told from parts of the other. Each message of a
//! border has a channel of its own.

use super::JobView;
use super::emit::Emitter;
use ir::dim::Dim;
use ir::graph::{Phase, Type, Value};
use ir::local::Chunk;
use ir::mesh::SubAxis;
use ir::op::{Channel, DType, Op};
use ir::sharded::Placement;
use std::collections::BTreeMap;

/// Values that are sent together.
pub(super) struct Message {
    pub channel: Channel,
    pub values: Vec<Value>,
}

const WHY: &str = "crosses from stage to stage; not needed with --pp 1";

impl JobView<'_> {
    /// What goes from a virtual stage to one of another stage in a phase, in the order in which it is sent.
    pub(super) fn messages(&self, phase: Phase, from: u32, to: u32) -> Vec<Message> {
        let body = &self.s.graph.body;
        let mut out: BTreeMap<(DType, Vec<SubAxis>), Vec<Value>> = BTreeMap::new();
        for v in body.values() {
            if self.virtual_stage[v.index()] == Some(from) && body[v].origin.phase == phase && self.transfers[v.index()].contains(&to) {
                let split = self.s.mesh.ids().filter(|u| self.s.sharding(v)[*u] != Placement::Replicated).collect();
                out.entry((body[v].ty.dtype, split)).or_default().push(v);
            }
        }
        let mut out: Vec<Vec<Value>> = out.into_values().collect();
        // The sender sends each when its last value is there.
        out.sort_by_key(|values| values.last().copied());
        // Each has a channel of its own, so that none waits for another's turn. Stages that are alike number them alike.
        let direction = u32::from(phase == Phase::Backward);
        let border = 2 * self.layout.chunk(from) + direction;
        let channel = |k: usize| Channel(2 * self.layout.chunks * k as u32 + border);
        out.into_iter().enumerate().map(|(k, values)| Message { channel: channel(k), values }).collect()
    }
}

impl Emitter<'_> {
    /// From the stage of a value to another one.
    fn hops(&self, v: Value, to: u32) -> i64 {
        let from = self.job.stage(v).expect("invariant: what crosses has a stage");
        i64::from(to) - i64::from(from)
    }

    /// Takes values at the start of a chunk of this stage.
    pub(super) fn receive(&mut self, message: &Message, chunk: Chunk) {
        let job = self.job;
        let values = message.values.as_slice();
        let first = values[0];
        let origin = &job.s.graph.body[first].origin;
        let op = Op::Recv { hops: -self.hops(first, self.stage), channel: message.channel };
        if let [v] = values {
            let ty = self.local_type(*v);
            let w = self.push(op, vec![], ty, chunk, origin, Some(*v));
            self.out.reasons[w.index()] = Some(WHY.into());
            self.map.insert((*v, job.chunk[v.index()]), w);
            return;
        }
        let types: Vec<Type> = values.iter().map(|v| self.local_type(*v)).collect();
        let sizes: Vec<u64> = types.iter().map(|ty| self.out.body.dims.elements(&ty.dims)).collect();
        let all = self.piece("message", sizes.iter().sum());
        let whole = self.push(op, vec![], Type::new(types[0].dtype, [all]), chunk, origin, None);
        self.out.reasons[whole.index()] = Some(WHY.into());
        let mut at = 0;
        for ((v, ty), size) in values.iter().zip(types).zip(sizes) {
            let origin = &job.s.graph.body[*v].origin;
            let w = if ty.dims.is_empty() {
                self.push(Op::Slice { from: all, to: None, at }, vec![whole], ty, chunk, origin, Some(*v))
            } else {
                let flat = self.piece("part", size);
                let part = self.push(Op::Slice { from: all, to: Some(flat), at }, vec![whole], Type::new(ty.dtype, [flat]), chunk, origin, None);
                let view = Op::View { from: vec![flat], to: ty.dims.clone() };
                self.push(view, vec![part], ty, chunk, origin, Some(*v))
            };
            self.map.insert((*v, job.chunk[v.index()]), w);
            at += size;
        }
    }

    /// Sends values that are all computed.
    pub(super) fn send(&mut self, message: &Message) {
        let job = self.job;
        let (first, last) = (message.values[0], message.values[message.values.len() - 1]);
        let (chunk, origin) = (job.chunk[last.index()], &job.s.graph.body[last].origin);
        let to = *job.transfers[last.index()].first().expect("invariant: what crosses has a receiver");
        let op = Op::Send { hops: self.hops(last, job.layout.stage(to)), channel: message.channel };
        let values: Vec<Value> = message.values.iter().map(|v| self.get(*v, chunk)).collect();
        let whole = match values.as_slice() {
            [one] => *one,
            many => {
                let parts: Vec<(Dim, Value)> = many.iter().map(|w| self.flat(*w, first)).collect();
                let all = self.piece("message", parts.iter().map(|p| self.out.body.dims.size(p.0)).sum());
                let ty = Type::new(self.out.body[many[0]].ty.dtype, [all]);
                let (from, args): (Vec<Dim>, Vec<Value>) = parts.into_iter().unzip();
                self.push(Op::Concat { from, to: all }, args, ty, chunk, origin, None)
            }
        };
        let ty = self.out.body[whole].ty.clone();
        let sent = self.push(op, vec![whole], ty, chunk, origin, None);
        self.out.reasons[sent.index()] = Some(WHY.into());
    }

    /// A value's elements along one dim, in storage order.
    fn flat(&mut self, w: Value, like: Value) -> (Dim, Value) {
        let node = self.out.body[w].clone();
        let chunk = self.job.chunk[like.index()];
        let flat = self.piece("part", self.out.body.dims.elements(&node.ty.dims));
        let ty = Type::new(node.ty.dtype, [flat]);
        let op = if node.ty.dims.is_empty() { Op::Expand } else { Op::View { from: node.ty.dims, to: vec![flat] } };
        (flat, self.push(op, vec![w], ty, chunk, &node.origin, None))
    }
}
