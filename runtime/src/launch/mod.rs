//! Starts the ranks of an artifact as processes of this machine, watches them, and gathers what they say; or takes
//! part in a world that another launcher has started ([`joined`]).
//!
//! Nothing of a run has a name that could stay behind: memory is an inherited anonymous file, ranks die with the
//! process that started them, the saved file has no name before it is complete. A dead or stuck rank ends the run
//! within a few seconds ([`RunOptions::patience`]), with who waits for whom.

mod checkpoints;
mod control;
mod error;
mod first_step;
#[doc(hidden)]
pub mod fuzzed;
mod gather;
mod joined;
mod lead;
mod metrics;
mod options;
mod orders;
mod pace;
mod placement;
mod plan;
mod process;
mod progress;
mod ranks;
mod replicas;
mod save;
mod sensible;
mod shielded;
mod spike;
mod stop;

pub use error::{RunError, RunFailure};
pub use first_step::{NARROW, WIDE, first_step};
pub(crate) use first_step::{is_beyond, spread};
pub use options::{MEETING, PATIENCE, RunOptions};
pub use plan::host;
pub use progress::{Note, RankTimes, RunEvent, Saved, StepMetrics, Summary};
pub use save::{Existing, replaceable};
pub use stop::{RunEnd, StopRequest};

use crate::artifact::Artifact;
use crate::protocol::{self, Orders};
use crate::shm::{Segment, SegmentLayout, StatusBoard};
use lead::{Limits, RunOutputs, conduct};
use orders::{nccl_id, orders};
use ranks::Ranks;
use std::sync::mpsc;

/// Runs an artifact: all ranks on this machine, or one rank of a world. `observe` is told of every step, in a world
/// by rank 0 alone, and of what else there is to know.
///
/// # Errors
/// If options, data or weights are wrong, before any rank starts; then whatever ends a rank, on all ranks of a world.
/// No process is left in any case.
pub fn run(artifact: &Artifact, options: &RunOptions, observe: &mut dyn FnMut(RunEvent)) -> Result<Summary, RunError> {
    let orders = orders(artifact, options);
    if let Some(world) = &options.world {
        world.has(artifact.manifest.ranks)?;
        return joined::run(artifact, options, world, orders, observe);
    }
    let orders = orders?;
    let nccl = nccl_id(&orders, options)?;
    let world = artifact.job.mesh.world();
    let limits = Limits::new(&orders, world, 0..world);
    let lead = RunOutputs::new(artifact, options, Orders { nccl, ..orders })?;
    let (job, said) = (&artifact.job, protocol::pack(&lead.orders, 0));
    let layout = SegmentLayout::new(job, &artifact.manifest.target, said.len() as u64);
    let (memory, segment) = Segment::create(layout.bytes).map_err(|cause| RunError::Memory { bytes: layout.bytes, cause })?;
    segment.slice_mut(0, said.len()).copy_from_slice(&said);
    let mut ranks = Ranks::new(job, StatusBoard { segment: &segment, layout: &layout }, mpsc::channel());
    for _ in 0..job.mesh.world() {
        let started = ranks.start(&options.rank_binary, &memory);
        started.map_err(|cause| RunError::Start { binary: options.rank_binary.clone(), cause })?;
    }
    conduct(artifact, options, lead, ranks, limits, observe)
}
