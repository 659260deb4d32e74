//! Runs one rank's program, command by command, over a device and a communicator.
//!
//! In list order, commands run as they are issued, whatever their stream: that order is one of those which streams
//! and events allow, so `Record` and `Wait` hold nothing up. Else each stream has a [`Cursor`] of its own, and an
//! event is the number of times that it was reached; who runs which stream's next command is the caller's choice
//! ([`Rank::turn`]).

mod calls;
mod describe;
mod frame;
mod persistent;
mod phase;
mod step;
mod transfer;

pub use calls::{arena_bytes, peer};
pub use describe::describe;
use describe::place_of_op;
pub use frame::Frame;
pub use persistent::{PersistentId, Sum};
pub(crate) use persistent::{PersistentSlice, persistent_slices};
pub use step::{CommandOrder, ExecError, Fault, Step, StepInputs};
pub use transfer::{Copied, Transfer};

use crate::comm::{Communicator, Position, Progress};
use crate::cursor::{self, Cursor};
use crate::device::Device;
use crate::first_nonfinite::WatchedLaunch;
use crate::host::TensorSlice;
use crate::profile::{Clock, Ran};
use crate::streams::Events;
use ir::mesh::Coords;
use ir::op::DType;
use ir::program::{Action, BodyId, BufferAddress, Call, Command, Job, Space};
use persistent::scatter;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, hash_map};
use std::sync::Arc;

/// The first kernel that made a number that is not finite from operands that were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blame {
    /// Where the kernel's launch is.
    pub position: Position,
    /// [`describe`]d.
    pub command: String,
    /// The op of the kernel that did it, if it was found.
    pub op: Option<String>,
}

/// How far [`Rank::advance`] or [`Rank::turn`] came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advance {
    /// Nothing is left of the phases that were begun.
    Finished,
    /// A command is done.
    Moved,
    /// Waits for these ranks; for another stream if there are none.
    Blocked(Vec<u64>),
}

/// One rank and its device.
pub struct Rank<'a, D> {
    frame: Arc<Frame<'a>>,
    /// The microbatch's coordinate is that of the current call.
    coords: Coords,
    /// What holds the rank's arenas and runs its kernels.
    pub device: D,
    cursors: Vec<Cursor>,
    events: Arc<Events>,
    at: Position,
    reports: Vec<Option<f64>>,
    /// By body, the microbatch for which it was called last, and by which bools its commands of the first stream are
    /// left out, or not: on a device, to read one is to wait.
    decided: HashMap<BodyId, (u32, HashMap<BufferAddress, bool>)>,
    /// How many such bools of a phase were true, and how many there were.
    further: [u64; 2],
    /// Looks for the first operand that is not finite, if some.
    watch: Option<Option<Blame>>,
    scratch: Vec<f64>,
}

impl<'a, D: Device> Rank<'a, D> {
    /// `job` has been checked ([`crate::check`]) and `rank` is in its mesh; the device's arenas have the sizes of
    /// [`arena_bytes`].
    pub fn new(job: &'a Job, rank: u64, device: D, order: CommandOrder) -> Self {
        let frame = Arc::new(Frame::new(job, rank));
        let program = frame.program;
        let streams = match order {
            CommandOrder::List => vec![None],
            CommandOrder::Streams => cursor::streams(program).into_iter().map(Some).collect(),
        };
        Rank {
            frame,
            coords: job.mesh.coords(rank),
            device,
            cursors: streams.into_iter().map(|s| Cursor::new(program, s)).collect(),
            events: Arc::new(Events::new(cursor::events(program))),
            at: Position::default(),
            reports: vec![None; job.reports.len()],
            decided: Default::default(),
            further: [0; 2],
            watch: None,
            scratch: vec![],
        }
    }

    /// The rank's number in the world, from 0.
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

