//! Brings a machine's numbers to what was measured.
//!
//! Numbers are moved up and down, in steps that get smaller, as long as predictions come nearer to the measurements:
//! to the least mean of how far each is off, as a logarithm. That is a pattern search (Hooke and Jeeves, 1961) for a
//! least absolute deviation, which single bad measurements hardly move.

use crate::Options;
use crate::kernels;
use crate::links::{self, Reach};
use crate::machine::{Figure, Machine, Measured};
use crate::step::predict;
use ir::kernel::{Family, Kernel};
use ir::op::Collective;
use ir::program::{Job, Space};
use serde::Serialize;
use std::collections::BTreeMap;

/// A kernel that was measured.
pub struct KernelTime<'a> {
    /// What was launched; fits leave out kernels of the host.
    pub kernel: &'a Kernel,
    /// Threads of the rank.
    pub threads: u64,
    /// Calls of a step.
    pub calls: f64,
    /// Of a call.
    pub seconds: f64,
}

/// An exchange that was measured.
#[derive(Clone, Debug)]
pub struct ExchangeTime {
    /// None of a message, of each end by itself.
    pub kind: Option<Collective>,
    /// Ranks that take part, in ascending order; of a message, its two ends.
    pub ranks: Vec<u64>,
    /// Of the message, or of a part.
    pub bytes: u64,
    /// Seconds of one such exchange, measured.
    pub seconds: f64,
}

/// How well numbers fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// What was measured, so many of it.
    pub what: String,
    /// Measurements that were compared with predictions.
    pub samples: usize,
    /// How far predictions are off, in parts: by the mean of logarithms before and after, and the most. What is
    /// predicted at half or at twice of what was measured is off by 1.
    pub before: f64,
    /// Mean deviation of predictions with the numbers found: 0 is exact, 1 is half or twice.
    pub after: f64,
    /// Deviation of the worst prediction with the numbers found: 1 is half or twice.
    pub most: f64,
    /// Names and values of the numbers.
    pub numbers: Vec<(String, f64)>,
}

/// A number that the fit may change, between two values.
struct FitParameter {
    name: String,
    of: Box<dyn Fn(&mut Machine) -> &mut Figure>,
    least: f64,
    most: f64,
}

impl FitParameter {
    fn new(name: impl Into<String>, (least, most): (f64, f64), of: impl Fn(&mut Machine) -> &mut Figure + 'static) -> FitParameter {
        FitParameter { name: name.into(), of: Box::new(of), least, most }
    }
}

/// A measurement: its weight, its seconds, and a machine's prediction.
struct Sample<'a> {
    weight: f64,
    seconds: f64,
    predicted: Box<dyn Fn(&Machine) -> f64 + 'a>,
}

impl Sample<'_> {
    /// The logarithm of predicted over measured seconds.
    fn off(&self, machine: &Machine) -> f64 {
        ((self.predicted)(machine).max(1e-12) / self.seconds.max(1e-12)).ln()
    }
}

/// The first steps, as factors: large ones leap over what is near, small ones stay where it is flat.
const STEPS: [f64; 3] = [4.0, 2.0, 1.2];
/// The least step.
const FINEST: f64 = 1.004;

fn mean(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let weights: f64 = samples.iter().map(|s| s.weight).sum();
    samples.iter().map(|s| s.weight * of(s)).sum::<f64>() / weights.max(f64::MIN_POSITIVE)
}

fn fit(machine: &mut Machine, what: &str, knobs: &[FitParameter], samples: &[Sample], source: &str) -> Option<Fit> {
    if samples.is_empty() || samples.len() < knobs.len() {
        return None;
    }
    let off = |machine: &Machine| mean(samples, |s| s.off(machine).abs());
    let before = off(machine);
    // Errors of several numbers may cancel, so all combinations of moves up and down are tried.
    let moves = (0..3u32.pow(knobs.len() as u32)).map(|m| (0..knobs.len() as u32).map(move |k| (m / 3u32.pow(k) % 3) as i32 - 1));
    let moves: Vec<Vec<i32>> = moves.map(Iterator::collect).collect();
    let search = |mut step: f64| {
        let (mut machine, mut best) = (machine.clone(), before);
        while step > FINEST {
            let mut is_better = false;
            for by in &moves {
                let old: Vec<f64> = knobs.iter().map(|knob| (knob.of)(&mut machine).value).collect();
                for ((knob, by), old) in knobs.iter().zip(by).zip(&old) {
                    (knob.of)(&mut machine).value = (old * step.powi(*by)).clamp(knob.least, knob.most);
                }
                let now = off(&machine);
                if now < best * (1.0 - 1e-6) {
                    (best, is_better) = (now, true);
                } else {
                    knobs.iter().zip(&old).for_each(|(knob, old)| (knob.of)(&mut machine).value = *old);
                }
            }
            if !is_better {
                step = step.sqrt();
            }
        }
        (machine, best)
    };
    let found = STEPS.map(search).into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let (found, best) = found.expect("invariant: there are steps");
    *machine = found;
    let [before, after] = [before, best].map(f64::exp_m1);
    // Few measurements fit nearly exactly, whatever the formula is, so their spread is at least a tenth.
    let least = if samples.len() > 3 * knobs.len() { 0.02 } else { 0.1 };
    for knob in knobs {
        let figure = (knob.of)(machine);
        (figure.source, figure.spread) = (source.into(), round(after.clamp(least, 0.9)));
        figure.value = round(figure.value);
    }
    let most = samples.iter().map(|s| s.off(machine).abs()).fold(0.0, f64::max).exp_m1();
    let numbers = knobs.iter().map(|k| (k.name.clone(), (k.of)(machine).value)).collect();
    Some(Fit { what: what.into(), samples: samples.len(), before, after, most, numbers })
}

