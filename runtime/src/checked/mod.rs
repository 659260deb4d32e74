//! A device that holds every launch of another one to what the kernel's body says, or times it.
//!
//! Kernels are checked where they are used, on the operands of a step of training: numbers as they come, indices that
//! mean something, outputs in place. What a launch is to write is NaN before it, so an element that is left out is
//! found. Of launches too large to be interpreted a part is ([`ir::kernel::part`]).

mod watch;

use crate::device::{Device, DeviceError, Element, Launches, Location, Memory, ThreadResources};
use crate::strides::{offsets, reach};
use ir::graph::Type;
use ir::kernel::distance::{Distance, narrowest, rms};
use ir::kernel::part::PartialKernel;
use ir::kernel::{Kernel, dense};
use ir::op::DType;
use ir::program::{Job, KernelId};
use ir::random::mix;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;
use watch::watched;

/// What became of all launches of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// How many launches of the kernel were checked.
    pub launches: u64,
    /// Largest distance from the kernel's definition, over all launches.
    pub definition: Distance,
    /// From what another device makes of the same operands.
    pub other: Option<Distance>,
    /// The greatest distances that are still right, by the kernel's narrowest dtype.
    pub allowed: Distance,
    /// What a thread of the kernel takes of a multiprocessor; none if the device does not say.
    pub needs: Option<ThreadResources>,
}

impl Verdict {
    /// Whether all distances that were measured are within what is allowed.
    pub fn is_right(&self) -> bool {
        [Some(self.definition), self.other].into_iter().flatten().all(|d| d.is_within(self.allowed))
    }
}

/// Runs of elements that lie together: the first one's offset and their number.
fn runs(kernel: &Kernel, ty: &Type, strides: &[u64]) -> Vec<(u64, u64)> {
    let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
    let elements = sizes.iter().product::<u64>();
    if strides == dense(&kernel.body.dims, ty) && reach(&sizes, strides) == elements {
        return vec![(0, elements)];
    }
    let mut out: Vec<(u64, u64)> = vec![];
    offsets(&sizes, strides, |offset| match out.last_mut() {
        Some((first, n)) if *first + *n == offset => *n += 1,
        Some(_) | None => out.push((offset, 1)),
    });
    out
}

/// The last digit of an f32.
const DIGIT: f64 = 1.0 / (1 << 23) as f64;

/// The size of each output without cancellation: how much it changes when the last digits of the operands do, in
/// parts of that change. Sums of numbers that cancel, as the gradient of a bias of keys, are as good as the last
/// digits of their terms and no better. Zero for kernels in 16-bit floats, which round in steps.
fn sizes(kernel: &Kernel, run: impl Fn(&[Vec<f64>]) -> Vec<Vec<f64>>, operands: &[Vec<f64>], made: &[Vec<f64>]) -> Vec<f64> {
    if narrowest(kernel) != DType::F32 {
        return vec![0.0; made.len()];
    }
    let changed = |(x, k): (&f64, u64)| if mix(k) & 1 == 0 { x * (1.0 + DIGIT) } else { x * (1.0 - DIGIT) };
    let inputs = kernel.inputs.iter().zip(operands);
    let operands: Vec<Vec<f64>> =
        inputs.map(|(i, values)| if i.ty.dtype.is_float() { values.iter().zip(0..).map(changed).collect() } else { values.clone() }).collect();
    let others = run(&operands);
    made.iter().zip(&others).map(|(a, b)| rms(a.iter().zip(b).map(|(a, b)| a - b)) / DIGIT).collect()
}

/// An operand of a kernel, where it is.
struct PlacedOperand {
    dtype: DType,
    at: Location,
    runs: Vec<(u64, u64)>,
    accumulates: bool,
}

impl PlacedOperand {
    fn all(kernel: &Kernel, args: &[Location]) -> (Vec<PlacedOperand>, Vec<PlacedOperand>) {
        let of = |ty: &Type, strides: &[u64], at: &Location, accumulates| PlacedOperand {
            dtype: ty.dtype,
            at: *at,
            runs: runs(kernel, ty, strides),
            accumulates,
        };
        let (inputs, outputs) = args.split_at(kernel.inputs.len());
        let inputs = kernel.inputs.iter().zip(inputs).map(|(i, at)| of(&i.ty, &i.strides, at, false));
        let outputs = kernel.outputs.iter().zip(outputs).map(|(o, at)| of(&kernel.body[o.value].ty, &o.strides, at, o.accumulate));
        (inputs.collect(), outputs.collect())
    }

    fn place(&self, first: u64) -> Location {
        Location { byte: self.at.byte + first * self.dtype.bytes(), ..self.at }
    }

