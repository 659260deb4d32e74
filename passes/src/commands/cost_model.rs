//! How long commands take on a nominal machine, and what communication of a step is hidden behind compute there.
//!
//! The machine is a DGX A100: it gives the proportions between arithmetic, memory and links, not a prediction of times. Everything follows from the
//! program alone, so the same program gives the same figures everywhere.

use crate::commands::streams::stream_of;
use ir::kernel::Kernel;
use ir::mesh::{Axis, Mesh};
use ir::program::{Action, Arena, Group, Job, Program, ProgramBody, Space, Stage, Stream};
use ir::work::{Work, sent};
use serde::Serialize;
use std::collections::BTreeMap;

/// Femtoseconds per floating-point operation (312 T/s).
const FLOP: u64 = 3;
/// Femtoseconds per byte of device memory (2.04 TB/s).
const MEMORY: u64 = 490;
/// Femtoseconds per byte of host memory, of which a GPU has an eighth (25 GB/s), and between both memories (25 GB/s).
const HOST: u64 = 40_000;
const BUS: u64 = 40_000;
/// Femtoseconds per byte to or from disks, of which a GPU has an eighth (3 GB/s, about the rate of one NVMe drive).
const DISK: u64 = 333_333;
/// Femtoseconds per byte between ranks of one machine (300 GB/s), and of several (25 GB/s).
const NEAR: u64 = 3_333;
const FAR: u64 = 40_000;
/// Ranks of a machine.
const RANKS: u64 = 8;

/// What commands of a job cost.
pub struct CostModel<'a> {
    mesh: &'a Mesh,
    kernels: Vec<u64>,
}

impl<'a> CostModel<'a> {
    /// Works out the time of each kernel; `kernels` are those of the job, by [`ir::program::KernelId`].
    pub fn new(mesh: &'a Mesh, kernels: &[Kernel]) -> CostModel<'a> {
        CostModel { mesh, kernels: kernels.iter().map(launch).collect() }
    }

    /// Femtoseconds that a command keeps its stream busy, once it can go on. Times saturate, after five hours.
    pub fn time(&self, program: &Program, action: &Action) -> u64 {
        match action {
            Action::Launch { kernel, .. } => self.kernels[kernel.index()],
            Action::Fill { buffer, .. } | Action::Load { dst: buffer, .. } => MEMORY.saturating_mul(program.buffers[buffer.index()].bytes()),
            Action::Collective { group, .. } => self.sent(program, action).saturating_mul(self.link(&program.groups[group.index()])),
            Action::Send { hops, .. } | Action::Recv { hops, .. } => {
                let apart = self.mesh.world() / self.mesh.size(Axis::Pp) * hops.unsigned_abs();
                self.sent(program, action).saturating_mul(if apart < RANKS { NEAR } else { FAR })
            }
            Action::Copy { src, dst, .. } => {
                let disk = [src, dst].iter().any(|p| program.buffers[p.buffer.index()].arena == Arena::Disk);
                self.sent(program, action).saturating_mul(if disk { DISK } else { BUS })
            }
            Action::Report { .. } | Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => 0,
        }
    }

    /// Bytes that a rank sends (or receives) by a communication, or copies.
    pub fn sent(&self, program: &Program, action: &Action) -> u64 {
        sent(self.mesh, program, action)
    }

    /// Femtoseconds per byte within the group of rank 0, or within such a group.
    fn link(&self, group: &Group) -> u64 {
        let mut last = vec![0; self.mesh.subs.len()];
        group.subs.iter().for_each(|u| last[u.0 as usize] = self.mesh[*u].size - 1);
        let near = group.stages.is_none() && self.mesh.rank(&last) < RANKS;
        if near { NEAR } else { FAR }
    }
}

/// The time of a kernel: that of its arithmetic or of its operands, whichever is longer.
fn launch(kernel: &Kernel) -> u64 {
    let work = Work::of(kernel);
    let byte = match kernel.on {
        Space::Device => MEMORY,
        Space::Host => HOST,
    };
    FLOP.saturating_mul(work.flops).max(byte.saturating_mul(work.bytes))
}

/// How much of a span of time these kernels, in order, are running.
fn within(busy: &[(u64, u64)], from: u64, to: u64) -> u64 {
    let first = busy.partition_point(|b| b.1 <= from);
    busy[first..].iter().take_while(|b| b.0 < to).map(|b| b.1.min(to) - b.0.max(from)).sum()
}

/// What goes over one stream in a step, by one rank of each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Bytes that such ranks send, receive or copy, one of each stage added up.
    pub bytes: u64,
    /// Of these, how many go while a kernel runs.
    pub hidden: u64,
}

