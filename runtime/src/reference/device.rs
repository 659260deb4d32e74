//! The reference device: interpreted kernels, memory of f64. What is stored as a 16-bit float is rounded to it.

use crate::device::{Device, DeviceError, Element, Launches, Location, Memory};
use crate::reference::noise::{self, Numbers};
use crate::strides::{offsets, reach};
use ir::op::DType;
use ir::program::{Arena, Job, KernelId, Program};

/// For every kernel of a job, where the elements of its operands lie.
pub struct Plans {
    kernels: Vec<KernelPlan>,
}

struct KernelPlan {
    inputs: Vec<OperandPlan>,
    outputs: Vec<(OperandPlan, bool)>,
}

struct OperandPlan {
    dtype: DType,
    layout: OperandLayout,
}

/// Offsets of an operand's elements, in elements.
enum OperandLayout {
    Dense(usize),
    Offsets(Vec<usize>),
}

impl Plans {
    /// For all kernels of a job; one serves all ranks.
    pub fn new(job: &Job) -> Plans {
        let kernels = job.kernels.iter().map(|kernel| {
            let operand = |ty: &ir::graph::Type, strides: &[u64]| {
                let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
                let elements = sizes.iter().product::<u64>();
                let layout = if strides == ir::kernel::dense(&kernel.body.dims, ty) && reach(&sizes, strides) == elements {
                    OperandLayout::Dense(elements as usize)
                } else {
                    let mut list = Vec::with_capacity(elements as usize);
                    offsets(&sizes, strides, |o| list.push(o as usize));
                    OperandLayout::Offsets(list)
                };
                OperandPlan { dtype: ty.dtype, layout }
            };
            KernelPlan {
                inputs: kernel.inputs.iter().map(|i| operand(&i.ty, &i.strides)).collect(),
                outputs: kernel.outputs.iter().map(|o| (operand(&kernel.body[o.value].ty, &o.strides), o.accumulate)).collect(),
            }
        });
        Plans { kernels: kernels.collect() }
    }
}

/// Memory has one f64 for every `unit` bytes of an arena, the smallest element of the program; so whatever shares
/// bytes in the memory plan shares memory here, and memory never written is NaN.
pub struct Reference<'a> {
    job: &'a Job,
    plans: &'a Plans,
    unit: u64,
    numbers: Numbers,
    launches: u64,
    arenas: [Vec<f64>; Arena::ALL.len()],
}

/// Bytes of the smallest element of a program.
pub(super) fn unit(program: &Program) -> u64 {
    program.buffers.iter().map(|b| b.dtype.bytes()).min().unwrap_or(4)
}

impl<'a> Reference<'a> {
    /// For a rank that runs `program`, with arenas of so many bytes, full of NaN.
    pub fn new(job: &'a Job, plans: &'a Plans, program: &Program, bytes: [u64; Arena::ALL.len()]) -> Reference<'a> {
        let unit = unit(program);
        let arenas = bytes.map(|b| vec![f64::NAN; b.div_ceil(unit) as usize]);
        Reference { job, plans, unit, numbers: Numbers::Exact, launches: 0, arenas }
    }

    /// The same, with kernels interpreted in these numbers.
    #[must_use]
    pub fn of(self, numbers: Numbers) -> Reference<'a> {
        Reference { numbers, ..self }
    }

    /// The first slot of a location, and slots per element.
    fn slots(&self, at: Location, dtype: DType) -> (&[f64], usize) {
        (&self.arenas[at.arena as usize][(at.byte / self.unit) as usize..], (dtype.bytes() / self.unit) as usize)
    }

    fn slots_mut(&mut self, at: Location, dtype: DType) -> (&mut [f64], usize) {
        (&mut self.arenas[at.arena as usize][(at.byte / self.unit) as usize..], (dtype.bytes() / self.unit) as usize)
    }

    fn gather(&self, at: Location, operand: &OperandPlan) -> Vec<f64> {
        let (slots, step) = self.slots(at, operand.dtype);
        match &operand.layout {
            OperandLayout::Dense(n) if step == 1 => slots[..*n].to_vec(),
            OperandLayout::Dense(n) => (0..*n).map(|i| slots[i * step]).collect(),
            OperandLayout::Offsets(list) => list.iter().map(|i| slots[i * step]).collect(),
        }
    }

    fn scatter(&mut self, at: Location, operand: &OperandPlan, accumulate: bool, values: &[f64]) {
        let (slots, step) = self.slots_mut(at, operand.dtype);
        let put = |slot: &mut f64, value: f64| *slot = operand.dtype.round(if accumulate { *slot + value } else { value });
        match &operand.layout {
            OperandLayout::Dense(n) => (0..*n).for_each(|i| put(&mut slots[i * step], values[i])),
            OperandLayout::Offsets(list) => list.iter().zip(values).for_each(|(i, value)| put(&mut slots[i * step], *value)),
        }
    }
}

impl Memory for Reference<'_> {
    fn element(&self, _: DType) -> Element {
        Element::F64
    }

    fn load(&self, at: Location, dtype: DType, out: &mut [u8]) {
        let (slots, step) = self.slots(at, dtype);
        for (i, bytes) in out.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&slots[i * step].to_le_bytes());
        }
    }

    fn store(&mut self, at: Location, dtype: DType, bytes: &[u8]) {
        let (slots, step) = self.slots_mut(at, dtype);
        for (i, bytes) in bytes.chunks_exact(8).enumerate() {
            slots[i * step] = dtype.round(f64::from_le_bytes(bytes.try_into().expect("invariant: eight bytes")));
        }
    }

    fn read(&self, at: Location, dtype: DType, out: &mut [f64]) {
        let (slots, step) = self.slots(at, dtype);
        out.iter_mut().enumerate().for_each(|(i, x)| *x = slots[i * step]);
    }

    fn write(&mut self, at: Location, dtype: DType, values: &[f64]) {
        let (slots, step) = self.slots_mut(at, dtype);
        values.iter().enumerate().for_each(|(i, x)| slots[i * step] = dtype.round(*x));
    }
}

impl Launches for Reference<'_> {
    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError> {
        let plans = self.plans;
        let plan = plans.kernels.get(kernel.index()).ok_or(DeviceError::NotLoaded(kernel.0))?;
        let inputs: Vec<Vec<f64>> = plan.inputs.iter().zip(args).map(|(operand, at)| self.gather(*at, operand)).collect();
        let kernel = &self.job.kernels[kernel.index()];
        let outputs = match self.numbers {
            Numbers::Exact => kernel.run(&inputs, scalars),
            Numbers::Noisy => kernel.run_changed(&inputs, scalars, &mut noise::change(kernel, self.launches)),
        };
        self.launches += 1;
        for (((operand, accumulate), at), values) in plan.outputs.iter().zip(&args[inputs.len()..]).zip(&outputs) {
            self.scatter(*at, operand, *accumulate, values);
        }
        Ok(())
    }
}

impl Device for Reference<'_> {
    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64) {
        let (slots, step) = self.slots_mut(at, dtype);
        (0..count as usize).for_each(|i| slots[i * step] = dtype.round(value));
    }

    /// Makes what was left there visible as a mistake.
    fn discard(&mut self, at: Location, bytes: u64) {
        let [from, to] = [at.byte / self.unit, (at.byte + bytes).div_ceil(self.unit)].map(|n| n as usize);
        self.arenas[at.arena as usize][from..to].fill(f64::NAN);
    }
}
