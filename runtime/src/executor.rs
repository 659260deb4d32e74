//! Runs one rank's program, command by command, over a device and a communicator.
//!
//! In list order, commands run as they are issued, whatever their stream: that order is one of those which streams and events allow, so
//! `Record` and `Wait` hold nothing up. Else each stream has a [`Cursor`] of its own, and an event is the number of times that it was
//! reached; who runs which stream's next command is the caller's choice ([`Rank::turn`]).

use crate::blame::Suspect;
use crate::comm::{CommError, Communicator, Exchange, Message, Phase, Position, Progress, ranks};
use crate::cursor::{self, Cursor};
use crate::device::{Device, DeviceError, Element, Location, Memory};
use crate::host::{Part, Tensor, Whole};
use crate::hosted::Hosted;
use crate::profile::Ran;
use crate::shm::Shm;
use crate::streams::{self, Communication, Compute, Events, Until};
use ir::mesh::{Axis, Coords};
use ir::op::{DType, Scalar};
use ir::program::{
    Action, Arena, Buffer, BufferId, Call, CallSchedule, Command, Content, Job, KernelId, Place, Program, Role, Stage, Stream, linear,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

/// What is the same for all ranks in a step.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// From 1.
    pub number: u64,
    pub learning_rate: f64,
    /// 1 where there is none.
    pub loss_scale: f64,
    /// Below 2^53, as kernels of the reference device get it as f64.
    pub seed: u64,
    /// One whole global batch per input of the job, in its order.
    pub batch: &'a [Tensor],
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A number is more than the program has room for.
    #[error("{found} is more than {most}: {reason}")]
    Limit { found: i64, most: u64, reason: String },
}

/// What stopped a rank, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}, {command}: {fault}")]
pub struct ExecError {
    pub rank: u64,
    pub step: u64,
    /// [`describe`]d.
    pub command: String,
    pub fault: Fault,
}

/// The first kernel that made a number that is not finite from operands that were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blame {
    pub position: Position,
    /// [`describe`]d.
    pub command: String,
    /// The op of the kernel that did it, if it was found.
    pub op: Option<String>,
}

/// How a rank takes its commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// As they are issued.
    List,
    /// Each stream by itself.
    #[default]
    Streams,
}

/// How far [`Rank::advance`] or [`Rank::turn`] came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advance {
    Finished,
    /// A command is done.
    Moved,
    /// Waits for these ranks; for another stream if there are none.
    Blocked(Vec<u64>),
}

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

    fn start(&self, call: &Call, buffer: BufferId) -> Location {
        let held = &self.program.buffers[buffer.index()];
        let slot = match held.arena {
            Arena::Stash => self.stashes[buffer.index()].slot(call.microbatch),
            Arena::Persistent | Arena::Temporary | Arena::Host | Arena::Staging => 0,
        };
        Location { arena: held.arena, byte: slot + held.offset }
    }

    fn locate(&self, coords: &Coords, call: &Call, place: &Place) -> Location {
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

/// A communication or copy whose operands are found.
#[derive(Clone, Copy, Debug)]
pub enum Transfer<'a> {
    Collective(&'a [u64], Exchange),
    /// To this rank.
    Send(u64, Message),
    /// From this rank.
    Recv(u64, Message),
    /// Within this rank.
    Copy(Copied),
}

/// A copy from one memory of a rank to another, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    pub dtype: DType,
    pub count: u64,
    pub src: Location,
    pub dst: Location,
}

impl Copied {
    /// Copies up to `most` bytes from element `done` on, and says how many elements are through.
    pub fn go(&self, memory: &mut dyn Memory, done: u64, most: usize) -> u64 {
        let width = memory.element(self.dtype).bytes();
        let elements = (self.count - done).min((most / width) as u64);
        let at = |start: Location| Location { byte: start.byte + done * self.dtype.bytes(), ..start };
        let mut bytes = vec![0; elements as usize * width];
        memory.load(at(self.src), self.dtype, &mut bytes);
        memory.store(at(self.dst), self.dtype, &bytes);
        done + elements
    }
}

