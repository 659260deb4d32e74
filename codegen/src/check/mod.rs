//! A kernel's code, run once on random operands, and held to its body.
//!
//! Operands have the kernel's own shapes and dtypes. A kernel of little work runs whole; of others the first tiles,
//! the last and some between do, as a thread would call them. What is to be written is marked before, so what tiles
//! wrote is known without asking the family. Of that, some 256 places of each result are computed by the
//! interpreter, in f64: corners, edges of tiles, and others at random.

mod draw;
pub(crate) mod emulated;
#[cfg(test)]
mod faults;
mod in_place;
mod limit;
mod load;
mod memory;
mod operands;
mod places;
mod rounding;
#[cfg(test)]
pub mod tests;

use crate::Shape;
use crate::object::Compiled;
use crate::target::{Arch, Target};
use draw::Draw;
#[cfg(test)]
pub use emulated::encode;
use emulated::{EmulationError, GpuCode};
use inkwell::targets::TargetMachine;
use ir::kernel::Kernel;
use ir::kernel::part::points;
use ir::op::OpKind;
use ir::random::{key, mix};
use ir::work::Work;
pub use limit::SECONDS;
use load::Loader;
use memory::{Access, MappedMemory, Pools};
use operands::{InPlaceOperands, Operands};
use places::KernelRun;
use serde::{Deserialize, Serialize};

/// Which kernels are held to their bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    Off,
    /// Those that are compiled, and those from the cache that nobody has looked at where they could run.
    #[default]
    New,
    /// Code for GPUs as well, in the emulator.
    All,
}

/// The invariant that is checked here, by its number beside those of the verifiers.
pub const INVARIANT: (&str, &str) = ("V950", "A kernel's code computes what the kernel's body says.");

/// Whether a kernel's code was held to its body.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verification {
    /// Nobody asked for it.
    #[default]
    None,
    /// It does not run on this machine, and why.
    Foreign(String),
    /// It is too large for it, and by what.
    NotChecked(String),
    /// So many places of its results are what the body says.
    Passed {
        /// How many places were compared, of all results together.
        places: u64,
    },
}

/// What is wrong with code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Wrong {
    #[error("on random operands {place} is {got:?}, and its body says {want:?}")]
    Value { place: ResultElement, got: f64, want: f64 },
    #[error("{0} is left unwritten")]
    Unwritten(ResultElement),
    #[error("on random operands {place} is {got:?} where the result takes the place of operand {operand}, and {want:?} elsewhere")]
    InPlace { place: ResultElement, operand: usize, got: f64, want: f64 },
    /// Beside the elements of a result.
    #[error("memory is written beside the elements of result {0}")]
    Beyond(usize),
    /// What a GPU would have done, as the emulator says.
    #[error("on random operands: {0}")]
    Fault(String),
}

impl Wrong {
    /// The result that it is seen in, if it is in one.
    pub fn output(&self) -> Option<usize> {
        match self {
            Wrong::Value { place, .. } | Wrong::Unwritten(place) | Wrong::InPlace { place, .. } => Some(place.output),
            Wrong::Beyond(output) => Some(*output),
            Wrong::Fault(_) => None,
        }
    }
}

/// A place of a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultElement {
    /// Position among the kernel's outputs.
    pub output: usize,
    /// Dims of the result by name, and the index along each.
    pub index: Vec<(String, u64)>,
}

impl std::fmt::Display for ResultElement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let index = self.index.iter().map(|(dim, i)| format!("{dim} {i}")).collect::<Vec<_>>().join(", ");
        write!(f, "result {} at [{index}]", self.output)
    }
}

/// Points of loops that a kernel's code may go through in its run: some milliseconds. Of products, a sixteenth
/// counts.
const RUN: u64 = 1 << 20;
const PRODUCTS: u64 = 16;
/// Points of a tile beyond which it is not run.
const LONGEST: u64 = 1 << 29;
/// Points of a tile beyond which no two are run one after the other.
const PAIRS: u64 = 4 * RUN;
/// Bytes that a run may write, scratch included.
const BYTES: u64 = 1 << 30;

