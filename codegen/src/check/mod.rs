//! A kernel's code, run once on random operands, and held to its body.
//!
//! Operands have the kernel's own shapes and dtypes. A kernel of little work runs whole; of others the first tiles,
//! the last and some between do, as a thread would call them. What is to be written is marked before, so what tiles
//! wrote is known without asking the family. Of that, some 256 places of each result are computed by the
//! interpreter, in f64: corners, edges of tiles, and others at random.

mod draw;
mod load;
mod memory;
mod places;
#[cfg(test)]
mod tests;

use crate::object::Compiled;
use crate::target::{Arch, Target};
use inkwell::targets::TargetMachine;
use ir::kernel::Kernel;
use ir::kernel::part::points;
use ir::op::Kind;
use ir::random::{key, mix};
use ir::work::Work;
use load::Loader;
use memory::{Mapped, Pools};
use places::Ran;
use serde::{Deserialize, Serialize};

/// Which kernels are held to their bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    Off,
    /// Those that are compiled.
    #[default]
    New,
    /// Those from the cache as well that nobody has looked at.
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
    /// It was not, and why.
    NotChecked(String),
    /// So many places of its results are what the body says.
    Passed { places: u64 },
}

/// What code computes in place of what its body says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wrong {
    pub output: usize,
    /// Dims of the result by name, and the index along each.
    pub place: Vec<(String, u64)>,
    /// None: nothing was written there.
    pub got: Option<f64>,
    pub want: f64,
}

impl std::error::Error for Wrong {}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = self.place.iter().map(|(dim, i)| format!("{dim} {i}")).collect::<Vec<_>>().join(", ");
        match self.got {
            Some(got) => write!(f, "on random operands result {} at [{place}] is {got:?}, and its body says {:?}", self.output, self.want),
            None => write!(f, "result {} at [{place}] is left unwritten", self.output),
        }
    }
}

/// Points of loops that a kernel's code may go through in its run: some milliseconds. Of products, a sixteenth counts.
const RUN: u64 = 1 << 20;
const PRODUCTS: u64 = 16;
/// Points of a tile beyond which it is not run.
const LONGEST: u64 = 1 << 29;
/// Bytes that a run may write, scratch included.
const BYTES: u64 = 1 << 30;

/// Holds kernels to their bodies, one after the other.
#[derive(Default)]
pub struct Checker {
    pools: Pools,
    loader: Option<Loader>,
    /// The last target, and why its code does not run here, if it does not.
    foreign: Option<(Target, Option<String>)>,
}

/// Points of a kernel's loops, as its code goes through them.
fn cost(kernel: &Kernel) -> u64 {
    let others = kernel.body.values().filter(|v| kernel.body[*v].op.kind() != Kind::Contraction);
    others.map(|v| points(kernel, v)).fold(Work::of(kernel).flops / 2 / PRODUCTS, u64::saturating_add)
}

/// Ranges of tiles to run, in order: all in two, or the first, some and the last; of large tiles the first and the
/// last alone.
fn ranges(tiles: u64, cost: u64, seed: u64) -> Vec<[u64; 2]> {
    let half = tiles / 2;
    let of_tile = (cost / tiles.max(1)).max(1);
    let n = (RUN / 3 / of_tile).max(1);
    if cost <= RUN || 3 * n >= tiles {
        return vec![[0, half], [half, tiles]];
    }
    if of_tile > RUN {
        return vec![[0, 1], [tiles - 1, tiles]];
    }
    let between = n + mix(seed) % (tiles - 3 * n + 1);
    vec![[0, n], [between, between + n], [tiles - n, tiles]]
}

