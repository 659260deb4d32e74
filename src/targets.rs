//! What the kernels of a job are compiled for: those of devices, and those that run on the host beside GPUs.

use codegen::Target;
use codegen::target::{Arch, TargetError};
use ir::kernel::Kernel;
use ir::program::Space;
use runtime::target::{self, Processor};

/// Why names are no targets.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum TargetsError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("--host-target is for kernels beside GPUs: with `--target {0}` the host's are compiled for the same CPU")]
    NoHost(String),
    #[error("--host-target `{0}` is a GPU: hosts are `cpu` (this machine) or `x86-64-v3`")]
    HostIsGpu(String),
}

/// What the kernels of a job are compiled for, by where they run.
#[derive(Clone, Debug)]
pub struct Targets {
    /// A CPU or a GPU, for kernels of devices.
    pub device: Target,
    /// Where the device is a CPU, the same.
    host: Target,
}

impl Targets {
    /// By their names on the command line. Without a name for the host beside GPUs its kernels run on any CPU with
    /// AVX2, as PTX does on any GPU of its kind: where an artifact is made says nothing about where it runs.
    ///
    /// # Errors
    /// A name that is unknown; one for the host where that is the device; a GPU for the host.
    pub fn named(device: &str, host: Option<&str>) -> Result<Targets, TargetsError> {
        let device = Target::named(device)?;
        let host = match (device.arch, host) {
            (Arch::X86_64, None) => device.clone(),
            (Arch::X86_64, Some(_)) => {
                return Err(TargetsError::NoHost(device.cpu));
            }
            (Arch::Nvptx, None) => Target::x86_64_v3(),
            (Arch::Nvptx, Some(name)) => Target::named(name)?,
        };
        if host.arch != Arch::X86_64 {
            return Err(TargetsError::HostIsGpu(host.cpu));
        }
        Ok(Targets { device, host })
    }

    /// Those of an artifact, to make texts of its kernels.
    ///
    /// # Errors
    /// This machine lacks AVX2 or FMA.
    pub fn of_artifact(target: &target::Target) -> Result<Targets, TargetsError> {
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

    /// The target of a kernel, by where it runs.
    pub fn of(&self, kernel: &Kernel) -> &Target {
        match kernel.on {
            Space::Device => &self.device,
            Space::Host => &self.host,
        }
    }
}