/// Holds kernels to their bodies, one after the other.
#[derive(Default)]
pub struct Checker {
    /// Whether code for GPUs is run, in the emulator.
    emulates: bool,
    /// Seconds of a processor after which code ends this process.
    limit: Option<u64>,
    pools: Pools,
    loader: Option<Loader>,
    /// The last target, and why its code does not run here, if it does not.
    foreign: Option<(Target, Option<String>)>,
}

/// Points of a kernel's loops, as its code goes through them.
fn cost(kernel: &Kernel) -> u64 {
    let others = kernel.body.values().filter(|v| kernel.body[*v].op.kind() != OpKind::Contraction);
    others.map(|v| points(kernel, v)).fold(Work::of(kernel).flops / 2 / PRODUCTS, u64::saturating_add)
}

/// Ranges of tiles to run, in order: all in two, or the first, some and the last; of large tiles the first and the
/// last alone. Two tiles at least, unless these take long, as the first sees to copies for the second; those between
/// go from one line of tiles to the next.
fn ranges(shape: Shape, cost: u64, seed: u64) -> Vec<[u64; 2]> {
    let (tiles, half) = (shape.tiles, shape.tiles / 2);
    let of_tile = (cost / tiles.max(1)).max(1);
    let n = (RUN / 3 / of_tile).max(2);
    if cost <= RUN || tiles <= 3 || 3 * n >= tiles && of_tile <= RUN {
        return vec![[0, half], [half, tiles]];
    }
    if of_tile > RUN {
        return vec![[0, if of_tile > PAIRS { 1 } else { 2 }], [tiles - 1, tiles]];
    }
    let lines = tiles / shape.line.max(1);
    let between = match shape.line {
        0 | 1 => n + mix(seed) % (tiles - 3 * n + 1),
        line if lines > 1 => ((1 + mix(seed) % (lines - 1)) * line).saturating_sub(n / 2).clamp(n, tiles - 2 * n),
        _ => n + mix(seed) % (tiles - 3 * n + 1),
    };
    vec![[0, n], [between, between + n], [tiles - n, tiles]]
}

/// Whether code for this target is run here, in the emulator where that is asked for.
pub fn runs(target: &Target, verify: Verify) -> bool {
    match target.arch {
        Arch::Nvptx => verify == Verify::All,
        Arch::X86_64 => foreign(target).is_none(),
    }
}

/// Why code for this target does not run here, if it does not.
fn foreign(target: &Target) -> Option<String> {
    match target.arch {
        Arch::Nvptx => Some("code for a GPU".into()),
        Arch::X86_64 => {
            let Ok(host) = Target::host() else { return Some("this CPU lacks AVX2 and FMA".into()) };
            // Making the machine also initialises the target, which LLVM's loader needs.
            if let Err(error) = target.machine() {
                return Some(error.to_string());
            }
            let has = TargetMachine::get_host_cpu_features().to_string();
            let has: Vec<&str> = has.split(',').collect();
            let lacks = target.features.split(',').find(|f| f.starts_with('+') && !has.contains(f));
            match lacks {
                Some(feature) => Some(format!("this CPU lacks {}", &feature[1..])),
                None if target.vector_bytes > host.vector_bytes => Some("this CPU has no vectors as wide".into()),
                None => None,
            }
        }
    }
}

impl Checker {
    /// Code that takes so many seconds of a processor ends this process.
    pub fn limited(seconds: u64) -> Checker {
        Checker { limit: Some(seconds), ..Checker::default() }
    }

    /// Whether code for GPUs is run as well, in the emulator.
    #[must_use]
    pub fn emulates(self, emulates: bool) -> Checker {
        Checker { emulates, ..self }
    }