impl Transfer<'_> {
    fn go(&self, memory: &mut dyn Memory, comm: &mut dyn Communicator) -> Result<Progress, CommError> {
        match self {
            Transfer::Collective(members, exchange) => comm.collective(memory, members, exchange),
            Transfer::Send(to, message) => comm.send(memory, *to, message),
            Transfer::Recv(from, message) => comm.recv(memory, *from, message),
            Transfer::Copy(copied) => {
                copied.go(memory, 0, usize::MAX);
                Ok(Progress::Done)
            }
        }
    }
}

/// One rank and its device.
pub struct Rank<'a, D> {
    frame: Arc<Frame<'a>>,
    /// The microbatch's coordinate is that of the current call.
    coords: Coords,
    pub device: D,
    cursors: Vec<Cursor>,
    events: Arc<Events>,
    at: Position,
    reports: Vec<Option<f64>>,
    /// Looks for the first operand that is not finite, if some.
    watch: Option<Option<Blame>>,
    scratch: Vec<f64>,
}

impl<'a, D: Device> Rank<'a, D> {
    /// `job` has been checked ([`crate::check`]) and `rank` is in its mesh; the device's arenas have the sizes of
    /// [`arena_bytes`].
    pub fn new(job: &'a Job, rank: u64, device: D, order: Order) -> Self {
        let frame = Arc::new(Frame::new(job, rank));
        let program = frame.program;
        let streams = match order {
            Order::List => vec![None],
            Order::Streams => cursor::streams(program).into_iter().map(Some).collect(),
        };
        Rank {
            frame,
            coords: job.mesh.coords(rank),
            device,
            cursors: streams.into_iter().map(|s| Cursor::new(program, s)).collect(),
            events: Arc::new(Events::new(cursor::events(program))),
            at: Position::default(),
            reports: vec![None; job.reports.len()],
            watch: None,
            scratch: vec![],
        }
    }

    pub fn rank(&self) -> u64 {
        self.frame.rank
    }

    /// The number of its streams that are told apart.
    pub fn streams(&self) -> usize {
        self.cursors.len()
    }

    /// Where one of its streams is.
    pub fn position(&self, stream: usize) -> Position {
        self.cursors[stream].at
    }

    /// Reports of the last phase, per report of the job.
    pub fn reports(&self) -> &[Option<f64>] {
        &self.reports
    }

    /// Whether the loss and the gradient norm, where reported, are finite. All ranks see the same values.
    pub fn is_finite(&self) -> bool {
        self.finite("loss") && self.finite("grad_norm")
    }

    /// Whether the reports of this name are finite.
    pub fn finite(&self, name: &str) -> bool {
        self.frame.job.reports.iter().zip(&self.reports).filter(|(n, _)| *n == name).all(|(_, value)| value.is_none_or(f64::is_finite))
    }

    /// From now on, every output of every kernel is checked. Slow.
    pub fn watch(&mut self) {
        self.watch = Some(None);
    }

    /// Ends [`Rank::watch`] and says what it found.
    pub fn blame(&mut self) -> Option<Blame> {
        self.watch.take().flatten()
    }

    /// From now on, what each stream does is timed. There is room for so many steps at first.
    pub fn profile(&mut self, steps: usize) {
        let (program, schedule) = (self.frame.program, &self.frame.stage.schedule);
        for cursor in &mut self.cursors {
            let (stream, calls) = (cursor.stream(), schedule.train.iter().chain(&schedule.update));
            let commands = calls.flat_map(|c| &program.bodies[c.body.index()].commands);
            let of_stream = commands.filter(|c| stream.is_none_or(|s| s == c.stream)).count();
            cursor.watch(of_stream * steps);
        }
    }

    /// Ends [`Rank::profile`]; gives the commands of each stream in its order.
    pub fn profiled(&mut self) -> Vec<Ran> {
        self.cursors.iter_mut().flat_map(Cursor::watched).collect()
    }

    /// Goes on to a phase, each stream from the end of the one before, and forgets the reports of that.
    pub fn begin(&mut self, phase: Phase) {
        self.cursors.iter_mut().for_each(|c| c.begin(phase));
        self.reports.fill(None);
    }

