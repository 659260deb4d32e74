//! What the kernels of a job are compiled for: those of devices, and those that run on the host beside GPUs.

use crate::Failure;
use crate::compile::cache_dir;
use anyhow::{Context, anyhow};
use codegen::target::Arch;
use codegen::{Compiled, Emit, Target, WorkerCommand, Workers};
use ir::kernel::Kernel;
use ir::program::Space;
use ir::progress::Progress;
use runtime::target::{self, Processor};

pub struct Targets {
    pub device: Target,
    /// Where the device is a CPU, the same.
    host: Target,
}

impl Targets {
    /// By their names on the command line. Without a name for the host beside GPUs its kernels run on any CPU with AVX2, as PTX does on any GPU of its kind:
    /// where an artifact is made says nothing about where it runs.
    ///
    /// # Errors
    /// A name that is unknown; one for the host where that is the device; a GPU for the host.
    pub fn named(device: &str, host: Option<&str>) -> Result<Targets, Failure> {
        let device = Target::named(device)?;
        let host = match (device.arch, host) {
            (Arch::X86_64, None) => device.clone(),
            (Arch::X86_64, Some(_)) => {
                return Err(anyhow!(
                    "--host-target is for kernels beside GPUs: with `--target {}` the host's are compiled for the same CPU",
                    device.cpu
                )
                .into());
            }
            (Arch::Nvptx, None) => Target::x86_64_v3(),
            (Arch::Nvptx, Some(name)) => Target::named(name)?,
        };
        if host.arch != Arch::X86_64 {
            return Err(anyhow!("--host-target `{}` is a GPU: hosts are `cpu` (this machine) or `x86-64-v3`", host.cpu).into());
        }
        Ok(Targets { device, host })
    }

    /// Those of an artifact, to make texts of its kernels.
    ///
    /// # Errors
    /// This machine lacks AVX2 or FMA.
    pub fn of_artifact(target: &target::Target) -> Result<Targets, Failure> {
        let cpu = |Processor { cpu, .. }: &Processor| if *cpu == Target::x86_64_v3().cpu { Ok(Target::x86_64_v3()) } else { Target::host() };
        let same = |device: Target| Targets { host: device.clone(), device };
        Ok(match target {
            target::Target::Cpu(processor) => same(cpu(processor)?),
            target::Target::Gpu { arch, host } => {
                Targets { device: Target::gpu(arch), host: host.as_ref().map_or_else(|| Ok(Target::x86_64_v3()), cpu)? }
            }
            target::Target::Reference => same(Target::host()?),
        })
    }

    /// What the artifact of a job with these kernels says of them.
    pub fn to_artifact(&self, kernels: &[Kernel]) -> target::Target {
        let processor = |t: &Target| Processor { cpu: t.cpu.clone(), features: t.features.clone() };
        match self.device.arch {
            Arch::X86_64 => target::Target::Cpu(processor(&self.device)),
            Arch::Nvptx => {
                let host = kernels.iter().any(|k| k.on == Space::Host).then(|| processor(&self.host));
                target::Target::Gpu { arch: self.device.cpu.clone(), host }
            }
        }
    }

    pub fn of(&self, kernel: &Kernel) -> &Target {
        match kernel.on {
            Space::Device => &self.device,
            Space::Host => &self.host,
        }
    }

    /// Compiles kernels in worker processes, through the cache, each for where it runs; in their order.
    pub fn generate(&self, kernels: &[Kernel], emit: Emit, cached: bool, progress: &Progress) -> Result<Vec<Compiled>, Failure> {
        let program = std::env::current_exe().context("cannot find mcc's own executable")?;
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        progress.enter("kernels");
        let workers = Workers::Processes { command: WorkerCommand { program, arguments: vec!["codegen-worker".into()] }, count };
        let cache = cached.then(cache_dir).flatten();
        let mut out: Vec<Option<Compiled>> = kernels.iter().map(|_| None).collect();
        for space in Space::ALL {
            let (places, here): (Vec<usize>, Vec<Kernel>) = kernels.iter().cloned().enumerate().filter(|(_, k)| k.on == space).unzip();
            let Some(first) = here.first() else { continue };
            let compiled = codegen::compile(&here, self.of(first), emit, cache.as_deref(), &workers, progress)?;
            places.into_iter().zip(compiled).for_each(|(k, c)| out[k] = Some(c));
        }
        Ok(out.into_iter().map(|c| c.expect("invariant: kernels of a job differ, and each runs in one place")).collect())
    }
}