    fn read(&self, memory: &dyn Device) -> Vec<f64> {
        let mut out = vec![0.0; self.runs.iter().map(|r| r.1 as usize).sum()];
        let mut left = &mut out[..];
        for (first, n) in &self.runs {
            let (now, rest) = std::mem::take(&mut left).split_at_mut(*n as usize);
            memory.read(self.place(*first), self.dtype, now);
            left = rest;
        }
        out
    }

    fn write(&self, memory: &mut dyn Device, mut values: &[f64]) {
        for (first, n) in &self.runs {
            let (now, rest) = values.split_at(*n as usize);
            memory.write(self.place(*first), self.dtype, now);
            values = rest;
        }
    }

    /// Makes all elements such as no kernel leaves: NaN, -1, 255.
    fn poison(&self, memory: &mut dyn Device) {
        for (first, n) in &self.runs {
            memory.store(self.place(*first), self.dtype, &vec![0xff; (n * self.dtype.bytes()) as usize]);
        }
    }

    fn overlaps(&self, other: &PlacedOperand) -> bool {
        let span = |o: &PlacedOperand| {
            let end = o.runs.iter().map(|(first, n)| first + n).max().unwrap_or(0);
            (o.at.arena, o.at.byte, o.at.byte + end * o.dtype.bytes())
        };
        let (a, b) = (span(self), span(other));
        a.0 == b.0 && a.1 < b.2 && b.1 < a.2
    }
}

/// What is done about every launch.
pub enum Instrumentation<'a> {
    /// Holds it to its definition, and to what another device with the same arenas makes of the same operands.
    Check {
        /// A second device that runs the same kernels, if there is one.
        other: Option<Box<dyn Device + 'a>>,
        /// What came of the launches so far, by the kernel's number in the job.
        verdicts: BTreeMap<u32, Verdict>,
    },
    /// Repeats the first of each kernel. Sums that kernels add to grow by it: nothing that is computed then means
    /// anything.
    Time {
        /// Seconds of one launch, by the kernel's number in the job.
        launches: BTreeMap<u32, f64>,
    },
}

/// A device of which every launch is checked or timed.
pub struct InstrumentedDevice<'a, 't> {
    job: &'a Job,
    device: Box<dyn Device + 'a>,
    task: &'t mut Instrumentation<'a>,
}

impl<'a, 't> InstrumentedDevice<'a, 't> {
    /// Passes everything on to `device`, and does the task at launches of the job's kernels.
    pub fn new(job: &'a Job, device: Box<dyn Device + 'a>, task: &'t mut Instrumentation<'a>) -> InstrumentedDevice<'a, 't> {
        InstrumentedDevice { job, device, task }
    }
}

/// Points of a kernel's loops that are interpreted, of one launch.
const POINTS: u64 = 1 << 23;

/// Tensors of a kernel, cut to a part of it if there is one.
fn cut<'t>(part: Option<&PartialKernel>, types: impl Iterator<Item = &'t Type>, values: &[Vec<f64>]) -> Vec<Vec<f64>> {
    match part {
        None => values.to_vec(),
        Some(part) => types.zip(values).map(|(ty, v)| part.of_values(ty, v)).collect(),
    }
}