    /// Runs commands until the phase has ended or all streams wait.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn advance(&mut self, step: &Step, comm: &mut dyn Communicator) -> Result<Advance, ExecError> {
        loop {
            let (mut moved, mut blocked) = (false, None);
            for stream in 0..self.cursors.len() {
                match self.turn(stream, step, comm)? {
                    Advance::Moved => moved = true,
                    Advance::Blocked(on) => blocked.get_or_insert(vec![]).extend(on),
                    Advance::Finished => {}
                }
            }
            match blocked {
                Some(on) if !moved => return Ok(Advance::Blocked(on)),
                None if !moved => return Ok(Advance::Finished),
                Some(_) | None => {}
            }
        }
    }

    /// Whether its first stream, which has all but communication, is through what was begun.
    pub fn is_computed(&mut self) -> bool {
        self.cursors[0].next(self.frame.program, &self.frame.stage.schedule).is_none()
    }

    /// Runs a phase until compute is through, communication on a thread of its own where the device's memory can be shared. Some of that may be
    /// left for the next phase, on which compute of this one does not depend.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn phase(&mut self, phase: Phase, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        self.begin(phase);
        self.run(Until::Computed, step, shm)
    }

    /// Brings all communication to its end: then what the rank holds is there, and no other rank waits for it.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn settle(&mut self, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        self.run(Until::Settled, step, shm)
    }

    fn run(&mut self, until: Until, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        let Some(beside) = self.device.beside().filter(|_| self.cursors.len() > 1) else {
            while self.advance(step, shm)? != Advance::Finished {}
            return self.done(step);
        };
        let (frame, events) = (self.frame.clone(), self.events.clone());
        let mut cursors = self.cursors.split_off(1);
        let of_host = cursors.iter().position(|c| c.stream() == Some(Stream::Host));
        let host = match (of_host, self.device.host()) {
            (Some(k), Some(device)) => {
                let device = device.map_err(|e| frame.error(step, self.at, Fault::Device(e)))?;
                Some(Hosted { frame: &frame, cursor: cursors.remove(k), device, shm: shm.twin() })
            }
            (Some(_), None) | (None, _) => None,
        };
        let communication = Communication { frame: &frame, cursors, memory: beside.memory, shm: shm.twin() };
        let cursors = streams::run((communication, host), beside.begin, &events, until, step, shm, |shm| {
            Ok(match self.turn(0, step, shm)? {
                Advance::Moved => Compute::Moved,
                Advance::Finished => Compute::Finished,
                Advance::Blocked(_) => self.awaited(),
            })
        })?;
        self.cursors.extend(cursors);
        self.done(step)
    }

    /// Waits until the device is through with what it was told.
    fn done(&mut self, step: &Step) -> Result<(), ExecError> {
        self.device.synchronize().map_err(|e| self.frame.error(step, self.at, e.into()))
    }

    /// The event for which the first stream waits.
    fn awaited(&self) -> Compute {
        let cursor = &self.cursors[0];
        let call = calls(&self.frame.stage.schedule, cursor.at.phase)[cursor.at.call as usize];
        match self.frame.program.bodies[call.body.index()].commands[cursor.at.command as usize].action {
            Action::Wait { event } => Compute::Waits(event, cursor.due(event)),
            _ => Compute::Moved,
        }
    }

    /// Runs the next command of a stream, if it can run now.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn turn(&mut self, stream: usize, step: &Step, comm: &mut dyn Communicator) -> Result<Advance, ExecError> {
        let Some((call, command)) = self.cursors[stream].next(self.frame.program, &self.frame.stage.schedule) else { return Ok(Advance::Finished) };
        let cursor = &self.cursors[stream];
        self.at = cursor.at;
        if self.at.command == 0 && cursor.stream().is_none() {
            self.device.begin_call();
        }
        if let (Action::Wait { event }, Some(_)) = (&command.action, cursor.stream())
            && self.events.reached(*event) < cursor.due(*event)
        {
            return Ok(Advance::Blocked(vec![]));
        }
        comm.publish(step.number, self.at);
        match self.execute(call, command, step, comm).map_err(|fault| self.frame.error(step, self.at, fault))? {
            Progress::Done => {
                // Devices that run things later would have no times for them.
                if self.cursors[stream].is_watched() {
                    self.done(step)?;
                }
                self.cursors[stream].pass(command);
                Ok(Advance::Moved)
            }
            Progress::Blocked(on) => Ok(Advance::Blocked(on)),
        }
    }

    fn execute(&mut self, call: &Call, command: &Command, step: &Step, comm: &mut dyn Communicator) -> Result<Progress, Fault> {
        if let Some(transfer) = self.frame.transfer(&mut self.coords, call, &command.action) {
            if let Some(fabric) = self.device.fabric() {
                fabric.transfer(command.stream, &transfer);
                return Ok(Progress::Done);
            }
            return Ok(transfer.go(&mut self.device, comm)?);
        }
        let job = self.frame.job;
        match &command.action {
            launch @ Action::Launch { kernel, .. } => {
                let found = self.frame.launch(&mut self.coords, call, launch, step);
                let (_, places, values) = found.expect("invariant: it is a launch");
                let suspect = match self.watch {
                    Some(None) => Suspect::before(&self.device, &job.kernels[kernel.index()], &places, &values),
                    Some(Some(_)) | None => None,
                };
                self.device.launch(*kernel, &places, &values)?;
                if let Some(op) = suspect.and_then(|s| s.after(&self.device)) {
                    self.watch = Some(Some(Blame { position: self.at, command: describe(job, self.frame.rank, self.at), op }));
                }
            }
            Action::Fill { buffer, value } => {
                let filled = &self.frame.program.buffers[buffer.index()];
                self.device.fill(self.frame.start(call, *buffer), filled.dtype, filled.elements(), value.0);
            }
            Action::Load { input, dst, index } => {
                let part = Part::new(&job.inputs[*input as usize].dims, index, &self.coords);
                let at = self.frame.start(call, *dst);
                let dtype = self.frame.program.buffers[dst.index()].dtype;
                scatter(&mut self.device, &part, &step.batch[*input as usize], at, dtype, &mut self.scratch);
            }
            Action::Report { report, src } => {
                let mut value = [0.0];
                self.device.read(self.frame.locate(&self.coords, call, src), DType::F32, &mut value);
                self.reports[*report as usize] = Some(value[0]);
            }
            Action::Limit { src, most } => {
                let mut value = [0.0];
                self.device.read(self.frame.locate(&self.coords, call, src), DType::I32, &mut value);
                let found = value[0] as i64;
                if found > *most as i64 {
                    return Err(Fault::Limit { found, most: *most, reason: command.reason.clone().unwrap_or_default() });
                }
            }
            Action::Record { event } => {
                if let Some(fabric) = self.device.fabric() {
                    fabric.record(command.stream, *event);
                    return Ok(Progress::Done);
                }
                self.device.synchronize()?;
                self.events.reach(*event);
                self.events.ring();
                comm.recorded();
            }
            // Checked before, where streams are not the device's.
            Action::Wait { event } => {
                if let Some(fabric) = self.device.fabric() {
                    fabric.wait(command.stream, *event);
                }
            }
            Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. } | Action::Copy { .. } => unreachable!("invariant: a transfer"),
        }
        Ok(Progress::Done)
    }

    /// Writes what is held over steps and comes from outside: parameters, optimizer states and tables. `whole` gives a
    /// tensor for a content; none is zero.
    pub fn initialise<'w>(&mut self, mut whole: impl FnMut(Held) -> Option<&'w dyn Whole>) {
        let (job, program) = (self.frame.job, self.frame.program);
        for buffer in &program.buffers {
            let cuts = cuts(job, program, self.frame.stage, &buffer.content);
            let at = Location { arena: buffer.arena, byte: buffer.offset };
            // What lies between the pieces of a bucket is zero too.
            if cuts.iter().any(|c| c.window.is_some()) {
                self.device.fill(at, buffer.dtype, buffer.elements(), 0.0);
            }
            for cut in cuts {
                let part = cut.part(&self.coords);
                // A copy is one of the weights as they are stored here.
                let rounds = cut.role == Role::Copy && self.device.element(DType::F32) == Element::F32;
                match whole(cut.held) {
                    Some(source) if rounds => scatter(&mut self.device, &part, &InF32(source), at, buffer.dtype, &mut self.scratch),
                    Some(source) => scatter(&mut self.device, &part, source, at, buffer.dtype, &mut self.scratch),
                    None if cut.window.is_some() => {}
                    None => self.device.fill(at, buffer.dtype, buffer.elements(), 0.0),
                }
            }
        }
    }

    /// Gives every run of every parameter and optimizer state that this rank holds: what it is, where the run begins in the
    /// whole tensor, its elements.
    pub fn collect(&self, mut visit: impl FnMut(Held, u64, &[f64])) {
        let mut values = vec![];
        for buffer in &self.frame.program.buffers {
            for cut in cuts(self.frame.job, self.frame.program, self.frame.stage, &buffer.content) {
                if matches!(cut.held, Held::Table(_)) || cut.role == Role::Copy {
                    continue;
                }
                let bytes = buffer.dtype.bytes();
                cut.part(&self.coords).runs(|run| {
                    let Some(global) = run.global else { return };
                    values.resize(run.len as usize, 0.0);
                    self.device.read(Location { arena: buffer.arena, byte: buffer.offset + run.local * bytes }, buffer.dtype, &mut values);
                    visit(cut.held, global, &values);
                });
            }
        }
    }

    /// The persistent accumulators by name: gradients, losses.
    pub fn accumulators(&self) -> Vec<(String, Tensor)> {
        let buffers = self.frame.program.buffers.iter().filter(|b| b.content == Content::Accumulator && b.arena.lasts());
        buffers
            .map(|b| {
                let mut tensor = Tensor::zeros(b.dims.iter().map(|d| d.1).collect());
                self.device.read(Location { arena: b.arena, byte: b.offset }, b.dtype, &mut tensor.data);
                (b.name.clone(), tensor)
            })
            .collect()
    }
}

