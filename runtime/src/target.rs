//! What an artifact's code was made for, and whether it runs here.

use ir::processor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Which device runs the kernels of an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Target {
    /// Native code.
    Cpu(Processor),
    /// PTX for an NVIDIA GPU: `sm_80`, `sm_90a`; and native code of kernels that run on the host, if there are any.
    Gpu {
        /// The architecture by NVIDIA's name: `sm_80`, `sm_90a`.
        arch: String,
        /// The CPU that the host's kernels were compiled for; none if there are no such kernels.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Processor>,
    },
    /// No code: kernels are interpreted in f64. Slow and exact.
    Reference,
}

/// A CPU by LLVM's names: `znver5` or `x86-64-v3`, and `+avx2,+fma,-avx512f`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processor {
    /// The CPU's name: `znver5`, `x86-64-v3`.
    pub cpu: String,
    /// Features that are on or off, separated by commas; empty where the CPU's name says all.
    pub features: String,
}

/// What runs kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// Native code, on threads of this machine.
    Cpu,
    /// PTX, on NVIDIA GPUs.
    Cuda,
    /// PTX, in the emulator.
    Emulated,
    /// Definitions, interpreted.
    Reference,
}

/// How ranks exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exchanges {
    /// Through memory of a machine that its ranks share, and over TCP between machines.
    #[default]
    Host,
    /// By the host's MPI.
    Mpi,
    /// GPUs by themselves, each rank having one of its own.
    Nccl,
}

impl DeviceKind {
    /// What messages call it: `cpu`, `cuda`, `emulated` or `reference`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Emulated => "emulated",
            DeviceKind::Reference => "reference",
        }
    }
}

/// Code for another CPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum TargetError {
    #[error("its kernels are for a CPU with {}, of which this mcc does not know whether this one has it", .0.join(", "))]
    Unknown(Vec<String>),
    #[error("its kernels need a CPU with {}, which this one lacks", .0.join(", "))]
    Device(Vec<String>),
    #[error("its kernels on the host need a CPU with {}, which this one lacks (`--host-target x86-64-v3` makes code for any with AVX2)", .0.join(", "))]
    Host(Vec<String>),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Cpu(Processor { cpu, .. }) => write!(f, "the CPU {cpu}"),
            Target::Gpu { arch, .. } => write!(f, "GPUs ({arch})"),
            Target::Reference => f.write_str("the reference device"),
        }
    }
}

impl Target {
    /// What its code is made for, by LLVM's name.
    pub fn arch(&self) -> String {
        match self {
            Target::Cpu(Processor { cpu, .. }) => cpu.clone(),
            Target::Gpu { arch, .. } => arch.clone(),
            Target::Reference => "reference".into(),
        }
    }

    /// The devices that run it, the usual one first.
    pub fn devices(&self) -> &'static [DeviceKind] {
        match self {
            Target::Cpu(_) => &[DeviceKind::Cpu],
            Target::Gpu { .. } => &[DeviceKind::Cuda, DeviceKind::Emulated],
            Target::Reference => &[DeviceKind::Reference],
        }
    }

    /// Whether this CPU has what the code uses.
    ///
    /// # Errors
    /// The features that are missing.
    pub fn check(&self) -> Result<(), TargetError> {
        let (needs, error): (_, fn(Vec<String>) -> TargetError) = match self {
            Target::Cpu(processor) => (processor.needs(), TargetError::Device),
            // Whether PTX runs here is up to the device: the emulator runs it anywhere.
            Target::Gpu { host: Some(processor), .. } => (processor.needs(), TargetError::Host),
            Target::Gpu { host: None, .. } | Target::Reference => return Ok(()),
        };
        let named = |keep: fn(&str) -> bool| needs.iter().filter(|f| keep(f)).map(|f| f.to_string()).collect::<Vec<_>>();
        let (unknown, lacks) = (named(|f| here(f).is_none()), named(|f| here(f) == Some(false)));
        match (unknown.is_empty(), lacks.is_empty()) {
            (false, _) => Err(TargetError::Unknown(unknown)),
            (true, false) => Err(error(lacks)),
            (true, true) => Ok(()),
        }
    }
}

impl Processor {
    /// The features that its code may use: those that it names, and those that its CPU has by LLVM's tables. Of a CPU
    /// that has no table here these are all that kernels may use at all, but for those that are turned off by name.
    fn needs(&self) -> BTreeSet<&str> {
        let words = || self.features.split(',').filter(|f| !f.is_empty());
        let off = |feature: &&str| words().any(|f| f.strip_prefix('-') == Some(*feature));
        let of_cpu = level(&self.cpu).unwrap_or(&processor::OPTIONAL);
        // A word without a sign counts as a feature that is turned on.
        let named = words().filter(|f| !f.starts_with('-')).map(|f| f.strip_prefix('+').unwrap_or(f));
        named.chain(of_cpu.iter().copied().filter(|f| !off(f))).collect()
    }
}