fn check(
    device: &mut dyn Device,
    (id, kernel): (KernelId, &Kernel),
    args: &[Location],
    scalars: &[f64],
    other: &mut Option<Box<dyn Device + '_>>,
    verdicts: &mut BTreeMap<u32, Verdict>,
) -> Result<(), DeviceError> {
    let (inputs, outputs) = PlacedOperand::all(kernel, args);
    let operands: Vec<Vec<f64>> = inputs.iter().map(|i| i.read(device)).collect();
    // Outputs that accumulate add to these values.
    let before: Vec<Vec<f64>> = outputs.iter().map(|o| if o.accumulates { o.read(device) } else { vec![] }).collect();
    let in_place: Vec<bool> = outputs.iter().map(|o| o.accumulates || inputs.iter().any(|i| i.overlaps(o))).collect();
    let launch = |device: &mut dyn Device| {
        outputs.iter().zip(&in_place).filter(|(_, stays)| !**stays).for_each(|(o, _)| o.poison(device));
        device.launch(id, args, scalars)?;
        device.synchronize()?;
        Ok::<_, DeviceError>(outputs.iter().map(|o| o.read(device)).collect::<Vec<_>>())
    };
    let there = match other {
        None => None,
        Some(other) => {
            inputs.iter().zip(&operands).for_each(|(i, values)| i.write(other.as_mut(), values));
            outputs.iter().zip(&before).filter(|(o, _)| o.accumulates).for_each(|(o, values)| o.write(other.as_mut(), values));
            Some(launch(other.as_mut())?)
        }
    };
    let here = watched(kernel, || launch(device))?;

    let part = PartialKernel::of(kernel, POINTS, u64::from(id.0));
    let run = |operands: &[Vec<f64>]| part.as_ref().map_or_else(|| kernel.run(operands, scalars), |p| p.run(operands, scalars));
    let types = || kernel.outputs.iter().map(|o| &kernel.body[o.value].ty);
    let operands = cut(part.as_ref(), kernel.inputs.iter().map(|i| &i.ty), &operands);
    let mut want = run(&operands);
    let sizes = sizes(kernel, run, &operands, &want);
    for ((ty, values), (o, before)) in types().zip(&mut want).zip(outputs.iter().zip(&before)) {
        if o.accumulates {
            let before = cut(part.as_ref(), std::iter::once(ty), std::slice::from_ref(before)).concat();
            values.iter_mut().zip(before).for_each(|(x, b)| *x += b);
        }
        values.iter_mut().for_each(|x| *x = o.dtype.round(*x));
    }
    let distance = |got: &[Vec<f64>], want: &[Vec<f64>]| {
        let each = got.iter().zip(want).zip(&sizes);
        each.map(|((g, w), size)| Distance::of(g, w, *size)).fold(Distance::default(), Distance::or)
    };
    let mut definition = distance(&cut(part.as_ref(), types(), &here), &want);
    let nan = |list: &[Vec<f64>]| list.iter().flatten().any(|x| x.is_nan());
    if part.is_some() && nan(&here) && !nan(&want) {
        // A NaN that remains outside of the interpreted part was not written by the kernel.
        definition.element = f64::INFINITY;
    }
    let allowed = Distance::allowed(narrowest(kernel));
    let none = Verdict { launches: 0, definition: Distance::default(), other: None, allowed, needs: device.needs(id) };
    let verdict = verdicts.entry(id.0).or_insert(none);
    verdict.launches += 1;
    verdict.definition = verdict.definition.or(definition);
    verdict.other = there.map(|t| distance(&here, &t).or(verdict.other.unwrap_or_default()));
    Ok(())
}

/// Repetitions of a launch that are timed: as many as take a tenth of a second, at least these.
const LEAST: u32 = 3;
const MOST: u32 = 1000;
const LONG: f64 = 0.1;

/// Seconds of one launch among many: the rest of what a list of launches costs falls out of the difference between a
/// short and a long one.
fn time(device: &mut dyn Device, id: KernelId, args: &[Location], scalars: &[f64]) -> Result<f64, DeviceError> {
    let mut list = |n: u32| {
        let run = |device: &mut dyn Device| {
            (0..n).try_for_each(|_| device.launch(id, args, scalars))?;
            device.synchronize()
        };
        // The first run captures the list, and is not timed.
        run(device)?;
        let begun = Instant::now();
        run(device)?;
        Ok::<f64, DeviceError>(begun.elapsed().as_secs_f64())
    };
    let one = list(1)?;
    let n = ((LONG / one.max(1e-9)) as u32).clamp(LEAST, MOST);
    let many = list(n)?;
    Ok(((many - one) / f64::from(n - 1)).max(1e-9))
}

impl Memory for InstrumentedDevice<'_, '_> {
    fn element(&self, dtype: DType) -> Element {
        self.device.element(dtype)
    }

    fn load(&self, at: Location, dtype: DType, out: &mut [u8]) {
        self.device.load(at, dtype, out);
    }

    fn store(&mut self, at: Location, dtype: DType, bytes: &[u8]) {
        self.device.store(at, dtype, bytes);
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        self.device.read(at, dtype, out);
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        self.device.write(at, dtype, values);
    }
}

impl Launches for InstrumentedDevice<'_, '_> {
    fn needs(&self, kernel: KernelId) -> Option<ThreadResources> {
        self.device.needs(kernel)
    }

    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        match &mut *self.task {
            Instrumentation::Check { other, verdicts } => {
                check(self.device.as_mut(), (kernel, &self.job.kernels[kernel.index()]), args, scalars, other, verdicts)
            }
            Instrumentation::Time { launches } => {
                if let std::collections::btree_map::Entry::Vacant(place) = launches.entry(kernel.0) {
                    self.device.synchronize()?;
                    let device = self.device.as_mut();
                    place.insert(watched(&self.job.kernels[kernel.index()], || time(device, kernel, args, scalars))?);
                }
                self.device.launch(kernel, args, scalars)
            }
        }
    }
}

