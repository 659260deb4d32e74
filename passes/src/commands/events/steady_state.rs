//! Phases that are played again.
//!
//! What a phase needs of the one before shows in its first calls, which touch all that others touch, and in those of
//! bodies that are called now and then. What is between is alike whatever came before. So it is played once; later on
//! what it left behind is put in its place, as if it had been issued now: moments of the phase move with it, and
//! what it did not touch stays. Of knowledge about what was before, each stream has what it had at the end of the
//! first calls: less than it may have, so that a wait may be too many, and none too few. The verifier looks for races
//! by its own means (`verify/src/job/races.rs`).

use super::{Cells, Clock, IssueReplay, Issued, LastAccesses, STREAMS, join};
use ir::program::{BodyId, Call};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Further calls of a body, beyond one per slot, after which it has touched all its bytes.
const MORE: usize = 4;

/// How often bodies are called.
pub(super) fn counts(calls: &[Call]) -> BTreeMap<BodyId, usize> {
    let mut counts = BTreeMap::new();
    calls.iter().filter(|c| c.part == 0).for_each(|c| *counts.entry(c.body).or_default() += 1);
    counts
}

/// The calls between the first and the last ones. The first ones call every frequent body for each slot of all
/// stashes that it ever uses; the last ones begin with the next call of an infrequent body. `slots` are the stashes'
/// numbers of slots.
pub(super) fn middle(calls: &[Call], slots: &[u64]) -> Range<usize> {
    let enough = slots.iter().max().map_or(1, |n| *n as usize) + MORE;
    let slots: BTreeSet<u64> = slots.iter().copied().collect();
    let places = |call: &Call| slots.iter().map(|n| (*n, u64::from(call.microbatch) % n)).collect::<Vec<_>>();
    let often: BTreeSet<BodyId> = counts(calls).into_iter().filter(|(_, n)| *n > enough).map(|(body, _)| body).collect();
    let mut missing: BTreeMap<BodyId, (usize, BTreeSet<(u64, u64)>)> = often.iter().map(|body| (*body, (enough, BTreeSet::new()))).collect();
    for call in calls {
        if let Some((_, all)) = missing.get_mut(&call.body) {
            all.extend(places(call));
        }
    }
    let mut start = calls.len();
    for (k, call) in calls.iter().enumerate().filter(|(_, c)| c.part == 0) {
        // All parts of a call come before the next call of its body, so the count is decided here.
        if missing.get(&call.body).is_some_and(|(n, places)| *n == 0 && places.is_empty()) {
            missing.remove(&call.body);
        }
        if missing.is_empty() {
            start = k;
            break;
        }
        if let Some((n, all)) = missing.get_mut(&call.body) {
            *n = n.saturating_sub(1);
            places(call).iter().for_each(|place| _ = all.remove(place));
        }
    }
    let is_seldom = |call: &Call| !often.contains(&call.body);
    let end = calls[start..].iter().position(is_seldom).map_or(calls.len(), |k| start + k);
    start..end
}

/// The state after a phase: the cells that it touched, and what its commands and streams know. Moments before the
/// phase are 0, and it begins at moment 1 of each stream.
pub(super) struct PhaseState {
    cells: Cells,
    done: Vec<Clock>,
    clocks: [Clock; STREAMS],
}

/// A moment relative to a phase's begin; 0 before it.
fn since(moment: u32, begin: u32) -> u32 {
    moment.saturating_sub(begin)
}

/// The inverse of [`since`].
fn at(moment: u32, begin: u32) -> u32 {
    if moment == 0 { 0 } else { moment + begin }
}

fn each(clock: &Clock, begin: &Clock, f: fn(u32, u32) -> u32) -> Clock {
    std::array::from_fn(|t| f(clock[t], begin[t]))
}

fn moved((moment, site): Issued, begin: u32, f: fn(u32, u32) -> u32) -> Issued {
    match f(moment, begin) {
        0 => (0, 0),
        moment => (moment, site),
    }
}

impl LastAccesses {
    fn moved(&self, begin: &Clock, f: fn(u32, u32) -> u32) -> LastAccesses {
        let written = moved(self.written, begin[self.writer as usize], f);
        LastAccesses { written, writer: self.writer, read: std::array::from_fn(|t| moved(self.read[t], begin[t], f)) }
    }

    /// This cell's accesses, put over those that were there before.
    fn over(&self, before: &LastAccesses) -> LastAccesses {
        if self.written.0 > 0 {
            return *self;
        }
        let read = |t: usize| if self.read[t].0 > 0 { self.read[t] } else { before.read[t] };
        LastAccesses { read: std::array::from_fn(read), ..*before }
    }
}

impl IssueReplay<'_> {
    /// Each stream's own clock.
    pub(super) fn now(&self) -> Clock {
        std::array::from_fn(|s| self.clocks[s][s])
    }

    /// The state that the calls since then have left behind.
    pub(super) fn left(&self, begin: &Clock) -> PhaseState {
        PhaseState {
            cells: Cells(self.cells.0.iter().map(|(from, cell)| (*from, cell.moved(begin, since))).collect()),
            done: self.done.iter().map(|clock| each(clock, begin, since)).collect(),
            clocks: self.clocks.each_ref().map(|clock| each(clock, begin, since)),
        }
    }

    /// Advances the replay as if a phase that began then had run to the state `left`.
    pub(super) fn leave(&mut self, left: &PhaseState, begin: &Clock) {
        for (site, (done, theirs)) in self.done.iter_mut().zip(&left.done).enumerate() {
            let own = self.sites.commands[site].0;
            if theirs[own] == 0 {
                continue;
            }
            // The command was issued again in the skipped calls, when its stream knew no less than it does now.
            if at(theirs[own], begin[own]) > done[own] {
                *done = self.clocks[own];
            }
            join(done, &each(theirs, begin, at));
        }
        for (clock, theirs) in self.clocks.iter_mut().zip(&left.clocks) {
            join(clock, &each(theirs, begin, at));
        }
        let (before, after) = (&self.cells.0, &left.cells.0);
        let begins: BTreeSet<u64> = before.keys().chain(after.keys()).copied().collect();
        let (mut befores, mut afters) = (before.iter().peekable(), after.iter().peekable());
        let (mut was, mut is) = (LastAccesses::default(), LastAccesses::default());
        let cells = begins.into_iter().map(|from| {
            if let Some((_, cell)) = befores.next_if(|b| *b.0 == from) {
                was = *cell;
            }
            if let Some((_, cell)) = afters.next_if(|a| *a.0 == from) {
                is = cell.moved(begin, at);
            }
            (from, is.over(&was))
        });
        self.cells = Cells(cells.collect());
    }
}
