//! What a rank's commands mean: where their operands lie, and who takes part.

use super::calls::peer;
use super::describe::describe;
use super::step::{ExecError, Fault, Step};
use super::transfer::{Copied, Transfer};
use crate::comm::{Exchange, Message, Position};
use crate::device::{Location, Memory};
use ir::mesh::{Axis, Coords};
use ir::op::{DType, Scalar};
use ir::program::{
    Action, Arena, Buffer, BufferAddress, BufferId, Call, CallSchedule, Command, Job, KernelId, Program, ProgramBody, Slots, Stage, linear,
};
use std::collections::BTreeSet;

/// Where a buffer is in its arena: of a stash's, in that of temporary buffers, once per slot.
#[derive(Clone, Copy)]
struct BufferLayout {
    arena: Arena,
    /// Offset in slot 0, in bytes.
    byte: u64,
    slots: u32,
    /// Bytes of a slot.
    bytes: u64,
}

impl BufferLayout {
    fn of_buffers(program: &Program, schedule: &CallSchedule) -> Vec<BufferLayout> {
        let of = |b: &Buffer| match program.stash(b).zip(b.arena.space()) {
            Some(((k, begin), space)) => {
                let Slots { count, at } = schedule.slots[k];
                BufferLayout {
                    arena: space.temporary(),
                    byte: ir::fault!("executor.stash.buffer", at, at + b.offset - begin),
                    slots: count,
                    bytes: program.stashes[k].bytes,
                }
            }
            None => BufferLayout { arena: b.arena, byte: b.offset, slots: 1, bytes: 0 },
        };
        program.buffers.iter().map(of).collect()
    }

    fn at(self, microbatch: u32) -> Location {
        Location { arena: self.arena, byte: self.byte + u64::from(ir::fault!("executor.stash.slot", 0, microbatch % self.slots)) * self.bytes }
    }
}

/// Temporary buffers that each command of a body is the first to touch.
fn fresh(program: &Program, body: &ProgramBody) -> Vec<Vec<BufferId>> {
    let mut seen: BTreeSet<BufferId> = BTreeSet::new();
    let mut of = |command: &Command| {
        let buffers = command.buffers().into_iter();
        buffers.filter(|id| program.buffers[id.index()].arena.is_temporary() && seen.insert(*id)).collect()
    };
    body.commands.iter().map(&mut of).collect()
}

/// What a rank's commands mean: what is the same for all of its streams.
pub struct Frame<'a> {
    /// The job that the rank is one of.
    pub job: &'a Job,
    /// The rank's number in the world, from 0.
    pub rank: u64,
    /// The program of the rank's stage.
    pub program: &'a Program,
    /// The pipeline stage that the rank is on.
    pub stage: &'a Stage,
    /// Members, per group of the program.
    groups: Vec<Vec<u64>>,
    /// Layout of each buffer.
    layouts: Vec<BufferLayout>,
    /// Of each body and command: temporary buffers that are in use from then on.
    fresh: Vec<Vec<Vec<BufferId>>>,
}

