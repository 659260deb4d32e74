//! Which places of a kernel's results are looked at, and what is to be there.

use crate::check::memory::{self, MappedMemory};
use crate::check::{ResultElement, Wrong, rounding};
use ir::dim::Dim;
use ir::eval::Change;
use ir::graph::Type;
use ir::kernel::distance::{Distance, narrowest, rms};
use ir::kernel::part::{PartLimits, PartialKernel, all_points};
use ir::kernel::{Kernel, dense};
use ir::op::{DType, Op};
use ir::random::mix;

/// A run of some or all tiles.
pub struct KernelRun {
    pub inputs: Vec<MappedMemory>,
    pub outputs: Vec<MappedMemory>,
    /// What those outputs hold before that are added to.
    pub before: Vec<Option<MappedMemory>>,
    pub scalars: Vec<f64>,
    /// Whether all tiles ran.
    pub whole: bool,
    /// An output beyond whose memory tiles wrote.
    pub beyond: Option<usize>,
    /// Whether it is code for a GPU.
    pub emulated: bool,
}

/// What is interpreted of one result: at once, in how many parts at most, and altogether.
const MOST: PartLimits = PartLimits { points: 1 << 19, places: 64 };
const PARTS: usize = 4;
const ALL: u64 = 1 << 21;
/// A part that takes more is left out.
const LARGEST: u64 = 1 << 24;
/// Indices that are tried to find what some tiles wrote.
const TRIED: u64 = 1 << 13;
/// Indices along a dim that are looked at around a place.
const ALONG: u64 = 1 << 12;

/// A result of a kernel, where it lies.
struct Output<'a> {
    kernel: &'a Kernel,
    number: usize,
    run: &'a KernelRun,
    ty: &'a Type,
    sizes: Vec<u64>,
}

impl Output<'_> {
    fn strides(&self) -> &[u64] {
        &self.kernel.outputs[self.number].strides
    }

    fn offset(&self, at: &[u64]) -> u64 {
        at.iter().zip(self.strides()).map(|(i, s)| i * s).sum()
    }

    /// Whether a tile wrote there, as far as can be seen.
    fn is_written(&self, offset: u64) -> bool {
        let now = &self.run.outputs[self.number];
        match &self.run.before[self.number] {
            Some(before) => now.get(self.ty.dtype, offset).to_bits() != before.get(self.ty.dtype, offset).to_bits(),
            None => !now.is_unwritten(self.ty.dtype, offset),
        }
    }

    /// Places that tiles wrote: the first, the last, and others at random.
    fn seeds(&self, seed: u64) -> Vec<Vec<u64>> {
        let first = vec![0; self.sizes.len()];
        let last: Vec<u64> = self.sizes.iter().map(|n| n - 1).collect();
        let random = |k: u64| self.sizes.iter().zip(0..).map(|(n, d)| mix(seed ^ mix(k << 8 | d)) % n).collect::<Vec<u64>>();
        let all = [first, last].into_iter().chain((0..TRIED).map(random));
        all.filter(|at| self.is_written(self.offset(at))).take(PARTS).collect()
    }

    /// Indices along a dim at which a place like this one is written.
    fn along(&self, at: &[u64], d: Dim) -> Vec<u64> {
        let Some(k) = self.ty.dims.iter().position(|e| *e == d) else { return vec![0] };
        let (first, stride) = (at[k].saturating_sub(ALONG / 2), self.strides()[k]);
        let base = self.offset(at) - at[k] * stride;
        (first..self.sizes[k].min(first + ALONG)).filter(|i| self.is_written(base + i * stride)).collect()
    }

    /// All places in order, while `body` says so.
    fn each(&self, body: &mut dyn FnMut(&[u64]) -> bool) {
        let mut at = vec![0; self.sizes.len()];
        for _ in 0..self.sizes.iter().product::<u64>() {
            if !body(&at) {
                return;
            }
            for k in (0..at.len()).rev() {
                at[k] += 1;
                if at[k] < self.sizes[k] {
                    break;
                }
                at[k] = 0;
            }
        }
    }

    fn place(&self, mut number: u64, of: &PartialKernel) -> Vec<(String, u64)> {
        let mut out = vec![];
        for d in self.ty.dims.iter().rev() {
            let n = of.kernel.body.dims.size(*d);
            let i = of.left(*d).map_or(number % n, |left| left[(number % n) as usize]);
            out.push((self.kernel.body.dims.name(*d).to_string(), i));
            number /= n;
        }
        out.reverse();
        out
    }
}

/// A part of a result, interpreted.
struct Interpreted {
    part: PartialKernel,
    operands: Vec<Vec<f64>>,
    offsets: Vec<u64>,
    want: Vec<f64>,
    got: Vec<Option<f64>>,
}

