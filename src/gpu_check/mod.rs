//! `mcc gpu-check`: what there is to hold against a GPU, in one command, and how fast it is there. With `--device
//! emulated` the same checks run in the emulator.

mod bench;
mod check;
mod kernels;
mod report;
mod steps;
mod table;

use crate::cli::{DeviceKind, GpuCheckArgs, GpuPart};
use crate::failure::Failure;
use crate::itself;
use crate::misuse::misuse;
use crate::print::{out, progress};
use anyhow::{Context, anyhow};
use check::Check;
use codegen::Target;
use codegen::target::Arch;
use report::GpuReport;
use runtime::gpu::cuda;
use std::time::{SystemTime, UNIX_EPOCH};
use table::Table;

pub fn run(args: &GpuCheckArgs) -> Result<(), Failure> {
    if let Some(name) = &args.target
        && Target::named(name)?.arch != Arch::Nvptx
    {
        return Err(misuse!("--target {name} is a CPU, and the checks are of GPUs: sm_80 or sm_90a").into());
    }
    let (device, gpu) = match args.device {
        DeviceKind::Cuda => {
            let described = cuda::describe().map_err(|e| anyhow!("nothing was checked: {e}; --device emulated runs the checks in the emulator"))?;
            (runtime::target::DeviceKind::Cuda, Some(described))
        }
        DeviceKind::Emulated => (runtime::target::DeviceKind::Emulated, None),
        DeviceKind::Cpu => return Err(misuse!("the checks are of GPUs: --device cuda or emulated").into()),
    };
    // Instructions of sm_90a run on compute capability 9.0 alone.
    let usual = match &gpu {
        Some(g) if g.capability == [9, 0] => "sm_90a",
        Some(_) | None => "sm_80",
    };
    let work = std::path::absolute(&args.output)?.join("work");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let work = args.case.as_ref().map_or(work.clone(), |case| work.join(case.replace(':', "-")));
    std::fs::create_dir_all(&work).with_context(|| format!("`{}`", work.display()))?;
    let check = Check { args, device, gpu, target: args.target.clone().unwrap_or(usual.into()), seed: args.seed.unwrap_or(now), work };
    for (name, _) in itself::MODELS {
        itself::model(&check.work, name)?;
    }
    itself::text(&check.work.join("text.txt"), check.seed)?;
    if let Some(case) = &args.case {
        let found = match case.split_once(':').map(|(part, number)| (part, number.parse())) {
            Some(("kernels", Ok(k))) => serde_json::to_string(&kernels::of_case(&check, k)?)?,
            Some(("times", Ok(k))) => serde_json::to_string(&bench::of_case(&check, k)?)?,
            Some(_) | None => return Err(misuse!("--case {case} is no case").into()),
        };
        return Ok(out!("{found}\n")?);
    }
    progress!("{}, {}, seed {}", check.gpu.as_ref().map_or("emulator".into(), |g| g.name.clone()), check.target, check.seed);
    let mut report = GpuReport::new(&check);
    let (file, table) = (args.output.join("gpu-check.json"), args.output.join("gpu-check.md"));
    // Files are written after each part, so that a run that is ended early leaves its results.
    let written = |report: &GpuReport| -> anyhow::Result<()> {
        std::fs::write(&file, serde_json::to_string_pretty(report)? + "\n")?;
        Ok(std::fs::write(&table, report.text())?)
    };
    let asked = |part: GpuPart| args.only.is_empty() || args.only.contains(&part);
    if asked(GpuPart::Kernels) {
        report.kernels = Some(said(kernels::run(&check)?));
        written(&report)?;
    }
    if asked(GpuPart::Steps) {
        report.steps = Some(said(steps::run(&check)?));
        written(&report)?;
    }
    if asked(GpuPart::Nccl) {
        report.nccl = Some(said(steps::nccl(&check)?));
        written(&report)?;
    }
    if asked(GpuPart::Times) {
        report.benchmarks = Some(said(bench::run(&check)?));
        written(&report)?;
    }
    progress!("\nwritten: {}, {}", file.display(), table.display());
    match report.wrong() {
        0 => Ok(std::fs::remove_dir_all(&check.work)?),
        wrong => Err(anyhow!("{wrong} checks failed").into()),
    }
}

/// A part of the report, printed.
fn said<T: Table>(part: T) -> T {
    progress!("\n{}", part.table().trim_end());
    part
}