impl<'a> Frame<'a> {
    /// `job` has been checked ([`crate::check`]) and `rank` is in its mesh.
    pub fn new(job: &'a Job, rank: u64) -> Frame<'a> {
        let stage = &job.stages[job.mesh.stage(rank) as usize];
        let program = &job.programs[stage.program as usize];
        let groups = program.groups.iter().map(|g| g.members(&job.mesh, rank)).collect();
        let layouts = BufferLayout::of_buffers(program, &stage.schedule);
        let fresh = program.bodies.iter().map(|body| fresh(program, body)).collect();
        Frame { job, rank, program, stage, groups, layouts, fresh }
    }

    /// The rank's coordinates in a call.
    fn enter(&self, coords: &mut Coords, call: &Call) {
        for u in self.job.mesh.of(Axis::Microbatch) {
            coords[u.0 as usize] = u64::from(ir::fault!("executor.call.microbatch", 0, call.microbatch));
        }
    }

    pub(super) fn start(&self, call: &Call, buffer: BufferId) -> Location {
        self.layouts[buffer.index()].at(call.microbatch)
    }

    /// Where the temporary buffers are that a command is the first of a call to touch, and their bytes.
    pub(super) fn fresh(&self, call: &Call, command: usize) -> impl Iterator<Item = (Location, u64)> {
        let ids = &self.fresh[call.body.index()][command];
        ids.iter().map(|id| (self.start(call, *id), self.program.buffers[id.index()].bytes()))
    }

    pub(super) fn locate(&self, coords: &Coords, call: &Call, place: &BufferAddress) -> Location {
        let start = self.start(call, place.buffer);
        let bytes = self.program.buffers[place.buffer.index()].dtype.bytes();
        Location { byte: start.byte + place.resolve(coords) * ir::fault!("executor.place.bytes", 4, bytes), ..start }
    }

    /// Whether a command is left out of a call: its predicate is false.
    pub fn is_left_out(&self, coords: &mut Coords, call: &Call, command: &Command, memory: &dyn Memory) -> bool {
        let Some(place) = &command.predicate else { return false };
        self.enter(coords, call);
        let mut bool = [1.0];
        memory.read(self.locate(coords, call, place), DType::Bool, &mut bool);
        bool[0] == ir::fault!("executor.predicate.not", 1.0, 0.0)
    }

    /// The communication or copy that a command is, if it is one.
    pub fn transfer(&self, coords: &mut Coords, call: &Call, action: &Action) -> Option<Transfer<'_>> {
        self.enter(coords, call);
        let at = |place: &BufferAddress| self.locate(coords, call, place);
        match action {
            Action::Collective { kind, group, dtype, count, src, dst } => {
                let exchange = Exchange { kind: *kind, dtype: *dtype, count: *count, src: at(src), dst: at(dst) };
                Some(Transfer::Collective(&self.groups[group.index()], exchange))
            }
            Action::Send { hops, channel, dtype, count, src } => {
                let message = Message { channel: *channel, dtype: *dtype, count: *count, at: at(src) };
                Some(Transfer::Send(peer(self.job, self.rank, *hops), message))
            }
            Action::Recv { hops, channel, dtype, count, dst } => {
                let message = Message { channel: *channel, dtype: *dtype, count: *count, at: at(dst) };
                Some(Transfer::Recv(peer(self.job, self.rank, *hops), message))
            }
            Action::Copy { dtype, count, src, dst } => Some(Transfer::Copy(Copied { dtype: *dtype, count: *count, src: at(src), dst: at(dst) })),
            Action::Launch { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Report { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => None,
        }
    }

    /// The kernel that a command runs, if it does, with its operands and scalars.
    pub fn launch(&self, coords: &mut Coords, call: &Call, action: &Action, step: &Step) -> Option<(KernelId, Vec<Location>, Vec<f64>)> {
        self.enter(coords, call);
        let Action::Launch { kernel, args, scalars } = action else { return None };
        let places = args.iter().map(|place| self.locate(coords, call, place)).collect();
        Some((*kernel, places, scalars.iter().map(|s| scalar(s, coords, step)).collect()))
    }

    /// An error at a command.
    pub fn error(&self, step: &Step, at: Position, fault: Fault) -> ExecError {
        ExecError { rank: self.rank, step: step.number, command: describe(self.job, self.rank, at), fault }
    }
}

/// The value of a scalar argument.
fn scalar(scalar: &Scalar, coords: &Coords, step: &Step) -> f64 {
    match scalar {
        Scalar::LearningRate => step.learning_rate,
        Scalar::LossScale => step.loss_scale,
        Scalar::Step => ir::fault!("executor.scalars.step", step.seed as f64, step.number as f64),
        Scalar::Seed => step.seed as f64,
        Scalar::BiasCorrection(beta) => 1.0 - beta.0.powf(ir::fault!("executor.scalars.bias", step.number + 1, step.number) as f64),
        Scalar::Linear(form) => linear(form, coords) as f64,
        // The job was checked: launches of a program have no slots.
        Scalar::Slot(_) => f64::NAN,
    }
}