/// Reports by name. Terms of the loss that have the same name add up, except that `loss` and `grad_norm` are the whole ones, which
/// come first.
pub fn named(job: &Job, values: &[Option<f64>]) -> BTreeMap<String, f64> {
    let mut out: BTreeMap<String, f64> = BTreeMap::new();
    for (name, value) in job.reports.iter().zip(values) {
        let Some(value) = *value else { continue };
        match out.entry(name.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(value)),
            Entry::Occupied(_) if name == "loss" || name == "grad_norm" => {}
            Entry::Occupied(mut entry) => *entry.get_mut() += value,
        }
    }
    out
}

/// Something that lives over steps, as a whole: numbers are those of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Held {
    Param(u32),
    State(u32, u32),
    Table(u32),
}

/// What a buffer holds a part of.
struct Cut<'a> {
    held: Held,
    role: Role,
    extents: &'a [ir::program::Extent],
    index: &'a [ir::dim::IndexMap],
    /// Of a bucket: where the piece begins, and which elements the buffer holds.
    window: Option<(u64, &'a ir::dim::IndexMap)>,
}

impl<'a> Cut<'a> {
    fn part(&self, coords: &Coords) -> Part<'a> {
        let part = Part::new(self.extents, self.index, coords);
        match self.window {
            Some((at, window)) => part.within(at, window, coords),
            None => part,
        }
    }
}

