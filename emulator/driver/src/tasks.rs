//! What has been issued and is not done: a partial order of tasks, of which as little is done as somebody waits for.

use crate::exchange::Call;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub type TaskId = u64;

/// An operation of a GPU. Addresses are in its memory, or in pinned memory of the host.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Launch {
        function: u64,
        grid: [u32; 3],
        threads: [u32; 3],
        shared: u32,
        parameters: Vec<u8>,
    },
    /// Repeats an element.
    Fill {
        address: u64,
        element: Vec<u8>,
        count: u64,
    },
    ToDevice {
        to: u64,
        from: u64,
        bytes: u64,
    },
    ToHost {
        to: u64,
        from: u64,
        bytes: u64,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    /// A function of the program, and what it gets.
    Call {
        function: u64,
        data: u64,
    },
    /// Exchanges that a communicator does at once.
    Exchange {
        comm: u64,
        calls: Arc<Vec<Call>>,
    },
    /// Stands for what comes before it.
    Join,
}

impl Op {
    /// The range of the host's memory that it touches.
    pub fn host(&self) -> Option<(u64, u64)> {
        match self {
            Op::ToDevice { from, bytes, .. } => Some((*from, *bytes)),
            Op::ToHost { to, bytes, .. } => Some((*to, *bytes)),
            Op::Launch { .. } | Op::Fill { .. } | Op::Copy { .. } | Op::Call { .. } | Op::Exchange { .. } | Op::Join => None,
        }
    }

    /// The communicator that it is of.
    pub fn comm(&self) -> Option<u64> {
        match self {
            Op::Exchange { comm, .. } => Some(*comm),
            Op::Launch { .. } | Op::Fill { .. } | Op::ToDevice { .. } | Op::ToHost { .. } | Op::Copy { .. } | Op::Call { .. } | Op::Join => None,
        }
    }
}

pub struct Task {
    pub context: u64,
    pub op: Op,
    /// The tasks before it that are not done.
    before: Vec<TaskId>,
    /// The tasks that wait for it.
    then: Vec<TaskId>,
    waits: usize,
    needed: bool,
}

/// Numbered as issued.
pub struct Tasks {
    all: BTreeMap<TaskId, Task>,
    /// Tasks with nothing before them that have not been begun.
    ready: BTreeSet<TaskId>,
    next: TaskId,
    /// The state of the random order; `None` if what was issued last goes first.
    random: Option<u64>,
}

impl Tasks {
    pub fn new(seed: u64) -> Tasks {
        Tasks { all: BTreeMap::new(), ready: BTreeSet::new(), next: 1, random: (seed != 0).then(|| seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1) }
    }

    pub fn add(&mut self, context: u64, op: Op, before: &[TaskId]) -> TaskId {
        let id = self.next;
        self.next += 1;
        let before: BTreeSet<TaskId> = before.iter().copied().filter(|b| self.all.contains_key(b)).collect();
        for b in &before {
            self.all.get_mut(b).expect("invariant: it is there").then.push(id);
        }
        if before.is_empty() {
            self.ready.insert(id);
        }
        let before: Vec<TaskId> = before.into_iter().collect();
        self.all.insert(id, Task { context, op, waits: before.len(), before, then: vec![], needed: false });
        id
    }

    pub fn get(&self, id: TaskId) -> Option<&Task> {
        self.all.get(&id)
    }

    pub fn is_done(&self, id: TaskId) -> bool {
        !self.all.contains_key(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        self.all.iter().map(|(id, t)| (*id, t))
    }

    /// Whether a task comes after another, which may be done.
    pub fn follows(&self, id: TaskId, other: TaskId) -> bool {
        let (mut seen, mut open) = (BTreeSet::new(), vec![id]);
        while let Some(id) = open.pop().filter(|_| !self.is_done(other)) {
            if id == other {
                return true;
            }
            // Tasks that come before have lower numbers.
            open.extend(self.all.get(&id).iter().flat_map(|t| &t.before).filter(|b| **b >= other && seen.insert(**b)));
        }
        self.is_done(other)
    }

    /// Notes that somebody waits for a task, and so for all tasks before it.
    pub fn need(&mut self, id: TaskId) {
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if let Some(task) = self.all.get_mut(&id).filter(|t| !t.needed) {
                task.needed = true;
                open.extend(&task.before);
            }
        }
    }

    /// Takes one of the tasks that are needed and ready.
    pub fn take(&mut self) -> Option<TaskId> {
        let can: Vec<TaskId> = self.ready.iter().copied().filter(|id| self.all[id].needed).collect();
        let last = can.len().checked_sub(1)?;
        let k = match &mut self.random {
            None => last,
            Some(x) => {
                *x ^= *x << 13;
                *x ^= *x >> 7;
                *x ^= *x << 17;
                (*x >> 8) as usize % can.len()
            }
        };
        self.ready.remove(&can[k]);
        Some(can[k])
    }

    pub fn finish(&mut self, id: TaskId) {
        self.ready.remove(&id);
        let Some(task) = self.all.remove(&id) else { return };
        for t in task.then {
            if let Some(after) = self.all.get_mut(&t) {
                after.waits -= 1;
                if after.waits == 0 {
                    self.ready.insert(t);
                }
            }
        }
    }

    /// Drops all tasks of a context.
    pub fn forget(&mut self, context: u64) {
        self.all.retain(|_, t| t.context != context);
        self.ready.retain(|id| self.all.contains_key(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, needed: TaskId) -> Vec<TaskId> {
        let mut tasks = Tasks::new(seed);
        // Task 2 comes after 1, task 4 after 2 and 3, and task 5 after none.
        for before in [vec![], vec![1], vec![], vec![2, 3], vec![]] {
            tasks.add(0, Op::Join, &before);
        }
        tasks.need(needed);
        let mut done = vec![];
        while let Some(id) = tasks.take() {
            tasks.finish(id);
            done.push(id);
        }
        done
    }

    #[test]
    fn only_what_is_before_what_is_needed_is_done_and_what_was_issued_last_goes_first() {
        assert_eq!(order(0, 4), [3, 1, 2, 4]);
        assert_eq!(order(0, 2), [1, 2]);
    }

    #[test]
    fn seeds_give_other_orders_of_what_nothing_orders() {
        let orders: BTreeSet<_> = (1..20).map(|seed| order(seed, 4)).collect();
        assert_eq!(orders, BTreeSet::from([vec![1, 2, 3, 4], vec![1, 3, 2, 4], vec![3, 1, 2, 4]]));
    }
}