/// Why code for this target does not run here, if it does not.
fn foreign(target: &Target) -> Option<String> {
    match target.arch {
        Arch::Nvptx => Some("code for a GPU".into()),
        Arch::X86_64 => {
            let Ok(host) = Target::host() else { return Some("this CPU lacks AVX2 and FMA".into()) };
            // Which also makes LLVM know what its loader asks for.
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
    /// Runs a kernel's code, and holds what it computes to what the body says.
    ///
    /// # Errors
    /// The first place found that is another.
    pub fn check(&mut self, kernel: &Kernel, compiled: &Compiled, target: &Target) -> Result<Verification, Wrong> {
        if self.foreign.as_ref().is_none_or(|(known, _)| known != target) {
            self.foreign = Some((target.clone(), foreign(target)));
        }
        if let Some((_, Some(why))) = &self.foreign {
            return Ok(Verification::NotChecked(why.clone()));
        }
        match self.run(kernel, compiled) {
            Ok(ran) => match places::judge(kernel, &ran, key(&compiled.name))? {
                0 => Ok(Verification::NotChecked("no place of its results is small enough to be interpreted".into())),
                places => Ok(Verification::Passed { places }),
            },
            Err(why) => Ok(Verification::NotChecked(why)),
        }
    }

    /// Runs tiles of a kernel's code.
    ///
    /// # Errors
    /// Why it was not run.
    fn run(&mut self, kernel: &Kernel, compiled: &Compiled) -> Result<Ran, String> {
        let (dims, shape) = (&kernel.body.dims, compiled.shape);
        let cost = cost(kernel);
        let ranges = ranges(shape.tiles, cost, key(&compiled.name));
        let some: u64 = ranges.iter().map(|[first, end]| end - first).sum();
        let of_tile = cost / shape.tiles.max(1);
        if of_tile > LONGEST {
            return Err(format!("a tile of it goes through {of_tile} points"));
        }
        let output = |o: &ir::kernel::Output| memory::bytes(dims, &kernel.body[o.value].ty, &o.strides);
        let written = kernel.outputs.iter().map(output).fold(0, u64::saturating_add);
        let touched = (u128::from(written) * u128::from(some) / u128::from(shape.tiles.max(1))) as u64;
        if touched.saturating_add(shape.scratch_bytes) > BYTES {
            return Err(format!("its run takes {} MiB", touched.saturating_add(shape.scratch_bytes) >> 20));
        }
        if self.loader.is_none() {
            self.loader = Some(Loader::new()?);
        }
        let loader = self.loader.as_ref().expect("invariant: it was made");
        let loaded = loader.load(&compiled.object, &compiled.name)?;
        let said = |e: rustix::io::Errno| e.to_string();
        let (draws, scalars) = (draw::draws(kernel), draw::scalars(kernel));
        let inputs = kernel.inputs.iter().zip(&draws).enumerate();
        let inputs: Vec<Mapped> =
            inputs.map(|(k, (i, draw))| self.pools.input(dims, &i.ty, &i.strides, *draw, k)).collect::<Result<_, _>>().map_err(said)?;
        let (mut outputs, mut before) = (vec![], vec![]);
        for (k, o) in kernel.outputs.iter().enumerate() {
            let ty = &kernel.body[o.value].ty;
            if o.accumulate {
                let [now, old] = self.pools.added_to(dims, ty, &o.strides, inputs.len() + k).map_err(said)?;
                outputs.push(now);
                before.push(Some(old));
            } else {
                outputs.push(self.pools.unwritten(memory::bytes(dims, ty, &o.strides)).map_err(said)?);
                before.push(None);
            }
        }
        let scratch = self.pools.unwritten(shape.scratch_bytes).map_err(said)?;
        let pointers: Vec<*mut u8> = inputs.iter().chain(&outputs).map(Mapped::start).collect();
        let bits: Vec<u64> = kernel.scalars.iter().zip(&scalars).map(|(t, x)| if t.is_float() { x.to_bits() } else { *x as i64 as u64 }).collect();
        // From the last to the first, as tiles do not wait for each other; each in two calls.
        for [begin, until] in ranges.iter().rev().filter(|[begin, until]| begin < until) {
            let middle = begin + (until - begin).div_ceil(2);
            for [first, end] in [[*begin, middle], [middle, *until]].into_iter().filter(|[first, end]| first < end) {
                // SAFETY: pointers, scalars and scratch are as the kernel declares them.
                unsafe { (loaded.function)(pointers.as_ptr(), bits.as_ptr(), first, end, scratch.start(), *begin, *until) };
            }
        }
        let whole = some == shape.tiles;
        Ok(Ran { inputs, outputs, before, scalars, whole })
    }
}