impl Interpreted {
    fn new(output: &Output, part: PartialKernel) -> Interpreted {
        let (kernel, run, dtype) = (output.kernel, output.run, output.ty.dtype);
        let mut operands = vec![vec![]; kernel.inputs.len()];
        for node in &part.kernel.body.nodes {
            if let Op::Input(i) = node.op {
                let (input, memory) = (&kernel.inputs[i as usize], &run.inputs[i as usize]);
                let offsets = part.offsets(&input.ty, &input.strides);
                operands[i as usize] = offsets.into_iter().map(|o| memory.get(input.ty.dtype, o)).collect();
            }
        }
        let offsets = part.offsets(output.ty, output.strides());
        let got =
            |o: &u64| (run.whole && run.before[output.number].is_some() || output.is_written(*o)).then(|| run.outputs[output.number].get(dtype, *o));
        let got = offsets.iter().map(got).collect();
        let mut new = Interpreted { part, operands, offsets, want: vec![], got };
        new.want = new.run(output, &new.operands, &mut |_, _, _, _| {});
        new
    }

    /// What the body says on these operands, where values on the way are changed.
    fn run(&self, output: &Output, operands: &[Vec<f64>], change: &mut Change<'_>) -> Vec<f64> {
        let mut values = self.part.run_changed(operands, &output.run.scalars, change).concat();
        let dtype = output.ty.dtype;
        if let Some(before) = &output.run.before[output.number] {
            values.iter_mut().zip(&self.offsets).for_each(|(x, o)| *x += before.get(dtype, *o));
        }
        values.iter_mut().for_each(|x| *x = dtype.round(*x));
        values
    }

    /// How far each place goes when the last digits of the operands change.
    fn unsteady(&self, output: &Output) -> Vec<f64> {
        let mut most = vec![0.0f64; self.want.len()];
        for times in 0..4 {
            let other = |(x, k): (&f64, u64)| x * (1.0 + if mix(k ^ times << 56) & 1 == 0 { DIGITS } else { -DIGITS });
            let inputs = output.kernel.inputs.iter().zip(&self.operands);
            let others: Vec<Vec<f64>> =
                inputs.map(|(i, values)| if i.ty.dtype.is_float() { values.iter().zip(0..).map(other).collect() } else { values.clone() }).collect();
            self.widen(&mut most, &self.run(output, &others, &mut |_, _, _, _| {}));
        }
        most
    }

    /// How far each place goes when sums are as wrong as rounding may make them.
    fn rounded(&self, output: &Output) -> Vec<f64> {
        let mut most = vec![0.0f64; self.want.len()];
        for time in 0..3 {
            let mut change = rounding::change(&self.part.kernel.body, time, output.run.emulated);
            self.widen(&mut most, &self.run(output, &self.operands, &mut change));
        }
        most
    }

    fn widen(&self, most: &mut [f64], now: &[f64]) {
        most.iter_mut().zip(now.iter().zip(&self.want)).for_each(|(m, (a, b))| *m = m.max(far(*a, *b)));
    }
}

/// Relative change of operands that shows how stable a result is: more than a sum in f32 loses.
const DIGITS: f64 = 1.0 / (1 << 18) as f64;
/// How many times that change code may be off: rounding has more ways than the four that are tried.
const STEPS: f64 = 32.0;

/// How far two numbers are from each other; infinitely, if one is no number.
fn far(a: f64, b: f64) -> f64 {
    if a == b || a.is_nan() && b.is_nan() {
        return 0.0;
    }
    let d = (a - b).abs();
    if d.is_nan() { f64::INFINITY } else { d }
}

/// What rounding allows. Code for CPUs rounds to 16 bits where the body says: few results are the neighbour of what
/// they should be, and all of them together are closer than if they were not rounded to the nearest. Code for GPUs
/// rounds what tensor cores take as well, as probabilities of attention.
fn allowed(kernel: &Kernel, dtype: DType, emulated: bool) -> Distance {
    if !dtype.is_float() {
        return Distance::default();
    }
    let narrowest = narrowest(kernel);
    let most = Distance::allowed(narrowest);
    match narrowest {
        _ if emulated => most,
        DType::Bf16 => Distance { norm: 2e-3, ..most },
        DType::F16 => Distance { norm: 2.5e-4, ..most },
        DType::F32 | DType::I32 | DType::Bool => most,
    }
}

/// Holds what tiles wrote to the body, and gives the number of places that were looked at.
pub fn judge(kernel: &Kernel, run: &KernelRun, seed: u64) -> Result<u64, Wrong> {
    if let Some(output) = run.beyond {
        return Err(Wrong::Beyond(output));
    }
    let mut places = 0;
    for number in 0..kernel.outputs.len() {
        let ty = &kernel.body[kernel.outputs[number].value].ty;
        let sizes = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
        places += judge_output(&Output { kernel, number, run, ty, sizes }, seed)?;
    }
    Ok(places)
}

