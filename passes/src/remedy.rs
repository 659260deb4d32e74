//! What to change so that a job fits a memory budget: of the changes whose compile says so, those that take least time.
//!
//! Times are those of the nominal machine of [`crate::commands::cost_model`]: they order changes, and predict nothing.

use crate::commands::cost_model::step_times;
use crate::compile::compile;
use crate::report::footprint::{Budget, Footprints, Measure};
use crate::report::pipeline_timeline::{UNIT, timeline};
use ir::model::Model;
use ir::options::{
    ActivationOffload, Cuts, MOE_PASSES, MOST_MOE_PASSES, MemoryOrder, MoeBuffer, Offload, Options, ParamOffload, Recompute, SequenceParallel, Zero,
};
use ir::program::{Job, Space};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Options with which a job fits, its peak with them in each memory, and the nominal time of a step, in femtoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// All options of the compile that fits, changed ones included.
    pub options: Options,
    /// Bytes that a rank of the fullest stage needs, by [`Space`].
    pub peaks: [u64; Space::ALL.len()],
    /// Nominal femtoseconds of a step.
    pub time: u64,
}

/// Compiles with one change after the other, on all cores. Of those that fit as measured, the fastest come first. What
/// changes sizes of microbatches or moves ranks is tried where nothing else fits. Empty if nothing does.
pub fn find(training: &Model, evaluation: &Model, options: &Options, budget: Budget, of: Measure<'_>) -> Vec<Remedy> {
    let tried = |options: Options| {
        let done = compile(training.clone(), evaluation.clone(), &options).ok()?;
        let all = Footprints::new(&done.job, of);
        let peaks = Space::ALL.map(|space| all.most_of(space).1.of_space(space));
        budget.exceeded(&all).is_none().then(|| Remedy { options, peaks, time: nominal(&done.job) })
    };
    let mut found = vec![];
    for round in candidates(options, budget.of(Space::Host) < u64::MAX) {
        found = side_by_side(round, &tried);
        found.sort_by_key(|r| r.time);
        if !found.is_empty() {
            break;
        }
    }
    found
}

/// Applies `make` to all items in parallel. Returns the results that exist, in the order of the items.
pub fn side_by_side<A: Clone + Sync, B: Send>(all: Vec<A>, make: &(dyn Fn(A) -> Option<B> + Sync)) -> Vec<B> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(vec![]));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(all.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(at) else { break };
                    if let Some(result) = make(one.clone()) {
                        made.lock().expect("invariant: no thread panics while it holds this").push((at, result));
                    }
                }
            });
        }
    });
    let mut made = made.into_inner().expect("invariant: no thread panics while it holds this");
    made.sort_by_key(|m| m.0);
    made.into_iter().map(|m| m.1).collect()
}

/// Of a step of all stages: that of the busiest, and what it idles where passes take equally long.
pub fn nominal(job: &Job) -> u64 {
    let most = step_times(job).into_iter().max().unwrap_or(0);
    let timeline = timeline(job, UNIT);
    let busy = timeline.stages.iter().map(|s| s.busy).max().unwrap_or(0).max(1);
    u64::try_from(u128::from(most) * u128::from(timeline.length.max(busy)) / u128::from(busy)).unwrap_or(u64::MAX)
}

/// Ranks of a machine, within which hybrid sharding shares out.
const MACHINE: u64 = 8;

