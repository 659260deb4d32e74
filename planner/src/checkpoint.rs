//! What a job saves, and reads when it goes on.

use ir::op::DType;
use ir::program::{Content, Job, Role};
use simulate::goodput::Checkpoint;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a checkpoint, all ranks' together: parameters, in 32 bits, and what the optimizer keeps of each. And
/// those that a rank of the fullest stage reads of it: all that it holds, whatever others hold too.
pub fn checkpoint(job: &Job) -> Checkpoint {
    let mut states: BTreeMap<u32, BTreeMap<u32, u64>> = BTreeMap::new();
    let mut read = 0;
    for stage in &job.stages {
        let program = &job.programs[stage.program as usize];
        let mut own = 0;
        // A copy and its weights are read once.
        let mut seen = BTreeSet::new();
        for buffer in program.buffers.iter().filter(|b| matches!(b.content, Content::Param { .. } | Content::State { .. })) {
            let mut is_new = false;
            for part in program.parts(stage, &buffer.content) {
                let param = stage.params[part.slot as usize];
                let state = if let Role::State(state) = part.role { Some(state) } else { None };
                is_new |= seen.insert((param, state));
                if let Some(state) = state {
                    states.entry(param).or_default().insert(state, buffer.dtype.bytes());
                }
            }
            let each = if matches!(buffer.content, Content::Param { .. }) { DType::F32 } else { buffer.dtype };
            own += if is_new { buffer.elements() * each.bytes() } else { 0 };
        }
        read = read.max(own);
    }
    let of_param = |(k, param): (u32, &ir::program::ParamEntry)| {
        let elements: u64 = param.dims.iter().map(|d| d.size).product();
        elements * (DType::F32.bytes() + states.get(&k).map_or(0, |s| s.values().sum::<u64>()))
    };
    Checkpoint { bytes: (0..).zip(&job.params).map(of_param).sum(), read }
}
