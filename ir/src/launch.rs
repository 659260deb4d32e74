//! How a compiled kernel is launched on a GPU: code generation says it, the artifact keeps it, devices do it.

use crate::kernel::Kernel;
use crate::op::DType;
use serde::{Deserialize, Serialize};

/// Lanes of a warp.
pub const WARP: u32 = 32;
/// Most threads of a block.
pub const MOST_THREADS: u32 = 1024;
/// Bytes of parameters that every driver takes.
pub const FEW_PARAMETERS: usize = 4096;
/// Most bytes of parameters, which drivers take from CUDA 12.1 on, of kernels of PTX 8.1.
pub const MOST_PARAMETERS: usize = 32_764;
/// Most blocks that mcc launches.
pub const MOST_BLOCKS: u32 = 1 << 24;
/// Most blocks that a multiprocessor has room for.
const MOST_RESIDENT: u32 = 32;
/// Most blocks of a cluster, on every GPU that has clusters.
const MOST_CLUSTER: u32 = 8;
/// Most bytes of scratch of a launch.
pub const MOST_SCRATCH: u64 = 1 << 40;
/// Bytes from one kernel's counter to another's: they are on different lines of the cache.
pub const COUNTER_BYTES: u64 = 128;
/// Bytes of a tensor map, as the driver writes it.
pub const MAP_BYTES: usize = 128;
/// Bytes of which a tensor map's first element, and its strides, are multiples.
pub const MAP_ALIGN: u64 = crate::kernel::ALIGN;

/// Most bytes of shared memory of a block on GPUs of a kind: of the newer ones, on those that run their code alone.
pub fn most_shared(arch: &str) -> u32 {
    if arch == "sm_90a" { 227 << 10 } else { 163 << 10 }
}

/// One word of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    /// The address of an operand: inputs, then outputs.
    Argument(u32),
    /// A scalar argument: the bits of an f64 or i64.
    Scalar(u32),
    /// What code generation knows, such as the number of tiles.
    Number(u64),
    /// The address of the launch's scratch.
    Scratch,
    /// The address of 32 bits that are the kernel's alone: they are 0 when it begins, and when it ends.
    Counter,
}

/// How 16-byte pieces of a box's rows change places in shared memory, against bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Swizzle {
    /// Rows of up to 128 bytes; the number of a piece is combined with that of the row, modulo 8, by exclusive or.
    B128,
}

impl Swizzle {
    /// Most bytes of a box's rows.
    fn row(self) -> u64 {
        match self {
            Swizzle::B128 => 128,
        }
    }
}

/// A tensor of up to five dims and the box of it that one copy takes to shared memory, as `cuTensorMapEncodeTiled` of the driver has it. What of
/// a box lies outside of the tensor is zero.
///
/// The first element's address is a multiple of 16, and so is that of each row of a box that is copied: to begin
/// earlier and to count from there is no way out where an operand is [unaligned](crate::kernel::Operand::unaligned).
/// An H100 calls such a copy an illegal instruction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMap {
    /// The operand, counted as for [`Parameter::Argument`].
    pub argument: u32,
    /// Of its elements.
    pub dtype: DType,
    /// Its elements, of f32, are rounded to tf32 on their way.
    pub tf32: bool,
    /// Elements along each dim, the innermost first.
    pub sizes: Vec<u64>,
    /// Bytes from one index to the next, of all dims but the innermost, whose elements are neighbours; each a multiple of the one before.
    pub strides: Vec<u64>,
    /// Elements of the box along each dim.
    pub extents: Vec<u32>,
    /// How 16-byte pieces of the box's rows change places in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// Bytes from one element to the next.
    fn element(&self) -> u64 {
        self.dtype.bytes()
    }

    /// Whether the driver takes it, of a kernel's operand.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, kernel: &Kernel) -> Result<(), String> {
        let outputs = kernel.outputs.iter().map(|o| kernel.body[o.value].ty.dtype);
        let operand = kernel.inputs.iter().map(|i| i.ty.dtype).chain(outputs).nth(self.argument as usize);
        if operand != Some(self.dtype) || !matches!(self.dtype, DType::F32 | DType::Bf16 | DType::F16) {
            return Err(format!("a tensor map of {} elements for operand {}", self.dtype.name(), self.argument));
        }
        if kernel.inputs.get(self.argument as usize).is_none_or(|i| i.unaligned) {
            return Err(format!("a tensor map of operand {}, which may begin anywhere", self.argument));
        }
        if self.tf32 && self.dtype != DType::F32 {
            return Err(format!("a tensor map that rounds {} to tf32", self.dtype.name()));
        }
        let dims = self.sizes.len();
        if !(1..=5).contains(&dims) || self.strides.len() + 1 != dims || self.extents.len() != dims {
            return Err(format!("a tensor map of {dims} dims, {} strides, {} extents", self.strides.len(), self.extents.len()));
        }
        // Coordinates are signed 32-bit numbers.
        if self.sizes.iter().any(|s| !(1..1 << 31).contains(s)) || self.extents.iter().any(|e| !(1..=256).contains(e)) {
            return Err(format!("a tensor map of sizes {:?} in boxes of {:?}", self.sizes, self.extents));
        }
        let mut before = MAP_ALIGN;
        let are_multiples = self.strides.iter().all(|s| s.is_multiple_of(std::mem::replace(&mut before, *s)));
        if !are_multiples || self.strides.iter().any(|s| !(1..1 << 40).contains(s)) {
            return Err(format!("a tensor map of strides {:?}, not multiples of {MAP_ALIGN} and of each other", self.strides));
        }
        match u64::from(self.extents[0]) * self.element() {
            row if row.is_multiple_of(MAP_ALIGN) && row <= self.swizzle.row() => Ok(()),
            row => Err(format!("a tensor map in boxes with rows of {row} bytes")),
        }
    }
}

