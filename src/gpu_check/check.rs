//! What all checks of a GPU need.

use crate::cli::GpuCheckArgs;
use anyhow::{Context, anyhow};
use runtime::gpu::cuda::Described;
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
        let program = std::env::current_exe().context("cannot find mcc's own executable")?;
        let ran = Command::new(program).args(line.split_whitespace()).current_dir(&self.work).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(anyhow!("mcc {line}: {}", text(&ran.stderr).trim())) }
    }

    /// Compiles a model; the artifact's directory.
    pub fn compile(&self, model: &str, flags: &str, target: &str) -> anyhow::Result<PathBuf> {
        let out = self.work.join(format!("{model}.mcc"));
        self.mcc(&format!("compile {} {flags} --target {target} -o {}", self.model(model).display(), out.display()))?;
        Ok(out)
    }
}
