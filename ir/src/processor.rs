//! The features of x86-64 processors that kernels may use, by LLVM's names.
//!
//! Code generation turns every other feature of the machine off, and the runtime refuses an artifact that names one it does not know or does not find.
//! So what both know is one list.

/// The features that every x86-64 processor has.
pub const BASELINE: [&str; 7] = ["64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2"];

/// The features beyond [`BASELINE`] that kernels may use where the processor has them. Left out is what no kernel needs (keys, tiles of AMX, random
/// numbers, ..) and what Rust's standard library cannot look for.
pub const OPTIONAL: [&str; 40] = [
    "adx",
    "aes",
    "avx",
    "avx2",
    "avx512bf16",
    "avx512bitalg",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512f",
    "avx512fp16",
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vl",
    "avx512vnni",
    "avx512vp2intersect",
    "avx512vpopcntdq",
    "avxifma",
    "avxneconvert",
    "avxvnni",
    "avxvnniint16",
    "avxvnniint8",
    "bmi",
    "bmi2",
    "f16c",
    "fma",
    "gfni",
    "lzcnt",
    "movbe",
    "pclmul",
    "popcnt",
    "sse3",
    "sse4.1",
    "sse4.2",
    "sse4a",
    "ssse3",
    "tbm",
    "vaes",
    "vpclmulqdq",
];

/// Whether kernels may use a feature.
pub fn is_known(feature: &str) -> bool {
    BASELINE.contains(&feature) || OPTIONAL.contains(&feature)
}
