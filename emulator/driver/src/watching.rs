//! What pieces of work touch, and whether that is ordered with what others touch that are done.

use crate::exchange::Call;
use crate::objects::Recorded;
use crate::state::{Cuda, State, refuse};
use crate::tasks::{Op, TaskId};
use crate::touched::{AccessKind, Work};
use cudarc::driver::sys::CUresult;
use emulator::Ranges;
use std::collections::HashSet;

/// The number of clocks up to which none are dropped.
const KEPT: usize = 1 << 16;

/// Ranges of a GPU's memory and of the host's, read and written.
#[derive(Default)]
pub struct WorkAccesses {
    device: Vec<([u64; 2], AccessKind)>,
    host: Vec<([u64; 2], AccessKind)>,
}

fn range(start: u64, bytes: u64) -> [u64; 2] {
    [start, start + bytes]
}

impl WorkAccesses {
    pub fn of_kernel(ranges: &Ranges) -> WorkAccesses {
        let read = ranges.read.iter().map(|r| (*r, AccessKind::Read));
        WorkAccesses { device: read.chain(ranges.written.iter().map(|r| (*r, AccessKind::Write))).collect(), host: vec![] }
    }

    fn of_calls(calls: &[Call], members: u64) -> WorkAccesses {
        let both = calls.iter().flat_map(|call| {
            let [reads, writes] = call.bytes(members);
            [(range(call.from, reads), AccessKind::Read), (range(call.to, writes), AccessKind::Write)]
        });
        WorkAccesses { device: both.collect(), host: vec![] }
    }
}

impl State {
    /// The memory that a piece of work touches, unless it is a kernel, and the work's name.
    pub fn touches(&self, op: &Op) -> (WorkAccesses, String) {
        let copy = |to: u64, from: u64, bytes: u64| ((range(to, bytes), AccessKind::Write), (range(from, bytes), AccessKind::Read));
        match op {
            Op::Fill { address, element, count } => {
                let device = vec![(range(*address, element.len() as u64 * count), AccessKind::Write)];
                (WorkAccesses { device, host: vec![] }, "a fill".into())
            }
            Op::ToDevice { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (WorkAccesses { device: vec![to], host: vec![from] }, "a copy from the host".into())
            }
            Op::ToHost { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (WorkAccesses { device: vec![from], host: vec![to] }, "a copy to the host".into())
            }
            Op::Copy { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (WorkAccesses { device: vec![from, to], host: vec![] }, "a copy".into())
            }
            Op::Exchange { comm, calls } => {
                let members = self.comms.get(comm).map_or(0, |c| c.members.len() as u64);
                (WorkAccesses::of_calls(calls, members), "an exchange".into())
            }
            Op::Launch { function, .. } => (WorkAccesses::default(), self.functions.get(function).map_or_else(String::new, |f| f.name.clone())),
            Op::Call { .. } | Op::Join => (WorkAccesses::default(), String::new()),
        }
    }

    /// Notes the memory that a piece of work touches, and checks its order.
    pub fn watch(&mut self, task: TaskId, context: u64, touches: &WorkAccesses, name: &str) -> Cuda {
        let Some((moment, clock)) = self.clocks.of(task).filter(|_| self.settings.watches) else { return Ok(()) };
        let work = Work { moment, name: name.into() };
        let wrong = |why: String| refuse(CUresult::CUDA_ERROR_LAUNCH_FAILED, why);
        for (range, kind) in &touches.host {
            self.on_host.note(*range, *kind, &work, &clock).or_else(wrong)?;
        }
        let device = &mut self.context(context).touched;
        for (range, kind) in &touches.device {
            device.note(*range, *kind, &work, &clock).or_else(wrong)?;
        }
        Ok(())
    }

    /// Gives a new piece of work a clock, after others that may be done.
    pub fn clock(&mut self, task: TaskId, before: &[TaskId]) {
        if !self.settings.watches {
            return;
        }
        self.clocks.add(task, before);
        if self.clocks.len() < self.clocks_kept {
            return;
        }
        let streams = self.streams.values().flat_map(|s| s.tail.iter().copied());
        let events = self.events.values().flat_map(|e| match &e.last {
            Recorded::Tasks(tasks) => tasks.clone(),
            Recorded::Never | Recorded::Nodes(..) => vec![],
        });
        let last = self.execs.values().filter_map(|e| e.last);
        let under_way = self.tasks.iter().map(|(id, _)| id);
        let queues = self.comms.values().flat_map(|c| c.queue.iter().copied());
        let needed: HashSet<TaskId> = streams.chain(events).chain(last).chain(under_way).chain(queues).chain([task]).collect();
        self.clocks.retain(|t| needed.contains(&t));
        self.clocks_kept = KEPT.max(2 * self.clocks.len());
    }
}
