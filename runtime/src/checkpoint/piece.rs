//! What a rank owns of a checkpoint.

use crate::device::Location;
use crate::executor::{PersistentId, PersistentSlice, persistent_slices};
use crate::weights;
use ir::mesh::{Coords, SubAxis};
use ir::op::DType;
use ir::program::{Buffer, BufferId, Job, Role};
use std::collections::BTreeMap;
use std::ops::Range;

/// Elements of a tensor that one rank writes.
pub struct Piece<'a> {
    /// The parameter or optimizer state that the elements are of.
    pub held: PersistentId,
    /// Name in files.
    pub name: String,
    /// Of each dim of the tensor, its indices: first ones, and how many follow each other.
    pub spans: Vec<Vec<(u64, u64)>>,
    /// Which elements of the product of these, row-major.
    pub elements: Range<u64>,
    /// The first that the rank holds.
    first: u64,
    /// Dtype in memory.
    pub dtype: DType,
    cut: PersistentSlice<'a>,
    buffer: &'a Buffer,
    pub(super) id: BufferId,
    coords: Coords,
}

impl Piece<'_> {
    /// Where its elements are in the rank's memory, in order: places, and how many there follow each other.
    pub fn places(&self) -> Vec<(Location, u64)> {
        let mut runs: Vec<(u64, u64)> = vec![];
        let mut next = self.first;
        self.cut.part(&self.coords).runs(|run| {
            if run.global.is_none() {
                return;
            }
            let (from, to) = (next.max(self.elements.start), (next + run.len).min(self.elements.end));
            let local = run.local + from.saturating_sub(next);
            next += run.len;
            match runs.last_mut() {
                _ if from >= to => {}
                Some((begin, len)) if *begin + *len == local => *len += to - from,
                _ => runs.push((local, to - from)),
            }
        });
        let at = |local| Location { arena: self.buffer.arena, byte: self.buffer.offset + local * self.buffer.dtype.bytes() };
        runs.into_iter().map(|(local, len)| (at(local), len)).collect()
    }
}

/// The rank that writes each part of a job's parameters and optimizer states.
pub struct Owners<'a> {
    job: &'a Job,
    /// The first stage that holds a tensor: its ranks write it.
    stages: BTreeMap<PersistentId, usize>,
    /// Least elements for each of the ranks that hold the same.
    least: u64,
}

/// Elements that are worth a piece of their own.
const LEAST: u64 = 4096;

impl<'a> Owners<'a> {
    /// For a job, where ranks share out what is large enough to be worth a piece of its own.
    pub fn new(job: &'a Job) -> Owners<'a> {
        Owners::sharing(job, LEAST)
    }

    /// Owners with another number of elements from which on ranks that hold the same share them out.
    pub fn sharing(job: &'a Job, least: u64) -> Owners<'a> {
        let mut stages = BTreeMap::new();
        for (k, stage) in job.stages.iter().enumerate() {
            let program = &job.programs[stage.program as usize];
            for cut in program.buffers.iter().flat_map(|b| persistent_slices(job, program, stage, &b.content)).filter(is_saved) {
                stages.entry(cut.held).or_insert(k);
            }
        }
        Owners { job, stages, least }
    }

    /// The job, for a catalog of all its ranks.
    pub fn job(&self) -> &'a Job {
        self.job
    }

    /// What a rank writes: all that it holds, but for what an earlier stage holds too. Ranks of its stage that
    /// hold the same share it out, and if it is little the first of them writes it.
    pub fn pieces(&self, rank: u64) -> Vec<Piece<'a>> {
        let job = self.job;
        let (coords, at) = (job.mesh.coords(rank), job.mesh.stage(rank) as usize);
        let stage = &job.stages[at];
        let program = &job.programs[stage.program as usize];
        let within: Vec<SubAxis> = job.mesh.ids().filter(|id| job.mesh.subs[id.0 as usize].axis.within_stage()).collect();
        let mut out = vec![];
        for (id, buffer) in (0..).map(BufferId).zip(&program.buffers) {
            for cut in persistent_slices(job, program, stage, &buffer.content).into_iter().filter(is_saved) {
                let axes = cut.axes();
                if self.stages[&cut.held] != at {
                    continue;
                }
                let part = cut.part(&coords);
                let (Some(spans), held) = (part.spans(), part.held()) else { continue };
                // This numbers the ranks that hold the same elements, along the axes that do not cut them.
                let (mut seat, mut of) = (0, 1);
                for id in within.iter().filter(|id| !axes.contains(id)) {
                    let size = job.mesh.subs[id.0 as usize].size;
                    (seat, of) = (seat * size + coords[id.0 as usize], of * size);
                }
                let elements = share(&held, seat, of, self.least);
                let first = held.start;
                let Some(name) = weights::name(job, cut.held).filter(|_| !elements.is_empty()) else { continue };
                out.push(Piece { held: cut.held, name, spans, elements, first, dtype: buffer.dtype, cut, buffer, id, coords: coords.clone() });
            }
        }
        out
    }
}

/// What one of so many that hold the same elements writes of them.
fn share(held: &Range<u64>, seat: u64, of: u64, least: u64) -> Range<u64> {
    let elements = held.end - held.start;
    let shares = (elements / least.max(1)).clamp(1, of);
    let each = elements.div_ceil(shares);
    let from = |seat: u64| held.start + (seat * each).min(elements);
    if seat < shares { from(seat)..from(seat + 1) } else { held.end..held.end }
}

fn is_saved(cut: &PersistentSlice) -> bool {
    !matches!(cut.held, PersistentId::Table(_)) && cut.role != Role::Copy
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn ranks_that_hold_the_same_share_it_out_unless_it_is_little() {
        let shares = |elements: u64, least| [0, 1, 2].map(|seat| share(&(5..5 + elements), seat, 3, least));
        assert_eq!(shares(10, 1), [5..9, 9..13, 13..15]);
        assert_eq!(shares(10, 4), [5..10, 10..15, 15..15]);
        assert_eq!(shares(10, 40), [5..15, 15..15, 15..15]);
        assert_eq!(shares(2, 1), [5..6, 6..7, 7..7]);
    }
}
