//! What pieces of work touch, and whether that is ordered with what others touch that are done.

use crate::exchange::Call;
use crate::objects::Recorded;
use crate::state::{Cuda, State, refuse};
use crate::tasks::{Op, TaskId};
use crate::touched::{Kind, Work};
use cudarc::driver::sys::CUresult;
use emulator::Ranges;
use std::collections::HashSet;

/// Clocks that are kept at least before those are sought that nothing can come after any more.
const KEPT: usize = 1 << 16;

/// Ranges of a GPU's memory and of the host's, read and written.
#[derive(Default)]
pub struct Touches {
    device: Vec<([u64; 2], Kind)>,
    host: Vec<([u64; 2], Kind)>,
}

fn range(start: u64, bytes: u64) -> [u64; 2] {
    [start, start + bytes]
}

impl Touches {
    pub fn of_kernel(ranges: &Ranges) -> Touches {
        let read = ranges.read.iter().map(|r| (*r, Kind::Read));
        Touches { device: read.chain(ranges.written.iter().map(|r| (*r, Kind::Write))).collect(), host: vec![] }
    }

    fn of_calls(calls: &[Call], members: u64) -> Touches {
        let both = calls.iter().flat_map(|call| {
            let [reads, writes] = call.bytes(members);
            [(range(call.from, reads), Kind::Read), (range(call.to, writes), Kind::Write)]
        });
        Touches { device: both.collect(), host: vec![] }
    }
}

impl State {
    /// What a piece of work touches, unless it is a kernel, and what it is called.
    pub fn touches(&self, op: &Op) -> (Touches, String) {
        let copy = |to: u64, from: u64, bytes: u64| ((range(to, bytes), Kind::Write), (range(from, bytes), Kind::Read));
        match op {
            Op::Fill { address, element, count } => {
                let device = vec![(range(*address, element.len() as u64 * count), Kind::Write)];
                (Touches { device, host: vec![] }, "a fill".into())
            }
            Op::ToDevice { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (Touches { device: vec![to], host: vec![from] }, "a copy from the host".into())
            }
            Op::ToHost { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (Touches { device: vec![from], host: vec![to] }, "a copy to the host".into())
            }
            Op::Copy { to, from, bytes } => {
                let (to, from) = copy(*to, *from, *bytes);
                (Touches { device: vec![from, to], host: vec![] }, "a copy".into())
            }
            Op::Exchange { comm, calls } => {
                let members = self.comms.get(comm).map_or(0, |c| c.members.len() as u64);
                (Touches::of_calls(calls, members), "an exchange".into())
            }
            Op::Launch { function, .. } => (Touches::default(), self.functions.get(function).map_or_else(String::new, |f| f.name.clone())),
            Op::Call { .. } | Op::Join => (Touches::default(), String::new()),
        }
    }

    /// Notes what a piece of work touches.
    pub fn watch(&mut self, task: TaskId, context: u64, touches: &Touches, name: &str) -> Cuda {
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

    /// A new piece of work after others; some may be done.
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