/// What is tried, in rounds. First what keeps the ranks and their microbatches: another order of commands, the
/// sequence split, smaller chunks of logits, experts' rows in passes, attention or some layers or all recomputed,
/// states, gradients and parameters shared out (within machines, or among all), the optimizer on the host, its states
/// on a disk where the host's memory is limited, parameters there too, activations on the host, and most of it
/// together. Then smaller microbatches, then ranks moved from data to tensor and pipeline parallelism.
fn candidates(options: &Options, is_host_limited: bool) -> [Vec<Options>; 3] {
    let base = options;
    let mut out = vec![];
    let mut least = base.clone();
    if options.memory_order == MemoryOrder::Time {
        least = Options { memory_order: MemoryOrder::Memory, ..least };
        out.push(least.clone());
    }
    if options.tp > 1 && options.sp == SequenceParallel::Off {
        out.push(Options { sp: SequenceParallel::On, ..base.clone() });
        least = Options { sp: SequenceParallel::On, ..least };
        out.push(least.clone());
    }
    // Without an option, large logits are cut already.
    if let Some(chunks) = options.logits_chunks {
        let logits_chunks = Some(4 * chunks);
        out.push(Options { logits_chunks, ..base.clone() });
        least = Options { logits_chunks, ..least };
    }
    // Experts' rows get a smaller buffer, with as many passes as needed for the most rows that a rank can get.
    if options.ep > 1 && options.moe_buffer == MoeBuffer::Whole {
        if options.moe_passes < MOE_PASSES {
            out.push(Options { moe_passes: MOE_PASSES, ..base.clone() });
        }
        if options.ep <= MOST_MOE_PASSES {
            let (moe_buffer, moe_passes) = (MoeBuffer::Factor(1.0), MOST_MOE_PASSES);
            out.push(Options { moe_buffer, moe_passes, ..base.clone() });
            least = Options { moe_buffer, moe_passes, ..least };
        }
    }
    let split = least.clone();
    if options.recompute == Recompute::None {
        out.push(Options { recompute: Recompute::Selective, ..base.clone() });
        out.extend([1, 2, 4].map(|layers| Options { recompute: Recompute::Block(layers), ..base.clone() }));
    }
    if matches!(options.recompute, Recompute::None | Recompute::Selective | Recompute::Block(_)) {
        out.push(Options { recompute: Recompute::Uniform(1), ..base.clone() });
        least = Options { recompute: Recompute::Uniform(1), ..least };
        out.push(least.clone());
    }
    for zero in [Zero::States, Zero::Gradients, Zero::Params] {
        if options.dp * options.cp > 1 && options.zero < zero {
            let machines = options.dp / MACHINE;
            if options.replicas == 1 && machines > 1 && options.dp.is_multiple_of(MACHINE) {
                out.push(Options { zero, replicas: machines, ..base.clone() });
            }
            out.push(Options { zero, ..base.clone() });
            out.push(Options { zero, ..split.clone() });
            least = Options { zero, ..least };
            out.push(least.clone());
        }
    }
    if options.offload == Offload::Off {
        out.push(Options { offload: Offload::Optimizer, ..base.clone() });
        least = Options { offload: Offload::Optimizer, ..least };
        out.push(least.clone());
    }
    // States on a disk take neither device nor host memory.
    if is_host_limited && options.offload != Offload::Disk {
        out.push(Options { offload: Offload::Disk, ..base.clone() });
        least = Options { offload: Offload::Disk, ..least };
        out.push(least.clone());
    }
    // Parameters rest on the host beside the optimizer's states, or on a disk as well.
    let offload = if options.offload == Offload::Off { Offload::Optimizer } else { options.offload };
    if options.param_offload == ParamOffload::Off {
        out.push(Options { offload, param_offload: ParamOffload::Host, ..base.clone() });
        least = Options { param_offload: ParamOffload::Host, ..least };
        out.push(least.clone());
    }
    if is_host_limited && options.param_offload != ParamOffload::Disk {
        out.push(Options { offload, param_offload: ParamOffload::Disk, ..base.clone() });
        least = Options { param_offload: ParamOffload::Disk, ..least };
        out.push(least.clone());
    }
    // Activations wait on the host: all of them, or only the inputs of recomputed layers.
    if options.activation_offload == ActivationOffload::Off {
        let activation_offload = ActivationOffload::Layers(None);
        out.push(Options { activation_offload, ..base.clone() });
        if options.recompute != Recompute::Uniform(1) {
            out.push(Options { activation_offload, recompute: Recompute::Uniform(1), ..base.clone() });
        }
        least = Options { activation_offload, ..least };
        out.push(least.clone());
    }
    let (mut smaller, mut rows) = (vec![], options.micro_batch);
    while rows > 1 {
        rows = (1..rows).rev().find(|r| options.micro_batch.is_multiple_of(*r)).unwrap_or(1);
        smaller.push(Options { micro_batch: rows, ..base.clone() });
        smaller.push(Options { micro_batch: rows, ..least.clone() });
    }
    let mut moved = vec![];
    // Given sizes of stages fit no other number of stages.
    if matches!(options.layout, Cuts::Sizes(_) | Cuts::Text(_)) {
        return [out, smaller, moved];
    }
    let small = smaller.last().unwrap_or(&least).clone();
    // The number of ranks stays, with fewer of them on dp.
    let mut moves: Vec<(u64, u64)> = vec![];
    for by in (2..=options.dp).filter(|by| options.dp.is_multiple_of(*by)) {
        moves.extend((1..=by).filter(|t| by.is_multiple_of(*t)).map(|t| (t, by / t)));
    }
    for (tp, pp) in moves {
        let (dp, tp, pp) = (options.dp / (tp * pp), options.tp * tp, options.pp * pp);
        let replicas = if dp.is_multiple_of(options.replicas) { options.replicas } else { 1 };
        moved.push(Options { dp, tp, pp, replicas, ..base.clone() });
        // With tp above 1, the sequence can be split, too.
        let sp = if tp > 1 { SequenceParallel::On } else { small.sp };
        moved.push(Options { dp, tp, pp, sp, replicas, ..small.clone() });
    }
    [out, smaller, moved]
}
