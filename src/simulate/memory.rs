//! What ranks have in use while a predicted step goes on.

use crate::pages::numbers::of;
use ir::program::{Job, Space, Stream};
use passes::report::footprint::MemoryCategory;
use passes::report::in_use::{InUse, MemoryOwner};
use serde::Serialize;
use simulate::play::Slice;
use simulate::step::on_device;
use simulate::tape::Costs;
use simulate::timeline::{call, shares};
use std::collections::BTreeMap;

/// Points of a curve.
const POINTS: usize = 400;
/// Steps from nothing to the peak.
const STEPS: u64 = 20_000;
/// Owners that have a curve of their own.
const OWNERS: usize = 12;

/// What a rank of a stage has in use of its device, over a step.
#[derive(Debug, Serialize)]
pub struct MemoryCurve {
    /// What bytes are for, and the line of the text that they are due to; of a kind, the
    /// lines that own little last and together.
    pub owners: Vec<OwnerCurve>,
    /// Owners have their bytes in units of so many: whole numbers that a picture tells apart.
    pub unit: u64,
    /// Bytes of all owners at their highest point, and of its arenas.
    pub peak: u64,
    pub planned: u64,
}

#[derive(Debug, Serialize)]
pub struct OwnerCurve {
    pub label: String,
    /// Index in [`MemoryCategory::ALL`].
    pub kind: usize,
    /// The most in each part of the step, in the curve's unit.
    pub bytes: Vec<u64>,
}

/// Slices of the compute streams of all stages, in the order of the simulation.
#[derive(Default)]
pub struct ComputeSlices(BTreeMap<usize, Vec<Slice>>);

impl ComputeSlices {
    /// Keeps a slice of a compute stream.
    pub fn add(&mut self, slice: &Slice) {
        if slice.stream == Stream::Compute {
            self.0.entry(slice.stage).or_default().push(*slice);
        }
    }

    /// The curves of all stages, from one time to another.
    pub fn curves(&self, job: &Job, costs: &Costs<'_>, (from, to): (f64, f64)) -> Vec<MemoryCurve> {
        let mut shares = Shares::default();
        (0..job.stages.len()).map(|stage| self.curve(job, costs, stage, (from, to), &mut shares)).collect()
    }

    fn curve(&self, job: &Job, costs: &Costs<'_>, stage: usize, (from, to): (f64, f64), shares: &mut Shares) -> MemoryCurve {
        let used = InUse::of(job, stage, Space::Device);
        let totals = used.totals();
        let bin = |time: f64| (((time - from) / (to - from) * POINTS as f64) as usize).min(POINTS - 1);
        // For each part of the step, `most` has the moment at which most memory is in use. While a rank waits, the
        // moment before counts.
        let mut most: Vec<Option<usize>> = vec![None; POINTS];
        let mut last: Vec<Option<usize>> = vec![None; POINTS];
        for slice in self.0.get(&stage).into_iter().flatten() {
            let time = |part: f64| slice.start + (slice.end - slice.start) * part;
            for (command, begin, end) in shares.of(job, costs, slice) {
                let moment = used.moment(slice.phase, slice.call as usize, *command as usize);
                for k in bin(time(*begin))..=bin(time(*end)) {
                    most[k] = most[k].filter(|m| totals[*m] >= totals[moment]).or(Some(moment));
                    last[k] = Some(moment);
                }
            }
        }
        // Until the first command begins, memory is as at the end of the step before.
        let mut before = last.iter().flatten().next_back().copied().unwrap_or(0);
        let points: Vec<usize> = (0..POINTS)
            .map(|k| {
                let point = most[k].unwrap_or(before);
                before = last[k].unwrap_or(before);
                point
            })
            .collect();
        let mut moments = points.clone();
        moments.sort_unstable();
        moments.dedup();
        let by_owner = if totals.is_empty() { vec![] } else { used.by_owner(&moments) };
        let at = |point: usize| moments.partition_point(|m| *m < point);
        let curve = |owner: usize| -> Vec<u64> { points.iter().map(|p| by_owner.get(at(*p)).map_or(0, |o| o[owner])).collect() };
        let mut all: Vec<(MemoryOwner, Vec<u64>)> = used.owners.iter().enumerate().map(|(k, whose)| (*whose, curve(k))).collect();
        let greatest = |bytes: &[u64]| bytes.iter().copied().max().unwrap_or(0);
        all.retain(|(_, bytes)| greatest(bytes) > 0);
        let peak = (0..POINTS).map(|k| all.iter().map(|(_, bytes)| bytes[k]).sum()).max().unwrap_or(0);
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(greatest(bytes)));
        let mut rest = all.split_off(all.len().min(OWNERS));
        let unit = (peak / STEPS).max(1);
        all.iter_mut().chain(&mut rest).flat_map(|o| &mut o.1).for_each(|bytes| *bytes = (*bytes + unit / 2) / unit);
        let number = |kind: MemoryCategory| MemoryCategory::ALL.iter().position(|k| *k == kind).unwrap_or(0);
        let mut owners: Vec<OwnerCurve> = vec![];
        for kind in MemoryCategory::ALL {
            let (own, few) = (all.iter().filter(|o| o.0.0 == kind), rest.iter().filter(|o| o.0.0 == kind));
            owners.extend(own.map(|(whose, bytes)| OwnerCurve { label: label(job, *whose), kind: number(kind), bytes: bytes.clone() }));
            let few: Vec<&Vec<u64>> = few.map(|o| &o.1).collect();
            if !few.is_empty() {
                let bytes = (0..POINTS).map(|k| few.iter().map(|bytes| bytes[k]).sum()).collect();
                owners.push(OwnerCurve { label: format!("{} of {}", kind.name(), of(few.len() as u64, "other line")), kind: number(kind), bytes });
            }
        }
        MemoryCurve { owners, unit, peak, planned: on_device(job, &job.stages[stage]) }
    }
}

fn label(job: &Job, (kind, line): MemoryOwner) -> String {
    let place = line.and_then(|(file, line)| Some(format!("{}:{line}", job.sources.get(usize::from(file))?.name)));
    place.map_or_else(|| kind.name().to_owned(), |place| format!("{} of {place}", kind.name()))
}

/// A program, a body, and the first and last command of what a stream does without an event between.
type CommandRun = (u32, u32, u32, u32);

/// Of such: the commands, with when each begins and ends, as parts of all of it.
#[derive(Default)]
struct Shares(BTreeMap<CommandRun, Vec<(u32, f64, f64)>>);

impl Shares {
    fn of(&mut self, job: &Job, costs: &Costs<'_>, slice: &Slice) -> &[(u32, f64, f64)] {
        let call = call(job, slice);
        let key = (job.stages[slice.stage].program, call.body.0, slice.first, slice.last);
        self.0.entry(key).or_insert_with(|| {
            let shares = shares(job, costs, slice);
            let mut sum = 0.0;
            let within = |(at, part): (u32, f64)| {
                sum += part;
                (at, sum - part, sum)
            };
            shares.into_iter().map(within).collect()
        })
    }
}
