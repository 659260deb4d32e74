//! Who last touched what of memory, by ranges, so that work of which nothing says the order is found where it
//! touches the same bytes, and some of it writes.

use crate::clocks::{Clock, Moment};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A piece of work that has been done, and what it is called.
#[derive(Clone, Debug)]
pub struct Work {
    pub moment: Moment,
    pub name: Arc<str>,
}

impl PartialEq for Work {
    fn eq(&self, other: &Work) -> bool {
        self.moment == other.moment
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    Read,
    Write,
}

#[derive(Clone, Debug, PartialEq)]
struct TouchedRange {
    end: u64,
    written: Option<Work>,
    /// The work that has read it since.
    read: Vec<Work>,
}

/// The last accesses to ranges of memory, by first address. Ranges do not overlap.
#[derive(Default)]
pub struct AccessMap(BTreeMap<u64, TouchedRange>);

impl AccessMap {
    /// Splits the range around an address there.
    fn cut(&mut self, at: u64) {
        if let Some((_, part)) = self.0.range_mut(..at).next_back().filter(|(_, p)| p.end > at) {
            let behind = part.clone();
            part.end = at;
            self.0.insert(at, behind);
        }
    }

    /// Notes what a piece of work does to a range, whose clock this is.
    ///
    /// # Errors
    /// Where, and what, nothing orders with it.
    pub fn note(&mut self, [start, end]: [u64; 2], kind: AccessKind, work: &Work, clock: &Clock) -> Result<(), String> {
        if start >= end {
            return Ok(());
        }
        self.cut(start);
        self.cut(end);
        for (at, part) in self.0.range(start..end) {
            let readers = part.read.iter().filter(|_| kind == AccessKind::Write).map(|r| (r, "read"));
            let mut others = part.written.iter().map(|w| (w, "written")).chain(readers);
            if let Some((other, done)) = others.find(|(o, _)| !o.moment.is_before(clock)) {
                let does = if kind == AccessKind::Write { "writes" } else { "reads" };
                return Err(format!(
                    "race between streams: {} {does} {at:#x} to {:#x}, which is {done} by {}, and no event, stream or wait of the host orders them",
                    work.name, part.end, other.name
                ));
            }
        }
        match kind {
            AccessKind::Write => {
                let old: Vec<u64> = self.0.range(start..end).map(|(at, _)| *at).collect();
                old.iter().for_each(|at| drop(self.0.remove(at)));
                self.0.insert(start, TouchedRange { end, written: Some(work.clone()), read: vec![] });
            }
            AccessKind::Read => self.read(start, end, work, clock),
        }
        self.join(start, end);
        Ok(())
    }

    fn read(&mut self, start: u64, end: u64, work: &Work, clock: &Clock) {
        let (mut at, mut gaps) = (start, vec![]);
        for (from, part) in self.0.range_mut(start..end) {
            if at < *from {
                gaps.push((at, *from));
            }
            at = part.end;
            // Later work that is ordered after this reader is also ordered after the readers before it.
            part.read.retain(|r| !r.moment.is_before(clock));
            part.read.push(work.clone());
        }
        if at < end {
            gaps.push((at, end));
        }
        self.0.extend(gaps.into_iter().map(|(from, end)| (from, TouchedRange { end, written: None, read: vec![work.clone()] })));
    }

    /// Joins equal neighbours.
    fn join(&mut self, start: u64, end: u64) {
        let before = self.0.range(..start).next_back().map_or(start, |(at, _)| *at);
        let mut all = self.0.range(before..=end).map(|(at, _)| *at).collect::<Vec<_>>().into_iter();
        let Some(mut last) = all.next() else { return };
        for at in all {
            let (own, next) = (&self.0[&last], &self.0[&at]);
            if own.end == at && (&own.written, &own.read) == (&next.written, &next.read) {
                let end = next.end;
                self.0.remove(&at);
                self.0.get_mut(&last).expect("invariant: it is there").end = end;
            } else {
                last = at;
            }
        }
    }

    /// Forgets a range, which is given back.
    pub fn forget(&mut self, start: u64, end: u64) {
        self.cut(start);
        self.cut(end);
        self.0.retain(|at, _| !(start..end).contains(at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clocks::Clocks;

    #[test]
    fn ranges_that_overlap_are_ordered() {
        let mut clocks = Clocks::default();
        // Tasks 2 and 3 come after 1, and task 4 after 2.
        for (task, before) in [(1, vec![]), (2, vec![1]), (3, vec![1]), (4, vec![2])] {
            clocks.add(task, &before);
        }
        let mut touched = AccessMap::default();
        let mut note = |task, range, kind| {
            let (moment, clock) = clocks.of(task).expect("it is there");
            touched.note(range, kind, &Work { moment, name: format!("work {task}").into() }, &clock)
        };
        assert_eq!(note(1, [0, 100], AccessKind::Write), Ok(()));
        assert_eq!(note(2, [10, 20], AccessKind::Write), Ok(()));
        assert_eq!(note(3, [20, 30], AccessKind::Read), Ok(()));
        assert_eq!(note(4, [0, 20], AccessKind::Read), Ok(()));
        assert_eq!(note(4, [90, 120], AccessKind::Read), Ok(()));
        assert_eq!(note(3, [100, 110], AccessKind::Read), Ok(()), "all may read");
        let error = note(3, [0, 25], AccessKind::Read).expect_err("3 is not after 2");
        assert!(error.contains("work 3 reads 0xa to 0x14, which is written by work 2"), "{error}");
        let error = note(4, [25, 26], AccessKind::Write).expect_err("4 is not after 3");
        assert!(error.contains("work 4 writes 0x19 to 0x1a, which is read by work 3"), "{error}");
        assert_eq!(note(4, [30, 40], AccessKind::Write), Ok(()));
        touched.forget(0, 200);
        assert!(touched.0.is_empty());
    }
}
