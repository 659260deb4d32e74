//! A step of a plan, from the [`Sample`] that it shares with others: seconds and bytes, in closed form.
//!
//! A step takes the passes of its busiest stage, what the pipeline waits at its ends (Narayanan et al. 2021; Qi et
//! al. 2023), and the update. It says which plans to compile, and is believed no further.

use crate::sample::{LayerCost, Sample};
use crate::space::{ModelFacts, chunks, parts};
use ir::op::{Collective, Reduce};
use ir::options::{Offload, Options, Zero};
use ir::pipeline::Schedule;
use simulate::links::{Reach, collective, message};
use simulate::machine::Machine;
use std::collections::BTreeMap;

/// What is expected of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds of a step: its passes, its update, and the gaps between these.
    pub seconds: f64,
    /// Bytes of a rank's device, of the fullest stage.
    pub bytes: f64,
    /// The same if what layers compute were computed again, and what enters them were all that is kept.
    pub floor: f64,
}

/// What enters layers, as a part of what they compute and keep: of a transformer one value of about sixteen.
const ENTERS: f64 = 1.0 / 16.0;

/// How groups of ranks lie, by their number of ranks and the distance between these. They are looked up over and
/// over.
pub type ReachCache = BTreeMap<(u64, u64), Reach>;

/// Estimates a step of a plan, or returns `None` if the plan has no layout. `kinds` are those of the model's layers.
pub fn estimate(
    options: &Options,
    model: &ModelFacts,
    kinds: &[usize],
    sample: &Sample,
    machine: &Machine,
    reaches: &mut ReachCache,
) -> Option<Estimate> {
    let parts = parts(options, model)?;
    let (p, v) = (options.pp as usize, chunks(options) as usize);
    let microbatches = (options.global_batch / (options.dp * options.micro_batch)) as f64;
    // Sums up the units of each virtual stage, and then of each stage.
    let mut first = 0;
    let mut virtual_stages = vec![];
    for part in &parts {
        let mut unit = LayerCost::default();
        for kind in kinds.get(first..first + part.layers as usize)? {
            unit.add(sample.layers.get(*kind)?, 1.0);
        }
        first += part.layers as usize;
        part.embedding.then(|| unit.add(&sample.before, 1.0));
        part.loss.then(|| unit.add(&sample.after, 1.0));
        virtual_stages.push(unit);
    }
    let is_folded = matches!(options.schedule, Schedule::ZbV | Schedule::DualPipeV);
    let mut stages = vec![LayerCost::default(); p];
    for (g, unit) in virtual_stages.iter().enumerate() {
        let s = if is_folded && (g / p) % 2 == 1 { p - 1 - g % p } else { g % p };
        stages[s].add(unit, 1.0);
    }
    let pass = |u: &LayerCost| u.forward + u.backward;
    let data = DataParallel::new(options, machine, reaches);
    let busy = stages.iter().map(|u| microbatches * (pass(u) + data.beside(u, sample))).fold(0.0, f64::max);
    // At its ends a stage waits for a pass through one virtual stage of each other stage, and for messages there and
    // back.
    let mean = virtual_stages.iter().map(pass).sum::<f64>() / virtual_stages.len() as f64;
    let forward = virtual_stages.iter().map(|u| u.forward).sum::<f64>() / virtual_stages.len() as f64;
    let hop = if p > 1 { message(machine, 0, options.dp * options.cp * options.tp, sample.message as u64).seconds() } else { 0.0 };
    let others = (p - 1) as f64;
    let is_short = microbatches < 2.0 * p as f64;
    let ends = match options.schedule {
        Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV if is_short => others * mean,
        // Gradients of parameters, which are half of a backward pass, fill the gaps.
        Schedule::ZbH1 => others * forward,
        Schedule::ZbV => others * 0.5 * forward,
        Schedule::DualPipeV => others * forward,
        Schedule::GPipe | Schedule::OneFOneB | Schedule::Given(_) => others * mean,
    };
    let update = stages.iter().map(|u| data.update(u, sample)).fold(0.0, f64::max);
    let seconds = busy + ends + 2.0 * others * hop + update + sample.gaps;
    let kept = |s: usize| kept(options, s, microbatches as usize) * stages[s].kept / v as f64;
    let most = |part: f64| (0..p).map(|s| data.lasting(&stages[s], sample) + part * kept(s)).fold(0.0, f64::max) + sample.temporary;
    Some(Estimate { seconds, bytes: most(1.0), floor: most(ENTERS) })
}

/// The number of virtual-stage passes whose activations a stage keeps at a time.
fn kept(options: &Options, stage: usize, microbatches: usize) -> f64 {
    let (p, v) = (options.pp as usize, chunks(options) as usize);
    let most = match options.schedule {
        Schedule::GPipe => microbatches * v,
        Schedule::OneFOneB if v > 1 => 2 * (p - 1 - stage) + (v - 1) * p + 1,
        Schedule::OneFOneB | Schedule::Given(_) => p - stage,
        // Activations are kept until the gradients of parameters are computed, as are the gradients of activations
        // that these need.
        Schedule::ZbH1 => 2 * p,
        Schedule::ZbV => 2 * p,
        Schedule::DualPipeV => 2 * p + 1,
    };
    let at_most = if options.schedule == Schedule::ZbH1 { 2 * microbatches } else { microbatches * v };
    most.min(at_most) as f64
}

