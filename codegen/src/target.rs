//! What machine code is made for.

use inkwell::OptimizationLevel;
use inkwell::targets::{CodeModel, InitializationConfig, RelocMode, Target as LlvmTarget, TargetMachine, TargetTriple};
use ir::launch::FEW_PARAMETERS;
use ir::processor;
use ir::tiles::Generation;
use serde::{Deserialize, Serialize};
use std::sync::Once;

/// The instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Arch {
    /// Machine code for Linux on x86-64.
    X86_64,
    /// PTX, for NVIDIA's GPUs.
    Nvptx,
}

impl Arch {
    fn triple(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64-unknown-linux-gnu",
            Arch::Nvptx => "nvptx64-nvidia-cuda",
        }
    }
}

/// A processor by LLVM's names: part of every kernel's cache key and of the artifact, which is refused on a CPU
/// without the features.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    /// Instruction set of its code.
    pub arch: Arch,
    /// `znver5`, `x86-64-v3`, `sm_80`, ...
    pub cpu: String,
    /// `+avx2,+fma,-avx512f,...`; may be empty where `cpu` says it all.
    pub features: String,
    /// Bytes of a vector register: 64 with AVX-512, 32 with AVX2, 128 where a warp is a vector.
    pub vector_bytes: u32,
    /// Vector registers.
    pub registers: u32,
    /// The first-level data cache of a core: lines with addresses that differ by a multiple of `l1_way_bytes` share
    /// `l1_ways` places.
    pub l1_way_bytes: u32,
    /// Ways of the first-level data cache of a core; 0 for a GPU.
    pub l1_ways: u32,
    /// Bytes of second-level cache of a core, which bounds the blocks that stay in it.
    pub l2_bytes: u32,
}

/// Why a target cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum TargetError {
    #[error("unknown target `{0}`: known are `cpu` (this machine), `x86-64-v3`, `sm_80` and `sm_90a`")]
    Unknown(String),
    #[error("this CPU ({0}) lacks AVX2 and FMA, which compiled kernels need")]
    TooOld(String),
    #[error("LLVM has no such target machine: {0}")]
    Llvm(String),
}

/// Where Linux describes the caches of the first core: `index0` is the first level's for data, `index2` the second
/// level.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";

/// A number of a cache, such as `8`, or `1024K` (in KiB), if the system says it.
fn of_cache(file: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("{CACHES}/{file}")).ok()?;
    text.trim().trim_end_matches('K').parse().ok()
}

/// Bytes of second-level cache; 1 MiB if the system does not say.
fn l2_bytes() -> u32 {
    of_cache("index2/size").unwrap_or(1024).clamp(256, 4096) << 10
}

/// Ways of the first-level data cache, of 4 KiB each: a processor that looks a line up while it translates the
/// address has no larger ones.
fn l1_ways() -> u32 {
    of_cache("index0/ways_of_associativity").unwrap_or(L1_WAYS).clamp(2, 32)
}

const L1_WAY_BYTES: u32 = 4096;
const L1_WAYS: u32 = 8;

/// A list of features in which none is on but those that kernels may use ([`ir::processor`]): the artifact's reader
/// must know what it looks for.
fn known(features: &str) -> String {
    let word = |feature: &str| match feature.strip_prefix('+') {
        Some(name) if !processor::is_known(name) => format!("-{name}"),
        Some(_) | None => feature.to_owned(),
    };
    features.split(',').map(word).collect::<Vec<_>>().join(",")
}

impl Target {
    /// The target of a name on the command line: `cpu` is the machine this runs on, `x86-64-v3` any CPU with AVX2 and
    /// FMA, `sm_80` and `sm_90a` are GPUs.
    ///
    /// # Errors
    /// The name is unknown, or this machine lacks AVX2 or FMA.
    pub fn named(name: &str) -> Result<Target, TargetError> {
        match name {
            "cpu" => Target::host(),
            "x86-64-v3" => Ok(Target::x86_64_v3()),
            "sm_80" | "sm_90a" => Ok(Target::gpu(name)),
            other => Err(TargetError::Unknown(other.into())),
        }
    }