fn cuts<'a>(job: &'a Job, program: &'a Program, stage: &'a Stage, content: &'a Content) -> Vec<Cut<'a>> {
    if let Content::Table { table, index } = content {
        let extents = &job.tables[*table as usize].dims;
        return vec![Cut { held: Held::Table(*table), role: Role::Weights, extents, index, window: None }];
    }
    let cut = |p: ir::program::Part<'a>| {
        let param = stage.params[p.slot as usize];
        let held = match p.role {
            Role::Weights | Role::Copy => Held::Param(param),
            Role::State(k) => Held::State(param, k),
        };
        Cut { held, role: p.role, extents: &job.params[param as usize].dims, index: p.index, window: p.bucket }
    };
    program.parts(stage, content).into_iter().map(cut).collect()
}

/// A tensor rounded to f32.
struct InF32<'a>(&'a dyn Whole);

impl Whole for InF32<'_> {
    fn read(&self, at: u64, out: &mut [f64]) {
        self.0.read(at, out);
        out.iter_mut().for_each(|x| *x = f64::from(*x as f32));
    }
}

/// Copies a part of a whole tensor to a device; padding is zero.
fn scatter<D: Device>(device: &mut D, part: &Part, whole: &dyn Whole, at: Location, dtype: DType, scratch: &mut Vec<f64>) {
    part.runs(|run| {
        scratch.clear();
        scratch.resize(run.len as usize, 0.0);
        if let Some(global) = run.global {
            whole.read(global, scratch);
        }
        device.write(Location { byte: at.byte + run.local * dtype.bytes(), ..at }, dtype, scratch);
    });
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

/// Elements between the first and the last of a strided range, both included; 0 if it has none.
pub(crate) fn reach(sizes: &[u64], strides: &[u64]) -> u64 {
    if sizes.contains(&0) {
        return 0;
    }
    1 + sizes.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<u64>()
}

/// The offset of every element of a strided range, row-major.
pub(crate) fn offsets(sizes: &[u64], strides: &[u64], mut visit: impl FnMut(u64)) {
    let mut at = vec![0u64; sizes.len()];
    for _ in 0..sizes.iter().product::<u64>() {
        visit(at.iter().zip(strides).map(|(i, s)| i * s).sum());
        for k in (0..at.len()).rev() {
            at[k] += 1;
            if at[k] < sizes[k] {
                break;
            }
            at[k] = 0;
        }
    }
}

/// The command at a position, for people: the body, the microbatch, what it does and for which part of the model.
pub fn describe(job: &Job, rank: u64, at: Position) -> String {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let program = &job.programs[stage.program as usize];
    let Some(call) = calls(&stage.schedule, at.phase).get(at.call as usize) else {
        return format!("end of {}", at.phase.name());
    };
    let body = &program.bodies[call.body.index()];
    let place = format!("{} microbatch {} command {}", body.name, call.microbatch, at.command);
    match body.commands.get(at.command as usize) {
        None => place,
        Some(command) => format!("{place} ({}{})", action(job, program, rank, &command.action), From(job, command)),
    }
}

/// ` for layers.3.attn at models/gpt2.mdl:12:3` where known.
struct From<'a>(&'a Job, &'a Command);

impl fmt::Display for From<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = &self.1.origin;
        if !origin.scope.is_empty() {
            write!(f, " for {}", origin.scope)?;
        }
        if let Some(span) = origin.span {
            write!(f, " at {}", self.0.place(span))?;
        }
        Ok(())
    }
}

