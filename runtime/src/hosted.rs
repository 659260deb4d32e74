//! The host's kernels of a rank, while its device computes.

use crate::cursor::Cursor;
use crate::device::Launches;
use crate::executor::{ExecError, Fault, Frame, Step};
use crate::shm::Shm;
use crate::streams::Events;
use ir::program::Action;

/// The stream of the host's kernels in a phase.
pub struct Hosted<'a> {
    pub frame: &'a Frame<'a>,
    pub cursor: Cursor,
    pub device: Box<dyn Launches + Send>,
    pub shm: Shm<'a>,
}

impl Hosted<'_> {
    /// Until its stream has come to the end of the phase, or the work has ended.
    ///
    /// # Errors
    /// What the device says.
    pub fn run(&mut self, events: &Events, step: &Step) -> Result<(), ExecError> {
        let (frame, awake) = (self.frame, self.shm.spins());
        let mut coords = frame.job.mesh.coords(frame.rank);
        while !events.ended() {
            let Some((call, command)) = self.cursor.next(frame.program, &frame.stage.schedule) else { break };
            match &command.action {
                Action::Wait { event } => {
                    let due = self.cursor.due(*event);
                    if events.reached(*event) < due {
                        events.wait(*event, due, awake, &self.shm);
                        continue;
                    }
                }
                Action::Record { event } => {
                    events.reach(*event);
                    events.ring();
                    self.shm.wake_own();
                }
                action => {
                    let (kernel, places, values) =
                        frame.launch(&mut coords, call, action, step).expect("invariant: the host's stream has launches alone");
                    let outcome = self.device.launch(kernel, &places, &values);
                    outcome.map_err(|e| frame.error(step, self.cursor.at, Fault::Device(e)))?;
                }
            }
            self.cursor.pass(command);
        }
        Ok(())
    }
}
