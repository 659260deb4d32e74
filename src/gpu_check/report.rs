//! What `mcc gpu-check` found, for programs and for people.

use super::bench::Benchmarks;
use super::check::Check;
use super::kernels::Kernels;
use super::steps::Steps;
use super::table::Table;
use runtime::gpu::cuda::Described;
use serde::Serialize;

#[derive(Serialize)]
pub struct Report {
    mcc: &'static str,
    /// None: the emulator.
    gpu: Option<Described>,
    target: String,
    seed: u64,
    /// Whether times mean anything.
    measured: bool,
    pub kernels: Kernels,
    pub steps: Steps,
    pub nccl: Steps,
    pub benchmarks: Benchmarks,
}

impl Report {
    pub fn new(check: &Check) -> Report {
        Report {
            mcc: env!("CARGO_PKG_VERSION"),
            gpu: check.gpu.clone(),
            target: check.target.clone(),
            seed: check.seed,
            measured: check.unmeasured().is_none(),
            kernels: Kernels::default(),
            steps: Steps::default(),
            nccl: Steps::default(),
            benchmarks: Benchmarks::default(),
        }
    }

    fn parts(&self) -> [&dyn Table; 4] {
        [&self.kernels, &self.steps, &self.nccl, &self.benchmarks]
    }

    pub fn wrong(&self) -> usize {
        self.parts().iter().map(|p| p.wrong()).sum()
    }

    pub fn text(&self) -> String {
        let on = self.gpu.as_ref().map_or("the emulator".to_owned(), |g| g.name.clone());
        let head = format!("# mcc {} on {on} ({}), seed {}\n\n", self.mcc, self.target, self.seed);
        head + &self.parts().map(|p| p.table()).join("\n")
    }
}
