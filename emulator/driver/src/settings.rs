//! What the environment says of the machine that is pretended.

use std::path::PathBuf;
use std::time::Duration;

/// The settings of a process, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// GPUs (`EMULATED_GPUS`, 1).
    pub gpus: i32,
    /// Their compute capability (`EMULATED_GPU_CAPABILITY`, `9.0`).
    pub capability: [i32; 2],
    /// Their multiprocessors (`EMULATED_GPU_MULTIPROCESSORS`, 132).
    pub multiprocessors: i32,
    /// The seed of the order in which streams run (`EMULATED_GPU_SEED`): 0 runs what was issued last first, others
    /// are random.
    pub seed: u64,
    /// Threads that execute a kernel (`EMULATED_GPU_THREADS`, 1).
    pub threads: usize,
    /// The version that the driver reports (`EMULATED_DRIVER_VERSION`, 12040 for CUDA 12.4).
    pub driver: i32,
    /// The version that NCCL reports (`EMULATED_NCCL_VERSION`, 22203).
    pub nccl: i32,
    /// How long an exchange waits for other ranks until it is reported, in seconds (`EMULATED_NCCL_PATIENCE`, 120).
    pub patience: Duration,
    /// A directory in which machines that share files meet (`EMULATED_NCCL_SOCKETS`); else processes do in the
    /// machine's namespace of names.
    pub sockets: Option<PathBuf>,
    /// The number of the `cuStreamWaitEvent` that is ignored, from 0 (`EMULATED_GPU_FORGETS`). With it tests learn
    /// whether a missing wait is noticed.
    pub forgets: Option<u64>,
    /// Whether races on GPUs' memory are looked for, of warps, blocks and streams (`EMULATED_GPU_RACES`, 1).
    pub watches: bool,
}

impl Settings {
    /// Reads the settings from variables. Settings that are missing or no numbers keep their defaults.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Settings {
        let number = |name: &str, usual: u64| variable(name).and_then(|v| v.parse().ok()).unwrap_or(usual);
        let capability = variable("EMULATED_GPU_CAPABILITY").and_then(|v| {
            let (major, minor) = v.split_once('.')?;
            Some([major.parse().ok()?, minor.parse().ok()?])
        });
        Settings {
            gpus: number("EMULATED_GPUS", 1) as i32,
            capability: capability.unwrap_or([9, 0]),
            multiprocessors: number("EMULATED_GPU_MULTIPROCESSORS", 132) as i32,
            seed: number("EMULATED_GPU_SEED", 0),
            threads: number("EMULATED_GPU_THREADS", 1) as usize,
            driver: number("EMULATED_DRIVER_VERSION", 12_040) as i32,
            nccl: number("EMULATED_NCCL_VERSION", 22_203) as i32,
            patience: Duration::from_secs(number("EMULATED_NCCL_PATIENCE", 120)),
            sockets: variable("EMULATED_NCCL_SOCKETS").filter(|d| !d.is_empty()).map(PathBuf::from),
            forgets: variable("EMULATED_GPU_FORGETS").and_then(|v| v.parse().ok()),
            watches: number("EMULATED_GPU_RACES", 1) != 0,
        }
    }
}
