//! What to change so that a job fits a memory budget: the cheapest change whose compile says so.

use crate::compile::compile;
use crate::report::footprint::{Footprints, Measure, Remedy};
use ir::model::Model;
use ir::options::{Cuts, Offload, Options, Recompute, SequenceParallel, Zero};

/// A change of options and the flags that make it.
#[derive(Clone)]
struct Candidate {
    options: Options,
    flags: Vec<String>,
}

impl Candidate {
    fn and(&self, flag: String, change: impl FnOnce(&mut Options)) -> Candidate {
        let mut out = self.clone();
        change(&mut out.options);
        out.flags.push(flag);
        out
    }
}

/// Compiles with one change after the other, the cheapest in time first, until one fits as measured. None if none does.
pub fn find(training: &Model, evaluation: &Model, options: &Options, budget: u64, of: Measure<'_>) -> Option<Remedy> {
    candidates(options).into_iter().find_map(|c| {
        let done = compile(training.clone(), evaluation.clone(), &c.options).ok()?;
        let peak = Footprints::new(&done.job, of).most().1.total();
        (peak <= budget).then_some(Remedy { flags: c.flags, peak })
    })
}

/// In the order of what they cost: splitting along the sequence and recomputing attention next to nothing; full recomputation a third more compute;
/// sharing out optimizer states (ZeRO-1) nothing, gradients (2) a sum and parameters (3) gathers in every pass; an optimizer on the host copies of all gradients and parameters in every step; smaller microbatches slower kernels; ranks moved from data to tensor and pipeline parallelism more communication. Each later kind on top of the ones before it.
fn candidates(options: &Options) -> Vec<Candidate> {
    let base = Candidate { options: options.clone(), flags: vec![] };
    let mut out = vec![];
    let mut split = base.clone();
    if options.tp > 1 && options.sp == SequenceParallel::Off {
        split = base.and("--sp".into(), |o| o.sp = SequenceParallel::On);
        out.push(split.clone());
    }
    let mut least = split.clone();
    if options.recompute == Recompute::None {
        out.push(base.and("--recompute selective".into(), |o| o.recompute = Recompute::Selective));
    }
    let share = |c: &Candidate, level: Zero, n: u32| c.and(format!("--zero {n}"), |o| o.zero = level);
    let shares = |level: Zero| options.dp * options.cp > 1 && options.zero < level;
    if shares(Zero::States) {
        out.push(share(&base, Zero::States, 1));
    }
    if matches!(options.recompute, Recompute::None | Recompute::Selective | Recompute::Block(_)) {
        let name =
            if matches!(options.recompute, Recompute::Block(_)) { "--recompute-method uniform --recompute-num-layers 1" } else { "--recompute full" };
        let full = |c: &Candidate| c.and(name.into(), |o| o.recompute = Recompute::Uniform(1));
        out.push(full(&base));
        least = full(&split);
        out.push(least.clone());
    }
    for (level, n) in [(Zero::Gradients, 2), (Zero::Params, 3)] {
        if shares(level) {
            out.push(share(&base, level, n));
            out.push(share(&least, level, n));
        }
    }
    if shares(Zero::Params) {
        least = share(&least, Zero::Params, 3);
    }
    if options.offload == Offload::Off {
        let offload = |c: &Candidate| c.and("--optimizer-offload".into(), |o| o.offload = Offload::Optimizer);
        out.push(offload(&base));
        least = offload(&least);
        out.push(least.clone());
    }
    // The default of the global batch follows from what changes here.
    let batch = format!("--global-batch-size {}", options.global_batch);
    let mut rows = options.micro_batch;
    while rows > 1 {
        rows = (1..rows).rev().find(|r| options.micro_batch.is_multiple_of(*r)).unwrap_or(1);
        out.push(base.and(format!("--micro-batch-size {rows} {batch}"), |o| o.micro_batch = rows));
        out.push(least.and(format!("--micro-batch-size {rows} {batch}"), |o| o.micro_batch = rows));
    }
    // Sizes of stages that were given fit no other number of stages.
    if matches!(options.layout, Cuts::Sizes(_) | Cuts::Text(_)) {
        return out;
    }
    let small = out.last().map_or(base, Candidate::clone);
    // The same ranks, with less of them on dp.
    let mut moves: Vec<(u64, u64)> = vec![];
    for by in (2..=options.dp).filter(|by| options.dp.is_multiple_of(*by)) {
        moves.extend((1..=by).filter(|t| by.is_multiple_of(*t)).map(|t| (t, by / t)));
    }
    for (tp, pp) in moves {
        let flags = |o: &Options| (o.dp / (tp * pp), o.tp * tp, o.pp * pp);
        let (dp, tp, pp) = flags(options);
        let change = |c: &Candidate| {
            let mut moved = c.and(format!("--dp {dp} --tp {tp} --pp {pp} {batch}"), |o| (o.dp, o.tp, o.pp) = (dp, tp, pp));
            // A larger group on tp is one along which the sequence can be split.
            if tp > 1 && moved.options.sp == SequenceParallel::Off && !c.flags.is_empty() {
                moved = moved.and("--sp".into(), |o| o.sp = SequenceParallel::On);
            }
            moved
        };
        out.push(change(&Candidate { options: options.clone(), flags: vec![] }));
        out.push(change(&small));
    }
    out
}
