//! What `mcc gpu-check` found, for programs and for people.

use super::bench::Benchmarks;
use super::check::Check;
use super::kernels::Kernels;
use super::steps::Steps;
use super::table::Table;
use runtime::gpu::cuda::Described;
use serde::Serialize;

#[derive(Serialize)]
pub struct GpuReport {
    mcc: &'static str,
    /// None: the emulator.
    gpu: Option<Described>,
    target: String,
    seed: u64,
    /// Whether times mean anything.
    measured: bool,
    /// None: not asked for, as the others.
    pub kernels: Option<Kernels>,
    pub steps: Option<Steps>,
    pub nccl: Option<Steps>,
    pub benchmarks: Option<Benchmarks>,
}

impl GpuReport {
    pub fn new(check: &Check) -> GpuReport {
        GpuReport {
            mcc: env!("CARGO_PKG_VERSION"),
            gpu: check.gpu.clone(),
            target: check.target.clone(),
            seed: check.seed,
            measured: check.unmeasured().is_none(),
            kernels: None,
            steps: None,
            nccl: None,
            benchmarks: None,
        }
    }

    fn parts(&self) -> Vec<&dyn Table> {
        fn table<T: Table>(part: &Option<T>) -> Option<&dyn Table> {
            part.as_ref().map(|p| p as &dyn Table)
        }
        [table(&self.kernels), table(&self.steps), table(&self.nccl), table(&self.benchmarks)].into_iter().flatten().collect()
    }

    pub fn wrong(&self) -> usize {
        self.parts().iter().map(|p| p.wrong()).sum()
    }

    pub fn text(&self) -> String {
        let on = self.gpu.as_ref().map_or("the emulator".to_owned(), |g| g.name.clone());
        let head = format!("# mcc {} on {on} ({}), seed {}\n\n", self.mcc, self.target, self.seed);
        head + &self.parts().iter().map(|p| p.table()).collect::<Vec<_>>().join("\n")
    }
}
