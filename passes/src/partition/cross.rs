//! What crosses from stage to stage.
//!
//! A value that other stages use is relayed: up the virtual stages in the forward pass, down in the backward pass, by each stage on the way to the
//! next one, until all that use it have it. A stage that has a value keeps it for all its virtual stages and for the backward pass.
//!
//! All values of one element type that cross a border in one pass of a microbatch, split over the same axes, are one message. Values that
//! are split differently do not share a message, since copies of one would no longer be told from parts of the other. Each message of a
//! border has a channel of its own.

use super::emit::Emitter;
use super::job_view::JobView;
use ir::dim::Dim;
use ir::graph::{Phase, Type, Value};
use ir::local::Chunk;
use ir::mesh::{Axis, SubAxis};
use ir::op::{Channel, DType, Op};
use ir::reason::{AvoidedBy, Reason};
use ir::sharded::Placement;
use std::collections::{BTreeMap, BTreeSet};

/// Values that are sent together.
pub(super) struct Message {
    pub channel: Channel,
    /// Stages from the sender's to the receiver's.
    hops: i64,
    pub values: Vec<Value>,
}

fn reason() -> Reason {
    Reason::avoided("crosses from stage to stage", AvoidedBy::OneRank(Axis::Pp))
}

impl JobView<'_> {
    /// Finds what each virtual stage receives. From a virtual stage to another one of the same stage nothing needs to cross.
    pub(super) fn relays(&mut self) {
        let body = &self.s.graph.body;
        // `uses` holds, per value, the virtual stages that use it.
        let mut uses: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); body.nodes.len()];
        for v in body.values().rev() {
            // A value that every stage computes for itself is used where its users are.
            let places = match self.virtual_stage[v.index()] {
                Some(own) => BTreeSet::from([own]),
                None if matches!(body[v].op, Op::Reshard { .. }) => std::mem::take(&mut uses[v.index()]),
                None => continue,
            };
            for a in &body[v].args {
                uses[a.index()].extend(&places);
            }
        }
        for v in body.values() {
            if let Some(from) = self.virtual_stage[v.index()] {
                for to in self.route(body[v].origin.phase, from, &uses[v.index()]) {
                    self.received.entry((body[v].origin.phase, to)).or_default().push(v);
                }
            }
        }
        // A value that another stage waits for is not deferred to the weight pass, nor are the values it depends on.
        let mut open: Vec<Value> = self.received.values().flatten().copied().collect();
        while let Some(v) = open.pop() {
            let Chunk::Weight(chunk) = self.chunk[v.index()] else { continue };
            self.chunk[v.index()] = Chunk::Backward(chunk);
            open.extend(&body[v].args);
        }
    }

    /// The virtual stages that receive a value which is computed on one and used on others: for every stage on the
    /// way, the first one in the pass.
    fn route(&self, phase: Phase, from: u32, uses: &BTreeSet<u32>) -> BTreeSet<u32> {
        let home = self.layout.stage(from);
        let mut route = BTreeSet::new();
        for to in uses.iter().filter(|g| self.layout.stage(**g) != home) {
            let on_the_way: Vec<u32> = if phase == Phase::Forward { (from + 1..=*to).collect() } else { (*to..from).rev().collect() };
            let mut stage = self.layout.stage(*to);
            while stage != home {
                let first = on_the_way.iter().copied().find(|g| self.layout.stage(*g) == stage);
                let first = first.expect("invariant: values go up the virtual stages in the forward pass, down in the backward pass");
                route.insert(first);
                stage = self.layout.stage(if phase == Phase::Forward { first - 1 } else { first + 1 });
            }
        }
        route
    }

    /// The messages from a virtual stage to the next one in a phase, in the order in which they are sent.
    pub(super) fn messages(&self, phase: Phase, from: u32, to: u32) -> Vec<Message> {
        let body = &self.s.graph.body;
        let mut out: BTreeMap<(DType, Vec<SubAxis>), Vec<Value>> = BTreeMap::new();
        for v in self.received.get(&(phase, to)).into_iter().flatten() {
            let split = self.s.mesh.ids().filter(|u| self.s.sharding(*v)[*u] != Placement::Replicated).collect();
            out.entry((body[*v].ty.dtype, split)).or_default().push(*v);
        }
        let mut out: Vec<Vec<Value>> = out.into_values().collect();
        // A message is sent when its last value is computed. Messages of values that are only relayed come first.
        out.sort_by_key(|values| (self.last_of(values, from), values.last().copied()));
        // Each message has its own channel, so that none waits for another. Equal stages number them equally.
        let direction = u32::from(phase == Phase::Backward);
        let border = 2 * self.layout.chunk(from) + ir::fault!("partition.message.channel", 0, direction);
        let channel = |k: usize| Channel(2 * self.layout.chunks * k as u32 + border);
        let hops = i64::from(self.layout.stage(to)) - i64::from(self.layout.stage(from));
        out.into_iter().enumerate().map(|(k, values)| Message { channel: channel(k), hops, values }).collect()
    }

    /// The last of the values that a virtual stage computes.
    pub(super) fn last_of(&self, values: &[Value], virtual_stage: u32) -> Option<Value> {
        values.iter().copied().filter(|v| self.virtual_stage[v.index()] == Some(virtual_stage)).max()
    }
}