fn judge_output(output: &Output, seed: u64) -> Result<u64, Wrong> {
    let one = output.kernel.of_output(output.number);
    let mut parts = vec![];
    if output.run.whole {
        let most = PartLimits { points: ALL, places: MOST.places * PARTS as u64 };
        parts.push(PartialKernel::among(&one, most, seed, &mut |d| (0..one.body.dims.size(d)).collect()));
    } else {
        let mut left = ALL;
        for at in output.seeds(seed) {
            let part = PartialKernel::among(&one, MOST, seed ^ left, &mut |d| output.along(&at, d));
            let points = all_points(&part.kernel);
            parts.push(part);
            left = left.saturating_sub(points);
            if left == 0 {
                break;
            }
        }
    }
    parts.retain(|part| all_points(&part.kernel) <= LARGEST);
    let parts: Vec<Interpreted> = parts.into_iter().map(|part| Interpreted::new(output, part)).collect();
    let pairs = || parts.iter().flat_map(|p| p.got.iter().zip(&p.want)).filter_map(|(got, want)| Some(((*got)?, *want)));
    if output.run.whole
        && let Some((part, k)) = parts.iter().find_map(|p| Some((p, p.got.iter().position(Option::is_none)?)))
    {
        return Err(wrong(output, part, k));
    }
    let (got, want): (Vec<f64>, Vec<f64>) = pairs().unzip();
    let allowed = allowed(output.kernel, output.ty.dtype, output.run.emulated);
    if !Distance::of(&got, &want, 0.0).is_within(allowed) {
        // Differences that the last digits of operands, or rounding in long sums, can explain do not count.
        let scale = rms(want.iter().copied());
        let step = |(unsteady, rounded): (&f64, &f64)| STEPS * unsteady + rounded;
        let steps: Vec<Vec<f64>> = parts.iter().map(|p| p.unsteady(output).iter().zip(&p.rounded(output)).map(step).collect()).collect();
        let all = parts.iter().zip(&steps).flat_map(|(p, steps)| (0..p.want.len()).map(move |k| (p, k, steps[k])));
        let beyond: Vec<(&Interpreted, usize, f64)> = all
            .filter_map(|(p, k, step)| {
                let (far, size) = (far(p.got[k]?, p.want[k]), p.want[k].abs().max(scale));
                Some((p, k, if far <= step { 0.0 } else { (far - step) / size }))
            })
            .collect();
        let norm = rms(beyond.iter().map(|(p, k, d)| d * p.want[*k].abs().max(scale))) / scale;
        let worst = beyond.iter().max_by(|a, b| a.2.total_cmp(&b.2));
        if let Some((part, k, worst)) = worst
            && (*worst > allowed.element || norm > allowed.norm)
        {
            return Err(wrong(output, part, *k));
        }
    }
    if output.run.whole && output.run.before[output.number].is_none() {
        all_written(output)?;
    }
    if output.run.whole && !nothing_between(output) {
        return Err(Wrong::Beyond(output.number));
    }
    Ok(got.len() as u64)
}

fn wrong(output: &Output, of: &Interpreted, k: usize) -> Wrong {
    let place = ResultElement { output: output.number, index: output.place(k as u64, &of.part) };
    match of.got[k] {
        Some(got) => Wrong::Value { place, got, want: of.want[k] },
        None => Wrong::Unwritten(place),
    }
}

/// Bytes of a result up to which what lies between its elements is looked at.
const SPARSE: u64 = 1 << 22;

/// Whether what lies between the elements of a result is untouched: it may be another's.
fn nothing_between(output: &Output) -> bool {
    let dims = &output.kernel.body.dims;
    let bytes = memory::bytes(dims, output.ty, output.strides());
    if output.strides() == dense(dims, output.ty) || bytes > SPARSE {
        return true;
    }
    let (size, mut is_element) = (output.ty.dtype.bytes() as usize, vec![false; bytes as usize]);
    output.each(&mut |at| {
        is_element[output.offset(at) as usize * size..][..size].fill(true);
        true
    });
    let (now, before) = (&output.run.outputs[output.number], output.run.before[output.number].as_ref());
    is_element.iter().enumerate().all(|(byte, is_element)| *is_element || now.is_untouched(before, byte))
}

/// That all tiles together leave nothing out.
fn all_written(output: &Output) -> Result<(), Wrong> {
    let elements = output.sizes.iter().product::<u64>();
    let is_dense = output.strides() == dense(&output.kernel.body.dims, output.ty);
    if is_dense && output.run.outputs[output.number].all_written(output.ty.dtype, elements) {
        return Ok(());
    }
    let mut open = None;
    output.each(&mut |at| {
        open = (!output.is_written(output.offset(at))).then(|| at.to_vec());
        open.is_none()
    });
    let Some(at) = open else { return Ok(()) };
    let names = output.ty.dims.iter().map(|d| output.kernel.body.dims.name(*d).to_string());
    Err(Wrong::Unwritten(ResultElement { output: output.number, index: names.zip(at).collect() }))
}
