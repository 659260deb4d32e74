//! What a run is asked for.

use super::save::Existing;
use super::stop::StopRequest;
use crate::conditions::Change;
use crate::data::{DataSets, Spec};
use crate::executor::CommandOrder;
use crate::gpu::nccl;
use crate::lines::ExistingLines;
use crate::protocol::{FirstStep, OnNonfinite};
use crate::rendezvous::Trust;
use crate::target::{DeviceKind, Exchanges};
use crate::world::World;
use std::path::PathBuf;
use std::time::Duration;

/// The default patience: how long a rank may show no sign of life, that is no command begun, no piece of a
/// communication done and no time on a core.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// The default time for ranks to meet.
pub const MEETING: Duration = Duration::from_secs(300);

/// What to run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The `mcc-rank` program.
    pub rank_binary: PathBuf,
    /// Files of training data.
    pub data: Vec<Spec>,
    /// Files of held-out data.
    pub valid_data: Vec<Spec>,
    /// Data sets in place of both.
    pub sets: Option<DataSets>,
    /// Steps between held-out losses; 0 is never.
    pub eval_interval: u64,
    /// Most global batches of a held-out loss.
    pub eval_batches: u64,
    /// Default: all of the data if it ends, else the schedule's steps, else once through the data.
    pub steps: Option<u64>,
    /// The run ends early after a step that is a multiple of it; 0 is never.
    pub exit_interval: u64,
    /// The run ends early after the step that is under way when it has taken so long; of a world, by rank 0's clock.
    pub exit_duration: Option<Duration>,
    /// Initial weights, together; by default they are drawn.
    pub init: Vec<PathBuf>,
    /// Patterns of names of parameters that may be in none of these.
    pub allow_missing: Vec<String>,
    /// What `save_state` wrote, or the directory of a checkpoint: the run goes on after that step, with that run's
    /// seed.
    pub resume: Option<PathBuf>,
    /// What of this run may be another than that had.
    pub allowed: Vec<Change>,
    /// The directory of checkpoints.
    pub save: Option<PathBuf>,
    /// There is one after each step that is a multiple of it, and after the last; 0 is then only.
    pub save_interval: u64,
    /// And whenever so long has passed since the last was complete.
    pub save_seconds: Option<Duration>,
    /// Most checkpoints that stay: the last.
    pub keep: Option<u64>,
    /// The file for the trained weights alone.
    pub save_weights: Option<PathBuf>,
    /// Parameters, optimizer states and the step.
    pub save_state: Option<PathBuf>,
    /// One JSON object per step. A run that resumes appends.
    pub metrics: Option<PathBuf>,
    /// What becomes of `metrics` that are there if the run begins: they may be of a life of its own that ended
    /// before it had saved anything.
    pub earlier: ExistingLines,
    /// A loss that is so many times the usual one ends the run; none never does.
    pub spike: Option<f64>,
    /// Losses of the steps before the first, as far as they are known.
    pub losses: Vec<f64>,
    /// Sequences that the run leaves out beyond those that were read before.
    pub skip: u64,
    /// Steps from one look for a rank that is slow to the next; 0 is never.
    pub straggler_interval: u64,
    /// Steps from one comparison of what several ranks hold to the next; 0 is never.
    pub check_replicas: u64,
    /// What the first step is to come to ([`super::first_step`]).
    pub first_step: Option<FirstStep>,
    /// What happens to files of `save_weights`, `save_state` and `metrics` that exist. What is resumed from may
    /// always be saved to.
    pub existing: Existing,
    /// Default: the cores of this machine over the ranks, at least one.
    pub threads_per_rank: Option<usize>,
    /// Below 2^53.
    pub seed: u64,
    /// What happens when loss or gradient norm is not finite.
    pub on_nonfinite: OnNonfinite,
    /// Whether communication runs beside compute; the same numbers either way.
    pub order: CommandOrder,
    /// So many steps are timed, behind a warm-up; without `steps`, the run ends with them.
    pub profile: Option<u64>,
    /// Default: the usual one for the artifact's target.
    pub device: Option<DeviceKind>,
    /// How ranks exchange: by the host, MPI or NCCL.
    pub exchanges: Exchanges,
    /// Most blocks of a kernel of NCCL's: of the card's multiprocessors, so many are its.
    pub nccl_max_ctas: u32,
    /// The directory on a disk in which ranks keep what rests there.
    pub offload_to: Option<PathBuf>,
    /// How long a rank may show no sign of life.
    pub patience: Duration,
    /// The world that another launcher started, if one did.
    pub world: Option<World>,
    /// How long ranks of such a world may take to meet.
    pub meeting_limit: Duration,
    /// How ranks know each other.
    pub trust: Trust,
    /// Ends the run early.
    pub stop: StopRequest,
}

impl RunOptions {
    /// The defaults, with the `mcc-rank` program at this path.
    pub fn new(rank_binary: PathBuf) -> RunOptions {
        RunOptions {
            rank_binary,
            data: vec![],
            valid_data: vec![],
            sets: None,
            eval_interval: 0,
            eval_batches: 8,
            steps: None,
            exit_interval: 0,
            exit_duration: None,
            init: vec![],
            allow_missing: vec![],
            resume: None,
            allowed: vec![],
            save: None,
            save_interval: 0,
            save_seconds: None,
            keep: None,
            save_weights: None,
            save_state: None,
            metrics: None,
            earlier: ExistingLines::Replace,
            spike: None,
            losses: vec![],
            skip: 0,
            straggler_interval: 100,
            check_replicas: 0,
            first_step: None,
            existing: Existing::Refuse,
            threads_per_rank: None,
            seed: 0,
            on_nonfinite: OnNonfinite::Stop,
            order: CommandOrder::Streams,
            profile: None,
            device: None,
            exchanges: Exchanges::Host,
            nccl_max_ctas: nccl::MAX_CTAS,
            offload_to: None,
            patience: PATIENCE,
            world: None,
            meeting_limit: MEETING,
            trust: Trust::Loopback,
            stop: StopRequest::default(),
        }
    }
}