impl Emitter<'_> {
    /// Receives values at the start of a chunk of this stage.
    pub(super) fn receive(&mut self, message: &Message, chunk: Chunk) {
        let job = self.job;
        let values = message.values.as_slice();
        let first = values[0];
        let origin = &job.s.graph.body[first].origin;
        let op = Op::Recv { hops: ir::fault!("partition.message.hops", message.hops, -message.hops), channel: message.channel };
        if let [v] = values {
            let ty = self.local_type(*v);
            let w = self.push(op, vec![], ty, chunk, origin, Some(*v));
            self.out.reasons[w.index()] = Some(reason());
            self.map.insert((*v, job.chunk[v.index()]), w);
            return;
        }
        let types: Vec<Type> = values.iter().map(|v| self.local_type(*v)).collect();
        let sizes: Vec<u64> = types.iter().map(|ty| self.out.body.dims.elements(&ty.dims)).collect();
        let all = self.piece("message", sizes.iter().sum());
        let whole = self.push(op, vec![], Type::new(types[0].dtype, [all]), chunk, origin, None);
        self.out.reasons[whole.index()] = Some(reason());
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
            at += ir::fault!("partition.message.offset", 0, size);
        }
    }

    /// Sends values that are all computed.
    pub(super) fn send(&mut self, message: &Message, chunk: Chunk) {
        let job = self.job;
        let last = message.values[message.values.len() - 1];
        let origin = &job.s.graph.body[last].origin;
        let op = Op::Send { hops: message.hops, channel: message.channel };
        let values: Vec<Value> = message.values.iter().map(|v| self.get(*v, chunk)).collect();
        let whole = match values.as_slice() {
            [one] => *one,
            many => {
                let parts: Vec<(Dim, Value)> = many.iter().map(|w| self.flat(*w, chunk)).collect();
                let all = self.piece("message", parts.iter().map(|p| self.out.body.dims.size(p.0)).sum());
                let ty = Type::new(self.out.body[many[0]].ty.dtype, [all]);
                let (from, args): (Vec<Dim>, Vec<Value>) = parts.into_iter().unzip();
                self.push(Op::Concat { from, to: all }, args, ty, chunk, origin, None)
            }
        };
        let ty = self.out.body[whole].ty.clone();
        let sent = self.push(op, vec![whole], ty, chunk, origin, None);
        self.out.reasons[sent.index()] = Some(reason());
    }

    /// A value's elements along one dim, in storage order.
    fn flat(&mut self, w: Value, chunk: Chunk) -> (Dim, Value) {
        let node = self.out.body[w].clone();
        let flat = self.piece("part", self.out.body.dims.elements(&node.ty.dims));
        let ty = Type::new(node.ty.dtype, [flat]);
        let op = if node.ty.dims.is_empty() { Op::Expand } else { Op::View { from: node.ty.dims, to: vec![flat] } };
        (flat, self.push(op, vec![w], ty, chunk, &node.origin, None))
    }
}