impl Device for InstrumentedDevice<'_, '_> {
    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        self.device.fill(at, dtype, count, value);
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.device.synchronize()
    }

    fn discard(&mut self, at: Location, bytes: u64) {
        self.device.discard(at, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{CommandOrder, PersistentId, Rank, Step, arena_bytes};
    use crate::fixture::{self, Split};
    use crate::host::{Tensor, Whole};
    use crate::loopback::{Hub, TurnOrder, run_phase};
    use crate::reference::{Plans, Reference};
    use ir::program::ProgramPhase;

    /// A device that runs another job's kernels in place of the right ones.
    fn checked(change: impl FnOnce(&mut Job), with_other: bool) -> BTreeMap<u32, Verdict> {
        let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 1, tp: 1 });
        let mut changed = job.clone();
        change(&mut changed);
        let (plans, right) = (Plans::new(&changed), Plans::new(&job));
        let (program, bytes) = (&job.programs[0], arena_bytes(&job, 0));
        let other: Option<Box<dyn Device>> = if with_other { Some(Box::new(Reference::new(&job, &right, program, bytes))) } else { None };
        let mut task = Instrumentation::Check { other, verdicts: BTreeMap::new() };
        let device = InstrumentedDevice::new(&job, Box::new(Reference::new(&changed, &plans, program, bytes)), &mut task);
        let mut rank = Rank::new(&job, 0, device, CommandOrder::List);
        let (params, inputs) = (fixture::params(), fixture::inputs());
        rank.initialise(|held| match held {
            PersistentId::Param(p) => Some(&params[&job.params[p as usize].name] as &dyn Whole),
            PersistentId::State(..) | PersistentId::Table(_) => None,
        });
        let batch: Vec<Tensor> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
        let step = Step { number: 1, learning_rate: 0.25, loss_scale: 1.0, seed: 0, batch: &batch };
        for phase in [ProgramPhase::Train, ProgramPhase::Update] {
            run_phase(&job, std::slice::from_mut(&mut rank), &mut Hub::new(&job), phase, &step, &mut TurnOrder::Long).unwrap();
        }
        drop(rank);
        match task {
            Instrumentation::Check { verdicts, .. } => verdicts,
            Instrumentation::Time { .. } => unreachable!(),
        }
    }

    #[test]
    fn kernels_that_do_as_they_say_are_right_on_every_launch() {
        for with_other in [false, true] {
            let verdicts = checked(|_| {}, with_other);
            assert_eq!(verdicts.len(), 6);
            // There are two microbatches.
            assert!(verdicts.values().any(|v| v.launches == 2));
            assert!(
                verdicts.values().all(|v| v.is_right() && v.definition == Distance::default() && v.other.is_some() == with_other),
                "{verdicts:?}"
            );
        }
    }

    #[test]
    fn a_kernel_that_computes_something_else_is_found_by_either() {
        // The kernel now returns the sum of the squares in place of its root.
        let verdicts = checked(
            |job| {
                let arg = job.kernels[4].body[job.kernels[4].outputs[0].value].args[0];
                job.kernels[4].outputs[0].value = arg;
            },
            true,
        );
        let wrong: Vec<_> = verdicts.iter().filter(|v| !v.1.is_right()).map(|v| *v.0).collect();
        assert_eq!(wrong, [4], "{verdicts:?}");
        assert!(verdicts[&4].other.unwrap().element > 0.1, "{verdicts:?}");
    }

    /// Whatever is left out, what is left is as of the whole.
    #[test]
    fn a_part_of_a_kernel_computes_that_part_of_its_results() {
        let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 1, tp: 1 });
        let mut parts = 0;
        for (kernel, seed) in job.kernels.iter().zip(0..) {
            let values = |ty: &Type, k: u64| -> Vec<f64> {
                (0..kernel.body.dims.elements(&ty.dims)).map(|i| (mix(i ^ k << 32 ^ seed) % 7) as f64 - 3.0).collect()
            };
            let operands: Vec<Vec<f64>> = kernel.inputs.iter().zip(0..).map(|(i, k)| values(&i.ty, k)).collect();
            let scalars = vec![1.0; kernel.scalars.len()];
            let whole = kernel.run(&operands, &scalars);
            for most in [1, 5, 50] {
                let Some(part) = PartialKernel::of(kernel, most, seed) else { continue };
                parts += 1;
                part.kernel.verify().unwrap();
                let fewer: Vec<Vec<f64>> = kernel.inputs.iter().zip(&operands).map(|(i, v)| part.of_values(&i.ty, v)).collect();
                let made = part.run(&fewer, &scalars);
                for ((o, all), some) in kernel.outputs.iter().zip(&whole).zip(&made) {
                    assert_eq!(&part.of_values(&kernel.body[o.value].ty, all), some, "{}", ir::text::print_kernel(kernel));
                }
            }
        }
        assert!(parts > 3, "{parts}");
    }
}
