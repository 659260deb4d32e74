//! What a job's parameters and optimizer states are called in files.

use crate::executor::PersistentId;
use crate::host::sizes;
use ir::program::{Job, ParamShard, Role};
use std::collections::BTreeSet;

/// The parameters of a job, in its order.
pub(super) fn params(job: &Job) -> impl Iterator<Item = PersistentId> {
    (0..job.params.len() as u32).map(PersistentId::Param)
}

/// The optimizer states that some stage of a job keeps.
pub(super) fn states(job: &Job) -> BTreeSet<PersistentId> {
    let of_stage = |stage: &ir::program::Stage| {
        let program = &job.programs[stage.program as usize];
        let state = |p: ParamShard| match p.role {
            Role::State(k) => Some(PersistentId::State(stage.params[p.slot as usize], k)),
            Role::Weights | Role::Copy => None,
        };
        program.buffers.iter().flat_map(|b| program.parts(stage, &b.content)).filter_map(state).collect::<Vec<_>>()
    };
    job.stages.iter().flat_map(of_stage).collect()
}

/// The name and sizes of a tensor in files; tables have none.
pub(super) fn entry(job: &Job, held: PersistentId) -> Option<(String, Vec<u64>)> {
    let param = |p: u32| &job.params[p as usize];
    match held {
        PersistentId::Param(p) => Some((param(p).name.clone(), sizes(&param(p).dims))),
        PersistentId::State(p, k) => Some((format!("state{k}/{}", param(p).name), sizes(&param(p).dims))),
        PersistentId::Table(_) => None,
    }
}

/// What a parameter or optimizer state is called in files; tables are in none.
pub fn name(job: &Job, held: PersistentId) -> Option<String> {
    Some(entry(job, held)?.0)
}