/// A launch, but for the values of its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Blocks that there is work for.
    pub grid: u32,
    /// So many blocks have room on a multiprocessor, if no more are to be launched than run at once: each takes its
    /// share of the work, however many there are.
    pub resident: Option<u32>,
    /// Blocks of a cluster, which run at a time and reach each other's shared memory: the grid is a multiple of it.
    pub cluster: u32,
    /// Threads of each.
    pub block: u32,
    /// Bytes of shared memory that a block gets beside what its code declares.
    pub shared_bytes: u32,
    /// Bytes of device memory that the blocks share while they run; nothing in it is kept.
    pub scratch_bytes: u64,
    /// Parameters of the kernel before all others, each [`MAP_BYTES`] long.
    pub maps: Vec<TensorMap>,
    /// In order, each 8 bytes.
    pub parameters: Vec<Parameter>,
}

impl Launch {
    /// Blocks that are launched on a card with so many multiprocessors.
    pub fn blocks_on(&self, multiprocessors: u32) -> u32 {
        let most = |resident: u32| (resident.saturating_mul(multiprocessors) / self.cluster).max(1) * self.cluster;
        self.resident.map_or(self.grid, |r| self.grid.min(most(r)))
    }

    /// Whether a GPU of a kind (`sm_80`, `sm_90a`) can launch it, with what the kernel has.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, kernel: &Kernel, arch: &str) -> Result<(), String> {
        let fits = |what: &str, n: u64, least: u64, most: u64| match n {
            n if (least..=most).contains(&n) => Ok(()),
            n => Err(format!("{n} {what}, not {least} to {most}")),
        };
        fits("blocks", self.grid.into(), 1, MOST_BLOCKS.into())?;
        fits("blocks on a multiprocessor", self.resident.unwrap_or(1).into(), 1, MOST_RESIDENT.into())?;
        fits("blocks of a cluster", self.cluster.into(), 1, if arch == "sm_90a" { MOST_CLUSTER.into() } else { 1 })?;
        if !self.grid.is_multiple_of(self.cluster) {
            return Err(format!("{} blocks are no multiple of the {} of a cluster", self.grid, self.cluster));
        }
        fits("threads a block", self.block.into(), WARP.into(), MOST_THREADS.into())?;
        if !self.block.is_multiple_of(WARP) {
            return Err(format!("{} threads a block are not whole warps", self.block));
        }
        fits("bytes of shared memory", self.shared_bytes.into(), 0, most_shared(arch).into())?;
        fits("bytes of scratch", self.scratch_bytes, 0, MOST_SCRATCH)?;
        fits("bytes of parameters", self.parameter_bytes() as u64, 0, MOST_PARAMETERS as u64)?;
        if !self.maps.is_empty() && arch != "sm_90a" {
            return Err(format!("tensor maps, which {arch} lacks"));
        }
        self.maps.iter().try_for_each(|m| m.check(kernel))?;
        let (arguments, scalars) = (kernel.inputs.len() + kernel.outputs.len(), kernel.scalars.len());
        for parameter in &self.parameters {
            let (what, k, count) = match parameter {
                Parameter::Argument(k) => ("operand", *k, arguments),
                Parameter::Scalar(k) => ("scalar", *k, scalars),
                Parameter::Number(_) | Parameter::Scratch | Parameter::Counter => continue,
            };
            if k as usize >= count {
                return Err(format!("{what} {k} of {count}"));
            }
        }
        Ok(())
    }

    /// Whether the kernel counts in memory of its own.
    pub fn counts(&self) -> bool {
        self.parameters.contains(&Parameter::Counter)
    }

    /// Bytes of all parameters.
    pub fn parameter_bytes(&self) -> usize {
        MAP_BYTES * self.maps.len() + 8 * self.parameters.len()
    }

    /// The parameters as the kernel reads them, little-endian, for the addresses of operands, the bits of scalars, the
    /// addresses of scratch and of the counter. What they refer to has been checked ([`Launch::check`]). `encode` gives
    /// the bytes of a tensor map whose operand lies at an address.
    ///
    /// # Errors
    /// Those of `encode`.
    pub fn pack<E>(
        &self,
        operands: &[u64],
        scalars: &[u64],
        [scratch, counter]: [u64; 2],
        mut encode: impl FnMut(&TensorMap, u64) -> Result<[u8; MAP_BYTES], E>,
    ) -> Result<Vec<u8>, E> {
        let word = |p: &Parameter| match p {
            Parameter::Argument(k) => operands[*k as usize],
            Parameter::Scalar(k) => scalars[*k as usize],
            Parameter::Number(n) => *n,
            Parameter::Scratch => scratch,
            Parameter::Counter => counter,
        };
        let mut packed = vec![];
        for map in &self.maps {
            packed.extend(encode(map, operands[map.argument as usize])?);
        }
        packed.extend(self.parameters.iter().flat_map(|p| word(p).to_le_bytes()));
        Ok(packed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Body, Type};
    use crate::kernel::{Family, Operand};

    fn launch() -> Launch {
        let parameters = vec![Parameter::Scalar(0), Parameter::Number(7), Parameter::Scratch, Parameter::Counter];
        Launch { grid: 3, resident: None, cluster: 1, block: 128, shared_bytes: 0, scratch_bytes: 64, maps: vec![], parameters }
    }

    /// Of 200 rows of 100 bf16, padded to 104, in boxes of 8 rows.
    fn map() -> TensorMap {
        let (sizes, strides, extents) = (vec![100, 200], vec![208], vec![64, 8]);
        TensorMap { argument: 0, dtype: DType::Bf16, tf32: false, sizes, strides, extents, swizzle: Swizzle::B128 }
    }

    fn kernel() -> Kernel {
        let ty = Type::new(DType::Bf16, []);
        Kernel {
            on: crate::program::Space::Device,
            family: Family::Gemm,
            body: Body::default(),
            inputs: vec![Operand { ty, strides: vec![], unaligned: false }],
            scalars: vec![DType::F32],
            outputs: vec![],
        }
    }

    fn words(bytes: &[u8]) -> Vec<u64> {
        bytes.chunks(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes"))).collect()
    }

    #[test]
    fn parameters_are_words_in_order() {
        let packed = launch().pack(&[], &[5], [9, 11], |_, _| Err("it has no maps")).expect("nothing is encoded");
        assert_eq!(words(&packed), [5, 7, 9, 11]);
    }

    #[test]
    fn maps_come_first() {
        let l = Launch { maps: vec![map()], parameters: vec![Parameter::Argument(0)], ..launch() };
        assert_eq!(l.check(&kernel(), "sm_90a"), Ok(()));
        let packed = l.pack(&[4096], &[5], [9, 11], |_, at| Ok::<_, String>([(at >> 12) as u8; MAP_BYTES])).expect("it is encoded");
        assert_eq!(packed[..MAP_BYTES], [1; MAP_BYTES]);
        assert_eq!(words(&packed[MAP_BYTES..]), [4096]);
        let mut unaligned = kernel();
        unaligned.inputs[0].unaligned = true;
        assert_eq!(l.check(&unaligned, "sm_90a"), Err("a tensor map of operand 0, which may begin anywhere".into()));
    }

    #[test]
    fn as_many_whole_clusters_are_launched_as_have_room() {
        let l = Launch { grid: 12, resident: Some(1), cluster: 2, ..launch() };
        assert_eq!([1, 2, 7, 20].map(|multiprocessors| l.blocks_on(multiprocessors)), [2, 2, 6, 12]);
    }

    #[test]
    fn what_no_gpu_can_launch_is_refused() {
        assert_eq!(launch().check(&kernel(), "sm_80"), Ok(()));
        let refused_by = |arch: &str, change: fn(&mut Launch)| {
            let mut l = launch();
            change(&mut l);
            l.check(&kernel(), arch).expect_err("it cannot be launched")
        };
        let refused = |change| refused_by("sm_90a", change);
        assert_eq!(refused(|l| l.resident = Some(0)), "0 blocks on a multiprocessor, not 1 to 32");
        assert_eq!(refused(|l| l.grid = 0), "0 blocks, not 1 to 16777216");
        assert_eq!(refused(|l| l.cluster = 0), "0 blocks of a cluster, not 1 to 8");
        assert_eq!(refused(|l| l.cluster = 2), "3 blocks are no multiple of the 2 of a cluster");
        assert_eq!(refused_by("sm_80", |l| l.cluster = 3), "3 blocks of a cluster, not 1 to 1");
        assert_eq!(refused(|l| l.block = 2048), "2048 threads a block, not 32 to 1024");
        assert_eq!(refused(|l| l.block = 100), "100 threads a block are not whole warps");
        assert_eq!(refused(|l| l.shared_bytes = 1 << 20), "1048576 bytes of shared memory, not 0 to 232448");
        assert_eq!(refused_by("sm_80", |l| l.shared_bytes = 164 << 10), "167936 bytes of shared memory, not 0 to 166912");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Argument(1)]), "operand 1 of 1");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Scalar(1)]), "scalar 1 of 1");
        assert_eq!(refused(|l| l.parameters = vec![Parameter::Scratch; 4096]), "32768 bytes of parameters, not 0 to 32764");
        assert_eq!(refused_by("sm_80", |l| l.maps = vec![map()]), "tensor maps, which sm_80 lacks");
    }

    #[test]
    fn what_the_driver_refuses_is_no_tensor_map() {
        let refused = |change: fn(&mut TensorMap)| {
            let mut m = map();
            change(&mut m);
            m.check(&kernel()).expect_err("the driver refuses it")
        };
        assert_eq!(refused(|m| m.argument = 1), "a tensor map of bf16 elements for operand 1");
        assert_eq!(refused(|m| m.dtype = DType::F16), "a tensor map of f16 elements for operand 0");
        assert_eq!(refused(|m| m.tf32 = true), "a tensor map that rounds bf16 to tf32");
        assert_eq!(refused(|m| m.sizes.push(1)), "a tensor map of 3 dims, 1 strides, 2 extents");
        assert_eq!(refused(|m| m.sizes[1] = 1 << 31), "a tensor map of sizes [100, 2147483648] in boxes of [64, 8]");
        assert_eq!(refused(|m| m.extents[1] = 257), "a tensor map of sizes [100, 200] in boxes of [64, 257]");
        assert_eq!(refused(|m| m.strides[0] = 200), "a tensor map of strides [200], not multiples of 16 and of each other");
        assert_eq!(refused(|m| m.extents[0] = 72), "a tensor map in boxes with rows of 144 bytes");
        let deeper = |stride| TensorMap { sizes: vec![100, 200, 3], strides: vec![208, stride], extents: vec![64, 8, 1], ..map() };
        assert_eq!(deeper(416).check(&kernel()), Ok(()));
        assert!(deeper(432).check(&kernel()).is_err());
    }
}