    /// Runs a kernel's code, and holds what it computes to what the body says.
    ///
    /// # Errors
    /// The first place found that is another, or what the code of a GPU does and must not.
    pub fn check(&mut self, kernel: &Kernel, compiled: &Compiled, target: &Target) -> Result<Verification, Wrong> {
        if self.foreign.as_ref().is_none_or(|(known, _)| known != target) {
            self.foreign = Some((target.clone(), foreign(target)));
        }
        match &self.foreign {
            Some((_, Some(_))) if self.emulates && target.arch == Arch::Nvptx => {}
            Some((_, Some(why))) => return Ok(Verification::Foreign(why.clone())),
            _ => {}
        }
        let run = match self.run(kernel, compiled, target.arch) {
            Ok(run) => run,
            Err(RunFailure::Unknown(why)) => return Ok(Verification::NotChecked(why)),
            Err(RunFailure::Wrong(wrong)) => return Err(wrong),
        };
        match places::judge(kernel, &run, key(&compiled.name))? {
            0 => Ok(Verification::NotChecked("no place of its results is small enough to be interpreted".into())),
            places => Ok(Verification::Passed { places }),
        }
    }

    /// Runs tiles of a kernel's code; again with results in the place of operands, if they may be there.
    fn run(&mut self, kernel: &Kernel, compiled: &Compiled, arch: Arch) -> Result<KernelRun, RunFailure> {
        let (cost, seed) = (cost(kernel), key(&compiled.name));
        if arch == Arch::Nvptx {
            let operands = self.operands(kernel, 0)?;
            let ptx = std::str::from_utf8(&compiled.object).map_err(|e| e.to_string())?;
            let code = GpuCode { name: &compiled.name, ptx, tiles: compiled.shape.tiles, launch: compiled.launch.as_ref() };
            let whole = limit::within(self.limit, || emulated::run(&code, &operands, cost, mix(seed)))?;
            return Ok(KernelRun { emulated: true, ..kernel_run(operands, whole) });
        }
        let shape = compiled.shape;
        let ranges = ranges(shape, cost, seed);
        let some: u64 = ranges.iter().map(|[first, end]| end - first).sum();
        let of_tile = cost / shape.tiles.max(1);
        if of_tile > LONGEST {
            let points = if cost == u64::MAX { "more than 2^64".into() } else { of_tile.to_string() };
            return Err(RunFailure::Unknown(format!("a tile of it goes through {points} points")));
        }
        let dims = &kernel.body.dims;
        let output = |o: &ir::kernel::Output| memory::bytes(dims, &kernel.body[o.value].ty, &o.strides);
        let written = kernel.outputs.iter().map(output).fold(0, u64::saturating_add);
        let touched = (u128::from(written) * u128::from(some) / u128::from(shape.tiles.max(1))) as u64;
        if touched.saturating_add(shape.scratch_bytes) > BYTES {
            return Err(RunFailure::Unknown(format!("its run takes {} MiB", touched.saturating_add(shape.scratch_bytes) >> 20)));
        }
        let operands = self.operands(kernel, shape.scratch_bytes)?;
        let over = in_place::pair(kernel).map(|pair| self.in_place_operands(kernel, pair)).transpose()?;
        if self.loader.is_none() {
            self.loader = Some(Loader::new()?);
        }
        let loader = self.loader.as_ref().expect("invariant: it was made");
        let loaded = loader.load(&compiled.object, &compiled.name)?;
        let limit = self.limit;
        let call = |pointers: &[*mut u8]| {
            // Ranges run from the last to the first, as tiles do not wait for each other, each in two calls.
            for [begin, until] in ranges.iter().rev().filter(|[begin, until]| begin < until) {
                let middle = begin + (until - begin).div_ceil(2);
                for [first, end] in [[*begin, middle], [middle, *until]].into_iter().filter(|[first, end]| first < end) {
                    let (pointers, bits, scratch) = (pointers.as_ptr(), operands.scalar_bits.as_ptr(), operands.scratch.start());
                    // SAFETY: pointers, scalars and scratch are as the kernel declares them.
                    limit::within(limit, || unsafe { (loaded.function)(pointers, bits, first, end, scratch, *begin, *until) });
                }
            }
        };
        call(&operands.all().map(MappedMemory::start).collect::<Vec<_>>());
        if let Some(over) = over {
            let inputs = operands.inputs.iter().enumerate().map(|(k, own)| if k == over.pair.1 { &over.place } else { own });
            call(&inputs.chain(over.outputs()).map(MappedMemory::start).collect::<Vec<_>>());
            in_place::same(kernel, &operands, &over, seed).map_err(RunFailure::Wrong)?;
        }
        Ok(kernel_run(operands, some == shape.tiles))
    }

