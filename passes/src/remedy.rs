//! What to change so that a job fits a memory budget: the cheapest change whose compile says so.

use crate::compile::compile;
use crate::report::footprint::{Footprints, Measure};
use ir::model::Model;
use ir::options::{Cuts, Offload, Options, Recompute, SequenceParallel, Zero};

/// Options with which a job fits, and its peak with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    pub options: Options,
    pub peak: u64,
}

/// Compiles with one change after the other, the cheapest in time first, until one fits as measured. None if none does.
pub fn find(training: &Model, evaluation: &Model, options: &Options, budget: u64, of: Measure<'_>) -> Option<Remedy> {
    candidates(options).into_iter().find_map(|options| {
        let done = compile(training.clone(), evaluation.clone(), &options).ok()?;
        let peak = Footprints::new(&done.job, of).most().1.total();
        (peak <= budget).then_some(Remedy { options, peak })
    })
}

/// In the order of what they cost: splitting along the sequence and recomputing attention next to nothing; full recomputation a third more compute;
/// sharing out optimizer states (ZeRO-1) nothing, gradients (2) a sum and parameters (3) gathers in every pass; an optimizer on the host copies of all gradients and parameters in every step; smaller microbatches slower kernels; ranks moved from data to tensor and pipeline parallelism more communication. Each later kind on top of the ones before it.
fn candidates(options: &Options) -> Vec<Options> {
    let base = options;
    let mut out = vec![];
    let mut split = base.clone();
    if options.tp > 1 && options.sp == SequenceParallel::Off {
        split = Options { sp: SequenceParallel::On, ..split };
        out.push(split.clone());
    }
    let mut least = split.clone();
    if options.recompute == Recompute::None {
        out.push(Options { recompute: Recompute::Selective, ..base.clone() });
    }
    let share = |o: &Options, zero: Zero| Options { zero, ..o.clone() };
    let shares = |level: Zero| options.dp * options.cp > 1 && options.zero < level;
    if shares(Zero::States) {
        out.push(share(base, Zero::States));
    }
    if matches!(options.recompute, Recompute::None | Recompute::Selective | Recompute::Block(_)) {
        let full = |o: &Options| Options { recompute: Recompute::Uniform(1), ..o.clone() };
        out.push(full(base));
        least = full(&split);
        out.push(least.clone());
    }
    for level in [Zero::Gradients, Zero::Params] {
        if shares(level) {
            out.push(share(base, level));
            out.push(share(&least, level));
        }
    }
    if shares(Zero::Params) {
        least = share(&least, Zero::Params);
    }
    if options.offload == Offload::Off {
        let offload = |o: &Options| Options { offload: Offload::Optimizer, ..o.clone() };
        out.push(offload(base));
        least = offload(&least);
        out.push(least.clone());
    }
    let mut rows = options.micro_batch;
    while rows > 1 {
        rows = (1..rows).rev().find(|r| options.micro_batch.is_multiple_of(*r)).unwrap_or(1);
        out.push(Options { micro_batch: rows, ..base.clone() });
        out.push(Options { micro_batch: rows, ..least.clone() });
    }
    // Sizes of stages that were given fit no other number of stages.
    if matches!(options.layout, Cuts::Sizes(_) | Cuts::Text(_)) {
        return out;
    }
    let small = out.last().unwrap_or(base).clone();
    // The same ranks, with less of them on dp.
    let mut moves: Vec<(u64, u64)> = vec![];
    for by in (2..=options.dp).filter(|by| options.dp.is_multiple_of(*by)) {
        moves.extend((1..=by).filter(|t| by.is_multiple_of(*t)).map(|t| (t, by / t)));
    }
    for (tp, pp) in moves {
        let (dp, tp, pp) = (options.dp / (tp * pp), options.tp * tp, options.pp * pp);
        out.push(Options { dp, tp, pp, ..base.clone() });
        // A larger group on tp is one along which the sequence can be split.
        let sp = if tp > 1 && small != *base { SequenceParallel::On } else { small.sp };
        out.push(Options { dp, tp, pp, sp, ..small.clone() });
    }
    out
}