/// To four digits, as files have it.
pub fn round(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// Fits what governs kernels, family by family: what moves bytes first, which all others do too. `source` is of
/// [`Machine::sources`].
pub fn kernels(machine: &mut Machine, times: &[KernelTime], source: &str) -> Vec<Fit> {
    of_kernels(machine, times, source, true)
}

/// How far the formulas are off kernels that were measured, as the machine is.
pub fn off_kernels(machine: &Machine, times: &[KernelTime]) -> Vec<Fit> {
    of_kernels(&mut machine.clone(), times, "", false)
}

fn of_kernels(machine: &mut Machine, times: &[KernelTime], source: &str, is_fitted: bool) -> Vec<Fit> {
    let of = |is: &dyn Fn(&Family) -> bool| -> Vec<Sample> {
        let own = times.iter().filter(|t| t.kernel.on == Space::Device && is(&t.kernel.family));
        // The formula predicts, even if the file has a measured time of the kernel.
        own.map(|t| {
            let (kernel, threads) = (t.kernel, t.threads);
            let predicted = move |m: &Machine| kernels::formula(m, kernel, threads).seconds();
            Sample { weight: t.calls * t.seconds, seconds: t.seconds, predicted: Box::new(predicted) }
        })
        .collect()
    };
    let part = (0.01, 1.0);
    let memory = [
        FitParameter::new("device.memory.efficiency", part, |m| &mut m.device.memory.efficiency),
        FitParameter::new("device.launch", (1e-8, 1e-3), |m| &mut m.device.launch),
    ];
    let products = [
        FitParameter::new("device.products.efficiency", part, |m| &mut m.device.products.efficiency),
        FitParameter::new("device.products.depth", (1.0, 4096.0), |m| &mut m.device.products.depth),
    ];
    let forward = [FitParameter::new("device.attention.forward", part, |m| &mut m.device.attention.forward)];
    let backward = [FitParameter::new("device.attention.backward", part, |m| &mut m.device.attention.backward)];
    let bytes = of(&|f| matches!(f, Family::Loops { .. } | Family::Scatter));
    let families = [
        ("loops and scatters", &memory[..], bytes),
        (Family::Gemm.describe(), &products[..], of(&|f| *f == Family::Gemm)),
        (Family::Attention.describe(), &forward[..], of(&|f| *f == Family::Attention)),
        (Family::AttentionGrad.describe(), &backward[..], of(&|f| *f == Family::AttentionGrad)),
    ];
    let each =
        |(what, knobs, samples): (&str, &[FitParameter], Vec<Sample>)| fit(machine, what, if is_fitted { knobs } else { &[] }, &samples, source);
    families.into_iter().filter_map(each).collect()
}

/// Fits each level of links, by the exchanges that go no further.
pub fn links(machine: &mut Machine, times: &[ExchangeTime], source: &str) -> Vec<Fit> {
    let mut all = vec![];
    for level in 0..machine.links.len() {
        let own = times.iter().filter(|t| Reach::of(machine, &t.ranks).top() == level);
        let sample = |t: &ExchangeTime| {
            let (t, seconds) = (t.clone(), t.seconds);
            let predicted = move |m: &Machine| match t.kind {
                Some(kind) => links::collective(m, kind, &Reach::of(m, &t.ranks), t.bytes).seconds(),
                None => links::message(m, t.ranks[0], t.ranks[1], t.bytes).seconds(),
            };
            Sample { weight: 1.0, seconds, predicted: Box::new(predicted) }
        };
        let samples: Vec<Sample> = own.map(sample).collect();
        if samples.is_empty() {
            continue;
        }
        let name = machine.links[level].name.clone();
        // Nothing else says what a core copies a second, unlike a cable's rate, so the rate itself is fitted.
        let rate = if machine.is_cpu() {
            let link = &mut machine.links[level];
            link.bytes_per_second.value *= link.efficiency.value;
            link.efficiency = Figure { value: 1.0, ..link.bytes_per_second.clone() };
            FitParameter::new(format!("links.{name}.bytes_per_second"), (1e6, 1e13), move |m| &mut m.links[level].bytes_per_second)
        } else {
            FitParameter::new(format!("links.{name}.efficiency"), (1e-3, 1.0), move |m| &mut m.links[level].efficiency)
        };
        let knobs = [
            rate,
            FitParameter::new(format!("links.{name}.latency"), (1e-8, 1e-1), move |m| &mut m.links[level].latency),
            FitParameter::new(format!("links.{name}.hop"), (1e-8, 1e-1), move |m| &mut m.links[level].hop),
        ];
        all.extend(fit(machine, &format!("exchanges over {name}"), &knobs, &samples, source));
    }
    all
}

/// A step that was measured, of ranks with one thread each.
pub struct StepTime {
    /// The programs that were run.
    pub job: Job,
    /// That all of its ranks had.
    pub cores: u64,
    /// Of its kernels, by their symbols.
    pub kernels: BTreeMap<String, f64>,
    /// Seconds of the step, measured.
    pub seconds: f64,
}

/// Fits what a step takes beside kernels and exchanges, of CPUs: threads that wait for each other, and what is
/// between phases; then what threads wait that share cores. Links are to be known before.
pub fn steps(machine: &mut Machine, times: &[StepTime], source: &str) -> Vec<Fit> {
    let figure = |value: f64| Figure { value, source: source.into(), spread: 0.0 };
    let sample = |t: &'_ StepTime| {
        let kernels: BTreeMap<String, Figure> = t.kernels.iter().map(|(name, seconds)| (name.clone(), figure(*seconds))).collect();
        let (job, cores, measured) = (t.job.clone(), t.cores, Measured { threads: 1, kernels });
        let predicted = move |m: &Machine| {
            let known = Machine { measured: Some(measured.clone()), devices: cores, ..m.clone() };
            predict(&job, &known, Options::default()).map_or(f64::MAX, |step| step.seconds)
        };
        Sample { weight: 1.0, seconds: t.seconds, predicted: Box::new(predicted) }
    };
    let is_crowded = |t: &&StepTime| t.job.mesh.world() > t.cores;
    let (crowded, apart): (Vec<_>, Vec<_>) = times.iter().partition(is_crowded);
    let [crowded, apart] = [crowded, apart].map(|times| times.into_iter().map(sample).collect::<Vec<Sample>>());
    let mut all = vec![];
    if apart.len() >= 2 {
        machine.host.wake.get_or_insert_with(|| figure(3e-5));
        let knobs = [
            FitParameter::new("host.wake", (1e-8, 1e-2), |m| m.host.wake.as_mut().expect("invariant: it was set")),
            FitParameter::new("device.phase", (1e-8, 1e-1), |m| &mut m.device.phase),
        ];
        all.extend(fit(machine, "steps of ranks with a core each", &knobs, &apart, source));
    }
    if !crowded.is_empty() {
        machine.host.crowded_wake.get_or_insert_with(|| figure(3e-5));
        let wake = FitParameter::new("host.crowded_wake", (1e-8, 1e-2), |m| m.host.crowded_wake.as_mut().expect("invariant: it was set"));
        all.extend(fit(machine, "steps of ranks that share cores", &[wake], &crowded, source));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Reduce;

    #[test]
    fn numbers_are_found_again_from_times_that_they_gave() {
        let mut machine = Machine::named("cpu").expect("a machine");
        let mut real = machine.clone();
        let link = &mut real.links[0];
        (link.efficiency.value, link.latency.value, link.hop.value) = (0.31, 7e-6, 3e-6);
        let kinds = [Collective::AllReduce(Reduce::Sum), Collective::AllGather, Collective::Shift];
        let sizes = kinds.into_iter().flat_map(|kind| (8..24).map(move |k| (kind, 1u64 << k)));
        let times: Vec<ExchangeTime> = sizes
            .map(|(kind, bytes)| {
                let ranks = vec![0, 1];
                let seconds = links::collective(&real, kind, &Reach::of(&real, &ranks), bytes).seconds();
                ExchangeTime { kind: Some(kind), ranks, bytes, seconds }
            })
            .collect();
        let fits = links(&mut machine, &times, "profile");
        assert!(fits.len() == 1 && fits[0].samples == 48 && fits[0].before > 0.3, "{fits:?}");
        assert!(fits[0].after < 0.01 && fits[0].most < 0.05, "{fits:?}");
        let off = |found: f64, real: f64| (found / real - 1.0).abs();
        let (found, rate) = (&machine.links[0], 0.31 * real.links[0].bytes_per_second.value);
        assert!(off(found.bytes_per_second.value, rate) < 0.01 && found.efficiency.value == 1.0, "{found:?}");
        assert!(off(found.hop.value + found.latency.value, 1e-5) < 0.05, "{found:?}");
        assert!([&found.bytes_per_second, &found.latency, &found.hop].iter().all(|f| f.source == "profile"), "{found:?}");
        // One measurement that is wrong by a factor of ten hardly changes the fit.
        let mut times = times;
        times[3].seconds *= 10.0;
        links(&mut machine, &times, "profile");
        assert!(off(machine.links[0].bytes_per_second.value, rate) < 0.02, "{:?}", machine.links[0]);
        let before = machine.clone();
        assert_eq!((links(&mut machine, &[], "nothing"), steps(&mut machine, &[], "nothing"), &machine), (vec![], vec![], &before));
    }
}
