//! How long commands take on a nominal machine, and what communication of a step is hidden behind compute there.
//!
//! The machine is a DGX A100: it gives the proportions between arithmetic, memory and links, not a prediction of times. Everything follows from the
//! program alone, so the same program gives the same figures everywhere.

use crate::overlap::stream_of;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::mesh::{Axis, Mesh};
use ir::op::{AttentionGrad, Collective, Op};
use ir::program::{Action, Group, Job, Program, Stream};
use serde::Serialize;
use std::collections::BTreeMap;

/// Femtoseconds per floating-point operation (312 T/s).
const FLOP: u64 = 3;
/// Per byte of device memory (2.04 TB/s).
const MEMORY: u64 = 490;
/// Per byte between ranks of one machine (300 GB/s), and of several (25 GB/s).
const NEAR: u64 = 3_333;
const FAR: u64 = 40_000;
/// Ranks of a machine.
const RANKS: u64 = 8;

/// What commands of a job cost.
pub struct Costs<'a> {
    mesh: &'a Mesh,
    kernels: Vec<u64>,
}

impl<'a> Costs<'a> {
    pub fn new(mesh: &'a Mesh, kernels: &[Kernel]) -> Costs<'a> {
        Costs { mesh, kernels: kernels.iter().map(launch).collect() }
    }

    /// Femtoseconds that a command keeps its stream busy, once it can go on.
    pub fn time(&self, program: &Program, action: &Action) -> u64 {
        match action {
            Action::Launch { kernel, .. } => self.kernels[kernel.index()],
            Action::Fill { buffer, .. } | Action::Load { dst: buffer, .. } => MEMORY * program.buffers[buffer.index()].bytes(),
            Action::Collective { group, .. } => self.sent(program, action) * self.link(&program.groups[group.index()]),
            Action::Send { hops, .. } | Action::Recv { hops, .. } => {
                let apart = self.mesh.world() / self.mesh.size(Axis::Pp) * hops.unsigned_abs();
                self.sent(program, action) * if apart < RANKS { NEAR } else { FAR }
            }
            Action::Report { .. } | Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => 0,
        }
    }

    /// Bytes that a rank sends (or receives) by a communication: (n-1)/n of the whole in gathers and scatters, twice that in all-reduces.
    pub fn sent(&self, program: &Program, action: &Action) -> u64 {
        match action {
            Action::Collective { kind, group, dtype, count, .. } => sent(*kind, count * dtype.bytes(), program.groups[group.index()].size(self.mesh)),
            Action::Send { dtype, count, .. } | Action::Recv { dtype, count, .. } => count * dtype.bytes(),
            Action::Launch { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Report { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => 0,
        }
    }

    /// Of a byte within the group of rank 0, or what would be that.
    fn link(&self, group: &Group) -> u64 {
        let members = self.mesh.group(0, &group.subs);
        let near = group.stages.is_none() && members.last().is_some_and(|last| *last < RANKS);
        if near { NEAR } else { FAR }
    }
}

/// Bytes that one of `n` members sends in a collective of which it holds `bytes`, as the command counts them.
pub fn sent(kind: Collective, bytes: u64, n: u64) -> u64 {
    match kind {
        Collective::AllReduce(_) => 2 * bytes * (n - 1) / n,
        Collective::Shift => bytes,
        Collective::AllGather | Collective::ReduceScatter(_) | Collective::AllToAll => bytes * (n - 1),
    }
}

/// Of a kernel: its arithmetic or its operands, whichever takes longer.
fn launch(kernel: &Kernel) -> u64 {
    let body = &kernel.body;
    let bytes = |ty: &ir::graph::Type| body.dims.elements(&ty.dims) * ty.dtype.bytes();
    let read: u64 = kernel.inputs.iter().map(|i| bytes(&i.ty)).sum();
    let written: u64 = kernel.outputs.iter().map(|o| bytes(&body[o.value].ty)).sum();
    let flops: u64 = body.values().map(|v| flops(kernel, v)).sum();
    (FLOP * flops).max(MEMORY * (read + written))
}

/// Two per multiply-add of matrix products and attention.
fn flops(kernel: &Kernel, v: Value) -> u64 {
    let body = &kernel.body;
    let node = &body[v];
    let of_attention = |products: u64, a: &ir::op::Attention| 2 * products * body.elements(node.args[0]) * body.dims.size(a.keys);
    match &node.op {
        Op::Dot { over } => 2 * body.elements(v) * over.iter().map(|d| body.dims.size(*d)).product::<u64>(),
        // Each row meets one expert alone.
        Op::GroupedDot { rows, experts, over } => {
            let summed = over.iter().filter(|d| *d != experts).map(|d| body.dims.size(*d)).product::<u64>();
            let each = 2 * body.elements(v) * summed;
            if over.contains(rows) { each / body.dims.size(*experts) } else { each }
        }
        Op::Attention(a) | Op::AttentionGrad(a, AttentionGrad::Q) => of_attention(2, a),
        Op::AttentionGrad(a, AttentionGrad::K | AttentionGrad::V) => of_attention(1, a),
        _ => 0,
    }
}

/// What goes over one stream in a step, by one rank of each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    pub bytes: u64,
    /// Of these, how many go while a kernel runs.
    pub hidden: u64,
}

/// Communication of a step by the streams that it has, or would have if it were not on the compute stream. It is looked at in the second of
/// two steps, as a step begins while messages of the one before may still be under way.
pub fn traffic(job: &Job) -> BTreeMap<Stream, Traffic> {
    let costs = Costs::new(&job.mesh, &job.kernels);
    let mut out: BTreeMap<Stream, Traffic> = BTreeMap::new();
    for stage in &job.stages {
        let program = &job.programs[stage.program as usize];
        let (mut clocks, mut events) = ([0u64; Stream::ALL.len()], BTreeMap::<u32, u64>::new());
        let (mut busy, mut sent) = (vec![], vec![]);
        for step in 0..2 {
            for call in stage.schedule.train.iter().chain(&stage.schedule.update) {
                for command in &program.bodies[call.body.index()].commands {
                    let clock = &mut clocks[command.stream as usize];
                    match &command.action {
                        Action::Record { event } => drop(events.insert(*event, *clock)),
                        Action::Wait { event } => *clock = (*clock).max(events.get(event).copied().unwrap_or(0)),
                        action => {
                            let from = *clock;
                            *clock += costs.time(program, action);
                            let kind = stream_of(&job.mesh, &program.groups, action);
                            if kind == Stream::Compute {
                                busy.push((from, *clock));
                            } else if step == 1 {
                                sent.push((kind, from, *clock, costs.sent(program, action)));
                            }
                        }
                    }
                }
            }
        }
        for (kind, from, to, bytes) in sent {
            // Kernels follow each other, so those at work in between are side by side.
            let first = busy.partition_point(|b| b.1 <= from);
            let within = busy[first..].iter().take_while(|b| b.0 < to).map(|b| b.1.min(to) - b.0.max(from)).sum::<u64>();
            let traffic = out.entry(kind).or_default();
            traffic.bytes += bytes;
            traffic.hidden += (u128::from(bytes) * u128::from(within) / u128::from((to - from).max(1))) as u64;
        }
    }
    out
}
