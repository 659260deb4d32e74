//! What all checks of a GPU need.

use crate::cli::GpuCheckArgs;
use crate::itself;
use anyhow::{Context, anyhow};
use runtime::gpu::cuda::Described;
use serde::de::DeserializeOwned;
use std::path::PathBuf;
use std::process::Command;

/// What all parts need.
pub struct Check<'a> {
    pub args: &'a GpuCheckArgs,
    pub device: runtime::target::DeviceKind,
    /// None in the emulator.
    pub gpu: Option<Described>,
    pub target: String,
    pub seed: u64,
    /// Models, data, artifacts; kept if something is wrong.
    pub work: PathBuf,
}

impl Check<'_> {
    /// Why no times are taken.
    pub fn unmeasured(&self) -> Option<&'static str> {
        match self.gpu {
            None => Some("there is no GPU"),
            Some(_) => self.args.no_times.then_some("`--no-times`"),
        }
    }

    pub fn model(&self, name: &str) -> PathBuf {
        self.work.join(format!("{name}.mdl"))
    }

    /// This program with other arguments, in the work's directory; what it printed.
    pub fn mcc(&self, line: &str) -> anyhow::Result<String> {
        itself::mcc(line, &self.work)
    }

    /// One case of a part, in a process of its own: a kernel that a card does not survive ends no other case. What
    /// `of_case` of the part gives.
    pub fn case<T: DeserializeOwned>(&self, part: &str, number: usize) -> anyhow::Result<T> {
        let Check { args, device, target, seed, .. } = self;
        let quick = if args.quick { "--quick" } else { "" };
        let times = if args.no_times { "--no-times" } else { "" };
        let output = std::path::absolute(&args.output)?;
        let program = std::env::current_exe().context("cannot find mcc's own executable")?;
        let flags = format!("gpu-check --device {} --target {target} --seed {seed} {quick} {times} --case {part}:{number} --output", device.name());
        let ran = Command::new(program).args(flags.split_whitespace()).arg(output).output()?;
        match ran.status.success() {
            true => serde_json::from_slice(&ran.stdout).with_context(|| format!("what {part}:{number} found")),
            false => Err(anyhow!("{} ({})", String::from_utf8_lossy(&ran.stderr).trim(), ran.status)),
        }
    }

    /// Compiles a model; the artifact's directory.
    pub fn compile(&self, model: &str, flags: &str, target: &str) -> anyhow::Result<PathBuf> {
        let out = self.work.join(format!("{model}.mcc"));
        self.mcc(&format!("compile {} {flags} --target {target} -o {}", self.model(model).display(), out.display()))?;
        Ok(out)
    }
}
