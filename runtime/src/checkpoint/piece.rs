//! What a rank owns of a checkpoint.

use crate::device::Location;
use crate::executor::{Cut, Held, cuts};
use crate::weights;
use ir::mesh::{Coords, SubAxis};
use ir::op::DType;
use ir::program::{Buffer, BufferId, Job, Role};
use std::collections::BTreeMap;
use std::ops::Range;

/// Elements of a tensor that one rank writes.
pub struct Piece<'a> {
    pub held: Held,
    /// In files.
    pub name: String,
    /// Of each dim of the tensor, its indices: first ones, and how many follow each other.
    pub spans: Vec<Vec<(u64, u64)>>,
    /// Which elements of the product of these, row-major.
    pub elements: Range<u64>,
    /// In memory.
    pub dtype: DType,
    cut: Cut<'a>,
    buffer: &'a Buffer,
    pub(super) id: BufferId,
    coords: Coords,
}

impl Piece<'_> {
    /// Where its elements are in the rank's memory, in order: places, and how many there follow each other.
    pub fn places(&self) -> Vec<(Location, u64)> {
        let mut runs: Vec<(u64, u64)> = vec![];
        self.cut.part(&self.coords).runs(|run| match (run.global, runs.last_mut()) {
            (None, _) => {}
            (Some(_), Some((local, len))) if *local + *len == run.local => *len += run.len,
            (Some(_), _) => runs.push((run.local, run.len)),
        });
        let at = |local| Location { arena: self.buffer.arena, byte: self.buffer.offset + local * self.buffer.dtype.bytes() };
        runs.into_iter().map(|(local, len)| (at(local), len)).collect()
    }
}

/// Who writes what of a job's parameters and optimizer states.
pub struct Owners<'a> {
    job: &'a Job,
    /// The first stage that holds a tensor: its ranks write it.
    stages: BTreeMap<Held, usize>,
}

impl<'a> Owners<'a> {
    pub fn new(job: &'a Job) -> Owners<'a> {
        let mut stages = BTreeMap::new();
        for (k, stage) in job.stages.iter().enumerate() {
            let program = &job.programs[stage.program as usize];
            for cut in program.buffers.iter().flat_map(|b| cuts(job, program, stage, &b.content)).filter(is_saved) {
                stages.entry(cut.held).or_insert(k);
            }
        }
        Owners { job, stages }
    }

    /// What a rank writes: all that it holds, but for what an earlier stage holds too, or a rank of its stage whose coordinates are smaller where the part does not depend
    /// on them.
    pub fn pieces(&self, rank: u64) -> Vec<Piece<'a>> {
        let job = self.job;
        let (coords, at) = (job.mesh.coords(rank), job.mesh.stage(rank) as usize);
        let stage = &job.stages[at];
        let program = &job.programs[stage.program as usize];
        let within: Vec<SubAxis> = job.mesh.ids().filter(|id| job.mesh.subs[id.0 as usize].axis.within_stage()).collect();
        let mut out = vec![];
        for (id, buffer) in (0..).map(BufferId).zip(&program.buffers) {
            for cut in cuts(job, program, stage, &buffer.content).into_iter().filter(is_saved) {
                let axes = cut.axes();
                let is_first = within.iter().all(|id| axes.contains(id) || coords[id.0 as usize] == 0);
                if self.stages[&cut.held] != at || !is_first {
                    continue;
                }
                let part = cut.part(&coords);
                let (Some(spans), elements) = (part.spans(), part.held()) else { continue };
                let Some(name) = weights::name(job, cut.held).filter(|_| !elements.is_empty()) else { continue };
                out.push(Piece { held: cut.held, name, spans, elements, dtype: buffer.dtype, cut, buffer, id, coords: coords.clone() });
            }
        }
        out
    }
}

fn is_saved(cut: &Cut) -> bool {
    !matches!(cut.held, Held::Table(_)) && cut.role != Role::Copy
}
