//! What a rank's commands mean: where their operands lie, and who takes part.

use super::transfer::{Copied, Transfer};
use super::{ExecError, Fault, Step, describe};
use crate::comm::{Exchange, Message, Phase, Position};
use crate::device::Location;
use ir::mesh::{Axis, Coords};
use ir::op::Scalar;
use ir::program::{Action, Arena, Buffer, BufferId, Call, CallSchedule, Job, KernelId, Place, Program, Stage, linear};

/// Where the stash of a buffer is; whatever for buffers of other arenas.
#[derive(Clone, Copy, Default)]
struct Stash {
    /// From a buffer's offset to its byte in slot 0.
    shift: u64,
    /// Bytes of a slot.
    bytes: u64,
    slots: u32,
}

impl Stash {
    fn of_buffers(program: &Program, schedule: &CallSchedule) -> Vec<Stash> {
        let mut shifts = vec![];
        let mut shift = 0;
        for (bytes, slots) in program.stashes.iter().zip(&schedule.slots) {
            shifts.push(shift);
            shift += bytes * (u64::from(*slots) - 1);
        }
        let of = |b: &Buffer| match program.stash(b) {
            Some((k, _)) if b.arena == Arena::Stash => Stash { shift: shifts[k], bytes: program.stashes[k], slots: schedule.slots[k] },
            _ => Stash::default(),
        };
        program.buffers.iter().map(of).collect()
    }

    /// What to add to an offset for a microbatch.
    fn slot(self, microbatch: u32) -> u64 {
        self.shift + u64::from(microbatch % self.slots) * self.bytes
    }
}

/// What a rank's commands mean: what is the same for all of its streams.
pub struct Frame<'a> {
    pub job: &'a Job,
    pub rank: u64,
    pub program: &'a Program,
    pub stage: &'a Stage,
    /// Members, per group of the program.
    groups: Vec<Vec<u64>>,
    /// Of each buffer.
    stashes: Vec<Stash>,
}

impl<'a> Frame<'a> {
    /// `job` has been checked ([`crate::check`]) and `rank` is in its mesh.
    pub fn new(job: &'a Job, rank: u64) -> Frame<'a> {
        let stage = &job.stages[job.mesh.stage(rank) as usize];
        let program = &job.programs[stage.program as usize];
        let groups = program.groups.iter().map(|g| g.members(&job.mesh, rank)).collect();
        Frame { job, rank, program, stage, groups, stashes: Stash::of_buffers(program, &stage.schedule) }
    }

    /// The rank's coordinates in a call.
    fn enter(&self, coords: &mut Coords, call: &Call) {
        for u in self.job.mesh.of(Axis::Microbatch) {
            coords[u.0 as usize] = u64::from(call.microbatch);
        }
    }

    pub(super) fn start(&self, call: &Call, buffer: BufferId) -> Location {
        let held = &self.program.buffers[buffer.index()];
        let slot = match held.arena {
            Arena::Stash => self.stashes[buffer.index()].slot(call.microbatch),
            Arena::Persistent | Arena::Temporary | Arena::Host | Arena::Staging => 0,
        };
        Location { arena: held.arena, byte: slot + held.offset }
    }

    pub(super) fn locate(&self, coords: &Coords, call: &Call, place: &Place) -> Location {
        let start = self.start(call, place.buffer);
        let bytes = self.program.buffers[place.buffer.index()].dtype.bytes();
        Location { byte: start.byte + place.resolve(coords) * bytes, ..start }
    }

    /// The communication or copy that a command is, if it is one.
    pub fn transfer(&self, coords: &mut Coords, call: &Call, action: &Action) -> Option<Transfer<'_>> {
        self.enter(coords, call);
        let at = |place: &Place| self.locate(coords, call, place);
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

/// The calls of a phase.
pub fn calls(schedule: &CallSchedule, phase: Phase) -> &[Call] {
    match phase {
        Phase::Train => &schedule.train,
        Phase::Update => &schedule.update,
        Phase::Eval => &schedule.eval,
    }
}

/// Bytes of the arenas of a rank, the stashes with all their slots; in the order of [`Arena::ALL`].
pub fn arena_bytes(job: &Job, rank: u64) -> [u64; Arena::ALL.len()] {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let program = &job.programs[stage.program as usize];
    let mut bytes = program.arena_bytes;
    bytes[Arena::Stash as usize] = program.stashes.iter().zip(&stage.schedule.slots).map(|(bytes, slots)| bytes * u64::from(*slots)).sum();
    bytes
}

/// The rank `hops` stages on from a rank.
pub fn peer(job: &Job, rank: u64, hops: i64) -> u64 {
    let mut coords = job.mesh.coords(rank);
    for u in job.mesh.of(Axis::Pp) {
        coords[u.0 as usize] = coords[u.0 as usize].wrapping_add_signed(hops);
    }
    job.mesh.rank(&coords)
}

/// The value of a scalar argument.
fn scalar(scalar: &Scalar, coords: &Coords, step: &Step) -> f64 {
    match scalar {
        Scalar::LearningRate => step.learning_rate,
        Scalar::LossScale => step.loss_scale,
        Scalar::Step => step.number as f64,
        Scalar::Seed => step.seed as f64,
        Scalar::BiasCorrection(beta) => 1.0 - beta.0.powf(step.number as f64),
        Scalar::Linear(form) => linear(form, coords) as f64,
        // Checked: a program's launches have no slots.
        Scalar::Slot(_) => f64::NAN,
    }
}
