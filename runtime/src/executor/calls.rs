//! What a job says of a rank: its memory and its neighbours.

use ir::mesh::Axis;
use ir::program::{Arena, Job};

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