/// The features of the CPU levels, beyond those of every CPU.
fn level(cpu: &str) -> Option<&'static [&'static str]> {
    match cpu {
        "x86-64" => Some(&[]),
        "x86-64-v2" => Some(&["popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"]),
        "x86-64-v3" => Some(&["avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"]),
        "x86-64-v4" => Some(&["avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
        _ => None,
    }
}

/// Whether this CPU has a feature of LLVM's name; none for features that no kernel may use ([`ir::processor`]).
#[cfg(target_arch = "x86_64")]
fn here(feature: &str) -> Option<bool> {
    if processor::BASELINE.contains(&feature) {
        return Some(true);
    }
    macro_rules! known {
        ($($llvm:literal = $rust:tt),* $(,)?) => {
            match feature {
                $($llvm => Some(std::is_x86_feature_detected!($rust)),)*
                _ => None,
            }
        };
    }
    known! {
        "aes" = "aes", "pclmul" = "pclmulqdq", "sse3" = "sse3", "ssse3" = "ssse3", "sse4.1" = "sse4.1", "sse4.2" = "sse4.2", "sse4a" = "sse4a", "popcnt" = "popcnt",
        "avx" = "avx", "avx2" = "avx2", "fma" = "fma", "f16c" = "f16c", "bmi" = "bmi1", "bmi2" = "bmi2", "lzcnt" = "lzcnt",
        "movbe" = "movbe", "adx" = "adx", "tbm" = "tbm", "gfni" = "gfni", "vaes" = "vaes", "vpclmulqdq" = "vpclmulqdq",
        "avxvnni" = "avxvnni", "avxifma" = "avxifma", "avxneconvert" = "avxneconvert", "avxvnniint8" = "avxvnniint8",
        "avxvnniint16" = "avxvnniint16", "avx512f" = "avx512f", "avx512bw" = "avx512bw", "avx512cd" = "avx512cd",
        "avx512dq" = "avx512dq", "avx512vl" = "avx512vl", "avx512ifma" = "avx512ifma", "avx512vbmi" = "avx512vbmi",
        "avx512vbmi2" = "avx512vbmi2", "avx512vnni" = "avx512vnni", "avx512bitalg" = "avx512bitalg",
        "avx512vpopcntdq" = "avx512vpopcntdq", "avx512bf16" = "avx512bf16", "avx512fp16" = "avx512fp16",
        "avx512vp2intersect" = "avx512vp2intersect",
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn here(_: &str) -> Option<bool> {
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_that_kernels_may_use_can_be_looked_for() {
        let unknown: Vec<&str> = processor::OPTIONAL.into_iter().chain(processor::BASELINE).filter(|f| here(f).is_none()).collect();
        assert_eq!(unknown, Vec::<&str>::new());
    }

    #[test]
    fn code_that_may_use_more_than_is_here_is_refused() {
        let all_off = processor::OPTIONAL.map(|f| format!("-{f}")).join(",");
        let unknown = |f: &str| Err(format!("its kernels are for a CPU with {f}, of which this mcc does not know whether this one has it"));
        let lacks = |f: &str| Err(format!("its kernels need a CPU with {f}, which this one lacks"));
        // Hardly any machine has both of these features.
        let missing = if here("tbm") == Some(true) { "avx512vp2intersect" } else { "tbm" };
        let cases = [
            ("x86-64", "".to_owned(), Ok(())),
            ("x86-64", "+sse2,-avx512f".to_owned(), Ok(())),
            ("znver5", all_off.clone(), Ok(())),
            ("znver5", format!("{all_off},-amx-tile"), Ok(())),
            ("x86-64", "+6aes".to_owned(), unknown("6aes")),
            ("x86-64", "sse2x".to_owned(), unknown("sse2x")),
            ("x86-64", "+sse2,+amx-tile,+avx10.1,+sha512".to_owned(), unknown("amx-tile, avx10.1, sha512")),
            ("x86-64", format!("+{missing}"), lacks(missing)),
            // The list does not turn this feature off, so the CPU's name lets kernels use it.
            ("bdver4", all_off.replace(&format!("-{missing}"), "-xop"), lacks(missing)),
        ];
        for (cpu, features, wanted) in cases {
            let target = Target::Cpu(Processor { cpu: cpu.into(), features: features.clone() });
            assert_eq!(target.check().map_err(|e| e.to_string()), wanted, "{cpu} {features}");
        }
    }
}