/// The ranks that have the same parameters.
struct DataParallel<'a> {
    options: &'a Options,
    machine: &'a Machine,
    /// The data-parallel groups of parameters outside of experts, and of experts.
    groups: [(u64, Reach); 2],
    /// The groups of data-parallel and of context-parallel ranks, where the latter sum by themselves after the
    /// former.
    apart: Option<[(u64, Reach); 2]>,
}

impl<'a> DataParallel<'a> {
    fn new(options: &'a Options, machine: &'a Machine, reaches: &mut ReachCache) -> DataParallel<'a> {
        let ranks = options.dp * options.cp * options.tp;
        let mut of = |n: u64, apart: u64| {
            let found = reaches.entry((n, apart)).or_insert_with(|| Reach::of(machine, &(0..n).map(|k| k * apart).collect::<Vec<_>>()));
            (n, found.clone())
        };
        let apart = (options.cp > 1).then(|| [of(options.dp, options.tp * options.cp), of(options.cp, options.tp)]);
        let mut group = |apart: u64| of((ranks / apart).max(1), apart);
        DataParallel { options, machine, groups: [group(options.tp), group(options.ep * options.etp.unwrap_or(options.tp))], apart }
    }

    /// Elements of each group's parameters.
    fn elements(unit: &LayerCost) -> [f64; 2] {
        [unit.dense, unit.experts]
    }

    fn exchange(&self, kind: Collective, unit: &LayerCost, bytes: f64) -> f64 {
        let each = Self::elements(unit).into_iter().zip(&self.groups).map(|(elements, (n, reach))| {
            let part = match kind {
                Collective::AllReduce(_) => elements * bytes,
                _ => elements * bytes / *n as f64,
            };
            if elements > 0.0 { collective(self.machine, kind, reach, part as u64).seconds() } else { 0.0 }
        });
        each.sum()
    }

    /// Seconds in which a pass gathers the parameters that ranks have only parts of.
    fn gather(&self, unit: &LayerCost, sample: &Sample) -> f64 {
        self.exchange(Collective::AllGather, unit, sample.lasting.read)
    }

    /// Seconds in which gradients are summed to the ranks that have parts of them.
    fn scatter(&self, unit: &LayerCost, sample: &Sample) -> f64 {
        self.exchange(Collective::ReduceScatter(Reduce::Sum), unit, sample.lasting.gradient)
    }

    /// Seconds of a microbatch's exchanges with data-parallel ranks that nothing is computed beside.
    fn beside(&self, unit: &LayerCost, sample: &Sample) -> f64 {
        let (zero, bytes) = (self.options.zero, &sample.lasting);
        let of_pass = |kind: Collective, bytes: f64| match &self.apart {
            None => self.exchange(kind, unit, bytes),
            Some([data, context]) => {
                let all = (unit.dense + unit.experts) * bytes;
                let each = |(n, reach): &(u64, Reach), all: f64| collective(self.machine, kind, reach, (all / *n as f64) as u64).seconds();
                each(data, all) + each(context, all / data.0 as f64)
            }
        };
        let gather = if zero == Zero::Params { of_pass(Collective::AllGather, bytes.read) } else { 0.0 };
        let scatter = if zero >= Zero::Gradients { of_pass(Collective::ReduceScatter(Reduce::Sum), bytes.gradient) } else { 0.0 };
        // A call waits for its own exchanges, so nothing overlaps the first gathers and the last sums.
        let hidden = if self.options.pp == 1 { 0.7 } else { 0.3 };
        let rest = |exchanges: f64, compute: f64| (exchanges - compute).max((1.0 - hidden) * exchanges).max(0.0);
        rest(gather, unit.forward) + rest(gather + scatter, unit.backward)
    }

    /// Seconds of an update: sums of gradients that nothing is computed beside, the optimizer, and new parameters.
    fn update(&self, unit: &LayerCost, sample: &Sample) -> f64 {
        let zero = self.options.zero;
        let part = |n: u64| if zero > Zero::None { 1.0 / n as f64 } else { 1.0 };
        let shared = Self::elements(unit).into_iter().zip(&self.groups).map(|(e, (n, _))| e * part(*n)).sum::<f64>();
        let own = unit.update * if unit.dense + unit.experts > 0.0 { shared / (unit.dense + unit.experts) } else { 1.0 };
        let sum = match zero {
            Zero::None => self.exchange(Collective::AllReduce(Reduce::Sum), unit, sample.lasting.gradient),
            Zero::States => self.scatter(unit, sample),
            // These levels sum gradients in every microbatch, which `beside` counts.
            Zero::Gradients | Zero::Params => 0.0,
        };
        let gather = if matches!(zero, Zero::States | Zero::Gradients) { self.gather(unit, sample) } else { 0.0 };
        // Sums that begin early run beside the last backward pass.
        (sum - 0.75 * unit.backward).max(0.25 * sum) + own + gather
    }

    /// Bytes that live over steps.
    fn lasting(&self, unit: &LayerCost, sample: &Sample) -> f64 {
        let (bytes, zero) = (&sample.lasting, self.options.zero);
        let each = Self::elements(unit).into_iter().zip(&self.groups).map(|(elements, (n, _))| {
            let shared = |from: Zero, bytes: f64| if zero >= from { bytes / *n as f64 } else { bytes };
            // Without a separate weight, passes read the weight itself, and every rank has all of it.
            let own = shared(Zero::Params, bytes.read) + shared(Zero::Gradients, bytes.gradient);
            let optimizer = if self.options.offload == Offload::Off { shared(Zero::States, bytes.weight + bytes.states) } else { 0.0 };
            elements * (own + optimizer)
        });
        each.sum()
    }
}
