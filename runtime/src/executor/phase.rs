//! A rank from the begin of a phase to its end: how its streams take turns, or threads.

use super::{Advance, ExecError, Fault, Rank, Step};
use crate::comm::Communicator;
use crate::cursor::Cursor;
use crate::device::Device;
use crate::hosted::Hosted;
use crate::shm::Shm;
use crate::streams::{self, Communication, Compute, PhaseEnd};
use ir::program::ProgramPhase;
use ir::program::{Action, Stream};

impl<D: Device> Rank<'_, D> {
    /// Goes on to a phase, each stream from the end of the one before, and forgets the reports of that.
    pub fn begin(&mut self, phase: ProgramPhase) {
        self.cursors.iter_mut().for_each(|c| c.begin(phase));
        self.reports.fill(None);
        self.decided.clear();
        self.further = [0; 2];
        if let Some(fabric) = self.device.fabric() {
            fabric.phase(self.frame.stage.schedule.sends(phase));
        }
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

    /// Whether the streams of kernels, of the device and of the host, are through what was begun: the next step has
    /// other scalars.
    pub fn is_computed(&mut self) -> bool {
        let kernels = |c: &&mut Cursor| matches!(c.stream(), None | Some(Stream::Compute | Stream::Host));
        let mut all = self.cursors.iter_mut().filter(kernels);
        all.all(|c| c.next(self.frame.program, &self.frame.stage.schedule).is_none())
    }

    /// Runs a phase until compute is through, communication on a thread of its own where the device's memory can be
    /// shared. Some of that may be left for the next phase, on which compute of this one does not depend.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn phase(&mut self, phase: ProgramPhase, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        self.begin(phase);
        self.run(PhaseEnd::Computed, step, shm)
    }

    /// Brings all communication to its end: then what the rank holds is there, and no other rank waits for it.
    ///
    /// # Errors
    /// What the device or the communicator say.
    pub fn settle(&mut self, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        self.run(PhaseEnd::Settled, step, shm)
    }

    fn run(&mut self, until: PhaseEnd, step: &Step, shm: &mut Shm) -> Result<(), ExecError> {
        let Some(handle) = self.device.second_handle().filter(|_| self.cursors.len() > 1) else {
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
        let communication = Communication { frame: &frame, cursors, memory: handle.memory, shm: shm.twin() };
        let cursors = streams::run((communication, host), handle.begin, &events, until, step, shm, |shm| {
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
    pub(super) fn done(&mut self, step: &Step) -> Result<(), ExecError> {
        self.device.synchronize().map_err(|e| self.frame.error(step, self.at, e.into()))
    }

    /// The event for which the first stream waits.
    fn awaited(&self) -> Compute {
        let cursor = &self.cursors[0];
        let call = self.frame.stage.schedule.calls(cursor.at.phase)[cursor.at.call as usize];
        match self.frame.program.bodies[call.body.index()].commands[cursor.at.command as usize].action {
            Action::Wait { event } => Compute::Waits(event, cursor.due(event)),
            _ => Compute::Moved,
        }
    }
}