    /// The machine this runs on.
    ///
    /// # Errors
    /// It lacks AVX2 or FMA.
    pub fn host() -> Result<Target, TargetError> {
        let cpu = TargetMachine::get_host_cpu_name().to_string();
        let features = known(&TargetMachine::get_host_cpu_features().to_string());
        let has = |name: &str| features.split(',').any(|f| f.strip_prefix('+') == Some(name));
        if !has("avx2") || !has("fma") {
            return Err(TargetError::TooOld(cpu));
        }
        let wide = ["avx512f", "avx512vl", "avx512bw", "avx512dq"].iter().all(|f| has(f));
        let (vector_bytes, registers) = if wide { (64, 32) } else { (32, 16) };
        Ok(Target {
            arch: Arch::X86_64,
            cpu,
            features,
            vector_bytes,
            registers,
            l1_way_bytes: L1_WAY_BYTES,
            l1_ways: l1_ways(),
            l2_bytes: l2_bytes(),
        })
    }

    /// Any x86-64 CPU with AVX2 and FMA.
    pub fn x86_64_v3() -> Target {
        Target {
            arch: Arch::X86_64,
            cpu: "x86-64-v3".into(),
            features: String::new(),
            vector_bytes: 32,
            registers: 16,
            l1_way_bytes: L1_WAY_BYTES,
            l1_ways: L1_WAYS,
            l2_bytes: 256 << 10,
        }
    }

    /// An NVIDIA GPU: `sm_80`, `sm_90a`. The oldest PTX version that has all that mcc uses, so that old drivers
    /// accept it.
    pub fn gpu(name: &str) -> Target {
        Target {
            arch: Arch::Nvptx,
            cpu: name.into(),
            features: "+ptx80".into(),
            vector_bytes: 128,
            registers: 255,
            l1_way_bytes: 0,
            l1_ways: 0,
            l2_bytes: 0,
        }
    }

    /// The same GPU, with the oldest PTX version whose kernels take so many bytes of parameters.
    pub fn taking(&self, parameter_bytes: usize) -> Target {
        let few = parameter_bytes <= FEW_PARAMETERS;
        Target { features: if few { self.features.clone() } else { "+ptx81".into() }, ..self.clone() }
    }

    /// Of GPUs, whose tiles products have.
    pub fn generation(&self) -> Option<Generation> {
        Generation::ALL.into_iter().find(|g| g.name() == self.cpu)
    }

    /// Whether warpgroups multiply out of shared memory.
    pub fn has_wgmma(&self) -> bool {
        self.generation() == Some(Generation::Sm90a)
    }

    /// f32 lanes of a vector register.
    pub fn lanes(&self) -> usize {
        self.vector_bytes as usize / 4
    }

    /// LLVM's object for this target.
    ///
    /// # Errors
    /// LLVM does not know the CPU.
    pub fn machine(&self) -> Result<TargetMachine, TargetError> {
        static INITIALISE: Once = Once::new();
        INITIALISE.call_once(|| {
            LlvmTarget::initialize_x86(&InitializationConfig::default());
            LlvmTarget::initialize_nvptx(&InitializationConfig::default());
        });
        let triple = TargetTriple::create(self.arch.triple());
        let target = LlvmTarget::from_triple(&triple).map_err(|e| TargetError::Llvm(e.to_string()))?;
        target
            .create_target_machine(&triple, &self.cpu, &self.features, OptimizationLevel::Default, RelocMode::PIC, CodeModel::Default)
            .ok_or_else(|| TargetError::Llvm(self.cpu.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kernels_may_not_use_is_turned_off() {
        assert_eq!(known("+avx2,-tbm,+amx-tile,-sha512"), "+avx2,-tbm,-amx-tile,-sha512");
    }

    /// Else a CPU that LLVM knows by its name might have a feature that the list says nothing of.
    #[test]
    fn the_machines_features_speak_of_all_that_kernels_may_use() {
        let features = TargetMachine::get_host_cpu_features().to_string();
        let silent = processor::OPTIONAL.into_iter().filter(|name| !features.split(',').any(|f| f.get(1..) == Some(*name)));
        assert_eq!(silent.collect::<Vec<_>>(), Vec::<&str>::new());
    }
}