    /// Of the last phase: passes after the first that rows of experts were computed in, and how many there might have
    /// been, over all calls.
    pub fn further_passes(&self) -> [u64; 2] {
        self.further
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

    /// From now on, what each stream does is timed by a clock. There is room for so many steps at first.
    pub fn profile(&mut self, steps: usize, clock: Clock) {
        let (program, schedule) = (self.frame.program, &self.frame.stage.schedule);
        for cursor in &mut self.cursors {
            let (stream, calls) = (cursor.stream(), schedule.train.iter().chain(&schedule.update));
            let commands = calls.flat_map(|c| program.commands(c));
            let of_stream = commands.filter(|(_, c)| stream.is_none_or(|s| s == c.stream)).count();
            cursor.watch(of_stream * steps, clock);
        }
    }

    /// Ends [`Rank::profile`]; gives the commands of each stream in its order.
    pub fn profiled(&mut self) -> Vec<Ran> {
        self.cursors.iter_mut().flat_map(Cursor::watched).collect()
    }

    /// Runs the next command of a stream, if it can run now.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn turn(&mut self, stream: usize, step: &Step, comm: &mut dyn Communicator) -> Result<Advance, ExecError> {
        let Some((call, command)) = self.cursors[stream].next(self.frame.program, &self.frame.stage.schedule) else { return Ok(Advance::Finished) };
        let cursor = &self.cursors[stream];
        let first_try = std::mem::replace(&mut self.at, cursor.at) != cursor.at;
        if first_try && cursor.stream().is_none() {
            for (at, bytes) in self.frame.fresh(call, self.at.command as usize) {
                self.device.discard(at, bytes);
            }
        }
        if let (Action::Wait { event }, Some(_)) = (&command.action, cursor.stream())
            && self.events.reached(*event) < cursor.due(*event)
        {
            return Ok(Advance::Blocked(vec![]));
        }
        comm.publish(step.number, self.at);
        if self.is_left_out(stream, call, command) {
            if let (Action::Collective { .. }, Some(fabric)) = (&command.action, self.device.fabric()) {
                fabric.leave_out();
            }
            self.cursors[stream].leave_out(command);
            return Ok(Advance::Moved);
        }
        match self.execute(call, command, step, comm).map_err(|fault| self.frame.error(step, self.at, fault))? {
            Progress::Done => {
                // A device that runs commands later would have no times for them, so it finishes each one here.
                if self.cursors[stream].is_watched() {
                    self.done(step)?;
                }
                self.cursors[stream].pass(command);
                Ok(Advance::Moved)
            }
            Progress::Blocked(on) => Ok(Advance::Blocked(on)),
        }
    }

    /// Whether a command of a stream is left out. The first one's, which has all kernels, reads each bool of a call
    /// once, and counts them.
    fn is_left_out(&mut self, stream: usize, call: &Call, command: &Command) -> bool {
        let Some(place) = command.predicate.as_ref().filter(|_| stream == 0) else {
            return self.frame.is_left_out(&mut self.coords, call, command, &self.device);
        };
        let (microbatch, decided) = self.decided.entry(call.body).or_default();
        if std::mem::replace(microbatch, call.microbatch) != call.microbatch {
            decided.clear();
        }
        match decided.entry(place.clone()) {
            hash_map::Entry::Occupied(known) => *known.get(),
            hash_map::Entry::Vacant(new) => {
                let left_out = self.frame.is_left_out(&mut self.coords, call, command, &self.device);
                self.further = [self.further[0] + u64::from(!left_out), self.further[1] + 1];
                *new.insert(left_out)
            }
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
                if job.kernels[kernel.index()].on == Space::Host
                    && let Some(fabric) = self.device.fabric()
                {
                    fabric.run_on_host(command.stream, *kernel, &places, &values);
                    return Ok(Progress::Done);
                }
                let watched = match self.watch {
                    Some(None) => WatchedLaunch::before(&self.device, &job.kernels[kernel.index()], &places, &values),
                    Some(Some(_)) | None => None,
                };
                self.device.launch(*kernel, &places, &values)?;
                if let Some(op) = watched.and_then(|s| s.after(&self.device, &|op| place_of_op(job, *kernel, command, op))) {
                    self.watch = Some(Some(Blame { position: self.at, command: describe(job, self.frame.rank, self.at), op }));
                }
            }
            Action::Fill { buffer, value } => {
                let filled = &self.frame.program.buffers[buffer.index()];
                self.device.fill(self.frame.start(call, *buffer), filled.dtype, filled.elements(), value.0);
            }
            Action::Load { input, dst, index } => {
                let part = TensorSlice::new(&job.inputs[*input as usize].dims, index, &self.coords);
                let at = self.frame.start(call, *dst);
                let dtype = self.frame.program.buffers[dst.index()].dtype;
                scatter(&mut self.device, &part, step.batch.input(*input), at, dtype, &mut self.scratch);
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
                    return Err(Fault::Limit { found, most: *most, reason: command.reason.clone() });
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
            // Where streams are not the device's, the event was checked before.
            Action::Wait { event } => {
                if let Some(fabric) = self.device.fabric() {
                    fabric.wait(command.stream, *event);
                }
            }
            Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. } | Action::Copy { .. } => unreachable!("invariant: a transfer"),
        }
        Ok(Progress::Done)
    }
}

/// Reports by name. Terms of the loss that have the same name add up, except that `loss` and `grad_norm` are the
/// whole ones, which come first.
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
