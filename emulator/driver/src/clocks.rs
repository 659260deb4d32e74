//! What of the work that was issued is ordered: a clock for each piece, over chains of pieces that follow one
//! another.
//!
//! A piece extends a chain whose end it comes after, so there are about as many chains as streams. What the host has
//! waited for comes before all that it issues later.

use crate::tasks::TaskId;
use std::collections::HashMap;
use std::sync::Arc;

/// For each chain, the number up to which all its pieces are over.
pub type Clock = Vec<u32>;

/// A piece of work: its chain, and its number in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    chain: usize,
    number: u32,
}

impl Moment {
    pub fn is_before(self, clock: &Clock) -> bool {
        clock.get(self.chain).is_some_and(|n| *n >= self.number)
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.resize(clock.len().max(other.len()), 0);
    clock.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
}

#[derive(Default)]
pub struct Clocks {
    /// The last number of each chain.
    ends: Vec<u32>,
    of: HashMap<TaskId, (Moment, Arc<Clock>)>,
    host: Clock,
}

impl Clocks {
    /// Adds a piece after others, and after what the host has waited for.
    pub fn add(&mut self, task: TaskId, before: &[TaskId]) {
        let mut clock = self.host.clone();
        before.iter().filter_map(|b| self.of.get(b)).for_each(|(_, c)| join(&mut clock, c));
        clock.resize(self.ends.len(), 0);
        let chain = self.ends.iter().zip(&clock).position(|(end, known)| end == known).unwrap_or_else(|| {
            self.ends.push(0);
            clock.push(0);
            self.ends.len() - 1
        });
        self.ends[chain] += 1;
        clock[chain] = self.ends[chain];
        self.of.insert(task, (Moment { chain, number: self.ends[chain] }, Arc::new(clock)));
    }

    pub fn of(&self, task: TaskId) -> Option<(Moment, Arc<Clock>)> {
        self.of.get(&task).cloned()
    }

    /// Notes that the host has waited for a piece, or was told of it.
    pub fn known_to_host(&mut self, task: TaskId) {
        if let Some((_, clock)) = self.of.get(&task) {
            join(&mut self.host, clock);
        }
    }

    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Forgets pieces that nothing can come after any more.
    pub fn retain(&mut self, keep: impl Fn(TaskId) -> bool) {
        self.of.retain(|task, _| keep(*task));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_ordered_by_what_they_come_after_and_by_the_host() {
        let mut clocks = Clocks::default();
        // There are two streams, and the second one waits for the first one once.
        for (task, before) in [(1, vec![]), (2, vec![]), (3, vec![1]), (4, vec![2, 3]), (5, vec![3])] {
            clocks.add(task, &before);
        }
        let ordered = |c: &Clocks, a, b| c.of(a).expect("it is there").0.is_before(&c.of(b).expect("it is there").1);
        assert!(ordered(&clocks, 1, 3) && ordered(&clocks, 1, 4) && ordered(&clocks, 2, 4) && ordered(&clocks, 1, 5));
        assert!(!ordered(&clocks, 1, 2) && !ordered(&clocks, 2, 1) && !ordered(&clocks, 2, 5) && !ordered(&clocks, 4, 5));
        clocks.add(6, &[]);
        assert!(!ordered(&clocks, 4, 6));
        clocks.known_to_host(4);
        clocks.add(7, &[]);
        assert!(ordered(&clocks, 4, 7) && ordered(&clocks, 1, 7) && !ordered(&clocks, 5, 7));
        assert!(clocks.ends.len() <= 4, "chains are extended");
    }
}
