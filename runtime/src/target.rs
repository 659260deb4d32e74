//! What an artifact's code was made for, and whether it runs here.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which device runs the kernels of an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Target {
    /// Native code.
    Cpu(Processor),
    /// PTX for an NVIDIA GPU: `sm_80`, `sm_90a`; and native code of kernels that run on the host, if there are any.
    Gpu {
        arch: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Processor>,
    },
    /// No code: kernels are interpreted in f64. Slow and exact.
    Reference,
}

/// A CPU by LLVM's names: `znver5` or `x86-64-v3`, and `+avx2,+fma,-avx512f`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    pub cpu: String,
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

/// How ranks' devices exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exchanges {
    /// Through memory of this machine that all ranks share.
    #[default]
    Host,
    /// GPUs by themselves, each rank having one of its own.
    Nccl,
}

impl DeviceKind {
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
pub enum TargetError {
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
        let (lacks, error): (_, fn(Vec<String>) -> TargetError) = match self {
            Target::Cpu(processor) => (processor.lacks(), TargetError::Device),
            // What runs PTX is a device's to say: the emulator does anywhere.
            Target::Gpu { host: Some(processor), .. } => (processor.lacks(), TargetError::Host),
            Target::Gpu { host: None, .. } | Target::Reference => return Ok(()),
        };
        if lacks.is_empty() { Ok(()) } else { Err(error(lacks)) }
    }
}

impl Processor {
    /// The features of it that this CPU lacks.
    fn lacks(&self) -> Vec<String> {
        let named = self.features.split(',').filter_map(|f| f.strip_prefix('+'));
        named.chain(implied(&self.cpu).iter().copied()).filter(|f| here(f) == Some(false)).map(str::to_owned).collect()
    }
}

/// Features of the CPU levels that have no features of their own in a target.
fn implied(cpu: &str) -> &'static [&'static str] {
    match cpu {
        "x86-64-v3" => &["avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"],
        "x86-64-v4" => &["avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"],
        _ => &[],
    }
}

/// Whether this CPU has a feature of LLVM's name; none for features whose instructions no compiler emits unasked.
#[cfg(target_arch = "x86_64")]
fn here(feature: &str) -> Option<bool> {
    macro_rules! known {
        ($($llvm:literal = $rust:tt),* $(,)?) => {
            match feature {
                $($llvm => Some(std::is_x86_feature_detected!($rust)),)*
                _ => None,
            }
        };
    }
    known! {
        "sse3" = "sse3", "ssse3" = "ssse3", "sse4.1" = "sse4.1", "sse4.2" = "sse4.2", "sse4a" = "sse4a", "popcnt" = "popcnt",
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