fn action(job: &Job, program: &Program, rank: u64, action: &Action) -> String {
    match action {
        Action::Launch { kernel, .. } => {
            let kernel = &job.kernels[kernel.index()];
            let ops = kernel.body.nodes.iter().filter(|n| !n.op.is_source()).map(|n| n.op.name());
            let mut named: Vec<&str> = vec![];
            for op in ops {
                if !named.contains(&op) {
                    named.push(op);
                }
            }
            format!("kernel of {}", named.join(", "))
        }
        Action::Collective { kind, group, dtype, count, .. } => {
            let members = program.groups[group.index()].members(&job.mesh, rank);
            format!("{} over {}", crate::comm::Terms { kind: *kind, dtype: *dtype, count: *count }, ranks(&members))
        }
        Action::Send { hops, channel, dtype, count, .. } => {
            format!("send of {count} {} to rank {}, {channel}", dtype.name(), peer(job, rank, *hops))
        }
        Action::Recv { hops, channel, dtype, count, .. } => {
            format!("recv of {count} {} from rank {}, {channel}", dtype.name(), peer(job, rank, *hops))
        }
        Action::Copy { dtype, count, src, dst } => {
            let [from, to] = [src, dst].map(|p| program.buffers[p.buffer.index()].arena.space().name());
            format!("copy of {count} {} from {from} to {to}", dtype.name())
        }
        Action::Fill { buffer, .. } => format!("fill of {}", program.buffers[buffer.index()].name),
        Action::Load { input, .. } => format!("load of input {}", job.inputs[*input as usize].name),
        Action::Report { report, .. } => format!("report of {}", job.reports[*report as usize]),
        Action::Limit { most, .. } => format!("limit of {most}"),
        Action::Record { event } => format!("record of event {event}"),
        Action::Wait { event } => format!("wait for event {event}"),
    }
}