    /// What a kernel's code for a GPU can be run on.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn operands_of(&mut self, kernel: &Kernel) -> Result<Operands, String> {
        self.operands(kernel, 0).map_err(|failure| match failure {
            RunFailure::Unknown(why) => why,
            RunFailure::Wrong(wrong) => wrong.to_string(),
        })
    }

    fn input(&mut self, kernel: &Kernel, k: usize, draw: Draw, access: Access) -> Result<MappedMemory, RunFailure> {
        let input = &kernel.inputs[k];
        Ok(self.pools.input(&kernel.body.dims, &input.ty, &input.strides, draw, k, access)?)
    }

    /// Random operands, results that nobody wrote, and so many bytes of scratch.
    fn operands(&mut self, kernel: &Kernel, scratch_bytes: u64) -> Result<Operands, RunFailure> {
        let draws = draw::draws(kernel).into_iter().enumerate();
        let inputs: Vec<MappedMemory> = draws.map(|(k, draw)| self.input(kernel, k, draw, Access::Read)).collect::<Result<_, _>>()?;
        let (outputs, before) = self.outputs(kernel, None)?;
        let scratch = self.pools.garbage(scratch_bytes)?;
        let scalars = draw::scalars(kernel);
        let scalar_bits = kernel.scalars.iter().zip(&scalars).map(|(t, x)| if t.is_float() { x.to_bits() } else { *x as i64 as u64 }).collect();
        Ok(Operands { inputs, outputs, before, scratch, scalars, scalar_bits })
    }

    /// Results, but for one, and what those of them hold before that are added to.
    fn outputs(&mut self, kernel: &Kernel, but: Option<usize>) -> Result<(Vec<MappedMemory>, Vec<Option<MappedMemory>>), RunFailure> {
        let dims = &kernel.body.dims;
        let (mut outputs, mut before) = (vec![], vec![]);
        for (k, o) in kernel.outputs.iter().enumerate().filter(|(k, _)| but != Some(*k)) {
            let ty = &kernel.body[o.value].ty;
            if o.accumulate {
                let [now, old] = self.pools.added_to(dims, ty, &o.strides, kernel.inputs.len() + k)?;
                outputs.push(now);
                before.push(Some(old));
            } else {
                outputs.push(self.pools.unwritten(memory::bytes(dims, ty, &o.strides))?);
                before.push(None);
            }
        }
        Ok((outputs, before))
    }

    /// What is another one where a result takes the place of an operand.
    fn in_place_operands(&mut self, kernel: &Kernel, pair: (usize, usize)) -> Result<InPlaceOperands, RunFailure> {
        let place = self.input(kernel, pair.1, draw::draws(kernel)[pair.1], Access::Write)?;
        Ok(InPlaceOperands { pair, place, others: self.outputs(kernel, Some(pair.0))?.0 })
    }
}

/// What tiles left of operands; all tiles, or some.
fn kernel_run(operands: Operands, whole: bool) -> KernelRun {
    let Operands { inputs, outputs, before, scalars, .. } = operands;
    let beyond = outputs.iter().zip(&before).position(|(now, before)| !now.is_untouched_around(before.as_ref()));
    KernelRun { inputs, outputs, before, scalars, whole, beyond, emulated: false }
}

/// Why a run has no results: nothing can be said of the code, or it is wrong.
enum RunFailure {
    Unknown(String),
    Wrong(Wrong),
}

impl From<String> for RunFailure {
    fn from(why: String) -> RunFailure {
        RunFailure::Unknown(why)
    }
}

impl From<rustix::io::Errno> for RunFailure {
    fn from(e: rustix::io::Errno) -> RunFailure {
        RunFailure::Unknown(e.to_string())
    }
}

impl From<EmulationError> for RunFailure {
    fn from(e: EmulationError) -> RunFailure {
        match e {
            EmulationError::Unknown(_) => RunFailure::Unknown(e.to_string()),
            EmulationError::Fault(fault) => RunFailure::Wrong(Wrong::Fault(fault)),
        }
    }
}
