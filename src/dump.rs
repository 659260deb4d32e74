//! `mcc dump`.

use crate::cli::{DumpArgs, Level};
use crate::compile::generate;
use crate::costs;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::misuse::misuse;
use crate::print::out;
use crate::schedule_svg;
use anyhow::anyhow;
use codegen::Emit;
use codegen::target::Arch;
use ir::graph::{Body, Value};
use ir::kernel::Kernel;
use ir::launch::Launch;
use ir::program::{Action, Job, Program};
use ir::progress::Progress;
use mcc::targets::Targets;
use passes::report::pipeline_timeline::{UNIT, timeline};
use runtime::artifact::{AcceptedArtifacts, Artifact};
use std::collections::BTreeSet;
use std::fmt::Write as _;

pub fn run(args: &DumpArgs) -> Result<(), Failure> {
    files::look(&args.artifact, ExpectedInput::Artifact)?;
    let artifact = runtime::artifact::read(&args.artifact, &AcceptedArtifacts::Anyones)?;
    let job = &artifact.job;
    if let Some(k) = args.class
        && k >= job.programs.len()
    {
        return Err(misuse!("there is no class {k}: the artifact has {} (0 to {})", job.programs.len(), job.programs.len() - 1).into());
    }
    if let Some(k) = args.kernel {
        if args.costs || !matches!(args.level, Level::Kernel | Level::Mlir | Level::Llvm | Level::Asm | Level::Ptx) {
            return Err(misuse!("--kernel goes with --level kernel, mlir, llvm, asm or ptx, without --costs").into());
        }
        if k >= job.kernels.len() {
            return Err(
                misuse!("there is no kernel {k}: the artifact has {} (0 to {})", job.kernels.len(), job.kernels.len().saturating_sub(1)).into()
            );
        }
    }
    if args.svg {
        if args.level != Level::Schedule || args.costs {
            return Err(misuse!("--svg goes with --level schedule").into());
        }
        out!("{}", schedule_svg::picture(&timeline(job, UNIT)))?;
        return Ok(());
    }
    if args.costs || args.card.is_some() || args.json {
        if args.level != Level::Ptx || !args.costs {
            return Err(misuse!("--costs goes with --level ptx, and --card and --json with --costs").into());
        }
        return costs::run(&artifact, args);
    }
    match args.level {
        Level::Graph | Level::Sharded | Level::Schedule => out!("{}", saved(&artifact, &format!("{}.txt", args.level.name()))?)?,
        Level::Local => {
            // There is a local graph for each program.
            for k in (0..job.programs.len()).filter(|k| args.class.is_none_or(|class| class == *k)) {
                out!("{}", saved(&artifact, &format!("local.{k}.txt"))?)?;
            }
        }
        Level::Program => {
            for (k, p) in job.programs.iter().enumerate().filter(|(k, _)| args.class.is_none_or(|c| c == *k)) {
                out!("// class {k}\n{}", program_text(job, k as u32, p))?;
            }
        }
        Level::Kernel | Level::Mlir | Level::Llvm | Level::Asm | Level::Ptx => {
            let of_schedule: Vec<String> = match args.level {
                Level::Mlir => of_level(&artifact, "", ".mlir").into_iter().filter(|n| !n.starts_with("k_")).collect(),
                _ => vec![],
            };
            let of_schedule = if args.kernel.is_some() { vec![] } else { of_schedule };
            for name in &of_schedule {
                out!("{}", saved(&artifact, name)?)?;
            }
            let targets = Targets::of_artifact(&artifact.manifest.target)?;
            let used: Vec<usize> = job
                .programs
                .iter()
                .enumerate()
                .filter(|(k, _)| args.class.is_none_or(|c| c == *k))
                .flat_map(|(_, p)| p.bodies.iter().flat_map(|b| &b.commands))
                .filter_map(|c| if let Action::Launch { kernel, .. } = &c.action { Some(kernel.index()) } else { None })
                .filter(|k| args.kernel.is_none_or(|kernel| kernel == *k))
                .collect::<BTreeSet<usize>>()
                .into_iter()
                .collect();
            let texts = match args.level {
                Level::Ptx => shipped(&artifact, &used)?,
                _ => kernel_texts(job, &used, args.level, &targets, &Progress::default())?,
            };
            if texts.is_empty() && of_schedule.is_empty() {
                let other = if args.level == Level::Mlir { "llvm" } else { "kernel" };
                return Err(
                    misuse!("no kernel that is asked for is made by way of `{}`: --level {other} shows what they are", args.level.name()).into()
                );
            }
            // As programs name them: `launch kernel 1`.
            let names: Vec<(usize, String)> = used.iter().map(|k| (*k, job.kernels[*k].name())).collect();
            for (name, text) in texts {
                let comment = match args.level {
                    Level::Asm => "#",
                    Level::Llvm => ";",
                    _ => "//",
                };
                let number = names.iter().find(|(_, own)| name.split('.').next() == Some(own));
                let number = number.map_or(String::new(), |(k, _)| format!("kernel {k}: "));
                out!("{comment} {number}{name}\n{text}")?;
            }
        }
    }
    Ok(())
}

/// A program with the stages that run it.
pub fn program_text(job: &Job, class: u32, program: &Program) -> String {
    let stages = (0u64..).zip(&job.stages).filter(|(_, s)| s.program == class).map(|(k, s)| (k, s.schedule.clone())).collect();
    ir::text::print_program(&(job.mesh.clone(), program.clone(), stages))
}

