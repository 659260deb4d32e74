//! What a job says of a rank: its calls, its memory, its neighbours.

use crate::comm::Phase;
use ir::mesh::Axis;
use ir::program::{Arena, Call, CallSchedule, Job};

/// The calls of a phase.
pub fn calls(schedule: &CallSchedule, phase: Phase) -> &[Call] {
    match phase {
        Phase::Train => &schedule.train,
        Phase::Update => &schedule.update,
        Phase::Eval => &schedule.eval,
    }
}

/// Bytes of the arenas of a rank, in the order of [`Arena::ALL`] ([`CallSchedule::arena_bytes`]).
pub fn arena_bytes(job: &Job, rank: u64) -> [u64; Arena::ALL.len()] {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let program = &job.programs[stage.program as usize];
    stage.schedule.arena_bytes(program)
}

/// The rank `hops` stages on from a rank.
pub fn peer(job: &Job, rank: u64, hops: i64) -> u64 {
    let mut coords = job.mesh.coords(rank);
    for u in job.mesh.of(Axis::Pp) {
        coords[u.0 as usize] = coords[u.0 as usize].wrapping_add_signed(hops);
    }
    job.mesh.rank(&coords)
}