/// Steps that are simulated. Messages may still be under way when the next step begins, so the second one is
/// measured.
const STEPS: usize = 3;

/// A command that keeps its stream busy, and from when to when.
struct Busy<'a> {
    step: usize,
    body: &'a ProgramBody,
    action: &'a Action,
    from: u64,
    to: u64,
}

/// Simulates steps of a rank of a stage, its streams side by side, as if no message were late. Calls `each` for every
/// command. Commands with a predicate are skipped, as in most steps. Returns when each step ends.
fn play(job: &Job, costs: &CostModel, stage: &Stage, each: &mut dyn FnMut(&Busy)) -> [u64; STEPS] {
    let program = &job.programs[stage.program as usize];
    let (mut clocks, mut events) = ([0u64; Stream::ALL.len()], BTreeMap::<u32, u64>::new());
    std::array::from_fn(|step| {
        for call in stage.schedule.train.iter().chain(&stage.schedule.update) {
            let body = &program.bodies[call.body.index()];
            for (_, command) in program.commands(call).filter(|(_, c)| c.predicate.is_none()) {
                let clock = &mut clocks[command.stream as usize];
                match &command.action {
                    Action::Record { event } => drop(events.insert(*event, *clock)),
                    Action::Wait { event } => *clock = (*clock).max(events.get(event).copied().unwrap_or(0)),
                    action => {
                        let from = *clock;
                        *clock = clock.saturating_add(costs.time(program, action));
                        each(&Busy { step, body, action, from, to: *clock });
                    }
                }
            }
        }
        clocks.into_iter().max().unwrap_or(0)
    })
}

/// Femtoseconds of a step of the ranks of each stage, as if they never waited for other stages.
pub fn step_times(job: &Job) -> Vec<u64> {
    let costs = CostModel::new(&job.mesh, &job.kernels);
    let of_stage = |stage: &Stage| {
        let ends = play(job, &costs, stage, &mut |_| {});
        ends[1] - ends[0]
    };
    job.stages.iter().map(of_stage).collect()
}

/// Communication of a step by the streams that it has, or would have if it were not on the compute stream.
pub fn traffic(job: &Job) -> BTreeMap<Stream, Traffic> {
    traffic_of(job, &|_, _| true)
}

/// As [`traffic`], of the commands of bodies that `keep` wants.
pub fn traffic_of(job: &Job, keep: &dyn Fn(&ProgramBody, &Action) -> bool) -> BTreeMap<Stream, Traffic> {
    let costs = CostModel::new(&job.mesh, &job.kernels);
    let mut out: BTreeMap<Stream, Traffic> = BTreeMap::new();
    for stage in &job.stages {
        let program = &job.programs[stage.program as usize];
        // `busy` holds the times of kernels on the device, and of those on the host.
        let (mut busy, mut sent) = ([vec![], vec![]], vec![]);
        play(job, &costs, stage, &mut |&Busy { step, body, action, from, to }| {
            let stream = stream_of(&job.mesh, &job.kernels, &program.buffers, &program.groups, action);
            match stream {
                Stream::Compute => busy[0].push((from, to)),
                Stream::Host => busy[1].push((from, to)),
                kind if step == 1 && keep(body, action) => sent.push((kind, from, to, costs.sent(program, action))),
                _ => {}
            }
        });
        for (kind, from, to, bytes) in sent {
            // Copies are hidden behind kernels of the device or of the host.
            let within = match kind {
                Stream::ToHost | Stream::ToDevice | Stream::ToDisk | Stream::FromDisk => busy.iter().map(|b| within(b, from, to)).max().unwrap_or(0),
                Stream::Compute | Stream::Tensor | Stream::Data | Stream::Send | Stream::Receive | Stream::Host => within(&busy[0], from, to),
            };
            let traffic = out.entry(kind).or_default();
            traffic.bytes += bytes;
            traffic.hidden += (u128::from(bytes) * u128::from(within) / u128::from((to - from).max(1))) as u64;
        }
    }
    out
}
