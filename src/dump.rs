//! `mcc dump`.

use crate::Failure;
use crate::cli::{DumpArgs, Level};
use crate::compile::generate;
use anyhow::{Context, anyhow};
use codegen::{Emit, Target};
use ir::kernel::Kernel;
use ir::program::{Action, Job, Program};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

pub fn run(args: &DumpArgs) -> Result<(), Failure> {
    let artifact = runtime::artifact::read(&args.artifact)?;
    let job = &artifact.job;
    if let Some(k) = args.class
        && k >= job.programs.len()
    {
        return Err(anyhow!("there is no class {k}: the artifact has {} (0 to {})", job.programs.len(), job.programs.len() - 1).into());
    }
    let mut out = std::io::stdout().lock();
    match args.level {
        Level::Graph | Level::Sharded | Level::Schedule => out.write_all(saved(&args.artifact, &format!("{}.txt", args.level.name()))?.as_bytes())?,
        Level::Local => {
            for name in of_level(&args.artifact, "local.", ".txt")?.into_iter().filter(|n| args.class.is_none_or(|k| *n == format!("local.{k}.txt")))
            {
                out.write_all(saved(&args.artifact, &name)?.as_bytes())?;
            }
        }
        Level::Program => {
            for (k, p) in job.programs.iter().enumerate().filter(|(k, _)| args.class.is_none_or(|c| c == *k)) {
                writeln!(out, "// class {k}")?;
                out.write_all(program_text(job, k as u32, p).as_bytes())?;
            }
        }
        Level::Kernel | Level::Mlir | Level::Llvm | Level::Asm => {
            if args.level == Level::Mlir {
                for name in of_level(&args.artifact, "", ".mlir")?.into_iter().filter(|n| !n.starts_with("k_")) {
                    out.write_all(saved(&args.artifact, &name)?.as_bytes())?;
                }
            }
            let target = match &artifact.manifest.target {
                runtime::target::Target::Cpu { cpu, .. } => {
                    if *cpu == Target::x86_64_v3().cpu {
                        Target::x86_64_v3()
                    } else {
                        Target::host()?
                    }
                }
                runtime::target::Target::Reference => Target::host()?,
            };
            let used: BTreeSet<usize> = job
                .programs
                .iter()
                .enumerate()
                .filter(|(k, _)| args.class.is_none_or(|c| c == *k))
                .flat_map(|(_, p)| p.bodies.iter().flat_map(|b| &b.commands))
                .filter_map(|c| if let Action::Launch { kernel, .. } = &c.action { Some(kernel.index()) } else { None })
                .collect();
            let kernels: Vec<Kernel> = used.into_iter().map(|k| job.kernels[k].clone()).collect();
            for (name, text) in kernel_texts(&kernels, args.level, &target)? {
                writeln!(
                    out,
                    "{} {name}",
                    if args.level == Level::Asm {
                        "#"
                    } else if args.level == Level::Llvm {
                        ";"
                    } else {
                        "//"
                    }
                )?;
                out.write_all(text.as_bytes())?;
            }
        }
    }
    out.flush()?;
    Ok(())
}

/// A program with the stages that run it.
pub fn program_text(job: &Job, class: u32, program: &Program) -> String {
    let stages = (0u64..).zip(&job.stages).filter(|(_, s)| s.program == class).map(|(k, s)| (k, s.schedule.clone())).collect();
    ir::text::print_program(&(job.mesh.clone(), program.clone(), stages))
}

/// The text of every kernel at a level, by file name.
pub fn kernel_texts(kernels: &[Kernel], level: Level, target: &Target) -> Result<Vec<(String, String)>, Failure> {
    if level == Level::Kernel {
        return Ok(kernels.iter().map(|k| (format!("{}.txt", k.name()), ir::text::print_kernel(k))).collect());
    }
    let emit = Emit { mlir: level == Level::Mlir, llvm: level == Level::Llvm, asm: level == Level::Asm };
    let compiled = generate(kernels, target, emit, true)?;
    let (text, ending): (fn(codegen::Compiled) -> Option<String>, &str) = match level {
        Level::Mlir => (|c| c.mlir, "mlir"),
        Level::Llvm => (|c| c.llvm, "ll"),
        Level::Asm => (|c| c.asm, "s"),
        Level::Graph | Level::Sharded | Level::Local | Level::Schedule | Level::Program | Level::Kernel => {
            unreachable!("invariant: not a level of machine code")
        }
    };
    Ok(compiled.into_iter().filter_map(|c| Some((format!("{}.{ending}", c.name.clone()), text(c)?))).collect())
}

fn saved(artifact: &Path, name: &str) -> Result<String, Failure> {
    let path = artifact.join("dumps").join(name);
    Ok(std::fs::read_to_string(&path)
        .with_context(|| format!("the artifact has no dump `{name}`: compile with --emit {}", name.split('.').next().unwrap_or(name)))?)
}

fn of_level(artifact: &Path, start: &str, end: &str) -> Result<Vec<String>, Failure> {
    let mut names: Vec<String> = std::fs::read_dir(artifact.join("dumps"))?
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| n.starts_with(start) && n.ends_with(end))
        .collect();
    names.sort_by_key(|n| (n.len(), n.clone()));
    Ok(names)
}