/// The PTX as it will run of these kernels, but for those of the host, which have none.
fn shipped(artifact: &Artifact, used: &[usize]) -> Result<Vec<(String, String)>, Failure> {
    if !matches!(artifact.manifest.target, runtime::target::Target::Gpu { .. }) {
        return Err(misuse!("`{}` has no PTX: compile with --target sm_80 or sm_90a", artifact.dir.display()).into());
    }
    let text = |k: &usize| {
        let entry = &artifact.kernels[*k];
        Ok((format!("{}.ptx", entry.name), annotated(&artifact.job, *k, entry.launch.as_ref(), artifact.ptx(entry))))
    };
    used.iter().filter(|k| artifact.kernels[**k].launch.is_some()).map(text).collect()
}

/// PTX with what it computes: how it is launched, and each op with its place in the model text, above it and where it
/// is computed. Layers share kernels, so places are those of the first layer that has it.
fn annotated(job: &Job, kernel: usize, launch: Option<&Launch>, ptx: &str) -> String {
    let body = &job.kernels[kernel].body;
    let mut out = String::new();
    if let Some(l) = launch {
        let most = l.resident.map_or(String::new(), |r| format!(", {r} at most on a multiprocessor"));
        let clusters = if l.cluster > 1 { format!(", in clusters of {}", l.cluster) } else { String::new() };
        let of = [l.shared_bytes.into(), l.scratch_bytes];
        let _ = writeln!(out, "// {} blocks of {} threads{clusters}{most}, {} bytes of shared memory, {} of scratch", l.grid, l.block, of[0], of[1]);
    }
    for v in body.values().filter(|v| !body[*v].op.is_source()) {
        let _ = writeln!(out, "// {}", described(job, body, v));
    }
    for line in ptx.lines() {
        let _ = match located(line) {
            Some(v) if v.index() < body.nodes.len() => writeln!(out, "\t// {}", described(job, body, v)),
            // This `.loc` belongs to no op.
            _ if line.trim_start().starts_with(".loc") => Ok(()),
            _ => writeln!(out, "{line}"),
        };
    }
    out
}

/// The value whose computation a line of PTX announces (`codegen`'s `.loc`: its number, counted from 1).
fn located(line: &str) -> Option<Value> {
    let mut words = line.trim_start().strip_prefix(".loc")?.split_whitespace();
    Some(Value(words.nth(1)?.parse::<u32>().ok()?.checked_sub(1)?))
}

/// An op with its place in the model text.
fn described(job: &Job, body: &Body, v: Value) -> String {
    let node = &body[v];
    let place = node.origin.span.map(|s| format!("{}: ", job.place(s))).unwrap_or_default();
    let scope = if node.origin.scope.is_empty() { String::new() } else { format!(" of {}", node.origin.scope) };
    format!("{place}{}{scope}", node.op.name())
}

/// The text of these kernels of a job at a level, each for where it runs, by file name. Kernels of the host have no
/// PTX.
pub fn kernel_texts(job: &Job, used: &[usize], level: Level, targets: &Targets, progress: &Progress) -> Result<Vec<(String, String)>, Failure> {
    let kernels: Vec<Kernel> = used.iter().map(|k| job.kernels[*k].clone()).collect();
    if level == Level::Kernel {
        return Ok(kernels.iter().map(|k| (format!("{}.txt", k.name()), ir::text::print_kernel(k))).collect());
    }
    if level == Level::Ptx {
        if targets.device.arch != Arch::Nvptx {
            return Err(misuse!("PTX is for GPUs: compile with --target sm_80 or sm_90a").into());
        }
        let compiled = generate(&kernels, targets, Emit::default(), true, progress)?;
        let text = |(k, c): (&usize, codegen::Compiled)| {
            let ptx = String::from_utf8_lossy(&c.object).into_owned();
            (format!("{}.ptx", c.name), annotated(job, *k, c.launch.as_ref(), &ptx))
        };
        return Ok(used.iter().zip(compiled).filter(|(_, c)| c.launch.is_some()).map(text).collect());
    }
    let emit = Emit { mlir: level == Level::Mlir, llvm: level == Level::Llvm, asm: level == Level::Asm };
    let compiled = generate(&kernels, targets, emit, true, progress)?;
    let (text, ending): (fn(codegen::Compiled) -> Option<String>, &str) = match level {
        Level::Mlir => (|c| c.mlir, "mlir"),
        Level::Llvm => (|c| c.llvm, "ll"),
        Level::Asm => (|c| c.asm, "s"),
        Level::Graph | Level::Sharded | Level::Local | Level::Schedule | Level::Program | Level::Kernel | Level::Ptx => {
            unreachable!("invariant: not a level of machine code")
        }
    };
    Ok(compiled.into_iter().filter_map(|c| Some((format!("{}.{ending}", c.name.clone()), text(c)?))).collect())
}

fn saved(artifact: &Artifact, name: &str) -> Result<String, Failure> {
    let level = name.split('.').next().unwrap_or(name);
    Ok(artifact.dump(name)?.ok_or_else(|| anyhow!("the artifact has no dump `{name}`: compile with --emit {level}"))?)
}

/// The names of dumps that begin and end so, shorter ones first.
fn of_level(artifact: &Artifact, start: &str, end: &str) -> Vec<String> {
    let mut names: Vec<String> = artifact.dumps().filter(|n| n.starts_with(start) && n.ends_with(end)).map(str::to_owned).collect();
    names.sort_by_key(|n| (n.len(), n.clone()));
    names
}
